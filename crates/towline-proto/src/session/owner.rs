//! The owner's role in a session: which ticket has which handle, what a request may touch, what follows it, and what becomes of everything
//! when a connection ends.
//!
//! [`Owner`] gets what happens: a [frame](Owner::frame) has come, a [payload](Owner::payload) is announced, a piece is
//! [applied](Owner::applied), a connection is [gone](Owner::gone), time has passed. It says what to do about that, and does nothing itself. A
//! region that is taken back needs no event: its grants find that it is gone. What a request may touch comes out as [`Admitted`],
//! together with what holds its region: nothing else gives [`Ranges`].

mod admitted;
mod announced;
mod following;
mod grants;
mod heartbeat;
mod lanes;
mod standing;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::sync::{Arc, Weak};
use std::time::Instant;

use self::admitted::total;
pub use self::admitted::{Admitted, Blame, Ranges, Refusal};
use self::announced::Announced;
pub use self::following::{Act, Settled, Settling, Word};
use self::grants::Grants;
pub use self::heartbeat::Beat;
use self::heartbeat::Heartbeat;
pub use self::lanes::LaneEnd;
use self::lanes::Lanes;
pub use self::standing::Standing;
use super::allowance::{Allowance, InFlight};
use super::budget::Charge;
use super::counting::Counting;
use crate::ticket::{Claims, check_lease};
use crate::wire::{AtomicOp, Block, Done, Finish, Header, Import, Message, Pong, Query};
use crate::{Access, Error, Kind, Result};

/// A reduction's bytes are held until all of them are there, so a frame carries at most this many.
pub const MOST_REDUCED: u64 = 4 << 20;

/// What a request's list of parts takes for each block: an address and a length.
const PART: usize = 2 * size_of::<usize>();

/// What an owner keeps of a grant.
pub trait Grant {
    /// A region of the owner's.
    type Region;

    /// Keeps the bytes of a region where they are as long as it lives.
    type Hold;

    /// Returns what the ticket allows.
    fn claims(&self) -> &Claims;

    /// Returns its region, which may have been taken back.
    fn region(&self) -> &Weak<Self::Region>;

    /// Returns what keeps the session among those that serve the region, for as long as a request is in flight.
    fn served(&self) -> Arc<dyn Any + Send + Sync>;

    /// Returns whether the region is being taken back.
    fn is_closed(region: &Self::Region) -> bool;

    /// Holds a region for a request, or gives it back and refuses that where it is being taken back. A request that is already in flight
    /// comes without a share of what the peer may have. Must not wait.
    fn hold(
        op: &'static str,
        region: Arc<Self::Region>,
        flight: Option<InFlight>,
    ) -> Result<Self::Hold, (Error, Arc<Self::Region>)>;
}

/// The rules of the owner's role in one session. `C` names a connection.
pub struct Owner<G: Grant, C> {
    /// When the endpoint was opened: leases count from there.
    opened: Instant,
    /// The first connection, with which the session ends.
    control: C,
    /// Pages and descriptors are shared with the peer.
    is_local: bool,
    grants: Grants<G>,
    /// Without it the peer may not even send messages.
    standing: Standing<G::Region>,
    counting: Counting<(C, u64)>,
    announced: Announced<C>,
    lanes: Lanes<C>,
    heartbeat: Heartbeat,
    allowance: Arc<Allowance>,
    /// Regions that were looked at, and that may be held by nobody else any more.
    spent: Vec<Arc<G::Region>>,
    over: bool,
    /// The peer has said that nothing of it is in flight any more.
    goodbye: bool,
}

/// What is to be done about a frame. What answers goes over the connection of the frame, with its id.
pub enum Action<G: Grant, C> {
    /// Nothing.
    Nothing,
    /// Answer with that.
    Answer(Message),
    /// Verify tickets, and answer with their grants.
    Import(Import),
    /// The peer has let go of what that grant has lent to it.
    LetGo(Arc<G>),
    /// Reply to a query about a path to a grant, unless the id is 0. The grant may be gone: then that is the reply.
    Reply(Query, Option<Arc<G>>),
    /// Answer with bytes.
    Read(Reading<G>),
    /// Change a word, and answer with what was there.
    Atomic(AtomicOp, Result<Word<G>, Refusal<G>>),
    /// [Settle](Owner::settle) what has followed.
    Settle(Settling<C>),
    /// Take the reply to that request back where nothing of it has been sent, and answer with that error instead.
    Withdraw(Error),
    /// Let nothing more of that lane be applied, and say [how far that is](Owner::lane_ends).
    EndLane(C),
    /// A claimed operation has ended.
    Finish(Finish),
    /// The descriptor with the frame shows whether the peer lives.
    Watch,
    /// The peer holds no pin and makes none any more; the connection ends with that error.
    Goodbye(Error),
}

