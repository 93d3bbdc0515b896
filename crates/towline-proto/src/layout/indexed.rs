//! Blocks by index, kept as they were given: for code that moves them without a list of pieces.

use super::{Indices, Layout};
use crate::{Error, Result};

/// Pairs of blocks: the n-th remote index with the n-th local one.
#[derive(Debug, Clone)]
pub struct Indexed<'a> {
    /// The owner's blocks.
    pub remote: Side<'a>,
    /// The blocks here.
    pub local: Side<'a>,
    count: u64,
}

/// The blocks of one side.
#[derive(Debug, Clone)]
pub struct Side<'a> {
    layout: Layout,
    indices: Indices<'a>,
}

impl<'a> Side<'a> {
    fn new(layout: &Layout, indices: Indices<'a>) -> Side<'a> {
        Side { layout: layout.clone(), indices }
    }

    /// Where block 0 starts.
    #[inline]
    pub fn base(&self) -> u64 {
        self.layout.base()
    }

    /// How far apart blocks start.
    #[inline]
    pub fn step(&self) -> u64 {
        self.layout.dims().last().map_or(0, |dim| dim.stride)
    }

    /// How many there are.
    #[inline]
    pub fn blocks(&self) -> u64 {
        self.layout.block_count()
    }

    /// Which of them.
    #[inline]
    pub fn indices(&self) -> Indices<'a> {
        self.indices
    }
}

impl<'a> Indexed<'a> {
    /// Keeps them where the blocks of each side lie at equal distances; `None` otherwise, and where they do not pair.
    #[inline]
    pub fn new(
        remote: &Layout,
        remote_indices: Indices<'a>,
        local: &Layout,
        local_indices: Indices<'a>,
    ) -> Option<Indexed<'a>> {
        let count = remote_indices.len(remote);
        let pair = count > 0 && count == local_indices.len(local) && remote.block_len() == local.block_len();
        let plain = |layout: &Layout| layout.dims().len() == 1;
        (pair && plain(remote) && plain(local)).then(|| Indexed {
            remote: Side::new(remote, remote_indices),
            local: Side::new(local, local_indices),
            count,
        })
    }

    /// How many pairs there are.
    #[inline]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The bytes of one block.
    #[inline]
    pub fn block_len(&self) -> u64 {
        self.remote.layout.block_len()
    }

    /// The bytes of all of them.
    #[inline]
    pub fn bytes(&self) -> Result<u64> {
        self.count
            .checked_mul(self.block_len())
            .ok_or_else(|| Error::invalid("plan", "the bytes to move do not fit in 64 bits"))
    }

    /// Whether all blocks of both layouts lie inside the regions, whatever the indices are.
    #[inline]
    pub fn fits(&self, remote_len: u64, local_len: u64) -> bool {
        self.remote.layout.fits(remote_len).is_ok() && self.local.layout.fits(local_len).is_ok()
    }
}
