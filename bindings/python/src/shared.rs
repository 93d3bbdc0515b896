//! Arrays in shared memory, which same-host peers map.
#![allow(unsafe_code, reason = "exports memory by the buffer protocol")]

use std::collections::BTreeMap;
use std::ffi::{CString, c_int};
use std::ptr;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple};
use towline::{Buffer, HugePages, MemoryDescription, OffsetView, SharedStorage};

use crate::dlpack::{self, Type};
use crate::errors::{OrRaise, invalid};

/// The shared memory of this process by its first address: a view of it is recognised when it is registered.
static SHARED: Mutex<Registry> = Mutex::new(Registry { by_address: BTreeMap::new(), sweep_at: 64 });

struct Registry {
    by_address: BTreeMap<usize, Weak<SharedStorage>>,
    /// How many entries there are when those of freed memory are removed.
    sweep_at: usize,
}

impl Registry {
    fn insert(&mut self, storage: &Arc<SharedStorage>) {
        self.by_address.insert(storage.addr(), Arc::downgrade(storage));
        if self.by_address.len() >= self.sweep_at {
            self.by_address.retain(|_, storage| storage.strong_count() > 0);
            self.sweep_at = (2 * self.by_address.len()).max(64);
        }
    }
}

/// The part of some shared memory that lies at that address, where all of it does.
pub(crate) fn part_of(addr: usize, len: usize) -> Option<Buffer> {
    let shared = SHARED.lock();
    let (_, storage) = shared.by_address.range(..=addr).next_back()?;
    let storage = storage.upgrade()?;
    drop(shared);
    OffsetView::from_inner_address(Buffer::from_arc(storage), addr, len).ok().map(Buffer::new)
}

/// An array in shared memory.
///
/// NumPy, torch and others take it over without a copy, by the buffer protocol, ``__array_interface__`` or DLPack.
#[pyclass(frozen, module = "towline")]
pub(crate) struct SharedArray {
    storage: Arc<SharedStorage>,
    dtype: String,
    /// In elements of the buffer protocol; a type that it does not know is shown as bytes, in one more dimension.
    buffer_shape: Vec<isize>,
    buffer_strides: Vec<isize>,
    format: CString,
    item: usize,
    shape: Vec<isize>,
    typestr: String,
    element: Type,
}

#[pymethods]
impl SharedArray {
    /// An array of zeros. ``format`` is the buffer protocol's, empty where it has none for this type.
    #[new]
    fn new(
        py: Python<'_>,
        shape: Vec<isize>,
        dtype: String,
        format: &str,
        typestr: String,
        code: u8,
        bits: u8,
    ) -> PyResult<SharedArray> {
        let item = usize::from(bits).div_ceil(8);
        let mut len = Some(item);
        for count in &shape {
            len = len.and_then(|len| len.checked_mul(usize::try_from(*count).ok()?));
        }
        let len = match len {
            Some(len) if len > 0 && len <= isize::MAX as usize => len,
            _ => return Err(invalid(py, "empty", format!("shape: {shape:?} has no bytes, or too many"))),
        };
        let options = SharedStorage::options().huge_pages(HugePages::Try);
        let storage = Arc::new(py.detach(|| options.allocate(len)).or_raise(py)?);
        SHARED.lock().insert(&storage);
        let mut buffer_shape = shape.clone();
        let mut buffer_item = item;
        if format.is_empty() {
            buffer_shape.push(item as isize);
            buffer_item = 1;
        }
        let mut buffer_strides = vec![buffer_item as isize; buffer_shape.len()];
        for axis in (1..buffer_shape.len()).rev() {
            buffer_strides[axis - 1] = buffer_strides[axis] * buffer_shape[axis];
        }
        Ok(SharedArray {
            storage,
            dtype,
            buffer_shape,
            buffer_strides,
            format: CString::new(if format.is_empty() { "B" } else { format })?,
            item: buffer_item,
            shape,
            typestr,
            element: Type { code, bits, lanes: 1 },
        })
    }

    /// The length of each dimension.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// The name of the type of its elements.
    #[getter]
    fn dtype(&self) -> &str {
        &self.dtype
    }

    /// The number of bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.storage.size()
    }

    fn __len__(&self) -> PyResult<usize> {
        match self.shape.first() {
            Some(count) => Ok(usize::try_from(*count)?),
            None => Err(PyTypeError::new_err("an array without dimensions has no length")),
        }
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", self.shape(py)?)?;
        interface.set_item("typestr", &self.typestr)?;
        interface.set_item("data", (self.storage.addr(), false))?;
        Ok(interface)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (1, 0)
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None) -> "CapsuleType")]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<&Bound<'py, PyAny>>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        // The old form is understood by every version, and the CPU has no streams.
        let _ = (stream, max_version);
        if dl_device.is_some_and(|device| device != (1, 0)) || copy == Some(true) {
            return Err(PyBufferError::new_err("shared memory is exported as it is: on the CPU, not copied"));
        }
        dlpack::export(py, &self.storage, &self.shape, self.element)
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        let asked = |flag: c_int| flags & flag == flag;
        // SAFETY: Python passes a view to be filled. The pointers are to fields of a frozen object, to which the view
        // holds a reference, and to memory that the object owns.
        unsafe {
            (*view).buf = this.storage.as_ptr().cast();
            (*view).len = this.storage.size() as isize;
            (*view).readonly = 0;
            (*view).itemsize = this.item as isize;
            (*view).format =
                if asked(ffi::PyBUF_FORMAT) { this.format.as_ptr().cast_mut() } else { ptr::null_mut() };
            (*view).ndim = if asked(ffi::PyBUF_ND) { this.buffer_shape.len() as c_int } else { 1 };
            (*view).shape =
                if asked(ffi::PyBUF_ND) { this.buffer_shape.as_ptr().cast_mut() } else { ptr::null_mut() };
            (*view).strides = if asked(ffi::PyBUF_STRIDES) {
                this.buffer_strides.as_ptr().cast_mut()
            } else {
                ptr::null_mut()
            };
            (*view).suboffsets = ptr::null_mut();
            (*view).internal = ptr::null_mut();
            (*view).obj = slf.into_any().into_ptr();
        }
        Ok(())
    }

    fn __repr__(&self) -> String {
        format!("<SharedArray of {} {:?}: {} bytes of shared memory>", self.dtype, self.shape, self.nbytes())
    }
}
