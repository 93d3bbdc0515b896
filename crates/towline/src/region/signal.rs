//! Counters in registered memory that are raised by peers and waited for by the owner.
#![allow(unsafe_code, reason = "counters live in registered memory, which is reached by address")]

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::futex;

use super::RegionCore;
use crate::memory::Place;
use crate::{Error, Kind, Result};

/// The 32 bits of a counter on which its waiters sleep: those that change with every signal.
fn low_half(counter: *mut u64) -> *const AtomicU32 {
    if cfg!(target_endian = "little") { counter.cast() } else { counter.cast::<AtomicU32>().wrapping_add(1) }
}

/// Raises the counter at that address and wakes who waits for it.
///
/// # Safety
/// `counter` points to eight aligned bytes of registered memory that stay mapped during the call.
pub(crate) unsafe fn raise(counter: *mut u64, add: u64) -> u64 {
    // SAFETY: the caller's obligation; other users of the word go through atomics too.
    let before = unsafe { AtomicU64::from_ptr(counter) }.fetch_add(add, Ordering::SeqCst);
    // SAFETY: as above; the kernel only looks at the address.
    let word = unsafe { &*low_half(counter) };
    // Shared, not private: the waiter may be another process that maps the same memory. A failure means that
    // nobody can be waiting there.
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
    before
}

/// Waits until the counter is at least that high.
pub(super) fn wait(core: &RegionCore, offset: usize, at_least: u64, within: Duration) -> Result<u64> {
    if core.place != Place::Host {
        return Err(Error::new(Kind::Unsupported, "wait_signal", "the region is not in host memory"));
    }
    let addr = core.addr.wrapping_add(offset);
    if offset.checked_add(8).is_none_or(|end| end > core.len) || !addr.is_multiple_of(8) {
        return Err(Error::invalid(
            "wait_signal",
            format!("offset {offset} does not name eight aligned bytes within {} bytes", core.len),
        ));
    }
    let counter = addr as *mut u64;
    let started = Instant::now();
    loop {
        // SAFETY: checked above to lie within the region, whose registration the caller holds by reference.
        let (value, word) =
            unsafe { (AtomicU64::from_ptr(counter).load(Ordering::SeqCst), &*low_half(counter)) };
        if value >= at_least {
            return Ok(value);
        }
        let spent = started.elapsed();
        let Some(left) = within.checked_sub(spent).filter(|left| !left.is_zero()) else {
            return Err(Error::new(
                Kind::Timeout,
                "wait_signal",
                format!("the counter is {value}, not {at_least}, after {:.3} s", spent.as_secs_f64()),
            ));
        };
        let timeout = rustix::time::Timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        // Every outcome (woken, value changed, interrupted, timed out) leads back to the check above.
        let _ = futex::wait(word, futex::Flags::empty(), value as u32, Some(&timeout));
    }
}
