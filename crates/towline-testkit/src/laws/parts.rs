//! Many regions of one peer in one transfer: one end, and one of everything else.

use std::thread;
use std::time::Duration;

use towline::{Access, Endpoint, Kind, Layout, Part, SystemStorage};

use crate::bench::{Bench, COUNTS, STALL, outcome, refused};
use crate::oracle::Stamp;
use crate::random::Random;

const MIB: usize = 1 << 20;

const THEIRS: Stamp = Stamp { region: 1, generation: 1 };
const OURS: Stamp = Stamp { region: 2, generation: 1 };

/// Laws 1 and 2 over parts: each has its own bytes, whatever its length and however many there are.
pub fn parts_of_many_regions_are_read_and_written(bench: &Bench) {
    for count in COUNTS {
        // By the calling thread, and by others.
        for bytes in [count * 64, 5 * MIB] {
            let parts = bench.parts(count, bytes, THEIRS);
            let transfer = bench.user.read_parts(parts.whole()).start().unwrap();
            transfer.wait().unwrap();
            assert_eq!((transfer.bytes(), transfer.path()), (parts.bytes(), bench.path));
            assert!(transfer.failures().is_empty());
            bench.settle(&transfer);
            parts.check_here(THEIRS).unwrap();
            parts.fill_here(OURS);
            outcome(bench.user.write_parts(parts.whole()).start()).unwrap();
            parts.check_there(OURS).unwrap();
        }
    }
}

/// Each part says what moves in it; what the request says goes for all of them.
pub fn parts_move_ranges_and_blocks(bench: &Bench) {
    const BLOCK: usize = 512;
    const BLOCKS: usize = 64;
    let pages = Layout::contiguous((BLOCK * BLOCKS) as u64, BLOCK as u64).unwrap();
    let mut random = Random::new(12);
    let mut from: Vec<u32> = (0..BLOCKS as u32).collect();
    random.shuffle(&mut from);
    for parts_count in COUNTS {
        let parts = bench.parts_of(vec![BLOCK * BLOCKS; parts_count], THEIRS);
        parts.fill_here(OURS);
        for count in [3, BLOCKS] {
            let (from, to) = (&from[..count], (0..count as u64).collect::<Vec<_>>());
            let request = bench.user.read_parts(parts.whole()).blocks(&pages, from, &pages, &to);
            let transfer = request.start().unwrap();
            transfer.wait().unwrap();
            assert_eq!(transfer.bytes(), (parts_count * count * BLOCK) as u64);
            for (part, local) in parts.locals.iter().enumerate() {
                for (at, block) in from.iter().enumerate() {
                    let mut bytes = vec![0; BLOCK];
                    local.read_at(at * BLOCK, &mut bytes).unwrap();
                    THEIRS.of_part(part).verify(u64::from(*block) * BLOCK as u64, &bytes).unwrap();
                }
                let left = (BLOCKS - count) * BLOCK;
                OURS.of_part(part).verify_storage(local.storage(), count * BLOCK, left).unwrap();
            }
            parts.fill_here(OURS);
        }
        // Law 3: nothing else changes.
        let spans = [(24u64, 512u64, 1000u64), (8192, 4096, 8)];
        let mixed = parts.whole().enumerate().map(|(number, part)| match number % 3 {
            0 => part.at(512, 1024, 100),
            1 => part.spans(&spans),
            _ => part.blocks(&pages, &[9u32], &pages, &[2u32]),
        });
        outcome(bench.user.write_parts(mixed).start()).unwrap();
        for (part, region) in parts.regions.iter().enumerate().take(24) {
            let theirs = THEIRS.of_part(part);
            let mut left = 0;
            let moved: &[(usize, usize)] = match part % 3 {
                0 => &[(512, 100)],
                1 => &[(24, 1000), (8192, 8)],
                _ => &[(9 * BLOCK, BLOCK)],
            };
            for (start, len) in moved {
                region.check(theirs, left, start - left).unwrap();
                left = start + len;
            }
            region.check(theirs, left, BLOCK * BLOCKS - left).unwrap();
            let (start, len) = moved[0];
            assert!(region.check(theirs, start, len).is_err(), "part {part} was written");
        }
    }
}

