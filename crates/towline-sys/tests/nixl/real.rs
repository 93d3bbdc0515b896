//! The real library, where it is installed: `pip install nixl-cu12` into the project's `.venv` or any other place that
//! the search knows.
#![allow(unsafe_code, reason = "registers memory by its address")]

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use towline_sys::Error;
use towline_sys::nixl::{
    Agent, AgentConfig, Backend, Descriptor, Direction, MemoryKind, Nixl, Notification, Options, Progress,
    Registration, RegistrationList, Request, TransferList,
};

use crate::skip;

/// A watchdog, not a measure: on a loaded machine the first connection takes seconds.
const LIMIT: Duration = Duration::from_secs(60);

/// The library, or a line that says why the test is skipped.
fn nixl(test: &str) -> Option<Nixl> {
    match Nixl::load().or_else(|error| in_project().unwrap_or(Err(error))) {
        Ok(nixl) => Some(nixl),
        Err(error) => {
            skip(test, "nixl", &error.to_string());
            None
        }
    }
}

/// What is in the project's own virtual environment.
fn in_project() -> Option<Result<Nixl, Error>> {
    let lib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/lib");
    let pythons = std::fs::read_dir(lib).ok()?;
    let mut packages = pythons.filter_map(|python| Some(python.ok()?.path().join("site-packages")));
    packages.find_map(|folder| Nixl::load_from(folder).ok()).map(Ok)
}

/// An agent with UCX and some memory of its own.
struct Worker {
    agent: Agent,
    ucx: Backend,
    // The registration goes before the memory that it is of.
    registration: Option<Registration>,
    memory: Vec<u8>,
}

impl Worker {
    fn new(nixl: &Nixl, name: &str, memory: Vec<u8>) -> Worker {
        let mut config = AgentConfig::default();
        config.telemetry = true;
        let agent = nixl.agent(name, &config).unwrap();
        let ucx = agent.create_backend("UCX", &BTreeMap::new()).unwrap();
        let range = Descriptor { address: memory.as_ptr() as u64, length: memory.len() as u64, device: 0 };
        let list = RegistrationList::new(nixl, MemoryKind::Dram, [range]).unwrap();
        // SAFETY: the worker drops the registration before the memory, and tests wait for their transfers.
        let registration = unsafe { agent.register(list, &Options::default()) }.unwrap();
        Worker { agent, ucx, registration: Some(registration), memory }
    }

    fn part(&self, offset: usize, length: usize) -> Descriptor {
        assert!(offset + length <= self.memory.len());
        let address = self.memory.as_ptr() as u64 + offset as u64;
        Descriptor { address, length: length as u64, device: 0 }
    }

    fn list(&self, nixl: &Nixl, parts: impl IntoIterator<Item = (usize, usize)>) -> TransferList {
        let parts = parts.into_iter().map(|(offset, length)| self.part(offset, length));
        TransferList::new(nixl, MemoryKind::Dram, parts).unwrap()
    }

    /// The bytes, read past the compiler's idea of who may have changed them.
    fn bytes(&self) -> Vec<u8> {
        let start = self.memory.as_ptr();
        // SAFETY: all of the vector's own memory, and no transfer is in progress when this is called.
        (0..self.memory.len()).map(|at| unsafe { start.add(at).read_volatile() }).collect()
    }
}

fn finish(request: &mut Request, posted: Progress) {
    let start = Instant::now();
    let mut progress = posted;
    while progress == Progress::InProgress {
        assert!(start.elapsed() < LIMIT, "the transfer does not end");
        progress = request.progress().unwrap();
    }
}

fn await_messages(agent: &Agent, count: usize) -> Vec<Notification> {
    let start = Instant::now();
    let mut messages = Vec::new();
    while messages.len() < count {
        assert!(start.elapsed() < LIMIT, "{messages:?} is all that came");
        messages.extend(agent.notifications().unwrap());
    }
    messages
}

fn pattern(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 31 + seed) as u8).collect()
}

