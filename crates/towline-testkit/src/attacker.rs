//! A peer that speaks the protocol by hand, as badly as a test asks for.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use towline::ticket::{Reach, Ticket, socket_name};
use towline::wire::handshake::{ClientHandshake, ClientKey, SessionKey};
use towline::wire::{
    Data, Done, FrameKind, Granted, HEADER_LEN, Header, Import, ImportItem, Message, Ready, Refuse, WireError,
};
use towline::{Identity, Incarnation};

use crate::random::Random;

/// How long a reply may take.
const ANSWER: Duration = Duration::from_secs(20);

/// Which of an owner's sockets it comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Medium {
    /// The abstract Unix socket.
    Unix,
    /// The first TCP address of the ticket.
    Tcp,
}

enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// A connection that speaks frames by hand.
pub struct Attacker {
    stream: Stream,
    said: Vec<u8>,
    passed: u64,
}

impl Attacker {
    /// Connects to the owner of that ticket, and says nothing yet.
    pub fn connect(ticket: &Ticket, medium: Medium) -> Attacker {
        let body = ticket.body();
        let stream = match medium {
            Medium::Unix => {
                let name = socket_name(&body.identity.incarnation);
                let address = SocketAddr::from_abstract_name(name).unwrap();
                Stream::Unix(UnixStream::connect_addr(&address).unwrap())
            }
            Medium::Tcp => {
                let address = body.reach.iter().find_map(|reach| match reach {
                    Reach::Tcp(address) => Some(*address),
                    _ => None,
                });
                Stream::Tcp(TcpStream::connect(address.unwrap()).unwrap())
            }
        };
        Attacker { stream, said: Vec::new(), passed: 0 }
    }

    /// Over a connection that it has already.
    pub fn over(stream: TcpStream) -> Attacker {
        Attacker { stream: Stream::Tcp(stream), said: Vec::new(), passed: 0 }
    }

    /// The first frame of a peer that holds that ticket.
    pub fn hello(ticket: &Ticket) -> (ClientHandshake, Vec<u8>) {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut random = Random::new(NEXT.fetch_add(1, Ordering::Relaxed) ^ u64::from(std::process::id()));
        let mut nonce = [0; 32];
        nonce.fill_with(|| random.number() as u8);
        let identity = Identity::new("attacker", Incarnation([6; 16])).unwrap();
        let target = ticket.body().identity.incarnation;
        ClientHandshake::start(&identity, target, ClientKey::Ticket(ticket), nonce, None)
    }

    /// A whole handshake and an import; returns the grant's handle.
    pub fn log_in(&mut self, ticket: &Ticket) -> u32 {
        self.try_log_in(ticket).unwrap()
    }

    /// A whole handshake and an import; the owner's reply to the ticket.
    pub fn try_log_in(&mut self, ticket: &Ticket) -> Result<u32, WireError> {
        let challenge = self.shake_hands(ticket)?;
        self.import(ticket, &challenge)
    }

    /// An import over a session that is there already; the owner's reply to the ticket.
    pub fn import(&mut self, ticket: &Ticket, challenge: &[u8; 32]) -> Result<u32, WireError> {
        let item = ImportItem {
            ticket: ticket.public_bytes().to_vec(),
            proof: ticket.proof(challenge),
            operation: None,
        };
        self.send(&Message::from(Import { items: vec![item] }).frame(1, 0, 0));
        let (header, body) = self.frame().expect("the grant");
        assert_eq!(header.kind, FrameKind::Granted);
        Granted::decode(&body).unwrap().items.swap_remove(0).map(|grant| grant.handle)
    }

    /// A whole handshake, and nothing after it: the session's number, its key, and the challenge that proofs on it are about.
    pub fn open_session(&mut self, ticket: &Ticket) -> (u64, SessionKey, [u8; 32]) {
        let (handshake, hello) = Attacker::hello(ticket);
        self.send(&hello);
        let (_, welcome) = self.frame().expect("a welcome");
        let (proof, key, challenge) = handshake.on_welcome(&welcome).unwrap();
        self.send(&proof);
        let (header, body) = self.frame().expect("ready");
        assert_eq!(header.kind, FrameKind::Ready);
        (Ready::decode(&body).unwrap().session, key, challenge)
    }

