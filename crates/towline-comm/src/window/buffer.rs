//! Buffers registered by one rank: found by containment, counted, and known to the others once they are used.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use towline::{Access, Buffer, Endpoint, MemoryDescription, Registered, Span, Ticket};

use super::Memory;
use crate::communicator::Inner;
use crate::{Error, Result};

/// Set in the ids of registered buffers, so that they never equal a window's.
pub(crate) const BUFFER_BIT: u64 = 1 << 63;

/// A registered range: one for all handles to parts of it.
pub(crate) struct BufferCore {
    id: u64,
    addr: usize,
    len: usize,
    local: Span,
    region: Mutex<Option<Registered<Buffer>>>,
}

impl BufferCore {
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn addr(&self) -> usize {
        self.addr
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn local(&self) -> &Span {
        &self.local
    }

    pub(crate) fn ticket(&self, op: &'static str) -> Result<Ticket> {
        let region = self.region.lock().unwrap_or_else(PoisonError::into_inner);
        let region = region.as_ref().ok_or_else(|| Error::invalid(op, "the registered buffer is closed"))?;
        Ok(region.ticket()?)
    }

    fn close(&self) {
        let region = self.region.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(region);
    }
}

/// The registered buffers of one communicator.
#[derive(Default)]
pub(crate) struct Buffers {
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    last_id: u64,
    ranges: Vec<Range>,
}

struct Range {
    core: Arc<BufferCore>,
    handles: usize,
}

impl Buffers {
    /// Registers a buffer, or counts one more handle to a registered range that contains it.
    pub(crate) fn register(&self, endpoint: &Endpoint, storage: Buffer) -> Result<(Arc<BufferCore>, usize)> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((range, offset)) = entries.find_mut(storage.addr(), storage.size()) {
            range.handles += 1;
            return Ok((Arc::clone(&range.core), offset));
        }
        let region = endpoint.register(storage, Access::READ_WRITE)?;
        entries.last_id += 1;
        let core = Arc::new(BufferCore {
            id: BUFFER_BIT | entries.last_id,
            addr: region.addr(),
            len: region.size(),
            local: Span::from(&region),
            region: Mutex::new(Some(region)),
        });
        entries.ranges.push(Range { core: Arc::clone(&core), handles: 1 });
        Ok((core, 0))
    }

    /// The registered range that holds all of those bytes, and where in it they start.
    pub(crate) fn containing(&self, addr: usize, len: usize) -> Option<(Arc<BufferCore>, usize)> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.find_mut(addr, len).map(|(range, offset)| (Arc::clone(&range.core), offset))
    }

    /// Gives up one handle; true for the last one, which deregisters.
    fn release(&self, core: &Arc<BufferCore>) -> bool {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(index) = entries.ranges.iter().position(|range| Arc::ptr_eq(&range.core, core)) else {
            return false;
        };
        entries.ranges[index].handles -= 1;
        if entries.ranges[index].handles > 0 {
            return false;
        }
        entries.ranges.swap_remove(index);
        drop(entries);
        core.close();
        true
    }

    pub(crate) fn close_all(&self) {
        let ranges = std::mem::take(&mut self.entries.lock().unwrap_or_else(PoisonError::into_inner).ranges);
        for range in ranges {
            range.core.close();
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).ranges.len()
    }
}

impl Entries {
    fn find_mut(&mut self, addr: usize, len: usize) -> Option<(&mut Range, usize)> {
        self.ranges.iter_mut().find_map(|range| {
            let offset = addr.checked_sub(range.core.addr)?;
            (offset.checked_add(len)? <= range.core.len).then_some((range, offset))
        })
    }
}

/// A buffer registered with a communicator for zero-copy communication.
///
/// The registration keeps the buffer alive. A buffer inside a registered one shares its number and is counted: the
/// memory is deregistered with the last handle. Closing twice is harmless; dropping closes; destroying or aborting
/// the communicator closes all.
///
/// ```
/// use towline_comm::{Communicator, Config, mem_alloc};
/// # let id = towline_comm::get_unique_id()?;
/// let alone = Communicator::init(1, 0, &id, Config::default())?;
/// let buffer = alone.register_buffer(mem_alloc(1 << 20)?)?;
/// assert_ne!(buffer.handle()?, 0);
/// buffer.close();
/// assert!(buffer.handle().is_err());
/// # Ok::<(), towline_comm::Error>(())
/// ```
pub struct RegisteredBuffer(Engine);

