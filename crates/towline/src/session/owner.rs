//! The owner's side of a connection: verifies tickets, serves requests, and minds the pins of a peer on this host.
//!
//! What is allowed, and what follows from what, is decided by [`Owner`]; here is what it takes to do that.

mod admitting;
mod granting;
mod heartbeat;
#[cfg(test)]
mod lent_tests;
mod local;
#[cfg(test)]
mod tests;
mod unwanted;
mod words;

use std::collections::HashSet;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
#[cfg(test)]
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};
use towline_proto::session::allowance::{Allowance, exhausted};
use towline_proto::session::owner::{Action, Owner, Reading};

use self::admitting::{Memory, Target};
pub(super) use self::granting::{Granting, Standing};
use self::local::Local;
use super::checks;
use super::connection::{Connection, Handler, Next, Role, Wanted};
use super::files::{Files, Source, Written};
use super::parts::{Held, Landed, Payload, Sink, hung_up};
use crate::budget::{Account, Charge};
use crate::bytes::checked;
use crate::fence::applying::ApplySlot;
use crate::fence::life::LifeView;
use crate::fence::pins::Side;
use crate::fence::watcher;
use crate::identity::Identity;
use crate::operations::Claimer;
use crate::region::{Counted, Stream, stale};
use crate::runtime::socket::{Lane, RawPartMut};
use crate::runtime::{self, Device};
use crate::session::Sessions;
use crate::session::apply;
use crate::wire::handshake::SessionKey;
use crate::wire::{self, Done, Granted, Header, Import, Message, WireError};
use crate::{Access, Error, Kind, Result, room, ticket};

/// Names a connection, and keeps nothing of it.
#[derive(Clone)]
pub(super) struct Over(Weak<Connection>);

impl Over {
    fn of(connection: &Arc<Connection>) -> Over {
        Over(Arc::downgrade(connection))
    }

    fn connection(&self) -> Result<Arc<Connection>> {
        let closed = || Error::new(Kind::Disconnected, "send", "the connection is closed");
        self.0.upgrade().ok_or_else(closed)
    }
}

