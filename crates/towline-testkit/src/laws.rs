//! The laws that every path obeys: functions over a [`Bench`], which fail by panicking.
//!
//! Those named `law_N_…` are the numbered contract of a submission (`crates/towline/src/transport.rs`); the others
//! are what users are promised on top of it. [`each_law!`](crate::each_law) lists them all, so that a test suite can
//! make one test of each; [`run`] runs one.

mod contract;
mod counting;
mod ending;
mod futures;
mod messages;
mod moving;
mod parts;
mod pinning;
mod programs;
mod refusing;
mod routing;
mod tickets;

pub use contract::*;
pub use counting::*;
pub use ending::*;
pub use futures::*;
pub use messages::*;
pub use moving::*;
pub use parts::*;
pub use pinning::*;
pub use programs::*;
pub use refusing::*;
pub use routing::*;
pub use tickets::*;

use std::thread;

use crate::bench::{Bench, STALL, Setting};
use crate::{paths, skip, watchdog};

/// Calls a macro with the arguments given and the names of all laws.
#[macro_export]
macro_rules! each_law {
    ($suite:ident!($($arguments:tt)*)) => {
        $suite! {
            $($arguments)*:
            // contract
            law_1_a_read_that_succeeds_has_the_owners_bytes
            law_2_a_write_is_visible_before_its_notification_and_its_signal
            law_3_nothing_outside_the_requested_ranges_changes
            law_4_a_transfer_ends_once_and_then_nothing_touches_the_local_memory
            law_5_after_deregistration_every_access_is_stale_and_moves_nothing
            law_6_access_outside_the_range_or_the_rights_is_refused_before_a_byte_moves
            law_7_a_cancelled_transfer_does_not_wait_for_its_peer
            law_8_atomics_on_one_word_stay_atomic_over_all_paths
            // moving
            a_whole_region_is_read_and_written
            spans_are_read_and_written
            blocks_with_random_indices_are_read_and_written
            blocks_of_the_tickets_layout_are_read
            parts_of_a_local_region_are_targets
            many_transfers_are_in_flight_at_once
            threads_share_a_remote
            three_hundred_overlapping_views_of_one_allocation_are_read
            // parts
            parts_of_many_regions_are_read_and_written
            parts_move_ranges_and_blocks
            parts_share_a_region_and_overlap
            what_follows_parts_follows_all_of_them
            a_stale_part_ends_the_whole_and_is_named
            a_wrong_part_is_refused_before_a_byte_of_any_moves
            one_cancel_and_one_deadline_end_all_parts
            // programs
            programs_move_what_their_indices_name
            starts_of_one_program_do_not_disturb_each_other
            a_program_of_a_region_that_is_gone_is_stale_and_can_be_rebound
            wrong_programs_and_indices_are_refused_before_a_byte_moves
            // counting
            fetch_add_from_four_threads_sums_exactly
            compare_swap_from_four_threads_loses_nothing
            reductions_from_four_threads_lose_nothing
            a_large_reduction_reaches_every_element
            misaligned_words_and_elements_are_refused
            signals_add_up_and_wake_the_waiter
            // messages
            messages_arrive_once_each
            a_message_follows_the_bytes_of_a_read
            messages_that_are_too_long_are_refused
            waiting_for_a_message_or_a_signal_ends_in_time
            // pinning
            a_pinned_region_is_copied_both_ways
            words_of_a_pinned_region_stay_atomic_over_all_paths
            a_pinned_region_is_given_back_only_when_it_is_let_go
            a_region_dropped_while_pinned_is_parked
            pinned_access_outside_the_range_or_the_rights_is_refused
            hundreds_of_regions_are_pinned_at_once
            closing_the_user_leaves_what_it_has_pinned_in_place
            memory_that_is_not_shared_cannot_be_pinned
            // refusing
            lengths_of_zero_are_refused
            unequal_lengths_and_counts_are_refused
            offsets_and_indices_out_of_range_are_refused
            a_local_region_of_another_endpoint_is_refused
            rights_that_the_ticket_lacks_are_refused
            a_refused_storage_comes_back
            // tickets
            a_narrowed_range_is_all_that_can_be_reached
            narrowed_rights_are_all_that_is_allowed
            a_lease_ends
            forged_tickets_are_refused_and_counted
            damaged_tickets_do_not_decode
            tickets_of_the_gone_are_refused
            a_batch_of_tickets_gets_an_answer_each
            secrets_open_and_shut
            // ending
            storage_comes_back_after_transfers
            deregistering_again_after_closing_works
            a_local_region_dropped_in_flight_stays_until_the_end
            a_remote_region_dropped_in_flight_ends_the_transfer
            a_cancelled_buffer_can_be_reused
            blocks_that_failed_are_named_and_the_others_are_right
            a_deadline_ends_a_transfer
            closing_the_user_ends_its_use
            closing_the_user_does_not_wait_for_its_peer
            closing_the_owner_ends_everybodys_use
            what_was_moved_is_counted
            // futures
            a_transfer_is_a_future
            an_import_is_a_future
            a_notification_is_a_future
            // routing
            every_path_is_explained
            required_forbidden_and_isolated_paths_are_respected
        }
    };
}