/// A request for bytes.
pub struct Reading<G: Grant> {
    /// The bytes, or why there are none.
    pub admitted: Result<Admitted<G>, Refusal<G>>,
    /// Whether checksums go ahead of them; where the bytes are in memory, they may be too many for that.
    pub checks: Option<Result<()>>,
}

/// A payload that comes next.
pub struct Arriving<G: Grant> {
    /// Where it goes. A refusal is answered when it has passed, so that the stream stays whole.
    pub admitted: Result<Admitted<G>, Refusal<G>>,
    /// It is combined with what is there, so that all of it must be there first.
    pub is_combined: bool,
    /// What it takes until it is dealt with.
    pub charge: Charge,
}

/// What the end of a connection means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gone {
    /// The session is over.
    pub ends: bool,
    /// The peer broke the protocol, which is counted.
    pub broken: bool,
}

/// What is left of a session that is over.
pub struct Remains<G> {
    /// The grants that were not given back.
    pub grants: Vec<Arc<G>>,
    /// The peer has said goodbye: nothing of it is in flight by them.
    pub goodbye: bool,
}

/// The error of everything that finds the region revoked.
pub fn stale(op: &'static str) -> Error {
    Error::new(Kind::Stale, op, "the region was deregistered or its memory recycled")
}

impl<G: Grant, C: Clone + Eq> Owner<G, C> {
    /// What a grant takes.
    pub const GRANT: usize = Grants::<G>::COST;

    /// A peer has proven to hold a ticket that is still good. It may have that much; leases count from `opened`.
    pub fn new(
        control: C,
        standing: Standing<G::Region>,
        allowance: &Arc<Allowance>,
        is_local: bool,
        opened: Instant,
    ) -> Owner<G, C> {
        Owner {
            opened,
            control,
            is_local,
            grants: Grants::new(),
            standing,
            counting: Counting::new(allowance),
            announced: Announced::new(),
            lanes: Lanes::new(),
            heartbeat: Heartbeat::default(),
            allowance: Arc::clone(allowance),
            spent: Vec::new(),
            over: false,
            goodbye: false,
        }
    }

    /// A frame without payload has come over that connection.
    pub fn frame(&mut self, over: &C, id: u64, message: Message, now: Instant) -> Result<Action<G, C>> {
        self.heartbeat.received();
        Ok(match message {
            Message::Import(import) => Action::Import(import),
            Message::Release(release) => {
                self.grants.release(release.handle).map_or(Action::Nothing, Action::LetGo)
            }
            Message::Query(query) => match self.grants.find(query.handle) {
                Some(grant) if query.body.is_empty() => Action::LetGo(Arc::clone(grant)),
                // A grant that was given back meanwhile is no reason to end the session.
                None if query.body.is_empty() => Action::Nothing,
                grant => {
                    let grant = grant.cloned();
                    Action::Reply(query, grant)
                }
            },
            Message::Read(read) => {
                let bytes = total(&read.blocks);
                let admitted = self.admit(read.handle, Access::READ, read.blocks, now);
                let announced = self.announced.take(over, id);
                let checks = announced.map(|_| self.may_check(over, "read", bytes));
                Action::Read(Reading { admitted, checks })
            }
            Message::Atomic(atomic) => {
                Action::Atomic(atomic.op, self.word(atomic.handle, atomic.offset, now))
            }
            Message::Signal(signal) => {
                let behind = (signal.transfer, signal.pieces);
                Action::Settle(self.follow(over, id, signal.into(), behind)?)
            }
            Message::Notify(notify) => {
                let behind = (notify.transfer, notify.pieces);
                Action::Settle(self.follow(over, id, notify.into(), behind)?)
            }
            Message::Cancel(_) => Action::Settle(Settling::new(self.counting.forget(id))),
            // Nothing of it is kept in mind: a request that is not there has been answered.
            Message::Withdraw(_) => {
                Action::Withdraw(Error::new(Kind::Canceled, "read", "the peer does not want it any more"))
            }
            Message::EndLane(end) => match self.lanes.find(&end.lane) {
                Some(lane) => Action::EndLane(lane.clone()),
                // One that is not there is over.
                None => Action::Answer(Done { outcome: Ok(0) }.into()),
            },
            Message::Finish(finish) => Action::Finish(finish),
            Message::Check(check) => {
                let charge = self.allowance.charge("serve", announced::cost(&check.checks))?;
                self.announced.put(over, id, check.checks, charge);
                Action::Nothing
            }
            Message::Held(_) if self.is_local => Action::Watch,
            Message::Held(_) => {
                return Err(Error::protocol(
                    "serve",
                    "the peer sent a life page, which only a peer on this host may send",
                ));
            }
            Message::Ping(_) => Action::Answer(Pong {}.into()),
            Message::Pong(_) => Action::Nothing,
            Message::Bye(_) => {
                self.goodbye = true;
                Action::Goodbye(Error::new(Kind::Disconnected, "serve", "the peer has closed"))
            }
            other => return Err(unsent(&other)),
        })
    }