impl PartialEq for Over {
    fn eq(&self, other: &Over) -> bool {
        Weak::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Over {}

/// What a session takes by itself.
const SESSION: usize = 4 << 10;

/// One peer that uses this endpoint's regions.
pub(crate) struct Serving {
    id: u64,
    sessions: Weak<Sessions>,
    pub(super) peer: Identity,
    key: SessionKey,
    challenge: [u8; 32],
    connections: Mutex<Vec<Arc<Connection>>>,
    /// Locked for one decision at a time: nothing is sent, and nobody waits, meanwhile.
    rules: Mutex<Owner<Granting, Over>>,
    pub(super) allowance: Arc<Allowance>,
    /// What its messages take of the queue of those that are not received yet.
    messages: Arc<Account>,
    _charge: Charge,
    files: Arc<Files>,
    pub(super) local: Option<Local>,
    /// The next frame makes it panic.
    #[cfg(test)]
    panics: AtomicBool,
}

impl Serving {
    /// A peer has proven to hold a ticket that is still good.
    pub(super) fn begin(
        sessions: &Arc<Sessions>,
        peer: Identity,
        (key, challenge): (SessionKey, [u8; 32]),
        standing: Standing,
        connection: &Arc<Connection>,
    ) -> Result<()> {
        use std::sync::atomic::AtomicU64;
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Serving::has_room(sessions, &peer)?;
        let allowance = Allowance::new(sessions.settings.quotas, sessions.held.account());
        let charge = allowance.charge("contact", SESSION)?;
        let of_connection = allowance.charge("contact", connection.cost())?;
        let (local, files) = match Local::offer(sessions, &peer, &allowance, connection)? {
            Some((local, files)) => (Some(local), files),
            None => (None, Vec::new()),
        };
        let (control, opened) = (Over::of(connection), sessions.registry.opened());
        let rules = Owner::new(control, standing, &allowance, local.is_some(), opened);
        let serving = Arc::new(Serving {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            sessions: Arc::downgrade(sessions),
            peer,
            key,
            challenge,
            connections: Mutex::new(vec![Arc::clone(connection)]),
            rules: Mutex::new(rules),
            messages: sessions.registry.notifications.account(),
            allowance,
            _charge: charge,
            files: Arc::default(),
            local,
            #[cfg(test)]
            panics: AtomicBool::new(false),
        });
        sessions.serve(&serving);
        // The first connection is at the first slot.
        if let Some(slot) = serving.local.as_ref().and_then(Local::apply_slot) {
            connection.apply_at(slot);
        }
        let mut local = connection.socket().socket().peer_port();
        if serving.local.is_some() {
            local = Some(sessions.registry.table.rows());
            // The page by which the peer shows that it lives.
            connection.expect_files();
        }
        let ready = wire::Ready { session: serving.id, name: sessions.registry.name().to_owned(), local };
        connection.authenticate(serving, Role::Control, of_connection);
        let head = Message::from(ready).frame(0, 0, files.len() as u8);
        connection.send(head, files, Payload::None)
    }

    /// Checks the ticket that a peer has just proven to hold.
    pub(super) fn standing(sessions: &Sessions, public: &[u8]) -> Result<Standing> {
        let claims = ticket::parse_public(public)?.claims();
        let region = sessions.registry.check_current(&claims)?;
        Ok(Standing::new(Arc::downgrade(&region), claims.expires_ms))
    }

    /// Refuses a session beyond what all peers, or this one, may have.
    fn has_room(sessions: &Sessions, peer: &Identity) -> Result<()> {
        let peers = sessions.serving().len();
        if peers >= sessions.settings.quotas.peers {
            let message = format!("the owner serves {peers} peers, which is its limit");
            return Err(Error::new(Kind::Exhausted, "contact", message));
        }
        Serving::has_connection_left(sessions, peer)
    }

    fn has_connection_left(sessions: &Sessions, peer: &Identity) -> Result<()> {
        let most = sessions.settings.quotas.connections;
        let serving = sessions.serving();
        let same = serving.iter().filter(|one| one.peer.incarnation == peer.incarnation);
        let open: usize = same.map(|one| one.connections.lock().len()).sum();
        if open >= most {
            return Err(exhausted("contact", format!("{most} connections"), "at a time"));
        }
        Ok(())
    }

    /// A known peer has opened one more connection.
    pub(super) fn join(
        sessions: &Arc<Sessions>,
        id: u64,
        transcript: [u8; 32],
        connection: &Arc<Connection>,
    ) -> Result<()> {
        let serving = Serving::find(sessions, id)
            .ok_or_else(|| Error::new(Kind::Disconnected, "contact", "the session is over"))?;
        Serving::has_connection_left(sessions, &serving.peer)?;
        let charge = serving.allowance.charge("contact", connection.cost())?;
        connection.socket().tune(Lane::Bulk, Some(super::UNANSWERED))?;
        connection.call(transcript);
        serving.connections.lock().push(Arc::clone(connection));
        serving.rules().joined(Over::of(connection), transcript);
        // The thread that ends it closes the connections that it finds after it has said so.
        if serving.is_closed() {
            serving.connections.lock().clear();
            return Err(Error::new(Kind::Disconnected, "contact", "the session is over"));
        }
        let slot = serving.local.as_ref().and_then(Local::apply_slot);
        let index = slot.as_ref().map(ApplySlot::index).or_else(|| connection.socket().socket().peer_port());
        if let Some(slot) = slot {
            connection.apply_at(slot);
        }
        let ready = wire::Ready { session: id, name: sessions.registry.name().to_owned(), local: index };
        connection.authenticate(serving, Role::Lane, charge);
        connection.say(Message::from(ready).frame(0, 0, 0))
    }

    /// The rules, and nobody else has them meanwhile.
    fn rules(&self) -> Rules<'_> {
        Rules(Some(self.rules.lock()))
    }

    /// The peer with that session.
    pub(super) fn find(sessions: &Sessions, id: u64) -> Option<Arc<Serving>> {
        sessions.serving().into_iter().find(|serving| serving.id == id)
    }

    pub(super) fn key(&self) -> &SessionKey {
        &self.key
    }

    /// The requests that are being served, and their bytes.
    pub(crate) fn in_flight(&self) -> (usize, u64) {
        self.allowance.load()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.rules().is_over()
    }

    pub(super) fn sessions(&self) -> Result<Arc<Sessions>> {
        self.sessions
            .upgrade()
            .ok_or_else(|| Error::new(Kind::Disconnected, "serve", "the endpoint is closed"))
    }

    /// Ends it on this side's wish.
    pub(crate) fn close(&self) {
        let connections = self.connections.lock().clone();
        for connection in &connections {
            if connection.role() == Role::Control {
                connection.bye(None);
            }
        }
        self.end(&Error::new(Kind::Canceled, "serve", "the endpoint was closed"));
    }

    fn end(&self, error: &Error) {
        if !self.rules().end() {
            return;
        }
        if let Some(local) = &self.local {
            local.mail.mailbox.close();
        }
        let connections: Vec<_> = self.connections.lock().drain(..).collect();
        for connection in connections {
            connection.close(error.clone());
            connection.let_go();
        }
        let remains = self.rules().clear();
        self.files.clear();
        if let Some(local) = &self.local {
            drop(local.alive.lock().take());
            local.pins.end();
        }
        if let Some(sessions) = self.sessions.upgrade() {
            if let Some(local) = &self.local {
                sessions.registry.notifications.empty(&local.mail, &self.messages);
            }
            sessions.serve_no_more(self);
            let gone =
                Error::new(Kind::Disconnected, "serve", format!("its claimer is gone: {}", error.message()));
            sessions.operations.abandon(self.claimer(), &gone);
            for granting in &remains.grants {
                // A peer says goodbye only when nothing of it is in flight.
                if remains.goodbye {
                    granting.lent.back();
                } else {
                    granting.lent.orphaned();
                }
            }
            // The peer may have held memory that is being taken back.
            sessions.registry.let_go();
        }
    }

    /// Answers an import; one that claims an operation which is not ready is answered when it is.
    fn import(self: &Arc<Self>, connection: &Arc<Connection>, request: u64, import: Import) -> Result<()> {
        let Some(operation) = import.items.iter().find_map(|item| item.operation) else {
            return self.answer_import(connection, request, &import);
        };
        let operations = &self.sessions()?.operations;
        if operations.is_ready(&operation) {
            return self.answer_import(connection, request, &import);
        }
        let (this, to, count) = (Arc::downgrade(self), Arc::downgrade(connection), import.items.len());
        let charge = self.allowance.charge("import", import.memory())?;
        let claim = move || {
            let _charge = charge;
            if let (Some(this), Some(to)) = (this.upgrade(), to.upgrade())
                && !this.is_closed()
                && let Err(error) = this.answer_import(&to, request, &import)
            {
                tracing::debug!(%error, "a claim that waited was not answered");
            }
        };
        match operations.when_ready(&operation, Box::new(claim)) {
            Ok(Some(claim)) => claim(),
            Ok(None) => {}
            Err(error) => {
                let items = (0..count).map(|_| Err(WireError::from(&error))).collect();
                let frame = Message::from(Granted { items }).frame(request, 0, 0);
                connection.say(frame)?;
            }
        }
        Ok(())
    }

    fn answer_import(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        request: u64,
        import: &Import,
    ) -> Result<()> {
        let sessions = self.sessions()?;
        let mut files = Vec::new();
        let mut passed = HashSet::new();
        let items = import
            .items
            .iter()
            .map(|item| {
                let outcome = self.grant(&sessions, item, &mut passed, &mut files);
                outcome.map_err(|error| {
                    sessions.registry.refuse_ticket(&item.ticket, &self.peer);
                    WireError::from(&error)
                })
            })
            .collect();
        let frame = Message::from(Granted { items }).frame(request, 0, files.len() as u8);
        connection.send(frame, files, Payload::None)
    }

    fn claimer(&self) -> Claimer {
        Claimer::Session(self.id)
    }

    fn finish(&self, finish: wire::Finish) -> Result<()> {
        let outcome = finish.outcome.map_err(|error| error.into_error("serve"));
        // It may have ended before: the claimer sees that by other means.
        let _ = self.sessions()?.operations.finish(&finish.operation, self.claimer(), outcome);
        Ok(())
    }

    fn read(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        request: u64,
        reading: Reading<Granting>,
    ) -> Result<()> {
        let Reading { admitted, checks } = reading;
        let (granting, target) = match self.target(Access::READ, admitted) {
            Ok(admitted) => admitted,
            Err(error) => return self.answer_read(connection, request, Err(error)),
        };
        let (memory, parts) = match target {
            Target::Bounced(asked) => {
                granting.count(Counted::Read(asked.ranges.bytes()));
                let files = self.files.at(&asked.source);
                return match files.read(self, connection, request, asked, checks.is_some()) {
                    Ok(()) => Ok(()),
                    Err(error) => self.answer_read(connection, request, Err(error)),
                };
            }
            Target::Memory(memory, parts) => (memory, parts),
        };
        let Some(device) = memory.awaits() else {
            return self.answer_with(connection, request, &granting, (memory, parts), checks);
        };
        drop(parts);
        self.aside(device, connection, move |this, to| {
            let parts = memory.parts("read")?;
            this.answer_with(to, request, &granting, (memory, parts), checks)
        })
    }

    /// Does that on a thread that may wait for pages of lent memory, which come when a disk or the lender likes; an error ends
    /// the connection.
    fn aside(
        self: &Arc<Self>,
        device: Device,
        connection: &Arc<Connection>,
        work: impl FnOnce(&Arc<Serving>, &Arc<Connection>) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let (this, to) = (Arc::clone(self), Arc::clone(connection));
        let job = move || {
            if let Err(error) = work(&this, &to) {
                to.close(error);
            }
        };
        runtime::devices().spawn(device, Box::new(job)).map_err(|refused| refused.error)
    }

    /// Answers a read with bytes in memory, or says why not.
    fn answer_with(
        &self,
        connection: &Connection,
        request: u64,
        granting: &Granting,
        (memory, parts): (Memory, Vec<RawPartMut>),
        checks: Option<Result<()>>,
    ) -> Result<()> {
        let head = memory.look(&parts).inspect_err(|_| self.refused(granting)).and_then(|()| {
            granting.count(Counted::Read(memory.bytes()));
            let head = Message::from(wire::Data { outcome: Ok(()) }).frame(request, memory.bytes(), 0);
            match checks {
                Some(may) => may.and_then(|()| Ok(checks::before(memory.checks("read")?, request, head))),
                None => Ok(head),
            }
        });
        match head {
            Ok(head) => {
                let payload = Payload::Memory(Held::new(parts, memory.keep(request)));
                connection.send(head, Vec::new(), payload)
            }
            Err(error) => self.answer_read(connection, request, Err(error)),
        }
    }

    /// Where bytes come to that are written to memory. Pages of lent memory that are missing are brought by a thread that may wait for
    /// them. A lane waits for that thread; the event loop cannot, and takes the bytes into a buffer, which is paid for.
    fn memory_sink(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        request: u64,
        (memory, parts): (Memory, Vec<RawPartMut>),
        pay: impl FnOnce(u64) -> Result<()>,
    ) -> Result<Sink> {
        if let Some(device) = memory.awaits() {
            if connection.role() != Role::Lane || runtime::may_block("write").is_err() {
                let bytes = memory.bytes();
                pay(bytes)?;
                return Sink::buffer(bytes as usize, Some(memory.keep(request)));
            }
            let missing = parts.iter().map(|part| (part.ptr.expose_provenance(), part.len));
            let (missing, next) = (room::collect("write", missing)?, connection.hold_up());
            let bring = move || {
                let from = |at| std::ptr::with_exposed_provenance(at);
                // What is missing then, the receive reports.
                let _ = missing.into_iter().try_for_each(|(at, len)| checked::bring("write", from(at), len));
                drop(next);
            };
            runtime::devices().spawn(device, Box::new(bring)).map_err(|refused| refused.error)?;
        }
        Ok(Sink::memory(Held::new(parts, memory.keep(request))))
    }

    pub(super) fn answer_read(
        &self,
        connection: &Connection,
        request: u64,
        outcome: Result<()>,
    ) -> Result<()> {
        let data = wire::Data { outcome: outcome.map_err(|error| WireError::from(&error)) };
        let head = Message::from(data).frame(request, 0, 0);
        connection.say(head)
    }

    /// Writes what has come for a file or a GPU. A lane's thread may wait for a GPU, and its peer with it; the event loop may not.
    /// For a disk neither waits; where much waits for disks already, what else the peer sends over that lane does.
    fn write_file(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        header: Header,
        write: wire::Write,
        (landed, charge): (Landed, (Option<Charge>, Option<Written>)),
    ) -> Result<()> {
        let (serving, answered, handle) = (Arc::clone(self), Arc::clone(connection), write.handle);
        let work = move || {
            // A disk may take its time, and a GPU cannot be looked at in one step: a peer that can see it is notified meanwhile.
            let outcome = wanted("write", &answered).and_then(|wanted| {
                match serving.admit(handle, Access::WRITE, write.blocks)?.1 {
                    Target::Bounced(asked) => asked.write(landed, &|| wanted.stands_by(None)),
                    Target::Memory(memory, parts) if memory.is_lent() => apply::write_lent(
                        &|| wanted.stands_by(None),
                        &parts,
                        landed.bytes(memory.bytes() as usize),
                    ),
                    Target::Memory(..) => {
                        Err(Error::new(Kind::Internal, "write", "a file has become memory"))
                    }
                }
            });
            drop(charge);
            serving.applied(&answered, header, write.transfer, outcome)
        };
        let lane = connection.role() == Role::Lane;
        let region = self.granted("write", handle, Access::WRITE);
        let device = region.ok().and_then(|(_, region)| match Source::of(&region) {
            Some(source) => Some(source.device()),
            None => region.lent.then(|| region.brings_pages()),
        });
        let hangs = matches!(device, Some(Device::Disk(_) | Device::Lent(_)));
        // The event loop reads from a lane before it has become one.
        if lane && !hangs && runtime::may_block("write").is_ok() {
            return work();
        }
        let (closed, next) =
            (Arc::clone(connection), (lane && self.files.is_behind()).then(|| connection.hold_up()));
        let job = Box::new(move || {
            if let Err(error) = work() {
                closed.close(error);
            }
            drop(next);
        });
        match device {
            Some(device) => runtime::devices().spawn(device, job),
            None => runtime::pool().spawn(job),
        }
        .map_err(|refused| refused.error)
    }

    /// A piece of a transfer is applied, or not: acts on what waits for it, and answers.
    fn applied(
        self: &Arc<Self>,
        connection: &Connection,
        header: Header,
        transfer: u64,
        outcome: Result<()>,
    ) -> Result<()> {
        let due = self.rules().applied(transfer, outcome.is_ok())?;
        self.settle(due)?;
        self.answer(connection, header.id, outcome.map(|()| header.payload_len))
    }

    fn answer(&self, connection: &Connection, request: u64, outcome: Result<u64>) -> Result<()> {
        let done = Done { outcome: outcome.map_err(|error| WireError::from(&error)) };
        let head = Message::from(done).frame(request, 0, 0);
        connection.say(head)
    }

    fn held(self: &Arc<Self>, files: Vec<OwnedFd>) -> Result<()> {
        let (Some(local), Some(life)) = (&self.local, files.into_iter().next()) else {
            return Err(Error::protocol("serve", "the peer sent a life page that was not asked for"));
        };
        local.pins.lives(LifeView::map(life)?);
        let weak = Arc::downgrade(self);
        let died = Box::new(move || {
            if let Some(serving) = weak.upgrade() {
                serving.end(&Error::new(Kind::Disconnected, "serve", "the peer's process has died"));
            }
        });
        let watch = watcher::watch(Arc::clone(&local.pins.page), Side::Initiator, died)
            .inspect_err(|error| tracing::debug!(%error, "no watch on the peer"))
            .ok();
        if let Some(alive) = local.alive.lock().as_mut() {
            alive.1 = watch;
        }
        Ok(())
    }
}

/// The rules in one thread's hands. What they have looked at is let go of when they are not any more: that may end the session.
struct Rules<'a>(Option<MutexGuard<'a, Owner<Granting, Over>>>);

