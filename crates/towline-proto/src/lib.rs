//! The rules of Towline, without anything that they are applied to: layouts, tickets, the wire format, the state of a transfer.
//!
//! Nothing here does I/O, reads a clock, starts a thread or contains unsafe code; randomness and time are passed in. Users take these
//! names from the crate `towline`, which does the rest.

#![forbid(unsafe_code)]

mod access;
#[doc(hidden)]
pub mod codec;
#[doc(hidden)]
pub mod crypto;
mod element;
mod error;
pub mod identity;
pub mod layout;
mod place;
#[doc(hidden)]
pub mod room;
#[doc(hidden)]
pub mod session;
pub mod ticket;
pub mod transfer;
#[doc(hidden)]
pub mod wire;

pub use access::Access;
pub use element::{Dtype, ReduceOp};
pub use error::{Error, Kind, Result};
pub use identity::{EndpointId, Identity, Incarnation};
pub use layout::{Dim, IndexList, Indices, Layout};
pub use place::Place;
pub use session::Quotas;
pub use ticket::{Narrow, Reach, Ticket};
