//! Element-wise reductions and atomics on memory that several processes share.
#![allow(unsafe_code, reason = "updates shared memory through atomics")]

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use half::{bf16, f16};

use super::{Dtype, ReduceOp};
use crate::runtime::rseq::{self, SequenceOutcome, Word as _};
use crate::{Error, Result, bytes};

/// Reduces `len` bytes of elements into the destination: `dst[i] = op(dst[i], src[i])`.
///
/// Each destination element is updated atomically, so that several peers and the owner can reduce into one span
/// at once and no contribution is lost. The elements of one call become visible in no particular order; a thread that
/// announces the reduction afterwards announces all of it. The source may lie anywhere; one that others write
/// meanwhile, or that overlaps the destination, gives a mixture.
///
/// # Errors
/// `Invalid` where the destination is not aligned to the element, or the length is not a whole number of them.
///
/// # Safety
/// `src` is valid for reads and `dst` for reads and writes of `len` bytes for the whole call, and no Rust
/// reference to the destination's bytes is alive.
pub(crate) unsafe fn reduce(
    dst: *mut u8,
    src: *const u8,
    len: usize,
    op: ReduceOp,
    dtype: Dtype,
) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { reduce_by(&Plainly, dst, src, len, op, dtype) }.map(|_| ())
}

/// [`reduce`] as long as the check says yes: each element is changed [in one step](rseq) with a check, and once. Returns whether all were.
///
/// # Errors
/// As for [`reduce`].
///
/// # Safety
/// As for [`reduce`].
pub(crate) unsafe fn reduce_if(
    check: &dyn Fn() -> bool,
    dst: *mut u8,
    src: *const u8,
    len: usize,
    op: ReduceOp,
    dtype: Dtype,
) -> Result<bool> {
    // SAFETY: the caller's promise.
    unsafe { reduce_by(&WhileChecked(check), dst, src, len, op, dtype) }
}

/// Refuses what is not whole elements at aligned addresses.
pub(super) fn whole_elements(addr: usize, len: usize, dtype: Dtype) -> Result<()> {
    let size = dtype.size();
    if addr.is_multiple_of(size) && len.is_multiple_of(size) {
        return Ok(());
    }
    let message = format!("{len} bytes at {addr:#x} are not whole, aligned elements of {size} bytes");
    Err(Error::invalid("reduce", message))
}

/// # Safety
/// As for [`reduce`].
unsafe fn reduce_by(
    how: &impl Changing,
    dst: *mut u8,
    src: *const u8,
    len: usize,
    op: ReduceOp,
    dtype: Dtype,
) -> Result<bool> {
    whole_elements(dst.addr(), len, dtype)?;
    // SAFETY: the caller's promise, and the checks above: whole elements at aligned addresses.
    let all = unsafe {
        match dtype {
            Dtype::U8 => reduce_as::<u8>(how, dst, src, len, op),
            Dtype::I8 => reduce_as::<i8>(how, dst, src, len, op),
            Dtype::U32 => reduce_as::<u32>(how, dst, src, len, op),
            Dtype::I32 => reduce_as::<i32>(how, dst, src, len, op),
            Dtype::U64 => reduce_as::<u64>(how, dst, src, len, op),
            Dtype::I64 => reduce_as::<i64>(how, dst, src, len, op),
            Dtype::F16 => reduce_as::<f16>(how, dst, src, len, op),
            Dtype::Bf16 => reduce_as::<bf16>(how, dst, src, len, op),
            Dtype::F32 => reduce_as::<f32>(how, dst, src, len, op),
            Dtype::F64 => reduce_as::<f64>(how, dst, src, len, op),
        }
    };
    // One barrier for all elements, so that a later relaxed store cannot become visible before them.
    fence(Ordering::Release);
    Ok(all)
}

/// Adds to the 64-bit number at `addr`, wrapping around, and answers with what was there.
///
/// # Safety
/// `addr` is aligned to 8, valid for reads and writes of 8 bytes, and no Rust reference to them is alive.
#[allow(dead_code, reason = "the paths between workers call it")]
#[inline]
pub(crate) unsafe fn fetch_add(addr: *mut u8, v: u64) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { AtomicU64::from_ptr(addr.cast()) }.fetch_add(v, Ordering::SeqCst)
}