/// Law 9: a region may be in several parts, and what overlaps holds bytes of one of them.
pub fn parts_share_a_region_and_overlap(bench: &Bench) {
    for (count, len) in [(2, 64 << 10), (4, MIB), (64, 64 << 10)] {
        let region = bench.stamped(len, Access::READ_WRITE, THEIRS);
        let remote = bench.import(&region);
        let locals: Vec<_> = (0..count).map(|part| bench.local_stamped(len, OURS.of_part(part))).collect();
        let same = locals.iter().map(|local| Part::new(&remote, local));
        outcome(bench.user.read_parts(same).start()).unwrap();
        for local in &locals {
            THEIRS.verify_storage(local.storage(), 0, len).unwrap();
        }
        // One region here may be the target of several, too: of pieces in the opposite order.
        let piece = (len / count) as u64;
        let place = |part: usize| (part as u64 * piece, (count - 1 - part) as u64 * piece);
        let pieces = (0..count).map(|part| {
            let (far, near) = place(part);
            Part::new(&remote, &locals[0]).at(far, near, piece)
        });
        outcome(bench.user.read_parts(pieces).start()).unwrap();
        let mut bytes = vec![0; len];
        locals[0].read_at(0, &mut bytes).unwrap();
        for (far, near) in (0..count).map(place) {
            THEIRS.verify(far, &bytes[near as usize..(near + piece) as usize]).unwrap();
        }

        for (part, local) in locals.iter().enumerate() {
            OURS.of_part(part).fill_storage(local.storage()).unwrap();
        }
        let (wide, step) = (len as u64 / 4, len as u64 / 1024 * 8);
        let at = |part: usize| part as u64 * step;
        let overlapping = locals
            .iter()
            .enumerate()
            .map(|(part, local)| Part::new(&remote, local).at(at(part), at(part), wide));
        // With checksums a block whose bytes another one replaces may end as damaged.
        outcome(bench.user.write_parts(overlapping).checked(false).start()).unwrap();
        outcome(bench.user.read(&remote, &locals[0]).start()).unwrap();
        locals[0].read_at(0, &mut bytes).unwrap();
        // Of each byte, and not of each word: what comes over several connections may end anywhere.
        let written = (wide + at(count - 1)) as usize;
        for (index, word) in bytes[..written].chunks_exact(8).enumerate() {
            let offset = index as u64 * 8;
            let meant = (0..count).filter(|part| (at(*part)..at(*part) + wide).contains(&offset));
            let meant: Vec<_> = meant.map(|part| OURS.of_part(part).word(offset).to_ne_bytes()).collect();
            for (byte, found) in word.iter().enumerate() {
                assert!(
                    meant.iter().any(|word| word[byte] == *found),
                    "a byte that belongs to no part at {offset} + {byte}"
                );
            }
        }
        THEIRS.verify(written as u64, &bytes[written..]).unwrap();
    }
}

/// Law 2: one message, and one raised counter, behind the bytes of all parts.
pub fn what_follows_parts_follows_all_of_them(bench: &Bench) {
    for count in COUNTS {
        for bytes in [count * 64, 6 * MIB] {
            let parts = bench.parts(count, bytes, THEIRS);
            parts.fill_here(OURS);
            let message = (count as u64 ^ bytes as u64).to_le_bytes();
            let transfer = bench.user.write_parts(parts.whole()).notify(message).start().unwrap();
            assert_eq!(bench.owner.receive(STALL).unwrap().1, message);
            parts.check_there(OURS).unwrap();
            transfer.wait().unwrap();
            outcome(bench.user.read_parts(parts.whole()).notify("read").start()).unwrap();
            assert_eq!(bench.owner.receive(STALL).unwrap().1, b"read");
        }
    }
    if !bench.has_words() {
        return;
    }
    let parts = bench.parts(16, 4 * MIB, THEIRS);
    parts.fill_here(OURS);
    let words = bench.region(64, Access::READ_WRITE);
    let counter = bench.import(&words);
    let word = bench.local(8);
    for round in 1..=4 {
        let all = parts.whole().chain([Part::new(&counter, &word).at(32, 0, 8)]);
        let transfer = bench.user.write_parts(all).signal_in(16, 8, 1).start().unwrap();
        assert_eq!(words.wait_signal(8, round, STALL).unwrap(), round);
        parts.check_there(OURS).unwrap();
        transfer.wait().unwrap();
    }
    refused(bench.user.write_parts(parts.whole()).signal_in(16, 0, 1).start(), &[Kind::Invalid]);
}

