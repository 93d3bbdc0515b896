//! The protocol under a simulated network and a clock of its own: thousands of seeds in seconds.
//!
//! What is real here: the frames and their codec, cut at any byte; the handshake; the bookkeeping of transfers. What is played
//! by a model: the rules by which a session and its owner use them (`session`), sockets with their buffers, and time.
//! It shows that the rules are right: that a transfer ends once, by its limit, and that nothing of it lands later than bytes
//! need to cross the network. That the code follows the rules is shown by the proxy, the laws and the campaigns. One silent
//! loss at a time: an owner that is stopped *and* cut off may find bytes that nobody stands by, and never learns of it.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::{BTreeMap, HashMap, VecDeque};

use towline_proto::transfer::State;

use crate::identity::{Identity, Incarnation};
use crate::memory::Place;
use crate::ticket::{RegionKey, Ticket, TicketBody, parse_public};
use crate::wire::handshake::{ClientHandshake, ClientKey, LinkBase, ServerHandshake};
use crate::wire::{Block, Data, Done, FrameKind, HEADER_LEN, Header, KeyRef, Message, Read, Write};
use crate::{Access, Error, Kind, Result};

/// Microseconds.
type Time = u64;

const LIMIT: Time = 1_000_000;
const GRACE: Time = 500_000;
const LEN: usize = 1 << 12;
const LINKS: usize = 3;
const TRANSFERS: usize = 8;

/// Bytes that an owner's kernel keeps for it, on each link.
const INBOX: usize = 700;

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)) % end
    }
}

/// By which rules a write ends that was stopped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rules {
    /// When its owner has answered, or its connection was reset.
    Settled,
    /// At once, as it once was: the simulation must find what is wrong with that.
    AtOnce,
}

enum Event {
    /// Bytes reach the owner's kernel, or the user.
    Arrives {
        link: usize,
        at_owner: bool,
        bytes: Vec<u8>,
    },
    /// The owner's kernel, or the user, learns that the other side has ended the link.
    HangsUp {
        link: usize,
        at_owner: bool,
    },
    Cuts {
        link: usize,
        silently: bool,
    },
    Stops,
    Resumes,
    Starts(usize),
    Cancels(usize),
    Looks(usize),
}

/// Frames out of bytes that come in portions.
#[derive(Default)]
struct Assembler(Vec<u8>);

impl Assembler {
    fn next(&mut self) -> Option<(Header, Vec<u8>, Vec<u8>)> {
        let header = Header::decode(self.0.first_chunk::<HEADER_LEN>()?).unwrap();
        let payload = HEADER_LEN + header.rest();
        let end = payload + header.payload_len as usize;
        (self.0.len() >= end).then(|| {
            let rest = self.0.split_off(end);
            let frame = std::mem::replace(&mut self.0, rest);
            let body = header.body(&frame[HEADER_LEN..payload]).unwrap().to_vec();
            (header, body, frame[payload..].to_vec())
        })
    }
}

#[derive(Default)]
struct Link {
    /// What the user has not been able to send.
    unsent: VecDeque<u8>,
    /// What is in the air towards the owner, or waits in its kernel.
    towards: usize,
    inbox: VecDeque<u8>,
    at_owner: Assembler,
    at_user: Assembler,
    /// When the last bytes of each direction arrive: they keep their order.
    last: [Time; 2],
    /// Bytes vanish.
    dead: bool,
    /// The user has ended it.
    ended: bool,
    /// The owner's kernel knows that.
    hung_up: bool,
}

struct Unit {
    transfer: usize,
    link: usize,
    offset: usize,
    len: usize,
}

struct Running {
    write: bool,
    state: State,
    started: Time,
    progress: Time,
    stopped: Option<Time>,
    ended: Option<Time>,
    range: std::ops::Range<usize>,
    got: Vec<u8>,
}

