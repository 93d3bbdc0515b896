//! One socket: frames in, frames out, payload straight from and into registered memory.
//!
//! A connection never blocks. A *control* connection is driven by the event loop; a *lane*, which carries payload in
//! bulk, is driven by workers of the pool. A thread with something to send sends it immediately where the socket takes it.
#![allow(unsafe_code, reason = "hands raw parts of registered memory to the socket")]

mod driving;
mod ending;
mod incoming;
mod wanted;

use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use towline_proto::session::initiator::{ConnectionId, Opened};

use self::incoming::{Incoming, Reading};
use self::wanted::Appliers;
pub(super) use self::wanted::Wanted;
use super::channel::{Channel, Landing};
use super::parts::{GivenUp, Keep, Late, Outgoing, Payload, QUEUE, SCRATCH, Sink};
use crate::budget::Charge;
use crate::fence::applying::{ApplySlot, ApplySlotView};
use crate::runtime::socket::{Acknowledged, Family, MAX_PARTS, RawPart, Received, Sent};
use crate::runtime::{self, Interest, Token, panic_message};
use crate::wire::{HEADER_LEN, Header};
use crate::{Error, Kind, Result, room};

/// What is read ahead of the frames: a header, its body and a small payload come with one system call.
const STAGING: usize = 16 << 10;

/// Above this weight of unsent frames nothing is read any more: a peer that asks and does not take the answers waits.
const MOST_UNSENT: usize = 1024;

/// After this many receives a connection lets others have their turn.
const TURN: usize = 256;

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Control,
    Lane,
}

/// Who a connection's frames are for.
pub(super) trait Handler: Send + Sync {
    /// A frame without payload has come.
    fn frame(
        &self,
        connection: &Arc<Connection>,
        header: Header,
        body: &[u8],
        files: Vec<OwnedFd>,
    ) -> Result<()>;

    /// The body of a frame with payload has come: where does the payload go?
    fn payload(&self, connection: &Arc<Connection>, header: Header, body: &[u8]) -> Result<Sink>;

    /// The payload has gone there.
    fn received(&self, connection: &Arc<Connection>, header: Header, sink: Sink) -> Result<()>;

    /// What may come over that connection when all that has come is dealt with.
    fn next(&self, connection: &Arc<Connection>) -> Next;

    /// The connection is of no more use. Called once.
    fn closed(&self, connection: &Arc<Connection>, error: Error);
}

/// What may come next over a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// More of what is in flight, from the other side or from another thread of this one.
    More,
    /// A new request, if the other side has one.
    Request,
    /// Nothing before something is asked here.
    Nothing,
}

fn disconnected() -> Error {
    Error::new(Kind::Disconnected, "send", "the connection is closed")
}

/// One socket.
pub(super) struct Connection {
    id: ConnectionId,
    socket: Channel,
    lane: AtomicBool,
    token: OnceLock<Token>,
    handler: Mutex<Option<Arc<dyn Handler>>>,
    authenticated: AtomicBool,
    closed: AtomicBool,
    /// This side ended it without a word of the other's.
    forsaken: AtomicBool,
    /// The other side has said that it ends it, or has ended its direction.
    ended_by_peer: AtomicBool,
    driven: AtomicBool,
    /// What must be done before more is read from a lane.
    held_up: AtomicUsize,
    /// The worker that drove it last.
    driver: AtomicUsize,
    outgoing: Mutex<Outgoing>,
    /// Frames for a lane whose queue was in use: the next thread that has it takes them over. A worker may wait for the other side
    /// with the queue in hand, and nobody else should wait with it.
    late: Mutex<Vec<Late>>,
    incoming: Mutex<Incoming>,
    side: OnceLock<AppliedAt>,
    /// Owner: who applies what came over it.
    appliers: Appliers,
    /// Of a lane: the transcript of its handshake, by which both sides know it.
    name: OnceLock<[u8; 32]>,
    /// Initiator: the other end is the owner's own socket on this host, so that an end is there when it has been made.
    direct: AtomicBool,
    /// What the other host had acknowledged at the last look.
    acknowledged: Mutex<Acknowledged>,
    me: Weak<Connection>,
    itself: Mutex<Option<Arc<Connection>>>,
}

