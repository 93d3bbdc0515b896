//! The root of a meeting: a thread that lets ranks in, waits for all of them, and sends everyone the outcome.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;
use towline::{SparseLog, Tls, TlsStream};

use super::meeting::Meeting;
use super::wire::{self, HELLO_LEN, Join, MOST_JOIN, Reply, Session, Side};
use crate::unique_id::UniqueId;
use crate::{Error, Result};

const OP: &str = "get_unique_id";
/// How long an unauthenticated connection may take to show that it knows the secret.
const AUTHENTICATE_WITHIN: Duration = Duration::from_secs(5);
/// How long a rank may take to receive the reply.
const DELIVERY: Duration = Duration::from_secs(10);
/// The longest that any rank is waited for.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// The most unauthenticated connections at a time; for one more, the oldest from the largest origin is closed.
const MOST_UNAUTHENTICATED: usize = 512;
const HUNG_UP: &str = "it closed the connection before it had joined";
/// How long the root looks away when the process has no descriptors left.
const SHORTAGE: Duration = Duration::from_millis(50);

/// An open meeting.
pub(crate) struct Root {
    called_off: Arc<Mutex<Option<Error>>>,
    socket_name: String,
}

impl Root {
    /// Ends the meeting with that error, for all guests that have come and will come.
    pub(crate) fn call_off(&self, error: Error) {
        *self.called_off.lock() = Some(error);
        // A connection wakes the thread.
        let _ = std::os::unix::net::SocketAddr::from_abstract_name(&self.socket_name)
            .and_then(|address| UnixStream::connect_addr(&address));
    }
}

/// Listens on those addresses; on loopback without any.
pub(crate) fn listen(on: &[SocketAddr]) -> Result<Vec<TcpListener>> {
    let loopback = [SocketAddr::from((Ipv4Addr::LOCALHOST, 0))];
    let on = if on.is_empty() { &loopback[..] } else { on };
    on.iter()
        .map(|address| {
            let listener = TcpListener::bind(address)
                .map_err(|error| Error::from(towline::Error::os(OP, "bind", error)).about_address(address))?;
            listener.set_nonblocking(true).map_err(|error| towline::Error::os(OP, "fcntl", error))?;
            Ok(listener)
        })
        .collect()
}

/// Where those listen.
pub(crate) fn addresses(listeners: &[TcpListener]) -> Result<Vec<SocketAddr>> {
    let local = |listener: &TcpListener| listener.local_addr();
    Ok(listeners
        .iter()
        .map(local)
        .collect::<io::Result<_>>()
        .map_err(|e| towline::Error::os(OP, "getsockname", e))?)
}

/// Opens the meeting: its thread ends when all ranks have received the reply, or no rank has joined in that time.
pub(crate) fn open(id: &UniqueId, tcp: Vec<TcpListener>, unjoined: Duration) -> Result<Root> {
    let socket_name = id.socket_name();
    let unix = std::os::unix::net::SocketAddr::from_abstract_name(&socket_name)
        .and_then(|address| UnixListener::bind_addr(&address))
        .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
        .map_err(|error| towline::Error::os(OP, "bind", error))?;
    let called_off = Arc::new(Mutex::new(None));
    let mut host = Host {
        id: id.clone(),
        tls: id.tls().then(Tls::by_ticket).transpose()?,
        unix,
        tcp,
        guests: Vec::new(),
        meeting: Meeting::by(Instant::now() + unjoined.min(LONGEST)),
        called_off: Arc::clone(&called_off),
        closing: None,
        refusals: Refusals { log: SparseLog::default(), meeting: socket_name.clone() },
    };
    towline::start_thread(OP, "towline-root", move || host.run())?;
    Ok(Root { called_off, socket_name })
}

trait AboutAddress {
    fn about_address(self, address: &SocketAddr) -> Error;
}

impl AboutAddress for Error {
    fn about_address(self, address: &SocketAddr) -> Error {
        let message = format!("{address}: {}", self.message());
        Error::new(self.kind(), self.op(), message).caused_by(self)
    }
}

/// A connection over either kind of socket.
enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.read(into),
            Stream::Tcp(stream) => stream.read(into),
            Stream::Tls(stream) => stream.read(into),
        }
    }

    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.write(from),
            Stream::Tcp(stream) => stream.write(from),
            Stream::Tls(stream) => stream.write(from),
        }
    }

    /// Sends what TLS has encrypted and the socket has not taken yet.
    fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Unix(_) | Stream::Tcp(_) => Ok(()),
            Stream::Tls(stream) => stream.flush(),
        }
    }

    fn is_pending(&self) -> bool {
        matches!(self, Stream::Tls(stream) if stream.is_pending())
    }

    /// What the two sides of an encrypted connection have in common.
    fn binding(&self) -> io::Result<Option<[u8; 32]>> {
        match self {
            Stream::Unix(_) | Stream::Tcp(_) => Ok(None),
            Stream::Tls(stream) => stream.binding().map(Some),
        }
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Unix(stream) => stream.as_fd(),
            Stream::Tcp(stream) => stream.as_fd(),
            Stream::Tls(stream) => stream.stream().as_fd(),
        }
    }
}

