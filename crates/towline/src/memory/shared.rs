//! Host memory that peers can map.
#![allow(unsafe_code, reason = "gives out slices of a mapping")]

use std::slice;
use std::sync::Arc;

use super::map::HugePages;
use super::system::not_elements;
use super::{Segment, SegmentSlice, Storage, StorageKind, describe};
use crate::Result;

/// Page-aligned, zeroed host memory in a sealed memory file.
///
/// Same-host peers map the file and copy straight from and into it. All its pages are taken when it is
/// allocated, unlike [`SystemStorage`](super::SystemStorage)'s: a page that turned out to be missing later
/// would end whichever process touched it.
///
/// ```
/// use towline::memory::{Mapping, MemoryAccess, SharedStorage, Storage};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let storage = SharedStorage::new(8192)?;
/// storage.write_at(0, b"seen by the peer")?;
///
/// let segment = storage.segment().ok_or("not shared")?.segment;
/// let peer = Mapping::map(segment.file().try_clone_to_owned()?, segment.len(), false)?;
/// assert_eq!(peer.len(), 8192);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SharedStorage {
    segment: Arc<Segment>,
    len: usize,
}

/// How a [`SharedStorage`] is allocated.
#[derive(Debug, Clone, Copy, Default)]
pub struct SharedOptions {
    huge_pages: HugePages,
}

impl SharedOptions {
    /// Chooses the page size; [`HugePages::Never`] unless said otherwise.
    #[must_use]
    pub fn huge_pages(mut self, huge_pages: HugePages) -> SharedOptions {
        self.huge_pages = huge_pages;
        self
    }

    /// Allocates `len` bytes and takes all their pages.
    ///
    /// # Errors
    /// `Invalid` for length 0 or one past the address space; `Exhausted` where the machine, the process's
    /// memory control group, its file descriptors or the pool of huge pages have no room; `Unavailable` where
    /// reserved huge pages are required and the kernel has none.
    pub fn allocate(self, len: usize) -> Result<SharedStorage> {
        Ok(SharedStorage { segment: Segment::create(len, self.huge_pages)?, len })
    }
}

impl SharedStorage {
    /// Allocates `len` bytes; see [`SharedOptions::allocate`] for the errors.
    pub fn new(len: usize) -> Result<SharedStorage> {
        SharedStorage::options().allocate(len)
    }

    /// Starts from the default options.
    pub fn options() -> SharedOptions {
        SharedOptions::default()
    }

    /// The first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.segment.ptr()
    }

    /// The bytes, exclusively, while the caller vouches for that.
    ///
    /// # Safety
    /// For as long as the slice lives nobody else touches the bytes. `&mut self` does not prove it: a process that
    /// holds the [`Segment`] or its file can reach them.
    pub unsafe fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `len` bytes from the start are mapped and initialised by the kernel; exclusive access is the
        // caller's promise.
        unsafe { slice::from_raw_parts_mut(self.segment.ptr(), self.len) }
    }

    /// The bytes as elements, exclusively, while the caller vouches for that.
    ///
    /// # Errors
    /// `Invalid` where the length is not a whole number of elements, or the element has no size.
    ///
    /// # Safety
    /// As for [`as_mut_slice`](SharedStorage::as_mut_slice).
    pub unsafe fn as_mut_slice_of<T: bytemuck::Pod>(&mut self) -> Result<&mut [T]> {
        // SAFETY: the caller's promise is the same.
        bytemuck::try_cast_slice_mut(unsafe { self.as_mut_slice() }).map_err(not_elements::<T>)
    }

    /// The bytes, while the caller vouches that nobody writes them.
    ///
    /// # Safety
    /// For as long as the slice lives nobody writes the bytes: no peer, no device, no
    /// [`MemoryAccess`](super::MemoryAccess) call and no transfer into them.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: mapped and initialised as above; that nobody writes meanwhile is the caller's promise.
        unsafe { slice::from_raw_parts(self.segment.ptr(), self.len) }
    }

    /// The bytes as elements, while the caller vouches that nobody writes them.
    ///
    /// # Errors
    /// `Invalid` where the length is not a whole number of elements, or the element has no size.
    ///
    /// # Safety
    /// As for [`as_slice`](SharedStorage::as_slice).
    pub unsafe fn as_slice_of<T: bytemuck::Pod>(&self) -> Result<&[T]> {
        // SAFETY: the caller's promise is the same.
        bytemuck::try_cast_slice(unsafe { self.as_slice() }).map_err(not_elements::<T>)
    }
}

describe!(SharedStorage, |this| this.segment.ptr().addr(), this.len, StorageKind::Shared);

