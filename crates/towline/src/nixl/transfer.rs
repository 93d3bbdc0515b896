//! Lists, requests, options and notifications, under the names that users of NIXL know.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use towline_sys::nixl::{self as native, Nixl};

use super::agent::native_kind;
use super::registered::{Held, Range};
use crate::memory::{MemType, NixlDescriptor};
use crate::region::RegisteredView;
use crate::sync::lock;
use crate::{Error, Kind, Result};

/// Which way the bytes go, seen from the agent that asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum XferOp {
    /// From the remote memory into the local one.
    Read,
    /// From the local memory into the remote one.
    Write,
}

impl XferOp {
    pub(super) fn native(self) -> native::Direction {
        match self {
            XferOp::Read => native::Direction::Read,
            XferOp::Write => native::Direction::Write,
        }
    }
}

/// How far a transfer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum XferStatus {
    /// All bytes are where they belong.
    Success,
    /// NIXL is at it.
    InProgress,
}

impl XferStatus {
    /// Whether all bytes are where they belong.
    pub fn is_success(self) -> bool {
        self == XferStatus::Success
    }
}

/// Ranges of one kind of memory on one side of a transfer. Plain data: it can be sent to a peer.
///
/// ```
/// use towline::nixl::{MemType, XferDescList};
/// let mut list = XferDescList::new(MemType::Dram);
/// list.add_desc(0x1000, 4096, 0);
/// assert_eq!(list.len(), 1);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct XferDescList {
    mem_type: MemType,
    descriptors: Vec<(u64, usize, u64)>,
}

impl XferDescList {
    /// An empty list.
    pub fn new(mem_type: MemType) -> XferDescList {
        XferDescList { mem_type, descriptors: Vec::new() }
    }

    /// The kind of memory that its ranges are of.
    pub fn get_type(&self) -> MemType {
        self.mem_type
    }

    /// Adds a range: address, length and device.
    pub fn add_desc(&mut self, addr: usize, len: usize, dev_id: u64) {
        self.descriptors.push((addr as u64, len, dev_id));
    }

    /// Adds the whole of what is registered. `Invalid` where it is of another kind.
    pub fn add_storage_desc(&mut self, registered: &impl RegisteredView) -> Result<()> {
        self.add_descriptor(&registered.descriptor())
    }

    /// Adds what a descriptor names. `Invalid` where it is of another kind.
    pub fn add_descriptor(&mut self, descriptor: &NixlDescriptor) -> Result<()> {
        if descriptor.mem_type != self.mem_type {
            return Err(Error::invalid(
                "nixl",
                format!("a range of {:?} in a list of {:?}", descriptor.mem_type, self.mem_type),
            ));
        }
        self.descriptors.push((descriptor.addr, descriptor.size, descriptor.device_id));
        Ok(())
    }

    /// How many ranges it has.
    pub fn len(&self) -> usize {
        self.descriptors.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.descriptors.is_empty()
    }

    /// Removes all ranges.
    pub fn clear(&mut self) {
        self.descriptors.clear();
    }

    pub(super) fn ranges(&self) -> impl Iterator<Item = Range> {
        self.descriptors.iter().map(|(addr, size, device_id)| {
            let (addr, size, device_id) = (*addr, *size, *device_id);
            Range(NixlDescriptor { addr, size, mem_type: self.mem_type, device_id })
        })
    }

    pub(super) fn native(&self, nixl: &Nixl) -> Result<native::TransferList> {
        let ranges = self.ranges().map(|range| range.descriptor());
        Ok(native::TransferList::new(nixl, native_kind(self.mem_type), ranges)?)
    }
}

/// What most calls take besides their arguments proper.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OptArgs {
    backends: Vec<String>,
    message: Vec<u8>,
    has_notification: bool,
    skip_merge: bool,
    custom: Option<Vec<u8>>,
}

impl OptArgs {
    /// Options that leave everything to NIXL.
    pub fn new() -> OptArgs {
        OptArgs::default()
    }

    /// Restricts the call to that backend and others that are added.
    pub fn add_backend(&mut self, backend: &str) {
        self.backends.push(backend.to_ascii_uppercase());
    }

    /// Sets what the owner of the remote memory is told once the bytes are there.
    pub fn set_notification_message(&mut self, message: &[u8]) {
        self.message = message.to_vec();
    }

    /// Says whether it is told.
    pub fn set_has_notification(&mut self, has_notification: bool) {
        self.has_notification = has_notification;
    }

