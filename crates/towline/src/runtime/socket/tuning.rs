//! What a connection is set to, and what the kernel knows of one.
#![allow(unsafe_code, reason = "sets an option that rustix does not know")]

use std::io;
use std::mem;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::time::Duration;

use rustix::net::{self, sockopt};

use super::{Family, Lane, PATIENCE, Socket, failed};
use crate::Result;

/// Socket buffers of a bulk lane on one host: what `net.core.wmem_max` allows on a stock kernel.
///
/// Measured with two processes on a 2-core VM that others used too, 384 MiB in nonblocking sends of up to
/// 32 MiB, medians of 31 and 41 runs. One Unix stream: 2.3 GiB/s with 64 KiB, 4.4 to 4.5 from 128 KiB to 8 MiB. One
/// loopback TCP stream: 2.4 and 2.5 with the kernel's own choice, 3.0 and 2.7 with 208 KiB, 2.2 to 2.6 from 320 KiB
/// up (the bytes in flight then no longer stay in the cache); the quartiles overlap. Between hosts the buffers are
/// left to the kernel, since a fixed size ends its tuning to the bandwidth and the round trip.
pub(super) const LOCAL_BULK_BUFFER: usize = 212_992;

/// The congestion control of a TCP connection on one host: the one that every kernel has, and that anybody may choose.
///
/// No line is shared there and nothing is lost, so that there is nothing to control. But BBR, the default of some machines, holds
/// bytes back to the rate that it has seen, by a timer for every segment, and what it has seen is how fast the receiver last got
/// its turn: 256 MiB went at 6.7 GiB/s, and with this at 7.5.
pub(super) const LOCAL_CONGESTION: &str = "reno";

/// On a control connection the kernel gets no more bytes than about this beyond those that are in flight: between hosts one second
/// of a link of 1 Mbit/s, and on one host as much as the largest answer that goes over it. With 64 KiB there, 256 blocks of 1 KiB
/// over loopback went at 1.2 to 2.7 GiB/s instead of 3.3; with this there is no difference.
const CONTROL_UNSENT: libc::c_int = 128 << 10;
const LOCAL_CONTROL_UNSENT: libc::c_int = 256 << 10;
const TCP_NOTSENT_LOWAT: libc::c_int = 25;

/// An idle connection is probed after this long.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// What the other host of a connection has acknowledged.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Acknowledged {
    /// How many bytes, ever.
    pub(crate) bytes: u64,
    /// Others have been sent, or are to be.
    pub(crate) more: bool,
    /// How long ago it last acknowledged anything.
    pub(crate) ago: Duration,
}

impl Socket {
    /// TCP: how long ago anything came from the other host, be it an acknowledgement.
    pub(crate) fn last_came(&self) -> Option<Duration> {
        if self.family == Family::Unix {
            return None;
        }
        let info: libc::tcp_info = self.option("look", libc::IPPROTO_TCP, libc::TCP_INFO).ok()?;
        let milliseconds = info.tcpi_last_ack_recv.min(info.tcpi_last_data_recv);
        Some(Duration::from_millis(milliseconds.into()))
    }

    /// TCP: what the other host has acknowledged.
    pub(crate) fn acknowledged(&self) -> Option<Acknowledged> {
        if self.family == Family::Unix {
            return None;
        }
        let info: libc::tcp_info = self.option("look", libc::IPPROTO_TCP, libc::TCP_INFO).ok()?;
        Some(Acknowledged {
            bytes: info.tcpi_bytes_acked,
            more: info.tcpi_unacked > 0 || info.tcpi_notsent_bytes > 0,
            ago: Duration::from_millis(info.tcpi_last_ack_recv.into()),
        })
    }

    /// TCP: the port of the other end, as this side sees it.
    pub(crate) fn peer_port(&self) -> Option<u32> {
        let peer = net::getpeername(&self.fd).ok().flatten().filter(|_| self.family == Family::Tcp)?;
        SocketAddr::try_from(peer).ok().map(|peer| peer.port().into())
    }

