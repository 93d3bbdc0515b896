//! One transfer by NIXL: its units as requests, a few of which are under way at a time.
#![allow(unsafe_code, reason = "hands addresses of registered memory to NIXL")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use towline_sys::nixl::Progress;

use super::attachment::{INLINE, NixlAttachment};
use super::driver::{Exiting, Flight};
use super::memory::{Known, Memory};
use crate::layout::Plan;
use crate::transfer::submission::{Link, Submission, Unit};
use crate::transfer::{Help, TransferCore};
use crate::{Error, Kind, Result, room, runtime};

/// A request carries at most about this many bytes: where posting copies, a stop takes as long as that, and where it does
/// not, its end is what shows that something moves.
const UNIT: u64 = 32 << 20;

/// And at most this many pieces.
const UNIT_PIECES: usize = 1 << 14;

/// Requests of one transfer that are under way at a time.
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

/// One transfer by NIXL.
pub(super) struct Run {
    attachment: Arc<NixlAttachment>,
    pub(super) transfer: Arc<TransferCore>,
    memory: OnceLock<Arc<Memory>>,
    next: AtomicUsize,
    left: AtomicUsize,
    flying: AtomicUsize,
    /// Held by whoever posts.
    posting: Mutex<()>,
    /// Why the rest is not posted.
    hopeless: OnceLock<Error>,
    me: Weak<Run>,
}

impl Run {
    fn new(attachment: &Arc<NixlAttachment>, transfer: &Arc<TransferCore>) -> Arc<Run> {
        let run = Arc::new_cyclic(|me| Run {
            attachment: Arc::clone(attachment),
            transfer: Arc::clone(transfer),
            memory: OnceLock::new(),
            next: AtomicUsize::new(0),
            left: AtomicUsize::new(transfer.units.len()),
            flying: AtomicUsize::new(0),
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
    pub(super) fn start(attachment: &Arc<NixlAttachment>, transfer: &Arc<TransferCore>) {
        let run = Run::new(attachment, transfer);
        if transfer.stream.is_some() {
            let message = "NIXL moves the bytes, and a CUDA stream cannot wait for it: name none";
            run.fail(&Error::new(Kind::Unsupported, transfer.op.name(), message));
            run.work();
            return;
        }
        let known =
            transfer.near(0).is_none_or(|near| near.kept::<Known>().find(attachment.reach()).is_some());
        if known && transfer.bytes() <= INLINE {
            run.work();
            return;
        }
        let worked = Arc::clone(&run);
        if let Err(refused) = runtime::pool().spawn(Box::new(move || worked.work())) {
            run.fail(&refused.error);
            run.work();
        }
    }

    /// Goes on with a transfer of one unit whose request is under way.
    pub(super) fn flying(attachment: &Arc<NixlAttachment>, transfer: &Arc<TransferCore>, flight: Flight) {
        let run = Run::new(attachment, transfer);
        run.next.store(1, Ordering::SeqCst);
        run.launch(flight, 0);
    }

    fn launch(self: &Arc<Self>, flight: Flight, unit: usize) {
        self.flying.fetch_add(1, Ordering::SeqCst);
        self.transfer.engaged();
        self.attachment.engine.add(flight.for_unit(self, unit));
    }

    /// Why nothing more is posted.
    fn over_because(&self) -> Option<Error> {
        if self.transfer.is_stopped() {
            return Some(self.transfer.stop_error());
        }
        self.hopeless.get().cloned().or_else(|| self.attachment.handle.session().alive().err())
    }

    fn fail(&self, error: &Error) {
        let _ = self.hopeless.set(error.clone());
    }

    /// Posts what there is room for, or reports for what will not be posted.
    pub(super) fn work(self: &Arc<Self>) {
        // A worker, or a caller, that posts while the process ends would find NIXL taken apart.
        let Some(_inside) = Exiting::enter_unless_exiting() else { return };
        while self.has_work() {
            // Another thread that has it looks again before it leaves.
            let Some(posting) = self.posting.try_lock() else { return };
            while self.has_work() {
                let unit = self.next.fetch_add(1, Ordering::SeqCst);
                if unit >= self.transfer.units.len() {
                    break;
                }
                let posted = match self.over_because() {
                    Some(error) => Err(error),
                    None => self.post(unit),
                };
                match posted {
                    Ok(Some(flight)) => self.launch(flight, unit),
                    Ok(None) => self.ended(unit, Ok(())),
                    Err(error) => self.ended(unit, Err(error)),
                }
            }
            drop(posting);
        }
    }

    fn has_work(&self) -> bool {
        self.next.load(Ordering::SeqCst) < self.transfer.units.len()
            && (self.flying.load(Ordering::SeqCst) < WINDOW || self.over_because().is_some())
    }

    /// Posts a unit; `None` where it has ended.
    fn post(self: &Arc<Self>, unit: usize) -> Result<Option<Flight>> {
        let (transfer, attachment) = (&self.transfer, &self.attachment);
        let op = transfer.op.name();
        attachment.check_after(&transfer.after)?;
        let inside = attachment.enter(op)?;
        let pieces = transfer.pieces(unit);
        let Some(local) = transfer.near(0).filter(|_| !pieces.is_empty()) else {
            return inside.check(op).map(|()| None);
        };
        let memory = match self.memory.get() {
            Some(memory) => memory,
            None => {
                let memory = {
                    let (engine, region) = (&attachment.engine, local);
                    region.kept::<Known>().register(attachment.reach(), engine, region)?
                };
                self.memory.get_or_init(|| memory)
            }
        };
        let base = transfer.base(0) as usize;
        // SAFETY: the transfer keeps a use of its local region until NIXL has let go of all its requests, and its plan was
        // checked against that region.
        let (mut asked, key) = unsafe { attachment.request(transfer.op, memory, base, pieces) }?;
        match attachment.post(&mut asked) {
            Ok(Progress::Done) => {
                attachment.keep(key, asked);
                inside.check(op).map(|()| None)
            }
            Ok(Progress::InProgress) => Ok(Some(Flight::new(asked, key, inside, None, None))),
            // The engine finds out what it means.
            Err(error) => Ok(Some(Flight::new(asked, key, inside, None, Some(error)))),
        }
    }

    /// NIXL has let go of a request.
    pub(super) fn landed(self: &Arc<Self>) {
        self.flying.fetch_sub(1, Ordering::SeqCst);
        self.transfer.let_go();
    }

    /// A unit has ended; the last one speaks for what follows the bytes.
    pub(super) fn ended(self: &Arc<Self>, unit: usize, outcome: Result<()>) {
        let transfer = &self.transfer;
        if let Err(error) = &outcome
            && !matches!(error.kind(), Kind::PermissionDenied | Kind::Invalid)
        {
            self.fail(error);
        } else if let Err(error) = &outcome {
            tracing::debug!(%error, "a request was refused");
        }
        let last = self.left.fetch_sub(1, Ordering::SeqCst) == 1;
        let outcome = match outcome {
            Ok(()) if last && self.hopeless.get().is_none() => self.attachment.follow(&transfer.after),
            other => other,
        };
        match outcome {
            Ok(()) => {
                transfer.units_done(1, transfer.bytes_of(unit));
            }
            Err(error) => transfer.unit_failed(unit, error),
        }
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
            self.attachment.engine.drive_until(|| run.is_over() || !flying());
        }
    }
}
