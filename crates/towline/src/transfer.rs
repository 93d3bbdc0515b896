//! One request in flight: what was asked, how far it is, how it ended.
//!
//! [`Transfer`] is what callers hold; [`TransferCore`] is what the paths drive; `State` is the pure
//! bookkeeping of both.

mod core;
mod ending;
mod hold;
mod later;
mod several;
pub(crate) mod submission;
#[cfg(test)]
mod tests;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

pub use towline_proto::transfer::BlockFailure;

pub(crate) use self::core::{Help, OnEnd, TransferCore};
pub(crate) use self::hold::LocalHold;
pub(crate) use self::several::Several;
use self::submission::Submission;
use crate::memory::{Dtype, ReduceOp};
use crate::wire::AtomicOp;
use crate::{Error, Kind, Result, fork, room, runtime};

/// What a transfer does to the remote memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    Read,
    Write,
    Reduce(ReduceOp, Dtype),
    Atomic { offset: u64, op: AtomicOp },
}

impl Op {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Op::Read => "read",
            Op::Write => "write",
            Op::Reduce(..) => "reduce_into",
            Op::Atomic { op: AtomicOp::Add(_), .. } => "fetch_add",
            Op::Atomic { op: AtomicOp::CompareSwap { .. }, .. } => "compare_swap",
        }
    }
}

/// A counter of the owner that is raised once all bytes are visible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Signal {
    /// The part in whose remote region it lies.
    pub(crate) part: usize,
    pub(crate) offset: u64,
    pub(crate) add: u64,
}

/// What the owner learns once all bytes are visible.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct After {
    pub(crate) signal: Option<Signal>,
    pub(crate) notify: Option<Vec<u8>>,
}

impl After {
    pub(crate) fn is_empty(&self) -> bool {
        self.signal.is_none() && self.notify.is_none()
    }
}

/// How long a transfer may take: without any progress, and in all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The longest time in which nothing moves.
    pub no_progress: Duration,
    /// The longest time for a transfer of no bytes.
    pub total: Duration,
    /// The slowest acceptable link, in bytes per second: adds to `total`.
    pub bytes_per_second: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            no_progress: Duration::from_secs(5),
            total: Duration::from_secs(30),
            bytes_per_second: 50_000_000,
        }
    }
}

impl Limits {
    /// Limits that end everything after that time.
    pub fn within(total: Duration) -> Limits {
        Limits { no_progress: total, total, bytes_per_second: u64::MAX }
    }

    /// The longest time for that many bytes.
    pub fn total_for(&self, bytes: u64) -> Duration {
        let rate = self.bytes_per_second.max(1);
        let rest = (bytes % rate).saturating_mul(1000) / rate;
        self.total
            .saturating_add(Duration::from_secs(bytes / rate))
            .saturating_add(Duration::from_millis(rest))
    }
}

/// One request in flight, over one or many regions of a peer: a future, which can also be waited on, polled and cancelled.
///
/// Dropping a transfer does not stop it: the memory it touches stays alive until it has ended.
#[must_use = "a transfer goes on when dropped, but its result is lost"]
pub struct Transfer(Repr);

enum Repr {
    Done(Done),
    Live(Arc<TransferCore>),
}

struct Done {
    path: &'static str,
    bytes: u64,
    value: Option<u64>,
    result: Result<()>,
    failures: Vec<BlockFailure>,
}

impl Transfer {
    /// A transfer that ended in the call that started it.
    #[inline]
    pub(crate) fn done(
        submission: &Submission<'_>,
        path: &'static str,
        ended: Result<Option<u64>>,
    ) -> Transfer {
        let bytes = submission.size().map_or(0, |(bytes, _)| bytes);
        let value = ended.as_ref().ok().copied().flatten();
        let failures = ended.as_ref().err().map(|error| failures(submission, error)).unwrap_or_default();
        let result = ended.map(|_| ());
        Transfer(Repr::Done(Done { path, bytes, value, result, failures }))
    }

    pub(crate) fn live(core: Arc<TransferCore>) -> Transfer {
        Transfer(Repr::Live(core))
    }

