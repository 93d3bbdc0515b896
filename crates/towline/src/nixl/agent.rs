//! An agent with its backends, and what is registered with it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use towline_sys::nixl as sys_nixl;

use super::config::{AgentConfig, NixlBackendConfig};
use super::embedded::{self, Embedded};
use super::engine::{self, Chosen, Engine};
use super::list::{RegDescList, XferDescList};
use super::native::Native;
use super::transfer::{
    Backend, Dlist, NotificationMap, OptArgs, Params, XferDlistHandle, XferOp, XferRequest, XferStatus,
    pauses,
};
use crate::memory::MemType;
use crate::transport::nixl::of_nixl;
use crate::{Error, Kind, Result};

/// An agent: it registers memory, sends its metadata to peers, and moves bytes. Clones are the same agent.
///
/// It runs on NIXL where that is there and on the transports of this library where it is not; [`engine`](Self::engine) says
/// which it is, and [`AgentConfig::engine`] asks for one. An agent and its peers need the same engine.
///
/// ```
/// use towline::nixl::{Engine, NixlAgent, NixlRegisterExt, OptArgs, RegisteredView, XferDescList, XferOp};
/// use towline::{MemoryAccess, SystemStorage};
///
/// // Usually two processes; each would be made by `NixlAgent::with_backends(name, &["UCX"])`.
/// let prefill = NixlAgent::with_engine("prefill", Engine::Embedded)?;
/// let decode = NixlAgent::with_engine("decode", Engine::Embedded)?;
///
/// let source = SystemStorage::new(4096)?;
/// source.write_at(0, b"keys and values")?;
/// let source = source.register(&prefill, None)?;
/// let target = SystemStorage::new(4096)?.register(&decode, None)?;
///
/// // What travels by the program's own channel: metadata, and the list of what to read.
/// let peer = decode.load_remote_md(&prefill.get_local_md()?)?;
/// let mut remote = XferDescList::new(source.descriptor().mem_type)?;
/// remote.add_storage_desc(&source.descriptor())?;
/// let mut local = XferDescList::new(target.descriptor().mem_type)?;
/// local.add_storage_desc(&target.descriptor())?;
///
/// let request = decode.create_xfer_req(XferOp::Read, &local, &remote, &peer, None)?;
/// let mut going = decode.post_xfer_req(&request, None)?;
/// while going {
///     going = !decode.get_xfer_status(&request)?.is_success();
/// }
/// let mut bytes = [0; 15];
/// target.storage().read_at(0, &mut bytes)?;
/// assert_eq!(&bytes, b"keys and values");
/// # Ok::<(), towline::Error>(())
/// ```
#[derive(Clone)]
pub struct NixlAgent(Arc<Core>);

struct Core {
    running: Running,
    why: String,
}

/// The agent on its engine.
pub(super) enum Running {
    Nixl(Native),
    Embedded {
        engine: Arc<Embedded>,
        /// The backends that were asked for, in whose place the engine stands.
        backends: Mutex<BTreeSet<String>>,
    },
}

impl NixlAgent {
    /// Creates an agent without a backend, on NIXL where that is there and else on the embedded engine.
    ///
    /// # Errors
    /// `Unavailable`, with the places tried, where `TOWLINE_NIXL` names a library that cannot be loaded; `Native` where
    /// NIXL refuses.
    pub fn new(name: &str) -> Result<NixlAgent> {
        NixlAgent::new_with_config(name, &AgentConfig::default())
    }

