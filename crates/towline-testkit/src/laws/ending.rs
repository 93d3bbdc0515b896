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
    let region = bench.stamped(2 * MIB, Access::READ_WRITE, THEIRS);
    let remote = bench.import(&region);
    let local = bench.local(2 * MIB);
    outcome(bench.user.read(&remote, &local).start()).unwrap();
    outcome(bench.user.read(&remote, &local).at(0, 0, 64).start()).unwrap();
    let storage = local.into_storage().unwrap();
    THEIRS.verify_storage(&storage, 0, 2 * MIB).unwrap();
    assert_eq!(storage.size(), 2 * MIB);
    let before = bench.owner.stats().regions;
    region.deregister(STALL).unwrap();
    assert_eq!(bench.owner.stats().regions, before - 1);
    assert_eq!(bench.owner.stats().parked, 0);
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

/// The memory of a dropped registration stays until the transfer that uses it has ended, and goes then.
pub fn a_local_region_dropped_in_flight_stays_until_the_end(bench: &Bench) {
    let region = bench.stamped(LARGE, Access::READ_WRITE, THEIRS);
    let remote = bench.import(&region);
    for _ in 0..5 {
        let storage = bench.storage(LARGE);
        let watched = Arc::downgrade(&storage);
        let local = bench.user.register(storage, Access::NONE).unwrap();
        let transfer = bench.user.read(&remote, &local).start().unwrap();
        drop(local);
        if !transfer.is_done() {
            // Held by the transfer: what it writes goes into memory that nobody else has.
            if let Some(memory) = watched.upgrade() {
                assert_eq!(memory.size(), LARGE);
            }
        }
        match transfer.wait() {
            Ok(()) => {}
            Err(error) => assert_eq!(error.kind(), Kind::Stale, "{error}"),
        }
        assert!(eventually(STALL, || watched.strong_count() == 0), "the memory is freed once nobody uses it");
        assert!(eventually(STALL, || bench.user.stats().parked == (0, 0)));
    }
}

/// A transfer from a region that its owner drops ends, well or with `Stale`, and the owner's memory goes.
pub fn a_remote_region_dropped_in_flight_ends_the_transfer(bench: &Bench) {
    let local = bench.local(LARGE);
    for round in 0..5 {
        let stamp = Stamp::new(1, round);
        let region = bench.stamped(LARGE, Access::READ_WRITE, stamp);
        let remote = bench.import(&region);
        let transfer = if round % 2 == 0 {
            bench.user.read(&remote, &local).start().unwrap()
        } else {
            bench.user.write(&remote, &local).start().unwrap()
        };
        drop(region);
        match transfer.wait() {
            Ok(()) if round % 2 == 0 => stamp.verify_storage(local.storage(), 0, LARGE).unwrap(),
            Ok(()) => {}
            Err(error) => {
                assert!(matches!(error.kind(), Kind::Stale | Kind::Disconnected), "{error}");
            }
        }
        refused(outcome(bench.user.read(&remote, &local).start()), &[Kind::Stale, Kind::Disconnected]);
        assert!(eventually(STALL, || bench.owner.stats().parked == 0), "{:?}", bench.owner.stats());
        // The link may have been broken for it; the next import makes another.
        let next = bench.stamped(64, Access::READ_WRITE, stamp);
        outcome(bench.user.read(&bench.import(&next), &local).at(0, 0, 64).start()).unwrap();
    }
}

