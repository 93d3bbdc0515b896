//! Work in order: streams, events, kernels, calls back.
#![allow(unsafe_code, reason = "foreign calls")]

use std::ffi::{CStr, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Arc;

use super::api::{RawEvent, RawFunction, RawModule, RawStream};
use super::{Context, Entered};
use crate::{Error, Result};

const NON_BLOCKING: c_uint = 1;
const DISABLE_TIMING: c_uint = 2;

/// A stream of another owner, by the driver's handle for it.
///
/// 0 and 1 are the default stream, 2 the calling thread's default stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamHandle(pub usize);

impl StreamHandle {
    fn raw(self) -> RawStream {
        ptr::without_provenance_mut(self.0)
    }
}

/// A stream, destroyed with the value; work that is in it then still ends.
#[derive(Debug)]
pub struct Stream {
    context: Context,
    raw: RawStream,
}

// SAFETY: the driver's streams may be used by any thread, also by several at once.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(entered) = self.context.enter() {
            // SAFETY: the stream is this value's alone. A refusal leaves it to the end of the process.
            unsafe { (entered.api().destroy_stream)(self.raw) };
        }
    }
}

impl Entered<'_> {
    /// Makes a stream that does not wait for the default stream; a lower number goes first.
    pub fn stream(&self, priority: i32) -> Result<Stream> {
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` outlives the call.
        let answer = unsafe { (self.api().create_stream)(&mut raw, NON_BLOCKING, priority) };
        self.api().check("cuStreamCreateWithPriority", answer)?;
        Ok(Stream { context: self.context().clone(), raw })
    }

    /// Makes an event.
    pub fn event(&self) -> Result<Event> {
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` outlives the call.
        self.api().check("cuEventCreate", unsafe { (self.api().create_event)(&mut raw, DISABLE_TIMING) })?;
        Ok(Event { context: self.context().clone(), raw })
    }

    /// Compiles a module from PTX; the driver's own words are in the error.
    pub fn module(&self, ptx: &CStr) -> Result<Module> {
        const ERROR_LOG: c_uint = 5;
        const ERROR_LOG_SIZE: c_uint = 6;
        let mut raw = ptr::null_mut();
        let mut log = [0u8; 2048];
        let mut names = [ERROR_LOG, ERROR_LOG_SIZE];
        let mut values: [*mut c_void; 2] =
            [log.as_mut_ptr().cast(), ptr::without_provenance_mut(log.len() - 1)];
        // SAFETY: everything outlives the call, and the log is as long as is said.
        let answer = unsafe {
            (self.api().load_module)(
                &mut raw,
                ptx.as_ptr().cast(),
                2,
                names.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        if let Err(error) = self.api().check("cuModuleLoadDataEx", answer) {
            let said = CStr::from_bytes_until_nul(&log).map(CStr::to_string_lossy).unwrap_or_default();
            let said = said.trim();
            return Err(match error {
                error if said.is_empty() => error,
                error => Error::argument("cuModuleLoadDataEx", format!("{error}: {said}")),
            });
        }
        Ok(Module(Arc::new(Code { context: self.context().clone(), raw })))
    }

    /// Lets a stream of another owner wait for an event, without blocking the host.
    ///
    /// # Safety
    /// The handle is that of a live stream.
    pub unsafe fn foreign_wait(&self, stream: StreamHandle, event: &Event) -> Result<()> {
        // SAFETY: the event is alive; the stream is by the caller's promise.
        let answer = unsafe { (self.api().stream_wait)(stream.raw(), event.raw, 0) };
        self.api().check("cuStreamWaitEvent", answer)
    }

    /// Puts a copy between addresses of the device into a stream of another owner.
    ///
    /// # Safety
    /// The handle is that of a live stream, and both ranges are valid until it has got past the copy.
    pub unsafe fn copy_foreign(&self, stream: StreamHandle, to: u64, from: u64, len: usize) -> Result<()> {
        // SAFETY: the caller's promise. BYTES MOVE HERE
        self.api().check("cuMemcpyAsync", unsafe { (self.api().copy)(to, from, len, stream.raw()) })
    }

    /// Records an event in a stream of another owner, which is of this context.
    ///
    /// # Safety
    /// The handle is that of a live stream.
    pub unsafe fn record_foreign(&self, stream: StreamHandle, event: &Event) -> Result<()> {
        // SAFETY: the event is alive; the stream is by the caller's promise.
        self.api().check("cuEventRecord", unsafe { (self.api().record)(event.raw, stream.raw()) })
    }

    /// Lets `waiting` wait for what is in a stream of another owner by now, also where that is of another context.
    ///
    /// # Safety
    /// The handle is that of a live stream.
    pub unsafe fn wait_for_foreign(&self, stream: StreamHandle, waiting: &Stream) -> Result<()> {
        // SAFETY: the caller's promise. The driver puts off the event's end until it has happened.
        let event = unsafe { self.mark_foreign(stream) }?;
        waiting.wait(self, &event)
    }

    /// Makes an event of the point that a stream of another owner has come to, also where that is of another context.
    ///
    /// # Safety
    /// The handle is that of a live stream.
    pub unsafe fn mark_foreign(&self, stream: StreamHandle) -> Result<Event> {
        let api = self.api();
        let mut context = ptr::null_mut();
        // SAFETY: `context` outlives the call; the stream is alive by the caller's promise.
        let answer = unsafe { (api.stream_context)(stream.raw(), &mut context) };
        api.check("cuStreamGetCtx", answer)?;
        // An event is recorded in the context in which it was made.
        // SAFETY: the context of a live stream is alive.
        api.check("cuCtxPushCurrent_v2", unsafe { (api.push_context)(context) })?;
        let mut raw: RawEvent = ptr::null_mut();
        // SAFETY: as above; the stream is alive by the caller's promise.
        let answers = unsafe {
            let created = (api.create_event)(&mut raw, DISABLE_TIMING);
            let recorded = if created == 0 { (api.record)(raw, stream.raw()) } else { 0 };
            let mut popped = ptr::null_mut();
            (api.pop_context)(&mut popped);
            (created, recorded)
        };
        api.check("cuEventCreate", answers.0)?;
        // Destroyed with the value, in whichever context: the driver knows whose it is.
        let event = Event { context: self.context().clone(), raw };
        api.check("cuEventRecord", answers.1)?;
        Ok(event)
    }
}

impl Stream {
    /// The driver's handle for it.
    pub fn handle(&self) -> StreamHandle {
        StreamHandle(self.raw.addr())
    }

    /// Copies between any two addresses that the driver knows; host memory that is not pinned is copied before it returns.
    ///
    /// # Safety
    /// Both ranges are valid until the work has ended.
    pub unsafe fn copy(&self, entered: &Entered<'_>, to: u64, from: u64, len: usize) -> Result<()> {
        let api = entered.api();
        // SAFETY: the caller's promise.
        api.check("cuMemcpyAsync", unsafe { (api.copy)(to, from, len, self.raw) })
    }

    /// Sets bytes.
    ///
    /// # Safety
    /// The range is valid until the work has ended.
    pub unsafe fn fill(&self, entered: &Entered<'_>, to: u64, value: u8, len: usize) -> Result<()> {
        let api = entered.api();
        // SAFETY: the caller's promise.
        api.check("cuMemsetD8Async", unsafe { (api.fill)(to, value, len, self.raw) })
    }

    /// Starts a kernel; `arguments` point to its parameters in order.
    ///
    /// # Safety
    /// The arguments are those that the kernel takes, and all that it touches is valid until the work has ended.
    pub unsafe fn launch(
        &self,
        entered: &Entered<'_>,
        function: &Function,
        blocks: u32,
        threads: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let api = entered.api();
        // SAFETY: the caller's promise; the driver copies the arguments before it returns.
        let answer = unsafe {
            (api.launch)(
                function.raw,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                self.raw,
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        api.check("cuLaunchKernel", answer)
    }

    /// Records an event: it happens when all that is in the stream by now has ended.
    pub fn record(&self, entered: &Entered<'_>, event: &Event) -> Result<()> {
        let api = entered.api();
        // SAFETY: both are alive.
        api.check("cuEventRecord", unsafe { (api.record)(event.raw, self.raw) })
    }

    /// Lets what comes later wait for an event.
    pub fn wait(&self, entered: &Entered<'_>, event: &Event) -> Result<()> {
        let api = entered.api();
        // SAFETY: both are alive.
        api.check("cuStreamWaitEvent", unsafe { (api.stream_wait)(self.raw, event.raw, 0) })
    }

    /// Calls back, on a thread of the driver's, when all that is in the stream by now has ended.
    ///
    /// The function must not call the driver. It is not called where the context is lost.
    pub fn call_back(&self, entered: &Entered<'_>, function: impl FnOnce() + Send + 'static) -> Result<()> {
        unsafe extern "C" fn run(data: *mut c_void) {
            // SAFETY: made below from a box, for one call.
            let function = unsafe { Box::from_raw(data.cast::<Box<dyn FnOnce() + Send>>()) };
            // The driver is no Rust code: nothing may unwind into it.
            let _ = catch_unwind(AssertUnwindSafe(function));
        }
        let boxed: Box<Box<dyn FnOnce() + Send>> = Box::new(Box::new(function));
        let data = Box::into_raw(boxed).cast();
        let api = entered.api();
        // SAFETY: the stream is alive, and `data` is what `run` takes.
        let answer = unsafe { (api.host_function)(self.raw, run, data) };
        api.check("cuLaunchHostFunc", answer).inspect_err(|_| {
            // SAFETY: refused, so `run` will not be called with it.
            drop(unsafe { Box::from_raw(data.cast::<Box<dyn FnOnce() + Send>>()) });
        })
    }

    /// Whether all that was in it has ended.
    pub fn is_idle(&self, entered: &Entered<'_>) -> Result<bool> {
        let api = entered.api();
        // SAFETY: the stream is alive.
        api.ended("cuStreamQuery", unsafe { (api.stream_query)(self.raw) })
    }

    /// Waits, without a limit, until all that is in it has ended.
    pub fn synchronize(&self, entered: &Entered<'_>) -> Result<()> {
        let api = entered.api();
        // SAFETY: the stream is alive.
        api.check("cuStreamSynchronize", unsafe { (api.stream_synchronize)(self.raw) })
    }
}

/// A point in a stream, destroyed with the value.
#[derive(Debug)]
pub struct Event {
    context: Context,
    raw: RawEvent,
}

// SAFETY: the driver's events may be used by any thread, also by several at once.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(entered) = self.context.enter() {
            // SAFETY: the event is this value's alone. A refusal leaves it to the end of the process.
            unsafe { (entered.api().destroy_event)(self.raw) };
        }
    }
}

