//! NIXL bound to one granted region.
#![allow(unsafe_code, reason = "hands addresses of registered memory to NIXL")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use towline_sys::nixl::{Descriptor, Direction, MemoryKind, Progress, TransferList};

use super::driver::Flight;
use super::engine::{Engine, Reach};
use super::files::OpenFile;
use super::lists::{Grids, Key, Requests, gridded};
use super::memory::{Known, Memory};
use super::of_nixl;
use super::peer::{Asked, PeerAgent};
use super::run::{self, Run, Sides};
use super::words::{Answer, Word};
use super::{NUMBER, NixlPath};
use crate::fence::pins::ProcessPin;
use crate::layout::Piece;
use crate::memory::Place;
use crate::region::stale;
use crate::session::{Borrowing, GrantHandle, Medium};
use crate::transfer::submission::{Link, Started, Submission};
use crate::transfer::{After, Op, Several, TransferCore};
use crate::transport::direct::misaligned;
use crate::transport::{Attachment, Offer, Transport, file, gpu, joint};
use crate::{Error, Kind, Result};

/// Lists of several parts with more blocks are planned by a worker.
const MANY: u64 = 512;

/// Requests up to this size are posted by the calling thread: on paths where posting copies, that takes as long as a copy.
pub(super) const INLINE: u64 = 1 << 20;

/// How long the calling thread stays with such a request: longer than a round trip between two processes takes, and about as
/// long as a copy that the calling thread would make by itself.
const STAY: Duration = Duration::from_micros(150);

/// A round trip over sockets takes less, where both sides have a core.
const ROUND_TRIP: Duration = Duration::from_micros(40);

/// After this many looks without an end, the owner's processor may be needed.
pub(super) const PATIENT_LOOKS: u32 = 16;

/// The owner wants the region back: the top bit of the count of what is in flight.
const RECALLED: usize = 1 << (usize::BITS - 1);

/// What is in flight to a region whose owner sees no pins; the owner is notified when it wants the region back and nothing is.
pub(super) struct Borrow {
    handle: Arc<GrantHandle>,
    in_flight: AtomicUsize,
}

impl Borrow {
    fn enter(&self, op: &'static str) -> Result<()> {
        if self.in_flight.fetch_add(1, Ordering::SeqCst) & RECALLED != 0 {
            self.leave();
            return Err(stale(op));
        }
        Ok(())
    }

    fn leave(&self) {
        if self.in_flight.fetch_sub(1, Ordering::SeqCst) == RECALLED + 1 {
            self.let_go();
        }
    }

    fn let_go(&self) {
        // Where it fails, the session has ended, and the loan with it.
        let _ = self.handle.give_back(NUMBER);
    }
}

impl Borrowing for Borrow {
    fn recalled(self: Arc<Self>) {
        if self.in_flight.fetch_or(RECALLED, Ordering::SeqCst) == 0 {
            self.let_go();
        }
    }

    fn is_idle(&self) -> bool {
        self.in_flight.load(Ordering::SeqCst) & !RECALLED == 0
    }

    fn has_let_go(&self) -> bool {
        self.in_flight.load(Ordering::SeqCst) == RECALLED
    }
}

/// Keeps the owner's memory where it is while something is in flight.
pub(super) struct PinnedRegion {
    pub(super) attachment: Arc<NixlAttachment>,
    /// Which part of a transfer it is for.
    pub(super) part: usize,
    /// The pin, where owner and user share memory; otherwise the owner waits for what is in flight.
    pin: Option<Arc<ProcessPin>>,
}

impl PinnedRegion {
    /// Whether the region was valid up to now.
    pub(super) fn check(&self, op: &'static str) -> Result<()> {
        match (&self.pin, self.attachment.handle.row()) {
            (Some(pin), Some(row)) if !pin.still_valid(row) => Err(stale(op)),
            _ => self.attachment.file.as_ref().map_or(Ok(()), |file| file.check(op)),
        }
    }
}

impl Drop for PinnedRegion {
    fn drop(&mut self) {
        if self.pin.is_none() {
            self.attachment.borrow.leave();
        }
    }
}

/// Pieces between a region and local memory, whose offsets are relative to that address.
pub(super) struct Listed<'a> {
    pub(super) of: &'a NixlAttachment,
    pub(super) memory: &'a Arc<Memory>,
    pub(super) base: usize,
    pub(super) pieces: &'a [Piece],
}

