//! One robust mutex per copying thread, so that a peer can see whether that very thread has died; and whether a process has.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::Result;
use crate::fence::robust::{self, RobustMutex};
use crate::fence::shared::{self, Mapping};
use crate::fork::{guard, in_child};

/// Threads of one process that can hold a slot at the same time.
pub(crate) const SLOTS: u32 = 1024;

const BYTES: usize = SLOTS as usize * size_of::<RobustMutex>();

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
pub(crate) struct LifePage {
    mapping: Mapping,
    readers: OwnedFd,
    supply: Mutex<Supply>,
}

struct Supply {
    free: Vec<u32>,
    /// Slots from here on were never used, nor their mutexes initialised.
    unused: u32,
}

static OURS: OnceLock<LifePage> = OnceLock::new();

thread_local! {
    static SLOT: ThreadSlot = const { ThreadSlot(Cell::new(None)) };
}

/// The calling thread's slot; let go when the thread ends.
struct ThreadSlot(Cell<Option<u32>>);

impl Drop for ThreadSlot {
    fn drop(&mut self) {
        if let Some(slot) = self.0.get()
            && !in_child()
            && let Some(page) = OURS.get()
        {
            page.give_back(slot);
        }
    }
}

impl LifePage {
    /// The process's one page, made at the first call; an error in a forked child.
    pub(crate) fn ours() -> Result<&'static LifePage> {
        guard("open")?;
        if let Some(page) = OURS.get() {
            return Ok(page);
        }
        let made = LifePage::create()?;
        Ok(OURS.get_or_init(|| made))
    }

    fn create() -> Result<LifePage> {
        let (fd, mapping) = shared::create("towline-life", BYTES, "open")?;
        let readers = shared::seal_for_readers(fd, "open")?;
        Ok(LifePage { mapping, readers, supply: Mutex::new(Supply { free: Vec::new(), unused: 0 }) })
    }

    /// The calling thread's slot, locked until the thread ends. Cheap after the first call.
    ///
    /// `None` when all are taken, where the C library has no robust futexes, and in a forked child: such a
    /// thread pins for its process instead.
    #[inline]
    pub(crate) fn thread_slot() -> Option<u32> {
        if !robust::SUPPORTED || in_child() {
            return None;
        }
        // Gone while the thread's own destructors run: then there is no slot any more.
        SLOT.try_with(|cached| {
            if cached.0.get().is_none() {
                cached.0.set(LifePage::ours().ok()?.take());
            }
            cached.0.get()
        })
        .ok()
        .flatten()
    }

    /// The descriptor to pass to a peer: nothing that maps it can write.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.readers.as_fd()
    }

    fn take(&self) -> Option<u32> {
        let mut supply = self.supply.lock();
        let slot = match supply.free.pop() {
            Some(slot) => slot,
            None if supply.unused < SLOTS => {
                self.mutex(supply.unused)?.init().ok()?;
                supply.unused += 1;
                supply.unused - 1
            }
            None => return None,
        };
        // A slot that cannot be locked is lost rather than offered again.
        self.mutex(slot)?.try_lock().ok()?;
        Some(slot)
    }

    fn give_back(&self, slot: u32) {
        if let Some(mutex) = self.mutex(slot) {
            let mut supply = self.supply.lock();
            mutex.unlock();
            supply.free.push(slot);
        }
    }

    fn mutex(&self, slot: u32) -> Option<&RobustMutex> {
        self.mapping.lend::<RobustMutex>(0, SLOTS as usize).get(slot as usize)
    }
}

/// A peer's slots, read-only.
pub(crate) struct LifeView {
    mapping: Mapping,
}

impl LifeView {
    /// Maps what a peer sent, after checking seals and size.
    pub(crate) fn map(fd: OwnedFd) -> Result<LifeView> {
        Ok(LifeView { mapping: shared::map_received(&fd, BYTES, false, "connect")? })
    }

    /// What that slot says; a slot that does not exist is free.
    ///
    /// Read *after* the pin was seen. `Died`: the pin is nobody's. `Free` with a pin still in the slot: its
    /// thread ended in good order without releasing, which is just as final, because a thread locks its slot
    /// before it pins and unlocks it last.
    pub(crate) fn slot_state(&self, slot: u32) -> SlotState {
        let Some(mutex) = self.mapping.lend::<RobustMutex>(0, SLOTS as usize).get(slot as usize) else {
            return SlotState::Free;
        };
        // The kernel writes the mark after everything the thread did; the acquire keeps the reuse of its
        // bytes behind the mark.
        let word = mutex.word().load(Ordering::Acquire);
        if word & robust::OWNER_DIED != 0 {
            SlotState::Died
        } else if word & robust::TID_MASK != 0 {
            SlotState::Held
        } else {
            SlotState::Free
        }
    }
}

/// Whether the process behind that pidfd has exited: none of its threads touches memory any more.
pub(crate) fn has_exited(process: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;

    #[test]
    fn a_thread_keeps_its_slot_and_lets_go_at_its_end() {
        let view = LifeView::map(LifePage::ours().unwrap().fd().try_clone_to_owned().unwrap()).unwrap();
        let mine = LifePage::thread_slot().unwrap();
        assert_eq!(LifePage::thread_slot(), Some(mine));
        assert_eq!(view.slot_state(mine), SlotState::Held);
        let (slot, held) = std::thread::scope(|scope| {
            let view = &view;
            scope
                .spawn(move || LifePage::thread_slot().map(|slot| (slot, view.slot_state(slot))))
                .join()
                .unwrap()
        })
        .unwrap();
        assert_ne!(slot, mine);
        assert_eq!(held, SlotState::Held);
        assert_eq!(view.slot_state(SLOTS), SlotState::Free);
    }

    #[test]
    fn more_threads_than_slots_go_without() {
        // A page of its own: the process's one is in use by the tests beside this one.
        let page = LifePage::create().unwrap();
        let taken: Vec<u32> = (0..SLOTS).map(|_| page.take().unwrap()).collect();
        assert_eq!(page.take(), None);
        for slot in taken {
            page.give_back(slot);
        }
        let slot = page.take().unwrap();
        page.give_back(slot);
    }
}
