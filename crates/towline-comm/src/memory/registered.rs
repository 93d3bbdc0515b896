//! What one rank has registered with one communicator, and what it reaches of the others' memory.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use towline::{Buffer, Endpoint, MemoryDescription, Routing};

use super::{BUFFER_BIT, BufferCore, Buffers, Memory, WindowCore, Windows};
use crate::Result;
use crate::team::Team;

/// What one rank has registered with one communicator.
pub(crate) struct RegisteredMemory {
    endpoint: Endpoint,
    /// Which paths to other ranks are allowed.
    routing: Routing,
    windows: Windows,
    buffers: Buffers,
    /// Registered buffers that all ranks have used together, by the ids that the ranks gave them.
    shared: Mutex<HashMap<Vec<u64>, Arc<WindowCore>>>,
}

impl RegisteredMemory {
    pub(crate) fn new(endpoint: Endpoint, routing: Routing) -> RegisteredMemory {
        RegisteredMemory {
            endpoint,
            routing,
            windows: Windows::default(),
            buffers: Buffers::default(),
            shared: Mutex::default(),
        }
    }

    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    pub(crate) fn routing(&self) -> &Routing {
        &self.routing
    }

    pub(crate) fn windows(&self) -> &Windows {
        &self.windows
    }

    /// How many windows and registered buffers are open.
    pub(crate) fn count(&self) -> usize {
        self.windows.count() + self.buffers.count()
    }

    /// Registers a buffer, or counts one more handle to a registered range that contains it.
    pub(crate) fn register_buffer(&self, storage: Buffer) -> Result<(Arc<BufferCore>, usize)> {
        self.buffers.register(&self.endpoint, storage)
    }

    /// The part of a window or of a registered buffer that holds all of those bytes.
    pub(crate) fn containing(&self, storage: &Buffer) -> Result<Option<Memory>> {
        if let Some(memory) = self.windows.containing(storage) {
            return Ok(Some(memory));
        }
        let (addr, len) = (storage.addr(), storage.size());
        let found = self.buffers.containing(addr, len);
        found.map(|(buffer, offset)| Memory::of_buffer(&buffer, offset, len)).transpose()
    }

    /// Gives up one handle to a registered buffer; the last one deregisters.
    pub(crate) fn release_buffer(&self, buffer: &Arc<BufferCore>) {
        if !self.buffers.release(buffer) {
            return;
        }
        // The combinations that it was part of have its id.
        let of_it = |window: &WindowCore| window.id() == buffer.id();
        let gone: Vec<_> = {
            let mut shared = self.shared.lock();
            shared.extract_if(|_, window| of_it(window)).map(|(_, window)| window).collect()
        };
        for window in gone {
            window.close();
        }
    }

    /// The memory through which all ranks reach each other in this call: `ids[rank]` is what each announced of its
    /// [`Memory::window`], 0 for none. The same window everywhere, or registered buffers everywhere (which are
    /// imported the first time that these are used together: then all ranks take part); otherwise `None`.
    pub(crate) fn reachable(
        &self,
        team: &Arc<Team>,
        ids: &[u64],
        mine: &Memory,
    ) -> Result<Option<Arc<WindowCore>>> {
        let Some(first) = ids.first() else { return Ok(None) };
        if ids.iter().all(|id| id == first) && *first != 0 && first & BUFFER_BIT == 0 {
            return Ok(self.windows.find(*first));
        }
        if !ids.iter().all(|id| id & BUFFER_BIT != 0) {
            return Ok(None);
        }
        let known = self.shared.lock().get(ids).cloned();
        if known.is_some() {
            return Ok(known);
        }
        let window = self.share_buffers(team, mine)?;
        let mut shared = self.shared.lock();
        // Their owners wait for the pins on what they have closed, and no call names it again.
        let ended = |window: &WindowCore| (0..ids.len()).any(|rank| window.access(rank, "sweep").is_err());
        let gone: Vec<_> = shared.extract_if(|_, window| ended(window)).map(|(_, window)| window).collect();
        shared.insert(ids.to_vec(), Arc::clone(&window));
        drop(shared);
        for window in gone {
            window.close();
        }
        Ok(Some(window))
    }

    /// Gives up a window on this rank.
    pub(crate) fn close_window(&self, window: &WindowCore) {
        self.windows.remove(window.id());
        window.close();
    }

    /// Gives up everything.
    pub(crate) fn close_all(&self) {
        self.windows.close_all();
        let shared = std::mem::take(&mut *self.shared.lock());
        for window in shared.into_values() {
            window.close();
        }
        self.buffers.close_all();
    }
}
