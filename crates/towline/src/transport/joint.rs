//! Parts that need different links, or a path that takes one part at a time: one transfer over several submissions, which ends as one.
//!
//! Above the seam. Each submission underneath has some of the parts; what follows the bytes follows those of all of them.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::transfer::submission::{Link, Started, Submission, SubmittedPart, Terms, What, whole};
use crate::transfer::{BlockFailure, OnEnd, Op, Several, Signal, TransferCore, failures};
use crate::{Error, Kind, Result, room, runtime};

/// Submissions that are in flight at a time: some paths hold memory for each of them.
const WINDOW: usize = 4;

/// Lists of more blocks are planned by a worker.
const MANY: u64 = 512;

/// The parts of one transfer, divided among submissions.
pub(crate) struct Joint {
    me: Weak<Joint>,
    groups: Vec<Vec<usize>>,
    path: &'static str,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: usize,
    in_flight: usize,
    ended: usize,
    /// A thread is starting what may be started.
    starting: bool,
    failed: bool,
    children: Vec<Arc<TransferCore>>,
}

/// Starts a submission whose path takes one part at a time.
pub(crate) fn submit(submission: &mut Submission<'_>) -> Result<Started> {
    let each = room::collect(submission.op.name(), (0..submission.parts.len()).map(|part| vec![part]))?;
    Joint::over(each, submission.parts.first().region.path()).submit(submission)
}

/// What of a group failed.
enum Failed<'a> {
    /// Those blocks, whose parts count within the group.
    These(&'a [BlockFailure]),
    /// All of it.
    All(Error),
}

impl Joint {
    /// For those groups of parts, each of which has one link.
    pub(crate) fn over(groups: Vec<Vec<usize>>, path: &'static str) -> Arc<Joint> {
        Arc::new_cyclic(|me| Joint { me: Weak::clone(me), groups, path, state: Mutex::default() })
    }

    /// Starts as many of them as may be in flight. One thread at a time; what ends meanwhile leaves the next ones to it.
    fn advance(self: &Arc<Self>, transfer: &Arc<TransferCore>) {
        // What is queued in the caller's stream next comes behind all of them.
        let window = if transfer.stream.is_some() { usize::MAX } else { WINDOW };
        loop {
            let group = {
                let mut state = self.state.lock();
                if state.starting || state.next >= self.groups.len() || state.in_flight >= window {
                    return;
                }
                state.starting = true;
                state.in_flight += 1;
                state.next += 1;
                state.next - 1
            };
            self.start(transfer, group);
            self.state.lock().starting = false;
        }
    }

    fn start(self: &Arc<Self>, transfer: &Arc<TransferCore>, group: usize) {
        let failed = self.state.lock().failed;
        let stopped = transfer.is_stopped().then(|| transfer.stop_error());
        let dropped =
            || Error::new(Kind::Canceled, transfer.op.name(), "not begun: another part failed before");
        let outcome = match stopped.or_else(|| failed.then(dropped)) {
            Some(error) => Err(error),
            None => self.submit_group(transfer, group),
        };
        if let Err(error) = outcome {
            self.ended(transfer, group, &Failed::All(error));
        }
    }

