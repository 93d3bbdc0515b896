//! One rank's membership in a group of NCCL's: how it comes to be, how far it is, and how it ends.
#![allow(unsafe_code, reason = "calls NCCL on communicators that are alive")]

use std::collections::VecDeque;
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use towline_sys::cuda::{Context, ContextName, Entered, Event};
use towline_sys::nccl::{self as sys, BufferCalls, Nccl, Progress, Slot};

use super::life::{Life, Stage};
use super::registered::{self, List, Registered};
use super::turn::TurnGuard;
use super::{failed, watch};
use crate::cuda::Gpu;
use crate::memory::Buffer;
use crate::{Error, Kind, Result, fork, interrupt, runtime};

/// What is set when a communicator is made.
#[derive(Debug, Clone)]
pub struct CommOptions {
    /// Whether calls wait until NCCL has taken them.
    pub blocking: bool,
    /// The longest wait, for other ranks and for streams.
    pub timeout: Duration,
    /// How many contexts signals have; before NCCL 2.31 there is one.
    pub contexts: u32,
    /// How many signals each context has; before NCCL 2.31 there is one.
    pub signals: u32,
}

impl Default for CommOptions {
    fn default() -> CommOptions {
        CommOptions { blocking: true, timeout: Duration::from_secs(30), contexts: 1, signals: 1 }
    }
}

/// A rank's membership in a group of NCCL's, on one GPU. Cheap to clone; [`destroy`](Comm::destroy) ends it for all clones.
///
/// ```no_run
/// use towline::nccl::{Comm, CommOptions, unique_id};
/// let comm = Comm::init(0, 1, 0, &unique_id()?, CommOptions::default())?;
/// assert_eq!(comm.place()?, (0, 1));
/// comm.destroy();
/// # Ok::<(), towline::Error>(())
/// ```
#[derive(Clone)]
pub struct Comm(pub(super) Arc<User>);

/// What keeps a communicator for its user. What is registered keeps it too, and not by a count of owners.
pub(super) struct User(Arc<Core>);

impl Deref for User {
    type Target = Arc<Core>;

    #[inline]
    fn deref(&self) -> &Arc<Core> {
        &self.0
    }
}

impl Drop for User {
    fn drop(&mut self) {
        if fork::in_child() {
            return;
        }
        let unused = self.0.calling.lock().leave();
        drop(unused);
    }
}

/// What the clones of a communicator share.
pub(super) struct Core {
    pub(super) nccl: Nccl,
    pub(super) gpu: Arc<Gpu>,
    /// Of the GPU, as nearly every call asks whether it is current.
    pub(super) context: Context,
    /// Of the GPU, which is asked for at every call.
    pub(super) ordinal: u32,
    pub(super) buffer_calls: BufferCalls,
    /// [`Nccl::registers_without_context`].
    pub(super) plain: bool,
    /// The context of which a thread that was seen with it is not asked again when it closes a buffer: `ncclCommDeregister` of 2.28
    /// leaves the primary context of the thread's device current.
    pub(super) seen: ContextName,
    pub(super) options: CommOptions,
    place: OnceLock<(usize, usize)>,
    raw: Slot,
    pub(super) life: Life,
    /// NCCL takes one call at a time for a communicator.
    pub(super) calling: List,
    pub(super) calls: Arc<watch::Calls>,
    in_flight: Mutex<InFlight>,
    /// How many calls are in it.
    flying: AtomicUsize,
    /// Memory that NCCL would not let go of; freed after the communicator.
    pub(super) kept: Mutex<Vec<Buffer>>,
    /// Of whose work it is made, until it is.
    parent: Mutex<Option<Arc<Core>>>,
}

#[derive(Default)]
struct InFlight {
    work: VecDeque<(Arc<Event>, [Option<Buffer>; 2])>,
    spare: Vec<Event>,
}

