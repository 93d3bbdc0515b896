//! Numbers as Python gives them.

use pyo3::Borrowed;
use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;

/// An offset, a count or a word. A number that it cannot be is a wrong value, as everywhere in the package.
#[derive(Clone, Copy)]
pub(crate) struct Number(pub(crate) u64);

impl<'py> FromPyObject<'_, 'py> for Number {
    type Error = PyErr;
    #[cfg(feature = "stubs")]
    const INPUT_TYPE: pyo3::inspect::PyStaticExpr = u64::INPUT_TYPE;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Number> {
        number(&value).map(Number)
    }
}

/// [`Number`] for arguments with a default.
pub(crate) fn number(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    value.extract().map_err(|error: PyErr| match error.is_instance_of::<PyOverflowError>(value.py()) {
        true => PyValueError::new_err(format!("a number from 0 to 2**64 - 1 is needed, not {value}")),
        false => error,
    })
}
