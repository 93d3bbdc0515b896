//! Peers that send garbage, floods, nothing, or die at any byte, against a live endpoint.
//!
//! The endpoint is in a worker, so that its descriptors can be counted from outside while tests run side by side.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod answers;
mod apart;
mod borrower;
mod former;
mod greed;
mod holder;
mod memory;
mod middle;
mod owner;
mod scarce;
mod unauthenticated;

use std::time::Duration;

use towline::ticket::{RegionKey, Ticket};
use towline::wire::{
    Atomic, AtomicOp, Block, FrameKind, HEADER_LEN, Header, Import, ImportItem, MAX_BODY, MAX_PAYLOAD,
    Message, Notify, Prove, Read, Reduce, Release, Signal, Write, frame,
};
use towline::{Access, Dtype, Endpoint, ReduceOp, SystemStorage};
use towline_testkit::attacker::{Attacker, Medium};
use towline_testkit::bench::routing;
use towline_testkit::oracle::Stamp;
use towline_testkit::process::Process;
use towline_testkit::random::Random;
use towline_testkit::watchdog::{Watchdog, eventually, watch};

const LEN: usize = 64 << 10;
const STAMP: Stamp = Stamp { region: 1, generation: 1 };

/// How long a peer that has not proven itself may stay; ten times that ends the test.
const PATIENCE: Duration = Duration::from_secs(5);

/// The endpoint under attack.
struct Target {
    process: Process,
    ticket: Ticket,
    descriptors: usize,
    _watchdog: Watchdog,
}

impl Target {
    fn open(test: &str) -> Target {
        Target::open_with(test, "")
    }

    fn open_with(test: &str, options: &str) -> Target {
        let long = Duration::from_millis(holder::forged_accesses() as u64);
        let watchdog = watch(test, PATIENCE * 10 + Duration::from_secs(60) + long);
        let mut process = Process::open("target", options);
        process.must(&format!("register {LEN} system read+write"));
        process.must("fill 1 1 1");
        let ticket = process.must("ticket 1").text(0).parse().unwrap();
        let mut target = Target { process, ticket, descriptors: 0, _watchdog: watchdog };
        // What the first contact starts for good (threads, their descriptors) belongs to the baseline.
        target.serves();
        target.settle();
        // One more stands for this process, where it hangs up without goodbye: until it exits, its pins would count.
        target.descriptors = target.process.descriptors() + 1;
        target
    }

    /// A good user is served, whatever else goes on.
    fn serves(&self) {
        for path in ["unix", "tcp"] {
            let user = Endpoint::options("good").routing(routing(path)).open().unwrap();
            let remote = user.import(&self.ticket).unwrap();
            let local = user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
            user.read(&remote, &local).start().unwrap().wait().unwrap();
            STAMP.verify_storage(local.storage(), 0, LEN).unwrap();
        }
    }

    /// How many accesses it has refused.
    fn refused(&mut self) -> u64 {
        self.process.must("stats").number(3)
    }

    /// Waits until the number of descriptors stands still for a while.
    fn settle(&self) {
        let mut last = (self.process.descriptors(), 0);
        eventually(Duration::from_secs(10), || {
            let now = self.process.descriptors();
            last = if now == last.0 { (now, last.1 + 1) } else { (now, 0) };
            last.1 > 100
        });
    }

    /// After the attack: others are served, nothing has changed, no descriptor is left over.
    fn is_unharmed(&mut self) {
        self.serves();
        self.process.must(&format!("check 1 1 1 0 {LEN}"));
        let back = eventually(PATIENCE * 10, || self.process.descriptors() <= self.descriptors);
        assert!(back, "{} descriptors, {} before", self.process.descriptors(), self.descriptors);
    }

    fn attackers(&self) -> impl Iterator<Item = Attacker> {
        [Medium::Unix, Medium::Tcp].into_iter().map(|medium| Attacker::connect(&self.ticket, medium))
    }
}

#[test]
fn garbage_is_cut_off() {
    let mut target = Target::open("garbage_is_cut_off");
    let mut random = Random::new(80);
    for round in 0..40 {
        for mut attacker in target.attackers() {
            let len = 1 + random.below(if round % 4 == 0 { 100_000 } else { 300 }) as usize;
            let garbage: Vec<u8> = (0..len).map(|_| random.number() as u8).collect();
            attacker.send(&garbage);
            // Less than a header says nothing yet: such a peer is cut off for its silence.
            if len >= HEADER_LEN {
                assert!(attacker.is_cut_off(PATIENCE * 4), "{len} bytes of garbage, round {round}");
            }
        }
    }
    target.is_unharmed();
}

