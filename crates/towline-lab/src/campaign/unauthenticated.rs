//! Connections that never prove who they are.

use std::time::{Duration, Instant};

use towline::wire::{FrameKind, HEADER_LEN, Message, Prove};
use towline_testkit::attacker::{Attacker, Medium};
use towline_testkit::bench::{outcome, routing};
use towline_testkit::oracle::Stamp;
use towline_testkit::paths::{is_served_here, known};
use towline_testkit::scene::{KIB, Owner, endpoint, local};
use towline_testkit::watchdog::eventually;

use super::{Course, Drill, Round, Tally};

const LEN: usize = 64 * KIB;
const STAMP: Stamp = Stamp { region: 1, generation: 1 };

/// Connections of one round.
const CROWD: usize = 50;

/// How long a connection without a proof may stay; ten times that ends the campaign.
const PATIENCE: Duration = Duration::from_secs(5);

/// Unauthenticated connections to an owner.
pub(super) struct Unauthenticated {
    lane: &'static str,
    medium: Medium,
    owner: Owner,
    descriptors: usize,
    staying: Vec<Attacker>,
}

impl Unauthenticated {
    pub(super) fn new(course: &Course) -> Result<Unauthenticated, String> {
        let lane = course.lane;
        let mut owner = Owner::open(lane, LEN);
        owner.fill(STAMP);
        let medium = if is_served_here(&known(lane)) { Medium::Unix } else { Medium::Tcp };
        let mut drill = Unauthenticated { lane, medium, owner, descriptors: 0, staying: Vec::new() };
        // What the first contact starts for good belongs to the baseline.
        drill.serves();
        let mut last = (0, 0);
        eventually(Duration::from_secs(10), || {
            let now = drill.owner.process.descriptors();
            last = if now == last.0 { (now, last.1 + 1) } else { (now, 0) };
            last.1 > 100
        });
        drill.descriptors = last.0;
        Ok(drill)
    }

    /// A new client is served, whatever else goes on; says how long that took.
    fn serves(&self) -> Duration {
        let started = Instant::now();
        let user = endpoint("good");
        let remote = user.import_with(&self.owner.ticket, &routing(self.lane)).unwrap();
        let local = local(&user, LEN);
        outcome(user.read(&remote, &local).start()).unwrap();
        let took = started.elapsed();
        STAMP.verify_storage(local.storage(), 0, LEN).unwrap();
        took
    }
}

impl Drill for Unauthenticated {
    fn round(&mut self, round: &mut Round) {
        let random = &mut round.random;
        for _ in 0..CROWD {
            let mut attacker = Attacker::connect(&self.owner.ticket, self.medium);
            let (_, hello) = Attacker::hello(&self.owner.ticket);
            let stays = match random.below(5) {
                0 => true,
                1 => {
                    attacker.send(&hello[..random.below(hello.len() as u64) as usize]);
                    true
                }
                2 => {
                    let garbage: Vec<u8> = (0..HEADER_LEN + 100).map(|_| random.number() as u8).collect();
                    attacker.send(&garbage);
                    false
                }
                3 => {
                    attacker.send(&hello);
                    let answer = attacker.frame();
                    assert!(
                        answer.as_ref().is_none_or(|(header, _)| matches!(
                            header.kind,
                            FrameKind::Welcome | FrameKind::Refuse
                        )),
                        "{answer:?}"
                    );
                    attacker.send(&Message::from(Prove { mac: [random.number() as u8; 32] }).frame(0, 0, 0));
                    assert!(attacker.gets_nothing_but_refusals(), "a wrong proof is taken");
                    false
                }
                _ => {
                    attacker.send(&hello);
                    true
                }
            };
            if stays {
                self.staying.push(attacker);
            }
        }
        round.tally.time("a new client is served", self.serves());
        round.tally.count("connections", CROWD as u64);
        // Some leave by themselves, the owner closes the others.
        let keep = round.random.below(100) as usize;
        self.staying.truncate(keep);
    }

    fn finish(&mut self, tally: &mut Tally) {
        let staying = std::mem::take(&mut self.staying);
        let back = eventually(PATIENCE * 10, || self.owner.process.descriptors() <= self.descriptors);
        assert!(back, "{} descriptors, {} before", self.owner.process.descriptors(), self.descriptors);
        tally.count("unauthenticated connections that the owner closed", staying.len() as u64);
        self.serves();
        self.owner.process.must(&format!("check 1 1 1 0 {LEN}"));
    }
}
