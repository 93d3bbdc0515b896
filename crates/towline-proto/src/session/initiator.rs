//! The initiator's side of a session: which requests are open, which reply ends each of them, and when a transfer that was stopped is
//! quiet.
//!
//! Events go in, with the time at which they happen. What is to be done comes out as [`Action`]s, to be done in their order. Local memory
//! is named by what a [`Waiter`] gives as its hold, and only an open request gives one: with [`Asked`] for its frame, and with
//! [`Landing`] for the bytes that come in reply. Code that has neither cannot touch the memory, and it stays in use until the last hold is gone.

mod lost;
mod owed;
mod pulse;
mod replies;
mod stopping;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use self::lost::EndingLane;
use self::owed::{Due, Owed};
use self::pulse::Pulse;
pub use self::pulse::{GONE, HEARTBEAT, Look};
pub use self::replies::{Landing, Reply};
use crate::wire::FrameKind;
use crate::{Error, Kind, Result};

/// A connection of a session, by a number that its holder gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// What is known of a connection when it is opened.
#[derive(Debug, Clone, Copy)]
pub struct Opened {
    /// Its number.
    pub id: ConnectionId,
    /// By what both sides know a lane: the transcript of its handshake.
    pub name: Option<[u8; 32]>,
    /// It does not leave this host: the owner's kernel knows of its end as soon as this side has ended it. Between hosts, bytes may still be
    /// in flight, and the owner may still apply what it has of them.
    pub same_host: bool,
}

/// What is known of a connection that has ended.
#[derive(Debug, Clone, Copy)]
pub struct Ended {
    /// The owner is seen to be in the middle of something that came over it.
    pub is_applying: bool,
    /// The owner shows here when it is in the middle of something that came over it.
    pub shows_what_is_applied: bool,
    /// It ended without a word of the owner's.
    pub forsaken: bool,
}

/// One transfer, which the owner may still be at after its end.
pub trait Transfer {
    /// Its number in this process.
    fn id(&self) -> u64;

    /// When it began and was stopped, and how long nothing may move.
    fn times(&self) -> Times;
}

/// The times of a transfer.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    /// When it began.
    pub started: Instant,
    /// When it was stopped, where it was.
    pub stopped: Option<Instant>,
    /// Its limit without progress.
    pub no_progress: Duration,
}

/// The waiter for the reply to a request. Given back once, when the request ends.
pub trait Waiter {
    /// What the request is part of.
    type Transfer: Transfer;
    /// Names local memory and keeps it in use; the memory is released by the drop of the last one.
    type Hold;

    /// The transfer that the request is part of, if it is one's.
    fn transfer(&self) -> Option<&Arc<Self::Transfer>>;

    /// A hold on the local memory of the request; none where it has no memory.
    fn hold(&self) -> Option<Self::Hold>;

    /// How many requests of its transfer were asked again; none where it is nobody's to ask again.
    fn repeated(&self) -> Option<&AtomicUsize>;
}

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asks {
    /// Grants for so many tickets.
    Grants(usize),
    /// What a path has to know.
    Query,
    /// So many bytes, with so many checksums ahead of them where these are asked for.
    Bytes {
        /// How many bytes.
        bytes: u64,
        /// How many checksums.
        checks: Option<usize>,
    },
    /// A change of the owner's memory. It is over only when the owner has said so, or cannot do it any more.
    Change {
        /// The memory is on a GPU: its change is not one step with the owner's look at this side.
        on_gpu: bool,
    },
}

impl Asks {
    /// The kind of frame that answers it.
    fn reply(self) -> FrameKind {
        match self {
            Asks::Grants(_) => FrameKind::Granted,
            Asks::Query => FrameKind::QueryReply,
            Asks::Bytes { .. } => FrameKind::Data,
            Asks::Change { .. } => FrameKind::Done,
        }
    }
}

/// A request that is open, for its frame.
#[derive(Debug)]
pub struct Asked<H> {
    /// Its number.
    pub request: u64,
    /// Keeps the memory in use that the frame names.
    pub hold: Option<H>,
    /// The owner's host has to be looked at then.
    pub look_at: Option<Instant>,
}

