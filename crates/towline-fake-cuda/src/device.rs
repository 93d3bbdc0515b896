//! Starting, devices, and the contexts of each thread.

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::Ordering;

use crate::state::*;

thread_local! {
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Contexts are named by addresses that nobody follows.
const CONTEXTS: usize = 0xC0_0000;

/// The device of the context that is current here.
pub(crate) fn current() -> Done<c_int> {
    let top = CURRENT.with_borrow(|stack| stack.last().copied()).ok_or(INVALID_CONTEXT)?;
    Ok((top - CONTEXTS) as c_int)
}

pub(crate) fn context_of(device: c_int) -> *mut c_void {
    std::ptr::without_provenance_mut(CONTEXTS + device as usize)
}

pub(crate) fn device(device: c_int) -> Done<c_int> {
    if (0..settings().devices).contains(&device) { Ok(device) } else { Err(INVALID_DEVICE) }
}

/// Writes a result where the caller wants it.
///
/// # Safety
/// `place` is valid for one value, or null.
pub(crate) unsafe fn give<T>(place: *mut T, value: T) -> Done {
    if place.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    unsafe { place.write_unaligned(value) };
    Ok(())
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> c_int {
    code(begin("cuInit").and_then(|()| {
        if settings().devices == 0 {
            return Err(NO_DEVICE);
        }
        INITIALIZED.store(true, Ordering::SeqCst);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the caller's place.
    code(begin("cuDriverGetVersion").and_then(|()| unsafe { give(version, settings().version) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    // SAFETY: the caller's place.
    code(begin("cuDeviceGetCount").and_then(|()| unsafe { give(count, settings().devices) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(found: *mut c_int, ordinal: c_int) -> c_int {
    // SAFETY: the caller's place.
    code(begin("cuDeviceGet").and_then(|()| unsafe { give(found, device(ordinal)?) }))
}

/// Writes a text with its end.
///
/// # Safety
/// `place` is valid for `room` bytes.
unsafe fn give_text(place: *mut c_char, room: c_int, text: &str) -> Done {
    let room = usize::try_from(room).map_err(|_| INVALID_VALUE)?;
    if room <= text.len() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise, and the text with its end is not longer.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), place.cast(), text.len());
        place.add(text.len()).write(0);
    }
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, room: c_int, of: c_int) -> c_int {
    // SAFETY: the caller's place.
    code(begin("cuDeviceGetName").and_then(|()| unsafe {
        device(of)?;
        give_text(name, room, "Fake GPU")
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetPCIBusId(name: *mut c_char, room: c_int, of: c_int) -> c_int {
    // SAFETY: the caller's place.
    code(
        begin("cuDeviceGetPCIBusId")
            .and_then(|()| unsafe { give_text(name, room, &format!("FA4E:{:02X}:00.0", device(of)? + 1)) }),
    )
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], of: c_int) -> c_int {
    // SAFETY: the caller's place.
    code(begin("cuDeviceGetUuid_v2").and_then(|()| unsafe { give(uuid, [0xF0 + device(of)? as u8; 16]) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, of: c_int) -> c_int {
    // SAFETY: the caller's place.
    code(begin("cuDeviceTotalMem_v2").and_then(|()| unsafe {
        device(of)?;
        give(bytes, settings().memory as usize)
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, of: c_int) -> c_int {
    let has = |what| c_int::from(!settings().lacks(what));
    let answer = match attribute {
        16 => 4,
        18 => 0,
        40 => 2,
        41 | 91 => 1,
        75 => 9,
        76 => 0,
        99 => has("register"),
        102 | 103 => has("vmm"),
        115 => 0,
        125 => has("ipc"),
        _ => return INVALID_VALUE,
    };
    // SAFETY: the caller's place.
    code(begin("cuDeviceGetAttribute").and_then(|()| unsafe {
        device(of)?;
        give(value, answer)
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceCanAccessPeer(can: *mut c_int, one: c_int, other: c_int) -> c_int {
    // SAFETY: the caller's place.
    code(begin("cuDeviceCanAccessPeer").and_then(|()| unsafe {
        give(can, c_int::from(device(one)? != device(other)? && !settings().lacks("peer")))
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, of: c_int) -> c_int {
    // SAFETY: the caller's place.
    code(begin("cuDevicePrimaryCtxRetain").and_then(|()| unsafe { give(context, context_of(device(of)?)) }))
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(of: c_int) -> c_int {
    code(begin("cuDevicePrimaryCtxRelease_v2").and_then(|()| device(of).map(|_| ())))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPushCurrent_v2(context: *mut c_void) -> c_int {
    // A lost context can still be pushed and taken off: what is done in it fails.
    let known = (0..settings().devices).any(|device| context_of(device).addr() == context.addr());
    if !known {
        return INVALID_CONTEXT;
    }
    CURRENT.with_borrow_mut(|stack| stack.push(context.addr()));
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut *mut c_void) -> c_int {
    let popped = CURRENT.with_borrow_mut(Vec::pop).ok_or(INVALID_CONTEXT);
    // SAFETY: the caller's place.
    code(popped.and_then(|popped| unsafe { give(context, std::ptr::without_provenance_mut(popped)) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> c_int {
    let top = CURRENT.with_borrow(|stack| stack.last().copied()).unwrap_or(0);
    // SAFETY: the caller's place.
    code(unsafe { give(context, std::ptr::without_provenance_mut(top)) })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxEnablePeerAccess(peer: *mut c_void, _flags: c_uint) -> c_int {
    const UNSUPPORTED: c_int = 217;
    code(begin("cuCtxEnablePeerAccess").and_then(|()| {
        let here = current()?;
        let other = device((peer.addr().wrapping_sub(CONTEXTS)) as c_int).map_err(|_| INVALID_CONTEXT)?;
        if here == other || settings().lacks("peer") { Err(UNSUPPORTED) } else { Ok(()) }
    }))
}
