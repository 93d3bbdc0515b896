//! What an owner says, and whom it concerns.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use super::{Pending, Session};
use crate::bytes::checked;
use crate::memory::Mapping;
use crate::session::QueryReply;
use crate::session::connection::{Connection, Handler, Next, Role};
use crate::session::importing::Answer;
use crate::session::parts::Sink;
use crate::sync::lock;
use crate::wire::{self, FrameKind, Granted, Header, Message};
use crate::{Access, Error, Kind, Result};

impl Session {
    /// Maps the segments whose descriptors came along. One that cannot be mapped is no reason to refuse the grant:
    /// the path that needs it says so.
    fn map_segments(&self, granted: &Granted, files: Vec<OwnedFd>) -> Result<Vec<Arc<Mapping>>> {
        let mut files = files.into_iter();
        let mut mapped = Vec::new();
        let segments =
            || granted.items.iter().flatten().filter_map(|grant| Some((grant.segment?, grant.access)));
        for (segment, _) in segments().filter(|(segment, _)| segment.attached) {
            let file = files
                .next()
                .ok_or_else(|| Error::protocol("import", "a segment's descriptor did not come"))?;
            let Some(local) = &self.local else { continue };
            let writable =
                segments().any(|(one, access)| one.id == segment.id && access.contains(Access::WRITE));
            match local.mappings.map(&segment, file, writable) {
                Ok(mapping) => mapped.push(mapping),
                Err(error) => tracing::debug!(%error, "a segment cannot be mapped"),
            }
        }
        if files.next().is_some() {
            return Err(Error::protocol("import", "more descriptors came than there are segments"));
        }
        Ok(mapped)
    }

    /// Refuses an answer that does not belong to a request: to none that is open, over another connection, to something else
    /// than was asked, or before it was asked.
    fn fits(&self, over: &Arc<Connection>, header: Header) -> Result<()> {
        let wrong = {
            let pending = lock(&self.pending);
            let owed = lock(&self.owed);
            match pending.get(&header.id).and_then(|one| self.awaits(one)) {
                Some((_, due)) => due.refusal(header.kind, over),
                None => match owed.due(header.id) {
                    Some(due) => due.and_then(|due| due.refusal(header.kind, over)),
                    None => Some("the owner answered what it was not asked, or has answered before"),
                },
            }
        };
        match wrong {
            Some(wrong) => Err(Error::protocol("receive", wrong)),
            None => over.answered(header.id),
        }
    }

    /// Takes the checksums that come ahead of the bytes of a read.
    fn announced(&self, over: &Connection, request: u64, sums: Vec<u32>) -> Result<()> {
        let refuse = |wrong| Err(Error::protocol("receive", wrong));
        // Under the lock of what is pending: nobody forgets the request meanwhile.
        let pending = lock(&self.pending);
        let due = pending.get(&request).and_then(|one| self.awaits(one)).map(|(_, due)| due);
        let known = due.or_else(|| lock(&self.owed).due(request).flatten().cloned());
        if let Some(wrong) = known.and_then(|due| due.refusal(FrameKind::Data, over)) {
            return refuse(wrong);
        }
        let Some(Pending::Unit { run, unit, .. }) = pending.get(&request) else {
            let open = pending.contains_key(&request) || lock(&self.owed).due(request).is_some();
            return if open { Ok(()) } else { refuse("the owner sent checksums that it was not asked for") };
        };
        if run.checksums(*unit) != Some(sums.len()) {
            return refuse("the owner sent checksums that it was not asked for, or another number of them");
        }
        match lock(&self.checks).insert(request, sums) {
            None => Ok(()),
            Some(_) => refuse("the owner sent the checksums of a request twice"),
        }
    }

    /// An owner that breaks the protocol on one connection is not believed on another.
    fn judge<T>(&self, over: &Connection, outcome: Result<T>) -> Result<T> {
        if let Err(error) = &outcome
            && error.kind() == Kind::Protocol
            && !over.is_closed()
        {
            self.fail(error.clone());
        }
        outcome
    }

