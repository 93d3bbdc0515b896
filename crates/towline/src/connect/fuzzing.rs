//! What must hold for any metadata: the fuzz targets and the tests over the stored corpus call these functions.

use data_encoding::{BASE64, HEXLOWER};

use super::envelope::{Envelope, Form};
use super::portion::portions;
use super::{Device, OperationKind, RdmaMetadata, SerializedDescriptor};
use crate::transfer::Op;
use crate::{Error, Kind};

/// A target of this size is planned for: far more than a test would have, and few enough portions to try many.
const LARGEST: u64 = 1 << 30;

/// Metadata takes this text or refuses it with a reason, and what it takes it gives back unchanged.
///
/// The bytes are tried as JSON, and as the opaque part of metadata that is otherwise genuine.
pub fn metadata(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match RdmaMetadata::from_json(text) {
        Ok(metadata) => {
            let again = metadata.to_json().expect("what was read can be written");
            assert_eq!(RdmaMetadata::from_json(&again).expect("what was written can be read"), metadata);
            let total = metadata.descriptors.iter().try_fold(0u64, |sum, one| sum.checked_add(one.size));
            assert!(total.is_some_and(|total| total > 0 && i64::try_from(total).is_ok()));
            let opaque = &metadata.nixl_metadata;
            assert!(opaque.len() < 16 || !format!("{metadata:?}").contains(opaque.as_str()));
            opens(&metadata);
        }
        Err(error) => refused(&error),
    }
    of_text(text);
}

/// The opaque part of metadata takes these bytes, in either text form, or refuses them with a reason, and what it takes it
/// gives back unchanged.
pub fn envelope(data: &[u8]) {
    for (form, text) in
        [(Form::Base64, format!("b64:{}", BASE64.encode(data))), (Form::Hex, HEXLOWER.encode(data))]
    {
        if let Some(envelope) = of_text(&text) {
            assert_eq!(envelope.to_text(form).expect("what was read can be written"), text);
        }
    }
}

fn of_text(text: &str) -> Option<Envelope> {
    let envelope = match Envelope::from_text(text) {
        Ok(envelope) => envelope,
        Err(error) => {
            refused(&error);
            assert!(RdmaMetadata::owner(text).is_err(), "nobody owns what cannot be read");
            return None;
        }
    };
    assert!(RdmaMetadata::owner(text).is_ok());
    let descriptors: Vec<_> = envelope
        .tickets
        .iter()
        .map(|ticket| SerializedDescriptor {
            device: Device::from(ticket.body().place),
            ptr: ticket.body().generation.max(1),
            size: ticket.layout().map_or(Ok(ticket.length()), |layout| layout.packed_len()).unwrap_or(1),
        })
        .collect();
    for operation_kind in [OperationKind::Read, OperationKind::Write] {
        opens(&RdmaMetadata {
            descriptors: descriptors.clone(),
            nixl_metadata: text.to_owned(),
            notification_key: "key".into(),
            operation_kind,
        });
    }
    Some(envelope)
}

/// What metadata says of its memory can be read into a target of the same size, or it does not open.
fn opens(metadata: &RdmaMetadata) {
    let envelope = match metadata.open() {
        Ok(envelope) => envelope,
        Err(error) => return refused(&error),
    };
    assert_eq!(envelope.tickets.len(), metadata.descriptors.len());
    for (ticket, one) in envelope.tickets.iter().zip(&metadata.descriptors) {
        let layout = ticket.layout();
        assert!(layout.is_none() || metadata.operation_kind == OperationKind::Read);
        assert!(layout.is_some() || one.size == ticket.length());
        if one.size <= LARGEST {
            let all = portions(Op::Read, layout, None, one.size).expect("what was offered can be read");
            assert_eq!(all.iter().map(|portion| portion.bytes).sum::<u64>(), one.size);
        }
    }
}

fn refused(error: &Error) {
    assert!(matches!(error.kind(), Kind::Protocol | Kind::Invalid | Kind::Unsupported), "{error}");
}
