//! The event loop: one thread that waits for descriptors and moments, and calls the handlers.
#![allow(
    unsafe_code,
    reason = "calls epoll_pwait2 and sched_setscheduler, for which there is no safe wrapper"
)]

use std::cell::Cell;
use std::collections::HashMap;
use std::fmt;
use std::ops::BitOr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;

use super::timers::{Timer, TimerId, Timers};
use super::{panic_message, start_thread};
use crate::fork;
use crate::{Error, Kind, Result};

/// Something that waits for a descriptor.
pub(crate) trait Source: Send + Sync {
    /// Called on the event loop's thread, without any of its locks; must not block.
    ///
    /// Level-triggered: what is not dealt with (read, written, removed, or no longer asked for) is reported
    /// again at once. Hangup and error are reported whatever was asked for, so a source that gets one removes
    /// itself, or the loop spins.
    fn ready(self: Arc<Self>, readiness: Readiness);
}

/// What a source asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Interest(EventFlags);

impl Interest {
    /// Nothing but what cannot be declined: a hangup of both directions, and errors.
    pub(crate) const NONE: Interest = Interest(EventFlags::empty());
    /// Bytes, a connection to accept, or the end of the stream.
    pub(crate) const READ: Interest = Interest(EventFlags::IN);
    /// Room to write, or the end of connecting.
    pub(crate) const WRITE: Interest = Interest(EventFlags::OUT);
    /// One event, then none (errors included) until [`Reactor::modify`] asks again.
    pub(crate) const ONESHOT: Interest = Interest(EventFlags::ONESHOT);
}

impl BitOr for Interest {
    type Output = Interest;

    fn bitor(self, other: Interest) -> Interest {
        Interest(self.0 | other.0)
    }
}

/// What a source gets.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Readiness(EventFlags);

impl Readiness {
    #[cfg(test)]
    /// Whether a read will not block: bytes, a connection, or the end of the stream.
    pub(crate) fn readable(self) -> bool {
        self.0.contains(EventFlags::IN)
    }

    #[cfg(test)]
    /// Whether a write will not block, or connecting has ended.
    pub(crate) fn writable(self) -> bool {
        self.0.contains(EventFlags::OUT)
    }

    #[cfg(test)]
    /// Whether the other side has closed (both directions, or its own where that was asked for).
    pub(crate) fn hangup(self) -> bool {
        self.0.intersects(EventFlags::HUP | EventFlags::RDHUP)
    }
}

impl fmt::Debug for Readiness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// Names one registration; never reused, so that a late event cannot reach another source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Token(u64);

const WAKE: u64 = 0;

/// Events taken from the kernel at once.
const BATCH: usize = 128;

/// How often timers are looked at once epoll has failed for good, which happens when the program closed
/// descriptors that were not its own: deadlines must end what can no longer move.
const BROKEN_TICK: Duration = Duration::from_millis(10);

thread_local! {
    static LOOP_OF_THIS_THREAD: Cell<*const Reactor> = const { Cell::new(ptr::null()) };
}

/// The event loop.
///
/// It holds its sources and timers weakly: one that is dropped is forgotten. A source that panics is logged
/// and removed. Every call is allowed from every thread, also from inside a source.
pub(crate) struct Reactor {
    epoll: OwnedFd,
    /// Edge-triggered and never read: each write is one event.
    wake: OwnedFd,
    sources: Mutex<Sources>,
    timers: Mutex<Timers>,
    /// epoll_pwait2 is missing (before Linux 5.11, or filtered): timeouts are rounded up to milliseconds.
    coarse: AtomicBool,
    broken: AtomicBool,
}

struct Sources {
    by_token: HashMap<u64, Registration>,
    next_token: u64,
}

struct Registration {
    source: Weak<dyn Source>,
    fd: RawFd,
}

