//! An owner's segments as they are mapped here.
//!
//! A mapping outlives the remotes that use it: an operation on memory that was used before needs neither a system call nor
//! page faults. It is let go when the owner says that the segment is gone (nothing of it is kept alive here), when the
//! session ends, or when more than [`KEPT`] others were used since.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::Result;
use crate::memory::Mapping;
use crate::runtime;
use crate::wire::SegmentRef;

/// The kernel allows a process about 65,000 mappings in all.
const KEPT: usize = 1024;

#[derive(Default)]
pub(super) struct Mappings(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    by_segment: HashMap<u64, Entry>,
    uses: u64,
}

struct Entry {
    mapping: Arc<Mapping>,
    last_use: u64,
}

impl Mappings {
    /// The segment with that number, where it is mapped so.
    pub(super) fn find(&self, segment: u64, writable: bool) -> Option<Arc<Mapping>> {
        let mut inner = self.0.lock();
        inner.uses += 1;
        let now = inner.uses;
        let entry = inner.by_segment.get_mut(&segment)?;
        entry.last_use = now;
        Some(Arc::clone(&entry.mapping)).filter(|mapping| mapping.is_writable() || !writable)
    }

    /// The segment whose file came along, mapped now unless it is already.
    pub(super) fn map(&self, segment: &SegmentRef, file: OwnedFd, writable: bool) -> Result<Arc<Mapping>> {
        if let Some(mapping) = self.find(segment.id, writable) {
            return Ok(mapping);
        }
        let mapping = Arc::new(Mapping::map(file, segment.len as usize, writable)?);
        let mut inner = self.0.lock();
        let entry = Entry { mapping: Arc::clone(&mapping), last_use: inner.uses };
        let replaced = inner.by_segment.insert(segment.id, entry);
        let dropped = inner.make_room();
        drop(inner);
        // Unmapping takes a while: not under the lock.
        drop((replaced, dropped));
        Ok(mapping)
    }

    /// The owner has no such segment any more. Remotes that use the mapping keep it until they go.
    pub(super) fn forget(&self, segment: u64) {
        let gone = self.0.lock().by_segment.remove(&segment);
        drop(gone);
    }

    /// The session has ended: all of them go. Not here, which may be the event loop or the watcher: unmapping takes a while.
    pub(super) fn let_go(&self) {
        let all = std::mem::take(&mut self.0.lock().by_segment);
        if !all.is_empty() {
            // Where no worker can be had they go here all the same.
            let _ = runtime::pool().spawn(Box::new(move || drop(all)));
        }
    }
}

impl Inner {
    fn make_room(&mut self) -> Option<Entry> {
        if self.by_segment.len() <= KEPT {
            return None;
        }
        let oldest = *self.by_segment.iter().min_by_key(|(_, entry)| entry.last_use)?.0;
        self.by_segment.remove(&oldest)
    }
}
