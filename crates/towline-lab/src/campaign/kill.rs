//! `kill -9` at random moments: of a transfer, and of a life.

use std::fs;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use towline::ticket::socket_name;
use towline::{Access, Endpoint, Incarnation, Registered, SystemStorage, Ticket};
use towline_testkit::bench::{outcome, routing};
use towline_testkit::oracle::Stamp;
use towline_testkit::paths::{is_by_an_engine, is_complete, known, names};
use towline_testkit::process::Process;
use towline_testkit::scene::{Bystander, GONE, MIB, STALL, endpoint, kind_for, local, owner_on, paths};
use towline_testkit::watchdog::eventually;
use towline_testkit::worker::storage;

use super::{Course, Drill, Round, Staff, Tally};

const LEN: usize = 16 * MIB;

/// Owners and users that are killed in mid-transfer.
pub(super) struct Kill {
    lane: &'static str,
    quick: bool,
    staff: Staff,
    user: Endpoint,
    owner: Endpoint,
    bystander: Bystander,
    buffers: [Registered<SystemStorage>; 2],
}

impl Kill {
    pub(super) fn new(course: &Course) -> Result<Kill, String> {
        let user = endpoint("user");
        let buffers = [local(&user, LEN), local(&user, LEN)];
        let bystander = Bystander::open(course.lane);
        Ok(Kill {
            lane: course.lane,
            quick: course.quick,
            staff: course.staff,
            user,
            owner: owner_on(course.lane),
            bystander,
            buffers,
        })
    }

    fn owner_dies(&mut self, round: &mut Round) {
        let lane = self.lane;
        let stamp = Stamp::new(1, round.generation());
        let mut owner = self.staff.open_owner(lane, LEN);
        owner.fill(stamp);
        // The kernel frees the memory of the dead before its sockets: detection must not wait for that.
        let ballast = match round.random.below(8) {
            _ if self.staff == Staff::Python => 0,
            0 if self.quick => 256 * MIB,
            0 => 1024 * MIB,
            _ => 0,
        };
        if ballast > 0 {
            owner.process.must(&format!("register {ballast} system none"));
            owner.process.must("fill 2 9 9");
        }
        let remote = owner.import(&self.user, lane);
        let write = round.random.below(3) == 0;
        let start = |buffer| match write {
            true => self.user.write(&remote, buffer).start(),
            false => self.user.read(&remote, buffer).start(),
        };
        let transfers = [start(&self.buffers[0]), start(&self.buffers[1])].map(|started| started.unwrap());
        thread::sleep(round.random.micros(4000));
        let killed = Instant::now();
        owner.process.kill_without_waiting();
        // The times first: to compare 16 MiB with what they must be takes longer than any of them.
        let ends = transfers.each_ref().map(|transfer| {
            let ended = transfer.wait_for(STALL * 10).expect("a transfer from a dead owner does not end");
            (ended, killed.elapsed())
        });
        let mut failed = None;
        for ((ended, after), buffer) in ends.iter().zip(&self.buffers) {
            match ended {
                Ok(()) if !write => stamp.verify_storage(buffer.storage(), 0, LEN).unwrap(),
                Ok(()) => {}
                Err(error) => {
                    assert!(GONE.contains(&error.kind()), "{error}");
                    failed = Some(*after);
                }
            }
        }
        if let Some(detected) = failed {
            let (whole, known, rest) = match ballast {
                0 => ("detected", "known", "ended after that"),
                _ => (
                    "detected with a large process",
                    "known with a large process",
                    "ended after that with a large process",
                ),
            };
            round.tally.time(whole, detected);
            // Until the kernel has let go of the dead one's mutex and the watcher has seen it; and from then on until the
            // copies that were in flight have come to their end, and their waiters have run.
            if let Some(lost) = remote.lost_at() {
                let learned = lost.saturating_duration_since(killed);
                round.tally.time(known, learned);
                round.tally.time(rest, detected.saturating_sub(learned));
            }
        }
        if is_by_an_engine(&known(self.lane)) {
            // What it was at when the owner died it cannot stop; that ends by itself.
            let quiet = transfers.iter().all(|transfer| transfer.wait_quiet(STALL * 10));
            assert!(quiet, "a transfer from a dead owner never becomes quiet");
        }
        // Quiet: whatever is put there now stays.
        let mine = Stamp::new(99, round.generation());
        self.buffers.iter().for_each(|buffer| mine.fill_storage(buffer.storage()).unwrap());
        let dead = eventually(STALL * 10, || {
            outcome(self.user.read(&remote, &self.buffers[0]).at(0, 0, 8).start()).is_err()
        });
        assert!(dead, "a dead owner still gives bytes");
        // A probe that was still served has changed its eight bytes.
        mine.fill_storage(self.buffers[0].storage()).unwrap();
        self.bystander.serves(&self.user, lane);
        self.buffers.iter().for_each(|buffer| mine.verify_storage(buffer.storage(), 0, LEN).unwrap());
        owner.process.kill();
        let error = self.user.import_with(&owner.ticket, &routing(lane)).unwrap_err();
        assert!(GONE.contains(&error.kind()), "{error}");
        round.tally.count("owners killed", 1);
    }

