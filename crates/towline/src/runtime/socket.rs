//! The nonblocking stream socket that the stream transport stands on: TCP, or Unix with descriptors.
//!
//! No call here blocks, but for [`Socket::wait`], its two short forms, and [`Socket::send_raw_patiently`], which have a limit.
//! Each call is one system call (repeated after EINTR) and may move less than was asked for.
#![allow(
    unsafe_code,
    reason = "hands raw parts of registered memory to sendmsg and recvmsg; reads SO_PEERPIDFD"
)]

mod tuning;

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::{self, MaybeUninit, offset_of};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType,
    sockopt,
};
use rustix::time::{ClockId, clock_gettime};

pub(crate) use self::tuning::Acknowledged;
use crate::bytes::checked::gone;
use crate::fork;
use crate::runtime::rseq;
use crate::{Error, Kind, Result};

/// Descriptors in one message: the kernel's SCM_MAX_FD.
pub(crate) const MAX_FILES: usize = 253;

/// Room for that many in a control message, where the kernel expects it.
#[repr(C, align(8))]
struct ForFiles([MaybeUninit<u8>; FILES_SPACE]);
const FILES_SPACE: usize = mem::size_of::<libc::cmsghdr>() + 4 * MAX_FILES;
const _: () =
    assert!(mem::align_of::<libc::cmsghdr>() <= 8 && mem::size_of::<libc::cmsghdr>().is_multiple_of(8));

/// Parts in one system call: the kernel's UIO_MAXIOV. What is beyond is left for the next call.
pub(crate) const MAX_PARTS: usize = 1024;

/// How long a [patient](Socket::send_raw_patiently) call waits for the other side; the kernel rounds it up to its clock tick, at most
/// 10 ms.
const PATIENCE: Duration = Duration::from_millis(1);

/// Connections that may wait to be accepted on a TCP listener; the kernel cuts it to its own limit.
const TCP_BACKLOG: i32 = 1024;

/// Failed connections skipped in one `accept` before the caller's other work gets its turn.
const MAX_ABORTED: usize = 64;

/// How often and at which distance a reset is tried again that the kernel refused.
const RESET_TRIES: usize = 20;
const RESET_PAUSE: Duration = Duration::from_micros(100);

/// The option that names the process at the other end of a Unix socket; Linux 6.5 and newer.
const SO_PEERPIDFD: libc::c_int = 77;

/// A nonblocking, close-on-exec stream socket, connected or listening.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    family: Family,
    /// Descriptors that the peer passes along never become descriptors of this process.
    refuses_files: AtomicBool,
    /// How long the machine had run then. A socket that connects is there before its connection.
    made: Timespec,
}

/// Which kind of stream it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    /// Between hosts, or over loopback.
    Tcp,
    /// On one host; passes descriptors and knows the peer's credentials.
    Unix,
}

/// Who connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PeerAddr {
    /// A peer at that address.
    Tcp(SocketAddr),
    /// A peer on this host: see [`Socket::peer_credentials`].
    Unix,
}

/// A peer's identity when it connected, in this process's pid and user namespaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ucred {
    /// Its process; 0 where that is invisible from this pid namespace.
    pub(crate) pid: i32,
    /// Its effective user.
    pub(crate) uid: u32,
    /// Its effective group.
    pub(crate) gid: u32,
}

/// What a connection is for, as far as its buffers are concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Small messages.
    Control,
    /// Payload.
    Bulk,
}

/// What a send did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) enum Sent {
    /// That many bytes, and all of the descriptors, are in flight.
    Bytes(usize),
    /// Nothing: there is no room.
    WouldBlock,
}

/// What a receive did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) enum Received {
    /// That many bytes came.
    Bytes(usize),
    /// Nothing: there is nothing yet.
    WouldBlock,
    /// The peer will send no more.
    Eof,
}

/// A part of memory to send from, which is never a Rust slice.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawPart {
    /// Where it starts.
    pub(crate) ptr: *const u8,
    /// Its length in bytes.
    pub(crate) len: usize,
}

/// A part of memory to receive into, which is never a Rust slice.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawPartMut {
    /// Where it starts.
    pub(crate) ptr: *mut u8,
    /// Its length in bytes.
    pub(crate) len: usize,
}

