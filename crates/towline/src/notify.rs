//! Messages that owners get after the bytes are visible.

mod mailbox;

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

pub(crate) use self::mailbox::Mailbox;
use crate::budget::{Account, Budget, Charge};
use crate::identity::Identity;
use crate::{Error, Result, fork};

/// The longest message.
pub const MAX_MESSAGE: usize = 64 * 1024;

/// How many bytes of messages wait at most for an endpoint that does not receive them. A peer that overfills the
/// queue is disconnected, so that a forgotten receiver cannot eat the process's memory.
const MAX_QUEUED: u64 = 64 << 20;

/// A message from a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notification {
    /// Who sent it.
    pub from: Identity,
    /// What was sent.
    pub message: Vec<u8>,
}

impl Notification {
    /// What it takes while it waits.
    pub(crate) fn cost(&self) -> usize {
        self.message.capacity() + self.from.name.capacity() + 2 * size_of::<Queued>() + 64
    }
}

/// A message that waits, and what it takes: of the queue, and of what its session may take.
struct Queued {
    notification: Notification,
    _charges: (Charge, Option<Charge>),
}

/// The messages of a peer on this host.
pub(crate) struct Mail {
    pub(crate) from: Identity,
    pub(crate) mailbox: Mailbox,
    /// Ends the session of a peer whose mailbox makes no sense.
    pub(crate) on_nonsense: Box<dyn Fn(Error) + Send + Sync>,
}

/// The messages that wait to be received.
pub(crate) struct Notifications {
    inner: Mutex<Inner>,
    mail: Mutex<Vec<Weak<Mail>>>,
    /// Messages out of mailboxes since the queue has had its turn.
    taken: AtomicUsize,
    budget: Arc<Budget>,
    /// For those of this process.
    own: Arc<Account>,
}

impl Default for Notifications {
    fn default() -> Notifications {
        let budget = Budget::new("messages that nobody has received", MAX_QUEUED);
        Notifications {
            inner: Mutex::default(),
            mail: Mutex::default(),
            taken: AtomicUsize::new(0),
            own: budget.part(MAX_QUEUED),
            budget,
        }
    }
}

#[derive(Default)]
struct Inner {
    queue: VecDeque<Queued>,
    closed: bool,
    /// Of the futures that wait, each under its own number, so that one that is dropped takes its waker along.
    wakers: HashMap<u64, Waker>,
    next_waker: u64,
}

impl Inner {
    fn pop(&mut self) -> Option<Notification> {
        let queued = self.queue.pop_front()?;
        if self.queue.is_empty() {
            self.queue = VecDeque::new();
        }
        Some(queued.notification)
    }

    /// Keeps the waker of the future that has that number, or gives it one.
    fn wake_later(&mut self, number: &mut Option<u64>, waker: &Waker) {
        let number = *number.get_or_insert_with(|| {
            self.next_waker += 1;
            self.next_waker
        });
        self.wakers.entry(number).and_modify(|kept| kept.clone_from(waker)).or_insert_with(|| waker.clone());
    }
}

impl Notifications {
    /// Looks into that mailbox too, as long as it exists.
    pub(crate) fn subscribe(&self, mail: &Arc<Mail>) {
        let mut all = self.mail.lock();
        all.retain(|one| one.strong_count() > 0);
        all.push(Arc::downgrade(mail));
    }

    /// For what one more peer sends.
    pub(crate) fn account(&self) -> Arc<Account> {
        self.budget.account()
    }

    /// Queues a message, for a peer with what it takes of its share; `Exhausted` when nobody receives them. The caller rings the bell.
    pub(crate) fn queue(
        &self,
        notification: Notification,
        from: Option<(&Arc<Account>, Option<Charge>)>,
    ) -> Result<()> {
        let (account, held) = from.unwrap_or((&self.own, None));
        let charge = account.charge("notify", notification.cost() as u64)?;
        let mut inner = self.inner.lock();
        if inner.closed {
            return Err(Error::owner_gone("notify", "the owner has closed its endpoint"));
        }
        inner.queue.push_back(Queued { notification, _charges: (charge, held) });
        Ok(())
    }

