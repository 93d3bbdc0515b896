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
        Ok(Layout { base, block_len, dims: dims.to_vec() })
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
