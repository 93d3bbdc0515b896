//! Operations in flight.

use std::task::Poll;
use std::time::Instant;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use towline::connect::{
    OperationStatus, ReadOperation, ReadableOperation, WritableOperation, WriteOperation,
};

use super::metadata::{self, Fields};
use crate::completions::{Waiter, block_on};
use crate::errors::{OrRaise, exception, invalid};
use crate::owners;
use crate::process::{self, Inherited};
use crate::request::seconds;

/// One of the four operations.
pub(crate) enum Started {
    Readable(ReadableOperation),
    Writable(WritableOperation),
    Read(ReadOperation),
    Write(WriteOperation),
}

macro_rules! each {
    ($started:expr, $operation:ident => $what:expr) => {
        match $started {
            Started::Readable($operation) => $what,
            Started::Writable($operation) => $what,
            Started::Read($operation) => $what,
            Started::Write($operation) => $what,
        }
    };
}

/// One of the four operations, in flight or over.
#[pyclass(frozen, module = "towline._native")]
pub(crate) struct Operation(Inherited<Option<Started>>);

impl Operation {
    pub(crate) fn new(started: Started) -> Operation {
        Operation(Inherited::new(Some(started)))
    }

    fn enter(&self, py: Python<'_>) -> PyResult<&Started> {
        process::guard(py, "operation")?;
        Ok(self.started())
    }

    fn started(&self) -> &Started {
        match &*self.0 {
            Some(started) => started,
            // Only `drop` empties it.
            None => unreachable!("an operation that was dropped is used"),
        }
    }
}

#[pymethods]
impl Operation {
    /// The number of its status.
    fn status(&self, py: Python<'_>) -> PyResult<u8> {
        Ok(each!(self.enter(py)?, operation => operation.status()).code())
    }

    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(each!(self.enter(py)?, operation => operation.status()).is_final())
    }

    /// Whether nothing of it can touch the local memory any more.
    fn quiet(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(each!(self.enter(py)?, operation => operation.quiet()))
    }

    /// Whether it has ended; if not, the waiter is woken when it has.
    fn poll(&self, py: Python<'_>, waiter: &Waiter) -> PyResult<bool> {
        let started = self.enter(py)?;
        Ok(each!(started, operation => operation.poll_end(&mut waiter.context())).is_ready())
    }

    /// Waits until it has ended, and says whether it has.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let started = self.enter(py)?;
        let until = seconds(py, "wait", "timeout", timeout)?.map(|time| Instant::now() + time);
        let ended =
            block_on(py, until, |context| match each!(started, operation => operation.poll_end(context)) {
                Poll::Ready(_) => Poll::Ready(()),
                Poll::Pending => Poll::Pending,
            })?;
        Ok(ended.is_some())
    }

    /// Raises why it failed or was cancelled, if it was; `Invalid` while it has not ended.
    fn result(&self, py: Python<'_>) -> PyResult<()> {
        let started = self.enter(py)?;
        owners::release(py);
        match each!(started, operation => operation.result()) {
            Some(result) => result.or_raise(py),
            None => Err(invalid(py, "result", "the operation has not ended".to_owned())),
        }
    }

    /// Why it failed or was cancelled, where it was.
    #[pyo3(signature = () -> "Error | None")]
    fn error<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let started = self.enter(py)?;
        each!(started, operation => operation.error()).map(|error| exception(py, &error)).transpose()
    }

    /// Asks it to stop; it ends once the local memory is safe to reuse.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        let started = self.enter(py)?;
        py.detach(|| each!(started, operation => operation.cancel()));
        Ok(())
    }

    /// What the peer needs to know; only of a passive operation.
    fn metadata(&self, py: Python<'_>, hex: bool) -> PyResult<Fields> {
        let started = self.enter(py)?;
        // Without the GIL: a thousand tickets take a while to sign.
        let metadata = py.detach(|| match (started, hex) {
            (Started::Readable(operation), false) => Some(operation.metadata()),
            (Started::Readable(operation), true) => Some(operation.metadata_in_hex()),
            (Started::Writable(operation), false) => Some(operation.metadata()),
            (Started::Writable(operation), true) => Some(operation.metadata_in_hex()),
            _ => None,
        });
        let metadata = metadata.ok_or_else(|| PyTypeError::new_err("an active operation has no metadata"))?;
        metadata.map(metadata::to_fields).or_raise(py)
    }

    /// The peer's name, the path and the number of bytes; only of an active operation.
    fn route(&self, py: Python<'_>) -> PyResult<(String, &'static str, u64)> {
        match self.enter(py)? {
            Started::Read(operation) => {
                Ok((operation.peer().to_owned(), operation.path(), operation.bytes()))
            }
            Started::Write(operation) => {
                Ok((operation.peer().to_owned(), operation.path(), operation.bytes()))
            }
            _ => Err(PyTypeError::new_err("a passive operation takes no path")),
        }
    }

    fn __repr__(&self) -> String {
        if process::in_child() {
            return "<Operation of the parent process>".to_owned();
        }
        let status: OperationStatus = each!(self.started(), operation => operation.status());
        format!("<Operation {status}>")
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        if !process::in_child() {
            let started = self.0.take();
            // Ends it where nobody has; waiting for nobody.
            if Python::try_attach(|py| py.detach(|| drop(started))).is_some() {
                Python::try_attach(owners::release);
            }
        }
    }
}
