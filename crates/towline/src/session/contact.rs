//! First contact: the socket and the handshake, from the initiator's side. Blocks the calling thread, with a limit.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::channel::{Ahead, Channel};
use super::initiator::Session;
use super::sharing::{self, Neighbour};
use super::{Medium, Sessions};
use crate::identity::Incarnation;
use crate::runtime::socket::{Lane, Received, Sent, Socket};
use crate::ticket::socket_name;
use crate::wire::handshake::{ClientHandshake, ClientKey, SessionKey};
use crate::wire::{FrameKind, HEADER_LEN, Header, Message, Ready, Refuse};
use crate::{Error, Kind, Result, Ticket, interrupt, room};

/// How long to wait before asking a listener again whose queue was full.
const QUEUE_FULL: Duration = Duration::from_millis(1);

/// A connection whose owner has been proven to be the ticket's.
pub(super) struct Contact {
    pub(super) socket: Channel,
    pub(super) ready: Ready,
    pub(super) key: SessionKey,
    pub(super) challenge: [u8; 32],
    pub(super) files: Vec<OwnedFd>,
    /// The owner's process, where this one may share memory with it; else why not.
    pub(super) owner: Result<Neighbour, String>,
}

/// Why there is no contact.
#[derive(Debug)]
pub(crate) struct NoContact {
    pub(crate) error: Error,
    /// The owner is there and took the proof: it refuses this ticket, and may well accept another one.
    pub(crate) of_ticket: bool,
}

impl From<Error> for NoContact {
    fn from(error: Error) -> NoContact {
        NoContact { error, of_ticket: false }
    }
}

impl From<NoContact> for Error {
    fn from(none: NoContact) -> Error {
        none.error
    }
}

/// Connects with the key that a ticket gives, the socket by the first moment and all of it by the second.
pub(super) fn with_ticket(
    sessions: &Sessions,
    ticket: &Ticket,
    medium: Medium,
    shares: bool,
    (connected_by, until): (Instant, Instant),
) -> Result<Contact, NoContact> {
    let owner = ticket.body().identity.incarnation;
    let socket = dial(medium, &owner, Lane::Control, connected_by)?;
    let name = &ticket.body().identity.name;
    let neighbour = neighbour(sessions, medium, shares, &socket)?;
    let socket = Channel::connected(socket, sessions.settings.tls.as_ref(), name, until)?;
    handshake(sessions, socket, neighbour, owner, ClientKey::Ticket(ticket), until)
}

/// The owner's process, where this one may share memory with it; else why not.
///
/// Pages that another process can write would be locked and followed here as if they were our own, and to close a descriptor can take as
/// long as its file likes: of an owner that is kept apart from this process, none becomes a descriptor of this one.
fn neighbour(
    sessions: &Sessions,
    medium: Medium,
    shares: bool,
    socket: &Socket,
) -> Result<Result<Neighbour, String>> {
    let neighbour = if medium != Medium::Unix {
        Err("the owner is reached by tcp".to_owned())
    } else if !shares || sessions.settings.enforces_isolation {
        Err("isolation is enforced here: every access goes through the owner".to_owned())
    } else {
        let asked = sharing::may_share(socket, sessions.settings.shares_between_containers)?;
        asked.map_err(|apart| format!("no memory is shared: the owner is {apart}"))
    };
    if neighbour.is_err() {
        socket.take_no_files();
    }
    Ok(neighbour)
}

/// Connects once more to the owner of a session.
pub(super) fn with_session(sessions: &Sessions, session: &Session, until: Instant) -> Result<Contact> {
    let owner = session.owner().incarnation;
    let socket = dial(session.medium, &owner, Lane::Bulk, until)?;
    let socket = Channel::connected(socket, sessions.settings.tls.as_ref(), session.peer_name(), until)?;
    let key = ClientKey::Session { id: session.id, key: &session.key };
    let apart = Err("a lane carries no descriptors".to_owned());
    Ok(handshake(sessions, socket, apart, owner, key, until)?)
}

fn dial(medium: Medium, owner: &Incarnation, lane: Lane, until: Instant) -> Result<Socket> {
    let socket = match medium {
        Medium::Unix => loop {
            match Socket::connect_unix_abstract(&socket_name(owner)) {
                Err(error) if error.kind() == Kind::Exhausted && Instant::now() < until => {
                    interrupt::check("contact")?;
                    std::thread::sleep(QUEUE_FULL);
                }
                other => break other?,
            }
        },
        Medium::Tcp(address) => {
            let socket = Socket::connect_tcp(address)?;
            while !socket.finish_connect()? {
                wait(until, |time| socket.wait_writable(time))?;
            }
            socket
        }
    };
    // The kernel sets no limit for bytes that the owner does not take: it would end the connection without a word, and the owner would
    // apply what it has of a write that has failed here. Heartbeats show which peer is gone, and the end is then a reset.
    socket.tune(lane, None)?;
    Ok(socket)
}

