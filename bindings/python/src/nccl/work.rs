//! Calls of a communicator that are in flight.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};
use pyo3::prelude::*;
use towline_comm::{Operation, Result};

use super::errors::{OrRaise, invalid};
use super::group;
use crate::completions::{Waiter, block_on};
use crate::owners;
use crate::process::{self, Inherited};
use crate::request::seconds;

/// A call in flight or over.
#[pyclass(frozen, module = "towline._native")]
pub(crate) struct Work {
    operation: Inherited<Mutex<Operation>>,
    /// What it gives is a value.
    valued: bool,
    /// The group in which it was asked for, whose end starts it.
    group: Option<u64>,
    /// Set to give it up, where that can be done.
    withdrawn: Option<Arc<AtomicBool>>,
}

impl Work {
    pub(super) fn new(operation: Operation) -> Work {
        let operation = Inherited::new(Mutex::new(operation));
        Work { operation, valued: false, group: group::current(), withdrawn: None }
    }

    /// What an atomic operation finds is its value.
    pub(super) fn valued(operation: Operation) -> Work {
        Work { valued: true, ..Work::new(operation) }
    }

    /// It ends soon after `withdrawn` was set.
    pub(super) fn withdrawable(operation: Operation, withdrawn: Arc<AtomicBool>) -> Work {
        Work { withdrawn: Some(withdrawn), group: None, ..Work::new(operation) }
    }

    fn lock(&self) -> MutexGuard<'_, Operation> {
        self.operation.lock()
    }

    fn poll_once(&self, context: &mut Context<'_>) -> Poll<Result<u64>> {
        Pin::new(&mut *self.lock()).poll(context)
    }

    /// Refuses to wait for what starts only when the waiting is over.
    fn check_started(&self, py: Python<'_>) -> PyResult<()> {
        if self.group.is_some() && self.group == group::current() && !self.lock().is_done() {
            let message = "it starts at the end of the group: end the group first";
            return Err(invalid(py, "wait", message.to_owned()));
        }
        Ok(())
    }
}

#[pymethods]
impl Work {
    /// Whether it has ended, well or not.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        process::guard(py, "wait")?;
        Ok(self.lock().is_done())
    }

    /// Whether it has ended; if not, the waiter is woken when it has.
    fn poll(&self, py: Python<'_>, waiter: &Waiter) -> PyResult<bool> {
        process::guard(py, "wait")?;
        self.check_started(py)?;
        Ok(self.poll_once(&mut waiter.context()).is_ready())
    }

    /// Waits until it has ended, and says whether it has.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        process::guard(py, "wait")?;
        self.check_started(py)?;
        let until = seconds(py, "wait", "timeout", timeout)?.map(|time| Instant::now() + time);
        Ok(block_on(py, until, |context| self.poll_once(context))?.is_some())
    }

    /// What it gave, or raises why it failed.
    fn result(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        process::guard(py, "wait")?;
        owners::release(py);
        let result = self.lock().result();
        match result {
            Some(result) => result.map(|value| self.valued.then_some(value)).or_raise(py),
            None => {
                Err(invalid(py, "result", "the call is still in flight: wait for its end first".to_owned()))
            }
        }
    }

    /// Gives up a wait for signals. Anything else goes on: the other ranks count on what was begun.
    fn cancel(&self) {
        if let Some(withdrawn) = &self.withdrawn {
            withdrawn.store(true, Ordering::Release);
        }
    }
}
