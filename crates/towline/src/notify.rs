//! Messages that owners get after the bytes are visible.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Condvar, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::identity::Identity;
use crate::sync::lock;
use crate::{Error, Kind, Result};

/// The longest message.
pub const MAX_MESSAGE: usize = 64 * 1024;

/// How many bytes of messages wait at most for an endpoint that does not receive them. A peer that overfills the
/// queue is disconnected, so that a forgotten receiver cannot eat the process's memory.
const MAX_QUEUED: usize = 64 << 20;

/// A message from a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notification {
    /// Who sent it.
    pub from: Identity,
    /// What was sent.
    pub message: Vec<u8>,
}

/// The messages that wait to be received.
pub(crate) struct Notifications {
    inner: Mutex<Inner>,
    arrived: Condvar,
}

struct Inner {
    queue: VecDeque<Notification>,
    bytes: usize,
    closed: bool,
    wakers: Vec<Waker>,
}

impl Notifications {
    pub(crate) fn new() -> Notifications {
        Notifications {
            inner: Mutex::new(Inner { queue: VecDeque::new(), bytes: 0, closed: false, wakers: Vec::new() }),
            arrived: Condvar::new(),
        }
    }

    /// Queues a message; `Exhausted` when nobody receives them.
    pub(crate) fn deliver(&self, notification: Notification) -> Result<()> {
        let wakers = {
            let mut inner = lock(&self.inner);
            if inner.closed {
                return Err(Error::new(Kind::Disconnected, "notify", "the endpoint is closed"));
            }
            let cost = notification.message.len() + 64;
            if inner.bytes + cost > MAX_QUEUED {
                return Err(Error::new(
                    Kind::Exhausted,
                    "notify",
                    format!("{} messages wait to be received and fill the queue", inner.queue.len()),
                ));
            }
            inner.bytes += cost;
            inner.queue.push_back(notification);
            std::mem::take(&mut inner.wakers)
        };
        self.arrived.notify_one();
        wakers.into_iter().for_each(Waker::wake);
        Ok(())
    }

    pub(crate) fn try_next(&self) -> Option<Notification> {
        lock(&self.inner).pop()
    }

    pub(crate) fn wait(&self, time: Duration) -> Result<Notification> {
        let until = Instant::now() + time;
        let mut inner = lock(&self.inner);
        loop {
            if let Some(notification) = inner.pop() {
                return Ok(notification);
            }
            if inner.closed {
                return Err(Error::invalid("receive", "the endpoint is closed"));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::new(
                    Kind::Timeout,
                    "receive",
                    format!("no notification came in {:.3} s", time.as_secs_f64()),
                ));
            }
            inner =
                self.arrived.wait_timeout(inner, left).unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }

    pub(crate) fn close(&self) {
        let wakers = {
            let mut inner = lock(&self.inner);
            inner.closed = true;
            std::mem::take(&mut inner.wakers)
        };
        self.arrived.notify_all();
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl Inner {
    fn pop(&mut self) -> Option<Notification> {
        let notification = self.queue.pop_front()?;
        self.bytes -= notification.message.len() + 64;
        Some(notification)
    }
}

/// The next message, as a future.
pub struct NextNotification<'a>(pub(crate) &'a Notifications);

impl Future for NextNotification<'_> {
    type Output = Result<Notification>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Notification>> {
        let mut inner = lock(&self.0.inner);
        if let Some(notification) = inner.pop() {
            return Poll::Ready(Ok(notification));
        }
        if inner.closed {
            return Poll::Ready(Err(Error::invalid("receive", "the endpoint is closed")));
        }
        if !inner.wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
            inner.wakers.push(cx.waker().clone());
        }
        Poll::Pending
    }
}
