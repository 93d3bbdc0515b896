#![allow(clippy::unwrap_used, clippy::panic)]

use std::os::fd::AsFd;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};

use super::*;
use crate::runtime::reactor;

const WATCHDOG: Duration = Duration::from_secs(30);

/// A pipe's reading end that reports each byte it reads with its own name.
struct Reader {
    name: u64,
    fd: OwnedFd,
    seen: Mutex<Sender<(u64, Readiness, Vec<u8>)>>,
}

impl Source for Reader {
    fn ready(self: Arc<Self>, readiness: Readiness) {
        let mut bytes = [0; 64];
        let count = rustix::io::read(&self.fd, &mut bytes).unwrap_or(0);
        let _ = self.seen.lock().send((self.name, readiness, bytes[..count].to_vec()));
    }
}

type Seen = Receiver<(u64, Readiness, Vec<u8>)>;

fn pipe() -> (OwnedFd, OwnedFd) {
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC | rustix::pipe::PipeFlags::NONBLOCK).unwrap()
}

fn reader(name: u64, fd: OwnedFd) -> (Arc<Reader>, Seen) {
    let (sender, receiver) = channel();
    (Arc::new(Reader { name, fd, seen: Mutex::new(sender) }), receiver)
}

fn weak<S: Source + 'static>(source: &Arc<S>) -> Weak<dyn Source> {
    let source: Arc<dyn Source> = source.clone();
    Arc::downgrade(&source)
}

struct Bell {
    rung: Mutex<Sender<u64>>,
}

impl Timer for Bell {
    fn fired(self: Arc<Self>, key: u64) {
        let _ = self.rung.lock().send(key);
    }
}

fn bell() -> (Arc<Bell>, Weak<dyn Timer>, Receiver<u64>) {
    let (sender, receiver) = channel();
    let bell = Arc::new(Bell { rung: Mutex::new(sender) });
    let timer: Arc<dyn Timer> = bell.clone();
    (bell, Arc::downgrade(&timer), receiver)
}

/// Returns once the loop has gone through everything that was ready before the call.
fn settle(reactor: &Reactor) {
    for _ in 0..2 {
        let (_bell, timer, rung) = bell();
        reactor.at(Instant::now(), timer, 0);
        rung.recv_timeout(WATCHDOG).unwrap();
    }
}

#[test]
fn timers_fire_in_order_of_their_moments_and_a_cancelled_one_does_not() {
    let reactor = reactor().unwrap();
    let (_bell, timer, rung) = bell();
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    for (ms, key) in [(60, 3), (20, 1), (40, 2), (80, 4)] {
        reactor.at(at(ms), timer.clone(), key);
    }
    let cancelled = reactor.at(at(50), timer.clone(), 99);
    assert!(reactor.cancel(cancelled));
    assert!(!reactor.cancel(cancelled));
    let order: Vec<u64> = (0..4).map(|_| rung.recv_timeout(WATCHDOG).unwrap()).collect();
    assert_eq!(order, [1, 2, 3, 4]);
    assert!(Instant::now() >= at(80), "a timer fired before its moment");
    settle(reactor);
    assert!(rung.try_recv().is_err());
}

#[test]
fn an_earlier_timer_wakes_the_sleeping_loop() {
    let reactor = Reactor::start("t-earlier").unwrap();
    let (_bell, timer, rung) = bell();
    let late = reactor.at(Instant::now() + Duration::from_secs(3600), timer.clone(), 1);
    asleep(&reactor, "t-earlier");
    reactor.at(Instant::now() + Duration::from_millis(1), timer, 2);
    assert_eq!(rung.recv_timeout(WATCHDOG), Ok(2));
    assert!(reactor.cancel(late));
}

#[test]
fn timers_also_fire_without_epoll_pwait2_and_after_epoll_was_lost() {
    for broken in [false, true] {
        let reactor = Reactor::start("t-coarse").unwrap();
        reactor.coarse.store(true, Ordering::Relaxed);
        reactor.broken.store(broken, Ordering::Relaxed);
        let (_bell, timer, rung) = bell();
        let when = Instant::now() + Duration::from_micros(1500);
        reactor.at(when, timer, 7);
        assert_eq!(rung.recv_timeout(WATCHDOG), Ok(7));
        assert!(Instant::now() >= when);
        let (read, _write) = pipe();
        let (source, _seen) = reader(0, read);
        assert_eq!(reactor.add(source.fd.as_fd(), Interest::READ, weak(&source)).is_err(), broken);
    }
}

