//! What was moved.

use pyo3::prelude::*;

/// What an endpoint has moved and what it holds.
#[pyclass(frozen, module = "towline")]
pub(crate) struct Stats(towline::Stats);

impl From<towline::Stats> for Stats {
    fn from(stats: towline::Stats) -> Stats {
        Stats(stats)
    }
}

#[pymethods]
impl Stats {
    /// Transfers that this endpoint started, per peer and path.
    #[getter]
    fn paths(&self) -> Vec<PathStats> {
        self.0.paths.iter().cloned().map(PathStats).collect()
    }

    /// Regions that are registered now.
    #[getter]
    fn regions(&self) -> usize {
        self.0.regions
    }

    /// Memories of closed regions that a peer has not let go yet, and their bytes.
    #[getter]
    fn parked(&self) -> (usize, usize) {
        self.0.parked
    }

    /// What this endpoint refused to serve: accesses, tickets, handshakes.
    #[getter]
    fn refused(&self) -> u64 {
        self.0.refused
    }

    /// Connections among them that did not become sessions.
    #[getter]
    fn refused_handshakes(&self) -> u64 {
        self.0.refused_handshakes
    }

    /// Sessions of peers that use this endpoint's regions.
    #[getter]
    fn peers(&self) -> usize {
        self.0.peers
    }

    /// Connections that have not proven themselves yet.
    #[getter]
    fn unauthenticated(&self) -> usize {
        self.0.unauthenticated
    }

    /// Requests of peers that are being served, and their bytes.
    #[getter]
    fn in_flight(&self) -> (usize, u64) {
        self.0.in_flight
    }

    fn __repr__(&self) -> String {
        format!(
            "<Stats: {} regions, {} parked, {} refused, paths {:?}>",
            self.0.regions,
            self.0.parked.0,
            self.0.refused,
            self.0.paths.iter().map(|path| path.path).collect::<Vec<_>>()
        )
    }
}

/// What was moved between an endpoint and one peer over one path.
#[pyclass(frozen, module = "towline")]
pub(crate) struct PathStats(towline::PathStats);

#[pymethods]
impl PathStats {
    /// The peer's name.
    #[getter]
    fn peer(&self) -> &str {
        &self.0.peer
    }

    /// The path.
    #[getter]
    fn path(&self) -> &'static str {
        self.0.path
    }

    /// Reads that ended well, and their bytes.
    #[getter]
    fn reads(&self) -> (u64, u64) {
        self.0.reads
    }

    /// Writes, signals and atomics that ended well, and their bytes.
    #[getter]
    fn writes(&self) -> (u64, u64) {
        self.0.writes
    }

    /// Transfers that ended in an error.
    #[getter]
    fn failures(&self) -> u64 {
        self.0.failures
    }

    fn __repr__(&self) -> String {
        let (reads, writes) = (self.0.reads, self.0.writes);
        format!(
            "<PathStats {} over {}: {} reads of {} bytes, {} writes of {} bytes, {} failures>",
            self.0.peer, self.0.path, reads.0, reads.1, writes.0, writes.1, self.0.failures
        )
    }
}
