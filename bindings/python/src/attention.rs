//! Blocking calls that Ctrl-C ends: the thread that waits asks now and then whether a signal came.

use std::cell::RefCell;

use pyo3::prelude::*;

thread_local! {
    /// What a signal's handler raised while this thread waited.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Runs a call without the GIL. On the main thread, a signal whose handler raises ends the waits of the call.
pub(crate) fn without_gil<T: Send>(py: Python<'_>, call: impl FnOnce() -> T + Send) -> PyResult<T> {
    // Python runs the handlers of signals on its main thread only.
    if rustix::thread::gettid() != rustix::process::getpid() {
        return Ok(py.detach(call));
    }
    let done = py.detach(|| towline::interruptible(interrupted, call));
    match RAISED.take() {
        Some(error) => Err(error),
        None => Ok(done),
    }
}

/// Asked by the waiting thread itself, which is Python's own. Once a handler has raised, no further wait of the call lasts.
fn interrupted() -> bool {
    if RAISED.with_borrow(Option::is_some) {
        return true;
    }
    let looked = Python::try_attach(|py| py.check_signals());
    match looked {
        Some(Err(error)) => {
            RAISED.set(Some(error));
            true
        }
        _ => false,
    }
}
