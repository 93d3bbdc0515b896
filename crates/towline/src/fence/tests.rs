//! The fence between real processes and between threads that race.
//!
//! A child is this test binary started again with one test selected and a role in its environment; it opens
//! the parent's memory files through `/proc`, and talks to the parent by lines.

#![allow(unsafe_code, reason = "ends a single thread, forks and sends signals, as faults do")]
#![allow(clippy::unwrap_used, clippy::panic)]

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use super::life::{LifePage, LifeView, SlotState};
use super::pins::{Holder, LONG_SLOTS, PROCESS_SLOTS, PinError, PinPage, Side};
use super::robust::WAITERS;
use super::table::{Claim, Table, TableView};
use super::watcher::{self, MAX_WATCHES};
use crate::Kind;
use crate::skip::skip;

const WATCHDOG: Duration = Duration::from_secs(20);
const MARK: &str = "TOWLINE-CHILD ";

/// The number of watches is the process's, and the tests of this binary share it.
pub(crate) fn alone_with_the_watcher() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock()
}

pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < WATCHDOG, "never came: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn path_of(fd: BorrowedFd<'_>) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd())
}

fn open(path: &str, write: bool) -> OwnedFd {
    std::fs::OpenOptions::new().read(true).write(write).open(path).unwrap().into()
}

fn second_mapping(page: &PinPage) -> PinPage {
    PinPage::map(page.fd().unwrap().try_clone_to_owned().unwrap()).unwrap()
}

fn eventfd() -> OwnedFd {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK)
        .unwrap()
}

fn rung(doorbell: &OwnedFd) -> bool {
    rustix::io::read(doorbell, &mut [0_u8; 8]).is_ok()
}

struct Peer {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Peer {
    fn start(role: &str, files: &[String]) -> Peer {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "fence::tests::the_other_process", "--nocapture", "--test-threads=1"])
            .env("TOWLINE_TEST_ROLE", role)
            .env("TOWLINE_TEST_FILES", files.join(","))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if let Some((_, message)) = line.split_once(MARK) {
                    let _ = sender.send(message.to_owned());
                }
            }
        });
        let stdin = child.stdin.take().unwrap();
        Peer { child, stdin, lines }
    }

    fn wait_for(&self, expected: &str) -> String {
        let line = self.lines.recv_timeout(WATCHDOG).unwrap();
        assert!(line.starts_with(expected), "{line:?} instead of {expected:?}");
        line
    }

    fn say(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a signal to our own child, which has not been waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn tell(line: &str) {
    // On a line of its own: the harness has written the start of one.
    writeln!(std::io::stdout(), "\n{MARK}{line}").unwrap();
}

fn line() -> Option<String> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).ok().filter(|len| *len > 0)?;
    Some(line.trim().to_owned())
}

/// What a child does; without a role, in the ordinary run of the suite, there is nothing to do.
#[test]
fn the_other_process() {
    let Ok(role) = std::env::var("TOWLINE_TEST_ROLE") else { return };
    let files = std::env::var("TOWLINE_TEST_FILES").unwrap();
    let files: Vec<&str> = files.split(',').collect();
    match role.as_str() {
        "holder" => {
            let hold = |path: &&str| {
                watcher::hold(Arc::new(PinPage::map(open(path, true)).unwrap()), Side::Initiator).unwrap()
            };
            let holds: Vec<_> = files.iter().map(hold).collect();
            tell("holding");
            match line().as_deref() {
                Some("release") => {
                    drop(holds);
                    tell("released");
                    line();
                }
                // In good order as far as the process goes, but it still holds.
                _ => std::process::exit(0),
            }
        }
        "pinner" => {
            let view = TableView::map(open(files[0], false), 16).unwrap();
            let page = PinPage::map(open(files[1], true)).unwrap();
            let life = LifePage::ours().unwrap().fd().as_raw_fd();
            std::thread::spawn(move || {
                let row = view.row(0).unwrap();
                let slot = LifePage::thread_slot().unwrap();
                let pin = page.pin_thread(slot, row, row.generation()).ok().unwrap();
                tell(&format!("pinned {} {life} {slot}", std::process::id()));
                line();
                std::mem::forget(pin);
                // SAFETY: ends this thread alone, without unwinding: what a fault in one thread can do. The
                // process lives on, and nothing that the thread owned is used by another.
                unsafe { libc::syscall(libc::SYS_exit, 0) };
            });
            std::thread::sleep(Duration::from_secs(60));
        }
        other => panic!("no role {other}"),
    }
}

