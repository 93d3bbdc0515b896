//! Threads that everybody relies on, and that therefore wait for nothing: the event loop and the watcher.

use std::cell::Cell;

use super::pool;

thread_local! {
    static QUICK: Cell<bool> = const { Cell::new(false) };
}

/// This thread waits for nothing from now on.
pub(crate) fn wait_for_nothing() {
    QUICK.set(true);
}

/// Runs what may take long, such as the drop of a storage, which may be the user's code or give back gigabytes: here, or by a worker
/// where this thread must not wait.
pub(crate) fn where_it_may_wait(job: impl FnOnce() + Send + 'static) {
    // Of a thread that ends, nothing is known.
    if !QUICK.try_with(Cell::get).unwrap_or(false) {
        return job();
    }
    if let Err(refused) = pool().spawn(Box::new(job)) {
        // Late for everybody is better than never.
        (refused.job)();
    }
}
