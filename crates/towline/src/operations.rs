//! Operations that wait for a peer: who has claimed one, and how it ended.
//!
//! An operation is opened by the owner of some memory. One peer claims it (with an import), reads or writes, and says
//! how that went. It ends once, by that word, at its deadline, with the claimer's session, or because its owner wants it
//! to; and only when its regions are revoked and nobody is inside their memory any more, so that a peer that learns of the end
//! may reuse the memory.

#[cfg(test)]
mod tests;

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::completion::Completion;
use crate::cuda::{self, Mark};
use crate::memory::{Buffer, MemoryDescription};
use crate::region::{Registered, Registry};
use crate::runtime::{self, Timer, TimerId};
use crate::transfer::Limits;
use crate::wire::OperationId;
use crate::{Access, Error, Kind, Result};

/// The moments that an operation waits for.
const DEADLINE: u64 = 1;
const QUIET: u64 = 2;
const LOOK: u64 = 3;

/// Claims that wait for an operation to be ready, at most. One claim of as many tickets as there may be takes a frame for each
/// hundred or so of them.
const MOST_WAITING: usize = 64;

/// What is done when an operation is ready, or over.
pub(crate) type Later = Box<dyn FnOnce() + Send>;

/// The claimer of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claimer {
    /// The peer of that session.
    Session(u64),
    /// An endpoint of this process; each claim has a number of its own.
    Here(u64),
}

