//! Physical memory apart from its addresses.

use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::device::{device, give};
use crate::state::*;
use crate::stream;

const GRANULARITY: usize = 2 << 20;

/// What the caller wants, as far as it matters.
#[repr(C)]
struct Properties {
    kind: c_uint,
    handle_types: c_uint,
    location: c_uint,
    device: c_int,
}

#[derive(Default)]
struct Allocations {
    next: u64,
    known: HashMap<u64, (Arc<Backing>, u32)>,
    reserved: HashMap<u64, usize>,
}

fn allocations<T>(with: impl FnOnce(&mut Allocations) -> T) -> T {
    static ALLOCATIONS: Mutex<Option<Allocations>> = Mutex::new(None);
    with(ALLOCATIONS.lock().get_or_insert_default())
}

/// What was reserved around an address.
pub(crate) fn reservation(address: u64) -> Option<(u64, u64)> {
    allocations(|all| {
        let inside = |(start, len): (&u64, &usize)| {
            (*start..start + *len as u64).contains(&address).then_some((*start, *len as u64))
        };
        all.reserved.iter().find_map(inside)
    })
}

fn supported(call: &'static str) -> Done {
    begin(call)?;
    if settings().lacks("vmm") { Err(NOT_SUPPORTED) } else { Ok(()) }
}

