//! One transfer by NIXL: its units as requests, a few of which are in flight at a time. Units of several parts share requests.
#![allow(unsafe_code, reason = "hands addresses of registered memory to NIXL")]

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use towline_sys::nixl::Progress;

use super::attachment::{INLINE, Listed, NixlAttachment, PinnedRegion};
use super::driver::{Exiting, Flight};
use super::memory::{Known, Memory};
use crate::layout::Plan;
use crate::transfer::submission::{Link, Submission, Unit, concerns_all};
use crate::transfer::{Help, Several, Signal, TransferCore};
use crate::{Error, Kind, Result, room, runtime};

/// A request carries at most about this many bytes: where posting copies, a stop takes as long as that, and where it does
/// not, its end is what shows that something moves.
const UNIT: u64 = 32 << 20;

/// And at most this many pieces.
const UNIT_PIECES: usize = 1 << 14;

/// And of at most this many parts: each may hold a pin of the owner's for as long as NIXL is at it, and there are some hundreds of these
/// for all transfers.
const UNIT_PARTS: usize = 64;

/// Requests of one transfer that are in flight at a time.
const WINDOW: usize = 4;

/// Makes a transfer of a submission, cut into requests.
pub(super) fn cut(submission: &mut Submission<'_>, link: Arc<dyn Link>) -> Result<Arc<TransferCore>> {
    let op = submission.op.name();
    let cut = |part, plan: Plan, units: &mut Vec<Unit>| {
        // NIXL goes through a list in its order, and both the kernel that copies and a disk are faster along the owner's pages.
        let plan = plan.cut(UNIT)?.sorted_by_key(|piece| piece.remote);
        for chunk in plan.chunks(UNIT) {
            let mut start = chunk.start;
            while start < chunk.end {
                let end = chunk.end.min(start + UNIT_PIECES);
                room::push(op, units, Unit { part, pieces: start..end })?;
                start = end;
            }
        }
        Ok(plan)
    };
    submission.begin(link, cut, None)
}

/// Units of several parts, joined to requests.
fn joined(transfer: &TransferCore) -> Result<Vec<Range<usize>>> {
    let op = transfer.op.name();
    let (mut requests, mut start, mut bytes, mut pieces) = (Vec::new(), 0, 0, 0);
    for (unit, of) in transfer.units.iter().enumerate() {
        let (more, count) = (transfer.bytes_of(unit), of.pieces.len());
        let parts = of.part - transfer.units[start].part;
        let full = bytes + more > UNIT || pieces + count > UNIT_PIECES || parts >= UNIT_PARTS;
        if full && unit > start {
            room::push(op, &mut requests, start..unit)?;
            (start, bytes, pieces) = (unit, 0, 0);
        }
        (bytes, pieces) = (bytes + more, pieces + count);
    }
    room::push(op, &mut requests, start..transfer.units.len())?;
    Ok(requests)
}

/// What became of a request.
#[derive(Clone)]
pub(super) struct Outcome {
    /// Of these parts of it.
    failed: Vec<(usize, Error)>,
    /// And of the others.
    others: Result<()>,
}

impl Outcome {
    pub(super) fn of_all(others: Result<()>) -> Outcome {
        Outcome { failed: Vec::new(), others }
    }

    /// Of one whose bytes have moved: they count where the region was valid all the time.
    pub(super) fn checked(pinned: &Several<PinnedRegion>, op: &'static str) -> Outcome {
        let stale = |one: &PinnedRegion| one.check(op).err().map(|error| (one.part, error));
        Outcome { failed: pinned.iter().filter_map(stale).collect(), others: Ok(()) }
    }

    /// Of one that has failed, where that is because some of its regions were taken back.
    pub(super) fn blamed(pinned: &Several<PinnedRegion>, op: &'static str) -> Option<Outcome> {
        let Outcome { failed, .. } = Outcome::checked(pinned, op);
        let (part, _) = failed.first()?;
        let message = format!("in one request with part {part}, which failed");
        Some(Outcome { others: Err(Error::new(Kind::Canceled, op, message)), failed })
    }

