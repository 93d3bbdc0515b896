//! Requests that make no sense, or that the ticket does not allow.

use towline::{Access, Endpoint, Kind, Layout, MemoryDescription, SystemStorage};

use crate::bench::{Bench, outcome, refused};
use crate::oracle::Stamp;

const THEIRS: Stamp = Stamp { region: 1, generation: 1 };
const OURS: Stamp = Stamp { region: 2, generation: 1 };
const INVALID: &[Kind] = &[Kind::Invalid];

/// Nothing can be asked for, registered or named that has no bytes: of no part.
pub fn lengths_of_zero_are_refused(bench: &Bench) {
    let user = &bench.user;
    let pages = Layout::contiguous(4096, 64).unwrap();
    let none: [u32; 0] = [];
    for count in bench.counts() {
        let parts = bench.parts_of(vec![4096; count], THEIRS);
        refused(user.read_parts(parts.last_as(|part| part.at(0, 0, 0))).start(), INVALID);
        refused(user.write_parts(parts.last_as(|part| part.at(4096, 0, 0))).start(), INVALID);
        // A worker may check the lists of a long request.
        refused(outcome(user.read_parts(parts.last_as(|part| part.spans(&[]))).start()), INVALID);
        let spans = parts.last_as(|part| part.spans(&[(0, 0, 8), (8, 8, 0)]));
        refused(outcome(user.read_parts(spans).start()), INVALID);
        let blocks = parts.last_as(|part| part.blocks(&pages, &none, &pages, &none));
        refused(outcome(user.read_parts(blocks).start()), INVALID);
        refused(parts.locals[0].span(0, 0), INVALID);
        if count == 1 {
            refused(parts.read().spans(&[]).start(), INVALID);
            refused(parts.read().spans(&[(0, 0, 8), (8, 8, 0)]).start(), INVALID);
            refused(parts.read().blocks(&pages, &none, &pages, &none).start(), INVALID);
        }
    }
    refused(SystemStorage::new(0), INVALID);
    refused(Layout::contiguous(0, 64), INVALID);
    refused(Layout::blocks(0, 0, 1, 1), INVALID);
}

/// Blocks pair one to one, and have one length.
pub fn unequal_lengths_and_counts_are_refused(bench: &Bench) {
    let user = &bench.user;
    let (small, large) = (Layout::contiguous(4096, 64).unwrap(), Layout::contiguous(4096, 128).unwrap());
    for count in bench.counts() {
        let mut parts = bench.parts_of(vec![4096; count], THEIRS);
        parts.fill_here(OURS);
        let of_two = parts.last_as(|part| part.blocks(&small, &[0u32], &large, &[0u32]));
        refused(outcome(user.read_parts(of_two).start()), INVALID);
        let fewer = parts.last_as(|part| part.blocks(&small, &[0u32, 1], &small, &[0u32]));
        refused(outcome(user.read_parts(fewer).start()), INVALID);
        let more = parts.last_as(|part| part.blocks(&small, &[0u64], &small, &[0u32, 1]));
        refused(outcome(user.write_parts(more).start()), INVALID);
        if count == 1 {
            refused(parts.read().blocks(&small, &[0u32], &large, &[0u32]).start(), INVALID);
            refused(parts.read().blocks(&small, &[0u32, 1], &small, &[0u32]).start(), INVALID);
            refused(parts.write().blocks(&small, &[0u64], &small, &[0u32, 1]).start(), INVALID);
        }
        parts.check_here(OURS).unwrap();
        parts.check_there(THEIRS).unwrap();
        parts.locals[count - 1] = bench.local(4097);
        refused(parts.read().start(), INVALID);
    }
}

