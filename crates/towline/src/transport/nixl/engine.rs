//! One agent of NIXL, and what belongs to it.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak, mpsc};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use towline_sys::nixl::{
    Agent, AgentConfig, Backend, Descriptor, MemoryKind, Nixl, Options, RegistrationList,
};

use super::devices::Devices;
use super::driver::{Driving, Exiting};
use super::of_nixl;
use super::options::NixlOptions;
use super::peer::PeerAgent;
use super::system;
use crate::identity::{Identity, Incarnation};
use crate::session::Loan;
use crate::transport::TransportContext;
use crate::{Error, Kind, Result, interrupt, runtime};

/// How long an owner drives its agent after a peer has asked for it; peers ask again in time.
pub(super) const HELP: Duration = Duration::from_millis(5);

/// What a peer has begun before its session ended may still be in flight, and needs this agent where UCX moves bytes over
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
    only_rdma: OnceLock<bool>,
    engine: OnceLock<Result<Arc<Engine>>>,
}

impl Domain {
    pub(crate) fn new(options: NixlOptions) -> Domain {
        Domain { options, only_rdma: OnceLock::new(), engine: OnceLock::new() }
    }

    /// Whether UCX may use RDMA devices alone. Quick, but for the first call.
    pub(super) fn is_only_rdma(&self) -> bool {
        *self.only_rdma.get_or_init(|| self.options.devices().is_ok_and(|devices| devices.only_rdma))
    }

    pub(crate) fn options(&self) -> &NixlOptions {
        &self.options
    }

    /// The agent; the first call loads NIXL and makes it, which takes about half a second.
    pub(super) fn engine(&self, identity: &Identity) -> Result<Arc<Engine>> {
        self.engine.get_or_init(|| Engine::open(identity, &self.options)).clone()
    }

    /// [`Self::engine`], or `Timeout`, or `Canceled` where the caller is interrupted: making an agent cannot be stopped, so a thread
    /// does it, and a later caller finds it.
    pub(super) fn engine_by(context: &Arc<TransportContext>, until: Instant) -> Result<Arc<Engine>> {
        let domain = &context.nixl;
        if domain.engine.get().is_none() {
            let (made, waiting) = mpsc::channel::<()>();
            let opening = Arc::clone(context);
            runtime::start_thread("import", "towline-nixl-open", move || {
                let inside = Exiting::enter();
                let _ = opening.nixl.engine(&opening.identity);
                drop((made, inside));
            })?;
            loop {
                let left = until.saturating_duration_since(Instant::now());
                if waiting.recv_timeout(interrupt::turn(left)) != Err(mpsc::RecvTimeoutError::Timeout) {
                    break;
                }
                if left.is_zero() {
                    let message =
                        "NIXL has not started in time; it goes on starting, and a later import finds it";
                    return Err(Error::new(Kind::Timeout, "import", message));
                }
                interrupt::check("import")?;
            }
        }
        domain.engine(&context.identity)
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

/// What a transfer by NIXL reaches on its far side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// Memory, by the plug-ins that connect agents.
    Memory,
    /// Files that are open in this process, by the plug-ins that take them.
    Files,
}

/// Backends that serve one purpose.
#[derive(Default)]
struct Plugins {
    backends: Vec<Backend>,
    /// Whether memory of GPUs can be registered with one of them.
    vram: bool,
}

impl Plugins {
    fn add(&mut self, backend: Backend, vram: bool) {
        self.backends.push(backend);
        self.vram |= vram;
    }

