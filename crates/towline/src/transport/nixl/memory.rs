//! What NIXL knows of a region: its registration with the endpoint's agent, on either side of a transfer.
#![allow(unsafe_code, reason = "hands the address of registered memory to NIXL")]

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use towline_sys::nixl::{Descriptor, MemoryKind, Registration, RegistrationList};

use super::engine::{Engine, Reach};
use super::lists::{Grids, Requests};
use super::of_nixl;
use crate::memory::Place;
use crate::region::{RegionCore, TransportState};
use crate::{Error, Kind, Result};

/// A region's place for what NIXL knows of it: nothing, until a transfer by NIXL is asked for.
#[derive(Default)]
pub(super) struct Known {
    by_memory: Mutex<Option<Arc<Memory>>>,
    by_files: Mutex<Option<Arc<Memory>>>,
}

impl Known {
    fn at(&self, reach: Reach) -> &Mutex<Option<Arc<Memory>>> {
        match reach {
            Reach::Memory => &self.by_memory,
            Reach::Files => &self.by_files,
        }
    }

    /// What NIXL's plug-ins for that know, if they know the region.
    pub(super) fn find(&self, reach: Reach) -> Option<Arc<Memory>> {
        self.at(reach).lock().clone()
    }

    /// Registers the region with the agent, unless it is. May take as long as pinning all of its pages. The caller holds a
    /// use of the region.
    pub(super) fn register(
        &self,
        reach: Reach,
        engine: &Arc<Engine>,
        region: &RegionCore,
    ) -> Result<Arc<Memory>> {
        let mut known = self.at(reach).lock();
        if let Some(memory) = &*known {
            return Ok(Arc::clone(memory));
        }
        let number = engine.next_device();
        let (kind, device) = match region.place {
            Place::Host => (MemoryKind::Dram, number),
            // There the device is the GPU, and nothing else can tell registrations apart.
            Place::Cuda(ordinal) => (MemoryKind::Vram, u64::from(ordinal)),
            Place::Disk => {
                let message = "a region of a file is registered where it is read or written";
                return Err(Error::new(Kind::Unsupported, "import", message));
            }
        };
        let descriptor = Descriptor { address: region.addr as u64, length: region.len as u64, device };
        let list = RegistrationList::new(&engine.nixl, kind, [descriptor]).map_err(of_nixl)?;
        let options = engine.options(reach)?;
        let on_gpu = kind == MemoryKind::Vram;
        if on_gpu {
            engine.take_on_gpu(reach, descriptor)?;
        }
        // SAFETY: the region's memory stays until `RegionCore::free`, which is called when nobody is inside any more, and
        // takes the registration back first.
        let registration = unsafe { engine.agent.register(list, &options) }
            .inspect_err(|_| {
                if on_gpu {
                    engine.leave_gpu(reach, descriptor);
                }
            })
            .map_err(of_nixl)?;
        engine.counts.registered.fetch_add(1, Ordering::Relaxed);
        let memory = Arc::new(Memory {
            engine: Arc::clone(engine),
            reach,
            kind,
            number,
            descriptor,
            registration: Mutex::new(Some(registration)),
            metadata: OnceLock::new(),
            grids: Grids::default(),
            requests: Mutex::default(),
        });
        *known = Some(Arc::clone(&memory));
        Ok(memory)
    }
}

impl TransportState for Known {
    fn free(&self) {
        for reach in [Reach::Memory, Reach::Files] {
            let memory = self.at(reach).lock().take();
            if let Some(memory) = memory.filter(|_| !crate::fork::in_child()) {
                memory.retire();
            }
        }
    }
}

/// A region that is registered with an agent.
pub(super) struct Memory {
    engine: Arc<Engine>,
    reach: Reach,
    pub(super) kind: MemoryKind,
    /// Tells it from every other registration of the agent.
    pub(super) number: u64,
    pub(super) descriptor: Descriptor,
    registration: Mutex<Option<Registration>>,
    metadata: OnceLock<Vec<u8>>,
    /// Prepared lists of its blocks, as the local side of transfers.
    pub(super) grids: Grids,
    /// Where requests that use it are kept.
    requests: Mutex<Vec<Weak<Requests>>>,
}

impl Memory {
    /// What a peer needs to reach it.
    pub(super) fn metadata(&self, engine: &Engine) -> Result<Vec<u8>> {
        if let Some(metadata) = self.metadata.get() {
            return Ok(metadata.clone());
        }
        let metadata = match &*self.registration.lock() {
            Some(registration) => engine
                .agent
                .partial_metadata(registration.list(), &engine.options(self.reach)?)
                .map_err(of_nixl)?,
            None => return Err(crate::region::stale("import")),
        };
        Ok(self.metadata.get_or_init(|| metadata).clone())
    }

    /// Remembers where a request that uses it is kept.
    pub(super) fn used_by(&self, requests: &Arc<Requests>) {
        let mut all = self.requests.lock();
        all.retain(|one| one.strong_count() > 0);
        if !all.iter().any(|one| std::ptr::eq(one.as_ptr(), Arc::as_ptr(requests))) {
            all.push(Arc::downgrade(requests));
        }
    }

    /// Requests and lists first: they lead to what the registration holds.
    fn retire(&self) {
        for requests in self.requests.lock().drain(..).filter_map(|one| one.upgrade()) {
            requests.forget(self.number);
        }
        self.grids.clear();
        if let Some(registration) = self.registration.lock().take() {
            self.engine.counts.registered.fetch_sub(1, Ordering::Relaxed);
            match registration.deregister() {
                Ok(()) if self.kind == MemoryKind::Vram => self.engine.leave_gpu(self.reach, self.descriptor),
                Ok(()) => {}
                Err(error) => tracing::warn!(%error, "NIXL did not take back a registration"),
            }
        }
    }
}
