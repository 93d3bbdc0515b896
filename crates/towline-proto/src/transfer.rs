//! How far a transfer is and how it ended: pure bookkeeping without clock or I/O.

use std::ops::Range;

use crate::{Error, Kind, Result};

/// Some blocks of a transfer that failed, and why.
#[derive(Debug, Clone)]
pub struct BlockFailure {
    /// The part of the transfer that they belong to, and so their regions; 0 where it has one.
    pub part: usize,
    /// The blocks, numbered in the order in which the request named them; in each part from 0.
    pub blocks: Range<u64>,
    /// Why they failed.
    pub error: Error,
}

/// The state of one transfer. It ends exactly once, when every unit has reported.
#[derive(Debug)]
pub struct State {
    pending: usize,
    bytes: u64,
    value: Option<u64>,
    stopping: Option<Error>,
    failures: Vec<BlockFailure>,
    ended: Option<Result<()>>,
}

impl State {
    /// A transfer that ends when that many units have reported.
    #[inline]
    pub fn new(units: usize) -> State {
        State {
            pending: units.max(1),
            bytes: 0,
            value: None,
            stopping: None,
            failures: Vec::new(),
            ended: None,
        }
    }

    /// What was one unit until now is that many. Before any of them has reported.
    #[inline]
    pub fn divide(&mut self, units: usize) {
        self.pending = units.max(1);
    }

