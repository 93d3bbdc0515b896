//! Sealed memory files: the owner's side ([`Segment`]) and a peer's ([`Mapping`]).
#![allow(unsafe_code, reason = "says how long a mapping lives to who pins it")]

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::Advice;
use rustix::process::Resource;

use super::limit;
use super::map::{self, HugePages, Map};
use super::pinning::Pinning;
use crate::cuda::Gpu;
use crate::fork;
use crate::runtime;
use crate::{Error, Kind, Result};

/// A sealed memory file with the owner's mapping of it; peers that are handed the file map the same pages.
///
/// Its space is reserved when it is made and its length is sealed, so that no access to a mapping of it can
/// fault later on, on either side.
#[derive(Debug)]
pub struct Segment {
    id: u64,
    len: usize,
    file: OwnedFd,
    /// Before the mapping: it is unpinned before it can be unmapped.
    pinning: Pinning,
    map: Map,
    lent: Mutex<Vec<Weak<dyn Holder>>>,
}

/// A session whose peer may have mapped a segment.
pub(crate) trait Holder: Send + Sync {
    /// The segment is gone. Called from wherever the last use of it ended: must neither block nor take long.
    fn segment_gone(self: Arc<Self>, segment: u64);
}

/// Says where in a segment a storage starts.
#[derive(Debug, Clone)]
pub struct SegmentSlice {
    /// The segment that holds the bytes.
    pub segment: Arc<Segment>,
    /// How far from its start the bytes begin.
    pub offset: usize,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl Segment {
    /// Makes a segment of at least `len` bytes.
    pub(super) fn create(len: usize, huge: HugePages) -> Result<Arc<Segment>> {
        Segment::create_touched(len, huge, |map, size| {
            if huge == HugePages::Try {
                populate(map, size);
            }
        })
    }

    /// The same, where `touch` may take pages before all that are missing are taken by this thread.
    pub(super) fn create_touched(
        len: usize,
        huge: HugePages,
        touch: impl FnOnce(&Map, usize),
    ) -> Result<Arc<Segment>> {
        map::not_empty(len)?;
        let file = memory_file(huge)?;
        let unit = page_size_of(&file)?;
        let size = map::round_up(len, unit)?;
        if huge != HugePages::Require {
            limit::has_room_for(size)?;
        }
        within_file_size_limit(size)?;
        let full = |error| no_space(len, huge, error);
        rustix::fs::ftruncate(&file, size as u64).map_err(full)?;
        let map = Map::of_file("allocate", file.as_fd(), size, unit, true).map_err(|error| {
            if huge == HugePages::Require && error.kind() == Kind::Exhausted {
                map::pool_exhausted(len)
            } else {
                error
            }
        })?;
        touch(&map, size);
        reserve(&file, size, unit).map_err(full)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|error| Error::os("allocate", "fcntl(F_ADD_SEALS)", error))?;
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(Segment {
            id,
            len: size,
            file,
            pinning: Pinning::default(),
            map,
            lent: Mutex::default(),
        }))
    }

    /// The number of the segment, used once in the life of the process.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The length in bytes: what was asked for, rounded up to whole pages.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no byte in it, which never happens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The file, to be handed to peers.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The first byte of the owner's mapping.
    pub fn ptr(&self) -> *mut u8 {
        self.map.ptr()
    }

    /// The address of its first byte for that GPU, where it is pinned or `bytes` more make that worth it.
    ///
    /// The user of the address keeps the segment for as long.
    pub(crate) fn on_gpu(&self, gpu: &Arc<Gpu>, bytes: u64) -> Option<u64> {
        // SAFETY: the mapping lives as long as the segment, whose users keep it.
        unsafe { self.pinning.address(gpu, self.ptr(), self.len, true, bytes) }
    }

    /// Remembers whom to notify when it is gone.
    pub(crate) fn lent_to(&self, holder: Weak<dyn Holder>) {
        let mut lent = self.lent.lock();
        if !lent.iter().any(|one| one.ptr_eq(&holder)) {
            lent.retain(|one| one.strong_count() > 0);
            lent.push(holder);
        }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if fork::in_child() {
            return;
        }
        for holder in self.lent.lock().drain(..).filter_map(|holder| holder.upgrade()) {
            holder.segment_gone(self.id);
        }
        unmap(&mut self.pinning, &mut self.map);
    }
}

