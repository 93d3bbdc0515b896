//! Memory of GPUs: arrays that others made, memory that windows accept, and streams.
#![allow(unsafe_code, reason = "vouches for streams that Python names")]

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use towline::cuda::StreamHandle;
use towline::{Buffer, MemoryDescription};
use towline_comm::Stream;

use super::errors::OrRaise;
use crate::asked::{Asked, Extent};
use crate::buffer::Memory;
use crate::{dlpack, process};

/// DLPack's number for CUDA.
const CUDA: i32 = 2;

/// The memory of an array on a GPU; `None` where the object has no such memory.
pub(super) fn memory<'py>(object: &Bound<'py, PyAny>, asked: Asked) -> PyResult<Option<Memory<'py>>> {
    let py = object.py();
    // PyTorch's own words come first: its other protocols refuse tensors that need a gradient, and some types.
    if object.hasattr("data_ptr")? && object.hasattr("is_contiguous")? {
        let device = object.getattr("device")?;
        if device.getattr("type")?.extract::<String>()? != "cuda" {
            return Ok(None);
        }
        if !object.call_method0("is_contiguous")?.is_truthy()? {
            return Err(crate::asked::not_contiguous(py, asked));
        }
        let index: Option<i32> = device.getattr("index")?.extract()?;
        let count: usize = object.call_method0("numel")?.extract()?;
        let size: usize = object.call_method0("element_size")?.extract()?;
        let addr: usize = object.call_method0("data_ptr")?.extract()?;
        let mut memory = Memory::raw(addr, count * size, Some(object.clone()));
        memory.device = Some((CUDA, index.unwrap_or(0)));
        return Ok(Some(memory));
    }
    if let Some(interface) = object.getattr_opt("__cuda_array_interface__")? {
        return of_interface(object, interface.cast::<PyDict>()?, asked).map(Some);
    }
    if object.hasattr("__dlpack__")? {
        let dlpack::Exported { addr, extent, read_only, device, element, owner, .. } =
            dlpack::import(object, asked)?;
        if device.is_none_or(|(kind, _)| kind != CUDA) {
            return Ok(None);
        }
        let mut memory = Memory::raw(addr, extent.len, Some(owner));
        (memory.read_only, memory.device, memory.element) = (read_only, device, Some(element));
        return Ok(Some(memory));
    }
    Ok(None)
}

fn of_interface<'py>(
    object: &Bound<'py, PyAny>,
    interface: &Bound<'py, PyDict>,
    asked: Asked,
) -> PyResult<Memory<'py>> {
    let py = object.py();
    let missing =
        |name: &str| asked.invalid(py, &format!("its __cuda_array_interface__ has no usable {name:?}"));
    let field = |name: &str| -> PyResult<Option<Bound<'py, PyAny>>> {
        Ok(interface.get_item(name)?.filter(|value| !value.is_none()))
    };
    if field("mask")?.is_some() {
        return Err(asked.invalid(py, "it has a mask"));
    }
    let (addr, read_only): (usize, bool) =
        field("data")?.and_then(|data| data.extract().ok()).ok_or_else(|| missing("data"))?;
    let shape: Vec<u64> =
        field("shape")?.and_then(|shape| shape.extract().ok()).ok_or_else(|| missing("shape"))?;
    let item: u64 =
        typestr(interface)?.get(2..).and_then(|size| size.parse().ok()).ok_or_else(|| missing("typestr"))?;
    let strides: Option<Vec<i64>> = field("strides")?.map(|strides| strides.extract()).transpose()?;
    let len = match strides {
        Some(strides) if strides.len() == shape.len() => Extent::of(py, asked, item, &shape, &strides)?.len,
        Some(_) => return Err(missing("strides")),
        None => {
            let len = shape.iter().try_fold(item, |len, count| len.checked_mul(*count));
            usize::try_from(len.ok_or_else(|| missing("shape"))?)?
        }
    };
    let mut memory = Memory::raw(addr, len, Some(object.clone()));
    memory.read_only = read_only;
    // Which GPU it is on the interface does not say: the driver does, when the memory is described to the core.
    memory.device = Some((CUDA, -1));
    Ok(memory)
}

/// The type of the elements, as the interface has it.
pub(super) fn typestr(interface: &Bound<'_, PyDict>) -> PyResult<String> {
    interface.get_item("typestr")?.map(|text| text.extract()).transpose().map(Option::unwrap_or_default)
}

/// Memory of a GPU that windows accept, as an array of one dimension or more.
#[pyclass(frozen, module = "towline._native")]
pub(crate) struct DeviceArray {
    buffer: Buffer,
    gpu: u32,
    shape: Vec<usize>,
    typestr: String,
}

#[pymethods]
impl DeviceArray {
    #[new]
    fn new(
        py: Python<'_>,
        gpu: u32,
        len: usize,
        shape: Vec<usize>,
        typestr: String,
    ) -> PyResult<DeviceArray> {
        process::guard(py, "mem_alloc")?;
        let storage = py.detach(|| towline_comm::mem_alloc_on(gpu, len)).or_raise(py)?;
        Ok(DeviceArray { buffer: Buffer::new(storage), gpu, shape, typestr })
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("shape", PyTuple::new(py, &self.shape)?)?;
        interface.set_item("typestr", &self.typestr)?;
        interface.set_item("data", (self.buffer.addr(), false))?;
        interface.set_item("strides", py.None())?;
        interface.set_item("version", 3)?;
        Ok(interface)
    }

    #[getter]
    fn ptr(&self) -> usize {
        self.buffer.addr()
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.buffer.size()
    }

    #[getter]
    fn device_id(&self) -> u32 {
        self.gpu
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }
}

/// The stream into which this thread's calls on communicators of GPUs go from now on; `None` for the default one.
#[pyfunction]
pub(crate) fn use_stream(handle: Option<usize>) {
    let stream = handle.filter(|handle| *handle != 0).map(|handle| {
        // SAFETY: the caller names a stream of the communicator's GPU that lives until its work has ended, as for every
        // library that takes CUDA streams from Python.
        Stream::by(move |job| unsafe { job.on(StreamHandle(handle)) })
    });
    towline_comm::use_stream(stream);
}

/// Makes an id of NCCL's.
#[pyfunction]
pub(crate) fn nccl_unique_id(py: Python<'_>) -> PyResult<Bound<'_, PyBytes>> {
    process::guard(py, "get_unique_id")?;
    let id = py.detach(towline_comm::get_nccl_unique_id).or_raise(py)?;
    process::mark();
    Ok(PyBytes::new(py, id.as_bytes()))
}

/// NCCL's version, as `2.28.9`, and what it has; `None` where there is no NCCL.
#[pyfunction]
pub(crate) fn nccl_found(py: Python<'_>) -> Option<(String, Vec<&'static str>)> {
    match py.detach(towline::nccl::availability) {
        towline::nccl::Availability::Found { version, supports, .. } => Some((version, supports)),
        _ => None,
    }
}
