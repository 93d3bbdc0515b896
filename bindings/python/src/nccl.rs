//! Communicators: groups of ranks, windows, one-sided access and collectives.

pub(crate) mod communicator;
pub(crate) mod config;
pub(crate) mod device;
mod errors;
pub(crate) mod group;
mod memory;
mod quiet;
pub(crate) mod unique_id;
pub(crate) mod view;
pub(crate) mod window;
pub(crate) mod work;
