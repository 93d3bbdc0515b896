//! Handles: windows and registered buffers, and one-sided access through windows.

use parking_lot::{Mutex, MutexGuard};
use pyo3::prelude::*;
use towline::Kind;
use towline_comm::{Error, Memory, Operation, Result};

use super::communicator::{Communicator, rank};
use super::errors::{OrRaise, invalid, raise, settle};
use super::memory::Array;
use super::quiet::Quiet;
use super::view::PeerView;
use super::work::Work;
use crate::attention::without_gil;
use crate::layout::Blocks;
use crate::lender::{self, Lender};
use crate::process::Inherited;
use crate::request::BlocksArgument;
use crate::{owners, process};

/// A buffer that is registered with a communicator.
#[pyclass(frozen, module = "towline._native")]
pub(crate) struct RegisteredBuffer(Quiet<towline_comm::RegisteredBuffer>);

impl RegisteredBuffer {
    pub(super) fn new(buffer: towline_comm::RegisteredBuffer) -> RegisteredBuffer {
        RegisteredBuffer(Quiet::new(buffer))
    }
}

#[pymethods]
impl RegisteredBuffer {
    /// The number of the registration, 0 once closed.
    #[getter]
    fn handle(&self) -> u64 {
        if process::in_child() { 0 } else { self.0.handle().unwrap_or(0) }
    }

    #[getter]
    fn size(&self) -> usize {
        self.0.size()
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        process::guard(py, "close")?;
        let closed = without_gil(py, || self.0.close());
        owners::release(py);
        closed
    }
}

/// A window of a communicator.
#[pyclass(frozen, module = "towline._native")]
pub(crate) struct Window {
    window: Quiet<towline_comm::Window>,
    addr: usize,
    /// Whose memory it is, where that can be asked. Touched with the GIL held only; gone once it is closed.
    lender: Mutex<Option<Inherited<Lender>>>,
}

/// A one-sided access, checked as far as this rank's side goes.
struct Access {
    peer: usize,
    /// In bytes of the peer's memory.
    offset: usize,
    memory: Memory,
}

impl Window {
    pub(super) fn new(window: towline_comm::Window, addr: usize, lender: Option<Lender>) -> Window {
        Window { window: Quiet::new(window), addr, lender: Mutex::new(lender.map(Inherited::new)) }
    }

    fn lender(&self) -> MutexGuard<'_, Option<Inherited<Lender>>> {
        self.lender.lock()
    }

    /// For a call on it, which fails where the memory is not the lender's any more: the window is closed then, so that no other rank
    /// reaches it.
    fn enter(&self, py: Python<'_>, op: &'static str) -> PyResult<&towline_comm::Window> {
        process::guard(py, op)?;
        owners::release(py);
        let lender = self.lender().as_ref().map(|lender| lender.again(py));
        if lender.is_some_and(|lender| lender.check(py, op).is_err()) {
            drop(self.lender().take());
            without_gil(py, || self.window.close())?;
            return Err(raise(py, &Error::new(Kind::Stale, op, lender::GONE)));
        }
        Ok(&self.window)
    }

    fn access(
        py: Python<'_>,
        comm: &Communicator,
        local: &Bound<'_, PyAny>,
        peer: i64,
        offset: i64,
        (op, writable): (&'static str, bool),
    ) -> PyResult<Access> {
        let peer = rank(py, op, "peer", peer)?;
        let array = Array::of(local, op, "local_buffer", writable, comm.on_gpu())?;
        let offset = usize::try_from(offset).ok().and_then(|offset| offset.checked_mul(array.element.size));
        let offset = offset
            .ok_or_else(|| invalid(py, op, "peer_window_offset: it is negative or too large".to_owned()))?;
        let memory = array.into_memory(py, comm.enter(py, op)?)?;
        Ok(Access { peer, offset, memory })
    }
}

/// Both sides of a transfer by blocks.
struct Sides {
    remote: (towline::Layout, Blocks),
    local: (towline::Layout, Blocks),
}

