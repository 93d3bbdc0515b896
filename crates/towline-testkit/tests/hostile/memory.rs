//! Holders of one good ticket that want the owner's memory: as many sessions, grants, half frames, unread answers and messages as they
//! can get.

use towline::Kind;
use towline::ticket::Ticket;
use towline::wire::{
    Block, Data, FrameKind, Granted, HEADER_LEN, Import, ImportItem, MAX_BODY, MAX_HELLO, Message, Notify,
    Read, Release, WireError, frame,
};
use towline_testkit::attacker::{Attacker, Medium};
use towline_testkit::process::Process;
use towline_testkit::watchdog::{eventually, watch};

use crate::{LEN, PATIENCE, Target};

/// What peers may take, for these tests: each of the attacks would take more by itself if nobody counted it.
const MEMORY: u64 = 24 << 20;

/// What the process may take besides: threads at work, the allocator's leftovers.
const BESIDE: u64 = 6 << 20;

/// What a session on one host shares with its peer.
const SHARED: u64 = 180 << 10;

/// How many sessions attack.
const SESSIONS: usize = 32;

/// What one of them does once it has a session: the ticket, its challenge and its handle are there.
type Attack = fn(&mut Attacker, &Ticket, &[u8; 32], u32);

fn target(test: &str) -> Target {
    Target::open_with(test, &format!("memory={MEMORY}"))
}

/// Sessions that all do the same stay within the bound together, and leave room for others; what they took comes back.
fn stays_within_the_bound(test: &str, attack: Attack) {
    let mut target = target(test);
    let idle: u64 = target.process.must("stats").number(4);
    let before = target.process.resident();
    let mut attackers = Vec::new();
    for number in 0..SESSIONS {
        let medium = if number % 2 == 0 { Medium::Unix } else { Medium::Tcp };
        let mut attacker = Attacker::connect(&target.ticket, medium);
        let Ok(challenge) = attacker.shake_hands(&target.ticket) else { continue };
        if let Ok(handle) = attacker.import(&target.ticket, &challenge) {
            attack(&mut attacker, &target.ticket, &challenge, handle);
        }
        attackers.push(attacker);
        let counted: u64 = target.process.must("stats").number(4);
        assert!(counted <= MEMORY, "{counted} bytes are counted after {number} sessions");
    }
    // What was sent last is still on its way.
    let mut most = 0;
    eventually(PATIENCE / 10, || {
        most = target.process.resident().max(most);
        false
    });
    let grown = most.saturating_sub(before);
    assert!(grown <= MEMORY + BESIDE, "{} MiB for {} sessions", grown >> 20, attackers.len());
    target.serves();
    drop(attackers);
    // They did not say goodbye, and so what is shared on one host counts until their process ends, which is this one.
    let left = idle + (SESSIONS / 2) as u64 * SHARED;
    let back = eventually(PATIENCE * 4, || target.process.must("stats").number(4) <= left);
    assert!(back, "{} bytes are still counted", target.process.must("stats").number(4));
    target.is_unharmed();
}

/// Imports tickets that are all different until one is refused, which it returns; `None` where the session is ended.
fn import_all(attacker: &mut Attacker, ticket: &Ticket, challenge: &[u8; 32]) -> Option<WireError> {
    for round in 0..200u64 {
        let items = (0..128)
            .map(|number| {
                let narrowed = ticket.narrow().range(round * 128 + number, 8).finish().unwrap();
                let proof = narrowed.proof(challenge);
                ImportItem { ticket: narrowed.public_bytes().to_vec(), proof, operation: None }
            })
            .collect();
        attacker.send(&Message::from(Import { items }).frame(1, 0, 0));
        let (header, body) = attacker.frame()?;
        assert_eq!(header.kind, FrameKind::Granted);
        if let Some(Err(error)) = Granted::decode(&body).unwrap().items.pop() {
            return Some(error);
        }
    }
    panic!("nothing is refused");
}

#[test]
fn sessions_that_import_all_they_can_stay_within_the_bound() {
    stays_within_the_bound(
        "sessions_that_import_all_they_can_stay_within_the_bound",
        |attacker, ticket, challenge, _| drop(import_all(attacker, ticket, challenge)),
    );
}

#[test]
fn a_session_that_has_its_share_is_refused_more_and_goes_on() {
    let mut target = target("a_session_that_has_its_share_is_refused_more_and_goes_on");
    for medium in [Medium::Unix, Medium::Tcp] {
        let mut attacker = Attacker::connect(&target.ticket, medium);
        let challenge = attacker.shake_hands(&target.ticket).unwrap();
        let handle = attacker.import(&target.ticket, &challenge).unwrap();
        let error = import_all(&mut attacker, &target.ticket, &challenge).expect("a refusal");
        assert_eq!(error.kind, Kind::Exhausted, "{}", error.message);
        // The same ticket takes nothing more, and what is released is there again.
        assert_eq!(attacker.import(&target.ticket, &challenge).unwrap(), handle);
        for number in 0..64 {
            attacker.send(&Message::from(Release { handle: handle + 1 + number }).frame(0, 0, 0));
        }
        let read = Read { transfer: 0, handle, blocks: vec![Block { offset: 0, len: 64 }] };
        attacker.send(&Message::from(read).frame(7, 0, 0));
        let (_, body) = attacker.frame().expect("a reply");
        assert!(Data::decode(&body).unwrap().outcome.is_ok(), "over {medium:?}");
    }
    target.is_unharmed();
}

