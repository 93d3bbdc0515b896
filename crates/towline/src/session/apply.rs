//! What an owner does to its own memory on a peer's behalf, once it has checked the request.
#![allow(unsafe_code, reason = "acts on registered memory by address")]

use crate::Result;
use crate::bytes::checked;
use crate::memory::reduce::{change_if, reduce_if};
use crate::memory::{Dtype, ReduceOp, lent};
use crate::region::{raise_own, wake_raised};
use crate::runtime::socket::RawPartMut;
use crate::session::parts::hung_up;
use crate::wire::AtomicOp;

/// An aligned word inside a region that the caller holds a use of.
#[derive(Clone, Copy)]
pub(super) struct Word {
    pub(super) at: *mut u8,
    /// The memory was lent, and may be gone.
    pub(super) lent: bool,
}

impl Word {
    /// Changes it once, if the look says so.
    fn change(
        self,
        op: &'static str,
        look: &dyn Fn() -> bool,
        change: impl Fn(u64) -> Option<u64>,
    ) -> Result<Option<u64>> {
        // SAFETY: the word's own promise.
        unsafe {
            if self.lent {
                lent::change(op, look, self.at, change)
            } else {
                Ok(change_if(look, self.at, change))
            }
        }
    }
}

/// Performs an atomic, once, if the look says so.
pub(super) fn atomic(look: &dyn Fn() -> bool, word: Word, op: AtomicOp) -> Result<Option<u64>> {
    match op {
        AtomicOp::Add(value) => word.change("atomic", look, |seen| Some(seen.wrapping_add(value))),
        AtomicOp::CompareSwap { expected, new } => {
            word.change("atomic", look, |seen| (seen == expected).then_some(new))
        }
    }
}

/// Writes bytes to lent memory, as long as the look says so.
pub(super) fn write_lent(look: &dyn Fn() -> bool, parts: &[RawPartMut], mut bytes: &[u8]) -> Result<()> {
    for part in parts {
        let (now, rest) = bytes.split_at(part.len.min(bytes.len()));
        if !look() {
            return Err(hung_up("write"));
        }
        // SAFETY: the holder of the parts holds a use of their region; that the pages are there is the kernel's to see.
        unsafe { checked::write("write", part.ptr, now.as_ptr(), now.len())? };
        bytes = rest;
    }
    Ok(())
}

/// Raises a counter, and wakes its waiters.
pub(super) fn signal(word: Word, add: u64) -> Result<u64> {
    // SAFETY: the word's own promise.
    unsafe { raise_own(word.at.cast(), add, word.lent) }
}

/// The same once, if the look says so.
pub(super) fn signal_if(look: &dyn Fn() -> bool, word: Word, add: u64) -> Result<Option<u64>> {
    let before = word.change("signal", look, |seen| Some(seen.wrapping_add(add)))?;
    if before.is_some() {
        // SAFETY: the word's own promise; the kernel only looks at the address.
        unsafe { wake_raised(word.at.cast(), None) };
    }
    Ok(before)
}

/// Combines received bytes into parts that the caller has checked and pinned, as long as the look says so; whether all were.
pub(super) fn reduce(
    look: &dyn Fn() -> bool,
    parts: &[RawPartMut],
    lent: bool,
    mut bytes: &[u8],
    op: ReduceOp,
    dtype: Dtype,
) -> Result<bool> {
    for part in parts {
        let (now, rest) = bytes.split_at(part.len.min(bytes.len()));
        // SAFETY: the part lies in a region that the caller holds a use of, and `now` has its length.
        let all = unsafe {
            if lent {
                lent::reduce(look, part.ptr, now.as_ptr(), now.len(), op, dtype)?
            } else {
                reduce_if(look, part.ptr, now.as_ptr(), now.len(), op, dtype)?
            }
        };
        if !all {
            return Ok(false);
        }
        bytes = rest;
    }
    Ok(true)
}
