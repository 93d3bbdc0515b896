//! The path `nixl` to what is no plain host memory: files by NIXL's plug-in POSIX, and memory of GPUs on a library that only
//! pretends. On the same library, how several parts become one request, and what happens while NIXL is at it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod fake;
mod files;
mod gpus;
mod parts;
