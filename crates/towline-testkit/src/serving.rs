//! The whole server side of the protocol against bytes from nowhere: a session with a valid ticket that does as its input says.
//!
//! An input is a program: which connection to use, which frame to send, with which fields; or plain bytes. The owner is a
//! real endpoint in this process. Whatever comes, it must not panic, not hang, not touch memory outside what the ticket
//! allows, and serve the next one. The fuzz target `server` and a test over the stored corpus call [`play`].

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use towline::ticket::Ticket;
use towline::wire::{
    Atomic, AtomicOp, Block, Bye, Cancel, Check, Data, EndLane, Finish, FrameKind, Granted, Header, Held,
    Import, ImportItem, Message, Notify, Ping, Pong, Query, QueryReply, Read, Reduce, Release, Signal,
    Withdraw, Write,
};
use towline::{Access, Dtype, Endpoint, ReduceOp, Registered, SystemStorage};

use crate::attacker::{Attacker, Medium};
use crate::input::Input;
use crate::oracle::Stamp;
use crate::rogue::life;

const LEN: usize = 64 << 10;

/// What the ticket allows.
const START: usize = 16 << 10;
const LENGTH: usize = 8 << 10;

const STAMP: Stamp = Stamp { region: 1, generation: 1 };

/// Frames of one input.
const MOST_FRAMES: usize = 128;

/// Inputs that one owner serves.
const INPUTS: u32 = 64;

/// A last frame that lacks no more than this is completed.
const MOST_MISSING: u64 = 1 << 20;

/// How long to wait for what the owner has to say before its input is ended.
const MOMENT: Duration = Duration::from_millis(5);

/// How long the owner may take to hang up after the end of its input.
const END: Duration = Duration::from_secs(20);

struct Owner {
    endpoint: Endpoint,
    region: Registered<SystemStorage>,
    ticket: Ticket,
}

/// The owner of this input. A peer of the same process that does not say goodbye is kept in mind as long as the process lives, and
/// looked at by each that comes after it: so an owner serves some inputs, and then another takes its place.
fn owner() -> Arc<Owner> {
    static OWNER: Mutex<Option<(Arc<Owner>, u32)>> = Mutex::new(None);
    let mut current = OWNER.lock();
    if let Some((owner, left)) = &mut *current
        && *left > 0
    {
        *left -= 1;
        return Arc::clone(owner);
    }
    let endpoint = Endpoint::open("fuzzed").unwrap();
    let region = endpoint.register(SystemStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap();
    STAMP.fill_storage(region.storage()).unwrap();
    let whole = region.ticket().unwrap();
    let ticket = whole.narrow().range(START as u64, LENGTH as u64).finish().unwrap();
    let owner = Arc::new(Owner { endpoint, region, ticket });
    *current = Some((Arc::clone(&owner), INPUTS));
    owner
}

impl Input<'_> {
    /// An offset: mostly inside, sometimes at the edge, sometimes anywhere.
    fn offset(&mut self) -> u64 {
        match self.byte() % 8 {
            0 => self.number(),
            1 => LENGTH as u64 - u64::from(self.byte() % 16),
            2 => u64::from(self.byte()) * 8,
            _ => u64::from(self.byte()) * 32 % LENGTH as u64,
        }
    }

    fn blocks(&mut self) -> Vec<Block> {
        let count = self.byte() % 4;
        (0..count)
            .map(|_| {
                let offset = self.offset();
                let len = match self.byte() {
                    255 => u32::from(self.byte()) << 12,
                    len => u32::from(len),
                };
                Block { offset, len }
            })
            .collect()
    }

    fn handle(&mut self, granted: u32) -> u32 {
        if self.byte().is_multiple_of(8) { self.number() as u32 } else { granted }
    }

    fn ticket(&mut self, right: &Ticket) -> Vec<u8> {
        let mut bytes = right.public_bytes().to_vec();
        if self.byte().is_multiple_of(2) && !bytes.is_empty() {
            let at = self.number() as usize % bytes.len();
            bytes[at] ^= self.byte();
        }
        bytes
    }
}