/// Unpins and unmaps, which may take long.
fn unmap(pinning: &mut Pinning, map: &mut Map) {
    let (pinning, map) = (std::mem::take(pinning), map.take());
    runtime::where_it_may_wait(move || {
        // In this order.
        drop(pinning);
        drop(map);
    });
}

/// Opens an empty memory file that can be sealed and never executed.
fn memory_file(huge: HugePages) -> Result<OwnedFd> {
    let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    if huge == HugePages::Require {
        flags |= MemfdFlags::HUGETLB;
    }
    let opened = match rustix::fs::memfd_create("towline", flags | MemfdFlags::NOEXEC_SEAL) {
        // Kernels before 6.3 do not know the flag.
        Err(Errno::INVAL) => rustix::fs::memfd_create("towline", flags),
        opened => opened,
    };
    opened.map_err(|error| match error {
        Errno::INVAL | Errno::NODEV | Errno::NOENT | Errno::NOSYS | Errno::OPNOTSUPP
            if huge == HugePages::Require =>
        {
            map::pool_missing()
        }
        error => Error::os("allocate", "memfd_create", error),
    })
}

fn page_size_of(file: &OwnedFd) -> Result<usize> {
    let stat = rustix::fs::fstat(file).map_err(|error| Error::os("map", "fstat", error))?;
    let unit = usize::try_from(stat.st_blksize).unwrap_or(0);
    Ok(if unit.is_power_of_two() { unit.max(map::page_size()) } else { map::page_size() })
}

/// Fails where the length is past `RLIMIT_FSIZE`: the kernel would end the process by a signal.
fn within_file_size_limit(size: usize) -> Result<()> {
    match rustix::process::getrlimit(Resource::Fsize).current {
        Some(limit) if limit < size as u64 => Err(Error::new(
            Kind::Exhausted,
            "allocate",
            format!("{size} bytes are past the process's file size limit of {limit} (RLIMIT_FSIZE)"),
        )),
        _ => Ok(()),
    }
}

/// The bytes whose pages are asked for in one step: a signal does not undo what earlier steps have taken.
const STEP: usize = 64 << 20;

/// Takes huge pages where the kernel gives them: by its policy for shared memory through an advised mapping, and else by asking for
/// each of them, which that policy leaves to the program unless it says `deny`.
///
/// Best effort: `reserve` afterwards takes every page that is still missing, and says so if it cannot.
fn populate(map: &Map, size: usize) {
    let policy = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
    let taken = if policy.contains("[advise]") {
        map.advise(size, Advice::LinuxHugepage).and_then(|()| {
            steps(size).try_for_each(|(at, len)| map.advise_part(at, len, Advice::LinuxPopulateWrite))
        })
    } else if policy.contains("[never]") {
        let whole = map::transparent_size().map_or(0, |unit| size - size % unit);
        steps(whole).try_for_each(|(at, len)| collapse(map, at, len))
    } else {
        return;
    };
    if let Err(error) = taken {
        tracing::debug!(%error, "pages of a segment are not huge");
    }
}

fn steps(size: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..size).step_by(STEP).map(move |at| (at, STEP.min(size - at)))
}

/// Takes huge pages for a part of a fresh file.
fn collapse(map: &Map, at: usize, len: usize) -> Result<(), Errno> {
    // The kernel wants one page of each to be there. The others come with the huge one, zeroed: that costs a tenth of taking them one by one.
    for first in (at..at + len).step_by(map::transparent_size().unwrap_or(len)) {
        map.advise_part(first, map::page_size(), Advice::LinuxPopulateWrite)?;
    }
    map.collapse(at, len)
}