/// What is to be done.
pub enum Action<W: Waiter> {
    /// Send that frame, to which nobody awaits a reply.
    Send(ConnectionId, Vec<u8>),
    /// That request ends because its transfer was stopped.
    Stopped(W),
    /// That request ends with that error.
    Failed(W, Error),
    /// The connection of that request is gone: ask it again over another one. Where there is none, it ends with that error.
    Again(W, Error),
    /// The owner may still change its memory for that transfer: it is not quiet. Before its request ends.
    Outstanding(Arc<W::Transfer>),
    /// The same, until the owner is seen to have left what came over that connection.
    OutstandingWhileApplied(Arc<W::Transfer>, ConnectionId),
    /// The owner is not at that transfer any more.
    Settled(Arc<W::Transfer>),
    /// Whether the owner is at that transfer will never be known: it is let go of.
    NeverSettled(Arc<W::Transfer>),
    /// The owner's host has acknowledged bytes of that transfer, then.
    Moved(Arc<W::Transfer>, Instant),
    /// End that connection so that nothing of what was sent is acted upon later.
    Reset(ConnectionId, Error),
    /// [Settle](Initiator::settle) what was stopped, then.
    SettleAt(Instant),
    /// [Look](Initiator::look_at_host) whether the owner's host is there, then.
    LookAt(Instant),
}

/// All that is to be done after one event. What is let go of goes with it, and never under a lock on the rules: with the last who
/// holds a transfer more may go than it, even the session.
pub type Actions<W> = Vec<Action<W>>;

enum Pending<W: Waiter> {
    /// A caller waits for the reply.
    Open { waiter: W, asks: Asks, over: ConnectionId },
    /// A read that was stopped then, and whose reply goes nowhere when it comes.
    Unwanted { over: ConnectionId, since: Instant },
    /// The owner may still make this change, of which nobody waits for the end any more: until it has replied, the transfer is not quiet.
    Late(Arc<W::Transfer>),
    /// A lane is to end.
    Ending(EndingLane<W>),
}

impl<W: Waiter> Pending<W> {
    /// The transfer, where the owner's memory changes by this request.
    fn changing(&self) -> Option<&Arc<W::Transfer>> {
        match self {
            Pending::Open { waiter, asks: Asks::Change { .. }, .. } => waiter.transfer(),
            _ => None,
        }
    }

    fn changes_a_gpu(&self) -> bool {
        matches!(self, Pending::Open { asks: Asks::Change { on_gpu: true }, .. })
    }

    fn reply(&self) -> FrameKind {
        match self {
            Pending::Open { asks, .. } => asks.reply(),
            Pending::Unwanted { .. } => FrameKind::Data,
            Pending::Late(_) | Pending::Ending(_) => FrameKind::Done,
        }
    }
}

/// What a session to an owner is, for who it is between.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// It goes over TCP: bytes may be in flight for long, and a host may be gone without a word.
    pub between_hosts: bool,
    /// The owner understands Withdraw and EndLane.
    pub ends_lanes: bool,
}

/// One session, as the initiator sees it.
pub struct Initiator<W: Waiter> {
    settings: Settings,
    control: Opened,
    lanes: Vec<Opened>,
    next_request: u64,
    pending: BTreeMap<u64, Pending<W>>,
    owed: Owed,
    /// Checksums that have come ahead of the bytes, by request.
    checks: BTreeMap<u64, Vec<u32>>,
    began: Instant,
    last_received: Instant,
    pulse: Option<Pulse>,
    over: Option<Error>,
    /// This side has ended it, and not the owner: on a wish, or because nothing came from the owner's host any more.
    ended_here: bool,
}

impl<W: Waiter> Initiator<W> {
    /// A session that begins now, over its first connection.
    pub fn new(settings: Settings, control: Opened, now: Instant) -> Initiator<W> {
        Initiator {
            settings,
            control,
            lanes: Vec::new(),
            next_request: 1,
            pending: BTreeMap::new(),
            owed: Owed::default(),
            checks: BTreeMap::new(),
            began: now,
            last_received: now,
            pulse: None,
            over: None,
            ended_here: false,
        }
    }

