//! Memory that takes part in operations.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::{Connector, Device, DeviceKind};
use crate::cuda::{Mark, StreamHandle};
use crate::identity::Incarnation;
use crate::memory::{Buffer, MemoryDescription, Place, Storage};
use crate::region::Registered;
use crate::{Access, Endpoint, Error, Kind, Layout, Result};

/// Memory that takes part in operations: where it is, how long it is, and whether it is registered.
///
/// Clones are the same descriptor. It keeps the storage alive. An operation registers it for as long as the operation
/// lasts; what the user has registered by [`register_memory`](Self::register_memory) stays so until the user
/// says otherwise.
///
/// ```
/// use towline::connect::{Connector, Descriptor, Device};
/// use towline::SystemStorage;
/// let descriptor = Descriptor::new(SystemStorage::new(1 << 20)?).with_size(1000)?;
/// assert_eq!((descriptor.size(), descriptor.device()), (1000, Device::HOST));
///
/// let connector = Connector::new()?;
/// descriptor.register_memory(&connector)?;
/// descriptor.register_memory(&connector)?;          // the second time changes nothing
/// assert!(descriptor.is_registered());
/// # Ok::<(), towline::Error>(())
/// ```
#[derive(Clone)]
pub struct Descriptor(Arc<Inner>);

struct Inner {
    memory: Memory,
    device: Device,
    /// Which bytes of the memory are meant, and in which order; all of them where there is none.
    layout: Option<Layout>,
    /// How many bytes there are; `size` of them are used.
    capacity: usize,
    size: AtomicUsize,
    read_only: AtomicBool,
    /// Work of a GPU that fills the memory, or uses it still.
    mark: Mutex<Option<Mark>>,
    bound: Mutex<Bound>,
}

enum Memory {
    Storage(Buffer),
    /// Memory that no path reaches: only its address is known.
    Foreign(usize),
}

/// To whom the memory is registered, and for whom.
#[derive(Default)]
struct Bound {
    to: Option<(Incarnation, String)>,
    /// The user's own registration.
    explicit: Option<Registered<Buffer>>,
    /// Operations that use it now; each has a registration of its own.
    uses: usize,
}

impl Descriptor {
    /// Describes a storage, or a [`Buffer`] that shares one.
    pub fn new(storage: impl Storage) -> Descriptor {
        let device = storage.place().into();
        let size = storage.size();
        Descriptor::build(Memory::Storage(Buffer::new(storage)), device, size, None)
    }

    /// Describes memory that no path of this library reaches, such as an XPU's. It can be shown, not registered.
    pub fn foreign(ptr: usize, size: usize, device: Device) -> Descriptor {
        Descriptor::build(Memory::Foreign(ptr), device, size, None)
    }

    /// Describes a view of a storage: the blocks of the layout, one after the other. It can be read, not written.
    ///
    /// Its size is that of the packed blocks, and that many bytes the other side receives or is sent. All of the storage is
    /// registered, and the peer that claims the operation could read the gaps too.
    ///
    /// ```
    /// use towline::connect::{Connector, Descriptor};
    /// use towline::{Buffer, Layout, MemoryAccess, SharedStorage, SystemStorage};
    /// let connector = Connector::new()?;
    /// let matrix = Buffer::new(SharedStorage::new(12)?);
    /// matrix.write_at(0, b"abcdefghijkl")?;
    ///
    /// // 3 rows of 4: the column in the middle, and the matrix transposed.
    /// let columns = [Layout::blocks(1, 2, 3, 4)?, Layout::strided(1, &[4, 3], &[1, 4])?];
    /// for (layout, expected) in columns.into_iter().zip(["bcfgjk", "aeibfjcgkdhl"]) {
    ///     let view = Descriptor::strided(matrix.clone(), layout)?;
    ///     let target = Descriptor::new(SystemStorage::new(view.size())?);
    ///     let readable = connector.create_readable(view)?;
    ///     connector.begin_read(&readable.metadata()?, &target)?.wait(None)?;
    ///     let mut bytes = vec![0; target.size()];
    ///     target.storage().unwrap().read_at(0, &mut bytes)?;
    ///     assert_eq!(bytes, expected.as_bytes());
    /// }
    /// # Ok::<(), towline::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Invalid` when the layout reaches beyond the storage, or when its blocks overlap or interleave.
    pub fn strided(storage: impl Storage, layout: Layout) -> Result<Descriptor> {
        Descriptor::new(storage).through(layout)
    }