/// Calls a macro with the arguments given and the names of the laws that hold where words cannot be acted on: on GPUs.
#[macro_export]
macro_rules! each_law_without_words {
    ($suite:ident!($($arguments:tt)*)) => {
        $suite! {
            $($arguments)*:
            law_1_a_read_that_succeeds_has_the_owners_bytes
            law_2_a_write_is_visible_before_its_notification_and_its_signal
            law_3_nothing_outside_the_requested_ranges_changes
            law_4_a_transfer_ends_once_and_then_nothing_touches_the_local_memory
            law_5_after_deregistration_every_access_is_stale_and_moves_nothing
            law_6_access_outside_the_range_or_the_rights_is_refused_before_a_byte_moves
            law_7_a_cancelled_transfer_does_not_wait_for_its_peer
            a_whole_region_is_read_and_written
            spans_are_read_and_written
            blocks_with_random_indices_are_read_and_written
            blocks_of_the_tickets_layout_are_read
            parts_of_a_local_region_are_targets
            many_transfers_are_in_flight_at_once
            threads_share_a_remote
            three_hundred_overlapping_views_of_one_allocation_are_read
            parts_of_many_regions_are_read_and_written
            parts_move_ranges_and_blocks
            parts_share_a_region_and_overlap
            what_follows_parts_follows_all_of_them
            a_stale_part_ends_the_whole_and_is_named
            a_wrong_part_is_refused_before_a_byte_of_any_moves
            one_cancel_and_one_deadline_end_all_parts
            programs_move_what_their_indices_name
            starts_of_one_program_do_not_disturb_each_other
            a_program_of_a_region_that_is_gone_is_stale_and_can_be_rebound
            wrong_programs_and_indices_are_refused_before_a_byte_moves
            messages_arrive_once_each
            a_message_follows_the_bytes_of_a_read
            offsets_and_indices_out_of_range_are_refused
            a_local_region_of_another_endpoint_is_refused
            a_narrowed_range_is_all_that_can_be_reached
            a_lease_ends
            a_batch_of_tickets_gets_an_answer_each
            storage_comes_back_after_transfers
            a_local_region_dropped_in_flight_stays_until_the_end
            a_remote_region_dropped_in_flight_ends_the_transfer
            a_cancelled_buffer_can_be_reused
            blocks_that_failed_are_named_and_the_others_are_right
            a_deadline_ends_a_transfer
            closing_the_user_ends_its_use
            closing_the_user_does_not_wait_for_its_peer
            closing_the_owner_ends_everybodys_use
            what_was_moved_is_counted
            a_transfer_is_a_future
            an_import_is_a_future
            every_path_is_explained
            required_forbidden_and_isolated_paths_are_respected
        }
    };
}

/// Runs a law over a path with storages of these kinds, or says why that cannot be done here.
pub fn run_with(
    path: &str,
    setting: Setting,
    kinds: (&'static str, &'static str),
    name: &str,
    law: fn(&Bench),
) {
    let name = format!("{path} {} {}::{name}", kinds.0, kinds.1);
    let _watchdog = watchdog::watch(name.clone(), STALL * 10);
    match Bench::open_with(path, setting, Some(kinds)) {
        Ok(bench) => law(&bench),
        Err(reason) => skip::skip(&name, path, &reason),
    }
}

/// Runs a law over a path, in one process and with the owner in a worker, where the path can be tried so; or says why that cannot
/// be done here. Where `TOWLINE_TEST_SETTING` names one of the two, the other is left out.
pub fn run(path: &str, name: &str, law: fn(&Bench)) {
    let wanted = std::env::var(SETTING).unwrap_or_default();
    let is_wanted = |setting: &&Setting| wanted.is_empty() || wanted == setting.to_string();
    let settings: Vec<_> = Setting::all_of(&paths::known(path)).iter().filter(is_wanted).collect();
    if settings.is_empty() {
        skip::skip(&format!("{path}::{name}"), path, &format!("{SETTING} leaves nothing of it"));
    }
    for setting in settings {
        let name = format!("{path}::{name}, {setting}");
        let _watchdog = watchdog::watch(name.clone(), STALL * 10);
        let _named = Named(&name);
        match Bench::open(path, *setting) {
            Ok(bench) => law(&bench),
            Err(reason) => skip::skip(&name, path, &reason),
        }
    }
}

/// The variable that leaves out all settings but one: `one process` or `two processes`.
const SETTING: &str = "TOWLINE_TEST_SETTING";

/// Says in which setting a law did not hold: the test has the same name in both.
struct Named<'a>(&'a str);

impl Drop for Named<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            skip::say(&format!("FAILED {}\n", self.0));
        }
    }
}
