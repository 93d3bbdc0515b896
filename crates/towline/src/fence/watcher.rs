//! The process's one liveness watcher: a thread that holds our life mutexes and sleeps on those of peers.

use std::sync::Arc;

use crate::Result;
use crate::fence::pins::{PinPage, Side};

/// Watches at the same time in one process; one more gives `Exhausted`.
pub(crate) const MAX_WATCHES: usize = 127;
/// Holds at the same time in one process; one more gives `Exhausted`.
pub(crate) const MAX_HOLDS: usize = 1900;

/// Our life mutex in a page, held by the watcher thread until this is dropped.
pub(crate) struct Hold {
    id: u64,
}

/// A watch on the other side's life mutex; ends when dropped.
pub(crate) struct Watch {
    id: u64,
}

/// Has the watcher thread lock our mutex in that page; returns once it is held.
pub(crate) fn hold(page: Arc<PinPage>, side: Side) -> Result<Hold> {
    unimplemented!("{:?}{side:?}", page.fd())
}

/// Calls `on_death` on the watcher thread when that side's process dies while it holds its mutex.
///
/// `Exhausted` at the 128th watch, `Unavailable` without `futex_waitv`: fall back to a pidfd or EOF.
pub(crate) fn watch(page: Arc<PinPage>, side: Side, on_death: Box<dyn FnOnce() + Send>) -> Result<Watch> {
    let _ = on_death;
    unimplemented!("{:?}{side:?}", page.fd())
}