impl Deref for Rules<'_> {
    type Target = Owner<Granting, Over>;

    fn deref(&self) -> &Self::Target {
        self.0.as_ref().unwrap_or_else(|| unreachable!("they are taken in the drop alone"))
    }
}

impl DerefMut for Rules<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        self.0.as_mut().unwrap_or_else(|| unreachable!("they are taken in the drop alone"))
    }
}

impl Drop for Rules<'_> {
    fn drop(&mut self) {
        let spent = self.take_spent();
        drop(self.0.take());
        drop(spent);
    }
}

impl Stream for Serving {
    fn id(&self) -> u64 {
        self.id
    }

    fn break_off(&self, generation: u64) {
        let connections = self.connections.lock().clone();
        for connection in connections {
            connection.discard(|keep| keep.is_generation(generation));
            for request in connection.withdraw(|keep| keep.is_generation(generation)) {
                let _ = self.answer_read(&connection, request, Err(stale("read")));
            }
        }
    }
}

impl Serving {
    pub(super) fn control(&self) -> Option<Arc<Connection>> {
        self.connections.lock().iter().find(|one| one.role() == Role::Control).cloned()
    }
}

/// Refuses what an initiator asked for that has hung up since: it has said to its caller that nothing of it happens any more. To be
/// held until it is done.
fn wanted<'a>(op: &'static str, connection: &'a Connection) -> Result<Wanted<'a>> {
    connection.wanted().ok_or_else(|| hung_up(op))
}

