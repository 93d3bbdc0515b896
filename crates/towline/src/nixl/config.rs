//! Which backends an agent gets, and how agents are set up.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::engine::Engine;
use crate::{Error, Result};

/// What the names of the variables begin with that turn backends on and off.
const PREFIX: &str = "DYN_KVBM_NIXL_BACKEND_";

/// The backends of an agent with their parameters. Names are in capitals and in order.
///
/// ```
/// use towline::nixl::NixlBackendConfig;
/// let config = NixlBackendConfig::default()
///     .with_backend("ucx")
///     .with_backend_params("POSIX", [("use_uring", "true")]);
/// assert_eq!(config.backends(), ["POSIX", "UCX"]);
/// assert!(config.has_backend("Ucx"));
/// assert_eq!(config.backend_params("posix").unwrap()["use_uring"], "true");
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NixlBackendConfig {
    backends: BTreeMap<String, BTreeMap<String, String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    engine: Option<Engine>,
}

impl NixlBackendConfig {
    /// The backends given, each with its parameters.
    pub fn new(backends: HashMap<String, HashMap<String, String>>) -> NixlBackendConfig {
        backends
            .into_iter()
            .fold(NixlBackendConfig::default(), |all, (name, params)| all.with_backend_params(name, params))
    }

    /// The backends whose variable `DYN_KVBM_NIXL_BACKEND_<NAME>` says yes; a name may have underscores (`GDS_MT`).
    ///
    /// # Errors
    /// `Invalid` where a value is neither yes (`1`, `true`, `on`, `yes`) nor no (`0`, `false`, `off`, `no`, nothing).
    pub fn from_env() -> Result<NixlBackendConfig> {
        NixlBackendConfig::from_variables(std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.to_string_lossy().into_owned()))
        }))
    }

    fn from_variables(variables: impl Iterator<Item = (String, String)>) -> Result<NixlBackendConfig> {
        let mut config = NixlBackendConfig::default();
        for (variable, value) in variables {
            let Some(name) = variable.strip_prefix(PREFIX) else { continue };
            let wanted = match value.trim().to_ascii_lowercase().as_str() {
                "1" | "true" | "on" | "yes" => true,
                "" | "0" | "false" | "off" | "no" => false,
                _ => {
                    let message = format!("{variable}={value:?} is not a boolean (yes or no)");
                    return Err(Error::invalid("nixl", message));
                }
            };
            if name.is_empty() {
                return Err(Error::invalid("nixl", format!("{variable} names no backend")));
            }
            if wanted {
                config = config.with_backend(name);
            }
        }
        Ok(config)
    }

    /// Adds a backend with its default parameters.
    #[must_use]
    pub fn with_backend(self, backend: impl AsRef<str>) -> NixlBackendConfig {
        self.with_backend_params(backend, std::iter::empty::<(String, String)>())
    }

    /// Adds a backend with some parameters; the others keep their defaults.
    #[must_use]
    pub fn with_backend_params<K: Into<String>, V: Into<String>>(
        mut self,
        backend: impl AsRef<str>,
        params: impl IntoIterator<Item = (K, V)>,
    ) -> NixlBackendConfig {
        let params = params.into_iter().map(|(key, value)| (key.into(), value.into())).collect();
        self.backends.insert(backend.as_ref().to_ascii_uppercase(), params);
        self
    }

    /// Asks for an engine; without that it is NIXL where that is there, and else the embedded one.
    #[must_use]
    pub fn with_engine(mut self, engine: Engine) -> NixlBackendConfig {
        self.engine = Some(engine);
        self
    }

    /// The engine that is asked for.
    pub fn engine(&self) -> Option<Engine> {
        self.engine
    }

    /// The names of the backends.
    pub fn backends(&self) -> Vec<String> {
        self.backends.keys().cloned().collect()
    }

    /// The parameters of a backend, where it is among them.
    pub fn backend_params(&self, backend: &str) -> Option<&BTreeMap<String, String>> {
        self.backends.get(&backend.to_ascii_uppercase())
    }

    /// Whether a backend is among them.
    pub fn has_backend(&self, backend: &str) -> bool {
        self.backend_params(backend).is_some()
    }

    /// Adds those of another configuration, which wins where both name a backend.
    #[must_use]
    pub fn merge(mut self, other: NixlBackendConfig) -> NixlBackendConfig {
        self.backends.extend(other.backends);
        self.engine = other.engine.or(self.engine);
        self
    }

    /// The backends and their parameters.
    pub fn iter(&self) -> impl Iterator<Item = (&String, &BTreeMap<String, String>)> {
        self.backends.iter()
    }
}

