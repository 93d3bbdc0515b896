//! Local memory on a GPU, over a path that knows host memory only: the bytes stop over in pinned memory.
//!
//! A transfer becomes many on the path underneath, a slot each, of which several are in flight while the GPU fills or empties
//! others. What follows the bytes follows all of them.
#![allow(unsafe_code, reason = "implements the seam over raw local addresses")]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::cuda::{CopyOptions, Gpu};
use crate::layout::{Piece, Plan};
use crate::memory::Place;
use crate::memory::ring::{self, Passing, SLOT, Slot, portions};
use crate::runtime;
use crate::transfer::submission::{self, Link, Started, Submission, SubmittedPart, Terms, What};
use crate::transfer::{After, OnEnd, Op, Several, Transfer, TransferCore};
use crate::{Error, Kind, Result, room};

/// Slots that one transfer uses at a time.
const IN_FLIGHT: usize = 8;

/// A transfer has about this many portions, so that the GPU is busy with some while others are on their way.
const PORTIONS: usize = 8;

/// And no shorter ones: each is a request of its own.
const LEAST: usize = 512 << 10;

/// Who moves the bytes of one transfer between a GPU and a path that knows host memory.
struct Staged {
    under: Arc<dyn Link>,
    stage: OnceLock<Weak<Stage>>,
}

/// Starts a submission of one part, whose local memory is on a GPU, over a path that knows host memory only.
pub(crate) fn staged(submission: &mut Submission<'_>) -> Result<Started> {
    submission.plan()?;
    let under = Arc::clone(submission.parts.first().region);
    if let Some(ended) = passed(&under, submission) {
        return Ok(Started::Done(ended.map(|()| None)));
    }
    let staged = Arc::new(Staged { under, stage: OnceLock::new() });
    let transfer = submission.begin_whole(Arc::clone(&staged) as Arc<dyn Link>)?;
    staged.start(&transfer);
    Ok(Started::Running(transfer))
}

/// A small one is passed on by the calling thread, where the path underneath does its part inline.
fn passed(under: &Arc<dyn Link>, submission: &Submission<'_>) -> Option<Result<()>> {
    let (op, part) = (submission.op, submission.parts.first());
    let Some(Place::Cuda(ordinal)) = part.near().map(|near| near.place) else { return None };
    let bytes = part.asked().0;
    let small = bytes <= super::INLINE && under.is_inline(bytes, part.pieces().len());
    let plain = submission.inline && submission.stream.is_none() && submission.after.is_empty();
    if !small || !plain || !matches!(op, Op::Read | Op::Write) || runtime::may_block(op.name()).is_err() {
        return None;
    }
    let (slot, gpu) = (Slot::ready()?, Gpu::open(ordinal).ok()?);
    let device = |piece: &Piece| part.base as u64 + piece.local;
    let over_the_path = |slot: &Slot| {
        let plan = Plan::spans(&packed(op, part.pieces())?)?;
        let part = SubmittedPart::planned(under, slot.ptr().expose_provenance(), plan);
        let terms = Terms {
            after: After::default(),
            stream: None,
            limits: submission.limits,
            checked: submission.checked,
            peer: submission.peer,
            inline: true,
            portion: true,
            above: None,
        };
        let mut nobody = submission::nobody;
        match under.submit(&mut Submission::new(op, Several::one(part), terms, &mut nobody))? {
            Started::Done(ended) => ended.map(drop),
            // It may not end before the slot goes: what was begun is waited for.
            Started::Running(transfer) => Transfer::live(transfer).wait(),
            Started::Deferred => {
                Err(Error::new(Kind::Internal, op.name(), "the path defers a submission that it has planned"))
            }
        }
    };
    // SAFETY: the submission keeps the local region for the whole call, and its pieces were checked against it; the slot has room for
    // all of them.
    let between =
        |to_device, slot| unsafe { Passing::start(&gpu, to_device, slot, part.pieces().to_vec(), device) };
    Some(if op == Op::Read {
        over_the_path(&slot).and_then(|()| between(true, slot)?.into_slot()).map(drop)
    } else {
        between(false, slot).and_then(Passing::into_slot).and_then(|slot| over_the_path(&slot))
    })
}

