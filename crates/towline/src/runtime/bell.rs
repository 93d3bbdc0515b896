//! One descriptor that peers and this process ring: mail has come, or memory was let go.
//!
//! A thread that waits sleeps on the descriptor itself, so that a peer's ring wakes it without going through the
//! event loop. Where several threads wait, one of them (the leader) sleeps on the descriptor and wakes the others.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::{Error, Result};

/// The bell of an endpoint.
pub(crate) struct Bell {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    rung: u64,
    leader: bool,
    /// None once no peer can ring any more.
    event: Option<Arc<OwnedFd>>,
}

impl Bell {
    pub(crate) fn new() -> Result<Bell> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| Error::os("open", "eventfd", error))?;
        let state = State { rung: 0, leader: false, event: Some(Arc::new(event)) };
        Ok(Bell { state: Mutex::new(state), changed: Condvar::new() })
    }

    /// The descriptor that peers ring by writing to it; none once it was closed.
    pub(crate) fn event(&self) -> Option<Arc<OwnedFd>> {
        self.state.lock().event.clone()
    }

    /// No peer rings any more: closes the descriptor. From within this process it can be rung all the same.
    pub(crate) fn close(&self) {
        self.ring();
        self.state.lock().event = None;
    }

    /// What to pass to [`wait`](Self::wait): taken before looking for what is waited for.
    pub(crate) fn seen(&self) -> u64 {
        self.state.lock().rung
    }

    /// Rings from within this process. A system call only where a thread sleeps on the descriptor.
    pub(crate) fn ring(&self) {
        let mut state = self.state.lock();
        state.rung += 1;
        let leaders = if state.leader { state.event.clone() } else { None };
        drop(state);
        self.changed.notify_all();
        if let Some(event) = leaders {
            let _ = rustix::io::write(&event, &1u64.to_ne_bytes());
        }
    }

    /// Takes a peer's ring off the descriptor, for the event loop that watches it; false if the descriptor did not ring.
    pub(crate) fn drain(&self) -> bool {
        let mut state = self.state.lock();
        if state.leader {
            // The leader sleeps until it finds the descriptor ringing: if it were drained here, it would sleep on.
            drop(state);
            std::thread::yield_now();
            return true;
        }
        let rung = state.event.as_ref().is_some_and(empty);
        if rung {
            state.rung += 1;
            self.changed.notify_all();
        }
        rung
    }

    /// Waits until the bell has rung since `seen`, or until then.
    pub(crate) fn wait(&self, seen: u64, until: Instant) {
        let mut state = self.state.lock();
        while state.rung == seen {
            let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
            else {
                return;
            };
            let Some(event) = state.event.clone().filter(|_| !state.leader) else {
                self.changed.wait_for(&mut state, left);
                continue;
            };
            state.leader = true;
            drop(state);
            let limit = Timespec {
                tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            // Interrupted or failed: the loop looks again, and the limit holds.
            let _ = poll(&mut [PollFd::new(&event, PollFlags::IN)], Some(&limit));
            let rung = empty(&event);
            state = self.state.lock();
            state.leader = false;
            state.rung += u64::from(rung);
            // Those who wait look too, and one of them leads from here on.
            self.changed.notify_all();
        }
    }
}

fn empty(event: &Arc<OwnedFd>) -> bool {
    let mut count = [0u8; 8];
    rustix::io::retry_on_intr(|| rustix::io::read(event, &mut count)).is_ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(30)
    }

    #[test]
    fn a_ring_before_the_wait_is_not_lost() {
        let bell = Bell::new().unwrap();
        let seen = bell.seen();
        bell.ring();
        bell.wait(seen, soon());
        let seen = bell.seen();
        rustix::io::write(bell.event().unwrap(), &1u64.to_ne_bytes()).unwrap();
        bell.wait(seen, soon());
        assert!(bell.seen() > seen);
    }

    #[test]
    fn a_bell_that_was_closed_is_rung_from_within_and_has_woken_who_slept() {
        let bell = &Bell::new().unwrap();
        let woken_by = |act: fn(&Bell)| {
            let (seen, limit) = (bell.seen(), soon());
            std::thread::scope(|scope| {
                scope.spawn(move || bell.wait(seen, limit));
                act(bell);
            });
            assert!(bell.seen() > seen && Instant::now() < limit);
        };
        woken_by(Bell::close);
        assert!(bell.event().is_none() && !bell.drain());
        woken_by(Bell::ring);
    }

    #[test]
    fn a_wait_that_nobody_ends_is_over_at_its_limit() {
        let bell = Bell::new().unwrap();
        let seen = bell.seen();
        bell.wait(seen, Instant::now() + Duration::from_millis(20));
        assert_eq!(bell.seen(), seen);
    }

    #[test]
    fn who_watches_the_descriptor_does_not_take_a_ring_from_a_thread_that_sleeps_on_it() {
        let bell = Bell::new().unwrap();
        for _ in 0..1000 {
            let ended = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let seen = bell.seen();
                scope.spawn(|| {
                    while !ended.load(Ordering::SeqCst) {
                        bell.drain();
                    }
                });
                scope.spawn(|| bell.ring());
                let limit = soon();
                bell.wait(seen, limit);
                ended.store(true, Ordering::SeqCst);
                assert!(Instant::now() < limit, "the ring was lost");
            });
        }
        assert!(bell.seen() >= 1000);
    }

    #[test]
    fn every_waiting_thread_sees_every_ring_wherever_it_comes_from() {
        let bell = Arc::new(Bell::new().unwrap());
        let value = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let (bell, value) = (Arc::clone(&bell), Arc::clone(&value));
                std::thread::spawn(move || {
                    loop {
                        let seen = bell.seen();
                        if value.load(Ordering::SeqCst) == 200 {
                            return;
                        }
                        bell.wait(seen, soon());
                    }
                })
            })
            .collect();
        for round in 0..200 {
            value.fetch_add(1, Ordering::SeqCst);
            if round % 2 == 0 {
                bell.ring();
            } else {
                rustix::io::write(bell.event().unwrap(), &1u64.to_ne_bytes()).unwrap();
            }
        }
        for thread in threads {
            thread.join().unwrap();
        }
    }
}
