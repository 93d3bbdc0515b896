//! The user's side of the protocol, over the stored corpus of its fuzz target and over made-up inputs: against an owner in this
//! process, and against one in another.
//!
//! `TOWLINE_PROGRAMS` sets how many programs are made up, for each.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use std::path::Path;
use std::time::Duration;

use towline_testkit::process::{Process, Wall};
use towline_testkit::random::Random;
use towline_testkit::rogue::STEP;
use towline_testkit::skip::skip;
use towline_testkit::using::{Played, RemoteOwner, play, play_against};
use towline_testkit::watchdog::{Watchdog, watch};

fn programs() -> u64 {
    std::env::var("TOWLINE_PROGRAMS").ok().and_then(|number| number.parse().ok()).unwrap_or(400)
}

fn watchdog(test: &str) -> Watchdog {
    watch(test, Duration::from_secs(240) + Duration::from_millis(100) * programs() as u32)
}

/// What chance would seldom make: a long write that is said to be done while it is being sent, bytes that stop in their midst while
/// their read is cancelled, and the same two where their memory is taken back, or waited for until it is quiet.
const SCENES: [&[[u8; STEP]]; 4] = [
    &[
        [23, 14, 0, 0, 0, 0, 0, 0],
        [255, 0, 4, 250, 0, 0, 0, 0],
        [22, 0, 0, 0, 0, 0, 0, 0],
        [22, 0, 0, 0, 0, 0, 0, 0],
        [22, 0, 0, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0, 0],
        [255, 11, 255, 0, 0, 0, 0, 0],
        [255, 11, 255, 0, 0, 0, 0, 0],
        [23, 1, 0, 0, 0, 0, 0, 0],
    ],
    &[
        [255, 0, 0, 250, 0, 0, 0, 0],
        [22, 0, 0, 0, 0, 0, 0, 0],
        [22, 0, 0, 0, 0, 0, 0, 0],
        [8, 1, 0x83, 0, 0, 0, 0, 0],
        [255, 10, 0, 0, 0, 0, 0, 0],
        [255, 11, 255, 0, 0, 0, 0, 0],
        [15, 0, 7, 7, 7, 7, 7, 7],
    ],
    &[
        [23, 14, 0, 0, 0, 0, 0, 0],
        [255, 14, 4, 250, 20, 0, 0, 0],
        [22, 0, 0, 0, 0, 0, 0, 0],
        [22, 0, 0, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0, 0],
        [255, 14, 4, 250, 250, 0, 0, 0],
        [255, 15, 255, 0, 0, 0, 0, 0],
        [23, 1, 0, 0, 0, 0, 0, 0],
        [255, 14, 4, 0, 250, 0, 0, 0],
    ],
    &[
        [255, 14, 0, 250, 0, 0, 0, 0],
        [22, 0, 0, 0, 0, 0, 0, 0],
        [22, 0, 0, 0, 0, 0, 0, 0],
        [8, 1, 0x83, 0, 0, 0, 0, 0],
        [255, 14, 128, 0, 250, 0, 0, 0],
        [255, 15, 255, 0, 0, 0, 0, 0],
        [15, 0, 7, 7, 7, 7, 7, 7],
        [255, 14, 0, 0, 250, 0, 0, 0],
    ],
];

/// What an owner that says where it sees its user is asked besides: whether a lane is over that it has ended under a write, and not to
/// answer a read that nobody wants any more. It answers early, twice, with an error, over a lane, late, or not at all.
const ENDS: [(&str, &[[u8; STEP]]); 2] = [
    (
        "ended-lane",
        &[
            [23, 14, 0, 0, 0, 0, 0, 0],
            [255, 0, 4, 250, 0, 0, 0, 0],
            WAIT,
            WAIT,
            WAIT,
            [16, 4, 1, 0, 0, 0, 0, 0],
            WAIT,
        ],
    ),
    ("withdrawn-read", &[[255, 0, 0, 250, 0, 0, 0, 0], WAIT, WAIT, WAIT, [255, 10, 0, 0, 0, 0, 0, 0], WAIT]),
];

