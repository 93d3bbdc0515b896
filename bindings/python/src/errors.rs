//! The core's one error as the exceptions of `towline`.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};
use towline::{Error, Kind};

/// The exception classes in the order of `Kind::ALL`.
static CLASSES: PyOnceLock<Vec<Py<PyType>>> = PyOnceLock::new();

fn classes(py: Python<'_>) -> PyResult<&Vec<Py<PyType>>> {
    CLASSES.get_or_try_init(py, || {
        let by_kind = py.import("towline._errors")?.getattr("BY_KIND")?;
        Kind::ALL
            .iter()
            .map(|(_, name)| Ok(by_kind.get_item(name)?.cast_into::<PyType>()?.unbind()))
            .collect::<PyResult<Vec<_>>>()
    })
}

/// The exception for that error.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    match exception(py, error) {
        Ok(exception) => PyErr::from_value(exception),
        Err(failed) => failed,
    }
}

/// The exception object for that error, where it is data and not raised.
pub(crate) fn exception<'py>(py: Python<'py>, error: &Error) -> PyResult<Bound<'py, PyAny>> {
    let class = classes(py)?[error.kind() as usize].bind(py);
    let details = PyDict::new(py);
    details.set_item("op", error.op())?;
    details.set_item("transport", error.transport())?;
    details.set_item("peer", error.peer())?;
    class.call((error.message(),), Some(&details))
}

/// An `Invalid` error that names an argument.
pub(crate) fn invalid(py: Python<'_>, op: &'static str, message: String) -> PyErr {
    raise(py, &Error::invalid(op, message))
}

/// Turns the core's results into Python's.
pub(crate) trait OrRaise<T> {
    /// The value, or the exception for the error.
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T, E: Into<Error>> OrRaise<T> for Result<T, E> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raise(py, &error.into()))
    }
}
