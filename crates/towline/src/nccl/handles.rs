//! Registered buffers and windows: closed once, after work in flight, with their memory kept until then.
#![allow(unsafe_code, reason = "calls NCCL on handles that are open")]

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::DerefMut;
use std::ptr;
use std::sync::Arc;

use towline_sys::nccl::{self as sys, Slot};

use super::comm::{Comm, Core};
use super::failed;
use super::job::{Job, check_place};
use super::registered::{Answer, Key, Place, Registered, Shape};
use crate::memory::{Buffer, MemoryDescription, Storage};
use crate::{Error, Result};

/// The flags of windows that are known here: symmetric collectives, strict ordering.
const KNOWN_FLAGS: u32 = 3;
pub(super) const SYMMETRIC: u32 = 1;

const BUFFER: &str = "register_buffer";
const WINDOW: &str = "register_window";
const CLOSE: &str = "close";

/// NCCL maps windows by pages of that size.
const ALIGNMENT: usize = 4096;

impl Comm {
    /// Registers a buffer. Local, and at once also inside a group. NCCL may have no use for it: then the handle is 0.
    ///
    /// # Errors
    /// `Invalid` where the memory is not on this communicator's GPU, or the communicator cannot be used; what NCCL says.
    #[inline]
    pub fn register(&self, buffer: Buffer) -> Result<RegisteredBuffer> {
        // What need not be dropped where something unwinds is kept in registers.
        let buffer = ManuallyDrop::new(buffer);
        let (addr, size) = buffer.on_gpu(self.0.ordinal);
        let key = self.0.register(ManuallyDrop::into_inner(buffer), addr, size).into_result()?;
        Ok(RegisteredBuffer { key, size })
    }

    /// Prepares the registration of a window, which all ranks do: the handle comes when the job has run, alone or in a
    /// group, and on a communicator that does not block when nothing is in progress.
    ///
    /// # Errors
    /// `Invalid` where the memory is not on this communicator's GPU, not at a multiple of 4096 bytes, or a flag is unknown.
    pub fn window_job(&self, buffer: Buffer, flags: u32) -> Result<(Window, Job)> {
        self.0.usable(WINDOW)?;
        let shape = self.0.shape(&buffer, flags)?;
        let (list, slot) = (self.0.calling, Slot::default());
        let mut registered = list.lock();
        let room = registered.room(&self.0);
        let key = registered.fill_later(room, buffer, shape, slot.clone());
        let job = Job::window(self, key, shape, slot.clone());
        Ok((Window { key, handle: 0, late: Some(slot), shape }, job))
    }

    /// Registers a window with all ranks; `None` where NCCL gives none. Not for groups.
    ///
    /// # Errors
    /// As for [`window_job`](Comm::window_job); what NCCL says.
    #[inline]
    pub fn register_window(&self, buffer: Buffer, flags: u32) -> Result<Option<Window>> {
        let core: &Arc<Core> = &self.0;
        // As for a buffer.
        let buffer = ManuallyDrop::new(buffer);
        let (addr, size) = buffer.on_gpu(core.ordinal);
        if let Some(raw) = core.life.ready()
            && size != 0
            && flags & !KNOWN_FLAGS == 0
            && addr.is_multiple_of(ALIGNMENT)
            // SAFETY: a thread that is inside a list calls nothing that comes here.
            && let Some(mut registered) = unsafe { core.calling.enter() }
            && core.context.is_current()
        {
            let room = registered.room(core);
            let guard = core.guard();
            // SAFETY: the communicator is alive and blocks, a group is one of jobs only, and the list keeps the memory until it is
            // closed.
            let made = unsafe { core.nccl.window_now(raw, addr as u64, size, flags) };
            drop(guard);
            let buffer = ManuallyDrop::into_inner(buffer);
            return match made {
                Ok(0) => {
                    drop(registered);
                    drop(buffer);
                    Ok(None)
                }
                Ok(handle) => {
                    let shape = Shape { addr, size, flags };
                    let key = registered.fill(room, handle, buffer, Some(shape));
                    Ok(Some(Window { key, handle, late: None, shape }))
                }
                Err(error) => {
                    drop(registered);
                    Err(core.window_refused(buffer.addr(), error))
                }
            };
        }
        let window = self.register_window_after_all(ManuallyDrop::into_inner(buffer), flags);
        window.map(|window| window.map(|window| *window))
    }