/// NIXL bound to one granted region.
pub(crate) struct NixlAttachment {
    pub(super) handle: Arc<GrantHandle>,
    pub(super) engine: Arc<Engine>,
    pub(super) peer: Arc<PeerAgent>,
    /// The granted range, as the agent that has it knows it.
    remote: Descriptor,
    kind: MemoryKind,
    /// The owner's file, where the region is one.
    file: Option<OpenFile>,
    pinned: bool,
    borrow: Arc<Borrow>,
    requests: Arc<Requests>,
    grids: Grids,
    me: Weak<NixlAttachment>,
}

impl NixlAttachment {
    /// Asks the owner for what NIXL needs, and takes it in. Blocks.
    pub(super) fn ask(
        offer: &Offer<'_>,
        handle: &Arc<GrantHandle>,
        engine: Arc<Engine>,
    ) -> Result<Arc<NixlAttachment>> {
        let pinned = handle.local_fence().is_ok();
        let borrow = Arc::new(Borrow { handle: Arc::clone(handle), in_flight: AtomicUsize::new(0) });
        // Before the owner lends it: from then on it may want it back.
        let weak = Arc::downgrade(&borrow);
        handle.borrow_by(weak);
        let reply = handle.query(NUMBER, Word::Attach { pinned }.encode(), offer.until)?;
        let answer = Answer::decode(&reply.reply)?;
        let start = answer.base.checked_add(offer.grant.offset);
        let address = start.filter(|start| start.checked_add(offer.grant.length).is_some());
        let remote = Descriptor {
            address: address.ok_or_else(|| Error::protocol("import", "the region wraps around"))?,
            length: offer.grant.length,
            device: answer.device,
        };
        let peer = PeerAgent::load(&engine, handle.session(), &answer)?;
        let on_gpu = matches!(offer.grant.place, Place::Cuda(_));
        let kind = if on_gpu { MemoryKind::Vram } else { MemoryKind::Dram };
        Ok(NixlAttachment::new(handle, engine, peer, (kind, remote), None, pinned, borrow))
    }

    /// Asks the owner for its file, and registers it with this endpoint's agent. Blocks.
    ///
    /// NIXL moves bytes of a file only for the agent in whose process it is open.
    pub(super) fn open(
        offer: &Offer<'_>,
        handle: &Arc<GrantHandle>,
        engine: Arc<Engine>,
    ) -> Result<Arc<NixlAttachment>> {
        let file = OpenFile::register(&engine, file::opened(offer, handle)?, offer.grant.length)?;
        let remote = file.range();
        let borrow = Arc::new(Borrow { handle: Arc::clone(handle), in_flight: AtomicUsize::new(0) });
        let peer = PeerAgent::own(&engine, handle.session());
        Ok(NixlAttachment::new(handle, engine, peer, (MemoryKind::File, remote), Some(file), true, borrow))
    }

    fn new(
        handle: &Arc<GrantHandle>,
        engine: Arc<Engine>,
        peer: Arc<PeerAgent>,
        (kind, remote): (MemoryKind, Descriptor),
        file: Option<OpenFile>,
        pinned: bool,
        borrow: Arc<Borrow>,
    ) -> Arc<NixlAttachment> {
        let attachment = Arc::new_cyclic(|me| NixlAttachment {
            handle: Arc::clone(handle),
            engine,
            peer: Arc::clone(&peer),
            remote,
            kind,
            file,
            pinned,
            borrow,
            requests: Arc::default(),
            grids: Grids::default(),
            me: me.clone(),
        });
        peer.attached(&attachment);
        attachment
    }

    /// What it reaches, which says which plug-ins take part.
    pub(super) fn reach(&self) -> Reach {
        if self.file.is_some() { Reach::Files } else { Reach::Memory }
    }

    fn this(&self) -> Result<Arc<NixlAttachment>> {
        self.me.upgrade().ok_or_else(|| Error::new(Kind::Internal, "transfer", "the attachment is gone"))
    }

    /// Drops what is prepared: NIXL is about to forget what it leads to.
    pub(super) fn forget_prepared(&self) {
        self.requests.clear();
        self.grids.clear();
    }

