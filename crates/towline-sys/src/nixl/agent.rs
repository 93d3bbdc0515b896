//! An agent of NIXL: its backends, what is registered with it, whom it knows, and its messages.
#![allow(unsafe_code, reason = "foreign calls")]

mod messages;
mod parameters;

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

pub use messages::Notification;
pub use parameters::Plugin;

use super::Loaded;
use super::api::{self, RawAgent, RawBackend, RawConfig};
use super::list::{Prepared, PreparedCore, RegistrationList, TransferList};
use super::options::{OptArgs, Options};
use super::request::{Direction, Request};
use crate::{Error, Result};
use messages::Mailbox;

/// How calls from several threads are kept apart. NIXL's own default, not at all, is not offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ThreadSync {
    /// One call at a time.
    #[default]
    Strict,
    /// Calls that only look run beside each other.
    ReadWrite,
}

/// How an agent is set up.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct AgentConfig {
    /// A thread that drives transfers, on a core of its own while it spins. Without it, the calls drive them.
    pub progress_thread: bool,
    /// How long that thread pauses between two looks.
    pub progress_pause: Duration,
    /// The port on which other agents can fetch this one's metadata, where they may.
    pub listen: Option<u16>,
    /// How calls from several threads are kept apart.
    pub sync: ThreadSync,
    /// Measures every transfer.
    pub telemetry: bool,
}

impl Default for AgentConfig {
    fn default() -> AgentConfig {
        AgentConfig {
            progress_thread: true,
            progress_pause: Duration::ZERO,
            listen: None,
            sync: ThreadSync::default(),
            telemetry: false,
        }
    }
}

/// An agent of NIXL. Cheap to clone; it lives as long as anything that was made with it.
#[derive(Clone)]
pub struct Agent(Arc<AgentCore>);

pub(crate) struct AgentCore {
    loaded: Arc<Loaded>,
    raw: *mut RawAgent,
    name: String,
    mailbox: Mutex<Option<Mailbox>>,
    /// The process that made it; in a forked child nothing of it may be touched.
    process: u32,
}

// SAFETY: the agent was created with a synchronisation of its own (`ThreadSync` has no other value), so NIXL does the
// locking for calls from several threads.
unsafe impl Send for AgentCore {}
// SAFETY: as above.
unsafe impl Sync for AgentCore {}

impl AgentCore {
    pub(crate) fn loaded(&self) -> &Loaded {
        &self.loaded
    }

