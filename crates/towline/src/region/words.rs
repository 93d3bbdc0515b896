//! The owner's own access to single words of its regions, and to the bytes of a span.
#![allow(unsafe_code, reason = "registered memory is reached by address")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{Patience, RegionCore, RegionUse, Registered, Span, signal};
use crate::memory::lent::{self, Turn};
use crate::memory::{Place, Storage, reduce};
use crate::{Error, Kind, Result, bytes};

impl RegionCore {
    /// The address of the eight aligned bytes at that offset.
    #[inline]
    pub(super) fn word(&self, op: &'static str, offset: usize) -> Result<*mut u64> {
        if self.place != Place::Host {
            return Err(self.out_of_reach(op));
        }
        word_at(op, self.addr, self.len, offset)
    }

    fn out_of_reach(&self, op: &'static str) -> Error {
        Error::new(Kind::Unsupported, op, format!("the CPU cannot reach bytes on {}", self.place))
    }

    /// Waits until nobody changes a word of lent memory; to be held for one access to a word of this region.
    #[inline]
    pub(crate) fn turn(&self) -> Option<Turn> {
        self.lent.then(lent::turn)
    }

    fn ring(&self, bell: *mut u64) {
        if let Some(row) = self.registry.table.row(self.row) {
            let _turn = self.turn();
            // SAFETY: `bell` is a word of this region, whose memory the caller keeps.
            unsafe { signal::ring(bell, row.sleepers()) };
        }
    }
}

/// The address of the eight aligned bytes at that offset of a range.
#[inline]
pub(crate) fn word_at(op: &'static str, start: usize, len: usize, offset: usize) -> Result<*mut u64> {
    let addr = start.wrapping_add(offset);
    if offset.checked_add(8).is_some_and(|end| end <= len) && addr.is_multiple_of(8) {
        return Ok(std::ptr::with_exposed_provenance_mut(addr));
    }
    Err(not_a_word(op, len, offset))
}

#[cold]
fn not_a_word(op: &'static str, len: usize, offset: usize) -> Error {
    Error::invalid(op, format!("offset {offset} does not name eight aligned bytes within {len} bytes"))
}

impl<S: Storage> Registered<S> {
    /// Reads the 64-bit word at that offset; what its writer stored before is visible afterwards (acquire).
    ///
    /// # Errors
    /// `Invalid` unless the offset names eight aligned bytes of the region; so for all access to words.
    pub fn load(&self, offset: usize) -> Result<u64> {
        let word = self.core.word("load", offset)?;
        let _turn = self.core.turn();
        // SAFETY: an aligned word of the region, whose memory `self` keeps; all access to it is atomic or a copy
        // that takes what it finds. So for the three below.
        Ok(unsafe { AtomicU64::from_ptr(word) }.load(Ordering::Acquire))
    }

    /// Writes the 64-bit word at that offset; who loads it sees what was stored before (release).
    pub fn store(&self, offset: usize, value: u64) -> Result<()> {
        let word = self.core.word("store", offset)?;
        let _turn = self.core.turn();
        // SAFETY: as in `load`.
        unsafe { AtomicU64::from_ptr(word) }.store(value, Ordering::Release);
        Ok(())
    }

    /// Adds to the 64-bit word at that offset, wrapping around; returns what it held before.
    pub fn fetch_add(&self, offset: usize, add: u64) -> Result<u64> {
        let word = self.core.word("fetch_add", offset)?;
        let _turn = self.core.turn();
        // SAFETY: as in `load`.
        Ok(unsafe { reduce::fetch_add(word.cast(), add) })
    }

    /// Replaces the 64-bit word at that offset if it holds `expected`; returns what it held before.
    pub fn compare_swap(&self, offset: usize, expected: u64, new: u64) -> Result<u64> {
        let word = self.core.word("compare_swap", offset)?;
        let _turn = self.core.turn();
        // SAFETY: as in `load`.
        Ok(unsafe { reduce::compare_swap(word.cast(), expected, new) })
    }

    /// Waits until `check` gives something: spins, gives way, then sleeps. `None` at the limit, and when
    /// the endpoint is closed.
    ///
    /// `bell` is the offset of eight aligned bytes that are kept for this. Who changes what `check` looks at rings it
    /// afterwards: a peer that shares the memory by [`Pinned::wake`](crate::Pinned::wake), any peer by
    /// [`Endpoint::signal`](crate::Endpoint::signal) or [`Request::signal`](crate::Request::signal), this process by
    /// [`wake`](Self::wake). A peer that shares the memory rings through a ticket of this registration: another
    /// registration of the same storage does not know of sleepers here.
    ///
    /// Without a usable bell (an offset outside the region or not aligned) it looks again every millisecond.
    ///
    /// ```
    /// use std::time::Duration;
    /// use towline::{Access, Endpoint, Patience, SharedStorage};
    /// # let endpoint = Endpoint::open("owner")?;
    /// let region = endpoint.register(SharedStorage::new(4096)?, Access::READ_WRITE)?;
    /// const BELL: usize = 0;
    /// const FLAG: usize = 8;
    /// std::thread::scope(|scope| {
    ///     scope.spawn(|| region.store(FLAG, 7).and_then(|()| region.wake(BELL)));
    ///     let seen = region.wait_changed(BELL, Patience::default(), Duration::from_secs(10), || {
    ///         region.load(FLAG).ok().filter(|flag| *flag != 0)
    ///     });
    ///     assert_eq!(seen, Some(7));
    /// });
    /// # Ok::<(), towline::Error>(())
    /// ```
    pub fn wait_changed<T>(
        &self,
        bell: usize,
        patience: Patience,
        within: Duration,
        check: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        signal::wait_changed(&self.core, bell, patience, within, check)
    }