impl Sides {
    fn of(op: &'static str, given: BlocksArgument<'_>) -> PyResult<Sides> {
        let (remote, remote_indices, local, local_indices) = given;
        Ok(Sides {
            remote: (remote.get().0.clone(), Blocks::from_object(&remote_indices, op, "blocks[1]")?),
            local: (local.get().0.clone(), Blocks::from_object(&local_indices, op, "blocks[3]")?),
        })
    }
}

#[pymethods]
impl Window {
    /// The number of the window; 0 until it is registered and once it is closed.
    #[getter]
    fn handle(&self) -> u64 {
        if process::in_child() { 0 } else { self.window.handle() }
    }

    #[getter]
    fn size(&self) -> usize {
        self.window.size()
    }

    /// The address of this rank's memory.
    #[getter]
    fn addr(&self) -> usize {
        self.addr
    }

    fn size_of(&self, py: Python<'_>, rank: i64) -> PyResult<usize> {
        let rank = self::rank(py, "size_of", "rank", rank)?;
        self.enter(py, "size_of")?.size_of(rank).or_raise(py)
    }

    /// The path that accesses to that rank take.
    fn path(&self, py: Python<'_>, rank: i64) -> PyResult<&'static str> {
        let rank = self::rank(py, "path", "rank", rank)?;
        self.enter(py, "path")?.path(rank).or_raise(py)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        process::guard(py, "close")?;
        let closed = without_gil(py, || self.window.close());
        drop(self.lender().take());
        owners::release(py);
        closed
    }

    /// Starts a put; with `signal` (context and index) the counter is raised behind it.
    #[allow(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn put(
        &self,
        py: Python<'_>,
        comm: &Bound<'_, Communicator>,
        local: &Bound<'_, PyAny>,
        peer: i64,
        offset: i64,
        signal: Option<(i64, i64)>,
        blocks: Option<BlocksArgument<'_>>,
    ) -> PyResult<Work> {
        let op = if signal.is_some() { "put_signal" } else { "put" };
        let comm = comm.get();
        let started = || -> PyResult<Operation> {
            let window = self.enter(py, op)?;
            let signal = signal.map(|signal| counter(py, op, signal)).transpose()?;
            let sides = blocks.map(|blocks| Sides::of(op, blocks)).transpose()?;
            let access = Self::access(py, comm, local, peer, offset, (op, false))?;
            comm.settled(py, || put(window, &access, signal, sides.as_ref()))
        };
        started().map(Work::new).map_err(|error| settle(py, op, error))
    }