    /// Another descriptor of the same memory, seen through a layout: see [`strided`](Self::strided).
    pub fn through(&self, layout: Layout) -> Result<Descriptor> {
        let whole = match &self.0.memory {
            Memory::Storage(storage) => storage.size(),
            Memory::Foreign(_) => self.0.capacity,
        };
        let size = layout
            .fits(whole as u64)
            .and_then(|()| layout.check_disjoint())
            .and_then(|()| layout.packed_len())
            .map_err(|error| error.during("descriptor"))?;
        // It fits: blocks that share no bytes are together no longer than the storage.
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        let memory = match &self.0.memory {
            Memory::Storage(storage) => Memory::Storage(storage.clone()),
            Memory::Foreign(ptr) => Memory::Foreign(*ptr),
        };
        let seen = Descriptor::build(memory, self.0.device, size, Some(layout)).read_only();
        *seen.0.mark.lock() = self.0.mark.lock().clone();
        Ok(seen)
    }

    fn build(memory: Memory, device: Device, size: usize, layout: Option<Layout>) -> Descriptor {
        Descriptor(Arc::new(Inner {
            memory,
            device,
            layout,
            capacity: size,
            size: AtomicUsize::new(size),
            read_only: AtomicBool::new(false),
            mark: Mutex::default(),
            bound: Mutex::default(),
        }))
    }

    /// Uses only the first bytes: [`set_size`](Self::set_size) while building.
    pub fn with_size(self, size: usize) -> Result<Descriptor> {
        self.set_size(size)?;
        Ok(self)
    }

    /// Uses only the first bytes from now on. What an operation offers is what this says when its
    /// metadata is asked for.
    pub fn set_size(&self, size: usize) -> Result<()> {
        if size == 0 || size > self.0.capacity {
            let message = format!("size {size} is not within 1 to {} bytes of the storage", self.0.capacity);
            return Err(Error::invalid("descriptor", message));
        }
        self.0.size.store(size, Ordering::Release);
        Ok(())
    }

    /// Refuses to be written from now on: it can be offered for reading and be the source of a write.
    #[must_use]
    pub fn read_only(self) -> Descriptor {
        self.0.read_only.store(true, Ordering::Release);
        self
    }

    /// Lets every operation from now on wait for that point of a GPU's work before it touches the memory: what the library
    /// that has the memory says of it, as arrays do by `__cuda_array_interface__` and DLPack.
    pub fn set_mark(&self, mark: Mark) {
        *self.0.mark.lock() = Some(mark);
    }

    /// What operations wait for, where that has not happened yet.
    pub(super) fn mark(&self) -> Option<Mark> {
        let mut mark = self.0.mark.lock();
        if mark.as_ref().is_some_and(|mark| mark.has_happened().unwrap_or(false)) {
            *mark = None;
        }
        mark.clone()
    }

    /// Whether it refuses to be written.
    pub fn is_read_only(&self) -> bool {
        self.0.read_only.load(Ordering::Acquire)
    }

    /// Where the memory lives.
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// How many bytes of it are used.
    pub fn size(&self) -> usize {
        self.0.size.load(Ordering::Acquire)
    }

    /// How many bytes there are.
    pub fn capacity(&self) -> usize {
        self.0.capacity
    }

