//! Claimers of operations that stand still or die: the passive side ends with the cause.

use std::thread;
use std::time::Duration;

use towline::connect::{Connector, Descriptor, OperationStatus, RdmaMetadata};
use towline::{Endpoint, Kind, Limits, MemoryAccess};
use towline_testkit::bench::routing;
use towline_testkit::oracle::Stamp;
use towline_testkit::paths::{is_direct, known};
use towline_testkit::process::Process;
use towline_testkit::random::Random;
use towline_testkit::watchdog::{eventually, stays, watch};
use towline_testkit::worker::storage;

use super::{MIB, STALL, kind_for, lanes};

const LEN: usize = 64 * MIB;
const ROUNDS: u16 = 3;

/// What claimers write.
const THEIRS: u8 = 7;

/// A claimer over that path, with limits longer than the owner's: the end must not come from it.
fn claimer(path: &str) -> Process {
    Process::open("claimer", &format!("require={path} stall=60000 total=60000"))
}

fn owner(path: &str) -> Connector {
    let limits = Limits { no_progress: STALL, ..Limits::default() };
    let endpoint = Endpoint::options("owner").limits(limits).routing(routing(path)).open().unwrap();
    Connector::with_endpoint(endpoint)
}

fn claim(claimer: &mut Process, op: &str, metadata: &RdmaMetadata, how: &str) {
    let order = format!("claim {op} {LEN} {how}");
    claimer.ask_with(&order, metadata.to_json().unwrap().as_bytes()).unwrap();
}

#[test]
fn a_claimer_that_is_stopped_after_the_claim_leaves_the_passive_side_errored() {
    let test = "a_claimer_that_is_stopped_after_the_claim_leaves_the_passive_side_errored";
    let _watchdog = watch(test, Duration::from_secs(120));
    lanes(|path, _| {
        let owner = owner(path);
        let mut claimer = claimer(path);
        for op in ["read", "write"] {
            let local = Descriptor::new(storage(LEN, kind_for(path)).unwrap());
            let readable = (op == "read").then(|| owner.create_readable(&local).unwrap());
            let writable = (op == "write").then(|| owner.create_writable(&local).unwrap());
            let metadata = match (&readable, &writable) {
                (Some(readable), _) => readable.metadata(),
                (_, Some(writable)) => writable.metadata(),
                _ => unreachable!(),
            };
            claim(&mut claimer, op, &metadata.unwrap(), "silently");
            let status = || match (&readable, &writable) {
                (Some(readable), _) => (readable.status(), readable.error(), readable.quiet()),
                (_, Some(writable)) => (writable.status(), writable.error(), writable.quiet()),
                _ => unreachable!(),
            };
            assert!(eventually(STALL * 10, || status().0 == OperationStatus::InProgress), "{path}");
            claimer.stop();
            // Far less than the limit of the whole operation, which is 30 s and more.
            assert!(eventually(STALL * 10, || status().0.is_final()), "{path} {op}: {:?}", status());
            let (status, error, quiet) = status();
            let error = error.unwrap();
            assert_eq!((status, error.kind()), (OperationStatus::Errored, Kind::Timeout), "{path}: {error}");
            assert_eq!(error.peer(), Some("claimer"));
            assert!(error.message().contains("sent nothing"), "{path}: {error}");
            assert!(quiet && !local.is_registered(), "{path}: nobody was inside");
            claimer.resume();
        }
        // The session was not given up: who goes on is served again.
        let readable = owner.create_readable(Descriptor::new(storage(LEN, kind_for(path)).unwrap())).unwrap();
        claim(&mut claimer, "read", &readable.metadata().unwrap(), "");
        readable.wait(Some(STALL * 30)).unwrap();
        claimer.must("ended 30000");
    });
}

