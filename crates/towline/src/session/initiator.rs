//! The initiator's side of a connection to an owner: imports, requests, and what same-host paths need of it.

mod ending;
mod hearing;
mod lanes;
mod owed;
mod pulse;
mod unquiet;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak, mpsc};
use std::time::{Duration, Instant};

use self::hearing::ToSession;
use self::lanes::Lanes;
use self::owed::{Due, Owed};
use self::pulse::Pulse;
use self::unquiet::EndingLane;
use super::connection::Connection;
use super::contact::{self, NoContact};
use super::grant::GrantHandle;
use super::importing::Reply;
use super::mappings::Mappings;
use super::parts::{Keep, Payload};
use super::query::{Borrowed, QueryReply};
use super::run::Run;
use super::sharing::{self, Neighbour};
use super::{Medium, Sessions};
use crate::fence::applying::Place;
use crate::fence::life::LifePage;
use crate::fence::pins::{PinPage, ProcessPin, Side};
use crate::fence::table::TableView;
use crate::fence::watcher;
use crate::notify::Mailbox;
use crate::runtime::socket::Socket;
use crate::runtime::{self, Timer};
use crate::sync::lock;
use crate::transfer::{Signal, TransferCore};
use crate::wire::handshake::SessionKey;
use crate::wire::{self, FrameKind, Message};
use crate::{Error, Kind, Result, Ticket, ended};

/// While something is in flight between hosts, a frame goes out at least this often, so that a peer that does not acknowledge
/// it is noticed.
pub(crate) const HEARTBEAT: Duration = Duration::from_millis(500);

/// The timers of a session.
const HEARTBEAT_TIMER: u64 = 1;
const IDLE_TIMER: u64 = 2;
const SETTLE_TIMER: u64 = 3;

/// A connection to an owner, with what belongs to it.
pub(crate) struct Session {
    pub(super) sessions: Weak<Sessions>,
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
    /// Taken under the lock of what is pending: a request goes from the one to the other.
    owed: Mutex<Owed>,
    /// Checksums that have come ahead of the bytes, by request.
    checks: Mutex<HashMap<u64, Vec<u32>>>,
    next_request: AtomicU64,
    /// Who must be told when the owner wants a grant back.
    pub(super) borrowing: Mutex<HashMap<u32, Borrowed>>,
    /// Held while the frames of one import are sent.
    pub(super) importing: Mutex<()>,
    local: Option<Local>,
    /// Why there is none.
    apart: String,
    /// The owner understands Withdraw and EndLane.
    ends_lanes: bool,
    to_copy_by: OnceLock<Result<i32>>,
    dead: OnceLock<Error>,
    /// This side has ended it, and not the owner: on a wish, or because nothing came from the owner's host any more.
    closed_here: AtomicBool,
    /// When that was, for all who imported something over it.
    lost: Arc<OnceLock<Instant>>,
    beating: AtomicBool,
    pulse: Mutex<Pulse>,
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
    /// The owner's number, where it has one in this pid namespace.
    pid: Option<i32>,
    pub(super) mappings: Mappings,
    /// The owner's regions that are pinned for long, by generation.
    pub(super) held: Mutex<HashMap<u64, Weak<ProcessPin>>>,
    /// Dropped on close: the lock that tells the owner we are alive, and the watch on the owner's.
    alive: Mutex<Option<(Option<watcher::Hold>, Option<watcher::Watch>)>>,
}

/// Who waits for the answer to a request.
pub(super) enum Pending {
    Import(Arc<Reply>),
    Ask(mpsc::SyncSender<Result<QueryReply>>),
    Unit {
        run: Arc<Run>,
        unit: usize,
        connection: Arc<Connection>,
    },
    Atomic {
        transfer: Arc<TransferCore>,
    },
    /// A read that was stopped then, and whose answer goes nowhere when it comes over that lane.
    Unwanted {
        connection: Arc<Connection>,
        since: Instant,
    },
    /// The owner may still make this change, of which nobody waits for the end any more: until it has answered, the transfer is not
    /// quiet.
    Late(Arc<TransferCore>),
    /// A lane is to end.
    Ending(EndingLane),
}

impl Pending {
    /// The transfer, where the owner's memory changes by this request.
    fn changing(&self) -> Option<&Arc<TransferCore>> {
        match self {
            Pending::Unit { run, unit, .. } => run.changes(*unit).then_some(&run.transfer),
            Pending::Atomic { transfer } => Some(transfer),
            Pending::Import(_)
            | Pending::Ask(_)
            | Pending::Unwanted { .. }
            | Pending::Late(_)
            | Pending::Ending(_) => None,
        }
    }

    /// The kind of frame that answers it.
    fn answer(&self) -> FrameKind {
        match self {
            Pending::Import(_) => FrameKind::Granted,
            Pending::Ask(_) => FrameKind::Told,
            Pending::Unit { run, unit, .. } if !run.changes(*unit) => FrameKind::Data,
            Pending::Unwanted { .. } => FrameKind::Data,
            Pending::Unit { .. } | Pending::Atomic { .. } | Pending::Late(_) | Pending::Ending(_) => {
                FrameKind::Done
            }
        }
    }

