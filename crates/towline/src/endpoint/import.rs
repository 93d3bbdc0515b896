//! Tickets made usable here: contact with their owner, grants, and the ways to the region.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use super::EndpointCore;
use super::pinned::Pinned;
use super::stats::Counters;
use crate::completion::Completion;
use crate::identity::Incarnation;
use crate::layout::Layout;
use crate::memory::Place;
use crate::region::Counted;
use crate::route::{Capabilities, Explanation, Paths, Routing};
use crate::runtime::{self, Timer, TimerId};
use crate::session::{GrantHandle, Importing, Medium, NoContact, Session};
use crate::ticket::Reach;
use crate::transport::{self, Attached, Offer, Owner, UsablePath};
use crate::wire::Grant;
use crate::{Access, Error, Kind, Result, Ticket, ended, fork, interruptible, room};

/// Where a ticket names several addresses, each but the last gets at most this long.
const ONE_ADDRESS: Duration = Duration::from_secs(2);

/// A ticket made usable here. Cheap to clone.
#[derive(Clone)]
pub struct Remote(Arc<Imported>);

struct Imported {
    /// Who imported it: its paths follow that endpoint's routing, and no other endpoint may use them.
    endpoint: Weak<EndpointCore>,
    peer: Arc<str>,
    /// The life of the owner that has it.
    owner: Incarnation,
    grant: Grant,
    paths: Paths<Attached>,
    /// One for each usable path.
    counters: Vec<Arc<Counters>>,
    expires: Option<Instant>,
    /// Set when the connection to an owner elsewhere has ended.
    lost: Option<Arc<OnceLock<Instant>>>,
}

impl Remote {
    pub(super) fn new(
        endpoint: &Arc<EndpointCore>,
        owner: Owner<'_>,
        grant: Grant,
        peer: &str,
        (routing, until): (&Routing, Instant),
    ) -> Result<Remote> {
        let (incarnation, lost) = match &owner {
            Owner::Here(region) => (region.registry.identity().incarnation, None),
            Owner::There(handle) => {
                let session = handle.session();
                (session.owner().incarnation, Some(Arc::clone(&session.lost)))
            }
        };
        let paths = transport::paths_to(&Offer {
            context: &endpoint.transports,
            owner,
            grant: &grant,
            routing,
            until,
        })
        .map_err(|error| error.with_peer(peer))?;
        let peer: Arc<str> = peer.into();
        let counters = paths.usable.iter().map(|path| endpoint.counters.of(&peer, path.name)).collect();
        let expires =
            grant.expires_in_ms.map(|left| runtime::later(Instant::now(), Duration::from_millis(left)));
        let endpoint = Arc::downgrade(endpoint);
        Ok(Remote(Arc::new(Imported {
            endpoint,
            peer,
            owner: incarnation,
            grant,
            paths,
            counters,
            expires,
            lost,
        })))
    }

    /// Whether the owner of another region has this one too.
    pub(super) fn has_owner_of(&self, other: &Remote) -> bool {
        self.0.owner == other.0.owner
    }

    /// Whether that endpoint imported it.
    pub(super) fn is_of(&self, endpoint: &Arc<EndpointCore>) -> bool {
        std::ptr::eq(self.0.endpoint.as_ptr(), Arc::as_ptr(endpoint))
    }

