//! Words of a region, and waiting for them to change.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use super::{Patience, Registered, Span};
use crate::fence::tests::{alone_with_the_watcher, until};
use crate::memory::{SharedStorage, SystemStorage};
use crate::{Access, Endpoint, Kind, Pinned, Routing, Storage};

const BELL: usize = 0;
const FLAG: usize = 64;
const WATCHDOG: Duration = Duration::from_secs(20);
const ASLEEP: Patience = Patience { spin: Duration::ZERO, yielding: Duration::ZERO };

fn region(endpoint: &Endpoint) -> Registered<SharedStorage> {
    endpoint.register(SharedStorage::new(4096).unwrap(), Access::READ_WRITE).unwrap()
}

fn pinned<S: Storage>(user: &Endpoint, region: &Registered<S>, path: &str) -> Pinned {
    let routing = Routing::default().require(path).unwrap();
    user.import_with(&region.ticket().unwrap(), &routing).unwrap().pin().unwrap()
}

fn sleepers<S: Storage>(region: &Registered<S>) -> u32 {
    let core = &region.core;
    core.registry.table.row(core.row).unwrap().sleepers().load(Ordering::SeqCst)
}

fn flag<S: Storage>(region: &Registered<S>, at_least: u64) -> Option<u64> {
    region.load(FLAG).unwrap().checked_sub(at_least).map(|more| at_least + more)
}

/// Waits for its own flag and raises the other's, in turns. A wake-up that is lost shows as a wait of full length.
fn play<S: Storage>(own: &Registered<S>, other: &Pinned, rounds: u64, begins: bool) {
    for round in 1..=rounds {
        if begins {
            other.store(FLAG, round).unwrap();
            other.wake(BELL).unwrap();
        }
        let patience = if round % 8 == 0 { Patience::default() } else { ASLEEP };
        let started = Instant::now();
        assert_eq!(own.wait_changed(BELL, patience, WATCHDOG, || flag(own, round)), Some(round));
        assert!(started.elapsed() < WATCHDOG, "the wake-up of round {round} was lost");
        if !begins {
            other.store(FLAG, round).unwrap();
            other.wake(BELL).unwrap();
        }
    }
}

fn a_hundred_thousand_rounds_over(path: &str) {
    let _alone = alone_with_the_watcher();
    let (left, right) = (Endpoint::open("left").unwrap(), Endpoint::open("right").unwrap());
    let (first, second) = (region(&left), region(&right));
    let (to_first, to_second) = (pinned(&right, &first, path), pinned(&left, &second, path));
    thread::scope(|scope| {
        scope.spawn(|| play(&second, &to_first, 100_000, false));
        play(&first, &to_second, 100_000, true);
    });
    assert_eq!((sleepers(&first), sleepers(&second)), (0, 0));
}

#[test]
fn two_threads_wake_each_other_within_one_process() {
    a_hundred_thousand_rounds_over("inproc");
}

#[test]
fn two_threads_wake_each_other_over_two_mappings() {
    a_hundred_thousand_rounds_over("mapped");
}

#[test]
fn a_sleeper_is_counted_and_a_wake_without_one_leaves_the_bell() {
    let _alone = alone_with_the_watcher();
    let endpoint = Endpoint::open("both").unwrap();
    let region = region(&endpoint);
    for path in ["inproc", "mapped"] {
        let pinned = pinned(&endpoint, &region, path);
        region.store(BELL, 0).unwrap();
        region.store(FLAG, 0).unwrap();
        pinned.wake(BELL).unwrap();
        region.wake(BELL).unwrap();
        assert_eq!(region.load(BELL).unwrap(), 0);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| region.wait_changed(BELL, ASLEEP, WATCHDOG, || flag(&region, 5)));
            until("the waiter sleeps", || sleepers(&region) == 1);
            // Woken for nothing, it looks and goes back to sleep.
            pinned.wake(BELL).unwrap();
            assert_eq!(region.load(BELL).unwrap(), 1);
            pinned.store(FLAG, 5).unwrap();
            pinned.wake(BELL).unwrap();
            assert_eq!(waiting.join().unwrap(), Some(5));
        });
        assert_eq!(sleepers(&region), 0);
    }
}