/// Those pieces, one after the other in a slot.
fn packed(op: Op, pieces: &[Piece]) -> Result<Vec<(u64, u64, u64)>> {
    let mut at = 0;
    let spans = pieces.iter().map(|piece| {
        at += piece.len;
        (piece.remote, at - piece.len, piece.len)
    });
    room::collect(op.name(), spans)
}

impl Staged {
    fn start(&self, transfer: &Arc<TransferCore>) {
        let stage = match Stage::new(&self.under, transfer) {
            Ok(stage) => stage,
            Err(error) => return transfer.all_failed(&error),
        };
        let _ = self.stage.set(Arc::downgrade(&stage));
        if transfer.stream.is_none() && stage.begin_inline() {
            return;
        }
        if let Err(refused) = runtime::pool().spawn(Box::new(move || stage.begin())) {
            (refused.job)();
        }
    }
}

impl Link for Staged {
    fn path(&self) -> &'static str {
        self.under.path()
    }

    fn submit(&self, submission: &mut Submission<'_>) -> Result<Started> {
        staged(submission)
    }

    fn stop(&self, transfer: &Arc<TransferCore>) {
        // The stage looks at the flag before it begins another part, and after it has begun one.
        if let Some(stage) = self.stage.get().and_then(Weak::upgrade) {
            let parts = stage.parts.lock().clone();
            parts.iter().for_each(|part| part.stop(transfer.stop_error()));
        }
    }
}

/// One transfer on its way through the slots.
struct Stage {
    under: Arc<dyn Link>,
    transfer: Arc<TransferCore>,
    gpu: Arc<Gpu>,
    portions: Vec<Vec<Piece>>,
    /// How many were begun in the beginning; each is followed by another one when it has ended.
    begun: AtomicUsize,
    next: AtomicUsize,
    left: AtomicUsize,
    failed: Mutex<Option<Error>>,
    /// What follows the bytes has been asked for.
    followed: AtomicBool,
    parts: Mutex<Vec<Arc<TransferCore>>>,
}

impl Stage {
    fn new(under: &Arc<dyn Link>, transfer: &Arc<TransferCore>) -> Result<Arc<Stage>> {
        let op = transfer.op.name();
        let Some(Place::Cuda(ordinal)) = transfer.near(0).map(|near| near.place) else {
            return Err(Error::new(Kind::Internal, op, "the local side is not on a GPU"));
        };
        if transfer.stream.is_some() && transfer.op == Op::Read {
            let message = "over this path the bytes stop over in host memory, and a stream cannot wait for them: name none, \
                           and wait for the transfer";
            return Err(Error::new(Kind::Unsupported, op, message));
        }
        let most = (transfer.bytes() as usize / PORTIONS).clamp(LEAST, SLOT);
        let mut parts = Vec::new();
        for portion in portions(op, transfer.pieces_of(0), most) {
            room::push(op, &mut parts, portion?)?;
        }
        Ok(Arc::new(Stage {
            under: Arc::clone(under),
            transfer: Arc::clone(transfer),
            gpu: Gpu::open(ordinal)?,
            begun: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            left: AtomicUsize::new(parts.len()),
            portions: parts,
            failed: Mutex::new(None),
            followed: AtomicBool::new(false),
            parts: Mutex::default(),
        }))
    }

    /// Begins as many portions as may be in flight. On a worker: memory may have to be pinned for them.
    fn begin(self: &Arc<Self>) {
        if let Err(error) = self.after_stream() {
            self.note(error);
        }
        while self.begun.fetch_add(1, Ordering::AcqRel) < IN_FLIGHT {
            if !self.advance(None) {
                return;
            }
        }
    }

