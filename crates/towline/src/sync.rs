//! The one place that chooses between the machine's atomics and loom's.
//!
//! Only protocol code that a model checker should explore uses the names of this module. Words that live in
//! memory shared with other processes are always the standard library's atomics: loom's have no fixed layout.

#![allow(unused_imports, reason = "one shim for the whole crate: not every build uses every name")]

#[cfg(loom)]
pub(crate) use loom::{
    sync::Arc,
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
    thread,
};
#[cfg(not(loom))]
pub(crate) use std::{
    sync::Arc,
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
    thread,
};
