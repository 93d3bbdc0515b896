//! Memory that is pinned for long, by processes that are killed and stopped; and games of waking each other.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use towline::{Access, Kind, Registered, SharedStorage, Ticket};
use towline_testkit::bench::{forced, routing};
use towline_testkit::oracle::Stamp;
use towline_testkit::process::Process;
use towline_testkit::skip::skip;
use towline_testkit::watchdog::{eventually, watch};
use towline_testkit::worker::{play, storage};

use super::{STALL, endpoint, path_works};

const LEN: usize = 65_536;
const STAMP: Stamp = Stamp { region: 1, generation: 1 };

/// Only mapped memory is pinned between processes; else says that the test is skipped.
fn can_pin(test: &str) -> bool {
    if let Some(other) = forced().filter(|path| path != "mapped") {
        skip(test, "pins", &format!("only mapped memory is pinned, and the path is forced to be {other}"));
        return false;
    }
    path_works("mapped")
}

fn shared(owner: &towline::Endpoint) -> Registered<Arc<dyn towline::Storage>> {
    let memory = storage(LEN, "shared").unwrap();
    STAMP.fill_storage(&memory).unwrap();
    owner.register(memory, Access::READ_WRITE).unwrap()
}

fn pinning(name: &str, ticket: &Ticket) -> (Process, u64) {
    let mut user = Process::open(name, "");
    let remote = user.must(&format!("import {ticket} mapped")).number(0);
    let pinned = user.must(&format!("pin {remote}")).number(0);
    // The pin holds by itself.
    user.must(&format!("forget {remote}"));
    (user, pinned)
}

#[test]
fn a_killed_holder_of_a_pin_is_reclaimed_and_a_stopped_one_is_not() {
    let _watchdog =
        watch("a_killed_holder_of_a_pin_is_reclaimed_and_a_stopped_one_is_not", Duration::from_secs(120));
    if !can_pin("a_killed_holder_of_a_pin_is_reclaimed_and_a_stopped_one_is_not") {
        return;
    }
    let owner = endpoint("owner");
    for round in 0..6 {
        let region = shared(&owner);
        let ticket = region.ticket().unwrap();
        let (mut user, _) = pinning("victim", &ticket);
        let pinned = region.into_storage_within(Duration::from_millis(20)).unwrap_err();
        assert_eq!(pinned.error.kind(), Kind::Timeout, "{}", pinned.error);
        assert!(pinned.error.message().contains("victim"), "{}", pinned.error);
        user.stop();
        let pinned = pinned.registration.into_storage_within(Duration::from_millis(50)).unwrap_err();
        user.resume();
        if round % 2 == 0 {
            user.kill_without_waiting();
            let memory = pinned.registration.into_storage_within(STALL * 10).unwrap();
            STAMP.verify_storage(&memory, 0, LEN).unwrap();
        } else {
            drop(pinned);
            assert_eq!(owner.stats().parked, (1, LEN));
            user.kill_without_waiting();
            assert!(eventually(STALL * 10, || owner.stats().parked == (0, 0)), "round {round}");
        }
    }
    assert_eq!(owner.stats().regions, 0);
}

#[test]
fn a_pin_ends_when_its_holder_exits_or_lets_go() {
    let _watchdog = watch("a_pin_ends_when_its_holder_exits_or_lets_go", Duration::from_secs(120));
    if !can_pin("a_pin_ends_when_its_holder_exits_or_lets_go") {
        return;
    }
    let owner = endpoint("owner");
    let (first, second) = (shared(&owner), shared(&owner));
    let (mut leaving, _) = pinning("leaving", &first.ticket().unwrap());
    let first = first.into_storage_within(Duration::from_millis(20)).unwrap_err().registration;
    leaving.tell("exit 0");
    first.into_storage_within(STALL * 10).unwrap();
    let (mut staying, pinned) = pinning("staying", &second.ticket().unwrap());
    let second = second.into_storage_within(Duration::from_millis(20)).unwrap_err().registration;
    thread::scope(|scope| {
        scope.spawn(|| {
            // Late enough that the owner waits for it.
            thread::sleep(Duration::from_millis(50));
            staying.must(&format!("unpin {pinned}"));
        });
        second.into_storage_within(STALL * 10).unwrap();
    });
}

#[test]
fn the_memory_of_a_killed_owner_stays_pinned_and_is_known_to_be_stale() {
    let _watchdog =
        watch("the_memory_of_a_killed_owner_stays_pinned_and_is_known_to_be_stale", Duration::from_secs(120));
    if !can_pin("the_memory_of_a_killed_owner_stays_pinned_and_is_known_to_be_stale") {
        return;
    }
    let user = endpoint("user");
    let mut owner = Process::open("victim", "");
    owner.must(&format!("register {LEN} shared read+write"));
    owner.must("fill 1 1 1");
    let ticket: Ticket = owner.must("ticket 1").text(0).parse().unwrap();
    let remote = user.import_with(&ticket, &routing("mapped")).unwrap();
    let pinned = remote.pin().unwrap();
    remote.alive().unwrap();
    assert!(!pinned.is_stale());
    owner.kill();
    assert!(eventually(STALL * 10, || pinned.is_stale()));
    assert_eq!(remote.alive().unwrap_err().kind(), Kind::Stale);
    assert!(remote.pin().is_err());
    let mut bytes = vec![0; LEN];
    pinned.read_at(0, &mut bytes).unwrap();
    STAMP.verify(0, &bytes).unwrap();
    pinned.write_at(0, &bytes).unwrap();
    pinned.wake(0).unwrap();
}

#[test]
fn two_processes_wake_each_other_a_hundred_thousand_times() {
    let _watchdog = watch("two_processes_wake_each_other_a_hundred_thousand_times", Duration::from_secs(300));
    if !can_pin("two_processes_wake_each_other_a_hundred_thousand_times") {
        return;
    }
    const ROUNDS: u64 = 100_000;
    let user = endpoint("user");
    let mut other = Process::open("other", "");
    let theirs = other.must("register 4096 shared read+write").number(0);
    let ticket: Ticket = other.must(&format!("ticket {theirs}")).text(0).parse().unwrap();
    let pinned = user.import_with(&ticket, &routing("mapped")).unwrap().pin().unwrap();
    let own = user.register(SharedStorage::new(4096).unwrap(), Access::READ_WRITE).unwrap();
    let ours = own.ticket().unwrap();
    let remote = other.must(&format!("import {ours} mapped")).number(0);
    let ours = other.must(&format!("pin {remote}")).number(0);
    other.tell(&format!("pong {theirs} {ours} {ROUNDS}"));
    play(&own, &pinned, ROUNDS, true).unwrap();
    other.answer(Duration::from_secs(60)).unwrap();
}
