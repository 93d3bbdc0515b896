//! The initiator's side of a connection to an owner: imports, requests, and what same-host paths need of it.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak, mpsc};
use std::time::{Duration, Instant};

use super::connection::{Connection, Handler};
use super::contact;
use super::grant::GrantHandle;
use super::importing::{Answer, Reply};
use super::mappings::Mappings;
use super::parts::{Keep, Payload, Sink};
use super::run::Run;
use super::{Medium, afar};
use crate::endpoint::EndpointCore;
use crate::fence::applying::Place;
use crate::fence::life::LifePage;
use crate::fence::pins::{PinPage, ProcessPin, Side};
use crate::fence::table::TableView;
use crate::fence::watcher;
use crate::memory::Mapping;
use crate::notify::Mailbox;
use crate::progress::{self, Timer};
use crate::sync::lock;
use crate::transfer::{Signal, TransferCore};
use crate::transport::{Borrowing, Told, cma};
use crate::wire::handshake::SessionKey;
use crate::wire::{self, FrameKind, Granted, Header, Message};
use crate::{Access, Error, Kind, Result, Ticket};

/// While something is in flight between hosts, a frame goes out at least this often, so that TCP notices a peer that
/// does not acknowledge any more.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// Lanes that carried nothing for this long are closed.
const LANES_IDLE: Duration = Duration::from_secs(10);

/// How long the owner may take to say what became of a write that was stopped, since it was asked or was last heard: the write's
/// own limit without progress, but within these bounds, which leave time for a long round trip and still are no long wait.
/// Then the connection is reset, so that nothing of the write happens any more.
const LEAST_GRACE: Duration = Duration::from_millis(500);
const MOST_GRACE: Duration = Duration::from_secs(2);

/// The timers of a session.
const HEARTBEAT_TIMER: u64 = 1;
const IDLE_TIMER: u64 = 2;
const SETTLE_TIMER: u64 = 3;

/// A connection to an owner, with what belongs to it.
pub(crate) struct Session {
    pub(super) endpoint: Weak<EndpointCore>,
    owner: crate::Identity,
    medium: Medium,
    pub(super) id: u64,
    pub(super) key: SessionKey,
    challenge: [u8; 32],
    control: OnceLock<Arc<Connection>>,
    lanes: Mutex<Lanes>,
    /// Held by the one thread that opens lanes.
    opening: Mutex<()>,
    /// Transfers that wait for lanes: nothing of them is pending yet.
    starting: Mutex<Vec<Weak<Run>>>,
    pending: Mutex<HashMap<u64, Pending>>,
    /// Checksums that have come ahead of the bytes, by request.
    checks: Mutex<HashMap<u64, Vec<u32>>>,
    next_request: AtomicU64,
    /// Who must be told when the owner wants a grant back.
    pub(super) borrowing: Mutex<HashMap<u32, Weak<dyn Borrowing>>>,
    /// Held while the frames of one import are sent.
    pub(super) importing: Mutex<()>,
    local: Option<Local>,
    cma: OnceLock<Result<i32>>,
    dead: OnceLock<Error>,
    beating: AtomicBool,
    /// When the owner was last heard, in microseconds since the session began.
    heard: AtomicU64,
    began: Instant,
    me: Weak<Session>,
}

/// What a session with a process of the same user on this host has besides.
pub(super) struct Local {
    pub(super) table: TableView,
    pub(super) pins: Arc<PinPage>,
    mailbox: Mailbox,
    pid: i32,
    pub(super) mappings: Mappings,
    /// The owner's regions that are pinned for long, by generation.
    pub(super) held: Mutex<HashMap<u64, Weak<ProcessPin>>>,
    /// Dropped on close: the lock that tells the owner we are alive, and the watch on the owner's.
    alive: Mutex<Option<(Option<watcher::Hold>, Option<watcher::Watch>)>>,
}

#[derive(Default)]
struct Lanes {
    open: Vec<Arc<Connection>>,
    last_used: Option<Instant>,
    timer: bool,
}

