//! What the paths that copy by themselves share: who copies, in which portions, and what follows the bytes.
#![allow(unsafe_code, reason = "copies between memory that the transfer keeps alive, by address")]

#[cfg(test)]
mod hanging_tests;
mod held;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

pub(crate) use self::held::Held;
use super::gpu::{self, GpuAttachment};
use super::{Attachment, Transport, joint};
use crate::layout::{Piece, Plan};
use crate::memory::reduce;
use crate::runtime::{self, Device, Timer};
use crate::transfer::submission::{Link, Started, Submission, Unit};
use crate::transfer::{After, Help, Op, Several, Signal, TransferCore};
use crate::wire::AtomicOp;
use crate::{Error, Kind, Result, bytes, room};

/// Unless a path says otherwise, requests up to this size are copied by the calling thread: waking a worker costs as much as copying that, and the call
/// that starts a request is to take no longer than 50 µs.
const INLINE: u64 = 256 << 10;

/// Requests of more blocks are planned by a worker, and copied by none but workers: each block costs about as much as 256
/// bytes do.
const INLINE_BLOCKS: u64 = 512;

/// Workers take portions of at least this size, so that calling another one for the next portion is worth it.
const LEAST_PORTION: u64 = 2 << 20;

/// Of transfers from this size on, which many workers share, portions may be smaller: the pin and the hand-out do not show, and who
/// comes late, or ends early, leaves less to wait for.
const SHARED: u64 = 16 << 20;
const LEAST_SHARED: u64 = 512 << 10;

/// And of at most this size, two milliseconds' worth: a portion that has begun is copied to its end, also when the transfer was
/// cancelled or its owner has died. No less, because the C library's memcpy goes around the cache only in one long call: 256 MiB in
/// portions of 2 MiB took a quarter longer than in portions of 64 MiB, and in portions of 16 MiB no longer.
const MOST_PORTION: u64 = 16 << 20;

/// Portions per worker, so that they end at about the same time.
const PORTIONS_EACH: u64 = 4;

/// A path on which this process copies the bytes itself.
pub(crate) trait Direct: Send + Sync + 'static {
    fn transport(&self) -> &'static dyn Transport;

    /// Copies the pieces, pinned: either all of them while the region was valid, or an error.
    ///
    /// # Safety
    /// `local` plus every piece's local range is memory that the caller keeps alive and pinned.
    unsafe fn copy(&self, op: Op, local: *mut u8, pieces: &[Piece]) -> Result<()>;

    /// An atomic operation on a word of the region, where this path can do it.
    fn atomic(&self, offset: u64, op: AtomicOp) -> Result<u64>;

    /// Raises a counter of the region and wakes who waits for it.
    fn signal(&self, signal: Signal) -> Result<()>;

    /// Hands the owner a message.
    fn notify(&self, message: &[u8]) -> Result<()>;

    /// Whether the owner is alive as far as is known.
    fn alive(&self) -> Result<()>;

    /// Pins the region for long, where its memory is shared with this process.
    fn hold(&self) -> Option<Result<Held>> {
        None
    }

    /// How GPUs copy by this path, for local memory that is on one. `None` where it knows host memory only: such requests then go
    /// through pinned memory ([`gpu::Staged`]).
    fn by_gpu(&self) -> Option<Arc<GpuAttachment>> {
        None
    }

    /// Whether a copy waits for a device, and so never belongs into the calling thread.
    fn blocks(&self) -> bool {
        false
    }

    /// The device that a copy waits for, where it may hang: only its own threads wait then, and never a caller, whose limit holds.
    fn device(&self) -> Option<Device> {
        None
    }

    /// Requests up to this size are copied by the calling thread.
    fn most_inline(&self) -> u64 {
        INLINE
    }

    /// What follows the bytes, where the signal's counter lies in this region.
    fn after(&self, after: &After) -> Result<()> {
        if let Some(signal) = after.signal {
            self.signal(signal)?;
        }
        match &after.notify {
            Some(message) => self.notify(message),
            None => Ok(()),
        }
    }
}

/// A region attached to a direct path.
pub(crate) struct DirectAttachment<D>(pub(crate) Arc<D>);

