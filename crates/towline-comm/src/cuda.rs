//! A rank's membership in a group of NCCL's: the same calls, on the memory of a GPU and in its streams.

use std::cell::RefCell;
use std::sync::Arc;

use half::{bf16, f16};
use parking_lot::Mutex;
use towline::nccl::{
    Call, Comm, CommOptions, Element, Job, NcclStorage, Part, Pending, Progress as NcclProgress, Reduce,
};
use towline::{Buffer, DeviceStorage, Dtype, Kind as ErrorKind, Storage};

pub use towline::cuda::StreamHandle;

use crate::collective::{Ask, Job as Checked, Kind};
use crate::combine::{Op, Scalar};
use crate::config::Config;
use crate::member::{Progress, WaitSignal};
use crate::memory::Memory;
use crate::operation::Operation;
use crate::unique_id::UniqueId;
use crate::{Error, Result, group};

thread_local! {
    /// The end of the latest call that this thread has made on a GPU, for who follows it.
    static LATEST: RefCell<Option<Pending>> = const { RefCell::new(None) };
    /// The stream into which this thread's calls go.
    static STREAM: RefCell<Option<Stream>> = const { RefCell::new(None) };
}

/// A stream into which calls on communicators of GPUs are put: see [`in_stream`].
#[derive(Clone)]
pub struct Stream(Arc<dyn Fn(Job) -> Job + Send + Sync>);

impl Stream {
    /// A stream, by what puts a job into it: the unsafe [`Job::on`], whose promise its caller makes.
    pub fn by(put: impl Fn(Job) -> Job + Send + Sync + 'static) -> Stream {
        Stream(Arc::new(put))
    }
}

/// Makes calls whose work goes into that stream, where their communicator is on a GPU.
pub fn in_stream<T>(stream: Option<Stream>, calls: impl FnOnce() -> T) -> T {
    struct Restore(Option<Stream>);
    impl Drop for Restore {
        fn drop(&mut self) {
            STREAM.with_borrow_mut(|stream| *stream = self.0.take());
        }
    }
    let _restore = Restore(STREAM.with_borrow_mut(|current| std::mem::replace(current, stream)));
    calls()
}

/// Lets this thread's calls on communicators of GPUs go into that stream from now on; `None` is the default one.
pub fn use_stream(stream: Option<Stream>) {
    STREAM.with_borrow_mut(|current| *current = stream);
}

/// Allocates memory of that GPU that windows accept. Local.
///
/// # Errors
/// `Unavailable` without NCCL, a driver or a GPU.
pub fn mem_alloc_on(gpu: u32, size: usize) -> Result<NcclStorage> {
    Ok(NcclStorage::new(size, gpu)?)
}

/// One rank on a GPU.
pub(crate) struct Cuda {
    pub(crate) comm: Comm,
    pub(crate) config: Config,
    /// What a barrier sums.
    token: Mutex<Option<Buffer>>,
}

impl Cuda {
    pub(crate) fn init(nranks: usize, rank: usize, id: &UniqueId, config: Config) -> Result<Cuda> {
        if !id.is_nccl() {
            let message = "a group on GPUs needs an id from NCCL: make one with get_nccl_unique_id";
            return Err(Error::invalid("init", message));
        }
        let gpu = config.gpu.unwrap_or(0);
        let comm = Comm::init(gpu, nranks, rank, id.as_bytes(), options(&config))?;
        Ok(Cuda::new(comm, config))
    }

    fn new(comm: Comm, config: Config) -> Cuda {
        Cuda { comm, config, token: Mutex::new(None) }
    }

    /// Refuses a call on a communicator that was closed.
    #[inline]
    pub(crate) fn open(&self, op: &'static str) -> Result<&Comm> {
        towline::fork_guard(op)?;
        if self.comm.is_open() {
            return Ok(&self.comm);
        }
        Err(Error::invalid(op, "the communicator was destroyed or aborted"))
    }

