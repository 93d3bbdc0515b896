//! Private host memory.
#![allow(unsafe_code, reason = "gives out slices of a mapping")]

use std::slice;

use super::map::{self, HugePages, Map};
use super::{Storage, StorageKind, describe};
use crate::{Error, Result};

/// Private, page-aligned, zeroed host memory.
///
/// Allocating touches no page: the kernel provides each one, zeroed, on its first use. Peers reach the bytes
/// through the kernel or a socket; where they should map them, use [`SharedStorage`](super::SharedStorage).
///
/// ```
/// use towline::memory::{HugePages, MemoryDescription, SystemStorage};
/// # fn main() -> towline::Result<()> {
/// let mut storage = SystemStorage::new(1 << 20)?;
/// storage.as_mut_slice_of::<f32>()?[3] = 1.5;
/// assert_eq!(storage.as_mut_slice()[12..16], 1.5f32.to_le_bytes());
///
/// let large = SystemStorage::options().huge_pages(HugePages::Never).allocate(8 << 20)?;
/// assert_eq!(large.size(), 8 << 20);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SystemStorage {
    map: Map,
    len: usize,
}

/// How a [`SystemStorage`] is allocated.
#[derive(Debug, Clone, Copy)]
pub struct SystemOptions {
    huge_pages: HugePages,
}

impl Default for SystemOptions {
    fn default() -> SystemOptions {
        // Costs nothing before the first touch, and every path that is not a plain copy gains from it (decision 0007).
        SystemOptions { huge_pages: HugePages::Try }
    }
}

impl SystemOptions {
    /// Chooses the page size; [`HugePages::Try`] unless said otherwise, which matters from one huge page on.
    #[must_use]
    pub fn huge_pages(mut self, huge_pages: HugePages) -> SystemOptions {
        self.huge_pages = huge_pages;
        self
    }

    /// Allocates `len` bytes.
    ///
    /// # Errors
    /// `Invalid` for length 0 or one past the address space; `Exhausted` where the system or the pool of huge
    /// pages has no room; `Unavailable` where reserved huge pages are required and the kernel has none.
    pub fn allocate(self, len: usize) -> Result<SystemStorage> {
        map::not_empty(len)?;
        Ok(SystemStorage { map: Map::anonymous(len, self.huge_pages)?, len })
    }
}

impl SystemStorage {
    /// Allocates `len` bytes; see [`SystemOptions::allocate`] for the errors.
    pub fn new(len: usize) -> Result<SystemStorage> {
        SystemStorage::options().allocate(len)
    }

    /// Starts from the default options.
    pub fn options() -> SystemOptions {
        SystemOptions::default()
    }

    /// The first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.map.ptr()
    }

    /// The bytes, exclusively.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `len` bytes from the start are mapped and initialised by the kernel. Exclusive access follows
        // from `&mut self`: all that registers a storage takes it by value or behind a shared handle and gives
        // out no `&mut` (`Storage`, promise 4), so nobody else can be touching the bytes.
        unsafe { slice::from_raw_parts_mut(self.map.ptr(), self.len) }
    }

    /// The bytes as elements, exclusively.
    ///
    /// # Errors
    /// `Invalid` where the length is not a whole number of elements, or the element has no size.
    pub fn as_mut_slice_of<T: bytemuck::Pod>(&mut self) -> Result<&mut [T]> {
        bytemuck::try_cast_slice_mut(self.as_mut_slice()).map_err(not_elements::<T>)
    }

    /// The bytes, while the caller vouches that nobody writes them.
    ///
    /// # Safety
    /// For as long as the slice lives nobody writes the bytes: no peer, no device, no
    /// [`MemoryAccess`](super::MemoryAccess) call and no transfer into them.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: mapped and initialised as above; that nobody writes meanwhile is the caller's promise.
        unsafe { slice::from_raw_parts(self.map.ptr(), self.len) }
    }

    /// The bytes as elements, while the caller vouches that nobody writes them.
    ///
    /// # Errors
    /// `Invalid` where the length is not a whole number of elements, or the element has no size.
    ///
    /// # Safety
    /// As for [`as_slice`](SystemStorage::as_slice).
    pub unsafe fn as_slice_of<T: bytemuck::Pod>(&self) -> Result<&[T]> {
        // SAFETY: the caller's promise is the same.
        bytemuck::try_cast_slice(unsafe { self.as_slice() }).map_err(not_elements::<T>)
    }
}

