//! A user and an owner, connections between them, and everything that may happen to these.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use towline_proto::session::Quotas;
use towline_proto::session::allowance::Allowance;
use towline_proto::session::budget::Budget;
use towline_proto::session::initiator::{ConnectionId, Initiator, Opened, Settings};
use towline_proto::session::owner::{Owner, Standing};
use towline_proto::ticket::Claims;
use towline_proto::{Access, Error, Kind, identity::Incarnation};

use crate::network::{Random, Wire};
use crate::owner::{Array, Granted, Ranges};
use crate::user::{Clock, Move, Unit, UnitHold};

pub(crate) const LIMIT: Duration = Duration::from_secs(1);
/// All is over by then, but for what nobody will ever answer; in microseconds.
const HORIZON: u64 = 60_000_000;

pub(crate) const LEN: usize = 1 << 12;
/// What the ticket allows lies here; nothing else may ever change.
pub(crate) const GUARD: usize = 256;
pub(crate) const WIRES: usize = 4;
pub(crate) const CONTROL: usize = 0;
pub(crate) const TRANSFERS: usize = 8;

/// A ticket for all of that, and one that reads its first half.
pub(crate) const TICKETS: [&[u8]; 2] = [b"ticket", b"narrowed"];

pub(crate) enum Event {
    /// Bytes reach the owner's kernel, or the user.
    Arrives {
        wire: usize,
        at_owner: bool,
        bytes: Vec<u8>,
    },
    /// The user learns that the other side has ended the connection.
    HangsUp {
        wire: usize,
        by_word: bool,
    },
    /// The owner's kernel learns that the user has.
    OwnerLearns(usize),
    Cuts {
        wire: usize,
        silently: bool,
    },
    /// The user closes the session, whatever is in flight.
    Closes,
    Stops,
    Resumes,
    Revokes,
    Starts(u64),
    Cancels(u64),
    Limit(u64),
    Settles,
    LooksAtHost,
    /// The owner says something that it should not.
    Lies,
}

pub(crate) fn byte_of(transfer: usize, place: usize) -> u8 {
    (transfer * 31 + place * 7 + 1) as u8
}

/// Where the bytes of a transfer are, within what the ticket allows, and how many there may be: nobody else's are there.
pub(crate) fn room_of(id: u64) -> (usize, usize) {
    let room = LEN / TRANSFERS;
    ((id as usize - 1) * room, room)
}

/// How a seed is played.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Play {
    Honest,
    /// The owner also says what it should not.
    HostileOwner,
    /// The user's edge does not keep to the rules: what was stopped ends at once. The simulation must find what is wrong with that.
    EndsAtOnce,
}

