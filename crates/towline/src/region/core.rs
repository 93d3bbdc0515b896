//! What a registration is to the rest of the library: its row, who uses it now, and how it is taken back.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::audit::Ledger;
use super::peers::PeerPins;
use super::served::Streams;
use super::{Registry, stale};
use crate::layout::Layout;
use crate::memory::lent::Pages;
use crate::memory::{FileSlice, Place, SegmentSlice, Storage, StorageKind};
use crate::notify::Inbox;
use crate::runtime::{self, Device};
use crate::ticket::{Claims, TicketBody};
use crate::wire::{Grant, SegmentRef};
use crate::{Access, Error, Kind, Result, Ticket, interrupt};

/// The top bit of the use count: no new use may begin.
const CLOSED: usize = 1 << (usize::BITS - 1);

/// One registration.
pub(crate) struct RegionCore {
    pub(crate) registry: Arc<Registry>,
    /// The endpoint: it lives as long as one of its regions.
    _keep: Arc<dyn Any + Send + Sync>,
    pub(crate) row: u32,
    pub(crate) generation: u64,
    pub(crate) addr: usize,
    pub(crate) len: usize,
    pub(crate) place: Place,
    pub(crate) access: Access,
    pub(crate) segment: Option<SegmentSlice>,
    pub(crate) file: Option<FileSlice>,
    /// Host memory that this library neither allocated nor sealed: pages of it may go away.
    pub(crate) lent: bool,
    /// What is known of these.
    pages: Pages,
    /// Uses by this process (its own transfers, copies by endpoints of this process, serving streams).
    uses: AtomicUsize,
    /// The peers that touch the memory directly, and may hold a pin.
    direct_peers: Mutex<Vec<Arc<PeerPins>>>,
    /// The peers that reach the memory by themselves and hold no pin: they are asked to let go.
    borrowers: Mutex<Vec<Arc<dyn Borrower>>>,
    /// The sessions over which peers are served.
    pub(super) streams: Streams,
    kept: Kept,
    freed: AtomicBool,
    /// Who used it, as far as this process can see.
    pub(crate) ledger: Ledger,
    /// Where threads sleep until the memory there changes.
    waiters: Mutex<Vec<usize>>,
    revoked: OnceLock<Instant>,
}

/// What a transport keeps of a region for as long as it is registered, such as what its NIC knows of the memory.
pub(crate) trait TransportState: Any + Send + Sync {
    /// Nobody is inside the memory any more: lets go of it, before its owner does.
    fn free(&self);
}

/// What transports keep of a region: one value of each type, made when it is first asked for.
#[derive(Default)]
struct Kept(OnceLock<(Box<dyn TransportState>, Box<Kept>)>);

impl Kept {
    fn of<T: TransportState + Default>(&self) -> &T {
        let (state, others) = self.0.get_or_init(|| (Box::<T>::default(), Box::default()));
        let state: &dyn Any = &**state;
        state.downcast_ref().unwrap_or_else(|| others.of())
    }

    fn free(&self) {
        if let Some((state, others)) = self.0.get() {
            state.free();
            others.free();
        }
    }
}

/// A peer that reaches a region by itself, where no pin of it can be seen.
pub(crate) trait Borrower: Send + Sync {
    /// Asks it to let go.
    fn recall(&self);

    /// Whether it has let go, and reaches the memory no more.
    fn is_back(&self) -> bool;

    /// The peer's name.
    fn who(&self) -> &str;
}

/// Proof that the region's memory stays: taken before it is touched, given back after.
pub(crate) struct RegionUse {
    core: Arc<RegionCore>,
    released: AtomicBool,
    /// What else lasts as long: a peer's share, for example.
    _held: Option<Box<dyn Any + Send + Sync>>,
}

impl RegionUse {
    pub(crate) fn core(&self) -> &Arc<RegionCore> {
        &self.core
    }

    /// Gives it back before the drop; the holder does not touch the memory any more.
    pub(crate) fn release(&self) {
        if !self.released.swap(true, Ordering::AcqRel) {
            self.core.end_use();
        }
    }
}

impl Drop for RegionUse {
    #[inline]
    fn drop(&mut self) {
        // Nobody else can give it back any more.
        if !*self.released.get_mut() {
            self.core.end_use();
        }
    }
}

