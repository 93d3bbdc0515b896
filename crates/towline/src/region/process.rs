//! Processes of peers on this host: each is known by one descriptor, however many sessions it has, and its exit is waited for once.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rustix::fs::{fstat, fstatfs};

use super::peers::PeerPins;
use crate::fence::life::has_exited;
use crate::runtime::{self, Interest, Readiness, Source, Token};

/// The file system of pidfds, from Linux 6.9 on; there a process has one inode in every process that opens it.
const PIDFS_MAGIC: u64 = 0x5049_4446;

/// Processes that some peer's pins are of.
static KNOWN: Mutex<Option<HashMap<Key, Weak<PeerProcess>>>> = Mutex::new(None);

/// What two descriptors of one process have in common.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Key {
    Inode(u64),
    /// Only of processes that have not exited: a number is then one process's.
    Number(i32),
}

/// A process that uses regions of this one directly.
pub(crate) struct PeerProcess {
    process: OwnedFd,
    watched: Mutex<Watched>,
}

#[derive(Default)]
struct Watched {
    token: Option<Token>,
    by: Vec<Weak<PeerPins>>,
}

impl PeerProcess {
    /// The process behind a pidfd; `pid` is its number, where it has one in this pid namespace.
    pub(crate) fn of(process: OwnedFd, pid: Option<i32>) -> Arc<PeerProcess> {
        let key = match fstatfs(&process) {
            Ok(system) if system.f_type as u64 == PIDFS_MAGIC => {
                fstat(&process).ok().map(|stat| Key::Inode(stat.st_ino))
            }
            _ => pid.map(Key::Number),
        };
        let made = || Arc::new(PeerProcess { process, watched: Mutex::default() });
        let Some(key) = key else { return made() };
        let mut known = KNOWN.lock();
        let known = known.get_or_insert_default();
        if let Some(same) = known.get(&key).and_then(Weak::upgrade).filter(|same| !same.has_exited()) {
            return same;
        }
        known.retain(|_, one| one.strong_count() > 0);
        let made = made();
        known.insert(key, Arc::downgrade(&made));
        made
    }

    pub(super) fn has_exited(&self) -> bool {
        has_exited(&self.process)
    }

    /// Notifies those pins when the process has exited.
    pub(super) fn notify(self: &Arc<Self>, pins: Weak<PeerPins>) {
        let mut watched = self.watched.lock();
        if watched.by.iter().any(|known| known.ptr_eq(&pins)) {
            return;
        }
        watched.by.retain(|known| known.strong_count() > 0);
        watched.by.push(pins);
        if watched.token.is_some() {
            return;
        }
        let weak: Weak<dyn Source> = Arc::downgrade(self) as Weak<dyn Source>;
        let added =
            runtime::reactor().and_then(|reactor| reactor.add(self.process.as_fd(), Interest::READ, weak));
        match added {
            Ok(token) => watched.token = Some(token),
            Err(error) => tracing::debug!(%error, "the exit of a peer cannot be watched"),
        }
    }

    fn unwatch(&self) -> Vec<Weak<PeerPins>> {
        let mut watched = self.watched.lock();
        if let (Some(token), Ok(reactor)) = (watched.token.take(), runtime::reactor()) {
            reactor.remove(token, self.process.as_fd());
        }
        std::mem::take(&mut watched.by)
    }
}

impl Source for PeerProcess {
    fn ready(self: Arc<Self>, _readiness: Readiness) {
        // Otherwise the loop would be notified again and again.
        for pins in self.unwatch().iter().filter_map(Weak::upgrade) {
            pins.let_go();
        }
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        if !crate::fork::in_child() {
            drop(self.unwatch());
        }
    }
}
