//! An attacker on the network path of plain TCP, who reads and changes what passes. Nothing protects it after the handshake: the attacker acts in the
//! name of either side, within what the connection was granted and asked. These are the limits that hold all the same.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use towline::{Access, Endpoint, Limits, MemoryAccess, Registered, SystemStorage, Ticket};
use towline_testkit::attacker::Attacker;
use towline_testkit::bench::routing;
use towline_testkit::guarded::Guarded;
use towline_testkit::oracle::Stamp;
use towline_testkit::random::Random;
use towline_testkit::rogue::{CANARY, frame, kind};
use towline_testkit::watchdog::{eventually, watch};

const LEN: usize = 1 << 20;
const STAMP: Stamp = Stamp { region: 3, generation: 1 };

/// What the ticket for the first region allows; the one for the second allows no write.
const START: usize = 256 << 10;
const LENGTH: usize = 512 << 10;

/// The user's memory: requests use the middle of it.
const LOCAL: usize = 1 << 20;
const USED: std::ops::Range<usize> = 64 << 10..(64 << 10) + LENGTH;

const STALL: Duration = Duration::from_millis(500);
const WATCHDOG: Duration = Duration::from_secs(240);

/// One frame as it passes.
struct Passing {
    head: Vec<u8>,
    body: Vec<u8>,
    payload: Vec<u8>,
}

impl Passing {
    fn read(from: &mut TcpStream) -> Option<Passing> {
        let mut head = vec![0; 24];
        from.read_exact(&mut head).ok()?;
        let length = |at: usize, len: usize| {
            let mut number = [0; 8];
            number[..len].copy_from_slice(&head[at..at + len]);
            u64::from_le_bytes(number) as usize
        };
        let (mut body, mut payload) = (vec![0; length(4, 4) + length(3, 1)], vec![0; length(8, 8)]);
        from.read_exact(&mut body).ok()?;
        from.read_exact(&mut payload).ok()?;
        Some(Passing { head, body, payload })
    }

    fn bytes(&self) -> Vec<u8> {
        [&self.head[..], &self.body, &self.payload].concat()
    }

    /// Changes something of it.
    fn change(&mut self, random: &mut Random) {
        let word = match random.below(6) {
            0 => 0,
            1 => u64::MAX,
            2 => u64::MAX - random.below(64),
            3 => LENGTH as u64 - random.below(64),
            4 => random.below(LEN as u64) & !7,
            _ => random.number(),
        };
        match random.below(8) {
            // A number in the body: a handle, an offset, a length, a count; or any bit of it.
            0..=3 if self.body.len() > 8 => {
                let at = random.below(self.body.len() as u64 - 7) as usize;
                let len = random.pick(&[1, 2, 4, 8]);
                self.body[at..at + len].copy_from_slice(&word.to_le_bytes()[..len]);
            }
            4 => self.head[16..24].copy_from_slice(&word.to_le_bytes()),
            5 => self.head[0] = random.below(52) as u8,
            6 if !self.payload.is_empty() => {
                let at = random.below(self.payload.len() as u64) as usize;
                self.payload[at] ^= 1;
            }
            _ => {
                let at = random.below(self.head.len() as u64) as usize;
                self.head[at] ^= 1 << random.below(8);
            }
        }
    }

    /// One that neither side has sent.
    fn made_up(random: &mut Random) -> Vec<u8> {
        let (handle, id) = (1 + random.below(2) as u32, random.below(16));
        let (offset, len) = (random.below(LEN as u64) & !7, 8 + random.below(4096) as u32);
        let mut blocks = vec![0; 8];
        blocks.extend(handle.to_le_bytes());
        blocks.extend(1_u32.to_le_bytes());
        blocks.push(1);
        blocks.extend(len.to_le_bytes());
        blocks.extend(offset.to_le_bytes());
        match random.below(5) {
            0 => frame(kind::READ, id, &blocks, 0, 0),
            1 => [frame(kind::WRITE, id, &blocks, len.into(), 0), vec![7; len as usize]].concat(),
            2 => [frame(kind::DATA, id, &[0], len.into(), 0), vec![7; len as usize]].concat(),
            3 => frame(kind::DONE, id, &[0; 9], 0, 0),
            _ => {
                let atomic = [&handle.to_le_bytes()[..], &offset.to_le_bytes(), &[1], &[9; 8]].concat();
                frame(kind::ATOMIC, id, &atomic, 0, 0)
            }
        }
    }
}