    /// Creates an agent that is set up as said.
    ///
    /// # Errors
    /// As for [`new`](Self::new); `Unavailable` also where the configuration asks for NIXL and it is not there; `Invalid`
    /// if the name is not valid: for the embedded engine, 1 to 64 bytes without control characters.
    pub fn new_with_config(name: &str, config: &AgentConfig) -> Result<NixlAgent> {
        let (running, why) = match engine::choose(config.engine, config.also_look_in.as_deref())? {
            Chosen::Nixl(nixl, why) => (Running::Nixl(Native::create(nixl, name, config)?), why),
            Chosen::Embedded(why) => {
                (Running::Embedded { engine: Embedded::open(name)?, backends: Mutex::default() }, why)
            }
        };
        let agent = NixlAgent(Arc::new(Core { running, why }));
        tracing::debug!(agent = name, engine = %agent.engine(), why = agent.0.why, "an agent was made");
        Ok(agent)
    }

    /// Creates an agent on that engine.
    pub fn with_engine(name: &str, engine: Engine) -> Result<NixlAgent> {
        NixlAgent::new_with_config(name, &AgentConfig { engine: Some(engine), ..AgentConfig::default() })
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
        let agent_config = AgentConfig { engine: config.engine(), ..AgentConfig::default() };
        let agent = NixlAgent::new_with_config(name, &agent_config)?;
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

    /// What it moves bytes with.
    pub fn engine(&self) -> Engine {
        match &self.0.running {
            Running::Nixl(_) => Engine::Nixl,
            Running::Embedded { .. } => Engine::Embedded,
        }
    }

    /// Why it is that engine: which NIXL was loaded, or all the places that were tried.
    pub fn engine_reason(&self) -> &str {
        &self.0.why
    }

    /// Adds a backend with its default parameters.
    pub fn add_backend(&self, backend: &str) -> Result<()> {
        self.add_backend_with_params(backend, &BTreeMap::new())
    }

    /// Adds a backend with some parameters; the others keep their defaults. One that is there stays as it is.
    ///
    /// The embedded engine stands in the place of the backends that move host memory and files, whatever their parameters;
    /// others are `Unavailable` there.
    pub fn add_backend_with_params<'a>(
        &self,
        backend: &str,
        params: impl IntoIterator<Item = (&'a String, &'a String)>,
    ) -> Result<()> {
        let name = backend.to_ascii_uppercase();
        match &self.0.running {
            Running::Nixl(native) => {
                let params = params.into_iter().map(|(key, value)| (key.clone(), value.clone())).collect();
                native.add_backend(&name, &params).map_err(|error| {
                    let message = format!("backend {name}: {}", error.message());
                    Error::new(error.kind(), "nixl", message).caused_by(error)
                })
            }
            Running::Embedded { backends, .. } => {
                if !embedded::STANDS_FOR.contains(&name.as_str()) {
                    let message = format!(
                        "backend {name}: the embedded engine has nothing in its place, only in that of {} ({})",
                        embedded::STANDS_FOR.join(", "),
                        self.0.why
                    );
                    return Err(Error::new(Kind::Unavailable, "nixl", message));
                }
                backends.lock().insert(name);
                Ok(())
            }
        }
    }

    /// [`add_backend_with_params`](Self::add_backend_with_params), and a handle to it.
    pub fn create_backend(&self, backend: &str, params: &Params) -> Result<Backend> {
        self.add_backend_with_params(backend, params)?;
        Ok(Backend(backend.to_ascii_uppercase()))
    }

    /// A handle to a backend that it has.
    pub fn get_backend(&self, backend: &str) -> Option<Backend> {
        self.has_backend(backend).then(|| Backend(backend.to_ascii_uppercase()))
    }

    /// Whether it has that backend.
    pub fn has_backend(&self, backend: &str) -> bool {
        self.backends().contains(&backend.to_ascii_uppercase())
    }

    /// The names of its backends.
    pub fn backends(&self) -> Vec<String> {
        match &self.0.running {
            Running::Nixl(native) => native.backends(),
            Running::Embedded { backends, .. } => backends.lock().iter().cloned().collect(),
        }
    }

