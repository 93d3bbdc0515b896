//! Copies that a GPU makes: between memory of GPUs, and between that and host memory.
//!
//! A path whose memory a GPU reaches says how ([`Far`]) and gets the rest from here ([`GpuAttachment`]): where both sides are
//! memory that the GPU reaches, one copy is launched in the calling thread and watched until it is done ([`flight`]); where
//! one side is host memory that it does not reach, workers pass the bytes through pinned memory ([`ring`]). Paths that know
//! host memory only serve local memory on a GPU by [`Staged`].
#![allow(unsafe_code, reason = "starts copies between addresses of registered memory")]

mod flight;
mod staged;

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use self::flight::Flight;
pub(crate) use self::staged::Staged;
use super::direct::{Direct, DirectAttachment};
use super::{Attachment, Begun, Going, Transport};
use crate::cuda::{Blocks, CopyOptions, Copying, Gpu, MemoryType, Run, StreamHandle};
use crate::fence::pins::ProcessPin;
use crate::layout::{Indexed, Piece, Plan, Side};
use crate::memory::ring::{self, Slot};
use crate::memory::{Mapping, Place, Segment};
use crate::region::{RegionCore, RegionUse, no_words, stale};
use crate::session::GrantHandle;
use crate::transfer::{After, Op, Signal, TransferCore};
use crate::wire::AtomicOp;
use crate::{Error, Kind, Result, room, runtime};

/// The calling thread stays with copies up to this size: on one GPU they end soon after the launch.
const SMALL: u64 = 64 << 20;

/// And for at most this long.
const STAY: Duration = Duration::from_micros(60);

/// Bytes that stop over in pinned memory are passed on by the calling thread up to this size: workers would take longer to wake.
const INLINE: u64 = 1 << 20;

/// Portions for the workers, where bytes go through pinned memory.
const PORTION: u64 = 16 << 20;

/// Plans of more pieces than this are not cut: that would take longer than it helps.
const MANY: usize = 64 << 10;

/// The way for a request whose local memory is on a GPU.
pub(crate) fn serving(attachment: Arc<dyn Attachment>, op: Op) -> Arc<dyn Attachment> {
    let by_gpu = if matches!(op, Op::Read | Op::Write) { attachment.by_gpu() } else { None };
    by_gpu.unwrap_or_else(|| Staged::over(attachment))
}

/// The remote side of copies that a GPU makes.
pub(crate) trait Far: Send + Sync + 'static {
    fn transport(&self) -> &'static dyn Transport;

    /// Keeps the memory where it is until the first answer is dropped, and says where that is. `Stale` once it was revoked.
    fn enter(&self, op: &'static str) -> Result<(Inside, Spot)>;

    /// What follows the bytes.
    fn follow(&self, after: &After) -> Result<()>;

    /// Whether the owner is alive as far as is known.
    fn alive(&self) -> Result<()>;
}

/// Keeps the owner's memory where it is.
pub(crate) enum Inside {
    /// A region of this process.
    Here(RegionUse),
    /// A region of another process, pinned; and what else must stay until the copy is done.
    There { _keep: Box<dyn Any + Send + Sync>, pin: Arc<ProcessPin>, handle: Arc<GrantHandle> },
}

impl Inside {
    /// Whether the region was valid up to now.
    fn check(&self, op: &'static str) -> Result<()> {
        let valid = match self {
            Inside::Here(used) => !used.core().is_closed(),
            Inside::There { pin, handle, .. } => handle.row().is_some_and(|row| pin.still_valid(row)),
        };
        if valid { Ok(()) } else { Err(stale(op)) }
    }
}

/// Where one side of a copy is.
pub(crate) struct Spot {
    /// The byte that offsets are relative to, by the address of the GPU that has it or, on the host, of this process.
    pub(crate) address: u64,
    /// The GPU whose memory it is; none on the host.
    pub(crate) gpu: Option<Arc<Gpu>>,
    /// The part of the host's memory that it is in.
    pub(crate) host: Option<HostPart>,
}

/// Host memory that a GPU may reach.
pub(crate) struct HostPart {
    pub(crate) range: Range<u64>,
    pub(crate) pinnable: Option<Pinnable>,
}

/// Host memory that can be pinned when that pays.
pub(crate) enum Pinnable {
    Segment(Arc<Segment>),
    Mapping(Arc<Mapping>),
}

