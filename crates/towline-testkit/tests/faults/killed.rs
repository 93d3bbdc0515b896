//! `kill -9` at random moments of a transfer.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use towline::{Access, Ticket};
use towline_testkit::bench::{outcome, routing};
use towline_testkit::oracle::Stamp;
use towline_testkit::paths::required;
use towline_testkit::process::Process;
use towline_testkit::random::Random;
use towline_testkit::watchdog::{eventually, watch};
use towline_testkit::worker::storage;

use super::{Bystander, GONE, MIB, STALL, endpoint, kind_for, lanes, local};

/// Over four lanes: more than fifty.
const ROUNDS: u16 = 13;
const LEN: usize = 16 * MIB;

#[test]
fn a_killed_owner_ends_its_peers_transfers_in_time_and_quietly() {
    let _watchdog =
        watch("a_killed_owner_ends_its_peers_transfers_in_time_and_quietly", Duration::from_secs(180));
    lanes(|path, lane| {
        let mut random = Random::new(10 + lane);
        let user = endpoint("user");
        let mut bystander = Bystander::open("bystander");
        let buffers = [local(&user, LEN), local(&user, LEN)];
        for round in 0..ROUNDS {
            let stamp = Stamp::new(lane as u16, round);
            let mut owner = Process::open("victim", "");
            owner.must(&format!("register {LEN} {} read+write", kind_for(path)));
            owner.must(&format!("fill 1 {} {}", stamp.region, stamp.generation));
            let ticket: Ticket = owner.must("ticket 1").text(0).parse().unwrap();
            let remote = user.import_with(&ticket, &routing(path)).unwrap();
            assert_eq!(remote.path(), path);
            let write = round % 3 == 2;
            let start = |buffer| match write {
                true => user.write(&remote, buffer).start(),
                false => user.read(&remote, buffer).start(),
            };
            let transfers = [start(&buffers[0]), start(&buffers[1])];
            thread::sleep(random.micros(4000));
            owner.kill_without_waiting();
            for (transfer, buffer) in transfers.iter().zip(&buffers) {
                let transfer = transfer.as_ref().expect("the owner was alive");
                let ended =
                    transfer.wait_for(STALL * 10).unwrap_or_else(|| panic!("{path} round {round}: no end"));
                match ended {
                    Ok(()) if !write => stamp.verify_storage(buffer.storage(), 0, LEN).unwrap(),
                    Ok(()) => {}
                    Err(error) => assert!(GONE.contains(&error.kind()), "{path} round {round}: {error}"),
                }
            }
            // Quiet: whatever is put there now stays.
            let mine = Stamp::new(99, round);
            buffers.iter().for_each(|buffer| mine.fill_storage(buffer.storage()).unwrap());
            let dead = eventually(STALL * 10, || {
                outcome(user.read(&remote, &buffers[0]).at(0, 0, 8).start()).is_err()
            });
            assert!(dead, "{path} round {round}: a dead owner still gives bytes");
            // A probe that was still served has changed its eight bytes.
            mine.fill_storage(buffers[0].storage()).unwrap();
            bystander.serves(&user, path);
            buffers.iter().for_each(|buffer| mine.verify_storage(buffer.storage(), 0, LEN).unwrap());
            owner.kill();
            let error = user.import_with(&ticket, &routing(path)).unwrap_err();
            assert!(GONE.contains(&error.kind()), "{path} round {round}: {error}");
        }
    });
}

#[test]
fn a_killed_user_leaves_the_owner_serving_and_its_memory_its_own() {
    let _watchdog =
        watch("a_killed_user_leaves_the_owner_serving_and_its_memory_its_own", Duration::from_secs(180));
    lanes(|path, lane| {
        let mut random = Random::new(20 + lane);
        let owner = endpoint("owner");
        let mut other = Process::open("other", "");
        other.must(&format!("register {MIB} system none"));
        for round in 0..ROUNDS {
            let stamp = Stamp::new(lane as u16, round);
            let memory = storage(LEN, kind_for(path)).unwrap();
            stamp.fill_storage(&memory).unwrap();
            let watched = Arc::downgrade(&memory);
            let region = owner.register(memory, Access::READ_WRITE).unwrap();
            let ticket = region.ticket().unwrap();

            let mut user = Process::open("victim", "");
            user.must(&format!("register {LEN} system none"));
            user.must("fill 1 98 98");
            let paths = required(path).join(",");
            let imported = user.must(&format!("import {ticket} {paths}"));
            assert_eq!(imported.text(1), path);
            let op = if round % 2 == 0 { "write" } else { "read" };
            user.must(&format!("loop {op} {} 1 {LEN}", imported.number(0)));
            let remote = other.must(&format!("import {ticket} {paths}")).number(0);
            thread::sleep(random.micros(8000));
            user.kill_without_waiting();
            // Others are served while the dead one is still being buried.
            other.must(&format!("read {remote} 1 0 0 {MIB}"));
            other.must(&format!("forget {remote}"));
            if round % 4 == 3 {
                // Dropped: parked where it must be, and freed once the dead one's copies are over.
                drop(region);
                let freed =
                    eventually(STALL * 10, || watched.strong_count() == 0 && owner.stats().parked == (0, 0));
                assert!(freed, "{path} round {round}: {:?}", owner.stats());
                continue;
            }
            let memory = region
                .into_storage_within(STALL * 10)
                .unwrap_or_else(|pinned| panic!("{path} round {round}: {}", pinned.error));
            // Nothing is written late: not by the dead one either.
            let mine = Stamp::new(97, round);
            mine.fill_storage(&memory).unwrap();
            user.kill();
            thread::sleep(random.micros(2000));
            mine.verify_storage(&memory, 0, LEN)
                .unwrap_or_else(|wrong| panic!("{path} round {round}: {wrong}"));
        }
        assert_eq!(owner.stats().regions, 0);
    });
}

/// A forked child has its parent's sockets, and a connection ends when nobody has it any more.
#[test]
fn an_owner_that_is_killed_is_noticed_though_its_child_lives() {
    let test = "an_owner_that_is_killed_is_noticed_though_its_child_lives";
    let _watchdog = watch(test, Duration::from_secs(120));
    for (path, kind) in [("unix", towline::Kind::Stale), ("tcp", towline::Kind::Disconnected)] {
        let user = towline::Endpoint::open("user").unwrap();
        let mut owner = Process::open("victim", "");
        owner.must("register 4096 system read+write");
        let ticket: Ticket = owner.must("ticket 1").text(0).parse().unwrap();
        let remote = user.import_with(&ticket, &routing(path)).unwrap();
        let buffer = local(&user, 4096);
        let child = owner.must("leave-child").number(0) as i32;
        owner.stop();
        let long = Duration::from_secs(600);
        let transfer = user.read(&remote, &buffer).within(long).stall_within(long).start().unwrap();
        owner.kill_without_waiting();
        let ended = transfer.wait_for(Duration::from_secs(20));
        let _ = rustix::process::kill_process(
            rustix::process::Pid::from_raw(child).unwrap(),
            rustix::process::Signal::KILL,
        );
        let error = ended.unwrap_or_else(|| panic!("{path}: no end")).unwrap_err();
        assert_eq!(error.kind(), kind, "{path}: {error}");
    }
}