struct World {
    random: Random,
    rules: Rules,
    now: Time,
    number: u64,
    events: BTreeMap<(Time, u64), Event>,
    delay: Time,
    links: Vec<Link>,
    stopped: bool,
    memory: Vec<u8>,
    transfers: Vec<Option<Running>>,
    pending: HashMap<u64, Unit>,
    next_request: u64,
    heard: Time,
    late: Option<String>,
}

fn byte_of(transfer: usize, offset: usize) -> u8 {
    (transfer * 31 + offset * 7 + 1) as u8
}

impl World {
    fn at(&mut self, when: Time, event: Event) {
        self.number += 1;
        self.events.insert((when, self.number), event);
    }

    fn carry(&mut self, link: usize, at_owner: bool, bytes: Vec<u8>) {
        let delay = self.random.below(self.delay + 1);
        let one = &mut self.links[link];
        if one.dead {
            return;
        }
        let when = (self.now + delay).max(one.last[usize::from(at_owner)]);
        one.last[usize::from(at_owner)] = when;
        self.at(when, Event::Arrives { link, at_owner, bytes });
    }

    /// Sends what the window takes, in portions of any size.
    fn flush(&mut self, link: usize) {
        loop {
            let portion = 1 + self.random.below(300) as usize;
            let one = &mut self.links[link];
            let room = INBOX.saturating_sub(one.towards);
            let take = portion.min(room).min(one.unsent.len());
            if take == 0 || one.ended {
                return;
            }
            let bytes: Vec<u8> = one.unsent.drain(..take).collect();
            one.towards += take;
            self.carry(link, true, bytes);
        }
    }

    fn start(&mut self, transfer: usize) {
        let write = self.random.below(3) > 0;
        let units = 1 + self.random.below(4) as usize;
        let len = 1 + self.random.below(400) as usize;
        // Writes do not overlap, so that each byte tells whose it is.
        let base = transfer * (LEN / TRANSFERS);
        let len = len.min(LEN / TRANSFERS / units);
        let running = Running {
            write,
            state: State::new(units),
            started: self.now,
            progress: self.now,
            stopped: None,
            ended: None,
            range: base..base + units * len,
            got: vec![0; units * len],
        };
        self.transfers[transfer] = Some(running);
        for unit in 0..units {
            let (link, offset) = (self.random.below(LINKS as u64) as usize, base + unit * len);
            let request = self.next_request;
            self.next_request += 1;
            let blocks = vec![Block { offset: offset as u64, len: len as u32 }];
            let frame = if write {
                let mut frame =
                    Message::from(Write { transfer: 0, handle: 1, blocks }).frame(request, len as u64, 0);
                frame.extend((offset..offset + len).map(|place| byte_of(transfer, place)));
                frame
            } else {
                Message::from(Read { transfer: 0, handle: 1, blocks }).frame(request, 0, 0)
            };
            let one = &mut self.links[link];
            let unit = Unit { transfer, link, offset, len };
            if one.ended {
                self.report(unit, Err(Error::new(Kind::Disconnected, "send", "closed")));
                continue;
            }
            one.unsent.extend(frame);
            self.pending.insert(request, unit);
            self.flush(link);
        }
        let look = self.now + LIMIT;
        self.at(look, Event::Looks(transfer));
        if self.random.below(4) == 0 {
            let moment = self.now + self.random.below(60_000);
            self.at(moment, Event::Cancels(transfer));
        }
    }

    fn report(&mut self, unit: Unit, outcome: Result<()>) {
        let running = self.transfers[unit.transfer].as_mut().unwrap();
        running.progress = self.now;
        assert!(running.ended.is_none(), "a unit reports after its transfer has ended");
        match outcome {
            Ok(()) => running.state.unit_done(),
            Err(error) => running.state.unit_failed(0, std::iter::once(0..1).collect(), error),
        }
        if let Some(result) = running.state.ended() {
            running.ended = Some(self.now);
            if result.is_ok() {
                let (write, range) = (running.write, running.range.clone());
                let place = |offset: usize| byte_of(unit.transfer, offset);
                for offset in range.clone() {
                    if write {
                        assert_eq!(self.memory[offset], place(offset), "a write that went well is not there");
                    } else {
                        assert_eq!(
                            running.got[offset - range.start],
                            self.memory[offset],
                            "a read gave other bytes"
                        );
                    }
                }
            }
        }
    }

