//! How what is in flight ends before its answer has come: stopped, unsettled, or with the session or one of its lanes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Pending, SETTLE_TIMER, Session};
use crate::fence::pins::Side;
use crate::session::connection::{Connection, Role};
use crate::session::parts::{Keep, Payload};
use crate::session::run::Run;
use crate::session::{Medium, outstanding, sharing};
use crate::sync::lock;
use crate::wire::{self, Message};
use crate::{Error, Kind, ended};

/// How long the owner may take to say what became of a write that was stopped, since it was asked or was last heard: the write's
/// own limit without progress, but within these bounds, which leave time for a long round trip and still are no long wait.
/// Then the connection is reset, so that nothing of the write happens any more.
const LEAST_GRACE: Duration = Duration::from_millis(500);
const MOST_GRACE: Duration = Duration::from_secs(2);

/// However often it is heard, an owner has no longer than this since the stop: one that says everything but what became of the write
/// must not keep it for ever, nor a slow link. With the time for the [end of a lane](super::unquiet) it is less than two seconds.
const PATIENCE: Duration = Duration::from_millis(1400);

/// How long the answer to a read that was stopped may keep a lane busy: then the lane is reset, and what is left of the answer dropped
/// where it is.
const UNWANTED: Duration = Duration::from_millis(500);

impl Session {
    /// Makes a transfer quiet: nothing of it is sent or received any more. What has been sent and changes the owner's memory
    /// stays pending: see [`settle`](Self::settle).
    pub(crate) fn stop(&self, run: &Run) {
        let id = run.transfer.id;
        self.take_all_back(id);
        let reads: Vec<u64> = lock(&self.pending)
            .iter()
            .filter(|(_, pending)| matches!(pending, Pending::Unit { run, .. } if run.transfer.id == id))
            .filter(|(_, pending)| pending.changing().is_none())
            .map(|(request, _)| *request)
            .collect();
        for request in reads {
            self.unwanted(request);
        }
        self.settle();
    }

    /// Ends the request of a read that was stopped, which has been sent. Between hosts the owner is told, and a lane over which the
    /// answer comes all the same is not left to it for long: see [`settle`](Self::settle).
    pub(in crate::session) fn unwanted(&self, request: u64) {
        let mut pending = lock(&self.pending);
        let Some(Pending::Unit { connection, .. }) = pending.get(&request) else { return };
        let connection = Arc::clone(connection);
        // Whoever closes a lane looks afterwards who waits for it.
        let tracked = matches!(self.medium, Medium::Tcp(_))
            && connection.role() == Role::Lane
            && !connection.is_closed();
        let unwanted = Pending::Unwanted { connection: Arc::clone(&connection), since: Instant::now() };
        let ended = if tracked { pending.insert(request, unwanted) } else { pending.remove(&request) };
        if let (false, Some(one)) = (tracked, &ended) {
            self.owes(request, one);
        }
        lock(&self.checks).remove(&request);
        drop(pending);
        let Some(Pending::Unit { run, unit, .. }) = ended else { return };
        if self.ends_lanes {
            let frame = Message::from(wire::Withdraw {}).frame(request, 0, 0);
            let _ = connection.send(frame, Vec::new(), Payload::None, Keep::Nothing);
        }
        run.failed(unit, run.transfer.stop_error());
    }

    /// A payload has come whole, and gone nowhere.
    pub(super) fn went_nowhere(&self, request: u64) {
        if let Some(Pending::Unit { run, unit, .. }) = self.forget(request) {
            run.failed(unit, run.transfer.stop_error());
        }
    }

    /// [`take_back`](Self::take_back) from every connection.
    pub(crate) fn take_all_back(&self, transfer: u64) {
        for connection in self.connections() {
            self.take_back(&connection, transfer);
        }
    }

    /// Takes the frames of a stopped transfer back that have not been sent over that connection, and ends their requests. Whoever does
    /// the one does the other, for all of them: to anybody who comes later, a request without a frame looks like one that was sent.
    /// Bytes of the transfer that are coming in go nowhere from here on, and those that come later neither: their request may be ended.
    pub(in crate::session) fn take_back(&self, connection: &Connection, transfer: u64) {
        let unsent = connection.withdraw(|keep| keep.is_transfer(transfer));
        for request in unsent {
            if let Some(Pending::Unit { run, unit, .. }) = self.forget(request) {
                run.failed(unit, run.transfer.stop_error());
            }
        }
        connection.discard(|keep| keep.is_transfer(transfer));
    }

