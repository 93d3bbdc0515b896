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
    let (say, said) = channel();
    let (go, wait) = channel::<()>();
    let first = say;
    pool.spawn(Box::new(move || {
        let waited = pool.aside(|| {
            first.send("aside").unwrap();
            wait.recv_timeout(WATCHDOG).is_ok()
        });
        first.send(if waited == Some(true) { "back" } else { "alone" }).unwrap();
    }))
    .unwrap();
    assert_eq!(said.recv_timeout(WATCHDOG).unwrap(), "aside");
    // The only thread is taken, and yet this runs.
    pool.spawn(Box::new(move || go.send(()).unwrap())).unwrap();
    assert_eq!(said.recv_timeout(WATCHDOG).unwrap(), "back");
}

#[test]
fn nobody_steps_aside_while_a_job_waits_for_a_thread() {
    let pool = leaked("waits", 1);
    let (say, said) = channel();
    let (held, release) = channel::<()>();
    let after = say.clone();
    pool.spawn(Box::new(move || {
        say.send("busy").unwrap();
        release.recv_timeout(WATCHDOG).unwrap();
        say.send(if pool.aside(|| ()).is_none() { "refused" } else { "let go" }).unwrap();
    }))
    .unwrap();
    assert_eq!(said.recv_timeout(WATCHDOG).unwrap(), "busy");
    pool.spawn(Box::new(move || after.send("after").unwrap())).unwrap();
    held.send(()).unwrap();
    let all = [(); 2].map(|()| said.recv_timeout(WATCHDOG).unwrap());
    assert_eq!(all, ["refused", "after"]);
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
        wait_until("the worker waits again", || !pool.state.lock().idle.is_empty());
    }
    assert_eq!(pool.state.lock().threads, 1);
}

#[test]
fn of_two_waiting_threads_the_one_that_worked_last_is_called() {
    // However slow the machine is, neither leaves.
    let patient = Pool { linger: 10 * WATCHDOG, ..Pool::new("t-last", 2) };
    let pool: &'static Pool = Box::leak(Box::new(patient));
    let (here, there) = channel::<()>();
    let (say, said) = channel();
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
    let first = said.recv_timeout(WATCHDOG).unwrap();
    pool.spawn(Box::new(worker(None))).unwrap();
    let second = said.recv_timeout(WATCHDOG).unwrap();
    assert_ne!(first, second);
    wait_until("the second waits", || pool.state.lock().idle.len() == 1);
    here.send(()).unwrap();
    wait_until("both wait", || pool.state.lock().idle.len() == 2);
    for _ in 0..10 {
        pool.spawn(Box::new(worker(None))).unwrap();
        assert_eq!(said.recv_timeout(WATCHDOG).unwrap(), first);
        wait_until("both wait again", || pool.state.lock().idle.len() == 2);
    }
    let number = *pool.state.lock().idle.first().unwrap();
    pool.spawn_near(Some(number), Box::new(worker(None))).unwrap();
    assert_eq!(said.recv_timeout(WATCHDOG).unwrap(), second, "unless another is asked for");
}

#[test]
fn the_pool_of_the_process_has_a_limit_between_one_and_sixteen() {
    assert!((1..=16).contains(&crate::runtime::pool().limit()));
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
            .args(["--exact", &format!("runtime::pool::tests::{name}"), "--test-threads=1"])
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
    assert_eq!(pool.state.lock().threads, 1);
    setrlimit(Resource::As, old).unwrap();
    barrier.wait();
    assert_eq!(receiver.recv_timeout(WATCHDOG), Ok(1));
    assert_eq!(receiver.recv_timeout(WATCHDOG), Ok(2));
}

