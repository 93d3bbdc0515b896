//! DLPack: tensors of other libraries as memory, and our memory as a tensor of theirs.
#![allow(unsafe_code, reason = "reads and makes the C structures of DLPack")]

use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict};
use towline::SharedStorage;
use towline::cuda::{Mark, StreamHandle};

use crate::asked::{Asked, Extent, holds_pointers, not_contiguous, unsupported_place};
use crate::errors::OrRaise;

const NAME: &CStr = c"dltensor";
const USED_NAME: &CStr = c"used_dltensor";
const VERSIONED_NAME: &CStr = c"dltensor_versioned";
const CPU: i32 = 1;
/// DLPack's number for CUDA.
pub(crate) const CUDA: i32 = 2;
/// The CPU's memory, and the CPU's memory that is pinned for CUDA or ROCm.
const HOST: [i32; 3] = [CPU, 3, 11];
/// The types of elements that are integers.
pub(crate) const SIGNED: u8 = 0;
pub(crate) const UNSIGNED: u8 = 1;
/// The type of elements that are handles.
const OPAQUE: u8 = 3;
const READ_ONLY: u64 = 1;

#[repr(C)]
struct Device {
    kind: i32,
    id: i32,
}

/// The type of an element: code, bits, lanes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Type {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: Type,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
struct ManagedVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: Tensor,
}

/// Memory that a tensor occupies, and the capsule that keeps it.
pub(crate) struct Exported<'py> {
    pub(crate) addr: usize,
    pub(crate) extent: Extent,
    pub(crate) read_only: bool,
    /// Kind and number of the device, unless it is the host.
    pub(crate) device: Option<(i32, i32)>,
    pub(crate) element: Type,
    /// The point of the GPU's work from which on it may be used.
    pub(crate) mark: Option<Mark>,
    pub(crate) owner: Bound<'py, PyAny>,
}

/// Kind and number of the device that an object which speaks DLPack is on, unless it is the host.
pub(crate) fn device_of(object: &Bound<'_, PyAny>) -> PyResult<Option<(i32, i32)>> {
    let device: (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
    Ok(Some(device).filter(|(kind, _)| !HOST.contains(kind)))
}

/// The memory of an object that speaks DLPack. The capsule is not consumed: holding it holds the tensor.
pub(crate) fn import<'py>(object: &Bound<'py, PyAny>, asked: Asked) -> PyResult<Exported<'py>> {
    let py = object.py();
    let device = device_of(object)?;
    if let Some((kind, id)) = device.filter(|_| asked.host_only) {
        return Err(unsupported_place(py, asked, &format!("DLPack device {kind}:{id}")));
    }
    let (capsule, mark) = capsule(object, device, asked)?;
    let capsule = capsule.cast_into::<PyCapsule>()?;
    let (tensor, read_only) = if capsule.is_valid_checked(Some(VERSIONED_NAME)) {
        let managed = capsule.pointer_checked(Some(VERSIONED_NAME))?.cast::<ManagedVersioned>();
        // SAFETY: a capsule of that name holds that structure (DLPack's contract), and lives through the block.
        let managed = unsafe { managed.as_ref() };
        if managed.major != 1 {
            let version = managed.major;
            return Err(PyBufferError::new_err(format!("DLPack {version}.x is not known here")));
        }
        (&managed.tensor, managed.flags & READ_ONLY != 0)
    } else {
        let managed = capsule.pointer_checked(Some(NAME))?.cast::<Managed>();
        // SAFETY: as above.
        (&unsafe { managed.as_ref() }.tensor, false)
    };
    if tensor.dtype.code == OPAQUE {
        return Err(holds_pointers(py, asked));
    }
    // SAFETY: `tensor` was read from a valid capsule that is still alive.
    let (addr, extent) = unsafe { extent(py, tensor, asked) }?;
    let element = tensor.dtype;
    Ok(Exported { addr, extent, read_only, device, element, mark, owner: capsule.into_any() })
}

/// The capsule, and the point of the GPU's work from which on its memory may be used.
fn capsule<'py>(
    object: &Bound<'py, PyAny>,
    device: Option<(i32, i32)>,
    asked: Asked,
) -> PyResult<(Bound<'py, PyAny>, Option<Mark>)> {
    let py = object.py();
    let options = PyDict::new(py);
    options.set_item("max_version", (1, 0))?;
    let gpu = device.filter(|(kind, _)| *kind == CUDA).and_then(|(_, id)| u32::try_from(id).ok());
    if gpu.is_some() {
        // Nobody waits: where nothing is read now, who moves the bytes names the stream that they are in order with.
        options.set_item("stream", -1)?;
    }
    let made = gpu.filter(|_| asked.ordered).and_then(|gpu| {
        // The producer lets a stream of ours wait for its work. Without a driver there is none.
        Mark::behind(gpu, |stream| {
            options.set_item("stream", stream.0)?;
            object.call_method("__dlpack__", (), Some(&options))
        })
        .ok()
    });
    let (made, mark) = match made {
        Some((made, mark)) => (made, Some(mark)),
        None => (object.call_method("__dlpack__", (), Some(&options)), None),
    };
    match made {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            let made = object.call_method0("__dlpack__")?;
            // It knows of no streams, and so has let the default stream wait.
            let legacy = StreamHandle(1);
            // SAFETY: the default stream always lives.
            let mark = gpu.filter(|_| mark.is_some()).map(|gpu| unsafe { Mark::of(legacy, gpu) });
            Ok((made, mark.transpose().or_raise(py)?))
        }
        made => Ok((made?, mark)),
    }
}

