//! How something ended, once, and who waits for it.

use std::task::{Context, Poll, Waker};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use crate::{Result, interrupt, runtime};

/// The end of something. The first end is the only one.
///
/// Either any number of tasks and threads wait for it, and each gets a copy; or one waits, which takes it.
pub struct Completion<T> {
    inner: Mutex<Inner<T>>,
    ended: Condvar,
}

struct Inner<T> {
    end: Option<T>,
    /// It has ended, or nobody wants to know any more.
    over: bool,
    wakers: Vec<Waker>,
}

impl<T> Default for Completion<T> {
    fn default() -> Completion<T> {
        let inner = Inner { end: None, over: false, wakers: Vec::new() };
        Completion { inner: Mutex::new(inner), ended: Condvar::new() }
    }
}

impl<T> Completion<T> {
    /// Ends it. Where it had ended before, or nobody wants to know any more, this changes nothing and comes back.
    pub fn set(&self, end: T) -> Result<(), T> {
        let mut inner = self.inner.lock();
        if inner.over {
            return Err(end);
        }
        (inner.end, inner.over) = (Some(end), true);
        let wakers = std::mem::take(&mut inner.wakers);
        drop(inner);
        self.ended.notify_all();
        wakers.into_iter().for_each(Waker::wake);
        Ok(())
    }

    /// Wakes the tasks that wait, so that they look again.
    pub fn wake(&self) {
        let wakers = std::mem::take(&mut self.inner.lock().wakers);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Whether some task waits for it.
    pub fn is_awaited(&self) -> bool {
        !self.inner.lock().wakers.is_empty()
    }

    /// Nobody wants to know any more. The end, where it was there and nobody had taken it.
    pub fn abandon(&self) -> Option<T> {
        let mut inner = self.inner.lock();
        inner.over = true;
        inner.wakers.clear();
        inner.end.take()
    }

    /// Whether it is there; until then that task, and no other, is woken by it.
    pub fn is_there(&self, cx: &mut Context<'_>) -> bool {
        self.look(cx, |end| end.as_ref().map(|_| ())).is_ready()
    }

    /// Takes it; until it is there, that task, and no other, is woken by it.
    pub fn poll_take(&self, cx: &mut Context<'_>) -> Poll<T> {
        self.look(cx, Option::take)
    }

    fn look<R>(&self, cx: &mut Context<'_>, look: impl FnOnce(&mut Option<T>) -> Option<R>) -> Poll<R> {
        let mut inner = self.inner.lock();
        look(&mut inner.end).map_or_else(
            || {
                inner.wakers.clear();
                inner.wakers.push(cx.waker().clone());
                Poll::Pending
            },
            Poll::Ready,
        )
    }

    /// Takes it; `None` where it is not there by then. The caller of this thread can end the wait.
    pub fn take(&self, op: &'static str, until: Instant) -> Result<Option<T>> {
        loop {
            let now = Instant::now();
            let turn = now + interrupt::turn(until.saturating_duration_since(now));
            let end = self.wait_with(Some(turn), Option::take);
            if end.is_some() || turn >= until {
                return Ok(end);
            }
            interrupt::check(op)?;
        }
    }

    fn wait_with<R>(&self, until: Option<Instant>, look: impl Fn(&mut Option<T>) -> Option<R>) -> Option<R> {
        let mut inner = self.inner.lock();
        loop {
            if let Some(found) = look(&mut inner.end) {
                return Some(found);
            }
            match until {
                None => self.ended.wait(&mut inner),
                Some(until) => {
                    let left = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
                    self.ended.wait_for(&mut inner, left);
                }
            }
        }
    }
}

impl<T: Clone> Completion<T> {
    /// How it ended, or `None` while it has not.
    pub fn result(&self) -> Option<T> {
        self.inner.lock().end.clone()
    }

    /// How it ended; until then that task is woken by it, beside the others.
    pub fn poll(&self, cx: &mut Context<'_>) -> Poll<T> {
        let mut inner = self.inner.lock();
        if let Some(end) = &inner.end {
            return Poll::Ready(end.clone());
        }
        if !inner.wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
            inner.wakers.push(cx.waker().clone());
        }
        Poll::Pending
    }

