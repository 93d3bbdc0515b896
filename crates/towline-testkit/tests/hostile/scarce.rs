//! An owner with little address space left, and holders of a good ticket who choose the sizes of what it needs.

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use towline::ticket::Ticket;
use towline::wire::{
    Block, Check, Import, ImportItem, MAX_NOTIFY, Message, Notify, Query, Read, Reduce, Write,
};
use towline::{Dtype, ReduceOp};
use towline_testkit::attacker::{Attacker, Medium};
use towline_testkit::process::Process;
use towline_testkit::watchdog::watch;

use crate::{LEN, PATIENCE, Target};

/// From no room at all in these steps to more than all of it takes.
const STEP: u64 = 384 << 10;
const STEPS: u64 = 20;

/// Blocks that fill a frame, and of which no two are neighbours.
const BLOCKS: usize = 130_000;

/// What a session asks for by that ticket, whose challenge and grant are these.
type Demand = fn(&Ticket, &[u8; 32], u32) -> Vec<u8>;

fn blocks(count: usize, len: u32) -> Vec<Block> {
    (0..count as u64).map(|number| Block { offset: number % 2 * 64, len }).collect()
}

const DEMANDS: [(&str, Demand); 8] = [
    ("read", |_, _, handle| {
        Message::from(Read { transfer: 0, handle, blocks: blocks(BLOCKS, 1) }).frame(7, 0, 0)
    }),
    ("read with checksums", |_, _, handle| {
        // Their list stays below what is promised for lists.
        let mut both = Message::from(Check { checks: vec![0; 12_000] }).frame(7, 0, 0);
        both.extend(Message::from(Read { transfer: 0, handle, blocks: blocks(12_000, 1) }).frame(7, 0, 0));
        both
    }),
    ("write", |_, _, handle| {
        let message = Message::from(Write { transfer: 0, handle, blocks: blocks(BLOCKS, 1) });
        followed(message.frame(7, BLOCKS as u64, 0), BLOCKS)
    }),
    ("reduce", |_, _, handle| {
        let (op, dtype, count) = (ReduceOp::Sum, Dtype::U64, 1 << 16);
        let message = Message::from(Reduce { transfer: 0, handle, op, dtype, blocks: blocks(count, 64) });
        followed(message.frame(7, 64 * count as u64, 0), 64 * count)
    }),
    ("import", |ticket, challenge, _| {
        let item = |number| {
            let narrowed = ticket.narrow().range(number, 8).finish().unwrap();
            let proof = narrowed.proof(challenge);
            ImportItem { ticket: narrowed.public_bytes().to_vec(), proof, operation: None }
        };
        Message::from(Import { items: (0..256).map(item).collect() }).frame(7, 0, 0)
    }),
    ("notify", |_, _, _| {
        let notify = Notify { transfer: 0, pieces: 0, message: vec![1; MAX_NOTIFY] };
        Message::from(notify).frame(7, 0, 0)
    }),
    ("followers", |_, _, handle| {
        // Of a transfer whose pieces never come.
        let notify = Message::from(Notify { transfer: 5, pieces: 2, message: Vec::new() });
        let mut all = notify.frame(0, 0, 0).repeat(30_000);
        all.extend(small(handle, 7));
        all
    }),
    ("questions", |_, _, handle| {
        // As many as there is room for answers that nobody takes.
        let question =
            |number| Message::from(Query { handle, path: 2, body: vec![1; 8] }).frame(number, 0, 0);
        (7..1000).flat_map(question).collect()
    }),
];

/// A read of a few bytes.
fn small(handle: u32, request: u64) -> Vec<u8> {
    Message::from(Read { transfer: 0, handle, blocks: blocks(1, 8) }).frame(request, 0, 0)
}

/// A frame and its payload, of zeros.
fn followed(mut frame: Vec<u8>, payload: usize) -> Vec<u8> {
    frame.resize(frame.len() + payload, 0);
    frame
}

/// Lists take pages of their own, and what is small comes from a heap that has room for all callers: what is promised is about
/// lists.
const ALLOCATOR: [(&str, &str); 3] =
    [("MALLOC_ARENA_MAX", "1"), ("MALLOC_MMAP_THRESHOLD_", "65536"), ("MALLOC_TOP_PAD_", "524288")];

fn attacked(test: &str, kind: &str) {
    let watchdog = watch(test, PATIENCE * 40);
    let mut process = Process::start_with("target", &ALLOCATOR);
    process.must("open target");
    process.must(&format!("register {LEN} system read+write"));
    process.must("fill 1 1 1");
    let ticket = process.must("ticket 1").text(0).parse().unwrap();
    let attacked = process.must(&format!("register {LEN} {kind} read+write")).number(0);
    let under_attack: Ticket = process.must(&format!("ticket {attacked}")).text(0).parse().unwrap();
    let mut target = Target { process, ticket, descriptors: 0, _watchdog: watchdog };
    target.serves();
    let pid = Pid::from_raw(target.process.pid());
    let before = getrlimit(Resource::As);
    for (name, demand) in DEMANDS {
        let (mut answered, mut ended) = (0, 0);
        for step in 0..STEPS {
            let medium = if step % 2 == 0 { Medium::Unix } else { Medium::Tcp };
            let mut session = Attacker::connect(&under_attack, medium);
            let challenge = session.shake_hands(&under_attack).unwrap();
            let handle = session.import(&under_attack, &challenge).unwrap();
            let demand = demand(&under_attack, &challenge, handle);
            // A thread for the disk is there, and stays for a second.
            session.send(&small(handle, 3));
            session.frame().expect("a reply");
            let room = Some(target.process.address_space() + step * STEP);
            prlimit(pid, Resource::As, Rlimit { current: room, maximum: before.maximum }).unwrap();
            session.send(&demand);
            // A reply, whatever it says, or the end of the session.
            match session.frame() {
                Some(_) => answered += 1,
                None => ended += 1,
            }
            prlimit(pid, Resource::As, before).unwrap();
            if let Err(gone) = target.process.ask("stats") {
                panic!("{name} with {} KiB of room ended the owner: {gone}", (step * STEP) >> 10);
            }
        }
        assert!(answered > 0, "no {name} was answered, {ended} sessions ended");
    }
    target.serves();
    target.process.must(&format!("check 1 1 1 0 {LEN}"));
}

#[test]
fn an_owner_without_room_for_what_peers_ask_of_memory_goes_on() {
    attacked("an_owner_without_room_for_what_peers_ask_of_memory_goes_on", "system");
}

#[test]
fn an_owner_without_room_for_what_peers_ask_of_a_file_goes_on() {
    attacked("an_owner_without_room_for_what_peers_ask_of_a_file_goes_on", "disk");
}
