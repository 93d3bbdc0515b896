//! Memory of a GPU.
#![allow(unsafe_code, reason = "frees memory of the driver's")]

use std::os::fd::OwnedFd;
use std::sync::Arc;

use towline_sys::cuda::Allocation;

use super::{Place, Storage, StorageKind, describe, map};
use crate::cuda::{Gpu, failed, not_given_back};
use crate::{Error, Result, fork};

const OP: &str = "allocate";

/// Memory of a GPU, owned.
///
/// What is in it at first is not defined. The CPU cannot reach it: [`MemoryAccess`](super::MemoryAccess) goes through the
/// driver.
///
/// ```no_run
/// use towline::memory::{DeviceStorage, MemoryAccess, MemoryDescription};
/// # fn main() -> towline::Result<()> {
/// let storage = DeviceStorage::new(1 << 20, 0)?;
/// storage.write_at(100, b"keys and values")?;
/// assert!(storage.storage_kind().is_cuda());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DeviceStorage {
    gpu: Arc<Gpu>,
    addr: u64,
    len: usize,
    pages: Option<Pages>,
}

/// A physical allocation and the addresses at which it is mapped.
#[derive(Debug)]
struct Pages {
    allocation: Option<Allocation>,
    mapped: usize,
}

/// How GPU memory is allocated, which decides how another process can open it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum DeviceMemory {
    /// By `cuMemAlloc`: other processes open it by a handle.
    #[default]
    Plain,
    /// By `cuMemCreate`: other processes open it by a file descriptor. It comes in units of 2 MiB on most GPUs.
    Exportable,
}

/// How a [`DeviceStorage`] is allocated.
#[derive(Debug, Clone, Copy, Default)]
pub struct DeviceOptions {
    ordinal: u32,
    memory: DeviceMemory,
}

impl DeviceOptions {
    /// Chooses the GPU; 0 unless said otherwise.
    #[must_use]
    pub fn on(mut self, ordinal: u32) -> DeviceOptions {
        self.ordinal = ordinal;
        self
    }

    /// Chooses how it is allocated; [`DeviceMemory::Plain`] unless said otherwise.
    #[must_use]
    pub fn memory(mut self, memory: DeviceMemory) -> DeviceOptions {
        self.memory = memory;
        self
    }

    /// Allocates `len` bytes.
    ///
    /// # Errors
    /// `Invalid` for length 0 or a GPU that is not there; `Exhausted` where the GPU has no room; `Unavailable` without a
    /// driver or a GPU; `Unsupported` where the GPU has no exportable memory.
    pub fn allocate(self, len: usize) -> Result<DeviceStorage> {
        map::not_empty(len)?;
        let gpu = Gpu::open(self.ordinal).map_err(|error| error.during(OP))?;
        if len > isize::MAX as usize {
            return Err(Error::invalid(OP, format!("{len} bytes are more than the address space holds")));
        }
        match self.memory {
            DeviceMemory::Plain => {
                let addr = gpu.enter(OP)?.allocate(len).map_err(|error| refused(&gpu, len, error))?;
                Ok(DeviceStorage { gpu, addr, len, pages: None })
            }
            DeviceMemory::Exportable => exportable(gpu, len),
        }
    }
}

fn refused(gpu: &Gpu, len: usize, error: towline_sys::Error) -> Error {
    let error = failed(OP, error);
    let message = format!("{len} bytes of GPU {}: {}", gpu.ordinal(), error.message());
    Error::new(error.kind(), OP, message).caused_by(error)
}

fn exportable(gpu: Arc<Gpu>, len: usize) -> Result<DeviceStorage> {
    let device = gpu.device();
    let unit = device.granularity().map_err(|error| refused(&gpu, len, error))?.bytes;
    let mapped = map::round_up(len, unit.next_power_of_two())?;
    let allocation = device.create_allocation(mapped).map_err(|error| refused(&gpu, len, error))?;
    let addr = device.cuda().reserve_addresses(mapped).map_err(|error| refused(&gpu, len, error))?;
    // From here on the value undoes what was done.
    let mut storage =
        DeviceStorage { gpu: Arc::clone(&gpu), addr, len, pages: Some(Pages { allocation: None, mapped }) };
    // SAFETY: the addresses were reserved just now.
    unsafe { allocation.map(addr, mapped) }.map_err(|error| refused(&gpu, len, error))?;
    if let Some(pages) = &mut storage.pages {
        pages.allocation = Some(allocation);
    }
    gpu.enter(OP)?.allow_access(addr, mapped).map_err(|error| refused(&gpu, len, error))?;
    Ok(storage)
}

impl DeviceStorage {
    /// Allocates `len` bytes on the GPU of that ordinal; see [`DeviceOptions::allocate`] for the errors.
    pub fn new(len: usize, ordinal: u32) -> Result<DeviceStorage> {
        DeviceStorage::options().on(ordinal).allocate(len)
    }

    /// Starts from the default options.
    pub fn options() -> DeviceOptions {
        DeviceOptions::default()
    }

    /// The GPU that it is on.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// How it was allocated.
    pub fn memory(&self) -> DeviceMemory {
        if self.pages.is_some() { DeviceMemory::Exportable } else { DeviceMemory::Plain }
    }

    /// A descriptor by which another process imports the memory, where it is [`DeviceMemory::Exportable`].
    ///
    /// # Errors
    /// `Unsupported` for plain memory; what the driver says.
    pub fn export(&self) -> Result<OwnedFd> {
        const OP: &str = "export device memory";
        match self.pages.as_ref().and_then(|pages| pages.allocation.as_ref()) {
            Some(allocation) => allocation.export().map_err(|error| failed(OP, error)),
            None => Err(Error::new(
                crate::Kind::Unsupported,
                OP,
                "it was allocated by cuMemAlloc, which has no file descriptor: use DeviceMemory::Exportable",
            )),
        }
    }

    fn release(&mut self) -> Result<()> {
        const OP: &str = "free device memory";
        let entered = self.gpu.enter(OP)?;
        // SAFETY: the memory is this value's. Its users kept the value alive meanwhile (`Storage`, promises 1 and 2);
        // a peer that has it open is waited for, or the value parked, by the registration.
        let freed = unsafe {
            match self.pages.take() {
                None => entered.free(self.addr),
                Some(Pages { allocation, mapped }) => {
                    let cuda = entered.cuda();
                    let unmapped = match allocation {
                        Some(_) => cuda.unmap(self.addr, mapped),
                        None => Ok(()),
                    };
                    unmapped.and_then(|()| cuda.free_addresses(self.addr, mapped))
                }
            }
        };
        freed.map_err(|error| failed(OP, error))
    }
}

impl Drop for DeviceStorage {
    fn drop(&mut self) {
        if fork::in_child() {
            // The parent's: not even the handle is given back here.
            if let Some(pages) = self.pages.take() {
                std::mem::forget(pages.allocation);
            }
            return;
        }
        if let Err(error) = self.release() {
            not_given_back("memory of a GPU", &error);
        }
    }
}

describe!(DeviceStorage, |this| this.addr as usize, this.len, StorageKind::Device(this.gpu.ordinal()));

// SAFETY: the driver keeps the allocation at its address, readable and writable by the device, until drop; the fields
// never change before that; nothing gives out references to the bytes, which the CPU cannot reach at all.
unsafe impl Storage for DeviceStorage {
    fn place(&self) -> Place {
        Place::Cuda(self.gpu.ordinal())
    }
}
