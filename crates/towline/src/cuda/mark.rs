//! Points in the work of a GPU that others wait for.
#![allow(unsafe_code, reason = "passes on streams that the caller vouches for")]

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_sys::cuda::{Event, StreamHandle};

use super::{Gpu, failed};
use crate::{Result, runtime};

const OP: &str = "wait for a stream";

/// For how long a waiting thread looks again and again before it sleeps in between.
const SPIN: Duration = Duration::from_micros(100);
const SHORTEST_PAUSE: Duration = Duration::from_micros(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// A point in a CUDA stream: it has happened when all that was queued there before it is done. Clones are the same point.
#[derive(Clone)]
pub struct Mark(Arc<Inner>);

struct Inner {
    gpu: Arc<Gpu>,
    event: Event,
}

impl Mark {
    /// Marks what is queued in a stream by now. `ordinal` names a GPU, of which the stream need not be.
    ///
    /// # Errors
    /// `Unavailable` without a driver; otherwise what the driver says.
    ///
    /// # Safety
    /// The handle is that of a live stream of this process.
    pub unsafe fn of(stream: StreamHandle, ordinal: u32) -> Result<Mark> {
        let gpu = Gpu::open(ordinal)?;
        let entered = gpu.enter(OP)?;
        // SAFETY: the caller's promise.
        let event = unsafe { entered.mark_foreign(stream) }.map_err(|error| failed(OP, error))?;
        drop(entered);
        Ok(Mark(Arc::new(Inner { gpu, event })))
    }

    /// Lends a stream of that GPU to a borrower, which lets it wait for work of its own, and marks the point behind that: what DLPack
    /// calls the stream of the consumer.
    ///
    /// # Errors
    /// As for [`Mark::of`]. The value is what `lend` has given, also where it is an error of its own.
    pub fn behind<T>(ordinal: u32, lend: impl FnOnce(StreamHandle) -> T) -> Result<(T, Mark)> {
        let gpu = Gpu::open(ordinal)?;
        let stream = {
            let entered = gpu.enter(OP)?;
            entered.stream(0).map_err(|error| failed(OP, error))?
        };
        // The borrower sees the caller's current context.
        let lent = lend(stream.handle());
        // SAFETY: the stream lives to the end of the block. What is in it then still ends.
        let mark = unsafe { Mark::of(stream.handle(), ordinal) }?;
        Ok((lent, mark))
    }

    /// Whether it has happened. Does not wait.
    ///
    /// # Errors
    /// What the driver says, where the work ahead of it has failed.
    pub fn has_happened(&self) -> Result<bool> {
        self.0.event.has_happened().map_err(|error| failed(OP, error))
    }

    /// Waits for it, at most until then; false where it has not happened by that time.
    ///
    /// # Errors
    /// As for [`Mark::has_happened`]; and where this thread must not wait.
    pub fn wait(&self, until: Instant) -> Result<bool> {
        let start = Instant::now();
        loop {
            if self.has_happened()? {
                return Ok(true);
            }
            let now = Instant::now();
            if now >= until {
                return Ok(false);
            }
            if now - start < SPIN {
                std::hint::spin_loop();
                continue;
            }
            runtime::may_block(OP)?;
            std::thread::sleep(pause(now - start).min(until - now));
        }
    }

    /// Makes a stream wait for it, without blocking the host.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// The handle is that of a live stream of this process.
    pub unsafe fn hold(&self, stream: StreamHandle) -> Result<()> {
        let entered = self.0.gpu.enter(OP)?;
        // SAFETY: the caller's promise.
        unsafe { entered.foreign_wait(stream, &self.0.event) }.map_err(|error| failed(OP, error))
    }
}

/// When to look again at what has taken that long.
pub(crate) fn pause(age: Duration) -> Duration {
    (age / 64).clamp(SHORTEST_PAUSE, LONGEST_PAUSE)
}

impl fmt::Debug for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mark").field("gpu", &self.0.gpu.ordinal()).finish_non_exhaustive()
    }
}
