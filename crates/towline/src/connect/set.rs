//! The transfers of one active operation, each of as many parts as may be in flight: they end together.
#![allow(unsafe_code, reason = "puts copies into the order of a stream that the caller vouches for")]

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use super::descriptor::Use;
use super::portion::Portion;
use crate::completion::Completion;
use crate::cuda::StreamHandle;
use crate::endpoint::claim::Claim;
use crate::memory::{Buffer, MemoryDescription};
use crate::region::Registered;
use crate::transfer::Op;
use crate::transfer::QuietWatch;
use crate::{Endpoint, Error, Remote, Result, Span, Transfer, room};

/// Sets up to this size may be copied by the calling thread; the paths use the same limit for one transfer.
const INLINE: u64 = 1 << 20;

/// Parts are started while fewer bytes than this are in flight: what waits behind others for long would be taken for what does
/// not move. So most operations are one transfer, and of a larger one the next begins when there is room.
const IN_FLIGHT: u64 = 64 << 20;

/// The registered local memory, the remote memory, and what is moved between them.
pub(super) struct Part {
    pub(super) local: (Registered<Buffer>, Use),
    pub(super) remote: Remote,
    pub(super) portions: Vec<Portion>,
}

/// A part that was not started yet.
struct Waiting {
    remote: Arc<Remote>,
    span: Result<Span>,
    portion: Portion,
}

/// The transfers of one active operation.
pub(super) struct TransferSet {
    endpoint: Endpoint,
    op: Op,
    pub(super) bytes: u64,
    pub(super) peer: Arc<str>,
    pub(super) path: &'static str,
    by_workers: bool,
    /// The stream that all of them are in order with.
    stream: Option<StreamHandle>,
    inner: Mutex<Inner>,
    pub(super) completion: Completion<Result<()>>,
    /// The transfers that were not quiet at the end.
    unquiet: Mutex<Vec<QuietWatch>>,
}

struct Inner {
    waiting: VecDeque<Waiting>,
    /// What runs or has run; emptied at the end, since each of them refers back to the set.
    started: Vec<Arc<Transfer>>,
    /// Parts that have not ended, and one more while a thread is starting some.
    left: usize,
    /// What the transfers that run weigh, and how much that may be.
    in_flight: u64,
    most_in_flight: u64,
    starting: bool,
    failed: bool,
    /// Why the set is being stopped.
    cause: Option<Error>,
    /// The local registrations, kept until the end.
    local: Vec<(Registered<Buffer>, Use)>,
    claim: Option<Claim>,
}

impl TransferSet {
    pub(super) fn start(
        endpoint: &Endpoint,
        op: Op,
        stream: Option<StreamHandle>,
        claim: Claim,
        parts: Vec<Part>,
    ) -> Result<Arc<TransferSet>> {
        let portions = || parts.iter().flat_map(|part| &part.portions);
        let bytes = portions().map(|portion| portion.bytes).sum();
        let by_workers = portions().map(Portion::weight).sum::<u64>() > INLINE;
        let first = parts.first().map(|part| &part.remote);
        let (peer, path) =
            first.map_or(("".into(), "none"), |remote| (Arc::clone(remote.peer()), remote.path()));
        // One for each portion, of which a view of small blocks has many.
        let count = portions().count();
        let room =
            room::list(op.name(), count).and_then(|waiting| Ok((waiting, room::list(op.name(), count)?)));
        let (waiting, started) = match room {
            Ok(lists) => lists,
            Err(error) => {
                let _ = claim.finish(&Err(error.clone()));
                return Err(error);
            }
        };
        let mut waiting = VecDeque::from(waiting);
        let mut local = Vec::with_capacity(parts.len());
        for part in parts {
            let remote = Arc::new(part.remote);
            let region = &part.local.0;
            waiting.extend(part.portions.into_iter().map(|portion| Waiting {
                remote: Arc::clone(&remote),
                span: region.span(0, region.size()),
                portion,
            }));
            local.push(part.local);
        }
        let set = Arc::new(TransferSet {
            endpoint: endpoint.clone(),
            op,
            bytes,
            peer,
            path,
            by_workers,
            stream,
            inner: Mutex::new(Inner {
                left: waiting.len(),
                // What the caller queues in the stream next comes behind all of them.
                most_in_flight: if stream.is_some() { u64::MAX } else { IN_FLIGHT },
                waiting,
                started,
                in_flight: 0,
                starting: false,
                failed: false,
                cause: None,
                local,
                claim: Some(claim),
            }),
            completion: Completion::default(),
            unquiet: Mutex::default(),
        });
        set.start_some();
        Ok(set)
    }

    /// Whether it has ended and is quiet.
    pub(super) fn is_quiet(&self) -> bool {
        self.completion.result().is_some() && self.unquiet.lock().iter().all(QuietWatch::is_quiet)
    }

