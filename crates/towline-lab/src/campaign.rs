//! The long campaigns: real processes and sockets, treated badly at random moments for as long as one likes.
//!
//! A campaign is run over lanes (paths), a lane in rounds. All that a round chooses comes from the seed, the campaign, the
//! lane and the round's number, and from nothing that happened before: a round that failed can be run again alone. Every
//! destination word is compared with what the [oracle](towline_testkit::oracle) says.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a round fails by panicking")]

mod cancel;
mod deregister;
mod forge;
mod kill;
mod life;
mod load;
mod neighbour;
mod nixl;
mod partition;
mod python;
mod ranks;
mod recycle;
mod selfcheck;
mod staff;
mod stop;
mod unauthenticated;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use towline::{Contact, PathProperties, Serves};
use towline_testkit::paths::{is_by_an_engine, is_complete, is_here, is_served, names};
use towline_testkit::random::{Random, mix};
use towline_testkit::scene;
use towline_testkit::watchdog;

pub(crate) use self::ranks::further;
pub(crate) use self::staff::use_python;
use self::staff::{PYTHON, Staff, start_python};

/// A lane ends after this many failed rounds: more of the same tell nothing new.
const MOST_FAILURES: usize = 3;

/// A round that has not ended after this long never will.
const ROUND: Duration = Duration::from_secs(90);

/// Samples beyond this many are thinned out: half of them are dropped, evenly.
const MOST_SAMPLES: usize = 1 << 14;

/// The lanes of a campaign.
#[derive(Clone, Copy)]
pub(crate) enum Lanes {
    /// The paths to memory of which this holds.
    Paths(fn(&PathProperties) -> bool),
    /// Those, and workers in Python over any of them.
    PathsAndPython(fn(&PathProperties) -> bool),
    /// These, since the campaign is about them.
    Only(&'static [&'static str]),
}

impl Lanes {
    fn names(self) -> Vec<&'static str> {
        // What happens to files under a stream is part of other campaigns.
        let to_memory =
            |which: fn(&PathProperties) -> bool| names(|path| path.serves != Serves::Files && which(path));
        match self {
            Lanes::Paths(which) => to_memory(which),
            Lanes::PathsAndPython(which) => to_memory(which).into_iter().chain([PYTHON]).collect(),
            Lanes::Only(lanes) => lanes.to_vec(),
        }
    }
}

/// All lanes, in the order in which they are shown.
pub(crate) fn lanes() -> Vec<&'static str> {
    Lanes::PathsAndPython(any).names()
}

fn any(_: &PathProperties) -> bool {
    true
}

fn between_processes(path: &PathProperties) -> bool {
    !is_here(path)
}

/// One kind of ill treatment.
pub(crate) struct Campaign {
    /// Its name.
    pub(crate) name: &'static str,
    /// What is done and what must hold, in one line.
    pub(crate) summary: &'static str,
    /// The lanes that it runs over.
    pub(crate) lanes: Lanes,
    /// Whether they run one after the other: times of a few milliseconds mean nothing beside lanes that want the same processors.
    pub(crate) in_turns: bool,
    /// How many rounds a lane has.
    pub(crate) rounds: Rounds,
    /// Makes what a lane needs; an error is why it cannot run here.
    pub(crate) prepare: Prepare,
}

/// Makes what a lane needs; an error is why it cannot run here.
pub(crate) type Prepare = fn(&Course) -> Result<Box<dyn Drill>, String>;

/// How many rounds a lane of a campaign has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rounds {
    /// In the short form, if there is time; and what share of the time it gets where that is limited.
    pub(crate) quick: (u32, u32),
    /// In the long form.
    pub(crate) long: u32,
}

/// So many rounds in the short form, which get that share of the time, and so many in the long form.
pub(crate) const fn rounds(quick: u32, share: u32, long: u32) -> Rounds {
    Rounds { quick: (quick, share), long }
}

