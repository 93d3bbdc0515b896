//! An agent of NIXL with its backends, and what is registered with it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, Weak};

use towline_sys::nixl::{self as native, Nixl};

use super::config::{AgentConfig, NixlBackendConfig};
use super::registered::{Held, Range};
use super::transfer::{NotificationMap, OptArgs, XferDescList, XferOp, XferRequest, XferStatus};
use crate::memory::MemType;
use crate::sync::lock;
use crate::{Error, Kind, Result};

/// An agent of NIXL with its backends. Clones are the same agent.
///
/// ```no_run
/// use towline::nixl::{NixlAgent, NixlRegisterExt};
/// use towline::SystemStorage;
///
/// let agent = NixlAgent::with_backends("prefill", &["UCX"])?;
/// let memory = SystemStorage::new(1 << 20)?.register(&agent, None)?;
/// let metadata = agent.get_local_md()?;
/// # Ok::<(), towline::Error>(())
/// ```
#[derive(Clone)]
pub struct NixlAgent(Arc<Core>);

struct Core {
    nixl: Nixl,
    agent: native::Agent,
    backends: Mutex<BTreeMap<String, native::Backend>>,
    held: Mutex<HeldByKey>,
}

/// What is registered, by kind, device and address.
type HeldByKey = BTreeMap<(u8, u64, u64), Vec<Weak<dyn Held>>>;

impl NixlAgent {
    /// Creates an agent without a backend.
    ///
    /// # Errors
    /// `Unavailable`, with the places tried, where NIXL is not there; `Native` where it refuses.
    pub fn new(name: &str) -> Result<NixlAgent> {
        NixlAgent::new_with_config(name, &AgentConfig::default())
    }

    /// Creates an agent that is set up as said.
    pub fn new_with_config(name: &str, config: &AgentConfig) -> Result<NixlAgent> {
        let nixl = Nixl::load()?;
        let agent = nixl.agent(name, &config.native())?;
        Ok(NixlAgent(Arc::new(Core { nixl, agent, backends: Mutex::default(), held: Mutex::default() })))
    }

    /// Creates an agent with those backends, all of them.
    pub fn with_backends(name: &str, backends: &[&str]) -> Result<NixlAgent> {
        let config = backends.iter().fold(NixlBackendConfig::default(), |all, one| all.with_backend(one));
        NixlAgent::from_nixl_backend_config(name, config)
    }

    /// Creates an agent with the backends of a configuration, all of them, in the order of their names.
    ///
    /// # Errors
    /// As for [`new`](Self::new); an error names every backend that could not be made.
    pub fn from_nixl_backend_config(name: &str, config: NixlBackendConfig) -> Result<NixlAgent> {
        let agent = NixlAgent::new(name)?;
        let failed: Vec<_> = config
            .iter()
            .filter_map(|(backend, params)| agent.add_backend_with_params(backend, params).err())
            .collect();
        match failed.as_slice() {
            [] => Ok(agent),
            [error] => Err(error.clone()),
            errors => {
                let messages: Vec<_> = errors.iter().map(Error::message).collect();
                Err(Error::new(errors[0].kind(), "nixl", messages.join("; ")))
            }
        }
    }

    /// Adds a backend with its default parameters.
    pub fn add_backend(&self, backend: &str) -> Result<()> {
        self.add_backend_with_params(backend, &BTreeMap::new())
    }

    /// Adds a backend with some parameters; the others keep their defaults. One that is there stays as it is.
    pub fn add_backend_with_params(&self, backend: &str, params: &BTreeMap<String, String>) -> Result<()> {
        let name = backend.to_ascii_uppercase();
        let mut backends = lock(&self.0.backends);
        if backends.contains_key(&name) {
            return Ok(());
        }
        let made = self.0.agent.create_backend(&name, params).map_err(|error| {
            let error = Error::from(error);
            Error::new(error.kind(), "nixl", format!("backend {name}: {}", error.message())).caused_by(error)
        })?;
        backends.insert(name, made);
        Ok(())
    }

    /// Whether it has that backend.
    pub fn has_backend(&self, backend: &str) -> bool {
        lock(&self.0.backends).contains_key(&backend.to_ascii_uppercase())
    }

