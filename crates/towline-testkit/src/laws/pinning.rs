//! Regions that are pinned for a series of accesses: what that gives, and what the owner gets back when.

use std::thread;
use std::time::Duration;

use towline::{Access, Kind, Pinned, Span};

use super::counting::words_are_refused;
use crate::bench::{Bench, OwnerRegion, STALL, outcome, refused};
use crate::oracle::Stamp;
use crate::watchdog::eventually;

const MIB: usize = 1 << 20;
const THEIRS: Stamp = Stamp { region: 1, generation: 1 };
const OURS: Stamp = Stamp { region: 2, generation: 1 };

/// The region, pinned; `None` on a path that shares no memory.
fn pinned(bench: &Bench, region: &OwnerRegion<'_>) -> Option<Pinned> {
    bench.shares_memory().then(|| bench.import(region).pin().unwrap())
}

/// Bytes of any length go both ways, from and to slices and spans.
pub fn a_pinned_region_is_copied_both_ways(bench: &Bench) {
    let region = bench.stamped(2 * MIB, Access::READ_WRITE, THEIRS);
    let Some(pinned) = pinned(bench, &region) else { return };
    assert_eq!((pinned.len(), pinned.access()), (2 * MIB, Access::READ_WRITE));
    let local = bench.local_stamped(MIB, OURS);
    let span = local.span(0, MIB).unwrap();
    pinned.copy_from(MIB, &span).unwrap();
    region.check(THEIRS, 0, MIB).unwrap();
    assert!(region.take(MIB, MIB) == read(&span), "what was copied is there");
    pinned.copy_to(0, &span).unwrap();
    THEIRS.verify_storage(local.storage(), 0, MIB).unwrap();
    for (offset, len) in
        [(0, 8), (8, 8), (3, 8), (16, 1), (100, 0), (4095, 3), (64, 70_000), (2 * MIB - 8, 8)]
    {
        let bytes: Vec<u8> = (0..len).map(|index| (index * 7 + offset) as u8 | 1).collect();
        let before = (region.take(offset.saturating_sub(8), 8), offset >= 8);
        pinned.write_at(offset, &bytes).unwrap();
        assert!(region.take(offset, len) == bytes, "{len} bytes at {offset}");
        if before.1 {
            assert_eq!(region.take(offset - 8, 8), before.0, "what lies before {offset} is as it was");
        }
        let mut back = vec![0; len];
        pinned.read_at(offset, &mut back).unwrap();
        assert!(back == bytes, "{len} bytes at {offset}");
    }
    region.put(8, &7u64.to_ne_bytes());
    assert_eq!(pinned.load(8).unwrap(), 7);
    pinned.store(8, 9).unwrap();
    assert_eq!(region.word(8), 9);
    assert!(!pinned.is_stale());
}

fn read(span: &Span) -> Vec<u8> {
    let mut bytes = vec![0; span.len()];
    span.read_at(0, &mut bytes).unwrap();
    bytes
}

/// Atomics by a pinned handle and by requests over any path add up.
pub fn words_of_a_pinned_region_stay_atomic_over_all_paths(bench: &Bench) {
    if !bench.has_words() {
        return words_are_refused(bench);
    }
    const EACH: u64 = 200;
    let region = bench.region(64, Access::READ_WRITE);
    let Some(pinned) = &pinned(bench, &region) else { return };
    let remote = &bench.import(&region);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(move || {
                for _ in 0..EACH {
                    pinned.fetch_add(8, 1).unwrap();
                }
            });
            scope.spawn(move || {
                (0..EACH).for_each(|_| outcome(bench.user.fetch_add(remote, 8, 1)).unwrap());
            });
        }
    });
    assert_eq!(region.word(8), 4 * EACH);
    assert_eq!(pinned.compare_swap(8, 1, 5).unwrap(), 4 * EACH);
    assert_eq!(pinned.compare_swap(8, 4 * EACH, 5).unwrap(), 4 * EACH);
    assert_eq!((region.word(0), region.word(8), region.word(16)), (0, 5, 0));
}

/// The owner gets its memory back when the last holder has let go, on whichever thread, and not before.
pub fn a_pinned_region_is_given_back_only_when_it_is_let_go(bench: &Bench) {
    let region = bench.stamped(4096, Access::READ_WRITE, THEIRS);
    let Some(first) = pinned(bench, &region) else { return };
    let remote = bench.import(&region);
    // Made by a thread that has ended since.
    let second = thread::scope(|scope| scope.spawn(|| remote.pin()).join()).unwrap().unwrap();
    assert_eq!(region.deregister(Duration::ZERO).unwrap_err().kind, Kind::Timeout);
    assert!(first.is_stale() && second.is_stale());
    refused(remote.pin().map(drop), &[Kind::Stale]);
    refused(outcome(bench.user.read(&remote, &bench.local(64)).at(0, 0, 64).start()), &[Kind::Stale]);
    // What is still pinned is still there.
    let mut bytes = [0; 64];
    first.read_at(0, &mut bytes).unwrap();
    THEIRS.verify(0, &bytes).unwrap();
    drop(first);
    assert_eq!(region.deregister(Duration::from_millis(20)).unwrap_err().kind, Kind::Timeout);
    second.store(0, 1).unwrap();
    drop(remote);
    thread::scope(|scope| {
        scope.spawn(move || {
            // Late enough that the owner waits for it.
            thread::sleep(Duration::from_millis(20));
            drop(second);
        });
        region.deregister(STALL * 5).unwrap();
    });
    assert_eq!(bench.owner.stats().parked, 0);
}

