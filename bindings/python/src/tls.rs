//! How an endpoint encrypts.

use pyo3::prelude::*;

use crate::errors::OrRaise;

/// How an endpoint encrypts what goes over TCP, and by what it knows its peers. TLS 1.3, and nothing older.
#[pyclass(frozen, module = "towline")]
pub(crate) struct Tls(pub(crate) towline::Tls);

#[pymethods]
impl Tls {
    /// Makes a key for this process. Peers know each other by the tickets that they hold, and by the secret where one is
    /// required: nothing has to be set up.
    #[staticmethod]
    fn by_ticket(py: Python<'_>) -> PyResult<Tls> {
        towline::Tls::by_ticket().or_raise(py).map(Tls)
    }

    /// Uses a certificate on both sides, beside tickets and secret. All three are PEM: the chain of this endpoint's
    /// certificate, its private key, and the authorities whose certificates are believed. A certificate must be valid for
    /// the name of its endpoint, up to the first ``:`` or ``/`` of that name.
    #[staticmethod]
    fn by_certificate(py: Python<'_>, chain: &[u8], key: &[u8], authorities: &[u8]) -> PyResult<Tls> {
        towline::Tls::by_certificate(chain, key, authorities).or_raise(py).map(Tls)
    }

    fn __repr__(&self) -> String {
        format!("<{:?}>", self.0)
    }
}