    fn answered(
        &self,
        over: &Arc<Connection>,
        header: Header,
        body: &[u8],
        files: Vec<OwnedFd>,
    ) -> Result<()> {
        self.hear();
        if matches!(header.kind, FrameKind::Granted | FrameKind::Told | FrameKind::Data | FrameKind::Done) {
            self.fits(over, header)?;
        }
        match Message::decode(header.kind, body)? {
            Message::Granted(granted) => {
                if let Some(Pending::Import(reply)) = lock(&self.pending).get(&header.id)
                    && reply.tickets() != granted.items.len()
                {
                    let message = "the owner answered for another number of tickets";
                    return Err(Error::protocol("import", message));
                }
                let mapped = self.map_segments(&granted, files)?;
                if let Some(Pending::Import(reply)) = self.forget(header.id) {
                    reply.fill(self, Ok(Answer { granted, mapped }));
                }
            }
            Message::Told(told) => {
                if let Some(Pending::Ask(asker)) = self.forget(header.id) {
                    let told = told.outcome.map(|reply| QueryReply { reply, files, loan: None });
                    // Where nobody waits any more, the descriptors close here.
                    let _ = asker.try_send(told.map_err(|error| error.into_error("import")));
                }
            }
            Message::Data(data) => match (self.forget(header.id), data.outcome) {
                (Some(Pending::Unit { run, unit, .. }), Err(error)) => {
                    run.failed(unit, error.into_error("read"))
                }
                (Some(Pending::Unit { run, unit, .. }), Ok(())) => {
                    run.failed(unit, Error::protocol("read", "the owner answered without the bytes"));
                }
                _ => {}
            },
            Message::Done(done) => match (self.forget(header.id), done.outcome) {
                (Some(Pending::Unit { run, unit, connection }), Ok(_)) => run.done(unit, &connection),
                (Some(Pending::Unit { run, unit, .. }), Err(error)) => {
                    run.failed(unit, error.into_error("write"))
                }
                (Some(Pending::Atomic { transfer }), Ok(value)) => {
                    transfer.set_value(value);
                    transfer.unit_done();
                }
                (Some(Pending::Atomic { transfer }), Err(error)) => {
                    transfer.unit_failed(0, error.into_error("atomic"));
                }
                (Some(Pending::Late(transfer)), _) => transfer.finished_afar(),
                (Some(Pending::Ending(lane)), outcome) => self.lane_ended(lane, outcome.is_ok()),
                _ => {}
            },
            Message::Check(check) => self.announced(over, header.id, check.checks)?,
            Message::Unmap(unmap) => {
                if let Some(local) = &self.local {
                    local.mappings.forget(unmap.segment);
                }
            }
            Message::Recall(recall) => self.recall(recall.handle),
            Message::Ping(_) => self.tell(wire::Pong {})?,
            Message::Pong(_) => {}
            Message::Bye(bye) => {
                over.peer_ends_it();
                return Err(self.goodbye(bye));
            }
            other => {
                return Err(Error::protocol("receive", format!("an owner does not send {:?}", other.kind())));
            }
        }
        Ok(())
    }
}

/// Passes a connection's frames on to its session, without keeping it alive.
pub(super) struct ToSession(pub(super) Weak<Session>);

impl ToSession {
    fn session(&self) -> Result<Arc<Session>> {
        self.0.upgrade().ok_or_else(|| Error::new(Kind::Canceled, "session", "the session is gone"))
    }
}

impl Handler for ToSession {
    fn frame(&self, over: &Arc<Connection>, header: Header, body: &[u8], files: Vec<OwnedFd>) -> Result<()> {
        let session = self.session()?;
        session.judge(over, session.answered(over, header, body, files))
    }

    fn next(&self, connection: &Arc<Connection>) -> Next {
        let Some(session) = self.0.upgrade() else { return Next::Nothing };
        let asked = |one: &Pending| match one {
            Pending::Unit { connection: over, .. } | Pending::Unwanted { connection: over, .. } => {
                Arc::ptr_eq(over, connection)
            }
            _ => false,
        };
        if lock(&session.pending).values().any(asked) { Next::More } else { Next::Nothing }
    }

    fn payload(&self, over: &Arc<Connection>, header: Header, body: &[u8]) -> Result<Sink> {
        if header.kind != FrameKind::Data {
            return Err(Error::protocol("receive", format!("an owner does not send {:?}", header.kind)));
        }
        wire::Data::decode(body)?
            .outcome
            .map_err(|_| Error::protocol("receive", "the owner sent an error and bytes with it"))?;
        let session = self.session()?;
        session.judge(over, session.fits(over, header))?;
        let sink = match lock(&session.pending).get(&header.id) {
            Some(Pending::Unit { run, unit, .. }) => run.sink(*unit, header),
            // Its transfer was stopped: the bytes are no longer wanted.
            _ => Ok(Sink::discard()),
        };
        session.judge(over, sink)
    }

    fn received(&self, connection: &Arc<Connection>, header: Header, sink: Sink) -> Result<()> {
        let gone = sink.is_gone();
        let discarded = sink.is_discarded() && !gone;
        drop(sink);
        let session = self.session()?;
        session.hear();
        if discarded {
            session.went_nowhere(header.id);
            return Ok(());
        }
        let checks = lock(&session.checks).remove(&header.id);
        if let Some(Pending::Unit { run, unit, .. }) = session.forget(header.id) {
            match if gone { Err(checked::gone("read")) } else { run.verify(unit, checks) } {
                Ok(()) => run.done(unit, connection),
                Err(error) => run.failed(unit, error),
            }
        }
        Ok(())
    }

    fn closed(&self, connection: &Arc<Connection>, error: Error) {
        let Some(session) = self.0.upgrade() else { return };
        match connection.role() {
            Role::Control if error.kind() == Kind::Disconnected => {
                session.fail(connection.farewell().map_or(error, |bye| session.goodbye(bye)));
            }
            Role::Lane if error.kind() != Kind::Protocol => session.lane_closed(connection, &error),
            // An owner that breaks the protocol on one connection is not believed on another.
            Role::Lane | Role::Control => session.fail(error),
        }
    }
}
