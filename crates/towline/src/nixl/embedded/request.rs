//! A transfer between two lists of ranges: one transfer of the library, with a part for each pair of regions.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Embedded;
use super::peer::Peer;
use super::table::Part as Listed;
use crate::nixl::transfer::{XferOp, XferTelemetry};
use crate::region::Span;
use crate::{BlockFailure, Error, Part, Remote, Result, Transfer, room};

/// One transfer. It can be posted again once it has ended.
pub(in crate::nixl) struct Request {
    engine: Arc<Embedded>,
    op: XferOp,
    groups: Vec<Group>,
    peer: Option<Arc<Peer>>,
    message: Option<Vec<u8>>,
    bytes: u64,
    descriptors: u64,
    posted: Mutex<Option<Arc<Posted>>>,
}

/// What is moved between one region there and one here.
struct Group {
    remote: Arc<Remote>,
    local: Span,
    /// Remote offset, local offset and length of each range.
    spans: Vec<(u64, u64, u64)>,
}

/// One posting, and when it ended.
struct Posted {
    transfer: Transfer,
    started: Instant,
    posting: Duration,
    ended: Arc<OnceLock<Instant>>,
}

impl Request {
    pub(super) fn new(
        engine: &Arc<Embedded>,
        op: XferOp,
        (near, spans): (std::borrow::Cow<'_, [Listed]>, &[Span]),
        (far, remotes): (std::borrow::Cow<'_, [Listed]>, &[Arc<Remote>]),
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
        let mut posted = self.posted.lock();
        if posted.as_ref().is_some_and(|posted| posted.transfer.result().is_none()) {
            return Err(Error::invalid("post_xfer_req", "the request is in progress"));
        }
        self.peer.as_ref().map_or(Ok(()), |peer| peer.check())?;
        let endpoint = &self.engine.endpoint;
        let parts =
            self.groups.iter().map(|group| Part::new(&group.remote, &group.local).spans(&group.spans));
        let request = match self.op {
            XferOp::Read => endpoint.read_parts(parts),
            XferOp::Write => endpoint.write_parts(parts),
        };
        let request = match message.or(self.message.as_deref()) {
            Some(message) => request.notify(room::copy("post_xfer_req", message)?),
            None => request,
        };
        let (started, ended) = (Instant::now(), Arc::<OnceLock<Instant>>::default());
        let set_ended = Arc::clone(&ended);
        let then = move |_: &Result<()>, _: &[BlockFailure]| {
            let _ = set_ended.set(Instant::now());
        };
        let transfer = request.then(Box::new(then)).start()?;
        let result = transfer.result();
        *posted = Some(Arc::new(Posted { transfer, started, posting: started.elapsed(), ended }));
        match result {
            None => Ok(true),
            Some(result) => result.map(|()| false),
        }
    }

    fn posted(&self) -> Result<Arc<Posted>> {
        let none = || Error::invalid("get_xfer_status", "the request was not posted");
        self.posted.lock().clone().ok_or_else(none)
    }

    /// How it ended; `None` while it is in progress.
    pub(in crate::nixl) fn result(&self) -> Result<Option<Result<()>>> {
        Ok(self.posted()?.transfer.result())
    }

    /// Waits for its end for at most that long. The waiter takes part in the copies.
    pub(in crate::nixl) fn wait_for(&self, time: Duration) -> Result<Option<Result<()>>> {
        Ok(self.posted()?.transfer.wait_for(time))
    }

    pub(in crate::nixl) fn telemetry(&self) -> Result<XferTelemetry> {
        let posted = self.posted()?;
        let Some(ended) = posted.ended.get() else {
            return Err(Error::invalid("get_telemetry", "the request is in progress"));
        };
        Ok(XferTelemetry {
            post_duration: posted.posting,
            xfer_duration: ended.duration_since(posted.started),
            total_bytes: self.bytes,
            desc_count: self.descriptors,
        })
    }
}
