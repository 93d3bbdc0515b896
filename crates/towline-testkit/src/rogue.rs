//! An owner that speaks the wire format by hand: every byte behind the proofs is made here, and not by the library's encoder.
//!
//! It proves to be the owner of its ticket, since any other process is refused by the handshake, and then answers as a test asks:
//! see [`play`](crate::using::play) for all it may be asked for.

mod acting;
mod pages;

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use towline::memory::Place;
use towline::ticket::{Reach, RegionKey, Ticket, TicketBody, parse_public, socket_name};
use towline::wire::KeyRef;
use towline::wire::handshake::{LinkBase, ServerHandshake, SessionKey};
use towline::{Access, Identity, Incarnation};

pub use self::acting::{Actor, CANARY, STEP, Told};
pub use self::pages::Pages;
pub(crate) use self::pages::life;
use crate::attacker::Medium;
use crate::input::Input;
use crate::random::Random;

/// The kinds of frames that an owner or a user sends after the proofs, by their numbers on the wire.
pub mod kind {
    #![allow(missing_docs, reason = "the names are those of the wire format")]
    pub const REFUSE: u8 = 3;
    pub const READY: u8 = 5;
    pub const HELD: u8 = 6;
    pub const IMPORT: u8 = 16;
    pub const GRANTED: u8 = 17;
    pub const RELEASE: u8 = 18;
    pub const UNMAP: u8 = 19;
    pub const ASK: u8 = 20;
    pub const TOLD: u8 = 21;
    pub const RECALL: u8 = 22;
    pub const READ: u8 = 32;
    pub const DATA: u8 = 33;
    pub const WRITE: u8 = 34;
    pub const REDUCE: u8 = 35;
    pub const DONE: u8 = 36;
    pub const ATOMIC: u8 = 37;
    pub const SIGNAL: u8 = 38;
    pub const NOTIFY: u8 = 39;
    pub const CANCEL: u8 = 40;
    pub const CHECK: u8 = 42;
    pub const WITHDRAW: u8 = 43;
    pub const END_LANE: u8 = 44;
    pub const PING: u8 = 48;
    pub const PONG: u8 = 49;
    pub const BYE: u8 = 50;
}

/// The length of a frame's header.
const HEADER: usize = 24;

/// Frames behind the handshake fill whole lines of this length.
const LINE: usize = 64;

/// How long a user may take for what it does at once.
const PATIENCE: Duration = Duration::from_secs(20);

const SECRET: [u8; 32] = [0x5c; 32];

/// The header of a frame, and its body with the zeros behind it; a payload of that length follows.
pub fn frame(kind: u8, id: u64, body: &[u8], payload: u64, files: u8) -> Vec<u8> {
    let pad = if kind >= kind::IMPORT { (LINE - (HEADER + body.len()) % LINE) % LINE } else { 0 };
    let mut out = vec![kind, 0, files, pad as u8];
    out.extend((body.len() as u32).to_le_bytes());
    out.extend(payload.to_le_bytes());
    out.extend(id.to_le_bytes());
    out.extend(body);
    out.resize(out.len() + pad, 0);
    out
}

/// An answer to a request for bytes, and the bytes.
pub fn data(id: u64, bytes: &[u8]) -> Vec<u8> {
    [frame(kind::DATA, id, &[0], bytes.len() as u64, 0), bytes.to_vec()].concat()
}

/// An answer that says that a request was done.
pub fn done(id: u64, value: u64) -> Vec<u8> {
    frame(kind::DONE, id, &[&[0][..], &value.to_le_bytes()].concat(), 0, 0)
}

/// An answer of that kind that says that a request was refused.
pub fn refused(kind: u8, id: u64, error: u8) -> Vec<u8> {
    frame(kind, id, &[&[1, error, 2, 0][..], b"no"].concat(), 0, 0)
}

/// The checksums of a request's blocks.
pub fn check(id: u64, sums: &[u32]) -> Vec<u8> {
    let body: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
    frame(kind::CHECK, id, &body, 0, 0)
}

/// The first words on a connection: of the control connection with the rows of the table, of a lane with its place; over TCP with the
/// port at which the owner sees the user. Who says that port knows of lanes that end and of reads that nobody wants any more.
pub fn ready(rows: Option<u32>, files: u8) -> Vec<u8> {
    let mut body = SESSION.to_le_bytes().to_vec();
    body.extend([5, 0]);
    body.extend(b"rogue");
    body.push(u8::from(rows.is_some()));
    body.extend(rows.into_iter().flat_map(u32::to_le_bytes));
    frame(kind::READY, 0, &body, 0, files)
}