/// Runs one input.
///
/// # Panics
/// Where the owner breaks a rule.
pub fn play(data: &[u8]) {
    let owner = owner();
    let mut input = Input(data);
    let way = input.byte();
    let medium = if way.is_multiple_of(4) { Medium::Tcp } else { Medium::Unix };
    let mut control = Attacker::connect(&owner.ticket, medium);
    let (session, key, challenge) = control.open_session(&owner.ticket);
    let granted = control.import(&owner.ticket, &challenge).unwrap();
    let mut connections = vec![control];
    if way & 0x80 != 0 {
        // A session beside it, with grants of its own.
        let mut other = Attacker::connect(&owner.ticket, medium);
        other.log_in(&owner.ticket);
        connections.push(other);
    }
    let sessions = connections.len();
    let mut lanes = Vec::new();
    let mut frames = 0;
    while !input.0.is_empty() && frames < MOST_FRAMES {
        frames += 1;
        let which = input.byte() as usize % connections.len();
        let id = u64::from(input.byte() % 16);
        let handle = input.handle(granted);
        let transfer = u64::from(input.byte() % 4);
        let bytes = match input.byte() % 18 {
            0 => {
                let len = input.byte() as usize;
                input.take(len)
            }
            1..=3 => Message::from(Read { transfer, handle, blocks: input.blocks() }).frame(id, 0, 0),
            4..=6 => {
                let blocks = input.blocks();
                let len = payload_of(&blocks, &mut input);
                with_payload(Write { transfer, handle, blocks }.into(), id, len, &mut input)
            }
            7 => {
                let blocks = input.blocks();
                let len = payload_of(&blocks, &mut input);
                let (op, dtype) = match input.byte() % 4 {
                    0 => (ReduceOp::Sum, Dtype::F32),
                    1 => (ReduceOp::Max, Dtype::U8),
                    2 => (ReduceOp::Min, Dtype::I64),
                    _ => (ReduceOp::Sum, Dtype::U64),
                };
                with_payload(Reduce { transfer, handle, op, dtype, blocks }.into(), id, len, &mut input)
            }
            8 => {
                let offset = input.offset();
                let op = match input.byte() % 2 {
                    0 => AtomicOp::Add(input.number()),
                    _ => AtomicOp::CompareSwap { expected: input.number(), new: input.number() },
                };
                Message::from(Atomic { handle, offset, op }).frame(id, 0, 0)
            }
            9 => {
                let (pieces, offset) = (u32::from(input.byte() % 4), input.offset());
                Message::from(Signal { transfer, pieces, handle, offset, add: 1 }).frame(id, 0, 0)
            }
            10 => {
                let len = input.byte() as usize;
                let (pieces, message) = (u32::from(input.byte() % 4), input.take(len));
                Message::from(Notify { transfer, pieces, message }).frame(id, 0, 0)
            }
            11 => Message::from(Cancel {}).frame(transfer, 0, 0),
            12 => Message::from(Release { handle }).frame(id, 0, 0),
            13 => {
                let items = (0..input.byte() % 3)
                    .map(|_| {
                        let ticket = input.ticket(&owner.ticket);
                        ImportItem { ticket, proof: [input.byte(); 32], operation: None }
                    })
                    .collect();
                Message::from(Import { items }).frame(id, 0, 0)
            }
            14 => match input.byte() {
                how @ 128.. if medium == Medium::Unix => {
                    let held = Message::from(Held {}).frame(id, 0, 1);
                    connections[which].send_with_files(&held, &[life(how).as_fd()]);
                    continue;
                }
                how => Message::from(Held {}).frame(id, 0, how % 2),
            },
            15 => match input.byte() {
                192..=203 => Message::from(Withdraw {}).frame(id, 0, 0),
                204..=219 => {
                    // Of a lane that is there, most of the time.
                    let lane = lanes.get(usize::from(input.byte() % 4)).copied().unwrap_or([7; 32]);
                    Message::from(EndLane { lane }).frame(id, 0, 0)
                }
                220..=231 => {
                    let (path, len) = (input.byte() % 16, usize::from(input.byte()));
                    Message::from(Query { handle, path, body: input.take(len) }).frame(id, 0, 0)
                }
                232..=243 => {
                    let checks = (0..input.byte() % 5).map(|_| input.number() as u32).collect();
                    Message::from(Check { checks }).frame(id, 0, 0)
                }
                244.. => {
                    let operation = [input.byte(); 16];
                    Message::from(Finish { operation, outcome: Ok(()) }).frame(id, 0, 0)
                }
                how => match how % 3 {
                    0 => Message::from(Ping {}).frame(id, 0, 0),
                    1 => Message::from(Pong {}).frame(id, 0, 0),
                    _ => Message::from(Bye { error: None }).frame(id, 0, 0),
                },
            },
            16 if connections.len() < 6 => {
                let mut lane = Attacker::connect(&owner.ticket, medium);
                if let Some(name) = lane.join_by_name(&owner.ticket, session, &key) {
                    connections.push(lane);
                    lanes.push(name);
                }
                continue;
            }
            _ => {
                let kind = FrameKind::from_code(input.byte()).unwrap_or(FrameKind::Ping);
                let (body_len, payload_len) = (u32::from(input.byte()), u64::from(input.byte()));
                let files = input.byte() % 3;
                let header = Header { kind, flags: 0, files, pad: 0, body_len, payload_len, id };
                let mut bytes = header.encode().to_vec();
                bytes.extend(input.take((u64::from(body_len) + payload_len) as usize));
                bytes
            }
        };
        connections[which].send(&bytes);
    }
    for connection in &mut connections {
        match connection.missing() {
            Some(missing @ 1..=MOST_MISSING) if way & 0x48 != 0x48 => {
                connection.send(&vec![0; missing as usize])
            }
            // It ends in the middle of a frame: a question behind it would be taken for the rest.
            Some(1..) => continue,
            _ => {}
        }
        connection.send(&Message::from(Ping {}).frame(u64::MAX, 0, 0));
        while let Some((header, body)) = connection.frame_within(MOMENT) {
            right_answer(header, &body);
            if header.kind == FrameKind::Pong && header.id == u64::MAX {
                break;
            }
        }
    }
    if way & 0x20 == 0 {
        for control in &mut connections[..sessions] {
            control.send(&Message::from(Bye { error: None }).frame(0, 0, 0));
        }
    }
    for connection in &mut connections {
        connection.end_sending();
        assert!(connection.is_cut_off(END), "the owner keeps a connection whose other side has ended");
    }
    drop(connections);
    unharmed(&owner);
}

