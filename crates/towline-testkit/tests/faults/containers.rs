//! Processes of one user on one host that the kernel keeps apart: in other pid or user namespaces, as containers are.

use std::time::Duration;

use towline::{Access, Endpoint, EndpointOptions, Kind, Remote, SharedStorage, SystemStorage, Ticket};
use towline_testkit::bench::{forced, outcome};
use towline_testkit::oracle::Stamp;
use towline_testkit::paths::{is_direct, names};
use towline_testkit::process::{Process, Wall};
use towline_testkit::skip::skip;
use towline_testkit::watchdog::{eventually, watch};

use super::{MIB, STALL, local, path_works};

fn apart(wall: Wall, test: &str, options: &str) -> Option<Process> {
    // With a path forced there is nothing to fall back to.
    if forced().is_some() {
        return None;
    }
    match Process::start_behind(wall, "apart") {
        Ok(mut process) => {
            process.must(&format!("open apart {options}"));
            Some(process)
        }
        Err(reason) => {
            skip(test, "namespaces", &reason);
            None
        }
    }
}

fn here(name: &str, share: bool) -> Endpoint {
    options(name).share_between_containers(share).open().unwrap()
}

fn options(name: &str) -> EndpointOptions {
    let limits = towline::Limits { no_progress: STALL, ..towline::Limits::default() };
    Endpoint::options(name).limits(limits)
}

fn ticket_of(process: &mut Process, kind: &str) -> Ticket {
    let region = process.must(&format!("register {MIB} {kind} read")).number(0);
    process.must(&format!("fill {region} 1 1"));
    process.must(&format!("ticket {region}")).text(0).parse().unwrap()
}

/// The reason why a path is not taken.
fn reason(remote: &Remote, path: &str) -> String {
    let explained = remote.explain().paths.iter().find(|one| one.path == path);
    explained.map(|one| one.reason.clone()).unwrap()
}

fn read_all(endpoint: &Endpoint, remote: &Remote) {
    let target = local(endpoint, MIB);
    outcome(endpoint.read(remote, &target).start()).unwrap();
    Stamp::new(1, 1).verify_storage(target.storage(), 0, MIB).unwrap();
}

/// Neither side gives the other memory, whichever of them is the owner; the stream serves, and both get the reason.
fn nothing_is_shared_across(wall: Wall, test: &str, why: &str) {
    let _watchdog = watch(test, Duration::from_secs(60));
    let Some(mut other) = apart(wall, test, "") else { return };
    let mine = here("mine", false);

    let remote = mine.import(&ticket_of(&mut other, "shared")).unwrap();
    assert_eq!(remote.path(), "unix", "{}", remote.explain());
    read_all(&mine, &remote);
    // A path for files and GPUs has reasons of its own where the bytes are elsewhere.
    for path in ["mapped", "cma"] {
        assert!(reason(&remote, path).contains(why), "{path}: {}", reason(&remote, path));
    }

    let stamp = Stamp::new(1, 1);
    let region = mine.register(SharedStorage::new(MIB).unwrap(), Access::READ).unwrap();
    stamp.fill_storage(region.storage()).unwrap();
    let ticket = region.ticket().unwrap();
    let before = other.mapped_segments();
    let imported = other.must(&format!("import {ticket}"));
    assert_eq!(imported.text(1), "unix");
    let target = other.must(&format!("register {MIB} system none")).number(0);
    other.must(&format!("read {} {target} 0 0 {MIB}", imported.number(0)));
    other.must(&format!("check {target} 1 1 0 {MIB}"));
    assert_eq!(other.mapped_segments(), before);
    // Those that move bytes without the owner.
    for path in names(is_direct) {
        let refused = other.ask(&format!("import {ticket} {path}")).unwrap_err();
        assert_eq!(refused.kind, Kind::Unavailable, "{path}: {refused}");
    }
}

#[test]
fn memory_is_not_shared_with_another_pid_namespace() {
    nothing_is_shared_across(
        Wall::PidNamespace,
        "memory_is_not_shared_with_another_pid_namespace",
        "pid namespace",
    );
}

#[test]
fn memory_is_not_shared_with_another_pid_namespace_that_sees_our_proc() {
    nothing_is_shared_across(
        Wall::PidNamespaceOnly,
        "memory_is_not_shared_with_another_pid_namespace_that_sees_our_proc",
        "pid namespace",
    );
}

#[test]
fn memory_is_not_shared_with_another_user_namespace() {
    nothing_is_shared_across(
        Wall::UserNamespace,
        "memory_is_not_shared_with_another_user_namespace",
        "user namespace",
    );
}

#[test]
fn a_file_is_not_passed_to_another_pid_namespace() {
    const NAME: &str = "a_file_is_not_passed_to_another_pid_namespace";
    let _watchdog = watch(NAME, Duration::from_secs(60));
    let Some(mut other) = apart(Wall::PidNamespace, NAME, "") else { return };
    let mine = here("mine", false);
    let remote = mine.import(&ticket_of(&mut other, "disk")).unwrap();
    assert_eq!(remote.path(), "unix", "{}", remote.explain());
    assert!(reason(&remote, "file").contains("pid namespace"), "{}", remote.explain());
    read_all(&mine, &remote);
}

#[test]
fn two_containers_share_no_memory_with_each_other() {
    const NAME: &str = "two_containers_share_no_memory_with_each_other";
    let _watchdog = watch(NAME, Duration::from_secs(60));
    let Some(mut owner) = apart(Wall::PidNamespace, NAME, "") else { return };
    let Some(mut user) = apart(Wall::PidNamespace, NAME, "") else { return };
    let ticket = ticket_of(&mut owner, "shared");
    assert_eq!(user.must(&format!("import {ticket}")).text(1), "unix");
}

