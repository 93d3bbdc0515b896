//! Cancelling at random moments.

use std::thread;
use std::time::{Duration, Instant};

use towline::{Access, Endpoint, Kind, MemoryAccess, Registered, Remote, SystemStorage};
use towline_testkit::bench::{outcome, routing};
use towline_testkit::oracle::Stamp;
use towline_testkit::paths::{is_here, is_served, known};
use towline_testkit::scene::{KIB, MIB, Observer, Owner, STALL, endpoint, local, old_or_new, unchanged};
use towline_testkit::worker::storage;

use super::{Course, Drill, Round};

const LEN: usize = 8 * MIB;
const OLD: Stamp = Stamp { region: 5, generation: 1 };

/// Reads and writes that are cancelled, or whose short deadline passes, while their owner is well.
pub(super) struct Cancel {
    user: Endpoint,
    remote: Remote,
    buffer: Registered<SystemStorage>,
    small: Registered<SystemStorage>,
    target: Target,
    /// No owner takes part.
    direct: bool,
}

/// Whose memory is written to.
enum Target {
    Here(
        Registered<std::sync::Arc<dyn towline::Storage>>,
        #[allow(dead_code, reason = "kept open")] Endpoint,
    ),
    There(Box<(Owner, Observer)>),
}

impl Target {
    fn look(&self) -> Vec<u8> {
        match self {
            Target::Here(region, _) => {
                let mut bytes = vec![0; LEN];
                region.storage().read_at(0, &mut bytes).unwrap();
                bytes
            }
            Target::There(both) => both.1.look(),
        }
    }

    fn fill(&mut self) {
        match self {
            Target::Here(region, _) => OLD.fill_storage(region.storage()).unwrap(),
            Target::There(both) => drop(both.0.fill(OLD)),
        }
    }
}

impl Cancel {
    pub(super) fn new(course: &Course) -> Result<Cancel, String> {
        let lane = course.lane;
        let user = endpoint("user");
        let (target, remote) = if is_here(&known(lane)) {
            let owner = endpoint("owner");
            let region = owner.register(storage(LEN, "system").unwrap(), Access::READ_WRITE).unwrap();
            let remote = user.import_with(&region.ticket().unwrap(), &routing(lane)).unwrap();
            (Target::Here(region, owner), remote)
        } else {
            let owner = Owner::open(lane, LEN);
            let remote = owner.import(&user, lane);
            let observer = Observer::of(&owner, lane);
            (Target::There(Box::new((owner, observer))), remote)
        };
        let (buffer, small) = (local(&user, LEN), local(&user, 4 * KIB));
        let mut cancel = Cancel { user, remote, buffer, small, target, direct: !is_served(&known(lane)) };
        cancel.target.fill();
        Ok(cancel)
    }
}

impl Drill for Cancel {
    fn round(&mut self, round: &mut Round) {
        let random = &mut round.random;
        // What is copied directly is over before it can be cancelled, unless it is long.
        let len = match self.direct {
            true => random.pick(&[300 * KIB, 4 * MIB, LEN, LEN]),
            false => random.pick(&[4 * KIB, 64 * KIB, 300 * KIB, MIB, LEN]),
        };
        let at = 8 * random.below(((LEN - len) / 8 + 1) as u64) as usize;
        let write = random.below(2) == 0;
        let by_deadline = random.below(4) == 0;
        let moment = random.micros(if len > MIB && !self.direct { 1500 } else { 150 });
        let new = Stamp::new(6, round.number as u16);
        let mine = if write { new } else { Stamp::new(99, round.number as u16) };
        mine.fill_storage(self.buffer.storage()).unwrap();
        let request = match write {
            true => self.user.write(&self.remote, &self.buffer),
            false => self.user.read(&self.remote, &self.buffer),
        };
        let request = request.at(at as u64, at as u64, len as u64);
        let request =
            if by_deadline { request.within(moment.max(Duration::from_micros(1))) } else { request };
        let started = Instant::now();
        let transfer = request.start().unwrap();
        if !by_deadline {
            // A sleep takes longer than that.
            while started.elapsed() < moment {
                std::hint::spin_loop();
            }
            transfer.cancel();
        }
        let ended = transfer.wait_for(STALL * 10).expect("a cancelled transfer does not end");
        let took = started.elapsed().saturating_sub(moment);
        // Where the owner took too long to answer and is seen to be at it, the transfer says so.
        if !transfer.quiet() {
            assert!(transfer.wait_quiet(STALL * 10), "a cancelled transfer never becomes quiet");
            round.tally.count("owners inside", 1);
        }
        let at_the_end = write.then(|| self.target.look());
        match &ended {
            Ok(()) => round.tally.count("too late", 1),
            Err(error) => {
                assert!(matches!(error.kind(), Kind::Canceled | Kind::Timeout), "{error}");
                round.tally.time("ended after", took);
            }
        }
        match at_the_end {
            None if ended.is_ok() => {
                let mut bytes = vec![0; len];
                self.buffer.read_at(at, &mut bytes).unwrap();
                OLD.verify(at as u64, &bytes).unwrap();
            }
            None => mine.fill_storage(self.buffer.storage()).unwrap(),
            Some(_) => {}
        }
        // What was asked for before this has been dealt with when it is answered.
        outcome(self.user.read(&self.remote, &self.small).at(0, 0, 4096).start()).unwrap();
        if round.random.below(4) == 0 {
            thread::sleep(round.random.micros(2000));
        }
        match at_the_end {
            None if ended.is_ok() => {}
            None => mine
                .verify_storage(self.buffer.storage(), 0, LEN)
                .unwrap_or_else(|wrong| panic!("a cancelled read lands late: {wrong}")),
            Some(before) => {
                let after = self.target.look();
                unchanged(&format!("a write of {len} bytes that was cancelled"), &before, &after);
                let inside = &after[at..at + len];
                match ended {
                    Ok(()) => new.verify(at as u64, inside).unwrap(),
                    Err(_) => old_or_new("a cancelled write", inside, at, OLD, new, at),
                }
                OLD.verify(0, &after[..at]).unwrap_or_else(|wrong| panic!("before a write: {wrong}"));
                OLD.verify((at + len) as u64, &after[at + len..])
                    .unwrap_or_else(|wrong| panic!("behind a write: {wrong}"));
                self.target.fill();
            }
        }
    }
}
