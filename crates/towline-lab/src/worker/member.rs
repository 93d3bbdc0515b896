//! A rank of a measured group: a worker process that joins and follows its orders.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use towline::memory::{Mapping, MemoryAccess, Storage};
use towline::{Dtype, SharedStorage, SystemStorage};
use towline_comm::{
    Communicator, Config, Memory as CommMemory, Op as Combine, Patience, RegisteredBuffer, Window,
    WindowFlag, mem_alloc,
};

use super::order::{Memory, Order, RankReply};
use super::protocol::{Op, Usage};
use crate::measure::{self, Pace, median};
use crate::outcome::{Failure, Outcome};
use crate::raw::{Cut, Direction, Flag, Memory as RawMemory, RawCopy, RemoteMemory};

/// Where in a rank's window the flag lies that the other rank raises by hand.
const FLAG: u64 = 1024;

/// Round trips that are not counted: the two ranks do not start at the same moment.
const WARMUP: u64 = 200;

#[derive(Default)]
pub(super) struct Member {
    comm: Option<Communicator>,
    window: Option<OneSided>,
    reductions: HashMap<(Memory, u64), Reduction>,
}

/// What the one-sided rows need.
struct OneSided {
    window: Window,
    storage: Arc<SharedStorage>,
    /// The other rank's memory, mapped by hand, and the flags in both.
    far: Option<(RawMemory, Flag, Flag)>,
    /// Round trips so far: by signals, and by flags.
    signalled: u64,
    flagged: u64,
}

/// The memory of one reduction.
struct Reduction {
    send: CommMemory,
    recv: CommMemory,
    _windows: Vec<Window>,
    _buffers: Vec<RegisteredBuffer>,
}

impl Member {
    pub(super) fn perform(&mut self, order: Order) -> Outcome<RankReply> {
        Ok(match order {
            Order::Join { nranks, rank, id, spinning } => {
                let spin = Patience { spin: Duration::from_millis(20), yielding: Duration::from_millis(1) };
                let patience = spinning.then_some(spin);
                let config = Config { name: "bench".into(), patience, ..Config::default() };
                self.comm = Some(Communicator::init(nranks, rank, &id, config)?);
                RankReply::Done
            }
            Order::Open { bytes } => self.open(bytes)?,
            Order::Map { pid, file, bytes } => {
                let one_sided = self.one_sided()?;
                let path = format!("/proc/{pid}/fd/{file}");
                let opened = OpenOptions::new().read(true).write(true).open(&path);
                let file = opened.map_err(|error| Failure::os(path, error))?;
                let far = RawMemory::Mapping(Arc::new(Mapping::map(file.into(), bytes as usize, true)?));
                let failed = |error| Failure::os("mapping", error);
                far.touch().map_err(failed)?;
                let mine = Arc::clone(&one_sided.storage) as Arc<dyn Storage>;
                let theirs = Flag::new(far.clone(), FLAG).map_err(failed)?;
                let mine = Flag::new(RawMemory::Storage(mine), FLAG).map_err(failed)?;
                one_sided.far = Some((far, theirs, mine));
                RankReply::Done
            }
            Order::Ping { bare, count } => RankReply::Seconds(self.ping(bare, count)?),
            Order::Copy { op, bytes, budget_ms, fewest, most } => {
                let pace = Pace { budget: Duration::from_millis(budget_ms), fewest, most };
                self.copy(op, bytes, pace)?
            }
            Order::AllReduce { memory, bytes, repeats } => {
                RankReply::Seconds(self.all_reduce(memory, bytes, repeats)?)
            }
            Order::Forget => {
                self.reductions.clear();
                RankReply::Done
            }
            Order::Register { bytes, rounds } => RankReply::Seconds(self.register(bytes, rounds)?),
            Order::Windows { count, at_a_time } => self.windows(count, at_a_time)?,
        })
    }

    fn comm(&self) -> Outcome<&Communicator> {
        self.comm.as_ref().ok_or_else(|| Failure::failed("this worker has joined no group"))
    }

    fn one_sided(&mut self) -> Outcome<&mut OneSided> {
        self.window.as_mut().ok_or_else(|| Failure::failed("there is no window"))
    }

    fn open(&mut self, bytes: u64) -> Outcome<RankReply> {
        let storage = Arc::new(touched(bytes)?);
        let segment = storage.segment().ok_or_else(|| Failure::failed("shared memory has no file"))?;
        let file = segment.segment.file().as_raw_fd();
        let window = window(self.comm()?, Arc::clone(&storage))?;
        self.window = Some(OneSided { window, storage, far: None, signalled: 0, flagged: 0 });
        Ok(RankReply::Opened { pid: std::process::id() as i32, file })
    }

