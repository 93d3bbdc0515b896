//! Waits that their caller can end: for hosts such as Python, where Ctrl-C is noticed by a thread that asks.

use std::cell::Cell;
use std::time::Duration;

use crate::{Error, Kind, Result};

/// How often a wait asks. Ctrl-C should feel immediate, and a wait that is asked for longer is a rare one.
const OFTEN: Duration = Duration::from_millis(100);

thread_local! {
    static ASK: Cell<Option<fn() -> bool>> = const { Cell::new(None) };
}

/// Makes calls during which this thread's waits for others end, with `Canceled`, when `interrupted` says so.
///
/// It is asked about ten times a second while a wait lasts, by the thread that waits, which holds no lock of the library then: it may
/// run whatever a signal's handler does. What was waited for is as if the wait had come to its limit. Transfers are not asked: wait for
/// them in parts, by [`Transfer::wait_for`](crate::Transfer::wait_for).
///
/// ```
/// use std::time::Duration;
/// use towline::{Access, Endpoint, Kind, SystemStorage, interruptible};
/// let endpoint = Endpoint::open("waiter")?;
/// let error = interruptible(|| true, || endpoint.receive(Duration::from_secs(600))).unwrap_err();
/// assert_eq!(error.kind(), Kind::Canceled);
/// # Ok::<(), towline::Error>(())
/// ```
pub fn interruptible<T>(interrupted: fn() -> bool, calls: impl FnOnce() -> T) -> T {
    struct Before(Option<fn() -> bool>);
    impl Drop for Before {
        fn drop(&mut self) {
            ASK.set(self.0);
        }
    }
    let _before = Before(ASK.replace(Some(interrupted)));
    calls()
}

/// `Canceled` where the caller of this thread wants to stop waiting. To be called without a lock.
#[doc(hidden)]
pub fn check(op: &'static str) -> Result<()> {
    match ASK.get() {
        Some(interrupted) if interrupted() => {
            Err(Error::new(Kind::Canceled, op, "the caller was interrupted"))
        }
        _ => Ok(()),
    }
}

/// That long, or until it is time to [`check`] again.
#[doc(hidden)]
pub fn turn(left: Duration) -> Duration {
    if ASK.get().is_some() { left.min(OFTEN) } else { left }
}
