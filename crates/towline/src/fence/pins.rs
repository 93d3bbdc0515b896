//! The pin page of one connection: which generations an initiator is touching right now.

use std::marker::PhantomData;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::Result;
use crate::fence::table::Row;

/// Slots for pins of single threads, one per life slot.
pub(crate) const THREAD_SLOTS: u32 = crate::fence::life::SLOTS;
/// Slots for pins that belong to a process.
pub(crate) const PROCESS_SLOTS: u32 = 256;

/// Which of the two processes of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Owner,
    Initiator,
}

/// Why a pin was not given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PinError {
    /// The region of that generation is gone.
    Stale,
    /// The slot is in use (a thread holds one pin at a time), or all process slots are.
    Busy,
}

/// Who holds a pin, as the owner sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Holder {
    /// The thread with that life slot: reclaimable once the slot has died.
    Thread(u32),
    /// The process: reclaimable once it has exited (pidfd).
    Process(u32),
}

/// The page; made by the owner, mapped read-write by both sides.
pub(crate) struct PinPage {}

impl PinPage {
    pub(crate) fn create() -> Result<PinPage> {
        unimplemented!()
    }

    /// Maps what the owner sent, after checking seals, size and magic.
    pub(crate) fn map(fd: OwnedFd) -> Result<PinPage> {
        unimplemented!("{fd:?}")
    }

    /// Gives the eventfd that a release rings while the owner drains.
    #[must_use]
    pub(crate) fn with_doorbell(self, doorbell: OwnedFd) -> PinPage {
        unimplemented!("{doorbell:?}")
    }

    /// The descriptor to pass on; `None` on the initiator's side and after `take_fd`.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        unimplemented!()
    }

    /// Takes the descriptor out, so that an idle connection does not keep it open.
    pub(crate) fn take_fd(&mut self) -> Option<OwnedFd> {
        unimplemented!()
    }

    /// Pins for the calling thread, whose life slot it is (`LifePage::thread_slot`).
    pub(crate) fn pin_thread(
        &self,
        slot: u32,
        row: &Row,
        generation: u64,
    ) -> Result<ThreadPin<'_>, PinError> {
        unimplemented!("{slot}{generation}{}", row.generation())
    }

    /// Pins for the whole process: long holds (CUDA, NIXL, peer views).
    pub(crate) fn pin_process(self: &Arc<Self>, row: &Row, generation: u64) -> Result<ProcessPin, PinError> {
        unimplemented!("{generation}{}", row.generation())
    }

    /// Asks initiators to ring on release. Counted: each call is paired with `drain_ended`.
    pub(crate) fn drain_started(&self) {
        unimplemented!()
    }

    pub(crate) fn drain_ended(&self) {
        unimplemented!()
    }

    /// Whether any pin of that generation is left. Call after `Table::revoke`.
    pub(crate) fn held(&self, generation: u64) -> bool {
        unimplemented!("{generation}")
    }

    pub(crate) fn holders(&self, generation: u64) -> Vec<Holder> {
        unimplemented!("{generation}")
    }

    /// Clears a dead holder's pin; false when it was no longer there.
    pub(crate) fn reclaim(&self, holder: Holder, generation: u64) -> bool {
        unimplemented!("{holder:?}{generation}")
    }
}

/// A pin of the calling thread; released on drop.
pub(crate) struct ThreadPin<'a> {
    page: &'a PinPage,
    this_thread: PhantomData<*const ()>,
}

impl ThreadPin<'_> {
    /// Whether the region was live for the whole time of the pin up to now: asked after the copy.
    pub(crate) fn still_valid(&self, row: &Row) -> bool {
        unimplemented!("{}", row.generation())
    }
}

/// A pin of the process; released on drop, by any thread.
pub(crate) struct ProcessPin {
    page: Arc<PinPage>,
}

impl ProcessPin {
    /// Whether the region was live for the whole time of the pin up to now.
    pub(crate) fn still_valid(&self, row: &Row) -> bool {
        unimplemented!("{}", row.generation())
    }
}
