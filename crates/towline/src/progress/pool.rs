//! The copy pool: threads for what takes long, grown on demand and gone when idle.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::reactor::be_polite;
use super::{lock, no_thread, panic_message, start_thread};
use crate::error::Error;
use crate::fork;

/// One piece of work.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// A worker without work leaves after this time: long against the gaps inside a burst of transfers, short
/// enough that an idle process soon has no thread left.
const LINGER: Duration = Duration::from_secs(1);

/// No pool has more threads.
const MOST: usize = 64;

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
    /// 0 where the machine decides and has not been asked yet.
    limit: AtomicUsize,
    state: Mutex<State>,
    /// What each worker waits at, by its number.
    calls: [Condvar; MOST],
    /// The queue's length, readable without the lock.
    queued: AtomicUsize,
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
            limit: AtomicUsize::new(limit),
            state: Mutex::new(State {
                queue: VecDeque::new(),
                threads: 0,
                idle: Vec::new(),
                given: [const { None }; MOST],
                aside: 0,
            }),
            calls: [const { Condvar::new() }; MOST],
            queued: AtomicUsize::new(0),
        }
    }

    /// Whoever calls its threads keeps its processor.
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
        let mut state = lock(&self.state);
        let near = worker.and_then(|worker| state.idle.iter().position(|idle| *idle == worker));
        if let Some(number) = near.map(|at| state.idle.remove(at)).or_else(|| state.idle.pop()) {
            state.given[number] = Some(job);
            drop(state);
            self.calls[number].notify_one();
            return Ok(());
        }
        state.queue.push_back(job);
        self.queued.store(state.queue.len(), Ordering::Relaxed);
        let number = (!state.threads).trailing_zeros() as usize;
        if number >= (limit + state.aside).min(MOST) {
            return Ok(());
        }
        // The thread is started under the lock, so that on failure the last job in the queue is still ours
        // and the count of threads that could serve it is exact.
        match start_thread(format!("{}-{number}", self.name), move || self.work(number)) {
            Ok(_) => {
                state.threads |= 1 << number;
                Ok(())
            }
            Err(error) if state.threads == 0 => {
                let job = state.queue.pop_back();
                self.queued.store(state.queue.len(), Ordering::Relaxed);
                drop(state);
                match job {
                    Some(job) => Err(Refused { job, error: no_thread("queue a copy", error) }),
                    None => Ok(()),
                }
            }
            Err(error) => {
                drop(state);
                tracing::debug!(%error, pool = self.name, "no further thread; the job waits for a busy one");
                Ok(())
            }
        }
    }

    /// Whether jobs wait for a thread: a worker that only waits for the other side should then make room.
    pub(crate) fn busy_or_queued(&self) -> bool {
        self.queued.load(Ordering::Relaxed) > 0
    }

    /// Lets a worker wait for the other side, for a bounded time, while jobs that come meanwhile find another thread.
    /// `None`, without waiting, where jobs wait already.
    pub(crate) fn aside<T>(&self, wait: impl FnOnce() -> T) -> Option<T> {
        struct Aside<'a>(&'a Pool);
        impl Drop for Aside<'_> {
            fn drop(&mut self) {
                lock(&self.0.state).aside -= 1;
            }
        }
        let mut state = lock(&self.state);
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
        if let Err(payload) = catch_unwind(AssertUnwindSafe(job)) {
            let message = panic_message(payload);
            tracing::error!(%message, pool = self.name, "a job panicked; its thread goes on");
        }
    }

    /// One worker's life.
    fn work(&self, number: usize) {
        if self.polite {
            be_polite();
        }
        NUMBER.set(Some(number));
        let mut state = lock(&self.state);
        loop {
            if let Some(job) = state.queue.pop_front() {
                self.queued.store(state.queue.len(), Ordering::Relaxed);
                drop(state);
                self.run(job);
                state = lock(&self.state);
                continue;
            }
            state.idle.push(number);
            let until = Instant::now() + self.linger;
            let job = loop {
                let left = until.saturating_duration_since(Instant::now());
                state =
                    self.calls[number].wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
                // It may have been called when its time was just up.
                if let Some(job) = state.given[number].take() {
                    break job;
                }
                if Instant::now() >= until {
                    state.idle.retain(|idle| *idle != number);
                    state.threads &= !(1 << number);
                    return;
                }
            };
            drop(state);
            self.run(job);
            state = lock(&self.state);
        }
    }
}

