//! Blocks by index: a few numbers name every block of a paged cache, a plan says which bytes go where.
//!
//! A [`Layout`] describes blocks of one length in up to four dimensions of count and stride. A [`Plan`]
//! pairs the blocks of two layouts by index, checks every index, joins neighbours, and can say afterwards
//! which blocks each of its pieces carried.
//!
//! ```
//! # use towline_proto as towline;
//! use towline::layout::{Layout, Piece, Plan};
//!
//! // The owner keeps 1024 blocks of 16 KiB back to back; we keep eight, each in a slot of 32 KiB.
//! let remote = Layout::contiguous(1024 * 16384, 16384)?;
//! let local = Layout::blocks(0, 16384, 8, 32768)?;
//!
//! let plan = Plan::blocks(&remote, (&[7u32, 900]).into(), &local, (&[0u32, 1]).into())?;
//! assert_eq!(plan.pieces()[1], Piece { remote: 900 * 16384, local: 32768, len: 16384 });
//! # Ok::<(), towline::Error>(())
//! ```

mod indexed;
mod listed;
mod order;
mod plan;
mod strides;
mod walk;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

#[doc(hidden)]
pub use self::indexed::{Indexed, Side};
pub use self::listed::IndexList;
#[doc(hidden)]
pub use self::listed::{Listed, PairedLayouts};
pub use plan::{Piece, Plan};

/// The operation that errors of this module name until the caller puts its own in its place.
const OP: &str = "layout";

/// The most dimensions a [`Layout`] has.
pub const MAX_DIMS: usize = 4;

/// One dimension of a [`Layout`]: how many steps, and how many bytes one step moves.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dim {
    /// The number of steps; never zero in a layout.
    pub count: u64,
    /// The bytes from one step to the next.
    pub stride: u64,
}

/// Names many blocks of one length by index: base, block length, counts and strides.
///
/// Block `i` is found by taking `i` apart in row-major order (the last dimension is the fastest) and adding
/// `coordinate * stride` for each dimension to the base. Strides are free: blocks may overlap, interleave or,
/// with a stride of zero, be the same bytes. Where blocks that are *written* overlap, which of them stays is
/// not defined.
///
/// A layout is valid from its making on, also when it was deserialized: no count or length is zero, and
/// no reachable offset overflows. Whether it lies inside a region is checked by [`Layout::fits`].
///
/// ```
/// # use towline_proto as towline;
/// use towline::layout::{Dim, Layout};
///
/// // 2 layers, keys and values, 100 blocks of 4 KiB: the way a paged KV cache lies in memory.
/// let cache = Layout::new(
///     0,
///     4096,
///     &[
///         Dim { count: 2, stride: 2 * 100 * 4096 },
///         Dim { count: 2, stride: 100 * 4096 },
///         Dim { count: 100, stride: 4096 },
///     ],
/// )?;
/// assert_eq!(cache.block_count(), 400);
/// assert_eq!(cache.offset(301)?, 301 * 4096);
/// assert!(cache.offset(400).is_err());
/// cache.fits(cache.extent())?;
/// # Ok::<(), towline::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Wire", into = "Wire")]
pub struct Layout {
    base: u64,
    block_len: u64,
    /// Rows past `rank` are all zero, so that the derived equality compares only what was given.
    dims: [Dim; MAX_DIMS],
    rank: usize,
    block_count: u64,
    extent: u64,
}

impl Layout {
    /// Describes blocks that lie back to back and fill `len` bytes.
    ///
    /// # Errors
    /// `Invalid` when either number is zero or `len` is not a multiple of `block_len`.
    pub fn contiguous(len: u64, block_len: u64) -> Result<Layout> {
        if block_len == 0 || !len.is_multiple_of(block_len) {
            return Err(Error::invalid(OP, format!("{len} bytes are not whole blocks of {block_len} bytes")));
        }
        Layout::blocks(0, block_len, len / block_len, block_len)
    }

    /// Describes `count` blocks, the first at `base`, each `stride` bytes after the one before.
    ///
    /// # Errors
    /// `Invalid` as for [`Layout::new`].
    pub fn blocks(base: u64, block_len: u64, count: u64, stride: u64) -> Result<Layout> {
        Layout::new(base, block_len, &[Dim { count, stride }])
    }

    /// Describes blocks in one to four dimensions, `dims[0]` the outermost.
    ///
    /// # Errors
    /// `Invalid` when there are no dimensions or more than [`MAX_DIMS`], when a count or the block length is
    /// zero, or when the number of blocks or a reachable offset does not fit in 64 bits.
    pub fn new(base: u64, block_len: u64, dims: &[Dim]) -> Result<Layout> {
        if dims.is_empty() || dims.len() > MAX_DIMS {
            let given = dims.len();
            return Err(Error::invalid(OP, format!("a layout has 1 to {MAX_DIMS} dimensions, not {given}")));
        }
        if block_len == 0 {
            return Err(Error::invalid(OP, "the block length is zero"));
        }
        let mut rows = [Dim { count: 0, stride: 0 }; MAX_DIMS];
        let mut block_count = 1u64;
        let mut extent = base.checked_add(block_len);
        for (axis, dim) in dims.iter().enumerate() {
            let Some(last) = dim.count.checked_sub(1) else {
                return Err(Error::invalid(OP, format!("the count of dimension {axis} is zero")));
            };
            block_count = block_count
                .checked_mul(dim.count)
                .ok_or_else(|| Error::invalid(OP, "the number of blocks does not fit in 64 bits"))?;
            extent = extent.zip(last.checked_mul(dim.stride)).and_then(|(end, step)| end.checked_add(step));
            rows[axis] = *dim;
        }
        let extent =
            extent.ok_or_else(|| Error::invalid(OP, "the last block's offset does not fit in 64 bits"))?;
        Ok(Layout { base, block_len, dims: rows, rank: dims.len(), block_count, extent })
    }

