//! What holds on both engines.

use towline::memory::{MemoryAccess, MemoryDescription};
use towline::nixl::{
    Engine, MemType, NixlAgent, NixlCompatible, NixlRegisterExt, RegDescList, RegisteredView, XferDescList,
    XferOp, is_stub, register_with_nixl,
};
use towline::{DiskStorage, Kind, SystemStorage};

use crate::{LIMIT, agent, bytes_of, engines, filled, notified, notifying, pattern, run, whole};

#[test]
fn the_engine_is_nixl_where_it_is_there_and_says_why() {
    let automatic = NixlAgent::new("both-automatic").unwrap();
    let expected = if is_stub() { Engine::Embedded } else { Engine::Nixl };
    assert_eq!(automatic.engine(), expected);
    assert!(format!("{automatic:?}").contains(&format!("engine: {expected:?}")));
    let shown = automatic.to_string();
    assert!(shown.starts_with(&format!("agent both-automatic on the engine {expected} (")), "{shown}");
    assert!(automatic.engine_reason().contains("NIXL"), "{shown}");
    let embedded = NixlAgent::with_engine("both-asked", Engine::Embedded).unwrap();
    assert_eq!((embedded.engine(), embedded.engine_reason()), (Engine::Embedded, "it was asked for"));
    match NixlAgent::with_engine("both-native", Engine::Nixl) {
        Ok(agent) => assert_eq!(agent.engine(), Engine::Nixl),
        Err(error) => assert_eq!(error.kind(), Kind::Unavailable),
    }
}

#[test]
fn every_storage_says_how_nixl_names_it() {
    let system = SystemStorage::new(4096).unwrap();
    let (address, size, kind, device) = system.nixl_params();
    assert_eq!((address.addr(), size, kind, device), (system.addr(), 4096, MemType::Dram, 0));
    let disk = DiskStorage::new(4096).unwrap();
    let (address, size, kind, device) = disk.nixl_params();
    assert!(address.is_null());
    assert_eq!((size, kind, device), (4096, MemType::File, disk.fd()));
}

#[test]
fn registered_storages_are_read_and_written_between_agents() {
    for engine in engines("registered_storages_are_read_and_written_between_agents") {
        let (owner, user) = (agent("names-owner", engine, &["ucx"]), agent("names-user", engine, &["UCX"]));
        let bytes = pattern(1 << 20, 1);
        let source = register_with_nixl(filled(&bytes), &owner, None).unwrap();
        let target = SystemStorage::new(1 << 20).unwrap().register(&user, None).unwrap();
        assert_eq!(source.agent_name(), owner.name());
        assert!(source.is_registered() && source.nixl_descriptor() == Some(source.descriptor()));

        assert_eq!(user.load_remote_md(&owner.get_local_md().unwrap()).unwrap(), owner.name());
        // The list travels by the user's own channel.
        let wire = serde_json::to_vec(&whole(&source)).unwrap();
        let remote: XferDescList = serde_json::from_slice(&wire).unwrap();
        assert!(user.check_remote_metadata(&owner.name(), Some(&remote)));
        user.make_connection(&owner.name(), None).unwrap();

        let mut opt = notifying(b"taken");
        opt.add_backend("ucx").unwrap();
        let request =
            user.create_xfer_req(XferOp::Read, &whole(&target), &remote, &owner.name(), Some(&opt)).unwrap();
        run(&user, &request, Some(&opt));
        assert!(bytes_of(target.storage()) == bytes);
        assert_eq!(notified(&owner).take_notifs().unwrap()[&user.name()], [b"taken"]);
        drop(request);

        // The other way, and a second time with the same request.
        for seed in [7, 8] {
            let bytes = pattern(1 << 20, seed);
            target.storage().write_at(0, &bytes).unwrap();
            let request =
                user.create_xfer_req(XferOp::Write, &whole(&target), &remote, &owner.name(), None).unwrap();
            for _ in 0..2 {
                source.storage().memset(0, 0, 1 << 20).unwrap();
                run(&user, &request, Some(&notifying(b"put")));
                assert_eq!(notified(&owner).get_notifications(&user.name()), [b"put"]);
                assert!(bytes_of(source.storage()) == bytes);
            }
        }
        user.send_notification(&owner.name(), b"a word", None).unwrap();
        assert_eq!(notified(&owner).get_notifications(&user.name()), [b"a word"]);
        assert_eq!(bytes_of(&target.into_storage().unwrap()).len(), 1 << 20);
        user.invalidate_remote_md(&owner.name()).unwrap();
        assert!(!user.check_remote_metadata(&owner.name(), None));
    }
}

