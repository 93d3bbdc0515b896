//! Storages registered with an agent of NIXL.
#![allow(unsafe_code, reason = "lends memory to NIXL by its address")]

use std::any::Any;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use towline_sys::nixl as native;

use super::agent::{NixlAgent, native_kind};
use super::transfer::OptArgs;
use crate::memory::{MemType, MemoryDescription, NixlDescriptor, Place, Storage, StorageKind};
use crate::region::{RegisterError, RegisteredView};
use crate::{Error, Kind, Result, fork};

/// Says how NIXL names a storage: address, length, kind and device. Every [`Storage`] can say it.
pub trait NixlCompatible {
    /// The address (null for a file), the length, the kind of memory and the device.
    fn nixl_params(&self) -> (*const u8, usize, MemType, u64);
}

impl<S: Storage + ?Sized> NixlCompatible for S {
    fn nixl_params(&self) -> (*const u8, usize, MemType, u64) {
        let address = std::ptr::with_exposed_provenance(self.addr());
        let (kind, device) = match self.place() {
            Place::Host => (MemType::Dram, 0),
            Place::Cuda(device) => (MemType::Vram, u64::from(device)),
            Place::Disk => (MemType::File, self.file().map_or(0, |file| file.number())),
        };
        (address, self.size(), kind, device)
    }
}

/// Memory that NIXL can be given: any [`Storage`].
pub trait NixlMemory: MemoryDescription + NixlCompatible {}

impl<S: Storage + ?Sized> NixlMemory for S {}

/// A range of memory as NIXL names it.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Range(pub(super) NixlDescriptor);

impl Range {
    pub(super) fn kind(&self) -> native::MemoryKind {
        native_kind(self.0.mem_type)
    }

    pub(super) fn descriptor(&self) -> native::Descriptor {
        native::Descriptor { address: self.0.addr, length: self.0.size as u64, device: self.0.device_id }
    }

    pub(super) fn key(&self) -> (u8, u64, u64) {
        (self.0.mem_type as u8, self.0.device_id, self.0.addr)
    }

    /// The lowest key of the same kind and device.
    pub(super) fn first_key(&self) -> (u8, u64, u64) {
        (self.0.mem_type as u8, self.0.device_id, 0)
    }

    pub(super) fn covers(&self, other: &Range) -> bool {
        let end = |range: &Range| range.0.addr.checked_add(range.0.size as u64);
        self.first_key() == other.first_key()
            && self.0.addr <= other.0.addr
            && end(other).is_some_and(|other| end(self).is_some_and(|end| other <= end))
    }
}

impl fmt::Debug for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NixlDescriptor { addr, size, mem_type, device_id } = &self.0;
        write!(f, "{size} bytes at {addr:#x} of {mem_type:?} {device_id}")
    }
}

/// A registered storage, as transfers hold it.
pub(super) trait Held: Send + Sync {
    fn range(&self) -> &Range;
}

struct Core<S: Storage> {
    agent: NixlAgent,
    name: String,
    range: Range,
    registration: Option<native::Registration>,
    storage: ManuallyDrop<S>,
}

impl<S: Storage> Held for Core<S> {
    fn range(&self) -> &Range {
        &self.range
    }
}

impl<S: Storage> Core<S> {
    /// Deregisters; while that fails the memory must stay.
    fn deregister(&mut self) -> Result<()> {
        let Some(registration) = self.registration.take() else { return Ok(()) };
        self.agent.forget(&self.range);
        Ok(registration.deregister()?)
    }
}

impl<S: Storage> Drop for Core<S> {
    fn drop(&mut self) {
        if fork::in_child() {
            std::mem::forget(self.registration.take());
            return;
        }
        if self.registration.is_none() {
            return;
        }
        match self.deregister() {
            // SAFETY: `into_storage` takes the storage only after the registration, of which there was one here.
            Ok(()) => unsafe { ManuallyDrop::drop(&mut self.storage) },
            Err(error) => {
                tracing::warn!(%error, agent = self.name, "NIXL keeps a registration; its storage is kept too");
            }
        }
    }
}

/// A storage that is registered with an agent of NIXL.
///
/// Dropping it deregisters, then frees the storage. While a transfer of this agent uses the memory, both wait for it;
/// that peers have stopped using it is for the program to see to: NIXL has no way to tell.
pub struct NixlRegistered<S: Storage>(Arc<Core<S>>);