fn handshake(
    sessions: &Sessions,
    socket: Channel,
    neighbour: Result<Neighbour, String>,
    owner: Incarnation,
    key: ClientKey<'_>,
    until: Instant,
) -> Result<Contact, NoContact> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce)
        .map_err(|error| Error::new(Kind::Native, "contact", format!("no random bytes: {error}")))?;
    let (client, hello) =
        ClientHandshake::start(sessions.identity(), owner, key, nonce, sessions.settings.secret.as_ref());
    let client = client.bound_to(socket.binding()?);
    send_all(&socket, &hello, until).map_err(|error| refusal_or(&socket, error))?;
    let mut files = Vec::new();
    let welcome = read_frame(&socket, FrameKind::Welcome, false, &mut files, until)?;
    let (prove, key, challenge) = client.on_welcome(&welcome)?;
    send_all(&socket, &prove, until).map_err(|error| refusal_or(&socket, error))?;
    // Both have proven by now that they know the ticket: what is refused from here on is the ticket.
    let ready = read_frame(&socket, FrameKind::Ready, true, &mut files, until).map_err(|error| {
        NoContact { of_ticket: matches!(error.kind(), Kind::Stale | Kind::PermissionDenied), error }
    })?;
    Ok(Contact { socket, ready: Ready::decode(&ready)?, key, challenge, files, owner: neighbour })
}

/// An owner that has no room says so and hangs up without listening: its word explains more than the broken connection.
fn refusal_or(socket: &Channel, error: Error) -> Error {
    match read_frame(socket, FrameKind::Refuse, false, &mut Vec::new(), Instant::now()) {
        Err(refused) if !matches!(refused.kind(), Kind::Disconnected | Kind::Timeout | Kind::Protocol) => {
            refused
        }
        _ => error,
    }
}

/// Waits until then, in turns between which the caller may have enough of it.
fn wait(until: Instant, is_ready: impl Fn(Duration) -> Result<bool>) -> Result<()> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::new(Kind::Timeout, "contact", "no reply in time"));
        }
        interrupt::check("contact")?;
        if is_ready(interrupt::turn(left))? {
            return Ok(());
        }
    }
}

fn send_all(socket: &Channel, mut bytes: &[u8], until: Instant) -> Result<()> {
    while !bytes.is_empty() {
        match socket.send(&[IoSlice::new(bytes)], &[])? {
            Sent::Bytes(sent) => bytes = &bytes[sent..],
            Sent::WouldBlock => {
                wait(until, |time| socket.wait_writable(time))?;
            }
        }
    }
    while !socket.flush()? {
        wait(until, |time| socket.wait_writable(time))?;
    }
    Ok(())
}

fn read_frame(
    socket: &Channel,
    expected: FrameKind,
    authenticated: bool,
    files: &mut Vec<OwnedFd>,
    until: Instant,
) -> Result<Vec<u8>> {
    // Descriptors come with the first byte of their frame, and nobody knows how many before its header is seen.
    let named = if expected.max_files() > 0 { named(socket, authenticated, until)? } else { 0 };
    let mut head = [0; HEADER_LEN];
    read_all(socket, &mut head, named, files, until)?;
    let header = Header::decode(&head)?;
    header.check(authenticated)?;
    let mut body = room::zeros("contact", header.rest())?;
    read_all(socket, &mut body, 0, files, until)?;
    body.truncate(header.body(&body)?.len());
    match Message::decode(header.kind, &body)? {
        Message::Refuse(Refuse { error }) => Err(error.into_error("contact")),
        message if message.kind() == expected && socket.socket().has_taken(header.files, files) => Ok(body),
        message => {
            Err(Error::protocol("contact", format!("{:?} came instead of {expected:?}", message.kind())))
        }
    }
}

/// How many descriptors the next frame names.
fn named(socket: &Channel, authenticated: bool, until: Instant) -> Result<usize> {
    if !socket.socket().takes_files() {
        return Ok(0);
    }
    loop {
        match socket.next_header(authenticated)? {
            Ahead::Header(header) => return Ok(header.files.into()),
            Ahead::Nothing(Received::WouldBlock) => {
                wait(until, |time| socket.wait_readable(time))?;
            }
            Ahead::Part(_) | Ahead::Nothing(_) => return Ok(0),
        }
    }
}

fn read_all(
    socket: &Channel,
    mut bytes: &mut [u8],
    named: usize,
    files: &mut Vec<OwnedFd>,
    until: Instant,
) -> Result<()> {
    while !bytes.is_empty() {
        match socket.recv(&mut [IoSliceMut::new(bytes)], named.saturating_sub(files.len()), files)? {
            Received::Bytes(came) => bytes = &mut bytes[came..],
            Received::WouldBlock => {
                wait(until, |time| socket.wait_readable(time))?;
            }
            Received::Eof => {
                return Err(Error::new(Kind::Disconnected, "contact", "the owner closed the connection"));
            }
        }
    }
    Ok(())
}
