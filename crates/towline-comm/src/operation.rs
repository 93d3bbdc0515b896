//! A one-sided operation in flight: a future, which can also be waited on.

use std::cell::Cell;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use towline::Kind;
use towline::nccl::Pending;

use crate::team::{AccessWait, Team};
use crate::{Error, Result, interrupt};

/// After that long, a rank that waits for an operation says so to those that wait for it.
pub(crate) const WHILE: Duration = Duration::from_millis(100);

thread_local! {
    /// Asked at every registration.
    static HELD_BACK: Cell<bool> = const { Cell::new(false) };
}

/// From now on a group holds this thread's calls back, or does so no longer.
pub(crate) fn hold_back(held_back: bool) {
    HELD_BACK.set(held_back);
}

/// Whether a group holds back what this thread asks for, so that waiting for it would last for ever.
#[inline]
pub(crate) fn is_held_back() -> bool {
    HELD_BACK.get()
}

/// A one-sided operation in flight: a future, which can also be waited on. It owns what it touches, and goes on when
/// dropped.
///
/// Its value is what an atomic operation found, and 0 for any other. An operation that was asked for inside a group
/// starts at the outermost end of the group.
#[must_use = "an operation goes on when dropped, but its result is lost"]
pub struct Operation(Repr);

enum Repr {
    Done(Result<u64>),
    Live(Arc<Shared>),
    /// Ends when a stream has got past it.
    InStream(Pending),
}

/// What ends an operation.
pub(crate) struct Completion(Option<Arc<Shared>>);

/// An operation that was completed.
pub(crate) struct Completed(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    ended: Condvar,
    op: &'static str,
    within: Duration,
    /// The rank whose memory it is about, where it is one, and its team.
    toward: Option<(usize, Weak<Team>)>,
}

#[derive(Default)]
struct State {
    outcome: Option<Result<u64>>,
    deferred: bool,
    /// A caller has looked how it ended.
    seen: bool,
    wakers: Vec<Waker>,
}

impl State {
    fn look(&mut self) -> Option<Result<u64>> {
        self.seen |= self.outcome.is_some();
        self.outcome.clone()
    }
}

impl Operation {
    pub(crate) fn done(outcome: Result<u64>) -> Operation {
        Operation(Repr::Done(outcome))
    }

    pub(crate) fn in_stream(pending: Pending) -> Operation {
        Operation(Repr::InStream(pending))
    }

    /// An operation towards that rank of that team that ends later, and the completion that ends it.
    pub(crate) fn toward(
        peer: usize,
        team: Weak<Team>,
        op: &'static str,
        within: Duration,
    ) -> (Operation, Completion) {
        Operation::new(op, within, Some((peer, team)), false)
    }

    /// An operation that ends later, and the completion that ends it. `deferred`: it has not started yet.
    pub(crate) fn live(op: &'static str, within: Duration, deferred: bool) -> (Operation, Completion) {
        Operation::new(op, within, None, deferred)
    }

    fn new(
        op: &'static str,
        within: Duration,
        toward: Option<(usize, Weak<Team>)>,
        deferred: bool,
    ) -> (Operation, Completion) {
        let state = State { deferred, ..State::default() };
        let shared = Arc::new(Shared { state: Mutex::new(state), ended: Condvar::new(), op, within, toward });
        (Operation(Repr::Live(Arc::clone(&shared))), Completion(Some(shared)))
    }

    /// Replaces the error of an operation that failed immediately.
    pub(crate) fn explained(self, explain: impl FnOnce(Error) -> Error) -> Operation {
        match self.0 {
            Repr::Done(Err(error)) => Operation::done(Err(explain(error))),
            repr => Operation(repr),
        }
    }

    /// Whether it has ended, well or not.
    pub fn is_done(&self) -> bool {
        match &self.0 {
            Repr::Done(_) => true,
            Repr::Live(shared) => shared.lock().outcome.is_some(),
            Repr::InStream(pending) => pending.result().is_some(),
        }
    }

    /// How it ended, or `None` while it is in flight.
    pub fn result(&self) -> Option<Result<u64>> {
        match &self.0 {
            Repr::Done(outcome) => Some(outcome.clone()),
            Repr::Live(shared) => shared.lock().look(),
            Repr::InStream(pending) => pending.result().map(of_stream),
        }
    }

