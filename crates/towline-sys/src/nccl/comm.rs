//! Calls on communicators: checked, not owned. Who keeps memory, streams and handles alive is the caller's to say.
#![allow(unsafe_code, reason = "foreign calls")]

use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::api::{self, Api, RawConfig, RawId, WaitDescription};
use super::{MAPPED, Nccl, Progress, SEVERAL_SIGNALS, SIGNALS};
use crate::cuda::StreamHandle;
use crate::{Error, Result};

/// A communicator, by NCCL's handle for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Comm(usize);

impl Comm {
    #[inline]
    fn raw(self) -> *mut c_void {
        ptr::with_exposed_provenance_mut(self.0)
    }

    /// The handle as a number.
    #[inline]
    pub fn handle(self) -> usize {
        self.0
    }

    /// The communicator of that handle; `None` for 0.
    #[inline]
    pub fn named(handle: usize) -> Option<Comm> {
        Some(handle).filter(|handle| *handle != 0).map(Comm)
    }
}

/// Where NCCL writes a handle: at once, at the end of a group, or from a thread of its own. Clones are the same place, which
/// stays for as long as one of them lives.
#[derive(Debug, Clone, Default)]
pub struct Slot(Arc<AtomicPtr<c_void>>);

impl Slot {
    /// The handle, 0 until it was written.
    #[inline]
    pub fn handle(&self) -> usize {
        self.0.load(Ordering::Acquire).expose_provenance()
    }

    /// The communicator that was written.
    #[inline]
    pub fn comm(&self) -> Option<Comm> {
        Comm::named(self.handle())
    }

    fn place(&self) -> *mut *mut c_void {
        self.0.as_ptr()
    }
}

/// What is set when a communicator is made; NCCL's own variables of the environment come before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Whether calls wait for their end.
    pub blocking: bool,
    /// How many contexts signals have, from NCCL 2.31 on; NCCL's own number where not set.
    pub contexts: Option<u32>,
    /// How many signals each context has, from NCCL 2.31 on; NCCL's own number where not set.
    pub signals: Option<u32>,
}

impl Default for Config {
    fn default() -> Config {
        Config { blocking: true, contexts: None, signals: None }
    }
}

const UNSET: c_int = c_int::MIN;

/// In the place of a code where the version has no such function.
const MISSING: i32 = i32::MIN;

/// The calls that register buffers and give that up. Their code is all that is looked at where it is 0; otherwise NCCL is asked
/// [what](Nccl::registering) [it means](Nccl::giving_up).
#[derive(Clone, Copy)]
pub struct BufferCalls {
    register: unsafe extern "C" fn(api::RawComm, *mut c_void, usize, *mut *mut c_void) -> c_int,
    deregister: unsafe extern "C" fn(api::RawComm, *mut c_void) -> c_int,
}

impl BufferCalls {
    /// [`Nccl::register`].
    ///
    /// # Safety
    /// As there, and the library is still loaded.
    #[inline(always)]
    pub unsafe fn register(self, comm: Comm, address: u64, len: usize) -> (i32, usize) {
        // NCCL does not write it for host memory.
        let mut handle = ptr::null_mut();
        // SAFETY: the caller's promise; the handle outlives the call.
        let code = unsafe { (self.register)(comm.raw(), pointer(address), len, &mut handle) };
        (code, handle.expose_provenance())
    }

    /// [`Nccl::deregister`].
    ///
    /// # Safety
    /// As there, and the library is still loaded.
    #[inline(always)]
    pub unsafe fn deregister(self, comm: Comm, handle: usize) -> i32 {
        // SAFETY: the caller's promise.
        unsafe { (self.deregister)(comm.raw(), pointer(handle as u64)) }
    }
}

unsafe extern "C" fn no_register(_: api::RawComm, _: *mut c_void, _: usize, _: *mut *mut c_void) -> c_int {
    MISSING
}

unsafe extern "C" fn no_deregister(_: api::RawComm, _: *mut c_void) -> c_int {
    MISSING
}

