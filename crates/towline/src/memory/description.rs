//! What every storage says about itself, and the contract under which it can be registered.
#![allow(unsafe_code, reason = "defines the unsafe trait that registration trusts")]

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{FileSlice, NixlDescriptor, Place, SegmentSlice};

/// Describes a span of memory: where it is, how long it is, and of which kind.
///
/// Implementing it grants nothing; a type becomes registrable through [`Storage`].
pub trait MemoryDescription: Send + Sync + fmt::Debug {
    /// The address of the first byte.
    fn addr(&self) -> usize;

    /// The number of bytes.
    fn size(&self) -> usize;

    /// What the bytes are made of.
    fn storage_kind(&self) -> StorageKind;

    /// The value itself, for downcasts; shared handles answer with what they hold.
    fn as_any(&self) -> &dyn Any;

    /// The NIXL registration of these bytes; `None` unless they are registered with NIXL.
    fn nixl_descriptor(&self) -> Option<NixlDescriptor> {
        None
    }
}

/// Describes a storage of this crate's: its address, its length and its kind.
macro_rules! describe {
    ($storage:ty, |$this:ident| $addr:expr, $size:expr, $kind:expr) => {
        #[allow(unused_variables, reason = "a result need not depend on the value")]
        impl $crate::memory::MemoryDescription for $storage {
            fn addr(&self) -> usize {
                let $this = self;
                $addr
            }

            fn size(&self) -> usize {
                let $this = self;
                $size
            }

            fn storage_kind(&self) -> $crate::memory::StorageKind {
                let $this = self;
                $kind
            }

            fn as_any(&self) -> &dyn std::any::Any {
                self
            }
        }
    };
}

pub(crate) use describe;

/// What a storage is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum StorageKind {
    /// Private host memory.
    System,
    /// Host memory in a sealed memory file that peers can map.
    Shared,
    /// Page-locked host memory that a GPU reaches directly.
    Pinned,
    /// Memory of the GPU with that ordinal.
    Device(u32),
    /// A file, by its descriptor in this process.
    Disk(u64),
    /// Memory that something else owns.
    External,
}

impl StorageKind {
    /// Whether it is private host memory.
    pub fn is_system(self) -> bool {
        self == StorageKind::System
    }

    /// Whether it is a sealed memory file.
    pub fn is_shared(self) -> bool {
        self == StorageKind::Shared
    }

    /// Whether it is page-locked host memory.
    pub fn is_pinned(self) -> bool {
        self == StorageKind::Pinned
    }

    /// Whether it is a file.
    pub fn is_disk(self) -> bool {
        matches!(self, StorageKind::Disk(_))
    }

    /// Whether it is GPU memory.
    pub fn is_cuda(self) -> bool {
        self.cuda_device_index().is_some()
    }

    /// The ordinal of the GPU that holds it.
    pub fn cuda_device_index(self) -> Option<u32> {
        match self {
            StorageKind::Device(index) => Some(index),
            _ => None,
        }
    }
}

impl fmt::Display for StorageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StorageKind::System => f.write_str("system"),
            StorageKind::Shared => f.write_str("shared"),
            StorageKind::Pinned => f.write_str("pinned"),
            StorageKind::Device(index) => write!(f, "device:{index}"),
            StorageKind::Disk(file) => write!(f, "disk:{file}"),
            StorageKind::External => f.write_str("external"),
        }
    }
}

