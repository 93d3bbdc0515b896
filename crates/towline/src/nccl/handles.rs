//! Registered buffers and windows: closed once, after work in flight, with their memory kept until then.
#![allow(unsafe_code, reason = "calls NCCL on handles that are open")]

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use towline_sys::nccl::Slot;

use super::comm::{Comm, Core};
use super::job::{Job, check_place};
use super::{Pending, failed};
use crate::memory::{Buffer, MemoryDescription};
use crate::sync::lock;
use crate::{Error, Result};

/// The flags of windows that are known here: symmetric collectives, strict ordering.
const KNOWN_FLAGS: u32 = 3;
pub(super) const SYMMETRIC: u32 = 1;

/// NCCL maps windows by pages of that size.
const ALIGNMENT: usize = 4096;

/// What is registered with a communicator.
pub(super) struct Entry {
    /// `None` for a buffer.
    pub(super) flags: Option<u32>,
    pub(super) slot: Slot,
    /// The handle of a buffer.
    buffer_handle: usize,
    pub(super) addr: usize,
    pub(super) size: usize,
    memory: Mutex<Option<Buffer>>,
    closed: AtomicBool,
}

impl Entry {
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

impl Comm {
    /// Registers a buffer. Local, and at once also inside a group. NCCL may have no use for it: then the handle is 0.
    ///
    /// # Errors
    /// `Invalid` where the memory is not on this communicator's GPU, or the communicator cannot be used; what NCCL says.
    pub fn register(&self, buffer: Buffer) -> Result<RegisteredBuffer> {
        const OP: &str = "register_buffer";
        let core = &self.0;
        core.usable(OP)?;
        check_place(OP, core, &buffer)?;
        core.settle(OP)?;
        let raw = core.usable(OP)?;
        let (addr, size) = (buffer.addr(), buffer.size());
        let entered = core.gpu.enter(OP)?;
        let one = core.serialise();
        // SAFETY: the communicator is alive, and the entry keeps the memory until it is deregistered.
        let handle = unsafe { core.nccl.register(raw, addr as u64, size) };
        drop((one, entered));
        let handle = handle.map_err(|error| core.explain(OP, error))?;
        let entry = Arc::new(Entry {
            flags: None,
            slot: Slot::default(),
            buffer_handle: handle,
            addr,
            size,
            memory: Mutex::new(Some(buffer)),
            closed: AtomicBool::new(false),
        });
        lock(&core.handles).push(Arc::clone(&entry));
        Ok(RegisteredBuffer { comm: self.clone(), entry })
    }

    /// Prepares the registration of a window, which all ranks do: the handle comes when the job has run, alone or in a
    /// group, and on a communicator that does not block when nothing is in progress.
    ///
    /// # Errors
    /// `Invalid` where the memory is not on this communicator's GPU, not at a multiple of 4096 bytes, or a flag is unknown.
    pub fn window_job(&self, buffer: Buffer, flags: u32) -> Result<(Window, Job)> {
        const OP: &str = "register_window";
        let core = &self.0;
        core.usable(OP)?;
        check_place(OP, core, &buffer)?;
        let (addr, size) = (buffer.addr(), buffer.size());
        if flags & !KNOWN_FLAGS != 0 {
            return Err(Error::invalid(OP, format!("flags: {flags:#x} has bits that no flag has")));
        }
        if !addr.is_multiple_of(ALIGNMENT) {
            let message =
                format!("the memory starts at {addr:#x}, and a window starts at a multiple of {ALIGNMENT}");
            return Err(Error::invalid(OP, message));
        }
        let entry = Arc::new(Entry {
            flags: Some(flags),
            slot: Slot::default(),
            buffer_handle: 0,
            addr,
            size,
            memory: Mutex::new(Some(buffer)),
            closed: AtomicBool::new(false),
        });
        let job = Job::window(self, Arc::clone(&entry));
        let window = Window { comm: self.clone(), entry, registering: job.pending() };
        Ok((window, job))
    }

    /// Registers a window with all ranks; `None` where NCCL gives none. Not for groups.
    ///
    /// # Errors
    /// As for [`window_job`](Comm::window_job); what NCCL says.
    pub fn register_window(&self, buffer: Buffer, flags: u32) -> Result<Option<Window>> {
        let (window, job) = self.window_job(buffer, flags)?;
        job.run()?;
        let given = !self.options().blocking || window.handle() != 0;
        Ok(given.then_some(window))
    }
}

impl Core {
    /// Gives up what is registered, once no stream uses it.
    pub(super) fn close_entry(&self, entry: &Arc<Entry>) -> Result<()> {
        const OP: &str = "close";
        if entry.closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let calm = if self.is_gone() { Ok(()) } else { self.settle(OP).and_then(|()| self.drain(OP)) };
        lock(&self.handles).retain(|known| !Arc::ptr_eq(known, entry));
        let memory = lock(&entry.memory).take();
        let Some(raw) = self.for_closing() else {
            // It went with the communicator; streams may still use it for a moment.
            lock(&self.kept).extend(memory);
            return calm;
        };
        let entered = self.gpu.enter(OP)?;
        let one = self.serialise();
        let nccl = &self.nccl;
        let closed = match (entry.flags, entry.slot.handle(), entry.buffer_handle) {
            (Some(_), 0, _) | (None, _, 0) => Ok(()),
            // SAFETY: the communicator is alive, the handle is one of it, and the flag above lets this happen once.
            (Some(_), handle, _) => unsafe { nccl.close_window(raw, handle) }.map(drop),
            // SAFETY: as above.
            (None, _, handle) => unsafe { nccl.deregister(raw, handle) },
        };
        drop((one, entered));
        if let Err(error) = closed {
            // NCCL may still use it.
            lock(&self.kept).extend(memory);
            return Err(failed(OP, Some(nccl), error));
        }
        if calm.is_err() {
            lock(&self.kept).extend(memory);
        }
        calm
    }
}

/// A buffer that is registered with a communicator, until it is closed or dropped.
pub struct RegisteredBuffer {
    comm: Comm,
    entry: Arc<Entry>,
}

impl RegisteredBuffer {
    /// NCCL's handle; 0 where it has no use for the registration.
    pub fn handle(&self) -> u64 {
        self.entry.buffer_handle as u64
    }

    /// How many bytes were registered.
    pub fn size(&self) -> usize {
        self.entry.size
    }

    /// The memory; `None` once it is closed.
    pub fn memory(&self) -> Option<Buffer> {
        lock(&self.entry.memory).clone()
    }

    /// Whether it was closed, or its communicator was.
    pub fn is_closed(&self) -> bool {
        self.entry.is_closed()
    }

    /// Gives up the registration, once work in flight has ended. A second call is harmless.
    ///
    /// # Errors
    /// What NCCL says; the memory is kept then until the communicator is gone.
    pub fn close(&self) -> Result<()> {
        crate::fork::guard("close")?;
        self.comm.0.close_entry(&self.entry)
    }
}

impl Drop for RegisteredBuffer {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::error!(%error, "a registered buffer could not be closed");
        }
    }
}

/// Memory that all ranks have registered together, until it is closed or dropped.
pub struct Window {
    comm: Comm,
    pub(super) entry: Arc<Entry>,
    registering: Pending,
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
        self.entry.flags.unwrap_or(0)
    }

    /// This rank's memory; `None` once it is closed.
    pub fn memory(&self) -> Option<Buffer> {
        lock(&self.entry.memory).clone()
    }

    /// The communicator.
    pub fn comm(&self) -> &Comm {
        &self.comm
    }

    /// The end of its registration.
    pub fn registering(&self) -> &Pending {
        &self.registering
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
