//! The membership of a rank, as Python holds it.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use pyo3::prelude::*;
use towline_comm::{
    Algorithm, Config, Error, Memory, Op, Operation, Progress, Result, Scalar, UniqueId, Using, WaitSignal,
    WindowFlag, WindowOptions,
};

use super::config::CommConfig;
use super::errors::{OrRaise, argument, exception, invalid, raise, settle};
use super::memory::{Array, Element};
use super::quiet::Quiet;
use super::window::{RegisteredBuffer, Window, counter};
use super::work::Work;
use super::{group, memory};
use crate::attention::without_gil;
use crate::lender::Lender;
use crate::{owners, process};

/// How far the work is, in NCCL's numbers.
const SUCCESS: u8 = 0;
const IN_PROGRESS: u8 = 7;

/// A rank's membership in a group.
#[pyclass(frozen, module = "towline._native")]
pub(crate) struct Communicator {
    comm: Quiet<towline_comm::Communicator>,
    config: Config,
    /// The GPU that it is on.
    gpu: Option<u32>,
}

impl Communicator {
    fn new(comm: towline_comm::Communicator, config: Config) -> Communicator {
        process::mark();
        let gpu = match comm.device() {
            Ok(towline::Place::Cuda(gpu)) => Some(gpu),
            _ => None,
        };
        Communicator { comm: Quiet::new(comm), config, gpu }
    }

    pub(super) fn on_gpu(&self) -> Option<u32> {
        self.gpu
    }

    pub(super) fn enter(&self, py: Python<'_>, op: &'static str) -> PyResult<&towline_comm::Communicator> {
        process::guard(py, op)?;
        owners::release(py);
        Ok(&self.comm)
    }

    /// Whether a call has to have ended when it returns.
    fn waits(&self) -> bool {
        // On a GPU a call has been put into a stream when it returns.
        self.config.blocking && self.gpu.is_none() && group::current().is_none()
    }

    /// Starts an operation without the GIL, and waits for it where this communicator blocks.
    pub(super) fn settled(
        &self,
        py: Python<'_>,
        start: impl FnOnce() -> Result<Operation> + Send,
    ) -> PyResult<Operation> {
        let waits = self.waits();
        let started = without_gil(py, || {
            let operation = start()?;
            if waits {
                operation.wait()?;
            }
            Ok(operation)
        });
        started?.or_raise(py)
    }

    /// Makes a call without the GIL and follows it to its end.
    pub(super) fn followed(
        &self,
        py: Python<'_>,
        op: &'static str,
        call: impl FnOnce() -> Result<()> + Send,
    ) -> PyResult<Operation> {
        let comm = self.enter(py, op)?;
        without_gil(py, || comm.follow(op, |_| call()))?.or_raise(py)
    }

    fn settings(&self, config: Option<&Bound<'_, CommConfig>>) -> Config {
        match config {
            Some(config) => config.get().over(self.config.clone()),
            None => self.config.clone(),
        }
    }
}

/// A rank's number, as an argument.
pub(super) fn rank(py: Python<'_>, op: &'static str, argument: &str, value: i64) -> PyResult<usize> {
    usize::try_from(value).map_err(|_| invalid(py, op, format!("{argument}: there is no rank {value}")))
}

#[pymethods]
impl Communicator {
    #[staticmethod]
    fn init(
        py: Python<'_>,
        nranks: i64,
        rank: i64,
        id: &[u8],
        config: &Bound<'_, CommConfig>,
    ) -> PyResult<Communicator> {
        const OP: &str = "init";
        process::guard(py, OP)?;
        let made = || -> PyResult<_> {
            let nranks = usize::try_from(nranks)
                .map_err(|_| invalid(py, OP, format!("nranks: a group has no {nranks} ranks")))?;
            let rank = self::rank(py, OP, "rank", rank)?;
            let config = config.get().over(Config::default());
            let known = UniqueId::from_bytes(id).map_err(|error| error.during(OP));
            // Where a GPU is named, what is no id of ours is one of NCCL's, whatever it looks like.
            let id = match (known, <[u8; 128]>::try_from(id)) {
                (Err(_), Ok(bytes)) if config.gpu.is_some() => UniqueId::from_nccl(bytes),
                (known, _) => known.or_raise(py)?,
            };
            let init = config.clone();
            let comm = without_gil(py, || towline_comm::Communicator::init(nranks, rank, &id, init))?;
            Ok(Communicator::new(comm.or_raise(py)?, config))
        };
        made().map_err(|error| settle(py, OP, error))
    }

