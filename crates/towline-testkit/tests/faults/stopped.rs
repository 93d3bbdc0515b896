//! `SIGSTOP` at random moments of a transfer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use towline::{Access, Kind, Ticket};
use towline_testkit::bench::{outcome, routing};
use towline_testkit::changes::Changes;
use towline_testkit::oracle::Stamp;
use towline_testkit::paths::{is_direct, is_served, known, required};
use towline_testkit::process::Process;
use towline_testkit::random::Random;
use towline_testkit::watchdog::{eventually, watch};
use towline_testkit::worker::storage;

use super::{GONE, MIB, STALL, endpoint, kind_for, lanes, local};

/// Over four lanes: more than fifty.
const ROUNDS: u16 = 13;
const LEN: usize = 16 * MIB;

/// How long a deregistration waits for a peer that stands still.
const WAIT: Duration = Duration::from_millis(120);

#[test]
fn a_stopped_owner_ends_its_peers_transfers_in_time_and_quietly() {
    let _watchdog =
        watch("a_stopped_owner_ends_its_peers_transfers_in_time_and_quietly", Duration::from_secs(240));
    lanes(|path, lane| {
        let mut random = Random::new(30 + lane);
        let user = endpoint("user");
        let stamp = Stamp::new(lane as u16, 1);
        let mut owner = Process::open("victim", "");
        owner.must(&format!("register {LEN} {} read+write", kind_for(path)));
        owner.must(&format!("fill 1 {} {}", stamp.region, stamp.generation));
        let ticket: Ticket = owner.must("ticket 1").text(0).parse().unwrap();
        let buffer = local(&user, LEN);
        let small = local(&user, 4096);
        for round in 0..ROUNDS {
            let remote = user.import_with(&ticket, &routing(path)).unwrap();
            let transfer = user.read(&remote, &buffer).start().unwrap();
            thread::sleep(random.micros(3000));
            owner.stop();
            let second = user.read(&remote, &small).at(0, 0, 4096).start();
            for (transfer, buffer, len) in [(Ok(transfer), &buffer, LEN), (second, &small, 4096)] {
                let ended = transfer.and_then(|transfer| {
                    transfer.wait_for(STALL * 10).unwrap_or_else(|| panic!("{path} round {round}: no end"))
                });
                match ended {
                    Ok(()) => stamp.verify_storage(buffer.storage(), 0, len).unwrap(),
                    Err(error) => {
                        assert!(GONE.contains(&error.kind()), "{path} round {round}: {error}");
                        assert!(is_served(&known(path)), "{path} needs no help of the owner: {error}");
                    }
                }
            }
            // What the owner sends once it goes on must not land in a buffer that is the caller's again.
            let mine = Stamp::new(99, round);
            mine.fill_storage(buffer.storage()).unwrap();
            owner.resume();
            let served = eventually(STALL * 10, || {
                user.import_with(&ticket, &routing(path))
                    .and_then(|remote| outcome(user.read(&remote, &small).at(8192, 0, 4096).start()))
                    .is_ok()
            });
            assert!(served, "{path} round {round}: the owner goes on, and nobody is served");
            mine.verify_storage(buffer.storage(), 0, LEN)
                .unwrap_or_else(|wrong| panic!("{path} round {round}: {wrong}"));
        }
    });
}

/// The two limits are separate: a long one for all does not put off the one for silence, and each can be set for a call.
#[test]
fn a_long_limit_for_all_does_not_keep_a_transfer_in_which_nothing_moves() {
    const LONG: Duration = Duration::from_secs(600);
    let test = "a_long_limit_for_all_does_not_keep_a_transfer_in_which_nothing_moves";
    let _watchdog = watch(test, Duration::from_secs(120));
    for path in ["unix", "tcp"] {
        let user = endpoint("user");
        let patient = towline::Endpoint::open("patient").unwrap();
        let mut owner = Process::open("victim", "");
        owner.must(&format!("register {LEN} system read+write"));
        let ticket: Ticket = owner.must("ticket 1").text(0).parse().unwrap();
        let remotes =
            [&user, &patient].map(|endpoint| endpoint.import_with(&ticket, &routing(path)).unwrap());
        let buffers = [&user, &patient].map(|endpoint| local(endpoint, LEN));
        owner.stop();
        // Small: no lane has to be opened first, which has a limit of its own.
        let of_the_endpoint =
            user.read(&remotes[0], &buffers[0]).at(0, 0, 4096).within(LONG).start().unwrap();
        let limits = towline::Limits { no_progress: LONG, ..towline::Limits::default() };
        let of_the_call = patient
            .read(&remotes[1], &buffers[1])
            .at(0, 0, 4096)
            .stall_within(STALL)
            .limits(limits)
            .within(LONG)
            .start()
            .unwrap();
        for transfer in [of_the_endpoint, of_the_call] {
            let ended = transfer.wait_for(STALL * 10).unwrap_or_else(|| panic!("{path}: no end"));
            assert_eq!(ended.unwrap_err().kind(), Kind::Timeout, "{path}");
        }
        owner.resume();
    }
}

#[test]
fn what_a_stopped_owner_was_asked_to_change_is_not_changed_late_and_not_twice() {
    let _watchdog = watch(
        "what_a_stopped_owner_was_asked_to_change_is_not_changed_late_and_not_twice",
        Duration::from_secs(240),
    );
    let failed = AtomicUsize::new(0);
    lanes(|path, lane| {
        if is_served(&known(path)) {
            let mut random = Random::new(70 + lane);
            let mut changes = Changes::open(path);
            for _ in 0..2 * ROUNDS {
                failed.fetch_add(changes.round(&mut random).failed.into(), Ordering::Relaxed);
            }
        }
    });
    // A test in which every change came to its end has tried nothing.
    if towline_testkit::bench::forced().is_none_or(|forced| forced == "tcp") {
        assert!(failed.load(Ordering::Relaxed) > 3, "{failed:?} rounds had a change that did not succeed");
    }
}

