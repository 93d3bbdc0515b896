//! The path `nixl` beyond the laws: what it costs programs that do not use it, two hosts, death, growth, broken libraries.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use std::path::Path;
use std::time::Duration;

use towline::{Access, Endpoint, Kind, NixlOptions, Part, Probe, Registered, Routing, SystemStorage, Ticket};
use towline_testkit::bench::{STALL, options, options_for};
use towline_testkit::lending;
use towline_testkit::netns::{End, Network};
use towline_testkit::oracle::Stamp;
use towline_testkit::process::Process;
use towline_testkit::skip;
use towline_testkit::watchdog::{eventually, watch};

const MIB: usize = 1 << 20;

/// Whether NIXL is here; says so where it is not.
fn nixl(test: &str) -> bool {
    let paths = towline::paths();
    match &paths.iter().find(|path| path.name == "nixl").unwrap().probe {
        Probe::Works(_) => true,
        Probe::Missing { reason, .. } => {
            skip::skip(test, "nixl", reason);
            false
        }
    }
}

/// Whether this runs over an RDMA device in software, which is slow.
fn rdma() -> bool {
    std::env::var_os("TOWLINE_EXPECT_RDMA").is_some()
}

fn stall() -> String {
    format!("stall={}", STALL.as_millis())
}

fn only_nixl() -> Routing {
    Routing::default().require("nixl").unwrap()
}

fn user() -> Endpoint {
    options("user").open().unwrap()
}

/// The words with which an owner opens that lends.
fn lending() -> String {
    format!("{} {}", stall(), lending::words("nixl"))
}

fn memory(endpoint: &Endpoint, len: usize) -> Registered<SystemStorage> {
    endpoint.register(SystemStorage::new(len).unwrap(), Access::NONE).unwrap()
}

/// Whether a library whose name contains that is mapped, and the threads' names.
fn loaded(pid: i32) -> (bool, Vec<String>) {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let names = threads.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    (maps.contains("/libnixl"), names.map(|name| name.trim().to_owned()).collect())
}

#[test]
fn a_program_that_does_not_ask_for_nixl_pays_nothing_for_it() {
    let test = "a_program_that_does_not_ask_for_nixl_pays_nothing_for_it";
    let _watchdog = watch(test, STALL * 12);
    let mut owner = Process::open("owner", &lending());
    let mut user = Process::open("user", &stall());
    owner.must("register 65536 system read+write");
    owner.must("fill 1 1 1");
    let ticket = owner.must("ticket 1").text(0).to_owned();
    user.must("register 65536 system none");
    for paths in ["", "unix", "tcp"] {
        let remote = user.must(&format!("import {ticket} {paths}")).number(0);
        user.must(&format!("read {remote} 1 0 0 65536"));
    }
    for process in [&mut owner, &mut user] {
        assert_eq!(process.must("stats-nixl").text(0), "none");
        let (mapped, threads) = loaded(process.pid());
        assert!(!mapped, "NIXL was loaded");
        assert!(!threads.iter().any(|name| name == "towline-nixl"), "{threads:?}");
    }
}

#[test]
fn the_thread_leaves_when_nothing_is_in_flight_and_the_agent_stays() {
    let test = "the_thread_leaves_when_nothing_is_in_flight_and_the_agent_stays";
    if !nixl(test) {
        return;
    }
    let _watchdog = watch(test, STALL * 12);
    let mut owner = Process::open("owner", &lending());
    let mut user = Process::open("user", &stall());
    owner.must("register 65536 system read+write");
    let ticket = owner.must("ticket 1").text(0).to_owned();
    user.must("register 65536 system none");
    let remote = user.must(&format!("import {ticket} nixl")).number(0);
    assert_eq!(user.must(&format!("read {remote} 1 0 0 65536")).text(0), "nixl");
    for process in [&mut owner, &mut user] {
        let pid = process.pid();
        assert!(loaded(pid).0);
        assert!(eventually(STALL, || !loaded(pid).1.iter().any(|name| name == "towline-nixl")));
        let stats = process.must("stats-nixl");
        assert_eq!((stats.number(0), stats.number(2)), (1, 0), "registered and in flight");
    }
}