fn table_with_one_region() -> (Table, TableView, Claim) {
    let table = Table::create(16).unwrap();
    let view = TableView::map(table.fd().unwrap().try_clone().unwrap(), 16).unwrap();
    let claim = table.claim(0x1000, 64).unwrap();
    (table, view, claim)
}

#[test]
fn a_pin_is_seen_until_it_is_released_and_then_rings() {
    let (table, view, claim) = table_with_one_region();
    let owner = PinPage::create().unwrap();
    let doorbell = eventfd();
    let initiator = second_mapping(&owner).with_doorbell(doorbell.try_clone().unwrap()).unwrap();
    let row = view.row(claim.row).unwrap();

    let pin = initiator.pin_thread(3, row, claim.generation).ok().unwrap();
    assert_eq!(initiator.pin_thread(3, row, claim.generation).err(), Some(PinError::Busy));
    assert!(pin.still_valid(row));
    assert!(owner.held(claim.generation));
    assert!(!owner.held(claim.generation + 1));
    assert_eq!(owner.holders(claim.generation), [Holder::Thread(3)]);

    owner.drain_started();
    table.revoke(claim.row);
    assert!(!pin.still_valid(row));
    assert!(owner.held(claim.generation));
    assert!(!rung(&doorbell));
    drop(pin);
    assert!(rung(&doorbell));
    assert!(!owner.held(claim.generation));
    assert_eq!(initiator.pin_thread(3, row, claim.generation).err(), Some(PinError::Stale));
    assert!(rung(&doorbell), "the owner may have seen the pin that failed");
    owner.drain_ended();

    table.free(claim.row);
    let next = table.claim(0x2000, 64).unwrap();
    assert_eq!(next.row, claim.row);
    assert_eq!(
        initiator.pin_thread(3, row, claim.generation).err(),
        Some(PinError::Stale),
        "the row was recycled"
    );
    assert!(initiator.pin_thread(3, row, next.generation).is_ok());
    assert!(!rung(&doorbell), "nobody waits any more");
    assert_eq!(initiator.pin_thread(3, row, 0).err(), Some(PinError::Stale));
    assert_eq!(initiator.pin_thread(u32::MAX, row, next.generation).err(), Some(PinError::Busy));
}

#[test]
fn process_pins_are_many_move_between_threads_and_run_out() {
    let (table, view, claim) = table_with_one_region();
    let owner = PinPage::create().unwrap();
    let initiator = Arc::new(second_mapping(&owner));
    let row = view.row(claim.row).unwrap();
    let count = PROCESS_SLOTS as usize;
    let mut pins: Vec<_> =
        (0..LONG_SLOTS).map(|_| initiator.pin_long(row, claim.generation).ok().unwrap()).collect();
    assert_eq!(initiator.pin_long(row, claim.generation).err(), Some(PinError::Busy));
    // What is held for long leaves room for copies.
    pins.extend(
        (LONG_SLOTS..PROCESS_SLOTS).map(|_| initiator.pin_process(row, claim.generation).ok().unwrap()),
    );
    assert_eq!(initiator.pin_process(row, claim.generation).err(), Some(PinError::Busy));
    assert_eq!(owner.holders(claim.generation).len(), count);
    let last = pins.pop().unwrap();
    assert!(last.still_valid(row));
    std::thread::spawn(move || drop(last)).join().unwrap();
    assert_eq!(owner.holders(claim.generation).len(), count - 1);
    table.revoke(claim.row);
    assert_eq!(initiator.pin_process(row, claim.generation).err(), Some(PinError::Stale));
    assert!(!pins[0].still_valid(row));
    drop(pins);
    assert!(!owner.held(claim.generation));
}