    /// Ends what was stopped and may still change the owner's memory: the owner's answer ends it, or, where none comes in time,
    /// the reset of its connection. Of a lane that is not known to [end at once](Connection::ends_at_once) the owner is asked whether it has;
    /// a control connection like that stays, and the transfer ends without being quiet.
    pub(crate) fn settle(&self) {
        let now = Instant::now();
        let heard = self.began + Duration::from_micros(self.heard.load(Ordering::Relaxed));
        let mut next: Option<Instant> = None;
        let mut due: Vec<u64> = Vec::new();
        let mut silent: Vec<Arc<Connection>> = Vec::new();
        {
            let pending = lock(&self.pending);
            for (request, one) in pending.iter() {
                let Some(mut when) = self.due(one, heard) else { continue };
                let connection = self.connection_of(one);
                if when <= now
                    && let (Pending::Unwanted { .. }, Some(connection)) = (one, connection)
                    && pending.values().any(|other| self.is_changed_over(other, connection))
                {
                    // A write that goes well is worth more than the time that this takes.
                    when = now + UNWANTED;
                }
                if when > now {
                    next = Some(next.map_or(when, |next| next.min(when)));
                    continue;
                }
                match connection.filter(|one| one.role() == Role::Lane || one.ends_at_once()) {
                    Some(over) if !matches!(one, Pending::Ending(_)) => {
                        if !silent.iter().any(|known| Arc::ptr_eq(known, over)) {
                            silent.push(Arc::clone(over));
                        }
                    }
                    _ => due.push(*request),
                }
            }
        }
        for request in due {
            self.ends_without_a_word(request);
        }
        for connection in silent {
            let message = "the owner did not answer in time what was stopped";
            connection.reset(Error::new(Kind::Disconnected, "session", message));
        }
        if let Some(next) = next {
            self.wake_at(next, SETTLE_TIMER);
        }
    }

    /// When somebody has waited long enough for the owner.
    fn due(&self, pending: &Pending, heard: Instant) -> Option<Instant> {
        match pending {
            Pending::Unwanted { since, .. } => return Some(*since + UNWANTED),
            Pending::Ending(lane) => return lane.until(),
            _ => {}
        }
        let transfer = pending.changing()?;
        let (started, Some(stopped)) = transfer.span_of_time() else { return None };
        let grace = transfer.limits.no_progress.clamp(LEAST_GRACE, MOST_GRACE);
        Some((started.max(heard) + grace).max(stopped).min(stopped + PATIENCE))
    }

    fn is_changed_over(&self, pending: &Pending, connection: &Arc<Connection>) -> bool {
        pending.changing().is_some()
            && self.connection_of(pending).is_some_and(|over| Arc::ptr_eq(over, connection))
    }

    /// The connection of a request is gone, and nobody has said what became of it. Where the owner is seen to be in the middle of
    /// what came over it, the transfer is not quiet when it ends now, and says so.
    fn may_still_change(&self, pending: &Pending) {
        let Some(transfer) = pending.changing() else { return };
        let connection = match pending {
            Pending::Unit { connection, .. } => Some(connection),
            _ => self.control.get(),
        };
        let Some(connection) = connection else { return };
        if let Some(place) = connection.unfinished() {
            outstanding::listen(transfer, place, self.owner_process());
        } else if pending.changes_a_gpu()
            && connection.is_forsaken()
            && !connection.shows_what_is_applied()
            && !self.owner_hung_up()
        {
            // It may stand between its look at this side and the copy to its GPU, and nobody will say when it is past that.
            transfer.unfinished_afar();
        } else if !connection.ends_at_once() && connection.is_forsaken() {
            if self.alive().is_ok() {
                // An owner that does not know how to say when a lane is over. The end of the session says it.
                self.late(transfer);
            } else if !self.is_surely_over() {
                transfer.unfinished_afar();
            }
        }
    }

    /// Whether the owner ended the session, which is what its kernel does when it has exited. Between hosts by its word or its end of the
    /// stream: a reset may be anybody's.
    fn owner_hung_up(&self) -> bool {
        self.control.get().is_some_and(|control| control.is_closed() && !control.is_forsaken())
    }

    /// The owner is gone, or the connection to it is: everything in flight ends with that error.
    pub(crate) fn fail(&self, error: Error) {
        let error = self.why_over(error).with_peer(self.peer_name());
        if error.kind() == Kind::Disconnected && !self.owner_hung_up() {
            self.ended_here();
        }
        if self.dead.set(error.clone()).is_ok() {
            let _ = self.lost.set(Instant::now());
            self.bury(&error);
        }
    }

    /// Why it is over, in the light of what is known now: a broken connection says nothing of its owner, the end of its process does.
    #[cold]
    pub(super) fn why_over(&self, error: Error) -> Error {
        let owner = self.owner.incarnation;
        if error.kind() != Kind::Disconnected || !(ended::contains(&owner) || self.owner_has_died()) {
            return error;
        }
        ended::remember(owner);
        self.owner_died().caused_by(error)
    }

    /// What everybody is told where the owner's process has ended.
    pub(super) fn owner_died(&self) -> Error {
        Error::owner_gone("session", "the owner's process has ended").with_peer(self.peer_name())
    }

    fn owner_has_died(&self) -> bool {
        let by_mutex = self.shared().is_some_and(|local| local.pins.life(Side::Owner).has_died());
        by_mutex
            || self.medium == Medium::Unix
                && self.control.get().is_some_and(|control| sharing::has_ended(control.socket().socket()))
    }

