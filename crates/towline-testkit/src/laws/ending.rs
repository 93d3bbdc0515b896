//! How things end: storages given back, registrations dropped, transfers cancelled, endpoints closed.

use std::sync::Arc;
use std::time::Duration;

use towline::{Access, Kind, Layout, Limits, MemoryAccess, MemoryDescription, SystemStorage};

use crate::bench::{Bench, Owner, STALL, options, outcome, refused};
use crate::oracle::Stamp;
use crate::random::Random;
use crate::watchdog::eventually;

const MIB: usize = 1 << 20;
const LARGE: usize = 16 * MIB;
const THEIRS: Stamp = Stamp { region: 1, generation: 1 };
const OURS: Stamp = Stamp { region: 2, generation: 1 };

/// Deregistering gives the storage back with its bytes, on both sides.
pub fn storage_comes_back_after_transfers(bench: &Bench) {
    for mut parts in bench.several(2 * MIB, THEIRS) {
        outcome(parts.read().start()).unwrap();
        outcome(parts.read_ranges(&parts.ranges(|_| (0, 0, 8))).start()).unwrap();
        for (part, local) in parts.locals.drain(..).enumerate() {
            let storage = local.into_storage().unwrap();
            THEIRS.of_part(part).verify_storage(&storage, 0, parts.lens[part]).unwrap();
            assert_eq!(storage.size(), parts.lens[part]);
        }
        let before = bench.owner.stats().regions;
        for region in parts.regions.drain(..) {
            region.deregister(STALL).unwrap();
        }
        assert_eq!(bench.owner.stats().regions, before - parts.lens.len() as u64);
        assert_eq!(bench.owner.stats().parked, 0);
    }
}

/// A region outlives the closing of its endpoint, and still gives its storage back.
pub fn deregistering_again_after_closing_works(bench: &Bench) {
    let endpoint = options("closing").open().unwrap();
    let region = endpoint.register(SystemStorage::new(4096).unwrap(), Access::READ).unwrap();
    let other = endpoint.register(SystemStorage::new(4096).unwrap(), Access::READ).unwrap();
    endpoint.close().unwrap();
    endpoint.close().unwrap();
    assert!(!region.is_registered());
    assert_eq!(region.ticket().unwrap_err().kind(), Kind::Stale);
    region.write_at(0, b"still ours").unwrap();
    let storage = region.into_storage().unwrap();
    let mut bytes = [0; 10];
    storage.read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"still ours");
    drop(endpoint);
    drop(other);
    let region = bench.region(64, Access::READ_WRITE);
    outcome(bench.user.read(&bench.import(&region), &bench.local(64)).start()).unwrap();
}

/// The memory of dropped registrations stays until the transfer that uses it has ended, and goes then.
pub fn a_local_region_dropped_in_flight_stays_until_the_end(bench: &Bench) {
    for mut parts in bench.several(LARGE, THEIRS) {
        for _ in 0..if parts.count() == 1 { 3 } else { 2 } {
            let storages: Vec<_> = parts.lens.iter().map(|len| bench.storage(*len)).collect();
            let watched: Vec<_> = storages.iter().map(Arc::downgrade).collect();
            let register = |storage| bench.user.register(storage, Access::NONE).unwrap();
            parts.locals = storages.into_iter().map(register).collect();
            let transfer = parts.read().start().unwrap();
            parts.locals.clear();
            if !transfer.is_done() {
                // Held by the transfer: what it writes goes into memory that nobody else has.
                for (memory, len) in watched.iter().zip(&parts.lens) {
                    assert!(memory.upgrade().is_none_or(|memory| memory.size() == *len));
                }
            }
            match transfer.wait() {
                Ok(()) => {}
                Err(error) => assert_eq!(error.kind(), Kind::Stale, "{error}"),
            }
            let is_free = || watched.iter().all(|memory| memory.strong_count() == 0);
            assert!(eventually(STALL, is_free), "the memory is freed once nobody uses it");
            assert!(eventually(STALL, || bench.user.stats().parked == (0, 0)));
        }
    }
}

