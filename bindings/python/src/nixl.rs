//! Agents of NIXL, or what stands in their place.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use towline::nixl::{
    AgentConfig, Engine, MemType, NixlAgent, NixlDescriptor, NixlRegisterExt, NixlRegistered,
    NotificationMap, OptArgs, RegDescList, RegisteredView, XferDescList, XferOp, XferRequest,
};
use towline::{Buffer, Error, Kind, Limits, RegisterError, Result, room};

use crate::asked::Asked;
use crate::attention::without_gil;
use crate::buffer::Memory;
use crate::completions::{ATTENTION, in_turns};
use crate::errors::{OrRaise, exception, invalid, raise};
use crate::lender::Lender;
use crate::owners;
use crate::process::{self, Inherited};
use crate::request::seconds;

const ASKED: Asked =
    Asked { op: "register", argument: "data", host_only: true, views: false, ordered: false };

/// Address, length and device.
type Range = (u64, u64, u64);

/// A caller's list of them, for which there may be no room.
pub(crate) struct Ranges(Vec<Range>);

impl<'py> FromPyObject<'_, 'py> for Ranges {
    type Error = PyErr;
    #[cfg(feature = "stubs")]
    const INPUT_TYPE: pyo3::inspect::PyStaticExpr = Vec::<Range>::INPUT_TYPE;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Ranges> {
        let mut ranges = room::list("nixl", value.len()?).or_raise(value.py())?;
        for range in value.try_iter()? {
            room::push("nixl", &mut ranges, range?.extract()?).or_raise(value.py())?;
        }
        Ok(Ranges(ranges))
    }
}

/// NIXL's words for kinds of memory.
const KINDS: [(&str, MemType); 5] = [
    ("DRAM", MemType::Dram),
    ("VRAM", MemType::Vram),
    ("BLOCK", MemType::Block),
    ("OBJ", MemType::Object),
    ("FILE", MemType::File),
];

fn kind(py: Python<'_>, name: &str) -> PyResult<MemType> {
    KINDS.iter().find(|(known, _)| *known == name).map(|(_, kind)| *kind).ok_or_else(|| {
        let known: Vec<_> = KINDS.iter().map(|(known, _)| *known).collect();
        invalid(py, "nixl", format!("memory: {name:?} is not one of {}", known.join(", ")))
    })
}

fn name_of(kind: MemType) -> &'static str {
    KINDS.iter().find(|(_, known)| *known == kind).map_or("UNKNOWN", |(name, _)| name)
}

fn list(py: Python<'_>, memory: &str, ranges: Ranges) -> PyResult<XferDescList> {
    let mut list = XferDescList::new(kind(py, memory)?).or_raise(py)?;
    for (address, len, device) in ranges.0 {
        list.add_desc(address as usize, len as usize, device).or_raise(py)?;
    }
    Ok(list)
}

/// A list of ranges in the form of NIXL's Python API.
#[pyfunction]
pub(crate) fn nixl_pack<'py>(
    py: Python<'py>,
    memory: &str,
    ranges: Ranges,
    package: &str,
) -> PyResult<Bound<'py, PyBytes>> {
    let bytes = list(py, memory, ranges)?.serialize_for(package).or_raise(py)?;
    Ok(PyBytes::new(py, &bytes))
}

/// The kind of memory and the ranges in what NIXL's Python API has written. Nothing is unpickled.
#[pyfunction]
pub(crate) fn nixl_unpack(py: Python<'_>, data: &[u8]) -> PyResult<(&'static str, Vec<Range>)> {
    let list = XferDescList::deserialize(data).or_raise(py)?;
    let ranges = list.iter().map(|one| (one.addr as u64, one.len as u64, one.dev_id));
    Ok((name_of(list.get_type().or_raise(py)?), room::collect("nixl", ranges).or_raise(py)?))
}

/// An agent.
#[pyclass(frozen, name = "NixlAgent", module = "towline._native")]
pub(crate) struct Agent {
    agent: Inherited<Mutex<Option<NixlAgent>>>,
    name: String,
    engine: Engine,
    why: String,
    lent: Arc<Lent>,
}

/// Whose memory is registered, where that can be asked: by the first address, with the end. Touched with the GIL held only.
#[derive(Default)]
struct Lent(Mutex<BTreeMap<u64, (u64, Inherited<Lender>)>>);

