//! A rank's way into a meeting.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use towline::{Kind, Ticket};

use super::wire::{self, Answer, Join, Session, Side, VERSION, WELCOME_LEN};
use crate::unique_id::UniqueId;
use crate::{Error, Result, interrupt};

const OP: &str = "init";
/// How much longer than its own patience a rank waits for the root to say who is missing.
const GRACE: Duration = Duration::from_secs(3);
/// How long the root may take to greet.
const GREETING: Duration = Duration::from_secs(5);
/// How often a rank comes back when the root sent it away before greeting it: it may have been crowded.
const TRIES: u32 = 5;

/// The meetings of this process that are over; the newest ones.
static OVER: Mutex<VecDeque<[u8; 16]>> = Mutex::new(VecDeque::new());
const MOST_OVER: usize = 4096;

/// Remembers that a meeting is over.
pub(super) fn used_up(nonce: &[u8; 16]) {
    let mut over = OVER.lock().unwrap_or_else(PoisonError::into_inner);
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
    if OVER.lock().unwrap_or_else(PoisonError::into_inner).contains(id.nonce()) {
        return Err(Error::invalid(OP, "the id was used already: each meeting needs a new one"));
    }
    let until = Instant::now() + joining.timeout.min(Duration::from_secs(7 * 86_400));
    let mut tries = 0;
    let (mut stream, session) = loop {
        match greet(id, until) {
            Ok(greeted) => break greeted,
            Err(error) if error.kind() == Kind::Disconnected && tries < TRIES && Instant::now() < until => {
                tries += 1;
                std::thread::sleep(Duration::from_millis(20) * tries);
            }
            Err(error) => return Err(error),
        }
    };
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
    stream.limit(GREETING).map_err(lost)?;
    stream.write_all(&message).map_err(lost)?;
    let answer = hear(&mut stream, &session, joining.nranks, until + GRACE)?;
    match answer {
        Answer::Failed(error) => Err(error),
        Answer::List(list) if list.len() == joining.nranks => {
            // Ranks of this process that come now are too late, wherever the root is.
            used_up(id.nonce());
            wire::tickets(&list)
        }
        Answer::List(_) => Err(Error::protocol(OP, "the root's list has another length")),
    }
}

/// Connects to the root and makes sure that it knows the secret.
fn greet(id: &UniqueId, until: Instant) -> Result<(Stream, Session)> {
    let mut stream = connect(id, until)?;
    let mut challenge = [0; 32];
    getrandom::fill(&mut challenge)
        .map_err(|error| Error::new(Kind::Native, OP, format!("no random bytes: {error}")))?;
    let lost = |error: io::Error| lost(&error, "before the root had answered");
    let left = until.saturating_duration_since(Instant::now()).min(GREETING).max(Duration::from_millis(1));
    stream.limit(left).map_err(lost)?;
    stream.write_all(&wire::hello(id.nonce(), &challenge)).map_err(lost)?;
    let mut welcome = [0; WELCOME_LEN];
    stream.read_exact(&mut welcome).map_err(lost)?;
    let stranger =
        || Error::new(Kind::PermissionDenied, OP, "what answers at the id's address is not its root");
    let (theirs, proof) = wire::parse_welcome(&welcome).ok_or_else(stranger)?;
    let session = Session::new(id.secret(), id.nonce(), &challenge, &theirs);
    if !session.proves(&proof) {
        return Err(stranger());
    }
    Ok((stream, session))
}

fn connect(id: &UniqueId, until: Instant) -> Result<Stream> {
    let mut tried = Vec::new();
    let near = std::os::unix::net::SocketAddr::from_abstract_name(id.socket_name())
        .and_then(|address| UnixStream::connect_addr(&address));
    match near {
        Ok(stream) => return Ok(Stream::Unix(stream)),
        Err(error) => tried.push(("unix socket".to_owned(), error)),
    }
    for address in id.addresses() {
        let left = until.saturating_duration_since(Instant::now()).min(GREETING);
        match TcpStream::connect_timeout(&address, left.max(Duration::from_millis(1))) {
            Ok(stream) => {
                let _ = stream.set_nodelay(true);
                return Ok(Stream::Tcp(stream));
            }
            Err(error) => tried.push((address.to_string(), error)),
        }
    }
    let slow = tried.iter().any(|(_, error)| error.kind() == io::ErrorKind::TimedOut);
    let list: Vec<String> = tried.iter().map(|(way, error)| format!("{way}: {error}")).collect();
    let (kind, what) = if slow {
        (Kind::Timeout, "the root of the id does not answer")
    } else {
        (Kind::Stale, "the meeting of this id is over, or the process that made it is gone")
    };
    Err(Error::new(kind, OP, format!("{what} ({})", list.join("; "))))
}

/// Waits for what the root has to say.
fn hear(stream: &mut Stream, session: &Session, nranks: usize, until: Instant) -> Result<Answer> {
    let mut len = [0; 4];
    read_until(stream, &mut len, until)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > wire::most_answer(nranks) {
        return Err(Error::protocol(OP, "the root's answer is too long"));
    }
    let mut sealed = vec![0; len];
    read_until(stream, &mut sealed, until)?;
    let plain = session.unseal(Side::Root, &sealed);
    let plain = plain.ok_or_else(|| Error::protocol(OP, "the root's answer was changed on its way"))?;
    Answer::decode(&plain)
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
                "the root did not say in time whether everybody had come",
            ));
        }
        interrupt::check(OP)?;
        let read = stream.limit(left.min(LOOK)).and_then(|()| stream.read(&mut into[filled..]));
        match read {
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

fn lost(error: &io::Error, when: &str) -> Error {
    if would_wait(error) {
        return Error::new(Kind::Timeout, OP, "the root of the id accepts connections and does not answer");
    }
    Error::new(Kind::Disconnected, OP, format!("the connection to the root ended {when}: {error}"))
}

enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    /// Bounds the reads and writes that follow.
    fn limit(&self, within: Duration) -> io::Result<()> {
        let within = Some(within.max(Duration::from_millis(1)));
        match self {
            Stream::Unix(stream) => stream.set_read_timeout(within).and(stream.set_write_timeout(within)),
            Stream::Tcp(stream) => stream.set_read_timeout(within).and(stream.set_write_timeout(within)),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.read(into),
            Stream::Tcp(stream) => stream.read(into),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.write(from),
            Stream::Tcp(stream) => stream.write(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
