//! `SIGSTOP` at random moments of a transfer, and of an operation.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use towline::connect::{Connector, Descriptor, OperationStatus};
use towline::{Access, Endpoint, Kind, PathProperties, Registered, SystemStorage};
use towline_testkit::bench::routing;
use towline_testkit::changes::Changes;
use towline_testkit::oracle::Stamp;
use towline_testkit::paths::{is_by_an_engine, is_direct, is_served, is_served_here, known};
use towline_testkit::process::Process;
use towline_testkit::scene::{
    GONE, KIB, MIB, Observer, Owner, STALL, endpoint, kind_for, local, old_or_new, owner_on, paths,
    served_again, unchanged,
};
use towline_testkit::watchdog::eventually;
use towline_testkit::worker::storage;

use super::{Course, Drill, Round, Staff};

const LEN: usize = 16 * MIB;

/// How long a deregistration waits for a peer that stands still.
const WAIT: Duration = Duration::from_millis(120);

/// What the owner's memory holds before each write.
const OLD: Stamp = Stamp { region: 3, generation: 7 };

/// Owners and users that are stopped in mid-transfer.
pub(super) struct Stop {
    lane: &'static str,
    staff: Staff,
    user: Endpoint,
    victim: Owner,
    observer: Observer,
    buffer: Registered<SystemStorage>,
    small: Registered<SystemStorage>,
    owner: Endpoint,
    reader: Process,
    /// Over streams, where an owner applies what it is asked for.
    changes: Option<Changes>,
}

impl Stop {
    pub(super) fn new(course: &Course) -> Result<Stop, String> {
        let user = endpoint("user");
        let mut victim = course.staff.open_owner(course.lane, LEN);
        victim.fill(OLD);
        let observer = Observer::of(&victim, course.lane);
        let mut reader = course.staff.open("reader", "");
        reader.must(&format!("register {LEN} system none"));
        let (buffer, small) = (local(&user, LEN), local(&user, 4 * KIB));
        let changes = is_served(&known(course.lane)).then(|| Changes::open(course.lane));
        Ok(Stop {
            lane: course.lane,
            staff: course.staff,
            user,
            victim,
            observer,
            buffer,
            small,
            owner: owner_on(course.lane),
            reader,
            changes,
        })
    }

    fn direct(&self) -> bool {
        is_direct(&known(self.lane))
    }

    fn reading(&mut self, round: &mut Round) {
        let lane = self.lane;
        let remote = self.victim.import(&self.user, lane);
        let transfer = self.user.read(&remote, &self.buffer).start().unwrap();
        thread::sleep(round.random.micros(3000));
        self.victim.process.stop();
        let stopped = Instant::now();
        let second = self.user.read(&remote, &self.small).at(0, 0, 4096).start();
        let reads = [(Ok(transfer), &self.buffer, LEN), (second, &self.small, 4096)];
        for (transfer, buffer, len) in &reads {
            let ended = transfer.as_ref().map_err(Clone::clone);
            match ended.and_then(|transfer| transfer.wait_for(STALL * 10).expect("a read does not end")) {
                Ok(()) => OLD.verify_storage(buffer.storage(), 0, *len).unwrap(),
                Err(error) => {
                    assert!(GONE.contains(&error.kind()), "{error}");
                    assert!(!self.direct(), "{lane} needs no help of the owner: {error}");
                    round.tally.time("read ended", stopped.elapsed());
                }
            }
        }
        // What the owner sends once it goes on must not land in a buffer that is the caller's again. It is not yet where that
        // cannot be kept from it.
        let unquiet: Vec<_> =
            reads.iter().filter_map(|read| read.0.as_ref().ok()).filter(|read| !read.quiet()).collect();
        assert!(unquiet.is_empty() || is_by_an_engine(&known(lane)), "{lane} can be kept from a buffer");
        let mine = Stamp::new(99, round.generation());
        if unquiet.is_empty() {
            mine.fill_storage(self.buffer.storage()).unwrap();
        }
        self.victim.process.resume();
        if !unquiet.is_empty() {
            assert!(unquiet.iter().all(|read| read.wait_quiet(STALL * 10)), "a read never becomes quiet");
            mine.fill_storage(self.buffer.storage()).unwrap();
            round.tally.count("buffers not given back at once", 1);
        }
        served_again(&self.user, &self.victim.ticket, lane, "after a read");
        mine.verify_storage(self.buffer.storage(), 0, LEN)
            .unwrap_or_else(|wrong| panic!("read late: {wrong}"));
    }

