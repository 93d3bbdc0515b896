//! The pin page of one connection: which generations an initiator is touching right now.

#![allow(unsafe_code, reason = "declares which types may be lent from shared memory")]

use std::marker::PhantomData;
#[cfg(test)]
use std::os::fd::BorrowedFd;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use rustix::fs::OFlags;

use crate::fence::life;
use crate::fence::protocol::{self, Machine};
use crate::fence::robust::RobustMutex;
use crate::fence::shared::{self, Lendable, Mapping};
use crate::fence::table::Row;
use crate::fork::in_child;
use crate::{Error, Kind, Result};

/// Slots for pins of single threads, one per life slot.
pub(crate) const THREAD_SLOTS: u32 = life::SLOTS;
/// Slots for pins that belong to a process.
pub(crate) const PROCESS_SLOTS: u32 = 1024;
/// How many of them are for pins that are held for long: the rest is left to copies.
pub(crate) const LONG_SLOTS: u32 = PROCESS_SLOTS - 64;

/// Connections of one peer whose bytes the owner can be seen to apply; there is nothing to see about any beyond.
pub(crate) const APPLY_SLOTS: u32 = 64;

const MAGIC: u64 = u64::from_le_bytes(*b"towl-pin");
/// Of this page and of the table that comes with it. 2: more process slots; sleepers are counted in the table's rows.
/// 3: slots in which the owner shows that it applies a connection's bytes.
const VERSION: u32 = 3;
const THREADS_AT: usize = size_of::<Header>();
const PROCESSES_AT: usize = THREADS_AT + THREAD_SLOTS as usize * size_of::<Slot>();
const APPLY_SLOTS_AT: usize = PROCESSES_AT + PROCESS_SLOTS as usize * size_of::<Slot>();
const BYTES: usize = APPLY_SLOTS_AT + APPLY_SLOTS as usize * size_of::<Applied>();

#[repr(C)]
struct Header {
    magic: AtomicU64,
    version: AtomicU32,
    /// How many drains of the owner are going on: a release rings while there is one.
    draining: AtomicU32,
    /// One past the highest slot that was ever used, so that a scan is as short as the use of the page.
    threads_used: AtomicU32,
    processes_used: AtomicU32,
    owner_life: RobustMutex,
    initiator_life: RobustMutex,
}

/// One pin on its own cache line: the threads that copy do not disturb each other.
#[repr(C, align(64))]
struct Slot {
    generation: AtomicU64,
}

/// What the two sides say about one connection: the owner that it applies bytes of it, the initiator that it has given it up.
#[repr(C, align(64))]
pub(super) struct Applied {
    pub(super) applying: AtomicU64,
    pub(super) over: AtomicU64,
}

const _: () = assert!(size_of::<Header>() == 192 && size_of::<Slot>() == 64, "the page's layout is shared");

// SAFETY: atomics and mutexes that are `Lendable` themselves.
unsafe impl Lendable for Header {}
// SAFETY: one atomic; the padding is never read.
unsafe impl Lendable for Slot {}
// SAFETY: two atomics; the padding is never read.
unsafe impl Lendable for Applied {}

/// Which of the two processes of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// The one whose memory it is, which made the page.
    Owner,
    /// The one that reads and writes that memory.
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
pub(crate) struct PinPage {
    mapping: Mapping,
    fd: Option<OwnedFd>,
    doorbell: Option<OwnedFd>,
}

impl PinPage {
    /// How long it is.
    pub(crate) const BYTES: usize = BYTES;