#[test]
fn reclaiming_takes_only_the_named_generation() {
    let (_table, view, claim) = table_with_one_region();
    let owner = PinPage::create().unwrap();
    let initiator = Arc::new(second_mapping(&owner));
    let row = view.row(claim.row).unwrap();
    std::mem::forget(initiator.pin_process(row, claim.generation).ok().unwrap());
    assert!(!owner.reclaim(Holder::Process(0), claim.generation + 1));
    assert!(!owner.reclaim(Holder::Process(1), claim.generation));
    assert!(!owner.reclaim(Holder::Thread(u32::MAX), claim.generation));
    assert!(!owner.reclaim(Holder::Thread(0), 0));
    assert!(owner.held(claim.generation));
    assert!(owner.reclaim(Holder::Process(0), claim.generation));
    assert!(!owner.held(claim.generation));
}

#[test]
fn what_is_not_a_pin_page_is_refused() {
    let table = Table::create(4).unwrap();
    let small = table.fd().unwrap().try_clone().unwrap();
    assert_eq!(PinPage::map(small).err().unwrap().kind(), Kind::Protocol);
    // Large enough and sealed, but without the magic.
    let (fd, _mapping) = super::shared::create("test", 1 << 20, "test").unwrap();
    super::shared::seal_size(std::os::fd::AsFd::as_fd(&fd), "test").unwrap();
    assert_eq!(PinPage::map(fd).err().unwrap().kind(), Kind::Protocol);
    // Of another version, and of another size.
    let (fd, _mapping) = super::shared::create("test", 4096, "test").unwrap();
    rustix::io::pwrite(&fd, b"towl-pin\x01\0\0\0", 0).unwrap();
    super::shared::seal_size(std::os::fd::AsFd::as_fd(&fd), "test").unwrap();
    assert_eq!(PinPage::map(fd).err().unwrap().kind(), Kind::Unsupported);
    let mut page = PinPage::create().unwrap();
    assert!(page.take_fd().is_some() && page.fd().is_none());
}

/// A child of which one thread holds a pin.
pub(crate) struct PinnedByAChild {
    pub(crate) generation: u64,
    slot: u32,
    peer: Peer,
}

impl PinnedByAChild {
    /// The child, the page with its pin, and what tells whether the thread lives.
    pub(crate) fn start() -> (PinnedByAChild, PinPage, LifeView) {
        let (table, _view, claim) = table_with_one_region();
        let page = PinPage::create().unwrap();
        let peer = Peer::start(
            "pinner",
            &[path_of(std::os::fd::AsFd::as_fd(&table.fd().unwrap())), path_of(page.fd().unwrap())],
        );
        let line = peer.wait_for("pinned");
        let numbers: Vec<u32> = line.split(' ').skip(1).map(|number| number.parse().unwrap()).collect();
        let [pid, life, slot] = numbers[..] else { panic!("{line}") };
        let life = LifeView::map(open(&format!("/proc/{pid}/fd/{life}"), false)).unwrap();
        table.revoke(claim.row);
        (PinnedByAChild { generation: claim.generation, slot, peer }, page, life)
    }

    /// Ends the thread that holds the pin; the process lives on.
    pub(crate) fn end_the_thread(&mut self) {
        self.peer.say("die");
        assert!(self.peer.child.try_wait().unwrap().is_none(), "the process lives");
    }
}

fn pinned_by_a_child(kill: impl FnOnce(&mut PinnedByAChild)) {
    let (mut child, owner, life) = PinnedByAChild::start();
    let (generation, slot) = (child.generation, child.slot);
    assert_eq!(owner.holders(generation), [Holder::Thread(slot)]);
    assert_eq!(life.slot_state(slot), SlotState::Held);
    kill(&mut child);
    until("the death of the thread", || life.slot_state(slot) == SlotState::Died);
    assert!(owner.held(generation), "death alone releases nothing");
    assert!(owner.reclaim(Holder::Thread(slot), generation));
    assert!(!owner.held(generation));
}

#[test]
fn the_pin_of_a_killed_process_is_reclaimable() {
    pinned_by_a_child(|child| child.peer.signal(libc::SIGKILL));
}

#[test]
fn the_pin_of_a_thread_that_died_alone_is_reclaimable() {
    pinned_by_a_child(PinnedByAChild::end_the_thread);
}