    pub(crate) fn raw(&self) -> *mut RawAgent {
        self.raw
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Whether this is a forked child, to which NIXL's threads and connections did not come along.
    pub(crate) fn in_child(&self) -> bool {
        self.process != std::process::id()
    }
}

impl Drop for AgentCore {
    fn drop(&mut self) {
        if self.in_child() {
            return;
        }
        // SAFETY: made by `create`; all that was made with it holds this core, so nothing of it is left.
        unsafe { (self.loaded.api.destroy_agent)(self.raw) };
    }
}

impl Agent {
    pub(crate) fn create(loaded: Arc<Loaded>, name: &str, config: &AgentConfig) -> Result<Agent> {
        let call = "nixl_capi_create_configured_agent";
        let c_name = c_string(call, name)?;
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let raw_config = RawConfig {
            progress_thread: config.progress_thread,
            listen_thread: config.listen.is_some(),
            listen_port: config.listen.unwrap_or(0).into(),
            thread_sync: match config.sync {
                ThreadSync::Strict => 1,
                ThreadSync::ReadWrite => 2,
            },
            workers: 1,
            progress_delay_us: micros(config.progress_pause),
            listen_delay_us: 100_000,
            telemetry: config.telemetry,
        };
        let mut raw = ptr::null_mut();
        // SAFETY: name and configuration outlive the call, the target is a local variable.
        api::check(call, unsafe { (loaded.api.create_agent)(c_name.as_ptr(), &raw_config, &mut raw) })?;
        let raw = api::made(call, raw)?;
        let name = name.to_owned();
        Ok(Agent(Arc::new(AgentCore {
            loaded,
            raw,
            name,
            mailbox: Mutex::new(None),
            process: std::process::id(),
        })))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The plug-ins that it could make backends of.
    pub fn plugins(&self) -> Result<Vec<String>> {
        parameters::plugins(&self.0)
    }

    /// What a plug-in can do, and its parameters with their defaults.
    pub fn plugin(&self, name: &str) -> Result<Plugin> {
        parameters::plugin(&self.0, name)
    }

    /// Makes a backend of a plug-in, with its default parameters and those given here in their place.
    pub fn create_backend(&self, plugin: &str, parameters: &BTreeMap<String, String>) -> Result<Backend> {
        let call = "nixl_capi_create_backend";
        let name = c_string(call, plugin)?;
        let defaults = self.plugin(plugin)?.parameters;
        let chosen = std::env::var_os("UCX_RCACHE_ENABLE").is_some();
        let parameters = with_safe_defaults(plugin, chosen, parameters);
        let merged: BTreeMap<_, _> = defaults.iter().chain(&parameters).collect();
        let params = parameters::Params::new(&self.0, merged)?;
        let mut raw = ptr::null_mut();
        // SAFETY: agent, name and parameters outlive the call, the target is a local variable.
        let code =
            unsafe { (self.0.loaded.api.create_backend)(self.0.raw, name.as_ptr(), params.raw(), &mut raw) };
        api::check(call, code)?;
        let raw = api::made(call, raw)?;
        Ok(Backend(Arc::new(BackendCore { agent: Arc::clone(&self.0), raw, name: plugin.to_owned() })))
    }

    /// Registers memory with the backends in `options`, or with every backend that takes its kind.
    ///
    /// # Safety
    /// The ranges stay valid memory (or open files) until the registration has been given back, and every transfer
    /// that touches them, from either side, has ended. Peers can read and write them meanwhile, so no Rust
    /// reference to them may exist while a peer does.
    pub unsafe fn register(&self, list: RegistrationList, options: &Options<'_>) -> Result<Registration> {
        let call = "nixl_capi_register_mem";
        let args = OptArgs::new(&self.0, call, options)?;
        // SAFETY: agent and list are alive; the memory is, by the contract of this function.
        let code = unsafe { (self.0.loaded.api.register_mem)(self.0.raw, list.raw(), args.raw()) };
        api::check(call, code)?;
        Ok(Registration {
            agent: Arc::clone(&self.0),
            list,
            backends: options.backends.to_vec(),
            registered: true,
        })
    }

    /// Everything that a peer needs to reach all that is registered here.
    pub fn metadata(&self) -> Result<Vec<u8>> {
        let call = "nixl_capi_get_local_md";
        let (mut data, mut len) = (ptr::null_mut(), 0);
        // SAFETY: the agent is alive, the targets are local variables.
        api::check(call, unsafe { (self.0.loaded.api.local_md)(self.0.raw, &mut data, &mut len) })?;
        // SAFETY: the library gave an allocation of that length to us.
        Ok(unsafe { taken(data, len) })
    }

    /// What a peer needs to reach the ranges of `list` and no others; with an empty list, to connect at all.
    ///
    /// A peer that has not loaded this agent's full metadata needs both: first the connection, then the ranges.
    pub fn partial_metadata(&self, list: &RegistrationList, options: &Options<'_>) -> Result<Vec<u8>> {
        let call = "nixl_capi_get_local_partial_md";
        let args = OptArgs::new(&self.0, call, options)?;
        let (mut data, mut len) = (ptr::null_mut(), 0);
        // SAFETY: agent and list are alive, the targets are local variables.
        let code = unsafe {
            (self.0.loaded.api.local_partial_md)(self.0.raw, list.raw(), &mut data, &mut len, args.raw())
        };
        api::check(call, code)?;
        // SAFETY: the library gave an allocation of that length to us.
        Ok(unsafe { taken(data, len) })
    }

    /// Takes in a peer's metadata and says the peer's name.
    ///
    /// The bytes are parsed by NIXL, which trusts them: take them only from a peer that has proved who it is.
    pub fn load_metadata(&self, metadata: &[u8]) -> Result<String> {
        let call = "nixl_capi_load_remote_md";
        if metadata.is_empty() {
            return Err(Error::argument(call, "there is no metadata"));
        }
        let mut name = ptr::null_mut();
        // SAFETY: agent and bytes outlive the call, the target is a local variable.
        let code = unsafe {
            (self.0.loaded.api.load_remote_md)(
                self.0.raw,
                metadata.as_ptr().cast(),
                metadata.len(),
                &mut name,
            )
        };
        api::check(call, code)?;
        let name = api::made(call, name)?;
        // SAFETY: a string that the library allocated for us.
        let text = unsafe { text(name) };
        // SAFETY: allocated by the library with `strdup`, and not used again.
        unsafe { libc::free(name.cast()) };
        Ok(text)
    }

    /// Whether the peer's metadata is here, and covers the ranges of `list` where there is one.
    pub fn knows(&self, peer: &str, list: Option<&TransferList>) -> Result<bool> {
        let call = "nixl_capi_check_remote_md";
        let peer = c_string(call, peer)?;
        let list = list.map_or(ptr::null_mut(), TransferList::raw);
        // SAFETY: agent, name and list outlive the call.
        match unsafe { (self.0.loaded.api.check_remote_md)(self.0.raw, peer.as_ptr(), list) } {
            api::NOT_FOUND => Ok(false),
            code => api::check(call, code).map(|()| true),
        }
    }

    /// Forgets a peer's metadata and disconnects from it.
    pub fn forget(&self, peer: &str) -> Result<()> {
        let call = "nixl_capi_invalidate_remote_md";
        let peer = c_string(call, peer)?;
        // SAFETY: agent and name outlive the call.
        api::check(call, unsafe { (self.0.loaded.api.invalidate_remote_md)(self.0.raw, peer.as_ptr()) })
    }

    /// Connects to a peer whose metadata is here, ahead of the first transfer.
    pub fn connect(&self, peer: &str, options: &Options<'_>) -> Result<()> {
        let call = "nixl_capi_agent_make_connection";
        let peer = c_string(call, peer)?;
        let args = OptArgs::new(&self.0, call, options)?;
        // SAFETY: agent, name and options outlive the call.
        let code = unsafe { (self.0.loaded.api.make_connection)(self.0.raw, peer.as_ptr(), args.raw()) };
        api::check(call, code)
    }

    /// Looks up the local side of many transfers.
    pub fn prepare_local(&self, list: &TransferList, options: &Options<'_>) -> Result<Prepared> {
        self.prepare("", list, options)
    }

    /// Looks up the remote side of many transfers with one peer; the agent's own name is a peer too.
    pub fn prepare_remote(&self, peer: &str, list: &TransferList, options: &Options<'_>) -> Result<Prepared> {
        if peer.is_empty() {
            return Err(Error::argument("nixl_capi_prep_xfer_dlist", "the peer has no name"));
        }
        self.prepare(peer, list, options)
    }

    fn prepare(&self, side: &str, list: &TransferList, options: &Options<'_>) -> Result<Prepared> {
        let call = "nixl_capi_prep_xfer_dlist";
        let side = c_string(call, side)?;
        let args = OptArgs::new(&self.0, call, options)?;
        let mut raw = ptr::null_mut();
        // SAFETY: agent, name, list and options outlive the call, the target is a local variable.
        let code = unsafe {
            (self.0.loaded.api.prep_list)(self.0.raw, side.as_ptr(), list.raw(), &mut raw, args.raw())
        };
        api::check(call, code)?;
        let raw = api::made(call, raw)?;
        Ok(Prepared(Arc::new(PreparedCore { agent: Arc::clone(&self.0), raw, len: list.len() })))
    }

    /// Makes a transfer between two lists of equal length.
    ///
    /// # Safety
    /// The local ranges stay valid until the request has been released, and nobody else uses them while it is in
    /// progress in a way that Rust forbids. (The remote ones are the peer's to keep.)
    pub unsafe fn request(
        &self,
        direction: Direction,
        local: &TransferList,
        remote: &TransferList,
        peer: &str,
        options: &Options<'_>,
    ) -> Result<Request> {
        let call = "nixl_capi_create_xfer_req";
        if local.len() != remote.len() || local.is_empty() {
            let message = format!("{} local ranges and {} remote ones", local.len(), remote.len());
            return Err(Error::argument(call, message));
        }
        let peer = c_string(call, peer)?;
        let args = OptArgs::new(&self.0, call, options)?;
        let mut raw = ptr::null_mut();
        // SAFETY: everything passed outlives the call, the target is a local variable.
        let code = unsafe {
            (self.0.loaded.api.create_request)(
                self.0.raw,
                direction.code(),
                local.raw(),
                remote.raw(),
                peer.as_ptr(),
                &mut raw,
                args.raw(),
            )
        };
        api::check(call, code)?;
        Ok(Request::new(Arc::clone(&self.0), api::made(call, raw)?, Vec::new()))
    }

    /// Makes a transfer between ranges of two prepared lists, named by index.
    ///
    /// # Safety
    /// As for [`request`](Self::request).
    pub unsafe fn request_prepared(
        &self,
        direction: Direction,
        (local, local_indices): (&Prepared, &[i32]),
        (remote, remote_indices): (&Prepared, &[i32]),
        options: &Options<'_>,
    ) -> Result<Request> {
        let call = "nixl_capi_make_xfer_req";
        if local_indices.len() != remote_indices.len() || local_indices.is_empty() {
            let message =
                format!("{} local indices and {} remote ones", local_indices.len(), remote_indices.len());
            return Err(Error::argument(call, message));
        }
        for (side, indices) in [(local, local_indices), (remote, remote_indices)] {
            if !Arc::ptr_eq(&side.0.agent, &self.0) {
                return Err(Error::argument(call, "a list was prepared by another agent"));
            }
            let inside = |index: &i32| usize::try_from(*index).is_ok_and(|index| index < side.len());
            if let Some(index) = indices.iter().find(|index| !inside(index)) {
                let message = format!("index {index} is outside a list of {}", side.len());
                return Err(Error::argument(call, message));
            }
        }
        let args = OptArgs::new(&self.0, call, options)?;
        let mut raw = ptr::null_mut();
        // SAFETY: everything passed outlives the call, the indices were checked, the target is a local variable.
        let code = unsafe {
            (self.0.loaded.api.make_request)(
                self.0.raw,
                direction.code(),
                local.0.raw,
                local_indices.as_ptr(),
                local_indices.len(),
                remote.0.raw,
                remote_indices.as_ptr(),
                remote_indices.len(),
                &mut raw,
                args.raw(),
            )
        };
        api::check(call, code)?;
        let sides = vec![Arc::clone(&local.0), Arc::clone(&remote.0)];
        Ok(Request::new(Arc::clone(&self.0), api::made(call, raw)?, sides))
    }

    /// Sends a peer a message that belongs to no transfer.
    pub fn notify(&self, peer: &str, message: &[u8], options: &Options<'_>) -> Result<()> {
        messages::send(&self.0, peer, message, options)
    }

    /// Takes the messages that have come. Without a progress thread this is also what drives transfers.
    pub fn notifications(&self) -> Result<Vec<Notification>> {
        messages::take(&self.0)
    }
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent").field("name", &self.0.name).finish_non_exhaustive()
    }
}

/// A backend of an agent. Cheap to clone; NIXL itself keeps it for the life of the agent.
#[derive(Clone)]
pub struct Backend(Arc<BackendCore>);

struct BackendCore {
    agent: Arc<AgentCore>,
    raw: *mut RawBackend,
    name: String,
}

// SAFETY: the handle is only read after it was made, and the agent that it belongs to does its own locking.
unsafe impl Send for BackendCore {}
// SAFETY: as above.
unsafe impl Sync for BackendCore {}

impl Backend {
    /// The plug-in that it was made of.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The kinds of memory that it takes, and its parameters as they are.
    pub fn description(&self) -> Result<Plugin> {
        parameters::backend(&self.0.agent, self.0.raw)
    }

