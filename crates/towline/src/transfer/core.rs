//! What the paths drive: the request, what it keeps alive, and how far it is.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, OnceLock, Weak};
use std::task::Waker;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use towline_proto::transfer::{BlockFailure, State};

use super::later::{LatePlan, LateUnits, Planning};
use super::submission::{Link, Submission, Unit, naming};
use super::{After, Limits, Op, Several};
use crate::cuda::StreamHandle;
use crate::layout::{Piece, Plan};
use crate::region::{RegionCore, RegionUse};
use crate::runtime::TimerId;
use crate::{Error, Kind, Result, room};

/// Told once how a transfer ended, and which blocks failed, before its waiters are.
pub(crate) type OnEnd = Box<dyn Fn(&Result<()>, &[BlockFailure]) + Send + Sync>;

/// Work that a caller can take part in instead of sleeping until others have done it.
pub(crate) trait Help: Send + Sync {
    fn help(&self);

    /// The transfer is stopped: what no thread has begun reports, and what a thread hangs in is given up soon.
    fn stop(&self) {}
}

/// One part of a transfer: what it keeps alive, and which bytes go where.
pub(crate) struct PartCore {
    /// The peer's region.
    pub(crate) region: Arc<dyn Link>,
    /// The local region: kept and pinned until the end.
    pub(super) local: Option<RegionUse>,
    /// The same, where the transfer that it is some parts of keeps it.
    pub(super) kept: Option<Arc<RegionCore>>,
    /// The address that the plan's local offsets are relative to.
    pub(super) base: usize,
    pub(super) plan: LatePlan,
    pub(crate) blocks: u64,
}

impl PartCore {
    /// Its pieces, and the blocks that they carry; none before it is planned.
    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The address that its local offsets are relative to.
    pub(crate) fn base(&self) -> usize {
        self.base
    }
}

/// What the paths drive: the request, what it keeps alive, and its state.
pub(crate) struct TransferCore {
    pub(crate) id: u64,
    pub(crate) op: Op,
    pub(crate) parts: Several<PartCore>,
    /// The runs of pieces that the path works in; each reports once.
    pub(crate) units: LateUnits,
    /// What is left to do before the path can start; the thread that takes it does it.
    pub(super) planning: Mutex<Option<Planning>>,
    pub(super) bytes: u64,
    pub(crate) after: After,
    /// The stream of the caller's that the copy is in order with, where a GPU copies.
    pub(crate) stream: Option<StreamHandle>,
    pub(crate) limits: Limits,
    pub(crate) checked: bool,
    /// Who moves the bytes, and can be asked to stop.
    pub(super) link: Arc<dyn Link>,
    /// The same, where the submission was deferred: its link may have handed it on.
    resumed: OnceLock<Arc<dyn Link>>,
    /// It is a portion of something larger, and others are in flight beside it.
    pub(crate) portion: bool,
    /// The transfer that it is some parts of, which keeps the local memory and must be as quiet.
    pub(super) above: Option<Arc<TransferCore>>,
    pub(super) peer: Arc<str>,
    pub(super) span: tracing::Span,
    pub(super) stopped: AtomicBool,
    pub(super) stopped_at: OnceLock<Instant>,
    /// How many requests an engine has not let go of: the local memory stays pinned until there is none.
    pub(super) held_by_engine: AtomicUsize,
    /// How many [`LocalHold`]s there are: it does not end before the last of them is gone.
    pub(super) holds: AtomicUsize,
    /// How many requests the owner may still be at, after their end: its memory changes, the local one is safe.
    pub(super) outstanding: AtomicUsize,
    /// What a caller that waits can do meanwhile.
    pub(super) help: OnceLock<Weak<dyn Help>>,
    pub(super) inner: Mutex<Inner>,
    pub(super) ended: Condvar,
    /// Counts the end in the path's statistics.
    pub(super) on_end: OnEnd,
}

pub(super) struct Inner {
    pub(super) state: State,
    pub(super) wakers: Vec<Waker>,
    pub(super) started: Instant,
    pub(super) last_progress: Instant,
    /// The local memory is no longer pinned: only then do callers learn of the end.
    pub(super) released: bool,
    /// A thread delivers the end.
    pub(super) delivering: bool,
    /// The next look at the limits.
    pub(super) timer: Option<TimerId>,
}

impl Inner {
    pub(super) fn end(&self) -> Option<&Result<()>> {
        self.state.ended().filter(|_| self.released)
    }
}

impl TransferCore {
    /// A transfer of that submission, cut into those units, each of which must report exactly once; the limits run from now.
    pub(crate) fn begin(
        submission: &mut Submission<'_>,
        link: Arc<dyn Link>,
        units: Vec<Unit>,
    ) -> Result<Arc<TransferCore>> {
        TransferCore::new(submission, link, Some(units), None)
    }

