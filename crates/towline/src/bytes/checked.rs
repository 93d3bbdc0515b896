//! Access to memory that was lent, which may be gone: by calls that report a missing page where an access would end the process.
#![allow(unsafe_code, reason = "hands addresses to the kernel, which checks them")]

use std::ffi::c_void;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::mm::Advice;
use rustix::pipe::{PipeFlags, pipe_with};

use crate::{Error, Kind, Result};

/// The error for memory that was lent and is not there any more.
pub(crate) fn gone(op: &'static str) -> Error {
    Error::new(
        Kind::Stale,
        op,
        "the memory that was registered is gone: it was unmapped or protected, or its file was cut; close the region before that",
    )
}

/// Some containers forbid the calls, also on oneself. Then the bytes go through a pipe, whose calls report a missing page too.
static FORBIDDEN: AtomicBool = AtomicBool::new(false);

/// Copies bytes out of memory that may be gone.
///
/// # Safety
/// `into` is valid for writes of `len` bytes. `from` is memory that was lent for this; whether it is there is the kernel's to check.
pub(crate) unsafe fn read(op: &'static str, into: *mut u8, from: *const u8, len: usize) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        let done = all(op, libc::process_vm_readv, into, from.cast_mut(), len)?;
        if done < len {
            through_pipe(op, into.wrapping_add(done), from.wrapping_add(done), len - done)
        } else {
            Ok(())
        }
    }
}

/// Copies bytes into memory that may be gone.
///
/// # Safety
/// `from` is valid for reads of `len` bytes. `into` is memory that was lent for this, and no Rust reference to it is alive; whether
/// it is there is the kernel's to check.
pub(crate) unsafe fn write(op: &'static str, into: *mut u8, from: *const u8, len: usize) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        let done = all(op, libc::process_vm_writev, from.cast_mut(), into, len)?;
        if done < len {
            through_pipe(op, into.wrapping_add(done), from.wrapping_add(done), len - done)
        } else {
            Ok(())
        }
    }
}

type Call = unsafe extern "C" fn(
    libc::pid_t,
    *const libc::iovec,
    libc::c_ulong,
    *const libc::iovec,
    libc::c_ulong,
    libc::c_ulong,
) -> isize;

/// How many bytes the call has moved: fewer than all where it is forbidden here.
///
/// # Safety
/// `near` is valid for the direction of the call for `len` bytes.
unsafe fn all(op: &'static str, call: Call, near: *mut u8, far: *mut u8, len: usize) -> Result<usize> {
    let pid = rustix::process::getpid().as_raw_nonzero().get();
    let mut at = 0;
    while at < len && !FORBIDDEN.load(Ordering::Relaxed) {
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
                            tracing::warn!(%error, "process_vm_readv is forbidden here: memory that was lent is copied through a pipe");
                        }
                    }
                    _ => return Err(Error::os(op, "process_vm call", error)),
                }
            }
        }
    }
    Ok(at)
}

/// A pipe, empty while nobody uses it.
struct Detour {
    from: OwnedFd,
    to: OwnedFd,
}

/// So many bytes go into the pipe at once, where it takes them.
const PIPED: usize = 64 << 10;

/// Copies between memory one of whose ends may be gone, through a pipe: a call out of the one, and one into the other. One pipe for the
/// whole process, since nobody is in a hurry where the calls above are forbidden.
///
/// # Safety
/// The end that was not lent is valid for that access; no Rust reference to the other is alive.
unsafe fn through_pipe(op: &'static str, into: *mut u8, from: *const u8, len: usize) -> Result<()> {
    static DETOUR: Mutex<Option<Detour>> = Mutex::new(None);
    let mut kept = DETOUR.lock();
    // Taken out: a pipe in which something is left behind is not used again.
    let detour = match kept.take() {
        Some(detour) => detour,
        None => {
            let made = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK);
            let (from, to) = made.map_err(|error| Error::os(op, "pipe", error))?;
            Detour { from, to }
        }
    };
    let (mut taken, mut given) = (0, 0);
    while given < len {
        if taken == given {
            // BYTES MOVE HERE
            // SAFETY: the caller's promise, or the kernel's check.
            let moved = unsafe {
                libc::write(detour.to.as_raw_fd(), from.wrapping_add(taken).cast(), PIPED.min(len - taken))
            };
            taken += moved_by(op, moved)?;
        } else {
            // BYTES MOVE HERE
            // SAFETY: as above.
            let moved = unsafe {
                libc::read(detour.from.as_raw_fd(), into.wrapping_add(given).cast(), taken - given)
            };
            given += moved_by(op, moved)?;
        }
    }
    *kept = Some(detour);
    Ok(())
}

