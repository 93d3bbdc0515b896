//! Where peers come in: listening sockets, and connections that have not proven themselves yet.

use std::io::IoSlice;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use towline_proto::session::unauthenticated::{Entrant, Origin};

use super::channel::Channel;
use super::connection::{Connection, Handler, Next, Role};
use super::owner::Serving;
use super::parts::Sink;
use super::{Sessions, UNANSWERED};
use crate::identity::Identity;
use crate::region::Counted;
use crate::runtime::socket::{Lane, PeerAddr, Socket};
use crate::runtime::{self, Interest, Readiness, Source, Timer, TimerId, Token};
use crate::ticket::{self, socket_name};
use crate::wire::handshake::{LinkBase, ServerHandshake, refusal};
use crate::wire::{FrameKind, Header, KeyRef};
use crate::{Error, Kind, Result};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;

/// How long accepting pauses when the process has no descriptor left.
const NO_DESCRIPTORS: Duration = Duration::from_millis(100);

/// A descriptor that is kept for the moment when there is none left: with it a waiting peer can be accepted, get the reason why it
/// cannot stay, and be closed, instead of waiting for a reply that never comes.
static RESERVE: Mutex<Option<OwnedFd>> = Mutex::new(None);

/// Opens the reserve where it is missing.
fn keep_reserve(reserve: &mut Option<OwnedFd>) {
    if reserve.is_none() {
        let flags = rustix::event::EventfdFlags::CLOEXEC;
        *reserve = rustix::event::eventfd(0, flags).ok();
    }
}

/// A listening socket.
pub(crate) struct Listener {
    socket: Socket,
    sessions: Weak<Sessions>,
    token: OnceLock<Token>,
    closed: AtomicBool,
}

impl Listener {
    /// Listens on the Unix socket whose name follows from the endpoint's incarnation.
    pub(crate) fn unix(sessions: &Arc<Sessions>) -> Result<Arc<Listener>> {
        let name = socket_name(&sessions.identity().incarnation);
        Listener::on(sessions, Socket::listen_unix_abstract(&name, BACKLOG)?)
    }

    /// Listens on a TCP address.
    pub(crate) fn tcp(sessions: &Arc<Sessions>, address: SocketAddr) -> Result<Arc<Listener>> {
        let socket = Socket::listen_tcp(address).map_err(|error| {
            Error::new(error.kind(), "open", format!("cannot listen on {address}: {}", error.message()))
                .caused_by(error)
        })?;
        Listener::on(sessions, socket)
    }

    fn on(sessions: &Arc<Sessions>, socket: Socket) -> Result<Arc<Listener>> {
        keep_reserve(&mut RESERVE.lock());
        let listener = Arc::new(Listener {
            socket,
            sessions: Arc::downgrade(sessions),
            token: OnceLock::new(),
            closed: AtomicBool::new(false),
        });
        let weak = Arc::downgrade(&listener);
        let token = runtime::reactor()?.add(listener.socket.as_fd(), Interest::READ, weak)?;
        let _ = listener.token.set(token);
        Ok(listener)
    }

    /// The address that it is bound to.
    pub(crate) fn address(&self) -> Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Stops listening.
    pub(crate) fn close(&self) {
        if !self.closed.swap(true, Ordering::AcqRel) {
            if let (Some(token), Ok(reactor)) = (self.token.get(), runtime::reactor()) {
                reactor.remove(*token, self.socket.as_fd());
            }
            self.socket.shutdown();
        }
    }

    fn listen_for(&self, interest: Interest) {
        if let (Some(token), Ok(reactor)) = (self.token.get(), runtime::reactor()) {
            let _ = reactor.modify(*token, self.socket.as_fd(), interest);
        }
    }

    fn take(&self, socket: Socket, peer: &PeerAddr) -> Result<()> {
        let sessions = self
            .sessions
            .upgrade()
            .ok_or_else(|| Error::new(Kind::Disconnected, "accept", "the endpoint is closed"))?;
        let quotas = sessions.settings.quotas;
        let displaced = sessions.unauthenticated.lock().make_room(quotas.unauthenticated);
        if let Some(displaced) = displaced {
            dismiss(&displaced, &too_many_unauthenticated(quotas.unauthenticated));
        }
        socket.tune(Lane::Control, Some(UNANSWERED))?;
        let entrant = sessions.unauthenticated.lock().enter(origin_of(&socket, peer));
        let unauthenticated = Arc::new(UnauthenticatedConnection {
            sessions: self.sessions.clone(),
            handshake: Mutex::new(None),
            entrant: Arc::clone(&entrant),
            proven: OnceLock::new(),
            connection: OnceLock::new(),
            deadline: OnceLock::new(),
        });
        let socket = Channel::accepted(socket, sessions.settings.tls.as_ref())?;
        let handler: Arc<dyn Handler> = Arc::clone(&unauthenticated) as Arc<dyn Handler>;
        let connection = Connection::new(socket, Role::Control, false, handler);
        let _ = unauthenticated.connection.set(Arc::downgrade(&connection));
        entrant.belongs_to(Arc::downgrade(&connection));
        connection.hold_itself();
        let timer = Arc::downgrade(&unauthenticated);
        let until = runtime::later(Instant::now(), quotas.prove_within);
        let _ = unauthenticated.deadline.set(runtime::reactor()?.at(until, timer, 0));
        connection.watch().inspect_err(|error| connection.close(error.clone()))
    }

