//! One request in flight: what was asked, how far it is, how it ended.
//!
//! [`Transfer`] is what callers hold; `TransferCore` is what the paths drive; [`State`] is the pure
//! bookkeeping of both.

mod hold;
mod later;
mod several;
pub(crate) mod submission;
#[cfg(test)]
mod tests;

use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use towline_proto::transfer::State;

use crate::cuda::StreamHandle;
use crate::layout::{Piece, Plan};
use crate::memory::{Dtype, ReduceOp};
use crate::region::{RegionCore, RegionUse};
use crate::runtime::{self, Timer, TimerId};
use crate::sync::lock;
use crate::wire::AtomicOp;
use crate::{Error, Kind, Result, fork, room};
pub(crate) use hold::LocalHold;
use later::{LatePlan, LateUnits, Planning};
pub(crate) use several::Several;
use submission::{Link, Submission, Unit, naming};
pub use towline_proto::transfer::BlockFailure;

/// What a transfer does to the remote memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    Read,
    Write,
    Reduce(ReduceOp, Dtype),
    Atomic { offset: u64, op: AtomicOp },
}

impl Op {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Op::Read => "read",
            Op::Write => "write",
            Op::Reduce(..) => "reduce_into",
            Op::Atomic { op: AtomicOp::Add(_), .. } => "fetch_add",
            Op::Atomic { op: AtomicOp::CompareSwap { .. }, .. } => "compare_swap",
        }
    }
}

/// A counter of the owner that is raised once all bytes are visible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Signal {
    /// The part in whose remote region it lies.
    pub(crate) part: usize,
    pub(crate) offset: u64,
    pub(crate) add: u64,
}

/// What the owner learns once all bytes are visible.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct After {
    pub(crate) signal: Option<Signal>,
    pub(crate) notify: Option<Vec<u8>>,
}

impl After {
    pub(crate) fn is_empty(&self) -> bool {
        self.signal.is_none() && self.notify.is_none()
    }
}

/// How long a transfer may take: without any progress, and in all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The longest time in which nothing moves.
    pub no_progress: Duration,
    /// The longest time for a transfer of no bytes.
    pub total: Duration,
    /// The slowest acceptable link, in bytes per second: adds to `total`.
    pub bytes_per_second: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            no_progress: Duration::from_secs(5),
            total: Duration::from_secs(30),
            bytes_per_second: 50_000_000,
        }
    }
}

impl Limits {
    /// Limits that end everything after that time.
    pub fn within(total: Duration) -> Limits {
        Limits { no_progress: total, total, bytes_per_second: u64::MAX }
    }

    /// The longest time for that many bytes.
    pub fn total_for(&self, bytes: u64) -> Duration {
        let rate = self.bytes_per_second.max(1);
        let rest = (bytes % rate).saturating_mul(1000) / rate;
        self.total
            .saturating_add(Duration::from_secs(bytes / rate))
            .saturating_add(Duration::from_millis(rest))
    }
}

/// One request in flight, over one or many regions of a peer: a future, which can also be waited on, polled and cancelled.
///
/// Dropping a transfer does not stop it: the memory it touches stays alive until it has ended.
#[must_use = "a transfer goes on when dropped, but nobody learns how it ended"]
pub struct Transfer(Repr);

enum Repr {
    Done(Done),
    Live(Arc<TransferCore>),
}

struct Done {
    path: &'static str,
    bytes: u64,
    value: Option<u64>,
    result: Result<()>,
    failures: Vec<BlockFailure>,
}

impl Transfer {
    /// A transfer that ended in the call that started it.
    pub(crate) fn done(
        submission: &Submission<'_>,
        path: &'static str,
        ended: Result<Option<u64>>,
    ) -> Transfer {
        let bytes = submission.parts.iter().map(|part| part.asked().0).sum();
        let value = ended.as_ref().ok().copied().flatten();
        let failures = ended.as_ref().err().map(|error| failures(submission, error)).unwrap_or_default();
        let result = ended.map(|_| ());
        Transfer(Repr::Done(Done { path, bytes, value, result, failures }))
    }

    pub(crate) fn live(core: Arc<TransferCore>) -> Transfer {
        Transfer(Repr::Live(core))
    }

