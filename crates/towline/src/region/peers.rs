//! The pins that peers on this host hold, and when they count no more.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::process::PeerProcess;
use super::{RegionCore, Registry};
use crate::budget::Charge;
use crate::fence::life::{LifeView, SlotState};
use crate::fence::pins::{Holder, PinPage};
use crate::runtime;

/// The pins of one peer process on this endpoint's regions.
pub(crate) struct PeerPins {
    pub(crate) page: Arc<PinPage>,
    pub(crate) peer: String,
    /// The peer's process, opened when it made contact: its number may be another's by the time its pins are looked at.
    process: Arc<PeerProcess>,
    /// The peer's life page: shows which of its threads have died.
    life: OnceLock<LifeView>,
    /// The connection has ended. The peer may not know yet, so its pins still count.
    ended: AtomicBool,
    /// The peer has exited, or has said that it holds no pin: none counts any more.
    gone: AtomicBool,
    /// The regions that look at them.
    regions: Mutex<Vec<Weak<RegionCore>>>,
    registry: Weak<Registry>,
    /// What the page and all that comes with it take.
    _charge: Charge,
    me: Weak<PeerPins>,
}

impl PeerPins {
    pub(crate) fn new(
        page: Arc<PinPage>,
        peer: &str,
        process: Arc<PeerProcess>,
        (registry, charge): (&Arc<Registry>, Charge),
    ) -> Arc<PeerPins> {
        Arc::new_cyclic(|me| PeerPins {
            page,
            peer: peer.to_owned(),
            process,
            life: OnceLock::new(),
            ended: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            regions: Mutex::default(),
            registry: Arc::downgrade(registry),
            _charge: charge,
            me: me.clone(),
        })
    }

    /// The peer has shown which of its threads live.
    pub(crate) fn lives(&self, life: LifeView) {
        let _ = self.life.set(life);
    }

    /// The connection has ended. They are looked at until the process has exited, unless it has said goodbye.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
        if !self.gone.load(Ordering::Acquire) && !self.regions.lock().is_empty() {
            self.process.notify(self.me.clone());
        }
    }

    /// None of its pins counts any more: no region looks at them, and the page goes.
    pub(crate) fn let_go(&self) {
        self.gone.store(true, Ordering::Release);
        let regions = std::mem::take(&mut *self.regions.lock());
        let (me, registry) = (self.me.upgrade(), self.registry.clone());
        if let Some(me) = me.filter(|_| !regions.is_empty()) {
            // Not here, which may be the event loop: unmapping takes a while, and a region may go with its last holder.
            let _ = runtime::pool().spawn(Box::new(move || {
                for region in regions.iter().filter_map(Weak::upgrade) {
                    region.dismiss(&me);
                }
                drop(me);
                if let Some(registry) = registry.upgrade() {
                    registry.let_go();
                }
            }));
        }
    }

    /// A region looks at these pins from now on.
    pub(super) fn looked_at_by(&self, region: &Arc<RegionCore>) {
        {
            let mut regions = self.regions.lock();
            // Only where it would grow: a peer may import a hundred thousand regions.
            if regions.len() == regions.capacity() {
                regions.retain(|known| known.strong_count() > 0);
            }
            regions.push(Arc::downgrade(region));
        }
        // An import that is answered while the connection ends.
        if self.ended.load(Ordering::Acquire) {
            self.process.notify(self.me.clone());
        }
    }

    /// Whether none of its pins counts any more. Asks the kernel only about peers whose connection has ended.
    pub(super) fn is_gone(&self) -> bool {
        if !self.gone.load(Ordering::Acquire)
            && self.ended.load(Ordering::Acquire)
            && self.process.has_exited()
        {
            self.let_go();
        }
        self.gone.load(Ordering::Acquire)
    }

    /// Whether some copy of the peer may still be inside that generation's memory.
    pub(super) fn holds(&self, generation: u64) -> bool {
        if self.is_gone() {
            return false;
        }
        let held = self.page.holders(generation).into_iter().any(|holder| {
            let ended = match holder {
                // A slot that is free, too: its thread has ended in good order and left the pin behind. The region is revoked, so who
                // takes the slot next cannot have pinned it.
                Holder::Thread(slot) => {
                    self.life.get().is_some_and(|life| life.slot_state(slot) != SlotState::Held)
                }
                Holder::Process(_) => false,
            };
            if ended {
                self.page.reclaim(holder, generation);
            }
            !ended
        });
        if held {
            // It blocks: the waiter looks again when it has exited.
            self.process.notify(self.me.clone());
        }
        held
    }
}
