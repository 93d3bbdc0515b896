//! GPUs without a GPU: what must hold on each of them, on the fake driver; and what a driver can do wrong.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]
#![allow(unsafe_code, reason = "starts copies on a GPU")]

mod faults;
mod kernel;
mod suite;

use std::path::PathBuf;
use std::sync::Arc;

use towline::cuda::{Gpu, load_driver};

fn fake() -> PathBuf {
    towline_fake_cuda::library().expect("Cargo builds the fake for its dependants")
}

fn here(_test: &str) -> Option<Arc<Gpu>> {
    load_driver(fake()).unwrap();
    Some(Gpu::open(0).unwrap())
}

macro_rules! tests {
    ($($name:ident),* $(,)?) => {
        $(#[test] fn $name() {
            if let Some(gpu) = here(stringify!($name)) {
                suite::$name(&gpu);
            }
        })*
    };
}

tests![
    bytes_of_a_device_go_in_and_out,
    pinned_memory_is_reached_by_the_gpu_and_mapped_by_peers,
    borrowed_memory_is_looked_up,
    the_current_context_of_the_caller_stays,
    runs_of_any_length_and_alignment_arrive_and_nothing_else_changes,
    blocks_of_one_length_arrive,
    blocks_are_copied_by_their_indices,
    lists_longer_than_all_that_is_in_flight_arrive,
    nothing_to_copy_is_done_at_once,
    copies_run_beside_each_other,
    a_copy_waits_for_a_stream_and_holds_one_back,
];
