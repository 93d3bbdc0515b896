//! Another worker's memory, pinned for a series of accesses.
#![allow(unsafe_code, reason = "the pinned memory is reached by address")]

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::memory::lent::{self, Turn};
use crate::memory::reduce;
use crate::region::{Span, ring, word_at};
use crate::transport::direct::Held;
use crate::{Access, Error, Kind, Result, bytes, fork};

/// Another worker's memory, pinned for a series of accesses: each is a plain load, store or copy, without a system
/// call and without a look at the generation.
///
/// While it exists, the memory stays where it is: the owner's `into_storage` gives `StillPinned`, and a dropped
/// registration is parked. So a holder looks at [`is_stale`](Self::is_stale) from time to time, and drops it when the
/// owner wants its memory back. It belongs to the process, not to the thread that made it, and ends with either.
///
/// Offsets are relative to what the ticket names. Every access is checked against its length and its rights.
///
/// ```
/// use towline::{Access, Endpoint, SharedStorage};
///
/// let owner = Endpoint::open("owner")?;
/// let region = owner.register(SharedStorage::new(4096)?, Access::READ_WRITE)?;
///
/// let peer = Endpoint::open("peer")?;                    // usually another process
/// let pinned = peer.import(&region.ticket()?)?.pin()?;
/// pinned.write_at(64, b"sixteen layers..")?;
/// pinned.store(0, 1)?;                                   // who loads the 1 sees the bytes
/// pinned.wake(8)?;                                       // and is woken if it sleeps on this bell
///
/// assert_eq!(region.load(0)?, 1);
/// let registration = region.into_storage_within(std::time::Duration::ZERO).unwrap_err().registration;
/// assert!(pinned.is_stale());
/// drop(pinned);
/// registration.into_storage()?;
/// # Ok::<(), towline::Error>(())
/// ```
pub struct Pinned {
    base: usize,
    len: usize,
    access: Access,
    path: &'static str,
    peer: Arc<str>,
    /// The memory was lent to this process: words of it are changed one after the other.
    lent: bool,
    held: ManuallyDrop<Held>,
}

impl Pinned {
    pub(super) fn new(held: Held, len: usize, access: Access, path: &'static str, peer: Arc<str>) -> Pinned {
        let (base, lent) = (held.base(), held.is_lent());
        Pinned { base, len, access, path, peer, lent, held: ManuallyDrop::new(held) }
    }

    /// How many bytes the ticket reaches.
    #[allow(clippy::len_without_is_empty, reason = "a region is never empty")]
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// What the ticket allows.
    #[inline]
    pub fn access(&self) -> Access {
        self.access
    }

    /// Whether the owner wants its memory back, or has died. What is written from then on may reach nobody.
    pub fn is_stale(&self) -> bool {
        fork::in_child() || self.held.is_stale()
    }

