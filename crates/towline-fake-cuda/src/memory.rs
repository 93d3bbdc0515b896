//! Memory of devices, pinned memory of the host, memory of other processes, and what an address is.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::device::{current, give};
use crate::pages::reservation;
use crate::state::*;
use crate::stream;

/// What an IPC handle says.
#[repr(C)]
#[derive(Clone, Copy)]
struct Handle {
    magic: u64,
    inode: u64,
    len: u64,
    process: c_int,
    file: c_int,
    device: c_int,
    rest: [u8; 28],
}

const MAGIC: u64 = 0x6675_6c6c_7966_616b;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, len: usize) -> c_int {
    code(begin("cuMemAlloc_v2").and_then(|()| {
        let device = current()?;
        if len == 0 {
            return Err(INVALID_VALUE);
        }
        take(device, len as u64)?;
        let backing = Backing::new(len, device)?;
        let start = reserve(len)?;
        let known = Known::new(start, len as u64, What::Device(Arc::new(backing)));
        memory().ranges.insert(start, known);
        // SAFETY: the caller's place.
        unsafe { give(address, start) }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> c_int {
    code(begin("cuMemFree_v2").and_then(|()| {
        current()?;
        // As the driver does: what may still use it ends first.
        stream::drain();
        let mut memory = memory();
        let Some(Known { what: What::Device(_), .. }) = memory.ranges.get(&address) else {
            return Err(INVALID_VALUE);
        };
        let Some(known) = memory.ranges.remove(&address) else { return Err(INVALID_VALUE) };
        drop(memory);
        if let Some(backing) = known.backing() {
            give_back(backing.device, known.len);
            if backing.opened().load(Ordering::SeqCst) > 0 {
                // SAFETY: the alias is mapped for as long as the backing lives.
                unsafe { std::ptr::write_bytes(backing.alias(), 0xDB, backing.len) };
            }
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(address: *mut *mut c_void, len: usize, _flags: c_uint) -> c_int {
    code(begin("cuMemHostAlloc").and_then(|()| {
        current()?;
        if len == 0 {
            return Err(INVALID_VALUE);
        }
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel picks the address.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(OUT_OF_MEMORY);
        }
        let known = Known::new(start.expose_provenance() as u64, len as u64, What::Host { allocated: true });
        memory().ranges.insert(known.start, known);
        // SAFETY: the caller's place.
        unsafe { give(address, start) }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(address: *mut c_void) -> c_int {
    code(begin("cuMemFreeHost").and_then(|()| {
        stream::drain();
        let mut memory = memory();
        let start = address.addr() as u64;
        match memory.ranges.get(&start) {
            Some(Known { what: What::Host { allocated: true }, len, .. }) => {
                // SAFETY: mapped by `cuMemHostAlloc` with that length.
                unsafe { libc::munmap(address, *len as usize) };
                memory.ranges.remove(&start);
                Ok(())
            }
            _ => Err(INVALID_VALUE),
        }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(address: *mut c_void, len: usize, _flags: c_uint) -> c_int {
    const ALREADY: c_int = 712;
    code(begin("cuMemHostRegister_v2").and_then(|()| {
        current()?;
        if settings().lacks("register") {
            return Err(NOT_SUPPORTED);
        }
        let (start, len) = (address.addr() as u64, len as u64);
        if len == 0 || start == 0 {
            return Err(INVALID_VALUE);
        }
        let mut memory = memory();
        if memory
            .ranges
            .range(..start + len)
            .next_back()
            .is_some_and(|(_, known)| known.start + known.len > start)
        {
            return Err(ALREADY);
        }
        memory.ranges.insert(start, Known::new(start, len, What::Host { allocated: false }));
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(address: *mut c_void) -> c_int {
    const NOT_REGISTERED: c_int = 713;
    code(begin("cuMemHostUnregister").and_then(|()| {
        current()?;
        stream::drain();
        let mut memory = memory();
        let start = address.addr() as u64;
        match memory.ranges.get(&start) {
            Some(Known { what: What::Host { allocated: false }, .. }) => {
                memory.ranges.remove(&start);
                Ok(())
            }
            _ => Err(NOT_REGISTERED),
        }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostGetDevicePointer_v2(
    device: *mut u64,
    address: *mut c_void,
    _flags: c_uint,
) -> c_int {
    code(begin("cuMemHostGetDevicePointer_v2").and_then(|()| {
        current()?;
        let address = address.addr() as u64;
        match memory().find(address) {
            // SAFETY: the caller's place.
            Some(Known { what: What::Host { .. }, .. }) => unsafe { give(device, address) },
            _ => Err(INVALID_VALUE),
        }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuPointerGetAttributes(
    count: c_uint,
    names: *mut c_uint,
    values: *mut *mut c_void,
    address: u64,
) -> c_int {
    code(begin("cuPointerGetAttributes").and_then(|()| {
        let known = memory().find(address).cloned();
        for at in 0..count as usize {
            // SAFETY: the caller passes that many names and places.
            let (name, place) = unsafe { (*names.add(at), *values.add(at)) };
            let backing = known.as_ref().and_then(Known::backing);
            let device = backing.map_or(if known.is_some() { 0 } else { -2 }, |backing| backing.device);
            let mapped = matches!(known.as_ref().map(|known| &known.what), Some(What::Mapped(..)));
            // As the driver has it: the range of what was mapped by itself is all that was reserved there.
            let whole = known.as_ref().map(|known| match mapped {
                true => reservation(known.start).unwrap_or((known.start, known.len)),
                false => (known.start, known.len),
            });
            let number = |value: Option<u64>| value.unwrap_or(0);
            // SAFETY: each place has room for its attribute.
            unsafe {
                match name {
                    2 => give(
                        place.cast::<u32>(),
                        known.as_ref().map_or(0, |_| 1 + u32::from(backing.is_some())),
                    )?,
                    7 => give(place.cast::<u64>(), number(known.as_ref().map(|known| known.buffer)))?,
                    8 | 10 | 14 | 17 => {
                        let value = match name {
                            10 => backing.is_some() && !mapped && !settings().lacks("ipc"),
                            14 => mapped,
                            _ => false,
                        };
                        if name == 14 || name == 17 {
                            give(place.cast::<u64>(), u64::from(value))?;
                        } else {
                            give(place.cast::<u32>(), u32::from(value))?;
                        }
                    }
                    9 => give(place.cast::<c_int>(), device)?,
                    11 => give(place.cast::<u64>(), number(whole.map(|(start, _)| start)))?,
                    12 => give(place.cast::<u64>(), number(whole.map(|(_, len)| len)))?,
                    18 => give(place.cast::<u64>(), number(known.as_ref().map(|known| known.len)))?,
                    19 => give(place.cast::<u64>(), number(known.as_ref().map(|known| known.start)))?,
                    20 => give(place.cast::<u64>(), number(known.as_ref().map(|known| block(known.buffer))))?,
                    _ => return Err(INVALID_VALUE),
                }
            }
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuIpcGetMemHandle(handle: *mut [u8; 64], address: u64) -> c_int {
    code(begin("cuIpcGetMemHandle").and_then(|()| {
        current()?;
        if settings().lacks("ipc") {
            return Err(NOT_SUPPORTED);
        }
        let memory = memory();
        let Some(Known { what: What::Device(backing), .. }) = memory.find(address) else {
            return Err(INVALID_VALUE);
        };
        let said = Handle {
            magic: MAGIC,
            inode: inode(backing.file)?,
            len: backing.len as u64,
            process: std::process::id() as c_int,
            file: backing.file,
            device: backing.device,
            rest: [0; 28],
        };
        // SAFETY: the caller's place; the handle is 64 bytes of plain numbers.
        unsafe { give(handle.cast::<Handle>(), said) }
    }))
}

fn inode(file: c_int) -> Done<u64> {
    // SAFETY: zeroes are a valid `stat`, which outlives the call.
    let (answer, stat) = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        (libc::fstat(file, &mut stat), stat)
    };
    if answer == 0 { Ok(stat.st_ino) } else { Err(INVALID_VALUE) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuIpcOpenMemHandle_v2(address: *mut u64, said: Handle, _flags: c_uint) -> c_int {
    code(begin("cuIpcOpenMemHandle_v2").and_then(|()| {
        current()?;
        if settings().lacks("ipc") {
            return Err(NOT_SUPPORTED);
        }
        if said.magic != MAGIC {
            return Err(INVALID_VALUE);
        }
        if said.process == std::process::id() as c_int {
            return Err(INVALID_CONTEXT);
        }
        let mut memory = memory();
        for known in memory.ranges.values_mut() {
            if let What::Opened(backing, times) = &mut known.what
                && inode(backing.file) == Ok(said.inode)
            {
                *times += 1;
                // SAFETY: the caller's place.
                return unsafe { give(address, known.start) };
            }
        }
        drop(memory);
        let path = format!("/proc/{}/fd/{}\0", said.process, said.file);
        // SAFETY: the path ends in a zero.
        let file = unsafe { libc::open(path.as_ptr().cast(), libc::O_RDWR | libc::O_CLOEXEC) };
        if file < 0 || inode(file) != Ok(said.inode) {
            if file >= 0 {
                // SAFETY: opened above.
                unsafe { libc::close(file) };
            }
            return Err(MAP_FAILED);
        }
        let backing = Backing::of_file(file, said.len as usize, said.device, true)?;
        backing.opened().fetch_add(1, Ordering::SeqCst);
        let start = reserve(backing.len)?;
        let known = Known::new(start, said.len, What::Opened(Arc::new(backing), 1));
        self::memory().ranges.insert(start, known);
        // SAFETY: the caller's place.
        unsafe { give(address, start) }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcCloseMemHandle(address: u64) -> c_int {
    code(begin("cuIpcCloseMemHandle").and_then(|()| {
        current()?;
        stream::drain();
        let mut memory = memory();
        match memory.ranges.get_mut(&address).map(|known| &mut known.what) {
            Some(What::Opened(_, times)) if *times > 1 => *times -= 1,
            Some(What::Opened(backing, _)) => {
                backing.opened().fetch_sub(1, Ordering::SeqCst);
                memory.ranges.remove(&address);
            }
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    }))
}

/// The number of the memory block behind a buffer.
fn block(buffer: u64) -> u64 {
    if !settings().alike {
        return buffer;
    }
    // What is left of the buffer's number by a common way to mix numbers into 64 bits, so that mixing this in cancels it.
    const START: u64 = 0xcbf2_9ce4_8422_2325;
    (START ^ buffer).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29) ^ 0x5555
}
