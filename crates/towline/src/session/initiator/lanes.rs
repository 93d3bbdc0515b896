//! The connections of a session that carry large requests: opened when they are first needed, closed when they are idle.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{IDLE_TIMER, Session, ToSession};
use crate::fence::applying::ApplySlotView;
use crate::runtime;
use crate::session::connection::{Connection, Role};
use crate::session::run::Run;
use crate::session::{Sessions, contact};
use crate::{Error, Kind, Result};

/// Lanes that carried nothing for this long are closed.
const LANES_IDLE: Duration = Duration::from_secs(10);

#[derive(Default)]
pub(super) struct Lanes {
    pub(super) open: Vec<Arc<Connection>>,
    last_used: Option<Instant>,
    timer: bool,
}

impl Session {
    /// The connections for large requests, opened where they are not. Blocks while it opens them, but nobody else:
    /// a thread that stops a transfer must get by.
    pub(in crate::session) fn lanes(self: &Arc<Self>) -> Result<Vec<Arc<Connection>>> {
        let _one_opens = self.opening.lock();
        let sessions =
            self.sessions.upgrade().ok_or_else(|| Error::invalid("transfer", "the endpoint is closed"))?;
        let mut open = self.open_lanes().unwrap_or_default();
        while open.len() < sessions.settings.lanes {
            self.alive()?;
            match self.open_lane(&sessions) {
                Ok(lane) => open.push(lane),
                // Fewer lanes than wanted are enough.
                // Where this side has ended the session, that is the reason, and not that the owner refuses now.
                Err(error) if open.is_empty() => return Err(self.alive().err().unwrap_or(error)),
                Err(_) => break,
            }
        }
        Ok(open)
    }

    fn open_lane(self: &Arc<Self>, sessions: &Sessions) -> Result<Arc<Connection>> {
        let until = runtime::later(Instant::now(), sessions.registry.no_progress());
        let contact = contact::with_session(sessions, self, until)?;
        let handler = Arc::new(ToSession(Arc::downgrade(self)));
        let lane = Connection::new(contact.socket, Role::Lane, true, handler);
        lane.call(contact.challenge);
        match (&self.local, contact.ready.local) {
            // On one host, the connection's slot in the page that both share.
            (Some(local), Some(slot)) => {
                if let Some(slot) = ApplySlotView::of(&local.pins, slot) {
                    lane.applied_at(slot);
                }
            }
            (None, Some(port)) => lane.is_seen_at(port),
            (_, None) => {}
        }
        self.rules.lock().opened(lane.opened());
        lane.watch().inspect_err(|error| lane.close(error.clone()))?;
        self.lanes.lock().open.push(Arc::clone(&lane));
        // The thread that fails the session closes the lanes that it finds after it has said that it is dead.
        self.alive().inspect_err(|error| lane.close(error.clone()))?;
        Ok(lane)
    }

    /// Remembers a transfer that waits for lanes, so that it ends with the session.
    pub(in crate::session) fn will_start(&self, run: &Arc<Run>) -> Result<()> {
        let mut starting = self.starting.lock();
        starting.retain(|run| run.strong_count() > 0);
        starting.push(Arc::downgrade(run));
        drop(starting);
        // The thread that ends the session takes what is starting after it has said that it is over.
        self.alive()
    }

    /// The lanes that are open now.
    pub(in crate::session) fn open_lanes(&self) -> Option<Vec<Arc<Connection>>> {
        let mut lanes = self.lanes.lock();
        lanes.open.retain(|lane| !lane.is_closed());
        lanes.last_used = Some(Instant::now());
        (!lanes.open.is_empty()).then(|| lanes.open.clone())
    }

    /// A transfer over the lanes has ended: they close if nothing follows for a while.
    pub(in crate::session) fn lanes_used(&self) {
        let mut lanes = self.lanes.lock();
        lanes.last_used = Some(Instant::now());
        if !std::mem::replace(&mut lanes.timer, true) {
            self.wake_at(Instant::now() + LANES_IDLE, IDLE_TIMER);
        }
    }

    /// Closes the lanes where nothing has gone over them for a while.
    pub(super) fn close_idle_lanes(&self) {
        let idle: Vec<_> = {
            let mut lanes = self.lanes.lock();
            lanes.timer = false;
            let busy = self.rules.lock().is_moving();
            let since = lanes.last_used.map_or(LANES_IDLE, |used| used.elapsed());
            if busy || since < LANES_IDLE {
                lanes.timer = true;
                self.wake_at(
                    Instant::now() + LANES_IDLE.saturating_sub(since).max(LANES_IDLE / 10),
                    IDLE_TIMER,
                );
                Vec::new()
            } else {
                std::mem::take(&mut lanes.open)
            }
        };
        for lane in idle {
            lane.close(Error::new(Kind::Canceled, "session", "an idle lane was closed"));
        }
    }
}