#[test]
fn an_agent_lists_its_plugins_and_their_parameters() {
    let Some(nixl) = nixl("an_agent_lists_its_plugins_and_their_parameters") else { return };
    assert!(nixl.path().ends_with("libnixl_capi.so"), "{}", nixl.path().display());
    assert_eq!(nixl.is_wheel(), nixl.version().is_some());
    let agent = nixl.agent("lister", &AgentConfig::default()).unwrap();
    let plugins = agent.plugins().unwrap();
    assert!(plugins.iter().any(|plugin| plugin == "UCX"), "{plugins:?}");
    let ucx = agent.plugin("UCX").unwrap();
    assert!(ucx.memory.contains(&MemoryKind::Dram), "{ucx:?}");
    let backend = agent.create_backend("UCX", &BTreeMap::new()).unwrap();
    assert!(backend.description().unwrap().memory.contains(&MemoryKind::Dram));
    let error = agent.plugin("NO_SUCH_PLUGIN").unwrap_err();
    assert!(error.to_string().starts_with("nixl_capi_get_plugin_params returned "), "{error}");
    assert!(agent.create_backend("NO_SUCH_PLUGIN", &BTreeMap::new()).is_err());
}

#[test]
fn two_agents_move_bytes_and_tell_each_other() {
    let Some(nixl) = nixl("two_agents_move_bytes_and_tell_each_other") else { return };
    if let Some(expected) = std::env::var_os("TOWLINE_TEST_UCX_MODULES") {
        assert_eq!(std::env::var_os("UCX_MODULES"), Some(expected));
    }
    let source = pattern(1 << 20, 7);
    let owner = Worker::new(&nixl, "owner", source.clone());
    let reader = Worker::new(&nixl, "reader", vec![0; 1 << 20]);
    assert!(!reader.agent.knows("owner", None).unwrap());
    assert_eq!(reader.agent.load_metadata(&owner.agent.metadata().unwrap()).unwrap(), "owner");
    assert_eq!(owner.agent.load_metadata(&reader.agent.metadata().unwrap()).unwrap(), "reader");
    let remote = owner.list(&nixl, [(0, 1 << 20)]);
    assert!(reader.agent.knows("owner", Some(&remote)).unwrap());
    reader.agent.connect("owner", &Options::default()).unwrap();

    // A read, with a message to the owner.
    let local = reader.list(&nixl, [(0, 1 << 20)]);
    // SAFETY: both workers outlive the request.
    let request =
        unsafe { reader.agent.request(Direction::Read, &local, &remote, "owner", &Options::default()) };
    let mut request = request.unwrap();
    let posted = request.post(Some(b"taken\0all")).unwrap();
    finish(&mut request, posted);
    assert!(reader.bytes() == source);
    let notification = Notification { peer: "reader".into(), message: b"taken\0all".to_vec() };
    assert_eq!(await_messages(&owner.agent, 1), [notification]);
    assert_eq!(request.telemetry().unwrap().bytes, 1 << 20);
    request.release().unwrap();

    // A write over part of it, on a backend that is named.
    let (from, to) = (reader.list(&nixl, [(64, 4096)]), owner.list(&nixl, [(8192, 4096)]));
    let options = Options::on(std::slice::from_ref(&reader.ucx));
    // SAFETY: both workers outlive the request.
    let mut request =
        unsafe { reader.agent.request(Direction::Write, &from, &to, "owner", &options) }.unwrap();
    let posted = request.post(None).unwrap();
    finish(&mut request, posted);
    request.release().unwrap();
    let mut expected = source.clone();
    expected[8192..8192 + 4096].copy_from_slice(&source[64..64 + 4096]);
    // The write is done here; that it is visible there is what a message behind it says.
    reader.agent.notify("owner", b"done", &Options::default()).unwrap();
    assert_eq!(await_messages(&owner.agent, 1)[0].message, b"done");
    assert!(owner.bytes() == expected);

    // Forgotten is forgotten.
    reader.agent.forget("owner").unwrap();
    assert!(!reader.agent.knows("owner", None).unwrap());
}

