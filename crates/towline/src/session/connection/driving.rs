//! The event loop at a control connection. Workers at a lane: one at a time, called when there is something to do, and leaving when nothing comes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Connection, MOST_UNSENT, Next, Role};
use crate::Result;
use crate::runtime::{self, Pool, Readiness, Source};

/// How long a worker waits for the other side itself before it leaves the lane to the event loop: a few times as long as
/// the other side needs to empty or fill a socket's buffer. In slices, between which it looks for other work.
const LINGER: Duration = Duration::from_micros(50);
const LINGERS: u32 = 8;

/// Something that must be done before more is read from a lane; it is when this is dropped.
pub(in crate::session) struct HeldUp(Arc<Connection>);

impl Drop for HeldUp {
    fn drop(&mut self) {
        if self.0.held_up.fetch_sub(1, Ordering::SeqCst) == 1 && !self.0.is_closed() {
            self.0.drive_soon();
        }
    }
}

impl Connection {
    /// Reads nothing more from this lane until what is given is dropped. Called by the thread that reads.
    pub(in crate::session) fn hold_up(self: &Arc<Self>) -> HeldUp {
        self.held_up.fetch_add(1, Ordering::SeqCst);
        HeldUp(Arc::clone(self))
    }

    pub(super) fn is_held_up(&self) -> bool {
        self.held_up.load(Ordering::SeqCst) > 0
    }

    /// Whether frames are there that nobody looks at, though nothing holds them up any more.
    pub(super) fn may_go_on(&self) -> bool {
        !self.is_held_up() && self.incoming.lock().left_over
    }

    pub(super) fn drive_soon(&self) {
        if self.driven.swap(true, Ordering::SeqCst) {
            return;
        }
        let Some(me) = self.me.upgrade() else { return };
        let last = Some(self.driver.load(Ordering::Relaxed));
        if let Err(refused) = runtime::pool().spawn_near(last, Box::new(move || me.drive())) {
            self.close(refused.error);
        }
    }

    /// A worker's turn at a lane.
    fn drive(self: Arc<Self>) {
        self.driver.store(Pool::number().unwrap_or(usize::MAX), Ordering::Relaxed);
        loop {
            if let Err(error) = self.pump(true) {
                self.close(error);
                return;
            }
            if self.is_closed() {
                return;
            }
            match self.linger() {
                Ok(true) => continue,
                Ok(false) => {}
                Err(error) => {
                    self.close(error);
                    return;
                }
            }
            self.driven.store(false, Ordering::SeqCst);
            // Another thread may have queued a frame, or ended what held it up, after the pump and before the flag was down.
            if (!self.queue().is_idle() || self.may_go_on()) && !self.driven.swap(true, Ordering::AcqRel) {
                continue;
            }
            self.arm(&mut self.queue());
            return;
        }
    }

    /// Waits a moment for the other side: while it is busy with our bytes that is cheaper than to go round the event
    /// loop. Not while other work waits for a thread. True: there is something to do here.
    fn linger(self: &Arc<Self>) -> Result<bool> {
        if self.is_held_up() {
            return Ok(false);
        }
        if self.send_patiently()? {
            return Ok(true);
        }
        match self.next() {
            Next::Nothing => return Ok(false),
            // In one piece: each time that a worker wakes up it takes a processor from another thread, such as a caller that posts the
            // next transfer. Nobody but the other side has anything for this lane.
            Next::Request if self.has_sent_all() => {
                let waited = runtime::pool().aside(|| self.socket.wait_readable(LINGER * LINGERS));
                return Ok(waited.transpose()?.unwrap_or(false));
            }
            Next::Request | Next::More => {}
        }
        for _ in 0..LINGERS {
            let (readable, blocked) = {
                let outgoing = self.queue();
                if !outgoing.is_idle() {
                    return Ok(true);
                }
                (outgoing.weight() <= MOST_UNSENT, outgoing.blocked())
            };
            if runtime::pool().busy_or_queued() {
                return Ok(false);
            }
            if self.socket.wait(readable, blocked, LINGER)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl Source for Connection {
    fn ready(self: Arc<Self>, _readiness: Readiness) {
        if self.role() == Role::Lane {
            self.drive_soon();
            return;
        }
        let stuck = match self.pump(false) {
            Ok(stuck) => stuck,
            Err(error) => return self.close(error),
        };
        if self.role() == Role::Lane {
            // It became one just now.
            self.driven.store(false, Ordering::SeqCst);
            if !self.queue().is_idle() || self.may_go_on() {
                self.drive_soon();
            }
        }
        // The thread that has the frames may not know what this thread could not send. All else that is left to watch for is watched
        // for already, or the thread with the frames watches for it.
        let outgoing = if stuck { Some(self.queue()) } else { self.queue_if_free() };
        if let Some(mut outgoing) = outgoing {
            self.arm(&mut outgoing);
        }
    }
}