    fn ping(&mut self, bare: bool, count: u64) -> Outcome<f64> {
        let first = self.comm()?.rank()? == 0;
        let one_sided = self.one_sided()?;
        let OneSided { window, far, signalled, flagged, storage } = one_sided;
        if bare {
            let Some((_, theirs, mine)) = far else { return Err(Failure::failed("nothing is mapped")) };
            let failed = |error| Failure::os("flag", error);
            let start = *flagged + 1;
            *flagged += WARMUP + count;
            return round_trips(start, count, |number| {
                if first {
                    theirs.raise(number);
                    mine.wait(number).map_err(failed)
                } else {
                    mine.wait(number).map_err(failed)?;
                    theirs.raise(number);
                    Ok(())
                }
            });
        }
        let (epoch, peer) = (window.epoch()?, usize::from(first));
        let start = *signalled + 1;
        *signalled += WARMUP + count;
        let arrived = |number: u64| -> Outcome<()> {
            epoch.wait_level(peer, 0, 0, number)?;
            // Bytes are looked at before the clock runs.
            if number - start < WARMUP {
                let mut bytes = [0; 8];
                storage.read_at(0, &mut bytes)?;
                if u64::from_ne_bytes(bytes) != number {
                    return Err(Failure::failed(format!(
                        "the put of round {number} is not what has arrived"
                    )));
                }
            }
            Ok(())
        };
        round_trips(start, count, |number| {
            if first {
                epoch.put_signal(peer, 0, &number.to_ne_bytes(), 0, 0)?;
                arrived(number)
            } else {
                arrived(number)?;
                Ok(epoch.put_signal(peer, 0, &number.to_ne_bytes(), 0, 0)?)
            }
        })
    }

    fn copy(&mut self, op: Op, bytes: u64, pace: Pace) -> Outcome<RankReply> {
        let local = Arc::new(touched(bytes)?);
        let memory = self.comm()?.memory(Arc::clone(&local))?;
        let one_sided = self.one_sided()?;
        let Some((far, ..)) = &one_sided.far else { return Err(Failure::failed("nothing is mapped")) };
        let direction = if op == Op::Read { Direction::Read } else { Direction::Write };
        let near = RawMemory::Storage(local as Arc<dyn Storage>);
        let failed = |error| Failure::os("copy", error);
        let by_hand = |direction| {
            let (near, far) = (near.clone(), RemoteMemory::Memory(far.clone()));
            RawCopy::new(direction, near, far, &[(0, 0, bytes)], Cut::Even(1)).map_err(failed)
        };
        let window = &one_sided.window;
        let ours = |op| -> Outcome<()> {
            match op {
                Op::Read => window.get(1, 0, &memory)?.wait()?,
                Op::Write => window.put(1, 0, &memory)?.wait()?,
            };
            Ok(())
        };
        // What one way brings there, the other way has to find.
        let pattern: Vec<u8> = (0..bytes).map(|at| (at / 7 * 31) as u8).collect();
        memory.write_at(0, &pattern)?;
        match op {
            Op::Write => ours(op)?,
            Op::Read => by_hand(Direction::Write)?.run(0).map_err(failed)?,
        }
        memory.write_at(0, &vec![0; bytes as usize])?;
        match op {
            Op::Write => by_hand(Direction::Read)?.run(0).map_err(failed)?,
            Op::Read => ours(op)?,
        }
        let mut found = vec![0; bytes as usize];
        memory.read_at(0, &mut found)?;
        if found != pattern {
            return Err(Failure::failed("what was copied is not what was there"));
        }
        let raw = by_hand(direction)?;
        let (mut ours, mut bare) = (|| ours(op), || raw.run(0).map_err(failed));
        let times = measure::rates(pace, &mut ours, Some(&mut bare))?;
        Ok(RankReply::Copied {
            ours: times.ours,
            bare: times.limit.unwrap_or(f64::NAN),
            rounds: times.rounds,
        })
    }

    fn all_reduce(&mut self, memory: Memory, bytes: u64, repeats: u64) -> Outcome<f64> {
        if !self.reductions.contains_key(&(memory, bytes)) {
            let made = self.prepare(memory, bytes)?;
            self.reductions.insert((memory, bytes), made);
        }
        let (comm, Reduction { send, recv, .. }) = (self.comm()?, &self.reductions[&(memory, bytes)]);
        comm.barrier()?;
        // Others had the cores before.
        for _ in 0..repeats / 8 {
            comm.all_reduce(send, recv, Dtype::F32, Combine::Sum)?;
        }
        let start = Instant::now();
        for _ in 0..repeats {
            comm.all_reduce(send, recv, Dtype::F32, Combine::Sum)?;
        }
        Ok(start.elapsed().as_secs_f64() / repeats.max(1) as f64)
    }

