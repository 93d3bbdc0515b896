//! Access to memory that was lent, which may be gone: by calls that report a missing page where an access would end the process.
#![allow(unsafe_code, reason = "hands addresses to the kernel, which checks them")]

use rustix::io::Errno;
use rustix::mm::Advice;

use super::map;
use crate::{Error, Kind, Result};

/// The error for memory that was lent and is not there any more.
pub(crate) fn gone(op: &'static str) -> Error {
    Error::new(
        Kind::Stale,
        op,
        "the memory that was registered is gone: it was unmapped, or its file was cut; its owner should close the region first",
    )
}

/// Copies bytes out of memory that may be gone.
///
/// # Safety
/// `into` is valid for writes of `len` bytes. What `from` names is the kernel's to check.
pub(crate) unsafe fn read(op: &'static str, into: *mut u8, from: *const u8, len: usize) -> Result<()> {
    // SAFETY: the caller's promise for the near side; the far side is checked by the kernel.
    unsafe { all(op, libc::process_vm_readv, into, from.cast_mut(), len) }
}

/// Copies bytes into memory that may be gone.
///
/// # Safety
/// `from` is valid for reads of `len` bytes. What `into` names is the kernel's to check; that it is memory which was lent for
/// this is the caller's to know.
pub(crate) unsafe fn write(op: &'static str, into: *mut u8, from: *const u8, len: usize) -> Result<()> {
    // SAFETY: as above.
    unsafe { all(op, libc::process_vm_writev, from.cast_mut(), into, len) }
}

type Call = unsafe extern "C" fn(
    libc::pid_t,
    *const libc::iovec,
    libc::c_ulong,
    *const libc::iovec,
    libc::c_ulong,
    libc::c_ulong,
) -> isize;

/// # Safety
/// `near` is valid for the direction of the call for `len` bytes.
unsafe fn all(op: &'static str, call: Call, near: *mut u8, far: *mut u8, len: usize) -> Result<()> {
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
            Err(_) => match std::io::Error::last_os_error() {
                error if error.kind() == std::io::ErrorKind::Interrupted => {}
                error if error.raw_os_error() == Some(libc::EFAULT) => return Err(gone(op)),
                error => return Err(Error::os(op, "process_vm call", error)),
            },
        }
    }
    Ok(())
}

/// Refuses a range of lent memory of which a page is missing now, and takes the others. What is looked at may be gone a moment
/// later.
pub(crate) fn look(op: &'static str, from: *const u8, len: usize, write: bool) -> Result<()> {
    let page = map::page_size();
    let start = from.addr() & !(page - 1);
    let whole = (from.addr() + len).next_multiple_of(page) - start;
    let advice = if write { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
    loop {
        // SAFETY: brings pages in and changes nothing that a program sees; the kernel checks the range.
        let looked =
            unsafe { rustix::mm::madvise(std::ptr::with_exposed_provenance_mut(start), whole, advice) };
        match looked {
            Ok(()) => return Ok(()),
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(Errno::FAULT | Errno::NOMEM) => return Err(gone(op)),
            // An older kernel, or pages of a device: whatever moves the bytes reports it.
            Err(Errno::INVAL) if !write => return Ok(()),
            Err(Errno::INVAL) => {
                let message = "this kernel cannot tell whether memory that was lent is there: use memory that Towline allocates";
                return Err(Error::new(Kind::Unsupported, op, message));
            }
            Err(error) => return Err(Error::os(op, "madvise", error)),
        }
    }
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
