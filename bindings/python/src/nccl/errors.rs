//! The communicators' error as the exceptions of `towline.nccl`.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};
use towline::Kind;
use towline_comm::Error;

use super::group;

/// The exception classes in the order of `Kind::ALL`.
static CLASSES: PyOnceLock<Vec<Py<PyType>>> = PyOnceLock::new();

fn classes(py: Python<'_>) -> PyResult<&Vec<Py<PyType>>> {
    CLASSES.get_or_try_init(py, || {
        let by_kind = py.import("towline.nccl._errors")?.getattr("BY_KIND")?;
        Kind::ALL
            .iter()
            .map(|(_, name)| Ok(by_kind.get_item(name)?.cast_into::<PyType>()?.unbind()))
            .collect::<PyResult<Vec<_>>>()
    })
}

/// The exception for that error.
pub(super) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    match exception(py, error) {
        Ok(exception) => PyErr::from_value(exception),
        Err(failed) => failed,
    }
}

/// The exception object for that error, where it is data and not raised.
pub(super) fn exception<'py>(py: Python<'py>, error: &Error) -> PyResult<Bound<'py, PyAny>> {
    let class = classes(py)?[error.kind() as usize].bind(py);
    let details = PyDict::new(py);
    details.set_item("op", error.op())?;
    details.set_item("ranks", error.ranks())?;
    class.call((error.message(),), Some(&details))
}

/// An `Invalid` error that names an argument.
pub(super) fn invalid(py: Python<'_>, op: &'static str, message: String) -> PyErr {
    raise(py, &Error::invalid(op, message))
}

/// Turns the communicators' results into Python's.
pub(super) trait OrRaise<T> {
    /// The value, or the exception for the error.
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for towline_comm::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raise(py, &error))
    }
}

/// The error of the core that says that an argument is wrong, as one of the communicators'; `None` for any other.
pub(super) fn argument(py: Python<'_>, op: &'static str, error: &PyErr) -> Option<Error> {
    let message = || -> PyResult<Option<Error>> {
        let module = py.import("towline._errors")?;
        let value = error.value(py);
        let ranks = value.getattr_opt("ranks")?.map(|ranks| ranks.extract::<Vec<usize>>()).transpose()?;
        // The core does not support memory of devices, and says so; a communicator that cannot do something means it.
        let wrong = value.is_instance(&module.getattr("Invalid")?)?
            || (ranks.is_none() && value.is_instance(&module.getattr("Unsupported")?)?);
        if !wrong {
            return Ok(None);
        }
        let message: String = value.getattr("message")?.extract()?;
        Ok(Some(Error::invalid(op, message).about(ranks.unwrap_or_default())))
    };
    message().ok().flatten()
}

/// What a call raises: wrong arguments as `NcclInvalid`. Keeps the group that is open from being launched.
pub(super) fn settle(py: Python<'_>, op: &'static str, error: PyErr) -> PyErr {
    match argument(py, op, &error) {
        Some(wrong) => {
            group::poison(&wrong);
            raise(py, &wrong)
        }
        None => {
            group::poison(&Error::invalid(op, error.value(py).to_string()));
            error
        }
    }
}
