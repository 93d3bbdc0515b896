//! The replies of an owner to queries about a path to one of its grants, before the peer takes it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use super::connection::Connection;
use super::owner::{Granting, Serving};
use super::parts::Payload;
use super::query::{Loan, Query, QueryReply, Ticketed};
use crate::memory::FileSlice;
use crate::region::{Borrower, Counted, Registry};
use crate::runtime::Device;
use crate::wire::{self, Message, WireError};
use crate::{Access, Error, Kind, Result, runtime};

impl Serving {
    /// Replies to a query about a path. Not on the event loop: a path may open a device, or load a library.
    pub(super) fn answer_query(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        request: u64,
        query: wire::Query,
        granting: Option<Arc<Granting>>,
    ) -> Result<()> {
        // Request 0 gets no reply, also if its grant is gone.
        if self.take_hint(&query, granting.as_deref())? || request == 0 {
            return Ok(());
        }
        let outcome = self.allowance.take("import", 0, 0, None).and_then(|flight| {
            let body = flight.charge("import", query.body.capacity())?;
            Ok((flight, body))
        });
        let counted = match outcome {
            Ok(counted) => counted,
            Err(error) => {
                let outcome = Err(WireError::from(&error));
                let frame = Message::from(wire::QueryReply { outcome }).frame(request, 0, 0);
                return connection.say(frame);
            }
        };
        let device = answered_by(&query, granting.as_deref());
        drop(granting);
        let (serving, answered) = (Arc::clone(self), Arc::clone(connection));
        let work = move || {
            let _counted = counted;
            let (outcome, files) = match serving.reply_to(&query).and_then(|reply| serving.fits(reply)) {
                Ok(reply) => (Ok(reply.reply), reply.files),
                Err(error) => (Err(WireError::from(&error)), Vec::new()),
            };
            let frame = Message::from(wire::QueryReply { outcome }).frame(request, 0, files.len() as u8);
            // Where it fails, the connection has ended, and the peer knows.
            let _ = answered.send(frame, files, Payload::None);
        };
        runtime::devices().spawn(device, Box::new(work)).map_err(|refused| refused.error)
    }

    /// Takes a hint, which gets no reply.
    fn take_hint(&self, query: &wire::Query, granting: Option<&Granting>) -> Result<bool> {
        // A grant that was given back meanwhile is no reason to end the session.
        let Some(granting) = granting else { return Ok(false) };
        // A peer that was lent nothing, and is not in the audit, has nothing in flight. Without a look at the lease: what was begun within it
        // may end after it.
        if !granting.lent.is_by(query.path) {
            return Ok(false);
        }
        let (sessions, region) = (self.sessions()?, granting.served.region().upgrade());
        region.map_or(Ok(false), |_| sessions.paths.take_hint(query.path, &query.body))
    }

    fn reply_to(self: &Arc<Self>, query: &wire::Query) -> Result<QueryReply> {
        let (granting, region) = self.granted("import", query.handle, Access::NONE)?;
        let ticketed = Ticketed { region: &region, claims: &granting.claims };
        let pins = self.local.as_ref().map(|local| &local.pins);
        let about = Query { ticketed, peer: &self.peer, pins, words: &query.body };
        let mut reply = self.sessions()?.paths.answer_query(query.path, &about)?;
        if reply.loan.is_some() || !reply.files.is_empty() {
            granting.count(Counted::GivenAway);
        }
        if let Some(loan) = reply.loan.take() {
            let lent = Lent {
                serving: Arc::downgrade(self),
                handle: query.handle,
                peer: self.peer.name.clone(),
                path: query.path,
                loan,
            };
            granting.lent.begin(lent, |lent| region.lend(lent))?;
            // The thread that ends the session gives back what it finds after it has said so.
            if self.is_closed() {
                granting.lent.orphaned();
            }
        }
        Ok(reply)
    }

    fn fits(&self, reply: QueryReply) -> Result<QueryReply> {
        let files = if self.local.is_some() { wire::MAX_QUERY_FILES } else { 0 };
        if reply.reply.len() <= wire::MAX_QUERY && reply.files.len() <= usize::from(files) {
            return Ok(reply);
        }
        let message = format!("{} bytes and {} descriptors do not fit", reply.reply.len(), reply.files.len());
        Err(Error::new(Kind::Internal, "import", message))
    }
}

/// What a reply may have to wait for: the file that the query is about, or the library behind the path.
fn answered_by(query: &wire::Query, granting: Option<&Granting>) -> Device {
    let region = granting.and_then(|granting| granting.served.region().upgrade());
    let file = region.and_then(|region| region.file.as_ref().map(FileSlice::device));
    file.unwrap_or(Device::Path(query.path))
}

/// What a grant has lent to its peer: nothing, or the region.
#[derive(Default)]
pub(super) struct Lending(OnceLock<Arc<State>>);

struct State {
    lent: Lent,
    back: AtomicBool,
    orphaned: AtomicBool,
}

/// A region that a peer reaches by itself.
struct Lent {
    serving: Weak<Serving>,
    handle: u32,
    peer: String,
    path: u8,
    loan: Arc<dyn Loan>,
}

impl Lending {
    /// Whether the region was lent, by that path.
    fn is_by(&self, path: u8) -> bool {
        self.0.get().is_some_and(|state| state.lent.path == path)
    }

    /// Lends it; a grant that has lent its region already goes on as it is.
    fn begin(&self, lent: Lent, lend: impl FnOnce(Arc<dyn Borrower>) -> Result<()>) -> Result<()> {
        let state = Arc::new(State { lent, back: AtomicBool::new(false), orphaned: AtomicBool::new(false) });
        match self.0.set(Arc::clone(&state)) {
            Ok(()) if state.lent.loan.pinned() => Ok(()),
            Ok(()) => lend(state),
            Err(_) => Ok(()),
        }
    }

    /// The peer has let go.
    pub(super) fn back(&self) {
        if let Some(state) = self.0.get() {
            state.end(state.lent.registry());
        }
    }

    /// The session has ended, and the peer had not let go.
    pub(super) fn orphaned(&self) {
        if let Some(state) = self.0.get()
            && !state.back.load(Ordering::Acquire)
            && !state.orphaned.swap(true, Ordering::AcqRel)
        {
            // By then the one that served it is gone.
            let (ended, registry) = (Arc::clone(state), state.lent.registry());
            state.lent.loan.orphaned(Box::new(move || ended.end(registry)));
        }
    }
}

impl State {
    fn end(&self, registry: Option<Arc<Registry>>) {
        if !self.back.swap(true, Ordering::AcqRel)
            && let Some(registry) = registry
        {
            registry.let_go_elsewhere();
        }
    }
}

impl Lent {
    fn registry(&self) -> Option<Arc<Registry>> {
        Some(Arc::clone(&self.serving.upgrade()?.sessions().ok()?.registry))
    }
}

impl Borrower for State {
    fn recall(&self) {
        if let Some(control) = self.lent.serving.upgrade().and_then(|serving| serving.control()) {
            let frame = Message::from(wire::Recall { handle: self.lent.handle }).frame(0, 0, 0);
            // Where it fails, the connection has ended, and with it the loan.
            let _ = control.say(frame);
        }
    }

    fn is_back(&self) -> bool {
        self.back.load(Ordering::Acquire)
    }

    fn who(&self) -> &str {
        &self.lent.peer
    }
}
