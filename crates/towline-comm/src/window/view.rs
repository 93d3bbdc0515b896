//! Direct access to near ranks: a view of one rank's memory, and an epoch over all of them.

use std::fmt;
use std::sync::Arc;

use towline::{Kind, Pinned};

use super::Window;
use super::access::still;
use crate::memory::{PeerAccess, WindowCore, closed};
use crate::team::Team;
use crate::{Error, Result};

/// Another rank's memory, mapped here: copies in and out without a system call. Ends when this rank closes the
/// window (`Invalid`) or the other does (`Stale`).
pub struct PeerView {
    core: Arc<WindowCore>,
    pinned: Arc<Pinned>,
    rank: usize,
}

impl Window {
    /// A view of that rank's memory, where it is shared with this process; `Unsupported` where it is not.
    pub fn peer_view(&self, rank: usize) -> Result<PeerView> {
        let core = self.checked(rank, 0, 0, "peer_view")?;
        match core.access(rank, "peer_view")? {
            PeerAccess::Near(pinned) => Ok(PeerView { core, pinned, rank }),
            PeerAccess::Far(remote) => Err(Error::new(
                Kind::Unsupported,
                "peer_view",
                format!("the rank's memory is not shared with this process (path {})", remote.path()),
            )
            .about([rank])),
        }
    }

    /// Prepares a series of small accesses: what they need is looked up once. Waits inside the epoch spin first.
    ///
    /// The owner of memory that an epoch holds can close it, but gets it back only when the epoch has noticed.
    pub fn epoch(&self) -> Result<Epoch<'_>> {
        let core = self.checked(0, 0, 0, "epoch")?;
        let team = self.host("epoch")?.team("epoch")?;
        let near = (0..team.nranks()).map(|rank| core.pinned(rank)).collect();
        Ok(Epoch { window: self, core, team, near })
    }
}

impl PeerView {
    /// The rank whose memory it is.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many bytes it has.
    #[allow(clippy::len_without_is_empty, reason = "a window is never empty")]
    pub fn len(&self) -> usize {
        self.core.len_of(self.rank)
    }

    /// Copies bytes out.
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        self.check("read_at")?;
        self.pinned.read_at(offset, into)?;
        still(&self.core, self.rank, &self.pinned, "read_at")
    }

    /// Copies bytes in.
    pub fn write_at(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.check("write_at")?;
        Ok(self.pinned.write_at(offset, from)?)
    }

    /// Reads an aligned 64-bit word; what was written before it was stored is visible.
    pub fn load(&self, offset: usize) -> Result<u64> {
        self.check("load")?;
        Ok(self.pinned.load(offset)?)
    }

    /// Writes an aligned 64-bit word, visible after everything that was written before.
    pub fn store(&self, offset: usize, value: u64) -> Result<()> {
        self.check("store")?;
        Ok(self.pinned.store(offset, value)?)
    }

    fn check(&self, op: &'static str) -> Result<()> {
        if self.core.is_closed() {
            return Err(closed(op));
        }
        still(&self.core, self.rank, &self.pinned, op)
    }
}

impl fmt::Debug for PeerView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerView").field("rank", &self.rank).field("len", &self.len()).finish()
    }
}

/// A series of small accesses to a window: everything that each needs was looked up once. Its calls run immediately, also
/// inside a group, and wait for their end.
///
/// ```
/// # let id = towline_comm::get_unique_id()?;
/// # let comm = towline_comm::Communicator::init(1, 0, &id, towline_comm::Config::default())?;
/// # let memory = towline_comm::mem_alloc(4096)?;
/// # let window = comm.register_window(memory, towline_comm::WindowFlag::DEFAULT)?.expect("windows");
/// let epoch = window.epoch()?;
/// for round in 1..=100u64 {
///     epoch.put_signal(0, 0, &round.to_ne_bytes(), 0, 0)?;
///     epoch.wait_level(0, 0, 0, round)?;
/// }
/// # Ok::<(), towline_comm::Error>(())
/// ```
pub struct Epoch<'w> {
    window: &'w Window,
    core: Arc<WindowCore>,
    team: Arc<Team>,
    near: Vec<Option<Arc<Pinned>>>,
}

impl Epoch<'_> {
    /// Copies bytes into `peer`'s memory.
    pub fn put(&self, peer: usize, offset: usize, bytes: &[u8]) -> Result<()> {
        match self.pinned(peer, "put")? {
            Some(pinned) => {
                self.core.order();
                Ok(pinned.write_at(offset, bytes)?)
            }
            None => self.window.put_bytes(peer, offset, bytes)?.wait().map(|_| ()),
        }
    }

    /// Copies bytes out of `peer`'s memory.
    pub fn get(&self, peer: usize, offset: usize, into: &mut [u8]) -> Result<()> {
        match self.pinned(peer, "get")? {
            Some(pinned) => {
                pinned.read_at(offset, into)?;
                still(&self.core, peer, pinned, "get")
            }
            None => self.window.get_bytes(peer, offset, into),
        }
    }

    /// Copies bytes into `peer`'s memory, then raises its counter of that context and index by one.
    pub fn put_signal(
        &self,
        peer: usize,
        offset: usize,
        bytes: &[u8],
        context: u32,
        index: u32,
    ) -> Result<()> {
        match self.pinned(peer, "put_signal")? {
            Some(pinned) if self.team.is_near(peer) => {
                self.core.order();
                pinned.write_at(offset, bytes)?;
                self.team.signal(peer, context, index, 1)
            }
            _ => self.window.put_signal_bytes(peer, offset, bytes, context, index)?.wait().map(|_| ()),
        }
    }

    /// Adds to a 64-bit word of `peer`'s memory and returns what it held before.
    pub fn fetch_add(&self, peer: usize, offset: usize, add: u64) -> Result<u64> {
        match self.pinned(peer, "fetch_add")? {
            Some(pinned) => Ok(pinned.fetch_add(offset, add)?),
            None => self.window.fetch_add(peer, offset, add)?.wait(),
        }
    }

    /// Waits until `peer` has raised its counter of that context and index here to `level`, counted from the start.
    #[inline]
    pub fn wait_level(&self, peer: usize, context: u32, index: u32, level: u64) -> Result<()> {
        self.team.wait_raised("wait_signal", (peer, context, index), level)
    }

    #[inline]
    fn pinned(&self, peer: usize, op: &'static str) -> Result<Option<&Arc<Pinned>>> {
        if self.core.is_closed() {
            return Err(closed(op));
        }
        let Some(pinned) = self.near.get(peer) else {
            let ranks = self.near.len();
            return Err(Error::invalid(op, format!("there is no rank {peer} among {ranks}")));
        };
        match pinned {
            Some(pinned) => {
                let open = still(&self.core, peer, pinned, op);
                open.map(|()| Some(pinned)).map_err(|error| self.team.lost(peer, error))
            }
            None => Ok(None),
        }
    }
}

impl fmt::Debug for Epoch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Epoch").field("window", self.window).finish()
    }
}
