//! What the paths that copy by themselves share: who copies, in which portions, and what follows the bytes.
#![allow(unsafe_code, reason = "passes on raw local addresses that the transfer keeps alive")]

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use super::{Attachment, Transport};
use crate::fence::pins::ProcessPin;
use crate::fence::table::Row;
use crate::layout::{Piece, Plan};
use crate::memory::Mapping;
use crate::region::RegionUse;
use crate::runtime::{self, Device};
use crate::session::GrantHandle;
use crate::transfer::{After, Help, Op, Signal, TransferCore};
use crate::{Error, Kind, Result, room};

/// Unless a path says otherwise, requests up to this size are copied by the calling thread: waking a worker costs as much as copying that, and the call
/// that starts a request is to take no longer than 50 µs.
const INLINE: u64 = 256 << 10;

/// Requests of more blocks are planned by a worker, and copied by none but workers: each block costs about as much as 256
/// bytes do.
const INLINE_BLOCKS: u64 = 512;

/// Workers take portions of at least this size, so that calling another one for the next portion is worth it.
const LEAST_PORTION: u64 = 2 << 20;

/// Of transfers from this size on, which many workers share, portions may be smaller: the pin and the hand-out do not show, and who
/// comes late, or ends early, leaves less to wait for.
const SHARED: u64 = 16 << 20;
const LEAST_SHARED: u64 = 512 << 10;

/// And of at most this size, two milliseconds' worth: a portion that has begun is copied to its end, also when the transfer was
/// cancelled or its owner has died. No less, because the C library's memcpy goes around the cache only in one long call: 256 MiB in
/// portions of 2 MiB took a quarter longer than in portions of 64 MiB, and in portions of 16 MiB no longer.
const MOST_PORTION: u64 = 16 << 20;

/// Portions per worker, so that they end at about the same time.
const PORTIONS_EACH: u64 = 4;

/// A path on which this process copies the bytes itself.
pub(crate) trait Direct: Send + Sync + 'static {
    fn transport(&self) -> &'static dyn Transport;

    /// Copies the pieces, pinned: either all of them while the region was valid, or an error.
    ///
    /// # Safety
    /// `local` plus every piece's local range is memory that the caller keeps alive and pinned.
    unsafe fn copy(&self, op: Op, local: *mut u8, pieces: &[Piece]) -> Result<()>;

    /// An atomic operation on a word of the region, where this path can do it.
    fn atomic(&self, offset: u64, op: crate::wire::AtomicOp) -> Result<u64>;

    /// Raises a counter of the region and wakes who waits for it.
    fn signal(&self, signal: Signal) -> Result<()>;

    /// Hands the owner a message.
    fn notify(&self, message: &[u8]) -> Result<()>;

    /// Whether the owner is alive as far as is known.
    fn alive(&self) -> Result<()>;

    /// Pins the region for long, where its memory is shared with this process.
    fn hold(&self) -> Option<Result<Held>> {
        None
    }

    /// How GPUs copy by this way; see [`Attachment::by_gpu`].
    fn by_gpu(&self) -> Option<Arc<dyn Attachment>> {
        None
    }

    /// Whether a copy waits for a device, and so never belongs into the calling thread.
    fn blocks(&self) -> bool {
        false
    }

    /// The device that a copy waits for, where it may hang: only its own threads wait then, and never a caller, whose limit holds.
    fn device(&self) -> Option<Device> {
        None
    }

    /// Requests up to this size are copied by the calling thread.
    fn most_at_once(&self) -> u64 {
        INLINE
    }

    /// What follows the bytes.
    fn after(&self, after: &After) -> Result<()> {
        if let Some(signal) = after.signal {
            self.signal(signal)?;
        }
        match &after.notify {
            Some(message) => self.notify(message),
            None => Ok(()),
        }
    }
}

/// A direct path bound to a region.
pub(crate) struct DirectAttachment<D>(pub(crate) Arc<D>);