    /// Why not all of it went well, and at which part that was, where it was at one.
    fn cause(&self) -> Option<(Option<usize>, &Error)> {
        match self.failed.first() {
            Some((part, error)) => Some((Some(*part), error)),
            None => self.others.as_ref().err().map(|error| (None, error)),
        }
    }

    pub(super) fn is_good(&self) -> bool {
        self.cause().is_none()
    }

    /// Whether NIXL itself has failed.
    pub(super) fn is_of_nixl(&self) -> bool {
        self.others.as_ref().is_err_and(|error| error.kind() == Kind::Native)
    }

    fn of(&self, part: usize) -> Result<()> {
        match self.failed.iter().find(|(failed, _)| *failed == part) {
            Some((_, error)) => Err(error.clone()),
            None => self.others.clone(),
        }
    }
}

/// Both sides of a part: the owner's region, and what NIXL knows of the local memory.
pub(super) struct Sides {
    attachment: Arc<NixlAttachment>,
    memory: OnceLock<Arc<Memory>>,
}

impl Sides {
    pub(super) fn of(attachment: Arc<NixlAttachment>) -> Sides {
        Sides { attachment, memory: OnceLock::new() }
    }
}

/// One transfer by NIXL.
pub(super) struct Run {
    /// Of each part; all of them are of one peer's agent.
    sides: Several<Sides>,
    pub(super) transfer: Arc<TransferCore>,
    /// The units of each request; empty where each unit is one.
    requests: Vec<Range<usize>>,
    count: usize,
    next: AtomicUsize,
    left: AtomicUsize,
    flying: AtomicUsize,
    /// Nothing follows any more.
    failed: AtomicBool,
    /// Held by the thread that posts.
    posting: Mutex<()>,
    /// What becomes of the requests that are not posted any more.
    hopeless: OnceLock<Outcome>,
    me: Weak<Run>,
}

impl Run {
    fn new(sides: Several<Sides>, transfer: &Arc<TransferCore>) -> Arc<Run> {
        // Where there is no room for the list, each unit is a request.
        let requests = if sides.len() > 1 { joined(transfer).unwrap_or_default() } else { Vec::new() };
        let count = if requests.is_empty() { transfer.units.len() } else { requests.len() };
        let run = Arc::new_cyclic(|me| Run {
            sides,
            transfer: Arc::clone(transfer),
            requests,
            count,
            next: AtomicUsize::new(0),
            left: AtomicUsize::new(count),
            flying: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            posting: Mutex::default(),
            hopeless: OnceLock::new(),
            me: me.clone(),
        });
        let weak = Arc::downgrade(&run);
        let help: Weak<dyn Help> = weak;
        transfer.set_help(help);
        run
    }

    /// Starts a transfer: a worker posts it, or the caller as soon as it waits.
    pub(super) fn start(sides: Several<Sides>, transfer: &Arc<TransferCore>) {
        let run = Run::new(sides, transfer);
        if transfer.stream.is_some() {
            let message = "NIXL moves the bytes, and a CUDA stream cannot wait for it: name none";
            run.fail(Error::new(Kind::Unsupported, transfer.op.name(), message));
            run.work();
            return;
        }
        let reach = run.first().reach();
        let is_known =
            |part| transfer.near(part).is_none_or(|near| near.kept::<Known>().find(reach).is_some());
        if transfer.bytes() <= INLINE && (0..run.sides.len()).all(is_known) {
            run.work();
            return;
        }
        let worked = Arc::clone(&run);
        if let Err(refused) = runtime::pool().spawn(Box::new(move || worked.work())) {
            run.fail(refused.error.clone());
            run.work();
        }
    }

    /// Goes on with a transfer of one unit whose request is in flight.
    pub(super) fn flying(attachment: Arc<NixlAttachment>, transfer: &Arc<TransferCore>, flight: Flight) {
        let run = Run::new(Several::one(Sides::of(attachment)), transfer);
        run.next.store(1, Ordering::SeqCst);
        run.launch(flight, 0);
    }