impl Config {
    fn raw(self, version: u32) -> RawConfig {
        let number = |value: Option<u32>| value.and_then(|value| value.try_into().ok()).unwrap_or(UNSET);
        let (size, known) = match version {
            SEVERAL_SIGNALS.. => (size_of::<RawConfig>(), SEVERAL_SIGNALS),
            _ => (offset_of!(RawConfig, traffic_class).next_multiple_of(8), 21800),
        };
        RawConfig {
            size,
            magic: 0xcafe_beef,
            version: known,
            blocking: c_int::from(self.blocking),
            cga_cluster_size: UNSET,
            min_ctas: UNSET,
            max_ctas: UNSET,
            net_name: ptr::null(),
            split_share: UNSET,
            traffic_class: UNSET,
            name: ptr::null(),
            collnet_enable: UNSET,
            cta_policy: UNSET,
            shrink_share: UNSET,
            nvls_ctas: UNSET,
            channels_per_peer: UNSET,
            nvlink_centric: UNSET,
            graph_usage_mode: UNSET,
            rma_contexts: number(self.contexts),
            most_peers: UNSET,
            graph_stream_ordering: UNSET,
            launch_order_implicit: UNSET,
            rma_signals: number(self.signals),
            rma_eager_init: UNSET,
            host_cft_mode: UNSET,
        }
    }
}

/// What all ranks do together, or two of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// `ncclAllReduce` by that operation.
    AllReduce(i32),
    /// `ncclReduce` by that operation, to that root.
    Reduce(i32, i32),
    /// `ncclBroadcast` from that root.
    Broadcast(i32),
    /// `ncclAllGather`.
    AllGather,
    /// `ncclGather` to that root.
    Gather(i32),
    /// `ncclScatter` from that root.
    Scatter(i32),
    /// `ncclReduceScatter` by that operation.
    ReduceScatter(i32),
    /// `ncclAlltoAll`.
    AllToAll,
    /// `ncclSend` to that rank.
    Send(i32),
    /// `ncclRecv` from that rank.
    Recv(i32),
}

/// A put: where to, and which signal comes behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Put {
    /// The rank.
    pub peer: i32,
    /// This rank's handle of the window.
    pub window: usize,
    /// Where in the peer's memory of the window, in bytes.
    pub offset: usize,
    /// The signal.
    pub index: i32,
    /// Its context.
    pub context: i32,
}

