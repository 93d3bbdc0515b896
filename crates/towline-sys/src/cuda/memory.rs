//! Memory: of a device, of the host as a device sees it, of another process; and what an address belongs to.
#![allow(unsafe_code, reason = "foreign calls")]

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

use super::api::{RawIpcHandle, code};
use super::{Cuda, Entered};
use crate::{Error, Result};

/// By this another process opens an allocation.
pub type IpcHandle = [u8; 64];

/// How host memory is pinned.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostFlags {
    /// The CPU writes it in bursts and reads it never: around its cache.
    pub write_combined: bool,
    /// Devices only read it.
    pub read_only: bool,
}

/// What the memory at an address is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryType {
    /// Host memory that the driver has allocated or registered.
    Host,
    /// Memory of a device.
    Device,
    /// Managed memory, which moves.
    Managed,
}

/// What the driver knows of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PointerFacts {
    /// What it is.
    pub memory: MemoryType,
    /// The device that it belongs to.
    pub device: i32,
    /// A number that no other allocation of this process ever has.
    pub buffer: u64,
    /// A number that no other physical allocation of this process ever has; 0 if the driver does not say.
    pub block: u64,
    /// Where its allocation (or the mapping of one) starts.
    pub start: u64,
    /// How long that is.
    pub len: u64,
    /// Whether [`Entered::ipc_handle`] works for it.
    pub legacy_ipc: bool,
    /// The kinds of handles by which its allocation can be handed over; bit 0 is a file descriptor.
    pub handle_types: u64,
    /// Whether it comes from a memory pool.
    pub pooled: bool,
}

const PORTABLE: c_uint = 1;
const MAPPED: c_uint = 2;
const WRITE_COMBINED: c_uint = 4;
const READ_ONLY: c_uint = 8;
const LAZY_PEER_ACCESS: c_uint = 1;

/// The attributes of a pointer that are asked for, in the order in which the results are read. Drivers before CUDA 11.7 do not
/// know the last three, and those before CUDA 11.3 not the one before.
const ATTRIBUTES: [c_uint; 12] = [2, 9, 7, 11, 12, 10, 14, 8, 17, 18, 19, 20];
const OF_OLDER: [usize; 2] = [9, 8];

impl Cuda {
    /// What the driver knows of an address; `None` if it does not know the address.
    pub fn pointer_facts(&self, address: u64) -> Result<Option<PointerFacts>> {
        self.init()?;
        let mut values = [0u64; ATTRIBUTES.len()];
        let mut pointers = values.each_mut().map(|value| ptr::from_mut(value).cast::<c_void>());
        let mut names = ATTRIBUTES;
        let mut ask = |count: usize| {
            // SAFETY: names, pointers and the zeroed eight bytes behind each outlive the call; no attribute is longer.
            unsafe {
                (self.api().pointer_attributes)(
                    count as c_uint,
                    names.as_mut_ptr(),
                    pointers.as_mut_ptr(),
                    address,
                )
            }
        };
        let mut answer = ask(ATTRIBUTES.len());
        for known in OF_OLDER {
            if answer == code::INVALID_VALUE {
                answer = ask(known);
            }
        }
        self.api().check("cuPointerGetAttributes", answer)?;
        let [
            memory,
            device,
            buffer,
            start,
            len,
            legacy_ipc,
            handle_types,
            managed,
            pool,
            mapped,
            base,
            block,
        ] = values;
        let legacy_ipc = legacy_ipc as u32 & 0xff != 0;
        let memory = match memory as u32 {
            _ if managed as u32 & 0xff != 0 => MemoryType::Managed,
            1 => MemoryType::Host,
            2 => MemoryType::Device,
            _ => return Ok(None),
        };
        // Of memory that was mapped by itself, the range is all the addresses that were reserved, whatever is mapped there.
        let separate = memory == MemoryType::Device && !legacy_ipc && mapped != 0;
        let (start, len) = if separate { (base, mapped) } else { (start, len) };
        Ok(Some(PointerFacts {
            memory,
            device: device as c_int,
            buffer,
            start,
            len,
            legacy_ipc,
            block,
            handle_types,
            pooled: pool != 0,
        }))
    }

    /// Frees what [`Entered::allocate_host`] gave.
    ///
    /// # Safety
    /// Nobody uses the memory any more, and it was not freed before.
    pub unsafe fn free_host(&self, address: *mut u8) -> Result<()> {
        // SAFETY: the caller's promise.
        self.api().check("cuMemFreeHost", unsafe { (self.api().free_host)(address.cast()) })
    }
}

