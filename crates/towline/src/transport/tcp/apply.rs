//! What an owner does to its own memory on a peer's behalf, once it has checked the request.
#![allow(unsafe_code, reason = "acts on registered memory by address")]

use crate::Result;
use crate::memory::reduce::reduce as combine;
use crate::memory::{Dtype, ReduceOp};
use crate::progress::socket::RawPartMut;
use crate::region::raise;
use crate::transport::inproc::apply_atomic;
use crate::wire::AtomicOp;

/// Performs an atomic on a word that the caller has checked and pinned.
pub(super) fn atomic(word: *mut u8, op: AtomicOp) -> u64 {
    // SAFETY: `Serving::word` hands out only aligned words inside a region that it holds a use of.
    unsafe { apply_atomic(word, op) }
}

/// Raises a counter that the caller has checked and pinned.
pub(super) fn signal(word: *mut u8, add: u64) -> u64 {
    // SAFETY: as above.
    unsafe { raise(word.cast(), add, None) }
}

/// Combines received bytes into parts that the caller has checked and pinned.
pub(super) fn reduce(parts: &[RawPartMut], mut bytes: &[u8], op: ReduceOp, dtype: Dtype) -> Result<()> {
    for part in parts {
        let (now, rest) = bytes.split_at(part.len.min(bytes.len()));
        // SAFETY: the part lies in a region that the caller holds a use of, and `now` has its length.
        unsafe { combine(part.ptr, now.as_ptr(), now.len(), op, dtype)? };
        bytes = rest;
    }
    Ok(())
}
