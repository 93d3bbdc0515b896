//! What is done behind the call that starts a transfer: its list of blocks is checked and planned, and the first of it is sent.
//!
//! A worker is called for it. A caller that waits does it itself where the worker has not come yet: then nobody waits
//! for a thread to wake up.

use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock, Weak};

use super::submission::{self, Link, Started, Submission, Unit};
use super::{Several, TransferCore};
use crate::layout::Plan;
use crate::{Error, Kind, Result, runtime};

/// Makes the plan of each part, and checks everything about it that was not checked before.
pub(crate) type Planning = Box<dyn FnOnce() -> Result<Several<Plan>> + Send>;

/// A plan that may not be made yet: nothing is to be moved until then.
pub(crate) struct LatePlan(OnceLock<Plan>);

/// The units that a transfer is cut into: none until it is.
pub(crate) struct LateUnits(OnceLock<Vec<Unit>>);

impl LatePlan {
    pub(super) fn new(plan: Option<Plan>) -> LatePlan {
        LatePlan(plan.map_or_else(OnceLock::new, OnceLock::from))
    }

    pub(super) fn set(&self, plan: Plan) -> Result<(), Plan> {
        self.0.set(plan)
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
    pub(super) fn new(units: Option<Vec<Unit>>) -> LateUnits {
        LateUnits(units.map_or_else(OnceLock::new, OnceLock::from))
    }

    pub(super) fn set(&self, units: Vec<Unit>) {
        let _ = self.0.set(units);
    }
}

impl Deref for LateUnits {
    type Target = [Unit];

    fn deref(&self) -> &[Unit] {
        self.0.get().map_or(&[], Vec::as_slice)
    }
}

impl TransferCore {
    /// Begins a transfer of a submission whose parts are planned later, by a worker or by a caller that waits. The limits run from now.
    #[inline]
    pub(super) fn begin_later(
        submission: &mut Submission<'_>,
        link: Arc<dyn Link>,
        planning: Planning,
    ) -> Result<Arc<TransferCore>> {
        let core = TransferCore::new(submission, link, None, Some(planning))?;
        let soon = Arc::clone(&core);
        let job = Box::new(move || {
            soon.launch();
            soon.take_part();
        });
        if let Err(refused) = runtime::starters().spawn(job) {
            // No thread can be made: the caller does it, late but surely.
            (refused.job)();
        }
        Ok(core)
    }

    /// Plans it and submits it again, unless another thread has.
    pub(super) fn launch(self: &Arc<Self>) {
        let Some(planning) = self.planning.lock().take() else { return };
        if self.is_stopped() {
            return self.whole_failed(self.stop_error());
        }
        // The list may be the caller's own type.
        let planned = catch_unwind(AssertUnwindSafe(planning))
            .unwrap_or_else(|_| Err(Error::new(Kind::Internal, self.op.name(), "planning it panicked")));
        let plans = match planned {
            Ok(plans) if plans.iter().map(Plan::bytes).sum::<u64>() == self.bytes => plans,
            Ok(_) => {
                let message = "the lists of indices changed while they were read";
                return self.whole_failed(Error::invalid(self.op.name(), message));
            }
            Err(error) => return self.whole_failed(error),
        };
        // Its end is reported already.
        let mut nobody = submission::nobody;
        // A stop that came meanwhile finds it there, or is found there.
        let started = Submission::again(self, plans, &mut nobody)
            .and_then(|mut submission| Arc::clone(&self.link).submit(&mut submission));
        match started {
            Ok(Started::Running(_)) => {}
            Ok(Started::Done(Ok(_))) => self.units_done(1, self.bytes),
            Ok(Started::Done(Err(error))) | Err(error) => self.whole_failed(error),
            Ok(Started::Deferred) => {
                let message = "the path defers what was deferred before";
                self.whole_failed(Error::new(Kind::Internal, self.op.name(), message));
            }
        }
    }

    /// Works on it, where it is work that others can take part in.
    pub(super) fn take_part(&self) {
        if let Some(work) = self.help.get().and_then(Weak::upgrade) {
            work.help();
        }
    }

    /// Takes the planning away from the thread that would do it; false where one has begun it.
    pub(super) fn will_not_launch(&self) -> bool {
        self.planning.lock().take().is_some()
    }

    /// It has ended before it was cut into units, and so all of its blocks have.
    pub(super) fn whole_failed(&self, error: Error) {
        let error = self.dress(error);
        let blocks = self.parts.iter().map(|part| part.blocks);
        self.report(|state| state.whole_failed(blocks, error));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::transfer::submission::{SubmittedPart, Terms, What};
    use crate::transfer::{After, Limits, Op, Transfer};

    /// So many blocks that there is no room for the list of their bytes.
    const UNCUT: u64 = 1 << 58;

    /// A path that ends every unit at once, and counts them.
    #[derive(Default)]
    struct Counted(AtomicUsize);

    impl Link for Counted {
        fn path(&self) -> &'static str {
            "inproc"
        }

        fn submit(&self, submission: &mut Submission<'_>) -> Result<Started> {
            if submission.deferrable {
                return Ok(Started::Deferred);
            }
            let link = Arc::clone(submission.parts.first().region);
            let cut = |part, plan: Plan, units: &mut Vec<Unit>| {
                let plan = if plan.bytes() == 8 * UNCUT { plan.cut(1)? } else { plan };
                units.extend(plan.chunks(1).map(|pieces| Unit { part, pieces }));
                Ok(plan)
            };
            let transfer = submission.begin(link, cut, None)?;
            for _ in transfer.units.iter() {
                self.0.fetch_add(1, Ordering::Relaxed);
                transfer.unit_done();
            }
            Ok(Started::Running(transfer))
        }

        fn stop(&self, _: &Arc<TransferCore>) {}
    }

    /// A list of which only the size is known, and how it is planned.
    fn transfer(blocks: u64, planning: Planning) -> (Transfer, Arc<Counted>) {
        let path = Arc::new(Counted::default());
        let link: Arc<dyn Link> = Arc::clone(&path) as Arc<dyn Link>;
        let terms = Terms {
            after: After::default(),
            stream: None,
            limits: Limits::default(),
            checked: false,
            peer: &"peer".into(),
            inline: true,
            portion: false,
            above: None,
        };
        let what = What::Plan(Plan::of_blocks(8 * blocks, 8).map(Box::new));
        let part = SubmittedPart::new(&link, None, 0, what, (u64::MAX, u64::MAX));
        let mut on_end = submission::nobody;
        let mut submission = Submission::new(Op::Write, Several::one(part), terms, &mut on_end);
        submission.plan().unwrap();
        let core = TransferCore::begin_later(&mut submission, Arc::clone(&link), planning).unwrap();
        (Transfer::live(core), path)
    }

    fn three_spans() -> Result<Several<Plan>> {
        Plan::spans(&[(0, 0, 8), (16, 16, 8), (32, 32, 8)]).map(Several::one)
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
        let (transfer, path) = transfer(UNCUT, Box::new(|| Plan::span(0, 0, 8 * UNCUT).map(Several::one)));
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
        let (say, said) = mpsc::channel();
        let (transfer, path) = transfer(
            3,
            Box::new(move || {
                say.send(()).unwrap();
                there.recv().unwrap();
                Err(Error::invalid("layout", "too late to matter"))
            }),
        );
        said.recv().unwrap();
        transfer.cancel();
        assert!(!transfer.is_done(), "the list is still being read");
        here.send(()).unwrap();
        assert_eq!(transfer.wait().unwrap_err().kind(), Kind::Canceled);
        assert_eq!(path.0.load(Ordering::Relaxed), 0);
    }
}
