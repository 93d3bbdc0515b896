//! Bare copies of memory: the limits that `towline bench` measures the library against.
//!
//! A [`RawCopy`] is checked once, when it is made; [`RawCopy::run`] then does nothing but the copies, in the order
//! in which they were given. Nothing here goes through the library's data path.
#![allow(unsafe_code, reason = "copies by address, and process_vm_readv has no safe form")]

pub(crate) mod nccl;
pub(crate) mod sleeper;
mod sum;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use towline::memory::{Mapping, Place, Storage};

pub(crate) use self::sum::RawSum;

/// The kernel takes this many ranges in one call.
const IOV_MAX: usize = 1024;

/// The kernel moves less than 2 GiB in one call; longer pieces are cut.
const LONGEST: u64 = 1 << 30;

/// Memory of this process, kept alive by the code that copies from or into it.
#[derive(Clone)]
pub(crate) enum Memory {
    /// A storage.
    Storage(Arc<dyn Storage>),
    /// A peer's memory file, mapped here.
    Mapping(Arc<Mapping>),
}

impl Memory {
    fn range(&self) -> io::Result<(usize, u64)> {
        match self {
            Memory::Storage(storage) if storage.place() == Place::Host => {
                Ok((storage.addr(), storage.size() as u64))
            }
            Memory::Storage(_) => Err(invalid("the CPU cannot reach the storage")),
            Memory::Mapping(mapping) => Ok((mapping.ptr().addr(), mapping.len() as u64)),
        }
    }

    fn is_writable(&self) -> bool {
        match self {
            Memory::Storage(_) => true,
            Memory::Mapping(mapping) => mapping.is_writable(),
        }
    }

    /// Reads one byte of every page, so that no page fault is left for the measurement.
    pub(crate) fn touch(&self) -> io::Result<()> {
        let (addr, len) = self.range()?;
        for offset in (0..len as usize).step_by(4096) {
            // SAFETY: the byte lies in memory that `self` keeps mapped; a volatile read of bytes that others may
            // write makes no promise about their value.
            unsafe { std::ptr::with_exposed_provenance::<u8>(addr + offset).read_volatile() };
        }
        Ok(())
    }
}

/// The other side of a copy.
#[derive(Clone)]
pub(crate) enum RemoteMemory {
    /// Memory that is mapped here.
    Memory(Memory),
    /// Memory of another process, reached by `process_vm_readv` and `process_vm_writev`.
    Process {
        /// The process.
        pid: i32,
        /// Where the memory starts there.
        addr: u64,
        /// How long it is.
        len: u64,
    },
}

/// Which way the bytes go, seen from this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the far side to the near one.
    Read,
    /// From the near side to the far one.
    Write,
}

/// How a copy is divided among threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Into that many parts with equally many bytes.
    Even(usize),
    /// Into parts of about that many bytes.
    Portions(u64),
}

/// A copy of many pieces, ready to be run again and again.
pub(crate) struct RawCopy {
    direction: Direction,
    pid: Option<i32>,
    near: Vec<libc::iovec>,
    far: Vec<libc::iovec>,
    parts: Vec<std::ops::Range<usize>>,
    _kept: (Memory, Option<Memory>),
}

// SAFETY: the addresses in `near` and `far` belong to memory that `_kept` keeps mapped (or to another process), that
// any thread may touch at any time by the contract of `Storage` and `Mapping`, and that is never a Rust reference.
unsafe impl Send for RawCopy {}
// SAFETY: as above; `run` takes `&self` and changes nothing of it.
unsafe impl Sync for RawCopy {}

