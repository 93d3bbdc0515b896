//! One agent of NIXL, and what belongs to it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use towline_sys::nixl::{Agent, AgentConfig, Backend, MemoryKind, Nixl, Options, RegistrationList};

use super::driver::Driving;
use super::options::NixlOptions;
use super::peer::PeerAgent;
use super::system;
use crate::identity::{Identity, Incarnation};
use crate::transport::Loan;
use crate::{Error, Result};

/// How long an owner drives its agent after a peer has asked for it; peers ask again in time.
pub(super) const HELP: Duration = Duration::from_millis(5);

/// What a peer has begun before its session ended may still be under way, and needs this agent where UCX moves bytes over
/// sockets: the agent takes in what comes for this long, and what was lent is not given back before. As long as a
/// connection may be silent.
const COOLING: Duration = Duration::from_secs(2);

/// What NIXL does for an endpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct NixlStats {
    /// Regions that are registered with the agent now.
    pub registered: u64,
    /// Agents of peers that are known now.
    pub peers: u64,
    /// Requests that were posted.
    pub posted: u64,
    /// Of these, how many had been made for an earlier transfer and were posted again.
    pub reused: u64,
    /// How often a request was asked how far it is.
    pub polls: u64,
    /// How often an owner was asked to do its part.
    pub help_asked: u64,
    /// How often a peer asked for that.
    pub help_given: u64,
    /// Requests that NIXL had not let go of when their transfer ended.
    pub unquiet: u64,
    /// Requests that NIXL is at now.
    pub in_flight: u64,
}

#[derive(Default)]
pub(super) struct Counts {
    pub(super) registered: AtomicU64,
    pub(super) posted: AtomicU64,
    pub(super) reused: AtomicU64,
    pub(super) polls: AtomicU64,
    pub(super) help_asked: AtomicU64,
    pub(super) help_given: AtomicU64,
    pub(super) unquiet: AtomicU64,
}

/// An endpoint's place for its agent, which is made when it is first needed.
pub(crate) struct Domain {
    options: NixlOptions,
    engine: OnceLock<Result<Arc<Engine>>>,
}

impl Domain {
    pub(crate) fn new(options: NixlOptions) -> Domain {
        Domain { options, engine: OnceLock::new() }
    }

    pub(crate) fn options(&self) -> &NixlOptions {
        &self.options
    }

    /// The agent; the first call loads NIXL and makes it, which takes about half a second.
    pub(super) fn engine(&self, identity: &Identity) -> Result<Arc<Engine>> {
        self.engine.get_or_init(|| Engine::open(identity, &self.options)).clone()
    }

    /// The agent, if there is one.
    pub(super) fn running(&self) -> Option<Arc<Engine>> {
        self.engine.get()?.as_ref().ok().cloned()
    }

    /// What it does; `None` where it was never needed.
    pub(crate) fn stats(&self) -> Option<NixlStats> {
        self.running().map(|engine| engine.stats())
    }
}

/// One agent of NIXL.
pub(crate) struct Engine {
    pub(super) nixl: Nixl,
    pub(super) agent: Agent,
    pub(super) backends: Vec<Backend>,
    pub(super) opened: Instant,
    /// Whether transfers may go by a device that needs no help of the owner's processor.
    pub(super) rdma: bool,
    pub(super) peers: Mutex<HashMap<Incarnation, Arc<PeerAgent>>>,
    connection: OnceLock<Vec<u8>>,
    next_device: AtomicU64,
    pub(super) counts: Counts,
    pub(super) state: Mutex<Driving>,
    pub(super) changed: Condvar,
    /// Held by whoever asks NIXL how far things are.
    pub(super) driving: Mutex<()>,
    /// Callers that drive while they wait.
    pub(super) helpers: AtomicUsize,
    pub(super) flying: AtomicUsize,
}

impl Engine {
    fn open(identity: &Identity, options: &NixlOptions) -> Result<Arc<Engine>> {
        let failed = |error: towline_sys::Error| Error::from(error).during("import").on("nixl");
        let nixl = Nixl::load().map_err(failed)?;
        // NIXL's own thread would spin on a core for as long as the agent lives.
        let mut config = AgentConfig::default();
        config.progress_thread = false;
        // NIXL mixes up agents of one name: the incarnation makes it unique, also over restarts.
        let name = format!("{}/{}", identity.name, identity.incarnation);
        let agent = nixl.agent(&name, &config).map_err(failed)?;
        let mut backends = Vec::new();
        for (plugin, parameters) in options.backends() {
            let backend = agent.create_backend(&plugin, &parameters).map_err(|error| {
                let error = failed(error);
                Error::new(error.kind(), "import", format!("backend {plugin}: {}", error.message()))
                    .on("nixl")
            })?;
            backends.push(backend);
        }
        super::driver::leave_before_exit();
        Ok(Arc::new(Engine {
            nixl,
            agent,
            backends,
            opened: Instant::now(),
            rdma: !system::rdma_devices().is_empty(),
            peers: Mutex::default(),
            connection: OnceLock::new(),
            next_device: AtomicU64::new(1),
            counts: Counts::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
            driving: Mutex::default(),
            helpers: AtomicUsize::new(0),
            flying: AtomicUsize::new(0),
        }))
    }

    pub(super) fn options(&self) -> Options<'_> {
        Options::on(&self.backends)
    }

    /// What a peer needs to connect to this agent.
    pub(super) fn connection(&self) -> Result<Vec<u8>> {
        if let Some(metadata) = self.connection.get() {
            return Ok(metadata.clone());
        }
        let nothing = RegistrationList::new(&self.nixl, MemoryKind::Dram, [])?;
        let metadata = self.agent.partial_metadata(&nothing, &self.options())?;
        Ok(self.connection.get_or_init(|| metadata).clone())
    }

    /// A number of its own for each registration.
    ///
    /// NIXL looks memory up by device and address, and takes any registration that covers an address. Regions that overlap
    /// would be reached through each other's registrations, also when these go; devices of their own keep them apart. For
    /// host memory the number has no other meaning.
    pub(super) fn next_device(&self) -> u64 {
        self.next_device.fetch_add(1, Ordering::Relaxed)
    }

    /// What NIXL runs on here.
    pub(super) fn detail(&self) -> String {
        let backends: Vec<_> = self.backends.iter().map(Backend::name).collect();
        format!("{} by {}", system::describe(&self.nixl), backends.join(", "))
    }

    fn stats(&self) -> NixlStats {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let counts = &self.counts;
        NixlStats {
            registered: load(&counts.registered),
            peers: crate::sync::lock(&self.peers).len() as u64,
            posted: load(&counts.posted),
            reused: load(&counts.reused),
            polls: load(&counts.polls),
            help_asked: load(&counts.help_asked),
            help_given: load(&counts.help_given),
            unquiet: load(&counts.unquiet),
            in_flight: self.flying.load(Ordering::Relaxed) as u64,
        }
    }
}

/// A region that a peer reaches by itself.
pub(super) struct EngineLoan {
    engine: Weak<Engine>,
    pinned: bool,
}

impl EngineLoan {
    pub(super) fn of(engine: &Arc<Engine>, pinned: bool) -> Arc<dyn Loan> {
        Arc::new(EngineLoan { engine: Arc::downgrade(engine), pinned })
    }
}

impl Loan for EngineLoan {
    fn pinned(&self) -> bool {
        self.pinned
    }

    fn orphaned(&self, back: Box<dyn FnOnce() + Send>) {
        match self.engine.upgrade() {
            Some(engine) => engine.cool(Instant::now() + COOLING, back),
            None => back(),
        }
    }
}
