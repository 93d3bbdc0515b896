//! Calls of NCCL that wait by themselves, and the thread that ends them at their deadline.
//!
//! A communicator makes one call at a time, and keeps that call's deadline in a word of its own. The thread sleeps until the
//! earliest deadline that it knows of; a call wakes it only where its own is earlier than that. As deadlines lie as far ahead as
//! the timeout, which calls seldom come to, a call costs a look at the clock and two stores.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::comm::Core;
use crate::sync::lock;

/// How long a call may go on after its communicator was revoked, before it is aborted.
const GRACE: Duration = Duration::from_secs(2);

/// No deadline.
const NEVER: u64 = u64::MAX;

/// Deadlines count from here, in nanoseconds.
static BEGUN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// When the thread looks again.
static LOOKS: AtomicU64 = AtomicU64::new(NEVER);
static WATCHED: Mutex<Watched> = Mutex::new(Watched { all: Vec::new(), runs: false });
static CHANGED: Condvar = Condvar::new();

struct Watched {
    all: Vec<(Arc<Deadline>, Weak<Core>)>,
    runs: bool,
}

/// The deadline of the call that a communicator is in.
pub(super) struct Deadline {
    at: AtomicU64,
    watched: AtomicBool,
}

impl Deadline {
    pub(super) fn new() -> Deadline {
        Deadline { at: AtomicU64::new(NEVER), watched: AtomicBool::new(false) }
    }

    fn at(&self) -> u64 {
        self.at.load(Ordering::SeqCst)
    }
}

/// One call that is watched, until it is dropped.
pub(super) struct Guard<'a>(&'a Deadline);

/// Watches a call: where it has not ended by then, its communicator is stopped, and the call gives an error.
pub(super) fn guard(core: &Arc<Core>, within: Duration) -> Guard<'_> {
    let deadline = &core.deadline;
    let at = now().saturating_add(within.as_nanos().try_into().unwrap_or(NEVER)).min(NEVER - 1);
    // The thread stores when it looks and then reads the deadlines; here it is the other way round, so that one sees the other.
    deadline.at.store(at, Ordering::SeqCst);
    if at < LOOKS.load(Ordering::SeqCst) || !deadline.watched.load(Ordering::Relaxed) {
        add(core);
    }
    Guard(deadline)
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.0.at.store(NEVER, Ordering::Release);
    }
}

fn now() -> u64 {
    BEGUN.elapsed().as_nanos() as u64
}

#[cold]
fn add(core: &Arc<Core>) {
    let mut watched = lock(&WATCHED);
    if !core.deadline.watched.swap(true, Ordering::Relaxed) {
        watched.all.push((Arc::clone(&core.deadline), Arc::downgrade(core)));
    }
    if watched.runs {
        CHANGED.notify_one();
        return;
    }
    let thread = std::thread::Builder::new().name("towline-nccl".into()).spawn(watch);
    // Without the thread the call goes on without a limit, which is what NCCL itself does.
    watched.runs = thread.is_ok();
}

fn watch() {
    let mut watched = lock(&WATCHED);
    loop {
        watched.all.retain(|(_, core)| core.strong_count() > 0);
        let now = now();
        if let Some((deadline, core)) = watched.all.iter().find(|(deadline, _)| deadline.at() <= now).cloned()
        {
            drop(watched);
            stop(&deadline, &core, now);
            watched = lock(&WATCHED);
            continue;
        }
        let next = watched.all.iter().map(|(deadline, _)| deadline.at()).min().unwrap_or(NEVER);
        LOOKS.store(next, Ordering::SeqCst);
        if watched.all.iter().any(|(deadline, _)| deadline.at() < next) {
            continue;
        }
        watched = if next == NEVER {
            CHANGED.wait(watched).unwrap_or_else(PoisonError::into_inner)
        } else {
            let left = Duration::from_nanos(next.saturating_sub(now));
            CHANGED.wait_timeout(watched, left).unwrap_or_else(PoisonError::into_inner).0
        };
    }
}

/// Stops a communicator whose call has come to its deadline. The deadline moves on: where revoking does not end the call, the
/// next look aborts.
fn stop(deadline: &Deadline, core: &Weak<Core>, now: u64) {
    let (at, later) = (deadline.at(), now + GRACE.as_nanos() as u64);
    let late = at <= now;
    if late
        && deadline.at.compare_exchange(at, later, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        && let Some(core) = core.upgrade()
    {
        core.stop_call("call");
    }
}