#[test]
fn halves_of_long_frames_stay_within_the_bound() {
    stays_within_the_bound("halves_of_long_frames_stay_within_the_bound", |attacker, _, _, _| {
        let whole = frame(FrameKind::Read, 1, &vec![0; MAX_BODY as usize - 64], 0, 0);
        attacker.send(&whole[..whole.len() - 1]);
    });
}

#[test]
fn answers_that_nobody_takes_stay_within_the_bound() {
    stays_within_the_bound("answers_that_nobody_takes_stay_within_the_bound", |attacker, _, _, handle| {
        let blocks: Vec<Block> = (0..4096).map(|at| Block { offset: at * 16, len: 8 }).collect();
        let read = Message::from(Read { transfer: 0, handle, blocks }).frame(7, 0, 0);
        // What the owner does not read any more must not hold this side up.
        attacker.send_what_fits(&read.repeat(60));
    });
}

#[test]
fn what_waits_for_a_last_piece_stays_within_the_bound() {
    stays_within_the_bound("what_waits_for_a_last_piece_stays_within_the_bound", |attacker, _, _, _| {
        let notify = Notify { transfer: 9, pieces: 2, message: vec![1; 60_000] };
        let frame = Message::from(notify).frame(0, 0, 0);
        for _ in 0..600 {
            attacker.send(&frame);
        }
    });
}

#[test]
fn buffers_for_sums_that_stop_half_way_stay_within_the_bound() {
    stays_within_the_bound(
        "buffers_for_sums_that_stop_half_way_stay_within_the_bound",
        |attacker, _, _, handle| {
            let block = Block { offset: 0, len: LEN as u32 };
            let blocks = vec![block; (4 << 20) / LEN];
            let (op, dtype) = (towline::ReduceOp::Sum, towline::Dtype::U64);
            let reduce = towline::wire::Reduce { transfer: 0, handle, op, dtype, blocks };
            let frame = Message::from(reduce).frame(1, 4 << 20, 0);
            attacker.send(&frame);
            attacker.send(&vec![0; (4 << 20) - HEADER_LEN]);
        },
    );
}

/// Those that have not proven anything yet are beside the bound of all peers: each with as much as its half of a handshake can hold.
#[test]
fn half_handshakes_stay_within_what_is_said() {
    const CROWD: u64 = 256;
    let test = "half_handshakes_stay_within_what_is_said";
    let _watchdog = watch(test, PATIENCE * 40);
    for (medium, options, each) in
        [(Medium::Unix, "", 64 << 10), (Medium::Tcp, "", 64 << 10), (Medium::Tcp, "tls=yes", 288 << 10)]
    {
        let mut process = Process::open("target", &format!("prove=60000 {options}"));
        process.must(&format!("register {LEN} system read+write"));
        let ticket: Ticket = process.must("ticket 1").text(0).parse().unwrap();
        let (before, descriptors) = (process.resident(), process.descriptors());
        let crowd: Vec<Attacker> = (0..CROWD)
            .map(|_| {
                let mut attacker = Attacker::connect(&ticket, medium);
                if options.is_empty() {
                    attacker.send(&Attacker::hello(&ticket).1);
                    assert_eq!(attacker.frame().expect("a welcome").0.kind, FrameKind::Welcome);
                    let proof = frame(FrameKind::Prove, 0, &vec![0; MAX_HELLO as usize - 64], 0, 0);
                    attacker.send(&proof[..proof.len() - 1]);
                } else {
                    // About the longest greeting of TLS, whose last byte is missing: records of 16 KiB.
                    let hello = [&[1, 0, 0xf0, 0][..], &[0; 0xefff]].concat();
                    for record in hello.chunks(1 << 14) {
                        let len = (record.len() as u16).to_be_bytes();
                        attacker.send(&[&[22, 3, 1][..], &len, record].concat());
                    }
                }
                attacker
            })
            .collect();
        let mut most = 0;
        eventually(PATIENCE / 5, || {
            most = process.resident().max(most);
            false
        });
        let kept = (process.descriptors() - descriptors) as u64;
        assert!(kept >= CROWD - 8, "{kept} connections are there, over {medium:?} {options}");
        let grown = most.saturating_sub(before);
        assert!(grown <= CROWD * each, "{} KiB each, over {medium:?} {options}", (grown / CROWD) >> 10);
        drop(crowd);
    }
}

#[test]
fn messages_of_one_sender_do_not_fill_the_queue_of_all() {
    let mut target = Target::open("messages_of_one_sender_do_not_fill_the_queue_of_all");
    for medium in [Medium::Unix, Medium::Tcp] {
        let mut greedy = Attacker::connect(&target.ticket, medium);
        greedy.log_in(&target.ticket);
        let long = Message::from(Notify { transfer: 0, pieces: 0, message: vec![1; 60_000] }).frame(0, 0, 0);
        for _ in 0..2000 {
            greedy.send(&long);
        }
        assert!(greedy.is_cut_off(PATIENCE * 4), "nothing bounds what it sends over {medium:?}");
        let mut other = Attacker::connect(&target.ticket, medium);
        other.log_in(&target.ticket);
        let short =
            Message::from(Notify { transfer: 0, pieces: 0, message: b"hello".to_vec() }).frame(9, 0, 0);
        other.send(&short);
        let (header, body) = other.frame().expect("a reply");
        assert_eq!(header.kind, FrameKind::Done);
        assert!(towline::wire::Done::decode(&body).unwrap().outcome.is_ok(), "over {medium:?}");
    }
    target.is_unharmed();
}
