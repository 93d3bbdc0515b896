//! What is done behind the call that starts a transfer: its list of blocks is checked and planned, and the first of it is sent.
//!
//! A worker is called for it. A caller that waits does it itself where the worker has not come yet: then nobody waits
//! for a thread to wake up.

use std::ops::{Deref, Range};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock, Weak};

use super::{Parts, TransferCore};
use crate::layout::Plan;
use crate::sync::lock;
use crate::{Error, Kind, Result, runtime};

/// Makes the plan, and checks everything about it that was not checked before.
pub(crate) type Planning = Box<dyn FnOnce() -> Result<Plan> + Send>;

/// A plan that may not be made yet: nothing is to be moved until then.
pub(crate) struct LatePlan(OnceLock<Plan>);

/// The units that a transfer is cut into: none until it is.
pub(crate) struct LateUnits(OnceLock<Vec<Range<usize>>>);

impl LatePlan {
    pub(super) fn new(plan: Option<Plan>) -> LatePlan {
        LatePlan(plan.map_or_else(OnceLock::new, OnceLock::from))
    }
}

impl Deref for LatePlan {
    type Target = Plan;

    fn deref(&self) -> &Plan {
        static NOTHING: Plan = Plan::nothing();
        self.0.get().unwrap_or(&NOTHING)
    }
}

impl LateUnits {
    pub(super) fn new(units: Option<Vec<Range<usize>>>) -> LateUnits {
        LateUnits(units.map_or_else(OnceLock::new, OnceLock::from))
    }
}

impl Deref for LateUnits {
    type Target = [Range<usize>];

    fn deref(&self) -> &[Range<usize>] {
        self.0.get().map_or(&[], Vec::as_slice)
    }
}

/// A transfer that is to be planned: how large it will be, and how.
pub(super) struct Later {
    pub(super) bytes: u64,
    pub(super) blocks: u64,
    pub(super) planning: Planning,
}

impl TransferCore {
    /// Begins a transfer of that many bytes and blocks whose plan is made later, by a worker or by a caller that waits. The
    /// plan of the parts does not count. The limits run from now.
    #[inline]
    pub(crate) fn begin_later(
        parts: Parts,
        bytes: u64,
        blocks: u64,
        planning: Planning,
    ) -> Arc<TransferCore> {
        let core = TransferCore::new(parts, None, Some(Later { bytes, blocks, planning }));
        let soon = Arc::clone(&core);
        let job = Box::new(move || {
            soon.launch();
            soon.take_part();
        });
        if let Err(refused) = runtime::starters().spawn(job) {
            // No thread can be made: the caller does it, late but surely.
            (refused.job)();
        }
        core
    }

    /// Plans and starts it, unless somebody has.
    pub(super) fn launch(self: &Arc<Self>) {
        let Some(planning) = lock(&self.planning).take() else { return };
        if self.is_stopped() {
            return self.whole_failed(self.stop_error());
        }
        // The list may be the caller's own type.
        let planned = catch_unwind(AssertUnwindSafe(planning))
            .unwrap_or_else(|_| Err(Error::new(Kind::Internal, self.op.name(), "planning it panicked")));
        let plan = match planned {
            Ok(plan) if plan.bytes() == self.bytes => plan,
            Ok(_) => {
                let message = "the lists of indices changed while they were read";
                return self.whole_failed(Error::invalid(self.op.name(), message));
            }
            Err(error) => return self.whole_failed(error),
        };
        let (plan, units) = match self.attachment.cut(self.op, plan, &self.after) {
            Ok(cut) => cut,
            Err(error) => return self.whole_failed(error),
        };
        lock(&self.inner).state.divide(units.len());
        let _ = self.plan.0.set(plan);
        let _ = self.units.0.set(units);
        // A stop that came meanwhile finds it there, or is found there.
        Arc::clone(&self.attachment).start(self);
    }

    /// Whether it is planned and started behind the call that began it.
    pub(crate) fn starts_later(&self) -> bool {
        self.later
    }

    /// Works on it, where it is work that others can take part in.
    pub(super) fn take_part(&self) {
        if let Some(work) = self.help.get().and_then(Weak::upgrade) {
            work.help();
        }
    }

    /// Takes the planning away from whoever would do it; false where somebody has begun it.
    pub(super) fn will_not_launch(&self) -> bool {
        lock(&self.planning).take().is_some()
    }

