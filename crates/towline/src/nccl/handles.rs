//! Registered buffers and windows: closed once, after work in flight, with their memory kept until then.
#![allow(unsafe_code, reason = "calls NCCL on handles that are open")]

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use towline_sys::nccl::Slot;

use super::buffers::{Key, List};
use super::comm::{Comm, Core};
use super::failed;
use super::job::{Job, check_place};
use crate::memory::{Buffer, MemoryDescription};
use crate::sync::lock;
use crate::{Error, Result};

/// The flags of windows that are known here: symmetric collectives, strict ordering.
const KNOWN_FLAGS: u32 = 3;
pub(super) const SYMMETRIC: u32 = 1;

const WINDOW: &str = "register_window";

/// NCCL maps windows by pages of that size.
const ALIGNMENT: usize = 4096;

/// A window that is registered with a communicator, or is going to be.
pub(super) struct Entry {
    pub(super) flags: u32,
    pub(super) slot: Slot,
    pub(super) addr: usize,
    pub(super) size: usize,
    memory: Mutex<Option<Buffer>>,
    closed: AtomicBool,
}

impl Entry {
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// The window, where it is open and that range lies in it.
    pub(super) fn range(self: &Arc<Self>, op: &'static str, offset: usize, len: usize) -> Result<Arc<Entry>> {
        if self.is_closed() || self.slot.handle() == 0 {
            return Err(Error::invalid(op, "the window is not registered, or was closed"));
        }
        let size = self.size;
        if offset.checked_add(len).is_none_or(|end| end > size) {
            let message = format!("{len} bytes at {offset} do not lie within the window's {size}");
            return Err(Error::invalid(op, message));
        }
        Ok(Arc::clone(self))
    }
}

impl Comm {
    /// Registers a buffer. Local, and at once also inside a group. NCCL may have no use for it: then the handle is 0.
    ///
    /// # Errors
    /// `Invalid` where the memory is not on this communicator's GPU, or the communicator cannot be used; what NCCL says.
    #[inline]
    pub fn register(&self, buffer: Buffer) -> Result<RegisteredBuffer> {
        const OP: &str = "register_buffer";
        let core: &Arc<Core> = &self.0;
        let mut raw = core.usable(OP)?;
        check_place(OP, core, &buffer)?;
        if !core.is_settled() {
            core.settle(OP)?;
            raw = core.usable(OP)?;
        }
        let (addr, size) = (buffer.addr(), buffer.size());
        // Where NCCL only writes an entry into a list, it neither needs a context nor leaves one behind.
        let entered = if core.nccl.registers_without_context() { None } else { Some(core.gpu.enter(OP)?) };
        let list = core.calling;
        let mut buffers = list.lock();
        // SAFETY: the communicator is alive, and the list keeps the memory until it is deregistered.
        let handle = unsafe { core.nccl.register(raw, addr as u64, size) };
        let handle = handle.map_err(|error| core.explain(OP, error))?;
        let key = buffers.add(core, handle, buffer);
        drop((buffers, entered));
        Ok(RegisteredBuffer { list, key, handle, size, closed: AtomicBool::new(false) })
    }

    /// Prepares the registration of a window, which all ranks do: the handle comes when the job has run, alone or in a
    /// group, and on a communicator that does not block when nothing is in progress.
    ///
    /// # Errors
    /// `Invalid` where the memory is not on this communicator's GPU, not at a multiple of 4096 bytes, or a flag is unknown.
    pub fn window_job(&self, buffer: Buffer, flags: u32) -> Result<(Window, Job)> {
        self.0.usable(WINDOW)?;
        let entry = self.entry(buffer, flags)?;
        let job = Job::window(self, Arc::clone(&entry));
        Ok((Window { comm: self.clone(), entry }, job))
    }

    fn entry(&self, buffer: Buffer, flags: u32) -> Result<Arc<Entry>> {
        check_place(WINDOW, &self.0, &buffer)?;
        let (addr, size) = (buffer.addr(), buffer.size());
        if flags & !KNOWN_FLAGS != 0 {
            return Err(Error::invalid(WINDOW, format!("flags: {flags:#x} has bits that no flag has")));
        }
        if !addr.is_multiple_of(ALIGNMENT) {
            let message =
                format!("the memory starts at {addr:#x}, and a window starts at a multiple of {ALIGNMENT}");
            return Err(Error::invalid(WINDOW, message));
        }
        let (slot, closed) = (Slot::default(), AtomicBool::new(false));
        Ok(Arc::new(Entry { flags, slot, addr, size, memory: Mutex::new(Some(buffer)), closed }))
    }

