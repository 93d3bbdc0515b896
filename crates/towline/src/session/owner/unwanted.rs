//! What a peer does not want any more: answers that have not been sent, and lanes of which it has to know that they are over.

use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use towline_proto::session::allowance::exhausted;

use super::Serving;
use super::beating::ENDING;
use crate::runtime::{self, Timer};
use crate::session::connection::Connection;
use crate::sync::lock;
use crate::{Error, Kind, Result};

/// A lane on which somebody is at work is looked at again after this time, and then after twice the time of that before, up to the last.
const FIRST: Duration = Duration::from_millis(1);
const LAST: Duration = Duration::from_millis(100);

/// More than these do not wait for one peer.
const MOST_ENDING: usize = 64;

/// The lanes of one peer that end.
#[derive(Default)]
pub(super) struct EndingLanes(Mutex<Ending>);

#[derive(Default)]
struct Ending {
    /// Lanes that were closed, as long as some thread has them.
    left: Vec<Weak<Connection>>,
    /// Those that somebody is at work on, and the requests that wait for that.
    asked: Vec<(Arc<Connection>, u64)>,
    pause: Duration,
    armed: bool,
}

impl EndingLanes {
    /// A lane was closed. Before it is forgotten elsewhere.
    pub(super) fn left(&self, lane: &Arc<Connection>) {
        let mut ending = lock(&self.0);
        ending.left.retain(|one| one.strong_count() > 0);
        ending.left.push(Arc::downgrade(lane));
    }

    fn find(&self, name: &[u8; 32]) -> Option<Arc<Connection>> {
        let ending = lock(&self.0);
        ending.left.iter().filter_map(Weak::upgrade).find(|lane| lane.name() == Some(name))
    }

    /// Lets go of everything.
    pub(super) fn clear(&self) {
        let ending = std::mem::take(&mut *lock(&self.0));
        drop(ending);
    }
}

impl Serving {
    /// Takes the answer to a request over that connection back where nothing of it has been sent. Keeps nothing in mind: a request that is
    /// not there has been answered.
    pub(super) fn withdraw(&self, connection: &Arc<Connection>, request: u64) -> Result<()> {
        if !self.files.withdraw(connection, request) && !connection.withdraw_answer(request) {
            return Ok(());
        }
        let unwanted = Error::new(Kind::Canceled, "read", "the peer does not want it any more");
        self.answer_read(connection, request, Err(unwanted))
    }

    /// Ends a lane, and says so when nothing more that came over it will be applied. One that is not there is over.
    pub(super) fn end_lane(
        self: &Arc<Self>,
        connection: &Connection,
        request: u64,
        name: &[u8; 32],
    ) -> Result<()> {
        // In this order: a lane is in the second before it goes from the first.
        let open = lock(&self.connections).iter().find(|lane| lane.name() == Some(name)).cloned();
        let Some(lane) = open.or_else(|| self.ending.find(name)) else {
            return self.answer(connection, request, Ok(0));
        };
        lane.end_applying();
        if !lane.is_applying() {
            return self.answer(connection, request, Ok(0));
        }
        let mut ending = lock(&self.ending.0);
        if ending.asked.len() >= MOST_ENDING {
            drop(ending);
            let message = format!("{MOST_ENDING} lanes that end");
            return self.answer(connection, request, Err(exhausted("end lane", message, "at a time")));
        }
        ending.asked.push((lane, request));
        ending.pause = FIRST;
        self.look_again(&mut ending);
        Ok(())
    }

    fn look_again(self: &Arc<Self>, ending: &mut Ending) {
        if !ending.armed
            && !ending.asked.is_empty()
            && let Ok(reactor) = runtime::reactor()
        {
            let weak = Arc::downgrade(self);
            let timer: Weak<dyn Timer> = weak;
            reactor.at(Instant::now() + ending.pause, timer, ENDING);
            ending.armed = true;
        }
    }

    pub(super) fn look_at_ending_lanes(self: &Arc<Self>) {
        let over: Vec<_> = {
            let mut ending = lock(&self.ending.0);
            ending.armed = false;
            ending.pause = (ending.pause * 2).min(LAST);
            let over = ending.asked.extract_if(.., |(lane, _)| !lane.is_applying()).collect();
            self.look_again(&mut ending);
            over
        };
        let Some(control) = self.control() else { return };
        for (_, request) in over {
            // Where it cannot be said, the session is over.
            let _ = self.answer(&control, request, Ok(0));
        }
    }
}
