//! The Python objects whose memory is registered: kept until the core lets go, released by Python's threads.
//!
//! The core owns an [`OwnerToken`] where a Rust program would give it the memory's owner. The last use of the
//! memory may end on any thread; the token's drop then only queues a number, and the object is released by the
//! next Python thread that passes by: at every call into this module, or when an event loop wakes up for it. What
//! is still held when the interpreter ends is never released, since a peer may be writing into it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::process;
use crate::queue::Queue;

/// Only ever touched with the GIL held.
static HELD: Mutex<Option<HashMap<u64, Py<PyAny>>>> = Mutex::new(None);
static DROPPED: Mutex<Dropped> = Mutex::new(Dropped { ids: Vec::new(), listeners: Vec::new() });
static NEXT: AtomicU64 = AtomicU64::new(1);

struct Dropped {
    ids: Vec<u64>,
    /// The event loops that can be woken to release objects.
    listeners: Vec<Weak<Queue>>,
}

/// Stands in the core for a Python object, which lives for as long as the token does.
pub(crate) struct OwnerToken(u64);

impl OwnerToken {
    /// Keeps the object until the token is gone.
    pub(crate) fn keep(object: Bound<'_, PyAny>) -> OwnerToken {
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        HELD.lock().get_or_insert_default().insert(id, object.unbind());
        OwnerToken(id)
    }
}

impl Drop for OwnerToken {
    fn drop(&mut self) {
        if process::in_child() {
            return;
        }
        let listeners: Vec<_> = {
            let mut dropped = DROPPED.lock();
            dropped.ids.push(self.0);
            if dropped.ids.len() > 1 {
                return;
            }
            dropped.listeners.retain(|listener| listener.strong_count() > 0);
            dropped.listeners.iter().filter_map(Weak::upgrade).collect()
        };
        // All of them: one that has stopped without being closed would not answer.
        for queue in listeners {
            queue.ring();
        }
    }
}

/// Wakes that queue when there is something to release.
pub(crate) fn listen(queue: &Arc<Queue>) {
    let mut dropped = DROPPED.lock();
    dropped.listeners.retain(|listener| listener.strong_count() > 0);
    dropped.listeners.push(Arc::downgrade(queue));
}

/// Releases what the core has let go of.
pub(crate) fn release(_attached: Python<'_>) {
    if process::in_child() {
        return;
    }
    let ids = std::mem::take(&mut DROPPED.lock().ids);
    if ids.is_empty() {
        return;
    }
    let objects: Vec<_> = match HELD.lock().as_mut() {
        Some(held) => ids.iter().filter_map(|id| held.remove(id)).collect(),
        None => Vec::new(),
    };
    // After the locks: freeing an object may run any Python code.
    drop(objects);
}

/// The number of Python objects that are kept for the core.
#[pyfunction]
pub(crate) fn held(py: Python<'_>) -> usize {
    release(py);
    HELD.lock().as_ref().map_or(0, HashMap::len)
}
