//! What is put into streams: checked, then run alone or with others.
#![allow(unsafe_code, reason = "hands addresses and streams to NCCL")]

use std::ops::Deref;
use std::sync::Arc;

use towline_sys::cuda::{Entered, StreamHandle};
use towline_sys::nccl::{self as sys, Call, Progress, Put, Slot, WaitDescription};

use super::comm::{Comm, CommOptions, Core};
use super::handles::{SYMMETRIC, Window};
use super::registered::{Key, Shape};
use super::{Pending, failed};
use crate::memory::{Buffer, MemoryDescription, Place, Storage};
use crate::{Error, Kind, Result};

/// Memory of a call: a part of a buffer, which is kept until the stream has got past the call.
#[derive(Debug, Clone)]
pub struct Part {
    buffer: Buffer,
    offset: usize,
    len: usize,
}

impl Part {
    /// A part of a buffer; it may be empty.
    ///
    /// # Errors
    /// `Invalid` where it does not lie within.
    pub fn new(buffer: Buffer, offset: usize, len: usize) -> Result<Part> {
        if offset.checked_add(len).is_none_or(|end| end > buffer.size()) {
            let size = buffer.size();
            return Err(Error::invalid("part", format!("{len} bytes at {offset} do not lie within {size}")));
        }
        Ok(Part { buffer, offset, len })
    }

    /// The address of the first byte.
    pub fn addr(&self) -> usize {
        self.buffer.addr() + self.offset
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it names no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The buffer that it is a part of.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Where it starts in it.
    pub fn offset(&self) -> usize {
        self.offset
    }
}

/// The type of elements, by NCCL's number and by their size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Element {
    /// NCCL's number.
    pub number: i32,
    /// The bytes of one.
    pub size: usize,
}

impl From<crate::Dtype> for Element {
    fn from(dtype: crate::Dtype) -> Element {
        use crate::Dtype;
        let number = match dtype {
            Dtype::I8 => 0,
            Dtype::U8 => 1,
            Dtype::I32 => 2,
            Dtype::U32 => 3,
            Dtype::I64 => 4,
            Dtype::U64 => 5,
            Dtype::F16 => 6,
            Dtype::F32 => 7,
            Dtype::F64 => 8,
            Dtype::Bf16 => 9,
        };
        Element { number, size: dtype.size() }
    }
}

/// How elements become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduce {
    /// By an operation of NCCL's: 0 is the sum, 1 the product, 2 the maximum, 3 the minimum, 4 the average.
    Plain(i32),
    /// Each rank's elements times that scalar, which are the first bytes, summed.
    Scaled([u8; 8]),
}

/// A call on a communicator, checked and not made yet.
#[must_use = "a job does nothing until it is run"]
pub struct Job {
    comm: Comm,
    op: &'static str,
    action: Action,
    stream: StreamHandle,
    keeps: [Option<Buffer>; 2],
    pending: Pending,
}

enum Action {
    Call { call: Call, scale: Option<[u8; 8]>, send: u64, recv: u64, count: usize, element: Element },
    Put { from: u64, count: usize, element: Element, window: Key, put: Put },
    Copy { near: u64, len: usize, window: (Key, usize), peer: i32, offset: usize, get: bool },
    Signal { peer: i32, index: i32, context: i32 },
    Wait(Vec<WaitDescription>),
    Window { key: Key, shape: Shape, slot: Slot },
}

/// Refuses memory that is not on the communicator's GPU.
pub(super) fn check_place(op: &'static str, core: &Core, buffer: &Buffer) -> Result<()> {
    let ordinal = core.ordinal;
    match buffer.place() {
        Place::Cuda(on) if on == ordinal => Ok(()),
        place => {
            let message = format!("the communicator is on GPU {ordinal}, the buffer on {place}");
            Err(Error::invalid(op, message))
        }
    }
}

impl Comm {
    /// Prepares a collective call or a message. `count` are the elements of one block, as NCCL counts them; the numbers of
    /// the operation in `call` are replaced by those of `reduce`.
    ///
    /// # Errors
    /// `Invalid` where memory is not on this communicator's GPU, or the communicator cannot be used.
    pub fn call_job(
        &self,
        op: &'static str,
        call: Call,
        reduce: Reduce,
        (send, recv): (Option<&Part>, Option<&Part>),
        count: usize,
        element: Element,
    ) -> Result<Job> {
        self.0.usable(op)?;
        for part in [send, recv].into_iter().flatten() {
            check_place(op, &self.0, &part.buffer)?;
        }
        let (number, scale) = match reduce {
            Reduce::Plain(number) => (number, None),
            Reduce::Scaled(scalar) => (0, Some(scalar)),
        };
        let (call, reduces) = by(call, number);
        let address = |part: Option<&Part>| part.map_or(0, |part| part.addr() as u64);
        let action = Action::Call {
            call,
            scale: scale.filter(|_| reduces),
            send: address(send),
            recv: address(recv),
            count,
            element,
        };
        Ok(self.job(op, action, [send, recv].map(|part| part.map(|part| part.buffer.clone()))))
    }

