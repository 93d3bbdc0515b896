//! Registered memory.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use pyo3::prelude::*;
use pyo3::types::PyAny;
use towline::{Access, Buffer, Error, Kind, MemoryDescription, Place, Registered, Result, StillPinned};

use crate::audit::Audit;
use crate::completions::{ATTENTION, in_turns};
use crate::errors::{OrRaise, invalid, raise};
use crate::layout::Layout;
use crate::lender::Lender;
use crate::number::Number;
use crate::owners;
use crate::process::{self, Inherited};
use crate::request::seconds;
use crate::ticket::Ticket;

/// Memory that other workers can reach.
///
/// The object whose memory it is stays alive while the region does. Closing waits until no peer is inside a copy;
/// so does leaving a ``with`` block. A region that is dropped instead is taken back too, without the waiting.
#[pyclass(frozen, weakref, module = "towline")]
pub(crate) struct Region {
    holder: Inherited<Arc<Holder>>,
    nbytes: usize,
    access: Access,
    place: Place,
    kind: String,
    read_only: bool,
    /// How long closing waits where the call does not say.
    limit: Duration,
}

/// The registration, which can be taken out when it is closed.
struct Holder {
    state: Mutex<State>,
    left: Condvar,
    /// Whose memory it is, where that can be asked. Touched with the GIL held only.
    lender: Mutex<Option<Lender>>,
}

struct State {
    registered: Option<Arc<Registered<Buffer>>>,
    /// A thread closes it, and waits for those who are inside.
    closing: bool,
}

impl Holder {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn enter(&self, op: &'static str) -> Result<Arc<Registered<Buffer>>> {
        let state = self.lock();
        match &state.registered {
            Some(registered) if !state.closing => Ok(Arc::clone(registered)),
            _ => Err(Error::invalid(op, "the region is closed")),
        }
    }

    fn leave(&self, registered: Arc<Registered<Buffer>>) {
        // Inside the lock, so that the thread that closes does not miss it.
        let state = self.lock();
        drop(registered);
        drop(state);
        self.left.notify_all();
    }

    /// Looks whether the memory is still the lender's. Where it is not, peers are kept out from now on.
    fn check(&self, py: Python<'_>, op: &'static str) -> PyResult<()> {
        let lender = self.lender.lock().as_ref().map(|one| one.again(py));
        // After the lock: asking the lender runs Python code.
        let checked = lender.map_or(Ok(()), |lender| lender.check(py, op));
        if checked.is_err() {
            // A peer may still be inside: then the region stays, and the thread that closes it waits for it.
            let _ = py.detach(|| self.close(Duration::ZERO));
        }
        checked
    }

    /// Deregisters. Where another thread does that, waits for what becomes of it.
    fn close(&self, within: Duration) -> Result<()> {
        let until = Instant::now() + within;
        let mut state = self.lock();
        while state.closing {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let message = "another thread closes the region, and still waits for those inside";
                return Err(Error::new(Kind::Timeout, "deregister", message));
            }
            self.left.wait_for(&mut state, left);
        }
        let Some(mut registered) = state.registered.take() else { return Ok(()) };
        state.closing = true;
        let registered = loop {
            match Arc::try_unwrap(registered) {
                Ok(registered) => break registered,
                // Those inside look up at least every `ATTENTION`.
                Err(shared) => {
                    registered = shared;
                    self.left.wait(&mut state);
                }
            }
        };
        drop(state);
        let closed = registered.into_storage_within(until.saturating_duration_since(Instant::now()));
        let mut state = self.lock();
        state.closing = false;
        let (storage, closed) = match closed {
            Ok(storage) => (Some(storage), Ok(())),
            Err(StillPinned { error, registration }) => {
                state.registered = Some(Arc::new(registration));
                (None, Err(error))
            }
        };
        drop(state);
        self.left.notify_all();
        drop(storage);
        closed
    }
}

impl Region {
    /// `lender`: whose memory it is, where that can be asked.
    pub(crate) fn new(
        registered: Registered<Buffer>,
        lender: Option<Lender>,
        read_only: bool,
        limit: Duration,
    ) -> Region {
        Region {
            limit,
            nbytes: registered.size(),
            access: registered.access(),
            place: registered.place(),
            kind: registered.storage_kind().to_string(),
            read_only,
            holder: Inherited::new(Arc::new(Holder {
                state: Mutex::new(State { registered: Some(Arc::new(registered)), closing: false }),
                left: Condvar::new(),
                lender: Mutex::new(lender),
            })),
        }
    }