/// The same for what is done in one step with a check, where that is possible; in memory that was lent it is not.
fn wanted_in_one_step<'a>(op: &'static str, connection: &'a Connection, lent: bool) -> Result<Wanted<'a>> {
    let wanted = if lent { connection.wanted() } else { connection.wanted_in_one_step() };
    wanted.ok_or_else(|| hung_up(op))
}

/// Passes a connection's frames on.
impl Handler for Arc<Serving> {
    fn frame(
        &self,
        connection: &Arc<Connection>,
        header: Header,
        body: &[u8],
        files: Vec<OwnedFd>,
    ) -> Result<()> {
        #[cfg(test)]
        assert!(!self.panics.load(Ordering::Relaxed), "on purpose");
        let message = Message::decode(header.kind, body)?;
        let action = self.rules().frame(&Over::of(connection), header.id, message, Instant::now())?;
        match action {
            Action::Nothing => Ok(()),
            Action::Answer(message) => connection.say(message.frame(header.id, 0, 0)),
            Action::Import(import) => self.import(connection, header.id, import),
            Action::LetGo(granting) => {
                granting.lent.back();
                Ok(())
            }
            Action::Reply(ask, granting) => self.answer_query(connection, header.id, ask, granting),
            Action::Read(reading) => self.read(connection, header.id, reading),
            Action::Atomic(op, word) => self.atomic(connection, header.id, op, word),
            Action::Settle(settling) => self.settle(settling),
            Action::Withdraw(unwanted) => self.withdraw(connection, header.id, unwanted),
            Action::EndLane(lane) => self.end_lane(connection, header.id, lane),
            Action::Finish(finish) => self.finish(finish),
            Action::Watch => self.held(files),
            Action::Goodbye(goodbye) => {
                // A peer says so only when it holds no pin and makes none any more.
                if let Some(local) = &self.local {
                    local.pins.let_go();
                }
                Err(goodbye)
            }
        }
    }