impl Lent {
    /// Looks again at whose memory these ranges touch; all of it where there are none.
    fn check(&self, py: Python<'_>, op: &'static str, ranges: Option<&[Range]>) -> PyResult<()> {
        let touched: Vec<Lender> = {
            let lent = self.0.lock();
            let touches = |start: u64, end: u64| {
                let before = lent.range(..end).next_back();
                before.filter(|(_, (last, _))| *last > start).map(|(_, (_, lender))| lender.again(py))
            };
            match ranges {
                Some(ranges) => {
                    let touched =
                        ranges.iter().filter_map(|(at, len, _)| touches(*at, at.saturating_add(*len)));
                    room::collect(op, touched).or_raise(py)?
                }
                None => lent.values().map(|(_, lender)| lender.again(py)).collect(),
            }
        };
        // After the lock: asking a lender runs Python code.
        touched.iter().try_for_each(|lender| lender.check(py, op))
    }

    fn forget(&self, start: u64) {
        let forgotten = self.0.lock().remove(&start);
        drop(forgotten);
    }
}

impl Agent {
    fn enter(&self, py: Python<'_>, op: &'static str) -> PyResult<NixlAgent> {
        process::guard(py, op)?;
        owners::release(py);
        self.agent
            .lock()
            .clone()
            .ok_or_else(|| raise(py, &Error::new(Kind::Invalid, op, "the agent is closed")))
    }
}

#[pymethods]
impl Agent {
    #[new]
    fn new(
        py: Python<'_>,
        name: &str,
        backends: Vec<(String, HashMap<String, String>)>,
        engine: Option<&str>,
        progress_thread: bool,
        packages: Option<PathBuf>,
        devices: Option<Vec<String>>,
    ) -> PyResult<Agent> {
        process::guard(py, "nixl")?;
        let engine = match engine {
            None => None,
            Some("nixl") => Some(Engine::Nixl),
            Some("embedded") => Some(Engine::Embedded),
            Some(other) => {
                return Err(invalid(
                    py,
                    "nixl",
                    format!("engine: {other:?} is neither \"nixl\" nor \"embedded\""),
                ));
            }
        };
        let config = AgentConfig {
            engine,
            enable_prog_thread: progress_thread,
            also_look_in: packages,
            ucx_devices: devices,
            ..AgentConfig::default()
        };
        let made = py.detach(|| -> Result<NixlAgent> {
            let agent = NixlAgent::new_with_config(name, &config)?;
            for (backend, params) in &backends {
                agent.add_backend_with_params(backend, params)?;
            }
            Ok(agent)
        });
        let agent = made.or_raise(py)?;
        process::mark();
        Ok(Agent {
            name: agent.name(),
            engine: agent.engine(),
            why: agent.engine_reason().to_owned(),
            agent: Inherited::new(Mutex::new(Some(agent))),
            lent: Arc::default(),
        })
    }

    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    #[getter]
    fn engine(&self) -> String {
        self.engine.to_string()
    }

    #[getter]
    fn engine_reason(&self) -> &str {
        &self.why
    }

    fn backends(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        Ok(self.enter(py, "nixl")?.backends())
    }

    /// Registers the memory of an object, which is kept.
    fn register(&self, py: Python<'_>, data: &Bound<'_, PyAny>, source_only: bool) -> PyResult<Region> {
        let agent = self.enter(py, "register")?;
        let memory = Memory::of(data, ASKED)?;
        let read_only = memory.read_only || source_only;
        if memory.read_only && !source_only {
            return Err(ASKED.invalid(
                py,
                "its memory is read-only, and NIXL lets peers write whatever is registered; say source_only=True where no peer will",
            ));
        }
        let storage = memory.into_storage(py, ASKED)?;
        let registered = py.detach(|| storage.register(&agent, None)).or_raise(py)?;
        let descriptor = registered.descriptor();
        if let Some(lender) = Lender::of(data) {
            let end = descriptor.addr + descriptor.size as u64;
            self.lent.0.lock().insert(descriptor.addr, (end, Inherited::new(lender)));
        }
        Ok(Region {
            lent: Arc::clone(&self.lent),
            descriptor,
            read_only,
            holder: Inherited::new(Holder {
                state: Mutex::new(State { registered: Some(registered), closing: false }),
                ended: Condvar::new(),
            }),
        })
    }

