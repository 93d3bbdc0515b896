//! Transfers in flight.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};
use pyo3::prelude::*;
use towline::Result;

use crate::completions::{Waiter, block_on};
use crate::errors::{OrRaise, exception};
use crate::owners;
use crate::process::{self, Inherited};
use crate::request::seconds;

/// Part, first block, end of the blocks, and why they failed.
type Failure<'py> = (usize, u64, u64, Bound<'py, PyAny>);

/// One request in flight.
#[pyclass(frozen, module = "towline._native")]
pub(crate) struct Transfer(Inherited<Mutex<towline::Transfer>>);

impl Transfer {
    pub(crate) fn new(transfer: towline::Transfer) -> Transfer {
        Transfer(Inherited::new(Mutex::new(transfer)))
    }

    /// Never held for long: what blocks does so outside, and nobody takes the GIL inside.
    fn lock(&self) -> MutexGuard<'_, towline::Transfer> {
        self.0.lock()
    }

    fn poll_once(&self, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut *self.lock()).poll(context)
    }
}

#[pymethods]
impl Transfer {
    /// The path that the bytes take.
    #[getter]
    fn path(&self) -> &'static str {
        self.lock().path()
    }

    /// How many bytes were asked for.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.lock().bytes()
    }

    /// Whether it has ended, well or not.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        process::guard(py, "transfer")?;
        Ok(self.lock().is_done())
    }

    /// Whether nothing of it can touch memory any more, on either side.
    fn quiet(&self, py: Python<'_>) -> PyResult<bool> {
        process::guard(py, "transfer")?;
        Ok(self.lock().quiet())
    }

    /// Whether it has ended; if not, the waiter is woken when it has.
    fn poll(&self, py: Python<'_>, waiter: &Waiter) -> PyResult<bool> {
        process::guard(py, "transfer")?;
        Ok(self.poll_once(&mut waiter.context()).is_ready())
    }

    /// Waits until it has ended, and says whether it has.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        process::guard(py, "transfer")?;
        let until = seconds(py, "wait", "timeout", timeout)?.map(|time| Instant::now() + time);
        Ok(block_on(py, until, |context| self.poll_once(context))?.is_some())
    }

    /// What it gave, or raises why it failed; the word that an atomic operation found.
    fn result(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        process::guard(py, "transfer")?;
        owners::release(py);
        let (result, value) = {
            let transfer = self.lock();
            (transfer.result(), transfer.value())
        };
        match result {
            Some(result) => result.map(|()| value).or_raise(py),
            None => Err(crate::errors::invalid(py, "result", "the transfer is still in flight".to_owned())),
        }
    }

    /// Asks it to stop; it ends once the local memory is safe to reuse.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        process::guard(py, "transfer")?;
        py.detach(|| self.lock().cancel());
        Ok(())
    }

    /// The ranges of blocks that failed, each with its part and its error.
    #[pyo3(signature = () -> "list[tuple[int, int, int, Error]]")]
    fn failures<'py>(&self, py: Python<'py>) -> PyResult<Vec<Failure<'py>>> {
        process::guard(py, "transfer")?;
        let failures = self.lock().failures();
        failures
            .iter()
            .map(|failed| {
                let error = exception(py, &failed.error)?;
                Ok((failed.part, failed.blocks.start, failed.blocks.end, error))
            })
            .collect()
    }
}