    /// Registers a window with all ranks; `None` where NCCL gives none. Not for groups.
    ///
    /// # Errors
    /// As for [`window_job`](Comm::window_job); what NCCL says.
    pub fn register_window(&self, buffer: Buffer, flags: u32) -> Result<Option<Window>> {
        let core: &Arc<Core> = &self.0;
        if !core.is_settled() {
            let (window, job) = self.window_job(buffer, flags)?;
            job.run()?;
            let given = !self.options().blocking || window.handle() != 0;
            return Ok(given.then_some(window));
        }
        let raw = core.usable(WINDOW)?;
        let entry = self.entry(buffer, flags)?;
        let _entered = core.gpu.enter(WINDOW)?;
        let _one = core.serialise();
        let guard = core.guard();
        // SAFETY: the communicator is alive, the entry keeps memory and slot, and all has ended when a blocking call returns.
        let made = unsafe { core.nccl.window(raw, entry.addr as u64, entry.size, flags, &entry.slot) };
        drop(guard);
        made.map_err(|error| core.window_refused(&entry, error))?;
        if entry.slot.handle() == 0 {
            return Ok(None);
        }
        core.handles.lock().push(Arc::clone(&entry));
        Ok(Some(Window { comm: self.clone(), entry }))
    }
}

/// Gives up the registration of a buffer, once no stream uses it. A handle that is not there any more is no error.
#[inline]
fn close_buffer(list: List, key: Key) -> Result<()> {
    const OP: &str = "close";
    let mut buffers = list.lock();
    if !buffers.core().is_some_and(|core| core.is_calm() && !core.is_gone()) {
        drop(buffers);
        return close_buffer_later(list, key);
    }
    let Some((handle, memory, core)) = buffers.take(key) else { return Ok(()) };
    let closed = core.deregister(OP, handle);
    let mut memory = Some(memory);
    if closed.is_err() {
        // NCCL may still use it.
        lock(&core.kept).extend(memory.take());
    }
    let unused = buffers.unused();
    drop(buffers);
    // Their owners are told outside of the lock.
    drop((memory, unused));
    closed
}

/// The same where it may take long, and others go on meanwhile; or where the communicator is gone.
#[cold]
fn close_buffer_later(list: List, key: Key) -> Result<()> {
    const OP: &str = "close";
    let core = {
        let buffers = list.lock();
        if buffers.find(key).is_none() {
            return Ok(());
        }
        buffers.core().cloned()
    };
    let calm = core.map_or(Ok(()), |core| core.calm(OP));
    let mut buffers = list.lock();
    let Some((handle, memory, core)) = buffers.take(key) else { return calm };
    let gone = core.is_gone();
    let closed = if gone { Ok(()) } else { core.deregister(OP, handle) };
    // What went with the communicator may be used by streams for a moment, and what NCCL refused to close by NCCL.
    let mut memory = Some(memory);
    if gone || closed.is_err() || calm.is_err() {
        lock(&core.kept).extend(memory.take());
    }
    let unused = buffers.unused();
    drop(buffers);
    drop((memory, unused));
    closed.and(calm)
}

impl Core {
    /// Tells NCCL that a registration has ended, which was taken out of the list. The list is in hand.
    #[inline]
    fn deregister(&self, op: &'static str, handle: usize) -> Result<()> {
        let Some(raw) = self.for_closing().filter(|_| handle != 0) else { return Ok(()) };
        let _entered = self.gpu.enter(op)?;
        // SAFETY: the communicator is alive, and the handle is one of it that was taken out of the list just now.
        let closed = unsafe { self.nccl.deregister(raw, handle) };
        closed.map_err(|error| failed(op, Some(&self.nccl), error))
    }

