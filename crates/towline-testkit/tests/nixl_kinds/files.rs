//! Files of another process, which this one reads and writes by NIXL's plug-in POSIX.

use std::sync::Arc;

use towline::memory::{DirectIo, MemoryAccess};
use towline::{
    Access, DiskStorage, Endpoint, Kind, Limits, NixlOptions, NixlPrefer, Probe, Registered, Remote, Routing,
    SystemStorage,
};
use towline_testkit::bench::STALL;
use towline_testkit::netns::{End, Network};
use towline_testkit::oracle::Stamp;
use towline_testkit::process::Process;
use towline_testkit::skip;
use towline_testkit::watchdog::watch;

const LEN: usize = 4 << 20;

/// Whether NIXL is here, with its plug-in for files; says so where it is not.
fn posix(test: &str) -> bool {
    let paths = towline::paths();
    if let Probe::Missing { reason, .. } = &paths.iter().find(|path| path.name == "nixl").unwrap().probe {
        skip::skip(test, "nixl", reason);
        return false;
    }
    let agent = towline::nixl::NixlAgent::with_engine(test, towline::nixl::Engine::Nixl).unwrap();
    let has = agent.get_available_plugins().unwrap().iter().any(|plugin| plugin == "POSIX");
    if !has {
        skip::skip(test, "nixl", "this NIXL has no plug-in POSIX");
    }
    has
}

fn only_nixl() -> Routing {
    Routing::default().require("nixl").unwrap()
}

fn user(options: NixlOptions) -> Endpoint {
    let limits = Limits { no_progress: STALL, ..Limits::default() };
    Endpoint::options("user").limits(limits).nixl(options).open().unwrap()
}

fn memory(endpoint: &Endpoint, len: usize) -> Registered<Arc<SystemStorage>> {
    endpoint.register(Arc::new(SystemStorage::new(len).unwrap()), Access::NONE).unwrap()
}

fn bytes(local: &Registered<Arc<SystemStorage>>, at: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    local.storage().read_at(at, &mut bytes).unwrap();
    bytes
}

fn stall() -> String {
    format!("stall={}", STALL.as_millis())
}

/// Reads and writes all of a file and parts of it.
fn both_ways(user: &Endpoint, remote: &Remote, owner: &mut Process, id: u64) {
    let local = memory(user, LEN);
    let stamp = Stamp::new(1, 1);
    user.read(remote, &local).start().unwrap().wait().unwrap();
    stamp.verify_storage(local.storage(), 0, LEN).unwrap();
    let all = bytes(&local, 0, LEN);
    // Parts that begin and end anywhere go through the page cache, and nothing beside them changes.
    local.storage().memset(0xAB, 0, LEN).unwrap();
    user.read(remote, &local).at(4099, 17, 70_001).start().unwrap().wait().unwrap();
    assert!(bytes(&local, 17, 70_001) == all[4099..][..70_001]);
    assert!(bytes(&local, 0, 17) == [0xAB; 17] && bytes(&local, 70_018, 64) == [0xAB; 64]);
    // Many pages, each from elsewhere.
    let pages = LEN / 8192;
    let spans: Vec<_> =
        (0..pages).map(|n| (((pages - 1 - n) * 8192) as u64, (n * 4096) as u64, 4096)).collect();
    user.read(remote, &local).spans(&spans).start().unwrap().wait().unwrap();
    for &(theirs, ours, len) in &spans {
        assert!(bytes(&local, ours as usize, len as usize) == all[theirs as usize..][..len as usize]);
    }
    Stamp::new(2, 2).fill_storage(local.storage()).unwrap();
    user.write(remote, &local).at(8192, 8192, 1 << 20).notify("written").start().unwrap().wait().unwrap();
    assert_eq!(owner.must("receive 20000").payload, b"written");
    owner.must(&format!("check {id} 2 2 8192 {}", 1 << 20));
    owner.must(&format!("check {id} 1 1 0 8192"));
    user.write(remote, &local).at(4 * 4096 + 5, 4 * 4096 + 5, 11).start().unwrap().wait().unwrap();
    owner.must(&format!("check {id} 2 2 {} 11", 4 * 4096 + 5));
    let words = user.write(remote, &local).at(0, 0, 8).signal(0, 1).start().unwrap_err();
    assert_eq!(words.kind(), Kind::Unsupported, "{words}");
}