    /// `Unavailable` unless it has that backend.
    pub fn require_backend(&self, backend: &str) -> Result<()> {
        if self.has_backend(backend) {
            return Ok(());
        }
        let (name, has) = (self.name(), self.backends().join(", "));
        let message = format!("agent {name} has no backend {backend}; it has: {has}");
        Err(Error::new(Kind::Unavailable, "nixl", message))
    }

    /// The agent itself: there is no other one beneath it.
    pub fn raw_agent(&self) -> &NixlAgent {
        self
    }

    /// The agent itself.
    pub fn into_raw_agent(self) -> NixlAgent {
        self
    }

    /// Its name.
    pub fn name(&self) -> String {
        match &self.0.running {
            Running::Nixl(native) => native.name().to_owned(),
            Running::Embedded { engine, .. } => engine.name().to_owned(),
        }
    }

    /// The plug-ins that backends could be made of.
    pub fn get_available_plugins(&self) -> Result<Vec<String>> {
        Ok(match &self.0.running {
            Running::Nixl(native) => native.agent.plugins().map_err(of_nixl)?,
            Running::Embedded { .. } => embedded::STANDS_FOR.map(str::to_owned).to_vec(),
        })
    }

    /// The kinds of memory that a plug-in takes, and its parameters with their defaults.
    pub fn get_plugin_params(&self, plugin: &str) -> Result<(Vec<MemType>, Params)> {
        match &self.0.running {
            Running::Nixl(native) => {
                let sys_nixl::Plugin { memory, parameters } = native.agent.plugin(plugin).map_err(of_nixl)?;
                Ok((memory.into_iter().map(mem_type).collect(), parameters))
            }
            Running::Embedded { .. } if embedded::STANDS_FOR.contains(&plugin) => {
                Ok((vec![MemType::Dram, MemType::File], Params::new()))
            }
            Running::Embedded { .. } => {
                let message = format!("the embedded engine has nothing in the place of {plugin}");
                Err(Error::new(Kind::NotFound, "nixl", message))
            }
        }
    }

    /// Everything that a peer needs to reach all that is registered here.
    pub fn get_local_md(&self) -> Result<Vec<u8>> {
        match &self.0.running {
            Running::Nixl(native) => native.agent.metadata().map_err(of_nixl),
            Running::Embedded { engine, .. } => engine.metadata(),
        }
    }

    /// What a peer needs to reach what is registered at these ranges and nothing else; with an empty list, to connect.
    ///
    /// With NIXL, a peer that has not loaded the full metadata needs both, first that of the empty list.
    pub fn get_local_partial_md(&self, list: &RegDescList, opt: Option<&OptArgs>) -> Result<Vec<u8>> {
        match &self.0.running {
            Running::Nixl(native) => native.partial_metadata(list, opt),
            Running::Embedded { engine, .. } => {
                self.check_options(opt)?;
                engine.partial_metadata(list)
            }
        }
    }

    /// Takes in a peer's metadata and says the peer's name. NIXL trusts the bytes: take them only from a peer that has
    /// proved who it is.
    ///
    /// # Errors
    /// `Unsupported` where the metadata is of an agent on the other engine; `Protocol` (embedded) where it is damaged.
    pub fn load_remote_md(&self, metadata: &[u8]) -> Result<String> {
        match &self.0.running {
            Running::Nixl(native) => native.load(metadata),
            Running::Embedded { engine, .. } => engine.load(metadata),
        }
    }

    /// Whether the peer's metadata is here, and covers the list where there is one.
    pub fn check_remote_metadata(&self, peer: &str, list: Option<&XferDescList>) -> bool {
        match &self.0.running {
            Running::Nixl(native) => native.knows(peer, list),
            Running::Embedded { engine, .. } => engine.knows(peer, list),
        }
    }

    /// Forgets a peer's metadata and disconnects from it.
    pub fn invalidate_remote_md(&self, peer: &str) -> Result<()> {
        match &self.0.running {
            Running::Nixl(native) => native.invalidate(peer),
            Running::Embedded { engine, .. } => engine.invalidate(peer),
        }
    }

