//! The copy of the CPU paths, and safe access to the bytes of host storages.
#![allow(unsafe_code, reason = "copies bytes through raw pointers")]

use std::ffi::{c_int, c_void};
use std::hint::black_box;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::{Place, Storage};
use crate::cuda::Gpu;
use crate::{Error, Kind, Result};

/// Copies `len` bytes; the ranges may overlap.
///
/// Somebody else may be writing the source or the destination meanwhile: then which bytes arrive is
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

/// The CRC32C of `len` bytes. Somebody else may be writing them meanwhile, as for [`copy`].
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

/// A file is filled in portions of this size.
const FILL_AT_ONCE: usize = 1 << 20;

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

/// Copies bytes into and out of any storage, with bounds checks; those of a GPU go through its driver.
///
/// Peers may touch the same bytes at the same time; a copy is then a mixture, byte by byte. Nothing here makes
/// a reference to them.
pub trait MemoryAccess: Storage {
    /// Copies bytes out, from `offset` on.
    ///
    /// # Errors
    /// `Invalid` past the end; what the file or the driver of the GPU says, where the bytes are there.
    fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        if let Some(file) = self.file() {
            in_bounds("read_at", self.size(), offset, into.len())?;
            // SAFETY: `into` is an exclusive slice.
            return unsafe { file.read("read_at", offset as u64, into.as_mut_ptr(), into.len()) };
        }
        if let Some((gpu, from)) = device_address(self, "read_at", offset, into.len())? {
            // SAFETY: the range was checked, and is valid while `self` lives (`Storage`); `into` is an exclusive slice.
            return unsafe { gpu.read("read_at", from, into.as_mut_ptr(), into.len()) };
        }
        let from = host_pointer(self, "read_at", offset, into.len())?;
        // SAFETY: `host_pointer` checked the range, which is valid while `self` lives (`Storage`, promises 1 and
        // 2); `into` is an exclusive slice.
        unsafe { copy(into.as_mut_ptr(), from, into.len()) };
        Ok(())
    }

    /// Copies bytes in, from `offset` on.
    ///
    /// # Errors
    /// `Invalid` past the end; what the file or the driver of the GPU says, where the bytes are there.
    fn write_at(&self, offset: usize, from: &[u8]) -> Result<()> {
        if let Some(file) = self.file() {
            in_bounds("write_at", self.size(), offset, from.len())?;
            // SAFETY: `from` is a slice.
            return unsafe { file.write("write_at", offset as u64, from.as_ptr(), from.len()) };
        }
        if let Some((gpu, into)) = device_address(self, "write_at", offset, from.len())? {
            // SAFETY: the range was checked, and is valid while `self` lives (`Storage`); `from` is a slice.
            return unsafe { gpu.write("write_at", into, from.as_ptr(), from.len()) };
        }
        let into = host_pointer(self, "write_at", offset, from.len())?;
        // SAFETY: as in `read_at`; that no Rust reference to the destination exists is promise 4 of `Storage`.
        unsafe { copy_to_publish(into, from.as_ptr(), from.len()) };
        Ok(())
    }

    /// Sets `len` bytes from `offset` on to `value`.
    ///
    /// # Errors
    /// `Invalid` past the end; what the file or the driver of the GPU says, where the bytes are there.
    fn memset(&self, value: u8, offset: usize, len: usize) -> Result<()> {
        if self.file().is_some() {
            in_bounds("memset", self.size(), offset, len)?;
            let some = vec![value; len.min(FILL_AT_ONCE)];
            return (0..len)
                .step_by(FILL_AT_ONCE)
                .try_for_each(|start| self.write_at(offset + start, &some[..FILL_AT_ONCE.min(len - start)]));
        }
        if let Some((gpu, into)) = device_address(self, "memset", offset, len)? {
            // SAFETY: the range was checked, and is valid while `self` lives (`Storage`).
            return unsafe { gpu.fill("memset", into, value, len) };
        }
        let into = host_pointer(self, "memset", offset, len)?;
        // SAFETY: as in `write_at`.
        unsafe { fill(into, value, len) };
        Ok(())
    }
}

impl<S: Storage + ?Sized> MemoryAccess for S {}

