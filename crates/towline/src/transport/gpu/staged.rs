//! Local memory on a GPU, over a path that knows host memory only: the bytes stop over in pinned memory.
//!
//! A transfer becomes many on the path underneath, a slot each, of which several are in flight while the GPU fills or empties
//! others. What follows the bytes follows all of them.
#![allow(unsafe_code, reason = "implements the seam over raw local addresses")]

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use crate::cuda::{CopyOptions, Gpu};
use crate::layout::{Piece, Plan};
use crate::memory::Place;
use crate::memory::ring::{self, Passing, SLOT, Slot, portions};
use crate::region::RegionUse;
use crate::runtime;
use crate::sync::lock;
use crate::transfer::{self, After, Op, Parts, TransferCore};
use crate::transport::{Attachment, Begun, Transport};
use crate::{Error, Kind, Result, room};

/// Slots that one transfer uses at a time.
const IN_FLIGHT: usize = 8;

/// A transfer has about this many portions, so that the GPU is busy with some while others are on their way.
const PORTIONS: usize = 8;

/// And no shorter ones: each is a request of its own.
const LEAST: usize = 512 << 10;

/// A path that knows host memory, serving memory of a GPU.
pub(crate) struct Staged {
    under: Arc<dyn Attachment>,
    /// The one transfer that it is made for.
    stage: OnceLock<Weak<Stage>>,
}

impl Staged {
    pub(crate) fn over(under: Arc<dyn Attachment>) -> Arc<dyn Attachment> {
        Arc::new(Staged { under, stage: OnceLock::new() })
    }
}

impl Attachment for Staged {
    fn transport(&self) -> &'static dyn Transport {
        self.under.transport()
    }

    /// A small one is passed on by the calling thread, where the path underneath does its part at once.
    fn begin(
        &self,
        op: Op,
        local: &RegionUse,
        base: usize,
        pieces: &[Piece],
        bytes: u64,
        after: &After,
    ) -> Option<Begun> {
        let Place::Cuda(ordinal) = local.core().place else { return None };
        let small = bytes <= super::INLINE && self.under.at_once(bytes) && after.is_empty();
        if !small || !matches!(op, Op::Read | Op::Write) || runtime::may_block(op.name()).is_err() {
            return None;
        }
        let (slot, gpu) = (Slot::ready()?, Gpu::open(ordinal).ok()?);
        let device = |piece: &Piece| base as u64 + piece.local;
        let mut at = 0;
        let along: Vec<Piece> = pieces
            .iter()
            .map(|piece| {
                at += piece.len;
                Piece { local: at - piece.len, ..*piece }
            })
            .collect();
        // SAFETY: the caller keeps the local region for the whole call, and has checked the pieces against it; the slot has
        // room for all of them.
        let passed = unsafe {
            let under = |slot: &Slot| match self.under.run_now(op, slot.ptr(), &along, bytes, after) {
                Some(ended) => ended.map(drop),
                None => Err(Error::new(Kind::Internal, op.name(), "the path has changed its mind")),
            };
            if op == Op::Read {
                under(&slot)
                    .and_then(|()| Passing::start(&gpu, true, slot, pieces.to_vec(), device)?.into_slot())
                    .map(drop)
            } else {
                Passing::start(&gpu, false, slot, pieces.to_vec(), device)
                    .and_then(Passing::into_slot)
                    .and_then(|slot| under(&slot))
            }
        };
        Some(Begun::Ended(passed.map(|()| None)))
    }

    unsafe fn run_now(
        &self,
        _op: Op,
        _local: *mut u8,
        _pieces: &[Piece],
        _bytes: u64,
        _after: &After,
    ) -> Option<Result<Option<u64>>> {
        None
    }

    fn cut(&self, _op: Op, plan: Plan, _after: &After) -> Result<(Plan, Vec<Range<usize>>)> {
        let count = plan.piece_count();
        Ok((plan, std::iter::once(0..count).collect()))
    }

    fn start(self: Arc<Self>, transfer: &Arc<TransferCore>) {
        let stage = match Stage::new(&self.under, transfer) {
            Ok(stage) => stage,
            Err(error) => return super::fail(transfer, &error),
        };
        let _ = self.stage.set(Arc::downgrade(&stage));
        if transfer.stream.is_none() && stage.begin_at_once() {
            return;
        }
        if let Err(refused) = runtime::pool().spawn(Box::new(move || stage.begin())) {
            (refused.job)();
        }
    }

    fn stop(&self, transfer: &Arc<TransferCore>) {
        // The stage looks at the flag before it begins another part, and after it has begun one.
        if let Some(stage) = self.stage.get().and_then(Weak::upgrade) {
            let parts = lock(&stage.parts).clone();
            parts.iter().for_each(|part| part.stop(transfer.stop_error()));
        }
    }

    fn alive(&self) -> Result<()> {
        self.under.alive()
    }
}