#[test]
fn silence_and_half_a_hello_are_cut_off() {
    let mut target = Target::open("silence_and_half_a_hello_are_cut_off");
    let hello = Attacker::hello(&target.ticket).1;
    let mut waiting = Vec::new();
    for len in [0, 1, HEADER_LEN - 1, HEADER_LEN, HEADER_LEN + 1, hello.len() / 2, hello.len() - 1] {
        for mut attacker in target.attackers() {
            attacker.send(&hello[..len]);
            waiting.push((len, attacker));
        }
    }
    // One that never proves anything after its welcome.
    for mut attacker in target.attackers() {
        attacker.send(&hello);
        assert_eq!(attacker.frame().unwrap().0.kind, FrameKind::Welcome);
        waiting.push((hello.len(), attacker));
    }
    target.serves();
    for (len, mut attacker) in waiting {
        assert!(attacker.is_cut_off(PATIENCE * 4), "{len} bytes of a hello");
    }
    target.is_unharmed();
}

#[test]
fn a_flood_of_connections_does_not_keep_others_out() {
    let mut target = Target::open("a_flood_of_connections_does_not_keep_others_out");
    for _ in 0..3 {
        let flood: Vec<Attacker> = (0..100).flat_map(|_| target.attackers()).collect();
        assert_eq!(flood.len(), 200);
        target.serves();
        drop(flood);
    }
    target.is_unharmed();
}

#[test]
fn only_so_many_connections_without_a_proof_are_kept() {
    const FLOOD: usize = 400;
    /// The owner's limit for each socket that it listens on, and a little for what comes and goes meanwhile.
    const KEPT: usize = 256 + 16;
    let mut target = Target::open("only_so_many_connections_without_a_proof_are_kept");
    for medium in [Medium::Unix, Medium::Tcp] {
        let flood: Vec<Attacker> = (0..FLOOD).map(|_| Attacker::connect(&target.ticket, medium)).collect();
        target.settle();
        let kept = target.process.descriptors().saturating_sub(target.descriptors);
        assert!(kept <= KEPT, "{kept} of {FLOOD} connections over {medium:?} are kept");
        drop(flood);
        assert!(eventually(PATIENCE * 10, || target.process.descriptors() <= target.descriptors));
    }
    target.is_unharmed();
}

#[test]
fn wrong_proofs_are_refused() {
    let mut target = Target::open("wrong_proofs_are_refused");
    let body = target.ticket.body();
    let forged = Ticket::mint(body, &RegionKey::derive(&[9; 32], body.row, body.generation)).unwrap();
    for medium in [Medium::Unix, Medium::Tcp] {
        // The right ticket, a wrong proof.
        let mut attacker = Attacker::connect(&target.ticket, medium);
        attacker.send(&Attacker::hello(&target.ticket).1);
        assert_eq!(attacker.frame().unwrap().0.kind, FrameKind::Welcome);
        attacker.send(&Message::from(Prove { mac: [7; 32] }).frame(0, 0, 0));
        assert!(attacker.gets_nothing_but_refusals());
        // A forged ticket: its holder cannot check the server's proof, and goes on all the same.
        let mut attacker = Attacker::connect(&target.ticket, medium);
        let (handshake, hello) = Attacker::hello(&forged);
        attacker.send(&hello);
        let (_, welcome) = attacker.frame().unwrap();
        assert!(handshake.on_welcome(&welcome).is_err(), "the server proved to have a key that it has not");
        attacker.send(&Message::from(Prove { mac: [0; 32] }).frame(0, 0, 0));
        assert!(attacker.gets_nothing_but_refusals());
        // A proof that was seen elsewhere.
        let mut first = Attacker::connect(&target.ticket, medium);
        let (handshake, hello) = Attacker::hello(&target.ticket);
        first.send(&hello);
        let (_, welcome) = first.frame().unwrap();
        let (proof, ..) = handshake.on_welcome(&welcome).unwrap();
        let mut second = Attacker::connect(&target.ticket, medium);
        second.send(&hello);
        second.frame().unwrap();
        second.send(&proof);
        assert!(second.gets_nothing_but_refusals(), "a proof was accepted twice");
        // No proof at all, but requests.
        let mut attacker = Attacker::connect(&target.ticket, medium);
        attacker.send(&Message::from(Import { items: Vec::new() }).frame(1, 0, 0));
        assert!(attacker.gets_nothing_but_refusals());
    }
    target.is_unharmed();
}