#[test]
fn an_owner_that_has_not_opted_in_refuses_who_requires_nixl_and_says_how_it_would_lend() {
    let test = "an_owner_that_has_not_opted_in_refuses_who_requires_nixl_and_says_how_it_would_lend";
    if !nixl(test) {
        return;
    }
    let _watchdog = watch(test, STALL * 12);
    let mut silent = Process::open("owner", &stall());
    let mut lender = Process::open("owner", &lending());
    let ticket_of = |owner: &mut Process| -> Ticket {
        owner.must("register 65536 system read+write");
        owner.must("ticket 1").text(0).parse().unwrap()
    };
    let (unlent, lent) = (ticket_of(&mut silent), ticket_of(&mut lender));
    let user = user();
    let with_help = only_nixl().require("unix").unwrap();
    for ticket in [&unlent, &lent.narrow().range(0, 65535).finish().unwrap()] {
        let error = user.import_with(ticket, &only_nixl()).unwrap_err();
        assert_eq!(error.kind(), Kind::Unavailable, "{error}");
        assert!(error.message().contains("NixlOptions::lend_over"), "{error}");
        let remote = user.import_with(ticket, &with_help).unwrap();
        assert_eq!(remote.path(), "unix");
        assert!(remote.explain().to_string().contains("nixl_lend_over in Python"), "{}", remote.explain());
    }
    assert_eq!(silent.must("stats-nixl").text(0), "none", "the owner has started NIXL");
    // Where it is lent, the explanation says what that gives away.
    let remote = user.import_with(&lent, &with_help).unwrap();
    let said = remote.explain().to_string();
    assert!(remote.path() == "nixl" && said.contains("all memory of the other's process"), "{said}");
}

/// The addresses on which a process listens, and those of its datagram sockets, as the kernel writes them.
fn listening(pid: i32) -> Vec<String> {
    let links = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let sockets: Vec<_> = links.filter_map(|link| std::fs::read_link(link.ok()?.path()).ok()).collect();
    let mut found = Vec::new();
    for (table, state) in [("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")] {
        let text = std::fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap();
        for line in text.lines().skip(1) {
            let words: Vec<_> = line.split_whitespace().collect();
            let socket = format!("socket:[{}]", words[9]);
            if words[3] == state && sockets.iter().any(|one| one.as_os_str() == socket.as_str()) {
                found.push(format!("{table} {}", words[1]));
            }
        }
    }
    found
}

/// UCX takes every interface that it is not kept from. Its own variable does not let it have more either.
#[test]
fn nixl_listens_only_on_the_devices_that_were_named_and_an_initiators_too() {
    let test = "nixl_listens_only_on_the_devices_that_were_named_and_an_initiators_too";
    if !nixl(test) {
        return;
    }
    let _watchdog = watch(test, STALL * 12);
    for variable in [None, Some("lo"), Some("all")] {
        let mut variables = vec![("UCX_LOG_LEVEL", "error")];
        variables.extend(variable.map(|devices| ("UCX_NET_DEVICES", devices)));
        let start = |name| Process::start_with(name, &variables);
        let (mut owner, mut user) = (start("owner"), start("user"));
        owner.must(&format!("open owner {} lend=lo", stall()));
        user.must(&format!("open user {} reach=lo", stall()));
        owner.must("register 65536 system read+write");
        let ticket = owner.must("ticket 1").text(0).to_owned();
        user.must("register 65536 system none");
        let before = [listening(owner.pid()), listening(user.pid())];
        let remote = user.must(&format!("import {ticket} nixl")).number(0);
        user.must(&format!("read {remote} 1 0 0 65536"));
        for (process, before) in [owner, user].iter().zip(before) {
            let new: Vec<_> =
                listening(process.pid()).into_iter().filter(|one| !before.contains(one)).collect();
            assert!(!new.is_empty(), "UCX listens nowhere: the test sees nothing");
            // 127.0.0.1, as the kernel writes it.
            assert!(new.iter().all(|one| one.starts_with("tcp 0100007F:")), "{new:?}");
        }
    }
}

#[test]
fn without_a_device_an_initiator_starts_nothing_that_listens() {
    let test = "without_a_device_an_initiator_starts_nothing_that_listens";
    if !nixl(test) {
        return;
    }
    if std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some()) {
        return skip::skip(test, "no RDMA device", "this machine has one, which is taken");
    }
    let _watchdog = watch(test, STALL * 12);
    let mut owner = Process::open("owner", &lending());
    owner.must("register 65536 system read+write");
    let ticket = owner.must("ticket 1").text(0).parse().unwrap();
    let user = Endpoint::open("user").unwrap();
    let error = user.import_with(&ticket, &only_nixl()).unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable, "{error}");
    assert!(error.message().contains("NixlOptions::reach_over"), "{error}");
    assert!(user.stats().nixl.is_none(), "NIXL was started");
    let error =
        Endpoint::options("user").nixl(NixlOptions::default().lend_over(["mlx5_99:1"])).open().unwrap_err();
    assert!(error.kind() == Kind::Unavailable && error.message().contains("mlx5_99:1"), "{error}");
}

