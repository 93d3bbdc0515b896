//! Tickets on their way to becoming grants: asked for over a session, answered by its owner.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use towline_proto::session::initiator::Asks;

use super::grant::GrantHandle;
use super::initiator::{Session, Waiter};
use crate::completion::Completion;
use crate::memory::Mapping;
use crate::runtime::{self, Timer, TimerId};
use crate::wire::{Finish, Grant, Granted, Import, ImportItem, OperationId, Release, WireError};
use crate::{Error, Kind, Result, Ticket};

/// Imports per frame: bounded by the descriptors that can ride with the answer.
const IMPORTS_PER_FRAME: usize = 128;

/// The answer to one Import frame, and who waits for it.
pub(super) struct Reply {
    answer: Completion<Result<Answer>>,
    /// Where nobody waits any more, this ends with what is given back.
    claim: Option<OperationId>,
}

/// The owner's answer to an import, and the segments that came with it.
pub(super) struct Answer {
    pub(super) granted: Granted,
    /// Keeps the mappings until the remotes that use them exist.
    pub(super) mapped: Vec<Arc<Mapping>>,
}

impl Reply {
    /// The owner has answered, or never will.
    pub(super) fn fill(&self, session: &Session, answer: Result<Answer>) {
        if let Err(Ok(unwanted)) = self.answer.set(answer) {
            give_back(session, &unwanted.granted, self.claim);
        }
    }

    fn abandon(&self, session: &Session) {
        if let Some(Ok(unwanted)) = self.answer.abandon() {
            give_back(session, &unwanted.granted, self.claim);
        }
    }
}

/// Wakes who polls at the time limit, so that the limit is noticed.
impl Timer for Reply {
    fn fired(self: Arc<Self>, _key: u64) {
        self.answer.wake();
    }
}

fn give_back(session: &Session, granted: &Granted, claim: Option<OperationId>) {
    let mut any = false;
    for grant in granted.items.iter().flatten() {
        any = true;
        let _ = session.send_one_way(Release { handle: grant.handle });
    }
    if let (true, Some(operation)) = (any, claim) {
        let error = Error::new(Kind::Canceled, "import", "the claimer has given up before it began");
        let _ = session.send_one_way(Finish { operation, outcome: Err(WireError::from(&error)) });
    }
}

/// The tickets of one frame, as bytes; none of those that are claimed, which is not done again.
type Asked = Vec<Option<Box<[u8]>>>;

/// What the owner granted, ticket by ticket. Must live until the remotes that use it exist.
pub(crate) struct Imported {
    pub(crate) outcomes: Vec<Result<(Grant, Arc<GrantHandle>)>>,
    _mapped: Vec<Arc<Mapping>>,
}

/// An import that the owner has not answered yet. Dropped early, it gives back whatever is granted later.
pub(crate) struct Importing {
    session: Arc<Session>,
    claim: Option<OperationId>,
    waiting: Vec<(Arc<Reply>, Asked)>,
    until: Instant,
    timer: Option<TimerId>,
}

impl Session {
    /// Turns tickets into grants. With an operation, claims it.
    pub(crate) fn import(
        self: &Arc<Self>,
        tickets: &[&Ticket],
        operation: Option<OperationId>,
        until: Instant,
    ) -> Result<Importing> {
        let mut importing = Importing {
            session: Arc::clone(self),
            claim: operation,
            waiting: Vec::new(),
            until,
            timer: None,
        };
        // The frames of one claim are not mixed with those of another: the first claimer gets all of it.
        let _in_order = self.importing.lock();
        for some in tickets.chunks(IMPORTS_PER_FRAME) {
            let items = some
                .iter()
                .map(|ticket| ImportItem {
                    ticket: ticket.public_bytes().to_vec(),
                    proof: ticket.proof(&proven(&self.challenge, operation.as_ref())),
                    operation,
                })
                .collect();
            let reply = Arc::new(Reply { answer: Completion::default(), claim: operation });
            let (asks, waiter) = (Asks::Grants(some.len()), Waiter::Import(Arc::clone(&reply)));
            let kept = |ticket: &&Ticket| operation.is_none().then(|| ticket.encode().into_boxed_slice());
            importing.waiting.push((reply, some.iter().map(kept).collect()));
            self.ask(asks, waiter, Import { items })?;
        }
        Ok(importing)
    }
}

/// What the proof of an import is about: the connection, and the operation where one is claimed.
pub(crate) fn proven(challenge: &[u8], operation: Option<&OperationId>) -> Vec<u8> {
    [challenge, operation.map_or(&[][..], |operation| &operation[..])].concat()
}

impl Importing {
    /// Waits for the answers.
    pub(crate) fn wait(mut self) -> Result<Imported> {
        self.collect()
    }

    /// The answers, once all of them are there.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Imported>> {
        let missing = self.waiting.iter().find(|(reply, _)| !reply.answer.is_there(cx));
        if let Some((reply, _)) = missing
            && Instant::now() < self.until
        {
            if self.timer.is_none() {
                self.timer = runtime::call_at(self.until, reply, 0);
            }
            return Poll::Pending;
        }
        Poll::Ready(self.collect())
    }

    fn collect(&mut self) -> Result<Imported> {
        let mut imported = Imported { outcomes: Vec::new(), _mapped: Vec::new() };
        while !self.waiting.is_empty() {
            let (reply, _) = &self.waiting[0];
            let late = || {
                let message = format!("the owner did not answer over {} in time", self.session.medium);
                Err(Error::new(Kind::Timeout, "import", message).with_peer(self.session.peer_name()))
            };
            match reply.answer.take("import", self.until).and_then(|answer| answer.unwrap_or_else(late)) {
                Ok(answer) => {
                    let (_, tickets) = self.waiting.remove(0);
                    imported._mapped.extend(answer.mapped);
                    let items = answer.granted.items.into_iter().zip(tickets);
                    imported.outcomes.extend(items.map(|(item, ticket)| self.take(item, ticket)));
                }
                Err(error) => {
                    if imported.outcomes.iter().any(Result::is_ok) {
                        self.refuse_claim(&error);
                    }
                    return Err(error);
                }
            }
        }
        Ok(imported)
    }

    fn take(
        &self,
        item: Result<Grant, WireError>,
        ticket: Option<Box<[u8]>>,
    ) -> Result<(Grant, Arc<GrantHandle>)> {
        match item {
            Ok(grant) => {
                let handle = GrantHandle::new(&self.session, &grant, ticket);
                Ok((grant, Arc::new(handle)))
            }
            Err(error) => Err(error.into_error("import").with_peer(self.session.peer_name())),
        }
    }

    fn refuse_claim(&self, error: &Error) {
        if let Some(operation) = self.claim {
            let _ = self.session.send_one_way(Finish { operation, outcome: Err(error.into()) });
        }
    }
}

impl Drop for Importing {
    fn drop(&mut self) {
        if crate::fork::in_child() {
            return;
        }
        runtime::forget(self.timer);
        for (reply, _) in self.waiting.drain(..) {
            reply.abandon(&self.session);
        }
    }
}
