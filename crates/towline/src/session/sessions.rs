//! The sessions of one endpoint: those to owners, those of peers, and what they have in common.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::Mutex;
use towline_proto::session::unauthenticated::Unauthenticated;

use super::connection::Connection;
use super::query::OwnerPaths;
use super::{Listener, Medium, NoContact, Refusals, Serving, Session, interfaces};
use crate::budget::Budget;
use crate::identity::{Identity, Incarnation};
use crate::operations::Operations;
use crate::region::Registry;
use crate::ticket::{self, Reach};
use crate::tls::Tls;
use crate::wire::handshake::Secret;
use crate::{Error, Kind, Quotas, Result, Ticket};

/// How sessions are made, and what peers may take by them.
pub(crate) struct Settings {
    /// What peers and owners have to know beside a ticket.
    pub(crate) secret: Option<Secret>,
    /// How what goes over TCP is encrypted.
    pub(crate) tls: Option<Tls>,
    pub(crate) quotas: Quotas,
    /// How many connections a large transfer over sockets is spread over.
    pub(crate) lanes: usize,
    /// Every access goes through its owner: no memory is shared, neither given nor taken.
    pub(crate) enforces_isolation: bool,
    /// Memory is shared with processes of the same user in other pid and user namespaces, too.
    pub(crate) shares_between_containers: bool,
}

/// Which process is at the other end, over what, and whether memory may be shared.
type To = (Incarnation, &'static str, bool);

/// The sessions of one endpoint.
pub(crate) struct Sessions {
    pub(crate) registry: Arc<Registry>,
    /// What waits to be claimed by a peer, or to be done by it.
    pub(super) operations: Arc<Operations>,
    pub(super) settings: Settings,
    pub(super) paths: Arc<dyn OwnerPaths>,
    /// The memory that peers cause this endpoint to hold.
    pub(crate) held: Arc<Budget>,
    /// Connections that have not proven themselves.
    pub(super) unauthenticated: Mutex<Unauthenticated<Weak<Connection>>>,
    /// Those that never became sessions.
    pub(crate) refusals: Refusals,
    listeners: Mutex<Vec<Arc<Listener>>>,
    /// Connections to owners.
    pub(super) to_owners: Mutex<HashMap<To, Arc<Session>>>,
    /// Connections of peers that use this endpoint's regions.
    serving: Mutex<Vec<Weak<Serving>>>,
}

impl Sessions {
    pub(crate) fn new(
        registry: &Arc<Registry>,
        operations: &Arc<Operations>,
        paths: Arc<dyn OwnerPaths>,
        held: Arc<Budget>,
        settings: Settings,
    ) -> Arc<Sessions> {
        Arc::new(Sessions {
            registry: Arc::clone(registry),
            operations: Arc::clone(operations),
            settings,
            paths,
            held,
            unauthenticated: Mutex::default(),
            refusals: Refusals::default(),
            listeners: Mutex::default(),
            to_owners: Mutex::default(),
            serving: Mutex::default(),
        })
    }

    /// Listens on a Unix socket and on those addresses, without any on loopback; tickets say so, or name the others.
    pub(crate) fn listen(self: &Arc<Self>, listen: &[SocketAddr], advertise: &[SocketAddr]) -> Result<()> {
        let mut listeners = vec![Listener::unix(self)?];
        let mut reach = vec![Reach::Unix];
        let loopback = [SocketAddr::from(([127, 0, 0, 1], 0))];
        let mut bound = Vec::new();
        for address in if listen.is_empty() { &loopback[..] } else { listen } {
            let listener = Listener::tcp(self, *address)?;
            bound.extend(interfaces::reachable(listener.address()?));
            listeners.push(listener);
        }
        let named = if advertise.is_empty() { &bound } else { advertise };
        reach.extend(named.iter().take(ticket::MAX_REACH - 1).copied().map(Reach::Tcp));
        self.registry.is_reached_by(reach);
        *self.listeners.lock() = listeners;
        Ok(())
    }

    /// The session to that owner over a medium of that name; `shares`: memory may be shared with the owner.
    pub(crate) fn to(&self, owner: Incarnation, medium: Medium, shares: bool) -> Option<Arc<Session>> {
        let sessions = self.to_owners.lock();
        sessions.get(&(owner, medium.name(), shares)).filter(|session| session.is_open()).cloned()
    }

    /// A session to a ticket's owner over that medium: the one that there is, or a new one. Blocks, at most until a socket should be
    /// connected, and contact be made.
    pub(crate) fn contact(
        self: &Arc<Self>,
        ticket: &Ticket,
        medium: Medium,
        shares: bool,
        limits: (Instant, Instant),
    ) -> Result<Arc<Session>, NoContact> {
        let owner = ticket.body().identity.incarnation;
        if let Some(session) = self.to(owner, medium, shares) {
            return Ok(session);
        }
        let session = Session::connect(self, ticket, medium, shares, limits)?;
        let key = (owner, medium.name(), shares);
        let mut sessions = self.to_owners.lock();
        // Two threads may have made contact at once; the first one's session serves both.
        if let Some(earlier) = sessions.get(&key).filter(|session| session.is_open()) {
            return Ok(Arc::clone(earlier));
        }
        sessions.insert(key, Arc::clone(&session));
        Ok(session)
    }

    /// That session to an owner is over.
    pub(super) fn forget(&self, session: &Session) {
        let mut sessions = self.to_owners.lock();
        let key = (session.owner().incarnation, session.medium.name(), session.shares);
        if sessions.get(&key).is_some_and(|one| std::ptr::eq(Arc::as_ptr(one), session)) {
            sessions.remove(&key);
        }
    }

    /// The peers that are served.
    pub(crate) fn serving(&self) -> Vec<Arc<Serving>> {
        self.serving.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// One more peer is served.
    pub(super) fn serve(&self, serving: &Arc<Serving>) {
        let mut all = self.serving.lock();
        all.retain(|one| one.strong_count() > 0);
        all.push(Arc::downgrade(serving));
    }

    /// That peer is served no more.
    pub(super) fn serve_no_more(&self, serving: &Serving) {
        self.serving.lock().retain(|one| one.as_ptr() != std::ptr::from_ref(serving));
    }

    /// How many connections have not proven themselves.
    pub(crate) fn unauthenticated(&self) -> usize {
        self.unauthenticated.lock().count()
    }

    /// Stops listening, and ends all sessions.
    pub(crate) fn hang_up(&self) {
        for listener in self.listeners.lock().drain(..) {
            listener.close();
        }
        let closed = || Error::new(Kind::Canceled, "close", "the endpoint was closed");
        let sessions: Vec<_> = self.to_owners.lock().drain().map(|(_, session)| session).collect();
        for session in sessions {
            session.close(closed());
        }
        let serving: Vec<_> = self.serving.lock().drain(..).filter_map(|peer| peer.upgrade()).collect();
        for peer in serving {
            peer.close();
        }
    }

    /// Whose sessions they are.
    pub(super) fn identity(&self) -> &Identity {
        self.registry.identity()
    }
}
