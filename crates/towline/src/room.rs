//! Room for what a user or a peer has chosen the size of, and for threads: `Exhausted` where there is none, never an abort.

use std::thread::{self, JoinHandle};

pub use towline_proto::room::{Zeroable, collect, copy, list, push, zeros};

use crate::{Error, Kind, Result};

/// Starts a thread.
pub fn thread(
    op: &'static str,
    name: impl Into<String>,
    body: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>> {
    let name = name.into();
    thread::Builder::new().name(name.clone()).spawn(body).map_err(|error| no_thread(op, &name, error))
}

/// An `Exhausted` error where a thread cannot be started, whatever errno says.
pub fn no_thread(op: &'static str, name: &str, error: std::io::Error) -> Error {
    Error::new(Kind::Exhausted, op, format!("cannot start the thread {name}: {error}")).caused_by(error)
}
