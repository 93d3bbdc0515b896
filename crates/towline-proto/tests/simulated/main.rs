//! The rules of a session under a simulated network and a clock of its own: thousands of seeds in seconds.
//!
//! What is real here: the machines that decide for both sides, the frames and their codec, cut at any byte; the handshake; the bookkeeping
//! of transfers. What is played: sockets with their buffers, memory, and time. It shows that a transfer ends once, by its limit; that
//! nothing of it lands once it is quiet; that local memory is not touched behind its end, whatever an owner says; and that nothing
//! changes but what a ticket allows, until the region is taken back. That the code around the machines does what they say is shown by the
//! laws, the proxy and the campaigns.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod handshake;
mod hostile_owner;
mod hostile_user;
mod network;
mod owner;
mod user;
mod world;

use world::{Play, World};

const SEEDS: u64 = 4000;

#[test]
fn under_every_seed_transfers_end_once_in_time_and_nothing_lands_that_is_quiet() {
    for seed in 0..SEEDS {
        let late = World::new(seed, Play::Honest).run(seed);
        assert!(late.is_none(), "seed {seed}: {late:?}");
    }
}

#[test]
fn whatever_an_owner_says_transfers_end_once_in_time_and_memory_is_touched_only_while_it_is_lent() {
    for seed in 0..SEEDS {
        World::new(seed, Play::HostileOwner).run(seed);
    }
}

#[test]
fn the_simulation_finds_what_is_wrong_with_ending_writes_at_once() {
    assert!((0..SEEDS).any(|seed| World::new(seed, Play::EndsAtOnce).run(seed).is_some()));
}
