//! The owner's side of a connection: verifies tickets, serves requests, and minds the pins of a peer on this host.

mod admitting;
mod beating;
mod grants;
mod local;
mod standing;
#[cfg(test)]
mod tests;
mod unwanted;

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};

use towline_proto::session::allowance::{Allowance, exhausted};
use towline_proto::session::counting::{Counting, Due, Follower};

use self::admitting::Admitted;
use self::grants::Grants;
use self::local::Local;
pub(super) use self::standing::Standing;
use self::unwanted::EndingLanes;
use super::checks::{self, Announced};
use super::connection::{Connection, Handler, Next, Role, Wanted};
use super::files::{Files, Source, Written};
use super::parts::{Keep, Landed, Payload, Sink, hung_up, readable};
use crate::budget::{Account, Charge};
use crate::fence::applying::Desk;
use crate::fence::life::LifeView;
use crate::fence::pins::Side;
use crate::fence::watcher;
use crate::identity::Identity;
use crate::notify::Notification;
use crate::operations::Claimer;
use crate::region::{Deed, Stream, stale};
use crate::runtime::socket::Lane;
use crate::runtime::{self, Device};
use crate::session::Sessions;
use crate::session::apply::{self, Word};
use crate::sync::lock;
use crate::wire::handshake::SessionKey;
use crate::wire::{self, Block, Done, Granted, Header, Import, Message, WireError};
use crate::{Access, Error, Kind, Result};