    fn with<T>(
        &self,
        py: Python<'_>,
        op: &'static str,
        work: impl FnOnce(&Registered<Buffer>) -> Result<T>,
    ) -> PyResult<T> {
        process::guard(py, op)?;
        owners::release(py);
        self.holder.check(py, op)?;
        let registered = self.holder.enter(op).or_raise(py)?;
        let done = work(&registered);
        self.holder.leave(registered);
        done.or_raise(py)
    }

    fn whole(&self, py: Python<'_>, op: &'static str) -> PyResult<Span> {
        let span = self.with(py, op, |registered| Ok(registered.into()))?;
        Ok(Span { span, read_only: self.read_only, holder: Arc::downgrade(&self.holder) })
    }
}

#[pymethods]
impl Region {
    /// What your own channel carries to another worker. A layout says how the region is divided into blocks.
    #[pyo3(signature = (layout=None))]
    fn ticket(&self, py: Python<'_>, layout: Option<&Layout>) -> PyResult<Ticket> {
        self.with(py, "ticket", |registered| match layout {
            Some(layout) => registered.ticket_with_layout(layout.0.clone()),
            None => registered.ticket(),
        })
        .map(Ticket)
    }

    /// Who used the region and who was refused, as far as the owner can see.
    fn audit(&self, py: Python<'_>) -> PyResult<Audit> {
        self.with(py, "audit", |registered| Ok(registered.audit())).map(Audit::from)
    }

    /// A part of the region: ``nbytes`` bytes from ``offset`` on, or all the rest.
    #[pyo3(signature = (offset, nbytes=None))]
    fn span(&self, py: Python<'_>, offset: Number, nbytes: Option<Number>) -> PyResult<Span> {
        self.whole(py, "span")?.span(py, offset, nbytes)
    }

    /// Waits until the 64-bit counter at that offset is at least that high, and returns it.
    #[pyo3(signature = (offset, at_least, timeout=30.0))]
    fn wait_signal(&self, py: Python<'_>, offset: Number, at_least: Number, timeout: f64) -> PyResult<u64> {
        process::guard(py, "wait_signal")?;
        let (offset, at_least) = (offset.0 as usize, at_least.0);
        let within = seconds(py, "wait_signal", "timeout", Some(timeout))?.unwrap_or_default();
        let until = Instant::now() + within;
        loop {
            // What others do to the memory wakes no waiter.
            self.holder.check(py, "wait_signal")?;
            let left = until.saturating_duration_since(Instant::now());
            let waited = py.detach(|| {
                let registered = self.holder.enter("wait_signal")?;
                let waited = registered.wait_signal(offset, at_least, left.min(ATTENTION));
                self.holder.leave(registered);
                waited
            });
            match waited {
                Err(error) if error.kind() == Kind::Timeout && left > ATTENTION => py.check_signals()?,
                Err(error) if error.kind() == Kind::Timeout => {
                    let message = format!("the counter did not reach {at_least} in {timeout} s");
                    return Err(raise(py, &Error::new(Kind::Timeout, "wait_signal", message)));
                }
                waited => return waited.or_raise(py),
            }
        }
    }

