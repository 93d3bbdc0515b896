//! The numbered contract of a submission; law 9, and what of the others is about parts, is in `parts.rs`.

use std::thread;
use std::time::Duration;

use towline::{Access, Dtype, Error, Kind, Layout, ReduceOp};

use super::counting::words_are_refused;
use crate::bench::{Bench, Owner, OwnerRegion, STALL, outcome, refused};
use crate::oracle::Stamp;
use crate::random::Random;

const MIB: usize = 1 << 20;

/// A size that no path handles in one piece.
const LARGE: usize = 8 * MIB + 4096 + 24;

const THEIRS: Stamp = Stamp { region: 1, generation: 1 };
const OURS: Stamp = Stamp { region: 2, generation: 1 };

/// Law 1: a read that succeeds has filled the whole range with the owner's bytes.
pub fn law_1_a_read_that_succeeds_has_the_owners_bytes(bench: &Bench) {
    for parts in bench.several(LARGE, THEIRS) {
        let mut random = Random::new(1);
        let tried = [LARGE, 3 * MIB, 1, 7, 8, 4096, 65_537, MIB - 8, MIB, MIB + 8];
        for len in tried.into_iter().take(if parts.count() > 2 { 3 } else { tried.len() }) {
            // Of each part the same share, anywhere in it.
            let ranges = parts.ranges(|whole| {
                let len = (len as u64 * whole / LARGE as u64).max(1);
                (random.below(whole - len + 1), 0, len)
            });
            let transfer = parts.read_ranges(&ranges).start().unwrap();
            transfer.wait().unwrap();
            assert_eq!(transfer.path(), bench.path);
            assert_eq!(transfer.bytes(), ranges.iter().map(|range| range.2).sum::<u64>());
            parts.check_read(&ranges, THEIRS).unwrap_or_else(|wrong| panic!("{ranges:?}: {wrong}"));
        }
    }
}

/// Law 2: a write that succeeds is visible to the owner before its notification or its signal is.
pub fn law_2_a_write_is_visible_before_its_notification_and_its_signal(bench: &Bench) {
    for parts in bench.several(3 * MIB + 8, THEIRS) {
        let last = parts.count() - 1;
        let word = (parts.lens[last] - 8) & !7;
        let mut signals = 0;
        for round in 0..4 {
            let stamp = Stamp::new(2, round);
            parts.fill_here(stamp);
            // Small ones are written by the caller, large ones by others. What is raised lies behind the bytes of the last part.
            let ranges = parts.ranges(|len| {
                let room = (len - 8) & !7;
                (0, 0, if round % 2 == 0 { room } else { (room / 48).max(8) })
            });
            let request = parts.write_ranges(&ranges);
            let notified = round < 2 || !bench.has_words();
            let request = match notified {
                true => request.notify(round.to_le_bytes()),
                false => request.signal_in(last, word as u64, 1),
            };
            if !notified && signals == 0 {
                parts.regions[last].put(word, &[0; 8]);
            }
            let transfer = request.start().unwrap();
            if notified {
                let (from, message) = bench.owner.receive(STALL).unwrap();
                assert_eq!((from.as_str(), message.as_slice()), ("user", &round.to_le_bytes()[..]));
            } else {
                signals += 1;
                assert_eq!(parts.regions[last].wait_signal(word, signals, STALL).unwrap(), signals);
            }
            for (part, (_, _, len)) in ranges.iter().enumerate() {
                let checked = parts.regions[part].check(stamp.of_part(part), 0, *len as usize);
                checked.unwrap_or_else(|wrong| panic!("round {round}, part {part}: {wrong}"));
            }
            transfer.wait().unwrap();
            assert_eq!(transfer.path(), bench.path);
        }
    }
}