    /// Waits until it has ended. The communicator's limits bound the wait.
    pub fn wait(&self) -> Result<u64> {
        let shared = match &self.0 {
            Repr::Done(outcome) => return outcome.clone(),
            Repr::Live(shared) => shared,
            Repr::InStream(pending) if pending.is_deferred() && is_held_back() => {
                let message = "it starts at the end of the group: end the group first";
                return Err(Error::invalid(pending.op(), message));
            }
            Repr::InStream(pending) => return of_stream(pending.wait()),
        };
        // What carries it has limits of its own and always ends it; this limit is for what nobody foresaw.
        let until = Instant::now() + shared.within.saturating_mul(2).min(Duration::from_secs(86_400 * 365));
        let mut held_up = false;
        let mut state = shared.lock();
        loop {
            if let Some(outcome) = state.look() {
                if outcome.is_ok() && held_up {
                    shared.waits_for(AccessWait::Done);
                }
                shared.gave_up(&outcome);
                return outcome;
            }
            if state.deferred && is_held_back() {
                return Err(Error::invalid(
                    shared.op,
                    "it starts at the end of the group: end the group first",
                ));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let error = Error::new(Kind::Timeout, shared.op, "the operation is still in flight");
                return Err(error.about(shared.toward.as_ref().map(|(peer, _)| *peer)));
            }
            let timeout = shared.ended.wait_for(&mut state, left.min(WHILE));
            if timeout.timed_out() {
                held_up = true;
                shared.waits_for(AccessWait::Lasts);
                drop(state);
                if let Err(interrupted) = interrupt::check(shared.op) {
                    shared.waits_for(AccessWait::Done);
                    return Err(interrupted.about(shared.toward.as_ref().map(|(peer, _)| *peer)));
                }
                state = shared.lock();
            }
        }
    }
}

fn of_stream(outcome: towline::Result<()>) -> Result<u64> {
    outcome.map(|()| 0).map_err(Error::from)
}

impl Future for Operation {
    type Output = Result<u64>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<u64>> {
        match &self.0 {
            Repr::Done(outcome) => Poll::Ready(outcome.clone()),
            Repr::InStream(pending) => match pending.result() {
                Some(outcome) => Poll::Ready(of_stream(outcome)),
                None => {
                    pending.wake(cx.waker());
                    Poll::Pending
                }
            },
            Repr::Live(shared) => {
                let mut state = shared.lock();
                if let Some(outcome) = state.look() {
                    drop(state);
                    shared.gave_up(&outcome);
                    return Poll::Ready(outcome);
                }
                if !state.wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
                    state.wakers.push(cx.waker().clone());
                }
                Poll::Pending
            }
        }
    }
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation").field("done", &self.is_done()).finish()
    }
}

impl Shared {
    fn lock(&self) -> parking_lot::MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Lets the team know whether this rank waits for the rank of the operation: ranks that wait for this one need it to find the culprit.
    fn waits_for(&self, waits: AccessWait) {
        if let Some((peer, team)) = &self.toward
            && let Some(team) = team.upgrade()
        {
            team.waits_for(*peer, waits);
        }
    }

    /// Lets the team know that this rank has waited in vain, where it has.
    fn gave_up(&self, outcome: &Result<u64>) {
        if let Err(error) = outcome
            && matches!(error.kind(), Kind::Timeout | Kind::Disconnected)
        {
            self.waits_for(AccessWait::InVain);
        }
    }

    fn complete(&self, outcome: Result<u64>) {
        let wakers = {
            let mut state = self.lock();
            state.outcome.get_or_insert(outcome);
            std::mem::take(&mut state.wakers)
        };
        self.ended.notify_all();
        for waker in wakers {
            waker.wake();
        }
    }
}

impl Completion {
    /// The operation that it is of.
    pub(crate) fn op(&self) -> &'static str {
        self.0.as_ref().map_or("access", |shared| shared.op)
    }

    /// Whether a task awaits the operation as a future. A thread that waits for it shows so itself.
    pub(crate) fn is_awaited(&self) -> bool {
        self.0
            .as_ref()
            .is_some_and(|shared| Arc::strong_count(shared) > 1 && !shared.lock().wakers.is_empty())
    }

    /// Ends the operation with that outcome.
    pub(crate) fn complete(mut self, outcome: Result<u64>) -> Option<Completed> {
        let shared = self.0.take()?;
        shared.complete(outcome);
        Some(Completed(shared))
    }
}

impl Completed {
    /// Whether a caller has looked how it ended.
    pub(crate) fn was_seen(&self) -> bool {
        self.0.lock().seen
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        if let Some(shared) = self.0.take() {
            let op = shared.op;
            shared.complete(Err(Error::new(Kind::Canceled, op, "it was never started")));
        }
    }
}
