//! What measures Towline and what tries to break it, on one machine: the benchmarks of `towline bench` and the campaigns of
//! `towline soak`, with the worker processes that these and other commands start.
//!
//! Nothing here prints: a run gives a report, and says how far it is to an observer ([`bench::Progress`],
//! [`soak::Audience`]). The command `towline` reads the command line and prints.

pub mod bench;
mod campaign;
mod interpreter;
pub mod machine;
mod measure;
pub mod outcome;
pub mod pattern;
mod raw;
pub mod size;
pub mod soak;
pub mod worker;
