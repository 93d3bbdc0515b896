//! A peer without a ticket: what it passes along with its messages, and what is written down of it.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use towline::wire::{HEADER_LEN, Message, Prove};
use towline::{Access, Endpoint, Quotas, SystemStorage};
use towline_testkit::attacker::{Attacker, Medium};
use towline_testkit::watchdog::{eventually, watch};

use crate::{PATIENCE, Target};

/// As many as the kernel passes at once.
const MOST_PASSED: usize = 253;

#[test]
fn descriptors_of_an_unauthenticated_peer_are_never_the_targets() {
    let mut target = Target::open("descriptors_of_an_unauthenticated_peer_are_never_the_targets");
    let hello = Attacker::hello(&target.ticket).1;
    let file = std::fs::File::open("/dev/null").unwrap();
    // Few enough that no single message is refused for the limit below.
    let files: Vec<BorrowedFd<'_>> = vec![file.as_fd(); 8];
    let limit = getrlimit(Resource::Nofile);
    let few = Rlimit { current: Some(target.descriptors as u64 + 64), maximum: limit.maximum };
    let pid = Pid::from_raw(target.process.pid());
    prlimit(pid, Resource::Nofile, few).unwrap();
    let mut most = 0;
    for round in 0..8 {
        let mut crowd = Vec::new();
        // Before anything, in the middle of a header, behind it, with the last byte; then with each of some more bytes.
        for start in [0, 5, HEADER_LEN, hello.len() - 1] {
            let mut attacker = Attacker::connect(&target.ticket, Medium::Unix);
            attacker.send(&hello[..start]);
            for byte in hello[start..].iter().take(1 + round) {
                attacker.send_with_files(std::slice::from_ref(byte), &files);
            }
            crowd.push(attacker);
        }
        // Long enough to be read, and not so long that its time is over.
        std::thread::sleep(Duration::from_millis(50));
        most = most.max(target.process.descriptors());
        for mut attacker in crowd {
            assert!(attacker.is_cut_off(PATIENCE), "an unauthenticated peer that passes descriptors is kept");
        }
    }
    let room = target.descriptors + 16;
    assert!(most <= room, "{most} descriptors, {} before", target.descriptors);
    target.serves();
    prlimit(pid, Resource::Nofile, limit).unwrap();
    assert!(eventually(PATIENCE * 10, || target.process.descriptors() <= target.descriptors));
    target.is_unharmed();
}

#[test]
fn a_peer_keeps_no_descriptors_in_the_target_beyond_the_one_that_its_frame_names() {
    let name = "a_peer_keeps_no_descriptors_in_the_target_beyond_the_one_that_its_frame_names";
    let mut target = Target::open(name);
    let file = std::fs::File::open("/dev/null").unwrap();
    let files: Vec<BorrowedFd<'_>> = vec![file.as_fd(); MOST_PASSED];
    for _ in 0..8 {
        let mut peer = Attacker::connect(&target.ticket, Medium::Unix);
        peer.log_in(&target.ticket);
        // Half a header, so that nothing is wrong with it yet.
        peer.send_with_files(&[48], &files);
        peer.send_with_files(&[0], &files);
        assert!(peer.is_cut_off(PATIENCE));
        let kept = target.process.descriptors().saturating_sub(target.descriptors);
        assert!(kept < 32, "{kept} descriptors more than before");
    }
    target.is_unharmed();
}

