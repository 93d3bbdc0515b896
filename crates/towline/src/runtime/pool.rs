//! The copy pool: threads for what takes long, grown on demand and gone when idle.

#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::time::{ClockId, clock_gettime};

use super::reactor::be_polite;
use super::{panic_message, start_thread};
use crate::Error;
use crate::fork;

/// One piece of work.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// A worker without work leaves after this time: long against the gaps inside a burst of transfers, short
/// enough that an idle process soon has no thread left.
const LINGER: Duration = Duration::from_secs(1);

/// No pool has more threads.
const MOST: usize = 64;

/// How a worker looks for its next job before it sleeps; see [`Pool::look_next`].
#[derive(Clone, Copy)]
struct Looks {
    /// For so long after the others have finished.
    after: Duration,
    /// And for so long in all.
    most: Duration,
    /// A looker that has not looked for this long has lost its processor, and finds nothing until it has one again.
    lost: Duration,
}

/// Between two looks, about half a microsecond.
const SPINS: usize = 16;

/// The time that a caller needs to come back with its next transfer, and two milliseconds, which a portion of a copy takes.
const LOOKS: Looks = Looks {
    after: Duration::from_micros(100),
    most: Duration::from_millis(2),
    lost: Duration::from_micros(20),
};

/// A job that was not accepted, handed back with the reason; `?` turns it into the reason.
pub(crate) struct Refused {
    /// The job, not run.
    pub(crate) job: Job,
    /// Why.
    pub(crate) error: Error,
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Error {
        refused.error
    }
}

impl fmt::Debug for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.error, f)
    }
}

/// Threads that run jobs, started in the order of their coming.
///
/// A job that panics is logged, and its thread goes on. Jobs may block, but the pool does not grow past its
/// limit: a job that waits for the other side should look at [`Pool::busy_or_queued`] and make room, or wait
/// [aside](Pool::aside).
pub(crate) struct Pool {
    name: &'static str,
    polite: bool,
    linger: Duration,
    looks: Looks,
    /// 0 where the machine decides and has not been asked yet.
    limit: AtomicUsize,
    state: Mutex<State>,
    /// What each worker waits at, by its number.
    calls: [Condvar; MOST],
    /// The queue's length, readable without the lock.
    queued: AtomicUsize,
    /// The looker has been given a job.
    found: AtomicBool,
    /// When it looked last, in nanoseconds.
    looked: AtomicU64,
}

struct State {
    queue: VecDeque<Job>,
    /// One bit per running thread, at its number.
    threads: u64,
    /// Workers that wait and have not been called. The last one is called first: it is warm, and those beyond what is needed leave.
    /// Called in the order of their coming, three took turns at two lanes wherever there happened to be a third, and were on
    /// other cores than the other sides of their lanes: reads over tcp were then up to half as fast.
    idle: Vec<usize>,
    /// The job of each worker that was called and has not come yet.
    given: [Option<Job>; MOST],
    /// The one of `idle` that looks for a job and does not sleep.
    looker: Option<usize>,
    /// Workers that are aside: as many others may take their places.
    aside: usize,
}

impl Pool {
    /// A pool without threads, which may have up to `limit` (at most 64; 0: as many as the machine suggests),
    /// named `name-N`.
    ///
    /// Constant, so that the process's pool needs no lock to come into being: a forked child could find that
    /// lock held for ever, before it reaches the guard.
    pub(super) const fn new(name: &'static str, limit: usize) -> Pool {
        Pool {
            name,
            polite: false,
            linger: LINGER,
            looks: LOOKS,
            limit: AtomicUsize::new(limit),
            state: Mutex::new(State {
                queue: VecDeque::new(),
                threads: 0,
                idle: Vec::new(),
                given: [const { None }; MOST],
                looker: None,
                aside: 0,
            }),
            calls: [const { Condvar::new() }; MOST],
            queued: AtomicUsize::new(0),
            found: AtomicBool::new(false),
            looked: AtomicU64::new(0),
        }
    }

    /// A thread that calls its threads keeps its processor.
    pub(super) const fn polite(mut self) -> Pool {
        self.polite = true;
        self
    }