/// Who waits for the answer to a request.
pub(super) enum Pending {
    Import(Arc<Reply>),
    Ask(mpsc::SyncSender<Result<Told>>),
    Unit { run: Arc<Run>, unit: usize, connection: Arc<Connection> },
    Atomic { transfer: Arc<TransferCore> },
}

impl Pending {
    /// The transfer, where the owner's memory changes by this request.
    fn changing(&self) -> Option<&Arc<TransferCore>> {
        match self {
            Pending::Unit { run, unit, .. } => run.changes(*unit).then_some(&run.transfer),
            Pending::Atomic { transfer } => Some(transfer),
            Pending::Import(_) | Pending::Ask(_) => None,
        }
    }
}

impl Session {
    /// Makes first contact with the owner of a ticket. Blocks, at most until then.
    pub(crate) fn connect(
        endpoint: &Arc<EndpointCore>,
        ticket: &Ticket,
        medium: Medium,
        until: Instant,
    ) -> Result<Arc<Session>> {
        let contact = contact::with_ticket(endpoint, ticket, medium, until)?;
        let mut files = contact.files.into_iter();
        let mut owner = ticket.body().identity.clone();
        owner.name.clone_from(&contact.ready.name);
        let local = match (contact.ready.local, files.next(), files.next(), files.next(), files.next()) {
            (Some(rows), Some(table), Some(pins), Some(doorbell), Some(mailbox)) => Some(Local {
                table: TableView::map(table, rows)?,
                pins: Arc::new(PinPage::map(pins)?.with_doorbell(doorbell)),
                mailbox: Mailbox::map(&mailbox)?,
                pid: contact.socket.socket().peer_credentials()?.pid,
                mappings: Mappings::default(),
                held: Mutex::default(),
                alive: Mutex::new(None),
            }),
            _ => None,
        };
        let session = Arc::new_cyclic(|me| Session {
            endpoint: Arc::downgrade(endpoint),
            owner,
            medium,
            id: contact.ready.session,
            key: contact.key,
            challenge: contact.challenge,
            control: OnceLock::new(),
            lanes: Mutex::default(),
            opening: Mutex::default(),
            starting: Mutex::default(),
            pending: Mutex::default(),
            checks: Mutex::default(),
            next_request: AtomicU64::new(1),
            borrowing: Mutex::default(),
            importing: Mutex::default(),
            local,
            cma: OnceLock::new(),
            dead: OnceLock::new(),
            beating: AtomicBool::new(false),
            heard: AtomicU64::new(0),
            began: Instant::now(),
            me: me.clone(),
        });
        let control = Connection::new(
            contact.socket,
            super::connection::Role::Control,
            true,
            Arc::new(ToSession(Arc::downgrade(&session))),
        );
        if let Some(place) = session.local.as_ref().and_then(|local| Place::of(&local.pins, 0)) {
            control.applied_at(place);
        }
        control.watch()?;
        let _ = session.control.set(control);
        session.stay_alive()?;
        Ok(session)
    }

    /// On one host: shows the owner that this process lives, and learns when the owner's does not.
    fn stay_alive(self: &Arc<Self>) -> Result<()> {
        let Some(local) = &self.local else { return Ok(()) };
        // Where the kernel lacks what is needed, the end of the connection tells, only later.
        let hold = watcher::hold(Arc::clone(&local.pins), Side::Initiator)
            .inspect_err(|error| tracing::debug!(%error, "no robust futex towards the owner"))
            .ok();
        let weak = Arc::downgrade(self);
        let died = Box::new(move || {
            if let Some(session) = weak.upgrade() {
                session.fail(Error::new(Kind::Disconnected, "session", "the owner's process has died"));
            }
        });
        let watch = watcher::watch(Arc::clone(&local.pins), Side::Owner, died)
            .inspect_err(|error| tracing::debug!(%error, "no watch on the owner"))
            .ok();
        *lock(&local.alive) = Some((hold, watch));
        let life = LifePage::ours()?
            .fd()
            .try_clone_to_owned()
            .map_err(|error| Error::os("contact", "dup", error))?;
        self.control()?.send(
            Message::from(wire::Held {}).frame(0, 0, 1),
            vec![life],
            Payload::None,
            Keep::Nothing,
        )
    }

