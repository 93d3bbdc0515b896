//! The addresses of an endpoint.

use std::fmt;
use std::net::SocketAddr;

use crate::identity::Incarnation;

/// The most addresses of its owner that a ticket can name.
pub const MAX_REACH: usize = 8;

/// One address of the owner of a ticket.
///
/// Only where to connect: the process that answers must still prove, with the ticket's tag, to be the owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reach {
    /// The abstract Unix socket whose name follows from the incarnation: see [`socket_name`].
    Unix,
    /// A TCP address.
    Tcp(SocketAddr),
}

impl Reach {
    /// Says why nobody can be reached at this address; `None` if it can be.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        match self {
            Reach::Tcp(address) if address.port() == 0 => Err("an address with port 0 cannot be reached"),
            Reach::Tcp(address) if address.ip().is_unspecified() => {
                Err("an unspecified address (0.0.0.0 or ::) cannot be reached by others")
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reach::Unix => f.write_str("unix"),
            Reach::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

/// Names the abstract Unix socket of an incarnation, without the leading zero byte.
pub fn socket_name(incarnation: &Incarnation) -> Vec<u8> {
    format!("towline/{incarnation}").into_bytes()
}
