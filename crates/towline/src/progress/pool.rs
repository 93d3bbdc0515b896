//! The copy pool: threads for what takes long, grown on demand and gone when idle.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::{lock, no_thread, panic_message, start_thread};
use crate::error::Error;
use crate::fork;

/// One piece of work.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// A worker without work leaves after this time: long against the gaps inside a burst of transfers, short
/// enough that an idle process soon has no thread left.
const LINGER: Duration = Duration::from_secs(1);

/// Threads of the process's pool: one per core that this process may use, but no more than saturate memory.
pub(super) fn limit() -> usize {
    thread::available_parallelism().map_or(1, usize::from).clamp(1, 16)
}

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
/// limit: a job that waits for the other side should look at [`Pool::busy_or_queued`] and make room.
pub(crate) struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    name: &'static str,
    limit: usize,
    state: Mutex<State>,
    work: Condvar,
    /// The queue's length, readable without the lock.
    queued: AtomicUsize,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    /// One bit per running thread, at its number.
    threads: u64,
    /// Workers that wait and have not been called.
    idle: usize,
    /// Calls that no worker has answered yet.
    called: usize,
}

impl Pool {
    /// A pool without threads, which may have up to `limit` (at most 64), named `name-N`.
    pub(super) fn new(name: &'static str, limit: usize) -> Pool {
        Pool {
            shared: Arc::new(Shared {
                name,
                limit: limit.clamp(1, 64),
                state: Mutex::new(State::default()),
                work: Condvar::new(),
                queued: AtomicUsize::new(0),
            }),
        }
    }

    /// How many threads there can be.
    pub(crate) fn limit(&self) -> usize {
        self.shared.limit
    }

    /// Queues a job and sees to it that a thread comes for it: a waiting one, a new one below the limit, or
    /// the next that becomes free.
    ///
    /// Handed back, never run inline (the caller may be the event loop, which must not block):
    /// `Exhausted` where the pool has no thread and none can be started, `Unavailable` in a forked child.
    pub(crate) fn spawn(&self, job: Job) -> std::result::Result<(), Refused> {
        if let Err(error) = fork::guard("queue a copy") {
            return Err(Refused { job, error });
        }
        let shared = &self.shared;
        let mut state = lock(&shared.state);
        state.queue.push_back(job);
        shared.queued.store(state.queue.len(), Ordering::Relaxed);
        if state.idle > 0 {
            state.idle -= 1;
            state.called += 1;
            drop(state);
            shared.work.notify_one();
            return Ok(());
        }
        let number = (!state.threads).trailing_zeros() as usize;
        if number >= shared.limit {
            return Ok(());
        }
        // The thread is started under the lock, so that on failure the last job in the queue is still ours
        // and the count of threads that could serve it is exact.
        let worker = Arc::clone(shared);
        match start_thread(format!("{}-{number}", shared.name), move || worker.work(number)) {
            Ok(_) => {
                state.threads |= 1 << number;
                Ok(())
            }
            Err(error) if state.threads == 0 => {
                let job = state.queue.pop_back();
                shared.queued.store(state.queue.len(), Ordering::Relaxed);
                drop(state);
                match job {
                    Some(job) => Err(Refused { job, error: no_thread("queue a copy", error) }),
                    None => Ok(()),
                }
            }
            Err(error) => {
                tracing::debug!(%error, pool = shared.name, "no further thread; the job waits for a busy one");
                Ok(())
            }
        }
    }

    /// Whether jobs wait for a thread: a worker that only waits for the other side should then make room.
    pub(crate) fn busy_or_queued(&self) -> bool {
        self.shared.queued.load(Ordering::Relaxed) > 0
    }
}