    /// Prepares a put into a peer's memory of a window, with a signal behind it.
    ///
    /// # Errors
    /// `Invalid` where the range does not lie in the window, or the memory is in no symmetric window of this communicator.
    pub fn put_job(
        &self,
        window: &Window,
        from: &Part,
        element: Element,
        (peer, offset): (usize, usize),
        (context, index): (u32, u32),
    ) -> Result<Job> {
        const OP: &str = "put_signal";
        self.0.usable(OP)?;
        check_place(OP, &self.0, &from.buffer)?;
        let (peer, index, context) = self.counter(OP, peer, context, index)?;
        let (key, handle) = window.range(OP, offset, from.len)?;
        if !from.len.is_multiple_of(element.size) {
            let message = format!("{} bytes are not whole elements of {}", from.len, element.size);
            return Err(Error::invalid(OP, message));
        }
        let inside = |known: Shape| {
            known.flags & SYMMETRIC != 0
                && from.addr() >= known.addr
                && from.addr() + from.len <= known.addr + known.size
        };
        if !from.is_empty() && !self.0.calling.lock().windows().any(inside) {
            let message = "NCCL puts from memory in a window that was registered with COLL_SYMMETRIC only";
            return Err(Error::invalid(OP, message));
        }
        let put = Put { peer, window: handle, offset, index, context };
        let (address, count) = (from.addr() as u64, from.len / element.size);
        let action = Action::Put { from: address, count, element, window: key, put };
        Ok(self.job(OP, action, [Some(from.buffer.clone()), window.memory()]))
    }

    /// Prepares a copy into a peer's memory of a window, or with `get` out of it: through the mapping of that memory that NCCL
    /// has made for this process, so that the peer must be on this host.
    ///
    /// # Errors
    /// `Invalid` where the range does not lie in the window; `Unsupported` before NCCL 2.30, and when it runs where the peer's
    /// memory is not mapped here.
    pub fn copy_job(
        &self,
        window: &Window,
        near: &Part,
        (peer, offset): (usize, usize),
        get: bool,
    ) -> Result<Job> {
        let op = if get { "get" } else { "put" };
        self.0.usable(op)?;
        check_place(op, &self.0, &near.buffer)?;
        let (_, nranks) = self.place()?;
        if peer >= nranks {
            return Err(Error::invalid(op, format!("peer {peer} is not among {nranks} ranks")));
        }
        let named = window.range(op, offset, near.len)?;
        let (peer, len) = (peer as i32, near.len);
        let action = Action::Copy { near: near.addr() as u64, len, window: named, peer, offset, get };
        Ok(self.job(op, action, [Some(near.buffer.clone()), window.memory()]))
    }

    /// Prepares a signal to a peer.
    pub fn signal_job(&self, peer: usize, context: u32, index: u32) -> Result<Job> {
        const OP: &str = "signal";
        self.0.usable(OP)?;
        let (peer, index, context) = self.counter(OP, peer, context, index)?;
        Ok(self.job(OP, Action::Signal { peer, index, context }, [None, None]))
    }

    /// Prepares a wait of a stream for signals: peer, count, context, index.
    pub fn wait_job(&self, signals: &[(usize, u64, u32, u32)]) -> Result<Job> {
        const OP: &str = "wait_signal";
        self.0.usable(OP)?;
        if signals.is_empty() {
            return Err(Error::invalid(OP, "no signals are waited for"));
        }
        let descriptions = signals.iter().map(|&(peer, count, context, index)| {
            let (peer, index, context) = self.counter(OP, peer, context, index)?;
            match i32::try_from(count) {
                Ok(count @ 1..) => Ok(WaitDescription { count, peer, index, context }),
                _ => Err(Error::invalid(OP, format!("{count} signals cannot be waited for"))),
            }
        });
        let descriptions = descriptions.collect::<Result<Vec<_>>>()?;
        Ok(self.job(OP, Action::Wait(descriptions), [None, None]))
    }

