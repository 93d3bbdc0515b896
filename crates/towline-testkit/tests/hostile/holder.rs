//! A peer that holds one valid ticket and tries to make more of it: other bytes, other rights, other regions, other times,
//! other people's sessions.
//!
//! `TOWLINE_FORGED` sets how many forged accesses there are for each medium.

use std::time::Duration;

use towline::ticket::Ticket;
use towline::wire::handshake::{ClientHandshake, ClientKey};
use towline::wire::{
    Atomic, AtomicOp, Block, Data, Done, FrameKind, Granted, Import, ImportItem, KeyRef, Message, Ping,
    Prove, Query, Read, Reduce, Signal, Write,
};
use towline::{Access, Dtype, Endpoint, Identity, Incarnation, Isolation, ReduceOp, Routing, SystemStorage};
use towline_testkit::random::Random;

use crate::{LEN, STAMP, Target};
use towline_testkit::attacker::{Attacker, Medium};

/// The bytes that the holder may read: the rest of the region is not its own.
const OFFSET: u64 = 4096;
const LENGTH: u64 = 4096;

/// Where the fixed fields of a ticket lie (docs/reference/wire-format.md).
const HEAD_LEN: usize = 6;
const INCARNATION: usize = 24;
const ROW: usize = 40;
const GENERATION: usize = 44;
const REGION_LENGTH: usize = 52;
const ACCESS: usize = 65;

pub(crate) fn forged_accesses() -> usize {
    std::env::var("TOWLINE_FORGED").ok().and_then(|number| number.parse().ok()).unwrap_or(10_000)
}

/// How many frames are sent before their replies are read: fewer than fill a socket.
const BATCH: usize = 64;

fn narrowed(target: &mut Target) -> Ticket {
    let fresh: Ticket = target.process.must("ticket 1").text(0).parse().unwrap();
    let narrow = fresh.narrow().range(OFFSET, LENGTH).access(Access::READ);
    narrow.lease(Duration::from_secs(3600)).finish().unwrap()
}

/// The public bytes of a ticket that its holder would rather have, signed by nobody.
fn forge(held: &Ticket, other_row: u32, random: &mut Random) -> Vec<u8> {
    let honest = held.public_bytes();
    let head = usize::from(u16::from_le_bytes([honest[HEAD_LEN], honest[HEAD_LEN + 1]]));
    loop {
        let mut public = honest.to_vec();
        match random.below(10) {
            // Caveats taken away: all of them, or the last.
            0 => public.truncate(head),
            1 => public.truncate(public.len() - 11),
            // A wider range, more rights, a longer lease: the caveats stand in that order.
            2 => public[head + 3..head + 11].copy_from_slice(&random.below(OFFSET).to_le_bytes()),
            3 => public[head + 11..head + 19]
                .copy_from_slice(&(LENGTH + 1 + random.below(1 << 20)).to_le_bytes()),
            4 => public[head + 22] = Access::READ_WRITE.bits(),
            5 => {
                let end = public.len();
                public[end - 8..].copy_from_slice(&u64::MAX.to_le_bytes());
            }
            // Another region, another generation, another life, a longer region, more rights at the start.
            6 => public[ROW..ROW + 4].copy_from_slice(
                &[other_row, random.below(1 << 20) as u32][random.below(2) as usize].to_le_bytes(),
            ),
            7 => {
                public[GENERATION..GENERATION + 8].copy_from_slice(&random.below(64).to_le_bytes());
                public[ROW..ROW + 4].copy_from_slice(&(random.below(8) as u32).to_le_bytes());
            }
            8 => {
                public[REGION_LENGTH..REGION_LENGTH + 8].copy_from_slice(&(1u64 << 40).to_le_bytes());
                public[ACCESS] = Access::READ_WRITE.bits();
                public[INCARNATION] ^= random.below(2) as u8;
            }
            // Any bit.
            _ => {
                let at = random.below(public.len() as u64) as usize;
                public[at] ^= 1 << random.below(8);
            }
        }
        if public != honest {
            return public;
        }
    }
}