    #[cold]
    #[inline(never)]
    fn register_window_after_all(&self, buffer: Buffer, flags: u32) -> Result<Option<Box<Window>>> {
        let core: &Arc<Core> = &self.0;
        crate::fork::guard(WINDOW)?;
        if let Some(raw) = core.life.ready() {
            let shape = core.shape(&buffer, flags)?;
            let _entered = core.gpu.enter(WINDOW)?;
            let mut registered = core.calling.lock();
            let room = registered.room(core);
            let guard = core.guard();
            // SAFETY: as above.
            let made = unsafe { core.nccl.window_now(raw, shape.addr as u64, shape.size, flags) };
            drop(guard);
            let handle = match made {
                Ok(handle) => handle,
                Err(error) => {
                    drop(registered);
                    return Err(core.window_refused(buffer.addr(), error));
                }
            };
            if handle == 0 {
                drop(registered);
                return Ok(None);
            }
            let key = registered.fill(room, handle, buffer, Some(shape));
            return Ok(Some(Box::new(Window { key, handle, late: None, shape })));
        }
        let (window, job) = self.window_job(buffer, flags)?;
        job.run()?;
        let given = !self.options().blocking || window.handle() != 0;
        Ok(given.then(|| Box::new(window)))
    }
}

/// Gives up a registration, once no stream uses it. One that is not there any more is no error. In a forked child no thread has
/// the list, and the slow path finds that out.
#[inline(never)]
fn close(key: Key) -> Result<()> {
    // SAFETY: a thread that is inside a list calls nothing that comes here: owners of memory are notified when it is out.
    match unsafe { key.list().enter() } {
        Some(registered) => close_inside(registered, key),
        None => close_in_turn(key),
    }
}

/// The same for a buffer, by a thread that need not be asked for its context again. Nothing is called before NCCL is: what is in
/// registers stays there.
#[inline(never)]
fn close_buffer(key: Key) -> Result<()> {
    // SAFETY: as above.
    let Some(registered) = (unsafe { key.list().enter() }) else { return close_in_turn(key) };
    if let Some(core) = registered.used_core()
        && core.seen.was_current()
        && let Some(raw) = core.calm_already()
    {
        return give_up::<false>(registered, key, raw);
    }
    close_asking(registered, key)
}

#[cold]
#[inline(never)]
fn close_asking(registered: impl DerefMut<Target = Registered>, key: Key) -> Result<()> {
    close_inside(registered, key)
}

#[cold]
#[inline(never)]
fn close_in_turn(key: Key) -> Result<()> {
    // In a forked child too this is harmless.
    if !key.is_open() {
        return Ok(());
    }
    crate::fork::guard(CLOSE)?;
    close_inside(key.list().lock(), key)
}

#[inline]
fn close_inside(registered: impl DerefMut<Target = Registered>, key: Key) -> Result<()> {
    if let Some(core) = registered.used_core()
        && let Some(raw) = core.calm_already()
        && core.context.is_current()
    {
        return give_up::<true>(registered, key, raw);
    }
    drop(registered);
    close_after_all(key)
}

/// Deregisters with NCCL, if that needs no wait for the handle of a window. For buffers that is not checked.
#[inline(always)]
fn give_up<const WINDOW: bool>(
    mut registered: impl DerefMut<Target = Registered>,
    key: Key,
    raw: sys::Comm,
) -> Result<()> {
    // Not asked for twice: the list keeps its communicator while this thread is inside.
    let core = registered.used_core().map_or(ptr::null(), Arc::as_ptr);
    if let Some((handle, is_window, memory)) = registered.take_now::<WINDOW>(key) {
        let code = if handle == 0 {
            0
        } else {
            // SAFETY: as above; the communicator is alive, and the handle is one of it that was taken out of the list just now.
            unsafe { (*core).deregister(raw, handle, is_window) }
        };
        let memory = ManuallyDrop::into_inner(memory);
        if code != 0 {
            return given_up_or_not(registered, memory, is_window, code);
        }
        // Its owners are notified outside of the lock.
        drop(registered);
        drop(memory);
        return Ok(());
    }
    drop(registered);
    close_after_all(key)
}

