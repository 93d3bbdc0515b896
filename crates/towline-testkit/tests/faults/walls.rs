//! What a host puts between processes: users, filters of system calls, limits of memory, and the network behind them all.

use std::collections::HashSet;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use towline::{Access, Dtype, Endpoint, Kind, ReduceOp, SharedStorage, Ticket, Tls};
use towline_testkit::bench::{forced, outcome, routing};
use towline_testkit::oracle::Stamp;
use towline_testkit::process::{Process, Wall};
use towline_testkit::skip::skip;
use towline_testkit::watchdog::watch;

use super::{MIB, endpoint, local, path_works};

/// Nobody's number, on Linux and elsewhere.
const NOBODY: u32 = 65_534;

/// Starts a worker behind a wall and opens an endpoint in it; says why not where that cannot be done here.
fn open_behind(wall: Wall, test: &str, what: &str) -> Option<Process> {
    // With a path forced there is nothing to fall back to.
    if forced().is_some() {
        return None;
    }
    match Process::start_behind(wall, "walled") {
        Ok(mut process) => {
            process.must("open walled");
            Some(process)
        }
        Err(reason) => {
            skip(test, what, &reason);
            None
        }
    }
}

#[test]
fn a_peer_of_another_user_is_served_by_the_unix_stream_only() {
    const NAME: &str = "a_peer_of_another_user_is_served_by_the_unix_stream_only";
    let _watchdog = watch(NAME, Duration::from_secs(60));
    let Some(mut other) = open_behind(Wall::User(NOBODY), NAME, "users") else { return };
    let mine = endpoint("mine");
    let stamp = Stamp::new(1, 1);
    let region = mine.register(SharedStorage::new(MIB).unwrap(), Access::READ).unwrap();
    stamp.fill_storage(region.storage()).unwrap();
    let ticket = region.ticket().unwrap();
    other.must(&format!("register {MIB} system none"));

    // It holds a ticket and gets the bytes, and none of what would let it take them by itself.
    let imported = other.must(&format!("import {ticket}"));
    assert_eq!(imported.text(1), "unix");
    other.must(&format!("read {} 1 0 0 {MIB}", imported.number(0)));
    other.must(&format!("check 1 1 1 0 {MIB}"));
    assert_eq!(other.mapped_segments(), 0);
    for path in ["mapped", "cma"] {
        let refused = other.ask(&format!("import {ticket} {path}")).unwrap_err();
        assert_eq!(refused.kind, Kind::Unavailable, "{path}: {refused}");
    }

    // The other way round, where this side's rights would allow more.
    other.must(&format!("register {MIB} shared read"));
    other.must(&format!("fill {} 1 1", imported.number(0) + 1));
    let theirs = other.must(&format!("ticket {}", imported.number(0) + 1));
    let remote = mine.import(&theirs.text(0).parse().unwrap()).unwrap();
    assert_eq!(remote.path(), "unix");
    assert!(remote.explain().to_string().contains("another user"), "{}", remote.explain());
    let target = local(&mine, MIB);
    outcome(mine.read(&remote, &target).start()).unwrap();
    stamp.verify_storage(target.storage(), 0, MIB).unwrap();
}

/// Same user, same namespaces, and no privilege: what decides is whether the kernel lets the one look into the other.
#[test]
fn a_process_that_the_kernel_lets_nobody_look_into_shares_no_memory() {
    const NAME: &str = "a_process_that_the_kernel_lets_nobody_look_into_shares_no_memory";
    let _watchdog = watch(NAME, Duration::from_secs(60));
    let open = || open_behind(Wall::User(NOBODY), NAME, "users");
    let Some(mut owner) = open() else { return };
    let ticket = |owner: &mut Process| -> Ticket {
        let region = owner.must(&format!("register {MIB} shared read")).number(0);
        owner.must(&format!("ticket {region}")).text(0).parse().unwrap()
    };
    let shown = ticket(&mut owner);
    // Without the wall they do share, so that it is the wall that keeps them apart below.
    let Some(mut user) = open() else { return };
    assert_eq!(user.must(&format!("import {shown}")).text(1), "mapped");

    // As the owner: its user does not take what it might hand over, and says why.
    let Some(mut hidden) = open() else { return };
    hidden.must("hide");
    let kept = ticket(&mut hidden);
    assert_eq!(user.must(&format!("import {kept}")).text(1), "unix");
    let refused = user.ask(&format!("import {kept} mapped")).unwrap_err();
    assert_eq!(refused.kind, Kind::Unavailable, "{refused}");
    assert!(refused.message.contains("does not let this one look into"), "{refused}");

    // As the user: it is given nothing by an owner that it could look into itself.
    let imported = hidden.must(&format!("import {shown}"));
    assert_eq!(imported.text(1), "unix");
    let refused = hidden.ask(&format!("import {shown} mapped")).unwrap_err();
    assert!(refused.message.contains("does not let it look into this process"), "{refused}");
    let target = hidden.must(&format!("register {MIB} system none")).number(0);
    hidden.must(&format!("read {} {target} 0 0 {MIB}", imported.number(0)));
    assert_eq!(hidden.mapped_segments(), 1, "its own alone");
}

