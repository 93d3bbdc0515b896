//! Blocks of one length, by index: the form in which a paged cache is copied fastest, since its lists go as they are.
#![allow(unsafe_code, reason = "hands addresses to the driver")]

use std::sync::Arc;

use super::copy::{CopyOptions, Copying, OP};
use super::lane::Tuning;
use super::{Gpu, list};
use crate::{Error, Indices, Result};

/// Blocks on one side of a copy: block `i` starts `step * i` bytes after `base`.
#[derive(Debug, Clone, Copy)]
pub struct Blocks<'a> {
    /// Where block 0 starts.
    pub base: u64,
    /// How far apart blocks start.
    pub step: u64,
    /// How many there are; an index is below this.
    pub count: u64,
    /// Which of them, in order.
    pub indices: Indices<'a>,
}

impl Blocks<'_> {
    fn len(&self) -> usize {
        match self.indices {
            Indices::All => usize::try_from(self.count).unwrap_or(usize::MAX),
            Indices::U32(list) => list.len(),
            Indices::U64(list) => list.len(),
        }
    }

    /// Fails where an index is past the blocks.
    fn check(&self) -> Result<()> {
        let fits = |index: u64| index < self.count && u32::try_from(index).is_ok();
        let worst = match self.indices {
            Indices::All => return Ok(()),
            Indices::U32([]) | Indices::U64([]) => return Ok(()),
            Indices::U32(list) => u64::from(list::largest(list)),
            Indices::U64(list) => list.iter().fold(0, |largest, index| largest.max(*index)),
        };
        if fits(worst) {
            return Ok(());
        }
        Err(Error::invalid(OP, format!("block {worst} is past the {} that there are", self.count)))
    }
}

/// Writes the indices from `start` on; false where they need no writing, since they are 0, 1, 2 and so on.
pub(super) fn write_indices(indices: Indices<'_>, start: usize, into: &mut [u32]) -> bool {
    match indices {
        Indices::All => return false,
        Indices::U32(list) => into.copy_from_slice(&list[start..start + into.len()]),
        Indices::U64(list) => {
            for (entry, index) in into.iter_mut().zip(&list[start..]) {
                *entry = *index as u32;
            }
        }
    }
    true
}

impl Gpu {
    /// Starts copying blocks of `len` bytes: the first of one side to the first of the other, and so on. All indices are
    /// checked before the first byte moves.
    ///
    /// # Errors
    /// `Invalid` where the sides name different numbers of blocks, or an index is past its blocks; what the driver says.
    ///
    /// # Safety
    /// As for [`Gpu::copy`]: all blocks of both sides, `len` bytes each, are valid until the copy is done.
    pub unsafe fn copy_blocks(
        self: &Arc<Self>,
        from: &Blocks<'_>,
        to: &Blocks<'_>,
        len: u64,
        options: &CopyOptions,
    ) -> Result<Copying> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.copy_blocks_tuned(from, to, len, options, &Tuning::default()) }
    }

    /// [`Gpu::copy_blocks`], with other settings for its launches.
    ///
    /// # Safety
    /// As for [`Gpu::copy_blocks`].
    #[doc(hidden)]
    pub unsafe fn copy_blocks_tuned(
        self: &Arc<Self>,
        from: &Blocks<'_>,
        to: &Blocks<'_>,
        len: u64,
        options: &CopyOptions,
        tuning: &Tuning,
    ) -> Result<Copying> {
        let (count, others) = (from.len(), to.len());
        if count != others {
            return Err(Error::invalid(OP, format!("{count} blocks cannot pair with {others}")));
        }
        from.check()?;
        to.check()?;
        // What is beside would not wait for a stream.
        let tuning = Tuning { beside: tuning.beside && options.after.is_none(), ..*tuning };
        self.start(options, |lane, entered, kernel| {
            let kernel = kernel()?;
            // SAFETY: the indices are in bounds, the rest is the caller's promise.
            unsafe {
                lane.by_index(
                    OP,
                    entered,
                    &kernel,
                    [from, to],
                    if len == 0 { 0 } else { count },
                    len,
                    &tuning,
                )
            }
        })
    }
}