    /// How many bytes the ticket reaches.
    #[allow(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> u64 {
        self.0.grant.length
    }

    /// What the ticket allows.
    pub fn access(&self) -> Access {
        self.0.grant.access
    }

    /// Where the bytes live.
    pub fn place(&self) -> Place {
        self.0.grant.place
    }

    /// The layout that the owner put into the ticket.
    pub fn layout(&self) -> Option<&Layout> {
        self.0.grant.layout.as_ref()
    }

    /// The owner's name.
    pub fn peer(&self) -> &Arc<str> {
        &self.0.peer
    }

    /// The path that transfers take.
    pub fn path(&self) -> &'static str {
        self.explain().taken().unwrap_or("none")
    }

    /// Every path: which one is taken, and why the others are not.
    pub fn explain(&self) -> &Explanation {
        &self.0.paths.explanation
    }

    /// Whether the owner can still be reached, as far as is known here; the error says what ended it.
    ///
    /// On one host the death of the owner's process shows at once; between hosts when the connection notices. It says
    /// nothing of the region: an owner that has deregistered it lives on.
    pub fn alive(&self) -> Result<()> {
        fork::guard("alive")?;
        let first = self.0.paths.usable.first();
        let alive = |path: &UsablePath| path.attachment.alive().map_err(|error| error.on(path.name));
        first.map_or(Ok(()), alive).map_err(|error| error.with_peer(&*self.0.peer))
    }

    /// When this side learned that the owner cannot be reached any more; `None` while it can. Transfers end after that, each
    /// as soon as the thread that copies for it has come to the end of its portion.
    pub fn lost_at(&self) -> Option<Instant> {
        let lost = self.0.lost.as_ref().and_then(|lost| lost.get().copied());
        // Since then it may have been connected to anew.
        lost.filter(|_| self.alive().is_err())
    }

    /// Pins the region for a series of accesses by plain loads and stores.
    ///
    /// # Errors
    /// `Unsupported` unless the memory is shared with this process (paths `inproc` and `mapped`), `Stale` once the owner
    /// has deregistered it, `Exhausted` where too many regions of that owner are pinned (960), `PermissionDenied` after
    /// the ticket's lease.
    pub fn pin(&self) -> Result<Pinned> {
        let pinned = || {
            fork::guard("pin")?;
            self.check_lease("pin")?;
            let held = self.0.paths.usable.iter().find_map(|path| {
                let name = path.name;
                Some(path.attachment.hold()?.map(|held| (held, name)).map_err(|error| error.on(name)))
            });
            let Some(held) = held else {
                let message = format!("no path to the region shares its memory:\n{}", self.explain());
                return Err(Error::new(Kind::Unsupported, "pin", message));
            };
            let (held, path) = held?;
            Ok(Pinned::new(held, self.len() as usize, self.access(), path, Arc::clone(&self.0.peer)))
        };
        pinned().map_err(|error| error.with_peer(&*self.0.peer))
    }

    /// The best path for that, and what is counted on it.
    #[inline]
    pub(super) fn pick(
        &self,
        needs: Capabilities,
        routing: Option<&Routing>,
    ) -> Result<(&UsablePath, &Arc<Counters>)> {
        self.0.paths.pick(needs, routing).map(|(index, path)| (path, &self.0.counters[index]))
    }

    /// Refuses what the lease no longer allows; the owner checks again wherever it takes part.
    #[inline]
    pub(super) fn check_lease(&self, op: &'static str) -> Result<()> {
        match self.0.expires {
            Some(expires) if Instant::now() >= expires => {
                Err(Error::new(Kind::PermissionDenied, op, "the ticket's lease has run out"))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote")
            .field("peer", &self.0.peer)
            .field("len", &self.len())
            .field("access", &self.access())
            .field("place", &self.place())
            .field("path", &self.path())
            .finish()
    }
}

/// Imports one ticket.
pub(super) fn import_one(
    endpoint: &Arc<EndpointCore>,
    ticket: &Ticket,
    routing: &Routing,
    within: Duration,
) -> Result<Remote> {
    import(endpoint, std::slice::from_ref(ticket), routing, within)?
        .pop()
        .unwrap_or_else(|| Err(Error::new(Kind::Internal, "import", "no reply")))
}

/// Imports tickets with one round trip per owner.
#[tracing::instrument(level = "debug", skip_all, fields(endpoint = endpoint.name(), tickets = tickets.len()))]
pub(super) fn import(
    endpoint: &Arc<EndpointCore>,
    tickets: &[Ticket],
    routing: &Routing,
    within: Duration,
) -> Result<Vec<Result<Remote>>> {
    fork::guard("import")?;
    runtime::may_block("import")?;
    endpoint.registry.check_open("import")?;
    let until = runtime::later(Instant::now(), within);
    let mut outcomes: Vec<Option<Result<Remote>>> = room::collect("import", tickets.iter().map(|_| None))?;
    let mut by_owner: HashMap<Incarnation, Vec<usize>> = HashMap::new();
    let here = transport::contacts(routing).nothing;
    for (index, ticket) in tickets.iter().enumerate() {
        let incarnation = ticket.body().identity.incarnation;
        match EndpointCore::here(&incarnation) {
            Some(owner) if here => {
                outcomes[index] = Some(import_here(endpoint, &owner, ticket, (routing, until)));
            }
            _ => room::push("import", by_owner.entry(incarnation).or_default(), index)?,
        }
    }
    // All owners are asked before the first answer is waited for; those that need a first contact come last, since that
    // takes the longest.
    let mut owners: Vec<Vec<usize>> = by_owner.into_values().collect();
    owners.sort_by_key(|indices| known_session(endpoint, &tickets[indices[0]], routing).is_none());
    let ask = |indices: &[usize]| match room::collect("import", indices.iter().map(|index| &tickets[*index]))
    {
        Ok(of_owner) => ask(endpoint, &of_owner, routing, until),
        Err(error) => Asked { refused: Vec::new(), rest: Err(error) },
    };
    let asked: Vec<_> = owners
        .iter()
        .map(|indices| {
            let known = known_session(endpoint, &tickets[indices[0]], routing).is_some();
            (&indices[..], ask(indices), known)
        })
        .collect();
    for (mut indices, mut asked, mut known) in asked {
        loop {
            let Asked { refused, rest } = asked;
            let (first, others) = indices.split_at(refused.len());
            for (index, error) in first.iter().zip(refused) {
                outcomes[*index] = Some(Err(error));
            }
            let granted = |(session, importing): (Arc<Session>, _)| {
                granted(endpoint, &session, importing, (routing, until))
            };
            match rest.and_then(granted) {
                Ok(remotes) => {
                    for (index, remote) in others.iter().zip(remotes) {
                        outcomes[*index] = Some(remote);
                    }
                }
                // A connection may have broken since it was last used, and nobody has noticed: that says nothing of the owner.
                Err(error) if known && error.kind() == Kind::Disconnected => {
                    (indices, asked, known) = (others, ask(others), false);
                    continue;
                }
                Err(error) => {
                    for index in others {
                        outcomes[*index] = Some(Err(error.clone()));
                    }
                }
            }
            break;
        }
    }
    let missing = || Err(Error::new(Kind::Internal, "import", "the owner did not answer for this ticket"));
    Ok(outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(missing)).collect())
}

