//! Operations that read from a peer or write to it.
#![allow(unsafe_code, reason = "puts copies into the order of a stream that the caller vouches for")]

use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use super::descriptor::{Descriptors, Use};
use super::passive::check_list;
use super::portion::portions;
use super::set::{Part, TransferSet};
use super::{Connector, Descriptor, DeviceKind, OperationKind, OperationStatus, RdmaMetadata};
use crate::completion::Completion;
use crate::cuda::{Mark, StreamHandle};
use crate::endpoint::claim::{self, Claimed};
use crate::endpoint::import::on_a_thread;
use crate::memory::Buffer;
use crate::region::Registered;
use crate::transfer::Op;
use crate::wire::OperationId;
use crate::{Access, Endpoint, Error, Kind, Result, Ticket, runtime};

/// A read from a peer's readable memory, in flight from the start. Made by [`Connector::begin_read`].
///
/// Dropping it before its end cancels it.
pub struct ReadOperation(pub(super) ActiveOperation);

/// A write to a peer's writable memory, in flight from the start. Made by [`Connector::begin_write`].
///
/// Dropping it before its end cancels it.
pub struct WriteOperation(pub(super) ActiveOperation);

pub(super) struct ActiveOperation {
    pub(super) kind: OperationKind,
    set: Arc<TransferSet>,
    pub(super) local: Vec<Descriptor>,
}

/// An operation that was checked, and whose local memory is registered.
struct Prepared {
    kind: OperationKind,
    endpoint: Endpoint,
    local: Vec<Descriptor>,
    spans: Vec<(Registered<Buffer>, Use)>,
    stream: Option<StreamHandle>,
    /// What happens on GPUs before it begins, where no stream waits for it.
    marks: Vec<Mark>,
}

pub(super) fn begin(
    connector: &Connector,
    kind: OperationKind,
    remote: &RdmaMetadata,
    local: Descriptors,
) -> Result<ActiveOperation> {
    let (prepared, operation, tickets) = prepare(connector, kind, remote, local)?;
    let claimed = claim::claim(prepared.endpoint.core(), operation, tickets)
        .and_then(|claimed| prepared.reached().map(|()| claimed));
    prepared.start(claimed)
}

pub(super) fn begin_async(
    connector: &Connector,
    kind: OperationKind,
    remote: &RdmaMetadata,
    local: Descriptors,
) -> impl Future<Output = Result<ActiveOperation>> + Send + use<> {
    let begun = prepare(connector, kind, remote, local).map(|(prepared, operation, tickets)| {
        let claiming = claim::claim_async(prepared.endpoint.core(), operation, tickets);
        (prepared, claiming)
    });
    async move {
        let (prepared, claiming) = begun?;
        let claimed = claiming.await;
        let (prepared, claimed) = match claimed {
            // A thread waits for the GPU, since this is a future.
            Ok(claimed) if !prepared.marks.is_empty() => {
                let waited = on_a_thread(move || {
                    let reached = prepared.reached().map(|()| claimed);
                    Ok((prepared, reached))
                });
                waited.await?
            }
            claimed => (prepared, claimed),
        };
        prepared.start(claimed)
    }
}

/// Checks everything that can be checked without the peer: a wrong call does not use up the peer's operation.
fn prepare(
    connector: &Connector,
    kind: OperationKind,
    remote: &RdmaMetadata,
    local: Descriptors,
) -> Result<(Prepared, OperationId, Vec<Ticket>)> {
    let mut marks = local.marks();
    let Descriptors { list: local, stream } = local;
    let op = name(kind);
    check_list(op, &local, kind == OperationKind::Read)?;
    check_pairing(op, kind, remote, &local)?;
    if let Some(stream) = stream {
        let mut devices =
            local.iter().map(Descriptor::device).chain(remote.descriptors.iter().map(|one| one.device));
        if devices.all(|device| device.kind() != DeviceKind::Cuda) {
            let message = "a stream orders copies on a GPU, and neither side is on one";
            return Err(Error::invalid(op, message));
        }
        for mark in marks.drain(..) {
            // SAFETY: who named the stream promised that it lives.
            unsafe { mark.hold(stream) }.map_err(|error| error.during(op))?;
        }
    }
    let envelope = remote.open().map_err(|error| error.during(op))?;
    let needed = if kind == OperationKind::Read { Access::READ } else { Access::WRITE };
    if let Some(ticket) = envelope.tickets.iter().find(|ticket| !ticket.access().contains(needed)) {
        let message = format!("the metadata's ticket allows {}, and this needs {needed}", ticket.access());
        return Err(Error::new(Kind::PermissionDenied, op, message));
    }
    let endpoint = connector.endpoint()?;
    let spans = local
        .iter()
        .map(|one| one.enlist(&endpoint, Access::NONE))
        .collect::<Result<_>>()
        .map_err(|error| error.during(op))?;
    let prepared = Prepared { kind, endpoint, local, spans, stream, marks };
    Ok((prepared, envelope.operation, envelope.tickets))
}