impl Comm {
    /// Joins a group of `nranks` as `rank`, on the GPU of that ordinal.
    ///
    /// # Errors
    /// `Unavailable` without NCCL, a driver or a GPU; `Timeout` where the ranks did not come in time; what NCCL says.
    pub fn init(
        ordinal: u32,
        nranks: usize,
        rank: usize,
        id: &[u8; 128],
        options: CommOptions,
    ) -> Result<Comm> {
        const OP: &str = "init";
        fork::guard(OP)?;
        let (count, number) = match (i32::try_from(nranks), i32::try_from(rank)) {
            (Ok(count), Ok(number)) if number < count => (count, number),
            _ => return Err(Error::invalid(OP, format!("there is no rank {rank} among {nranks}"))),
        };
        let nccl = Nccl::load().map_err(|error| failed(OP, None, error))?;
        let gpu = Gpu::open(ordinal).map_err(|error| error.during(OP))?;
        let core = Core::new(nccl, gpu, options, Slot::default(), None);
        let _ = core.place.set((rank, nranks));
        if core.options.blocking {
            meet(&core, count, id, number)?;
        } else {
            let _entered = core.gpu.enter(OP)?;
            let begun = core.nccl.init(&core.raw, count, id, number, core.config());
            begun.map_err(|error| failed(OP, Some(&core.nccl), error))?;
        }
        Ok(Comm::of(core))
    }

    fn of(core: Arc<Core>) -> Comm {
        if let Some(raw) = core.raw.comm().filter(|_| core.options.blocking) {
            core.life.has_settled(raw);
        }
        Comm(Arc::new(User(core)))
    }

    /// Rank and size. Not known before a split that does not block has ended.
    pub fn place(&self) -> Result<(usize, usize)> {
        self.0.place("rank")
    }