    /// What it moves, or how that will be known.
    pub(super) fn new(
        submission: &mut Submission<'_>,
        link: Arc<dyn Link>,
        units: Option<Vec<Unit>>,
        planning: Option<Planning>,
    ) -> Result<Arc<TransferCore>> {
        let now = Instant::now();
        let on_end = (submission.on_end)(&submission.parts);
        let mut plans = units.is_some().then(|| submission.take_plans()).transpose()?;
        let parts = submission.each(|index, part| {
            let plan = plans.as_mut().map(|plans| std::mem::replace(&mut plans[index], Plan::nothing()));
            Ok(PartCore {
                region: Arc::clone(part.region),
                kept: part.near().filter(|_| part.local.is_none()).cloned(),
                local: part.local.take(),
                base: part.base,
                plan: LatePlan::new(plan),
                blocks: part.asked().1,
            })
        })?;
        let (mut bytes, mut blocks) = (0, 0);
        for part in submission.parts.iter() {
            let (more, count) = part.asked();
            (bytes, blocks) = (bytes + more, blocks + count);
        }
        let state = State::new(units.as_ref().map_or(1, Vec::len));
        let id = next_id();
        let span = tracing::debug_span!(
            "transfer",
            id,
            op = submission.op.name(),
            path = link.path(),
            peer = &**submission.peer,
            bytes,
            blocks,
        );
        let core = Arc::new(TransferCore {
            id,
            op: submission.op,
            parts,
            units: LateUnits::new(units),
            planning: Mutex::new(planning),
            bytes,
            after: std::mem::take(&mut submission.after),
            stream: submission.stream,
            limits: submission.limits,
            checked: submission.checked,
            link,
            resumed: OnceLock::new(),
            portion: submission.portion,
            above: submission.above.cloned(),
            peer: Arc::clone(submission.peer),
            span,
            stopped: AtomicBool::new(false),
            stopped_at: OnceLock::new(),
            held_by_engine: AtomicUsize::new(0),
            holds: AtomicUsize::new(0),
            outstanding: AtomicUsize::new(0),
            help: OnceLock::new(),
            inner: Mutex::new(Inner {
                state,
                wakers: Vec::new(),
                started: now,
                last_progress: now,
                released: false,
                delivering: false,
                timer: None,
            }),
            ended: Condvar::new(),
            on_end,
        });
        let mut inner = core.inner.lock();
        let first = core.next_check(&inner);
        core.check_at(&mut inner, first);
        drop(inner);
        Ok(core)
    }

    /// Asks who moves the bytes to stop.
    pub(super) fn stop_link(self: &Arc<Self>) {
        // Either this sees who has resumed it, or the other sees that it is stopped.
        fence(Ordering::SeqCst);
        self.resumed.get().unwrap_or(&self.link).stop(self);
    }

    /// What was one unit until now is these, and that link moves them. Before any of them has reported.
    pub(super) fn divide(&self, link: Arc<dyn Link>, plans: Several<Plan>, units: Vec<Unit>) {
        let _ = self.resumed.set(link);
        fence(Ordering::SeqCst);
        self.inner.lock().state.divide(units.len());
        for (part, plan) in self.parts.iter().zip(plans) {
            let set = part.plan.set(plan);
            debug_assert!(set.is_ok(), "a transfer is divided once");
        }
        self.units.set(units);
    }

    /// The pieces that a unit carries.
    #[inline]
    pub(crate) fn pieces(&self, unit: usize) -> &[Piece] {
        let Unit { part, pieces } = &self.units[unit];
        &self.parts[*part].plan.pieces()[pieces.clone()]
    }

    /// All pieces of a part.
    pub(crate) fn pieces_of(&self, part: usize) -> &[Piece] {
        self.parts[part].plan.pieces()
    }

    /// The bytes that a unit carries.
    pub(crate) fn bytes_of(&self, unit: usize) -> u64 {
        self.pieces(unit).iter().map(|piece| piece.len).sum()
    }

    /// The bytes of all parts.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A part's local region.
    pub(crate) fn near(&self, part: usize) -> Option<&Arc<RegionCore>> {
        let part = &self.parts[part];
        part.local.as_ref().map(RegionUse::core).or(part.kept.as_ref())
    }

    /// What became of some parts of it, each of which is one unit.
    pub(crate) fn parts_ended(&self, parts: &[usize], failures: &[BlockFailure]) {
        for (index, part) in parts.iter().enumerate() {
            let failed: Vec<_> = failures
                .iter()
                .filter(|failure| failure.part == index)
                .map(|failure| BlockFailure {
                    part: *part,
                    blocks: failure.blocks.clone(),
                    error: self.dress(naming(*part, self.named(), failure.error.clone())),
                })
                .collect();
            self.report(|state| state.unit_ended(failed));
        }
    }