/// Law 3: nothing outside the requested ranges changes, on either side, whatever happens.
pub fn law_3_nothing_outside_the_requested_ranges_changes(bench: &Bench) {
    for mut parts in bench.several(3 * MIB, THEIRS) {
        let tried = [(1001, 2 * MIB as u64 + 3), (13, 1000), (4096, 4096)];
        for (offset, len) in tried.into_iter().take(if parts.count() > 2 { 1 } else { 3 }) {
            // As much of it as the part has room for, with something on either side.
            let ranges = parts.ranges(|whole| {
                let offset = offset.min(whole / 4);
                (offset, offset, len.min(whole - offset - 9))
            });
            parts.fill_here(OURS);
            outcome(parts.read_ranges(&ranges).start()).unwrap();
            parts.check_here_around(&ranges, THEIRS, OURS).unwrap();
            parts.check_there(THEIRS).unwrap();

            parts.fill_here(OURS);
            outcome(parts.write_ranges(&ranges).start()).unwrap();
            parts.check_there_around(&ranges, OURS, THEIRS).unwrap();
            parts.check_here(OURS).unwrap();
            parts.fill_there(THEIRS);
        }
        // Every second block.
        let page = if parts.count() == 1 { 4096 } else { 512 };
        let blocks = |part: usize| {
            let pages = Layout::contiguous(parts.lens[part] as u64 / page * page, page).unwrap();
            let odd: Vec<u32> = (0..pages.block_count() as u32).filter(|page| page % 2 == 1).collect();
            (pages, odd)
        };
        let of_blocks = parts.whole().enumerate().map(|(part, whole)| {
            let (pages, odd) = blocks(part);
            whole.blocks(&pages, odd.clone(), &pages, odd)
        });
        parts.fill_here(OURS);
        outcome(bench.user.read_parts(of_blocks).start()).unwrap();
        for (part, local) in parts.locals.iter().enumerate() {
            for block in 0..blocks(part).0.block_count() {
                let expected = if block % 2 == 1 { THEIRS } else { OURS }.of_part(part);
                expected.verify_storage(local.storage(), (block * page) as usize, page as usize).unwrap();
            }
        }
        // What fails changes nothing either.
        parts.fill_here(OURS);
        let last = parts.count() - 1;
        let len = parts.lens[last] as u64;
        let beyond = parts.last_as(|part| part.at(8, 0, len));
        refused(bench.user.read_parts(beyond).start(), &[Kind::Invalid]);
        parts.check_here(OURS).unwrap();
        parts.regions.pop().unwrap().deregister(STALL).unwrap();
        let small = parts.ranges(|_| (0, 0, 8));
        refused(outcome(parts.read_ranges(&small).start()), &[Kind::Stale]);
        // The others may have been read before that was known.
        OURS.of_part(last).verify_storage(parts.locals[last].storage(), 0, parts.lens[last]).unwrap();
        for (part, local) in parts.locals.iter().enumerate() {
            OURS.of_part(part).verify_storage(local.storage(), 8, parts.lens[part] - 8).unwrap();
        }
    }
}

/// Law 4: every unit reports once; after the last report nothing touches the local memory.
pub fn law_4_a_transfer_ends_once_and_then_nothing_touches_the_local_memory(bench: &Bench) {
    for parts in bench.several(LARGE, THEIRS) {
        for round in 0..if parts.count() == 1 { 4u16 } else { 3 } {
            let request = parts.read();
            let request = if round % 3 == 2 { request.within(Duration::from_micros(300)) } else { request };
            let transfer = request.start().unwrap();
            if round % 3 == 1 {
                transfer.cancel();
            }
            let ended = transfer.wait_for(STALL).expect("it ends");
            bench.settle(&transfer);
            parts.check_unfailed(&transfer, THEIRS).unwrap();
            let mine = Stamp::new(3, round);
            parts.fill_here(mine);
            parts.stays_here(mine, Duration::from_millis(3)).unwrap();
            // It stays as it ended, whatever is done to it.
            transfer.cancel();
            let again = transfer.result().expect("it has ended");
            assert_eq!(ended.as_ref().err().map(|e| e.kind()), again.err().map(|e| e.kind()));
            if let Err(error) = ended {
                let allowed = if round % 3 == 1 { Kind::Canceled } else { Kind::Timeout };
                assert!(round % 3 != 0 && error.kind() == allowed, "round {round}: {error}");
            }
        }
    }
}

