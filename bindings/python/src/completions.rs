//! How Python learns that something has ended: a queue of numbers and an eventfd that says that it is not empty.

use std::future::Future;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pyo3::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use towline::{Error, Kind, NextNotification, Notification};

use crate::errors::OrRaise;
use crate::queue::{Queue, clear, event, signal};
use crate::{owners, process};

/// How often a thread that waits looks whether a signal such as Ctrl-C came in unnoticed.
pub(crate) const ATTENTION: Duration = Duration::from_millis(200);

/// A queue of ends, and the descriptor to watch for them.
#[pyclass(frozen, module = "towline._native")]
pub(crate) struct Completions(Arc<Queue>);

#[pymethods]
impl Completions {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Completions> {
        process::guard(py, "wait")?;
        let queue = Arc::new(Queue::new().or_raise(py)?);
        owners::listen(&queue);
        Ok(Completions(queue))
    }

    /// The descriptor that is readable while something waits to be taken.
    fn fileno(&self) -> RawFd {
        self.0.fileno()
    }

    /// What puts `id` into the queue when it is woken.
    fn waiter(&self, id: u64) -> Waiter {
        Waiter::new(Waker::from(Arc::new(Entry { queue: Arc::clone(&self.0), id })))
    }

    /// The ids that have come since the last call. Also releases memory that nobody uses any more.
    fn take(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        process::guard(py, "wait")?;
        owners::release(py);
        Ok(self.0.take())
    }
}

/// One entry that will come into a queue.
#[pyclass(frozen, module = "towline._native")]
pub(crate) struct Waiter {
    waker: Waker,
    /// The message that it waits for: dropped with it, so that a task that is cancelled leaves nothing behind.
    next: Mutex<Option<NextNotification>>,
}

impl Waiter {
    pub(crate) fn new(waker: Waker) -> Waiter {
        Waiter { waker, next: Mutex::default() }
    }

    pub(crate) fn poll_next(&self, endpoint: &towline::Endpoint) -> Poll<towline::Result<Notification>> {
        let mut next = self.next.lock();
        let next = next.get_or_insert_with(|| endpoint.next_notification());
        Pin::new(next).poll(&mut self.context())
    }

    pub(crate) fn context(&self) -> Context<'_> {
        Context::from_waker(&self.waker)
    }
}

#[pymethods]
impl Waiter {
    /// Puts the entry into the queue now.
    fn wake(&self) {
        self.waker.wake_by_ref();
    }
}

struct Entry {
    queue: Arc<Queue>,
    id: u64,
}

impl Wake for Entry {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.queue.push(self.id);
    }
}

/// Blocks one thread: on a descriptor, so that a signal such as Ctrl-C ends the wait.
struct Parker(OwnedFd);

impl Wake for Parker {
    fn wake(self: Arc<Self>) {
        signal(&self.0);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        signal(&self.0);
    }
}

impl Parker {
    fn current() -> Result<Arc<Parker>, Error> {
        thread_local! {
            static PARKER: std::cell::OnceCell<Arc<Parker>> = const { std::cell::OnceCell::new() };
        }
        PARKER.with(|cell| {
            if let Some(parker) = cell.get() {
                return Ok(Arc::clone(parker));
            }
            let parker = Arc::new(Parker(event()?));
            Ok(Arc::clone(cell.get_or_init(|| parker)))
        })
    }

    /// Blocks until it is woken or a signal comes; false where neither was in time.
    fn park(&self, until: Option<Instant>) -> Result<bool, Error> {
        let left = match until {
            None => None,
            Some(until) => match until.checked_duration_since(Instant::now()) {
                None => return Ok(false),
                Some(left) => Some(Timespec {
                    tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
                    tv_nsec: left.subsec_nanos().into(),
                }),
            },
        };
        let mut waiting = [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN)];
        match poll(&mut waiting, left.as_ref()) {
            Ok(0) => Ok(false),
            Ok(_) => {
                clear(&self.0);
                Ok(true)
            }
            Err(Errno::INTR) => Ok(true),
            Err(error) => Err(Error::os("wait", "poll", error)),
        }
    }
}

/// Blocks the calling thread, without the GIL, until `step` is ready; `None` when that was not in time.
pub(crate) fn block_on<T>(
    py: Python<'_>,
    until: Option<Instant>,
    mut step: impl FnMut(&mut Context<'_>) -> Poll<T>,
) -> PyResult<Option<T>> {
    let parker = Parker::current().or_raise(py)?;
    let waker = Waker::from(Arc::clone(&parker));
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(value) = step(&mut context) {
            return Ok(Some(value));
        }
        // A signal that came just before the wait does not end it.
        py.check_signals()?;
        let look_up = Instant::now() + ATTENTION;
        let sooner = until.is_none_or(|until| look_up < until);
        let in_time = py.detach(|| parker.park(if sooner { Some(look_up) } else { until })).or_raise(py)?;
        if !in_time && !sooner {
            return Ok(match step(&mut context) {
                Poll::Ready(value) => Some(value),
                Poll::Pending => None,
            });
        }
    }
}

/// Waits without the GIL in turns, between which a signal such as Ctrl-C is noticed. `wait` gives `Timeout` where a turn was too
/// short, and goes on waiting when it is called again.
pub(crate) fn in_turns(
    py: Python<'_>,
    within: Duration,
    mut wait: impl FnMut(Duration) -> towline::Result<()> + Send,
) -> PyResult<towline::Result<()>> {
    let started = Instant::now();
    loop {
        let left = within.saturating_sub(started.elapsed());
        match py.detach(|| wait(left.min(ATTENTION))) {
            Err(error) if error.kind() == Kind::Timeout && left > ATTENTION => py.check_signals()?,
            waited => return Ok(waited),
        }
    }
}