#[test]
fn a_claimer_that_is_stopped_in_mid_transfer_ends_the_passive_side_and_writes_nothing_later() {
    let test = "a_claimer_that_is_stopped_in_mid_transfer_ends_the_passive_side_and_writes_nothing_later";
    let _watchdog = watch(test, Duration::from_secs(240));
    lanes(|path, lane| {
        let mut random = Random::new(60 + lane);
        let owner = owner(path);
        let mut claimer = claimer(path);
        for round in 0..ROUNDS {
            let memory = storage(LEN, kind_for(path)).unwrap();
            let writable = owner.create_writable(Descriptor::new(std::sync::Arc::clone(&memory))).unwrap();
            claim(&mut claimer, "write", &writable.metadata().unwrap(), &format!("at-once system {THEIRS}"));
            thread::sleep(random.micros(8000));
            claimer.stop();
            let ended = eventually(STALL * 10, || writable.status().is_final());
            assert!(ended, "{path} round {round}: {writable:?}");
            match writable.error() {
                None => claimer.resume(),
                Some(error) => {
                    assert_eq!(writable.status(), OperationStatus::Errored, "{path} round {round}: {error}");
                    assert_eq!(error.kind(), Kind::Timeout, "{path} round {round}: {error}");
                    let quiet = writable.quiet();
                    // A direct copy that was stopped inside the memory keeps it parked; everything else is over.
                    assert!(quiet || is_direct(&known(path)), "{path} round {round}");
                    let mine = Stamp::new(95, round);
                    // Of a claimer that was stopped with its work done, only the word of it is missing.
                    let done = quiet && {
                        let mut bytes = vec![0; LEN];
                        memory.read_at(0, &mut bytes).unwrap();
                        bytes.iter().all(|byte| *byte == THEIRS)
                    };
                    if quiet {
                        mine.fill_storage(&memory).unwrap();
                    }
                    claimer.resume();
                    assert!(eventually(STALL * 10, || writable.quiet()), "{path} round {round}");
                    if quiet {
                        let ended = claimer.ask("ended 30000");
                        assert!(
                            ended.is_err() || done,
                            "{path} round {round}: it takes its bytes to be there"
                        );
                        mine.verify_storage(&memory, 0, LEN)
                            .unwrap_or_else(|wrong| panic!("{path} round {round}: {wrong}"));
                    }
                }
            }
        }
    });
}

#[test]
fn a_claimer_that_is_killed_in_mid_transfer_leaves_the_passive_side_errored() {
    let test = "a_claimer_that_is_killed_in_mid_transfer_leaves_the_passive_side_errored";
    let _watchdog = watch(test, Duration::from_secs(240));
    lanes(|path, lane| {
        let mut random = Random::new(70 + lane);
        let owner = owner(path);
        for round in 0..ROUNDS {
            let mut claimer = claimer(path);
            let readable =
                owner.create_readable(Descriptor::new(storage(LEN, kind_for(path)).unwrap())).unwrap();
            claim(&mut claimer, "read", &readable.metadata().unwrap(), "");
            thread::sleep(random.micros(8000));
            claimer.kill();
            let _ = readable.wait(Some(STALL * 10));
            assert!(readable.status().is_final() && readable.quiet(), "{path} round {round}: {readable:?}");
            if let Some(error) = readable.error() {
                assert_eq!(
                    (error.kind(), error.peer()),
                    (Kind::Disconnected, Some("claimer")),
                    "{path}: {error}"
                );
            }
        }
    });
}

/// A claimer that is only slow to answer, and whose owner waits longer than that, loses nothing.
#[test]
fn a_claimer_that_is_stopped_for_less_than_the_limit_goes_on() {
    let _watchdog =
        watch("a_claimer_that_is_stopped_for_less_than_the_limit_goes_on", Duration::from_secs(120));
    lanes(|path, _| {
        let limits = Limits { no_progress: STALL * 20, ..Limits::default() };
        let endpoint = Endpoint::options("owner").limits(limits).routing(routing(path)).open().unwrap();
        let owner = Connector::with_endpoint(endpoint);
        let mut claimer = claimer(path);
        let readable = owner.create_readable(Descriptor::new(storage(LEN, kind_for(path)).unwrap())).unwrap();
        claim(&mut claimer, "read", &readable.metadata().unwrap(), "");
        claimer.stop();
        assert!(stays(STALL, || readable.error().is_none()), "{path}: {readable:?}");
        claimer.resume();
        readable.wait(Some(STALL * 30)).unwrap();
        claimer.must("ended 30000");
    });
}
