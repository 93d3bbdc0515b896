//! The functions of `libnccl.so.2` that are used here, as they are in NCCL 2.18 to 2.32, and the codes that they return.
#![allow(unsafe_code, reason = "foreign functions")]

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::loader::function_table;

/// What a call returned.
pub(crate) type Code = c_int;
/// A communicator: a pointer of which only the value matters here.
pub(crate) type RawComm = *mut c_void;
/// A stream of the CUDA driver or runtime; they are the same.
pub(crate) type RawStream = *mut c_void;
/// A window.
pub(crate) type RawWindow = *mut c_void;

/// The id of a group, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawId(pub(crate) [u8; 128]);

/// The settings of a communicator as they are in NCCL 2.31. Any version takes any size, and the rest as unset; what those before
/// 2.31 are given ends with `split_share`, which 2.18 has.
#[repr(C)]
pub(crate) struct RawConfig {
    pub(crate) size: usize,
    pub(crate) magic: c_uint,
    pub(crate) version: c_uint,
    pub(crate) blocking: c_int,
    pub(crate) cga_cluster_size: c_int,
    pub(crate) min_ctas: c_int,
    pub(crate) max_ctas: c_int,
    pub(crate) net_name: *const c_char,
    pub(crate) split_share: c_int,
    pub(crate) traffic_class: c_int,
    pub(crate) name: *const c_char,
    pub(crate) collnet_enable: c_int,
    pub(crate) cta_policy: c_int,
    pub(crate) shrink_share: c_int,
    pub(crate) nvls_ctas: c_int,
    pub(crate) channels_per_peer: c_int,
    pub(crate) nvlink_centric: c_int,
    pub(crate) graph_usage_mode: c_int,
    pub(crate) rma_contexts: c_int,
    pub(crate) most_peers: c_int,
    pub(crate) graph_stream_ordering: c_int,
    pub(crate) launch_order_implicit: c_int,
    pub(crate) rma_signals: c_int,
    pub(crate) rma_eager_init: c_int,
    pub(crate) host_cft_mode: c_int,
}

/// Signals to wait for.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitDescription {
    /// How many.
    pub count: c_int,
    /// From which rank.
    pub peer: c_int,
    /// Which signal.
    pub index: c_int,
    /// In which context.
    pub context: c_int,
}