/// One request that the grant does not allow.
fn trespass(handle: u32, random: &mut Random) -> Vec<u8> {
    let outside = [LENGTH, LENGTH - 4, u64::MAX - 8, 1 << 40, LEN as u64][random.below(5) as usize];
    let offset = outside.saturating_add(random.below(4096) * 8).min(u64::MAX - 16);
    let other = [handle + 1, handle + 2, u32::MAX, random.below(1 << 32) as u32][random.below(4) as usize];
    let block = |offset, len| vec![Block { offset, len }];
    let read = |handle, blocks| Message::from(Read { transfer: 0, handle, blocks }).frame(7, 0, 0);
    let write = |handle, offset| {
        let message = Message::from(Write { transfer: 0, handle, blocks: block(offset, 8) });
        let mut bytes = message.frame(7, 8, 0);
        bytes.extend_from_slice(&[0xee; 8]);
        bytes
    };
    match random.below(9) {
        0 => read(handle, block(offset, 8)),
        1 => read(handle, block(LENGTH - 4, 8)),
        2 => read(handle, vec![Block { offset: 0, len: 8 }, Block { offset, len: 8 }]),
        3 if other != handle => read(other, block(0, 8)),
        4 => write(handle, random.below(LENGTH / 8) * 8),
        5 if other != handle => write(other, 0),
        6 => Message::from(Atomic { handle, offset: 0, op: AtomicOp::Add(1) }).frame(7, 0, 0),
        7 => Message::from(Signal { transfer: 0, pieces: 0, handle, offset: 0, add: 1 }).frame(7, 0, 0),
        _ => {
            let (op, dtype) = (ReduceOp::Sum, Dtype::U64);
            let reduce = Reduce { transfer: 0, handle, op, dtype, blocks: block(0, 8) };
            let mut bytes = Message::from(reduce).frame(7, 8, 0);
            bytes.extend_from_slice(&[0xee; 8]);
            bytes
        }
    }
}

/// How many refusals a reply holds; one that is not a refusal ends the test.
fn refusals(attacker: &mut Attacker) -> usize {
    let (header, body) = attacker.frame().expect("a reply");
    match header.kind {
        FrameKind::Data => assert!(Data::decode(&body).unwrap().outcome.is_err(), "bytes were given away"),
        FrameKind::Done => assert!(Done::decode(&body).unwrap().outcome.is_err(), "something was changed"),
        FrameKind::Granted => {
            let items = Granted::decode(&body).unwrap().items;
            assert!(items.iter().all(Result::is_err), "a forged ticket was granted");
            return items.len();
        }
        other => panic!("{other:?} came"),
    }
    1
}

#[test]
fn forged_accesses_are_all_refused_and_counted() {
    let mut target = Target::open("forged_accesses_are_all_refused_and_counted");
    // A region of another holder, and one that is gone.
    target.process.must(&format!("register {LEN} system read+write"));
    target.process.must("fill 2 2 1");
    let other: Ticket = target.process.must("ticket 2").text(0).parse().unwrap();
    target.process.must(&format!("register {LEN} system read+write"));
    target.process.must("deregister 3 5000");
    let held = narrowed(&mut target);
    for (seed, medium) in [(90, Medium::Unix), (91, Medium::Tcp)] {
        let mut random = Random::new(seed);
        let before = target.process.must("stats").number(3);
        // Another session with more rights, whose grants have the same numbers.
        let mut neighbour = Attacker::connect(&target.ticket, medium);
        neighbour.log_in(&target.ticket);
        let mut attacker = Attacker::connect(&held, medium);
        let challenge = attacker.shake_hands(&held).unwrap();
        let honest = ImportItem {
            ticket: held.public_bytes().to_vec(),
            proof: held.proof(&challenge),
            operation: None,
        };
        attacker.send(&Message::from(Import { items: vec![honest] }).frame(1, 0, 0));
        let (_, body) = attacker.frame().expect("the grant");
        let handle = Granted::decode(&body).unwrap().items.swap_remove(0).unwrap().handle;
        let (mut asked, wanted) = (0, forged_accesses());
        while asked < wanted {
            let mut answers = 0;
            for _ in 0..BATCH.min(wanted - asked) {
                let bytes = if random.below(2) == 0 {
                    let ticket = forge(&held, other.body().row, &mut random);
                    let proof = held.proof(&challenge);
                    let operation = (random.below(8) == 0).then_some([3; 16]);
                    Message::from(Import { items: vec![ImportItem { ticket, proof, operation }] })
                        .frame(7, 0, 0)
                } else {
                    trespass(handle, &mut random)
                };
                attacker.send(&bytes);
                answers += 1;
            }
            for _ in 0..answers {
                assert_eq!(refusals(&mut attacker), 1);
            }
            asked += answers;
        }
        let refused = target.process.must("stats").number(3) - before;
        assert!(refused >= asked as u64, "{asked} forged accesses over {medium:?}, {refused} counted");
        // And it still has what it is allowed.
        let read = Read { transfer: 0, handle, blocks: vec![Block { offset: 0, len: LENGTH as u32 }] };
        attacker.send(&Message::from(read).frame(7, 0, 0));
        let (_, body) = attacker.frame().expect("a reply");
        assert!(Data::decode(&body).unwrap().outcome.is_ok());
    }
    target.process.must(&format!("check 2 2 1 0 {LEN}"));
    target.process.must("deregister 2 5000");
    target.is_unharmed();
}

