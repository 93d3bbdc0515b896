//! The throughput of one peer beside another that stands still.

use std::thread;
use std::time::{Duration, Instant};

use towline::{Endpoint, Registered, Remote, SystemStorage};
use towline_testkit::bench::outcome;
use towline_testkit::oracle::Stamp;
use towline_testkit::process::Process;
use towline_testkit::scene::{MIB, Owner, endpoint, local, paths};

use super::{Course, Drill, Round};

const LEN: usize = 8 * MIB;
const STAMP: Stamp = Stamp { region: 1, generation: 1 };

/// How long a rate is measured.
const TIME: Duration = Duration::from_millis(250);

/// A reader, and another one that is stopped.
pub(super) struct Neighbour {
    user: Endpoint,
    remote: Remote,
    buffer: Registered<SystemStorage>,
    other: Process,
    there: u64,
    _owner: Owner,
}

impl Neighbour {
    pub(super) fn new(course: &Course) -> Result<Neighbour, String> {
        let lane = course.lane;
        let mut owner = Owner::open(lane, LEN);
        owner.fill(STAMP);
        let user = endpoint("user");
        let remote = owner.import(&user, lane);
        let buffer = local(&user, LEN);
        let mut other = Process::open("other", "");
        other.must(&format!("register {LEN} system none"));
        let there = other.must(&format!("import {} {}", owner.ticket, paths(lane))).number(0);
        Ok(Neighbour { user, remote, buffer, other, there, _owner: owner })
    }

    fn rate(&self) -> f64 {
        let started = Instant::now();
        let mut moved = 0;
        while started.elapsed() < TIME {
            outcome(self.user.read(&self.remote, &self.buffer).start()).unwrap();
            moved += LEN;
        }
        moved as f64 / MIB as f64 / started.elapsed().as_secs_f64()
    }
}

impl Drill for Neighbour {
    fn round(&mut self, round: &mut Round) {
        let before = self.rate();
        self.other.must(&format!("loop read {} 1 {LEN}", self.there));
        thread::sleep(round.random.micros(8000) + Duration::from_millis(2));
        self.other.stop();
        let beside = self.rate();
        STAMP.verify_storage(self.buffer.storage(), 0, LEN).unwrap();
        self.other.resume();
        self.other.must("halt");
        let after = self.rate();
        round.tally.sample("MiB/s alone", (before + after) / 2.0);
        round.tally.sample("MiB/s beside", beside);
        round.tally.sample("share kept", beside / ((before + after) / 2.0));
    }
}
