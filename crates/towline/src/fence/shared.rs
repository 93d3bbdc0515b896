//! Sealed memory files and their mappings.

#![allow(unsafe_code, reason = "maps files that other processes map as well, and lends words inside them")]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::{Error, Result};

/// A type that may be lent from shared memory.
///
/// # Safety
/// Any bytes are a valid value, and every byte that another process may change lies inside an atomic or an
/// `UnsafeCell`.
pub(crate) unsafe trait Lendable: Sync {}

// SAFETY: an atomic integer accepts any bytes and is made to be changed behind a shared reference.
unsafe impl Lendable for AtomicU32 {}
// SAFETY: as above.
unsafe impl Lendable for AtomicU64 {}

/// A mapping of shared memory; unmapped on drop.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is only reached through `Lendable` types.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of a file whose size cannot shrink below that.
    fn of_file(fd: BorrowedFd<'_>, len: usize, prot: ProtFlags, op: &'static str) -> Result<Mapping> {
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing of ours.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0) };
        Mapping::new(base, len, op)
    }

    fn new(base: rustix::io::Result<*mut std::ffi::c_void>, len: usize, op: &'static str) -> Result<Mapping> {
        let base = base.map_err(|error| Error::os(op, "mmap", error))?;
        match NonNull::new(base.cast()) {
            Some(base) => Ok(Mapping { base, len }),
            None => Err(Error::new(crate::Kind::Internal, op, "mmap gave a null address")),
        }
    }

    /// Lends `count` values that start at that offset; none when they do not lie inside, aligned.
    #[inline]
    pub(crate) fn lend<T: Lendable>(&self, offset: usize, count: usize) -> &[T] {
        let end = count.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_add(offset));
        // A mapping starts on a page, so the offset alone decides about alignment.
        if end.is_none_or(|end| end > self.len) || !offset.is_multiple_of(align_of::<T>()) {
            return &[];
        }
        // SAFETY: the range lies inside the mapping and is aligned (checked above); the mapping lives as long
        // as `self`, and its file cannot shrink (sealed: checked or set before mapping); `Lendable` allows
        // any bytes and changes by others.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset).cast(), count) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by mmap with this length, and all that was lent borrowed from `self`.
        let result = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(result.is_ok(), "munmap of our own mapping");
    }
}

/// Makes a memory file of that size and maps it for reading and writing. Sparse: pages come when touched.
pub(crate) fn create(name: &str, len: usize, op: &'static str) -> Result<(OwnedFd, Mapping)> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Kernels before 6.3 do not know the flag; a later one may insist on it.
        Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags),
        made => made,
    }
    .map_err(|error| Error::os(op, "memfd_create", error))?;
    rustix::fs::ftruncate(&fd, len as u64).map_err(|error| Error::os(op, "ftruncate", error))?;
    let mapping = Mapping::of_file(fd.as_fd(), len, ProtFlags::READ | ProtFlags::WRITE, op)?;
    Ok((fd, mapping))
}

/// Fixes the size for good; both sides may write.
pub(crate) fn seal_size(fd: BorrowedFd<'_>, op: &'static str) -> Result<()> {
    rustix::fs::fcntl_add_seals(fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(|error| Error::os(op, "F_ADD_SEALS", error))
}

/// Fixes the size and leaves our present mapping the only writable one; gives the descriptor for readers.
pub(crate) fn seal_for_readers(fd: OwnedFd, op: &'static str) -> Result<OwnedFd> {
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL | SealFlags::FUTURE_WRITE;
    match rustix::fs::fcntl_add_seals(&fd, seals) {
        Ok(()) => Ok(fd),
        // Kernels before 5.1 lack F_SEAL_FUTURE_WRITE.
        Err(Errno::INVAL) => {
            seal_size(fd.as_fd(), op)?;
            reopen_read_only(&fd, op)
        }
        Err(error) => Err(Error::os(op, "F_ADD_SEALS", error)),
    }
}

/// Opens the same file again, so that the descriptor itself forbids a writable mapping.
pub(crate) fn reopen_read_only(fd: &OwnedFd, op: &'static str) -> Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|error| Error::os(op, "open of /proc/self/fd", error))
}

/// What `fstatfs` says of a memory file of huge pages: those can be missing when they are touched.
const HUGETLBFS: u64 = 0x9584_58f6;

/// Maps a file that a peer sent: refused unless it is a memory file of ordinary pages that is large enough and cannot shrink.
pub(crate) fn map_received(fd: &OwnedFd, len: usize, writable: bool, op: &'static str) -> Result<Mapping> {
    let seals = rustix::fs::fcntl_get_seals(fd)
        .map_err(|error| Error::protocol(op, "the descriptor is not a memory file").caused_by(error))?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(Error::protocol(op, "the memory file is not sealed against shrinking"));
    }
    let system = rustix::fs::fstatfs(fd).map_err(|error| Error::os(op, "fstatfs", error))?;
    if system.f_type as u64 == HUGETLBFS {
        return Err(Error::protocol(op, "the memory file has huge pages, of which there may be too few"));
    }
    let size = rustix::fs::fstat(fd).map_err(|error| Error::os(op, "fstat", error))?.st_size;
    if u64::try_from(size).unwrap_or(0) < len as u64 {
        return Err(Error::protocol(op, format!("the memory file has {size} bytes, {len} are needed")));
    }
    let prot = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
    Mapping::of_file(fd.as_fd(), len, prot, op)
}