impl<D: Direct> Attachment for DirectAttachment<D> {
    fn transport(&self) -> &'static dyn Transport {
        self.0.transport()
    }

    fn by_gpu(&self) -> Option<Arc<dyn Attachment>> {
        self.0.by_gpu()
    }

    unsafe fn run_now(
        &self,
        op: Op,
        local: *mut u8,
        pieces: &[Piece],
        bytes: u64,
        after: &After,
    ) -> Option<Result<Option<u64>>> {
        if !self.at_once(bytes) || pieces.len() as u64 > INLINE_BLOCKS {
            return None;
        }
        let moved = match op {
            Op::Atomic { offset, op } => self.0.atomic(offset, op).map(Some),
            _ if pieces.is_empty() => Ok(None),
            // SAFETY: the caller's obligation is the same.
            _ => unsafe { self.0.copy(op, local, pieces) }.map(|()| None),
        };
        Some(moved.and_then(|value| self.0.after(after).map(|()| value)))
    }

    fn at_once(&self, bytes: u64) -> bool {
        bytes == 0 || (bytes <= self.0.most_at_once() && !self.0.blocks())
    }

    fn starts_later(&self, _op: Op, bytes: u64, blocks: u64) -> bool {
        // One range is checked by the call all the same. Cutting a long one into its portions was a third of the call.
        blocks > INLINE_BLOCKS || (blocks == 1 && bytes >= SHARED)
    }

    fn cut(&self, op: Op, plan: Plan, _after: &After) -> Result<(Plan, Vec<Range<usize>>)> {
        let workers = runtime::pool().limit() as u64;
        let least = if plan.bytes() < SHARED { LEAST_PORTION } else { LEAST_SHARED };
        let portion = (plan.bytes() / (workers * PORTIONS_EACH)).clamp(least, MOST_PORTION);
        // Whole pages, so that no element of a reduction is cut in two.
        let portion = portion & !4095;
        let plan = plan.cut(portion)?;
        let mut units = room::collect(op.name(), plan.chunks(portion))?;
        if units.is_empty() {
            units.push(0..0);
        }
        Ok((plan, units))
    }

    fn start(self: Arc<Self>, transfer: &Arc<TransferCore>) {
        let run = Arc::new_cyclic(|me| Run {
            direct: Arc::clone(&self.0),
            transfer: Arc::clone(transfer),
            next: AtomicUsize::new(0),
            left: AtomicUsize::new(transfer.units.len()),
            failed: AtomicBool::new(false),
            wanted: runtime::pool().limit().min(transfer.units.len()),
            working: AtomicUsize::new(0),
            called: AtomicUsize::new(0),
            me: Weak::clone(me),
        });
        let weak = Arc::downgrade(&run);
        let help: Weak<dyn Help> = weak;
        let few = transfer.units.len() <= FEW;
        if few {
            run.called.store(1, Ordering::Relaxed);
        }
        transfer.set_help(help);
        let come = move || {
            if few {
                run.called.fetch_sub(1, Ordering::Relaxed);
            }
            run.take_part();
        };
        let called = match self.0.device() {
            Some(device) => runtime::devices().spawn(device, Box::new(come)),
            // This is the thread that has planned it behind the call then: it may as well work on it.
            None if transfer.starts_later() => return come(),
            None => runtime::starters().spawn(Box::new(come)),
        };
        if let Err(refused) = called {
            // No thread can be made: the caller does the work, late but surely.
            (refused.job)();
        }
    }

    fn stop(&self, _transfer: &Arc<TransferCore>) {
        // Workers look at the transfer's flag before every portion.
    }

    fn alive(&self) -> Result<()> {
        self.0.alive()
    }

    fn hold(&self) -> Option<Result<Held>> {
        self.0.hold()
    }
}