    fn stop(&mut self, transfer: usize, kind: Kind) {
        let now = self.now;
        let running = self.transfers[transfer].as_mut().unwrap();
        if !running.state.stop(Error::new(kind, "transfer", "stopped")) {
            return;
        }
        running.stopped = Some(now);
        self.settle(transfer);
    }

    /// Ends the units of a stopped transfer as the rules say.
    fn settle(&mut self, transfer: usize) {
        let running = self.transfers[transfer].as_ref().unwrap();
        let (write, due) =
            (running.write, (running.started.max(self.heard) + GRACE).max(running.stopped.unwrap()));
        let mine: Vec<u64> = self
            .pending
            .iter()
            .filter(|(_, unit)| unit.transfer == transfer)
            .map(|(request, _)| *request)
            .collect();
        let waits = write && self.rules == Rules::Settled;
        if waits && due > self.now && !mine.is_empty() {
            self.at(due, Event::Looks(transfer));
            return;
        }
        for request in mine {
            let Some(unit) = self.pending.get(&request) else { continue };
            let link = unit.link;
            if waits {
                self.reset(link);
            } else if let Some(unit) = self.pending.remove(&request) {
                self.report(unit, Err(Error::new(Kind::Canceled, "transfer", "stopped")));
            }
        }
    }

    /// The user ends a link: what is not sent is dropped, everything on it fails; the owner's kernel learns of it.
    fn reset(&mut self, link: usize) {
        let one = &mut self.links[link];
        one.ended = true;
        one.unsent.clear();
        if !one.dead {
            let when = one.last[1].max(self.now);
            self.at(when, Event::HangsUp { link, at_owner: true });
        }
        self.lose(link);
    }

    fn lose(&mut self, link: usize) {
        let mut lost: Vec<u64> =
            self.pending.iter().filter(|(_, unit)| unit.link == link).map(|(request, _)| *request).collect();
        lost.sort_unstable();
        for request in lost {
            if let Some(unit) = self.pending.remove(&request) {
                self.report(unit, Err(Error::new(Kind::Disconnected, "receive", "the link is gone")));
            }
        }
    }

    /// The owner reads and acts on all that its kernel has.
    fn serve(&mut self, link: usize) {
        if self.stopped {
            return;
        }
        let one = &mut self.links[link];
        let bytes: Vec<u8> = one.inbox.drain(..).collect();
        one.towards -= bytes.len();
        one.at_owner.0.extend(bytes);
        let abandoned = one.hung_up;
        while let Some((header, body, payload)) = self.links[link].at_owner.next() {
            let answer = match Message::decode(header.kind, &body).unwrap() {
                Message::Write(write) => {
                    // Nothing is applied for somebody who has hung up.
                    if abandoned && self.rules == Rules::Settled {
                        continue;
                    }
                    self.apply(write.blocks[0].offset as usize, &payload);
                    Message::from(Done { outcome: Ok(payload.len() as u64) }).frame(header.id, 0, 0)
                }
                Message::Read(read) => {
                    let (offset, len) = (read.blocks[0].offset as usize, read.blocks[0].len as usize);
                    let mut frame = Message::from(Data { outcome: Ok(()) }).frame(header.id, len as u64, 0);
                    frame.extend(&self.memory[offset..offset + len]);
                    frame
                }
                other => panic!("{:?}", other.kind()),
            };
            let mut rest = answer.as_slice();
            while !rest.is_empty() {
                let take = rest.len().min(1 + self.random.below(200) as usize);
                self.carry(link, false, rest[..take].to_vec());
                rest = &rest[take..];
            }
        }
        self.flush(link);
    }

