//! The functions of the CUDA driver that are used here, as they are in CUDA 11.4 to 13, and the codes that they return.
#![allow(unsafe_code, reason = "foreign functions")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::loader::function_table;
use crate::{Error, Result};

/// Declares handles of the driver: pointers of which only the value matters here.
macro_rules! handles {
    ($($name:ident),*) => {
        $(pub(crate) type $name = *mut c_void;)*
    };
}

handles!(RawContext, RawStream, RawEvent, RawModule, RawFunction);

/// What a call returned.
pub(crate) type Code = c_int;
/// The driver's number of a device, which is not always its ordinal.
pub(crate) type RawDevice = c_int;
/// An address in the unified address space.
pub(crate) type RawPointer = u64;
/// The handle of a physical allocation.
pub(crate) type RawAllocation = u64;

/// Sixteen bytes that name a device everywhere.
#[repr(C)]
pub(crate) struct RawUuid(pub(crate) [u8; 16]);

/// A handle by which another process opens an allocation.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawIpcHandle(pub(crate) [u8; 64]);

/// Where memory lies or who reaches it.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawLocation {
    pub(crate) kind: c_uint,
    pub(crate) id: c_int,
}

/// What a physical allocation is like, as it crosses the boundary.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawProperties {
    pub(crate) kind: c_uint,
    pub(crate) handle_types: c_uint,
    pub(crate) location: RawLocation,
    pub(crate) windows: *mut c_void,
    pub(crate) compression: u8,
    pub(crate) direct_rdma: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

/// Who may reach a mapping, and how.
#[repr(C)]
pub(crate) struct RawAccess {
    pub(crate) location: RawLocation,
    pub(crate) flags: c_uint,
}

function_table! {
    /// The functions of `libcuda.so.1` that are used here.
    pub(crate) struct Api {
        required {
            init: "cuInit" = fn(c_uint) -> Code;
            driver_version: "cuDriverGetVersion" = fn(*mut c_int) -> Code;
            error_name: "cuGetErrorName" = fn(Code, *mut *const c_char) -> Code;

            device_count: "cuDeviceGetCount" = fn(*mut c_int) -> Code;
            device: "cuDeviceGet" = fn(*mut RawDevice, c_int) -> Code;
            device_name: "cuDeviceGetName" = fn(*mut c_char, c_int, RawDevice) -> Code;
            device_attribute: "cuDeviceGetAttribute" = fn(*mut c_int, c_uint, RawDevice) -> Code;
            device_memory: "cuDeviceTotalMem_v2" = fn(*mut usize, RawDevice) -> Code;
            device_bus: "cuDeviceGetPCIBusId" = fn(*mut c_char, c_int, RawDevice) -> Code;
            peer_possible: "cuDeviceCanAccessPeer" = fn(*mut c_int, RawDevice, RawDevice) -> Code;
            retain_primary: "cuDevicePrimaryCtxRetain" = fn(*mut RawContext, RawDevice) -> Code;
            release_primary: "cuDevicePrimaryCtxRelease_v2" = fn(RawDevice) -> Code;

            push_context: "cuCtxPushCurrent_v2" = fn(RawContext) -> Code;
            pop_context: "cuCtxPopCurrent_v2" = fn(*mut RawContext) -> Code;
            current_context: "cuCtxGetCurrent" = fn(*mut RawContext) -> Code;
            enable_peer: "cuCtxEnablePeerAccess" = fn(RawContext, c_uint) -> Code;

            allocate: "cuMemAlloc_v2" = fn(*mut RawPointer, usize) -> Code;
            free: "cuMemFree_v2" = fn(RawPointer) -> Code;
            allocate_host: "cuMemHostAlloc" = fn(*mut *mut c_void, usize, c_uint) -> Code;
            free_host: "cuMemFreeHost" = fn(*mut c_void) -> Code;
            register_host: "cuMemHostRegister_v2" = fn(*mut c_void, usize, c_uint) -> Code;
            unregister_host: "cuMemHostUnregister" = fn(*mut c_void) -> Code;
            host_device_pointer: "cuMemHostGetDevicePointer_v2" = fn(*mut RawPointer, *mut c_void, c_uint) -> Code;
            pointer_attributes: "cuPointerGetAttributes" = fn(c_uint, *mut c_uint, *mut *mut c_void, RawPointer) -> Code;
            copy: "cuMemcpyAsync" = fn(RawPointer, RawPointer, usize, RawStream) -> Code;
            fill: "cuMemsetD8Async" = fn(RawPointer, u8, usize, RawStream) -> Code;

            ipc_handle: "cuIpcGetMemHandle" = fn(*mut RawIpcHandle, RawPointer) -> Code;
            ipc_open: "cuIpcOpenMemHandle_v2" = fn(*mut RawPointer, RawIpcHandle, c_uint) -> Code;
            ipc_close: "cuIpcCloseMemHandle" = fn(RawPointer) -> Code;

            create_stream: "cuStreamCreateWithPriority" = fn(*mut RawStream, c_uint, c_int) -> Code;
            destroy_stream: "cuStreamDestroy_v2" = fn(RawStream) -> Code;
            stream_synchronize: "cuStreamSynchronize" = fn(RawStream) -> Code;
            stream_query: "cuStreamQuery" = fn(RawStream) -> Code;
            stream_wait: "cuStreamWaitEvent" = fn(RawStream, RawEvent, c_uint) -> Code;
            stream_context: "cuStreamGetCtx" = fn(RawStream, *mut RawContext) -> Code;
            create_event: "cuEventCreate" = fn(*mut RawEvent, c_uint) -> Code;
            destroy_event: "cuEventDestroy_v2" = fn(RawEvent) -> Code;
            record: "cuEventRecord" = fn(RawEvent, RawStream) -> Code;
            event_query: "cuEventQuery" = fn(RawEvent) -> Code;
            event_synchronize: "cuEventSynchronize" = fn(RawEvent) -> Code;
            host_function: "cuLaunchHostFunc" = fn(RawStream, unsafe extern "C" fn(*mut c_void), *mut c_void) -> Code;

            load_module: "cuModuleLoadDataEx" = fn(*mut RawModule, *const c_void, c_uint, *mut c_uint, *mut *mut c_void) -> Code;
            unload_module: "cuModuleUnload" = fn(RawModule) -> Code;
            module_function: "cuModuleGetFunction" = fn(*mut RawFunction, RawModule, *const c_char) -> Code;
            launch: "cuLaunchKernel" = fn(RawFunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, RawStream, *mut *mut c_void, *mut *mut c_void) -> Code;
        }
        optional {
            function: "cuGetProcAddress_v2" = fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> Code;
            device_uuid: "cuDeviceGetUuid_v2" = fn(*mut RawUuid, RawDevice) -> Code;
            granularity: "cuMemGetAllocationGranularity" = fn(*mut usize, *const RawProperties, c_uint) -> Code;
            create: "cuMemCreate" = fn(*mut RawAllocation, usize, *const RawProperties, u64) -> Code;
            release: "cuMemRelease" = fn(RawAllocation) -> Code;
            reserve: "cuMemAddressReserve" = fn(*mut RawPointer, usize, usize, RawPointer, u64) -> Code;
            unreserve: "cuMemAddressFree" = fn(RawPointer, usize) -> Code;
            map: "cuMemMap" = fn(RawPointer, usize, usize, RawAllocation, u64) -> Code;
            unmap: "cuMemUnmap" = fn(RawPointer, usize) -> Code;
            set_access: "cuMemSetAccess" = fn(RawPointer, usize, *const RawAccess, usize) -> Code;
            export: "cuMemExportToShareableHandle" = fn(*mut c_void, RawAllocation, c_uint, u64) -> Code;
            import: "cuMemImportFromShareableHandle" = fn(*mut RawAllocation, *mut c_void, c_uint) -> Code;
            retain: "cuMemRetainAllocationHandle" = fn(*mut RawAllocation, *mut c_void) -> Code;
        }
    }
}