    fn counter(&self, op: &'static str, peer: usize, context: u32, index: u32) -> Result<(i32, i32, i32)> {
        const SEVERAL: u32 = 23100;
        let (_, nranks) = self.place()?;
        if peer >= nranks {
            return Err(Error::invalid(op, format!("peer {peer} is not among {nranks} ranks")));
        }
        if (context, index) != (0, 0) && self.version() < SEVERAL {
            let message = format!(
                "NCCL {} has one context and one signal: context {context}, index {index} need NCCL 2.31",
                self.0.nccl.version_text()
            );
            return Err(Error::new(Kind::Unsupported, op, message));
        }
        let CommOptions { contexts, signals, .. } = *self.options();
        if context >= contexts || index >= signals {
            let message = format!(
                "context {context}, signal {index}: the communicator has {contexts} contexts of {signals} signals"
            );
            return Err(Error::invalid(op, message));
        }
        Ok((peer as i32, index as i32, context as i32))
    }

    fn job(&self, op: &'static str, action: Action, keeps: [Option<Buffer>; 2]) -> Job {
        let pending = Pending::new(op, self.options().timeout, Arc::downgrade(self.0.deref()));
        Job { comm: self.clone(), op, action, stream: StreamHandle(0), keeps, pending }
    }
}

/// The call, by that operation, and whether it has one.
fn by(call: Call, number: i32) -> (Call, bool) {
    match call {
        Call::AllReduce(_) => (Call::AllReduce(number), true),
        Call::Reduce(_, root) => (Call::Reduce(number, root), true),
        Call::ReduceScatter(_) => (Call::ReduceScatter(number), true),
        other => (other, false),
    }
}

impl Job {
    pub(super) fn window(comm: &Comm, key: Key, shape: Shape, slot: Slot) -> Job {
        comm.job("register_window", Action::Window { key, shape, slot }, [None, None])
    }

    /// Puts it into that stream rather than into the default one.
    ///
    /// # Safety
    /// The stream is one of the communicator's GPU, and lives until the work that is put into it has ended.
    pub unsafe fn on(mut self, stream: StreamHandle) -> Job {
        self.stream = stream;
        self
    }

    /// Its end.
    pub fn pending(&self) -> Pending {
        self.pending.clone()
    }

    /// Makes the call.
    ///
    /// # Errors
    /// What NCCL says; where the communicator was stopped meanwhile, why.
    pub fn run(mut self) -> Result<()> {
        let core: Arc<Core> = Arc::clone(&self.comm.0);
        let outcome = (|| {
            core.settle(self.op)?;
            let raw = core.usable(self.op)?;
            core.sweep(4);
            let entered = core.gpu.enter(self.op)?;
            let one = core.serialise();
            let guard = core.guard();
            let progress = self.issue(raw, &entered);
            drop(guard);
            let progress = progress?;
            if !matches!(self.action, Action::Window { .. }) && progress == Progress::InProgress {
                core.settle(self.op)?;
            }
            drop(one);
            self.after(&entered, progress)
        })();
        if let Err(error) = &outcome {
            self.pending.ended(Err(error.clone()));
        }
        outcome
    }

    fn issue(&self, raw: sys::Comm, entered: &Entered<'_>) -> Result<Progress> {
        let core = &self.comm.0;
        let nccl = &core.nccl;
        if let Action::Copy { near, len, window, peer, offset, get } = &self.action {
            return self.copy(entered, (*near, *len), *window, (*peer, *offset), *get);
        }
        // SAFETY: the communicator is alive (`usable`); memory is kept until the stream has got past the call (`after`), the
        // stream by the promise of who named it; ranges in windows were checked.
        let done = unsafe {
            match &self.action {
                Action::Call { call, scale: None, send, recv, count, element } => {
                    nccl.call(raw, *call, *send, *recv, *count, element.number, self.stream)
                }
                Action::Call { call, scale: Some(scale), send, recv, count, element } => {
                    nccl.scaled_sum(raw, *scale, element.number).and_then(|number| {
                        let (call, _) = by(*call, number);
                        let done = nccl.call(raw, call, *send, *recv, *count, element.number, self.stream);
                        // NCCL has copied the operation into the call.
                        nccl.destroy_op(raw, number)?;
                        done
                    })
                }
                Action::Put { from, count, element, put, window } => {
                    if !window.is_open() {
                        return Err(Error::invalid(self.op, "the window was closed"));
                    }
                    nccl.put_signal(raw, *from, *count, element.number, *put, self.stream)
                }
                Action::Signal { peer, index, context } => {
                    nccl.signal(raw, *peer, *index, *context, self.stream)
                }
                Action::Wait(signals) => nccl.wait_signal(raw, signals, self.stream),
                Action::Copy { .. } => Ok(Progress::Done),
                Action::Window { key, shape: Shape { addr, size, flags }, slot } => {
                    if !key.is_open() {
                        return Err(Error::invalid(self.op, "the window was closed"));
                    }
                    nccl.window(raw, *addr as u64, *size, *flags, slot)
                }
            }
        };
        done.map_err(|error| match &self.action {
            Action::Window { shape, .. } => core.window_refused(shape.addr, error),
            _ => core.explain(self.op, error),
        })
    }

