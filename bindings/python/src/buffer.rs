//! What memory a Python object has: where, how long, whether it may be written, and what keeps it.
#![allow(unsafe_code, reason = "vouches to the core for memory that Python keeps")]

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMemoryView, PyTuple};
use towline::{Buffer, Error, ExternalStorage, Kind, Place};

use crate::errors::{OrRaise, invalid, raise};
use crate::owners::OwnerToken;
use crate::{dlpack, shared};

/// Who asks for memory, for the messages: the operation, and the argument that is the object.
#[derive(Clone, Copy)]
pub(crate) struct Asked {
    pub(crate) op: &'static str,
    pub(crate) argument: &'static str,
    /// Memory of a device is refused, before the object is asked for it.
    pub(crate) host_only: bool,
}

impl Asked {
    pub(crate) fn invalid(self, py: Python<'_>, message: &str) -> PyErr {
        invalid(py, self.op, format!("{}: {message}", self.argument))
    }
}

/// The memory of a Python object.
pub(crate) struct Memory<'py> {
    pub(crate) addr: usize,
    pub(crate) len: usize,
    pub(crate) read_only: bool,
    /// DLPack's kind and number of the device where it is, unless that is the host.
    pub(crate) device: Option<(i32, i32)>,
    /// The type of its elements, where DLPack told.
    pub(crate) element: Option<dlpack::Type>,
    /// Keeps the bytes where they are for as long as it lives.
    owner: Option<Bound<'py, PyAny>>,
}

impl<'py> Memory<'py> {
    /// Finds the memory of anything that can tell: a tuple of address, size and owner, the buffer protocol,
    /// `__array_interface__` or DLPack.
    pub(crate) fn of(object: &Bound<'py, PyAny>, asked: Asked) -> PyResult<Memory<'py>> {
        let py = object.py();
        if let Ok(tuple) = object.cast::<PyTuple>() {
            let (addr, len, owner): (usize, usize, Bound<'py, PyAny>) = tuple.extract().map_err(|_| {
                PyTypeError::new_err(format!(
                    "{}: a tuple holds the address, the size in bytes and the owner (or None)",
                    asked.argument
                ))
            })?;
            return Ok(Memory::raw(addr, len, Some(owner)));
        }
        if let Ok(view) = PyMemoryView::from(object) {
            return of_buffer(view, asked);
        }
        if let Some(interface) = object.getattr_opt("__array_interface__")? {
            return of_array_interface(object, &interface, asked);
        }
        if object.hasattr("__cuda_array_interface__")? {
            return Err(unsupported_place(py, asked, "a CUDA device"));
        }
        if object.hasattr("__dlpack__")? {
            let dlpack::Exported { addr, len, read_only, device, element, owner } =
                dlpack::import(object, asked)?;
            return Ok(Memory { addr, len, read_only, device, element: Some(element), owner: Some(owner) });
        }
        let kind = object.get_type().name()?;
        Err(PyTypeError::new_err(format!(
            "{}: {kind} has no memory to register: neither the buffer protocol, __array_interface__ nor DLPack",
            asked.argument
        )))
    }

    /// Memory by its address; the owner keeps it, unless that is `None`.
    pub(crate) fn raw(addr: usize, len: usize, owner: Option<Bound<'py, PyAny>>) -> Memory<'py> {
        let owner = owner.filter(|owner| !owner.is_none());
        Memory { addr, len, read_only: false, device: None, element: None, owner }
    }

    /// The storage for the core, and whether peers can map it.
    pub(crate) fn into_storage(self, py: Python<'py>, asked: Asked) -> PyResult<Buffer> {
        if let Some(part) = shared::part_of(self.addr, self.len) {
            return Ok(part);
        }
        let owner = self.owner.map(|owner| Box::new(OwnerToken::keep(owner)) as Box<_>);
        // SAFETY: the object vouches for the bytes while it lives (they are its exported buffer, or the caller gave
        // address, size and owner), and it lives until the token is dropped, which is when the core drops the
        // storage. They come from outside Rust and nothing here refers to them. Where they are read-only, `register`
        // refuses rights that would let anybody write, and `read` refuses them as a target.
        let storage = unsafe { ExternalStorage::new(self.addr, self.len, Place::Host, owner) };
        storage.map(Buffer::new).map_err(|error| error.during(asked.op)).or_raise(py)
    }
}

fn of_buffer(view: Bound<'_, PyMemoryView>, asked: Asked) -> PyResult<Memory<'_>> {
    let buffer = PyUntypedBuffer::get(&view)?;
    if !buffer.is_c_contiguous() && !buffer.is_fortran_contiguous() {
        return Err(not_contiguous(view.py(), asked));
    }
    let (addr, len, read_only) = (buffer.buf_ptr().addr(), buffer.len_bytes(), buffer.readonly());
    // The view holds the export: a bytearray cannot be resized meanwhile.
    drop(buffer);
    Ok(Memory { addr, len, read_only, device: None, element: None, owner: Some(view.into_any()) })
}

fn of_array_interface<'py>(
    object: &Bound<'py, PyAny>,
    interface: &Bound<'py, PyAny>,
    asked: Asked,
) -> PyResult<Memory<'py>> {
    let py = object.py();
    let interface = interface.cast::<PyDict>()?;
    let field = |name: &str| -> PyResult<Option<Bound<'py, PyAny>>> {
        Ok(interface.get_item(name)?.filter(|value| !value.is_none()))
    };
    let missing = |name: &str| asked.invalid(py, &format!("its __array_interface__ has no usable {name:?}"));
    let (addr, read_only): (usize, bool) =
        field("data")?.and_then(|data| data.extract().ok()).ok_or_else(|| missing("data"))?;
    let shape: Vec<usize> =
        field("shape")?.and_then(|shape| shape.extract().ok()).ok_or_else(|| missing("shape"))?;
    let typestr: String =
        field("typestr")?.and_then(|text| text.extract().ok()).ok_or_else(|| missing("typestr"))?;
    let unit = if typestr.get(1..2) == Some("U") { 4 } else { 1 };
    let item: usize = typestr
        .get(2..)
        .and_then(|digits| digits.parse().ok())
        .and_then(|size: usize| size.checked_mul(unit))
        .ok_or_else(|| missing("typestr"))?;
    let mut len = item;
    let strides: Option<Vec<isize>> = field("strides")?.map(|strides| strides.extract()).transpose()?;
    for axis in (0..shape.len()).rev() {
        let stride = strides.as_ref().and_then(|strides| strides.get(axis));
        if shape[axis] != 1 && stride.is_some_and(|stride| usize::try_from(*stride) != Ok(len)) {
            return Err(not_contiguous(py, asked));
        }
        len = len.checked_mul(shape[axis]).ok_or_else(|| missing("shape"))?;
    }
    Ok(Memory { addr, len, read_only, device: None, element: None, owner: Some(object.clone()) })
}

pub(crate) fn not_contiguous(py: Python<'_>, asked: Asked) -> PyErr {
    asked.invalid(py, "its memory has gaps (it is not contiguous); use a contiguous copy")
}

pub(crate) fn unsupported_place(py: Python<'_>, asked: Asked, place: &str) -> PyErr {
    let message =
        format!("{}: its memory is on {place}, and only host memory can be registered", asked.argument);
    raise(py, &Error::new(Kind::Unsupported, asked.op, message))
}
