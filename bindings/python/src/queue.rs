//! Numbers of what has ended, and an eventfd that says that there are some.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use towline::Error;

pub(crate) fn event() -> Result<OwnedFd, Error> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|error| Error::os("wait", "eventfd", error))
}

pub(crate) fn signal(event: &OwnedFd) {
    // Fails only when the counter is full, and then the descriptor is readable anyway.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

pub(crate) fn clear(event: &OwnedFd) {
    let mut count = [0; 8];
    let _ = rustix::io::read(event, &mut count);
}

/// What has ended and was not taken yet.
pub(crate) struct Queue {
    event: OwnedFd,
    ended: Mutex<Vec<u64>>,
}

impl Queue {
    pub(crate) fn new() -> Result<Queue, Error> {
        Ok(Queue { event: event()?, ended: Mutex::default() })
    }

    /// The descriptor that is readable while something waits to be taken.
    pub(crate) fn fileno(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    pub(crate) fn push(&self, id: u64) {
        let first = {
            let mut ended = self.ended.lock();
            ended.push(id);
            ended.len() == 1
        };
        if first {
            self.ring();
        }
    }

    /// Makes the descriptor readable.
    pub(crate) fn ring(&self) {
        signal(&self.event);
    }

    pub(crate) fn take(&self) -> Vec<u64> {
        // In this order: what is queued after the clearing either is taken below or signals again.
        clear(&self.event);
        std::mem::take(&mut *self.ended.lock())
    }
}