    /// The address of the first byte in this process.
    pub fn ptr(&self) -> usize {
        let first = match &self.0.memory {
            Memory::Storage(storage) => storage.addr(),
            Memory::Foreign(ptr) => *ptr,
        };
        first + self.0.layout.as_ref().map_or(0, |layout| layout.base() as usize)
    }

    /// The layout through which it is seen, where it is a [`strided`](Self::strided) one.
    pub fn layout(&self) -> Option<&Layout> {
        self.0.layout.as_ref()
    }

    /// The storage; none for [`foreign`](Self::foreign) memory.
    pub fn storage(&self) -> Option<&Buffer> {
        match &self.0.memory {
            Memory::Storage(storage) => Some(storage),
            Memory::Foreign(_) => None,
        }
    }

    /// Whether it is registered: by the user, or by an operation that has not ended.
    pub fn is_registered(&self) -> bool {
        let bound = self.0.bound.lock();
        bound.uses > 0 || bound.explicit.as_ref().is_some_and(Registered::is_registered)
    }

    /// Registers the memory until [`deregister_memory`](Self::deregister_memory), whatever operations come and go.
    ///
    /// Again with the same connector changes nothing; with another one it is `Invalid` while the memory is registered.
    pub fn register_memory(&self, connector: &Connector) -> Result<()> {
        let endpoint = connector.endpoint()?;
        let mut bound = self.bind(&endpoint)?;
        if bound.explicit.is_none() {
            // Nobody gets a ticket to this one: it stands for what transports keep prepared.
            bound.explicit = Some(self.register(&endpoint, Access::NONE)?);
        }
        Ok(())
    }

    /// Takes back what [`register_memory`](Self::register_memory) did; operations that use the memory go on.
    pub fn deregister_memory(&self, connector: &Connector) -> Result<()> {
        let mut bound = self.0.bound.lock();
        let explicit = match (&bound.to, &bound.explicit) {
            (Some((to, name)), Some(_)) => {
                if !connector.is_open_as(to) {
                    return Err(elsewhere(name));
                }
                bound.explicit.take()
            }
            _ => None,
        };
        bound.unbind_if_unused();
        drop(bound);
        drop(explicit);
        Ok(())
    }

    /// Registers it for one operation.
    pub(super) fn enlist(&self, endpoint: &Endpoint, access: Access) -> Result<(Registered<Buffer>, Use)> {
        let mut bound = self.bind(endpoint)?;
        let region = self.register(endpoint, access)?;
        bound.uses += 1;
        Ok((region, Use(self.clone())))
    }

    fn register(&self, endpoint: &Endpoint, access: Access) -> Result<Registered<Buffer>> {
        match &self.0.memory {
            Memory::Storage(storage) if storage.place() != Place::Disk => {
                endpoint.register(storage.clone(), access).map_err(|failed| failed.error)
            }
            _ => Err(Error::new(
                Kind::Unsupported,
                "register",
                format!("memory on {} cannot be registered: no path here reaches it", self.0.device),
            )),
        }
    }

    fn bind(&self, endpoint: &Endpoint) -> Result<parking_lot::MutexGuard<'_, Bound>> {
        let identity = endpoint.identity();
        let mut bound = self.0.bound.lock();
        // A connector that was closed has taken its registrations with it.
        if bound.explicit.as_ref().is_some_and(|region| !region.is_registered()) {
            bound.explicit = None;
        }
        bound.unbind_if_unused();
        match &bound.to {
            Some((to, name)) if *to != identity.incarnation => return Err(elsewhere(name)),
            _ => bound.to = Some((identity.incarnation, identity.name.clone())),
        }
        Ok(bound)
    }
}

impl Bound {
    fn unbind_if_unused(&mut self) {
        if self.uses == 0 && self.explicit.is_none() {
            self.to = None;
        }
    }
}

fn elsewhere(name: &str) -> Error {
    Error::invalid("register", format!("the descriptor is registered with another connector, {name}"))
}

