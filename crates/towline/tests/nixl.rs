//! The names of `dynamo_memory::nixl` over the real NIXL, where that is installed.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use std::time::{Duration, Instant};

use towline::memory::{MemoryAccess, MemoryDescription};
use towline::nixl::{
    AgentConfig, Availability, MemType, NixlAgent, NixlBackendConfig, NixlCompatible, NixlRegisterExt,
    NixlRegistered, NotificationMap, OptArgs, RegisteredView, XferDescList, XferOp, XferRequest,
    availability, is_stub, register_with_nixl,
};
use towline::{DiskStorage, Kind, Storage, SystemStorage};

/// A watchdog, not a measure.
const LIMIT: Duration = Duration::from_secs(60);

/// Whether NIXL is there; else says why the test is skipped.
fn there(test: &str) -> bool {
    let Availability::Missing { tried, .. } = availability() else { return true };
    assert!(is_stub());
    skip(test, &format!("NIXL is not there: {}", tried.join("; ")));
    false
}

/// Says that a test cannot run here, past the capture of the harness; or fails it where NIXL is required.
fn skip(test: &str, reason: &str) {
    use std::io::Write;
    let required = std::env::var("TOWLINE_REQUIRE").unwrap_or_default();
    let needed = required.split(',').any(|one| matches!(one.trim(), "nixl" | "all"));
    assert!(!needed, "{test} is required (TOWLINE_REQUIRE={required}), but {reason}");
    std::io::stderr().write_all(format!("SKIPPED {test}: {reason}\n").as_bytes()).unwrap();
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 13 + seed) as u8).collect()
}

fn filled(bytes: &[u8]) -> SystemStorage {
    let storage = SystemStorage::new(bytes.len()).unwrap();
    storage.write_at(0, bytes).unwrap();
    storage
}

fn whole<S: Storage>(registered: &NixlRegistered<S>) -> XferDescList {
    let mut list = XferDescList::new(registered.descriptor().mem_type);
    list.add_storage_desc(registered).unwrap();
    list
}

fn run(agent: &NixlAgent, request: &XferRequest, opt: Option<&OptArgs>) {
    let start = Instant::now();
    let mut going = agent.post_xfer_req(request, opt).unwrap();
    while going {
        assert!(start.elapsed() < LIMIT, "the transfer does not end");
        going = !agent.get_xfer_status(request).unwrap().is_success();
    }
}

