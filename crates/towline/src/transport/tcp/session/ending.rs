//! How what is in flight ends before its answer has come: stopped, unsettled, or with the session or one of its lanes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Pending, SETTLE_TIMER, Session};
use crate::sync::lock;
use crate::transport::tcp::afar;
use crate::transport::tcp::connection::Connection;
use crate::transport::tcp::run::Run;
use crate::{Error, Kind, progress};

/// How long the owner may take to say what became of a write that was stopped, since it was asked or was last heard: the write's
/// own limit without progress, but within these bounds, which leave time for a long round trip and still are no long wait.
/// Then the connection is reset, so that nothing of the write happens any more.
const LEAST_GRACE: Duration = Duration::from_millis(500);
const MOST_GRACE: Duration = Duration::from_secs(2);

/// However often it is heard, an owner has no longer than this since the stop, or the limit without progress where that is longer:
/// one that says everything but what became of the write must not keep it for ever.
const LEAST_PATIENCE: Duration = MOST_GRACE;

impl Session {
    /// Makes a transfer quiet: nothing of it is sent or received any more. What has been sent and changes the owner's memory
    /// stays pending: see [`settle`](Self::settle).
    pub(in crate::transport::tcp) fn stop(&self, run: &Run) {
        let id = run.transfer.id;
        self.take_all_back(id);
        let reads: Vec<u64> = lock(&self.pending)
            .iter()
            .filter(|(_, pending)| matches!(pending, Pending::Unit { run, .. } if run.transfer.id == id))
            .filter(|(_, pending)| pending.changing().is_none())
            .map(|(request, _)| *request)
            .collect();
        self.stopped(reads.into_iter().filter_map(|request| self.give_up(request)));
        self.settle();
    }

    /// [`take_back`](Self::take_back) from every connection.
    pub(in crate::transport::tcp) fn take_all_back(&self, transfer: u64) {
        let connections: Vec<_> = lock(&self.lanes).open.iter().chain(self.control.get()).cloned().collect();
        for connection in connections {
            self.take_back(&connection, transfer);
        }
    }

    /// Takes the frames of a stopped transfer back that have not been sent over that connection, and ends their requests. Whoever does
    /// the one does the other, for all of them: to anybody who comes later, a request without a frame looks like one that was sent.
    /// Bytes of the transfer that are coming in go nowhere from here on, and those that come later neither: their request may be ended.
    pub(in crate::transport::tcp) fn take_back(&self, connection: &Connection, transfer: u64) {
        let unsent = connection.withdraw(|keep| keep.is_transfer(transfer));
        self.stopped(unsent.into_iter().filter_map(|request| self.forget(request)));
        connection.discard(|keep| keep.is_transfer(transfer));
    }

    fn stopped(&self, requests: impl Iterator<Item = Pending>) {
        for request in requests {
            if let Pending::Unit { run, unit, .. } = request {
                run.failed(unit, run.transfer.stop_error());
            }
        }
    }

    /// Ends what was stopped and may still change the owner's memory: the owner's answer ends it, or, where none comes in time,
    /// the reset of its connection.
    pub(in crate::transport::tcp) fn settle(&self) {
        let now = Instant::now();
        let heard = self.began + Duration::from_micros(self.heard.load(Ordering::Relaxed));
        let mut next: Option<Instant> = None;
        let mut silent: Vec<Arc<Connection>> = Vec::new();
        for pending in lock(&self.pending).values() {
            let Some(transfer) = pending.changing() else { continue };
            let (started, Some(stopped)) = transfer.span_of_time() else { continue };
            let grace = transfer.limits.no_progress.clamp(LEAST_GRACE, MOST_GRACE);
            let patience = transfer.limits.no_progress.max(LEAST_PATIENCE);
            let due = (started.max(heard) + grace).max(stopped).min(progress::later(stopped, patience));
            if due > now {
                next = Some(next.map_or(due, |next| next.min(due)));
                continue;
            }
            let connection = match pending {
                Pending::Unit { connection, .. } => Some(connection),
                _ => self.control.get(),
            };
            silent.extend(
                connection.filter(|one| !silent.iter().any(|known| Arc::ptr_eq(known, one))).cloned(),
            );
        }
        for connection in silent {
            let message = "the owner did not say what became of a write that was stopped";
            connection.reset(Error::new(Kind::Disconnected, "session", message));
        }
        if let Some(next) = next {
            self.wake_at(next, SETTLE_TIMER);
        }
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
            afar::listen(transfer, place, self.owner_process());
        } else if pending.changes_a_gpu()
            && connection.is_forsaken()
            && !connection.shows_what_is_applied()
            && !self.owner_hung_up()
        {
            // It may stand between its look at this side and the copy to its GPU, and nobody will say when it is past that.
            transfer.unfinished_afar();
        }
    }

    /// Whether the owner ended the session, which is what its kernel does when it has exited.
    fn owner_hung_up(&self) -> bool {
        self.control.get().is_some_and(|control| control.is_closed() && !control.is_forsaken())
    }

    /// The owner is gone, or the connection to it is: everything in flight ends with that error.
    pub(crate) fn fail(&self, error: Error) {
        let error = error.on(self.medium.name()).with_peer(self.peer_name());
        if self.dead.set(error.clone()).is_ok() {
            let _ = self.lost.set(Instant::now());
            self.bury(&error);
        }
    }

    /// Everything in flight ends, and nothing moves any more.
    fn bury(&self, error: &Error) {
        if let Some(local) = &self.local {
            drop(lock(&local.alive).take());
            local.mappings.let_go();
        }
        let borrowing: Vec<_> =
            lock(&self.borrowing).drain().filter_map(|(_, borrowing)| borrowing.upgrade()).collect();
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
        for pending in pending {
            self.may_still_change(&pending);
            match pending {
                Pending::Import(reply) => reply.fill(self, Err(error.clone())),
                Pending::Ask(asker) => drop(asker.try_send(Err(error.clone()))),
                Pending::Unit { run, unit, .. } => run.failed(unit, error.clone()),
                Pending::Atomic { transfer } => transfer.unit_failed(0, error.clone()),
            }
        }
        let starting: Vec<_> = lock(&self.starting).drain(..).filter_map(|run| run.upgrade()).collect();
        for run in starting {
            run.fail_rest(error);
        }
        if let Some(endpoint) = self.endpoint.upgrade() {
            let mut sessions = lock(&endpoint.sessions);
            let key = (self.owner.incarnation, self.medium.name());
            if sessions.get(&key).is_some_and(|session| std::ptr::eq(Arc::as_ptr(session), self)) {
                sessions.remove(&key);
            }
        }
    }

    /// Ends it on this side's wish.
    pub(crate) fn close(&self, error: Error) {
        let error = error.on(self.medium.name()).with_peer(self.peer_name());
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
        lane.let_go();
        let lost: Vec<_> = {
            let mut pending = lock(&self.pending);
            let requests: Vec<u64> = pending
                .iter()
                .filter(|(_, one)| {
                    matches!(one, Pending::Unit { connection, .. } if Arc::ptr_eq(connection, lane))
                })
                .map(|(request, _)| *request)
                .collect();
            lock(&self.owed).gone(lane);
            requests.into_iter().filter_map(|request| pending.remove(&request)).collect()
        };
        for pending in lost {
            self.may_still_change(&pending);
            if let Pending::Unit { run, unit, .. } = pending {
                run.lost(unit, error.clone());
            }
        }
    }
}
