//! What a window is made of: the memory of this rank, and how the memory of every other is reached.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock};
use towline::{Buffer, Kind, MemoryDescription, Pinned, Registered, Remote, Span};

use super::{Memory, WindowFlag};
use crate::{Error, Result};

/// Memory that every rank of a communicator has registered, as one rank sees it.
pub(crate) struct WindowCore {
    id: u64,
    flags: WindowFlag,
    addr: usize,
    local: Span,
    /// What keeps this rank's memory: `None` once closed, and where the memory belongs to a registered buffer.
    region: Mutex<Option<Registered<Buffer>>>,
    peers: Vec<PeerMemory>,
    closed: AtomicBool,
}

/// The memory of one rank.
struct PeerMemory {
    len: usize,
    link: RwLock<Link>,
}

enum Link {
    Open(Arc<Remote>, OnceLock<Option<Arc<Pinned>>>),
    /// Its owner has closed it or died.
    Ended(Error),
    /// This rank has closed the window.
    Closed,
}

/// How one rank's memory is accessed.
pub(crate) enum PeerAccess {
    /// It is mapped here.
    Near(Arc<Pinned>),
    /// By requests.
    Far(Arc<Remote>),
}

/// What a window is made of, by rank.
pub(crate) struct Parts {
    pub(crate) id: u64,
    pub(crate) flags: WindowFlag,
    pub(crate) addr: usize,
    pub(crate) local: Span,
    pub(crate) region: Option<Registered<Buffer>>,
    pub(crate) peers: Vec<(usize, Remote)>,
}

impl WindowCore {
    pub(crate) fn new(parts: Parts) -> Arc<WindowCore> {
        let peers = parts
            .peers
            .into_iter()
            .map(|(len, remote)| PeerMemory {
                len,
                link: RwLock::new(Link::Open(Arc::new(remote), OnceLock::new())),
            })
            .collect();
        Arc::new(WindowCore {
            id: parts.id,
            flags: parts.flags,
            addr: parts.addr,
            local: parts.local,
            region: Mutex::new(parts.region),
            peers,
            closed: AtomicBool::new(false),
        })
    }

    /// The same on every rank; never 0.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn flags(&self) -> WindowFlag {
        self.flags
    }

    pub(crate) fn addr(&self) -> usize {
        self.addr
    }

    /// This rank's memory.
    pub(crate) fn local(&self) -> &Span {
        &self.local
    }

    /// How many bytes that rank has registered.
    pub(crate) fn len_of(&self, rank: usize) -> usize {
        self.peers.get(rank).map_or(0, |peer| peer.len)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// That rank's memory, where it is mapped here; kept until the window is closed or the owner wants it back.
    pub(crate) fn pinned(&self, rank: usize) -> Option<Arc<Pinned>> {
        match self.access(rank, "access") {
            Ok(PeerAccess::Near(pinned)) => Some(pinned),
            _ => None,
        }
    }

    /// That rank's memory, for requests. `Stale` once its owner has closed it, `Invalid` once this rank has.
    pub(crate) fn remote(&self, rank: usize) -> Result<Arc<Remote>> {
        self.linked(rank, "access", |remote, _| Arc::clone(remote))
    }

    /// How that rank's memory is accessed; looks first whether it still is what was registered.
    pub(crate) fn access(&self, rank: usize, op: &'static str) -> Result<PeerAccess> {
        let (remote, pinned) = self.linked(rank, op, |remote, pinned| {
            let pinned = pinned.get_or_init(|| remote.pin().ok().map(Arc::new)).clone();
            (Arc::clone(remote), pinned)
        })?;
        let Some(pinned) = pinned else { return Ok(PeerAccess::Far(remote)) };
        if !pinned.is_stale() {
            return Ok(PeerAccess::Near(pinned));
        }
        // The owner waits for this pin: it must go before anything else happens.
        drop(pinned);
        Err(self.ended(rank, op, &remote))
    }

    /// Keeps what follows from becoming visible before what this thread has put before, where the window is strict.
    #[inline]
    pub(crate) fn order(&self) {
        if self.flags.contains(WindowFlag::STRICT_ORDERING) {
            fence(Ordering::Release);
        }
    }

    /// Refuses a range that is not all inside that rank's memory.
    pub(crate) fn check(&self, rank: usize, offset: usize, len: usize, op: &'static str) -> Result<()> {
        if self.is_closed() {
            return Err(closed(op));
        }
        let Some(peer) = self.peers.get(rank) else {
            let ranks = self.peers.len();
            return Err(Error::invalid(op, format!("there is no rank {rank} among {ranks}")));
        };
        match offset.checked_add(len) {
            Some(end) if end <= peer.len => Ok(()),
            _ => Err(Error::invalid(
                op,
                format!("{len} bytes at offset {offset} are past the end of {} bytes", peer.len),
            )
            .about([rank])),
        }
    }

    fn linked<T>(
        &self,
        rank: usize,
        op: &'static str,
        take: impl FnOnce(&Arc<Remote>, &OnceLock<Option<Arc<Pinned>>>) -> T,
    ) -> Result<T> {
        let Some(peer) = self.peers.get(rank) else {
            let ranks = self.peers.len();
            return Err(Error::invalid(op, format!("there is no rank {rank} among {ranks}")));
        };
        match &*peer.link.read() {
            Link::Open(remote, pinned) => Ok(take(remote, pinned)),
            Link::Ended(error) => Err(error.clone().during(op)),
            Link::Closed => Err(closed(op)),
        }
    }

    /// Lets go of a memory whose owner has ended it, and says so from now on.
    fn ended(&self, rank: usize, op: &'static str, remote: &Remote) -> Error {
        let why = match remote.alive() {
            Err(error) => Error::from(error).about([rank]).during(op),
            Ok(()) => Error::new(Kind::Stale, op, "the rank has closed its window").about([rank]),
        };
        let mut link = self.peers[rank].link.write();
        if matches!(*link, Link::Open(..)) {
            *link = Link::Ended(why.clone());
        }
        why
    }

    /// Lets go of the memory that its owners want back; they wait for it.
    fn release_ended(&self) {
        for rank in 0..self.peers.len() {
            let ended = match &*self.peers[rank].link.read() {
                Link::Open(remote, pinned) => {
                    let stale = pinned.get().and_then(Option::as_ref).is_some_and(|pinned| pinned.is_stale());
                    stale.then(|| Arc::clone(remote))
                }
                _ => None,
            };
            if let Some(remote) = ended {
                self.ended(rank, "access", &remote);
            }
        }
    }

    /// Lets go of all other ranks' memory and takes this rank's back.
    pub(crate) fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        for peer in &self.peers {
            *peer.link.write() = Link::Closed;
        }
        let region = self.region.lock().take();
        // Frees the memory, or parks it until the ranks that hold a pin on it have noticed.
        drop(region);
    }
}

