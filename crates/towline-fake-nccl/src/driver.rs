//! The CUDA driver of this process, fake or real.

use std::ffi::{CString, c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

use crate::settings::{CUDA, Done};

macro_rules! driver {
    ($($field:ident: $symbol:literal = fn($($arg:ty),*);)*) => {
        /// The functions of the driver that are used here.
        pub(crate) struct Driver {
            $($field: unsafe extern "C" fn($($arg),*) -> c_int,)*
        }

        impl Driver {
            fn of(handle: *mut c_void) -> Option<Driver> {
                Some(Driver {
                    $($field: {
                        // SAFETY: a library that is open, and a name that ends in a zero.
                        let address = unsafe { libc::dlsym(handle, $symbol.as_ptr()) };
                        if address.is_null() {
                            return None;
                        }
                        // SAFETY: the driver's function of that name has that signature.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> c_int>(address) }
                    },)*
                })
            }
        }
    };
}

driver! {
    copy: c"cuMemcpyAsync" = fn(u64, u64, usize, *mut c_void);
    call: c"cuLaunchHostFunc" = fn(*mut c_void, unsafe extern "C" fn(*mut c_void), *mut c_void);
    allocate_host: c"cuMemHostAlloc" = fn(*mut *mut c_void, usize, c_uint);
    allocate: c"cuMemAlloc_v2" = fn(*mut u64, usize);
    free: c"cuMemFree_v2" = fn(u64);
    retain: c"cuMemRetainAllocationHandle" = fn(*mut u64, *mut c_void);
    release: c"cuMemRelease" = fn(u64);
}

/// The library that this process has loaded; what `TOWLINE_CUDA` names comes first.
fn open() -> Option<*mut c_void> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let loaded = |name: &str| {
        let line = maps.lines().find(|line| line.ends_with(name))?;
        line.split_whitespace().last().map(str::to_owned)
    };
    let named = std::env::var("TOWLINE_CUDA").ok().filter(|path| path.starts_with('/'));
    let path = named.or_else(|| loaded("libtowline_fake_cuda.so")).unwrap_or_else(|| "libcuda.so.1".into());
    let path = CString::new(path).ok()?;
    // SAFETY: a name that ends in a zero; the library stays open.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    Some(handle).filter(|handle| !handle.is_null())
}

pub(crate) fn driver() -> Done<&'static Driver> {
    static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
    DRIVER.get_or_init(|| Driver::of(open()?)).as_ref().ok_or(CUDA)
}

fn check(code: c_int) -> Done {
    if code == 0 { Ok(()) } else { Err(CUDA) }
}

impl Driver {
    /// Copies in a stream.
    pub(crate) fn copy(&self, to: u64, from: u64, len: usize, stream: usize) -> Done {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the driver checks what it is given, and the memory stays by the contract of NCCL's functions.
        check(unsafe { (self.copy)(to, from, len, ptr::without_provenance_mut(stream)) })
    }

    /// Calls back when the stream has got there.
    pub(crate) fn call(&self, stream: usize, work: impl FnOnce() + Send + 'static) -> Done {
        unsafe extern "C" fn run(data: *mut c_void) {
            // SAFETY: made below from a box, for one call.
            let work = unsafe { Box::from_raw(data.cast::<Box<dyn FnOnce() + Send>>()) };
            work();
        }
        let boxed: Box<Box<dyn FnOnce() + Send>> = Box::new(Box::new(work));
        // SAFETY: the data is what the function takes.
        check(unsafe { (self.call)(ptr::without_provenance_mut(stream), run, Box::into_raw(boxed).cast()) })
    }

    /// Pinned host memory.
    pub(crate) fn allocate_host(&self, len: usize) -> Done<usize> {
        let mut address = ptr::null_mut();
        // SAFETY: the place outlives the call.
        check(unsafe { (self.allocate_host)(&mut address, len.max(1), 0) })?;
        Ok(address.expose_provenance())
    }

    pub(crate) fn allocate(&self, len: usize) -> Done<u64> {
        let mut address = 0;
        // SAFETY: the place outlives the call.
        check(unsafe { (self.allocate)(&mut address, len) })?;
        Ok(address)
    }

    pub(crate) fn free(&self, address: u64) -> Done {
        // SAFETY: the driver checks the address.
        check(unsafe { (self.free)(address) })
    }

    /// Whether an address is that of memory by `cuMemCreate`.
    pub(crate) fn is_created(&self, address: u64) -> bool {
        let mut handle = 0;
        let at = ptr::without_provenance_mut(address as usize);
        // SAFETY: the place outlives the call; what is retained is released.
        unsafe { (self.retain)(&mut handle, at) == 0 && (self.release)(handle) == 0 }
    }
}