/// How far a guest is.
enum Phase {
    /// Nothing is known of it.
    Greeting,
    /// It was welcomed and must show that it knows the secret.
    Welcomed(Session),
    /// It is the rank of that number.
    Seated(Session, usize),
    /// Gone, or to be closed.
    Gone,
}

/// Where an unauthenticated connection comes from: many from one origin must not keep others out.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Origin {
    /// A user of this host.
    User(u32),
    /// A host, or a network of IPv6, of which a host has many addresses.
    Host(IpAddr),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::User(uid) => write!(f, "user {uid} of this host"),
            Origin::Host(address) => address.fmt(f),
        }
    }
}

impl Origin {
    fn of(address: IpAddr) -> Origin {
        Origin::Host(match address.to_canonical() {
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
            address => address,
        })
    }
}

struct Guest {
    stream: Stream,
    origin: Origin,
    phase: Phase,
    input: Vec<u8>,
    output: VecDeque<u8>,
    until: Instant,
    replied: bool,
    /// Why it is closed. A guest that connects and says nothing leaves of itself.
    refused: Option<&'static str>,
}

impl Guest {
    fn refuse(&mut self, why: &'static str) {
        (self.phase, self.refused) = (Phase::Gone, Some(why));
    }

    /// Reads what has come, up to what this phase may say. `false` where the connection has ended.
    fn fill(&mut self) -> bool {
        let most = match self.phase {
            Phase::Greeting => HELLO_LEN,
            Phase::Welcomed(_) => 4 + MOST_JOIN,
            // A rank says nothing more: anything but silence ends it.
            Phase::Seated(..) => 1,
            Phase::Gone => return false,
        };
        let mut chunk = [0; 2048];
        while self.input.len() < most {
            let room = (most - self.input.len()).min(chunk.len());
            match self.stream.read(&mut chunk[..room]) {
                Ok(0) => return false,
                Ok(len) => self.input.extend_from_slice(&chunk[..len]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(_) => return false,
            }
        }
        true
    }

    /// Writes what can be written. `false` where the connection has ended.
    fn drain(&mut self) -> bool {
        while !self.output.is_empty() {
            let (head, _) = self.output.as_slices();
            match self.stream.write(head) {
                Ok(0) => return false,
                Ok(len) => drop(self.output.drain(..len)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(_) => return false,
            }
        }
        match self.stream.flush() {
            Ok(()) => true,
            Err(error) => matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock),
        }
    }

    /// Whether something is to be written.
    fn has_output(&self) -> bool {
        !self.output.is_empty() || self.stream.is_pending()
    }

    fn is_unauthenticated(&self) -> bool {
        matches!(self.phase, Phase::Greeting | Phase::Welcomed(_))
    }
}

struct Host {
    id: UniqueId,
    /// What ranks of other hosts come through.
    tls: Option<Tls>,
    unix: UnixListener,
    tcp: Vec<TcpListener>,
    guests: Vec<Guest>,
    meeting: Meeting,
    called_off: Arc<Mutex<Option<Error>>>,
    /// Until when late ranks get the reason why there is no group.
    closing: Option<Instant>,
    refusals: Refusals,
}

impl Host {
    fn run(&mut self) {
        let reply = loop {
            if let Some(error) = self.called_off.lock().take() {
                break Reply::Failed(error);
            }
            if let Some(reply) = self.turn() {
                break reply;
            }
        };
        if matches!(reply, Reply::Failed(_)) {
            self.explain(&reply);
        }
        self.send_to_all(&reply);
    }

    /// For a while, sends late ranks the same reply.
    fn explain(&mut self, reply: &Reply) {
        let until = Instant::now() + DELIVERY;
        self.closing = Some(until);
        while Instant::now() < until {
            self.queue(reply);
            let _ = self.turn();
        }
    }

    /// Queues the reply for every rank that has not got it.
    fn queue(&mut self, reply: &Reply) {
        let plain = reply.encode();
        for guest in &mut self.guests {
            if let (Phase::Seated(session, _), false) = (&guest.phase, guest.replied) {
                let sealed = session.seal(Side::Root, &plain);
                guest.output.extend((sealed.len() as u32).to_le_bytes());
                guest.output.extend(sealed);
                guest.replied = true;
            }
        }
    }

