//! What an owner does to its own memory on a peer's behalf, once it has checked the request.
#![allow(unsafe_code, reason = "acts on registered memory by address")]

use crate::Result;
use crate::memory::reduce::{change_if, reduce_if};
use crate::memory::{Dtype, ReduceOp};
use crate::progress::socket::RawPartMut;
use crate::region::{raise, wake_raised};
use crate::wire::AtomicOp;

/// Performs an atomic on a word that the caller has checked and pinned, once, if the look says so.
pub(super) fn atomic(look: &dyn Fn() -> bool, word: *mut u8, op: AtomicOp) -> Option<u64> {
    // SAFETY: `Serving::word` hands out only aligned words inside a region that it holds a use of.
    unsafe {
        match op {
            AtomicOp::Add(value) => change_if(look, word, |seen| Some(seen.wrapping_add(value))),
            AtomicOp::CompareSwap { expected, new } => {
                change_if(look, word, |seen| (seen == expected).then_some(new))
            }
        }
    }
}

/// Raises a counter that the caller has checked and pinned.
pub(super) fn signal(word: *mut u8, add: u64) -> u64 {
    // SAFETY: as above.
    unsafe { raise(word.cast(), add, None) }
}

/// The same once, if the look says so.
pub(super) fn signal_if(look: &dyn Fn() -> bool, word: *mut u8, add: u64) -> Option<u64> {
    // SAFETY: as above.
    unsafe {
        let before = change_if(look, word, |seen| Some(seen.wrapping_add(add)))?;
        wake_raised(word.cast(), None);
        Some(before)
    }
}

/// Combines received bytes into parts that the caller has checked and pinned, as long as the look says so; whether all were.
pub(super) fn reduce(
    look: &dyn Fn() -> bool,
    parts: &[RawPartMut],
    mut bytes: &[u8],
    op: ReduceOp,
    dtype: Dtype,
) -> Result<bool> {
    for part in parts {
        let (now, rest) = bytes.split_at(part.len.min(bytes.len()));
        // SAFETY: the part lies in a region that the caller holds a use of, and `now` has its length.
        if !unsafe { reduce_if(look, part.ptr, now.as_ptr(), now.len(), op, dtype)? } {
            return Ok(false);
        }
        bytes = rest;
    }
    Ok(true)
}