const SESSION: u64 = 77;

/// What a ticket is turned into.
#[derive(Debug, Clone, Copy)]
pub struct Grant {
    /// The number that requests name.
    pub handle: u32,
    /// The row of the table.
    pub row: u32,
    /// Its generation.
    pub generation: u64,
    /// Where the range begins in the region.
    pub offset: u64,
    /// How long it is.
    pub length: u64,
    /// Read, write or both.
    pub access: u8,
    /// The segment's number, its length, where the region begins in it, and whether its descriptor comes along.
    pub segment: Option<(u64, u64, u64, bool)>,
    /// The paths that may be asked about.
    pub offers: u8,
    /// Whether it is said to be a file.
    pub disk: bool,
    /// Or memory of the first GPU.
    pub gpu: bool,
}

impl Grant {
    /// Of a whole region of that length, for reading and writing.
    pub fn whole(length: u64) -> Grant {
        let (handle, row, generation) = (9, ROW, GENERATION);
        let (segment, disk, gpu) = (None, false, false);
        Grant { handle, row, generation, offset: 0, length, access: 3, segment, offers: 0, disk, gpu }
    }
}

/// The answer to an import.
pub fn granted(id: u64, grants: &[Grant], files: u8) -> Vec<u8> {
    let mut body = (grants.len() as u16).to_le_bytes().to_vec();
    for grant in grants {
        body.push(0);
        body.extend(grant.handle.to_le_bytes());
        body.extend(grant.row.to_le_bytes());
        body.extend(grant.generation.to_le_bytes());
        body.extend(grant.offset.to_le_bytes());
        body.extend(grant.length.to_le_bytes());
        body.push(grant.access);
        // Where it is, and no layout.
        body.extend([u8::from(grant.gpu) + 2 * u8::from(grant.disk), 0, 0, 0, 0, 0]);
        body.push(u8::from(grant.segment.is_some()));
        if let Some((id, len, offset, attached)) = grant.segment {
            body.extend(id.to_le_bytes());
            body.extend(len.to_le_bytes());
            body.extend(offset.to_le_bytes());
            body.push(u8::from(attached));
        }
        // No lease.
        body.push(0);
        body.push(grant.offers);
    }
    frame(kind::GRANTED, id, &body, 0, files)
}

/// Where the ticket says that its region is.
pub const ROW: u32 = 1;
/// And of which generation.
pub const GENERATION: u64 = 5;

enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// What a user has sent: a frame up to its payload.
#[derive(Debug, Clone)]
pub struct Heard {
    /// What it is.
    pub kind: u8,
    /// The request's number.
    pub id: u64,
    /// Without the zeros.
    pub body: Vec<u8>,
    /// The length of the payload, which is still to be [taken](Link::take).
    pub payload: u64,
}

impl Heard {
    /// How many bytes a request for bytes asks for, and in how many blocks.
    pub fn asked(&self) -> (u64, u32) {
        let number = |at: usize| {
            self.body.get(at..at + 4).map_or(0, |four| u32::from_le_bytes(four.try_into().unwrap()))
        };
        // A body that is not one of a request for bytes may say anything.
        let blocks = number(12).min(self.body.len() as u32);
        let bytes = match self.body.get(16) {
            Some(1) => u64::from(number(17)) * u64::from(blocks),
            Some(_) => (0..blocks as usize).map(|block| u64::from(number(17 + block * 12 + 8))).sum(),
            None => 0,
        };
        (bytes, blocks)
    }
}

/// One connection of a user.
pub struct Link {
    stream: Stream,
    /// Whether it is one more of a session.
    pub lane: bool,
}

impl Link {
    /// The port at which the user is seen; none over a Unix socket.
    pub fn seen_at(&self) -> Option<u32> {
        match &self.stream {
            Stream::Unix(_) => None,
            Stream::Tcp(stream) => Some(stream.peer_addr().map_or(0, |address| address.port().into())),
        }
    }

    /// Sends; that the user has hung up is no surprise, and neither is one that takes nothing: the rest is left out.
    pub fn send(&mut self, bytes: &[u8]) {
        let _ = match &mut self.stream {
            Stream::Unix(stream) => stream.write_all(bytes),
            Stream::Tcp(stream) => stream.write_all(bytes),
        };
    }

