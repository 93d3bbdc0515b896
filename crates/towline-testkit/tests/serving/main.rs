//! The server side of the protocol, over the stored corpus of its fuzz target and over made-up inputs.
//!
//! `TOWLINE_PROGRAMS` sets how many of these there are.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use std::path::Path;
use std::time::Duration;

use towline_testkit::random::Random;
use towline_testkit::serving::play;
use towline_testkit::watchdog::watch;

fn programs() -> u64 {
    std::env::var("TOWLINE_PROGRAMS").ok().and_then(|number| number.parse().ok()).unwrap_or(400)
}

#[test]
fn no_input_of_the_corpus_harms_the_owner() {
    let _watchdog = watch("no_input_of_the_corpus_harms_the_owner", Duration::from_secs(120));
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/serving/corpus");
    let mut inputs: Vec<_> = std::fs::read_dir(corpus).unwrap().map(|entry| entry.unwrap().path()).collect();
    inputs.sort();
    assert!(!inputs.is_empty(), "the corpus is empty");
    for input in inputs {
        play(&std::fs::read(&input).unwrap());
    }
}

#[test]
fn no_made_up_program_harms_the_owner() {
    let _watchdog = watch(
        "no_made_up_program_harms_the_owner",
        Duration::from_secs(240) + Duration::from_millis(100) * programs() as u32,
    );
    for number in 0..programs() {
        let mut random = Random::new(9000 + number);
        let len = 1 + random.below(600) as usize;
        let program: Vec<u8> = (0..len).map(|_| random.number() as u8).collect();
        play(&program);
    }
}