impl Entered<'_> {
    /// Allocates memory of the device; what is in it is not defined.
    pub fn allocate(&self, len: usize) -> Result<u64> {
        let mut address = 0;
        // SAFETY: `address` outlives the call.
        self.api().check("cuMemAlloc_v2", unsafe { (self.api().allocate)(&mut address, len) })?;
        Ok(address)
    }

    /// Frees what [`Entered::allocate`] gave. Waits for work of the device that may use it.
    ///
    /// # Safety
    /// Nobody uses the memory any more, in this process or another, and it was not freed before.
    pub unsafe fn free(&self, address: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        self.api().check("cuMemFree_v2", unsafe { (self.api().free)(address) })
    }

    /// Allocates pinned host memory that every device reaches.
    pub fn allocate_host(&self, len: usize, flags: HostFlags) -> Result<*mut u8> {
        let mut address = ptr::null_mut();
        let bits = PORTABLE | MAPPED | if flags.write_combined { WRITE_COMBINED } else { 0 };
        // SAFETY: `address` outlives the call.
        let answer = unsafe { (self.api().allocate_host)(&mut address, len, bits) };
        self.api().check("cuMemHostAlloc", answer)?;
        if address.is_null() {
            return Err(self.api().refused("cuMemHostAlloc", code::OUT_OF_MEMORY));
        }
        Ok(address.cast())
    }

    /// Pins host memory of this process and lets every device reach it.
    ///
    /// # Safety
    /// The bytes are mapped, and stay so until [`Entered::unregister_host`].
    pub unsafe fn register_host(&self, address: *mut u8, len: usize, flags: HostFlags) -> Result<()> {
        let bits = PORTABLE | MAPPED | if flags.read_only { READ_ONLY } else { 0 };
        // SAFETY: the caller's promise.
        let answer = unsafe { (self.api().register_host)(address.cast(), len, bits) };
        self.api().check("cuMemHostRegister_v2", answer)
    }

    /// Undoes [`Entered::register_host`].
    ///
    /// # Safety
    /// No device uses the memory any more.
    pub unsafe fn unregister_host(&self, address: *mut u8) -> Result<()> {
        // SAFETY: the caller's promise.
        let answer = unsafe { (self.api().unregister_host)(address.cast()) };
        self.api().check("cuMemHostUnregister", answer)
    }

    /// The address by which the device reaches pinned host memory.
    pub fn device_address(&self, address: *mut u8) -> Result<u64> {
        let mut device = 0;
        // SAFETY: `device` outlives the call; an address that is not pinned is refused.
        let answer = unsafe { (self.api().host_device_pointer)(&mut device, address.cast(), 0) };
        self.api().check("cuMemHostGetDevicePointer_v2", answer)?;
        Ok(device)
    }

    /// A handle by which another process opens the allocation that holds `address`, from its start on.
    pub fn ipc_handle(&self, address: u64) -> Result<IpcHandle> {
        let mut handle = RawIpcHandle([0; 64]);
        // SAFETY: `handle` outlives the call; an address that cannot be shared is refused.
        self.api().check("cuIpcGetMemHandle", unsafe { (self.api().ipc_handle)(&mut handle, address) })?;
        Ok(handle.0)
    }

    /// Maps another process's allocation here. A process cannot open its own.
    ///
    /// # Safety
    /// The handle is a live one of a process that keeps the allocation for as long as it is mapped here.
    pub unsafe fn open_ipc(&self, handle: &IpcHandle) -> Result<u64> {
        let mut address = 0;
        // SAFETY: `address` outlives the call; the rest is the caller's promise.
        let answer = unsafe { (self.api().ipc_open)(&mut address, RawIpcHandle(*handle), LAZY_PEER_ACCESS) };
        self.api().check("cuIpcOpenMemHandle_v2", answer)?;
        if address == 0 {
            return Err(Error::argument("cuIpcOpenMemHandle_v2", "the driver gave no address"));
        }
        Ok(address)
    }

    /// Undoes one [`Entered::open_ipc`].
    ///
    /// # Safety
    /// Nothing uses the mapping any more.
    pub unsafe fn close_ipc(&self, address: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        self.api().check("cuIpcCloseMemHandle", unsafe { (self.api().ipc_close)(address) })
    }
}