    /// Joins a session by its key, as a lane; says whether it was let in.
    pub fn join(&mut self, ticket: &Ticket, session: u64, key: &SessionKey) -> bool {
        self.join_by_name(ticket, session, key).is_some()
    }

    /// [`join`](Self::join); gives what both sides call the lane.
    pub fn join_by_name(&mut self, ticket: &Ticket, session: u64, key: &SessionKey) -> Option<[u8; 32]> {
        let identity = Identity::new("attacker", Incarnation([6; 16])).unwrap();
        let target = ticket.body().identity.incarnation;
        let key = ClientKey::Session { id: session, key };
        let (handshake, hello) = ClientHandshake::start(&identity, target, key, [5; 32], None);
        self.send(&hello);
        let (_, welcome) = self.frame()?;
        let (proof, _, name) = handshake.on_welcome(&welcome).ok()?;
        self.send(&proof);
        self.frame().is_some_and(|(header, _)| header.kind == FrameKind::Ready).then_some(name)
    }

    /// Ends its own direction.
    pub fn end_sending(&self) {
        let _ = match &self.stream {
            Stream::Unix(stream) => stream.shutdown(std::net::Shutdown::Write),
            Stream::Tcp(stream) => stream.shutdown(std::net::Shutdown::Write),
        };
    }

    /// The next frame and its body, if one comes within that time.
    pub fn frame_within(&mut self, within: Duration) -> Option<(Header, Vec<u8>)> {
        self.set_timeout(within);
        let mut first = [0; 1];
        let peeked = match &mut self.stream {
            Stream::Unix(stream) => {
                rustix::net::recv(stream, &mut first, rustix::net::RecvFlags::PEEK).map(|got| got.0)
            }
            Stream::Tcp(stream) => stream.peek(&mut first).map_err(|_| rustix::io::Errno::AGAIN),
        };
        matches!(peeked, Ok(1)).then(|| self.frame()).flatten()
    }

    /// A whole handshake; the challenge that proofs on this connection are about.
    pub fn shake_hands(&mut self, ticket: &Ticket) -> Result<[u8; 32], WireError> {
        let (handshake, hello) = Attacker::hello(ticket);
        self.send(&hello);
        let welcome = self.expect(FrameKind::Welcome)?;
        let (proof, _, challenge) = handshake.on_welcome(&welcome).unwrap();
        self.send(&proof);
        self.expect(FrameKind::Ready)?;
        Ok(challenge)
    }

    /// The body of the next frame, which is of that kind or a refusal.
    fn expect(&mut self, kind: FrameKind) -> Result<Vec<u8>, WireError> {
        match self.frame() {
            Some((header, body)) if header.kind == FrameKind::Refuse => {
                Err(Refuse::decode(&body).unwrap().error)
            }
            Some((header, body)) => {
                assert_eq!(header.kind, kind);
                Ok(body)
            }
            None => panic!("the target hung up before its {kind:?}"),
        }
    }

    /// Everything that was sent.
    pub fn said(&self) -> &[u8] {
        &self.said
    }

    /// How many bytes of the last frame are missing; none where what was sent are no frames.
    pub fn missing(&self) -> Option<u64> {
        let mut rest = &self.said[..];
        while !rest.is_empty() {
            let Some(header) = rest.first_chunk::<HEADER_LEN>() else {
                return Some((HEADER_LEN - rest.len()) as u64);
            };
            let header = Header::decode(header).ok()?;
            let whole = header.payload_len.checked_add((HEADER_LEN + header.rest()) as u64)?;
            match rest.get(whole as usize..) {
                Some(behind) => rest = behind,
                None => return Some(whole - rest.len() as u64),
            }
        }
        Some(0)
    }

    /// Sends; that the other side has hung up is no surprise.
    pub fn send(&mut self, bytes: &[u8]) {
        self.said.extend_from_slice(bytes);
        let _ = match &mut self.stream {
            Stream::Unix(stream) => stream.write_all(bytes),
            Stream::Tcp(stream) => stream.write_all(bytes),
        };
    }