/// A transfer from regions of which the owner drops one, or all, ends, well or with `Stale`, and the owner's memory goes.
pub fn a_remote_region_dropped_in_flight_ends_the_transfer(bench: &Bench) {
    for (round, count, bytes) in [
        (0, 1, LARGE),
        (1, 1, LARGE),
        (2, 2, LARGE / 4),
        (3, 2, LARGE / 4),
        (4, 64, LARGE / 4),
        (5, 64, LARGE / 4),
    ] {
        let stamp = Stamp::new(1, round);
        let mut parts = bench.parts(count, bytes, stamp);
        let read = round % 2 == 0;
        let transfer = if read { parts.read() } else { parts.write() }.start().unwrap();
        // One of many goes, or one after the other.
        let all = round < 4;
        drop(parts.regions.pop());
        if all {
            parts.regions.clear();
        }
        match transfer.wait() {
            Ok(()) if read => parts.check_here(stamp).unwrap(),
            Ok(()) => {}
            Err(error) => {
                assert!(matches!(error.kind(), Kind::Stale | Kind::Disconnected), "{error}");
                if read {
                    parts.check_unfailed(&transfer, stamp).unwrap();
                }
            }
        }
        refused(outcome(parts.read().start()), &[Kind::Stale, Kind::Disconnected]);
        assert!(eventually(STALL, || bench.owner.stats().parked == 0), "{:?}", bench.owner.stats());
        // The link may have been broken for it; the next import makes another.
        let next = bench.stamped(64, Access::READ_WRITE, stamp);
        outcome(bench.user.read(&bench.import(&next), &bench.local(64)).start()).unwrap();
    }
}

/// Once a cancelled transfer has ended, its buffers are the caller's again: nothing lands late.
pub fn a_cancelled_buffer_can_be_reused(bench: &Bench) {
    let mut random = Random::new(5);
    for parts in bench.several(LARGE, THEIRS) {
        for round in 0..if parts.count() == 1 { 10 } else { 6 } {
            let transfer = parts.read().start().unwrap();
            std::thread::sleep(random.micros(if parts.count() == 1 { 1500 } else { 400 }));
            transfer.cancel();
            let ended = transfer.wait_for(STALL).expect("a cancelled transfer ends");
            bench.settle(&transfer);
            parts.check_unfailed(&transfer, THEIRS).unwrap();
            let mine = Stamp::new(3, round);
            parts.fill_here(mine);
            if let Err(error) = ended {
                assert_eq!(error.kind(), Kind::Canceled, "{error}");
            }
            // The next transfer uses another buffer over the same link: what was abandoned must not reach this one.
            let last = parts.count() - 1;
            let other = bench.local(4096);
            outcome(bench.user.read(&parts.remotes[last], &other).at(4096, 0, 4096).start()).unwrap();
            let mut bytes = [0; 4096];
            other.read_at(0, &mut bytes).unwrap();
            THEIRS.of_part(last).verify(4096, &bytes).unwrap();
            parts.check_here(mine).unwrap();
        }
        parts.check_there(THEIRS).unwrap();
    }
}