    /// An error means that nothing of the group is in flight, and nobody has reported for it.
    fn submit_group(self: &Arc<Self>, transfer: &Arc<TransferCore>, group: usize) -> Result<()> {
        let parts = self.groups[group].iter().map(|part| {
            let of = &transfer.parts[*part];
            SubmittedPart::planned(&of.region, of.base(), of.plan().clone()).kept(transfer.near(*part))
        });
        let Some(parts) = Several::of(transfer.op.name(), parts)? else { return Ok(()) };
        let terms = Terms { stream: transfer.stream, ..Terms::under(transfer) };
        let mut on_end = |_: &Several<SubmittedPart<'_>>| -> OnEnd {
            let (joint, whole) = (Arc::clone(self), Arc::clone(transfer));
            Box::new(move |_, failed| {
                joint.ended(&whole, group, &Failed::These(failed));
                joint.go_on(&whole);
            })
        };
        let region = Arc::clone(parts.first().region);
        let mut submission = Submission::new(transfer.op, parts, terms, &mut on_end);
        match region.submit(&mut submission)? {
            Started::Done(Ok(_)) => {
                transfer.progressed(submission.size()?.0);
                self.ended(transfer, group, &Failed::These(&[]));
            }
            Started::Done(Err(error)) => {
                let failed = failures(&submission, &error);
                self.ended(transfer, group, &Failed::These(&failed));
            }
            Started::Running(child) => self.keep(transfer, child),
            Started::Deferred => {
                let message = "the path defers what is not deferrable";
                return Err(Error::new(Kind::Internal, transfer.op.name(), message));
            }
        }
        Ok(())
    }

    /// Remembers what is in flight, for a stop.
    fn keep(&self, transfer: &TransferCore, child: Arc<TransferCore>) {
        {
            let mut state = self.state.lock();
            state.children.retain(|child| !child.has_ended());
            if !child.has_ended() {
                state.children.push(Arc::clone(&child));
            }
        }
        // A stop that came before it was known here did not find it.
        if transfer.is_stopped() {
            child.stop(transfer.stop_error());
        }
    }

    /// A group has ended; that of it failed.
    fn ended(self: &Arc<Self>, transfer: &Arc<TransferCore>, group: usize, failed: &Failed<'_>) {
        let last = {
            let mut state = self.state.lock();
            state.children.retain(|child| !child.has_ended());
            state.in_flight -= 1;
            state.ended += 1;
            state.failed |= !matches!(failed, Failed::These([]));
            (state.ended == self.groups.len()).then_some(state.failed)
        };
        match failed {
            Failed::These(failed) => transfer.parts_ended(&self.groups[group], failed),
            // One by one: there may be no room for a list of them.
            Failed::All(error) => self.groups[group].iter().for_each(|part| {
                let blocks = 0..transfer.parts[*part].blocks;
                transfer.parts_ended(&[*part], &[BlockFailure { part: 0, blocks, error: error.clone() }]);
            }),
        }
        match last {
            Some(failed) if !transfer.after.is_empty() => self.follow(transfer, failed),
            _ => {}
        }
    }

    /// The thread that reports an end may be the event loop, which starts nothing.
    fn go_on(self: &Arc<Self>, transfer: &Arc<TransferCore>) {
        if self.state.lock().next >= self.groups.len() {
            return;
        }
        let (joint, whole) = (Arc::clone(self), Arc::clone(transfer));
        if let Err(refused) = runtime::pool().spawn(Box::new(move || joint.advance(&whole))) {
            (refused.job)();
        }
    }

    /// What follows the bytes of all parts, as the last unit.
    fn follow(self: &Arc<Self>, transfer: &Arc<TransferCore>, failed: bool) {
        let unit = transfer.parts.len();
        if failed {
            let error =
                Error::new(Kind::Canceled, transfer.op.name(), "nothing follows bytes of which some failed");
            return transfer.unit_failed(unit, error);
        }
        let mut after = transfer.after.clone();
        let part = after.signal.map_or(0, |signal| signal.part);
        after.signal = after.signal.map(|signal| Signal { part: 0, ..signal });
        let terms = Terms { after, checked: false, ..Terms::under(transfer) };
        let report = move |transfer: &Arc<TransferCore>, result: Result<()>| match result {
            Ok(()) => transfer.unit_done(),
            Err(error) => transfer.unit_failed(unit, error),
        };
        let mut on_end = |_: &Several<SubmittedPart<'_>>| -> OnEnd {
            let (joint, whole) = (Arc::clone(self), Arc::clone(transfer));
            Box::new(move |result, _| {
                joint.state.lock().children.retain(|child| !child.has_ended());
                report(&whole, result.clone());
            })
        };
        let region = &transfer.parts[part].region;
        let alone = SubmittedPart::new(region, None, 0, What::Nothing, (0, 0));
        let mut submission = Submission::new(Op::Write, Several::one(alone), terms, &mut on_end);
        match region.submit(&mut submission) {
            Ok(Started::Done(ended)) => report(transfer, ended.map(drop)),
            Ok(Started::Running(child)) => self.keep(transfer, child),
            Ok(Started::Deferred) => {
                let message = "the path defers what has no bytes";
                report(transfer, Err(Error::new(Kind::Internal, transfer.op.name(), message)));
            }
            Err(error) => report(transfer, Err(error)),
        }
    }
}

