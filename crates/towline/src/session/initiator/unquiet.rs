//! Changes of which this side does not know whether the owner still makes them: their bytes may be on their way, or with the owner, after
//! the connection was given up here. The owner's word ends that.
//!
//! Of a lane it is the answer to EndLane, over the control connection: nothing more that came over the lane will be applied. Of the
//! control connection itself it is the answer to the request. A transfer whose owner says nothing in time ends without being quiet.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Pending, SETTLE_TIMER, Session};
use crate::session::connection::Connection;
use crate::session::run::Run;
use crate::sync::lock;
use crate::transfer::TransferCore;
use crate::wire::{self, Message};
use crate::{Error, Kind};

/// How long a transfer waits for the owner's word that a lane is over before it ends without it.
const WORD: Duration = Duration::from_millis(400);

/// So many changes of one owner are kept in mind that have ended without its word. One more ends the session.
const MOST_LATE: usize = 1024;

/// A lane that was given up, and what may still be applied of it.
pub(in crate::session) struct EndingLane {
    /// Requests that have not reported.
    lost: Vec<(Arc<Run>, usize)>,
    /// Transfers that have ended without the owner's word.
    late: Vec<Arc<TransferCore>>,
    error: Error,
    until: Instant,
}

impl EndingLane {
    /// How long its requests wait; none where they do not any more.
    pub(super) fn until(&self) -> Option<Instant> {
        (!self.lost.is_empty()).then_some(self.until)
    }

    /// Its transfers are not quiet, and end all the same.
    fn give_up(&mut self) -> Vec<(Arc<Run>, usize)> {
        let lost = std::mem::take(&mut self.lost);
        for (run, _) in &lost {
            run.transfer.unfinished_afar();
            self.late.push(Arc::clone(&run.transfer));
        }
        lost
    }
}

impl Session {
    /// Asks the owner to end a lane that was lost; these requests wait for its word.
    pub(super) fn end_lane(&self, lane: &Connection, lost: Vec<(Arc<Run>, usize)>, error: &Error) {
        let until = Instant::now() + WORD;
        let ending = EndingLane { lost, late: Vec::new(), error: error.clone(), until };
        let request = self.remember(Pending::Ending(ending));
        let asked = lane.name().is_some_and(|lane| {
            let frame = Message::from(wire::EndLane { lane: *lane }).frame(request, 0, 0);
            self.ask(frame).is_ok()
        });
        if asked {
            self.wake_at(until, SETTLE_TIMER);
        } else {
            self.ends_without_a_word(request);
        }
    }

    /// Nothing more of a lane will be applied, or nobody will say so.
    pub(super) fn lane_ended(&self, mut lane: EndingLane, surely: bool) {
        let lost = if surely { std::mem::take(&mut lane.lost) } else { lane.give_up() };
        for (run, unit) in lost {
            run.lost(unit, lane.error.clone(), false);
        }
        for transfer in lane.late {
            if surely {
                transfer.finished_afar();
            } else if self.alive().is_ok() {
                // The end of the session will say it.
                self.remember(Pending::Late(transfer));
            }
        }
    }

    /// The owner may still make a change of that transfer, and nobody will say when it has. Before its request reports.
    pub(super) fn late(&self, transfer: &Arc<TransferCore>) {
        transfer.unfinished_afar();
        self.remember(Pending::Late(Arc::clone(transfer)));
    }

    /// A request ends whose owner has not said in time what became of it. Its transfer is not quiet until that comes.
    pub(super) fn ends_without_a_word(&self, request: u64) {
        let mut pending = lock(&self.pending);
        let (ended, error) = match pending.get_mut(&request) {
            Some(Pending::Ending(lane)) => (lane.give_up(), lane.error.clone()),
            Some(one) if let Some(transfer) = one.changing().cloned() => {
                transfer.unfinished_afar();
                let error = transfer.stop_error();
                match std::mem::replace(one, Pending::Late(Arc::clone(&transfer))) {
                    Pending::Unit { run, unit, .. } => (vec![(run, unit)], error),
                    _ => {
                        drop(pending);
                        transfer.unit_failed(0, error);
                        return self.bound_late();
                    }
                }
            }
            _ => return,
        };
        drop(pending);
        for (run, unit) in ended {
            run.lost(unit, error.clone(), false);
        }
        self.bound_late();
    }

    /// Keeps something in mind, also where the session has just ended: then what ends it has not seen this.
    fn remember(&self, one: Pending) -> u64 {
        let request = self.next_request();
        lock(&self.pending).insert(request, one);
        if self.alive().is_err() {
            let late = lock(&self.pending).remove(&request);
            match (late, self.is_surely_over()) {
                (Some(Pending::Ending(lane)), surely) => self.lane_ended(lane, surely),
                (Some(Pending::Late(transfer)), true) => transfer.finished_afar(),
                _ => {}
            }
        }
        self.beat();
        request
    }

    fn bound_late(&self) {
        let is_late = |one: &&Pending| matches!(one, Pending::Late(_) | Pending::Ending(_));
        let late = lock(&self.pending).values().filter(is_late).count();
        if late > MOST_LATE
            && let Some(control) = self.control.get()
        {
            let message = format!("the owner has not said what became of {late} changes that were stopped");
            control.reset(Error::new(Kind::Disconnected, "session", message));
        }
    }
}
