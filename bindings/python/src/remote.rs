//! Imported tickets, and why which path is taken.

use pyo3::prelude::*;
use towline::Verdict;

use crate::layout::Layout;
use crate::process::Inherited;

/// A ticket made usable here.
#[pyclass(frozen, module = "towline")]
pub(crate) struct Remote(pub(crate) Inherited<towline::Remote>);

#[pymethods]
impl Remote {
    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.0.len())?)
    }

    /// How many bytes the ticket reaches.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.len()
    }

    /// What the ticket allows.
    #[getter]
    fn access(&self) -> &'static str {
        self.0.access().name()
    }

    /// Where the bytes live.
    #[getter]
    fn place(&self) -> String {
        self.0.place().to_string()
    }

    /// The owner's name.
    #[getter]
    fn peer(&self) -> &str {
        self.0.peer()
    }

    /// The path that transfers take.
    #[getter]
    fn path(&self) -> &'static str {
        self.0.path()
    }

    /// The layout that the owner put into the ticket.
    #[getter]
    fn layout(&self) -> Option<Layout> {
        self.0.layout().cloned().map(Layout)
    }

    /// Every path, the one taken, and the reason for the others.
    fn explain(&self) -> Explanation {
        Explanation(self.0.explain().clone())
    }

    fn __repr__(&self) -> String {
        format!(
            "<Remote of {}: {} bytes at {}, {}, path {}>",
            self.peer(),
            self.nbytes(),
            self.place(),
            self.access(),
            self.path()
        )
    }
}

/// Every path to a remote region; ``str`` shows it as a table.
#[pyclass(frozen, module = "towline")]
pub(crate) struct Explanation(pub(crate) towline::Explanation);

#[pymethods]
impl Explanation {
    /// The path that transfers take.
    #[getter]
    fn taken(&self) -> Option<&'static str> {
        self.0.taken()
    }

    /// The paths in order of preference.
    #[getter]
    fn paths(&self) -> Vec<ExplainedPath> {
        self.0.paths.iter().cloned().map(ExplainedPath).collect()
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<Explanation: {} is taken>", self.0.taken().unwrap_or("no path"))
    }
}

/// One path and what became of it.
#[pyclass(frozen, module = "towline")]
pub(crate) struct ExplainedPath(towline::ExplainedPath);

#[pymethods]
impl ExplainedPath {
    /// The path's name.
    #[getter]
    fn path(&self) -> &'static str {
        self.0.path
    }

    /// ``taken``, ``possible`` or ``refused``.
    #[getter]
    fn verdict(&self) -> &'static str {
        match self.0.verdict {
            Verdict::Taken => "taken",
            Verdict::Possible => "possible",
            Verdict::Refused => "refused",
        }
    }

    /// Why.
    #[getter]
    fn reason(&self) -> &str {
        &self.0.reason
    }

    /// Whether the owner checks every access on it.
    #[getter]
    fn enforced(&self) -> bool {
        self.0.enforced
    }

    fn __repr__(&self) -> String {
        format!("<ExplainedPath {}: {}, {}>", self.0.path, self.verdict(), self.0.reason)
    }
}
