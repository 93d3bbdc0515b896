//! Whether an object still has the memory that was registered: a torch tensor's storage can be resized, moved or replaced, and a
//! NumPy array resized.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use towline::{Error, Kind};

use crate::errors::raise;

/// What became of the memory, and what to do about it.
pub(crate) const GONE: &str = "the storage of the tensor or array was resized, moved or replaced since its memory was registered: close the \
                               region before that, and register it again afterwards";

/// An object whose memory was registered, and where that was.
pub(crate) struct Lender {
    object: Py<PyAny>,
    seen: Seen,
}

/// Where an object's elements are, and the storage that they lie in.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Seen {
    data: usize,
    storage: usize,
    nbytes: usize,
}

impl Seen {
    /// `None` where the object is neither a tensor nor an array.
    fn look(object: &Bound<'_, PyAny>) -> PyResult<Option<Seen>> {
        // PyTorch before 2.0 has only the typed form.
        let storage = match object.getattr_opt("untyped_storage")? {
            None if object.hasattr("data_ptr")? => object.getattr_opt("storage")?,
            untyped => untyped,
        };
        if let Some(storage) = storage {
            let storage = storage.call0()?;
            return Ok(Some(Seen {
                data: object.call_method0("data_ptr")?.extract()?,
                storage: storage.call_method0("data_ptr")?.extract()?,
                nbytes: storage.call_method0("nbytes")?.extract()?,
            }));
        }
        // Other exporters of buffers keep them in place while a consumer holds one.
        if !object.hasattr("__array_interface__")? {
            return Ok(None);
        }
        let (data, nbytes) = match PyUntypedBuffer::get(object) {
            Ok(buffer) => (buffer.buf_ptr().addr(), buffer.len_bytes()),
            // NumPy exports no buffer of times, nor of types that are not its own.
            Err(_) => {
                let interface = object.getattr("__array_interface__")?;
                let (data, _): (usize, bool) = interface.get_item("data")?.extract()?;
                (data, object.getattr("nbytes")?.extract()?)
            }
        };
        Ok(Some(Seen { data, storage: data, nbytes }))
    }
}

impl Lender {
    /// Looks at an object whose memory is registered, or at the owner in a tuple of address, size and owner. `None` where it cannot
    /// be asked, or where its memory does not go away while it is used.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> Option<Lender> {
        let object = match object.cast::<PyTuple>() {
            Ok(tuple) => tuple.get_item(2).ok()?,
            Err(_) => object.clone(),
        };
        let seen = Seen::look(&object).ok()??;
        Some(Lender { object: object.unbind(), seen })
    }

    /// The same one, as it was seen.
    pub(crate) fn again(&self, py: Python<'_>) -> Lender {
        Lender { object: self.object.clone_ref(py), seen: self.seen }
    }

    /// Looks again: fails where the registered memory is not the object's any more.
    pub(crate) fn check(&self, py: Python<'_>, op: &'static str) -> PyResult<()> {
        if Seen::look(self.object.bind(py)).is_ok_and(|now| now == Some(self.seen)) {
            return Ok(());
        }
        Err(raise(py, &Error::new(Kind::Stale, op, GONE)))
    }
}
