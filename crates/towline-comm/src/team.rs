//! The ranks of one communicator, how each is reached, and how they wait for each other.
//!
//! Every rank owns a control region ([`layout`]) into which the others write: near ones by plain stores, far ones by
//! transfers ([`link`]). A waiter sleeps on one word of its own region ([`waiting`]). On that stand rounds, in which
//! all ranks announce a collective call ([`round`]), byte channels between two ranks ([`channel`]), and signals.

mod blame;
mod channel;
mod farewell;
mod inquiry;
mod layout;
mod link;
mod record;
mod round;
#[cfg(test)]
mod tests;
mod waiting;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use towline::{Access, Endpoint, Patience, Registered, SharedStorage, Ticket};

use self::channel::Channel;
pub(crate) use self::channel::{Pipes, Sum};
use self::layout::Layout;
use self::link::Links;
use self::round::{Progress, lost};
pub(crate) use self::waiting::AccessWait;
use crate::{Error, Result};

/// The most bytes that ride along with an announcement.
pub(crate) const PAYLOAD: usize = 8 << 10;

/// The most bytes that one rank can give to [`Team::all_gather_bytes`].
pub(crate) const MOST_GATHERED: usize = 1 << 20;

/// How long a rank that leaves waits until what it sent to far ranks has arrived.
const SETTLE: Duration = Duration::from_secs(2);

/// How often a rank that may spin looks for a signal and for nothing else: for about a microsecond, in which ranks in step answer.
const LOOKS: usize = 100;

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
pub(crate) struct Seat {
    endpoint: Endpoint,
    region: Registered<SharedStorage>,
    layout: Layout,
    nranks: usize,
    options: TeamOptions,
}

impl Seat {
    /// Allocates and registers the control region of a rank in a team of that many.
    pub(crate) fn open(endpoint: &Endpoint, nranks: usize, options: TeamOptions) -> Result<Seat> {
        let layout = Layout::new(nranks, options.contexts, options.signals)?;
        let region = endpoint.register(SharedStorage::new(layout.len())?, Access::READ_WRITE)?;
        Ok(Seat { endpoint: endpoint.clone(), region, layout, nranks, options })
    }

    /// What the other ranks need.
    pub(crate) fn ticket(&self) -> Result<Ticket> {
        Ok(self.region.ticket()?)
    }
}

/// A collective call as a rank announces it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call<'a> {
    /// The operation, for errors.
    pub(crate) name: &'static str,
    /// What must be equal on all ranks.
    pub(crate) digest: u64,
    /// What this rank sends the others.
    pub(crate) words: [u64; 4],
    /// At most [`PAYLOAD`] bytes that ride along.
    pub(crate) payload: &'a [u8],
}

/// A collective call that all ranks have announced. What they announced can be read until this rank's next
/// [`enter`](Team::enter).
pub(crate) struct Round<'t> {
    team: &'t Team,
    number: u64,
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
///
/// An error in a round or on a channel fails the team: every rank learns of it, and later calls end with it too.
/// Announcements that differ, and messages that are not what was asked for, leave it usable, since all that they
/// concern learn of them.
pub(crate) struct Team {
    options: TeamOptions,
    links: Links,
    channels: Vec<Channel>,
    progress: Mutex<Progress>,
    serial: Mutex<()>,
    failed: AtomicBool,
    failure: OnceLock<Error>,
    /// Whether all ranks share memory with all others, as all of them know: what rides along with an announcement is then
    /// read where its rank has it.
    all_near: AtomicBool,
    /// How often a wait for a signal looks at its counter before it waits in earnest.
    looks: usize,
}

impl Team {
    /// Makes a team of the seats whose tickets these are, by rank: imports all of them, and meets the others.
    pub(crate) fn assemble(seat: Seat, rank: usize, tickets: Vec<Ticket>) -> Result<Arc<Team>> {
        const OP: &str = "assemble";
        let Seat { endpoint, region, layout, nranks, options } = seat;
        if rank >= nranks || tickets.len() != nranks {
            let message = format!("rank {rank} of {nranks} needs {nranks} tickets and has {}", tickets.len());
            return Err(Error::invalid(OP, message));
        }
        let (mut remotes, mut failed) = (Vec::with_capacity(nranks), None);
        for (peer, remote) in endpoint.import_many(&tickets)?.into_iter().enumerate() {
            match remote {
                Ok(remote) if remote.len() == layout.len() as u64 => remotes.push(remote),
                Ok(_) => {
                    let message = format!("rank {peer} has joined with other options than rank {rank}");
                    failed = failed.or(Some(Error::invalid(OP, message).about([peer])));
                }
                Err(error) => failed = failed.or(Some(lost(OP, peer, &error.into()))),
            }
        }
        if let Some(error) = failed {
            return Err(farewell::part(&endpoint, &region, &layout, rank, remotes.iter(), error));
        }
        let links = Links::new(&endpoint, region, layout, rank, remotes, options.timeout)?;
        let looks = if options.patience.spin.is_zero() { 1 } else { LOOKS };
        let team = Arc::new(Team {
            looks,
            options,
            links,
            channels: (0..nranks).map(|_| Channel::default()).collect(),
            progress: Mutex::default(),
            serial: Mutex::default(),
            failed: AtomicBool::new(false),
            failure: OnceLock::new(),
            all_near: AtomicBool::new(false),
        });
        let (contexts, signals) = (u64::from(team.options.contexts), u64::from(team.options.signals));
        let near = u64::from((0..nranks).all(|peer| team.is_near(peer)));
        let words = [near, 0, 0, 0];
        let met = team.enter(Call { name: OP, digest: contexts << 32 | signals, words, payload: &[] })?;
        let all_near = (0..nranks).all(|peer| met.words(peer)[0] == 1);
        team.all_near.store(all_near, Ordering::Relaxed);
        Ok(team)
    }

