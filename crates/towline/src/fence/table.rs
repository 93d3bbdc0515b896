//! The registration table: one row per region, written by its owner, mapped read-only by peers.

#![allow(unsafe_code, reason = "declares that a row may be lent from shared memory")]

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::fence::protocol::{self, Machine};
use crate::fence::shared::{self, Lendable, Mapping};
use crate::{Error, Kind, Result};

/// One region as its peers see it; `generation` is 0 while there is no live region.
#[repr(C)]
pub(crate) struct Row {
    generation: AtomicU64,
    addr: AtomicU64,
    len: AtomicU64,
    /// Only the owner reads it: whether the row is taken, so that a row is never given back twice.
    taken: AtomicU32,
    /// How many threads of the owner sleep until a peer changes the region. The owner writes it, so that a peer's
    /// wake costs no system call while it is 0.
    sleepers: AtomicU32,
}

const _: () = assert!(size_of::<Row>() == 32, "rows have a fixed stride in shared memory");

// SAFETY: nothing but atomics.
unsafe impl Lendable for Row {}

impl Row {
    /// The generation of the live region, or 0.
    #[cfg(test)]
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Whether the row shows a live region of that generation.
    #[inline]
    pub(crate) fn shows(&self, generation: u64) -> bool {
        self.generation.load(Ordering::Acquire) == generation
    }

    /// How many threads of the owner sleep until the region changes.
    #[inline]
    pub(crate) fn sleepers(&self) -> &AtomicU32 {
        &self.sleepers
    }

    /// The address in the owner; belongs to the generation only while that is pinned.
    #[inline]
    pub(crate) fn addr(&self) -> u64 {
        self.addr.load(Ordering::Relaxed)
    }

    /// The length in bytes; belongs to the generation only while that is pinned.
    #[inline]
    #[allow(clippy::len_without_is_empty, reason = "the region's length, not a collection's")]
    pub(crate) fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn word(&self) -> &AtomicU64 {
        &self.generation
    }
}

/// A row taken for a region, and the number that no other region of this table ever has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) row: u32,
    pub(crate) generation: u64,
}

/// The owner's side: all rows of one endpoint, in a sealed memory file.
pub(crate) struct Table {
    mapping: Mapping,
    /// What peers get; none once there is no more to come.
    readers: Mutex<Option<Arc<OwnedFd>>>,
    rows: u32,
    supply: Mutex<Supply>,
}

struct Supply {
    /// Rows given back; taken last in, first out, so that few pages are ever touched.
    free: Vec<u32>,
    /// Rows from here on were never used.
    unused: u32,
    last_generation: u64,
}

impl Table {
    /// Makes a table of that many rows. Memory is used only for rows that are.
    pub(crate) fn create(rows: u32) -> Result<Table> {
        Table::sealed_by(rows, shared::seal_for_readers)
    }

    fn sealed_by(rows: u32, seal: fn(OwnedFd, &'static str) -> Result<OwnedFd>) -> Result<Table> {
        if rows == 0 {
            return Err(Error::invalid("open", "a table needs at least one row"));
        }
        let (fd, mapping) = shared::create("towline-table", rows as usize * size_of::<Row>(), "open")?;
        let readers = Mutex::new(Some(Arc::new(seal(fd, "open")?)));
        let supply = Mutex::new(Supply { free: Vec::new(), unused: 0, last_generation: 0 });
        Ok(Table { mapping, readers, rows, supply })
    }

    /// Takes a row for a region and makes it live.
    pub(crate) fn claim(&self, addr: u64, len: u64) -> Result<Claim> {
        let mut supply = self.supply.lock();
        let index = match supply.free.pop() {
            Some(row) => row,
            None if supply.unused < self.rows => {
                supply.unused += 1;
                supply.unused - 1
            }
            None => {
                let message = format!("all {} rows of the registration table are taken", self.rows);
                return Err(Error::new(Kind::Exhausted, "register", message));
            }
        };
        supply.last_generation += 1;
        let generation = supply.last_generation;
        let Some(row) = self.row(index) else {
            let message = "the free list names a row outside the table";
            return Err(Error::new(Kind::Internal, "register", message));
        };
        row.taken.store(1, Ordering::Relaxed);
        row.addr.store(addr, Ordering::Relaxed);
        row.len.store(len, Ordering::Relaxed);
        protocol::publish::<Machine>(&row.generation, generation);
        Ok(Claim { row: index, generation })
    }

    /// Ends the region in that row: from here on no new pin succeeds. Pins that exist are found by a scan.
    pub(crate) fn revoke(&self, row: u32) {
        if let Some(row) = self.row(row) {
            protocol::revoke::<Machine>(&row.generation);
        }
    }

    /// Gives a row back; only after no pin of its generation is left. Revokes it if nobody did.
    pub(crate) fn free(&self, row: u32) {
        let mut supply = self.supply.lock();
        let Some(entry) = self.row(row) else { return };
        if entry.taken.swap(0, Ordering::Relaxed) == 1 {
            protocol::revoke::<Machine>(&entry.generation);
            supply.free.push(row);
        }
    }

    #[cfg(test)]
    /// The generation of the live region in that row, or 0.
    pub(crate) fn generation(&self, row: u32) -> u64 {
        self.row(row).map_or(0, Row::generation)
    }

    #[cfg(test)]
    /// Shows another address there, as a hostile owner may at any time.
    pub(crate) fn move_to(&self, row: u32, addr: u64) {
        if let Some(row) = self.row(row) {
            row.addr.store(addr, Ordering::Relaxed);
        }
    }

    /// The row itself, for an initiator in the owner's own process.
    #[inline]
    pub(crate) fn row(&self, row: u32) -> Option<&Row> {
        self.mapping.lend::<Row>(0, self.rows as usize).get(row as usize)
    }

    /// The descriptor to pass to a peer, nothing that maps it can write; none once it was closed.
    pub(crate) fn fd(&self) -> Option<Arc<OwnedFd>> {
        self.readers.lock().clone()
    }

    /// No peer gets it from here on.
    pub(crate) fn close(&self) {
        *self.readers.lock() = None;
    }

    /// How many rows there are.
    pub(crate) fn rows(&self) -> u32 {
        self.rows
    }
}

/// A peer's side: the same rows, read-only.
pub(crate) struct TableView {
    mapping: Mapping,
    rows: u32,
}

impl TableView {
    /// Maps what the owner sent, after checking seals and size.
    pub(crate) fn map(fd: OwnedFd, rows: u32) -> Result<TableView> {
        if rows == 0 {
            return Err(Error::protocol("connect", "a table has at least one row"));
        }
        let mapping = shared::map_received(&fd, rows as usize * size_of::<Row>(), false, "connect")?;
        Ok(TableView { mapping, rows })
    }

