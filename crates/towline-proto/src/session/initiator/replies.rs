//! What an owner says, and whom it concerns.

use std::time::Instant;

use super::owed::Due;
use super::{Action, Actions, Asks, ConnectionId, Initiator, Pending, Waiter};
use crate::wire::{Bye, Data, FrameKind, Granted, Header, Message, WireError};
use crate::{Error, Result};

/// What a frame without payload means.
pub enum Reply<W: Waiter> {
    /// Nothing: nobody waits for it any more, or it only says that the owner is there.
    Nothing,
    /// The grants that were asked for, one for each ticket.
    Granted(W, Granted),
    /// What a path has to know.
    Queried(W, Result<Vec<u8>, WireError>),
    /// Instead of bytes: why there are none.
    NoBytes(W, Error),
    /// How a change ended.
    Done(W, Result<u64, WireError>),
    /// What follows from the owner's word that it is not at something any more.
    Settled(Actions<W>),
    /// A segment of the owner is gone.
    Unmap(u64),
    /// The owner wants that grant back.
    Recall(u32),
    /// The owner asks whether this side is there.
    Ping,
    /// The owner ends the session.
    Bye(Bye),
}

/// Where the bytes of a reply go.
#[derive(Debug)]
pub enum Landing<H> {
    /// Into the memory of the request, which the hold names.
    Memory(H),
    /// Nowhere: its transfer was stopped.
    Nowhere,
}

fn refuse<T>(wrong: impl Into<std::borrow::Cow<'static, str>>) -> Result<T> {
    Err(Error::protocol("receive", wrong))
}

impl<W: Waiter> Initiator<W> {
    /// A frame without payload has come over that connection. An error breaks the protocol: the session is to [end](Self::end) with it.
    pub fn frame(
        &mut self,
        over: ConnectionId,
        header: Header,
        message: Message,
        now: Instant,
    ) -> Result<Reply<W>> {
        self.last_received = now;
        let id = header.id;
        if matches!(
            header.kind,
            FrameKind::Granted | FrameKind::QueryReply | FrameKind::Data | FrameKind::Done
        ) {
            self.fits(over, header.kind, id)?;
        }
        Ok(match message {
            Message::Granted(granted) => {
                let tickets = match self.pending.get(&id) {
                    Some(Pending::Open { asks: Asks::Grants(tickets), .. }) => *tickets,
                    _ => granted.items.len(),
                };
                if tickets != granted.items.len() {
                    return Err(Error::protocol(
                        "import",
                        "the owner's reply is about another number of tickets",
                    ));
                }
                self.waiter_of(id).map_or(Reply::Nothing, |waiter| Reply::Granted(waiter, granted))
            }
            Message::QueryReply(reply) => {
                self.waiter_of(id).map_or(Reply::Nothing, |waiter| Reply::Queried(waiter, reply.outcome))
            }
            Message::Data(Data { outcome }) => self.waiter_of(id).map_or(Reply::Nothing, |waiter| {
                let error = outcome.map_or_else(
                    |error| error.into_error("read"),
                    |()| Error::protocol("read", "the owner answered without the bytes"),
                );
                Reply::NoBytes(waiter, error)
            }),
            Message::Done(done) => match self.forget(id) {
                Some(Pending::Open { waiter, .. }) => Reply::Done(waiter, done.outcome),
                Some(Pending::Late(transfer)) => Reply::Settled(vec![Action::Settled(transfer)]),
                Some(Pending::Ending(lane)) => Reply::Settled(self.lane_ended(lane, done.outcome.is_ok())),
                Some(Pending::Unwanted { .. }) | None => Reply::Nothing,
            },
            Message::Check(check) => {
                self.announced(over, id, check.checks)?;
                Reply::Nothing
            }
            Message::Unmap(unmap) => Reply::Unmap(unmap.segment),
            Message::Recall(recall) => Reply::Recall(recall.handle),
            Message::Ping(_) => Reply::Ping,
            Message::Pong(_) => Reply::Nothing,
            Message::Bye(bye) => Reply::Bye(bye),
            other => return refuse(format!("an owner does not send {:?}", other.kind())),
        })
    }

    /// A frame with payload has come over that connection, whose body is this: where does the payload go?
    pub fn payload(&mut self, over: ConnectionId, header: Header, body: &[u8]) -> Result<Landing<W::Hold>> {
        if header.kind != FrameKind::Data {
            return refuse(format!("an owner does not send {:?}", header.kind));
        }
        if Data::decode(body)?.outcome.is_err() {
            return refuse("the owner sent an error and bytes with it");
        }
        self.fits(over, header.kind, header.id)?;
        match self.pending.get(&header.id) {
            Some(Pending::Open { waiter, asks: Asks::Bytes { bytes, .. }, .. }) => match waiter.hold() {
                Some(hold) if *bytes == header.payload_len => Ok(Landing::Memory(hold)),
                _ => {
                    let message = "the owner sent another number of bytes than was requested";
                    Err(Error::protocol("read", message))
                }
            },
            _ => Ok(Landing::Nowhere),
        }
    }

    /// The payload of the reply to that request has come whole. Gives its waiter, and the checksums that came ahead.
    pub fn received(&mut self, request: u64, now: Instant) -> Option<(W, Option<Vec<u32>>)> {
        self.last_received = now;
        let checks = self.checks.remove(&request);
        self.waiter_of(request).map(|waiter| (waiter, checks))
    }

    fn waiter_of(&mut self, request: u64) -> Option<W> {
        self.forget(request).and_then(Self::waiter)
    }

    /// The reply that a request gets; the outer `None` if it gets no reply, the inner if that is not known.
    fn due_reply(&self, request: u64) -> Option<Option<Due>> {
        match self.pending.get(&request) {
            Some(one) => Some(Some(Due { kind: one.reply(), over: self.over_of(one) })),
            None => self.owed.due(request),
        }
    }

    /// Refuses a reply that does not belong to a request: to none that is open, over another connection, to something else
    /// than was asked, or the second.
    fn fits(&self, over: ConnectionId, kind: FrameKind, request: u64) -> Result<()> {
        let due = match self.due_reply(request) {
            Some(due) => due,
            None => return refuse("the owner sent a reply to no request, or a second reply"),
        };
        match due.and_then(|due| due.refusal(kind, over)) {
            Some(wrong) => refuse(wrong),
            None => Ok(()),
        }
    }

    /// Takes the checksums that come ahead of the bytes of a read.
    fn announced(&mut self, over: ConnectionId, request: u64, sums: Vec<u32>) -> Result<()> {
        const UNASKED: &str = "the owner sent checksums that were not requested";
        let Some(due) = self.due_reply(request) else { return refuse(UNASKED) };
        if let Some(wrong) = due.and_then(|due| due.refusal(FrameKind::Data, over)) {
            return refuse(wrong);
        }
        let Some(Pending::Open { asks, .. }) = self.pending.get(&request) else { return Ok(()) };
        if !matches!(asks, Asks::Bytes { checks: Some(asked), .. } if *asked == sums.len()) {
            return refuse("the owner sent checksums that were not requested, or another number of them");
        }
        match self.checks.insert(request, sums) {
            None => Ok(()),
            Some(_) => refuse("the owner sent the checksums of a request twice"),
        }
    }
}
