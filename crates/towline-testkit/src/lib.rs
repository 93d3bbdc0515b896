//! What proves Towline's core: laws that every path obeys, an oracle for wrong bytes, real processes that are
//! killed and stopped, and network namespaces.
//!
//! A law is a function over a [`Bench`](bench::Bench): an owner, a user, and the path between them. The same laws
//! run over every path that the machine has; `tests/laws.rs` makes one test of each pair. What the machine lacks is
//! reported as skipped ([`skip`]), and `TOWLINE_REQUIRE` makes that a failure.
#![allow(clippy::unwrap_used, clippy::panic, reason = "this is test code: it fails by panicking")]

pub mod attacker;
pub mod bench;
pub mod changes;
pub mod executor;
pub mod forced;
pub mod gpu;
pub mod guarded;
mod input;
pub mod laws;
pub mod lending;
pub mod netns;
pub mod oracle;
pub mod paths;
pub mod process;
pub mod proxy;
pub mod random;
pub mod rogue;
pub mod scene;
pub mod serving;
pub mod skip;
pub mod using;
pub mod watchdog;
pub mod worker;
