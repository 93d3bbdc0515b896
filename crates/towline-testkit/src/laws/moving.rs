//! Whole regions, spans, blocks, views; one at a time and many at once.

use std::thread;

use towline::{Access, Layout, Part, Ticket};

use crate::bench::{Bench, COUNTS, OwnerRegion, Range, outcome};
use crate::oracle::Stamp;
use crate::random::Random;

const MIB: usize = 1 << 20;
const THEIRS: Stamp = Stamp { region: 1, generation: 1 };
const OURS: Stamp = Stamp { region: 2, generation: 1 };

/// Without further words a transfer moves the whole local region.
pub fn a_whole_region_is_read_and_written(bench: &Bench) {
    for len in [1, 4096, 5 * MIB + 1] {
        for parts in bench.several(len, THEIRS) {
            for (remote, len) in parts.remotes.iter().zip(&parts.lens) {
                assert_eq!(
                    (remote.len(), remote.access(), &**remote.peer()),
                    (*len as u64, Access::READ_WRITE, "owner")
                );
            }
            outcome(parts.read().start()).unwrap();
            parts.check_here(THEIRS).unwrap();
            parts.fill_here(OURS);
            outcome(parts.write().start()).unwrap();
            parts.check_there(OURS).unwrap();
            // Small regions are tried often enough elsewhere, however many there are.
            if len <= 4096 {
                break;
            }
        }
    }
}

/// Several ranges in one request, in any order and of any length.
pub fn spans_are_read_and_written(bench: &Bench) {
    for parts in bench.several(3 * MIB, THEIRS) {
        let mut random = Random::new(2);
        let longest = if parts.count() == 1 { 69_999 } else { 999 };
        let mut spans: Vec<Vec<Range>> = Vec::new();
        for len in &parts.lens {
            let mut of_part = Vec::new();
            let mut at = 0;
            while at + longest < *len as u64 {
                let part = 1 + random.below(longest);
                of_part.push((at, at, part));
                at += part + random.below(100);
            }
            random.shuffle(&mut of_part);
            spans.push(of_part);
        }
        let all = || parts.whole().zip(&spans).map(|(part, spans)| part.spans(spans));
        parts.fill_here(OURS);
        let transfer = bench.user.read_parts(all()).start().unwrap();
        transfer.wait().unwrap();
        assert_eq!(transfer.bytes(), spans.iter().flatten().map(|span| span.2).sum::<u64>());
        for (part, spans) in spans.iter().enumerate() {
            let (stamp, local) = (THEIRS.of_part(part), parts.locals[part].storage());
            for (_, at, len) in spans {
                stamp.verify_storage(local, *at as usize, *len as usize).unwrap();
            }
        }
        let newer = Stamp::new(2, 2);
        parts.fill_here(newer);
        outcome(bench.user.write_parts(all()).start()).unwrap();
        for (part, spans) in spans.iter().enumerate() {
            let region = &parts.regions[part];
            // Each check of a worker is an order to it.
            let checked = if parts.count() == 1 { spans.len() } else { 2 };
            for (at, _, len) in &spans[..checked.min(spans.len())] {
                region.check(newer.of_part(part), *at as usize, *len as usize).unwrap();
            }
        }
    }
}

/// Blocks by index arrays of both widths, with repeats on the side that is read.
pub fn blocks_with_random_indices_are_read_and_written(bench: &Bench) {
    const BLOCK: u64 = 1024;
    const BLOCKS: u64 = 2048;
    for count in bench.counts() {
        // Of many parts each has another number of blocks.
        let blocks = |part: usize| BLOCKS / (count * count) as u64 / 2 + 1 + part as u64 % 7;
        let blocks: Vec<u64> = if count == 1 { vec![BLOCKS] } else { (0..count).map(blocks).collect() };
        // Ours lie with gaps between them.
        let ours = |blocks| Layout::blocks(64, BLOCK, blocks, BLOCK + 128).unwrap();
        let theirs = |blocks| Layout::contiguous(BLOCK * blocks, BLOCK).unwrap();
        let lens = blocks.iter().map(|blocks| ours(*blocks).extent() as usize).collect();
        let parts = bench.parts_of(lens, THEIRS);
        let mut random = Random::new(3);
        let mut shuffled = |of: u64| {
            let mut all: Vec<u64> = (0..of).collect();
            random.shuffle(&mut all);
            all
        };
        for share in [BLOCKS, 50, 1] {
            let indices: Vec<(Vec<u32>, Vec<u64>)> = blocks
                .iter()
                .map(|blocks| {
                    let mut to = shuffled(*blocks);
                    to.truncate((blocks / share).max(1) as usize);
                    let mut random = Random::new(to[0]);
                    (to.iter().map(|_| random.below(*blocks) as u32).collect(), to)
                })
                .collect();
            let of_blocks =
                parts.whole().zip(&indices).zip(&blocks).map(|((part, (from, to)), blocks)| {
                    part.blocks(&theirs(*blocks), from, &ours(*blocks), to)
                });
            outcome(bench.user.read_parts(of_blocks).start()).unwrap();
            let mut bytes = vec![0; BLOCK as usize];
            for (part, (from, to)) in indices.iter().enumerate() {
                let ours = ours(blocks[part]);
                for (from, to) in from.iter().zip(to) {
                    parts.locals[part].read_at(ours.offset(*to).unwrap() as usize, &mut bytes).unwrap();
                    THEIRS.of_part(part).verify(u64::from(*from) * BLOCK, &bytes).unwrap();
                }
            }
        }
        let to: Vec<Vec<u64>> = blocks.iter().map(|blocks| shuffled(*blocks)).collect();
        let from: Vec<Vec<u32>> = blocks.iter().map(|blocks| (0..*blocks as u32).collect()).collect();
        let mut bytes = vec![0; BLOCK as usize];
        for (part, to) in to.iter().enumerate() {
            let ours = ours(blocks[part]);
            for (index, place) in to.iter().enumerate() {
                OURS.of_part(part).fill(place * BLOCK, &mut bytes);
                parts.locals[part].write_at(ours.offset(index as u64).unwrap() as usize, &bytes).unwrap();
            }
        }
        let of_blocks = parts.whole().enumerate().map(|(part, whole)| {
            whole.blocks(&theirs(blocks[part]), &to[part], &ours(blocks[part]), &from[part])
        });
        outcome(bench.user.write_parts(of_blocks).start()).unwrap();
        for (part, region) in parts.regions.iter().enumerate() {
            region.check(OURS.of_part(part), 0, (BLOCK * blocks[part]) as usize).unwrap();
        }
    }
}