    #[staticmethod]
    fn init_all(py: Python<'_>, count: usize, config: &Bound<'_, CommConfig>) -> PyResult<Vec<Communicator>> {
        process::guard(py, "init_all")?;
        let config = config.get().over(Config::default());
        let made = without_gil(py, || towline_comm::Communicator::init_all_with(count, &config));
        let comms = made?.or_raise(py)?;
        Ok(comms.into_iter().map(|comm| Communicator::new(comm, config.clone())).collect())
    }

    #[staticmethod]
    fn init_all_on(
        py: Python<'_>,
        gpus: Vec<u32>,
        config: &Bound<'_, CommConfig>,
    ) -> PyResult<Vec<Communicator>> {
        process::guard(py, "init_all")?;
        let config = config.get().over(Config::default());
        let made = without_gil(py, || towline_comm::Communicator::init_all_on(&gpus, &config));
        let comms = made?.or_raise(py)?;
        Ok(comms.into_iter().map(|comm| Communicator::new(comm, config.clone())).collect())
    }

    /// The GPU that it is on; `None` on the host.
    #[getter]
    fn gpu(&self) -> Option<u32> {
        self.gpu
    }

    /// The communicator of this rank's colour; `None` for a rank without one.
    fn split(
        &self,
        py: Python<'_>,
        color: Option<u32>,
        key: i64,
        config: Option<&Bound<'_, CommConfig>>,
    ) -> PyResult<Option<Communicator>> {
        let config = self.settings(config);
        let comm = self.enter(py, "split")?;
        let child = without_gil(py, || comm.split_with(color, key, Some(config.clone())))?.or_raise(py)?;
        Ok(color.map(|_| Communicator::new(child, config)))
    }

    fn shrink(
        &self,
        py: Python<'_>,
        exclude: Vec<i64>,
        config: Option<&Bound<'_, CommConfig>>,
    ) -> PyResult<Communicator> {
        let exclude = exclude.into_iter().map(|one| rank(py, "shrink", "exclude_ranks", one));
        let exclude = exclude.collect::<PyResult<Vec<_>>>()?;
        let config = self.settings(config);
        let comm = self.enter(py, "shrink")?;
        let child = without_gil(py, || comm.shrink_with(&exclude, Some(config.clone())))?.or_raise(py)?;
        Ok(Communicator::new(child, config))
    }

    #[getter]
    fn blocking(&self) -> bool {
        self.config.blocking
    }

    #[getter]
    fn name(&self) -> &str {
        &self.config.name
    }

    #[getter]
    fn is_valid(&self) -> bool {
        !process::in_child() && self.comm.is_valid()
    }

    fn rank(&self, py: Python<'_>) -> PyResult<usize> {
        self.enter(py, "rank")?.rank().or_raise(py)
    }

    fn nranks(&self, py: Python<'_>) -> PyResult<usize> {
        self.enter(py, "nranks")?.nranks().or_raise(py)
    }

    /// Whether that rank's memory can be shared with this process.
    fn is_near(&self, py: Python<'_>, rank: i64) -> PyResult<bool> {
        let rank = self::rank(py, "is_near", "rank", rank)?;
        self.enter(py, "is_near")?.is_near(rank).or_raise(py)
    }

    fn dead_ranks(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        let comm = self.enter(py, "dead_ranks")?;
        py.detach(|| comm.dead_ranks()).or_raise(py)
    }

    fn open_handles(&self, py: Python<'_>) -> PyResult<usize> {
        self.enter(py, "open_handles")?.open_handles().or_raise(py)
    }

