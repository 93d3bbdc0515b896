//! How much one peer may use.

use pyo3::prelude::*;

use crate::errors::invalid;
use crate::request::seconds;

/// How much of an endpoint its peers may use; what is not set is the default. Beyond it they get ``Exhausted``.
#[pyclass(frozen, eq, module = "towline")]
#[derive(PartialEq, Eq)]
pub(crate) struct Quotas(pub(crate) towline::Quotas);

#[pymethods]
impl Quotas {
    #[new]
    #[pyo3(signature = (*, unauthenticated=None, prove_within=None, peers=None, connections=None, grants=None, requests=None,
                        bytes=None, memory=None))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn new(
        py: Python<'_>,
        unauthenticated: Option<i64>,
        prove_within: Option<f64>,
        peers: Option<i64>,
        connections: Option<i64>,
        grants: Option<i64>,
        requests: Option<i64>,
        bytes: Option<i64>,
        memory: Option<i64>,
    ) -> PyResult<Quotas> {
        let usual = towline::Quotas::default();
        let count = |argument: &str, value: Option<i64>, usual: usize| match value {
            None => Ok(usual),
            Some(value) => usize::try_from(value)
                .map_err(|_| invalid(py, "quotas", format!("{argument}: {value} is less than zero"))),
        };
        Ok(Quotas(towline::Quotas {
            unauthenticated: count("unauthenticated", unauthenticated, usual.unauthenticated)?,
            prove_within: seconds(py, "quotas", "prove_within", prove_within)?.unwrap_or(usual.prove_within),
            peers: count("peers", peers, usual.peers)?,
            connections: count("connections", connections, usual.connections)?,
            grants: count("grants", grants, usual.grants)?,
            requests: count("requests", requests, usual.requests)?,
            bytes: count("bytes", bytes, usual.bytes as usize)? as u64,
            memory: count("memory", memory, usual.memory as usize)? as u64,
        }))
    }

    /// Connections that have not proven themselves, at a time.
    #[getter]
    fn unauthenticated(&self) -> usize {
        self.0.unauthenticated
    }

    /// How many seconds a connection may take to prove itself.
    #[getter]
    fn prove_within(&self) -> f64 {
        self.0.prove_within.as_secs_f64()
    }

    /// Sessions of all peers, at a time.
    #[getter]
    fn peers(&self) -> usize {
        self.0.peers
    }

    /// Connections of one peer.
    #[getter]
    fn connections(&self) -> usize {
        self.0.connections
    }

    /// Granted tickets that one peer holds, on one session.
    #[getter]
    fn grants(&self) -> usize {
        self.0.grants
    }

    /// Requests of one session that are not answered yet.
    #[getter]
    fn requests(&self) -> usize {
        self.0.requests
    }

    /// The bytes that these requests ask for.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// The bytes of this process's memory that all peers together may take, 4 GiB by default: sessions, connections and what waits in
    /// them, grants, requests, messages, bytes on their way to and from files and GPUs. One that is alone gets three eighths of it, and
    /// less the more is taken. Beside it stand 72 MiB for unauthenticated connections, 64 MiB for messages of peers that have gone, and 8 MiB for each thread
    /// that works for peers: whatever peers do, they take no more.
    #[getter]
    fn memory(&self) -> u64 {
        self.0.memory
    }

    fn __repr__(&self) -> String {
        format!("<{:?}>", self.0)
    }
}
