//! The user: what the rules of the initiator's role say is done to its transfers.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use towline_proto::session::initiator::{
    Action, Actions, Asks, ConnectionId, Ended, Landing, Look, Reply, Times, Transfer, Waiter,
};
use towline_proto::transfer::State;
use towline_proto::wire::{Block, Cancel, Message, Notify, Read, Write};
use towline_proto::{Error, Kind, Result};

use crate::network::{Came, Frame, INBOX, Memory};
use crate::world::{CONTROL, Event, GUARD, LIMIT, Play, World, byte_of, room_of};

/// The time of the simulation, for code that has no world at hand.
#[derive(Clone)]
pub(crate) struct Clock {
    pub(crate) start: Instant,
    pub(crate) micros: Arc<AtomicU64>,
}

impl Clock {
    pub(crate) fn now(&self) -> Instant {
        self.start + Duration::from_micros(self.micros.load(Ordering::Relaxed))
    }
}

/// One transfer.
pub(crate) struct Move {
    pub(crate) id: u64,
    pub(crate) write: bool,
    pub(crate) notifies: bool,
    pub(crate) started: Instant,
    pub(crate) range: std::ops::Range<usize>,
    pub(crate) unit_len: usize,
    pub(crate) memory: Mutex<Vec<u8>>,
    /// What names the local memory.
    holds: AtomicUsize,
    /// What the owner may still be at.
    pub(crate) outstanding: AtomicI64,
    repeated: AtomicUsize,
    pub(crate) inner: Mutex<Inner>,
    clock: Clock,
}

pub(crate) struct Inner {
    pub(crate) state: State,
    pub(crate) progress: Instant,
    pub(crate) stopped: Option<Instant>,
    pub(crate) ended: Option<Instant>,
}

impl Move {
    pub(crate) fn new(
        id: u64,
        (write, notifies): (bool, bool),
        range: std::ops::Range<usize>,
        unit_len: usize,
        clock: &Clock,
    ) -> Arc<Move> {
        let now = clock.now();
        let state = State::new(range.len() / unit_len);
        let fill = |place| if write { byte_of(id as usize, place) } else { 0 };
        Arc::new(Move {
            id,
            write,
            notifies,
            started: now,
            memory: Mutex::new(range.clone().map(fill).collect()),
            range,
            unit_len,
            holds: AtomicUsize::new(0),
            outstanding: AtomicI64::new(0),
            repeated: AtomicUsize::new(0),
            inner: Mutex::new(Inner { state, progress: now, stopped: None, ended: None }),
            clock: clock.clone(),
        })
    }

    pub(crate) fn ended(&self) -> Option<Instant> {
        self.inner.lock().ended
    }

    /// Nothing of it changes anything any more.
    pub(crate) fn is_quiet(&self) -> bool {
        self.ended().is_some() && self.outstanding.load(Ordering::Relaxed) == 0
    }

    /// It ends when all has reported and nothing names its memory.
    fn deliver(&self) {
        let mut inner = self.inner.lock();
        if inner.state.ended().is_some() && inner.ended.is_none() && self.holds.load(Ordering::Relaxed) == 0 {
            inner.ended = Some(self.clock.now());
        }
    }
}

impl Transfer for Move {
    fn id(&self) -> u64 {
        self.id
    }

    fn times(&self) -> Times {
        Times { started: self.started, stopped: self.inner.lock().stopped, no_progress: LIMIT }
    }
}

/// A hold on the local memory of one unit.
pub(crate) struct UnitHold {
    of: Arc<Move>,
    unit: usize,
}

impl Drop for UnitHold {
    fn drop(&mut self) {
        self.of.holds.fetch_sub(1, Ordering::Relaxed);
        self.of.deliver();
    }
}

impl Memory for UnitHold {
    fn get(&self, at: usize) -> u8 {
        assert!(self.of.ended().is_none(), "memory of a transfer that has ended is sent");
        self.of.memory.lock()[self.unit * self.of.unit_len + at]
    }

    fn put(&self, at: usize, byte: u8) {
        assert!(
            self.of.ended().is_none() && !self.of.write,
            "memory of a transfer that has ended is written"
        );
        assert!(at < self.of.unit_len);
        self.of.memory.lock()[self.unit * self.of.unit_len + at] = byte;
        self.of.inner.lock().progress = self.of.clock.now();
    }
}

/// A waiter for a reply.
pub(crate) struct Unit {
    pub(crate) of: Arc<Move>,
    pub(crate) unit: usize,
}