/// How calls from several threads are kept apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ThreadSync {
    /// As [`Strict`](ThreadSync::Strict): an agent can be shared here, so it is never left without.
    #[default]
    Default,
    /// One call at a time.
    Strict,
    /// Calls that only look run beside each other.
    Rw,
}

/// How an agent is set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentConfig {
    /// A thread that drives transfers, on a core of its own while it spins.
    pub enable_prog_thread: bool,
    /// How long that thread pauses between two looks, in microseconds.
    pub pthr_delay_us: u64,
    /// Lets other agents fetch this one's metadata over the network.
    pub enable_listen_thread: bool,
    /// The port for that.
    pub listen_port: u16,
    /// How calls from several threads are kept apart.
    pub thread_sync: ThreadSync,
    /// Measures every transfer. The embedded engine always does.
    pub capture_telemetry: bool,
    /// The engine; without one, NIXL where that is there, and else the embedded one, to which the rest of this does not apply.
    pub engine: Option<Engine>,
    /// The network devices that UCX may use, as [`NixlOptions::reach_over`](crate::NixlOptions::reach_over) names them; of an empty list, RDMA
    /// devices alone. Without a list UCX takes what NIXL's own agents have: all that there are. It listens on every interface with an
    /// address then, for every program that can connect to it there.
    pub ucx_devices: Option<Vec<String>>,
    /// A library, its folder, a `site-packages` folder or a prefix to look in where NIXL is found nowhere else.
    pub also_look_in: Option<PathBuf>,
}

impl Default for AgentConfig {
    fn default() -> AgentConfig {
        AgentConfig {
            enable_prog_thread: true,
            pthr_delay_us: 0,
            enable_listen_thread: false,
            listen_port: 8888,
            thread_sync: ThreadSync::Default,
            capture_telemetry: false,
            engine: None,
            ucx_devices: None,
            also_look_in: None,
        }
    }
}

impl AgentConfig {
    pub(super) fn native(&self) -> towline_sys::nixl::AgentConfig {
        let mut native = towline_sys::nixl::AgentConfig::default();
        native.progress_thread = self.enable_prog_thread;
        native.progress_pause = Duration::from_micros(self.pthr_delay_us);
        native.listen = self.enable_listen_thread.then_some(self.listen_port);
        native.sync = match self.thread_sync {
            ThreadSync::Default | ThreadSync::Strict => towline_sys::nixl::ThreadSync::Strict,
            ThreadSync::Rw => towline_sys::nixl::ThreadSync::ReadWrite,
        };
        native.telemetry = self.capture_telemetry;
        native
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;
    use crate::Kind;

    fn from(variables: &[(&str, &str)]) -> Result<NixlBackendConfig> {
        let owned = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        NixlBackendConfig::from_variables(owned)
    }

    #[test]
    fn variables_turn_backends_on_and_names_may_have_underscores() {
        let config = from(&[
            ("DYN_KVBM_NIXL_BACKEND_UCX", " True "),
            ("DYN_KVBM_NIXL_BACKEND_GDS_MT", "1"),
            ("DYN_KVBM_NIXL_BACKEND_POSIX", "off"),
            ("DYN_KVBM_NIXL_BACKEND_OBJ", ""),
            ("PATH", "/bin"),
        ]);
        assert_eq!(config.unwrap().backends(), ["GDS_MT", "UCX"]);
    }

    #[test]
    fn a_value_that_says_neither_yes_nor_no_is_invalid() {
        let error = from(&[("DYN_KVBM_NIXL_BACKEND_UCX", "maybe")]).unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
        assert!(error.message().contains("DYN_KVBM_NIXL_BACKEND_UCX=\"maybe\""), "{error}");
        assert_eq!(from(&[("DYN_KVBM_NIXL_BACKEND_", "1")]).unwrap_err().kind(), Kind::Invalid);
    }

    #[test]
    fn the_other_configuration_wins_and_all_survives_serialisation() {
        let first =
            NixlBackendConfig::default().with_backend_params("ucx", [("a", "1")]).with_backend("POSIX");
        let map = HashMap::from([("ucx".to_owned(), HashMap::from([("b".to_owned(), "2".to_owned())]))]);
        let merged = first.merge(NixlBackendConfig::new(map));
        assert_eq!(merged.backends(), ["POSIX", "UCX"]);
        assert_eq!(merged.backend_params("UCX").unwrap()["b"], "2");
        assert!(!merged.backend_params("UCX").unwrap().contains_key("a"));
        let text = serde_json::to_string(&merged).unwrap();
        assert_eq!(serde_json::from_str::<NixlBackendConfig>(&text).unwrap(), merged);
    }
}