/// A region that is pinned for long, with what keeps its memory reachable here.
pub(crate) enum Held {
    /// A region of this process, and where in it the grant begins.
    Here { used: RegionUse, offset: usize },
    /// A region of another process, and where in the mapping the grant begins.
    There { pin: Arc<ProcessPin>, handle: Arc<GrantHandle>, mapping: Arc<Mapping>, start: usize },
}

impl Held {
    /// The first byte of the grant.
    pub(crate) fn base(&self) -> usize {
        match self {
            Held::Here { used, offset } => used.core().addr + offset,
            Held::There { mapping, start, .. } => mapping.ptr().expose_provenance() + start,
        }
    }

    /// Whether it is memory that was lent to this process.
    pub(crate) fn is_lent(&self) -> bool {
        matches!(self, Held::Here { used, .. } if used.core().lent)
    }

    /// The region's row in its owner's table.
    #[inline]
    pub(crate) fn row(&self) -> Option<&Row> {
        match self {
            Held::Here { used, .. } => used.core().registry.table.row(used.core().row),
            Held::There { handle, .. } => handle.row(),
        }
    }

    /// Whether the owner wants the region back, or is gone.
    pub(crate) fn is_stale(&self) -> bool {
        match self {
            Held::Here { used, .. } => used.core().is_closed(),
            Held::There { pin, handle, .. } => {
                handle.session().alive().is_err() || handle.row().is_none_or(|row| pin.is_unwanted(row))
            }
        }
    }
}

/// One transfer being copied by workers.
struct Run<D> {
    direct: Arc<D>,
    transfer: Arc<TransferCore>,
    next: AtomicUsize,
    left: AtomicUsize,
    failed: AtomicBool,
    /// How many threads should work on it, how many do, and how many were called and have not come.
    wanted: usize,
    working: AtomicUsize,
    called: AtomicUsize,
    me: Weak<Run<D>>,
}

/// A caller that waits for so few portions relies on the starter that was called: calling another one takes as long as copying
/// one of them. Of more portions it does not, since starters come late where the machine is busy.
const FEW: usize = 4;

/// Of so many processors one is left alone until the first portion has been copied.
const MANY: usize = 8;

/// How many threads of this process copy for transfers. With more of them than processors each waits for its turn in the middle of a
/// portion; and so does who waits for the end of a transfer whose owner has died.
static COPYING: AtomicUsize = AtomicUsize::new(0);

/// One of them; none where it waits for a device.
struct Copying(usize);

impl Copying {
    fn begin(blocks: bool) -> Copying {
        let one = usize::from(!blocks);
        COPYING.fetch_add(one, Ordering::Relaxed);
        Copying(one)
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        COPYING.fetch_sub(self.0, Ordering::Relaxed);
    }
}

