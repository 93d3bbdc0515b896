//! One transfer over sockets: its units as requests, spread over the connections as these become free.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::connection::Connection;
use super::parts::{Keep, Payload, Sink, local_parts, readable};
use super::session::{GrantHandle, Pending, Session};
use crate::layout::Plan;
use crate::transfer::{After, Op, TransferCore};
use crate::wire::{self, Block, Header, Message};
use crate::{Error, Kind, Result};

/// Requests carry about this many bytes: enough to hide the round trip with a few of them in flight, little enough
/// that a cancelled one is soon out of the way.
const UNIT: u64 = 1 << 20;

/// And at most this many blocks, so that a request of tiny blocks stays small.
const UNIT_BLOCKS: usize = 4096;

/// Transfers up to this size go over the control connection: a worker would take longer to wake.
const SMALL: u64 = 256 << 10;

/// Requests in flight per lane.
const WINDOW: usize = 4;

/// One transfer over sockets.
pub(super) struct Run {
    pub(super) transfer: Arc<TransferCore>,
    handle: Arc<GrantHandle>,
    next: AtomicUsize,
    left: AtomicUsize,
    failed: AtomicBool,
}

/// Cuts a plan into requests.
pub(super) fn cut(plan: Plan) -> (Plan, Vec<Range<usize>>) {
    let plan = plan.cut(UNIT);
    let mut units = Vec::new();
    for chunk in plan.chunks(UNIT) {
        let mut start = chunk.start;
        while start < chunk.end {
            let end = chunk.end.min(start + UNIT_BLOCKS);
            units.push(start..end);
            start = end;
        }
    }
    if units.is_empty() {
        units.push(0..0);
    }
    (plan, units)
}

/// Tells the owner what follows the bytes of a transfer of that many pieces.
pub(super) fn tell_after(
    session: &Session,
    handle: &GrantHandle,
    after: &After,
    transfer: u64,
    pieces: u32,
) -> Result<()> {
    if let Some(signal) = after.signal {
        let (offset, add) = (signal.offset, signal.add);
        session.tell(wire::Signal { transfer, pieces, handle: handle.handle, offset, add })?;
    }
    match &after.notify {
        Some(message) => session.tell(wire::Notify { transfer, pieces, message: message.clone() }),
        None => Ok(()),
    }
}

impl Run {
    /// Starts a transfer; where lanes must be opened first, a thread that lives only for that does it.
    pub(super) fn start(handle: &Arc<GrantHandle>, transfer: &Arc<TransferCore>) -> Arc<Run> {
        let run = Arc::new(Run {
            transfer: Arc::clone(transfer),
            handle: Arc::clone(handle),
            next: AtomicUsize::new(0),
            left: AtomicUsize::new(transfer.units.len()),
            failed: AtomicBool::new(false),
        });
        let session = handle.session();
        if let Op::Atomic { offset, op } = transfer.op {
            session.atomic(handle.handle, offset, op, transfer);
            return run;
        }
        if let Err(error) = run.announce() {
            run.fail_rest(&error);
            return run;
        }
        if transfer.plan.bytes() <= SMALL {
            match session.control_lane() {
                Ok(control) => run.spread(&[control]),
                Err(error) => run.fail_rest(&error),
            }
        } else if let Some(lanes) = session.open_lanes() {
            run.spread(&lanes);
        } else {
            let later = Arc::clone(&run);
            let opening =
                std::thread::Builder::new().name("towline-contact".into()).spawn(move || {
                    match later.handle.session().lanes() {
                        Ok(lanes) => later.spread(&lanes),
                        Err(error) => later.fail_rest(&error),
                    }
                });
            if let Err(error) = opening {
                run.fail_rest(&Error::os("transfer", "thread creation", error));
            }
        }
        run
    }

    /// What follows a write is told first: the owner acts on it when the last piece is applied.
    fn announce(&self) -> Result<()> {
        if self.transfer.op == Op::Read || self.transfer.after.is_empty() {
            return Ok(());
        }
        let pieces = self.transfer.units.len() as u32;
        tell_after(self.handle.session(), &self.handle, &self.transfer.after, self.transfer.id, pieces)
    }

    fn spread(self: &Arc<Self>, connections: &[Arc<Connection>]) {
        for _ in 0..WINDOW {
            for connection in connections {
                if !self.feed(connection) {
                    return;
                }
            }
        }
    }

    /// Sends the next unit over that connection; false when there is none left.
    fn feed(self: &Arc<Self>, connection: &Arc<Connection>) -> bool {
        let unit = self.next.fetch_add(1, Ordering::Relaxed);
        if unit >= self.transfer.units.len() {
            return false;
        }
        if self.transfer.is_stopped() {
            self.failed(unit, self.transfer.stop_error());
            return true;
        }
        if let Err(error) = self.request(unit, connection) {
            self.failed(unit, error);
        }
        true
    }