    /// It has ended before it was cut into units, and so all of its blocks have.
    pub(super) fn whole_failed(&self, error: Error) {
        let error = self.dress(error);
        let blocks = std::iter::once(0..self.blocks).collect();
        self.report(|state| state.unit_failed(blocks, error));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::layout::Piece;
    use crate::transfer::{After, Limits, Op, Transfer};
    use crate::transport::inproc::InProc;
    use crate::transport::{Attachment, Transport};

    /// So many blocks that there is no room for the list of their bytes.
    const UNCUT: u64 = 1 << 58;

    /// A path that ends every unit at once, and counts them.
    #[derive(Default)]
    struct Counted(AtomicUsize);

    impl Attachment for Counted {
        fn transport(&self) -> &'static dyn Transport {
            &InProc
        }

        #[allow(unsafe_code, reason = "implements the seam; touches no memory")]
        unsafe fn run_now(
            &self,
            _: Op,
            _: *mut u8,
            _: &[Piece],
            _: u64,
            _: &After,
        ) -> Option<Result<Option<u64>>> {
            None
        }

        fn cut(&self, _: Op, plan: Plan, _: &After) -> Result<(Plan, Vec<Range<usize>>)> {
            let plan = if plan.bytes() == 8 * UNCUT { plan.cut(1)? } else { plan };
            let units = plan.chunks(1).collect();
            Ok((plan, units))
        }

        fn start(self: Arc<Self>, transfer: &Arc<TransferCore>) {
            for _ in transfer.units.iter() {
                self.0.fetch_add(1, Ordering::Relaxed);
                transfer.unit_done();
            }
        }

        fn stop(&self, _: &Arc<TransferCore>) {}

        fn alive(&self) -> Result<()> {
            Ok(())
        }
    }

    fn transfer(blocks: u64, planning: Planning) -> (Transfer, Arc<Counted>) {
        let path = Arc::new(Counted::default());
        let parts = Parts {
            id: crate::transfer::next_id(),
            op: Op::Write,
            plan: Plan::nothing(),
            local: None,
            local_base: 0,
            after: After::default(),
            stream: None,
            limits: Limits::default(),
            checked: false,
            attachment: Arc::clone(&path) as Arc<dyn Attachment>,
            peer: "peer".into(),
            on_end: Box::new(|_| ()),
        };
        (Transfer::live(TransferCore::begin_later(parts, 8 * blocks, blocks, planning)), path)
    }

    fn three_spans() -> Result<Plan> {
        Plan::spans(&[(0, 0, 8), (16, 16, 8), (32, 32, 8)])
    }

    #[test]
    fn it_is_planned_once_whether_anybody_waits_or_not() {
        for waits in [true, false] {
            let times = Arc::new(AtomicUsize::new(0));
            let counted = Arc::clone(&times);
            let (transfer, path) = transfer(
                3,
                Box::new(move || {
                    counted.fetch_add(1, Ordering::Relaxed);
                    three_spans()
                }),
            );
            assert_eq!(transfer.bytes(), 24);
            if waits {
                transfer.wait().unwrap();
            } else {
                // So short a wait leaves it to the workers.
                while transfer.wait_for(Duration::from_millis(100)).is_none() {}
            }
            assert!(transfer.result().unwrap().is_ok());
            assert_eq!((times.load(Ordering::Relaxed), path.0.load(Ordering::Relaxed)), (1, 3));
        }
    }

    #[test]
    fn what_planning_finds_wrong_is_how_it_ends_for_every_block() {
        let wrong = || Err(Error::invalid("layout", "no such block"));
        let (transfer, path) = transfer(3, Box::new(wrong));
        assert_eq!(transfer.wait().unwrap_err().kind(), Kind::Invalid);
        let failures = transfer.failures();
        assert_eq!(failures.len(), 1);
        assert_eq!(failures[0].blocks, 0..3);
        assert_eq!(path.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_plan_whose_cut_has_no_room_is_how_it_ends_for_every_block() {
        let (transfer, path) = transfer(UNCUT, Box::new(|| Plan::span(0, 0, 8 * UNCUT)));
        assert_eq!(transfer.wait().unwrap_err().kind(), Kind::Exhausted);
        assert_eq!(transfer.failures()[0].blocks, 0..UNCUT);
        assert_eq!(path.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_list_that_panics_or_shrinks_ends_it_too() {
        let (panicked, _) = transfer(3, Box::new(|| panic!("a list that panics on purpose")));
        assert_eq!(panicked.wait().unwrap_err().kind(), Kind::Internal);
        let (shrunk, _) = transfer(4, Box::new(three_spans));
        assert_eq!(shrunk.wait().unwrap_err().kind(), Kind::Invalid);
    }

    #[test]
    fn a_cancel_while_it_is_planned_ends_it_and_nothing_is_started() {
        let (here, there) = mpsc::channel::<()>();
        let (say, hear) = mpsc::channel();
        let (transfer, path) = transfer(
            3,
            Box::new(move || {
                say.send(()).unwrap();
                there.recv().unwrap();
                Err(Error::invalid("layout", "too late to matter"))
            }),
        );
        hear.recv().unwrap();
        transfer.cancel();
        assert!(!transfer.is_done(), "the list is still being read");
        here.send(()).unwrap();
        assert_eq!(transfer.wait().unwrap_err().kind(), Kind::Canceled);
        assert_eq!(path.0.load(Ordering::Relaxed), 0);
    }
}
