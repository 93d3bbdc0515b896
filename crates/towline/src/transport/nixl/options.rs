//! How an endpoint uses NIXL.

use std::collections::BTreeMap;

/// When NIXL is taken, of those times when it can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NixlPrefer {
    /// Neither by this endpoint nor for its regions.
    Never,
    /// Between hosts when both sides have an RDMA device; otherwise only where an import requires it.
    #[default]
    WhenBetter,
    /// Before the owner's sockets, wherever both sides have it. The paths that share memory still come first.
    Always,
}

/// How an endpoint uses NIXL, where it does. Costs nothing until a transfer by NIXL is asked for.
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
