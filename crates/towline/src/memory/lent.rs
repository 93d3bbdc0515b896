//! Words and elements of memory that was lent, which may be gone: changed by calls that report a missing page.
//!
//! The kernel reads and writes for us, and has no call that changes a word. So a change is a read and a write, and a thread that
//! changes words of lent memory in this process waits for its turn: one turn for all of it, since one memory can be registered
//! several times, and a file can be mapped several times. Nobody waits for a page during its turn: each brings its own in before.
#![allow(unsafe_code, reason = "hands addresses to the kernel, which checks them")]

mod pages;

use std::sync::atomic::{AtomicU64, Ordering, fence};

use parking_lot::{Mutex, MutexGuard};

pub(crate) use self::pages::Pages;
use super::{Dtype, ReduceOp, reduce};
use crate::Result;
use crate::bytes::checked;

static TURN: Mutex<()> = Mutex::new(());

/// Held by the thread that reads or changes a word of lent memory by itself, for that one access.
#[must_use]
pub(crate) struct Turn(#[allow(dead_code, reason = "held")] MutexGuard<'static, ()>);

fn turn() -> Turn {
    Turn(TURN.lock())
}

/// Waits for the thread that changes a word of lent memory now, for a plain access to that word: its page comes before, since all others wait
/// while this one has its turn.
///
/// # Safety
/// `word` points to eight aligned bytes that are mapped, and to which nobody has a reference.
#[inline]
pub(crate) unsafe fn turn_at(word: *mut u64) -> Turn {
    // SAFETY: the caller's promise.
    unsafe { AtomicU64::from_ptr(word) }.load(Ordering::Relaxed);
    turn()
}

/// Reads the 64-bit number at `at` while nobody changes it by [`change`].
///
/// # Errors
/// `Stale` where the page is gone.
///
/// # Safety
/// As for [`change`].
pub(crate) unsafe fn load(op: &'static str, at: *const u8) -> Result<u64> {
    checked::look(op, at, size_of::<u64>())?;
    let _turn = turn();
    let mut seen = 0u64;
    // SAFETY: as in `change`.
    unsafe { checked::read(op, (&raw mut seen).cast(), at, size_of::<u64>())? };
    Ok(seen)
}

/// Changes the 64-bit number at `at` atomically, if the check right before says yes: `change` gives what replaces what is there,
/// or `None` to leave it. Returns what was there; `None` if the check says no.
///
/// # Errors
/// `Stale` where the page is gone.
///
/// # Safety
/// `at` is in memory that was lent for this, and no Rust reference to it is alive. What is there is the kernel's to check.
pub(crate) unsafe fn change(
    op: &'static str,
    check: &dyn Fn() -> bool,
    at: *mut u8,
    change: impl Fn(u64) -> Option<u64>,
) -> Result<Option<u64>> {
    checked::bring(op, at, size_of::<u64>())?;
    let _turn = turn();
    let mut seen = 0u64;
    // SAFETY: the near side is a word of this function's; the caller's promise for the far side.
    unsafe { checked::read(op, (&raw mut seen).cast(), at, size_of::<u64>())? };
    if !check() {
        return Ok(None);
    }
    if let Some(new) = change(seen) {
        // SAFETY: as above.
        unsafe { checked::write(op, at, (&raw const new).cast(), size_of::<u64>())? };
        // As the atomic would: a thread that looks next whether another sleeps is not ahead of it.
        fence(Ordering::SeqCst);
    }
    Ok(Some(seen))
}

/// So many bytes of elements are changed in one turn.
const CHUNK: usize = 4096;

#[repr(align(8))]
struct Chunk([u8; CHUNK]);

/// [`reduce`](reduce::reduce) into memory that was lent, as long as the check says yes. Returns whether all elements were.
///
/// # Errors
/// As there, and `Stale` where a page is gone; what lies before it has been reduced.
///
/// # Safety
/// `src` is valid for reads of `len` bytes; `dst` as in [`change`].
pub(crate) unsafe fn reduce(
    check: &dyn Fn() -> bool,
    dst: *mut u8,
    src: *const u8,
    len: usize,
    op: ReduceOp,
    dtype: Dtype,
) -> Result<bool> {
    const OP: &str = "reduce_into";
    reduce::whole_elements(dst.addr(), len, dtype)?;
    let mut chunk = Chunk([0; CHUNK]);
    let here = chunk.0.as_mut_ptr();
    for done in (0..len).step_by(CHUNK) {
        let (there, some) = (dst.wrapping_add(done), CHUNK.min(len - done));
        checked::bring(OP, there, some)?;
        let _turn = turn();
        // SAFETY: the chunk has room for so many bytes, and is aligned to every element; `src` is the caller's promise.
        unsafe {
            checked::read(OP, here, there, some)?;
            if !check() {
                return Ok(false);
            }
            reduce::reduce(here, src.wrapping_add(done), some, op, dtype)?;
            checked::write(OP, there, here, some)?;
        }
    }
    fence(Ordering::SeqCst);
    Ok(true)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::Kind;
    use crate::memory::{MemoryAccess, MemoryDescription, SystemStorage};

    #[test]
    fn a_word_is_changed_only_if_the_check_says_yes() {
        let storage = SystemStorage::new(64).unwrap();
        let at = std::ptr::with_exposed_provenance_mut(storage.addr() + 8);
        let add = |check: &dyn Fn() -> bool| {
            // SAFETY: a word of a storage that lives on.
            unsafe { change("atomic", check, at, |seen| Some(seen + 3)) }.unwrap()
        };
        assert_eq!((add(&|| true), add(&|| false), add(&|| true)), (Some(0), None, Some(3)));
        let mut word = [0; 8];
        storage.read_at(8, &mut word).unwrap();
        assert_eq!(u64::from_ne_bytes(word), 6);
    }

    #[test]
    fn elements_are_reduced_as_in_memory_that_is_not_lent() {
        let storage = SystemStorage::new(3 * CHUNK).unwrap();
        storage.write_at(0, &vec![1; 3 * CHUNK]).unwrap();
        let (base, len) = (storage.addr() + 4, 2 * CHUNK + 12);
        let dst = std::ptr::with_exposed_provenance_mut(base);
        let source = vec![2; len];
        let go = |len: usize, check: &dyn Fn() -> bool| {
            // SAFETY: within the storage, and the source is a vector of that length.
            unsafe { reduce(check, dst, source.as_ptr(), len, ReduceOp::Sum, Dtype::U32) }
        };
        assert!(go(len, &|| true).unwrap());
        assert!(!go(len, &|| false).unwrap());
        assert_eq!(go(7, &|| true).unwrap_err().kind(), Kind::Invalid);
        let mut all = vec![0; 3 * CHUNK];
        storage.read_at(0, &mut all).unwrap();
        assert!(all[..4].iter().chain(&all[4 + len..]).all(|byte| *byte == 1));
        assert!(all[4..4 + len].iter().all(|byte| *byte == 3));
    }
}
