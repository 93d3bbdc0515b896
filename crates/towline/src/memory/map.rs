//! Mappings that this process owns: made here, unmapped on drop.
#![allow(unsafe_code, reason = "maps and unmaps memory")]

use std::fs;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::mm::{self, Advice, MapFlags, MprotectFlags, ProtFlags};

use crate::{Error, Kind, Result};

/// Whether an allocation is backed by huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum HugePages {
    /// Asks for none: what the system does by itself stays as it is.
    #[default]
    Never,
    /// Asks the kernel for transparent huge pages and does without where it has none.
    Try,
    /// Takes pages from the reserved pool; `Exhausted` when it has too few of them.
    Require,
}

/// One mapping, unmapped on drop.
#[derive(Debug)]
pub(super) struct Map {
    base: *mut u8,
    mapped: usize,
    /// The first usable byte; past `base` where the start had to be aligned.
    start: *mut u8,
}

// SAFETY: a `Map` is an address range of the process; the pointers say where it is and no method reads or
// writes through them, so any thread may hold, ask and drop it.
unsafe impl Send for Map {}
// SAFETY: as above; `&Map` only gives out the numbers.
unsafe impl Sync for Map {}

impl Map {
    /// Maps private zeroed memory of at least `len` bytes; no page is touched.
    pub(super) fn anonymous(len: usize, huge: HugePages) -> Result<Map> {
        match huge {
            HugePages::Never => anonymous(round_up(len, page_size())?, MapFlags::PRIVATE, READ_WRITE)
                .map_err(|error| refused(len, error)),
            HugePages::Try => Map::transparent(len),
            HugePages::Require => {
                let mapped = round_up(len, pool().page_size)?;
                anonymous(mapped, MapFlags::PRIVATE | MapFlags::HUGETLB, READ_WRITE).map_err(|error| {
                    match error {
                        Errno::NOMEM => pool_exhausted(len),
                        Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP => pool_missing(),
                        error => Error::os("allocate", "mmap", error),
                    }
                })
            }
        }
    }

    /// Maps memory whose start is aligned so that the kernel can use huge pages from the first byte on.
    fn transparent(len: usize) -> Result<Map> {
        let mapped = round_up(len, page_size())?;
        let unit = match transparent_size() {
            Some(unit) if unit <= mapped => unit,
            _ => return Map::anonymous(len, HugePages::Never),
        };
        // Inaccessible at first: what only serves the alignment is neither charged nor ever usable.
        let reserved = mapped.checked_add(unit).ok_or_else(|| too_long(len))?;
        let mut map = anonymous(reserved, MapFlags::PRIVATE, ProtFlags::empty())
            .map_err(|error| refused(len, error))?;
        map.start = map.base.wrapping_add(map.base.addr().wrapping_neg() & (unit - 1));
        // SAFETY: `start..start + mapped` lies inside the fresh reservation, because aligning moved the start
        // by less than `unit`; nothing else knows the range yet.
        unsafe { mm::mprotect(map.start.cast(), mapped, MprotectFlags::READ | MprotectFlags::WRITE) }
            .map_err(|error| refused(len, error))?;
        map.advise(mapped, Advice::LinuxHugepage).unwrap_or_else(|error| {
            tracing::debug!(%error, "no transparent huge pages");
        });
        Ok(map)
    }

    /// Maps the first `len` bytes of a file; `unit` is the file's page size. It starts where a huge page can, so that those of the file
    /// are mapped whole.
    pub(super) fn of_file(
        op: &'static str,
        file: BorrowedFd<'_>,
        len: usize,
        unit: usize,
        writable: bool,
    ) -> Result<Map> {
        let mapped = round_up(len, unit)?;
        let protection = if writable { READ_WRITE } else { ProtFlags::READ };
        if let Some(huge) = transparent_size().filter(|huge| unit < *huge && *huge <= mapped)
            && let Some(room) = mapped.checked_add(huge)
            && let Ok(mut room) = anonymous(room, MapFlags::PRIVATE, ProtFlags::empty())
        {
            room.narrow(room.base.addr().wrapping_neg() & (huge - 1), mapped);
            let fixed = MapFlags::SHARED | MapFlags::FIXED;
            // SAFETY: all of `room` is replaced, which is inaccessible and which nothing else knows.
            unsafe { mm::mmap(room.base.cast(), mapped, protection, fixed, file, 0) }
                .map_err(|error| Error::os(op, "mmap", error))?;
            return Ok(room);
        }
        // SAFETY: the kernel picks the address, so no existing mapping is touched.
        let base = unsafe { mm::mmap(ptr::null_mut(), mapped, protection, MapFlags::SHARED, file, 0) }
            .map_err(|error| Error::os(op, "mmap", error))?;
        Ok(Map::owning(base, mapped))
    }

