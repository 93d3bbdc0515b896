//! What an owner replies, and which request it concerns.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::Instant;

use towline_proto::session::initiator::{Landing, Reply};

use super::{Session, Waiter};
use crate::bytes::checked;
use crate::memory::Mapping;
use crate::session::QueryReply;
use crate::session::connection::{Connection, Handler, Next, Role};
use crate::session::importing::Answer;
use crate::session::parts::{Held, Sink};
use crate::wire::{self, FrameKind, Granted, Header, Message};
use crate::{Access, Error, Kind, Result};

impl Session {
    /// Maps the segments whose descriptors came along. One that cannot be mapped is no reason to refuse the grant:
    /// the path that needs it says so.
    fn map_segments(&self, granted: &Granted, files: Vec<OwnedFd>) -> Result<Vec<Arc<Mapping>>> {
        // Of an owner that is kept apart, none was taken.
        let Some(local) = &self.local else { return Ok(Vec::new()) };
        let mut files = files.into_iter();
        let mut mapped = Vec::new();
        let segments =
            || granted.items.iter().flatten().filter_map(|grant| Some((grant.segment?, grant.access)));
        for (segment, _) in segments().filter(|(segment, _)| segment.attached) {
            let file = files
                .next()
                .ok_or_else(|| Error::protocol("import", "a segment's descriptor did not come"))?;
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
        let message = Message::decode(header.kind, body)?;
        let reply = self.rules.lock().frame(over.id(), header, message, Instant::now())?;
        let in_time = match header.kind {
            FrameKind::Granted | FrameKind::QueryReply | FrameKind::Data | FrameKind::Done => {
                over.answered(header.id)
            }
            _ => Ok(()),
        };
        if let Err(early) = in_time {
            // The waiter is notified once, and the frame keeps its memory in use.
            match reply {
                Reply::Granted(waiter, _)
                | Reply::Queried(waiter, _)
                | Reply::NoBytes(waiter, _)
                | Reply::Done(waiter, _) => waiter.failed(self, early.clone()),
                _ => {}
            }
            return Err(early);
        }
        match reply {
            Reply::Granted(Waiter::Import(reply), granted) => match self.map_segments(&granted, files) {
                Ok(mapped) => reply.fill(self, Ok(Answer { granted, mapped })),
                Err(error) => {
                    reply.fill(self, Err(error.clone()));
                    return Err(error);
                }
            },
            Reply::Queried(Waiter::Query(asker), reply) => {
                let reply = reply.map(|reply| QueryReply { reply, files, loan: None });
                // Where nobody waits any more, the descriptors close here.
                let _ = asker.try_send(reply.map_err(|error| error.into_error("import")));
            }
            Reply::NoBytes(waiter, error) => waiter.failed(self, error),
            Reply::Done(Waiter::Unit { run, unit }, outcome) => match outcome {
                Ok(_) => run.done(unit, over),
                Err(error) => run.failed(unit, error.into_error("write")),
            },
            Reply::Done(Waiter::Atomic(transfer), outcome) => match outcome {
                Ok(value) => {
                    transfer.set_value(value);
                    transfer.unit_done();
                }
                Err(error) => transfer.unit_failed(0, error.into_error("atomic")),
            },
            Reply::Settled(actions) => self.act(actions, &[]),
            Reply::Unmap(segment) => {
                if let Some(local) = &self.local {
                    local.mappings.forget(segment);
                }
            }
            Reply::Recall(handle) => self.recall(handle),
            Reply::Ping => self.send_one_way(wire::Pong {})?,
            Reply::Bye(bye) => {
                over.peer_ends_it();
                return Err(self.goodbye(bye));
            }
            Reply::Nothing | Reply::Granted(..) | Reply::Queried(..) | Reply::Done(..) => {}
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
        let awaits =
            self.0.upgrade().is_some_and(|session| session.rules.lock().awaits_over(connection.id()));
        if awaits { Next::More } else { Next::Nothing }
    }

    fn payload(&self, over: &Arc<Connection>, header: Header, body: &[u8]) -> Result<Sink> {
        let session = self.session()?;
        let landing = session.rules.lock().payload(over.id(), header, body);
        let landing = landing.and_then(|landing| over.answered(header.id).map(|()| landing));
        Ok(match session.judge(over, landing)? {
            Landing::Memory(hold) => Sink::memory(Held::unit(hold, header.id)),
            Landing::Nowhere => Sink::discard(),
        })
    }

    fn received(&self, connection: &Arc<Connection>, header: Header, sink: Sink) -> Result<()> {
        let gone = sink.is_gone();
        let discarded = sink.is_discarded() && !gone;
        drop(sink);
        let session = self.session()?;
        let received = session.rules.lock().received(header.id, Instant::now());
        let Some((Waiter::Unit { run, unit }, checks)) = received else { return Ok(()) };
        if discarded {
            run.failed(unit, run.transfer.stop_error());
            return Ok(());
        }
        match if gone { Err(checked::gone("read")) } else { run.verify(unit, checks) } {
            Ok(()) => run.done(unit, connection),
            Err(error) => run.failed(unit, error),
        }
        Ok(())
    }

    fn closed(&self, connection: &Arc<Connection>, error: Error) {
        let Some(session) = self.0.upgrade() else { return };
        match connection.role() {
            Role::Control if error.kind() == Kind::Disconnected => {
                session.fail(connection.farewell().map_or(error, |bye| session.goodbye(bye)));
            }
            // An owner that breaks the protocol on one connection is not believed on another, and nobody knows what a panic has left behind.
            Role::Lane if !matches!(error.kind(), Kind::Protocol | Kind::Internal) => {
                session.lane_closed(connection, &error);
            }
            Role::Lane | Role::Control => session.fail(error),
        }
    }
}
