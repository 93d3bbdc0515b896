//! Storages made reachable: [`Registered`], [`Span`], and what happens when they are taken back.

mod audit;
mod core;
mod peers;
mod process;
mod registry;
mod served;
mod signal;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod waking_tests;
mod words;

use std::any::Any;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

pub use self::audit::{Audit, PeerAudit, UnauthenticatedAudit};
pub(crate) use self::audit::{Counted, Ledger};
use self::core::ParkingLot;
pub(crate) use self::core::{Borrower, RegionCore, RegionUse, TransportState};
pub(crate) use self::peers::PeerPins;
pub(crate) use self::process::PeerProcess;
pub(crate) use self::registry::Registry;
pub(crate) use self::served::{SERVED, Served, Stream};
pub use self::signal::Patience;
pub(crate) use self::signal::{raise, raise_own, ring, wake_raised};
pub(crate) use self::words::word_at;
use crate::layout::Layout;
use crate::memory::{
    FileSlice, MemType, MemoryAccess, MemoryDescription, NixlDescriptor, Place, Storage, StorageKind,
};
use crate::{Access, Error, Kind, Result, Ticket, fork};
pub(crate) use towline_proto::session::owner::stale;

/// A storage made reachable by other workers.
///
/// It owns the storage: there is no safe way to swap or free the memory underneath a registration. Dropping it
/// revokes first, so that later accesses give `Stale`, then frees the storage once no peer is inside a copy any
/// more; a storage that a stopped peer still holds is parked until the peer lets go.
///
/// ```
/// use towline::{Access, Endpoint, SharedStorage};
/// let endpoint = Endpoint::open("prefill-0")?;
/// let region = endpoint.register(SharedStorage::new(1 << 20)?, Access::READ)?;
/// region.write_at(0, b"sixteen layers..")?;
/// let ticket = region.ticket()?;
/// assert!(ticket.encode().len() <= 512);
/// let storage = region.into_storage()?;
/// # Ok::<(), towline::Error>(())
/// ```
pub struct Registered<S: Storage> {
    core: Arc<RegionCore>,
    storage: ManuallyDrop<S>,
}

/// What can be learnt of a registration without unwrapping it.
pub trait RegisteredView {
    /// The name of the endpoint with which the memory is registered.
    fn agent_name(&self) -> &str;

    /// Address, size and kind of the registered memory.
    fn descriptor(&self) -> NixlDescriptor;
}

/// A registration that failed: the cause, and the storage, which is not lost.
pub struct RegisterError<T> {
    /// Why it failed.
    pub error: Error,
    /// What was to be registered.
    pub storage: T,
}

/// A region that could not be taken back in time: a peer is still inside a copy.
///
/// The region is revoked already: nobody can start a new access. Holds the registration, so that the memory
/// stays valid for the peers that are still in it; call [`Registered::into_storage`] again later.
pub struct StillPinned<S: Storage> {
    /// Which peers hold it, and how long was waited.
    pub error: Error,
    /// The registration.
    pub registration: Registered<S>,
}

impl<S: Storage> Registered<S> {
    /// Registers a storage; what is to be kept lives as long as the region does.
    pub(crate) fn new(
        registry: &Arc<Registry>,
        keep: Arc<dyn Any + Send + Sync>,
        storage: S,
        access: Access,
    ) -> Result<Registered<S>, RegisterError<S>> {
        match RegionCore::register(registry, keep, &storage, access) {
            Ok(core) => Ok(Registered { core, storage: ManuallyDrop::new(storage) }),
            Err(error) => Err(RegisterError { error, storage }),
        }
    }

    /// The storage.
    pub fn storage(&self) -> &S {
        &self.storage
    }

