//! Queries about paths: what a path asks of an owner before it is taken, and which grants it has borrowed since.
//!
//! What they say is the transports' business: the one at this side asks ([`GrantHandle::query`]), the one of the same number at the owner
//! answers ([`OwnerPaths`]).

use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak, mpsc};
use std::time::Instant;

use towline_proto::session::initiator::Asks;

use super::grant::GrantHandle;
use super::initiator::{Session, Waiter};
use crate::identity::Identity;
use crate::region::{PeerPins, RegionCore};
use crate::ticket::Claims;
use crate::wire;
use crate::{Error, Kind, Result, runtime};

/// At the owner: a region, and what a ticket of it allows.
pub(crate) struct Ticketed<'a> {
    pub(crate) region: &'a Arc<RegionCore>,
    pub(crate) claims: &'a Claims,
}

/// At the owner: what a peer asks about one of its grants, so that it can take a path.
pub(crate) struct Query<'a> {
    pub(crate) ticketed: Ticketed<'a>,
    pub(crate) peer: &'a Identity,
    /// A peer of the same user on this host has pins, and descriptors can be handed to it.
    pub(crate) pins: Option<&'a Arc<PeerPins>>,
    pub(crate) words: &'a [u8],
}

/// The reply to a query, and the descriptors that go with it.
#[derive(Default)]
pub(crate) struct QueryReply {
    pub(crate) reply: Vec<u8>,
    pub(crate) files: Vec<OwnedFd>,
    /// At the owner: from now on the peer reaches the region by itself.
    pub(crate) loan: Option<Arc<dyn Loan>>,
}

/// At the owner: who answers for the paths to its regions, each of which has a number. The transports do.
pub(crate) trait OwnerPaths: Send + Sync {
    /// The paths that a holder of that ticket should ask about, a bit for each. Called with every grant, so it is quick.
    fn offers(&self, ticketed: &Ticketed<'_>) -> u8;

    /// Takes a word that asks for nothing and gives nothing; false where it is a query. Quick.
    fn take_hint(&self, path: u8, words: &[u8]) -> Result<bool>;

    /// Answers what a peer asks before it takes that path ([`GrantHandle::query`]). Runs on a worker, and may block.
    fn answer_query(&self, path: u8, query: &Query<'_>) -> Result<QueryReply>;
}

/// At the owner: a region that a peer reaches by itself.
pub(crate) trait Loan: Send + Sync {
    /// Whether the peer pins the region while something is in flight. Where it does not, taking the region back asks it to let
    /// go, and waits for that.
    fn pinned(&self) -> bool;

    /// The session has ended before the peer had let go: calls back once the peer reaches the memory no more.
    fn orphaned(&self, back: Box<dyn FnOnce() + Send>);
}

/// At the peer: who reaches a region by itself.
pub(crate) trait Borrowing: Send + Sync {
    /// The owner wants it back: nothing new begins, and the owner is notified once nothing is in flight. On the event loop.
    fn recalled(self: Arc<Self>);

    /// Whether nothing is in flight.
    fn is_idle(&self) -> bool;

    /// Whether nothing is in flight and nothing begins any more. Changes nothing.
    fn has_let_go(&self) -> bool;
}

impl Session {
    /// Sends the owner a query about a path to one of its grants, and waits for the reply.
    pub(super) fn query(&self, query: wire::Query, until: Instant) -> Result<QueryReply> {
        runtime::may_block("import")?;
        let (asker, replied) = mpsc::sync_channel(1);
        let reply = self.ask(Asks::Query, Waiter::Query(asker), query).and_then(|request| {
            let received = replied.recv_timeout(until.saturating_duration_since(Instant::now()));
            received.unwrap_or_else(|_| {
                self.give_up(request);
                let message = "the owner did not reply in time to a query about a path";
                Err(Error::new(Kind::Timeout, "import", message))
            })
        });
        reply.map_err(|error| error.with_peer(self.peer_name()))
    }

    /// Remembers whom to notify when the owner wants that grant back.
    pub(super) fn borrows(&self, grant: &GrantHandle, borrowing: Weak<dyn Borrowing>) {
        let late = {
            let mut all = self.borrowing.lock();
            all.retain(|_, one| one.is_wanted());
            let borrowed = all.entry(grant.handle).or_default();
            borrowed.by.push((std::ptr::from_ref(grant).addr(), Weak::clone(&borrowing)));
            borrowed.recalled
        };
        // The owner has asked for it already, and asks once.
        if let Some(borrowing) = borrowing.upgrade().filter(|_| late) {
            borrowing.recalled();
        }
    }

    /// The owner wants that grant back.
    pub(in crate::session) fn recall(&self, handle: u32) {
        let by: Vec<_> = match self.borrowing.lock().get_mut(&handle) {
            Some(borrowed) => {
                borrowed.recalled = true;
                borrowed.living().collect()
            }
            None => Vec::new(),
        };
        by.into_iter().for_each(Borrowing::recalled);
    }

    /// Whether nobody else has something in flight, or may begin something, by the same grant.
    pub(in crate::session) fn others_have_let_go(&self, grant: &GrantHandle) -> bool {
        let me = std::ptr::from_ref(grant).addr();
        let others: Vec<_> = match self.borrowing.lock().get(&grant.handle) {
            Some(borrowed) => borrowed.by.iter().filter(|(who, _)| *who != me).cloned().collect(),
            None => Vec::new(),
        };
        others.iter().filter_map(|(_, one)| one.upgrade()).all(|one| one.has_let_go())
    }

    /// Whether nothing is in flight on a path that reaches the owner's memory by itself.
    pub(super) fn borrows_nothing(&self) -> bool {
        let all: Vec<_> = self.borrowing.lock().values().flat_map(Borrowed::living).collect();
        all.iter().all(|one| one.is_idle())
    }
}

/// The imports that reach the memory of one grant by themselves: each by the address of its handle. All imports of the same ticket have one grant.
#[derive(Default)]
pub(super) struct Borrowed {
    by: Vec<(usize, Weak<dyn Borrowing>)>,
    recalled: bool,
}

impl Borrowed {
    pub(super) fn living(&self) -> impl Iterator<Item = Arc<dyn Borrowing>> {
        self.by.iter().filter_map(|(_, one)| one.upgrade())
    }

    fn is_wanted(&mut self) -> bool {
        self.by.retain(|(_, one)| one.strong_count() > 0);
        !self.by.is_empty()
    }
}