    /// [`send`](Self::send) with descriptors, where these can go along.
    pub fn send_with_files(&mut self, bytes: &[u8], files: &[BorrowedFd<'_>]) {
        let Stream::Unix(stream) = &self.stream else { return self.send(bytes) };
        if files.is_empty() {
            return self.send(bytes);
        }
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(files.len()))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(files)));
        let _ = sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
    }

    /// The next frame up to its payload; `None` at the end of the connection, or where nothing comes in that time.
    pub fn hear_within(&mut self, time: Duration) -> Option<Heard> {
        if !self.has_bytes(time) {
            return None;
        }
        let mut header = [0; HEADER];
        self.read(&mut header)?;
        let length = u32::from_le_bytes(header[4..8].try_into().unwrap()) as usize;
        let mut body = vec![0; length + usize::from(header[3])];
        self.read(&mut body)?;
        body.truncate(length);
        let number = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().unwrap());
        Some(Heard { kind: header[0], id: number(16), body, payload: number(8) })
    }

    /// The next frame up to its payload.
    ///
    /// # Panics
    /// Where the user has ended the connection.
    pub fn hear(&mut self) -> Heard {
        self.hear_within(PATIENCE).expect("the user hung up")
    }

    /// The next frame of that kind; those before it and their payloads are passed over.
    pub fn hear_of(&mut self, kind: u8) -> Heard {
        loop {
            let frame = self.hear();
            if frame.kind == kind {
                return frame;
            }
            self.take(frame.payload);
        }
    }

    /// The next bytes, as many as come.
    pub fn take(&mut self, bytes: u64) -> Vec<u8> {
        let mut taken = vec![0; bytes as usize];
        if self.read(&mut taken).is_none() {
            taken.clear();
        }
        taken
    }

    /// Some of the next bytes, at most as many; none at the end of the connection.
    pub fn take_some(&mut self, most: u64) -> Vec<u8> {
        let mut some = vec![0; most.min(64 << 10) as usize];
        let taken = self.read_some(&mut some).unwrap_or(0);
        some.truncate(taken);
        some
    }

    /// Whatever comes within that time, and whether the user has hung up.
    pub fn drain(&mut self, time: Duration) -> (Vec<u8>, bool) {
        let (mut all, mut some) = (Vec::new(), vec![0; 64 << 10]);
        while self.has_bytes(time) {
            match self.read_some(&mut some) {
                Some(len @ 1..) => all.extend(&some[..len]),
                _ => return (all, true),
            }
        }
        (all, false)
    }

    /// Whether there are bytes, or the end, within that time.
    pub fn has_bytes(&self, time: Duration) -> bool {
        Link::await_any([self].into_iter(), time)
    }

    /// Whether any of them has bytes, or has ended, within that time.
    fn await_any<'a>(links: impl Iterator<Item = &'a Link>, time: Duration) -> bool {
        has_come(&links.map(Link::as_fd).collect::<Vec<_>>(), time)
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.stream {
            Stream::Unix(stream) => stream.as_fd(),
            Stream::Tcp(stream) => stream.as_fd(),
        }
    }

    /// Ends both directions.
    pub fn hang_up(&self) {
        let _ = match &self.stream {
            Stream::Unix(stream) => stream.shutdown(Shutdown::Both),
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Both),
        };
    }

    fn read(&mut self, into: &mut [u8]) -> Option<()> {
        match &mut self.stream {
            Stream::Unix(stream) => stream.read_exact(into).ok(),
            Stream::Tcp(stream) => stream.read_exact(into).ok(),
        }
    }

    fn read_some(&mut self, into: &mut [u8]) -> Option<usize> {
        match &mut self.stream {
            Stream::Unix(stream) => stream.read(into).ok(),
            Stream::Tcp(stream) => stream.read(into).ok(),
        }
    }
}

/// Where its users come in.
enum Door {
    Unix(UnixListener),
    Tcp(TcpListener),
}

/// An owner of one region, with the ticket for it.
pub struct Rogue {
    identity: Identity,
    key: RegionKey,
    ticket: Ticket,
    door: Door,
    session: Mutex<Option<SessionKey>>,
}

