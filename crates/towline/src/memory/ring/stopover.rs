//! Copies between slots and GPUs that nobody waits for: what follows them is called when the bytes are there.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{Passing, Slot};
use crate::cuda::watch::{self, SPIN, Watched, pause_since, watch};
use crate::{Result, runtime};

/// How often the thread looks at bytes that stop over.
const STOPOVER: Duration = Duration::from_micros(10);

/// Up to this many bytes a thread may wait for by itself, and so many threads may at a time.
const SHORT: u64 = 1 << 20;
const MOST_HERE: usize = 2;

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
        let mut passing = self.passing.lock();
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
        Some(pause_since(self.began).unwrap_or_default().max(STOPOVER))
    }
}

/// Threads that wait for a GPU in place of the one that looks at all copies, for short ones.
static HERE: AtomicUsize = AtomicUsize::new(0);

/// Waits in the calling thread where that is the fastest: for a few bytes, while little else goes on.
pub(crate) fn wait_here(passing: &mut Passing) -> bool {
    if passing.bytes() > SHORT || watch::is_busy() || runtime::may_block("copy on a GPU").is_err() {
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
