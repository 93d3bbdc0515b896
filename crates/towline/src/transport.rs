//! The seam: what a way of moving bytes must be able to say and do, and the list of those that exist.
//!
//! To add a transport, write one file beside the others and add one word to [`TRANSPORTS`]. The order of the
//! list is the order of preference.
//!
//! # The contract of an attachment
//! The laws of the test kit carry the same numbers.
//!
//! 1. A read that succeeds has filled the whole range with the owner's bytes, and the owner's generation was
//!    valid from start to end.
//! 2. A write that succeeds is visible to the owner before its notification or its signal is.
//! 3. Nothing outside the requested ranges changes, on either side, whatever happens.
//! 4. Every unit of a transfer reports exactly once; after the last report nothing touches the local memory.
//! 5. After the owner has deregistered, every access gives `Stale` and moves nothing.
//! 6. Access outside the grant's range or rights is refused before a byte moves.
//! 7. `stop` returns at once and the transfer ends soon after: no unit waits for the peer any longer.
//! 8. A 64-bit atomic is atomic with respect to every other path to the same word.

pub(crate) mod cma;
pub(crate) mod cuda;
pub(crate) mod direct;
pub(crate) mod file;
pub(crate) mod gpu;
pub(crate) mod inproc;
pub(crate) mod mapped;
pub(crate) mod nixl;
pub(crate) mod stream;

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crate::identity::Identity;
use crate::layout::{Indexed, Piece, Plan};
use crate::region::{RegionCore, RegionUse, stale};
use crate::route::{self, Capabilities, Path, Routes, Routing};
use crate::session::{GrantHandle, OwnerPaths, Query, QueryReply};
use crate::ticket::Claims;
use crate::transfer::{After, Op, TransferCore};
use crate::transport::direct::Held;
use crate::wire::Grant;
use crate::{Error, Kind, Result};

/// Every transport, the preferred ones first.
pub(crate) static TRANSPORTS: [&dyn Transport; 8] = [
    &inproc::InProc,
    &mapped::Mapped,
    &cuda::CudaPath,
    &cma::Cma,
    &file::FilePath,
    &nixl::NixlPath,
    &stream::Unix,
    &stream::Tcp,
];

/// Whether a transport works on this machine at all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Probe {
    /// It works; with a remark where one is useful.
    Works(String),
    /// It does not work here.
    Missing {
        /// Why.
        reason: String,
        /// What would mend it.
        mend: String,
    },
}

/// Where a region lives, as seen from the worker that imports it.
pub(crate) enum Owner<'a> {
    /// In this process.
    Here(&'a Arc<RegionCore>),
    /// In another process, granted over a session.
    There(&'a Arc<GrantHandle>),
}

impl Owner<'_> {
    /// The error is why its region cannot be reached any more, whatever the path.
    pub(crate) fn alive(&self) -> Result<()> {
        match self {
            Owner::Here(region) if region.registry.is_closed() => {
                Err(Error::owner_gone("import", "the owner has closed its endpoint"))
            }
            Owner::Here(region) if region.is_closed() => Err(stale("import")),
            Owner::Here(_) => Ok(()),
            Owner::There(handle) => handle.session().alive(),
        }
    }
}

/// What transports know of their endpoint, and keep for it.
pub(crate) struct TransportContext {
    pub(crate) identity: Identity,
    /// Which paths the endpoint allows where an import does not say, and by which it lends.
    pub(crate) routing: Routing,
    /// The agent of NIXL, once a transfer by it was asked for.
    pub(crate) nixl: nixl::Domain,
}

/// At the owner, each transport answers for its own path.
impl OwnerPaths for TransportContext {
    fn offers(&self, region: &RegionCore, claims: &Claims) -> u8 {
        let offered = |one: &&&dyn Transport| one.number().is_some() && one.offers(self, region, claims);
        let bits = TRANSPORTS.iter().filter(offered).filter_map(|one| Some(1 << (one.number()? - 1)));
        bits.fold(0, |all, one: u8| all | one)
    }

    fn take_hint(&self, path: u8, region: &RegionCore, words: &[u8]) -> Result<bool> {
        Ok(numbered(path)?.take_hint(self, region, words))
    }

    fn answer_query(&self, path: u8, query: &Query<'_>) -> Result<QueryReply> {
        numbered(path)?.answer_query(self, query)
    }
}

/// What a transport gets to see of a grant before it says yes or no.
pub(crate) struct Offer<'a> {
    /// Of the endpoint that imports.
    pub(crate) context: &'a Arc<TransportContext>,
    pub(crate) owner: Owner<'a>,
    pub(crate) grant: &'a Grant,
    /// What the caller allows.
    pub(crate) routing: &'a Routing,
    /// When the caller wants to know, whatever has to be asked or made first.
    pub(crate) until: Instant,
}

/// What became of a request that was begun in the calling thread.
pub(crate) enum Begun {
    /// It has ended.
    Ended(Result<Option<u64>>),
    /// It goes on by itself. Dropped, it goes on all the same, and nobody learns how it ended.
    Going(Box<dyn Going>),
}

