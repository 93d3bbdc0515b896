//! How far a communicator is in its life: asked at every call, and changed seldom.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard};
use towline_sys::nccl::Comm;

use crate::Error;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Open,
    Finalized,
    /// Nothing but its end, a split or a shrink is possible.
    Revoked,
    /// NCCL has freed it.
    Gone,
}

pub(super) struct State {
    pub(super) stage: Stage,
    pub(super) closing: bool,
    /// Why it was stopped.
    pub(super) failure: Option<Error>,
}

const OPEN: u8 = 0;
const ENDING: u8 = 1;
const GONE: u8 = 2;

/// A state behind a lock, and what a call must know of it in a word of its own: a call takes no lock to learn that all is well.
pub(super) struct Life {
    quick: AtomicU8,
    /// NCCL's handle while every call is possible and none leaves anything in progress; otherwise 0.
    ready: AtomicUsize,
    /// NCCL's handle of a communicator that blocks, once there is one.
    settled: AtomicUsize,
    state: Mutex<State>,
}

impl Life {
    pub(super) fn new() -> Life {
        let state = State { stage: Stage::Open, closing: false, failure: None };
        let (ready, settled) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Life { quick: AtomicU8::new(OPEN), ready, settled, state: Mutex::new(state) }
    }

    /// Whether every call is possible: it has not failed, and nobody has begun to end it.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.quick.load(Ordering::Acquire) == OPEN
    }

    /// NCCL's handle, where every call is possible and nothing is in progress between calls.
    #[inline]
    pub(super) fn ready(&self) -> Option<Comm> {
        Comm::named(self.ready.load(Ordering::Acquire))
    }

    /// From now on nothing is in progress between calls: it blocks, and has come to be.
    pub(super) fn has_settled(&self, comm: Comm) {
        let held = self.lock();
        self.settled.store(comm.handle(), Ordering::Relaxed);
        drop(held);
    }

    /// Whether NCCL has freed it.
    #[inline]
    pub(super) fn is_gone(&self) -> bool {
        self.quick.load(Ordering::Acquire) == GONE
    }

    pub(super) fn lock(&self) -> Held<'_> {
        Held { life: self, state: self.state.lock() }
    }
}

/// The state, held; the words follow it at the end.
pub(super) struct Held<'a> {
    life: &'a Life,
    state: MutexGuard<'a, State>,
}

impl Deref for Held<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let quick = match &*self.state {
            State { stage: Stage::Gone, .. } => GONE,
            State { stage: Stage::Open, closing: false, failure: None } => OPEN,
            _ => ENDING,
        };
        let ready = if quick == OPEN { self.life.settled.load(Ordering::Relaxed) } else { 0 };
        self.life.ready.store(ready, Ordering::Release);
        self.life.quick.store(quick, Ordering::Release);
    }
}