/// What a call on the pipe has moved: nothing where a signal came.
fn moved_by(op: &'static str, moved: isize) -> Result<usize> {
    match usize::try_from(moved) {
        // An empty pipe takes something, and one with something in it gives it.
        Ok(0) => Err(gone(op)),
        Ok(moved) => Ok(moved),
        Err(_) => {
            let error = std::io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => Ok(0),
                Some(libc::EFAULT) => Err(gone(op)),
                _ => Err(Error::os(op, "pipe", error)),
            }
        }
    }
}

/// Refuses a range of lent memory of which a page is missing now, and takes the others. What is looked at may be gone a moment
/// later.
pub(crate) fn look(op: &'static str, from: *const u8, len: usize) -> Result<()> {
    let (range, whole) = pages(from, len);
    loop {
        // SAFETY: brings pages in and changes nothing that a program sees; the kernel checks the range.
        match unsafe { rustix::mm::madvise(range, whole, Advice::LinuxPopulateRead) } {
            Ok(()) => return Ok(()),
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(Errno::FAULT | Errno::NOMEM) => return Err(gone(op)),
            // An older kernel, pages of a device, or pages that may not be read.
            Err(Errno::INVAL) => return touch(op, range.cast(), whole),
            Err(error) => return Err(Error::os(op, "madvise", error)),
        }
    }
}

/// Brings pages of lent memory in that are about to be written; [looks](look) at those that cannot be.
pub(crate) fn bring(op: &'static str, from: *const u8, len: usize) -> Result<()> {
    let (range, whole) = pages(from, len);
    loop {
        // SAFETY: brings pages in and changes nothing that a program sees; the kernel checks the range.
        match unsafe { rustix::mm::madvise(range, whole, Advice::LinuxPopulateWrite) } {
            Ok(()) => return Ok(()),
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(_) => return look(op, from, len),
        }
    }
}

/// The whole pages of that range.
fn pages(from: *const u8, len: usize) -> (*mut c_void, usize) {
    let page = rustix::param::page_size();
    let start = from.addr() & !(page - 1);
    (std::ptr::with_exposed_provenance_mut(start), (from.addr() + len).next_multiple_of(page) - start)
}

/// [`look`] by a read of one byte of each page.
fn touch(op: &'static str, start: *mut u8, len: usize) -> Result<()> {
    let mut byte = 0;
    for at in (0..len).step_by(rustix::param::page_size()) {
        // SAFETY: the near side is a byte of this function's.
        unsafe { read(op, &raw mut byte, start.wrapping_add(at), 1)? };
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

    use super::*;

    #[test]
    fn what_goes_through_the_pipe_arrives_and_a_missing_page_is_told_at_either_end() {
        let page = rustix::param::page_size();
        let len = 5 * PIPED;
        let (rights, null) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
        // SAFETY: a fresh mapping where the kernel likes it, which stays.
        let there =
            unsafe { mmap_anonymous(null, len + page, rights, MapFlags::PRIVATE) }.unwrap().cast::<u8>();
        // SAFETY: the last page of this test's own mapping becomes one that nobody may touch.
        unsafe {
            let flags = MapFlags::PRIVATE | MapFlags::FIXED;
            mmap_anonymous(there.wrapping_add(len).cast(), page, ProtFlags::empty(), flags).unwrap();
        }
        let source: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
        for start in [0, 1, 4095] {
            let mut back = vec![0; len];
            for what in [0, 1, len - start] {
                // SAFETY: the vectors have that many bytes, and so has the mapping from there on.
                unsafe {
                    through_pipe("write", there.wrapping_add(start), source.as_ptr(), what).unwrap();
                    through_pipe("read", back.as_mut_ptr(), there.wrapping_add(start), what).unwrap();
                }
                assert_eq!(back[..what], source[..what]);
            }
            for what in [1, page + 1, len - start] {
                let at = there.wrapping_add(len + 1 - what);
                // SAFETY: as above, and the kernel finds that the last byte is missing.
                let outcomes = unsafe {
                    let written = through_pipe("write", at, source.as_ptr(), what);
                    [written, through_pipe("read", back.as_mut_ptr(), at, what)]
                };
                assert_eq!(outcomes.map(|outcome| outcome.unwrap_err().kind()), [Kind::Stale; 2]);
            }
        }
    }
}