/// A request that goes on by itself.
pub(crate) trait Going {
    /// Reports to that transfer, which has one unit.
    fn report_to(self: Box<Self>, transfer: &Arc<TransferCore>);
}

/// One way of moving bytes.
pub(crate) trait Transport: Send + Sync {
    /// The name that users see, require and forbid.
    fn name(&self) -> &'static str;

    /// What it is, in one line.
    fn summary(&self) -> &'static str;

    /// Whether it works on this machine. Cost: a few system calls.
    fn probe(&self) -> Probe;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Whether the owner checks bounds, rights and revocation on every access, so that they hold against a
    /// compromised peer too; otherwise they hold between cooperating processes.
    fn enforced(&self) -> bool;

    /// Whether a transfer on one host is quiet when it has ended, however it ended. Between hosts it may say that it is not.
    fn quiet_at_end(&self) -> bool {
        true
    }

    /// Whether [`attach`](Self::attach) would block for that offer: asks the owner, or loads a library. Quick.
    fn blocks(&self, _offer: &Offer<'_>) -> bool {
        false
    }

    /// Binds this way to one granted region. The error says why it is not a candidate.
    fn attach(&self, offer: &Offer<'_>) -> Result<Arc<dyn Attachment>>;

    /// The number by which peers ask about it, 1 to 8; `None` where the grant says all that they need.
    fn number(&self) -> Option<u8> {
        None
    }

    /// At the owner: whether who holds that ticket should ask about that region. Called with every grant, so it is quick.
    fn offers(&self, _context: &TransportContext, _region: &RegionCore, _claims: &Claims) -> bool {
        false
    }

    /// At the owner: takes a word that asks for nothing and gives nothing; false where it is a query. Quick.
    fn take_hint(&self, _context: &TransportContext, _region: &RegionCore, _words: &[u8]) -> bool {
        false
    }

    /// At the owner: answers what a peer asks before it attaches ([`GrantHandle::query`]). Runs on a worker, and may block.
    fn answer_query(&self, _context: &TransportContext, query: &Query<'_>) -> Result<QueryReply> {
        let message = format!("nothing is asked about {} on {}", query.region.place, self.name());
        Err(Error::new(Kind::Unsupported, "import", message))
    }
}

/// One path that can be used.
pub(crate) type Way = route::Way<Arc<dyn Attachment>>;

/// The paths to that region, asked for one after the other.
pub(crate) fn routes(offer: &Offer<'_>) -> Result<Routes<Arc<dyn Attachment>>> {
    let attach = |transport: &dyn Transport| {
        let attachment = transport.attach(offer)?;
        let summary = attachment.detail().unwrap_or_else(|| attachment.summary().to_owned());
        Ok((attachment, summary))
    };
    let paths = TRANSPORTS.into_iter().map(|transport| (path(transport), transport));
    Routes::find(offer.routing, paths, attach, || offer.owner.alive())
}

fn path(transport: &dyn Transport) -> Path {
    let (name, capabilities) = (transport.name(), transport.capabilities());
    Path { name, capabilities, enforced: transport.enforced() }
}

/// Whether finding the paths to that region would block.
pub(crate) fn blocks(offer: &Offer<'_>) -> bool {
    let allowed =
        |transport: &dyn Transport| offer.routing.refusal(transport.name(), transport.enforced()).is_none();
    TRANSPORTS.into_iter().any(|transport| allowed(transport) && transport.blocks(offer))
}

/// The path that a peer asks about.
fn numbered(number: u8) -> Result<&'static dyn Transport> {
    TRANSPORTS
        .into_iter()
        .find(|transport| transport.number() == Some(number))
        .ok_or_else(|| Error::new(Kind::Unsupported, "import", format!("there is no path {number} here")))
}

/// One way of moving bytes, bound to one granted region. Offsets are relative to the grant's range, and the
/// caller has checked them against the grant's length and rights.
pub(crate) trait Attachment: Send + Sync {
    /// The way it belongs to.
    fn transport(&self) -> &'static dyn Transport;