#[test]
fn far_and_near_signals_and_the_owner_itself_end_a_wait() {
    let _alone = alone_with_the_watcher();
    let (owner, user) = (Endpoint::open("owner").unwrap(), Endpoint::open("user").unwrap());
    let region = region(&owner);
    let local = user.register(SystemStorage::new(8).unwrap(), Access::NONE).unwrap();
    let span = Span::from(&region);
    let mut round = 0;
    for path in ["inproc", "mapped", "unix", "tcp", "itself", "span"] {
        let ring = |round: u64| match path {
            "itself" => region.store(FLAG, round).and_then(|()| region.wake(BELL)).unwrap(),
            "span" => span.store(FLAG, round).and_then(|()| span.wake(BELL)).unwrap(),
            _ => {
                let routing = Routing::default().require(path).unwrap();
                let remote = user.import_with(&region.ticket().unwrap(), &routing).unwrap();
                local.store(0, round).unwrap();
                let write = user.write(&remote, &local).at(FLAG as u64, 0, 8).signal(BELL as u64, 1);
                write.start().unwrap().wait().unwrap();
            }
        };
        for _ in 0..20 {
            round += 1;
            thread::scope(|scope| {
                let waiting = scope.spawn(|| {
                    let started = Instant::now();
                    let seen = region.wait_changed(BELL, ASLEEP, WATCHDOG, || flag(&region, round));
                    (seen, started.elapsed() < WATCHDOG)
                });
                if round % 2 == 0 {
                    until("the waiter sleeps", || sleepers(&region) == 1);
                }
                ring(round);
                assert_eq!(waiting.join().unwrap(), (Some(round), true), "{path}");
            });
        }
    }
}

#[test]
fn many_sleepers_of_one_bell_all_wake() {
    let _alone = alone_with_the_watcher();
    let endpoint = Endpoint::open("both").unwrap();
    let region = region(&endpoint);
    let pinned = pinned(&endpoint, &region, "mapped");
    thread::scope(|scope| {
        let waiting: Vec<_> = (1..=8)
            .map(|number| {
                let region = &region;
                scope.spawn(move || region.wait_changed(BELL, ASLEEP, WATCHDOG, || flag(region, number)))
            })
            .collect();
        until("all of them sleep", || sleepers(&region) == 8);
        pinned.store(FLAG, 8).unwrap();
        pinned.wake(BELL).unwrap();
        assert!(waiting.into_iter().all(|one| one.join().unwrap() == Some(8)));
    });
}

#[test]
fn a_wait_ends_at_its_limit_with_and_without_a_usable_bell() {
    let endpoint = Endpoint::open("both").unwrap();
    let region = region(&endpoint);
    for bell in [BELL, 4, 4096, usize::MAX] {
        for patience in [ASLEEP, Patience::default(), Patience { spin: WATCHDOG, yielding: WATCHDOG }] {
            let within = Duration::from_millis(5);
            assert_eq!(region.wait_changed(bell, patience, within, || None::<()>), None);
            assert_eq!(region.wait_changed(bell, patience, Duration::ZERO, || Some(3)), Some(3));
        }
        let mut looks = 0;
        let found = region.wait_changed(bell, ASLEEP, WATCHDOG, || {
            looks += 1;
            (looks == 3 || bell == BELL).then_some(looks)
        });
        assert!(found.is_some());
    }
    assert_eq!(sleepers(&region), 0);
}

#[test]
fn a_check_that_panics_is_not_counted_as_asleep_for_ever() {
    let endpoint = Endpoint::open("both").unwrap();
    let region = Arc::new(region(&endpoint));
    let waiting = thread::spawn({
        let region = Arc::clone(&region);
        move || {
            let mut looks = 0;
            region.wait_changed(BELL, ASLEEP, WATCHDOG, || {
                looks += 1;
                assert!(looks < 3, "enough");
                None::<()>
            })
        }
    });
    until("the waiter sleeps", || sleepers(&region) == 1 || waiting.is_finished());
    while !waiting.is_finished() {
        region.wake(BELL).unwrap();
    }
    assert!(waiting.join().is_err());
    assert_eq!(sleepers(&region), 0);
}

