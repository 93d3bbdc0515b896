//! Views of arrays as layouts: shape and strides in, the fewest and longest blocks out.

use super::{Dim, Layout, MAX_DIMS, OP};
use crate::{Error, Result};

impl Layout {
    /// Describes a view of an array by its shape and strides, as NumPy, torch and DLPack have them (the strides in bytes).
    ///
    /// The blocks are the elements in row-major order, joined wherever they lie back to back, so the blocks one after the
    /// other are the packed bytes of the view. Its base is 0: the first element.
    ///
    /// ```
    /// # use towline_proto as towline;
    /// use towline::layout::{Dim, Layout};
    ///
    /// // array[:, 2:6] of a C-ordered array of 100 x 64 floats: 100 runs of 16 bytes.
    /// let columns = Layout::strided(4, &[100, 4], &[256, 4])?;
    /// assert_eq!((columns.block_len(), columns.dims()), (16, &[Dim { count: 100, stride: 256 }][..]));
    /// assert!(Layout::strided(4, &[100], &[-4]).is_err());
    /// # Ok::<(), towline::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Invalid` when a stride leads backwards, when elements are the same bytes, overlap or interleave, when there are
    /// none, and when the joined view has more than [`MAX_DIMS`] dimensions or reaches beyond 64 bits.
    pub fn strided(item_len: u64, shape: &[u64], strides: &[i64]) -> Result<Layout> {
        if shape.len() != strides.len() {
            let (dims, given) = (shape.len(), strides.len());
            return Err(Error::invalid(OP, format!("{dims} dimensions come with {given} strides")));
        }
        if item_len == 0 || shape.contains(&0) {
            return Err(Error::invalid(OP, "a view without bytes"));
        }
        let mut block_len = item_len;
        // Innermost first, while they are joined.
        let mut dims: Vec<Dim> = Vec::new();
        for (axis, (&count, &stride)) in shape.iter().zip(strides).enumerate().rev() {
            // The stride of a single step leads nowhere.
            if count == 1 {
                continue;
            }
            let stride = match u64::try_from(stride) {
                Err(_) => {
                    let message = format!("the stride of axis {axis} is negative: the view is reversed");
                    return Err(Error::invalid(OP, message));
                }
                Ok(0) => {
                    let message = format!("the stride of axis {axis} is 0: its elements are the same bytes");
                    return Err(Error::invalid(OP, message));
                }
                Ok(stride) => stride,
            };
            let too_far = || Error::invalid(OP, "the view reaches beyond 64 bits");
            match dims.last_mut() {
                None if stride == block_len => {
                    block_len = block_len.checked_mul(count).ok_or_else(too_far)?
                }
                Some(inner) if inner.count.checked_mul(inner.stride) == Some(stride) => {
                    inner.count = inner.count.checked_mul(count).ok_or_else(too_far)?;
                }
                _ => dims.push(Dim { count, stride }),
            }
        }
        if dims.len() > MAX_DIMS {
            let message =
                format!("the view has {} dimensions with gaps, and a layout at most {MAX_DIMS}", dims.len());
            return Err(Error::invalid(OP, message));
        }
        if dims.is_empty() {
            dims.push(Dim { count: 1, stride: block_len });
        }
        dims.reverse();
        let layout = Layout::new(0, block_len, &dims)?;
        layout.check_disjoint()?;
        Ok(layout)
    }

    /// The bytes of all blocks together.
    ///
    /// # Errors
    /// `Invalid` when they do not fit in 64 bits, which blocks that are the same bytes can bring about.
    pub fn packed_len(&self) -> Result<u64> {
        let bytes = self.block_count().checked_mul(self.block_len());
        bytes.ok_or_else(|| Error::invalid(OP, "the bytes of the blocks do not fit in 64 bits"))
    }