    fn writing(&mut self, round: &mut Round) {
        let lane = self.lane;
        // Over the control connection, over lanes, and between the two.
        let len = round.random.pick(&[4 * KIB, 64 * KIB, 300 * KIB, 2 * MIB, LEN]);
        let new = Stamp::new(4, round.generation());
        new.fill_storage(self.buffer.storage()).unwrap();
        let remote = self.victim.import(&self.user, lane);
        let many = if len < MIB { 12 } else { 1 };
        let start = || self.user.write(&remote, &self.buffer).at(0, 0, len as u64).start().unwrap();
        let mut transfers = vec![start()];
        let until = Instant::now() + round.random.micros(3000);
        while transfers.len() < many || Instant::now() < until {
            if transfers.len() < many {
                transfers.push(start());
            } else if let Some(slot) = transfers.iter_mut().find(|transfer| transfer.is_done()) {
                *slot = start();
            }
        }
        self.victim.process.stop();
        let stopped = Instant::now();
        let mut failed = false;
        for transfer in &transfers {
            if let Err(error) = transfer.wait_for(STALL * 10).expect("a write does not end") {
                assert!(GONE.contains(&error.kind()), "{error}");
                assert!(!self.direct(), "{lane} needs no help of the owner: {error}");
                failed = true;
            }
        }
        if failed {
            round.tally.time("write ended", stopped.elapsed());
        }
        // An owner that is stopped in the middle of a portion finishes it when it goes on: where that can be, the write says so.
        let inside = transfers.iter().filter(|transfer| !transfer.quiet()).count();
        assert!(inside == 0 || may_stay_inside(&known(lane)), "{lane} keeps nobody inside");
        let mut at_the_end = self.observer.look();
        self.victim.process.resume();
        if inside > 0 {
            let quiet = transfers.iter().all(|transfer| transfer.wait_quiet(STALL * 10));
            assert!(quiet, "the owner goes on, and a write to it never becomes quiet");
            at_the_end = self.observer.look();
            round.tally.count("owners inside", 1);
        }
        served_again(&self.user, &self.victim.ticket, lane, "after a write");
        thread::sleep(Duration::from_millis(5));
        let later = self.observer.look();
        unchanged(&format!("a write of {len} bytes whose owner was stopped"), &at_the_end, &later);
        old_or_new("a write", &later[..len], 0, OLD, new, 0);
        OLD.verify(len as u64, &later[len..]).unwrap_or_else(|wrong| panic!("outside a write: {wrong}"));
        self.victim.fill(OLD);
    }

    fn user_stands_still(&mut self, round: &mut Round) {
        let lane = self.lane;
        let memory = storage(LEN, kind_for(lane)).unwrap();
        let watched = Arc::downgrade(&memory);
        let region = self.owner.register(memory, Access::READ_WRITE).unwrap();
        let ticket = region.ticket().unwrap();
        let remote = self.reader.must(&format!("import {ticket} {}", paths(lane))).number(0);
        let op = round.random.pick(&["read", "write"]);
        if self.staff == Staff::Rust {
            self.reader.must("fill 1 98 98");
        }
        self.reader.must(&format!("loop {op} {remote} 1 {LEN}"));
        thread::sleep(round.random.micros(6000));
        self.reader.stop();
        match region.into_storage_within(WAIT) {
            Ok(memory) => {
                let mine = Stamp::new(97, round.generation());
                mine.fill_storage(&memory).unwrap();
                self.reader.resume();
                thread::sleep(round.random.micros(3000));
                mine.verify_storage(&memory, 0, LEN).unwrap_or_else(|wrong| panic!("written late: {wrong}"));
                round.tally.count("users outside", 1);
            }
            Err(pinned) => {
                assert!(self.direct() || is_by_an_engine(&known(lane)), "{}", pinned.error);
                assert_eq!(pinned.error.kind(), Kind::Timeout, "{}", pinned.error);
                drop(pinned.registration);
                assert!(watched.strong_count() > 0, "freed under a stopped peer");
                self.reader.resume();
                let freed = eventually(STALL * 10, || watched.strong_count() == 0);
                assert!(freed, "memory that nobody uses any more stays parked");
                round.tally.count("users inside", 1);
            }
        }
        let last = self.reader.must("halt");
        assert!(last.number(1) == 0 || ["Stale", "Disconnected"].contains(&last.text(2)), "{}", last.text(2));
        self.reader.must(&format!("forget {remote}"));
    }
}