/// Once a cancelled transfer has ended, its buffer is the caller's again: nothing lands late.
pub fn a_cancelled_buffer_can_be_reused(bench: &Bench) {
    let region = bench.stamped(LARGE, Access::READ_WRITE, THEIRS);
    let remote = bench.import(&region);
    let local = bench.local(LARGE);
    let mut random = Random::new(5);
    for round in 0..20 {
        let transfer = bench.user.read(&remote, &local).start().unwrap();
        std::thread::sleep(random.micros(1500));
        transfer.cancel();
        let ended = transfer.wait_for(STALL).expect("a cancelled transfer ends");
        bench.settle(&transfer);
        let mine = Stamp::new(3, round);
        mine.fill_storage(local.storage()).unwrap();
        if let Err(error) = ended {
            assert_eq!(error.kind(), Kind::Canceled, "{error}");
        }
        // The next transfer uses another buffer over the same link: what was abandoned must not reach this one.
        let other = bench.local(4096);
        outcome(bench.user.read(&remote, &other).at(4096, 0, 4096).start()).unwrap();
        let mut bytes = [0; 4096];
        other.read_at(0, &mut bytes).unwrap();
        THEIRS.verify(4096, &bytes).unwrap();
        mine.verify_storage(local.storage(), 0, LARGE).unwrap();
    }
    region.check(THEIRS, 0, LARGE).unwrap();
}

/// A transfer that failed in part names the blocks that failed; the others are right.
pub fn blocks_that_failed_are_named_and_the_others_are_right(bench: &Bench) {
    const BLOCK: u64 = 64 << 10;
    let count = LARGE as u64 / BLOCK;
    let pages = Layout::contiguous(LARGE as u64, BLOCK).unwrap();
    let mut random = Random::new(6);
    let mut order: Vec<u32> = (0..count as u32).collect();
    random.shuffle(&mut order);
    let local = bench.local(LARGE);
    for round in 0..8 {
        let region = bench.stamped(LARGE, Access::READ_WRITE, THEIRS);
        let remote = bench.import(&region);
        OURS.fill_storage(local.storage()).unwrap();
        let transfer =
            bench.user.read(&remote, &local).blocks(&pages, &order, &pages, &order).start().unwrap();
        std::thread::sleep(random.micros(1500));
        if round % 2 == 0 {
            transfer.cancel();
        } else {
            region.deregister(STALL).unwrap();
        }
        let ended = transfer.wait_for(STALL * 2).expect("it ends");
        bench.settle(&transfer);
        let failures = transfer.failures();
        assert_eq!(ended.is_err(), !failures.is_empty(), "{ended:?} {failures:?}");
        let mut failed = vec![false; count as usize];
        for failure in &failures {
            assert!(failure.blocks.end <= count && !failure.blocks.is_empty(), "{failure:?}");
            for block in failure.blocks.clone() {
                failed[block as usize] = true;
            }
        }
        for (number, page) in order.iter().enumerate().filter(|(number, _)| !failed[*number]) {
            THEIRS
                .verify_storage(local.storage(), *page as usize * BLOCK as usize, BLOCK as usize)
                .unwrap_or_else(|wrong| panic!("block {number} did not fail: {wrong}"));
        }
    }
    // What is refused as a whole names every block.
    let region = bench.region(LARGE, Access::READ_WRITE);
    let remote = bench.import(&region);
    region.deregister(STALL).unwrap();
    if let Ok(transfer) = bench.user.read(&remote, &local).blocks(&pages, &order, &pages, &order).start() {
        refused(transfer.wait(), &[Kind::Stale]);
        let named: u64 = transfer.failures().iter().map(|f| f.blocks.end - f.blocks.start).sum();
        assert!(named >= count, "{:?}", transfer.failures());
    }
}