impl<D: Direct> DirectAttachment<D> {
    /// The parts of a submission that the calling thread copies.
    fn inline(&self, submission: &mut Submission<'_>) -> Result<Option<u64>> {
        let mut value = None;
        for index in 0..submission.parts.len() {
            (submission.moved, submission.reached) = (index, index);
            let part = &submission.parts[index];
            let direct = if index == 0 { &self.0 } else { &submission.attached::<Self>(index)?.0 };
            let moved = match submission.op {
                Op::Atomic { offset, op } => direct.atomic(offset, op).map(|found| value = Some(found)),
                _ if part.pieces().is_empty() => Ok(()),
                // SAFETY: the submission holds a use of the local region, which lives through the call, and the pieces were
                // checked against the span that lies within it.
                op => unsafe { direct.copy(op, part.base as *mut u8, part.pieces()) },
            };
            moved.map_err(|error| submission.of_part(index, error))?;
        }
        match submission.after.signal {
            Some(Signal { part, .. }) if part > 0 => {
                submission.attached::<Self>(part)?.0.after(&submission.after)
            }
            _ => self.0.after(&submission.after),
        }
        .map(|()| value)
    }

    /// All regions of a submission.
    fn all(&self, submission: &Submission<'_>) -> Result<Several<Arc<D>>> {
        let mut all = Several::one(Arc::clone(&self.0));
        for index in 1..submission.parts.len() {
            all.push(submission.op.name(), Arc::clone(&submission.attached::<Self>(index)?.0))?;
        }
        Ok(all)
    }

    /// Local memory on GPUs: they copy, where they reach the owner's, or the bytes stop over in pinned memory.
    #[cold]
    fn by_gpus(&self, submission: &mut Submission<'_>) -> Result<Started> {
        let by_gpu = |direct: &Arc<D>| match submission.op {
            Op::Read | Op::Write => direct.by_gpu(),
            _ => None,
        };
        let mut regions = Vec::new();
        for direct in self.all(submission)?.iter() {
            match by_gpu(direct) {
                Some(region) => room::push(submission.op.name(), &mut regions, region)?,
                None => {
                    regions.clear();
                    break;
                }
            }
        }
        match Several::of(submission.op.name(), regions)? {
            Some(regions) => gpu::submit(&regions, submission),
            None if submission.parts.len() > 1 => joint::submit(submission),
            None => gpu::staged(submission),
        }
    }
}

impl<D: Direct> Link for DirectAttachment<D> {
    fn path(&self) -> &'static str {
        self.0.transport().name()
    }

    fn submit(&self, submission: &mut Submission<'_>) -> Result<Started> {
        if submission.is_on_gpu() {
            return self.by_gpus(submission);
        }
        let (bytes, blocks) = submission.size()?;
        // One range is checked by the call all the same. Cutting a long one into its portions was a third of the call.
        let long = blocks > INLINE_BLOCKS || (blocks == submission.parts.len() as u64 && bytes >= SHARED);
        if submission.deferrable && long {
            return Ok(Started::Deferred);
        }
        submission.plan()?;
        let pieces = submission.parts.iter().map(|part| part.pieces().len()).sum();
        if submission.inline && self.is_inline(bytes, pieces) {
            return Ok(Started::Done(self.inline(submission)));
        }
        start(self.all(submission)?, None, submission)
    }

    fn is_inline(&self, bytes: u64, pieces: usize) -> bool {
        (bytes == 0 || (bytes <= self.0.most_inline() && !self.0.blocks())) && pieces as u64 <= INLINE_BLOCKS
    }

    fn stop(&self, transfer: &Arc<TransferCore>) {
        // Workers look at the transfer's flag before every portion; those of a device may hang in one.
        transfer.stop_help();
    }
}

impl<D: Direct> Attachment for DirectAttachment<D> {
    fn transport(&self) -> &'static dyn Transport {
        self.0.transport()
    }

    fn alive(&self) -> Result<()> {
        self.0.alive()
    }

    fn hold(&self) -> Option<Result<Held>> {
        self.0.hold()
    }
}

