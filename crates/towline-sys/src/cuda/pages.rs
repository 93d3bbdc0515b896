//! Physical memory apart from its addresses: allocated, handed over as a file descriptor, mapped.
#![allow(unsafe_code, reason = "foreign calls")]

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use super::api::{RawAccess, RawAllocation, RawLocation, RawProperties};
use super::{Cuda, Device, Entered};
use crate::Result;

const PINNED: c_uint = 1;
const ON_DEVICE: c_uint = 1;
const POSIX_DESCRIPTOR: c_uint = 1;
const READ_WRITE: c_uint = 3;

/// In which units physical memory comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Granularity {
    /// Lengths and addresses are multiples of it.
    pub bytes: usize,
}

/// A physical allocation, released with the value; mappings of it keep the memory.
#[derive(Debug)]
pub struct Allocation {
    cuda: Cuda,
    raw: RawAllocation,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Some(release) = self.cuda.api().release {
            // SAFETY: the handle is this value's alone. A refusal leaves it to the end of the process.
            unsafe { release(self.raw) };
        }
    }
}

fn properties(device: &Device) -> RawProperties {
    RawProperties {
        kind: PINNED,
        handle_types: POSIX_DESCRIPTOR,
        location: RawLocation { kind: ON_DEVICE, id: device.raw },
        windows: ptr::null_mut(),
        compression: 0,
        direct_rdma: 0,
        usage: 0,
        reserved: [0; 4],
    }
}

impl Device {
    /// In which units its physical memory comes.
    pub fn granularity(&self) -> Result<Granularity> {
        let cuda = self.cuda();
        let function = cuda.optional(cuda.api().granularity, "cuMemGetAllocationGranularity")?;
        let mut bytes = 0;
        // SAFETY: both outlive the call.
        let answer = unsafe { function(&mut bytes, &properties(self), 0) };
        cuda.api().check("cuMemGetAllocationGranularity", answer)?;
        Ok(Granularity { bytes: bytes.max(1) })
    }

    /// Allocates physical memory that can be handed over as a file descriptor. `len` is a multiple of the granularity.
    pub fn create_allocation(&self, len: usize) -> Result<Allocation> {
        let cuda = self.cuda();
        let function = cuda.optional(cuda.api().create, "cuMemCreate")?;
        let mut raw = 0;
        // SAFETY: both outlive the call.
        cuda.api().check("cuMemCreate", unsafe { function(&mut raw, len, &properties(self), 0) })?;
        Ok(Allocation { cuda: cuda.clone(), raw })
    }
}

impl Cuda {
    /// The physical allocation behind an address, where it has been mapped there by itself.
    pub fn retain_allocation(&self, address: u64) -> Result<Allocation> {
        let function = self.optional(self.api().retain, "cuMemRetainAllocationHandle")?;
        let mut raw = 0;
        // SAFETY: `raw` outlives the call; the address is only looked up.
        let answer = unsafe { function(&mut raw, ptr::without_provenance_mut(address as usize)) };
        self.api().check("cuMemRetainAllocationHandle", answer)?;
        Ok(Allocation { cuda: self.clone(), raw })
    }

    /// Takes over an allocation that another process has exported. The descriptor stays the caller's.
    pub fn import_allocation(&self, file: BorrowedFd<'_>) -> Result<Allocation> {
        let function = self.optional(self.api().import, "cuMemImportFromShareableHandle")?;
        let mut raw = 0;
        let handle = ptr::without_provenance_mut::<c_void>(file.as_raw_fd() as usize);
        // SAFETY: `raw` outlives the call; the number of the descriptor is passed in place of a pointer.
        let answer = unsafe { function(&mut raw, handle, POSIX_DESCRIPTOR) };
        self.api().check("cuMemImportFromShareableHandle", answer)?;
        Ok(Allocation { cuda: self.clone(), raw })
    }

    /// Reserves addresses, and backs them by nothing.
    pub fn reserve_addresses(&self, len: usize) -> Result<u64> {
        let function = self.optional(self.api().reserve, "cuMemAddressReserve")?;
        let mut address = 0;
        // SAFETY: `address` outlives the call.
        self.api().check("cuMemAddressReserve", unsafe { function(&mut address, len, 0, 0, 0) })?;
        Ok(address)
    }

    /// Gives addresses back.
    ///
    /// # Safety
    /// They were reserved with that length, and nothing is mapped there any more.
    pub unsafe fn free_addresses(&self, address: u64, len: usize) -> Result<()> {
        let function = self.optional(self.api().unreserve, "cuMemAddressFree")?;
        // SAFETY: the caller's promise.
        self.api().check("cuMemAddressFree", unsafe { function(address, len) })
    }

    /// Undoes [`Allocation::map`].
    ///
    /// # Safety
    /// Nothing uses the mapping any more, which started there and had that length.
    pub unsafe fn unmap(&self, address: u64, len: usize) -> Result<()> {
        let function = self.optional(self.api().unmap, "cuMemUnmap")?;
        // SAFETY: the caller's promise.
        self.api().check("cuMemUnmap", unsafe { function(address, len) })
    }
}

impl Allocation {
    /// Maps its first `len` bytes at addresses that were reserved before.
    ///
    /// # Safety
    /// The addresses are reserved, and nothing is mapped there.
    pub unsafe fn map(&self, address: u64, len: usize) -> Result<()> {
        let function = self.cuda.optional(self.cuda.api().map, "cuMemMap")?;
        // SAFETY: the caller's promise.
        self.cuda.api().check("cuMemMap", unsafe { function(address, len, 0, self.raw, 0) })
    }

    /// A file descriptor by which another process imports it.
    pub fn export(&self) -> Result<OwnedFd> {
        let function = self.cuda.optional(self.cuda.api().export, "cuMemExportToShareableHandle")?;
        let mut file: c_int = -1;
        // SAFETY: for this kind of handle the driver writes one `int`, which outlives the call.
        let answer = unsafe { function(ptr::from_mut(&mut file).cast(), self.raw, POSIX_DESCRIPTOR, 0) };
        self.cuda.api().check("cuMemExportToShareableHandle", answer)?;
        // SAFETY: the driver has made the descriptor for the caller, who closes it.
        Ok(unsafe { OwnedFd::from_raw_fd(file) })
    }
}

impl Entered<'_> {
    /// Lets this context's device read and write a mapping.
    pub fn allow_access(&self, address: u64, len: usize) -> Result<()> {
        let function = self.cuda().optional(self.api().set_access, "cuMemSetAccess")?;
        let location = RawLocation { kind: ON_DEVICE, id: self.context().device().raw };
        let access = RawAccess { location, flags: READ_WRITE };
        // SAFETY: `access` outlives the call; an address that is not mapped is refused.
        self.api().check("cuMemSetAccess", unsafe { function(address, len, &access, 1) })
    }
}
