//! What a peer does not want any more: answers that have not been sent, and lanes of which it has to know that they are over.

use std::sync::Arc;
use std::time::Instant;

use towline_proto::session::owner::LaneEnd;

use super::heartbeat::ENDING;
use super::{Over, Serving};
use crate::session::connection::Connection;
use crate::{Error, Result};

impl Serving {
    /// Takes the answer to a request over that connection back where nothing of it has been sent.
    pub(super) fn withdraw(&self, connection: &Arc<Connection>, request: u64, unwanted: Error) -> Result<()> {
        if !self.files.withdraw(connection, request) && !connection.withdraw_answer(request) {
            return Ok(());
        }
        self.answer_read(connection, request, Err(unwanted))
    }

    /// Ends a lane, and says so when nothing more that came over it will be applied.
    pub(super) fn end_lane(
        self: &Arc<Self>,
        connection: &Connection,
        request: u64,
        name: Over,
    ) -> Result<()> {
        // One that nobody has any more is over.
        let Ok(lane) = name.connection() else { return self.answer(connection, request, Ok(0)) };
        lane.end_applying();
        let end = self.rules().lane_ends(name, request, lane.is_applying(), Instant::now());
        match end {
            Ok(LaneEnd::Over) => self.answer(connection, request, Ok(0)),
            Ok(LaneEnd::Later(look)) => {
                self.at(look, ENDING);
                Ok(())
            }
            Err(error) => self.answer(connection, request, Err(error)),
        }
    }

    pub(super) fn look_at_ending_lanes(self: &Arc<Self>) {
        // Held until nobody has the rules any more: what goes with the last of a lane may end the session.
        let mut lanes = Vec::new();
        let is_applying = |lane: &Over| {
            let Some(lane) = lane.0.upgrade() else { return false };
            let applying = lane.is_applying();
            lanes.push(lane);
            applying
        };
        let (over, next) = self.rules().look_at_lanes(is_applying, Instant::now());
        drop(lanes);
        self.at(next, ENDING);
        let Some(control) = self.control() else { return };
        for request in over {
            // Where it cannot be said, the session is over.
            let _ = self.answer(&control, request, Ok(0));
        }
    }
}