    /// The same in any thread, with the slots that are free; false where there were not enough.
    fn begin_inline(self: &Arc<Self>) -> bool {
        while self.begun.load(Ordering::Acquire) < IN_FLIGHT.min(self.portions.len()) {
            let Some(slot) = Slot::ready() else { return false };
            self.begun.fetch_add(1, Ordering::AcqRel);
            self.advance(Some(slot));
        }
        true
    }

    /// Waits for what is queued in the caller's stream.
    fn after_stream(&self) -> Result<()> {
        let Some(stream) = self.transfer.stream else { return Ok(()) };
        let options = CopyOptions { after: Some(stream), ..CopyOptions::default() };
        // SAFETY: nothing is copied; who named the stream promised that it lives.
        let reached = unsafe { self.gpu.copy([], &options) }?;
        while !reached.wait(Some(std::time::Instant::now() + std::time::Duration::from_millis(20)))? {
            if self.transfer.is_stopped() {
                return Err(self.transfer.stop_error());
            }
        }
        Ok(())
    }

    /// Begins the next portion, with that slot if there is one; false when there is none left.
    fn advance(self: &Arc<Self>, mut slot: Option<Slot>) -> bool {
        loop {
            let number = self.next.fetch_add(1, Ordering::AcqRel);
            if number >= self.portions.len() {
                return false;
            }
            let stopped = self.transfer.is_stopped().then(|| self.transfer.stop_error());
            let failed = stopped.or_else(|| self.failed.lock().clone());
            let begun = match failed {
                Some(error) => Err(error),
                None => self.portion(number, slot.take()),
            };
            match begun {
                Ok(()) => return true,
                // Nobody else would come for the next one.
                Err(error) => self.ended(Err(error)),
            }
        }
    }

    fn portion(self: &Arc<Self>, number: usize, slot: Option<Slot>) -> Result<()> {
        let slot = match slot {
            Some(slot) => slot,
            None => Slot::take(&self.gpu)?,
        };
        if self.transfer.op == Op::Read {
            return self.send(number, slot);
        }
        // SAFETY: the transfer keeps its local region, against which the plan was checked.
        let passing = unsafe { self.between(false, slot, &self.portions[number]) }?;
        let stage = Arc::clone(self);
        ring::then(
            passing,
            Box::new(move |slot| {
                if let Err(error) = slot.and_then(|slot| stage.send(number, slot)) {
                    stage.ended(Err(error));
                    stage.advance(None);
                }
            }),
        );
        Ok(())
    }

    /// Gives a slot to the path underneath.
    fn send(self: &Arc<Self>, number: usize, slot: Slot) -> Result<()> {
        let plan = Plan::spans(&packed(self.transfer.op, &self.portions[number])?)?;
        let base = slot.ptr().expose_provenance();
        let slot = Mutex::new(Some(slot));
        let stage = Arc::clone(self);
        let part = SubmittedPart::planned(&self.under, base, plan);
        self.submit(self.transfer.op, part, After::default(), move |result| {
            // Where it failed, the path may not have let go of the slot yet: it stays for as long as the path keeps this.
            let slot = result.is_ok().then(|| slot.lock().take()).flatten();
            stage.arrived(number, slot, result.clone());
        })
    }