    /// There is no descriptor left. Takes one from a connection that has said nothing yet; true where there was one.
    fn take_from_silent(&self) -> bool {
        let sessions = self.sessions.upgrade();
        let silent = sessions.and_then(|sessions| sessions.unauthenticated.lock().oldest_silent());
        if let Some(silent) = &silent {
            dismiss(silent, &no_descriptor());
        }
        silent.is_some()
    }

    /// There is no descriptor left, and none to be had: with the reserve, says so to a waiting peer. False: no peer waits.
    fn turn_away(&self) -> bool {
        let mut reserve = RESERVE.lock();
        drop(reserve.take());
        let turned_away = match self.socket.accept() {
            Ok(Some((socket, peer))) => {
                let _ = socket.send(&[IoSlice::new(&refusal(&no_descriptor()))], &[]);
                Some(origin_of(&socket, &peer))
            }
            _ => None,
        };
        keep_reserve(&mut reserve);
        if let (Some(origin), Some(sessions)) = (turned_away, self.sessions.upgrade()) {
            count_refused(&sessions, origin, None, &no_descriptor());
        }
        turned_away.is_some()
    }

    /// Stops accepting for a moment.
    fn pause(self: &Arc<Self>) {
        self.listen_for(Interest::NONE);
        runtime::call_at(Instant::now() + NO_DESCRIPTORS, self, 0);
    }
}

/// Where a connection comes from.
fn origin_of(socket: &Socket, peer: &PeerAddr) -> Origin {
    match peer {
        PeerAddr::Unix => Origin::User(socket.peer_credentials().map_or(u32::MAX, |peer| peer.uid)),
        PeerAddr::Tcp(address) => Origin::host(address.ip()),
    }
}

/// Tells a connection that has not proven itself why it goes, and closes it.
fn dismiss(entrant: &Entrant<Weak<Connection>>, error: &Error) {
    if let Some(connection) = entrant.connection().and_then(Weak::upgrade) {
        let _ = connection.say(refusal(error));
        connection.close(error.clone());
    }
}

fn too_many_unauthenticated(most: usize) -> Error {
    let message =
        format!("more than {most} connections wait to prove themselves, and this one was the oldest");
    Error::new(Kind::Exhausted, "contact", message)
}

fn no_descriptor() -> Error {
    Error::new(Kind::Exhausted, "contact", "the owner's process has no descriptor left for another peer")
}

impl Source for Listener {
    fn ready(self: Arc<Self>, _readiness: Readiness) {
        // A bounded number, so that a flood of connections does not starve those that have proven themselves.
        for _ in 0..64 {
            match self.socket.accept() {
                Ok(None) => return,
                Ok(Some((socket, peer))) => {
                    if let Err(error) = self.take(socket, &peer) {
                        tracing::debug!(%error, "a connection could not be taken");
                    }
                }
                Err(error) if error.kind() == Kind::Exhausted => {
                    if self.take_from_silent() {
                        continue;
                    }
                    if let Some(sessions) = self.sessions.upgrade() {
                        sessions.refusals.no_descriptor(sessions.registry.name(), &error);
                    }
                    if !self.turn_away() {
                        self.pause();
                        return;
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "listening has ended");
                    self.close();
                    return;
                }
            }
        }
    }
}

impl Timer for Listener {
    fn fired(self: Arc<Self>, _key: u64) {
        if !self.closed.load(Ordering::Acquire) {
            keep_reserve(&mut RESERVE.lock());
            self.listen_for(Interest::READ);
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.close();
    }
}

/// A connection that has not proven itself yet.
struct UnauthenticatedConnection {
    sessions: Weak<Sessions>,
    handshake: Mutex<Option<ServerHandshake>>,
    entrant: Arc<Entrant<Weak<Connection>>>,
    /// Who it says it is, once it has proven to hold the key.
    proven: OnceLock<(Identity, KeyRef)>,
    connection: OnceLock<Weak<Connection>>,
    /// By then it has to have proven itself.
    deadline: OnceLock<TimerId>,
}

impl UnauthenticatedConnection {
    fn hello(&self, connection: &Arc<Connection>, sessions: &Sessions, body: &[u8]) -> Result<()> {
        let mut nonce = [0; 32];
        getrandom::fill(&mut nonce)
            .map_err(|error| Error::new(Kind::Native, "contact", format!("no random bytes: {error}")))?;
        let binding = connection.socket().binding()?;
        let lookup = |key: &KeyRef| link_base(sessions, key);
        let (handshake, welcome) = ServerHandshake::on_hello_over(
            body,
            sessions.identity(),
            nonce,
            sessions.settings.secret.as_ref(),
            binding,
            lookup,
        )?;
        connection.socket().check_peer(&handshake.client().name)?;
        *self.handshake.lock() = Some(handshake);
        self.entrant.has_spoken();
        connection.say(welcome)
    }

