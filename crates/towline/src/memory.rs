//! Storages: owned or borrowed bytes that can be registered and reached by other workers.
//!
//! | storage | bytes | who can reach them without the owner's help |
//! | --- | --- | --- |
//! | [`SystemStorage`] | private anonymous pages | peers of the same user, through the kernel |
//! | [`SharedStorage`] | a sealed memory file ([`Segment`]) | peers that were handed the file and map it ([`Mapping`]) |
//! | [`PinnedStorage`] | page-locked pages that GPUs reach, in a memory file unless asked otherwise | as for shared memory |
//! | [`DeviceStorage`] | memory of a GPU | peers on the same machine that open it with CUDA |
//! | [`DiskStorage`] | a file | nobody: the owner reads and writes it for them |
//! | [`ExternalStorage`] | memory that something else owns | depends on the memory |
//!
//! [`Buffer`] is a shared handle to any of them, [`OffsetBuffer`] a checked part of one, and [`Arena`] hands
//! out pages of one.
//!
//! Bytes that a peer may touch are never a Rust reference. [`MemoryAccess`] copies them in and out through
//! raw pointers; slices exist only where exclusive access is certain ([`SystemStorage::as_mut_slice`]) or
//! where the caller vouches for it (`unsafe`).
//!
//! ```
//! use towline::memory::{MemoryAccess, MemoryDescription, SharedStorage};
//! # fn main() -> towline::Result<()> {
//! let storage = SharedStorage::new(1 << 16)?;
//! storage.write_at(100, b"keys and values")?;
//! let mut back = [0; 15];
//! storage.read_at(100, &mut back)?;
//! assert_eq!(&back, b"keys and values");
//! assert_eq!(storage.size(), 1 << 16);
//! # Ok(())
//! # }
//! ```

mod access;
mod arena;
mod buffer;
mod description;
mod device;
mod disk;
mod external;
mod file;
pub(crate) mod lent;
mod limit;
mod map;
mod nixl;
mod pinned;
mod pinning;
pub(crate) mod reduce;
pub(crate) mod ring;
mod segment;
mod shared;
pub(crate) mod sum;
mod system;

pub use access::MemoryAccess;
pub use arena::{Arena, ArenaBuffer};
pub use buffer::{Buffer, OffsetBuffer, create_buffer};
pub(crate) use description::describe;
pub use description::{MemoryDescription, Storage, StorageKind};
pub use device::{DeviceMemory, DeviceOptions, DeviceStorage};
pub use disk::{DirectIo, DiskOptions, DiskStorage};
pub use external::ExternalStorage;
pub use file::FileSlice;
#[cfg(test)]
pub(crate) use file::stalled::Stalled;
pub(crate) use file::{ALIGNMENT as FILE_ALIGNMENT, shorter};
pub use map::HugePages;
pub use nixl::{MemType, NixlDescriptor};
pub use pinned::{PinnedOptions, PinnedStorage};
pub(crate) use segment::Holder;
pub use segment::{Mapping, Segment, SegmentSlice};
pub use shared::{SharedOptions, SharedStorage};
pub use system::{SystemOptions, SystemStorage};
pub use towline_proto::{Dtype, Place, ReduceOp};

pub use Arena as ArenaAllocator;
pub use MemoryDescription as MemoryDescriptor;
pub use OffsetBuffer as OffsetView;