    /// The next message: what has come through mailboxes first, since it is the older; but what has come over sockets has its turn
    /// when each of them has had one.
    pub(crate) fn next(&self) -> Result<Option<Notification>> {
        if let Some(queued) = self.turn_of_the_queue() {
            return Ok(Some(queued));
        }
        let nonsense = {
            let mut nonsense = Vec::new();
            let mut all = self.mail.lock();
            for at in 0..all.len() {
                let Some(mail) = all[at].upgrade() else { continue };
                match mail.mailbox.take() {
                    Ok(Some(message)) => {
                        // The others have their turn before this one has another.
                        all.rotate_left(at + 1);
                        self.taken.fetch_add(1, Ordering::Relaxed);
                        return Ok(Some(Notification { from: mail.from.clone(), message }));
                    }
                    Ok(None) => {}
                    Err(error) => nonsense.push((mail, error)),
                }
            }
            nonsense
        };
        for (mail, error) in nonsense {
            (mail.on_nonsense)(error);
        }
        self.taken.store(0, Ordering::Relaxed);
        let mut inner = self.inner.lock();
        match inner.pop() {
            Some(notification) => Ok(Some(notification)),
            None if inner.closed => Err(Error::invalid("receive", "the endpoint is closed")),
            None => Ok(None),
        }
    }

    /// The first of the queue, where as many messages have come out of mailboxes since the last one as there are mailboxes.
    fn turn_of_the_queue(&self) -> Option<Notification> {
        let taken = self.taken.load(Ordering::Relaxed);
        if taken == 0 || taken < self.mail.lock().len() {
            return None;
        }
        self.taken.store(0, Ordering::Relaxed);
        self.inner.lock().pop()
    }

    /// Keeps what is left in the mailbox of a peer that goes.
    pub(crate) fn empty(&self, mail: &Mail, of: &Arc<Account>) {
        while let Ok(Some(message)) = mail.mailbox.take() {
            if self.queue(Notification { from: mail.from.clone(), message }, Some((of, None))).is_err() {
                return;
            }
        }
    }

    /// Whether futures wait for a message.
    pub(crate) fn awaited(&self) -> bool {
        !self.inner.lock().wakers.is_empty()
    }

    /// Lets futures look again.
    pub(crate) fn wake(&self) {
        let wakers = std::mem::take(&mut self.inner.lock().wakers);
        wakers.into_values().for_each(Waker::wake);
    }

    pub(crate) fn close(&self) {
        self.inner.lock().closed = true;
        self.wake();
    }
}

/// Where messages come in, as their futures see it.
pub(crate) trait Inbox: Send + Sync {
    fn notifications(&self) -> &Notifications;

    /// Lets the event loop listen for peers' rings: needed only while a future waits for a message or a storage is parked. Threads
    /// that wait listen themselves.
    fn listen(self: Arc<Self>);
}

/// The next message, as a future.
#[must_use = "a future does nothing until awaited"]
pub struct NextNotification {
    inbox: Weak<dyn Inbox>,
    /// Its waker's, once it waits.
    number: Option<u64>,
}

impl NextNotification {
    pub(crate) fn of(inbox: Weak<dyn Inbox>) -> NextNotification {
        NextNotification { inbox, number: None }
    }
}

impl Future for NextNotification {
    type Output = Result<Notification>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Notification>> {
        fork::guard("receive")?;
        let Some(inbox) = self.inbox.upgrade() else {
            return Poll::Ready(Err(Error::invalid("receive", "the endpoint is closed")));
        };
        let notifications = inbox.notifications();
        if let Some(next) = notifications.next().transpose() {
            return Poll::Ready(next);
        }
        notifications.inner.lock().wake_later(&mut self.number, cx.waker());
        // Only now does the event loop listen for peers; one may have rung just before.
        Arc::clone(&inbox).listen();
        match notifications.next().transpose() {
            Some(next) => Poll::Ready(next),
            None => Poll::Pending,
        }
    }
}