/// Why bytes are not a slice of `T`.
pub(super) fn not_elements<T>(error: bytemuck::PodCastError) -> Error {
    Error::invalid("slice", format!("the storage is not a slice of {}: {error}", std::any::type_name::<T>()))
}

describe!(SystemStorage, |this| this.map.ptr().addr(), this.len, StorageKind::System);

// SAFETY: the mapping is readable, writable and at least `len` long, stays at its address until drop wherever
// the value moves, and was exposed by `Map`; the fields never change; only `&mut self` and `unsafe` methods
// give out references.
unsafe impl Storage for SystemStorage {}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;
    use crate::Kind;
    use crate::memory::MemoryDescription;

    fn resident_pages(storage: &SystemStorage) -> usize {
        let pages = storage.size().div_ceil(map::page_size());
        let mut states = vec![0u8; pages];
        // SAFETY: the range is mapped, and the vector has one byte per page of it.
        let answer = unsafe { libc::mincore(storage.as_ptr().cast(), storage.size(), states.as_mut_ptr()) };
        assert_eq!(answer, 0);
        states.iter().filter(|state| **state & 1 == 1).count()
    }

    #[test]
    fn allocating_touches_no_page() {
        for huge in [HugePages::Never, HugePages::Try] {
            let mut storage = SystemStorage::options().huge_pages(huge).allocate(1 << 30).unwrap();
            assert_eq!(resident_pages(&storage), 0, "{huge:?}");
            storage.as_mut_slice()[5 << 20] = 1;
            assert!(resident_pages(&storage) >= 1);
            assert!(resident_pages(&storage) <= (4 << 20) / map::page_size() || map::page_size() > 4096);
        }
    }

    #[test]
    fn memory_is_zeroed_aligned_and_of_the_length_asked_for() {
        let mut storage = SystemStorage::new(5000).unwrap();
        assert_eq!(storage.size(), 5000);
        assert_eq!(storage.addr() % map::page_size(), 0);
        assert_eq!(storage.as_mut_slice(), vec![0; 5000]);
        assert!(storage.storage_kind().is_system());
        assert!(storage.segment().is_none());
    }

    #[test]
    fn the_address_survives_a_move() {
        let storage = SystemStorage::new(10).unwrap();
        let address = storage.addr();
        let moved = Box::new(storage);
        assert_eq!(moved.addr(), address);
    }

    #[test]
    fn no_bytes_and_too_many_bytes_are_errors() {
        assert_eq!(SystemStorage::new(0).unwrap_err().kind(), Kind::Invalid);
        assert_eq!(SystemStorage::new(usize::MAX).unwrap_err().kind(), Kind::Invalid);
        assert_eq!(SystemStorage::new(1 << 56).unwrap_err().kind(), Kind::Exhausted);
        let huge = SystemStorage::options().huge_pages(HugePages::Try);
        assert_eq!(huge.allocate(usize::MAX - 5000).unwrap_err().kind(), Kind::Invalid);
        assert_eq!(huge.allocate(1 << 56).unwrap_err().kind(), Kind::Exhausted);
    }

    #[test]
    fn more_reserved_huge_pages_than_the_pool_has_is_an_error_that_helps() {
        let error = SystemStorage::options().huge_pages(HugePages::Require).allocate(1 << 50).unwrap_err();
        assert!(matches!(error.kind(), Kind::Exhausted | Kind::Unavailable), "{error}");
        assert!(error.message().contains("HugePages::Try"), "{error}");
    }

    #[test]
    fn elements_must_divide_the_length() {
        let mut storage = SystemStorage::new(4098).unwrap();
        assert_eq!(storage.as_mut_slice_of::<u16>().unwrap().len(), 2049);
        assert_eq!(storage.as_mut_slice_of::<u32>().unwrap_err().kind(), Kind::Invalid);
        assert_eq!(storage.as_mut_slice_of::<()>().unwrap_err().kind(), Kind::Invalid);
        storage.as_mut_slice_of::<u16>().unwrap()[1] = 0x0201;
        // SAFETY: the storage is this test's alone.
        let (bytes, words) = unsafe { (storage.as_slice(), storage.as_slice_of::<u16>().unwrap()) };
        assert_eq!(bytes[2..4], words[1].to_ne_bytes());
    }
}
