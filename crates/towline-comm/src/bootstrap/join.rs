//! How a rank joins a meeting.

#[cfg(test)]
mod through_faults;

use std::cell::Cell;
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use towline::{Kind, Ticket, Tls, TlsStream};

use super::wire::{self, Join, Reply, Session, Side, VERSION, WELCOME_LEN};
use crate::unique_id::UniqueId;
use crate::{Error, Result, interrupt};

const OP: &str = "init";
/// How much longer than its own patience a rank waits for the root to say who is missing.
const GRACE: Duration = Duration::from_secs(3);
/// How long the root may take to greet.
const GREETING: Duration = Duration::from_secs(5);
/// How long to wait before asking a root again whose queue is full.
const QUEUE_FULL: Duration = Duration::from_millis(1);
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
/// How often a rank comes back when the root sent it away before greeting it: it may have been crowded.
const TRIES: u32 = 5;

/// The meetings of this process that are over; the newest ones.
static OVER: Mutex<VecDeque<[u8; 16]>> = Mutex::new(VecDeque::new());
const MOST_OVER: usize = 4096;

/// Remembers that a meeting is over.
pub(super) fn used_up(nonce: &[u8; 16]) {
    let mut over = OVER.lock();
    if !over.contains(nonce) {
        if over.len() == MOST_OVER {
            over.pop_front();
        }
        over.push_back(*nonce);
    }
}

/// What a rank brings to a meeting.
pub(crate) struct Joining<'a> {
    pub(crate) nranks: usize,
    pub(crate) rank: usize,
    /// What must be equal on all ranks.
    pub(crate) digest: u64,
    pub(crate) name: &'a str,
    /// How this rank is reached; a rank outside the group has no ticket.
    pub(crate) ticket: Option<&'a Ticket>,
    pub(crate) timeout: Duration,
}

/// Joins a meeting: the tickets of all ranks, by rank.
pub(crate) fn join(id: &UniqueId, joining: &Joining<'_>) -> Result<Vec<Ticket>> {
    join_by(id, joining, connect)
}

/// [`join`], by connections that `dial` makes.
fn join_by(
    id: &UniqueId,
    joining: &Joining<'_>,
    connect: impl Fn(&UniqueId, Instant) -> Result<Stream>,
) -> Result<Vec<Ticket>> {
    if OVER.lock().contains(id.nonce()) {
        return Err(Error::invalid(OP, "the id was used already: each meeting needs a new one"));
    }
    let until = Instant::now() + joining.timeout.min(Duration::from_secs(7 * 86_400));
    let mut tries = 0;
    let (stream, session) = loop {
        match connect(id, until).and_then(|stream| greet(id, stream, until)) {
            Ok(greeted) => break greeted,
            Err(error) if error.kind() == Kind::Disconnected && tries < TRIES && Instant::now() < until => {
                tries += 1;
                std::thread::sleep(Duration::from_millis(20) * tries);
            }
            Err(error) => return Err(error),
        }
    };
    take_part(id, stream, &session, joining, until)
}

/// Sends which ranks have joined, and receives which others have.
fn take_part(
    id: &UniqueId,
    mut stream: Stream,
    session: &Session,
    joining: &Joining<'_>,
    until: Instant,
) -> Result<Vec<Ticket>> {
    let left = until.saturating_duration_since(Instant::now());
    let join = Join {
        version: VERSION,
        nranks: joining.nranks,
        rank: joining.rank,
        digest: joining.digest,
        timeout_ms: left.as_millis().min(u128::from(u64::MAX)) as u64,
        name: joining.name.to_owned(),
        ticket: joining.ticket.map(Ticket::encode).unwrap_or_default(),
    };
    let sealed = session.seal(Side::Rank, &join.encode());
    let mut message = (sealed.len() as u32).to_le_bytes().to_vec();
    message.extend(sealed);
    let lost = |error: io::Error| lost(&error, "while waiting for the other ranks");
    stream.limit(GREETING);
    stream.write_all(&message).and_then(|()| stream.flush()).map_err(lost)?;
    let reply = receive_reply(&mut stream, session, joining.nranks, until + GRACE)?;
    match reply {
        Reply::Failed(error) => Err(error),
        Reply::List(list) if list.len() == joining.nranks => {
            // Ranks of this process that come now are too late, wherever the root is.
            used_up(id.nonce());
            wire::tickets(&list)
        }
        Reply::List(_) => Err(Error::protocol(OP, "the root's list has another length")),
    }
}

