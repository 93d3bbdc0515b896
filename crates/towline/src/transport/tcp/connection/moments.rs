//! Moments at which a test can hold an owner's thread up, as a stop of its process does at any.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::{Connection, Role, Sink};
use crate::sync::lock;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    BeforeTheLook,
    BeforeTheCopy,
}

pub(crate) struct Hold {
    pub(crate) moment: Moment,
    /// Where the bytes go that are about to be copied.
    pub(crate) memory: Range<usize>,
    pub(crate) act: Arc<dyn Fn() + Send + Sync>,
}

static HOLD: Mutex<Option<Hold>> = Mutex::new(None);
static INEXACT: AtomicBool = AtomicBool::new(false);

/// Does that, once, in a thread that drives a lane: on the event loop nobody's time would pass.
pub(crate) fn hold(hold: Hold) {
    *lock(&HOLD) = Some(hold);
}

/// Lets looks and copies be two steps, as where they cannot be one.
pub(crate) fn be_inexact(inexact: bool) {
    INEXACT.store(inexact, Ordering::Relaxed);
}

pub(super) fn inexact() -> bool {
    INEXACT.load(Ordering::Relaxed)
}

/// Where the next bytes of a lane go.
pub(super) fn about(connection: &Connection, sink: &mut Sink) -> Option<usize> {
    let lane = connection.role() == Role::Lane;
    sink.parts(1).first().map(|part| part.ptr.addr()).filter(|_| lane)
}

pub(super) fn reach(moment: Moment, about: &Option<usize>) {
    let Some(there) = about else { return };
    let held = lock(&HOLD).take_if(|hold| hold.moment == moment && hold.memory.contains(there));
    if let Some(hold) = held {
        (hold.act)();
    }
}