/// Starts copying all parts, shared among workers in portions of about one size, whatever the sizes of the parts are: of the given one, where
/// there is one.
pub(super) fn start<D: Direct>(
    directs: Several<Arc<D>>,
    portion: Option<u64>,
    submission: &mut Submission<'_>,
) -> Result<Started> {
    let deferred = submission.was_deferred();
    let (bytes, _) = submission.size()?;
    let workers = runtime::pool().limit() as u64;
    let least = if bytes < SHARED { LEAST_PORTION } else { LEAST_SHARED };
    // Whole pages, so that no element of a reduction is cut in two.
    let by_size = || (bytes / (workers * PORTIONS_EACH)).clamp(least, MOST_PORTION) & !4095;
    let portion = portion.unwrap_or_else(by_size);
    let op = submission.op.name();
    let cut = |part, plan: Plan, units: &mut Vec<Unit>| {
        let plan = plan.cut(portion)?;
        for pieces in plan.chunks(portion) {
            room::push(op, units, Unit { part, pieces })?;
        }
        Ok(plan)
    };
    let link = Arc::new(DirectAttachment(Arc::clone(directs.first())));
    let transfer = submission.begin(link, cut, None)?;
    let device = directs.first().device();
    let portions = match directs.len() {
        1 => Vec::new(),
        // What hangs is given up by the unit.
        _ if device.is_some() => Vec::new(),
        // Where there is no room for the list, each unit is a portion.
        _ => joined(&transfer, portion).unwrap_or_default(),
    };
    let count = if portions.is_empty() { transfer.units.len() } else { portions.len() };
    let few = count <= FEW;
    let run = Arc::new_cyclic(|me| Run {
        directs,
        transfer: Arc::clone(&transfer),
        portions,
        next: AtomicUsize::new(0),
        left: AtomicUsize::new(transfer.units.len()),
        failed: AtomicBool::new(false),
        inside: Mutex::default(),
        count,
        wanted: runtime::pool().limit().min(count),
        working: AtomicUsize::new(0),
        called: AtomicUsize::new(usize::from(few)),
        me: Weak::clone(me),
    });
    let weak = Arc::downgrade(&run);
    let help: Weak<dyn Help> = weak;
    transfer.set_help(help);
    let worker = Arc::clone(&run);
    let come = move || {
        if few {
            worker.called.fetch_sub(1, Ordering::Relaxed);
        }
        worker.take_part();
    };
    let called = match device {
        Some(device) => {
            if let Err(refused) = runtime::devices().spawn_for(device, transfer.id, Box::new(come)) {
                // The caller would wait for the device, whatever its limit is.
                run.end_the_rest(&refused.error);
            }
            // A stop that came before the run was known here did not find it.
            if transfer.is_stopping() {
                run.stop();
            }
            return Ok(Started::Running(transfer));
        }
        // This is the thread that has planned it behind the call then: it may as well work on it.
        None if deferred => {
            come();
            return Ok(Started::Running(transfer));
        }
        None => runtime::starters().spawn(Box::new(come)),
    };
    if let Err(refused) = called {
        // No thread can be made: the caller does the work, late but surely.
        (refused.job)();
    }
    Ok(Started::Running(transfer))
}

/// Units of several parts, joined to portions of at least that many bytes.
fn joined(transfer: &TransferCore, portion: u64) -> Result<Vec<Range<usize>>> {
    let op = transfer.op.name();
    let (mut portions, mut bytes, mut start) = (Vec::new(), 0, 0);
    for unit in 0..transfer.units.len() {
        bytes += transfer.bytes_of(unit);
        if bytes >= portion {
            room::push(op, &mut portions, start..unit + 1)?;
            (bytes, start) = (0, unit + 1);
        }
    }
    if start < transfer.units.len() {
        room::push(op, &mut portions, start..transfer.units.len())?;
    }
    Ok(portions)
}

/// One transfer being copied by workers.
struct Run<D> {
    /// The region of each part.
    directs: Several<Arc<D>>,
    transfer: Arc<TransferCore>,
    /// The units that are copied one after the other; empty where each is a portion of its own.
    portions: Vec<Range<usize>>,
    count: usize,
    /// The next portion.
    next: AtomicUsize,
    /// The units that have not ended.
    left: AtomicUsize,
    failed: AtomicBool,
    /// The units that threads of a device are at, each of which may hang: who takes one out reports it.
    inside: Mutex<Vec<usize>>,
    /// How many threads should work on it, how many do, and how many were called and have not come.
    wanted: usize,
    working: AtomicUsize,
    called: AtomicUsize,
    me: Weak<Run<D>>,
}