pub(crate) struct World {
    pub(crate) random: Random,
    pub(crate) play: Play,
    pub(crate) clock: Clock,
    pub(crate) now: Instant,
    number: u64,
    events: BTreeMap<(Instant, u64), Event>,
    pub(crate) between_hosts: bool,
    /// Microseconds that bytes take at most.
    pub(crate) delay: u64,
    pub(crate) wires: Vec<Wire<UnitHold, Ranges>>,
    pub(crate) user: Initiator<Unit>,
    pub(crate) moves: Vec<Arc<Move>>,
    pub(crate) owner: Owner<Granted, usize>,
    pub(crate) array: Arc<Array>,
    pub(crate) handle: u32,
    /// What is granted to a peer that shows that.
    pub(crate) tickets: [(&'static [u8], Claims); 2],
    pub(crate) stopped: bool,
    pub(crate) revoked: bool,
    /// How often the owner still says what it should not.
    pub(crate) lies: usize,
    delivered: Vec<u64>,
    /// The requests of each transfer.
    pub(crate) asked: Vec<(u64, u64)>,
    pub(crate) late: Option<String>,
}

impl World {
    pub(crate) fn new(seed: u64, play: Play) -> World {
        let mut random = Random(seed);
        let start = Instant::now();
        let between_hosts = random.once_in(2);
        let delay = if between_hosts { [200, 5_000, 40_000][random.below(3) as usize] } else { 0 };
        let opened = |wire: usize| Opened {
            id: ConnectionId(wire as u64),
            name: (wire != CONTROL).then_some([wire as u8; 32]),
            same_host: !between_hosts,
        };
        let settings = Settings { between_hosts, ends_lanes: between_hosts };
        let mut user = Initiator::new(settings, opened(CONTROL), start);
        let array = Arc::new(Array {
            bytes: Mutex::new((0..LEN + 2 * GUARD).map(|place| byte_of(99, place)).collect()),
            closed: AtomicBool::new(false),
            holds: AtomicUsize::new(0),
            changed: Mutex::default(),
        });
        let quotas = Quotas::default();
        let allowance = Allowance::new(quotas, Budget::new("simulated", quotas.memory).account());
        let region = || Arc::downgrade(&array);
        let mut owner = Owner::new(CONTROL, Standing::new(region(), None), &allowance, false, start);
        for wire in 1..WIRES {
            user.opened(opened(wire));
            owner.joined(wire, [wire as u8; 32]);
        }
        let claims = Claims {
            incarnation: Incarnation([3; 16]),
            row: 1,
            generation: 1,
            range: GUARD as u64..(GUARD + LEN) as u64,
            access: Access::READ_WRITE,
            expires_ms: None,
            layout: None,
        };
        let granted = Granted { claims: claims.clone(), region: region() };
        let handle = owner.grant(TICKETS[0], Ok(granted), Standing::new(region(), None));
        let half = GUARD as u64..(GUARD + LEN / 2) as u64;
        let narrowed = Claims { range: half, access: Access::READ, ..claims.clone() };
        World {
            clock: Clock { start, micros: Arc::new(AtomicU64::new(0)) },
            now: start,
            number: 0,
            events: BTreeMap::new(),
            between_hosts,
            delay,
            wires: (0..WIRES).map(|_| Wire::new(start)).collect(),
            user,
            moves: Vec::new(),
            owner,
            array,
            handle,
            tickets: [(TICKETS[0], claims), (TICKETS[1], narrowed)],
            stopped: false,
            revoked: false,
            lies: 0,
            delivered: Vec::new(),
            asked: Vec::new(),
            late: None,
            random,
            play,
        }
    }

    pub(crate) fn at(&mut self, when: Instant, event: Event) {
        self.number += 1;
        self.events.insert((when.max(self.now), self.number), event);
    }

    fn after(&mut self, most: u64, event: Event) {
        let when = self.now + Duration::from_micros(self.random.below(most));
        self.at(when, event);
    }

    /// Bytes go on their way, and keep their order.
    pub(crate) fn carry(&mut self, wire: usize, at_owner: bool, bytes: Vec<u8>) {
        let delay = Duration::from_micros(self.random.below(self.delay + 1));
        let one = &mut self.wires[wire];
        if one.dead {
            return;
        }
        let when = (self.now + delay).max(one.last[usize::from(at_owner)]);
        one.last[usize::from(at_owner)] = when;
        self.at(when, Event::Arrives { wire, at_owner, bytes });
    }

    pub(crate) fn move_at(&self, id: u64) -> usize {
        self.moves.iter().position(|of| of.id == id).unwrap()
    }

    /// Looks at what the owner has just changed.
    pub(crate) fn look_on(&mut self) {
        let changed = std::mem::take(&mut *self.array.changed.lock());
        for place in changed {
            assert!((GUARD..GUARD + LEN).contains(&place), "memory changed that the ticket does not allow");
            assert!(!self.revoked, "memory changed that was taken back");
            let id = ((place - GUARD) / (LEN / TRANSFERS)) as u64 + 1;
            let of = self.moves.iter().find(|of| of.id == id);
            if of.is_some_and(|of| of.is_quiet()) {
                self.late = Some(format!("transfer {id} is quiet, and its bytes land"));
            }
        }
    }

    pub(crate) fn deliver(&mut self, message: &[u8]) {
        let Ok(id) = message.try_into().map(u64::from_le_bytes) else { return };
        assert!(!self.delivered.contains(&id), "a message is delivered twice");
        self.delivered.push(id);
        self.look_on();
        let of = &self.moves[self.move_at(id)];
        let bytes = self.array.bytes.lock();
        let there = &bytes[GUARD + of.range.start..GUARD + of.range.end];
        assert!(there == &of.memory.lock()[..], "a message is delivered before the bytes that it follows");
    }

    fn step(&mut self, event: Event) {
        match event {
            Event::Arrives { wire, at_owner: true, bytes } => {
                let one = &mut self.wires[wire];
                if !one.dead && !one.hung_up {
                    one.moved = true;
                    one.inbox.extend(bytes);
                    self.serve(wire);
                }
            }
            Event::Arrives { wire, at_owner: false, bytes } => {
                if !self.wires[wire].dead && !self.wires[wire].ended {
                    self.receive(wire, &bytes);
                }
            }
            Event::OwnerLearns(wire) => {
                if !self.wires[wire].dead {
                    self.wires[wire].hung_up = true;
                    self.serve(wire);
                }
            }
            Event::HangsUp { wire, by_word } => {
                self.wires[wire].ended_by_owner |= by_word;
                self.end_wire(
                    wire,
                    &Error::new(Kind::Disconnected, "receive", "the peer has closed the connection"),
                );
            }
            Event::Cuts { wire, silently } => {
                self.wires[wire].dead = true;
                if !silently {
                    self.wires[wire].hung_up = true;
                    self.at(self.now, Event::HangsUp { wire, by_word: false });
                }
            }
            Event::Closes => self.end_session(Error::new(Kind::Canceled, "session", "it was closed"), true),
            Event::Stops => self.stopped = true,
            Event::Resumes => {
                self.stopped = false;
                (0..WIRES).for_each(|wire| self.serve(wire));
            }
            Event::Revokes => self.revoke(),
            Event::Starts(id) => self.start(id),
            Event::Cancels(id) => self.stop(id, Kind::Canceled),
            Event::Limit(id) => {
                let (ended, progress) = {
                    let inner = self.moves[self.move_at(id)].inner.lock();
                    (inner.ended.is_some() || inner.stopped.is_some(), inner.progress)
                };
                if !ended && self.now >= progress + LIMIT {
                    self.stop(id, Kind::Timeout);
                } else if !ended {
                    self.at(progress + LIMIT, Event::Limit(id));
                }
            }
            Event::Settles => {
                let actions = self.user.settle(self.now);
                self.user_acts(actions);
            }
            Event::LooksAtHost => self.look_at_host(),
            Event::Lies => {
                let wire = self.random.below(WIRES as u64) as usize;
                self.lie(wire);
                if self.lies > 0 {
                    self.after(20_000, Event::Lies);
                }
            }
        }
    }

    /// Plays it to its end; what landed late, if anything did.
    pub(crate) fn run(mut self, seed: u64) -> Option<String> {
        if self.play == Play::HostileOwner {
            self.lies = 1 + self.random.below(30) as usize;
            self.after(50_000, Event::Lies);
        }
        for id in 1..=TRANSFERS as u64 {
            self.after(100_000, Event::Starts(id));
        }
        let stops = self.random.once_in(2);
        if stops {
            let when = self.now + Duration::from_micros(self.random.below(120_000));
            self.at(when, Event::Stops);
            let until = when + Duration::from_micros(self.random.below(3_000_000));
            self.at(until, Event::Resumes);
        }
        for wire in 0..WIRES {
            if self.random.once_in(4) {
                let silently = self.between_hosts && self.random.once_in(2);
                self.after(150_000, Event::Cuts { wire, silently });
            }
        }
        if self.random.once_in(4) {
            self.after(150_000, Event::Revokes);
        }
        if self.random.once_in(6) {
            self.after(200_000, Event::Closes);
        }
        while let Some(((when, _), event)) = self.events.pop_first() {
            self.now = when;
            let micros = when.duration_since(self.clock.start).as_micros() as u64;
            self.clock.micros.store(micros, Ordering::Relaxed);
            self.step(event);
            self.look_on();
            let unended = self.moves.iter().any(|of| of.ended().is_none());
            assert!(!unended || micros < HORIZON, "seed {seed}: a transfer never ends");
            // What an owner has never answered is kept in mind as long as the session is there.
            if !unended && micros >= HORIZON {
                break;
            }
        }
        for of in &self.moves {
            let ended = of.ended().expect("a transfer never ends");
            let (stopped, started) = (of.inner.lock().stopped, of.started);
            // Within two seconds of its stop, whatever the owner does.
            if let Some(stopped) = stopped {
                assert!(
                    ended <= stopped + Duration::from_secs(2),
                    "seed {seed}: {:?} after its stop",
                    ended - stopped
                );
            }
            let most = (LIMIT + Duration::from_secs(3)) * 5;
            assert!(ended <= started + most, "seed {seed}: it takes {:?}", ended - started);
            assert!(of.outstanding.load(Ordering::Relaxed) >= 0);
        }
        let bytes = self.array.bytes.lock();
        let untouched = |place: &usize| bytes[*place] == byte_of(99, *place);
        assert!((0..GUARD).chain(GUARD + LEN..bytes.len()).all(|place| untouched(&place)));
        drop(bytes);
        self.late
    }
}
