//! Processes that fork, and that end with work pending.

use std::thread;

use rustix::process::Signal;
use towline::{Access, Endpoint};
use towline_testkit::oracle::Stamp;
use towline_testkit::paths::known;
use towline_testkit::process::Process;
use towline_testkit::scene::{KIB, MIB, Owner, STALL, kind_for, owner_on, paths};
use towline_testkit::worker::storage;

use super::{Course, Drill, Round};

/// A worker that forks between its transfers.
pub(super) struct Fork {
    lane: &'static str,
    owner: Owner,
    parent: Process,
    remote: u64,
}

impl Fork {
    pub(super) fn new(course: &Course) -> Result<Fork, String> {
        let lane = course.lane;
        let mut owner = Owner::open(lane, 64 * KIB);
        owner.fill(Stamp::new(1, 1));
        let mut parent = Process::open("parent", "");
        parent.must(&format!("register {} shared read+write", 64 * KIB));
        let remote = parent.must(&format!("import {} {lane}", owner.ticket)).number(0);
        Ok(Fork { lane, owner, parent, remote })
    }
}

impl Drill for Fork {
    fn round(&mut self, round: &mut Round) {
        let (parent, remote) = (&mut self.parent, self.remote);
        let pinned = (known(self.lane).shares_memory && round.random.below(2) == 0)
            .then(|| parent.must(&format!("pin {remote}")).number(0));
        parent.must(&format!("read {remote} 1 0 0 65536"));
        let wrong = parent.must("fork");
        assert_eq!(wrong.text(0), "", "in the child");
        // The child has dropped and closed everything that it saw; here nothing has changed.
        parent.must("fill 1 9 9");
        parent.must(&format!("read {remote} 1 0 0 65536"));
        parent.must("check 1 1 1 0 65536");
        assert!(parent.ask_with(&format!("notify {remote}"), b"still here").is_ok());
        assert_eq!(self.owner.process.must("receive 20000").payload, b"still here");
        if let Some(pinned) = pinned {
            parent.must(&format!("unpin {pinned}"));
        }
    }
}

/// Workers that end while transfers are in flight.
pub(super) struct Exit {
    lane: &'static str,
    owner: Endpoint,
}

impl Exit {
    pub(super) fn new(course: &Course) -> Result<Exit, String> {
        Ok(Exit { lane: course.lane, owner: owner_on(course.lane) })
    }
}

impl Drill for Exit {
    fn round(&mut self, round: &mut Round) {
        const LEN: usize = 8 * MIB;
        let lane = self.lane;
        let memory = storage(LEN, kind_for(lane)).unwrap();
        let region = self.owner.register(memory, Access::READ_WRITE).unwrap();
        let ticket = region.ticket().unwrap();
        let mut worker = Process::open("leaver", "");
        worker.must(&format!("register {LEN} shared read+write"));
        let remote = worker.must(&format!("import {ticket} {}", paths(lane))).number(0);
        let op = round.random.pick(&["read", "write"]);
        let how = round.random.pick(&["exit", "return", "exec", "term", "usr1"]);
        let code = 1 + round.random.below(60) as i32;
        let expected = match how {
            "exec" => 0,
            "term" => 128 + Signal::TERM.as_raw(),
            // Not SIGINT, which programs in the background inherit as ignored.
            "usr1" => 128 + Signal::USR1.as_raw(),
            _ => code,
        };
        if ["term", "usr1"].contains(&how) {
            worker.must(&format!("loop {op} {remote} 1 {LEN}"));
            thread::sleep(round.random.micros(3000));
            worker.send_signal(if how == "term" { Signal::TERM } else { Signal::USR1 });
        } else {
            worker.tell(&format!("leave {op} {remote} 1 {LEN} {how} {code}"));
        }
        let ended = worker.ended_within(STALL * 10);
        assert_eq!(ended, Some(expected), "a worker that ended by {how} in mid-{op}\n{}", worker.log());
        let started = std::time::Instant::now();
        let memory = region
            .into_storage_within(STALL * 10)
            .unwrap_or_else(|pinned| panic!("a worker that ended by {how} keeps memory: {}", pinned.error));
        round.tally.time("taken back", started.elapsed());
        let mine = Stamp::new(97, round.generation());
        mine.fill_storage(&memory).unwrap();
        thread::sleep(round.random.micros(1000));
        mine.verify_storage(&memory, 0, LEN).unwrap_or_else(|wrong| panic!("written late: {wrong}"));
    }
}