impl RegionCore {
    pub(super) fn register<S: Storage>(
        registry: &Arc<Registry>,
        keep: Arc<dyn Any + Send + Sync>,
        storage: &S,
        access: Access,
    ) -> Result<Arc<RegionCore>> {
        registry.check_open("register")?;
        let (addr, len) = (storage.addr(), storage.size());
        if len == 0 {
            return Err(Error::invalid("register", "a storage of no bytes cannot be registered"));
        }
        let file = storage.file();
        if access.contains(Access::WRITE) && file.as_ref().is_some_and(|file| !file.is_writable()) {
            let message = "the file was opened for reading only, and cannot be lent for writing";
            return Err(Error::new(Kind::PermissionDenied, "register", message));
        }
        let claim = registry.table.claim(addr as u64, len as u64)?;
        let core = Arc::new(RegionCore {
            registry: Arc::clone(registry),
            _keep: keep,
            row: claim.row,
            generation: claim.generation,
            addr,
            len,
            place: storage.place(),
            access,
            segment: storage.segment(),
            lent: storage.place() == Place::Host && storage.storage_kind() == StorageKind::External,
            pages: Pages::default(),
            file,
            uses: AtomicUsize::new(0),
            direct_peers: Mutex::new(Vec::new()),
            borrowers: Mutex::new(Vec::new()),
            streams: Streams::default(),
            kept: Kept::default(),
            freed: AtomicBool::new(false),
            ledger: Ledger::new(&registry.remembered),
            waiters: Mutex::default(),
            revoked: OnceLock::new(),
        });
        registry.regions.insert(&core);
        // One that closes meanwhile revokes what it finds, or is seen here.
        if let Err(error) = registry.check_open("register") {
            core.revoke();
            core.free();
            return Err(error);
        }
        Ok(core)
    }

    /// The file system that pages come from, of lent memory that a file is mapped to.
    pub(crate) fn file_system(&self) -> Option<Device> {
        if self.lent { self.pages.file_system(self.addr..self.addr + self.len) } else { None }
    }

    /// Who has to bring pages of lent memory before those ranges, given by offset and length, can be touched; nobody where all are there.
    pub(crate) fn awaits(&self, bytes: u64, ranges: impl Iterator<Item = (u64, usize)>) -> Option<Device> {
        let ranges =
            ranges.map(|(offset, len)| self.addr + offset as usize..self.addr + offset as usize + len);
        let there = || self.pages.are_there(&(self.addr..self.addr + self.len), bytes, ranges);
        (self.lent && (self.file_system().is_some() || !there())).then(|| self.brings_pages())
    }

    /// Who brings pages of lent memory.
    pub(crate) fn brings_pages(&self) -> Device {
        self.file_system().unwrap_or(Device::Lent(self.addr))
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.uses.load(Ordering::Acquire) & CLOSED != 0
    }

    /// Begins a use by this process; `Stale` once the region was revoked.
    #[inline]
    pub(crate) fn begin_use(self: &Arc<Self>, op: &'static str) -> Result<RegionUse> {
        self.enter(op)?;
        Ok(RegionUse { core: Arc::clone(self), released: AtomicBool::new(false), _held: None })
    }

    /// [`begin_use`](Self::begin_use) that gives something else back when it ends.
    pub(crate) fn begin_use_with(
        self: &Arc<Self>,
        op: &'static str,
        held: impl Any + Send + Sync,
    ) -> Result<RegionUse> {
        self.enter(op)?;
        let (core, released) = (Arc::clone(self), AtomicBool::new(false));
        Ok(RegionUse { core, released, _held: Some(Box::new(held)) })
    }

    /// [`begin_use`](Self::begin_use) for a copy within one stack frame; pair with [`leave`](Self::leave).
    #[inline]
    pub(crate) fn enter(&self, op: &'static str) -> Result<()> {
        if self.uses.fetch_add(1, Ordering::SeqCst) & CLOSED != 0 {
            self.end_use();
            return Err(stale(op));
        }
        Ok(())
    }

    /// Ends what [`enter`](Self::enter) began.
    pub(crate) fn leave(&self) {
        self.end_use();
    }

    fn end_use(&self) {
        if self.uses.fetch_sub(1, Ordering::SeqCst) == CLOSED + 1 {
            self.registry.let_go_elsewhere();
        }
    }

    pub(crate) fn ticket(&self, layout: Option<Layout>) -> Result<Ticket> {
        crate::fork::guard("ticket")?;
        if self.is_closed() {
            return Err(stale("ticket"));
        }
        let body = TicketBody {
            identity: self.registry.identity().clone(),
            reach: self.registry.reach(),
            row: self.row,
            generation: self.generation,
            length: self.len as u64,
            place: self.place,
            access: self.access,
            issued_ms: self.registry.clock_ms(),
            layout,
        };
        Ticket::mint(&body, &self.registry.region_key(self.row, self.generation))
    }

