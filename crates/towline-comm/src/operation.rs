//! A one-sided operation in flight: a future, which can also be waited on.

use std::cell::Cell;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use towline::nccl::Pending;
use towline::{Completion, Kind};

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

/// The promise to end an operation.
pub(crate) struct Promise(Option<Arc<Shared>>);

/// An operation that has ended.
pub(crate) struct Ended(Arc<Shared>);

struct Shared {
    end: Completion<Result<u64>>,
    /// It starts at the end of a group.
    deferred: bool,
    /// A caller has looked how it ended.
    seen: AtomicBool,
    op: &'static str,
    within: Duration,
    /// The rank whose memory it is about, where it is one, and its team.
    toward: Option<(usize, Weak<Team>)>,
}

impl Operation {
    pub(crate) fn done(outcome: Result<u64>) -> Operation {
        Operation(Repr::Done(outcome))
    }

    pub(crate) fn in_stream(pending: Pending) -> Operation {
        Operation(Repr::InStream(pending))
    }

    /// An operation towards that rank of that team that ends later, and the promise to end it.
    pub(crate) fn toward(
        peer: usize,
        team: Weak<Team>,
        op: &'static str,
        within: Duration,
    ) -> (Operation, Promise) {
        Operation::new(op, within, Some((peer, team)), false)
    }

    /// An operation that ends later, and the promise to end it. `deferred`: it has not started yet.
    pub(crate) fn live(op: &'static str, within: Duration, deferred: bool) -> (Operation, Promise) {
        Operation::new(op, within, None, deferred)
    }

    fn new(
        op: &'static str,
        within: Duration,
        toward: Option<(usize, Weak<Team>)>,
        deferred: bool,
    ) -> (Operation, Promise) {
        let (end, seen) = (Completion::default(), AtomicBool::new(false));
        let shared = Arc::new(Shared { end, deferred, seen, op, within, toward });
        (Operation(Repr::Live(Arc::clone(&shared))), Promise(Some(shared)))
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
            Repr::Live(shared) => shared.end.result().is_some(),
            Repr::InStream(pending) => pending.result().is_some(),
        }
    }

    /// How it ended, or `None` while it is in flight.
    pub fn result(&self) -> Option<Result<u64>> {
        match &self.0 {
            Repr::Done(outcome) => Some(outcome.clone()),
            Repr::Live(shared) => shared.look(shared.end.result()),
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
        let began = Instant::now();
        let until = began + shared.within.saturating_mul(2).min(Duration::from_secs(86_400 * 365));
        let mut held_up = false;
        // The first look does not wait.
        let mut turn = began;
        loop {
            if let Some(outcome) = shared.look(shared.end.wait_until(Some(turn))) {
                if outcome.is_ok() && held_up {
                    shared.waits_for(AccessWait::Done);
                }
                shared.gave_up(&outcome);
                return outcome;
            }
            if shared.deferred && is_held_back() {
                let message = "it starts at the end of the group: end the group first";
                return Err(Error::invalid(shared.op, message));
            }
            let about = |error: Error| error.about(shared.toward.as_ref().map(|(peer, _)| *peer));
            if turn > began {
                held_up = true;
                shared.waits_for(AccessWait::Lasts);
                interrupt::check(shared.op).map_err(|interrupted| {
                    shared.waits_for(AccessWait::Done);
                    about(interrupted)
                })?;
            }
            let now = Instant::now();
            if now >= until {
                return Err(about(Error::new(Kind::Timeout, shared.op, "the operation is still in flight")));
            }
            turn = until.min(now + WHILE);
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
            Repr::Live(shared) => shared.end.poll(cx).map(|outcome| {
                shared.seen.store(true, Ordering::Release);
                shared.gave_up(&outcome);
                outcome
            }),
        }
    }
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation").field("done", &self.is_done()).finish()
    }
}

impl Shared {
    /// Somebody looks how it ended.
    fn look(&self, outcome: Option<Result<u64>>) -> Option<Result<u64>> {
        outcome.inspect(|_| self.seen.store(true, Ordering::Release))
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
}

impl Promise {
    /// The operation that it is of.
    pub(crate) fn op(&self) -> &'static str {
        self.0.as_ref().map_or("access", |shared| shared.op)
    }

    /// Whether a task awaits the operation as a future. A thread that waits for it shows so itself.
    pub(crate) fn is_awaited(&self) -> bool {
        self.0.as_ref().is_some_and(|shared| Arc::strong_count(shared) > 1 && shared.end.is_awaited())
    }

    /// Ends the operation with that outcome.
    pub(crate) fn end(mut self, outcome: Result<u64>) -> Option<Ended> {
        let shared = self.0.take()?;
        let _ = shared.end.set(outcome);
        Some(Ended(shared))
    }
}

impl Ended {
    /// Whether a caller has looked how it ended.
    pub(crate) fn was_seen(&self) -> bool {
        self.0.seen.load(Ordering::Acquire)
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        if let Some(shared) = self.0.take() {
            let canceled = Error::new(Kind::Canceled, shared.op, "it was never started");
            let _ = shared.end.set(Err(canceled));
        }
    }
}