impl<D: Direct> Run<D> {
    /// Takes a place among those who work on it, while there is one; not among more than there are processors for, but for the
    /// first.
    fn join(&self) -> Option<Copying> {
        let join = |working| (working < self.wanted).then_some(working + 1);
        let before = self.working.fetch_update(Ordering::Relaxed, Ordering::Relaxed, join).ok()?;
        let copying = Copying::begin(self.direct.blocks());
        if before > 0 && !self.has_processor(COPYING.load(Ordering::Relaxed)) {
            self.working.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(copying)
    }

    /// Whether so many threads have a processor each; those that wait for a device need none.
    fn has_processor(&self, copying: usize) -> bool {
        self.direct.blocks() || copying <= runtime::pool().limit()
    }

    /// Calls one more worker, where one is wanted besides those who are left out, and a processor is free for it; false where not. It
    /// has no place before it comes: a caller that waits is there sooner.
    fn call_one(&self, left_out: usize) -> bool {
        let called = self.called.load(Ordering::Relaxed);
        if self.next.load(Ordering::Relaxed) >= self.transfer.units.len()
            || self.working.load(Ordering::Relaxed) + called + left_out >= self.wanted
            || !self.has_processor(COPYING.load(Ordering::Relaxed) + called + 1)
        {
            return false;
        }
        let Some(run) = self.me.upgrade() else { return false };
        self.called.fetch_add(1, Ordering::Relaxed);
        let come = Box::new(move || {
            run.called.fetch_sub(1, Ordering::Relaxed);
            run.take_part();
        });
        let called = match self.direct.device() {
            Some(device) => runtime::devices().spawn(device, come),
            None => runtime::sharers().spawn(come),
        };
        // Those who are there do the work of one who cannot come.
        if called.is_err() {
            self.called.fetch_sub(1, Ordering::Relaxed);
        }
        called.is_ok()
    }

    /// Works on it, where there is a place. A starter that leaves it to others is there for what is posted when they are done.
    fn take_part(&self) {
        self.share();
        // Who has ended it has woken whoever waited for that.
        if self.left.load(Ordering::Acquire) > 0 {
            let me = Weak::clone(&self.me);
            runtime::starters().look_next(move || {
                let copied = |run: Arc<Self>| run.left.load(Ordering::Acquire) == 0;
                // No more of them than leave a processor to look with.
                !me.upgrade().is_none_or(copied) && COPYING.load(Ordering::Relaxed) < runtime::pool().limit()
            });
        }
    }

    fn share(&self) {
        let Some(_copying) = self.join() else { return };
        // All that are wanted: a call takes less than it takes until who was called could call others. But for one where that is every
        // processor of many: who posted the transfer is about to return, and would lose its own to the last. It comes itself if it waits.
        let left_out = usize::from(self.wanted >= MANY && self.wanted == runtime::pool().limit());
        while self.call_one(left_out) {}
        self.work();
    }

    fn work(&self) {
        let transfer = &self.transfer;
        let local = transfer.local_base();
        loop {
            let unit = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(pieces) = transfer.units.get(unit) else { return };
            let mut outcome = if transfer.is_stopped() {
                Err(transfer.stop_error())
            } else if let Err(closed) = transfer.check_open() {
                // Closing waits for the portions that have begun, and not for the rest.
                Err(closed)
            } else {
                // SAFETY: the transfer holds a use of its local region until its last unit has reported, and the
                // plan was checked against that region's length.
                unsafe { self.direct.copy(transfer.op, local, &transfer.plan.pieces()[pieces.clone()]) }
            };
            if outcome.is_err() {
                self.failed.store(true, Ordering::Release);
            }
            // The last worker to finish speaks for all: every portion is visible by then.
            if self.left.fetch_sub(1, Ordering::AcqRel) == 1 && !self.failed.load(Ordering::Acquire) {
                outcome = self.direct.after(&transfer.after);
            }
            match outcome {
                Ok(()) => {
                    transfer
                        .progressed(transfer.plan.pieces()[pieces.clone()].iter().map(|one| one.len).sum());
                    transfer.unit_done();
                }
                Err(error) => transfer.unit_failed(unit, error),
            }
            // Another transfer may have ended meanwhile, and left a processor.
            self.call_one(0);
        }
    }
}

impl<D: Direct> Help for Run<D> {
    /// A caller that waits takes the place of a worker that is not needed then.
    fn help(&self) {
        if self.direct.device().is_none() {
            self.take_part();
        }
    }
}

/// The error for a word that is not eight aligned bytes.
pub(crate) fn misaligned(op: &'static str, offset: u64) -> Error {
    Error::new(Kind::Invalid, op, format!("the word at offset {offset} is not aligned to 8 bytes"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::Limits;
    use crate::transfer::{Parts, Transfer};
    use crate::transport::inproc::InProc;

    /// A path that copies nothing, and notes how many portions were copied when something followed them.
    #[derive(Default)]
    struct Counted {
        copied: AtomicUsize,
        /// One more than the number, so that zero means that nothing followed.
        followed: AtomicUsize,
        fails_at: Option<u64>,
        /// How many copy now, and how many did at most.
        inside: Option<Arc<(AtomicUsize, AtomicUsize)>>,
    }

    impl Direct for Counted {
        fn transport(&self) -> &'static dyn Transport {
            &InProc
        }

        unsafe fn copy(&self, _op: Op, _local: *mut u8, pieces: &[Piece]) -> Result<()> {
            if let Some(inside) = &self.inside {
                inside.1.fetch_max(inside.0.fetch_add(1, Ordering::AcqRel) + 1, Ordering::AcqRel);
                std::thread::sleep(std::time::Duration::from_millis(2));
                inside.0.fetch_sub(1, Ordering::AcqRel);
            }
            // The first portion is the last one to be copied.
            if pieces[0].remote == 0 {
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            if self.fails_at == Some(pieces[0].remote) {
                return Err(Error::new(Kind::Stale, "write", "gone"));
            }
            self.copied.fetch_add(1, Ordering::AcqRel);
            Ok(())
        }

        fn atomic(&self, _offset: u64, _op: crate::wire::AtomicOp) -> Result<u64> {
            Ok(0)
        }

        fn signal(&self, _signal: Signal) -> Result<()> {
            self.followed.store(self.copied.load(Ordering::Acquire) + 1, Ordering::Release);
            Ok(())
        }

        fn notify(&self, _message: &[u8]) -> Result<()> {
            Ok(())
        }

        fn alive(&self) -> Result<()> {
            Ok(())
        }
    }

    fn write_over(direct: Counted) -> (Result<()>, Arc<Counted>, usize) {
        let direct = Arc::new(direct);
        let attachment = Arc::new(DirectAttachment(Arc::clone(&direct)));
        let core = TransferCore::begin(Parts {
            id: crate::transfer::next_id(),
            op: Op::Write,
            plan: Plan::span(0, 0, 8 * LEAST_PORTION * PORTIONS_EACH).unwrap(),
            local: None,
            local_base: 0,
            after: After { signal: Some(Signal { offset: 0, add: 1 }), notify: None },
            stream: None,
            limits: Limits::default(),
            checked: false,
            attachment: Arc::clone(&attachment) as Arc<dyn Attachment>,
            peer: "peer".into(),
            on_end: Box::new(|_| ()),
        })
        .unwrap();
        attachment.start(&core);
        let units = core.units.len();
        (Transfer::live(core).wait(), direct, units)
    }

    #[test]
    fn what_follows_the_bytes_follows_all_of_them() {
        let (ended, direct, units) = write_over(Counted::default());
        ended.unwrap();
        assert!(units > 1);
        assert_eq!(direct.followed.load(Ordering::Acquire), units + 1);
    }

    #[test]
    fn transfers_side_by_side_have_a_thread_each_and_no_more_than_there_are_processors_for() {
        const TRANSFERS: usize = 6;
        let inside: Arc<(AtomicUsize, AtomicUsize)> = Arc::default();
        std::thread::scope(|scope| {
            for _ in 0..TRANSFERS {
                scope.spawn(|| {
                    let counted = Counted { inside: Some(Arc::clone(&inside)), ..Counted::default() };
                    let (ended, direct, units) = write_over(counted);
                    ended.unwrap();
                    assert_eq!(direct.copied.load(Ordering::Acquire), units);
                });
            }
        });
        let most = inside.1.load(Ordering::Acquire);
        // Of one transfer each, the first comes in whatever the others do, and one that has looked may come in beside it.
        assert!(most <= TRANSFERS + runtime::pool().limit(), "{most} threads copied at once");
    }

    #[test]
    fn nothing_follows_bytes_of_which_some_failed() {
        let (ended, direct, _) = write_over(Counted { fails_at: Some(0), ..Counted::default() });
        assert_eq!(ended.unwrap_err().kind(), Kind::Stale);
        assert_eq!(direct.followed.load(Ordering::Acquire), 0);
    }
}
