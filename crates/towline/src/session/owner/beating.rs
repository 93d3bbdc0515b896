//! Whether a peer that holds a claim is still there.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::Serving;
use crate::runtime::{self, Timer};
use crate::session::parts::{Keep, Payload};
use crate::wire::{self, Message};
use crate::{Error, Kind};

/// While a peer holds a claim, it is asked this often whether it is there.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// The moments that it waits for: when to beat, when to tell of segments that are gone, and when to look at lanes that are to end.
const BEAT: u64 = 0;
pub(super) const GONE: u64 = 1;
pub(super) const ENDING: u64 = 2;

impl Serving {
    /// Asks the peer from time to time whether it is there, while it holds a claim. Between hosts TCP notices by these frames
    /// that it is gone; a peer that is stopped, anywhere, does not answer them.
    pub(super) fn beat(self: &Arc<Self>) {
        if !self.beating.swap(true, Ordering::AcqRel)
            && let Ok(reactor) = runtime::reactor()
        {
            let weak = Arc::downgrade(self);
            let timer: Weak<dyn Timer> = weak;
            reactor.at(Instant::now() + HEARTBEAT, timer, BEAT);
        }
    }
}

impl Timer for Serving {
    fn fired(self: Arc<Self>, key: u64) {
        match key {
            GONE => return self.tell_gone(),
            ENDING => return self.look_at_ending_lanes(),
            _ => {}
        }
        self.beating.store(false, Ordering::Release);
        let Some(sessions) = self.sessions.upgrade() else { return };
        if self.closed.load(Ordering::Acquire) || !sessions.operations.any_claimed_by(self.claimer()) {
            self.unanswered.store(0, Ordering::Relaxed);
            return;
        }
        let silent = HEARTBEAT * self.unanswered.fetch_add(1, Ordering::Relaxed);
        if silent >= sessions.registry.no_progress() {
            // It may only be slow, and the session may live on: what it has claimed does not.
            let message = format!("its claimer has said nothing for {:.1} s", silent.as_secs_f64());
            sessions.operations.abandon(self.claimer(), &Error::new(Kind::Timeout, "serve", message));
            return;
        }
        if let Some(control) = self.control() {
            let ping = Message::from(wire::Ping {}).frame(0, 0, 0);
            let _ = control.send(ping, Vec::new(), Payload::None, Keep::Nothing);
            self.beat();
        }
    }
}