/// Puts a buffer into its place, unless NCCL has refused it; its owners are notified of that when nothing is locked.
#[cold]
#[inline(never)]
fn registered_or_not(
    mut registered: impl DerefMut<Target = Registered>,
    room: &'static Place,
    buffer: Buffer,
    (code, handle): (i32, usize),
) -> Result<Key> {
    let Some(core) = registered.core().cloned() else {
        return Err(Error::invalid(BUFFER, "the communicator is gone"));
    };
    match core.nccl.registering(code) {
        Ok(_) => Ok(registered.fill(room, handle, buffer, None)),
        Err(error) => {
            drop(registered);
            drop(buffer);
            Err(core.explain(BUFFER, error))
        }
    }
}

/// What NCCL's code means for what is not in the list any more: it keeps what it refused to close, and may still use.
#[cold]
#[inline(never)]
fn given_up_or_not(
    registered: impl DerefMut<Target = Registered>,
    memory: Buffer,
    is_window: bool,
    code: i32,
) -> Result<()> {
    let core = registered.core().cloned();
    drop(registered);
    let Some(core) = core else { return Ok(()) };
    core.nccl.giving_up(is_window, code).map(drop).map_err(|error| {
        core.kept.lock().push(memory);
        failed(CLOSE, Some(&core.nccl), error)
    })
}

/// The same where it may take long, and others go on meanwhile; or where the communicator is gone.
#[cold]
#[inline(never)]
fn close_after_all(key: Key) -> Result<()> {
    let core = {
        let mut registered = key.list().lock();
        if !registered.begin_to_close(key) {
            return Ok(());
        }
        registered.core().cloned()
    };
    let calm = core.map_or(Ok(()), |core| core.calm(CLOSE));
    let mut registered = key.list().lock();
    let Some((taken, core)) = registered.take(key) else { return calm };
    let gone = core.is_gone();
    let closed = core.for_closing().map_or(Ok(()), |raw| {
        let _entered = core.gpu.enter(CLOSE)?;
        let (handle, is_window) = (taken.handle(), taken.is_window);
        if handle == 0 {
            return Ok(());
        }
        // SAFETY: the communicator is alive, and the handle is one of it that was taken out of the list just now.
        let code = unsafe { core.deregister(raw, handle, is_window) };
        let closed = core.nccl.giving_up(is_window, code).map(drop);
        closed.map_err(|error| failed(CLOSE, Some(&core.nccl), error))
    });
    // What went with the communicator may be used by streams for a moment, and what NCCL refused to close by NCCL.
    let mut memory = Some(taken.memory);
    if gone || closed.is_err() || calm.is_err() {
        core.kept.lock().extend(memory.take());
    }
    let unused = registered.unused();
    drop(registered);
    drop((memory, unused));
    closed.and(calm)
}

impl Core {
    /// Registers a buffer that has these bytes on the communicator's GPU, or none. Not inlined into other crates, which would have to
    /// call for what is the thread's.
    #[inline(never)]
    fn register(self: &Arc<Self>, buffer: Buffer, addr: usize, size: usize) -> Answer {
        // As above. In a forked child no thread has the list.
        let buffer = ManuallyDrop::new(buffer);
        // Where NCCL only writes an entry into a list, it neither needs a context nor leaves one behind.
        if let Some(raw) = self.life.ready()
            && size != 0
            // SAFETY: a thread that is inside a list calls nothing that comes here.
            && let Some(registered) = unsafe { self.calling.enter() }
        {
            return match registered.free() {
                Some(room) if self.plain => self.put(registered, room, raw, (addr, size), buffer),
                _ => self.register_inside(registered, raw, (addr, size), buffer),
            };
        }
        self.register_after_all(ManuallyDrop::into_inner(buffer)).unwrap_or_else(Answer::from)
    }

