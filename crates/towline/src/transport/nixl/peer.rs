//! What this endpoint's agent knows of another endpoint's.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use towline_sys::nixl::Request;

use super::attachment::NixlAttachment;
use super::engine::Engine;
use super::words::Answer;
use crate::identity::Incarnation;
use crate::sync::lock;
use crate::{Error, Kind, Result};

/// An owner that is driving its agent is not asked again for this long.
const ASK_AGAIN: Duration = Duration::from_millis(2);

/// How long a new contact waits for what NIXL still does with what it knew before.
const OLD_REQUESTS: Duration = Duration::from_millis(500);

/// Another endpoint's agent, whose metadata is loaded here. Forgotten when nothing needs it any more.
pub(super) struct PeerAgent {
    engine: Arc<Engine>,
    pub(super) name: String,
    incarnation: Incarnation,
    /// Regions whose metadata is loaded. NIXL forgets them with the peer, and not before.
    regions: Mutex<HashSet<u64>>,
    attachments: Mutex<Vec<Weak<NixlAttachment>>>,
    /// Requests and prepared lists that lead to what is loaded.
    pub(super) requests: AtomicUsize,
    /// NIXL has lost the connection: what is loaded is of no use any more.
    broken: AtomicBool,
    forgotten: AtomicBool,
    /// When the owner was last asked to do its part, in microseconds of the engine's life; 0 for never.
    asked: AtomicU64,
    /// Whether it had to be asked of late.
    pub(super) slow: AtomicBool,
}

impl PeerAgent {
    /// Loads what an owner has told about one of its regions.
    pub(super) fn load(
        engine: &Arc<Engine>,
        incarnation: Incarnation,
        answer: &Answer,
    ) -> Result<Arc<PeerAgent>> {
        // Under the lock: forgetting the old and loading the new must not change places.
        let mut peers = lock(&engine.peers);
        let known = peers.get(&incarnation).and_then(Weak::upgrade);
        let peer = match known {
            Some(peer) if !peer.broken.load(Ordering::Acquire) => peer,
            old => {
                if let Some(old) = old
                    && let Err(error) = old.forget()
                {
                    // Its drop takes the lock.
                    drop(peers);
                    return Err(error);
                }
                let name = engine.agent.load_metadata(&answer.connection)?;
                let peer = Arc::new(PeerAgent {
                    engine: Arc::clone(engine),
                    name,
                    incarnation,
                    regions: Mutex::default(),
                    attachments: Mutex::default(),
                    requests: AtomicUsize::new(0),
                    broken: AtomicBool::new(false),
                    forgotten: AtomicBool::new(false),
                    asked: AtomicU64::new(0),
                    slow: AtomicBool::new(false),
                });
                peers.retain(|_, peer| peer.strong_count() > 0);
                peers.insert(incarnation, Arc::downgrade(&peer));
                peer
            }
        };
        drop(peers);
        let mut regions = lock(&peer.regions);
        if !regions.contains(&answer.device) {
            if engine.agent.load_metadata(&answer.region)? != peer.name {
                return Err(Error::protocol("import", "the owner's metadata is of two agents"));
            }
            regions.insert(answer.device);
        }
        drop(regions);
        Ok(peer)
    }

    pub(super) fn attached(&self, attachment: &Arc<NixlAttachment>) {
        let mut attachments = lock(&self.attachments);
        attachments.retain(|one| one.strong_count() > 0);
        attachments.push(Arc::downgrade(attachment));
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
        self.broken.store(true, Ordering::Release);
    }

    /// Makes NIXL forget what it was told. What leads to it must be gone by then.
    fn forget(&self) -> Result<()> {
        let until = Instant::now() + OLD_REQUESTS;
        loop {
            let attachments: Vec<_> = lock(&self.attachments).iter().filter_map(Weak::upgrade).collect();
            attachments.iter().for_each(|one| one.forget_prepared());
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
        if !self.forgotten.swap(true, Ordering::AcqRel) {
            self.engine.agent.forget(&self.name)?;
        }
        Ok(())
    }

    /// Whether the owner should be asked to do its part now.
    pub(super) fn ask_now(&self) -> bool {
        let now = self.engine.opened.elapsed().as_micros() as u64 + 1;
        let last = self.asked.load(Ordering::Relaxed);
        (last == 0 || now.saturating_sub(last) >= ASK_AGAIN.as_micros() as u64)
            && self.asked.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

impl Drop for PeerAgent {
    fn drop(&mut self) {
        if crate::fork::in_child() || self.forgotten.load(Ordering::Acquire) {
            return;
        }
        let mut peers = lock(&self.engine.peers);
        // Another one of the same name may have been loaded since: that one is not to be forgotten.
        let mine = peers.get(&self.incarnation).is_some_and(|peer| std::ptr::eq(peer.as_ptr(), self));
        if mine {
            peers.remove(&self.incarnation);
            if let Err(error) = self.engine.agent.forget(&self.name) {
                tracing::debug!(%error, "NIXL did not forget a peer");
            }
        }
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