/// Stores `new` in the 64-bit number at `addr` if it is `expected`, and answers with what was there.
///
/// # Safety
/// `addr` is aligned to 8, valid for reads and writes of 8 bytes, and no Rust reference to them is alive.
#[allow(dead_code, reason = "the paths between workers call it")]
#[inline]
pub(crate) unsafe fn compare_swap(addr: *mut u8, expected: u64, new: u64) -> u64 {
    // SAFETY: the caller's promise.
    let cell = unsafe { AtomicU64::from_ptr(addr.cast()) };
    match cell.compare_exchange(expected, new, Ordering::SeqCst, Ordering::SeqCst) {
        Ok(before) | Err(before) => before,
    }
}

/// Changes the 64-bit number at `addr` atomically if the check says yes, [in one step](rseq) and once: `change` gives what replaces
/// what is there, or `None` to leave it. Returns what was there; `None` if the check says no.
///
/// # Safety
/// As for [`fetch_add`].
pub(crate) unsafe fn change_if(
    check: &dyn Fn() -> bool,
    addr: *mut u8,
    change: impl Fn(u64) -> Option<u64>,
) -> Option<u64> {
    let addr = addr.cast::<u64>();
    // SAFETY: the caller's promise.
    let cell = unsafe { AtomicU64::from_ptr(addr) };
    rseq::exchange::<u64, _>(check, |turn| {
        loop {
            let seen = cell.load(Ordering::SeqCst);
            let Some(wanted) = change(seen) else { return Some(seen) };
            // SAFETY: the caller's promise; the others are one word each.
            match unsafe { u64::swap_all(turn, addr, &raw const seen, &raw const wanted, 1, 0) } {
                SequenceOutcome::Complete => return Some(seen),
                SequenceOutcome::Changed(_) => {}
                SequenceOutcome::Preempted(_) => return None,
            }
        }
    })
}

/// The unsigned integer that holds an element's bits in an atomic.
trait Word: rseq::Word {
    /// Replaces the word by `change` of it, whatever others do meanwhile.
    ///
    /// # Safety
    /// `at` is aligned to the word and valid for reads and writes of it.
    unsafe fn update(at: *mut Self, change: impl Fn(Self) -> Self);

    /// Adds to the word, wrapping around.
    ///
    /// # Safety
    /// As for `update`.
    unsafe fn add(at: *mut Self, more: Self);

    /// What the word is now.
    ///
    /// # Safety
    /// As for `update`.
    unsafe fn load(at: *mut Self) -> Self;
}

macro_rules! word {
    ($($word:ty, $atomic:ty;)*) => {$(
        impl Word for $word {
            #[inline(always)]
            unsafe fn update(at: *mut $word, change: impl Fn($word) -> $word) {
                // SAFETY: the caller's promise.
                let cell = unsafe { <$atomic>::from_ptr(at) };
                let mut seen = cell.load(Ordering::Relaxed);
                loop {
                    let wanted = change(seen);
                    if wanted == seen {
                        return;
                    }
                    match cell.compare_exchange_weak(seen, wanted, Ordering::Relaxed, Ordering::Relaxed) {
                        Ok(_) => return,
                        Err(now) => seen = now,
                    }
                }
            }

            #[inline(always)]
            unsafe fn add(at: *mut $word, more: $word) {
                // SAFETY: the caller's promise.
                unsafe { <$atomic>::from_ptr(at) }.fetch_add(more, Ordering::Relaxed);
            }

            #[inline(always)]
            unsafe fn load(at: *mut $word) -> $word {
                // SAFETY: the caller's promise.
                unsafe { <$atomic>::from_ptr(at) }.load(Ordering::Relaxed)
            }
        }
    )*};
}

word! { u8, AtomicU8; u16, AtomicU16; u32, AtomicU32; u64, AtomicU64; }

/// An element, as arithmetic on its bits.
trait Element {
    type Bits: Word;
    /// Whether the sum is the wrapping sum of the bits, for which there is one instruction.
    const ADDS_BITS: bool;
    fn sum(a: Self::Bits, b: Self::Bits) -> Self::Bits;
    fn prod(a: Self::Bits, b: Self::Bits) -> Self::Bits;
    fn min(a: Self::Bits, b: Self::Bits) -> Self::Bits;
    fn max(a: Self::Bits, b: Self::Bits) -> Self::Bits;
}