    fn apply(&mut self, offset: usize, payload: &[u8]) {
        self.memory[offset..offset + payload.len()].copy_from_slice(payload);
        let transfer = offset / (LEN / TRANSFERS);
        let running = self.transfers[transfer].as_ref().unwrap();
        let ended = running.ended.filter(|ended| self.now > ended + self.delay);
        if let Some(ended) = ended {
            self.late =
                Some(format!("transfer {transfer} ended at {ended} µs and writes at {} µs", self.now));
        }
    }

    fn hear(&mut self, link: usize) {
        self.heard = self.now;
        while let Some((header, body, payload)) = self.links[link].at_user.next() {
            let Some(unit) = self.pending.remove(&header.id) else { continue };
            let outcome = match Message::decode(header.kind, &body).unwrap() {
                Message::Done(done) => done.outcome.map(drop).map_err(|error| error.into_error("write")),
                Message::Data(_) => {
                    assert_eq!(payload.len(), unit.len);
                    let running = self.transfers[unit.transfer].as_mut().unwrap();
                    let at = unit.offset - running.range.start;
                    running.got[at..at + unit.len].copy_from_slice(&payload);
                    Ok(())
                }
                other => panic!("{:?}", other.kind()),
            };
            self.report(unit, outcome);
        }
    }

    fn step(&mut self, event: Event) {
        match event {
            Event::Arrives { link, at_owner, .. } if self.links[link].dead => {
                let _ = at_owner;
            }
            Event::Arrives { link, at_owner: true, bytes } => {
                self.links[link].inbox.extend(bytes);
                self.serve(link);
            }
            Event::Arrives { link, at_owner: false, bytes } => {
                if !self.links[link].ended {
                    self.links[link].at_user.0.extend(bytes);
                    self.hear(link);
                }
            }
            Event::HangsUp { link, at_owner: true } => self.links[link].hung_up = true,
            Event::HangsUp { link, at_owner: false } => {
                self.links[link].ended = true;
                self.lose(link);
            }
            Event::Cuts { link, silently } => {
                self.links[link].dead = true;
                if !silently {
                    self.links[link].hung_up = true;
                    self.at(self.now, Event::HangsUp { link, at_owner: false });
                }
            }
            Event::Stops => self.stopped = true,
            Event::Resumes => {
                self.stopped = false;
                (0..LINKS).for_each(|link| self.serve(link));
            }
            Event::Starts(transfer) => self.start(transfer),
            Event::Cancels(transfer) => {
                if self.transfers[transfer].as_ref().unwrap().ended.is_none() {
                    self.stop(transfer, Kind::Canceled);
                }
            }
            Event::Looks(transfer) => {
                let running = self.transfers[transfer].as_ref().unwrap();
                if running.ended.is_some() {
                    return;
                }
                match running.stopped {
                    Some(_) => self.settle(transfer),
                    None if self.now >= running.progress + LIMIT => self.stop(transfer, Kind::Timeout),
                    None => {
                        let next = running.progress + LIMIT;
                        self.at(next, Event::Looks(transfer));
                    }
                }
            }
        }
    }
}

