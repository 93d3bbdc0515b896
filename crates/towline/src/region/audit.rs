//! Who used a region, as far as its owner can see.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::budget::{Account, Charge};
use crate::identity::{Identity, Incarnation};

/// So many peers are counted one by one; what the others do is counted together.
const MOST_PEERS: usize = 1024;

/// Who used a region, or an endpoint, and who was refused.
///
/// Counted is what the owner serves and refuses. A peer that was given the memory itself ([`unseen`](PeerAudit::unseen))
/// copies without the owner, which cannot know how much. Names are what peers call themselves.
///
/// ```
/// use towline::{Access, Endpoint, Routing, SystemStorage};
/// let owner = Endpoint::open("owner")?;
/// let region = owner.register(SystemStorage::new(4096)?, Access::READ)?;
/// let user = Endpoint::open("user")?;
/// let remote = user.import_with(&region.ticket()?, &Routing::default().require("tcp")?)?;
/// let local = user.register(SystemStorage::new(4096)?, Access::NONE)?;
/// user.read(&remote, &local).start()?.wait()?;
/// let audit = region.audit();
/// assert_eq!((audit.peers[0].peer.as_str(), audit.peers[0].reads), ("user", (1, 4096)));
/// # Ok::<(), towline::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Audit {
    /// The peers, by name.
    pub peers: Vec<PeerAudit>,
    /// Of an endpoint: who was refused before it had proven to hold any ticket, by where it came from.
    pub unauthenticated: Vec<UnauthenticatedAudit>,
}

/// Connections from one place that were refused before they had proven anything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnauthenticatedAudit {
    /// A host, a network, or a user of this host; `(others)` where there were too many to count each.
    pub origin: String,
    /// How many were refused.
    pub refused: u64,
}

/// What one peer did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerAudit {
    /// What the peer calls itself; `(others)` where there were too many to count each.
    pub peer: String,
    /// The life of the peer that is meant.
    pub incarnation: Incarnation,
    /// Requests to read that the owner served, and the bytes that they asked for.
    pub reads: (u64, u64),
    /// Requests to write, combine, count and signal that the owner served, and the bytes that they brought.
    pub writes: (u64, u64),
    /// Requests and tickets that the owner refused.
    pub refused: u64,
    /// The peer was given the memory itself (paths `inproc`, `mapped`, `cuda`, `cma`, `file`, `nixl`): what it copied there is not
    /// counted.
    pub unseen: bool,
}

impl Audit {
    /// Whether some peer was given the memory itself, so that the numbers are not all there is.
    pub fn is_incomplete(&self) -> bool {
        self.peers.iter().any(|peer| peer.unseen)
    }
}

impl fmt::Display for Audit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.peers.is_empty() && self.unauthenticated.is_empty() {
            return writeln!(f, "no peer has connected");
        }
        for peer in &self.peers {
            let short: String = peer.incarnation.to_string().chars().take(8).collect();
            writeln!(
                f,
                "{} ({short}): {} reads of {} bytes, {} writes of {} bytes, {} refused{}",
                peer.peer,
                peer.reads.0,
                peer.reads.1,
                peer.writes.0,
                peer.writes.1,
                peer.refused,
                if peer.unseen { "; may copy by itself, which the owner does not see" } else { "" }
            )?;
        }
        for one in &self.unauthenticated {
            writeln!(f, "{}: {} refused without a proof", one.origin, one.refused)?;
        }
        Ok(())
    }
}

/// The counters behind one [`PeerAudit`].
#[derive(Default)]
pub(crate) struct Entry {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    refused: AtomicU64,
    unseen: AtomicBool,
}

/// What is counted for a peer.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Counted {
    Read(u64),
    Written(u64),
    Refused,
    GivenAway,
}

impl Entry {
    pub(crate) fn count(&self, what: Counted) {
        let add = |counter: &AtomicU64, number| {
            counter.fetch_add(number, Ordering::Relaxed);
        };
        match what {
            Counted::Read(bytes) => {
                add(&self.reads, 1);
                add(&self.read_bytes, bytes);
            }
            Counted::Written(bytes) => {
                add(&self.writes, 1);
                add(&self.written_bytes, bytes);
            }
            Counted::Refused => add(&self.refused, 1),
            Counted::GivenAway => self.unseen.store(true, Ordering::Relaxed),
        }
    }
}

