//! Imports that are in flight: one of the library's threads waits for the owner.

use std::pin::Pin;
use std::task::{Context, Poll};

use parking_lot::{Mutex, MutexGuard};
use pyo3::prelude::*;
use towline::Result;

use crate::completions::Waiter;
use crate::errors::{OrRaise, invalid};
use crate::process::{self, Inherited};
use crate::remote::Remote;

type Importing = Pin<Box<dyn Future<Output = Result<towline::Remote>> + Send>>;

/// An import in flight, from when it is first asked for its end.
#[pyclass(frozen, module = "towline._native")]
pub(crate) struct Import(Inherited<Mutex<State>>);

enum State {
    Going(Importing),
    Ended(Box<Result<towline::Remote>>),
    Taken,
}

impl Import {
    pub(crate) fn new(importing: impl Future<Output = Result<towline::Remote>> + Send + 'static) -> Import {
        Import(Inherited::new(Mutex::new(State::Going(Box::pin(importing)))))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    fn poll_once(&self, context: &mut Context<'_>) -> bool {
        let mut state = self.lock();
        if let State::Going(importing) = &mut *state
            && let Poll::Ready(outcome) = importing.as_mut().poll(context)
        {
            *state = State::Ended(Box::new(outcome));
        }
        !matches!(&*state, State::Going(_))
    }
}

#[pymethods]
impl Import {
    /// Whether it has ended; if not, the waiter is woken when it has.
    fn poll(&self, py: Python<'_>, waiter: &Waiter) -> PyResult<bool> {
        process::guard(py, "import")?;
        Ok(py.detach(|| self.poll_once(&mut waiter.context())))
    }

    /// What was imported, once; or raises why it failed.
    fn result(&self, py: Python<'_>) -> PyResult<Remote> {
        process::guard(py, "import")?;
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Taken) {
            State::Ended(outcome) => {
                drop(state);
                outcome.map(|remote| Remote(Inherited::new(remote))).or_raise(py)
            }
            other => {
                *state = other;
                drop(state);
                Err(invalid(
                    py,
                    "import",
                    "the import is still in flight, or its result was already taken".to_owned(),
                ))
            }
        }
    }
}