impl Spot {
    /// Part of a region of this process.
    pub(crate) fn of(region: &RegionCore, address: usize) -> Result<Spot> {
        let address = address as u64;
        match region.place {
            Place::Cuda(ordinal) => Ok(Spot { address, gpu: Some(Gpu::open(ordinal)?), host: None }),
            _ => {
                let start = region.addr as u64;
                let pinnable =
                    region.segment.as_ref().map(|slice| Pinnable::Segment(Arc::clone(&slice.segment)));
                let host = HostPart { range: start..start + region.len as u64, pinnable };
                Ok(Spot { address, gpu: None, host: Some(host) })
            }
        }
    }

    /// The address by which that GPU reaches it; `None` where it does not.
    fn seen_by(&self, gpu: &Arc<Gpu>, bytes: u64) -> Result<Option<u64>> {
        let Some(HostPart { range, pinnable }) = &self.host else { return Ok(Some(self.address)) };
        let facts = gpu.facts("copy on a GPU", range.start)?;
        if let Some(facts) = facts.filter(|facts| facts.memory == MemoryType::Host) {
            let pinned = facts.start <= range.start && range.end <= facts.start.saturating_add(facts.len);
            if pinned && gpu.same_host_pointer() {
                return Ok(Some(self.address));
            }
        }
        let (start, device) = match pinnable {
            Some(Pinnable::Segment(segment)) => (segment.ptr(), segment.on_gpu(gpu, bytes)),
            Some(Pinnable::Mapping(mapping)) => (mapping.ptr(), mapping.on_gpu(gpu, bytes)),
            None => return Ok(None),
        };
        Ok(device.map(|device| device + (self.address - start.expose_provenance() as u64)))
    }
}

/// The GPU that copies between two places.
fn copier(near: &Spot, far: &Spot) -> Result<Arc<Gpu>> {
    match (&near.gpu, &far.gpu) {
        (Some(near), Some(far)) => near.reach(far).map(|()| Arc::clone(near)),
        (Some(gpu), None) | (None, Some(gpu)) => Ok(Arc::clone(gpu)),
        (None, None) => Err(Error::new(Kind::Internal, "copy on a GPU", "neither side is on a GPU")),
    }
}

/// A path over which GPUs copy, bound to a region.
pub(crate) struct GpuAttachment {
    far: Arc<dyn Far>,
    me: Weak<GpuAttachment>,
}

impl GpuAttachment {
    pub(crate) fn new(far: Arc<dyn Far>) -> Arc<GpuAttachment> {
        Arc::new_cyclic(|me| GpuAttachment { far, me: me.clone() })
    }

    /// Starts one copy of all pieces, where the GPU reaches both sides; otherwise `None`, and nothing has begun.
    ///
    /// # Safety
    /// The caller keeps the local region, in which `base` plus every piece's local range lies, until the copy is done.
    unsafe fn launch(
        &self,
        op: Op,
        near: &RegionCore,
        base: usize,
        pieces: &[Piece],
        bytes: u64,
        stream: Option<StreamHandle>,
    ) -> Result<Option<Launched>> {
        let reading = op == Op::Read;
        self.launch_by(op, near, base, bytes, stream, |gpu, ours, theirs, options| {
            let runs = pieces.iter().map(|piece| {
                let (near, far) = (ours + piece.local, theirs + piece.remote);
                let (from, to) = if reading { (far, near) } else { (near, far) };
                Run { from, to, len: piece.len }
            });
            // SAFETY: the remote side is kept, and the caller keeps the local one; the pieces were checked against both. Who
            // named a stream promised that it lives.
            unsafe { gpu.copy(runs, options) }
        })
    }

    /// Stays with a small copy for a moment.
    fn stay(&self, mut launched: Launched, bytes: u64, after: &After) -> Begun {
        let began = Instant::now();
        loop {
            match launched.look() {
                Ok(false) if bytes <= SMALL && began.elapsed() < STAY => std::hint::spin_loop(),
                Ok(false) => break,
                copied => return Begun::Ended(launched.finish(copied, after).map(|()| None)),
            }
        }
        Begun::Going(Box::new(launched))
    }

    /// [`launch`](Self::launch) for what `copy` starts, given where the two sides are for the GPU.
    fn launch_by(
        &self,
        op: Op,
        near: &RegionCore,
        base: usize,
        bytes: u64,
        stream: Option<StreamHandle>,
        copy: impl FnOnce(&Arc<Gpu>, u64, u64, &CopyOptions) -> Result<Copying>,
    ) -> Result<Option<Launched>> {
        let (inside, far) = self.far.enter(op.name())?;
        let near = Spot::of(near, base)?;
        let gpu = copier(&near, &far)?;
        let (Some(ours), Some(theirs)) = (near.seen_by(&gpu, bytes)?, far.seen_by(&gpu, bytes)?) else {
            return Ok(None);
        };
        let options = CopyOptions { bytes, host: near.host.is_some() || far.host.is_some(), after: stream };
        let copying = copy(&gpu, ours, theirs, &options)?;
        let launched =
            Launched { copying: Some(copying), inside: Some(inside), far: Arc::clone(&self.far), op };
        if let (Some(stream), Some(copying)) = (stream, &launched.copying) {
            // SAFETY: who named the stream promised that it lives. Where it fails, the value waits for the copy.
            unsafe { copying.hold(stream) }?;
        }
        Ok(Some(launched))
    }
}