    /// The path that the bytes take; that of the first part, where parts take different ones.
    pub fn path(&self) -> &'static str {
        match &self.0 {
            Repr::Done(done) => done.path,
            Repr::Live(core) => core.path(),
        }
    }

    /// How many bytes were asked for, of all parts together.
    pub fn bytes(&self) -> u64 {
        match &self.0 {
            Repr::Done(done) => done.bytes,
            Repr::Live(core) => core.bytes,
        }
    }

    /// Whether it has ended, well or not.
    pub fn is_done(&self) -> bool {
        match &self.0 {
            Repr::Done(_) => true,
            Repr::Live(core) => core.end().is_some(),
        }
    }

    /// How it ended, or `None` while it is in flight.
    pub fn result(&self) -> Option<Result<()>> {
        match &self.0 {
            Repr::Done(done) => Some(done.result.clone()),
            Repr::Live(core) => core.end(),
        }
    }

    /// The word that an atomic operation found, once it has ended well.
    pub fn value(&self) -> Option<u64> {
        match &self.0 {
            Repr::Done(done) => done.value,
            Repr::Live(_) if fork::in_child() => None,
            Repr::Live(core) => lock(&core.inner).state.value(),
        }
    }

    /// Waits until it has ended. The transfer's own limits bound the wait.
    pub fn wait(&self) -> Result<()> {
        match &self.0 {
            Repr::Done(done) => done.result.clone(),
            Repr::Live(core) => core.wait(None).unwrap_or_else(|| {
                Err(Error::new(Kind::Internal, core.op.name(), "the wait ended before the transfer"))
            }),
        }
    }

    /// Waits for at most that long; `None` means that it is still in flight.
    pub fn wait_for(&self, time: Duration) -> Option<Result<()>> {
        match &self.0 {
            Repr::Done(done) => Some(done.result.clone()),
            Repr::Live(core) => core.wait(Some(runtime::later(Instant::now(), time))),
        }
    }

    /// Asks it to stop. It ends with [`Kind::Canceled`] once the local memory is safe to reuse: wait for that. Over a stream, a write
    /// that is under way ends when the owner has said what became of it, and within two seconds in any case, whatever the limits are.
    /// Where the owner has said nothing by then, the connection is given up; nothing of the write changes the remote memory once
    /// it is [quiet](Self::quiet), which on one host it is at its end.
    ///
    /// A transfer that has already ended stays as it ended.
    pub fn cancel(&self) {
        if let Repr::Live(core) = &self.0
            && !fork::in_child()
        {
            core.stop(Error::new(Kind::Canceled, core.op.name(), "cancelled by the caller"));
        }
    }

    /// Whether nothing of this transfer can touch the local memory any more, nor change the owner's.
    ///
    /// With the built-in paths a transfer ends only when it is quiet, so this is [`is_done`](Self::is_done), but for some cases. A write
    /// to another host that was stopped may end while its bytes are on their way, or with an owner that says nothing: it is quiet when the
    /// owner has said that nothing more of it will land, or has ended the session. One that was in flight when this endpoint was
    /// closed, or when its session was given up because nothing came from the owner's host, is never quiet: nobody asks any more. NIXL
    /// cannot stop what it has begun: there a transfer that was cancelled, ran out of time or lost its peer may end before it is
    /// quiet. Its memory on both sides then stays registered, and is parked where it is dropped, until NIXL has let go. And over a
    /// Unix stream an owner may be stopped while it writes a file or to a GPU, or, where the machine lacks what makes its look at the
    /// initiator and its change of memory one step, while it changes memory. It finishes that when it goes on: the transfer ends
    /// at its limit, and is quiet when the owner has finished or exited. The same may happen to a write to a GPU, and between users of one host nobody
    /// can see when the owner has finished: given up by this side, such a write is never quiet. The local memory is free at the end.
    pub fn quiet(&self) -> bool {
        match &self.0 {
            Repr::Done(_) => true,
            Repr::Live(core) => core.end().is_some() && core.is_silent(),
        }
    }

    /// Waits for at most that long until it is [quiet](Self::quiet).
    pub fn wait_quiet(&self, time: Duration) -> bool {
        let until = runtime::later(Instant::now(), time);
        match &self.0 {
            Repr::Done(_) => true,
            Repr::Live(_) if fork::in_child() => false,
            Repr::Live(core) => core.wait(Some(until)).is_some() && core.wait_quiet(until),
        }
    }

    /// What an engine may still be at after the end; `None` for a transfer that ended in the call that started it.
    pub(crate) fn noise(&self) -> Option<Noise> {
        match &self.0 {
            Repr::Done(_) => None,
            Repr::Live(core) => Some(Noise(Arc::downgrade(core))),
        }
    }

    /// The blocks that failed and why; empty when all went well or while it is in flight.
    pub fn failures(&self) -> Vec<BlockFailure> {
        match &self.0 {
            Repr::Done(done) => done.failures.clone(),
            Repr::Live(_) if fork::in_child() => Vec::new(),
            Repr::Live(core) => {
                let inner = lock(&core.inner);
                inner.end().map(|_| inner.state.failures().to_vec()).unwrap_or_default()
            }
        }
    }
}