/// All campaigns, in the order in which they run.
pub(crate) static CAMPAIGNS: [Campaign; 16] = [
    Campaign {
        name: "kill",
        summary: "an owner or a user is killed in mid-transfer: an error in time, then quiet; others are served",
        lanes: Lanes::PathsAndPython(between_processes),
        in_turns: true,
        rounds: rounds(60, 22, 1000),
        prepare: |course| {
            let owners_and_users: Prepare = |course| Ok(Box::new(kill::Kill::new(course)?));
            python::with_python(course, owners_and_users, python::Initiator::owner_dies)
        },
    },
    Campaign {
        name: "leftover",
        summary: "workers are killed at any moment of their lives: no socket, no file, no process is left",
        lanes: Lanes::Only(&["unix"]),
        in_turns: false,
        rounds: rounds(80, 8, 1000),
        prepare: |course| Ok(Box::new(kill::Leftover::new(course)?)),
    },
    Campaign {
        name: "stop",
        summary: "an owner or a user is stopped in mid-transfer: an error at the limit, and nothing late when it goes on",
        lanes: Lanes::PathsAndPython(between_processes),
        in_turns: false,
        rounds: rounds(24, 28, 200),
        prepare: |course| {
            let owners_and_users: Prepare = |course| Ok(Box::new(stop::Stop::new(course)?));
            python::with_python(course, owners_and_users, python::Initiator::owner_stops)
        },
    },
    Campaign {
        name: "partition",
        summary: "the cable between two hosts is pulled: an error at the limit, and nothing late when it is back",
        // What reaches another host.
        lanes: Lanes::Paths(|path| matches!(path.contact, Contact::Tcp | Contact::Any)),
        in_turns: false,
        rounds: rounds(6, 24, 200),
        prepare: |course| Ok(Box::new(partition::Partition::new(course)?)),
    },
    Campaign {
        name: "cancel",
        summary: "transfers are cancelled at any moment: the end comes soon, and not one byte lands after it",
        lanes: Lanes::PathsAndPython(any),
        in_turns: false,
        rounds: rounds(300, 16, 10_000),
        prepare: |course| {
            let by_rust: Prepare = |course| Ok(Box::new(cancel::Cancel::new(course)?));
            python::initiator_only(course, by_rust, python::Initiator::cancels)
        },
    },
    Campaign {
        name: "deregister",
        summary: "memory is taken back under readers and writers: afterwards it is its owner's alone",
        lanes: Lanes::Paths(between_processes),
        in_turns: false,
        rounds: rounds(400, 16, 10_000),
        prepare: |course| Ok(Box::new(deregister::Deregister::new(course)?)),
    },
    Campaign {
        name: "recycle",
        summary: "memory is used for something else: old tickets give Stale, never the new bytes",
        lanes: Lanes::Paths(any),
        in_turns: false,
        rounds: rounds(400, 16, 10_000),
        prepare: |course| Ok(Box::new(recycle::Recycle::new(course)?)),
    },
    Campaign {
        name: "fork",
        summary: "a worker with connections forks: the child can do nothing, the parent notices nothing",
        lanes: Lanes::Paths(is_complete),
        in_turns: false,
        rounds: rounds(20, 6, 200),
        prepare: |course| Ok(Box::new(life::Fork::new(course)?)),
    },
    Campaign {
        name: "exit",
        summary: "a worker ends with work pending (exit, return, exec, signals): the code is right, its owner goes on",
        lanes: Lanes::Paths(between_processes),
        in_turns: false,
        rounds: rounds(20, 8, 500),
        prepare: |course| Ok(Box::new(life::Exit::new(course)?)),
    },
    Campaign {
        name: "load",
        summary: "checked operations, one after the other and many at once: memory, descriptors and threads stay flat",
        lanes: Lanes::Paths(any),
        in_turns: false,
        rounds: rounds(100, 20, 10_000),
        prepare: |course| Ok(Box::new(load::Load::new(course)?)),
    },
    Campaign {
        name: "forge",
        summary: "a peer with one narrow ticket asks for all that it has no right to: refused, counted, unharmed",
        lanes: Lanes::Paths(is_served),
        in_turns: false,
        rounds: rounds(60, 8, 2500),
        prepare: |course| Ok(Box::new(forge::Forge::new(course)?)),
    },
    Campaign {
        name: "unauthenticated",
        summary: "connections that never prove anything: no descriptor stays, and a new client is served at once",
        lanes: Lanes::Paths(is_served),
        in_turns: false,
        rounds: rounds(20, 10, 200),
        prepare: |course| Ok(Box::new(unauthenticated::Unauthenticated::new(course)?)),
    },
    Campaign {
        name: "neighbour",
        summary: "a reader beside one that was stopped in mid-transfer keeps its throughput",
        lanes: Lanes::Paths(between_processes),
        in_turns: false,
        rounds: rounds(4, 12, 20),
        prepare: |course| Ok(Box::new(neighbour::Neighbour::new(course)?)),
    },
    Campaign {
        name: "claim",
        summary: "the claimer of an operation is killed or stopped: the passive side ends with the cause, and is quiet",
        // An operation lets its peer read or write, and an engine whose keys cannot be narrowed lends only for both.
        lanes: Lanes::Paths(|path| between_processes(path) && !is_by_an_engine(path)),
        in_turns: false,
        rounds: rounds(8, 14, 200),
        prepare: |course| Ok(Box::new(stop::Claim::new(course)?)),
    },
    Campaign {
        name: "beside",
        summary: "NIXL, where it is installed, when its peer is killed or stopped or it cancels: what it does is reported, not judged",
        lanes: Lanes::Only(&["nixl"]),
        in_turns: false,
        rounds: rounds(3, 10, 60),
        prepare: |course| Ok(Box::new(nixl::Beside::new(course)?)),
    },
    ranks::CAMPAIGN,
];

