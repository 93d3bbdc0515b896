//! A peer whose metadata is here, and its regions.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::metadata::{Entry, Metadata};
use super::table::{Ranged, Side, Table};
use crate::identity::Identity;
use crate::nixl::list::{Key, Range};
use crate::{Endpoint, Error, Kind, Remote, Result};

/// A region of a peer, imported when it is first used.
pub(in crate::nixl) struct Region {
    entry: Entry,
    remote: Mutex<Option<Arc<Remote>>>,
}

impl Region {
    pub(super) fn new(entry: Entry) -> Region {
        Region { entry, remote: Mutex::new(None) }
    }

    fn remote(&self) -> Option<Arc<Remote>> {
        self.remote.lock().clone().filter(|remote| remote.alive().is_ok())
    }
}

impl Ranged for Arc<Region> {
    fn range(&self) -> &Range {
        &self.entry.range
    }
}

pub(in crate::nixl) struct Peer {
    identity: Identity,
    door: Region,
    regions: Mutex<Table<Arc<Region>>>,
    invalid: AtomicBool,
}

impl Peer {
    pub(super) fn new(metadata: Metadata) -> Peer {
        let door = Entry {
            // Nothing is looked up by the door's range.
            range: Range(crate::memory::NixlDescriptor {
                addr: 0,
                size: 0,
                mem_type: crate::memory::MemType::Unknown,
                device_id: 0,
            }),
            ticket: metadata.door.clone(),
        };
        let peer = Peer {
            identity: metadata.door.body().identity.clone(),
            door: Region::new(door),
            regions: Mutex::default(),
            invalid: AtomicBool::new(false),
        };
        peer.learn(metadata);
        peer
    }

    /// Whether it is that life of that agent.
    pub(super) fn is(&self, identity: &Identity) -> bool {
        self.identity == *identity
    }

    /// Adds regions. What lay there before has been taken back by its owner, or it could not be there again.
    pub(super) fn learn(&self, metadata: Metadata) {
        let mut regions = self.regions.lock();
        let news = Cover::of(&metadata.entries);
        let number = |entry: &Entry| (entry.ticket.body().row, entry.ticket.body().generation);
        let mut replaced: HashMap<(u32, u64), Arc<Region>> = HashMap::new();
        regions.retain(|old| {
            let stays = !metadata.complete && !news.touches(&old.entry.range);
            if !stays {
                replaced.insert(number(&old.entry), Arc::clone(old));
            }
            stays
        });
        for entry in metadata.entries {
            // A region that was imported stays so: its ticket differs only in when it was made.
            let known = replaced.remove(&number(&entry)).filter(|old| old.entry.range == entry.range);
            regions.insert(known.unwrap_or_else(|| Arc::new(Region::new(entry))));
        }
    }

    /// Forgets it: nothing that was prepared for it can be started any more.
    pub(super) fn invalidate(&self) {
        self.invalid.store(true, Ordering::Release);
    }

    pub(super) fn check(&self) -> Result<()> {
        if !self.invalid.load(Ordering::Acquire) {
            return Ok(());
        }
        let message = format!("the metadata of agent {} was invalidated", self.identity.name);
        Err(Error::new(Kind::NotFound, "nixl", message).with_peer(&*self.identity.name))
    }

    pub(super) fn find(&self, ranges: impl ExactSizeIterator<Item = Range>) -> Result<Side<Arc<Region>>> {
        self.regions.lock().find(ranges, |range| {
            let message = format!("the metadata of agent {} does not cover {range:?}", self.identity.name);
            Error::new(Kind::NotFound, "nixl", message).with_peer(&*self.identity.name)
        })
    }

    /// What messages to it go through; makes contact if there was none.
    pub(super) fn door(&self, endpoint: &Endpoint) -> Result<Arc<Remote>> {
        self.check()?;
        if let Some(remote) = self.door.remote() {
            return Ok(remote);
        }
        let remote = Arc::new(endpoint.import(&self.door.entry.ticket)?);
        *self.door.remote.lock() = Some(Arc::clone(&remote));
        Ok(remote)
    }
}

/// The regions, imported: with one round trip for all that were not.
pub(super) fn imported(
    endpoint: &Endpoint,
    peer: Option<&Arc<Peer>>,
    regions: &[Arc<Region>],
) -> Result<Vec<Arc<Remote>>> {
    peer.map_or(Ok(()), |peer| peer.check())?;
    let known: Vec<Option<Arc<Remote>>> = regions.iter().map(|region| region.remote()).collect();
    let missing: Vec<_> = regions
        .iter()
        .zip(&known)
        .filter(|(_, known)| known.is_none())
        .map(|(region, _)| region.entry.ticket.clone())
        .collect();
    let mut fresh = if missing.is_empty() { Vec::new() } else { endpoint.import_many(&missing)? }.into_iter();
    regions
        .iter()
        .zip(known)
        .map(|(region, known)| match known {
            Some(remote) => Ok(remote),
            None => {
                let answer = fresh.next();
                let none = || Err(Error::new(Kind::Internal, "import", "no reply"));
                let remote = Arc::new(answer.unwrap_or_else(none)?);
                *region.remote.lock() = Some(Arc::clone(&remote));
                Ok(remote)
            }
        })
        .collect()
}

/// Ranges, asked whether any of them touches another one.
struct Cover {
    /// Sorted by kind, device and start; beside each, the furthest end of those before it and its own.
    starts: Vec<(Key, u64)>,
}

impl Cover {
    fn of(entries: &[Entry]) -> Cover {
        let mut starts: Vec<(Key, u64)> =
            entries.iter().map(|entry| (entry.range.key(), entry.range.end().unwrap_or(u64::MAX))).collect();
        starts.sort_unstable();
        for at in 1..starts.len() {
            let (before, now) = (starts[at - 1], starts[at]);
            if (before.0.0, before.0.1) == (now.0.0, now.0.1) {
                starts[at].1 = now.1.max(before.1);
            }
        }
        Cover { starts }
    }

    fn touches(&self, range: &Range) -> bool {
        let (kind, device, start) = range.key();
        let end = range.end().unwrap_or(u64::MAX);
        let before = self.starts.partition_point(|(key, _)| *key < (kind, device, end));
        self.starts[..before]
            .last()
            .is_some_and(|(key, reach)| (key.0, key.1) == (kind, device) && *reach > start)
    }
}