    /// The GPU that it is on.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.0.gpu
    }

    /// What was set when it was made.
    pub fn options(&self) -> &CommOptions {
        &self.0.options
    }

    /// NCCL's version, 22809 for 2.28.9.
    pub fn version(&self) -> u32 {
        self.0.nccl.version()
    }

    /// Whether it was neither destroyed nor aborted.
    #[inline]
    pub fn is_open(&self) -> bool {
        if self.0.life.is_open() {
            return true;
        }
        let life = self.0.life.lock();
        !life.closing && life.stage != Stage::Gone
    }

    /// Fails where it cannot be used for communication any more.
    pub fn check_usable(&self, op: &'static str) -> Result<()> {
        self.0.usable(op).map(drop)
    }

    /// How far it is: in progress, done, or the error with which it ended.
    pub fn progress(&self) -> Result<Progress> {
        self.0.progress("get_async_error")
    }

    /// Waits until nothing is in progress and all streams have got past what was put into them.
    ///
    /// # Errors
    /// `Timeout` at the deadline: then it was revoked or aborted.
    pub fn synchronize(&self) -> Result<()> {
        const OP: &str = "synchronize";
        self.0.settle(OP)?;
        self.0.drained(OP)?;
        self.0.failure().map_or(Ok(()), |failure| Err(failure.during(OP)))
    }

    /// How many handles are open.
    pub fn open_handles(&self) -> usize {
        self.0.calling.lock().len()
    }

    /// Waits until everything in flight has ended, and ends its use. A second call is harmless.
    pub fn finalize(&self) -> Result<()> {
        const OP: &str = "finalize";
        if self.0.life.lock().stage == Stage::Finalized {
            return Ok(());
        }
        self.0.settle(OP)?;
        self.0.drain(OP)?;
        self.0.finalize(OP)
    }

    /// Closes all handles once work in flight has ended, and leaves the group. A second call is harmless.
    pub fn destroy(&self) {
        self.0.close();
    }

    /// Ends the work in flight and leaves the group. A second call is harmless.
    pub fn abort(&self) {
        if fork::in_child() || std::mem::replace(&mut self.0.life.lock().closing, true) {
            return;
        }
        let why = Error::new(Kind::Canceled, "abort", "the communicator was aborted");
        self.0.abort(why);
        self.0.release();
    }

    /// Ends the work in flight and forbids further calls, but those that end it, split it or shrink it.
    ///
    /// # Errors
    /// `Unsupported` before NCCL 2.28.9; what NCCL says.
    pub fn revoke(&self) -> Result<()> {
        const OP: &str = "revoke";
        let raw = self.0.raw(OP)?;
        let mut life = self.0.life.lock();
        if life.stage == Stage::Revoked {
            return Ok(());
        }
        let _entered = self.0.gpu.enter(OP)?;
        // SAFETY: it is alive: what frees it holds the same lock.
        let revoked = unsafe { self.0.nccl.revoke(raw) };
        revoked.map_err(|error| failed(OP, Some(&self.0.nccl), error))?;
        life.stage = Stage::Revoked;
        life.failure = Some(Error::new(Kind::Canceled, OP, "the communicator was revoked"));
        Ok(())
    }

    /// Makes a group of the ranks of one colour, by key and then by rank. `None` for a rank without a colour.
    pub fn split(&self, color: Option<u32>, key: i64, options: CommOptions) -> Result<Option<Comm>> {
        const OP: &str = "split";
        let limits = "NCCL takes colours and keys below 2147483648";
        let number = color.map(i32::try_from).transpose().map_err(|_| Error::invalid(OP, limits))?;
        let key = i32::try_from(key).map_err(|_| Error::invalid(OP, limits))?;
        let child = self.child(OP, options, |raw, slot, config| {
            // SAFETY: the parent is alive; it and the child keep the slot.
            unsafe { self.0.nccl.split(raw, number, key, slot, config) }
        })?;
        Ok(number.map(|_| child))
    }

    /// Makes a group of all ranks but those; with `abort`, work in flight is ended first.
    pub fn shrink(&self, exclude: &[usize], abort: bool, options: CommOptions) -> Result<Comm> {
        const OP: &str = "shrink";
        let (rank, nranks) = self.place()?;
        if exclude.is_empty() || exclude.contains(&rank) || exclude.iter().any(|one| *one >= nranks) {
            let message = format!(
                "exclude: {exclude:?} must be ranks of this group of {nranks}, without the calling rank"
            );
            return Err(Error::invalid(OP, message));
        }
        let list: Vec<i32> = exclude.iter().map(|rank| *rank as i32).collect();
        self.child(OP, options, |raw, slot, config| {
            // SAFETY: the parent is alive; it and the child keep the slot.
            unsafe { self.0.nccl.shrink(raw, &list, slot, config, abort) }
        })
    }

    fn child(
        &self,
        op: &'static str,
        options: CommOptions,
        make: impl FnOnce(sys::Comm, &Slot, sys::Config) -> towline_sys::Result<Progress>,
    ) -> Result<Comm> {
        let parent: &Arc<Core> = &self.0;
        fork::guard(op)?;
        let raw = parent.raw(op)?;
        // One that was revoked can still be split and shrunk.
        if parent.failure().is_none() {
            parent.settle(op)?;
        }
        let slot = Slot::default();
        let (nccl, gpu) = (parent.nccl.clone(), Arc::clone(&parent.gpu));
        let child = Core::new(nccl, gpu, options, slot.clone(), Some(Arc::clone(parent)));
        let _entered = parent.gpu.enter(op)?;
        let _one = parent.serialise();
        let guard = parent.guard();
        let made = make(raw, &slot, child.config());
        drop(guard);
        made.map_err(|error| parent.explain(op, error))?;
        Ok(Comm::of(child))
    }
}

