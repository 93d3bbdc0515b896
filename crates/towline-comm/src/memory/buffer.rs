//! Buffers registered by one rank: found by containment, counted, and known to the others once they are used.

use std::sync::Arc;

use parking_lot::Mutex;
use towline::{Access, Buffer, Endpoint, MemoryDescription, Registered, Span, Ticket};

use crate::{Error, Result};

/// Set in the ids of registered buffers, so that they never equal a window's.
pub(crate) const BUFFER_BIT: u64 = 1 << 63;

/// A registered range: one for all handles to parts of it.
pub(crate) struct BufferCore {
    id: u64,
    addr: usize,
    len: usize,
    local: Span,
    region: Mutex<Option<Registered<Buffer>>>,
}

impl BufferCore {
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn addr(&self) -> usize {
        self.addr
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn local(&self) -> &Span {
        &self.local
    }

    pub(crate) fn ticket(&self, op: &'static str) -> Result<Ticket> {
        let region = self.region.lock();
        let region = region.as_ref().ok_or_else(|| Error::invalid(op, "the registered buffer is closed"))?;
        Ok(region.ticket()?)
    }

    fn close(&self) {
        let region = self.region.lock().take();
        drop(region);
    }
}

/// The registered buffers of one communicator.
#[derive(Default)]
pub(crate) struct Buffers {
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    last_id: u64,
    ranges: Vec<Range>,
}

struct Range {
    core: Arc<BufferCore>,
    handles: usize,
}

impl Buffers {
    /// Registers a buffer, or counts one more handle to a registered range that contains it.
    pub(crate) fn register(&self, endpoint: &Endpoint, storage: Buffer) -> Result<(Arc<BufferCore>, usize)> {
        let mut entries = self.entries.lock();
        if let Some((range, offset)) = entries.find_mut(storage.addr(), storage.size()) {
            range.handles += 1;
            return Ok((Arc::clone(&range.core), offset));
        }
        let region = endpoint.register(storage, Access::READ_WRITE)?;
        entries.last_id += 1;
        let core = Arc::new(BufferCore {
            id: BUFFER_BIT | entries.last_id,
            addr: region.addr(),
            len: region.size(),
            local: Span::from(&region),
            region: Mutex::new(Some(region)),
        });
        entries.ranges.push(Range { core: Arc::clone(&core), handles: 1 });
        Ok((core, 0))
    }

    /// The registered range that holds all of those bytes, and where in it they start.
    pub(crate) fn containing(&self, addr: usize, len: usize) -> Option<(Arc<BufferCore>, usize)> {
        let mut entries = self.entries.lock();
        entries.find_mut(addr, len).map(|(range, offset)| (Arc::clone(&range.core), offset))
    }

    /// Gives up one handle; true for the last one, which deregisters.
    pub(super) fn release(&self, core: &Arc<BufferCore>) -> bool {
        let mut entries = self.entries.lock();
        let Some(index) = entries.ranges.iter().position(|range| Arc::ptr_eq(&range.core, core)) else {
            return false;
        };
        entries.ranges[index].handles -= 1;
        if entries.ranges[index].handles > 0 {
            return false;
        }
        entries.ranges.swap_remove(index);
        drop(entries);
        core.close();
        true
    }

    pub(crate) fn close_all(&self) {
        let ranges = std::mem::take(&mut self.entries.lock().ranges);
        for range in ranges {
            range.core.close();
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.entries.lock().ranges.len()
    }
}

impl Entries {
    fn find_mut(&mut self, addr: usize, len: usize) -> Option<(&mut Range, usize)> {
        self.ranges.iter_mut().find_map(|range| {
            let offset = addr.checked_sub(range.core.addr)?;
            (offset.checked_add(len)? <= range.core.len).then_some((range, offset))
        })
    }
}