/// A copy that a GPU makes now. Dropped, it waits for the end, which no peer can put off.
struct Launched {
    copying: Option<Copying>,
    inside: Option<Inside>,
    far: Arc<dyn Far>,
    op: Op,
}

impl Launched {
    /// Whether the copy is over; an error means that it is, and that the bytes are not there.
    fn look(&self) -> Result<bool> {
        self.copying.as_ref().map_or(Ok(true), Copying::is_done)
    }

    /// The copy is over: checks that the region was valid all the while, lets go of it, and does what follows.
    fn finish(&mut self, copied: Result<bool>, after: &After) -> Result<()> {
        drop(self.copying.take());
        let checked = match self.inside.take() {
            Some(inside) => inside.check(self.op.name()),
            None => Ok(()),
        };
        // An owner that is gone is the better explanation.
        copied.and(checked).map_err(|error| self.far.alive().err().unwrap_or(error))?;
        self.far.follow(after)
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        if let Some(copying) = self.copying.take()
            && !crate::fork::in_child()
        {
            let _ = copying.wait(None);
        }
    }
}

impl Going for Launched {
    fn report_to(self: Box<Self>, transfer: &Arc<TransferCore>) {
        Flight::begin(*self, transfer);
    }
}

impl Attachment for GpuAttachment {
    fn transport(&self) -> &'static dyn Transport {
        self.far.transport()
    }

    fn by_gpu(&self) -> Option<Arc<dyn Attachment>> {
        self.me.upgrade().map(|this| this as Arc<dyn Attachment>)
    }

    fn begin(
        &self,
        op: Op,
        local: &RegionUse,
        base: usize,
        pieces: &[Piece],
        bytes: u64,
        after: &After,
    ) -> Option<Begun> {
        // SAFETY: the caller keeps its use of the region until what is begun has ended; the pieces were checked against it.
        match unsafe { self.launch(op, local.core(), base, pieces, bytes, None) } {
            Ok(Some(launched)) => Some(self.stay(launched, bytes, after)),
            Ok(None) if bytes <= INLINE && Slot::is_ready() && runtime::may_block(op.name()).is_ok() => {
                let near = Near::of(local.core().place);
                let ringed = Ringed { far: Arc::clone(&self.far), near };
                // SAFETY: as above.
                let passed = unsafe { ringed.copy(op, base as *mut u8, pieces) };
                Some(Begun::Ended(passed.and_then(|()| self.far.follow(after)).map(|()| None)))
            }
            Ok(None) => None,
            Err(error) => Some(Begun::Ended(Err(error))),
        }
    }

    fn begin_blocks(
        &self,
        op: Op,
        local: &RegionUse,
        base: usize,
        blocks: &Indexed<'_>,
        after: &After,
    ) -> Option<Begun> {
        let side = |side: &Side<'_>, base: u64| -> (u64, u64, u64) {
            (base + side.base(), side.step(), side.blocks())
        };
        let launched = blocks.bytes().and_then(|bytes| {
            self.launch_by(op, local.core(), base, bytes, None, |gpu, ours, theirs, options| {
                let (at, step, count) = side(&blocks.local, ours);
                let near = Blocks { base: at, step, count, indices: blocks.local.indices() };
                let (at, step, count) = side(&blocks.remote, theirs);
                let far = Blocks { base: at, step, count, indices: blocks.remote.indices() };
                let (from, to) = if op == Op::Read { (far, near) } else { (near, far) };
                // SAFETY: the remote side is kept, and the caller keeps the local one; the layouts were checked against
                // both, and the call checks the indices against the layouts.
                unsafe { gpu.copy_blocks(&from, &to, blocks.block_len(), options) }
            })
        });
        match launched {
            Ok(launched) => Some(self.stay(launched?, blocks.bytes().unwrap_or(u64::MAX), after)),
            // Said again, and better, by who makes the list of pieces.
            Err(error) if error.kind() == Kind::Invalid => None,
            Err(error) => Some(Begun::Ended(Err(error))),
        }
    }

    unsafe fn run_now(
        &self,
        _op: Op,
        _local: *mut u8,
        pieces: &[Piece],
        _bytes: u64,
        after: &After,
    ) -> Option<Result<Option<u64>>> {
        pieces.is_empty().then(|| self.far.follow(after).map(|()| None))
    }

    fn cut(&self, op: Op, plan: Plan, _after: &After) -> Result<(Plan, Vec<Range<usize>>)> {
        let count = plan.piece_count();
        if count > MANY || plan.bytes() <= PORTION {
            return Ok((plan, std::iter::once(0..count).collect()));
        }
        let plan = plan.cut(PORTION)?;
        let units = room::collect(op.name(), plan.chunks(PORTION))?;
        Ok((plan, units))
    }

    fn start(self: Arc<Self>, transfer: &Arc<TransferCore>) {
        let launched = match &transfer.local {
            // SAFETY: the transfer keeps its use of the local region until its units have reported, and beyond that while a
            // flight is engaged in it; the plan was checked against it.
            Some(local) => unsafe {
                self.launch(
                    transfer.op,
                    local.core(),
                    transfer.local_base().addr(),
                    transfer.plan.pieces(),
                    transfer.plan.bytes(),
                    transfer.stream,
                )
            },
            None => Err(Error::new(Kind::Internal, transfer.op.name(), "a copy without a local side")),
        };
        match launched {
            Ok(Some(launched)) => Flight::begin(launched, transfer),
            Ok(None) if transfer.stream.is_some() => fail(
                transfer,
                &Error::new(
                    Kind::Unsupported,
                    transfer.op.name(),
                    "host memory that is neither pinned nor shared cannot be in the order of a stream",
                ),
            ),
            Ok(None) => {
                let far = Arc::clone(&self.far);
                let near = transfer.local.as_ref().map_or(Near::Host, |local| Near::of(local.core().place));
                Arc::new(DirectAttachment(Arc::new(Ringed { far, near }))).start(transfer);
            }
            Err(error) => fail(transfer, &error),
        }
    }

    fn stop(&self, _transfer: &Arc<TransferCore>) {
        // Whoever watches a flight looks at the transfer's flag.
    }

    fn alive(&self) -> Result<()> {
        self.far.alive()
    }
}

