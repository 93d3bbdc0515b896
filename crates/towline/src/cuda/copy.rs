//! Copies on a GPU: few long runs by the driver, many by one kernel; waiting for them.
#![allow(unsafe_code, reason = "hands addresses to the driver")]

use std::ffi::CStr;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use towline_sys::cuda::{Entered, Event, Function, Stream, StreamHandle};

use super::lane::{Lane, Tuning};
use super::{Gpu, failed};
use crate::{Result, runtime};

pub(super) const OP: &str = "copy on a GPU";

/// The kernel, which the driver compiles for the GPU that is there.
const PTX: &CStr = match CStr::from_bytes_with_nul(concat!(include_str!("copy.ptx"), "\0").as_bytes()) {
    Ok(text) => text,
    Err(_) => c"",
};
const KERNEL: &CStr = c"towline_copy";

/// Streams over which requests are spread.
const LANES: usize = 4;
/// Runs between a GPU and the host are worth a call each from this length on: the copy engine is a little faster there.
const LONG_TO_HOST: u64 = 1 << 20;
/// On the GPU they are from this length times their number on.
const LONG: u64 = 512 << 10;
/// How long a waiting thread looks again and again before it sleeps.
const SPIN: Duration = Duration::from_micros(500);
/// How long it lets others run in between: a sleep ends too late for copies that are so short.
const YIELD: Duration = Duration::from_millis(4);
/// How long it sleeps at a time.
const SHORTEST_PAUSE: Duration = Duration::from_micros(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// One run of bytes, by the addresses that the GPU uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Where the bytes are.
    pub from: u64,
    /// Where they go.
    pub to: u64,
    /// How many there are.
    pub len: u64,
}

/// What is known about a copy besides its runs.
#[derive(Debug, Clone, Copy, Default)]
pub struct CopyOptions {
    /// The bytes of all runs together.
    pub bytes: u64,
    /// Whether one side is host memory.
    pub host: bool,
    /// A stream whose work so far ends before the copy begins.
    pub after: Option<StreamHandle>,
}

/// What a GPU needs in order to copy, made when it first does.
#[derive(Default)]
pub(super) struct Engine {
    kernel: Mutex<Option<Function>>,
    lanes: [Mutex<Option<Lane>>; LANES],
    next: std::sync::atomic::AtomicUsize,
    events: Mutex<Vec<Event>>,
    /// Where calls back are queued, so that no copy waits behind one.
    waking: Mutex<Option<Stream>>,
}

impl Gpu {
    /// Starts copying runs, in no order among them. Many are copied by one launch (or a few, where the list is very long).
    ///
    /// The list is written before the call returns, and read by the GPU meanwhile. Runs may have any length and alignment;
    /// where their destinations overlap, which bytes stay is not defined.
    ///
    /// # Errors
    /// What the driver says; then nothing is being copied any more.
    ///
    /// # Safety
    /// Until the copy is done, all runs are valid: memory of this GPU, of one that it [reaches](Gpu::reach), or pinned host
    /// memory, by the addresses that are valid on this GPU. A stream that is named is alive.
    pub unsafe fn copy<I>(self: &Arc<Self>, runs: I, options: &CopyOptions) -> Result<Copying>
    where
        I: IntoIterator<Item = Run>,
        I::IntoIter: ExactSizeIterator + Clone,
    {
        // SAFETY: the caller's promise is the same.
        unsafe { self.copy_tuned(runs, options, None) }
    }

    /// [`Gpu::copy`], by the kernel always, with other settings for its launches.
    ///
    /// # Safety
    /// As for [`Gpu::copy`].
    #[doc(hidden)]
    pub unsafe fn copy_tuned<I>(
        self: &Arc<Self>,
        runs: I,
        options: &CopyOptions,
        tuning: Option<&Tuning>,
    ) -> Result<Copying>
    where
        I: IntoIterator<Item = Run>,
        I::IntoIter: ExactSizeIterator + Clone,
    {
        let runs = runs.into_iter();
        self.start(options, |lane, entered, kernel| {
            if tuning.is_none() && by_driver(runs.len(), options) {
                // SAFETY: the caller's promise.
                return unsafe { lane.plainly(OP, entered, runs) };
            }
            let tuning = tuning.copied().unwrap_or_default();
            // SAFETY: the caller's promise.
            unsafe { lane.by_kernel(OP, entered, &kernel()?, runs, options.bytes, &tuning) }
        })
    }