/// A campaign that fails in some rounds: it is run only where it is named.
pub(crate) static SELF_CHECK: Campaign = Campaign {
    name: "self-check",
    summary: "a bit is flipped in some rounds: the campaign must fail, in the same rounds each time",
    lanes: Lanes::Only(&["inproc"]),
    in_turns: false,
    rounds: rounds(10, 1, 10),
    prepare: |course| Ok(Box::new(selfcheck::SelfCheck::new(course)?)),
};

/// What a lane of a campaign is given before its first round.
pub(crate) struct Course {
    /// The path.
    pub(crate) lane: &'static str,
    /// Whether little time is given.
    pub(crate) quick: bool,
    /// Who the workers are.
    pub(crate) staff: Staff,
}

/// What a campaign does in one lane.
pub(crate) trait Drill {
    /// One round; it panics where something is wrong.
    fn round(&mut self, round: &mut Round);

    /// What is looked at after the last round.
    fn finish(&mut self, _tally: &mut Tally) {}
}

/// One round: its own random numbers, and where its figures go.
pub(crate) struct Round {
    /// Its number.
    pub(crate) number: u32,
    /// Where all its choices come from.
    pub(crate) random: Random,
    /// What it has measured.
    pub(crate) tally: Tally,
}

impl Round {
    /// A number that is different in neighbouring rounds, for stamps.
    pub(crate) fn generation(&self) -> u16 {
        self.number as u16
    }
}

/// Figures: samples of times and rates, and counts.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tally {
    /// Seconds, or what the name says.
    pub(crate) samples: BTreeMap<&'static str, Vec<f64>>,
    /// How often something happened.
    pub(crate) counts: BTreeMap<&'static str, u64>,
}

impl Tally {
    /// Notes a time.
    pub(crate) fn time(&mut self, name: &'static str, time: Duration) {
        self.sample(name, time.as_secs_f64());
    }

    /// Notes a figure.
    pub(crate) fn sample(&mut self, name: &'static str, value: f64) {
        self.samples.entry(name).or_default().push(value);
    }

    /// Notes that something happened.
    pub(crate) fn count(&mut self, name: &'static str, times: u64) {
        *self.counts.entry(name).or_default() += times;
    }

    /// Adds the figures of another one.
    pub(crate) fn add(&mut self, other: Tally) {
        for (name, values) in other.samples {
            let all = self.samples.entry(name).or_default();
            all.extend(values);
            if all.len() > MOST_SAMPLES {
                let mut keep = false;
                all.retain(|_| {
                    keep = !keep;
                    keep
                });
            }
        }
        for (name, times) in other.counts {
            *self.counts.entry(name).or_default() += times;
        }
    }
}

