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

    /// Waits until nobody changes a word of lent memory; to be held for one plain access to that word of this region.
    ///
    /// # Safety
    /// `word` points to eight aligned bytes of this region, which the caller keeps.
    #[inline]
    pub(crate) unsafe fn turn(&self, word: *mut u64) -> Option<Turn> {
        // SAFETY: the caller's promise.
        self.lent.then(|| unsafe { lent::turn_at(word) })
    }

    /// Reads or changes the word at that address, and says what it held before: by `plain`, or, of memory that was lent and may be
    /// gone, by calls that report it. `change` gives what is to be there, or `None` to leave it.
    #[inline]
    fn at_word(
        &self,
        op: &'static str,
        word: *mut u64,
        plain: impl FnOnce(*mut u64) -> u64,
        change: impl Fn(u64) -> Option<u64>,
    ) -> Result<u64> {
        if !self.lent {
            return Ok(plain(word));
        }
        // SAFETY: a word of this region, which was lent for this, and to which nobody has a reference.
        unsafe { lent::change(op, &|| true, word.cast(), change) }.map(Option::unwrap_or_default)
    }

    /// What the word at that address of this region holds.
    #[inline]
    pub(super) fn load(&self, op: &'static str, word: *mut u64) -> Result<u64> {
        // SAFETY: an aligned word of the region, whose memory the caller keeps; all access to it is atomic or a copy that takes what it
        // finds. So for the three below.
        unsafe {
            if self.lent {
                lent::load(op, word.cast())
            } else {
                Ok(AtomicU64::from_ptr(word).load(Ordering::SeqCst))
            }
        }
    }

    fn store(&self, op: &'static str, word: *mut u64, value: u64) -> Result<()> {
        let plain = |word| {
            // SAFETY: as in `load`.
            unsafe { AtomicU64::from_ptr(word) }.store(value, Ordering::Release);
            0
        };
        self.at_word(op, word, plain, |_| Some(value)).map(drop)
    }

    fn fetch_add(&self, op: &'static str, word: *mut u64, add: u64) -> Result<u64> {
        // SAFETY: as in `load`.
        let plain = |word: *mut u64| unsafe { reduce::fetch_add(word.cast(), add) };
        self.at_word(op, word, plain, |seen| Some(seen.wrapping_add(add)))
    }

    fn compare_swap(&self, op: &'static str, word: *mut u64, expected: u64, new: u64) -> Result<u64> {
        // SAFETY: as in `load`.
        let plain = |word: *mut u64| unsafe { reduce::compare_swap(word.cast(), expected, new) };
        self.at_word(op, word, plain, |seen| (seen == expected).then_some(new))
    }

    fn ring(&self, bell: *mut u64) -> Result<()> {
        let Some(row) = self.registry.table.row(self.row) else { return Ok(()) };
        // SAFETY: `bell` is a word of this region, whose memory the caller keeps.
        unsafe { signal::ring_own(bell, row.sleepers(), self.lent) }
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
    /// `Invalid` unless the offset names eight aligned bytes of the region, and `Stale` where memory that was lent has lost its pages; so
    /// for all access to words.
    pub fn load(&self, offset: usize) -> Result<u64> {
        self.core.load("load", self.core.word("load", offset)?)
    }

    /// Writes the 64-bit word at that offset; who loads it sees what was stored before (release).
    pub fn store(&self, offset: usize, value: u64) -> Result<()> {
        self.core.store("store", self.core.word("store", offset)?, value)
    }

    /// Adds to the 64-bit word at that offset, wrapping around; returns what it held before.
    pub fn fetch_add(&self, offset: usize, add: u64) -> Result<u64> {
        self.core.fetch_add("fetch_add", self.core.word("fetch_add", offset)?, add)
    }

    /// Replaces the 64-bit word at that offset if it holds `expected`; returns what it held before.
    pub fn compare_swap(&self, offset: usize, expected: u64, new: u64) -> Result<u64> {
        self.core.compare_swap("compare_swap", self.core.word("compare_swap", offset)?, expected, new)
    }

    /// Waits until `check` gives something: spins, gives way, then sleeps. `None` at the limit, when the endpoint is closed, and when
    /// memory that was lent has lost the page of the bell.
    ///
    /// `bell` is the offset of eight aligned bytes that are kept for this. A peer that changes what `check` looks at rings it
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
        self.core.ring(self.core.word("wake", bell)?)
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
        self.word("load", offset, |word| self.core.load("load", word))
    }

    /// Writes the 64-bit word at that offset (release).
    pub fn store(&self, offset: usize, value: u64) -> Result<()> {
        self.word("store", offset, |word| self.core.store("store", word, value))
    }

    /// Adds to the 64-bit word at that offset, wrapping around; returns what it held before.
    pub fn fetch_add(&self, offset: usize, add: u64) -> Result<u64> {
        self.word("fetch_add", offset, |word| self.core.fetch_add("fetch_add", word, add))
    }

    /// Replaces the 64-bit word at that offset if it holds `expected`; returns what it held before.
    pub fn compare_swap(&self, offset: usize, expected: u64, new: u64) -> Result<u64> {
        self.word("compare_swap", offset, |word| self.core.compare_swap("compare_swap", word, expected, new))
    }

    /// Wakes who sleeps in [`Registered::wait_changed`] on the bell at that offset of the span.
    pub fn wake(&self, bell: usize) -> Result<()> {
        self.word("wake", bell, |word| self.core.ring(word))
    }

    fn word<T>(
        &self,
        op: &'static str,
        offset: usize,
        body: impl FnOnce(*mut u64) -> Result<T>,
    ) -> Result<T> {
        self.inside(op, 0, self.len, |start| body(word_at(op, start.expose_provenance(), self.len, offset)?))?
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