    /// How far the work is, and why it failed, where it has.
    #[pyo3(signature = () -> "tuple[int, Error | None]")]
    fn async_error<'py>(&self, py: Python<'py>) -> PyResult<(u8, Option<Bound<'py, PyAny>>)> {
        let comm = self.enter(py, "get_async_error")?;
        if !comm.is_valid() {
            comm.rank().or_raise(py)?;
        }
        match py.detach(|| comm.get_async_error()) {
            Ok(Progress::Done) => Ok((SUCCESS, None)),
            Ok(Progress::InProgress) => Ok((IN_PROGRESS, None)),
            Err(error) => Ok((SUCCESS, Some(exception(py, &error)?))),
        }
    }

    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        let comm = self.enter(py, "synchronize")?;
        without_gil(py, || comm.synchronize())?.or_raise(py)
    }

    fn finalize(&self, py: Python<'_>) -> PyResult<()> {
        let comm = self.enter(py, "finalize")?;
        without_gil(py, || comm.finalize())?.or_raise(py)
    }

    fn destroy(&self, py: Python<'_>) -> PyResult<()> {
        let comm = self.enter(py, "destroy")?;
        let destroyed = without_gil(py, || comm.destroy());
        owners::release(py);
        destroyed
    }

    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let comm = self.enter(py, "abort")?;
        let aborted = without_gil(py, || comm.abort());
        owners::release(py);
        aborted
    }

    fn revoke(&self, py: Python<'_>) -> PyResult<()> {
        let comm = self.enter(py, "revoke")?;
        py.detach(|| comm.revoke()).or_raise(py)
    }

    fn register_buffer(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<RegisteredBuffer> {
        const OP: &str = "register_buffer";
        let registered = || -> PyResult<_> {
            let comm = self.enter(py, OP)?;
            comm.rank().map_err(|error| error.during(OP)).or_raise(py)?;
            let storage = Array::of(buffer, OP, "buffer", true, self.gpu)?.into_storage(py)?;
            py.detach(|| comm.register_buffer(storage)).map(RegisteredBuffer::new).or_raise(py)
        };
        registered().map_err(|error| settle(py, OP, error))
    }

    /// The window, and the registration that is in flight. A rank without a usable buffer notifies the others.
    fn register_window(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        flags: u32,
        unequal_sizes: bool,
    ) -> PyResult<(Option<Window>, Work)> {
        const OP: &str = "register_window";
        let comm = self.enter(py, OP)?;
        let prepared = || -> PyResult<_> {
            let Some(flags) = WindowFlag::from_bits(flags) else {
                return Err(invalid(py, OP, format!("flags: {flags:#x} has bits that no flag has")));
            };
            let array = Array::of(buffer, OP, "buffer", true, self.gpu)?;
            if array.is_empty() {
                return Err(invalid(py, OP, "buffer: a window of no bytes".to_owned()));
            }
            let addr = array.memory.addr;
            Ok((array.into_storage(py)?, addr, WindowOptions { flags, unequal_sizes }))
        };
        let (storage, addr, options) = match prepared() {
            Ok(prepared) => prepared,
            Err(error) if group::current().is_some() => return Err(settle(py, OP, error)),
            Err(error) => {
                let wrong = argument(py, OP, &error);
                let why = wrong.clone().unwrap_or_else(|| Error::invalid(OP, error.value(py).to_string()));
                let verdict = without_gil(py, || comm.refuse_window(why))?;
                return Err(match (wrong, verdict) {
                    (Some(_), Err(verdict)) => raise(py, &verdict),
                    (Some(wrong), Ok(())) => raise(py, &wrong),
                    (None, _) => error,
                });
            }
        };
        let mut window = None;
        let registering = without_gil(py, || {
            comm.follow(OP, |comm| {
                window = comm.register_window(storage, options)?;
                Ok(())
            })
        });
        let registering = registering.and_then(|registering| registering.or_raise(py));
        owners::release(py);
        let lender = Lender::of(buffer);
        Ok((window.map(|window| Window::new(window, addr, lender)), Work::new(registering?)))
    }

    fn signal(&self, py: Python<'_>, peer: i64, index: i64, context: i64) -> PyResult<Work> {
        const OP: &str = "signal";
        let started = || -> PyResult<_> {
            let comm = self.enter(py, OP)?;
            let peer = rank(py, OP, "peer", peer)?;
            let (context, index) = counter(py, OP, (context, index))?;
            self.settled(py, || comm.signal(peer, context, index))
        };
        started().map(Work::new).map_err(|error| settle(py, OP, error))
    }

    /// Waits for signals: rows of peer, count, index and context. `apart`: beside everything else, on a thread of its own.
    fn wait_signal(&self, py: Python<'_>, signals: Vec<(i64, i64, i64, i64)>, apart: bool) -> PyResult<Work> {
        const OP: &str = "wait_signal";
        let started = || -> PyResult<_> {
            let comm = self.enter(py, OP)?;
            let signals = signals.into_iter().map(|(peer, count, index, context)| {
                let (context, index) = counter(py, OP, (context, index))?;
                let count = u64::try_from(count)
                    .map_err(|_| invalid(py, OP, format!("op_count: {count} is less than 1")))?;
                Ok(WaitSignal { peer: rank(py, OP, "peer", peer)?, count, context, index })
            });
            let signals = signals.collect::<PyResult<Vec<_>>>()?;
            if apart {
                let withdrawn = Arc::new(AtomicBool::new(false));
                let waiting = py.detach(|| comm.signaled_unless(&signals, Arc::clone(&withdrawn)));
                return Ok(Work::withdrawable(waiting.or_raise(py)?, withdrawn));
            }
            self.followed(py, OP, || comm.wait_signal(&signals)).map(Work::new)
        };
        started().map_err(|error| settle(py, OP, error))
    }

    /// How many signals have come on that counter so far, taken or not.
    fn signals(&self, py: Python<'_>, peer: i64, index: i64, context: i64) -> PyResult<u64> {
        const OP: &str = "signals";
        let peer = rank(py, OP, "peer", peer)?;
        let (context, index) = counter(py, OP, (context, index))?;
        self.enter(py, OP)?.signals(peer, context, index).or_raise(py)
    }

    fn barrier(&self, py: Python<'_>) -> PyResult<Work> {
        const OP: &str = "barrier";
        let started = || {
            let comm = self.enter(py, OP)?;
            self.followed(py, OP, || comm.barrier())
        };
        started().map(Work::new).map_err(|error| settle(py, OP, error))
    }

    /// A collective call or a message; `root` is the peer of a message.
    #[allow(clippy::too_many_arguments, reason = "one entry for all collectives")]
    fn collective(
        &self,
        py: Python<'_>,
        kind: &str,
        send: Option<&Bound<'_, PyAny>>,
        recv: Option<&Bound<'_, PyAny>>,
        op: u8,
        scalar: Option<&Bound<'_, PyAny>>,
        root: i64,
        algorithm: Option<&str>,
    ) -> PyResult<Work> {
        let Some(kind) = KINDS.into_iter().find(|known| *known == kind) else {
            return Err(invalid(py, "collective", format!("there is no {kind}")));
        };
        let started = || -> PyResult<_> {
            let comm = self.enter(py, kind)?;
            let nranks = comm.nranks().map_err(|error| error.during(kind)).or_raise(py)?;
            let root = rank(py, kind, "root", root)?;
            let op = operation(py, kind, op, scalar)?;
            let algorithm = match algorithm {
                Some(name) => name.parse::<Algorithm>().map_err(|error| error.during(kind)).or_raise(py)?,
                None => Algorithm::Auto,
            };
            let send = send.map(|send| Array::of(send, kind, "sendbuf", false, self.gpu)).transpose()?;
            let recv = recv.map(|recv| Array::of(recv, kind, "recvbuf", true, self.gpu)).transpose()?;
            let element = elements(py, kind, nranks, send.as_ref(), recv.as_ref())?;
            let reduces = matches!(kind, "all_reduce" | "reduce" | "reduce_scatter");
            let dtype = if reduces { combined(py, kind, element, op)? } else { element.moved_as() };
            let send = send.map(|send| send.into_memory(py, comm)).transpose()?;
            let recv = recv.map(|recv| recv.into_memory(py, comm)).transpose()?;
            self.followed(py, kind, || {
                let call = Call { kind, send: send.as_ref(), recv: recv.as_ref(), dtype, op, root };
                call.make(comm, comm.using(algorithm))
            })
        };
        let started = started().map(Work::new).map_err(|error| settle(py, kind, error));
        owners::release(py);
        started
    }

    fn explain(&self, py: Python<'_>) -> PyResult<String> {
        self.enter(py, "explain")?.explain().or_raise(py)
    }
}