/// A reduction's bytes are held until all of them are there, so a frame carries at most this many.
const MOST_REDUCED: u64 = 4 << 20;

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
    grants: Grants,
    /// Without it the peer may not even send messages.
    standing: Mutex<Standing>,
    counting: Mutex<Counting<(Arc<Connection>, u64)>>,
    announced: Announced,
    pub(super) allowance: Arc<Allowance>,
    /// What its messages take of the queue of those that are not received yet.
    messages: Arc<Account>,
    _charge: Charge,
    files: Arc<Files>,
    ending: EndingLanes,
    pub(super) local: Option<Local>,
    closed: AtomicBool,
    /// The peer has said that nothing of it is under way any more.
    goodbye: AtomicBool,
    beating: AtomicBool,
    /// Heartbeats since the last frame of the peer.
    unanswered: AtomicU32,
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
        let serving = Arc::new(Serving {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            sessions: Arc::downgrade(sessions),
            peer,
            key,
            challenge,
            connections: Mutex::new(vec![Arc::clone(connection)]),
            grants: Grants::default(),
            standing: Mutex::new(standing),
            counting: Mutex::new(Counting::new(&allowance)),
            announced: Announced::default(),
            messages: sessions.registry.notifications.account(),
            allowance,
            _charge: charge,
            files: Arc::default(),
            ending: EndingLanes::default(),
            local,
            closed: AtomicBool::new(false),
            goodbye: AtomicBool::new(false),
            beating: AtomicBool::new(false),
            unanswered: AtomicU32::new(0),
            #[cfg(test)]
            panics: AtomicBool::new(false),
        });
        sessions.serve(&serving);
        // The first connection is at the first place.
        if let Some(desk) = serving.local.as_ref().and_then(Local::desk) {
            connection.apply_at(desk);
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
        connection.send(head, files, Payload::None, Keep::Nothing)
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
        let open: usize = same.map(|one| lock(&one.connections).len()).sum();
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
        lock(&serving.connections).push(Arc::clone(connection));
        // Whoever ends it closes the connections that it finds after it has said so.
        if serving.closed.load(Ordering::Acquire) {
            lock(&serving.connections).clear();
            return Err(Error::new(Kind::Disconnected, "contact", "the session is over"));
        }
        let desk = serving.local.as_ref().and_then(Local::desk);
        let place = desk.as_ref().map(Desk::index).or_else(|| connection.socket().socket().peer_port());
        if let Some(desk) = desk {
            connection.apply_at(desk);
        }
        let ready = wire::Ready { session: id, name: sessions.registry.name().to_owned(), local: place };
        connection.authenticate(serving, Role::Lane, charge);
        connection.send(Message::from(ready).frame(0, 0, 0), Vec::new(), Payload::None, Keep::Nothing)
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
        self.closed.load(Ordering::Acquire)
    }

    pub(super) fn sessions(&self) -> Result<Arc<Sessions>> {
        self.sessions
            .upgrade()
            .ok_or_else(|| Error::new(Kind::Disconnected, "serve", "the endpoint is closed"))
    }

    /// Ends it on this side's wish.
    pub(crate) fn close(&self) {
        let connections = lock(&self.connections).clone();
        for connection in &connections {
            if connection.role() == Role::Control {
                connection.bye(None);
            }
        }
        self.end(&Error::new(Kind::Canceled, "serve", "the endpoint was closed"));
    }

    fn end(&self, error: &Error) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(local) = &self.local {
            local.mail.mailbox.close();
        }
        let connections: Vec<_> = lock(&self.connections).drain(..).collect();
        for connection in connections {
            connection.close(error.clone());
            connection.let_go();
        }
        let grants = self.grants.take();
        lock(&self.counting).clear();
        self.files.clear();
        self.ending.clear();
        if let Some(local) = &self.local {
            drop(lock(&local.alive).take());
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
            for granting in &grants {
                // A peer says goodbye only when nothing of it is under way.
                if self.goodbye.load(Ordering::Acquire) {
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
                && !this.closed.load(Ordering::Acquire)
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
                connection.send(frame, Vec::new(), Payload::None, Keep::Nothing)?;
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
        connection.send(frame, files, Payload::None, Keep::Nothing)
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

    fn read(self: &Arc<Self>, connection: &Arc<Connection>, request: u64, read: &wire::Read) -> Result<()> {
        let admitted = self.admit(read.handle, Access::READ, &read.blocks, request);
        if admitted.is_ok() {
            let bytes = read.blocks.iter().map(|block| u64::from(block.len)).sum();
            self.served(read.handle, Deed::Read(bytes));
        }
        let checked = self.announced.take(connection, request).is_some();
        match admitted {
            Ok(Admitted::Bounced(asked)) => {
                match self.files.at(&asked.source).read(self, connection, request, asked, checked) {
                    Ok(()) => Ok(()),
                    Err(error) => self.answer_read(connection, request, Err(error)),
                }
            }
            Ok(Admitted::Memory(keep, parts)) => {
                let bytes: u64 = parts.iter().map(|part| part.len as u64).sum();
                let mut head = Message::from(wire::Data { outcome: Ok(()) }).frame(request, bytes, 0);
                if checked {
                    match self.checks(connection, "read", read.handle, Access::READ, &read.blocks) {
                        Ok(checks) => head = checks::before(checks, request, head),
                        Err(error) => return self.answer_read(connection, request, Err(error)),
                    }
                }
                connection.send(head, Vec::new(), Payload::Memory(readable(parts)), keep)
            }
            Err(error) => self.answer_read(connection, request, Err(error)),
        }
    }

    pub(super) fn answer_read(
        &self,
        connection: &Connection,
        request: u64,
        outcome: Result<()>,
    ) -> Result<()> {
        let data = wire::Data { outcome: outcome.map_err(|error| WireError::from(&error)) };
        let head = Message::from(data).frame(request, 0, 0);
        connection.send(head, Vec::new(), Payload::None, Keep::Nothing)
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
        let (serving, answered, write_handle) = (Arc::clone(self), Arc::clone(connection), write.handle);
        let work = move || {
            // A disk may take its time, and a GPU cannot be looked at in one step: whoever can see it is told meanwhile.
            let outcome = wanted("write", &answered).and_then(|wanted| {
                match serving.admit(write.handle, Access::WRITE, &write.blocks, header.id)? {
                    Admitted::Bounced(asked) => asked.write(landed, &|| wanted.stands_by(None)),
                    Admitted::Memory(..) => {
                        Err(Error::new(Kind::Internal, "write", "a file has become memory"))
                    }
                }
            });
            drop(charge);
            serving.applied(&answered, header, write.transfer, outcome)
        };
        let lane = connection.role() == Role::Lane;
        let device = match self.check("write", write_handle, Access::WRITE, &[]) {
            Ok((region, ..)) => Source::of(&region).map(|source| source.device()),
            Err(_) => None,
        };
        let hangs = matches!(device, Some(Device::Disk(_)));
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
        &self,
        connection: &Connection,
        header: Header,
        transfer: u64,
        outcome: Result<()>,
    ) -> Result<()> {
        // Before the answer: once the user has it, it may say that nothing more belongs to this transfer.
        if transfer != 0 {
            let due = lock(&self.counting).piece(transfer, outcome.is_ok())?;
            self.settle(due)?;
        }
        self.answer(connection, header.id, outcome.map(|()| header.payload_len))
    }

    fn answer(&self, connection: &Connection, request: u64, outcome: Result<u64>) -> Result<()> {
        let done = Done { outcome: outcome.map_err(|error| WireError::from(&error)) };
        let head = Message::from(done).frame(request, 0, 0);
        connection.send(head, Vec::new(), Payload::None, Keep::Nothing)
    }

    /// An operation on one word of a region, for whoever waits for its outcome; it gives none where that one does not stand by it
    /// any more.
    fn word(
        &self,
        awaited: Option<&Connection>,
        handle: u32,
        offset: u64,
        act: impl FnOnce(&dyn Fn() -> bool, Word) -> Result<Option<u64>>,
    ) -> Result<u64> {
        let block = Block { offset, len: 8 };
        let (keep, parts) = self.admit_words("atomic", handle, &[block], 0)?;
        let lent = keep.is_lent();
        let wanted = awaited.map(|connection| wanted_at_once("atomic", connection, lent)).transpose()?;
        let word = parts.first().map_or(std::ptr::null_mut(), |part| part.ptr);
        if word.is_null() || word.addr() % 8 != 0 {
            self.refused(handle);
            return Err(Error::invalid(
                "atomic",
                format!("the word at offset {offset} is not aligned to 8 bytes"),
            ));
        }
        self.served(handle, Deed::Written(8));
        let stands_by = || wanted.as_ref().is_none_or(|wanted| wanted.stands_by(Some(word)));
        act(&stands_by, Word { at: word, lent })?.ok_or_else(|| hung_up("atomic"))
    }

    /// Does what follows a transfer, or says that it will not be done.
    fn settle(&self, due: Due<(Arc<Connection>, u64)>) -> Result<()> {
        let (followers, act) = match due {
            Due::Act(followers) => (followers, true),
            Due::Drop(followers) => (followers, false),
        };
        for Follower { message, answer, .. } in followers {
            let outcome = if act {
                // A signal whose outcome somebody waits for is a change like a write.
                self.act(message, answer.as_ref().map(|(connection, _)| &**connection))
            } else {
                Err(Error::new(Kind::Canceled, "signal", "the transfer before it failed"))
            };
            match answer {
                Some((connection, request)) => self.answer(&connection, request, outcome)?,
                None if act => drop(outcome?),
                None => {}
            }
        }
        Ok(())
    }

    fn act(&self, message: Message, awaited: Option<&Connection>) -> Result<u64> {
        match message {
            Message::Notify(notify) => {
                self.check_standing()?;
                let notification = Notification { from: self.peer.clone(), message: notify.message };
                let charge = self.allowance.charge("notify", notification.cost())?;
                self.sessions()?.registry.deliver(notification, Some((&self.messages, charge))).map(|()| 0)
            }
            Message::Signal(signal) => {
                self.word(awaited, signal.handle, signal.offset, |look, word| match awaited {
                    Some(_) => apply::signal_if(look, word, signal.add),
                    None => apply::signal(word, signal.add).map(Some),
                })
            }
            _ => Ok(0),
        }
    }

    /// Something is to follow the pieces of a transfer.
    fn follow(&self, connection: &Arc<Connection>, request: u64, message: Message) -> Result<()> {
        let (transfer, pieces) = match &message {
            Message::Signal(signal) => (signal.transfer, signal.pieces),
            Message::Notify(notify) => (notify.transfer, notify.pieces),
            _ => (0, 0),
        };
        // Request 0 wants no answer; a signal that is refused then is not worth the session.
        let alone = request == 0 && matches!(message, Message::Signal(_));
        let answer = (request != 0).then(|| (Arc::clone(connection), request));
        let due = lock(&self.counting).follow(transfer, pieces, Follower::new(message, answer))?;
        let settled = self.settle(due);
        if alone { Ok(()) } else { settled }
    }

    fn held(self: &Arc<Self>, files: Vec<OwnedFd>) -> Result<()> {
        let (Some(local), Some(life)) = (&self.local, files.into_iter().next()) else {
            return Err(Error::protocol("serve", "a life page came that nobody asked for"));
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
        if let Some(alive) = lock(&local.alive).as_mut() {
            alive.1 = watch;
        }
        Ok(())
    }
}

impl Stream for Serving {
    fn id(&self) -> u64 {
        self.id
    }

    fn break_off(&self, generation: u64) {
        let connections = lock(&self.connections).clone();
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
        lock(&self.connections).iter().find(|one| one.role() == Role::Control).cloned()
    }
}

/// Refuses what an initiator asked for that has hung up since: it has told its caller that nothing of it happens any more. To be
/// held until it is done.
fn wanted<'a>(op: &'static str, connection: &'a Connection) -> Result<Wanted<'a>> {
    connection.wanted().ok_or_else(|| hung_up(op))
}

/// The same for what is done at once after a look, where that is possible; in memory that was lent it is not.
fn wanted_at_once<'a>(op: &'static str, connection: &'a Connection, lent: bool) -> Result<Wanted<'a>> {
    let wanted = if lent { connection.wanted() } else { connection.wanted_at_once() };
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
        self.unanswered.store(0, Ordering::Relaxed);
        #[cfg(test)]
        assert!(!self.panics.load(Ordering::Relaxed), "on purpose");
        match Message::decode(header.kind, body)? {
            Message::Import(import) => self.import(connection, header.id, import),
            Message::Release(release) => {
                if let Some(granting) = self.grants.release(release.handle) {
                    granting.lent.back();
                }
                Ok(())
            }
            Message::Ask(ask) => self.answer_query(connection, header.id, ask),
            Message::Read(read) => self.read(connection, header.id, &read),
            Message::Atomic(atomic) => {
                let done = self.word(Some(connection), atomic.handle, atomic.offset, |look, word| {
                    apply::atomic(look, word, atomic.op)
                });
                self.answer(connection, header.id, done)
            }
            message @ (Message::Signal(_) | Message::Notify(_)) => {
                self.follow(connection, header.id, message)
            }
            Message::Cancel(_) => {
                let due = lock(&self.counting).forget(header.id);
                self.settle(due)
            }
            Message::Withdraw(_) => self.withdraw(connection, header.id),
            Message::EndLane(end) => self.end_lane(connection, header.id, &end.lane),
            Message::Finish(finish) => self.finish(finish),
            Message::Check(check) => {
                let charge = self.allowance.charge("serve", checks::cost(&check.checks))?;
                self.announced.put(connection, header.id, check.checks, charge);
                Ok(())
            }
            Message::Held(_) => self.held(files),
            Message::Ping(_) => connection.send(
                Message::from(wire::Pong {}).frame(header.id, 0, 0),
                Vec::new(),
                Payload::None,
                Keep::Nothing,
            ),
            Message::Pong(_) => Ok(()),
            Message::Bye(_) => {
                // A peer says so only when it holds no pin and makes none any more.
                self.goodbye.store(true, Ordering::Release);
                if let Some(local) = &self.local {
                    local.pins.let_go();
                }
                Err(Error::new(Kind::Disconnected, "serve", "the peer has closed"))
            }
            other => Err(Error::protocol("serve", format!("a user does not send {:?}", other.kind()))),
        }
    }

    fn next(&self, _: &Arc<Connection>) -> Next {
        if self.files.is_reading() { Next::More } else { Next::Request }
    }

    fn payload(&self, connection: &Arc<Connection>, header: Header, body: &[u8]) -> Result<Sink> {
        self.unanswered.store(0, Ordering::Relaxed);
        let (handle, blocks, buffered) = match Message::decode(header.kind, body)? {
            Message::Write(write) => (write.handle, write.blocks, false),
            Message::Reduce(reduce) if header.payload_len <= MOST_REDUCED => {
                (reduce.handle, reduce.blocks, true)
            }
            other => {
                return Err(Error::protocol("serve", format!("a user does not send {:?}", other.kind())));
            }
        };
        let bytes: u64 = blocks.iter().map(|block| u64::from(block.len)).sum();
        if bytes != header.payload_len {
            return Err(Error::protocol("serve", "the payload's length is not that of its blocks"));
        }
        let buffer = if buffered { bytes as usize } else { 0 };
        let charge = self.allowance.charge("write", body.len() + buffer);
        // A refusal is answered when the payload has passed, so that the stream stays whole; there is room for that in any case.
        let (admitted, mut charge) = match charge {
            Ok(charge) => (self.admit(handle, Access::WRITE, &blocks, header.id), charge),
            Err(error) => (Err(error), self.allowance.charge("write", body.len())?),
        };
        if admitted.is_ok() {
            self.served(handle, Deed::Written(bytes));
        }
        let sink = match admitted {
            Ok(Admitted::Memory(keep, _)) if buffered => {
                Sink::buffer(bytes as usize, keep).unwrap_or_else(|error| Sink::discard().refused(error))
            }
            Ok(Admitted::Memory(keep, parts)) => Sink::memory(parts, keep),
            Ok(Admitted::Bounced(asked)) if buffered => {
                Sink::discard().refused(asked.no_words("reduce_into"))
            }
            Ok(Admitted::Bounced(asked)) => charge
                .resize("write", body.len() as u64 + bytes)
                .and_then(|()| self.files.sink(connection.role(), &asked, bytes))
                .unwrap_or_else(|error| Sink::discard().refused(error)),
            Err(error) => Sink::discard().refused(error),
        };
        Ok(sink.with_body(body)?.paid_by(charge))
    }

    fn received(&self, connection: &Arc<Connection>, header: Header, mut sink: Sink) -> Result<()> {
        let sent = self.announced.take(connection, header.id);
        let message = Message::decode(header.kind, &sink.take_body())?;
        // Only the bytes of a file or of a GPU stop over.
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
                    Some(sent) => {
                        let arrived =
                            self.checks(connection, "write", write.handle, Access::WRITE, &write.blocks)?;
                        checks::compare("write", &write.blocks, sent, &arrived)
                    }
                    None => Ok(()),
                });
                (write.transfer, outcome)
            }
            Message::Reduce(reduce) => {
                let outcome = sink.outcome("reduce_into").and_then(|()| {
                    if let Some(sent) = &sent {
                        let arrived = checks::of_bytes(&reduce.blocks, &sink.buffer);
                        checks::compare("reduce_into", &reduce.blocks, sent, &arrived)?;
                    }
                    let (keep, parts) =
                        self.admit_words("reduce_into", reduce.handle, &reduce.blocks, header.id)?;
                    let lent = keep.is_lent();
                    let wanted = wanted_at_once("reduce_into", connection, lent)?;
                    let stands_by = || wanted.stands_by(parts.first().map(|part| part.ptr));
                    match apply::reduce(&stands_by, &parts, lent, &sink.buffer, reduce.op, reduce.dtype)? {
                        true => Ok(()),
                        false => Err(hung_up("reduce_into")),
                    }
                });
                (reduce.transfer, outcome)
            }
            _ => (0, Err(Error::protocol("serve", "a payload that nobody asked for"))),
        };
        // The memory is let go before the peer learns of it.
        drop(sink);
        self.applied(connection, header, transfer, outcome)
    }

    fn closed(&self, connection: &Arc<Connection>, error: Error) {
        connection.let_go();
        self.announced.forget(connection);
        match connection.role() {
            Role::Control => self.end(&error),
            Role::Lane => {
                self.ending.left(connection);
                lock(&self.connections).retain(|one| !Arc::ptr_eq(one, connection));
                // Nobody knows what a panic has left behind.
                if error.kind() == Kind::Internal {
                    self.end(&error);
                }
            }
        }
        if error.kind() == Kind::Protocol {
            if let Some(sessions) = self.sessions.upgrade() {
                sessions.registry.refuse(&self.peer);
            }
            tracing::warn!(%error, peer = self.peer.name, "a peer broke the protocol");
        }
    }
}