/// A child that holds the initiator's side of that many pages, watched by us.
fn watched_child(count: usize) -> (Peer, Vec<Arc<PinPage>>, Vec<watcher::Watch>, Receiver<usize>) {
    let pages: Vec<_> = (0..count).map(|_| Arc::new(PinPage::create().unwrap())).collect();
    let files: Vec<_> = pages.iter().map(|page| path_of(page.fd().unwrap())).collect();
    let peer = Peer::start("holder", &files);
    let (sender, deaths) = channel();
    // Half of the watches begin before the child holds, as it happens.
    let watch = |(index, page): (usize, &Arc<PinPage>)| {
        let sender = sender.clone();
        watcher::watch(page.clone(), Side::Initiator, Box::new(move || sender.send(index).unwrap())).unwrap()
    };
    let mut watches: Vec<_> = pages.iter().enumerate().take(count / 2).map(watch).collect();
    peer.wait_for("holding");
    watches.extend(pages.iter().enumerate().skip(count / 2).map(watch));
    (peer, pages, watches, deaths)
}

#[test]
fn a_killed_peer_is_reported_by_every_watch_and_a_stopped_one_by_none() {
    let _alone = alone_with_the_watcher();
    let (peer, pages, watches, deaths) = watched_child(MAX_WATCHES);
    let one_more = watcher::watch(pages[0].clone(), Side::Initiator, Box::new(|| ()));
    assert_eq!(one_more.unwrap_err().kind(), Kind::Exhausted);

    peer.signal(libc::SIGSTOP);
    let (pid, mut status) = (peer.child.id() as i32, 0);
    // SAFETY: our own child and our own integer.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, libc::WUNTRACED) }, pid);
    assert!(libc::WIFSTOPPED(status));
    assert!(deaths.recv_timeout(Duration::from_millis(200)).is_err());

    peer.signal(libc::SIGKILL);
    let mut reported: Vec<usize> = (0..MAX_WATCHES).map(|_| deaths.recv_timeout(WATCHDOG).unwrap()).collect();
    reported.sort_unstable();
    assert_eq!(reported, (0..MAX_WATCHES).collect::<Vec<_>>());
    let (sender, ended) = channel();
    let late = watcher::watch(pages[0].clone(), Side::Initiator, Box::new(move || sender.send(()).unwrap()))
        .unwrap();
    ended.recv_timeout(WATCHDOG).unwrap();
    drop((watches, late));
}

#[test]
fn a_peer_that_exits_while_it_holds_is_reported() {
    let _alone = alone_with_the_watcher();
    let (mut peer, _pages, _watches, deaths) = watched_child(1);
    peer.say("exit");
    assert_eq!(deaths.recv_timeout(WATCHDOG), Ok(0));
}

#[test]
fn a_peer_that_lets_go_is_not_reported() {
    let _alone = alone_with_the_watcher();
    let (mut peer, pages, _watches, deaths) = watched_child(2);
    let noticed =
        |page: &Arc<PinPage>| page.life(Side::Initiator).word().load(Ordering::Relaxed) & WAITERS != 0;
    until("the watches have noticed the hold", || pages.iter().all(noticed));
    peer.say("release");
    peer.wait_for("released");
    let free = |page: &Arc<PinPage>| page.life(Side::Initiator).word().load(Ordering::Relaxed) == 0;
    until("the release", || pages.iter().all(free));
    peer.signal(libc::SIGKILL);
    // The watcher drops the callbacks, and with them the senders, when the watches have ended.
    until("the end of the watches", || deaths.try_recv() == Err(std::sync::mpsc::TryRecvError::Disconnected));
}

#[test]
fn a_dropped_watch_never_calls() {
    let _alone = alone_with_the_watcher();
    let (peer, pages, mut watches, deaths) = watched_child(2);
    drop(watches.pop());
    peer.signal(libc::SIGKILL);
    assert_eq!(deaths.recv_timeout(WATCHDOG), Ok(0));
    drop(watches);
    assert!(deaths.recv_timeout(WATCHDOG).is_err(), "the other callback is gone and was not called");
    until("the pages are let go", || pages.iter().all(|page| Arc::strong_count(page) == 1));
}