    /// Begins something, for that part of a transfer: from now on the owner's memory stays.
    pub(super) fn enter(&self, op: &'static str, part: usize) -> Result<PinnedRegion> {
        self.handle.session().alive()?;
        let attachment = self.this()?;
        if self.pinned {
            return Ok(PinnedRegion { pin: Some(self.handle.hold(op)?), attachment, part });
        }
        self.borrow.enter(op)?;
        Ok(PinnedRegion { pin: None, attachment, part })
    }

    /// Refuses a signal that the owner would refuse.
    fn check_after(&self, after: &After) -> Result<()> {
        match after.signal {
            Some(signal) if !(self.remote.address + signal.offset).is_multiple_of(8) => {
                Err(misaligned("signal", signal.offset))
            }
            _ => Ok(()),
        }
    }

    /// What follows the bytes. They are there: NIXL says so only when the owner could see them.
    pub(super) fn follow(&self, after: &After) -> Result<()> {
        if let Some(signal) = after.signal {
            self.handle.session().signal(&self.handle, signal)?;
        }
        match &after.notify {
            Some(message) => self.handle.session().notify(message),
            None => Ok(()),
        }
    }

    /// What follows no bytes.
    fn follow_alone(&self, op: Op, after: &After) -> Result<()> {
        if after.signal.is_some() {
            self.enter(op.name(), 0)?.check(op.name())?;
        }
        self.follow(after)
    }

    /// Asks the owner to do its part, unless it was asked just now.
    pub(super) fn call_for_help(&self) {
        if self.peer.is_own() {
            return;
        }
        self.peer.slow.store(true, Ordering::Relaxed);
        if self.peer.ask_now() {
            self.engine.counts.help_asked.fetch_add(1, Ordering::Relaxed);
            // Of another host's cores the owner's thread keeps clear anyway.
            let here = self.handle.session().medium == Medium::Unix;
            let core = here.then(rustix::thread::sched_getcpu).and_then(|core| u16::try_from(core).ok());
            let _ = self.handle.hint(NUMBER, Word::Help { core }.encode());
        }
    }

