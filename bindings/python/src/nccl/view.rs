//! Another rank's memory, mapped here.

use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::errors::{OrRaise, invalid};
use super::quiet::Quiet;
use crate::process;

/// Another rank's memory, mapped here.
#[pyclass(frozen, module = "towline._native")]
pub(crate) struct PeerView {
    view: Quiet<Mutex<Option<Arc<towline_comm::PeerView>>>>,
    rank: usize,
    size: usize,
}

impl PeerView {
    pub(super) fn new(view: towline_comm::PeerView) -> PeerView {
        let (rank, size) = (view.rank(), view.len());
        PeerView { view: Quiet::new(Mutex::new(Some(Arc::new(view)))), rank, size }
    }

    fn enter(&self, py: Python<'_>, op: &'static str) -> PyResult<Arc<towline_comm::PeerView>> {
        process::guard(py, op)?;
        let view = self.view.lock().clone();
        view.ok_or_else(|| invalid(py, op, "the view is closed".to_owned()))
    }
}

#[pymethods]
impl PeerView {
    #[getter]
    fn rank(&self) -> usize {
        self.rank
    }

    #[getter]
    fn size(&self) -> usize {
        self.size
    }

    fn read<'py>(&self, py: Python<'py>, offset: usize, nbytes: usize) -> PyResult<Bound<'py, PyBytes>> {
        let view = self.enter(py, "read")?;
        if offset.checked_add(nbytes).is_none_or(|end| end > self.size) {
            let message =
                format!("{nbytes} bytes at offset {offset} are past the end of {} bytes", self.size);
            return Err(invalid(py, "read", message));
        }
        PyBytes::new_with(py, nbytes, |bytes| py.detach(|| view.read_at(offset, bytes)).or_raise(py))
    }

    fn write(&self, py: Python<'_>, offset: usize, data: &[u8]) -> PyResult<()> {
        let view = self.enter(py, "write")?;
        py.detach(|| view.write_at(offset, data)).or_raise(py)
    }

    /// An aligned 64-bit word; what was written before it was stored is visible.
    fn load(&self, py: Python<'_>, offset: usize) -> PyResult<u64> {
        self.enter(py, "load")?.load(offset).or_raise(py)
    }

    /// Writes an aligned 64-bit word, visible after everything that was written before.
    fn store(&self, py: Python<'_>, offset: usize, value: u64) -> PyResult<()> {
        self.enter(py, "store")?.store(offset, value).or_raise(py)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        process::guard(py, "close")?;
        let view = self.view.lock().take();
        py.detach(|| drop(view));
        Ok(())
    }

    #[getter]
    fn closed(&self) -> bool {
        self.view.lock().is_none()
    }
}
