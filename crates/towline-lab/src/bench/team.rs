//! Threads that work together on one round after the other, and sleep in between.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex, MutexGuard};

/// What each member does: called with the member's number.
pub(super) type Work = Arc<dyn Fn(usize) -> io::Result<()> + Send + Sync>;

/// The caller and its helpers.
pub(super) struct Team {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    start: Condvar,
    done: Condvar,
}

#[derive(Default)]
struct State {
    round: u64,
    work: Option<Work>,
    running: usize,
    error: Option<io::Error>,
    over: bool,
}

impl Team {
    /// A team of that many threads, the caller being one.
    pub(super) fn new(threads: usize) -> io::Result<Team> {
        let mut team = Team { shared: Arc::default(), helpers: Vec::new() };
        for number in 1..threads.max(1) {
            let shared = Arc::clone(&team.shared);
            let helper = std::thread::Builder::new()
                .name(format!("limit-{number}"))
                .spawn(move || shared.help(number))?;
            team.helpers.push(helper);
        }
        Ok(team)
    }

    /// Lets every member do the work once; returns when all have.
    pub(super) fn run(&self, work: &Work) -> io::Result<()> {
        if !self.helpers.is_empty() {
            let mut state = self.shared.lock();
            state.round += 1;
            state.work = Some(Arc::clone(work));
            state.running = self.helpers.len();
            drop(state);
            self.shared.start.notify_all();
        }
        let mine = work(0);
        let mut state = self.shared.lock();
        while state.running > 0 {
            self.shared.done.wait(&mut state);
        }
        state.error.take().map_or(mine, Err)
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.lock().over = true;
        self.shared.start.notify_all();
        for helper in self.helpers.drain(..) {
            let _ = helper.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn help(&self, number: usize) {
        let mut seen = 0;
        let mut state = self.lock();
        loop {
            while state.round == seen && !state.over {
                self.start.wait(&mut state);
            }
            if state.over {
                return;
            }
            seen = state.round;
            let work = state.work.clone();
            drop(state);
            let outcome = work.map_or(Ok(()), |work| work(number));
            state = self.lock();
            if let Err(error) = outcome {
                state.error = Some(error);
            }
            state.running -= 1;
            if state.running == 0 {
                self.done.notify_one();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn every_member_works_once_in_every_round() {
        let team = Team::new(3).unwrap();
        let count = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0)]);
        let counted = Arc::clone(&count);
        let work: Work = Arc::new(move |number| {
            counted[number].fetch_add(1, Ordering::Relaxed);
            Ok(())
        });
        for _ in 0..100 {
            team.run(&work).unwrap();
        }
        assert!(count.iter().all(|count| count.load(Ordering::Relaxed) == 100));
    }

    #[test]
    fn an_error_of_any_member_comes_out() {
        let team = Team::new(2).unwrap();
        let work: Work = Arc::new(|number| if number == 1 { Err(io::Error::other("no")) } else { Ok(()) });
        assert!(team.run(&work).is_err());
        assert!(team.run(&(Arc::new(|_| Ok(())) as Work)).is_ok());
    }
}