impl Shared {
    /// One worker's life.
    fn work(&self, number: usize) {
        let mut state = lock(&self.state);
        loop {
            if let Some(job) = state.queue.pop_front() {
                self.queued.store(state.queue.len(), Ordering::Relaxed);
                drop(state);
                if let Err(payload) = catch_unwind(AssertUnwindSafe(job)) {
                    let message = panic_message(payload);
                    tracing::error!(%message, pool = self.name, "a job panicked; its thread goes on");
                }
                state = lock(&self.state);
                continue;
            }
            state.idle += 1;
            let until = Instant::now() + LINGER;
            loop {
                let left = until.saturating_duration_since(Instant::now());
                state = self.work.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
                // A call is for whoever comes first, which may be a worker whose time is just up.
                if state.called > 0 {
                    state.called -= 1;
                    break;
                }
                if Instant::now() >= until {
                    state.idle -= 1;
                    state.threads &= !(1 << number);
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use std::sync::Barrier;
    use std::sync::mpsc::channel;

    use super::*;

    const WATCHDOG: Duration = Duration::from_secs(30);

    fn threads_named(prefix: &str) -> usize {
        std::fs::read_dir("/proc/self/task")
            .unwrap()
            .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
            .filter(|name| name.starts_with(prefix))
            .count()
    }

    fn wait_until(what: &str, condition: impl Fn() -> bool) {
        let watchdog = Instant::now() + WATCHDOG;
        while !condition() {
            assert!(Instant::now() < watchdog, "waited too long until {what}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn ten_thousand_jobs_run_once_each_and_no_thread_stays() {
        let pool = Pool::new("t-shrink", 4);
        let done = Arc::new(AtomicUsize::new(0));
        for _ in 0..10_000 {
            let done = Arc::clone(&done);
            pool.spawn(Box::new(move || {
                done.fetch_add(1, Ordering::Relaxed);
            }))
            .unwrap();
        }
        wait_until("all jobs have run", || done.load(Ordering::Relaxed) == 10_000);
        assert!(threads_named("t-shrink") <= pool.limit());
        wait_until("the threads have left", || threads_named("t-shrink") == 0);
        assert_eq!(done.load(Ordering::Relaxed), 10_000);
        assert!(!pool.busy_or_queued());

        let (sender, receiver) = channel();
        pool.spawn(Box::new(move || sender.send(()).unwrap())).unwrap();
        receiver.recv_timeout(WATCHDOG).expect("an emptied pool grows again");
    }

    #[test]
    fn blocked_jobs_each_get_a_thread_up_to_the_limit_and_the_next_is_seen_waiting() {
        let pool = Pool::new("t-grow", 3);
        let barrier = Arc::new(Barrier::new(4));
        for _ in 0..3 {
            let barrier = Arc::clone(&barrier);
            pool.spawn(Box::new(move || {
                barrier.wait();
            }))
            .unwrap();
        }
        wait_until("three jobs were taken", || !pool.busy_or_queued());
        assert_eq!(threads_named("t-grow"), 3);
        let (sender, receiver) = channel();
        pool.spawn(Box::new(move || sender.send(()).unwrap())).unwrap();
        assert!(pool.busy_or_queued());
        barrier.wait();
        receiver.recv_timeout(WATCHDOG).unwrap();
        assert_eq!(threads_named("t-grow-3"), 0);
    }

    #[test]
    fn a_waiting_thread_is_used_before_a_new_one_is_started() {
        let pool = Pool::new("t-reuse", 8);
        for _ in 0..50 {
            let (sender, receiver) = channel();
            pool.spawn(Box::new(move || sender.send(()).unwrap())).unwrap();
            receiver.recv_timeout(WATCHDOG).unwrap();
            wait_until("the worker waits again", || lock(&pool.shared.state).idle > 0);
        }
        assert_eq!(lock(&pool.shared.state).threads, 1);
    }

    #[test]
    fn a_panicking_job_does_not_end_its_thread() {
        let pool = Pool::new("t-panic", 1);
        let (sender, receiver) = channel();
        let before = sender.clone();
        pool.spawn(Box::new(move || before.send(thread::current().id()).unwrap())).unwrap();
        pool.spawn(Box::new(|| panic!("a job that panics on purpose"))).unwrap();
        pool.spawn(Box::new(move || sender.send(thread::current().id()).unwrap())).unwrap();
        let first = receiver.recv_timeout(WATCHDOG).unwrap();
        let second = receiver.recv_timeout(WATCHDOG).unwrap();
        assert_eq!(first, second);
    }
}
