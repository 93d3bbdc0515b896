//! Two hosts, as far as one machine can play them: two network namespaces with a cable that can be pulled.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use std::time::Duration;

use towline::Kind;
use towline_testkit::netns::{End, Network};
use towline_testkit::process::Process;
use towline_testkit::random::Random;
use towline_testkit::skip;
use towline_testkit::watchdog::{eventually, stays, watch};

const MIB: usize = 1 << 20;

/// The limit without progress; errors must come within ten times that.
const STALL: Duration = Duration::from_secs(2);

fn network(test: &str) -> Option<Network> {
    match Network::build() {
        Ok(network) => Some(network),
        Err(reason) => {
            skip::skip(test, "netns", &reason);
            None
        }
    }
}

/// An owner at one end that listens there, and a user at the other.
fn pair(network: &Network, v6: bool) -> (Process, Process) {
    let mut owner = Process::start_in(&network.namespace(End::A), "owner");
    let mut user = Process::start_in(&network.namespace(End::B), "user");
    let address = std::net::SocketAddr::new(network.address(End::A, v6), 0);
    owner.must(&format!("open owner listen={address} stall={}", STALL.as_millis()));
    user.must(&format!("open user stall={}", STALL.as_millis()));
    (owner, user)
}

fn bytes_cross(test: &str, v6: bool) {
    let Some(network) = network(test) else { return };
    let _watchdog = watch(test, Duration::from_secs(60));
    let (mut owner, mut user) = pair(&network, v6);
    owner.must(&format!("register {} system read+write", 8 * MIB));
    owner.must("fill 1 1 1");
    let ticket = owner.must("ticket 1").text(0).to_owned();
    user.must(&format!("register {} system none", 8 * MIB));
    // Without being asked for: nothing else leads to another host.
    let imported = user.must(&format!("import {ticket}"));
    let (remote, path) = (imported.number(0), imported.text(1).to_owned());
    assert_eq!(path, "tcp");
    assert_eq!(user.must(&format!("read {remote} 1 0 0 {}", 8 * MIB)).text(0), "tcp");
    user.must(&format!("check 1 1 1 0 {}", 8 * MIB));
    user.must("fill 1 2 2");
    user.must(&format!("write {remote} 1 4096 4096 {}", 3 * MIB));
    owner.must(&format!("check 1 2 2 4096 {}", 3 * MIB));
    owner.must("check 1 1 1 0 4096");
    assert!(user.ask_with(&format!("notify {remote}"), b"hello").is_ok());
    let message = owner.must("receive 20000");
    assert_eq!((message.text(0), &message.payload[..]), ("user", &b"hello"[..]));
    let before = user.must(&format!("add {remote} 0 5")).number(0);
    assert_eq!(user.must(&format!("add {remote} 0 5")).number(0), before.wrapping_add(5));
    owner.must("deregister 1 20000");
    let late = user.ask(&format!("read {remote} 1 0 0 64")).unwrap_err();
    assert_eq!(late.kind, Kind::Stale, "{late}");
}

#[test]
fn bytes_cross_between_two_hosts_over_ipv4() {
    bytes_cross("bytes_cross_between_two_hosts_over_ipv4", false);
}

#[test]
fn bytes_cross_between_two_hosts_over_ipv6() {
    if !std::fs::exists("/proc/sys/net/ipv6").unwrap_or(false) {
        skip::skip("bytes_cross_between_two_hosts_over_ipv6", "netns", "the kernel has no IPv6");
        return;
    }
    bytes_cross("bytes_cross_between_two_hosts_over_ipv6", true);
}

/// A cable pulled in mid-transfer: an error within the limit, quiet afterwards, and all is well once it is back.
fn cable_pulled(test: &str, op: &str, end: End) {
    const LEN: usize = 512 * MIB;
    let Some(network) = network(test) else { return };
    let _watchdog = watch(test, Duration::from_secs(120));
    let mut random = Random::new(70 + end as u64);
    let (mut owner, mut user) = pair(&network, false);
    owner.must(&format!("register {LEN} system read+write"));
    user.must(&format!("register {LEN} system none"));
    user.must(&format!("register {MIB} system none"));
    let ticket = owner.must("ticket 1").text(0).to_owned();
    let mut errors = 0;
    for _ in 0..20 {
        let remote = user.must(&format!("import {ticket} tcp")).number(0);
        user.tell(&format!("{op} {remote} 1 0 0 {LEN}"));
        std::thread::sleep(random.micros(60_000));
        network.cut(end);
        let outcome = user.answer(STALL * 10);
        let failed = outcome.is_err();
        if let Err(failure) = &outcome {
            assert!(matches!(failure.kind, Kind::Timeout | Kind::Disconnected), "{failure}");
            errors += 1;
        }
        // A new contact does not hang either.
        let unreachable = user.ask(&format!("import {ticket} tcp"));
        if let Err(failure) = unreachable {
            assert!(matches!(failure.kind, Kind::Timeout | Kind::Disconnected), "{failure}");
        }
        // What was in flight must not land once the cable is back.
        let target = if op == "read" { &mut user } else { &mut owner };
        if failed {
            target.must("fill 1 9 9");
        }
        network.heal(end);
        let again = eventually(Duration::from_secs(20), || user.ask(&format!("import {ticket} tcp")).is_ok());
        assert!(again, "no contact after healing");
        let remote = user.must(&format!("import {ticket} tcp")).number(0);
        user.must(&format!("read {remote} 2 0 0 {MIB}"));
        if failed {
            let target = if op == "read" { &mut user } else { &mut owner };
            target.must(&format!("check 1 9 9 0 {LEN}"));
        }
        if errors == 3 {
            return;
        }
    }
    panic!("in {errors} of 20 rounds the cable was pulled in mid-transfer");
}