#[test]
fn a_callback_that_panics_does_not_stop_the_watcher() {
    let _alone = alone_with_the_watcher();
    let (peer, pages, _watches, deaths) = watched_child(1);
    let panics =
        watcher::watch(pages[0].clone(), Side::Initiator, Box::new(|| panic!("on purpose"))).unwrap();
    peer.signal(libc::SIGKILL);
    assert_eq!(deaths.recv_timeout(WATCHDOG), Ok(0));
    drop(panics);
    watcher::hold(Arc::new(PinPage::create().unwrap()), Side::Owner).unwrap();
}

#[test]
fn two_hundred_holds_come_and_go() {
    for _ in 0..3 {
        let pages: Vec<_> = (0..200).map(|_| Arc::new(PinPage::create().unwrap())).collect();
        let hold = |page: &Arc<PinPage>| watcher::hold(page.clone(), Side::Owner).unwrap();
        let holds: Vec<_> = pages.iter().map(hold).collect();
        let held = |page: &Arc<PinPage>| page.life(Side::Owner).word().load(Ordering::Relaxed) != 0;
        assert!(pages.iter().all(held));
        assert!(watcher::hold(pages[0].clone(), Side::Owner).is_err(), "one hold for each side of a page");
        assert!(pages.iter().all(held), "a hold that failed releases nothing");
        drop(holds);
        until("all are let go", || pages.iter().all(|page| !held(page) && Arc::strong_count(page) == 1));
    }
}

#[test]
fn a_page_outlives_its_last_user_while_it_is_held() {
    let page = Arc::new(PinPage::create().unwrap());
    let peer = second_mapping(&page);
    let hold = watcher::hold(page, Side::Owner).unwrap();
    let word = || peer.life(Side::Owner).word().load(Ordering::Relaxed);
    assert_ne!(word(), 0);
    drop(hold);
    until("the unlock", || word() == 0);
}

#[test]
fn a_forked_child_releases_nothing_of_its_parent() {
    let (_table, view, claim) = table_with_one_region();
    let owner = PinPage::create().unwrap();
    let initiator = Arc::new(second_mapping(&owner));
    let row = view.row(claim.row).unwrap();
    let mut pin = Some(initiator.pin_process(row, claim.generation).ok().unwrap());
    let mut hold = Some(watcher::hold(initiator.clone(), Side::Initiator).unwrap());
    assert!(LifePage::thread_slot().is_some());
    // SAFETY: the child allocates nothing that needs a lock of another thread, and leaves by `_exit`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        drop((pin.take(), hold.take()));
        let refused = LifePage::thread_slot().is_none()
            && LifePage::ours().is_err()
            && watcher::hold(initiator.clone(), Side::Owner).is_err()
            && initiator.pin_process(row, claim.generation).is_err();
        // SAFETY: ends the child without running what the parent registered for its own exit.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    assert!(pid > 0);
    let mut status = 0;
    // SAFETY: our own child and our own integer.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0);
    assert!(owner.held(claim.generation));
    assert_ne!(owner.life(Side::Initiator).word().load(Ordering::Relaxed) & 0x3fff_ffff, 0);
    drop((pin, hold));
    assert!(!owner.held(claim.generation));
}