    fn user_dies(&mut self, round: &mut Round) {
        let lane = self.lane;
        let memory = storage(LEN, kind_for(lane)).unwrap();
        let watched = Arc::downgrade(&memory);
        let region = self.owner.register(memory, Access::READ_WRITE).unwrap();
        let ticket = region.ticket().unwrap();
        let mut user = self.staff.open("victim", "");
        user.must(&format!("register {LEN} system none"));
        if self.staff == Staff::Rust {
            user.must("fill 1 98 98");
        }
        let remote = user.must(&format!("import {ticket} {}", paths(lane))).number(0);
        let op = round.random.pick(&["write", "read"]);
        user.must(&format!("loop {op} {remote} 1 {LEN}"));
        thread::sleep(round.random.micros(8000));
        let killed = Instant::now();
        user.kill_without_waiting();
        if round.random.below(4) == 0 {
            // Dropped: parked where it must be, and freed once the dead one's copies are over.
            drop(region);
            let freed =
                eventually(STALL * 10, || watched.strong_count() == 0 && self.owner.stats().parked == (0, 0));
            assert!(freed, "memory that a dead peer used is never freed: {:?}", self.owner.stats());
        } else {
            let memory = region
                .into_storage_within(STALL * 10)
                .unwrap_or_else(|pinned| panic!("a dead peer keeps memory: {}", pinned.error));
            let mine = Stamp::new(97, round.generation());
            mine.fill_storage(&memory).unwrap();
            user.kill();
            thread::sleep(round.random.micros(2000));
            mine.verify_storage(&memory, 0, LEN).unwrap_or_else(|wrong| panic!("written late: {wrong}"));
        }
        round.tally.time("reclaimed", killed.elapsed());
        round.tally.count("users killed", 1);
        self.bystander.serves(&self.user, lane);
    }
}

impl Drill for Kill {
    fn round(&mut self, round: &mut Round) {
        if round.random.below(2) == 0 { self.owner_dies(round) } else { self.user_dies(round) }
    }

    fn finish(&mut self, _: &mut Tally) {
        assert_eq!(self.owner.stats().regions, 0);
        assert!(eventually(STALL * 10, || self.user.stats().parked == (0, 0)), "{:?}", self.user.stats());
    }
}

/// Workers that are killed at any moment, and what is left of them.
pub(super) struct Leftover {
    files: Vec<String>,
    killed: Vec<i32>,
    user: Endpoint,
    local: Registered<SystemStorage>,
}

impl Leftover {
    pub(super) fn new(_: &Course) -> Result<Leftover, String> {
        let user = endpoint("user");
        let local = local(&user, MIB);
        Ok(Leftover { files: shared_files(None), killed: Vec::new(), user, local })
    }
}

/// What this library may have left where everybody sees it. In the directory for temporary files others keep things under its name
/// too (logs, copies of programs): there only those count that name one of these processes, where some are given.
fn shared_files(killed: Option<&[i32]>) -> Vec<String> {
    let names = |place: &str| {
        let entries = fs::read_dir(place).into_iter().flatten().flatten();
        entries
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| name.contains("towline"))
            .map(|name| format!("{place}/{name}"))
            .collect::<Vec<_>>()
    };
    let of_the_killed = |name: &String| {
        let mut numbers = name.split(|letter: char| !letter.is_ascii_digit());
        killed.is_none_or(|killed| {
            numbers.any(|number| number.parse().is_ok_and(|number| killed.contains(&number)))
        })
    };
    let mut all: Vec<String> = ["/dev/shm", "/run"].into_iter().flat_map(names).collect();
    all.extend(names("/tmp").into_iter().filter(of_the_killed));
    all.sort_unstable();
    all
}

fn socket_is_there(incarnation: Incarnation) -> bool {
    let name = socket_name(&incarnation);
    let name = String::from_utf8_lossy(&name);
    fs::read_to_string("/proc/net/unix").unwrap_or_default().lines().any(|line| line.contains(&*name))
}

impl Drill for Leftover {
    fn round(&mut self, round: &mut Round) {
        let mut worker = Process::start("victim");
        self.killed.push(worker.pid());
        let moment = round.random.below(4);
        if moment == 0 {
            // At any moment of its birth.
            worker.tell("open victim");
            worker.tell("register 65536 shared read+write");
            thread::sleep(round.random.micros(6000));
            worker.kill();
        } else {
            worker.must("open victim");
            worker.must("register 65536 shared read+write");
            let ticket: Ticket = worker.must("ticket 1").text(0).parse().unwrap();
            let incarnation = ticket.body().identity.incarnation;
            assert!(socket_is_there(incarnation), "the socket of a living worker cannot be seen");
            if moment > 1 {
                let lane = round.random.pick(&names(is_complete));
                let remote = self.user.import_with(&ticket, &routing(lane)).unwrap();
                let _ = self.user.read(&remote, &self.local).at(0, 0, 65_536).start();
                thread::sleep(round.random.micros(1000));
            }
            worker.kill();
            assert!(!socket_is_there(incarnation), "a dead worker's socket is still there");
        }
        assert!(!fs::exists(format!("/proc/{}", worker.pid())).unwrap_or(true), "a killed worker lives");
    }

    fn finish(&mut self, tally: &mut Tally) {
        // Others on this machine may use the library too; what they have now is there a moment later as well, or not.
        let left = || shared_files(Some(&self.killed));
        let new = || left().into_iter().filter(|name| !self.files.contains(name)).count();
        tally.count("files left", new() as u64);
        assert_eq!(new(), 0, "files are left behind: {:?}", left());
    }
}