#[test]
fn a_timer_that_comes_again_at_once_does_not_starve_a_source() {
    struct Again {
        reactor: Arc<Reactor>,
        stop: AtomicBool,
    }
    impl Timer for Again {
        fn fired(self: Arc<Self>, key: u64) {
            if !self.stop.load(Ordering::Relaxed) {
                let timer: Arc<dyn Timer> = self.clone();
                self.reactor.at(Instant::now() - Duration::from_millis(1), Arc::downgrade(&timer), key);
            }
        }
    }
    let reactor = Reactor::start("t-again").unwrap();
    let again = Arc::new(Again { reactor: reactor.clone(), stop: AtomicBool::new(false) });
    again.clone().fired(0);
    let (read, write) = pipe();
    let (source, seen) = reader(5, read);
    let token = reactor.add(source.fd.as_fd(), Interest::READ, weak(&source)).unwrap();
    rustix::io::write(&write, b"x").unwrap();
    assert_eq!(seen.recv_timeout(WATCHDOG).unwrap().0, 5);
    again.stop.store(true, Ordering::Relaxed);
    reactor.remove(token, source.fd.as_fd());
}

#[test]
fn a_removed_source_gets_nothing_more_even_when_its_number_is_reused() {
    let reactor = reactor().unwrap();
    let mut reuses = 0;
    for _ in 0..200 {
        let (read, write) = pipe();
        let number = read.as_raw_fd();
        let (old, old_seen) = reader(1, read);
        let token = reactor.add(old.fd.as_fd(), Interest::READ, weak(&old)).unwrap();
        rustix::io::write(&write, b"a").unwrap();
        assert_eq!(old_seen.recv_timeout(WATCHDOG).unwrap().2, b"a");
        // Ready at the very moment of its removal.
        rustix::io::write(&write, b"b").unwrap();
        reactor.remove(token, old.fd.as_fd());
        settle(reactor);
        while old_seen.try_recv().is_ok() {}
        let (fresh_read, fresh_write) = pipe();
        drop(old);
        // The number is now taken by another file, as far as other tests leave it to us.
        let Ok(reused) = rustix::io::fcntl_dupfd_cloexec(&fresh_read, number) else { continue };
        reuses += usize::from(reused.as_raw_fd() == number);
        let (new, new_seen) = reader(2, reused);
        let new_token = reactor.add(new.fd.as_fd(), Interest::READ, weak(&new)).unwrap();
        assert_ne!(token, new_token);
        assert!(reactor.modify(token, new.fd.as_fd(), Interest::READ).is_err(), "the old token is dead");
        reactor.remove(token, new.fd.as_fd());
        let _ = rustix::io::write(&write, b"c");
        rustix::io::write(&fresh_write, b"d").unwrap();
        assert_eq!(new_seen.recv_timeout(WATCHDOG).unwrap().2, b"d");
        assert!(matches!(
            old_seen.recv_timeout(Duration::ZERO),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected)
        ));
        reactor.remove(new_token, new.fd.as_fd());
    }
    assert!(reuses > 0, "no number was reused, so nothing was shown");
}

#[test]
fn a_source_that_removes_another_in_the_same_batch_keeps_its_event_from_it() {
    /// The one that is called first removes the other.
    struct Rival {
        reactor: Arc<Reactor>,
        fds: Arc<[OwnedFd; 2]>,
        tokens: Arc<Mutex<Vec<Token>>>,
        me: usize,
        called: Arc<AtomicUsize>,
    }
    impl Source for Rival {
        fn ready(self: Arc<Self>, _: Readiness) {
            self.called.fetch_add(1, Ordering::SeqCst);
            let tokens = self.tokens.lock().clone();
            for side in [1 - self.me, self.me] {
                self.reactor.remove(tokens[side], self.fds[side].as_fd());
            }
        }
    }
    let reactor = Reactor::start("t-rivals").unwrap();
    let ((read_a, write_a), (read_b, write_b)) = (pipe(), pipe());
    rustix::io::write(&write_a, b"x").unwrap();
    rustix::io::write(&write_b, b"x").unwrap();
    let fds = Arc::new([read_a, read_b]);
    let tokens = Arc::new(Mutex::new(Vec::new()));
    let called = Arc::new(AtomicUsize::new(0));
    let rivals: Vec<_> = (0..2)
        .map(|me| {
            Arc::new(Rival {
                reactor: reactor.clone(),
                fds: fds.clone(),
                tokens: tokens.clone(),
                me,
                called: called.clone(),
            })
        })
        .collect();
    {
        let mut held = tokens.lock();
        for (me, rival) in rivals.iter().enumerate() {
            held.push(reactor.add(fds[me].as_fd(), Interest::READ, weak(rival)).unwrap());
        }
    }
    settle(&reactor);
    assert_eq!(called.load(Ordering::SeqCst), 1);
}

