//! A connected socket, with or without TLS inside. Never blocks.
#![allow(unsafe_code, reason = "encrypts from and decrypts into raw parts of registered memory")]

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::bytes::{self, checked};
use crate::runtime::rseq;
use crate::runtime::socket::{Family, Lane, RawPart, RawPartMut, Received, Sent, Socket};
use crate::tls::{BINDING, Tls};
use crate::wire::handshake::refusal;
use crate::wire::{FrameKind, HEADER_LEN, Header};
use crate::{Error, Kind, Result, interrupt};

/// The first byte of every TLS connection, and what a TLS client understands as a refusal: the alert `insufficient_security`, which
/// nobody who speaks TLS here ever sends, so that it means one thing.
const TLS_HANDSHAKE: u8 = 22;
const TLS_REFUSAL: [u8; 7] = [21, 3, 3, 0, 2, 2, 71];

/// What is encrypted at a time before the socket has to take it.
const ENCRYPT_PORTION: usize = 128 << 10;

/// Plaintext goes through a buffer of this size: memory that peers may touch is never handed to a library as a slice.
const BOUNCE: usize = 32 << 10;

/// What the TLS of a connection takes, about: what is encrypted and not sent, what came and is not decrypted, and the buffer between.
pub(super) const TLS_BYTES: usize = ENCRYPT_PORTION + 3 * BOUNCE;

/// A connected socket.
pub(super) struct Channel {
    socket: Socket,
    tls: Option<Mutex<TlsState>>,
    /// The first byte that comes is to be looked at: it shows whether the peer uses TLS.
    curious: AtomicBool,
}

/// The TLS of a connection.
struct TlsState {
    tls: rustls::Connection,
    config: Tls,
    bounce: Vec<u8>,
}

impl Channel {
    /// A socket as it is.
    pub(super) fn plain(socket: Socket) -> Channel {
        Channel { socket, tls: None, curious: AtomicBool::new(false) }
    }

    /// Whether what is sent is sent as it is.
    pub(super) fn is_plain(&self) -> bool {
        self.tls.is_none()
    }

    /// A socket that was accepted; over TCP with TLS where the endpoint uses it.
    pub(super) fn accepted(socket: Socket, tls: Option<&Tls>) -> Result<Channel> {
        if socket.family() == Family::Unix {
            return Ok(Channel::plain(socket));
        }
        let state = tls.map(|tls| Ok::<_, Error>(Mutex::new(TlsState::new(tls.accept()?, tls))));
        Ok(Channel { socket, tls: state.transpose()?, curious: AtomicBool::new(true) })
    }

    /// A socket that was connected to the owner of that name: greets it by TLS where the endpoint uses it. Blocks, at most
    /// until then.
    pub(super) fn connected(
        socket: Socket,
        tls: Option<&Tls>,
        owner: &str,
        until: Instant,
    ) -> Result<Channel> {
        let Some(tls) = tls.filter(|_| socket.family() == Family::Tcp) else {
            return Ok(Channel::plain(socket));
        };
        let state = Mutex::new(TlsState::new(tls.connect(owner)?, tls));
        let channel = Channel { socket, tls: Some(state), curious: AtomicBool::new(false) };
        channel.greet(until)?;
        Ok(channel)
    }