    /// The same where the context is asked for, or there is no place yet.
    #[inline(never)]
    fn register_inside(
        self: &Arc<Self>,
        mut registered: impl DerefMut<Target = Registered>,
        raw: sys::Comm,
        bytes: (usize, usize),
        buffer: ManuallyDrop<Buffer>,
    ) -> Answer {
        if self.plain || self.context.is_current() {
            let room = registered.room(self);
            return self.put(registered, room, raw, bytes, buffer);
        }
        drop(registered);
        self.register_after_all(ManuallyDrop::into_inner(buffer)).unwrap_or_else(Answer::from)
    }

    #[cold]
    #[inline(never)]
    fn register_after_all(self: &Arc<Self>, buffer: Buffer) -> Result<Answer> {
        self.usable(BUFFER)?;
        check_place(BUFFER, self, &buffer)?;
        let (addr, size) = (buffer.addr(), buffer.size());
        self.settle(BUFFER)?;
        let raw = self.usable(BUFFER)?;
        let _entered = if self.plain { None } else { Some(self.gpu.enter(BUFFER)?) };
        let mut registered = self.calling.lock();
        let room = registered.room(self);
        Ok(self.put(registered, room, raw, (addr, size), ManuallyDrop::new(buffer)))
    }

    /// Registers with NCCL what goes into that place.
    #[inline(always)]
    fn put(
        &self,
        mut registered: impl DerefMut<Target = Registered>,
        room: &'static Place,
        raw: sys::Comm,
        (addr, size): (usize, usize),
        buffer: ManuallyDrop<Buffer>,
    ) -> Answer {
        // SAFETY: the communicator is alive, and the list keeps the memory until it is deregistered.
        let (code, handle) = unsafe { self.buffer_calls.register(raw, addr as u64, size) };
        let buffer = ManuallyDrop::into_inner(buffer);
        if code != 0 {
            return registered_or_not(registered, room, buffer, (code, handle)).into();
        }
        registered.fill(room, handle, buffer, None).into()
    }

    /// Deregisters with NCCL.
    ///
    /// # Safety
    /// The communicator is alive, and what is given up was taken out of its list, in which this thread is.
    #[inline(always)]
    unsafe fn deregister(&self, raw: sys::Comm, handle: usize, is_window: bool) -> i32 {
        // SAFETY: the caller's promise, and the library is loaded while there is a communicator.
        unsafe {
            if is_window {
                self.nccl.close_window_bare(raw, handle)
            } else {
                self.buffer_calls.deregister(raw, handle)
            }
        }
    }

    /// Checks memory and flags of a window.
    fn shape(&self, buffer: &Buffer, flags: u32) -> Result<Shape> {
        check_place(WINDOW, self, buffer)?;
        let (addr, size) = (buffer.addr(), buffer.size());
        if flags & !KNOWN_FLAGS != 0 || !addr.is_multiple_of(ALIGNMENT) {
            return Err(no_window(addr, flags));
        }
        Ok(Shape { addr, size, flags })
    }

    /// What NCCL's refusal of a window means: its own words do not say that the memory is of the wrong kind.
    #[cold]
    #[inline(never)]
    pub(super) fn window_refused(&self, addr: usize, error: towline_sys::Error) -> Error {
        let plain = self
            .gpu
            .enter(WINDOW)
            .is_ok_and(|entered| entered.cuda().retain_allocation(addr as u64).is_err());
        let refused = matches!(error, towline_sys::Error::Refused { .. });
        if !plain || !refused || self.failure().is_some() {
            return self.explain(WINDOW, error);
        }
        let said = failed(WINDOW, Some(&self.nccl), error);
        let message = format!(
            "windows need memory of mem_alloc, or of cuMemCreate, and this is of cuMemAlloc: {}",
            said.message()
        );
        Error::invalid(WINDOW, message).caused_by(said)
    }

    /// Gives up all registrations.
    pub(super) fn close_handles(&self) {
        let all = self.calling.lock().keys();
        for key in all {
            if let Err(error) = close(key) {
                tracing::error!(%error, "a handle of NCCL's could not be closed");
            }
        }
    }

    /// Waits until nothing is in progress and no stream uses anything; a communicator that is gone does neither.
    fn calm(&self, op: &'static str) -> Result<()> {
        if self.is_gone() { Ok(()) } else { self.settle(op).and_then(|()| self.drain(op)) }
    }
}

