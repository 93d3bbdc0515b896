//! The conversation with a peer: contact, handshake, connections and the frames over them, on both sides.
//!
//! A user ([`initiator`]) asks, the owner ([`owner`]) checks and serves; both speak frames over [`connection`]s. The
//! first connection to an owner carries small requests and all messages; large transfers are spread over *lanes*. On
//! one host the session is also how `mapped` and `cma` get what they need: descriptors, the table, the page of pins.

mod apply;
mod channel;
mod checks;
mod connection;
mod contact;
mod files;
#[cfg(test)]
mod foreign_pages_tests;
mod grant;
mod importing;
mod initiator;
mod interfaces;
#[cfg(test)]
mod late_tests;
mod listener;
mod mappings;
mod outstanding;
mod owner;
#[cfg(test)]
mod panic_tests;
mod parts;
mod query;
mod refusals;
mod reply;
mod run;
mod sessions;
mod sharing;

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

#[cfg(test)]
pub(crate) use self::connection::moments;
pub(crate) use self::contact::NoContact;
pub(crate) use self::grant::GrantHandle;
pub(crate) use self::importing::{Imported, Importing, proven};
pub(crate) use self::initiator::Session;
use self::listener::Listener;
use self::owner::Serving;
pub(crate) use self::query::{Borrowing, Loan, OwnerPaths, Query, QueryReply, Ticketed};
use self::refusals::Refusals;
pub(crate) use self::run::{Run, cut, takes_long};
pub(crate) use self::sessions::{Sessions, Settings};
pub(crate) use towline_proto::session::initiator::HEARTBEAT;

/// Bytes that an initiator has not acknowledged for this long mean that it cannot be reached.
const UNANSWERED: Duration = Duration::from_secs(2);

/// What a session runs over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Medium {
    Unix,
    Tcp(SocketAddr),
}

impl Medium {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Medium::Unix => "unix",
            Medium::Tcp(_) => "tcp",
        }
    }
}

impl fmt::Display for Medium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Medium::Unix => f.write_str("unix socket"),
            Medium::Tcp(address) => write!(f, "tcp {address}"),
        }
    }
}