    /// What this way does, in one line.
    fn summary(&self) -> &'static str {
        self.transport().summary()
    }

    /// Whether a request can be started; the error is why not. It need not end well.
    fn ready(&self) -> Result<()> {
        self.alive()
    }

    /// What the path runs on here, for explanations.
    fn detail(&self) -> Option<String> {
        None
    }

    /// How GPUs copy by this way, for a request whose local memory is on one. `None` where this way knows host memory only:
    /// such requests then go through pinned memory ([`gpu::Staged`]).
    fn by_gpu(&self) -> Option<Arc<dyn Attachment>> {
        None
    }

    /// Begins a small request in the calling thread and stays with it for a moment; `None` leaves it to
    /// [`run_now`](Self::run_now). `base` is the address, within the local region, that the pieces' local offsets are
    /// relative to.
    fn begin(
        &self,
        _op: Op,
        _local: &RegionUse,
        _base: usize,
        _pieces: &[Piece],
        _bytes: u64,
        _after: &After,
    ) -> Option<Begun> {
        None
    }

    /// Begins a request for blocks by their indices, where this way needs no list of pieces; `None` leaves it to the others,
    /// with such a list. The layouts were checked against the regions, the indices were not checked.
    fn begin_blocks(
        &self,
        _op: Op,
        _local: &RegionUse,
        _base: usize,
        _blocks: &Indexed<'_>,
        _after: &After,
    ) -> Option<Begun> {
        None
    }

    /// Runs a small request in the calling thread, where that is the fastest; `None` leaves it to
    /// [`start`](Self::start). `local` is the address that the pieces' local offsets are relative to.
    ///
    /// # Safety
    /// `local` plus every piece lies in memory that the caller keeps alive and pinned during the call.
    #[allow(unsafe_code, reason = "the local memory is a raw address, kept alive by the caller")]
    unsafe fn run_now(
        &self,
        op: Op,
        local: *mut u8,
        pieces: &[Piece],
        bytes: u64,
        after: &After,
    ) -> Option<Result<Option<u64>>>;

    /// Whether [`run_now`](Self::run_now) takes a request of that many bytes.
    fn at_once(&self, _bytes: u64) -> bool {
        false
    }

    /// Whether planning and starting a request of that size is left to a worker: where it takes longer than calling one. Its
    /// [`cut`](Self::cut) and its [`start`](Self::start) then run on any thread, behind the call that starts it.
    fn starts_later(&self, _op: Op, _bytes: u64, _blocks: u64) -> bool {
        false
    }

    /// Cuts a plan into the units that this way works in: the plan, its longest pieces cut, and the runs of
    /// pieces that make up the units. Each unit reports once; there is at least one.
    fn cut(&self, op: Op, plan: Plan, after: &After) -> Result<(Plan, Vec<Range<usize>>)>;

    /// The same for a portion of a transfer whose bytes stop over: others are in flight beside it.
    fn cut_portion(&self, op: Op, plan: Plan, after: &After) -> Result<(Plan, Vec<Range<usize>>)> {
        self.cut(op, plan, after)
    }

    /// Starts a transfer whose plan went through [`cut`](Self::cut). What follows the bytes (signal, notification)
    /// is its task too.
    fn start(self: Arc<Self>, transfer: &Arc<TransferCore>);

    /// Makes a transfer quiet and lets its remaining units report. Never waits for the peer.
    fn stop(&self, transfer: &Arc<TransferCore>);

    /// Whether it can still be used: the owner is alive as far as is known.
    fn alive(&self) -> Result<()>;

    /// Pins the region for a long time; `None` on a way that shares no memory with the owner.
    fn hold(&self) -> Option<Result<Held>> {
        None
    }
}

/// One path as `towline doctor` shows it.
#[derive(Debug, Clone)]
pub struct PathInfo {
    /// The path's name.
    pub name: &'static str,
    /// What it is, in one line.
    pub summary: &'static str,
    /// What it can do.
    pub capabilities: Capabilities,
    /// Whether the owner checks every access on it.
    pub enforced: bool,
    /// Whether a transfer on one host is quiet when it has ended, however it ended.
    pub quiet_at_end: bool,
    /// Whether it works on this machine.
    pub probe: Probe,
}

/// The names of all paths in order of preference. Probes nothing.
pub fn path_names() -> Vec<&'static str> {
    TRANSPORTS.iter().map(|transport| transport.name()).collect()
}

/// Every path in order of preference, probed on this machine. Loads NIXL, where it is there: [`path_names`] does not.
pub fn paths() -> Vec<PathInfo> {
    TRANSPORTS
        .iter()
        .map(|transport| PathInfo {
            name: transport.name(),
            summary: transport.summary(),
            capabilities: transport.capabilities(),
            enforced: transport.enforced(),
            quiet_at_end: transport.quiet_at_end(),
            probe: transport.probe(),
        })
        .collect()
}

/// The part of it that knows which paths there are.
impl Routing {
    /// Allows only that path (and the others that are required too).
    pub fn require(self, path: &str) -> Result<Routing> {
        Ok(self.requiring(named(path)?.name()))
    }

    /// Allows every path but that one.
    pub fn forbid(self, path: &str) -> Result<Routing> {
        Ok(self.forbidding(named(path)?.name()))
    }

    /// Whether that path is allowed.
    pub(crate) fn allows(&self, path: &str) -> bool {
        named(path).is_ok_and(|one| self.refusal(one.name(), one.enforced()).is_none())
    }
}

fn named(path: &str) -> Result<&'static dyn Transport> {
    TRANSPORTS.into_iter().find(|transport| transport.name() == path).ok_or_else(|| {
        let names = path_names().join(", ");
        Error::invalid("route", format!("there is no path {path:?}; the paths are {names}"))
    })
}
