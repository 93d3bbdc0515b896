//! One robust mutex per copying thread, so that a peer can tell whether that very thread has died.

use std::os::fd::{BorrowedFd, OwnedFd};

use crate::Result;

/// Threads of one process that can hold a slot at the same time.
pub(crate) const SLOTS: u32 = 1024;

/// What a thread's slot says about the thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotState {
    /// No thread holds the slot; one that did has let go in good order.
    Free,
    /// A living thread holds it (it may be stopped).
    Held,
    /// The thread that held it is gone and will never again touch memory.
    Died,
}

/// This process's slots.
pub(crate) struct LifePage {}

impl LifePage {
    /// The process's one page, made at the first call; an error in a forked child.
    pub(crate) fn ours() -> Result<&'static LifePage> {
        unimplemented!()
    }

    /// The calling thread's slot; `None` when all are taken, without robust mutexes, or in a forked child.
    pub(crate) fn thread_slot() -> Option<u32> {
        unimplemented!()
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        unimplemented!()
    }
}

/// A peer's slots, read-only.
pub(crate) struct LifeView {}

impl LifeView {
    pub(crate) fn map(fd: OwnedFd) -> Result<LifeView> {
        unimplemented!("{fd:?}")
    }

    pub(crate) fn slot_state(&self, slot: u32) -> SlotState {
        unimplemented!("{slot}")
    }
}
