//! Copies on GPUs that are under way: one thread looks at all of them, and callers that wait look at their own.

use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::Launched;
use super::ring::{Passing, Slot};
use crate::sync::lock;
use crate::transfer::{Help, TransferCore};
use crate::{Result, runtime};

/// A copy that waits for a stream gets this long after its transfer was stopped; then the transfer ends without it.
const GRACE: Duration = Duration::from_millis(50);

/// For how long callers and the thread look again and again before they sleep in between.
const SPIN: Duration = Duration::from_micros(500);
const SHORTEST_PAUSE: Duration = Duration::from_micros(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// How often the thread sees to it that a caller is still there which looks in its place.
const HELPED: Duration = Duration::from_millis(1);

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

    fn tell(&self, ended: Result<()>) {
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
        pause(self.began)
    }
}

/// How long to sleep before looking again at what began then; not at all in the beginning.
fn pause(began: Instant) -> Option<Duration> {
    let age = began.elapsed();
    (age > SPIN).then(|| (age / 64).clamp(SHORTEST_PAUSE, LONGEST_PAUSE))
}

/// What the thread looks at.
trait Watched: Send + Sync {
    /// Looks; true once there is nothing left to look at.
    fn watched(&self) -> bool;

    /// How long until it wants to be looked at again; at once where it does not say.
    fn again(&self) -> Option<Duration>;

    /// Whether it ends after those of its kind that began before.
    fn in_order(&self) -> bool {
        false
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

/// How often the thread looks at bytes that stop over.
const STOPOVER: Duration = Duration::from_micros(10);

/// At so many of them, of those that are not done.
const ASKED: usize = 2;

/// Up to this many bytes a thread may wait for by itself, and so many threads may at a time.
const SHORT: u64 = 1 << 20;
const MOST_HERE: usize = 2;

/// Whether the thread has something to look at.
static BUSY: AtomicBool = AtomicBool::new(false);

/// What is to be done when bytes are in a slot, or out of it.
type Then = Box<dyn FnOnce(Result<Slot>) + Send>;

/// A copy between a slot and a GPU, and what follows it.
struct Stopover {
    passing: Mutex<Option<(Passing, Then)>>,
    began: Instant,
}

/// Calls back when the bytes are there, from the thread that looks at all copies: `then` must not wait for anything.
pub(crate) fn when_done(passing: Passing, then: Then) {
    watch(Arc::new(Stopover { passing: Mutex::new(Some((passing, then))), began: Instant::now() }));
}

impl Watched for Stopover {
    fn watched(&self) -> bool {
        let mut passing = lock(&self.passing);
        let done = match &*passing {
            Some((copy, _)) => copy.is_done(),
            None => return true,
        };
        if let Ok(false) = done {
            return false;
        }
        let Some((copy, then)) = passing.take() else { return true };
        drop(passing);
        let go_on = move || then(done.and_then(|_| copy.into_slot()));
        // The thread is needed by all others.
        if catch_unwind(AssertUnwindSafe(go_on)).is_err() {
            tracing::error!("what follows a copy on a GPU panicked");
        }
        true
    }

    fn in_order(&self) -> bool {
        true
    }

    /// Others need the processor while bytes stop over: they make room for the next, or take these.
    fn again(&self) -> Option<Duration> {
        Some(pause(self.began).unwrap_or_default().max(STOPOVER))
    }
}

/// Threads that wait for a GPU in place of the one that looks at all copies, for short ones.
static HERE: AtomicUsize = AtomicUsize::new(0);

/// Waits in the calling thread where that is the fastest: for a few bytes, while little else goes on.
pub(crate) fn wait_here(passing: &mut Passing) -> bool {
    if passing.bytes() > SHORT || BUSY.load(Ordering::Acquire) || runtime::may_block("copy on a GPU").is_err()
    {
        return false;
    }
    let alone = HERE.fetch_add(1, Ordering::AcqRel) < MOST_HERE;
    let done = alone && passing.wait_until(Instant::now() + SPIN);
    HERE.fetch_sub(1, Ordering::AcqRel);
    done
}

/// Waits in the calling thread, which has nothing better to do, for a moment.
pub(crate) fn wait_idly(passing: &mut Passing) -> bool {
    runtime::may_block("copy on a GPU").is_ok() && passing.wait_until(Instant::now() + SPIN)
}

/// Goes on with `then` when the bytes are there: at once, or from the thread that looks at all copies.
pub(crate) fn then(mut passing: Passing, then: Then) {
    if wait_here(&mut passing) { then(passing.into_slot()) } else { when_done(passing, then) }
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

struct Watch {
    flights: Vec<Arc<dyn Watched>>,
    running: bool,
}

static WATCH: Mutex<Watch> = Mutex::new(Watch { flights: Vec::new(), running: false });
static ARRIVED: Condvar = Condvar::new();

fn watch(flight: Arc<dyn Watched>) {
    let mut watch = lock(&WATCH);
    watch.flights.push(flight);
    if watch.running {
        drop(watch);
        ARRIVED.notify_one();
        return;
    }
    watch.running = true;
    drop(watch);
    if let Err(error) = runtime::start_thread("copy", "towline-cuda", look_at_all) {
        // The caller does the work, late but surely.
        tracing::debug!(%error, "no thread looks at copies on GPUs");
        look_at_all();
    }
}

/// The thread: looks at every flight in turn until there was none for a while.
fn look_at_all() {
    // Sleeps of microseconds would take fifty more.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1000));
    let mut mine: Vec<Arc<dyn Watched>> = Vec::new();
    loop {
        {
            let mut watch = lock(&WATCH);
            if mine.is_empty() && watch.flights.is_empty() {
                BUSY.store(false, Ordering::Release);
                let (guard, waited) =
                    ARRIVED.wait_timeout(watch, LINGER).unwrap_or_else(PoisonError::into_inner);
                watch = guard;
                if waited.timed_out() && watch.flights.is_empty() {
                    watch.running = false;
                    return;
                }
            }
            mine.append(&mut watch.flights);
            BUSY.store(!mine.is_empty(), Ordering::Release);
        }
        // Stopovers end about as they began, and to ask the driver takes as long as to copy 50 KiB: after a few that are not
        // done the others wait for the next time.
        let mut open = 0;
        mine.retain(|flight| {
            let still = (flight.in_order() && open >= ASKED) || !flight.watched();
            open += usize::from(still && flight.in_order());
            still
        });
        // As often as the youngest wants it.
        let pause = mine.iter().map(|flight| flight.again()).min().flatten();
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
