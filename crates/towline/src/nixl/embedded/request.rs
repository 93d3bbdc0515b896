//! A transfer between two lists of ranges: one transfer of the library for each pair of regions, and one end.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Embedded;
use super::peer::Peer;
use super::table::Part;
use crate::nixl::transfer::{XferOp, XferTelemetry};
use crate::region::Span;
use crate::runtime;
use crate::sync::lock;
use crate::{Endpoint, Error, Remote, Result, Transfer, room};

/// One transfer. It can be posted again once it has ended.
pub(in crate::nixl) struct Request {
    engine: Arc<Embedded>,
    op: XferOp,
    groups: Vec<Group>,
    peer: Option<Arc<Peer>>,
    message: Option<Vec<u8>>,
    bytes: u64,
    descriptors: u64,
    posted: Mutex<Option<Posted>>,
}

/// What is moved between one region there and one here.
struct Group {
    remote: Arc<Remote>,
    local: Span,
    /// Remote offset, local offset and length of each range.
    spans: Vec<(u64, u64, u64)>,
}

#[derive(Clone)]
struct Posted {
    run: Arc<Run>,
    transfers: Arc<[Transfer]>,
}

/// One posting, on its way to its one end.
struct Run {
    endpoint: Endpoint,
    /// Whom to tell and what, once all groups have ended well; a single group tells it by itself.
    tell: Option<(Arc<Remote>, Vec<u8>)>,
    started: Instant,
    state: Mutex<State>,
    ended: Condvar,
}

struct State {
    left: usize,
    failed: Option<Error>,
    posting: Duration,
    end: Option<(Result<()>, Instant)>,
}

impl Run {
    /// Some groups have ended, or never begun.
    fn groups_ended(self: &Arc<Run>, count: usize, result: &Result<()>) {
        let outcome = {
            let mut state = lock(&self.state);
            state.left -= count;
            if let Err(error) = result {
                state.failed.get_or_insert_with(|| error.clone());
            }
            if state.left > 0 {
                return;
            }
            state.failed.clone().map_or(Ok(()), Err)
        };
        if outcome.is_err() || self.tell.is_none() {
            return self.end(outcome);
        }
        // Not here: who reports an end may be the event loop, which must not wait for a peer.
        let run = Arc::clone(self);
        let told = runtime::pool().spawn(Box::new(move || {
            let told = run.tell.as_ref().map_or(Ok(()), |(remote, message)| {
                let message = room::copy("post_xfer_req", message)?;
                run.endpoint.notify(remote, message).and_then(|transfer| transfer.wait())
            });
            run.end(told);
        }));
        if let Err(refused) = told {
            self.end(Err(refused.error));
        }
    }

    fn end(&self, result: Result<()>) {
        lock(&self.state).end = Some((result, Instant::now()));
        self.ended.notify_all();
    }

    fn result(&self) -> Option<Result<()>> {
        lock(&self.state).end.as_ref().map(|(result, _)| result.clone())
    }
}