#[inline]
fn pointer(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

fn stream_pointer(stream: StreamHandle) -> *mut c_void {
    ptr::without_provenance_mut(stream.0)
}

impl Nccl {
    /// Joins a group. The handle is in `out` when it returns, also where the call is still in progress.
    pub fn init(
        &self,
        out: &Slot,
        nranks: i32,
        id: &[u8; 128],
        rank: i32,
        config: Config,
    ) -> Result<Progress> {
        let function = self.optional(self.api().init, "ncclCommInitRankConfig", 21400)?;
        let mut config = config.raw(self.version());
        // SAFETY: the slot outlives the call, and NCCL writes the handle before it returns; the settings are copied.
        self.check("ncclCommInitRankConfig", unsafe {
            function(out.place(), nranks, RawId(*id), rank, &mut config)
        })
    }

    /// Splits a group; a rank without a colour takes part too, and gets no handle.
    ///
    /// # Safety
    /// The communicator is alive, and the slot lives until the parent's work has ended.
    pub unsafe fn split(
        &self,
        comm: Comm,
        color: Option<i32>,
        key: i32,
        out: &Slot,
        config: Config,
    ) -> Result<Progress> {
        let function = self.optional(self.api().split, "ncclCommSplit", 21800)?;
        let mut config = config.raw(self.version());
        // SAFETY: the caller's promise; the settings are copied.
        let code = unsafe { function(comm.raw(), color.unwrap_or(-1), key, out.place(), &mut config) };
        self.check("ncclCommSplit", code)
    }

    /// Makes a group of all ranks but those; with `abort`, work in flight is ended first.
    ///
    /// # Safety
    /// The communicator is alive, and the slot lives until the parent's work has ended.
    pub unsafe fn shrink(
        &self,
        comm: Comm,
        exclude: &[i32],
        out: &Slot,
        config: Config,
        abort: bool,
    ) -> Result<Progress> {
        let function = self.optional(self.api().shrink, "ncclCommShrink", 22700)?;
        let (mut list, mut config) = (exclude.to_vec(), config.raw(self.version()));
        let count = c_int::try_from(list.len())
            .map_err(|_| Error::argument("ncclCommShrink", "too many ranks are excluded"))?;
        // SAFETY: the caller's promise; list and settings are copied.
        self.check("ncclCommShrink", unsafe {
            function(comm.raw(), list.as_mut_ptr(), count, out.place(), &mut config, c_int::from(abort))
        })
    }

    /// How far the work of a communicator is.
    ///
    /// # Safety
    /// The communicator is alive.
    pub unsafe fn progress(&self, comm: Comm) -> Result<Progress> {
        let function = self.optional(self.api().async_error, "ncclCommGetAsyncError", 20400)?;
        let mut state = 0;
        // SAFETY: the caller's promise; `state` outlives the call.
        self.check("ncclCommGetAsyncError", unsafe { function(comm.raw(), &mut state) })?;
        self.check("ncclCommGetAsyncError", state)
    }

    /// Ends the use of a communicator, once its work has ended; it stays alive.
    ///
    /// # Safety
    /// The communicator is alive.
    pub unsafe fn finalize(&self, comm: Comm) -> Result<Progress> {
        let function = self.optional(self.api().finalize, "ncclCommFinalize", 21400)?;
        // SAFETY: the caller's promise.
        self.check("ncclCommFinalize", unsafe { function(comm.raw()) })
    }

    /// Frees a communicator.
    ///
    /// # Safety
    /// It is alive, has nothing in progress, and is not used again.
    pub unsafe fn destroy(&self, comm: Comm) -> Result<Progress> {
        let function = self.optional(self.api().destroy, "ncclCommDestroy", 20000)?;
        // SAFETY: the caller's promise.
        self.check("ncclCommDestroy", unsafe { function(comm.raw()) })
    }

    /// Ends the work in flight and frees a communicator.
    ///
    /// # Safety
    /// It is alive, and is not used again.
    pub unsafe fn abort(&self, comm: Comm) -> Result<Progress> {
        let function = self.optional(self.api().abort, "ncclCommAbort", 20400)?;
        // SAFETY: the caller's promise.
        self.check("ncclCommAbort", unsafe { function(comm.raw()) })
    }

    /// Ends the work in flight; the communicator stays alive, for nothing but its end, a split or a shrink.
    ///
    /// # Safety
    /// It is alive.
    pub unsafe fn revoke(&self, comm: Comm) -> Result<Progress> {
        let function = self.optional(self.api().revoke, "ncclCommRevoke", 22809)?;
        // SAFETY: the caller's promise.
        self.check("ncclCommRevoke", unsafe { function(comm.raw(), 0) })
    }

    /// Rank and size of a communicator.
    ///
    /// # Safety
    /// It is alive, and has nothing in progress.
    pub unsafe fn place(&self, comm: Comm) -> Result<(usize, usize)> {
        let rank = self.optional(self.api().rank, "ncclCommUserRank", 20000)?;
        let count = self.optional(self.api().count, "ncclCommCount", 20000)?;
        let (mut mine, mut all) = (0, 0);
        // SAFETY: the caller's promise; both outlive the calls.
        self.check("ncclCommUserRank", unsafe { rank(comm.raw(), &mut mine) })?;
        // SAFETY: as above.
        self.check("ncclCommCount", unsafe { count(comm.raw(), &mut all) })?;
        Ok((usize::try_from(mine).unwrap_or(0), usize::try_from(all).unwrap_or(0)))
    }

    /// Registers a buffer; the handle is 0 where NCCL has no use for that.
    ///
    /// # Safety
    /// The communicator is alive, and the bytes are until they are deregistered.
    #[inline(always)]
    pub unsafe fn register(&self, comm: Comm, address: u64, len: usize) -> Result<usize> {
        let function = self.known(self.api().register, "ncclCommRegister", api::REGISTER)?;
        // NCCL does not write it for host memory.
        let mut handle = ptr::null_mut();
        // SAFETY: the caller's promise; the handle outlives the call.
        let code = unsafe { function(comm.raw(), pointer(address), len, &mut handle) };
        self.check("ncclCommRegister", code)?;
        Ok(handle.expose_provenance())
    }

    /// The calls that register buffers and give that up, for who makes many of them.
    pub fn buffer_calls(&self) -> BufferCalls {
        let Api { register, deregister, .. } = self.api();
        BufferCalls {
            register: register.unwrap_or(no_register),
            deregister: deregister.unwrap_or(no_deregister),
        }
    }

    /// What the code of [`BufferCalls::register`] means.
    #[cold]
    #[inline(never)]
    pub fn registering(&self, code: i32) -> Result<Progress> {
        self.meaning("ncclCommRegister", api::REGISTER, code)
    }

    fn meaning(&self, call: &'static str, since: u32, code: i32) -> Result<Progress> {
        if code == MISSING { Err(self.too_old(call, since)) } else { self.check(call, code) }
    }

    /// Gives up the registration of a buffer.
    ///
    /// # Safety
    /// The communicator is alive, the handle is one of it, and is not used again.
    #[inline(always)]
    pub unsafe fn deregister(&self, comm: Comm, handle: usize) -> Result<()> {
        let function = self.known(self.api().deregister, "ncclCommDeregister", api::REGISTER)?;
        // SAFETY: the caller's promise.
        let code = unsafe { function(comm.raw(), pointer(handle as u64)) };
        self.check("ncclCommDeregister", code).map(drop)
    }

    /// What the code of [`BufferCalls::deregister`] or of [`close_window_bare`](Nccl::close_window_bare) means.
    #[cold]
    #[inline(never)]
    pub fn giving_up(&self, is_window: bool, code: i32) -> Result<Progress> {
        if is_window {
            self.meaning("ncclCommWindowDeregister", api::WINDOW, code)
        } else {
            self.meaning("ncclCommDeregister", api::REGISTER, code)
        }
    }

    /// Registers a window, with all ranks. The handle comes into the slot now, at the end of the group, or when the
    /// communicator has nothing in progress.
    ///
    /// # Safety
    /// The communicator is alive, the bytes are until the window is closed, and the slot is until the handle has come.
    pub unsafe fn window(
        &self,
        comm: Comm,
        address: u64,
        len: usize,
        flags: u32,
        out: &Slot,
    ) -> Result<Progress> {
        let function = self.known(self.api().window, "ncclCommWindowRegister", api::WINDOW)?;
        // SAFETY: the caller's promise.
        self.check("ncclCommWindowRegister", unsafe {
            function(comm.raw(), pointer(address), len, out.place(), flags as c_int)
        })
    }

    /// Registers a window, with all ranks, on a communicator that blocks and outside of groups: the handle comes now. It is 0
    /// where NCCL has none.
    ///
    /// # Safety
    /// The communicator is alive and blocks, this thread has begun no group, and the bytes are alive until the window is closed.
    #[inline(always)]
    pub unsafe fn window_now(&self, comm: Comm, address: u64, len: usize, flags: u32) -> Result<usize> {
        let function = self.known(self.api().window, "ncclCommWindowRegister", api::WINDOW)?;
        let mut handle = ptr::null_mut();
        // SAFETY: the caller's promise; the handle outlives the call, which has ended when it returns.
        let code = unsafe { function(comm.raw(), pointer(address), len, &mut handle, flags as c_int) };
        self.check("ncclCommWindowRegister", code)?;
        Ok(handle.expose_provenance())
    }

    /// Closes a window.
    ///
    /// # Safety
    /// The communicator is alive, the handle is one of it, is not used again, and nobody accesses the memory.
    #[inline(always)]
    pub unsafe fn close_window(&self, comm: Comm, handle: usize) -> Result<Progress> {
        let function = self.known(self.api().close_window, "ncclCommWindowDeregister", api::WINDOW)?;
        // SAFETY: the caller's promise.
        let code = unsafe { function(comm.raw(), pointer(handle as u64)) };
        self.check("ncclCommWindowDeregister", code)
    }

    /// The same for callers that look at the code alone where it is 0, and otherwise [asks](Nccl::giving_up) what it means.
    ///
    /// # Safety
    /// As above.
    #[inline(always)]
    pub unsafe fn close_window_bare(&self, comm: Comm, handle: usize) -> i32 {
        match self.api().close_window {
            // SAFETY: the caller's promise.
            Some(function) => unsafe { function(comm.raw(), pointer(handle as u64)) },
            None => MISSING,
        }
    }

    /// Where that rank's memory of a window lies in this process's address space of the GPU; `None` where it is not mapped here:
    /// the rank is on another host, or this GPU does not reach its one.
    ///
    /// # Safety
    /// The handle is that of an open window of a communicator that is alive, and the offset lies in it.
    pub unsafe fn peer_address(&self, window: usize, offset: usize, peer: i32) -> Result<Option<u64>> {
        let function = self.optional(self.api().peer_address, "ncclGetPeerDevicePointer", MAPPED)?;
        let mut address = ptr::null_mut();
        // SAFETY: the caller's promise; `address` outlives the call.
        let code = unsafe { function(pointer(window as u64), offset, peer, &mut address) };
        self.check("ncclGetPeerDevicePointer", code)?;
        Ok(Some(address.expose_provenance() as u64).filter(|address| *address != 0))
    }

    /// An operation that multiplies this rank's elements by a scalar, and sums. `scalar` has the bytes of one element.
    ///
    /// # Safety
    /// The communicator is alive.
    pub unsafe fn scaled_sum(&self, comm: Comm, scalar: [u8; 8], datatype: i32) -> Result<i32> {
        const ON_THE_HOST: c_int = 1;
        let function = self.optional(self.api().scaled_sum, "ncclRedOpCreatePreMulSum", 21100)?;
        let (mut op, mut scalar) = (0, u64::from_ne_bytes(scalar));
        // SAFETY: the caller's promise; the scalar is read before it returns, and aligned for every type.
        self.check("ncclRedOpCreatePreMulSum", unsafe {
            function(&mut op, ptr::from_mut(&mut scalar).cast(), datatype, ON_THE_HOST, comm.raw())
        })?;
        Ok(op)
    }

    /// Gives up an operation; what was called with it goes on.
    ///
    /// # Safety
    /// The communicator is alive, and the operation is one of it.
    pub unsafe fn destroy_op(&self, comm: Comm, op: i32) -> Result<()> {
        let function = self.optional(self.api().destroy_op, "ncclRedOpDestroy", 21100)?;
        // SAFETY: the caller's promise.
        self.check("ncclRedOpDestroy", unsafe { function(op, comm.raw()) }).map(drop)
    }

    /// Puts a call into a stream. `count` is that of NCCL's function: the elements of one block.
    ///
    /// # Safety
    /// Communicator and stream are alive and of one device, and the bytes are until the stream has got past the call.
    #[allow(clippy::too_many_arguments, reason = "one call is all of these")]
    pub unsafe fn call(
        &self,
        comm: Comm,
        call: Call,
        send: u64,
        recv: u64,
        count: usize,
        datatype: i32,
        stream: StreamHandle,
    ) -> Result<Progress> {
        let (raw, stream) = (comm.raw(), stream_pointer(stream));
        let (from, to) = (pointer(send), pointer(recv));
        let api = self.api();
        // SAFETY: the caller's promise, for each of them.
        unsafe {
            match call {
                Call::AllReduce(op) => {
                    let f = self.optional(api.all_reduce, "ncclAllReduce", 20000)?;
                    self.check("ncclAllReduce", f(from, to, count, datatype, op, raw, stream))
                }
                Call::Reduce(op, root) => {
                    let f = self.optional(api.reduce, "ncclReduce", 20000)?;
                    self.check("ncclReduce", f(from, to, count, datatype, op, root, raw, stream))
                }
                Call::Broadcast(root) => {
                    let f = self.optional(api.broadcast, "ncclBroadcast", 20200)?;
                    self.check("ncclBroadcast", f(from, to, count, datatype, root, raw, stream))
                }
                Call::AllGather => {
                    let f = self.optional(api.all_gather, "ncclAllGather", 20000)?;
                    self.check("ncclAllGather", f(from, to, count, datatype, raw, stream))
                }
                Call::ReduceScatter(op) => {
                    let f = self.optional(api.reduce_scatter, "ncclReduceScatter", 20000)?;
                    self.check("ncclReduceScatter", f(from, to, count, datatype, op, raw, stream))
                }
                Call::Gather(root) => {
                    let f = self.optional(api.gather, "ncclGather", 22800)?;
                    self.check("ncclGather", f(from, to, count, datatype, root, raw, stream))
                }
                Call::Scatter(root) => {
                    let f = self.optional(api.scatter, "ncclScatter", 22800)?;
                    self.check("ncclScatter", f(from, to, count, datatype, root, raw, stream))
                }
                Call::AllToAll => {
                    let f = self.optional(api.all_to_all, "ncclAlltoAll", 22800)?;
                    self.check("ncclAlltoAll", f(from, to, count, datatype, raw, stream))
                }
                Call::Send(peer) => {
                    let f = self.optional(api.send, "ncclSend", 20700)?;
                    self.check("ncclSend", f(from, count, datatype, peer, raw, stream))
                }
                Call::Recv(peer) => {
                    let f = self.optional(api.recv, "ncclRecv", 20700)?;
                    self.check("ncclRecv", f(to, count, datatype, peer, raw, stream))
                }
            }
        }
    }

    /// Puts a copy into a peer's memory of a window into a stream, with a signal behind it.
    ///
    /// # Safety
    /// As for [`Nccl::call`]; the window is open, and the range lies in the peer's memory of it.
    pub unsafe fn put_signal(
        &self,
        comm: Comm,
        from: u64,
        count: usize,
        datatype: i32,
        put: Put,
        stream: StreamHandle,
    ) -> Result<Progress> {
        let function = self.optional(self.api().put_signal, "ncclPutSignal", SIGNALS)?;
        let Put { peer, window, offset, index, context } = put;
        // SAFETY: the caller's promise.
        self.check("ncclPutSignal", unsafe {
            function(
                pointer(from),
                count,
                datatype,
                peer,
                pointer(window as u64),
                offset,
                index,
                context,
                0,
                comm.raw(),
                stream_pointer(stream),
            )
        })
    }

    /// Puts a signal to a peer into a stream.
    ///
    /// # Safety
    /// Communicator and stream are alive and of one device.
    pub unsafe fn signal(
        &self,
        comm: Comm,
        peer: i32,
        index: i32,
        context: i32,
        stream: StreamHandle,
    ) -> Result<Progress> {
        let function = self.optional(self.api().signal, "ncclSignal", SIGNALS)?;
        // SAFETY: the caller's promise.
        self.check("ncclSignal", unsafe {
            function(peer, index, context, 0, comm.raw(), stream_pointer(stream))
        })
    }

    /// Lets a stream wait for signals.
    ///
    /// # Safety
    /// Communicator and stream are alive and of one device.
    pub unsafe fn wait_signal(
        &self,
        comm: Comm,
        signals: &[WaitDescription],
        stream: StreamHandle,
    ) -> Result<Progress> {
        let function = self.optional(self.api().wait_signal, "ncclWaitSignal", SIGNALS)?;
        let count = c_int::try_from(signals.len())
            .map_err(|_| Error::argument("ncclWaitSignal", "too many signals are waited for"))?;
        // SAFETY: the caller's promise; NCCL copies the list.
        self.check("ncclWaitSignal", unsafe {
            function(count, signals.as_ptr(), comm.raw(), stream_pointer(stream))
        })
    }

    /// Gives out memory of the current device that windows accept.
    pub fn allocate(&self, len: usize) -> Result<u64> {
        let function = self.optional(self.api().allocate, "ncclMemAlloc", 21900)?;
        let mut address = ptr::null_mut();
        // SAFETY: `address` outlives the call.
        self.check("ncclMemAlloc", unsafe { function(&mut address, len) })?;
        Ok(address.expose_provenance() as u64)
    }

    /// Frees memory.
    ///
    /// # Safety
    /// [`Nccl::allocate`] gave it out, and nobody uses it.
    pub unsafe fn free(&self, address: u64) -> Result<()> {
        let function = self.optional(self.api().free, "ncclMemFree", 21900)?;
        // SAFETY: the caller's promise.
        self.check("ncclMemFree", unsafe { function(pointer(address)) }).map(drop)
    }

    /// Begins a group of calls in this thread.
    pub fn group_start(&self) -> Result<()> {
        let function = self.optional(self.api().group_start, "ncclGroupStart", 20000)?;
        // SAFETY: it takes nothing.
        self.check("ncclGroupStart", unsafe { function() }).map(drop)
    }

    /// Ends a group of calls in this thread, and starts them.
    pub fn group_end(&self) -> Result<Progress> {
        let function = self.optional(self.api().group_end, "ncclGroupEnd", 20000)?;
        // SAFETY: it takes nothing; what the calls of the group touch is the promise of who made them.
        self.check("ncclGroupEnd", unsafe { function() })
    }
}