    /// The names of its backends.
    pub fn backends(&self) -> Vec<String> {
        lock(&self.0.backends).keys().cloned().collect()
    }

    /// `Unavailable` unless it has that backend.
    pub fn require_backend(&self, backend: &str) -> Result<()> {
        if self.has_backend(backend) {
            return Ok(());
        }
        let (name, has) = (self.name(), self.backends().join(", "));
        Err(Error::new(
            Kind::Unavailable,
            "nixl",
            format!("agent {name} has no backend {backend}; it has: {has}"),
        ))
    }

    /// Its name.
    pub fn name(&self) -> String {
        self.0.agent.name().to_owned()
    }

    /// The plug-ins that backends could be made of.
    pub fn get_available_plugins(&self) -> Result<Vec<String>> {
        Ok(self.0.agent.plugins()?)
    }

    /// Everything that a peer needs to reach all that is registered here.
    pub fn get_local_md(&self) -> Result<Vec<u8>> {
        Ok(self.0.agent.metadata()?)
    }

    /// Takes in a peer's metadata and says the peer's name. NIXL trusts the bytes: take them only from a peer that has
    /// proved who it is.
    pub fn load_remote_md(&self, metadata: &[u8]) -> Result<String> {
        Ok(self.0.agent.load_metadata(metadata)?)
    }

    /// Whether the peer's metadata is here, and covers the list where there is one.
    pub fn check_remote_metadata(&self, peer: &str, list: Option<&XferDescList>) -> bool {
        let known = || -> Result<bool> {
            let list = list.map(|list| list.native(&self.0.nixl)).transpose()?;
            Ok(self.0.agent.knows(peer, list.as_ref())?)
        };
        known().unwrap_or(false)
    }

    /// Forgets a peer's metadata and disconnects from it.
    pub fn invalidate_remote_md(&self, peer: &str) -> Result<()> {
        Ok(self.0.agent.forget(peer)?)
    }

    /// Connects to a peer whose metadata is here, ahead of the first transfer.
    pub fn make_connection(&self, peer: &str, opt: Option<&OptArgs>) -> Result<()> {
        self.with_options(opt, |options| Ok(self.0.agent.connect(peer, options)?))
    }

    /// Makes a transfer between local ranges, which must be registered here, and remote ones.
    ///
    /// The request keeps the local memory: a registration that is dropped meanwhile stays until it has ended.
    ///
    /// # Errors
    /// `Invalid` where a local range is not registered with this agent; `Native` where NIXL refuses, for instance
    /// because the peer's metadata does not cover a remote range.
    #[allow(unsafe_code, reason = "hands addresses to NIXL")]
    pub fn create_xfer_req(
        &self,
        op: XferOp,
        local: &XferDescList,
        remote: &XferDescList,
        peer: &str,
        opt: Option<&OptArgs>,
    ) -> Result<XferRequest> {
        let mut keep = self.keepers(local)?;
        if peer == self.0.agent.name() {
            keep.extend(self.keepers(remote)?);
        }
        let (near, far) = (local.native(&self.0.nixl)?, remote.native(&self.0.nixl)?);
        let request = self.with_options(opt, |options| {
            // SAFETY: every local range lies in a registered storage that `keep` holds, and the request holds `keep`
            // until NIXL has let go of it.
            Ok(unsafe { self.0.agent.request(op.native(), &near, &far, peer, options) }?)
        })?;
        Ok(XferRequest::new(request, keep))
    }

    /// Starts a transfer; true while it is in progress. The options' notification goes with it.
    pub fn post_xfer_req(&self, request: &XferRequest, opt: Option<&OptArgs>) -> Result<bool> {
        request.post(opt.and_then(OptArgs::notification))
    }

    /// Asks how far a transfer is.
    pub fn get_xfer_status(&self, request: &XferRequest) -> Result<XferStatus> {
        request.status()
    }

    /// Sends a peer a message that belongs to no transfer.
    pub fn send_notification(&self, peer: &str, message: &[u8], backend: Option<&str>) -> Result<()> {
        let mut opt = OptArgs::new();
        if let Some(backend) = backend {
            opt.add_backend(backend);
        }
        self.with_options(Some(&opt), |options| Ok(self.0.agent.notify(peer, message, options)?))
    }