/// Memory that can be registered, and that other processes then read and write.
///
/// # Safety
/// Registration hands the results of this trait to copy engines and to other processes, which trust them
/// without a further check. The implementer promises, for as long as the value lives:
///
/// 1. **One allocation.** `addr()..addr() + size()` lies in one valid allocation at `place()`. It does not
///    wrap around, `size()` is at most `isize::MAX`, and on the host its provenance is exposed
///    ([`pointer::expose_provenance`]) or comes from outside Rust. ([`Place::Disk`] has no addresses:
///    there `addr()` is an offset into the file, 0 for a whole one.)
/// 2. **It stays.** The allocation stays mapped at that address, readable and writable, wherever the value
///    is moved: the bytes are not stored inline.
/// 3. **The same answers every time.** `addr`, `size`, `storage_kind`, `place`, `segment` and `file` never change.
/// 4. **No references through `&self`.** No safe method that takes `&self` (nor any shared handle to the
///    value) gives out a Rust reference to the bytes. One that takes `&mut self` may: nothing that registers
///    a storage gives out `&mut` to it.
/// 5. **Anybody may touch the bytes.** While the value is registered, other processes and devices may read
///    and write the bytes at any moment, in any order and torn at any byte; the type does not rely on their
///    contents, and any value of any byte is fine.
/// 6. **The segment is the same memory.** If `segment()` answers, the `size()` bytes from its `offset` on
///    are the very bytes at `addr()`, and they lie inside the segment.
///
/// [`pointer::expose_provenance`]: https://doc.rust-lang.org/std/primitive.pointer.html#method.expose_provenance
pub unsafe trait Storage: MemoryDescription + 'static {
    /// Where the bytes live.
    fn place(&self) -> Place {
        Place::Host
    }

    /// The part of a memory file that holds the bytes, where peers can map them.
    fn segment(&self) -> Option<SegmentSlice> {
        None
    }

    /// The part of a file that holds the bytes, at [`Place::Disk`].
    fn file(&self) -> Option<FileSlice> {
        None
    }

    /// Address and size, where the bytes are on that GPU; otherwise a size of 0. One call where it is not known which storage it
    /// is, with a result in registers. Not for implementers to change.
    #[doc(hidden)]
    fn on_gpu(&self, ordinal: u32) -> (usize, usize) {
        if self.place() == Place::Cuda(ordinal) { (self.addr(), self.size()) } else { (0, 0) }
    }
}

impl<S: MemoryDescription + ?Sized> MemoryDescription for Arc<S> {
    fn addr(&self) -> usize {
        (**self).addr()
    }

    fn size(&self) -> usize {
        (**self).size()
    }

    fn storage_kind(&self) -> StorageKind {
        (**self).storage_kind()
    }

    fn as_any(&self) -> &dyn Any {
        (**self).as_any()
    }

    fn nixl_descriptor(&self) -> Option<NixlDescriptor> {
        (**self).nixl_descriptor()
    }
}

// SAFETY: every result is the inner storage's, which keeps the contract and lives at least as long; an `Arc`
// that shares gives out no `&mut`.
unsafe impl<S: Storage + ?Sized> Storage for Arc<S> {
    fn place(&self) -> Place {
        (**self).place()
    }

    fn segment(&self) -> Option<SegmentSlice> {
        (**self).segment()
    }

    fn file(&self) -> Option<FileSlice> {
        (**self).file()
    }

    fn on_gpu(&self, ordinal: u32) -> (usize, usize) {
        (**self).on_gpu(ordinal)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;

    #[test]
    fn kinds_answer_about_themselves() {
        assert!(StorageKind::System.is_system());
        assert!(StorageKind::Shared.is_shared());
        assert!(StorageKind::Pinned.is_pinned());
        assert!(StorageKind::Disk(3).is_disk());
        assert!(StorageKind::Device(2).is_cuda());
        assert_eq!(StorageKind::Device(2).cuda_device_index(), Some(2));
        assert_eq!(StorageKind::External.cuda_device_index(), None);
        assert_eq!(StorageKind::Device(2).to_string(), "device:2");
    }

    #[test]
    fn kinds_survive_serialisation() {
        for kind in [StorageKind::System, StorageKind::Device(1), StorageKind::Disk(9)] {
            let text = serde_json::to_string(&kind).unwrap();
            assert_eq!(serde_json::from_str::<StorageKind>(&text).unwrap(), kind);
        }
    }
}