    /// Sends as much as the target takes at once, and no more.
    pub fn send_what_fits(&mut self, bytes: &[u8]) {
        const HALT: Option<Duration> = Some(Duration::from_millis(200));
        let _ = match &mut self.stream {
            Stream::Unix(stream) => stream.set_write_timeout(HALT).and_then(|()| stream.write_all(bytes)),
            Stream::Tcp(stream) => stream.set_write_timeout(HALT).and_then(|()| stream.write_all(bytes)),
        };
    }

    /// [`send`](Self::send) over a Unix socket, with descriptors.
    pub fn send_with_files(&mut self, bytes: &[u8], files: &[BorrowedFd<'_>]) {
        let Stream::Unix(stream) = &self.stream else { panic!("descriptors pass over Unix sockets only") };
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(files.len()))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(files)));
        self.said.extend_from_slice(bytes);
        let _ = sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
    }

    /// The next frame and its body, its payload left out; `None` at the end of the connection.
    pub fn frame(&mut self) -> Option<(Header, Vec<u8>)> {
        let mut header = [0; HEADER_LEN];
        self.read_exact(&mut header)?;
        let header = Header::decode(&header).unwrap();
        self.passed += u64::from(header.files);
        let mut body = vec![0; header.rest()];
        self.read_exact(&mut body)?;
        body.truncate(header.body(&body).unwrap().len());
        let mut payload = vec![0; header.payload_len as usize];
        self.read_exact(&mut payload)?;
        Some((header, body))
    }

    fn read_exact(&mut self, into: &mut [u8]) -> Option<()> {
        self.set_timeout(ANSWER);
        let read = match &mut self.stream {
            Stream::Unix(stream) => stream.read_exact(into),
            Stream::Tcp(stream) => stream.read_exact(into),
        };
        match read {
            Ok(()) => Some(()),
            Err(error)
                if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) =>
            {
                panic!("the target neither answers nor hangs up");
            }
            Err(_) => None,
        }
    }

    fn set_timeout(&self, time: Duration) {
        let _ = match &self.stream {
            Stream::Unix(stream) => stream.set_read_timeout(Some(time)),
            Stream::Tcp(stream) => stream.set_read_timeout(Some(time)),
        };
    }

    /// How many descriptors the frames named that have come.
    pub fn passed(&self) -> u64 {
        self.passed
    }

    /// Whether the target hangs up within that time, whatever it says before.
    pub fn is_cut_off(&mut self, within: Duration) -> bool {
        let until = Instant::now() + within;
        let mut bytes = [0; 4096];
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            self.set_timeout(left);
            let read = match &mut self.stream {
                Stream::Unix(stream) => stream.read(&mut bytes),
                Stream::Tcp(stream) => stream.read(&mut bytes),
            };
            match read {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => {
                    return !matches!(
                        error.kind(),
                        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                    );
                }
            }
        }
    }

    /// Whether all that comes, until the target hangs up, are refusals (and the welcome before them).
    pub fn gets_nothing_but_refusals(&mut self) -> bool {
        while let Some((header, _)) = self.frame() {
            if !matches!(header.kind, FrameKind::Refuse | FrameKind::Welcome | FrameKind::Bye) {
                return false;
            }
        }
        true
    }

    /// Whether what was sent is answered with an error, the end, or nothing before the reply to a ping.
    pub fn gets_nothing_but_errors(&mut self) -> bool {
        self.send(&Message::from(towline::wire::Ping {}).frame(8, 0, 0));
        // What swallows the ping as part of something longer has to learn that nothing more comes.
        let _ = match &self.stream {
            Stream::Unix(stream) => stream.shutdown(std::net::Shutdown::Write),
            Stream::Tcp(stream) => stream.shutdown(std::net::Shutdown::Write),
        };
        while let Some((header, body)) = self.frame() {
            let good = match header.kind {
                FrameKind::Data => Data::decode(&body).unwrap().outcome.is_err(),
                FrameKind::Done => Done::decode(&body).unwrap().outcome.is_err(),
                FrameKind::Granted => Granted::decode(&body).unwrap().items.iter().all(Result::is_err),
                FrameKind::Pong | FrameKind::Bye | FrameKind::Refuse => true,
                _ => false,
            };
            if !good {
                return false;
            }
        }
        true
    }
}