    /// Starts a get.
    #[allow(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn get(
        &self,
        py: Python<'_>,
        comm: &Bound<'_, Communicator>,
        local: &Bound<'_, PyAny>,
        peer: i64,
        offset: i64,
        blocks: Option<BlocksArgument<'_>>,
    ) -> PyResult<Work> {
        const OP: &str = "get";
        let comm = comm.get();
        let started = || -> PyResult<Operation> {
            let window = self.enter(py, OP)?;
            let sides = blocks.map(|blocks| Sides::of(OP, blocks)).transpose()?;
            let access = Self::access(py, comm, local, peer, offset, (OP, true))?;
            comm.settled(py, || {
                let Access { peer, offset, memory } = &access;
                match &sides {
                    Some(Sides { remote, local }) => {
                        let (theirs, ours) = (remote.1.indices(), local.1.indices());
                        window.get_blocks(*peer, &remote.0, theirs, memory, &local.0, ours)
                    }
                    // Nothing to move, but the range is checked.
                    None if memory.is_empty() => {
                        window.put_bytes(*peer, *offset, &[]).map_err(|error| error.during(OP))
                    }
                    None => window.get(*peer, *offset, memory),
                }
            })
        };
        started().map(Work::new).map_err(|error| settle(py, OP, error))
    }

    fn fetch_add(
        &self,
        py: Python<'_>,
        comm: &Bound<'_, Communicator>,
        peer: i64,
        word: i64,
        add: u64,
    ) -> PyResult<Work> {
        const OP: &str = "fetch_add";
        let started = || -> PyResult<Operation> {
            let window = self.enter(py, OP)?;
            let (peer, offset) = (rank(py, OP, "peer", peer)?, word_offset(py, OP, word)?);
            comm.get().settled(py, || window.fetch_add(peer, offset, add))
        };
        started().map(Work::valued).map_err(|error| settle(py, OP, error))
    }

    fn compare_swap(
        &self,
        py: Python<'_>,
        comm: &Bound<'_, Communicator>,
        peer: i64,
        word: i64,
        expected: u64,
        new: u64,
    ) -> PyResult<Work> {
        const OP: &str = "compare_swap";
        let started = || -> PyResult<Operation> {
            let window = self.enter(py, OP)?;
            let (peer, offset) = (rank(py, OP, "peer", peer)?, word_offset(py, OP, word)?);
            comm.get().settled(py, || window.compare_swap(peer, offset, expected, new))
        };
        started().map(Work::valued).map_err(|error| settle(py, OP, error))
    }

    /// Waits until what this rank has put there (or, without a peer, anywhere) has landed.
    fn flush(&self, py: Python<'_>, comm: &Bound<'_, Communicator>, peer: Option<i64>) -> PyResult<Work> {
        const OP: &str = "flush";
        let started = || -> PyResult<Operation> {
            let window = self.enter(py, OP)?;
            let peer = peer.map(|peer| rank(py, OP, "peer", peer)).transpose()?;
            comm.get().followed(py, OP, || match peer {
                Some(peer) => window.flush(peer),
                None => window.flush_all(),
            })
        };
        started().map(Work::new).map_err(|error| settle(py, OP, error))
    }

    /// Waits until what any rank has put anywhere has landed. Collective.
    fn fence(&self, py: Python<'_>, comm: &Bound<'_, Communicator>) -> PyResult<Work> {
        const OP: &str = "fence";
        let started = || -> PyResult<Operation> {
            let window = self.enter(py, OP)?;
            comm.get().followed(py, OP, || window.fence())
        };
        started().map(Work::new).map_err(|error| settle(py, OP, error))
    }

    fn peer_view(&self, py: Python<'_>, rank: i64) -> PyResult<PeerView> {
        let rank = self::rank(py, "peer_view", "rank", rank)?;
        let window = self.enter(py, "peer_view")?;
        py.detach(|| window.peer_view(rank)).map(PeerView::new).or_raise(py)
    }
}

fn put(
    window: &towline_comm::Window,
    access: &Access,
    signal: Option<(u32, u32)>,
    sides: Option<&Sides>,
) -> Result<Operation> {
    let Access { peer, offset, memory } = access;
    match (sides, signal) {
        (Some(Sides { remote, local }), signal) => {
            let (theirs, ours) = (remote.1.indices(), local.1.indices());
            match signal {
                Some(counter) => {
                    window.put_blocks_signal(*peer, &remote.0, theirs, memory, &local.0, ours, counter)
                }
                None => window.put_blocks(*peer, &remote.0, theirs, memory, &local.0, ours),
            }
        }
        (None, Some((context, index))) if memory.is_empty() => {
            window.put_signal_bytes(*peer, *offset, &[], context, index)
        }
        (None, Some((context, index))) => window.put_signal(*peer, *offset, memory, context, index),
        (None, None) if memory.is_empty() => window.put_bytes(*peer, *offset, &[]),
        (None, None) => window.put(*peer, *offset, memory),
    }
}

/// Context and index of a counter.
pub(super) fn counter(
    py: Python<'_>,
    op: &'static str,
    (context, index): (i64, i64),
) -> PyResult<(u32, u32)> {
    let number = |argument: &str, value: i64| {
        u32::try_from(value).map_err(|_| invalid(py, op, format!("{argument}: there is no {value}")))
    };
    Ok((number("context", context)?, number("signal_index", index)?))
}

fn word_offset(py: Python<'_>, op: &'static str, word: i64) -> PyResult<usize> {
    let offset = usize::try_from(word).ok().and_then(|word| word.checked_mul(8));
    let wrong = || Error::invalid(op, "peer_window_offset: it is negative or too large");
    offset.ok_or_else(wrong).or_raise(py)
}