    /// Makes a request for pieces of regions that are reached by the same agent, of which this one is the first.
    ///
    /// # Safety
    /// The pieces' local ranges lie in the region of their `memory`, which the caller keeps until NIXL has let go of the request.
    pub(super) unsafe fn request(&self, op: Op, listed: &[Listed<'_>]) -> Result<(Asked, Option<Key>)> {
        let direction = if op == Op::Read { Direction::Read } else { Direction::Write };
        let [Listed { memory, base, pieces, .. }] = *listed else {
            // SAFETY: the caller's obligation.
            return Ok((unsafe { self.listed(direction, listed) }?, None));
        };
        if let [piece] = pieces {
            let key = Key {
                direction,
                number: memory.number,
                local: base as u64 + piece.local,
                remote: piece.remote,
                len: piece.len,
            };
            if let Some(kept) = self.requests.take(&key) {
                self.engine.counts.reused.fetch_add(1, Ordering::Relaxed);
                return Ok((kept, Some(key)));
            }
            memory.used_by(&self.requests);
            // SAFETY: the caller's obligation.
            let asked = unsafe { self.listed(direction, listed) }?;
            return Ok((asked, Some(key)));
        }
        if let Some(asked) = self.by_index(direction, memory, base, pieces)? {
            return Ok((asked, None));
        }
        // SAFETY: the caller's obligation.
        Ok((unsafe { self.listed(direction, listed) }?, None))
    }

    /// A request of prepared blocks, where the pieces are such.
    fn by_index(
        &self,
        direction: Direction,
        memory: &Arc<Memory>,
        base: usize,
        pieces: &[Piece],
    ) -> Result<Option<Asked>> {
        // Of a file, other pages may go by another descriptor.
        if self.file.is_some() {
            return Ok(None);
        }
        let (engine, local) = (&self.engine, memory.descriptor);
        let Some(found) = gridded(pieces, 0, base as u64 - local.address) else { return Ok(None) };
        let blocks = found.remote_indices.len();
        let near = memory.grids.find(engine, found.local, (memory.kind, local), blocks, None)?;
        let far =
            self.grids.find(engine, found.remote, (self.kind, self.remote), blocks, Some(&self.peer))?;
        let (Some(near), Some(far)) = (near, far) else { return Ok(None) };
        let (Some(near), Some(far)) = (near.list(), far.list()) else { return Ok(None) };
        let options = engine.options(self.reach())?;
        // SAFETY: as for `request`: the indices are those of the caller's pieces.
        let request = unsafe {
            engine.agent.request_prepared(
                direction,
                (near, &found.local_indices),
                (far, &found.remote_indices),
                &options,
            )
        };
        let request = request.map_err(|error| self.refused(error))?;
        Ok(Some(Asked::new(request, &self.peer)))
    }

    /// A request of pieces that are listed one by one.
    ///
    /// # Safety
    /// As for [`request`](Self::request).
    unsafe fn listed(&self, direction: Direction, listed: &[Listed<'_>]) -> Result<Asked> {
        let engine = &self.engine;
        let near = listed.iter().flat_map(|part| {
            let device = part.memory.descriptor.device;
            let address = |piece: &Piece| part.base as u64 + piece.local;
            part.pieces.iter().map(move |piece| Descriptor {
                address: address(piece),
                length: piece.len,
                device,
            })
        });
        let far = listed.iter().flat_map(|part| {
            let device = match &part.of.file {
                Some(file) => file.descriptor_for(part.base, part.pieces),
                None => part.of.remote.device,
            };
            let address = |piece: &Piece| part.of.remote.address + piece.remote;
            part.pieces.iter().map(move |piece| Descriptor {
                address: address(piece),
                length: piece.len,
                device,
            })
        });
        let kind = listed.first().map_or(MemoryKind::Dram, |part| part.memory.kind);
        let near = TransferList::new(&engine.nixl, kind, near).map_err(of_nixl)?;
        let far = TransferList::new(&engine.nixl, self.kind, far).map_err(of_nixl)?;
        let options = engine.options(self.reach())?;
        // SAFETY: the caller's obligation.
        let request = unsafe { engine.agent.request(direction, &near, &far, &self.peer.name, &options) }
            .map_err(|error| self.refused(error))?;
        Ok(Asked::new(request, &self.peer))
    }

    /// NIXL refuses a request: who is gone comes first, and a peer that NIXL has lost must be met again.
    fn refused(&self, error: towline_sys::Error) -> Error {
        if let Err(gone) = self.handle.session().alive() {
            return gone;
        }
        let error = of_nixl(error);
        if matches!(error.kind(), Kind::Native | Kind::NotFound) {
            self.peer.broke();
        }
        error
    }

    /// Posts a request. BYTES MOVE HERE, or begin to.
    pub(super) fn post(&self, asked: &mut Asked) -> Result<Progress> {
        self.peer.alive()?;
        if self.peer.slow.load(Ordering::Relaxed) {
            self.call_for_help();
        }
        self.engine.counts.posted.fetch_add(1, Ordering::Relaxed);
        match asked.request() {
            Some(request) => Ok(request.post(None).map_err(of_nixl)?),
            None => Err(Error::new(Kind::Internal, "transfer", "a request without a handle")),
        }
    }

    /// A request has ended well: another transfer may post it again.
    pub(super) fn keep(&self, key: Option<Key>, asked: Asked) {
        if let Some(key) = key {
            self.requests.keep(key, asked);
        }
    }

    /// Whether all parts of a submission can be in one list: over one session, between one agent and the own, and of one kind of memory
    /// on each side.
    fn is_one_list(&self, submission: &Submission<'_>) -> Result<bool> {
        let place = submission.parts.first().near().map(|near| near.place);
        for part in 0..submission.parts.len() {
            let other = submission.attached::<Self>(part)?;
            let one = place.is_some()
                && place == submission.parts[part].near().map(|near| near.place)
                && Arc::ptr_eq(&self.peer, &other.peer)
                && Arc::ptr_eq(self.handle.session(), other.handle.session())
                && self.kind == other.kind
                // That of host memory is no more than a number.
                && (self.kind == MemoryKind::Dram || self.remote.device == other.remote.device);
            if !one || other.file.is_some() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// A small request is posted by the calling thread, which stays with it for a moment.
    fn try_begin(&self, submission: &mut Submission<'_>, memory: &Arc<Memory>) -> Result<Started> {
        let (op, after) = (submission.op, &submission.after);
        let part = submission.parts.first();
        let pinned = self.enter(op.name(), 0)?;
        // The submission's own use ends with the call, where it ends in an error.
        let keep = part.near().map(|near| near.begin_use(op.name())).transpose()?;
        let listed = [Listed { of: self, memory, base: part.base, pieces: part.pieces() }];
        // SAFETY: the flight keeps that use until NIXL has let go, and the pieces were checked against the region.
        let (mut asked, key) = unsafe { self.request(op, &listed) }?;
        let mut progress = self.post(&mut asked);
        let mut looks = 0;
        let began = Instant::now();
        while let Ok(Progress::InProgress) = progress {
            let stayed = began.elapsed();
            if looks > 2 && stayed > STAY {
                break;
            }
            if looks == PATIENT_LOOKS {
                self.call_for_help();
            }
            // The owner's thread may be waiting for this very core: the kernel wakes it near the thread that asked.
            if stayed > ROUND_TRIP && !self.engine.by_rdma() {
                std::thread::yield_now();
            }
            looks += 1;
            progress = match asked.request() {
                Some(request) => request.progress().map_err(of_nixl),
                None => break,
            };
        }
        if let Ok(Progress::Done) = progress {
            self.keep(key, asked);
            pinned.check(op.name())?;
            drop((pinned, keep));
            return Ok(Started::Done(self.follow(after).map(|()| None)));
        }
        let flight = Flight::new(asked, key, Several::one(pinned), keep, progress.err());
        let this = self.this()?;
        match submission.begin_whole(Arc::clone(&this) as Arc<dyn Link>) {
            Ok(transfer) => {
                Run::flying(this, &transfer, flight);
                Ok(Started::Running(transfer))
            }
            // It goes on all the same.
            Err(error) => {
                self.engine.add(flight);
                Err(error)
            }
        }
    }
}

impl Drop for NixlAttachment {
    fn drop(&mut self) {
        if !crate::fork::in_child() {
            self.forget_prepared();
            self.peer.detach(&self.engine);
        }
    }
}

impl Link for NixlAttachment {
    fn path(&self) -> &'static str {
        NixlPath.name()
    }

    fn submit(&self, submission: &mut Submission<'_>) -> Result<Started> {
        let op = submission.op;
        let moved = matches!(op, Op::Read | Op::Write);
        let reachable = !submission.is_on_gpu() || moved && self.engine.takes_gpus(self.reach());
        let several = submission.parts.len() > 1;
        if several && !(reachable && self.is_one_list(submission)?) {
            return joint::submit(submission);
        }
        if !reachable {
            return gpu::staged(submission);
        }
        if several && submission.deferrable && submission.size()?.1 > MANY {
            return Ok(Started::Deferred);
        }
        submission.plan()?;
        let signalled = submission.after.signal.map_or(0, |signal| signal.part);
        if let Err(error) = submission.attached::<Self>(signalled)?.check_after(&submission.after) {
            submission.reached = signalled;
            return Ok(Started::Done(Err(submission.of_part(signalled, error))));
        }
        let part = submission.parts.first();
        let inline = submission.inline && submission.stream.is_none() && !several;
        if inline && part.pieces().is_empty() {
            return Ok(Started::Done(self.follow_alone(op, &submission.after).map(|()| None)));
        }
        if inline
            && part.asked().0 <= INLINE
            && part.pieces().len() == 1
            // Registering a region may take long: others do that.
            && let Some(memory) = part.near().and_then(|near| near.kept::<Known>().find(self.reach()))
        {
            return Ok(self.try_begin(submission, &memory).unwrap_or_else(|error| Started::Done(Err(error))));
        }
        let this = self.this()?;
        let mut sides = Several::one(Sides::of(Arc::clone(&this)));
        for part in 1..submission.parts.len() {
            sides.push(op.name(), Sides::of(submission.attached::<Self>(part)?.this()?))?;
        }
        let transfer = run::cut(submission, this)?;
        Run::start(sides, &transfer);
        Ok(Started::Running(transfer))
    }

    fn stop(&self, _transfer: &Arc<TransferCore>) {
        // The thread that drives looks at the transfer's flag.
        self.engine.look();
    }
}

impl Attachment for NixlAttachment {
    fn transport(&self) -> &'static dyn Transport {
        &NixlPath
    }

    fn detail(&self) -> Option<String> {
        Some(self.engine.detail(self.reach()))
    }

    fn alive(&self) -> Result<()> {
        self.handle.session().alive()?;
        self.peer.alive()
    }
}
