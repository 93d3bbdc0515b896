//! Imports that are under way: the waiting is done by a thread that lives only for the contact.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use pyo3::prelude::*;
use towline::{Endpoint, Error, Kind, Result, Routing, Ticket};

use crate::completions::Waiter;
use crate::errors::{OrRaise, invalid};
use crate::process::{self, Inherited};
use crate::remote::Remote;

/// An import under way.
#[pyclass(frozen, module = "towline._native")]
pub(crate) struct Import(Arc<Mutex<Slot>>);

#[derive(Default)]
struct Slot {
    outcome: Option<Result<towline::Remote>>,
    ended: bool,
    waker: Option<Waker>,
}

fn lock(slot: &Mutex<Slot>) -> MutexGuard<'_, Slot> {
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Import {
    pub(crate) fn start(
        endpoint: Endpoint,
        ticket: Ticket,
        routing: Routing,
        within: Duration,
    ) -> Result<Import> {
        let slot = Arc::new(Mutex::new(Slot::default()));
        let filled = Arc::clone(&slot);
        let contact = move || {
            block_signals();
            let outcome = endpoint.import_within(&ticket, &routing, within);
            let waker = {
                let mut slot = lock(&filled);
                slot.outcome = Some(outcome);
                slot.ended = true;
                slot.waker.take()
            };
            if let Some(waker) = waker {
                waker.wake();
            }
        };
        std::thread::Builder::new().name("towline-contact".into()).spawn(contact).map_err(|error| {
            Error::new(Kind::Exhausted, "import", format!("cannot start a thread: {error}")).caused_by(error)
        })?;
        Ok(Import(slot))
    }

    pub(crate) fn poll_once(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut slot = lock(&self.0);
        if slot.ended {
            return Poll::Ready(());
        }
        slot.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

#[pymethods]
impl Import {
    /// Whether it has ended; if not, the waiter is woken when it has.
    fn poll(&self, py: Python<'_>, waiter: &Waiter) -> PyResult<bool> {
        process::guard(py, "import")?;
        Ok(self.poll_once(&mut waiter.context()).is_ready())
    }

    /// What was imported, once; or raises why it failed.
    pub(crate) fn result(&self, py: Python<'_>) -> PyResult<Remote> {
        process::guard(py, "import")?;
        let outcome = lock(&self.0).outcome.take();
        match outcome {
            Some(outcome) => outcome.map(|remote| Remote(Inherited::new(remote))).or_raise(py),
            None => Err(invalid(py, "import", "the import is under way, or was taken".to_owned())),
        }
    }
}

/// Leaves signals to Python's own threads: the main thread's blocking calls count on being interrupted.
#[allow(unsafe_code, reason = "sets the signal mask of a thread of our own")]
fn block_signals() {
    // SAFETY: `sigfillset` initialises the set; the mask of the calling thread, which is ours, is replaced. Faults
    // stay deliverable: the kernel ignores a block of SIGSEGV and its like when this thread causes them.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, std::ptr::null_mut());
    }
}
