//! Who asks an object for memory, which of it is the object's, and why some is refused.

use pyo3::prelude::*;
use towline::{Error, Kind, Layout};

use crate::errors::{invalid, raise};

/// Who asks for memory, for the messages: the operation, and the argument that is the object.
#[derive(Clone, Copy)]
pub(crate) struct Asked {
    pub(crate) op: &'static str,
    pub(crate) argument: &'static str,
    /// Memory of a device is refused, before the object is asked for it.
    pub(crate) host_only: bool,
    /// Memory with gaps is described by a layout, in the order of its elements. Otherwise it is refused, and the order does
    /// not matter.
    pub(crate) views: bool,
    /// The owner of memory of a GPU is asked to let the work end first that fills it.
    pub(crate) ordered: bool,
}

impl Asked {
    pub(crate) fn invalid(self, py: Python<'_>, message: &str) -> PyErr {
        invalid(py, self.op, format!("{}: {message}", self.argument))
    }
}

/// Which bytes from an object's first element on are the object's.
pub(crate) struct Extent {
    /// From the first of them to the last.
    pub(crate) len: usize,
    /// Where they have gaps or another order than their addresses.
    pub(crate) layout: Option<Layout>,
}

impl Extent {
    /// Of an array with that shape and those strides in bytes.
    pub(crate) fn of(
        py: Python<'_>,
        asked: Asked,
        item: u64,
        shape: &[u64],
        strides: &[i64],
    ) -> PyResult<Extent> {
        if item == 0 || shape.contains(&0) {
            return Ok(Extent { len: 0, layout: None });
        }
        let layout = Layout::strided(item, shape, strides);
        let (len, layout) = match layout {
            Ok(layout) if layout.block_count() == 1 => (layout.block_len(), None),
            Ok(layout) if asked.views => (layout.extent(), Some(layout)),
            Err(error) if asked.views => {
                let why = error.message();
                let message = format!(
                    "its memory has gaps (it is not contiguous) that no layout can say: {why}; use a contiguous copy"
                );
                return Err(asked.invalid(py, &message));
            }
            _ => return Err(not_contiguous(py, asked)),
        };
        let len = usize::try_from(len).map_err(|_| asked.invalid(py, "it is too large"))?;
        Ok(Extent { len, layout })
    }
}

pub(crate) fn holds_pointers(py: Python<'_>, asked: Asked) -> PyErr {
    asked
        .invalid(py, "its elements are Python objects or pointers, which mean nothing elsewhere; use numbers")
}

pub(crate) fn not_contiguous(py: Python<'_>, asked: Asked) -> PyErr {
    asked.invalid(py, "its memory has gaps (it is not contiguous); use a contiguous copy")
}

pub(crate) fn unsupported_place(py: Python<'_>, asked: Asked, place: &str) -> PyErr {
    let message =
        format!("{}: its memory is on {place}, and only host memory can be used here", asked.argument);
    raise(py, &Error::new(Kind::Unsupported, asked.op, message))
}
