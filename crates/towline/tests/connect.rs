//! The operations API over every path: both pairings, what goes wrong, and what is left behind.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "connect/faults.rs"]
mod faults;
#[path = "connect/pairing.rs"]
mod pairing;
#[path = "connect/scene.rs"]
mod scene;
#[path = "connect/strided.rs"]
mod strided;
#[path = "connect/wrong.rs"]
mod wrong;