/// A transfer ends by its deadline, and is quiet then.
pub fn a_deadline_ends_a_transfer(bench: &Bench) {
    let region = bench.stamped(LARGE, Access::READ_WRITE, THEIRS);
    let remote = bench.import(&region);
    let local = bench.local(LARGE);
    for micros in [0, 10, 200, 1000, 5000] {
        let request = bench.user.read(&remote, &local).within(Duration::from_micros(micros));
        let transfer = request.start().unwrap();
        match transfer.wait_for(STALL).expect("it ends") {
            Ok(()) => THEIRS.verify_storage(local.storage(), 0, LARGE).unwrap(),
            Err(error) => assert_eq!(error.kind(), Kind::Timeout, "{error}"),
        }
        bench.settle(&transfer);
        OURS.fill_storage(local.storage()).unwrap();
        OURS.stays_in(local.storage(), LARGE, Duration::from_millis(2)).unwrap();
    }
    // A peer that stands still: only where bytes need its help does the deadline come.
    if let Owner::There(process) = &bench.owner {
        process.lock().stop();
        let transfer = bench.user.read(&remote, &local).within(Duration::from_millis(100)).start().unwrap();
        match transfer.wait_for(STALL).expect("it ends though its peer is stopped") {
            Ok(()) => THEIRS.verify_storage(local.storage(), 0, LARGE).unwrap(),
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
            OURS.fill_storage(local.storage()).unwrap();
            process.lock().resume();
        } else {
            process.lock().resume();
            bench.settle(&transfer);
            OURS.fill_storage(local.storage()).unwrap();
        }
        // What the peer sends now that it goes on must not land.
        let other = bench.stamped(64, Access::READ_WRITE, THEIRS);
        let target = bench.local(64);
        let read = || outcome(bench.user.read(&bench.user.import(&other.ticket())?, &target).start());
        assert!(eventually(STALL, || read().is_ok()), "{:?}", read());
        OURS.verify_storage(local.storage(), 0, LARGE).unwrap();
    }
}

/// A closed endpoint says so, however often it is closed.
pub fn closing_the_user_ends_its_use(bench: &Bench) {
    let user = options("leaving").routing(bench.routing.clone()).open().unwrap();
    let region = bench.stamped(LARGE, Access::READ_WRITE, THEIRS);
    let ticket = region.ticket();
    let remote = user.import(&ticket).unwrap();
    let local = user.register(bench.storage(LARGE), Access::READ).unwrap();
    let transfer = user.read(&remote, &local).start().unwrap();
    user.close().unwrap();
    user.close().unwrap();
    let ended = transfer.wait_for(STALL).expect("it ends");
    if let Err(error) = ended {
        assert!(matches!(error.kind(), Kind::Canceled | Kind::Stale | Kind::Disconnected), "{error}");
    }
    let closed = |result: towline::Result<()>| {
        let error = refused(result, &[Kind::Invalid]);
        assert!(error.message().contains("closed"), "{error}");
    };
    closed(outcome(user.read(&remote, &local).start()));
    closed(outcome(user.write(&remote, &local).start()));
    closed(outcome(user.fetch_add(&remote, 0, 1)));
    closed(outcome(user.notify(&remote, "hello")));
    closed(user.import(&ticket).map(drop));
    closed(user.receive(STALL).map(drop));
    let failed = user.register(SystemStorage::new(64).unwrap(), Access::READ).unwrap_err();
    assert_eq!(failed.storage.size(), 64, "the storage comes back");
    closed(Err(failed.error));
    assert_eq!(local.ticket().unwrap_err().kind(), Kind::Stale);
    assert_eq!(local.into_storage().unwrap().size(), LARGE);
    // The owner goes on serving others.
    outcome(bench.user.read(&bench.import(&region), &bench.local(64)).start()).unwrap();
}

