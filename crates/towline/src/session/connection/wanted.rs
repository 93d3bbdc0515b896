//! Owner: whether what came over a connection is still to be applied, and whether a thread is in the middle of that.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

#[cfg(test)]
use super::moments;
use super::{AppliedAt, Connection, Sink};
use crate::fence::applying::Applying;
use crate::runtime::rseq;
use crate::session::parts::GivenUp;

/// Whether the peer is still there is known as long as this, and otherwise looked at again; but not for ever where the machine
/// is so busy that it never is.
const FRESH: Duration = Duration::from_millis(1);
const LOOKS: usize = 100;

/// The threads that apply what came over a connection.
#[derive(Default)]
pub(super) struct Appliers {
    inside: AtomicUsize,
    /// The initiator has asked for the end of the connection: nothing more is applied.
    ended: AtomicBool,
}

impl Appliers {
    pub(super) fn one(&self) -> Applier<'_> {
        Applier { of: self, inside: Cell::new(false) }
    }
}

/// One thread that may apply something; it has left when this is dropped.
pub(super) struct Applier<'a> {
    of: &'a Appliers,
    inside: Cell<bool>,
}

impl Applier<'_> {
    /// False where nothing more is to be applied. First it is said, then looked; the thread that [ends](Connection::end_applying) the
    /// connection says that first and then looks, so that one of the two sees the other.
    fn enter(&self) -> bool {
        if !self.inside.replace(true) {
            self.of.inside.fetch_add(1, Ordering::SeqCst);
        }
        let goes_on = !self.of.ended.load(Ordering::SeqCst);
        if !goes_on {
            self.leave();
        }
        goes_on
    }

    fn leave(&self) {
        if self.inside.replace(false) {
            self.of.inside.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl Drop for Applier<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}

/// What an owner holds while it applies something of a connection: an initiator that looks, or asks, learns of it.
pub(in crate::session) struct Wanted<'a> {
    connection: &'a Connection,
    applier: Applier<'a>,
    /// Each change is made in one step with a check, and nobody is inside before it.
    in_one_step: bool,
    _applying: Option<Applying<'a>>,
}

impl Wanted<'_> {
    /// Whether the initiator has not hung up. Looked at before memory is changed at that address, or a file.
    #[cfg_attr(not(test), allow(unused_variables, reason = "only tests hold a thread up there"))]
    pub(in crate::session) fn stands_by(&self, at: Option<*mut u8>) -> bool {
        if self.in_one_step {
            self.applier.leave();
        }
        let stays = !self.connection.socket.hung_up();
        #[cfg(test)]
        moments::reach(
            moments::Moment::BeforeTheCopy,
            &at.map(<*mut u8>::addr).filter(|_| self.connection.role() == super::Role::Lane),
        );
        stays && self.applier.enter()
    }
}

impl Connection {
    /// Whether the initiator still stands by what it sent; what it asked for before it hung up, and what has not been done,
    /// is not wanted any more. To be held until it is done: an initiator that gives up meanwhile sees that it is not, if
    /// it can look.
    pub(in crate::session) fn wanted(&self) -> Option<Wanted<'_>> {
        let applier = self.appliers.one();
        if !applier.enter() {
            return None;
        }
        let applying = match self.side.get() {
            // In this order: first said, then looked.
            Some(AppliedAt::Owner(slot)) => Some(slot.enter()?),
            _ => None,
        };
        let wanted = Wanted { connection: self, applier, in_one_step: false, _applying: applying };
        (!self.is_abandoned()).then_some(wanted)
    }

    /// The same for what is done [in one step](rseq) with the check of [`stands_by`](Wanted::stands_by): the initiator need not be notified of
    /// it, where that is possible.
    pub(in crate::session) fn wanted_in_one_step(&self) -> Option<Wanted<'_>> {
        if !rseq::is_possible() {
            return self.wanted();
        }
        Some(Wanted { connection: self, applier: self.appliers.one(), in_one_step: true, _applying: None })
    }

    /// A check of the initiator, in one step with which bytes of its land.
    pub(super) fn look(&self, applier: &Applier<'_>, #[cfg(test)] about: &Option<usize>) -> bool {
        applier.leave();
        let stays = !self.socket.hung_up();
        #[cfg(test)]
        moments::reach(moments::Moment::BeforeTheCopy, about);
        stays && applier.enter()
    }

    /// Lets nothing more that came over it be applied, and ends it. A thread that [is applying](Self::is_applying) something goes on.
    pub(in crate::session) fn end_applying(&self) {
        self.appliers.ended.store(true, Ordering::SeqCst);
        // The thread that drives it learns of the end, and closes it.
        self.socket.shutdown();
    }

    /// After [`end_applying`](Self::end_applying): whether a thread is still in the middle of something that came over it.
    pub(in crate::session) fn is_applying(&self) -> bool {
        self.appliers.inside.load(Ordering::SeqCst) > 0
    }

    fn is_abandoned(&self) -> bool {
        for _ in 0..LOOKS {
            let before = Instant::now();
            if self.socket.hung_up() {
                return true;
            }
            // A process is stopped when it leaves the kernel: what it has seen there may be as old as that.
            if before.elapsed() < FRESH {
                return false;
            }
        }
        false
    }

    /// Whether the bytes of a write land [in one step](rseq) with the check of their initiator, so that a stop has no room between:
    /// the initiator need not be notified of it then.
    pub(super) fn checks_in_one_step(&self, sink: &Sink) -> bool {
        #[cfg(test)]
        if moments::inexact() {
            return false;
        }
        sink.writes_a_region() && rseq::is_possible()
    }

    /// Lets the bytes of a write go nowhere if its initiator has hung up: it has said to its caller that nothing of the write
    /// lands any more. This side may have been stopped since the bytes came.
    pub(super) fn wanted_by(&self, sink: &mut Sink) -> Option<Wanted<'_>> {
        if !sink.writes_a_region() {
            return None;
        }
        #[cfg(test)]
        let about = moments::about(self, sink);
        #[cfg(test)]
        moments::reach(moments::Moment::BeforeTheLook, &about);
        let wanted = self.wanted();
        if wanted.is_none() {
            sink.give_up(GivenUp::HungUp);
        }
        #[cfg(test)]
        moments::reach(moments::Moment::BeforeTheCopy, &about);
        wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_applies_something_is_seen_until_it_has_left_and_nobody_enters_what_was_ended() {
        let appliers = Appliers::default();
        let inside = || appliers.inside.load(Ordering::SeqCst);
        let (one, other) = (appliers.one(), appliers.one());
        assert!(one.enter() && one.enter());
        appliers.ended.store(true, Ordering::SeqCst);
        assert_eq!(inside(), 1);
        assert!(!other.enter());
        assert_eq!(inside(), 1, "the refused one has taken the other's mark along");
        one.leave();
        assert_eq!(inside(), 0);
        assert!(!one.enter());
        drop((one, other));
        assert_eq!(inside(), 0);
    }
}
