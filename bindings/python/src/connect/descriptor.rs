//! Memory that takes part in operations.
#![allow(unsafe_code, reason = "passes on a stream that the caller vouches for")]

use pyo3::prelude::*;
use towline::connect::{self, Device, DeviceKind};
use towline::cuda::{Mark, StreamHandle, device_of};
use towline::{Error, Kind, Layout};

use super::connector::Connector;
use super::metadata::device;
use crate::asked::{Asked, Extent};
use crate::buffer::Memory;
use crate::dlpack::CUDA;
use crate::errors::{OrRaise, raise};
use crate::lender::Lender;
use crate::owners;
use crate::process::{self, Inherited};

const ASKED: Asked =
    Asked { op: "descriptor", argument: "data", host_only: false, views: true, ordered: true };

/// Memory that takes part in operations.
#[pyclass(frozen, module = "towline._native")]
pub(crate) struct Descriptor {
    descriptor: Inherited<Option<connect::Descriptor>>,
    /// Whose memory it is, where that can be asked.
    lender: Option<Inherited<Lender>>,
}

impl Descriptor {
    fn new(descriptor: connect::Descriptor) -> Descriptor {
        Descriptor { descriptor: Inherited::new(Some(descriptor)), lender: None }
    }

    /// With the object that was described.
    fn of(mut self, object: Option<&Bound<'_, PyAny>>) -> Descriptor {
        self.lender = object.and_then(Lender::of).map(Inherited::new);
        self
    }

    /// The memory, for a call that uses it: `Stale` where it is no longer the described object's.
    pub(crate) fn checked(&self, py: Python<'_>, op: &'static str) -> PyResult<&connect::Descriptor> {
        if let Some(lender) = &self.lender {
            lender.check(py, op)?;
        }
        Ok(self.inner())
    }

    fn inner(&self) -> &connect::Descriptor {
        match &*self.descriptor {
            Some(descriptor) => descriptor,
            // Only `drop` empties it.
            None => unreachable!("a descriptor that was dropped is used"),
        }
    }
}

/// The descriptor, seen through a layout where there is one.
fn seen(py: Python<'_>, whole: connect::Descriptor, layout: Option<Layout>) -> PyResult<Descriptor> {
    let descriptor = match layout {
        Some(layout) => whole.through(layout).or_raise(py)?,
        None => whole,
    };
    Ok(Descriptor::new(descriptor))
}

/// Memory of a device: the GPU's where there is a driver, and otherwise a description that cannot be registered.
fn on_device(py: Python<'_>, memory: Memory<'_>, device: Device) -> PyResult<connect::Descriptor> {
    let foreign = connect::Descriptor::foreign(memory.addr, memory.len, device);
    let usable = device.kind() == DeviceKind::Cuda && device_of(memory.addr as u64).is_ok();
    Ok(if usable { connect::Descriptor::from(memory.into_storage(py, ASKED)?) } else { foreign })
}

/// Memory by its address; `owner` keeps it.
fn at(
    py: Python<'_>,
    ptr: usize,
    size: usize,
    device: Device,
    owner: Option<Bound<'_, PyAny>>,
) -> PyResult<connect::Descriptor> {
    Ok(if device.kind() == DeviceKind::Host {
        connect::Descriptor::from(Memory::raw(ptr, size, owner).into_storage(py, ASKED)?)
    } else {
        let mut memory = Memory::raw(ptr, size, owner);
        memory.device =
            Some((if device.kind() == DeviceKind::Cuda { CUDA } else { -1 }, i32::try_from(device.id())?));
        on_device(py, memory, device)?
    })
}

