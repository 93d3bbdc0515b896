//! What this side does at a certain time: it asks a peer that holds a claim whether it is still there, and looks at what is to end.

use std::sync::{Arc, Weak};
use std::time::Instant;

use towline_proto::session::owner::Beat;

use super::Serving;
use crate::runtime::{self, Timer};
use crate::wire::{self, Message};

/// The moments that it waits for: when to beat, when to tell of segments that are gone, and when to look at lanes that are to end.
const BEAT: u64 = 0;
pub(super) const GONE: u64 = 1;
pub(super) const ENDING: u64 = 2;

impl Serving {
    /// Asks the peer from time to time whether it is there, while it holds a claim.
    pub(super) fn beat(self: &Arc<Self>) {
        let next = self.rules().beat(Instant::now());
        self.at(next, BEAT);
    }

    /// Waits for that moment, if there is one.
    pub(super) fn at(self: &Arc<Self>, moment: Option<Instant>, key: u64) {
        if let Some(moment) = moment
            && let Ok(reactor) = runtime::reactor()
        {
            let weak = Arc::downgrade(self);
            let timer: Weak<dyn Timer> = weak;
            reactor.at(moment, timer, key);
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
        let Some(sessions) = self.sessions.upgrade() else { return };
        let holds_a_claim = sessions.operations.any_claimed_by(self.claimer());
        let beat = self.rules().beats(holds_a_claim, sessions.registry.no_progress());
        match beat {
            Beat::Ends => {}
            Beat::Abandon(error) => {
                sessions.operations.abandon(self.claimer(), &error);
            }
            Beat::Ask => {
                if let Some(control) = self.control() {
                    let ping = Message::from(wire::Ping {}).frame(0, 0, 0);
                    let _ = control.say(ping);
                    self.beat();
                }
            }
        }
    }
}
