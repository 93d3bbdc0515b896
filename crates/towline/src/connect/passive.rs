//! Operations that wait for a peer to read or write.
#![allow(unsafe_code, reason = "marks a stream that the caller vouches for")]

use std::sync::Arc;
use std::time::Duration;

use super::descriptor::Descriptors;
use super::envelope::{Envelope, Form, MAX_DESCRIPTORS};
use super::{Connector, Descriptor, OperationKind, OperationStatus, RdmaMetadata, SerializedDescriptor};
use crate::completion::Completion;
use crate::cuda::Mark;
use crate::memory::MemoryDescription;
use crate::operations::{Offered, Passive, Stage};
use crate::wire::OperationId;
use crate::{Access, Error, Kind, Result, Ticket};

/// Memory that one peer may read, once. Made by [`Connector::create_readable`].
///
/// It is over when the peer has read everything, or has failed to, or died; when nobody claimed it in time; or when it is
/// cancelled or dropped. From then on its metadata is worth nothing, and nobody touches the memory.
pub struct ReadableOperation(pub(super) PassiveOperation);

/// Memory that one peer may write, once. Made by [`Connector::create_writable`].
///
/// When it is complete, the peer's bytes are there. Otherwise as [`ReadableOperation`].
pub struct WritableOperation(pub(super) PassiveOperation);

pub(super) struct PassiveOperation {
    pub(super) kind: OperationKind,
    passive: Arc<Passive>,
    pub(super) local: Vec<Descriptor>,
}

/// Refuses a list of descriptors that cannot be one side of an operation.
pub(super) fn check_list(op: &'static str, local: &[Descriptor], written: bool) -> Result<()> {
    let Some(first) = local.first() else {
        return Err(Error::invalid(op, "local: an operation needs at least one descriptor"));
    };
    if local.len() > MAX_DESCRIPTORS {
        let message = format!("local: {} descriptors; at most {MAX_DESCRIPTORS} are allowed", local.len());
        return Err(Error::invalid(op, message));
    }
    let kind = first.device().kind();
    if let Some(other) = local.iter().find(|one| one.device().kind() != kind) {
        let message =
            format!("local: descriptors on {} and on {} cannot be mixed", first.device(), other.device());
        return Err(Error::invalid(op, message));
    }
    match local.iter().enumerate().find(|(_, one)| one.is_read_only()) {
        Some((index, one)) if written => {
            let message = match one.layout() {
                Some(_) => format!(
                    "local: descriptor {index} has gaps (it is not contiguous) and would be written; only a source may have \
                     them: use a contiguous target"
                ),
                None => format!("local: descriptor {index} is read-only and would be written"),
            };
            Err(Error::invalid(op, message))
        }
        _ => Ok(()),
    }
}

pub(super) fn open(
    connector: &Connector,
    kind: OperationKind,
    local: Descriptors,
    unclaimed: Option<Duration>,
) -> Result<PassiveOperation> {
    let (op, access) = match kind {
        OperationKind::Write => ("writable", Access::WRITE),
        _ => ("readable", Access::READ),
    };
    check_list(op, &local.list, kind == OperationKind::Write)?;
    let mut marks = local.marks();
    if let Some(stream) = local.stream {
        // SAFETY: who named the stream promised that it lives.
        marks.push(unsafe { Mark::of(stream, local.ordinal()) }.map_err(|error| error.during(op))?);
    }
    let local = local.list;
    let endpoint = connector.endpoint()?;
    let offered = local
        .iter()
        .map(|one| {
            let (region, used) = one.enlist(&endpoint, access)?;
            Ok(Offered { region, keep: Box::new(used) })
        })
        .collect::<Result<Vec<_>>>()
        .map_err(|error| error.during(op))?;
    let passive =
        Passive::open(&endpoint.core().operations, endpoint.limits(), op, access, offered, unclaimed)?;
    passive.behind(marks);
    Ok(PassiveOperation { kind, passive, local })
}

impl PassiveOperation {
    pub(super) fn metadata(&self, form: Form) -> Result<RdmaMetadata> {
        let (descriptors, tickets) = self.passive.with_regions(|offered| {
            let both = offered.iter().zip(&self.local).map(|((offered, _), local)| {
                let (size, whole) = (local.size() as u64, offered.region.size() as u64);
                let ticket = match local.layout() {
                    // A part of a layout is not a layout: the size alone says how many of the packed bytes are offered.
                    Some(layout) => offered.region.ticket_with_layout(layout.clone())?,
                    None if size != whole => offered.region.ticket()?.narrow().range(0, size).finish()?,
                    None => offered.region.ticket()?,
                };
                let ptr = offered.region.generation();
                Ok((SerializedDescriptor { device: local.device(), ptr, size }, ticket))
            });
            both.collect::<Result<(Vec<_>, Vec<Ticket>)>>()
        })?;
        let operation = self.passive.id;
        Ok(RdmaMetadata {
            descriptors,
            nixl_metadata: Envelope { operation, tickets }.to_text(form)?,
            notification_key: uuid(&operation),
            operation_kind: self.kind,
        })
    }

    pub(super) fn name(&self) -> &'static str {
        if self.kind == OperationKind::Write { "writable" } else { "readable" }
    }

    pub(super) fn status(&self) -> OperationStatus {
        match (self.completion().result(), self.passive.stage()) {
            (Some(result), _) => OperationStatus::of(&result),
            (None, Stage::Waiting) => OperationStatus::Initialized,
            (None, Stage::Claimed | Stage::Ended) => OperationStatus::InProgress,
        }
    }

    pub(super) fn completion(&self) -> &Completion<Result<()>> {
        &self.passive.completion
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.passive.is_quiet()
    }

    pub(super) fn cancel(&self, why: &'static str) {
        self.passive.end(Err(Error::new(Kind::Canceled, self.name(), why)));
    }
}

fn uuid(id: &OperationId) -> String {
    let hex = data_encoding::HEXLOWER.encode(id);
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

macro_rules! metadata {
    ($($name:ident)*) => {$(
        impl $name {
            /// What the peer needs to know; send it by any channel. The sizes are what the descriptors say now.
            ///
            /// `Stale` once the operation has ended.
            pub fn metadata(&self) -> Result<RdmaMetadata> {
                self.0.metadata(Form::Base64)
            }

            /// [`metadata`](Self::metadata) with `nixl_metadata` in bare hex, the older form.
            pub fn metadata_in_hex(&self) -> Result<RdmaMetadata> {
                self.0.metadata(Form::Hex)
            }
        }
    )*};
}

metadata!(ReadableOperation WritableOperation);
