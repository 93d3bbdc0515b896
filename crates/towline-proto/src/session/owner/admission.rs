//! What a request may touch: its grant, its rights, its lease, its range, and whether the region is still there.

use std::sync::Arc;
use std::time::Instant;

use super::{Grant, InFlight, Owner, stale};
use crate::ticket::check_lease;
use crate::wire::Block;
use crate::{Access, Error, Kind, Result};

/// What a request's list of parts takes for each block: an address and a length.
const PART: usize = 2 * size_of::<usize>();

/// What of a region a request may touch. Only the checks of an [`Owner`] make one.
#[derive(Debug)]
pub struct Ranges {
    start: u64,
    blocks: Vec<Block>,
}

impl Ranges {
    /// Returns the ranges as offset from the start of the region, and length.
    pub fn iter(&self) -> impl Iterator<Item = (u64, usize)> {
        self.blocks.iter().map(|block| (self.start + block.offset, block.len as usize))
    }

    /// Returns the blocks as they were asked for: their offsets count from the start of the granted range.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Returns how many bytes they are.
    pub fn bytes(&self) -> u64 {
        total(&self.blocks)
    }
}

/// How many bytes those blocks are.
pub(super) fn total(blocks: &[Block]) -> u64 {
    blocks.iter().map(|block| u64::from(block.len)).sum()
}

/// A request that may be served: what keeps the region in place, and what of it the request may touch.
pub struct Admitted<G: Grant> {
    grant: Arc<G>,
    hold: G::Hold,
    ranges: Ranges,
}

impl<G: Grant> Admitted<G> {
    /// Returns the grant that allows it.
    pub fn grant(&self) -> &Arc<G> {
        &self.grant
    }

    /// Returns what keeps the region in place.
    pub fn hold(&self) -> &G::Hold {
        &self.hold
    }

    /// Returns what may be touched.
    pub fn ranges(&self) -> &Ranges {
        &self.ranges
    }

    /// Returns what keeps the region in place as long as it lives, and what may be touched of it so long.
    pub fn into_parts(self) -> (G::Hold, Ranges) {
        (self.hold, self.ranges)
    }
}

/// A request that is not served.
#[derive(Debug)]
pub struct Refusal<G> {
    /// Why.
    pub error: Error,
    /// Whose refusals it counts among.
    pub blame: Blame<G>,
}

/// Whose refusals a refusal counts among.
#[derive(Debug)]
pub enum Blame<G> {
    /// The grant's.
    Grant(Arc<G>),
    /// The peer's, who has no such grant.
    Peer,
    /// Nobody's: the peer did nothing that is not allowed.
    Nobody,
}

impl<G> From<Error> for Refusal<G> {
    fn from(error: Error) -> Refusal<G> {
        Refusal { error, blame: Blame::Nobody }
    }
}

impl<G: Grant, C: Clone + Eq> Owner<G, C> {
    /// Checks a request against what was granted, counts it, and holds its region.
    pub fn admit(
        &mut self,
        handle: u32,
        needed: Access,
        blocks: Vec<Block>,
        now: Instant,
    ) -> Result<Admitted<G>, Refusal<G>> {
        let op = if needed == Access::READ { "read" } else { "write" };
        let grant = self.grants.find_or_refuse(op, handle).cloned();
        let grant = grant.map_err(|error| Refusal { error, blame: Blame::Peer })?;
        let list = blocks.len() * PART;
        let held = self.check(op, &grant, needed, &blocks, now).and_then(|region| {
            match self.allowance.take(op, total(&blocks), list, Some(grant.served())) {
                Ok(flight) => self.hold(op, region, Some(flight)),
                Err(error) => {
                    self.spent.push(region);
                    Err(error)
                }
            }
        });
        match held {
            Ok(hold) => {
                let ranges = Ranges { start: grant.claims().range.start, blocks };
                Ok(Admitted { grant, hold, ranges })
            }
            Err(error) => Err(Refusal { error, blame: Blame::Grant(grant) }),
        }
    }

    fn hold(
        &mut self,
        op: &'static str,
        region: Arc<G::Region>,
        flight: Option<InFlight>,
    ) -> Result<G::Hold> {
        G::hold(op, region, flight).map_err(|(error, region)| {
            self.spent.push(region);
            error
        })
    }

    /// Holds what a request names that was admitted before and goes on: it is not counted once more.
    pub(super) fn hold_again(
        &mut self,
        op: &'static str,
        handle: u32,
        needed: Access,
        blocks: Vec<Block>,
        now: Instant,
    ) -> Result<Admitted<G>> {
        let grant = Arc::clone(self.grants.find_or_refuse(op, handle)?);
        let region = self.check(op, &grant, needed, &blocks, now)?;
        let hold = self.hold(op, region, None)?;
        let ranges = Ranges { start: grant.claims().range.start, blocks };
        Ok(Admitted { grant, hold, ranges })
    }

    /// Returns a grant and its region, which the peer may have something done with that needs that right. Nothing holds the region.
    pub fn granted(
        &self,
        op: &'static str,
        handle: u32,
        needed: Access,
        now: Instant,
    ) -> Result<(Arc<G>, Arc<G::Region>)> {
        let grant = self.grants.find_or_refuse(op, handle)?;
        Ok((Arc::clone(grant), self.check(op, grant, needed, &[], now)?))
    }

    fn check(
        &self,
        op: &'static str,
        grant: &G,
        needed: Access,
        blocks: &[Block],
        now: Instant,
    ) -> Result<Arc<G::Region>> {
        let claims = grant.claims();
        if !claims.access.contains(needed) {
            return Err(Error::new(
                Kind::PermissionDenied,
                op,
                format!("the ticket allows {}, and this needs {needed}", claims.access),
            ));
        }
        check_lease("access", claims.expires_ms, || self.clock_ms(now))?;
        let length = claims.range.end - claims.range.start;
        let outside =
            |block: &&Block| block.offset.checked_add(block.len.into()).is_none_or(|end| end > length);
        if let Some(block) = blocks.iter().find(outside) {
            return Err(Error::invalid(
                op,
                format!("{} bytes at offset {} do not lie within {length} bytes", block.len, block.offset),
            ));
        }
        grant.region().upgrade().ok_or_else(|| stale(op))
    }
}