impl RawCopy {
    /// Checks the pieces, each given as far offset, near offset and length, and divides them into parts.
    pub(crate) fn new(
        direction: Direction,
        near: Memory,
        far: RemoteMemory,
        pieces: &[(u64, u64, u64)],
        cut: Cut,
    ) -> io::Result<RawCopy> {
        let (near_base, near_len) = near.range()?;
        let (far_base, far_len, pid, far_memory) = match far {
            RemoteMemory::Memory(memory) => {
                let (base, len) = memory.range()?;
                (base, len, None, Some(memory))
            }
            RemoteMemory::Process { pid, .. } if pid == std::process::id() as i32 => {
                return Err(invalid("the far side is this process"));
            }
            RemoteMemory::Process { pid, addr, len } => (addr as usize, len, Some(pid), None),
        };
        let target = if direction == Direction::Read { Some(&near) } else { far_memory.as_ref() };
        if target.is_some_and(|memory| !memory.is_writable()) {
            return Err(invalid("the target is mapped for reading only"));
        }
        let total: u64 = pieces.iter().map(|piece| piece.2).sum();
        let part_len = match cut {
            Cut::Even(parts) => total.div_ceil(parts.max(1) as u64),
            Cut::Portions(bytes) => bytes,
        }
        .max(1);
        let inside =
            |offset: u64, len: u64, whole: u64| offset.checked_add(len).is_some_and(|end| end <= whole);
        let mut copy = RawCopy {
            direction,
            pid,
            near: Vec::new(),
            far: Vec::new(),
            parts: Vec::new(),
            _kept: (near, far_memory),
        };
        let (mut start, mut room) = (0, part_len);
        for &(far_at, near_at, len) in pieces {
            if !inside(far_at, len, far_len) || !inside(near_at, len, near_len) {
                return Err(invalid("a piece lies outside the memory"));
            }
            let mut done = 0;
            while done < len {
                let step = (len - done).min(room).min(LONGEST);
                copy.near.push(iovec(near_base + (near_at + done) as usize, step));
                copy.far.push(iovec(far_base + (far_at + done) as usize, step));
                done += step;
                room -= step;
                if room == 0 {
                    copy.parts.push(start..copy.near.len());
                    (start, room) = (copy.near.len(), part_len);
                }
            }
        }
        if start < copy.near.len() {
            copy.parts.push(start..copy.near.len());
        }
        Ok(copy)
    }

    /// How many parts there are.
    pub(crate) fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Copies one part.
    pub(crate) fn run(&self, part: usize) -> io::Result<()> {
        let Some(range) = self.parts.get(part) else { return Err(invalid("there is no such part")) };
        let (near, far) = (&self.near[range.clone()], &self.far[range.clone()]);
        match self.pid {
            None => {
                for (near, far) in near.iter().zip(far) {
                    let (to, from) =
                        if self.direction == Direction::Read { (near, far) } else { (far, near) };
                    // SAFETY: `new` checked both ranges against memory that `_kept` keeps mapped, and that the target
                    // is writable; the C library's copy takes whatever bytes it finds. `memmove` stands the two
                    // being one memory.
                    unsafe { libc::memmove(to.iov_base, from.iov_base, to.iov_len) };
                }
                Ok(())
            }
            Some(pid) => near
                .chunks(IOV_MAX)
                .zip(far.chunks(IOV_MAX))
                .try_for_each(|(near, far)| process_vm(self.direction, pid, near, far)),
        }
    }
}

/// A word of memory that two processes share: one raises it, the other spins until it has.
pub(crate) struct Flag {
    word: *mut u64,
    _kept: Memory,
}

// SAFETY: the word lies in memory that `_kept` keeps mapped, and is only ever touched atomically.
unsafe impl Send for Flag {}
// SAFETY: as above.
unsafe impl Sync for Flag {}

impl Flag {
    /// How long [`wait`](Self::wait) spins for a process that may have died.
    const PATIENCE: Duration = Duration::from_secs(20);

    /// The 64-bit word at that offset.
    pub(crate) fn new(memory: Memory, offset: u64) -> io::Result<Flag> {
        let (addr, len) = memory.range()?;
        if !memory.is_writable()
            || !offset.is_multiple_of(8)
            || offset.checked_add(8).is_none_or(|end| end > len)
        {
            return Err(invalid("there is no such word that can be written"));
        }
        Ok(Flag { word: std::ptr::with_exposed_provenance_mut(addr + offset as usize), _kept: memory })
    }

    #[inline(always)]
    fn word(&self) -> &AtomicU64 {
        // SAFETY: `new` checked that the aligned word lies within memory that `_kept` keeps mapped and writable;
        // everybody touches it atomically.
        unsafe { AtomicU64::from_ptr(self.word) }
    }

    /// What it holds.
    #[inline(always)]
    pub(crate) fn value(&self) -> u64 {
        self.word().load(Ordering::Acquire)
    }

    /// Sets it; what was written before is visible to a process that sees it.
    #[inline(always)]
    pub(crate) fn raise(&self, value: u64) {
        self.word().store(value, Ordering::Release);
    }