/// Two workers at most, who look for as long as a test takes.
fn looking(name: &'static str, looks: Looks) -> &'static Pool {
    Box::leak(Box::new(Pool { linger: 10 * WATCHDOG, looks, ..Pool::new(name, 2) }))
}

const FOR_LONG: Looks = Looks { after: Duration::ZERO, most: WATCHDOG, lost: WATCHDOG };

/// Starts both workers of a pool, of which the one looks and the other sleeps, and was the last to work.
fn one_looks_and_one_sleeps(pool: &'static Pool) -> (thread::ThreadId, thread::ThreadId) {
    let (say, said) = channel();
    let (held, release) = channel::<()>();
    let also = say.clone();
    pool.spawn(Box::new(move || {
        also.send(thread::current().id()).unwrap();
        release.recv_timeout(WATCHDOG).unwrap();
    }))
    .unwrap();
    let sleeps = said.recv_timeout(WATCHDOG).unwrap();
    pool.spawn(Box::new(move || {
        say.send(thread::current().id()).unwrap();
        pool.look_next(|| true);
    }))
    .unwrap();
    let looks = said.recv_timeout(WATCHDOG).unwrap();
    wait_until("one looks", || pool.state.lock().looker.is_some());
    held.send(()).unwrap();
    wait_until("the other sleeps", || pool.state.lock().idle.len() == 2);
    assert_ne!(looks, sleeps);
    (looks, sleeps)
}

/// Who runs the next job, and looks afterwards.
fn next_of(pool: &'static Pool) -> thread::ThreadId {
    let (say, said) = channel();
    pool.spawn(Box::new(move || {
        pool.look_next(|| true);
        say.send(thread::current().id()).unwrap();
    }))
    .unwrap();
    said.recv_timeout(WATCHDOG).unwrap()
}

#[test]
fn a_job_that_comes_while_somebody_looks_is_the_lookers_and_nobody_is_woken() {
    let pool = looking("t-look", FOR_LONG);
    let (looks, _) = one_looks_and_one_sleeps(pool);
    for _ in 0..10 {
        assert_eq!(next_of(pool), looks);
        wait_until("it looks again", || pool.state.lock().looker.is_some());
    }
    assert_eq!(pool.state.lock().threads, 3);
}

#[test]
fn while_the_looker_is_busy_another_is_called_and_only_one_looks() {
    let pool = looking("t-look-busy", FOR_LONG);
    let (looks, sleeps) = one_looks_and_one_sleeps(pool);
    let (say, said) = channel();
    let (held, release) = channel::<()>();
    pool.spawn(Box::new(move || {
        pool.look_next(|| true);
        say.send(thread::current().id()).unwrap();
        release.recv_timeout(WATCHDOG).unwrap();
    }))
    .unwrap();
    assert_eq!(said.recv_timeout(WATCHDOG).unwrap(), looks);
    assert_eq!(next_of(pool), sleeps);
    wait_until("that one looks", || pool.state.lock().looker.is_some());
    let looker = pool.state.lock().looker;
    held.send(()).unwrap();
    wait_until("both wait", || pool.state.lock().idle.len() == 2);
    assert_eq!(pool.state.lock().looker, looker);
    assert_eq!(next_of(pool), sleeps, "the first one would look too, but sleeps");
}

#[test]
fn a_looker_without_a_processor_is_not_relied_on_while_another_waits() {
    let pool = looking("t-look-lost", Looks { lost: Duration::ZERO, ..FOR_LONG });
    let (looks, sleeps) = one_looks_and_one_sleeps(pool);
    let (say, said) = channel();
    let (held, release) = channel::<()>();
    pool.spawn(Box::new(move || {
        say.send(thread::current().id()).unwrap();
        release.recv_timeout(WATCHDOG).unwrap();
    }))
    .unwrap();
    assert_eq!(said.recv_timeout(WATCHDOG).unwrap(), sleeps);
    assert_eq!(next_of(pool), looks, "which has to have a turn some time");
    held.send(()).unwrap();
}

#[test]
fn who_looks_sleeps_when_the_others_have_finished_and_is_called_again() {
    let pool = looking("t-look-ends", FOR_LONG);
    let others = Arc::new(AtomicBool::new(true));
    let (say, said) = channel();
    let seen = Arc::clone(&others);
    pool.spawn(Box::new(move || {
        pool.look_next(move || seen.load(Ordering::Acquire));
        say.send(thread::current().id()).unwrap();
    }))
    .unwrap();
    let worker = said.recv_timeout(WATCHDOG).unwrap();
    wait_until("it looks", || pool.state.lock().looker.is_some());
    others.store(false, Ordering::Release);
    wait_until("it looks no more", || pool.state.lock().looker.is_none());
    assert_eq!(next_of(pool), worker);
}

#[test]
fn a_job_that_comes_when_the_looker_gives_up_is_not_lost() {
    let shortly = Looks { after: Duration::from_micros(2), most: Duration::from_micros(4), lost: WATCHDOG };
    let pool: &'static Pool =
        Box::leak(Box::new(Pool { linger: 10 * WATCHDOG, looks: shortly, ..Pool::new("t-look-late", 1) }));
    let (say, said) = channel();
    for round in 0..50_000_u32 {
        let say = say.clone();
        pool.spawn(Box::new(move || {
            pool.look_next(move || round % 2 == 0);
            say.send(round).unwrap();
        }))
        .unwrap();
        assert_eq!(said.recv_timeout(WATCHDOG), Ok(round));
        // From before it looks until after it sleeps.
        for _ in 0..round % 500 {
            spin_loop();
        }
    }
    assert_eq!(pool.state.lock().threads, 1);
}

#[test]
fn nobody_looks_for_another_pool_or_after_a_later_job() {
    let (pool, other) = (looking("t-look-own", FOR_LONG), looking("t-look-other", FOR_LONG));
    let (say, said) = channel();
    let again = say.clone();
    pool.spawn(Box::new(move || {
        other.look_next(|| true);
        pool.look_next(|| true);
        // Found in the queue, before it would look.
        pool.state.lock().queue.push_back(Box::new(move || again.send(2).unwrap()));
        say.send(1).unwrap();
    }))
    .unwrap();
    assert_eq!([(); 2].map(|()| said.recv_timeout(WATCHDOG).unwrap()), [1, 2]);
    wait_until("it waits", || !pool.state.lock().idle.is_empty());
    assert_eq!(pool.state.lock().looker, None);
    assert_eq!(other.state.lock().looker, None);
}
