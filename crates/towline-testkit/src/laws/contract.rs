//! The numbered contract of a submission; law 9, and what of the others is about parts, is in `parts.rs`.

use std::thread;
use std::time::Duration;

use towline::{Access, Kind, Layout};

use super::counting::words_are_refused;
use crate::bench::{Bench, Owner, STALL, outcome, refused};
use crate::oracle::Stamp;
use crate::random::Random;

const MIB: usize = 1 << 20;

/// A size that no path handles in one piece.
const LARGE: usize = 8 * MIB + 4096 + 24;

const THEIRS: Stamp = Stamp { region: 1, generation: 1 };
const OURS: Stamp = Stamp { region: 2, generation: 1 };

/// Law 1: a read that succeeds has filled the whole range with the owner's bytes.
pub fn law_1_a_read_that_succeeds_has_the_owners_bytes(bench: &Bench) {
    let region = bench.stamped(LARGE, Access::READ_WRITE, THEIRS);
    let remote = bench.import(&region);
    let local = bench.local(LARGE);
    let mut random = Random::new(1);
    for len in [1, 7, 8, 4096, 65_537, MIB - 8, MIB, MIB + 8, 3 * MIB, LARGE] {
        let offset = random.below((LARGE - len + 1) as u64);
        let transfer = bench.user.read(&remote, &local).at(offset, 0, len as u64).start().unwrap();
        transfer.wait().unwrap();
        assert_eq!(transfer.path(), bench.path);
        assert_eq!(transfer.bytes(), len as u64);
        let mut bytes = vec![0; len];
        local.read_at(0, &mut bytes).unwrap();
        THEIRS.verify(offset, &bytes).unwrap_or_else(|wrong| panic!("{len} bytes at {offset}: {wrong}"));
    }
}

/// Law 2: a write that succeeds is visible to the owner before its notification or its signal is.
pub fn law_2_a_write_is_visible_before_its_notification_and_its_signal(bench: &Bench) {
    let len = 3 * MIB;
    let region = bench.region(len + 8, Access::READ_WRITE);
    let remote = bench.import(&region);
    for round in 0..12u16 {
        let stamp = Stamp::new(2, round);
        let local = bench.local_stamped(len, stamp);
        // Small ones are written by the caller, large ones by others.
        let part = if round % 2 == 0 { len } else { 64 << 10 };
        let request = bench.user.write(&remote, &local).at(0, 0, part as u64);
        let notified = round % 4 < 2 || !bench.has_words();
        let request =
            if notified { request.notify(round.to_le_bytes()) } else { request.signal(len as u64, 1) };
        let transfer = request.start().unwrap();
        if notified {
            let (from, message) = bench.owner.receive(STALL).unwrap();
            assert_eq!((from.as_str(), message.as_slice()), ("user", &round.to_le_bytes()[..]));
        } else {
            let signals = u64::from(round / 4 * 2 + round % 4 - 1);
            assert_eq!(region.wait_signal(len, signals, STALL).unwrap(), signals);
        }
        region.check(stamp, 0, part).unwrap_or_else(|wrong| panic!("round {round}: {wrong}"));
        transfer.wait().unwrap();
        assert_eq!(transfer.path(), bench.path);
    }
}

