//! Who used a region.

use pyo3::prelude::*;

/// Who used a region, or all regions of an endpoint, and who was refused, as far as the owner can see.
#[pyclass(frozen, module = "towline")]
pub(crate) struct Audit(towline::Audit);

impl From<towline::Audit> for Audit {
    fn from(audit: towline::Audit) -> Audit {
        Audit(audit)
    }
}

#[pymethods]
impl Audit {
    /// The peers, by name.
    #[getter]
    fn peers(&self) -> Vec<PeerAudit> {
        self.0.peers.iter().cloned().map(PeerAudit).collect()
    }

    /// Of an endpoint: who was refused before it had proven to hold any ticket, as pairs of where it came from and how often.
    #[getter]
    fn unauthenticated(&self) -> Vec<(String, u64)> {
        self.0.unauthenticated.iter().map(|one| (one.origin.clone(), one.refused)).collect()
    }

    /// Whether some peer was given the memory itself, so that the numbers are not all there is.
    #[getter]
    fn incomplete(&self) -> bool {
        self.0.is_incomplete()
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        let note = if self.0.is_incomplete() { ", incomplete" } else { "" };
        format!("<Audit: {} peers{note}>", self.0.peers.len())
    }
}

/// What one peer did with a region.
#[pyclass(frozen, module = "towline")]
pub(crate) struct PeerAudit(towline::PeerAudit);

#[pymethods]
impl PeerAudit {
    /// What the peer calls itself.
    #[getter]
    fn peer(&self) -> &str {
        &self.0.peer
    }

    /// The life of the peer that is meant, as hexadecimal digits.
    #[getter]
    fn incarnation(&self) -> String {
        self.0.incarnation.to_string()
    }

    /// Requests to read that the owner served, and their bytes.
    #[getter]
    fn reads(&self) -> (u64, u64) {
        self.0.reads
    }

    /// Requests to write, count and signal that the owner served, and their bytes.
    #[getter]
    fn writes(&self) -> (u64, u64) {
        self.0.writes
    }

    /// Requests and tickets that the owner refused.
    #[getter]
    fn refused(&self) -> u64 {
        self.0.refused
    }

    /// Whether the peer was given the memory itself: what it copies then is not counted.
    #[getter]
    fn unseen(&self) -> bool {
        self.0.unseen
    }

    fn __repr__(&self) -> String {
        let (reads, writes) = (self.0.reads, self.0.writes);
        let note = if self.0.unseen { ", may copy by itself" } else { "" };
        format!(
            "<PeerAudit {}: {} reads of {} bytes, {} writes of {} bytes, {} refused{note}>",
            self.0.peer, reads.0, reads.1, writes.0, writes.1, self.0.refused
        )
    }
}