// The kernel reads the parts as they are, so they must lie as iovecs do.
const _: () = {
    assert!(mem::size_of::<RawPart>() == mem::size_of::<libc::iovec>());
    assert!(mem::size_of::<RawPartMut>() == mem::size_of::<libc::iovec>());
    assert!(mem::align_of::<RawPart>() == mem::align_of::<libc::iovec>());
    assert!(mem::align_of::<RawPartMut>() == mem::align_of::<libc::iovec>());
    assert!(offset_of!(RawPart, ptr) == offset_of!(libc::iovec, iov_base));
    assert!(offset_of!(RawPart, len) == offset_of!(libc::iovec, iov_len));
    assert!(offset_of!(RawPartMut, ptr) == offset_of!(libc::iovec, iov_base));
    assert!(offset_of!(RawPartMut, len) == offset_of!(libc::iovec, iov_len));
};

impl Socket {
    /// Connects to an abstract Unix name. It is connected on return.
    ///
    /// Errors: `Disconnected` where nobody listens, `Exhausted` where the listener's backlog is full.
    pub(crate) fn connect_unix_abstract(name: &[u8]) -> Result<Socket> {
        const OP: &str = "connect";
        let address = abstract_address(OP, name)?;
        let socket = Socket::new(OP, Family::Unix, AddressFamily::UNIX)?;
        rustix::io::retry_on_intr(|| net::connect(&socket.fd, &address))
            .map_err(|e| failed(OP, "connect", e))?;
        Ok(socket)
    }

