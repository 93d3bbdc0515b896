//! Tickets.

use std::time::Duration;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyRange, PyRangeMethods, PyType};

use towline::Error;
use towline::ticket::MAX_TICKET;

use crate::errors::{OrRaise, invalid, raise};
use crate::layout::Layout;
use crate::request::{access, seconds};

/// What your own channel carries to another worker: who owns a region, how to reach them, and what is allowed.
///
/// Everyone who holds a ticket may use it: treat its text like a password. ``repr`` never shows the secret part.
#[pyclass(frozen, eq, module = "towline")]
#[derive(PartialEq, Eq)]
pub(crate) struct Ticket(pub(crate) towline::Ticket);

#[pymethods]
impl Ticket {
    #[new]
    #[pyo3(signature = (ticket: "Ticket | str | bytes | bytearray | memoryview"))]
    fn new(py: Python<'_>, ticket: &Bound<'_, PyAny>) -> PyResult<Ticket> {
        from_object(py, ticket).map(Ticket)
    }

    /// The ticket that allows less: only those bytes, only those rights, only for that many seconds.
    ///
    /// ``range`` counts from the start of the present range. ``lease`` counts from the moment at which the owner made
    /// the first ticket.
    #[pyo3(signature = (*, range: "builtins.range | None" = None, access=None, lease=None))]
    fn narrow(
        &self,
        py: Python<'_>,
        range: Option<&Bound<'_, PyRange>>,
        access: Option<&str>,
        lease: Option<f64>,
    ) -> PyResult<Ticket> {
        let mut narrow = self.0.narrow();
        if let Some(range) = range {
            let bounds = (range.step()?, range.start()?, range.stop()?);
            let (offset, len) = match bounds {
                (1, start, stop) if start >= 0 && stop > start => (start as u64, (stop - start) as u64),
                _ => {
                    let given = range.repr()?.to_string();
                    return Err(invalid(py, "narrow", format!("range: {given} does not name bytes")));
                }
            };
            narrow = narrow.range(offset, len);
        }
        if let Some(access) = access {
            narrow = narrow.access(self::access(py, "narrow", access)?);
        }
        if let Some(lease) = seconds(py, "narrow", "lease", lease)? {
            narrow = narrow.lease(Duration::max(lease, Duration::from_millis(1)));
        }
        narrow.finish().map(Ticket).or_raise(py)
    }

    /// The name of the endpoint that owns the region.
    #[getter]
    fn owner(&self) -> &str {
        &self.0.body().identity.name
    }

    /// How many bytes may be touched.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.length()
    }

    /// The bytes that may be touched, counted from the start of the region.
    #[getter]
    fn range<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyRange>> {
        let range = self.0.range();
        PyRange::new(py, isize::try_from(range.start)?, isize::try_from(range.end)?)
    }

    /// What may be done with them: ``none``, ``read``, ``write`` or ``read+write``.
    #[getter]
    fn access(&self) -> &'static str {
        self.0.access().name()
    }

    /// Where the bytes live: ``host``, ``cuda:0`` and so on.
    #[getter]
    fn place(&self) -> String {
        self.0.body().place.to_string()
    }

    /// The layout of the region, where it has one and the ticket covers all of it.
    #[getter]
    fn layout(&self) -> Option<Layout> {
        self.0.layout().cloned().map(Layout)
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.encode())
    }

    fn __hash__(&self) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        self.0.encode().hash(&mut hasher);
        hasher.finish()
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> (Bound<'py, PyType>, (Bound<'py, PyBytes>,)) {
        (py.get_type::<Ticket>(), (self.__bytes__(py),))
    }

    fn __repr__(&self) -> String {
        let range = self.0.range();
        format!(
            "<Ticket of {} for {} {} bytes from {}, {}>",
            self.owner(),
            self.nbytes(),
            self.place(),
            range.start,
            self.access()
        )
    }
}

/// A ticket from a `Ticket`, its text or its bytes.
pub(crate) fn from_object(py: Python<'_>, object: &Bound<'_, PyAny>) -> PyResult<towline::Ticket> {
    if let Ok(ticket) = object.cast::<Ticket>() {
        return Ok(ticket.get().0.clone());
    }
    if let Ok(text) = object.extract::<&str>() {
        return text.parse().or_raise(py);
    }
    let Ok(buffer) = PyBuffer::<u8>::get(object) else {
        let kind = object.get_type().name()?;
        return Err(PyTypeError::new_err(format!("ticket: a Ticket, str or bytes is needed, not {kind}")));
    };
    // Refused before it is copied.
    if buffer.len_bytes() > MAX_TICKET {
        return Err(raise(py, &Error::protocol("ticket", "a ticket is at most 4096 bytes long")));
    }
    towline::Ticket::decode(&buffer.to_vec(py)?).or_raise(py)
}
