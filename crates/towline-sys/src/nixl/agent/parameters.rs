//! Plug-ins, backends and their parameters.
#![allow(unsafe_code, reason = "foreign calls")]

use std::collections::BTreeMap;
use std::ptr;

use super::{AgentCore, c_string, text};
use crate::Result;
use crate::nixl::api::{self, Api, RawBackend, RawMemList, RawParamIter, RawParams, RawStringList};
use crate::nixl::list::MemoryKind;

/// What a plug-in or a backend can do, and its parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plugin {
    /// The kinds of memory that it takes.
    pub memory: Vec<MemoryKind>,
    /// Its parameters: the defaults of a plug-in, or what a backend was made with.
    pub parameters: BTreeMap<String, String>,
}

pub(super) fn plugins(agent: &AgentCore) -> Result<Vec<String>> {
    let api = &agent.loaded.api;
    let mut list = Owned { raw: ptr::null_mut(), destroy: api.destroy_string_list };
    // SAFETY: the agent is alive, the target is a local variable.
    let code = unsafe { (api.available_plugins)(agent.raw, &mut list.raw) };
    api::check("nixl_capi_get_available_plugins", code)?;
    let raw: *mut RawStringList = api::made("nixl_capi_get_available_plugins", list.raw)?;
    let mut size = 0;
    // SAFETY: the list is alive, the target is a local variable.
    api::check("nixl_capi_string_list_size", unsafe { (api.string_list_size)(raw, &mut size) })?;
    (0..size)
        .map(|index| {
            let mut name = ptr::null();
            // SAFETY: the list is alive, the target is a local variable.
            let code = unsafe { (api.string_list_get)(raw, index, &mut name) };
            api::check("nixl_capi_string_list_get", code)?;
            let name = api::made("nixl_capi_string_list_get", name.cast_mut())?;
            // SAFETY: a string of the list, which is alive.
            Ok(unsafe { text(name) })
        })
        .collect()
}

pub(super) fn plugin(agent: &AgentCore, name: &str) -> Result<Plugin> {
    let call = "nixl_capi_get_plugin_params";
    let api = &agent.loaded.api;
    let name = c_string(call, name)?;
    describe(api, call, |memory, parameters| {
        // SAFETY: agent and name outlive the call, the targets are valid.
        unsafe { (api.plugin_params)(agent.raw, name.as_ptr(), memory, parameters) }
    })
}

pub(super) fn backend(agent: &AgentCore, raw: *mut RawBackend) -> Result<Plugin> {
    let api = &agent.loaded.api;
    describe(api, "nixl_capi_get_backend_params", |memory, parameters| {
        // SAFETY: agent and backend outlive the call, the targets are valid.
        unsafe { (api.backend_params)(agent.raw, raw, memory, parameters) }
    })
}

fn describe(
    api: &Api,
    call: &'static str,
    ask: impl FnOnce(*mut *mut RawMemList, *mut *mut RawParams) -> i32,
) -> Result<Plugin> {
    let mut memory = Owned { raw: ptr::null_mut(), destroy: api.destroy_mem_list };
    let mut parameters = Owned { raw: ptr::null_mut(), destroy: api.destroy_params };
    api::check(call, ask(&mut memory.raw, &mut parameters.raw))?;
    Ok(Plugin {
        memory: kinds(api, api::made(call, memory.raw)?)?,
        parameters: pairs(api, api::made(call, parameters.raw)?)?,
    })
}

fn kinds(api: &Api, list: *mut RawMemList) -> Result<Vec<MemoryKind>> {
    let mut size = 0;
    // SAFETY: the list is alive, the target is a local variable.
    api::check("nixl_capi_mem_list_size", unsafe { (api.mem_list_size)(list, &mut size) })?;
    (0..size)
        .map(|index| {
            let mut code = 0;
            // SAFETY: the list is alive, the target is a local variable.
            let status = unsafe { (api.mem_list_get)(list, index, &mut code) };
            api::check("nixl_capi_mem_list_get", status)?;
            Ok(MemoryKind::from_code(code))
        })
        .collect()
}

fn pairs(api: &Api, params: *mut RawParams) -> Result<BTreeMap<String, String>> {
    let mut iterator = Owned { raw: ptr::null_mut(), destroy: api.destroy_params_iterator };
    // SAFETY: the parameters are alive, the target is a local variable.
    let code = unsafe { (api.params_iterator)(params, &mut iterator.raw) };
    api::check("nixl_capi_params_create_iterator", code)?;
    let raw: *mut RawParamIter = api::made("nixl_capi_params_create_iterator", iterator.raw)?;
    let mut pairs = BTreeMap::new();
    loop {
        let (mut key, mut value, mut more) = (ptr::null(), ptr::null(), false);
        // SAFETY: the iterator is alive, the targets are local variables.
        let code = unsafe { (api.params_next)(raw, &mut key, &mut value, &mut more) };
        api::check("nixl_capi_params_iterator_next", code)?;
        if key.is_null() || value.is_null() {
            return Ok(pairs);
        }
        // SAFETY: strings of the iterator, which keeps them until the next step.
        pairs.insert(unsafe { text(key) }, unsafe { text(value) });
        if !more {
            return Ok(pairs);
        }
    }
}

/// Parameters in NIXL's own form.
pub(super) struct Params(Owned<RawParams>);

impl Params {
    pub(super) fn new<'a>(
        agent: &AgentCore,
        pairs: impl IntoIterator<Item = (&'a String, &'a String)>,
    ) -> Result<Params> {
        let api = &agent.loaded.api;
        let mut params = Owned { raw: ptr::null_mut(), destroy: api.destroy_params };
        // SAFETY: the target is a local variable.
        api::check("nixl_capi_create_params", unsafe { (api.create_params)(&mut params.raw) })?;
        let raw = api::made("nixl_capi_create_params", params.raw)?;
        let call = "nixl_capi_params_add";
        for (key, value) in pairs {
            let (key, value) = (c_string(call, key)?, c_string(call, value)?);
            // SAFETY: the parameters are alive; both strings are copied.
            api::check(call, unsafe { (api.params_add)(raw, key.as_ptr(), value.as_ptr()) })?;
        }
        Ok(Params(params))
    }

    pub(super) fn raw(&self) -> *mut RawParams {
        self.0.raw
    }
}

/// Something that the library made for us, and how it is given back.
struct Owned<T> {
    raw: *mut T,
    destroy: unsafe extern "C" fn(*mut T) -> i32,
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: the library made it and nobody else has it.
            unsafe { (self.destroy)(self.raw) };
        }
    }
}