    /// Starts to connect to a TCP address; once it is writable, [`Socket::finish_connect`] gives the outcome.
    pub(crate) fn connect_tcp(address: SocketAddr) -> Result<Socket> {
        const OP: &str = "connect";
        let socket = Socket::new(OP, Family::Tcp, family_of(&address))?;
        match net::connect(&socket.fd, &address) {
            // An interrupted nonblocking connect goes on by itself.
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket),
            Err(error) => Err(failed(OP, "connect", error)),
        }
    }

    /// Whether the connection stands; false while it is still being made, an error where it cannot be.
    pub(crate) fn finish_connect(&self) -> Result<bool> {
        const OP: &str = "connect";
        sockopt::socket_error(&self.fd)
            .map_err(|e| failed(OP, "getsockopt", e))?
            .map_err(|e| failed(OP, "connect", e))?;
        if self.family == Family::Unix {
            return Ok(true);
        }
        let peer = match net::getpeername(&self.fd) {
            Ok(peer) => peer,
            Err(Errno::NOTCONN) => return Ok(false),
            Err(error) => return Err(failed(OP, "getpeername", error)),
        };
        // Towards a dead listener on this host the kernel may pick the very port it connects to, and TCP then
        // connects the socket to itself.
        if peer == Some(net::getsockname(&self.fd).map_err(|e| failed(OP, "getsockname", e))?) {
            return Err(Error::new(Kind::Disconnected, OP, "no process listens at this address"));
        }
        Ok(true)
    }

    /// Listens at an abstract Unix name, which goes away with the socket.
    pub(crate) fn listen_unix_abstract(name: &[u8], backlog: i32) -> Result<Socket> {
        const OP: &str = "listen";
        let address = abstract_address(OP, name)?;
        let socket = Socket::new(OP, Family::Unix, AddressFamily::UNIX)?;
        net::bind(&socket.fd, &address).map_err(|e| failed(OP, "bind", e))?;
        net::listen(&socket.fd, backlog).map_err(|e| failed(OP, "listen", e))?;
        Ok(socket)
    }

    /// Listens at a TCP address (port 0: see [`Socket::local_addr`]); an IPv6 one takes IPv6 only.
    pub(crate) fn listen_tcp(address: SocketAddr) -> Result<Socket> {
        const OP: &str = "listen";
        let socket = Socket::new(OP, Family::Tcp, family_of(&address))?;
        sockopt::set_socket_reuseaddr(&socket.fd, true).map_err(|e| failed(OP, "setsockopt", e))?;
        if address.is_ipv6() {
            sockopt::set_ipv6_v6only(&socket.fd, true).map_err(|e| failed(OP, "setsockopt", e))?;
        }
        net::bind(&socket.fd, &address).map_err(|e| failed(OP, "bind", e))?;
        net::listen(&socket.fd, TCP_BACKLOG).map_err(|e| failed(OP, "listen", e))?;
        Ok(socket)
    }

    /// Takes the next connection, `None` where nobody waits.
    ///
    /// `Exhausted`: no descriptor or memory is left and the connection still waits, so a listener that stays
    /// readable would spin: stop watching it for a while.
    pub(crate) fn accept(&self) -> Result<Option<(Socket, PeerAddr)>> {
        const OP: &str = "accept";
        for _ in 0..MAX_ABORTED {
            let (fd, address) =
                match net::acceptfrom_with(&self.fd, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                    Ok(accepted) => accepted,
                    Err(Errno::AGAIN) => return Ok(None),
                    // accept(2): errors of the waiting connection itself are reported here and use it up.
                    Err(
                        Errno::INTR
                        | Errno::CONNABORTED
                        | Errno::PERM
                        | Errno::PROTO
                        | Errno::NETDOWN
                        | Errno::NOPROTOOPT
                        | Errno::HOSTDOWN
                        | Errno::NONET
                        | Errno::HOSTUNREACH
                        | Errno::NETUNREACH,
                    ) => continue,
                    Err(error) => return Err(failed(OP, "accept4", error)),
                };
            let socket = Socket::over(fd, self.family);
            let peer = match self.family {
                Family::Unix => PeerAddr::Unix,
                Family::Tcp => match address.map(SocketAddr::try_from) {
                    Some(Ok(address)) => PeerAddr::Tcp(address),
                    // Reset between its coming and our taking it.
                    _ => continue,
                },
            };
            return Ok(Some((socket, peer)));
        }
        Ok(None)
    }

    /// From now on descriptors that the peer passes along are left to the kernel: they never become descriptors of this process, which
    /// would have to close them, and closing one takes as long as its file likes.
    pub(crate) fn take_no_files(&self) {
        self.refuses_files.store(true, Ordering::Relaxed);
    }

    /// Whether descriptors can come along that become descriptors of this process.
    pub(crate) fn takes_files(&self) -> bool {
        self.family == Family::Unix && !self.refuses_files.load(Ordering::Relaxed)
    }

    /// Whether those are the descriptors that a frame names, as far as any are taken.
    pub(crate) fn has_taken(&self, named: u8, files: &[OwnedFd]) -> bool {
        let refused = self.refuses_files.load(Ordering::Relaxed) && files.is_empty();
        refused || files.len() == usize::from(named)
    }

    /// Which kind of stream it is.
    pub(crate) fn family(&self) -> Family {
        self.family
    }

    /// The TCP address of this side.
    pub(crate) fn local_addr(&self) -> Result<SocketAddr> {
        const OP: &str = "local address";
        let address = net::getsockname(&self.fd).map_err(|e| failed(OP, "getsockname", e))?;
        SocketAddr::try_from(address).map_err(|_| Error::invalid(OP, "not a TCP socket"))
    }

    /// The process at the other end when the connection was made.
    pub(crate) fn peer_credentials(&self) -> Result<Ucred> {
        const OP: &str = "peer credentials";
        // rustix's type has a pid that cannot be zero, but a process of an outer pid namespace has none here.
        let ucred: libc::ucred = self.option(OP, libc::SOL_SOCKET, libc::SO_PEERCRED)?;
        Ok(Ucred { pid: ucred.pid, uid: ucred.uid, gid: ucred.gid })
    }

    /// The process that was at the other end then, as a pidfd: it stays this process, also when another gets its number later.
    /// `ENOPROTOOPT` before Linux 6.5.
    pub(crate) fn peer_process(&self) -> rustix::io::Result<OwnedFd> {
        let mut fd: libc::c_int = -1;
        let mut length = mem::size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: `fd` is valid for `length` bytes, and both outlive the call.
        let outcome = unsafe {
            let value = (&raw mut fd).cast();
            libc::getsockopt(self.fd.as_raw_fd(), libc::SOL_SOCKET, SO_PEERPIDFD, value, &mut length)
        };
        if outcome != 0 || fd < 0 {
            return Err(io::Error::last_os_error()
                .raw_os_error()
                .map_or(Errno::INVAL, Errno::from_raw_os_error));
        }
        // SAFETY: the kernel has just made this descriptor for us, closed on exec; nobody else knows of it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// The tick, so many to a second since the machine started, in which it was made.
    pub(crate) fn made_at_tick(&self, ticks: u64) -> u64 {
        self.made.tv_sec as u64 * ticks + self.made.tv_nsec as u64 * ticks / 1_000_000_000
    }

    /// Reads an option of a plain C type.
    fn option<T: Plain>(&self, op: &'static str, level: libc::c_int, option: libc::c_int) -> Result<T> {
        let mut value = MaybeUninit::<T>::zeroed();
        let mut length = mem::size_of::<T>() as libc::socklen_t;
        // SAFETY: `value` is valid for `length` bytes, and both outlive the call.
        let outcome = unsafe {
            libc::getsockopt(self.fd.as_raw_fd(), level, option, value.as_mut_ptr().cast(), &mut length)
        };
        if outcome != 0 {
            return Err(failed_io(op, "getsockopt", io::Error::last_os_error()));
        }
        // SAFETY: zeroed above and perhaps written by the kernel; `Plain` types are valid for any bytes.
        Ok(unsafe { value.assume_init() })
    }

    /// Ends both directions: the peer reads the end of the stream, and so does this side. Never fails.
    pub(crate) fn shutdown(&self) {
        // A child shares the connection with its parent.
        if !fork::in_child() {
            let _ = net::shutdown(&self.fd, Shutdown::Both);
        }
    }

    /// Ends the connection so that nothing of it arrives later: TCP forgets what is not sent yet and resets the connection. The
    /// peer may still have bytes that it has not read; [`Socket::hung_up`] shows it that nobody wants them any more.
    pub(crate) fn reset(&self) {
        if fork::in_child() {
            return;
        }
        // The descriptor stays, so that no other thread finds another socket under its number.
        let mut over = self.family == Family::Unix || net::connect_unspec(&self.fd).is_ok();
        self.shutdown();
        // Some kernels refuse while a thread waits for room in a send; the shutdown has woken it.
        for _ in 0..RESET_TRIES {
            if over {
                return;
            }
            std::thread::sleep(RESET_PAUSE);
            over = net::connect_unspec(&self.fd).is_ok();
        }
    }

    /// Whether the other side has ended the connection, though bytes of it may still wait to be read.
    pub(crate) fn hung_up(&self) -> bool {
        let ended = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        self.poll(PollFlags::RDHUP, Duration::ZERO).is_ok_and(|events| events.intersects(ended))
    }

    /// Sends from slices, with descriptors (on Unix sockets; they travel with the first byte).
    pub(crate) fn send(&self, slices: &[IoSlice<'_>], files: &[BorrowedFd<'_>]) -> Result<Sent> {
        const OP: &str = "send";
        let slices = &slices[..slices.len().min(MAX_PARTS)];
        if slices.iter().all(|slice| slice.is_empty()) {
            return if files.is_empty() {
                Ok(Sent::Bytes(0))
            } else {
                Err(Error::invalid(OP, "descriptors need at least one byte to travel with"))
            };
        }
        if !files.is_empty() && (self.family != Family::Unix || files.len() > MAX_FILES) {
            return Err(Error::invalid(OP, "only a Unix socket passes descriptors, up to 253 at once"));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
            return Err(Error::new(Kind::Internal, OP, "the descriptors do not fit"));
        }
        // BYTES MOVE HERE
        sent(rustix::io::retry_on_intr(|| {
            net::sendmsg(&self.fd, slices, &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
        }))
    }

    /// Receives into slices; up to so many descriptors that come along are appended to `files`. No more than those ever become
    /// descriptors of this process.
    ///
    /// `Protocol`: the peer sent more. `Exhausted`: this process had no room for them. Those that came were closed, the
    /// bytes are lost, and so the connection is of no more use.
    pub(crate) fn recv(
        &self,
        slices: &mut [IoSliceMut<'_>],
        named: usize,
        files: &mut Vec<OwnedFd>,
    ) -> Result<Received> {
        const OP: &str = "receive";
        let count = slices.len().min(MAX_PARTS);
        let slices = &mut slices[..count];
        if slices.iter().all(|slice| slice.is_empty()) {
            return Ok(Received::Bytes(0));
        }
        let mut space = ForFiles([MaybeUninit::uninit(); FILES_SPACE]);
        let mut control = match named.min(MAX_FILES) {
            // The kernel closes what there is no room for.
            0 => RecvAncillaryBuffer::default(),
            // To the byte: with the padding that the message may have there would be room for one more.
            named => RecvAncillaryBuffer::new(&mut space.0[..mem::size_of::<libc::cmsghdr>() + 4 * named]),
        };
        // BYTES MOVE HERE
        let message = match rustix::io::retry_on_intr(|| {
            net::recvmsg(&self.fd, slices, &mut control, RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT)
        }) {
            Ok(message) => message,
            Err(error) => return received(Err(error)),
        };
        let before = files.len();
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(passed) = part {
                files.extend(passed);
            }
        }
        if message.flags.contains(ReturnFlags::CTRUNC) {
            let came = files.len() - before;
            files.truncate(before);
            if !self.takes_files() {
                return received(Ok(message.bytes));
            }
            return Err(if came < named {
                let message =
                    "descriptors that the peer sent could not be taken: this process has too many open";
                Error::new(Kind::Exhausted, OP, message)
            } else {
                Error::protocol(OP, "the peer sent descriptors that no frame names")
            });
        }
        received(Ok(message.bytes))
    }

    /// Looks at the next bytes without taking them, or the descriptors that come with them.
    pub(crate) fn peek(&self, bytes: &mut [u8]) -> Result<Received> {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        received(rustix::io::retry_on_intr(|| net::recv(&self.fd, &mut *bytes, flags)).map(|(came, _)| came))
    }

    /// Sends from raw parts, the first 1024 of them.
    ///
    /// # Safety
    /// Each part must be readable for its length until this returns. Others may write to it meanwhile; what
    /// is sent is then any mixture of old and new bytes.
    pub(crate) unsafe fn send_raw(&self, parts: &[RawPart]) -> Result<Sent> {
        // SAFETY: the caller's obligation.
        unsafe { self.send_parts(parts, libc::MSG_DONTWAIT) }
    }

    /// [`send_raw`](Self::send_raw) that waits for room, for a moment, on a socket that is [tuned](Self::tune) for bulk.
    ///
    /// # Safety
    /// As for [`send_raw`](Self::send_raw).
    pub(crate) unsafe fn send_raw_patiently(&self, parts: &[RawPart]) -> Result<Sent> {
        // SAFETY: the caller's obligation.
        unsafe { self.send_parts(parts, 0) }
    }

    /// # Safety
    /// As for [`send_raw`](Self::send_raw).
    unsafe fn send_parts(&self, parts: &[RawPart], flags: libc::c_int) -> Result<Sent> {
        if parts.iter().all(|part| part.len == 0) {
            return Ok(Sent::Bytes(0));
        }
        // SAFETY: all zero is a valid msghdr: no address, no parts, no control.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = parts.as_ptr().cast_mut().cast();
        message.msg_iovlen = parts.len().min(MAX_PARTS) as _;
        // SAFETY: `parts` lies as an array of iovecs (asserted above), which the kernel only reads, and the
        // caller keeps the memory behind it readable.
        sent(repeat(|| unsafe {
            // BYTES MOVE HERE
            libc::sendmsg(self.fd.as_raw_fd(), &message, libc::MSG_NOSIGNAL | flags)
        }))
    }

    /// Receives into raw parts, the first 1024 of them.
    ///
    /// `Protocol`: descriptors came along with payload. They were closed.
    ///
    /// # Safety
    /// Each part must be writable for its length until this returns, and no Rust reference to it may exist.
    pub(crate) unsafe fn recv_raw(&self, parts: &[RawPartMut]) -> Result<Received> {
        // SAFETY: the caller's obligation.
        let received = unsafe { self.recv_parts(parts, libc::MSG_DONTWAIT, None) }?;
        Ok(received.unwrap_or(Received::WouldBlock))
    }

    /// [`recv_raw`](Self::recv_raw) that waits until the parts are full, for a moment, on a socket that is
    /// [tuned](Self::tune) for bulk. Gives what has come when the process was stopped meanwhile.
    ///
    /// # Safety
    /// As for [`recv_raw`](Self::recv_raw).
    pub(crate) unsafe fn recv_raw_patiently(&self, parts: &[RawPartMut]) -> Result<Received> {
        // SAFETY: the caller's obligation.
        let received = unsafe { self.recv_parts(parts, libc::MSG_WAITALL, None) }?;
        Ok(received.unwrap_or(Received::WouldBlock))
    }

    /// One of the two, patient or not, [in one step](rseq) with a check that must say yes; `None` if it says no.
    ///
    /// # Safety
    /// As for [`recv_raw`](Self::recv_raw).
    pub(crate) unsafe fn recv_raw_if(
        &self,
        parts: &[RawPartMut],
        patiently: bool,
        check: &dyn Fn() -> bool,
    ) -> Result<Option<Received>> {
        let flags = if patiently { libc::MSG_WAITALL } else { libc::MSG_DONTWAIT };
        // SAFETY: the caller's obligation.
        unsafe { self.recv_parts(parts, flags, Some(check)) }
    }

    /// # Safety
    /// As for [`recv_raw`](Self::recv_raw).
    unsafe fn recv_parts(
        &self,
        parts: &[RawPartMut],
        flags: libc::c_int,
        check: Option<&dyn Fn() -> bool>,
    ) -> Result<Option<Received>> {
        if parts.iter().all(|part| part.len == 0) {
            return Ok(Some(Received::Bytes(0)));
        }
        // SAFETY: all zero is a valid msghdr: no address, no parts, no control.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = parts.as_ptr().cast_mut().cast();
        message.msg_iovlen = parts.len().min(MAX_PARTS) as _;
        let (fd, call_flags) = (self.fd.as_raw_fd(), flags | libc::MSG_CMSG_CLOEXEC);
        let outcome = match check {
            None => {
                // SAFETY: `parts` lies as an array of iovecs (asserted above), which the kernel only reads, and the
                // caller keeps the memory behind it writable and free of references.
                let receive = || unsafe {
                    // BYTES MOVE HERE
                    libc::recvmsg(fd, ptr::from_mut(&mut message), call_flags)
                };
                if flags & libc::MSG_DONTWAIT != 0 { repeat(receive) } else { once(receive) }
            }
            Some(check) => {
                // SAFETY: as above.
                // BYTES MOVE HERE
                match unsafe { rseq::recvmsg(check, fd, ptr::from_mut(&mut message), call_flags) } {
                    None => return Ok(None),
                    Some(returned) => usize::try_from(returned).map_err(|_| {
                        match Errno::from_raw_os_error(-(returned as i32)) {
                            // Nothing has come: who called looks around before it goes on.
                            Errno::INTR => Errno::AGAIN,
                            error => error,
                        }
                    }),
                }
            }
        };
        if outcome.is_ok() && message.msg_flags & libc::MSG_CTRUNC != 0 {
            return Err(Error::protocol("receive", "the peer sent descriptors in the middle of payload"));
        }
        received(outcome).map(Some)
    }

    /// Waits until a receive or a send will not block, whichever is asked for; false at the limit.
    pub(crate) fn wait(&self, read: bool, write: bool, timeout: Duration) -> Result<bool> {
        let mut events = PollFlags::empty();
        events.set(PollFlags::IN, read);
        events.set(PollFlags::OUT, write);
        Ok(!self.poll(events, timeout)?.is_empty())
    }

    /// Waits until a receive will not block (bytes, end or error: the receive says which); false at the limit.
    pub(crate) fn wait_readable(&self, timeout: Duration) -> Result<bool> {
        self.wait(true, false, timeout)
    }

    /// Waits until a send will not block (room, or an error: the send says which); false at the limit.
    pub(crate) fn wait_writable(&self, timeout: Duration) -> Result<bool> {
        self.wait(false, true, timeout)
    }

    fn poll(&self, events: PollFlags, timeout: Duration) -> Result<PollFlags> {
        // Some kernels refuse larger ones, and nobody waits a day.
        let timeout = timeout.min(Duration::from_secs(24 * 60 * 60));
        let until = Instant::now() + timeout;
        let mut left = timeout;
        loop {
            let mut fds = [PollFd::new(&self.fd, events)];
            let limit = Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos() as _ };
            match poll(&mut fds, Some(&limit)) {
                Ok(_) => return Ok(fds[0].revents()),
                Err(Errno::INTR) => left = until.saturating_duration_since(Instant::now()),
                Err(error) => return Err(failed("wait", "poll", error)),
            }
        }
    }

    fn new(op: &'static str, family: Family, address: AddressFamily) -> Result<Socket> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let fd = net::socket_with(address, SocketType::STREAM, flags, None)
            .map_err(|e| failed(op, "socket", e))?;
        Ok(Socket::over(fd, family))
    }

    fn over(fd: OwnedFd, family: Family) -> Socket {
        fork::not_for_children(fd.as_raw_fd());
        let made = clock_gettime(ClockId::Boottime);
        Socket { fd, family, refuses_files: AtomicBool::new(false), made }
    }

    /// Two connected Unix sockets.
    #[cfg(test)]
    pub(crate) fn pair() -> Result<(Socket, Socket)> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (a, b) = net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(|e| failed("connect", "socketpair", e))?;
        Ok((Socket::over(a, Family::Unix), Socket::over(b, Family::Unix)))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        fork::no_longer_ours(self.fd.as_raw_fd());
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// C types without padding and without invalid values.
trait Plain: Copy {}
impl Plain for libc::c_int {}
impl Plain for libc::ucred {}
impl Plain for libc::tcp_info {}

fn family_of(address: &SocketAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 }
}

