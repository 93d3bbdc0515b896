//! The order of what goes to one far rank: puts are in flight together, a signal waits for those before it.
//!
//! Each far rank has a thread that lives while there is something to do and a little longer, so that a slow rank
//! delays nobody else.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use towline::{Kind, Transfer};

use crate::operation::{Ended, Promise, WHILE};
use crate::team::{AccessWait, Team};
use crate::{Error, Result, interrupt};

/// How long the thread of a lane stays when it has nothing to do.
const LINGER: Duration = Duration::from_secs(2);

/// How many transfers of one lane are in flight at the same time.
const IN_FLIGHT: usize = 64;

/// How many failures are remembered; the first matter.
const MOST_FAILURES: usize = 16;

/// Starts a transfer; what it needs is inside.
pub(crate) type Start = Box<dyn FnOnce() -> Result<Transfer> + Send>;
/// Runs a step that waits for what was before it.
pub(crate) type Step = Box<dyn FnOnce() -> Result<u64> + Send>;

pub(crate) enum Task {
    /// A transfer that may run beside its neighbours. One that waits for its turn while another does not reach the rank in time is not
    /// begun: its own limit would come on top.
    Beside(Start, Promise),
    /// A transfer that begins when everything before it has ended, under the same rules as a step.
    Behind(Start, Promise),
    /// A step that begins when everything before it has ended. It ends with the first error of what was before it,
    /// unless the caller had seen that error before it asked for the step.
    After(Step, Promise),
}

impl Task {
    fn promise(&self) -> &Promise {
        match self {
            Task::Beside(_, done) | Task::Behind(_, done) | Task::After(_, done) => done,
        }
    }

    fn into_promise(self) -> Promise {
        match self {
            Task::Beside(_, done) | Task::Behind(_, done) | Task::After(_, done) => done,
        }
    }
}

/// Something that went wrong.
struct Failure {
    error: Error,
    ended: Option<Ended>,
    /// What was pushed before this number could not know of it.
    known_from: u64,
}

/// What goes to one far rank.
pub(crate) struct Lane {
    peer: usize,
    team: Weak<Team>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<(u64, Task)>,
    /// How many tasks were ever pushed.
    pushed: u64,
    /// Tasks taken from the queue that have not ended.
    active: usize,
    running: bool,
    /// Failures that no step that waits has reported yet.
    failures: Vec<Failure>,
}

impl Lane {
    /// The lane of that rank; a failure that shows that the rank is dead fails the team.
    pub(crate) fn new(peer: usize, team: Weak<Team>) -> Lane {
        Lane { peer, team, state: Mutex::default(), changed: Condvar::new() }
    }

    pub(crate) fn is_idle(&self) -> bool {
        let state = self.lock();
        state.queue.is_empty() && state.active == 0
    }

    /// Adds a task behind all others.
    pub(crate) fn push(self: &Arc<Self>, task: Task) {
        let mut state = self.lock();
        state.pushed += 1;
        let number = state.pushed;
        state.queue.push_back((number, task));
        if state.running {
            self.changed.notify_all();
            return;
        }
        let lane = Arc::clone(self);
        let started = towline::start_thread("put", "towline-lane", move || lane.run());
        match started {
            Ok(_) => state.running = true,
            Err(error) => {
                let why = Error::from(error);
                let tasks = std::mem::take(&mut state.queue);
                drop(state);
                for (_, task) in tasks {
                    task.into_promise().end(Err(why.clone()));
                }
            }
        }
    }

    fn lock(&self) -> parking_lot::MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The next task; `None` if none came in time (then the thread has signed off).
    fn next(&self, wait: bool) -> Option<(u64, Task)> {
        let mut state = self.lock();
        loop {
            if let Some(task) = state.queue.pop_front() {
                state.active += 1;
                return Some(task);
            }
            if !wait {
                return None;
            }
            let timeout = self.changed.wait_for(&mut state, LINGER);
            if timeout.timed_out() && state.queue.is_empty() {
                state.running = false;
                return None;
            }
        }
    }