/// Calls the blocking init in a thread of its own: NCCL cannot give it up.
fn meet(core: &Arc<Core>, nranks: i32, id: &[u8; 128], rank: i32) -> Result<()> {
    const OP: &str = "init";
    let abandoned = Arc::new(Mutex::new(false));
    let (sender, receiver) = mpsc::channel();
    let (id, inner, left) = (*id, Arc::clone(core), Arc::clone(&abandoned));
    let work = move || {
        let begun = inner.gpu.enter(OP).and_then(|_entered| {
            let made = inner.nccl.init(&inner.raw, nranks, &id, rank, inner.config());
            made.map_err(|error| failed(OP, Some(&inner.nccl), error))
        });
        let left = left.lock();
        if *left {
            inner.abort(Error::new(Kind::Timeout, OP, "the ranks joined too late"));
        } else {
            let _ = sender.send(begun);
        }
    };
    runtime::start_thread(OP, "towline-nccl-init", work)?;
    let begun = Instant::now();
    let (mut left, mut interrupted) = (core.options.timeout, Ok(()));
    while !left.is_zero() && interrupted.is_ok() {
        if let Ok(outcome) = receiver.recv_timeout(interrupt::turn(left)) {
            return outcome.map(drop);
        }
        interrupted = interrupt::check(OP);
        left = core.options.timeout.saturating_sub(begun.elapsed());
    }
    *abandoned.lock() = true;
    if let Ok(outcome) = receiver.try_recv() {
        return outcome.map(drop);
    }
    interrupted?;
    let seconds = core.options.timeout.as_secs_f64();
    let message = format!(
        "ncclCommInitRankConfig is still in progress after {seconds:.3} s: not all {nranks} ranks have joined"
    );
    Err(Error::new(Kind::Timeout, OP, message))
}

impl Core {
    fn new(
        nccl: Nccl,
        gpu: Arc<Gpu>,
        options: CommOptions,
        raw: Slot,
        parent: Option<Arc<Core>>,
    ) -> Arc<Core> {
        Arc::new(Core {
            buffer_calls: nccl.buffer_calls(),
            plain: nccl.registers_without_context(),
            seen: if nccl.registers_without_context() { gpu.context.name() } else { ContextName::NONE },
            nccl,
            ordinal: gpu.ordinal(),
            context: gpu.context.clone(),
            gpu,
            options,
            place: OnceLock::new(),
            raw,
            life: Life::new(),
            calling: registered::list(),
            calls: Arc::new(watch::Calls::new()),
            in_flight: Mutex::default(),
            flying: AtomicUsize::new(0),
            kept: Mutex::default(),
            parent: Mutex::new(parent),
        })
    }

    fn config(&self) -> sys::Config {
        let CommOptions { blocking, contexts, signals, .. } = self.options;
        sys::Config { blocking, contexts: Some(contexts), signals: Some(signals) }
    }

    /// NCCL's handle, while there is one.
    #[inline]
    fn raw(&self, op: &'static str) -> Result<sys::Comm> {
        fork::guard(op)?;
        if self.life.is_gone() {
            return Err(closed(op));
        }
        self.raw.comm().ok_or_else(|| Error::invalid(op, "the communicator is not initialised yet"))
    }

    /// NCCL's handle, for communication.
    #[inline]
    pub(super) fn usable(&self, op: &'static str) -> Result<sys::Comm> {
        let raw = self.raw(op)?;
        if self.life.is_open() {
            return Ok(raw);
        }
        self.usable_yet(op, raw)
    }

    #[cold]
    fn usable_yet(&self, op: &'static str, raw: sys::Comm) -> Result<sys::Comm> {
        let life = self.life.lock();
        match life.stage {
            Stage::Open if !life.closing => Ok(raw),
            Stage::Finalized => Err(Error::invalid(op, "the communicator is finalized")),
            Stage::Revoked => Err(life.failure.clone().unwrap_or_else(|| closed(op)).during(op)),
            _ => Err(closed(op)),
        }
    }

    pub(super) fn place(&self, op: &'static str) -> Result<(usize, usize)> {
        if let Some(place) = self.place.get() {
            return if self.is_gone() { Err(closed(op)) } else { Ok(*place) };
        }
        self.settle(op)?;
        let raw = self.raw(op)?;
        // SAFETY: it is alive, and nothing is in progress.
        let place = unsafe { self.nccl.place(raw) };
        let place = place.map_err(|error| failed(op, Some(&self.nccl), error))?;
        Ok(*self.place.get_or_init(|| place))
    }

    /// Why it was stopped, if it was.
    pub(super) fn failure(&self) -> Option<Error> {
        // Under the lock: who stops it ends the call before it has written down why.
        self.life.lock().failure.clone()
    }