fn abstract_address(op: &'static str, name: &[u8]) -> Result<SocketAddrUnix> {
    // An empty name would make the kernel choose one.
    if name.is_empty() {
        return Err(Error::invalid(op, "a socket's name must not be empty"));
    }
    SocketAddrUnix::new_abstract_name(name)
        .map_err(|_| Error::invalid(op, "a socket's name has at most 107 bytes"))
}

/// Repeats a system call after an interruption.
fn repeat(mut call: impl FnMut() -> isize) -> std::result::Result<usize, Errno> {
    loop {
        match outcome(call()) {
            Err(Errno::INTR) => {}
            outcome => return outcome,
        }
    }
}

/// Makes a system call that may wait. An interruption, also that of a process which was stopped and goes on, counts as
/// nothing having come: who called looks around before it goes on.
fn once(mut call: impl FnMut() -> isize) -> std::result::Result<usize, Errno> {
    outcome(call()).map_err(|error| if error == Errno::INTR { Errno::AGAIN } else { error })
}

fn outcome(returned: isize) -> std::result::Result<usize, Errno> {
    usize::try_from(returned)
        .map_err(|_| Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO))
}

fn sent(outcome: std::result::Result<usize, Errno>) -> Result<Sent> {
    match outcome {
        Ok(count) => Ok(Sent::Bytes(count)),
        Err(Errno::AGAIN) => Ok(Sent::WouldBlock),
        Err(error) => Err(failed("send", "sendmsg", error)),
    }
}

