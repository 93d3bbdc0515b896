//! The seam: what a way of moving bytes must be able to say and do, and the list of those that exist.
//!
//! To add a transport, write one file in `transport/` with a `TRANSPORT`, and add its name to the list in [`each_path!`](crate::each_path).
//! The order of the list is the order of preference. Nothing else names a transport: what others must know of one, it says of itself.
//!
//! # What moves
//! The unit of work is one [`Submission`](crate::transfer::submission::Submission) to one peer: an operation over any number of
//! *parts*, each a region of that peer ([`Attachment`]: attached to a link, which is this transport opened to that peer), a local region,
//! and pieces or block indices between the two. All parts of one submission are attached to one link; where a request needs several, it
//! is split above the seam ([`joint`]) and ends as one. [`submit`](crate::transfer::submission::Link::submit) is the one entry. It answers
//! `Done`, `Running` or `Deferred`, and nothing else starts work.
//!
//! A transfer that goes on behind the call is a `TransferCore`: for each part the region, the use of the local memory, the address
//! that its offsets count from, and its plan; and *units*, each a run of pieces of one part. A path cuts plans into units as it likes to
//! work, in any order and on any threads, and reports for each of them once. What follows the bytes (notification, signal) follows
//! those of all parts.
//!
//! # The contract of a submission
//! The laws of the test kit carry the same numbers.
//!
//! 1. A read that succeeds has filled the whole of every part with the owner's bytes, and each region's generation was
//!    valid while its bytes were read.
//! 2. A write that succeeds is visible to the owner, in all parts, before its notification or its signal is.
//! 3. Nothing outside the requested ranges changes, on either side, whatever happens.
//! 4. Every unit of a transfer reports exactly once; after the last report nothing touches the local memory of any part.
//! 5. After the owner has deregistered, every access gives `Stale` and moves nothing. One stale part ends the whole with
//!    `Stale`, and the error names the part; nothing follows the bytes then. Other parts may have moved.
//! 6. Access outside the grant's range or rights is refused before a byte moves, of any part.
//! 7. `stop` returns at once and the transfer ends soon after, with all of its parts: no unit waits for the peer any longer.
//! 8. A 64-bit atomic is atomic with respect to every other path to the same word.
//! 9. A region may be in several parts, and parts may overlap. Where bytes that are written overlap, which of them stay is not
//!    defined, but each byte is one of those that were to be written there. With checksums such a write may end with `Protocol`
//!    instead: what arrived is compared where it lies.

pub(crate) mod direct;
pub(crate) mod gpu;
pub(crate) mod joint;
pub(crate) mod stream;
/// What `make test-deep` puts beside the others: it stands in no list, and is compiled here so that it keeps up with the seam.
#[cfg(test)]
#[path = "../tests/transport/sample.rs"]
mod trial;

use std::ops::Deref;
use std::sync::Arc;
use std::time::Instant;

use crate::identity::Identity;
use crate::region::{RegionCore, stale};
use crate::route::{self, Capabilities, Path, Paths, Routing};
use crate::session::{GrantHandle, OwnerPaths, Query, QueryReply, Ticketed};
use crate::transfer::submission::Link;
use crate::transport::direct::Held;
use crate::wire::Grant;
use crate::{Error, Kind, Result};

/// Calls a macro with the arguments given and the names of all paths, the preferred ones first: the list of transports.
#[doc(hidden)]
#[macro_export]
macro_rules! each_path {
    ($then:ident!($($arguments:tt)*)) => {
        $then! { $($arguments)*: inproc mapped cuda cma file nixl unix tcp }
    };
}

macro_rules! transports {
    (: $($path:ident)*) => {
        $(pub(crate) mod $path;)*

        /// Every transport, in the order of the list.
        pub(crate) static TRANSPORTS: &[&dyn Transport] = &[$($path::TRANSPORT),*];
    };
}

each_path!(transports!());

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

