//! Blocks by index.

use crate::{Error, Result};

/// One dimension of a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dim {
    /// How many.
    pub count: u64,
    /// Bytes from one to the next.
    pub stride: u64,
}

/// Names many blocks by index.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Layout {
    base: u64,
    block_len: u64,
    dims: Vec<Dim>,
}

impl Layout {
    /// A layout of 1 to 4 dimensions.
    pub fn new(base: u64, block_len: u64, dims: &[Dim]) -> Result<Layout> {
        if dims.is_empty() || dims.len() > 4 {
            return Err(Error::invalid("layout", "a layout has 1 to 4 dimensions"));
        }
        if block_len == 0 || dims.iter().any(|dim| dim.count == 0) {
            return Err(Error::invalid("layout", "the block length or a count is zero"));
        }
        let mut extent = base.checked_add(block_len);
        for dim in dims {
            extent = extent
                .zip((dim.count - 1).checked_mul(dim.stride))
                .and_then(|(end, step)| end.checked_add(step));
        }
        if extent.is_none() {
            return Err(Error::invalid("layout", "the last block's offset does not fit in 64 bits"));
        }
        Ok(Layout { base, block_len, dims: dims.to_vec() })
    }

    /// One past the last byte that any block reaches.
    pub fn extent(&self) -> u64 {
        self.dims.iter().fold(self.base + self.block_len, |end, dim| end + (dim.count - 1) * dim.stride)
    }

    /// The first byte.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// The length of a block.
    pub fn block_len(&self) -> u64 {
        self.block_len
    }

    /// The dimensions.
    pub fn dims(&self) -> &[Dim] {
        &self.dims
    }
}
