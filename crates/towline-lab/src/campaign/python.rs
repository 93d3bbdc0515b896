//! The lane of Python: its processes are killed and stopped as others are, and what they begin is hit in the same ways.

use std::collections::HashMap;
use std::thread;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use towline::{Endpoint, Kind};
use towline_testkit::oracle::Stamp;
use towline_testkit::paths::{is_by_an_engine, is_direct, is_here, is_served_here, known, names};
use towline_testkit::process::Process;
use towline_testkit::scene::{
    GONE, KIB, MIB, Observer, Owner, STALL, endpoint, old_or_new, paths, served_again, unchanged,
};

use super::staff::{PYTHON, Staff};
use super::{Course, Drill, Prepare, Round, Tally, missing};

const LEN: usize = 8 * MIB;
const OLD: Stamp = Stamp { region: 11, generation: 1 };

/// Makes the drill of a lane: that of the path, or in the lane of Python those of all paths in turns, and beside them what an
/// initiator in Python is put through.
pub(super) fn with_python(
    course: &Course,
    prepare: Prepare,
    initiator: fn(&mut Initiator, &mut Round),
) -> Result<Box<dyn Drill>, String> {
    if course.lane != PYTHON {
        return prepare(course);
    }
    let paths = working_paths()?;
    Ok(Box::new(Mixed {
        initiator: Initiator::new(paths.clone()),
        quick: course.quick,
        act: initiator,
        drills: HashMap::new(),
        prepare,
        paths,
    }))
}

/// The lane of Python alone.
pub(super) fn initiator_only(
    course: &Course,
    prepare: Prepare,
    act: fn(&mut Initiator, &mut Round),
) -> Result<Box<dyn Drill>, String> {
    if course.lane != PYTHON {
        return prepare(course);
    }
    Ok(Box::new(Only { initiator: Initiator::new(working_paths()?), act }))
}

fn working_paths() -> Result<Vec<&'static str>, String> {
    if let Some(reason) = Staff::Python.missing() {
        return Err(reason);
    }
    // The package moves host memory; NIXL has its own.
    let embedded = names(|path| !is_here(path) && !is_by_an_engine(path) && path.serves.has_words());
    Ok(embedded.into_iter().filter(|path| missing(path).is_none()).collect())
}

struct Mixed {
    initiator: Initiator,
    quick: bool,
    act: fn(&mut Initiator, &mut Round),
    drills: HashMap<&'static str, Box<dyn Drill>>,
    prepare: Prepare,
    paths: Vec<&'static str>,
}

impl Drill for Mixed {
    fn round(&mut self, round: &mut Round) {
        if round.random.below(3) == 0 {
            return (self.act)(&mut self.initiator, round);
        }
        let lane = round.random.pick(&self.paths);
        let course = Course { lane, quick: self.quick, staff: Staff::Python };
        let drill = self.drills.entry(lane).or_insert_with(|| (self.prepare)(&course).unwrap());
        drill.round(round);
    }

    fn finish(&mut self, tally: &mut Tally) {
        self.drills.values_mut().for_each(|drill| drill.finish(tally));
    }
}

struct Only {
    initiator: Initiator,
    act: fn(&mut Initiator, &mut Round),
}

impl Drill for Only {
    fn round(&mut self, round: &mut Round) {
        (self.act)(&mut self.initiator, round);
    }
}

/// A Python process that reads and writes memory of workers in Rust. Its own is region 1.
pub(super) struct Initiator {
    python: Process,
    paths: Vec<&'static str>,
    observer: Endpoint,
    /// Owners that nothing happens to, what sees their memory, and what they are called in the Python process.
    owners: HashMap<&'static str, (Owner, Observer, u64)>,
}

/// Nanoseconds of the clock that Python calls monotonic.
pub(super) fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn bytes_of(stamp: Stamp) -> Vec<u8> {
    let mut bytes = vec![0; LEN];
    stamp.fill(0, &mut bytes);
    bytes
}