    /// Waits for something to happen and deals with it. The reply, where the meeting ends.
    fn turn(&mut self) -> Option<Reply> {
        let now = Instant::now();
        let unauthenticated =
            self.guests.iter().filter(|guest| guest.is_unauthenticated()).map(|guest| guest.until);
        let until = unauthenticated.chain(self.closing.or(self.meeting.deadline())).min();
        let ready = {
            let mut fds = vec![PollFd::from_borrowed_fd(self.unix.as_fd(), PollFlags::IN)];
            fds.extend(self.tcp.iter().map(|tcp| PollFd::from_borrowed_fd(tcp.as_fd(), PollFlags::IN)));
            fds.extend(self.guests.iter().map(|guest| {
                let out = if guest.has_output() { PollFlags::OUT } else { PollFlags::empty() };
                PollFd::from_borrowed_fd(guest.stream.as_fd(), PollFlags::IN | out)
            }));
            wait(&mut fds, until.map(|until| until.saturating_duration_since(now)));
            fds.iter().map(|fd| !fd.revents().is_empty()).collect::<Vec<_>>()
        };
        let doors = 1 + self.tcp.len();
        let mut reply = None;
        for index in 0..self.guests.len() {
            if reply.is_none() && ready.get(doors + index).copied().unwrap_or(false) {
                reply = self.attend(index);
            }
        }
        let now = Instant::now();
        for guest in self.guests.iter_mut().filter(|guest| guest.is_unauthenticated() && guest.until <= now) {
            guest.refuse("it did not show in time that it knows the id");
        }
        let refusals = &mut self.refusals;
        self.guests.retain(|guest| {
            if let Some(why) = guest.refused {
                refusals.add(guest.origin, why);
            }
            !matches!(guest.phase, Phase::Gone)
        });
        if ready[..doors].contains(&true) {
            self.admit(now);
        }
        if self.closing.is_some() { None } else { reply.or_else(|| self.meeting.expire(now)) }
    }