impl Request {
    pub(super) fn new(
        engine: &Arc<Embedded>,
        op: XferOp,
        (near, spans): (std::borrow::Cow<'_, [Part]>, &[Span]),
        (far, remotes): (std::borrow::Cow<'_, [Part]>, &[Arc<Remote>]),
        peer: Option<Arc<Peer>>,
        message: Option<Vec<u8>>,
    ) -> Result<Request> {
        if near.len() != far.len() || near.is_empty() {
            let message = format!("{} local ranges and {} remote ones", near.len(), far.len());
            return Err(Error::invalid("create_xfer_req", message));
        }
        let mut groups: Vec<Group> = Vec::new();
        let mut known: HashMap<(u32, u32), usize> = HashMap::new();
        let mut bytes = 0u64;
        for (index, (near, far)) in near.iter().zip(far.iter()).enumerate() {
            if near.len != far.len {
                let message = format!("range {index}: {} local bytes for {} remote ones", near.len, far.len);
                return Err(Error::invalid("create_xfer_req", message));
            }
            let group = *known.entry((far.region, near.region)).or_insert_with(|| {
                groups.push(Group {
                    remote: Arc::clone(&remotes[far.region as usize]),
                    local: spans[near.region as usize].clone(),
                    spans: Vec::new(),
                });
                groups.len() - 1
            });
            room::push("create_xfer_req", &mut groups[group].spans, (far.offset, near.offset, near.len))?;
            bytes = bytes.saturating_add(near.len);
        }
        Ok(Request {
            engine: Arc::clone(engine),
            op,
            groups,
            peer,
            message,
            bytes,
            descriptors: near.len() as u64,
            posted: Mutex::new(None),
        })
    }

    pub(in crate::nixl) fn regions(&self) -> usize {
        self.groups.len()
    }

    /// Starts it; true while it is in progress. A message given here goes in place of that of the request.
    pub(in crate::nixl) fn post(&self, message: Option<&[u8]>) -> Result<bool> {
        let mut posted = lock(&self.posted);
        if posted.as_ref().is_some_and(|posted| posted.run.result().is_none()) {
            return Err(Error::invalid("post_xfer_req", "the request is in progress"));
        }
        self.peer.as_ref().map_or(Ok(()), |peer| peer.check())?;
        let endpoint = self.engine.endpoint();
        let message = message.or(self.message.as_deref());
        let mut message = message.map(|message| room::copy("post_xfer_req", message)).transpose()?;
        let alone = self.groups.len() == 1;
        let tell = if alone { None } else { message.take() };
        let started = Instant::now();
        let run = Arc::new(Run {
            endpoint: endpoint.clone(),
            tell: tell.map(|message| (Arc::clone(&self.groups[0].remote), message)),
            started,
            state: Mutex::new(State {
                left: self.groups.len(),
                failed: None,
                posting: Duration::ZERO,
                end: None,
            }),
            ended: Condvar::new(),
        });
        let mut transfers = Vec::with_capacity(self.groups.len());
        for (index, group) in self.groups.iter().enumerate() {
            let request = match self.op {
                XferOp::Read => endpoint.read(&group.remote, &group.local),
                XferOp::Write => endpoint.write(&group.remote, &group.local),
            };
            let mut request = request.spans(&group.spans);
            if let Some(message) = message.take() {
                request = request.notify(message);
            }
            let told = Arc::clone(&run);
            match request.then(Box::new(move |result| told.groups_ended(1, result))).start() {
                Ok(transfer) => transfers.push(transfer),
                Err(error) if index == 0 => return Err(error),
                Err(error) => {
                    transfers.iter().for_each(Transfer::cancel);
                    run.groups_ended(self.groups.len() - index, &Err(error));
                    break;
                }
            }
        }
        lock(&run.state).posting = started.elapsed();
        let result = run.result();
        *posted = Some(Posted { run, transfers: transfers.into() });
        match result {
            None => Ok(true),
            Some(result) => result.map(|()| false),
        }
    }

    fn posted(&self) -> Result<Posted> {
        let none = || Error::invalid("get_xfer_status", "the request was not posted");
        lock(&self.posted).clone().ok_or_else(none)
    }

    /// How it ended; `None` while it is in progress.
    pub(in crate::nixl) fn result(&self) -> Result<Option<Result<()>>> {
        Ok(self.posted()?.run.result())
    }

    /// Waits for its end for at most that long.
    pub(in crate::nixl) fn wait_for(&self, time: Duration) -> Result<Option<Result<()>>> {
        let Posted { run, transfers } = self.posted()?;
        let until = runtime::later(Instant::now(), time);
        // Who waits for a transfer takes part in its copies.
        for transfer in transfers.iter() {
            let left = until.saturating_duration_since(Instant::now());
            if transfer.wait_for(left).is_none() {
                return Ok(run.result());
            }
        }
        let mut state = lock(&run.state);
        loop {
            if let Some((result, _)) = &state.end {
                return Ok(Some(result.clone()));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            state = run.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(in crate::nixl) fn telemetry(&self) -> Result<XferTelemetry> {
        let posted = self.posted()?;
        let state = lock(&posted.run.state);
        let Some((_, ended)) = &state.end else {
            return Err(Error::invalid("get_telemetry", "the request is in progress"));
        };
        Ok(XferTelemetry {
            post_duration: state.posting,
            xfer_duration: ended.duration_since(posted.run.started),
            total_bytes: self.bytes,
            desc_count: self.descriptors,
        })
    }
}
