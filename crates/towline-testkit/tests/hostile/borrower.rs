//! A peer that holds a ticket and wants the memory lent by NIXL, whatever its owner says. It asks by itself, because the library would
//! not: the owner refuses before it looks for NIXL, so none has to be here.

use std::time::Duration;

use towline::ticket::Ticket;
use towline::wire::{QueryReply, WireError};
use towline::{Access, Endpoint, Kind, Probe, SystemStorage};
use towline_testkit::attacker::{Attacker, Medium};
use towline_testkit::bench::options_for;
use towline_testkit::watchdog::{Watchdog, watch};
use towline_testkit::{lending, skip};

use crate::{LEN, Target};

/// The path's number, and what it is asked: to reach a region, and to do the owner's part of what is in flight.
const NIXL: u8 = 2;
const ATTACH: u8 = 1;
const HELP: u8 = 2;

const MEDIA: [Medium; 2] = [Medium::Unix, Medium::Tcp];

/// What a peer may say of itself, in the last byte of its query: that it insists, and that it pins.
const FLAGS: std::ops::Range<u8> = 0..4;

/// The query, in bytes: kind 20, the padding, the length of the body, the request; the grant, the path, and words of which the
/// first byte is version 1; zeros up to 64.
fn query(request: u8, handle: u32, words: &[u8]) -> Vec<u8> {
    let mut body = handle.to_le_bytes().to_vec();
    body.extend([NIXL, words.len() as u8, 0]);
    body.extend(words);
    let pad = (24 + body.len()).next_multiple_of(64) - 24 - body.len();
    let mut frame = vec![0; 24];
    (frame[0], frame[3], frame[4], frame[16]) = (20, pad as u8, body.len() as u8, request);
    frame.extend(body);
    frame.resize(frame.len() + pad, 0);
    frame
}

/// The owner's reply to a holder of that ticket.
fn asked(ticket: &Ticket, medium: Medium, flags: u8) -> Result<Vec<u8>, WireError> {
    let mut peer = Attacker::connect(ticket, medium);
    let handle = peer.log_in(ticket);
    answer(&mut peer, handle, &[1, ATTACH, flags])
}

fn answer(peer: &mut Attacker, handle: u32, words: &[u8]) -> Result<Vec<u8>, WireError> {
    peer.send(&query(77, handle, words));
    let (header, body) = peer.frame().expect("a reply");
    assert_eq!((header.kind as u8, header.id), (21, 77));
    QueryReply::decode(&body).unwrap().outcome
}

/// Asserts that no holder of that ticket is lent anything, and that the owner says why.
#[track_caller]
fn refused(ticket: &Ticket, why: &str) {
    for medium in MEDIA {
        for flags in FLAGS {
            let answer = asked(ticket, medium, flags).map(|answer| answer.len());
            let error = answer.expect_err("the owner said how to reach its memory");
            assert_eq!(error.kind, Kind::Unavailable, "{}", error.message);
            assert!(error.message.contains(why), "over {medium:?}: {}", error.message);
        }
    }
}

fn lending() -> String {
    lending::words("nixl")
}

#[test]
fn an_owner_that_has_not_opted_in_lends_nothing_to_who_insists() {
    let mut target = Target::open("an_owner_that_has_not_opted_in_lends_nothing_to_who_insists");
    refused(&target.ticket, "NixlOptions::lend_over");
    assert_eq!(target.process.must("stats-nixl").text(0), "none", "NIXL was started");
    target.is_unharmed();
}

#[test]
fn a_ticket_that_was_narrowed_is_lent_nothing() {
    let mut target = Target::open_with("a_ticket_that_was_narrowed_is_lent_nothing", &lending());
    let whole = &target.ticket;
    let len = LEN as u64;
    for (start, length) in [(0, len - 1), (1, len - 1), (0, 0), (4096, 64)] {
        refused(&whole.narrow().range(start, length).finish().unwrap(), "the whole region");
    }
    for access in [Access::READ, Access::WRITE, Access::NONE] {
        refused(&whole.narrow().access(access).finish().unwrap(), "with read and write");
    }
    assert_eq!(target.process.must("stats-nixl").text(0), "none", "NIXL was started");
    target.is_unharmed();
}

#[test]
fn an_owner_that_isolates_itself_or_forbids_nixl_lends_nothing_though_it_has_opted_in() {
    let test = "an_owner_that_isolates_itself_or_forbids_nixl_lends_nothing_though_it_has_opted_in";
    for against in ["isolation=enforced", "forbid=nixl"] {
        let mut target = Target::open_with(test, &format!("{} {against}", lending()));
        refused(&target.ticket, "its own routing, or its isolation");
        assert_eq!(target.process.must("stats-nixl").text(0), "none", "NIXL was started");
        target.is_unharmed();
    }
}