    fn step(&self, connection: &Arc<Connection>, header: Header, body: &[u8]) -> Result<()> {
        let sessions = self
            .sessions
            .upgrade()
            .filter(|sessions| !sessions.registry.is_closed())
            .ok_or_else(|| Error::owner_gone("contact", "the owner has closed its endpoint"))?;
        match header.kind {
            FrameKind::Hello if self.handshake.lock().is_none() => self.hello(connection, &sessions, body),
            FrameKind::Prove => {
                let handshake = self
                    .handshake
                    .lock()
                    .take()
                    .ok_or_else(|| Error::protocol("contact", "a proof came before the hello"))?;
                let (client, used) = (handshake.client().clone(), handshake.key_ref().clone());
                let (key, challenge) = handshake.on_prove(body)?;
                let _ = self.proven.set((client.clone(), used.clone()));
                match used {
                    KeyRef::Session(id) => Serving::join(&sessions, id, challenge, connection),
                    KeyRef::Ticket(public) => {
                        // Only now: what has become of a region is the business of those who hold a ticket to it.
                        let standing = Serving::standing(&sessions, &public)?;
                        Serving::begin(&sessions, client, (key, challenge), standing, connection)
                    }
                }
            }
            other => Err(Error::protocol("contact", format!("{other:?} came out of turn"))),
        }
    }
}

/// Counts a connection that did not become a session: for the peer where it has proven to be one, and else for where it came from.
fn count_refused(sessions: &Sessions, origin: Origin, proven: Option<&(Identity, KeyRef)>, error: &Error) {
    sessions.registry.count_refused();
    let who = proven.map(|(peer, _)| peer.name.as_str());
    sessions.refusals.count(sessions.registry.name(), origin, who, error);
    match proven {
        Some((peer, KeyRef::Ticket(public))) => sessions.registry.blame(public, peer),
        Some((peer, KeyRef::Session(_))) => sessions.registry.ledger.of(peer).count(Counted::Refused),
        None => {}
    }
}

/// The key that a client says it has.
fn link_base(sessions: &Sessions, key: &KeyRef) -> Result<LinkBase> {
    match key {
        KeyRef::Ticket(public) => {
            let ticket = ticket::parse_public(public)?;
            let claims = ticket.claims();
            // Whether the region still exists is said only to a peer that has proven to hold the ticket.
            Ok(LinkBase::Tag(ticket.tag(&sessions.registry.region_key(claims.row, claims.generation))))
        }
        KeyRef::Session(id) => Serving::find(sessions, *id)
            .map(|serving| LinkBase::Session(serving.key().clone()))
            .ok_or_else(|| Error::new(Kind::Disconnected, "contact", "the session is over")),
    }
}

impl Handler for UnauthenticatedConnection {
    fn frame(
        &self,
        connection: &Arc<Connection>,
        header: Header,
        body: &[u8],
        _files: Vec<OwnedFd>,
    ) -> Result<()> {
        self.step(connection, header, body).inspect_err(|error| {
            let _ = connection.say(refusal(error));
        })
    }

    fn payload(&self, _: &Arc<Connection>, _: Header, _: &[u8]) -> Result<Sink> {
        Err(Error::protocol("contact", "payload came before authentication"))
    }

    fn received(&self, _: &Arc<Connection>, _: Header, _: Sink) -> Result<()> {
        Ok(())
    }

    fn next(&self, _: &Arc<Connection>) -> Next {
        Next::Nothing
    }

    /// A connection that has proven itself has another handler by now: this one was refused, or has given up.
    fn closed(&self, connection: &Arc<Connection>, error: Error) {
        // A peer that connects and says nothing, such as a program that checks whether the port is open, was not refused. A peer that says half a hello was there
        // for more.
        let silent = self.entrant.is_silent() && !connection.ended_in_a_frame();
        let left = error.kind() == Kind::Disconnected && silent;
        if !left && let Some(sessions) = self.sessions.upgrade() {
            count_refused(&sessions, self.entrant.origin(), self.proven.get(), &error);
        }
    }
}

impl Timer for UnauthenticatedConnection {
    fn fired(self: Arc<Self>, _key: u64) {
        // Once a connection has proven itself this object is gone, and with it the timer.
        if let Some(connection) = self.connection.get().and_then(Weak::upgrade) {
            connection.close(Error::new(Kind::Timeout, "contact", "the peer did not prove itself in time"));
        }
    }
}

impl Drop for UnauthenticatedConnection {
    fn drop(&mut self) {
        // Kept until it is due, what each of them leaves in the timers would add up: they may come and go as fast as they like.
        runtime::forget(self.deadline.get().copied());
        if let Some(sessions) = self.sessions.upgrade() {
            sessions.unauthenticated.lock().leave(&self.entrant);
        }
    }
}