    /// What a verified ticket gives the worker that presents it. `attached`: the segment's descriptor goes along. `offers`: the paths
    /// that the worker should ask about, a bit for each.
    pub(crate) fn grant(&self, claims: &Claims, attached: bool, offers: u8) -> Grant {
        let whole = claims.range == (0..self.len as u64);
        Grant {
            handle: 0,
            row: self.row,
            generation: self.generation,
            offset: claims.range.start,
            length: claims.range.end - claims.range.start,
            access: claims.access,
            place: self.place,
            layout: if whole { claims.layout.clone() } else { None },
            segment: self.segment.as_ref().map(|slice| SegmentRef {
                id: slice.segment.id(),
                len: slice.segment.len() as u64,
                offset: slice.offset as u64,
                attached,
            }),
            expires_in_ms: claims.expires_ms.map(|expires| expires.saturating_sub(self.registry.clock_ms())),
            offers,
        }
    }

    /// What a transport keeps of this region.
    pub(crate) fn kept<T: TransportState + Default>(&self) -> &T {
        self.kept.of()
    }

    /// Lets a peer touch the memory directly: from now on its pins are respected.
    pub(crate) fn admit(self: &Arc<Self>, peer: &Arc<PeerPins>) -> Result<()> {
        let mut peers = self.direct_peers.lock();
        if self.is_closed() {
            return Err(stale("import"));
        }
        if !peers.iter().any(|known| Arc::ptr_eq(known, peer)) {
            peers.retain(|known| !known.is_gone());
            peers.push(Arc::clone(peer));
            peer.looked_at_by(self);
        }
        Ok(())
    }

    /// Looks at the pins of that peer no more: none of them counts.
    pub(super) fn dismiss(&self, peer: &Arc<PeerPins>) {
        self.direct_peers.lock().retain(|known| !Arc::ptr_eq(known, peer));
    }

    /// Lets a peer reach the memory by itself, until it has let go.
    pub(crate) fn lend(&self, borrower: Arc<dyn Borrower>) -> Result<()> {
        let mut borrowers = self.borrowers.lock();
        if self.is_closed() {
            return Err(stale("import"));
        }
        borrowers.retain(|one| !one.is_back());
        borrowers.push(borrower);
        Ok(())
    }

    /// Refuses every access from now on; true for the call that did it.
    pub(crate) fn revoke(&self) -> bool {
        let first = self.uses.fetch_or(CLOSED, Ordering::SeqCst) & CLOSED == 0;
        if first {
            let _ = self.revoked.set(Instant::now());
            self.registry.table.revoke(self.row);
            for peer in self.direct_peers.lock().iter() {
                peer.page.drain_started();
            }
            // Outside of the lock: a borrower that replies immediately looks at the borrowers.
            let borrowers = self.borrowers.lock().clone();
            borrowers.iter().filter(|one| !one.is_back()).for_each(|one| one.recall());
            // Between the revocation and the scan of the pins: the other half is in the pins' protocol.
            fence(Ordering::SeqCst);
        }
        first
    }

    /// Whether nobody is inside the memory any more. Only meaningful after it was revoked.
    pub(crate) fn drained(&self) -> bool {
        let generation = self.generation;
        self.uses.load(Ordering::SeqCst) == CLOSED
            && self.borrowers.lock().iter().all(|one| one.is_back())
            && !self.direct_peers.lock().iter().any(|peer| peer.holds(generation))
    }

    /// Revokes and waits until nobody is inside the memory any more.
    pub(super) fn take_back(&self, within: Duration) -> Result<()> {
        self.revoke();
        self.break_streams();
        let started = Instant::now();
        loop {
            let seen = self.registry.bell.seen();
            if self.drained() {
                self.free();
                return Ok(());
            }
            if started.elapsed() >= within {
                // Since it was first asked for: a caller may wait in several turns.
                let spent = self.revoked.get().map_or(within, Instant::elapsed);
                let message = format!("still in use after {:.3} s by {}", spent.as_secs_f64(), self.users());
                return Err(Error::new(Kind::Timeout, "deregister", message));
            }
            interrupt::check("deregister")?;
            let left = within.saturating_sub(started.elapsed());
            self.registry.bell.wait(seen, runtime::later(Instant::now(), interrupt::turn(left)));
            self.registry.rung();
        }
    }

