//! Windows: memory that all ranks of a communicator have registered together, accessed by any of them.

mod access;
mod blocks;
mod buffer;
mod view;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use towline::Buffer;

pub use self::buffer::RegisteredBuffer;
pub use self::view::{Epoch, PeerView};
use crate::cuda::{self, Cuda};
use crate::member::{Job, Member};
use crate::memory::{self, Memory, WindowCore, WindowFlag, WindowOptions};
use crate::{Error, Result, group};

/// Memory that all ranks of a communicator have registered together.
///
/// Any rank puts into, gets from and updates any rank's memory; each access is checked against the size of the
/// memory that it goes to. Registering is collective, closing is local: ranks that still access the memory get
/// `Stale`, never bytes of something else. Dropping closes; destroying or aborting the communicator closes all.
///
/// Order: puts may become visible in another order than they were asked for, until a signal, [`flush`](Self::flush) or
/// the end of their operations; unless the window was registered with [`WindowFlag::STRICT_ORDERING`]. When a signal is
/// seen, everything that its source put before it is visible.
///
/// A rank that has accessed another's memory holds it until it notices that the owner has closed its window: at its next
/// access, registration or closing. Until then the owner's memory is not freed.
///
/// ```
/// # let id = towline_comm::get_unique_id()?;
/// # let comm = towline_comm::Communicator::init(1, 0, &id, towline_comm::Config::default())?;
/// use towline_comm::{WindowFlag, mem_alloc};
/// let window = comm.register_window(mem_alloc(1 << 20)?, WindowFlag::DEFAULT)?.expect("windows");
/// window.put_bytes(0, 4096, b"bytes")?.wait()?;              // or: window.put_bytes(..)?.await
/// assert_eq!(window.fetch_add(0, 8, 5)?.wait()?, 0);
/// window.fence()?;                                           // everything of every rank has landed
/// let mut bytes = [0; 5];
/// window.get_bytes(0, 4096, &mut bytes)?;
/// assert_eq!(&bytes, b"bytes");
/// window.close();
/// # Ok::<(), towline_comm::Error>(())
/// ```
pub struct Window {
    engine: Engine,
}

/// Whose window it is.
enum Engine {
    Host(Arc<Member>, Arc<Slot>),
    Nccl(towline::nccl::Window, Arc<Cuda>),
}

/// Where a window comes to be: empty until the registration has ended.
pub(crate) struct Slot {
    core: OnceLock<Arc<WindowCore>>,
    closed: AtomicBool,
    size: usize,
}

impl Slot {
    pub(crate) fn new(size: usize) -> Arc<Slot> {
        Arc::new(Slot { core: OnceLock::new(), closed: AtomicBool::new(false), size })
    }

    /// Takes part in the registration of a window, with this rank's memory or the reason why it has none.
    pub(crate) fn register(self: Arc<Self>, storage: Result<Buffer>, options: WindowOptions) -> Job {
        Job::Call(Box::new(move |member, team| {
            let core = member.memory.register_window(team, storage, options)?;
            let _ = self.core.set(Arc::clone(&core));
            // The handle may have been closed while the registration was running.
            if self.closed.load(Ordering::Acquire) {
                member.memory.close_window(&core);
            }
            Ok(())
        }))
    }
}

impl Window {
    pub(crate) fn on_host(member: &Arc<Member>, slot: Arc<Slot>) -> Window {
        Window { engine: Engine::Host(Arc::clone(member), slot) }
    }

    #[inline]
    pub(crate) fn on_device(window: towline::nccl::Window, cuda: Arc<Cuda>) -> Window {
        Window { engine: Engine::Nccl(window, cuda) }
    }

    /// The communicator, where it is on the host.
    fn host(&self, op: &'static str) -> Result<&Arc<Member>> {
        self.slot(op).map(|(member, _)| member)
    }