#[test]
fn where_copies_between_processes_are_forbidden_the_unix_stream_serves() {
    const NAME: &str = "where_copies_between_processes_are_forbidden_the_unix_stream_serves";
    let _watchdog = watch(NAME, Duration::from_secs(60));
    if !path_works("cma") {
        return;
    }
    let Some(mut walled) = open_behind(Wall::NoProcessVm, NAME, "seccomp") else { return };
    let mut owner = Process::open("owner", "");
    owner.must(&format!("register {MIB} system read"));
    owner.must("fill 1 1 1");
    let ticket: Ticket = owner.must("ticket 1").text(0).parse().unwrap();
    assert_eq!(endpoint("free").import(&ticket).unwrap().path(), "cma");

    walled.must(&format!("register {MIB} system none"));
    let imported = walled.must(&format!("import {ticket}"));
    assert_eq!(imported.text(1), "unix");
    walled.must(&format!("read {} 1 0 0 {MIB}", imported.number(0)));
    walled.must(&format!("check 1 1 1 0 {MIB}"));
    let refused = walled.ask(&format!("import {ticket} cma")).unwrap_err();
    assert_eq!(refused.kind, Kind::Unavailable, "{refused}");
    assert!(refused.message.contains("process_vm_readv"), "{refused}");
}

/// Where the calls that report a missing page are forbidden, others must report it: a process that may cut a file ends no owner.
#[test]
fn an_owner_that_may_not_copy_between_processes_outlives_memory_that_goes_away() {
    const NAME: &str = "an_owner_that_may_not_copy_between_processes_outlives_memory_that_goes_away";
    let _watchdog = watch(NAME, Duration::from_secs(60));
    let half = (MIB / 2) as u64;
    let path = std::env::temp_dir().join(format!("towline-walls-{}", std::process::id()));
    for (way, options) in [("unix", ""), ("tcp", ""), ("tcp", "tls=yes"), ("tcp", "checksums=yes")] {
        let Some(mut owner) = open_behind(Wall::NoProcessVm, NAME, "seccomp") else { return };
        owner.must(&format!("open owner {options}"));
        let file = fs::File::create(&path).unwrap();
        file.set_len(MIB as u64).unwrap();
        let lent = owner.must(&format!("register {MIB} mapped:{} read+write", path.display())).number(0);
        let ticket: Ticket = owner.must(&format!("ticket {lent}")).text(0).parse().unwrap();
        let mut user =
            Endpoint::options("user").routing(routing(way)).checksums(options.contains("checksums"));
        if options.contains("tls") {
            user = user.tls(Tls::by_ticket().unwrap());
        }
        let user = user.open().unwrap();
        let remote = user.import(&ticket).unwrap();
        let near = local(&user, MIB);
        let reduce = || user.reduce_into(&remote, &near, ReduceOp::Sum, Dtype::U64).at(half, 0, 1 << 16);
        // What each way to touch it does while it is there.
        let stamp = Stamp::new(7, 1);
        stamp.fill_storage(near.storage()).unwrap();
        outcome(user.write(&remote, &near).start()).unwrap();
        near.write_at(0, &vec![0; MIB]).unwrap();
        outcome(user.read(&remote, &near).start()).unwrap();
        stamp.verify_storage(near.storage(), 0, MIB).unwrap();
        near.write_at(0, &1u64.to_le_bytes()).unwrap();
        outcome(user.write(&remote, &near).at(half, 0, 8).start()).unwrap();
        user.fetch_add(&remote, half, 5).unwrap().wait().unwrap();
        near.write_at(0, &[0; 1 << 16]).unwrap();
        near.write_at(0, &2u64.to_le_bytes()).unwrap();
        outcome(reduce().start()).unwrap();
        outcome(user.read(&remote, &near).at(half, 0, 8).start()).unwrap();
        let mut word = [0; 8];
        near.read_at(0, &mut word).unwrap();
        assert_eq!(u64::from_le_bytes(word), 8, "by {way} {options}");
        // And when half of it is not, for a request that begins behind the end and in front of it.
        file.set_len(half).unwrap();
        let outcomes = [
            ("small read", outcome(user.read(&remote, &near).at(half, 0, 100).start())),
            ("read", outcome(user.read(&remote, &near).start())),
            ("small write", outcome(user.write(&remote, &near).at(half, 0, 100).start())),
            ("write", outcome(user.write(&remote, &near).start())),
            ("add", user.fetch_add(&remote, half, 1).unwrap().wait().map(drop)),
            ("reduce", outcome(reduce().start())),
        ];
        for (what, outcome) in outcomes {
            let error = outcome.expect_err(what);
            assert_eq!(error.kind(), Kind::Stale, "{what} by {way} {options}: {error}");
        }
        // It lives on, and what is there is served.
        stamp.fill_storage(near.storage()).unwrap();
        outcome(user.write(&remote, &near).at(0, 0, half).start()).unwrap();
        near.write_at(0, &vec![0; MIB]).unwrap();
        outcome(user.read(&remote, &near).at(0, 0, half).start()).unwrap();
        stamp.verify_storage(near.storage(), 0, MIB / 2).unwrap();
        fs::remove_file(&path).unwrap();
    }
}

