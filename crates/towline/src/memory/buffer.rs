//! Shared handles to a storage, and checked parts of one.
#![allow(unsafe_code, reason = "forwards the storage contract; moves a buffer by its type")]

use std::any::{Any, TypeId};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Arc;

use super::{FileSlice, MemoryDescription, NixlDescriptor, Place, SegmentSlice, Storage, StorageKind};
use crate::{Error, Result, bytes};

/// A cheap shared handle to any storage.
///
/// ```
/// use towline::memory::{MemoryDescription, SystemStorage, create_buffer};
/// # fn main() -> towline::Result<()> {
/// let buffer = create_buffer(SystemStorage::new(64)?);
/// let other = buffer.clone();
/// assert_eq!(buffer.addr(), other.addr());
/// assert!(buffer.as_any().is::<SystemStorage>());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Buffer(Arc<dyn Storage>);

impl Buffer {
    /// Takes the storage into shared ownership. One that is a buffer already stays the same.
    #[inline]
    pub fn new<S: Storage>(storage: S) -> Buffer {
        if TypeId::of::<S>() == TypeId::of::<Buffer>() {
            let storage = ManuallyDrop::new(storage);
            // SAFETY: it is a `Buffer`, as was just checked, and moved out of a place that is not dropped.
            return unsafe { std::mem::transmute_copy::<ManuallyDrop<S>, Buffer>(&storage) };
        }
        Buffer(Arc::new(storage))
    }

    /// Shares a storage that is shared already.
    pub fn from_arc(storage: Arc<dyn Storage>) -> Buffer {
        Buffer(storage)
    }
}

/// Takes the storage into shared ownership.
pub fn create_buffer(storage: impl Storage) -> Buffer {
    Buffer::new(storage)
}

impl From<Arc<dyn Storage>> for Buffer {
    fn from(storage: Arc<dyn Storage>) -> Buffer {
        Buffer(storage)
    }
}

impl Deref for Buffer {
    type Target = dyn Storage;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Buffer").field(&self.0).finish()
    }
}

impl MemoryDescription for Buffer {
    fn addr(&self) -> usize {
        self.0.addr()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn storage_kind(&self) -> StorageKind {
        self.0.storage_kind()
    }

    fn as_any(&self) -> &dyn Any {
        self.0.as_any()
    }

    fn nixl_descriptor(&self) -> Option<NixlDescriptor> {
        self.0.nixl_descriptor()
    }
}

// SAFETY: every result is the inner storage's, which keeps the contract and lives at least as long; the handle
// gives out no `&mut` to it.
unsafe impl Storage for Buffer {
    fn place(&self) -> Place {
        self.0.place()
    }

    fn segment(&self) -> Option<SegmentSlice> {
        self.0.segment()
    }

    fn file(&self) -> Option<FileSlice> {
        self.0.file()
    }

    #[inline]
    fn on_gpu(&self, ordinal: u32) -> (usize, usize) {
        self.0.on_gpu(ordinal)
    }
}

/// A checked part of a buffer, which it keeps alive.
///
/// ```
/// use towline::memory::{MemoryDescription, OffsetBuffer, SystemStorage, create_buffer};
/// # fn main() -> towline::Result<()> {
/// let whole = create_buffer(SystemStorage::new(100)?);
/// let part = OffsetBuffer::new(whole.clone(), 60, 40)?;
/// assert_eq!(part.addr(), whole.addr() + 60);
/// assert!(OffsetBuffer::new(whole, 61, 40).is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct OffsetBuffer {
    base: Buffer,
    offset: usize,
    size: usize,
}

impl OffsetBuffer {
    /// The `size` bytes of `base` that start at `offset`.
    ///
    /// # Errors
    /// `Invalid` where there are none, or some are past the end.
    pub fn new(base: Buffer, offset: usize, size: usize) -> Result<OffsetBuffer> {
        if size == 0 {
            return Err(Error::invalid("view", "a view needs at least one byte"));
        }
        bytes::in_bounds("view", base.size(), offset, size)?;
        Ok(OffsetBuffer { base, offset, size })
    }

    /// The `size` bytes of `base` that start at that address.
    ///
    /// # Errors
    /// `Invalid` where there are none, or some are outside the base.
    pub fn from_inner_address(base: Buffer, address: usize, size: usize) -> Result<OffsetBuffer> {
        match address.checked_sub(base.addr()) {
            Some(offset) => OffsetBuffer::new(base, offset, size),
            None => Err(Error::invalid("view", format!("{address:#x} is before the start of the buffer"))),
        }
    }

    /// How far into the base the view starts.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// What it is a view of.
    pub fn base(&self) -> &Buffer {
        &self.base
    }
}

impl MemoryDescription for OffsetBuffer {
    fn addr(&self) -> usize {
        self.base.addr() + self.offset
    }

    fn size(&self) -> usize {
        self.size
    }

