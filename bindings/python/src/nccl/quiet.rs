//! Values whose drop may wait: dropped without the GIL, and never in a forked child.

use std::ops::Deref;

use pyo3::prelude::*;

use crate::{owners, process};

/// A value that is dropped without the GIL.
pub(super) struct Quiet<T: Send>(Option<T>);

impl<T: Send> Quiet<T> {
    pub(super) fn new(value: T) -> Quiet<T> {
        Quiet(Some(value))
    }
}

impl<T: Send> Deref for Quiet<T> {
    type Target = T;

    fn deref(&self) -> &T {
        match &self.0 {
            Some(value) => value,
            // Only `drop` empties it.
            None => unreachable!("a value that was dropped is used"),
        }
    }
}

impl<T: Send> Drop for Quiet<T> {
    fn drop(&mut self) {
        let value = self.0.take();
        if process::in_child() {
            // The locks that a drop would take may be held by threads that do not exist here.
            std::mem::forget(value);
        } else if Python::try_attach(|py| py.detach(|| drop(value))).is_some() {
            Python::try_attach(owners::release);
        }
    }
}