    /// Forgets the metadata of all peers.
    pub fn invalidate_all_remotes(&self) -> Result<()> {
        match &self.0.running {
            Running::Nixl(native) => native.invalidate_all(),
            Running::Embedded { engine, .. } => {
                engine.invalidate_all();
                Ok(())
            }
        }
    }

    /// Connects to a peer whose metadata is here, ahead of the first transfer.
    pub fn make_connection(&self, peer: &str, opt: Option<&OptArgs>) -> Result<()> {
        match &self.0.running {
            Running::Nixl(native) => {
                native.with_options(opt, |options| native.agent.connect(peer, options).map_err(of_nixl))
            }
            Running::Embedded { engine, .. } => {
                self.check_options(opt)?;
                engine.connect(peer)
            }
        }
    }

    /// Looks up one side of many transfers: the local one for the name `""`, else that of a peer. The agent's own name is a
    /// peer too.
    ///
    /// # Errors
    /// `Invalid` where a local range is not registered with this agent; otherwise as for
    /// [`create_xfer_req`](Self::create_xfer_req).
    pub fn prepare_xfer_dlist(
        &self,
        peer: &str,
        list: &XferDescList,
        opt: Option<&OptArgs>,
    ) -> Result<XferDlistHandle> {
        let peer = (!peer.is_empty()).then_some(peer);
        Ok(XferDlistHandle(match &self.0.running {
            Running::Nixl(native) => Dlist::Nixl(native.prepare(peer, list, opt)?),
            Running::Embedded { engine, .. } => {
                self.check_options(opt)?;
                Dlist::Embedded(engine.prepare(peer, list)?)
            }
        }))
    }

    /// Makes a transfer between ranges of two prepared lists, named by index.
    pub fn make_xfer_req(
        &self,
        op: XferOp,
        local: &XferDlistHandle,
        local_indices: &[i32],
        remote: &XferDlistHandle,
        remote_indices: &[i32],
        opt: Option<&OptArgs>,
    ) -> Result<XferRequest> {
        match (&self.0.running, &local.0, &remote.0) {
            (Running::Nixl(native), Dlist::Nixl(near), Dlist::Nixl(far)) => {
                let sides = ((near, local_indices), (far, remote_indices));
                let (request, keep) = native.request_prepared(op, sides.0, sides.1, opt)?;
                Ok(XferRequest::native(request, keep))
            }
            (Running::Embedded { engine, .. }, Dlist::Embedded(near), Dlist::Embedded(far)) => {
                self.check_options(opt)?;
                let sides = ((near, Some(local_indices)), (far, Some(remote_indices)));
                Ok(XferRequest::embedded(engine.request(op, sides.0, sides.1, opt)?))
            }
            _ => Err(Error::invalid("make_xfer_req", "a list was prepared by an agent on another engine")),
        }
    }

    /// Makes a transfer between local ranges, which must be registered here, and remote ones.
    ///
    /// The request keeps the local memory: a registration that is dropped meanwhile stays until it has ended. The
    /// options' notification is for the peer, once the bytes have moved.
    ///
    /// # Errors
    /// `Invalid` where a local range is not registered with this agent, or lengths differ; where the peer's metadata does
    /// not cover a remote range, `NotFound` (embedded) or what NIXL says.
    pub fn create_xfer_req(
        &self,
        op: XferOp,
        local: &XferDescList,
        remote: &XferDescList,
        peer: &str,
        opt: Option<&OptArgs>,
    ) -> Result<XferRequest> {
        match &self.0.running {
            Running::Nixl(native) => {
                let (request, keep) = native.request(op, local, remote, peer, opt)?;
                Ok(XferRequest::native(request, keep))
            }
            Running::Embedded { engine, .. } => {
                self.check_options(opt)?;
                let (near, far) = (engine.prepare(None, local)?, engine.prepare(Some(peer), remote)?);
                Ok(XferRequest::embedded(engine.request(op, (&near, None), (&far, None), opt)?))
            }
        }
    }