/// Starting NIXL takes long on both sides, and cannot be stopped.
#[test]
fn an_import_does_not_wait_for_nixl_beyond_its_limit_and_a_later_one_finds_it() {
    let test = "an_import_does_not_wait_for_nixl_beyond_its_limit_and_a_later_one_finds_it";
    if !nixl(test) {
        return;
    }
    let _watchdog = watch(test, STALL * 12);
    let mut owner = Process::open("owner", &lending());
    owner.must("register 65536 system read+write");
    let ticket = owner.must("ticket 1").text(0).parse().unwrap();
    let with_help = only_nixl().require("unix").unwrap();
    for routing in [only_nixl(), with_help] {
        let user = user();
        user.import_with(&ticket, &Routing::default().require("unix").unwrap()).unwrap();
        match user.import_within(&ticket, &routing, Duration::from_millis(50)) {
            Ok(remote) if remote.path() == "unix" => {
                let reasons = remote.explain().to_string();
                assert!(reasons.contains("in time"), "{reasons}");
            }
            // A fast machine.
            Ok(remote) => assert_eq!(remote.path(), "nixl"),
            Err(error) => assert_eq!(error.kind(), Kind::Timeout, "{error}"),
        }
        let found = || user.import_with(&ticket, &routing).is_ok_and(|remote| remote.path() == "nixl");
        assert!(eventually(STALL * 6, found), "NIXL was started, and is not found");
    }
}

/// Reads and writes between two processes, whatever UCX chooses; by that control connection.
fn both_ways(owner: &mut Process, user: &mut Process, paths: &str) {
    let len = if rdma() { 3 * MIB } else { 24 * MIB };
    let id = owner.must(&format!("register {len} system read+write")).number(0);
    owner.must(&format!("fill {id} 1 1"));
    let ticket = owner.must(&format!("ticket {id}")).text(0).to_owned();
    let local = user.must(&format!("register {len} system none")).number(0);
    let imported = user.must(&format!("import {ticket} {paths}"));
    let remote = imported.number(0);
    assert_eq!(imported.text(1), "nixl");
    assert_eq!(user.must(&format!("read {remote} {local} 0 0 {len}")).text(0), "nixl");
    user.must(&format!("check {local} 1 1 0 {len}"));
    user.must(&format!("fill {local} 2 2"));
    user.must(&format!("write {remote} {local} 4096 4096 {}", len / 2));
    owner.must(&format!("check {id} 2 2 4096 {}", len / 2));
    owner.must(&format!("check {id} 1 1 0 4096"));
    assert!(user.ask_with(&format!("notify {remote}"), b"hello").is_ok());
    assert_eq!(owner.must("receive 20000").payload, b"hello");
    // A region that is taken back is stale at once, and its memory is not given back before the peer has let go.
    owner.must(&format!("deregister {id} 20000"));
    let late = user.ask(&format!("read {remote} {local} 0 0 64")).unwrap_err();
    assert_eq!(late.kind, Kind::Stale, "{late}");
    let stats = owner.must("stats");
    assert_eq!((stats.number(0), stats.number(1)), (0, 0), "regions and parked storages");
    assert_eq!(owner.must("stats-nixl").number(0), 0, "registered with NIXL");
}

#[test]
fn two_processes_read_and_write() {
    let test = "two_processes_read_and_write";
    if !nixl(test) {
        return;
    }
    let _watchdog = watch(test, STALL * 24);
    let mut owner = Process::open("owner", &lending());
    let mut user = Process::open("user", &stall());
    both_ways(&mut owner, &mut user, "nixl");
    both_ways(&mut owner, &mut user, "nixl");
}