    fn storage_kind(&self) -> StorageKind {
        self.base.storage_kind()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn nixl_descriptor(&self) -> Option<NixlDescriptor> {
        Some(self.base.nixl_descriptor()?.part(self.offset, self.size))
    }
}

// SAFETY: `new` checked that the part lies inside the base, whose results never change, which keeps the contract
// and which the view keeps alive; the part of the segment moves on by the same offset.
unsafe impl Storage for OffsetBuffer {
    fn place(&self) -> Place {
        self.base.place()
    }

    fn segment(&self) -> Option<SegmentSlice> {
        let SegmentSlice { segment, offset } = self.base.segment()?;
        Some(SegmentSlice { segment, offset: offset + self.offset })
    }

    fn file(&self) -> Option<FileSlice> {
        Some(self.base.file()?.forward(self.offset))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;
    use crate::Kind;
    use crate::memory::{MemType, MemoryAccess, SharedStorage, SystemStorage};

    #[test]
    fn a_buffer_forwards_to_what_it_holds() {
        let storage = SharedStorage::new(100).unwrap();
        let (addr, id) = (storage.addr(), storage.segment().unwrap().segment.id());
        let buffer = create_buffer(storage);
        assert_eq!((buffer.addr(), buffer.size()), (addr, 100));
        assert_eq!(buffer.segment().unwrap().segment.id(), id);
        assert!(buffer.as_any().is::<SharedStorage>());
        assert!(buffer.storage_kind().is_shared());
        assert_eq!(buffer.place(), Place::Host);
        let again = create_buffer(buffer.clone());
        assert!(again.as_any().is::<SharedStorage>());
        assert_eq!(Buffer::from(Arc::new(buffer) as Arc<dyn Storage>).addr(), addr);
    }

    #[test]
    fn nested_views_add_their_offsets() {
        let base = create_buffer(SharedStorage::new(100).unwrap());
        let outer = OffsetBuffer::new(base.clone(), 10, 50).unwrap();
        let inner = OffsetBuffer::new(create_buffer(outer), 20, 30).unwrap();
        assert_eq!(inner.addr(), base.addr() + 30);
        assert_eq!(inner.segment().unwrap().offset, 30);
        inner.write_at(29, &[5]).unwrap();
        let mut byte = [0];
        base.read_at(59, &mut byte).unwrap();
        assert_eq!(byte, [5]);
        assert_eq!(inner.write_at(30, &[5]).unwrap_err().kind(), Kind::Invalid);
    }

    #[test]
    fn views_past_the_end_or_of_nothing_are_invalid() {
        let base = create_buffer(SystemStorage::new(100).unwrap());
        for (offset, size) in [(0, 101), (100, 1), (101, 1), (usize::MAX, 2), (0, 0), (100, 0)] {
            let error = OffsetBuffer::new(base.clone(), offset, size).unwrap_err();
            assert_eq!(error.kind(), Kind::Invalid, "{offset} {size}");
        }
        OffsetBuffer::new(base, 0, 100).unwrap();
    }

    #[test]
    fn a_view_can_be_named_by_its_address() {
        let base = create_buffer(SystemStorage::new(100).unwrap());
        let view = OffsetBuffer::from_inner_address(base.clone(), base.addr() + 7, 3).unwrap();
        assert_eq!((view.offset(), view.base().size()), (7, 100));
        let before = OffsetBuffer::from_inner_address(base.clone(), base.addr() - 1, 3);
        assert_eq!(before.unwrap_err().kind(), Kind::Invalid);
    }

    #[test]
    fn a_view_keeps_its_base_alive() {
        let view = {
            let base = create_buffer(SystemStorage::new(4096).unwrap());
            base.write_at(4095, &[3]).unwrap();
            OffsetBuffer::new(base, 4095, 1).unwrap()
        };
        let mut byte = [0];
        view.read_at(0, &mut byte).unwrap();
        assert_eq!(byte, [3]);
    }

    #[derive(Debug)]
    struct Registered(SystemStorage);

    impl MemoryDescription for Registered {
        fn addr(&self) -> usize {
            self.0.addr()
        }
        fn size(&self) -> usize {
            self.0.size()
        }
        fn storage_kind(&self) -> StorageKind {
            self.0.storage_kind()
        }
        fn as_any(&self) -> &dyn Any {
            self
        }
        fn nixl_descriptor(&self) -> Option<NixlDescriptor> {
            let (addr, size) = (self.addr() as u64, self.size());
            Some(NixlDescriptor { addr, size, mem_type: MemType::Dram, device_id: 0 })
        }
    }

    // SAFETY: forwards to a storage that it owns.
    unsafe impl Storage for Registered {}

    #[test]
    fn a_view_of_registered_memory_describes_its_own_part() {
        let base = create_buffer(Registered(SystemStorage::new(100).unwrap()));
        let view = OffsetBuffer::new(base.clone(), 30, 20).unwrap();
        let part = view.nixl_descriptor().unwrap();
        assert_eq!((part.addr, part.size), (base.addr() as u64 + 30, 20));
        let plain = create_buffer(SystemStorage::new(100).unwrap());
        assert!(OffsetBuffer::new(plain, 0, 1).unwrap().nixl_descriptor().is_none());
    }
}