    /// Leaves neighbouring ranges as they are.
    pub fn set_skip_descriptor_merge(&mut self, skip_merge: bool) {
        self.skip_merge = skip_merge;
    }

    /// Sets bytes for the backend, whose meaning it defines.
    pub fn set_custom_param(&mut self, custom: &[u8]) {
        self.custom = Some(custom.to_vec());
    }

    pub(super) fn notification(&self) -> Option<&[u8]> {
        self.has_notification.then_some(&self.message)
    }

    pub(super) fn backends(&self) -> &[String] {
        &self.backends
    }

    pub(super) fn native<'a>(&'a self, backends: &'a [native::Backend]) -> native::Options<'a> {
        native::Options {
            backends,
            notification: self.notification(),
            keep_descriptors: self.skip_merge,
            custom: self.custom.as_deref(),
        }
    }
}

/// One transfer. It keeps the local memory for as long as NIXL uses it, also when it is dropped before its end.
pub struct XferRequest {
    /// Empty only while it is being dropped.
    request: Mutex<Option<native::Request>>,
    keep: Vec<Arc<dyn Held>>,
}

impl XferRequest {
    pub(super) fn new(request: native::Request, keep: Vec<Arc<dyn Held>>) -> XferRequest {
        XferRequest { request: Mutex::new(Some(request)), keep }
    }

    fn with<T>(&self, call: impl FnOnce(&mut native::Request) -> towline_sys::Result<T>) -> Result<T> {
        match lock(&self.request).as_mut() {
            Some(request) => Ok(call(request)?),
            None => Err(Error::new(Kind::Internal, "nixl", "the request is gone")),
        }
    }

    pub(super) fn post(&self, notification: Option<&[u8]>) -> Result<bool> {
        let progress = self.with(|request| request.post(notification))?;
        Ok(progress == native::Progress::InProgress)
    }

    pub(super) fn status(&self) -> Result<XferStatus> {
        Ok(match self.with(native::Request::progress)? {
            native::Progress::Done => XferStatus::Success,
            native::Progress::InProgress => XferStatus::InProgress,
        })
    }

    /// What NIXL measured. Needs an agent whose configuration asks for telemetry.
    pub fn get_telemetry(&self) -> Result<XferTelemetry> {
        let native::Telemetry { posting, transfer, bytes, descriptors } =
            self.with(native::Request::telemetry)?;
        Ok(XferTelemetry {
            post_duration: posting,
            xfer_duration: transfer,
            total_bytes: bytes,
            desc_count: descriptors,
        })
    }
}

impl Drop for XferRequest {
    fn drop(&mut self) {
        let request = lock(&self.request).take();
        if let Some(Err(unreleased)) = request.map(native::Request::release) {
            tracing::warn!(error = %unreleased.error, "NIXL keeps a transfer; its memory is kept too");
            std::mem::forget(std::mem::take(&mut self.keep));
        }
    }
}

impl fmt::Debug for XferRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("XferRequest").field("registrations", &self.keep.len()).finish_non_exhaustive()
    }
}

/// What NIXL measured of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct XferTelemetry {
    /// How long posting took.
    pub post_duration: std::time::Duration,
    /// How long it took altogether.
    pub xfer_duration: std::time::Duration,
    /// How many bytes were moved.
    pub total_bytes: u64,
    /// How many ranges there were, after neighbours were merged.
    pub desc_count: u64,
}

/// Messages by the agent that sent them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NotificationMap {
    messages: HashMap<String, Vec<Vec<u8>>>,
}

impl NotificationMap {
    /// No messages.
    pub fn new() -> NotificationMap {
        NotificationMap::default()
    }

    /// How many agents have sent some.
    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// Whether none has.
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// The agents that have sent some.
    pub fn agents(&self) -> impl Iterator<Item = &str> {
        self.messages.keys().map(String::as_str)
    }

    /// The messages of an agent, in the order in which they came.
    pub fn get_notifications(&self, agent: &str) -> &[Vec<u8>] {
        self.messages.get(agent).map_or(&[], Vec::as_slice)
    }

    /// Takes all messages out.
    pub fn take_notifs(&mut self) -> HashMap<String, Vec<Vec<u8>>> {
        std::mem::take(&mut self.messages)
    }

    pub(super) fn extend(&mut self, came: Vec<native::Notification>) {
        for native::Notification { peer, message } in came {
            self.messages.entry(peer).or_default().push(message);
        }
    }
}
