//! A file of this process: the workers read and write it.
#![allow(unsafe_code, reason = "implements the seam over raw local addresses")]

use std::sync::Arc;

use super::InProc;
use crate::Result;
use crate::identity::Identity;
use crate::layout::Piece;
use crate::memory::{FileSlice, Place};
use crate::notify::Notification;
use crate::region::{RegionCore, no_words, stale};
use crate::runtime::Device;
use crate::transfer::{Op, Signal};
use crate::transport::Transport;
use crate::transport::direct::Direct;
use crate::wire::AtomicOp;

pub(super) struct LocalFile {
    pub(super) region: Arc<RegionCore>,
    pub(super) file: FileSlice,
    pub(super) offset: u64,
    pub(super) from: Identity,
}

impl Direct for LocalFile {
    fn transport(&self) -> &'static dyn Transport {
        &InProc
    }

    fn blocks(&self) -> bool {
        true
    }

    fn device(&self) -> Option<Device> {
        Some(self.file.device())
    }

    unsafe fn copy(&self, op: Op, local: *mut u8, pieces: &[Piece]) -> Result<()> {
        let _use = self.region.begin_use(op.name())?;
        // SAFETY: the caller keeps the local range, and checked it.
        unsafe { move_file_pieces(op, &self.file, self.offset, local, pieces)? };
        if self.region.is_closed() { Err(stale(op.name())) } else { Ok(()) }
    }

    fn atomic(&self, _offset: u64, _op: AtomicOp) -> Result<u64> {
        Err(no_words("atomic", Place::Disk))
    }

    fn signal(&self, _signal: Signal) -> Result<()> {
        Err(no_words("signal", Place::Disk))
    }

    fn notify(&self, message: &[u8]) -> Result<()> {
        let notification = Notification { from: self.from.clone(), message: message.to_vec() };
        self.region.registry.deliver(notification, None)
    }

    fn alive(&self) -> Result<()> {
        super::owner_is_open(&self.region)
    }
}

/// Moves the pieces between local memory and a file, in which the grant starts at `offset`.
///
/// # Safety
/// The local range of every piece is memory that stays during the call.
pub(crate) unsafe fn move_file_pieces(
    op: Op,
    file: &FileSlice,
    offset: u64,
    local: *mut u8,
    pieces: &[Piece],
) -> Result<()> {
    for piece in pieces {
        let (near, len) = (local.wrapping_add(piece.local as usize), piece.len as usize);
        let far = offset + piece.remote;
        // SAFETY: the caller's obligation.
        unsafe {
            match op {
                Op::Read => file.read(op.name(), far, near, len)?,
                Op::Write => file.write(op.name(), far, near, len)?,
                Op::Reduce(..) | Op::Atomic { .. } => return Err(no_words(op.name(), Place::Disk)),
            }
        }
    }
    Ok(())
}