#[test]
fn prepared_lists_serve_many_requests_by_index() {
    let Some(nixl) = nixl("prepared_lists_serve_many_requests_by_index") else { return };
    let source = pattern(64 * 4096, 3);
    let owner = Worker::new(&nixl, "prepared-owner", source.clone());
    let reader = Worker::new(&nixl, "prepared-reader", vec![0; 64 * 4096]);
    reader.agent.load_metadata(&owner.agent.metadata().unwrap()).unwrap();
    let blocks = || (0..64).map(|block| (block * 4096, 4096));
    let local = reader.agent.prepare_local(&reader.list(&nixl, blocks()), &Options::default()).unwrap();
    let remote = reader
        .agent
        .prepare_remote("prepared-owner", &owner.list(&nixl, blocks()), &Options::default())
        .unwrap();
    let mut expected = vec![0; 64 * 4096];
    for (to, from) in [(vec![0, 5, 9], vec![63, 0, 5]), (vec![1, 2], vec![2, 1])] {
        // SAFETY: both workers outlive the request.
        let request = unsafe {
            reader.agent.request_prepared(
                Direction::Read,
                (&local, &to),
                (&remote, &from),
                &Options::default(),
            )
        };
        let mut request = request.unwrap();
        let posted = request.post(None).unwrap();
        finish(&mut request, posted);
        for (to, from) in to.iter().zip(&from).map(|(to, from)| (*to as usize, *from as usize)) {
            expected[to * 4096..][..4096].copy_from_slice(&source[from * 4096..][..4096]);
        }
    }
    assert!(reader.bytes() == expected);
    for (to, from) in [(vec![64], vec![0]), (vec![0], vec![-1]), (vec![0], vec![0, 1]), (vec![], vec![])] {
        // SAFETY: both workers outlive the request, which is not even made.
        let refused = unsafe {
            reader.agent.request_prepared(
                Direction::Read,
                (&local, &to),
                (&remote, &from),
                &Options::default(),
            )
        };
        assert!(matches!(refused.unwrap_err(), Error::Argument { .. }));
    }
}

#[test]
fn partial_metadata_opens_the_named_range_and_no_other() {
    let Some(nixl) = nixl("partial_metadata_opens_the_named_range_and_no_other") else { return };
    let owner = Worker::new(&nixl, "partial-owner", pattern(4096, 1));
    let other = pattern(4096, 2);
    let range = Descriptor { address: other.as_ptr() as u64, length: 4096, device: 0 };
    let list = RegistrationList::new(&nixl, MemoryKind::Dram, [range]).unwrap();
    // SAFETY: `other` lives to the end of the test and the registration is given back before.
    let hidden = unsafe { owner.agent.register(list, &Options::default()) }.unwrap();
    let reader = Worker::new(&nixl, "partial-reader", vec![0; 4096]);

    let contact = RegistrationList::new(&nixl, MemoryKind::Dram, []).unwrap();
    let contact = owner.agent.partial_metadata(&contact, &Options::default()).unwrap();
    let options = Options::on(std::slice::from_ref(&owner.ucx));
    let ranges = owner.agent.partial_metadata(owner.registration.as_ref().unwrap().list(), &options).unwrap();
    let full = owner.agent.metadata().unwrap();
    assert!(ranges.len() < full.len(), "{} and {}", ranges.len(), full.len());
    assert_eq!(reader.agent.load_metadata(&contact).unwrap(), "partial-owner");
    assert_eq!(reader.agent.load_metadata(&ranges).unwrap(), "partial-owner");

    let shown = owner.list(&nixl, [(0, 4096)]);
    assert!(reader.agent.knows("partial-owner", Some(&shown)).unwrap());
    let kept = TransferList::new(&nixl, MemoryKind::Dram, [range]).unwrap();
    assert!(!reader.agent.knows("partial-owner", Some(&kept)).unwrap());
    let local = reader.list(&nixl, [(0, 4096)]);
    // SAFETY: the workers outlive the requests.
    let refused =
        unsafe { reader.agent.request(Direction::Read, &local, &kept, "partial-owner", &Options::default()) };
    assert!(refused.is_err());
    // SAFETY: as above.
    let request = unsafe {
        reader.agent.request(Direction::Read, &local, &shown, "partial-owner", &Options::default())
    };
    let mut request = request.unwrap();
    let posted = request.post(None).unwrap();
    finish(&mut request, posted);
    assert_eq!(reader.bytes(), pattern(4096, 1));
    hidden.deregister().unwrap();
}

#[test]
fn an_agent_stays_for_as_long_as_something_made_with_it() {
    let Some(nixl) = nixl("an_agent_stays_for_as_long_as_something_made_with_it") else { return };
    let Worker { agent, ucx, mut registration, memory } = Worker::new(&nixl, "short", vec![0; 4096]);
    let range = Descriptor { address: memory.as_ptr() as u64, length: 4096, device: 0 };
    let list = TransferList::new(&nixl, MemoryKind::Dram, [range]).unwrap();
    let prepared = agent.prepare_local(&list, &Options::default()).unwrap();
    let weak = format!("{agent:?}");
    drop(agent);
    assert!(ucx.description().unwrap().memory.contains(&MemoryKind::Dram), "{weak}");
    registration.take().unwrap().deregister().unwrap();
    drop(ucx);
    drop(prepared);
}