enum Engine {
    /// Counted only because what drops a count is small: it is inlined where one on a GPU is dropped.
    Host(Arc<OnHost>),
    Nccl(towline::nccl::RegisteredBuffer),
}

struct OnHost {
    inner: Weak<Inner>,
    core: Mutex<Option<Arc<BufferCore>>>,
    offset: usize,
    size: usize,
}

impl RegisteredBuffer {
    pub(crate) fn new(
        inner: &Arc<Inner>,
        core: Arc<BufferCore>,
        offset: usize,
        size: usize,
    ) -> RegisteredBuffer {
        let (inner, core) = (Arc::downgrade(inner), Mutex::new(Some(core)));
        RegisteredBuffer(Engine::Host(Arc::new(OnHost { inner, core, offset, size })))
    }

    #[inline]
    pub(crate) fn on_device(device: towline::nccl::RegisteredBuffer) -> RegisteredBuffer {
        RegisteredBuffer(Engine::Nccl(device))
    }

    /// The number of the registration; never 0, except on a GPU, where NCCL may have no use for it. `Invalid` once closed.
    pub fn handle(&self) -> Result<u64> {
        match &self.0 {
            Engine::Host(host) => Ok(host.core("handle")?.id & !BUFFER_BIT),
            Engine::Nccl(device) => open("handle", device).map(towline::nccl::RegisteredBuffer::handle),
        }
    }

    /// How many bytes were registered; also after closing.
    pub fn size(&self) -> usize {
        match &self.0 {
            Engine::Host(host) => host.size,
            Engine::Nccl(device) => device.size(),
        }
    }

    /// Whether it is open.
    pub fn is_valid(&self) -> bool {
        match &self.0 {
            Engine::Host(host) => host.core("is_valid").is_ok(),
            Engine::Nccl(device) => !device.is_closed(),
        }
    }

    /// The buffer, for a call.
    pub fn memory(&self) -> Result<Memory> {
        match &self.0 {
            Engine::Host(host) => Memory::of_buffer(&host.core("memory")?, host.offset, host.size),
            Engine::Nccl(device) => device.memory().map(Memory::device).ok_or_else(|| closed("memory")),
        }
    }

    /// Gives up the registration, once work in flight has ended. Closing twice is harmless.
    #[inline]
    pub fn close(&self) {
        match &self.0 {
            Engine::Host(host) => host.close(),
            Engine::Nccl(device) => {
                if let Err(error) = device.close() {
                    not_closed(&error);
                }
            }
        }
    }
}

impl OnHost {
    fn core(&self, op: &'static str) -> Result<Arc<BufferCore>> {
        let core = self.core.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let open = self.inner.upgrade().is_some_and(|inner| inner.is_open());
        match core {
            Some(core) if open => Ok(core),
            _ => Err(closed(op)),
        }
    }

    fn close(&self) {
        if towline::fork_guard("close").is_err() {
            return;
        }
        let Some(core) = self.core.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        if let Some(inner) = self.inner.upgrade() {
            inner.wait_idle();
            if inner.buffers().release(&core) {
                inner.forget_buffer(core.id);
            }
        }
    }
}

impl Drop for OnHost {
    fn drop(&mut self) {
        self.close();
    }
}

fn open<'a>(
    op: &'static str,
    device: &'a towline::nccl::RegisteredBuffer,
) -> Result<&'a towline::nccl::RegisteredBuffer> {
    if device.is_closed() { Err(closed(op)) } else { Ok(device) }
}

fn closed(op: &'static str) -> Error {
    Error::invalid(op, "the registered buffer is closed")
}

#[cold]
fn not_closed(error: &towline::Error) {
    // A forked child closes nothing, and need not be told.
    if towline::fork_guard("close").is_ok() {
        tracing::error!(%error, "a registered buffer could not be closed");
    }
}

impl fmt::Debug for RegisteredBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegisteredBuffer")
            .field("handle", &self.handle().unwrap_or(0))
            .field("size", &self.size())
            .finish()
    }
}
