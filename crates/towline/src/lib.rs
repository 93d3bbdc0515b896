//! Registered memory and one-sided transfers between inference workers.

mod error;
#[allow(dead_code, reason = "called by the endpoint and the transports, which come on top")]
mod fork;
pub mod layout;
pub mod memory;
#[allow(dead_code, unused_imports, reason = "called by the endpoint and the transports, which come on top")]
mod progress;

pub use error::{Error, Kind, Result};