/// Whether a thread may be in the middle of a write when its owner is stopped: the owner's, or the engine's.
fn may_stay_inside(path: &PathProperties) -> bool {
    is_served_here(path) || is_by_an_engine(path)
}

impl Drill for Stop {
    fn round(&mut self, round: &mut Round) {
        match (round.random.below(7), &mut self.changes) {
            (0, _) => self.reading(round),
            (1, _) => self.user_stands_still(round),
            (2 | 3, Some(changes)) => {
                let seen = changes.round(&mut round.random);
                round.tally.count("changes that failed", seen.failed.into());
                round.tally.count("owners inside a change", seen.inside.into());
            }
            _ => self.writing(round),
        }
    }
}

/// Claimers of operations that are killed and stopped.
pub(super) struct Claim {
    lane: &'static str,
    connector: Connector,
}

impl Claim {
    pub(super) fn new(course: &Course) -> Result<Claim, String> {
        let limits = towline::Limits { no_progress: STALL, ..towline::Limits::default() };
        let endpoint =
            Endpoint::options("owner").limits(limits).routing(routing(course.lane)).open().unwrap();
        Ok(Claim { lane: course.lane, connector: Connector::with_endpoint(endpoint) })
    }
}

impl Drill for Claim {
    fn round(&mut self, round: &mut Round) {
        const LEN: usize = 32 * MIB;
        let lane = self.lane;
        let options = format!("require={} stall=60000 total=60000", paths(lane));
        let mut claimer = Process::open("claimer", &options);
        let memory = storage(LEN, kind_for(lane)).unwrap();
        let writable = self.connector.create_writable(Descriptor::new(Arc::clone(&memory))).unwrap();
        let metadata = writable.metadata().unwrap().to_json().unwrap();
        claimer.ask_with(&format!("claim write {LEN}"), metadata.as_bytes()).unwrap();
        thread::sleep(round.random.micros(8000));
        let dies = round.random.below(2) == 0;
        let begun = Instant::now();
        if dies {
            claimer.kill_without_waiting()
        } else {
            claimer.stop()
        }
        assert!(
            eventually(STALL * 10, || writable.status().is_final()),
            "the passive side waits: {writable:?}"
        );
        let Some(error) = writable.error() else {
            round.tally.count("finished before", 1);
            return;
        };
        round.tally.time(if dies { "learnt of a death" } else { "learnt of a standstill" }, begun.elapsed());
        assert_eq!(writable.status(), OperationStatus::Errored, "{error}");
        assert!(matches!(error.kind(), Kind::Timeout | Kind::Disconnected), "{error}");
        let quiet = writable.quiet();
        assert!(quiet || is_direct(&known(lane)), "{lane} keeps nobody inside: {error}");
        let mine = Stamp::new(95, round.generation());
        if quiet {
            mine.fill_storage(&memory).unwrap();
        }
        if !dies {
            claimer.resume();
        }
        assert!(eventually(STALL * 10, || writable.quiet()), "it never becomes quiet");
        if !quiet {
            mine.fill_storage(&memory).unwrap();
        }
        thread::sleep(round.random.micros(3000));
        mine.verify_storage(&memory, 0, LEN).unwrap_or_else(|wrong| panic!("written late: {wrong}"));
        // The next one is served as if nothing had been.
        let small = Descriptor::new(storage(4096, kind_for(lane)).unwrap());
        let readable = self.connector.create_readable(small).unwrap();
        let metadata = readable.metadata().unwrap().to_json().unwrap();
        let mut next = Process::open("next", &format!("require={}", paths(lane)));
        next.ask_with("claim read 4096", metadata.as_bytes()).unwrap();
        outcome_of(readable.wait(Some(STALL * 10)));
    }
}

fn outcome_of<T, E: std::fmt::Display>(outcome: Result<T, E>) {
    if let Err(error) = outcome {
        panic!("the next claimer is not served: {error}");
    }
}
