//! What the driver knows: settings, memory, and whether the context is lost.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::c_int;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

/// What a function gives back: nothing, or the code of an error.
pub(crate) type Done<T = ()> = Result<T, c_int>;

pub(crate) const INVALID_VALUE: c_int = 1;
pub(crate) const OUT_OF_MEMORY: c_int = 2;
pub(crate) const NOT_INITIALIZED: c_int = 3;
pub(crate) const NO_DEVICE: c_int = 100;
pub(crate) const INVALID_DEVICE: c_int = 101;
pub(crate) const INVALID_CONTEXT: c_int = 201;
pub(crate) const MAP_FAILED: c_int = 205;
pub(crate) const INVALID_HANDLE: c_int = 400;
pub(crate) const NOT_FOUND: c_int = 500;
pub(crate) const NOT_READY: c_int = 600;
pub(crate) const ILLEGAL_ADDRESS: c_int = 700;
pub(crate) const NOT_SUPPORTED: c_int = 801;

/// What the environment says.
pub(crate) struct Settings {
    pub(crate) devices: c_int,
    pub(crate) version: c_int,
    pub(crate) memory: u64,
    pub(crate) delay: Option<Duration>,
    /// Whether the numbers of memory blocks are chosen so that they and those of their buffers are easily taken for others.
    pub(crate) alike: bool,
    lacks: HashSet<String>,
    faults: Vec<Fault>,
}

struct Fault {
    call: String,
    code: c_int,
    /// Only that call, counted from one.
    only: Option<u64>,
}

impl Settings {
    fn read() -> Settings {
        let text = |name: &str| std::env::var(name).unwrap_or_default();
        let number = |name: &str, default: u64| text(name).parse().unwrap_or(default);
        let faults = text("FAKE_CUDA_FAIL")
            .split(',')
            .filter_map(|fault| {
                let (call, rest) = fault.trim().split_once(':')?;
                let (code, only) =
                    rest.split_once('@').map_or((rest, None), |(code, n)| (code, n.parse().ok()));
                Some(Fault { call: call.to_owned(), code: code.parse().ok()?, only })
            })
            .collect();
        Settings {
            devices: number("FAKE_CUDA_DEVICES", 1) as c_int,
            version: number("FAKE_CUDA_VERSION", 13000) as c_int,
            memory: number("FAKE_CUDA_MEMORY", 1 << 30),
            delay: Some(number("FAKE_CUDA_DELAY_US", 0)).filter(|us| *us > 0).map(Duration::from_micros),
            alike: number("FAKE_CUDA_ALIKE", 0) != 0,
            lacks: text("FAKE_CUDA_NO").split(',').map(|word| word.trim().to_owned()).collect(),
            faults,
        }
    }

    pub(crate) fn lacks(&self, what: &str) -> bool {
        self.lacks.contains(what)
    }
}

pub(crate) fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(Settings::read)
}

static LOST: AtomicBool = AtomicBool::new(false);
pub(crate) static INITIALIZED: AtomicBool = AtomicBool::new(false);
static NEXT_BUFFER: AtomicU64 = AtomicU64::new(1);

/// Makes every later call fail.
pub(crate) fn lose() {
    LOST.store(true, Ordering::SeqCst);
}

pub(crate) fn is_lost() -> bool {
    LOST.load(Ordering::SeqCst)
}

/// Begins a call: the code of a fault that was asked for, or of what has happened before.
pub(crate) fn begin(call: &'static str) -> Done {
    static CALLS: Mutex<Option<HashMap<&'static str, u64>>> = Mutex::new(None);
    let settings = settings();
    if !settings.faults.is_empty() {
        let mut calls = CALLS.lock();
        let count = calls.get_or_insert_default().entry(call).or_default();
        *count += 1;
        let hit = |fault: &&Fault| fault.call == call && fault.only.is_none_or(|only| only == *count);
        if let Some(fault) = settings.faults.iter().find(hit) {
            if matches!(fault.code, 700 | 719) {
                lose();
            }
            return Err(fault.code);
        }
    }
    if !INITIALIZED.load(Ordering::SeqCst) && call != "cuInit" && call != "cuDriverGetVersion" {
        return Err(NOT_INITIALIZED);
    }
    if is_lost() { Err(ILLEGAL_ADDRESS) } else { Ok(()) }
}

