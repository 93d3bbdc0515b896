//! The front door.

use std::net::SocketAddr;
use std::pin::Pin;
use std::task::Poll;
use std::time::Instant;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use towline::{Limits, NixlOptions, cuda, room};

use crate::asked::Asked;
use crate::attention::without_gil;
use crate::audit::Audit;
use crate::buffer::Memory;
use crate::completions::{Waiter, block_on, in_turns};
use crate::errors::{OrRaise, invalid};
use crate::import::Import;
use crate::lender::Lender;
use crate::number::Number;
use crate::process::{self, Inherited};
use crate::program::Program;
use crate::quotas::Quotas;
use crate::region::{self, Region};
use crate::remote::Remote;
use crate::request::{BlocksArgument, PartArgument, What, access, routing, seconds};
use crate::stats::Stats;
use crate::terms::{Terms, TermsArgument};
use crate::tls::Tls;
use crate::transfer::Transfer;
use crate::{owners, ticket};

const ASKED: Asked =
    Asked { op: "register", argument: "obj", host_only: false, views: false, ordered: false };

/// This process on the fabric.
#[pyclass(frozen, module = "towline._native")]
pub(crate) struct Endpoint(Inherited<towline::Endpoint>);

impl From<towline::Endpoint> for Endpoint {
    fn from(endpoint: towline::Endpoint) -> Endpoint {
        Endpoint(Inherited::new(endpoint))
    }
}

impl Endpoint {
    pub(crate) fn inner(&self) -> &towline::Endpoint {
        &self.0
    }

    fn enter(&self, py: Python<'_>, op: &'static str) -> PyResult<&towline::Endpoint> {
        process::guard(py, op)?;
        owners::release(py);
        Ok(&self.0)
    }
}