/// What an owner's memory must be for a path to serve it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Serves {
    /// Whatever an owner registers.
    Anything,
    /// Host memory, shared or not.
    HostMemory,
    /// Host memory that can be shared, as that of a [`SharedStorage`](crate::SharedStorage).
    SharedMemory,
    /// Memory of a GPU.
    GpuMemory,
    /// Files.
    Files,
}

impl Serves {
    /// Whether host memory is among it, whose words can be acted on by atomics, reductions and signals.
    pub fn has_words(self) -> bool {
        !matches!(self, Serves::GpuMemory | Serves::Files)
    }
}

/// By which kind of connection an owner is contacted before its regions can be reached by a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contact {
    /// None: the owner is in this process.
    Nothing,
    /// A Unix socket: the owner is on this host.
    Unix,
    /// TCP.
    Tcp,
    /// Any that is there. For the sake of such a path one is made only where the path is required.
    Any,
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
    fn offers(&self, ticketed: &Ticketed<'_>) -> u8 {
        let offered = |one: &&&dyn Transport| one.number().is_some() && one.offers(self, ticketed);
        let bits = TRANSPORTS.iter().filter(offered).filter_map(|one| Some(1 << (one.number()? - 1)));
        bits.fold(0, |all, one: u8| all | one)
    }

    fn take_hint(&self, path: u8, words: &[u8]) -> Result<bool> {
        Ok(numbered(path)?.take_hint(self, words))
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

/// One way of moving bytes.
pub(crate) trait Transport: Send + Sync {
    /// What it says of itself, whatever the machine is.
    fn properties(&self) -> PathProperties;

    /// The name that users see, require and forbid.
    fn name(&self) -> &'static str {
        self.properties().name
    }

    /// Whether it works on this machine. Cost: a few system calls.
    fn probe(&self) -> Probe;

    /// Whether [`attach`](Self::attach) would block for that offer: asks the owner, or loads a library. Quick.
    fn blocks(&self, _offer: &Offer<'_>) -> bool {
        false
    }

    /// Attaches one granted region to the link to its owner. The error says why this path cannot be used.
    fn attach(&self, offer: &Offer<'_>) -> Result<Arc<dyn Attachment>>;

    /// The number by which peers ask about it, 1 to 8; `None` where the grant says all that they need.
    fn number(&self) -> Option<u8> {
        None
    }

    /// At the owner: whether who holds that ticket should ask about that region. Called with every grant, so it is quick.
    fn offers(&self, _context: &TransportContext, _ticketed: &Ticketed<'_>) -> bool {
        false
    }

    /// At the owner: takes a word that asks for nothing and gives nothing; false where it is a query. Quick.
    fn take_hint(&self, _context: &TransportContext, _words: &[u8]) -> bool {
        false
    }

    /// At the owner: answers what a peer asks before it attaches ([`GrantHandle::query`]). Runs on a worker, and may block.
    fn answer_query(&self, _context: &TransportContext, query: &Query<'_>) -> Result<QueryReply> {
        let message = format!("nothing is asked about {} on {}", query.ticketed.region.place, self.name());
        Err(Error::new(Kind::Unsupported, "import", message))
    }
}

/// One path that can be used.
pub(crate) type UsablePath = route::UsablePath<Attached>;

/// The paths to that region, tried one after the other.
pub(crate) fn paths_to(offer: &Offer<'_>) -> Result<Paths<Attached>> {
    let attach = |transport: &dyn Transport| {
        let attachment = transport.attach(offer)?;
        let summary = attachment.detail().unwrap_or_else(|| attachment.summary().to_owned());
        Ok((Attached { link: Arc::clone(&attachment) as Arc<dyn Link>, attachment }, summary))
    };
    let paths = all().map(|transport| (path(transport), transport));
    Paths::find(offer.routing, paths, attach, || offer.owner.alive())
}

fn path(transport: &dyn Transport) -> Path {
    let PathProperties { name, capabilities, enforced, .. } = transport.properties();
    Path { name, capabilities, enforced }
}

/// Whether finding the paths to that region would block.
pub(crate) fn blocks(offer: &Offer<'_>) -> bool {
    all().any(|transport| is_allowed(transport, offer.routing) && transport.blocks(offer))
}

fn all() -> impl Iterator<Item = &'static dyn Transport> {
    TRANSPORTS.iter().copied()
}