/// A round that failed.
#[derive(Debug, Clone)]
pub(crate) struct Failed {
    /// Which one; the last number is that of what is looked at after the rounds.
    pub(crate) round: u32,
    /// What was wrong.
    pub(crate) message: String,
}

/// What became of one lane.
#[derive(Debug, Clone)]
pub(crate) struct LaneResult {
    /// The path.
    pub(crate) lane: &'static str,
    /// The rounds that it is to have.
    pub(crate) asked: u32,
    /// The rounds that were run.
    pub(crate) rounds: u32,
    /// Those that went well.
    pub(crate) passed: u32,
    /// Those that did not.
    pub(crate) failures: Vec<Failed>,
    /// Why there was nothing to run.
    pub(crate) skipped: Option<String>,
    /// How long it took.
    pub(crate) took: Duration,
    /// What was measured.
    pub(crate) tally: Tally,
}

impl LaneResult {
    /// Whether there is nothing left to run in it.
    pub(crate) fn is_complete(&self) -> bool {
        self.skipped.is_some() || self.failures.len() >= MOST_FAILURES || self.rounds >= self.asked
    }
}

/// Which rounds to run.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// What all choices come from.
    pub(crate) seed: u64,
    /// The first round.
    pub(crate) first: u32,
    /// How many rounds; otherwise as many as the campaign has.
    pub(crate) rounds: Option<u32>,
    /// The short form.
    pub(crate) quick: bool,
    /// How long a share of the time is, where that is limited: a campaign's turn ends when its shares are used up.
    pub(crate) share: Option<Duration>,
    /// Only these lanes.
    pub(crate) lanes: Vec<String>,
}

/// The observer.
pub(crate) trait Watcher: Send + Sync {
    /// A lane has ended a round, well or not.
    fn round(&self, campaign: &'static str, lane: &'static str, done: u32, of: u32);

    /// A round hangs: this process ends when this returns.
    fn hangs(&self, campaign: &'static str, lane: &'static str, failed: &Failed);
}

