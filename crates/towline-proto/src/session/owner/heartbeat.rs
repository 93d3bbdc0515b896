//! Whether a peer that holds a claim is still there.

use std::time::{Duration, Instant};

use super::{Grant, Owner};
use crate::{Error, Kind};

/// While a peer holds a claim, it is asked this often whether it is there.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// The heartbeat towards one peer.
#[derive(Default)]
pub(super) struct Heartbeat {
    beating: bool,
    /// Heartbeats since the last frame of the peer.
    unanswered: u32,
}

impl Heartbeat {
    pub(super) fn received(&mut self) {
        self.unanswered = 0;
    }
}

/// What to do when it is time for a heartbeat.
#[derive(Debug)]
pub enum Beat {
    /// Nothing, and none are needed any more.
    Ends,
    /// Ask the peer whether it is there, and [go on](Owner::beat).
    Ask,
    /// What the peer has claimed is given up. It may only be slow, and the session may live on.
    Abandon(Error),
}

impl<G: Grant, C: Clone + Eq> Owner<G, C> {
    /// Asks the peer from time to time whether it is there, while it holds a claim. Returns when to look next, where that is not known
    /// yet. Between hosts TCP notices by these frames that it is gone; a peer that is stopped, anywhere, does not answer them.
    pub fn beat(&mut self, now: Instant) -> Option<Instant> {
        (!std::mem::replace(&mut self.heartbeat.beating, true)).then(|| now + HEARTBEAT)
    }

    /// It is time for a heartbeat. A peer that holds a claim may be silent for `no_progress`.
    pub fn beats(&mut self, holds_a_claim: bool, no_progress: Duration) -> Beat {
        let over = self.over;
        let heartbeat = &mut self.heartbeat;
        heartbeat.beating = false;
        if over || !holds_a_claim {
            heartbeat.unanswered = 0;
            return Beat::Ends;
        }
        let silent = HEARTBEAT * heartbeat.unanswered;
        heartbeat.unanswered += 1;
        if silent < no_progress {
            return Beat::Ask;
        }
        let message = format!("its claimer has sent nothing for {:.1} s", silent.as_secs_f64());
        Beat::Abandon(Error::new(Kind::Timeout, "serve", message))
    }
}
