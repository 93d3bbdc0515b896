//! A thread that sleeps: what it takes to wake one, without the library.
#![allow(unsafe_code, reason = "sched_setscheduler has no safe form")]

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex, MutexGuard};

/// A thread that sleeps until it is called, and then sleeps again.
///
/// It is of the kind that the library leaves work to: `SCHED_BATCH`, so that it does not take the processor of the thread that wakes it.
pub(crate) struct Sleeper {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    called: Condvar,
    answered: Condvar,
}

#[derive(Default)]
struct State {
    calls: u64,
    answers: u64,
    over: bool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl Sleeper {
    /// Starts it.
    pub(crate) fn start() -> io::Result<Sleeper> {
        let shared: Arc<Shared> = Arc::default();
        let its = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("sleeper".into()).spawn(move || {
            let parameters = libc::sched_param { sched_priority: 0 };
            // SAFETY: changes the calling thread alone; `parameters` outlives the call.
            unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &parameters) };
            let mut state = its.state();
            while !state.over {
                if state.answers == state.calls {
                    its.called.wait(&mut state);
                    continue;
                }
                state.answers += 1;
                its.answered.notify_one();
            }
        })?;
        Ok(Sleeper { shared, thread: Some(thread) })
    }

    /// Wakes it, and does not wait until it is awake.
    pub(crate) fn wake(&self) {
        let mut state = self.shared.state();
        state.calls += 1;
        drop(state);
        self.shared.called.notify_one();
    }

    /// Waits until it has answered every call.
    pub(crate) fn answered(&self) {
        let mut state = self.shared.state();
        while state.answers < state.calls {
            self.shared.answered.wait(&mut state);
        }
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        self.shared.state().over = true;
        self.shared.called.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_sleeper_answers_every_call() {
        let sleeper = Sleeper::start().unwrap();
        for _ in 0..100 {
            sleeper.wake();
            sleeper.answered();
        }
        assert_eq!(sleeper.shared.state().answers, 100);
    }
}