    /// Refuses blocks that share bytes. Those that only interleave are refused with them: no slice, transposition or
    /// permutation of an array does that.
    #[doc(hidden)]
    pub fn check_disjoint(&self) -> Result<()> {
        let mut dims = self.dims().to_vec();
        dims.retain(|dim| dim.count > 1);
        dims.sort_unstable_by_key(|dim| dim.stride);
        let mut inside = self.block_len();
        for dim in dims {
            if dim.stride < inside {
                let message = format!("blocks overlap or interleave: {inside} bytes every {}", dim.stride);
                return Err(Error::invalid(OP, message));
            }
            // No overflow: a layout's extent fits, and this is at most that.
            inside += (dim.count - 1) * dim.stride;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use proptest::prelude::*;

    use super::*;
    use crate::Kind;

    fn dims(layout: &Layout) -> Vec<(u64, u64)> {
        layout.dims().iter().map(|dim| (dim.count, dim.stride)).collect()
    }

    #[test]
    fn a_contiguous_view_of_any_rank_is_one_block() {
        for (shape, strides) in
            [(&[][..], &[][..]), (&[6], &[4]), (&[2, 3], &[12, 4]), (&[1, 6, 1], &[-8, 4, 0])]
        {
            let layout = Layout::strided(4, shape, strides).unwrap();
            let bytes = 4 * shape.iter().product::<u64>();
            assert_eq!((layout.block_len(), layout.block_count()), (bytes, 1), "{shape:?}");
        }
    }

    #[test]
    fn neighbouring_dimensions_are_joined() {
        // array[::2] of 8 x 3 x 4 elements of 2 bytes, and a transposed matrix.
        let slice = Layout::strided(2, &[4, 3, 4], &[48, 8, 2]).unwrap();
        assert_eq!((slice.block_len(), dims(&slice)), (24, vec![(4, 48)]));
        let transposed = Layout::strided(2, &[5, 7], &[2, 10]).unwrap();
        assert_eq!((transposed.block_len(), dims(&transposed)), (2, vec![(5, 2), (7, 10)]));
        assert_eq!((transposed.extent(), transposed.packed_len().unwrap()), (70, 70));
        let every_second = Layout::strided(2, &[3, 4], &[16, 4]).unwrap();
        assert_eq!(dims(&every_second), [(12, 4)]);
    }

    #[test]
    fn a_view_that_no_layout_can_say_is_refused_with_the_reason() {
        let far = i64::MAX;
        for (shape, strides, why) in [
            (&[4][..], &[-4][..], "negative"),
            (&[2, 4], &[0, 4], "axis 0 is 0"),
            (&[3, 4], &[8, 4], "overlap"),
            (&[3], &[2], "overlap"),
            (&[2, 3, 2, 3, 2], &[1000, 200, 60, 18, 8], "5 dimensions"),
            (&[0], &[4], "without bytes"),
            (&[2], &[4, 4], "strides"),
            (&[1 << 40, 2], &[far, 8], "64 bits"),
            (&[u64::MAX, 2], &[8, 4], "64 bits"),
        ] {
            let error = Layout::strided(4, shape, strides).unwrap_err();
            assert!(error.kind() == Kind::Invalid && error.message().contains(why), "{why}: {error}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_blocks_are_the_elements_in_row_major_order(
            axes in proptest::collection::vec((1u64..5, 1u64..4), 0..5),
            item in 1u64..5,
            order in any::<u64>(),
        ) {
            // An array with gaps, seen in a permuted order.
            let mut stride = item;
            let mut view: Vec<(u64, i64)> = axes.iter().map(|(count, gap)| {
                let this = stride * gap;
                stride = this * count;
                (*count, this as i64)
            }).collect();
            for at in (1..view.len()).rev() {
                view.swap(at, (order >> (at * 8)) as usize % (at + 1));
            }
            let (shape, strides): (Vec<u64>, Vec<i64>) = view.into_iter().unzip();
            if let Ok(layout) = Layout::strided(item, &shape, &strides) {
                let total = shape.iter().product::<u64>();
                prop_assert_eq!(layout.packed_len().unwrap(), total * item);
                for element in 0..total {
                    let mut rest = element;
                    let mut expected = 0;
                    for axis in (0..shape.len()).rev() {
                        expected += rest % shape[axis] * strides[axis] as u64;
                        rest /= shape[axis];
                    }
                    let (block, within) = (element * item / layout.block_len(), element * item % layout.block_len());
                    prop_assert_eq!(layout.offset(block).unwrap() + within, expected);
                }
            } else {
                prop_assert!(shape.len() > MAX_DIMS);
            }
        }
    }
}
