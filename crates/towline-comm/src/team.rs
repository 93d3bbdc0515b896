//! The ranks of one communicator, how each is reached, and how they wait for each other.
#![allow(dead_code, unused_variables, reason = "the first commit fixes the signatures")]

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use towline::{Endpoint, Kind, Ticket};

use crate::{Error, Result};

/// How long a waiter spins and yields before it sleeps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    pub(crate) spin: Duration,
    pub(crate) yielding: Duration,
}

/// The most bytes that ride along with an announcement.
pub(crate) const PAYLOAD: usize = 8 << 10;

/// The most bytes that one rank can give to [`Team::all_gather_bytes`].
pub(crate) const MOST_GATHERED: usize = 1 << 20;

/// What all ranks of a team agree on, and how long they wait.
#[derive(Debug, Clone)]
pub(crate) struct TeamOptions {
    /// The longest wait for another rank.
    pub(crate) timeout: Duration,
    /// How many contexts signals have.
    pub(crate) contexts: u32,
    /// How many signals each context has.
    pub(crate) signals: u32,
    /// How long a waiter spins and yields before it sleeps.
    pub(crate) patience: Patience,
}

/// What one rank prepares before the meeting: its control region.
pub(crate) struct Seat {}

impl Seat {
    /// Allocates and registers the control region of a rank in a team of that many.
    pub(crate) fn open(endpoint: &Endpoint, nranks: usize, options: TeamOptions) -> Result<Seat> {
        Err(later())
    }

    /// What the other ranks need.
    pub(crate) fn ticket(&self) -> Result<Ticket> {
        Err(later())
    }
}

/// A collective call as a rank announces it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call<'a> {
    /// The operation, for errors.
    pub(crate) name: &'static str,
    /// What must be equal on all ranks.
    pub(crate) digest: u64,
    /// What this rank tells the others.
    pub(crate) words: [u64; 4],
    /// At most [`PAYLOAD`] bytes that ride along.
    pub(crate) payload: &'a [u8],
}

/// A collective call that all ranks have announced. What they announced can be read until this rank's next
/// [`enter`](Team::enter).
#[must_use = "what the others announced is here"]
pub(crate) struct Round<'t> {
    team: &'t Team,
    number: u64,
}

impl Round<'_> {
    /// What that rank told the others.
    pub(crate) fn words(&self, rank: usize) -> [u64; 4] {
        [0; 4]
    }

    /// How many bytes rode along with that rank's announcement.
    pub(crate) fn payload_len(&self, rank: usize) -> usize {
        0
    }

    /// Copies out the start of what rode along with that rank's announcement; returns how many bytes were copied.
    pub(crate) fn payload_into(&self, rank: usize, into: &mut [u8]) -> Result<usize> {
        Err(later())
    }
}

/// A message to a rank: sent by [`Team::exchange_messages`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outgoing<'a> {
    pub(crate) peer: usize,
    /// What must be equal on both sides.
    pub(crate) digest: u64,
    pub(crate) bytes: &'a [u8],
}

/// Room for a message from a rank: filled by [`Team::exchange_messages`].
#[derive(Debug)]
pub(crate) struct Incoming<'a> {
    pub(crate) peer: usize,
    /// What must be equal on both sides.
    pub(crate) digest: u64,
    pub(crate) into: &'a mut [u8],
}

/// The ranks of one communicator.
pub(crate) struct Team {
    rank: usize,
    nranks: usize,
    endpoint: Endpoint,
    options: TeamOptions,
    serial: Mutex<()>,
}