    /// Wakes who sleeps in [`wait_changed`](Self::wait_changed) on that bell. Costs no system call where nobody sleeps.
    pub fn wake(&self, bell: usize) -> Result<()> {
        self.core.ring(self.core.word("wake", bell)?);
        Ok(())
    }
}

impl Span {
    /// Copies bytes out, from that offset of the span on.
    ///
    /// # Errors
    /// `Invalid` past its end; `Stale` once the region was revoked; so for all access through a span.
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        self.inside("read_at", offset, into.len(), |from| {
            // SAFETY: `inside` checked the range and keeps the memory; `into` is an exclusive slice.
            unsafe { bytes::copy(into.as_mut_ptr(), from, into.len()) }
        })
    }

    /// Copies bytes in, from that offset of the span on.
    pub fn write_at(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.inside("write_at", offset, from.len(), |into| {
            // SAFETY: `inside` checked the range and keeps the memory, to which no Rust reference exists.
            unsafe { bytes::copy_to_publish(into, from.as_ptr(), from.len()) }
        })
    }

    /// [`write_at`](Self::write_at) for a portion of something long that nobody reads soon: the bytes go around the cache.
    pub fn stream_at(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.inside("stream_at", offset, from.len(), |into| {
            // SAFETY: as in `write_at`.
            unsafe { bytes::copy_around_cache(into, from.as_ptr(), from.len()) }
        })
    }

    /// A part of this part, as [`span`](Self::span).
    pub fn part(&self, offset: usize, len: usize) -> Result<Span> {
        self.span(offset, len)
    }

    /// Reads the 64-bit word at that offset (acquire).
    pub fn load(&self, offset: usize) -> Result<u64> {
        // SAFETY: `word` gives an aligned word of the region and keeps its memory; all access to it is atomic or a copy
        // that takes what it finds. So for the three below.
        self.word("load", offset, |word| unsafe { AtomicU64::from_ptr(word) }.load(Ordering::Acquire))
    }

    /// Writes the 64-bit word at that offset (release).
    pub fn store(&self, offset: usize, value: u64) -> Result<()> {
        self.word("store", offset, |word| {
            // SAFETY: as in `load`.
            unsafe { AtomicU64::from_ptr(word) }.store(value, Ordering::Release)
        })
    }

    /// Adds to the 64-bit word at that offset, wrapping around; returns what it held before.
    pub fn fetch_add(&self, offset: usize, add: u64) -> Result<u64> {
        // SAFETY: as in `load`.
        self.word("fetch_add", offset, |word| unsafe { reduce::fetch_add(word.cast(), add) })
    }

    /// Replaces the 64-bit word at that offset if it holds `expected`; returns what it held before.
    pub fn compare_swap(&self, offset: usize, expected: u64, new: u64) -> Result<u64> {
        // SAFETY: as in `load`.
        self.word("compare_swap", offset, |word| unsafe { reduce::compare_swap(word.cast(), expected, new) })
    }

    /// Wakes who sleeps in [`Registered::wait_changed`] on the bell at that offset of the span.
    pub fn wake(&self, bell: usize) -> Result<()> {
        let ring = self.inside("wake", 0, self.len, |start| {
            word_at("wake", start.expose_provenance(), self.len, bell).map(|word| self.core.ring(word))
        });
        ring?
    }

    fn word<T>(&self, op: &'static str, offset: usize, body: impl FnOnce(*mut u64) -> T) -> Result<T> {
        self.inside(op, 0, self.len, |start| {
            let word = word_at(op, start.expose_provenance(), self.len, offset)?;
            let _turn = self.core.turn();
            Ok(body(word))
        })?
    }

    /// Runs while the region is in use, so that its memory stays; with the address of that part of the span.
    pub(crate) fn inside<T>(
        &self,
        op: &'static str,
        offset: usize,
        len: usize,
        body: impl FnOnce(*mut u8) -> T,
    ) -> Result<T> {
        let (at, _use) = self.hold(op, offset, len)?;
        Ok(body(at))
    }

    /// The address of that part of the span, and what keeps its memory.
    pub(crate) fn hold(&self, op: &'static str, offset: usize, len: usize) -> Result<(*mut u8, RegionUse)> {
        if self.core.place != Place::Host {
            return Err(self.core.out_of_reach(op));
        }
        bytes::in_bounds(op, self.len, offset, len)?;
        let held = self.core.begin_use(op)?;
        Ok((std::ptr::with_exposed_provenance_mut(self.core.addr + self.offset + offset), held))
    }
}