/// The GPU and the address there, for a storage that lies on one.
fn device_address<S: Storage + ?Sized>(
    storage: &S,
    op: &'static str,
    offset: usize,
    len: usize,
) -> Result<Option<(Arc<Gpu>, u64)>> {
    let Place::Cuda(ordinal) = storage.place() else { return Ok(None) };
    in_bounds(op, storage.size(), offset, len)?;
    let gpu = Gpu::open(ordinal).map_err(|error| error.during(op))?;
    Ok(Some((gpu, (storage.addr() + offset) as u64)))
}

fn host_pointer<S: Storage + ?Sized>(
    storage: &S,
    op: &'static str,
    offset: usize,
    len: usize,
) -> Result<*mut u8> {
    let place = storage.place();
    if place != Place::Host {
        return Err(Error::new(Kind::Unsupported, op, format!("the CPU cannot reach bytes on {place}")));
    }
    in_bounds(op, storage.size(), offset, len)?;
    Ok(ptr::with_exposed_provenance_mut(storage.addr() + offset))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use proptest::prelude::*;

    use super::*;
    use crate::memory::{MemoryDescription, SharedStorage, SystemStorage, create_buffer};

    #[test]
    fn access_past_the_end_is_invalid_and_writes_nothing() {
        let storage = SystemStorage::new(10).unwrap();
        for offset in [8, 11, usize::MAX] {
            assert_eq!(storage.write_at(offset, &[1, 2, 3]).unwrap_err().kind(), Kind::Invalid);
            assert_eq!(storage.read_at(offset, &mut [0; 3]).unwrap_err().kind(), Kind::Invalid);
            assert_eq!(storage.memset(1, offset, 3).unwrap_err().kind(), Kind::Invalid);
        }
        let mut all = [9; 10];
        storage.read_at(0, &mut all).unwrap();
        assert_eq!(all, [0; 10]);
        storage.read_at(10, &mut []).unwrap();
    }

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

    #[test]
    fn access_works_through_shared_handles_and_trait_objects() {
        let buffer = create_buffer(SharedStorage::new(10).unwrap());
        buffer.write_at(3, &[4]).unwrap();
        let storage: &dyn Storage = &*buffer;
        let mut byte = [0];
        storage.read_at(3, &mut byte).unwrap();
        assert_eq!(byte, [4]);
    }

    #[test]
    fn overlapping_ranges_copy_as_if_through_a_third_place() {
        let storage = SystemStorage::new(8).unwrap();
        storage.write_at(0, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
        // SAFETY: both ranges lie inside the storage.
        unsafe { copy(storage.as_ptr().add(2), storage.as_ptr(), 6) };
        let mut all = [0; 8];
        storage.read_at(0, &mut all).unwrap();
        assert_eq!(all, [1, 2, 1, 2, 3, 4, 5, 6]);
    }

    #[derive(Debug, Clone)]
    enum Step {
        Write(usize, Vec<u8>),
        Fill(u8, usize, usize),
        Read(usize, usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..300usize, prop::collection::vec(any::<u8>(), 0..120))
                .prop_map(|(at, data)| Step::Write(at, data)),
            (any::<u8>(), 0..300usize, 0..120usize).prop_map(|(value, at, len)| Step::Fill(value, at, len)),
            (0..300usize, 0..120usize).prop_map(|(at, len)| Step::Read(at, len)),
        ]
    }

    proptest! {
        #[test]
        fn a_storage_behaves_like_a_vector(steps in prop::collection::vec(step(), 0..40)) {
            let storage = SystemStorage::new(256).unwrap();
            let mut model = vec![0u8; storage.size()];
            for step in steps {
                match step {
                    Step::Write(at, data) => {
                        let expected = model.get_mut(at..at + data.len()).map(|part| part.copy_from_slice(&data));
                        prop_assert_eq!(storage.write_at(at, &data).is_ok(), expected.is_some());
                    }
                    Step::Fill(value, at, len) => {
                        let expected = model.get_mut(at..at + len).map(|part| part.fill(value));
                        prop_assert_eq!(storage.memset(value, at, len).is_ok(), expected.is_some());
                    }
                    Step::Read(at, len) => {
                        let mut data = vec![0; len];
                        let read = storage.read_at(at, &mut data).ok().map(|()| &data[..]);
                        prop_assert_eq!(read, model.get(at..at + len));
                    }
                }
            }
        }
    }
}
