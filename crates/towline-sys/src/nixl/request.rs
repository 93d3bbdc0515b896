//! One transfer: posted, asked about, posted again, let go.
#![allow(unsafe_code, reason = "foreign calls")]

use std::ffi::c_int;
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use super::agent::AgentCore;
use super::api::{self, RawRequest, RawTelemetry};
use super::list::PreparedCore;
use super::options::{OptArgs, Options};
use crate::{Error, Result};

/// In which direction the bytes go, seen from the agent that asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the remote memory into the local one.
    Read,
    /// From the local memory into the remote one.
    Write,
}

impl Direction {
    pub(crate) fn code(self) -> c_int {
        match self {
            Direction::Read => 0,
            Direction::Write => 1,
        }
    }
}

/// How far a transfer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Progress {
    /// All bytes are where they belong.
    Done,
    /// NIXL is at it.
    InProgress,
}

/// What NIXL measured of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Telemetry {
    /// How long posting took.
    pub posting: Duration,
    /// How long it took altogether.
    pub transfer: Duration,
    /// How many bytes were moved.
    pub bytes: u64,
    /// How many descriptors there were, after neighbours were merged.
    pub descriptors: u64,
}

/// What NIXL expects a transfer to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cost {
    /// How long it will take.
    pub duration: Duration,
    /// By how much that may be wrong.
    pub margin: Duration,
}

/// One transfer between local and remote memory. It can be posted again once it is done.
pub struct Request {
    agent: Arc<AgentCore>,
    raw: *mut RawRequest,
    /// Lists that it was made from; NIXL may still look at them.
    _sides: Vec<Arc<PreparedCore>>,
}

// SAFETY: NIXL's handle has no affinity to a thread, and every use of it here takes the request exclusively.
unsafe impl Send for Request {}

impl Request {
    pub(crate) fn new(agent: Arc<AgentCore>, raw: *mut RawRequest, sides: Vec<Arc<PreparedCore>>) -> Request {
        Request { agent, raw, _sides: sides }
    }

    /// Starts it. A notification goes to the owner of the remote memory once the bytes are there.
    pub fn post(&mut self, notification: Option<&[u8]>) -> Result<Progress> {
        let call = "nixl_capi_post_xfer_req";
        let options = OptArgs::new(&self.agent, call, &Options { notification, ..Options::default() })?;
        // SAFETY: agent and request are alive; the memory is, by the contract of those who made the request.
        let code =
            unsafe { (self.agent.loaded().api.post_request)(self.agent.raw(), self.raw, options.raw()) };
        progress(call, code)
    }

    /// Asks how far it is. Without a progress thread this is also what drives it.
    pub fn progress(&mut self) -> Result<Progress> {
        // SAFETY: agent and request are alive.
        let code = unsafe { (self.agent.loaded().api.request_status)(self.agent.raw(), self.raw) };
        progress("nixl_capi_get_xfer_status", code)
    }

    /// What NIXL measured of it. Needs an agent whose configuration asks for telemetry.
    pub fn telemetry(&mut self) -> Result<Telemetry> {
        let symbol = "nixl_capi_get_xfer_telemetry";
        let call = self.agent.loaded().api.telemetry.ok_or(Error::Lacks { library: "NIXL", symbol })?;
        let mut raw = RawTelemetry::default();
        // SAFETY: agent and request are alive, the target is a local variable.
        api::check(symbol, unsafe { call(self.agent.raw(), self.raw, &mut raw) })?;
        Ok(Telemetry {
            posting: Duration::from_micros(raw.post_us),
            transfer: Duration::from_micros(raw.transfer_us),
            bytes: raw.bytes,
            descriptors: raw.descriptors,
        })
    }

    /// What NIXL expects it to take. Not every backend can say.
    pub fn cost(&mut self) -> Result<Cost> {
        let symbol = "nixl_capi_estimate_xfer_cost";
        let call = self.agent.loaded().api.estimate_cost.ok_or(Error::Lacks { library: "NIXL", symbol })?;
        let (mut duration, mut margin, mut method) = (0, 0, 0);
        // SAFETY: agent and request are alive, the targets are local variables.
        let code = unsafe {
            call(self.agent.raw(), self.raw, ptr::null_mut(), &mut duration, &mut margin, &mut method)
        };
        api::check(symbol, code)?;
        let micros = |value: i64| Duration::from_micros(u64::try_from(value).unwrap_or(0));
        Ok(Cost { duration: micros(duration), margin: micros(margin) })
    }

    /// Lets go of it. NIXL cannot stop a transfer: while it is at it, the request comes back with the reason, and the
    /// memory of both sides is still in use.
    ///
    /// Dropping a request tries the same; where NIXL refuses, the request and its agent are kept until the process ends.
    pub fn release(mut self) -> Result<(), Unreleased> {
        match self.try_release() {
            Ok(()) => Ok(()),
            Err(error) => Err(Unreleased { request: self, error }),
        }
    }

    fn try_release(&mut self) -> Result<()> {
        if self.raw.is_null() {
            return Ok(());
        }
        let api = &self.agent.loaded().api;
        // SAFETY: agent and request are alive.
        let code = unsafe { (api.release_request)(self.agent.raw(), self.raw) };
        api::check("nixl_capi_release_xfer_req", code)?;
        // SAFETY: released, so NIXL is done with it, and nobody else has it.
        unsafe { (api.destroy_request)(self.raw) };
        self.raw = ptr::null_mut();
        Ok(())
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if self.agent.in_child() || self.try_release().is_err() {
            // NIXL still uses the handle, so nothing that it leads to may go.
            std::mem::forget(Arc::clone(&self.agent));
            std::mem::forget(std::mem::take(&mut self._sides));
        }
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request").field("agent", &self.agent.name()).finish_non_exhaustive()
    }
}

/// A request that NIXL will not let go of yet.
#[derive(Debug)]
pub struct Unreleased {
    /// The request, still alive.
    pub request: Request,
    /// What NIXL said.
    pub error: Error,
}

impl fmt::Display for Unreleased {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the transfer is still in progress: {}", self.error)
    }
}

impl std::error::Error for Unreleased {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

fn progress(call: &'static str, code: c_int) -> Result<Progress> {
    if code == api::IN_PROGRESS {
        return Ok(Progress::InProgress);
    }
    api::check(call, code).map(|()| Progress::Done)
}
