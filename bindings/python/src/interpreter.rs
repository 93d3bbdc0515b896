//! Which interpreter this is.
#![allow(unsafe_code, reason = "the number of an interpreter has no safe form")]

use pyo3::ffi;
use pyo3::prelude::*;

/// Whether the caller runs in the interpreter that the process began with.
///
/// Objects of one interpreter must not be released by another, and completions do not say whose they are: the package
/// refuses to be imported elsewhere.
#[pyfunction]
pub(crate) fn is_main_interpreter(_py: Python<'_>) -> bool {
    // SAFETY: the token says that this thread is attached to an interpreter, which both calls are about.
    unsafe { ffi::PyInterpreterState_GetID(ffi::PyInterpreterState_Get()) == 0 }
}
