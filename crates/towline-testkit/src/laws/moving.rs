//! Whole regions, spans, blocks, views; one at a time and many at once.

use std::thread;

use towline::{Access, Layout, Ticket};

use crate::bench::{Bench, outcome};
use crate::oracle::Stamp;
use crate::random::Random;

const MIB: usize = 1 << 20;
const THEIRS: Stamp = Stamp { region: 1, generation: 1 };
const OURS: Stamp = Stamp { region: 2, generation: 1 };

/// Without further words a transfer moves the whole local region.
pub fn a_whole_region_is_read_and_written(bench: &Bench) {
    for len in [1, 4096, 5 * MIB + 1] {
        let region = bench.stamped(len, Access::READ_WRITE, THEIRS);
        let remote = bench.import(&region);
        assert_eq!(
            (remote.len(), remote.access(), &**remote.peer()),
            (len as u64, Access::READ_WRITE, "owner")
        );
        let local = bench.local(len);
        outcome(bench.user.read(&remote, &local).start()).unwrap();
        THEIRS.verify_storage(local.storage(), 0, len).unwrap();
        OURS.fill_storage(local.storage()).unwrap();
        outcome(bench.user.write(&remote, &local).start()).unwrap();
        region.check(OURS, 0, len).unwrap();
    }
}

/// Several ranges in one request, in any order and of any length.
pub fn spans_are_read_and_written(bench: &Bench) {
    let len = 3 * MIB;
    let region = bench.stamped(len, Access::READ_WRITE, THEIRS);
    let remote = bench.import(&region);
    let local = bench.local(len);
    let mut random = Random::new(2);
    let mut spans = Vec::new();
    let mut at = 0;
    while at + 70_000 < len as u64 {
        let part = 1 + random.below(69_999);
        spans.push((at, at, part));
        at += part + random.below(100);
    }
    random.shuffle(&mut spans);
    OURS.fill_storage(local.storage()).unwrap();
    let transfer = bench.user.read(&remote, &local).spans(&spans).start().unwrap();
    transfer.wait().unwrap();
    assert_eq!(transfer.bytes(), spans.iter().map(|span| span.2).sum::<u64>());
    for (_, local_offset, part) in &spans {
        THEIRS.verify_storage(local.storage(), *local_offset as usize, *part as usize).unwrap();
    }
    let newer = Stamp::new(2, 2);
    newer.fill_storage(local.storage()).unwrap();
    outcome(bench.user.write(&remote, &local).spans(&spans).start()).unwrap();
    for (remote_offset, _, part) in &spans {
        region.check(newer, *remote_offset as usize, *part as usize).unwrap();
    }
}

/// Blocks by index arrays of both widths, with repeats on the side that is read.
pub fn blocks_with_random_indices_are_read_and_written(bench: &Bench) {
    const BLOCK: u64 = 1024;
    const COUNT: u64 = 2048;
    let region = bench.stamped((BLOCK * COUNT) as usize, Access::READ_WRITE, THEIRS);
    let remote = bench.import(&region);
    let theirs = Layout::contiguous(BLOCK * COUNT, BLOCK).unwrap();
    // Ours lie with gaps between them.
    let ours = Layout::blocks(64, BLOCK, COUNT, BLOCK + 128).unwrap();
    let local = bench.local(ours.extent() as usize);
    let mut random = Random::new(3);
    for count in [1, 37, COUNT as usize] {
        let from: Vec<u32> = (0..count).map(|_| random.below(COUNT) as u32).collect();
        let mut to: Vec<u64> = (0..COUNT).collect();
        random.shuffle(&mut to);
        to.truncate(count);
        outcome(bench.user.read(&remote, &local).blocks(&theirs, &from, &ours, &to).start()).unwrap();
        for (from, to) in from.iter().zip(&to) {
            let mut bytes = vec![0; BLOCK as usize];
            local.read_at(ours.offset(*to).unwrap() as usize, &mut bytes).unwrap();
            THEIRS.verify(u64::from(*from) * BLOCK, &bytes).unwrap();
        }
    }
    let mut to: Vec<u64> = (0..COUNT).collect();
    random.shuffle(&mut to);
    let from: Vec<u32> = (0..COUNT as u32).collect();
    for (index, place) in to.iter().enumerate() {
        let mut bytes = vec![0; BLOCK as usize];
        OURS.fill(place * BLOCK, &mut bytes);
        local.write_at(ours.offset(index as u64).unwrap() as usize, &bytes).unwrap();
    }
    outcome(bench.user.write(&remote, &local).blocks(&theirs, &to, &ours, &from).start()).unwrap();
    region.check(OURS, 0, (BLOCK * COUNT) as usize).unwrap();
}