    pub(crate) fn place(&self, op: &'static str) -> Result<(usize, usize)> {
        self.open(op)?.place().map_err(|error| Error::from(error).during(op))
    }

    pub(crate) fn progress(&self) -> Result<Progress> {
        Ok(match self.open("get_async_error")?.progress()? {
            NcclProgress::Done => Progress::Done,
            NcclProgress::InProgress => Progress::InProgress,
        })
    }

    pub(crate) fn split(&self, color: Option<u32>, key: i64, config: Config) -> Result<Option<Cuda>> {
        let child = self.open("split")?.split(color, key, options(&config))?;
        Ok(child.map(|comm| Cuda::new(comm, config)))
    }

    pub(crate) fn shrink(&self, exclude: &[usize], config: Config) -> Result<Cuda> {
        // Work of a communicator that has failed does not end by itself.
        let failed = self.comm.progress().is_err();
        let comm = self.open("shrink")?.shrink(exclude, failed, options(&config))?;
        Ok(Cuda::new(comm, config))
    }

    pub(crate) fn memory(&self, storage: impl Storage) -> Result<Memory> {
        let comm = self.open("memory")?;
        let buffer = Buffer::new(storage);
        on_gpu("memory", comm.gpu().ordinal(), &buffer)?;
        Ok(Memory::device(buffer))
    }

    /// Runs a job now, or at the end of the group.
    pub(crate) fn submit(&self, job: Result<Job, towline::Error>) -> Result<Operation> {
        let job = job.map_err(|error| group::poison(error.into()))?;
        let pending = job.pending();
        let stream = STREAM.with_borrow(Clone::clone);
        let job = match stream {
            Some(stream) => (stream.0)(job),
            None => job,
        };
        LATEST.with_borrow_mut(|latest| *latest = Some(pending.clone()));
        if let Some(job) = group::defer_on_gpu(job) {
            job.run()?;
        }
        Ok(Operation::in_stream(pending))
    }

    pub(crate) fn collective(&self, ask: Ask<'_>) -> Result<()> {
        let prepared = (|| {
            let op = ask.kind.name();
            let (rank, nranks) = self.place(op)?;
            let reduce = if ask.kind.reduces() { reduce(ask.dtype, ask.op, op)? } else { Reduce::Plain(0) };
            let job = Checked::new(rank, nranks, ask)?;
            let (send, recv) = (part(op, job.send.as_deref())?, part(op, job.recv.as_deref())?);
            // The root of a broadcast that wants no second copy.
            let recv = if job.kind == Kind::Broadcast { recv.or_else(|| send.clone()) } else { recv };
            let root = job.root as i32;
            let call = match job.kind {
                Kind::AllReduce => Call::AllReduce(0),
                Kind::Reduce => Call::Reduce(0, root),
                Kind::Broadcast => Call::Broadcast(root),
                Kind::AllGather => Call::AllGather,
                Kind::Gather => Call::Gather(root),
                Kind::Scatter => Call::Scatter(root),
                Kind::ReduceScatter => Call::ReduceScatter(0),
                Kind::AllToAll => Call::AllToAll,
                Kind::Send => Call::Send(root),
                Kind::Recv => Call::Recv(root),
            };
            let element = Element::from(job.dtype);
            Ok((op, call, reduce, send, recv, job.elements(), element))
        })();
        let (op, call, reduce, send, recv, count, element) = prepared.map_err(group::poison)?;
        let parts = (send.as_ref(), recv.as_ref());
        self.submit(self.open(op)?.call_job(op, call, reduce, parts, count, element)).map(drop)
    }

    pub(crate) fn signal(&self, peer: usize, context: u32, index: u32) -> Result<Operation> {
        self.submit(self.open("signal")?.signal_job(peer, context, index))
    }

    pub(crate) fn wait_signal(&self, signals: &[WaitSignal]) -> Result<Operation> {
        let rows: Vec<_> = signals.iter().map(|one| (one.peer, one.count, one.context, one.index)).collect();
        self.submit(self.open("wait_signal")?.wait_job(&rows))
    }

