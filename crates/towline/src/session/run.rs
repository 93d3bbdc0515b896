//! One transfer over sockets: its units as requests, spread over the connections as these become free.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;
use towline_proto::session::initiator::{Asked, Asks};

use super::checks;
use super::connection::Connection;
#[cfg(test)]
use super::connection::moments;
use super::grant::GrantHandle;
use super::initiator::{Session, UnitHold, Waiter};
use super::parts::{Held, Keep, Payload};
use crate::bytes::checked;
use crate::layout::Plan;
use crate::runtime::socket::RawPartMut;
use crate::transfer::submission::{Link, Submission, Unit};
use crate::transfer::{Op, Several, TransferCore};
use crate::wire::{self, Block, Message};
use crate::{Error, Kind, Result, room, runtime};

/// Requests carry at least about this many bytes: enough to hide the round trip with a few of them in flight.
const LEAST_UNIT: u64 = 1 << 20;

/// And at most this many, little enough that a cancelled one is soon out of the way.
const MOST_UNIT: u64 = 4 << 20;

/// And at most this many blocks, so that a request of tiny blocks stays small.
const UNIT_BLOCKS: usize = 4096;

/// A transfer has about this many requests, so that every lane has its share.
const UNITS: u64 = 8;

/// Pieces that are shorter than this on average count as scattered.
const SCATTERED: u64 = 64 << 10;

/// Transfers up to this size go over the control connection: a worker would take longer to wake.
const SMALL: u64 = 256 << 10;

/// Up to so many bytes, in so many blocks, are asked for or sent by the calling thread: in about the time that calling another
/// one takes.
const INLINE_BYTES: u64 = 64 << 10;
const INLINE_BLOCKS: u64 = 512;

/// Requests in flight per lane.
const WINDOW: usize = 4;

/// And of small parts, each of which is a request of its own, up to so many: as many bytes as of long ones.
const MOST_IN_FLIGHT: u64 = 64;

/// One transfer over sockets.
pub(crate) struct Run {
    pub(crate) transfer: Arc<TransferCore>,
    /// What was granted for each part, all of it over one session.
    handles: Several<Arc<GrantHandle>>,
    /// The units that carry bytes: all but the signal's.
    requests: usize,
    next: AtomicUsize,
    left: AtomicUsize,
    failed: AtomicBool,
    /// A thread reports for the signal's unit.
    signalled: AtomicBool,
    /// How often a unit was asked for again.
    pub(super) repeated: AtomicUsize,
    /// The units that wait for a lane to be asked for again: the thread that takes one out reports for it.
    waiting: Mutex<Vec<usize>>,
}

/// Whether a worker plans a request of that size, and sends the first of it.
pub(crate) fn takes_long(bytes: u64, blocks: u64) -> bool {
    bytes > INLINE_BYTES || blocks > INLINE_BLOCKS
}

/// Cuts the plans of a submission of that many bytes into requests, each about one part's region. A signal is a unit of its own, the last
/// one: it is done when the owner says so.
pub(crate) fn cut(
    submission: &mut Submission<'_>,
    link: Arc<dyn Link>,
    bytes: u64,
) -> Result<Arc<TransferCore>> {
    let (op, portion) = (submission.op, submission.portion);
    let signal = submission.after.signal.map(|signal| signal.part);
    submission.begin(link, |part, plan, units| cut_into(op, (bytes, portion), part, plan, units), signal)
}

/// Cuts one part. Of a portion of something larger, beside which others are in flight, there are one or two requests for each lane: the
/// fewer requests the better, since each one is a copy on a GPU of its own at an owner, which the lane starts and waits for.
fn cut_into(
    op: Op,
    (bytes, portion): (u64, bool),
    part: usize,
    plan: Plan,
    units: &mut Vec<Unit>,
) -> Result<Plan> {
    let scattered = plan.bytes() / SCATTERED < plan.piece_count() as u64;
    // Of scattered blocks, a portion is cut as a transfer is.
    let requests = if portion && !scattered { 1 } else { UNITS };
    // Whole pages, so that no element of a reduction is cut in two.
    let unit = (bytes / requests).next_multiple_of(4096).clamp(LEAST_UNIT, MOST_UNIT) & !4095;
    // In the order of the side that receives, neighbours are received as one; scattered bytes cost less to send.
    let plan = match (scattered, op) {
        (false, _) => plan,
        (true, Op::Read) => plan.sorted_by_key(|piece| piece.local),
        (true, _) => plan.sorted_by_key(|piece| piece.remote),
    };
    let plan = plan.cut(unit)?;
    for chunk in plan.chunks(unit) {
        let mut start = chunk.start;
        while start < chunk.end {
            let end = chunk.end.min(start + UNIT_BLOCKS);
            room::push(op.name(), units, Unit { part, pieces: start..end })?;
            start = end;
        }
    }
    Ok(plan)
}