// SAFETY: the segment's mapping is readable, writable, at least `len` long, exposed by `Map`, and stays at its
// address until the last handle to the segment goes; the fields never change; every method that gives out a
// reference is `unsafe`; the storage starts where the segment does.
unsafe impl Storage for SharedStorage {
    fn segment(&self) -> Option<SegmentSlice> {
        Some(SegmentSlice { segment: Arc::clone(&self.segment), offset: 0 })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use std::os::fd::OwnedFd;
    use std::process::Command;

    use rustix::fs::{MemfdFlags, SealFlags};
    use rustix::io::Errno;
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;
    use crate::Kind;
    use crate::memory::{Mapping, MemoryAccess};

    fn handed_over(storage: &SharedStorage) -> OwnedFd {
        storage.segment().unwrap().segment.file().try_clone_to_owned().unwrap()
    }

    fn raw_file(len: u64, seals: SealFlags) -> OwnedFd {
        let file = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, len).unwrap();
        rustix::fs::fcntl_add_seals(&file, seals).unwrap();
        file
    }

    #[test]
    fn a_segment_cannot_shrink_grow_or_be_sealed_further() {
        let storage = SharedStorage::new(10_000).unwrap();
        let segment = storage.segment().unwrap().segment;
        assert_eq!(rustix::fs::ftruncate(segment.file(), 0).unwrap_err(), Errno::PERM);
        assert_eq!(rustix::fs::ftruncate(segment.file(), 1 << 20).unwrap_err(), Errno::PERM);
        assert_eq!(
            rustix::fs::fcntl_add_seals(segment.file(), SealFlags::FUTURE_WRITE).unwrap_err(),
            Errno::PERM
        );
    }

    #[test]
    fn the_space_of_a_segment_is_reserved() {
        let storage = SharedStorage::new(9 << 20).unwrap();
        let stat = rustix::fs::fstat(handed_over(&storage)).unwrap();
        assert_eq!(stat.st_size, 9 << 20);
        assert!(stat.st_blocks * 512 >= 9 << 20, "{} blocks", stat.st_blocks);
    }

    #[test]
    fn segments_have_numbers_of_their_own_and_whole_pages() {
        let (one, two) = (SharedStorage::new(1).unwrap(), SharedStorage::new(1).unwrap());
        let (one, two) = (one.segment().unwrap().segment, two.segment().unwrap().segment);
        assert_ne!(one.id(), two.id());
        assert_eq!(one.len() % rustix::param::page_size(), 0);
        assert!(!one.is_empty());
    }

    #[test]
    fn a_peer_sees_what_the_owner_writes_and_the_other_way_round() {
        let storage = SharedStorage::new(10_000).unwrap();
        let peer = Mapping::map(handed_over(&storage), 10_000, true).unwrap();
        assert!(peer.is_writable() && !peer.is_empty());
        storage.write_at(9_999, &[7]).unwrap();
        // SAFETY: 10,000 bytes are mapped, and nothing else touches them.
        unsafe {
            assert_eq!(peer.ptr().add(9_999).read(), 7);
            peer.ptr().write(8);
        }
        let mut byte = [0];
        storage.read_at(0, &mut byte).unwrap();
        assert_eq!(byte, [8]);
    }

    #[test]
    fn a_mapping_outlives_the_owner() {
        let storage = SharedStorage::new(4096).unwrap();
        storage.write_at(0, &[42]).unwrap();
        let peer = Mapping::map(handed_over(&storage), 4096, false).unwrap();
        drop(storage);
        // SAFETY: the mapping holds the pages.
        assert_eq!(unsafe { peer.ptr().read() }, 42);
    }

    #[test]
    fn a_file_that_can_still_shrink_is_refused() {
        for seals in [SealFlags::empty(), SealFlags::GROW] {
            let error = Mapping::map(raw_file(4096, seals), 4096, true).unwrap_err();
            assert_eq!(error.kind(), Kind::Protocol, "{error}");
        }
    }