    /// The storage, mutably. Safe code cannot have it: what is registered could be swapped for something else, and be freed.
    ///
    /// ```compile_fail,E0133
    /// use towline::{Access, Endpoint, SystemStorage};
    /// let mut region = Endpoint::open("swap")?.register(SystemStorage::new(64)?, Access::READ)?;
    /// let freed = std::mem::replace(region.storage_mut(), SystemStorage::new(64)?);
    /// # Ok::<(), towline::Error>(())
    /// ```
    ///
    /// # Safety
    /// The caller neither replaces nor frees the storage, and makes no reference to its bytes while a peer may
    /// touch them.
    #[allow(unsafe_code, reason = "the signature passes an obligation to the caller")]
    pub unsafe fn storage_mut(&mut self) -> &mut S {
        &mut self.storage
    }

    /// Whether peers can reach it: false once it was revoked.
    pub fn is_registered(&self) -> bool {
        !self.core.is_closed()
    }

    /// What peers may do with it.
    pub fn access(&self) -> Access {
        self.core.access
    }

    /// Where the bytes live.
    pub fn place(&self) -> Place {
        self.core.place
    }

    /// The number of this registration; the endpoint never uses it again.
    pub fn generation(&self) -> u64 {
        self.core.generation
    }

    /// What the user's channel carries to another worker: who, where, which region.
    pub fn ticket(&self) -> Result<Ticket> {
        self.core.ticket(None)
    }

    /// A ticket that names the region's blocks by a layout.
    pub fn ticket_with_layout(&self, layout: Layout) -> Result<Ticket> {
        layout.fits(self.core.len as u64)?;
        self.core.ticket(Some(layout))
    }

    /// Who used the region and who was refused, as far as the owner can see.
    pub fn audit(&self) -> Audit {
        if fork::in_child() { Audit::default() } else { self.core.ledger.audit() }
    }

    /// A checked part of the region.
    pub fn span(&self, offset: usize, len: usize) -> Result<Span> {
        Span::whole(&self.core).span(offset, len)
    }

    /// Copies bytes out of the region. Peers may be writing them: a word may be old or new, never invented.
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        self.storage.read_at(offset, into)
    }

    /// Copies bytes into the region.
    pub fn write_at(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.storage.write_at(offset, from)
    }

    /// Waits until the 64-bit counter at that offset is at least that high, and returns it.
    ///
    /// Counters are raised by [`Request::signal`](crate::Request::signal); all bytes that were written before a
    /// signal are visible when this returns.
    pub fn wait_signal(&self, offset: usize, at_least: u64, within: Duration) -> Result<u64> {
        fork::guard("wait_signal")?;
        signal::wait(&self.core, offset, at_least, within)
    }

    /// The row and the generation: what names the registration to the endpoint.
    pub(crate) fn place_in_table(&self) -> (u32, u64) {
        (self.core.row, self.core.generation)
    }

    /// Revokes, and drops the storage and then `after` once nobody is inside the memory any more.
    pub(crate) fn release_then(self, after: impl Any + Send) {
        if fork::in_child() {
            std::mem::forget((self, after));
            return;
        }
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is never used or dropped again, so storage and core are each moved out once.
        #[allow(unsafe_code, reason = "moves the fields out of a type that has a Drop")]
        let (core, storage) =
            unsafe { (std::ptr::read(&raw const this.core), ManuallyDrop::take(&mut this.storage)) };
        RegionCore::release_or_park(&core, (storage, after));
    }

    /// Deregisters and gives the storage back, waiting for peers that are inside a copy.
    pub fn into_storage(self) -> Result<S, StillPinned<S>> {
        let within = self.core.registry.no_progress();
        self.into_storage_within(within)
    }

    /// [`into_storage`](Self::into_storage) with a limit of its own.
    pub fn into_storage_within(self, within: Duration) -> Result<S, StillPinned<S>> {
        if let Err(error) = fork::guard("into_storage").and_then(|()| self.core.take_back(within)) {
            return Err(StillPinned { error, registration: self });
        }
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is never used or dropped again, so storage and core are each moved out once.
        #[allow(unsafe_code, reason = "moves the fields out of a type that has a Drop")]
        unsafe {
            std::ptr::drop_in_place(&raw mut this.core);
            Ok(ManuallyDrop::take(&mut this.storage))
        }
    }
}