/// What passes in one direction: the handshake as it is, and then as chance will have it.
fn meddle(mut from: TcpStream, mut to: TcpStream, seed: u64, often: u64, changed: &AtomicU64) {
    let mut random = Random::new(seed);
    let mut held: Option<Vec<u8>> = None;
    while let Some(mut passing) = Passing::read(&mut from) {
        let mut out = Vec::new();
        if passing.head[0] >= kind::IMPORT && random.below(often) == 0 {
            changed.fetch_add(1, Ordering::Relaxed);
            match random.below(8) {
                // Twice, not at all, behind the next one, after something else, or cut short.
                0 => out = [passing.bytes(), passing.bytes()].concat(),
                1 => {}
                2 => held = Some(passing.bytes()),
                3 => out = [Passing::made_up(&mut random), passing.bytes()].concat(),
                4 if random.below(4) == 0 => {
                    let bytes = passing.bytes();
                    let _ = to.write_all(&bytes[..random.below(bytes.len() as u64) as usize]);
                    break;
                }
                _ => {
                    passing.change(&mut random);
                    out = passing.bytes();
                }
            }
        } else {
            out = passing.bytes();
        }
        if !out.is_empty()
            && let Some(held) = held.take()
        {
            out.extend(held);
        }
        if to.write_all(&out).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

/// An owner whose tickets lead to an attacker on the network path.
struct Path {
    owner: Endpoint,
    first: Registered<SystemStorage>,
    second: Registered<SystemStorage>,
    listen: std::net::SocketAddr,
    door: TcpListener,
}

impl Path {
    fn open() -> Path {
        let door = TcpListener::bind("127.0.0.1:0").unwrap();
        let listen = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let options = Endpoint::options("owner").listen(listen).advertise(door.local_addr().unwrap());
        let owner = options.open().unwrap();
        let region = || owner.register(SystemStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap();
        let (first, second) = (region(), region());
        for region in [&first, &second] {
            STAMP.fill_storage(region.storage()).unwrap();
        }
        Path { owner, first, second, listen, door }
    }

    fn tickets(&self) -> [Ticket; 2] {
        let narrow = self.first.ticket().unwrap().narrow().range(START as u64, LENGTH as u64).finish();
        let reader = self.second.ticket().unwrap().narrow().access(Access::READ).finish();
        [narrow.unwrap(), reader.unwrap()]
    }

    /// Passes the connections of users on: to what is done with both directions of each.
    fn pass(&self, each: impl Fn(TcpStream, TcpStream) + Send + 'static) {
        let (door, listen) = (self.door.try_clone().unwrap(), self.listen);
        thread::spawn(move || {
            for user in door.incoming().flatten() {
                if let Ok(owner) = TcpStream::connect(listen) {
                    each(user, owner);
                }
            }
        });
    }

    /// Nothing has changed but what the first ticket allows, and an honest user is served.
    fn is_unharmed(&self) {
        STAMP.verify_storage(self.first.storage(), 0, START).unwrap();
        STAMP.verify_storage(self.first.storage(), START + LENGTH, LEN - START - LENGTH).unwrap();
        STAMP.verify_storage(self.second.storage(), 0, LEN).unwrap();
        let quiet = eventually(WATCHDOG / 8, || self.owner.stats().in_flight.0 == 0);
        assert!(quiet, "the owner is still at something");
    }
}

/// A user who reads and writes through it; its memory is as it should be afterwards, whatever has become of its requests.
fn use_it(tickets: &[Ticket; 2], well: &AtomicU64) {
    let limits = Limits { no_progress: STALL, ..Limits::default() };
    let options = Endpoint::options("user").limits(limits).routing(routing("tcp")).lanes(2);
    let user = options.open().unwrap();
    let local = user.register(Guarded::new(LOCAL), Access::NONE).unwrap();
    local.write_at(0, &vec![CANARY; LOCAL]).unwrap();
    local.write_at(USED.start, &vec![1; LENGTH]).unwrap();
    if let Ok(remotes) = user.import_many(tickets) {
        let transfers = remotes.iter().flatten().flat_map(|remote| {
            let (at, short) = (USED.start as u64, 4096);
            let long = remote.len().min(LENGTH as u64);
            [
                user.read(remote, &local).at(0, at, short).start(),
                user.write(remote, &local).at(8192, at + 8192, short).start(),
                user.fetch_add(remote, 16, 1),
                user.read(remote, &local).at(0, at, long).start(),
                user.write(remote, &local).at(0, at, long).start(),
            ]
        });
        let transfers: Vec<_> = transfers.flatten().collect();
        for transfer in &transfers {
            let ended = transfer.wait_for(WATCHDOG).expect("a transfer that ends");
            well.fetch_add(u64::from(ended.is_ok()), Ordering::Relaxed);
        }
    }
    let storage = local.into_storage_within(WATCHDOG).map_err(|pinned| pinned.error).unwrap();
    let mut found = vec![0; LOCAL];
    storage.read_at(0, &mut found).unwrap();
    assert!(found[..USED.start].iter().all(|byte| *byte == CANARY), "bytes before those of the requests");
    assert!(found[USED.end..].iter().all(|byte| *byte == CANARY), "bytes behind those of the requests");
    storage.write_at(0, &vec![CANARY; LOCAL]).unwrap();
    user.close_within(WATCHDOG).unwrap();
    storage.read_at(0, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == CANARY), "memory that was given back was written into");
}

#[test]
fn whoever_changes_frames_on_plain_tcp_gets_neither_beyond_the_grants_nor_beyond_the_requests() {
    let _watchdog = watch("whoever_changes_frames_on_plain_tcp", WATCHDOG * 2);
    let rounds = std::env::var("TOWLINE_PROGRAMS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(400);
    let (changed, well) = (Arc::new(AtomicU64::new(0)), AtomicU64::new(0));
    let path = Path::open();
    let (number, counted) = (AtomicU64::new(0), Arc::clone(&changed));
    path.pass(move |user, owner| {
        let seed = 9700 + 2 * number.fetch_add(1, Ordering::Relaxed);
        let often = [2, 5, 12][seed as usize / 2 % 3];
        let directions = [(user.try_clone(), owner.try_clone()), (Ok(owner), Ok(user))];
        for (at, (from, to)) in directions.into_iter().enumerate() {
            let counted = Arc::clone(&counted);
            let (from, to) = (from.unwrap(), to.unwrap());
            thread::spawn(move || meddle(from, to, seed + at as u64, often, &counted));
        }
    });
    let tickets = path.tickets();
    // Side by side: most of the time is spent waiting for what was dropped.
    let left = AtomicU64::new(rounds / 4);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while left
                    .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1))
                    .is_ok()
                {
                    use_it(&tickets, &well);
                }
            });
        }
    });
    path.is_unharmed();
    let (changed, well) = (changed.load(Ordering::SeqCst), well.load(Ordering::SeqCst));
    assert!(changed > rounds / 4 && well > rounds / 8, "{changed} changes, {well} transfers ended well");
}