impl Waiter for Unit {
    type Transfer = Move;
    type Hold = UnitHold;

    fn transfer(&self) -> Option<&Arc<Move>> {
        Some(&self.of)
    }

    fn hold(&self) -> Option<UnitHold> {
        self.of.holds.fetch_add(1, Ordering::Relaxed);
        Some(UnitHold { of: Arc::clone(&self.of), unit: self.unit })
    }

    fn repeated(&self) -> Option<&AtomicUsize> {
        Some(&self.of.repeated)
    }
}

fn disconnected() -> Error {
    Error::new(Kind::Disconnected, "receive", "the connection is gone")
}

impl World {
    pub(crate) fn start(&mut self, id: u64) {
        let write = !self.random.once_in(3);
        let units = 1 + self.random.below(4) as usize;
        // Writes do not overlap, so that each byte shows whose it is.
        let (base, room) = room_of(id);
        let len = (1 + self.random.below(400) as usize).min(room / units);
        let notifies = write && self.random.once_in(2);
        let of = Move::new(id, (write, notifies), base..base + units * len, len, &self.clock);
        self.moves.push(Arc::clone(&of));
        if notifies {
            let notify = Notify { transfer: id, pieces: units as u32, message: id.to_le_bytes().to_vec() };
            self.send(CONTROL, Frame::bare(0, None, Message::from(notify).frame(0, 0, 0)));
        }
        for unit in 0..units {
            let wire = self.random.below(self.wires.len() as u64) as usize;
            self.ask(Unit { of: Arc::clone(&of), unit }, wire);
        }
        self.at(self.now + LIMIT, Event::Limit(id));
        if self.random.once_in(4) {
            let moment = self.now + Duration::from_micros(self.random.below(60_000));
            self.at(moment, Event::Cancels(id));
        }
    }

    fn ask(&mut self, waiter: Unit, wire: usize) {
        let (of, unit) = (Arc::clone(&waiter.of), waiter.unit);
        let len = of.unit_len;
        let asks = if of.write {
            Asks::Change { on_gpu: false }
        } else {
            Asks::Bytes { bytes: len as u64, checks: None }
        };
        let asked = match self.user.ask(ConnectionId(wire as u64), asks, waiter, self.now) {
            Ok(asked) => asked,
            Err((waiter, error)) => {
                let action = self.user.not_sent(waiter, error);
                return self.user_acts(vec![action]);
            }
        };
        if let Some(when) = asked.look_at {
            self.at(when, Event::LooksAtHost);
        }
        let blocks = vec![Block { offset: (of.range.start + unit * len) as u64, len: len as u32 }];
        let transfer = if of.notifies { of.id } else { 0 };
        let handle = self.handle;
        let (request, of_transfer) = (asked.request, Some(of.id));
        self.asked.push((of.id, request));
        let frame = if of.write {
            let head = Message::from(Write { transfer, handle, blocks }).frame(request, len as u64, 0);
            Frame { request, of: of_transfer, head, payload: asked.hold.map(|hold| (hold, len)), sent: 0 }
        } else {
            let head = Message::from(Read { transfer, handle, blocks }).frame(request, 0, 0);
            Frame::bare(request, of_transfer, head)
        };
        self.send(wire, frame);
    }

    fn send(&mut self, wire: usize, frame: Frame<UnitHold>) {
        if !self.wires[wire].ended {
            self.wires[wire].requests.0.push_back(frame);
            self.flush(wire);
        }
    }

    /// Sends what the window takes, in portions of any size.
    pub(crate) fn flush(&mut self, wire: usize) {
        loop {
            let portion = 1 + self.random.below(300) as usize;
            let one = &mut self.wires[wire];
            let room = INBOX.saturating_sub(one.towards);
            if one.ended || portion.min(room) == 0 {
                return;
            }
            let bytes = one.requests.take(portion.min(room));
            if bytes.is_empty() {
                return;
            }
            one.towards += bytes.len();
            self.carry(wire, true, bytes);
        }
    }

