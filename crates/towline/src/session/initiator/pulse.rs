//! Whether the owner's host is still there: asked while something is in flight, and never longer.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{HEARTBEAT, HEARTBEAT_TIMER, Pending, Session};
use crate::session::Medium;
use crate::sync::lock;
use crate::wire;
use crate::{Error, Kind};

/// A host of which nothing has come for this long is gone: no frame, no byte, no acknowledgement of TCP. On a slow link these
/// come late, but they come.
const GONE: Duration = Duration::from_secs(2);

/// And it was asked this long ago: a process that was stopped itself has asked nobody meanwhile.
const LEAST_ASKED: Duration = Duration::from_secs(1);

/// The kernel counts in ticks of its clock, which are at most this long.
const TICK: Duration = Duration::from_millis(10);

/// What is known of the owner's host.
pub(super) struct Pulse {
    /// When somebody began to look.
    since: Instant,
    /// When it was asked first that has not given a sign of life since.
    asked: Option<Instant>,
}

impl Pulse {
    pub(super) fn new() -> Pulse {
        Pulse { since: Instant::now(), asked: None }
    }

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

impl Session {
    /// Between hosts: keeps frames going out while something is in flight, and looks for what comes back.
    pub(super) fn beat(&self) {
        if matches!(self.medium, Medium::Tcp(_)) && !self.beating.swap(true, Ordering::AcqRel) {
            *lock(&self.pulse) = Pulse::new();
            self.wake_at(Instant::now() + HEARTBEAT, HEARTBEAT_TIMER);
        }
    }

    /// The time for a look has come.
    pub(super) fn feel_pulse(&self) {
        if lock(&self.pending).is_empty() {
            self.beating.store(false, Ordering::Release);
            // Who asked for something meanwhile may have seen that somebody looks.
            if !lock(&self.pending).is_empty() {
                self.beat();
            }
            return;
        }
        self.count_acknowledged();
        let (now, sign) = (Instant::now(), self.sign_of_life());
        let next = lock(&self.pulse).look(now, sign);
        let Some(next) = next else {
            let message = format!(
                "the owner's host is gone: nothing has come from it for {} s, not even an acknowledgement",
                GONE.as_secs()
            );
            return self.fail(Error::new(Kind::Disconnected, "session", message));
        };
        let _ = self.tell(wire::Ping {});
        self.wake_at(next, HEARTBEAT_TIMER);
    }

    /// What the owner's host acknowledges is progress of the changes that are asked for over that connection: over a slow link the end
    /// of a write is on its way for long.
    fn count_acknowledged(&self) {
        let moving: Vec<_> =
            self.connections().into_iter().filter_map(|one| Some((one.last_got_on()?, one))).collect();
        if moving.is_empty() {
            return;
        }
        let moved = |pending: &Pending| {
            let over = self.connection_of(pending)?;
            moving.iter().find(|(_, one)| Arc::ptr_eq(one, over)).map(|(when, _)| *when)
        };
        let changes: Vec<_> = lock(&self.pending)
            .values()
            .filter_map(|pending| Some((moved(pending)?, pending.changing()?.clone())))
            .collect();
        for (when, transfer) in changes {
            transfer.got_on(when);
        }
    }

    /// When anything last came from the owner's host, over any connection.
    fn sign_of_life(&self) -> Option<Instant> {
        let connections = self.connections();
        let heard = connections.iter().filter_map(|one| one.socket().socket().last_came());
        Instant::now().checked_sub(heard.fold(self.silence(), Duration::min))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

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