/// Every unit ends with that error.
fn fail(transfer: &TransferCore, error: &Error) {
    for unit in 0..transfer.units.len() {
        transfer.unit_failed(unit, error.clone());
    }
}

/// Where the local side of a transfer is.
enum Near {
    Host,
    Gpu(u32),
}

impl Near {
    fn of(place: Place) -> Near {
        match place {
            Place::Cuda(ordinal) => Near::Gpu(ordinal),
            _ => Near::Host,
        }
    }
}

/// Copies through pinned memory, by workers: one side is host memory that the GPU does not reach.
struct Ringed {
    far: Arc<dyn Far>,
    near: Near,
}

impl Direct for Ringed {
    fn transport(&self) -> &'static dyn Transport {
        self.far.transport()
    }

    unsafe fn copy(&self, op: Op, local: *mut u8, pieces: &[Piece]) -> Result<()> {
        let (inside, far) = self.far.enter(op.name())?;
        let (base, reading) = (local.expose_provenance() as u64, op == Op::Read);
        let local = |piece: &Piece| base + piece.local;
        let remote = |piece: &Piece| far.address + piece.remote;
        // SAFETY: `inside` keeps the remote side, the caller the local one; the pieces were checked against both.
        let copied = unsafe {
            match (&self.near, &far.gpu) {
                (Near::Host, Some(gpu)) => ring::pass(gpu, !reading, pieces, remote, local),
                (Near::Gpu(ordinal), _) => {
                    Gpu::open(*ordinal).and_then(|gpu| ring::pass(&gpu, reading, pieces, local, remote))
                }
                (Near::Host, None) => Err(Error::new(Kind::Internal, op.name(), "neither side is on a GPU")),
            }
        };
        copied.and(inside.check(op.name())).map_err(|error| self.far.alive().err().unwrap_or(error))
    }

    fn atomic(&self, _offset: u64, _op: AtomicOp) -> Result<u64> {
        Err(no_words("atomic", Place::Cuda(0)))
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        self.far.follow(&After { signal: Some(signal), notify: None })
    }

    fn notify(&self, message: &[u8]) -> Result<()> {
        self.far.follow(&After { signal: None, notify: Some(message.to_vec()) })
    }

    fn alive(&self) -> Result<()> {
        self.far.alive()
    }

    fn blocks(&self) -> bool {
        true
    }
}