/// What the counters of one peer take.
const ENTRY: u64 = (size_of::<Entry>() + 4 * size_of::<(Identity, Known)>() + 128) as u64;

struct Known {
    entry: Arc<Entry>,
    /// Nobody pays for those that are counted together.
    _charge: Option<Charge>,
}

/// The counters of all peers. They stay as long as what they are about.
pub(crate) struct Ledger {
    all: Mutex<HashMap<Identity, Known>>,
    memory: Arc<Account>,
}

impl Ledger {
    pub(crate) fn new(memory: &Arc<Account>) -> Ledger {
        Ledger { all: Mutex::default(), memory: Arc::clone(memory) }
    }

    /// The counters of that peer.
    pub(crate) fn of(&self, peer: &Identity) -> Arc<Entry> {
        let mut all = self.all.lock();
        if let Some(known) = all.get(peer) {
            return Arc::clone(&known.entry);
        }
        let told_apart = all.len() < MOST_PEERS;
        let (who, charge) = match told_apart.then(|| self.memory.charge("audit", ENTRY)) {
            Some(Ok(charge)) => (peer.clone(), Some(charge)),
            _ => (others(), None),
        };
        let known = all.entry(who).or_insert_with(|| Known { entry: Arc::default(), _charge: charge });
        Arc::clone(&known.entry)
    }

    pub(crate) fn audit(&self) -> Audit {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut peers: Vec<PeerAudit> = self
            .all
            .lock()
            .iter()
            .map(|(peer, Known { entry, .. })| PeerAudit {
                peer: peer.name.clone(),
                incarnation: peer.incarnation,
                reads: (load(&entry.reads), load(&entry.read_bytes)),
                writes: (load(&entry.writes), load(&entry.written_bytes)),
                refused: load(&entry.refused),
                unseen: entry.unseen.load(Ordering::Relaxed),
            })
            .collect();
        peers.sort_by(|a, b| (&a.peer, a.incarnation).cmp(&(&b.peer, b.incarnation)));
        Audit { peers, unauthenticated: Vec::new() }
    }
}

fn others() -> Identity {
    let name = "(others)".to_owned();
    Identity { id: crate::EndpointId::of(&name), incarnation: Incarnation([0; 16]), name }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::budget::Budget;

    fn ledger(memory: u64) -> Ledger {
        Ledger::new(&Budget::new("tests", memory).part(memory))
    }

    #[test]
    fn peers_beyond_the_limit_are_counted_together() {
        let ledger = ledger(1 << 30);
        for number in 0..MOST_PEERS + 500 {
            let peer = Identity::new(format!("peer-{number}"), Incarnation([1; 16])).unwrap();
            ledger.of(&peer).count(Counted::Refused);
        }
        let audit = ledger.audit();
        assert_eq!(audit.peers.len(), MOST_PEERS + 1);
        let others = audit.peers.iter().find(|peer| peer.peer == "(others)").unwrap();
        assert_eq!(others.refused, 500);
        assert!(!audit.is_incomplete());
    }

    #[test]
    fn peers_for_which_there_is_no_memory_are_counted_together() {
        let ledger = ledger(10 * ENTRY);
        for number in 0..500 {
            let peer = Identity::new(format!("peer-{number}"), Incarnation([1; 16])).unwrap();
            ledger.of(&peer).count(Counted::Refused);
        }
        let audit = ledger.audit();
        assert_eq!(audit.peers.len(), 11);
        assert_eq!(audit.peers.iter().map(|peer| peer.refused).sum::<u64>(), 500);
    }

    #[test]
    fn what_the_owner_does_not_see_is_said() {
        let ledger = ledger(1 << 20);
        let peer = Identity::new("near", Incarnation([0xab; 16])).unwrap();
        ledger.of(&peer).count(Counted::Read(10));
        ledger.of(&peer).count(Counted::GivenAway);
        let audit = ledger.audit();
        assert!(audit.is_incomplete());
        let text = audit.to_string();
        assert!(text.contains("near (abababab): 1 reads of 10 bytes"), "{text}");
        assert!(text.contains("does not see"), "{text}");
        assert_eq!(Audit::default().to_string(), "no peer has connected\n");
    }
}