    /// Metadata of everything, or of what covers these ranges.
    fn metadata<'py>(
        &self,
        py: Python<'py>,
        only: Option<(String, Ranges)>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let agent = self.enter(py, "metadata")?;
        self.lent.check(py, "metadata", only.as_ref().map(|(_, ranges)| &ranges.0[..]))?;
        let list = match only {
            None => None,
            Some((memory, ranges)) => {
                let mut list = RegDescList::new(kind(py, &memory)?).or_raise(py)?;
                for (address, len, device) in ranges.0 {
                    list.add_desc(address as usize, len as usize, device).or_raise(py)?;
                }
                Some(list)
            }
        };
        let bytes = py.detach(|| match &list {
            None => agent.get_local_md(),
            Some(list) => agent.get_local_partial_md(list, None),
        });
        Ok(PyBytes::new(py, &bytes.or_raise(py)?))
    }

    fn load(&self, py: Python<'_>, metadata: &[u8]) -> PyResult<String> {
        let agent = self.enter(py, "add_peer")?;
        py.detach(|| agent.load_remote_md(metadata)).or_raise(py)
    }

    fn knows(&self, py: Python<'_>, peer: &str, of: Option<(String, Ranges)>) -> PyResult<bool> {
        let agent = self.enter(py, "knows")?;
        let list = of.map(|(memory, ranges)| list(py, &memory, ranges)).transpose()?;
        Ok(py.detach(|| agent.check_remote_metadata(peer, list.as_ref())))
    }

    fn connect(&self, py: Python<'_>, peer: &str) -> PyResult<()> {
        let agent = self.enter(py, "connect")?;
        without_gil(py, || agent.make_connection(peer, None))?.or_raise(py)
    }

    fn forget(&self, py: Python<'_>, peer: &str) -> PyResult<()> {
        let agent = self.enter(py, "remove_peer")?;
        py.detach(|| agent.invalidate_remote_md(peer)).or_raise(py)
    }

    /// Starts a transfer.
    fn transfer(
        &self,
        py: Python<'_>,
        reads: bool,
        local: (String, Ranges),
        remote: (String, Ranges),
        peer: &str,
        notification: Option<&[u8]>,
    ) -> PyResult<Request> {
        let op = if reads { "read" } else { "write" };
        let agent = self.enter(py, op)?;
        self.lent.check(py, op, Some(&local.1.0))?;
        let (near, far) = (list(py, &local.0, local.1)?, list(py, &remote.0, remote.1)?);
        let op = if reads { XferOp::Read } else { XferOp::Write };
        let started = without_gil(py, || -> Result<Request> {
            let mut opt = OptArgs::new()?;
            if let Some(message) = notification {
                opt.set_notification_message(message)?;
                opt.set_has_notification(true)?;
            }
            let request = agent.create_xfer_req(op, &near, &far, peer, None)?;
            let going = agent.post_xfer_req(&request, Some(&opt))?;
            let end = (!going).then_some(Ok(()));
            Ok(Request(Inherited::new(Mutex::new(Progress { request: Some(request), end }))))
        });
        started?.or_raise(py)
    }

    fn notify(&self, py: Python<'_>, peer: &str, message: &[u8]) -> PyResult<()> {
        let agent = self.enter(py, "notify")?;
        without_gil(py, || agent.send_notification(peer, message, None))?.or_raise(py)
    }

    /// The messages that have come, by who sent them; waits for the first one for at most that long.
    fn receive<'py>(
        &self,
        py: Python<'py>,
        timeout: Option<f64>,
    ) -> PyResult<HashMap<String, Vec<Bound<'py, PyBytes>>>> {
        let agent = self.enter(py, "receive")?;
        let timeout = seconds(py, "receive", "timeout", timeout)?.unwrap_or(Duration::MAX);
        let mut came = NotificationMap::new().or_raise(py)?;
        attentively(py, timeout, |time| agent.wait_notifications(&mut came, time))?;
        let came = came.take_notifs().or_raise(py)?.into_iter();
        Ok(came
            .map(|(peer, messages)| (peer, messages.iter().map(|one| PyBytes::new(py, one)).collect()))
            .collect())
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        process::guard(py, "nixl")?;
        let agent = self.agent.lock().take();
        py.detach(|| drop(agent));
        Ok(())
    }
}

/// Waits in parts, so that a signal such as Ctrl-C ends the wait.
fn attentively(
    py: Python<'_>,
    time: Duration,
    mut wait: impl FnMut(Duration) -> Result<bool> + Send,
) -> PyResult<bool> {
    let start = Instant::now();
    loop {
        let left = time.saturating_sub(start.elapsed());
        if py.detach(|| wait(left.min(ATTENTION))).or_raise(py)? {
            return Ok(true);
        }
        if start.elapsed() >= time {
            return Ok(false);
        }
        py.check_signals()?;
    }
}