impl Run {
    /// Starts a transfer; where lanes must be opened first, a thread that lives only for that does it.
    pub(crate) fn start(handles: Several<Arc<GrantHandle>>, transfer: &Arc<TransferCore>) -> Arc<Run> {
        let run = Arc::new(Run {
            transfer: Arc::clone(transfer),
            handles,
            requests: transfer.units.len() - usize::from(transfer.after.signal.is_some()),
            next: AtomicUsize::new(0),
            left: AtomicUsize::new(transfer.units.len()),
            failed: AtomicBool::new(false),
            signalled: AtomicBool::new(transfer.after.signal.is_none()),
            repeated: AtomicUsize::new(0),
            waiting: Mutex::default(),
        });
        let session = run.session();
        if let Op::Atomic { offset, op } = transfer.op {
            session.atomic(run.handles.first().handle, offset, op, transfer);
            return run;
        }
        if let Err(error) = run.announce() {
            run.fail_rest(&error);
            return run;
        }
        if transfer.bytes() <= SMALL {
            match session.control_lane() {
                Ok(control) => run.spread(&[control]),
                Err(error) => run.fail_rest(&error),
            }
        } else if let Some(lanes) = session.open_lanes() {
            run.spread(&lanes);
        } else if let Err(error) = session.will_start(&run) {
            run.fail_rest(&error);
        } else {
            let later = Arc::clone(&run);
            let opening =
                runtime::start_thread("transfer", "towline-contact", move || match later.session().lanes() {
                    Ok(lanes) => later.spread(&lanes),
                    Err(error) => later.fail_rest(&error),
                });
            if let Err(error) = opening {
                run.fail_rest(&error);
            }
        }
        run
    }

    /// What follows a write is sent first: the owner acts on it when the last piece is applied.
    fn announce(self: &Arc<Self>) -> Result<()> {
        if self.transfer.op == Op::Read {
            return Ok(());
        }
        let pieces = self.requests as u32;
        if let Some(message) = &self.transfer.after.notify {
            let (transfer, message) = (self.transfer.id, message.clone());
            self.session().send_one_way(wire::Notify { transfer, pieces, message })?;
        }
        self.signal(pieces);
        Ok(())
    }

    /// Asks the owner to raise the counter once that many pieces are applied; reports for the signal's unit.
    fn signal(self: &Arc<Self>, pieces: u32) {
        let Some(signal) = self.transfer.after.signal else { return };
        if self.signalled.swap(true, Ordering::AcqRel) {
            return;
        }
        let (transfer, handle) = (self.transfer.id, self.handles[signal.part].handle);
        let message = wire::Signal { transfer, pieces, handle, offset: signal.offset, add: signal.add };
        let asks = Asks::Change { on_gpu: self.changes_a_gpu(self.requests) };
        let asked = self
            .session()
            .control_lane()
            .and_then(|control| self.ask(self.requests, &control, asks, message.into(), 0));
        if let Err(error) = asked {
            self.failed(self.requests, error);
        }
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        self.handles.first().session()
    }

    /// What was granted for the part that a unit belongs to.
    fn handle(&self, unit: usize) -> &GrantHandle {
        &self.handles[self.transfer.units[unit].part]
    }

    fn spread(self: &Arc<Self>, connections: &[Arc<Connection>]) {
        // Portions of one transfer, of a request each, would all go over the first: these begin elsewhere each time.
        static TURN: AtomicUsize = AtomicUsize::new(0);
        let turn = if self.transfer.portion { TURN.fetch_add(self.requests, Ordering::Relaxed) } else { 0 };
        let (before, after) = connections.split_at(turn % connections.len().max(1));
        for _ in 0..self.window() {
            for connection in after.iter().chain(before) {
                if !self.feed(connection) {
                    return;
                }
            }
        }
    }

