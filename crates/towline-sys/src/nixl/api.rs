//! The functions of `libnixl_capi.so`, as they are in NIXL 1.3 to 1.5, and the codes that they return.
#![allow(unsafe_code, reason = "foreign functions")]

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::loader::function_table;
use crate::{Error, Result};

/// Declares types of which only pointers exist here.
macro_rules! opaque {
    ($($name:ident),*) => {
        $(#[repr(C)] pub(crate) struct $name { _opaque: [u8; 0] })*
    };
}

opaque!(
    RawAgent,
    RawBackend,
    RawMemList,
    RawNotifMap,
    RawOptArgs,
    RawParamIter,
    RawParams,
    RawPrepared,
    RawRegList,
    RawRequest,
    RawStringList,
    RawXferList
);

/// How an agent is set up, as it crosses the boundary.
#[repr(C)]
pub(crate) struct RawConfig {
    pub(crate) progress_thread: bool,
    pub(crate) listen_thread: bool,
    pub(crate) listen_port: c_int,
    pub(crate) thread_sync: c_int,
    pub(crate) workers: c_uint,
    pub(crate) progress_delay_us: u64,
    pub(crate) listen_delay_us: u64,
    pub(crate) telemetry: bool,
}

/// What a finished transfer took, as it crosses the boundary. The start is of the steady clock.
#[repr(C)]
#[derive(Default)]
pub(crate) struct RawTelemetry {
    pub(crate) start_us: u64,
    pub(crate) post_us: u64,
    pub(crate) transfer_us: u64,
    pub(crate) bytes: u64,
    pub(crate) descriptors: u64,
}

type Status = c_int;

function_table! {
    /// The functions of `libnixl_capi.so` that are used here.
    pub(crate) struct Api {
        required {
            create_agent: "nixl_capi_create_configured_agent" = fn(*const c_char, *const RawConfig, *mut *mut RawAgent) -> Status;
            destroy_agent: "nixl_capi_destroy_agent" = fn(*mut RawAgent) -> Status;

            available_plugins: "nixl_capi_get_available_plugins" = fn(*mut RawAgent, *mut *mut RawStringList) -> Status;
            string_list_size: "nixl_capi_string_list_size" = fn(*mut RawStringList, *mut usize) -> Status;
            string_list_get: "nixl_capi_string_list_get" = fn(*mut RawStringList, usize, *mut *const c_char) -> Status;
            destroy_string_list: "nixl_capi_destroy_string_list" = fn(*mut RawStringList) -> Status;
            plugin_params: "nixl_capi_get_plugin_params" = fn(*mut RawAgent, *const c_char, *mut *mut RawMemList, *mut *mut RawParams) -> Status;
            create_backend: "nixl_capi_create_backend" = fn(*mut RawAgent, *const c_char, *mut RawParams, *mut *mut RawBackend) -> Status;
            destroy_backend: "nixl_capi_destroy_backend" = fn(*mut RawBackend) -> Status;
            backend_params: "nixl_capi_get_backend_params" = fn(*mut RawAgent, *mut RawBackend, *mut *mut RawMemList, *mut *mut RawParams) -> Status;
            mem_list_size: "nixl_capi_mem_list_size" = fn(*mut RawMemList, *mut usize) -> Status;
            mem_list_get: "nixl_capi_mem_list_get" = fn(*mut RawMemList, usize, *mut c_int) -> Status;
            destroy_mem_list: "nixl_capi_destroy_mem_list" = fn(*mut RawMemList) -> Status;
            create_params: "nixl_capi_create_params" = fn(*mut *mut RawParams) -> Status;
            params_add: "nixl_capi_params_add" = fn(*mut RawParams, *const c_char, *const c_char) -> Status;
            destroy_params: "nixl_capi_destroy_params" = fn(*mut RawParams) -> Status;
            params_iterator: "nixl_capi_params_create_iterator" = fn(*mut RawParams, *mut *mut RawParamIter) -> Status;
            params_next: "nixl_capi_params_iterator_next" = fn(*mut RawParamIter, *mut *const c_char, *mut *const c_char, *mut bool) -> Status;
            destroy_params_iterator: "nixl_capi_params_destroy_iterator" = fn(*mut RawParamIter) -> Status;

            create_opt_args: "nixl_capi_create_opt_args" = fn(*mut *mut RawOptArgs) -> Status;
            destroy_opt_args: "nixl_capi_destroy_opt_args" = fn(*mut RawOptArgs) -> Status;
            opt_args_add_backend: "nixl_capi_opt_args_add_backend" = fn(*mut RawOptArgs, *mut RawBackend) -> Status;
            opt_args_set_notif_msg: "nixl_capi_opt_args_set_notif_msg" = fn(*mut RawOptArgs, *const c_void, usize) -> Status;
            opt_args_set_has_notif: "nixl_capi_opt_args_set_has_notif" = fn(*mut RawOptArgs, bool) -> Status;
            opt_args_set_skip_merge: "nixl_capi_opt_args_set_skip_desc_merge" = fn(*mut RawOptArgs, bool) -> Status;

            create_reg_list: "nixl_capi_create_reg_dlist" = fn(c_int, *mut *mut RawRegList) -> Status;
            reg_list_add: "nixl_capi_reg_dlist_add_desc" = fn(*mut RawRegList, usize, usize, u64, *const c_void, usize) -> Status;
            destroy_reg_list: "nixl_capi_destroy_reg_dlist" = fn(*mut RawRegList) -> Status;
            register_mem: "nixl_capi_register_mem" = fn(*mut RawAgent, *mut RawRegList, *mut RawOptArgs) -> Status;
            deregister_mem: "nixl_capi_deregister_mem" = fn(*mut RawAgent, *mut RawRegList, *mut RawOptArgs) -> Status;

            local_md: "nixl_capi_get_local_md" = fn(*mut RawAgent, *mut *mut c_void, *mut usize) -> Status;
            local_partial_md: "nixl_capi_get_local_partial_md" = fn(*mut RawAgent, *mut RawRegList, *mut *mut c_void, *mut usize, *mut RawOptArgs) -> Status;
            load_remote_md: "nixl_capi_load_remote_md" = fn(*mut RawAgent, *const c_void, usize, *mut *mut c_char) -> Status;
            check_remote_md: "nixl_capi_check_remote_md" = fn(*mut RawAgent, *const c_char, *mut RawXferList) -> Status;
            invalidate_remote_md: "nixl_capi_invalidate_remote_md" = fn(*mut RawAgent, *const c_char) -> Status;
            make_connection: "nixl_capi_agent_make_connection" = fn(*mut RawAgent, *const c_char, *mut RawOptArgs) -> Status;

            create_xfer_list: "nixl_capi_create_xfer_dlist" = fn(c_int, *mut *mut RawXferList) -> Status;
            xfer_list_add: "nixl_capi_xfer_dlist_add_desc" = fn(*mut RawXferList, usize, usize, u64) -> Status;
            destroy_xfer_list: "nixl_capi_destroy_xfer_dlist" = fn(*mut RawXferList) -> Status;
            prep_list: "nixl_capi_prep_xfer_dlist" = fn(*mut RawAgent, *const c_char, *mut RawXferList, *mut *mut RawPrepared, *mut RawOptArgs) -> Status;
            release_prepared: "nixl_capi_release_xfer_dlist_handle" = fn(*mut RawAgent, *mut RawPrepared) -> Status;
            create_request: "nixl_capi_create_xfer_req" = fn(*mut RawAgent, c_int, *mut RawXferList, *mut RawXferList, *const c_char, *mut *mut RawRequest, *mut RawOptArgs) -> Status;
            make_request: "nixl_capi_make_xfer_req" = fn(*mut RawAgent, c_int, *mut RawPrepared, *const c_int, usize, *mut RawPrepared, *const c_int, usize, *mut *mut RawRequest, *mut RawOptArgs) -> Status;
            post_request: "nixl_capi_post_xfer_req" = fn(*mut RawAgent, *mut RawRequest, *mut RawOptArgs) -> Status;
            request_status: "nixl_capi_get_xfer_status" = fn(*mut RawAgent, *mut RawRequest) -> Status;
            release_request: "nixl_capi_release_xfer_req" = fn(*mut RawAgent, *mut RawRequest) -> Status;
            destroy_request: "nixl_capi_destroy_xfer_req" = fn(*mut RawRequest) -> Status;

            create_notif_map: "nixl_capi_create_notif_map" = fn(*mut *mut RawNotifMap) -> Status;
            destroy_notif_map: "nixl_capi_destroy_notif_map" = fn(*mut RawNotifMap) -> Status;
            notif_map_size: "nixl_capi_notif_map_size" = fn(*mut RawNotifMap, *mut usize) -> Status;
            notif_map_agent: "nixl_capi_notif_map_get_agent_at" = fn(*mut RawNotifMap, usize, *mut *const c_char) -> Status;
            notif_map_count: "nixl_capi_notif_map_get_notifs_size" = fn(*mut RawNotifMap, *const c_char, *mut usize) -> Status;
            notif_map_get: "nixl_capi_notif_map_get_notif" = fn(*mut RawNotifMap, *const c_char, usize, *mut *const c_void, *mut usize) -> Status;
            get_notifs: "nixl_capi_get_notifs" = fn(*mut RawAgent, *mut RawNotifMap, *mut RawOptArgs) -> Status;
            gen_notif: "nixl_capi_gen_notif" = fn(*mut RawAgent, *const c_char, *const c_void, usize, *mut RawOptArgs) -> Status;
        }
        optional {
            is_stub: "nixl_capi_is_stub" = fn() -> bool;
            opt_args_set_custom: "nixl_capi_opt_args_set_custom_param" = fn(*mut RawOptArgs, *const c_void, usize) -> Status;
            estimate_cost: "nixl_capi_estimate_xfer_cost" = fn(*mut RawAgent, *mut RawRequest, *mut RawOptArgs, *mut i64, *mut i64, *mut c_int) -> Status;
            telemetry: "nixl_capi_get_xfer_telemetry" = fn(*mut RawAgent, *mut RawRequest, *mut RawTelemetry) -> Status;
        }
    }
}

pub(crate) const SUCCESS: Status = 0;
pub(crate) const IN_PROGRESS: Status = 1;
pub(crate) const NOT_FOUND: Status = -6;

/// The name of a code that the C API returns.
pub(crate) fn status_name(code: Status) -> &'static str {
    match code {
        SUCCESS => "success",
        IN_PROGRESS => "in progress",
        -1 => "invalid parameter",
        -2 => "backend error",
        -3 => "invalid state",
        -4 => "exception",
        -5 => "no telemetry",
        NOT_FOUND => "not found",
        _ => "unknown code",
    }
}

/// Turns what a call returned into a result; a transfer that is in progress is not a success here.
pub(crate) fn check(call: &'static str, code: Status) -> Result<()> {
    if code == SUCCESS { Ok(()) } else { Err(Error::Refused { call, code, name: status_name(code) }) }
}

/// Refuses a null pointer where the library said that it made something.
pub(crate) fn made<T>(call: &'static str, pointer: *mut T) -> Result<*mut T> {
    if pointer.is_null() {
        return Err(Error::Refused { call, code: SUCCESS, name: "success, but nothing was made" });
    }
    Ok(pointer)
}
