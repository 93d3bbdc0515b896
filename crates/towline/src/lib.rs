//! Registered memory and one-sided transfers between inference workers.

mod error;
#[allow(dead_code, reason = "the machinery is complete before everything that stands on it is")]
mod fence;
pub mod layout;
pub mod memory;
#[allow(dead_code, reason = "a shim: not every build uses every name")]
mod sync;

pub use error::{Error, Kind, Result};