/// For a lane, or a frame.
const WAIT: [u8; STEP] = [22, 255, 0, 0, 0, 0, 0, 0];

/// Answers to these, by name.
const ENDINGS: [(&str, &[[u8; STEP]]); 6] = [
    ("never", &[[22, 0, 0, 0, 0, 0, 0, 0]]),
    ("late", &[[255, 11, 255, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]]),
    ("twice", &[[6, 1, 0, 0, 0, 0, 0, 0], [255, 11, 255, 0, 0, 0, 0, 0]]),
    ("refused", &[[0, 1, 255, 0, 0, 0, 0, 0], [255, 11, 255, 0, 0, 0, 0, 0]]),
    ("elsewhere", &[[9, 2, 0, 0, 0, 0, 0, 0], [255, 11, 255, 0, 0, 0, 0, 0]]),
    ("early", &[[13, 0, 13, 0, 200, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]]),
];

/// These as programs, with their names.
fn ends() -> impl Iterator<Item = (String, Vec<u8>)> {
    ENDS.iter().flat_map(|(what, begin)| {
        ENDINGS.iter().map(move |(how, end)| {
            let mut program = vec![0; 17 + 2 * STEP];
            // The port of the control connection is the user's, and that of its lanes is none.
            program[1] = 0x41;
            program.extend([begin.as_flattened(), end.as_flattened()].concat());
            (format!("{what}-{how}"), program)
        })
    })
}

/// A program by its number, the same in every run with the same seed.
fn program(number: u64) -> Vec<u8> {
    let mut random = Random::new(9500 + number);
    let steps = 2 + random.below(70) as usize;
    let mut program: Vec<u8> = (0..17 + steps * STEP).map(|_| random.number() as u8).collect();
    // Most begin as they should: with pages that are right where some are shared, and a grant that is.
    if random.below(8) > 0 {
        program[2] = if random.below(8) > 0 { 0 } else { 200 + random.below(56) as u8 };
        program[17..17 + 2 * STEP].fill(0);
    }
    // An owner that lies all the time is found out at once. Most tell the truth more often than not.
    let truth = random.below(8) * 30;
    for step in program[17..].chunks_mut(STEP) {
        if step[0] < 144 && random.below(256) < truth {
            step.copy_from_slice(&[0, 1, 0, 0, 0, 0, 0, 0]);
        }
    }
    let mut scenes = SCENES.into_iter().chain(ENDS.map(|(_, scene)| scene));
    if let Some(scene) = scenes.nth(random.below(8) as usize) {
        let at = 17 + STEP * (2 + random.below(steps as u64 - 1) as usize);
        program.splice(at..at, scene.iter().flatten().copied());
    }
    program
}

/// Of all programs that were played, some got far enough to be worth it.
fn were_worth_it(all: Played, of: u64) {
    assert!(all.imported as u64 * 3 > of, "{all:?} of {of}");
    assert!(all.shared as u64 * 16 > of, "{all:?} of {of}");
    assert!(all.well as u64 > of / 4 && all.failed as u64 > of / 8, "{all:?} of {of}");
    assert!(all.taken_back as u64 > of / 4 && all.quiet as u64 > of / 4, "{all:?} of {of}");
}

#[test]
fn no_input_of_the_corpus_harms_the_user() {
    let _watchdog = watchdog("no_input_of_the_corpus_harms_the_user");
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/using/corpus");
    let mut inputs: Vec<_> = std::fs::read_dir(corpus).unwrap().map(|entry| entry.unwrap().path()).collect();
    inputs.sort();
    assert!(!inputs.is_empty(), "the corpus is empty");
    for input in inputs {
        play(&std::fs::read(&input).unwrap());
    }
}

#[test]
fn an_owner_is_asked_to_end_lanes_and_told_of_reads_that_nobody_wants_whatever_it_answers() {
    let _watchdog = watchdog("an_owner_is_asked_to_end_lanes_and_told_of_reads_that_nobody_wants");
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/using/corpus");
    for (name, program) in ends() {
        assert_eq!(
            std::fs::read(corpus.join(&name)).ok().as_ref(),
            Some(&program),
            "{name} is not in the corpus"
        );
        // Where its threads are late, the user has asked nothing yet.
        let asked = |played: Played| played.ended_lanes + played.withdrawn > 0;
        assert!((0..200).any(|_| asked(play(&program))), "{name}");
    }
}

