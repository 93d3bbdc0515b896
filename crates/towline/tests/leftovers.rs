//! What is left in this process of endpoints that were closed and of peers that have died, while the objects are still there: no
//! descriptor, no mapping. Descriptors and mappings are counted for the whole process, so these tests run one after the other.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use towline::{Access, Endpoint, Registered, Remote, Routing, SharedStorage, SystemStorage, Ticket};

const LEN: usize = 1 << 20;
const WATCHDOG: Duration = Duration::from_secs(60);
const ROLE: &str = "TOWLINE_TEST_ROLE";

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock()
}

fn descriptors() -> Vec<String> {
    let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let mut names: Vec<String> = open
        .filter_map(|fd| std::fs::read_link(fd.path()).ok())
        .map(|name| name.display().to_string())
        // The one by which they are read.
        .filter(|name| !name.ends_with("/fd"))
        .collect();
    names.sort();
    names
}

/// The memory files of the library, mapped: tables, pins, mailboxes, life pages, segments.
fn mappings() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut ours: Vec<String> = maps
        .lines()
        .filter_map(|line| line.split_once("/memfd:").map(|(_, name)| name.to_owned()))
        .filter(|name| name.starts_with("towline"))
        .collect();
    ours.sort();
    ours
}

fn eventually(what: &str, mut is_so: impl FnMut() -> bool, now: impl Fn() -> String) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < WATCHDOG, "{what}: {}", now());
        thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until the threads have ended that may still hold something of the last transfer, which is all but those that stay.
fn idle() {
    let names = || -> Vec<String> {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        names.map(|name| name.trim().to_owned()).filter(|name| name.starts_with("towline-")).collect()
    };
    let stays = |name: &String| ["towline-io", "towline-watch"].contains(&name.as_str());
    eventually("the end of the idle threads", || names().iter().all(stays), || format!("{:?}", names()));
}

fn over(path: &str) -> Routing {
    Routing::default().require(path).unwrap()
}

fn shared(owner: &Endpoint) -> Registered<SharedStorage> {
    owner.register(SharedStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap()
}

fn read(user: &Endpoint, remote: &Remote) {
    let local = user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
    user.read(remote, &local).start().unwrap().wait().unwrap();
}

/// Another process of this program, which dies with its end of the talk.
struct Other(Child, BufReader<std::process::ChildStdout>);

impl Other {
    fn start(role: &str) -> Other {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_other_process", "--nocapture"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        Other(child, said)
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.0.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// What it says behind that word, which the test harness never says.
    fn wait_for(&mut self, word: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.1.read_line(&mut line).unwrap() > 0, "the other process has ended");
            if let Some((_, rest)) = line.split_once(word) {
                return rest.trim().to_owned();
            }
        }
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Not a test by itself: what the others run as another process.
#[test]
fn the_other_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let other = Endpoint::open(&role).unwrap();
    let mut lines = std::io::stdin().lines();
    if role == "owner" {
        let region = shared(&other);
        println!("\nTICKET {}", region.ticket().unwrap());
        let _ = lines.next();
        return;
    }
    let ticket: Ticket = lines.next().unwrap().unwrap().parse().unwrap();
    let remote = other.import_with(&ticket, &over("mapped")).unwrap();
    read(&other, &remote);
    let pinned = remote.pin().unwrap();
    println!("\nDONE");
    let _ = lines.next();
    drop(pinned);
}

#[test]
fn a_closed_endpoint_keeps_no_descriptor() {
    let _alone = alone();
    // What belongs to the process comes with the first endpoints.
    let mut before = Vec::new();
    for round in 0..2 {
        let (owner, user) = (Endpoint::open("owner").unwrap(), Endpoint::open("user").unwrap());
        let region = shared(&owner);
        for path in ["mapped", "tcp"] {
            let remote = user.import_with(&region.ticket().unwrap(), &over(path)).unwrap();
            read(&user, &remote);
        }
        user.close().unwrap();
        owner.close().unwrap();
        // Its storage has a memory file of its own.
        drop(region);
        if round == 0 {
            drop((owner, user));
            before = descriptors();
            idle();
            before = descriptors().into_iter().filter(|name| before.contains(name)).collect();
            continue;
        }
        eventually(
            "descriptors of closed endpoints",
            || descriptors().len() <= before.len(),
            || format!("{:?} after {before:?}", descriptors()),
        );
    }
}

#[test]
fn of_a_user_that_was_killed_nothing_stays_mapped_at_the_owner() {
    let _alone = alone();
    let owner = Endpoint::open("owner").unwrap();
    let region = shared(&owner);
    // What belongs to the process comes with the first peer.
    let mut before = None;
    for _ in 0..2 {
        let mut user = Other::start("user");
        user.tell(&region.ticket().unwrap().to_string());
        user.wait_for("DONE");
        let with = (mappings(), descriptors());
        user.kill();
        let Some((mapped, open)) = &before else {
            eventually("the first peer is noticed", || mappings().len() < with.0.len(), String::new);
            let pins = || mappings().iter().filter(|name| name.starts_with("towline-pins")).count();
            eventually("the first peer's pins", || pins() == 0, || format!("{:?}", mappings()));
            idle();
            before = Some((mappings(), descriptors()));
            continue;
        };
        eventually(
            "what a dead peer had",
            || mappings() == *mapped && descriptors().len() <= open.len(),
            || format!("{:?}, {:?} after {before:?}", mappings(), descriptors()),
        );
    }
    assert_eq!(before.unwrap().0.iter().filter(|name| name.starts_with("towline-pins")).count(), 0);
}

#[test]
fn of_an_owner_that_was_killed_nothing_stays_mapped_at_the_user() {
    let _alone = alone();
    let user = Endpoint::open("user").unwrap();
    // The life page of this process comes with the first neighbour.
    let before: Vec<String> = mappings().into_iter().chain(["towline-life".to_owned()]).collect();
    for kept in [false, true] {
        let mut owner = Other::start("owner");
        let ticket: Ticket = owner.wait_for("TICKET ").parse().unwrap();
        let remote = user.import_with(&ticket, &over("mapped")).unwrap();
        read(&user, &remote);
        // A holder of a remote keeps what it has mapped, and no other does.
        let kept = kept.then_some(remote);
        owner.kill();
        if let Some(remote) = kept {
            eventually("the owner's end is noticed", || remote.alive().is_err(), String::new);
        }
        eventually(
            "what a dead owner had",
            || mappings().len() <= before.len(),
            || format!("{:?}", mappings()),
        );
    }
}