    /// Makes the page of a new connection.
    pub(crate) fn create() -> Result<PinPage> {
        let (fd, mapping) = shared::create("towline-pins", BYTES, "connect")?;
        shared::seal_size(fd.as_fd(), "connect")?;
        let page = PinPage { mapping, fd: Some(fd), doorbell: None };
        let header = page.header();
        header.owner_life.init()?;
        header.initiator_life.init()?;
        header.version.store(VERSION, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok(page)
    }

    /// Maps what the owner sent, after checking seals, size and magic.
    pub(crate) fn map(fd: OwnedFd) -> Result<PinPage> {
        // The header first: a page of another version may have another size.
        let start = shared::map_received(&fd, size_of::<Header>(), true, "connect")?;
        let header = &start.lend::<Header>(0, 1)[0];
        if header.magic.load(Ordering::Acquire) != MAGIC {
            return Err(Error::protocol("connect", "the memory file is not a pin page"));
        }
        let version = header.version.load(Ordering::Relaxed);
        if version != VERSION {
            let message = format!("the pin page has version {version}, this side knows {VERSION}");
            return Err(Error::new(Kind::Unsupported, "connect", message));
        }
        let mapping = shared::map_received(&fd, BYTES, true, "connect")?;
        Ok(PinPage { mapping, fd: None, doorbell: None })
    }

    /// Gives the eventfd that a release rings while the owner drains. Anything else could block the thread that rings, or end it by a signal.
    pub(crate) fn with_doorbell(mut self, doorbell: OwnedFd) -> Result<PinPage> {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", doorbell.as_raw_fd()))
            .map_err(|error| Error::os("connect", "readlink of /proc/self/fd", error))?;
        let flags = rustix::fs::fcntl_getfl(&doorbell)
            .map_err(|error| Error::os("connect", "fcntl(F_GETFL)", error))?;
        if link != Path::new("anon_inode:[eventfd]") || !flags.contains(OFlags::NONBLOCK) {
            return Err(Error::protocol("connect", "the doorbell is not an eventfd that never blocks"));
        }
        self.doorbell = Some(doorbell);
        Ok(self)
    }

    #[cfg(test)]
    /// The descriptor to pass on; `None` on the initiator's side and after `take_fd`.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// Takes the descriptor out, so that an idle connection does not keep it open.
    pub(crate) fn take_fd(&mut self) -> Option<OwnedFd> {
        self.fd.take()
    }

    /// Pins for the calling thread, whose own life slot it must be (`LifePage::thread_slot`).
    #[inline]
    pub(crate) fn pin_thread(
        &self,
        slot: u32,
        row: &Row,
        generation: u64,
    ) -> Result<ThreadPin<'_>, PinError> {
        if generation == 0 {
            return Err(PinError::Stale);
        }
        let word = &self.threads().get(slot as usize).ok_or(PinError::Busy)?.generation;
        // Outside the protocol: only this thread writes the slot, and loom explores less behind such a load.
        if word.load(Ordering::Relaxed) != 0 {
            return Err(PinError::Busy);
        }
        protocol::announce::<Machine>(word, slot, &self.header().threads_used, generation);
        let pin = ThreadPin { page: self, word, generation, this_thread: PhantomData };
        match protocol::confirm::<Machine>(row.word(), generation) {
            true => Ok(pin),
            false => Err(PinError::Stale),
        }
    }

    /// Pins for the whole process: a copy inside another, or by a thread without a slot.
    pub(crate) fn pin_process(self: &Arc<Self>, row: &Row, generation: u64) -> Result<ProcessPin, PinError> {
        self.pin_among(PROCESS_SLOTS, row, generation)
    }

    /// Pins for the whole process and for long. It may be released by any thread.
    pub(crate) fn pin_long(self: &Arc<Self>, row: &Row, generation: u64) -> Result<ProcessPin, PinError> {
        self.pin_among(LONG_SLOTS, row, generation)
    }

    fn pin_among(self: &Arc<Self>, slots: u32, row: &Row, generation: u64) -> Result<ProcessPin, PinError> {
        if generation == 0 {
            return Err(PinError::Stale);
        }
        if in_child() {
            return Err(PinError::Busy);
        }
        let used = &self.header().processes_used;
        // From the first slot on, so that the owner's scans stay short.
        let slot = (0..slots)
            .zip(self.processes())
            .find(|(index, slot)| {
                slot.generation.load(Ordering::Relaxed) == 0
                    && protocol::announce_shared::<Machine>(&slot.generation, *index, used, generation)
            })
            .map(|(index, _)| index)
            .ok_or(PinError::Busy)?;
        let pin = ProcessPin { page: self.clone(), slot, generation };
        match protocol::confirm::<Machine>(row.word(), generation) {
            true => Ok(pin),
            false => Err(PinError::Stale),
        }
    }

    /// Asks the initiator to ring on release. Counted: each call is paired with `drain_ended`.
    ///
    /// Called before the first scan whose result is waited for.
    pub(crate) fn drain_started(&self) {
        protocol::drain_started::<Machine>(&self.header().draining);
    }

    /// Ends what `drain_started` began.
    pub(crate) fn drain_ended(&self) {
        protocol::drain_ended::<Machine>(&self.header().draining);
    }

    #[cfg(test)]
    /// Whether any pin of that generation is left. Asked after `Table::revoke`: before it a new pin may come.
    pub(crate) fn held(&self, generation: u64) -> bool {
        let mut held = false;
        self.scan(generation, |_| {
            held = true;
            false
        });
        held
    }

    /// Whether the initiator holds no pin. Meaningful once it makes none any more.
    pub(crate) fn is_idle(&self) -> bool {
        fence(Ordering::SeqCst);
        self.threads().iter().chain(self.processes()).all(|slot| slot.generation.load(Ordering::SeqCst) == 0)
    }

