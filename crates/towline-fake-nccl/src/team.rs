//! The ranks of a group, which are threads of this process, and what they give each other.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

/// No call of a test takes longer.
const LIMIT: Duration = Duration::from_secs(60);

/// A counter: from, to, context, index.
pub(crate) type Counter = (usize, usize, i32, i32);

/// What each rank gave, and how many have taken it.
type Round = (Vec<Option<Vec<u8>>>, usize);

pub(crate) struct Team {
    pub(crate) size: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) joined: HashSet<usize>,
    rounds: HashMap<u64, Round>,
    pub(crate) mail: HashMap<(usize, usize), VecDeque<Vec<u8>>>,
    pub(crate) signals: HashMap<Counter, u64>,
    children: HashMap<(u64, i64), Arc<Team>>,
    /// Address and length of each rank's memory, by the number of the window.
    pub(crate) windows: HashMap<u64, HashMap<usize, (u64, usize)>>,
    /// The ranks that wait for nobody any more.
    stopped: HashSet<usize>,
}

impl Team {
    fn new(size: usize) -> Arc<Team> {
        Arc::new(Team { size, state: Mutex::default(), changed: Condvar::new() })
    }

    /// The group that meets by that id.
    pub(crate) fn of_id(id: &[u8], size: usize) -> Arc<Team> {
        static TEAMS: OnceLock<Mutex<HashMap<Vec<u8>, Arc<Team>>>> = OnceLock::new();
        let mut teams = TEAMS.get_or_init(Mutex::default).lock();
        Arc::clone(teams.entry(id.to_vec()).or_insert_with(|| Team::new(size)))
    }

    /// The group that those of that colour make of this one.
    pub(crate) fn child(&self, round: u64, color: i64, size: usize) -> Arc<Team> {
        Arc::clone(self.lock().children.entry((round, color)).or_insert_with(|| Team::new(size)))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Ends the waits of a rank; the others go on waiting.
    pub(crate) fn stop(&self, rank: usize) {
        self.change(|state| {
            state.stopped.insert(rank);
        });
    }

    /// Waits for something; `None` where the rank was stopped, or it did not come.
    pub(crate) fn wait<T>(&self, rank: usize, mut look: impl FnMut(&mut State) -> Option<T>) -> Option<T> {
        let until = Instant::now() + LIMIT;
        let mut state = self.lock();
        loop {
            if let Some(found) = look(&mut state) {
                return Some(found);
            }
            let left = until.saturating_duration_since(Instant::now());
            if state.stopped.contains(&rank) || left.is_zero() {
                return None;
            }
            self.changed.wait_for(&mut state, left);
        }
    }

    /// Gives every rank these bytes and takes every rank's.
    pub(crate) fn exchange(&self, round: u64, rank: usize, bytes: Vec<u8>) -> Option<Vec<Vec<u8>>> {
        let size = self.size;
        self.change(|state| {
            state.rounds.entry(round).or_insert_with(|| (vec![None; size], 0)).0[rank] = Some(bytes);
        });
        self.wait(rank, |state| {
            let (given, taken) = state.rounds.get_mut(&round)?;
            let all: Option<Vec<Vec<u8>>> = given.iter().cloned().collect();
            let all = all?;
            *taken += 1;
            if *taken == size {
                state.rounds.remove(&round);
            }
            Some(all)
        })
    }
}
