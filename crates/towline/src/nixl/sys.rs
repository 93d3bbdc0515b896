//! The names of `nixl-sys`: `use nixl_sys::…` becomes `use towline::nixl::sys::…`.
//!
//! `dynamo_memory` has a *struct* [`NixlDescriptor`](super::NixlDescriptor) and `nixl-sys` a *trait* of that name, so one module
//! cannot hold both: the struct is in [`towline::nixl`](super), the trait is here. Lists and registrations take whatever has
//! the trait, as the struct does.
//!
//! ```
//! use towline::nixl::sys::{MemType, MemoryRegion, NixlDescriptor, XferDescList};
//!
//! #[derive(Debug)]
//! struct Block { addr: usize, len: usize }
//!
//! impl MemoryRegion for Block {
//!     unsafe fn as_ptr(&self) -> *const u8 {
//!         std::ptr::without_provenance(self.addr)
//!     }
//!     fn size(&self) -> usize {
//!         self.len
//!     }
//! }
//!
//! impl NixlDescriptor for Block {
//!     fn mem_type(&self) -> MemType {
//!         MemType::Dram
//!     }
//!     fn device_id(&self) -> u64 {
//!         0
//!     }
//! }
//!
//! let mut list = XferDescList::new(MemType::Dram)?;
//! list.add_storage_desc(&Block { addr: 0x1000, len: 64 })?;
//! assert_eq!(list[0].addr, 0x1000);
//! # Ok::<(), towline::Error>(())
//! ```
#![allow(unsafe_code, reason = "has a method that NIXL's users know as unsafe")]

use std::fmt;

pub use super::agent::NixlAgent as Agent;
pub use super::config::{AgentConfig, ThreadSync};
pub use super::lent::RegistrationHandle;
pub use super::list::{RegDescList, XferDescList, XferDescriptor};
pub use super::transfer::{
    Backend, NotificationMap, OptArgs, Params, XferDlistHandle, XferOp, XferRequest, XferStatus,
    XferTelemetry,
};

pub use super::is_stub;
pub use crate::Error as NixlError;
pub use crate::memory::MemType;

/// Memory by where it starts and how long it is.
pub trait MemoryRegion: fmt::Debug + Send + Sync {
    /// Where it starts.
    ///
    /// # Safety
    /// The pointer is good for as long as the memory is; who follows it sees to that.
    unsafe fn as_ptr(&self) -> *const u8;

    /// How many bytes it has.
    fn size(&self) -> usize;
}

/// Memory as NIXL names it: what lists and registrations take.
pub trait NixlDescriptor: MemoryRegion {
    /// The kind of memory.
    fn mem_type(&self) -> MemType;

    /// The GPU's ordinal, the file descriptor, or 0 for host memory.
    fn device_id(&self) -> u64;
}

impl MemoryRegion for super::NixlDescriptor {
    unsafe fn as_ptr(&self) -> *const u8 {
        std::ptr::with_exposed_provenance(self.addr as usize)
    }

    fn size(&self) -> usize {
        self.size
    }
}

impl NixlDescriptor for super::NixlDescriptor {
    fn mem_type(&self) -> MemType {
        self.mem_type
    }

    fn device_id(&self) -> u64 {
        self.device_id
    }
}
