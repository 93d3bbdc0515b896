//! Writes that have ended while their owner was in the middle of them: stopped there, most likely. They are quiet when it has left.
//!
//! Nothing wakes a waiter for that: the owner does not know of it. So the slot is looked at from time to time, by a timer, and
//! only while there is such a write.

use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::fence::applying::ApplySlotView;
use crate::fence::life::has_exited;
use crate::runtime::{self, Timer};
use crate::transfer::TransferCore;

/// The first look comes after this time, and each further one after twice the time of that before, up to the last.
const FIRST: Duration = Duration::from_millis(1);
const LAST: Duration = Duration::from_millis(100);

struct One {
    transfer: Weak<TransferCore>,
    slot: ApplySlotView,
    /// The owner's process; what it was in the middle of is over when it has exited.
    process: Option<OwnedFd>,
}

impl One {
    fn is_over(&self) -> bool {
        !self.slot.is_applying() || self.process.as_ref().is_some_and(has_exited)
    }
}

#[derive(Default)]
struct Listener(Mutex<Listening>);

#[derive(Default)]
struct Listening {
    all: Vec<One>,
    pause: Duration,
    armed: bool,
}

/// Marks a request of that transfer as one that the owner is in the middle of, until it has left that slot or exited.
pub(super) fn listen(transfer: &Arc<TransferCore>, slot: ApplySlotView, process: Option<OwnedFd>) {
    static LISTENER: OnceLock<Arc<Listener>> = OnceLock::new();
    transfer.add_outstanding();
    let listener = LISTENER.get_or_init(Arc::default);
    let mut listening = listener.0.lock();
    listening.all.push(One { transfer: Arc::downgrade(transfer), slot, process });
    listening.pause = FIRST;
    listener.arm(&mut listening);
}

impl Listener {
    fn arm(self: &Arc<Self>, listening: &mut Listening) {
        if listening.armed || listening.all.is_empty() {
            return;
        }
        listening.armed = runtime::call_at(Instant::now() + listening.pause, self, 0).is_some();
    }
}

impl Timer for Listener {
    fn fired(self: Arc<Self>, _key: u64) {
        let over: Vec<One> = {
            let mut listening = self.0.lock();
            listening.armed = false;
            listening.pause = (listening.pause * 2).min(LAST);
            let over = listening
                .all
                .extract_if(.., |one| one.transfer.strong_count() == 0 || one.is_over())
                .collect();
            self.arm(&mut listening);
            over
        };
        for transfer in over.iter().filter_map(|one| one.transfer.upgrade()) {
            transfer.remove_outstanding();
        }
    }
}
