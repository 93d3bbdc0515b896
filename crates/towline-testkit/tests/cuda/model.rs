//! Random programs against plain vectors, on memory of GPUs. `TOWLINE_TEST_SEED` tries others.

#[path = "../model/world.rs"]
mod world;

use std::time::Duration;

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use towline_testkit::bench::routing;
use towline_testkit::{random, watchdog};

use self::world::{Kinds, Step};
use super::{LONGEST, driver};

const PROGRAMS: u32 = 24;
const LONG_PROGRAMS: u32 = 8;

fn agree(test: &str, path: &str, kinds: Kinds, cases: u32, programs: impl Strategy<Value = Vec<Step>>) {
    if !driver(test) {
        return;
    }
    let _watchdog = watchdog::watch(format!("model: {test}"), Duration::from_secs(240));
    let routing = routing(path);
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 100, ..Config::default() };
    let mut seed = [0; 32];
    seed[..8].copy_from_slice(&random::seed().to_le_bytes());
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed));
    let outcome = runner.run(&programs, |program| world::run(&routing, kinds, &program));
    if let Err(error) = outcome {
        panic!("seed {}: {error}", random::seed());
    }
}

macro_rules! models {
    ($($name:ident: $path:literal $theirs:literal $ours:literal;)*) => {$(
        mod $name {
            use super::*;

            #[test]
            fn random_programs_agree_with_the_model() {
                let kinds = Kinds::new($theirs, $ours);
                agree(concat!(stringify!($name), "::random_programs"), $path, kinds, PROGRAMS, world::program());
            }

            #[test]
            fn programs_of_any_length_and_alignment_agree_with_the_model() {
                let kinds = Kinds { local: (1 << LONGEST) + 101, ..Kinds::new($theirs, $ours) };
                let programs = world::long_program(LONGEST);
                agree(concat!(stringify!($name), "::any_length"), $path, kinds, LONG_PROGRAMS, programs);
            }
        }
    )*};
}

models! {
    on_a_gpu: "inproc" "device" "device";
    from_a_gpu_to_the_host: "inproc" "exportable" "system";
    from_the_host_to_a_gpu: "inproc" "system" "device";
    from_mapped_memory_to_a_gpu: "mapped" "shared" "device";
    between_gpus_over_unix_sockets: "unix" "device" "device";
    from_a_gpu_to_pinned_memory_over_tcp: "tcp" "device" "pinned";
}
