//! How much of an endpoint unauthenticated connections and peers may take.

use std::time::Duration;

/// How much of an endpoint unauthenticated connections and peers may take. What goes beyond is refused with `Exhausted`; what is running
/// goes on.
///
/// An *unauthenticated* connection has not proven yet that it holds a ticket. A *peer* is one life of an endpoint, as it calls
/// itself; the limit on all peers together is what bounds one that calls itself by many names.
///
/// # The worst case
/// Whatever peers and unauthenticated connections do, they cause an endpoint to hold at most [`memory`](Quotas::memory) bytes (4 GiB), and beside that
/// - for each unauthenticated connection 64 KiB, with TLS 288 KiB: 72 MiB in all;
/// - 64 MiB of messages of peers that have gone;
/// - 8 MiB for each thread that works for peers at that moment. There are at most 32 for disks and queries, and 64 in the copy
///   pool, which has as many as processors, up to 16, and more only while some wait.
///
/// The buffers of sockets are the kernel's, which bounds them. A session is counted with 58 KiB, and with 226 KiB where it shares memory with its
/// peer; each further connection with 54 KiB, with TLS 278 KiB; a grant with at most 2 KiB. So there is room for 10,000 peers, and for a hundred
/// thousand tickets of one beside a thousand others. `Stats::peer_memory` says how much is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quotas {
    /// Connections that have not proven themselves, at a time. One too many makes the origin that has the most of them
    /// lose its oldest, a silent one first: a flood displaces itself.
    pub unauthenticated: usize,
    /// How long a connection may take to prove itself.
    pub prove_within: Duration,
    /// Sessions of all peers, at a time.
    pub peers: usize,
    /// Connections of one peer. This library opens up to 17 over each path.
    pub connections: usize,
    /// Granted tickets that one peer holds, on one session. The same ticket counts once, however often it is imported.
    pub grants: usize,
    /// Requests of one session that are not answered yet. Of this library's own peers the sockets stop taking more long
    /// before the default is reached.
    pub requests: usize,
    /// The bytes that these requests ask for. Registered memory is sent from where it lies, so that these bytes cost no
    /// memory; buffers for files and reductions have limits of their own.
    pub bytes: u64,
    /// The bytes of this process's memory that all peers together may take: sessions, connections and what waits in them, grants,
    /// requests, messages, checksums, bytes on their way to and from files and GPUs. A peer that is alone gets three eighths of it, and
    /// less the more is taken. See the worst case below.
    pub memory: u64,
}

impl Default for Quotas {
    fn default() -> Quotas {
        Quotas {
            unauthenticated: 256,
            prove_within: Duration::from_secs(5),
            peers: 16 << 10,
            connections: 64,
            grants: 128 << 10,
            requests: 32 << 10,
            bytes: 256 << 30,
            memory: 4 << 30,
        }
    }
}