#[test]
fn a_region_that_may_only_be_read_is_not_lent() {
    let mut target = Target::open_with("a_region_that_may_only_be_read_is_not_lent", &lending());
    for access in ["read", "write"] {
        let number = target.process.must(&format!("register {LEN} system {access}")).number(0);
        let ticket = target.process.must(&format!("ticket {number}")).text(0).parse().unwrap();
        refused(&ticket, "with read and write");
    }
    target.is_unharmed();
}

/// What UCX does over an interface it does itself, by plain loads and stores, and a page that has gone away ends the process.
#[test]
fn memory_that_may_go_away_is_not_lent_over_an_interface() {
    let mut target = Target::open_with("memory_that_may_go_away_is_not_lent_over_an_interface", "lend=lo");
    let file = std::env::temp_dir().join(format!("towline-borrowed-{}", std::process::id()));
    std::fs::write(&file, [7; LEN]).unwrap();
    let number =
        target.process.must(&format!("register {LEN} mapped:{} read+write", file.display())).number(0);
    std::fs::remove_file(&file).unwrap();
    let ticket = target.process.must(&format!("ticket {number}")).text(0).parse().unwrap();
    refused(&ticket, "memory that Towline allocated");
    assert_eq!(target.process.must("stats-nixl").text(0), "none", "NIXL was started");
    target.is_unharmed();
}

/// A peer over TCP shares nothing with the owner: that a loan is counted is all that shows it.
#[test]
fn a_loan_is_counted_before_its_answer_goes_out() {
    let test = "a_loan_is_counted_before_its_answer_goes_out";
    let Some(_watchdog) = with_nixl(test) else { return };
    let owner: Endpoint = options_for("nixl", "owner").open().unwrap();
    let region = owner.register(SystemStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap();
    let ticket = region.ticket().unwrap();
    let read_only = ticket.narrow().access(Access::READ).finish().unwrap();
    asked(&read_only, Medium::Tcp, 0).unwrap_err();
    assert!(!region.audit().is_incomplete(), "nothing was lent: {}", region.audit());
    asked(&ticket, Medium::Tcp, 0).expect("a loan");
    for audit in [region.audit(), owner.audit()] {
        let peer = audit.peers.iter().find(|peer| peer.peer == "attacker").expect("it is counted");
        assert!(peer.unseen, "{audit}");
    }
}

/// The owner's agent works for the peers in the audit, and for no other.
#[test]
fn help_is_given_only_to_who_was_lent_something() {
    let test = "help_is_given_only_to_who_was_lent_something";
    let Some(_watchdog) = with_nixl(test) else { return };
    let owner: Endpoint = options_for("nixl", "owner").open().unwrap();
    let region = owner.register(SystemStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap();
    let ticket = region.ticket().unwrap();
    let help_given = || owner.stats().nixl.map_or(0, |nixl| nixl.help_given);
    // Request 0 wants no reply; the query behind it has one, that it is not a query.
    let call = |peer: &mut Attacker, handle| {
        peer.send(&query(0, handle, &[1, HELP]));
        answer(peer, handle, &[9]).unwrap_err();
    };
    let mut borrower = Attacker::connect(&ticket, Medium::Tcp);
    let lent = borrower.log_in(&ticket);
    answer(&mut borrower, lent, &[1, ATTACH, 0]).expect("a loan");
    let connecting = help_given();
    call(&mut borrower, lent);
    assert_eq!(help_given(), connecting + 1, "a peer that was lent the region is helped");
    let read_only = ticket.narrow().access(Access::READ).finish().unwrap();
    let half = ticket.narrow().range(0, LEN as u64 / 2).finish().unwrap();
    for ticket in [&ticket, &read_only, &half] {
        let mut other = Attacker::connect(ticket, Medium::Tcp);
        let handle = other.log_in(ticket);
        call(&mut other, handle);
    }
    assert_eq!(help_given(), connecting + 1, "a peer to which nothing was lent was helped");
}

/// A watchdog, where NIXL is here; otherwise says that it is not.
fn with_nixl(test: &str) -> Option<Watchdog> {
    let paths = towline::paths();
    if let Probe::Missing { reason, .. } = &paths.iter().find(|path| path.name == "nixl").unwrap().probe {
        skip::skip(test, "nixl", reason);
        return None;
    }
    Some(watch(test, Duration::from_secs(120)))
}
