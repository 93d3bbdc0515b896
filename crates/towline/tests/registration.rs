//! What registering promises beside the transfers: its cost, its order and its names.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]
#![allow(unsafe_code, reason = "implements the trait that registration trusts")]

use std::any::Any;
use std::fs;
use std::sync::Arc;

use parking_lot::Mutex;
use towline::{
    Access, Dtype, Endpoint, Kind, MemoryAccess, MemoryDescription, MemoryDescriptor, OffsetBuffer, Part,
    ReduceOp, RegisteredView, Routing, SharedStorage, Storage, StorageKind, SystemStorage, Ticket,
    create_buffer,
};

const MIB: usize = 1 << 20;

fn resident() -> usize {
    let statm = fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * rustix::param::page_size()
}

#[test]
fn registering_touches_no_page_however_often() {
    let endpoint = Endpoint::open("lazy").unwrap();
    let memory = create_buffer(SystemStorage::new(1024 * MIB).unwrap());
    // What an endpoint needs once is there already.
    drop(endpoint.register(SystemStorage::new(8).unwrap(), Access::READ).unwrap());
    let before = resident();
    let views = (0..1000).map(|at| OffsetBuffer::new(memory.clone(), at * MIB, 24 * MIB).unwrap());
    let regions = endpoint.register_many(views.collect(), Access::READ_WRITE).unwrap();
    let tickets: Vec<Ticket> = regions.iter().map(|region| region.ticket().unwrap()).collect();
    let grown = resident().saturating_sub(before);
    assert!(grown < 128 * MIB, "{grown} bytes became resident");
    assert!(tickets.iter().all(|ticket| ticket.encode().len() <= 512));
    // Each of them is a registration of its own.
    drop(regions);
    assert_eq!(endpoint.stats().regions, 0);
    let error = Endpoint::open("late").unwrap().import(&tickets[500]).unwrap_err();
    assert_eq!(error.kind(), Kind::Stale, "{error}");
}

/// Memory that looks, when it is freed, whether anybody can still reach it.
#[derive(Debug)]
struct Witness {
    memory: SystemStorage,
    reached: Arc<Mutex<Option<(Endpoint, Ticket)>>>,
    seen: Arc<Mutex<Vec<Kind>>>,
}

impl MemoryDescription for Witness {
    fn addr(&self) -> usize {
        self.memory.addr()
    }

    fn size(&self) -> usize {
        self.memory.size()
    }

    fn storage_kind(&self) -> StorageKind {
        self.memory.storage_kind()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

// SAFETY: every result is that of the memory, which it owns and gives nobody.
unsafe impl Storage for Witness {}

impl Drop for Witness {
    fn drop(&mut self) {
        if let Some((user, ticket)) = self.reached.lock().take() {
            self.seen.lock().push(user.import(&ticket).map_or_else(|error| error.kind(), |_| Kind::Internal));
        }
    }
}

#[test]
fn memory_is_freed_after_it_was_revoked() {
    let (owner, user) = (Endpoint::open("owner").unwrap(), Endpoint::open("user").unwrap());
    let (reached, seen) = (Arc::default(), Arc::default());
    let witness = Witness {
        memory: SystemStorage::new(4096).unwrap(),
        reached: Arc::clone(&reached),
        seen: Arc::clone(&seen),
    };
    let region = owner.register(witness, Access::READ).unwrap();
    let ticket = region.ticket().unwrap();
    user.import(&ticket).unwrap();
    *reached.lock() = Some((user, ticket));
    drop(region);
    assert_eq!(*seen.lock(), [Kind::Stale]);
}

#[test]
fn the_published_names_describe_a_registration() {
    fn described(memory: &dyn MemoryDescriptor) -> (usize, usize, StorageKind) {
        (memory.addr(), memory.size(), memory.storage_kind())
    }
    let endpoint = Endpoint::open("names").unwrap();
    let storage = SharedStorage::new(4096).unwrap();
    let plain = described(&storage);
    assert!(storage.nixl_descriptor().is_none(), "nothing is registered yet");
    let mut region = endpoint.register(storage, Access::READ).unwrap();
    assert!(region.is_registered());
    assert_eq!(described(&region), plain);
    assert!(region.storage().as_any().downcast_ref::<SharedStorage>().is_some());
    assert_eq!((region.agent_name(), region.descriptor().size), ("names", 4096));
    assert_eq!(region.nixl_descriptor(), Some(region.descriptor()));
    // SAFETY: the storage is neither replaced nor freed, and nobody else knows of the region.
    unsafe { region.storage_mut().as_mut_slice()[7] = 9 };
    let mut byte = [0];
    region.into_storage().unwrap().read_at(7, &mut byte).unwrap();
    assert_eq!(byte, [9]);
}

#[test]
fn a_remote_region_of_another_endpoint_is_refused_like_a_local_one() {
    let owner = Endpoint::open("owner").unwrap();
    let region = owner.register(SharedStorage::new(4096).unwrap(), Access::READ_WRITE).unwrap();
    let importer = Endpoint::open("importer").unwrap();
    let remote = importer.import(&region.ticket().unwrap()).unwrap();
    // It forbids every path by which the other endpoint reached the region.
    let strict =
        Endpoint::options("strict").routing(Routing::default().require("tcp").unwrap()).open().unwrap();
    let local = strict.register(SystemStorage::new(4096).unwrap(), Access::NONE).unwrap();
    let other = owner.register(SharedStorage::new(4096).unwrap(), Access::READ_WRITE).unwrap();
    let own = strict.import(&other.ticket().unwrap()).unwrap();
    let parts = || [Part::new(&own, &local), Part::new(&remote, &local)];
    for refused in [
        strict.read(&remote, &local).start().unwrap_err(),
        strict.write(&remote, &local).start().unwrap_err(),
        strict.reduce_into(&remote, &local, ReduceOp::Sum, Dtype::U8).start().unwrap_err(),
        // Also where it is the second of some.
        strict.read_parts(parts()).start().unwrap_err(),
        strict.write_parts(parts()).start().unwrap_err(),
        strict.fetch_add(&remote, 0, 1).unwrap_err(),
        strict.notify(&remote, "hello").unwrap_err(),
    ] {
        assert_eq!(refused.kind(), Kind::Invalid, "{refused}");
        assert!(refused.message().contains("another endpoint"), "{refused}");
    }
}
