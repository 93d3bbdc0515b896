//! Who waits: per process, started on first use and asleep when idle, one epoll thread and one copy pool.
//!
//! [`reactor()`] waits for descriptors and for moments in time, on the thread `towline-io`. [`pool()`] runs
//! what takes long (lanes, blocking waits) on threads `towline-copy-N`, of which an idle process has none. [`starters()`] runs
//! what a call leaves to others so that it can return, on threads `towline-start-N`, [`sharers()`] copies that several threads
//! share, on threads `towline-share-N`, and [`devices()`] what waits for a disk or the like, on threads `towline-device-N`.
//! [`start_thread`] is how every thread of the library begins. [`socket`] is the nonblocking stream socket that the stream transport stands on. Nothing here ticks:
//! a process in which nothing happens makes no system call. After a transfer the event loop wakes once, when its deadline would have been.

mod bell;
mod devices;
mod pool;
mod quick;
mod reactor;
pub(crate) mod rseq;
pub(crate) mod socket;
mod thread;
mod timers;

use std::any::Any;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

pub(crate) use bell::Bell;
pub(crate) use devices::{Device, Devices, EACH};
pub(crate) use pool::Pool;
pub(crate) use quick::{wait_for_nothing, where_it_may_wait};
pub(crate) use reactor::{Interest, Reactor, Readiness, Source, Token};
pub use thread::{start_scoped_thread, start_thread};
pub(crate) use timers::{Timer, TimerId};

use crate::fork;
use crate::{Error, Result};

static REACTOR: OnceLock<Arc<Reactor>> = OnceLock::new();
static STARTING: Mutex<()> = Mutex::new(());
static POOL: Pool = Pool::new("towline-copy", 0);
static STARTERS: Pool = Pool::new("towline-start", 0).polite();
/// Contacts mostly wait for a peer: more threads than cores, but a number that a process can have.
static CONTACTS: Pool = Pool::new("towline-import", 32);
static DEVICES: Devices = Devices::new();
static SHARERS: Pool = Pool::new("towline-share", 0).polite();

/// The process's event loop; the first call starts its thread.
///
/// Errors: `Unavailable` in a forked child; `Exhausted` without descriptors or threads (a later call tries again).
#[inline]
pub(crate) fn reactor() -> Result<&'static Reactor> {
    fork::guard("start the event loop")?;
    match REACTOR.get() {
        Some(reactor) => Ok(reactor),
        None => start_reactor(),
    }
}

#[cold]
fn start_reactor() -> Result<&'static Reactor> {
    let _one_starts_it = STARTING.lock();
    if let Some(reactor) = REACTOR.get() {
        return Ok(reactor);
    }
    let started = Reactor::start("towline-io")?;
    Ok(REACTOR.get_or_init(|| started))
}

/// Calls a timer at that moment, as [`Reactor::at`] does; `None` where there is no event loop and none can be started.
pub(crate) fn call_at<T: Timer + 'static>(when: Instant, timer: &Arc<T>, key: u64) -> Option<TimerId> {
    let timer = Arc::downgrade(timer);
    reactor().ok().map(|reactor| reactor.at(when, timer, key))
}

/// Forgets a timer, where there is one.
pub(crate) fn forget(timer: Option<TimerId>) {
    if let (Some(timer), Ok(reactor)) = (timer, reactor()) {
        reactor.cancel(timer);
    }
}

/// That long after that moment; a caller's "for ever" becomes a century, which an `Instant` can hold.
pub(crate) fn later(from: Instant, by: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    from + by.min(CENTURY)
}

/// Refuses to block the event loop: a waker that waits would wait for itself.
pub(crate) fn may_block(op: &'static str) -> Result<()> {
    match REACTOR.get() {
        Some(reactor) if reactor.on_reactor_thread() => Err(Error::invalid(
            op,
            "a blocking call inside a waker, on the library's own event loop; await it or hand it to another thread",
        )),
        _ => Ok(()),
    }
}

/// The process's copy pool; it has no thread until a job comes.
pub(crate) fn pool() -> &'static Pool {
    &POOL
}

/// The process's threads that begin what was posted. Calling one does not cost the caller its processor, however busy the
/// machine is.
pub(crate) fn starters() -> &'static Pool {
    &STARTERS
}

/// The process's threads that wait for owners on behalf of futures.
pub(crate) fn contacts() -> &'static Pool {
    &CONTACTS
}

/// The process's threads that wait for disks and the like.
pub(crate) fn devices() -> &'static Devices {
    &DEVICES
}

/// The process's threads that share copies with the threads that have begun them. They take no processor from a thread that has posted a copy, and goes on.
pub(crate) fn sharers() -> &'static Pool {
    &SHARERS
}

/// What is logged about a caught panic: its message, where it has one.
pub(crate) fn panic_message(payload: Box<dyn Any + Send>) -> String {
    match payload.downcast::<String>() {
        Ok(message) => *message,
        Err(payload) => match payload.downcast::<&'static str>() {
            Ok(message) => (*message).to_owned(),
            Err(payload) => {
                // A payload of an unknown type may panic when it is dropped, outside of any catch.
                std::mem::forget(payload);
                "no message".to_owned()
            }
        },
    }
}