/// Makes sure that the other end of a connection knows the secret.
fn greet(id: &UniqueId, mut stream: Stream, until: Instant) -> Result<(Stream, Session)> {
    let mut challenge = [0; 32];
    getrandom::fill(&mut challenge)
        .map_err(|error| Error::new(Kind::Native, OP, format!("no random bytes: {error}")))?;
    let lost = |error: io::Error| lost(&error, "before the root had replied");
    let left = until.saturating_duration_since(Instant::now()).min(GREETING);
    stream.limit(left);
    let binding = stream.encrypt(id).map_err(lost)?;
    stream.write_all(&wire::hello(id.nonce(), &challenge)).and_then(|()| stream.flush()).map_err(lost)?;
    let mut welcome = [0; WELCOME_LEN];
    stream.read_exact(&mut welcome).map_err(lost)?;
    let not_the_root = || {
        Error::new(Kind::PermissionDenied, OP, "the process at the id's address is not the root of the id")
    };
    let (theirs, proof) = wire::parse_welcome(&welcome).ok_or_else(not_the_root)?;
    let session = Session::new(id.secret(), id.nonce(), &challenge, &theirs).bound_to(binding);
    if !session.proves(&proof) {
        return Err(not_the_root());
    }
    Ok((stream, session))
}

fn connect(id: &UniqueId, until: Instant) -> Result<Stream> {
    let mut tried = Vec::new();
    let left = || until.saturating_duration_since(Instant::now()).min(GREETING);
    match dial_near(id.socket_name().as_ref(), left()) {
        Ok(stream) => return Ok(Stream::Unix(Bounded::new(stream))),
        Err(error) => tried.push(("unix socket".to_owned(), error)),
    }
    for address in id.addresses() {
        match dial(&address, left()) {
            Ok(stream) => {
                let _ = stream.set_nodelay(true);
                return Ok(Stream::Tcp(Bounded::new(stream)));
            }
            Err(error) => tried.push((address.to_string(), error)),
        }
    }
    if let Some(interrupted) = tried.iter().find_map(|(_, error)| canceled(error)) {
        return Err(interrupted);
    }
    let slow = tried.iter().any(|(_, error)| error.kind() == io::ErrorKind::TimedOut);
    let list: Vec<String> = tried.iter().map(|(address, error)| format!("{address}: {error}")).collect();
    let (kind, what) = if slow {
        (Kind::Timeout, "the root of the id does not reply")
    } else {
        (Kind::Stale, "the meeting of this id is over, or the process that made it is gone")
    };
    Err(Error::new(kind, OP, format!("{what} ({})", list.join("; "))))
}

/// Connects on this host within that time. A root that does not take connections may have a full queue of them.
fn dial_near(name: &[u8], within: Duration) -> io::Result<UnixStream> {
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None)?;
    let address = SocketAddrUnix::new_abstract_name(name)?;
    let began = Instant::now();
    loop {
        match net::connect(&socket, &address) {
            Ok(()) => break,
            Err(Errno::AGAIN) if began.elapsed() < within => {
                interrupt::check(OP).map_err(io::Error::other)?;
                std::thread::sleep(QUEUE_FULL);
            }
            Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            Err(error) => return Err(error.into()),
        }
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Connects within that time.
fn dial(address: &SocketAddr, within: Duration) -> io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = net::socket_with(family, SocketType::STREAM, FLAGS, None)?;
    match net::connect(&socket, address) {
        Ok(()) => {}
        Err(Errno::INPROGRESS | Errno::INTR) => {
            let began = Instant::now();
            loop {
                let left = within.saturating_sub(began.elapsed());
                let turn =
                    Timespec::try_from(interrupt::turn(left)).map_err(|_| io::ErrorKind::InvalidInput)?;
                match poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&turn)) {
                    Ok(0) if left.is_zero() => return Err(io::ErrorKind::TimedOut.into()),
                    Ok(0) | Err(Errno::INTR) => interrupt::check(OP).map_err(io::Error::other)?,
                    Ok(_) => break,
                    Err(error) => return Err(error.into()),
                }
            }
            net::sockopt::socket_error(&socket)??;
        }
        Err(error) => return Err(error.into()),
    }
    let stream = TcpStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Waits for the root's reply.
fn receive_reply(stream: &mut Stream, session: &Session, nranks: usize, until: Instant) -> Result<Reply> {
    let mut len = [0; 4];
    read_until(stream, &mut len, until)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > wire::most_answer(nranks) {
        return Err(Error::protocol(OP, "the root's reply is too long"));
    }
    let mut sealed = vec![0; len];
    read_until(stream, &mut sealed, until)?;
    let plain = session.unseal(Side::Root, &sealed);
    let plain = plain.ok_or_else(|| Error::protocol(OP, "the root's reply was changed on the network"))?;
    Reply::decode(&plain)
}

/// How often a rank that waits for the others looks whether its caller was interrupted.
const LOOK: Duration = Duration::from_millis(100);

