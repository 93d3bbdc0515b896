//! Copies that a GPU makes: between memory of GPUs, and between that and host memory.
//!
//! A path whose memory a GPU reaches says how ([`OwnerMemory`]) and gets the rest from here ([`GpuAttachment`]): where both sides are
//! memory that the GPU reaches, one copy is launched in the calling thread and watched until it is done ([`flight`]); where
//! one side is host memory that it does not reach, workers pass the bytes through pinned memory ([`ring`]). Paths that know
//! host memory only serve local memory on a GPU by [`staged`].
#![allow(unsafe_code, reason = "starts copies between addresses of registered memory")]

mod flight;
mod staged;

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use self::flight::Flight;
pub(crate) use self::staged::staged;
use super::direct::Direct;
use super::{Attachment, Transport, direct, joint};
use crate::cuda::{Blocks, CopyOptions, Copying, Gpu, MemoryType, Run};
use crate::fence::pins::ProcessPin;
use crate::layout::{Piece, Side};
use crate::memory::ring::{self, Slot};
use crate::memory::{Mapping, Place, Segment};
use crate::region::{RegionCore, RegionUse, no_words, stale};
use crate::session::GrantHandle;
use crate::transfer::submission::{Link, Started, Submission, SubmittedPart};
use crate::transfer::{After, Op, Several, Signal, TransferCore};
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

/// The remote side of copies that a GPU makes.
pub(crate) trait OwnerMemory: Send + Sync + 'static {
    fn transport(&self) -> &'static dyn Transport;

    /// Keeps the memory where it is until the first result is dropped, and says where that is. `Stale` once it was revoked.
    fn enter(&self, op: &'static str) -> Result<(PinnedRegion, CopyAddress)>;

    /// What follows the bytes.
    fn follow(&self, after: &After) -> Result<()>;

    /// Whether the owner is alive as far as is known.
    fn alive(&self) -> Result<()>;
}

/// Keeps the owner's memory where it is.
pub(crate) enum PinnedRegion {
    /// A region of this process.
    Here(RegionUse),
    /// A region of another process, pinned; and what else must stay until the copy is done.
    There { _keep: Box<dyn Any + Send + Sync>, pin: Arc<ProcessPin>, handle: Arc<GrantHandle> },
}

impl PinnedRegion {
    /// Whether the region was valid up to now.
    fn check(&self, op: &'static str) -> Result<()> {
        let valid = match self {
            PinnedRegion::Here(used) => !used.core().is_closed(),
            PinnedRegion::There { pin, handle, .. } => handle.row().is_some_and(|row| pin.still_valid(row)),
        };
        if valid { Ok(()) } else { Err(stale(op)) }
    }
}