/// [`import`] of one ticket on one of the threads for contacts, so that a slow one blocks neither the caller nor the workers. Nothing
/// happens before the first poll, from which on the limit counts, also while no thread is free.
pub(super) async fn import_async(
    endpoint: Arc<EndpointCore>,
    ticket: Ticket,
    routing: Routing,
    within: Duration,
) -> Result<Remote> {
    let until = runtime::later(Instant::now(), within);
    let queued = Arc::new(Queued::default());
    let mut awaited = Awaited { queued: Arc::clone(&queued), timer: None, given_up: Arc::default() };
    let (begun, given_up) = (Arc::clone(&queued), Arc::clone(&awaited.given_up));
    let job = move || {
        if begun.begin() {
            let left = until.saturating_duration_since(Instant::now());
            let remote = while_wanted(given_up, || import_one(&endpoint, &ticket, &routing, left));
            let _ = begun.end.set(remote);
        }
    };
    runtime::contacts().spawn(Box::new(job))?;
    let timer = Arc::downgrade(&queued);
    awaited.timer = Some(runtime::reactor()?.at(until, timer, 0));
    poll_fn(|cx| queued.end.poll_take(cx)).await
}

/// An import that a task awaits. When it has ended, or is dropped before, it leaves no timer, and its thread goes on to the next.
struct Awaited {
    queued: Arc<Queued>,
    timer: Option<TimerId>,
    given_up: Arc<AtomicBool>,
}

impl Drop for Awaited {
    fn drop(&mut self) {
        if fork::in_child() {
            return;
        }
        runtime::forget(self.timer);
        // No thread begins it any more, or the one that has begun is notified.
        self.queued.begin();
        self.given_up.store(true, Ordering::Release);
    }
}

