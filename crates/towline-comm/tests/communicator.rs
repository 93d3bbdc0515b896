//! The communicator through its public face: meeting, life, windows, one-sided access, groups, processes.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "communicator/groups.rs"]
mod groups;
#[path = "communicator/hostile.rs"]
mod hostile;
#[path = "communicator/laws.rs"]
mod laws;
#[path = "communicator/life.rs"]
mod life;
#[path = "communicator/meeting.rs"]
mod meeting;
#[path = "communicator/one_sided.rs"]
mod one_sided;
#[path = "communicator/processes.rs"]
mod processes;
#[path = "communicator/windows.rs"]
mod windows;

use std::thread;
use std::time::Duration;

use towline::Routing;
use towline_comm::{Communicator, Config, Error, Result};
use towline_testkit::watchdog::{self, Watchdog};

/// Longer than anything in these tests takes on a busy machine.
const LONG: Duration = Duration::from_secs(60);

fn watch(what: &str) -> Watchdog {
    watchdog::watch(what.to_owned(), Duration::from_secs(200))
}

fn config() -> Config {
    Config { timeout: LONG, ..Config::default() }
}

fn impatient() -> Config {
    Config { timeout: Duration::from_millis(300), ..Config::default() }
}

/// How the ranks of a test reach each other's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Links {
    /// It is mapped.
    Near,
    /// Over sockets.
    Far,
}

const ALL_LINKS: [Links; 2] = [Links::Near, Links::Far];

impl Links {
    fn config(self) -> Config {
        match self {
            Links::Near => config(),
            Links::Far => Config { routing: Routing::default().require("tcp").unwrap(), ..config() },
        }
    }
}

/// Runs a rank's part on a thread for each rank; every rank's outcome, by rank.
fn outcomes<T: Send>(
    nranks: usize,
    config: &Config,
    part: impl Fn(&Communicator, usize) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let comms = Communicator::init_all_with(nranks, config).unwrap();
    thread::scope(|scope| {
        let part = &part;
        let ranks: Vec<_> =
            comms.iter().enumerate().map(|(rank, comm)| scope.spawn(move || part(comm, rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// [`outcomes`] that are all good.
fn all<T: Send>(
    nranks: usize,
    config: &Config,
    part: impl Fn(&Communicator, usize) -> Result<T> + Sync,
) -> Vec<T> {
    let outcomes = outcomes(nranks, config, part);
    // All of them: what one rank ran into is often why another one waited.
    let wrong: Vec<_> = outcomes.iter().map(|outcome| outcome.as_ref().err()).collect();
    assert!(wrong.iter().all(Option::is_none), "by rank: {wrong:?}");
    outcomes.into_iter().map(Result::unwrap).collect()
}

/// [`outcomes`] that are all errors.
fn errors<T: Send + std::fmt::Debug>(
    nranks: usize,
    config: &Config,
    part: impl Fn(&Communicator, usize) -> Result<T> + Sync,
) -> Vec<Error> {
    outcomes(nranks, config, part).into_iter().map(|outcome| outcome.unwrap_err()).collect()
}
