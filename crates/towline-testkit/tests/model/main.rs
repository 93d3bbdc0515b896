//! Random programs against plain vectors, over each kind of path. `TOWLINE_TEST_SEED` tries others.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod world;

use std::time::Duration;

use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use towline_testkit::bench::{forced, routing};
use towline_testkit::{random, watchdog};

const PROGRAMS: u32 = 256;

fn programs_agree_with_the_model(path: &str, kind: &'static str) {
    let path = forced().unwrap_or_else(|| path.to_owned());
    let _watchdog = watchdog::watch(format!("model over {path}"), Duration::from_secs(240));
    let routing = routing(&path);
    let config =
        Config { cases: PROGRAMS, failure_persistence: None, max_shrink_iters: 400, ..Config::default() };
    let mut seed = [0; 32];
    seed[..8].copy_from_slice(&random::seed().to_le_bytes());
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed));
    let kinds = world::Kinds::new(kind, "system");
    let outcome = runner.run(&world::program(), |program| world::run(&routing, kinds, &program));
    if let Err(error) = outcome {
        panic!("seed {}: {error}", random::seed());
    }
}

#[test]
fn random_programs_agree_with_the_model_in_one_process() {
    programs_agree_with_the_model("inproc", "system");
}

#[test]
fn random_programs_agree_with_the_model_over_mapped_memory() {
    programs_agree_with_the_model("mapped", "shared");
}

#[test]
fn random_programs_agree_with_the_model_over_unix_sockets() {
    programs_agree_with_the_model("unix", "system");
}

#[test]
fn random_programs_agree_with_the_model_over_tcp() {
    programs_agree_with_the_model("tcp", "shared");
}
