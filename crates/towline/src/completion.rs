//! How something ended, once, and who waits for it.

use std::task::{Context, Poll, Waker};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use crate::{Result, runtime};

/// The end of something, for any number of tasks and threads that wait for it. The first end is the only one.
#[derive(Default)]
pub(crate) struct Completion {
    inner: Mutex<Inner>,
    ended: Condvar,
}

#[derive(Default)]
struct Inner {
    result: Option<Result<()>>,
    wakers: Vec<Waker>,
}

impl Completion {
    /// Ends it; false where it had ended before, which changes nothing.
    pub(crate) fn set(&self, result: Result<()>) -> bool {
        let wakers = {
            let mut inner = self.inner.lock();
            if inner.result.is_some() {
                return false;
            }
            inner.result = Some(result);
            std::mem::take(&mut inner.wakers)
        };
        self.ended.notify_all();
        wakers.into_iter().for_each(Waker::wake);
        true
    }

    pub(crate) fn result(&self) -> Option<Result<()>> {
        self.inner.lock().result.clone()
    }

    pub(crate) fn poll(&self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let mut inner = self.inner.lock();
        if let Some(result) = &inner.result {
            return Poll::Ready(result.clone());
        }
        if !inner.wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
            inner.wakers.push(cx.waker().clone());
        }
        Poll::Pending
    }

    /// Waits, at most until then; `None` where it has not ended by that time.
    pub(crate) fn wait(&self, op: &'static str, until: Option<Instant>) -> Option<Result<()>> {
        if let Err(error) = runtime::may_block(op) {
            return Some(self.result().unwrap_or(Err(error)));
        }
        let mut inner = self.inner.lock();
        loop {
            if let Some(result) = &inner.result {
                return Some(result.clone());
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;
    use std::time::Duration;

    use super::*;
    use crate::{Error, Kind};

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
        assert!(completion.set(Ok(())));
        assert!(!completion.set(Err(Error::new(Kind::Canceled, "read", "late"))));
        assert!(completion.result().unwrap().is_ok());
        assert_eq!((one.0.load(Ordering::SeqCst), other.0.load(Ordering::SeqCst)), (1, 1));
    }

    #[test]
    fn a_thread_that_waits_gives_up_in_time_or_gets_the_end() {
        let completion = Arc::new(Completion::default());
        assert!(completion.wait("read", Some(Instant::now() + Duration::from_millis(2))).is_none());
        let waiting = std::thread::spawn({
            let completion = Arc::clone(&completion);
            move || completion.wait("read", None)
        });
        completion.set(Ok(()));
        assert!(waiting.join().unwrap().unwrap().is_ok());
    }
}