impl Initiator {
    fn new(paths: Vec<&'static str>) -> Initiator {
        let mut python = Staff::Python.open("initiator", &format!("stall={}", STALL.as_millis()));
        python.must(&format!("register {LEN} system none"));
        Initiator { python, paths, observer: endpoint("looker"), owners: HashMap::new() }
    }

    fn put(&mut self, stamp: Stamp) {
        self.python.ask_with("put 1 0", &bytes_of(stamp)).unwrap();
    }

    fn verify(&mut self, what: &str, stamp: Stamp, at: usize, len: usize) {
        let bytes = self.python.must(&format!("take 1 {at} {len}")).payload;
        stamp.verify(at as u64, &bytes).unwrap_or_else(|wrong| panic!("{what}: {wrong}"));
    }

    fn import(&mut self, owner: &Owner, path: &'static str) -> u64 {
        let reply = self.python.must(&format!("import {} {}", owner.ticket, paths(path)));
        assert_eq!(reply.text(1), path);
        reply.number(0)
    }

    /// Waits for what was begun: the kind of its error, when it ended, and whether it was quiet then.
    fn ended(&mut self) -> (Option<Kind>, u64, bool) {
        self.python.tell("ended");
        let reply = self.python.answer(STALL * 10).unwrap();
        let kind = Kind::ALL.into_iter().find(|(_, name)| *name == reply.text(0)).map(|(kind, _)| kind);
        assert!(kind.is_some() || reply.text(0) == "none", "{}", reply.text(0));
        (kind, reply.number(1), reply.text(2) == "True")
    }

    /// The owner is killed: the await in Python ends with an error in time, and its memory is quiet.
    pub(super) fn owner_dies(&mut self, round: &mut Round) {
        let path = round.random.pick(&self.paths.clone());
        let stamp = Stamp::new(12, round.generation());
        let mine = Stamp::new(13, round.generation());
        let mut owner = Owner::open(path, LEN);
        owner.fill(stamp);
        self.put(mine);
        let remote = self.import(&owner, path);
        let op = round.random.pick(&["read", "read", "write"]);
        self.python.must(&format!("begin {op} {remote} 1 0 {LEN}"));
        thread::sleep(round.random.micros(3000));
        let killed = now();
        owner.process.kill_without_waiting();
        match self.ended() {
            (None, ..) if op == "read" => self.verify("a read of one that dies", stamp, 0, LEN),
            (None, ..) => {}
            (Some(kind), at, _) => {
                assert!(GONE.contains(&kind), "{kind:?}");
                round.tally.time("detected by an await", Duration::from_nanos(at.saturating_sub(killed)));
            }
        }
        let later = Stamp::new(14, round.generation());
        self.put(later);
        owner.process.kill();
        thread::sleep(round.random.micros(2000));
        self.verify("late, after a kill", later, 0, LEN);
        self.python.must(&format!("forget {remote}"));
        round.tally.count("owners killed", 1);
    }