/// A memory control group; gone with the value.
struct Group(PathBuf);

impl Group {
    fn make(limit: usize) -> Result<Group, String> {
        let (root, file) = match Path::new("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists() {
            true => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            false => ("/sys/fs/cgroup", "memory.max"),
        };
        let group = Group(Path::new(root).join(format!("towline-test-{}", std::process::id())));
        fs::create_dir(&group.0).map_err(|error| format!("no control group can be made: {error}"))?;
        fs::write(group.0.join(file), limit.to_string())
            .map_err(|error| format!("memory cannot be limited by a control group: {error}"))?;
        Ok(group)
    }

    fn take_in(&self, process: &Process) -> Result<(), String> {
        fs::write(self.0.join("cgroup.procs"), process.pid().to_string())
            .map_err(|error| format!("a process cannot be put into a control group: {error}"))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn shared_memory_beyond_a_control_group_is_exhausted_and_nobody_is_killed() {
    const NAME: &str = "shared_memory_beyond_a_control_group_is_exhausted_and_nobody_is_killed";
    let _watchdog = watch(NAME, Duration::from_secs(60));
    let mut process = Process::open("limited", "");
    let group = match Group::make(96 * MIB).and_then(|group| group.take_in(&process).map(|()| group)) {
        Ok(group) => group,
        Err(reason) => return skip(NAME, "cgroup", &reason),
    };
    process.must(&format!("register {} shared read", 16 * MIB));
    process.must("fill 1 1 1");
    let ticket: Ticket = process.must("ticket 1").text(0).parse().unwrap();
    for _ in 0..3 {
        let refused = process.ask(&format!("register {} shared read", 256 * MIB)).unwrap_err();
        assert_eq!(refused.kind, Kind::Exhausted, "{refused}");
        assert!(refused.message.contains("control group"), "{refused}");
    }
    // What there is goes on, and what fits is given.
    process.must(&format!("register {} shared read", 8 * MIB));
    let user = endpoint("user");
    let remote = user.import_with(&ticket, &routing("mapped")).unwrap();
    let target = local(&user, 16 * MIB);
    outcome(user.read(&remote, &target).start()).unwrap();
    Stamp::new(1, 1).verify_storage(target.storage(), 0, 16 * MIB).unwrap();
    drop(process);
    drop(group);
}

/// The addresses on which a process listens for TCP.
fn listening(process: &Process) -> Vec<IpAddr> {
    let descriptors = fs::read_dir(format!("/proc/{}/fd", process.pid())).unwrap().flatten();
    let sockets: HashSet<String> = descriptors
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .map(|target| target.to_string_lossy().trim_matches(|c: char| !c.is_ascii_digit()).to_owned())
        .collect();
    let mut found = Vec::new();
    for table in ["tcp", "tcp6"] {
        let table = fs::read_to_string(format!("/proc/{}/net/{table}", process.pid())).unwrap_or_default();
        for line in table.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (local, state, inode) = (fields[1], fields[3], fields[9]);
            if state == "0A" && sockets.contains(inode) {
                // Words of 32 bits, each as this machine has it in memory.
                let words = local.split(':').next().unwrap().as_bytes().chunks(8);
                let bytes: Vec<u8> = words
                    .map(|word| u32::from_str_radix(str::from_utf8(word).unwrap(), 16).unwrap())
                    .flat_map(u32::to_ne_bytes)
                    .collect();
                found.push(match <[u8; 4]>::try_from(&bytes[..]) {
                    Ok(v4) => IpAddr::from(v4),
                    Err(_) => IpAddr::from(<[u8; 16]>::try_from(&bytes[..]).unwrap()),
                });
            }
        }
    }
    found
}

#[test]
fn other_hosts_are_listened_to_only_where_an_address_was_named() {
    let _watchdog =
        watch("other_hosts_are_listened_to_only_where_an_address_was_named", Duration::from_secs(60));
    let open = |variable: &str, options: &str| {
        let mut process = Process::start_with("listener", &[("TOWLINE_LISTEN", variable)]);
        process.must(&format!("open listener {options}"));
        listening(&process)
    };
    let everywhere: IpAddr = "0.0.0.0".parse().unwrap();
    let by_default = open("", "");
    assert!(by_default.len() == 1 && by_default[0].is_loopback(), "{by_default:?}");
    assert_eq!(open("", "listen=0.0.0.0:0"), [everywhere]);
    assert_eq!(open("0.0.0.0:0", ""), [everywhere]);
    // An argument says it more clearly than a variable.
    assert!(open("0.0.0.0:0", "listen=127.0.0.1:0")[0].is_loopback());
}