    /// Waits, at most until then; `None` where it has not ended by that time.
    pub fn wait_until(&self, until: Option<Instant>) -> Option<T> {
        self.wait_with(until, |end| end.clone())
    }
}

impl<T: Clone> Completion<Result<T>> {
    /// [`wait_until`](Self::wait_until), on a thread that may block.
    pub(crate) fn wait(&self, op: &'static str, until: Option<Instant>) -> Option<Result<T>> {
        match runtime::may_block(op) {
            Ok(()) => self.wait_until(until),
            Err(error) => Some(self.result().unwrap_or(Err(error))),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;
    use std::time::Duration;

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn the_first_end_stays_and_wakes_each_waiter_once() {
        let completion = Completion::default();
        let (one, other) = (Arc::new(Count::default()), Arc::new(Count::default()));
        for waker in [Waker::from(Arc::clone(&one)), Waker::from(Arc::clone(&other))] {
            for _ in 0..3 {
                assert!(completion.poll(&mut Context::from_waker(&waker)).is_pending());
            }
        }
        assert_eq!(completion.set("first"), Ok(()));
        assert_eq!(completion.set("late"), Err("late"), "it comes back to who set it");
        assert_eq!(completion.result(), Some("first"));
        assert_eq!((one.0.load(Ordering::SeqCst), other.0.load(Ordering::SeqCst)), (1, 1));
    }

    #[test]
    fn a_thread_that_waits_gives_up_in_time_or_gets_the_end() {
        let completion = Arc::new(Completion::<Result<()>>::default());
        assert!(completion.wait("read", Some(Instant::now() + Duration::from_millis(2))).is_none());
        let waiting = std::thread::spawn({
            let completion = Arc::clone(&completion);
            move || completion.wait("read", None)
        });
        completion.set(Ok(())).unwrap();
        assert!(waiting.join().unwrap().unwrap().is_ok());
    }

    #[test]
    fn one_who_takes_the_end_is_woken_where_it_asked_last() {
        let completion = Completion::default();
        let (one, other) = (Arc::new(Count::default()), Arc::new(Count::default()));
        for count in [&one, &other] {
            let waker = Waker::from(Arc::clone(count));
            assert!(completion.poll_take(&mut Context::from_waker(&waker)).is_pending());
        }
        completion.wake();
        assert!(!completion.is_awaited(), "it has to ask again");
        let waker = Waker::from(Arc::clone(&other));
        let mut cx = Context::from_waker(&waker);
        assert!(!completion.is_there(&mut cx));
        completion.set(7).unwrap();
        assert!(completion.is_there(&mut cx));
        assert_eq!(completion.poll_take(&mut cx), Poll::Ready(7));
        assert!(completion.poll_take(&mut cx).is_pending(), "it is there once");
        assert_eq!((one.0.load(Ordering::SeqCst), other.0.load(Ordering::SeqCst)), (0, 2));
    }

    #[test]
    fn an_end_that_nobody_wants_any_more_comes_back_from_either_side() {
        let (early, late) = (Completion::default(), Completion::default());
        early.set(1).unwrap();
        assert_eq!((early.abandon(), late.abandon()), (Some(1), None));
        assert_eq!((early.set(2), late.set(2)), (Err(2), Err(2)));
        assert_eq!(late.take("import", Instant::now()).unwrap(), None);
    }

    #[test]
    fn a_wait_that_takes_the_end_can_be_ended_by_its_caller() {
        let completion = Completion::<u32>::default();
        let far = Instant::now() + Duration::from_secs(600);
        let error = interrupt::interruptible(|| true, || completion.take("import", far)).unwrap_err();
        assert_eq!(error.kind(), crate::Kind::Canceled);
        completion.set(3).unwrap();
        assert_eq!(interrupt::interruptible(|| true, || completion.take("import", far)).unwrap(), Some(3));
    }
}
