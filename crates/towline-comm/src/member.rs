//! A rank's membership in a group on host memory: what the handles to one communicator share.

pub(crate) mod job;
mod lane;
pub(crate) mod signals;
mod worker;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock};
use towline::{Endpoint, Kind, Ticket};

pub(crate) use self::job::Job;
pub(crate) use self::lane::{Lane, Task};
pub use self::signals::WaitSignal;
pub use self::worker::Progress;
use self::worker::Worker;
use crate::collective::Collectives;
use crate::config::Config;
use crate::memory::RegisteredMemory;
use crate::team::Team;
use crate::{Error, Result, interrupt};

/// The endpoint of a rank, shared by its communicator and those that were split from it.
pub(crate) struct Station {
    pub(crate) endpoint: Endpoint,
    /// Messages that came while another communicator of this endpoint was looking for its own.
    pub(crate) mail: Mutex<Vec<Vec<u8>>>,
}

/// Where a rank sits, known once the group has met.
pub(crate) struct Seating {
    pub(crate) rank: usize,
    pub(crate) nranks: usize,
    /// The tickets of all control regions, by rank: how survivors find each other.
    pub(crate) tickets: Vec<Ticket>,
    /// Equal on all ranks and on no other communicator.
    pub(crate) group_id: [u8; 16],
}

const OPEN: u8 = 0;
const FINALIZED: u8 = 1;
const CLOSED: u8 = 2;

/// The state of one communicator.
pub(crate) struct Member {
    pub(crate) config: Config,
    pub(crate) station: Arc<Station>,
    /// Rank and size as far as they are known before the group has met.
    expected: Option<(usize, usize)>,
    seating: OnceLock<Seating>,
    team: RwLock<Option<Arc<Team>>>,
    life: AtomicU8,
    pub(crate) memory: Arc<RegisteredMemory>,
    /// How many signals were waited for so far, by source, context and index.
    pub(crate) awaited: Mutex<HashMap<(usize, u32, u32), u64>>,
    lanes: Mutex<HashMap<usize, Arc<Lane>>>,
    pub(crate) worker: Arc<Worker>,
    calls: Calls,
    idle: Condvar,
    pub(crate) shrinks: Mutex<u64>,
    pub(crate) collectives: Collectives,
}

/// Calls that run, and threads that wait until none does.
#[derive(Default)]
struct Calls {
    running: AtomicUsize,
    waiting: AtomicUsize,
    /// Held by a waiter from its look at `running` until it waits.
    looking: Mutex<()>,
}

/// Counts a call that is running.
struct Busy<'i>(&'i Member);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        let calls = &self.0.calls;
        // A waiter has counted itself before it looked: this sees it, or it has seen this.
        if calls.running.fetch_sub(1, Ordering::SeqCst) == 1 && calls.waiting.load(Ordering::SeqCst) > 0 {
            drop(calls.looking.lock());
            self.0.idle.notify_all();
        }
    }
}

impl Member {
    pub(crate) fn new(
        config: Config,
        station: Arc<Station>,
        expected: Option<(usize, usize)>,
    ) -> Arc<Member> {
        let memory = RegisteredMemory::new(station.endpoint.clone(), config.routing.clone());
        let memory = Arc::new(memory);
        Arc::new(Member {
            collectives: Collectives::new(Arc::clone(&memory), config.timeout),
            memory,
            config,
            station,
            expected,
            seating: OnceLock::new(),
            team: RwLock::new(None),
            life: AtomicU8::new(OPEN),
            awaited: Mutex::new(HashMap::new()),
            lanes: Mutex::new(HashMap::new()),
            worker: Arc::default(),
            calls: Calls::default(),
            idle: Condvar::new(),
            shrinks: Mutex::new(0),
        })
    }

