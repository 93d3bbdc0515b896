//! What a checked request may touch, or why it may not.

use std::sync::Arc;

use super::Grant;
use crate::Error;
use crate::wire::Block;

/// What of a region a request may touch. Only the checks of an [`Owner`](super::Owner) make one.
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
    /// A request for those blocks, once it was [checked](super::Owner::admit) and its region is held.
    pub(super) fn of(grant: Arc<G>, hold: G::Hold, blocks: Vec<Block>) -> Admitted<G> {
        let ranges = Ranges { start: grant.claims().range.start, blocks };
        Admitted { grant, hold, ranges }
    }

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
