//! The names of `dynamo_memory::nixl`, on both engines: NIXL where it is installed, and what this library has in its place.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]
#![allow(unsafe_code, reason = "a storage of its own, and registrations by address")]

mod both;
mod files;
mod interop;
mod order;
#[path = "../../../towline-testkit/src/skip.rs"]
#[allow(unreachable_pub, reason = "it is the file of the test kit, which this crate cannot depend on")]
mod skip;
mod wrong;

use std::time::{Duration, Instant};

use towline::memory::MemoryAccess;
use towline::nixl::{
    Availability, Engine, NixlAgent, NixlBackendConfig, NixlRegistered, NotificationMap, OptArgs,
    RegisteredView, XferDescList, XferRequest, availability, is_stub,
};
use towline::{Storage, SystemStorage};

use self::skip::skip;

/// A watchdog, not a measure.
const LIMIT: Duration = Duration::from_secs(60);

/// The engines that this machine has; the one that is missing is reported as skipped.
fn engines(test: &str) -> Vec<Engine> {
    let mut engines = vec![Engine::Embedded];
    if there(&format!("{test} (NIXL)")) {
        engines.push(Engine::Nixl);
    }
    engines
}

/// Whether NIXL is there; else says why the test is skipped.
fn there(test: &str) -> bool {
    let Availability::Missing { tried, .. } = availability() else { return true };
    assert!(is_stub());
    skip(test, "nixl", &format!("NIXL is not there: {}", tried.join("; ")));
    false
}

/// An agent whose name no other test has.
fn agent(name: &str, engine: Engine, backends: &[&str]) -> NixlAgent {
    let config = backends.iter().fold(NixlBackendConfig::default(), |all, one| all.with_backend(one));
    NixlAgent::from_nixl_backend_config(&format!("{name}-{engine}"), config.with_engine(engine)).unwrap()
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 13 + at / 256 + seed) as u8).collect()
}

fn filled(bytes: &[u8]) -> SystemStorage {
    let storage = SystemStorage::new(bytes.len()).unwrap();
    storage.write_at(0, bytes).unwrap();
    storage
}

fn whole<S: Storage>(registered: &NixlRegistered<S>) -> XferDescList {
    let mut list = XferDescList::new(registered.descriptor().mem_type).unwrap();
    list.add_storage_desc(&registered.descriptor()).unwrap();
    list
}

fn run(agent: &NixlAgent, request: &XferRequest, opt: Option<&OptArgs>) {
    if agent.post_xfer_req(request, opt).unwrap() {
        assert!(request.wait_for(LIMIT).unwrap(), "the transfer does not end");
    }
    assert!(agent.get_xfer_status(request).unwrap().is_success());
}

/// What the agent was notified of, once it was notified of something.
fn notified(agent: &NixlAgent) -> NotificationMap {
    let (start, mut came) = (Instant::now(), NotificationMap::new().unwrap());
    while came.is_empty().unwrap() {
        assert!(start.elapsed() < LIMIT);
        agent.get_notifications(&mut came).unwrap();
    }
    came
}

fn notifying(message: &[u8]) -> OptArgs {
    let mut opt = OptArgs::new().unwrap();
    opt.set_notification_message(message).unwrap();
    opt.set_has_notification(true).unwrap();
    opt
}

fn bytes_of(storage: &impl Storage) -> Vec<u8> {
    let mut bytes = vec![0; storage.size()];
    storage.read_at(0, &mut bytes).unwrap();
    bytes
}