#[test]
fn a_read_whose_cable_is_pulled_at_the_users_end_fails_in_time() {
    cable_pulled("a_read_whose_cable_is_pulled_at_the_users_end_fails_in_time", "read", End::B);
}

#[test]
fn a_write_whose_cable_is_pulled_at_the_owners_end_fails_in_time() {
    cable_pulled("a_write_whose_cable_is_pulled_at_the_owners_end_fails_in_time", "write", End::A);
}

/// How many connections of a process's host have sent bytes that nobody has acknowledged.
fn unacknowledged(pid: i32) -> usize {
    let table = std::fs::read_to_string(format!("/proc/{pid}/net/tcp")).unwrap();
    let queue = |line: &str| Some(line.split_whitespace().nth(4)?.split_once(':')?.0.to_owned());
    table.lines().skip(1).filter_map(queue).filter(|queue| queue.as_str() != "00000000").count()
}

/// A read that gives up during a cut leaves connections that the owner's kernel ends while no notice gets through.
#[test]
fn the_first_read_after_a_cut_has_healed_succeeds() {
    let test = "the_first_read_after_a_cut_has_healed_succeeds";
    const LEN: usize = 64 * MIB;
    let Some(network) = network(test) else { return };
    let _watchdog = watch(test, Duration::from_secs(120));
    let (mut owner, mut user) = pair(&network, false);
    user.must("open user stall=500");
    owner.must(&format!("register {LEN} system read"));
    owner.must("fill 1 1 1");
    user.must(&format!("register {LEN} system none"));
    let ticket = owner.must("ticket 1").text(0).to_owned();
    let mut given_up = 0;
    for round in 0..10 {
        let remote = user.must(&format!("import {ticket} tcp")).number(0);
        user.must(&format!("read {remote} 1 0 0 {LEN}"));
        user.tell(&format!("read {remote} 1 0 0 {LEN}"));
        std::thread::sleep(Duration::from_millis(10));
        network.cut(End::B);
        given_up += u32::from(user.answer(STALL * 10).is_err());
        // The owner's kernel waits for two seconds for bytes that nobody takes, and ends their connection.
        let ended = eventually(Duration::from_secs(20), || unacknowledged(owner.pid()) == 0);
        assert!(ended, "the owner's kernel keeps its bytes");
        network.heal(End::B);
        let again = eventually(Duration::from_secs(20), || user.ask(&format!("import {ticket} tcp")).is_ok());
        assert!(again, "no contact after healing");
        let first = user.ask(&format!("read {remote} 1 0 0 {LEN}"));
        first.unwrap_or_else(|failure| panic!("round {round}: {failure}"));
        user.must(&format!("check 1 1 1 0 {LEN}"));
        user.must(&format!("forget {remote}"));
        if given_up == 2 {
            return;
        }
    }
    panic!("the cable was pulled in mid-transfer in {given_up} of 10 rounds");
}

#[test]
fn an_owner_whose_peer_is_cut_off_takes_its_memory_back() {
    let test = "an_owner_whose_peer_is_cut_off_takes_its_memory_back";
    let Some(network) = network(test) else { return };
    let _watchdog = watch(test, Duration::from_secs(60));
    let (mut owner, mut user) = pair(&network, false);
    owner.must(&format!("register {} system read+write", 256 * MIB));
    user.must(&format!("register {} system none", 256 * MIB));
    let ticket = owner.must("ticket 1").text(0).to_owned();
    let remote = user.must(&format!("import {ticket} tcp")).number(0);
    user.must(&format!("loop read {remote} 1 {}", 256 * MIB));
    std::thread::sleep(Duration::from_millis(50));
    network.cut(End::B);
    // Bytes are in flight to a peer that will never take them. It waits for no peer; a busy machine is given five seconds.
    owner.must("deregister 1 5000");
    let stats = owner.must("stats");
    assert_eq!((stats.number(0), stats.number(1)), (0, 0), "regions and parked storages");
}