    pub(crate) fn rank(&self) -> usize {
        self.links.rank
    }

    pub(crate) fn nranks(&self) -> usize {
        self.links.nranks()
    }

    pub(crate) fn options(&self) -> &TeamOptions {
        &self.options
    }

    /// Whether that rank's memory is shared with this process; true for this rank itself.
    pub(crate) fn is_near(&self, peer: usize) -> bool {
        self.links.is_near(peer)
    }

    /// Holds off the collective calls of other threads: taken once around everything that one call does.
    pub(crate) fn serialise(&self) -> MutexGuard<'_, ()> {
        self.serial.lock()
    }

    /// Raises this rank's counter of that context and index at a peer.
    ///
    /// What this thread has written into a near peer's memory before is visible to a rank that sees the counter, and so is what
    /// was written to a far one by transfers that have ended.
    #[inline]
    pub(crate) fn signal(&self, peer: usize, context: u32, index: u32, add: u64) -> Result<()> {
        const OP: &str = "signal";
        self.working(OP)?;
        if peer >= self.nranks() {
            return Err(self.no_such_rank(OP, peer));
        }
        let Some(counter) = self.links.layout.signal(self.rank(), context, index) else {
            return Err(self.no_such_signal(OP, context, index));
        };
        self.links.add(peer, counter, add).map_err(|error| lost(OP, peer, &error))
    }

    /// How far that rank has raised its counter here; 0 for a counter that does not exist.
    pub(crate) fn signals(&self, from: usize, context: u32, index: u32) -> u64 {
        let counter = self.links.layout.signal(from, context, index);
        counter.map_or(0, |counter| self.raised(counter))
    }

    #[inline]
    fn raised(&self, counter: usize) -> u64 {
        self.links.region.load(counter).unwrap_or_default()
    }

    /// Waits until that rank has raised its counter here so far. Where ranks may spin, most such waits end before anything
    /// but the counter is looked at.
    #[inline]
    pub(crate) fn wait_raised(
        &self,
        op: &'static str,
        (from, context, index): (usize, u32, u32),
        level: u64,
    ) -> Result<()> {
        if from >= self.nranks() {
            return Err(self.no_such_rank(op, from));
        }
        let Some(counter) = self.links.layout.signal(from, context, index) else {
            return Err(self.no_such_signal(op, context, index));
        };
        for _ in 0..self.looks {
            if self.raised(counter) >= level {
                return Ok(());
            }
            // Where two ranks share a core, each look is time that the other does not have.
            std::hint::spin_loop();
        }
        self.wait(op, || vec![from], || (self.raised(counter) >= level).then_some(()))
    }

    #[cold]
    fn no_such_signal(&self, op: &'static str, context: u32, index: u32) -> Error {
        let (contexts, signals) = (self.options.contexts, self.options.signals);
        let message = format!(
            "there is no signal {index} of context {context}: there are {contexts} contexts of {signals}"
        );
        Error::invalid(op, message)
    }

    #[cold]
    fn no_such_rank(&self, op: &'static str, peer: usize) -> Error {
        Error::invalid(op, format!("there is no rank {peer} among {}", self.nranks()))
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        // The team of a forked child is its parent's.
        if towline::fork_guard("leave").is_err() {
            return;
        }
        // A rank that waits for this one learns with it which rank is the cause.
        let word = 1 | self.in_vain().next().map_or(0, |blamed| blamed as u64 + 1) << 1;
        for peer in (0..self.nranks()).filter(|peer| *peer != self.rank()) {
            // A rank that is gone already needs no message.
            let _ = self.links.advance(peer, self.links.layout.departed(self.rank()), word, word);
        }
        let until = Instant::now() + SETTLE;
        self.settle_entries(until);
        self.links.settle(until);
    }
}

impl fmt::Debug for Team {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Team")
            .field("rank", &self.rank())
            .field("nranks", &self.nranks())
            .field("failure", &self.failure())
            .finish_non_exhaustive()
    }
}