fn is_allowed(transport: &dyn Transport, routing: &Routing) -> bool {
    let PathProperties { name, enforced, .. } = transport.properties();
    routing.refusal(name, enforced).is_none()
}

/// How an owner may be contacted for the paths that are allowed.
#[derive(Default)]
pub(crate) struct Contacts {
    /// Not at all, where it is in this process.
    pub(crate) nothing: bool,
    pub(crate) unix: bool,
    pub(crate) tcp: bool,
}

pub(crate) fn contacts(routing: &Routing) -> Contacts {
    let mut contacts = Contacts::default();
    for transport in all().filter(|transport| is_allowed(*transport, routing)) {
        match transport.properties().contact {
            Contact::Nothing => contacts.nothing = true,
            Contact::Unix => contacts.unix = true,
            Contact::Tcp => contacts.tcp = true,
            Contact::Any if routing.requires(transport.name()) => {
                (contacts.unix, contacts.tcp) = (true, true);
            }
            Contact::Any => {}
        }
    }
    contacts
}

/// The path that a peer asks about.
fn numbered(number: u8) -> Result<&'static dyn Transport> {
    all()
        .find(|transport| transport.number() == Some(number))
        .ok_or_else(|| Error::new(Kind::Unsupported, "import", format!("there is no path {number} here")))
}

/// One granted region of a peer, attached to a link. Offsets are relative to the grant's range, and the caller has checked them
/// against the grant's length and rights. Work is started by [`submit`](Link::submit), and by nothing else.
pub(crate) trait Attachment: Link {
    /// The transport that it belongs to.
    fn transport(&self) -> &'static dyn Transport;

    /// What this path does, in one line.
    fn summary(&self) -> &'static str {
        self.transport().properties().summary
    }

    /// Whether a request can be started; the error is why not. It need not end well.
    fn ready(&self) -> Result<()> {
        self.alive()
    }

    /// What the path runs on here, for explanations.
    fn detail(&self) -> Option<String> {
        None
    }

    /// Whether it can still be used: the owner is alive as far as is known.
    fn alive(&self) -> Result<()>;

    /// Pins the region for a long time; `None` on a path that shares no memory with the owner.
    fn hold(&self) -> Option<Result<Held>> {
        None
    }
}

/// A granted region that is attached to a link, and the same as transfers know it.
pub(crate) struct Attached {
    attachment: Arc<dyn Attachment>,
    pub(crate) link: Arc<dyn Link>,
}

impl Deref for Attached {
    type Target = dyn Attachment;

    fn deref(&self) -> &dyn Attachment {
        &*self.attachment
    }
}

/// What a path says of itself, whatever the machine is.
#[derive(Debug, Clone, Copy)]
pub struct PathProperties {
    /// The name that users see, require and forbid.
    pub name: &'static str,
    /// What it is, in one line.
    pub summary: &'static str,
    /// What it can do.
    pub capabilities: Capabilities,
    /// What an owner's memory must be for it.
    pub serves: Serves,
    /// How an owner is contacted for it.
    pub contact: Contact,
    /// Whether the owner has to be in another process.
    pub apart: bool,
    /// Whether host memory is shared with its owner, so that a region can be [pinned](crate::Remote::pin).
    pub shares_memory: bool,
    /// Whether owners lend by it only where their options say so.
    pub opt_in: bool,
    /// What is said where a machine in good order does not have it; `None` where every machine should.
    pub may_be_missing: Option<&'static str>,
    /// What to do where it works on a machine, and yet another process is not reached by it.
    pub mend: &'static str,
    /// Whether the owner checks bounds, rights and revocation on every access, so that they hold against a compromised peer too;
    /// otherwise they hold between cooperating processes.
    pub enforced: bool,
    /// Whether a transfer on one host is quiet when it has ended, however it ended. Between hosts it may say that it is not.
    pub quiet_at_end: bool,
}