    /// Spins until it is at least that high.
    #[inline(always)]
    pub(crate) fn wait(&self, value: u64) -> io::Result<()> {
        for _ in 0..1 << 16 {
            if self.value() >= value {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        self.wait_long(value)
    }

    #[cold]
    fn wait_long(&self, value: u64) -> io::Result<()> {
        let until = Instant::now() + Flag::PATIENCE;
        while self.value() < value {
            if Instant::now() > until {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "the other process does not answer"));
            }
            std::hint::spin_loop();
        }
        Ok(())
    }
}

fn process_vm(direction: Direction, pid: i32, near: &[libc::iovec], far: &[libc::iovec]) -> io::Result<()> {
    let call = match direction {
        Direction::Read => libc::process_vm_readv,
        Direction::Write => libc::process_vm_writev,
    };
    let expected: usize = near.iter().map(|one| one.iov_len).sum();
    // SAFETY: the near ranges were checked against memory that is kept mapped; the far ones are the kernel's to check
    // and belong to another process.
    let moved = unsafe { call(pid, near.as_ptr(), near.len() as _, far.as_ptr(), far.len() as _, 0) };
    match moved {
        moved if moved < 0 => Err(io::Error::last_os_error()),
        moved if moved as usize == expected => Ok(()),
        moved => Err(io::Error::other(format!("the kernel copied {moved} of {expected} bytes"))),
    }
}

fn iovec(addr: usize, len: u64) -> libc::iovec {
    libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(addr), iov_len: len as usize }
}

fn invalid(message: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use towline::memory::{MemoryAccess, SharedStorage, SystemStorage};

    use super::*;

    #[test]
    fn every_cut_copies_the_same_bytes_and_nothing_else() {
        let from = Arc::new(SharedStorage::new(64 << 10).unwrap());
        let bytes: Vec<u8> = (0..64 << 10).map(|at| (at / 97) as u8).collect();
        from.write_at(0, &bytes).unwrap();
        let pieces = [(40_000, 100, 5_000), (0, 20_000, 4_096), (9_000, 40_000, 1)];
        for cut in [Cut::Even(1), Cut::Even(3), Cut::Portions(1000), Cut::Portions(1 << 20)] {
            let to = Arc::new(SystemStorage::new(64 << 10).unwrap());
            let (near, far) =
                (Memory::Storage(to.clone()), RemoteMemory::Memory(Memory::Storage(from.clone())));
            let copy = RawCopy::new(Direction::Read, near, far, &pieces, cut).unwrap();
            (0..copy.parts()).for_each(|part| copy.run(part).unwrap());
            let mut expected = vec![0; 64 << 10];
            for (far, near, len) in pieces.map(|(far, near, len)| (far as usize, near as usize, len as usize))
            {
                expected[near..near + len].copy_from_slice(&bytes[far..far + len]);
            }
            let mut found = vec![0; 64 << 10];
            to.read_at(0, &mut found).unwrap();
            assert!(found == expected, "{cut:?}");
        }
    }

    #[test]
    fn a_flag_is_seen_by_who_waits_for_it() {
        let memory = Memory::Storage(Arc::new(SharedStorage::new(4096).unwrap()));
        let (mine, theirs) = (Flag::new(memory.clone(), 64).unwrap(), Flag::new(memory.clone(), 64).unwrap());
        std::thread::scope(|scope| {
            scope.spawn(move || theirs.raise(3));
            mine.wait(3).unwrap();
        });
        assert_eq!(mine.value(), 3);
        assert!(Flag::new(memory.clone(), 4096).is_err() && Flag::new(memory, 12).is_err());
    }

    #[test]
    fn pieces_outside_the_memory_are_refused() {
        let memory = Memory::Storage(Arc::new(SystemStorage::new(4096).unwrap()));
        for piece in [(1, 0, 4096), (0, 1, 4096), (u64::MAX, 0, 2)] {
            let far = RemoteMemory::Memory(memory.clone());
            assert!(RawCopy::new(Direction::Write, memory.clone(), far, &[piece], Cut::Even(1)).is_err());
        }
        let here = RemoteMemory::Process { pid: std::process::id() as i32, addr: 4096, len: 4096 };
        assert!(RawCopy::new(Direction::Write, memory, here, &[(0, 0, 1)], Cut::Even(1)).is_err());
    }
}