/// What did not move of a submission that ended in the call with that error.
pub(crate) fn failures(submission: &Submission<'_>, error: &Error) -> Vec<BlockFailure> {
    let parts = submission.parts.iter().enumerate().skip(submission.moved);
    parts
        .map(|(part, of)| {
            let error = if part == submission.reached {
                error.clone()
            } else {
                let message = format!("part {} failed, and this one with it", submission.reached);
                Error::new(Kind::Canceled, submission.op.name(), message)
            };
            BlockFailure { part, blocks: 0..of.asked().1, error }
        })
        .collect()
}

impl Future for Transfer {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        match &self.0 {
            Repr::Done(done) => Poll::Ready(done.result.clone()),
            Repr::Live(core) => {
                if let Err(error) = fork::guard(core.op.name()) {
                    return Poll::Ready(Err(error));
                }
                let mut inner = lock(&core.inner);
                if let Some(result) = inner.end() {
                    return Poll::Ready(result.clone());
                }
                if !inner.wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
                    inner.wakers.push(cx.waker().clone());
                }
                Poll::Pending
            }
        }
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer")
            .field("path", &self.path())
            .field("bytes", &self.bytes())
            .field("result", &self.result())
            .finish()
    }
}

/// What an engine may still be at. Keeps nothing alive.
pub(crate) struct Noise(Weak<TransferCore>);

impl Noise {
    /// Whether the engine has let go.
    pub(crate) fn is_over(&self) -> bool {
        self.0.upgrade().is_none_or(|core| core.is_silent())
    }
}

/// Told once how a transfer ended, and which blocks failed, before its waiters are.
pub(crate) type OnEnd = Box<dyn Fn(&Result<()>, &[BlockFailure]) + Send + Sync>;

/// Work that a caller can take part in instead of sleeping until others have done it.
pub(crate) trait Help: Send + Sync {
    fn help(&self);
}

/// A caller that waits for less than this does not help: what it takes on may last longer.
const LEAST_HELPFUL: Duration = Duration::from_secs(1);

/// One part of a transfer: what it keeps alive, and which bytes go where.
pub(crate) struct PartCore {
    /// The peer's region.
    pub(crate) region: Arc<dyn Link>,
    /// The local region: kept and pinned until the end.
    local: Option<RegionUse>,
    /// The same, where the transfer that it is some parts of keeps it.
    kept: Option<Arc<RegionCore>>,
    /// The address that the plan's local offsets are relative to.
    base: usize,
    plan: LatePlan,
    blocks: u64,
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

    /// How many blocks were asked for.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }
}

/// What the paths drive: the request, what it keeps alive, and its state.
pub(crate) struct TransferCore {
    pub(crate) id: u64,
    pub(crate) op: Op,
    pub(crate) parts: Several<PartCore>,
    /// The runs of pieces that the path works in; each reports once.
    pub(crate) units: LateUnits,
    /// What is left to do before the path can start; whoever takes it does it.
    planning: Mutex<Option<Planning>>,
    bytes: u64,
    pub(crate) after: After,
    /// The stream of the caller's that the copy is in order with, where a GPU copies.
    pub(crate) stream: Option<StreamHandle>,
    pub(crate) limits: Limits,
    pub(crate) checked: bool,
    /// Who moves the bytes, and is told to stop.
    link: Arc<dyn Link>,
    /// It is a portion of something larger, and others are in flight beside it.
    pub(crate) portion: bool,
    /// The transfer that it is some parts of, which keeps the local memory and must be as quiet.
    above: Option<Arc<TransferCore>>,
    peer: Arc<str>,
    span: tracing::Span,
    stopped: AtomicBool,
    stopped_at: OnceLock<Instant>,
    /// How many requests an engine has not let go of: the local memory stays pinned until there is none.
    noise: AtomicUsize,
    /// How many [`LocalHold`]s there are: it does not end before the last of them is gone.
    holds: AtomicUsize,
    /// How many requests the owner may still be at, after their end: its memory changes, the local one is safe.
    afar: AtomicUsize,
    /// What a caller that waits can do meanwhile.
    help: OnceLock<Weak<dyn Help>>,
    inner: Mutex<Inner>,
    ended: Condvar,
    /// Counts the end in the path's statistics.
    on_end: OnEnd,
}

