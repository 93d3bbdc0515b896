//! The path `nixl` to what is no plain host memory: files by NIXL's plug-in POSIX, and memory of GPUs on a library that only
//! pretends.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod fake;
mod files;
mod gpus;