/// Requests that a peer with a valid session has no right to: each is answered with an error, or ends the link.
fn mischief(handle: u32) -> Vec<(&'static str, Vec<u8>)> {
    let block = |offset: u64, len: u32| vec![Block { offset, len }];
    let read = |handle, blocks| Message::from(Read { transfer: 0, handle, blocks }).frame(7, 0, 0);
    let write = |handle, blocks, payload: &[u8]| {
        let mut bytes =
            Message::from(Write { transfer: 0, handle, blocks }).frame(7, payload.len() as u64, 0);
        bytes.extend_from_slice(payload);
        bytes
    };
    let word = |offset| Message::from(Atomic { handle, offset, op: AtomicOp::Add(1) }).frame(7, 0, 0);
    let header = |kind, body_len, payload_len, files| {
        Header { kind, flags: 0, files, pad: 0, body_len, payload_len, id: 7 }.encode().to_vec()
    };
    let mut odd_kind = header(FrameKind::Ping, 0, 0, 0);
    odd_kind[0] = 200;
    let mut odd_flags = header(FrameKind::Ping, 0, 0, 0);
    odd_flags[1] = 1;
    let mut short_read = read(handle, block(0, 8));
    short_read[4] -= 1;
    vec![
        ("a read past the end", read(handle, block(LEN as u64 - 8, 16))),
        ("a read far past the end", read(handle, block(1 << 40, 8))),
        ("a read that wraps around", read(handle, block(u64::MAX - 8, 8))),
        ("a read of another grant", read(handle + 1, block(0, 8))),
        ("a read of the last grant there can be", read(u32::MAX, block(0, 8))),
        (
            "one block out of many",
            read(handle, vec![Block { offset: 0, len: 8 }, Block { offset: LEN as u64, len: 1 }]),
        ),
        ("a write without the right", write(handle, block(0, 8), &[1; 8])),
        ("a write past the end", write(handle, block(LEN as u64, 8), &[1; 8])),
        ("a write with another length", write(handle, block(0, 16), &[1; 8])),
        ("a write of another grant", write(77, block(0, 8), &[1; 8])),
        ("an atomic without the right", word(0)),
        ("a misaligned atomic", word(3)),
        ("an atomic past the end", word(LEN as u64)),
        ("a signal past the end", {
            let signal = Signal { transfer: 0, pieces: 0, handle, offset: u64::MAX - 4, add: 1 };
            Message::from(signal).frame(7, 0, 0)
        }),
        ("a signal without the right", {
            let signal = Signal { transfer: 0, pieces: 0, handle, offset: 0, add: 1 };
            Message::from(signal).frame(7, 0, 0)
        }),
        ("a reduction without the right", {
            let reduce =
                Reduce { transfer: 0, handle, op: ReduceOp::Sum, dtype: Dtype::U64, blocks: block(0, 8) };
            let mut bytes = Message::from(reduce).frame(7, 8, 0);
            bytes.extend_from_slice(&[1; 8]);
            bytes
        }),
        ("a release of what was never granted", Message::from(Release { handle: 4711 }).frame(7, 0, 0)),
        ("an import of garbage", {
            let item = ImportItem { ticket: vec![3; 100], proof: [4; 32], operation: None };
            Message::from(Import { items: vec![item] }).frame(7, 0, 0)
        }),
        ("a message that is too long", frame(FrameKind::Notify, 7, &[0; (64 << 10) + 13], 0, 0)),
        ("pieces that never come", {
            Message::from(Notify { transfer: 99, pieces: 1000, message: b"x".to_vec() }).frame(7, 0, 0)
        }),
        ("an unknown frame", odd_kind),
        ("unknown flags", odd_flags),
        ("a body that is too long", header(FrameKind::Read, MAX_BODY + 1, 0, 0)),
        ("the longest body", header(FrameKind::Read, u32::MAX, 0, 0)),
        ("a payload that is too long", header(FrameKind::Write, 16, MAX_PAYLOAD + 1, 0)),
        ("a payload where none belongs", header(FrameKind::Ping, 0, 8, 0)),
        ("descriptors that do not come", header(FrameKind::Held, 0, 0, 1)),
        ("a body that ends early", short_read),
        ("a second hello", header(FrameKind::Hello, 0, 0, 0)),
        ("a reply to no request", header(FrameKind::Data, 1, 8, 0)),
        ("a grant", header(FrameKind::Granted, 2, 0, 0)),
        ("an empty read", frame(FrameKind::Read, 7, &[], 0, 0)),
    ]
}