impl Campaign {
    /// The lanes that it runs over.
    pub(crate) fn lanes(&self) -> Vec<&'static str> {
        self.lanes.names()
    }

    /// Runs it over its lanes, side by side, and goes on where an earlier turn has ended.
    pub(crate) fn run(
        &'static self,
        plan: &Plan,
        watcher: &Arc<dyn Watcher>,
        so_far: &[LaneResult],
    ) -> Vec<LaneResult> {
        let lanes: Vec<&'static str> = self
            .lanes()
            .into_iter()
            .filter(|lane| plan.lanes.is_empty() || plan.lanes.iter().any(|one| one == lane))
            .collect();
        let one = |lane, time: Option<Duration>| {
            let so_far = so_far.iter().find(|one| one.lane == lane).cloned();
            self.lane(lane, plan, watcher, so_far, time)
        };
        // Rounds that were asked for are all run.
        let time = plan.share.filter(|_| plan.rounds.is_none()).map(|share| share * self.rounds.quick.1);
        let until = time.map(|time| Instant::now() + time);
        // A child ends with the thread that started it, so the lanes stay until all have ended.
        thread::scope(|scope| {
            let mut running = Vec::new();
            for (index, lane) in lanes.iter().copied().enumerate() {
                let time = match until {
                    Some(until) if self.in_turns => {
                        let left = until.saturating_duration_since(Instant::now());
                        Some(left / (lanes.len() - index) as u32)
                    }
                    _ => time,
                };
                let thread = thread::Builder::new()
                    .name(format!("{}-{lane}", self.name))
                    .spawn_scoped(scope, move || one(lane, time))
                    .unwrap();
                if self.in_turns {
                    running.push(Err(thread.join()));
                } else {
                    running.push(Ok(thread));
                }
            }
            let ended = |lane: Result<
                thread::ScopedJoinHandle<'_, LaneResult>,
                thread::Result<LaneResult>,
            >| { lane.map_or_else(Result::ok, |thread| thread.join().ok()) };
            running.into_iter().filter_map(ended).collect()
        })
    }

    fn lane(
        &'static self,
        lane: &'static str,
        plan: &Plan,
        watcher: &Arc<dyn Watcher>,
        so_far: Option<LaneResult>,
        time: Option<Duration>,
    ) -> LaneResult {
        let started = Instant::now();
        let count = plan.rounds.unwrap_or(if plan.quick { self.rounds.quick.0 } else { self.rounds.long });
        let mut result = so_far.unwrap_or(LaneResult {
            lane,
            asked: count,
            rounds: 0,
            passed: 0,
            failures: Vec::new(),
            skipped: None,
            took: Duration::ZERO,
            tally: Tally::default(),
        });
        if result.is_complete() {
            return result;
        }
        let rounds_before = result.rounds;
        let course = Course { lane, quick: plan.quick, staff: Staff::Rust };
        let last = plan.first.saturating_add(count);
        let mut drill: Option<Box<dyn Drill>> = None;
        let mut number = plan.first.saturating_add(rounds_before);
        while number < last && result.failures.len() < MOST_FAILURES {
            if time.is_some_and(|time| started.elapsed() > time) && result.rounds > rounds_before {
                break;
            }
            let mut round = Round {
                number,
                random: Random::from_seed(self.seed_of(plan.seed, lane, number)),
                tally: Tally::default(),
            };
            let _watchdog = self.watch(lane, number, watcher);
            let outcome = caught(|| -> Result<(), String> {
                if drill.is_none() {
                    if let Some(reason) = missing(lane) {
                        return Err(reason);
                    }
                    drill = Some((self.prepare)(&course)?);
                }
                if let Some(drill) = &mut drill {
                    drill.round(&mut round);
                }
                Ok(())
            });
            match outcome {
                Ok(Ok(())) => result.passed += 1,
                Ok(Err(reason)) => {
                    result.skipped = Some(reason);
                    break;
                }
                Err(message) => {
                    result.failures.push(Failed { round: number, message });
                    // What it left in an unknown state is not used any more.
                    let _ = caught(|| drill = None);
                }
            }
            result.rounds += 1;
            account_for_imports(&mut round.tally);
            result.tally.add(round.tally);
            number += 1;
            watcher.round(self.name, lane, number - plan.first, count);
        }
        if let Some(mut drill) = drill {
            let _watchdog = self.watch(lane, number, watcher);
            let mut tally = Tally::default();
            let outcome = caught(|| {
                drill.finish(&mut tally);
                drop(drill);
            });
            if let Err(message) = outcome {
                result.failures.push(Failed { round: number, message });
            }
            result.tally.add(tally);
        }
        result.took += started.elapsed();
        result
    }

    fn seed_of(&self, seed: u64, lane: &str, round: u32) -> u64 {
        let name = |text: &str| {
            text.bytes().fold(0u64, |all, byte| mix(all.wrapping_mul(257).wrapping_add(u64::from(byte) + 1)))
        };
        mix(mix(seed) ^ name(self.name)).wrapping_add(mix(name(lane) ^ u64::from(round)))
    }

    fn watch(
        &'static self,
        lane: &'static str,
        round: u32,
        watcher: &Arc<dyn Watcher>,
    ) -> watchdog::Watchdog {
        let watcher = Arc::clone(watcher);
        watchdog::watch_then(format!("{}, lane {lane}, round {round}", self.name), ROUND, move |message| {
            watcher.hangs(self.name, lane, &Failed { round, message });
        })
    }
}

/// Notes what the imports of a round were like.
fn account_for_imports(tally: &mut Tally) {
    let imports = scene::take_imports();
    imports.took.into_iter().for_each(|took| tally.time("import ended", took));
    if imports.again > 0 {
        tally.count("imports asked again", imports.again);
    }
}

/// Why that path cannot be had here.
fn missing(lane: &str) -> Option<String> {
    if lane == PYTHON {
        return Staff::Python.missing();
    }
    let probe = towline::paths().into_iter().find(|info| info.name == lane).map(|info| info.probe);
    match probe {
        Some(towline::Probe::Missing { reason, .. }) => Some(reason),
        Some(towline::Probe::Works(_)) => None,
        None => Some(format!("no path is called {lane}")),
    }
}