#[test]
fn a_thousand_sources_each_get_their_own_event() {
    let reactor = reactor().unwrap();
    let (sender, seen) = channel();
    let mut sources = Vec::new();
    for name in 0..1000 {
        // An eventfd each, since a pipe would take twice the descriptors.
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let source = Arc::new(Reader { name, fd, seen: Mutex::new(sender.clone()) });
        let token = reactor.add(source.fd.as_fd(), Interest::READ, weak(&source)).unwrap();
        sources.push((source, token));
    }
    for (source, _) in &sources {
        rustix::io::write(&source.fd, &1_u64.to_ne_bytes()).unwrap();
    }
    let mut names: Vec<u64> = (0..1000).map(|_| seen.recv_timeout(WATCHDOG).unwrap().0).collect();
    names.sort_unstable();
    assert!(names.iter().copied().eq(0..1000));
    for (source, token) in sources {
        reactor.remove(token, source.fd.as_fd());
    }
}

#[test]
fn oneshot_is_silent_until_it_is_asked_again_and_none_until_there_is_an_error() {
    let reactor = reactor().unwrap();
    let (read, write) = pipe();
    let (source, seen) = reader(1, read);
    let fd = source.fd.as_fd();
    let token = reactor.add(fd, Interest::READ | Interest::ONESHOT, weak(&source)).unwrap();
    rustix::io::write(&write, b"a").unwrap();
    assert_eq!(seen.recv_timeout(WATCHDOG).unwrap().2, b"a");
    rustix::io::write(&write, b"b").unwrap();
    settle(reactor);
    assert!(seen.try_recv().is_err());
    reactor.modify(token, fd, Interest::NONE | Interest::ONESHOT).unwrap();
    settle(reactor);
    assert!(seen.try_recv().is_err());
    reactor.modify(token, fd, Interest::READ | Interest::ONESHOT).unwrap();
    let (_, readiness, bytes) = seen.recv_timeout(WATCHDOG).unwrap();
    assert!(readiness.readable() && !readiness.writable() && !readiness.hangup());
    assert_eq!(bytes, b"b");
    reactor.modify(token, fd, Interest::NONE | Interest::ONESHOT).unwrap();
    drop(write);
    let (_, readiness, _) = seen.recv_timeout(WATCHDOG).unwrap();
    assert!(readiness.hangup() && !readiness.readable());
    reactor.remove(token, fd);
}

#[test]
fn a_panicking_source_or_timer_is_dropped_and_the_loop_goes_on() {
    struct Panics(OwnedFd, AtomicUsize);
    impl Source for Panics {
        fn ready(self: Arc<Self>, _: Readiness) {
            self.1.fetch_add(1, Ordering::SeqCst);
            panic!("a source that panics on purpose");
        }
    }
    impl Timer for Panics {
        fn fired(self: Arc<Self>, _: u64) {
            panic!("a timer that panics on purpose");
        }
    }
    let reactor = Reactor::start("t-panics").unwrap();
    let (read, write) = pipe();
    let source = Arc::new(Panics(read, AtomicUsize::new(0)));
    let token = reactor.add(source.0.as_fd(), Interest::READ, weak(&source)).unwrap();
    let timer: Arc<dyn Timer> = source.clone();
    reactor.at(Instant::now(), Arc::downgrade(&timer), 0);
    // Never read, so it would be reported for ever.
    rustix::io::write(&write, b"x").unwrap();
    settle(&reactor);
    settle(&reactor);
    assert_eq!(source.1.load(Ordering::SeqCst), 1);
    assert!(reactor.modify(token, source.0.as_fd(), Interest::READ).is_err());
    // The kernel has forgotten it as well: it can be added again.
    let again = reactor.add(source.0.as_fd(), Interest::NONE, weak(&source)).unwrap();
    reactor.remove(again, source.0.as_fd());
}

#[test]
fn the_loop_keeps_nothing_alive_and_forgets_what_is_dropped() {
    let reactor = Reactor::start("t-weak").unwrap();
    let (read, write) = pipe();
    let kept_open = rustix::io::dup(&read).unwrap();
    let (source, _seen) = reader(1, read);
    let watched = weak(&source);
    reactor.add(kept_open.as_fd(), Interest::READ, watched.clone()).unwrap();
    let (bell, timer, rung) = bell();
    reactor.at(Instant::now() + Duration::from_millis(5), timer.clone(), 1);
    drop(bell);
    drop(source);
    assert!(watched.upgrade().is_none());
    assert!(timer.upgrade().is_none());
    rustix::io::write(&write, b"x").unwrap();
    settle(&reactor);
    assert!(reactor.sources.lock().by_token.is_empty());
    assert_eq!(rung.recv_timeout(WATCHDOG), Err(RecvTimeoutError::Disconnected));
}