#[pymethods]
impl Endpoint {
    #[new]
    #[pyo3(signature = (name, *, listen, advertise, secret, timeout, stall_timeout, require, forbid, isolation,
                        max_regions, lanes, tls, checksums, quotas, share_between_containers, nixl_lend_over, nixl_reach_over))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn new(
        py: Python<'_>,
        name: &str,
        listen: Vec<String>,
        advertise: Vec<String>,
        secret: Option<&[u8]>,
        timeout: Option<f64>,
        stall_timeout: Option<f64>,
        require: Vec<String>,
        forbid: Vec<String>,
        isolation: Option<&str>,
        max_regions: Option<u32>,
        lanes: Option<usize>,
        tls: Option<&Tls>,
        checksums: bool,
        quotas: Option<&Quotas>,
        share_between_containers: bool,
        nixl_lend_over: Vec<String>,
        nixl_reach_over: Vec<String>,
    ) -> PyResult<Endpoint> {
        process::guard(py, "open")?;
        let mut options = towline::Endpoint::options(name);
        for address in &listen {
            options = options.listen(socket_address(py, "listen", address)?);
        }
        for address in &advertise {
            options = options.advertise(socket_address(py, "advertise", address)?);
        }
        if let Some(secret) = secret {
            options = options.secret(secret);
        }
        let mut limits = Limits::default();
        if let Some(total) = seconds(py, "open", "timeout", timeout)? {
            limits.total = total;
            limits.no_progress = limits.no_progress.min(total);
        }
        if let Some(stall) = seconds(py, "open", "stall_timeout", stall_timeout)? {
            limits.no_progress = stall;
        }
        options = options.limits(limits);
        if let Some(routing) = routing(py, &require, &forbid, isolation)? {
            options = options.routing(routing);
        }
        if let Some(regions) = max_regions {
            options = options.max_regions(regions);
        }
        if let Some(lanes) = lanes {
            options = options.lanes(lanes);
        }
        if let Some(tls) = tls {
            options = options.tls(tls.0.clone());
        }
        options = options.checksums(checksums).share_between_containers(share_between_containers);
        if let Some(quotas) = quotas {
            options = options.quotas(quotas.0);
        }
        options = options.nixl(match (nixl_lend_over.is_empty(), nixl_reach_over.is_empty()) {
            (false, false) => {
                let message = "nixl_lend_over names the devices for both: leave nixl_reach_over out";
                return Err(invalid(py, "open", message.to_owned()));
            }
            (false, true) => NixlOptions::default().lend_over(nixl_lend_over),
            _ => NixlOptions::default().reach_over(nixl_reach_over),
        });
        let endpoint = py.detach(|| options.open()).or_raise(py)?;
        process::mark();
        Ok(endpoint.into())
    }

    #[getter]
    fn name(&self) -> &str {
        &self.0.identity().name
    }

    /// The life of this endpoint, as hexadecimal digits: another one each time it is opened.
    #[getter]
    fn incarnation(&self) -> String {
        self.0.identity().incarnation.to_string()
    }

    fn register(&self, py: Python<'_>, obj: &Bound<'_, PyAny>, access: &str) -> PyResult<Region> {
        let endpoint = self.enter(py, "register")?;
        let access = self::access(py, "register", access)?;
        let memory = Memory::of(obj, ASKED)?;
        let (read_only, lender) = (memory.read_only, Lender::of(obj));
        region::check_writable(py, read_only, access)?;
        let storage = memory.into_storage(py, ASKED)?;
        let registered = py.detach(|| endpoint.register(storage, access));
        // A storage that was refused is dropped with the error, and its object can go.
        let registered = registered.or_raise(py);
        owners::release(py);
        Ok(Region::new(registered?, lender, read_only, endpoint.limits().no_progress))
    }

    #[pyo3(name = "import_", signature = (ticket: "Ticket | str | bytes | bytearray | memoryview", require, forbid, isolation, timeout))]
    fn import(
        &self,
        py: Python<'_>,
        ticket: &Bound<'_, PyAny>,
        require: Vec<String>,
        forbid: Vec<String>,
        isolation: Option<&str>,
        timeout: Option<f64>,
    ) -> PyResult<Remote> {
        let endpoint = self.enter(py, "import")?;
        let ticket = ticket::from_object(py, ticket)?;
        let routing = routing(py, &require, &forbid, isolation)?;
        let routing = routing.as_ref().unwrap_or(endpoint.routing());
        let within = seconds(py, "import", "timeout", timeout)?.unwrap_or(endpoint.limits().no_progress);
        let remote = without_gil(py, || endpoint.import_within(&ticket, routing, within))?;
        remote.map(|remote| Remote(Inherited::new(remote))).or_raise(py)
    }

    /// Makes many tickets usable here, with one round trip for each owner. What is wrong with one of them is raised for all.
    #[pyo3(signature = (tickets: "Iterable[Ticket | str | bytes | bytearray | memoryview]", require, forbid, isolation, timeout))]
    fn import_many(
        &self,
        py: Python<'_>,
        tickets: &Bound<'_, PyAny>,
        require: Vec<String>,
        forbid: Vec<String>,
        isolation: Option<&str>,
        timeout: Option<f64>,
    ) -> PyResult<Vec<Remote>> {
        let endpoint = self.enter(py, "import")?;
        let mut all = Vec::new();
        for one in tickets.try_iter()? {
            room::push("import", &mut all, ticket::from_object(py, &one?)?).or_raise(py)?;
        }
        let routing = routing(py, &require, &forbid, isolation)?;
        let routing = routing.as_ref().unwrap_or(endpoint.routing());
        let within = seconds(py, "import", "timeout", timeout)?.unwrap_or(endpoint.limits().no_progress);
        let imported =
            without_gil(py, || endpoint.import_many_within(&all, routing, within))?.or_raise(py)?;
        let number = |(number, remote): (usize, towline::Result<towline::Remote>)| {
            let of = |error: towline::Error| {
                let message = format!("ticket {number}: {}", error.message());
                error.saying(message)
            };
            remote.map_err(of).map(|remote| Remote(Inherited::new(remote)))
        };
        imported.into_iter().enumerate().map(number).collect::<towline::Result<_>>().or_raise(py)
    }

    #[pyo3(signature = (ticket: "Ticket | str | bytes | bytearray | memoryview", require, forbid, isolation, timeout))]
    fn start_import(
        &self,
        py: Python<'_>,
        ticket: &Bound<'_, PyAny>,
        require: Vec<String>,
        forbid: Vec<String>,
        isolation: Option<&str>,
        timeout: Option<f64>,
    ) -> PyResult<Import> {
        let endpoint = self.enter(py, "import")?;
        let ticket = ticket::from_object(py, ticket)?;
        let routing = routing(py, &require, &forbid, isolation)?;
        let routing = routing.as_ref().unwrap_or(endpoint.routing());
        let within = seconds(py, "import", "timeout", timeout)?.unwrap_or(endpoint.limits().no_progress);
        Ok(Import::new(endpoint.import_async_within(&ticket, routing, within)))
    }

    /// Starts a read (or, with `writes`, a write).
    #[allow(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    #[pyo3(signature = (writes, remote, local: "Region | Span", at: "int | tuple[int, int, int] | None", spans, blocks, terms))]
    fn start(
        &self,
        py: Python<'_>,
        writes: bool,
        remote: &Bound<'_, Remote>,
        local: &Bound<'_, PyAny>,
        at: Option<&Bound<'_, PyAny>>,
        spans: Option<&Bound<'_, PyAny>>,
        blocks: Option<BlocksArgument<'_>>,
        terms: TermsArgument,
    ) -> PyResult<Transfer> {
        let op = if writes { "write" } else { "read" };
        let endpoint = self.enter(py, op)?;
        let local = region::local(op, local, !writes)?;
        let what = What::from_objects(py, op, at, spans, blocks)?;
        let terms = Terms::from_argument(py, op, terms)?;
        let remote = &*remote.get().0;
        let started = py.detach(|| {
            let len = local.len();
            let request = if writes { endpoint.write(remote, local) } else { endpoint.read(remote, local) };
            terms.apply(what.apply(request, len)).start()
        });
        started.map(Transfer::new).or_raise(py)
    }

    /// Starts a read (or, with `writes`, a write) of several parts.
    #[allow(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    #[pyo3(signature = (writes, parts: "Iterable[tuple[Remote, Region | Span, int | tuple[int, int, int] | None, Any, tuple[Layout, Any, Layout, Any] | None]]", at: "int | tuple[int, int, int] | None",
                        spans, blocks, terms))]
    fn start_parts(
        &self,
        py: Python<'_>,
        writes: bool,
        parts: &Bound<'_, PyAny>,
        at: Option<&Bound<'_, PyAny>>,
        spans: Option<&Bound<'_, PyAny>>,
        blocks: Option<BlocksArgument<'_>>,
        terms: TermsArgument,
    ) -> PyResult<Transfer> {
        let op = if writes { "write" } else { "read" };
        let endpoint = self.enter(py, op)?;
        let of_all = What::from_objects(py, op, at, spans, blocks)?;
        let mut given = Vec::new();
        for part in parts.try_iter()? {
            let (remote, local, at, spans, blocks): PartArgument<'_> = part?.extract()?;
            let local = region::local(op, &local, !writes)?;
            let own = What::from_objects(py, op, at.as_ref(), spans.as_ref(), blocks)?;
            room::push(op, &mut given, (remote, local, own)).or_raise(py)?;
        }
        let terms = Terms::from_argument(py, op, terms)?;
        let started = py.detach(|| {
            let parts = given.iter().map(|(remote, local, own)| {
                let part = towline::Part::new(&remote.get().0, local.clone());
                let what = if matches!(own, What::Whole) { &of_all } else { own };
                what.apply_to(part, local.len())
            });
            let request = if writes { endpoint.write_parts(parts) } else { endpoint.read_parts(parts) };
            terms.apply(request).start()
        });
        started.map(Transfer::new).or_raise(py)
    }

    /// Compiles a request over those parts, to be started many times with nothing but indices.
    #[pyo3(signature = (parts: "Iterable[tuple[Remote, Region | Span, Layout, Layout]]"))]
    fn program(&self, py: Python<'_>, parts: &Bound<'_, PyAny>) -> PyResult<Program> {
        Program::compile(py, self.enter(py, "program")?, parts)
    }

    fn fetch_add(
        &self,
        py: Python<'_>,
        remote: &Bound<'_, Remote>,
        offset: Number,
        add: Number,
    ) -> PyResult<Transfer> {
        let endpoint = self.enter(py, "fetch_add")?;
        let remote = &*remote.get().0;
        py.detach(|| endpoint.fetch_add(remote, offset.0, add.0)).map(Transfer::new).or_raise(py)
    }

    fn compare_swap(
        &self,
        py: Python<'_>,
        remote: &Bound<'_, Remote>,
        offset: Number,
        expected: Number,
        new: Number,
    ) -> PyResult<Transfer> {
        let endpoint = self.enter(py, "compare_swap")?;
        let remote = &*remote.get().0;
        py.detach(|| endpoint.compare_swap(remote, offset.0, expected.0, new.0))
            .map(Transfer::new)
            .or_raise(py)
    }

    fn signal(
        &self,
        py: Python<'_>,
        remote: &Bound<'_, Remote>,
        offset: Number,
        add: Number,
    ) -> PyResult<Transfer> {
        let endpoint = self.enter(py, "signal")?;
        let remote = &*remote.get().0;
        py.detach(|| endpoint.signal(remote, offset.0, add.0)).map(Transfer::new).or_raise(py)
    }

    fn notify(&self, py: Python<'_>, remote: &Bound<'_, Remote>, message: &[u8]) -> PyResult<Transfer> {
        let endpoint = self.enter(py, "notify")?;
        let remote = &*remote.get().0;
        let message = room::copy("notify", message).or_raise(py)?;
        py.detach(|| endpoint.notify(remote, message)).map(Transfer::new).or_raise(py)
    }

    /// The next message, waiting for at most that many seconds; `None` when none came.
    fn receive(&self, py: Python<'_>, timeout: f64) -> PyResult<Option<Notification>> {
        self.enter(py, "receive")?;
        let until = seconds(py, "receive", "timeout", Some(timeout))?.map(|time| Instant::now() + time);
        let mut next = self.0.next_notification();
        match block_on(py, until, |context| Pin::new(&mut next).poll(context))? {
            Some(received) => received.map(|notification| Some(Notification(notification))).or_raise(py),
            None => Ok(None),
        }
    }

    /// The next message if there is one; otherwise the waiter is woken when one comes.
    fn poll_receive(&self, py: Python<'_>, waiter: &Waiter) -> PyResult<Option<Notification>> {
        self.enter(py, "receive")?;
        match waiter.poll_next(&self.0) {
            Poll::Ready(received) => {
                received.map(|notification| Some(Notification(notification))).or_raise(py)
            }
            Poll::Pending => Ok(None),
        }
    }

    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        Ok(self.enter(py, "stats")?.stats().into())
    }

    fn audit(&self, py: Python<'_>) -> PyResult<Audit> {
        Ok(self.enter(py, "audit")?.audit().into())
    }

    fn metrics(&self, py: Python<'_>) -> PyResult<String> {
        let endpoint = self.enter(py, "metrics")?;
        Ok(py.detach(|| endpoint.metrics()))
    }

    /// How long closing waits where the call does not say.
    #[getter]
    fn stall_timeout(&self) -> f64 {
        self.0.limits().no_progress.as_secs_f64()
    }

    /// Closes; waits for at most that many seconds, or for the endpoint's limit, until nobody is inside its memory.
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let endpoint = self.enter(py, "close")?;
        let within = seconds(py, "close", "timeout", timeout)?.unwrap_or(endpoint.limits().no_progress);
        let closed = in_turns(py, within, |turn| endpoint.close_within(turn));
        owners::release(py);
        closed?.or_raise(py)
    }
}

/// A message from a peer.
#[pyclass(frozen, module = "towline")]
pub(crate) struct Notification(towline::Notification);

#[pymethods]
impl Notification {
    /// The name of the endpoint that sent it.
    #[getter]
    fn sender(&self) -> &str {
        &self.0.from.name
    }

    /// What was sent.
    #[getter]
    fn message<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.message)
    }

    fn __repr__(&self) -> String {
        format!("<Notification from {}: {} bytes>", self.0.from.name, self.0.message.len())
    }
}

/// The names of the paths, the most preferred first.
#[pyfunction]
pub(crate) fn paths() -> Vec<&'static str> {
    towline::path_names()
}

/// The GPU whose memory is at that address; `None` where no GPU has it, or without a driver.
#[pyfunction]
pub(crate) fn cuda_device_of(address: u64) -> Option<u32> {
    cuda::device_of(address).ok().flatten()
}

fn socket_address(py: Python<'_>, argument: &str, text: &str) -> PyResult<SocketAddr> {
    text.parse().map_err(|_| {
        invalid(
            py,
            "open",
            format!("{argument}: {text:?} is not an address and a port, such as 10.0.0.5:7000 or [::1]:0"),
        )
    })
}
