//! Storages registered with an agent.
#![allow(unsafe_code, reason = "lends memory to NIXL by its address")]

use std::any::Any;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

use towline_sys::nixl as native;

use super::agent::{NixlAgent, Running};
use super::embedded;
use super::list::Range;
use super::native::{Held, Native};
use super::transfer::OptArgs;
use crate::memory::{MemType, MemoryDescription, NixlDescriptor, Place, Storage, StorageKind};
use crate::region::{RegisterError, RegisteredView};
use crate::transport::nixl::of_nixl;
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

/// A storage that is registered with NIXL itself.
struct Core<S: Storage> {
    agent: NixlAgent,
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
        if let Running::Nixl(native) = self.agent.running() {
            native.forget(&self.range);
        }
        registration.deregister().map_err(of_nixl)
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
                tracing::warn!(%error, agent = self.agent.name(), "NIXL keeps a registration; its storage is kept too");
            }
        }
    }
}

/// A storage that is registered with an agent.
///
/// Dropping it deregisters, then frees the storage. While a transfer of this agent uses the memory, both wait for it. That peers
/// have stopped using it is for the program to see to where the engine is NIXL, which cannot know; on the embedded
/// engine later accesses give `Stale`, and the storage stays until the last peer has left it.
pub struct NixlRegistered<S: Storage> {
    name: String,
    range: Range,
    /// Empty only while it is being dropped.
    kept: Option<Kept<S>>,
}

enum Kept<S: Storage> {
    Nixl(Arc<Core<S>>),
    Embedded(embedded::Kept<S>),
}

impl<S: Storage> NixlRegistered<S> {
    /// The storage.
    pub fn storage(&self) -> &S {
        match &self.kept {
            Some(Kept::Nixl(core)) => &core.storage,
            Some(Kept::Embedded(kept)) => kept.storage(),
            None => unreachable!("it is emptied only when it is consumed"),
        }
    }

    /// Whether peers can reach it: false only for what [`into_storage`](Self::into_storage) could not give back.
    pub fn is_registered(&self) -> bool {
        match &self.kept {
            Some(Kept::Nixl(core)) => core.registration.is_some(),
            Some(Kept::Embedded(kept)) => kept.is_registered(),
            None => false,
        }
    }

    /// Deregisters and gives the storage back.
    ///
    /// # Errors
    /// With the registration, where the memory is still in use (to be tried again): `Exhausted` for a transfer or a prepared
    /// list of this agent on NIXL, `Timeout` for a peer on the embedded engine, which is waited for first. Without it, where
    /// NIXL refuses to deregister; then the memory stays where it is for good.
    pub fn into_storage(self) -> Result<S, RegisterError<Option<NixlRegistered<S>>>> {
        self.taken_back(None)
    }

    /// [`into_storage`](Self::into_storage) with a limit of its own for peers, on the embedded engine.
    pub fn into_storage_within(
        self,
        within: Duration,
    ) -> Result<S, RegisterError<Option<NixlRegistered<S>>>> {
        self.taken_back(Some(within))
    }

    fn taken_back(mut self, within: Option<Duration>) -> Result<S, RegisterError<Option<NixlRegistered<S>>>> {
        let (error, kept) = match self.kept.take() {
            Some(Kept::Embedded(kept)) => match kept.into_storage(within) {
                Ok(storage) => return Ok(storage),
                Err(RegisterError { error, storage }) => (error, Some(Kept::Embedded(storage))),
            },
            Some(Kept::Nixl(shared)) => match Arc::try_unwrap(shared) {
                Ok(mut core) => match core.deregister() {
                    // SAFETY: the registration is gone, so the drop of `core` does not touch the storage.
                    Ok(()) => return Ok(unsafe { ManuallyDrop::take(&mut core.storage) }),
                    Err(error) => (error.during("deregister"), None),
                },
                Err(shared) => {
                    let why = "a transfer or a prepared list still uses the memory";
                    (Error::new(Kind::Exhausted, "deregister", why), Some(Kept::Nixl(shared)))
                }
            },
            None => (Error::new(Kind::Internal, "deregister", "it was consumed before"), None),
        };
        self.kept = kept;
        let storage = self.kept.is_some().then_some(self);
        Err(RegisterError { error, storage })
    }
}

impl<S: Storage> Drop for NixlRegistered<S> {
    fn drop(&mut self) {
        match self.kept.take() {
            // A forked child has neither the registration nor the memory to free.
            Some(kept) if fork::in_child() => std::mem::forget(kept),
            Some(Kept::Embedded(kept)) => kept.release(),
            Some(Kept::Nixl(_)) | None => {}
        }
    }
}

impl<S: Storage> MemoryDescription for NixlRegistered<S> {
    fn addr(&self) -> usize {
        self.storage().addr()
    }

    fn size(&self) -> usize {
        self.storage().size()
    }

    fn storage_kind(&self) -> StorageKind {
        self.storage().storage_kind()
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
        &self.name
    }

    fn descriptor(&self) -> NixlDescriptor {
        self.range.0.clone()
    }
}

impl<S: Storage> fmt::Debug for NixlRegistered<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlRegistered").field("storage", self.storage()).field("agent", &self.name).finish()
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
    register_as(
        NixlDescriptor { addr: address.addr() as u64, size, mem_type, device_id },
        storage,
        agent,
        opt,
    )
}

/// Registers a storage under a descriptor that names it.
pub(super) fn register_as<S: Storage>(
    descriptor: NixlDescriptor,
    storage: S,
    agent: &NixlAgent,
    opt: Option<&OptArgs>,
) -> Result<NixlRegistered<S>, RegisterError<S>> {
    let range = Range(descriptor);
    let refused = if range.0.size == 0 {
        Some("a storage of no bytes cannot be registered")
    } else if storage.nixl_descriptor().is_some() {
        Some("the storage is registered with NIXL already")
    } else {
        None
    };
    if let Some(why) = refused {
        return Err(RegisterError { error: Error::invalid("register", why), storage });
    }
    let kept = match agent.running() {
        Running::Nixl(native) => Kept::Nixl(register_natively(native, agent, &range, storage, opt)?),
        Running::Embedded { engine, .. } => match agent.check_options(opt) {
            Ok(()) => Kept::Embedded(engine.register(storage, &range)?),
            Err(error) => return Err(RegisterError { error: error.during("register"), storage }),
        },
    };
    Ok(NixlRegistered { name: agent.name(), range, kept: Some(kept) })
}

fn register_natively<S: Storage>(
    native: &Native,
    agent: &NixlAgent,
    range: &Range,
    storage: S,
    opt: Option<&OptArgs>,
) -> Result<Arc<Core<S>>, RegisterError<S>> {
    // SAFETY: the storage keeps its bytes in place for as long as it lives (`Storage`, promises 1 and 2), and `Core` frees
    // it only after the registration is gone; no reference to them exists (promise 4).
    let registration = match unsafe { native.register(range, opt) } {
        Ok(registration) => registration,
        Err(error) => return Err(RegisterError { error: error.during("register"), storage }),
    };
    let core = Arc::new(Core {
        agent: agent.clone(),
        range: range.clone(),
        registration: Some(registration),
        storage: ManuallyDrop::new(storage),
    });
    let held: Arc<dyn Held> = Arc::clone(&core) as Arc<dyn Held>;
    native.note(&held);
    Ok(core)
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
