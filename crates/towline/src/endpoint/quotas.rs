//! How much of an endpoint strangers and peers may take.

use std::time::Duration;

/// How much of an endpoint strangers and peers may take. What goes beyond is refused with `Exhausted`; what is running
/// goes on.
///
/// A *stranger* is a connection that has not proven to hold a ticket yet. A *peer* is one life of an endpoint, as it calls
/// itself; the limit on all peers together is what bounds one that calls itself by many names.
///
/// ```
/// use towline::{Endpoint, Quotas};
/// let few = Quotas { peers: 8, requests: 256, ..Quotas::default() };
/// let endpoint = Endpoint::options("cache").quotas(few).open()?;
/// # Ok::<(), towline::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quotas {
    /// Connections that have not proven themselves, at a time. One too many makes the origin that has the most of them
    /// lose its oldest, a silent one first: a flood displaces itself.
    pub strangers: usize,
    /// How long a connection may take to prove itself.
    pub prove_within: Duration,
    /// Sessions of all peers, at a time.
    pub peers: usize,
    /// Connections of one peer. This library opens up to 17 by each way.
    pub connections: usize,
    /// Granted tickets that one peer holds, on one session.
    pub grants: usize,
    /// Requests of one session that are not answered yet. Of this library's own peers the sockets stop taking more long
    /// before the default is reached.
    pub requests: usize,
    /// The bytes that these requests ask for. Registered memory is sent from where it lies, so that these bytes cost no
    /// memory; buffers for files and reductions have limits of their own.
    pub bytes: u64,
}

impl Default for Quotas {
    fn default() -> Quotas {
        Quotas {
            strangers: 256,
            prove_within: Duration::from_secs(5),
            peers: 16 << 10,
            connections: 64,
            grants: 1 << 20,
            requests: 64 << 10,
            bytes: 256 << 30,
        }
    }
}