#[test]
fn many_parts_of_mixed_sizes_are_one_request() {
    let test = "many_parts_of_mixed_sizes_are_one_request";
    if !nixl(test) {
        return;
    }
    let _watchdog = watch(test, STALL * 24);
    let mut owner = Process::open("owner", &lending());
    let user = user();
    let lens: Vec<usize> = (0..64).map(|part| if part % 8 == 3 { 65536 + part } else { 8 + part }).collect();
    let mut regions = |len: &usize| {
        let id = owner.must(&format!("register {len} system read+write")).number(0);
        owner.must(&format!("fill {id} {id} 1"));
        let ticket = owner.must(&format!("ticket {id}")).text(0).parse().unwrap();
        (id, user.import_with(&ticket, &only_nixl()).unwrap())
    };
    let remotes: Vec<_> = lens.iter().map(&mut regions).collect();
    let locals: Vec<_> = lens.iter().map(|len| memory(&user, *len)).collect();
    let parts = || remotes.iter().zip(&locals).map(|((_, remote), local)| Part::new(remote, local));
    user.read_parts(parts()).start().unwrap().wait().unwrap();
    assert_eq!(user.stats().nixl.unwrap().posted, 1);
    for (((id, _), local), len) in remotes.iter().zip(&locals).zip(&lens) {
        Stamp::new(*id as u16, 1).verify_storage(local.storage(), 0, *len).unwrap();
        Stamp::new(*id as u16, 2).fill_storage(local.storage()).unwrap();
    }
    user.write_parts(parts()).notify("all of them").start().unwrap().wait().unwrap();
    assert_eq!(user.stats().nixl.unwrap().posted, 2);
    assert_eq!(owner.must("receive 20000").payload, b"all of them");
    for ((id, _), len) in remotes.iter().zip(&lens) {
        owner.must(&format!("check {id} {id} 2 0 {len}"));
    }
}

#[test]
fn bytes_cross_between_two_hosts_by_ucx_over_tcp() {
    let test = "bytes_cross_between_two_hosts_by_ucx_over_tcp";
    if !nixl(test) {
        return;
    }
    let network = match Network::build() {
        Ok(network) => network,
        Err(reason) => return skip::skip(test, "netns", &reason),
    };
    let _watchdog = watch(test, STALL * 24);
    let mut owner = Process::start_in(&network.namespace(End::A), "owner");
    let mut user = Process::start_in(&network.namespace(End::B), "user");
    let address = std::net::SocketAddr::new(network.address(End::A, false), 0);
    owner.must(&format!("open owner listen={address} lend=tcp stall={}", STALL.as_millis()));
    user.must(&format!("open user reach=tcp stall={}", STALL.as_millis()));
    // Nothing here is better than tcp, so it is not taken without being asked for.
    owner.must("register 4096 system read+write");
    let ticket = owner.must("ticket 1").text(0).to_owned();
    assert_eq!(user.must(&format!("import {ticket}")).text(1), "tcp");
    assert_eq!(user.must("stats-nixl").text(0), "none");
    owner.must("deregister 1 20000");
    both_ways(&mut owner, &mut user, "nixl");
    both_ways(&mut owner, &mut user, "nixl");
    // A peer that dies while it has borrowed a region does not keep it for ever.
    let id = owner.must(&format!("register {} system read+write", 64 * MIB)).number(0);
    let ticket = owner.must(&format!("ticket {id}")).text(0).to_owned();
    let local = user.must(&format!("register {} system none", 64 * MIB)).number(0);
    let remote = user.must(&format!("import {ticket} nixl")).number(0);
    user.must(&format!("loop write {remote} {local} {}", 64 * MIB));
    std::thread::sleep(Duration::from_millis(100));
    user.kill();
    owner.must(&format!("deregister {id} {}", (STALL * 4).as_millis()));
}

#[test]
fn a_peer_killed_in_mid_transfer_is_disconnected_and_later_peers_work() {
    let test = "a_peer_killed_in_mid_transfer_is_disconnected_and_later_peers_work";
    if !nixl(test) {
        return;
    }
    let len = if rdma() { 8 * MIB } else { 64 * MIB };
    let _watchdog = watch(test, STALL * 20);
    let user = user();
    let local = memory(&user, len);
    let mine = Stamp::new(7, 7);
    for (round, op) in ["read", "write", "read"].into_iter().enumerate() {
        let mut owner = Process::open("owner", &lending());
        owner.must(&format!("register {len} system read+write"));
        let ticket = owner.must("ticket 1").text(0).parse().unwrap();
        let remote = user.import_with(&ticket, &only_nixl()).unwrap();
        user.read(&remote, &local).at(0, 0, 4096).start().unwrap().wait().unwrap();
        let request = match op {
            "read" => user.read(&remote, &local),
            _ => user.write(&remote, &local),
        };
        let transfer = request.start().unwrap();
        std::thread::sleep(Duration::from_millis(3 + 4 * round as u64));
        owner.kill();
        match transfer.wait_for(STALL * 2).expect("it ends though its peer is dead") {
            Ok(()) => {}
            Err(error) => assert!(matches!(error.kind(), Kind::Stale | Kind::Disconnected), "{error}"),
        }
        let late = user.read(&remote, &local).at(0, 0, 64).start().and_then(|transfer| transfer.wait());
        assert!(matches!(late.unwrap_err().kind(), Kind::Stale | Kind::Disconnected));
        // The buffer is ours again once NIXL has let go.
        assert!(transfer.wait_quiet(STALL * 2));
        mine.fill_storage(local.storage()).unwrap();
        mine.stays_in(local.storage(), len, Duration::from_millis(20)).unwrap();
    }
    let mut next = Process::open("owner", &lending());
    next.must("register 65536 system read+write");
    next.must("fill 1 3 3");
    let ticket = next.must("ticket 1").text(0).parse().unwrap();
    let remote = user.import_with(&ticket, &only_nixl()).unwrap();
    user.read(&remote, &local).at(0, 0, 65536).start().unwrap().wait().unwrap();
    Stamp::new(3, 3).verify_storage(local.storage(), 0, 65536).unwrap();
    assert_eq!(local.into_storage().map(|_| ()).map_err(|pinned| pinned.error.to_string()), Ok(()));
}

fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[test]
fn a_thousand_registrations_and_transfers_leave_nothing_behind() {
    let test = "a_thousand_registrations_and_transfers_leave_nothing_behind";
    if !nixl(test) {
        return;
    }
    // What other tests of this process use must not count: it runs once more in a process of its own.
    const CHILD: &str = "TOWLINE_TEST_OWN_PROCESS";
    if std::env::var_os(CHILD).is_none() {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        let output = command.args(["--exact", test]).env(CHILD, "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let complained = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && said.contains("1 passed"),
            "{}\n{said}\n{complained}",
            output.status
        );
        return;
    }
    let _watchdog = watch(test, STALL * 48);
    let (owner, user) = (options_for("nixl", "owner").open().unwrap(), user());
    let round = || {
        let region = owner.register(SystemStorage::new(65536).unwrap(), Access::READ_WRITE).unwrap();
        let remote = user.import_with(&region.ticket().unwrap(), &only_nixl()).unwrap();
        let local = memory(&user, 65536);
        user.read(&remote, &local).start().unwrap().wait().unwrap();
        user.write(&remote, &local).at(0, 0, 4096).start().unwrap().wait().unwrap();
        drop(remote);
        local.into_storage().unwrap();
        region.into_storage().unwrap();
    };
    let (first, then) = if rdma() { (50, 150) } else { (200, 1000) };
    (0..first).for_each(|_| round());
    let before = resident();
    (0..then).for_each(|_| round());
    let grown = resident().saturating_sub(before);
    assert!(grown < 4 * MIB, "{grown} bytes more than before");
    let (theirs, ours) = (owner.stats(), user.stats());
    assert_eq!((theirs.regions, theirs.parked, ours.regions, ours.parked), (0, (0, 0), 0, (0, 0)));
    let (theirs, ours) = (theirs.nixl.unwrap(), ours.nixl.unwrap());
    assert_eq!((theirs.registered, ours.registered, ours.in_flight), (0, 0, 0));
    assert!(ours.peers <= 1);
    assert_eq!(ours.posted, 2 * (first + then));
}

/// A worker whose environment names that library.
fn with_library(library: &Path) -> Process {
    Process::start_with("owner", &[("TOWLINE_NIXL", library.to_str().unwrap())])
}

#[test]
fn an_owner_without_nixl_says_why_and_the_sockets_serve() {
    let test = "an_owner_without_nixl_says_why_and_the_sockets_serve";
    if !nixl(test) {
        return;
    }
    let _watchdog = watch(test, STALL * 12);
    let folder = tempfile(test);
    let fake = folder.join("libnixl_capi.so");
    std::fs::write(&fake, b"\x7fELF and nothing else").unwrap();
    let user = user();
    let local = memory(&user, 4096);
    for library in [Path::new("off"), &folder.join("missing/libnixl_capi.so"), &fake] {
        let mut owner = with_library(library);
        owner.must(&format!("open owner {}", lending()));
        owner.must("register 4096 system read+write");
        let ticket = owner.must("ticket 1").text(0).parse().unwrap();
        let error = user.import_with(&ticket, &only_nixl()).unwrap_err();
        assert_eq!(error.kind(), Kind::Unavailable, "{error}");
        assert!(error.message().contains("NIXL could not be loaded"), "{error}");
        let both = only_nixl().require("unix").unwrap();
        let remote = user.import_with(&ticket, &both).unwrap();
        assert_eq!(remote.path(), "unix", "{}", remote.explain());
        user.read(&remote, &local).start().unwrap().wait().unwrap();
    }
    std::fs::remove_dir_all(folder).unwrap();
}

fn tempfile(name: &str) -> std::path::PathBuf {
    let folder = std::env::temp_dir().join(format!("towline-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}
