#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

mod agreement;
mod messages;
mod random;
mod rig;