    pub(crate) fn raw(&self) -> *mut RawBackend {
        self.0.raw
    }

    pub(crate) fn belongs_to(&self, agent: &AgentCore) -> bool {
        ptr::eq(Arc::as_ptr(&self.0.agent), agent)
    }
}

impl Drop for BackendCore {
    fn drop(&mut self) {
        // SAFETY: this frees the handle, not the backend, and nobody else has the handle.
        unsafe { (self.agent.loaded.api.destroy_backend)(self.raw) };
    }
}

impl fmt::Debug for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Backend({} of {})", self.0.name, self.0.agent.name)
    }
}

/// Memory that is registered with an agent. Dropping it gives the registration back, before the memory may go.
pub struct Registration {
    agent: Arc<AgentCore>,
    list: RegistrationList,
    backends: Vec<Backend>,
    registered: bool,
}

impl Registration {
    /// The ranges, for instance to make partial metadata of them.
    pub fn list(&self) -> &RegistrationList {
        &self.list
    }

    /// Gives the registration back and says whether NIXL agreed. Where it did not, peers may still reach the memory.
    pub fn deregister(mut self) -> Result<()> {
        self.give_back()
    }

    fn give_back(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.registered) {
            return Ok(());
        }
        let call = "nixl_capi_deregister_mem";
        let args = OptArgs::new(&self.agent, call, &Options::on(&self.backends))?;
        // SAFETY: agent and list are alive.
        let code =
            unsafe { (self.agent.loaded.api.deregister_mem)(self.agent.raw, self.list.raw(), args.raw()) };
        api::check(call, code)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // A caller that must know whether it worked calls `deregister`.
        if !self.agent.in_child() {
            let _ = self.give_back();
        }
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration").field("agent", &self.agent.name).finish_non_exhaustive()
    }
}