/// Where one side of a copy is.
pub(crate) struct CopyAddress {
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

impl CopyAddress {
    /// Part of a region of this process.
    pub(crate) fn of(region: &RegionCore, address: usize) -> Result<CopyAddress> {
        let address = address as u64;
        match region.place {
            Place::Cuda(ordinal) => Ok(CopyAddress { address, gpu: Some(Gpu::open(ordinal)?), host: None }),
            _ => {
                let start = region.addr as u64;
                let pinnable =
                    region.segment.as_ref().map(|slice| Pinnable::Segment(Arc::clone(&slice.segment)));
                let host = HostPart { range: start..start + region.len as u64, pinnable };
                Ok(CopyAddress { address, gpu: None, host: Some(host) })
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
fn copier(near: &CopyAddress, far: &CopyAddress) -> Result<Arc<Gpu>> {
    match (&near.gpu, &far.gpu) {
        (Some(near), Some(far)) => near.reach(far).map(|()| Arc::clone(near)),
        (Some(gpu), None) | (None, Some(gpu)) => Ok(Arc::clone(gpu)),
        (None, None) => Err(Error::new(Kind::Internal, "copy on a GPU", "neither side is on a GPU")),
    }
}

/// A region attached to a path over which GPUs copy.
pub(crate) struct GpuAttachment {
    far: Arc<dyn OwnerMemory>,
    me: Weak<GpuAttachment>,
}

impl GpuAttachment {
    pub(crate) fn new(far: Arc<dyn OwnerMemory>) -> Arc<GpuAttachment> {
        Arc::new_cyclic(|me| GpuAttachment { far, me: Weak::clone(me) })
    }

    fn this(&self) -> Result<Arc<GpuAttachment>> {
        self.me.upgrade().ok_or_else(|| Error::new(Kind::Internal, "transfer", "the region is gone"))
    }
}

/// Where both sides of a part are for the GPU that copies, and what keeps the owner's there.
struct Sides {
    gpu: Arc<Gpu>,
    pinned: PinnedRegion,
    ours: u64,
    theirs: u64,
    host: bool,
}

/// What became of the attempt to copy by one launch.
enum Attempt {
    Launched(Launched),
    /// The GPU does not reach one side, on the host; nothing has begun.
    OutOfReach,
    /// The memory of the parts is on several GPUs; nothing has begun.
    Apart,
}

/// Finds both sides of a part; `None` where the GPU does not reach one of them.
fn sides(far: &dyn OwnerMemory, op: Op, near: &RegionCore, base: usize, bytes: u64) -> Result<Option<Sides>> {
    let (pinned, far) = far.enter(op.name())?;
    let near = CopyAddress::of(near, base)?;
    let gpu = copier(&near, &far)?;
    let (Some(ours), Some(theirs)) = (near.seen_by(&gpu, bytes)?, far.seen_by(&gpu, bytes)?) else {
        return Ok(None);
    };
    Ok(Some(Sides { gpu, pinned, ours, theirs, host: near.host.is_some() || far.host.is_some() }))
}

/// Starts one copy of all pieces of all parts, where one GPU reaches all sides.
///
/// # Safety
/// The parts' local uses, against whose regions the pieces were checked, last until the copy is done.
unsafe fn launch(regions: &Several<Arc<GpuAttachment>>, submission: &mut Submission<'_>) -> Result<Attempt> {
    let (bytes, _) = submission.size()?;
    let op = submission.op;
    // What follows the bytes is done in the region where the signal's counter lies.
    let follows = &regions[submission.after.signal.map_or(0, |signal| signal.part)];
    let (mut found, mut pinned): (Option<Sides>, Vec<PinnedRegion>) = (None, Vec::new());
    let mut runs = Vec::new();
    for (index, region) in regions.iter().enumerate() {
        submission.reached = index;
        let part = &submission.parts[index];
        let near = local_of(op, part)?;
        let attempt = sides(&*region.far, op, near, part.base, bytes);
        let Some(at) = attempt.map_err(|error| submission.of_part(index, error))? else {
            return Ok(Attempt::OutOfReach);
        };
        if found.as_ref().is_some_and(|first| !Arc::ptr_eq(&first.gpu, &at.gpu)) {
            return Ok(Attempt::Apart);
        }
        let pieces = part.pieces().iter().map(|piece| {
            let (near, far) = (at.ours + piece.local, at.theirs + piece.remote);
            let (from, to) = if op == Op::Read { (far, near) } else { (near, far) };
            Run { from, to, len: piece.len }
        });
        if regions.len() == 1 {
            let stream = submission.stream;
            let options = CopyOptions { bytes, host: at.host, after: stream };
            // SAFETY: the remote side is kept, and the caller keeps the local one; the pieces were checked against both. The caller that named a
            // stream promised that it lives.
            let copying = unsafe { at.gpu.copy(pieces, &options) }?;
            return Ok(Attempt::Launched(Launched::new(copying, region, at.pinned, Vec::new(), submission)?));
        }
        for run in pieces {
            room::push(op.name(), &mut runs, run)?;
        }
        match &mut found {
            None => found = Some(at),
            Some(first) => {
                first.host |= at.host;
                pinned.push(at.pinned);
            }
        }
    }
    let Some(first) = found else { return Ok(Attempt::OutOfReach) };
    let options = CopyOptions { bytes, host: first.host, after: submission.stream };
    // SAFETY: as above.
    let copying = unsafe { first.gpu.copy(runs, &options) }?;
    Ok(Attempt::Launched(Launched::new(copying, follows, first.pinned, pinned, submission)?))
}

/// Starts a copy of blocks by their indices, which a GPU takes as they are; `None` where the blocks are not such, or are not all there: the code that
/// makes the list of pieces says that again, and better.
///
/// # Safety
/// As for [`launch`].
unsafe fn launch_indexed(
    region: &Arc<GpuAttachment>,
    submission: &mut Submission<'_>,
) -> Result<Option<Launched>> {
    let op = submission.op;
    let part = submission.parts.first();
    let Some(blocks) = part.indexed() else { return Ok(None) };
    let (bytes, count, block_len) = (blocks.bytes()?, blocks.count(), blocks.block_len());
    let Some(at) = sides(&*region.far, op, local_of(op, part)?, part.base, bytes)? else { return Ok(None) };
    let side =
        |side: &Side<'_>, base: u64| -> (u64, u64, u64) { (base + side.base(), side.step(), side.blocks()) };
    let (base, step, all) = side(&blocks.local, at.ours);
    let near = Blocks { base, step, count: all, indices: blocks.local.indices() };
    let (base, step, all) = side(&blocks.remote, at.theirs);
    let far = Blocks { base, step, count: all, indices: blocks.remote.indices() };
    let (from, to) = if op == Op::Read { (far, near) } else { (near, far) };
    let options = CopyOptions { bytes, host: at.host, after: None };
    // SAFETY: the remote side is kept, and the caller keeps the local one; the layouts were checked against both, and the call checks the
    // indices against the layouts.
    let copying = match unsafe { at.gpu.copy_blocks(&from, &to, block_len, &options) } {
        Err(error) if error.kind() == Kind::Invalid => return Ok(None),
        copying => copying?,
    };
    submission.parts[0].moved_by_index(bytes, count, block_len)?;
    Launched::new(copying, region, at.pinned, Vec::new(), submission).map(Some)
}

fn local_of<'a>(op: Op, part: &'a SubmittedPart<'_>) -> Result<&'a RegionCore> {
    part.near()
        .map(|near| &**near)
        .ok_or_else(|| Error::new(Kind::Internal, op.name(), "a copy without a local side"))
}

/// Starts a submission whose bytes GPUs copy.
pub(super) fn submit(
    regions: &Several<Arc<GpuAttachment>>,
    submission: &mut Submission<'_>,
) -> Result<Started> {
    let region = regions.first();
    // What follows alone, and no bytes.
    if submission.parts.iter().all(|part| part.near().is_none()) {
        return Ok(Started::Done(region.far.follow(&submission.after).map(|()| None)));
    }
    let inline = submission.inline && submission.stream.is_none();
    if inline && regions.len() == 1 {
        // SAFETY: the submission holds the use of the local region, and the transfer that is made of it does, until the copy is done.
        match unsafe { launch_indexed(region, submission) } {
            Ok(Some(launched)) => return go_on(launched, submission, true),
            Ok(None) => {}
            Err(error) => return Ok(Started::Done(Err(error))),
        }
    }
    submission.plan()?;
    let (bytes, _) = submission.size()?;
    // SAFETY: as above; the pieces are checked.
    match unsafe { launch(regions, submission) } {
        Ok(Attempt::Launched(launched)) => go_on(launched, submission, inline),
        Ok(Attempt::OutOfReach | Attempt::Apart) if submission.parts.len() > 1 => joint::submit(submission),
        Ok(_) if submission.stream.is_some() => Ok(Started::Done(Err(Error::new(
            Kind::Unsupported,
            submission.op.name(),
            "host memory that is neither pinned nor shared cannot be in the order of a stream",
        )))),
        Ok(_) => pass_on(region, submission, bytes, inline),
        Err(error) => Ok(Started::Done(Err(error))),
    }
}

/// Stays with a small copy for a moment; then others look at it.
fn go_on(mut launched: Launched, submission: &mut Submission<'_>, stays: bool) -> Result<Started> {
    let (bytes, _) = submission.size()?;
    let until = stays.then(|| Instant::now() + STAY);
    while let Some(until) = until {
        match launched.look() {
            Ok(false) if bytes <= SMALL && Instant::now() < until => std::hint::spin_loop(),
            Ok(false) => break,
            copied => {
                let ended = launched.finish(copied, &submission.after).map_err(|(part, error)| {
                    submission.reached = part.unwrap_or(0);
                    part.map_or_else(|| error.clone(), |part| submission.of_part(part, error.clone()))
                });
                return Ok(Started::Done(ended.map(|()| None)));
            }
        }
    }
    let link = Arc::clone(&launched.region);
    let transfer = submission.begin_whole(link)?;
    Flight::begin(launched, &transfer);
    Ok(Started::Running(transfer))
}

/// One part of which the GPU does not reach the side that is on the host: the bytes stop over in pinned memory.
fn pass_on(
    region: &Arc<GpuAttachment>,
    submission: &mut Submission<'_>,
    bytes: u64,
    inline: bool,
) -> Result<Started> {
    let part = submission.parts.first();
    let ringed =
        Ringed { far: Arc::clone(&region.far), near: Near::of(local_of(submission.op, part)?.place) };
    if inline && bytes <= INLINE && Slot::is_ready() && runtime::may_block(submission.op.name()).is_ok() {
        // SAFETY: the submission keeps the local region during the call; the pieces were checked against it.
        let passed = unsafe { ringed.copy(submission.op, part.base as *mut u8, part.pieces()) };
        let followed = passed.and_then(|()| region.far.follow(&submission.after));
        return Ok(Started::Done(followed.map(|()| None)));
    }
    let portion = if part.pieces().len() > MANY { u64::MAX } else { PORTION };
    direct::start(Several::one(Arc::new(ringed)), Some(portion), submission)
}

/// A copy that a GPU makes now. Dropped, it waits for the end, which no peer can put off.
struct Launched {
    copying: Option<Copying>,
    /// What keeps the owner's memory of each part where it is.
    pinned: Option<(PinnedRegion, Vec<PinnedRegion>)>,
    region: Arc<GpuAttachment>,
    op: Op,
}

impl Launched {
    /// A copy of those parts that has begun.
    fn new(
        copying: Copying,
        region: &Arc<GpuAttachment>,
        first: PinnedRegion,
        others: Vec<PinnedRegion>,
        submission: &Submission<'_>,
    ) -> Result<Launched> {
        let launched = Launched {
            copying: Some(copying),
            pinned: Some((first, others)),
            region: Arc::clone(region),
            op: submission.op,
        };
        if let (Some(stream), Some(copying)) = (submission.stream, &launched.copying) {
            // SAFETY: who named the stream promised that it lives. Where it fails, the value waits for the copy.
            unsafe { copying.hold(stream) }?;
        }
        Ok(launched)
    }

    /// Whether the copy is over; an error means that it is, and that the bytes are not there.
    fn look(&self) -> Result<bool> {
        self.copying.as_ref().map_or(Ok(true), Copying::is_done)
    }

    /// The copy is over: checks that the regions were valid all the while, lets go of them, and does what follows. An error is that of one part,
    /// or of all.
    fn finish(&mut self, copied: Result<bool>, after: &After) -> Result<(), (Option<usize>, Error)> {
        drop(self.copying.take());
        let far = &self.region.far;
        let checked = match self.pinned.take() {
            Some((first, others)) => {
                let mut all = std::iter::once(&first).chain(&others).enumerate();
                all.try_for_each(|(part, pinned)| {
                    pinned.check(self.op.name()).map_err(|error| (Some(part), error))
                })
            }
            None => Ok(()),
        };
        let copied = copied.map_err(|error| (None, error)).and(checked);
        // An owner that is gone is the better explanation.
        copied.map_err(|found| far.alive().err().map_or(found, |gone| (None, gone)))?;
        far.follow(after).map_err(|error| (None, error))
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

impl Link for GpuAttachment {
    fn path(&self) -> &'static str {
        self.far.transport().name()
    }

    fn submit(&self, submission: &mut Submission<'_>) -> Result<Started> {
        let mut regions = Several::one(self.this()?);
        for part in 1..submission.parts.len() {
            regions.push(submission.op.name(), submission.attached::<Self>(part)?.this()?)?;
        }
        submit(&regions, submission)
    }

    fn stop(&self, _transfer: &Arc<TransferCore>) {
        // The thread that watches a flight looks at the transfer's flag.
    }
}

impl Attachment for GpuAttachment {
    fn transport(&self) -> &'static dyn Transport {
        self.far.transport()
    }

    fn alive(&self) -> Result<()> {
        self.far.alive()
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
    far: Arc<dyn OwnerMemory>,
    near: Near,
}

impl Direct for Ringed {
    fn transport(&self) -> &'static dyn Transport {
        self.far.transport()
    }

    unsafe fn copy(&self, op: Op, local: *mut u8, pieces: &[Piece]) -> Result<()> {
        let (pinned, far) = self.far.enter(op.name())?;
        let (base, reading) = (local.expose_provenance() as u64, op == Op::Read);
        let local = |piece: &Piece| base + piece.local;
        let remote = |piece: &Piece| far.address + piece.remote;
        // SAFETY: `pinned` keeps the remote side, the caller the local one; the pieces were checked against both.
        let copied = unsafe {
            match (&self.near, &far.gpu) {
                (Near::Host, Some(gpu)) => ring::pass(gpu, !reading, pieces, remote, local),
                (Near::Gpu(ordinal), _) => {
                    Gpu::open(*ordinal).and_then(|gpu| ring::pass(&gpu, reading, pieces, local, remote))
                }
                (Near::Host, None) => Err(Error::new(Kind::Internal, op.name(), "neither side is on a GPU")),
            }
        };
        copied.and(pinned.check(op.name())).map_err(|error| self.far.alive().err().unwrap_or(error))
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