#[test]
fn a_backend_of_another_agent_and_garbage_for_metadata_are_refused() {
    let Some(nixl) = nixl("a_backend_of_another_agent_and_garbage_for_metadata_are_refused") else { return };
    let one = Worker::new(&nixl, "one", vec![0; 4096]);
    let two = Worker::new(&nixl, "two", vec![0; 4096]);
    let error = two.agent.notify("one", b"x", &Options::on(std::slice::from_ref(&one.ucx))).unwrap_err();
    assert_eq!(error.to_string(), "nixl_capi_gen_notif: the backend UCX is another agent's");
    assert!(two.agent.load_metadata(b"this is not metadata").is_err());
    assert!(two.agent.load_metadata(b"").is_err());
    assert!(two.agent.connect("nobody", &Options::default()).is_err());
}

/// What this process holds in memory, in bytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

#[test]
fn a_thousand_registrations_and_transfers_leave_nothing_behind() {
    const ALONE: &str = "TOWLINE_TEST_ALONE";
    let name = "a_thousand_registrations_and_transfers_leave_nothing_behind";
    let Some(nixl) = nixl(name) else { return };
    if std::env::var_os(ALONE).is_none() {
        // In a process of its own, whose memory no other test changes.
        let mut child = Command::new(std::env::current_exe().unwrap());
        let output = child.args(["--exact", &format!("real::{name}")]).env(ALONE, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let owner = Worker::new(&nixl, "patient-owner", pattern(64 << 10, 5));
    let reader = Worker::new(&nixl, "patient-reader", vec![0; 4096]);
    reader.agent.load_metadata(&owner.agent.metadata().unwrap()).unwrap();
    let target = vec![0u8; 64 << 10];
    let round = |number: usize| {
        let range = Descriptor { address: target.as_ptr() as u64, length: 64 << 10, device: 0 };
        let list = RegistrationList::new(&nixl, MemoryKind::Dram, [range]).unwrap();
        // SAFETY: `target` outlives the round, at whose end nothing of it is left.
        let registration = unsafe { reader.agent.register(list, &Options::default()) }.unwrap();
        let local = TransferList::new(&nixl, MemoryKind::Dram, [range]).unwrap();
        let remote = owner.list(&nixl, [(0, 64 << 10)]);
        // SAFETY: as above, and the owner outlives it too.
        let mut request = unsafe {
            reader.agent.request(Direction::Read, &local, &remote, "patient-owner", &Options::default())
        }
        .unwrap();
        let posted = request.post(Some(&number.to_le_bytes())).unwrap();
        finish(&mut request, posted);
        request.release().unwrap();
        registration.deregister().unwrap();
        assert_eq!(await_messages(&owner.agent, 1)[0].message, number.to_le_bytes());
    };
    (0..200).for_each(round);
    let before = resident();
    (200..1200).for_each(round);
    let grown = resident().saturating_sub(before);
    // NIXL's own caches have settled by then; half a page that stayed in every round would show.
    assert!(grown < 2 << 20, "{grown} bytes more after a thousand rounds");
}

#[test]
fn a_process_that_used_nixl_ends_cleanly_without_the_users_help() {
    let name = "a_process_that_used_nixl_ends_cleanly_without_the_users_help";
    let Some(nixl) = nixl(name) else { return };
    if !nixl.is_wheel() {
        skip(name, "nixl", "NIXL comes from the system, whose UCX is left as it is");
        return;
    }
    // Without a setting, and with one of the user's own, which must stay.
    for (set, expected) in [(None, "^efa"), (Some("^efa,cma"), "^efa,cma")] {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "real::two_agents_move_bytes_and_tell_each_other"]);
        child.env("TOWLINE_TEST_UCX_MODULES", expected).env_remove("UCX_MODULES");
        if let Some(set) = set {
            child.env("UCX_MODULES", set);
        }
        let output = child.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.signal(), None, "the process crashed when it ended");
        assert!(output.status.success());
    }
}
