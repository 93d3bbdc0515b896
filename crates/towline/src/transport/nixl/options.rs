//! How an endpoint uses NIXL.

use std::collections::BTreeMap;

use super::devices::Devices;
use crate::Result;

/// When NIXL is taken, of those times when it can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NixlPrefer {
    /// Neither by this endpoint nor for its regions.
    Never,
    /// Between hosts, where this endpoint has named an RDMA device ([`reach_over`](NixlOptions::reach_over),
    /// [`lend_over`](NixlOptions::lend_over)); otherwise only where an import requires it.
    #[default]
    WhenBetter,
    /// Before the owner's sockets, wherever the owner lends. The paths that share memory still come first.
    Always,
}

/// How an endpoint uses NIXL, where it does. Costs nothing until a transfer by NIXL is asked for.
///
/// Owners lend nothing by NIXL unless they say so ([`lend_over`](Self::lend_over)).
///
/// ```
/// use towline::{Endpoint, NixlOptions, NixlPrefer};
/// let endpoint = Endpoint::options("decode-3")
///     .nixl(NixlOptions::default().backend("UCX", [("num_workers", "2")]).prefer(NixlPrefer::Always))
///     .open()?;
/// # Ok::<(), towline::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NixlOptions {
    backends: Vec<(String, BTreeMap<String, String>)>,
    prefer: NixlPrefer,
    devices: Vec<String>,
    lends: bool,
}

impl NixlOptions {
    /// Uses that plug-in, with these parameters and its own defaults for the others. Without any, UCX moves memory, and POSIX
    /// is made when a file is first asked for.
    ///
    /// Plug-ins that take files (POSIX, GDS, GDS_MT) serve the files of owners on this host; the others move memory.
    #[must_use]
    pub fn backend<K: Into<String>, V: Into<String>>(
        mut self,
        plugin: &str,
        parameters: impl IntoIterator<Item = (K, V)>,
    ) -> NixlOptions {
        let parameters = parameters.into_iter().map(|(key, value)| (key.into(), value.into())).collect();
        self.backends.push((plugin.to_ascii_uppercase(), parameters));
        self
    }

    /// Sets when NIXL is taken.
    #[must_use]
    pub fn prefer(mut self, prefer: NixlPrefer) -> NixlOptions {
        self.prefer = prefer;
        self
    }

    /// Lends this endpoint's regions to peers that ask for them by NIXL, and lets UCX use these devices and no others: ports of RDMA
    /// devices and network interfaces as UCX calls them (`mlx5_0:1`, `eth0`), or `tcp` for all interfaces. Off by default.
    ///
    /// **A loan by NIXL gives the peer all memory of this process, to read and to write, and nobody checks or counts it.** NIXL's keys cannot be
    /// narrowed, and UCX does what a message says at whatever address it names. Over an interface (UCX's tcp) that holds for
    /// every program that can connect to it: UCX listens there and asks for no ticket. So lend on a network of your own, to peers
    /// that are your own. Asked for is a ticket of the whole region for reading and writing, and over an interface memory that this library
    /// allocated (UCX would end the process where other memory goes away);
    /// [`Routing::forbid`](crate::Routing::forbid) and [`Isolation::Enforced`](crate::Isolation::Enforced) of this endpoint come first. The
    /// audit shows who was lent to.
    ///
    /// UCX has to be among the plug-ins, and is then the only one that moves memory: others cannot be held to devices.
    ///
    /// ```
    /// use towline::{Endpoint, NixlOptions};
    /// let endpoint = Endpoint::options("prefill").nixl(NixlOptions::default().lend_over(["lo"])).open()?;
    /// # Ok::<(), towline::Error>(())
    /// ```
    #[must_use]
    pub fn lend_over<D: Into<String>>(mut self, devices: impl IntoIterator<Item = D>) -> NixlOptions {
        self = self.reach_over(devices);
        self.lends = self.names_devices();
        self
    }

    /// Lets UCX use these devices and no others to reach owners, named as for [`lend_over`](Self::lend_over), which names them for
    /// both. Without it, an import that requires `nixl` takes the RDMA devices of this host, and others do not take it.
    ///
    /// It gives away as much: the owner's UCX can read and write all memory of this process as well. And UCX cannot use an interface
    /// without listening on it, for every program that can connect to it there. `lo` is enough for owners on this host.
    #[must_use]
    pub fn reach_over<D: Into<String>>(mut self, devices: impl IntoIterator<Item = D>) -> NixlOptions {
        self.devices = devices.into_iter().map(Into::into).collect();
        self.lends = false;
        self
    }

    /// Whether the user has named devices.
    pub(super) fn names_devices(&self) -> bool {
        !self.devices.is_empty()
    }

    /// Whether UCX, which needs devices, is among the plug-ins.
    pub(super) fn uses_ucx(&self) -> bool {
        self.backends().iter().any(|(plugin, _)| plugin == "UCX")
    }

    /// Refuses devices that are not there.
    pub(crate) fn check(&self) -> Result<()> {
        if self.names_devices() { Devices::of(&self.devices, "open").map(|_| ()) } else { Ok(()) }
    }

    /// The devices that UCX may use.
    pub(super) fn devices(&self) -> Result<Devices> {
        Devices::of(&self.devices, "import")
    }

    /// Whether the user has opted in to lending.
    pub(super) fn lends(&self) -> bool {
        self.lends && self.prefer != NixlPrefer::Never
    }

    pub(crate) fn prefers(&self) -> NixlPrefer {
        self.prefer
    }

    /// Whether the user has named plug-ins.
    pub(super) fn names_backends(&self) -> bool {
        !self.backends.is_empty()
    }

    /// The plug-ins with their parameters.
    pub(super) fn backends(&self) -> Vec<(String, BTreeMap<String, String>)> {
        if self.backends.is_empty() {
            return vec![("UCX".to_owned(), BTreeMap::new())];
        }
        self.backends.clone()
    }
}