#[test]
fn blocks_of_prepared_lists_are_moved_by_index() {
    for engine in engines("blocks_of_prepared_lists_are_moved_by_index") {
        let (owner, user) = (agent("prep-owner", engine, &["UCX"]), agent("prep-user", engine, &["UCX"]));
        let (count, block) = (64, 4096);
        // Two registrations there and one here: the request spans all of them.
        let halves =
            [0, 1].map(|half| filled(&pattern(count / 2 * block, half)).register(&owner, None).unwrap());
        let target = SystemStorage::new(count * block).unwrap().register(&user, None).unwrap();
        let mut remote = XferDescList::new(MemType::Dram).unwrap();
        let mut local = XferDescList::new(MemType::Dram).unwrap();
        for at in 0..count {
            let half = &halves[at / (count / 2)];
            remote.add_desc(half.addr() + at % (count / 2) * block, block, 0).unwrap();
            local.add_desc(target.addr() + at * block, block, 0).unwrap();
        }
        user.load_remote_md(&owner.get_local_md().unwrap()).unwrap();
        let near = user.prepare_xfer_dlist("", &local, None).unwrap();
        let far = user.prepare_xfer_dlist(&owner.name(), &remote, None).unwrap();
        assert_eq!((near.len(), far.len()), (count, count));
        let there: Vec<i32> = (0..count as i32).rev().collect();
        let here: Vec<i32> = (0..count as i32).collect();
        let request =
            user.make_xfer_req(XferOp::Read, &near, &here, &far, &there, Some(&notifying(b"all"))).unwrap();
        run(&user, &request, Some(&notifying(b"all")));
        assert_eq!(notified(&owner).get_notifications(&user.name()), [b"all"]);
        let got = bytes_of(target.storage());
        for at in 0..count {
            let from = count - 1 - at;
            let half = pattern(count / 2 * block, from / (count / 2));
            let expected = &half[from % (count / 2) * block..][..block];
            assert!(&got[at * block..][..block] == expected, "block {at} on {engine}");
        }
        let outside = user.make_xfer_req(XferOp::Read, &near, &[0], &far, &[count as i32], None).unwrap_err();
        assert_eq!(outside.kind(), Kind::Invalid);
        drop((request, near));
        target.into_storage().unwrap();
    }
}

#[test]
fn partial_metadata_reaches_what_it_names_and_nothing_else() {
    for engine in engines("partial_metadata_reaches_what_it_names_and_nothing_else") {
        let (owner, user) = (agent("part-owner", engine, &["UCX"]), agent("part-user", engine, &["UCX"]));
        let bytes = pattern(8192, 5);
        let named = filled(&bytes).register(&owner, None).unwrap();
        let other = filled(&bytes).register(&owner, None).unwrap();
        let mut list = RegDescList::new(MemType::Dram).unwrap();
        let connection = owner.get_local_partial_md(&list, None).unwrap();
        assert_eq!(user.load_remote_md(&connection).unwrap(), owner.name());
        list.add_storage_desc(&named.descriptor()).unwrap();
        user.load_remote_md(&owner.get_local_partial_md(&list, None).unwrap()).unwrap();
        assert!(user.check_remote_metadata(&owner.name(), Some(&whole(&named))));
        assert!(!user.check_remote_metadata(&owner.name(), Some(&whole(&other))));
        let target = SystemStorage::new(8192).unwrap().register(&user, None).unwrap();
        let name = owner.name();
        let request =
            user.create_xfer_req(XferOp::Read, &whole(&target), &whole(&named), &name, None).unwrap();
        run(&user, &request, None);
        assert!(bytes_of(target.storage()) == bytes);
        assert!(user.create_xfer_req(XferOp::Read, &whole(&target), &whole(&other), &name, None).is_err());
        user.invalidate_all_remotes().unwrap();
        assert!(!user.check_remote_metadata(&name, None));
    }
}