    /// A thread sleeps on the bell at that address from now on.
    pub(super) fn waits(&self, bell: usize) {
        self.waiters.lock().push(bell);
    }

    /// It does not any more.
    pub(super) fn waits_no_more(&self, bell: usize) {
        let mut waiters = self.waiters.lock();
        if let Some(one) = waiters.iter().position(|one| *one == bell) {
            waiters.swap_remove(one);
        }
    }

    pub(crate) fn has_waiters(&self) -> bool {
        !self.waiters.lock().is_empty()
    }

    /// Lets the threads that wait for a change look whether the endpoint was closed.
    pub(crate) fn wake_waiters(&self) {
        super::signal::wake_here(&self.waiters.lock());
    }

    pub(crate) fn users(&self) -> String {
        let mut users: Vec<String> = self
            .direct_peers
            .lock()
            .iter()
            .filter(|peer| peer.holds(self.generation))
            .map(|peer| format!("peer {}", peer.peer))
            .collect();
        users.extend(
            self.borrowers
                .lock()
                .iter()
                .filter(|one| !one.is_back())
                .map(|one| format!("peer {}", one.who())),
        );
        let own = self.uses.load(Ordering::SeqCst) & !CLOSED;
        if own > 0 {
            users.push(format!("{own} transfers of this process"));
        }
        if self.has_waiters() {
            users.push("threads that wait for a signal".to_owned());
        }
        users.join(", ")
    }

    fn free(&self) {
        if !self.freed.swap(true, Ordering::AcqRel) {
            for peer in self.direct_peers.lock().drain(..) {
                peer.page.drain_ended();
            }
            self.kept.free();
            self.registry.regions.remove(self.row);
            self.registry.table.free(self.row);
        }
    }

    /// What a drop does: frees the storage if nobody is inside it, otherwise parks it until that is so.
    pub(super) fn release_or_park(core: &Arc<RegionCore>, storage: impl Any + Send) {
        core.revoke();
        if !core.drained() {
            core.break_streams();
        }
        if core.drained() {
            core.free();
            return runtime::where_it_may_wait(move || drop(storage));
        }
        tracing::warn!(
            endpoint = core.registry.name(),
            generation = core.generation,
            bytes = core.len,
            users = core.users(),
            "a dropped region is still in use; its storage is parked until the users let go"
        );
        core.registry.parked.park(Parked { core: Arc::clone(core), storage: Box::new(storage) });
        Arc::clone(&core.registry).listen();
        // The last user may have let go before the storage was in its place.
        core.registry.parked.sweep();
    }
}

impl Drop for RegionCore {
    fn drop(&mut self) {
        // The last holder may be the event loop, and the last one that had its memory mapped, or its file open.
        let (segment, file) = (self.segment.take(), self.file.take());
        if segment.is_some() || file.is_some() {
            runtime::where_it_may_wait(move || drop((segment, file)));
        }
    }
}

/// A storage whose registration was dropped while a peer was inside a copy.
struct Parked {
    core: Arc<RegionCore>,
    storage: Box<dyn Any + Send>,
}

/// The storages that wait for their last users. What a peer never lets go stays here for the life of the process:
/// freeing it would let a stopped peer write into memory with another owner.
#[derive(Default)]
pub(super) struct ParkingLot {
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    parked: Vec<Parked>,
    /// What is being freed counts until it is free: its number and bytes.
    leaving: (usize, usize),
}

impl ParkingLot {
    fn park(&self, parked: Parked) {
        self.held.lock().parked.push(parked);
    }

    /// Frees what nobody uses any more.
    pub(super) fn sweep(&self) {
        let free: Vec<Parked> = {
            let mut held = self.held.lock();
            let free: Vec<Parked> = held.parked.extract_if(.., |parked| parked.core.drained()).collect();
            held.leaving.0 += free.len();
            held.leaving.1 += free.iter().map(|parked| parked.core.len).sum::<usize>();
            free
        };
        // Not under the lock: a storage's drop may be the user's code.
        for Parked { core, storage } in free {
            core.free();
            runtime::where_it_may_wait(move || {
                drop(storage);
                let mut held = core.registry.parked.held.lock();
                held.leaving.0 -= 1;
                held.leaving.1 -= core.len;
            });
        }
    }

    /// How many storages are parked, and their bytes.
    pub(super) fn load(&self) -> (usize, usize) {
        let held = self.held.lock();
        let bytes = held.parked.iter().map(|parked| parked.core.len).sum::<usize>();
        (held.parked.len() + held.leaving.0, bytes + held.leaving.1)
    }
}