    /// How many requests may be in flight on each lane.
    fn window(&self) -> usize {
        if self.handles.len() == 1 {
            return WINDOW;
        }
        let each = (self.transfer.bytes() / self.requests.max(1) as u64).max(1);
        (WINDOW as u64 * LEAST_UNIT / each).clamp(WINDOW as u64, MOST_IN_FLIGHT) as usize
    }

    /// Sends the next unit over that connection; false when there is none left.
    fn feed(self: &Arc<Self>, connection: &Arc<Connection>) -> bool {
        let unit = self.next.fetch_add(1, Ordering::Relaxed);
        if unit >= self.requests {
            return false;
        }
        if self.transfer.is_stopped() {
            self.failed(unit, self.transfer.stop_error());
            return true;
        }
        if let Err(error) = self.request(unit, connection) {
            self.unsent(unit, connection, error);
        }
        true
    }

    /// A unit could not be sent. Where that is only because its connection has ended since it was chosen, nothing has happened yet.
    fn unsent(self: &Arc<Self>, unit: usize, connection: &Connection, error: Error) {
        if !connection.is_closed() {
            return self.failed(unit, error);
        }
        self.session().not_sent(Waiter::Unit { run: Arc::clone(self), unit }, error);
    }

    fn request(self: &Arc<Self>, unit: usize, connection: &Arc<Connection>) -> Result<()> {
        let transfer = &self.transfer;
        let pieces = transfer.pieces(unit);
        let blocks: Vec<Block> =
            pieces.iter().map(|piece| Block { offset: piece.remote, len: piece.len as u32 }).collect();
        let bytes: u64 = pieces.iter().map(|piece| piece.len).sum();
        let handle = self.handle(unit).handle;
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
        let asks = match transfer.op {
            Op::Read => Asks::Bytes { bytes, checks: transfer.checked.then_some(pieces.len()) },
            _ => Asks::Change { on_gpu: self.changes_a_gpu(unit) },
        };
        self.ask(unit, connection, asks, message, payload_len)
    }

    /// The checksums of a unit's local pieces. Only while some unit has not reported, so that the memory is in place.
    #[allow(unsafe_code, reason = "reads the local memory of a transfer")]
    fn checks(&self, unit: usize) -> Result<Vec<u32>> {
        let base = self.transfer.base(self.transfer.units[unit].part);
        let ranges = self
            .transfer
            .pieces(unit)
            .iter()
            .map(|piece| (base.wrapping_add(piece.local as usize).cast_const(), piece.len as usize));
        if self.transfer.local_is_lent() {
            return ranges.map(|(from, len)| checked::crc32c(self.transfer.op.name(), from, len)).collect();
        }
        // SAFETY: the transfer pins its local memory until every unit has reported, and the caller's has not.
        Ok(unsafe { checks::of_memory(ranges) })
    }

    /// Whether the bytes of a unit have arrived as they were sent.
    pub(super) fn verify(&self, unit: usize, sent: Option<Vec<u32>>) -> Result<()> {
        let transfer = &self.transfer;
        if !transfer.checked {
            return Ok(());
        }
        let sent = sent.ok_or_else(|| Error::protocol("read", "the owner sent no checksums"))?;
        let pieces = transfer.pieces(unit);
        let blocks: Vec<Block> =
            pieces.iter().map(|piece| Block { offset: piece.remote, len: piece.len as u32 }).collect();
        checks::compare("read", &blocks, &sent, &self.checks(unit)?)
    }

    /// Sends a unit's request; its answer, or its failure, reports.
    fn ask(
        self: &Arc<Self>,
        unit: usize,
        connection: &Arc<Connection>,
        asks: Asks,
        message: Message,
        payload_len: u64,
    ) -> Result<()> {
        let (session, transfer) = (self.session(), &self.transfer);
        let asked = session.open(connection, asks, Waiter::Unit { run: Arc::clone(self), unit })?;
        let request = asked.request;
        let (head, payload) = match self.frame(asked, &message, payload_len) {
            Ok(frame) => frame,
            Err(error) => return session.unsent(request).map_or(Ok(()), |_| Err(error)),
        };
        let sent = connection.send(head, Vec::new(), payload);
        #[cfg(test)]
        moments::reach(moments::Moment::Asked, &self.local_address(unit));
        match sent {
            Ok(()) if !transfer.is_stopped() => Ok(()),
            // A stop that came before the request was open did not find it.
            Ok(()) => {
                session.stop_late(connection, transfer.id, request);
                #[cfg(test)]
                moments::reach(moments::Moment::Looked, &self.local_address(unit));
                Ok(())
            }
            Err(error) => session.give_up(request).map_or(Ok(()), |_| Err(error)),
        }
    }