impl<S: Storage> NixlRegistered<S> {
    /// The storage.
    pub fn storage(&self) -> &S {
        &self.0.storage
    }

    /// Whether it is registered: always.
    pub fn is_registered(&self) -> bool {
        self.0.registration.is_some()
    }

    /// Deregisters and gives the storage back.
    ///
    /// # Errors
    /// With the registration, where a transfer of this agent still uses the memory (`Exhausted`, to be tried again), or
    /// NIXL refuses to deregister; then the memory stays where it is for good.
    pub fn into_storage(self) -> Result<S, RegisterError<Option<NixlRegistered<S>>>> {
        let mut core = match Arc::try_unwrap(self.0) {
            Ok(core) => core,
            Err(shared) => {
                let error = Error::new(Kind::Exhausted, "deregister", "a transfer still uses the memory");
                return Err(RegisterError { error, storage: Some(NixlRegistered(shared)) });
            }
        };
        if let Err(error) = core.deregister() {
            return Err(RegisterError { error: error.during("deregister"), storage: None });
        }
        // SAFETY: the registration is gone, so the drop of `core` does not touch the storage.
        Ok(unsafe { ManuallyDrop::take(&mut core.storage) })
    }
}

impl<S: Storage> MemoryDescription for NixlRegistered<S> {
    fn addr(&self) -> usize {
        self.0.storage.addr()
    }

    fn size(&self) -> usize {
        self.0.storage.size()
    }

    fn storage_kind(&self) -> StorageKind {
        self.0.storage.storage_kind()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn nixl_descriptor(&self) -> Option<NixlDescriptor> {
        Some(self.descriptor())
    }
}

impl<S: Storage> RegisteredView for NixlRegistered<S> {
    fn agent_name(&self) -> &str {
        &self.0.name
    }

    fn descriptor(&self) -> NixlDescriptor {
        self.0.range.0.clone()
    }
}

impl<S: Storage> fmt::Debug for NixlRegistered<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlRegistered")
            .field("storage", &*self.0.storage)
            .field("agent", &self.0.name)
            .finish()
    }
}

/// Registers a storage with an agent: with the backends of `opt`, or with all that take its kind of memory.
///
/// # Errors
/// The cause, together with the storage.
pub fn register_with_nixl<S: Storage>(
    storage: S,
    agent: &NixlAgent,
    opt: Option<&OptArgs>,
) -> Result<NixlRegistered<S>, RegisterError<S>> {
    let (address, size, mem_type, device_id) = storage.nixl_params();
    let range = Range(NixlDescriptor { addr: address.addr() as u64, size, mem_type, device_id });
    let refused = if size == 0 {
        Some("a storage of no bytes cannot be registered")
    } else if storage.nixl_descriptor().is_some() {
        Some("the storage is registered with NIXL already")
    } else {
        None
    };
    if let Some(why) = refused {
        return Err(RegisterError { error: Error::invalid("register", why), storage });
    }
    // SAFETY: the storage keeps its bytes in place for as long as it lives (`Storage`, promises 1 and 2), and `Core` frees
    // it only after the registration is gone; no reference to them exists (promise 4).
    let registration = match unsafe { agent.register_range(&range, opt) } {
        Ok(registration) => registration,
        Err(error) => return Err(RegisterError { error: error.during("register"), storage }),
    };
    let core = Arc::new(Core {
        agent: agent.clone(),
        name: agent.name(),
        range,
        registration: Some(registration),
        storage: ManuallyDrop::new(storage),
    });
    let held: Arc<dyn Held> = Arc::clone(&core) as Arc<dyn Held>;
    agent.note(&held);
    drop(held);
    Ok(NixlRegistered(core))
}

/// [`register_with_nixl`] as a method.
pub trait NixlRegisterExt: Storage + Sized {
    /// Registers it with an agent; see [`register_with_nixl`].
    fn register(
        self,
        agent: &NixlAgent,
        opt: Option<&OptArgs>,
    ) -> Result<NixlRegistered<Self>, RegisterError<Self>> {
        register_with_nixl(self, agent, opt)
    }
}

impl<S: Storage> NixlRegisterExt for S {}