fn received(outcome: std::result::Result<usize, Errno>) -> Result<Received> {
    match outcome {
        Ok(0) => Ok(Received::Eof),
        Ok(count) => Ok(Received::Bytes(count)),
        Err(Errno::AGAIN) => Ok(Received::WouldBlock),
        Err(error) => Err(failed("receive", "recvmsg", error)),
    }
}

fn failed(op: &'static str, call: &'static str, error: Errno) -> Error {
    failed_io(op, call, error.into())
}

/// As `Error::os`, and knows which errors of a socket mean that the other side cannot be reached.
fn failed_io(op: &'static str, call: &'static str, error: io::Error) -> Error {
    let kind = match error.raw_os_error() {
        Some(
            libc::EHOSTUNREACH
            | libc::ENETUNREACH
            | libc::EHOSTDOWN
            | libc::ENETDOWN
            | libc::ENETRESET
            | libc::ENOTCONN
            | libc::ESHUTDOWN,
        ) => Kind::Disconnected,
        // More descriptors are in flight than the user may have open.
        Some(libc::ETOOMANYREFS) => Kind::Exhausted,
        // The memory that was to be sent from, or received into.
        Some(libc::EFAULT) => return gone(op).caused_by(error),
        _ => return Error::os(op, call, error),
    };
    Error::new(kind, op, format!("{call} failed: {error}")).caused_by(error)
}

#[cfg(test)]
mod tests;