macro_rules! integer {
    ($($type:ty, $bits:ty;)*) => {$(
        impl Element for $type {
            type Bits = $bits;
            const ADDS_BITS: bool = true;

            #[inline(always)]
            fn sum(a: $bits, b: $bits) -> $bits {
                a.wrapping_add(b)
            }

            #[inline(always)]
            fn prod(a: $bits, b: $bits) -> $bits {
                a.wrapping_mul(b)
            }

            #[inline(always)]
            fn min(a: $bits, b: $bits) -> $bits {
                (a as $type).min(b as $type) as $bits
            }

            #[inline(always)]
            fn max(a: $bits, b: $bits) -> $bits {
                (a as $type).max(b as $type) as $bits
            }
        }
    )*};
}

integer! { u8, u8; i8, u8; u32, u32; i32, u32; u64, u64; i64, u64; }

macro_rules! float {
    ($($type:ty, $bits:ty, $wide:ty, $widen:expr, $narrow:expr;)*) => {$(
        impl Element for $type {
            type Bits = $bits;
            const ADDS_BITS: bool = false;

            #[inline(always)]
            fn sum(a: $bits, b: $bits) -> $bits {
                let wide: $wide = $widen(a) + $widen(b);
                $narrow(wide)
            }

            #[inline(always)]
            fn prod(a: $bits, b: $bits) -> $bits {
                let wide: $wide = $widen(a) * $widen(b);
                $narrow(wide)
            }

            #[inline(always)]
            fn min(a: $bits, b: $bits) -> $bits {
                let (x, y): ($wide, $wide) = ($widen(a), $widen(b));
                if x < y || x.is_nan() || (x == y && x.is_sign_negative()) { a } else { b }
            }

            #[inline(always)]
            fn max(a: $bits, b: $bits) -> $bits {
                let (x, y): ($wide, $wide) = ($widen(a), $widen(b));
                if x > y || x.is_nan() || (x == y && x.is_sign_positive()) { a } else { b }
            }
        }
    )*};
}

float! {
    f16, u16, f32, |bits| f16::from_bits(bits).to_f32(), |wide| f16::from_f32(wide).to_bits();
    bf16, u16, f32, |bits| bf16::from_bits(bits).to_f32(), |wide| bf16::from_f32(wide).to_bits();
    f32, u32, f32, f32::from_bits, f32::to_bits;
    f64, u64, f64, f64::from_bits, f64::to_bits;
}

/// How the elements of a destination are changed.
trait Changing {
    /// Replaces each destination word by `change` of it and the source word of the same position; `adds` where that is the sum of
    /// the bits. Whether all were.
    ///
    /// # Safety
    /// As for [`reduce_as`].
    unsafe fn each<W: Word>(
        &self,
        dst: *mut u8,
        src: *const u8,
        len: usize,
        change: impl Fn(W, W) -> W,
        adds: bool,
    ) -> bool;
}

struct Plainly;

impl Changing for Plainly {
    #[inline(always)]
    unsafe fn each<W: Word>(
        &self,
        dst: *mut u8,
        src: *const u8,
        len: usize,
        change: impl Fn(W, W) -> W,
        adds: bool,
    ) -> bool {
        let apply = |target: *mut W, words: *const W, count: usize| {
            for index in 0..count {
                // SAFETY: the chunk's words, and as many of the destination.
                unsafe {
                    let (at, value) = (target.add(index), words.add(index).read());
                    if adds { W::add(at, value) } else { W::update(at, |seen| change(seen, value)) }
                }
            }
            true
        };
        // SAFETY: the caller's promise.
        unsafe { in_chunks(dst, src, len, apply) }
    }
}

/// As long as the check says yes.
struct WhileChecked<'a>(&'a dyn Fn() -> bool);

/// So many bytes of elements are combined before they are stored: others may change them meanwhile, and then it is done again.
const BATCH: usize = 512;

/// A check holds for at most so many bytes: about ten microseconds of work, so that its own cost does not matter.
const UPON_A_LOOK: usize = 64 << 10;

/// Words of this thread's own.
#[repr(align(8))]
struct Batch([u8; BATCH]);

impl Batch {
    fn words<W: Word>(&mut self, count: usize) -> &mut [W] {
        let count = count.min(BATCH / size_of::<W>());
        // SAFETY: the batch has room for so many words, is aligned to every one of them, and any bytes are words.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), count) }
    }
}