#[pymethods]
impl Descriptor {
    /// Describes the memory of an object that can say where it is.
    #[new]
    fn from_object(py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<Descriptor> {
        process::guard(py, "descriptor")?;
        owners::release(py);
        let mut memory = Memory::of(data, ASKED)?;
        let (read_only, layout, mark) = (memory.read_only, memory.layout.take(), memory.mark.take());
        let descriptor = match memory.device {
            Some((kind, id)) => {
                let kind = match kind {
                    2 | 10 | 13 => DeviceKind::Cuda,
                    14 => DeviceKind::Xpu,
                    _ => {
                        let message = format!("data: its memory is on the unknown DLPack device {kind}:{id}");
                        return Err(raise(py, &Error::new(Kind::Unsupported, "descriptor", message)));
                    }
                };
                let id = u32::try_from(id)?;
                memory.device = memory
                    .device
                    .map(|(_, number)| (if kind == DeviceKind::Cuda { CUDA } else { -1 }, number));
                on_device(py, memory, connect::Device::new(kind, id))?
            }
            None => connect::Descriptor::from(memory.into_storage(py, ASKED)?),
        };
        if let Some(mark) = mark {
            descriptor.set_mark(mark);
        }
        let seen = seen(py, if read_only { descriptor.read_only() } else { descriptor }, layout)?;
        Ok(seen.of(Some(data)))
    }

    /// Describes memory by its address; `owner` keeps it.
    #[staticmethod]
    fn raw(
        py: Python<'_>,
        ptr: usize,
        size: usize,
        kind: u8,
        id: u32,
        owner: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Descriptor> {
        process::guard(py, "descriptor")?;
        owners::release(py);
        let whole = at(py, ptr, size, device(kind, id), owner.clone())?;
        Ok(Descriptor::new(whole).of(owner.as_ref()))
    }

    /// Describes an array by the address of its first element, the bytes of one, its shape and its strides in bytes.
    #[staticmethod]
    fn view(
        py: Python<'_>,
        ptr: usize,
        array: (u64, Vec<u64>, Vec<i64>),
        kind: u8,
        id: u32,
        owner: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Descriptor> {
        process::guard(py, "descriptor")?;
        owners::release(py);
        let (item, shape, strides) = array;
        let extent = Extent::of(py, ASKED, item, &shape, &strides)?;
        let whole = at(py, ptr, extent.len, device(kind, id), owner.clone())?;
        Ok(seen(py, whole, extent.layout)?.of(owner.as_ref()))
    }

    /// `Stale` where the memory is no longer the described object's.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        process::guard(py, "descriptor")?;
        self.checked(py, "descriptor").map(drop)
    }

    /// Lets operations wait for what is queued in a stream by now, where a driver knows the memory.
    fn after(&self, py: Python<'_>, stream: usize) -> PyResult<()> {
        process::guard(py, "descriptor")?;
        let descriptor = self.inner();
        let marked = py.detach(|| match device_of(descriptor.ptr() as u64) {
            // SAFETY: whose memory it is says that the stream is alive.
            Ok(Some(ordinal)) => unsafe { Mark::of(StreamHandle(stream), ordinal) }.map(Some),
            _ => Ok(None),
        });
        if let Some(mark) = marked.map_err(|error| error.during("descriptor")).or_raise(py)? {
            descriptor.set_mark(mark);
        }
        Ok(())
    }

    /// Refuses to be written from now on.
    fn freeze(&self) {
        let _ = self.inner().clone().read_only();
    }

    /// The layout through which the memory is seen, where it has gaps.
    #[getter]
    fn layout(&self) -> Option<crate::layout::Layout> {
        self.inner().layout().cloned().map(crate::layout::Layout)
    }

    #[getter]
    fn read_only(&self) -> bool {
        self.inner().is_read_only()
    }

    #[getter]
    fn ptr(&self) -> usize {
        self.inner().ptr()
    }

    #[getter]
    fn size(&self) -> usize {
        self.inner().size()
    }

    fn set_size(&self, py: Python<'_>, size: usize) -> PyResult<()> {
        self.inner().set_size(size).or_raise(py)
    }

    #[getter]
    fn capacity(&self) -> usize {
        self.inner().capacity()
    }

    /// The number of the device's kind, and the device's own.
    #[getter]
    fn device(&self) -> (u8, u32) {
        let device = self.inner().device();
        (device.kind().code(), device.id())
    }

    #[getter]
    fn is_registered(&self, py: Python<'_>) -> PyResult<bool> {
        process::guard(py, "descriptor")?;
        Ok(self.inner().is_registered())
    }

    fn register(&self, py: Python<'_>, connector: &Bound<'_, Connector>) -> PyResult<()> {
        let connector = connector.get().open(py, "register")?;
        let descriptor = self.checked(py, "register")?;
        py.detach(|| descriptor.register_memory(connector)).or_raise(py)
    }

    fn deregister(&self, py: Python<'_>, connector: &Bound<'_, Connector>) -> PyResult<()> {
        process::guard(py, "deregister")?;
        let connector = connector.get().inner();
        let done = py.detach(|| self.inner().deregister_memory(connector));
        owners::release(py);
        done.or_raise(py)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        if !process::in_child() {
            drop(self.descriptor.take());
            // The object was most likely kept for this descriptor alone: let it go now rather than at the next call.
            Python::try_attach(owners::release);
        }
    }
}