    /// Every pin of that generation.
    pub(crate) fn holders(&self, generation: u64) -> Vec<Holder> {
        let mut holders = Vec::new();
        self.scan(generation, |holder| {
            holders.push(holder);
            true
        });
        holders
    }

    /// Clears the pin of a holder that is gone; false when it was no longer there.
    ///
    /// The caller has made sure that it is gone: see [`Holder`].
    pub(crate) fn reclaim(&self, holder: Holder, generation: u64) -> bool {
        let (slots, index) = match holder {
            Holder::Thread(index) => (self.threads(), index),
            Holder::Process(index) => (self.processes(), index),
        };
        generation != 0
            && slots
                .get(index as usize)
                .is_some_and(|slot| protocol::reclaim::<Machine>(&slot.generation, generation))
    }

    fn scan(&self, generation: u64, mut found: impl FnMut(Holder) -> bool) {
        if generation == 0 {
            return;
        }
        let header = self.header();
        let mut more = true;
        let threads = self.threads().iter().map(|slot| &slot.generation);
        protocol::scan::<Machine>(threads, &header.threads_used, generation, |index| {
            more = found(Holder::Thread(index));
            more
        });
        if more {
            let processes = self.processes().iter().map(|slot| &slot.generation);
            protocol::scan::<Machine>(processes, &header.processes_used, generation, |index| {
                found(Holder::Process(index))
            });
        }
    }

    /// The mutex that shows whether that side lives; only that side's watcher thread locks it.
    pub(crate) fn life(&self, side: Side) -> &RobustMutex {
        match side {
            Side::Owner => &self.header().owner_life,
            Side::Initiator => &self.header().initiator_life,
        }
    }

    /// Rings the owner's bell.
    pub(crate) fn ring(&self) {
        if let Some(doorbell) = &self.doorbell {
            // A full counter means that the owner has a ring to see anyway; a closed end, that nobody waits.
            let _ = rustix::io::retry_on_intr(|| rustix::io::write(doorbell, &1_u64.to_ne_bytes()));
        }
    }

    #[inline]
    fn header(&self) -> &Header {
        &self.mapping.lend::<Header>(0, 1)[0]
    }

    #[inline]
    fn threads(&self) -> &[Slot] {
        self.mapping.lend(THREADS_AT, THREAD_SLOTS as usize)
    }

    /// What is said about the connection in that slot.
    pub(super) fn applied(&self, slot: u32) -> Option<&Applied> {
        self.mapping.lend::<Applied>(APPLY_SLOTS_AT, APPLY_SLOTS as usize).get(slot as usize)
    }

    #[inline]
    fn processes(&self) -> &[Slot] {
        self.mapping.lend(PROCESSES_AT, PROCESS_SLOTS as usize)
    }
}

/// A pin of the calling thread; released on drop.
pub(crate) struct ThreadPin<'a> {
    page: &'a PinPage,
    word: &'a AtomicU64,
    generation: u64,
    /// The slot speaks for the thread that made the pin, so the pin must not leave it.
    this_thread: PhantomData<*const ()>,
}

impl ThreadPin<'_> {
    /// Whether the region was live for the whole time of the pin up to now: asked after the copy.
    #[inline]
    pub(crate) fn still_valid(&self, row: &Row) -> bool {
        protocol::revalidate::<Machine>(row.word(), self.generation)
    }
}

impl Drop for ThreadPin<'_> {
    #[inline]
    fn drop(&mut self) {
        if protocol::release::<Machine>(self.word, &self.page.header().draining) {
            self.page.ring();
        }
    }
}

/// A pin of the process; released on drop, by any thread. In a forked child the drop does nothing.
pub(crate) struct ProcessPin {
    page: Arc<PinPage>,
    slot: u32,
    generation: u64,
}

impl ProcessPin {
    /// Whether the region was live for the whole time of the pin up to now.
    pub(crate) fn still_valid(&self, row: &Row) -> bool {
        protocol::revalidate::<Machine>(row.word(), self.generation)
    }

    /// Whether the owner has revoked the region. Orders nothing: the pin is what protects the bytes.
    #[inline]
    pub(crate) fn is_unwanted(&self, row: &Row) -> bool {
        !row.shows(self.generation)
    }
}

impl Drop for ProcessPin {
    fn drop(&mut self) {
        if !in_child()
            && let Some(slot) = self.page.processes().get(self.slot as usize)
            && protocol::release_shared::<Machine>(
                &slot.generation,
                self.generation,
                &self.page.header().draining,
            )
        {
            self.page.ring();
        }
    }
}