    /// Takes the memory back. Returns once no peer can touch it any more; closing twice is harmless.
    ///
    /// Raises ``Timeout`` when a peer is still inside a copy after ``timeout`` seconds: no new access can begin then,
    /// and closing can be tried again.
    #[pyo3(signature = (timeout=None))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        process::guard(py, "close")?;
        let within = seconds(py, "close", "timeout", timeout)?.unwrap_or(self.limit);
        let closed = in_turns(py, within, |turn| self.holder.close(turn));
        owners::release(py);
        closed?.or_raise(py)?;
        let lender = self.holder.lender.lock().take();
        drop(lender);
        Ok(())
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self, py: Python<'_>) -> PyResult<bool> {
        process::guard(py, "region")?;
        let state = self.holder.lock();
        Ok(state.closing || state.registered.as_ref().is_none_or(|registered| !registered.is_registered()))
    }

    /// How many bytes it has.
    #[getter]
    fn nbytes(&self) -> usize {
        self.nbytes
    }

    /// What peers may do with it.
    #[getter]
    fn access(&self) -> &'static str {
        self.access.name()
    }

    /// Where the bytes live.
    #[getter]
    fn place(&self) -> String {
        self.place.to_string()
    }

    /// What the memory is made of: ``shared`` memory can be mapped by peers, ``external`` cannot.
    #[getter]
    fn kind(&self) -> &str {
        &self.kind
    }

    /// Whether its bytes cannot be written, by any process: then it is no target for a read.
    #[getter]
    fn readonly(&self) -> bool {
        self.read_only
    }

    fn __len__(&self) -> usize {
        self.nbytes
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception: "object"))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<()> {
        self.close(py, None)
    }

    fn __repr__(&self) -> String {
        let state =
            if process::in_child() || self.holder.lock().registered.is_some() { "" } else { ", closed" };
        format!(
            "<Region: {} bytes at {} ({}), {}{state}>",
            self.nbytes,
            self.place,
            self.kind,
            self.access.name()
        )
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if process::in_child() {
            return;
        }
        drop(self.holder.lock().registered.take());
        // The object was kept for this region alone, most of the time: let it go now rather than at the next call.
        Python::try_attach(owners::release);
    }
}

/// A part of a region. It does not keep the region open; a transfer that uses it does.
#[pyclass(frozen, module = "towline")]
pub(crate) struct Span {
    span: towline::Span,
    read_only: bool,
    holder: Weak<Holder>,
}

impl Span {
    /// What it names, for a call that uses it.
    pub(crate) fn checked(&self, py: Python<'_>, op: &'static str) -> PyResult<towline::Span> {
        if let Some(holder) = self.holder.upgrade() {
            holder.check(py, op)?;
        }
        Ok(self.span.clone())
    }
}

#[pymethods]
impl Span {
    /// A part of this part.
    #[pyo3(signature = (offset, nbytes=None))]
    fn span(&self, py: Python<'_>, offset: Number, nbytes: Option<Number>) -> PyResult<Span> {
        let offset = offset.0 as usize;
        let len = nbytes.map_or(self.span.len().saturating_sub(offset), |nbytes| nbytes.0 as usize);
        let span = self.span.span(offset, len).or_raise(py)?;
        Ok(Span { span, read_only: self.read_only, holder: self.holder.clone() })
    }

    /// How many bytes it names.
    #[getter]
    fn nbytes(&self) -> usize {
        self.span.len()
    }

    /// Whether its bytes cannot be written, by any process.
    #[getter]
    fn readonly(&self) -> bool {
        self.read_only
    }

    fn __len__(&self) -> usize {
        self.span.len()
    }

    fn __repr__(&self) -> String {
        format!("<{:?}>", self.span)
    }
}

/// The local side of a transfer, from a `Region` or a `Span`.
pub(crate) fn local(op: &'static str, object: &Bound<'_, PyAny>, is_target: bool) -> PyResult<towline::Span> {
    let py = object.py();
    let (span, read_only) = if let Ok(region) = object.cast::<Region>() {
        let whole = region.get().whole(py, op)?;
        (whole.span, whole.read_only)
    } else if let Ok(span) = object.cast::<Span>() {
        (span.get().checked(py, op)?, span.get().read_only)
    } else {
        let kind = object.get_type().name()?;
        return Err(pyo3::exceptions::PyTypeError::new_err(format!(
            "local: a Region or a Span is needed, not {kind} (register it first)"
        )));
    };
    if is_target && read_only {
        return Err(invalid(
            py,
            op,
            "local: its memory is read-only, so nothing can be read into it".to_owned(),
        ));
    }
    Ok(span)
}

/// Refuses rights that read-only memory cannot give.
pub(crate) fn check_writable(py: Python<'_>, read_only: bool, access: Access) -> PyResult<()> {
    if read_only && access.contains(Access::WRITE) {
        return Err(raise(
            py,
            &Error::invalid("register", "obj: its memory is read-only, and access would let peers write it"),
        ));
    }
    Ok(())
}
