//! What makes operations.
#![allow(unsafe_code, reason = "passes on a stream that the caller vouches for")]

use std::task::{Context, Poll};

use parking_lot::{Mutex, MutexGuard};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use towline::Result;
use towline::connect::{self, OperationKind};
use towline::cuda::StreamHandle;

use super::descriptor::Descriptor;
use super::metadata;
use super::operation::{Operation, Started};
use crate::completions::{Waiter, block_on, in_turns};
use crate::endpoint::Endpoint;
use crate::errors::{OrRaise, invalid};
use crate::owners;
use crate::process::{self, Inherited};
use crate::request::seconds;

/// Makes operations over one endpoint, which is opened when it is first needed.
#[pyclass(frozen, module = "towline._native")]
pub(crate) struct Connector(Inherited<connect::Connector>);

impl Connector {
    pub(crate) fn inner(&self) -> &connect::Connector {
        &self.0
    }

    /// Sees to it that the endpoint is open, and that forked children know.
    pub(crate) fn open(&self, py: Python<'_>, op: &'static str) -> PyResult<&connect::Connector> {
        process::guard(py, op)?;
        owners::release(py);
        py.detach(|| self.0.endpoint()).or_raise(py)?;
        process::mark();
        Ok(&self.0)
    }
}

fn reads(kind: u8) -> PyResult<bool> {
    match OperationKind::from_code(kind) {
        Some(OperationKind::Read) => Ok(true),
        Some(OperationKind::Write) => Ok(false),
        _ => Err(PyTypeError::new_err("kind: neither a read nor a write")),
    }
}

fn descriptors(
    py: Python<'_>,
    op: &'static str,
    local: Vec<Bound<'_, Descriptor>>,
    stream: Option<usize>,
) -> PyResult<connect::Descriptors> {
    let local: Vec<_> =
        local.iter().map(|one| one.get().checked(py, op).cloned()).collect::<PyResult<_>>()?;
    let local = connect::Descriptors::from(local);
    Ok(match stream {
        // SAFETY: the caller vouches for the stream, as for all that it hands to CUDA.
        Some(stream) => unsafe { local.stream(StreamHandle(stream)) },
        None => local,
    })
}

#[pymethods]
impl Connector {
    /// Under that name, or a random one; or over an endpoint that is open.
    #[new]
    fn new(
        py: Python<'_>,
        name: Option<&str>,
        endpoint: Option<&Bound<'_, Endpoint>>,
    ) -> PyResult<Connector> {
        process::guard(py, "connector")?;
        let connector = match (endpoint, name) {
            (Some(endpoint), _) => Ok(connect::Connector::with_endpoint(endpoint.get().inner().clone())),
            (None, Some(name)) => connect::Connector::named(name),
            (None, None) => connect::Connector::new(),
        };
        connector.map(|connector| Connector(Inherited::new(connector))).or_raise(py)
    }

    #[getter]
    fn name(&self) -> &str {
        self.0.name()
    }

    #[getter]
    fn hostname(&self) -> &str {
        self.0.hostname()
    }

    /// The endpoint, opened now if it was not.
    fn endpoint(&self, py: Python<'_>) -> PyResult<Endpoint> {
        let endpoint = self.open(py, "connector")?.endpoint();
        endpoint.map(Endpoint::from).or_raise(py)
    }

    /// Offers memory for one peer; `unclaimed` is how many seconds it waits for one, `None` for ever. With a stream, nobody
    /// claims it before the work there is done.
    #[pyo3(signature = (kind, local, unclaimed, stream=None))]
    fn create(
        &self,
        py: Python<'_>,
        kind: u8,
        local: Vec<Bound<'_, Descriptor>>,
        unclaimed: Option<f64>,
        stream: Option<usize>,
    ) -> PyResult<Operation> {
        let (reads, local) = (reads(kind)?, descriptors(py, "create", local, stream)?);
        let op = if reads { "create_readable" } else { "create_writable" };
        let unclaimed = seconds(py, op, "unclaimed_timeout", unclaimed)?;
        let connector = self.open(py, op)?;
        let started = py.detach(|| {
            Ok(if reads {
                Started::Readable(connector.create_readable_within(local, unclaimed)?)
            } else {
                Started::Writable(connector.create_writable_within(local, unclaimed)?)
            })
        });
        started.map(Operation::new).map_err(|error: towline::Error| error.during(op)).or_raise(py)
    }

