//! Many operations, each of them checked, and what they leave behind.

use std::thread;
use std::time::{Duration, Instant};

use towline::{Access, Endpoint, MemoryAccess, Registered, Remote, SystemStorage};
use towline_testkit::bench::{outcome, routing};
use towline_testkit::oracle::Stamp;
use towline_testkit::paths::{is_here, known};
use towline_testkit::process::resident_of;
use towline_testkit::scene::{KIB, MIB, Owner, STALL, endpoint, local};
use towline_testkit::worker::storage;

use super::{Course, Drill, Round, Tally};

const LEN: usize = 4 * MIB;

/// Operations of one round.
const BATCH: u64 = 1000;

/// After so many rounds all that is allocated once is there.
const WARM: u32 = 5;

/// How much resident memory may differ: the allocator's own affairs.
const ROOM: u64 = 24 << 20;

/// Reads and writes of all sizes by one user.
pub(super) struct Load {
    user: Endpoint,
    remote: Remote,
    buffer: Registered<SystemStorage>,
    target: Target,
    before: Option<[Usage; 2]>,
    rounds: u32,
}

enum Target {
    Here(
        Registered<std::sync::Arc<dyn towline::Storage>>,
        #[allow(dead_code, reason = "kept open")] Endpoint,
    ),
    There(Box<Owner>),
}

/// What a process uses.
#[derive(Debug, Clone, Copy)]
struct Usage {
    resident: u64,
    descriptors: usize,
    threads: usize,
}

impl Usage {
    fn of(pid: i32) -> Usage {
        let count = |what: &str| std::fs::read_dir(format!("/proc/{pid}/{what}")).map_or(0, Iterator::count);
        Usage { resident: resident_of(pid), descriptors: count("fd"), threads: count("task") }
    }
}

impl Load {
    pub(super) fn new(course: &Course) -> Result<Load, String> {
        let lane = course.lane;
        let user = endpoint("user");
        let (target, remote) = if is_here(&known(lane)) {
            let owner = endpoint("owner");
            let region = owner.register(storage(LEN, "system").unwrap(), Access::READ_WRITE).unwrap();
            Stamp::new(1, 1).fill_storage(region.storage()).unwrap();
            let remote = user.import_with(&region.ticket().unwrap(), &routing(lane)).unwrap();
            (Target::Here(region, owner), remote)
        } else {
            let mut owner = Owner::open(lane, LEN);
            owner.fill(Stamp::new(1, 1));
            let remote = owner.import(&user, lane);
            (Target::There(Box::new(owner)), remote)
        };
        let buffer = local(&user, LEN);
        Ok(Load { user, remote, buffer, target, before: None, rounds: 0 })
    }

    fn usage(&self) -> [Usage; 2] {
        let own = std::process::id() as i32;
        match &self.target {
            Target::Here(..) => [Usage::of(own); 2],
            Target::There(owner) => [Usage::of(own), Usage::of(owner.process.pid())],
        }
    }

    fn verify(&self, stamp: Stamp, at: usize, len: usize) {
        let mut bytes = vec![0; len];
        self.buffer.read_at(at, &mut bytes).unwrap();
        stamp.verify(at as u64, &bytes).unwrap_or_else(|wrong| panic!("a read gave {wrong}"));
    }
}

impl Drill for Load {
    fn round(&mut self, round: &mut Round) {
        let random = &mut round.random;
        let stamp = Stamp::new(1, round.number as u16);
        // The lower half is written and read back, the upper half is only read.
        let half = LEN / 2;
        match &mut self.target {
            Target::Here(region, _) => stamp.fill_storage(region.storage()).unwrap(),
            Target::There(owner) => drop(owner.fill(stamp)),
        }
        let written = Stamp::new(2, round.number as u16);
        let (mut bytes, mut moving) = (0u64, Duration::ZERO);
        let mut done = 0;
        while done < BATCH {
            let len = match random.below(100) {
                0 => 512 * KIB,
                1..=9 => 64 * KIB,
                10..=39 => 4 * KIB,
                _ => 8 << random.below(7),
            };
            let at = 8 * random.below(((half - len) / 8 + 1) as u64) as usize;
            if random.below(3) == 0 {
                let mut source = vec![0; len];
                written.fill(at as u64, &mut source);
                self.buffer.write_at(at, &source).unwrap();
                let started = Instant::now();
                let place = (at as u64, at as u64, len as u64);
                outcome(self.user.write(&self.remote, &self.buffer).at(place.0, place.1, place.2).start())
                    .unwrap();
                moving += started.elapsed();
                self.buffer.storage().memset(0, at, len).unwrap();
                outcome(self.user.read(&self.remote, &self.buffer).at(place.0, place.1, place.2).start())
                    .unwrap();
                self.verify(written, at, len);
                (done, bytes) = (done + 2, bytes + len as u64);
                continue;
            }
            // Several at once: they end in any order.
            let several = 1 + random.below(4) as usize;
            let places: Vec<usize> = (0..several)
                .map(|slot| {
                    half + slot * (half / 4)
                        + 8 * random.below(((half / 4 - len) / 8 + 1).max(1) as u64) as usize
                })
                .map(|place| place.min(LEN - len))
                .collect();
            let started = Instant::now();
            let transfers: Vec<_> = places
                .iter()
                .map(|place| {
                    let place = *place as u64;
                    self.user.read(&self.remote, &self.buffer).at(place, place, len as u64).start().unwrap()
                })
                .collect();
            transfers.iter().for_each(|transfer| transfer.wait().unwrap());
            moving += started.elapsed();
            places.iter().for_each(|place| self.verify(stamp, *place, len));
            (done, bytes) = (done + several as u64, bytes + (several * len) as u64);
        }
        round.tally.count("operations", done);
        round.tally.sample("MiB/s", bytes as f64 / MIB as f64 / moving.as_secs_f64().max(1e-9));
        self.rounds += 1;
        if self.rounds == WARM {
            self.before = Some(self.usage());
        }
    }

    fn finish(&mut self, tally: &mut Tally) {
        let Some(before) = self.before else { return };
        // The threads that copied go home when nothing has come for a second.
        thread::sleep(STALL + Duration::from_millis(500));
        let after = self.usage();
        let alone = matches!(self.target, Target::There(_));
        for (index, (before, after)) in before.iter().zip(&after).enumerate() {
            let grown = after.resident.saturating_sub(before.resident);
            tally.sample(["user grew by MiB", "owner grew by MiB"][index], grown as f64 / MIB as f64);
            // Other lanes run in this process: only the owner's is its own.
            if alone && index == 1 {
                assert!(grown <= ROOM, "the owner grew by {grown} bytes: {before:?}, {after:?}");
                assert!(after.descriptors <= before.descriptors + 2, "{before:?}, {after:?}");
                assert!(after.threads <= before.threads + 1, "{before:?}, {after:?}");
            }
        }
    }
}
