//! The same on a real GPU, where there is one.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]
#![allow(unsafe_code, reason = "starts copies on a GPU")]

#[path = "../cuda/suite.rs"]
mod suite;

use std::sync::Arc;

use towline::cuda::{Availability, Gpu, availability};
use towline_testkit::skip::skip;

/// The first GPU; `None`, with a line that says why, where there is none.
fn here(test: &str) -> Option<Arc<Gpu>> {
    match availability() {
        Availability::Found { fake: false, devices, .. } if !devices.is_empty() => {
            Some(Gpu::open(0).unwrap())
        }
        Availability::Missing { tried, .. } => {
            skip(test, "cuda", &format!("there is no GPU: {}", tried.join("; ")));
            None
        }
        _ => {
            skip(test, "cuda", "there is no GPU: the driver is a fake, or has no device");
            None
        }
    }
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