/// Parameters without which a backend is not safe to use; those that the caller gives come before them.
///
/// UCX keeps registrations after they were given back, and relies on seeing every `munmap` by having patched the C library.
/// Memory that is unmapped by a system call of one's own, as Rust programs do, goes unseen: what is mapped at the same address
/// later is then read and written through a registration of the old pages. Seen over RDMA.
///
/// Of two values for one setting UCX takes the later: what the parameters say of it comes after.
fn with_safe_defaults(
    plugin: &str,
    chosen: bool,
    parameters: &BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let mut safe = parameters.clone();
    if plugin == "UCX" && !chosen {
        let config = safe.entry("engine_config".to_owned()).or_default();
        let comma = if config.is_empty() { "" } else { "," };
        *config = format!("RCACHE_ENABLE=n{comma}{config}");
    }
    safe
}

/// A name for C; NIXL's names end at the first zero byte.
fn c_string(call: &'static str, text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::argument(call, format!("{text:?} contains a zero byte")))
}

/// A copy of a string of C.
///
/// # Safety
/// It is a string that ends in a zero byte and stays for the duration of the call.
unsafe fn text(string: *const c_char) -> String {
    // SAFETY: by the contract of this function.
    unsafe { CStr::from_ptr(string) }.to_string_lossy().into_owned()
}

/// A copy of bytes that the library allocated for us; frees the original.
///
/// # Safety
/// `data` is null or an allocation by `malloc` of at least `len` bytes, and nobody else has it.
unsafe fn taken(data: *mut c_void, len: usize) -> Vec<u8> {
    if data.is_null() {
        return Vec::new();
    }
    // SAFETY: by the contract of this function.
    let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len) }.to_vec();
    // SAFETY: by the contract of this function.
    unsafe { libc::free(data) };
    bytes
}