impl Reactor {
    /// Starts a loop on a thread of that name, which lives as long as the process.
    pub(super) fn start(name: &str) -> Result<Arc<Reactor>> {
        const OP: &str = "start the event loop";
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(|e| Error::os(OP, "epoll_create1", e))?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::os(OP, "eventfd", e))?;
        epoll::add(&epoll, &wake, EventData::new_u64(WAKE), EventFlags::IN | EventFlags::ET)
            .map_err(|e| Error::os(OP, "epoll_ctl", e))?;
        let reactor = Arc::new(Reactor {
            epoll,
            wake,
            sources: Mutex::new(Sources { by_token: HashMap::new(), next_token: WAKE + 1 }),
            timers: Mutex::new(Timers::default()),
            coarse: AtomicBool::new(false),
            broken: AtomicBool::new(false),
        });
        let running = Arc::clone(&reactor);
        start_thread(OP, name, move || running.run())?;
        Ok(reactor)
    }

    /// Watches a descriptor for a source.
    ///
    /// The descriptor must stay open until [`Reactor::remove`]: the kernel cannot forget one that
    /// was closed here while a copy of it lives elsewhere.
    pub(crate) fn add(
        &self,
        fd: BorrowedFd<'_>,
        interest: Interest,
        source: Weak<dyn Source>,
    ) -> Result<Token> {
        const OP: &str = "watch a descriptor";
        fork::guard(OP)?;
        if self.broken.load(Ordering::Relaxed) {
            return Err(broken(OP));
        }
        // Held over the system call, so that an event that comes at once finds the registration.
        let mut sources = self.sources.lock();
        let token = sources.next_token;
        epoll::add(&self.epoll, fd, EventData::new_u64(token), interest.0)
            .map_err(|e| Error::os(OP, "epoll_ctl", e))?;
        sources.next_token += 1;
        sources.by_token.insert(token, Registration { source, fd: fd.as_raw_fd() });
        Ok(Token(token))
    }

    /// Replaces what a source asks for, and arms a ONESHOT again.
    pub(crate) fn modify(&self, token: Token, fd: BorrowedFd<'_>, interest: Interest) -> Result<()> {
        const OP: &str = "watch a descriptor";
        fork::guard(OP)?;
        if self.broken.load(Ordering::Relaxed) {
            return Err(broken(OP));
        }
        // Held over the system call, lest the descriptor be added again meanwhile and get the old token.
        let sources = self.sources.lock();
        match sources.by_token.get(&token.0) {
            Some(registration) if registration.fd == fd.as_raw_fd() => {
                epoll::modify(&self.epoll, fd, EventData::new_u64(token.0), interest.0)
                    .map_err(|e| Error::os(OP, "epoll_ctl", e))
            }
            _ => Err(Error::invalid(OP, "the descriptor is no longer watched under this token")),
        }
    }

    /// Stops watching; the descriptor may be closed afterwards. A second call does nothing.
    ///
    /// No event for it is delivered after this returns, except that from another thread than the loop's a
    /// call of [`Source::ready`] that had already begun may still be running. (Waiting for it here would
    /// deadlock with a source that takes the lock under which its owner removes it.)
    pub(crate) fn remove(&self, token: Token, fd: BorrowedFd<'_>) {
        // The child shares the epoll with its parent: removing here would make the parent deaf.
        if fork::in_child() {
            return;
        }
        let mut sources = self.sources.lock();
        if sources.by_token.remove(&token.0).is_some() {
            let _ = epoll::delete(&self.epoll, fd);
        }
    }

    /// Calls a timer at a moment, or at once where that has passed. A system call is made only where the
    /// loop's thread would sleep past the moment.
    #[inline]
    pub(crate) fn at(&self, when: Instant, timer: Weak<dyn Timer>, key: u64) -> TimerId {
        // A child takes no lock; the timer would never fire there, and its owner's calls err anyway.
        if fork::in_child() {
            return Timers::default().insert(when, timer, key).0;
        }
        let (id, wake) = self.timers.lock().insert(when, timer, key);
        if wake {
            self.wake();
        }
        id
    }

    /// Forgets a timer; false where it has fired or is being called at this moment. Never a system call.
    pub(crate) fn cancel(&self, id: TimerId) -> bool {
        !fork::in_child() && self.timers.lock().cancel(id)
    }

    /// How many timers are due later than that from now on.
    #[cfg(test)]
    pub(crate) fn timers_after(&self, time: std::time::Duration) -> usize {
        self.timers.lock().after(Instant::now() + time)
    }

    /// Whether the caller runs inside a source or timer of this loop, and so must not block.
    pub(crate) fn on_reactor_thread(&self) -> bool {
        LOOP_OF_THIS_THREAD.get() == ptr::from_ref(self)
    }

    fn wake(&self) {
        if rustix::io::write(&self.wake, &1_u64.to_ne_bytes()) == Err(Errno::AGAIN) {
            // The counter is full after 2^64 wakes; reading empties it, and the next write is an event again.
            let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }

    fn run(&self) {
        LOOP_OF_THIS_THREAD.set(self);
        super::wait_for_nothing();
        let mut events = Vec::with_capacity(BATCH);
        loop {
            let sleep = self.timers.lock().fall_asleep(Instant::now());
            self.wait(&mut events, sleep);
            let timers = self.timers.lock().wake_up();
            for event in events.drain(..) {
                let token = event.data.u64();
                if token != WAKE {
                    self.dispatch(token, Readiness(event.flags));
                }
            }
            self.fire(timers);
        }
    }

    /// Waits for events, at most `sleep`, and fills the empty `events`; an interruption leaves them empty.
    fn wait(&self, events: &mut Vec<Event>, sleep: Option<Duration>) {
        if self.broken.load(Ordering::Relaxed) {
            std::thread::sleep(sleep.unwrap_or(BROKEN_TICK).min(BROKEN_TICK));
            return;
        }
        if let Some(sleep) = sleep.filter(|_| !self.coarse.load(Ordering::Relaxed)) {
            match self.wait_precisely(events, sleep) {
                Ok(()) | Err(Errno::INTR) => return,
                Err(_) => self.coarse.store(true, Ordering::Relaxed),
            }
        }
        let timeout = sleep.map(|sleep| {
            let milliseconds = sleep.as_nanos().div_ceil(1_000_000) as i64;
            Timespec { tv_sec: milliseconds / 1000, tv_nsec: (milliseconds % 1000 * 1_000_000) as _ }
        });
        match epoll::wait(&self.epoll, spare_capacity(events), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                tracing::error!(%error, "the event loop lost its epoll descriptor; only timers go on");
                self.broken.store(true, Ordering::Relaxed);
            }
        }
    }

    fn wait_precisely(&self, events: &mut Vec<Event>, sleep: Duration) -> std::result::Result<(), Errno> {
        let timeout = Timespec { tv_sec: sleep.as_secs() as _, tv_nsec: sleep.subsec_nanos() as _ };
        let room = events.spare_capacity_mut();
        // SAFETY: `room` takes that many events in the kernel's layout (the type is rustix's own for this
        // call), `timeout` outlives the call, and without a signal mask its size is not looked at.
        let count = unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait2,
                self.epoll.as_raw_fd(),
                room.as_mut_ptr(),
                room.len() as libc::c_int,
                ptr::from_ref(&timeout),
                ptr::null::<libc::sigset_t>(),
                0_usize,
            )
        };
        match usize::try_from(count) {
            Ok(count) => {
                // SAFETY: the kernel has initialized the first `count` events of the spare room.
                unsafe { events.set_len(events.len() + count) };
                Ok(())
            }
            Err(_) => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)),
        }
    }

    fn dispatch(&self, token: u64, readiness: Readiness) {
        let source = match self.sources.lock().by_token.get(&token) {
            // Removed after the kernel had reported it.
            None => return,
            Some(registration) => registration.source.upgrade(),
        };
        match source {
            None => self.forget(token),
            Some(source) => {
                if let Err(payload) = catch_unwind(AssertUnwindSafe(|| source.ready(readiness))) {
                    let message = panic_message(payload);
                    tracing::error!(%message, "an event source panicked; it is no longer watched");
                    self.forget(token);
                }
            }
        }
    }

    /// Drops a registration whose owner did not remove it itself.
    fn forget(&self, token: u64) {
        let mut sources = self.sources.lock();
        let Some(Registration { fd, .. }) = sources.by_token.remove(&token) else { return };
        // The owner may have closed the descriptor without a word, and its number may belong to a new source.
        if sources.by_token.values().all(|other| other.fd != fd) {
            // SAFETY: used only as a number for this call, which does nothing where the descriptor is closed,
            // or is open as a file that this epoll does not watch.
            let _ = epoll::delete(&self.epoll, unsafe { BorrowedFd::borrow_raw(fd) });
        }
    }

    /// Calls what is due. At most as many as were pending, lest one that comes again at once starve the rest.
    fn fire(&self, pending: usize) {
        if pending == 0 {
            return;
        }
        let now = Instant::now();
        for _ in 0..pending {
            let Some((timer, key)) = self.timers.lock().pop_due(now) else { return };
            if let Some(timer) = timer.upgrade()
                && let Err(payload) = catch_unwind(AssertUnwindSafe(|| timer.fired(key)))
            {
                let message = panic_message(payload);
                tracing::error!(%message, "a timer panicked");
            }
        }
    }
}

fn broken(op: &'static str) -> Error {
    Error::new(
        Kind::Internal,
        op,
        "the event loop lost its epoll descriptor: something in this process closed it",
    )
}

/// Makes the calling thread one that, woken, waits for its turn, in place of taking it from the running thread: usually that is the
/// thread that woke it. It has its fair share all the same, and an idle processor at once.
pub(super) fn be_polite() {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: asks about and changes the calling thread alone; `parameters` outlives the call. A thread that has another
    // policy got it from the program, and keeps it; one that may not change it keeps it too.
    unsafe {
        if libc::sched_getscheduler(0) == libc::SCHED_OTHER {
            libc::sched_setscheduler(0, libc::SCHED_BATCH, &parameters);
        }
    }
}

#[cfg(test)]
mod tests;