/// Takes all pages of the file now, so that none can be missing later.
fn reserve(file: &OwnedFd, size: usize, unit: usize) -> Result<(), Errno> {
    // A signal undoes the whole call, so a large reservation under a profiler's timer would never end: small
    // steps, and smaller ones after each interruption, always get on.
    let mut step = unit.max(4 << 20);
    let mut offset = 0;
    while offset < size {
        let len = step.min(size - offset);
        match rustix::fs::fallocate(file, FallocateFlags::empty(), offset as u64, len as u64) {
            Ok(()) => offset += len,
            Err(Errno::INTR) => step = (step / 2).max(unit),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn no_space(len: usize, huge: HugePages, error: Errno) -> Error {
    match error {
        Errno::NOSPC | Errno::NOMEM if huge == HugePages::Require => map::pool_exhausted(len),
        Errno::NOSPC | Errno::NOMEM | Errno::FBIG => Error::new(
            Kind::Exhausted,
            "allocate",
            format!("the system has no memory for {len} bytes of shared memory"),
        )
        .caused_by(std::io::Error::from(error)),
        error => Error::os("allocate", "fallocate", error),
    }
}

/// A peer's segment, mapped here; unmapped on drop.
///
/// The peer's bytes: nothing but raw pointers, and no reliance on what they contain.
#[derive(Debug)]
pub struct Mapping {
    /// Before the mapping: it is unpinned before it can be unmapped.
    pinning: Pinning,
    map: Map,
    len: usize,
    writable: bool,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        unmap(&mut self.pinning, &mut self.map);
    }
}

impl Mapping {
    /// Maps the first `expected_len` bytes of a memory file that a peer handed over.
    ///
    /// The file is checked first: unless its length is sealed against shrinking, the peer could later take the
    /// pages away and have the kernel end this process. The descriptor is closed in any case.
    ///
    /// What is left to trust: a peer can still punch holes into its own file. In ordinary memory a hole reads
    /// as zeros; in reserved huge pages it faults when the pool is empty.
    ///
    /// # Errors
    /// `Invalid` for length 0; `Protocol` if the file is not a sealed memory file or is too short;
    /// `PermissionDenied` where it does not allow writing; `Exhausted` without address space.
    pub fn map(fd: OwnedFd, expected_len: usize, writable: bool) -> Result<Mapping> {
        if expected_len == 0 {
            return Err(Error::invalid("map", "a mapping needs at least one byte"));
        }
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|error| match error {
            Errno::INVAL => Error::protocol("map", "the peer's file is not a memory file that can be sealed"),
            error => Error::os("map", "fcntl(F_GET_SEALS)", error),
        })?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(Error::protocol("map", "the peer's memory file can still shrink: it is not sealed"));
        }
        let stat = rustix::fs::fstat(&fd).map_err(|error| Error::os("map", "fstat", error))?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if size < expected_len as u64 {
            return Err(Error::protocol(
                "map",
                format!("the peer's memory file has {size} bytes where {expected_len} were announced"),
            ));
        }
        let unit = page_size_of(&fd)?;
        let map = Map::of_file("map", fd.as_fd(), expected_len, unit, writable)?;
        Ok(Mapping { pinning: Pinning::default(), map, len: expected_len, writable })
    }

    /// The first byte.
    pub fn ptr(&self) -> *mut u8 {
        self.map.ptr()
    }

    /// The number of bytes that may be touched.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no byte in it, which never happens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of its first byte for that GPU, where it is pinned or `bytes` more make that worth it.
    ///
    /// The user of the address keeps the mapping for as long.
    pub(crate) fn on_gpu(&self, gpu: &Arc<Gpu>, bytes: u64) -> Option<u64> {
        // SAFETY: the mapping lives as long as the value, whose users keep it.
        unsafe { self.pinning.address(gpu, self.ptr(), self.len, self.writable, bytes) }
    }

    /// Whether the bytes may be written.
    pub fn is_writable(&self) -> bool {
        self.writable
    }
}