    pub(crate) fn path(&self) -> &'static str {
        self.link.path()
    }

    /// The owner's name.
    pub(crate) fn peer(&self) -> &Arc<str> {
        &self.peer
    }

    /// Whether it has ended, also where nobody knows yet.
    pub(crate) fn has_ended(&self) -> bool {
        self.inner.lock().state.ended().is_some()
    }

    /// Whether the paths should stop moving bytes for it.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Ends what an endpoint that is closed no longer moves.
    pub(crate) fn check_open(&self) -> Result<()> {
        match self.near(0) {
            Some(local) if local.registry.is_closed() => {
                Err(Error::new(Kind::Canceled, self.op.name(), "the endpoint was closed"))
            }
            _ => Ok(()),
        }
    }

    /// When it was started, and when it was stopped, if it was.
    pub(crate) fn span_of_time(&self) -> (Instant, Option<Instant>) {
        (self.inner.lock().started, self.stopped_at.get().copied())
    }

    /// Whether its stop was asked for. A stop that this does not see yet finds who [helps](Self::set_help) by now.
    pub(crate) fn is_stopping(&self) -> bool {
        self.inner.lock().state.stopping().is_some()
    }

    /// The thread that copies for it is notified that it was stopped.
    pub(crate) fn stop_help(&self) {
        if let Some(work) = self.help.get().and_then(Weak::upgrade) {
            work.stop();
        }
    }

    /// Why it was stopped, for the units that did not run.
    pub(crate) fn stop_error(&self) -> Error {
        self.inner
            .lock()
            .state
            .stopping()
            .cloned()
            .unwrap_or_else(|| Error::new(Kind::Canceled, self.op.name(), "stopped"))
    }

    /// Some bytes moved.
    pub(crate) fn progressed(&self, bytes: u64) {
        if let Some(above) = &self.above {
            above.progressed(bytes);
        }
        let mut inner = self.inner.lock();
        inner.state.progressed(bytes);
        inner.last_progress = Instant::now();
    }

    /// Bytes that were counted before were in flight, and some of them arrived then.
    pub(crate) fn got_on(&self, when: Instant) {
        if let Some(above) = &self.above {
            above.got_on(when);
        }
        let mut inner = self.inner.lock();
        inner.last_progress = inner.last_progress.max(when);
    }

    /// The word that an atomic operation found.
    pub(crate) fn set_value(&self, value: u64) {
        self.inner.lock().state.set_value(value);
    }

    /// Of how many parts an error names one: the code that divided them names those of some parts.
    fn named(&self) -> usize {
        if self.above.is_some() { 1 } else { self.parts.len() }
    }

    /// The blocks that one unit carries, in runs.
    fn blocks_of(&self, unit: usize) -> Vec<Range<u64>> {
        let Unit { part, pieces } = &self.units[unit];
        let part = &self.parts[*part];
        let runs = pieces.clone().map(|piece| part.plan.blocks_of(piece));
        // Where there is no room to name them, none of the blocks counts as moved.
        let mut blocks =
            room::collect(self.op.name(), runs).unwrap_or_else(|_| std::iter::once(0..part.blocks).collect());
        blocks.sort_unstable_by_key(|blocks| blocks.start);
        blocks.dedup_by(|next, run| {
            let joins = next.start <= run.end;
            if joins {
                run.end = run.end.max(next.end);
            }
            joins
        });
        blocks
    }

    /// One unit has ended well.
    pub(crate) fn unit_done(&self) {
        self.report(|state| state.unit_done());
    }

    /// So many units have ended well, and that many bytes have moved with them.
    pub(crate) fn units_done(&self, count: usize, bytes: u64) {
        if let Some(above) = &self.above {
            above.progressed(bytes);
        }
        self.report(|state| {
            state.progressed(bytes);
            (0..count).for_each(|_| state.unit_done());
        });
    }

    /// One unit has ended; its blocks failed.
    pub(crate) fn unit_failed(&self, unit: usize, error: Error) {
        let part = self.units[unit].part;
        let error = self.dress(naming(part, self.named(), error));
        let blocks = self.blocks_of(unit);
        self.report(|state| state.unit_failed(part, blocks, error));
    }

    /// Every unit has ended: well, but for those of that part.
    pub(crate) fn all_but_failed(&self, part: usize, error: &Error) {
        for unit in 0..self.units.len() {
            match self.units[unit].part == part {
                true => self.unit_failed(unit, error.clone()),
                false => self.units_done(1, self.bytes_of(unit)),
            }
        }
    }

    /// Every unit ends with that error.
    pub(crate) fn all_failed(&self, error: &Error) {
        for unit in 0..self.units.len() {
            self.unit_failed(unit, error.clone());
        }
    }

    /// The address that the local offsets of a part's pieces are relative to.
    pub(crate) fn base(&self, part: usize) -> *mut u8 {
        self.parts[part].base as *mut u8
    }

    pub(super) fn dress(&self, error: Error) -> Error {
        let error = if error.transport().is_none() { error.on(self.path()) } else { error };
        let error = if error.peer().is_none() { error.with_peer(&*self.peer) } else { error };
        error.during(self.op.name())
    }

    pub(super) fn report(&self, step: impl FnOnce(&mut State)) {
        {
            let mut inner = self.inner.lock();
            inner.last_progress = Instant::now();
            step(&mut inner.state);
        }
        self.deliver();
    }

    /// Lets callers that wait for this transfer take part in that work.
    pub(crate) fn set_help(&self, help: Weak<dyn Help>) {
        let _ = self.help.set(help);
    }
}

/// Serves transfers whose peer may be anywhere: numbers them within this process.
fn next_id() -> u64 {
    use std::sync::atomic::AtomicU64;
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