impl Drop for NextNotification {
    fn drop(&mut self) {
        if let Some(number) = self.number
            && !fork::in_child()
            && let Some(inbox) = self.inbox.upgrade()
        {
            // Dropped without the lock: a waker may run anything when it goes.
            let waker = inbox.notifications().inner.lock().wakers.remove(&number);
            drop(waker);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;
    use crate::{Access, Endpoint, SystemStorage};

    #[test]
    fn futures_that_are_dropped_leave_no_waker_behind() {
        let endpoint = Endpoint::open("patient").unwrap();
        let notifications = &endpoint.core().registry.notifications;
        let mut cx = Context::from_waker(Waker::noop());
        let mut kept = endpoint.next_notification();
        assert!(Pin::new(&mut kept).poll(&mut cx).is_pending());
        for _ in 0..100 {
            let mut dropped = endpoint.next_notification();
            assert!(Pin::new(&mut dropped).poll(&mut cx).is_pending());
            assert!(Pin::new(&mut dropped).poll(&mut cx).is_pending());
            assert_eq!(notifications.inner.lock().wakers.len(), 2);
        }
        assert!(notifications.awaited(), "the one that still waits is kept");
        let region = endpoint.register(SystemStorage::new(8).unwrap(), Access::READ).unwrap();
        let sender = Endpoint::open("sender").unwrap();
        let remote = sender.import(&region.ticket().unwrap()).unwrap();
        sender.notify(&remote, "hello").unwrap().wait().unwrap();
        assert!(Pin::new(&mut kept).poll(&mut cx).is_ready());
        drop(kept);
        assert!(!notifications.awaited());
    }

    #[test]
    fn a_peer_that_fills_its_mailbox_does_not_keep_others_from_being_heard() {
        let notifications = Notifications::default();
        let endpoint = Endpoint::open("anyone").unwrap();
        let someone = endpoint.identity();
        let mail = |name: &str, messages: usize| {
            let (mailbox, _) = Mailbox::create().unwrap();
            for _ in 0..messages {
                assert!(mailbox.put(b"hello"));
            }
            let from = Identity { name: name.into(), ..someone.clone() };
            Arc::new(Mail { from, mailbox, on_nonsense: Box::new(|error| panic!("{error}")) })
        };
        let peers = [mail("loud", 3), mail("quiet", 1), mail("other", 2)];
        peers.iter().for_each(|peer| notifications.subscribe(peer));
        let received: Vec<_> =
            std::iter::from_fn(|| notifications.next().unwrap()).map(|message| message.from.name).collect();
        assert_eq!(received, ["loud", "quiet", "other", "loud", "other", "loud"]);
    }
    #[test]
    fn a_mailbox_that_is_never_empty_does_not_silence_who_sends_over_a_socket() {
        let notifications = Notifications::default();
        let endpoint = Endpoint::open("anyone").unwrap();
        let someone = endpoint.identity();
        let from = |name: &str| Identity { name: name.into(), ..someone.clone() };
        let mail = |name: &str| {
            let (mailbox, _) = Mailbox::create().unwrap();
            assert!(mailbox.put(b"hello"));
            Arc::new(Mail { from: from(name), mailbox, on_nonsense: Box::new(|error| panic!("{error}")) })
        };
        for loud in [1, 2] {
            let loud: Vec<_> = (0..loud).map(|_| mail("loud")).collect();
            loud.iter().for_each(|peer| notifications.subscribe(peer));
            for message in [b"one", b"two"] {
                let queued = Notification { from: from("quiet"), message: message.to_vec() };
                notifications.queue(queued, None).unwrap();
            }
            let mut received = Vec::new();
            for _ in 0..8 {
                let next = notifications.next().unwrap().unwrap();
                if next.from.name == "quiet" {
                    received.push(next.message);
                }
                // A peer that sends through memory is there again immediately.
                loud.iter().for_each(|peer| assert!(peer.mailbox.put(b"again")));
            }
            assert_eq!(received, [b"one", b"two"], "beside {} that are loud", loud.len());
        }
    }
}