/// Turns what a function did into what the driver returns.
pub(crate) fn code(done: Done) -> c_int {
    done.err().unwrap_or(0)
}

/// The bytes behind device memory: a memory file, mapped at addresses that no caller knows.
pub(crate) struct Backing {
    pub(crate) file: c_int,
    pub(crate) len: usize,
    pub(crate) device: c_int,
    /// Where the CPU reaches the bytes; followed by one page that counts the processes that have it open.
    alias: *mut u8,
    /// Whether another process allocated it.
    pub(crate) foreign: bool,
}

// SAFETY: a mapping of the process, used through raw pointers alone.
unsafe impl Send for Backing {}
// SAFETY: as above.
unsafe impl Sync for Backing {}

pub(crate) const PAGE: usize = 4096;

impl Backing {
    /// Fresh memory.
    pub(crate) fn new(len: usize, device: c_int) -> Done<Backing> {
        let len = len.div_ceil(PAGE) * PAGE;
        // SAFETY: the name is a constant; a descriptor that nobody else knows.
        let file = unsafe { libc::memfd_create(c"fake-cuda".as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: a file of its own.
        if file < 0 || unsafe { libc::ftruncate(file, (len + PAGE) as i64) } != 0 {
            return Err(OUT_OF_MEMORY);
        }
        let backing = Backing::of_file(file, len, device, false)?;
        // SAFETY: `len` bytes are mapped there.
        unsafe { std::ptr::write_bytes(backing.alias, 0xCD, len) };
        Ok(backing)
    }

    /// The memory in a file, which this value then owns.
    pub(crate) fn of_file(file: c_int, len: usize, device: c_int, foreign: bool) -> Done<Backing> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel picks the address.
        let alias =
            unsafe { libc::mmap(std::ptr::null_mut(), len + PAGE, protection, libc::MAP_SHARED, file, 0) };
        if alias == libc::MAP_FAILED {
            // SAFETY: it is this function's to close.
            unsafe { libc::close(file) };
            return Err(OUT_OF_MEMORY);
        }
        Ok(Backing { file, len, device, alias: alias.cast(), foreign })
    }

    /// The bytes, for the CPU.
    pub(crate) fn alias(&self) -> *mut u8 {
        self.alias
    }

    /// How many processes have opened it by an IPC handle.
    pub(crate) fn opened(&self) -> &AtomicU64 {
        // SAFETY: the page behind the bytes is mapped, aligned and zero at first.
        unsafe { &*self.alias.add(self.len).cast::<AtomicU64>() }
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        // SAFETY: mapped and opened by this value.
        unsafe {
            libc::munmap(self.alias.cast(), self.len + PAGE);
            libc::close(self.file);
        }
    }
}

/// Addresses that no CPU can follow.
pub(crate) fn reserve(len: usize) -> Done<u64> {
    // Room to start at a multiple of 2 MiB, as a driver's addresses do.
    let unit = 2 << 20;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: the kernel picks the address.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), len + unit, libc::PROT_NONE, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(OUT_OF_MEMORY);
    }
    // Never given back: an address is used once, so that a caller that keeps one too long is found out.
    let start = (start.addr() as u64).next_multiple_of(unit as u64);
    memory().reserved.push(start..start + len as u64);
    Ok(start)
}

/// What a range of addresses is.
#[derive(Clone)]
pub(crate) struct Known {
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) buffer: u64,
    pub(crate) what: What,
}

