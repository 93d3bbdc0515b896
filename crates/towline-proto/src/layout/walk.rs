//! The offset of any block by multiplications alone.

use super::Layout;

/// A layout prepared for many look-ups.
///
/// With `s[k]` the number of blocks under one step of dimension `k`, the offset of block `i` is
/// `base + i * stride[last] + Σ (i / s[k]) * (stride[k] - count[k+1] * stride[k+1])`. The terms do not depend on
/// each other, and a dimension that merely continues the one inside it has a factor of zero and drops out, so
/// a packed layout of any rank costs what a one-dimensional one costs.
pub(super) struct Walker {
    base: u64,
    per_block: u64,
    jumps: [Jump; 3],
    jump_count: usize,
    run: u64,
}

/// What is added once for every `every` blocks.
#[derive(Clone, Copy)]
struct Jump {
    every: u64,
    /// `2^64 / every` rounded up, or zero where indices are too large for it to be exact.
    reciprocal: u64,
    /// Two's complement: an outer step may lead backwards from the end of the inner one.
    by: u64,
}

impl Walker {
    pub(super) fn new(layout: &Layout) -> Walker {
        let dims = layout.dims();
        let total = layout.block_count();
        // The product of an index and the rounding error stays below 2^64 while both factors are below 2^32.
        let exact = total <= 1 << 32;
        let mut walker = Walker {
            base: layout.base(),
            per_block: dims[dims.len() - 1].stride,
            jumps: [Jump { every: 1, reciprocal: 0, by: 0 }; 3],
            jump_count: 0,
            run: 1,
        };
        let mut every = 1u64;
        let mut innermost_jump = total;
        for pair in dims.windows(2).rev() {
            let (outer, inner) = (pair[0], pair[1]);
            every *= inner.count;
            let by = outer.stride.wrapping_sub(inner.count.wrapping_mul(inner.stride));
            if every == 1 {
                walker.per_block = walker.per_block.wrapping_add(by);
            } else if by != 0 && every < total {
                let reciprocal = if exact { u64::MAX / every + 1 } else { 0 };
                walker.jumps[walker.jump_count] = Jump { every, reciprocal, by };
                walker.jump_count += 1;
                innermost_jump = innermost_jump.min(every);
            }
        }
        if walker.per_block == layout.block_len() {
            walker.run = innermost_jump;
        }
        walker
    }

    /// The offset of a block that exists.
    #[inline]
    pub(super) fn at(&self, index: u64) -> u64 {
        let mut offset = self.base.wrapping_add(index.wrapping_mul(self.per_block));
        for jump in &self.jumps[..self.jump_count] {
            let times = match jump.reciprocal {
                0 => index / jump.every,
                reciprocal => ((u128::from(index) * u128::from(reciprocal)) >> 64) as u64,
            };
            offset = offset.wrapping_add(times.wrapping_mul(jump.by));
        }
        offset
    }

    /// Blocks that follow each other without a gap from every multiple of this number on.
    pub(super) fn run(&self) -> u64 {
        self.run
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::layout::Dim;

    fn dim(count: u64, stride: u64) -> Dim {
        Dim { count, stride }
    }

    #[test]
    fn a_packed_layout_of_any_rank_is_one_run() {
        let layout = Layout::new(0, 8, &[dim(2, 480), dim(3, 160), dim(4, 40), dim(5, 8)]).unwrap();
        let walker = Walker::new(&layout);
        assert_eq!((walker.jump_count, walker.run()), (0, 120));
    }

    #[test]
    fn dimensions_of_one_step_cost_nothing() {
        let layout = Layout::new(0, 8, &[dim(1, 7), dim(5, 8), dim(1, 9), dim(1, 11)]).unwrap();
        let walker = Walker::new(&layout);
        assert_eq!((walker.jump_count, walker.run()), (0, 5));
        assert_eq!(walker.at(4), 32);
    }

    #[test]
    fn layouts_too_large_for_reciprocals_divide() {
        let layout = Layout::new(3, 1, &[dim(1 << 20, 1), dim(3, 1 << 30), dim(1 << 20, 5)]).unwrap();
        let walker = Walker::new(&layout);
        for index in [0, 1, (1 << 20) - 1, 1 << 20, 3 << 20, layout.block_count() - 1] {
            assert_eq!(walker.at(index), layout.offset(index).unwrap());
        }
    }

    #[test]
    fn reciprocals_are_exact_at_the_edges_of_their_range() {
        for inner in [2u64, 3, 5, 7, 641, 65_535, 65_537, 6_700_417, (1 << 31) - 1, 1 << 31] {
            let layout = Layout::new(0, 1, &[dim((1 << 32) / inner, 1), dim(inner, 2)]).unwrap();
            let walker = Walker::new(&layout);
            let last = layout.block_count() - 1;
            for index in [0, 1, inner - 1, inner, inner + 1, last - inner + 1, last - inner, last] {
                assert_eq!(walker.at(index), layout.offset(index).unwrap(), "{inner} {index}");
            }
        }
    }
}