/// A region that its owner drops stays until it is let go.
pub fn a_region_dropped_while_pinned_is_parked(bench: &Bench) {
    let region = bench.stamped(4096, Access::READ, THEIRS);
    let Some(pinned) = pinned(bench, &region) else { return };
    drop(region);
    assert_eq!(bench.owner.stats().parked, 1);
    assert!(pinned.is_stale());
    let mut bytes = [0; 4096];
    pinned.read_at(0, &mut bytes).unwrap();
    THEIRS.verify(0, &bytes).unwrap();
    drop(pinned);
    assert!(eventually(STALL, || bench.owner.stats().parked == 0), "freed once nobody holds it");
}

/// Offsets are those of the ticket, and neither its range nor its rights are left.
pub fn pinned_access_outside_the_range_or_the_rights_is_refused(bench: &Bench) {
    let region = bench.stamped(4096, Access::READ_WRITE, THEIRS);
    if !bench.shares_memory() {
        return;
    }
    let pin = |access, offset, len| {
        let ticket = region.ticket().narrow().range(offset, len).access(access).finish().unwrap();
        bench.remote(&ticket).pin().unwrap()
    };
    let part = pin(Access::READ_WRITE, 1024, 1024);
    assert_eq!(part.len(), 1024);
    let mut bytes = [0; 1024];
    part.read_at(0, &mut bytes).unwrap();
    THEIRS.verify(1024, &bytes).unwrap();
    let local = bench.local(4096);
    let span = |len| local.span(0, len).unwrap();
    for (offset, len) in [(1024, 1), (1017, 8), (0, 1025), (usize::MAX, 8), (usize::MAX - 7, 8)] {
        refused(part.read_at(offset, &mut vec![0; len]), &[Kind::Invalid]);
        refused(part.write_at(offset, &vec![1; len]), &[Kind::Invalid]);
        refused(part.copy_to(offset, &span(len)), &[Kind::Invalid]);
        refused(part.copy_from(offset, &span(len)), &[Kind::Invalid]);
    }
    for offset in [1024, 1020, 4, 1, usize::MAX, usize::MAX - 7] {
        refused(part.load(offset), &[Kind::Invalid]);
        refused(part.store(offset, 1), &[Kind::Invalid]);
        refused(part.fetch_add(offset, 1), &[Kind::Invalid]);
        refused(part.compare_swap(offset, 1, 2), &[Kind::Invalid]);
        refused(part.wake(offset), &[Kind::Invalid]);
    }
    let reader = pin(Access::READ, 0, 4096);
    reader.load(0).unwrap();
    reader.copy_to(0, &span(4096)).unwrap();
    refused(reader.write_at(0, &[1]), &[Kind::PermissionDenied]);
    refused(reader.copy_from(0, &span(8)), &[Kind::PermissionDenied]);
    refused(reader.store(0, 1), &[Kind::PermissionDenied]);
    refused(reader.fetch_add(0, 1), &[Kind::PermissionDenied]);
    refused(reader.compare_swap(0, 1, 2), &[Kind::PermissionDenied]);
    refused(reader.wake(0), &[Kind::PermissionDenied]);
    let writer = pin(Access::WRITE, 0, 4096);
    refused(writer.read_at(0, &mut [0]), &[Kind::PermissionDenied]);
    refused(writer.copy_to(0, &span(8)), &[Kind::PermissionDenied]);
    refused(writer.load(0), &[Kind::PermissionDenied]);
    writer.wake(0).unwrap();
    region.check(THEIRS, 0, 4096).unwrap();
}

/// Hundreds of regions of one owner are pinned at the same time, and copies go on beside them.
pub fn hundreds_of_regions_are_pinned_at_once(bench: &Bench) {
    let views = bench.owner.views(300, 64, 4096, bench.kind(), THEIRS);
    if !bench.shares_memory() {
        return;
    }
    let remotes: Vec<_> = views.tickets().iter().map(|ticket| bench.remote(ticket)).collect();
    let pinned: Vec<_> = remotes.iter().map(|remote| remote.pin().unwrap()).collect();
    for (number, pinned) in pinned.iter().enumerate() {
        let mut bytes = [0; 64];
        pinned.read_at(0, &mut bytes).unwrap();
        THEIRS.verify(number as u64 * 64, &bytes).unwrap();
    }
    outcome(bench.user.read(&remotes[299], &bench.local(4096)).start()).unwrap();
}

/// An endpoint that closes keeps what it has pinned until it lets go, and its owner waits for that.
pub fn closing_the_user_leaves_what_it_has_pinned_in_place(bench: &Bench) {
    let region = bench.stamped(4096, Access::READ_WRITE, THEIRS);
    let Some(pinned) = pinned(bench, &region) else { return };
    let remote = bench.import(&region);
    remote.alive().unwrap();
    bench.user.close().unwrap();
    let mut bytes = [0; 4096];
    pinned.read_at(0, &mut bytes).unwrap();
    THEIRS.verify(0, &bytes).unwrap();
    assert_eq!(region.deregister(Duration::from_millis(20)).unwrap_err().kind, Kind::Timeout);
    assert!(pinned.is_stale());
    drop(pinned);
    region.deregister(STALL).unwrap();
}

/// Where owner and user share no memory, pinning says so.
pub fn memory_that_is_not_shared_cannot_be_pinned(bench: &Bench) {
    if bench.shares_memory() {
        return;
    }
    let region = bench.region(64, Access::READ_WRITE);
    let remote = bench.import(&region);
    let error = refused(remote.pin(), &[Kind::Unsupported]);
    assert!(error.message().contains("shares its memory"), "{error}");
    remote.alive().unwrap();
    bench.owner.close();
    assert!(eventually(STALL, || remote.alive().is_err()), "a closed owner is known to be gone");
}
