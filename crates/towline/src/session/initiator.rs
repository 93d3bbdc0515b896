//! The initiator's side of a connection to an owner: imports, requests, and what same-host paths need of it.

mod ending;
mod lanes;
mod replies;
mod waiter;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use towline_proto::session::initiator::{
    Action, Actions, Asked, Asks, ConnectionId, Initiator, Look, Settings,
};

use self::lanes::Lanes;
use self::replies::ToSession;
pub(super) use self::waiter::{UnitHold, Waiter};
use super::connection::{Connection, Role};
use super::contact::{self, NoContact};
use super::grant::GrantHandle;
use super::mappings::Mappings;
use super::parts::Payload;
use super::query::Borrowed;
use super::run::Run;
use super::sharing::{self, Neighbour};
use super::{Medium, Sessions, outstanding};
use crate::fence::applying::ApplySlotView;
use crate::fence::life::LifePage;
use crate::fence::pins::{PinPage, ProcessPin, Side};
use crate::fence::table::TableView;
use crate::fence::watcher;
use crate::notify::Mailbox;
use crate::runtime::{self, Timer};
use crate::transfer::{Signal, TransferCore};
use crate::wire::handshake::SessionKey;
use crate::wire::{self, Message};
use crate::{Error, Kind, Result, Ticket, ended};

/// The timers of a session.
const HEARTBEAT_TIMER: u64 = 1;
const IDLE_TIMER: u64 = 2;
const SETTLE_TIMER: u64 = 3;

/// A connection to an owner, with what belongs to it.
pub(crate) struct Session {
    pub(super) sessions: Weak<Sessions>,
    owner: crate::Identity,
    pub(crate) medium: Medium,
    /// Memory may be shared with the owner, as far as who asked for the session has said.
    pub(super) shares: bool,
    pub(super) id: u64,
    pub(super) key: SessionKey,
    /// What proofs on this session are about.
    pub(super) challenge: [u8; 32],
    control: Arc<Connection>,
    lanes: Mutex<Lanes>,
    /// Held by the one thread that opens lanes.
    opening: Mutex<()>,
    /// Transfers that wait for lanes: nothing of them is pending yet.
    starting: Mutex<Vec<Weak<Run>>>,
    /// What is open, and the rules by which it ends.
    rules: Mutex<Initiator<Waiter>>,
    /// What must be notified when the owner wants a grant back.
    pub(super) borrowing: Mutex<HashMap<u32, Borrowed>>,
    /// Held while the frames of one import are sent.
    pub(super) importing: Mutex<()>,
    local: Option<Local>,
    /// Why there is none.
    apart: String,
    to_copy_by: OnceLock<Result<i32>>,
    dead: OnceLock<Error>,
    /// When that was, for all who imported something over it.
    pub(crate) lost: Arc<OnceLock<Instant>>,
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
    /// Dropped on close: the lock that shows the owner that we are alive, and the watch on the owner's.
    alive: Mutex<Option<(Option<watcher::Hold>, Option<watcher::Watch>)>>,
}

impl Session {
    /// Makes first contact with the owner of a ticket. Blocks, at most until a socket should be connected, and contact be made.
    pub(crate) fn connect(
        sessions: &Arc<Sessions>,
        ticket: &Ticket,
        medium: Medium,
        shares: bool,
        limits: (Instant, Instant),
    ) -> Result<Arc<Session>, NoContact> {
        let contact = contact::with_ticket(sessions, ticket, medium, shares, limits)?;
        let mut owner = ticket.body().identity.clone();
        owner.name.clone_from(&contact.ready.name);
        let (local, apart) = match contact.owner {
            Err(apart) => (None, apart),
            Ok(owner) => match Local::take(contact.ready.local, contact.files, &owner)? {
                Some(local) => (Some(local), String::new()),
                None => (None, withheld(&owner)),
            },
        };
        // An owner that says so over TCP knows of lanes that end.
        let seen_at = contact.ready.local.filter(|_| matches!(medium, Medium::Tcp(_)));
        let settings =
            Settings { between_hosts: matches!(medium, Medium::Tcp(_)), ends_lanes: seen_at.is_some() };
        let session = Arc::new_cyclic(|me| {
            let handler = Arc::new(ToSession(Weak::clone(me)));
            let control = Connection::new(contact.socket, Role::Control, true, handler);
            if let Some(slot) = local.as_ref().and_then(|local| ApplySlotView::of(&local.pins, 0)) {
                control.applied_at(slot);
            }
            if let Some(port) = seen_at {
                control.is_seen_at(port);
            }
            let rules = Initiator::new(settings, control.opened(), Instant::now());
            Session {
                sessions: Arc::downgrade(sessions),
                owner,
                medium,
                shares,
                id: contact.ready.session,
                key: contact.key,
                challenge: contact.challenge,
                control,
                lanes: Mutex::default(),
                opening: Mutex::default(),
                starting: Mutex::default(),
                rules: Mutex::new(rules),
                borrowing: Mutex::default(),
                importing: Mutex::default(),
                local,
                apart,
                to_copy_by: OnceLock::new(),
                dead: OnceLock::new(),
                lost: Arc::default(),
                me: Weak::clone(me),
            }
        });
        session.control.watch()?;
        session.stay_alive()?;
        Ok(session)
    }

