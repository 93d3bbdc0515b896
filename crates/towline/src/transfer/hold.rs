//! What keeps the local memory of a transfer in use.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::TransferCore;
use crate::fork;
use crate::runtime;

/// Held by whatever names the local memory of a transfer: a frame that is not sent, a payload that is coming in. While there is
/// one, the transfer does not end and its region stays in use, whatever the other side has said.
pub(crate) struct LocalHold(pub(super) Arc<TransferCore>);

impl TransferCore {
    /// Keeps the local memory in place, and the end of the transfer away. To be taken while a unit has not reported.
    pub(crate) fn hold(self: &Arc<Self>) -> LocalHold {
        self.holds.fetch_add(1, Ordering::AcqRel);
        LocalHold(Arc::clone(self))
    }

    /// Whether something still names the local memory.
    pub(super) fn is_held(&self) -> bool {
        self.holds.load(Ordering::Acquire) > 0
    }

    /// Whether the local memory was lent: pages of it may be gone.
    pub(crate) fn local_is_lent(&self) -> bool {
        self.parts.iter().filter_map(|part| part.local.as_ref()).any(|local| local.core().lent)
    }
}

impl LocalHold {
    pub(crate) fn transfer(&self) -> &Arc<TransferCore> {
        &self.0
    }
}

impl Clone for LocalHold {
    fn clone(&self) -> LocalHold {
        self.0.hold()
    }
}

impl Drop for LocalHold {
    fn drop(&mut self) {
        if self.0.holds.fetch_sub(1, Ordering::AcqRel) > 1 || fork::in_child() || !self.0.has_ended() {
            return;
        }
        // The thread that drops this may have a connection's queue in hand, which those that learn of the end may want.
        let core = Arc::clone(&self.0);
        if runtime::pool().spawn(Box::new(move || core.deliver())).is_err() {
            runtime::call_at(Instant::now(), &self.0, 0);
        }
    }
}
