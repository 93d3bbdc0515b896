//! What most calls take besides their arguments proper.
#![allow(unsafe_code, reason = "foreign calls")]

use std::ptr;

use super::Loaded;
use super::agent::{AgentCore, Backend};
use super::api::{self, RawOptArgs};
use crate::{Error, Result};

/// Options of a call. By default NIXL chooses among all backends of the agent.
#[derive(Clone, Copy, Default)]
pub struct Options<'a> {
    /// Only these backends; all where this is empty.
    pub backends: &'a [Backend],
    /// A message that the owner of the remote memory gets once the bytes are there.
    pub notification: Option<&'a [u8]>,
    /// Leaves neighbouring descriptors as they are.
    pub keep_descriptors: bool,
    /// Bytes for the backend, whose meaning it defines. Needs NIXL 1.5.
    pub custom: Option<&'a [u8]>,
}

impl<'a> Options<'a> {
    /// Options that name backends and nothing else.
    pub fn on(backends: &'a [Backend]) -> Options<'a> {
        Options { backends, ..Options::default() }
    }
}

/// Options in NIXL's own form; null where everything is left to its defaults.
pub(crate) struct OptArgs<'a> {
    loaded: &'a Loaded,
    raw: *mut RawOptArgs,
}

impl<'a> OptArgs<'a> {
    pub(crate) fn new(
        agent: &'a AgentCore,
        call: &'static str,
        options: &Options<'_>,
    ) -> Result<OptArgs<'a>> {
        let loaded = agent.loaded();
        let api = &loaded.api;
        let mut args = OptArgs { loaded, raw: ptr::null_mut() };
        let Options { backends, notification, keep_descriptors, custom } = *options;
        if backends.is_empty() && notification.is_none() && !keep_descriptors && custom.is_none() {
            return Ok(args);
        }
        // SAFETY: the pointer is to a local variable.
        api::check("nixl_capi_create_opt_args", unsafe { (api.create_opt_args)(&mut args.raw) })?;
        api::made("nixl_capi_create_opt_args", args.raw)?;
        for backend in backends {
            if !backend.belongs_to(agent) {
                let message = format!("the backend {} is another agent's", backend.name());
                return Err(Error::argument(call, message));
            }
            // SAFETY: both were made by this library and are alive.
            let code = unsafe { (api.opt_args_add_backend)(args.raw, backend.raw()) };
            api::check("nixl_capi_opt_args_add_backend", code)?;
        }
        if let Some(message) = notification {
            // SAFETY: the bytes are copied during the call.
            let code =
                unsafe { (api.opt_args_set_notif_msg)(args.raw, message.as_ptr().cast(), message.len()) };
            api::check("nixl_capi_opt_args_set_notif_msg", code)?;
            // SAFETY: made above and alive.
            let code = unsafe { (api.opt_args_set_has_notif)(args.raw, true) };
            api::check("nixl_capi_opt_args_set_has_notif", code)?;
        }
        if keep_descriptors {
            // SAFETY: made above and alive.
            let code = unsafe { (api.opt_args_set_skip_merge)(args.raw, true) };
            api::check("nixl_capi_opt_args_set_skip_desc_merge", code)?;
        }
        if let Some(custom) = custom {
            let symbol = "nixl_capi_opt_args_set_custom_param";
            let set = api.opt_args_set_custom.ok_or(Error::Lacks { library: "NIXL", symbol })?;
            // SAFETY: the bytes are copied during the call.
            api::check(symbol, unsafe { set(args.raw, custom.as_ptr().cast(), custom.len()) })?;
        }
        Ok(args)
    }

    pub(crate) fn raw(&self) -> *mut RawOptArgs {
        self.raw
    }
}

impl Drop for OptArgs<'_> {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: made by `new`, and nobody else has it. A failure leaves a few bytes behind.
            unsafe { (self.loaded.api.destroy_opt_args)(self.raw) };
        }
    }
}