    /// The path that the bytes take; that of the first part, where parts take different ones.
    pub fn path(&self) -> &'static str {
        match &self.0 {
            Repr::Done(done) => done.path,
            Repr::Live(core) => core.path(),
        }
    }

    /// How many bytes were asked for, of all parts together.
    pub fn bytes(&self) -> u64 {
        match &self.0 {
            Repr::Done(done) => done.bytes,
            Repr::Live(core) => core.bytes,
        }
    }

    /// Whether it has ended, well or not.
    pub fn is_done(&self) -> bool {
        match &self.0 {
            Repr::Done(_) => true,
            Repr::Live(core) => core.end().is_some(),
        }
    }

    /// How it ended, or `None` while it is in flight.
    pub fn result(&self) -> Option<Result<()>> {
        match &self.0 {
            Repr::Done(done) => Some(done.result.clone()),
            Repr::Live(core) => core.end(),
        }
    }

    /// The word that an atomic operation found, once it has ended well.
    pub fn value(&self) -> Option<u64> {
        match &self.0 {
            Repr::Done(done) => done.value,
            Repr::Live(_) if fork::in_child() => None,
            Repr::Live(core) => core.inner.lock().state.value(),
        }
    }

    /// Waits until it has ended. The transfer's own limits bound the wait.
    pub fn wait(&self) -> Result<()> {
        match &self.0 {
            Repr::Done(done) => done.result.clone(),
            Repr::Live(core) => core.wait(None).unwrap_or_else(|| {
                Err(Error::new(Kind::Internal, core.op.name(), "the wait ended before the transfer"))
            }),
        }
    }

    /// Waits for at most that long; `None` means that it is still in flight.
    pub fn wait_for(&self, time: Duration) -> Option<Result<()>> {
        match &self.0 {
            Repr::Done(done) => Some(done.result.clone()),
            Repr::Live(core) => core.wait(Some(runtime::later(Instant::now(), time))),
        }
    }

    /// Asks it to stop. It ends with [`Kind::Canceled`] once the local memory is safe to reuse: wait for that. Over a stream, a write
    /// that is in flight ends when the owner has said what became of it, and within two seconds in any case, whatever the limits are.
    /// Where the owner has said nothing by then, the connection is given up; nothing of the write changes the remote memory once
    /// it is [quiet](Self::quiet), which on one host it is at its end.
    ///
    /// A transfer that has already ended stays as it ended.
    pub fn cancel(&self) {
        if let Repr::Live(core) = &self.0
            && !fork::in_child()
        {
            core.stop(Error::new(Kind::Canceled, core.op.name(), "cancelled by the caller"));
        }
    }

    /// Whether nothing of this transfer can touch the local memory any more, nor change the owner's.
    ///
    /// With the built-in paths a transfer ends only when it is quiet, so this is [`is_done`](Self::is_done), but for some cases. A write
    /// to another host that was stopped may end while its bytes are in flight, or with an owner that says nothing: it is quiet when the
    /// owner has said that nothing more of it will land, or has ended the session. One that was in flight when this endpoint was
    /// closed, or when its session was given up because nothing came from the owner's host, is never quiet: nobody asks any more. NIXL
    /// cannot stop what it has begun: there a transfer that was cancelled, ran out of time or lost its peer may end before it is
    /// quiet. Its memory on both sides then stays registered, and is parked where it is dropped, until NIXL has let go. And over a
    /// Unix stream an owner may be stopped while it writes a file or to a GPU, or, where the machine lacks what makes its look at the
    /// initiator and its change of memory one step, while it changes memory. It finishes that when it goes on: the transfer ends
    /// at its limit, and is quiet when the owner has finished or exited. The same may happen to a write to a GPU, and between users of one host nobody
    /// can see when the owner has finished: given up by this side, such a write is never quiet. The local memory is free at the end.
    ///
    /// Where this process reads or writes a file (`file`, and files over `inproc`) and the disk does not answer, a transfer that was stopped
    /// ends before a thread comes back from the disk: until then it is not quiet, and the memory on both sides stays as with NIXL.
    pub fn quiet(&self) -> bool {
        match &self.0 {
            Repr::Done(_) => true,
            Repr::Live(core) => core.end().is_some() && core.is_quiet(),
        }
    }

    /// Waits for at most that long until it is [quiet](Self::quiet).
    pub fn wait_quiet(&self, time: Duration) -> bool {
        let until = runtime::later(Instant::now(), time);
        match &self.0 {
            Repr::Done(_) => true,
            Repr::Live(_) if fork::in_child() => false,
            Repr::Live(core) => core.wait(Some(until)).is_some() && core.wait_quiet(until),
        }
    }

    /// Says whether it is quiet, without keeping it; `None` for a transfer that ended in the call that started it.
    pub(crate) fn quiet_watch(&self) -> Option<QuietWatch> {
        match &self.0 {
            Repr::Done(_) => None,
            Repr::Live(core) => Some(QuietWatch(Arc::downgrade(core))),
        }
    }

    /// The blocks that failed and why; empty when all went well or while it is in flight.
    pub fn failures(&self) -> Vec<BlockFailure> {
        match &self.0 {
            Repr::Done(done) => done.failures.clone(),
            Repr::Live(_) if fork::in_child() => Vec::new(),
            Repr::Live(core) => {
                let inner = core.inner.lock();
                inner.end().map(|_| inner.state.failures().to_vec()).unwrap_or_default()
            }
        }
    }
}

/// What did not move of a submission that ended in the call with that error.
pub(crate) fn failures(submission: &Submission<'_>, error: &Error) -> Vec<BlockFailure> {
    let failure = |part: usize| {
        let error = if part == submission.reached {
            error.clone()
        } else {
            let message = format!("part {} failed, so this part did too", submission.reached);
            Error::new(Kind::Canceled, submission.op.name(), message)
        };
        BlockFailure { part, blocks: 0..submission.parts[part].asked().1, error }
    };
    let all = (submission.moved..submission.parts.len()).map(failure);
    // Where there is no room to name them, the one at which it failed is.
    room::collect(submission.op.name(), all).unwrap_or_else(|_| vec![failure(submission.reached)])
}

impl Future for Transfer {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        match &self.0 {
            Repr::Done(done) => Poll::Ready(done.result.clone()),
            Repr::Live(core) => {
                if let Err(error) = fork::guard(core.op.name()) {
                    return Poll::Ready(Err(error));
                }
                let mut inner = core.inner.lock();
                if let Some(result) = inner.end() {
                    return Poll::Ready(result.clone());
                }
                if !inner.wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
                    inner.wakers.push(cx.waker().clone());
                }
                Poll::Pending
            }
        }
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer")
            .field("path", &self.path())
            .field("bytes", &self.bytes())
            .field("result", &self.result())
            .finish()
    }
}

/// Says whether a transfer is quiet, and does not keep it alive.
pub(crate) struct QuietWatch(Weak<TransferCore>);

impl QuietWatch {
    /// Whether the transfer is quiet, or gone.
    pub(crate) fn is_quiet(&self) -> bool {
        self.0.upgrade().is_none_or(|core| core.is_quiet())
    }
}