/// A caller that waits for so few portions relies on the starter that was called: calling another one takes as long as copying
/// one of them. Of more portions it does not, since starters come late where the machine is busy.
const FEW: usize = 4;

/// Of so many processors one is left alone until the first portion has been copied.
const MANY: usize = 8;

/// A transfer that is stopped waits for so long for the threads that are inside a file: longer than a disk that is well takes for
/// a portion.
const PATIENCE: Duration = Duration::from_millis(400);

/// How many threads of this process copy for transfers. With more of them than processors each waits for its turn in the middle of a
/// portion; and so does who waits for the end of a transfer whose owner has died.
static COPYING: AtomicUsize = AtomicUsize::new(0);

/// One of them; none where it waits for a device.
struct Copying(usize);

impl Copying {
    fn begin(blocks: bool) -> Copying {
        let one = usize::from(!blocks);
        COPYING.fetch_add(one, Ordering::Relaxed);
        Copying(one)
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        COPYING.fetch_sub(self.0, Ordering::Relaxed);
    }
}

impl<D: Direct> Run<D> {
    /// Takes a place among those who work on it, while there is one; not among more than there are processors for, but for the
    /// first.
    fn join(&self) -> Option<Copying> {
        let join = |working| (working < self.wanted).then_some(working + 1);
        let before = self.working.fetch_update(Ordering::Relaxed, Ordering::Relaxed, join).ok()?;
        let copying = Copying::begin(self.directs.first().blocks());
        if before > 0 && !self.has_processor(COPYING.load(Ordering::Relaxed)) {
            self.working.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(copying)
    }

    /// Whether so many threads have a processor each; those that wait for a device need none.
    fn has_processor(&self, copying: usize) -> bool {
        self.directs.first().blocks() || copying <= runtime::pool().limit()
    }

    /// Calls one more worker, where one is wanted besides those who are left out, and a processor is free for it; false where not. It
    /// has no place before it comes: a caller that waits is there sooner.
    fn call_one(&self, left_out: usize) -> bool {
        let called = self.called.load(Ordering::Relaxed);
        if self.next.load(Ordering::Relaxed) >= self.count
            || self.working.load(Ordering::Relaxed) + called + left_out >= self.wanted
            || !self.has_processor(COPYING.load(Ordering::Relaxed) + called + 1)
        {
            return false;
        }
        let Some(run) = self.me.upgrade() else { return false };
        self.called.fetch_add(1, Ordering::Relaxed);
        let come = Box::new(move || {
            run.called.fetch_sub(1, Ordering::Relaxed);
            run.take_part();
        });
        let called = match self.directs.first().device() {
            Some(device) => runtime::devices().spawn_for(device, self.transfer.id, come),
            None => runtime::sharers().spawn(come),
        };
        // Those who are there do the work of one who cannot come.
        if called.is_err() {
            self.called.fetch_sub(1, Ordering::Relaxed);
        }
        called.is_ok()
    }

    /// Works on it, where there is a place. A starter that leaves it to others is there for what is posted when they are done.
    fn take_part(&self) {
        self.share();
        // The thread that has ended it has woken its waiters.
        if self.left.load(Ordering::Acquire) > 0 {
            let me = Weak::clone(&self.me);
            runtime::starters().look_next(move || {
                let copied = |run: Arc<Self>| run.left.load(Ordering::Acquire) == 0;
                // No more of them than leave a processor to look with.
                !me.upgrade().is_none_or(copied) && COPYING.load(Ordering::Relaxed) < runtime::pool().limit()
            });
        }
    }

    fn share(&self) {
        let Some(_copying) = self.join() else { return };
        // All that are wanted: a call takes less than it takes until who was called could call others. But for one where that is every
        // processor of many: who posted the transfer is about to return, and would lose its own to the last. It comes itself if it waits.
        let left_out = usize::from(self.wanted >= MANY && self.wanted == runtime::pool().limit());
        while self.call_one(left_out) {}
        self.work();
    }

    /// The next portion that nobody has taken.
    fn take(&self) -> Option<Range<usize>> {
        let portion = self.next.fetch_add(1, Ordering::Relaxed);
        match self.portions.is_empty() {
            true => (portion < self.count).then_some(portion..portion + 1),
            false => self.portions.get(portion).cloned(),
        }
    }

    fn work(&self) {
        if self.directs.first().device().is_some() {
            return self.work_at_device();
        }
        while let Some(units) = self.take() {
            let (mut copied, mut bytes, mut last) = (0, 0, 0);
            for unit in units {
                match self.copy(unit) {
                    Ok(()) => {
                        (copied, bytes, last) = (copied + 1, bytes + self.transfer.bytes_of(unit), unit)
                    }
                    Err(error) => self.not_copied(unit, error),
                }
            }
            if copied > 0 {
                self.copied(copied, bytes, last);
            }
            // Another transfer may have ended meanwhile, and left a processor.
            self.call_one(0);
        }
    }

    /// [`work`](Self::work) by a thread of the device that each copy waits for, perhaps for ever.
    fn work_at_device(&self) {
        while let Some(units) = self.take() {
            for unit in units {
                self.inside.lock().push(unit);
                let outcome = self.copy(unit);
                let reported = {
                    let mut inside = self.inside.lock();
                    let at = inside.iter().position(|one| *one == unit);
                    at.map(|at| inside.swap_remove(at)).is_none()
                };
                match outcome {
                    // It was given up meanwhile.
                    _ if reported => self.transfer.let_go(),
                    Ok(()) => self.copied(1, self.transfer.bytes_of(unit), unit),
                    Err(error) => self.not_copied(unit, error),
                }
            }
            self.call_one(0);
        }
    }

    /// Ends the units that nobody has begun.
    fn end_the_rest(&self, error: &Error) {
        while let Some(units) = self.take() {
            units.for_each(|unit| self.not_copied(unit, error.clone()));
        }
    }

    /// Ends the units that threads hang in. Their memory stays until those come back.
    fn give_up(&self) {
        let given_up = {
            let mut inside = self.inside.lock();
            // Under the lock: who comes back lets go of it.
            inside.iter().for_each(|_| self.transfer.engaged());
            std::mem::take(&mut *inside)
        };
        for unit in given_up {
            self.not_copied(unit, self.transfer.stop_error());
        }
    }

    fn not_copied(&self, unit: usize, error: Error) {
        self.failed.store(true, Ordering::Release);
        self.left.fetch_sub(1, Ordering::AcqRel);
        self.transfer.unit_failed(unit, error);
    }

    fn copy(&self, unit: usize) -> Result<()> {
        let transfer = &self.transfer;
        if transfer.is_stopped() {
            return Err(transfer.stop_error());
        }
        // Closing waits for the portions that have begun, and not for the rest.
        transfer.check_open()?;
        let part = transfer.units[unit].part;
        // SAFETY: the transfer holds a use of the local region of each part until its last unit has reported, and the plans were
        // checked against those regions' lengths.
        unsafe { self.directs[part].copy(transfer.op, transfer.base(part), transfer.pieces(unit)) }
    }

    /// So many units have been copied, with those bytes, and the given one last.
    fn copied(&self, count: usize, bytes: u64, last: usize) {
        let transfer = &self.transfer;
        let mut followed = Ok(());
        // The last worker to finish speaks for all: every portion is visible by then.
        if self.left.fetch_sub(count, Ordering::AcqRel) == count && !self.failed.load(Ordering::Acquire) {
            let part = transfer.after.signal.map_or(0, |signal| signal.part);
            followed = self.directs[part].after(&transfer.after);
        }
        match followed {
            Ok(()) => transfer.units_done(count, bytes),
            Err(error) => {
                if count > 1 {
                    transfer.units_done(count - 1, bytes - transfer.bytes_of(last));
                }
                transfer.unit_failed(last, error);
            }
        }
    }
}

impl<D: Direct> Help for Run<D> {
    /// A caller that waits takes the place of a worker that is not needed then.
    fn help(&self) {
        if self.directs.first().device().is_none() {
            self.take_part();
        }
    }

