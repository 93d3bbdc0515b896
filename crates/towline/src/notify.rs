//! Messages that owners get after the bytes are visible.

mod mailbox;

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Waker};

pub(crate) use self::mailbox::Mailbox;
use crate::endpoint::EndpointCore;
use crate::identity::Identity;
use crate::sync::lock;
use crate::{Error, Kind, Result, fork};

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

/// The messages of a peer on this host.
pub(crate) struct Mail {
    pub(crate) from: Identity,
    pub(crate) mailbox: Mailbox,
    /// Ends the session of a peer whose mailbox makes no sense.
    pub(crate) on_nonsense: Box<dyn Fn(Error) + Send + Sync>,
}

/// The messages that wait to be received.
#[derive(Default)]
pub(crate) struct Notifications {
    inner: Mutex<Inner>,
    mail: Mutex<Vec<Weak<Mail>>>,
}

#[derive(Default)]
struct Inner {
    queue: VecDeque<Notification>,
    bytes: usize,
    closed: bool,
    wakers: Vec<Waker>,
}

impl Notifications {
    /// Looks into that mailbox too, as long as it exists.
    pub(crate) fn subscribe(&self, mail: &Arc<Mail>) {
        let mut all = lock(&self.mail);
        all.retain(|one| one.strong_count() > 0);
        all.push(Arc::downgrade(mail));
    }

    /// Queues a message; `Exhausted` when nobody receives them. The caller rings the bell.
    pub(crate) fn queue(&self, notification: Notification) -> Result<()> {
        let mut inner = lock(&self.inner);
        if inner.closed {
            return Err(Error::new(Kind::Disconnected, "notify", "the endpoint is closed"));
        }
        let cost = cost(&notification);
        if inner.bytes + cost > MAX_QUEUED {
            return Err(Error::new(
                Kind::Exhausted,
                "notify",
                format!("{} messages wait to be received and fill the queue", inner.queue.len()),
            ));
        }
        inner.bytes += cost;
        inner.queue.push_back(notification);
        Ok(())
    }

    /// The next message: what has come through mailboxes first, since it is the older.
    pub(crate) fn next(&self) -> Result<Option<Notification>> {
        let nonsense = {
            let mut nonsense = Vec::new();
            for mail in lock(&self.mail).iter().filter_map(Weak::upgrade) {
                match mail.mailbox.take() {
                    Ok(Some(message)) => return Ok(Some(Notification { from: mail.from.clone(), message })),
                    Ok(None) => {}
                    Err(error) => nonsense.push((mail, error)),
                }
            }
            nonsense
        };
        for (mail, error) in nonsense {
            (mail.on_nonsense)(error);
        }
        let mut inner = lock(&self.inner);
        match inner.queue.pop_front() {
            Some(notification) => {
                inner.bytes -= cost(&notification);
                Ok(Some(notification))
            }
            None if inner.closed => Err(Error::invalid("receive", "the endpoint is closed")),
            None => Ok(None),
        }
    }

    /// Keeps what is left in the mailbox of a peer that goes.
    pub(crate) fn empty(&self, mail: &Mail) {
        while let Ok(Some(message)) = mail.mailbox.take() {
            if self.queue(Notification { from: mail.from.clone(), message }).is_err() {
                return;
            }
        }
    }

    /// Whether futures wait for a message.
    pub(crate) fn awaited(&self) -> bool {
        !lock(&self.inner).wakers.is_empty()
    }

    /// Lets futures look again.
    pub(crate) fn wake(&self) {
        let wakers = std::mem::take(&mut lock(&self.inner).wakers);
        wakers.into_iter().for_each(Waker::wake);
    }

    pub(crate) fn close(&self) {
        lock(&self.inner).closed = true;
        self.wake();
    }
}

fn cost(notification: &Notification) -> usize {
    notification.message.len() + 64
}

/// The next message, as a future.
#[must_use = "a future does nothing until awaited"]
pub struct NextNotification<'a>(pub(crate) &'a Arc<EndpointCore>);

impl Future for NextNotification<'_> {
    type Output = Result<Notification>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Notification>> {
        fork::guard("receive")?;
        let notifications = &self.0.notifications;
        if let Some(next) = notifications.next().transpose() {
            return Poll::Ready(next);
        }
        {
            let mut inner = lock(&notifications.inner);
            if !inner.wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
                inner.wakers.push(cx.waker().clone());
            }
        }
        // Only now does the event loop listen for peers; one may have rung just before.
        self.0.listen_to_bell();
        match notifications.next().transpose() {
            Some(next) => Poll::Ready(next),
            None => Poll::Pending,
        }
    }
}
