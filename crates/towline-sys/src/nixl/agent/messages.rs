//! Messages between agents.
#![allow(unsafe_code, reason = "foreign calls")]

use std::ptr;
use std::sync::Arc;

use super::{AgentCore, c_string, text};
use crate::Result;
use crate::nixl::Loaded;
use crate::nixl::api::{self, RawNotifMap};
use crate::nixl::options::{OptArgs, Options};

/// A message from a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notification {
    /// The name of the agent that sent it.
    pub peer: String,
    /// What it says.
    pub message: Vec<u8>,
}

/// Where NIXL puts what has come.
pub(super) struct Mailbox {
    loaded: Arc<Loaded>,
    raw: *mut RawNotifMap,
}

// SAFETY: plain data of NIXL, used under the agent's lock.
unsafe impl Send for Mailbox {}

impl Mailbox {
    fn new(loaded: &Arc<Loaded>) -> Result<Mailbox> {
        let mut mailbox = Mailbox { loaded: Arc::clone(loaded), raw: ptr::null_mut() };
        // SAFETY: the target is a local variable.
        let code = unsafe { (loaded.api.create_notif_map)(&mut mailbox.raw) };
        api::check("nixl_capi_create_notif_map", code)?;
        api::made("nixl_capi_create_notif_map", mailbox.raw)?;
        Ok(mailbox)
    }

    fn read(&self) -> Result<Vec<Notification>> {
        let api = &self.loaded.api;
        let mut peers = 0;
        // SAFETY: the map is alive, the target is a local variable.
        api::check("nixl_capi_notif_map_size", unsafe { (api.notif_map_size)(self.raw, &mut peers) })?;
        let mut messages = Vec::new();
        for index in 0..peers {
            let mut name = ptr::null();
            // SAFETY: the map is alive, the target is a local variable.
            let code = unsafe { (api.notif_map_agent)(self.raw, index, &mut name) };
            api::check("nixl_capi_notif_map_get_agent_at", code)?;
            let name = api::made("nixl_capi_notif_map_get_agent_at", name.cast_mut())?;
            // SAFETY: a key of the map, which is alive and not changed here.
            let peer = unsafe { text(name) };
            let mut count = 0;
            // SAFETY: as above; the target is a local variable.
            let code = unsafe { (api.notif_map_count)(self.raw, name, &mut count) };
            api::check("nixl_capi_notif_map_get_notifs_size", code)?;
            for number in 0..count {
                let (mut data, mut len) = (ptr::null(), 0);
                // SAFETY: as above; the targets are local variables.
                let code = unsafe { (api.notif_map_get)(self.raw, name, number, &mut data, &mut len) };
                api::check("nixl_capi_notif_map_get_notif", code)?;
                let message = if data.is_null() || len == 0 {
                    Vec::new()
                } else {
                    // SAFETY: bytes of the map, which is alive and not changed here.
                    unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len) }.to_vec()
                };
                messages.push(Notification { peer: peer.clone(), message });
            }
        }
        Ok(messages)
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: made by `new`, and nobody else has it.
            unsafe { (self.loaded.api.destroy_notif_map)(self.raw) };
        }
    }
}

pub(super) fn take(agent: &AgentCore) -> Result<Vec<Notification>> {
    let call = "nixl_capi_get_notifs";
    let mut place = agent.mailbox.lock();
    // An empty map is used again; one that holds messages has been read, and goes.
    let mailbox = match place.take() {
        Some(mailbox) => mailbox,
        None => Mailbox::new(&agent.loaded)?,
    };
    // SAFETY: agent and map are alive, and the map is only used under the lock.
    api::check(call, unsafe { (agent.loaded.api.get_notifs)(agent.raw, mailbox.raw, ptr::null_mut()) })?;
    let messages = mailbox.read()?;
    if messages.is_empty() {
        *place = Some(mailbox);
    }
    Ok(messages)
}

pub(super) fn send(agent: &AgentCore, peer: &str, message: &[u8], options: &Options<'_>) -> Result<()> {
    let call = "nixl_capi_gen_notif";
    let peer = c_string(call, peer)?;
    let args = OptArgs::new(agent, call, options)?;
    // SAFETY: everything passed outlives the call, and the message is copied.
    let code = unsafe {
        (agent.loaded.api.gen_notif)(
            agent.raw,
            peer.as_ptr(),
            message.as_ptr().cast(),
            message.len(),
            args.raw(),
        )
    };
    api::check(call, code)
}
