//! Moments at which a test can hold a thread up: an owner's, as a stop of its process does at any, or an initiator's.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::{Connection, Role, Sink};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    BeforeTheLook,
    BeforeTheCopy,
    /// An initiator has queued a request, and not looked yet whether the transfer was stopped meanwhile.
    Asked,
    /// It has looked, and ended what the stop did not find.
    Looked,
    /// Bytes that an initiator has asked for are about to be received.
    Landing,
    /// A transfer was stopped, and its requests have not been looked for.
    Stopping,
}

pub(crate) struct Hold {
    pub(crate) moment: Moment,
    /// Where the bytes go that are about to be copied; the initiator's memory at its moments.
    pub(crate) memory: Range<usize>,
    pub(crate) act: Arc<dyn Fn() + Send + Sync>,
}

static HOLDS: Mutex<Vec<Hold>> = Mutex::new(Vec::new());
static INEXACT: AtomicBool = AtomicBool::new(false);

/// Does that, once, in a thread that drives a lane: on the event loop nobody's time would pass.
pub(crate) fn hold(hold: Hold) {
    HOLDS.lock().push(hold);
}

/// Nobody is held up any more.
pub(crate) fn hold_nobody() {
    HOLDS.lock().clear();
}

/// Lets looks and copies be two steps, as where they cannot be one.
pub(crate) fn be_inexact(inexact: bool) {
    INEXACT.store(inexact, Ordering::Relaxed);
}

pub(super) fn inexact() -> bool {
    INEXACT.load(Ordering::Relaxed)
}

/// Lets an idle lane take its socket for full, once its worker has left it.
pub(in crate::session) fn stand_still(lane: &Connection) {
    while lane.driven.load(Ordering::Acquire) {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    lane.queue().set_blocked(true);
}

/// Where the next bytes of a lane go.
pub(super) fn about(connection: &Connection, sink: &mut Sink) -> Option<usize> {
    let lane = connection.role() == Role::Lane;
    sink.parts(1).first().map(|part| part.ptr.addr()).filter(|_| lane)
}

pub(crate) fn reach(moment: Moment, about: &Option<usize>) {
    let Some(there) = about else { return };
    let held = {
        let mut holds = HOLDS.lock();
        let at = holds.iter().position(|hold| hold.moment == moment && hold.memory.contains(there));
        at.map(|at| holds.swap_remove(at))
    };
    if let Some(hold) = held {
        (hold.act)();
    }
}