/// One seed; what landed late, if anything did.
fn play(seed: u64, rules: Rules) -> Option<String> {
    let mut random = Random(seed);
    shake_hands(&mut random);
    let delay = [0, 200, 5_000, 40_000][random.below(4) as usize];
    let stops = random.below(2) == 0;
    let mut world = World {
        random,
        rules,
        now: 0,
        number: 0,
        events: BTreeMap::new(),
        delay,
        links: (0..LINKS).map(|_| Link::default()).collect(),
        stopped: false,
        memory: (0..LEN).map(|offset| byte_of(99, offset)).collect(),
        transfers: (0..TRANSFERS).map(|_| None).collect(),
        pending: HashMap::new(),
        next_request: 1,
        heard: 0,
        late: None,
    };
    for transfer in 0..TRANSFERS {
        let when = world.random.below(100_000);
        world.at(when, Event::Starts(transfer));
    }
    if stops {
        let when = world.random.below(120_000);
        world.at(when, Event::Stops);
        let until = when + world.random.below(3 * LIMIT);
        world.at(until, Event::Resumes);
    }
    for link in 0..LINKS {
        if world.random.below(3) == 0 {
            let when = world.random.below(150_000);
            let silently = !stops && world.random.below(2) == 0;
            world.at(when, Event::Cuts { link, silently });
        }
    }
    while let Some(((when, _), event)) = world.events.pop_first() {
        world.now = when;
        world.step(event);
    }
    for running in world.transfers.iter().flatten() {
        let ended = running.ended.expect("a transfer never ends");
        // Without progress for the limit, then the grace; each unit's answer is progress.
        let most = (LIMIT + GRACE) * 5 + 8 * delay;
        assert!(ended <= running.started + most, "seed {seed}: it takes {} µs", ended - running.started);
    }
    world.late
}

/// A handshake over a network that may change one bit: it comes about exactly when nothing was changed.
fn shake_hands(random: &mut Random) {
    let named = |name, life| Identity::new(name, Incarnation([life; 16])).unwrap();
    let (owner, user) = (named("owner", 1), named("user", 2));
    let key = RegionKey::derive(&[7; 32], 3, 9);
    let body = TicketBody {
        identity: owner.clone(),
        reach: Vec::new(),
        row: 3,
        generation: 9,
        length: LEN as u64,
        place: Place::Host,
        access: Access::READ_WRITE,
        issued_ms: 0,
        layout: None,
    };
    let ticket = Ticket::mint(&body, &key).unwrap();
    let (changed, flip) = (random.below(6), random.below(1 << 20) as usize);
    let meddle = |step: u64, frame: &mut Vec<u8>| {
        if step == changed {
            let bit = flip % ((frame.len() - HEADER_LEN) * 8);
            frame[HEADER_LEN + bit / 8] ^= 1 << (bit % 8);
        }
    };
    let outcome: Result<()> = (|| {
        let nonce = [random.below(256) as u8; 32];
        let (client, mut hello) =
            ClientHandshake::start(&user, owner.incarnation, ClientKey::Ticket(&ticket), nonce, None);
        meddle(0, &mut hello);
        let (server, mut welcome) = ServerHandshake::on_hello(
            &hello[HEADER_LEN..],
            &owner,
            [9; 32],
            None,
            |key_ref| match key_ref {
                KeyRef::Ticket(public) => Ok(LinkBase::Tag(parse_public(public)?.tag(&key))),
                KeyRef::Session(_) => Err(Error::new(Kind::NotFound, "handshake", "no such session")),
            },
        )?;
        meddle(1, &mut welcome);
        let (mut prove, ours, _) = client.on_welcome(&welcome[HEADER_LEN..])?;
        assert_eq!(Header::decode(prove.first_chunk().unwrap()).unwrap().kind, FrameKind::Prove);
        meddle(2, &mut prove);
        let (theirs, _) = server.on_prove(&prove[HEADER_LEN..])?;
        assert!(theirs.is(&ours));
        Ok(())
    })();
    assert_eq!(outcome.is_ok(), changed > 2, "a changed handshake came about, or a whole one did not");
}

const SEEDS: u64 = 4000;

#[test]
fn under_every_seed_transfers_end_once_in_time_and_nothing_lands_late() {
    for seed in 0..SEEDS {
        let late = play(seed, Rules::Settled);
        assert!(late.is_none(), "seed {seed}: {late:?}");
    }
}

#[test]
fn the_simulation_finds_what_was_wrong_with_ending_writes_at_once() {
    assert!((0..SEEDS).any(|seed| play(seed, Rules::AtOnce).is_some()));
}