    /// Starts what may be in flight. One thread at a time; what ends meanwhile leaves the next ones to it.
    fn start_some(self: &Arc<Self>) {
        loop {
            {
                let mut inner = self.inner.lock();
                if std::mem::replace(&mut inner.starting, true) {
                    return;
                }
                // Held while it starts some, so that the end comes after.
                inner.left += 1;
            }
            while let Some(some) = self.next() {
                self.start_together(&some);
            }
            if !self.count(1, 0, &Ok(())) {
                return;
            }
        }
    }

    /// The parts for which there is room.
    fn next(&self) -> Option<Vec<Waiting>> {
        let mut inner = self.inner.lock();
        let mut some = Vec::new();
        while inner.has_room()
            && let Some(next) = inner.waiting.pop_front()
        {
            inner.in_flight += next.portion.weight();
            some.push(next);
        }
        if some.is_empty() {
            inner.starting = false;
            return None;
        }
        Some(some)
    }

    fn start_together(self: &Arc<Self>, some: &[Waiting]) {
        let (count, weight) = (some.len(), some.iter().map(|one| one.portion.weight()).sum());
        let parts = some
            .iter()
            .map(|Waiting { remote, span, portion }| span.clone().map(|span| portion.part(remote, span)));
        let started = parts.collect::<Result<Vec<_>>>().and_then(|parts| {
            let request = match self.op {
                Op::Write => self.endpoint.write_parts(parts),
                _ => self.endpoint.read_parts(parts),
            };
            let request = match self.stream {
                // SAFETY: who named the stream promised that it lives until the operation has ended.
                Some(stream) => unsafe { request.stream(stream) },
                None => request,
            };
            let set = Arc::clone(self);
            request
                .by_workers(self.by_workers)
                .then(Box::new(move |result, _| set.some_ended(count, weight, result)))
                .start()
        });
        match started {
            Ok(transfer) => {
                let transfer = Arc::new(transfer);
                let stopping = {
                    let mut inner = self.inner.lock();
                    inner.started.push(Arc::clone(&transfer));
                    inner.cause.is_some()
                };
                if stopping {
                    transfer.cancel();
                }
            }
            Err(error) => self.some_ended(count, weight, &Err(error)),
        }
    }

    fn some_ended(self: &Arc<Self>, count: usize, weight: u64, result: &Result<()>) {
        if self.count(count, weight, result) {
            self.start_some();
        }
    }

    /// Counts the end of so many parts; true where more can be started now.
    fn count(self: &Arc<Self>, parts: usize, weight: u64, result: &Result<()>) -> bool {
        let (last, more) = {
            let mut inner = self.inner.lock();
            inner.left -= parts;
            inner.in_flight -= weight;
            if let Err(error) = result {
                inner.failed = true;
                inner.cause.get_or_insert_with(|| error.clone());
            }
            if inner.cause.is_some() && !inner.waiting.is_empty() {
                // What was not started does not start any more.
                inner.failed = true;
                inner.left -= inner.waiting.len();
                inner.waiting.clear();
            }
            (inner.left == 0, inner.has_room() && !inner.starting && !inner.waiting.is_empty())
        };
        if last {
            self.end();
        } else if result.is_err() {
            self.stop_started();
        }
        more
    }

    fn stop_started(&self) {
        let nth = |at: usize| self.inner.lock().started.get(at).cloned();
        for transfer in (0..).map_while(nth) {
            transfer.cancel();
        }
    }

    /// Stops it; it ends when the local memory is quiet. What has ended stays as it ended.
    pub(super) fn cancel(self: &Arc<Self>, error: Error) {
        {
            let mut inner = self.inner.lock();
            if inner.left == 0 || inner.cause.is_some() {
                return;
            }
            inner.cause = Some(error);
            // Held while the transfers are stopped, so that the end comes after.
            inner.left += 1;
        }
        self.stop_started();
        self.count(1, 0, &Ok(()));
    }

    fn end(&self) {
        let (result, claim, local, started) = {
            let mut inner = self.inner.lock();
            let result = match inner.cause.take() {
                Some(cause) if inner.failed => Err(cause),
                _ => Ok(()),
            };
            (result, inner.claim.take(), std::mem::take(&mut inner.local), std::mem::take(&mut inner.started))
        };
        *self.unquiet.lock() =
            started.iter().filter_map(|one| one.quiet_watch()).filter(|one| !one.is_quiet()).collect();
        // The registrations go before anybody learns of the end, so that the memory is the user's again.
        drop(local);
        // A success is one only where the owner can say so too.
        let finished = claim.map_or(Ok(()), |claim| claim.finish(&result));
        let op = self.op.name();
        let result = result.and(finished.map_err(|error| error.during(op).with_peer(&*self.peer)));
        let _ = self.completion.set(result);
        drop(started);
    }
}

impl Inner {
    fn has_room(&self) -> bool {
        self.cause.is_none() && self.in_flight < self.most_in_flight
    }
}
