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

/// The memory of a Python object.
pub(crate) struct Memory<'py> {
    addr: usize,
    len: usize,
    pub(crate) read_only: bool,
    /// Keeps the bytes where they are for as long as it lives.
    owner: Option<Bound<'py, PyAny>>,
}

impl<'py> Memory<'py> {
    /// Finds the memory of anything that can tell: a tuple of address, size and owner, the buffer protocol,
    /// `__array_interface__` or DLPack.
    pub(crate) fn of(object: &Bound<'py, PyAny>) -> PyResult<Memory<'py>> {
        let py = object.py();
        if let Ok(tuple) = object.cast::<PyTuple>() {
            let (addr, len, owner): (usize, usize, Bound<'py, PyAny>) = tuple.extract().map_err(|_| {
                PyTypeError::new_err(
                    "obj: a tuple holds the address, the size in bytes and the owner (or None)",
                )
            })?;
            let owner = Some(owner).filter(|owner| !owner.is_none());
            return Ok(Memory { addr, len, read_only: false, owner });
        }
        if let Ok(view) = PyMemoryView::from(object) {
            return of_buffer(view);
        }
        if let Some(interface) = object.getattr_opt("__array_interface__")? {
            return of_array_interface(object, &interface);
        }
        if object.hasattr("__cuda_array_interface__")? {
            return Err(unsupported_place(py, "a CUDA device"));
        }
        if object.hasattr("__dlpack__")? {
            let dlpack::Exported { addr, len, read_only, owner } = dlpack::import(object)?;
            return Ok(Memory { addr, len, read_only, owner: Some(owner) });
        }
        let kind = object.get_type().name()?;
        Err(PyTypeError::new_err(format!(
            "obj: {kind} has no memory to register: neither the buffer protocol, __array_interface__ nor DLPack"
        )))
    }

    /// The storage for the core, and whether peers can map it.
    pub(crate) fn into_storage(self, py: Python<'py>) -> PyResult<Buffer> {
        if let Some(part) = shared::part_of(self.addr, self.len) {
            return Ok(part);
        }
        let owner = self.owner.map(|owner| Box::new(OwnerToken::keep(owner)) as Box<_>);
        // SAFETY: the object vouches for the bytes while it lives (they are its exported buffer, or the caller gave
        // address, size and owner), and it lives until the token is dropped, which is when the core drops the
        // storage. They come from outside Rust and nothing here refers to them. Where they are read-only, `register`
        // refuses rights that would let anybody write, and `read` refuses them as a target.
        let storage = unsafe { ExternalStorage::new(self.addr, self.len, Place::Host, owner) };
        storage.map(Buffer::new).map_err(|error| error.during("register")).or_raise(py)
    }
}

fn of_buffer(view: Bound<'_, PyMemoryView>) -> PyResult<Memory<'_>> {
    let buffer = PyUntypedBuffer::get(&view)?;
    if !buffer.is_c_contiguous() && !buffer.is_fortran_contiguous() {
        return Err(not_contiguous(view.py()));
    }
    let (addr, len, read_only) = (buffer.buf_ptr().addr(), buffer.len_bytes(), buffer.readonly());
    // The view holds the export: a bytearray cannot be resized meanwhile.
    drop(buffer);
    Ok(Memory { addr, len, read_only, owner: Some(view.into_any()) })
}

fn of_array_interface<'py>(
    object: &Bound<'py, PyAny>,
    interface: &Bound<'py, PyAny>,
) -> PyResult<Memory<'py>> {
    let py = object.py();
    let interface = interface.cast::<PyDict>()?;
    let field = |name: &str| -> PyResult<Option<Bound<'py, PyAny>>> {
        Ok(interface.get_item(name)?.filter(|value| !value.is_none()))
    };
    let missing =
        |name: &str| invalid(py, "register", format!("obj: its __array_interface__ has no usable {name:?}"));
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
            return Err(not_contiguous(py));
        }
        len = len.checked_mul(shape[axis]).ok_or_else(|| missing("shape"))?;
    }
    Ok(Memory { addr, len, read_only, owner: Some(object.clone()) })
}

pub(crate) fn not_contiguous(py: Python<'_>) -> PyErr {
    invalid(py, "register", "obj: its memory has gaps (it is not contiguous); register a copy".to_owned())
}

pub(crate) fn unsupported_place(py: Python<'_>, place: &str) -> PyErr {
    raise(
        py,
        &Error::new(
            Kind::Unsupported,
            "register",
            format!("obj: its memory is on {place}, and only host memory can be registered"),
        ),
    )
}
