//! One call while it runs: who takes part, what this rank reads and writes, and how data is cut.

use std::borrow::Cow;
use std::ops::Range;

use towline::Kind as ErrorKind;

use super::job::Job;
use crate::combine::Op;
use crate::memory::Memory;
use crate::team::Team;
use crate::{Error, Result};

/// The bytes that one step moves: small enough that scratch memory stays in the second-level cache, large enough that
/// waking the other side does not show. Measured from 16 KiB to 512 KiB with 2 and 4 ranks: half of a ring or all of it.
pub(super) const STEP: usize = 128 << 10;

/// From this many bytes on, results are written around the cache: they would not stay in it until they are read.
const LONG: usize = 16 << 20;

/// A call that every rank has announced.
pub(super) struct Run<'a> {
    pub(super) team: &'a Team,
    pub(super) job: &'a Job<'a>,
    pub(super) rank: usize,
    pub(super) nranks: usize,
    /// Every rank's factor.
    pub(super) scales: Vec<u64>,
    /// Whether all ranks share memory with all others, as all of them know.
    pub(super) near: bool,
}

impl Run<'_> {
    /// The rank so many places to the right.
    pub(super) fn after(&self, places: usize) -> usize {
        (self.rank + places) % self.nranks
    }

    /// The rank so many places to the left.
    pub(super) fn before(&self, places: usize) -> usize {
        (self.rank + self.nranks - places % self.nranks) % self.nranks
    }

    pub(super) fn is_root(&self) -> bool {
        self.rank == self.job.root
    }

    /// Copies out of what this rank sends.
    pub(super) fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        // BYTES MOVE HERE
        self.expect(&self.job.send)?.read_at(offset, into)
    }

    /// Copies into what this rank receives.
    pub(super) fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        // BYTES MOVE HERE
        self.expect(&self.job.recv)?.write_at(offset, from)
    }

    /// Copies into what this rank receives, and past the cache where the whole is longer than caches are.
    pub(super) fn deliver(&self, offset: usize, from: &[u8]) -> Result<()> {
        // BYTES MOVE HERE
        let memory = self.expect(&self.job.recv)?;
        if self.is_long() { memory.stream_at(offset, from) } else { memory.write_at(offset, from) }
    }

    /// Whether what one rank reduces is longer than caches are.
    pub(super) fn is_long(&self) -> bool {
        self.job.elements() * self.job.dtype.size() >= LONG
    }

    /// Whether the elements can be added up where they are, by one pass.
    pub(super) fn sums_in_place(&self) -> bool {
        match self.job.op {
            Op::Sum => towline::can_sum(self.job.dtype),
            Op::Avg => towline::can_average(self.job.dtype),
            _ => false,
        }
    }

    /// Whether the sum is divided by the number of ranks.
    pub(super) fn averages(&self) -> bool {
        self.job.op == Op::Avg
    }

    /// What this rank sends.
    pub(super) fn sent(&self) -> Result<&Memory> {
        self.expect(&self.job.send)
    }

    /// What this rank receives.
    pub(super) fn received(&self) -> Result<&Memory> {
        self.expect(&self.job.recv)
    }

    fn expect<'m>(&self, memory: &'m Option<Cow<'_, Memory>>) -> Result<&'m Memory> {
        memory.as_deref().ok_or_else(|| {
            Error::new(ErrorKind::Internal, self.job.kind.name(), "a rank without memory was asked for bytes")
        })
    }
}

/// The ranges of at most `step` into which `len` falls.
pub(super) fn steps(len: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(step.max(1)).map(move |start| start..len.min(start + step))
}

/// The share of one of `parts` in `len`, cut at multiples of `unit`: shares differ by at most one unit.
pub(super) fn share(len: usize, unit: usize, parts: usize, index: usize) -> Range<usize> {
    let units = len.div_ceil(unit.max(1));
    let at = |index: usize| len.min(units * index / parts * unit);
    at(index)..at(index + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_everything_once_and_are_cut_at_units() {
        for len in [0, 1, 5, 64, 1000] {
            for unit in [1, 4, 64] {
                for parts in 1..9 {
                    let shares: Vec<_> = (0..parts).map(|index| share(len, unit, parts, index)).collect();
                    assert_eq!((shares[0].start, shares[parts - 1].end), (0, len));
                    for pair in shares.windows(2) {
                        assert_eq!(pair[0].end, pair[1].start);
                        assert!(pair[0].end.is_multiple_of(unit) || pair[0].end == len);
                    }
                }
            }
        }
    }

    #[test]
    fn steps_cover_everything_once() {
        assert_eq!(steps(10, 4).collect::<Vec<_>>(), [0..4, 4..8, 8..10]);
        assert_eq!(steps(0, 4).count(), 0);
    }
}
