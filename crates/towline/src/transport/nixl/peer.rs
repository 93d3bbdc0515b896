//! What this endpoint's agent knows of another endpoint's.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use towline_sys::nixl::Request;

use super::attachment::NixlAttachment;
use super::engine::Engine;
use super::of_nixl;
use super::words::Answer;
use crate::identity::Incarnation;
use crate::session::Session;
use crate::{Error, Kind, Result};

/// An owner that is driving its agent is not asked again for this long.
const ASK_AGAIN: Duration = Duration::from_millis(2);

/// How long a new contact waits for what NIXL still does with what it knew before.
const OLD_REQUESTS: Duration = Duration::from_millis(500);

/// A peer to which nothing leads any more is forgotten once it has sent replies about this many regions: what NIXL knows of them goes
/// with the peer, and not before. Sooner, every import would connect anew.
const MOST_REGIONS: usize = 256;

/// How long the agent is driven after it was asked to forget a peer: connections close in their own time.
const CLOSING: Duration = Duration::from_millis(20);

/// Another endpoint's agent, whose metadata is loaded here.
pub(super) struct PeerAgent {
    engine: Weak<Engine>,
    pub(super) name: String,
    session: Weak<Session>,
    /// The metadata of regions that is loaded.
    regions: Mutex<HashSet<Vec<u8>>>,
    /// It is this endpoint's own agent, to which no connection leads.
    own: bool,
    attachments: Mutex<Vec<Weak<NixlAttachment>>>,
    /// How many attachments there are; changed under the lock of all peers.
    attached: AtomicUsize,
    /// Requests and prepared lists that lead to what is loaded.
    pub(super) requests: AtomicUsize,
    /// NIXL has lost the connection: what is loaded is of no use any more.
    broken: AtomicBool,
    /// When the owner was last asked to do its part, in microseconds of the engine's life; 0 for never.
    asked: AtomicU64,
    /// Whether it had to be asked of late.
    pub(super) slow: AtomicBool,
}

impl PeerAgent {
    /// Loads what an owner has replied about one of its regions. Paired with [`detach`](Self::detach).
    pub(super) fn load(
        engine: &Arc<Engine>,
        session: &Arc<Session>,
        answer: &Answer,
    ) -> Result<Arc<PeerAgent>> {
        // Dropped after the lock, which the drop of an attachment takes.
        let mut kept = Vec::new();
        // Under the lock: forgetting the old and loading the new must not change places.
        let mut peers = engine.peers.lock();
        let gone: Vec<Incarnation> = peers
            .iter()
            .filter(|(_, peer)| peer.is_done_with())
            .map(|(incarnation, _)| *incarnation)
            .collect();
        for incarnation in gone {
            if let Some(peer) = peers.remove(&incarnation) {
                peer.forget(engine, &mut kept)?;
            }
        }
        let incarnation = session.owner().incarnation;
        let peer = match peers.get(&incarnation) {
            Some(peer) if !peer.broken.load(Ordering::Acquire) => Arc::clone(peer),
            broken => {
                if let Some(broken) = broken {
                    broken.forget(engine, &mut kept)?;
                }
                let name = engine.agent.load_metadata(&answer.connection).map_err(of_nixl)?;
                let peer = Arc::new(PeerAgent::new(engine, session, name, false));
                peers.insert(incarnation, Arc::clone(&peer));
                peer
            }
        };
        let mut regions = peer.regions.lock();
        if !regions.contains(&answer.region) {
            if engine.agent.load_metadata(&answer.region).map_err(of_nixl)? != peer.name {
                return Err(Error::protocol("import", "the owner's metadata is of two agents"));
            }
            regions.insert(answer.region.clone());
        }
        drop(regions);
        peer.attached.fetch_add(1, Ordering::AcqRel);
        Ok(peer)
    }

    /// This endpoint's own agent as a peer: what it moves lies with it on both sides. Paired with [`detach`](Self::detach).
    pub(super) fn own(engine: &Arc<Engine>, session: &Arc<Session>) -> Arc<PeerAgent> {
        let peer = PeerAgent::new(engine, session, engine.agent.name().to_owned(), true);
        peer.attached.fetch_add(1, Ordering::AcqRel);
        Arc::new(peer)
    }