#[test]
fn a_file_of_another_process_is_read_and_written_by_posix() {
    let test = "a_file_of_another_process_is_read_and_written_by_posix";
    if !posix(test) {
        return;
    }
    let _watchdog = watch(test, STALL * 24);
    let choices = [
        NixlOptions::default(),
        NixlOptions::default().backend("POSIX", [("use_aio", "true")]),
        NixlOptions::default().backend("UCX", [("", ""); 0]).backend("posix", [("", ""); 0]),
    ];
    for options in choices {
        let user = user(options);
        let mut owner = Process::open("owner", &stall());
        let id = owner.must(&format!("register {LEN} disk read+write")).number(0);
        owner.must(&format!("fill {id} 1 1"));
        let ticket = owner.must(&format!("ticket {id}")).text(0).parse().unwrap();
        let remote = user.import_with(&ticket, &only_nixl()).unwrap();
        assert_eq!(remote.path(), "nixl");
        assert!(remote.explain().to_string().contains("POSIX"), "{}", remote.explain());
        both_ways(&user, &remote, &mut owner, id);
        // A file that is taken back is stale at once.
        let local = memory(&user, LEN);
        owner.must(&format!("deregister {id} 20000"));
        let late = user.read(&remote, &local).start().and_then(|transfer| transfer.wait()).unwrap_err();
        assert_eq!(late.kind(), Kind::Stale, "{late}");
        drop(remote);
        local.into_storage().unwrap();
        let stats = user.stats().nixl.unwrap();
        assert_eq!((stats.registered, stats.in_flight), (0, 0));
        assert_eq!(owner.must("stats-nixl").text(0), "none", "the owner needs no NIXL for its files");
    }
}

#[test]
fn a_file_goes_by_nixl_only_where_that_is_wished_and_can_be() {
    let test = "a_file_goes_by_nixl_only_where_that_is_wished_and_can_be";
    if !posix(test) {
        return;
    }
    let _watchdog = watch(test, STALL * 12);
    let mut owner = Process::open("owner", &stall());
    owner.must("register 8192 disk read");
    owner.must("fill 1 1 1");
    let ticket = owner.must("ticket 1").text(0).parse().unwrap();
    let usual = user(NixlOptions::default());
    let remote = usual.import(&ticket).unwrap();
    assert_eq!(remote.path(), "file");
    assert!(usual.stats().nixl.is_none(), "nobody asked for it");
    for wished in [NixlPrefer::Never, NixlPrefer::Always] {
        let user = user(NixlOptions::default().prefer(wished));
        let remote = user.import_with(&ticket, &Routing::default().forbid("file").unwrap()).unwrap();
        assert_eq!(remote.path() == "nixl", wished == NixlPrefer::Always, "{}", remote.explain());
    }
    let without = user(NixlOptions::default().backend("UCX", [("", ""); 0]));
    let error = without.import_with(&ticket, &only_nixl()).unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable, "{error}");
    assert!(error.message().contains("add POSIX or GDS"), "{error}");
    // A ticket that allows no writing leads to a descriptor that allows none.
    let remote = usual.import_with(&ticket, &only_nixl()).unwrap();
    let local = memory(&usual, 8192);
    let refused = usual.write(&remote, &local).start().unwrap_err();
    assert_eq!(refused.kind(), Kind::PermissionDenied, "{refused}");
}

#[test]
fn a_file_that_somebody_has_shortened_is_an_error_and_the_next_one_works() {
    let test = "a_file_that_somebody_has_shortened_is_an_error_and_the_next_one_works";
    if !posix(test) {
        return;
    }
    let _watchdog = watch(test, STALL * 12);
    let owner = Endpoint::open("owner").unwrap();
    let user = user(NixlOptions::default());
    for direct in [DirectIo::Try, DirectIo::Never] {
        let file = DiskStorage::options().direct(direct).create(LEN).unwrap();
        let path = file.path().to_owned();
        let region = owner.register(file, Access::READ_WRITE).unwrap();
        let remote = user.import_with(&region.ticket().unwrap(), &only_nixl()).unwrap();
        let local = memory(&user, LEN);
        user.read(&remote, &local).start().unwrap().wait().unwrap();
        std::fs::File::options().write(true).open(path).unwrap().set_len(4096).unwrap();
        let error = user.read(&remote, &local).start().and_then(|transfer| transfer.wait()).unwrap_err();
        assert_eq!(error.kind(), Kind::Stale, "{error}");
    }
}

#[test]
fn a_file_of_another_host_is_not_reached_by_nixl_and_the_error_says_why() {
    let test = "a_file_of_another_host_is_not_reached_by_nixl_and_the_error_says_why";
    if !posix(test) {
        return;
    }
    let network = match Network::build() {
        Ok(network) => network,
        Err(reason) => return skip::skip(test, "netns", &reason),
    };
    let _watchdog = watch(test, STALL * 12);
    let mut owner = Process::start_in(&network.namespace(End::A), "owner");
    let mut user = Process::start_in(&network.namespace(End::B), "user");
    let address = std::net::SocketAddr::new(network.address(End::A, false), 0);
    owner.must(&format!("open owner listen={address} {}", stall()));
    user.must(&format!("open user {}", stall()));
    owner.must("register 65536 disk read");
    owner.must("fill 1 1 1");
    let ticket = owner.must("ticket 1").text(0).to_owned();
    let error = user.ask(&format!("import {ticket} nixl")).unwrap_err();
    assert_eq!(error.kind, Kind::Unavailable, "{error}");
    assert!(error.to_string().contains("only where the file is open"), "{error}");
    // Through its owner it is reached all the same.
    let local = user.must("register 65536 system none").number(0);
    let remote = user.must(&format!("import {ticket}")).number(0);
    assert_eq!(user.must(&format!("read {remote} {local} 0 0 65536")).text(0), "tcp");
    user.must(&format!("check {local} 1 1 0 65536"));
}