#[test]
fn nothing_that_an_owner_can_take_away_or_that_is_no_memory_is_mapped() {
    let _watchdog = watchdog("nothing_that_an_owner_can_take_away_or_that_is_no_memory_is_mapped");
    let used = [
        [17, 5, 0, 0, 0, 0, 0, 0],
        [255, 0, 0, 200, 0, 0, 0, 0],
        [255, 0, 4, 200, 0, 0, 0, 0],
        [255, 13, 9, 0, 0, 0, 0, 0],
        [255, 0, 7, 1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0, 0],
    ];
    // The table, the pins, the bell, the mailbox, the segment; each of them as everything that it should not be.
    let mut all = Played::default();
    for which in [200, 201, 202, 203, 240] {
        for how in 0..10 {
            for way in [4, 6] {
                let setup = [way, 1, which, how, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
                let program = [&setup[..], &[0; 2 * STEP], used.as_flattened()].concat();
                all += play(&program);
            }
        }
    }
    // Where only the segment is wrong, the stream serves, and so it does where a descriptor is right by accident.
    assert!(all.imported >= 10 && all.imported < 50, "{all:?}");
}

#[test]
fn no_made_up_program_harms_the_user() {
    let _watchdog = watchdog("no_made_up_program_harms_the_user");
    let mut all = Played::default();
    for number in 0..programs() {
        all += play(&program(number));
    }
    were_worth_it(all, programs());
}

/// Whatever an owner behind a wall hands over, nothing of it is used; the stream serves.
fn no_made_up_program_from_behind_harms_the_user(wall: Wall, test: &str) {
    let _watchdog = watchdog(test);
    let count = programs() / 4;
    let start = || Process::start_behind(wall, "rogue");
    let mut process = match start() {
        Ok(process) => process,
        Err(reason) => return skip(test, "walls", &reason),
    };
    let mut all = Played::default();
    for number in 0..count {
        if process.ask("rogue-open unix 4096").is_err() {
            process = start().unwrap();
        }
        let mut program = program(1 << 33 | number);
        // Over a Unix socket, and most by whatever path there is, with pages all the same.
        program[0] = program[0] & !7 | [2, 6, 6, 6, 4, 7][number as usize % 6];
        program[1] |= 1;
        let played = play_against(&program, true, |medium| Box::new(RemoteOwner::open(&mut process, medium)));
        assert_eq!(played.shared, 0, "program {number}");
        all += played;
    }
    assert!(all.imported as u64 * 4 > count && all.well as u64 * 8 > count, "{all:?} of {count}");
}

#[test]
fn no_made_up_program_of_an_owner_of_another_user_harms_the_user() {
    let test = "no_made_up_program_of_an_owner_of_another_user_harms_the_user";
    no_made_up_program_from_behind_harms_the_user(Wall::User(65_534), test);
}

#[test]
fn no_made_up_program_of_an_owner_in_another_pid_namespace_harms_the_user() {
    let test = "no_made_up_program_of_an_owner_in_another_pid_namespace_harms_the_user";
    no_made_up_program_from_behind_harms_the_user(Wall::PidNamespace, test);
}

#[test]
fn no_made_up_program_of_another_process_harms_the_user() {
    let _watchdog = watchdog("no_made_up_program_of_another_process_harms_the_user");
    let mut process = Process::start("rogue");
    let mut all = Played::default();
    for number in 0..programs() {
        // Its own memory is its own affair: what it makes a user write there may end it.
        if process.ask("rogue-open unix 4096").is_err() {
            process = Process::start("rogue");
        }
        all += play_against(&program(1 << 32 | number), true, |medium| {
            Box::new(RemoteOwner::open(&mut process, medium))
        });
    }
    were_worth_it(all, programs());
}