    /// How many threads there can be: one per core that this process may use, but no more than 16, which
    /// saturate the memory of most machines.
    pub(crate) fn limit(&self) -> usize {
        match self.limit.load(Ordering::Relaxed) {
            0 => {
                let limit = thread::available_parallelism().map_or(1, usize::from).clamp(1, 16);
                self.limit.store(limit, Ordering::Relaxed);
                limit
            }
            limit => limit.min(MOST),
        }
    }

    /// Queues a job and sees to it that a thread comes for it: a waiting one, a new one below the limit, or
    /// the next that becomes free.
    ///
    /// Handed back, never run inline (the caller may be the event loop, which must not block):
    /// `Exhausted` where the pool has no thread and none can be started, `Unavailable` in a forked child.
    pub(crate) fn spawn(&'static self, job: Job) -> std::result::Result<(), Refused> {
        self.spawn_near(None, job)
    }

    /// [`spawn`](Self::spawn), by the worker of that [number](Pool::number) where it waits: it left what the job needs in the caches
    /// of its core, and whom the job talks to is used to finding it there.
    pub(crate) fn spawn_near(
        &'static self,
        worker: Option<usize>,
        job: Job,
    ) -> std::result::Result<(), Refused> {
        if let Err(error) = fork::guard("queue a copy") {
            return Err(Refused { job, error });
        }
        let limit = self.limit();
        let mut state = self.state.lock();
        if let Some(number) = self.choose(&mut state, worker) {
            state.given[number] = Some(job);
            if state.looker == Some(number) {
                state.looker = None;
                self.found.store(true, Ordering::Release);
                return Ok(());
            }
            drop(state);
            self.calls[number].notify_one();
            return Ok(());
        }
        self.queue(state, limit, job)
    }

    /// Leaves a job to the next that becomes free, and starts one more where there may be one.
    #[cold]
    fn queue(
        &'static self,
        mut state: MutexGuard<'_, State>,
        limit: usize,
        job: Job,
    ) -> std::result::Result<(), Refused> {
        state.queue.push_back(job);
        self.queued.store(state.queue.len(), Ordering::Relaxed);
        let number = (!state.threads).trailing_zeros() as usize;
        if number >= (limit + state.aside).min(MOST) {
            return Ok(());
        }
        // The thread is started under the lock, so that on failure the last job in the queue is still ours
        // and the count of threads that could serve it is exact.
        match start_thread("queue a copy", format!("{}-{number}", self.name), move || self.work(number)) {
            Ok(_) => {
                state.threads |= 1 << number;
                Ok(())
            }
            Err(error) if state.threads == 0 => {
                let job = state.queue.pop_back();
                self.queued.store(state.queue.len(), Ordering::Relaxed);
                drop(state);
                match job {
                    Some(job) => Err(Refused { job, error }),
                    None => Ok(()),
                }
            }
            Err(error) => {
                drop(state);
                tracing::debug!(%error, pool = self.name, "cannot start another thread; the job waits for a busy one");
                Ok(())
            }
        }
    }

    /// Takes the waiting worker out of the list that gets the next job: the given one, one that spins, or the one that began to wait last.
    fn choose(&self, state: &mut State, worker: Option<usize>) -> Option<usize> {
        let idle = &state.idle;
        let place = |number| idle.iter().position(|idle| *idle == number);
        let has_processor =
            || now().saturating_sub(self.looked.load(Ordering::Relaxed)) < self.looks.lost.as_nanos() as u64;
        let at = worker
            .and_then(place)
            .or_else(|| state.looker.filter(|_| has_processor()).and_then(place))
            .or_else(|| idle.iter().rposition(|idle| state.looker != Some(*idle)))
            .or_else(|| idle.len().checked_sub(1))?;
        Some(state.idle.remove(at))
    }

    /// Has the worker that calls this look for its next job when it has done this one, instead of going to sleep at once: while others
    /// are still at what it has worked on, and a little longer. Nobody has to be woken for a job that comes meanwhile, which takes
    /// up to 60 µs of the caller's time where the processor that is to take it has been halted. One looks at a time.
    ///
    /// Not for a thread that has just woken another: the kernel may have put that thread behind this one, on the same processor.
    pub(crate) fn look_next(&'static self, others: impl Fn() -> bool + 'static) {
        if OWN.get().is_some_and(|own| std::ptr::eq(own, self)) {
            OTHERS.set(Some(Box::new(others)));
        }
    }

