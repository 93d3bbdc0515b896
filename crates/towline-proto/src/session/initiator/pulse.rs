//! Whether the owner's host is still there: asked while something is in flight, and never longer.

use std::time::{Duration, Instant};

use super::{Action, Actions, ConnectionId, Initiator, Waiter};
use crate::wire::{Message, Ping};
use crate::{Error, Kind};

/// While something is in flight between hosts, a frame goes out at least this often, so that a peer that does not acknowledge
/// it is noticed.
pub const HEARTBEAT: Duration = Duration::from_millis(500);

/// A host of which nothing has come for this long is gone: no frame, no byte, no acknowledgement of TCP. On a slow link these
/// come late, but they come.
pub const GONE: Duration = Duration::from_secs(2);

/// And it was asked this long ago: a process that was stopped itself has asked nobody meanwhile.
const LEAST_ASKED: Duration = Duration::from_secs(1);

/// The kernel counts in ticks of its clock, which are at most this long.
const TICK: Duration = Duration::from_millis(10);

/// What is known of the owner's host.
pub(super) struct Pulse {
    /// When a look began.
    since: Instant,
    /// When it was asked first that has not given a sign of life since.
    asked: Option<Instant>,
}

impl Pulse {
    /// Takes the last sign of life; gives when to look again, or none where the host is gone.
    fn look(&mut self, now: Instant, sign: Option<Instant>) -> Option<Instant> {
        if sign.is_some_and(|sign| self.asked.is_some_and(|asked| sign + TICK > asked)) {
            self.asked = None;
        }
        let due = sign.map_or(self.since, |sign| sign.max(self.since)) + GONE;
        let asked = *self.asked.get_or_insert(now);
        if now >= due && now >= asked + LEAST_ASKED {
            return None;
        }
        let next = now + HEARTBEAT;
        Some(if due > now { next.min(due) } else { next })
    }
}

/// What a look at the owner's host has shown.
pub enum Look<W: Waiter> {
    /// It is there, as far as is known.
    There(Actions<W>),
    /// It is gone.
    Gone(Error),
}

impl<W: Waiter> Initiator<W> {
    /// Between hosts: when a look is needed, where none is planned yet.
    pub(super) fn begin_to_look(&mut self, now: Instant) -> Option<Instant> {
        if !self.settings.between_hosts || self.pulse.is_some() {
            return None;
        }
        self.pulse = Some(Pulse { since: now, asked: None });
        Some(now + HEARTBEAT)
    }

    /// The time for a look has come: keeps frames going out while something is in flight, and looks for what comes back.
    ///
    /// `came` is when the owner's host was last seen to live. `moved` has the connections whose bytes were acknowledged since the last
    /// look, and when: that is progress of the changes that are asked for over them. Over a slow link the end of a write is in flight for long.
    pub fn look_at_host(
        &mut self,
        now: Instant,
        came: Option<Instant>,
        moved: &[(ConnectionId, Instant)],
    ) -> Look<W> {
        if self.pending.is_empty() {
            self.pulse = None;
        }
        let last = self.last_received;
        let Some(pulse) = &mut self.pulse else { return Look::There(Vec::new()) };
        let Some(next) = pulse.look(now, Some(came.map_or(last, |came| came.max(last)))) else {
            let message = format!(
                "the owner's host is gone: nothing has come from it for {} s, not even an acknowledgement",
                GONE.as_secs()
            );
            return Look::Gone(Error::new(Kind::Disconnected, "session", message));
        };
        let when = |over: ConnectionId| moved.iter().find(|(one, _)| *one == over).map(|(_, when)| *when);
        let changes =
            self.pending.values().filter_map(|one| Some((one.changing()?.clone(), when(self.over_of(one))?)));
        let mut actions: Actions<W> = changes.map(|(transfer, when)| Action::Moved(transfer, when)).collect();
        actions.push(Action::Send(self.control.id, Message::from(Ping {}).frame(0, 0, 0)));
        actions.push(Action::LookAt(next));
        Look::There(actions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_gone_two_seconds_after_its_last_sign_of_life() {
        let start = Instant::now();
        let mut pulse = Pulse { since: start, asked: None };
        let cut = start + Duration::from_millis(700);
        let mut now = start + HEARTBEAT;
        while let Some(next) = pulse.look(now, Some(now.min(cut))) {
            assert!(next > now && next <= now + HEARTBEAT);
            now = next;
        }
        assert_eq!(now, cut + GONE);
    }

    #[test]
    fn a_process_that_was_stopped_asks_before_it_calls_a_host_gone() {
        let start = Instant::now();
        let mut pulse = Pulse { since: start, asked: None };
        let before = start + HEARTBEAT;
        assert!(pulse.look(before, Some(before)).is_some());
        let sign = before + Duration::from_millis(1);
        let after = before + Duration::from_secs(60);
        assert!(pulse.look(after, Some(sign)).is_some());
        let answered = after + Duration::from_millis(1);
        assert!(pulse.look(after + HEARTBEAT, Some(answered)).is_some());
    }
}