    fn new(engine: &Arc<Engine>, session: &Arc<Session>, name: String, own: bool) -> PeerAgent {
        PeerAgent {
            engine: Arc::downgrade(engine),
            name,
            session: Arc::downgrade(session),
            regions: Mutex::default(),
            own,
            attachments: Mutex::default(),
            attached: AtomicUsize::new(0),
            requests: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
            asked: AtomicU64::new(0),
            slow: AtomicBool::new(false),
        }
    }

    pub(super) fn is_own(&self) -> bool {
        self.own
    }

    pub(super) fn attached(&self, attachment: &Arc<NixlAttachment>) {
        let mut attachments = self.attachments.lock();
        attachments.retain(|one| one.strong_count() > 0);
        attachments.push(Arc::downgrade(attachment));
    }

    /// An attachment is gone, with all that it had prepared.
    pub(super) fn detach(&self, engine: &Arc<Engine>) {
        let mut kept = Vec::new();
        let mut peers = engine.peers.lock();
        let last = self.attached.fetch_sub(1, Ordering::AcqRel) == 1;
        let full = self.regions.lock().len() >= MOST_REGIONS;
        if !last || !(full || self.is_done_with()) {
            return;
        }
        // A broken one may have been replaced since, and was forgotten then.
        let mine = |peer: &Arc<PeerAgent>| std::ptr::eq(Arc::as_ptr(peer), self);
        let found = peers.iter().find(|(_, peer)| mine(peer)).map(|(incarnation, _)| *incarnation);
        if let Some(incarnation) = found {
            peers.remove(&incarnation);
            if let Err(error) = self.forget(engine, &mut kept) {
                tracing::debug!(%error, "NIXL did not forget a peer");
            }
        }
    }

    /// Whether nothing leads to it any more, and nothing will.
    fn is_done_with(&self) -> bool {
        let over = || self.session.upgrade().is_none_or(|session| session.alive().is_err());
        self.attached.load(Ordering::Acquire) == 0 && (self.broken.load(Ordering::Acquire) || over())
    }

    /// Whether it can still be used.
    pub(super) fn alive(&self) -> Result<()> {
        if self.broken.load(Ordering::Acquire) {
            let message = "NIXL has lost the connection to the owner's agent; import again to make another";
            return Err(Error::new(Kind::Disconnected, "transfer", message));
        }
        Ok(())
    }

    /// NIXL has lost the connection, which it does not make again by itself.
    pub(super) fn broke(&self) {
        // No connection leads to this agent itself: whatever failed was that request.
        self.broken.store(!self.own, Ordering::Release);
    }

    /// Makes NIXL forget what it was given, once nothing leads to it any more.
    fn forget(&self, engine: &Arc<Engine>, kept: &mut Vec<Arc<NixlAttachment>>) -> Result<()> {
        let until = Instant::now() + OLD_REQUESTS;
        loop {
            let attachments: Vec<_> = self.attachments.lock().iter().filter_map(Weak::upgrade).collect();
            attachments.iter().for_each(|one| one.forget_prepared());
            kept.extend(attachments);
            if self.requests.load(Ordering::Acquire) == 0 {
                break;
            }
            if Instant::now() >= until {
                let message = "NIXL is still at transfers over the connection that it has lost";
                return Err(Error::new(Kind::Disconnected, "import", message));
            }
            // The engine's thread is at them.
            std::thread::sleep(Duration::from_millis(1));
        }
        engine.agent.forget(&self.name).map_err(of_nixl)?;
        engine.help(CLOSING, None);
        Ok(())
    }

    /// Whether the owner should be asked to do its part now.
    pub(super) fn ask_now(&self) -> bool {
        let Some(engine) = self.engine.upgrade() else { return false };
        let now = engine.opened.elapsed().as_micros() as u64 + 1;
        let last = self.asked.load(Ordering::Relaxed);
        (last == 0 || now.saturating_sub(last) >= ASK_AGAIN.as_micros() as u64)
            && self.asked.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

/// A request of NIXL, counted at the peer that it is for.
pub(super) struct Asked {
    request: Option<Request>,
    peer: Arc<PeerAgent>,
}

impl Asked {
    pub(super) fn new(request: Request, peer: &Arc<PeerAgent>) -> Asked {
        peer.requests.fetch_add(1, Ordering::AcqRel);
        Asked { request: Some(request), peer: Arc::clone(peer) }
    }

    pub(super) fn request(&mut self) -> Option<&mut Request> {
        self.request.as_mut()
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        drop(self.request.take());
        self.peer.requests.fetch_sub(1, Ordering::AcqRel);
    }
}