    fn next(&self, _: &Arc<Connection>) -> Next {
        if self.files.is_reading() { Next::More } else { Next::Request }
    }

    fn payload(&self, connection: &Arc<Connection>, header: Header, body: &[u8]) -> Result<Sink> {
        let message = Message::decode(header.kind, body)?;
        let arriving = self.rules().payload(&header, message, body.len(), Instant::now())?;
        let (bytes, mut charge) = (header.payload_len, arriving.charge);
        let target = self.target(Access::WRITE, arriving.admitted).map(|(granting, target)| {
            granting.count(Counted::Written(bytes));
            (granting, target)
        });
        let sink = match target {
            Ok((granting, target)) if arriving.is_combined => self
                .in_memory("reduce_into", (granting, target))
                .and_then(|(_, memory, _)| Sink::buffer(bytes as usize, Some(memory.keep(header.id)))),
            Ok((_, Target::Memory(memory, parts))) => {
                self.memory_sink(connection, header.id, (memory, parts), |bytes| {
                    charge.resize("write", body.len() as u64 + bytes)
                })
            }
            Ok((_, Target::Bounced(asked))) => charge
                .resize("write", body.len() as u64 + bytes)
                .and_then(|()| self.files.sink(connection.role(), &asked, bytes)),
            Err(error) => Err(error),
        };
        let sink = sink.unwrap_or_else(|error| Sink::discard().refused(error));
        Ok(sink.with_body(body)?.paid_by(charge))
    }