    /// A frame has come whose payload comes next. The message was decoded from so many bytes, which are kept until then.
    pub fn payload(
        &mut self,
        header: &Header,
        message: Message,
        body_len: usize,
        now: Instant,
    ) -> Result<Arriving<G>> {
        self.heartbeat.received();
        let (handle, blocks, is_combined) = match message {
            Message::Write(write) => (write.handle, write.blocks, false),
            Message::Reduce(reduce) if header.payload_len <= MOST_REDUCED => {
                (reduce.handle, reduce.blocks, true)
            }
            other => return Err(unsent(&other)),
        };
        let bytes = total(&blocks);
        if bytes != header.payload_len {
            return Err(Error::protocol("serve", "the payload's length is not that of its blocks"));
        }
        let buffer = if is_combined { bytes as usize } else { 0 };
        // A refusal is answered in any case; there is room for that.
        let (admitted, charge) = match self.allowance.charge("write", body_len + buffer) {
            Ok(charge) => (self.admit(handle, Access::WRITE, blocks, now), charge),
            Err(error) => (Err(error.into()), self.allowance.charge("write", body_len)?),
        };
        Ok(Arriving { admitted, is_combined, charge })
    }

    /// Checks a request against what was granted, counts it, and holds its region.
    pub fn admit(
        &mut self,
        handle: u32,
        needed: Access,
        blocks: Vec<Block>,
        now: Instant,
    ) -> Result<Admitted<G>, Refusal<G>> {
        let op = if needed == Access::READ { "read" } else { "write" };
        let grant = self.grants.find_or_refuse(op, handle).cloned();
        let grant = grant.map_err(|error| Refusal { error, blame: Blame::Peer })?;
        let list = blocks.len() * PART;
        let held = self.check(op, &grant, needed, &blocks, now).and_then(|region| {
            match self.allowance.take(op, total(&blocks), list, Some(grant.served())) {
                Ok(flight) => self.hold(op, region, Some(flight)),
                Err(error) => {
                    self.spent.push(region);
                    Err(error)
                }
            }
        });
        match held {
            Ok(hold) => Ok(Admitted::of(grant, hold, blocks)),
            Err(error) => Err(Refusal { error, blame: Blame::Grant(grant) }),
        }
    }

    fn hold(
        &mut self,
        op: &'static str,
        region: Arc<G::Region>,
        flight: Option<InFlight>,
    ) -> Result<G::Hold> {
        G::hold(op, region, flight).map_err(|(error, region)| {
            self.spent.push(region);
            error
        })
    }

    /// Holds what a request names that was admitted before and goes on: it is not counted once more.
    fn hold_again(
        &mut self,
        op: &'static str,
        handle: u32,
        needed: Access,
        blocks: Vec<Block>,
        now: Instant,
    ) -> Result<Admitted<G>> {
        let grant = Arc::clone(self.grants.find_or_refuse(op, handle)?);
        let region = self.check(op, &grant, needed, &blocks, now)?;
        let hold = self.hold(op, region, None)?;
        Ok(Admitted::of(grant, hold, blocks))
    }