const KINDS: [&str; 10] = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "send",
    "recv",
];

struct Call<'a> {
    kind: &'static str,
    send: Option<&'a Memory>,
    recv: Option<&'a Memory>,
    dtype: towline::Dtype,
    op: Op,
    root: usize,
}

impl Call<'_> {
    fn make(&self, comm: &towline_comm::Communicator, using: Using<'_>) -> Result<()> {
        let Call { kind, send, recv, dtype, op, root } = *self;
        let send_needed = || send.ok_or_else(|| Error::invalid(kind, "sendbuf: this rank has to send"));
        let recv_needed = || recv.ok_or_else(|| Error::invalid(kind, "recvbuf: this rank has to receive"));
        match kind {
            "all_reduce" => using.all_reduce(send_needed()?, recv_needed()?, dtype, op),
            "reduce" => using.reduce(send_needed()?, recv, dtype, op, root),
            "broadcast" => using.broadcast(send, recv, dtype, root),
            "all_gather" => using.all_gather(send_needed()?, recv_needed()?, dtype),
            "gather" => using.gather(send_needed()?, recv, dtype, root),
            "scatter" => using.scatter(send, recv_needed()?, dtype, root),
            "reduce_scatter" => using.reduce_scatter(send_needed()?, recv_needed()?, dtype, op),
            "all_to_all" => using.all_to_all(send_needed()?, recv_needed()?, dtype),
            "send" => comm.send(send_needed()?, dtype, root),
            _ => comm.recv(recv_needed()?, dtype, root),
        }
    }
}