#[derive(Clone)]
pub(crate) enum What {
    /// Allocated by `cuMemAlloc`.
    Device(Arc<Backing>),
    /// Opened by an IPC handle, that often.
    Opened(Arc<Backing>, u32),
    /// Mapped by `cuMemMap`; whether access was allowed.
    Mapped(Arc<Backing>, bool),
    /// Pinned host memory; whether it was allocated here.
    Host { allocated: bool },
}

impl Known {
    pub(crate) fn new(start: u64, len: u64, what: What) -> Known {
        Known { start, len, buffer: NEXT_BUFFER.fetch_add(1, Ordering::Relaxed), what }
    }

    pub(crate) fn backing(&self) -> Option<&Arc<Backing>> {
        match &self.what {
            What::Device(backing) | What::Opened(backing, _) | What::Mapped(backing, _) => Some(backing),
            What::Host { .. } => None,
        }
    }
}

/// All memory that the driver knows, by its start.
#[derive(Default)]
pub(crate) struct Memory {
    pub(crate) ranges: BTreeMap<u64, Known>,
    taken: HashMap<c_int, u64>,
    /// All addresses that were ever a device's.
    reserved: Vec<Range<u64>>,
}

pub(crate) fn memory() -> MutexGuard<'static, Memory> {
    static MEMORY: OnceLock<Mutex<Memory>> = OnceLock::new();
    MEMORY.get_or_init(Mutex::default).lock()
}

/// Takes `len` bytes of a device, or says that there are none left.
pub(crate) fn take(device: c_int, len: u64) -> Done {
    let mut memory = memory();
    let taken = memory.taken.entry(device).or_default();
    match taken.checked_add(len) {
        Some(sum) if sum <= settings().memory => {
            *taken = sum;
            Ok(())
        }
        _ => Err(OUT_OF_MEMORY),
    }
}

pub(crate) fn give_back(device: c_int, len: u64) {
    let mut memory = memory();
    let taken = memory.taken.entry(device).or_default();
    *taken = taken.saturating_sub(len);
}

/// Where the CPU finds bytes, kept for as long as the value lives.
pub(crate) struct Bytes {
    pub(crate) pointer: *mut u8,
    _backing: Option<Arc<Backing>>,
}

impl Memory {
    pub(crate) fn find(&self, address: u64) -> Option<&Known> {
        let (_, known) = self.ranges.range(..=address).next_back()?;
        (address - known.start < known.len).then_some(known)
    }

    /// Whether an address is one that was a device's once.
    pub(crate) fn was_reserved(&self, address: u64) -> bool {
        self.reserved.iter().any(|range| range.contains(&address))
    }

    /// How much of a range lies in the allocation in which it begins.
    pub(crate) fn stretch(&self, address: u64, len: u64) -> u64 {
        self.find(address).map_or(0, |known| len.min(known.start + known.len - address))
    }

    /// Whether a range may be touched. It may go on from one mapping to the next, but not from one allocation.
    pub(crate) fn holds(&self, mut address: u64, mut len: u64) -> bool {
        loop {
            let now = self.stretch(address, len);
            if now == 0 || self.bytes(address, now).is_none() {
                return false;
            }
            let mapped = matches!(self.find(address), Some(Known { what: What::Mapped(..), .. }));
            (address, len) = (address + now, len - now);
            if len == 0 || !mapped {
                return len == 0;
            }
        }
    }

    /// The bytes of a range that lies in one allocation and may be touched.
    pub(crate) fn bytes(&self, address: u64, len: u64) -> Option<Bytes> {
        let known = self.find(address)?;
        let offset = address - known.start;
        if len > known.len - offset || matches!(known.what, What::Mapped(_, false)) {
            return None;
        }
        Some(match known.backing() {
            Some(backing) => Bytes {
                pointer: backing.alias().wrapping_add(offset as usize),
                _backing: Some(Arc::clone(backing)),
            },
            None => {
                Bytes { pointer: std::ptr::with_exposed_provenance_mut(address as usize), _backing: None }
            }
        })
    }
}
