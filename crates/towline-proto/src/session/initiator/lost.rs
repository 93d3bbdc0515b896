//! What becomes of open requests when their connection, or the session, is over.
//!
//! Of some changes this side does not know whether the owner still makes them: their bytes may be in flight, or with the owner, after
//! the connection was given up here. The owner's word ends that. Of a lane it is the reply to EndLane, over the control connection:
//! nothing more that came over the lane will be applied. Of the control connection itself it is the reply to the request. A transfer
//! whose owner says nothing in time ends without being quiet.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Action, Actions, ConnectionId, Ended, Initiator, Pending, Transfer, Waiter};
use crate::wire::{EndLane, FrameKind, Message};
use crate::{Error, Kind};

/// How long a transfer waits for the owner's word that a lane is over before it ends without it.
const WORD: Duration = Duration::from_millis(400);

/// So many requests of a transfer are asked again.
pub(super) const MOST_REPEATED: usize = 64;

/// A lane that was given up, and what may still be applied of it.
pub(super) struct EndingLane<W: Waiter> {
    /// Requests that have not reported.
    lost: Vec<W>,
    /// Transfers that have ended without the owner's word.
    late: Vec<Arc<W::Transfer>>,
    error: Error,
    until: Instant,
}

impl<W: Waiter> EndingLane<W> {
    /// How long its requests wait; none where they do not any more.
    pub(super) fn until(&self) -> Option<Instant> {
        (!self.lost.is_empty()).then_some(self.until)
    }

    /// Its transfers are not quiet, and end all the same.
    pub(super) fn give_up(&mut self, actions: &mut Actions<W>) {
        let lost = std::mem::take(&mut self.lost);
        for transfer in lost.iter().filter_map(W::transfer) {
            self.late.push(Arc::clone(transfer));
            actions.push(Action::Outstanding(Arc::clone(transfer)));
        }
        actions.extend(lost.into_iter().map(|waiter| Action::Failed(waiter, self.error.clone())));
    }
}

impl<W: Waiter> Initiator<W> {
    /// A lane is over: what was in flight on it ends, the rest goes on. Of the requests in `unsent`, nothing was sent.
    pub fn lane_closed(
        &mut self,
        lane: ConnectionId,
        how: Ended,
        unsent: &[u64],
        error: &Error,
        now: Instant,
    ) -> Actions<W> {
        let Some(at) = self.lanes.iter().position(|one| one.id == lane) else { return Vec::new() };
        let opened = self.lanes.remove(at);
        let error = self.over.clone().unwrap_or_else(|| error.clone());
        self.owed.gone(lane);
        let over = |one: &Pending<W>| match one {
            Pending::Open { over, .. } | Pending::Unwanted { over, .. } => *over == lane,
            Pending::Late(_) | Pending::Ending(_) => false,
        };
        let lost: Vec<u64> =
            self.pending.iter().filter(|(_, one)| over(one)).map(|(request, _)| *request).collect();
        let (mut unsure, mut actions) = (Vec::new(), Vec::new());
        for request in lost {
            let Some(one) = self.pending.remove(&request) else { continue };
            self.checks.remove(&request);
            let unsent = unsent.contains(&request);
            let sees_the_end = how.shows_what_is_applied || !one.changes_a_gpu();
            let is_over = unsent || opened.same_host && sees_the_end;
            let asks =
                !is_over && one.changing().is_some() && self.settings.ends_lanes && self.over.is_none();
            if !asks && !unsent {
                self.may_still_change(&one, opened.same_host, how, false, now, &mut actions);
            }
            let changes = !unsent && one.reply() == FrameKind::Done;
            match Self::waiter(one) {
                Some(waiter) if asks => unsure.push(waiter),
                Some(waiter) => actions.push(self.lost(waiter, error.clone(), changes)),
                None => {}
            }
        }
        if !unsure.is_empty() {
            self.end_lane(opened.name, unsure, error, now, &mut actions);
        }
        actions
    }

    /// A request was not sent, because its connection has ended since it was chosen. Nothing has happened yet.
    pub fn not_sent(&self, waiter: W, error: Error) -> Action<W> {
        self.lost(waiter, error, false)
    }

    /// The connection of a request is lost. It is asked again where that changes nothing twice: of a read, and of what was not sent.
    /// Whether the owner has done the rest nobody can tell.
    fn lost(&self, waiter: W, error: Error, changes: bool) -> Action<W> {
        let stopped = || waiter.transfer().is_some_and(|transfer| transfer.times().stopped.is_some());
        let again = !changes
            && error.kind() == Kind::Disconnected
            && self.over.is_none()
            && !stopped()
            && waiter
                .repeated()
                .is_some_and(|repeated| repeated.fetch_add(1, Ordering::Relaxed) < MOST_REPEATED);
        if again { Action::Again(waiter, error) } else { Action::Failed(waiter, error) }
    }

