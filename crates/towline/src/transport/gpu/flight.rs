//! Copies on GPUs that are under way: one thread looks at all of them, and callers that wait look at their own.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::Launched;
use crate::progress;
use crate::sync::lock;
use crate::transfer::{Help, TransferCore};

/// A copy that waits for a stream gets this long after its transfer was stopped; then the transfer ends without it.
const GRACE: Duration = Duration::from_millis(50);

/// For how long callers and the thread look again and again before they sleep in between.
const SPIN: Duration = Duration::from_micros(500);
const SHORTEST_PAUSE: Duration = Duration::from_micros(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// The thread leaves when there was nothing to look at for this long.
const LINGER: Duration = Duration::from_secs(1);

const UNREPORTED: u8 = 0;
const REPORTED: u8 = 1;

/// One copy that is under way for a transfer.
pub(super) struct Flight {
    transfer: Arc<TransferCore>,
    launched: Mutex<Launched>,
    began: Instant,
    stopped: Mutex<Option<Instant>>,
    /// Whether the transfer has been told how its units ended.
    report: AtomicU8,
    over: AtomicBool,
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
        let Ok(mut launched) = self.launched.try_lock() else { return false };
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
                // Within the lock: whoever gets it next must not finish again.
                self.over.store(true, Ordering::Release);
                drop(launched);
                let first = self.report.swap(REPORTED, Ordering::AcqRel) == UNREPORTED;
                self.transfer.let_go();
                if first {
                    self.tell(ended);
                }
                true
            }
        }
    }

    fn tell(&self, ended: crate::Result<()>) {
        match ended {
            Ok(()) => {
                self.transfer.progressed(self.transfer.plan.bytes());
                (0..self.transfer.units.len()).for_each(|_| self.transfer.unit_done());
            }
            Err(error) => super::fail(&self.transfer, &error),
        }
    }

    /// A copy in a stream may wait for ever for what is before it: a transfer that was stopped does not wait with it.
    fn end_early(&self) {
        if self.transfer.stream.is_none() || !self.transfer.is_stopped() {
            return;
        }
        let since = *lock(&self.stopped).get_or_insert_with(Instant::now);
        if since.elapsed() >= GRACE && self.report.swap(REPORTED, Ordering::AcqRel) == UNREPORTED {
            self.tell(Err(self.transfer.stop_error()));
        }
    }

    fn pause(&self) -> Option<Duration> {
        let age = self.began.elapsed();
        (age > SPIN).then(|| (age / 64).clamp(SHORTEST_PAUSE, LONGEST_PAUSE))
    }
}

impl Help for Flight {
    /// A caller that waits looks by itself: it would be woken later than it sees the end.
    fn help(&self) {
        while !self.look() && self.report.load(Ordering::Acquire) == UNREPORTED {
            match self.pause() {
                None => std::hint::spin_loop(),
                Some(pause) => std::thread::sleep(pause),
            }
        }
    }
}

struct Watch {
    flights: Vec<Arc<Flight>>,
    running: bool,
}

static WATCH: Mutex<Watch> = Mutex::new(Watch { flights: Vec::new(), running: false });
static ARRIVED: Condvar = Condvar::new();

fn watch(flight: Arc<Flight>) {
    let mut watch = lock(&WATCH);
    watch.flights.push(flight);
    if watch.running {
        drop(watch);
        ARRIVED.notify_one();
        return;
    }
    watch.running = true;
    drop(watch);
    if let Err(error) = progress::start_thread("towline-cuda".into(), look_at_all) {
        // The caller does the work, late but surely.
        tracing::debug!(%error, "no thread looks at copies on GPUs");
        look_at_all();
    }
}

/// The thread: looks at every flight in turn until there was none for a while.
fn look_at_all() {
    let mut mine: Vec<Arc<Flight>> = Vec::new();
    loop {
        {
            let mut watch = lock(&WATCH);
            if mine.is_empty() && watch.flights.is_empty() {
                let (guard, waited) =
                    ARRIVED.wait_timeout(watch, LINGER).unwrap_or_else(PoisonError::into_inner);
                watch = guard;
                if waited.timed_out() && watch.flights.is_empty() {
                    watch.running = false;
                    return;
                }
            }
            mine.append(&mut watch.flights);
        }
        mine.retain(|flight| !flight.look());
        // As often as the youngest wants it.
        let pause = mine.iter().map(|flight| flight.pause()).min().flatten();
        match pause {
            Some(pause) => {
                let watch = lock(&WATCH);
                if watch.flights.is_empty() {
                    drop(ARRIVED.wait_timeout(watch, pause));
                }
            }
            None => std::thread::yield_now(),
        }
    }
}
