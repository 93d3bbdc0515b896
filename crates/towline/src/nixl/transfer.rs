//! Requests, options and notifications, under the names that users of NIXL know.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use towline_sys::nixl as native;

use super::embedded;
use super::engine::Engine;
use super::native::{Keepers, Prepared};
use crate::runtime;
use crate::transport::nixl::of_nixl;
use crate::{Error, Kind, Result, room};

/// In which direction the bytes go, seen from the agent that asks.
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
    /// The engine is at it.
    InProgress,
}

impl XferStatus {
    /// Whether all bytes are where they belong.
    pub fn is_success(self) -> bool {
        self == XferStatus::Success
    }
}

/// What most calls take besides their arguments proper.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OptArgs {
    pub(super) backends: Vec<String>,
    message: Vec<u8>,
    has_notification: bool,
    skip_merge: bool,
    custom: Option<Vec<u8>>,
}

impl OptArgs {
    /// Options that leave everything to the engine.
    pub fn new() -> Result<OptArgs> {
        Ok(OptArgs::default())
    }

    /// Restricts the call to that backend and others that are added.
    pub fn add_backend(&mut self, backend: impl AsRef<str>) -> Result<()> {
        self.backends.push(backend.as_ref().to_ascii_uppercase());
        Ok(())
    }

    /// Sets the notification that the owner of the remote memory gets once the bytes are there.
    pub fn set_notification_message(&mut self, message: &[u8]) -> Result<()> {
        self.message = room::copy("nixl", message)?;
        Ok(())
    }

    /// The notification.
    pub fn get_notification_message(&self) -> Result<Vec<u8>> {
        Ok(self.message.clone())
    }

    /// Sets whether the owner is notified.
    pub fn set_has_notification(&mut self, has_notification: bool) -> Result<()> {
        self.has_notification = has_notification;
        Ok(())
    }

    /// Whether the owner is notified.
    pub fn has_notification(&self) -> Result<bool> {
        Ok(self.has_notification)
    }

    /// Leaves neighbouring ranges as they are. The embedded engine joins them all the same.
    pub fn set_skip_descriptor_merge(&mut self, skip_merge: bool) -> Result<()> {
        self.skip_merge = skip_merge;
        Ok(())
    }

    /// Whether neighbouring ranges are left as they are.
    pub fn skip_descriptor_merge(&self) -> Result<bool> {
        Ok(self.skip_merge)
    }

    /// Sets bytes for the backend, whose meaning it defines. The embedded engine has no use for them.
    pub fn set_custom_param(&mut self, custom: &[u8]) -> Result<()> {
        self.custom = Some(custom.to_vec());
        Ok(())
    }

    pub(super) fn notification(&self) -> Option<&[u8]> {
        self.has_notification.then_some(&self.message)
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

/// The parameters of a backend.
pub type Params = BTreeMap<String, String>;

/// A backend of an agent, by its name.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Backend(pub(super) String);

impl Backend {
    /// The plug-in that it was made of.
    pub fn name(&self) -> &str {
        &self.0
    }
}

impl AsRef<str> for Backend {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

/// One side of many transfers, looked up once; requests name its ranges by index. Made by
/// [`NixlAgent::prepare_xfer_dlist`](super::NixlAgent::prepare_xfer_dlist).
pub struct XferDlistHandle(pub(super) Dlist);

pub(super) enum Dlist {
    Nixl(Prepared),
    Embedded(embedded::Prepared),
}

impl XferDlistHandle {
    /// How many ranges it has.
    #[allow(clippy::len_without_is_empty, reason = "a list of no ranges is refused")]
    pub fn len(&self) -> usize {
        match &self.0 {
            Dlist::Nixl(prepared) => prepared.len(),
            Dlist::Embedded(prepared) => prepared.len(),
        }
    }
}

impl fmt::Debug for XferDlistHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("XferDlistHandle").field("len", &self.len()).finish_non_exhaustive()
    }
}

/// One transfer. It keeps the local memory for as long as the engine uses it, also when it is dropped before its end.
pub struct XferRequest(Repr);

enum Repr {
    Nixl(NativeRequest),
    Embedded(embedded::Request),
}

/// A request of NIXL with the memory that it uses.
struct NativeRequest {
    /// Empty only while it is being dropped.
    request: Mutex<Option<native::Request>>,
    keep: Vec<Keepers>,
}

impl NativeRequest {
    fn with<T>(&self, call: impl FnOnce(&mut native::Request) -> towline_sys::Result<T>) -> Result<T> {
        match self.request.lock().as_mut() {
            Some(request) => Ok(call(request).map_err(of_nixl)?),
            None => Err(Error::new(Kind::Internal, "nixl", "the request is gone")),
        }
    }
}

impl XferRequest {
    pub(super) fn native(request: native::Request, keep: Vec<Keepers>) -> XferRequest {
        XferRequest(Repr::Nixl(NativeRequest { request: Mutex::new(Some(request)), keep }))
    }