    /// On one host: shows the owner that this process lives, and learns when the owner's does not.
    fn stay_alive(self: &Arc<Self>) -> Result<()> {
        let Some(local) = &self.local else { return Ok(()) };
        // Where the kernel lacks what is needed, the end of the connection shows it, only later.
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
        *local.alive.lock() = Some((hold, watch));
        let life = LifePage::ours()?
            .fd()
            .try_clone_to_owned()
            .map_err(|error| Error::os("contact", "dup", error))?;
        self.control()?.send(Message::from(wire::Held {}).frame(0, 0, 1), vec![life], Payload::None)
    }

    /// All connections.
    fn connections(&self) -> Vec<Arc<Connection>> {
        self.lanes.lock().open.iter().chain([&self.control]).cloned().collect()
    }

    fn control(&self) -> Result<&Arc<Connection>> {
        self.alive()?;
        Ok(&self.control)
    }

    pub(crate) fn peer_name(&self) -> &str {
        &self.owner.name
    }

    pub(crate) fn owner(&self) -> &crate::Identity {
        &self.owner
    }

    /// Whether what is said on it is encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.control.socket().is_encrypted()
    }

    /// Whether it can still be used; the error is why it cannot.
    pub(crate) fn alive(&self) -> Result<()> {
        match self.dead.get() {
            None => Ok(()),
            Some(error) => Err(self.why_over(error.clone())),
        }
    }

    /// Whether something more can be asked over it, as far as was noticed: its connection ends a moment before it does.
    pub(crate) fn is_open(&self) -> bool {
        self.dead.get().is_none() && !self.control.is_closed()
    }

    /// Opens a request over that connection: its frame is sent afterwards.
    pub(super) fn open(&self, over: &Connection, asks: Asks, waiter: Waiter) -> Result<Asked<UnitHold>> {
        let asked = self.rules.lock().ask(over.id(), asks, waiter, Instant::now());
        let asked = asked.map_err(|(_, error)| self.alive().err().unwrap_or(error))?;
        if let Some(when) = asked.look_at {
            self.wake_at(when, HEARTBEAT_TIMER);
        }
        Ok(asked)
    }

    /// Opens a request over the control connection, and sends it; descriptors may come with the reply. Gives its number.
    pub(super) fn ask(&self, asks: Asks, waiter: Waiter, message: impl Into<Message>) -> Result<u64> {
        let control = self.control()?;
        let request = self.open(control, asks, waiter)?.request;
        if self.local.is_some() {
            control.expect_files();
        }
        let frame = message.into().frame(request, 0, 0);
        match control.say(frame) {
            // The failed connection has reported for it already.
            Err(error) if self.give_up(request).is_some() => Err(error),
            _ => Ok(request),
        }
    }

    /// Ends a request that was not sent, or taken back before it was; the caller that gets its waiter reports its end.
    pub(super) fn unsent(&self, request: u64) -> Option<Waiter> {
        self.rules.lock().unsent(request)
    }

    /// A request was not sent, because its connection has ended since it was chosen.
    pub(super) fn not_sent(&self, waiter: Waiter, error: Error) {
        let action = self.rules.lock().not_sent(waiter, error);
        self.act(vec![action], &[]);
    }

    /// Ends a request that may have been sent, and that the owner may answer yet.
    pub(super) fn give_up(&self, request: u64) -> Option<Waiter> {
        self.rules.lock().give_up(request)
    }

    /// Sends a message that gets no reply.
    pub(crate) fn send_one_way(&self, message: impl Into<Message>) -> Result<()> {
        self.control()?.say(message.into().frame(0, 0, 0))
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
        self.send_one_way(wire::Notify { transfer: 0, pieces: 0, message: message.to_vec() })
    }

    /// Asks the owner to raise a counter.
    pub(crate) fn signal(&self, handle: &GrantHandle, signal: Signal) -> Result<()> {
        self.send_one_way(wire::Signal {
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
            let _ = control.say(frame);
        }
    }

    /// Asks the owner to perform an atomic operation.
    pub(super) fn atomic(&self, handle: u32, offset: u64, op: wire::AtomicOp, transfer: &Arc<TransferCore>) {
        let (asks, waiter) = (Asks::Change { on_gpu: false }, Waiter::Atomic(Arc::clone(transfer)));
        if let Err(error) = self.ask(asks, waiter, wire::Atomic { handle, offset, op }) {
            transfer.unit_failed(0, error);
        }
    }

    /// The connection for small requests.
    pub(super) fn control_lane(&self) -> Result<Arc<Connection>> {
        self.control().cloned()
    }

    fn wake_at(&self, when: Instant, key: u64) {
        if let Ok(reactor) = runtime::reactor() {
            reactor.at(when, self.me.clone(), key);
        }
    }

    /// How long nothing has come from the owner.
    pub(crate) fn silence(&self) -> Duration {
        self.rules.lock().silence(Instant::now())
    }

    /// As if nothing had come since it began.
    #[cfg(test)]
    pub(crate) fn restart_silence(&self) {
        self.rules.lock().restart_silence();
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

    /// [`shared`](Self::shared); the error says why this is not one.
    pub(super) fn local(&self) -> Result<&Local> {
        self.shared().ok_or_else(|| Error::new(Kind::Unavailable, "import", self.apart.clone()))
    }

    /// The owner's process, where it can be named from here.
    fn owner_process(&self) -> Option<OwnedFd> {
        self.shared()?;
        sharing::process_of(self.control.socket().socket()).ok()
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
        match key {
            HEARTBEAT_TIMER => self.look_at_host(),
            SETTLE_TIMER => self.settle(),
            _ => self.close_idle_lanes(),
        }
    }
}

impl Session {
    /// Does what the rules say; `closed` are connections that are not among the open ones any more.
    fn act(&self, actions: Actions<Waiter>, closed: &[Arc<Connection>]) {
        for action in actions {
            match action {
                Action::Send(over, frame) => {
                    if let Some(connection) = self.connection(over, closed) {
                        let _ = connection.say(frame);
                    }
                }
                Action::Stopped(waiter) => waiter.stopped(),
                Action::Failed(waiter, error) => waiter.failed(self, error),
                Action::Again(waiter, error) => waiter.again(self, error),
                Action::Outstanding(transfer) => transfer.add_outstanding(),
                Action::OutstandingWhileApplied(transfer, over) => {
                    let slot = self.connection(over, closed).and_then(|connection| connection.unfinished());
                    if let Some(slot) = slot {
                        outstanding::listen(&transfer, slot, self.owner_process());
                    }
                }
                Action::Settled(transfer) => transfer.remove_outstanding(),
                Action::NeverSettled(_) => {}
                Action::Moved(transfer, when) => transfer.got_on(when),
                Action::Reset(over, error) => {
                    if let Some(connection) = self.connection(over, closed) {
                        connection.reset(error);
                    }
                }
                Action::SettleAt(when) => self.wake_at(when, SETTLE_TIMER),
                Action::LookAt(when) => self.wake_at(when, HEARTBEAT_TIMER),
            }
        }
    }

    fn connection(&self, id: ConnectionId, closed: &[Arc<Connection>]) -> Option<Arc<Connection>> {
        let all = self.connections();
        closed.iter().chain(&all).find(|connection| connection.id() == id).cloned()
    }

    /// The time has come to look whether the owner's host is there.
    fn look_at_host(&self) {
        let connections = self.connections();
        let moved: Vec<_> =
            connections.iter().filter_map(|one| Some((one.id(), one.last_got_on()?))).collect();
        let now = Instant::now();
        let silences = connections.iter().filter_map(|one| one.socket().socket().last_came());
        let came = silences.min().and_then(|silence| now.checked_sub(silence));
        let look = self.rules.lock().look_at_host(now, came, &moved);
        match look {
            Look::There(actions) => self.act(actions, &[]),
            Look::Gone(error) => self.fail(error),
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
