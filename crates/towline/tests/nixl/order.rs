//! A storage goes after its registration, never before.

use std::any::Any;
use std::sync::Arc;

use parking_lot::Mutex;
use towline::memory::MemoryDescription;
use towline::nixl::{
    MemType, NixlAgent, NixlDescriptor, NixlRegisterExt, RegDescList, RegisteredView, XferOp,
};
use towline::{Place, Storage, StorageKind, SystemStorage};

use crate::{agent, engines, run, whole};

/// A storage that writes down, when it goes, whether its agent still knows its memory.
#[derive(Debug)]
struct Recording {
    memory: SystemStorage,
    agent: NixlAgent,
    record: Arc<Mutex<Vec<bool>>>,
}

impl Recording {
    fn new(agent: &NixlAgent) -> (Recording, Arc<Mutex<Vec<bool>>>) {
        let record = Arc::default();
        let memory = SystemStorage::new(65536).unwrap();
        (Recording { memory, agent: agent.clone(), record: Arc::clone(&record) }, record)
    }
}

impl MemoryDescription for Recording {
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

// SAFETY: every result is the inner storage's, which keeps the contract.
unsafe impl Storage for Recording {
    fn place(&self) -> Place {
        Place::Host
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let mut list = RegDescList::new(MemType::Dram).unwrap();
        list.add_desc(self.addr(), self.size(), 0).unwrap();
        self.record.lock().push(self.agent.get_local_partial_md(&list, None).is_ok());
    }
}

#[test]
fn the_registration_goes_before_the_storage() {
    for engine in engines("the_registration_goes_before_the_storage") {
        let agent = agent("order", engine, &["UCX"]);
        // NIXL answers for ranges that it does not know as long as it knows no memory at all.
        let _neighbour = SystemStorage::new(4096).unwrap().register(&agent, None).unwrap();
        let (storage, record) = Recording::new(&agent);
        let registered = storage.register(&agent, None).unwrap();
        let NixlDescriptor { addr, size, .. } = registered.descriptor();
        assert_eq!((addr as usize, size), (registered.addr(), 65536));
        drop(registered);
        assert_eq!(*record.lock(), [false], "freed once, and deregistered before ({engine})");

        // Given back, it is deregistered and not freed.
        let (storage, record) = Recording::new(&agent);
        let storage = storage.register(&agent, None).unwrap().into_storage().unwrap();
        assert!(record.lock().is_empty());
        drop(storage);
        assert_eq!(*record.lock(), [false]);

        // Refused, it comes back as it was.
        let (storage, record) = Recording::new(&agent);
        let mut opt = towline::nixl::OptArgs::new().unwrap();
        opt.add_backend("POSIX").unwrap();
        let refused = storage.register(&agent, Some(&opt)).unwrap_err();
        assert!(record.lock().is_empty());
        drop(refused.storage);
        assert_eq!(record.lock().len(), 1);
    }
}

#[test]
fn a_storage_in_use_by_a_request_outlives_its_registration() {
    for engine in engines("a_storage_in_use_by_a_request_outlives_its_registration") {
        let agent = agent("order-use", engine, &["UCX"]);
        let (storage, record) = Recording::new(&agent);
        let local = storage.register(&agent, None).unwrap();
        let remote = SystemStorage::new(65536).unwrap().register(&agent, None).unwrap();
        let request = agent
            .create_xfer_req(XferOp::Write, &whole(&local), &whole(&remote), &agent.name(), None)
            .unwrap();
        run(&agent, &request, None);
        drop(local);
        drop(request);
        assert_eq!(*record.lock(), [false], "{engine}");
    }
}
