//! The arrays that calls take: their memory, and the type of their elements.

use pyo3::prelude::*;
use pyo3::types::{PyMemoryView, PyTuple};
use towline::{Buffer, DeviceStorage, Dtype, SystemStorage};
use towline_comm::{Communicator, Error};

use super::device;
use super::errors::OrRaise;
use crate::asked::Asked;
use crate::buffer;
use crate::dlpack::Type;

/// The type of an element.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Element {
    pub(super) name: &'static str,
    pub(super) size: usize,
    /// The type in which elements are combined; those without can be moved only.
    pub(super) dtype: Option<Dtype>,
}

const fn element(name: &'static str, size: usize, dtype: Option<Dtype>) -> Element {
    Element { name, size, dtype }
}

const ELEMENTS: [Element; 19] = [
    element("int8", 1, Some(Dtype::I8)),
    element("uint8", 1, Some(Dtype::U8)),
    element("int32", 4, Some(Dtype::I32)),
    element("uint32", 4, Some(Dtype::U32)),
    element("int64", 8, Some(Dtype::I64)),
    element("uint64", 8, Some(Dtype::U64)),
    element("float16", 2, Some(Dtype::F16)),
    element("float32", 4, Some(Dtype::F32)),
    element("float64", 8, Some(Dtype::F64)),
    element("bfloat16", 2, Some(Dtype::Bf16)),
    element("float8_e4m3fn", 1, None),
    element("float8_e5m2", 1, None),
    element("float8_e4m3fnuz", 1, None),
    element("float8_e5m2fnuz", 1, None),
    element("bool", 1, None),
    element("int16", 2, None),
    element("uint16", 2, None),
    element("complex64", 8, None),
    element("complex128", 16, None),
];

impl Element {
    fn named(name: &str) -> Option<&'static Element> {
        ELEMENTS.iter().find(|element| element.name == name)
    }

    /// Unsigned, signed, floating, complex or truth value (as the array interface has it), and the size in bytes.
    fn of_kind(kind: char, size: usize) -> Option<&'static Element> {
        let name = match (kind, size) {
            ('i', 1 | 2 | 4 | 8) => format!("int{}", 8 * size),
            ('u', 1 | 2 | 4 | 8) => format!("uint{}", 8 * size),
            ('f', 2 | 4 | 8) => format!("float{}", 8 * size),
            ('c', 8 | 16) => format!("complex{}", 8 * size),
            ('b', 1) => "bool".to_owned(),
            _ => return None,
        };
        Element::named(&name)
    }

    fn of_dlpack(element: Type) -> Option<&'static Element> {
        let size = usize::from(element.bits / 8);
        match (element.code, element.bits, element.lanes) {
            (0, _, 1) => Element::of_kind('i', size),
            (1, _, 1) => Element::of_kind('u', size),
            (2, _, 1) => Element::of_kind('f', size),
            (4, 16, 1) => Element::named("bfloat16"),
            (5, _, 1) => Element::of_kind('c', size),
            (6, 8, 1) => Element::named("bool"),
            (10, 8, 1) => Element::named("float8_e4m3fn"),
            (11, 8, 1) => Element::named("float8_e4m3fnuz"),
            (12, 8, 1) => Element::named("float8_e5m2"),
            (13, 8, 1) => Element::named("float8_e5m2fnuz"),
            _ => None,
        }
    }

    /// The type under which elements are moved: any of the same size.
    pub(super) fn moved_as(&self) -> Dtype {
        self.dtype.unwrap_or(match self.size {
            2 => Dtype::F16,
            4 => Dtype::U32,
            8 => Dtype::U64,
            _ => Dtype::U8,
        })
    }
}

/// The memory of an array, without gaps, on the host.
pub(super) struct Array<'py> {
    pub(super) memory: buffer::Memory<'py>,
    pub(super) element: &'static Element,
    asked: Asked,
    /// The GPU of the communicator that it is for.
    gpu: Option<u32>,
}