    /// What a refusal means: where it was stopped meanwhile, that is why.
    pub(super) fn explain(&self, op: &'static str, error: towline_sys::Error) -> Error {
        match self.failure() {
            Some(why) => Error::new(why.kind(), op, format!("{}: {error}", why.message())).caused_by(error),
            None => failed(op, Some(&self.nccl), error),
        }
    }

    /// Limits a call that waits inside NCCL.
    #[inline]
    pub(super) fn guard(self: &Arc<Self>) -> Option<watch::Guard<'_>> {
        self.options.blocking.then(|| watch::guard(self))
    }

    /// Takes the right to call NCCL for this communicator.
    pub(super) fn serialise(&self) -> TurnGuard<'_, Registered> {
        self.calling.lock()
    }

    pub(super) fn progress(&self, op: &'static str) -> Result<Progress> {
        if let Some(failure) = self.failure() {
            return Err(failure.during(op));
        }
        let Some(raw) = self.raw.comm() else {
            let parent = self.parent.lock().clone();
            let parent =
                parent.ok_or_else(|| Error::invalid(op, "the communicator is not initialised yet"))?;
            // A parent that was revoked reports nothing more; the handle comes, or the deadline does.
            if parent.failure().is_some() {
                return Ok(Progress::InProgress);
            }
            // The parent writes the handle before it says that it is done.
            return match parent.progress(op)? {
                Progress::Done if self.raw.comm().is_none() => {
                    Err(Error::invalid(op, "this rank belongs to no group"))
                }
                _ => Ok(Progress::InProgress),
            };
        };
        let life = self.life.lock();
        if life.stage == Stage::Gone {
            return Err(closed(op));
        }
        let _entered = self.gpu.enter(op)?;
        // SAFETY: it is alive: what frees it holds the same lock.
        let progress = unsafe { self.nccl.progress(raw) };
        let progress = progress.map_err(|error| failed(op, Some(&self.nccl), error))?;
        if progress == Progress::Done {
            self.parent.lock().take();
        }
        Ok(progress)
    }

    /// Whether nothing can be in progress between calls.
    #[inline]
    pub(super) fn is_settled(&self) -> bool {
        self.options.blocking && self.raw.comm().is_some()
    }

    /// NCCL's handle, where every call is possible, nothing is in progress, and no stream uses anything.
    #[inline]
    pub(super) fn calm_already(&self) -> Option<sys::Comm> {
        if self.flying.load(Ordering::Acquire) == 0 { self.life.ready() } else { None }
    }

    /// Waits until nothing is in progress; at the deadline it is stopped, and where the caller is interrupted: what is in progress
    /// may use the caller's memory.
    pub(super) fn settle(&self, op: &'static str) -> Result<()> {
        if self.is_settled() {
            return Ok(());
        }
        let begun = Instant::now();
        let mut pause = Duration::from_micros(10);
        while self.progress(op)? == Progress::InProgress {
            if begun.elapsed() >= self.options.timeout {
                let (seconds, state) = (self.options.timeout.as_secs_f64(), self.stop(op));
                let message = format!("still in progress after {seconds:.3} s; {state}");
                return Err(Error::new(Kind::Timeout, op, message));
            }
            if let Err(interrupted) = interrupt::check(op) {
                self.stop(op);
                return Err(interrupted);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
        Ok(())
    }

    /// [`drained`](Self::drained) before something is freed: it is stopped also where the caller is interrupted.
    pub(super) fn drain(&self, op: &'static str) -> Result<()> {
        self.drained(op).inspect_err(|_| drop(self.stop(op)))
    }

    /// Waits until the streams have got past all that was put into them; at the deadline it is stopped.
    fn drained(&self, op: &'static str) -> Result<()> {
        if self.flying.load(Ordering::Acquire) == 0 || self.streams_end(self.options.timeout, op)? {
            return Ok(());
        }
        let (seconds, state) = (self.options.timeout.as_secs_f64(), self.stop(op));
        let message = format!("streams have not got past the work in them in {seconds:.3} s; {state}");
        Err(Error::new(Kind::Timeout, op, message))
    }

    /// False at the limit.
    fn streams_end(&self, within: Duration, op: &'static str) -> Result<bool> {
        let begun = Instant::now();
        let mut pause = Duration::from_micros(5);
        loop {
            self.sweep(usize::MAX);
            if self.in_flight.lock().work.is_empty() {
                return Ok(true);
            }
            if begun.elapsed() >= within {
                return Ok(false);
            }
            interrupt::check(op)?;
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    /// Lets go of memory that the streams have got past, of at most so many calls.
    pub(super) fn sweep(&self, most: usize) {
        let mut over = Vec::new();
        {
            let mut in_flight = self.in_flight.lock();
            for _ in 0..most {
                // A lost context answers with an error: nothing runs there any more.
                let Some((event, _)) = in_flight.work.front() else { break };
                if matches!(event.has_happened(), Ok(false)) {
                    break;
                }
                let Some((event, memory)) = in_flight.work.pop_front() else { break };
                self.flying.fetch_sub(1, Ordering::Release);
                if let Some(event) = Arc::into_inner(event) {
                    in_flight.spare.push(event);
                }
                over.push(memory);
            }
        }
        // The owners are notified outside of the lock.
        drop(over);
    }

    /// An event for work that is put into a stream.
    pub(super) fn event(&self, op: &'static str, entered: &Entered<'_>) -> Result<Event> {
        match self.in_flight.lock().spare.pop() {
            Some(event) => Ok(event),
            None => entered.event().map_err(|error| crate::cuda::failed(op, error)),
        }
    }

    /// Keeps memory until the event has happened.
    pub(super) fn keep(&self, event: &Arc<Event>, memory: [Option<Buffer>; 2]) {
        let mut in_flight = self.in_flight.lock();
        in_flight.work.push_back((Arc::clone(event), memory));
        self.flying.fetch_add(1, Ordering::Release);
    }

    /// Revokes it, or aborts it where NCCL cannot revoke, and says so. Any thread, also while another is inside NCCL.
    pub(super) fn stop(&self, op: &'static str) -> String {
        let mut life = self.life.lock();
        if let Some(failure) = &life.failure {
            return failure.message().to_owned();
        }
        let Some(raw) = self.raw.comm().filter(|_| life.stage != Stage::Gone) else {
            return "it was not initialised".to_owned();
        };
        let _entered = self.gpu.enter(op);
        // SAFETY: it is alive: what frees it holds the same lock.
        let state = match unsafe { self.nccl.progress(raw) } {
            Ok(Progress::Done) => "NCCL knows of no error".to_owned(),
            Ok(Progress::InProgress) => "NCCL says that it is in progress".to_owned(),
            Err(error) => format!("NCCL says: {error}"),
        };
        // SAFETY: as above.
        let done = match unsafe { self.nccl.revoke(raw) } {
            Ok(_) => {
                life.stage = Stage::Revoked;
                "the communicator was revoked"
            }
            Err(_) => {
                life.stage = Stage::Gone;
                // SAFETY: as above, and it is not used again.
                match unsafe { self.nccl.abort(raw) } {
                    Ok(_) => "the communicator was aborted",
                    Err(_) => "the communicator could not be aborted",
                }
            }
        };
        let message = format!("{state}; {done}");
        life.failure = Some(Error::new(Kind::Timeout, op, message.clone()));
        message
    }

    /// Ends a call that waits inside NCCL and has come to its deadline: revokes, or aborts what was revoked already.
    pub(super) fn stop_call(&self, op: &'static str) {
        if self.life.lock().stage != Stage::Revoked {
            self.stop(op);
            return;
        }
        self.abort(Error::new(Kind::Timeout, op, "the communicator was aborted"));
    }

    fn abort(&self, why: Error) {
        let mut life = self.life.lock();
        life.failure.get_or_insert(why);
        let Some(raw) = self.raw.comm().filter(|_| life.stage != Stage::Gone) else { return };
        life.stage = Stage::Gone;
        let Ok(_entered) = self.gpu.enter("abort") else { return };
        // SAFETY: it is alive: what frees it holds the same lock; it is not used again.
        if let Err(error) = unsafe { self.nccl.abort(raw) } {
            tracing::error!(%error, "a communicator of NCCL's could not be aborted");
        }
    }

    fn finalize(self: &Arc<Self>, op: &'static str) -> Result<()> {
        let raw = self.usable(op)?;
        let entered = self.gpu.enter(op)?;
        let one = self.serialise();
        let guard = self.guard();
        // SAFETY: it is alive; only its owner frees it, or who stops it, and then NCCL gives an error.
        let ended = unsafe { self.nccl.finalize(raw) };
        drop((guard, one, entered));
        ended.map_err(|error| self.explain(op, error))?;
        self.settle(op)?;
        let mut life = self.life.lock();
        if life.stage == Stage::Open {
            life.stage = Stage::Finalized;
        }
        Ok(())
    }

    /// Closes handles after work in flight, then frees the communicator; one that has failed is aborted, which waits for nobody.
    fn close(self: &Arc<Self>) {
        const OP: &str = "destroy";
        if fork::in_child() {
            return;
        }
        {
            let life = self.life.lock();
            if life.closing {
                return;
            }
        }
        if self.raw.comm().is_some() || self.parent.lock().is_some() {
            // Whatever goes wrong here has stopped the communicator, and what follows sees that.
            let calm = self.settle(OP).and_then(|()| self.drain(OP));
            self.close_handles();
            let open = self.life.lock().stage == Stage::Open;
            let ended = if open { calm.and_then(|()| self.finalize(OP)) } else { calm };
            if let Err(error) = ended {
                tracing::warn!(%error, "a communicator did not end in order");
            }
        }
        {
            let mut life = self.life.lock();
            if std::mem::replace(&mut life.closing, true) {
                return;
            }
            if let Some(raw) = self.raw.comm().filter(|_| life.stage != Stage::Gone)
                && let Ok(_entered) = self.gpu.enter(OP)
            {
                life.stage = Stage::Gone;
                // SAFETY: it is alive, nothing is in progress or it has failed, and it is not used again.
                let freed = unsafe {
                    if life.failure.is_some() { self.nccl.abort(raw) } else { self.nccl.destroy(raw) }
                };
                if let Err(error) = freed {
                    tracing::error!(%error, "a communicator of NCCL's could not be destroyed");
                }
            }
            life.stage = Stage::Gone;
        }
        self.release();
    }

    /// Lets go of all memory once no stream uses it. The communicator is gone.
    fn release(self: &Arc<Self>) {
        self.close_handles();
        if !self.streams_end(self.options.timeout, "destroy").unwrap_or(false) {
            let left = std::mem::take(&mut self.in_flight.lock().work);
            self.flying.store(0, Ordering::Release);
            tracing::error!(
                calls = left.len(),
                "streams still use memory of a destroyed communicator; the memory is kept"
            );
            std::mem::forget(left);
        }
        drop(std::mem::take(&mut *self.kept.lock()));
    }

    /// Whether NCCL has freed it, or will not be asked any more.
    #[inline]
    pub(super) fn is_gone(&self) -> bool {
        self.life.is_gone()
    }

    /// NCCL's handle, for closing what was registered with it.
    #[inline]
    pub(super) fn for_closing(&self) -> Option<sys::Comm> {
        if self.is_gone() { None } else { self.raw.comm() }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if fork::in_child() {
            return;
        }
        // Only a communicator whose maker failed gets here alive: `Comm` and its user destroy it.
        self.abort(Error::new(Kind::Canceled, "drop", "the communicator was dropped"));
        registered::give_back(self.calling);
    }
}

fn closed(op: &'static str) -> Error {
    Error::invalid(op, "the communicator was destroyed or aborted")
}

impl fmt::Debug for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Comm")
            .field("gpu", &self.0.gpu.ordinal())
            .field("place", &self.0.place.get())
            .finish()
    }
}