    /// Starts a submission on the path underneath; an error means that its end is not reported.
    fn submit(
        self: &Arc<Self>,
        op: Op,
        part: SubmittedPart<'_>,
        after: After,
        on_end: impl Fn(&Result<()>) + Send + Sync + 'static,
    ) -> Result<()> {
        // What the path has not let go of in time, the whole has not either.
        let inline = part.near().is_none() && part.asked().0 == 0;
        let terms = Terms { inline, after, portion: true, ..Terms::under(&self.transfer) };
        let report = Arc::new(on_end);
        let mut made = |_: &Several<SubmittedPart<'_>>| -> OnEnd {
            let report = Arc::clone(&report);
            Box::new(move |result, _| report(result))
        };
        let mut submission = Submission::new(op, Several::one(part), terms, &mut made);
        match self.under.submit(&mut submission)? {
            Started::Done(ended) => {
                if ended.is_ok() {
                    self.transfer.progressed(submission.size()?.0);
                }
                report(&ended.map(drop));
            }
            // It counts its bytes for the whole.
            Started::Running(part) => self.in_flight(part),
            Started::Deferred => {
                return Err(Error::new(
                    Kind::Internal,
                    op.name(),
                    "the path defers a submission that it has planned",
                ));
            }
        }
        Ok(())
    }

    fn in_flight(&self, part: Arc<TransferCore>) {
        {
            let mut parts = self.parts.lock();
            parts.retain(|part| !part.has_ended());
            if !part.has_ended() {
                parts.push(Arc::clone(&part));
            }
        }
        // The timer of the whole stops what is in flight through its parts.
        if self.transfer.is_stopped() {
            part.stop(self.transfer.stop_error());
        }
    }

    /// # Safety
    /// The local region stays until the result is dropped.
    unsafe fn between(&self, to_device: bool, slot: Slot, pieces: &[Piece]) -> Result<Passing> {
        let base = self.transfer.base(0).addr() as u64;
        // SAFETY: the caller's promise; the plan was checked against the region.
        unsafe {
            let pieces = room::copy(self.transfer.op.name(), pieces)?;
            Passing::start(&self.gpu, to_device, slot, pieces, |piece| base + piece.local)
        }
    }

    /// The path underneath has done its part. In any thread, which does not wait here.
    fn arrived(self: &Arc<Self>, number: usize, slot: Option<Slot>, result: Result<()>) {
        self.parts.lock().retain(|part| !part.has_ended());
        match (result, slot) {
            (Ok(()), Some(slot)) if self.transfer.op == Op::Read => {
                // SAFETY: as in `portion`.
                match unsafe { self.between(true, slot, &self.portions[number]) } {
                    Ok(passing) => {
                        let stage = Arc::clone(self);
                        ring::then(passing, Box::new(move |slot| stage.landed(slot)));
                    }
                    Err(error) => self.landed(Err(error)),
                }
            }
            (Ok(()), Some(slot)) => self.landed(Ok(slot)),
            (Ok(()), None) => {
                self.landed(Err(Error::new(Kind::Internal, self.transfer.op.name(), "a slot was lost")))
            }
            (Err(error), _) => self.landed(Err(error)),
        }
    }

    /// A portion is where it should be: its slot is free for the next.
    fn landed(self: &Arc<Self>, slot: Result<Slot>) {
        let (slot, result) = match slot {
            Ok(slot) => (Some(slot), Ok(())),
            Err(error) => (None, Err(error)),
        };
        self.ended(result);
        self.advance(slot);
    }

    fn note(&self, error: Error) {
        self.failed.lock().get_or_insert(error);
    }

    fn ended(self: &Arc<Self>, result: Result<()>) {
        if let Err(error) = result {
            self.note(error);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.over();
        }
    }

    /// All bytes are there, or some never will be.
    fn over(self: &Arc<Self>) {
        if let Some(error) = self.failed.lock().clone() {
            self.transfer.unit_failed(0, error);
            return;
        }
        if self.transfer.after.is_empty() || self.followed.swap(true, Ordering::AcqRel) {
            self.transfer.unit_done();
            return;
        }
        let (transfer, after) = (Arc::clone(&self.transfer), self.transfer.after.clone());
        let alone = SubmittedPart::new(&self.under, None, 0, What::Nothing, (0, 0));
        let followed = self.submit(Op::Write, alone, after, move |result| match result {
            Ok(()) => transfer.unit_done(),
            Err(error) => transfer.unit_failed(0, error.clone()),
        });
        if let Err(error) = followed {
            self.transfer.unit_failed(0, error);
        }
    }
}