    /// Starts to claim an operation of a peer, to read from it or to write to it, in the order of a stream if there is one.
    #[pyo3(signature = (kind, remote: "tuple[list[tuple[str, int, int]], str, str, int]", local, stream=None))]
    fn begin(
        &self,
        py: Python<'_>,
        kind: u8,
        remote: &Bound<'_, PyAny>,
        local: Vec<Bound<'_, Descriptor>>,
        stream: Option<usize>,
    ) -> PyResult<Beginning> {
        let (reads, local) = (reads(kind)?, descriptors(py, "begin", local, stream)?);
        let remote = metadata::from_fields(remote)?;
        let connector = self.open(py, if reads { "begin_read" } else { "begin_write" })?;
        let claiming: connect::Beginning<Started> = py.detach(|| {
            if reads {
                let begun = connector.begin_read_async(&remote, local);
                Box::pin(async move { begun.await.map(Started::Read) })
            } else {
                let begun = connector.begin_write_async(local, &remote);
                Box::pin(async move { begun.await.map(Started::Write) }) as connect::Beginning<Started>
            }
        });
        Ok(Beginning(Inherited::new(Mutex::new(Some(State::Claiming(claiming))))))
    }

    /// How long closing waits where the call does not say.
    #[getter]
    fn stall_timeout(&self) -> f64 {
        self.0.limits().no_progress.as_secs_f64()
    }

    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        process::guard(py, "close")?;
        let within = seconds(py, "close", "timeout", timeout)?.unwrap_or(self.0.limits().no_progress);
        let closed = in_turns(py, within, |turn| self.0.close_within(turn));
        owners::release(py);
        closed?.or_raise(py)
    }

    fn __repr__(&self) -> String {
        format!("{:?}", *self.0)
    }
}

/// An active operation that is about to begin. Dropping it gives the claim back.
#[pyclass(frozen, module = "towline._native")]
pub(crate) struct Beginning(Inherited<Mutex<Option<State>>>);

enum State {
    Claiming(connect::Beginning<Started>),
    Begun(Result<Started>),
}

impl Beginning {
    fn lock(&self) -> MutexGuard<'_, Option<State>> {
        self.0.lock()
    }

    /// Without the GIL, since small copies happen in here.
    fn poll_once(&self, py: Python<'_>, waker: &std::task::Waker) -> bool {
        py.detach(|| {
            let mut state = self.lock();
            if let Some(State::Claiming(claiming)) = &mut *state
                && let Poll::Ready(begun) = claiming.as_mut().poll(&mut Context::from_waker(waker))
            {
                *state = Some(State::Begun(begun));
            }
            !matches!(&*state, Some(State::Claiming(_)))
        })
    }
}

#[pymethods]
impl Beginning {
    /// Whether it has begun or failed; if not, the waiter is woken when there is news.
    fn poll(&self, py: Python<'_>, waiter: &Waiter) -> PyResult<bool> {
        process::guard(py, "begin")?;
        Ok(self.poll_once(py, waiter.context().waker()))
    }

    /// Blocks until it has begun or failed. The endpoint's limits bound it.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        process::guard(py, "begin")?;
        block_on(py, None, |context| {
            if self.poll_once(py, context.waker()) { Poll::Ready(()) } else { Poll::Pending }
        })?;
        Ok(())
    }

    /// The operation, once; or raises why there is none.
    fn result(&self, py: Python<'_>) -> PyResult<Operation> {
        process::guard(py, "begin")?;
        owners::release(py);
        let mut state = self.lock();
        match state.take() {
            Some(State::Begun(begun)) => {
                drop(state);
                begun.map(Operation::new).or_raise(py)
            }
            other => {
                *state = other;
                drop(state);
                Err(invalid(py, "begin", "the operation is about to begin, or was taken".to_owned()))
            }
        }
    }

    /// Gives the claim back.
    fn abandon(&self, py: Python<'_>) {
        if !process::in_child() {
            let state = self.lock().take();
            py.detach(|| drop(state));
            owners::release(py);
        }
    }
}
