//! Windows: the calls that a communicator offers.

use std::sync::Arc;

use towline::{Buffer, MemoryDescription, Storage};

use super::Communicator;
use crate::cuda::Cuda;
use crate::memory::WindowOptions;
use crate::window::{Slot, Window};
use crate::{Error, Result, group};

const OP: &str = "register_window";

impl Communicator {
    /// Registers a window over every rank's buffer. Collective: every rank calls it, in the same order.
    ///
    /// The sizes are equal on all ranks unless the options say otherwise. Inside a group, and on a non-blocking
    /// communicator, the window's [`handle`](Window::handle) stays 0 until the registration has ended. `None` where
    /// windows are not supported; on the host they always are.
    ///
    /// # Errors
    /// The same on every rank, naming the ranks that differ: `Invalid` where sizes, flags or (with
    /// [`WindowFlag::COLL_SYMMETRIC`](crate::WindowFlag::COLL_SYMMETRIC)) offsets differ, or a rank's buffer cannot be registered.
    #[inline]
    pub fn register_window(
        &self,
        storage: impl Storage,
        options: impl Into<WindowOptions>,
    ) -> Result<Option<Window>> {
        let storage = Buffer::new(storage);
        let options = options.into();
        match self.cuda() {
            Some(cuda) => on_device(cuda, storage, options),
            None => self.window_on_host(storage, options),
        }
    }

    fn window_on_host(&self, storage: Buffer, options: WindowOptions) -> Result<Option<Window>> {
        let slot = Slot::new(storage.size());
        let filled = Arc::clone(&slot);
        self.submit(OP, move |_| Ok(filled.register(Ok(storage), options)))?;
        Ok(Some(Window::on_host(self.member(OP)?, slot)))
    }

    /// Takes part in the registration of a window only to say that this rank has no buffer for it: every rank gets the
    /// error, and nobody waits for this one. For callers that find out before they have a storage.
    pub fn refuse_window(&self, why: Error) -> Result<()> {
        if self.cuda().is_some() {
            // NCCL has no word for it: the other ranks wait until their deadline.
            return Err(why);
        }
        self.submit(OP, move |_| Ok(Slot::new(0).register(Err(why), WindowOptions::default())))
    }
}

/// NCCL's registration: immediately, or at the end of the group.
#[inline]
fn on_device(cuda: &Arc<Cuda>, storage: Buffer, options: WindowOptions) -> Result<Option<Window>> {
    let flags = options.flags.bits();
    if !cuda.config.blocking || group::is_open() {
        return on_device_later(cuda, storage, flags).map(|window| Some(*window));
    }
    match cuda.comm.register_window(storage, flags) {
        Ok(Some(window)) => Ok(Some(Window::on_device(window, Arc::clone(cuda)))),
        Ok(None) => Ok(None),
        Err(error) => Err(not_registered(error)),
    }
}

#[cold]
#[inline(never)]
fn on_device_later(cuda: &Arc<Cuda>, storage: Buffer, flags: u32) -> Result<Box<Window>> {
    let prepared = cuda.open(OP).and_then(|comm| Ok(comm.window_job(storage, flags)?));
    let (window, job) = prepared.map_err(group::poison)?;
    drop(cuda.submit(Ok(job))?);
    Ok(Box::new(Window::on_device(window, Arc::clone(cuda))))
}

#[cold]
#[inline(never)]
fn not_registered(error: towline::Error) -> Error {
    error.into()
}
