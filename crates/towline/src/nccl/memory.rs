//! Memory that windows accept.
#![allow(unsafe_code, reason = "frees memory of NCCL's")]

use std::sync::Arc;

use towline_sys::nccl::Nccl;

use super::failed;
use crate::cuda::Gpu;
use crate::memory::{Place, Storage, StorageKind, describe};
use crate::{Error, Result, fork};

/// Memory of a GPU that NCCL allocated, so that windows accept it. Owned; what is in it at first is not defined.
#[derive(Debug)]
pub struct NcclStorage {
    gpu: Arc<Gpu>,
    nccl: Nccl,
    addr: u64,
    len: usize,
}

impl NcclStorage {
    /// Allocates `len` bytes on the GPU of that ordinal.
    ///
    /// # Errors
    /// `Invalid` for length 0 or a GPU that is not there; `Unavailable` without NCCL, a driver or a GPU; what NCCL says.
    pub fn new(len: usize, ordinal: u32) -> Result<NcclStorage> {
        const OP: &str = "mem_alloc";
        if len == 0 || len > isize::MAX as usize {
            return Err(Error::invalid(OP, format!("{len} bytes cannot be allocated")));
        }
        let nccl = Nccl::load().map_err(|error| failed(OP, None, error))?;
        let gpu = Gpu::open(ordinal).map_err(|error| error.during(OP))?;
        let addr = {
            let _entered = gpu.enter(OP)?;
            nccl.allocate(len).map_err(|error| failed(OP, Some(&nccl), error))?
        };
        Ok(NcclStorage { gpu, nccl, addr, len })
    }

    /// The GPU that it is on.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }
}

impl Drop for NcclStorage {
    fn drop(&mut self) {
        const OP: &str = "mem_free";
        if fork::in_child() {
            return;
        }
        let freed = self.gpu.enter(OP).and_then(|_entered| {
            // SAFETY: the memory is this value's; its users kept the value alive meanwhile.
            unsafe { self.nccl.free(self.addr) }.map_err(|error| failed(OP, Some(&self.nccl), error))
        });
        if let Err(error) = freed {
            tracing::error!(%error, len = self.len, "memory of NCCL's could not be freed");
        }
    }
}

describe!(NcclStorage, |this| this.addr as usize, this.len, StorageKind::Device(this.gpu.ordinal()));

// SAFETY: NCCL keeps the allocation at its address, readable and writable by the device, until drop; the fields never change
// before that; nothing gives out references to the bytes, which the CPU cannot reach at all.
unsafe impl Storage for NcclStorage {
    fn place(&self) -> Place {
        Place::Cuda(self.gpu.ordinal())
    }
}
