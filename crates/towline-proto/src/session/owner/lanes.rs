//! Lanes of which the peer has to know that they are over.

use std::time::{Duration, Instant};

use super::super::allowance::exhausted;
use super::{Grant, Owner};
use crate::Result;

/// A lane on which a thread is at work is looked at again after this time, and then after twice the time of that before, up to the last.
const FIRST: Duration = Duration::from_millis(1);
const LAST: Duration = Duration::from_millis(100);

/// More than these do not wait for one peer.
const MOST_ENDING: usize = 64;

/// The lanes of one peer.
pub(super) struct Lanes<C> {
    /// Those that are open, and those that were closed as long as some thread has them.
    known: Vec<(C, [u8; 32])>,
    /// Those that a thread is at work on, and the requests that wait for that.
    asked: Vec<(C, u64)>,
    pause: Duration,
    armed: bool,
}

impl<C: Clone + Eq> Lanes<C> {
    pub(super) fn new() -> Lanes<C> {
        Lanes { known: Vec::new(), asked: Vec::new(), pause: FIRST, armed: false }
    }

    pub(super) fn find(&self, name: &[u8; 32]) -> Option<&C> {
        self.known.iter().find(|(_, one)| one == name).map(|(lane, _)| lane)
    }

    /// One was closed: forgets those that nobody has any more.
    pub(super) fn closed(&mut self, is_there: impl Fn(&C) -> bool) {
        self.known.retain(|(lane, _)| is_there(lane));
    }

    fn look_again(&mut self, now: Instant) -> Option<Instant> {
        if self.armed || self.asked.is_empty() {
            return None;
        }
        self.armed = true;
        Some(now + self.pause)
    }
}

/// How far the end of a lane is.
#[derive(Debug)]
pub enum LaneEnd {
    /// Nothing more that came over it will be applied.
    Over,
    /// A thread is in the middle of something. Where a time is given, [`look_at_lanes`](Owner::look_at_lanes) then.
    Later(Option<Instant>),
}

impl<G: Grant, C: Clone + Eq> Owner<G, C> {
    /// One more connection of the peer has become a lane, which both sides call by that name.
    pub fn joined(&mut self, lane: C, name: [u8; 32]) {
        self.lanes.known.push((lane, name));
    }

    /// A lane that the peer has [asked to end](super::Action::EndLane) applies nothing more, or a thread is still in the middle of it.
    pub fn lane_ends(&mut self, lane: C, request: u64, is_applying: bool, now: Instant) -> Result<LaneEnd> {
        if !is_applying {
            return Ok(LaneEnd::Over);
        }
        let lanes = &mut self.lanes;
        if lanes.asked.len() >= MOST_ENDING {
            return Err(exhausted("end lane", format!("{MOST_ENDING} lanes that end"), "at a time"));
        }
        lanes.asked.push((lane, request));
        lanes.pause = FIRST;
        Ok(LaneEnd::Later(lanes.look_again(now)))
    }

    /// Time has passed: returns the requests for the end of lanes that are over now, and when to look again.
    pub fn look_at_lanes(
        &mut self,
        mut is_applying: impl FnMut(&C) -> bool,
        now: Instant,
    ) -> (Vec<u64>, Option<Instant>) {
        let lanes = &mut self.lanes;
        lanes.armed = false;
        lanes.pause = (lanes.pause * 2).min(LAST);
        let over = lanes.asked.extract_if(.., |(lane, _)| !is_applying(lane));
        (over.map(|(_, request)| request).collect(), lanes.look_again(now))
    }
}
