//! The one kernel that is known, done by the CPU.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::device::{current, give};
use crate::state::*;
use crate::stream::{Work, move_bytes, stream};

/// The kernel's name; modules and functions are named by numbers that nobody follows.
const KERNEL: &CStr = c"towline_copy";
const MODULE: usize = 0x30D0;
const FUNCTION: usize = 0xF0C0;

/// The newest text that a driver of version 12.0 takes.
const NEWEST_PTX: &str = ".version 8.0";

/// How many launches there have been.
pub(crate) static LAUNCHES: AtomicU64 = AtomicU64::new(0);

/// The parameters of `towline_copy`, in their order, and the shape of its launch.
struct Launch {
    list: u64,
    units: u32,
    from: u64,
    to: u64,
    len: u64,
    parts_log2: u32,
    part: u64,
    scale_log2: u32,
    per_block: u32,
    form: u32,
    list_to: u64,
    from_step: u64,
    to_step: u64,
    blocks: u32,
}

impl Launch {
    /// Copies every unit; `None` where one of them is not all in memory that the device reaches.
    fn perform(&self) -> Option<()> {
        for block in 0..self.blocks {
            let first = block.checked_mul(self.per_block)?;
            for unit in first..self.units.min(first + self.per_block) {
                let (from, to, len) = if self.form == 1 { self.triple(unit)? } else { self.equal(unit)? };
                if len > 0 {
                    let reached = [to, from].iter().all(|address| memory().holds(*address, len));
                    reached.then(|| move_bytes(to, from, len as usize)).flatten()?;
                }
            }
        }
        Some(())
    }

    fn triple(&self, unit: u32) -> Option<(u64, u64, u64)> {
        let entry = memory().bytes(self.list + u64::from(unit) * 24, 24)?;
        // SAFETY: 24 bytes were found there.
        let [from, to, len] = unsafe { entry.pointer.cast::<[u64; 3]>().read_unaligned() };
        Some((from, to, len))
    }

    /// A unit of runs that all have one length.
    fn equal(&self, unit: u32) -> Option<(u64, u64, u64)> {
        let piece = unit >> self.parts_log2;
        let start = u64::from(unit & ((1 << self.parts_log2) - 1)) * self.part;
        let (from, to) = if self.form == 2 {
            let index = |list: u64| match list {
                0 => Some(piece),
                list => {
                    let entry = memory().bytes(list + u64::from(piece) * 4, 4)?;
                    // SAFETY: 4 bytes were found there.
                    Some(unsafe { entry.pointer.cast::<u32>().read_unaligned() })
                }
            };
            let at = |list: u64, step: u64| Some((u64::from(index(list)?) * step) as i64);
            (at(self.list, self.from_step)?, at(self.list_to, self.to_step)?)
        } else {
            let entry = memory().bytes(self.list + u64::from(piece) * 8, 8)?;
            // SAFETY: 8 bytes were found there.
            let offsets = unsafe { entry.pointer.cast::<[u32; 2]>().read_unaligned() };
            offsets.map(|offset| i64::from(offset) << self.scale_log2).into()
        };
        let at = |base: u64, offset: i64| base.wrapping_add_signed(offset).wrapping_add(start);
        Some((at(self.from, from), at(self.to, to), self.part.min(self.len.saturating_sub(start))))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadDataEx(
    module: *mut *mut c_void,
    image: *const c_void,
    _count: c_uint,
    _names: *mut c_uint,
    _values: *mut *mut c_void,
) -> c_int {
    const INVALID_PTX: c_int = 218;
    const UNSUPPORTED_PTX: c_int = 222;
    code(begin("cuModuleLoadDataEx").and_then(|()| {
        current()?;
        // SAFETY: the caller passes a text that ends in a zero.
        let text = unsafe { CStr::from_ptr(image.cast()) }.to_str().map_err(|_| INVALID_PTX)?;
        let version = text.lines().find(|line| line.starts_with(".version ")).ok_or(INVALID_PTX)?;
        if version > NEWEST_PTX {
            return Err(UNSUPPORTED_PTX);
        }
        if !text.contains(".entry towline_copy(") {
            return Err(INVALID_PTX);
        }
        // SAFETY: the caller's place.
        unsafe { give(module, std::ptr::without_provenance_mut(MODULE)) }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(module: *mut c_void) -> c_int {
    if module.addr() == MODULE { 0 } else { INVALID_HANDLE }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(
    function: *mut *mut c_void,
    module: *mut c_void,
    name: *const c_char,
) -> c_int {
    code(begin("cuModuleGetFunction").and_then(|()| {
        // SAFETY: the caller passes a text that ends in a zero.
        if module.addr() != MODULE || unsafe { CStr::from_ptr(name) } != KERNEL {
            return Err(NOT_FOUND);
        }
        // SAFETY: the caller's place.
        unsafe { give(function, std::ptr::without_provenance_mut(FUNCTION)) }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    function: *mut c_void,
    blocks: c_uint,
    _blocks_y: c_uint,
    _blocks_z: c_uint,
    threads: c_uint,
    _threads_y: c_uint,
    _threads_z: c_uint,
    _shared: c_uint,
    handle: *mut c_void,
    arguments: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> c_int {
    code(begin("cuLaunchKernel").and_then(|()| {
        if function.addr() != FUNCTION {
            return Err(INVALID_HANDLE);
        }
        if blocks == 0 || threads == 0 || threads > 1024 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller passes pointers to the kernel's parameters, in order and of these types.
        let launch = unsafe {
            let long = |at: usize| (*arguments.add(at)).cast::<u64>().read_unaligned();
            let short = |at: usize| (*arguments.add(at)).cast::<u32>().read_unaligned();
            Launch {
                list: long(0),
                units: short(1),
                from: long(2),
                to: long(3),
                len: long(4),
                parts_log2: short(5),
                part: long(6),
                scale_log2: short(7),
                per_block: short(8),
                form: short(9),
                list_to: long(10),
                from_step: long(11),
                to_step: long(12),
                blocks,
            }
        };
        if launch.per_block > threads {
            return Err(INVALID_VALUE);
        }
        LAUNCHES.fetch_add(1, Ordering::SeqCst);
        stream(handle)?.add(Work::Kernel(Box::new(move || launch.perform())))
    }))
}
