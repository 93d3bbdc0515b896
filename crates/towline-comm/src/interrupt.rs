//! Waits that their caller can end: for hosts such as Python, where Ctrl-C is noticed by whoever asks.

use std::cell::Cell;

use towline::Kind;

use crate::{Error, Result};

thread_local! {
    static ASK: Cell<Option<fn() -> bool>> = const { Cell::new(None) };
}

/// Makes calls during which this thread's waits for other ranks end, with `Canceled`, when `interrupted` says so.
///
/// It is asked about ten times a second while a wait lasts. A collective that ends in this way has failed on all ranks.
///
/// ```
/// use towline_comm::{Communicator, Config, WaitSignal, get_unique_id, interruptible};
/// let comm = Communicator::init(1, 0, &get_unique_id()?, Config::default())?;
/// let error = interruptible(|| true, || comm.wait_signal(&[WaitSignal::from_rank(0)])).unwrap_err();
/// assert_eq!(error.kind(), towline::Kind::Canceled);
/// # Ok::<(), towline_comm::Error>(())
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

/// `Canceled` where the caller of this thread wants to stop waiting.
pub(crate) fn check(op: &'static str) -> Result<()> {
    match ASK.get() {
        Some(interrupted) if interrupted() => {
            Err(Error::new(Kind::Canceled, op, "the caller was interrupted"))
        }
        _ => Ok(()),
    }
}
