//! Registered memory and one-sided transfers between inference workers.

mod error;
pub mod layout;
pub mod memory;

pub use error::{Error, Kind, Result};