/// Law 5: after the owner has deregistered, every access gives `Stale` and moves nothing.
pub fn law_5_after_deregistration_every_access_is_stale_and_moves_nothing(bench: &Bench) {
    for mut parts in bench.several(2 * MIB, THEIRS) {
        let tickets: Vec<_> = parts.regions.iter().map(OwnerRegion::ticket).collect();
        outcome(parts.read_ranges(&parts.ranges(|_| (0, 0, 8))).start()).unwrap();
        parts.fill_here(OURS);
        for region in parts.regions.drain(..) {
            region.deregister(STALL).unwrap();
        }

        let user = &bench.user;
        let (remote, local) = (parts.remotes.last().unwrap(), parts.locals.last().unwrap());
        let small = parts.ranges(|len| (0, 0, 64.min(len)));
        let pages = Layout::contiguous(2048, 256).unwrap();
        let blocks = parts.whole().map(|part| part.blocks(&pages, &[3u32], &pages, &[5u32]));
        for (name, outcome) in [
            ("small read", outcome(parts.read_ranges(&small).start())),
            ("large read", outcome(parts.read().start())),
            ("small write", outcome(parts.write_ranges(&small).start())),
            ("large write", outcome(parts.write().start())),
            ("blocks", outcome(user.read_parts(blocks).start())),
            ("signal", outcome(user.signal(remote, 0, 1))),
            ("write and signal", outcome(parts.write_ranges(&small).signal(64, 1).start())),
            ("fetch_add", outcome(user.fetch_add(remote, 0, 1))),
            ("compare_swap", outcome(user.compare_swap(remote, 0, 0, 1))),
            (
                "reduce",
                outcome(user.reduce_into(remote, local, ReduceOp::Sum, Dtype::U64).at(0, 0, 64).start()),
            ),
            ("import", user.import(&tickets[0]).map(drop)),
        ] {
            let no_word = !bench.has_words()
                && ["signal", "write and signal", "fetch_add", "compare_swap", "reduce"].contains(&name);
            match outcome {
                Err(error) if error.kind() == if no_word { Kind::Unsupported } else { Kind::Stale } => {}
                other => panic!("{name} gave {other:?}, not Stale"),
            }
        }
        parts.check_here(OURS).unwrap();

        // The rows are used again: the old tickets do not reach the new regions.
        let newer = Stamp::new(1, 2);
        let next = bench.parts_of(parts.lens.clone(), newer);
        refused(outcome(parts.read().start()), &[Kind::Stale]);
        refused(outcome(parts.write().start()), &[Kind::Stale]);
        for import in user.import_many(&tickets).unwrap() {
            refused(import, &[Kind::Stale]);
        }
        next.check_there(newer).unwrap();
        parts.check_here(OURS).unwrap();
    }
}