pub(crate) fn closed(op: &'static str) -> Error {
    Error::invalid(op, "the window is closed")
}

/// The open windows of one communicator.
#[derive(Default)]
pub(crate) struct Windows {
    open: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    last_id: u64,
    by_id: HashMap<u64, Arc<WindowCore>>,
}

impl Windows {
    /// The window with that id.
    pub(crate) fn find(&self, id: u64) -> Option<Arc<WindowCore>> {
        self.table().by_id.get(&id).cloned()
    }

    /// The window that holds all of those bytes of this rank, and where in it they start.
    pub(crate) fn containing(&self, storage: &Buffer) -> Option<Memory> {
        let (addr, len) = (storage.addr(), storage.size());
        let found = self.table().by_id.values().find_map(|window| {
            let offset = addr.checked_sub(window.addr())?;
            (offset.checked_add(len)? <= window.local().len()).then(|| (Arc::clone(window), offset))
        });
        found.and_then(|(window, offset)| Memory::of_window(&window, offset, len).ok())
    }

    /// The id that this rank would give next.
    pub(crate) fn next_id(&self) -> u64 {
        self.table().last_id + 1
    }

    /// Uses up an id, also when nothing came of the registration: the ranks stay in step.
    pub(crate) fn use_up(&self, id: u64) {
        let mut table = self.table();
        table.last_id = table.last_id.max(id);
    }

    /// Lets go of the memory of other ranks that its owners want back, in all windows.
    pub(crate) fn release_ended(&self) {
        let windows: Vec<_> = self.table().by_id.values().cloned().collect();
        for window in windows {
            window.release_ended();
        }
    }

    pub(crate) fn insert(&self, window: &Arc<WindowCore>) {
        self.table().by_id.insert(window.id(), Arc::clone(window));
    }

    pub(crate) fn remove(&self, id: u64) {
        self.table().by_id.remove(&id);
    }

    pub(crate) fn close_all(&self) {
        let windows: Vec<_> = self.table().by_id.drain().map(|(_, window)| window).collect();
        for window in windows {
            window.close();
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.table().by_id.len()
    }

    fn table(&self) -> parking_lot::MutexGuard<'_, Table> {
        self.open.lock()
    }
}