/// Codes of the driver with a meaning here.
pub mod code {
    /// The arguments are wrong.
    pub const INVALID_VALUE: i32 = 1;
    /// There is not enough memory.
    pub const OUT_OF_MEMORY: i32 = 2;
    /// `cuInit` has not been called, or the process was forked after it.
    pub const NOT_INITIALIZED: i32 = 3;
    /// The driver is shutting down with the process.
    pub const DEINITIALIZED: i32 = 4;
    /// The library is the toolkit's stub for linking.
    pub const STUB_LIBRARY: i32 = 34;
    /// There is no device.
    pub const NO_DEVICE: i32 = 100;
    /// There is no device of that number.
    pub const INVALID_DEVICE: i32 = 101;
    /// No context is current, or a wrong one.
    pub const INVALID_CONTEXT: i32 = 201;
    /// Peer access is on already.
    pub const PEER_ACCESS_ALREADY_ENABLED: i32 = 704;
    /// A handle is not valid.
    pub const INVALID_HANDLE: i32 = 400;
    /// The work has not ended.
    pub const NOT_READY: i32 = 600;
    /// A kernel or copy touched memory that is not there: the context is lost.
    pub const ILLEGAL_ADDRESS: i32 = 700;
    /// The memory is registered already.
    pub const HOST_MEMORY_ALREADY_REGISTERED: i32 = 712;
    /// The driver or the system does not allow it.
    pub const NOT_PERMITTED: i32 = 800;
    /// The device or the driver cannot do it.
    pub const NOT_SUPPORTED: i32 = 801;

    /// Whether the code means that the context can do nothing any more, in this process.
    pub fn context_lost(code: i32) -> bool {
        matches!(code, 214 | 220 | 226 | ILLEGAL_ADDRESS | 702 | 709 | 710 | 714..=719 | 810)
    }
}

impl Api {
    /// Turns what a call returned into a result.
    pub(crate) fn check(&self, call: &'static str, code: Code) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.refused(call, code)) }
    }

    /// Like [`Api::check`], for a call that asks whether the work has ended.
    pub(crate) fn ended(&self, call: &'static str, code: Code) -> Result<bool> {
        if code == code::NOT_READY { Ok(false) } else { self.check(call, code).map(|()| true) }
    }

    pub(crate) fn refused(&self, call: &'static str, code: Code) -> Error {
        let mut name = std::ptr::null();
        // SAFETY: `name` outlives the call.
        let known = unsafe { (self.error_name)(code, &mut name) } == 0 && !name.is_null();
        let name = if known {
            // SAFETY: the driver gives out a string constant of its own, and is never unloaded.
            let name: &'static CStr = unsafe { CStr::from_ptr(name) };
            name.to_str().unwrap_or("a name that is not text")
        } else {
            "unknown code"
        };
        Error::Refused { call, code, name }
    }
}
