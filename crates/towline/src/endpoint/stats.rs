//! What was moved, per peer and path.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::Result;
use crate::transfer::Op;
use crate::transport::nixl::NixlStats;

/// What an endpoint has moved and what it holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stats {
    /// Transfers that this endpoint started, per peer and path.
    pub paths: Vec<PathStats>,
    /// Regions that are registered now.
    pub regions: usize,
    /// Operations that wait for a peer, or for the one that has claimed them.
    pub operations: usize,
    /// Storages of dropped registrations that a peer has not let go yet, and their bytes.
    pub parked: (usize, usize),
    /// What this endpoint refused to serve: accesses, tickets, handshakes.
    pub refused: u64,
    /// Connections among them that did not become sessions. [`Endpoint::metrics`](crate::Endpoint::metrics) has them by reason, and
    /// [`Endpoint::audit`](crate::Endpoint::audit) by where they came from.
    pub refused_handshakes: u64,
    /// Sessions of peers that use this endpoint's regions.
    pub peers: usize,
    /// Connections that have not proven themselves yet.
    pub unauthenticated: usize,
    /// Requests of peers that are being served, and their bytes.
    pub in_flight: (usize, u64),
    /// The bytes of this process's memory that peers take now, of those that they may ([`Quotas::memory`](crate::Quotas::memory)).
    pub peer_memory: u64,
    /// What NIXL does for this endpoint; `None` where it was never needed.
    pub nixl: Option<NixlStats>,
}

/// What was moved between this endpoint and one peer over one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathStats {
    /// The peer's name.
    pub peer: String,
    /// The path.
    pub path: &'static str,
    /// Reads that ended well, and their bytes.
    pub reads: (u64, u64),
    /// Writes, reductions, signals and atomics that ended well, and their bytes.
    pub writes: (u64, u64),
    /// Transfers that ended in an error.
    pub failures: u64,
}

/// The counters behind one [`PathStats`].
#[derive(Default)]
pub(crate) struct Counters {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    failures: AtomicU64,
}

impl Counters {
    pub(crate) fn count(&self, op: Op, bytes: u64, result: &Result<()>) {
        let (ops, moved) = match (result, op) {
            (Err(_), _) => {
                self.failures.fetch_add(1, Ordering::Relaxed);
                return;
            }
            (Ok(()), Op::Read) => (&self.reads, &self.read_bytes),
            (Ok(()), _) => (&self.writes, &self.written_bytes),
        };
        ops.fetch_add(1, Ordering::Relaxed);
        moved.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// The counters of every peer and path.
#[derive(Default)]
pub(crate) struct AllCounters(Mutex<HashMap<PeerAndPath, Arc<Counters>>>);

type PeerAndPath = (Arc<str>, &'static str);

impl AllCounters {
    pub(crate) fn of(&self, peer: &Arc<str>, path: &'static str) -> Arc<Counters> {
        Arc::clone(self.0.lock().entry((Arc::clone(peer), path)).or_default())
    }

    pub(crate) fn snapshot(&self) -> Vec<PathStats> {
        let mut all: Vec<PathStats> = self
            .0
            .lock()
            .iter()
            .map(|((peer, path), counters)| {
                let load = |one: &AtomicU64| one.load(Ordering::Relaxed);
                PathStats {
                    peer: peer.to_string(),
                    path,
                    reads: (load(&counters.reads), load(&counters.read_bytes)),
                    writes: (load(&counters.writes), load(&counters.written_bytes)),
                    failures: load(&counters.failures),
                }
            })
            .filter(|path| path.reads.0 + path.writes.0 + path.failures > 0)
            .collect();
        all.sort_by(|a, b| (&a.peer, a.path).cmp(&(&b.peer, b.path)));
        all
    }
}