/// The type of the elements of both sides, which must be the same.
fn elements(
    py: Python<'_>,
    kind: &'static str,
    nranks: usize,
    send: Option<&Array<'_>>,
    recv: Option<&Array<'_>>,
) -> PyResult<&'static Element> {
    if let (Some(send), Some(recv)) = (send, recv)
        && send.element != recv.element
    {
        let message = format!("recvbuf: {} received, but {} sent", recv.element.name, send.element.name);
        return Err(invalid(py, kind, message));
    }
    if let Some(send) = send.filter(|send| send.count() % nranks != 0)
        && matches!(kind, "reduce_scatter" | "all_to_all" | "scatter")
    {
        let message = format!(
            "sendbuf: {} elements among {nranks} ranks leave a remainder of {}",
            send.count(),
            send.count() % nranks
        );
        return Err(invalid(py, kind, message));
    }
    match send.or(recv) {
        Some(array) => Ok(array.element),
        None => Err(invalid(py, kind, "sendbuf, recvbuf: this rank gave neither".to_owned())),
    }
}

/// The type in which elements are combined. Truth values stay such under products, minima and maxima.
fn combined(py: Python<'_>, kind: &'static str, element: &Element, op: Op) -> PyResult<towline::Dtype> {
    match (element.dtype, element.name, op) {
        (Some(dtype), ..) => Ok(dtype),
        (None, "bool", Op::Prod | Op::Min | Op::Max) => Ok(towline::Dtype::U8),
        (None, name, op) => {
            let message = format!("sendbuf: elements of {name} cannot be combined by {op}");
            Err(invalid(py, kind, message))
        }
    }
}

fn operation(
    py: Python<'_>,
    kind: &'static str,
    code: u8,
    scalar: Option<&Bound<'_, PyAny>>,
) -> PyResult<Op> {
    if let Some(scalar) = scalar {
        let scalar = match scalar.extract::<i128>() {
            Ok(whole) => Scalar::Int(whole),
            Err(_) => Scalar::Float(scalar.extract()?),
        };
        return Ok(Op::ScaledSum(scalar));
    }
    match code {
        0 => Ok(Op::Sum),
        1 => Ok(Op::Prod),
        2 => Ok(Op::Max),
        3 => Ok(Op::Min),
        4 => Ok(Op::Avg),
        _ => Err(invalid(py, kind, format!("op: there is no operation {code}"))),
    }
}

/// The name and size of the type of an object's elements, and how many it has.
#[pyfunction]
#[pyo3(signature = (buffer, gpu=None))]
pub(crate) fn array_type(
    py: Python<'_>,
    buffer: &Bound<'_, PyAny>,
    gpu: Option<u32>,
) -> PyResult<(&'static str, usize, usize)> {
    const OP: &str = "buffer";
    let array = memory::Array::of(buffer, OP, "buffer", false, gpu).map_err(|error| settle(py, OP, error))?;
    Ok((array.element.name, array.element.size, array.count()))
}
