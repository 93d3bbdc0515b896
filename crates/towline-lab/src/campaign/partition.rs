//! A cable that is pulled in mid-transfer, and put back.

use std::thread;
use std::time::{Duration, Instant};

use towline::Kind;
use towline_testkit::netns::{End, Network};
use towline_testkit::paths::{is_by_an_engine, known};
use towline_testkit::process::Process;
use towline_testkit::scene::{MIB, STALL};
use towline_testkit::watchdog::eventually;

use super::{Course, Drill, Round};

const LEN: usize = 64 * MIB;

/// Two hosts, as far as one machine can play them.
pub(super) struct Partition {
    // Before the network, which can only be taken down without them.
    owner: Process,
    user: Process,
    network: Network,
    ticket: String,
    lane: &'static str,
}

impl Partition {
    pub(super) fn new(course: &Course) -> Result<Partition, String> {
        let network = Network::build()?;
        let mut owner = Process::start_in(&network.namespace(End::A), "owner");
        let mut user = Process::start_in(&network.namespace(End::B), "user");
        let address = std::net::SocketAddr::new(network.address(End::A, false), 0);
        owner.must(&format!("open owner listen={address} lend=tcp stall={}", STALL.as_millis()));
        user.must(&format!("open user reach=tcp stall={}", STALL.as_millis()));
        owner.must(&format!("register {LEN} system read+write"));
        user.must(&format!("register {LEN} system none"));
        user.must(&format!("register {MIB} system none"));
        owner.must("fill 1 1 1");
        let ticket = owner.must("ticket 1").text(0).to_owned();
        Ok(Partition { owner, user, network, ticket, lane: course.lane })
    }
}

impl Drill for Partition {
    fn round(&mut self, round: &mut Round) {
        let op = round.random.pick(&["read", "write"]);
        let end = round.random.pick(&[End::A, End::B]);
        let (ticket, lane) = (&self.ticket, self.lane);
        // Starting NIXL may take longer than an import.
        let imported = eventually(STALL * 20, || self.user.ask(&format!("import {ticket} {lane}")).is_ok());
        assert!(imported, "no contact");
        let remote = self.user.must(&format!("import {ticket} {lane}")).number(0);
        // One transfer is over before the cable is out, so they are repeated.
        self.user.must(&format!("until-broken {op} {remote} 1 {LEN}"));
        thread::sleep(Duration::from_millis(2) + round.random.micros(60_000));
        self.network.cut(end);
        let cut = Instant::now();
        let failure = self.user.answer(STALL * 10).expect_err("bytes cross a cable that is out");
        assert!(matches!(failure.kind, Kind::Timeout | Kind::Disconnected), "{failure}");
        round.tally.time("detected", cut.elapsed());
        // What was in flight must not land once the cable is back. NIXL cannot be kept from it, and a transfer by it says so.
        let target = if op == "read" { &mut self.user } else { &mut self.owner };
        target.must("fill 1 9 9");
        if round.random.below(4) == 0 {
            // A new contact does not hang either.
            let failure =
                self.user.ask(&format!("import {ticket} {lane}")).expect_err("contact without a cable");
            assert!(matches!(failure.kind, Kind::Timeout | Kind::Disconnected), "{failure}");
        }
        let healed = Instant::now();
        self.network.heal(end);
        let again = eventually(STALL * 20, || self.user.ask(&format!("import {ticket} {lane}")).is_ok());
        assert!(again, "no contact after healing");
        round.tally.time("in contact again", healed.elapsed());
        let remote = self.user.must(&format!("import {ticket} {lane}")).number(0);
        // A lane that outlived the cut waits for TCP to send again, which may take longer than a transfer's limit.
        let read = eventually(STALL * 20, || self.user.ask(&format!("read {remote} 2 0 0 {MIB}")).is_ok());
        assert!(read, "no bytes after healing");
        if !is_by_an_engine(&known(lane)) {
            let target = if op == "read" { &mut self.user } else { &mut self.owner };
            target.must(&format!("check 1 9 9 0 {LEN}"));
        }
        self.owner.must("fill 1 1 1");
        for remote in (remote.saturating_sub(40))..=remote {
            let _ = self.user.ask(&format!("forget {remote}"));
        }
    }
}