    /// The row with that number, if the table has it.
    #[inline]
    pub(crate) fn row(&self, row: u32) -> Option<&Row> {
        self.mapping.lend::<Row>(0, self.rows as usize).get(row as usize)
    }

    #[cfg(test)]
    /// How many rows there are.
    pub(crate) fn rows(&self) -> u32 {
        self.rows
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use std::os::fd::{AsFd, BorrowedFd};

    use super::*;
    use rustix::mm::{MapFlags, ProtFlags};

    fn writable_mapping_is_refused(fd: BorrowedFd<'_>) -> bool {
        // SAFETY: a fresh mapping, never touched.
        let mapped = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                32,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                0,
            )
        };
        mapped.is_err()
    }

    #[test]
    fn a_generation_is_never_used_twice_and_rows_are() {
        let table = Table::create(2).unwrap();
        let first = table.claim(0x1000, 10).unwrap();
        let second = table.claim(0x2000, 20).unwrap();
        assert_eq!(table.claim(0x3000, 30).unwrap_err().kind(), Kind::Exhausted);
        table.revoke(first.row);
        assert_eq!(table.generation(first.row), 0);
        assert_eq!(table.claim(0x3000, 30).unwrap_err().kind(), Kind::Exhausted, "revoked is not yet free");
        table.free(first.row);
        table.free(first.row);
        let third = table.claim(0x3000, 30).unwrap();
        assert_eq!(third.row, first.row);
        assert!(third.generation > second.generation && second.generation > first.generation);
        assert_eq!(table.claim(1, 1).unwrap_err().kind(), Kind::Exhausted, "freed twice, given once");
        table.revoke(99);
        table.free(99);
        assert_eq!(table.generation(99), 0);
    }

    #[test]
    fn peers_see_the_rows_and_cannot_write_them() {
        let by_seal = Table::create(1000).unwrap();
        // What kernels before 5.1 get.
        let by_descriptor = Table::sealed_by(1000, |fd, op| {
            shared::seal_size(fd.as_fd(), op)?;
            shared::reopen_read_only(&fd, op)
        })
        .unwrap();
        for table in [by_seal, by_descriptor] {
            let view = TableView::map(table.fd().unwrap().try_clone().unwrap(), 1000).unwrap();
            let claim = table.claim(0xabc, 77).unwrap();
            let row = view.row(claim.row).unwrap();
            assert_eq!((row.generation(), row.addr(), row.len()), (claim.generation, 0xabc, 77));
            table.revoke(claim.row);
            assert_eq!(row.generation(), 0);
            assert!(view.row(1000).is_none());
            assert_eq!((view.rows(), table.rows()), (1000, 1000));
            assert!(writable_mapping_is_refused(table.fd().unwrap().as_fd()));
        }
    }

    #[test]
    fn a_file_that_could_shrink_or_is_too_small_is_refused() {
        let (unsealed, _mapping) = shared::create("test", 4096, "test").unwrap();
        assert_eq!(TableView::map(unsealed, 1).err().unwrap().kind(), Kind::Protocol);
        let table = Table::create(4).unwrap();
        let copy = || table.fd().unwrap().try_clone().unwrap();
        assert_eq!(TableView::map(copy(), 5).err().unwrap().kind(), Kind::Protocol);
        assert_eq!(TableView::map(copy(), u32::MAX).err().unwrap().kind(), Kind::Protocol);
        let pipe = rustix::pipe::pipe().unwrap().0;
        assert_eq!(TableView::map(pipe, 1).err().unwrap().kind(), Kind::Protocol);
    }

    #[test]
    fn a_large_table_costs_nothing_until_it_is_used() {
        let table = Table::create(1 << 20).unwrap();
        let used = rustix::fs::fstat(table.fd().unwrap()).unwrap().st_blocks;
        assert_eq!(used, 0);
        table.claim(1, 1).unwrap();
        assert!(rustix::fs::fstat(table.fd().unwrap()).unwrap().st_blocks * 512 <= 64 * 1024);
    }
}