    /// Memory whose pages are there, and one reduction of which every element is looked at.
    fn prepare(&self, memory: Memory, bytes: u64) -> Outcome<Reduction> {
        let comm = self.comm()?;
        let (mut windows, mut buffers) = (Vec::new(), Vec::new());
        let mut make = || -> Outcome<CommMemory> {
            Ok(match memory {
                Memory::Window => {
                    let window = window(comm, touched(bytes)?)?;
                    let memory = window.memory()?;
                    windows.push(window);
                    memory
                }
                Memory::Buffer => {
                    let buffer = comm.register_buffer(touched(bytes)?)?;
                    let memory = buffer.memory()?;
                    buffers.push(buffer);
                    memory
                }
                Memory::Unregistered => {
                    let storage = SystemStorage::new(bytes as usize)?;
                    storage.memset(0, 0, bytes as usize)?;
                    comm.memory(storage)?
                }
            })
        };
        let (send, recv) = (make()?, make()?);
        let (rank, nranks) = (comm.rank()?, comm.nranks()?);
        let of = |rank: usize, index: usize| (index % 1000 * (rank + 1)) as f32;
        let mut elements = vec![0; bytes as usize];
        for (index, element) in elements.chunks_exact_mut(4).enumerate() {
            element.copy_from_slice(&of(rank, index).to_ne_bytes());
        }
        send.write_at(0, &elements)?;
        comm.all_reduce(&send, &recv, Dtype::F32, Combine::Sum)?;
        recv.read_at(0, &mut elements)?;
        for (index, element) in elements.chunks_exact(4).enumerate() {
            let expected: f32 = (0..nranks).map(|rank| of(rank, index)).sum();
            if element != expected.to_ne_bytes() {
                return Err(Failure::failed(format!("element {index} of a reduction is wrong")));
            }
        }
        Ok(Reduction { send, recv, _windows: windows, _buffers: buffers })
    }

    fn register(&self, bytes: u64, rounds: usize) -> Outcome<f64> {
        let comm = self.comm()?;
        let storage = Arc::new(mem_alloc(bytes as usize)?);
        let mut times = Vec::new();
        for _ in 0..rounds {
            comm.barrier()?;
            let start = Instant::now();
            let window = window(comm, Arc::clone(&storage))?;
            times.push(start.elapsed().as_secs_f64());
            window.close();
        }
        Ok(median(&mut times))
    }

    fn windows(&self, count: usize, at_a_time: usize) -> Outcome<RankReply> {
        let comm = self.comm()?;
        let batch = || -> Outcome<()> {
            let open: Vec<Window> =
                (0..at_a_time).map(|_| window(comm, mem_alloc(64 << 10)?)).collect::<Outcome<_>>()?;
            comm.barrier()?;
            open.iter().for_each(Window::close);
            // Everybody has closed before anybody looks.
            Ok(comm.barrier()?)
        };
        let all = || (0..count.div_ceil(at_a_time.max(1))).try_for_each(|_| batch());
        // As many before, so that the allocator and the tables have grown to what they need.
        all()?;
        let (before, before_bytes) = (Usage::now(), resident());
        all()?;
        let (after, after_bytes) = (Usage::now(), resident());
        let grown = |after: usize, before: usize| after as i64 - before as i64;
        Ok(RankReply::Grown {
            bytes: after_bytes - before_bytes,
            files: grown(after.files, before.files),
            threads: grown(after.threads, before.threads),
        })
    }
}

/// Does rounds that are not counted, then counts; the seconds of one.
fn round_trips(start: u64, count: u64, mut round: impl FnMut(u64) -> Outcome<()>) -> Outcome<f64> {
    (start..start + WARMUP).try_for_each(&mut round)?;
    let since = Instant::now();
    (start + WARMUP..start + WARMUP + count).try_for_each(&mut round)?;
    Ok(since.elapsed().as_secs_f64() / count.max(1) as f64)
}

fn window(comm: &Communicator, storage: impl Storage) -> Outcome<Window> {
    comm.register_window(storage, WindowFlag::DEFAULT)?
        .ok_or_else(|| Failure::lacking("windows are not supported here"))
}

/// Shared memory whose pages are there: missing ones would be counted as copying.
fn touched(bytes: u64) -> Outcome<SharedStorage> {
    let storage = mem_alloc(bytes as usize)?;
    storage.memset(0, 0, bytes as usize)?;
    Ok(storage)
}

/// The bytes of this process's own memory that are there; what it maps of others is not counted.
fn resident() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<i64>().ok()).unwrap_or(0) * 1024
}