impl Rogue {
    /// Waits for users of a region of that many bytes, which come to it in that way.
    pub fn open(medium: Medium, length: u64) -> Rogue {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut random = Random::from_seed(
            NEXT.fetch_add(1, Ordering::Relaxed) ^ u64::from(std::process::id()) << 32 ^ nanoseconds(),
        );
        let mut incarnation = [0; 16];
        incarnation.fill_with(|| random.number() as u8);
        let identity = Identity::new("rogue", Incarnation(incarnation)).unwrap();
        let (door, reach) = match medium {
            Medium::Unix => {
                let name = SocketAddr::from_abstract_name(socket_name(&identity.incarnation)).unwrap();
                (Door::Unix(UnixListener::bind_addr(&name).unwrap()), Reach::Unix)
            }
            Medium::Tcp => {
                let door = TcpListener::bind("127.0.0.1:0").unwrap();
                // Its connections have it from here: little fits on the way to an owner that takes nothing.
                rustix::net::sockopt::set_socket_recv_buffer_size(&door, 16 << 10).unwrap();
                let address = door.local_addr().unwrap();
                (Door::Tcp(door), Reach::Tcp(address))
            }
        };
        let body = TicketBody {
            identity: identity.clone(),
            reach: vec![reach],
            row: ROW,
            generation: GENERATION,
            length,
            place: Place::Host,
            access: Access::READ_WRITE,
            issued_ms: 0,
            layout: None,
        };
        let key = RegionKey::derive(&SECRET, ROW, GENERATION);
        let ticket = Ticket::mint(&body, &key).unwrap();
        Rogue { identity, key, ticket, door, session: Mutex::default() }
    }

    /// What leads users here.
    pub fn ticket(&self) -> &Ticket {
        &self.ticket
    }

    /// Whether a user connects, or any of them has bytes or has ended, within that time.
    fn await_any<'a>(&'a self, links: impl Iterator<Item = &'a Link>, time: Duration) -> bool {
        let door = match &self.door {
            Door::Unix(door) => door.as_fd(),
            Door::Tcp(door) => door.as_fd(),
        };
        has_come(&links.map(Link::as_fd).chain([door]).collect::<Vec<_>>(), time)
    }

    /// The next connection, whose proofs are right, up to the word that it is [ready]; `None` where none comes in that time, or the
    /// user turns away.
    pub fn meet(&self, time: Duration) -> Option<Link> {
        if !self.await_any(std::iter::empty(), time) {
            return None;
        }
        let stream = match &self.door {
            Door::Unix(door) => {
                let stream = door.accept().ok()?.0;
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                stream.set_write_timeout(Some(PATIENCE)).unwrap();
                Stream::Unix(stream)
            }
            Door::Tcp(door) => {
                let stream = door.accept().ok()?.0;
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                stream.set_write_timeout(Some(PATIENCE)).unwrap();
                let _ = stream.set_nodelay(true);
                Stream::Tcp(stream)
            }
        };
        let mut link = Link { stream, lane: false };
        let hello = link.hear_within(PATIENCE)?;
        let mut nonce = [0; 32];
        let mut random = Random::from_seed(nanoseconds());
        nonce.fill_with(|| random.number() as u8);
        let known = self.session.lock().clone();
        let mut lane = false;
        let key = |key: &KeyRef| match (key, known) {
            (KeyRef::Ticket(bytes), _) => Ok(LinkBase::Tag(parse_public(bytes)?.tag(&self.key))),
            (KeyRef::Session(_), Some(known)) => {
                lane = true;
                Ok(LinkBase::Session(known))
            }
            (KeyRef::Session(_), None) => panic!("a lane of a session that there is not"),
        };
        let (handshake, welcome) =
            ServerHandshake::on_hello(&hello.body, &self.identity, nonce, None, key).unwrap();
        link.lane = lane;
        link.send(&welcome);
        let (key, _) = handshake.on_prove(&link.hear_within(PATIENCE)?.body).ok()?;
        if !lane {
            *self.session.lock() = Some(key);
        }
        Some(link)
    }

    /// The next connection, to which it says that it is ready; it shares no memory.
    pub fn let_in(&self) -> Link {
        let mut link = self.meet(PATIENCE).expect("a user comes");
        link.send(&ready(None, 0));
        link
    }

    /// The same over TCP, where it says that it sees the user at a port which is not the user's: as between hosts.
    pub fn let_in_from_afar(&self) -> Link {
        let mut link = self.meet(PATIENCE).expect("a user comes");
        link.send(&ready(Some(0), 0));
        link
    }

    /// [`let_in`](Self::let_in) with pages as an honest owner of a region of that length shares them.
    pub fn let_in_sharing(&self, length: u64) -> (Link, Pages) {
        let mut link = self.meet(PATIENCE).expect("a user comes");
        let pages = Pages::new(length, self.identity.incarnation.0, &mut Input(&[]));
        link.send_with_files(&ready(Some(pages::ROWS), 4), &pages.files());
        (link, pages)
    }
}

/// Whether there is something to read from any of them within that time.
fn has_come(fds: &[BorrowedFd<'_>], time: Duration) -> bool {
    let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
    let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    poll(&mut fds, Some(&time)).is_ok_and(|ready| ready > 0)
}

fn nanoseconds() -> u64 {
    std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos() as u64)
}