    /// Looks until a job has come, or it is time to sleep.
    fn look(&self, others: &dyn Fn() -> bool) {
        let start = now();
        let (mut at, mut finished) = (start, None);
        while !self.found.load(Ordering::Acquire) {
            if finished.is_none() && !others() {
                finished = Some(at);
            }
            let after = finished.map_or(0, |finished| at.saturating_sub(finished));
            if after > self.looks.after.as_nanos() as u64 || at - start > self.looks.most.as_nanos() as u64 {
                return;
            }
            for _ in 0..SPINS {
                spin_loop();
            }
            at = now();
            self.looked.store(at, Ordering::Relaxed);
        }
    }

    /// Whether jobs wait for a thread: a worker that only waits for the other side should then make room.
    pub(crate) fn busy_or_queued(&self) -> bool {
        self.queued.load(Ordering::Relaxed) > 0
    }

    /// How many jobs wait for a thread.
    #[cfg(test)]
    pub(crate) fn queued(&self) -> usize {
        self.queued.load(Ordering::Relaxed)
    }

    /// Lets a worker wait for the other side, for a bounded time, while jobs that come meanwhile find another thread.
    /// `None`, without waiting, where jobs wait already.
    pub(crate) fn aside<T>(&self, wait: impl FnOnce() -> T) -> Option<T> {
        struct Aside<'a>(&'a Pool);
        impl Drop for Aside<'_> {
            fn drop(&mut self) {
                self.0.state.lock().aside -= 1;
            }
        }
        let mut state = self.state.lock();
        if !state.queue.is_empty() {
            return None;
        }
        state.aside += 1;
        drop(state);
        let _aside = Aside(self);
        Some(wait())
    }

    /// The number of the worker that calls this; `None` where another thread does.
    pub(crate) fn number() -> Option<usize> {
        NUMBER.get()
    }

    fn run(&self, job: Job) {
        OTHERS.set(None);
        if let Err(payload) = catch_unwind(AssertUnwindSafe(job)) {
            let message = panic_message(payload);
            tracing::error!(%message, pool = self.name, "a job panicked; its thread goes on");
        }
    }

    /// One worker's life.
    fn work(&'static self, number: usize) {
        if self.polite {
            be_polite();
        }
        NUMBER.set(Some(number));
        OWN.set(Some(self));
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.queue.pop_front() {
                self.queued.store(state.queue.len(), Ordering::Relaxed);
                drop(state);
                self.run(job);
                state = self.state.lock();
                continue;
            }
            state.idle.push(number);
            if let Some(others) = OTHERS.take()
                && state.looker.is_none()
            {
                state.looker = Some(number);
                self.found.store(false, Ordering::Relaxed);
                self.looked.store(now(), Ordering::Relaxed);
                drop(state);
                self.look(&*others);
                drop(others);
                state = self.state.lock();
                if state.looker == Some(number) {
                    state.looker = None;
                }
            }
            let until = Instant::now() + self.linger;
            let job = loop {
                // It may have been called while it looked, or when its time was just up.
                if let Some(job) = state.given[number].take() {
                    break job;
                }
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    state.idle.retain(|idle| *idle != number);
                    state.threads &= !(1 << number);
                    return;
                }
                self.calls[number].wait_for(&mut state, left);
            };
            drop(state);
            self.run(job);
            state = self.state.lock();
        }
    }
}

thread_local! {
    static NUMBER: Cell<Option<usize>> = const { Cell::new(None) };
    /// The pool of the worker that this thread is.
    static OWN: Cell<Option<&'static Pool>> = const { Cell::new(None) };
    /// Whether others are still at what this worker has worked on; nothing where it goes to sleep at once.
    static OTHERS: Cell<Option<Box<dyn Fn() -> bool>>> = const { Cell::new(None) };
}

/// The moment in nanoseconds, which unlike an [`Instant`] an atomic holds.
fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