#[test]
fn what_was_proven_on_one_connection_of_plain_tcp_opens_nothing_elsewhere() {
    let _watchdog = watch("what_was_proven_on_one_connection_of_plain_tcp_opens_nothing_elsewhere", WATCHDOG);
    let path = Path::open();
    let said = Arc::new(Mutex::new(Vec::<Arc<Mutex<Vec<u8>>>>::new()));
    let all = Arc::clone(&said);
    path.pass(move |user, owner| {
        let this = Arc::new(Mutex::new(Vec::new()));
        all.lock().push(Arc::clone(&this));
        let (mut back, mut to_user) = (owner.try_clone().unwrap(), user.try_clone().unwrap());
        thread::spawn(move || std::io::copy(&mut back, &mut to_user));
        let (mut user, mut owner) = (user, owner);
        thread::spawn(move || {
            let mut some = vec![0; 64 << 10];
            while let Ok(len @ 1..) = user.read(&mut some) {
                this.lock().extend(&some[..len]);
                if owner.write_all(&some[..len]).is_err() {
                    return;
                }
            }
        });
    });
    let [ticket, other] = path.tickets();
    let user = Endpoint::options("user").routing(routing("tcp")).lanes(1).open().unwrap();
    let remote = user.import(&ticket).unwrap();
    let local = user.register(SystemStorage::new(LENGTH).unwrap(), Access::NONE).unwrap();
    // So large that it goes over a lane, whose proof is by the session's key.
    user.read(&remote, &local).start().unwrap().wait().unwrap();
    let said: Vec<Vec<u8>> = said.lock().iter().map(|one| one.lock().clone()).collect();
    assert_eq!(said.len(), 2, "a control connection and a lane");
    let here = path.owner.identity();
    let direct = |ticket: &Ticket| {
        let stream = TcpStream::connect(path.listen).unwrap();
        assert_eq!(ticket.body().identity.incarnation, here.incarnation);
        Attacker::over(stream)
    };
    for all in &said {
        let mut replay = direct(&ticket);
        replay.send(all);
        assert!(replay.gets_nothing_but_refusals(), "a recorded connection was accepted");
    }
    // A holder of another ticket of this owner shows the proof of the one that it has only seen.
    let mut control = &said[0][..];
    let import = loop {
        let length = |at: usize| u32::from_le_bytes(control[at..at + 4].try_into().unwrap()) as usize;
        let (frame, rest) = control.split_at(24 + length(4) + usize::from(control[3]) + length(8));
        if frame[0] == kind::IMPORT {
            break frame.to_vec();
        }
        control = rest;
    };
    let mut holder = direct(&other);
    holder.shake_hands(&other).unwrap();
    holder.send(&import);
    assert!(holder.gets_nothing_but_errors(), "a proof of another connection was accepted");
    path.is_unharmed();
}