fn named(backing: Arc<Backing>) -> u64 {
    allocations(|all| {
        all.next += 1;
        all.known.insert(all.next, (backing, 1));
        all.next
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAllocationGranularity(
    bytes: *mut usize,
    _wanted: *const c_void,
    _option: c_uint,
) -> c_int {
    // SAFETY: the caller's place.
    code(supported("cuMemGetAllocationGranularity").and_then(|()| unsafe { give(bytes, GRANULARITY) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemCreate(handle: *mut u64, len: usize, wanted: *const c_void, _flags: u64) -> c_int {
    code(supported("cuMemCreate").and_then(|()| {
        // SAFETY: the caller passes the properties, which begin like this.
        let wanted = unsafe { wanted.cast::<Properties>().read() };
        if len == 0 || !len.is_multiple_of(GRANULARITY) || wanted.kind != 1 || wanted.location != 1 {
            return Err(INVALID_VALUE);
        }
        let device = device(wanted.device)?;
        take(device, len as u64)?;
        // SAFETY: the caller's place.
        unsafe { give(handle, named(Arc::new(Backing::new(len, device)?))) }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRelease(handle: u64) -> c_int {
    code(begin("cuMemRelease").and_then(|()| {
        allocations(|all| {
            let (backing, times) = all.known.get_mut(&handle).ok_or(INVALID_VALUE)?;
            *times -= 1;
            if *times == 0 {
                if !backing.foreign {
                    give_back(backing.device, backing.len as u64);
                }
                all.known.remove(&handle);
            }
            Ok(())
        })
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAddressReserve(
    address: *mut u64,
    len: usize,
    _alignment: usize,
    _wanted: u64,
    _flags: u64,
) -> c_int {
    code(supported("cuMemAddressReserve").and_then(|()| {
        if len == 0 || !len.is_multiple_of(GRANULARITY) {
            return Err(INVALID_VALUE);
        }
        let start = reserve(len)?;
        allocations(|all| all.reserved.insert(start, len));
        // SAFETY: the caller's place.
        unsafe { give(address, start) }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressFree(address: u64, len: usize) -> c_int {
    code(begin("cuMemAddressFree").and_then(|()| {
        if memory().ranges.range(address..address + len as u64).next().is_some() {
            return Err(INVALID_VALUE);
        }
        allocations(|all| match all.reserved.remove(&address) {
            Some(reserved) if reserved == len => Ok(()),
            _ => Err(INVALID_VALUE),
        })
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemMap(address: u64, len: usize, offset: usize, handle: u64, _flags: u64) -> c_int {
    code(supported("cuMemMap").and_then(|()| {
        let backing = allocations(|all| {
            let reserved = all
                .reserved
                .iter()
                .any(|(start, room)| *start <= address && address + len as u64 <= start + *room as u64);
            let backing = all.known.get(&handle).map(|(backing, _)| Arc::clone(backing));
            backing.filter(|_| reserved).ok_or(INVALID_VALUE)
        })?;
        let mut memory = memory();
        if offset != 0
            || len > backing.len
            || memory.ranges.range(address..address + len as u64).next().is_some()
        {
            return Err(INVALID_VALUE);
        }
        memory.ranges.insert(address, Known::new(address, len as u64, What::Mapped(backing, false)));
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemUnmap(address: u64, len: usize) -> c_int {
    code(begin("cuMemUnmap").and_then(|()| {
        stream::drain();
        let mut memory = memory();
        match memory.ranges.get(&address) {
            Some(Known { what: What::Mapped(..), len: mapped, .. }) if *mapped == len as u64 => {
                memory.ranges.remove(&address);
                Ok(())
            }
            _ => Err(INVALID_VALUE),
        }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemSetAccess(address: u64, _len: usize, _who: *const c_void, _count: usize) -> c_int {
    code(begin("cuMemSetAccess").and_then(|()| {
        match memory().ranges.get_mut(&address).map(|known| &mut known.what) {
            Some(What::Mapped(_, allowed)) => {
                *allowed = true;
                Ok(())
            }
            _ => Err(INVALID_VALUE),
        }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemExportToShareableHandle(
    place: *mut c_void,
    handle: u64,
    kind: c_uint,
    _flags: u64,
) -> c_int {
    code(supported("cuMemExportToShareableHandle").and_then(|()| {
        let backing = allocations(|all| {
            all.known.get(&handle).map(|(backing, _)| Arc::clone(backing)).ok_or(INVALID_VALUE)
        })?;
        if kind != 1 {
            return Err(NOT_SUPPORTED);
        }
        // SAFETY: a descriptor of ours.
        let file = unsafe { libc::fcntl(backing.file, libc::F_DUPFD_CLOEXEC, 0) };
        if file < 0 {
            return Err(OUT_OF_MEMORY);
        }
        // SAFETY: the caller's place for one `int`.
        unsafe { give(place.cast::<c_int>(), file) }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemImportFromShareableHandle(
    handle: *mut u64,
    file: *mut c_void,
    kind: c_uint,
) -> c_int {
    code(supported("cuMemImportFromShareableHandle").and_then(|()| {
        if kind != 1 {
            return Err(NOT_SUPPORTED);
        }
        // SAFETY: whatever the number is, the kernel checks it.
        let (file, len) = unsafe {
            let file = libc::fcntl(file.addr() as c_int, libc::F_DUPFD_CLOEXEC, 0);
            (file, if file < 0 { -1 } else { libc::lseek(file, 0, libc::SEEK_END) })
        };
        if len <= PAGE as i64 {
            return Err(INVALID_VALUE);
        }
        let backing = Backing::of_file(file, len as usize - PAGE, 0, true)?;
        // SAFETY: the caller's place.
        unsafe { give(handle, named(Arc::new(backing))) }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemRetainAllocationHandle(handle: *mut u64, address: *mut c_void) -> c_int {
    code(supported("cuMemRetainAllocationHandle").and_then(|()| {
        let memory = memory();
        let Some(Known { what: What::Mapped(backing, _), .. }) = memory.find(address.addr() as u64) else {
            return Err(INVALID_VALUE);
        };
        // A handle whose count had come to nothing lives on in its mapping, and gets a new name.
        let known = allocations(|all| {
            let found = all.known.iter_mut().find(|(_, (known, _))| Arc::ptr_eq(known, backing));
            found.map(|(name, (_, times))| {
                *times += 1;
                *name
            })
        });
        // SAFETY: the caller's place.
        unsafe { give(handle, known.unwrap_or_else(|| named(Arc::clone(backing)))) }
    }))
}