fn read_until(stream: &mut Stream, into: &mut [u8], until: Instant) -> Result<()> {
    let mut filled = 0;
    while filled < into.len() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::new(
                Kind::Timeout,
                OP,
                "the root did not say in time whether all ranks had joined",
            ));
        }
        interrupt::check(OP)?;
        stream.limit(left.min(LOOK));
        match stream.read(&mut into[filled..]) {
            Ok(0) => {
                return Err(lost(&io::ErrorKind::UnexpectedEof.into(), "while waiting for the other ranks"));
            }
            Ok(len) => filled += len,
            Err(error) if would_wait(&error) => {}
            Err(error) => return Err(lost(&error, "while waiting for the other ranks")),
        }
    }
    Ok(())
}

fn would_wait(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}

/// The error of a caller that was interrupted, which came as one of a stream.
fn canceled(error: &io::Error) -> Option<Error> {
    error.get_ref()?.downcast_ref::<Error>().cloned()
}

fn lost(error: &io::Error, when: &str) -> Error {
    if let Some(interrupted) = canceled(error) {
        return interrupted;
    }
    if would_wait(error) {
        return Error::new(Kind::Timeout, OP, "the root of the id accepts connections but does not reply");
    }
    Error::new(Kind::Disconnected, OP, format!("the connection to the root ended {when}: {error}"))
}

/// A connection whose reads and writes are all over at one moment, however slowly bytes come.
struct Bounded<S> {
    stream: S,
    until: Cell<Instant>,
}

impl<S: AsFd> Bounded<S> {
    fn new(stream: S) -> Bounded<S> {
        Bounded { stream, until: Cell::new(Instant::now() + GREETING) }
    }

    /// Tries until it is over, in turns between which the caller may be interrupted.
    fn in_turns<T>(
        &mut self,
        what: Timeout,
        mut attempt: impl FnMut(&mut S) -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            let left = self.until.get().saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let turn = interrupt::turn(left).max(Duration::from_millis(1));
            set_socket_timeout(&self.stream, what, Some(turn))?;
            match attempt(&mut self.stream) {
                Err(error) if would_wait(&error) => interrupt::check(OP).map_err(io::Error::other)?,
                ended => return ended,
            }
        }
    }
}

impl<S: AsFd + Read> Read for Bounded<S> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.in_turns(Timeout::Recv, |stream| stream.read(into))
    }
}

impl<S: AsFd + Write> Write for Bounded<S> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.in_turns(Timeout::Send, |stream| stream.write(from))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

enum Stream {
    Unix(Bounded<UnixStream>),
    Tcp(Bounded<TcpStream>),
    Tls(Box<TlsStream<Bounded<TcpStream>>>),
}

impl Stream {
    /// Goes on inside TLS where the meeting wants that; what the two sides then have in common.
    fn encrypt(&mut self, id: &UniqueId) -> io::Result<Option<[u8; 32]>> {
        let Stream::Tcp(stream) = self else { return Ok(None) };
        if !id.tls() {
            return Ok(None);
        }
        let tls = Tls::by_ticket().map_err(io::Error::other)?;
        let below = Bounded { stream: stream.stream.try_clone()?, until: stream.until.clone() };
        let mut stream = Box::new(tls.outgoing(below).map_err(io::Error::other)?);
        stream.greet()?;
        let binding = stream.binding()?;
        *self = Stream::Tls(stream);
        Ok(Some(binding))
    }

