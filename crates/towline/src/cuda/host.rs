//! Host memory that GPUs reach.
#![allow(unsafe_code, reason = "registers memory with the driver")]

use std::sync::Arc;

use towline_sys::cuda::HostFlags;

use super::{Gpu, failed, not_given_back};
use crate::{Result, fork};

/// Host memory registered with CUDA: pinned, and reached by every GPU of this process until the value is dropped.
#[derive(Debug)]
pub struct HostRegistration {
    gpu: Arc<Gpu>,
    start: *mut u8,
    len: usize,
    device: u64,
}

// SAFETY: the pointer is a name for the driver, and never followed here.
unsafe impl Send for HostRegistration {}
// SAFETY: as above.
unsafe impl Sync for HostRegistration {}

impl HostRegistration {
    /// Registers `len` bytes at `start`, through that GPU's context, for all of them.
    ///
    /// It takes time by the page: about 50 microseconds a MiB.
    ///
    /// # Errors
    /// What the driver says: `Exhausted` where no more can be pinned, `Unsupported` where this kind of memory cannot be.
    ///
    /// # Safety
    /// The bytes are mapped, writable unless `read_only`, and stay so until the value is dropped; by then no GPU uses them.
    pub unsafe fn register(
        gpu: &Arc<Gpu>,
        start: *mut u8,
        len: usize,
        read_only: bool,
    ) -> Result<HostRegistration> {
        const OP: &str = "pin host memory";
        let entered = gpu.enter(OP)?;
        let flags = HostFlags { read_only, ..HostFlags::default() };
        // SAFETY: the caller's promise.
        unsafe { entered.register_host(start, len, flags) }.map_err(|error| failed(OP, error))?;
        let mut registration = HostRegistration { gpu: Arc::clone(gpu), start, len, device: 0 };
        registration.device = if gpu.same_host_pointer() {
            start.expose_provenance() as u64
        } else {
            entered.device_address(start).map_err(|error| failed(OP, error))?
        };
        Ok(registration)
    }

    /// The address of the first byte for the GPU that it was registered through.
    pub fn device_address(&self) -> u64 {
        self.device
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no byte in it, which never happens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for HostRegistration {
    fn drop(&mut self) {
        const OP: &str = "unpin host memory";
        if fork::in_child() {
            return;
        }
        let undone = self.gpu.enter(OP).and_then(|entered| {
            // SAFETY: registered by this value; that no GPU uses it any more was promised when it was made.
            unsafe { entered.unregister_host(self.start) }.map_err(|error| failed(OP, error))
        });
        if let Err(error) = undone {
            not_given_back("the pinning of host memory", &error);
        }
    }
}
