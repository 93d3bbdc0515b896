//! Copies on GPUs that are in flight: one thread looks at all of them.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::runtime;

/// For how long callers and the thread look again and again before they sleep in between.
pub(crate) const SPIN: Duration = Duration::from_micros(500);
const SHORTEST_PAUSE: Duration = Duration::from_micros(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// The thread leaves when there was nothing to look at for this long.
const LINGER: Duration = Duration::from_secs(1);

/// Of those that end in order, so many that are not done are asked at a time.
const ASKED: usize = 2;

/// How long to sleep before looking again at what began then; not at all in the beginning.
pub(crate) fn pause_since(began: Instant) -> Option<Duration> {
    let age = began.elapsed();
    (age > SPIN).then(|| (age / 64).clamp(SHORTEST_PAUSE, LONGEST_PAUSE))
}

/// What the thread looks at.
pub(crate) trait Watched: Send + Sync {
    /// Looks; true once there is nothing left to look at.
    fn watched(&self) -> bool;

    /// How long until it wants to be looked at again; at once where it does not say.
    fn again(&self) -> Option<Duration>;

    /// Whether it ends after those of its kind that began before.
    fn in_order(&self) -> bool {
        false
    }
}

/// Whether the thread has something to look at.
static BUSY: AtomicBool = AtomicBool::new(false);

/// Whether the thread has something to look at now.
pub(crate) fn is_busy() -> bool {
    BUSY.load(Ordering::Acquire)
}

struct Watch {
    flights: Vec<Arc<dyn Watched>>,
    running: bool,
}

static WATCH: Mutex<Watch> = Mutex::new(Watch { flights: Vec::new(), running: false });
static ARRIVED: Condvar = Condvar::new();

/// Has the thread look at it, too.
pub(crate) fn watch(flight: Arc<dyn Watched>) {
    let mut watch = WATCH.lock();
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
            let mut watch = WATCH.lock();
            if mine.is_empty() && watch.flights.is_empty() {
                BUSY.store(false, Ordering::Release);
                let waited = ARRIVED.wait_for(&mut watch, LINGER);
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
                let mut watch = WATCH.lock();
                if watch.flights.is_empty() {
                    ARRIVED.wait_for(&mut watch, pause);
                }
            }
            None => std::thread::yield_now(),
        }
    }
}
