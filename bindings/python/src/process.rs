//! Fork: what a child may do with objects that it inherited, which is nothing.
//!
//! The core refuses to work in a forked child wherever it is asked to start something. Here the same is asked
//! before a *wait*, and the objects that Python frees in the child are forgotten instead of dropped: the locks
//! that a drop would take may be held by threads that do not exist there.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::prelude::*;
use towline::{Error, Kind};

use crate::errors::raise;

/// The process that opened the first endpoint; zero before that.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Notes that this process uses the library: from now on its forked children must not.
pub(crate) fn mark() {
    let _ = OWNER.compare_exchange(0, std::process::id(), Ordering::AcqRel, Ordering::Acquire);
}

/// Whether this is a forked child of a process that used the library.
pub(crate) fn in_child() -> bool {
    let owner = OWNER.load(Ordering::Acquire);
    owner != 0 && owner != std::process::id()
}

/// Refuses to go on in a forked child, before any lock is taken.
pub(crate) fn guard(py: Python<'_>, op: &'static str) -> PyResult<()> {
    if !in_child() {
        return Ok(());
    }
    Err(raise(
        py,
        &Error::new(
            Kind::Unavailable,
            op,
            "this process was forked after Towline had been started in its parent; the child cannot use it \
             (start workers with multiprocessing's spawn or forkserver, or fork before the first endpoint)",
        ),
    ))
}

/// A value that a forked child inherits: there it is never dropped.
pub(crate) struct Inherited<T>(ManuallyDrop<T>);

impl<T> Inherited<T> {
    pub(crate) fn new(value: T) -> Inherited<T> {
        Inherited(ManuallyDrop::new(value))
    }
}

impl<T> Deref for Inherited<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Inherited<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T> Drop for Inherited<T> {
    fn drop(&mut self) {
        if !in_child() {
            // SAFETY: dropped once, here, and never used again.
            #[allow(unsafe_code, reason = "drops what must not be dropped in a forked child")]
            unsafe {
                ManuallyDrop::drop(&mut self.0);
            }
        }
    }
}