/// The layout that the owner put into the ticket names its blocks here.
pub fn blocks_of_the_tickets_layout_are_read(bench: &Bench) {
    for count in bench.counts() {
        let mut parts = bench.parts_of(vec![(64 << 10) / count; count], THEIRS);
        // Each part has blocks of its own, all of one length.
        let (blocks, stride) = if count > 2 { (3, 264) } else { (100 / count as u64, 512) };
        let base = |part: usize| if count == 1 { 512 } else { part as u64 % 3 * 8 + 8 };
        let ticket = |(part, region): (usize, &OwnerRegion<'_>)| {
            region.ticket_with_blocks(base(part), 256, blocks, stride)
        };
        let tickets: Vec<_> = parts.regions.iter().enumerate().map(ticket).collect();
        parts.remotes = bench.user.import_many(&tickets).unwrap().into_iter().map(Result::unwrap).collect();
        let layouts: Vec<_> = parts.remotes.iter().map(|remote| remote.layout().cloned()).collect();
        let layouts: Vec<_> = layouts.into_iter().map(|layout| layout.expect("it comes along")).collect();
        for (part, layout) in layouts.iter().enumerate() {
            assert_eq!((layout.base(), layout.block_len(), layout.block_count()), (base(part), 256, blocks));
        }
        let ours = Layout::contiguous(256 * 2, 256).unwrap();
        let last = blocks as u32 - 1;
        let of_blocks = parts
            .whole()
            .zip(&layouts)
            .map(|(part, layout)| part.blocks(layout, vec![last, 1], &ours, vec![0u32, 1]));
        outcome(bench.user.read_parts(of_blocks).start()).unwrap();
        for (part, layout) in layouts.iter().enumerate() {
            for (slot, block) in [u64::from(last), 1].into_iter().enumerate() {
                let mut bytes = [0; 256];
                parts.locals[part].read_at(slot * 256, &mut bytes).unwrap();
                THEIRS.of_part(part).verify(layout.offset(block).unwrap(), &bytes).unwrap();
            }
        }
    }
    // A part of the region has no layout: its blocks would be counted from elsewhere.
    let region = bench.stamped(64 << 10, Access::READ_WRITE, THEIRS);
    let ticket = region.ticket_with_blocks(512, 256, 100, 512);
    assert!(bench.remote(&ticket).layout().is_some());
    let narrowed = bench.remote(&ticket.narrow().range(0, 4096).finish().unwrap());
    assert!(narrowed.layout().is_none());
}

/// A span of a local region stands for a region of its own.
pub fn parts_of_a_local_region_are_targets(bench: &Bench) {
    const LEN: usize = 512;
    for count in bench.counts() {
        let parts = bench.parts_of(vec![LEN; count], THEIRS);
        // Between them, and at both ends, lies what nobody asked for.
        let local = bench.local_stamped((2 * count + 1) * LEN, OURS);
        let spans: Vec<_> = (0..count).map(|part| local.span((2 * part + 1) * LEN, LEN).unwrap()).collect();
        let all = || parts.remotes.iter().zip(&spans).map(|(remote, span)| Part::new(remote, span));
        outcome(bench.user.read_parts(all()).start()).unwrap();
        let mut bytes = vec![0; LEN];
        for part in 0..=count {
            OURS.verify_storage(local.storage(), 2 * part * LEN, LEN).unwrap();
        }
        for (part, span) in spans.iter().enumerate() {
            local.read_at((2 * part + 1) * LEN, &mut bytes).unwrap();
            THEIRS.of_part(part).verify(0, &bytes).unwrap();
            assert!(span.span(LEN - 96, 97).is_err());
        }
        assert!(bench.user.read_parts(all().map(|part| part.at(0, 8, LEN as u64))).start().is_err());
    }
}

