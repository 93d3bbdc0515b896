//! The waiter for the reply to a request, and what the request names.

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, mpsc};

use towline_proto::session::initiator::{self, Times};

use super::Session;
use crate::session::QueryReply;
use crate::session::importing::Reply;
use crate::session::run::Run;
use crate::transfer::{LocalHold, TransferCore};
use crate::{Error, Result};

/// The waiter for the reply to a request.
pub(in crate::session) enum Waiter {
    Import(Arc<Reply>),
    Query(mpsc::SyncSender<Result<QueryReply>>),
    Unit { run: Arc<Run>, unit: usize },
    Atomic(Arc<TransferCore>),
}

/// The local memory of one unit of a transfer, kept in use.
#[derive(Clone)]
pub(in crate::session) struct UnitHold {
    pub(in crate::session) hold: LocalHold,
    pub(in crate::session) unit: usize,
}

impl UnitHold {
    pub(in crate::session) fn transfer(&self) -> &Arc<TransferCore> {
        self.hold.transfer()
    }
}

impl initiator::Transfer for TransferCore {
    fn id(&self) -> u64 {
        self.id
    }

    fn times(&self) -> Times {
        let (started, stopped) = self.span_of_time();
        Times { started, stopped, no_progress: self.limits.no_progress }
    }
}

impl initiator::Waiter for Waiter {
    type Transfer = TransferCore;
    type Hold = UnitHold;

    fn transfer(&self) -> Option<&Arc<TransferCore>> {
        match self {
            Waiter::Unit { run, .. } => Some(&run.transfer),
            Waiter::Atomic(transfer) => Some(transfer),
            Waiter::Import(_) | Waiter::Query(_) => None,
        }
    }

    fn hold(&self) -> Option<UnitHold> {
        match self {
            Waiter::Unit { run, unit } => Some(UnitHold { hold: run.transfer.hold(), unit: *unit }),
            _ => None,
        }
    }

    fn repeated(&self) -> Option<&AtomicUsize> {
        match self {
            Waiter::Unit { run, .. } => Some(&run.repeated),
            _ => None,
        }
    }
}

impl Waiter {
    /// Its transfer was stopped.
    pub(super) fn stopped(self) {
        match self {
            Waiter::Unit { run, unit } => run.failed(unit, run.transfer.stop_error()),
            Waiter::Atomic(transfer) => transfer.unit_failed(0, transfer.stop_error()),
            Waiter::Import(_) | Waiter::Query(_) => {}
        }
    }

    /// It ends with that error.
    pub(super) fn failed(self, session: &Session, error: Error) {
        match self {
            Waiter::Import(reply) => reply.fill(session, Err(error)),
            Waiter::Query(asker) => drop(asker.try_send(Err(error))),
            Waiter::Unit { run, unit } => run.failed(unit, error),
            Waiter::Atomic(transfer) => transfer.unit_failed(0, error),
        }
    }

    /// It is asked again over another connection, and ends with that error where there is none.
    pub(super) fn again(self, session: &Session, error: Error) {
        match self {
            Waiter::Unit { run, unit } => run.again(unit, error),
            other => other.failed(session, error),
        }
    }
}