    /// What the owner's goodbye means.
    pub(super) fn goodbye(&self, bye: wire::Bye) -> Error {
        if let Some(error) = bye.error {
            return Error::new(Kind::Disconnected, "session", error.message);
        }
        // Where anybody on the way could have said so, it is believed of this session only.
        if self.medium == Medium::Unix || self.is_encrypted() {
            ended::remember(self.owner.incarnation);
        }
        Error::owner_gone("session", "the owner has closed its endpoint")
    }

    /// Of a session that has ended: whether nothing more of it will be applied, as far as can be known. Where this side has ended it,
    /// also because it heard nothing any more, bytes may still be on their way to the owner, which applies them.
    pub(super) fn is_surely_over(&self) -> bool {
        !self.closed_here.load(Ordering::Acquire)
            || self.control.get().is_some_and(|control| control.ends_at_once())
    }

    /// Before anybody can see that it is over. Where it was already, what was in flight has ended.
    fn ended_here(&self) {
        if self.dead.get().is_none() {
            self.closed_here.store(true, Ordering::Release);
        }
    }

    /// Everything in flight ends, and nothing moves any more.
    fn bury(&self, error: &Error) {
        if let Some(local) = &self.local {
            drop(lock(&local.alive).take());
            local.mappings.let_go();
        }
        let borrowing: Vec<_> =
            lock(&self.borrowing).drain().flat_map(|(_, one)| one.living().collect::<Vec<_>>()).collect();
        for one in borrowing {
            one.recalled();
        }
        let connections: Vec<_> =
            lock(&self.lanes).open.drain(..).chain(self.control.get().cloned()).collect();
        // Their callers learn below that nothing of them happens any more.
        let unsettled = lock(&self.pending).values().any(|pending| pending.changing().is_some());
        for connection in connections {
            if unsettled {
                connection.reset(error.clone())
            } else {
                connection.close(error.clone())
            }
            // What is pending reports below, so nothing may move any more.
            connection.let_go();
        }
        let pending: Vec<_> = lock(&self.pending).drain().map(|(_, pending)| pending).collect();
        let surely = self.is_surely_over();
        for pending in pending {
            match pending.changing() {
                Some(transfer) if !surely => transfer.unfinished_afar(),
                _ => self.may_still_change(&pending),
            }
            match pending {
                Pending::Import(reply) => reply.fill(self, Err(error.clone())),
                Pending::Ask(asker) => drop(asker.try_send(Err(error.clone()))),
                Pending::Unit { run, unit, .. } => run.failed(unit, error.clone()),
                Pending::Atomic { transfer } => transfer.unit_failed(0, error.clone()),
                Pending::Unwanted { .. } => {}
                Pending::Late(transfer) if surely => transfer.finished_afar(),
                Pending::Late(_) => {}
                Pending::Ending(lane) => self.lane_ended(lane, surely),
            }
        }
        let starting: Vec<_> = lock(&self.starting).drain(..).filter_map(|run| run.upgrade()).collect();
        for run in starting {
            run.fail_rest(error);
        }
        if let Some(sessions) = self.sessions.upgrade() {
            sessions.forget(self);
        }
    }

    /// Ends it on this side's wish.
    pub(crate) fn close(&self, error: Error) {
        let error = error.with_peer(self.peer_name());
        self.ended_here();
        if self.dead.set(error.clone()).is_ok() {
            let _ = self.lost.set(Instant::now());
            // Goodbye means that no pin is held: a copy that begins now sees that the session is over.
            // In this order: a path that borrows may let go of its pins when it is asked.
            let quiet =
                self.borrows_nothing() && self.local.as_ref().is_none_or(|local| local.pins.is_idle());
            if let Some(control) = self.control.get().filter(|_| quiet) {
                control.bye(None);
            }
            self.bury(&error);
        }
    }

    /// A lane has failed: what was in flight on it fails, the rest goes on.
    pub(super) fn lane_closed(&self, lane: &Arc<Connection>, error: &Error) {
        let error = self.dead.get().unwrap_or(error);
        lock(&self.lanes).open.retain(|open| !Arc::ptr_eq(open, lane));
        let unsent = lane.unsent();
        lane.let_go();
        let lost: Vec<_> = {
            let mut pending = lock(&self.pending);
            let over = |one: &Pending| {
                let connection = match one {
                    Pending::Unit { connection, .. } | Pending::Unwanted { connection, .. } => connection,
                    _ => return false,
                };
                Arc::ptr_eq(connection, lane)
            };
            lock(&self.owed).gone(lane);
            pending.extract_if(|_, one| over(one)).collect()
        };
        let mut unsure = Vec::new();
        for (request, pending) in lost {
            let unsent = unsent.contains(&request);
            let sees_the_end = lane.shows_what_is_applied() || !pending.changes_a_gpu();
            let is_over = unsent || lane.ends_at_once() && sees_the_end;
            let asks = !is_over && pending.changing().is_some() && self.ends_lanes && self.alive().is_ok();
            if !asks && !unsent {
                self.may_still_change(&pending);
            }
            if let Pending::Unit { run, unit, .. } = pending {
                if asks {
                    unsure.push((run, unit));
                } else {
                    run.lost(unit, error.clone(), unsent);
                }
            }
        }
        if !unsure.is_empty() {
            self.end_lane(lane, unsure, error);
        }
    }
}