    fn request(self: &Arc<Self>, unit: usize, connection: &Arc<Connection>) -> Result<()> {
        let transfer = &self.transfer;
        let session = self.handle.session();
        let pieces = &transfer.plan.pieces()[transfer.units[unit].clone()];
        let blocks: Vec<Block> =
            pieces.iter().map(|piece| Block { offset: piece.remote, len: piece.len as u32 }).collect();
        let bytes: u64 = pieces.iter().map(|piece| piece.len).sum();
        let handle = self.handle.handle;
        // The owner counts pieces only where something follows them.
        let id = if transfer.after.is_empty() { 0 } else { transfer.id };
        let (message, payload_len): (Message, u64) = match transfer.op {
            Op::Read => (wire::Read { transfer: id, handle, blocks }.into(), 0),
            Op::Write => (wire::Write { transfer: id, handle, blocks }.into(), bytes),
            Op::Reduce(op, dtype) => (wire::Reduce { transfer: id, handle, op, dtype, blocks }.into(), bytes),
            Op::Atomic { .. } => {
                return Err(Error::new(Kind::Internal, "transfer", "an atomic has no units"));
            }
        };
        let payload = if payload_len == 0 {
            Payload::None
        } else {
            Payload::Memory(readable(local_parts(transfer, pieces)))
        };
        let request = session.expect(Pending::Unit {
            run: Arc::clone(self),
            unit,
            connection: Arc::clone(connection),
        })?;
        let keep = Keep::Transfer(Arc::clone(transfer), request);
        let sent = connection.send(message.frame(request, payload_len, 0), Vec::new(), payload, keep);
        let over = match sent {
            Err(error) => Some(error),
            // A stop that came before the request was pending did not find it.
            Ok(()) if transfer.is_stopped() => {
                connection.withdraw(|keep| keep.is_transfer(transfer.id));
                Some(transfer.stop_error())
            }
            Ok(()) => None,
        };
        match over {
            Some(error) if session.forget(request).is_some() => Err(error),
            _ => Ok(()),
        }
    }

    /// Where the bytes of a unit go.
    pub(super) fn sink(&self, unit: usize, header: Header) -> Result<Sink> {
        let pieces = &self.transfer.plan.pieces()[self.transfer.units[unit].clone()];
        let bytes: u64 = pieces.iter().map(|piece| piece.len).sum();
        if bytes != header.payload_len || self.transfer.op != Op::Read {
            return Err(Error::protocol("read", "the owner sent another number of bytes than was asked for"));
        }
        let keep = Keep::Transfer(Arc::clone(&self.transfer), header.id);
        Ok(Sink::memory(local_parts(&self.transfer, pieces), keep))
    }

    /// A unit has ended well; the connection is free for the next.
    pub(super) fn done(self: &Arc<Self>, unit: usize, connection: &Arc<Connection>) {
        let last = self.left.fetch_sub(1, Ordering::AcqRel) == 1;
        let mut outcome = Ok(());
        if last && self.transfer.op == Op::Read && !self.failed.load(Ordering::Acquire) {
            outcome = tell_after(self.handle.session(), &self.handle, &self.transfer.after, 0, 0);
        }
        if last {
            self.over();
        }
        match outcome {
            Ok(()) => self.transfer.unit_done(),
            Err(error) => self.transfer.unit_failed(unit, error),
        }
        if !last {
            self.feed(connection);
        }
    }

    /// A unit has failed. Where the others may still go well, they go on: the transfer says which blocks arrived.
    pub(super) fn failed(self: &Arc<Self>, unit: usize, error: Error) {
        let hopeless = !matches!(error.kind(), Kind::PermissionDenied | Kind::Invalid);
        self.unit_failed(unit, error.clone());
        if hopeless {
            self.fail_rest(&error);
        }
    }

    /// Reports for every unit that has not been sent yet.
    pub(super) fn fail_rest(&self, error: &Error) {
        loop {
            let unit = self.next.fetch_add(1, Ordering::Relaxed);
            if unit >= self.transfer.units.len() {
                return;
            }
            self.unit_failed(unit, error.clone());
        }
    }

    fn unit_failed(&self, unit: usize, error: Error) {
        self.failed.store(true, Ordering::Release);
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.over();
        }
        self.transfer.unit_failed(unit, error);
    }

    /// Every unit has ended.
    fn over(&self) {
        let session = self.handle.session();
        if self.transfer.op != Op::Read && !self.transfer.after.is_empty() {
            session.close_count(self.transfer.id);
        }
        if self.transfer.plan.bytes() > SMALL {
            session.lanes_used();
        }
    }
}