    /// The region of the first part: its agent and its session are those of all.
    fn first(&self) -> &Arc<NixlAttachment> {
        &self.sides.first().attachment
    }

    /// The units of a request.
    fn units(&self, request: usize) -> Range<usize> {
        self.requests.get(request).cloned().unwrap_or(request..request + 1)
    }

    fn launch(self: &Arc<Self>, flight: Flight, request: usize) {
        self.flying.fetch_add(1, Ordering::SeqCst);
        self.transfer.engaged();
        self.first().engine.add(flight.for_request(self, request));
    }

    /// What becomes of requests now, where nothing more is posted.
    fn over_because(&self) -> Option<Outcome> {
        if self.transfer.is_stopped() {
            return Some(Outcome::of_all(Err(self.transfer.stop_error())));
        }
        let gone = || self.first().handle.session().alive().err();
        self.hopeless.get().cloned().or_else(|| gone().map(|error| Outcome::of_all(Err(error))))
    }

    fn fail(&self, error: Error) {
        let _ = self.hopeless.set(Outcome::of_all(Err(error)));
    }

    /// What becomes of a request that is not posted because of one of the parts.
    fn not_begun(&self, part: usize, error: Error) -> Outcome {
        if self.sides.len() == 1 || concerns_all(&error) {
            return Outcome::of_all(Err(error));
        }
        let message = format!("not begun: part {part} failed before");
        let others = Err(Error::new(Kind::Canceled, self.transfer.op.name(), message));
        Outcome { failed: vec![(part, error)], others }
    }

    /// Posts what there is room for, or reports for what will not be posted.
    pub(super) fn work(self: &Arc<Self>) {
        // A worker, or a caller, that posts while the process ends would find NIXL taken apart.
        let Some(_inside) = Exiting::enter_unless_exiting() else { return };
        while self.has_work() {
            // Another thread that has it looks again before it leaves.
            let Some(posting) = self.posting.try_lock() else { return };
            while self.has_work() {
                let request = self.next.fetch_add(1, Ordering::SeqCst);
                if request >= self.count {
                    break;
                }
                let posted = match self.over_because() {
                    Some(outcome) => Err(outcome),
                    None => self.post(request),
                };
                match posted {
                    Ok(flight) => self.launch(flight, request),
                    Err(outcome) => self.ended(request, outcome),
                }
            }
            drop(posting);
        }
    }

    fn has_work(&self) -> bool {
        self.next.load(Ordering::SeqCst) < self.count
            && (self.flying.load(Ordering::SeqCst) < WINDOW || self.over_because().is_some())
    }

    /// Posts a request, or says what became of it in this call.
    fn post(self: &Arc<Self>, request: usize) -> Result<Flight, Outcome> {
        let transfer = &self.transfer;
        let op = transfer.op.name();
        let all = |error| Outcome::of_all(Err(error));
        let enter = |part: usize| {
            let entered = self.sides[part].attachment.enter(op, part);
            entered.map_err(|error| self.not_begun(part, error))
        };
        let units = self.units(request);
        let (first, last) = (transfer.units[units.start].part, transfer.units[units.end - 1].part);
        let mut listed = Vec::new();
        for unit in units {
            let part = transfer.units[unit].part;
            let (base, pieces) = (transfer.base(part) as usize, transfer.pieces(unit));
            if let Some(memory) = self.memory(part).map_err(|error| self.not_begun(part, error))?
                && !pieces.is_empty()
            {
                let of = &self.sides[part].attachment;
                room::push(op, &mut listed, Listed { of, memory, base, pieces }).map_err(all)?;
            }
        }
        // Behind the registrations, which may take long: the owner waits for who is inside.
        let mut pinned = Several::one(enter(first)?);
        for part in first + 1..=last {
            pinned.push(op, enter(part)?).map_err(all)?;
        }
        if listed.is_empty() {
            return Err(Outcome::checked(&pinned, op));
        }
        let attachment = &self.sides[first].attachment;
        // SAFETY: the transfer keeps a use of each local region until NIXL has let go of all its requests, and its plans were
        // checked against those regions.
        let (mut asked, key) = unsafe { attachment.request(transfer.op, &listed) }.map_err(all)?;
        match attachment.post(&mut asked) {
            Ok(Progress::Done) => {
                attachment.keep(key, asked);
                Err(Outcome::checked(&pinned, op))
            }
            Ok(Progress::InProgress) => Ok(Flight::new(asked, key, pinned, None, None)),
            // The engine finds out what it means.
            Err(error) => Ok(Flight::new(asked, key, pinned, None, Some(error))),
        }
    }

