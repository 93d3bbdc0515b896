//! A fixed group of workers that register buffers together, open windows over their memory, and put, get, signal and
//! reduce through them.
#![forbid(unsafe_code)]

mod bootstrap;
mod collective;
mod combine;
mod communicator;
mod error;
mod group;
mod team;
mod unique_id;
mod window;

pub use combine::{Op, Scalar};
pub use error::{Error, Result};