    fn received(&self, connection: &Arc<Connection>, header: Header, mut sink: Sink) -> Result<()> {
        let over = Over::of(connection);
        let sent = self.rules().announced(&over, header.id);
        let message = Message::decode(header.kind, &sink.take_body())?;
        // The bytes of a file or of a GPU stop over, and some of lent memory.
        let landed = if matches!(message, Message::Write(_)) { sink.take_landed() } else { None };
        let charge = sink.take_charge();
        let (transfer, outcome) = match message {
            Message::Write(write) if let Some(landed) = landed => {
                let bytes = landed.bytes(header.payload_len as usize);
                if let Some(sent) = &sent
                    && let Err(error) =
                        checks::compare("write", &write.blocks, sent, &checks::of_bytes(&write.blocks, bytes))
                {
                    return self.applied(connection, header, write.transfer, Err(error));
                }
                return self.write_file(connection, header, write, (landed, charge));
            }
            Message::Write(write) => {
                // The sink still keeps the memory in place.
                let outcome = sink.outcome("write").and_then(|()| match &sent {
                    Some(sent) => self.compare(&over, write.handle, write.blocks, sent),
                    None => Ok(()),
                });
                (write.transfer, outcome)
            }
            Message::Reduce(reduce) => return self.reduce(connection, header, reduce, sink, sent),
            _ => (0, Err(Error::protocol("serve", "the peer sent a payload that was not asked for"))),
        };
        // The memory is let go before the peer learns of it.
        drop(sink);
        self.applied(connection, header, transfer, outcome)
    }

    fn closed(&self, connection: &Arc<Connection>, error: Error) {
        connection.let_go();
        let is_there = |lane: &Over| lane.0.strong_count() > 0;
        let gone = self.rules().gone(&Over::of(connection), &error, is_there);
        self.connections.lock().retain(|one| !Arc::ptr_eq(one, connection));
        if gone.ends {
            self.end(&error);
        }
        if gone.broken {
            if let Some(sessions) = self.sessions.upgrade() {
                sessions.registry.refuse(&self.peer);
            }
            tracing::warn!(%error, peer = self.peer.name, "a peer broke the protocol");
        }
    }
}