impl Event {
    /// Whether it has happened; true where it was never recorded. Needs no current context.
    pub fn has_happened(&self) -> Result<bool> {
        let api = self.context.device().cuda().api();
        // SAFETY: the event is alive.
        api.ended("cuEventQuery", unsafe { (api.event_query)(self.raw) })
    }

    /// Waits, without a limit, until it has happened.
    pub fn synchronize(&self) -> Result<()> {
        let api = self.context.device().cuda().api();
        // SAFETY: the event is alive.
        api.check("cuEventSynchronize", unsafe { (api.event_synchronize)(self.raw) })
    }
}

/// Compiled code, unloaded when the last function of it is gone.
#[derive(Debug, Clone)]
pub struct Module(Arc<Code>);

#[derive(Debug)]
struct Code {
    context: Context,
    raw: RawModule,
}

// SAFETY: the driver's modules may be used by any thread.
unsafe impl Send for Code {}
// SAFETY: as above.
unsafe impl Sync for Code {}

impl Drop for Code {
    fn drop(&mut self) {
        if let Ok(entered) = self.context.enter() {
            // SAFETY: no function of it is left. A refusal leaves it to the end of the process.
            unsafe { (entered.api().unload_module)(self.raw) };
        }
    }
}

impl Module {
    /// The kernel of that name.
    pub fn function(&self, name: &CStr) -> Result<Function> {
        let api = self.0.context.device().cuda().api();
        let entered = self.0.context.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` and the name outlive the call.
        let answer = unsafe { (api.module_function)(&mut raw, self.0.raw, name.as_ptr()) };
        drop(entered);
        api.check("cuModuleGetFunction", answer)?;
        Ok(Function { _module: self.clone(), raw })
    }
}

/// A kernel.
#[derive(Debug, Clone)]
pub struct Function {
    _module: Module,
    raw: RawFunction,
}

// SAFETY: the driver's functions may be used by any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}