/// A transfer that failed in part names the blocks that failed, with their part; the others are right.
pub fn blocks_that_failed_are_named_and_the_others_are_right(bench: &Bench) {
    let mut random = Random::new(6);
    for (round, count) in [1, 1, 1, 1, 2, 2, 64, 64].into_iter().enumerate() {
        // Of every part as many blocks.
        let block = if count == 64 { 4 << 10 } else { 64 << 10 };
        let blocks = LARGE / if count == 1 { 1 } else { 4 } / count / block;
        let len = blocks * block;
        let pages = Layout::contiguous(len as u64, block as u64).unwrap();
        let mut order: Vec<u32> = (0..blocks as u32).collect();
        random.shuffle(&mut order);
        let mut parts = bench.parts_of(vec![len; count], THEIRS);
        parts.fill_here(OURS);
        let all = || bench.user.read_parts(parts.whole()).blocks(&pages, &order, &pages, &order).start();
        let transfer = all().unwrap();
        std::thread::sleep(random.micros(1500));
        if round % 2 == 0 {
            transfer.cancel();
        } else {
            parts.regions.pop().unwrap().deregister(STALL).unwrap();
        }
        let ended = transfer.wait_for(STALL * 2).expect("it ends");
        bench.settle(&transfer);
        let failures = transfer.failures();
        assert_eq!(ended.is_err(), !failures.is_empty(), "{ended:?} {failures:?}");
        let mut failed = vec![vec![false; blocks]; count];
        for failure in &failures {
            assert!(failure.blocks.end <= blocks as u64 && !failure.blocks.is_empty(), "{failure:?}");
            for block in failure.blocks.clone() {
                failed[failure.part][block as usize] = true;
            }
        }
        for (part, failed) in failed.iter().enumerate() {
            for (number, page) in order.iter().enumerate().filter(|(number, _)| !failed[*number]) {
                THEIRS
                    .of_part(part)
                    .verify_storage(parts.locals[part].storage(), *page as usize * block, block)
                    .unwrap_or_else(|wrong| {
                        panic!("block {number} of part {part} of {count} did not fail: {wrong}")
                    });
            }
        }
        if round % 2 == 0 {
            continue;
        }
        // What is refused as a whole names every block of what is stale.
        let all = || bench.user.read_parts(parts.whole()).blocks(&pages, &order, &pages, &order).start();
        if let Ok(transfer) = all() {
            refused(transfer.wait(), &[Kind::Stale]);
            let failures = transfer.failures();
            let of_last = failures.iter().filter(|failure| failure.part == count - 1);
            let named: u64 = of_last.map(|failure| failure.blocks.end - failure.blocks.start).sum();
            assert!(named >= blocks as u64, "{failures:?}");
        }
    }
}

/// A transfer ends by its deadline, and is quiet then.
pub fn a_deadline_ends_a_transfer(bench: &Bench) {
    for parts in bench.several(LARGE, THEIRS) {
        for micros in if parts.count() == 1 { [0, 200, 1000] } else { [0, 10, 200] } {
            let transfer = parts.read().within(Duration::from_micros(micros)).start().unwrap();
            match transfer.wait_for(STALL).expect("it ends") {
                Ok(()) => parts.check_here(THEIRS).unwrap(),
                Err(error) => assert_eq!(error.kind(), Kind::Timeout, "{error}"),
            }
            bench.settle(&transfer);
            parts.check_unfailed(&transfer, THEIRS).unwrap();
            parts.fill_here(OURS);
            parts.stays_here(OURS, Duration::from_millis(2)).unwrap();
        }
        // A peer that stands still: only where bytes need its help does the deadline come.
        if let Owner::There(process) = &bench.owner {
            process.lock().stop();
            let transfer = parts.read().within(Duration::from_millis(50)).start().unwrap();
            match transfer.wait_for(STALL).expect("it ends though its peer is stopped") {
                Ok(()) => parts.check_here(THEIRS).unwrap(),
                Err(error) => {
                    assert_eq!(error.kind(), Kind::Timeout, "{error}");
                    assert_eq!(
                        (error.op(), error.transport(), error.peer()),
                        ("read", Some(bench.path), Some("owner"))
                    );
                }
            }
            // An engine that cannot stop lets go when the peer goes on.
            if bench.properties.quiet_at_end {
                bench.settle(&transfer);
                parts.fill_here(OURS);
                process.lock().resume();
            } else {
                process.lock().resume();
                bench.settle(&transfer);
                parts.fill_here(OURS);
            }
            // What the peer sends now that it goes on must not land.
            let other = bench.stamped(64, Access::READ_WRITE, THEIRS);
            let target = bench.local(64);
            let read = || outcome(bench.user.read(&bench.user.import(&other.ticket())?, &target).start());
            assert!(eventually(STALL, || read().is_ok()), "{:?}", read());
            parts.check_here(OURS).unwrap();
        }
    }
}