#[test]
fn a_registration_dropped_before_its_request_stays_until_that_has_ended() {
    for engine in engines("a_registration_dropped_before_its_request_stays_until_that_has_ended") {
        let agent = agent("names-loop", engine, &["UCX"]);
        let bytes = pattern(1 << 20, 2);
        let source = filled(&bytes).register(&agent, None).unwrap();
        let target = SystemStorage::new(1 << 20).unwrap().register(&agent, None).unwrap();
        let (near, far) = (whole(&target), whole(&source));
        // An agent is a peer of itself.
        let request = agent.create_xfer_req(XferOp::Read, &near, &far, &agent.name(), None).unwrap();
        run(&agent, &request, None);
        assert!(bytes_of(target.storage()) == bytes);
        let going = agent.post_xfer_req(&request, None).unwrap();
        drop((source, agent.clone()));
        if going {
            // On the embedded engine it may have been revoked before its last byte; it ends all the same.
            let ended = request.wait_for(LIMIT);
            assert!(ended.is_err_and(|error| error.kind() == Kind::Stale) || ended_well(&request));
        }
        drop(request);
        // Now it is gone, and no longer a place that a request may name.
        let error = agent.create_xfer_req(XferOp::Read, &far, &near, &agent.name(), None).unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
        assert!(error.message().contains("is not registered with agent names-loop"), "{error}");
    }
}

fn ended_well(request: &towline::nixl::XferRequest) -> bool {
    request.wait_for(LIMIT).is_ok_and(|ended| ended)
}

#[test]
fn memory_is_registered_by_its_address_and_given_back() {
    for engine in engines("memory_is_registered_by_its_address_and_given_back") {
        let (owner, user) = (agent("lent-owner", engine, &["UCX"]), agent("lent-user", engine, &["UCX"]));
        let bytes = pattern(16384, 9);
        let storage = filled(&bytes);
        let (address, size, mem_type, device_id) = storage.nixl_params();
        let descriptor =
            towline::nixl::NixlDescriptor { addr: address.addr() as u64, size, mem_type, device_id };
        // SAFETY: the storage outlives the handle, and nothing refers to its bytes.
        let mut handle = unsafe { owner.register_memory(&descriptor, None) }.unwrap();
        assert_eq!(handle.agent_name(), Some(owner.name()));
        user.load_remote_md(&owner.get_local_md().unwrap()).unwrap();
        let target = SystemStorage::new(16384).unwrap().register(&user, None).unwrap();
        let mut remote = XferDescList::new(mem_type).unwrap();
        remote.add_storage_desc(&descriptor).unwrap();
        let request =
            user.create_xfer_req(XferOp::Read, &whole(&target), &remote, &owner.name(), None).unwrap();
        run(&user, &request, None);
        assert!(bytes_of(target.storage()) == bytes);
        handle.deregister().unwrap();
        handle.deregister().unwrap();
        assert_eq!(handle.agent_name(), None);
        if engine == Engine::Embedded {
            // The request was made before; the memory is gone all the same.
            let posted = user.post_xfer_req(&request, None);
            let ended = posted.and_then(|_| request.wait_for(LIMIT));
            assert_eq!(ended.unwrap_err().kind(), Kind::Stale);
        }
    }
}