    /// Gives back all but `len` bytes from `skipped` on, of a mapping that nobody uses yet.
    fn narrow(&mut self, skipped: usize, len: usize) {
        debug_assert!(skipped + len <= self.mapped);
        let end = self.base.wrapping_add(skipped + len);
        for (from, rest) in [(self.base, skipped), (end, self.mapped - skipped - len)] {
            if rest == 0 {
                continue;
            }
            // SAFETY: the range is a part of this mapping outside of what stays, and nobody uses it.
            if let Err(error) = unsafe { mm::munmap(from.cast(), rest) } {
                tracing::debug!(%error, "the room beside a mapping stays taken");
            }
        }
        (self.base, self.mapped) = (self.base.wrapping_add(skipped), len);
        self.start = self.base;
    }

    /// Takes it out of its place, in which nothing is mapped any more.
    pub(super) fn take(&mut self) -> Map {
        let nothing = Map { base: ptr::null_mut(), mapped: 0, start: ptr::null_mut() };
        std::mem::replace(self, nothing)
    }

    fn owning(base: *mut std::ffi::c_void, mapped: usize) -> Map {
        let base = base.cast::<u8>();
        // Storages name their memory by number from here on.
        base.expose_provenance();
        Map { base, mapped, start: base }
    }

    /// Advises the kernel about the first `len` bytes.
    pub(super) fn advise(&self, len: usize, advice: Advice) -> Result<(), Errno> {
        self.advise_part(0, len, advice)
    }

    /// Advises the kernel about `len` bytes from `offset` on; only advice that keeps the contents.
    pub(super) fn advise_part(&self, offset: usize, len: usize, advice: Advice) -> Result<(), Errno> {
        debug_assert!(matches!(advice, Advice::LinuxHugepage | Advice::LinuxPopulateWrite));
        // SAFETY: the callers stay inside this mapping, and both kinds of advice leave its contents alone.
        unsafe { mm::madvise(self.start.wrapping_add(offset).cast(), len, advice) }
    }

    /// Has the kernel put huge pages in the place of the `len` bytes from `offset` on, of which every one that is to become huge has
    /// a page already. The contents stay.
    pub(super) fn collapse(&self, offset: usize, len: usize) -> Result<(), Errno> {
        // SAFETY: the callers stay inside this mapping, and the advice leaves its contents alone.
        match unsafe { libc::madvise(self.start.wrapping_add(offset).cast(), len, libc::MADV_COLLAPSE) } {
            0 => Ok(()),
            _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)),
        }
    }

    /// The first usable byte.
    pub(super) fn ptr(&self) -> *mut u8 {
        self.start
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        if self.mapped == 0 {
            return;
        }
        // SAFETY: the range was mapped by this value, is unmapped nowhere else, and the users of the pointer
        // kept the value alive meanwhile (`Storage`, promises 1 and 2).
        if let Err(error) = unsafe { mm::munmap(self.base.cast(), self.mapped) } {
            tracing::error!(%error, len = self.mapped, "a mapping could not be removed");
        }
    }
}

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

fn anonymous(mapped: usize, flags: MapFlags, protection: ProtFlags) -> Result<Map, Errno> {
    // SAFETY: the kernel picks the address, so no existing mapping is touched.
    let base = unsafe { mm::mmap_anonymous(ptr::null_mut(), mapped, protection, flags) }?;
    Ok(Map::owning(base, mapped))
}