    fn control(&self) -> Result<&Arc<Connection>> {
        self.alive()?;
        self.control.get().ok_or_else(|| Error::new(Kind::Internal, "session", "not connected"))
    }

    pub(crate) fn peer_name(&self) -> &str {
        &self.owner.name
    }

    pub(crate) fn owner(&self) -> &crate::Identity {
        &self.owner
    }

    /// Whether what is said on it is encrypted.
    pub(super) fn is_encrypted(&self) -> bool {
        self.control.get().is_some_and(|control| control.socket().is_encrypted())
    }

    pub(crate) fn medium(&self) -> Medium {
        self.medium
    }

    /// Whether it can still be used; the error is why it cannot.
    pub(crate) fn alive(&self) -> Result<()> {
        match self.dead.get() {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// What proofs on this session are about.
    pub(super) fn challenge(&self) -> &[u8; 32] {
        &self.challenge
    }

    /// Sends a request whose answer is expected already.
    pub(super) fn ask(&self, frame: Vec<u8>) -> Result<()> {
        self.control()?.send(frame, Vec::new(), Payload::None, Keep::Nothing)
    }

    /// Remembers who waits for the answer to a new request.
    pub(super) fn expect(&self, pending: Pending) -> Result<u64> {
        let request = self.next_request.fetch_add(1, Ordering::Relaxed);
        lock(&self.pending).insert(request, pending);
        // Whoever fails the session takes what is pending after it has said that it is dead.
        if let Err(error) = self.alive()
            && lock(&self.pending).remove(&request).is_some()
        {
            return Err(error);
        }
        self.beat();
        Ok(request)
    }

    /// Forgets a request; whoever succeeds is the one to report its end.
    pub(super) fn forget(&self, request: u64) -> Option<Pending> {
        let mut pending = lock(&self.pending);
        let forgotten = pending.remove(&request);
        // Nobody waits for these any more, if some have come.
        let mut checks = lock(&self.checks);
        if !checks.is_empty() {
            checks.retain(|request, _| pending.contains_key(request));
        }
        forgotten
    }

    /// Sends a request whose answer nobody waits for.
    pub(crate) fn tell(&self, message: impl Into<Message>) -> Result<()> {
        self.control()?.send(message.into().frame(0, 0, 0), Vec::new(), Payload::None, Keep::Nothing)
    }

    /// Hands the owner a message.
    pub(crate) fn notify(&self, message: &[u8]) -> Result<()> {
        self.alive()?;
        if let Some(local) = &self.local
            && local.mailbox.put(message)
        {
            local.pins.ring();
            return Ok(());
        }
        self.tell(wire::Notify { transfer: 0, pieces: 0, message: message.to_vec() })
    }

    /// Asks the owner to raise a counter.
    pub(crate) fn signal(&self, handle: &GrantHandle, signal: Signal) -> Result<()> {
        self.tell(wire::Signal {
            transfer: 0,
            pieces: 0,
            handle: handle.handle,
            offset: signal.offset,
            add: signal.add,
        })
    }

    /// Tells the owner that nothing more belongs to a transfer whose pieces it counted.
    pub(super) fn close_count(&self, transfer: u64) {
        if let Ok(control) = self.control() {
            let frame = Message::from(wire::Cancel {}).frame(transfer, 0, 0);
            let _ = control.send(frame, Vec::new(), Payload::None, Keep::Nothing);
        }
    }

    /// Asks the owner to perform an atomic operation.
    pub(super) fn atomic(&self, handle: u32, offset: u64, op: wire::AtomicOp, transfer: &Arc<TransferCore>) {
        let sent = self.expect(Pending::Atomic { transfer: Arc::clone(transfer) }).and_then(|request| {
            let frame = Message::from(wire::Atomic { handle, offset, op }).frame(request, 0, 0);
            let sent = self.control()?.send(frame, Vec::new(), Payload::None, Keep::Nothing);
            match sent {
                // The failed connection has reported for it already.
                Err(_) if self.forget(request).is_none() => Ok(()),
                other => other,
            }
        });
        if let Err(error) = sent {
            transfer.unit_failed(0, error);
        }
    }

    /// The connection for small requests.
    pub(super) fn control_lane(&self) -> Result<Arc<Connection>> {
        self.control().cloned()
    }

    /// The connections for large requests, opened where they are not. Blocks while it opens them, but nobody else:
    /// whoever stops a transfer must get by.
    pub(super) fn lanes(self: &Arc<Self>) -> Result<Vec<Arc<Connection>>> {
        let _one_opens = lock(&self.opening);
        let endpoint =
            self.endpoint.upgrade().ok_or_else(|| Error::invalid("transfer", "the endpoint is closed"))?;
        let mut open = self.open_lanes().unwrap_or_default();
        while open.len() < endpoint.lanes() {
            self.alive()?;
            match self.open_lane(&endpoint) {
                Ok(lane) => open.push(lane),
                // Fewer lanes than wanted are enough.
                // Where this side has ended the session, that is the reason, and not that the owner refuses now.
                Err(error) if open.is_empty() => return Err(self.alive().err().unwrap_or(error)),
                Err(_) => break,
            }
        }
        Ok(open)
    }

    fn open_lane(self: &Arc<Self>, endpoint: &EndpointCore) -> Result<Arc<Connection>> {
        let until = progress::later(Instant::now(), endpoint.limits().no_progress);
        let (socket, place) = contact::with_session(endpoint, self, until)?;
        let handler = Arc::new(ToSession(Arc::downgrade(self)));
        let lane = Connection::new(socket, super::connection::Role::Lane, true, handler);
        if let (Some(local), Some(place)) = (&self.local, place)
            && let Some(place) = Place::of(&local.pins, place)
        {
            lane.applied_at(place);
        }
        lane.watch()?;
        lock(&self.lanes).open.push(Arc::clone(&lane));
        // Whoever fails the session closes the lanes that it finds after it has said that it is dead.
        self.alive().inspect_err(|error| lane.close(error.clone()))?;
        Ok(lane)
    }

    /// Remembers a transfer that waits for lanes, so that it ends with the session.
    pub(super) fn will_start(&self, run: &Arc<Run>) -> Result<()> {
        let mut starting = lock(&self.starting);
        starting.retain(|run| run.strong_count() > 0);
        starting.push(Arc::downgrade(run));
        drop(starting);
        // Whoever ends the session takes what is starting after it has said that it is over.
        self.alive()
    }

    /// The lanes that are open now.
    pub(super) fn open_lanes(&self) -> Option<Vec<Arc<Connection>>> {
        let mut lanes = lock(&self.lanes);
        lanes.open.retain(|lane| !lane.is_closed());
        lanes.last_used = Some(Instant::now());
        (!lanes.open.is_empty()).then(|| lanes.open.clone())
    }

    /// A transfer over the lanes has ended: they close if nothing follows for a while.
    pub(super) fn lanes_used(&self) {
        let mut lanes = lock(&self.lanes);
        lanes.last_used = Some(Instant::now());
        if !std::mem::replace(&mut lanes.timer, true) {
            self.wake_at(Instant::now() + LANES_IDLE, IDLE_TIMER);
        }
    }

    fn wake_at(&self, when: Instant, key: u64) {
        if let Ok(reactor) = progress::reactor() {
            let weak: Weak<dyn Timer> = self.me.clone();
            reactor.at(when, weak, key);
        }
    }

    /// Between hosts: keeps frames going out while something is in flight.
    fn beat(&self) {
        if matches!(self.medium, Medium::Tcp(_)) && !self.beating.swap(true, Ordering::AcqRel) {
            self.wake_at(Instant::now() + HEARTBEAT, HEARTBEAT_TIMER);
        }
    }

    /// Makes a transfer quiet: nothing of it is sent or received any more. What has been sent and changes the owner's memory
    /// stays pending: see [`settle`](Self::settle).
    pub(super) fn stop(&self, run: &Run) {
        let id = run.transfer.id;
        let connections: Vec<_> = lock(&self.lanes).open.iter().chain(self.control.get()).cloned().collect();
        let mut unsent = Vec::new();
        for connection in connections {
            unsent.extend(connection.withdraw(|keep| keep.is_transfer(id)));
            connection.discard(|keep| keep.is_transfer(id));
        }
        let stopped: Vec<_> = {
            let mut pending = lock(&self.pending);
            let requests: Vec<u64> = pending
                .iter()
                .filter(|(_, pending)| matches!(pending, Pending::Unit { run, .. } if run.transfer.id == id))
                .filter(|(request, pending)| pending.changing().is_none() || unsent.contains(request))
                .map(|(request, _)| *request)
                .collect();
            requests.into_iter().filter_map(|request| pending.remove(&request)).collect()
        };
        for pending in stopped {
            if let Pending::Unit { run, unit, .. } = pending {
                run.failed(unit, run.transfer.stop_error());
            }
        }
        self.settle();
    }

    /// Ends what was stopped and may still change the owner's memory: the owner's answer ends it, or, where none comes in time,
    /// the reset of its connection.
    pub(super) fn settle(&self) {
        let now = Instant::now();
        let heard = self.began + Duration::from_micros(self.heard.load(Ordering::Relaxed));
        let mut next: Option<Instant> = None;
        let mut silent: Vec<Arc<Connection>> = Vec::new();
        for pending in lock(&self.pending).values() {
            let Some(transfer) = pending.changing() else { continue };
            let (started, Some(stopped)) = transfer.span_of_time() else { continue };
            let grace = transfer.limits.no_progress.clamp(LEAST_GRACE, MOST_GRACE);
            let due = (started.max(heard) + grace).max(stopped);
            if due > now {
                next = Some(next.map_or(due, |next| next.min(due)));
                continue;
            }
            let connection = match pending {
                Pending::Unit { connection, .. } => Some(connection),
                _ => self.control.get(),
            };
            silent.extend(
                connection.filter(|one| !silent.iter().any(|known| Arc::ptr_eq(known, one))).cloned(),
            );
        }
        for connection in silent {
            let message = "the owner did not say what became of a write that was stopped";
            connection.reset(Error::new(Kind::Disconnected, "session", message));
        }
        if let Some(next) = next {
            self.wake_at(next, SETTLE_TIMER);
        }
    }

    /// The connection of a request is gone, and nobody has said what became of it. Where the owner is seen to be in the middle of
    /// what came over it, the transfer is not quiet when it ends now, and says so.
    fn may_still_change(&self, pending: &Pending) {
        let Some(transfer) = pending.changing() else { return };
        let connection = match pending {
            Pending::Unit { connection, .. } => Some(connection),
            _ => self.control.get(),
        };
        if let Some(place) = connection.and_then(|connection| connection.unfinished()) {
            afar::listen(transfer, place, self.local.as_ref().map(|local| local.pid));
        }
    }

    fn hear(&self) {
        self.heard.store(self.began.elapsed().as_micros() as u64, Ordering::Relaxed);
    }

    /// The owner is gone, or the connection to it is: everything in flight ends with that error.
    pub(crate) fn fail(&self, error: Error) {
        let error = error.on(self.medium.name()).with_peer(self.peer_name());
        if self.dead.set(error.clone()).is_ok() {
            self.bury(&error);
        }
    }

    /// Everything in flight ends, and nothing moves any more.
    fn bury(&self, error: &Error) {
        if let Some(local) = &self.local {
            drop(lock(&local.alive).take());
            local.mappings.clear();
        }
        let borrowing: Vec<_> =
            lock(&self.borrowing).drain().filter_map(|(_, borrowing)| borrowing.upgrade()).collect();
        for one in borrowing {
            one.recalled();
        }
        let connections: Vec<_> =
            lock(&self.lanes).open.drain(..).chain(self.control.get().cloned()).collect();
        // Their callers learn below that nothing of them happens any more.
        let unsettled = lock(&self.pending).values().any(|pending| pending.changing().is_some());
        for connection in connections {
            if unsettled {
                connection.reset(error.clone())
            } else {
                connection.close(error.clone())
            }
            // What is pending reports below, so nothing may move any more.
            connection.let_go();
        }
        let pending: Vec<_> = lock(&self.pending).drain().map(|(_, pending)| pending).collect();
        for pending in pending {
            self.may_still_change(&pending);
            match pending {
                Pending::Import(reply) => reply.fill(self, Err(error.clone())),
                Pending::Ask(asker) => drop(asker.try_send(Err(error.clone()))),
                Pending::Unit { run, unit, .. } => run.failed(unit, error.clone()),
                Pending::Atomic { transfer } => transfer.unit_failed(0, error.clone()),
            }
        }
        let starting: Vec<_> = lock(&self.starting).drain(..).filter_map(|run| run.upgrade()).collect();
        for run in starting {
            run.fail_rest(error);
        }
        if let Some(endpoint) = self.endpoint.upgrade() {
            let mut sessions = lock(&endpoint.sessions);
            let key = (self.owner.incarnation, self.medium.name());
            if sessions.get(&key).is_some_and(|session| std::ptr::eq(Arc::as_ptr(session), self)) {
                sessions.remove(&key);
            }
        }
    }

    /// Ends it on this side's wish.
    pub(crate) fn close(&self, error: Error) {
        let error = error.on(self.medium.name()).with_peer(self.peer_name());
        if self.dead.set(error.clone()).is_ok() {
            // Goodbye means that no pin is held: a copy that begins now sees that the session is over.
            // In this order: a path that borrows may let go of its pins when it is asked.
            let quiet =
                self.borrows_nothing() && self.local.as_ref().is_none_or(|local| local.pins.is_idle());
            if let Some(control) = self.control.get().filter(|_| quiet) {
                control.bye(None);
            }
            self.bury(&error);
        }
    }

    /// A lane has failed: what was in flight on it fails, the rest goes on.
    fn lane_closed(&self, lane: &Arc<Connection>, error: &Error) {
        let error = self.dead.get().unwrap_or(error);
        lock(&self.lanes).open.retain(|open| !Arc::ptr_eq(open, lane));
        lane.let_go();
        let lost: Vec<_> = {
            let mut pending = lock(&self.pending);
            let requests: Vec<u64> = pending
                .iter()
                .filter(|(_, one)| {
                    matches!(one, Pending::Unit { connection, .. } if Arc::ptr_eq(connection, lane))
                })
                .map(|(request, _)| *request)
                .collect();
            requests.into_iter().filter_map(|request| pending.remove(&request)).collect()
        };
        for pending in lost {
            self.may_still_change(&pending);
            if let Pending::Unit { run, unit, .. } = pending {
                run.lost(unit, error.clone());
            }
        }
    }

    /// The owner's process, if the kernel lets this process copy from and to it.
    pub(crate) fn cma_pid(&self) -> Result<i32> {
        let local = self.local()?;
        self.cma
            .get_or_init(|| {
                let row = local
                    .table
                    .row(0)
                    .ok_or_else(|| Error::protocol("import", "the owner's table has no first row"))?;
                cma::probe_peer(local.pid, row.addr(), self.owner.incarnation.as_bytes())?;
                Ok(local.pid)
            })
            .clone()
    }

    /// What a session with a process of the same user on this host has.
    #[inline]
    pub(super) fn shared(&self) -> Option<&Local> {
        self.local.as_ref()
    }

    /// [`shared`](Self::shared); the error says why this is none.
    pub(super) fn local(&self) -> Result<&Local> {
        self.shared().ok_or_else(|| {
            let reason = match self.medium {
                Medium::Tcp(_) => "the owner is reached by tcp",
                Medium::Unix => "the owner runs as another user, or enforces isolation, and shares no memory",
            };
            Error::new(Kind::Unavailable, "import", reason)
        })
    }

    /// Maps the segments whose descriptors came along. One that cannot be mapped is no reason to refuse the grant:
    /// the path that needs it says so.
    fn map_segments(&self, granted: &Granted, files: Vec<OwnedFd>) -> Result<Vec<Arc<Mapping>>> {
        let mut files = files.into_iter();
        let mut mapped = Vec::new();
        let segments =
            || granted.items.iter().flatten().filter_map(|grant| Some((grant.segment?, grant.access)));
        for (segment, _) in segments().filter(|(segment, _)| segment.attached) {
            let file = files
                .next()
                .ok_or_else(|| Error::protocol("import", "a segment's descriptor did not come"))?;
            let Some(local) = &self.local else { continue };
            let writable =
                segments().any(|(one, access)| one.id == segment.id && access.contains(Access::WRITE));
            match local.mappings.map(&segment, file, writable) {
                Ok(mapping) => mapped.push(mapping),
                Err(error) => tracing::debug!(%error, "a segment cannot be mapped"),
            }
        }
        Ok(mapped)
    }

    fn answered(&self, header: Header, body: &[u8], files: Vec<OwnedFd>) -> Result<()> {
        self.hear();
        match Message::decode(header.kind, body)? {
            Message::Granted(granted) => {
                let mapped = self.map_segments(&granted, files)?;
                if let Some(Pending::Import(reply)) = self.forget(header.id) {
                    reply.fill(self, Ok(Answer { granted, mapped }));
                }
            }
            Message::Told(told) => {
                if let Some(Pending::Ask(asker)) = self.forget(header.id) {
                    let told = told.outcome.map(|answer| Told { answer, files, loan: None });
                    // Where nobody waits any more, the descriptors close here.
                    let _ = asker.try_send(told.map_err(|error| error.into_error("import")));
                }
            }
            Message::Data(data) => match (self.forget(header.id), data.outcome) {
                (Some(Pending::Unit { run, unit, .. }), Err(error)) => {
                    run.failed(unit, error.into_error("read"))
                }
                (Some(Pending::Unit { run, unit, .. }), Ok(())) => {
                    run.failed(unit, Error::protocol("read", "the owner answered without the bytes"));
                }
                _ => {}
            },
            Message::Done(done) => match (self.forget(header.id), done.outcome) {
                (Some(Pending::Unit { run, unit, connection }), Ok(_)) => run.done(unit, &connection),
                (Some(Pending::Unit { run, unit, .. }), Err(error)) => {
                    run.failed(unit, error.into_error("write"))
                }
                (Some(Pending::Atomic { transfer }), Ok(value)) => {
                    transfer.set_value(value);
                    transfer.unit_done();
                }
                (Some(Pending::Atomic { transfer }), Err(error)) => {
                    transfer.unit_failed(0, error.into_error("atomic"));
                }
                _ => {}
            },
            Message::Check(check) => {
                // Under the lock of what is pending: nobody forgets the request meanwhile.
                let pending = lock(&self.pending);
                if matches!(pending.get(&header.id), Some(Pending::Unit { .. })) {
                    lock(&self.checks).insert(header.id, check.checks);
                }
            }
            Message::Unmap(unmap) => {
                if let Some(local) = &self.local {
                    local.mappings.forget(unmap.segment);
                }
            }
            Message::Recall(recall) => {
                let borrowing = lock(&self.borrowing).get(&recall.handle).and_then(Weak::upgrade);
                if let Some(borrowing) = borrowing {
                    borrowing.recalled();
                }
            }
            Message::Ping(_) => self.tell(wire::Pong {})?,
            Message::Pong(_) => {}
            Message::Bye(bye) => {
                let why = bye.error.map_or_else(|| "the owner has closed".to_owned(), |error| error.message);
                return Err(Error::new(Kind::Disconnected, "session", why));
            }
            other => {
                return Err(Error::protocol("receive", format!("an owner does not send {:?}", other.kind())));
            }
        }
        Ok(())
    }
}

impl Timer for Session {
    fn fired(self: Arc<Self>, key: u64) {
        if self.alive().is_err() {
            return;
        }
        if key == HEARTBEAT_TIMER {
            self.beating.store(false, Ordering::Release);
            if !lock(&self.pending).is_empty() {
                let _ = self.tell(wire::Ping {});
                self.beat();
            }
            return;
        }
        if key == SETTLE_TIMER {
            self.settle();
            return;
        }
        let idle: Vec<_> = {
            let mut lanes = lock(&self.lanes);
            lanes.timer = false;
            let busy = lock(&self.pending).values().any(|one| matches!(one, Pending::Unit { .. }));
            let since = lanes.last_used.map_or(LANES_IDLE, |used| used.elapsed());
            if busy || since < LANES_IDLE {
                lanes.timer = true;
                self.wake_at(
                    Instant::now() + LANES_IDLE.saturating_sub(since).max(LANES_IDLE / 10),
                    IDLE_TIMER,
                );
                Vec::new()
            } else {
                std::mem::take(&mut lanes.open)
            }
        };
        for lane in idle {
            lane.close(Error::new(Kind::Canceled, "session", "an idle lane was closed"));
        }
    }
}

/// Passes a connection's frames on to its session, without keeping it alive.
struct ToSession(Weak<Session>);

impl ToSession {
    fn session(&self) -> Result<Arc<Session>> {
        self.0.upgrade().ok_or_else(|| Error::new(Kind::Canceled, "session", "the session is gone"))
    }
}

impl Handler for ToSession {
    fn frame(&self, _: &Arc<Connection>, header: Header, body: &[u8], files: Vec<OwnedFd>) -> Result<()> {
        self.session()?.answered(header, body, files)
    }

    fn payload(&self, _: &Arc<Connection>, header: Header, body: &[u8]) -> Result<Sink> {
        if header.kind != FrameKind::Data {
            return Err(Error::protocol("receive", format!("an owner does not send {:?}", header.kind)));
        }
        wire::Data::decode(body)?
            .outcome
            .map_err(|_| Error::protocol("receive", "the owner sent an error and bytes with it"))?;
        let session = self.session()?;
        let pending = lock(&session.pending);
        match pending.get(&header.id) {
            Some(Pending::Unit { run, unit, .. }) => run.sink(*unit, header),
            // Its transfer was stopped: the bytes are no longer wanted.
            _ => Ok(Sink::discard()),
        }
    }

    fn received(&self, connection: &Arc<Connection>, header: Header, sink: Sink) -> Result<()> {
        if sink.is_discarded() {
            return Ok(());
        }
        drop(sink);
        let session = self.session()?;
        session.hear();
        let checks = lock(&session.checks).remove(&header.id);
        if let Some(Pending::Unit { run, unit, .. }) = session.forget(header.id) {
            match run.verify(unit, checks) {
                Ok(()) => run.done(unit, connection),
                Err(error) => run.failed(unit, error),
            }
        }
        Ok(())
    }

    fn closed(&self, connection: &Arc<Connection>, error: Error) {
        let Some(session) = self.0.upgrade() else { return };
        match connection.role() {
            super::connection::Role::Control => session.fail(error),
            super::connection::Role::Lane => session.lane_closed(connection, &error),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if crate::fork::in_child() {
            return;
        }
        self.close(Error::new(Kind::Canceled, "session", "the session is no longer used"));
    }
}