/// Law 5: one stale part ends the whole and is named; nothing follows, and parts that did not fail are right.
pub fn a_stale_part_ends_the_whole_and_is_named(bench: &Bench) {
    for (count, bytes) in [(2, 128), (64, 4096), (2, 4 * MIB), (64, 6 * MIB)] {
        let mut parts = bench.parts(count, bytes, THEIRS);
        let stale = count / 2;
        parts.regions.remove(stale).deregister(STALL).unwrap();
        let name = format!("part {stale} of {count}");
        for _ in 0..2 {
            parts.fill_here(OURS);
            let transfer = bench.user.read_parts(parts.whole()).notify("never").start().unwrap();
            let error = refused(transfer.wait(), &[Kind::Stale]);
            assert!(error.message().contains(&name), "{error}");
            bench.settle(&transfer);
            let failures = transfer.failures();
            let failed = |part: usize| failures.iter().any(|failure| failure.part == part);
            assert!(failed(stale), "{failures:?}");
            for failure in &failures {
                let kind = if failure.part == stale { Kind::Stale } else { Kind::Canceled };
                assert_eq!(failure.error.kind(), kind, "{failure:?}");
            }
            parts.check_unfailed(&transfer, THEIRS).unwrap();
            OURS.of_part(stale).verify_storage(parts.locals[stale].storage(), 0, parts.lens[stale]).unwrap();
        }
        parts.fill_here(OURS);
        let error =
            refused(outcome(bench.user.write_parts(parts.whole()).notify("never").start()), &[Kind::Stale]);
        assert!(error.message().contains(&name), "{error}");
        // The first message that comes is one that was sent.
        outcome(bench.user.notify(&parts.remotes[0], "after")).unwrap();
        assert_eq!(bench.owner.receive(STALL).unwrap().1, b"after");
    }
}

/// Law 6: what is wrong with one part is refused before a byte of any moves, and the error names it.
pub fn a_wrong_part_is_refused_before_a_byte_of_any_moves(bench: &Bench) {
    let parts = bench.parts(3, 64 << 10, THEIRS);
    let len = parts.lens[1] as u64;
    let narrow = bench.remote(&parts.regions[1].ticket().narrow().access(Access::READ).finish().unwrap());
    let out_of_range = parts.whole().enumerate().map(|(number, part)| match number {
        1 => part.at(1, 0, len),
        _ => part,
    });
    let elsewhere = Endpoint::open("elsewhere").unwrap();
    let other = elsewhere.register(SystemStorage::new(64).unwrap(), Access::READ_WRITE).unwrap();
    let of_another = bench.user.import_with(&other.ticket().unwrap(), &towline::Routing::default()).unwrap();
    let imported_there = elsewhere.import(&parts.regions[0].ticket()).unwrap();
    let one = bench.local(64);
    for (kinds, message, started) in [
        (Kind::Invalid, "part 1 of 3", bench.user.write_parts(out_of_range).start()),
        (
            Kind::PermissionDenied,
            "part 1 of 2",
            bench
                .user
                .write_parts([
                    Part::new(&parts.remotes[0], &one).at(0, 0, 64),
                    Part::new(&narrow, &one).at(0, 0, 64),
                ])
                .start(),
        ),
        (
            Kind::Invalid,
            "one peer",
            bench
                .user
                .write_parts([
                    Part::new(&parts.remotes[0], &one).at(0, 0, 64),
                    Part::new(&of_another, &one).at(0, 0, 64),
                ])
                .start(),
        ),
        (
            Kind::Invalid,
            "another endpoint",
            bench
                .user
                .write_parts([
                    Part::new(&parts.remotes[0], &one).at(0, 0, 64),
                    Part::new(&imported_there, &one).at(0, 0, 64),
                ])
                .start(),
        ),
        (Kind::Invalid, "no parts", bench.user.write_parts([]).start()),
    ] {
        let error = refused(started, &[kinds]);
        assert!(error.message().contains(message), "{error}");
    }
    parts.check_there(THEIRS).unwrap();
}

/// Laws 4 and 7: one cancel and one deadline for all parts; after the end nothing touches the memory of any.
pub fn one_cancel_and_one_deadline_end_all_parts(bench: &Bench) {
    let mut random = Random::new(13);
    for count in [2, 16, 64] {
        let parts = bench.parts(count, 8 * MIB / if count == 16 { 1 } else { 4 }, THEIRS);
        for round in 0..if count == 16 { 6u64 } else { 3 } {
            let request = bench.user.read_parts(parts.whole());
            let limit = Duration::from_micros(100 * round);
            let request = if round % 3 == 0 { request.within(limit) } else { request };
            let transfer = request.start().unwrap();
            if round % 3 == 1 {
                thread::sleep(random.micros(1500));
                transfer.cancel();
            }
            let ended = transfer.wait_for(STALL * 2).expect("it ends");
            bench.settle(&transfer);
            parts.check_unfailed(&transfer, THEIRS).unwrap();
            parts.fill_here(OURS);
            parts.stays_here(OURS, Duration::from_millis(3)).unwrap();
            if let Err(error) = ended {
                let allowed = if round % 3 == 1 { Kind::Canceled } else { Kind::Timeout };
                assert!(round % 3 != 2 && error.kind() == allowed, "round {round}: {error}");
            }
        }
    }
}