    /// Bytes have moved.
    #[inline]
    pub fn progressed(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    /// The old value that an atomic found.
    #[inline]
    pub fn set_value(&mut self, value: u64) {
        self.value = Some(value);
    }

    /// A unit has ended well.
    #[inline]
    pub fn unit_done(&mut self) {
        self.unit_over();
    }

    /// A unit has ended, and so the blocks that it carries; one without any, such as a signal, is named all the same.
    #[inline]
    pub fn unit_failed(&mut self, part: usize, blocks: Vec<Range<u64>>, error: Error) {
        self.failed(part, blocks, error);
        self.unit_over();
    }

    /// It has ended before it was cut into units, and with it all blocks of its parts.
    pub fn whole_failed(&mut self, blocks: impl Iterator<Item = u64>, error: Error) {
        for (part, blocks) in blocks.enumerate() {
            self.failed(part, std::iter::once(0..blocks).collect(), error.clone());
        }
        self.unit_over();
    }

    /// A unit has ended; those of its blocks failed.
    pub fn unit_ended(&mut self, failed: Vec<BlockFailure>) {
        self.failures.extend(failed);
        self.unit_over();
    }

    fn failed(&mut self, part: usize, blocks: Vec<Range<u64>>, error: Error) {
        if blocks.is_empty() {
            self.failures.push(BlockFailure { part, blocks: 0..0, error: error.clone() });
        }
        let failed = blocks.into_iter().map(|blocks| BlockFailure { part, blocks, error: error.clone() });
        self.failures.extend(failed);
    }

    /// Remembers why it is being stopped; false when it has ended or is stopping already.
    #[inline]
    pub fn stop(&mut self, error: Error) -> bool {
        if self.ended.is_some() || self.stopping.is_some() {
            return false;
        }
        self.stopping = Some(error);
        true
    }

    fn unit_over(&mut self) {
        if self.ended.is_some() {
            return;
        }
        self.pending -= 1;
        if self.pending > 0 {
            return;
        }
        self.failures.sort_by_key(|failure| (failure.part, failure.blocks.start));
        // A stop that came too late, after every unit went well, does not turn success into failure.
        // What was dropped because something else failed does not speak for the whole.
        let cause = self.failures.iter().find(|failure| failure.error.kind() != Kind::Canceled);
        self.ended = Some(match (cause.or(self.failures.first()), &self.stopping) {
            (None, _) => Ok(()),
            (Some(_), Some(stopping)) => Err(stopping.clone()),
            (Some(failure), None) => Err(failure.error.clone()),
        });
    }

    /// How it ended, once it has.
    #[inline]
    pub fn ended(&self) -> Option<&Result<()>> {
        self.ended.as_ref()
    }

    /// Why it is being stopped, where it is.
    #[inline]
    pub fn stopping(&self) -> Option<&Error> {
        self.stopping.as_ref()
    }

    /// The blocks that failed.
    #[inline]
    pub fn failures(&self) -> &[BlockFailure] {
        &self.failures
    }

    /// How many bytes have moved.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The old value that an atomic found.
    #[inline]
    pub fn value(&self) -> Option<u64> {
        self.value
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    fn stale() -> Error {
        Error::new(Kind::Stale, "read", "gone")
    }

    fn one_run(blocks: Range<u64>) -> Vec<Range<u64>> {
        std::iter::once(blocks).collect()
    }

    #[test]
    fn it_ends_when_the_last_unit_has_reported() {
        let mut state = State::new(2);
        state.unit_done();
        assert!(state.ended().is_none());
        state.unit_done();
        assert!(state.ended().unwrap().is_ok());
    }

    #[test]
    fn what_is_divided_ends_with_the_last_of_its_units() {
        let mut state = State::new(1);
        state.divide(2);
        state.unit_done();
        assert!(state.ended().is_none());
        state.unit_failed(0, one_run(4..5), stale());
        assert_eq!(state.ended().unwrap().as_ref().unwrap_err().kind(), Kind::Stale);
    }

    #[test]
    fn a_failed_unit_names_its_blocks_and_fails_the_whole() {
        let mut state = State::new(3);
        state.unit_failed(0, one_run(7..9), stale());
        state.unit_done();
        state.unit_failed(0, one_run(1..2), stale());
        assert_eq!(state.ended().unwrap().as_ref().unwrap_err().kind(), Kind::Stale);
        let blocks: Vec<_> = state.failures().iter().map(|failure| failure.blocks.clone()).collect();
        assert_eq!(blocks, [1..2, 7..9]);
    }

    #[test]
    fn failures_are_in_the_order_of_the_parts_and_a_real_cause_wins() {
        let mut state = State::new(3);
        state.unit_failed(2, one_run(0..1), stale());
        state.unit_failed(0, one_run(4..5), Error::new(Kind::Canceled, "read", "dropped"));
        state.unit_done();
        let failed: Vec<_> = state.failures().iter().map(|one| (one.part, one.blocks.clone())).collect();
        assert_eq!(failed, [(0, 4..5), (2, 0..1)]);
        assert_eq!(state.ended().unwrap().as_ref().unwrap_err().kind(), Kind::Stale);
    }

    #[test]
    fn a_stop_after_all_units_went_well_changes_nothing() {
        let mut state = State::new(2);
        state.unit_done();
        assert!(state.stop(Error::new(Kind::Canceled, "read", "cancelled")));
        assert!(state.ended().is_none(), "it ends only when quiet");
        state.unit_done();
        assert!(state.ended().unwrap().is_ok());
        assert!(!state.stop(stale()));
    }

    #[test]
    fn the_first_reason_to_stop_is_the_one_reported() {
        let mut state = State::new(1);
        assert!(state.stop(Error::new(Kind::Timeout, "read", "late")));
        assert!(!state.stop(Error::new(Kind::Canceled, "read", "cancelled")));
        state.unit_failed(0, one_run(0..1), stale());
        assert_eq!(state.ended().unwrap().as_ref().unwrap_err().kind(), Kind::Timeout);
    }

    proptest! {
        #[test]
        fn it_ends_exactly_once_whatever_the_order(units in 1usize..40, script in prop::collection::vec(0u8..3, 0..80)) {
            let mut state = State::new(units);
            let mut reported = 0;
            let mut failed = 0;
            for step in script.into_iter().chain(std::iter::repeat_n(0, units)) {
                if reported == units { break; }
                match step {
                    0 => { state.unit_done(); reported += 1; }
                    1 => { let blocks = reported as u64..reported as u64 + 1; state.unit_failed(0, one_run(blocks), stale()); reported += 1; failed += 1; }
                    _ => { state.stop(Error::new(Kind::Canceled, "read", "cancelled")); }
                }
                prop_assert_eq!(state.ended().is_some(), reported == units);
            }
            prop_assert_eq!(state.failures().len(), failed);
            prop_assert_eq!(state.ended().unwrap().is_ok(), failed == 0);
        }
    }
}