fn refused(len: usize, error: Errno) -> Error {
    match error {
        Errno::NOMEM => Error::new(
            Kind::Exhausted,
            "allocate",
            format!("the system has no room for {len} bytes (memory, address space limit or mapping count)"),
        )
        .caused_by(std::io::Error::from(error)),
        error => Error::os("allocate", "mmap", error),
    }
}

/// The size of a page.
pub(super) fn page_size() -> usize {
    rustix::param::page_size()
}

/// The length rounded up to whole pages of `unit` bytes, which is a power of two.
pub(super) fn round_up(len: usize, unit: usize) -> Result<usize> {
    len.checked_add(unit - 1)
        .map(|end| end & !(unit - 1))
        .filter(|rounded| *rounded <= isize::MAX as usize)
        .ok_or_else(|| too_long(len))
}

fn too_long(len: usize) -> Error {
    Error::invalid("allocate", format!("{len} bytes are more than the address space holds"))
}

/// Refuses the length 0, which no storage has.
pub(super) fn not_empty(len: usize) -> Result<()> {
    if len == 0 { Err(Error::invalid("allocate", "a storage needs at least one byte")) } else { Ok(()) }
}

/// The size of a transparent huge page, where the kernel has them.
pub(super) fn transparent_size() -> Option<usize> {
    static SIZE: OnceLock<Option<usize>> = OnceLock::new();
    *SIZE.get_or_init(|| {
        let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").ok()?;
        text.trim().parse().ok().filter(|size: &usize| size.is_power_of_two())
    })
}

/// What the system says about its pool of reserved huge pages.
struct Pool {
    page_size: usize,
    total: u64,
    free: u64,
}

fn pool() -> Pool {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name| super::limit::field(&text, name);
    let page_size = field("Hugepagesize:").map_or(0, |kib| kib << 10) as usize;
    Pool {
        page_size: if page_size.is_power_of_two() { page_size } else { 2 << 20 },
        total: field("HugePages_Total:").unwrap_or(0),
        free: field("HugePages_Free:").unwrap_or(0),
    }
}

/// The pool of huge pages is too small for `len` bytes.
pub(super) fn pool_exhausted(len: usize) -> Error {
    let pool = pool();
    let needed = len.div_ceil(pool.page_size);
    Error::new(
        Kind::Exhausted,
        "allocate",
        format!(
            "{len} bytes need {needed} huge pages of {} KiB, and the pool has {} free of {}: raise \
             vm.nr_hugepages, or use HugePages::Try",
            pool.page_size >> 10,
            pool.free,
            pool.total
        ),
    )
}

/// The kernel has no pool of huge pages at all.
pub(super) fn pool_missing() -> Error {
    Error::new(
        Kind::Unavailable,
        "allocate",
        "this kernel has no reserved huge pages (hugetlbfs); use HugePages::Try or Never",
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use std::os::fd::AsFd;

    use super::*;
    use crate::skip::skip;

    #[test]
    fn lengths_round_up_and_never_wrap() {
        assert_eq!(round_up(1, 4096).unwrap(), 4096);
        assert_eq!(round_up(4096, 4096).unwrap(), 4096);
        assert_eq!(round_up(usize::MAX, 4096).unwrap_err().kind(), Kind::Invalid);
        assert_eq!(round_up(isize::MAX as usize, 4096).unwrap_err().kind(), Kind::Invalid);
    }

    #[test]
    fn transparent_huge_pages_start_aligned() {
        let Some(unit) = transparent_size() else {
            let test = "transparent_huge_pages_start_aligned";
            return skip(test, "huge-pages", "the kernel has no transparent huge pages");
        };
        let map = Map::anonymous(unit + 1, HugePages::Try).unwrap();
        assert_eq!(map.ptr().addr() % unit, 0);
        let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let map = Map::of_file("test", file.as_fd(), unit + 1, page_size(), true).unwrap();
        assert_eq!((map.ptr().addr() % unit, map.base, map.mapped), (0, map.ptr(), unit + page_size()));
    }
}
