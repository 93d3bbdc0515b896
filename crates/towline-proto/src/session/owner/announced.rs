//! The checksums that have come ahead of their frames.

use std::time::Instant;

use super::super::budget::Charge;
use super::admitted::total;
use super::{Admitted, Grant, Owner};
use crate::wire::Block;
use crate::{Access, Error, Result};

/// Over the control connection, which the event loop drives, a request with checksums has at most this many bytes.
const MOST_ON_CONTROL: u64 = 1 << 20;

/// For each connection, those of the next frame.
pub(super) struct Announced<C>(Vec<(C, Next)>);

/// Those of the next frame of a connection, and what they take.
struct Next {
    request: u64,
    checks: Vec<u32>,
    _charge: Charge,
}

/// What those checksums take.
pub(super) fn cost(checks: &Vec<u32>) -> usize {
    checks.capacity() * size_of::<u32>() + 128
}

impl<C: Clone + Eq> Announced<C> {
    pub(super) fn new() -> Announced<C> {
        Announced(Vec::new())
    }

    pub(super) fn put(&mut self, over: &C, request: u64, checks: Vec<u32>, charge: Charge) {
        self.forget(over);
        self.0.push((over.clone(), Next { request, checks, _charge: charge }));
    }

    /// Those for that request. What is there for another is forgotten: it was not the next.
    pub(super) fn take(&mut self, over: &C, request: u64) -> Option<Vec<u32>> {
        let at = self.0.iter().position(|(one, _)| one == over)?;
        let (_, next) = self.0.swap_remove(at);
        (next.request == request).then_some(next.checks)
    }

    pub(super) fn forget(&mut self, over: &C) {
        self.0.retain(|(one, _)| one != over);
    }
}

impl<G: Grant, C: Clone + Eq> Owner<G, C> {
    /// Returns the checksums that have come ahead of the frame of that request, whose payload is there.
    pub fn announced(&mut self, over: &C, request: u64) -> Option<Vec<u32>> {
        self.announced.take(over, request)
    }

    /// Holds the memory of a request that is being served, so that the checksums of its blocks can be made.
    pub fn hold_to_check(
        &mut self,
        over: &C,
        op: &'static str,
        handle: u32,
        needed: Access,
        blocks: Vec<Block>,
        now: Instant,
    ) -> Result<Admitted<G>> {
        self.may_check(over, op, total(&blocks))?;
        self.hold_again(op, handle, needed, blocks, now)
    }

    /// Refuses to make checksums of so many bytes in memory where nobody may wait for them.
    pub(super) fn may_check(&self, over: &C, op: &'static str, bytes: u64) -> Result<()> {
        if *over == self.control && bytes > MOST_ON_CONTROL {
            return Err(Error::invalid(
                op,
                "a request with checksums is too long for the control connection",
            ));
        }
        Ok(())
    }
}
