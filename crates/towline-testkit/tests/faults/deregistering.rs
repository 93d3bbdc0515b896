//! Deregistration while four peer processes read and write: not one stale or torn word.

use std::thread;
use std::time::{Duration, Instant};

use towline::{Access, MemoryAccess};
use towline_testkit::oracle::{Stamp, origin};
use towline_testkit::process::Process;
use towline_testkit::random::Random;
use towline_testkit::watchdog::{stays, watch};
use towline_testkit::worker::storage;

use super::{MIB, STALL, endpoint};

const TIME: Duration = Duration::from_secs(30);

/// The owner's part, which readers read; behind it each writer has a part.
const READ_LEN: usize = 3 * MIB;
const WRITE_LEN: usize = MIB + 4096;
const LEN: usize = READ_LEN + 2 * WRITE_LEN;

/// Regions are numbered by the test; writers mark what they write by numbers from here on.
const MARK: u16 = 100;

#[test]
fn deregistering_under_four_peers_leaves_no_stale_or_torn_word() {
    let _watchdog = watch("deregistering_under_four_peers_leaves_no_stale_or_torn_word", TIME * 6);
    let owner = endpoint("owner");
    // Two read, two write; every path has its turn. The memory is shared, so that all of them reach it.
    let crews: [[(&str, &str); 4]; 2] = [
        [("mapped", "read"), ("cma,unix", "read"), ("mapped", "write"), ("tcp", "write")],
        [("tcp", "read"), ("unix", "read"), ("cma,unix", "write"), ("mapped", "write")],
    ];
    let mut random = Random::new(60);
    let mut generation = 0u16;
    for crew in crews {
        let mut peers: Vec<(Process, &str)> = Vec::new();
        for (number, (paths, op)) in crew.into_iter().enumerate() {
            let mut peer = Process::open(&format!("peer-{number}"), &format!("stall={}", STALL.as_millis()));
            let (offset, len) = match op {
                "read" => (0, READ_LEN),
                _ => (READ_LEN + (number - 2) * WRITE_LEN, WRITE_LEN),
            };
            peer.must(&format!("chase {paths} {op} {offset} {len} {}", MARK + number as u16));
            peers.push((peer, paths));
        }
        let mut memory = storage(LEN, "shared").unwrap();
        let started = Instant::now();
        let mut rounds = 0;
        while started.elapsed() < TIME / 2 {
            generation += 1;
            rounds += 1;
            let stamp = Stamp::new(1, generation);
            stamp.fill_storage(&memory).unwrap();
            let region = owner.register(memory, Access::READ_WRITE).unwrap();
            let ticket = region.ticket().unwrap();
            for (peer, _) in &mut peers {
                peer.tell(&format!("target {ticket} 1 {generation}"));
            }
            thread::sleep(random.micros(if rounds % 3 == 0 { 40_000 } else { 6000 }));
            memory = region
                .into_storage_within(STALL * 10)
                .unwrap_or_else(|pinned| panic!("generation {generation}: {}", pinned.error));
            if rounds % 2 == 0 {
                is_nobodys(&memory, random.micros(1500));
                continue;
            }
            // Ours again. The readers' part is as it was; the writers' parts hold only what was written meanwhile.
            stamp.verify_storage(&memory, 0, READ_LEN).unwrap();
            verify_written(
                &memory,
                stamp,
                [crew[2].0, crew[3].0].map(|path| path == "tcp" || path == "unix"),
            );
            // Recycled for something else, and looked at again after a while: nothing comes late.
            let next = Stamp::new(2, generation);
            next.fill_storage(&memory).unwrap();
            thread::sleep(random.micros(1500));
            next.verify_storage(&memory, 0, LEN).unwrap_or_else(|wrong| panic!("written late: {wrong}"));
        }
        for (peer, paths) in &mut peers {
            peer.tell("halt");
            let tally = peer.answer(STALL * 20).unwrap_or_else(|failure| panic!("{paths}: {failure}"));
            let (good, stale) = (tally.number(0), tally.number(1));
            assert!(good > 0 && stale > 0, "{paths}: {good} good and {stale} stale transfers try nothing");
        }
    }
}

/// The ends of the writers' parts are used for something else at once, so that a copy that is still going on comes
/// after it.
fn is_nobodys(memory: &impl towline::Storage, meanwhile: Duration) {
    const TAIL: usize = 64 << 10;
    let tails = [READ_LEN + WRITE_LEN - TAIL, LEN - TAIL];
    for tail in tails {
        memory.memset(0xee, tail, TAIL).unwrap();
    }
    let mut bytes = vec![0; TAIL];
    let mut written = || {
        tails.into_iter().find(|tail| {
            memory.read_at(*tail, &mut bytes).unwrap();
            bytes.iter().any(|byte| *byte != 0xee)
        })
    };
    let mut at = None;
    stays(meanwhile, || {
        at = written();
        at.is_none()
    });
    assert_eq!(at, None, "written after it was taken back, there");
}

/// Every word is the owner's of this generation, or a writer's of this generation at its place. A write over a stream
/// that was broken off may end inside a word: there, every byte is one or the other.
fn verify_written(memory: &impl towline::Storage, stamp: Stamp, streams: [bool; 2]) {
    let mut bytes = vec![0; LEN - READ_LEN];
    memory.read_at(READ_LEN, &mut bytes).unwrap();
    for (index, word) in bytes.chunks_exact(8).enumerate() {
        let offset = (READ_LEN + index * 8) as u64;
        let word = u64::from_ne_bytes(word.try_into().unwrap());
        if word == stamp.word(offset) {
            continue;
        }
        let writer = index * 8 / WRITE_LEN;
        let place = offset - (READ_LEN + writer * WRITE_LEN) as u64;
        let expected = Stamp::new(MARK + 2 + writer as u16, stamp.generation).word(place);
        let (found, ours, theirs) =
            (word.to_ne_bytes(), stamp.word(offset).to_ne_bytes(), expected.to_ne_bytes());
        let mixed = || (0..8).all(|byte| found[byte] == ours[byte] || found[byte] == theirs[byte]);
        assert!(
            word == expected || (streams[writer] && mixed()),
            "{word:#x} at offset {offset} in generation {} is {:?}",
            stamp.generation,
            origin(word)
        );
    }
}