#[test]
fn words_and_bytes_of_regions_and_spans_are_the_same_memory() {
    let endpoint = Endpoint::open("both").unwrap();
    let region = endpoint.register(SystemStorage::new(64).unwrap(), Access::NONE).unwrap();
    region.store(8, 5).unwrap();
    assert_eq!(region.fetch_add(8, 2).unwrap(), 5);
    assert_eq!(region.compare_swap(8, 7, 9).unwrap(), 7);
    assert_eq!(region.compare_swap(8, 7, 1).unwrap(), 9);
    let span = region.span(8, 24).unwrap();
    assert_eq!(span.load(0).unwrap(), 9);
    assert_eq!(span.fetch_add(0, 1).unwrap(), 9);
    assert_eq!(span.compare_swap(0, 10, 11).unwrap(), 10);
    span.store(8, 3).unwrap();
    assert_eq!((region.load(8).unwrap(), region.load(16).unwrap()), (11, 3));
    span.write_at(5, &[1, 2, 3]).unwrap();
    let mut bytes = [0; 3];
    span.part(4, 8).unwrap().read_at(1, &mut bytes).unwrap();
    assert_eq!(bytes, [1, 2, 3]);
    let kinds = [
        region.load(60).unwrap_err(),
        region.store(4, 1).unwrap_err(),
        region.wake(usize::MAX - 7).unwrap_err(),
        span.load(24).unwrap_err(),
        span.load(4).unwrap_err(),
        span.write_at(22, &[0; 3]).unwrap_err(),
        span.read_at(usize::MAX, &mut [0]).unwrap_err(),
        span.part(20, 5).unwrap_err(),
        region.wait_signal(60, 1, WATCHDOG).unwrap_err(),
    ];
    assert!(kinds.iter().all(|error| error.kind() == Kind::Invalid), "{kinds:?}");
    region.into_storage().unwrap();
    assert_eq!(span.load(0).unwrap_err().kind(), Kind::Stale);
    assert_eq!(span.write_at(0, &[1]).unwrap_err().kind(), Kind::Stale);
}

#[test]
fn the_limit_of_regions_pinned_at_once_is_told_and_copies_go_on_beyond_it() {
    let _alone = alone_with_the_watcher();
    let (owner, user) = (Endpoint::open("owner").unwrap(), Endpoint::open("user").unwrap());
    let whole = crate::create_buffer(SharedStorage::new(8192).unwrap());
    let views = (0..=crate::fence::pins::LONG_SLOTS as usize)
        .map(|number| crate::OffsetBuffer::new(whole.clone(), number * 8, 8).unwrap())
        .collect();
    let regions = owner.register_many(views, Access::READ_WRITE).unwrap();
    let mut held: Vec<_> = regions[1..].iter().map(|region| pinned(&user, region, "mapped")).collect();
    let routing = Routing::default().require("mapped").unwrap();
    let remote = user.import_with(&regions[0].ticket().unwrap(), &routing).unwrap();
    let error = remote.pin().unwrap_err();
    assert_eq!(error.kind(), Kind::Exhausted);
    assert!(error.message().contains("960 regions"), "{error}");
    // One more of a region that is pinned already takes nothing.
    let again = pinned(&user, &regions[1], "mapped");
    let local = user.register(SystemStorage::new(8).unwrap(), Access::NONE).unwrap();
    user.read(&remote, &local).start().unwrap().wait().unwrap();
    drop(held.swap_remove(0));
    assert_eq!(remote.pin().unwrap_err().kind(), Kind::Exhausted);
    drop(again);
    remote.pin().unwrap().store(0, 1).unwrap();
    assert_eq!(regions[0].load(0).unwrap(), 1);
}