/// One counter of an endpoint's metrics.
fn metric(endpoint: &Endpoint, name: &str) -> u64 {
    let page = endpoint.metrics();
    let line = page.lines().find(|line| line.starts_with(&format!("{name} ")));
    line.unwrap_or_else(|| panic!("no {name} in\n{page}")).rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn every_refused_handshake_is_counted_by_reason_and_by_whom() {
    let _watchdog = watch("every_refused_handshake_is_counted_by_reason_and_by_whom", PATIENCE * 20);
    let quotas = Quotas { prove_within: Duration::from_millis(500), ..Quotas::default() };
    let owner = Endpoint::options("owner").quotas(quotas).open().unwrap();
    let region = owner.register(SystemStorage::new(64).unwrap(), Access::READ_WRITE).unwrap();
    let ticket = region.ticket().unwrap();
    let expired = ticket.narrow().lease(Duration::ZERO).finish().unwrap();
    let mut wanted = 0;
    for medium in [Medium::Unix, Medium::Tcp] {
        // Garbage.
        Attacker::connect(&ticket, medium).send(&[0xff; 64]);
        // A wrong proof.
        let mut wrong = Attacker::connect(&ticket, medium);
        wrong.send(&Attacker::hello(&ticket).1);
        wrong.send(&Message::from(Prove { mac: [7; 32] }).frame(0, 0, 0));
        assert!(wrong.gets_nothing_but_refusals());
        // A ticket whose lease has run out.
        Attacker::connect(&expired, medium).shake_hands(&expired).unwrap_err();
        // Silence.
        assert!(Attacker::connect(&ticket, medium).is_cut_off(PATIENCE));
        // A hello, and no more.
        Attacker::connect(&ticket, medium).send(&Attacker::hello(&ticket).1);
        // Not counted: a connection that says nothing and goes.
        drop(Attacker::connect(&ticket, medium));
        wanted += 1;
        for reason in ["protocol", "proof", "ticket", "late", "hung_up"] {
            let name = format!("towline_refused_handshakes_total{{reason=\"{reason}\"}}");
            let counted = eventually(PATIENCE, || metric(&owner, &name) == wanted);
            assert!(counted, "{reason} over {medium:?}: {}", owner.metrics());
        }
    }
    assert_eq!(owner.stats().refused_handshakes, 5 * wanted);
    assert_eq!(metric(&owner, "towline_refused_total"), 5 * wanted);
    let audit = owner.audit();
    let uid = rustix::process::geteuid().as_raw();
    let unauthenticated: Vec<_> =
        audit.unauthenticated.iter().map(|one| (one.origin.as_str(), one.refused)).collect();
    let here = format!("user {uid} of this host");
    assert_eq!(unauthenticated, [("127.0.0.1", 4), (here.as_str(), 4)], "{audit}");
    // A peer that had proven to hold the ticket is called by its name, also at the region.
    for audit in [audit, region.audit()] {
        let attacker = audit.peers.iter().find(|peer| peer.peer == "attacker").unwrap();
        assert_eq!(attacker.refused, 2, "{audit}");
    }
}

#[test]
fn who_hangs_up_in_the_middle_of_a_hello_is_counted_and_who_says_nothing_is_not() {
    let test = "who_hangs_up_in_the_middle_of_a_hello_is_counted_and_who_says_nothing_is_not";
    let _watchdog = watch(test, PATIENCE * 20);
    let owner = Endpoint::options("owner").open().unwrap();
    let region = owner.register(SystemStorage::new(64).unwrap(), Access::READ_WRITE).unwrap();
    let ticket = region.ticket().unwrap();
    let mut wanted = 0;
    for medium in [Medium::Unix, Medium::Tcp] {
        let hello = Attacker::hello(&ticket).1;
        for part in [1, 20, hello.len() / 2, hello.len() - 1] {
            drop(Attacker::connect(&ticket, medium));
            let mut peer = Attacker::connect(&ticket, medium);
            peer.send(&hello[..part]);
            drop(peer);
            wanted += 1;
            let counted = eventually(PATIENCE, || {
                metric(&owner, "towline_refused_handshakes_total{reason=\"hung_up\"}") == wanted
            });
            assert!(counted, "{part} bytes over {medium:?}: {}", owner.metrics());
        }
    }
    assert_eq!(owner.stats().refused_handshakes, wanted, "silence is not counted");
}

#[test]
fn unauthenticated_peers_that_hang_up_leave_nothing_for_as_long_as_they_had_time() {
    const FLOOD: usize = 30_000;
    let test = "unauthenticated_peers_that_hang_up_leave_nothing_for_as_long_as_they_had_time";
    // So long that nothing of what they leave is gone by itself before the test is over.
    let mut target = Target::open_with(test, "prove=600000");
    let flood = |count: usize| {
        for _ in 0..count {
            drop(Attacker::connect(&target.ticket, Medium::Unix));
        }
        // The last of them has been let go when this one gets its refusal.
        let mut last = Attacker::connect(&target.ticket, Medium::Unix);
        last.send(&[0xff; 64]);
        assert!(last.is_cut_off(PATIENCE * 4));
        target.process.resident()
    };
    let before = flood(2000);
    let grown = flood(FLOOD).saturating_sub(before);
    assert!(grown < 4 << 20, "{grown} bytes for {FLOOD} connections that are gone");
    target.is_unharmed();
}
