//! The thread of a non-blocking communicator: runs its work in order and remembers how it went.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use towline::Kind;

use crate::{Error, Result, interrupt};

/// How long the thread stays when it has nothing to do.
const LINGER: Duration = Duration::from_secs(2);

pub(crate) type Task = Box<dyn FnOnce() -> Result<()> + Send>;

/// How far the work of a communicator is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Work is queued or running.
    InProgress,
    /// All of it has ended well.
    Done,
}

/// Work in order on one thread that lives while there is some.
#[derive(Default)]
pub(crate) struct Worker {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Task>,
    /// Tasks that run here, and work that others do for this communicator.
    active: usize,
    running: bool,
    /// How the latest work ended; cleared when new work comes after it.
    failed: Option<Error>,
}

impl State {
    fn idle(&self) -> bool {
        self.queue.is_empty() && self.active == 0
    }
}

impl Worker {
    fn lock(&self) -> parking_lot::MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Adds work behind all other.
    pub(crate) fn push(self: &Arc<Self>, task: Task) -> Result<()> {
        let mut state = self.lock();
        if state.idle() {
            state.failed = None;
        }
        state.queue.push_back(task);
        if !state.running {
            let worker = Arc::clone(self);
            if let Err(error) = towline::start_thread("submit", "towline-comm", move || worker.run()) {
                state.queue.pop_back();
                return Err(error.into());
            }
            state.running = true;
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Counts work that is done by others for this communicator; [`finish`](Self::finish) ends it.
    pub(crate) fn begin(&self) {
        self.lock().active += 1;
    }

    pub(crate) fn finish(&self, outcome: Result<()>) {
        let mut state = self.lock();
        state.active -= 1;
        if let Err(error) = outcome {
            state.failed.get_or_insert(error);
        }
        drop(state);
        self.changed.notify_all();
    }

    pub(crate) fn progress(&self) -> Result<Progress> {
        let state = self.lock();
        match &state.failed {
            _ if !state.idle() => Ok(Progress::InProgress),
            Some(error) => Err(error.clone()),
            None => Ok(Progress::Done),
        }
    }

    /// Waits until nothing is queued or running; `false` when that is not so in time.
    pub(crate) fn wait_idle(&self, within: Duration) -> bool {
        interrupt::wait_while(&self.state, &self.changed, within, |state| !state.idle())
    }

    /// Throws away what has not begun.
    pub(crate) fn discard(&self) {
        let queue = std::mem::take(&mut self.lock().queue);
        drop(queue);
        self.changed.notify_all();
    }

    fn run(&self) {
        loop {
            let mut state = self.lock();
            let quiet_since = Instant::now();
            let task = loop {
                if let Some(task) = state.queue.pop_front() {
                    break task;
                }
                if quiet_since.elapsed() >= LINGER {
                    state.running = false;
                    return;
                }
                self.changed.wait_for(&mut state, LINGER);
            };
            state.active += 1;
            drop(state);
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(task))
                .unwrap_or_else(|_| Err(Error::new(Kind::Internal, "submit", "the work panicked")));
            self.finish(outcome);
        }
    }
}