    fn slot(&self, op: &'static str) -> Result<(&Arc<Member>, &Slot)> {
        match &self.engine {
            Engine::Host(member, slot) => Ok((member, slot)),
            Engine::Nccl(..) => Err(group::poison(cuda::lacks(op))),
        }
    }

    fn core(&self, op: &'static str) -> Result<&Arc<WindowCore>> {
        let (_, slot) = self.slot(op)?;
        if slot.closed.load(Ordering::Acquire) {
            return Err(memory::closed(op));
        }
        match slot.core.get() {
            Some(core) if !core.is_closed() => Ok(core),
            Some(_) => Err(memory::closed(op)),
            None => Err(Error::invalid(op, "the window is not registered yet")),
        }
    }

    /// The number of the window, equal on all ranks; 0 until it is registered (at the end of the group, or of the
    /// work of a non-blocking communicator) and once it is closed.
    pub fn handle(&self) -> u64 {
        match &self.engine {
            Engine::Nccl(window, _) => window.handle(),
            Engine::Host(..) => self.core("handle").map_or(0, |core| core.id()),
        }
    }

    /// How many bytes this rank has registered.
    pub fn size(&self) -> usize {
        match &self.engine {
            Engine::Host(_, slot) => slot.size,
            Engine::Nccl(window, _) => window.size(),
        }
    }

    /// How many bytes that rank has registered.
    pub fn size_of(&self, rank: usize) -> Result<usize> {
        if let Engine::Nccl(_, cuda) = &self.engine {
            // Sizes are equal on all ranks: NCCL does not give other sizes.
            let (_, nranks) = cuda.place("size_of")?;
            let wrong = || Error::invalid("size_of", format!("there is no rank {rank} among {nranks}"));
            return if rank < nranks { Ok(self.size()) } else { Err(wrong()) };
        }
        let core = self.core("size_of")?;
        core.check(rank, 0, 0, "size_of")?;
        Ok(core.len_of(rank))
    }

    /// The flags it was registered with.
    pub fn flags(&self) -> Result<WindowFlag> {
        match &self.engine {
            Engine::Nccl(window, _) => Ok(WindowFlag(window.flags())),
            Engine::Host(..) => Ok(self.core("flags")?.flags()),
        }
    }

    /// Whether it is registered and not closed.
    pub fn is_valid(&self) -> bool {
        self.handle() != 0
    }

    /// This rank's memory, for a call.
    pub fn memory(&self) -> Result<Memory> {
        if let Engine::Nccl(window, _) = &self.engine {
            let closed = || Error::invalid("memory", "the window is closed");
            return window.memory().map(Memory::device).ok_or_else(closed);
        }
        let core = self.core("memory")?;
        Memory::of_window(core, 0, core.local().len())
    }

    /// The path that accesses to that rank take: `inproc` and `mapped` are direct, any other is by requests.
    pub fn path(&self, rank: usize) -> Result<&'static str> {
        Ok(self.core("path")?.remote(rank)?.path())
    }

    /// Gives up the window on this rank, once its work in flight has ended. Local; closing twice is harmless.
    #[inline]
    pub fn close(&self) {
        match &self.engine {
            Engine::Host(member, slot) => close_on_host(member, slot),
            Engine::Nccl(window, _) => {
                if let Err(error) = window.close() {
                    not_closed(&error);
                }
            }
        }
    }
}

fn close_on_host(member: &Member, slot: &Slot) {
    if towline::fork_guard("close").is_err() || slot.closed.swap(true, Ordering::AcqRel) {
        return;
    }
    member.wait_idle();
    if let Some(core) = slot.core.get() {
        member.memory.close_window(core);
        member.memory.windows().release_ended();
    }
}

#[cold]
fn not_closed(error: &towline::Error) {
    // A forked child closes nothing.
    if towline::fork_guard("close").is_ok() {
        tracing::error!(%error, "a window could not be closed");
    }
}

impl Drop for Window {
    #[inline]
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Window").field("handle", &self.handle()).field("size", &self.size()).finish()
    }
}