    fn stop(&self) {
        let Some(device) = self.directs.first().device() else { return };
        runtime::devices().withdraw(device, self.transfer.id);
        self.end_the_rest(&self.transfer.stop_error());
        if self.inside.lock().is_empty() {
            return;
        }
        match runtime::reactor() {
            Ok(reactor) => drop(reactor.at(runtime::later(Instant::now(), PATIENCE), self.me.clone(), 0)),
            Err(_) => self.give_up(),
        }
    }
}

impl<D: Direct> Timer for Run<D> {
    fn fired(self: Arc<Self>, _key: u64) {
        self.give_up();
    }
}

/// Moves the pieces between local and remote memory that is mapped here.
///
/// # Safety
/// Both ranges of every piece lie in mapped memory that stays during the call.
pub(super) unsafe fn move_pieces(op: Op, local: *mut u8, remote: *mut u8, pieces: &[Piece]) -> Result<()> {
    for piece in pieces {
        // SAFETY: the caller's obligation.
        unsafe {
            let (near, far) = (local.add(piece.local as usize), remote.add(piece.remote as usize));
            let len = piece.len as usize;
            match op {
                Op::Read => bytes::copy(near, far, len),
                Op::Write => bytes::copy(far, near, len),
                Op::Reduce(op, dtype) => reduce::reduce(far, near, len, op, dtype)?,
                Op::Atomic { .. } => {}
            }
        }
    }
    Ok(())
}

/// Performs an atomic operation on a word that is mapped here; returns what it held before.
///
/// # Safety
/// `word` points to eight aligned bytes that stay mapped during the call.
pub(super) unsafe fn apply_atomic(word: *mut u8, op: AtomicOp) -> u64 {
    // SAFETY: the caller's obligation.
    unsafe {
        match op {
            AtomicOp::Add(value) => reduce::fetch_add(word, value),
            AtomicOp::CompareSwap { expected, new } => reduce::compare_swap(word, expected, new),
        }
    }
}

/// The error for a word that is not eight aligned bytes.
pub(crate) fn misaligned(op: &'static str, offset: u64) -> Error {
    Error::new(Kind::Invalid, op, format!("the word at offset {offset} is not aligned to 8 bytes"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;
    use crate::Limits;
    use crate::transfer::Transfer;
    use crate::transfer::submission::{self, SubmittedPart, Terms};
    use crate::transport::inproc::InProc;

    /// A path that copies nothing, and notes how many portions were copied when something followed them.
    #[derive(Default)]
    struct Counted {
        copied: AtomicUsize,
        /// One more than the number, so that zero means that nothing followed.
        followed: AtomicUsize,
        fails_at: Option<u64>,
        /// How many copy now, and how many did at most.
        inside: Option<Arc<(AtomicUsize, AtomicUsize)>>,
    }

    impl Direct for Counted {
        fn transport(&self) -> &'static dyn Transport {
            &InProc
        }

        unsafe fn copy(&self, _op: Op, _local: *mut u8, pieces: &[Piece]) -> Result<()> {
            if let Some(inside) = &self.inside {
                inside.1.fetch_max(inside.0.fetch_add(1, Ordering::AcqRel) + 1, Ordering::AcqRel);
                std::thread::sleep(std::time::Duration::from_millis(2));
                inside.0.fetch_sub(1, Ordering::AcqRel);
            }
            // The first portion is the last one to be copied.
            if pieces[0].remote == 0 {
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            if self.fails_at == Some(pieces[0].remote) {
                return Err(Error::new(Kind::Stale, "write", "gone"));
            }
            self.copied.fetch_add(1, Ordering::AcqRel);
            Ok(())
        }

        fn atomic(&self, _offset: u64, _op: AtomicOp) -> Result<u64> {
            Ok(0)
        }

        fn signal(&self, _signal: Signal) -> Result<()> {
            self.followed.store(self.copied.load(Ordering::Acquire) + 1, Ordering::Release);
            Ok(())
        }

        fn notify(&self, _message: &[u8]) -> Result<()> {
            Ok(())
        }

        fn alive(&self) -> Result<()> {
            Ok(())
        }
    }

    fn write_parts_over(
        direct: Counted,
        plans: &[(u64, u64)],
    ) -> (Result<()>, Arc<Counted>, Arc<TransferCore>) {
        let direct = Arc::new(direct);
        let region: Arc<dyn Link> = Arc::new(DirectAttachment(Arc::clone(&direct)));
        let parts = plans
            .iter()
            .map(|(start, len)| SubmittedPart::planned(&region, 0, Plan::span(*start, 0, *len).unwrap()));
        let terms = Terms {
            after: After { signal: Some(Signal { part: 0, offset: 0, add: 1 }), notify: None },
            stream: None,
            limits: Limits::default(),
            checked: false,
            peer: &"peer".into(),
            inline: false,
            portion: true,
            above: None,
        };
        let mut on_end = submission::nobody;
        let mut submission =
            Submission::new(Op::Write, Several::of("write", parts).unwrap().unwrap(), terms, &mut on_end);
        let Started::Running(core) = region.submit(&mut submission).unwrap() else { panic!("it must go on") };
        (Transfer::live(Arc::clone(&core)).wait(), direct, core)
    }

    fn write_over(direct: Counted) -> (Result<()>, Arc<Counted>, usize) {
        let (ended, direct, core) = write_parts_over(direct, &[(0, 8 * LEAST_PORTION * PORTIONS_EACH)]);
        (ended, direct, core.units.len())
    }

    #[test]
    fn small_parts_share_portions_and_a_long_one_is_cut() {
        let mut plans: Vec<_> = (1..=64).map(|part| (part * LEAST_PORTION, LEAST_PORTION / 16)).collect();
        plans.push((100 * LEAST_PORTION, 3 * LEAST_PORTION));
        let (ended, direct, core) = write_parts_over(Counted::default(), &plans);
        ended.unwrap();
        let portions = joined(&core, LEAST_PORTION).unwrap();
        assert_eq!((core.units.len(), portions.len()), (67, 7));
        assert_eq!(direct.copied.load(Ordering::Acquire), 67);
        assert_eq!(direct.followed.load(Ordering::Acquire), 68, "the signal comes behind all of them");
    }

    #[test]
    fn a_part_that_fails_is_named_and_nothing_follows() {
        let plans: Vec<_> = (1..=8).map(|part| (part * 4096, 4096)).collect();
        let counted = Counted { fails_at: Some(3 * 4096), ..Counted::default() };
        let (ended, direct, core) = write_parts_over(counted, &plans);
        let error = ended.unwrap_err();
        assert!(error.kind() == Kind::Stale && error.message().contains("part 2 of 8"), "{error}");
        assert_eq!(direct.followed.load(Ordering::Acquire), 0);
        let failed: Vec<_> = Transfer::live(core).failures().into_iter().map(|one| one.part).collect();
        assert_eq!(failed, [2]);
    }

    #[test]
    fn what_follows_the_bytes_follows_all_of_them() {
        let (ended, direct, units) = write_over(Counted::default());
        ended.unwrap();
        assert!(units > 1);
        assert_eq!(direct.followed.load(Ordering::Acquire), units + 1);
    }

    #[test]
    fn transfers_side_by_side_have_a_thread_each_and_no_more_than_there_are_processors_for() {
        const TRANSFERS: usize = 6;
        let inside: Arc<(AtomicUsize, AtomicUsize)> = Arc::default();
        std::thread::scope(|scope| {
            for _ in 0..TRANSFERS {
                scope.spawn(|| {
                    let counted = Counted { inside: Some(Arc::clone(&inside)), ..Counted::default() };
                    let (ended, direct, units) = write_over(counted);
                    ended.unwrap();
                    assert_eq!(direct.copied.load(Ordering::Acquire), units);
                });
            }
        });
        let most = inside.1.load(Ordering::Acquire);
        // Of one transfer each, the first comes in whatever the others do, and one that has looked may come in beside it.
        assert!(most <= TRANSFERS + runtime::pool().limit(), "{most} threads copied at once");
    }

    #[test]
    fn nothing_follows_bytes_of_which_some_failed() {
        let (ended, direct, _) = write_over(Counted { fails_at: Some(0), ..Counted::default() });
        assert_eq!(ended.unwrap_err().kind(), Kind::Stale);
        assert_eq!(direct.followed.load(Ordering::Acquire), 0);
    }
}
