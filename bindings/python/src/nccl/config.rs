//! The settings of a communicator, as Python gives them.

use std::net::SocketAddr;

use pyo3::prelude::*;
use towline::Routing;
use towline_comm::Config;

use super::errors::{invalid, settle};
use crate::quotas::Quotas;
use crate::request::{routing, seconds};
use crate::tls::Tls;

/// Settings: what is not set is the default, or what the parent has.
#[pyclass(frozen, module = "towline._native")]
pub(crate) struct CommConfig {
    blocking: Option<bool>,
    timeout: Option<std::time::Duration>,
    contexts: Option<u32>,
    signals: Option<u32>,
    name: Option<String>,
    listen: Vec<SocketAddr>,
    advertise: Vec<SocketAddr>,
    routing: Option<Routing>,
    gpu: Option<u32>,
    tls: Option<towline::Tls>,
    quotas: Option<towline::Quotas>,
    share_between_containers: Option<bool>,
    nixl: Option<towline::NixlOptions>,
}

#[pymethods]
impl CommConfig {
    #[new]
    #[pyo3(signature = (*, blocking, timeout, contexts, signals, name, listen, advertise, require, forbid, gpu=None, tls=None,
                        quotas=None, share_between_containers=None, nixl_lend_over=None))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn new(
        py: Python<'_>,
        blocking: Option<bool>,
        timeout: Option<f64>,
        contexts: Option<i64>,
        signals: Option<i64>,
        name: Option<String>,
        listen: Vec<String>,
        advertise: Vec<String>,
        require: Vec<String>,
        forbid: Vec<String>,
        gpu: Option<u32>,
        tls: Option<&Tls>,
        quotas: Option<&Quotas>,
        share_between_containers: Option<bool>,
        nixl_lend_over: Option<Vec<String>>,
    ) -> PyResult<CommConfig> {
        const OP: &str = "config";
        let count = |argument: &str, value: Option<i64>| {
            let wrong = |value| invalid(py, OP, format!("{argument}: {value} is not within 1 to 65536"));
            let given = value.map(|value| u32::try_from(value).map_err(|_| wrong(value)));
            given.transpose()
        };
        Ok(CommConfig {
            blocking,
            timeout: seconds(py, OP, "timeout", timeout).map_err(|error| settle(py, OP, error))?,
            contexts: count("num_rma_ctx", contexts)?,
            signals: count("num_rma_sig", signals)?,
            name,
            listen: addresses(py, OP, "listen", &listen)?,
            advertise: addresses(py, OP, "advertise", &advertise)?,
            routing: routing(py, &require, &forbid, None).map_err(|error| settle(py, OP, error))?,
            gpu,
            tls: tls.map(|tls| tls.0.clone()),
            quotas: quotas.map(|quotas| quotas.0),
            share_between_containers,
            nixl: nixl_lend_over.map(|devices| towline::NixlOptions::default().lend_over(devices)),
        })
    }
}

impl CommConfig {
    /// Those settings with what is set here instead.
    pub(super) fn over(&self, mut config: Config) -> Config {
        config.blocking = self.blocking.unwrap_or(config.blocking);
        config.timeout = self.timeout.unwrap_or(config.timeout);
        config.contexts = self.contexts.unwrap_or(config.contexts);
        config.signals = self.signals.unwrap_or(config.signals);
        if let Some(name) = &self.name {
            config.name.clone_from(name);
        }
        if !self.listen.is_empty() {
            config.listen.clone_from(&self.listen);
        }
        if !self.advertise.is_empty() {
            config.advertise.clone_from(&self.advertise);
        }
        if let Some(routing) = &self.routing {
            config.routing = routing.clone();
        }
        config.gpu = self.gpu.or(config.gpu);
        config.tls = self.tls.clone().or(config.tls);
        config.quotas = self.quotas.unwrap_or(config.quotas);
        config.share_between_containers =
            self.share_between_containers.unwrap_or(config.share_between_containers);
        config.nixl = self.nixl.clone().unwrap_or(config.nixl);
        config
    }
}

/// Addresses with ports.
pub(super) fn addresses(
    py: Python<'_>,
    op: &'static str,
    argument: &str,
    texts: &[String],
) -> PyResult<Vec<SocketAddr>> {
    texts
        .iter()
        .map(|text| {
            text.parse().map_err(|_| {
                let form = "an address and a port, such as 10.0.0.5:7000 or [::1]:0";
                invalid(py, op, format!("{argument}: {text:?} is not {form}"))
            })
        })
        .collect()
}
