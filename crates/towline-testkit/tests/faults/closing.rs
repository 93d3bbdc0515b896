//! Endpoints that are closed while bytes move, in both roles: what `close` says of the memory is true.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use towline::{Access, Kind, MemoryAccess, Registered, Storage, Ticket};
use towline_testkit::bench::routing;
use towline_testkit::process::Process;
use towline_testkit::random::Random;
use towline_testkit::watchdog::{eventually, stays, watch};
use towline_testkit::worker::storage;

use super::{MIB, STALL, endpoint, kind_for, lanes, local};

const ROUNDS: u16 = 8;
const LEN: usize = 64 * MIB;

/// What the memory is used for after it was closed.
const OURS: u8 = 0xee;

fn reuse<S: Storage>(region: &Registered<S>) {
    region.storage().memset(OURS, 0, LEN).unwrap();
}

/// Nobody writes into it for that long.
fn stays_ours<S: Storage>(region: &Registered<S>, time: Duration, what: &str) {
    stays(time, || {
        (0..LEN).step_by(MIB).all(|at| {
            let mut byte = [0];
            region.read_at(at, &mut byte).unwrap();
            byte == [OURS]
        })
    });
    let mut bytes = vec![0; LEN];
    region.read_at(0, &mut bytes).unwrap();
    let late = bytes.iter().position(|byte| *byte != OURS);
    assert_eq!(late, None, "{what}: written after the endpoint was closed");
}

/// A peer that has begun to write into it, over and over.
fn writing<S: Storage>(path: &str, region: &Registered<S>, what: &str) -> Process {
    let mut writer = Process::open("writer", &format!("stall={}", STALL.as_millis()));
    writer.must(&format!("chase {path} write 0 {LEN} 100"));
    reuse(region);
    writer.tell(&format!("target {} 1 1", region.ticket().unwrap()));
    let begun = eventually(STALL * 10, || {
        let mut first = [OURS; 8];
        region.read_at(0, &mut first).unwrap();
        first != [OURS; 8]
    });
    assert!(begun, "{what}: nothing is written");
    writer
}

#[test]
fn nothing_is_read_into_the_memory_of_an_endpoint_that_was_closed() {
    let _watchdog =
        watch("nothing_is_read_into_the_memory_of_an_endpoint_that_was_closed", Duration::from_secs(240));
    lanes(|path, lane| {
        let mut random = Random::new(70 + lane);
        let mut owner = Process::open("owner", "");
        owner.must(&format!("register {LEN} {} read", kind_for(path)));
        owner.must("fill 1 7 1");
        let ticket: Ticket = owner.must("ticket 1").text(0).parse().unwrap();
        for round in 0..ROUNDS {
            let user = endpoint("user");
            let buffer = local(&user, LEN);
            let remote = user.import_with(&ticket, &routing(path)).unwrap();
            let reading = user.read(&remote, &buffer).start().unwrap();
            thread::sleep(random.micros(4000));
            user.close_within(STALL * 10).unwrap();
            reuse(&buffer);
            stays_ours(&buffer, Duration::from_millis(20), &format!("{path} round {round}"));
            let ended =
                reading.wait_for(STALL * 10).unwrap_or_else(|| panic!("{path} round {round}: no end"));
            if let Err(error) = ended {
                assert_eq!(error.kind(), Kind::Canceled, "{path} round {round}: {error}");
            }
        }
    });
}

#[test]
fn an_owner_that_closes_waits_for_writers_and_says_which_one_stands_still() {
    let _watchdog = watch(
        "an_owner_that_closes_waits_for_writers_and_says_which_one_stands_still",
        Duration::from_secs(240),
    );
    let inside = AtomicUsize::new(0);
    lanes(|path, lane| {
        let mut random = Random::new(80 + lane);
        for round in 0..ROUNDS {
            let what = format!("{path} round {round}");
            let owner = endpoint("owner");
            let region = owner.register(storage(LEN, kind_for(path)).unwrap(), Access::READ_WRITE).unwrap();
            let mut writer = writing(path, &region, &what);
            thread::sleep(random.micros(2000));
            let stopped = round % 2 == 0;
            if stopped {
                writer.stop();
            }
            let started = Instant::now();
            let mut closed = owner.close_within(STALL / 4);
            if let Err(error) = &closed {
                assert_eq!(error.kind(), Kind::Timeout, "{what}: {error}");
                assert!(error.message().contains("peer writer"), "{what}: {error}");
                assert!(started.elapsed() >= STALL / 4, "{what}: {error}");
                if stopped {
                    // It cannot have left since.
                    let again = owner.close_within(STALL / 20).expect_err(&what);
                    assert_eq!(again.kind(), Kind::Timeout, "{what}: {again}");
                    inside.fetch_add(1, Ordering::Relaxed);
                }
                writer.resume();
                closed = owner.close_within(STALL * 10);
            }
            closed.unwrap_or_else(|error| panic!("{what}: {error}"));
            reuse(&region);
            if stopped {
                writer.resume();
            }
            // Its last write has ended when it answers, well or not.
            writer.tell("halt");
            let _ = writer.answer(STALL * 20);
            stays_ours(&region, Duration::from_millis(20), &what);
        }
    });
    if towline_testkit::bench::forced().is_none() {
        assert!(inside.load(Ordering::Relaxed) > 0, "no writer was stopped inside the memory");
    }
}

#[test]
fn what_a_stopped_writer_is_inside_of_outlives_an_endpoint_that_is_only_dropped() {
    let _watchdog = watch(
        "what_a_stopped_writer_is_inside_of_outlives_an_endpoint_that_is_only_dropped",
        Duration::from_secs(240),
    );
    let held = AtomicUsize::new(0);
    lanes(|path, lane| {
        let mut random = Random::new(90 + lane);
        for round in 0..ROUNDS {
            let owner = endpoint("owner");
            let memory = storage(LEN, kind_for(path)).unwrap();
            let watched = Arc::downgrade(&memory);
            let region = owner.register(memory, Access::READ_WRITE).unwrap();
            let mut writer = writing(path, &region, &format!("{path} round {round}"));
            thread::sleep(random.micros(2000));
            writer.stop();
            drop(owner);
            drop(region);
            let freed = eventually(Duration::from_millis(50), || watched.strong_count() == 0);
            held.fetch_add((!freed).into(), Ordering::Relaxed);
            writer.resume();
            let freed = eventually(STALL * 10, || watched.strong_count() == 0);
            assert!(freed, "{path} round {round}: kept although nobody is inside any more");
        }
    });
    // A test in which every stopped writer stood outside the memory has tried nothing.
    if towline_testkit::bench::forced().is_none() {
        assert!(held.load(Ordering::Relaxed) > 0, "no writer was stopped inside the memory");
    }
}

#[test]
fn closing_wakes_who_waits_for_a_signal() {
    let _watchdog = watch("closing_wakes_who_waits_for_a_signal", Duration::from_secs(60));
    for _ in 0..20 {
        let owner = endpoint("owner");
        let region = owner.register(storage(4096, "shared").unwrap(), Access::READ_WRITE).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| region.wait_signal(64, 1, Duration::from_secs(600)));
            thread::sleep(Duration::from_millis(5));
            owner.close().unwrap();
            let error = waiting.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), Kind::Invalid, "{error}");
        });
    }
}