    /// The offset of block 0.
    #[inline]
    pub fn base(&self) -> u64 {
        self.base
    }

    /// The bytes of one block.
    #[inline]
    pub fn block_len(&self) -> u64 {
        self.block_len
    }

    /// The dimensions as they were given, the outermost first.
    #[inline]
    pub fn dims(&self) -> &[Dim] {
        &self.dims[..self.rank]
    }

    /// The number of blocks: the product of the counts.
    #[inline]
    pub fn block_count(&self) -> u64 {
        self.block_count
    }

    /// One past the last byte that any block reaches.
    #[inline]
    pub fn extent(&self) -> u64 {
        self.extent
    }

    /// The offset of a block's first byte.
    ///
    /// # Errors
    /// `Invalid` when there is no such block.
    #[inline]
    pub fn offset(&self, index: u64) -> Result<u64> {
        if index >= self.block_count {
            let count = self.block_count;
            return Err(Error::invalid(OP, format!("block {index} is past the layout's {count} blocks")));
        }
        let mut rest = index;
        let mut offset = self.base;
        for dim in self.dims().iter().rev() {
            offset += rest % dim.count * dim.stride;
            rest /= dim.count;
        }
        Ok(offset)
    }

    /// Checks that every block lies inside a region of that length.
    ///
    /// # Errors
    /// `Invalid` when the layout reaches further.
    #[inline]
    pub fn fits(&self, region_len: u64) -> Result<()> {
        if self.extent <= region_len {
            return Ok(());
        }
        let extent = self.extent;
        Err(Error::invalid(OP, format!("the layout reaches byte {extent} of a region of {region_len} bytes")))
    }
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layout")
            .field("base", &self.base)
            .field("block_len", &self.block_len)
            .field("dims", &self.dims())
            .finish()
    }
}

/// The serialized form: what was given to [`Layout::new`], so that reading it back checks it again.
#[derive(Serialize, Deserialize)]
#[serde(rename = "Layout", deny_unknown_fields)]
struct Wire {
    base: u64,
    block_len: u64,
    dims: Vec<Dim>,
}

impl TryFrom<Wire> for Layout {
    type Error = Error;

    fn try_from(wire: Wire) -> Result<Layout> {
        Layout::new(wire.base, wire.block_len, &wire.dims)
    }
}

impl From<Layout> for Wire {
    fn from(layout: Layout) -> Wire {
        Wire { base: layout.base, block_len: layout.block_len, dims: layout.dims().to_vec() }
    }
}

/// Which blocks of a [`Layout`], and in which order.
///
/// ```
/// # use towline_proto as towline;
/// use towline::layout::{Indices, Layout};
/// let layout = Layout::contiguous(4096, 512)?;
/// assert_eq!(Indices::from(&[3u32, 1, 1]).len(&layout), 3);
/// assert_eq!(Indices::All.len(&layout), 8);
/// # Ok::<(), towline::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Indices<'a> {
    /// These blocks, in this order; repeats are allowed.
    U32(&'a [u32]),
    /// These blocks, in this order; repeats are allowed.
    U64(&'a [u64]),
    /// Every block of the layout, in order.
    All,
}

impl Indices<'_> {
    /// The number of blocks that are meant when the indices are applied to that layout.
    #[inline]
    pub fn len(&self, layout: &Layout) -> u64 {
        match self {
            Indices::U32(list) => list.len() as u64,
            Indices::U64(list) => list.len() as u64,
            Indices::All => layout.block_count(),
        }
    }
}

impl<'a> From<&'a [u32]> for Indices<'a> {
    fn from(list: &'a [u32]) -> Self {
        Indices::U32(list)
    }
}

impl<'a> From<&'a [u64]> for Indices<'a> {
    fn from(list: &'a [u64]) -> Self {
        Indices::U64(list)
    }
}

impl<'a> From<&'a Vec<u32>> for Indices<'a> {
    fn from(list: &'a Vec<u32>) -> Self {
        Indices::U32(list)
    }
}

impl<'a> From<&'a Vec<u64>> for Indices<'a> {
    fn from(list: &'a Vec<u64>) -> Self {
        Indices::U64(list)
    }
}

impl<'a, const N: usize> From<&'a [u32; N]> for Indices<'a> {
    fn from(list: &'a [u32; N]) -> Self {
        Indices::U32(list)
    }
}

impl<'a, const N: usize> From<&'a [u64; N]> for Indices<'a> {
    fn from(list: &'a [u64; N]) -> Self {
        Indices::U64(list)
    }
}

#[cfg(test)]
mod tests;