    /// Accepts connections: from each listener as many as may be unauthenticated.
    fn admit(&mut self, now: Instant) {
        let mut arrived: Vec<(Stream, Origin)> = Vec::new();
        let mut shortage = false;
        let mut take = |left: &mut usize, accepted: io::Result<(Stream, Origin)>| match accepted {
            Ok(stream) => {
                arrived.push(stream);
                *left -= 1;
                *left > 0
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => true,
            Err(error) => {
                shortage |= error.kind() != io::ErrorKind::WouldBlock;
                false
            }
        };
        let mut left = MOST_UNAUTHENTICATED;
        while take(
            &mut left,
            self.unix.accept().and_then(|(stream, _)| {
                stream.set_nonblocking(true)?;
                let user = socket_peercred(&stream)?.uid.as_raw();
                Ok((Stream::Unix(stream), Origin::User(user)))
            }),
        ) {}
        for tcp in &self.tcp {
            let mut left = MOST_UNAUTHENTICATED;
            while take(
                &mut left,
                tcp.accept().and_then(|(stream, from)| {
                    stream.set_nonblocking(true)?;
                    stream.set_nodelay(true)?;
                    let stream = match &self.tls {
                        Some(tls) => Stream::Tls(Box::new(tls.incoming(stream).map_err(io::Error::other)?)),
                        None => Stream::Tcp(stream),
                    };
                    Ok((stream, Origin::of(from.ip())))
                }),
            ) {}
        }
        for (stream, origin) in arrived {
            let until = now + AUTHENTICATE_WITHIN;
            let (phase, input, output) = (Phase::Greeting, Vec::new(), VecDeque::new());
            self.guests.push(Guest {
                stream,
                origin,
                phase,
                input,
                output,
                until,
                replied: false,
                refused: None,
            });
        }
        self.thin_out();
        if shortage {
            // The queue of the listener stays full and would be reported again immediately.
            std::thread::sleep(SHORTAGE);
        }
    }

    /// Closes connections beyond the limit: of the origin with the most unauthenticated connections, the oldest.
    fn thin_out(&mut self) {
        let mut crowds: BTreeMap<Origin, usize> = BTreeMap::new();
        for guest in self.guests.iter().filter(|guest| guest.is_unauthenticated()) {
            *crowds.entry(guest.origin).or_default() += 1;
        }
        let mut too_many = crowds.values().sum::<usize>().saturating_sub(MOST_UNAUTHENTICATED);
        let mut away: BTreeMap<Origin, usize> = BTreeMap::new();
        while too_many > 0 {
            let Some((origin, count)) = crowds.iter_mut().max_by_key(|(_, count)| **count) else { break };
            *count -= 1;
            *away.entry(*origin).or_default() += 1;
            too_many -= 1;
        }
        let refusals = &mut self.refusals;
        self.guests.retain(|guest| {
            let leave = away.get_mut(&guest.origin).filter(|left| guest.is_unauthenticated() && **left > 0);
            if leave.is_some() {
                let why = "too many unauthenticated connections wait, and this was the oldest";
                refusals.add(guest.origin, why);
            }
            leave.map(|left| *left -= 1).is_none()
        });
    }

    /// Deals with what one guest has said. The reply, where the meeting ends with it.
    fn attend(&mut self, index: usize) -> Option<Reply> {
        let guest = &mut self.guests[index];
        let alive = guest.fill() && guest.drain();
        if let Phase::Seated(_, rank) = guest.phase {
            if alive && guest.input.is_empty() {
                return None;
            }
            let rank = std::mem::replace(&mut guest.phase, Phase::Gone).seat().unwrap_or(rank);
            return Some(self.meeting.depart(rank));
        }
        if let (Phase::Greeting, Some(hello)) = (&guest.phase, guest.input.first_chunk::<HELLO_LEN>()) {
            let mut challenge = [0; 32];
            match (wire::parse_hello(hello, self.id.nonce()), guest.stream.binding()) {
                (Some(theirs), Ok(binding)) if getrandom::fill(&mut challenge).is_ok() => {
                    let session = Session::new(self.id.secret(), self.id.nonce(), &theirs, &challenge);
                    let session = session.bound_to(binding);
                    guest.output.extend(wire::welcome(&challenge, &session.proof()));
                    guest.phase = Phase::Welcomed(session);
                    guest.input.clear();
                }
                _ => guest.refuse("what it said was no greeting for this meeting"),
            }
            let more = guest.drain() && guest.fill();
            if !more && guest.is_unauthenticated() {
                guest.refuse(HUNG_UP);
            }
        }
        let Phase::Welcomed(session) = &guest.phase else {
            match guest.input.is_empty() {
                _ if alive || !guest.is_unauthenticated() => {}
                true => guest.phase = Phase::Gone,
                false => guest.refuse(HUNG_UP),
            }
            return None;
        };
        match sealed(&guest.input) {
            Ok(None) => {
                if !alive {
                    guest.refuse(HUNG_UP);
                }
                None
            }
            Ok(Some(sealed)) => {
                let join = session.unseal(Side::Rank, sealed).and_then(|plain| Join::decode(&plain).ok());
                let Some(join) = join else {
                    guest.refuse("it did not prove that it knows the id");
                    return None;
                };
                guest.phase = Phase::Seated(session.clone(), join.rank);
                guest.input = Vec::new();
                if self.closing.is_some() { None } else { self.meeting.arrive(join, Instant::now()) }
            }
            Err(()) => {
                guest.refuse("what it said is too long");
                None
            }
        }
    }

    /// Accepts no more ranks, and sends the reply to all that have joined.
    fn send_to_all(&mut self, reply: &Reply) {
        super::join::used_up(self.id.nonce());
        self.tcp.clear();
        self.queue(reply);
        self.guests.retain(|guest| matches!(guest.phase, Phase::Seated(..)));
        let until = Instant::now() + DELIVERY;
        loop {
            self.guests.retain_mut(|guest| guest.drain() && guest.has_output());
            let left = until.saturating_duration_since(Instant::now());
            if self.guests.is_empty() || left.is_zero() {
                return;
            }
            let mut fds: Vec<_> = self
                .guests
                .iter()
                .map(|guest| PollFd::from_borrowed_fd(guest.stream.as_fd(), PollFlags::OUT))
                .collect();
            wait(&mut fds, Some(left));
        }
    }
}

impl Phase {
    fn seat(self) -> Option<usize> {
        match self {
            Phase::Seated(_, rank) => Some(rank),
            _ => None,
        }
    }
}

/// Logs refused guests, now and then.
struct Refusals {
    log: SparseLog,
    meeting: String,
}

impl Refusals {
    fn add(&mut self, origin: Origin, why: &str) {
        if let Some(suppressed) = self.log.line(Instant::now()) {
            let meeting = &self.meeting;
            tracing::warn!(meeting, %origin, why, suppressed, "the root of a meeting refused a connection");
        }
    }
}

/// The sealed message at the start of what a guest has said, once it is whole; an error where it is too long.
pub(super) fn sealed(input: &[u8]) -> Result<Option<&[u8]>, ()> {
    let Some((len, rest)) = input.split_first_chunk::<4>() else { return Ok(None) };
    let len = u32::from_le_bytes(*len) as usize;
    if len > MOST_JOIN {
        return Err(());
    }
    Ok(rest.get(..len))
}

fn wait(fds: &mut [PollFd<'_>], within: Option<Duration>) {
    let limit = within.map(|within| Timespec {
        tv_sec: within.as_secs().min(1 << 30) as i64,
        // Rounded up: a wait that ends a moment early would spin.
        tv_nsec: i64::from(within.subsec_nanos().saturating_add(999_999).min(999_999_999)),
    });
    let _ = poll(fds, limit.as_ref());
}

#[cfg(test)]
mod tests;