impl Changing for WhileChecked<'_> {
    unsafe fn each<W: Word>(
        &self,
        dst: *mut u8,
        src: *const u8,
        len: usize,
        change: impl Fn(W, W) -> W,
        _adds: bool,
    ) -> bool {
        let (mut values, mut seen, mut wanted) = (Batch([0; BATCH]), Batch([0; BATCH]), Batch([0; BATCH]));
        let mut done = 0;
        while done < len {
            let until = len.min(done + UPON_A_LOOK);
            let all = rseq::exchange::<W, _>(self.0, |turn| {
                while done < until {
                    let some = BATCH.min(until - done) / size_of::<W>();
                    let (values, seen, wanted) =
                        (values.words::<W>(some), seen.words::<W>(some), wanted.words::<W>(some));
                    // SAFETY: `done` and so many words are within the caller's ranges, which are of whole and aligned words; the
                    // destination is changed through atomics by others too. The source may be unaligned, and others may be
                    // writing it: a private copy is neither.
                    let went = unsafe {
                        let target = dst.add(done).cast::<W>();
                        // BYTES MOVE HERE
                        bytes::copy(values.as_mut_ptr().cast(), src.add(done), size_of_val(values));
                        for (index, seen) in seen.iter_mut().enumerate() {
                            *seen = W::load(target.add(index));
                        }
                        for ((wanted, seen), value) in wanted.iter_mut().zip(&*seen).zip(&*values) {
                            *wanted = change(*seen, *value);
                        }
                        W::swap_all(turn, target, seen.as_ptr(), wanted.as_ptr(), some, 0)
                    };
                    let (reached, aside) = match went {
                        SequenceOutcome::Complete => (some, false),
                        SequenceOutcome::Changed(reached) => (reached, false),
                        SequenceOutcome::Preempted(reached) => (reached, true),
                    };
                    done += reached * size_of::<W>();
                    if aside {
                        return None;
                    }
                }
                Some(())
            });
            if all.is_none() {
                return false;
            }
        }
        true
    }
}

/// Reduces whole elements; whether all were.
///
/// # Safety
/// As for [`reduce`]; moreover `dst` is aligned to the element and `len` a multiple of its size.
unsafe fn reduce_as<E: Element>(
    how: &impl Changing,
    dst: *mut u8,
    src: *const u8,
    len: usize,
    op: ReduceOp,
) -> bool {
    // SAFETY: each arm passes the caller's promise on.
    unsafe {
        match op {
            ReduceOp::Sum => how.each::<E::Bits>(dst, src, len, E::sum, E::ADDS_BITS),
            ReduceOp::Prod => how.each::<E::Bits>(dst, src, len, E::prod, false),
            ReduceOp::Min => how.each::<E::Bits>(dst, src, len, E::min, false),
            ReduceOp::Max => how.each::<E::Bits>(dst, src, len, E::max, false),
        }
    }
}

/// Small enough to stay in the nearest cache, large enough to hide the call of the copy.
const CHUNK: usize = 4096;

#[repr(align(8))]
struct Chunk(MaybeUninit<[u8; CHUNK]>);

/// Calls `apply` with words of the destination, source words of the same positions and their number, until all were or it says no.
///
/// # Safety
/// As for [`reduce_as`]; `apply` is called with pointers to aligned words of the destination.
#[inline(always)]
unsafe fn in_chunks<W: Word>(
    dst: *mut u8,
    src: *const u8,
    len: usize,
    apply: impl Fn(*mut W, *const W, usize) -> bool,
) -> bool {
    // The source may be unaligned, and others may be writing it: a private copy is neither.
    let mut chunk = Chunk(MaybeUninit::uninit());
    let words = chunk.0.as_mut_ptr().cast::<W>();
    let mut done = 0;
    while done < len {
        let step = CHUNK.min(len - done);
        // BYTES MOVE HERE
        // SAFETY: `done + step` is at most `len`, for which the caller vouches, and `step` at most the chunk;
        // the chunk is aligned to every word, and its first `step` bytes are written before they are read.
        unsafe {
            bytes::copy(words.cast(), src.add(done), step);
            if !apply(dst.add(done).cast::<W>(), words, step / size_of::<W>()) {
                return false;
            }
        }
        done += step;
    }
    true
}

#[cfg(test)]
mod tests;