/// Offsets and indices past either end are refused before a byte moves, and the error names them.
pub fn offsets_and_indices_out_of_range_are_refused(bench: &Bench) {
    let user = &bench.user;
    let (theirs, ours) = (Layout::contiguous(4096, 64).unwrap(), Layout::contiguous(2048, 64).unwrap());
    for count in bench.counts() {
        let mut parts = bench.parts_of(vec![4096; count], THEIRS);
        parts.lens = vec![2048; count];
        parts.locals = (0..count).map(|_| bench.local(2048)).collect();
        parts.fill_here(OURS);
        // Of one part the call says so; a worker may check the lists of a long request.
        let check = |started: towline::Result<towline::Transfer>| {
            refused(if count == 1 { started.map(drop) } else { outcome(started) }, INVALID)
        };
        for (far, near, len) in [(0, 0, 2049), (4095, 0, 2), (0, 2047, 2), (u64::MAX, 0, 1), (0, u64::MAX, 1)]
        {
            refused(user.read_parts(parts.last_as(|part| part.at(far, near, len))).start(), INVALID);
            let spans = [(0, 0, 8), (far, near, len)];
            check(user.write_parts(parts.last_as(|part| part.spans(&spans))).start());
        }
        let beyond = parts.last_as(|part| part.blocks(&theirs, &[1u32, 64], &ours, &[0u32, 1]));
        let error = check(user.read_parts(beyond).start());
        assert!(error.message().contains("64") && error.message().contains("remote"), "{error}");
        let beyond = parts.last_as(|part| part.blocks(&theirs, &[1u64, 2], &ours, &[0u64, 32]));
        let error = check(user.read_parts(beyond).start());
        assert!(error.message().contains("32") && error.message().contains("local"), "{error}");
        let beyond = parts.last_as(|part| part.blocks(&theirs, &[u64::MAX], &ours, &[0u64]));
        check(user.write_parts(beyond).start());
        // A layout that is larger than the region.
        let larger = Layout::contiguous(8192, 64).unwrap();
        let beyond = parts.last_as(|part| part.blocks(&larger, &[64u32], &ours, &[0u32]));
        check(user.read_parts(beyond).start());
        let beyond = parts.last_as(|part| part.blocks(&theirs, &[0u32], &larger, &[32u32]));
        check(user.read_parts(beyond).start());
        refused(parts.locals[0].span(2000, 49), INVALID);
        parts.check_here(OURS).unwrap();
        parts.check_there(THEIRS).unwrap();
    }
}

/// The local memory must be registered with the endpoint that is asked.
pub fn a_local_region_of_another_endpoint_is_refused(bench: &Bench) {
    let elsewhere = Endpoint::open("elsewhere").unwrap();
    for mut parts in bench.several(64, THEIRS) {
        parts.fill_here(OURS);
        let last = parts.count() - 1;
        let theirs = elsewhere.register(bench.storage(parts.lens[last]), Access::NONE).unwrap();
        OURS.of_part(last).fill_storage(theirs.storage()).unwrap();
        parts.locals[last] = theirs;
        refused(parts.read().start(), INVALID);
        parts.check_here(OURS).unwrap();
    }
}

/// A read needs the right to read, everything that changes bytes the right to write.
pub fn rights_that_the_ticket_lacks_are_refused(bench: &Bench) {
    const DENIED: &[Kind] = &[Kind::PermissionDenied];
    let local = bench.local(64);
    let user = &bench.user;
    for (access, reads, writes) in
        [(Access::NONE, false, false), (Access::READ, true, false), (Access::WRITE, false, true)]
    {
        let region = bench.stamped(64, access, THEIRS);
        let remote = bench.import(&region);
        assert_eq!(remote.access(), access);
        let read = outcome(user.read(&remote, &local).start());
        if reads {
            read.unwrap()
        } else {
            drop(refused(read, DENIED))
        }
        OURS.fill_storage(local.storage()).unwrap();
        let sum = (towline::ReduceOp::Sum, towline::Dtype::U64);
        for (acts, write) in [
            (true, outcome(user.fetch_add(&remote, 0, 1))),
            (true, outcome(user.compare_swap(&remote, 0, 0, 1))),
            (true, outcome(user.signal(&remote, 0, 1))),
            (true, outcome(user.reduce_into(&remote, &local, sum.0, sum.1).start())),
            (false, outcome(user.write(&remote, &local).start())),
        ] {
            if !writes {
                refused(write, DENIED);
            } else if acts && !bench.has_words() {
                refused(write, &[Kind::Unsupported]);
            } else {
                write.unwrap();
            }
        }
        if reads {
            refused(outcome(user.read(&remote, &local).signal(0, 1).start()), DENIED);
        }
        region.check(if writes { OURS } else { THEIRS }, 0, 64).unwrap();
        outcome(user.notify(&remote, "a message needs no right")).unwrap();
        bench.owner.receive(crate::bench::STALL).unwrap();
    }
}

/// A registration that fails gives the storage back.
pub fn a_refused_storage_comes_back(bench: &Bench) {
    let small = Endpoint::options("small").max_regions(2).open().unwrap();
    let storage = || SystemStorage::new(4096).unwrap();
    let _first = small.register(storage(), Access::READ).unwrap();
    let second = small.register(storage(), Access::READ).unwrap();
    let full = small.register(storage(), Access::READ).unwrap_err();
    assert_eq!((full.error.kind(), full.storage.size()), (Kind::Exhausted, 4096));
    // A batch is all or nothing.
    drop(second);
    let batch = small.register_many(vec![storage(), storage()], Access::READ).unwrap_err();
    assert_eq!((batch.error.kind(), batch.storage.len()), (Kind::Exhausted, 2));
    assert_eq!(small.stats().regions, 1);
    let again = small.register(batch.storage.into_iter().next().unwrap(), Access::READ).unwrap();
    assert!(again.is_registered());
    // And the endpoint of the bench was not disturbed.
    let region = bench.region(64, Access::READ);
    outcome(bench.user.read(&bench.import(&region), &bench.local(64)).start()).unwrap();
}