#[test]
fn a_source_knows_that_it_is_on_the_loops_thread() {
    struct Asks(Arc<Reactor>, Mutex<Sender<bool>>);
    impl Timer for Asks {
        fn fired(self: Arc<Self>, _: u64) {
            self.1.lock().send(self.0.on_reactor_thread()).unwrap();
        }
    }
    let mine = Reactor::start("t-own").unwrap();
    let (sender, answer) = channel();
    let asks: Arc<dyn Timer> = Arc::new(Asks(mine.clone(), Mutex::new(sender)));
    mine.at(Instant::now(), Arc::downgrade(&asks), 0);
    assert_eq!(answer.recv_timeout(WATCHDOG), Ok(true));
    reactor().unwrap().at(Instant::now(), Arc::downgrade(&asks), 0);
    assert_eq!(answer.recv_timeout(WATCHDOG), Ok(false), "another loop's thread is not this one's");
    assert!(!mine.on_reactor_thread());
}

/// The file `name` of the thread with that name; `None` while no thread has the name, which it sets itself when it begins.
fn task_file(thread: &str, name: &str) -> Option<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let task = tasks
        .filter_map(|task| Some(task.ok()?.path()))
        .find(|path| std::fs::read_to_string(path.join("comm")).is_ok_and(|comm| comm.trim_end() == thread));
    std::fs::read_to_string(task?.join(name)).ok()
}

/// Waits until the loop, whose thread has that name, sleeps until its next timer.
fn asleep(reactor: &Reactor, thread: &str) {
    let sleeps = || {
        task_file(thread, "stat")
            .is_some_and(|stat| stat.split(") ").nth(1).is_some_and(|rest| rest.starts_with('S')))
    };
    let watchdog = Instant::now() + WATCHDOG;
    while !sleeps()
        || !matches!(reactor.timers.lock().sleeping_until(), Some(until) if until > Instant::now())
    {
        assert!(Instant::now() < watchdog, "the loop does not fall asleep");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn the_idle_loop_does_not_run_at_all() {
    fn switches() -> Vec<String> {
        let status = task_file("t-idle", "status").unwrap();
        status.lines().filter(|line| line.contains("ctxt_switches")).map(str::to_owned).collect()
    }
    let reactor = Reactor::start("t-idle").unwrap();
    let (read, _write) = pipe();
    let (source, _seen) = reader(1, read);
    reactor.add(source.fd.as_fd(), Interest::READ, weak(&source)).unwrap();
    let (_bell, timer, _rung) = bell();
    reactor.at(Instant::now() + Duration::from_secs(3600), timer.clone(), 0);
    settle(&reactor);
    asleep(&reactor, "t-idle");
    let before = switches();
    assert_eq!(before.len(), 2);
    // A later timer must not wake it either.
    reactor.at(Instant::now() + Duration::from_secs(7200), timer, 0);
    let until = Instant::now() + Duration::from_millis(300);
    while Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(before, switches());
    }
}

#[test]
fn the_loops_thread_takes_no_signal_but_faults() {
    settle(&Reactor::start("t-signals").unwrap());
    let blocked = || {
        let status = task_file("t-signals", "status").unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap().trim().to_owned();
        u64::from_str_radix(&mask, 16).unwrap()
    };
    let has = |signal: i32| blocked() & (1 << (signal - 1)) != 0;
    assert!(has(libc::SIGINT) && has(libc::SIGTERM) && has(libc::SIGCHLD) && has(libc::SIGUSR1));
    assert!(!has(libc::SIGSEGV) && !has(libc::SIGBUS) && !has(libc::SIGPROF));
}

#[test]
fn a_forked_child_cannot_disturb_its_parents_loop() {
    let reactor = reactor().unwrap();
    let (read, write) = pipe();
    let (source, seen) = reader(1, read);
    let token = reactor.add(source.fd.as_fd(), Interest::READ, weak(&source)).unwrap();
    // Held as some other thread's lock may be at the moment of a fork.
    let sources = reactor.sources.lock();
    let timers = reactor.timers.lock();
    let id = Timers::default().insert(Instant::now(), Weak::<Bell>::new(), 0).0;
    let harmless = fork::tests::in_a_child(|| {
        reactor.remove(token, source.fd.as_fd());
        !reactor.cancel(id)
    });
    drop((sources, timers));
    assert!(harmless);
    rustix::io::write(&write, b"x").unwrap();
    assert_eq!(seen.recv_timeout(WATCHDOG).unwrap().2, b"x");
    reactor.remove(token, source.fd.as_fd());
}
