//! Memory of GPUs, on a library that writes down its calls and moves nothing: no GPU is needed to see which calls NIXL gets.
#![allow(unsafe_code, reason = "implements a storage that says it is on a GPU")]

use std::any::Any;

use towline::memory::{MemoryDescription, Place, Storage, StorageKind};
use towline::{Access, Kind, Part, SystemStorage};
use towline_testkit::bench::{options, options_for};

use super::fake::{CHILD, in_a_child, only_nixl};

/// Host memory that says it is on a GPU.
#[derive(Debug)]
struct OnGpu {
    memory: SystemStorage,
    from: usize,
    ordinal: u32,
}

impl OnGpu {
    fn new(ordinal: u32, len: usize) -> OnGpu {
        OnGpu { memory: SystemStorage::new(len).unwrap(), from: 0, ordinal }
    }
}

impl MemoryDescription for OnGpu {
    fn addr(&self) -> usize {
        self.memory.addr() + self.from
    }

    fn size(&self) -> usize {
        self.memory.size() - self.from
    }

    fn storage_kind(&self) -> StorageKind {
        StorageKind::Device(self.ordinal)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

// SAFETY: the bytes are those of a `SystemStorage`, which keeps the contract; that they are host memory harms nobody.
unsafe impl Storage for OnGpu {
    fn place(&self) -> Place {
        Place::Cuda(self.ordinal)
    }
}

const LEN: usize = 65536;

#[test]
fn memory_of_a_gpu_is_registered_with_nixl_as_such_on_both_sides() {
    let test = "memory_of_a_gpu_is_registered_with_nixl_as_such_on_both_sides";
    if std::env::var_os(CHILD).is_none() {
        let Some(calls) = in_a_child("gpus", test, &[]) else { return };
        let calls: Vec<_> = calls.lines().collect();
        let expected = [
            "register owne kind 1 device 3 length 65536",
            "register user kind 1 device 1 length 65536",
            "read into user kind 1 device 1 length 65536",
            "read from owne kind 1 device 3 length 65536",
            "register user kind 0 device -1 length 65536",
            "write from user kind 0 device -1 length 4096",
            "write into owne kind 1 device 3 length 4096",
            "deregister user kind 1 device 1 length 65536",
            "deregister user kind 0 device -1 length 65536",
            "deregister owne kind 1 device 3 length 65536",
        ];
        assert_eq!(calls, expected);
        return;
    }
    let (owner, user) = (options_for("nixl", "owner").open().unwrap(), options("user").open().unwrap());
    let region = owner.register(OnGpu::new(3, LEN), Access::READ_WRITE).unwrap();
    let remote = user.import_with(&region.ticket().unwrap(), &only_nixl()).unwrap();
    assert_eq!((remote.path(), remote.place()), ("nixl", Place::Cuda(3)));
    let near = user.register(OnGpu::new(1, LEN), Access::NONE).unwrap();
    user.read(&remote, &near).start().unwrap().wait().unwrap();
    let host = user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
    user.write(&remote, &host).at(0, 0, 4096).start().unwrap().wait().unwrap();
    // Words on a GPU stay out of reach.
    let error = user.write(&remote, &host).at(0, 0, 8).signal(0, 1).start().unwrap_err();
    assert_eq!(error.kind(), Kind::Unsupported, "{error}");
    near.into_storage().unwrap();
    host.into_storage().unwrap();
    region.into_storage().unwrap();
}

#[test]
fn parts_are_one_request_where_each_side_is_one_kind_of_memory_and_one_gpu() {
    let test = "parts_are_one_request_where_each_side_is_one_kind_of_memory_and_one_gpu";
    if std::env::var_os(CHILD).is_none() {
        in_a_child("gpus", test, &[]);
        return;
    }
    let (owner, user) = (options_for("nixl", "owner").open().unwrap(), options("user").open().unwrap());
    let regions = [3, 3, 4].map(|gpu| owner.register(OnGpu::new(gpu, LEN), Access::READ_WRITE).unwrap());
    let host = owner.register(SystemStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap();
    let tickets = regions.iter().map(|region| region.ticket().unwrap()).chain([host.ticket().unwrap()]);
    let remotes: Vec<_> = tickets.map(|ticket| user.import_with(&ticket, &only_nixl()).unwrap()).collect();
    let locals = [1, 1, 2].map(|gpu| user.register(OnGpu::new(gpu, LEN), Access::NONE).unwrap());
    let mut before = 0;
    for (theirs, ours, requests) in
        [([0, 1], [0, 1], 1), ([0, 2], [0, 1], 2), ([0, 3], [0, 1], 2), ([0, 1], [0, 2], 2)]
    {
        let parts = theirs.iter().zip(ours).map(|(theirs, ours)| Part::new(&remotes[*theirs], &locals[ours]));
        user.read_parts(parts).start().unwrap().wait().unwrap();
        let posted = user.stats().nixl.unwrap().posted;
        assert_eq!(posted - before, requests, "{theirs:?} {ours:?}");
        before = posted;
    }
}

#[test]
fn two_regions_that_share_memory_of_a_gpu_are_not_both_given_to_nixl() {
    let test = "two_regions_that_share_memory_of_a_gpu_are_not_both_given_to_nixl";
    if std::env::var_os(CHILD).is_none() {
        if let Some(calls) = in_a_child("gpus", test, &[]) {
            assert_eq!(calls.lines().filter(|line| line.starts_with("register")).count(), 2, "{calls}");
        }
        return;
    }
    let (owner, user) = (options_for("nixl", "owner").open().unwrap(), options("user").open().unwrap());
    let storage = std::sync::Arc::new(OnGpu::new(0, LEN));
    let first = owner.register(std::sync::Arc::clone(&storage), Access::READ_WRITE).unwrap();
    let second = owner.register(storage, Access::READ_WRITE).unwrap();
    let remote = user.import_with(&first.ticket().unwrap(), &only_nixl()).unwrap();
    let error = user.import_with(&second.ticket().unwrap(), &only_nixl()).unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable, "{error}");
    assert!(error.message().contains("cannot keep them apart"), "{error}");
    drop(remote);
    first.into_storage().unwrap();
    user.import_with(&second.ticket().unwrap(), &only_nixl()).unwrap();
}

#[test]
fn memory_of_a_gpu_is_not_offered_where_ucx_has_no_cuda() {
    let test = "memory_of_a_gpu_is_not_offered_where_ucx_has_no_cuda";
    if std::env::var_os(CHILD).is_none() {
        for variable in [("UCX_TLS", "tcp"), ("UCX_MODULES", "^cuda")] {
            if let Some(calls) = in_a_child("gpus", test, &[variable]) {
                assert_eq!(calls, "", "nothing was registered");
            }
        }
        return;
    }
    let (owner, user) = (options_for("nixl", "owner").open().unwrap(), options("user").open().unwrap());
    let region = owner.register(OnGpu::new(3, LEN), Access::READ_WRITE).unwrap();
    let error = user.import_with(&region.ticket().unwrap(), &only_nixl()).unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable, "{error}");
    assert!(error.message().contains("the owner's UCX has no CUDA"), "{error}");
}
