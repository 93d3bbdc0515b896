//! Registered memory and one-sided transfers between inference workers.

mod error;
pub mod layout;
pub mod memory;

pub use error::{Error, Kind, Result};
pub use memory::{
    Arena, ArenaAllocator, ArenaBuffer, Buffer, Dtype, ExternalStorage, HugePages, MemoryAccess,
    MemoryDescription, MemoryDescriptor, OffsetBuffer, OffsetView, Place, ReduceOp, SharedStorage, Storage,
    StorageKind, SystemStorage, create_buffer,
};
