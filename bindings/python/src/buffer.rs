//! What memory a Python object has: where, how long, whether it may be written, and what keeps it.
#![allow(unsafe_code, reason = "vouches to the core for memory that Python keeps")]

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMemoryView, PyTuple};
use towline::{Buffer, Error, ExternalStorage, Kind, Layout, Place, cuda};

use crate::asked::{Asked, Extent, holds_pointers, unsupported_place};
use crate::dlpack::CUDA;
use crate::errors::{OrRaise, raise};
use crate::owners::OwnerToken;
use crate::{dlpack, shared};

/// The memory of a Python object.
pub(crate) struct Memory<'py> {
    pub(crate) addr: usize,
    pub(crate) len: usize,
    /// Which of the bytes are meant, and in which order, where it is not all of them as they lie.
    pub(crate) layout: Option<Layout>,
    pub(crate) read_only: bool,
    /// DLPack's kind and number of the device where it is, unless that is the host.
    pub(crate) device: Option<(i32, i32)>,
    /// The type of its elements, where DLPack says it.
    pub(crate) element: Option<dlpack::Type>,
    /// The point of a GPU's work from which on the memory may be used, where DLPack says it.
    pub(crate) mark: Option<cuda::Mark>,
    /// Keeps the bytes where they are for as long as it lives.
    owner: Option<Bound<'py, PyAny>>,
}

impl<'py> Memory<'py> {
    /// Finds the memory of anything that can say where it is: a tuple of address, size and owner, the buffer protocol,
    /// `__array_interface__`, `__cuda_array_interface__` or DLPack.
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
        if let Ok(mut view) = PyMemoryView::from(object) {
            if format_holds_pointers(&view.getattr("format")?.extract::<String>()?)
                || is_c_with_pointers(&view.getattr("obj")?)?
            {
                return Err(holds_pointers(py, asked));
            }
            // A single number has neither shape nor strides, of which the buffer wants some.
            if view.getattr("ndim")?.extract::<usize>()? == 0 {
                view = view.call_method1("cast", ("B",))?.cast_into()?;
            }
            return of_buffer(view, asked);
        }
        if let Some(interface) = object.getattr_opt("__array_interface__")? {
            return of_array_interface(object, &interface, asked);
        }
        if let Some(interface) = object.getattr_opt("__cuda_array_interface__")? {
            if asked.host_only {
                return Err(unsupported_place(py, asked, "a CUDA device"));
            }
            // It says everything but the device, which the driver knows.
            let mut memory = of_array_interface(object, &interface, asked)?;
            let device =
                cuda::device_of(memory.addr as u64).map_err(|error| error.during(asked.op)).or_raise(py)?;
            let Some(device) = device else {
                let message =
                    format!("CUDA knows of no memory at {:#x}: it was freed, or is not a GPU's", memory.addr);
                return Err(asked.invalid(py, &message));
            };
            memory.device = Some((CUDA, i32::try_from(device)?));
            return Ok(memory);
        }
        if object.hasattr("__dlpack__")? {
            let dlpack::Exported { addr, extent, read_only, device, element, mark, owner } =
                dlpack::import(object, asked)?;
            let Extent { len, layout } = extent;
            return Ok(Memory {
                addr,
                len,
                layout,
                read_only,
                device,
                element: Some(element),
                mark,
                owner: Some(owner),
            });
        }
        let kind = object.get_type().name()?;
        Err(PyTypeError::new_err(format!(
            "{}: {kind} has no memory to register: neither the buffer protocol, __array_interface__, __cuda_array_interface__ nor DLPack",
            asked.argument
        )))
    }

    /// Memory by its address; the owner keeps it, unless that is `None`.
    pub(crate) fn raw(addr: usize, len: usize, owner: Option<Bound<'py, PyAny>>) -> Memory<'py> {
        let owner = owner.filter(|owner| !owner.is_none());
        Memory { addr, len, layout: None, read_only: false, device: None, element: None, mark: None, owner }
    }

    /// The storage for the core, and whether peers can map it.
    pub(crate) fn into_storage(self, py: Python<'py>, asked: Asked) -> PyResult<Buffer> {
        if let Some(part) = shared::part_of(self.addr, self.len) {
            return Ok(part);
        }
        let owner = self.owner.map(|owner| Box::new(OwnerToken::keep(owner)) as Box<_>);
        if let Some((kind, id)) = self.device {
            let ordinal = u32::try_from(id).ok().filter(|_| kind == CUDA);
            let Some(ordinal) = ordinal else {
                let message = format!("{}: its memory is on DLPack device {kind}:{id}", asked.argument);
                return Err(raise(py, &Error::new(Kind::Unsupported, asked.op, message)));
            };
            // SAFETY: as below; the memory is the GPU's, which the call checks.
            let storage =
                py.detach(|| unsafe { ExternalStorage::device(self.addr, self.len, ordinal, owner) });
            return storage.map(Buffer::new).map_err(|error| error.during(asked.op)).or_raise(py);
        }
        // SAFETY: the object vouches for the bytes while it lives (they are its exported buffer, or the caller gave
        // address, size and owner), and it lives until the token is dropped, which is when the core drops the
        // storage. They come from outside Rust and nothing here refers to them. Where they are read-only, `register`
        // refuses rights that would let anybody write, and `read` refuses them as a target.
        let storage = unsafe { ExternalStorage::new(self.addr, self.len, Place::Host, owner) };
        storage.map(Buffer::new).map_err(|error| error.during(asked.op)).or_raise(py)
    }
}

