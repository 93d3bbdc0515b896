//! The one copy of the CPU paths, and what else touches bytes by address.
#![allow(unsafe_code, reason = "copies bytes through raw pointers")]

pub(crate) mod checked;

use std::ffi::{c_int, c_void};
use std::hint::black_box;
use std::sync::atomic::{Ordering, fence};

use crate::{Error, Result};

/// Copies `len` bytes; the ranges may overlap.
///
/// Others may be writing the source or the destination meanwhile: then which bytes arrive is
/// unspecified, byte by byte, and nothing else is. A copy in Rust would promise the compiler that nobody
/// interferes; the C library's is machine code that takes what it finds, and calling it through a pointer that
/// the optimiser cannot see through keeps it that way.
///
/// # Safety
/// `src` is valid for reads and `dst` for writes of `len` bytes for the whole call.
#[inline]
pub(crate) unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) {
    type Memmove = unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> *mut c_void;
    let memmove: Memmove = black_box(libc::memmove);
    // BYTES MOVE HERE
    // SAFETY: both ranges are valid by the caller's promise, and `memmove` allows them to overlap.
    unsafe { memmove(dst.cast(), src.cast(), len) };
}

/// Lets the processor fetch the beginning of `len` bytes that will be read soon; nothing on processors other than x86-64,
/// for which there is no stable way to say so.
pub(crate) fn expect(src: *const u8, len: usize) {
    /// Enough for the processor's own prefetching to take over.
    const BEGINNING: usize = 512;
    #[cfg(target_arch = "x86_64")]
    for at in (0..len.min(BEGINNING)).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a hint, which accesses nothing and faults nowhere.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(src.wrapping_add(at).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (src, len, BEGINNING);
}

/// The CRC32C of `len` bytes. Others may be writing them meanwhile, as for [`copy`].
///
/// # Safety
/// `src` is valid for reads of `len` bytes for the whole call.
pub(crate) unsafe fn crc32c(src: *const u8, len: usize) -> u32 {
    // Through a buffer that stays in the cache: what others may write is never a slice.
    let mut buffer = [0; 8 << 10];
    let (mut check, mut at) = (0, 0);
    while at < len {
        let some = buffer.len().min(len - at);
        // SAFETY: within the range that the caller promises; the buffer has room for it.
        unsafe { copy(buffer.as_mut_ptr(), src.wrapping_add(at), some) };
        check = crc32c::crc32c_append(check, &buffer[..some]);
        at += some;
    }
    check
}

/// From this length on a copy may have gone around the cache, and a release store alone does not wait for that.
const MAY_LINGER: usize = 4096;

/// [`copy`] for bytes that are published by a release store or a wake afterwards, and not by a check of the fence.
///
/// # Safety
/// As for [`copy`].
#[inline]
pub(crate) unsafe fn copy_to_publish(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { copy(dst, src, len) };
    if len >= MAY_LINGER {
        fence(Ordering::SeqCst);
    }
}

/// [`copy_to_publish`] around the cache, where the machine can: the destination's lines are not read before they are
/// written, and nothing else is pushed out for them. Worth it for bytes that nobody reads soon, in portions of a long whole.
///
/// # Safety
/// As for [`copy`]; the ranges do not overlap.
#[inline]
pub(crate) unsafe fn copy_around_cache(dst: *mut u8, src: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        const LINE: usize = 64;
        let head = (dst.addr().wrapping_neg() & (LINE - 1)).min(len);
        let lines = (len - head) / LINE;
        let tail = head + lines * LINE;
        // SAFETY: `head`, the lines and the tail make up the whole, which the caller promises. Machine code takes whatever
        // bytes it finds, as in `copy`; the fence orders the stores before whatever publishes them.
        unsafe {
            copy(dst, src, head);
            if lines > 0 {
                // BYTES MOVE HERE
                std::arch::asm!(
                    "2:",
                    "movdqu {a}, [{src}]",
                    "movdqu {b}, [{src} + 16]",
                    "movdqu {c}, [{src} + 32]",
                    "movdqu {d}, [{src} + 48]",
                    "movntdq [{dst}], {a}",
                    "movntdq [{dst} + 16], {b}",
                    "movntdq [{dst} + 32], {c}",
                    "movntdq [{dst} + 48], {d}",
                    "add {src}, 64",
                    "add {dst}, 64",
                    "dec {lines}",
                    "jnz 2b",
                    "sfence",
                    src = inout(reg) src.add(head) => _,
                    dst = inout(reg) dst.add(head) => _,
                    lines = inout(reg) lines => _,
                    a = out(xmm_reg) _,
                    b = out(xmm_reg) _,
                    c = out(xmm_reg) _,
                    d = out(xmm_reg) _,
                    options(nostack),
                );
            }
            copy(dst.add(tail), src.add(tail), len - tail);
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller's promise.
    unsafe {
        copy_to_publish(dst, src, len)
    };
}

/// Sets `len` bytes to `value`; others may touch them meanwhile, as for [`copy`].
///
/// # Safety
/// `dst` is valid for writes of `len` bytes for the whole call.
#[inline]
pub(crate) unsafe fn fill(dst: *mut u8, value: u8, len: usize) {
    type Memset = unsafe extern "C" fn(*mut c_void, c_int, usize) -> *mut c_void;
    let memset: Memset = black_box(libc::memset);
    // SAFETY: the range is valid by the caller's promise.
    unsafe { memset(dst.cast(), c_int::from(value), len) };
}

/// Fails with `Invalid` where `len` bytes from `offset` on are not all among the first `size`.
pub(crate) fn in_bounds(op: &'static str, size: usize, offset: usize, len: usize) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(Error::invalid(
            op,
            format!("{len} bytes at offset {offset} are past the end of {size} bytes"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_around_the_cache_copies_every_byte_and_no_other() {
        let from: Vec<u8> = (0..700).map(|at| (at % 251) as u8).collect();
        for (start, len) in [(0, 0), (0, 64), (1, 63), (63, 2), (64, 640), (5, 300), (60, 4), (17, 683)] {
            let mut into = vec![0xee; 800];
            // SAFETY: both ranges lie within their vectors, which nobody else uses.
            unsafe { copy_around_cache(into.as_mut_ptr().add(start), from.as_ptr().add(3), len) };
            assert!(
                into[..start].iter().chain(&into[start + len..]).all(|byte| *byte == 0xee),
                "{start} {len}"
            );
            assert_eq!(into[start..start + len], from[3..3 + len], "{start} {len}");
        }
    }
}