    fn names(&self) -> String {
        self.backends.iter().map(Backend::name).collect::<Vec<_>>().join(", ")
    }
}

/// One agent of NIXL.
pub(crate) struct Engine {
    pub(super) nixl: Nixl,
    pub(super) agent: Agent,
    /// Those that connect agents.
    memory: Plugins,
    /// Those that take files; where the user has named no plug-ins, they are made when a file is first asked for.
    files: OnceLock<Result<Plugins>>,
    /// Ranges of GPUs that are registered now: NIXL would take one for the other where they overlap.
    on_gpus: Mutex<Vec<(Reach, Descriptor)>>,
    pub(super) opened: Instant,
    /// Those that UCX was set to use.
    devices: Result<Devices>,
    pub(super) peers: Mutex<HashMap<Incarnation, Arc<PeerAgent>>>,
    connection: OnceLock<Vec<u8>>,
    next_device: AtomicU64,
    pub(super) counts: Counts,
    pub(super) state: Mutex<Driving>,
    pub(super) changed: Condvar,
    /// Held by the thread that asks NIXL how far things are.
    pub(super) driving: Mutex<()>,
    /// Callers that drive while they wait.
    pub(super) helpers: AtomicUsize,
    pub(super) flying: AtomicUsize,
}

impl Engine {
    fn open(identity: &Identity, options: &NixlOptions) -> Result<Arc<Engine>> {
        let failed = |error: towline_sys::Error| of_nixl(error).during("import").on("nixl");
        let nixl = Nixl::load().map_err(failed)?;
        // NIXL's own thread would spin on a core for as long as the agent lives.
        let mut config = AgentConfig::default();
        config.progress_thread = false;
        // NIXL mixes up agents of one name: the incarnation makes it unique, also over restarts.
        let name = format!("{}/{}", identity.name, identity.incarnation);
        let agent = nixl.agent(&name, &config).map_err(failed)?;
        let (mut memory, mut for_files) = (Plugins::default(), Plugins::default());
        let devices = options.devices();
        for (plugin, parameters) in options.backends() {
            let kinds = kinds(&agent, &plugin)?;
            let vram = kinds.contains(&MemoryKind::Vram);
            let unsupported = |message: &str| {
                let message = format!("backend {plugin}: {message}");
                Err(Error::new(Kind::Unsupported, "import", message).on("nixl"))
            };
            if kinds.contains(&MemoryKind::File) {
                for_files.add(make(&agent, &plugin, &parameters)?, vram);
            } else if kinds.iter().any(|kind| matches!(kind, MemoryKind::Block | MemoryKind::Object)) {
                return unsupported("it takes neither memory of peers nor files");
            } else if plugin == "UCX" {
                // Without a device it would not start; files need none.
                let Ok(devices) = &devices else { continue };
                let backend = make(&agent, &plugin, &devices.limit(parameters)?)?;
                memory.add(backend, vram && system::ucx_has_cuda(&nixl));
            } else if options.lends() {
                return unsupported("it cannot be held to the devices that memory is lent over, as UCX can");
            } else {
                memory.add(make(&agent, &plugin, &parameters)?, vram);
            }
        }
        let files = OnceLock::new();
        if options.names_backends() {
            let _ = files.set(if for_files.backends.is_empty() {
                let has: Vec<_> = options.backends().into_iter().map(|(plugin, _)| plugin).collect();
                let has = has.join(", ");
                let message = format!(
                    "no backend of the endpoint takes files ({has}): add POSIX or GDS to its options"
                );
                Err(Error::new(Kind::Unavailable, "import", message).on("nixl"))
            } else {
                Ok(for_files)
            });
        }
        super::driver::leave_before_exit();
        Ok(Arc::new(Engine {
            nixl,
            agent,
            memory,
            files,
            on_gpus: Mutex::default(),
            opened: Instant::now(),
            devices,
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

    /// The plug-ins for that; `Unavailable` where there are none.
    pub(super) fn options(&self, reach: Reach) -> Result<Options<'_>> {
        Ok(Options::on(&self.plugins(reach)?.backends))
    }

    fn plugins(&self, reach: Reach) -> Result<&Plugins> {
        match reach {
            // An empty list would mean all of them.
            Reach::Memory if self.memory.backends.is_empty() => {
                if let Err(none) = &self.devices {
                    return Err(none.clone());
                }
                let message = "no backend of the endpoint connects to other agents: add UCX to its options";
                Err(Error::new(Kind::Unavailable, "import", message).on("nixl"))
            }
            Reach::Memory => Ok(&self.memory),
            Reach::Files => {
                let made = self.files.get_or_init(|| {
                    let backend = make(&self.agent, "POSIX", &BTreeMap::new())?;
                    let vram = kinds(&self.agent, "POSIX")?.contains(&MemoryKind::Vram);
                    Ok(Plugins { backends: vec![backend], vram })
                });
                made.as_ref().map_err(Error::clone)
            }
        }
    }

    /// Whether memory of GPUs can be registered for that.
    pub(super) fn takes_gpus(&self, reach: Reach) -> bool {
        self.plugins(reach).is_ok_and(|plugins| plugins.vram)
    }

    /// Takes a range of a GPU, unless one that overlaps it is taken: NIXL looks memory up by device and address, and would
    /// reach one through the registration of the other, also when that goes.
    pub(super) fn take_on_gpu(&self, reach: Reach, range: Descriptor) -> Result<()> {
        let mut taken = self.on_gpus.lock();
        let overlaps = |(side, one): &(Reach, Descriptor)| {
            *side == reach
                && one.device == range.device
                && one.address < range.address + range.length
                && range.address < one.address + one.length
        };
        if taken.iter().any(overlaps) {
            let message = "another region of this endpoint has part of that memory of the GPU, and NIXL cannot keep them apart";
            return Err(Error::new(Kind::Unavailable, "import", message).on("nixl"));
        }
        taken.push((reach, range));
        Ok(())
    }

    /// Gives back what [`take_on_gpu`](Self::take_on_gpu) took.
    pub(super) fn leave_gpu(&self, reach: Reach, range: Descriptor) {
        self.on_gpus.lock().retain(|one| *one != (reach, range));
    }

    /// What a peer needs to connect to this agent.
    pub(super) fn connection(&self) -> Result<Vec<u8>> {
        if let Some(metadata) = self.connection.get() {
            return Ok(metadata.clone());
        }
        let nothing = RegistrationList::new(&self.nixl, MemoryKind::Dram, []).map_err(of_nixl)?;
        let metadata =
            self.agent.partial_metadata(&nothing, &self.options(Reach::Memory)?).map_err(of_nixl)?;
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

    /// Whether transfers may go by a device that needs no help of the owner's processor.
    pub(super) fn by_rdma(&self) -> bool {
        self.devices.as_ref().is_ok_and(|devices| devices.rdma)
    }

    /// What NIXL runs on here, towards that side, and what it takes of the owner.
    pub(super) fn detail(&self, reach: Reach) -> String {
        let backends = self.plugins(reach).map(Plugins::names).unwrap_or_default();
        let detail = format!("{} by {backends}", system::describe(&self.nixl));
        match (reach, &self.devices) {
            (Reach::Memory, Ok(devices)) => {
                format!("{detail} over {}; {}", devices.shown(), super::GIVES_AWAY)
            }
            _ => detail,
        }
    }

    fn stats(&self) -> NixlStats {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let counts = &self.counts;
        NixlStats {
            registered: load(&counts.registered),
            peers: self.peers.lock().len() as u64,
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

fn make(agent: &Agent, plugin: &str, parameters: &BTreeMap<String, String>) -> Result<Backend> {
    agent.create_backend(plugin, parameters).map_err(of_backend(plugin))
}

/// The kinds of memory that a plug-in takes.
fn kinds(agent: &Agent, plugin: &str) -> Result<Vec<MemoryKind>> {
    agent.plugin(plugin).map(|plugin| plugin.memory).map_err(of_backend(plugin))
}

fn of_backend(plugin: &str) -> impl Fn(towline_sys::Error) -> Error {
    move |error| {
        let error = of_nixl(error);
        Error::new(error.kind(), "import", format!("backend {plugin}: {}", error.message())).on("nixl")
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