impl Team {
    /// Makes a team of the seats whose tickets these are, by rank: imports all of them, and meets the others.
    pub(crate) fn assemble(seat: Seat, rank: usize, tickets: Vec<Ticket>) -> Result<Arc<Team>> {
        Err(later())
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn nranks(&self) -> usize {
        self.nranks
    }

    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    pub(crate) fn options(&self) -> &TeamOptions {
        &self.options
    }

    /// Whether that rank's memory is shared with this process; true for this rank itself.
    pub(crate) fn is_near(&self, peer: usize) -> bool {
        false
    }

    /// Holds off the collective calls of other threads: taken once around everything that one call does.
    pub(crate) fn serialise(&self) -> MutexGuard<'_, ()> {
        self.serial.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Announces a collective call and waits for everybody's announcement. A digest that differs is `Invalid` on
    /// every rank and names those that differ from most; the team stays usable.
    pub(crate) fn enter(&self, call: Call<'_>) -> Result<Round<'_>> {
        Err(later())
    }

    /// Returns when everybody has left: what peers read or wrote in this round may be reused.
    pub(crate) fn leave(&self, round: Round<'_>) -> Result<()> {
        Err(later())
    }

    /// Returns when everybody has called it.
    pub(crate) fn barrier(&self) -> Result<()> {
        Err(later())
    }

    /// Gives every rank the bytes of all, by rank; at most [`MOST_GATHERED`] of each, and any length.
    pub(crate) fn all_gather_bytes(&self, name: &'static str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        Err(later())
    }

    /// Sends bytes on the ordered channel to that rank; returns when they are on their way.
    pub(crate) fn send(&self, peer: usize, bytes: &[u8]) -> Result<()> {
        Err(later())
    }

    /// Takes bytes from the ordered channel of that rank.
    pub(crate) fn recv(&self, peer: usize, into: &mut [u8]) -> Result<()> {
        Err(later())
    }

    /// Sends to one rank and receives from one (it may be the same, or this rank itself) at once.
    pub(crate) fn exchange(&self, to: usize, bytes: &[u8], from: usize, into: &mut [u8]) -> Result<()> {
        Err(later())
    }

    /// Sends to many ranks and receives from many at once; what concerns one rank goes in the order given.
    pub(crate) fn exchange_all(
        &self,
        op: &'static str,
        sends: &[(usize, &[u8])],
        receives: &mut [(usize, &mut [u8])],
    ) -> Result<()> {
        Err(later())
    }

    /// Sends a message whose length and digest the receiver checks; a difference is `Invalid` on both sides, and the
    /// channel stays usable. Returns when the receiver has accepted it.
    pub(crate) fn send_message(&self, peer: usize, digest: u64, bytes: &[u8]) -> Result<()> {
        self.exchange_messages("send", &[Outgoing { peer, digest, bytes }], &mut [])
    }

    /// Receives a message of exactly that length and digest.
    pub(crate) fn recv_message(&self, peer: usize, digest: u64, into: &mut [u8]) -> Result<()> {
        self.exchange_messages("recv", &[], &mut [Incoming { peer, digest, into }])
    }

    /// Sends and receives many messages at once; those of one rank go in the order given.
    pub(crate) fn exchange_messages(
        &self,
        op: &'static str,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
    ) -> Result<()> {
        Err(later())
    }

    /// Raises this rank's counter of that context and index at a peer, after everything that this thread wrote there.
    pub(crate) fn signal(&self, peer: usize, context: u32, index: u32, add: u64) -> Result<()> {
        Err(later())
    }

    /// How far that rank has raised its counter here; 0 for a counter that does not exist.
    pub(crate) fn signals(&self, from: usize, context: u32, index: u32) -> u64 {
        0
    }

    /// Waits until `check` gives something. The error names who is missing, as `missing` says at that moment; an empty
    /// list means everybody. It does not fail the team: a collective calls [`abort`](Self::abort) with it.
    pub(crate) fn wait<T>(
        &self,
        op: &'static str,
        missing: impl Fn() -> Vec<usize>,
        check: impl FnMut() -> Option<T>,
    ) -> Result<T> {
        Err(later())
    }

    /// Fails the team: every rank's waits and later calls end with this error.
    pub(crate) fn abort(&self, error: &Error) {}

    /// Fails the team because this rank no longer takes part.
    pub(crate) fn revoke(&self) {}

    /// Why the team has failed; `None` while it works.
    pub(crate) fn failure(&self) -> Option<Error> {
        None
    }

    /// The ranks that cannot be reached any more.
    pub(crate) fn dead(&self) -> Vec<usize> {
        Vec::new()
    }
}

fn later() -> Error {
    Error::new(Kind::Unsupported, "team", "not there yet")
}