    /// What NCCL's refusal of a window means: its own words do not say that the memory is of the wrong kind.
    pub(super) fn window_refused(&self, entry: &Entry, error: towline_sys::Error) -> Error {
        let plain = self
            .gpu
            .enter(WINDOW)
            .is_ok_and(|entered| entered.cuda().retain_allocation(entry.addr as u64).is_err());
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

    /// Gives up all registrations of buffers.
    pub(super) fn close_buffers(&self) {
        let all = self.calling.lock().keys();
        for key in all {
            if let Err(error) = close_buffer(self.calling, key) {
                tracing::error!(%error, "a registered buffer could not be closed");
            }
        }
    }

    /// Waits until nothing is in progress and no stream uses anything; a communicator that is gone does neither.
    fn calm(&self, op: &'static str) -> Result<()> {
        if self.is_gone() { Ok(()) } else { self.settle(op).and_then(|()| self.drain(op)) }
    }

    /// Gives up a window, once no stream uses it.
    pub(super) fn close_entry(&self, entry: &Arc<Entry>) -> Result<()> {
        const OP: &str = "close";
        if entry.closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let calm = self.calm(OP);
        {
            let mut handles = self.handles.lock();
            if let Some(at) = handles.iter().rposition(|known| Arc::ptr_eq(known, entry)) {
                handles.remove(at);
            }
        }
        let memory = lock(&entry.memory).take();
        let Some(raw) = self.for_closing() else {
            // It went with the communicator; streams may still use it for a moment.
            lock(&self.kept).extend(memory);
            return calm;
        };
        let entered = self.gpu.enter(OP)?;
        let one = self.serialise();
        let closed = match entry.slot.handle() {
            0 => Ok(()),
            // SAFETY: the communicator is alive, the handle is one of it, and the flag above lets this happen once.
            handle => unsafe { self.nccl.close_window(raw, handle) }.map(drop),
        };
        drop((one, entered));
        if closed.is_err() || calm.is_err() {
            // NCCL may still use it.
            lock(&self.kept).extend(memory);
        }
        closed.map_err(|error| failed(OP, Some(&self.nccl), error))?;
        calm
    }
}

/// A buffer that is registered with a communicator, until it is closed or dropped.
pub struct RegisteredBuffer {
    list: List,
    key: Key,
    handle: usize,
    size: usize,
    closed: AtomicBool,
}

impl RegisteredBuffer {
    /// NCCL's handle; 0 where it has no use for the registration.
    pub fn handle(&self) -> u64 {
        self.handle as u64
    }

    /// How many bytes were registered.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The memory; `None` once it is closed.
    pub fn memory(&self) -> Option<Buffer> {
        self.list.lock().find(self.key).cloned()
    }

    /// Whether it was closed, or its communicator was.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire) || self.list.lock().find(self.key).is_none()
    }

    /// Gives up the registration, once work in flight has ended. A second call is harmless.
    ///
    /// # Errors
    /// What NCCL says; the memory is kept then until the communicator is gone.
    #[inline]
    pub fn close(&self) -> Result<()> {
        crate::fork::guard("close")?;
        if self.closed.load(Ordering::Acquire) {
            return Ok(());
        }
        // Two who close at once come to the same place in the list, and the second finds nothing there.
        self.closed.store(true, Ordering::Release);
        close_buffer(self.list, self.key)
    }
}

impl Drop for RegisteredBuffer {
    #[inline]
    fn drop(&mut self) {
        if *self.closed.get_mut() {
            return;
        }
        if let Err(error) = self.close() {
            tracing::error!(%error, "a registered buffer could not be closed");
        }
    }
}

/// Memory that all ranks have registered together, until it is closed or dropped.
pub struct Window {
    comm: Comm,
    pub(super) entry: Arc<Entry>,
}

impl Window {
    /// NCCL's handle; 0 until it is registered, where NCCL gave none, and once it is closed.
    pub fn handle(&self) -> u64 {
        if self.entry.is_closed() { 0 } else { self.entry.slot.handle() as u64 }
    }

    /// How many bytes this rank has registered.
    pub fn size(&self) -> usize {
        self.entry.size
    }

    /// The address of this rank's memory.
    pub fn addr(&self) -> usize {
        self.entry.addr
    }

    /// The flags it was registered with.
    pub fn flags(&self) -> u32 {
        self.entry.flags
    }

    /// This rank's memory; `None` once it is closed.
    pub fn memory(&self) -> Option<Buffer> {
        lock(&self.entry.memory).clone()
    }

    /// The communicator.
    pub fn comm(&self) -> &Comm {
        &self.comm
    }

    /// Gives up the window on this rank, once work in flight has ended. A second call is harmless.
    ///
    /// # Errors
    /// What NCCL says; the memory is kept then until the communicator is gone.
    pub fn close(&self) -> Result<()> {
        crate::fork::guard("close")?;
        self.comm.0.close_entry(&self.entry)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::error!(%error, "a window could not be closed");
        }
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Window").field("handle", &self.handle()).field("size", &self.size()).finish()
    }
}
