//! Ids of meetings.

use std::net::SocketAddr;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use towline_comm::{UniqueId, UniqueIdOptions};

use super::config::addresses;
use super::errors::OrRaise;
use crate::process;

/// Opens a meeting and returns the bytes of its id.
#[pyfunction]
pub(crate) fn unique_id(
    py: Python<'_>,
    listen: Vec<String>,
    advertise: Vec<String>,
    tls: bool,
) -> PyResult<Bound<'_, PyBytes>> {
    process::guard(py, "get_unique_id")?;
    let listen: Vec<SocketAddr> = addresses(py, "get_unique_id", "listen", &listen)?;
    let advertise = addresses(py, "get_unique_id", "advertise", &advertise)?;
    let made = py.detach(|| {
        if listen.is_empty() && advertise.is_empty() {
            let options = UniqueIdOptions { tls, ..UniqueIdOptions::from_env()? };
            towline_comm::get_unique_id_with(&options)
        } else {
            towline_comm::get_unique_id_with(&UniqueIdOptions { listen, advertise, tls, unjoined: None })
        }
    });
    let id = made.or_raise(py)?;
    process::mark();
    Ok(PyBytes::new(py, id.as_bytes()))
}

/// What an id may be shown as, and its text, which has the secret in it.
#[pyfunction]
pub(crate) fn unique_id_texts(py: Python<'_>, id: &[u8]) -> PyResult<(String, String)> {
    let id = UniqueId::from_bytes(id).or_raise(py)?;
    Ok((format!("{id:?}"), id.to_string()))
}

/// The bytes of the id that has that text.
#[pyfunction]
pub(crate) fn unique_id_from_text<'py>(py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyBytes>> {
    let id: UniqueId = text.parse().or_raise(py)?;
    Ok(PyBytes::new(py, id.as_bytes()))
}