    pub(super) fn embedded(request: embedded::Request) -> XferRequest {
        XferRequest(Repr::Embedded(request))
    }

    pub(super) fn post(&self, notification: Option<&[u8]>) -> Result<bool> {
        match &self.0 {
            Repr::Nixl(native) => {
                let progress = native.with(|request| request.post(notification))?;
                Ok(progress == native::Progress::InProgress)
            }
            Repr::Embedded(request) => request.post(notification),
        }
    }

    pub(super) fn status(&self) -> Result<XferStatus> {
        let done = match &self.0 {
            Repr::Nixl(native) => native.with(native::Request::progress)? == native::Progress::Done,
            Repr::Embedded(request) => request.result()?.transpose()?.is_some(),
        };
        Ok(if done { XferStatus::Success } else { XferStatus::InProgress })
    }

    /// Waits for the end of what was posted, for at most that long; false while it is in progress.
    ///
    /// On the embedded engine the caller sleeps, or takes part in the copy. NIXL has nothing to sleep on: there it is
    /// asked again and again, after pauses that grow from nothing to a millisecond.
    ///
    /// # Errors
    /// Why it has failed.
    pub fn wait_for(&self, time: Duration) -> Result<bool> {
        let native = match &self.0 {
            Repr::Embedded(request) => return Ok(request.wait_for(time)?.transpose()?.is_some()),
            Repr::Nixl(native) => native,
        };
        pauses(time, || Ok(native.with(native::Request::progress)? == native::Progress::Done))
    }

    /// What was measured. NIXL needs an agent whose configuration asks for telemetry.
    pub fn get_telemetry(&self) -> Result<XferTelemetry> {
        match &self.0 {
            Repr::Nixl(native) => {
                let native::Telemetry { posting, transfer, bytes, descriptors } =
                    native.with(native::Request::telemetry)?;
                Ok(XferTelemetry {
                    post_duration: posting,
                    xfer_duration: transfer,
                    total_bytes: bytes,
                    desc_count: descriptors,
                })
            }
            Repr::Embedded(request) => request.telemetry(),
        }
    }
}

impl Drop for NativeRequest {
    fn drop(&mut self) {
        let request = self.request.lock().take();
        if let Some(Err(unreleased)) = request.map(native::Request::release) {
            tracing::warn!(error = %unreleased.error, "NIXL keeps a transfer; its memory is kept too");
            std::mem::forget(std::mem::take(&mut self.keep));
        }
    }
}

impl fmt::Debug for XferRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (engine, regions) = match &self.0 {
            Repr::Nixl(native) => (Engine::Nixl, native.keep.iter().map(|side| side.len()).sum()),
            Repr::Embedded(request) => (Engine::Embedded, request.regions()),
        };
        f.debug_struct("XferRequest")
            .field("engine", &engine)
            .field("regions", &regions)
            .finish_non_exhaustive()
    }
}

/// Asks again and again, after pauses that grow from nothing to a millisecond, until it is so or the time is over.
pub(super) fn pauses(time: Duration, mut is_so: impl FnMut() -> Result<bool>) -> Result<bool> {
    let until = runtime::later(Instant::now(), time);
    let mut looks = 0u32;
    loop {
        if is_so()? {
            return Ok(true);
        }
        let now = Instant::now();
        if now >= until {
            return Ok(false);
        }
        looks = looks.saturating_add(1);
        match looks {
            0..200 => std::thread::yield_now(),
            _ => {
                let pause = Duration::from_micros(u64::from(looks - 190).min(1000));
                std::thread::sleep(pause.min(until - now));
            }
        }
    }
}

/// What was measured of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct XferTelemetry {
    /// How long posting took.
    pub post_duration: Duration,
    /// How long it took altogether.
    pub xfer_duration: Duration,
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
    pub fn new() -> Result<NotificationMap> {
        Ok(NotificationMap::default())
    }

    /// How many agents have sent some.
    pub fn len(&self) -> Result<usize> {
        Ok(self.messages.len())
    }

    /// Whether none has.
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.messages.is_empty())
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
    pub fn take_notifs(&mut self) -> Result<HashMap<String, Vec<Vec<u8>>>> {
        Ok(std::mem::take(&mut self.messages))
    }

    pub(super) fn extend(&mut self, came: impl IntoIterator<Item = (String, Vec<u8>)>) {
        for (peer, message) in came {
            self.messages.entry(peer).or_default().push(message);
        }
    }
}
