//! Processes on chosen cores: a round trip depends on where the scheduler puts the two sides, more than on anything
//! that they do, so that figures can only be compared when the places are fixed.

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// This process on one core, until it is dropped.
pub(super) struct OwnCore {
    before: CpuSet,
    /// This process's core.
    pub(super) own: usize,
    /// Another one.
    pub(super) peer: usize,
}

impl OwnCore {
    /// Moves every thread of this process to one core. `None` where it may use only one.
    pub(super) fn take() -> Option<OwnCore> {
        let before = sched_getaffinity(None).ok()?;
        let mut allowed = (0..CpuSet::MAX_CPU).filter(|core| before.is_set(*core));
        let (own, peer) = (allowed.next()?, allowed.next()?);
        pin(own);
        Some(OwnCore { before, own, peer })
    }
}

impl Drop for OwnCore {
    fn drop(&mut self) {
        place(&self.before);
    }
}

fn pin(core: usize) {
    let mut set = CpuSet::new();
    set.set(core);
    place(&set);
}

/// Moves every thread; those that are started later follow the one that starts them.
fn place(set: &CpuSet) {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return };
    for thread in threads.flatten() {
        let number = thread.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        // A thread that has ended meanwhile needs no place.
        let _ = sched_setaffinity(number, set);
    }
}