    /// Lets the reads and writes that follow be over after that long, all of them together.
    fn limit(&self, within: Duration) {
        let until = match self {
            Stream::Unix(stream) => &stream.until,
            Stream::Tcp(stream) => &stream.until,
            Stream::Tls(stream) => &stream.stream().until,
        };
        until.set(Instant::now() + within);
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.read(into),
            Stream::Tcp(stream) => stream.read(into),
            Stream::Tls(stream) => stream.read(into),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.write(from),
            Stream::Tcp(stream) => stream.write(from),
            Stream::Tls(stream) => stream.write(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Unix(_) | Stream::Tcp(_) => Ok(()),
            Stream::Tls(stream) => stream.flush(),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    use towline::{Access, Endpoint, SystemStorage};

    use super::*;
    use crate::bootstrap::{UniqueIdOptions, open_meeting};

    /// A rank that comes from another host, so to say.
    fn join_by_tcp(
        id: &UniqueId,
        address: std::net::SocketAddr,
        rank: usize,
        nranks: usize,
    ) -> Result<usize> {
        joined(id, TcpStream::connect(address).unwrap(), rank, nranks)
    }

    fn joined(id: &UniqueId, stream: TcpStream, rank: usize, nranks: usize) -> Result<usize> {
        let until = Instant::now() + Duration::from_secs(20);
        let (stream, session) = greet(id, Stream::Tcp(Bounded::new(stream)), until)?;
        assert_eq!(matches!(stream, Stream::Tls(_)), id.tls());
        let name = format!("rank-{rank}");
        let endpoint = Endpoint::open(&name).unwrap();
        let region = endpoint.register(SystemStorage::new(64).unwrap(), Access::READ).unwrap();
        let ticket = region.ticket().unwrap();
        let timeout = Duration::from_secs(20);
        let joining = Joining { nranks, rank, digest: 7, name: &name, ticket: Some(&ticket), timeout };
        take_part(id, stream, &session, &joining, until).map(|tickets| tickets.len())
    }

    fn meeting(tls: bool) -> UniqueId {
        open_meeting(&UniqueIdOptions { tls, ..UniqueIdOptions::default() }).unwrap().0
    }

    /// Connects from that address of this host.
    fn connect_from(source: [u8; 4], to: SocketAddr) -> TcpStream {
        let socket = net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        net::bind(&socket, &SocketAddr::from((source, 0))).unwrap();
        net::connect(&socket, &to).unwrap();
        TcpStream::from(socket)
    }

    #[test]
    fn one_origin_that_opens_many_connections_keeps_no_other_out() {
        let id = meeting(false);
        let address = id.addresses()[0];
        // The oldest of all unauthenticated connections, and slow.
        let rank = connect_from([127, 0, 0, 1], address);
        let flood: Vec<_> = (0..600).map(|_| connect_from([127, 0, 0, 2], address)).collect();
        // The root has let in the last of them, and sent others away.
        let mut away = flood.first().unwrap();
        away.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        assert_eq!(away.read(&mut [0]).unwrap(), 0);
        assert_eq!(joined(&id, rank, 0, 1).unwrap(), 1);
    }

    #[test]
    fn a_meeting_that_nobody_joins_ends_at_its_limit() {
        let unjoined = Some(Duration::from_millis(50));
        let (id, _root) = open_meeting(&UniqueIdOptions { unjoined, ..UniqueIdOptions::default() }).unwrap();
        let address = id.addresses()[0];
        thread::sleep(Duration::from_millis(500));
        // A rank that joins soon after that gets the reply.
        let error = joined(&id, connect_from([127, 0, 0, 1], address), 0, 1).unwrap_err();
        assert!(error.kind() == Kind::Timeout && error.message().contains("no rank joined"), "{error}");
        // Then nobody listens any more.
        let began = Instant::now();
        while TcpStream::connect(address).is_ok() {
            assert!(began.elapsed() < Duration::from_secs(60), "the root is still there");
            thread::sleep(Duration::from_millis(200));
        }
    }

    #[test]
    fn ranks_of_other_hosts_meet_with_and_without_tls() {
        for tls in [false, true] {
            let id = meeting(tls);
            assert_eq!(id.to_string().parse::<UniqueId>().unwrap().tls(), tls);
            let address = id.addresses()[0];
            let ranks: Vec<_> = (0..3)
                .map(|rank| {
                    let id = id.clone();
                    thread::spawn(move || join_by_tcp(&id, address, rank, 3))
                })
                .collect();
            for rank in ranks {
                assert_eq!(rank.join().unwrap().unwrap(), 3);
            }
        }
    }

    #[test]
    fn a_root_that_does_not_know_the_secret_is_refused_inside_tls_too() {
        let (id, other) = (meeting(true), meeting(true));
        let error = join_by_tcp(&id, other.addresses()[0], 0, 1).unwrap_err();
        assert!(matches!(error.kind(), Kind::Disconnected | Kind::PermissionDenied), "{error}");
    }

    #[test]
    fn somebody_between_two_tls_connections_gets_nowhere() {
        // It has keys of its own towards both sides, and passes on what they say.
        let id = meeting(true);
        let root = id.addresses()[0];
        let middle = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = middle.local_addr().unwrap();
        thread::spawn(move || {
            let tls = Tls::by_ticket().unwrap();
            let (rank, _) = middle.accept().unwrap();
            let mut rank = tls.incoming(rank).unwrap();
            let mut root = tls.outgoing(TcpStream::connect(root).unwrap()).unwrap();
            root.greet().unwrap();
            let mut hello = [0; wire::HELLO_LEN];
            rank.read_exact(&mut hello).unwrap();
            root.write_all(&hello).unwrap();
            let mut welcome = [0; WELCOME_LEN];
            root.read_exact(&mut welcome).unwrap();
            rank.write_all(&welcome).unwrap();
            rank.flush().unwrap();
            // Until the rank hangs up.
            let _ = rank.read(&mut [0; 1]);
        });
        let error = join_by_tcp(&id, address, 0, 1).unwrap_err();
        assert_eq!(error.kind(), Kind::PermissionDenied, "{error}");
    }
}