    /// The group has met: from now on calls work.
    pub(crate) fn seat(&self, seating: Seating, team: Arc<Team>) -> Result<()> {
        let mut place = self.team.write();
        if self.life.load(Ordering::Acquire) == CLOSED {
            team.revoke();
            return Err(Error::invalid("init", "the communicator was closed before the group had met"));
        }
        *place = Some(team);
        let _ = self.seating.set(seating);
        Ok(())
    }

    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.station.endpoint
    }

    pub(crate) fn is_open(&self) -> bool {
        self.life.load(Ordering::Acquire) != CLOSED
    }

    /// Rank and size.
    pub(crate) fn place(&self, op: &'static str) -> Result<(usize, usize)> {
        if !self.is_open() {
            return Err(closed(op));
        }
        let known = self.seating.get().map(|seating| (seating.rank, seating.nranks));
        known.or(self.expected).ok_or_else(|| Error::invalid(op, "the communicator is not initialised yet"))
    }

    pub(crate) fn seating(&self, op: &'static str) -> Result<&Seating> {
        if !self.is_open() {
            return Err(closed(op));
        }
        self.seating.get().ok_or_else(|| Error::invalid(op, "the communicator is not initialised yet"))
    }

    /// The team, for calls. `Invalid` once closed, and before the group has met.
    pub(crate) fn team(&self, op: &'static str) -> Result<Arc<Team>> {
        towline::fork_guard(op)?;
        if !self.is_open() {
            return Err(closed(op));
        }
        let team = self.team.read();
        team.clone().ok_or_else(|| Error::invalid(op, "the communicator is not initialised yet"))
    }

    /// The team, for what may outlive it.
    pub(crate) fn weak_team(&self) -> Weak<Team> {
        let team = self.team.read();
        team.as_ref().map(Arc::downgrade).unwrap_or_default()
    }

    /// Refuses calls on a communicator that was closed or finalised.
    pub(crate) fn check_usable(&self, op: &'static str) -> Result<()> {
        towline::fork_guard(op)?;
        match self.life.load(Ordering::Acquire) {
            OPEN => Ok(()),
            FINALIZED => Err(Error::invalid(op, "the communicator is finalized")),
            _ => Err(closed(op)),
        }
    }

    /// Runs jobs as the communicator's mode says: now, or in order on its thread.
    pub(crate) fn launch(self: &Arc<Self>, jobs: Vec<Job>) -> Result<()> {
        if self.config.blocking {
            return self.run(jobs);
        }
        let member = Arc::clone(self);
        self.worker.push(Box::new(move || member.run(jobs)))
    }

    fn run(self: &Arc<Self>, jobs: Vec<Job>) -> Result<()> {
        let team = self.team("submit")?;
        let _busy = jobs.iter().any(|job| !matches!(job, Job::Wait(_))).then(|| self.enter());
        job::run(self, &team, jobs)
    }

    /// Runs one call of a blocking communicator.
    pub(crate) fn run_now(
        self: &Arc<Self>,
        work: impl FnOnce(&Arc<Member>, &Arc<Team>) -> Result<()>,
    ) -> Result<()> {
        let team = self.team("submit")?;
        let _busy = self.enter();
        work(self, &team)
    }

    fn enter(&self) -> Busy<'_> {
        self.calls.running.fetch_add(1, Ordering::SeqCst);
        Busy(self)
    }

    /// Waits until no call runs and nothing is queued. Calls have limits of their own, so this ends.
    pub(crate) fn wait_idle(&self) -> bool {
        let until = Instant::now() + self.config.timeout.min(Duration::from_secs(86_400 * 365));
        let left = || until.saturating_duration_since(Instant::now());
        let queued = self.worker.wait_idle(left());
        let busy = |_: &mut ()| self.calls.running.load(Ordering::SeqCst) > 0;
        self.calls.waiting.fetch_add(1, Ordering::SeqCst);
        let calm = interrupt::wait_while(&self.calls.looking, &self.idle, left(), busy);
        self.calls.waiting.fetch_sub(1, Ordering::SeqCst);
        let lanes: Vec<_> = self.lanes.lock().values().cloned().collect();
        lanes.iter().all(|lane| lane.wait_idle(left())) && queued && calm
    }

    /// What goes to that far rank, in order.
    pub(crate) fn lane(&self, peer: usize) -> Arc<Lane> {
        let team = self.weak_team();
        let mut lanes = self.lanes.lock();
        Arc::clone(lanes.entry(peer).or_insert_with(|| Arc::new(Lane::new(peer, team))))
    }

    /// The lane of that rank, where something was ever sent to it by requests.
    pub(crate) fn lane_in_use(&self, peer: usize) -> Option<Arc<Lane>> {
        self.lanes.lock().get(&peer).cloned()
    }

    /// Ends the collective life of the communicator: later calls are `Invalid`. True the first time.
    pub(crate) fn mark_finalized(&self) -> bool {
        self.life.compare_exchange(OPEN, FINALIZED, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Waits for what is in flight, closes every handle and lets go of the group. Closing twice is harmless.
    pub(crate) fn close(&self, abort: Option<&Error>) {
        // In a forked child the threads that would end the work do not exist.
        if self.life.load(Ordering::Acquire) == CLOSED || towline::fork_guard("destroy").is_err() {
            return;
        }
        let team = self.team.read().clone();
        if let Some(why) = abort {
            if let Some(team) = &team {
                team.abort(why);
            }
            self.worker.discard();
        }
        if !self.wait_idle() {
            tracing::warn!(
                name = self.config.name,
                "work is still in flight; its memory is kept until it ends"
            );
        }
        if self.life.swap(CLOSED, Ordering::AcqRel) == CLOSED {
            return;
        }
        self.memory.close_all();
        let team = self.team.write().take();
        drop(team);
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.close(None);
    }
}

pub(crate) fn closed(op: &'static str) -> Error {
    Error::new(Kind::Invalid, op, "the communicator is closed")
}