#[test]
fn proofs_of_another_connection_and_of_another_ticket_are_refused() {
    let mut target = Target::open("proofs_of_another_connection_and_of_another_ticket_are_refused");
    let held = narrowed(&mut target);
    for medium in [Medium::Unix, Medium::Tcp] {
        let mut first = Attacker::connect(&held, medium);
        let elsewhere = first.shake_hands(&held).unwrap();
        let mut second = Attacker::connect(&held, medium);
        let here = second.shake_hands(&held).unwrap();
        let item = |ticket: &Ticket, proof| ImportItem {
            ticket: ticket.public_bytes().to_vec(),
            proof,
            operation: None,
        };
        let items = vec![
            // The proof of another connection; the held tag for the ticket it was narrowed from; no proof.
            item(&held, held.proof(&elsewhere)),
            item(&target.ticket, held.proof(&here)),
            item(&held, [0; 32]),
        ];
        second.send(&Message::from(Import { items }).frame(7, 0, 0));
        assert_eq!(refusals(&mut second), 3, "over {medium:?}");
    }
    target.is_unharmed();
}

#[test]
fn leases_that_ran_out_and_operations_of_others_are_refused() {
    let mut target = Target::open("leases_that_ran_out_and_operations_of_others_are_refused");
    let held = narrowed(&mut target);
    let short = held.narrow().lease(Duration::ZERO).finish().unwrap();
    let gone: Ticket = {
        target.process.must(&format!("register {LEN} system read+write"));
        let gone = target.process.must("ticket 2").text(0).parse().unwrap();
        target.process.must("deregister 2 5000");
        gone
    };
    for medium in [Medium::Unix, Medium::Tcp] {
        let mut attacker = Attacker::connect(&held, medium);
        let challenge = attacker.shake_hands(&held).unwrap();
        let operation = [9; 16];
        let claimed = [&challenge[..], &operation].concat();
        let items = vec![
            ImportItem {
                ticket: short.public_bytes().to_vec(),
                proof: short.proof(&challenge),
                operation: None,
            },
            ImportItem {
                ticket: gone.public_bytes().to_vec(),
                proof: gone.proof(&challenge),
                operation: None,
            },
            ImportItem {
                ticket: held.public_bytes().to_vec(),
                proof: held.proof(&claimed),
                operation: Some(operation),
            },
        ];
        attacker.send(&Message::from(Import { items }).frame(7, 0, 0));
        assert_eq!(refusals(&mut attacker), 3, "over {medium:?}");
    }
    target.is_unharmed();
}

