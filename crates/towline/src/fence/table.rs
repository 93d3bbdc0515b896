//! The registration table: one row per region, written by its owner, mapped read-only by peers.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use crate::Result;

/// One region as its peers see it; `generation` is 0 while there is no live region.
#[repr(C)]
pub(crate) struct Row {
    generation: AtomicU64,
    addr: AtomicU64,
    len: AtomicU64,
    reserved: AtomicU64,
}

impl Row {
    /// The generation of the live region, or 0.
    pub(crate) fn generation(&self) -> u64 {
        unimplemented!()
    }

    /// The address in the owner; stable while the row is pinned.
    pub(crate) fn addr(&self) -> u64 {
        unimplemented!()
    }

    /// The length in bytes; stable while the row is pinned.
    pub(crate) fn len(&self) -> u64 {
        unimplemented!()
    }
}

/// A row taken for a region, and the number that no other region of this table ever has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) row: u32,
    pub(crate) generation: u64,
}

/// The owner's side: all rows of one endpoint, in a sealed memfd.
pub(crate) struct Table {}

impl Table {
    pub(crate) fn create(rows: u32) -> Result<Table> {
        unimplemented!("{rows}")
    }

    pub(crate) fn claim(&self, addr: u64, len: u64) -> Result<Claim> {
        unimplemented!("{addr}{len}")
    }

    /// Ends the region in that row: from here on no new pin succeeds. Existing pins are found by a scan.
    pub(crate) fn revoke(&self, row: u32) {
        unimplemented!("{row}")
    }

    /// Gives a revoked row back. Only after no pin of its generation is left.
    pub(crate) fn free(&self, row: u32) {
        unimplemented!("{row}")
    }

    pub(crate) fn generation(&self, row: u32) -> u64 {
        unimplemented!("{row}")
    }

    /// The row itself, for an initiator in the owner's own process.
    pub(crate) fn row(&self, row: u32) -> Option<&Row> {
        unimplemented!("{row}")
    }

    /// The descriptor to pass to a peer: nothing that maps it can write.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        unimplemented!()
    }

    pub(crate) fn rows(&self) -> u32 {
        unimplemented!()
    }
}

/// A peer's side: the same rows, read-only.
pub(crate) struct TableView {}

impl TableView {
    pub(crate) fn map(fd: OwnedFd, rows: u32) -> Result<TableView> {
        unimplemented!("{fd:?}{rows}")
    }

    pub(crate) fn row(&self, row: u32) -> Option<&Row> {
        unimplemented!("{row}")
    }

    pub(crate) fn rows(&self) -> u32 {
        unimplemented!()
    }
}