/// Law 6: access outside the grant's range or rights is refused before a byte moves.
pub fn law_6_access_outside_the_range_or_the_rights_is_refused_before_a_byte_moves(bench: &Bench) {
    for count in bench.counts() {
        let mut parts = bench.parts_of(vec![8192; count], THEIRS);
        parts.fill_here(OURS);
        // The last part has a narrow ticket, and the others may do all.
        let narrow = parts.regions[count - 1].ticket().narrow();
        let narrow = narrow.range(4096, 2048).access(Access::READ).finish().unwrap();
        parts.remotes[count - 1] = bench.remote(&narrow);
        let (last, name) = (&parts.remotes[count - 1], format!("part {} of {count}", count - 1));
        let user = &bench.user;
        for (offset, len) in [(0, 2049), (2048, 1), (2047, 2), (u64::MAX, 1), (1, u64::MAX), (1 << 40, 8)] {
            let at = parts.last_as(|part| part.at(offset, 0, len));
            let error = refused(user.read_parts(at).start(), &[Kind::Invalid]);
            // A sum that is too large is nobody's alone.
            let named = |error: &Error| count == 1 || len == u64::MAX || error.message().contains(&name);
            assert!(named(&error), "{error}");
            // A worker may check the lists of a long request: then it ends so, and has not moved a byte either.
            let spans = [(0, 0, 8), (offset, 8, len)];
            let spans = parts.last_as(|part| part.spans(&spans));
            let error = refused(outcome(user.read_parts(spans).start()), &[Kind::Invalid]);
            assert!(named(&error), "{error}");
        }
        let written = parts.last_as(|part| part.at(0, 0, 8));
        refused(user.write_parts(written).start(), &[Kind::PermissionDenied]);
        refused(user.fetch_add(last, 0, 1), &[Kind::PermissionDenied]);
        refused(user.signal(last, 0, 1), &[Kind::PermissionDenied]);
        parts.check_here(OURS).unwrap();
        parts.check_there(THEIRS).unwrap();
        outcome(parts.read_ranges(&parts.ranges(|_| (2040, 0, 8))).start()).unwrap();
    }
}

/// Law 7: `stop` returns at once and the transfer ends soon after; no unit waits for the peer any longer.
pub fn law_7_a_cancelled_transfer_does_not_wait_for_its_peer(bench: &Bench) {
    for parts in bench.several(LARGE, THEIRS) {
        outcome(parts.read().start()).unwrap();
        for _ in 0..2 {
            let transfer = parts.read().start().unwrap();
            transfer.cancel();
            let ended = transfer.wait_for(STALL / 2).expect("a cancelled transfer ends");
            assert!(ended.is_ok() || ended.unwrap_err().kind() == Kind::Canceled);
            parts.check_unfailed(&transfer, THEIRS).unwrap();
        }
        // A peer that stands still answers nothing.
        if let Owner::There(process) = &bench.owner {
            process.lock().stop();
            let transfer = parts.read().start().unwrap();
            transfer.cancel();
            let ended =
                transfer.wait_for(STALL / 2).expect("a cancelled transfer ends though its peer is stopped");
            assert!(ended.is_ok() || ended.unwrap_err().kind() == Kind::Canceled);
            process.lock().resume();
        }
    }
}

/// Law 8: a 64-bit atomic is atomic with respect to every other path to the same word.
pub fn law_8_atomics_on_one_word_stay_atomic_over_all_paths(bench: &Bench) {
    if !bench.has_words() {
        return words_are_refused(bench);
    }
    const EACH: u64 = 200;
    let region = bench.owner.register(64, "shared", Access::READ_WRITE).unwrap();
    let ticket = region.ticket();
    let paths = bench.all_paths();
    thread::scope(|scope| {
        for routing in &paths {
            let remote = bench.user.import_with(&ticket, routing).unwrap();
            let user = &bench.user;
            scope.spawn(move || {
                for _ in 0..EACH {
                    outcome(user.fetch_add(&remote, 8, 1)).unwrap();
                    outcome(user.signal(&remote, 8, 1)).unwrap();
                    loop {
                        let seen = user.fetch_add(&remote, 16, 0).unwrap();
                        seen.wait().unwrap();
                        let seen = seen.value().expect("an atomic has a value");
                        let swap = user.compare_swap(&remote, 16, seen, seen + 1).unwrap();
                        swap.wait().unwrap();
                        if swap.value() == Some(seen) {
                            break;
                        }
                    }
                }
            });
        }
    });
    let all = paths.len() as u64 * EACH;
    assert_eq!((region.word(8), region.word(16)), (2 * all, all));
    assert_eq!((region.word(0), region.word(24)), (0, 0));
}