/// Law 3: nothing outside the requested ranges changes, on either side, whatever happens.
pub fn law_3_nothing_outside_the_requested_ranges_changes(bench: &Bench) {
    let len = 3 * MIB;
    let region = bench.stamped(len, Access::READ_WRITE, THEIRS);
    let remote = bench.import(&region);
    let local = bench.local(len);
    for (offset, part) in [(13, 1000), (4096, 4096), (1001, 2 * MIB + 3)] {
        OURS.fill_storage(local.storage()).unwrap();
        bench.user.read(&remote, &local).at(offset, offset, part as u64).start().unwrap().wait().unwrap();
        let (start, end) = (offset as usize, offset as usize + part);
        OURS.verify_storage(local.storage(), 0, start).unwrap();
        THEIRS.verify_storage(local.storage(), start, part).unwrap();
        OURS.verify_storage(local.storage(), end, len - end).unwrap();
        region.check(THEIRS, 0, len).unwrap();

        OURS.fill_storage(local.storage()).unwrap();
        bench.user.write(&remote, &local).at(offset, offset, part as u64).start().unwrap().wait().unwrap();
        region.check(THEIRS, 0, start).unwrap();
        region.check(OURS, start, part).unwrap();
        region.check(THEIRS, end, len - end).unwrap();
        OURS.verify_storage(local.storage(), 0, len).unwrap();
        region.fill(THEIRS);
    }
    // Every second block.
    OURS.fill_storage(local.storage()).unwrap();
    let pages = Layout::contiguous(len as u64, 4096).unwrap();
    let odd: Vec<u32> = (0..pages.block_count() as u32).filter(|page| page % 2 == 1).collect();
    outcome(bench.user.read(&remote, &local).blocks(&pages, &odd, &pages, &odd).start()).unwrap();
    for page in 0..pages.block_count() as usize {
        let expected = if page % 2 == 1 { THEIRS } else { OURS };
        expected.verify_storage(local.storage(), page * 4096, 4096).unwrap();
    }
    // What fails changes nothing either.
    OURS.fill_storage(local.storage()).unwrap();
    refused(bench.user.read(&remote, &local).at(8, 0, len as u64).start(), &[Kind::Invalid]);
    region.deregister(STALL).unwrap();
    refused(outcome(bench.user.read(&remote, &local).at(0, 0, 64).start()), &[Kind::Stale]);
    OURS.verify_storage(local.storage(), 0, len).unwrap();
}