    /// A lane was opened.
    pub fn opened(&mut self, lane: Opened) {
        self.lanes.push(lane);
    }

    /// Why it is over, once it is.
    pub fn why_over(&self) -> Option<&Error> {
        self.over.as_ref()
    }

    /// Opens a request over that connection. Its frame is sent afterwards: who cannot send it [gives it up](Self::give_up). Where the
    /// connection has ended since it was chosen, the request may go [over another](Self::not_sent).
    pub fn ask(
        &mut self,
        over: ConnectionId,
        asks: Asks,
        waiter: W,
        now: Instant,
    ) -> Result<Asked<W::Hold>, (W, Error)> {
        if let Some(error) = &self.over {
            return Err((waiter, error.clone()));
        }
        if self.connection(over).is_none() {
            return Err((waiter, Error::new(Kind::Disconnected, "send", "the connection is closed")));
        }
        let hold = waiter.hold();
        let request = self.expect(Pending::Open { waiter, asks, over });
        Ok(Asked { request, hold, look_at: self.begin_to_look(now) })
    }

    fn expect(&mut self, one: Pending<W>) -> u64 {
        let request = self.next_request;
        self.next_request += 1;
        self.pending.insert(request, one);
        request
    }

    /// A request ends that was never sent, or taken back before it was; the caller that gets its waiter reports its end.
    pub fn unsent(&mut self, request: u64) -> Option<W> {
        self.is_open(request).then(|| self.forget(request).and_then(Self::waiter)).flatten()
    }

    /// A request ends that may have been sent, and that the owner may answer yet.
    pub fn give_up(&mut self, request: u64) -> Option<W> {
        let one = self.is_open(request).then(|| self.pending.remove(&request)).flatten()?;
        self.owes(request, &one);
        self.checks.remove(&request);
        Self::waiter(one)
    }

    fn is_open(&self, request: u64) -> bool {
        matches!(self.pending.get(&request), Some(Pending::Open { .. }))
    }

    fn forget(&mut self, request: u64) -> Option<Pending<W>> {
        self.owed.settle(request);
        self.checks.remove(&request);
        self.pending.remove(&request)
    }

    fn waiter(one: Pending<W>) -> Option<W> {
        match one {
            Pending::Open { waiter, .. } => Some(waiter),
            _ => None,
        }
    }

    /// Remembers the reply to a request that was given up.
    fn owes(&mut self, request: u64, given_up: &Pending<W>) {
        let over = self.over_of(given_up);
        if self.connection(over).is_some() {
            self.owed.note(request, Due { kind: given_up.reply(), over });
        }
    }

    /// The connection over which that was asked.
    fn over_of(&self, one: &Pending<W>) -> ConnectionId {
        match one {
            Pending::Open { over, .. } | Pending::Unwanted { over, .. } => *over,
            Pending::Late(_) | Pending::Ending(_) => self.control.id,
        }
    }

    fn connection(&self, id: ConnectionId) -> Option<&Opened> {
        std::iter::once(&self.control).chain(&self.lanes).find(|one| one.id == id)
    }

    fn is_lane(&self, id: ConnectionId) -> bool {
        id != self.control.id
    }

    /// Whether something is open over that connection.
    pub fn awaits_over(&self, id: ConnectionId) -> bool {
        self.pending.values().any(|one| match one {
            Pending::Open { over, .. } | Pending::Unwanted { over, .. } => *over == id,
            Pending::Late(_) | Pending::Ending(_) => false,
        })
    }

    /// Whether bytes of transfers are in flight.
    pub fn is_moving(&self) -> bool {
        self.pending
            .values()
            .any(|one| matches!(one, Pending::Open { waiter, .. } if waiter.transfer().is_some()))
    }

    /// Whether the owner's memory may change by something that is open.
    pub fn is_changing(&self) -> bool {
        self.pending.values().any(|one| one.changing().is_some())
    }

    /// How long nothing has come from the owner.
    pub fn silence(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.last_received)
    }

    /// As if nothing had come since it began.
    pub fn restart_silence(&mut self) {
        self.last_received = self.began;
    }
}
