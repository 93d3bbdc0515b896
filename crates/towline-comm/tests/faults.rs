//! Groups of real processes in which something goes wrong: this test binary runs itself, and one of its tests is what
//! a rank does.
//!
//! `TOWLINE_COMM_FAULTS=200 cargo test -p towline-comm --test faults` tries so many seeds of each kind; a failure
//! names its seed, and `TOWLINE_COMM_FAULT_SEED=n` runs only that one.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "faults/leaks.rs"]
mod leaks;
#[path = "faults/program.rs"]
mod program;
#[path = "faults/rank.rs"]
mod rank;

use std::env;
use std::ops::Range;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use towline_comm::get_unique_id;
use towline_testkit::random::Random;
use towline_testkit::watchdog;

use self::rank::Rank;

/// Longer than anything that is not meant to time out takes on a busy machine.
const LONG: Duration = Duration::from_secs(20);
/// What a rank that waits for a stopped one must wait for.
const SHORT: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// One rank is killed.
    Kill,
    /// One rank is killed while the group is meeting.
    KillEarly,
    /// One rank is stopped, and stays so.
    Stop,
    /// One rank aborts the communicator, and lives on or exits.
    Abort,
}

/// The seeds to try: so many, unless the environment says otherwise.
fn seeds(usual: u64) -> Range<u64> {
    let number = |name: &str| env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    match number("TOWLINE_COMM_FAULT_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("TOWLINE_COMM_FAULTS").unwrap_or(usual),
    }
}

fn try_all(fault: Fault, links: &str, usual: u64) {
    for seed in seeds(usual) {
        let what =
            format!("{fault:?} {links} seed {seed} of TOWLINE_TEST_SEED {}", towline_testkit::random::seed());
        let limit = if matches!(fault, Fault::Stop | Fault::KillEarly) { SHORT } else { LONG };
        let _watchdog = watchdog::watch(what.clone(), 10 * limit);
        one_fault(fault, links, seed, limit, &what);
    }
}

fn one_fault(fault: Fault, links: &str, seed: u64, limit: Duration, what: &str) {
    let mut random = Random::new(seed);
    let nranks = 3 + random.below(3) as usize;
    let victim = random.below(nranks as u64) as usize;
    let (when, exits) = (random.micros(60_000), random.below(2) == 0);
    let id = get_unique_id().unwrap();
    let start = |rank: usize| {
        let aborts = (fault == Fault::Abort && rank == victim).then_some((when.as_micros(), exits));
        let otherwise = if fault == Fault::KillEarly { rank::EARLY } else { "-" };
        let aborts = aborts.map_or(otherwise.into(), |(when, exits)| format!("{when}:{exits}"));
        let limit = limit.as_millis();
        Rank::start(&format!("fault {links} {nranks} {rank} {id} {seed} {victim} {limit} {aborts}"))
    };
    let mut ranks: Vec<Option<Rank>> = (0..nranks).map(|rank| Some(start(rank))).collect();
    if fault != Fault::KillEarly {
        ranks.iter_mut().flatten().for_each(|rank| drop(rank.says("READY", what)));
    }
    if fault != Fault::Abort {
        std::thread::sleep(when);
    }
    match fault {
        Fault::Kill | Fault::KillEarly => drop(ranks[victim].take()),
        Fault::Stop => {
            kill_process(Pid::from_child(ranks[victim].as_ref().unwrap().child()), Signal::STOP).unwrap()
        }
        Fault::Abort => {}
    }
    let survivors = ranks.iter_mut().enumerate().filter(|(rank, _)| *rank != victim);
    let mut ends = Vec::new();
    for (rank, process) in survivors {
        ends.push(format!("rank {rank}: {}", process.as_mut().unwrap().says("END", what)));
    }
    // All of them: what one rank ran into is often why another one ended as it did.
    let ranks_of = |end: &String| -> Vec<usize> {
        end.split(['[', ']']).nth(1).unwrap().split(", ").filter_map(|rank| rank.parse().ok()).collect()
    };
    // A stop shows only by time: on a busy machine a rank that the victim holds up can be taken for it by all of them, before it has
    // had the time to say whom it waits for.
    let agreed = ranks_of(&ends[0]);
    let held_up = !agreed.is_empty() && ends.iter().all(|end| ranks_of(end) == agreed);
    let named = |end: &String| {
        let ranks = ranks_of(end);
        ranks == [victim] || fault == Fault::Stop && (ranks.contains(&victim) || held_up)
    };
    assert!(ends.iter().all(named), "{what}: of {nranks} ranks, {victim} is the victim: {ends:#?}");
    for process in
        ranks.iter_mut().enumerate().filter(|(rank, _)| *rank != victim).filter_map(|(_, rank)| rank.take())
    {
        process.ends_well(what, &ends);
    }
}

#[test]
fn a_rank_killed_at_a_random_moment_is_named_by_all_others_by_shared_memory() {
    try_all(Fault::Kill, "Near", 12);
}

#[test]
fn a_rank_killed_at_a_random_moment_is_named_by_all_others_by_sockets() {
    try_all(Fault::Kill, "Far", 8);
}

#[test]
fn a_rank_killed_while_the_group_meets_is_named_by_all_others() {
    try_all(Fault::KillEarly, "Near", 3);
    try_all(Fault::KillEarly, "Far", 3);
}

#[test]
fn a_rank_stopped_at_a_random_moment_is_named_by_all_others_by_shared_memory() {
    try_all(Fault::Stop, "Near", 3);
}

#[test]
fn a_rank_stopped_at_a_random_moment_is_named_by_all_others_by_sockets() {
    try_all(Fault::Stop, "Far", 2);
}

#[test]
fn a_rank_stopped_at_a_random_moment_is_named_by_all_others_by_whatever_one_host_has() {
    try_all(Fault::Stop, "Host", 2);
}

#[test]
fn a_rank_stopped_at_a_random_moment_is_named_by_all_others_by_memory_and_sockets() {
    try_all(Fault::Stop, "Mixed", 3);
}

#[test]
fn a_rank_that_aborts_at_a_random_moment_is_named_by_all_others() {
    try_all(Fault::Abort, "Near", 8);
    try_all(Fault::Abort, "Far", 5);
}

#[test]
fn a_stopped_rank_whose_memory_is_awaited_as_a_future_is_named_and_not_the_one_that_awaits() {
    let what = "an awaited put";
    let _watchdog = watchdog::watch(what.to_owned(), LONG);
    let id = get_unique_id().unwrap();
    let mut ranks: Vec<Rank> = (0..3).map(|rank| Rank::start(&format!("await Far 3 {rank} {id}"))).collect();
    ranks.iter_mut().for_each(|rank| drop(rank.says("READY", what)));
    kill_process(Pid::from_child(ranks[2].child()), Signal::STOP).unwrap();
    for rank in &mut ranks[..2] {
        let end = rank.says("END", what);
        assert!(end.starts_with("[2] "), "{end}");
    }
}