    fn changes_a_gpu(&self) -> bool {
        matches!(self, Pending::Unit { run, unit, .. } if run.changes_a_gpu(*unit))
    }
}

impl Session {
    /// Makes first contact with the owner of a ticket. Blocks, at most until a socket should be connected, and contact be made.
    pub(crate) fn connect(
        sessions: &Arc<Sessions>,
        ticket: &Ticket,
        medium: Medium,
        limits: (Instant, Instant),
    ) -> Result<Arc<Session>, NoContact> {
        let contact = contact::with_ticket(sessions, ticket, medium, limits)?;
        let mut owner = ticket.body().identity.clone();
        owner.name.clone_from(&contact.ready.name);
        // Pages that somebody else can write would be locked and followed here as if they were our own: those of an owner that is kept
        // apart from this process are closed before they are looked at.
        let (local, apart) = match neighbour(sessions, medium, contact.socket.socket())? {
            Err(apart) => (None, apart),
            Ok(owner) => match Local::take(contact.ready.local, contact.files, &owner)? {
                Some(local) => (Some(local), String::new()),
                None => (None, withheld(&owner)),
            },
        };
        // An owner that says so over TCP knows of lanes that end.
        let seen_at = contact.ready.local.filter(|_| matches!(medium, Medium::Tcp(_)));
        let ends_lanes = seen_at.is_some();
        let session = Arc::new_cyclic(|me| Session {
            sessions: Arc::downgrade(sessions),
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
            owed: Mutex::default(),
            checks: Mutex::default(),
            next_request: AtomicU64::new(1),
            borrowing: Mutex::default(),
            importing: Mutex::default(),
            local,
            apart,
            ends_lanes,
            to_copy_by: OnceLock::new(),
            dead: OnceLock::new(),
            closed_here: AtomicBool::new(false),
            lost: Arc::default(),
            beating: AtomicBool::new(false),
            pulse: Mutex::new(Pulse::new()),
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
        if let Some(port) = seen_at {
            control.is_seen_at(port);
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
                ended::remember(session.owner.incarnation);
                session.fail(session.owner_died());
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

    /// All connections.
    fn connections(&self) -> Vec<Arc<Connection>> {
        lock(&self.lanes).open.iter().chain(self.control.get()).cloned().collect()
    }

    /// The connection over which that was asked.
    fn connection_of<'a>(&'a self, pending: &'a Pending) -> Option<&'a Arc<Connection>> {
        match pending {
            Pending::Unit { connection, .. } | Pending::Unwanted { connection, .. } => Some(connection),
            _ => self.control.get(),
        }
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
    pub(crate) fn is_encrypted(&self) -> bool {
        self.control.get().is_some_and(|control| control.socket().is_encrypted())
    }

    pub(crate) fn medium(&self) -> Medium {
        self.medium
    }

    /// Whether it can still be used; the error is why it cannot.
    pub(crate) fn alive(&self) -> Result<()> {
        match self.dead.get() {
            None => Ok(()),
            Some(error) => Err(self.why_over(error.clone())),
        }
    }

    /// Whether something more can be asked over it, as far as anybody has noticed: its connection ends a moment before it does.
    pub(crate) fn is_open(&self) -> bool {
        self.dead.get().is_none() && self.control.get().is_some_and(|control| !control.is_closed())
    }

    /// When it was learned that it cannot be used any more.
    pub(crate) fn lost(&self) -> &Arc<OnceLock<Instant>> {
        &self.lost
    }

    /// What proofs on this session are about.
    pub(super) fn challenge(&self) -> &[u8; 32] {
        &self.challenge
    }

    /// Sends a request whose answer is expected already.
    pub(super) fn ask(&self, frame: Vec<u8>) -> Result<()> {
        self.control()?.send(frame, Vec::new(), Payload::None, Keep::Nothing)
    }

    /// [`ask`](Self::ask), where descriptors may come with the answer.
    pub(super) fn ask_for_files(&self, frame: Vec<u8>) -> Result<()> {
        self.control()?.expect_files();
        self.ask(frame)
    }

    /// Remembers who waits for the answer to a new request.
    pub(super) fn expect(&self, pending: Pending) -> Result<u64> {
        let request = self.next_request();
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

    fn next_request(&self) -> u64 {
        self.next_request.fetch_add(1, Ordering::Relaxed)
    }

    /// Forgets a request that was answered, or was never sent; whoever succeeds is the one to report its end.
    pub(super) fn forget(&self, request: u64) -> Option<Pending> {
        self.take(request, false)
    }

    /// Forgets a request that may have been sent, and that the owner may answer yet.
    pub(super) fn give_up(&self, request: u64) -> Option<Pending> {
        self.take(request, true)
    }

    fn take(&self, request: u64, owed: bool) -> Option<Pending> {
        let mut pending = lock(&self.pending);
        let forgotten = pending.remove(&request);
        if !owed {
            lock(&self.owed).settle(request);
        } else if let Some(one) = &forgotten {
            self.owes(request, one);
        }
        // Nobody waits for these any more, if some have come.
        let mut checks = lock(&self.checks);
        if !checks.is_empty() {
            checks.retain(|request, _| pending.contains_key(request));
        }
        forgotten
    }

    /// Remembers the answer to a request that was given up. Under the lock of what is pending.
    fn owes(&self, request: u64, given_up: &Pending) {
        if let Some((over, due)) = self.awaits(given_up)
            // Whoever closes it has nothing to do with those that are given up afterwards.
            && !over.is_closed()
        {
            lock(&self.owed).note(request, due);
        }
    }

    /// The answer that a request is to have, and the connection over which it comes.
    fn awaits<'a>(&'a self, pending: &'a Pending) -> Option<(&'a Arc<Connection>, Due)> {
        let over = self.connection_of(pending)?;
        Some((over, Due::new(pending.answer(), over)))
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

    fn wake_at(&self, when: Instant, key: u64) {
        if let Ok(reactor) = runtime::reactor() {
            let weak: Weak<dyn Timer> = self.me.clone();
            reactor.at(when, weak, key);
        }
    }

    /// How long the owner has not been heard.
    pub(crate) fn silence(&self) -> Duration {
        self.began.elapsed().saturating_sub(Duration::from_micros(self.heard.load(Ordering::Relaxed)))
    }

    /// As if nothing had been heard since it began.
    #[cfg(test)]
    pub(crate) fn heard_nothing(&self) {
        self.heard.store(0, Ordering::Relaxed);
    }

    fn hear(&self) {
        self.heard.store(self.began.elapsed().as_micros() as u64, Ordering::Relaxed);
    }

    /// The owner's process, if the kernel lets this process copy from and to it: the probe tries that once, at the address of the
    /// owner's nonce.
    pub(crate) fn process_to_copy_by(&self, probe: fn(i32, u64, &[u8; 16]) -> Result<()>) -> Result<i32> {
        let local = self.local()?;
        self.to_copy_by
            .get_or_init(|| {
                let row = local
                    .table
                    .row(0)
                    .ok_or_else(|| Error::protocol("import", "the owner's table has no first row"))?;
                let Some(pid) = local.pid else {
                    let message = "the owner is in another pid namespace and has no number here to copy by";
                    return Err(Error::new(Kind::Unavailable, "import", message));
                };
                probe(pid, row.addr(), self.owner.incarnation.as_bytes())?;
                Ok(pid)
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
        self.shared().ok_or_else(|| Error::new(Kind::Unavailable, "import", self.apart.clone()))
    }

    /// The owner's process, where it can be named from here.
    fn owner_process(&self) -> Option<OwnedFd> {
        self.shared()?;
        sharing::process_of(self.control.get()?.socket().socket()).ok()
    }
}

impl Local {
    /// What an owner that may share memory has given; `None` where it has given nothing.
    fn take(rows: Option<u32>, files: Vec<OwnedFd>, owner: &Neighbour) -> Result<Option<Local>> {
        let mut files = files.into_iter();
        match (rows, files.next(), files.next(), files.next(), files.next()) {
            (Some(rows), Some(table), Some(pins), Some(doorbell), Some(mailbox)) => Ok(Some(Local {
                table: TableView::map(table, rows)?,
                pins: Arc::new(PinPage::map(pins)?.with_doorbell(doorbell)?),
                mailbox: Mailbox::map(&mailbox)?,
                pid: owner.pid,
                mappings: Mappings::default(),
                held: Mutex::default(),
                alive: Mutex::new(None),
            })),
            _ => Ok(None),
        }
    }
}

/// The owner's process, where this one may share memory with it; else why not.
fn neighbour(sessions: &Sessions, medium: Medium, socket: &Socket) -> Result<Result<Neighbour, String>> {
    if medium != Medium::Unix {
        return Ok(Err("the owner is reached by tcp".to_owned()));
    }
    if sessions.settings.enforces_isolation {
        return Ok(Err("this endpoint enforces isolation: every access goes through the owner".to_owned()));
    }
    let asked = sharing::may_share(socket, sessions.settings.shares_between_containers)?;
    Ok(asked.map_err(|apart| format!("no memory is shared: the owner is {apart}")))
}

/// Why an owner gave nothing, as far as this side can know.
fn withheld(owner: &Neighbour) -> String {
    match &owner.between {
        Some(apart) => format!(
            "no memory is shared: the owner is {apart}; {} is set here and not at the owner, or the owner enforces isolation",
            sharing::SETTING
        ),
        None => "the owner shares no memory: it enforces isolation, or the kernel does not let it look into this process".to_owned(),
    }
}

impl Timer for Session {
    fn fired(self: Arc<Self>, key: u64) {
        if self.alive().is_err() {
            return;
        }
        if key == HEARTBEAT_TIMER {
            self.feel_pulse();
            return;
        }
        if key == SETTLE_TIMER {
            self.settle();
            return;
        }
        self.close_idle_lanes();
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