impl Link for Joint {
    fn path(&self) -> &'static str {
        self.path
    }

    fn submit(&self, submission: &mut Submission<'_>) -> Result<Started> {
        let (_, blocks) = submission.size()?;
        if submission.deferrable && blocks > MANY {
            return Ok(Started::Deferred);
        }
        let gone = || Error::new(Kind::Internal, submission.op.name(), "the transfer is gone");
        let this = self.me.upgrade().ok_or_else(gone)?;
        let follows =
            (!submission.after.is_empty()).then(|| submission.after.signal.map_or(0, |signal| signal.part));
        let transfer = submission.begin(Arc::clone(&this) as Arc<dyn Link>, whole, follows)?;
        this.advance(&transfer);
        Ok(Started::Running(transfer))
    }

    fn stop(&self, transfer: &Arc<TransferCore>) {
        let children = self.state.lock().children.clone();
        children.iter().for_each(|child| child.stop(transfer.stop_error()));
        // What was not begun reports now: the next one to end would do it, if there is one.
        if let Some(this) = self.me.upgrade() {
            this.go_on(transfer);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::mpsc::{self, Sender};
    use std::time::Duration;

    use super::*;
    use crate::layout::Plan;
    use crate::transfer::{Transfer, submission};
    use crate::{Access, DiskStorage, Endpoint, Limits, Part, SharedStorage, SystemStorage};

    const LEN: usize = 3 << 20;
    const WATCHDOG: Duration = Duration::from_secs(30);

    /// A path that hands several parts on, and moves one part until it is stopped.
    struct OneByOne(Sender<()>);

    impl Link for OneByOne {
        fn path(&self) -> &'static str {
            "inproc"
        }

        fn submit(&self, submission: &mut Submission<'_>) -> Result<Started> {
            if submission.parts.len() > 1 {
                return super::submit(submission);
            }
            let link = Arc::clone(submission.parts.first().region);
            let transfer = submission.begin_whole(link)?;
            self.0.send(()).unwrap();
            Ok(Started::Running(transfer))
        }

        fn stop(&self, transfer: &Arc<TransferCore>) {
            if transfer.parts.len() == 1 {
                transfer.unit_failed(0, transfer.stop_error());
            }
        }
    }

    #[test]
    fn a_cancel_reaches_parts_that_a_path_has_handed_on_behind_the_call() {
        let (begun, begins) = mpsc::channel();
        let link: Arc<dyn Link> = Arc::new(OneByOne(begun));
        let plan = || Plan::of_blocks(8 * MANY, 8).map(Box::new);
        let parts =
            [(); 2].map(|()| SubmittedPart::new(&link, None, 0, What::Plan(plan()), (u64::MAX, u64::MAX)));
        let peer = "peer".into();
        let terms = Terms {
            after: Default::default(),
            stream: None,
            limits: Limits::within(Duration::from_secs(600)),
            checked: false,
            peer: &peer,
            inline: true,
            portion: false,
            above: None,
        };
        let mut on_end = submission::nobody;
        let parts = Several::of("write", parts).unwrap().unwrap();
        let mut submission = Submission::new(Op::Write, parts, terms, &mut on_end);
        assert!(matches!(link.submit(&mut submission).unwrap(), Started::Deferred));
        let transfer = Transfer::live(submission.defer(Arc::clone(&link)).unwrap());
        (0..2).for_each(|_| begins.recv_timeout(WATCHDOG).unwrap());
        transfer.cancel();
        assert_eq!(transfer.wait_for(WATCHDOG).unwrap().unwrap_err().kind(), Kind::Canceled);
    }

    #[test]
    fn parts_in_memory_and_on_a_disk_are_one_transfer() {
        let owner = Endpoint::open("owner").unwrap();
        let memory = owner.register(SharedStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap();
        let disk = DiskStorage::new(LEN).unwrap();
        let disk = owner.register(disk, Access::READ_WRITE).unwrap();
        let user = Endpoint::open("user").unwrap();
        let remotes =
            [&memory.ticket().unwrap(), &disk.ticket().unwrap()].map(|one| user.import(one).unwrap());
        let locals = [1u8, 2, 3].map(|fill| {
            let local = user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
            local.write_at(0, &vec![fill; LEN]).unwrap();
            local
        });
        for len in [100, LEN as u64] {
            let parts = || {
                let third = Part::new(&remotes[0], &locals[2]).at(len / 2, 0, len - len / 2);
                let both = remotes
                    .iter()
                    .zip(&locals)
                    .map(|(remote, local)| Part::new(remote, local).at(0, 0, len / 2));
                both.chain([third])
            };
            let transfer =
                user.write_parts(parts()).notify("all of them").signal_in(2, 8, 1).start().unwrap();
            assert_eq!(owner.receive(WATCHDOG).unwrap().message, b"all of them");
            let (mut there, mut first) = ([0], [0]);
            disk.read_at(len as usize / 2 - 1, &mut there).unwrap();
            memory.read_at(0, &mut first).unwrap();
            assert_eq!((there, first), ([2], [1]));
            transfer.wait().unwrap();
            assert_eq!(transfer.bytes(), len / 2 * 2 + (len - len / 2));
            assert!(transfer.quiet() && transfer.failures().is_empty());
            locals[0].write_at(0, &vec![9; LEN]).unwrap();
            user.read_parts(parts()).start().unwrap().wait().unwrap();
            locals[0].read_at(0, &mut first).unwrap();
            assert_eq!(first, [1]);
        }

        disk.into_storage_within(WATCHDOG).unwrap();
        let parts = remotes.iter().zip(&locals).map(|(remote, local)| Part::new(remote, local));
        let transfer = user.read_parts(parts).notify("never").start().unwrap();
        let error = transfer.wait().unwrap_err();
        assert!(error.kind() == Kind::Stale && error.message().contains("part 1 of 2"), "{error}");
        assert!(transfer.failures().iter().any(|failure| failure.part == 1 && failure.blocks == (0..1)));
        assert!(owner.try_receive().unwrap().is_none());
        // Its memory is let go.
        for local in locals {
            local.into_storage_within(WATCHDOG).unwrap();
        }
    }
}
