//! What is refused, and how.

use towline::memory::MemoryDescription;
use towline::nixl::{
    Engine, MemType, NixlAgent, NixlRegisterExt, OptArgs, XferDescList, XferOp, register_with_nixl,
};
use towline::{Kind, SystemStorage};

use crate::{agent, bytes_of, engines, filled, there, whole};

#[test]
fn a_refused_registration_gives_back_the_storage_and_the_cause() {
    for engine in engines("a_refused_registration_gives_back_the_storage_and_the_cause") {
        let agent = agent("names-bare", engine, &[]);
        let mut storage = filled(&[7; 4096]);
        if engine == Engine::Nixl {
            // Without a backend there is nobody to take the memory.
            let refused = register_with_nixl(storage, &agent, None).unwrap_err();
            assert!(refused.error.message().contains("nixl_capi_register_mem returned"), "{}", refused.error);
            storage = refused.storage;
        }
        assert_eq!(bytes_of(&storage), [7; 4096]);
        let mut opt = OptArgs::new().unwrap();
        opt.add_backend("UCX").unwrap();
        let refused = storage.register(&agent, Some(&opt)).unwrap_err();
        assert_eq!(refused.error.kind(), Kind::Invalid);
        // With a backend, which every clone then has, it works.
        let clone = agent.clone();
        assert_eq!(agent.require_backend("UCX").unwrap_err().kind(), Kind::Unavailable);
        agent.add_backend("ucx").unwrap();
        clone.require_backend("UCX").unwrap();
        assert_eq!(clone.backends(), ["UCX"]);
        assert_eq!(clone.get_backend("ucx").unwrap().name(), "UCX");
        assert!(clone.get_backend("POSIX").is_none());
        let registered = refused.storage.register(&clone, Some(&opt)).unwrap();
        assert_eq!(bytes_of(&registered.into_storage().unwrap()), [7; 4096]);
        let error = agent.add_backend("NO_SUCH").unwrap_err();
        assert!(error.message().starts_with("backend NO_SUCH: "), "{error}");
    }
}

#[test]
fn metadata_of_the_other_engine_is_refused_by_name() {
    let embedded = agent("wrong-embedded", Engine::Embedded, &["UCX"]);
    let damaged = embedded.load_remote_md(b"towline-agent-\0\x01 and nonsense").unwrap_err();
    assert_eq!(damaged.kind(), Kind::Protocol);
    assert_eq!(embedded.load_remote_md(b"").unwrap_err().kind(), Kind::Protocol);
    let own = embedded.load_remote_md(&embedded.get_local_md().unwrap()).unwrap_err();
    assert_eq!(own.kind(), Kind::Invalid);
    if there("metadata_of_the_other_engine_is_refused_by_name") {
        let native = agent("wrong-native", Engine::Nixl, &["UCX"]);
        for (one, other) in [(&native, &embedded), (&embedded, &native)] {
            let error = one.load_remote_md(&other.get_local_md().unwrap()).unwrap_err();
            assert_eq!(error.kind(), Kind::Unsupported);
            assert!(error.message().contains("both sides need the same"), "{error}");
        }
    }
}

#[test]
fn requests_that_make_no_sense_are_refused_before_a_byte_moves() {
    let (owner, user) =
        (agent("sense-owner", Engine::Embedded, &[]), agent("sense-user", Engine::Embedded, &[]));
    let source = filled(&[1; 8192]).register(&owner, None).unwrap();
    let target = SystemStorage::new(8192).unwrap().register(&user, None).unwrap();
    let (near, far) = (whole(&target), whole(&source));
    let name = owner.name();
    let refused = |near: &XferDescList, far: &XferDescList, peer: &str| {
        user.create_xfer_req(XferOp::Read, near, far, peer, None).unwrap_err().kind()
    };
    assert_eq!(refused(&near, &far, &name), Kind::NotFound, "the metadata is not here");
    user.load_remote_md(&owner.get_local_md().unwrap()).unwrap();
    assert_eq!(refused(&far, &near, &name), Kind::Invalid, "that is not our memory");
    let list = |addr: usize, len: usize| {
        let mut list = XferDescList::new(MemType::Dram).unwrap();
        list.add_desc(addr, len, 0).unwrap();
        list
    };
    assert_eq!(refused(&near, &list(source.addr(), 8193), &name), Kind::NotFound);
    assert_eq!(refused(&near, &list(source.addr(), 4096), &name), Kind::Invalid, "lengths differ");
    assert_eq!(refused(&near, &XferDescList::new(MemType::Dram).unwrap(), &name), Kind::Invalid);
    assert_eq!(refused(&near, &list(usize::MAX, 2), &name), Kind::NotFound);
    let mut mixed = XferDescList::new(MemType::File).unwrap();
    let error = mixed.add_storage_desc(&towline::nixl::RegisteredView::descriptor(&source)).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid);

    // What was made before its peer is forgotten cannot be started after.
    let request = user.create_xfer_req(XferOp::Read, &near, &far, &name, None).unwrap();
    assert_eq!(user.get_xfer_status(&request).unwrap_err().kind(), Kind::Invalid, "it was not posted");
    user.invalidate_remote_md(&name).unwrap();
    assert_eq!(user.post_xfer_req(&request, None).unwrap_err().kind(), Kind::NotFound);
    assert_eq!(user.invalidate_remote_md(&name).unwrap_err().kind(), Kind::NotFound);
    assert_eq!(user.send_notification(&name, b"x", None).unwrap_err().kind(), Kind::NotFound);
}

#[test]
fn a_peer_that_was_started_again_is_another_one() {
    let user = agent("again-user", Engine::Embedded, &[]);
    let target = SystemStorage::new(4096).unwrap().register(&user, None).unwrap();
    let first = NixlAgent::with_engine("again-owner", Engine::Embedded).unwrap();
    let source = filled(&[1; 4096]).register(&first, None).unwrap();
    user.load_remote_md(&first.get_local_md().unwrap()).unwrap();
    let old =
        user.create_xfer_req(XferOp::Read, &whole(&target), &whole(&source), &first.name(), None).unwrap();
    drop((source, first));
    let second = NixlAgent::with_engine("again-owner", Engine::Embedded).unwrap();
    let source = filled(&[2; 4096]).register(&second, None).unwrap();
    user.load_remote_md(&second.get_local_md().unwrap()).unwrap();
    assert!(user.post_xfer_req(&old, None).is_err());
    let new =
        user.create_xfer_req(XferOp::Read, &whole(&target), &whole(&source), &second.name(), None).unwrap();
    crate::run(&user, &new, None);
    assert_eq!(bytes_of(target.storage()), [2; 4096]);
}
