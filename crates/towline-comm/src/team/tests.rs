//! Threads as ranks, over shared memory and over sockets.
#![allow(clippy::unwrap_used, clippy::panic)]

mod channels;
mod faults;
mod processes;
mod rounds;

use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use towline::{Endpoint, Patience, Routing};
use towline_testkit::watchdog;

use super::{Seat, Team, TeamOptions};

/// How the ranks of a test reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Links {
    /// By shared memory.
    Near,
    /// By sockets only.
    Far,
    /// By whatever works on one host without shared memory.
    Host,
    /// What the odd ranks write goes by sockets, what the even ones write by memory: both meet in one region.
    Mixed,
}

const ALL_LINKS: [Links; 4] = [Links::Near, Links::Far, Links::Host, Links::Mixed];

impl Links {
    fn routing(self, rank: usize) -> Routing {
        let far = Routing::default().require("tcp").unwrap();
        match self {
            Links::Near => Routing::default(),
            Links::Far => far,
            Links::Host => {
                Routing::default().forbid("inproc").and_then(|routing| routing.forbid("mapped")).unwrap()
            }
            Links::Mixed if rank % 2 == 1 => far,
            Links::Mixed => Routing::default(),
        }
    }
}

fn options(timeout: Duration) -> TeamOptions {
    // Tests share few cores: a rank that spins keeps another rank from running.
    let patience = Patience { spin: Duration::from_micros(1), yielding: Duration::from_micros(20) };
    TeamOptions { timeout, contexts: 2, signals: 4, patience }
}

/// Makes a team of that many threads and runs the body in each; gives back what they return, by rank.
fn with_ranks<T: Send>(
    nranks: usize,
    links: Links,
    timeout: Duration,
    body: impl Fn(&Arc<Team>) -> T + Sync,
) -> Vec<T> {
    let _watchdog = watchdog::watch(format!("{nranks} ranks, {links:?}"), Duration::from_secs(120));
    let mut seats = Vec::new();
    for rank in 0..nranks {
        let name = format!("rank-{rank}");
        let endpoint = Endpoint::options(&name).routing(links.routing(rank)).open().unwrap();
        seats.push(Seat::open(&endpoint, nranks, options(timeout)).unwrap());
    }
    let tickets: Vec<_> = seats.iter().map(|seat| seat.ticket().unwrap()).collect();
    // A body may abort immediately, which must not meet a rank that is still assembling.
    let all_seated = Barrier::new(nranks);
    thread::scope(|scope| {
        let threads: Vec<_> = seats
            .into_iter()
            .enumerate()
            .map(|(rank, seat)| {
                let (tickets, body, all_seated) = (tickets.clone(), &body, &all_seated);
                scope.spawn(move || {
                    let team = Team::assemble(seat, rank, tickets);
                    all_seated.wait();
                    body(&team.unwrap())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Long enough for anything that is not meant to time out.
const LONG: Duration = Duration::from_secs(60);

/// Bytes that say where they belong.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 8);
    let mut word = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    while bytes.len() < len {
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(seed);
        bytes.extend_from_slice(&(word >> 7).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