    fn greet(&self, until: Instant) -> Result<()> {
        let Some(state) = &self.tls else { return Ok(()) };
        let mut state = state.lock();
        loop {
            let flushed = state.push_out(&self.socket)?;
            if flushed && !state.tls.is_handshaking() {
                return Ok(());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::new(Kind::Timeout, "contact", "no TLS greeting came in time"));
            }
            interrupt::check("contact")?;
            if !self.socket.wait(flushed, !flushed, interrupt::turn(left))? {
                continue;
            }
            if flushed && state.pull_in(&self.socket, false)? == Pulled::End {
                let message = "the owner hung up during the TLS greeting: perhaps it does not use TLS";
                return Err(Error::new(Kind::Disconnected, "contact", message));
            }
        }
    }

    /// What proofs on this connection are bound to; none without TLS.
    pub(super) fn binding(&self) -> Result<Option<[u8; 32]>> {
        let Some(state) = &self.tls else { return Ok(None) };
        let binding = state.lock().tls.export_keying_material([0; 32], BINDING, None);
        binding.map(Some).map_err(|error| failed(&error))
    }

    /// Refuses a peer whose certificate is for another name.
    pub(super) fn check_peer(&self, name: &str) -> Result<()> {
        let Some(state) = &self.tls else { return Ok(()) };
        let state = state.lock();
        state.config.check_peer(&state.tls, name)
    }

    pub(super) fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// Whether bytes have come that a receive gives without asking the socket.
    pub(super) fn holds_bytes(&self) -> bool {
        self.tls.as_ref().is_some_and(|state| state.lock().holds_bytes())
    }

    /// Sends what is encrypted already; false where the socket is full.
    pub(super) fn flush(&self) -> Result<bool> {
        match &self.tls {
            None => Ok(true),
            Some(state) => state.lock().push_out(&self.socket),
        }
    }

    /// [`Socket::send`].
    pub(super) fn send(&self, slices: &[IoSlice<'_>], files: &[BorrowedFd<'_>]) -> Result<Sent> {
        let Some(state) = &self.tls else { return self.socket.send(slices, files) };
        if !files.is_empty() {
            return Err(Error::invalid("send", "descriptors do not travel over TLS"));
        }
        let mut state = state.lock();
        if !state.push_out(&self.socket)? {
            return Ok(Sent::WouldBlock);
        }
        let mut taken = 0;
        for slice in slices {
            taken += state.encrypt(slice)?;
            if taken >= ENCRYPT_PORTION {
                break;
            }
        }
        state.push_out(&self.socket)?;
        Ok(Sent::Bytes(taken))
    }

    /// [`Socket::send_raw`]; what was lent is read so that a missing page is an error.
    ///
    /// # Safety
    /// As for the socket: each part stays readable until this returns.
    pub(super) unsafe fn send_raw(&self, parts: &[RawPart], lent: bool) -> Result<Sent> {
        let Some(state) = &self.tls else {
            // SAFETY: the caller's promise.
            return unsafe { self.socket.send_raw(parts) };
        };
        let mut state = state.lock();
        if !state.push_out(&self.socket)? {
            return Ok(Sent::WouldBlock);
        }
        let mut bounce = std::mem::take(&mut state.bounce);
        bounce.resize(BOUNCE, 0);
        let mut taken = 0;
        for part in parts {
            let mut at = 0;
            while at < part.len && taken < ENCRYPT_PORTION {
                let len = BOUNCE.min(part.len - at);
                // SAFETY: the caller keeps the part readable, and `bounce` has room for `len`.
                unsafe {
                    let from = part.ptr.wrapping_add(at);
                    if lent {
                        checked::read("send", bounce.as_mut_ptr(), from, len)?;
                    } else {
                        bytes::copy(bounce.as_mut_ptr(), from, len);
                    }
                }
                state.encrypt(&bounce[..len])?;
                (at, taken) = (at + len, taken + len);
            }
            if taken >= ENCRYPT_PORTION {
                break;
            }
        }
        state.bounce = bounce;
        state.push_out(&self.socket)?;
        Ok(Sent::Bytes(taken))
    }

    /// [`Socket::send_raw_patiently`]; with TLS, which has bytes of its own to send first, no more than `WouldBlock`.
    ///
    /// # Safety
    /// As for the socket: each part stays readable until this returns.
    pub(super) unsafe fn send_raw_patiently(&self, parts: &[RawPart]) -> Result<Sent> {
        if self.is_encrypted() {
            return Ok(Sent::WouldBlock);
        }
        // SAFETY: the caller's promise.
        unsafe { self.socket.send_raw_patiently(parts) }
    }

    /// [`Socket::recv`].
    pub(super) fn recv(
        &self,
        slices: &mut [IoSliceMut<'_>],
        named: usize,
        files: &mut Vec<OwnedFd>,
    ) -> Result<Received> {
        let Some(state) = &self.tls else {
            let received = self.socket.recv(slices, named, files)?;
            if matches!(received, Received::Bytes(_)) && self.curious.swap(false, Ordering::Relaxed) {
                self.look_for_tls(slices)?;
            }
            return Ok(received);
        };
        let mut state = state.lock();
        let curious = self.curious.load(Ordering::Relaxed);
        let received = state.decrypt(&self.socket, curious, |tls| {
            match slices.iter_mut().find(|slice| !slice.is_empty()) {
                Some(slice) => tls.reader().read(slice),
                None => Ok(0),
            }
        });
        if !matches!(received, Ok(Received::WouldBlock)) {
            self.curious.store(false, Ordering::Relaxed);
        }
        received
    }

    /// Looks at the header of the next frame, which may name descriptors, without taking it. Unix sockets only.
    pub(super) fn next_header(&self, authenticated: bool) -> Result<Ahead> {
        let mut head = [0; HEADER_LEN];
        Ok(match self.socket.peek(&mut head)? {
            Received::Bytes(HEADER_LEN) => {
                let header = Header::decode(&head)?;
                header.check(authenticated)?;
                Ahead::Header(header)
            }
            Received::Bytes(some) => Ahead::Part(some),
            nothing => Ahead::Nothing(nothing),
        })
    }

    /// A peer that speaks TLS to an endpoint that does not use it gets an error in a form that it understands.
    fn look_for_tls(&self, slices: &[IoSliceMut<'_>]) -> Result<()> {
        if slices.iter().find_map(|slice| slice.first()) == Some(&TLS_HANDSHAKE) {
            let _ = self.socket.send(&[IoSlice::new(&TLS_REFUSAL)], &[]);
            let message = "the peer uses TLS, and this endpoint was opened without it";
            return Err(Error::protocol("contact", message));
        }
        Ok(())
    }

    /// [`Socket::recv_raw`].
    ///
    /// # Safety
    /// As for the socket: each part stays writable until this returns, and nobody has a reference to it.
    pub(super) unsafe fn recv_raw(&self, parts: &[RawPartMut]) -> Result<Received> {
        let Some(state) = &self.tls else {
            // SAFETY: the caller's promise.
            return unsafe { self.socket.recv_raw(parts) };
        };
        through_bounce(state, &self.socket, parts, |came| {
            let mut rest = came;
            for part in parts {
                let len = rest.len().min(part.len);
                // SAFETY: the caller keeps the part writable; `len` bytes fit it.
                unsafe { bytes::copy(part.ptr, rest.as_ptr(), len) };
                rest = &rest[len..];
            }
        })
    }

    /// [`recv_raw`](Self::recv_raw), or the patient form of it, into memory that was lent: pages of it may be gone.
    ///
    /// # Safety
    /// The parts are memory that was lent for this, and nobody has a reference to it.
    pub(super) unsafe fn recv_lent(&self, parts: &[RawPartMut], patiently: bool) -> Result<Landing> {
        let Some(state) = &self.tls else {
            // SAFETY: the caller's promise; the kernel says where pages are missing.
            return Landing::of(unsafe {
                if patiently { self.socket.recv_raw_patiently(parts) } else { self.socket.recv_raw(parts) }
            });
        };
        let mut landed = Ok(());
        let received = through_bounce(state, &self.socket, parts, |came| {
            let mut rest = came;
            for part in parts {
                let (now, behind) = rest.split_at(rest.len().min(part.len));
                // SAFETY: the caller's promise.
                landed = unsafe { checked::write("receive", part.ptr, now.as_ptr(), now.len()) };
                if landed.is_err() {
                    return;
                }
                rest = behind;
            }
        })?;
        Ok(match received {
            Received::Bytes(came) if landed.is_err() => Landing::Gone(came),
            received => Landing::There(received),
        })
    }

    /// [`recv_raw`](Self::recv_raw), or the patient form of it, if a check says so, [in one step](rseq) with it.
    ///
    /// # Safety
    /// As for the socket: each part stays writable until this returns, and nobody has a reference to it.
    pub(super) unsafe fn recv_raw_if(
        &self,
        parts: &[RawPartMut],
        patiently: bool,
        look: &dyn Fn() -> bool,
    ) -> Result<Landing> {
        let Some(state) = &self.tls else {
            // SAFETY: the caller's promise.
            return match unsafe { self.socket.recv_raw_if(parts, patiently, look) } {
                Ok(None) => Ok(Landing::Unwanted(0)),
                Ok(Some(received)) => Ok(Landing::There(received)),
                Err(error) => Landing::of(Err(error)),
            };
        };
        let mut landed = true;
        let received = through_bounce(state, &self.socket, parts, |came| {
            // SAFETY: the caller keeps the parts writable, and no more bytes came than they have room for.
            landed = unsafe { rseq::copy(look, parts, came) };
        })?;
        Ok(match received {
            Received::Bytes(came) if !landed => Landing::Unwanted(came),
            received => Landing::There(received),
        })
    }

    /// [`Socket::recv_raw_patiently`]; with TLS, where the parts of a message come in pieces anyway, without patience.
    ///
    /// # Safety
    /// As for the socket: each part stays writable until this returns, and nobody has a reference to it.
    pub(super) unsafe fn recv_raw_patiently(&self, parts: &[RawPartMut]) -> Result<Received> {
        if self.is_encrypted() {
            // SAFETY: the caller's promise.
            return unsafe { self.recv_raw(parts) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.socket.recv_raw_patiently(parts) }
    }

    /// [`Socket::wait`].
    pub(super) fn wait(&self, read: bool, write: bool, timeout: Duration) -> Result<bool> {
        if read && self.holds_bytes() {
            return Ok(true);
        }
        self.socket.wait(read, write, timeout)
    }

    pub(super) fn wait_readable(&self, timeout: Duration) -> Result<bool> {
        Ok(self.holds_bytes() || self.socket.wait_readable(timeout)?)
    }

    pub(super) fn wait_writable(&self, timeout: Duration) -> Result<bool> {
        self.socket.wait_writable(timeout)
    }

    pub(super) fn tune(&self, lane: Lane, unanswered: Option<Duration>) -> Result<()> {
        self.socket.tune(lane, unanswered)
    }

    pub(super) fn shutdown(&self) {
        self.socket.shutdown();
    }

    pub(super) fn reset(&self) {
        self.socket.reset();
    }

    pub(super) fn hung_up(&self) -> bool {
        self.socket.hung_up()
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// What comes next over a channel.
pub(super) enum Ahead {
    Header(Header),
    /// So many bytes of a header. No frame with descriptors comes like that: they come with its first byte, and that in one piece.
    Part(usize),
    /// Nothing yet, or the end.
    Nothing(Received),
}

/// Where bytes have gone that were received if a look said so.
pub(super) enum Landing {
    There(Received),
    /// Nowhere: so many of them were taken, and dropped.
    Unwanted(usize),
    /// Nowhere: the memory is gone. So many were taken, and dropped.
    Gone(usize),
}

impl Landing {
    fn of(received: Result<Received>) -> Result<Landing> {
        match received {
            // The kernel takes nothing from the socket that it could not put into its place.
            Err(error) if error.kind() == Kind::Stale => Ok(Landing::Gone(0)),
            received => received.map(Landing::There),
        }
    }
}

/// Gives what TLS has for those parts to `take`, from a buffer.
fn through_bounce(
    state: &Mutex<TlsState>,
    socket: &Socket,
    parts: &[RawPartMut],
    take: impl FnOnce(&[u8]),
) -> Result<Received> {
    let mut state = state.lock();
    let mut bounce = std::mem::take(&mut state.bounce);
    let room: usize = parts.iter().map(|part| part.len).sum();
    bounce.resize(BOUNCE, 0);
    let received = state.decrypt(socket, false, |tls| tls.reader().read(&mut bounce[..BOUNCE.min(room)]));
    if let Ok(Received::Bytes(came)) = received {
        take(&bounce[..came]);
    }
    state.bounce = bounce;
    received
}

// What is bounced is copied in one sequence.
const _: () = assert!(BOUNCE <= rseq::MOST_COPIED);

#[derive(Debug, PartialEq, Eq)]
enum Pulled {
    Some,
    Nothing,
    End,
}

impl TlsState {
    fn new(mut tls: rustls::Connection, config: &Tls) -> TlsState {
        // What is encrypted waits for the socket in this buffer, and no more is encrypted meanwhile.
        tls.set_buffer_limit(None);
        TlsState { tls, config: config.clone(), bounce: Vec::new() }
    }

    fn encrypt(&mut self, plain: &[u8]) -> Result<usize> {
        self.tls.writer().write_all(plain).map_err(|error| Error::os("send", "TLS", error))?;
        Ok(plain.len())
    }

    fn holds_bytes(&mut self) -> bool {
        self.tls.process_new_packets().is_ok_and(|state| state.plaintext_bytes_to_read() > 0)
    }

    /// Sends what is encrypted; false where the socket is full.
    fn push_out(&mut self, socket: &Socket) -> Result<bool> {
        let mut wire = Wire { socket, curious: false, error: None };
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut wire) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => {
                    return Err(wire.error.take().unwrap_or_else(|| Error::os("send", "TLS", error)));
                }
            }
        }
        Ok(true)
    }

    /// Takes what the socket has and makes sense of it.
    fn pull_in(&mut self, socket: &Socket, curious: bool) -> Result<Pulled> {
        let mut wire = Wire { socket, curious, error: None };
        match self.tls.read_tls(&mut wire) {
            Ok(0) => return Ok(Pulled::End),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Pulled::Nothing),
            Err(error) => {
                return Err(wire.error.take().unwrap_or_else(|| Error::os("receive", "TLS", error)));
            }
        }
        let processed = self.tls.process_new_packets().map_err(|error| failed(&error));
        // Answers of the greeting, and the alert that says to the peer what is wrong.
        let pushed = self.push_out(socket);
        processed?;
        pushed?;
        Ok(Pulled::Some)
    }

    /// Gives plaintext to `take`, which says how much it took.
    fn decrypt(
        &mut self,
        socket: &Socket,
        curious: bool,
        mut take: impl FnMut(&mut rustls::Connection) -> io::Result<usize>,
    ) -> Result<Received> {
        loop {
            match take(&mut self.tls) {
                Ok(0) => return Ok(Received::Eof),
                Ok(came) => return Ok(Received::Bytes(came)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // The connection ended without the goodbye of TLS: frames have lengths, so nothing is taken for whole.
                Err(_) => return Ok(Received::Eof),
            }
            match self.pull_in(socket, curious)? {
                Pulled::Some => {}
                Pulled::Nothing => return Ok(Received::WouldBlock),
                Pulled::End if self.tls.is_handshaking() => return Ok(Received::Eof),
                Pulled::End => {}
            }
        }
    }
}

/// The socket, as TLS wants to see it.
struct Wire<'a> {
    socket: &'a Socket,
    curious: bool,
    error: Option<Error>,
}

