//! Requests over many regions of an owner that is killed, stopped, or takes one of them back meanwhile.

use parking_lot::Mutex;
use std::thread;
use std::time::Duration;

use towline::{Endpoint, Kind, Limits, Transfer};
use towline_testkit::bench::{Owner, Parts, routing};
use towline_testkit::oracle::Stamp;
use towline_testkit::paths::{is_served, known};
use towline_testkit::process::Process;
use towline_testkit::random::Random;
use towline_testkit::watchdog::{eventually, stays, watch};

use super::{GONE, MIB, STALL, kind_for, lanes};

/// Over four lanes: sixteen of each.
const ROUNDS: u16 = 4;

/// Eight different lengths, 18 MiB in all.
fn eight() -> Vec<usize> {
    (1..=8).map(|part| part * MIB / 2 - 8 * part).collect()
}

fn user_over(path: &str) -> Endpoint {
    let limits = Limits { no_progress: STALL, ..Limits::default() };
    Endpoint::options("user").limits(limits).routing(routing(path)).open().unwrap()
}

fn victim() -> Owner {
    Owner::There(Box::new(Mutex::new(Process::open("victim", ""))))
}

fn with(owner: &Owner, act: impl FnOnce(&mut Process)) {
    let Owner::There(process) = owner else { panic!("it is in this process") };
    act(&mut process.lock());
}

/// How it ended, where that is one of these errors and what has not failed is right.
fn ended(path: &str, parts: &Parts<'_>, transfer: &Transfer, kinds: &[Kind], read: Option<Stamp>) -> bool {
    let ended = transfer.wait_for(STALL * 10).unwrap_or_else(|| panic!("{path}: no end"));
    let failures = transfer.failures();
    assert_eq!(ended.is_err(), !failures.is_empty(), "{path}: {ended:?}, {failures:?}");
    if let Some(stamp) = read {
        parts.check_unfailed(transfer, stamp).unwrap_or_else(|wrong| panic!("{path}: {wrong} {failures:?}"));
    }
    if let Err(error) = &ended {
        assert!(kinds.contains(&error.kind()), "{path}: {error}");
    }
    ended.is_ok()
}

#[test]
fn a_killed_owner_ends_a_request_over_many_of_its_regions_in_time_and_quietly() {
    let test = "a_killed_owner_ends_a_request_over_many_of_its_regions_in_time_and_quietly";
    let _watchdog = watch(test, Duration::from_secs(180));
    lanes(|path, lane| {
        let mut random = Random::new(80 + lane);
        let user = user_over(path);
        for round in 0..ROUNDS {
            let (theirs, mine) = (Stamp::new(1 + lane as u16, round), Stamp::new(20, round));
            let owner = victim();
            let parts = Parts::new((kind_for(path), "system"), (&owner, &user), eight(), theirs);
            let write = round % 4 == 3;
            let transfer = if write { parts.write() } else { parts.read() }.start().unwrap();
            thread::sleep(random.micros(4000));
            with(&owner, Process::kill_without_waiting);
            ended(path, &parts, &transfer, &GONE, (!write).then_some(theirs));
            // Quiet: whatever is put there now stays.
            parts.fill_here(mine);
            let is_gone =
                || parts.read_ranges(&parts.ranges(|_| (0, 0, 8))).start().and_then(|it| it.wait()).is_err();
            assert!(eventually(STALL * 10, is_gone), "{path} round {round}: a dead owner still gives bytes");
            // A probe that was still served has changed the first bytes.
            parts.fill_here(mine);
            parts.stays_here(mine, Duration::from_millis(3)).unwrap();
        }
    });
}

#[test]
fn a_stopped_owner_ends_a_request_over_many_of_its_regions_in_time_and_quietly() {
    let test = "a_stopped_owner_ends_a_request_over_many_of_its_regions_in_time_and_quietly";
    let _watchdog = watch(test, Duration::from_secs(240));
    lanes(|path, lane| {
        let mut random = Random::new(90 + lane);
        let user = user_over(path);
        let owner = victim();
        let theirs = Stamp::new(1 + lane as u16, 1);
        for round in 0..ROUNDS {
            let parts = Parts::new((kind_for(path), "system"), (&owner, &user), eight(), theirs);
            let transfer = parts.read().start().unwrap();
            thread::sleep(random.micros(3000));
            with(&owner, Process::stop);
            let small = parts.ranges(|_| (0, 0, 64));
            let second = parts.read_ranges(&small).start();
            if !ended(path, &parts, &transfer, &GONE, Some(theirs)) {
                assert!(is_served(&known(path)), "{path} needs no help of the owner");
            }
            if let Ok(second) = second {
                let ended = second.wait_for(STALL * 10).unwrap_or_else(|| panic!("{path}: no end"));
                assert!(ended.is_ok() || is_served(&known(path)), "{path}: {ended:?}");
            }
            // What the owner sends once it goes on must not land in buffers that are the caller's again.
            let mine = Stamp::new(20, round);
            parts.fill_here(mine);
            with(&owner, Process::resume);
            let again = || {
                let ticket = parts.regions[0].ticket();
                let local =
                    user.register(towline::SystemStorage::new(64).unwrap(), towline::Access::NONE).unwrap();
                user.import(&ticket).and_then(|remote| user.read(&remote, &local).start()?.wait()).is_ok()
            };
            assert!(
                eventually(STALL * 10, again),
                "{path} round {round}: the owner goes on, and nobody is served"
            );
            parts.check_here(mine).unwrap_or_else(|wrong| panic!("{path} round {round}: {wrong}"));
        }
    });
}

#[test]
fn a_region_taken_back_in_flight_ends_the_whole_and_nothing_lands_in_it() {
    let test = "a_region_taken_back_in_flight_ends_the_whole_and_nothing_lands_in_it";
    let _watchdog = watch(test, Duration::from_secs(180));
    lanes(|path, lane| {
        let mut random = Random::new(100 + lane);
        let user = user_over(path);
        let owner = victim();
        for round in 0..2 * ROUNDS {
            let (theirs, ours) = (Stamp::new(1 + lane as u16, round), Stamp::new(30, round));
            let mut parts = Parts::new((kind_for(path), "system"), (&owner, &user), eight(), theirs);
            parts.fill_here(ours);
            let write = round % 2 == 1;
            let transfer = if write { parts.write() } else { parts.read() }.start().unwrap();
            thread::sleep(random.micros(3000));
            // It serves something else at once: as the same memory, filled anew.
            let last = parts.regions.len() - 1;
            let new = Stamp::new(40, round);
            let again = parts.regions.pop().unwrap().recycle(new, STALL * 10).unwrap();
            let read = (!write).then_some(theirs);
            if !ended(path, &parts, &transfer, &[Kind::Stale, Kind::Disconnected], read) {
                let error = transfer.wait().unwrap_err();
                if error.kind() == Kind::Stale {
                    assert!(error.message().contains(&format!("part {last} of 8")), "{path}: {error}");
                }
                assert!(transfer.failures().iter().any(|failure| failure.part == last), "{path}: {error}");
            }
            if write {
                for (part, region) in parts.regions.iter().enumerate() {
                    if transfer.failures().iter().all(|failure| failure.part != part) {
                        region.check(ours.of_part(part), 0, region.len()).unwrap();
                    }
                }
            }
            let stayed = stays(random.micros(3000), || again.check(new, 0, 64).is_ok());
            assert!(stayed, "{path} round {round}: written late");
            again.check(new, 0, again.len()).unwrap_or_else(|wrong| panic!("{path} round {round}: {wrong}"));
        }
    });
}