    /// Asks the owner to end a lane that was lost; these requests wait for its word.
    fn end_lane(
        &mut self,
        name: Option<[u8; 32]>,
        lost: Vec<W>,
        error: Error,
        now: Instant,
        actions: &mut Actions<W>,
    ) {
        let until = now + WORD;
        let mut ending = EndingLane { lost, late: Vec::new(), error, until };
        let Some(lane) = name else {
            ending.give_up(actions);
            self.expect(Pending::Ending(ending));
            return;
        };
        let request = self.expect(Pending::Ending(ending));
        actions.push(Action::Send(self.control.id, Message::from(EndLane { lane }).frame(request, 0, 0)));
        actions.push(Action::SettleAt(until));
        actions.extend(self.begin_to_look(now).map(Action::LookAt));
    }

    /// Nothing more of a lane will be applied, or nobody will say so.
    pub(super) fn lane_ended(&mut self, mut lane: EndingLane<W>, surely: bool) -> Actions<W> {
        let mut actions = Vec::new();
        if !surely {
            lane.give_up(&mut actions);
        }
        let EndingLane { lost, late, error, .. } = lane;
        actions.extend(lost.into_iter().map(|waiter| Action::Failed(waiter, error.clone())));
        for transfer in late {
            if surely {
                actions.push(Action::Settled(transfer));
            } else if self.over.is_none() {
                // The end of the session will say it.
                self.expect(Pending::Late(transfer));
            } else {
                actions.push(Action::NeverSettled(transfer));
            }
        }
        actions
    }

    /// The connection of a request is gone, and nobody has said what became of it. Where the owner is seen to be in the middle of
    /// what came over it, the transfer is not quiet when it ends now, and says so.
    fn may_still_change(
        &mut self,
        one: &Pending<W>,
        same_host: bool,
        how: Ended,
        owner_hung_up: bool,
        now: Instant,
        actions: &mut Actions<W>,
    ) {
        let Some(transfer) = one.changing().cloned() else { return };
        if how.is_applying {
            actions.push(Action::OutstandingWhileApplied(transfer, self.over_of(one)));
        } else if one.changes_a_gpu() && how.forsaken && !how.shows_what_is_applied && !owner_hung_up {
            // It may stand between its look at this side and the copy to its GPU, and nobody will say when it is past that.
            actions.push(Action::Outstanding(transfer));
        } else if !same_host && how.forsaken {
            if self.over.is_none() {
                // An owner that does not know how to say when a lane is over. The end of the session says it.
                self.expect(Pending::Late(transfer.clone()));
                actions.extend(self.begin_to_look(now).map(Action::LookAt));
                actions.push(Action::Outstanding(transfer));
            } else if !self.is_surely_over() {
                actions.push(Action::Outstanding(transfer));
            }
        }
    }

    /// The session is over, with that error: nothing more is asked. `here`: this side has ended it, and not the owner. False where it was
    /// over before.
    pub fn end(&mut self, error: Error, here: bool) -> bool {
        if self.over.is_some() {
            return false;
        }
        self.ended_here = here;
        self.over = Some(error);
        true
    }

    /// After the [end](Self::end), and after all of its connections were closed: ends what is still open. `how` says how each connection
    /// ended.
    pub fn bury(
        &mut self,
        how: impl Fn(ConnectionId) -> Ended,
        owner_hung_up: bool,
        now: Instant,
    ) -> Actions<W> {
        let error =
            self.over.clone().unwrap_or_else(|| Error::new(Kind::Internal, "session", "it is not over"));
        let surely = self.is_surely_over();
        let mut actions = Vec::new();
        self.checks.clear();
        while let Some((_, one)) = self.pending.pop_first() {
            match one.changing().cloned() {
                Some(transfer) if !surely => actions.push(Action::Outstanding(transfer)),
                Some(_) => {
                    let over = self.over_of(&one);
                    let same_host = self.connection(over).is_some_and(|one| one.same_host);
                    self.may_still_change(&one, same_host, how(over), owner_hung_up, now, &mut actions);
                }
                None => {}
            }
            match one {
                Pending::Open { waiter, .. } => actions.push(Action::Failed(waiter, error.clone())),
                Pending::Late(transfer) if surely => actions.push(Action::Settled(transfer)),
                Pending::Late(transfer) => actions.push(Action::NeverSettled(transfer)),
                Pending::Unwanted { .. } => {}
                Pending::Ending(lane) => actions.append(&mut self.lane_ended(lane, surely)),
            }
        }
        actions
    }

    /// Of a session that is over: whether nothing more of it will be applied, as far as can be known. Where this side has ended it,
    /// also because nothing came any more, bytes may still be in flight to the owner, which applies them.
    fn is_surely_over(&self) -> bool {
        !self.ended_here || self.control.same_host
    }
}
