//! How what was stopped becomes quiet: by the owner's reply, by the end of its connection, or by the owner's word that this is over.

use std::time::{Duration, Instant};

use super::{Action, Actions, Asks, ConnectionId, Initiator, Pending, Transfer, Waiter};
use crate::wire::{Message, Withdraw};
use crate::{Error, Kind};

/// How long the owner may take to say what became of a write that was stopped, since it was asked or last sent anything: the write's
/// own limit without progress, but within these bounds, which leave time for a long round trip and still are no long wait.
/// Then the connection is reset, so that nothing of the write happens any more.
const LEAST_GRACE: Duration = Duration::from_millis(500);
const MOST_GRACE: Duration = Duration::from_secs(2);

/// However often something comes from it, an owner has no longer than this since the stop: one that says everything but what became of the write
/// must not keep it for ever, nor a slow link. With the time for the [end of a lane](super::lost) it is less than two seconds.
const PATIENCE: Duration = Duration::from_millis(1400);

/// How long the reply to a read that was stopped may keep a lane busy: then the lane is reset, and what is left of the reply dropped
/// where it is.
const UNWANTED: Duration = Duration::from_millis(500);

/// So many changes of one owner are kept in mind that have ended without its word. One more ends the session.
const MOST_LATE: usize = 1024;

impl<W: Waiter> Initiator<W> {
    /// A transfer was stopped, and all of its frames taken back that were [not sent](Self::unsent): nothing of it is received any more. What
    /// has been sent and changes the owner's memory stays open: see [`settle`](Self::settle).
    pub fn stop(&mut self, transfer: u64, now: Instant) -> Actions<W> {
        let reads = self.pending.iter().filter(|(_, one)| match one {
            Pending::Open { waiter, asks: Asks::Bytes { .. }, .. } => {
                waiter.transfer().is_some_and(|of| of.id() == transfer)
            }
            _ => false,
        });
        let reads: Vec<u64> = reads.map(|(request, _)| *request).collect();
        let mut actions = Vec::new();
        for request in reads {
            self.unwanted(request, now, &mut actions);
        }
        actions.append(&mut self.settle(now));
        actions
    }

    /// A request was sent whose transfer was stopped before it was open: the thread that stopped it has not seen it.
    pub fn stop_late(&mut self, request: u64, now: Instant) -> Actions<W> {
        let mut actions = Vec::new();
        self.unwanted(request, now, &mut actions);
        actions.append(&mut self.settle(now));
        actions
    }

    /// Ends the request of a read that was stopped, which has been sent. Between hosts the owner is notified, and a lane over which the
    /// answer comes all the same is not left to it for long: see [`settle`](Self::settle).
    fn unwanted(&mut self, request: u64, now: Instant, actions: &mut Actions<W>) {
        let Some(Pending::Open { asks: Asks::Bytes { .. }, over, .. }) = self.pending.get(&request) else {
            return;
        };
        let over = *over;
        let Some(one) = self.pending.remove(&request) else { return };
        self.checks.remove(&request);
        if self.settings.between_hosts && self.is_lane(over) && self.connection(over).is_some() {
            self.pending.insert(request, Pending::Unwanted { over, since: now });
        } else {
            self.owes(request, &one);
        }
        if self.settings.ends_lanes {
            actions.push(Action::Send(over, Message::from(Withdraw {}).frame(request, 0, 0)));
        }
        actions.extend(Self::waiter(one).map(Action::Stopped));
    }

    /// Ends what was stopped and may still change the owner's memory: the owner's reply ends it, or, where none comes in time,
    /// the reset of its connection. Of a lane that is not known to end at once the owner is asked whether it has; a control connection like
    /// that stays, and the transfer ends without being quiet.
    pub fn settle(&mut self, now: Instant) -> Actions<W> {
        if self.over.is_some() {
            return Vec::new();
        }
        let mut next: Option<Instant> = None;
        let mut due: Vec<u64> = Vec::new();
        let mut silent: Vec<ConnectionId> = Vec::new();
        for (request, one) in &self.pending {
            let Some(mut when) = self.due(one) else { continue };
            let over = self.over_of(one);
            if when <= now && matches!(one, Pending::Unwanted { .. }) && self.is_changed_over(over) {
                // A write that goes well is worth more than the time that this takes.
                when = now + UNWANTED;
            }
            if when > now {
                next = Some(next.map_or(when, |next| next.min(when)));
                continue;
            }
            let ends = self.is_lane(over) || self.connection(over).is_some_and(|one| one.same_host);
            if !ends || matches!(one, Pending::Ending(_)) {
                due.push(*request);
            } else if !silent.contains(&over) {
                silent.push(over);
            }
        }
        let mut actions = Vec::new();
        for request in due {
            self.ends_without_a_word(request, &mut actions);
        }
        let message = "the owner did not reply in time to a request that was stopped";
        let reset = |over| Action::Reset(over, Error::new(Kind::Disconnected, "session", message));
        actions.extend(silent.into_iter().map(reset));
        actions.extend(next.map(Action::SettleAt));
        actions
    }

    /// When a waiter has waited long enough for the owner.
    fn due(&self, one: &Pending<W>) -> Option<Instant> {
        match one {
            Pending::Unwanted { since, .. } => return Some(*since + UNWANTED),
            Pending::Ending(lane) => return lane.until(),
            _ => {}
        }
        let times = one.changing()?.times();
        let stopped = times.stopped?;
        let grace = times.no_progress.clamp(LEAST_GRACE, MOST_GRACE);
        Some((times.started.max(self.last_received) + grace).max(stopped).min(stopped + PATIENCE))
    }

    fn is_changed_over(&self, over: ConnectionId) -> bool {
        self.pending.values().any(|one| one.changing().is_some() && self.over_of(one) == over)
    }

    /// A request ends whose owner has not said in time what became of it. Its transfer is not quiet until that comes.
    fn ends_without_a_word(&mut self, request: u64, actions: &mut Actions<W>) {
        match self.pending.remove(&request) {
            Some(Pending::Ending(mut lane)) => {
                lane.give_up(actions);
                self.pending.insert(request, Pending::Ending(lane));
            }
            Some(Pending::Open { waiter, .. }) => {
                if let Some(transfer) = waiter.transfer().cloned() {
                    self.pending.insert(request, Pending::Late(transfer.clone()));
                    actions.push(Action::Outstanding(transfer));
                }
                actions.push(Action::Stopped(waiter));
            }
            Some(other) => {
                self.pending.insert(request, other);
            }
            None => {}
        }
        let is_late = |one: &&Pending<W>| matches!(one, Pending::Late(_) | Pending::Ending(_));
        let late = self.pending.values().filter(is_late).count();
        if late > MOST_LATE {
            let message = format!("the owner has not replied to {late} requests that were stopped");
            actions.push(Action::Reset(self.control.id, Error::new(Kind::Disconnected, "session", message)));
        }
    }
}