#[cold]
fn no_window(addr: usize, flags: u32) -> Error {
    if flags & !KNOWN_FLAGS != 0 {
        return Error::invalid(WINDOW, format!("flags: {flags:#x} has bits that no flag has"));
    }
    let message = format!("the memory starts at {addr:#x}, and a window starts at a multiple of {ALIGNMENT}");
    Error::invalid(WINDOW, message)
}

/// A buffer that is registered with a communicator, until it is closed or dropped.
pub struct RegisteredBuffer {
    key: Key,
    size: usize,
}

impl RegisteredBuffer {
    /// NCCL's handle; 0 where it has no use for the registration, and once it is closed.
    pub fn handle(&self) -> u64 {
        self.key.list().lock().handle(self.key) as u64
    }

    /// How many bytes were registered.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The memory; `None` once it is closed.
    pub fn memory(&self) -> Option<Buffer> {
        self.key.list().lock().find(self.key).cloned()
    }

    /// Whether it was closed, or its communicator was.
    pub fn is_closed(&self) -> bool {
        !self.key.is_open()
    }

    /// Gives up the registration, once work in flight has ended. A second call is harmless. On NCCL 2.28, in a process that sees one
    /// GPU, its primary context is current afterwards in a thread that had it when this library last asked.
    ///
    /// # Errors
    /// What NCCL says; the memory is kept then until the communicator is gone.
    #[inline]
    pub fn close(&self) -> Result<()> {
        // Two who close at once come to the same place in the list, and the second finds nothing there.
        close_buffer(self.key)
    }
}

impl Drop for RegisteredBuffer {
    #[inline]
    fn drop(&mut self) {
        if self.key.is_open() {
            close_what_was_dropped(self.key);
        }
    }
}

/// Not inlined, so that the check whether it is needed can be.
#[inline(never)]
fn close_what_was_dropped(key: Key) {
    // A forked child closes nothing.
    if !crate::fork::in_child()
        && let Err(error) = close(key)
    {
        tracing::error!(%error, "a handle of NCCL's could not be closed");
    }
}

/// Memory that all ranks have registered together, until it is closed or dropped.
pub struct Window {
    key: Key,
    /// NCCL's, where it came at once.
    handle: usize,
    /// Where it comes otherwise.
    late: Option<Slot>,
    shape: Shape,
}

impl Window {
    /// NCCL's handle; 0 until it is registered, where NCCL gave none, and once it is closed.
    pub fn handle(&self) -> u64 {
        if self.key.is_open() { self.late.as_ref().map_or(self.handle, Slot::handle) as u64 } else { 0 }
    }

    /// How many bytes this rank has registered.
    #[inline]
    pub fn size(&self) -> usize {
        self.shape.size
    }

    /// The address of this rank's memory.
    pub fn addr(&self) -> usize {
        self.shape.addr
    }

    /// The flags it was registered with.
    pub fn flags(&self) -> u32 {
        self.shape.flags
    }

    /// This rank's memory; `None` once it is closed.
    pub fn memory(&self) -> Option<Buffer> {
        self.key.list().lock().find(self.key).cloned()
    }

    /// The window's name and handle, where it is open and that range lies in it.
    pub(super) fn range(&self, op: &'static str, offset: usize, len: usize) -> Result<(Key, usize)> {
        let handle = self.handle() as usize;
        if handle == 0 {
            return Err(Error::invalid(op, "the window is not registered, or was closed"));
        }
        let size = self.size();
        if offset.checked_add(len).is_none_or(|end| end > size) {
            let message = format!("{len} bytes at {offset} do not lie within the window's {size}");
            return Err(Error::invalid(op, message));
        }
        Ok((self.key, handle))
    }

    /// Gives up the window on this rank, once work in flight has ended. A second call is harmless.
    ///
    /// # Errors
    /// What NCCL says; the memory is kept then until the communicator is gone.
    #[inline]
    pub fn close(&self) -> Result<()> {
        if self.key.is_open() { close(self.key) } else { Ok(()) }
    }
}

impl Drop for Window {
    #[inline]
    fn drop(&mut self) {
        if self.key.is_open() {
            close_what_was_dropped(self.key);
        }
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Window").field("handle", &self.handle()).field("size", &self.size()).finish()
    }
}
