//! The handle to a registered buffer.

use std::fmt;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::member::Member;
use crate::memory::{BUFFER_BIT, BufferCore, Memory};
use crate::{Error, Result};

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
    member: Weak<Member>,
    core: Mutex<Option<Arc<BufferCore>>>,
    offset: usize,
    size: usize,
}

impl RegisteredBuffer {
    pub(crate) fn new(
        member: &Arc<Member>,
        core: Arc<BufferCore>,
        offset: usize,
        size: usize,
    ) -> RegisteredBuffer {
        let (member, core) = (Arc::downgrade(member), Mutex::new(Some(core)));
        RegisteredBuffer(Engine::Host(Arc::new(OnHost { member, core, offset, size })))
    }

    #[inline]
    pub(crate) fn on_device(device: towline::nccl::RegisteredBuffer) -> RegisteredBuffer {
        RegisteredBuffer(Engine::Nccl(device))
    }

    /// The number of the registration; never 0, except on a GPU, where NCCL may have no use for it. `Invalid` once closed.
    pub fn handle(&self) -> Result<u64> {
        match &self.0 {
            Engine::Host(host) => Ok(host.core("handle")?.id() & !BUFFER_BIT),
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
        let core = self.core.lock().clone();
        let open = self.member.upgrade().is_some_and(|member| member.is_open());
        match core {
            Some(core) if open => Ok(core),
            _ => Err(closed(op)),
        }
    }

    fn close(&self) {
        if towline::fork_guard("close").is_err() {
            return;
        }
        let Some(core) = self.core.lock().take() else { return };
        if let Some(member) = self.member.upgrade() {
            member.wait_idle();
            member.memory.release_buffer(&core);
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
    // A forked child closes nothing.
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