thread_local! {
    /// Whether what this thread waits for has been given up.
    static GIVEN_UP: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Makes a contact whose waits end when it is given up.
fn while_wanted<T>(given_up: Arc<AtomicBool>, contact: impl FnOnce() -> T) -> T {
    fn is_given_up() -> bool {
        GIVEN_UP.with_borrow(|asked| asked.as_ref().is_some_and(|asked| asked.load(Ordering::Acquire)))
    }
    GIVEN_UP.set(Some(given_up));
    let outcome = interruptible(is_given_up, contact);
    GIVEN_UP.set(None);
    outcome
}

/// Runs a blocking contact on a thread that lives only for it.
pub(crate) fn on_a_thread<T: Send + 'static>(
    contact: impl FnOnce() -> Result<T> + Send + 'static,
) -> impl Future<Output = Result<T>> + Send {
    let made = Arc::new(Completion::default());
    let making = Arc::clone(&made);
    let spawned = runtime::start_thread("import", "towline-contact", move || drop(making.set(contact())));
    if let Err(error) = spawned {
        let _ = made.set(Err(error));
    }
    poll_fn(move |cx| made.poll_take(cx))
}

/// An import that waits for a thread. The first who begins it is the one who ends it.
#[derive(Default)]
struct Queued {
    begun: AtomicBool,
    end: Completion<Result<Remote>>,
}

impl Queued {
    fn begin(&self) -> bool {
        !self.begun.swap(true, Ordering::AcqRel)
    }
}

impl Timer for Queued {
    fn fired(self: Arc<Self>, _key: u64) {
        // A contact that has begun keeps the limit by itself, and says more.
        if self.begin() {
            let message =
                "every thread for contacts was busy until the limit; import fewer at once, or by import_many";
            let _ = self.end.set(Err(Error::new(Kind::Timeout, "import", message)));
        }
    }
}

fn import_here(
    endpoint: &Arc<EndpointCore>,
    owner: &Arc<EndpointCore>,
    ticket: &Ticket,
    wanted: (&Routing, Instant),
) -> Result<Remote> {
    let challenge = b"one process";
    let (region, claims) = owner
        .registry
        .verify(ticket.public_bytes(), &ticket.proof(challenge), challenge)
        .inspect_err(|_| owner.registry.refuse_ticket(ticket.public_bytes(), endpoint.identity()))?;
    for ledger in [&region.ledger, &owner.registry.ledger] {
        ledger.of(endpoint.identity()).count(Counted::GivenAway);
    }
    let grant = region.grant(&claims, false, 0);
    Remote::new(endpoint, Owner::Here(&region), grant, owner.name(), wanted)
}

/// What became of the tickets of one owner.
struct Asked {
    /// Why the owner did not open a session with the first of them, one by one.
    refused: Vec<Error>,
    /// The import of the others.
    rest: Result<(Arc<Session>, Importing)>,
}

/// Asks the owner of those tickets for grants, after a first contact where there was none. A ticket that has run out opens no
/// session: the next one has to.
fn ask(endpoint: &Arc<EndpointCore>, tickets: &[&Ticket], routing: &Routing, until: Instant) -> Asked {
    let mut refused = Vec::new();
    loop {
        let rest = &tickets[refused.len()..];
        let Some(first) = rest.first() else {
            let none = Error::new(Kind::Internal, "import", "there is no ticket left to ask for");
            return Asked { refused, rest: Err(none) };
        };
        let rest = match contact(endpoint, first, routing, until) {
            Err(none) if none.of_ticket => {
                refused.push(none.error);
                continue;
            }
            Err(none) => Err(none.error),
            Ok(session) => session.import(rest, None, until).map(|importing| (session, importing)),
        };
        return Asked { refused, rest };
    }
}

/// Waits for an owner's grants.
fn granted(
    endpoint: &Arc<EndpointCore>,
    session: &Session,
    importing: Importing,
    wanted: (&Routing, Instant),
) -> Result<Vec<Result<Remote>>> {
    let mut imported = importing.wait()?;
    let remote = |granted: Result<(Grant, Arc<GrantHandle>)>| {
        let (grant, handle) = granted?;
        Remote::new(endpoint, Owner::There(&handle), grant, session.peer_name(), wanted)
    };
    Ok(imported.outcomes.drain(..).map(remote).collect())
}