    /// Returns a grant and its region, which the peer may have something done with that needs that right. Nothing holds the region.
    pub fn granted(
        &self,
        op: &'static str,
        handle: u32,
        needed: Access,
        now: Instant,
    ) -> Result<(Arc<G>, Arc<G::Region>)> {
        let grant = self.grants.find_or_refuse(op, handle)?;
        Ok((Arc::clone(grant), self.check(op, grant, needed, &[], now)?))
    }

    fn check(
        &self,
        op: &'static str,
        grant: &G,
        needed: Access,
        blocks: &[Block],
        now: Instant,
    ) -> Result<Arc<G::Region>> {
        let claims = grant.claims();
        if !claims.access.contains(needed) {
            return Err(Error::new(
                Kind::PermissionDenied,
                op,
                format!("the ticket allows {}, and this needs {needed}", claims.access),
            ));
        }
        check_lease("access", claims.expires_ms, || self.clock_ms(now))?;
        let length = claims.range.end - claims.range.start;
        let outside =
            |block: &&Block| block.offset.checked_add(block.len.into()).is_none_or(|end| end > length);
        if let Some(block) = blocks.iter().find(outside) {
            return Err(Error::invalid(
                op,
                format!("{} bytes at offset {} do not lie within {length} bytes", block.len, block.offset),
            ));
        }
        grant.region().upgrade().ok_or_else(|| stale(op))
    }

    /// Returns the handle that a ticket has already, held once more. Where it has none it may be given one, unless the peer holds too many.
    pub fn grant_again(&mut self, ticket: &[u8], claims: &Claims) -> Result<Option<u32>> {
        let again = self.grants.again(ticket, claims);
        if again.is_none() {
            self.allowance.check_grants(self.grants.count())?;
            self.grants.make_room()?;
        }
        Ok(again)
    }

    /// Grants a ticket: under a new handle, or under the one that it [has already](Owner::grant_again).
    pub fn grant(&mut self, ticket: &[u8], grant: Result<G, u32>, standing: Standing<G::Region>) -> u32 {
        let handle = grant.map_or_else(|handle| handle, |grant| self.grants.add(ticket, grant));
        self.holds_another(standing);
        handle
    }

    /// Gives a grant back; returns it where that was the last time that it was held.
    pub fn release(&mut self, handle: u32) -> Option<Arc<G>> {
        self.grants.release(handle)
    }

    /// Returns what a handle stands for.
    pub fn find(&self, op: &'static str, handle: u32) -> Result<Arc<G>> {
        self.grants.find_or_refuse(op, handle).cloned()
    }

    /// Returns how many grants the peer holds.
    pub fn count_grants(&self) -> usize {
        self.grants.count()
    }

    /// Lets the next handle be this one, if it is free.
    #[doc(hidden)]
    pub fn number_grants_from(&mut self, handle: u32) {
        self.grants.begin_at(handle);
    }

    /// A connection is gone. `is_there` says of a lane whether a thread still has it, which may apply something of it.
    pub fn gone(&mut self, over: &C, error: &Error, is_there: impl Fn(&C) -> bool) -> Gone {
        self.announced.forget(over);
        let is_control = *over == self.control;
        if !is_control {
            self.lanes.closed(is_there);
        }
        // Nobody knows what a panic has left behind.
        let ends = is_control || error.kind() == Kind::Internal;
        Gone { ends, broken: error.kind() == Kind::Protocol }
    }

    /// The session is over. False where it was already.
    pub fn end(&mut self) -> bool {
        !std::mem::replace(&mut self.over, true)
    }

    /// Returns whether it is over.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Forgets everything, once its connections are closed.
    pub fn clear(&mut self) -> Remains<G> {
        self.counting.clear();
        self.lanes = Lanes::new();
        Remains { grants: self.grants.take(), goodbye: self.goodbye }
    }

    /// Gives the regions that were looked at since the last time. With the last of those who hold a region more may go than it, even
    /// the endpoint: so they are dropped by a thread that has no lock on these rules.
    pub fn take_spent(&mut self) -> Vec<Arc<G::Region>> {
        std::mem::take(&mut self.spent)
    }

    /// Milliseconds since the endpoint was opened: the clock in which leases are counted.
    fn clock_ms(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.opened).as_millis() as u64
    }
}

fn unsent(message: &Message) -> Error {
    Error::protocol("serve", format!("a user does not send {:?}", message.kind()))
}