/// The layout that the owner put into the ticket names its blocks here.
pub fn blocks_of_the_tickets_layout_are_read(bench: &Bench) {
    let region = bench.stamped(64 << 10, Access::READ_WRITE, THEIRS);
    let ticket = region.ticket_with_blocks(512, 256, 100, 512);
    let remote = bench.remote(&ticket);
    let layout = remote.layout().expect("the layout comes along").clone();
    assert_eq!((layout.base(), layout.block_len(), layout.block_count()), (512, 256, 100));
    let ours = Layout::contiguous(256 * 2, 256).unwrap();
    let local = bench.local(512);
    outcome(bench.user.read(&remote, &local).blocks(&layout, &[99u32, 3], &ours, &[0u32, 1]).start())
        .unwrap();
    for (slot, block) in [99, 3].into_iter().enumerate() {
        let mut bytes = [0; 256];
        local.read_at(slot * 256, &mut bytes).unwrap();
        THEIRS.verify(layout.offset(block).unwrap(), &bytes).unwrap();
    }
    // A part of the region has no layout: its blocks would be counted from elsewhere.
    let narrowed = bench.remote(&ticket.narrow().range(0, 4096).finish().unwrap());
    assert!(narrowed.layout().is_none());
}

/// A span of a local region stands for a region of its own.
pub fn parts_of_a_local_region_are_targets(bench: &Bench) {
    let region = bench.stamped(4096, Access::READ_WRITE, THEIRS);
    let remote = bench.import(&region);
    let local = bench.local_stamped(3 * 4096, OURS);
    let part = local.span(4096, 4096).unwrap();
    outcome(bench.user.read(&remote, &part).start()).unwrap();
    OURS.verify_storage(local.storage(), 0, 4096).unwrap();
    OURS.verify_storage(local.storage(), 8192, 4096).unwrap();
    let mut bytes = vec![0; 4096];
    local.read_at(4096, &mut bytes).unwrap();
    THEIRS.verify(0, &bytes).unwrap();
    assert!(bench.user.read(&remote, &part).at(0, 8, 4096).start().is_err());
    assert!(part.span(4000, 97).is_err());
}

/// Nothing is lost or mixed up when many transfers are started before the first is waited for.
pub fn many_transfers_are_in_flight_at_once(bench: &Bench) {
    const PART: usize = 128 << 10;
    const COUNT: usize = 48;
    let region = bench.stamped(PART * COUNT, Access::READ_WRITE, THEIRS);
    let remote = bench.import(&region);
    let local = bench.local(PART * COUNT);
    let start = |number: usize| {
        let at = (number * PART) as u64;
        bench.user.read(&remote, &local).at(at, at, PART as u64).start().unwrap()
    };
    let transfers: Vec<_> = (0..COUNT).map(start).collect();
    for transfer in transfers.iter().rev() {
        transfer.wait().unwrap();
    }
    THEIRS.verify_storage(local.storage(), 0, PART * COUNT).unwrap();
    // Large ones too, both ways at once.
    let other = bench.region(5 * MIB, Access::READ_WRITE);
    let far = bench.import(&other);
    let near = bench.local_stamped(5 * MIB, OURS);
    let mut transfers = Vec::new();
    for _ in 0..4 {
        transfers.push(bench.user.read(&remote, &local).start().unwrap());
        transfers.push(bench.user.write(&far, &near).start().unwrap());
    }
    transfers.iter().for_each(|transfer| transfer.wait().unwrap());
    THEIRS.verify_storage(local.storage(), 0, PART * COUNT).unwrap();
    other.check(OURS, 0, 5 * MIB).unwrap();
}

/// A remote is used by several threads at once.
pub fn threads_share_a_remote(bench: &Bench) {
    let len = MIB + 4096;
    let region = bench.stamped(4 * len, Access::READ_WRITE, THEIRS);
    let remote = &bench.import(&region);
    thread::scope(|scope| {
        for number in 0..4u16 {
            scope.spawn(move || {
                let start = usize::from(number) * len;
                let local = bench.local(len);
                for round in 0..6 {
                    let part = if round % 2 == 0 { len } else { 4096 };
                    let stamp = Stamp::new(10 + number, round);
                    stamp.fill_storage(local.storage()).unwrap();
                    let at = start as u64;
                    outcome(bench.user.write(remote, &local).at(at, 0, part as u64).start()).unwrap();
                    Stamp::new(9, 9).fill_storage(local.storage()).unwrap();
                    outcome(bench.user.read(remote, &local).at(at, 0, part as u64).start()).unwrap();
                    stamp.verify_storage(local.storage(), 0, part).unwrap();
                }
            });
        }
    });
}

/// Overlapping and repeated registrations of one allocation are legal, and each is a region of its own.
pub fn three_hundred_overlapping_views_of_one_allocation_are_read(bench: &Bench) {
    const VIEWS: usize = 300;
    const STEP: usize = 192;
    const LEN: usize = 4096;
    let views = bench.owner.views(VIEWS, STEP, LEN, bench.kind(), THEIRS);
    let tickets: Vec<Ticket> = views.tickets();
    let remotes = bench.user.import_many(&tickets).unwrap();
    let local = bench.local(LEN);
    for (number, remote) in remotes.into_iter().enumerate() {
        let remote = remote.unwrap();
        assert_eq!(remote.path(), bench.path, "view {number}: {}", remote.explain());
        outcome(bench.user.read(&remote, &local).start()).unwrap();
        let mut bytes = vec![0; LEN];
        local.read_at(0, &mut bytes).unwrap();
        THEIRS.verify((number * STEP) as u64, &bytes).unwrap();
    }
}