/// An operation at end A that end B claims, and then the cable is pulled at that end.
fn claimer_cut_off(test: &str, op: &str, how: &str, end: End) {
    let Some(network) = network(test) else { return };
    let _watchdog = watch(test, Duration::from_secs(120));
    const LEN: usize = 256 * MIB;
    let (mut owner, mut claimer) = pair(&network, false);
    let metadata = owner.must(&format!("offer {op} {LEN} system")).payload;
    claimer.ask_with(&format!("claim {op} {LEN} {how}"), &metadata).unwrap();
    // A silent claim is made by a thread; another claimer would be refused once it is there.
    if !how.is_empty() {
        let claimed = eventually(STALL * 5, || {
            let second = claimer.ask_with(&format!("claim {op} {LEN}"), &metadata);
            second.err().is_some_and(|failure| failure.message.contains("already claimed"))
        });
        assert!(claimed, "nobody claims it");
    }
    network.cut(end);
    // The limit of the whole operation is 30 s and more: this must come from the silence alone.
    let failure = owner.ask(&format!("ended {}", (STALL * 10).as_millis())).unwrap_err();
    assert!(matches!(failure.kind, Kind::Disconnected | Kind::Timeout), "{failure}");
    assert!(failure.message.contains("user") && failure.message.contains("claimer"), "{failure}");
    let stats = owner.must("stats");
    assert_eq!((stats.number(0), stats.number(1)), (0, 0), "regions and parked storages");
}

#[test]
fn a_silent_claimer_whose_cable_is_pulled_leaves_the_readable_errored() {
    let test = "a_silent_claimer_whose_cable_is_pulled_leaves_the_readable_errored";
    claimer_cut_off(test, "read", "silently", End::B);
}

#[test]
fn a_silent_claimer_of_an_owner_whose_cable_is_pulled_leaves_the_writable_errored() {
    let test = "a_silent_claimer_of_an_owner_whose_cable_is_pulled_leaves_the_writable_errored";
    claimer_cut_off(test, "write", "silently", End::A);
}

#[test]
fn a_reader_whose_cable_is_pulled_leaves_the_readable_errored() {
    claimer_cut_off("a_reader_whose_cable_is_pulled_leaves_the_readable_errored", "read", "", End::B);
}

/// The same, and no limit of the user's ends anything.
fn patient_pair(network: &Network) -> (Process, Process) {
    let mut owner = Process::start_in(&network.namespace(End::A), "owner");
    let mut user = Process::start_in(&network.namespace(End::B), "user");
    let address = std::net::SocketAddr::new(network.address(End::A, false), 0);
    owner.must(&format!("open owner listen={address}"));
    user.must("open user stall=600000 total=600000");
    (owner, user)
}

/// What a host that has vanished is noticed by has nothing to do with the limits of a transfer.
fn host_vanishes(test: &str, op: &str, len: usize) {
    let Some(network) = network(test) else { return };
    let _watchdog = watch(test, Duration::from_secs(120));
    let (mut owner, mut user) = patient_pair(&network);
    owner.must(&format!("register {len} system read+write"));
    user.must(&format!("register {len} system none"));
    let ticket = owner.must("ticket 1").text(0).to_owned();
    let remote = user.must(&format!("import {ticket} tcp")).number(0);
    // The lanes are open, and the connections idle.
    user.must(&format!("{op} {remote} 1 0 0 {len}"));
    network.cut(End::A);
    user.tell(&format!("{op} {remote} 1 0 0 {len}"));
    let failure = user.answer(Duration::from_secs(20)).unwrap_err();
    assert_eq!(failure.kind, Kind::Disconnected, "{failure}");
    assert!(failure.message.contains("gone"), "{failure}");
}

#[test]
fn a_host_that_vanishes_under_a_small_read_is_noticed() {
    host_vanishes("a_host_that_vanishes_under_a_small_read_is_noticed", "read", 4096);
}

#[test]
fn a_host_that_vanishes_under_a_large_write_is_noticed() {
    host_vanishes("a_host_that_vanishes_under_a_large_write_is_noticed", "write", 64 * MIB);
}