#[test]
fn a_peer_with_a_ticket_gets_no_more_than_the_ticket_allows() {
    let mut target = Target::open("a_peer_with_a_ticket_gets_no_more_than_the_ticket_allows");
    let reader = target.ticket.narrow().access(Access::READ).finish().unwrap();
    for medium in [Medium::Unix, Medium::Tcp] {
        let count = mischief(0).len();
        for number in 0..count {
            let mut attacker = Attacker::connect(&reader, medium);
            let handle = attacker.log_in(&reader);
            let (name, bytes) = mischief(handle).swap_remove(number);
            attacker.send(&bytes);
            assert!(attacker.gets_nothing_but_errors(), "{name} over {medium:?} was served");
        }
        target.serves();
    }
    assert!(target.process.must("stats").number(3) > 0, "refusals are counted");
    target.is_unharmed();
}

#[test]
fn a_peer_that_asks_for_files_and_takes_nothing_does_not_fill_the_owners_memory() {
    const FILE: usize = 32 << 20;
    const ASKED: u32 = 4 << 20;
    /// The most that the owner holds for one peer, doubled for what the allocator keeps and the rest of the process needs.
    const HELD: usize = 2 * (32 << 20);
    let name = "a_peer_that_asks_for_files_and_takes_nothing_does_not_fill_the_owners_memory";
    let mut target = Target::open(name);
    target.process.must(&format!("register {FILE} disk read+write"));
    let ticket: Ticket = target.process.must("ticket 2").text(0).parse().unwrap();
    let most = |process: &Process| {
        let status = std::fs::read_to_string(format!("/proc/{}/status", process.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
    };
    let before = most(&target.process);
    let read = |handle, blocks| Message::from(Read { transfer: 0, handle, blocks }).frame(7, 0, 0);
    let mut waiting = Vec::new();
    for medium in [Medium::Unix, Medium::Tcp] {
        // More than a request may ask for, and what a file does not do.
        let mut attacker = Attacker::connect(&ticket, medium);
        let handle = attacker.log_in(&ticket);
        attacker.send(&read(handle, vec![Block { offset: 0, len: ASKED }; 5]));
        attacker.send(&Message::from(Atomic { handle, offset: 0, op: AtomicOp::Add(1) }).frame(7, 0, 0));
        assert!(attacker.gets_nothing_but_errors(), "over {medium:?}");
        // Far more requests than are served while their replies are not taken.
        let mut attacker = Attacker::connect(&ticket, medium);
        let handle = attacker.log_in(&ticket);
        for _ in 0..500 {
            attacker.send(&read(handle, vec![Block { offset: 0, len: ASKED }]));
        }
        waiting.push(attacker);
    }
    target.serves();
    target.settle();
    let grown = most(&target.process).saturating_sub(before);
    assert!(grown < 2 * HELD, "{grown} bytes are held for two peers that take nothing");
    drop(waiting);
    target.process.must("deregister 2 60000");
    target.is_unharmed();
}

#[test]
fn a_narrowed_ticket_holds_against_a_peer_that_asks_for_more() {
    let mut target = Target::open("a_narrowed_ticket_holds_against_a_peer_that_asks_for_more");
    // What lies outside is the owner's memory all the same: nothing but the check keeps it.
    let narrow = target.ticket.narrow().range(4096, 4096).finish().unwrap();
    let asks = |handle: u32, offset: u64, len: u32| {
        let blocks = || vec![Block { offset, len }];
        let mut write =
            Message::from(Write { transfer: 0, handle, blocks: blocks() }).frame(7, len.into(), 0);
        write.extend(vec![7; len as usize]);
        let read = Message::from(Read { transfer: 0, handle, blocks: blocks() }).frame(7, 0, 0);
        let atomic = Message::from(Atomic { handle, offset, op: AtomicOp::Add(1) }).frame(7, 0, 0);
        let signal = Message::from(Signal { transfer: 0, pieces: 0, handle, offset, add: 1 }).frame(7, 0, 0);
        [read, write, atomic, signal]
    };
    for medium in [Medium::Unix, Medium::Tcp] {
        for (offset, len) in [(4096, 8), (4092, 8), (8192, 4096), (u64::MAX - 7, 8)] {
            for number in 0..4 {
                let mut attacker = Attacker::connect(&narrow, medium);
                let handle = attacker.log_in(&narrow);
                attacker.send(&asks(handle, offset, len)[number]);
                assert!(
                    attacker.gets_nothing_but_errors(),
                    "request {number} for {len} bytes at {offset} over {medium:?} was served"
                );
            }
        }
    }
    target.is_unharmed();
}

#[test]
fn a_lease_ends_for_a_peer_that_does_not_look_at_its_clock() {
    let mut target = Target::open("a_lease_ends_for_a_peer_that_does_not_look_at_its_clock");
    for medium in [Medium::Unix, Medium::Tcp] {
        // A busy machine may be too slow for a short lease: then a longer one is tried.
        let tried = [1, 4, 16].into_iter().find_map(|seconds| {
            let lease = Duration::from_secs(seconds);
            let fresh: Ticket = target.process.must("ticket 1").text(0).parse().unwrap();
            let leased = fresh.narrow().lease(lease).finish().unwrap();
            let mut attacker = Attacker::connect(&leased, medium);
            let handle = attacker.try_log_in(&leased).ok()?;
            Some((attacker, handle, lease))
        });
        let (mut attacker, handle, lease) = tried.unwrap();
        std::thread::sleep(lease);
        let blocks = vec![Block { offset: 0, len: 8 }];
        attacker.send(&Message::from(Read { transfer: 0, handle, blocks }).frame(7, 0, 0));
        attacker.send(&Message::from(Atomic { handle, offset: 0, op: AtomicOp::Add(1) }).frame(7, 0, 0));
        assert!(attacker.gets_nothing_but_errors(), "served after the lease over {medium:?}");
    }
    target.is_unharmed();
}

#[test]
fn a_peer_may_die_at_any_byte() {
    let mut target = Target::open("a_peer_may_die_at_any_byte");
    let mut random = Random::new(81);
    for medium in [Medium::Unix, Medium::Tcp] {
        let hello = Attacker::hello(&target.ticket).1;
        for len in (0..hello.len()).step_by(7) {
            let mut attacker = Attacker::connect(&target.ticket, medium);
            attacker.send(&hello[..len]);
        }
        for _ in 0..60 {
            let mut attacker = Attacker::connect(&target.ticket, medium);
            let handle = attacker.log_in(&target.ticket);
            // Half a request, half a payload, or all of it and no wait for the reply.
            let stamp = {
                let mut bytes = vec![0; LEN];
                STAMP.fill(0, &mut bytes);
                bytes
            };
            let blocks = vec![Block { offset: 0, len: LEN as u32 }];
            let mut bytes = match random.below(2) {
                0 => Message::from(Read { transfer: 0, handle, blocks }).frame(7, 0, 0),
                _ => {
                    let mut bytes =
                        Message::from(Write { transfer: 0, handle, blocks }).frame(7, LEN as u64, 0);
                    bytes.extend_from_slice(&stamp);
                    bytes
                }
            };
            bytes.truncate(random.below(bytes.len() as u64 + 1) as usize);
            attacker.send(&bytes);
        }
    }
    target.is_unharmed();
}

#[test]
fn damaged_frames_of_a_valid_session_do_no_harm() {
    let mut target = Target::open("damaged_frames_of_a_valid_session_do_no_harm");
    let reader = target.ticket.narrow().access(Access::READ).finish().unwrap();
    let mut random = Random::new(82);
    for round in 0..150 {
        let medium = if round % 2 == 0 { Medium::Unix } else { Medium::Tcp };
        let mut attacker = Attacker::connect(&reader, medium);
        let handle = attacker.log_in(&reader);
        let all = mischief(handle);
        let (_, mut bytes) = all[random.below(all.len() as u64) as usize].clone();
        for _ in 0..=random.below(3) {
            let at = random.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << random.below(8);
        }
        attacker.send(&bytes);
    }
    target.is_unharmed();
}

#[test]
fn a_session_that_was_replayed_is_refused() {
    let mut target = Target::open("a_session_that_was_replayed_is_refused");
    for medium in [Medium::Unix, Medium::Tcp] {
        let mut honest = Attacker::connect(&target.ticket, medium);
        honest.log_in(&target.ticket);
        let said = honest.said().to_vec();
        let mut replay = Attacker::connect(&target.ticket, medium);
        replay.send(&said);
        assert!(replay.gets_nothing_but_refusals(), "a recorded session was accepted over {medium:?}");
    }
    target.is_unharmed();
}