struct Inner {
    state: State,
    wakers: Vec<Waker>,
    started: Instant,
    last_progress: Instant,
    /// The local memory is no longer pinned: only then do callers learn of the end.
    released: bool,
    /// Somebody has taken it upon himself to deliver the end.
    delivering: bool,
    /// The next look at the limits.
    timer: Option<TimerId>,
}

impl Inner {
    fn end(&self) -> Option<&Result<()>> {
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
    fn new(
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
            portion: submission.portion,
            above: submission.above.cloned(),
            peer: Arc::clone(submission.peer),
            span,
            stopped: AtomicBool::new(false),
            stopped_at: OnceLock::new(),
            noise: AtomicUsize::new(0),
            holds: AtomicUsize::new(0),
            afar: AtomicUsize::new(0),
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
        let mut inner = lock(&core.inner);
        let first = core.next_check(&inner);
        core.check_at(&mut inner, first);
        drop(inner);
        Ok(core)
    }

    /// What was one unit until now is these. Before any of them has reported.
    fn divide(&self, plans: Several<Plan>, units: Vec<Unit>) {
        lock(&self.inner).state.divide(units.len());
        let set = plans.try_map(|index, plan| self.parts[index].plan.set(plan));
        debug_assert!(set.is_ok(), "a transfer is divided once");
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
        lock(&self.inner).state.ended().is_some()
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
        (lock(&self.inner).started, self.stopped_at.get().copied())
    }

    /// Why it was stopped, for the units that did not run.
    pub(crate) fn stop_error(&self) -> Error {
        lock(&self.inner)
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
        let mut inner = lock(&self.inner);
        inner.state.progressed(bytes);
        inner.last_progress = Instant::now();
    }

    /// Bytes that were counted before were on their way, and some of them arrived then.
    pub(crate) fn got_on(&self, when: Instant) {
        if let Some(above) = &self.above {
            above.got_on(when);
        }
        let mut inner = lock(&self.inner);
        inner.last_progress = inner.last_progress.max(when);
    }

    /// The word that an atomic operation found.
    pub(crate) fn set_value(&self, value: u64) {
        lock(&self.inner).state.set_value(value);
    }

    /// Of how many parts an error names one: whoever divided them names those of some parts.
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

    /// Stops it: the path makes it quiet, then it ends with that error.
    pub(crate) fn stop(self: &Arc<Self>, error: Error) {
        let error = self.dress(error);
        if !lock(&self.inner).state.stop(error) {
            // Every unit has reported, but a frame or a sink still names the memory: the path takes it back.
            if self.is_held() {
                self.link.stop(self);
            }
            return;
        }
        let _ = self.stopped_at.set(Instant::now());
        self.stopped.store(true, Ordering::Release);
        if self.will_not_launch() {
            return self.whole_failed(self.stop_error());
        }
        self.link.stop(self);
    }

    fn dress(&self, error: Error) -> Error {
        let error = if error.transport().is_none() { error.on(self.path()) } else { error };
        let error = if error.peer().is_none() { error.with_peer(&*self.peer) } else { error };
        error.during(self.op.name())
    }

    fn report(&self, step: impl FnOnce(&mut State)) {
        {
            let mut inner = lock(&self.inner);
            inner.last_progress = Instant::now();
            step(&mut inner.state);
        }
        self.deliver();
    }

    /// Delivers the end, once: when every unit has reported and nothing names the local memory any more.
    fn deliver(&self) {
        let (result, failures, timer) = {
            let mut inner = lock(&self.inner);
            match inner.state.ended() {
                Some(result) if !inner.delivering && !self.is_held() => {
                    let end = (result.clone(), inner.state.failures().to_vec(), inner.timer);
                    inner.delivering = true;
                    end
                }
                _ => return,
            }
        };
        self.release_quiet();
        if let (Some(timer), Ok(reactor)) = (timer, runtime::reactor()) {
            reactor.cancel(timer);
        }
        (self.on_end)(&result, &failures);
        self.span.in_scope(|| match &result {
            Ok(()) => tracing::debug!("ended well"),
            Err(error) => tracing::debug!(%error, "ended"),
        });
        let wakers = {
            let mut inner = lock(&self.inner);
            inner.released = true;
            std::mem::take(&mut inner.wakers)
        };
        self.ended.notify_all();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// An engine has begun something that it may not let go of in time. Before the unit's report.
    pub(crate) fn engaged(&self) {
        if let Some(above) = &self.above {
            above.engaged();
        }
        self.noise.fetch_add(1, Ordering::AcqRel);
    }

    /// It has let go: nothing of that touches the local memory any more. Before the unit's report, unless that came early.
    pub(crate) fn let_go(&self) {
        if let Some(above) = &self.above {
            above.let_go();
        }
        if self.noise.fetch_sub(1, Ordering::AcqRel) == 1 && lock(&self.inner).state.ended().is_some() {
            self.release_quiet();
            drop(lock(&self.inner));
            self.ended.notify_all();
        }
    }

    /// The owner is in the middle of a request that it will never answer. Before the unit's report.
    pub(crate) fn unfinished_afar(&self) {
        if let Some(above) = &self.above {
            above.unfinished_afar();
        }
        self.afar.fetch_add(1, Ordering::AcqRel);
    }

    /// It is not any more.
    pub(crate) fn finished_afar(&self) {
        if let Some(above) = &self.above {
            above.finished_afar();
        }
        if self.afar.fetch_sub(1, Ordering::AcqRel) == 1 {
            drop(lock(&self.inner));
            self.ended.notify_all();
        }
    }

    fn is_silent(&self) -> bool {
        self.noise.load(Ordering::Acquire) == 0 && self.afar.load(Ordering::Acquire) == 0
    }

    /// Gives the local memory back, once nothing touches it.
    fn release_quiet(&self) {
        if self.noise.load(Ordering::Acquire) == 0 && !self.is_held() {
            self.parts.iter().filter_map(|part| part.local.as_ref()).for_each(RegionUse::release);
        }
    }

    fn wait_quiet(&self, until: Instant) -> bool {
        let mut inner = lock(&self.inner);
        while !self.is_silent() {
            let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
            else {
                return false;
            };
            inner = self.ended.wait_timeout(inner, left).unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
        true
    }

    /// How it ended; in a forked child, where its locks may never open again, the reason for that.
    fn end(&self) -> Option<Result<()>> {
        match fork::guard(self.op.name()) {
            Ok(()) => lock(&self.inner).end().cloned(),
            Err(error) => Some(Err(error)),
        }
    }

    /// Lets callers that wait for this transfer take part in that work.
    pub(crate) fn set_help(&self, help: Weak<dyn Help>) {
        let _ = self.help.set(help);
    }

    fn wait(self: &Arc<Self>, until: Option<Instant>) -> Option<Result<()>> {
        if let Err(error) = fork::guard(self.op.name()).and_then(|()| runtime::may_block(self.op.name())) {
            return Some(Err(error));
        }
        if until.is_none_or(|until| until >= runtime::later(Instant::now(), LEAST_HELPFUL)) {
            self.launch();
            self.take_part();
        }
        let mut inner = lock(&self.inner);
        loop {
            if let Some(result) = inner.end() {
                return Some(result.clone());
            }
            inner = match until {
                None => self.ended.wait(inner).unwrap_or_else(std::sync::PoisonError::into_inner),
                Some(until) => {
                    let left = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
                    self.ended.wait_timeout(inner, left).unwrap_or_else(std::sync::PoisonError::into_inner).0
                }
            };
        }
    }

    fn next_check(&self, inner: &Inner) -> Instant {
        let stalled = runtime::later(inner.last_progress, self.limits.no_progress);
        let over = runtime::later(inner.started, self.limits.total_for(self.bytes));
        stalled.min(over)
    }

    /// Has the limits looked at then.
    fn check_at(self: &Arc<Self>, inner: &mut Inner, when: Instant) {
        if let Ok(reactor) = runtime::reactor() {
            let weak = Arc::downgrade(self);
            let timer: Weak<dyn Timer> = weak;
            inner.timer = Some(reactor.at(when, timer, 0));
        }
    }
}

impl Timer for TransferCore {
    fn fired(self: Arc<Self>, _key: u64) {
        let now = Instant::now();
        let error = {
            let mut inner = lock(&self.inner);
            if inner.state.ended().is_some() {
                let delivered = inner.delivering;
                drop(inner);
                if !delivered {
                    self.deliver();
                }
                if !delivered && self.is_held() {
                    self.link.stop(&self);
                }
                return;
            }
            let next = self.next_check(&inner);
            if now < next {
                return self.check_at(&mut inner, next);
            }
            let stalled = now.duration_since(inner.last_progress);
            let moved = inner.state.bytes();
            Error::new(
                Kind::Timeout,
                self.op.name(),
                format!(
                    "{moved} of {} bytes moved in {:.3} s, nothing in the last {:.3} s",
                    self.bytes,
                    now.duration_since(inner.started).as_secs_f64(),
                    stalled.as_secs_f64()
                ),
            )
        };
        self.stop(error);
    }
}

/// Serves transfers whose peer may be anywhere: numbers them within this process.
pub(crate) fn next_id() -> u64 {
    use std::sync::atomic::AtomicU64;
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