impl<'py> Memory<'py> {
    /// The storage for the core, of memory on that GPU. The driver is asked whether it is.
    pub(crate) fn into_device_storage(self, py: Python<'py>, asked: Asked, gpu: u32) -> PyResult<Buffer> {
        let owner = self.owner.map(|owner| Box::new(OwnerToken::keep(owner)) as Box<_>);
        // SAFETY: as for host memory: the object vouches for the bytes while it lives, and it lives until the core drops the
        // storage.
        let storage = unsafe { ExternalStorage::device(self.addr, self.len, gpu, owner) };
        let named = |error: Error| {
            let message = format!("{}: {}", asked.argument, error.message());
            Error::new(error.kind(), asked.op, message)
        };
        storage.map(Buffer::new).map_err(named).or_raise(py)
    }
}

fn of_buffer(view: Bound<'_, PyMemoryView>, asked: Asked) -> PyResult<Memory<'_>> {
    let buffer = PyUntypedBuffer::get(&view)?;
    let whole = buffer.is_c_contiguous() || (!asked.views && buffer.is_fortran_contiguous());
    let Extent { len, layout } = if whole {
        Extent { len: buffer.len_bytes(), layout: None }
    } else if buffer.suboffsets().is_some() {
        return Err(asked.invalid(view.py(), "its memory is behind pointers; use a contiguous copy"));
    } else {
        let shape: Vec<u64> = buffer.shape().iter().map(|count| *count as u64).collect();
        let strides: Vec<i64> = buffer.strides().iter().map(|stride| *stride as i64).collect();
        Extent::of(view.py(), asked, buffer.item_size() as u64, &shape, &strides)?
    };
    let (addr, read_only) = (buffer.buf_ptr().addr(), buffer.readonly());
    // The view holds the export: a bytearray cannot be resized meanwhile.
    drop(buffer);
    Ok(Memory {
        addr,
        len,
        layout,
        read_only,
        device: None,
        element: None,
        mark: None,
        owner: Some(view.into_any()),
    })
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
    let missing = |name: &str| asked.invalid(py, &format!("its array interface has no usable {name:?}"));
    let (addr, read_only): (usize, bool) =
        field("data")?.and_then(|data| data.extract().ok()).ok_or_else(|| missing("data"))?;
    let shape: Vec<usize> =
        field("shape")?.and_then(|shape| shape.extract().ok()).ok_or_else(|| missing("shape"))?;
    let typestr: String =
        field("typestr")?.and_then(|text| text.extract().ok()).ok_or_else(|| missing("typestr"))?;
    let fields = field("descr")?;
    if typestr.get(1..2) == Some("O")
        || fields.is_some_and(|fields| fields_hold_pointers(&fields))
        || is_array_of_objects(object)?
    {
        return Err(holds_pointers(py, asked));
    }
    let unit = if typestr.get(1..2) == Some("U") { 4 } else { 1 };
    let item: usize = typestr
        .get(2..)
        // Times have their unit behind the size.
        .and_then(|rest| rest.split('[').next()?.parse().ok())
        .and_then(|size: usize| size.checked_mul(unit))
        .ok_or_else(|| missing("typestr"))?;
    let strides: Option<Vec<i64>> =
        field("strides")?.map(|strides| strides.extract().map_err(|_| missing("strides"))).transpose()?;
    let Extent { len, layout } = match strides {
        None => {
            let len = shape.iter().try_fold(item, |len, count| len.checked_mul(*count));
            Extent { len: len.ok_or_else(|| missing("shape"))?, layout: None }
        }
        Some(strides) if strides.len() != shape.len() => return Err(missing("strides")),
        Some(strides) => {
            let shape: Vec<u64> = shape.iter().map(|count| *count as u64).collect();
            Extent::of(py, asked, item as u64, &shape, &strides)?
        }
    };
    Ok(Memory {
        addr,
        len,
        layout,
        read_only,
        device: None,
        element: None,
        mark: None,
        owner: Some(object.clone()),
    })
}

/// Whether elements of that format (PEP 3118) hold Python objects or other pointers. A peer that writes such bytes chooses
/// addresses of this process, and one that reads them learns some.
fn format_holds_pointers(format: &str) -> bool {
    // Between colons stand the names of fields.
    let codes: String = format.split(':').step_by(2).collect();
    let mut codes = codes.chars().peekable();
    while let Some(code) = codes.next() {
        match code {
            'O' | 'P' | '&' | 'X' | 'z' => return true,
            // A complex number, or C's wide string.
            'Z' if codes.next_if(|part| matches!(part, 'e' | 'f' | 'd' | 'g')).is_none() => return true,
            _ => {}
        }
    }
    false
}

/// Whether the fields of an array interface, a list of names and types that may themselves be such lists, hold Python objects.
fn fields_hold_pointers(fields: &Bound<'_, PyAny>) -> bool {
    let Ok(fields) = fields.try_iter() else { return false };
    fields.flatten().any(|field| match field.get_item(1) {
        Ok(kind) => match kind.extract::<String>() {
            Ok(typestr) => typestr.get(1..2) == Some("O"),
            Err(_) => fields_hold_pointers(&kind),
        },
        Err(_) => false,
    })
}

/// Whether NumPy says that an array's elements hold Python objects. Its array interface does not list fields whose order is not that
/// of their addresses.
fn is_array_of_objects(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let Some(dtype) = object.getattr_opt("dtype")? else { return Ok(false) };
    match dtype.getattr_opt("hasobject")? {
        Some(has) => has.extract().or(Ok(false)),
        None => Ok(false),
    }
}

/// Whether an object is one of ctypes that holds pointers. Of unions and packed structures, and of what has them for parts, the format
/// says nothing but their bytes.
fn is_c_with_pointers(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    // What only objects of ctypes have.
    match object.getattr_opt("_b_needsfree_")? {
        Some(_) => c_type_holds_pointers(object.get_type().as_any()),
        None => Ok(false),
    }
}

/// [`is_c_with_pointers`], of a type of ctypes. It ends: a type that is part of itself is so behind a pointer.
fn c_type_holds_pointers(kind: &Bound<'_, PyAny>) -> PyResult<bool> {
    if kind.hasattr("_length_")? {
        return c_type_holds_pointers(&kind.getattr("_type_")?);
    }
    if let Some(of) = kind.getattr_opt("_type_")? {
        // A letter for what is simple; what else has a type points to it.
        return Ok(of.extract::<String>().map_or(true, |letter| matches!(&*letter, "O" | "P" | "z" | "Z")));
    }
    let mut is_call = true;
    for class in kind.getattr("__mro__")?.try_iter()? {
        let own = class?.getattr("__dict__")?.call_method1("get", ("_fields_",))?;
        if own.is_none() {
            continue;
        }
        is_call = false;
        for field in own.try_iter()? {
            if c_type_holds_pointers(&field?.get_item(1)?)? {
                return Ok(true);
            }
        }
    }
    // Functions have neither; nor has a structure without a field.
    Ok(is_call && kind.hasattr("_flags_")?)
}