    /// Lets `work` put a copy into a lane's stream.
    pub(super) fn start(
        self: &Arc<Self>,
        options: &CopyOptions,
        work: impl FnOnce(&mut Lane, &Entered<'_>, &dyn Fn() -> Result<Function>) -> Result<()>,
    ) -> Result<Copying> {
        let entered = self.enter(OP)?;
        let event = self.event(&entered)?;
        self.engine.on_a_lane(self, &entered, |lane| {
            let started = (|| {
                if let Some(stream) = options.after {
                    // SAFETY: who named the stream promised that it is alive.
                    unsafe { entered.wait_for_foreign(stream, &lane.stream) }
                        .map_err(|error| failed(OP, error))?;
                }
                work(lane, &entered, &|| self.engine.kernel(&entered))?;
                lane.stream.record(&entered, &event).map_err(|error| failed(OP, error))
            })();
            // Part of it may be running: an error means that nothing is, so that the caller has its memory back.
            started.inspect_err(|_| {
                lane.synchronize(&entered);
            })
        })?;
        drop(entered);
        Ok(Copying { gpu: Arc::clone(self), event: Some(event) })
    }

    /// Prepares what the first copies would, which takes some milliseconds, and waits for other work of the GPU where the
    /// driver does.
    ///
    /// # Errors
    /// What the driver says, for instance to the kernel.
    pub fn prepare(self: &Arc<Self>) -> Result<()> {
        let entered = self.enter(OP)?;
        self.engine.kernel(&entered)?;
        for lane in &self.engine.lanes {
            let mut lane = lane.lock();
            Engine::made(self, &entered, &mut lane)?.prepare(OP, &entered)?;
        }
        Ok(())
    }

    fn event(&self, entered: &Entered<'_>) -> Result<Event> {
        match self.engine.events.lock().pop() {
            Some(event) => Ok(event),
            None => entered.event().map_err(|error| failed(OP, error)),
        }
    }
}

/// Whether the driver's own copies are better: a call each costs five microseconds, and moves a tenth more in a second.
fn by_driver(runs: usize, options: &CopyOptions) -> bool {
    let enough = if options.host { LONG_TO_HOST } else { LONG.saturating_mul(runs as u64) };
    runs <= 1 || options.bytes / runs as u64 >= enough
}

impl Engine {
    fn kernel(&self, entered: &Entered<'_>) -> Result<Function> {
        let mut kernel = self.kernel.lock();
        if let Some(function) = &*kernel {
            return Ok(function.clone());
        }
        let function = entered.module(PTX).and_then(|module| module.function(KERNEL));
        let function = function.map_err(|error| failed(OP, error))?;
        *kernel = Some(function.clone());
        Ok(function)
    }

    /// Gives one of the lanes to `work`: one that nobody uses now, else the next in turn.
    fn on_a_lane<T>(
        &self,
        gpu: &Arc<Gpu>,
        entered: &Entered<'_>,
        work: impl FnOnce(&mut Lane) -> Result<T>,
    ) -> Result<T> {
        let turn = self.next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let free = (0..LANES).find_map(|step| self.lanes[(turn + step) % LANES].try_lock());
        let mut lane = free.unwrap_or_else(|| self.lanes[turn % LANES].lock());
        work(Engine::made(gpu, entered, &mut lane)?)
    }

    fn made<'a>(gpu: &Arc<Gpu>, entered: &Entered<'_>, lane: &'a mut Option<Lane>) -> Result<&'a mut Lane> {
        match lane {
            Some(lane) => Ok(lane),
            none => Ok(none.insert(Lane::new(gpu, entered).map_err(|error| failed(OP, error))?)),
        }
    }
}

/// A copy that was started. Dropping it does not stop the copy, and does not wait for it.
pub struct Copying {
    gpu: Arc<Gpu>,
    event: Option<Event>,
}

impl Copying {
    fn event(&self) -> &Event {
        // `None` only while the value is being dropped.
        match &self.event {
            Some(event) => event,
            None => unreachable!("a copy keeps its event"),
        }
    }

    /// Whether the bytes are there.
    ///
    /// # Errors
    /// What the driver says: then the context is lost, and nothing is being copied any more.
    pub fn is_done(&self) -> Result<bool> {
        self.event().has_happened().map_err(|error| failed(OP, error))
    }

    /// Waits until the bytes are there, at most until then; false where they are not by that time.
    ///
    /// # Errors
    /// As for [`Copying::is_done`]; and where this thread must not wait.
    pub fn wait(&self, until: Option<Instant>) -> Result<bool> {
        let start = Instant::now();
        loop {
            if self.is_done()? {
                return Ok(true);
            }
            let now = Instant::now();
            if until.is_some_and(|until| now >= until) {
                return Ok(false);
            }
            if now - start > SPIN {
                break;
            }
            std::hint::spin_loop();
        }
        runtime::may_block(OP)?;
        while start.elapsed() < YIELD {
            std::thread::yield_now();
            if self.is_done()? {
                return Ok(true);
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(false);
            }
        }
        // A call back of the driver's comes tenths of a millisecond late, and never where the context is lost. To look again
        // after a sixty-fourth of the time that it has taken costs next to nothing, and is late by no more than that.
        loop {
            let pause = (start.elapsed() / 64).clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
            std::thread::sleep(
                until.map_or(pause, |until| pause.min(until.saturating_duration_since(Instant::now()))),
            );
            if self.is_done()? {
                return Ok(true);
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(false);
            }
        }
    }

    /// Calls back when the bytes are there, on a thread of the driver's. The function must not use CUDA, nor take long. It is
    /// not called where the context is lost.
    ///
    /// # Errors
    /// What the driver says.
    pub fn on_done(&self, function: impl FnOnce() + Send + 'static) -> Result<()> {
        let entered = self.gpu.enter(OP)?;
        let mut waking = self.gpu.engine.waking.lock();
        let run = |waking: &mut Option<Stream>| {
            let stream = match waking {
                Some(stream) => stream,
                none => none.insert(entered.stream(0)?),
            };
            stream.wait(&entered, self.event())?;
            stream.call_back(&entered, function)
        };
        run(&mut waking).map_err(|error| failed(OP, error))
    }

    /// Makes a stream wait for the bytes: what is launched there from now on sees them. The host does not wait.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// The handle is that of a live stream.
    pub unsafe fn hold(&self, stream: StreamHandle) -> Result<()> {
        let entered = self.gpu.enter(OP)?;
        // SAFETY: the caller's promise.
        unsafe { entered.foreign_wait(stream, self.event()) }.map_err(|error| failed(OP, error))
    }
}

impl fmt::Debug for Copying {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Copying").field("gpu", &self.gpu.ordinal()).finish_non_exhaustive()
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        // The waiter for it on the GPU knows which point is meant, so that it can mark another one.
        if let Some(event) = self.event.take() {
            self.gpu.engine.events.lock().push(event);
        }
    }
}
