//! Windows: memory that all ranks of a communicator have registered together, accessed by any of them.

mod access;
mod blocks;
mod buffer;
mod core;
mod lane;
mod memory;
mod operation;
mod register;
mod view;

use std::fmt;
use std::ops::BitOr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use towline::{HugePages, SharedStorage};

pub use self::buffer::RegisteredBuffer;
pub(crate) use self::buffer::{BUFFER_BIT, Buffers};
pub(crate) use self::core::{Way, WindowCore, Windows};
pub(crate) use self::lane::{Lane, Task};
pub use self::memory::Memory;
pub(crate) use self::operation::Completion;
pub use self::operation::Operation;
pub(crate) use self::register::share_buffers;
pub use self::view::{Epoch, PeerView};
use crate::communicator::Inner;
use crate::cuda::{self, Cuda};
use crate::{Error, Result};

/// How a window is registered. Flags combine by `|`.
///
/// ```
/// use towline_comm::WindowFlag;
/// let flags = WindowFlag::COLL_SYMMETRIC | WindowFlag::STRICT_ORDERING;
/// assert_eq!(flags.bits(), 3);
/// assert!(flags.contains(WindowFlag::COLL_SYMMETRIC));
/// assert!(WindowFlag::from_bits(1 << 20).is_none());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct WindowFlag(u32);

impl WindowFlag {
    /// Default window registration.
    pub const DEFAULT: WindowFlag = WindowFlag(0);
    /// The buffers lie at equal offsets in their allocations on all ranks; checked.
    pub const COLL_SYMMETRIC: WindowFlag = WindowFlag(1);
    /// Puts to one peer become visible in the order in which they were asked for.
    pub const STRICT_ORDERING: WindowFlag = WindowFlag(2);

    /// The flags as bits: 1 and 2.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// The flags with those bits; `None` where an unknown bit is set.
    pub const fn from_bits(bits: u32) -> Option<WindowFlag> {
        if bits & !3 == 0 { Some(WindowFlag(bits)) } else { None }
    }

    /// Whether every flag in `other` is set.
    pub const fn contains(self, other: WindowFlag) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for WindowFlag {
    type Output = WindowFlag;

    fn bitor(self, other: WindowFlag) -> WindowFlag {
        WindowFlag(self.0 | other.0)
    }
}

/// How a window is registered: flags, and what the ranks may differ in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WindowOptions {
    /// The flags; equal on all ranks.
    pub flags: WindowFlag,
    /// Whether the ranks' buffers may have different sizes; equal on all ranks.
    pub unequal_sizes: bool,
}

impl From<WindowFlag> for WindowOptions {
    fn from(flags: WindowFlag) -> WindowOptions {
        WindowOptions { flags, unequal_sizes: false }
    }
}

/// Allocates memory that windows map without copies: shared memory, zeroed, in huge pages where the kernel has them.
pub fn mem_alloc(size: usize) -> Result<SharedStorage> {
    let allocated = SharedStorage::options().huge_pages(HugePages::Try).allocate(size);
    Ok(allocated.map_err(|error| error.during("mem_alloc"))?)
}

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
pub(crate) enum Engine {
    Host(Arc<Inner>, Arc<Slot>),
    Nccl(towline::nccl::Window, Arc<Cuda>),
}

/// Where a window comes to be: empty until the registration has ended.
pub(crate) struct Slot {
    core: OnceLock<Arc<WindowCore>>,
    closed: AtomicBool,
    size: usize,
}

impl Window {
    #[inline]
    pub(crate) fn on_device(window: towline::nccl::Window, cuda: Arc<Cuda>) -> Window {
        Window { engine: Engine::Nccl(window, cuda) }
    }

    /// The communicator, where it is on the host.
    fn host(&self, op: &'static str) -> Result<&Arc<Inner>> {
        self.on_host(op).map(|(inner, _)| inner)
    }

    fn on_host(&self, op: &'static str) -> Result<(&Arc<Inner>, &Slot)> {
        match &self.engine {
            Engine::Host(inner, slot) => Ok((inner, slot)),
            Engine::Nccl(..) => Err(crate::group::poison(cuda::lacks(op))),
        }
    }

    fn core(&self, op: &'static str) -> Result<&Arc<WindowCore>> {
        let (_, slot) = self.on_host(op)?;
        if slot.closed.load(Ordering::Acquire) {
            return Err(self::core::closed(op));
        }
        match slot.core.get() {
            Some(core) if !core.is_closed() => Ok(core),
            Some(_) => Err(self::core::closed(op)),
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
            // Sizes are equal on all ranks: NCCL does not tell others.
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
            Engine::Host(inner, slot) => close_on_host(inner, slot),
            Engine::Nccl(window, _) => {
                if let Err(error) = window.close() {
                    not_closed(&error);
                }
            }
        }
    }
}

fn close_on_host(inner: &Inner, slot: &Slot) {
    if towline::fork_guard("close").is_err() || slot.closed.swap(true, Ordering::AcqRel) {
        return;
    }
    inner.wait_idle();
    if let Some(core) = slot.core.get() {
        inner.windows().remove(core.id());
        core.close();
        inner.windows().release_ended();
    }
}

#[cold]
fn not_closed(error: &towline::Error) {
    // A forked child closes nothing, and need not be told.
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
