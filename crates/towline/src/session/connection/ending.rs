//! How a connection ends: closed, reset or with a goodbye, and what is left to learn from it then.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use super::{AppliedAt, Connection};
use crate::session::parts::{GivenUp, Payload};
use crate::wire::Bye;
use crate::{Error, runtime};

impl Connection {
    /// Closes; the handler is told once.
    pub(in crate::session) fn close(&self, error: Error) {
        self.end(error, |connection| connection.socket.shutdown());
    }

    /// Of a connection that has ended: whether it did without a word of the other side's. Between hosts a reset is none: anybody on the way
    /// can send it.
    pub(in crate::session) fn is_forsaken(&self) -> bool {
        self.forsaken.load(Ordering::Acquire)
            || !self.same_host() && !self.ended_by_peer.load(Ordering::Acquire)
    }

    /// The other side has said goodbye.
    pub(in crate::session) fn peer_ends_it(&self) {
        self.ended_by_peer.store(true, Ordering::Release);
    }

    /// Closes so that nothing of what was sent is acted upon later; the handler is told once.
    pub(in crate::session) fn reset(&self, error: Error) {
        self.end(error, |connection| {
            connection.forsaken.store(true, Ordering::Release);
            connection.socket.reset();
        });
    }

    fn end(&self, error: Error, how: fn(&Connection)) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        if let (Some(token), Ok(reactor)) = (self.token.get(), runtime::reactor()) {
            reactor.remove(*token, self.socket.as_fd());
        }
        if let Some(AppliedAt::Initiator(slot)) = self.side.get() {
            slot.give_up();
        }
        how(self);
        let handler = self.handler.lock().take();
        if let (Some(handler), Some(me)) = (handler, self.me.upgrade()) {
            handler.closed(&me, error);
        }
        drop(self.itself.lock().take());
    }

    /// Of a connection that has ended: the goodbye that came before and that nobody has read.
    pub(in crate::session) fn farewell(&self) -> Option<Bye> {
        self.incoming.lock().farewell(&self.socket).inspect(|_| self.peer_ends_it())
    }

    /// Of a connection that has ended: whether that was in the middle of a frame of the peer's.
    pub(in crate::session) fn ended_in_a_frame(&self) -> bool {
        self.incoming.lock().is_in_a_frame()
    }

    /// The requests that waited to be sent when it ended.
    pub(in crate::session) fn unsent(&self) -> Vec<u64> {
        self.queue().unsent()
    }

    /// Drops what the queues keep alive; called by the handler once nothing of it is needed.
    pub(in crate::session) fn let_go(&self) {
        self.queue().clear();
        self.give_up(GivenUp::HungUp, |_| true);
    }

    /// Says goodbye where the socket takes it at once.
    pub(in crate::session) fn bye(&self, error: Option<&Error>) {
        let bye = Bye { error: error.map(Into::into) };
        let frame = crate::wire::Message::from(bye).frame(0, 0, 0);
        let mut outgoing = self.queue();
        if !outgoing.blocked() && !self.is_closed() {
            outgoing.push(frame, Vec::new(), Payload::None);
            let _ = self.flush(&mut outgoing);
        }
    }
}