impl From<Buffer> for Descriptor {
    fn from(buffer: Buffer) -> Descriptor {
        let (device, size) = (buffer.place().into(), buffer.size());
        Descriptor::build(Memory::Storage(buffer), device, size, None)
    }
}

impl fmt::Debug for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Descriptor(ptr={:#x}, size={}, device={})", self.ptr(), self.size(), self.device())
    }
}

/// One operation's use of a descriptor.
pub(super) struct Use(Descriptor);

impl Drop for Use {
    fn drop(&mut self) {
        if crate::fork::in_child() {
            return;
        }
        let mut bound = self.0.0.bound.lock();
        bound.uses -= 1;
        bound.unbind_if_unused();
    }
}

/// One descriptor or several, as operations take them, and the CUDA stream that the operation is in order with, if there is
/// one.
#[derive(Debug, Clone)]
pub struct Descriptors {
    pub(super) list: Vec<Descriptor>,
    pub(super) stream: Option<StreamHandle>,
}

impl Descriptors {
    /// Puts the operation into the order of a CUDA stream. The host waits for none of it.
    ///
    /// * What is offered, to be read or to be written, is claimed only when the work is done that is queued there by now: a
    ///   peer that comes early waits.
    /// * A read or a write begins when the work is done that is queued there by now, and what is queued there after it
    ///   has begun waits for its bytes. The GPU must be able to copy by itself, as
    ///   [`Request::stream`](crate::Request::stream) says; otherwise the operation ends with `Unsupported`.
    ///
    /// ```no_run
    /// use towline::connect::{Connector, Descriptor, Descriptors};
    /// use towline::cuda::StreamHandle;
    /// # fn raw_stream() -> usize { 1 }
    /// # let (connector, storage) = (Connector::new()?, towline::memory::DeviceStorage::new(4096, 0)?);
    /// let embeddings = Descriptors::from(Descriptor::new(storage));
    /// // SAFETY: the stream lives longer than the operation.
    /// let embeddings = unsafe { embeddings.stream(StreamHandle(raw_stream())) };
    /// let readable = connector.create_readable(embeddings)?;     // kernels may still be writing them
    /// # Ok::<(), towline::Error>(())
    /// ```
    ///
    /// # Safety
    /// The handle is that of a live CUDA stream of this process, and stays so until the operation has ended.
    #[must_use]
    #[allow(unsafe_code, reason = "the signature passes an obligation to the caller")]
    pub unsafe fn stream(mut self, stream: StreamHandle) -> Descriptors {
        self.stream = Some(stream);
        self
    }

    /// What happens on GPUs before the operation may touch the memory, the stream apart.
    pub(super) fn marks(&self) -> Vec<Mark> {
        self.list.iter().filter_map(Descriptor::mark).collect()
    }

    /// A GPU that takes part; the first where none does.
    pub(super) fn ordinal(&self) -> u32 {
        let device = self.list.iter().map(Descriptor::device).find(|one| one.kind() == DeviceKind::Cuda);
        device.map_or(0, |device| device.id())
    }
}

impl From<Vec<Descriptor>> for Descriptors {
    fn from(list: Vec<Descriptor>) -> Descriptors {
        Descriptors { list, stream: None }
    }
}

impl From<Descriptor> for Descriptors {
    fn from(one: Descriptor) -> Descriptors {
        vec![one].into()
    }
}

impl From<&Descriptor> for Descriptors {
    fn from(one: &Descriptor) -> Descriptors {
        vec![one.clone()].into()
    }
}

impl From<&[Descriptor]> for Descriptors {
    fn from(some: &[Descriptor]) -> Descriptors {
        some.to_vec().into()
    }
}

impl From<&Vec<Descriptor>> for Descriptors {
    fn from(some: &Vec<Descriptor>) -> Descriptors {
        some.clone().into()
    }
}

impl<const N: usize> From<[Descriptor; N]> for Descriptors {
    fn from(some: [Descriptor; N]) -> Descriptors {
        Vec::from(some).into()
    }
}
