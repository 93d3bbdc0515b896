//! Lists of descriptors: what is registered, what is moved, and what was prepared once to be moved often.
#![allow(unsafe_code, reason = "foreign calls")]

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;

use super::agent::AgentCore;
use super::api::{self, RawPrepared, RawRegList, RawXferList};
use super::{Loaded, Nixl};
use crate::Result;

/// The kinds of memory that NIXL knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Host memory.
    Dram,
    /// Memory of an accelerator; the device is its ordinal.
    Vram,
    /// A block device.
    Block,
    /// An object store.
    Object,
    /// A file; the device is its descriptor and the address an offset.
    File,
    /// Something else.
    Unknown,
}

impl MemoryKind {
    const ALL: [MemoryKind; 6] = [
        MemoryKind::Dram,
        MemoryKind::Vram,
        MemoryKind::Block,
        MemoryKind::Object,
        MemoryKind::File,
        MemoryKind::Unknown,
    ];

    pub(crate) fn code(self) -> c_int {
        self as c_int
    }

    pub(crate) fn from_code(code: c_int) -> MemoryKind {
        let index = usize::try_from(code).unwrap_or(usize::MAX);
        MemoryKind::ALL.get(index).copied().unwrap_or(MemoryKind::Unknown)
    }
}

/// A range of memory, or of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Descriptor {
    /// Where it starts: an address, or an offset in a file.
    pub address: u64,
    /// How many bytes it has.
    pub length: u64,
    /// The device: 0 for host memory, the ordinal of an accelerator, the descriptor of a file.
    pub device: u64,
}

/// Ranges to register, or to describe to a peer. Making one touches no memory.
pub struct RegistrationList {
    loaded: Arc<Loaded>,
    raw: *mut RawRegList,
}

// SAFETY: NIXL's lists are plain data without a thread of their own; they are only read through `&`.
unsafe impl Send for RegistrationList {}
// SAFETY: as above.
unsafe impl Sync for RegistrationList {}

impl RegistrationList {
    /// A list of ranges of one kind.
    pub fn new(
        nixl: &Nixl,
        kind: MemoryKind,
        ranges: impl IntoIterator<Item = Descriptor>,
    ) -> Result<RegistrationList> {
        let mut list = RegistrationList { loaded: Arc::clone(&nixl.0), raw: ptr::null_mut() };
        let api = &nixl.0.api;
        // SAFETY: the pointer is to a local variable.
        let code = unsafe { (api.create_reg_list)(kind.code(), &mut list.raw) };
        api::check("nixl_capi_create_reg_dlist", code)?;
        api::made("nixl_capi_create_reg_dlist", list.raw)?;
        for range in ranges {
            let (address, length) = (range.address as usize, range.length as usize);
            // SAFETY: the list was made above; the numbers are stored, and no memory is touched.
            let code = unsafe { (api.reg_list_add)(list.raw, address, length, range.device, ptr::null(), 0) };
            api::check("nixl_capi_reg_dlist_add_desc", code)?;
        }
        Ok(list)
    }

    pub(crate) fn raw(&self) -> *mut RawRegList {
        self.raw
    }
}

impl Drop for RegistrationList {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: made by `new`, and nobody else has it.
            unsafe { (self.loaded.api.destroy_reg_list)(self.raw) };
        }
    }
}

/// Ranges to move, on one side of a transfer. Making one touches no memory.
pub struct TransferList {
    loaded: Arc<Loaded>,
    raw: *mut RawXferList,
    len: usize,
}

// SAFETY: NIXL's lists are plain data without a thread of their own; they are only read through `&`.
unsafe impl Send for TransferList {}
// SAFETY: as above.
unsafe impl Sync for TransferList {}

impl TransferList {
    /// A list of ranges of one kind.
    pub fn new(
        nixl: &Nixl,
        kind: MemoryKind,
        ranges: impl IntoIterator<Item = Descriptor>,
    ) -> Result<TransferList> {
        let mut list = TransferList { loaded: Arc::clone(&nixl.0), raw: ptr::null_mut(), len: 0 };
        let api = &nixl.0.api;
        // SAFETY: the pointer is to a local variable.
        let code = unsafe { (api.create_xfer_list)(kind.code(), &mut list.raw) };
        api::check("nixl_capi_create_xfer_dlist", code)?;
        api::made("nixl_capi_create_xfer_dlist", list.raw)?;
        for range in ranges {
            let (address, length) = (range.address as usize, range.length as usize);
            // SAFETY: the list was made above; the numbers are stored, and no memory is touched.
            let code = unsafe { (api.xfer_list_add)(list.raw, address, length, range.device) };
            api::check("nixl_capi_xfer_dlist_add_desc", code)?;
            list.len += 1;
        }
        Ok(list)
    }

    /// How many ranges it has.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn raw(&self) -> *mut RawXferList {
        self.raw
    }
}

impl Drop for TransferList {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: made by `new`, and nobody else has it.
            unsafe { (self.loaded.api.destroy_xfer_list)(self.raw) };
        }
    }
}

/// One side of many transfers, looked up once; requests name its ranges by index. Cheap to clone.
#[derive(Clone)]
pub struct Prepared(pub(crate) Arc<PreparedCore>);

pub(crate) struct PreparedCore {
    pub(crate) agent: Arc<AgentCore>,
    pub(crate) raw: *mut RawPrepared,
    pub(crate) len: usize,
}

// SAFETY: the handle is only read after it was made, and the agent that it belongs to does its own locking.
unsafe impl Send for PreparedCore {}
// SAFETY: as above.
unsafe impl Sync for PreparedCore {}

impl Prepared {
    /// How many ranges it has.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }
}

impl Drop for PreparedCore {
    fn drop(&mut self) {
        if self.agent.in_child() {
            return;
        }
        // SAFETY: made by the agent, which is alive, and no request uses it: requests hold it.
        unsafe { (self.agent.loaded().api.release_prepared)(self.agent.raw(), self.raw) };
    }
}