    /// The owner is stopped: the await ends at the limit, and nothing comes when the owner goes on.
    pub(super) fn owner_stops(&mut self, round: &mut Round) {
        let path = round.random.pick(&self.paths.clone());
        let direct = is_direct(&known(path));
        let mine = Stamp::new(13, round.generation());
        let mut owner = Owner::open(path, LEN);
        owner.fill(OLD);
        let sight = Observer::of(&owner, path);
        self.put(mine);
        let remote = self.import(&owner, path);
        let write = round.random.below(2) == 0;
        let op = if write { "write" } else { "read" };
        self.python.must(&format!("begin {op} {remote} 1 0 {LEN}"));
        thread::sleep(round.random.micros(1500));
        owner.process.stop();
        let stopped = now();
        let (kind, at, quiet) = self.ended();
        assert!(quiet || is_served_here(&known(path)), "{path} keeps nobody inside");
        if let Some(kind) = kind {
            assert!(GONE.contains(&kind), "{kind:?}");
            assert!(!direct, "{path} needs no help of the owner: {kind:?}");
            round.tally.time("await ended", Duration::from_nanos(at.saturating_sub(stopped)));
        }
        let mut at_the_end = sight.look();
        if kind.is_none() && !write {
            self.verify("a read of one that is stopped", OLD, 0, LEN);
        }
        let later = Stamp::new(14, round.generation());
        self.put(later);
        owner.process.resume();
        if !quiet {
            self.python.tell("quiet");
            self.python.answer(STALL * 10).unwrap();
            at_the_end = sight.look();
            round.tally.count("owners inside", 1);
        }
        served_again(&self.observer, &owner.ticket, path, "after a stop");
        thread::sleep(Duration::from_millis(3));
        unchanged("the memory of an owner that was stopped", &at_the_end, &sight.look());
        let new = if write { mine } else { OLD };
        old_or_new("a write from Python", &at_the_end, 0, OLD, new, 0);
        self.verify("late, after a stop", later, 0, LEN);
        self.python.must(&format!("forget {remote}"));
    }

    /// The transfer, the task that awaits it or its deadline ends it at any moment: when the await is over, all is quiet.
    pub(super) fn cancels(&mut self, round: &mut Round) {
        let path = round.random.pick(&self.paths.clone());
        if !self.owners.contains_key(path) {
            let mut owner = Owner::open(path, LEN);
            owner.fill(OLD);
            let (sight, remote) = (Observer::of(&owner, path), self.import(&owner, path));
            self.owners.insert(path, (owner, sight, remote));
        }
        let remote = self.owners[path].2;
        let random = &mut round.random;
        let len = random.pick(&[64 * KIB, 300 * KIB, 2 * MIB, LEN]);
        let at = 8 * random.below(((LEN - len) / 8 + 1) as u64) as usize;
        let how = random.pick(&["task", "transfer", "deadline"]);
        let micros = random.below(if len > MIB { 1500 } else { 200 });
        let write = random.below(2) == 0;
        let mine = Stamp::new(13, round.generation());
        let (op, payload) = match write {
            true => {
                self.put(mine);
                ("write", Vec::new())
            }
            // Put there by the Python process in the same step of its loop in which the await ends.
            false => ("read", bytes_of(mine)),
        };
        let order = format!("cancel {how} {op} {remote} 1 {at} {len} {micros}");
        self.python.tell_with(&order, &payload);
        let reply = self.python.answer(STALL * 10).unwrap_or_else(|failure| panic!("{order}: {failure}"));
        let good = reply.text(0) == "none";
        let before = write.then(|| self.owners[path].1.look());
        match reply.text(0) {
            "none" => round.tally.count("too late", 1),
            "Canceled" | "Timeout" => {
                round.tally.time("ended after", Duration::from_nanos(reply.number(1)));
            }
            other => panic!("{order}: {other}"),
        }
        if round.random.below(2) == 0 {
            thread::sleep(round.random.micros(2000));
        }
        let Some(before) = before else {
            return match good {
                true => self.verify("a read that was too fast to be cancelled", OLD, at, len),
                false => self.verify("a cancelled read lands late", mine, 0, LEN),
            };
        };
        let Some((owner, sight, _)) = self.owners.get_mut(path) else { return };
        let after = sight.look();
        unchanged(&format!("a write of {len} bytes that was cancelled"), &before, &after);
        let inside = &after[at..at + len];
        match good {
            true => mine.verify(at as u64, inside).unwrap(),
            false => old_or_new("a cancelled write", inside, at, OLD, mine, at),
        }
        OLD.verify(0, &after[..at]).unwrap_or_else(|wrong| panic!("before a write: {wrong}"));
        OLD.verify((at + len) as u64, &after[at + len..])
            .unwrap_or_else(|wrong| panic!("behind a write: {wrong}"));
        owner.fill(OLD);
    }
}