fn bytes_of(storage: &impl Storage) -> Vec<u8> {
    let mut bytes = vec![0; storage.size()];
    storage.read_at(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_missing_nixl_is_unavailable_and_says_where_it_was_looked_for() {
    if let Availability::Missing { tried, .. } = availability() {
        let error = NixlAgent::new("nobody").unwrap_err();
        assert_eq!(error.kind(), Kind::Unavailable);
        assert!(tried.iter().all(|place| error.message().contains(place.as_str())), "{error}");
    } else {
        assert_eq!(NixlAgent::new("somebody").unwrap().name(), "somebody");
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
    if !there("registered_storages_are_read_and_written_between_agents") {
        return;
    }
    let config = NixlBackendConfig::default().with_backend("ucx");
    let owner = NixlAgent::from_nixl_backend_config("names-owner", config).unwrap();
    let user = NixlAgent::with_backends("names-user", &["UCX"]).unwrap();
    let bytes = pattern(1 << 20, 1);
    let source = register_with_nixl(filled(&bytes), &owner, None).unwrap();
    let target = SystemStorage::new(1 << 20).unwrap().register(&user, None).unwrap();
    assert_eq!(source.agent_name(), "names-owner");
    assert!(source.is_registered() && source.nixl_descriptor() == Some(source.descriptor()));

    assert_eq!(user.load_remote_md(&owner.get_local_md().unwrap()).unwrap(), "names-owner");
    // The list travels by the user's own channel.
    let wire = serde_json::to_vec(&whole(&source)).unwrap();
    let remote: XferDescList = serde_json::from_slice(&wire).unwrap();
    assert!(user.check_remote_metadata("names-owner", Some(&remote)));
    user.make_connection("names-owner", None).unwrap();

    let mut opt = OptArgs::new();
    opt.add_backend("ucx");
    opt.set_notification_message(b"taken");
    opt.set_has_notification(true);
    let request =
        user.create_xfer_req(XferOp::Read, &whole(&target), &remote, "names-owner", Some(&opt)).unwrap();
    run(&user, &request, Some(&opt));
    assert!(bytes_of(target.storage()) == bytes);
    let (start, mut came) = (Instant::now(), NotificationMap::new());
    while came.is_empty() {
        assert!(start.elapsed() < LIMIT);
        owner.get_notifications(&mut came).unwrap();
    }
    assert_eq!(came.take_notifs()["names-user"], [b"taken"]);

    // The request holds the memory: what is taken back meanwhile comes back with the reason.
    let refused = target.into_storage().unwrap_err();
    assert_eq!(refused.error.kind(), Kind::Exhausted);
    drop(request);
    let storage = refused.storage.unwrap().into_storage().unwrap();
    assert!(bytes_of(&storage) == bytes);
    user.invalidate_remote_md("names-owner").unwrap();
    assert!(!user.check_remote_metadata("names-owner", None));
}

#[test]
fn a_registration_dropped_before_its_request_stays_until_that_has_ended() {
    if !there("a_registration_dropped_before_its_request_stays_until_that_has_ended") {
        return;
    }
    let agent = NixlAgent::with_backends("names-loop", &["UCX"]).unwrap();
    let bytes = pattern(1 << 20, 2);
    let source = filled(&bytes).register(&agent, None).unwrap();
    let target = SystemStorage::new(1 << 20).unwrap().register(&agent, None).unwrap();
    let (near, far) = (whole(&target), whole(&source));
    let request = agent.create_xfer_req(XferOp::Read, &near, &far, "names-loop", None).unwrap();
    drop((source, agent.clone()));
    run(&agent, &request, None);
    assert!(bytes_of(target.storage()) == bytes);
    drop(request);
    // Now it is gone, and no longer a place that a request may name.
    let error = agent.create_xfer_req(XferOp::Read, &far, &near, "names-loop", None).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid);
    assert!(error.message().contains("is not registered with agent names-loop"), "{error}");
}

#[test]
fn a_refused_registration_gives_back_the_storage_and_the_cause() {
    if !there("a_refused_registration_gives_back_the_storage_and_the_cause") {
        return;
    }
    let agent = NixlAgent::new("names-bare").unwrap();
    let refused = register_with_nixl(filled(&[7; 4096]), &agent, None).unwrap_err();
    assert!(refused.error.message().contains("nixl_capi_register_mem returned"), "{}", refused.error);
    assert_eq!(bytes_of(&refused.storage), [7; 4096]);
    let mut opt = OptArgs::new();
    opt.add_backend("UCX");
    let refused = refused.storage.register(&agent, Some(&opt)).unwrap_err();
    assert_eq!(refused.error.kind(), Kind::Invalid);
    // With a backend, which every clone then has, it works.
    let clone = agent.clone();
    assert_eq!(agent.require_backend("UCX").unwrap_err().kind(), Kind::Unavailable);
    agent.add_backend("ucx").unwrap();
    clone.require_backend("UCX").unwrap();
    assert_eq!(clone.backends(), ["UCX"]);
    let registered = refused.storage.register(&clone, Some(&opt)).unwrap();
    assert_eq!(bytes_of(&registered.into_storage().unwrap()), [7; 4096]);
    let error = agent.add_backend("NO_SUCH").unwrap_err();
    assert!(error.message().starts_with("backend NO_SUCH: "), "{error}");
}

#[test]
fn a_file_is_written_and_read_through_the_posix_plugin() {
    if !there("a_file_is_written_and_read_through_the_posix_plugin") {
        return;
    }
    let config = AgentConfig { capture_telemetry: true, ..AgentConfig::default() };
    let agent = NixlAgent::new_with_config("names-posix", &config).unwrap();
    if !agent.get_available_plugins().unwrap().iter().any(|plugin| plugin == "POSIX") {
        skip("a_file_is_written_and_read_through_the_posix_plugin", "this NIXL has no plug-in POSIX");
        return;
    }
    agent.add_backend("POSIX").unwrap();
    let len = 256 << 10;
    let bytes = pattern(len, 3);
    let memory = filled(&bytes).register(&agent, None).unwrap();
    let file = DiskStorage::new(len).unwrap().register(&agent, None).unwrap();
    let (near, far) = (whole(&memory), whole(&file));
    let request = agent.create_xfer_req(XferOp::Write, &near, &far, "names-posix", None).unwrap();
    run(&agent, &request, None);
    assert_eq!(request.get_telemetry().unwrap().total_bytes, len as u64);
    assert!(std::fs::read(file.storage().path()).unwrap() == bytes);
    memory.storage().memset(0, 0, len).unwrap();
    let request = agent.create_xfer_req(XferOp::Read, &near, &far, "names-posix", None).unwrap();
    run(&agent, &request, None);
    assert!(bytes_of(memory.storage()) == bytes);
}
