//! Registered memory and one-sided transfers between inference workers.

mod access;
mod error;
mod identity;
pub mod layout;
pub mod memory;
pub mod ticket;
#[doc(hidden)]
pub mod wire;

pub use access::Access;
pub use error::{Error, Kind, Result};
pub use identity::{EndpointId, Identity, Incarnation};
pub use ticket::{Narrow, Reach, Ticket};