    /// Adds the messages that have come.
    pub fn get_notifications(&self, into: &mut NotificationMap) -> Result<()> {
        into.extend(self.0.agent.notifications()?);
        Ok(())
    }

    /// Registers the range. See `native::Agent::register` for what is promised.
    ///
    /// # Safety
    /// The range stays valid until the registration has been given back, and transfers that touch it have ended.
    #[allow(unsafe_code, reason = "the signature passes an obligation on")]
    pub(super) unsafe fn register_range(
        &self,
        range: &Range,
        opt: Option<&OptArgs>,
    ) -> Result<native::Registration> {
        let list = native::RegistrationList::new(&self.0.nixl, range.kind(), [range.descriptor()])?;
        // SAFETY: the caller's obligation is the same.
        self.with_options(opt, |options| Ok(unsafe { self.0.agent.register(list, options) }?))
    }

    pub(super) fn note(&self, held: &Arc<dyn Held>) {
        let mut all = lock(&self.0.held);
        let at = all.entry(held.range().key()).or_default();
        at.retain(|one| one.strong_count() > 0);
        at.push(Arc::downgrade(held));
    }

    pub(super) fn forget(&self, range: &Range) {
        let mut all = lock(&self.0.held);
        if let Some(at) = all.get_mut(&range.key()) {
            at.retain(|one| one.strong_count() > 0);
            if at.is_empty() {
                all.remove(&range.key());
            }
        }
    }

    /// What holds the memory of every range of the list.
    fn keepers(&self, list: &XferDescList) -> Result<Vec<Arc<dyn Held>>> {
        // The last handle to a registration must not go while the lock is held, which its drop takes: these two go after it.
        let mut keep: Vec<Arc<dyn Held>> = Vec::new();
        let mut passed_over: Vec<Arc<dyn Held>> = Vec::new();
        let all = lock(&self.0.held);
        for range in list.ranges() {
            if keep.last().is_some_and(|last| last.range().covers(&range)) {
                continue;
            }
            if let Some(at) = keep.iter().position(|held| held.range().covers(&range)) {
                // Ranges come in runs: the one that was found last is looked at first.
                let last = keep.len() - 1;
                keep.swap(at, last);
                continue;
            }
            // Registrations may overlap, so the nearest one below is likely, and not sure, to be the one.
            let below = all.range(range.first_key()..=range.key()).rev();
            let mut found = None;
            for held in below.flat_map(|(_, at)| at.iter().filter_map(Weak::upgrade)) {
                if held.range().covers(&range) {
                    found = Some(held);
                    break;
                }
                passed_over.push(held);
            }
            match found {
                Some(held) => keep.push(held),
                None => {
                    return Err(Error::invalid(
                        "nixl",
                        format!("{range:?} is not registered with agent {}", self.0.agent.name()),
                    ));
                }
            }
        }
        drop(all);
        Ok(keep)
    }

    fn with_options<T>(
        &self,
        opt: Option<&OptArgs>,
        call: impl FnOnce(&native::Options<'_>) -> Result<T>,
    ) -> Result<T> {
        let Some(opt) = opt else { return call(&native::Options::default()) };
        let backends = {
            let known = lock(&self.0.backends);
            opt.backends()
                .iter()
                .map(|name| {
                    known.get(name).cloned().ok_or_else(|| {
                        Error::invalid("nixl", format!("the agent has no backend {name} to use"))
                    })
                })
                .collect::<Result<Vec<_>>>()?
        };
        call(&opt.native(&backends))
    }
}

impl fmt::Debug for NixlAgent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlAgent").field("name", &self.name()).field("backends", &self.backends()).finish()
    }
}

/// NIXL's word for a kind of memory.
pub(super) fn native_kind(kind: MemType) -> native::MemoryKind {
    match kind {
        MemType::Dram => native::MemoryKind::Dram,
        MemType::Vram => native::MemoryKind::Vram,
        MemType::Block => native::MemoryKind::Block,
        MemType::Object => native::MemoryKind::Object,
        MemType::File => native::MemoryKind::File,
        MemType::Unknown => native::MemoryKind::Unknown,
    }
}
