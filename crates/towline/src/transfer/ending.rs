//! How a transfer ends: it is stopped, delivers its end once, and is quiet then or later; who waits for that, and the limits.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::TransferCore;
use super::core::Inner;
use crate::region::RegionUse;
use crate::runtime::{self, Timer};
use crate::{Error, Kind, Result, fork};

/// A caller that waits for less than this does not help: what it takes on may last longer.
const LEAST_HELPFUL: Duration = Duration::from_secs(1);

impl TransferCore {
    /// Stops it: the path makes it quiet, then it ends with that error.
    pub(crate) fn stop(self: &Arc<Self>, error: Error) {
        let error = self.dress(error);
        if !self.inner.lock().state.stop(error) {
            // Every unit has reported, but a frame or a sink still names the memory: the path takes it back.
            if self.is_held() {
                self.stop_link();
            }
            return;
        }
        let _ = self.stopped_at.set(Instant::now());
        self.stopped.store(true, Ordering::Release);
        if self.will_not_launch() {
            return self.whole_failed(self.stop_error());
        }
        self.stop_link();
    }

    /// Delivers the end, once: when every unit has reported and nothing names the local memory any more.
    pub(super) fn deliver(&self) {
        let (result, failures, timer) = {
            let mut inner = self.inner.lock();
            match inner.state.ended() {
                Some(result) if !inner.delivering && !self.is_held() => {
                    let end = (result.clone(), inner.state.failures().to_vec(), inner.timer);
                    inner.delivering = true;
                    end
                }
                _ => return,
            }
        };
        self.release_quiet();
        runtime::forget(timer);
        (self.on_end)(&result, &failures);
        self.span.in_scope(|| match &result {
            Ok(()) => tracing::debug!("ended well"),
            Err(error) => tracing::debug!(%error, "ended"),
        });
        let wakers = {
            let mut inner = self.inner.lock();
            inner.released = true;
            std::mem::take(&mut inner.wakers)
        };
        self.ended.notify_all();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// An engine has begun something that it may not let go of in time. Before the unit's report.
    pub(crate) fn engaged(&self) {
        if let Some(above) = &self.above {
            above.engaged();
        }
        self.held_by_engine.fetch_add(1, Ordering::AcqRel);
    }

    /// It has let go: nothing of that touches the local memory any more. Before the unit's report, unless that came early.
    pub(crate) fn let_go(&self) {
        if let Some(above) = &self.above {
            above.let_go();
        }
        if self.held_by_engine.fetch_sub(1, Ordering::AcqRel) == 1
            && self.inner.lock().state.ended().is_some()
        {
            self.release_quiet();
            drop(self.inner.lock());
            self.ended.notify_all();
        }
    }

    /// The owner is in the middle of a request that it will never answer. Before the unit's report.
    pub(crate) fn add_outstanding(&self) {
        if let Some(above) = &self.above {
            above.add_outstanding();
        }
        self.outstanding.fetch_add(1, Ordering::AcqRel);
    }

    /// The owner has left that request.
    pub(crate) fn remove_outstanding(&self) {
        if let Some(above) = &self.above {
            above.remove_outstanding();
        }
        if self.outstanding.fetch_sub(1, Ordering::AcqRel) == 1 {
            drop(self.inner.lock());
            self.ended.notify_all();
        }
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.held_by_engine.load(Ordering::Acquire) == 0 && self.outstanding.load(Ordering::Acquire) == 0
    }

    /// Gives the local memory back, once nothing touches it.
    fn release_quiet(&self) {
        if self.held_by_engine.load(Ordering::Acquire) == 0 && !self.is_held() {
            self.parts.iter().filter_map(|part| part.local.as_ref()).for_each(RegionUse::release);
        }
    }

    pub(super) fn wait_quiet(&self, until: Instant) -> bool {
        let mut inner = self.inner.lock();
        while !self.is_quiet() {
            let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
            else {
                return false;
            };
            self.ended.wait_for(&mut inner, left);
        }
        true
    }

    /// How it ended; in a forked child, where its locks may never open again, the reason for that.
    pub(super) fn end(&self) -> Option<Result<()>> {
        match fork::guard(self.op.name()) {
            Ok(()) => self.inner.lock().end().cloned(),
            Err(error) => Some(Err(error)),
        }
    }

    pub(super) fn wait(self: &Arc<Self>, until: Option<Instant>) -> Option<Result<()>> {
        if let Err(error) = fork::guard(self.op.name()).and_then(|()| runtime::may_block(self.op.name())) {
            return Some(Err(error));
        }
        if until.is_none_or(|until| until >= runtime::later(Instant::now(), LEAST_HELPFUL)) {
            self.launch();
            self.take_part();
        }
        let mut inner = self.inner.lock();
        loop {
            if let Some(result) = inner.end() {
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

    pub(super) fn next_check(&self, inner: &Inner) -> Instant {
        let stalled = runtime::later(inner.last_progress, self.limits.no_progress);
        let over = runtime::later(inner.started, self.limits.total_for(self.bytes));
        stalled.min(over)
    }

    /// Has the limits looked at then.
    pub(super) fn check_at(self: &Arc<Self>, inner: &mut Inner, when: Instant) {
        inner.timer = runtime::call_at(when, self, 0);
    }
}

impl Timer for TransferCore {
    fn fired(self: Arc<Self>, _key: u64) {
        let now = Instant::now();
        let error = {
            let mut inner = self.inner.lock();
            if inner.state.ended().is_some() {
                let delivered = inner.delivering;
                drop(inner);
                if !delivered {
                    self.deliver();
                }
                if !delivered && self.is_held() {
                    self.stop_link();
                }
                return;
            }
            let next = self.next_check(&inner);
            if now < next {
                return self.check_at(&mut inner, next);
            }
            let stalled = now.duration_since(inner.last_progress);
            let moved = inner.state.bytes();
            Error::new(
                Kind::Timeout,
                self.op.name(),
                format!(
                    "{moved} of {} bytes moved in {:.3} s, nothing in the last {:.3} s",
                    self.bytes,
                    now.duration_since(inner.started).as_secs_f64(),
                    stalled.as_secs_f64()
                ),
            )
        };
        self.stop(error);
    }
}