    /// Starts a transfer; true while it is in progress. The options' notification goes with it.
    pub fn post_xfer_req(&self, request: &XferRequest, opt: Option<&OptArgs>) -> Result<bool> {
        request.post(opt.and_then(OptArgs::notification))
    }

    /// Asks how far a transfer is.
    pub fn get_xfer_status(&self, request: &XferRequest) -> Result<XferStatus> {
        request.status()
    }

    /// Sends a peer a message that belongs to no transfer. The embedded engine takes at most
    /// [`MAX_MESSAGE`](crate::MAX_MESSAGE) bytes.
    pub fn send_notification(&self, peer: &str, message: &[u8], backend: Option<&Backend>) -> Result<()> {
        let mut opt = OptArgs::new()?;
        if let Some(backend) = backend {
            opt.add_backend(backend)?;
        }
        match &self.0.running {
            Running::Nixl(native) => native.with_options(Some(&opt), |options| {
                native.agent.notify(peer, message, options).map_err(of_nixl)
            }),
            Running::Embedded { engine, .. } => {
                self.check_options(Some(&opt))?;
                engine.notify(peer, message)
            }
        }
    }

    /// Adds the messages that have come.
    pub fn get_notifications(&self, into: &mut NotificationMap) -> Result<()> {
        match &self.0.running {
            Running::Nixl(native) => {
                let came = native.agent.notifications().map_err(of_nixl)?;
                into.extend(came.into_iter().map(|one| (one.peer, one.message)));
            }
            Running::Embedded { engine, .. } => into.extend(engine.notifications()?),
        }
        Ok(())
    }

    /// Waits until a message has come, for at most that long, and adds what has come; false where nothing has.
    ///
    /// On the embedded engine the caller sleeps. NIXL has nothing to sleep on: there it is asked again and again, after pauses
    /// that grow from nothing to a millisecond.
    pub fn wait_notifications(&self, into: &mut NotificationMap, within: Duration) -> Result<bool> {
        match &self.0.running {
            Running::Nixl(native) => pauses(within, || {
                let came = native.agent.notifications().map_err(of_nixl)?;
                let some = !came.is_empty();
                into.extend(came.into_iter().map(|one| (one.peer, one.message)));
                Ok(some)
            }),
            Running::Embedded { engine, .. } => {
                let came = engine.wait_notifications(within)?;
                let some = !came.is_empty();
                into.extend(came);
                Ok(some)
            }
        }
    }

    pub(super) fn running(&self) -> &Running {
        &self.0.running
    }

    /// Options may only name backends that the agent has; NIXL's engine looks them up itself.
    pub(super) fn check_options(&self, opt: Option<&OptArgs>) -> Result<()> {
        let has = self.backends();
        match opt.and_then(|opt| opt.backends.iter().find(|name| !has.contains(name))) {
            Some(name) => Err(Error::invalid("nixl", format!("the agent has no backend {name} to use"))),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for NixlAgent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlAgent")
            .field("name", &self.name())
            .field("engine", &self.engine())
            .field("why", &self.0.why)
            .field("backends", &self.backends())
            .finish()
    }
}

impl fmt::Display for NixlAgent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "agent {} on the engine {} ({})", self.name(), self.engine(), self.0.why)
    }
}

/// This library's word for a kind of memory.
fn mem_type(kind: sys_nixl::MemoryKind) -> MemType {
    match kind {
        sys_nixl::MemoryKind::Dram => MemType::Dram,
        sys_nixl::MemoryKind::Vram => MemType::Vram,
        sys_nixl::MemoryKind::Block => MemType::Block,
        sys_nixl::MemoryKind::Object => MemType::Object,
        sys_nixl::MemoryKind::File => MemType::File,
        _ => MemType::Unknown,
    }
}
