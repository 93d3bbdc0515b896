//! A CUDA driver without a GPU, for tests: `libtowline_fake_cuda.so` has the functions of `libcuda.so.1` that Towline calls.
//!
//! It is loaded where `TOWLINE_CUDA` (or `Cuda::load_from`) names it and never otherwise: its file is not called
//! `libcuda.so.1`, and the loader of Towline refuses it where it was not named.
//!
//! What it does is what a driver does, as far as a caller can tell:
//! * Device memory lies in memory files. Its addresses are reserved and not accessible: a CPU that follows one crashes.
//!   Fresh memory is filled with `0xCD`, and memory that was freed while another process had it open with `0xDB`.
//! * IPC handles and exported descriptors work between processes of one user.
//! * Each stream is a thread with a queue; events, waits between streams and calls back are real.
//! * Calls that need a current context, or one that matches the stream, fail without.
//! * A kernel or copy that touches unknown memory loses the context: every later call says so.
//! * The kernel `towline_copy` is known by its name and done by the CPU. Any other is refused.
//!
//! Settings, all read at the first call:
//!
//! | variable | meaning |
//! | --- | --- |
//! | `FAKE_CUDA_FAIL` | `cuMemAlloc_v2:2,cuLaunchKernel:700@3`: these calls give these codes, always or the third time only; 700 and 719 lose the context |
//! | `FAKE_CUDA_DEVICES` | how many devices there are (1); with 0, `cuInit` fails |
//! | `FAKE_CUDA_VERSION` | the version of the driver (13000) |
//! | `FAKE_CUDA_MEMORY` | bytes per device (1 GiB) |
//! | `FAKE_CUDA_DELAY_US` | each piece of work in a stream takes so much longer |
//! | `FAKE_CUDA_ALIKE` | with 1, the number of each memory block makes up for that of its buffer: a mix of both is the same for all of them |
//! | `FAKE_CUDA_NO` | what the devices lack: `vmm`, `ipc`, `peer`, `register`, in a comma-separated list |
#![allow(unsafe_code, reason = "it is a library of foreign functions, called by pointer")]
#![allow(non_snake_case, reason = "the driver's names")]

mod device;
mod kernel;
mod memory;
mod pages;
mod state;
mod stream;

use std::ffi::{c_char, c_int};
use std::path::PathBuf;

/// The file of the library that Cargo built together with the running test or program.
///
/// `None` where there is none beside it: the program was installed or copied elsewhere.
pub fn library() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let folder = program.parent()?;
    [folder.to_owned(), folder.join("deps")]
        .map(|folder| folder.join("libtowline_fake_cuda.so"))
        .into_iter()
        .find(|file| file.exists())
}

/// How many kernels have been launched in this process, by the library that is loaded; `None` where it is not.
pub fn launches() -> Option<u64> {
    let file = std::ffi::CString::new(library()?.into_os_string().into_encoded_bytes()).ok()?;
    // SAFETY: the text ends in a zero; nothing is loaded that is not there already.
    let loaded = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    if loaded.is_null() {
        return None;
    }
    // SAFETY: the library stays loaded: who loaded it never lets go of it.
    let function = unsafe { libc::dlsym(loaded, c"towline_fake_cuda_launches".as_ptr()) };
    // SAFETY: the handle is the one from above, and nobody uses it any more.
    unsafe { libc::dlclose(loaded) };
    if function.is_null() {
        return None;
    }
    // SAFETY: the function of that name in this library is the one below.
    let function = unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> u64>(function) };
    Some(function())
}

/// [`launches`], of the library that it is in.
#[unsafe(no_mangle)]
extern "C" fn towline_fake_cuda_launches() -> u64 {
    kernel::LAUNCHES.load(std::sync::atomic::Ordering::SeqCst)
}

/// Tells this library from a real driver.
#[unsafe(no_mangle)]
extern "C" fn towline_fake_cuda() -> c_int {
    1
}

/// The codes that are given out, with their names.
const CODES: &[(c_int, &std::ffi::CStr)] = &[
    (0, c"CUDA_SUCCESS"),
    (1, c"CUDA_ERROR_INVALID_VALUE"),
    (2, c"CUDA_ERROR_OUT_OF_MEMORY"),
    (3, c"CUDA_ERROR_NOT_INITIALIZED"),
    (34, c"CUDA_ERROR_STUB_LIBRARY"),
    (100, c"CUDA_ERROR_NO_DEVICE"),
    (101, c"CUDA_ERROR_INVALID_DEVICE"),
    (201, c"CUDA_ERROR_INVALID_CONTEXT"),
    (205, c"CUDA_ERROR_MAP_FAILED"),
    (217, c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"),
    (218, c"CUDA_ERROR_INVALID_PTX"),
    (222, c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION"),
    (400, c"CUDA_ERROR_INVALID_HANDLE"),
    (500, c"CUDA_ERROR_NOT_FOUND"),
    (600, c"CUDA_ERROR_NOT_READY"),
    (700, c"CUDA_ERROR_ILLEGAL_ADDRESS"),
    (704, c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"),
    (712, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"),
    (713, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"),
    (719, c"CUDA_ERROR_LAUNCH_FAILED"),
    (801, c"CUDA_ERROR_NOT_SUPPORTED"),
    (803, c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
    (999, c"CUDA_ERROR_UNKNOWN"),
];

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(code: c_int, name: *mut *const c_char) -> c_int {
    match CODES.iter().find(|(known, _)| *known == code) {
        Some((_, text)) => {
            // SAFETY: the caller passes a place for one pointer.
            unsafe { *name = text.as_ptr() };
            0
        }
        None => 1,
    }
}