/// The ways to the ticket's owner that the caller allows, best first.
fn media(ticket: &Ticket, routing: &Routing) -> impl Iterator<Item = Medium> {
    let allowed = transport::contacts(routing);
    ticket.body().reach.iter().filter_map(move |reach| match reach {
        Reach::Unix => allowed.unix.then_some(Medium::Unix),
        Reach::Tcp(address) => allowed.tcp.then_some(Medium::Tcp(*address)),
        _ => None,
    })
}

/// The session with the ticket's owner that [`contact`] would take without making contact.
pub(super) fn known_session(
    endpoint: &EndpointCore,
    ticket: &Ticket,
    routing: &Routing,
) -> Option<Arc<Session>> {
    let medium = media(ticket, routing).next()?;
    endpoint.sessions.to(ticket.body().identity.incarnation, medium, !routing.is_enforced())
}

/// A session with the ticket's owner: an existing one, or a new one over the first path that answers.
pub(super) fn contact(
    endpoint: &Arc<EndpointCore>,
    ticket: &Ticket,
    routing: &Routing,
    until: Instant,
) -> Result<Arc<Session>, NoContact> {
    let (incarnation, name) = (ticket.body().identity.incarnation, &*ticket.body().identity.name);
    if ended::contains(&incarnation) {
        let why = "the owner has closed its endpoint, or its process has ended";
        return Err(Error::owner_gone("import", why).with_peer(name).into());
    }
    let mut tried = Vec::new();
    let mut media = media(ticket, routing).peekable();
    while let Some(medium) = media.next() {
        // The next one has its turn too.
        let connected_by =
            if media.peek().is_some() { until.min(Instant::now() + ONE_ADDRESS) } else { until };
        match endpoint.sessions.contact(ticket, medium, !routing.is_enforced(), (connected_by, until)) {
            Ok(session) => return Ok(session),
            // The owner itself has answered: another path to it would not change its mind. Not so another life of it, or of a process
            // that has such an address on this network. Or the caller has cancelled it.
            Err(NoContact { error, of_ticket })
                if of_ticket
                    || matches!(error.kind(), Kind::PermissionDenied | Kind::Protocol | Kind::Canceled) =>
            {
                return Err(NoContact { error: error.with_peer(name), of_ticket });
            }
            Err(NoContact { error, .. }) => {
                tried.push((error.kind(), format!("{medium}: {}", error.message())));
            }
        }
    }
    // What may be over soon comes first: while one address is undecided, the owner may be there.
    let kind = [Kind::Exhausted, Kind::Timeout, Kind::Stale]
        .into_iter()
        .find(|kind| tried.iter().any(|(seen, _)| seen == kind))
        .unwrap_or(Kind::Disconnected);
    let all: Vec<_> = tried.into_iter().map(|(_, message)| message).collect();
    let error = if all.is_empty() {
        let message = "the ticket names no path to its owner that the caller allows";
        Error::new(Kind::Unavailable, "import", message)
    } else if kind == Kind::Stale {
        Error::owner_gone("import", format!("its owner is not there any more ({})", all.join("; ")))
    } else {
        Error::new(kind, "import", format!("its owner does not answer ({})", all.join("; ")))
    };
    Err(error.with_peer(name).into())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs;
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};
    use std::thread;

    use parking_lot::Mutex;

    use super::*;
    use crate::identity::Identity;
    use crate::runtime::socket::Socket;
    use crate::ticket::{RegionKey, TicketBody, socket_name};
    use crate::{Endpoint, SystemStorage};

    const WATCHDOG: Duration = Duration::from_secs(60);

    fn threads() -> usize {
        let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|name| name.starts_with("towline-import")).count()
    }

    /// Each of them counts the threads of the process.
    static ALONE: Mutex<()> = Mutex::new(());

    #[test]
    fn many_imports_as_futures_take_few_threads_and_none_before_they_are_polled() {
        let _alone = ALONE.lock();
        let owner = Endpoint::open("owner").unwrap();
        let region = owner.register(SystemStorage::new(8).unwrap(), Access::READ).unwrap();
        // A process that has an owner's name, and never answers.
        let identity = Identity::new("silent", Incarnation(*b"nobody says more")).unwrap();
        let body = TicketBody { identity, ..region.ticket().unwrap().body().clone() };
        let ticket = Ticket::mint(&body, &RegionKey::derive(&[1; 32], body.row, body.generation)).unwrap();
        let name = socket_name(&ticket.body().identity.incarnation);
        let _silent = Socket::listen_unix_abstract(&name, 300).unwrap();
        let user = Endpoint::open("user").unwrap();
        let unix = Routing::default().require("unix").unwrap();
        let mut imports: Vec<Pin<Box<dyn Future<Output = Result<Remote>>>>> = Vec::new();
        for _ in 0..200 {
            imports.push(Box::pin(user.import_async_within(&ticket, &unix, Duration::from_millis(500))));
        }
        assert_eq!(threads(), 0, "nobody has polled yet");
        let mut cx = Context::from_waker(Waker::noop());
        let began = Instant::now();
        while !imports.is_empty() {
            imports.retain_mut(|import| match import.as_mut().poll(&mut cx) {
                Poll::Pending => true,
                Poll::Ready(outcome) => {
                    assert_eq!(outcome.map(|_| ()).unwrap_err().kind(), Kind::Timeout);
                    false
                }
            });
            assert!(threads() <= 32);
            assert!(began.elapsed() < WATCHDOG, "{} imports have not ended", imports.len());
            thread::sleep(Duration::from_millis(5));
        }
    }
    /// A ticket whose owner takes connections and never answers; who listens for it goes with the socket.
    fn of_nobody(ticket: &Ticket, number: u8) -> (Ticket, Socket) {
        let identity = Identity::new("silent", Incarnation([number; 16])).unwrap();
        let body = TicketBody { identity, ..ticket.body().clone() };
        let ticket = Ticket::mint(&body, &RegionKey::derive(&[1; 32], body.row, body.generation)).unwrap();
        let name = socket_name(&ticket.body().identity.incarnation);
        (ticket, Socket::listen_unix_abstract(&name, 300).unwrap())
    }

    #[test]
    fn imports_as_futures_that_ended_or_were_dropped_leave_nothing_until_their_limit() {
        const LIMIT: Duration = Duration::from_secs(600);
        let _alone = ALONE.lock();
        let owner = Endpoint::open("owner").unwrap();
        let region = owner.register(SystemStorage::new(8).unwrap(), Access::READ).unwrap();
        let ticket = region.ticket().unwrap();
        let user = Endpoint::open("user").unwrap();
        let unix = Routing::default().require("unix").unwrap();
        let mut cx = Context::from_waker(Waker::noop());
        let before = runtime::reactor().unwrap().timers_after(LIMIT / 2);
        let began = Instant::now();
        for _ in 0..500 {
            let mut import = Box::pin(user.import_async_within(&ticket, &unix, LIMIT));
            while import.as_mut().poll(&mut cx).map(Result::unwrap).is_pending() {
                assert!(began.elapsed() < WATCHDOG);
                thread::yield_now();
            }
            let mut dropped = Box::pin(user.import_async_within(&ticket, &unix, LIMIT));
            let _ = dropped.as_mut().poll(&mut cx);
        }
        assert_eq!(runtime::reactor().unwrap().timers_after(LIMIT / 2), before);
        // More than there are threads are asked for and given up once each thread has one, and nobody answers.
        let (silent, _silent) = of_nobody(&ticket, 0xa1);
        let mut given_up: Vec<_> =
            (0..40).map(|_| Box::pin(user.import_async_within(&silent, &unix, LIMIT))).collect();
        given_up.iter_mut().for_each(|import| assert!(import.as_mut().poll(&mut cx).is_pending()));
        let all = given_up.len() - runtime::contacts().limit();
        while runtime::contacts().queued() > all {
            assert!(began.elapsed() < WATCHDOG, "{} wait for a thread", runtime::contacts().queued());
            thread::sleep(Duration::from_millis(1));
        }
        drop(given_up);
        let mut next = Box::pin(user.import_async_within(&ticket, &unix, LIMIT));
        let began = Instant::now();
        while next.as_mut().poll(&mut cx).map(Result::unwrap).is_pending() {
            assert!(began.elapsed() < Duration::from_secs(20), "no thread was free");
            thread::sleep(Duration::from_millis(1));
        }
        while threads() > 0 {
            assert!(began.elapsed() < WATCHDOG, "{} threads are left", threads());
            thread::sleep(Duration::from_millis(10));
        }
    }
}
