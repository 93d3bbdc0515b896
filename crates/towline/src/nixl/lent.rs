//! Memory that is registered by its address alone: nothing here owns it.
#![allow(unsafe_code, reason = "takes a caller's word for memory")]

use std::any::Any;
use std::fmt;

use super::agent::NixlAgent;
use super::registered::{NixlRegistered, register_as};
use super::sys;
use super::transfer::OptArgs;
use crate::memory::{FileSlice, MemType, MemoryDescription, NixlDescriptor, Place, Storage, StorageKind};
use crate::region::{RegisterError, RegisteredView};
use crate::{Error, Kind, Result};

/// Memory that others keep.
#[derive(Debug)]
pub(super) struct Lent {
    descriptor: NixlDescriptor,
    place: Place,
    file: Option<FileSlice>,
}

impl MemoryDescription for Lent {
    fn addr(&self) -> usize {
        self.descriptor.addr as usize
    }

    fn size(&self) -> usize {
        self.descriptor.size
    }

    fn storage_kind(&self) -> StorageKind {
        match self.place {
            Place::Host => StorageKind::External,
            Place::Cuda(device) => StorageKind::Device(device),
            Place::Disk => StorageKind::Disk(self.descriptor.device_id),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

// SAFETY: the caller that made it promised so much of the memory (`NixlAgent::register_memory`); nothing here changes, and nothing gives
// out references.
unsafe impl Storage for Lent {
    fn place(&self) -> Place {
        self.place
    }

    fn file(&self) -> Option<FileSlice> {
        self.file.clone()
    }
}

/// A registration of memory that it does not own. Dropping it deregisters.
///
/// [`register_with_nixl`](super::register_with_nixl) makes registrations that own their storage, and need no promise.
pub struct RegistrationHandle {
    name: String,
    registered: Option<NixlRegistered<Lent>>,
}

impl RegistrationHandle {
    /// The agent's name.
    pub fn agent_name(&self) -> Option<String> {
        self.registered.as_ref().map(|_| self.name.clone())
    }

    /// Deregisters; does nothing the second time.
    ///
    /// # Errors
    /// Why the memory may still be touched. Where a transfer still uses it, the call can be tried again.
    pub fn deregister(&mut self) -> Result<()> {
        let Some(registered) = self.registered.take() else { return Ok(()) };
        registered.into_storage().map(|_| ()).map_err(|RegisterError { error, storage }| {
            self.registered = storage;
            error
        })
    }
}

impl Drop for RegistrationHandle {
    fn drop(&mut self) {
        if crate::fork::in_child() {
            return;
        }
        if let Err(error) = self.deregister() {
            tracing::warn!(%error, agent = self.name, "memory that is not owned here may still be touched");
        }
    }
}

impl fmt::Debug for RegistrationHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegistrationHandle")
            .field("agent", &self.name)
            .field("descriptor", &self.registered.as_ref().map(RegisteredView::descriptor))
            .finish()
    }
}

impl NixlAgent {
    /// Registers memory by its descriptor: with the backends of `opt`, or with all that take its kind of memory.
    ///
    /// # Errors
    /// `Invalid` for memory of no bytes or at address 0; `Unsupported` for kinds that the embedded engine does not serve;
    /// `Native` where NIXL refuses.
    ///
    /// # Safety
    /// The memory (or the open file) satisfies the contract of [`Storage`] until the handle has been deregistered without an
    /// error, and every transfer that touches it, from either side, has ended: it stays where it is, readable and writable,
    /// and no Rust reference to it exists meanwhile.
    pub unsafe fn register_memory(
        &self,
        descriptor: &(impl sys::NixlDescriptor + ?Sized),
        opt: Option<&OptArgs>,
    ) -> Result<RegistrationHandle> {
        // SAFETY: the pointer is not followed here.
        let addr = unsafe { descriptor.as_ptr() }.expose_provenance() as u64;
        let descriptor = NixlDescriptor {
            addr,
            size: descriptor.size(),
            mem_type: descriptor.mem_type(),
            device_id: descriptor.device_id(),
        };
        let storage = self.lend(&descriptor)?;
        let registered = register_as(descriptor, storage, self, opt)?;
        Ok(RegistrationHandle { name: self.name(), registered: Some(registered) })
    }

    fn lend(&self, descriptor: &NixlDescriptor) -> Result<Lent> {
        let invalid = |why: &str| Err(Error::invalid("register", format!("{why}: {descriptor:?}")));
        if descriptor.size == 0 || isize::try_from(descriptor.size).is_err() {
            return invalid("memory of that length cannot be registered");
        }
        if descriptor.addr.checked_add(descriptor.size as u64).is_none() {
            return invalid("the range wraps around");
        }
        let embedded = self.engine() == super::Engine::Embedded;
        let (place, file) = match descriptor.mem_type {
            MemType::Dram | MemType::Vram if descriptor.addr == 0 => {
                return invalid("there is no memory at address 0");
            }
            MemType::Dram => (Place::Host, None),
            MemType::Vram => {
                let Ok(device) = u32::try_from(descriptor.device_id) else {
                    return invalid("there is no such device");
                };
                (Place::Cuda(device), None)
            }
            MemType::File if embedded => {
                let NixlDescriptor { device_id, addr, size, .. } = *descriptor;
                (Place::Disk, Some(FileSlice::of_descriptor(device_id, addr, size as u64)?))
            }
            // NIXL knows what it is; here it is only passed on.
            _ if !embedded => (Place::Disk, None),
            kind => {
                let message = format!("the embedded engine does not serve memory of the kind {kind:?}");
                return Err(Error::new(Kind::Unsupported, "register", message));
            }
        };
        Ok(Lent { descriptor: descriptor.clone(), place, file })
    }
}