thread_local! {
    static PLACE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Where threads that the campaigns did not start have panicked.
static ELSEWHERE: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Lets panics be reported as results of rounds instead of being printed. Call it once, before the first campaign.
pub(crate) fn take_panics() {
    std::panic::set_hook(Box::new(|info| {
        let place =
            info.location().map_or_else(String::new, |place| format!("{}:{}", place.file(), place.line()));
        if thread::current().name().is_some_and(|name| name.starts_with("towline-")) {
            let report = format!("a thread of the library panicked at {place}: {info}");
            ELSEWHERE.lock().push(report);
        }
        PLACE.with(|cell| *cell.borrow_mut() = Some(place));
    }));
}

/// The panics of the library's own threads, which end no round but fail the run.
pub(crate) fn panics_elsewhere() -> Vec<String> {
    std::mem::take(&mut ELSEWHERE.lock())
}

fn caught<T>(body: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(body)).map_err(|payload| {
        let message = payload
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned()))
            .unwrap_or_else(|| "a panic without a message".to_owned());
        match PLACE.with(|cell| cell.borrow_mut().take()) {
            Some(place) => format!("{message} (at {place})"),
            None => message,
        }
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_round_makes_the_same_choices_alone_as_among_others() {
        let campaign = &CAMPAIGNS[0];
        let choices = |round| Random::from_seed(campaign.seed_of(7, "tcp", round)).number();
        let all: Vec<u64> = (0..50).map(choices).collect();
        assert_eq!(choices(31), all[31]);
        let mut different = all.clone();
        different.sort_unstable();
        different.dedup();
        assert_eq!(different.len(), all.len());
        assert_ne!(campaign.seed_of(7, "unix", 3), campaign.seed_of(7, "tcp", 3));
        assert_ne!(campaign.seed_of(8, "tcp", 3), campaign.seed_of(7, "tcp", 3));
    }

    struct Noted;

    static NOTED: Mutex<Vec<u32>> = Mutex::new(Vec::new());

    impl Drill for Noted {
        fn round(&mut self, round: &mut Round) {
            NOTED.lock().push(round.number);
        }
    }

    impl Watcher for Noted {
        fn round(&self, _: &'static str, _: &'static str, _: u32, _: u32) {}

        fn hangs(&self, _: &'static str, _: &'static str, _: &Failed) {}
    }

    #[test]
    fn a_campaign_goes_on_in_its_next_turn_until_it_has_all_its_rounds() {
        static CAMPAIGN: Campaign = Campaign {
            name: "noted",
            summary: "",
            lanes: Lanes::Only(&["inproc"]),
            in_turns: true,
            rounds: rounds(1, 1, 3),
            prepare: |_| Ok(Box::new(Noted)),
        };
        // So little time is enough for one round in each turn.
        let share = Some(Duration::ZERO);
        let plan = Plan { seed: 1, first: 5, rounds: None, quick: false, share, lanes: Vec::new() };
        let watcher: Arc<dyn Watcher> = Arc::new(Noted);
        let mut lanes = Vec::new();
        for turn in 1..=4 {
            lanes = CAMPAIGN.run(&plan, &watcher, &lanes);
            assert_eq!((lanes[0].rounds, lanes[0].passed, lanes[0].asked), (turn.min(3), turn.min(3), 3));
            assert_eq!(lanes[0].is_complete(), turn >= 3);
        }
        assert_eq!(*NOTED.lock(), [5, 6, 7]);
    }

    #[test]
    fn campaigns_have_different_names_and_known_lanes() {
        for (index, campaign) in CAMPAIGNS.iter().enumerate() {
            assert!(CAMPAIGNS[..index].iter().all(|other| other.name != campaign.name));
            let ran = campaign.lanes();
            assert!(!ran.is_empty() && ran.iter().all(|lane| lanes().contains(lane)), "{}", campaign.name);
        }
    }
}
