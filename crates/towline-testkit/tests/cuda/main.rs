//! GPUs without a GPU: what must hold on each of them, on the fake driver; and what a driver can do wrong.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]
#![allow(unsafe_code, reason = "starts copies on a GPU")]

mod faults;
mod hostile;
mod kernel;
mod launches;
mod model;
mod processes;
mod suite;
mod transfers;

use std::path::PathBuf;
use std::sync::Arc;

use towline::cuda::Gpu;
use towline_testkit::process::use_driver;

/// The logarithm of the longest transfer of a random program.
const LONGEST: u32 = 20;

fn fake() -> PathBuf {
    towline_fake_cuda::library().expect("Cargo builds the fake for its dependants")
}

/// Loads the driver, here and in workers.
fn driver(_test: &str) -> bool {
    use_driver(&fake());
    true
}

fn here(test: &str) -> Option<Arc<Gpu>> {
    driver(test);
    Some(Gpu::open(0).unwrap())
}

macro_rules! tests {
    ($($name:ident),* $(,)?) => {
        $(#[test] fn $name() {
            if let Some(gpu) = here(stringify!($name)) {
                let beside = stringify!($name) != "a_copy_waits_for_a_stream_and_holds_one_back";
                let _beside = beside.then(|| suite::ALONE.read());
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

macro_rules! process_tests {
    ($($name:ident),* $(,)?) => {
        $(#[test] fn $name() { processes::$name(); })*
    };
}

process_tests![
    a_killed_owner_ends_paged_copies_and_the_context_stays_usable,
    a_killed_user_does_not_hold_the_owners_gpu_memory,
    memory_in_many_parts_is_opened_side_by_side,
    bytes_with_checksums_go_between_gpus_over_sockets,
    a_write_to_a_gpu_over_tcp_that_is_given_up_is_not_quiet,
    a_stopped_user_keeps_the_memory_that_it_has_open_and_lets_go_when_it_goes_on,
    a_user_that_is_stopped_during_paged_copies_holds_the_memory_and_no_longer,
    regions_of_one_allocation_come_and_go_while_others_are_used,
    memory_is_taken_back_under_paged_copies_and_nothing_stale_is_read,
    a_transfer_keeps_the_order_of_a_stream,
    operations_keep_the_order_of_a_stream,
];