    /// Copies bytes out, from `offset` on. The owner and others may be writing them: a byte may be old or new.
    ///
    /// # Errors
    /// `Invalid` past the end of what the ticket names, `PermissionDenied` where it does not allow it, `Unavailable` in
    /// a forked child; so for every access.
    #[inline]
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        let from = self.range("read_at", Access::READ, offset, into.len())?;
        if let Ok(word) = <&mut [u8; 8]>::try_from(&mut *into)
            && from.addr().is_multiple_of(8)
        {
            let _turn = self.turn(from.cast());
            // SAFETY: `range` checked the eight bytes, which the pin keeps; others use atomics or copies that take what
            // they find. So for all access below.
            *word = unsafe { AtomicU64::from_ptr(from.cast()) }.load(Ordering::Relaxed).to_ne_bytes();
            return Ok(());
        }
        // SAFETY: as above; `into` is an exclusive slice.
        unsafe { bytes::copy(into.as_mut_ptr(), from, into.len()) };
        Ok(())
    }

    /// Copies bytes in, from `offset` on.
    #[inline]
    pub fn write_at(&self, offset: usize, from: &[u8]) -> Result<()> {
        let into = self.range("write_at", Access::WRITE, offset, from.len())?;
        if let Ok(word) = <[u8; 8]>::try_from(from)
            && into.addr().is_multiple_of(8)
        {
            let _turn = self.turn(into.cast());
            // SAFETY: as in `read_at`.
            unsafe { AtomicU64::from_ptr(into.cast()) }.store(u64::from_ne_bytes(word), Ordering::Relaxed);
            return Ok(());
        }
        // SAFETY: as in `read_at`.
        unsafe { bytes::copy_to_publish(into, from.as_ptr(), from.len()) };
        Ok(())
    }

    /// [`write_at`](Self::write_at) for a portion of something long that nobody reads soon: the bytes go around the cache.
    pub fn stream_at(&self, offset: usize, from: &[u8]) -> Result<()> {
        let into = self.range("stream_at", Access::WRITE, offset, from.len())?;
        // SAFETY: as in `read_at`; a slice of this process's own and memory that is never a reference do not overlap.
        unsafe { bytes::copy_around_cache(into, from.as_ptr(), from.len()) };
        Ok(())
    }

    /// Copies into the whole of a local span, from `offset` on. `Stale` where the span's region was revoked.
    pub fn copy_to(&self, offset: usize, target: &Span) -> Result<()> {
        let from = self.range("copy_to", Access::READ, offset, target.len())?;
        // SAFETY: as in `read_at`; `inside` keeps the local bytes.
        target.inside("copy_to", 0, target.len(), |into| unsafe {
            bytes::copy_to_publish(into, from, target.len())
        })
    }

    /// Copies the whole of a local span, to `offset` on. `Stale` where the span's region was revoked.
    pub fn copy_from(&self, offset: usize, source: &Span) -> Result<()> {
        let into = self.range("copy_from", Access::WRITE, offset, source.len())?;
        // SAFETY: as in `read_at`; `inside` keeps the local bytes.
        source.inside("copy_from", 0, source.len(), |from| unsafe {
            bytes::copy_to_publish(into, from, source.len())
        })
    }

    /// Reads the 64-bit word at that offset; what its writer stored before is visible afterwards (acquire).
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at), and `Invalid` where the word is not aligned to eight bytes; so for every word.
    #[inline]
    pub fn load(&self, offset: usize) -> Result<u64> {
        let word = self.word("load", Access::READ, offset)?;
        let _turn = self.turn(word);
        // SAFETY: as in `read_at`.
        Ok(unsafe { AtomicU64::from_ptr(word) }.load(Ordering::Acquire))
    }

    /// Writes the 64-bit word at that offset; who loads it sees what was stored before (release).
    #[inline]
    pub fn store(&self, offset: usize, value: u64) -> Result<()> {
        let word = self.word("store", Access::WRITE, offset)?;
        let _turn = self.turn(word);
        // SAFETY: as in `read_at`.
        unsafe { AtomicU64::from_ptr(word) }.store(value, Ordering::Release);
        Ok(())
    }

    /// Adds to the 64-bit word at that offset, wrapping around; returns what it held before.
    #[inline]
    pub fn fetch_add(&self, offset: usize, add: u64) -> Result<u64> {
        let word = self.word("fetch_add", Access::WRITE, offset)?;
        let _turn = self.turn(word);
        // SAFETY: as in `read_at`.
        Ok(unsafe { reduce::fetch_add(word.cast(), add) })
    }

    /// Replaces the 64-bit word at that offset if it holds `expected`; returns what it held before.
    #[inline]
    pub fn compare_swap(&self, offset: usize, expected: u64, new: u64) -> Result<u64> {
        let word = self.word("compare_swap", Access::WRITE, offset)?;
        let _turn = self.turn(word);
        // SAFETY: as in `read_at`.
        Ok(unsafe { reduce::compare_swap(word.cast(), expected, new) })
    }

    /// Wakes who of the owner sleeps in [`Registered::wait_changed`](crate::Registered::wait_changed) on the bell at that
    /// offset. What was stored before is visible to it. Costs a fence, and a system call only where a thread sleeps.
    #[inline]
    pub fn wake(&self, bell: usize) -> Result<()> {
        let word = self.word("wake", Access::WRITE, bell)?;
        let _turn = self.turn(word);
        if let Some(row) = self.held.row() {
            // SAFETY: as in `read_at`.
            unsafe { ring(word, row.sleepers()) };
        }
        Ok(())
    }

    /// The address of that range, which stays while this does.
    #[inline]
    pub(crate) fn range(
        &self,
        op: &'static str,
        needed: Access,
        offset: usize,
        len: usize,
    ) -> Result<*mut u8> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        if inside && self.access.contains(needed) && !fork::in_child() {
            return Ok(std::ptr::with_exposed_provenance_mut(self.base + offset));
        }
        Err(self.refusal(op, needed, offset, len))
    }

    /// For one access to that word, which a call has checked.
    #[inline]
    fn turn(&self, word: *mut u64) -> Option<Turn> {
        // SAFETY: as in `read_at`.
        self.lent.then(|| unsafe { lent::turn_at(word) })
    }

    #[inline]
    fn word(&self, op: &'static str, needed: Access, offset: usize) -> Result<*mut u64> {
        if self.access.contains(needed) && !fork::in_child() {
            return word_at(op, self.base, self.len, offset);
        }
        Err(self.refusal(op, needed, offset, 8))
    }

    #[cold]
    fn refusal(&self, op: &'static str, needed: Access, offset: usize, len: usize) -> Error {
        let refused = || {
            fork::guard(op)?;
            if !self.access.contains(needed) {
                let message = format!("the ticket allows {}, and this needs {needed}", self.access);
                return Err(Error::new(Kind::PermissionDenied, op, message));
            }
            bytes::in_bounds(op, self.len, offset, len)
        };
        let error =
            refused().err().unwrap_or_else(|| Error::new(Kind::Internal, op, "refused without a reason"));
        error.on(self.path).with_peer(&*self.peer)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if !fork::in_child() {
            // SAFETY: nobody uses it after the drop.
            unsafe { ManuallyDrop::drop(&mut self.held) };
        }
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned")
            .field("peer", &self.peer)
            .field("len", &self.len)
            .field("access", &self.access)
            .field("path", &self.path)
            .field("stale", &self.is_stale())
            .finish()
    }
}
