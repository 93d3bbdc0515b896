//! Copies that GPUs make for transfers: one thread looks at all of them, and callers that wait look at their own.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Launched;
use crate::cuda::watch::{Watched, pause_since, watch};
use crate::transfer::{Help, TransferCore};
use crate::{Error, Result};

/// A copy that waits for a stream gets this long after its transfer was stopped; then the transfer ends without it.
const GRACE: Duration = Duration::from_millis(50);

/// How often the thread sees to it that a caller is still there which looks in its place.
const HELPED: Duration = Duration::from_millis(1);

const UNREPORTED: u8 = 0;
const REPORTED: u8 = 1;

/// One copy that is in flight for a transfer.
pub(super) struct Flight {
    transfer: Arc<TransferCore>,
    launched: Mutex<Launched>,
    began: Instant,
    stopped: Mutex<Option<Instant>>,
    /// Whether the transfer has been notified of how its units ended.
    report: AtomicU8,
    over: AtomicBool,
    /// Callers that look at it by themselves: two threads that ask the driver hold each other up.
    helpers: AtomicUsize,
}

impl Flight {
    pub(super) fn begin(launched: Launched, transfer: &Arc<TransferCore>) {
        transfer.engaged();
        let flight = Arc::new(Flight {
            transfer: Arc::clone(transfer),
            launched: Mutex::new(launched),
            began: Instant::now(),
            stopped: Mutex::new(None),
            report: AtomicU8::new(UNREPORTED),
            over: AtomicBool::new(false),
            helpers: AtomicUsize::new(0),
        });
        let weak = Arc::downgrade(&flight);
        let help: Weak<dyn Help> = weak;
        transfer.set_help(help);
        watch(flight);
    }

    /// Looks at the copy, and reports where it is over; true once it is.
    fn look(&self) -> bool {
        if self.over.load(Ordering::Acquire) {
            return true;
        }
        let Some(mut launched) = self.launched.try_lock() else { return false };
        if self.over.load(Ordering::Acquire) {
            return true;
        }
        match launched.look() {
            Ok(false) => {
                drop(launched);
                self.end_early();
                false
            }
            copied => {
                let ended = launched.finish(copied, &self.transfer.after);
                // Within the lock: the next holder must not finish again.
                self.over.store(true, Ordering::Release);
                drop(launched);
                let first = self.report.swap(REPORTED, Ordering::AcqRel) == UNREPORTED;
                self.transfer.let_go();
                if first {
                    self.report(ended);
                }
                true
            }
        }
    }

    fn report(&self, ended: Result<(), (Option<usize>, Error)>) {
        match ended {
            Ok(()) => {
                self.transfer.units_done(self.transfer.units.len(), self.transfer.bytes());
            }
            Err((Some(part), error)) => self.transfer.all_but_failed(part, &error),
            Err((None, error)) => self.transfer.all_failed(&error),
        }
    }

    /// A copy in a stream may wait for ever for what is before it: a transfer that was stopped does not wait with it.
    fn end_early(&self) {
        if self.transfer.stream.is_none() || !self.transfer.is_stopped() {
            return;
        }
        let since = *self.stopped.lock().get_or_insert_with(Instant::now);
        if since.elapsed() >= GRACE && self.report.swap(REPORTED, Ordering::AcqRel) == UNREPORTED {
            self.report(Err((None, self.transfer.stop_error())));
        }
    }

    fn pause(&self) -> Option<Duration> {
        pause_since(self.began)
    }
}

impl Watched for Flight {
    fn watched(&self) -> bool {
        if self.helpers.load(Ordering::Acquire) > 0 { self.over.load(Ordering::Acquire) } else { self.look() }
    }

    fn again(&self) -> Option<Duration> {
        // Where a caller looks, only in case that it stops.
        if self.helpers.load(Ordering::Acquire) > 0 { Some(HELPED) } else { self.pause() }
    }
}

impl Help for Flight {
    /// A caller that waits looks by itself: it would be woken later than it sees the end.
    fn help(&self) {
        self.helpers.fetch_add(1, Ordering::AcqRel);
        while !self.look() && self.report.load(Ordering::Acquire) == UNREPORTED {
            match self.pause() {
                None => std::hint::spin_loop(),
                Some(pause) => std::thread::sleep(pause),
            }
        }
        self.helpers.fetch_sub(1, Ordering::AcqRel);
    }
}
