//! Requests that make no sense, or that the ticket does not allow.

use towline::{Access, Endpoint, Kind, Layout, MemoryDescription, SystemStorage};

use crate::bench::{Bench, outcome, refused};
use crate::oracle::Stamp;

const THEIRS: Stamp = Stamp { region: 1, generation: 1 };
const OURS: Stamp = Stamp { region: 2, generation: 1 };
const INVALID: &[Kind] = &[Kind::Invalid];

/// Nothing can be asked for, registered or named that has no bytes.
pub fn lengths_of_zero_are_refused(bench: &Bench) {
    let region = bench.region(4096, Access::READ_WRITE);
    let remote = bench.import(&region);
    let local = bench.local(4096);
    let user = &bench.user;
    refused(user.read(&remote, &local).at(0, 0, 0).start(), INVALID);
    refused(user.write(&remote, &local).at(4096, 0, 0).start(), INVALID);
    refused(user.read(&remote, &local).spans(&[]).start(), INVALID);
    refused(user.read(&remote, &local).spans(&[(0, 0, 8), (8, 8, 0)]).start(), INVALID);
    let pages = Layout::contiguous(4096, 64).unwrap();
    let none: [u32; 0] = [];
    refused(user.read(&remote, &local).blocks(&pages, &none, &pages, &none).start(), INVALID);
    refused(local.span(0, 0), INVALID);
    refused(SystemStorage::new(0), INVALID);
    refused(Layout::contiguous(0, 64), INVALID);
    refused(Layout::blocks(0, 0, 1, 1), INVALID);
}

/// Blocks pair one to one, and have one length.
pub fn unequal_lengths_and_counts_are_refused(bench: &Bench) {
    let region = bench.region(4096, Access::READ_WRITE);
    let remote = bench.import(&region);
    let local = bench.local(4096);
    let user = &bench.user;
    let (small, large) = (Layout::contiguous(4096, 64).unwrap(), Layout::contiguous(4096, 128).unwrap());
    refused(user.read(&remote, &local).blocks(&small, &[0u32], &large, &[0u32]).start(), INVALID);
    refused(user.read(&remote, &local).blocks(&small, &[0u32, 1], &small, &[0u32]).start(), INVALID);
    refused(user.write(&remote, &local).blocks(&small, &[0u64], &small, &[0u32, 1]).start(), INVALID);
    let longer = bench.local(4097);
    refused(user.read(&remote, &longer).start(), INVALID);
}

/// Offsets and indices past either end are refused before a byte moves, and the error names them.
pub fn offsets_and_indices_out_of_range_are_refused(bench: &Bench) {
    let region = bench.stamped(4096, Access::READ_WRITE, THEIRS);
    let remote = bench.import(&region);
    let local = bench.local_stamped(2048, OURS);
    let user = &bench.user;
    for (far, near, len) in [(0, 0, 2049), (4095, 0, 2), (0, 2047, 2), (u64::MAX, 0, 1), (0, u64::MAX, 1)] {
        refused(user.read(&remote, &local).at(far, near, len).start(), INVALID);
        refused(user.write(&remote, &local).spans(&[(0, 0, 8), (far, near, len)]).start(), INVALID);
    }
    let (theirs, ours) = (Layout::contiguous(4096, 64).unwrap(), Layout::contiguous(2048, 64).unwrap());
    let error =
        refused(user.read(&remote, &local).blocks(&theirs, &[1u32, 64], &ours, &[0u32, 1]).start(), INVALID);
    assert!(error.message().contains("64") && error.message().contains("remote"), "{error}");
    let error =
        refused(user.read(&remote, &local).blocks(&theirs, &[1u64, 2], &ours, &[0u64, 32]).start(), INVALID);
    assert!(error.message().contains("32") && error.message().contains("local"), "{error}");
    refused(user.write(&remote, &local).blocks(&theirs, &[u64::MAX], &ours, &[0u64]).start(), INVALID);
    // A layout that is larger than the region.
    let beyond = Layout::contiguous(8192, 64).unwrap();
    refused(user.read(&remote, &local).blocks(&beyond, &[64u32], &ours, &[0u32]).start(), INVALID);
    refused(user.read(&remote, &local).blocks(&theirs, &[0u32], &beyond, &[32u32]).start(), INVALID);
    refused(local.span(2000, 49), INVALID);
    region.check(THEIRS, 0, 4096).unwrap();
    OURS.verify_storage(local.storage(), 0, 2048).unwrap();
}

/// The local memory must be registered with the endpoint that is asked.
pub fn a_local_region_of_another_endpoint_is_refused(bench: &Bench) {
    let region = bench.region(64, Access::READ);
    let remote = bench.import(&region);
    let stranger = Endpoint::open("stranger").unwrap();
    let local = stranger.register(SystemStorage::new(64).unwrap(), Access::NONE).unwrap();
    refused(bench.user.read(&remote, &local).start(), INVALID);
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