impl Wire<'_> {
    fn fail(&mut self, error: Error) -> io::Error {
        self.error = Some(error);
        io::ErrorKind::Other.into()
    }
}

impl Read for Wire<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.socket.recv(&mut [IoSliceMut::new(into)], 0, &mut Vec::new()) {
            Ok(Received::Bytes(_)) if self.curious && into[0] == FrameKind::Hello as u8 => {
                let denied = |message| Error::new(Kind::PermissionDenied, "contact", message);
                // Each side reads of itself as this endpoint.
                let error = denied("the owner requires TLS, and this endpoint was opened without it");
                let _ = self.socket.send(&[IoSlice::new(&refusal(&error))], &[]);
                Err(self.fail(denied("this endpoint requires TLS, and the peer was opened without it")))
            }
            Ok(Received::Bytes(came)) => Ok(came),
            Ok(Received::Eof) => Ok(0),
            Ok(Received::WouldBlock) => Err(io::ErrorKind::WouldBlock.into()),
            Err(error) => Err(self.fail(error)),
        }
    }
}

impl Write for Wire<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(from)])
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        match self.socket.send(from, &[]) {
            Ok(Sent::Bytes(sent)) => Ok(sent),
            Ok(Sent::WouldBlock) => Err(io::ErrorKind::WouldBlock.into()),
            Err(error) => Err(self.fail(error)),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What an error of TLS means to its user.
fn failed(error: &rustls::Error) -> Error {
    use rustls::{AlertDescription, Error as Tls};
    let (kind, what) = match error {
        Tls::InvalidCertificate(_) | Tls::NoCertificatesPresented => {
            (Kind::PermissionDenied, "the peer's certificate is not accepted")
        }
        // By `TLS_REFUSAL`.
        Tls::AlertReceived(AlertDescription::InsufficientSecurity) => {
            (Kind::PermissionDenied, "this endpoint requires TLS, and the owner was opened without it")
        }
        // What the version before answered without TLS, too.
        Tls::AlertReceived(AlertDescription::HandshakeFailure) => (
            Kind::PermissionDenied,
            "the peer uses another form of TLS than this endpoint (tickets here, certificates there), or none",
        ),
        Tls::AlertReceived(_) => (
            Kind::PermissionDenied,
            "the peer does not accept this endpoint's certificate, or its form of TLS",
        ),
        Tls::InvalidMessage(_) => (Kind::PermissionDenied, "the peer does not speak TLS"),
        Tls::PeerIncompatible(_) | Tls::NoApplicationProtocol => {
            (Kind::PermissionDenied, "the peer uses another form of TLS")
        }
        Tls::DecryptError => (Kind::Protocol, "bytes were changed on the way"),
        _ => (Kind::Protocol, "TLS failed"),
    };
    Error::new(kind, "tls", format!("{what} ({error})"))
}