impl Claimer {
    /// A new claim from within this process.
    pub(crate) fn here() -> Claimer {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Claimer::Here(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The operations of one endpoint that have not ended.
pub(crate) struct Operations {
    registry: Arc<Registry>,
    all: Mutex<HashMap<OperationId, Weak<Passive>>>,
}

impl Operations {
    pub(crate) fn of(registry: &Arc<Registry>) -> Arc<Operations> {
        Arc::new(Operations { registry: Arc::clone(registry), all: Mutex::default() })
    }

    /// Claims the operation with a verified ticket to that region.
    pub(crate) fn claim(
        &self,
        operation: &OperationId,
        claimer: Claimer,
        peer: &str,
        region: (u32, u64),
        access: Access,
    ) -> Result<()> {
        self.find(operation).ok_or_else(over)?.claim(claimer, peer, region, access)
    }

    /// Whether it can be claimed now, or never.
    pub(crate) fn is_ready(&self, operation: &OperationId) -> bool {
        self.find(operation).is_none_or(|passive| reached(&mut passive.inner.lock()).unwrap_or(false))
    }

    /// Gives `claim` back where it can be made now. Otherwise it is called once the work has ended that the operation waits for.
    pub(crate) fn when_ready(&self, operation: &OperationId, claim: Later) -> Result<Option<Later>> {
        match self.find(operation) {
            Some(passive) => passive.when_ready(claim),
            None => Ok(Some(claim)),
        }
    }

    /// What the operation waits for before it can be claimed.
    pub(crate) fn not_before(&self, operation: &OperationId) -> Vec<Mark> {
        self.find(operation).map(|passive| passive.inner.lock().behind.clone()).unwrap_or_default()
    }

    /// The claimer says how it ended. From any other peer it means nothing. An error where it had ended before, or ends otherwise
    /// than the claimer says.
    pub(crate) fn finish(
        &self,
        operation: &OperationId,
        claimer: Claimer,
        outcome: Result<()>,
    ) -> Result<()> {
        self.find(operation).ok_or_else(over)?.finish(claimer, outcome)
    }

    /// A session is over: what its peer had claimed ends.
    pub(crate) fn abandon(&self, claimer: Claimer, error: &Error) {
        for passive in self.all().into_iter().filter(|passive| passive.is_claimed_by(claimer)) {
            let _ = passive.finish(claimer, Err(error.clone()));
        }
    }

    /// Whether the session's peer has claimed something that has not ended.
    pub(crate) fn any_claimed_by(&self, claimer: Claimer) -> bool {
        self.all().iter().any(|passive| passive.is_claimed_by(claimer))
    }

    /// Ends all of them.
    pub(crate) fn end_all(&self, error: &Error) {
        for passive in self.all() {
            passive.end(Err(error.clone()));
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.all.lock().len()
    }

    fn find(&self, operation: &OperationId) -> Option<Arc<Passive>> {
        self.all.lock().get(operation)?.upgrade()
    }

    fn all(&self) -> Vec<Arc<Passive>> {
        self.all.lock().values().filter_map(Weak::upgrade).collect()
    }
}

fn over() -> Error {
    Error::new(
        Kind::Stale,
        "import",
        "the operation has ended, or belongs to another endpoint: ask the peer for new metadata",
    )
}

/// Memory that an operation offers: a region of its own, and what is dropped when the memory is quiet.
pub(crate) struct Offered {
    pub(crate) region: Registered<Buffer>,
    pub(crate) keep: Box<dyn Any + Send>,
}

/// An operation that waits for a peer.
pub(crate) struct Passive {
    pub(crate) id: OperationId,
    name: &'static str,
    access: Access,
    operations: Weak<Operations>,
    unclaimed_limit: Option<Duration>,
    claimed_limit: Duration,
    /// How long it waits for the memory to become quiet.
    quiet_limit: Duration,
    inner: Mutex<Inner>,
    pub(crate) completion: Completion<Result<()>>,
}

struct Inner {
    state: State,
    /// What is offered, and whether it was claimed.
    offered: Vec<(Offered, bool)>,
    due: Option<(Instant, TimerId)>,
    /// Work of GPUs that ends before a peer may claim it.
    behind: Vec<Mark>,
    /// Claims that came before that, and since when there are some.
    claims: Vec<Later>,
    early: Option<Instant>,
}

enum State {
    Waiting,
    Claimed {
        by: Claimer,
        peer: Arc<str>,
    },
    /// It ends so when that many regions are quiet.
    Ending {
        result: Result<()>,
        noisy: usize,
    },
    Ended {
        quiet: bool,
    },
}

/// What an operation is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Waiting,
    Claimed,
    Ended,
}

impl Passive {
    /// Opens an operation over those regions, which must be registered for it alone.
    pub(crate) fn open(
        operations: &Arc<Operations>,
        limits: Limits,
        name: &'static str,
        access: Access,
        offered: Vec<Offered>,
        unclaimed_limit: Option<Duration>,
    ) -> Result<Arc<Passive>> {
        let mut id = [0; 16];
        getrandom::fill(&mut id)
            .map_err(|error| Error::new(Kind::Native, name, format!("no random bytes: {error}")))?;
        // Shown to users as a UUID of version 4.
        id[6] = id[6] & 0x0f | 0x40;
        id[8] = id[8] & 0x3f | 0x80;
        let bytes = offered.iter().map(|one| one.region.size() as u64).sum();
        let passive = Arc::new(Passive {
            id,
            name,
            access,
            operations: Arc::downgrade(operations),
            unclaimed_limit,
            // The claimer has limits of its own and says when they have passed; this is for one that says nothing.
            claimed_limit: limits.total_for(bytes) + limits.no_progress,
            quiet_limit: limits.no_progress,
            inner: Mutex::new(Inner {
                state: State::Waiting,
                offered: offered.into_iter().map(|one| (one, false)).collect(),
                due: None,
                behind: Vec::new(),
                claims: Vec::new(),
                early: None,
            }),
            completion: Completion::default(),
        });
        {
            let mut inner = passive.inner.lock();
            passive.arm(&mut inner, unclaimed_limit, DEADLINE);
        }
        operations.all.lock().insert(id, Arc::downgrade(&passive));
        // A close that came before it was in the table did not find it.
        if let Err(error) = operations.registry.check_open(name) {
            passive.end(Err(error.clone()));
            return Err(error);
        }
        Ok(passive)
    }

    /// Lets claims wait until those have happened. Before a peer knows of the operation.
    pub(crate) fn behind(&self, marks: Vec<Mark>) {
        self.inner.lock().behind = marks;
    }

    fn when_ready(self: &Arc<Self>, claim: Later) -> Result<Option<Later>> {
        let mut inner = self.inner.lock();
        match reached(&mut inner) {
            Ok(true) => Ok(Some(claim)),
            Ok(false) if inner.claims.len() >= MOST_WAITING => {
                Err(Error::new(Kind::Exhausted, "import", "too many claims wait for the operation"))
            }
            Ok(false) => {
                inner.claims.push(claim);
                if inner.early.is_none() {
                    inner.early = Some(Instant::now());
                    self.look_again(Duration::ZERO);
                }
                Ok(None)
            }
            Err(error) => {
                drop(inner);
                self.end(Err(error));
                Ok(Some(claim))
            }
        }
    }

    fn look_again(self: &Arc<Self>, age: Duration) {
        runtime::call_at(Instant::now() + cuda::pause(age), self, LOOK);
    }

    /// A peer has claimed it too early: can it be now?
    fn look(self: &Arc<Self>) {
        let (claims, failed) = {
            let mut inner = self.inner.lock();
            match reached(&mut inner) {
                Ok(false) => {
                    let age = inner.early.map_or(Duration::ZERO, |early| early.elapsed());
                    return self.look_again(age);
                }
                Ok(true) => (std::mem::take(&mut inner.claims), None),
                Err(error) => (Vec::new(), Some(error)),
            }
        };
        if let Some(error) = failed {
            self.end(Err(error));
        }
        claims.into_iter().for_each(|claim| claim());
    }

    pub(crate) fn stage(&self) -> Stage {
        match self.inner.lock().state {
            State::Waiting => Stage::Waiting,
            State::Claimed { .. } | State::Ending { .. } => Stage::Claimed,
            State::Ended { .. } => Stage::Ended,
        }
    }

    /// Whether it has ended and nobody is inside its memory.
    pub(crate) fn is_quiet(&self) -> bool {
        matches!(self.inner.lock().state, State::Ended { quiet: true })
    }

    /// Runs with the regions, while these are still reachable.
    pub(crate) fn with_regions<T>(&self, f: impl FnOnce(&[(Offered, bool)]) -> Result<T>) -> Result<T> {
        let inner = self.inner.lock();
        match inner.state {
            State::Waiting | State::Claimed { .. } => f(&inner.offered),
            State::Ending { .. } | State::Ended { .. } => {
                Err(Error::new(Kind::Stale, self.name, "the operation has ended"))
            }
        }
    }

    fn claim(self: &Arc<Self>, claimer: Claimer, by: &str, region: (u32, u64), access: Access) -> Result<()> {
        let mut inner = self.inner.lock();
        let Inner { state, offered, .. } = &mut *inner;
        let first = match state {
            State::Waiting => true,
            State::Claimed { by, .. } if *by == claimer => false,
            State::Claimed { peer, .. } => {
                return Err(Error::invalid("import", format!("the operation was already claimed by {peer}")));
            }
            State::Ending { .. } | State::Ended { .. } => return Err(over()),
        };
        let Some((_, claimed)) = offered.iter_mut().find(|(one, _)| one.region.place_in_table() == region)
        else {
            let message = "the ticket is for memory that the operation does not offer";
            return Err(Error::new(Kind::PermissionDenied, "import", message));
        };
        if !access.contains(self.access) {
            let message = format!("the ticket allows {access}, and the operation needs {}", self.access);
            return Err(Error::new(Kind::PermissionDenied, "import", message));
        }
        if std::mem::replace(claimed, true) {
            return Err(Error::invalid("import", format!("the operation was already claimed by {by}")));
        }
        if first {
            *state = State::Claimed { by: claimer, peer: by.into() };
            self.arm(&mut inner, Some(self.claimed_limit), DEADLINE);
        }
        Ok(())
    }

    fn is_claimed_by(&self, claimer: Claimer) -> bool {
        matches!(self.inner.lock().state, State::Claimed { by, .. } if by == claimer)
    }

    fn finish(self: &Arc<Self>, claimer: Claimer, outcome: Result<()>) -> Result<()> {
        let said_well = outcome.is_ok();
        let outcome = {
            let inner = self.inner.lock();
            let State::Claimed { by, peer } = &inner.state else { return Err(over()) };
            if *by != claimer {
                return Err(over());
            }
            let whole = inner.offered.iter().all(|(_, claimed)| *claimed);
            match outcome {
                Ok(()) if whole => Ok(()),
                Ok(()) => {
                    let message = "the claimer reported success but did not request all of the memory";
                    Err(Error::protocol(self.name, message).with_peer(&**peer))
                }
                Err(error) => Err(error.during(self.name).with_peer(&**peer)),
            }
        };
        // It knows already what its claimer reports as bad.
        let answer = if said_well { outcome.clone() } else { Ok(()) };
        if self.end(outcome) { answer } else { Err(over()) }
    }

    /// Ends it, unless it has ended or is about to, which it says: revokes its regions, and wakes the waiters when these are quiet.
    pub(crate) fn end(self: &Arc<Self>, result: Result<()>) -> bool {
        let (offered, claims) = {
            let mut inner = self.inner.lock();
            if matches!(inner.state, State::Ending { .. } | State::Ended { .. }) {
                return false;
            }
            inner.behind.clear();
            let claims = std::mem::take(&mut inner.claims);
            let offered = std::mem::take(&mut inner.offered);
            // One more than there are regions: the last of them may be quiet before all are revoked.
            inner.state = State::Ending { result, noisy: offered.len() + 1 };
            disarm(&mut inner);
            (offered, claims)
        };
        if let Some(operations) = self.operations.upgrade() {
            operations.all.lock().remove(&self.id);
        }
        // They learn that it is over.
        claims.into_iter().for_each(|claim| claim());
        for (Offered { region, keep }, _) in offered {
            // What is dropped first is reported first: the memory's user, then the waiters for the operation.
            region.release_then((keep, Quiet(Arc::clone(self))));
        }
        self.one_quiet();
        let mut inner = self.inner.lock();
        if matches!(inner.state, State::Ending { .. }) {
            self.arm(&mut inner, Some(self.quiet_limit), QUIET);
        }
        true
    }

    fn one_quiet(&self) {
        let result = {
            let mut inner = self.inner.lock();
            match &mut inner.state {
                State::Ending { result, noisy } => {
                    *noisy -= 1;
                    if *noisy > 0 {
                        return;
                    }
                    let result = result.clone();
                    inner.state = State::Ended { quiet: true };
                    disarm(&mut inner);
                    result
                }
                // It ended at its limit, and the memory is quiet only now.
                State::Ended { quiet } => {
                    *quiet = true;
                    return;
                }
                State::Waiting | State::Claimed { .. } => return,
            }
        };
        let _ = self.completion.set(result);
    }

    /// A peer is inside the memory for too long: it ends all the same, and the memory stays parked.
    fn give_up_on_quiet(&self) {
        let result = {
            let mut inner = self.inner.lock();
            let State::Ending { result, .. } = &inner.state else { return };
            let result = match result {
                // What was read was read; nothing can change any more.
                Ok(()) if self.access == Access::READ => Ok(()),
                Ok(()) => Err(self.still_held("it was done")),
                Err(error) => Err(self.still_held(error.message())),
            };
            inner.state = State::Ended { quiet: false };
            result
        };
        let _ = self.completion.set(result);
    }

    fn still_held(&self, cause: &str) -> Error {
        let waited = self.quiet_limit.as_secs_f64();
        Error::new(
            Kind::Timeout,
            self.name,
            format!("{cause}; a peer was still inside the memory {waited:.3} s later"),
        )
    }

    fn arm(self: &Arc<Self>, inner: &mut Inner, within: Option<Duration>, key: u64) {
        disarm(inner);
        let Some(when) = within.and_then(|within| Instant::now().checked_add(within)) else { return };
        inner.due = runtime::call_at(when, self, key).map(|timer| (when, timer));
    }

    fn deadline_passed(self: &Arc<Self>) {
        let error = {
            let inner = self.inner.lock();
            // A timer that was replaced while it fired counts for nothing.
            if inner.due.is_none_or(|(when, _)| when > Instant::now()) {
                return;
            }
            match &inner.state {
                State::Waiting => {
                    let limit = self.unclaimed_limit.unwrap_or_default().as_secs_f64();
                    Error::new(Kind::Timeout, self.name, format!("no peer claimed it within {limit:.3} s"))
                }
                State::Claimed { peer, .. } => {
                    let limit = self.claimed_limit.as_secs_f64();
                    let message = format!("its claimer was not done after {limit:.3} s");
                    Error::new(Kind::Timeout, self.name, message).with_peer(&**peer)
                }
                State::Ending { .. } | State::Ended { .. } => return,
            }
        };
        self.end(Err(error));
    }
}

/// Whether all has happened that is waited for.
fn reached(inner: &mut Inner) -> Result<bool> {
    while let Some(mark) = inner.behind.last() {
        if !mark.has_happened()? {
            return Ok(false);
        }
        inner.behind.pop();
    }
    Ok(true)
}

fn disarm(inner: &mut Inner) {
    runtime::forget(inner.due.take().map(|(_, timer)| timer));
}

impl Timer for Passive {
    fn fired(self: Arc<Self>, key: u64) {
        match key {
            DEADLINE => self.deadline_passed(),
            LOOK => self.look(),
            _ => self.give_up_on_quiet(),
        }
    }
}

/// Dropped when nobody is inside a region's memory any more.
struct Quiet(Arc<Passive>);

impl Drop for Quiet {
    fn drop(&mut self) {
        if !crate::fork::in_child() {
            self.0.one_quiet();
        }
    }
}