    fn report(&mut self, waiter: Unit, outcome: Result<()>) {
        let of = &waiter.of;
        {
            let mut inner = of.inner.lock();
            assert!(inner.state.ended().is_none(), "a unit reports after its transfer has ended");
            inner.progress = self.now;
            match outcome {
                Ok(()) => inner.state.unit_done(),
                Err(error) => inner.state.unit_failed(0, std::iter::once(0..1).collect(), error),
            }
            let well = inner.state.ended().is_some_and(Result::is_ok);
            if well && self.lies == 0 {
                let (ours, theirs) = (of.memory.lock(), self.array.bytes.lock());
                assert!(
                    *ours == theirs[GUARD + of.range.start..GUARD + of.range.end],
                    "a transfer that went well moved other bytes"
                );
            }
        }
        of.deliver();
        let over = of.inner.lock().state.ended().is_some();
        if over && of.notifies {
            self.send(CONTROL, Frame::bare(0, None, Message::from(Cancel {}).frame(of.id, 0, 0)));
        }
    }

    fn again(&mut self, waiter: Unit, error: Error) {
        match self.wires.iter().position(|wire| !wire.ended) {
            Some(wire) => self.ask(waiter, wire),
            None => self.report(waiter, Err(error)),
        }
    }

    pub(crate) fn stop(&mut self, id: u64, kind: Kind) {
        let of = Arc::clone(&self.moves[self.move_at(id)]);
        {
            let mut inner = of.inner.lock();
            if !inner.state.stop(Error::new(kind, "transfer", "stopped")) {
                return;
            }
            inner.stopped = Some(self.now);
        }
        for wire in 0..self.wires.len() {
            let unsent = self.wires[wire].requests.withdraw(id);
            self.wires[wire].at_user.discard(|hold| hold.of.id == id);
            for request in unsent {
                if let Some(waiter) = self.user.unsent(request) {
                    self.report(waiter, Err(Error::new(Kind::Canceled, "transfer", "stopped")));
                }
            }
        }
        if self.play == Play::EndsAtOnce {
            let requests: Vec<u64> =
                self.asked.iter().filter(|(of, _)| *of == id).map(|(_, request)| *request).collect();
            for request in requests {
                if let Some(waiter) = self.user.give_up(request) {
                    self.report(waiter, Err(Error::new(Kind::Canceled, "transfer", "stopped")));
                }
            }
        }
        let actions = self.user.stop(id, self.now);
        self.user_acts(actions);
    }

    pub(crate) fn user_acts(&mut self, actions: Actions<Unit>) {
        for action in actions {
            match action {
                Action::Send(over, frame) => self.send(over.0 as usize, Frame::bare(0, None, frame)),
                Action::Stopped(waiter) => {
                    self.report(waiter, Err(Error::new(Kind::Canceled, "transfer", "stopped")));
                }
                Action::Failed(waiter, error) => self.report(waiter, Err(error)),
                Action::Again(waiter, error) => self.again(waiter, error),
                Action::Outstanding(of) => drop(of.outstanding.fetch_add(1, Ordering::Relaxed)),
                Action::OutstandingWhileApplied(..) => panic!("nobody shows what is applied"),
                Action::Settled(of) => {
                    assert!(of.outstanding.fetch_sub(1, Ordering::Relaxed) > 0, "settled twice");
                }
                Action::NeverSettled(of) => assert!(of.outstanding.load(Ordering::Relaxed) > 0),
                Action::Moved(of, when) => {
                    let mut inner = of.inner.lock();
                    inner.progress = inner.progress.max(when);
                }
                Action::Reset(over, error) => {
                    self.wires[over.0 as usize].forsaken = true;
                    self.end_wire(over.0 as usize, &error);
                }
                Action::SettleAt(when) => self.at(when, Event::Settles),
                Action::LookAt(when) => self.at(when, Event::LooksAtHost),
            }
        }
    }

    /// The user ends a connection, or knows that it is over.
    pub(crate) fn end_wire(&mut self, wire: usize, error: &Error) {
        if self.wires[wire].ended {
            return;
        }
        let unsent = self.close_wire(wire);
        if wire == CONTROL {
            return self.end_session(error.clone(), false);
        }
        let how = self.how_ended(wire);
        let actions = self.user.lane_closed(ConnectionId(wire as u64), how, &unsent, error, self.now);
        self.user_acts(actions);
    }

    /// Nothing more is sent over it; the owner's kernel learns of that. Gives the requests of which nothing was sent.
    fn close_wire(&mut self, wire: usize) -> Vec<u64> {
        let between_hosts = self.between_hosts;
        let one = &mut self.wires[wire];
        one.ended = true;
        let unsent = one.requests.unsent();
        one.requests.0.clear();
        one.at_user.discard(|_| true);
        if !between_hosts {
            one.hung_up = true;
        } else if !one.dead {
            let when = one.last[1].max(self.now) + Duration::from_micros(self.random.below(self.delay + 1));
            self.at(when, Event::OwnerLearns(wire));
        }
        unsent
    }