/// Each word tells which generation it belongs to, so a stale or torn copy shows.
fn fill(generation: u64, offset: usize) -> u64 {
    (generation << 8 | offset as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[test]
fn recycled_bytes_are_never_read_under_a_pin() {
    const ROUNDS: usize = 4_000;
    const WORDS: usize = 32;
    let table = Table::create(4).unwrap();
    let view = TableView::map(table.fd().unwrap().try_clone().unwrap(), 4).unwrap();
    let owner = PinPage::create().unwrap();
    let doorbell = eventfd();
    let initiator = Arc::new(second_mapping(&owner).with_doorbell(doorbell.try_clone().unwrap()).unwrap());
    let bytes: Vec<AtomicU64> = (0..WORDS).map(|offset| AtomicU64::new(fill(1, offset))).collect();
    // Row and generation as a ticket would carry them; 0 ends the test.
    let ticket = AtomicU64::new(0);
    let encode = |claim: Claim| claim.generation << 2 | u64::from(claim.row);
    let mut claim = table.claim(0, WORDS as u64 * 8).unwrap();
    ticket.store(encode(claim), Ordering::Relaxed);

    let copies = |process: bool| {
        let (mut good, mut stale) = (0_u64, 0_u64);
        let slot = LifePage::thread_slot().unwrap();
        loop {
            let current = ticket.load(Ordering::Relaxed);
            if current == 0 {
                return (good, stale);
            }
            let (row, generation) = (view.row((current & 3) as u32).unwrap(), current >> 2);
            let copy = || {
                for (offset, word) in bytes.iter().enumerate() {
                    assert_eq!(
                        word.load(Ordering::Relaxed),
                        fill(generation, offset),
                        "bytes of another region"
                    );
                }
            };
            let valid = if process {
                initiator.pin_process(row, generation).map(|pin| {
                    copy();
                    pin.still_valid(row)
                })
            } else {
                initiator.pin_thread(slot, row, generation).map(|pin| {
                    copy();
                    pin.still_valid(row)
                })
            };
            match valid {
                Ok(true) => good += 1,
                Ok(false) => stale += 1,
                Err(PinError::Stale) => {
                    stale += 1;
                    // On few cores the owner needs one to publish the next region.
                    std::thread::yield_now();
                }
                Err(PinError::Busy) => panic!("more pins than threads"),
            }
        }
    };

    std::thread::scope(|scope| {
        let threads: Vec<_> =
            [false, false, false, true].map(|process| scope.spawn(move || copies(process))).into();
        let mut waits = 0;
        for round in 0..ROUNDS {
            // Regions of many short lives, so that the revocation falls on every step of a copy.
            for _ in 0..(round % 128) * 16 {
                std::hint::spin_loop();
            }
            owner.drain_started();
            table.revoke(claim.row);
            while owner.held(claim.generation) {
                waits += 1;
                let mut polled = [rustix::event::PollFd::new(&doorbell, rustix::event::PollFlags::IN)];
                let limit = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
                let ready = rustix::event::poll(&mut polled, Some(&limit)).unwrap();
                assert!(ready == 1 || !owner.held(claim.generation), "a doorbell was lost");
                rung(&doorbell);
            }
            owner.drain_ended();
            let next = Claim { row: 0, generation: claim.generation + 1 };
            for (offset, word) in bytes.iter().enumerate() {
                word.store(fill(next.generation, offset), Ordering::Relaxed);
            }
            table.free(claim.row);
            claim = table.claim(0, WORDS as u64 * 8).unwrap();
            assert_eq!(claim.generation, next.generation);
            ticket.store(encode(claim), Ordering::Relaxed);
        }
        ticket.store(0, Ordering::Relaxed);
        let (good, stale) = threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        assert!(good > 0, "{good} good, {stale} stale, {waits} waits");
    });
}

#[test]
fn a_doorbell_that_could_block_or_kill_whoever_rings_is_refused() {
    let blocking = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let pipe = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap().1;
    let folder = std::fs::File::open("/").unwrap().into();
    for wrong in [blocking, pipe, folder] {
        let owner = PinPage::create().unwrap();
        let refused = second_mapping(&owner).with_doorbell(wrong).err().unwrap();
        assert_eq!(refused.kind(), Kind::Protocol, "{refused}");
    }
}

#[test]
fn pages_of_a_pool_that_may_be_empty_are_refused() {
    use rustix::fs::{MemfdFlags, SealFlags};
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    // A kernel without such pages has no such files either.
    let file = match rustix::fs::memfd_create("test", flags) {
        Ok(file) => file,
        Err(error) => {
            let reason = format!("the kernel makes no memory files of huge pages: {error}");
            return skip("pages_of_a_pool_that_may_be_empty_are_refused", "huge-pages", &reason);
        }
    };
    rustix::fs::ftruncate(&file, 2 << 20).unwrap();
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    let refused = crate::fence::shared::map_received(&file, 4096, true, "connect").err().unwrap();
    assert_eq!(refused.kind(), Kind::Protocol, "{refused}");
}