    /// Whether the other end, which sees this one at that port, is on this host with nothing in between.
    pub(crate) fn is_direct(&self, seen: u32) -> bool {
        self.family == Family::Tcp
            && self.peer_is_local()
            && self.local_addr().is_ok_and(|ours| u32::from(ours.port()) == seen)
    }

    fn set_option(&self, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
        let length = mem::size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: `value` is valid for `length` bytes, and outlives the call.
        let outcome = unsafe {
            libc::setsockopt(self.fd.as_raw_fd(), level, option, (&raw const value).cast(), length)
        };
        if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Sets what a connection of that use wants, once it is connected; `unanswered` is how long sent bytes may go unacknowledged
    /// before TCP gives up (it is ignored on Unix sockets, where nothing can get lost).
    pub(crate) fn tune(&self, lane: Lane, unanswered: Option<Duration>) -> Result<()> {
        const OP: &str = "tune";
        if self.family == Family::Tcp {
            sockopt::set_tcp_nodelay(&self.fd, true).map_err(|e| failed(OP, "setsockopt", e))?;
            sockopt::set_socket_keepalive(&self.fd, true).map_err(|e| failed(OP, "setsockopt", e))?;
            // An idle connection whose other end has vanished is noticed by the kernel, without waking this process.
            sockopt::set_tcp_keepidle(&self.fd, KEEP_ALIVE).map_err(|e| failed(OP, "setsockopt", e))?;
            sockopt::set_tcp_keepintvl(&self.fd, KEEP_ALIVE / 5).map_err(|e| failed(OP, "setsockopt", e))?;
            if let Some(limit) = unanswered {
                let milliseconds =
                    u32::try_from(limit.as_millis()).unwrap_or(u32::MAX).clamp(1, i32::MAX as u32);
                sockopt::set_tcp_user_timeout(&self.fd, milliseconds)
                    .map_err(|e| failed(OP, "setsockopt", e))?;
            }
        }
        let local = self.peer_is_local();
        if local && self.family == Family::Tcp {
            // Without it the connection is slower, and no more.
            let _ = sockopt::set_tcp_congestion(&self.fd, LOCAL_CONGESTION);
        }
        if self.family == Family::Tcp {
            // What the kernel has, nobody can take back; a lane's is dropped with the lane. A connection that becomes a lane gets the
            // kernel's own limit again. Without this more has to cross a slow link, and that is all.
            let limit = match (lane, local) {
                (Lane::Bulk, _) => 0,
                (Lane::Control, false) => CONTROL_UNSENT,
                (Lane::Control, true) => LOCAL_CONTROL_UNSENT,
            };
            let _ = self.set_option(libc::IPPROTO_TCP, TCP_NOTSENT_LOWAT, limit);
        }
        if lane == Lane::Bulk && local {
            sockopt::set_socket_send_buffer_size(&self.fd, LOCAL_BULK_BUFFER)
                .map_err(|e| failed(OP, "setsockopt", e))?;
            sockopt::set_socket_recv_buffer_size(&self.fd, LOCAL_BULK_BUFFER)
                .map_err(|e| failed(OP, "setsockopt", e))?;
        }
        if lane == Lane::Bulk {
            // For patient calls; every other says itself that it does not wait.
            for way in [sockopt::Timeout::Send, sockopt::Timeout::Recv] {
                sockopt::set_socket_timeout(&self.fd, way, Some(PATIENCE))
                    .map_err(|e| failed(OP, "setsockopt", e))?;
            }
            rustix::io::ioctl_fionbio(&self.fd, false).map_err(|e| failed(OP, "ioctl", e))?;
        }
        Ok(())
    }

    fn peer_is_local(&self) -> bool {
        self.family == Family::Unix
            || net::getpeername(&self.fd)
                .ok()
                .flatten()
                .and_then(|address| SocketAddr::try_from(address).ok())
                .is_some_and(|address| address.ip().is_loopback())
    }
}
