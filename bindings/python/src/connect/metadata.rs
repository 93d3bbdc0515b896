//! Metadata of operations, as the plain values from which Python makes its classes.

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use towline::connect::{Device, DeviceKind, OperationKind, RdmaMetadata, SerializedDescriptor};
use towline::{Error, Result};

use crate::errors::{OrRaise, raise};

/// Device, token and size of each descriptor; the opaque text; the notification key; the kind's number.
pub(crate) type Fields = (Vec<(String, u64, u64)>, String, String, u8);

pub(crate) fn to_fields(metadata: RdmaMetadata) -> Fields {
    let descriptors = metadata.descriptors.iter();
    (
        descriptors.map(|one| (one.device.to_string(), one.ptr, one.size)).collect(),
        metadata.nixl_metadata,
        metadata.notification_key,
        metadata.operation_kind.code(),
    )
}

/// Takes the fields apart. Numbers that no metadata has are refused like other damaged metadata.
pub(crate) fn from_fields(fields: &Bound<'_, PyAny>) -> PyResult<RdmaMetadata> {
    let py = fields.py();
    let (descriptors, nixl_metadata, notification_key, kind): Fields =
        fields.extract().map_err(|error: PyErr| {
            if error.is_instance_of::<PyOverflowError>(py) {
                raise(
                    py,
                    &Error::protocol("metadata", "remote_metadata: a number in it is negative or too large"),
                )
            } else {
                error
            }
        })?;
    let descriptors = descriptors
        .into_iter()
        .map(|(device, ptr, size)| {
            Ok(SerializedDescriptor {
                device: device.parse().map_err(|error: Error| error.during("metadata"))?,
                ptr,
                size,
            })
        })
        .collect::<Result<_>>()
        .or_raise(py)?;
    let operation_kind = OperationKind::from_code(kind).unwrap_or_default();
    Ok(RdmaMetadata { descriptors, nixl_metadata, notification_key, operation_kind })
}

/// The fields of metadata in JSON.
#[pyfunction]
pub(crate) fn metadata_from_json(py: Python<'_>, text: &str) -> PyResult<Fields> {
    RdmaMetadata::from_json(text).map(to_fields).or_raise(py)
}

/// The name of the endpoint whose memory the metadata names; raises where the opaque part is not Towline's.
#[pyfunction]
pub(crate) fn metadata_owner(py: Python<'_>, nixl_metadata: &str) -> PyResult<String> {
    RdmaMetadata::owner(nixl_metadata).or_raise(py)
}

/// The kind and the number of the device that a text names.
#[pyfunction]
pub(crate) fn device_from_text(py: Python<'_>, text: &str) -> PyResult<(u8, u32)> {
    text.parse().map(|device: Device| (device.kind().code(), device.id())).or_raise(py)
}

/// The device with that kind and number, which the Python side has checked.
pub(crate) fn device(kind: u8, id: u32) -> Device {
    Device::new(DeviceKind::from_code(kind).unwrap_or_default(), id)
}