impl<S: Storage> Drop for Registered<S> {
    fn drop(&mut self) {
        if fork::in_child() {
            return;
        }
        // SAFETY: this is the only place besides `into_storage` that takes it, and `into_storage` forgets `self`.
        #[allow(unsafe_code, reason = "takes the storage out of its ManuallyDrop")]
        let storage = unsafe { ManuallyDrop::take(&mut self.storage) };
        RegionCore::release_or_park(&self.core, storage);
    }
}

impl<S: Storage> MemoryDescription for Registered<S> {
    fn addr(&self) -> usize {
        self.core.addr
    }

    fn size(&self) -> usize {
        self.core.len
    }

    fn storage_kind(&self) -> StorageKind {
        self.storage.storage_kind()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn nixl_descriptor(&self) -> Option<NixlDescriptor> {
        self.is_registered().then(|| self.descriptor())
    }
}

impl<S: Storage> RegisteredView for Registered<S> {
    fn agent_name(&self) -> &str {
        self.core.registry.name()
    }

    fn descriptor(&self) -> NixlDescriptor {
        let (mem_type, device_id) = match self.core.place {
            Place::Host => (MemType::Dram, 0),
            Place::Cuda(device) => (MemType::Vram, u64::from(device)),
            Place::Disk => (MemType::File, self.core.file.as_ref().map_or(0, FileSlice::number)),
        };
        NixlDescriptor { addr: self.core.addr as u64, size: self.core.len, mem_type, device_id }
    }
}

impl<S: Storage> fmt::Debug for Registered<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registered")
            .field("storage", &*self.storage)
            .field("access", &self.core.access)
            .field("generation", &self.core.generation)
            .field("registered", &self.is_registered())
            .finish()
    }
}

/// A checked part of a registered storage. It does not keep the registration from being dropped; a transfer that
/// uses it does.
#[derive(Clone)]
pub struct Span {
    core: Arc<RegionCore>,
    offset: usize,
    len: usize,
}

impl Span {
    pub(crate) fn whole(core: &Arc<RegionCore>) -> Span {
        Span { core: Arc::clone(core), offset: 0, len: core.len }
    }

    /// A part of this part.
    pub fn span(&self, offset: usize, len: usize) -> Result<Span> {
        match offset.checked_add(len) {
            Some(end) if len > 0 && end <= self.len => {
                Ok(Span { core: Arc::clone(&self.core), offset: self.offset + offset, len })
            }
            _ => Err(Error::invalid(
                "span",
                format!("{len} bytes at offset {offset} do not lie within {} bytes", self.len),
            )),
        }
    }

    /// How many bytes it names.
    #[allow(clippy::len_without_is_empty, reason = "a span is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

    pub(crate) fn core(&self) -> &Arc<RegionCore> {
        &self.core
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Span({}..{} of {} bytes)", self.offset, self.offset + self.len, self.core.len)
    }
}

impl<S: Storage> From<&Registered<S>> for Span {
    fn from(region: &Registered<S>) -> Span {
        Span::whole(&region.core)
    }
}

impl From<&Span> for Span {
    fn from(span: &Span) -> Span {
        span.clone()
    }
}

impl<T> fmt::Debug for RegisterError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RegisterError({:?})", self.error)
    }
}

impl<T> fmt::Display for RegisterError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T> std::error::Error for RegisterError<T> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

impl<T> From<RegisterError<T>> for Error {
    fn from(failed: RegisterError<T>) -> Error {
        failed.error
    }
}

impl<S: Storage> fmt::Debug for StillPinned<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StillPinned({:?})", self.error)
    }
}

impl<S: Storage> fmt::Display for StillPinned<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<S: Storage> std::error::Error for StillPinned<S> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

impl<S: Storage> From<StillPinned<S>> for Error {
    fn from(pinned: StillPinned<S>) -> Error {
        pinned.error
    }
}

/// The error of everything that acts on words, where the bytes are in a file or on a GPU.
pub(crate) fn no_words(op: &'static str, place: Place) -> Error {
    let at = if place == Place::Disk { "in a file" } else { "on a GPU" };
    Error::new(Kind::Unsupported, op, format!("the bytes are {at}, which takes reads and writes only"))
}
