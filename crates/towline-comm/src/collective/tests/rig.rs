//! Ranks as threads, their memory in all its forms, and a plain reference.

use std::time::Duration;

use half::{bf16, f16};
use towline::{Dtype, Routing, SharedStorage};

use crate::collective::Algorithm;
use crate::collective::choice::Kind;
use crate::combine::{Accumulator, Op, Scalar};
use crate::{Communicator, Config, Memory, RegisteredBuffer, Result, Window, WindowFlag, get_unique_id};

/// How the ranks of a group reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Links {
    /// By shared memory.
    Near,
    /// By tcp.
    Far,
    /// The first two ranks reach every rank by tcp; the others share memory.
    Mixed,
}

impl Links {
    fn config(self, rank: usize) -> Config {
        let far = match self {
            Links::Near => false,
            Links::Far => true,
            Links::Mixed => rank < 2,
        };
        let routing = if far { only_tcp() } else { Routing::default() };
        Config { timeout: Duration::from_secs(60), routing, ..Config::default() }
    }
}

fn only_tcp() -> Routing {
    Routing::default().require("tcp").unwrap()
}

/// Runs the body on every rank of a new group and gives back what each returned.
pub(super) fn on_ranks<T: Send>(
    nranks: usize,
    links: Links,
    body: impl Fn(&Communicator) -> T + Sync,
) -> Vec<T> {
    let id = get_unique_id().unwrap();
    std::thread::scope(|scope| {
        let (id, body) = (&id, &body);
        let threads: Vec<_> = (0..nranks)
            .map(|rank| {
                scope.spawn(move || {
                    let comm = Communicator::init(nranks, rank, id, links.config(rank)).unwrap();
                    let outcome = body(&comm);
                    comm.finalize().unwrap();
                    outcome
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The same numbers everywhere from the same seed.
#[derive(Clone)]
pub(super) struct Numbers(u64);

impl Numbers {
    pub(super) fn new(seed: u64) -> Numbers {
        Numbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11
    }

    pub(super) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    pub(super) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

/// What lies where a rank sends from and receives into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Windows,
    Buffers,
    Loose,
    /// Every second rank has windows.
    EverySecond,
    WindowInPlace,
    LooseInPlace,
}

impl Form {
    pub(super) const ALL: [Form; 6] = [
        Form::Windows,
        Form::Buffers,
        Form::Loose,
        Form::EverySecond,
        Form::WindowInPlace,
        Form::LooseInPlace,
    ];

    pub(super) fn is_registered(self) -> bool {
        matches!(self, Form::Windows | Form::Buffers | Form::WindowInPlace)
    }

    pub(super) fn in_place(self) -> bool {
        matches!(self, Form::WindowInPlace | Form::LooseInPlace)
    }
}

/// The memory of one rank in all forms.
pub(super) struct Room {
    windows: [Window; 2],
    buffers: [RegisteredBuffer; 2],
    loose: [Memory; 2],
}

impl Room {
    pub(super) fn new(comm: &Communicator, len: usize) -> Room {
        let storage = || SharedStorage::new(len).unwrap();
        let window = |_| comm.register_window(storage(), WindowFlag::DEFAULT).unwrap().unwrap();
        Room {
            windows: [0, 1].map(window),
            buffers: [0, 1].map(|_| comm.register_buffer(storage()).unwrap()),
            loose: [0, 1].map(|_| comm.memory(storage()).unwrap()),
        }
    }

    /// Where this rank sends from, and where it receives.
    pub(super) fn memory(&self, form: Form, rank: usize) -> [Memory; 2] {
        let windows = || [0, 1].map(|index| self.windows[index].memory().unwrap());
        match form {
            Form::Windows | Form::WindowInPlace => windows(),
            Form::EverySecond if rank.is_multiple_of(2) => windows(),
            Form::Buffers => [0, 1].map(|index| self.buffers[index].memory().unwrap()),
            Form::Loose | Form::LooseInPlace | Form::EverySecond => self.loose.clone(),
        }
    }
}

/// One collective call, the same on all ranks but for their data.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub(super) kind: Kind,
    pub(super) dtype: Dtype,
    pub(super) op: Op,
    /// Elements of one block.
    pub(super) count: usize,
    /// Elements before the data.
    pub(super) shift: usize,
    pub(super) root: usize,
    pub(super) algorithm: Algorithm,
    pub(super) form: Form,
    pub(super) seed: u64,
}

const GUARD: u8 = 0xa5;

impl Case {
    fn block(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// What that rank's scalar is.
    fn op_of(&self, rank: usize) -> Op {
        match self.op {
            Op::ScaledSum(_) => Op::ScaledSum(Scalar::Int(1 + rank as i128 % 3)),
            op => op,
        }
    }

    /// What that rank sends. Values are such that no order of combining them changes the result.
    fn input(&self, rank: usize, nranks: usize) -> Vec<u8> {
        let blocks = if self.kind.blocks().0 { nranks } else { 1 };
        let mut numbers = Numbers::new(self.seed ^ ((rank as u64 + 1) << 32));
        let size = self.dtype.size();
        let mut bytes = vec![0; self.count * blocks * size];
        // A few values over and over: the reference must not take longer than what it checks.
        let values: Vec<[u8; 8]> = (0..61).map(|_| self.element(numbers.next())).collect();
        for (index, element) in bytes.chunks_exact_mut(size).enumerate() {
            element.copy_from_slice(&values[index % values.len()][..size]);
        }
        bytes
    }

    fn element(&self, number: u64) -> [u8; 8] {
        let value = match self.op {
            Op::Prod => [1.0, 2.0, -1.0, 0.5][(number % 4) as usize],
            _ => (number % 17) as f32 - 8.0,
        };
        let mut bytes = number.to_ne_bytes();
        match self.dtype {
            Dtype::F16 => bytes[..2].copy_from_slice(&f16::from_f32(value).to_ne_bytes()),
            Dtype::Bf16 => bytes[..2].copy_from_slice(&bf16::from_f32(value).to_ne_bytes()),
            Dtype::F32 => bytes[..4].copy_from_slice(&value.to_ne_bytes()),
            Dtype::F64 => bytes.copy_from_slice(&f64::from(value).to_ne_bytes()),
            _ => {}
        }
        bytes
    }

    /// What that rank has afterwards; `None` where it receives nothing.
    pub(super) fn expected(&self, rank: usize, nranks: usize) -> Option<Vec<u8>> {
        let block = self.block();
        let inputs: Vec<Vec<u8>> = (0..nranks).map(|from| self.input(from, nranks)).collect();
        let of = |from: usize, index: usize| inputs[from][index * block..][..block].to_vec();
        let combined = |index: usize| {
            let mut sum = Accumulator::new(self.op, self.dtype);
            sum.start(self.count);
            for from in 0..nranks {
                let scale = self.op_of(from).scale(self.dtype).unwrap();
                let input = of(from, index);
                sum.take(scale, |into| {
                    into.copy_from_slice(&input);
                    Ok(())
                })
                .unwrap();
            }
            sum.finish(nranks).to_vec()
        };
        match self.kind {
            Kind::AllReduce => Some(combined(0)),
            Kind::Reduce => (rank == self.root).then(|| combined(0)),
            Kind::ReduceScatter => Some(combined(rank)),
            Kind::Broadcast => Some(of(self.root, 0)),
            Kind::Scatter => Some(of(self.root, rank)),
            Kind::AllGather => Some((0..nranks).flat_map(|from| of(from, 0)).collect()),
            Kind::Gather => (rank == self.root).then(|| (0..nranks).flat_map(|from| of(from, 0)).collect()),
            Kind::AllToAll => Some((0..nranks).flat_map(|from| of(from, rank)).collect()),
            Kind::Send | Kind::Recv => None,
        }
    }

    /// Makes the call on this rank, and compares.
    pub(super) fn check(&self, comm: &Communicator, room: &Room) -> Result<()> {
        let (rank, nranks) = (comm.rank()?, comm.nranks()?);
        let block = self.block();
        let input = self.input(rank, nranks);
        let received = block * if self.kind.blocks().1 { nranks } else { 1 };
        let [send, recv] = room.memory(self.form, rank);
        let start = self.shift * self.dtype.size();
        let (send, recv) = match (self.form.in_place(), self.kind.blocks()) {
            (true, (false, false)) => (recv.part(start, block)?, recv.part(start, block)?),
            (true, (false, true)) => (recv.part(start + rank * block, block)?, recv.part(start, received)?),
            (true, (true, false)) => {
                (send.part(start, input.len())?, send.part(start + rank * block, block)?)
            }
            _ => (send.part(start, input.len())?, recv.part(start, received + 8)?),
        };
        let exact = self.kind == Kind::Broadcast || self.kind == Kind::Scatter || self.form.in_place();
        recv.write_at(0, &vec![GUARD; recv.len()])?;
        send.write_at(0, &input)?;
        let target = if exact { recv.part(0, received)? } else { recv.clone() };
        self.call(comm, &send, &target, rank)?;
        if self.algorithm != Algorithm::Auto {
            assert_eq!(comm.last_algorithm()?, Some(self.algorithm));
        }
        let Some(expected) = self.expected(rank, nranks) else { return Ok(()) };
        let mut got = vec![0; recv.len()];
        recv.read_at(0, &mut got)?;
        assert!(got[..received] == expected, "{self:?} on rank {rank} of {nranks}: {}", comm.explain()?);
        if recv.len() > received {
            assert_eq!(&got[received..], [GUARD; 8], "{self:?} on rank {rank}: wrote past the end");
        }
        if !self.form.in_place() {
            let mut sent = vec![0; send.len()];
            send.read_at(0, &mut sent)?;
            assert!(sent == input, "{self:?} on rank {rank}: changed what it sends");
        }
        Ok(())
    }

    fn call(&self, comm: &Communicator, send: &Memory, recv: &Memory, rank: usize) -> Result<()> {
        let Case { dtype, root, .. } = *self;
        let op = self.op_of(rank);
        let using = comm.using(self.algorithm);
        let at_root = rank == root;
        match self.kind {
            Kind::AllReduce => using.all_reduce(send, recv, dtype, op),
            Kind::Reduce => using.reduce(send, at_root.then_some(recv), dtype, op, root),
            Kind::Broadcast => using.broadcast(at_root.then_some(send), Some(recv), dtype, root),
            Kind::AllGather => using.all_gather(send, recv, dtype),
            Kind::Gather => using.gather(send, at_root.then_some(recv), dtype, root),
            Kind::Scatter => using.scatter(at_root.then_some(send), recv, dtype, root),
            Kind::ReduceScatter => using.reduce_scatter(send, recv, dtype, op),
            Kind::AllToAll => using.all_to_all(send, recv, dtype),
            Kind::Send | Kind::Recv => Ok(()),
        }
    }
}