/// Law 4: every unit reports once; after the last report nothing touches the local memory.
pub fn law_4_a_transfer_ends_once_and_then_nothing_touches_the_local_memory(bench: &Bench) {
    let region = bench.stamped(LARGE, Access::READ_WRITE, THEIRS);
    let remote = bench.import(&region);
    let local = bench.local(LARGE);
    for round in 0..10u16 {
        let request = bench.user.read(&remote, &local);
        let request = if round % 3 == 2 { request.within(Duration::from_micros(300)) } else { request };
        let transfer = request.start().unwrap();
        if round % 3 == 1 {
            transfer.cancel();
        }
        let ended = transfer.wait_for(STALL).expect("it ends");
        bench.settle(&transfer);
        let mine = Stamp::new(3, round);
        mine.fill_storage(local.storage()).unwrap();
        mine.stays_in(local.storage(), LARGE, Duration::from_millis(3)).unwrap();
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

/// Law 5: after the owner has deregistered, every access gives `Stale` and moves nothing.
pub fn law_5_after_deregistration_every_access_is_stale_and_moves_nothing(bench: &Bench) {
    let region = bench.stamped(2 * MIB, Access::READ_WRITE, THEIRS);
    let ticket = region.ticket();
    let remote = bench.remote(&ticket);
    let local = bench.local_stamped(2 * MIB, OURS);
    outcome(bench.user.read(&remote, &local).at(0, 0, 8).start()).unwrap();
    OURS.fill_storage(local.storage()).unwrap();
    region.deregister(STALL).unwrap();

    let user = &bench.user;
    let pages = Layout::contiguous(2 * MIB as u64, 4096).unwrap();
    for (name, outcome) in [
        ("small read", outcome(user.read(&remote, &local).at(0, 0, 64).start())),
        ("large read", outcome(user.read(&remote, &local).start())),
        ("small write", outcome(user.write(&remote, &local).at(0, 0, 64).start())),
        ("large write", outcome(user.write(&remote, &local).start())),
        ("blocks", outcome(user.read(&remote, &local).blocks(&pages, &[3u32], &pages, &[5u32]).start())),
        ("signal", outcome(user.signal(&remote, 0, 1))),
        ("write and signal", outcome(user.write(&remote, &local).at(0, 0, 8).signal(8, 1).start())),
        ("fetch_add", outcome(user.fetch_add(&remote, 0, 1))),
        ("compare_swap", outcome(user.compare_swap(&remote, 0, 0, 1))),
        (
            "reduce",
            outcome(user.reduce_into(&remote, &local, towline::ReduceOp::Sum, towline::Dtype::U64).start()),
        ),
        ("import", user.import(&ticket).map(drop)),
    ] {
        let no_word = !bench.has_words()
            && ["signal", "write and signal", "fetch_add", "compare_swap", "reduce"].contains(&name);
        match outcome {
            Err(error) if error.kind() == if no_word { Kind::Unsupported } else { Kind::Stale } => {}
            other => panic!("{name} gave {other:?}, not Stale"),
        }
    }
    OURS.verify_storage(local.storage(), 0, 2 * MIB).unwrap();

    // The row is used again: the old ticket does not reach the new region.
    let next = bench.stamped(2 * MIB, Access::READ_WRITE, Stamp::new(1, 2));
    refused(outcome(user.read(&remote, &local).start()), &[Kind::Stale]);
    refused(outcome(user.write(&remote, &local).start()), &[Kind::Stale]);
    refused(user.import(&ticket), &[Kind::Stale]);
    next.check(Stamp::new(1, 2), 0, 2 * MIB).unwrap();
    OURS.verify_storage(local.storage(), 0, 2 * MIB).unwrap();
}

/// Law 6: access outside the grant's range or rights is refused before a byte moves.
pub fn law_6_access_outside_the_range_or_the_rights_is_refused_before_a_byte_moves(bench: &Bench) {
    let region = bench.stamped(8192, Access::READ_WRITE, THEIRS);
    let local = bench.local_stamped(16_384, OURS);
    let narrow = region.ticket().narrow().range(4096, 2048).access(Access::READ).finish().unwrap();
    let remote = bench.remote(&narrow);
    for (offset, len) in [(0, 2049), (2048, 1), (2047, 2), (u64::MAX, 1), (1, u64::MAX), (1 << 40, 8)] {
        refused(bench.user.read(&remote, &local).at(offset, 0, len).start(), &[Kind::Invalid]);
        let spans = [(0, 0, 8), (offset, 8, len)];
        refused(bench.user.read(&remote, &local).spans(&spans).start(), &[Kind::Invalid]);
    }
    refused(bench.user.write(&remote, &local).at(0, 0, 8).start(), &[Kind::PermissionDenied]);
    refused(bench.user.fetch_add(&remote, 0, 1), &[Kind::PermissionDenied]);
    refused(bench.user.signal(&remote, 0, 1), &[Kind::PermissionDenied]);
    OURS.verify_storage(local.storage(), 0, 16_384).unwrap();
    region.check(THEIRS, 0, 8192).unwrap();
    outcome(bench.user.read(&remote, &local).at(2040, 0, 8).start()).unwrap();
}

/// Law 7: `stop` returns at once and the transfer ends soon after; no unit waits for the peer any longer.
pub fn law_7_a_cancelled_transfer_does_not_wait_for_its_peer(bench: &Bench) {
    let region = bench.stamped(LARGE, Access::READ_WRITE, THEIRS);
    let remote = bench.import(&region);
    let local = bench.local(LARGE);
    outcome(bench.user.read(&remote, &local).start()).unwrap();
    for _ in 0..5 {
        let transfer = bench.user.read(&remote, &local).start().unwrap();
        transfer.cancel();
        let ended = transfer.wait_for(STALL / 2).expect("a cancelled transfer ends");
        assert!(ended.is_ok() || ended.unwrap_err().kind() == Kind::Canceled);
    }
    // A peer that stands still answers nothing.
    if let Owner::There(process) = &bench.owner {
        process.lock().stop();
        let transfer = bench.user.read(&remote, &local).start().unwrap();
        transfer.cancel();
        let ended =
            transfer.wait_for(STALL / 2).expect("a cancelled transfer ends though its peer is stopped");
        assert!(ended.is_ok() || ended.unwrap_err().kind() == Kind::Canceled);
        process.lock().resume();
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