    /// What NIXL knows of the local memory of a part, registered now where it is not; `None` where there is none.
    fn memory(&self, part: usize) -> Result<Option<&Arc<Memory>>> {
        let Sides { attachment, memory } = &self.sides[part];
        let Some(near) = self.transfer.near(part) else { return Ok(None) };
        if let Some(memory) = memory.get() {
            return Ok(Some(memory));
        }
        let known = near.kept::<Known>().register(attachment.reach(), &attachment.engine, near)?;
        Ok(Some(memory.get_or_init(|| known)))
    }

    /// NIXL has let go of a request.
    pub(super) fn landed(self: &Arc<Self>) {
        self.flying.fetch_sub(1, Ordering::SeqCst);
        self.transfer.let_go();
    }

    /// A request has ended; the last one speaks for what follows the bytes.
    pub(super) fn ended(self: &Arc<Self>, request: usize, outcome: Outcome) {
        let transfer = &self.transfer;
        if let Some((part, error)) = outcome.cause() {
            self.failed.store(true, Ordering::SeqCst);
            if matches!(error.kind(), Kind::PermissionDenied | Kind::Invalid) {
                tracing::debug!(%error, "a request was refused");
            } else {
                let _ = self.hopeless.set(match part {
                    Some(part) => self.not_begun(part, error.clone()),
                    None => Outcome::of_all(Err(error.clone())),
                });
            }
        }
        let last = self.left.fetch_sub(1, Ordering::SeqCst) == 1;
        let (mut good, mut bytes, mut at) = (0, 0, None);
        for unit in self.units(request) {
            match outcome.of(transfer.units[unit].part) {
                Ok(()) => (good, bytes, at) = (good + 1, bytes + transfer.bytes_of(unit), Some(unit)),
                Err(error) => transfer.unit_failed(unit, error),
            }
        }
        let Some(at) = at else { return };
        let followed = match last && !self.failed.load(Ordering::SeqCst) {
            true => self.follow(),
            false => Ok(()),
        };
        match followed {
            Ok(()) => transfer.units_done(good, bytes),
            Err(error) => {
                transfer.units_done(good - 1, bytes - transfer.bytes_of(at));
                // One of the part that it is about speaks for it.
                let of_signal = |signal: Signal| transfer.units.iter().position(|of| of.part == signal.part);
                transfer.unit_failed(transfer.after.signal.and_then(of_signal).unwrap_or(at), error);
            }
        }
    }

    fn follow(&self) -> Result<()> {
        let after = &self.transfer.after;
        self.sides[after.signal.map_or(0, |signal| signal.part)].attachment.follow(after)
    }

    pub(super) fn is_over(&self) -> bool {
        self.left.load(Ordering::SeqCst) == 0
    }
}

impl Help for Run {
    /// A caller that waits posts, and drives NIXL for a while.
    fn help(&self) {
        if let Some(run) = self.me.upgrade() {
            run.work();
            // While another thread posts there is nothing to drive: its caller sleeps.
            let flying = || run.flying.load(Ordering::SeqCst) > 0;
            self.first().engine.drive_until(|| run.is_over() || !flying());
        }
    }
}
