//! Bare calls of NCCL's, in a group of one rank: what `towline bench` measures communicators on GPUs against.
#![allow(unsafe_code, reason = "calls NCCL without the library in between")]

use std::io;

use towline::cuda::{Entered, Gpu, StreamHandle};
use towline::memory::{Buffer, MemoryDescription, Storage};
use towline_sys::nccl::{Call, Comm, Config, Nccl, Slot};

/// A rank that is alone in its group, while its GPU's context is current in this thread.
pub(crate) struct Bare<'a> {
    nccl: Nccl,
    comm: Comm,
    entered: &'a Entered<'a>,
}

/// Makes a group of one rank on that GPU and calls it from `work`, where the GPU's context is current.
///
/// # Errors
/// Where there is no NCCL or no GPU, or NCCL refuses; what `work` gives.
pub(crate) fn alone<T>(gpu: u32, work: impl FnOnce(&Bare<'_>) -> io::Result<T>) -> io::Result<T> {
    let gpu = Gpu::open(gpu).map_err(io::Error::other)?;
    let entered = gpu.enter("bench").map_err(io::Error::other)?;
    let nccl = Nccl::load().map_err(io::Error::other)?;
    let slot = Slot::default();
    let id = nccl.unique_id().map_err(io::Error::other)?;
    nccl.init(&slot, 1, &id, 0, Config::default()).map_err(io::Error::other)?;
    let comm = slot.comm().ok_or_else(|| io::Error::other("NCCL made no communicator"))?;
    work(&Bare { nccl, comm, entered: &entered })
}

impl Bare<'_> {
    /// NCCL's version, as `2.28.3`.
    pub(crate) fn version(&self) -> String {
        self.nccl.version_text()
    }

    /// Sums of floats from one buffer into another, both of the GPU.
    ///
    /// # Errors
    /// `InvalidInput` where they are not on a GPU, or smaller than that.
    pub(crate) fn sums(&self, send: &Buffer, recv: &Buffer, count: usize) -> io::Result<Sums<'_>> {
        check(send, count * 4)?;
        check(recv, count * 4)?;
        Ok(Sums { bare: self, send: send.clone(), recv: recv.clone(), count })
    }

    /// Waits until the default stream has got past everything.
    pub(crate) fn synchronize(&self) -> io::Result<()> {
        let wait = || {
            let event = self.entered.event()?;
            // SAFETY: the default stream is always there.
            unsafe { self.entered.record_foreign(StreamHandle(0), &event)? };
            event.synchronize()
        };
        wait().map_err(io::Error::other)
    }

    /// What is registered, as a program has it that calls NCCL itself: an address and a length.
    pub(crate) fn range<'a>(&'a self, buffer: &'a Buffer) -> Range<'a> {
        Range { bare: self, address: buffer.addr() as u64, len: buffer.size(), _buffer: buffer }
    }
}

impl Drop for Bare<'_> {
    fn drop(&mut self) {
        // SAFETY: it is alive, and not used again.
        let _ = unsafe { self.nccl.destroy(self.comm) };
    }
}

/// A buffer of which address and length are known.
pub(crate) struct Range<'a> {
    bare: &'a Bare<'a>,
    address: u64,
    len: usize,
    _buffer: &'a Buffer,
}

impl Range<'_> {
    /// Registers it and gives it up again.
    #[inline]
    pub(crate) fn register(&self) -> io::Result<()> {
        let Bare { nccl, comm, .. } = self.bare;
        // SAFETY: the communicator is alive, and so are the bytes.
        let registered = unsafe {
            let handle = nccl.register(*comm, self.address, self.len);
            handle.and_then(|handle| nccl.deregister(*comm, handle))
        };
        registered.map_err(io::Error::other)
    }

    /// Registers a window with that flag and closes it again; false where NCCL gives none.
    #[inline]
    pub(crate) fn window(&self, flags: u32) -> io::Result<bool> {
        let Bare { nccl, comm, .. } = self.bare;
        let register = || {
            // SAFETY: the communicator is alive and blocks, and this thread has begun no group; the bytes are alive.
            unsafe {
                match nccl.window_now(*comm, self.address, self.len, flags)? {
                    0 => Ok(false),
                    handle => nccl.close_window(*comm, handle).map(|_| true),
                }
            }
        };
        register().map_err(|error: towline_sys::Error| io::Error::other(error))
    }
}

/// Calls with the same buffers, which it keeps until the stream has got past them.
pub(crate) struct Sums<'a> {
    bare: &'a Bare<'a>,
    send: Buffer,
    recv: Buffer,
    count: usize,
}

impl Sums<'_> {
    /// Puts one call into the default stream.
    pub(crate) fn run(&self) -> io::Result<()> {
        const FLOAT: i32 = 7;
        let (from, to) = (self.send.addr() as u64, self.recv.addr() as u64);
        let Bare { nccl, comm, .. } = self.bare;
        // SAFETY: the communicator is alive; the bytes are until the stream has got past them (`drop`), and were checked.
        let called =
            unsafe { nccl.call(*comm, Call::AllReduce(0), from, to, self.count, FLOAT, StreamHandle(0)) };
        called.map(drop).map_err(io::Error::other)
    }
}

impl Drop for Sums<'_> {
    fn drop(&mut self) {
        let _ = self.bare.synchronize();
    }
}

fn check(buffer: &Buffer, len: usize) -> io::Result<()> {
    let on_gpu = matches!(buffer.place(), towline::Place::Cuda(_));
    if on_gpu && buffer.size() >= len {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "the buffer is not on a GPU, or too small"))
}