#[test]
fn a_slow_link_is_not_taken_for_a_host_that_has_vanished() {
    let test = "a_slow_link_is_not_taken_for_a_host_that_has_vanished";
    let Some(network) = network(test) else { return };
    let _watchdog = watch(test, Duration::from_secs(240));
    if let Err(reason) = network.slow_down(1_000_000) {
        skip::skip(test, "netns", &reason);
        return;
    }
    let (mut owner, mut user) = patient_pair(&network);
    owner.must(&format!("register {MIB} system read+write"));
    owner.must("fill 1 1 1");
    user.must(&format!("register {MIB} system none"));
    let ticket = owner.must("ticket 1").text(0).to_owned();
    let remote = user.must(&format!("import {ticket} tcp")).number(0);
    user.tell(&format!("read {remote} 1 0 0 {MIB}"));
    user.answer(Duration::from_secs(100)).unwrap();
    user.must(&format!("check 1 1 1 0 {MIB}"));
    user.tell(&format!("write {remote} 1 0 0 {MIB}"));
    user.answer(Duration::from_secs(100)).unwrap();
}

#[test]
fn of_a_write_over_a_slow_link_that_is_cancelled_nothing_lands_once_it_is_quiet() {
    const LEN: usize = 64 * MIB;
    let test = "of_a_write_over_a_slow_link_that_is_cancelled_nothing_lands_once_it_is_quiet";
    let Some(network) = network(test) else { return };
    let _watchdog = watch(test, Duration::from_secs(240));
    if let Err(reason) = network.slow_down(1_000_000) {
        skip::skip(test, "netns", &reason);
        return;
    }
    let (mut owner, mut user) = patient_pair(&network);
    owner.must(&format!("register {LEN} system read+write"));
    user.must(&format!("register {LEN} system none"));
    user.must("fill 1 1 1");
    let ticket = owner.must("ticket 1").text(0).to_owned();
    let remote = user.must(&format!("import {ticket} tcp")).number(0);
    let mut random = Random::new(17);
    let landed = |owner: &mut Process| owner.must(&format!("take 1 0 {LEN}")).payload;
    for _ in 0..4 {
        owner.must("fill 1 9 9");
        let moment = 500 + random.below(1000);
        user.tell(&format!("give-up write {remote} 1 {LEN} {moment}"));
        // It ends within two seconds, whatever the limits are; a busy machine is given more.
        let took = user.answer(Duration::from_secs(100)).unwrap().number(0);
        assert!(took < 10_000, "it ended after {took} ms");
        let quiet = landed(&mut owner);
        let stayed = stays(Duration::from_millis(800), || landed(&mut owner) == quiet);
        assert!(stayed, "bytes landed behind a quiet end");
    }
    // What was given up does not hold up what comes next, nor does a read that is given up.
    user.tell(&format!("give-up read {remote} 1 {LEN} 1500"));
    user.answer(Duration::from_secs(100)).unwrap();
    user.tell(&format!("read {remote} 1 0 0 4096"));
    user.answer(Duration::from_secs(30)).unwrap();
}

/// A network that keeps bytes for longer than a host may be silent, and brings them slowly afterwards: with the session over, nobody is
/// asked any more, and a write that the owner may still be making must not be called quiet.
#[test]
fn of_a_write_that_the_network_keeps_until_its_session_is_over_nothing_lands_once_it_is_quiet() {
    const LEN: usize = 8 * MIB;
    let test = "of_a_write_that_the_network_keeps_until_its_session_is_over_nothing_lands_once_it_is_quiet";
    let Some(network) = network(test) else { return };
    let _watchdog = watch(test, Duration::from_secs(240));
    let (mut owner, mut user) = patient_pair(&network);
    owner.must(&format!("register {LEN} system read+write"));
    user.must(&format!("register {LEN} system none"));
    user.must("fill 1 1 1");
    let ticket = owner.must("ticket 1").text(0).to_owned();
    let remote = user.must(&format!("import {ticket} tcp")).number(0);
    // The lanes are open, and TCP knows that much may be on its way at a time.
    user.must(&format!("write {remote} 1 0 0 {LEN}"));
    owner.must("fill 1 9 9");
    if let Err(reason) = network.hold_back(End::B) {
        skip::skip(test, "netns", &reason);
        return;
    }
    user.tell(&format!("lose {remote} 1 {LEN}"));
    let lost = user.answer(Duration::from_secs(100)).unwrap();
    assert_eq!(lost.text(0), "Disconnected");
    let quiet = lost.text(1) == "true";
    let landed = |owner: &mut Process| owner.must(&format!("take 1 0 {LEN}")).payload;
    let before = landed(&mut owner);
    network.let_pass(End::B, 4_000_000);
    // A packet behind those that were kept sets them going.
    let again = eventually(Duration::from_secs(60), || user.ask(&format!("import {ticket} tcp")).is_ok());
    assert!(again, "no contact after the network has let it through");
    let late = before.iter().zip(landed(&mut owner)).filter(|(before, now)| **before != *now).count();
    assert!(!quiet, "{late} bytes landed behind an end that was called quiet");
}