impl<'py> Array<'py> {
    /// The array that an argument is; `writable` where it is a target.
    pub(super) fn of(
        object: &Bound<'py, PyAny>,
        op: &'static str,
        argument: &'static str,
        writable: bool,
        gpu: Option<u32>,
    ) -> PyResult<Array<'py>> {
        let py = object.py();
        let asked = Asked { op, argument, host_only: gpu.is_none(), views: false, ordered: false };
        let memory = match gpu {
            None => buffer::Memory::of(object, asked)?,
            Some(gpu) => device::memory(object, asked)?.ok_or_else(|| {
                asked
                    .invalid(py, &format!("the communicator is on GPU {gpu}, and its memory is not on a GPU"))
            })?,
        };
        if let (Some(gpu), Some((_, on @ 0..))) = (gpu, memory.device)
            && on as u32 != gpu
        {
            let message = format!("the communicator is on GPU {gpu}, and its memory on GPU {on}");
            return Err(asked.invalid(py, &message));
        }
        if writable && memory.read_only {
            return Err(asked.invalid(py, "its memory is read-only"));
        }
        let element = element_of(object, &memory, asked)?;
        if !memory.len.is_multiple_of(element.size) {
            let message = format!("{} bytes are not whole elements of {}", memory.len, element.name);
            return Err(asked.invalid(py, &message));
        }
        Ok(Array { memory, element, asked, gpu })
    }

    pub(super) fn count(&self) -> usize {
        self.memory.len / self.element.size
    }

    pub(super) fn is_empty(&self) -> bool {
        self.memory.len == 0
    }

    pub(super) fn into_storage(self, py: Python<'py>) -> PyResult<Buffer> {
        match self.gpu {
            Some(gpu) => self.memory.into_device_storage(py, self.asked, gpu),
            None => self.memory.into_storage(py, self.asked),
        }
    }

    /// The memory, for a call on that communicator.
    pub(super) fn into_memory(self, py: Python<'py>, comm: &Communicator) -> PyResult<towline_comm::Memory> {
        if self.is_empty() {
            let none = || -> towline_comm::Result<_> {
                match self.gpu {
                    Some(gpu) => comm.memory(DeviceStorage::new(64, gpu)?)?.part(0, 0),
                    None => comm.memory(SystemStorage::new(64)?)?.part(0, 0),
                }
            };
            return none().or_raise(py);
        }
        let op = self.asked.op;
        let storage = self.into_storage(py)?;
        py.detach(|| comm.memory(storage)).map_err(|error: Error| error.during(op)).or_raise(py)
    }
}

/// The type of an array's elements: what it says itself, else what its protocol says.
fn element_of(
    object: &Bound<'_, PyAny>,
    memory: &buffer::Memory<'_>,
    asked: Asked,
) -> PyResult<&'static Element> {
    let py = object.py();
    if object.is_instance_of::<PyTuple>() {
        return named(py, "uint8", asked);
    }
    if let Some(dtype) = object.getattr_opt("dtype")? {
        if let Some(native) = dtype.getattr_opt("isnative")?
            && !native.is_truthy()?
        {
            return Err(asked.invalid(py, "its elements are not in this machine's byte order"));
        }
        let name = match dtype.extract::<String>() {
            Ok(name) => name,
            Err(_) => match dtype.getattr_opt("name")? {
                Some(name) => name.extract()?,
                None => dtype.str()?.to_string(),
            },
        };
        let name = name.trim_start_matches("torch.").trim_start_matches("numpy.");
        return named(py, name, asked);
    }
    if let Some(element) = memory.element {
        let shown = (element.code, element.bits, element.lanes);
        let found = Element::of_dlpack(element);
        return found.ok_or_else(|| unknown(py, &format!("DLPack type {shown:?}"), asked));
    }
    if let Some(interface) = object.getattr_opt("__cuda_array_interface__")? {
        let typestr = device::typestr(interface.cast()?)?;
        return of_typestr(&typestr).ok_or_else(|| unknown(py, &format!("type {typestr}"), asked));
    }
    let (format, size): (String, usize) = if let Ok(view) = PyMemoryView::from(object) {
        (view.getattr("format")?.extract()?, view.getattr("itemsize")?.extract()?)
    } else {
        let interface = object.getattr("__array_interface__")?;
        let typestr: String = interface.get_item("typestr")?.extract()?;
        return of_typestr(&typestr).ok_or_else(|| unknown(py, &format!("type {typestr}"), asked));
    };
    let code = format.trim_start_matches(['@', '=', native_order()]);
    let kind = match code {
        "b" | "h" | "i" | "l" | "q" | "n" => 'i',
        "B" | "H" | "I" | "L" | "Q" | "N" | "c" => 'u',
        "e" | "f" | "d" => 'f',
        "?" => 'b',
        "Zf" | "Zd" | "F" | "D" => 'c',
        _ => ' ',
    };
    Element::of_kind(kind, size).ok_or_else(|| unknown(py, &format!("format {format:?}"), asked))
}

fn of_typestr(typestr: &str) -> Option<&'static Element> {
    let mut letters = typestr.chars();
    let (order, kind) = (letters.next()?, letters.next()?);
    let size: usize = letters.as_str().parse().ok()?;
    if order != '|' && order != native_order() && size > 1 {
        return None;
    }
    Element::of_kind(kind, size)
}

fn native_order() -> char {
    if cfg!(target_endian = "little") { '<' } else { '>' }
}

fn named(py: Python<'_>, name: &str, asked: Asked) -> PyResult<&'static Element> {
    Element::named(name).ok_or_else(|| unknown(py, name, asked))
}

fn unknown(py: Python<'_>, what: &str, asked: Asked) -> PyErr {
    asked.invalid(py, &format!("elements of {what} cannot be communicated"))
}