    /// Completes a task; its own failure is remembered for the steps behind it.
    fn ended(&self, done: Promise, outcome: Result<u64>, own: bool) {
        let known_from = self.lock().pushed + 1;
        let outcome = outcome.map_err(|error| self.named(error));
        let error = outcome.as_ref().err().filter(|_| own).cloned();
        let ended = done.end(outcome);
        let mut state = self.lock();
        state.active -= 1;
        if let Some(error) = error
            && state.failures.len() < MOST_FAILURES
        {
            state.failures.push(Failure { error, ended, known_from });
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Says whom an error is about. If it means that a rank has died, sends that to all ranks: they may wait for ranks
    /// that learn of it only here.
    fn named(&self, error: Error) -> Error {
        match self.team.upgrade() {
            Some(team) => team.lost(self.peer, error),
            None if error.ranks().is_empty() => error.about([self.peer]),
            None => error,
        }
    }

    /// What went wrong before a step, and is not known to who asked for it.
    fn failed_before(&self, number: u64) -> Option<Error> {
        let mut state = self.lock();
        let seen = |failure: &Failure| failure.ended.as_ref().is_some_and(Ended::was_seen);
        state.failures.retain(|failure| number < failure.known_from || !seen(failure));
        let error = state.failures.first().map(|failure| failure.error.clone());
        // Ended now; but steps that were asked for before it happened must still learn of it.
        state.failures.retain(|failure| number < failure.known_from);
        error
    }

    /// Starts a transfer, unless the rank was not reached since it was asked for.
    fn begin(&self, number: u64, start: Start) -> Result<Transfer> {
        let lost = |failure: &&Failure| {
            number < failure.known_from && matches!(failure.error.kind(), Kind::Timeout | Kind::Disconnected)
        };
        let error = self.lock().failures.iter().find(lost).map(|failure| failure.error.clone());
        error.map_or_else(start, Err)
    }

    fn run(&self) {
        let mut in_flight: VecDeque<(Transfer, Promise)> = VecDeque::new();
        loop {
            match self.next(in_flight.is_empty()) {
                Some((number, Task::Beside(start, done))) => match self.begin(number, start) {
                    Ok(transfer) => {
                        in_flight.push_back((transfer, done));
                        if in_flight.len() == IN_FLIGHT {
                            self.settle_one(&mut in_flight, None);
                        }
                    }
                    Err(error) => self.ended(done, Err(error), true),
                },
                Some((number, task)) => {
                    while !in_flight.is_empty() {
                        self.settle_one(&mut in_flight, Some(task.promise()));
                    }
                    match (self.failed_before(number), task) {
                        (Some(error), task) => self.ended(task.into_promise(), Err(error), false),
                        (None, Task::After(step, done)) => self.ended(done, step(), true),
                        (None, Task::Beside(start, done) | Task::Behind(start, done)) => match start() {
                            Ok(transfer) => {
                                in_flight.push_back((transfer, done));
                                self.settle_one(&mut in_flight, None);
                            }
                            Err(error) => self.ended(done, Err(error), true),
                        },
                    }
                }
                None if in_flight.is_empty() => return,
                None => self.settle_one(&mut in_flight, None),
            }
        }
    }

    /// Waits for the first transfer in flight; `next` waits for it and has left the queue already.
    fn settle_one(&self, in_flight: &mut VecDeque<(Transfer, Promise)>, next: Option<&Promise>) {
        let Some((transfer, done)) = in_flight.pop_front() else { return };
        let mut shown = false;
        let outcome = loop {
            if let Some(ended) = transfer.wait_for(WHILE) {
                break ended;
            }
            // Nobody else can show that this rank waits: a future has no thread.
            let waits = next.is_some_and(Promise::is_awaited);
            let shows = waits || self.is_awaited(&done, in_flight);
            if shows || shown {
                self.show(if shows { AccessWait::Lasts } else { AccessWait::Done });
            }
            shown = shows;
        };
        if shown {
            // In one step: a rank that comes to its limit now must not find a rank that waits for nobody.
            let missed = |error: &towline::Error| {
                error.is_owner_gone() || matches!(error.kind(), Kind::Timeout | Kind::Disconnected)
            };
            let in_vain = outcome.as_ref().is_err_and(missed);
            self.show(if in_vain { AccessWait::InVain } else { AccessWait::Done });
        }
        let outcome = outcome.map(|()| transfer.value().unwrap_or(0));
        let outcome = outcome.map_err(|error| Error::from(error).about([self.peer]).during(done.op()));
        self.ended(done, outcome, true);
    }

    /// Whether a task awaits one of the operations of this lane as a future.
    fn is_awaited(&self, first: &Promise, in_flight: &VecDeque<(Transfer, Promise)>) -> bool {
        first.is_awaited()
            || in_flight.iter().any(|(_, done)| done.is_awaited())
            || self.lock().queue.iter().any(|(_, task)| task.promise().is_awaited())
    }

    /// Lets the team know whether this rank waits for what goes to that of the lane.
    fn show(&self, waits: AccessWait) {
        if let Some(team) = self.team.upgrade() {
            team.awaits(self.peer, waits);
        }
    }

    /// Waits until everything that was pushed has ended; `false` when it has not in that time.
    pub(crate) fn wait_idle(&self, within: Duration) -> bool {
        let busy = |state: &mut State| !state.queue.is_empty() || state.active > 0;
        interrupt::wait_while(&self.state, &self.changed, within, busy)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::operation::Operation;

    /// Transfers that wait for their turn until all are there; each fails so. How many were begun, and how they ended.
    fn begun_of(kind: Kind) -> (usize, Vec<Kind>) {
        let lane = Arc::new(Lane::new(1, Weak::new()));
        let (all_there, begun) = (Arc::new(Barrier::new(2)), Arc::new(AtomicUsize::new(0)));
        let operation = || Operation::toward(1, Weak::new(), "put", Duration::from_secs(60));
        let (first, done) = operation();
        let there = Arc::clone(&all_there);
        let step = Box::new(move || {
            there.wait();
            Ok(0)
        });
        lane.push(Task::After(step, done));
        let mut operations = Vec::new();
        for _ in 0..3 {
            let (one, done) = operation();
            let begun = Arc::clone(&begun);
            let start = Box::new(move || {
                begun.fetch_add(1, Ordering::Relaxed);
                Err(Error::new(kind, "put", "it fails"))
            });
            lane.push(Task::Beside(start, done));
            operations.push(one);
        }
        all_there.wait();
        first.wait().unwrap();
        let ends = operations.iter().map(|one| one.wait().unwrap_err().kind()).collect();
        (begun.load(Ordering::Relaxed), ends)
    }

    #[test]
    fn what_waits_for_its_turn_to_a_rank_that_does_not_answer_ends_with_what_was_before_it() {
        for kind in [Kind::Timeout, Kind::Disconnected] {
            assert_eq!(begun_of(kind), (1, vec![kind; 3]));
        }
    }

    #[test]
    fn what_waits_for_its_turn_is_begun_whatever_else_was_wrong_before_it() {
        assert_eq!(begun_of(Kind::Stale), (3, vec![Kind::Stale; 3]));
    }
}