impl PathProperties {
    /// A path that needs nothing else to be said.
    pub(crate) fn new(
        name: &'static str,
        summary: &'static str,
        capabilities: Capabilities,
        serves: Serves,
        contact: Contact,
    ) -> PathProperties {
        PathProperties {
            name,
            summary,
            capabilities,
            serves,
            contact,
            apart: false,
            shares_memory: false,
            opt_in: false,
            may_be_missing: None,
            mend: "",
            enforced: false,
            quiet_at_end: true,
        }
    }
}

/// One path as `towline doctor` shows it: its properties, and whether it works here.
#[derive(Debug, Clone)]
pub struct PathInfo {
    /// What it says of itself.
    pub properties: PathProperties,
    /// Whether it works on this machine.
    pub probe: Probe,
}

impl Deref for PathInfo {
    type Target = PathProperties;

    fn deref(&self) -> &PathProperties {
        &self.properties
    }
}

/// The names of all paths in order of preference. Probes nothing.
pub fn path_names() -> Vec<&'static str> {
    all().map(Transport::name).collect()
}

/// What all paths say of themselves, in order of preference. Probes nothing.
pub fn path_properties() -> Vec<PathProperties> {
    all().map(Transport::properties).collect()
}

/// Every path in order of preference, probed on this machine. Loads NIXL, where it is there: [`path_properties`] does not.
pub fn paths() -> Vec<PathInfo> {
    let info = |one: &dyn Transport| PathInfo { properties: one.properties(), probe: one.probe() };
    all().map(info).collect()
}

/// The part of it that knows which paths there are.
impl Routing {
    /// Allows only that path (and the others that are required too).
    pub fn require(self, path: &str) -> Result<Routing> {
        Ok(self.requiring(named(path)?.name()))
    }

    /// Allows every other path.
    pub fn forbid(self, path: &str) -> Result<Routing> {
        Ok(self.forbidding(named(path)?.name()))
    }
}

fn named(path: &str) -> Result<&'static dyn Transport> {
    all().find(|transport| transport.name() == path).ok_or_else(|| {
        let names = path_names().join(", ");
        Error::invalid("path", format!("there is no path {path:?}; the paths are {names}"))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    macro_rules! words {
        (: $($path:ident)*) => {
            [$(stringify!($path)),*]
        };
    }

    #[test]
    fn the_words_of_the_list_are_the_names_of_the_paths_and_peers_tell_them_apart() {
        assert_eq!(path_names(), each_path!(words!()));
        let mut numbers: Vec<_> = all().filter_map(Transport::number).collect();
        assert!(numbers.iter().all(|number| (1..=8).contains(number)), "{numbers:?}");
        numbers.sort_unstable();
        assert!(numbers.windows(2).all(|two| two[0] != two[1]), "two paths have one number: {numbers:?}");
    }

    #[test]
    fn an_owner_is_contacted_for_the_paths_that_are_allowed_and_no_others() {
        let of = |routing: &Routing| {
            let Contacts { nothing, unix, tcp } = contacts(routing);
            (nothing, unix, tcp)
        };
        for path in path_properties() {
            let wanted = match path.contact {
                Contact::Nothing => (true, false, false),
                Contact::Unix => (false, true, false),
                Contact::Tcp => (false, false, true),
                Contact::Any => (false, true, true),
            };
            let required = Routing::default().require(path.name).unwrap();
            assert_eq!(of(&required), wanted, "{}", path.name);
            assert_eq!(of(&required.forbid(path.name).unwrap()), (false, false, false), "{}", path.name);
        }
        assert_eq!(of(&Routing::default()), (true, true, true));
        // A path that takes any contact asks for none where nobody requires it.
        let over_tcp = path_properties().into_iter().filter(|path| path.contact == Contact::Tcp);
        let without = over_tcp.fold(Routing::default(), |all, path| all.forbid(path.name).unwrap());
        assert_eq!(of(&without), (true, true, false));
        let enforced = Routing::default().isolation(crate::Isolation::Enforced);
        assert_eq!(of(&enforced), (true, true, true));
    }
}