/// One transfer on its way through the slots.
struct Stage {
    under: Arc<dyn Attachment>,
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
    fn new(under: &Arc<dyn Attachment>, transfer: &Arc<TransferCore>) -> Result<Arc<Stage>> {
        let op = transfer.op.name();
        let Some(Place::Cuda(ordinal)) = transfer.local.as_ref().map(|local| local.core().place) else {
            return Err(Error::new(Kind::Internal, op, "the local side is not on a GPU"));
        };
        if transfer.stream.is_some() && transfer.op == Op::Read {
            let message = "over this path the bytes stop over in host memory, and a stream cannot wait for them: name none, \
                           and wait for the transfer";
            return Err(Error::new(Kind::Unsupported, op, message));
        }
        let most = (transfer.plan.bytes() as usize / PORTIONS).clamp(LEAST, SLOT);
        let mut parts = Vec::new();
        for portion in portions(op, transfer.plan.pieces(), most) {
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
    fn begin_at_once(self: &Arc<Self>) -> bool {
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
            let failed = stopped.or_else(|| lock(&self.failed).clone());
            let begun = match failed {
                Some(error) => Err(error),
                None => self.portion(number, slot.take()),
            };
            match begun {
                Ok(()) => return true,
                // Nobody else would come for the next one.
                Err(error) => self.ended(number, Err(error)),
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
                    stage.ended(number, Err(error));
                    stage.advance(None);
                }
            }),
        );
        Ok(())
    }

    /// Gives a slot to the path underneath.
    fn send(self: &Arc<Self>, number: usize, slot: Slot) -> Result<()> {
        let mut at = 0;
        let spans = self.portions[number].iter().map(|piece| {
            let span = (piece.remote, at, piece.len);
            at += piece.len;
            span
        });
        let spans = room::collect(self.transfer.op.name(), spans)?;
        let base = slot.ptr().expose_provenance();
        let slot = Mutex::new(Some(slot));
        let stage = Arc::clone(self);
        let part =
            self.part(self.transfer.op, Plan::spans(&spans)?, base, After::default(), move |result| {
                let slot = lock(&slot).take();
                stage.arrived(number, slot, result.clone());
            })?;
        self.under_way(part);
        Ok(())
    }

    /// One transfer on the path underneath.
    fn part(
        self: &Arc<Self>,
        op: Op,
        plan: Plan,
        base: usize,
        after: After,
        on_end: impl Fn(&Result<()>) + Send + Sync + 'static,
    ) -> Result<Arc<TransferCore>> {
        TransferCore::begin(Parts {
            id: transfer::next_id(),
            op,
            plan,
            local: None,
            local_base: base,
            after,
            stream: None,
            checked: self.transfer.checked,
            limits: self.transfer.limits,
            attachment: Arc::clone(&self.under),
            peer: self.transfer.peer(),
            on_end: Box::new(on_end),
        })
    }

    fn under_way(&self, part: Arc<TransferCore>) {
        lock(&self.parts).push(Arc::clone(&part));
        Arc::clone(&self.under).start(&part);
        // The timer of the whole stops what is under way through its parts.
        if self.transfer.is_stopped() {
            part.stop(self.transfer.stop_error());
        }
    }

    /// # Safety
    /// The local region stays until the answer is dropped.
    unsafe fn between(&self, to_device: bool, slot: Slot, pieces: &[Piece]) -> Result<Passing> {
        let base = self.transfer.local_base().addr() as u64;
        // SAFETY: the caller's promise; the plan was checked against the region.
        unsafe {
            let pieces = room::copy(self.transfer.op.name(), pieces)?;
            Passing::start(&self.gpu, to_device, slot, pieces, |piece| base + piece.local)
        }
    }

    /// The path underneath has done its part. In any thread, which does not wait here.
    fn arrived(self: &Arc<Self>, number: usize, slot: Option<Slot>, result: Result<()>) {
        lock(&self.parts).retain(|part| !part.has_ended());
        match (result, slot) {
            (Ok(()), Some(slot)) if self.transfer.op == Op::Read => {
                // SAFETY: as in `portion`.
                match unsafe { self.between(true, slot, &self.portions[number]) } {
                    Ok(passing) => {
                        let stage = Arc::clone(self);
                        ring::then(passing, Box::new(move |slot| stage.landed(number, slot)));
                    }
                    Err(error) => self.landed(number, Err(error)),
                }
            }
            (Ok(()), Some(slot)) => self.landed(number, Ok(slot)),
            (Ok(()), None) => self
                .landed(number, Err(Error::new(Kind::Internal, self.transfer.op.name(), "a slot was lost"))),
            (Err(error), _) => self.landed(number, Err(error)),
        }
    }

    /// A portion is where it should be: its slot is free for the next.
    fn landed(self: &Arc<Self>, number: usize, slot: Result<Slot>) {
        let (slot, result) = match slot {
            Ok(slot) => (Some(slot), Ok(())),
            Err(error) => (None, Err(error)),
        };
        self.ended(number, result);
        self.advance(slot);
    }

    fn note(&self, error: Error) {
        lock(&self.failed).get_or_insert(error);
    }

    fn ended(self: &Arc<Self>, number: usize, result: Result<()>) {
        match result {
            Ok(()) => self.transfer.progressed(self.portions[number].iter().map(|piece| piece.len).sum()),
            Err(error) => self.note(error),
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.over();
        }
    }

    /// All bytes are there, or some never will be.
    fn over(self: &Arc<Self>) {
        if let Some(error) = lock(&self.failed).clone() {
            self.transfer.unit_failed(0, error);
            return;
        }
        if self.transfer.after.is_empty() || self.followed.swap(true, Ordering::AcqRel) {
            self.transfer.unit_done();
            return;
        }
        let after = &self.transfer.after;
        // SAFETY: there are no pieces.
        let followed = unsafe { self.under.run_now(Op::Write, std::ptr::null_mut(), &[], 0, after) };
        match (followed, Plan::spans(&[])) {
            (Some(Ok(_)), _) => self.transfer.unit_done(),
            (Some(Err(error)), _) | (None, Err(error)) => self.transfer.unit_failed(0, error),
            (None, Ok(plan)) => {
                let told = Arc::clone(&self.transfer);
                let part = self.part(Op::Write, plan, 0, after.clone(), move |result| match result {
                    Ok(()) => told.unit_done(),
                    Err(error) => told.unit_failed(0, error.clone()),
                });
                match part {
                    Ok(part) => self.under_way(part),
                    Err(error) => self.transfer.unit_failed(0, error),
                }
            }
        }
    }
}
