//! Groups of calls, and what was asked for inside which.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::prelude::*;
use towline_comm::Error;

use super::errors::OrRaise;
use crate::attention::without_gil;
use crate::{owners, process};

static NEXT: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// How deep the group of this thread is nested, and its number.
    static OPEN: Cell<(usize, u64)> = const { Cell::new((0, 0)) };
}

/// The number of the group that is open on this thread.
pub(super) fn current() -> Option<u64> {
    let (depth, number) = OPEN.get();
    (depth > 0).then_some(number)
}

/// Keeps the group that is open on this thread, if any, from being launched.
pub(super) fn poison(error: &Error) {
    if current().is_some() {
        // A nested group that fails takes the outer one along.
        let _ = towline_comm::group(|| Err::<(), _>(error.clone()));
    }
}

/// Begins a group of calls on this thread.
#[pyfunction]
pub(crate) fn group_start(py: Python<'_>) -> PyResult<()> {
    process::guard(py, "group_start")?;
    towline_comm::group_start();
    let (depth, number) = OPEN.get();
    let number = if depth == 0 { NEXT.fetch_add(1, Ordering::Relaxed) } else { number };
    OPEN.set((depth + 1, number));
    Ok(())
}

/// Ends a group of calls on this thread; the outermost end launches them.
#[pyfunction]
pub(crate) fn group_end(py: Python<'_>) -> PyResult<()> {
    process::guard(py, "group_end")?;
    let (depth, number) = OPEN.get();
    OPEN.set((depth.saturating_sub(1), number));
    let ended = without_gil(py, towline_comm::group_end).and_then(|ended| ended.or_raise(py));
    owners::release(py);
    ended
}

/// Keeps the group that is open on this thread, if any, from being launched.
#[pyfunction]
pub(crate) fn group_poison(py: Python<'_>, op: &str, why: String) -> PyResult<()> {
    process::guard(py, "group")?;
    let op = if op.is_empty() { String::new() } else { format!("{op}: ") };
    poison(&Error::invalid("group", format!("{op}{why}")));
    Ok(())
}
