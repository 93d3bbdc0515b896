//! What callers see of a transfer's end, and when.

#![allow(clippy::unwrap_used)]

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::{Access, Endpoint, Kind, Layout, Registered, Remote, Routing, SharedStorage, SystemStorage};

const WATCHDOG: Duration = Duration::from_secs(20);

#[test]
fn nobody_learns_of_the_end_before_the_local_memory_is_released() {
    let endpoint = Endpoint::open("both").unwrap();
    let region = endpoint.register(SystemStorage::new(4096).unwrap(), Access::READ).unwrap();
    let remote = endpoint.import(&region.ticket().unwrap()).unwrap();
    let local = endpoint.register(SystemStorage::new(4096).unwrap(), Access::NONE).unwrap();
    let (over, is_over) = channel();
    let (go_on, goes_on) = channel::<()>();
    let goes_on = Mutex::new(goes_on);
    let transfer = endpoint
        .read(&remote, &local)
        .by_workers(true)
        .then(Box::new(move |result, _| {
            over.send(result.clone()).unwrap();
            let _ = goes_on.lock().recv_timeout(WATCHDOG);
        }))
        .start()
        .unwrap();
    // The last unit has reported, and the one who counts it takes its time.
    is_over.recv_timeout(WATCHDOG).unwrap().unwrap();
    assert!(!transfer.is_done() && !transfer.quiet() && transfer.result().is_none());
    assert!(transfer.wait_for(Duration::from_millis(1)).is_none());
    local.into_storage_within(Duration::ZERO).expect("the transfer has let go of the memory");
    go_on.send(()).unwrap();
    transfer.wait().unwrap();
}

const BLOCKS: u64 = 4096;

/// Blocks of 64 bytes at an owner, and as many here, by that path.
fn blocks_over(
    path: &str,
) -> (Endpoint, Registered<SharedStorage>, Endpoint, Remote, Registered<SystemStorage>, Layout) {
    let layout = Layout::contiguous(64 * BLOCKS, 64).unwrap();
    let owner = Endpoint::open("owner").unwrap();
    let region =
        owner.register(SharedStorage::new(64 * BLOCKS as usize).unwrap(), Access::READ_WRITE).unwrap();
    for block in 0..BLOCKS {
        region.write_at(64 * block as usize, &[(block % 251) as u8; 64]).unwrap();
    }
    let user = Endpoint::open("user").unwrap();
    let routing = Routing::default().require(path).unwrap();
    let remote = user.import_with(&region.ticket().unwrap(), &routing).unwrap();
    let local = user.register(SystemStorage::new(64 * BLOCKS as usize).unwrap(), Access::NONE).unwrap();
    (owner, region, user, remote, local, layout)
}

#[test]
fn an_index_past_its_layout_is_the_calls_error_for_few_blocks_and_the_transfers_for_many() {
    for path in ["inproc", "unix", "tcp"] {
        let (_owner, _region, user, remote, local, layout) = blocks_over(path);
        let ours = [0u64, 1];
        let few = user.read(&remote, &local).blocks(&layout, &[0u64, BLOCKS], &layout, &ours).start();
        assert_eq!(few.unwrap_err().kind(), Kind::Invalid);

        let mut theirs: Vec<u64> = (0..BLOCKS).collect();
        theirs[77] = BLOCKS;
        let ours: Vec<u64> = (0..BLOCKS).collect();
        let many = user.read(&remote, &local).blocks(&layout, theirs, &layout, &ours).start().unwrap();
        assert_eq!(many.bytes(), 64 * BLOCKS);
        let error = many.wait().unwrap_err();
        assert_eq!((error.kind(), error.op()), (Kind::Invalid, "read"));
        assert!(error.message().contains("(at 77)"), "{error}");
        assert_eq!(many.failures().len(), 1);
        assert_eq!(many.failures()[0].blocks, 0..BLOCKS);
        let mut bytes = vec![1; 64 * BLOCKS as usize];
        local.read_at(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0), "{path}: no byte has moved");
    }
}

#[test]
fn lists_that_do_not_pair_are_the_calls_error_however_long_they_are() {
    let (_owner, _region, user, remote, local, layout) = blocks_over("unix");
    let (theirs, ours) = (vec![0u32; 4000], vec![0u32; 3999]);
    let started = user.read(&remote, &local).blocks(&layout, theirs, &layout, ours).start();
    assert_eq!(started.unwrap_err().kind(), Kind::Invalid);
    let past = user.read(&remote, &local).at(8, 0, 64 * BLOCKS).start();
    assert_eq!(past.unwrap_err().kind(), Kind::Invalid);
}

#[test]
fn blocks_that_a_worker_planned_arrive_where_the_lists_say() {
    for path in ["inproc", "unix", "tcp"] {
        let (_owner, _region, user, remote, local, layout) = blocks_over(path);
        let theirs: Vec<u32> = (0..BLOCKS as u32).rev().collect();
        let ours: std::sync::Arc<[u64]> = (0..BLOCKS).map(|block| block * 5 % BLOCKS).collect();
        let read = user.read(&remote, &local).blocks(&layout, theirs, &layout, ours).start().unwrap();
        // So short a wait leaves all of it to the workers.
        while read.wait_for(Duration::from_millis(50)).is_none() {}
        read.result().unwrap().unwrap();
        let mut bytes = vec![0; 64 * BLOCKS as usize];
        local.read_at(0, &mut bytes).unwrap();
        for pair in 0..BLOCKS {
            let (from, to) = (BLOCKS - 1 - pair, pair * 5 % BLOCKS);
            let found = &bytes[64 * to as usize..64 * to as usize + 64];
            assert_eq!(found, [(from % 251) as u8; 64], "{path}: block {to}");
        }
    }
}

#[test]
fn long_lists_of_spans_are_taken_as_they_are() {
    let (_owner, _region, user, remote, local, _) = blocks_over("unix");
    let spans: Vec<_> = (0..BLOCKS).map(|block| (64 * block, 64 * (BLOCKS - 1 - block), 64)).collect();
    user.read(&remote, &local).spans(spans).start().unwrap().wait().unwrap();
    let mut bytes = [0; 64];
    local.read_at(0, &mut bytes).unwrap();
    assert_eq!(bytes, [((BLOCKS - 1) % 251) as u8; 64]);
}

#[test]
fn a_remote_knows_when_its_owner_was_lost() {
    for path in ["unix", "tcp"] {
        let (owner, region, _user, remote, _local, _) = blocks_over(path);
        assert!(remote.alive().is_ok() && remote.lost_at().is_none());
        let before = Instant::now();
        drop(region);
        owner.close().unwrap();
        let watchdog = before + WATCHDOG;
        while remote.lost_at().is_none() {
            assert!(Instant::now() < watchdog, "{path}: the owner's end is not noticed");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(remote.lost_at().unwrap() >= before && remote.alive().is_err());
    }
}