#[test]
fn memory_that_a_stopped_user_is_inside_of_is_parked_and_not_freed() {
    let _watchdog =
        watch("memory_that_a_stopped_user_is_inside_of_is_parked_and_not_freed", Duration::from_secs(240));
    let pinned_rounds = AtomicUsize::new(0);
    lanes(|path, lane| {
        let mut random = Random::new(40 + lane);
        let direct = is_direct(&known(path));
        let owner = endpoint("owner");
        let mut user = Process::open("victim", "");
        user.must(&format!("register {LEN} system none"));
        for round in 0..ROUNDS {
            let memory = storage(LEN, kind_for(path)).unwrap();
            let watched = Arc::downgrade(&memory);
            let region = owner.register(memory, Access::READ_WRITE).unwrap();
            let paths = required(path).join(",");
            let imported = user.must(&format!("import {} {paths}", region.ticket().unwrap()));
            let op = if round % 2 == 0 { "write" } else { "read" };
            user.must("fill 1 98 98");
            user.must(&format!("loop {op} {} 1 {LEN}", imported.number(0)));
            thread::sleep(random.micros(6000));
            user.stop();
            let kill = round % 3 == 2;
            let release = |user: &mut Process| if kill { user.kill() } else { user.resume() };
            // Over a socket nobody but this process is inside, which may be slow to get a core.
            match region.into_storage_within(if direct { WAIT } else { STALL * 10 }) {
                Ok(memory) => {
                    // Nobody was inside; nobody comes in any more.
                    let mine = Stamp::new(97, round);
                    mine.fill_storage(&memory).unwrap();
                    release(&mut user);
                    thread::sleep(random.micros(3000));
                    mine.verify_storage(&memory, 0, LEN)
                        .unwrap_or_else(|wrong| panic!("{path} round {round}: {wrong}"));
                }
                Err(pinned) => {
                    assert!(direct, "{path} round {round}: {}", pinned.error);
                    assert_eq!(pinned.error.kind(), Kind::Timeout, "{}", pinned.error);
                    assert!(pinned.error.message().contains("victim"), "{}", pinned.error);
                    assert!(!pinned.registration.is_registered());
                    pinned_rounds.fetch_add(1, Ordering::Relaxed);
                    if round % 2 == 0 {
                        // Another try while it stands still, and one once it goes on.
                        let pinned = pinned.registration.into_storage_within(WAIT).unwrap_err();
                        release(&mut user);
                        let memory = pinned.registration.into_storage_within(STALL * 10).unwrap();
                        let mine = Stamp::new(96, round);
                        mine.fill_storage(&memory).unwrap();
                        thread::sleep(random.micros(2000));
                        mine.verify_storage(&memory, 0, LEN).unwrap();
                    } else {
                        drop(pinned.registration);
                        assert_eq!(owner.stats().parked, (1, LEN), "{path} round {round}");
                        assert!(
                            watched.strong_count() > 0,
                            "{path} round {round}: freed under a stopped peer"
                        );
                        release(&mut user);
                        let freed = eventually(STALL * 10, || {
                            watched.strong_count() == 0 && owner.stats().parked == (0, 0)
                        });
                        assert!(freed, "{path} round {round}: {:?}", owner.stats());
                    }
                }
            }
            if kill {
                user = Process::open("victim", "");
                user.must(&format!("register {LEN} system none"));
            } else {
                let last = user.must("halt");
                assert!(
                    last.number(1) == 0 || ["Stale", "Disconnected"].contains(&last.text(2)),
                    "{path} round {round}: {}",
                    last.text(2)
                );
                user.must(&format!("forget {}", imported.number(0)));
            }
        }
    });
    // A test that never stops a peer in mid-copy has tried nothing.
    if towline_testkit::bench::forced().is_none() {
        assert!(pinned_rounds.load(Ordering::Relaxed) > 3, "{pinned_rounds:?} rounds found a peer inside");
    }
}

#[test]
fn a_stopped_user_does_not_slow_down_the_owner_for_others() {
    let _watchdog = watch("a_stopped_user_does_not_slow_down_the_owner_for_others", Duration::from_secs(120));
    let owner = endpoint("owner");
    let stamp = Stamp::new(1, 1);
    let memory = storage(LEN, "shared").unwrap();
    stamp.fill_storage(&memory).unwrap();
    let region = owner.register(memory, Access::READ_WRITE).unwrap();
    let ticket = region.ticket().unwrap();
    let mut stopped = Vec::new();
    for path in ["unix", "tcp", "mapped"] {
        let mut user = Process::open("stopped", "");
        user.must(&format!("register {LEN} system none"));
        let remote = user.must(&format!("import {ticket} {path}")).number(0);
        user.must(&format!("loop read {remote} 1 {LEN}"));
        thread::sleep(Duration::from_millis(5));
        user.stop();
        stopped.push(user);
    }
    // Everybody else gets all they ask for while three stand still in the middle of their transfers.
    for path in ["unix", "tcp", "mapped"] {
        let mut other = Process::open("other", &format!("stall={}", STALL.as_millis()));
        other.must(&format!("register {LEN} system none"));
        let remote = other.must(&format!("import {ticket} {path}")).number(0);
        for _ in 0..3 {
            other.must(&format!("read {remote} 1 0 0 {LEN}"));
            other.must(&format!("check 1 1 1 0 {LEN}"));
        }
    }
    drop(stopped);
    region.into_storage_within(STALL * 10).unwrap();
}