/// Memory that is registered with an agent.
#[pyclass(frozen, name = "NixlRegion", module = "towline._native")]
pub(crate) struct Region {
    holder: Inherited<Holder>,
    lent: Arc<Lent>,
    descriptor: NixlDescriptor,
    read_only: bool,
}

/// The registration, which can be taken out when it is closed.
struct Holder {
    state: Mutex<State>,
    ended: Condvar,
}

struct State {
    registered: Option<NixlRegistered<Buffer>>,
    /// A thread closes it.
    closing: bool,
}

impl Holder {
    /// Deregisters. Where another thread does that, waits for what becomes of it. No lock is held while peers are waited for: a thread that
    /// has the GIL may ask meanwhile whether it is closed.
    fn close(&self, within: Duration) -> Result<()> {
        let began = Instant::now();
        let left = || within.saturating_sub(began.elapsed());
        let mut state = self.state.lock();
        let late = self.ended.wait_while_for(&mut state, |state| state.closing, within);
        if late.timed_out() && state.closing {
            let message = "another thread closes the region, and still waits for those inside";
            return Err(Error::new(Kind::Timeout, "deregister", message));
        }
        let Some(registered) = state.registered.take() else { return Ok(()) };
        state.closing = true;
        drop(state);
        let closed = registered.into_storage_within(left());
        let mut state = self.state.lock();
        state.closing = false;
        let (storage, closed) = match closed {
            Ok(storage) => (Some(storage), Ok(())),
            Err(RegisterError { error, storage }) => {
                state.registered = storage;
                (None, Err(error))
            }
        };
        drop(state);
        self.ended.notify_all();
        drop(storage);
        closed
    }
}

#[pymethods]
impl Region {
    /// The kind of memory, and its one range.
    #[getter]
    fn descriptor(&self) -> (&'static str, Range) {
        let NixlDescriptor { addr, size, mem_type, device_id } = self.descriptor;
        (name_of(mem_type), (addr, size as u64, device_id))
    }

    #[getter]
    fn read_only(&self) -> bool {
        self.read_only
    }

    #[getter]
    fn closed(&self) -> bool {
        process::in_child() || {
            let state = self.holder.state.lock();
            state.closing || state.registered.is_none()
        }
    }

    /// Deregisters; where the memory is still in use, raises and stays open.
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        process::guard(py, "deregister")?;
        let within = seconds(py, "deregister", "timeout", timeout)?;
        let within = within.unwrap_or(Limits::default().no_progress);
        let closed = in_turns(py, within, |turn| self.holder.close(turn));
        owners::release(py);
        closed?.or_raise(py)?;
        self.lent.forget(self.descriptor.addr);
        Ok(())
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if !process::in_child() {
            let registered = self.holder.state.lock().registered.take();
            if Python::try_attach(|py| py.detach(|| drop(registered))).is_some() {
                Python::try_attach(|_| self.lent.forget(self.descriptor.addr));
                Python::try_attach(owners::release);
            }
        }
    }
}

/// A transfer that was posted.
#[pyclass(frozen, name = "NixlRequest", module = "towline._native")]
pub(crate) struct Request(Inherited<Mutex<Progress>>);

struct Progress {
    request: Option<XferRequest>,
    end: Option<Result<()>>,
}

impl Progress {
    /// Whether it has ended, by then at the latest. NIXL lets go of the memory with the request.
    fn ended(&mut self, within: Duration) -> bool {
        if self.end.is_none() {
            self.end = match self.request.as_ref().map(|request| request.wait_for(within)) {
                Some(Ok(false)) => None,
                Some(Err(error)) => Some(Err(error)),
                Some(Ok(true)) | None => Some(Ok(())),
            };
        }
        if self.end.is_some() {
            drop(self.request.take());
        }
        self.end.is_some()
    }
}

#[pymethods]
impl Request {
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        process::guard(py, "transfer")?;
        Ok(py.detach(|| self.0.lock().ended(Duration::ZERO)))
    }

    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        process::guard(py, "transfer")?;
        let timeout = seconds(py, "wait", "timeout", timeout)?.unwrap_or(Duration::MAX);
        attentively(py, timeout, |time| Ok(self.0.lock().ended(time)))
    }

    /// Why it has failed, where it has.
    #[pyo3(signature = () -> "Error | None")]
    fn error<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        process::guard(py, "transfer")?;
        owners::release(py);
        let error = self.0.lock().end.clone().and_then(Result::err);
        error.map(|error| exception(py, &error)).transpose()
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if !process::in_child() {
            let request = self.0.lock().request.take();
            Python::try_attach(|py| py.detach(|| drop(request)));
        }
    }
}
