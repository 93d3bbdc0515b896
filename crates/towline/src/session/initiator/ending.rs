//! How what is in flight ends before its reply has come: stopped, or with the session or one of its lanes.

use std::sync::Arc;
use std::time::Instant;

use towline_proto::session::initiator::Ended;

use super::Session;
use crate::fence::pins::Side;
use crate::session::connection::Connection;
use crate::session::run::Run;
use crate::session::{Medium, sharing};
use crate::{Error, Kind, ended, wire};

impl Session {
    /// Makes a transfer quiet: nothing of it is sent or received any more. What has been sent and changes the owner's memory
    /// stays open until it is settled.
    pub(crate) fn stop(&self, run: &Run) {
        let id = run.transfer.id;
        self.take_all_back(id);
        let actions = self.rules.lock().stop(id, Instant::now());
        self.act(actions, &[]);
    }

    /// Ends what was stopped and has waited long enough for the owner's reply.
    pub(crate) fn settle(&self) {
        let actions = self.rules.lock().settle(Instant::now());
        self.act(actions, &[]);
    }

    /// A request was queued whose transfer was stopped before it was open.
    pub(in crate::session) fn stop_late(&self, connection: &Connection, transfer: u64, request: u64) {
        self.take_back(connection, transfer);
        let actions = self.rules.lock().stop_late(request, Instant::now());
        self.act(actions, &[]);
    }

    /// [`take_back`](Self::take_back) from every connection.
    pub(crate) fn take_all_back(&self, transfer: u64) {
        for connection in self.connections() {
            self.take_back(&connection, transfer);
        }
    }

    /// Takes the frames of a stopped transfer back that have not been sent over that connection, and ends their requests. The thread that does
    /// the one does the other, for all of them: to a thread that comes later, a request without a frame looks like one that was sent.
    /// Bytes of the transfer that are coming in go nowhere from here on, and those that come later neither: their request may be ended.
    fn take_back(&self, connection: &Connection, transfer: u64) {
        let unsent = connection.withdraw(|keep| keep.is_transfer(transfer));
        for waiter in unsent.into_iter().filter_map(|request| self.unsent(request)) {
            waiter.stopped();
        }
        connection.discard(|keep| keep.is_transfer(transfer));
    }

    /// Whether the owner ended the session, which is what its kernel does when it has exited. Between hosts by its word or its end of the
    /// stream: a reset may come from any host on the way.
    fn owner_hung_up(&self) -> bool {
        self.control.is_closed() && !self.control.is_forsaken()
    }

    /// The owner is gone, or the connection to it is: everything in flight ends with that error.
    pub(crate) fn fail(&self, error: Error) {
        let error = self.why_over(error).with_peer(self.peer_name());
        let here = error.kind() == Kind::Disconnected && !self.owner_hung_up();
        if self.end(&error, here) {
            self.bury(&error);
        }
    }

    /// Nothing more is asked; false where it was over before.
    fn end(&self, error: &Error, here: bool) -> bool {
        let first = self.rules.lock().end(error.clone(), here);
        if first {
            let _ = self.dead.set(error.clone());
            let _ = self.lost.set(Instant::now());
        }
        first
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

    /// The error that all get where the owner's process has ended.
    pub(super) fn owner_died(&self) -> Error {
        Error::owner_gone("session", "the owner's process has ended").with_peer(self.peer_name())
    }

    fn owner_has_died(&self) -> bool {
        let by_mutex = self.shared().is_some_and(|local| local.pins.life(Side::Owner).has_died());
        by_mutex || self.medium == Medium::Unix && sharing::has_ended(self.control.socket().socket())
    }

    /// What the owner's goodbye means.
    pub(super) fn goodbye(&self, bye: wire::Bye) -> Error {
        if let Some(error) = bye.error {
            return Error::new(Kind::Disconnected, "session", error.message);
        }
        // Where any host on the way could have said so, it is believed of this session only.
        if self.medium == Medium::Unix || self.is_encrypted() {
            ended::remember(self.owner.incarnation);
        }
        Error::owner_gone("session", "the owner has closed its endpoint")
    }

    /// Everything in flight ends, and nothing moves any more.
    fn bury(&self, error: &Error) {
        if let Some(local) = &self.local {
            drop(local.alive.lock().take());
            local.mappings.let_go();
        }
        let borrowing: Vec<_> =
            self.borrowing.lock().drain().flat_map(|(_, one)| one.living().collect::<Vec<_>>()).collect();
        for one in borrowing {
            one.recalled();
        }
        let mut connections: Vec<_> = self.lanes.lock().open.drain(..).collect();
        connections.push(Arc::clone(&self.control));
        // Their callers learn below that nothing of them happens any more.
        let unsettled = self.rules.lock().is_changing();
        for connection in &connections {
            if unsettled {
                connection.reset(error.clone())
            } else {
                connection.close(error.clone())
            }
            // What is open reports below, so nothing may move any more.
            connection.let_go();
        }
        let how = |over| {
            let connection = connections.iter().find(|one| one.id() == over);
            connection.map_or_else(|| self.control.ended(), |one| one.ended())
        };
        let actions = self.rules.lock().bury(how, self.owner_hung_up(), Instant::now());
        self.act(actions, &connections);
        let starting: Vec<_> = self.starting.lock().drain(..).filter_map(|run| run.upgrade()).collect();
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
        if self.end(&error, true) {
            // Goodbye means that no pin is held: a copy that begins now sees that the session is over.
            // In this order: a path that borrows may let go of its pins when it is asked.
            let quiet =
                self.borrows_nothing() && self.local.as_ref().is_none_or(|local| local.pins.is_idle());
            if quiet {
                self.control.bye(None);
            }
            self.bury(&error);
        }
    }

    /// A lane has failed: what was in flight on it fails, the rest goes on.
    pub(super) fn lane_closed(&self, lane: &Arc<Connection>, error: &Error) {
        self.lanes.lock().open.retain(|open| !Arc::ptr_eq(open, lane));
        let unsent = lane.unsent();
        lane.let_go();
        let actions = self.rules.lock().lane_closed(lane.id(), lane.ended(), &unsent, error, Instant::now());
        self.act(actions, &[Arc::clone(lane)]);
    }
}

impl Connection {
    /// How a connection ended, for the rules.
    fn ended(&self) -> Ended {
        Ended {
            is_applying: self.unfinished().is_some(),
            shows_what_is_applied: self.shows_what_is_applied(),
            forsaken: self.is_forsaken(),
        }
    }
}