/// On one host, between processes of one user: where it can be seen that the owner applies what came over this connection.
enum AppliedAt {
    Owner(ApplySlot),
    Initiator(ApplySlotView),
}

impl Connection {
    /// Takes a connected socket. Nothing is read until [`watch`](Self::watch).
    pub(super) fn new(
        socket: Channel,
        role: Role,
        authenticated: bool,
        handler: Arc<dyn Handler>,
    ) -> Arc<Connection> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Arc::new_cyclic(|me| Connection {
            id: ConnectionId(NEXT.fetch_add(1, Ordering::Relaxed)),
            socket,
            lane: AtomicBool::new(role == Role::Lane),
            token: OnceLock::new(),
            handler: Mutex::new(Some(handler)),
            authenticated: AtomicBool::new(authenticated),
            closed: AtomicBool::new(false),
            forsaken: AtomicBool::new(false),
            ended_by_peer: AtomicBool::new(false),
            driven: AtomicBool::new(false),
            held_up: AtomicUsize::new(0),
            driver: AtomicUsize::new(usize::MAX),
            outgoing: Mutex::new(Outgoing::default()),
            late: Mutex::default(),
            incoming: Mutex::default(),
            side: OnceLock::new(),
            appliers: Appliers::default(),
            name: OnceLock::new(),
            direct: AtomicBool::new(false),
            acknowledged: Mutex::default(),
            me: me.clone(),
            itself: Mutex::new(None),
        })
    }

    /// Starts reading.
    pub(super) fn watch(self: &Arc<Self>) -> Result<()> {
        let weak = Arc::downgrade(self);
        let mut outgoing = self.outgoing.lock();
        outgoing.armed = (true, outgoing.blocked());
        let token = runtime::reactor()?.add(self.socket.as_fd(), self.interest(outgoing.armed), weak)?;
        let _ = self.token.set(token);
        Ok(())
    }

    /// Its number in this process.
    pub(super) fn id(&self) -> ConnectionId {
        self.id
    }

    /// Initiator: what the rules have to know of it.
    pub(super) fn opened(&self) -> Opened {
        Opened { id: self.id, name: self.name().copied(), same_host: self.same_host() }
    }

    pub(super) fn socket(&self) -> &Channel {
        &self.socket
    }

    pub(super) fn role(&self) -> Role {
        if self.lane.load(Ordering::Acquire) { Role::Lane } else { Role::Control }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// What a connection of a peer takes of this process's memory, with little in it.
    pub(super) fn cost(&self) -> usize {
        let tls = if self.socket.is_plain() { 0 } else { super::channel::TLS_BYTES };
        size_of::<Connection>() + STAGING + SCRATCH + QUEUE + MAX_PARTS * size_of::<RawPart>() + tls
    }

    /// The peer has proven who it is: from now on that handler gets the frames, and pays for what waits in the connection. Called by
    /// the thread that reads.
    pub(super) fn authenticate(&self, handler: impl Handler + 'static, role: Role, charge: Charge) {
        self.incoming.lock().paid_by(charge.account());
        self.queue().paid_by(charge);
        *self.handler.lock() = Some(Arc::new(handler));
        self.authenticated.store(true, Ordering::Release);
        if role == Role::Lane {
            // The event loop is inside this connection; workers may not come in until it has left.
            self.driven.store(true, Ordering::Release);
            self.lane.store(true, Ordering::Release);
        }
    }

    /// One more frame is to come that may carry descriptors. Before the other side can know that it may send it.
    pub(super) fn expect_files(&self) {
        if self.socket.socket().takes_files() {
            self.incoming.lock().expect_files();
        }
    }

    /// Lives until it is closed, whatever else holds it.
    pub(super) fn hold_itself(self: &Arc<Self>) {
        *self.itself.lock() = Some(Arc::clone(self));
    }

    /// Owner: shows there when something of this connection is applied. Before anything of it is.
    pub(super) fn apply_at(&self, slot: ApplySlot) {
        let _ = self.side.set(AppliedAt::Owner(slot));
    }

    /// Initiator: knows where the owner shows that it applies something of this connection.
    pub(super) fn applied_at(&self, slot: ApplySlotView) {
        let _ = self.side.set(AppliedAt::Initiator(slot));
    }

    /// Initiator, of a connection that has ended: where the owner is seen to be in the middle of something that came over it.
    pub(super) fn unfinished(&self) -> Option<ApplySlotView> {
        match self.side.get() {
            Some(AppliedAt::Initiator(slot)) => Some(slot.clone()).filter(ApplySlotView::is_applying),
            _ => None,
        }
    }

    /// Of a lane: what both sides call it.
    pub(super) fn call(&self, name: [u8; 32]) {
        let _ = self.name.set(name);
    }

    pub(super) fn name(&self) -> Option<&[u8; 32]> {
        self.name.get()
    }

    /// Initiator: the owner sees this end at that port.
    pub(super) fn is_seen_at(&self, port: u32) {
        self.direct.store(self.socket.socket().is_direct(port), Ordering::Relaxed);
    }

    /// Initiator: whether it does not leave this host: the owner's kernel then knows of its end as soon as this side has ended it. Between
    /// hosts, bytes may still be on their way, and the owner may still apply what it has of them.
    pub(super) fn same_host(&self) -> bool {
        self.socket.socket().family() == Family::Unix || self.direct.load(Ordering::Relaxed)
    }

    /// When bytes were last acknowledged, where some have been that were on their way at the last look. Only they count: what is sent
    /// in between may be a question whether anybody is there. On one host it is this side's own kernel that acknowledges.
    pub(super) fn last_got_on(&self) -> Option<Instant> {
        let now = self.socket.socket().acknowledged().filter(|_| !self.same_host())?;
        let before = std::mem::replace(&mut *self.acknowledged.lock(), now);
        (before.more && now.bytes > before.bytes).then(|| Instant::now().checked_sub(now.ago)).flatten()
    }

    fn interest(&self, (read, write): (bool, bool)) -> Interest {
        let mut interest = Interest::NONE;
        for (wanted, what) in
            [(read, Interest::READ), (write, Interest::WRITE), (self.role() == Role::Lane, Interest::ONESHOT)]
        {
            if wanted {
                interest = interest | what;
            }
        }
        interest
    }

    /// Tells the event loop what to watch for. Under the lock, so that the last word is the right one.
    fn arm(&self, outgoing: &mut Outgoing) {
        let wanted = (outgoing.weight() <= MOST_UNSENT && !self.is_held_up(), outgoing.blocked());
        if wanted == outgoing.armed && self.role() == Role::Control {
            return;
        }
        outgoing.armed = wanted;
        if let (Some(token), Ok(reactor)) = (self.token.get(), runtime::reactor())
            && !self.is_closed()
        {
            let _ = reactor.modify(*token, self.socket.as_fd(), self.interest(wanted));
        }
    }

    /// [`send`](Self::send), for a frame that is all of it and that nobody takes back.
    pub(super) fn say(&self, head: Vec<u8>) -> Result<()> {
        self.send(head, Vec::new(), Payload::None)
    }

    /// Sends a frame, or queues it where the socket is full.
    pub(super) fn send(&self, head: Vec<u8>, files: Vec<OwnedFd>, payload: Payload) -> Result<()> {
        let mut outgoing = match self.outgoing.try_lock() {
            Some(outgoing) => self.with_late(outgoing),
            None if self.role() == Role::Lane => {
                return self.send_late(Late::Frame { head, files, payload });
            }
            None => self.queue(),
        };
        if self.is_closed() {
            return Err(disconnected());
        }
        let bulk = matches!(payload, Payload::Memory(_)) && self.role() == Role::Lane;
        outgoing.push(head, files, payload);
        if let Some(error) = outgoing.why_broken().cloned() {
            drop(outgoing);
            self.close(error.clone());
            return Err(error);
        }
        if outgoing.blocked() {
            return Ok(());
        }
        if bulk {
            drop(outgoing);
            self.drive_soon();
            return Ok(());
        }
        match self.flush(&mut outgoing) {
            Ok(()) => {
                if self.role() == Role::Control {
                    self.arm(&mut outgoing);
                } else if outgoing.blocked() {
                    drop(outgoing);
                    self.drive_soon();
                }
                Ok(())
            }
            Err(error) => {
                drop(outgoing);
                self.close(error.clone());
                Err(error)
            }
        }
    }

    /// The frames that wait to be sent, all of them.
    fn queue(&self) -> MutexGuard<'_, Outgoing> {
        self.with_late(self.outgoing.lock())
    }

    /// [`queue`](Self::queue), for the thread that the socket has called; `None` where another thread has the frames, on a plain control
    /// connection. That one sends what it queues, and says what to watch for. TLS may have something to send that nobody queued.
    ///
    /// An answer can be there before the call that sends the request is over. To wait for that call here would hold the answer
    /// up, and the call, which would have to wake this thread.
    fn queue_if_free(&self) -> Option<MutexGuard<'_, Outgoing>> {
        match self.outgoing.try_lock() {
            Some(outgoing) => Some(self.with_late(outgoing)),
            None if self.role() == Role::Control && self.socket.is_plain() => None,
            None => Some(self.queue()),
        }
    }

    fn with_late<'a>(&'a self, mut outgoing: MutexGuard<'a, Outgoing>) -> MutexGuard<'a, Outgoing> {
        for late in std::mem::take(&mut *self.late.lock()) {
            match late {
                Late::Frame { head, files, payload } => outgoing.push(head, files, payload),
                // The next sender learns of it.
                Late::Answer(request) => drop(outgoing.answered(request)),
            }
        }
        outgoing
    }

    /// Initiator: a reply to that request has come. One that comes before all of the request was sent breaks the protocol.
    ///
    /// While another thread is sending, nobody knows how much was sent: on a control connection this thread looks, or the next sender.
    pub(super) fn answered(&self, request: u64) -> Result<()> {
        match self.queue_if_free() {
            Some(mut outgoing) => outgoing.answered(request),
            None => {
                self.late.lock().push(Late::Answer(request));
                Ok(())
            }
        }
    }

    /// Whether there is nothing that waits to be sent.
    pub(super) fn has_sent_all(&self) -> bool {
        self.queue().is_empty()
    }

    /// Leaves a frame to the thread that has the queue now.
    fn send_late(&self, late: Late) -> Result<()> {
        self.late.lock().push(late);
        if self.is_closed() {
            // The thread that dropped what was queued may not have found this.
            self.late.lock().clear();
            return Err(disconnected());
        }
        self.drive_soon();
        Ok(())
    }

    /// Takes back what has not been sent of that transfer: afterwards its memory is not read any more.
    pub(super) fn withdraw(&self, belongs: impl Fn(&Keep) -> bool) -> Vec<u64> {
        let mut outgoing = self.queue();
        let requests = outgoing.withdraw(belongs);
        if let Some(error) = outgoing.why_broken().cloned() {
            drop(outgoing);
            self.close(error);
        }
        requests
    }

    /// Owner: takes the answer to that request back where nothing of it has been sent.
    pub(super) fn withdraw_answer(&self, request: u64) -> bool {
        self.queue().withdraw_whole(request)
    }

    /// Lets a payload that is coming in go nowhere: afterwards its memory is not written any more.
    pub(super) fn discard(&self, belongs: impl Fn(&Keep) -> bool) {
        self.give_up(GivenUp::NotWanted, belongs);
    }

    fn give_up(&self, why: GivenUp, belongs: impl Fn(&Keep) -> bool) {
        let mut incoming = self.incoming.lock();
        if let Reading::Payload { sink, .. } = &mut incoming.reading
            && sink.keeps(belongs)
        {
            sink.give_up(why);
        }
    }

    /// Initiator: whether the owner shows here when it is in the middle of something that came over this connection.
    pub(super) fn shows_what_is_applied(&self) -> bool {
        self.side.get().is_some()
    }

    /// Sends as much as the socket takes.
    fn flush(&self, outgoing: &mut Outgoing) -> Result<()> {
        outgoing.check_answers()?;
        while let Some((head, files)) = outgoing.descriptors() {
            // Descriptors travel with the first byte of their frame, so its head goes alone.
            let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            match self.socket.send(&[IoSlice::new(head)], &borrowed)? {
                Sent::Bytes(sent) => outgoing.sent(sent),
                Sent::WouldBlock => {
                    outgoing.set_blocked(true);
                    return Ok(());
                }
            }
        }
        while !outgoing.is_empty() {
            if outgoing.descriptors().is_some() {
                return self.flush(outgoing);
            }
            let (parts, lent) = outgoing.gather();
            // SAFETY: the parts are frames that the queue owns and memory that their `Keep` pins; both stay while
            // the queue is locked.
            match unsafe { self.socket.send_raw(parts, lent) }? {
                Sent::Bytes(sent) => outgoing.sent(sent),
                Sent::WouldBlock => {
                    outgoing.set_blocked(true);
                    return Ok(());
                }
            }
        }
        // What TLS has encrypted and the socket has not taken yet.
        let taken = self.socket.flush()?;
        outgoing.set_blocked(!taken);
        Ok(())
    }

    /// Sends payload, and waits for room in the system call itself: one call carries more than going round by poll, and a
    /// fifth more bytes per second went through loopback TCP. Not while something comes in: the other side may wait in the
    /// same way; and not while other work waits for a thread. False: nothing was sent.
    fn send_patiently(&self) -> Result<bool> {
        if matches!(self.incoming.lock().reading, Reading::Payload { .. }) {
            return Ok(false);
        }
        let mut outgoing = self.queue();
        if !outgoing.begins_with_payload() || self.socket.wait_readable(Duration::ZERO)? {
            return Ok(false);
        }
        let (parts, _) = outgoing.gather();
        // SAFETY: as in `flush`.
        let sent = runtime::pool().aside(|| unsafe { self.socket.send_raw_patiently(parts) }).transpose()?;
        let Some(Sent::Bytes(sent)) = sent else { return Ok(false) };
        outgoing.sent(sent);
        outgoing.set_blocked(false);
        Ok(true)
    }

    /// Reads and handles what has come. False: nothing more for now.
    ///
    /// A patient reader waits for the rest of a payload in the system call itself, as [`send_patiently`](Self::send_patiently)
    /// does; not while there is something to send, for which the other side may wait.
    fn read(self: &Arc<Self>, patient: bool) -> Result<bool> {
        if self.is_held_up() {
            // Nobody waits for what is held up any more, and nothing else would notice.
            return if self.socket.hung_up() { Err(disconnected()) } else { Ok(false) };
        }
        let mut incoming = self.incoming.lock();
        if std::mem::take(&mut incoming.left_over) {
            self.digest(incoming)?;
            return Ok(true);
        }
        let idle = match self.queue_if_free() {
            Some(outgoing) if outgoing.weight() > MOST_UNSENT => return Ok(false),
            Some(outgoing) => outgoing.is_empty(),
            None => false,
        };
        let came = match &mut incoming.reading {
            Reading::Payload { sink, left, .. } if *left > 0 => {
                let (left_before, exact, lent) = (*left, self.checks_in_one_step(sink), sink.is_lent());
                let exact = exact && !(lent && self.socket.is_encrypted());
                let _wanted = (!exact).then(|| self.wanted_by(sink));
                #[cfg(test)]
                let about = moments::about(self, sink);
                #[cfg(test)]
                moments::reach(moments::Moment::Landing, &about);
                let applier = self.appliers.one();
                let look = || {
                    self.look(
                        &applier,
                        #[cfg(test)]
                        &about,
                    )
                };
                let parts = sink.parts(left_before);
                // SAFETY: the sink's `Keep` pins its memory, and the connection's lock keeps the sink in place.
                let receive = |patiently: bool| match (exact, patiently) {
                    // SAFETY: as above.
                    (true, _) => unsafe { self.socket.recv_raw_if(parts, patiently, &look) },
                    // SAFETY: as above.
                    (false, _) if lent => unsafe { self.socket.recv_lent(parts, patiently) },
                    // SAFETY: as above.
                    (false, true) => unsafe { self.socket.recv_raw_patiently(parts) }.map(Landing::There),
                    // SAFETY: as above.
                    (false, false) => unsafe { self.socket.recv_raw(parts) }.map(Landing::There),
                };
                let waited = (patient && idle).then(|| runtime::pool().aside(|| receive(true))).flatten();
                let received = match waited.unwrap_or_else(|| receive(false))? {
                    Landing::There(received) => received,
                    Landing::Unwanted(bytes) => {
                        sink.give_up(GivenUp::HungUp);
                        Received::Bytes(bytes)
                    }
                    Landing::Gone(bytes) => {
                        sink.give_up(GivenUp::Gone);
                        Received::Bytes(bytes)
                    }
                };
                if let Received::Bytes(bytes) = received {
                    *left -= bytes as u64;
                    sink.advance(bytes);
                }
                received
            }
            _ => incoming.receive(&self.socket)?,
        };
        match came {
            Received::WouldBlock => return Ok(false),
            Received::Eof => {
                self.peer_ends_it();
                return Err(Error::new(Kind::Disconnected, "receive", "the peer has closed the connection"));
            }
            Received::Bytes(_) => {}
        }
        self.digest(incoming)?;
        Ok(true)
    }

    /// Handles every whole frame that was read. The lock is given up while a handler runs.
    fn digest<'a>(self: &'a Arc<Self>, mut incoming: MutexGuard<'a, Incoming>) -> Result<()> {
        loop {
            let available = incoming.end - incoming.start;
            match &mut incoming.reading {
                Reading::Header | Reading::Payload { left: 1.., .. } if self.is_held_up() => {
                    incoming.left_over = true;
                    return Ok(());
                }
                Reading::Header => {
                    let Some(bytes) =
                        incoming.staging[incoming.start..incoming.end].first_chunk::<HEADER_LEN>()
                    else {
                        return Ok(());
                    };
                    let header = Header::decode(bytes)?;
                    header.check(self.authenticated.load(Ordering::Acquire))?;
                    incoming.start += HEADER_LEN;
                    if header.rest() > incoming.staging.len() {
                        incoming.resize(header.rest() + STAGING)?;
                    }
                    incoming.reading = Reading::Body(header);
                }
                Reading::Body(header) => {
                    let header = *header;
                    if available < header.rest() {
                        return Ok(());
                    }
                    let start = incoming.start;
                    let body =
                        room::copy("receive", header.body(&incoming.staging[start..start + header.rest()])?)?;
                    incoming.start += header.rest();
                    if incoming.staging.len() > 2 * STAGING && incoming.end - incoming.start <= STAGING {
                        incoming.resize(STAGING)?;
                    }
                    let files = incoming.take_files(header, &self.socket)?;
                    incoming.reading = Reading::Header;
                    let Some(handler) = self.handler() else { return Ok(()) };
                    drop(incoming);
                    let sink = if header.payload_len > 0 {
                        Some(handler.payload(self, header, &body)?)
                    } else {
                        handler.frame(self, header, &body, files)?;
                        None
                    };
                    incoming = self.incoming.lock();
                    if let Some(mut sink) = sink {
                        // A stop or a close that came while nobody held the lock did not find this sink.
                        if sink.keeps(Keep::is_over) {
                            sink.give_up(GivenUp::NotWanted);
                        } else if self.is_closed() {
                            sink.give_up(GivenUp::HungUp);
                        }
                        incoming.reading = Reading::Payload { header, sink, left: header.payload_len };
                    }
                }
                Reading::Payload { left, .. } if *left > 0 => {
                    if available == 0 {
                        return Ok(());
                    }
                    let Incoming { staging, start, end, reading, .. } = &mut *incoming;
                    let Reading::Payload { sink, left, .. } = reading else { return Ok(()) };
                    let take = (*end - *start).min(usize::try_from(*left).unwrap_or(usize::MAX));
                    let bytes = &staging[*start..*start + take];
                    if self.checks_in_one_step(sink) && !sink.is_lent() {
                        let applier = self.appliers.one();
                        let look = || {
                            self.look(
                                &applier,
                                #[cfg(test)]
                                &None,
                            )
                        };
                        // SAFETY: as for the direct receive: the sink's `Keep` pins its memory.
                        unsafe { sink.fill_if(bytes, &look) };
                    } else {
                        let _wanted = self.wanted_by(sink);
                        // SAFETY: as before.
                        unsafe { sink.fill(bytes) };
                    }
                    *start += take;
                    *left -= take as u64;
                }
                Reading::Payload { .. } => {
                    let Reading::Payload { header, sink, .. } =
                        std::mem::replace(&mut incoming.reading, Reading::Header)
                    else {
                        return Ok(());
                    };
                    let Some(handler) = self.handler() else { return Ok(()) };
                    drop(incoming);
                    handler.received(self, header, sink)?;
                    incoming = self.incoming.lock();
                }
            }
        }
    }

    /// What may come over it now.
    pub(super) fn next(self: &Arc<Self>) -> Next {
        self.handler().map_or(Next::Nothing, |handler| handler.next(self))
    }

    fn handler(&self) -> Option<Arc<dyn Handler>> {
        self.handler.lock().clone()
    }

    /// [`move_all`](Self::move_all); a panic in who handles the frames is an error, and ends the connection.
    fn pump(self: &Arc<Self>, patient: bool) -> Result<bool> {
        catch_unwind(AssertUnwindSafe(|| self.move_all(patient))).unwrap_or_else(|payload| {
            let message =
                format!("what came over a connection made this side panic: {}", panic_message(payload));
            tracing::error!(%message, "a connection is ended");
            Err(Error::new(Kind::Internal, "receive", message))
        })
    }

    /// Sends and reads until neither goes on, or until others should have their turn. True: there is something that this thread
    /// could not send.
    fn move_all(self: &Arc<Self>, patient: bool) -> Result<bool> {
        let mut stuck = false;
        for _ in 0..TURN {
            if !(patient && self.send_patiently()?)
                && let Some(mut outgoing) = self.queue_if_free()
            {
                self.flush(&mut outgoing)?;
                stuck = outgoing.blocked();
            }
            if self.is_closed() || !self.read(patient)? {
                break;
            }
        }
        // The event loop sees what waits in the socket, not what TLS has taken from it already.
        while !self.is_closed() && self.socket.holds_bytes() && self.read(false)? {}
        // Handlers may have queued answers that the socket takes at once.
        if let Some(mut outgoing) = self.queue_if_free()
            && !(outgoing.blocked() || patient && outgoing.begins_with_payload())
        {
            self.flush(&mut outgoing)?;
            stuck = outgoing.blocked();
        }
        Ok(stuck)
    }
}

#[cfg(test)]
mod files_tests;
#[cfg(test)]
pub(crate) mod moments;
#[cfg(test)]
mod tests;