    fn how_ended(&self, wire: usize) -> Ended {
        let one = &self.wires[wire];
        let forsaken = one.forsaken || self.between_hosts && !one.ended_by_owner;
        Ended { is_applying: false, shows_what_is_applied: false, forsaken }
    }

    /// The session is over.
    pub(crate) fn end_session(&mut self, error: Error, wished: bool) {
        let hung_up = self.wires[CONTROL].ended && !self.how_ended(CONTROL).forsaken;
        let here = wished || error.kind() == Kind::Disconnected && !hung_up;
        if !self.user.end(error.clone(), here) {
            return;
        }
        let changing = self.user.is_changing();
        for wire in 0..self.wires.len() {
            if self.wires[wire].ended {
                continue;
            }
            self.wires[wire].forsaken |= changing;
            let unsent = self.close_wire(wire);
            if wire != CONTROL {
                let how = self.how_ended(wire);
                let actions =
                    self.user.lane_closed(ConnectionId(wire as u64), how, &unsent, &error, self.now);
                self.user_acts(actions);
            }
        }
        let hows: Vec<Ended> = (0..self.wires.len()).map(|wire| self.how_ended(wire)).collect();
        let hung_up = !hows[CONTROL].forsaken;
        let actions = self.user.bury(|over| hows[over.0 as usize], hung_up, self.now);
        self.user_acts(actions);
    }

    /// The user reads all that has come.
    pub(crate) fn receive(&mut self, wire: usize, bytes: &[u8]) {
        self.wires[wire].at_user.feed(bytes);
        while !self.wires[wire].ended {
            let came = match self.wires[wire].at_user.next() {
                Ok(Some(came)) => came,
                Ok(None) => return,
                Err(error) => return self.end_session(error, false),
            };
            if let Err(error) = self.user_hears(wire, came) {
                return self.end_session(error, false);
            }
        }
    }

    fn user_hears(&mut self, wire: usize, came: Came<UnitHold>) -> Result<()> {
        let over = ConnectionId(wire as u64);
        match came {
            Came::Frame(header, body) => {
                let message = Message::decode(header.kind, &body)?;
                match self.user.frame(over, header, message, self.now)? {
                    Reply::Done(waiter, outcome) => {
                        let outcome = outcome.map(drop).map_err(|error| error.into_error("write"));
                        self.report(waiter, outcome);
                    }
                    Reply::NoBytes(waiter, error) => self.report(waiter, Err(error)),
                    Reply::Granted(waiter, _) | Reply::Queried(waiter, _) => {
                        self.report(waiter, Err(disconnected()));
                    }
                    Reply::Settled(actions) => self.user_acts(actions),
                    Reply::Bye(_) => {
                        self.wires[wire].ended_by_owner = true;
                        self.end_session(Error::new(Kind::Stale, "session", "the owner has closed"), false);
                    }
                    Reply::Nothing | Reply::Unmap(_) | Reply::Recall(_) | Reply::Ping => {}
                }
            }
            Came::Payload(header, body) => match self.user.payload(over, header, &body)? {
                Landing::Memory(hold) => self.wires[wire].at_user.place(Some(hold)),
                Landing::Nowhere => self.wires[wire].at_user.place(None),
            },
            Came::Whole(header, _, hold) => {
                let landed = hold.is_some();
                drop(hold);
                if let Some((waiter, _)) = self.user.received(header.id, self.now) {
                    let stopped = || Error::new(Kind::Canceled, "transfer", "stopped");
                    self.report(waiter, if landed { Ok(()) } else { Err(stopped()) });
                }
            }
        }
        Ok(())
    }

    pub(crate) fn look_at_host(&mut self) {
        if self.user.why_over().is_some() {
            return;
        }
        let alive = self.wires.iter().any(|wire| !wire.dead && !wire.ended);
        let wires = self.wires.iter_mut().enumerate();
        let moved = wires.filter_map(|(wire, one)| {
            std::mem::take(&mut one.moved).then_some((ConnectionId(wire as u64), self.now))
        });
        let moved: Vec<_> = moved.collect();
        match self.user.look_at_host(self.now, alive.then_some(self.now), &moved) {
            Look::There(actions) => self.user_acts(actions),
            Look::Gone(error) => self.end_session(error, false),
        }
    }
}
