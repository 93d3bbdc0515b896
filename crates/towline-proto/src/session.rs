//! The rules of one conversation with a peer: what may be asked, how much of it, and what ends it.
//!
//! Events go in (a frame was decoded, time has passed, a connection is gone), what is to be done comes out. Nothing here sends or waits.

pub mod allowance;
pub mod budget;
pub mod counting;
pub mod initiator;
pub mod owner;
mod quotas;
pub mod unauthenticated;

pub use quotas::Quotas;