/// Nothing is lost or mixed up when many transfers are started before the first is waited for.
pub fn many_transfers_are_in_flight_at_once(bench: &Bench) {
    for parts in bench.several((128 << 10) * 48, THEIRS) {
        let (count, rounds) = if parts.count() == 1 { (48, 4) } else { (8, 2) };
        // Each takes its share of every part; the first also what is left over.
        let start = |number: u64| {
            let ranges = parts.ranges(|len| {
                let at = len % count + len / count * number;
                if number == 0 { (0, 0, at + len / count) } else { (at, at, len / count) }
            });
            parts.read_ranges(&ranges).start().unwrap()
        };
        let transfers: Vec<_> = (0..count).map(start).collect();
        for transfer in transfers.iter().rev() {
            transfer.wait().unwrap();
        }
        parts.check_here(THEIRS).unwrap();
        // Large ones too, both ways at once.
        let others = bench.parts(parts.count(), 5 * MIB / if parts.count() == 1 { 1 } else { 8 }, THEIRS);
        others.fill_here(OURS);
        let mut transfers = Vec::new();
        for _ in 0..rounds {
            transfers.push(parts.read().start().unwrap());
            transfers.push(others.write().start().unwrap());
        }
        transfers.iter().for_each(|transfer| transfer.wait().unwrap());
        parts.check_here(THEIRS).unwrap();
        others.check_there(OURS).unwrap();
    }
}

/// Remotes are used by several threads at once.
pub fn threads_share_a_remote(bench: &Bench) {
    for parts in bench.several(4 * (MIB + 4096), THEIRS) {
        let (remotes, rounds) = (&parts.remotes, if parts.count() == 1 { 6 } else { 2 });
        thread::scope(|scope| {
            for number in 0..4u16 {
                // Each thread has a quarter of every part, and memory of its own.
                let quarters = parts.ranges(|len| {
                    let len = len / 32 * 8;
                    (u64::from(number) * len, 0, len)
                });
                scope.spawn(move || {
                    let locals: Vec<_> =
                        quarters.iter().map(|(.., len)| bench.local(*len as usize)).collect();
                    let fill = |stamp: Stamp| {
                        for (part, local) in locals.iter().enumerate() {
                            stamp.of_part(part).fill_storage(local.storage()).unwrap();
                        }
                    };
                    for round in 0..rounds {
                        let moved = |len: u64| if round % 2 == 0 { len } else { 4096.min(len) };
                        let all = || {
                            let all = remotes.iter().zip(&locals).zip(&quarters);
                            all.map(|((remote, local), (at, near, len))| {
                                Part::new(remote, local).at(*at, *near, moved(*len))
                            })
                        };
                        let stamp = Stamp::new(10 + number, round);
                        fill(stamp);
                        outcome(bench.user.write_parts(all()).start()).unwrap();
                        fill(Stamp::new(9, 9));
                        outcome(bench.user.read_parts(all()).start()).unwrap();
                        for (part, local) in locals.iter().enumerate() {
                            let len = moved(quarters[part].2) as usize;
                            stamp.of_part(part).verify_storage(local.storage(), 0, len).unwrap();
                        }
                    }
                });
            }
        });
    }
}

/// Overlapping and repeated registrations of one allocation are legal, and each is a region of its own.
pub fn three_hundred_overlapping_views_of_one_allocation_are_read(bench: &Bench) {
    const VIEWS: usize = 300;
    const STEP: usize = 192;
    const LEN: usize = 4096;
    let views = bench.owner.views(VIEWS, STEP, LEN, bench.kind(), THEIRS);
    let tickets: Vec<Ticket> = views.tickets();
    let remotes = bench.user.import_many(&tickets).unwrap();
    let remotes: Vec<_> = remotes.into_iter().map(Result::unwrap).collect();
    for (number, remote) in remotes.iter().enumerate() {
        assert_eq!(remote.path(), bench.path, "view {number}: {}", remote.explain());
    }
    let locals: Vec<_> = (0..COUNTS[2]).map(|_| bench.local(LEN)).collect();
    let mut bytes = vec![0; LEN];
    let mut next = 0;
    while next < VIEWS {
        // So many of them at once, in turn; those of one request overlap.
        for count in bench.counts() {
            let views: Vec<_> = (next..VIEWS.min(next + count)).collect();
            if views.is_empty() {
                break;
            }
            let parts = views.iter().zip(&locals).map(|(view, local)| Part::new(&remotes[*view], local));
            outcome(bench.user.read_parts(parts).start()).unwrap();
            for (view, local) in views.iter().zip(&locals) {
                local.read_at(0, &mut bytes).unwrap();
                THEIRS.verify((view * STEP) as u64, &bytes).unwrap();
            }
            next += views.len();
        }
    }
}
