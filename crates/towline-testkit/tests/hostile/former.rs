//! A peer that once held a ticket: the region is gone, its row is another's now, or the lease has run out. It speaks the protocol by
//! itself, because the library would not even try.

use std::time::Duration;

use towline::ticket::Ticket;
use towline::wire::{Block, FrameKind, Message, Ping, Read};
use towline::{Endpoint, Kind};
use towline_testkit::attacker::{Attacker, Medium};
use towline_testkit::bench::routing;
use towline_testkit::watchdog::eventually;

use crate::{LEN, PATIENCE, Target};

const MEDIA: [Medium; 2] = [Medium::Unix, Medium::Tcp];

/// How long a message may take to arrive.
const ARRIVES: &str = "receive 5000";

/// A moment after which a message that was not delivered never will be: a reply has come that was sent behind it.
const NOTHING: &str = "receive 1";

/// A message, in bytes: kind 39, the padding, the length of the body; no transfer, no pieces, the text; zeros up to 64.
fn notify(text: &[u8]) -> Vec<u8> {
    let body = 8 + 4 + text.len();
    let pad = (24 + body).next_multiple_of(64) - 24 - body;
    let mut frame = vec![0; 24 + body + pad];
    (frame[0], frame[3], frame[4]) = (39, pad as u8, body as u8);
    frame[36..36 + text.len()].copy_from_slice(text);
    frame
}

/// Registers one more region; its number and its ticket.
fn register(target: &mut Target) -> (u64, Ticket) {
    let number = target.process.must(&format!("register {LEN} system read+write")).number(0);
    (number, target.process.must(&format!("ticket {number}")).text(0).parse().unwrap())
}

#[test]
fn a_ticket_that_is_worth_nothing_any_more_opens_no_session() {
    let mut target = Target::open("a_ticket_that_is_worth_nothing_any_more_opens_no_session");
    let expired = target.ticket.narrow().lease(Duration::ZERO).finish().unwrap();
    let (number, gone) = register(&mut target);
    target.process.must(&format!("deregister {number} 5000"));
    // The next region gets the row of the one that is gone, in a later generation.
    let (_, next) = register(&mut target);
    assert_eq!(
        gone.body().row,
        next.body().row,
        "the row was not used again: the test tests less than it says"
    );
    assert_ne!(gone.body().generation, next.body().generation);
    let of_gone = gone.narrow().range(0, 8).finish().unwrap();
    for medium in MEDIA {
        for (ticket, kind) in
            [(&expired, Kind::PermissionDenied), (&gone, Kind::Stale), (&of_gone, Kind::Stale)]
        {
            let before = target.refused();
            let mut former = Attacker::connect(ticket, medium);
            let error = former.shake_hands(ticket).expect_err("a session was opened");
            assert_eq!(error.kind, kind, "{} over {medium:?}", error.message);
            // It goes on as if nothing had been said.
            former.send(&notify(b"from nobody"));
            assert!(former.is_cut_off(PATIENCE), "over {medium:?}");
            assert!(eventually(PATIENCE, || target.refused() > before), "nobody counted it");
        }
    }
    assert!(target.process.ask(NOTHING).is_err(), "a message was delivered");
    target.is_unharmed();
}

#[test]
fn who_holds_no_good_ticket_any_more_delivers_no_message_and_is_cut_off() {
    let mut target = Target::open("who_holds_no_good_ticket_any_more_delivers_no_message_and_is_cut_off");
    for medium in MEDIA {
        for by_lease in [false, true] {
            let (number, ticket) = register(&mut target);
            let lease = Duration::from_secs(2);
            let held = if by_lease { ticket.narrow().lease(lease).finish().unwrap() } else { ticket };
            let mut former = Attacker::connect(&held, medium);
            let handle = former.log_in(&held);
            former.send(&notify(b"while it is good"));
            assert_eq!(target.process.must(ARRIVES).payload, b"while it is good");
            if by_lease {
                std::thread::sleep(lease);
            } else {
                target.process.must(&format!("deregister {number} 5000"));
            }
            let blocks = vec![Block { offset: 0, len: 8 }];
            former.send(&Message::from(Read { transfer: 0, handle, blocks }).frame(7, 0, 0));
            assert_eq!(former.frame().expect("a refusal").0.kind, FrameKind::Data);
            former.send(&notify(b"too late"));
            assert!(former.is_cut_off(PATIENCE), "by lease: {by_lease}, over {medium:?}");
            assert!(target.process.ask(NOTHING).is_err(), "delivered; by lease: {by_lease}, over {medium:?}");
        }
    }
    target.is_unharmed();
}

#[test]
fn who_holds_another_good_ticket_still_delivers_messages() {
    let mut target = Target::open("who_holds_another_good_ticket_still_delivers_messages");
    for medium in MEDIA {
        let (number, first) = register(&mut target);
        let mut peer = Attacker::connect(&first, medium);
        let challenge = peer.shake_hands(&first).unwrap();
        peer.import(&first, &challenge).unwrap();
        peer.import(&target.ticket, &challenge).unwrap();
        target.process.must(&format!("deregister {number} 5000"));
        peer.send(&notify(b"still here"));
        assert_eq!(target.process.must(ARRIVES).payload, b"still here", "over {medium:?}");
        peer.send(&Message::from(Ping {}).frame(9, 0, 0));
        assert_eq!(peer.frame().expect("a reply").0.kind, FrameKind::Pong);
    }
    target.is_unharmed();
}

#[test]
fn tickets_that_ran_out_do_not_keep_the_others_of_one_import_out() {
    let mut target = Target::open("tickets_that_ran_out_do_not_keep_the_others_of_one_import_out");
    let expired = target.ticket.narrow().lease(Duration::ZERO).finish().unwrap();
    let (number, gone) = register(&mut target);
    target.process.must(&format!("deregister {number} 5000"));
    for path in ["unix", "tcp"] {
        let user = Endpoint::options("user").routing(routing(path)).open().unwrap();
        let tickets = [expired.clone(), gone.clone(), target.ticket.clone(), gone.clone()];
        let kinds: Vec<_> =
            user.import_many(&tickets).unwrap().into_iter().map(|one| one.err().map(|e| e.kind())).collect();
        let stale = Some(Kind::Stale);
        assert_eq!(kinds, [Some(Kind::PermissionDenied), stale, None, stale], "over {path}");
        let fresh = Endpoint::options("fresh").routing(routing(path)).open().unwrap();
        let all = fresh.import_many(&[gone.clone(), expired.clone()]).unwrap();
        let kinds: Vec<_> = all.into_iter().map(|one| one.err().map(|e| e.kind())).collect();
        assert_eq!(kinds, [stale, Some(Kind::PermissionDenied)], "over {path}");
    }
    target.is_unharmed();
}
