//! Waits that their caller can end: see [`towline::interruptible`].

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
pub(crate) use towline::interrupt_turn as turn;

use crate::Result;

/// The longest pause after which a thread that works for an interruptible call is asked again whether it is done.
const LOOK: Duration = Duration::from_millis(1);

thread_local! {
    static STOP: RefCell<Option<Stop>> = const { RefCell::new(None) };
}

/// Ends the waits of the threads that work for one call.
#[derive(Clone, Default)]
pub(crate) struct Stop(Arc<AtomicBool>);

impl Stop {
    /// From now on.
    pub(crate) fn now(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Does a thread's whole work. Its waits end with `Canceled` once it is to stop.
    pub(crate) fn during<T>(self, work: impl FnOnce() -> T) -> T {
        STOP.set(Some(self));
        towline::interruptible(|| STOP.with_borrow(|stop| stop.as_ref().is_some_and(Stop::is_set)), work)
    }

    fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// `Canceled` where the caller of this thread wants to stop waiting. To be called without a lock.
pub(crate) fn check(op: &'static str) -> Result<()> {
    Ok(towline::interrupt_check(op)?)
}

/// Waits while that is so; false where it still is at the limit, or when the caller is interrupted.
pub(crate) fn wait_while<T>(
    state: &Mutex<T>,
    changed: &Condvar,
    within: Duration,
    mut busy: impl FnMut(&mut T) -> bool,
) -> bool {
    let began = Instant::now();
    loop {
        let left = within.saturating_sub(began.elapsed());
        let waited = changed.wait_while_for(&mut state.lock(), &mut busy, turn(left));
        if !waited.timed_out() {
            return true;
        }
        if left.is_zero() || check("wait").is_err() {
            return false;
        }
    }
}

/// Waits for a thread that has limits of its own. Where the caller is interrupted, `stop` sees to it that it ends soon.
pub(crate) fn join<T>(
    thread: ScopedJoinHandle<'_, T>,
    op: &'static str,
    stop: impl Fn(&crate::Error),
) -> std::thread::Result<T> {
    let interruptible = turn(Duration::MAX) < Duration::MAX;
    let (mut pause, mut asked) = (Duration::from_micros(10), Instant::now());
    while interruptible && !thread.is_finished() {
        std::thread::sleep(pause);
        pause = (pause * 2).min(LOOK);
        if asked.elapsed() < turn(Duration::MAX) {
            continue;
        }
        if let Err(interrupted) = check(op) {
            stop(&interrupted);
            break;
        }
        asked = Instant::now();
    }
    thread.join()
}
