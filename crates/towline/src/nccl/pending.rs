//! The end of a job: asked for, waited for, or awaited.

use std::sync::{Arc, Weak};
use std::task::Waker;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use towline_sys::cuda::Event;
use towline_sys::nccl::Progress;

use super::comm::Core;
use crate::cuda::failed;
use crate::{Error, Kind, Result, interrupt, runtime};

/// The end of a job: it has ended when its stream has got past it. Cheap to clone.
#[derive(Clone)]
pub struct Pending(Arc<Inner>);

struct Inner {
    op: &'static str,
    timeout: Duration,
    core: Weak<Core>,
    state: Mutex<State>,
}

enum State {
    /// Its group has not ended yet.
    NotStarted,
    /// Ends when the communicator has nothing in progress.
    Settling(Instant),
    /// In a stream since then.
    InStream(Arc<Event>, Instant),
    Ended(Result<()>),
}

impl Pending {
    pub(super) fn new(op: &'static str, timeout: Duration, core: Weak<Core>) -> Pending {
        Pending(Arc::new(Inner { op, timeout, core, state: Mutex::new(State::NotStarted) }))
    }

    pub(super) fn started(&self, event: Arc<Event>) {
        let mut state = self.0.state.lock();
        if matches!(*state, State::NotStarted) {
            *state = State::InStream(event, Instant::now());
        }
    }

    pub(super) fn settling(&self) {
        *self.0.state.lock() = State::Settling(Instant::now());
    }

    pub(super) fn ended(&self, outcome: Result<()>) {
        let mut state = self.0.state.lock();
        if !matches!(*state, State::Ended(_)) {
            *state = State::Ended(outcome);
        }
    }

    /// The call that it is the end of.
    pub fn op(&self) -> &'static str {
        self.0.op
    }

    /// How it ended, or `None` while it has not.
    pub fn result(&self) -> Option<Result<()>> {
        let mut state = self.0.state.lock();
        let outcome = match &*state {
            State::NotStarted => return None,
            State::Ended(outcome) => return Some(outcome.clone()),
            State::Settling(_) => match self.0.core.upgrade().map(|core| core.progress(self.0.op)) {
                Some(Ok(Progress::InProgress)) => return None,
                Some(Ok(Progress::Done)) => Ok(()),
                Some(Err(error)) => Err(error),
                None => Err(Error::invalid(self.0.op, "the communicator is gone")),
            },
            State::InStream(event, _) => match event.has_happened() {
                Ok(false) => return None,
                Ok(true) => {
                    let failure = self.0.core.upgrade().and_then(|core| core.failure());
                    failure.map_or(Ok(()), |failure| Err(failure.during(self.0.op)))
                }
                Err(error) => Err(failed(self.0.op, error)),
            },
        };
        *state = State::Ended(outcome.clone());
        Some(outcome)
    }

    /// Whether it waits for the end of a group.
    pub fn is_deferred(&self) -> bool {
        matches!(*self.0.state.lock(), State::NotStarted)
    }

    /// Waits until it has ended, for at most the communicator's timeout from its start; then the communicator is revoked or
    /// aborted, and the error says so.
    pub fn wait(&self) -> Result<()> {
        let mut pause = Duration::from_micros(5);
        let begun = Instant::now();
        loop {
            if let Some(outcome) = self.result() {
                return outcome;
            }
            let since = match &*self.0.state.lock() {
                State::InStream(_, since) | State::Settling(since) => *since,
                _ => begun,
            };
            if since.elapsed() >= self.0.timeout {
                return Err(self.give_up());
            }
            interrupt::check(self.0.op)?;
            // The first fifty microseconds are spun: most work has ended by then.
            if begun.elapsed() > Duration::from_micros(50) {
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(1));
            }
        }
    }

    fn give_up(&self) -> Error {
        let state = match self.0.core.upgrade() {
            Some(core) => core.stop(self.0.op),
            None => "the communicator is gone".to_owned(),
        };
        let seconds = self.0.timeout.as_secs_f64();
        let message = format!("its stream has not got past it in {seconds:.3} s; {state}");
        let error = Error::new(Kind::Timeout, self.0.op, message);
        self.ended(Err(error.clone()));
        error
    }

    /// Wakes the waker when it has ended; a thread asks for that while there is a waiter.
    pub fn wake(&self, waker: &Waker) {
        watcher::add(self.clone(), waker.clone());
    }
}

impl std::fmt::Debug for Pending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending").field("op", &self.0.op).field("ended", &self.result().is_some()).finish()
    }
}

/// The thread that asks how far streams are, for those who await.
mod watcher {
    use super::*;

    #[derive(Default)]
    struct Awaited {
        all: Vec<(Pending, Waker, Instant)>,
        runs: bool,
    }

    static AWAITED: Mutex<Option<Awaited>> = Mutex::new(None);

    pub(super) fn add(pending: Pending, waker: Waker) {
        let mut place = AWAITED.lock();
        let awaited = place.get_or_insert_default();
        awaited.all.push((pending, waker, Instant::now()));
        if !awaited.runs {
            let thread = runtime::start_thread("wait", "towline-nccl-wait", watch);
            awaited.runs = thread.is_ok();
            if !awaited.runs {
                // The waiter asks again by itself then, and comes by here.
                let waiting = std::mem::take(&mut awaited.all);
                drop(place);
                waiting.into_iter().for_each(|(_, waker, _)| waker.wake());
            }
        }
    }

    fn watch() {
        loop {
            std::thread::sleep(Duration::from_micros(100));
            let taken = {
                let mut place = AWAITED.lock();
                let Some(awaited) = place.as_mut() else { return };
                if awaited.all.is_empty() {
                    awaited.runs = false;
                    return;
                }
                std::mem::take(&mut awaited.all)
            };
            let mut left = Vec::new();
            for (pending, waker, since) in taken {
                if pending.result().is_some() {
                    waker.wake();
                } else if since.elapsed() >= pending.0.timeout {
                    pending.give_up();
                    waker.wake();
                } else {
                    left.push((pending, waker, since));
                }
            }
            if let Some(awaited) = AWAITED.lock().as_mut() {
                awaited.all.append(&mut left);
            }
        }
    }
}