#[test]
fn containers_share_memory_where_both_sides_say_so() {
    const NAME: &str = "containers_share_memory_where_both_sides_say_so";
    let _watchdog = watch(NAME, Duration::from_secs(120));
    // A process without walls, and one in another container.
    for wall in [Wall::PidNamespace, Wall::PidNamespaceOnly] {
        let Some(mut other) = apart(wall, NAME, "share=yes") else { return };
        let mine = here("mine", true);
        let remote = mine.import(&ticket_of(&mut other, "shared")).unwrap();
        assert_eq!(remote.path(), "mapped", "{}", remote.explain());
        read_all(&mine, &remote);

        let region = mine.register(SharedStorage::new(MIB).unwrap(), Access::READ).unwrap();
        Stamp::new(1, 1).fill_storage(region.storage()).unwrap();
        let ticket = region.ticket().unwrap();
        let imported = other.must(&format!("import {ticket}"));
        assert_eq!(imported.text(1), "mapped");
        let target = other.must(&format!("register {MIB} system none")).number(0);
        other.must(&format!("read {} {target} 0 0 {MIB}", imported.number(0)));
        other.must(&format!("check {target} 1 1 0 {MIB}"));
        // It has no number here by which the kernel could be asked to copy.
        let private = mine.register(SystemStorage::new(MIB).unwrap(), Access::READ).unwrap();
        let refused = other.ask(&format!("import {} cma", private.ticket().unwrap())).unwrap_err();
        assert_eq!(refused.kind, Kind::Unavailable);
        assert!(refused.message.contains("pid namespace"), "{refused}");
    }
}

#[test]
fn a_setting_on_one_side_shares_nothing() {
    const NAME: &str = "a_setting_on_one_side_shares_nothing";
    let _watchdog = watch(NAME, Duration::from_secs(120));
    for (theirs, ours) in [("share=yes", false), ("", true)] {
        let Some(mut other) = apart(Wall::PidNamespace, NAME, theirs) else { return };
        let mine = here("mine", ours);
        // An owner that gives pages all the same: they are closed before anything in them is looked at.
        let remote = mine.import(&ticket_of(&mut other, "shared")).unwrap();
        assert_eq!(remote.path(), "unix", "{theirs:?}: {}", remote.explain());
        let why = reason(&remote, "mapped");
        assert!(why.contains("pid namespace") && why.contains("share_between_containers"), "{why}");
        read_all(&mine, &remote);

        let region = mine.register(SharedStorage::new(MIB).unwrap(), Access::READ).unwrap();
        let ticket = region.ticket().unwrap();
        let before = other.mapped_segments();
        assert_eq!(other.must(&format!("import {ticket}")).text(1), "unix", "{theirs:?}");
        assert_eq!(other.mapped_segments(), before);
    }
}

#[test]
fn a_setting_for_containers_shares_nothing_with_another_user() {
    const NAME: &str = "a_setting_for_containers_shares_nothing_with_another_user";
    let _watchdog = watch(NAME, Duration::from_secs(60));
    let Some(mut other) = apart(Wall::User(65_534), NAME, "share=yes") else { return };
    let mine = here("mine", true);
    let remote = mine.import(&ticket_of(&mut other, "shared")).unwrap();
    assert_eq!(remote.path(), "unix", "{}", remote.explain());
    assert!(reason(&remote, "mapped").contains("another user"), "{}", remote.explain());
}

#[test]
fn a_killed_peer_in_another_container_gives_its_pins_back() {
    const NAME: &str = "a_killed_peer_in_another_container_gives_its_pins_back";
    let _watchdog = watch(NAME, Duration::from_secs(60));
    if !path_works("mapped") {
        return;
    }
    let Some(mut other) = apart(Wall::PidNamespace, NAME, "share=yes") else { return };
    let mine = here("mine", true);
    let region = mine.register(SharedStorage::new(MIB).unwrap(), Access::READ).unwrap();
    let imported = other.must(&format!("import {} mapped", region.ticket().unwrap())).number(0);
    other.must(&format!("pin {imported}"));
    let still = region.into_storage_within(Duration::from_millis(100)).unwrap_err();
    other.kill();
    // Its process is known by a descriptor, not by a number, which it has only in its own namespace.
    let mut registration = Some(still.registration);
    let free = eventually(Duration::from_secs(10), || {
        match registration.take().unwrap().into_storage_within(Duration::from_millis(200)) {
            Ok(_) => true,
            Err(still) => {
                registration = Some(still.registration);
                false
            }
        }
    });
    assert!(free, "the pin of a killed peer still counts");
}

#[test]
fn the_death_of_an_owner_in_another_container_is_noticed() {
    const NAME: &str = "the_death_of_an_owner_in_another_container_is_noticed";
    let _watchdog = watch(NAME, Duration::from_secs(60));
    let Some(mut other) = apart(Wall::PidNamespace, NAME, "share=yes") else { return };
    let mine = here("mine", true);
    let remote = mine.import(&ticket_of(&mut other, "shared")).unwrap();
    assert_eq!(remote.path(), "mapped", "{}", remote.explain());
    other.kill();
    assert!(eventually(Duration::from_secs(2), || remote.alive().is_err()));
    let target = local(&mine, MIB);
    let refused = outcome(mine.read(&remote, &target).start()).unwrap_err();
    assert_eq!(refused.kind(), Kind::Stale, "{refused}");
}