/// A closed endpoint says so, however often it is closed.
pub fn closing_the_user_ends_its_use(bench: &Bench) {
    let user = options("leaving").routing(bench.routing.clone()).open().unwrap();
    let several: Vec<_> = bench.several_between((&bench.owner, &user), LARGE, THEIRS).collect();
    let lent = user.register(bench.storage(4096), Access::READ).unwrap();
    let transfers: Vec<_> = several.iter().map(|parts| parts.read().start().unwrap()).collect();
    user.close().unwrap();
    user.close().unwrap();
    for transfer in &transfers {
        let ended = transfer.wait_for(STALL).expect("it ends");
        if let Err(error) = ended {
            assert!(matches!(error.kind(), Kind::Canceled | Kind::Stale | Kind::Disconnected), "{error}");
        }
    }
    let closed = |result: towline::Result<()>| {
        let error = refused(result, &[Kind::Invalid]);
        assert!(error.message().contains("closed"), "{error}");
    };
    let (remote, ticket) = (&several[0].remotes[0], several[0].regions[0].ticket());
    for parts in &several {
        closed(outcome(parts.read().start()));
        closed(outcome(parts.write().start()));
    }
    closed(outcome(user.fetch_add(remote, 0, 1)));
    closed(outcome(user.notify(remote, "hello")));
    closed(user.import(&ticket).map(drop));
    closed(user.receive(STALL).map(drop));
    let failed = user.register(SystemStorage::new(64).unwrap(), Access::READ).unwrap_err();
    assert_eq!(failed.storage.size(), 64, "the storage comes back");
    closed(Err(failed.error));
    assert_eq!(lent.ticket().unwrap_err().kind(), Kind::Stale);
    assert_eq!(lent.into_storage().unwrap().size(), 4096);
    for mut parts in several {
        for (local, len) in parts.locals.drain(..).zip(&parts.lens) {
            assert_eq!(local.into_storage().unwrap().size(), *len);
        }
        // The owner goes on serving others.
        outcome(bench.user.read(&bench.import(&parts.regions[0]), &bench.local(64)).start()).unwrap();
    }
}

