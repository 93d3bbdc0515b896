//! Access to memory that was lent, which may be gone: by calls that report a missing page where an access would end the process.
#![allow(unsafe_code, reason = "hands addresses to the kernel, which checks them")]

use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use rustix::mm::Advice;

use super::{bytes, map};
use crate::{Error, Kind, Result};

/// The error for memory that was lent and is not there any more.
pub(crate) fn gone(op: &'static str) -> Error {
    Error::new(
        Kind::Stale,
        op,
        "the memory that was registered is gone: it was unmapped or protected, or its file was cut; close the region before that",
    )
}

/// Some containers forbid the calls, also on oneself. Then an access is a plain one: whoever lends memory there must keep it.
static FORBIDDEN: AtomicBool = AtomicBool::new(false);

/// Copies bytes out of memory that may be gone.
///
/// # Safety
/// `into` is valid for writes of `len` bytes. `from` is memory that was lent for this; whether it is there is the kernel's to check.
pub(crate) unsafe fn read(op: &'static str, into: *mut u8, from: *const u8, len: usize) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        if !all(op, libc::process_vm_readv, into, from.cast_mut(), len)? {
            bytes::copy(into, from, len);
        }
    }
    Ok(())
}

/// Copies bytes into memory that may be gone.
///
/// # Safety
/// `from` is valid for reads of `len` bytes. `into` is memory that was lent for this, and no Rust reference to it is alive; whether
/// it is there is the kernel's to check.
pub(crate) unsafe fn write(op: &'static str, into: *mut u8, from: *const u8, len: usize) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        if !all(op, libc::process_vm_writev, from.cast_mut(), into, len)? {
            bytes::copy_to_publish(into, from, len);
        }
    }
    Ok(())
}

type Call = unsafe extern "C" fn(
    libc::pid_t,
    *const libc::iovec,
    libc::c_ulong,
    *const libc::iovec,
    libc::c_ulong,
    libc::c_ulong,
) -> isize;

/// False: the call is forbidden here.
///
/// # Safety
/// `near` is valid for the direction of the call for `len` bytes.
unsafe fn all(op: &'static str, call: Call, near: *mut u8, far: *mut u8, len: usize) -> Result<bool> {
    if FORBIDDEN.load(Ordering::Relaxed) {
        return Ok(false);
    }
    let pid = rustix::process::getpid().as_raw_nonzero().get();
    let mut at = 0;
    while at < len {
        let part =
            |start: *mut u8| libc::iovec { iov_base: start.wrapping_add(at).cast(), iov_len: len - at };
        let (near, far) = (part(near), part(far));
        // BYTES MOVE HERE
        // SAFETY: the near range is the caller's promise; the kernel checks the far one.
        let moved = unsafe { call(pid, &raw const near, 1, &raw const far, 1, 0) };
        match usize::try_from(moved) {
            Ok(0) => return Err(gone(op)),
            Ok(moved) => at += moved,
            Err(_) => {
                let error = std::io::Error::last_os_error();
                match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::EFAULT) => return Err(gone(op)),
                    Some(libc::EPERM | libc::ENOSYS) => {
                        if !FORBIDDEN.swap(true, Ordering::Relaxed) {
                            tracing::warn!(%error, "process_vm_readv is forbidden here: memory that was lent must not go away");
                        }
                        return Ok(false);
                    }
                    _ => return Err(Error::os(op, "process_vm call", error)),
                }
            }
        }
    }
    Ok(true)
}

/// Refuses a range of lent memory of which a page is missing now, and takes the others. What is looked at may be gone a moment
/// later.
pub(crate) fn look(op: &'static str, from: *const u8, len: usize) -> Result<()> {
    let page = map::page_size();
    let start = from.addr() & !(page - 1);
    let whole = (from.addr() + len).next_multiple_of(page) - start;
    let range = std::ptr::with_exposed_provenance_mut(start);
    loop {
        // SAFETY: brings pages in and changes nothing that a program sees; the kernel checks the range.
        match unsafe { rustix::mm::madvise(range, whole, Advice::LinuxPopulateRead) } {
            Ok(()) => return Ok(()),
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(Errno::FAULT | Errno::NOMEM) => return Err(gone(op)),
            // An older kernel, pages of a device, or pages that may not be read.
            Err(Errno::INVAL) => return touch(op, range.cast(), whole, page),
            Err(error) => return Err(Error::os(op, "madvise", error)),
        }
    }
}

/// The same by a read of one byte of each page.
fn touch(op: &'static str, start: *mut u8, len: usize, page: usize) -> Result<()> {
    let mut byte = 0;
    for at in (0..len).step_by(page) {
        // SAFETY: the near side is a byte of this function's.
        if !unsafe { all(op, libc::process_vm_readv, &raw mut byte, start.wrapping_add(at), 1)? } {
            break;
        }
    }
    Ok(())
}

/// The CRC32C of bytes that may be gone.
pub(crate) fn crc32c(op: &'static str, from: *const u8, len: usize) -> Result<u32> {
    let mut buffer = [0; 8 << 10];
    let (mut check, mut at) = (0, 0);
    while at < len {
        let some = buffer.len().min(len - at);
        // SAFETY: the buffer has room for so many.
        unsafe { read(op, buffer.as_mut_ptr(), from.wrapping_add(at), some)? };
        check = crc32c::crc32c_append(check, &buffer[..some]);
        at += some;
    }
    Ok(check)
}