    /// The frame of a request, which keeps the memory in use that it names.
    fn frame(
        &self,
        asked: Asked<UnitHold>,
        message: &Message,
        payload_len: u64,
    ) -> Result<(Vec<u8>, Payload)> {
        let (transfer, request) = (&self.transfer, asked.request);
        let missing = || Error::new(Kind::Internal, "transfer", "a request without a hold on its memory");
        let hold = asked.hold.ok_or_else(missing)?;
        let mut head = message.frame(request, payload_len, 0);
        if transfer.checked && hold.unit < self.requests {
            // Of a read, the owner is asked for them.
            let checks = if transfer.op == Op::Read { Vec::new() } else { self.checks(hold.unit)? };
            head = checks::before(checks, request, head);
        }
        if payload_len == 0 {
            return Ok((head, Payload::Of(Keep::Transfer(hold, request))));
        }
        let held = Held::unit(hold, request);
        // Before the frame begins, which could not be sent whole any more.
        if transfer.local_is_lent() {
            let look = |part: &RawPartMut| checked::look(transfer.op.name(), part.ptr, part.len);
            held.parts().iter().try_for_each(look)?;
        }
        Ok((head, Payload::Memory(held)))
    }

    #[cfg(test)]
    fn local_address(&self, unit: usize) -> Option<usize> {
        let piece = self.transfer.pieces(unit).first()?;
        Some(self.transfer.base(self.transfer.units[unit].part).addr() + piece.local as usize)
    }

    /// Whether what a unit changes is on a GPU.
    pub(super) fn changes_a_gpu(&self, unit: usize) -> bool {
        self.handle(unit).on_gpu
    }

    /// The lane of a unit is lost, and the rules say that it is asked for again over another one.
    pub(super) fn again(self: &Arc<Self>, unit: usize, error: Error) {
        self.waiting.lock().push(unit);
        // A stop, or the end of the session, that came before did not find it there.
        if let Err(error) = self.session().will_start(self).and_then(|()| match self.transfer.is_stopped() {
            false => Ok(()),
            true => Err(self.transfer.stop_error()),
        }) {
            return self.fail_rest(&error);
        }
        let run = Arc::clone(self);
        // Opening a lane waits for the owner, and this thread may be the event loop.
        let repeating = runtime::start_thread("transfer", "towline-contact", move || {
            let lanes = run.session().lanes();
            if !run.take_waiting(unit) {
                return;
            }
            match lanes.and_then(|lanes| lanes.get(unit % lanes.len().max(1)).cloned().ok_or(error)) {
                Ok(lane) => {
                    if let Err(error) = run.request(unit, &lane) {
                        run.unsent(unit, &lane, error);
                    }
                }
                Err(error) => run.failed(unit, error),
            }
        });
        if let Err(error) = repeating
            && self.take_waiting(unit)
        {
            self.failed(unit, error);
        }
    }

    fn take_waiting(&self, unit: usize) -> bool {
        let mut waiting = self.waiting.lock();
        let found = waiting.iter().position(|one| *one == unit);
        found.map(|at| waiting.swap_remove(at)).is_some()
    }

    /// A unit has ended well; the connection is free for the next.
    pub(super) fn done(self: &Arc<Self>, unit: usize, connection: &Arc<Connection>) {
        let left = self.left.fetch_sub(1, Ordering::AcqRel) - 1;
        if left == 0 {
            self.over();
        }
        let reading = self.transfer.op == Op::Read && !self.failed.load(Ordering::Acquire);
        let notified = match &self.transfer.after.notify {
            Some(message) if left == 0 && reading => self.session().notify(message),
            _ => Ok(()),
        };
        // Only the signal is left: the bytes have been read, or not.
        if left == 1 && self.transfer.op == Op::Read {
            if reading {
                self.signal(0);
            } else {
                self.no_signal(&Error::new(Kind::Canceled, "signal", "the read before it failed"));
            }
        }
        match notified {
            Ok(()) => self.transfer.unit_done(),
            Err(error) => self.transfer.unit_failed(unit, error),
        }
        if left > 0 {
            self.feed(connection);
        }
    }