fn payload_of(blocks: &[Block], input: &mut Input<'_>) -> u64 {
    let right = blocks.iter().map(|block| u64::from(block.len)).sum();
    if input.byte().is_multiple_of(16) { u64::from(input.byte()) } else { right }
}

/// A frame with that much payload, which is sometimes cut short: what comes next is then taken for it.
fn with_payload(message: Message, id: u64, len: u64, input: &mut Input<'_>) -> Vec<u8> {
    let mut bytes = message.frame(id, len, 0);
    let sent = if input.byte().is_multiple_of(32) { len / 2 } else { len };
    bytes.extend(std::iter::repeat_n(input.byte(), (sent as usize).min(1 << 20)));
    bytes
}

/// What an owner may say to a user.
fn right_answer(header: Header, body: &[u8]) {
    match header.kind {
        FrameKind::Data => {
            let data = Data::decode(body).expect("a reply that can be read");
            assert!(data.outcome.is_ok() || header.payload_len == 0, "an error with bytes");
            assert!(
                header.payload_len <= 3 * LENGTH as u64,
                "more bytes than three blocks of the range have"
            );
        }
        FrameKind::Granted => {
            let granted = Granted::decode(body).expect("a reply that can be read");
            assert!(granted.items.iter().all(Result::is_err), "a wrong proof was taken");
        }
        FrameKind::QueryReply => {
            let reply = QueryReply::decode(body).expect("a reply that can be read");
            // Help is promised to every peer, and given only to one that was lent something.
            let nothing = reply.outcome.map_or(true, |words| words.is_empty()) && header.files == 0;
            assert!(nothing, "a path that does not take this memory was given it");
        }
        FrameKind::Check => {
            let check = Check::decode(body).expect("a reply that can be read");
            assert!(check.checks.len() <= 3, "more checksums than three blocks have");
        }
        FrameKind::Done | FrameKind::Ping | FrameKind::Pong | FrameKind::Bye | FrameKind::Refuse => {}
        other => panic!("an owner does not send {other:?}"),
    }
}

/// Outside the range nothing has changed.
fn unharmed(owner: &Owner) {
    let storage = owner.region.storage();
    STAMP.verify_storage(storage, 0, START).unwrap();
    STAMP.verify_storage(storage, START + LENGTH, LEN - START - LENGTH).unwrap();
    // Messages would fill its mailbox otherwise.
    while let Ok(Some(_)) = owner.endpoint.try_receive() {}
    assert_eq!(owner.endpoint.stats().regions, 1);
}

/// The numbers of the paths that are asked about, and the queries.
const QUERIES: [(u8, &[u8]); 3] = [(1, &[1, 0, 0, 0, 0]), (2, &[1, 1, 2]), (3, b"open")];

/// Everything by which a process of the same user comes to memory of an owner on its host, with that ticket of something that may be a
/// file: how many descriptors it was passed, and how many of its queries were answered. Then it says that it lives, by a page that was not
/// asked for where nothing is shared; whether the owner puts up with that.
pub fn grasp(ticket: &Ticket) -> (u64, u64, bool) {
    let mut peer = Attacker::connect(ticket, Medium::Unix);
    let handle = peer.log_in(ticket);
    let mut answered = 0;
    for (path, query) in QUERIES {
        let ask = Query { handle, path, body: query.to_vec() };
        peer.send(&Message::from(ask).frame(7, 0, 0));
        let Some((header, body)) = peer.frame() else { break };
        assert_eq!(header.kind, FrameKind::QueryReply);
        answered += u64::from(QueryReply::decode(&body).unwrap().outcome.is_ok());
    }
    peer.send_with_files(&Message::from(Held {}).frame(0, 0, 1), &[life(0).as_fd()]);
    peer.send(&Message::from(Ping {}).frame(9, 0, 0));
    let lives = peer.frame().is_some_and(|(header, _)| header.kind == FrameKind::Pong);
    (peer.passed(), answered, lives)
}