function_table! {
    /// The functions of `libnccl.so.2` that are used here; all but one are asked for when they are needed.
    pub(crate) struct Api {
        required {
            version: "ncclGetVersion" = fn(*mut c_int) -> Code;
        }
        optional {
            unique_id: "ncclGetUniqueId" = fn(*mut RawId) -> Code;
            error_string: "ncclGetErrorString" = fn(Code) -> *const c_char;
            last_error: "ncclGetLastError" = fn(RawComm) -> *const c_char;

            init: "ncclCommInitRankConfig" = fn(*mut RawComm, c_int, RawId, c_int, *mut RawConfig) -> Code;
            finalize: "ncclCommFinalize" = fn(RawComm) -> Code;
            destroy: "ncclCommDestroy" = fn(RawComm) -> Code;
            abort: "ncclCommAbort" = fn(RawComm) -> Code;
            revoke: "ncclCommRevoke" = fn(RawComm, c_int) -> Code;
            split: "ncclCommSplit" = fn(RawComm, c_int, c_int, *mut RawComm, *mut RawConfig) -> Code;
            shrink: "ncclCommShrink" = fn(RawComm, *mut c_int, c_int, *mut RawComm, *mut RawConfig, c_int) -> Code;
            async_error: "ncclCommGetAsyncError" = fn(RawComm, *mut Code) -> Code;
            count: "ncclCommCount" = fn(RawComm, *mut c_int) -> Code;
            rank: "ncclCommUserRank" = fn(RawComm, *mut c_int) -> Code;

            register: "ncclCommRegister" = fn(RawComm, *mut c_void, usize, *mut *mut c_void) -> Code;
            deregister: "ncclCommDeregister" = fn(RawComm, *mut c_void) -> Code;
            window: "ncclCommWindowRegister" = fn(RawComm, *mut c_void, usize, *mut RawWindow, c_int) -> Code;
            close_window: "ncclCommWindowDeregister" = fn(RawComm, RawWindow) -> Code;
            peer_address: "ncclGetPeerDevicePointer" = fn(RawWindow, usize, c_int, *mut *mut c_void) -> Code;
            allocate: "ncclMemAlloc" = fn(*mut *mut c_void, usize) -> Code;
            free: "ncclMemFree" = fn(*mut c_void) -> Code;

            scaled_sum: "ncclRedOpCreatePreMulSum" = fn(*mut c_int, *mut c_void, c_int, c_int, RawComm) -> Code;
            destroy_op: "ncclRedOpDestroy" = fn(c_int, RawComm) -> Code;
            reduce: "ncclReduce" = fn(*const c_void, *mut c_void, usize, c_int, c_int, c_int, RawComm, RawStream) -> Code;
            broadcast: "ncclBroadcast" = fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> Code;
            all_reduce: "ncclAllReduce" = fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> Code;
            reduce_scatter: "ncclReduceScatter" = fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> Code;
            all_gather: "ncclAllGather" = fn(*const c_void, *mut c_void, usize, c_int, RawComm, RawStream) -> Code;
            all_to_all: "ncclAlltoAll" = fn(*const c_void, *mut c_void, usize, c_int, RawComm, RawStream) -> Code;
            gather: "ncclGather" = fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> Code;
            scatter: "ncclScatter" = fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream) -> Code;
            send: "ncclSend" = fn(*const c_void, usize, c_int, c_int, RawComm, RawStream) -> Code;
            recv: "ncclRecv" = fn(*mut c_void, usize, c_int, c_int, RawComm, RawStream) -> Code;
            group_start: "ncclGroupStart" = fn() -> Code;
            group_end: "ncclGroupEnd" = fn() -> Code;

            put_signal: "ncclPutSignal" = fn(*const c_void, usize, c_int, c_int, RawWindow, usize, c_int, c_int, c_uint, RawComm, RawStream) -> Code;
            signal: "ncclSignal" = fn(c_int, c_int, c_int, c_uint, RawComm, RawStream) -> Code;
            wait_signal: "ncclWaitSignal" = fn(c_int, *const WaitDescription, RawComm, RawStream) -> Code;
        }
    }
}

/// The first versions with registered buffers, and with windows.
pub(crate) const REGISTER: u32 = 21900;
pub(crate) const WINDOW: u32 = 22700;

impl Api {
    /// Forgets functions that are called often and had another signature before that version, so that calls need not ask for it.
    pub(crate) fn forget_what_came_after(&mut self, version: u32) {
        if version < REGISTER {
            (self.register, self.deregister) = (None, None);
        }
        if version < WINDOW {
            (self.window, self.close_window) = (None, None);
        }
    }
}

/// Codes of NCCL with a meaning here.
pub mod code {
    /// A call of CUDA failed.
    pub const CUDA: i32 = 1;
    /// A call of the system failed.
    pub const SYSTEM: i32 = 2;
    /// NCCL's own fault, or corrupted memory.
    pub const INTERNAL: i32 = 3;
    /// An argument is wrong.
    pub const INVALID_ARGUMENT: i32 = 4;
    /// The call is wrong.
    pub const INVALID_USAGE: i32 = 5;
    /// Another rank failed, or the network did.
    pub const REMOTE: i32 = 6;
    /// The call goes on; not an error.
    pub const IN_PROGRESS: i32 = 7;
    /// NCCL gave up waiting.
    pub const TIMEOUT: i32 = 8;

    /// The name of a code.
    pub fn name(code: i32) -> &'static str {
        match code {
            0 => "ncclSuccess",
            CUDA => "ncclUnhandledCudaError",
            SYSTEM => "ncclSystemError",
            INTERNAL => "ncclInternalError",
            INVALID_ARGUMENT => "ncclInvalidArgument",
            INVALID_USAGE => "ncclInvalidUsage",
            REMOTE => "ncclRemoteError",
            IN_PROGRESS => "ncclInProgress",
            TIMEOUT => "ncclTimeout",
            _ => "unknown code",
        }
    }
}