fn name(kind: OperationKind) -> &'static str {
    if kind == OperationKind::Write { "begin_write" } else { "begin_read" }
}

fn check_pairing(
    op: &'static str,
    kind: OperationKind,
    remote: &RdmaMetadata,
    local: &[Descriptor],
) -> Result<()> {
    if remote.operation_kind != kind {
        let message = format!("the metadata is for a {}, not for a {kind}", remote.operation_kind);
        return Err(Error::invalid(op, message));
    }
    remote.check().map_err(|error| error.during(op))?;
    let there = &remote.descriptors;
    if let Some(other) = there.iter().find(|one| one.device.kind() != there[0].device.kind()) {
        let message =
            format!("the metadata mixes descriptors on {} and on {}", there[0].device, other.device);
        return Err(Error::invalid(op, message));
    }
    if there.len() != local.len() {
        let message = format!("{} local descriptors for {} remote ones", local.len(), there.len());
        return Err(Error::invalid(op, message));
    }
    for (index, (local, remote)) in local.iter().zip(there).enumerate() {
        if local.size() as u64 != remote.size {
            let message =
                format!("descriptor {index}: {} local bytes for {} remote ones", local.size(), remote.size);
            return Err(Error::invalid(op, message));
        }
    }
    Ok(())
}

impl Prepared {
    /// Waits for what happens on GPUs before it.
    fn reached(&self) -> Result<()> {
        let until = runtime::later(Instant::now(), self.endpoint.limits().no_progress);
        claim::wait_for(name(self.kind), &self.marks, until)
    }

    fn start(self, claimed: Result<Claimed>) -> Result<ActiveOperation> {
        let claimed = claimed.map_err(|error| error.during(name(self.kind)))?;
        let op = if self.kind == OperationKind::Write { Op::Write } else { Op::Read };
        let portions: Result<Vec<_>> = claimed
            .remotes
            .iter()
            .zip(&self.local)
            .map(|(remote, local)| portions(op, remote.layout(), local.layout(), local.size() as u64))
            .collect();
        let portions = portions.map_err(|error| {
            let _ = claimed.claim.finish(&Err(error.clone()));
            error.during(name(self.kind))
        })?;
        let parts = self
            .spans
            .into_iter()
            .zip(claimed.remotes)
            .zip(portions)
            .map(|((local, remote), portions)| Part { local, remote, portions })
            .collect();
        let set = TransferSet::start(&self.endpoint, op, self.stream, claimed.claim, parts)
            .map_err(|error| error.during(name(self.kind)))?;
        Ok(ActiveOperation { kind: self.kind, set, local: self.local })
    }
}

impl ActiveOperation {
    pub(super) fn name(&self) -> &'static str {
        if self.kind == OperationKind::Write { "write" } else { "read" }
    }

    pub(super) fn status(&self) -> OperationStatus {
        match self.completion().result() {
            Some(result) => OperationStatus::of(&result),
            None => OperationStatus::InProgress,
        }
    }

    pub(super) fn completion(&self) -> &Completion<Result<()>> {
        &self.set.completion
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.set.is_quiet()
    }

    pub(super) fn cancel(&self, why: &'static str) {
        self.set.cancel(Error::new(Kind::Canceled, self.name(), why));
    }
}

impl ReadOperation {
    /// The local memory, filled. `Invalid` unless the operation is complete.
    pub fn results(&self) -> Result<Vec<Descriptor>> {
        match self.status() {
            OperationStatus::Complete => Ok(self.0.local.clone()),
            status => Err(Error::invalid("read", format!("there are no results: the status is {status}"))),
        }
    }
}

macro_rules! peer {
    ($($name:ident)*) => {$(
        impl $name {
            /// The name of the peer whose memory it is.
            pub fn peer(&self) -> &str {
                &self.0.set.peer
            }

            /// The path that the bytes take.
            pub fn path(&self) -> &'static str {
                self.0.set.path
            }

            /// How many bytes are moved in all.
            pub fn bytes(&self) -> u64 {
                self.0.set.bytes
            }
        }
    )*};
}

peer!(ReadOperation WriteOperation);