/// Where a tensor begins, and which bytes from there on are its own.
///
/// # Safety
/// The tensor's arrays have `ndim` entries, as DLPack promises.
unsafe fn extent(py: Python<'_>, tensor: &Tensor, asked: Asked) -> PyResult<(usize, Extent)> {
    let ndim = usize::try_from(tensor.ndim)?;
    let row = |start: *mut i64| match NonNull::new(start) {
        // SAFETY: the caller's obligation.
        Some(start) if ndim > 0 => Some(unsafe { std::slice::from_raw_parts(start.as_ptr(), ndim) }),
        _ => None,
    };
    let shape = row(tensor.shape).unwrap_or_default();
    let bits = usize::from(tensor.dtype.bits) * usize::from(tensor.dtype.lanes);
    let too_large = || asked.invalid(py, "the tensor is too large");
    let mut count = 1i64;
    let mut whole = true;
    let strides = row(tensor.strides);
    for axis in (0..shape.len()).rev() {
        whole &= shape[axis] == 1 || strides.is_none_or(|strides| strides[axis] == count);
        count = count.checked_mul(shape[axis]).ok_or_else(too_large)?;
    }
    let extent = match strides {
        Some(strides) if !whole => {
            // Elements that share a byte cannot be distinguished by bytes.
            if !bits.is_multiple_of(8) {
                return Err(not_contiguous(py, asked));
            }
            let item = (bits / 8) as u64;
            let shape = shape.iter().map(|count| u64::try_from(*count)).collect::<Result<Vec<_>, _>>()?;
            let strides = strides.iter().map(|stride| stride.checked_mul(item as i64));
            let strides = strides.collect::<Option<Vec<_>>>().ok_or_else(too_large)?;
            Extent::of(py, asked, item, &shape, &strides)?
        }
        _ => {
            let len = usize::try_from(count)?.checked_mul(bits).ok_or_else(too_large)?;
            Extent { len: len.div_ceil(8), layout: None }
        }
    };
    Ok((tensor.data.addr().wrapping_add(usize::try_from(tensor.byte_offset)?), extent))
}

/// What an exported tensor owns.
struct Ours {
    shape: Vec<i64>,
    strides: Vec<i64>,
    _storage: Arc<SharedStorage>,
}

/// Shared memory as a DLPack capsule.
pub(crate) fn export<'py>(
    py: Python<'py>,
    storage: &Arc<SharedStorage>,
    shape: &[isize],
    dtype: Type,
) -> PyResult<Bound<'py, PyCapsule>> {
    let shape: Vec<i64> = shape.iter().map(|count| *count as i64).collect();
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    let mut ours = Box::new(Ours { shape, strides, _storage: Arc::clone(storage) });
    let managed = Box::new(Managed {
        tensor: Tensor {
            data: storage.as_ptr().cast(),
            device: Device { kind: CPU, id: 0 },
            ndim: i32::try_from(ours.shape.len())?,
            dtype,
            shape: ours.shape.as_mut_ptr(),
            strides: ours.strides.as_mut_ptr(),
            byte_offset: 0,
        },
        context: ptr::null_mut(),
        deleter: Some(delete),
    });
    let managed = Box::into_raw(managed);
    // SAFETY: `managed` was made by the line above and nobody else has it yet.
    unsafe { (*managed).context = Box::into_raw(ours).cast() };
    // SAFETY: a box is never null.
    let pointer = unsafe { NonNull::new_unchecked(managed.cast::<c_void>()) };
    // SAFETY: the pointer stays valid until `delete`, which the consumer or `unconsumed` calls, once.
    unsafe { PyCapsule::new_with_pointer_and_destructor(py, pointer, NAME, Some(unconsumed)) }
}

/// Frees an exported tensor; any thread may call it, since nothing of it is Python's.
unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: DLPack calls the deleter once, with what `export` made.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context.cast::<Ours>()));
    }
}

/// The destructor of a capsule: frees the tensor unless a consumer took it over, and renamed the capsule.
unsafe extern "C" fn unconsumed(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls it with the capsule, whose name says whether the pointer is still ours to free.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, USED_NAME.as_ptr()) != 0 {
            return;
        }
        let pointer = ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr());
        if pointer.is_null() {
            ffi::PyErr_Clear();
        } else {
            delete(pointer.cast());
        }
    }
}