    #[test]
    fn a_file_that_is_shorter_than_announced_is_refused() {
        let error = Mapping::map(raw_file(4096, SealFlags::SHRINK), 4097, true).unwrap_err();
        assert_eq!(error.kind(), Kind::Protocol, "{error}");
        let error = Mapping::map(raw_file(4096, SealFlags::SHRINK), 0, true).unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid, "{error}");
    }

    #[test]
    fn what_is_no_memory_file_is_refused() {
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert_eq!(Mapping::map(reader, 4096, false).unwrap_err().kind(), Kind::Protocol);
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert_eq!(Mapping::map(file.into(), 4096, false).unwrap_err().kind(), Kind::Protocol);
    }

    #[test]
    fn a_file_sealed_against_writing_maps_for_reading_only() {
        let seals = SealFlags::SHRINK | SealFlags::FUTURE_WRITE;
        let error = Mapping::map(raw_file(4096, seals), 4096, true).unwrap_err();
        assert_eq!(error.kind(), Kind::PermissionDenied, "{error}");
        Mapping::map(raw_file(4096, seals), 4096, false).unwrap();
    }

    #[test]
    fn no_bytes_and_too_many_bytes_are_errors() {
        assert_eq!(SharedStorage::new(0).unwrap_err().kind(), Kind::Invalid);
        assert_eq!(SharedStorage::new(usize::MAX).unwrap_err().kind(), Kind::Invalid);
        let error = SharedStorage::new(1 << 50).unwrap_err();
        assert_eq!(error.kind(), Kind::Exhausted);
        assert!(error.message().contains("room"), "{error}");
    }

    #[test]
    fn more_reserved_huge_pages_than_the_pool_has_is_an_error_that_helps() {
        let error = SharedStorage::options().huge_pages(HugePages::Require).allocate(1 << 50).unwrap_err();
        assert!(matches!(error.kind(), Kind::Exhausted | Kind::Unavailable), "{error}");
        assert!(error.message().contains("HugePages::Try"), "{error}");
    }

    #[test]
    fn reserved_huge_pages_serve_both_sides_where_the_pool_has_one() {
        match SharedStorage::options().huge_pages(HugePages::Require).allocate(10_000) {
            Ok(storage) => {
                let peer = Mapping::map(handed_over(&storage), 10_000, true).unwrap();
                storage.write_at(9_999, &[7]).unwrap();
                // SAFETY: 10,000 bytes are mapped, and nothing else touches them.
                assert_eq!(unsafe { peer.ptr().add(9_999).read() }, 7);
            }
            Err(error) => assert!(matches!(error.kind(), Kind::Exhausted | Kind::Unavailable), "{error}"),
        }
    }

    #[test]
    fn trying_huge_pages_always_gives_memory() {
        let storage = SharedStorage::options().huge_pages(HugePages::Try).allocate(5 << 20).unwrap();
        storage.write_at((5 << 20) - 1, &[1]).unwrap();
    }

    #[test]
    fn huge_pages_start_zeroed_are_reserved_and_show_both_sides_the_same_bytes() {
        let len = (9 << 20) + 10_000;
        let storage = SharedStorage::options().huge_pages(HugePages::Try).allocate(len).unwrap();
        let stat = rustix::fs::fstat(handed_over(&storage)).unwrap();
        assert!(stat.st_blocks * 512 >= len as i64, "{} blocks", stat.st_blocks);
        let mut bytes = vec![1; len];
        storage.read_at(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
        let peer = Mapping::map(handed_over(&storage), len, true).unwrap();
        for at in [0, (2 << 20) - 1, 2 << 20, 5 << 20, len - 1] {
            storage.write_at(at, &[7]).unwrap();
            // SAFETY: `len` bytes are mapped, and nothing else touches them.
            assert_eq!(unsafe { peer.ptr().add(at).read() }, 7, "{at}");
        }
    }

    #[test]
    fn slices_see_the_bytes() {
        let mut storage = SharedStorage::new(4096).unwrap();
        // SAFETY: the storage is this test's alone.
        unsafe {
            storage.as_mut_slice()[0] = 1;
            storage.as_mut_slice_of::<u32>().unwrap()[1] = 5;
            assert_eq!(storage.as_slice()[0], 1);
            assert_eq!(storage.as_slice_of::<u32>().unwrap()[1], 5);
            assert_eq!(storage.as_slice_of::<[u8; 3]>().unwrap_err().kind(), Kind::Invalid);
        }
    }

    /// Limits belong to a process, so a test that lowers one runs alone in a child: this test binary again.
    fn alone_in_a_child(test: &str, body: fn()) {
        const MARK: &str = "TOWLINE_TEST_CHILD";
        if std::env::var_os(MARK).is_some() {
            return body();
        }
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("memory::shared::tests::{test}")])
            .env(MARK, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }

    fn with_limit(resource: Resource, limit: u64, body: impl FnOnce() -> crate::Error) -> crate::Error {
        let before = getrlimit(resource);
        setrlimit(resource, Rlimit { current: Some(limit), maximum: before.maximum }).unwrap();
        let error = body();
        setrlimit(resource, before).unwrap();
        error
    }

    #[test]
    fn without_a_free_descriptor_the_error_is_exhausted() {
        alone_in_a_child("without_a_free_descriptor_the_error_is_exhausted", || {
            let error = with_limit(Resource::Nofile, 0, || SharedStorage::new(4096).unwrap_err());
            assert_eq!(error.kind(), Kind::Exhausted, "{error}");
            SharedStorage::new(4096).unwrap();
        });
    }

    #[test]
    fn past_the_file_size_limit_the_error_is_exhausted_and_no_signal_comes() {
        alone_in_a_child("past_the_file_size_limit_the_error_is_exhausted_and_no_signal_comes", || {
            let error = with_limit(Resource::Fsize, 4096, || SharedStorage::new(1 << 20).unwrap_err());
            assert_eq!(error.kind(), Kind::Exhausted, "{error}");
        });
    }
}
