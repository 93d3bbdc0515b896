//! Calls of NCCL that wait by themselves, and the thread that ends them at their deadline.
//!
//! A communicator makes one call at a time, and counts when it goes into one and when it comes out. The thread looks at the
//! counts of all communicators now and then: one that is odd, and was the same at an earlier look, is of a call that goes on since
//! then. When nothing moves any more the thread sleeps, and the next call wakes it. So a call costs two plain stores, and no look
//! at the clock, which takes a tenth of what NCCL needs to register a window.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::comm::Core;
use super::turn;
use crate::runtime;

/// How long a call may go on after its communicator was revoked, before it is aborted.
const GRACE: Duration = Duration::from_secs(2);

/// While there are calls the thread looks that often, and at least that many times before a deadline: by so much a call that was
/// begun between two looks may be ended too late.
const LOOK: Duration = Duration::from_millis(250);
const LOOKS: u32 = 16;

/// A longer timeout than a clock can add.
const LONGEST: Duration = Duration::from_secs(1 << 30);

/// Whether the thread waits until it is woken; at first there is none.
static ASLEEP: AtomicBool = AtomicBool::new(true);
static WATCHED: Mutex<Watched> = Mutex::new(Watched { all: Vec::new(), runs: false });
static WOKEN: Condvar = Condvar::new();

struct Watched {
    all: Vec<Watch>,
    runs: bool,
}

/// A communicator, as it was seen last.
struct Watch {
    calls: Arc<Calls>,
    core: Weak<Core>,
    within: Duration,
    seen: u64,
    /// When a call that was seen is stopped.
    until: Instant,
}

/// Counts entries into calls and returns from them; odd inside.
pub(super) struct Calls {
    count: AtomicU64,
    watched: AtomicBool,
}

impl Calls {
    pub(super) fn new() -> Calls {
        Calls { count: AtomicU64::new(0), watched: AtomicBool::new(false) }
    }
}

/// One call that is watched, until it is dropped.
pub(super) struct Guard<'a>(&'a Calls);

/// Watches a call: where it has not ended after the communicator's timeout, that is stopped, and the call gives an error. One
/// call at a time for a communicator.
#[inline]
pub(super) fn guard(core: &Arc<Core>) -> Guard<'_> {
    let calls: &Calls = &core.calls;
    calls.count.store(calls.count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    // The thread says that it sleeps and then looks at the counts; here it is the reverse, so that one sees the other.
    turn::pass();
    if ASLEEP.load(Ordering::Relaxed) || !calls.watched.load(Ordering::Relaxed) {
        wake(core);
    }
    Guard(calls)
}

impl Drop for Guard<'_> {
    #[inline]
    fn drop(&mut self) {
        let count = &self.0.count;
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Release);
    }
}

#[cold]
fn wake(core: &Arc<Core>) {
    let mut watched = WATCHED.lock();
    if !core.calls.watched.swap(true, Ordering::Relaxed) {
        let (calls, within) = (Arc::clone(&core.calls), core.options.timeout);
        // Not odd, so that the thread sees that it has moved.
        watched.all.push(Watch { calls, core: Arc::downgrade(core), within, seen: 0, until: Instant::now() });
    }
    if !watched.runs {
        let thread = runtime::start_thread("wait", "towline-nccl", watch);
        // Without the thread the call goes on without a limit, which is what NCCL itself does.
        watched.runs = thread.is_ok();
    }
    ASLEEP.store(!watched.runs, Ordering::Relaxed);
    WOKEN.notify_one();
}

fn watch() {
    let mut watched = WATCHED.lock();
    loop {
        watched.all.retain(|one| one.core.strong_count() > 0);
        let now = Instant::now();
        let (mut moves, mut pause) = (false, LOOK);
        let mut late = None;
        for one in &mut watched.all {
            let count = one.calls.count.load(Ordering::Acquire);
            let inside = count % 2 == 1;
            if count != one.seen {
                (one.seen, one.until) = (count, now + one.within.min(LONGEST));
                moves = true;
            } else if inside && one.until <= now {
                // Where revoking does not end the call, the next time aborts.
                one.until = now + GRACE;
                late = Some(one.core.clone());
                break;
            }
            if inside {
                moves = true;
                pause = pause.min(one.until.saturating_duration_since(now));
            }
            pause = pause.min((one.within / LOOKS).max(Duration::from_millis(1)));
        }
        if let Some(core) = late {
            drop(watched);
            if let Some(core) = core.upgrade() {
                core.stop_call("call");
            }
            watched = WATCHED.lock();
        } else if moves {
            WOKEN.wait_for(&mut watched, pause);
        } else {
            ASLEEP.store(true, Ordering::SeqCst);
            // From here on either a call sees that this thread sleeps, or this thread sees the call.
            turn::barrier();
            if watched.all.iter().any(|one| one.calls.count.load(Ordering::Acquire) != one.seen) {
                ASLEEP.store(false, Ordering::Relaxed);
                continue;
            }
            while ASLEEP.load(Ordering::Relaxed) {
                WOKEN.wait(&mut watched);
            }
        }
    }
}