/// What is in flight when its endpoint is closed ends then, whatever its peer does.
pub fn closing_the_user_does_not_wait_for_its_peer(bench: &Bench) {
    let Owner::There(process) = &bench.owner else { return };
    // Its own limits would end it far too late.
    let patient = Limits { no_progress: STALL * 20, total: STALL * 20, ..Limits::default() };
    // Once while the transfers are in flight, and once while they still wait for the peer to accept a connection.
    for connected in [true, false] {
        let user = options("leaving").limits(patient).routing(bench.routing.clone()).open().unwrap();
        let several: Vec<_> = bench.several_between((&bench.owner, &user), LARGE, THEIRS).collect();
        if connected {
            outcome(several[0].read().start()).unwrap();
        }
        process.lock().stop();
        let transfers: Vec<_> = several.iter().map(|parts| parts.read().start().unwrap()).collect();
        if !connected {
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        // Only an engine that does not let go keeps the local memory in use, and then both say so.
        if let Err(error) = user.close_within(STALL) {
            assert_eq!(error.kind(), Kind::Timeout, "{error}");
            assert!(transfers.iter().any(|transfer| !transfer.quiet()), "{error}");
        }
        let ended: Vec<_> = transfers.iter().map(|transfer| transfer.wait_for(STALL * 2)).collect();
        process.lock().resume();
        for ((parts, transfer), ended) in several.iter().zip(&transfers).zip(ended) {
            match ended.expect("it ends with its endpoint") {
                Ok(()) => parts.check_here(THEIRS).unwrap(),
                Err(error) => assert!(matches!(error.kind(), Kind::Canceled | Kind::Stale), "{error}"),
            }
            bench.settle(transfer);
            parts.fill_here(OURS);
        }
        outcome(bench.user.read(&bench.import(&several[0].regions[0]), &bench.local(64)).start()).unwrap();
        several.iter().for_each(|parts| parts.check_here(OURS).unwrap());
    }
}

/// When the owner closes, its peers get an error, and no bytes.
pub fn closing_the_owner_ends_everybodys_use(bench: &Bench) {
    let gone = &[Kind::Stale, Kind::Disconnected];
    let owner = Owner::open(bench.path, "leaving", bench.setting, "");
    let several: Vec<_> = bench.several_between((&owner, &bench.user), LARGE, THEIRS).collect();
    let (remote, ticket) = (&several[0].remotes[0], several[0].regions[0].ticket());
    let transfers: Vec<_> = several.iter().map(|parts| parts.read().start().unwrap()).collect();
    owner.close();
    owner.close();
    for (parts, transfer) in several.iter().zip(&transfers) {
        match transfer.wait_for(STALL).expect("it ends") {
            Ok(()) => parts.check_here(THEIRS).unwrap(),
            Err(error) => assert!(gone.contains(&error.kind()), "{error}"),
        }
        bench.settle(transfer);
        parts.check_unfailed(transfer, THEIRS).unwrap();
        parts.fill_here(OURS);
        let small = parts.ranges(|_| (0, 0, 8));
        refused(outcome(parts.read().start()), gone);
        refused(outcome(parts.read_ranges(&small).start()), gone);
        refused(outcome(parts.write_ranges(&small).start()), gone);
    }
    if bench.has_words() {
        refused(outcome(bench.user.fetch_add(remote, 0, 1)), gone);
    }
    refused(outcome(bench.user.notify(remote, "hello")), gone);
    refused(bench.user.import(&ticket), gone);
    several.iter().for_each(|parts| parts.check_here(OURS).unwrap());
    assert_eq!(several[0].regions[0].try_ticket().unwrap_err().kind, Kind::Stale);
    // The user goes on with others.
    let other = bench.region(64, Access::READ_WRITE);
    outcome(bench.user.read(&bench.import(&other), &bench.local(64)).start()).unwrap();
}

/// Reads, writes, bytes and failures are counted per peer and path: a request once, however many parts it has.
pub fn what_was_moved_is_counted(bench: &Bench) {
    let counted = || {
        let stats = bench.user.stats();
        let of_path = stats.paths.into_iter().find(|one| one.peer == "owner" && one.path == bench.path);
        of_path.map_or((0, 0, 0, 0, 0), |one| {
            (one.reads.0, one.reads.1, one.writes.0, one.writes.1, one.failures)
        })
    };
    assert_eq!(counted(), (0, 0, 0, 0, 0));
    for mut parts in bench.several(2 * MIB, THEIRS) {
        let before = counted();
        let (small, smaller) = (parts.ranges(|_| (0, 0, 64)), parts.ranges(|_| (0, 0, 10)));
        outcome(parts.read().start()).unwrap();
        outcome(parts.read_ranges(&small).start()).unwrap();
        outcome(parts.write_ranges(&smaller).start()).unwrap();
        let now = counted();
        assert_eq!((now.0 - before.0, now.2 - before.2, now.4 - before.4), (2, 1, 0));
        let count = parts.count() as u64;
        assert_eq!((now.1 - before.1, now.3 - before.3), (parts.bytes() + 64 * count, 10 * count));
        parts.regions.pop().unwrap().deregister(STALL).unwrap();
        let _ = outcome(parts.read_ranges(&small).start());
        let _ = outcome(parts.write().start());
        let (reads, _, writes, _, failures) = counted();
        assert_eq!((reads, writes), (now.0, now.2));
        assert!(failures <= now.4 + 2, "only what has started can have failed");
    }
}