#[test]
fn sessions_of_others_cannot_be_joined() {
    let mut target = Target::open("sessions_of_others_cannot_be_joined");
    let held = narrowed(&mut target);
    let identity = Identity::new("thief", Incarnation([7; 16])).unwrap();
    let owner = held.body().identity.incarnation;
    for medium in [Medium::Unix, Medium::Tcp] {
        let mut honest = Attacker::connect(&target.ticket, medium);
        honest.log_in(&target.ticket);
        // A key of its own, from a session of its own.
        let mut attacker = Attacker::connect(&held, medium);
        let (handshake, hello) = Attacker::hello(&held);
        attacker.send(&hello);
        let (_, welcome) = attacker.frame().unwrap();
        let (_, key, _) = handshake.on_welcome(&welcome).unwrap();
        for id in 0..40 {
            let mut thief = Attacker::connect(&held, medium);
            let nonce = [id as u8; 32];
            let (handshake, hello) =
                ClientHandshake::start(&identity, owner, ClientKey::Session { id, key: &key }, nonce, None);
            thief.send(&hello);
            let Some((header, welcome)) = thief.frame() else { continue };
            if header.kind == FrameKind::Welcome {
                assert!(handshake.on_welcome(&welcome).is_err(), "the owner has the thief's key");
                thief.send(&Message::from(Prove { mac: [id as u8; 32] }).frame(0, 0, 0));
            }
            assert!(thief.gets_nothing_but_refusals(), "session {id} was joined over {medium:?}");
        }
        // The right session with the public part of a ticket as its key: no such mixture is known.
        let mut thief = Attacker::connect(&held, medium);
        let hello = towline::wire::Hello {
            oldest: 1,
            newest: 1,
            identity: identity.clone(),
            target: owner,
            nonce: [1; 32],
            key: KeyRef::Session(u64::MAX),
        };
        thief.send(&Message::from(hello).frame(0, 0, 0));
        assert!(thief.gets_nothing_but_refusals());
    }
    target.is_unharmed();
}

#[test]
fn an_owner_that_enforces_isolation_gives_nobody_its_memory() {
    let owner = Endpoint::options("strict")
        .routing(Routing::default().isolation(Isolation::Enforced))
        .open()
        .unwrap();
    let storage = towline::SharedStorage::new(LEN).unwrap();
    STAMP.fill_storage(&storage).unwrap();
    let region = owner.register(storage, Access::READ).unwrap();
    let ticket = region.ticket().unwrap();
    let mut user = towline_testkit::process::Process::open("user", "");
    // By itself the user would map the memory.
    let answer = user.must(&format!("import {ticket}"));
    assert_eq!(answer.text(1), "unix");
    for path in ["mapped", "cma"] {
        assert!(user.ask(&format!("import {ticket} {path}")).is_err(), "{path} was given");
    }
    let audit = region.audit();
    assert!(!audit.is_incomplete(), "{audit}");
    let local = Endpoint::open("here").unwrap();
    let target = local.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
    let routing = Routing::default().require("unix").unwrap();
    let remote = local.import_with(&ticket, &routing).unwrap();
    local.read(&remote, &target).start().unwrap().wait().unwrap();
    STAMP.verify_storage(target.storage(), 0, LEN).unwrap();
    let audit = region.audit();
    let here = audit.peers.iter().find(|peer| peer.peer == "here").unwrap();
    assert_eq!((here.reads, here.unseen), ((1, LEN as u64), false), "{audit}");
}

#[test]
fn a_word_that_wants_no_answer_gets_none_also_about_a_grant_that_is_gone() {
    let mut target = Target::open("a_word_that_wants_no_answer_gets_none_also_about_a_grant_that_is_gone");
    for medium in [Medium::Unix, Medium::Tcp] {
        let mut holder = Attacker::connect(&target.ticket, medium);
        holder.log_in(&target.ticket);
        let word = Query { handle: 4711, path: 2, body: b"let go".to_vec() };
        holder.send(&Message::from(word).frame(0, 0, 0));
        // A worker would answer it.
        assert!(holder.frame_within(Duration::from_millis(50)).is_none(), "over {medium:?}");
        holder.send(&Message::from(Ping {}).frame(9, 0, 0));
        assert_eq!(holder.frame().expect("a reply").0.kind, FrameKind::Pong, "over {medium:?}");
    }
    target.is_unharmed();
}
