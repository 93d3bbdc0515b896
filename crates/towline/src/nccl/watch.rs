//! Calls of NCCL that wait by themselves, and the thread that ends them at their deadline.

use std::sync::{Condvar, Mutex, PoisonError, Weak};
use std::time::Instant;

use super::comm::Core;
use crate::sync::lock;

struct Entry {
    number: u64,
    deadline: Instant,
    core: Weak<Core>,
    op: &'static str,
}

#[derive(Default)]
struct Watched {
    entries: Vec<Entry>,
    next: u64,
    /// When the thread looks again; `None` where there is no thread, or it waits for an entry.
    looks: Option<Instant>,
    runs: bool,
}

static WATCHED: Mutex<Option<Watched>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();

/// One call that is watched, until it is dropped.
pub(super) struct Guard(u64);

/// Watches a call: where it has not ended by then, its communicator is stopped, and the call gives an error.
pub(super) fn guard(core: Weak<Core>, op: &'static str, deadline: Instant) -> Guard {
    let mut place = lock(&WATCHED);
    let watched = place.get_or_insert_default();
    watched.next += 1;
    let number = watched.next;
    watched.entries.push(Entry { number, deadline, core, op });
    if !watched.runs {
        let thread = std::thread::Builder::new().name("towline-nccl".into()).spawn(watch);
        // Without the thread the call goes on without a limit, which is what NCCL itself does.
        watched.runs = thread.is_ok();
    } else if watched.looks.is_none_or(|looks| looks > deadline) {
        CHANGED.notify_one();
    }
    Guard(number)
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(watched) = lock(&WATCHED).as_mut() {
            watched.entries.retain(|entry| entry.number != self.0);
        }
    }
}

fn watch() {
    let mut place = lock(&WATCHED);
    loop {
        let Some(watched) = place.as_mut() else { return };
        let now = Instant::now();
        if let Some(late) = watched.entries.iter().position(|entry| entry.deadline <= now) {
            let entry = watched.entries.swap_remove(late);
            drop(place);
            if let Some(core) = entry.core.upgrade() {
                core.stop(entry.op);
            }
            place = lock(&WATCHED);
            continue;
        }
        let next = watched.entries.iter().map(|entry| entry.deadline).min();
        watched.looks = next;
        place = match next {
            Some(next) => {
                let left = next.saturating_duration_since(now);
                CHANGED.wait_timeout(place, left).unwrap_or_else(PoisonError::into_inner).0
            }
            None => CHANGED.wait(place).unwrap_or_else(PoisonError::into_inner),
        };
    }
}