    /// A unit has failed. Where the others may still go well, they go on: the transfer says which blocks arrived.
    pub(super) fn failed(self: &Arc<Self>, unit: usize, error: Error) {
        let hopeless = !matches!(error.kind(), Kind::PermissionDenied | Kind::Invalid);
        self.unit_failed(unit, error.clone());
        if !hopeless {
            return;
        }
        // A region that was taken back says nothing of the others.
        if self.handles.len() > 1 && error.kind() == Kind::Stale && !error.is_owner_gone() {
            let part = self.transfer.units[unit].part;
            let message = format!("not begun: part {part} failed before");
            let dropped = Error::new(Kind::Canceled, self.transfer.op.name(), message);
            return self.fail_rest_by(|of| if of == part { &error } else { &dropped });
        }
        self.fail_rest(&error);
    }

    /// Reports for every unit that has not been sent yet.
    pub(crate) fn fail_rest(&self, error: &Error) {
        self.fail_rest_by(|_| error);
    }

    /// The same, with an error for each part.
    fn fail_rest_by<'e>(&self, error: impl Fn(usize) -> &'e Error) {
        let of = |unit: usize| error(self.transfer.units[unit].part).clone();
        loop {
            let unit = self.next.fetch_add(1, Ordering::Relaxed);
            if unit >= self.requests {
                break;
            }
            self.unit_failed(unit, of(unit));
        }
        let waiting = std::mem::take(&mut *self.waiting.lock());
        for unit in waiting {
            self.unit_failed(unit, of(unit));
        }
        self.no_signal(error(0));
    }

    fn unit_failed(&self, unit: usize, error: Error) {
        let first = !self.failed.swap(true, Ordering::AcqRel);
        // The owner waits in vain for the pieces that a signal or a notification was to follow.
        if first && self.counted() {
            self.session().close_count(self.transfer.id);
        }
        let left = self.left.fetch_sub(1, Ordering::AcqRel) - 1;
        if left == 0 {
            self.over();
        }
        self.transfer.unit_failed(unit, error.clone());
        if left == 1 {
            self.no_signal(&error);
        }
    }

    /// Reports for the signal's unit, where nobody has asked for the signal.
    fn no_signal(&self, error: &Error) {
        if !self.signalled.swap(true, Ordering::AcqRel) {
            self.unit_failed(self.requests, error.clone());
        }
    }

    /// Whether the owner counts the pieces.
    fn counted(&self) -> bool {
        self.transfer.op != Op::Read && !self.transfer.after.is_empty()
    }

    /// Every unit has ended.
    fn over(&self) {
        let session = self.session();
        if self.counted() {
            session.close_count(self.transfer.id);
        }
        if self.transfer.bytes() > SMALL {
            session.lanes_used();
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn requests(portion: bool, spans: &[(u64, u64, u64)]) -> Vec<u64> {
        let plan = Plan::spans(spans).unwrap();
        let (bytes, mut units) = (plan.bytes(), Vec::new());
        let plan = cut_into(Op::Read, (bytes, portion), 0, plan, &mut units).unwrap();
        let of = |unit: Unit| plan.pieces()[unit.pieces].iter().map(|piece| piece.len).sum();
        units.into_iter().map(of).collect()
    }

    #[test]
    fn a_portion_whose_bytes_lie_together_is_one_request() {
        for len in [1, 4095, 100_000, LEAST_UNIT + 1, MOST_UNIT - 1, MOST_UNIT] {
            assert_eq!(requests(true, &[(7, 0, len)]), [len]);
        }
        assert_eq!(
            requests(false, &[(7, 0, MOST_UNIT)]),
            [LEAST_UNIT; 4],
            "a transfer of its own is for all lanes"
        );
    }

    #[test]
    fn a_portion_of_scattered_blocks_is_cut_as_a_transfer_is() {
        let blocks: Vec<_> = (0..1024).map(|at| (at * 8192, at * 4096, 4096)).collect();
        assert_eq!(requests(true, &blocks), requests(false, &blocks));
        let tiny: Vec<_> = (0..10_000).map(|at| (at * 64, at * 16, 16)).collect();
        assert!(requests(true, &tiny).iter().all(|bytes| *bytes <= UNIT_BLOCKS as u64 * 16));
    }
}