/// What is in flight when its endpoint is closed ends then, whatever its peer does.
pub fn closing_the_user_does_not_wait_for_its_peer(bench: &Bench) {
    let Owner::There(process) = &bench.owner else { return };
    // Its own limits would end it far too late.
    let patient = Limits { no_progress: STALL * 20, total: STALL * 20, ..Limits::default() };
    let region = bench.stamped(LARGE, Access::READ_WRITE, THEIRS);
    // Once while the transfer is in flight, and once while it still waits for the peer to accept a connection.
    for connected in [true, false] {
        let user = options("leaving").limits(patient).routing(bench.routing.clone()).open().unwrap();
        let remote = user.import(&region.ticket()).unwrap();
        let local = user.register(bench.storage(LARGE), Access::NONE).unwrap();
        if connected {
            outcome(user.read(&remote, &local).start()).unwrap();
        }
        process.lock().stop();
        let transfer = user.read(&remote, &local).start().unwrap();
        if !connected {
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        // Only an engine that does not let go keeps the local memory in use, and then both say so.
        if let Err(error) = user.close_within(STALL) {
            assert_eq!(error.kind(), Kind::Timeout, "{error}");
            assert!(!transfer.quiet(), "{error}");
        }
        let ended = transfer.wait_for(STALL * 2);
        process.lock().resume();
        match ended.expect("it ends with its endpoint") {
            Ok(()) => THEIRS.verify_storage(local.storage(), 0, LARGE).unwrap(),
            Err(error) => assert!(matches!(error.kind(), Kind::Canceled | Kind::Stale), "{error}"),
        }
        bench.settle(&transfer);
        OURS.fill_storage(local.storage()).unwrap();
        outcome(bench.user.read(&bench.import(&region), &bench.local(64)).start()).unwrap();
        OURS.verify_storage(local.storage(), 0, LARGE).unwrap();
    }
}

/// When the owner closes, its peers get an error, and no bytes.
pub fn closing_the_owner_ends_everybodys_use(bench: &Bench) {
    let gone = &[Kind::Stale, Kind::Disconnected];
    let owner = Owner::open(bench.path, "leaving", bench.setting, "");
    let region = owner.register(LARGE, bench.kind(), Access::READ_WRITE).unwrap();
    region.fill(THEIRS);
    let ticket = region.ticket();
    let remote = bench.remote(&ticket);
    let local = bench.local(LARGE);
    let transfer = bench.user.read(&remote, &local).start().unwrap();
    owner.close();
    owner.close();
    match transfer.wait_for(STALL).expect("it ends") {
        Ok(()) => THEIRS.verify_storage(local.storage(), 0, LARGE).unwrap(),
        Err(error) => assert!(gone.contains(&error.kind()), "{error}"),
    }
    bench.settle(&transfer);
    OURS.fill_storage(local.storage()).unwrap();
    refused(outcome(bench.user.read(&remote, &local).start()), gone);
    refused(outcome(bench.user.read(&remote, &local).at(0, 0, 8).start()), gone);
    refused(outcome(bench.user.write(&remote, &local).at(0, 0, 8).start()), gone);
    if bench.has_words() {
        refused(outcome(bench.user.fetch_add(&remote, 0, 1)), gone);
    }
    refused(outcome(bench.user.notify(&remote, "hello")), gone);
    refused(bench.user.import(&ticket), gone);
    OURS.verify_storage(local.storage(), 0, LARGE).unwrap();
    assert_eq!(region.try_ticket().unwrap_err().kind, Kind::Stale);
    // The user goes on with others.
    let other = bench.region(64, Access::READ_WRITE);
    outcome(bench.user.read(&bench.import(&other), &bench.local(64)).start()).unwrap();
}

/// Reads, writes, bytes and failures are counted per peer and path.
pub fn what_was_moved_is_counted(bench: &Bench) {
    let region = bench.region(2 * MIB, Access::READ_WRITE);
    let remote = bench.import(&region);
    let local = bench.local(2 * MIB);
    let counted = || {
        let stats = bench.user.stats();
        let of_path = stats.paths.into_iter().find(|one| one.peer == "owner" && one.path == bench.path);
        of_path.map_or((0, 0, 0, 0, 0), |one| {
            (one.reads.0, one.reads.1, one.writes.0, one.writes.1, one.failures)
        })
    };
    assert_eq!(counted(), (0, 0, 0, 0, 0));
    outcome(bench.user.read(&remote, &local).start()).unwrap();
    outcome(bench.user.read(&remote, &local).at(0, 0, 64).start()).unwrap();
    outcome(bench.user.write(&remote, &local).at(0, 0, 100).start()).unwrap();
    assert_eq!(counted(), (2, 2 * MIB as u64 + 64, 1, 100, 0));
    region.deregister(STALL).unwrap();
    let _ = outcome(bench.user.read(&remote, &local).at(0, 0, 64).start());
    let _ = outcome(bench.user.write(&remote, &local).start());
    let (reads, _, writes, _, failures) = counted();
    assert_eq!((reads, writes), (2, 1));
    assert!(failures <= 2, "only what has started can have failed");
}