thread_local! {
    static NUMBER: Cell<Option<usize>> = const { Cell::new(None) };
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use std::sync::mpsc::channel;
    use std::sync::{Arc, Barrier};

    use super::*;

    const WATCHDOG: Duration = Duration::from_secs(30);

    /// Workers may outlive a test.
    fn leaked(name: &'static str, limit: usize) -> &'static Pool {
        Box::leak(Box::new(Pool::new(name, limit)))
    }

    #[test]
    fn while_a_worker_is_aside_another_takes_its_place() {
        let pool = leaked("aside", 1);
        let (say, hear) = channel();
        let (told, wait) = channel::<()>();
        let first = say;
        pool.spawn(Box::new(move || {
            let waited = pool.aside(|| {
                first.send("aside").unwrap();
                wait.recv_timeout(WATCHDOG).is_ok()
            });
            first.send(if waited == Some(true) { "back" } else { "alone" }).unwrap();
        }))
        .unwrap();
        assert_eq!(hear.recv_timeout(WATCHDOG).unwrap(), "aside");
        // The only thread is taken, and yet this runs.
        pool.spawn(Box::new(move || told.send(()).unwrap())).unwrap();
        assert_eq!(hear.recv_timeout(WATCHDOG).unwrap(), "back");
    }

    #[test]
    fn nobody_steps_aside_while_a_job_waits_for_a_thread() {
        let pool = leaked("waits", 1);
        let (say, hear) = channel();
        let (held, release) = channel::<()>();
        let after = say.clone();
        pool.spawn(Box::new(move || {
            say.send("busy").unwrap();
            release.recv_timeout(WATCHDOG).unwrap();
            say.send(if pool.aside(|| ()).is_none() { "refused" } else { "let go" }).unwrap();
        }))
        .unwrap();
        assert_eq!(hear.recv_timeout(WATCHDOG).unwrap(), "busy");
        pool.spawn(Box::new(move || after.send("after").unwrap())).unwrap();
        held.send(()).unwrap();
        let heard = [(); 2].map(|()| hear.recv_timeout(WATCHDOG).unwrap());
        assert_eq!(heard, ["refused", "after"]);
    }

    #[test]
    fn threads_of_a_polite_pool_do_not_take_the_processor_of_who_wakes_them() {
        let pool: &'static Pool = Box::leak(Box::new(Pool::new("t-polite", 1).polite()));
        let (sender, receiver) = channel();
        pool.spawn(Box::new(move || {
            let own = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
            sender.send(own).unwrap();
        }))
        .unwrap();
        let stat = receiver.recv_timeout(WATCHDOG).unwrap();
        // The 41st field, counted behind the name, is the policy; 3 is SCHED_BATCH.
        let policy = stat.rsplit(')').next().unwrap().split_whitespace().nth(38).unwrap().to_owned();
        assert_eq!(policy, "3");
    }

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
        let pool = leaked("t-shrink", 4);
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
        let pool = leaked("t-grow", 3);
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
        let pool = leaked("t-reuse", 8);
        for _ in 0..50 {
            let (sender, receiver) = channel();
            pool.spawn(Box::new(move || sender.send(()).unwrap())).unwrap();
            receiver.recv_timeout(WATCHDOG).unwrap();
            wait_until("the worker waits again", || !lock(&pool.state).idle.is_empty());
        }
        assert_eq!(lock(&pool.state).threads, 1);
    }

    #[test]
    fn of_two_waiting_threads_the_one_that_worked_last_is_called() {
        // However slow the machine is, neither leaves.
        let patient = Pool { linger: 10 * WATCHDOG, ..Pool::new("t-last", 2) };
        let pool: &'static Pool = Box::leak(Box::new(patient));
        let (here, there) = channel::<()>();
        let (say, hear) = channel();
        let worker = |wait: Option<std::sync::mpsc::Receiver<()>>| {
            let say = say.clone();
            move || {
                let id = thread::current().id();
                say.send(id).unwrap();
                if let Some(wait) = wait {
                    wait.recv_timeout(WATCHDOG).unwrap();
                }
            }
        };
        pool.spawn(Box::new(worker(Some(there)))).unwrap();
        let first = hear.recv_timeout(WATCHDOG).unwrap();
        pool.spawn(Box::new(worker(None))).unwrap();
        let second = hear.recv_timeout(WATCHDOG).unwrap();
        assert_ne!(first, second);
        wait_until("the second waits", || lock(&pool.state).idle.len() == 1);
        here.send(()).unwrap();
        wait_until("both wait", || lock(&pool.state).idle.len() == 2);
        for _ in 0..10 {
            pool.spawn(Box::new(worker(None))).unwrap();
            assert_eq!(hear.recv_timeout(WATCHDOG).unwrap(), first);
            wait_until("both wait again", || lock(&pool.state).idle.len() == 2);
        }
        let number = *lock(&pool.state).idle.first().unwrap();
        pool.spawn_near(Some(number), Box::new(worker(None))).unwrap();
        assert_eq!(hear.recv_timeout(WATCHDOG).unwrap(), second, "unless another is asked for");
    }

    #[test]
    fn the_pool_of_the_process_has_a_limit_between_one_and_sixteen() {
        assert!((1..=16).contains(&crate::progress::pool().limit()));
        assert_eq!(Pool::new("t-limit", 1000).limit(), 64);
    }

    #[test]
    fn a_panicking_job_does_not_end_its_thread() {
        let pool = leaked("t-panic", 1);
        let (sender, receiver) = channel();
        let before = sender.clone();
        pool.spawn(Box::new(move || before.send(thread::current().id()).unwrap())).unwrap();
        pool.spawn(Box::new(|| panic!("a job that panics on purpose"))).unwrap();
        pool.spawn(Box::new(move || sender.send(thread::current().id()).unwrap())).unwrap();
        let first = receiver.recv_timeout(WATCHDOG).unwrap();
        let second = receiver.recv_timeout(WATCHDOG).unwrap();
        assert_eq!(first, second);
    }

    #[test]
    fn without_any_thread_the_job_is_handed_back_and_with_one_it_waits() {
        // The limit holds for a whole process, so this test runs once more in one of its own.
        const CHILD: &str = "TOWLINE_TEST_OWN_PROCESS";
        if std::env::var_os(CHILD).is_none() {
            let name = "without_any_thread_the_job_is_handed_back_and_with_one_it_waits";
            let output = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", &format!("progress::pool::tests::{name}"), "--test-threads=1"])
                .env(CHILD, "1")
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let old = getrlimit(Resource::As);
        let no_room_for_a_stack = || {
            let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
            let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
            let current = pages * rustix::param::page_size() as u64 + (1 << 20);
            setrlimit(Resource::As, Rlimit { current: Some(current), maximum: old.maximum }).unwrap();
        };
        let pool = leaked("t-refuse", 2);
        let (sender, receiver) = channel();
        let again = sender.clone();

        no_room_for_a_stack();
        let refused = pool.spawn(Box::new(move || sender.send(1).unwrap())).unwrap_err();
        setrlimit(Resource::As, old).unwrap();
        assert_eq!(refused.error.kind(), crate::Kind::Exhausted);
        assert!(refused.error.is_retryable());
        assert!(!pool.busy_or_queued());
        let barrier = Arc::new(Barrier::new(2));
        let blocks = Arc::clone(&barrier);
        let job = refused.job;
        pool.spawn(Box::new(move || {
            blocks.wait();
            job();
        }))
        .unwrap();

        no_room_for_a_stack();
        pool.spawn(Box::new(move || again.send(2).unwrap())).unwrap();
        assert_eq!(lock(&pool.state).threads, 1);
        setrlimit(Resource::As, old).unwrap();
        barrier.wait();
        assert_eq!(receiver.recv_timeout(WATCHDOG), Ok(1));
        assert_eq!(receiver.recv_timeout(WATCHDOG), Ok(2));
    }
}
