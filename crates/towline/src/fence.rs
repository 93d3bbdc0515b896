//! Generations and pins shared with peers: the machinery behind "a stale access never gives bytes".
//!
//! An *owner* endpoint publishes its regions as rows of a [`table::Table`]. An *initiator* in another process
//! pins a row in the [`pins::PinPage`] that the two share, copies, checks the row again and releases. The
//! owner revokes a row, then scans the pins; a death on either side is seen through robust futexes:
//! [`life`] for single threads, [`watcher`] for whole processes.
//!
//! The order of every store, load and fence is decided in one file, `protocol`, which loom explores. The
//! reasons, the limits and what the fence cannot promise: `docs/reference/fence.md`.

pub(crate) mod applying;
pub(crate) mod life;
pub(crate) mod pins;
pub(crate) mod protocol;
mod robust;
pub(crate) mod shared;
pub(crate) mod table;
pub(crate) mod watcher;

#[cfg(test)]
pub(crate) mod tests;