    fn copy(
        &self,
        entered: &Entered<'_>,
        (near, len): (u64, usize),
        (window, handle): (Key, usize),
        (peer, offset): (i32, usize),
        get: bool,
    ) -> Result<Progress> {
        let core = &self.comm.0;
        if !window.is_open() {
            return Err(Error::invalid(self.op, "the window was closed"));
        }
        // SAFETY: the window is open, and closing takes the lock that is held here; the range was checked.
        let far = unsafe { core.nccl.peer_address(handle, offset, peer) };
        let far = far.map_err(|error| core.explain(self.op, error))?.ok_or_else(|| {
            let message = format!("the memory of rank {peer} is not mapped here: it is on another host");
            Error::new(Kind::Unsupported, self.op, message)
        })?;
        let (to, from) = if get { (near, far) } else { (far, near) };
        // SAFETY: this rank's memory is kept until the stream has got past the copy (`after`); the peer's stays mapped while this
        // rank's window is open, which waits for the stream; the stream lives by the promise of who named it.
        let copied = unsafe { entered.copy_foreign(self.stream, to, from, len) };
        copied.map_err(|error| crate::cuda::failed(self.op, error))?;
        Ok(Progress::Done)
    }

    /// What is in a stream now ends when its event happens.
    fn after(&mut self, entered: &Entered<'_>, progress: Progress) -> Result<()> {
        let core = &self.comm.0;
        if let Action::Window { .. } = &self.action {
            match progress {
                Progress::Done => self.pending.ended(Ok(())),
                Progress::InProgress => self.pending.settling(),
            }
            return Ok(());
        }
        let event = Arc::new(core.event(self.op, entered)?);
        // SAFETY: the stream is alive by the promise of who named it.
        let recorded = unsafe { entered.record_foreign(self.stream, &event) };
        core.keep(&event, std::mem::take(&mut self.keeps));
        recorded.map_err(|error| crate::cuda::failed(self.op, error))?;
        self.pending.started(event);
        Ok(())
    }
}

/// Makes calls as one group of NCCL's, in this thread: they start together, and none does where one is refused.
///
/// # Errors
/// The first refusal; the ends of all of them have it too.
pub fn run_together(mut jobs: Vec<Job>) -> Result<()> {
    const OP: &str = "group_end";
    let Some(nccl) = jobs.first().map(|job| job.comm.0.nccl.clone()) else { return Ok(()) };
    let mut cores: Vec<Arc<Core>> = Vec::new();
    for job in &jobs {
        if !cores.iter().any(|known| Arc::ptr_eq(known, &job.comm.0)) {
            cores.push(Arc::clone(&job.comm.0));
        }
    }
    // Every thread takes them in the same order.
    cores.sort_by_key(|core| Arc::as_ptr(core).addr());
    let outcome = (|| {
        if cores.iter().any(|core| core.options.blocking != cores[0].options.blocking) {
            let message = "communicators that block and that do not cannot share a group";
            return Err(Error::invalid(OP, message));
        }
        let mut raws = Vec::with_capacity(jobs.len());
        for job in &jobs {
            job.comm.0.settle(job.op)?;
            raws.push(job.comm.0.usable(job.op)?);
        }
        let _ones: Vec<_> = cores.iter().map(|core| core.serialise()).collect();
        let guards: Vec<_> = cores.iter().map(|core| core.guard()).collect();
        nccl.group_start().map_err(|error| failed(OP, Some(&nccl), error))?;
        let issued = jobs.iter().zip(&raws).try_for_each(|(job, raw)| {
            let entered = job.comm.0.gpu.enter(job.op)?;
            job.issue(*raw, &entered).map(drop)
        });
        let ended = nccl.group_end();
        drop(guards);
        issued?;
        let progress = ended.map_err(|error| cores[0].explain(OP, error))?;
        if progress == Progress::InProgress {
            for job in jobs.iter().filter(|job| !matches!(job.action, Action::Window { .. })) {
                job.comm.0.settle(job.op)?;
            }
        }
        for job in &mut jobs {
            let gpu = Arc::clone(&job.comm.0.gpu);
            let entered = gpu.enter(job.op)?;
            job.after(&entered, progress)?;
        }
        Ok(())
    })();
    if let Err(error) = &outcome {
        for job in &jobs {
            job.pending.ended(Err(error.clone()));
        }
    }
    outcome
}