    /// Waits until this rank's streams have got past what was put into them: its puts have landed then.
    pub(crate) fn flush(&self, op: &'static str) -> Result<()> {
        group::refuse(op)?;
        self.open(op)?.synchronize().map_err(|error| Error::from(error).during(op))
    }

    /// NCCL has no barrier: this is a sum of one element whose value does not matter, waited for.
    pub(crate) fn barrier(&self) -> Result<()> {
        const OP: &str = "barrier";
        group::refuse(OP)?;
        let token = {
            let mut token = self.token.lock();
            match &*token {
                Some(token) => token.clone(),
                None => {
                    let made = Buffer::new(DeviceStorage::new(64, self.comm.gpu().ordinal())?);
                    token.insert(made).clone()
                }
            }
        };
        let part = Part::new(token, 0, 4)?;
        let (reduce, element) = (Reduce::Plain(2), Element::from(Dtype::U32));
        let parts = (Some(&part), Some(&part));
        let summed =
            self.submit(self.open(OP)?.call_job(OP, Call::AllReduce(0), reduce, parts, 1, element))?;
        summed.wait().map(drop)
    }

    /// Makes a call and follows it to its end.
    pub(crate) fn follow(call: impl FnOnce() -> Result<()>) -> Result<Operation> {
        LATEST.with_borrow_mut(Option::take);
        call()?;
        let latest = LATEST.with_borrow_mut(Option::take);
        // What is over when it returns puts nothing into a stream.
        Ok(latest.map_or_else(|| Operation::done(Ok(0)), Operation::in_stream))
    }
}

/// Says why a communicator on a GPU does not do something.
pub(crate) fn lacks(op: &'static str) -> Error {
    let message = format!("NCCL has no {op}: a communicator on a GPU cannot do it");
    Error::new(ErrorKind::Unsupported, op, message)
}

fn options(config: &Config) -> CommOptions {
    let Config { blocking, timeout, contexts, signals, .. } = *config;
    CommOptions { blocking, timeout, contexts, signals }
}

fn on_gpu(op: &'static str, gpu: u32, buffer: &Buffer) -> Result<()> {
    match buffer.place() {
        towline::Place::Cuda(on) if on == gpu => Ok(()),
        place => Err(Error::invalid(op, format!("the communicator is on GPU {gpu}, the buffer on {place}"))),
    }
}

fn part(op: &'static str, memory: Option<&Memory>) -> Result<Option<Part>> {
    memory.map(|memory| memory.on_device(op)).transpose()
}

/// The operation as NCCL has it. A scalar is one element of the type.
fn reduce(dtype: Dtype, op: Op, name: &'static str) -> Result<Reduce> {
    let scalar = match op {
        Op::Sum => return Ok(Reduce::Plain(0)),
        Op::Prod => return Ok(Reduce::Plain(1)),
        Op::Max => return Ok(Reduce::Plain(2)),
        Op::Min => return Ok(Reduce::Plain(3)),
        Op::Avg => return Ok(Reduce::Plain(4)),
        Op::ScaledSum(scalar) => scalar,
    };
    // Checks that the scalar fits the type.
    let bits = op.scale(dtype).map_err(|error| error.during(name))?;
    let float = match scalar {
        Scalar::Int(value) => value as f64,
        Scalar::Float(value) => value,
    };
    let mut bytes = [0; 8];
    match dtype {
        Dtype::F16 => bytes[..2].copy_from_slice(&f16::from_f64(float).to_ne_bytes()),
        Dtype::Bf16 => bytes[..2].copy_from_slice(&bf16::from_f64(float).to_ne_bytes()),
        Dtype::F32 => bytes[..4].copy_from_slice(&(float as f32).to_ne_bytes()),
        Dtype::F64 => bytes.copy_from_slice(&float.to_ne_bytes()),
        _ => bytes.copy_from_slice(&bits.to_le_bytes()),
    }
    Ok(Reduce::Scaled(bytes))
}
