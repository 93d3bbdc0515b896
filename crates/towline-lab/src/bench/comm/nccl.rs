//! The rows of a communicator on a GPU: one rank through us beside NCCL's bare calls, in turns.

use std::io;
use std::time::{Duration, Instant};

use towline::cuda::Gpu;
use towline::{Buffer, DeviceStorage, Dtype, create_buffer};
use towline_comm::{Communicator, Config, Op, WindowFlag, get_nccl_unique_id, mem_alloc_on};

use super::super::Session;
use super::super::report::{Row, Unit};
use crate::outcome::{Exit, Failure};
use crate::raw::nccl::{Bare, alone};

const SMALL: &str = "nccl-call-4k";
const LARGE: &str = "nccl-call-1m";
const REGISTER: &str = "nccl-register-64m";
const WINDOW: &str = "nccl-window-64m";
pub(super) const NAMES: [&str; 4] = [SMALL, LARGE, REGISTER, WINDOW];

/// Registrations that are timed together: one of 0.3 µs is too near to what a look at the clock takes.
const BATCH: usize = 50;
/// A measurement of registrations that takes longer makes do with fewer rounds.
const LONG: Duration = Duration::from_secs(2);
/// What is registered.
const BYTES: usize = 64 << 20;
/// What a call through us may take longer, in microseconds.
const OVER: f64 = 5.0;
/// A registration through us may take 1.1 times as long.
const GOAL: f64 = 1.0 / 1.1;

/// Measures those of the rows that are wanted; where there is no GPU or no NCCL, says so once.
pub(super) fn run(session: &mut Session, names: &[&'static str]) {
    let missing = match (Gpu::open(0), get_nccl_unique_id()) {
        (Err(error), _) => Some(error.to_string()),
        (_, Err(error)) => Some(error.to_string()),
        _ => None,
    };
    if let Some(reason) = missing {
        names.iter().for_each(|name| session.step(name));
        session.fail("nccl".to_owned(), None, &Failure::new(Exit::Unavailable, reason));
        return;
    }
    let measured = alone(0, |bare| {
        let ours = Ours::new()?;
        for name in names {
            session.step(&format!("1-ranks/{name}"));
            session.rows.push(ours.row(name, bare)?);
        }
        Ok(())
    });
    if let Err(error) = measured {
        session.fail("nccl".to_owned(), None, &Failure::failed(error.to_string()));
    }
}

/// What our calls took, and the bare ones, in microseconds.
type Samples = (Vec<f64>, Vec<f64>);

/// The rank that goes through us.
struct Ours {
    comm: Communicator,
    buffer: Buffer,
}

impl Ours {
    fn new() -> io::Result<Ours> {
        let config = Config { gpu: Some(0), ..Config::default() };
        let id = get_nccl_unique_id().map_err(io::Error::other)?;
        let comm = Communicator::init(1, 0, &id, config).map_err(io::Error::other)?;
        Ok(Ours { comm, buffer: create_buffer(mem_alloc_on(0, BYTES).map_err(io::Error::other)?) })
    }

    fn row(&self, name: &'static str, bare: &Bare<'_>) -> io::Result<Row> {
        let bytes = match name {
            SMALL => 4096,
            LARGE => 1 << 20,
            _ => BYTES,
        };
        let range = bare.range(&self.buffer);
        let (ours, limit) = match name {
            SMALL | LARGE => self.calls(bare, bytes)?,
            REGISTER => self.turns(|buffer| self.register(buffer), || range.register())?,
            _ => self.turns(|buffer| self.window(buffer), || range.window(1).map(drop))?,
        };
        let rounds = ours.len();
        let (ours, limit) = (median(ours), median(limit));
        let version = bare.version();
        let row = match name {
            SMALL | LARGE => {
                let against =
                    format!("{limit:.2} µs of the bare ncclAllReduce are taken off, NCCL {version}");
                let row = Row::new(name, Unit::Microseconds, (ours - limit).max(0.0)).target(Some(OVER));
                Row { op: Some("enqueue".into()), against: against.into(), ..row }
            }
            _ => {
                let against = format!("the bare calls, NCCL {version}");
                let row = Row::new(name, Unit::Microseconds, ours).against(against, Some(limit), Some(GOAL));
                Row { op: Some("register".into()), ..row }
            }
        };
        Ok(Row { bytes: bytes as u64, ranks: Some(1), rounds, ..row })
    }

    /// An all-reduce into another buffer, until it is in the stream: ours and the bare one in turns, of which the first tenth warms up.
    fn calls(&self, bare: &Bare<'_>, bytes: usize) -> io::Result<Samples> {
        let rounds = 2000;
        let target = create_buffer(DeviceStorage::new(bytes, 0).map_err(io::Error::other)?);
        let memory = |buffer: &Buffer| self.comm.memory(buffer.clone());
        let send = memory(&self.buffer).and_then(|all| all.part(0, bytes)).map_err(io::Error::other)?;
        let recv = memory(&target).map_err(io::Error::other)?;
        let through_us = || self.comm.all_reduce(&send, &recv, Dtype::F32, Op::Sum).map_err(io::Error::other);
        let sums = bare.sums(&self.buffer, &target, bytes / 4)?;
        let mut samples = (Vec::with_capacity(rounds), Vec::with_capacity(rounds));
        for turn in 0..rounds + rounds / 10 {
            let ours = timed(through_us)?;
            bare.synchronize()?;
            let plain = timed(|| sums.run())?;
            bare.synchronize()?;
            if turn >= rounds / 10 {
                samples.0.push(ours);
                samples.1.push(plain);
            }
        }
        Ok(samples)
    }

    /// A batch of each in turns, of which the first tenth warms up. A tenth of the rounds is enough where they take long: a window of
    /// some versions takes 85 µs. The caller that registers gives a share of the buffer away: to make it is the caller's, to drop it is ours.
    fn turns(
        &self,
        ours: impl Fn(Buffer) -> io::Result<()>,
        bare: impl Fn() -> io::Result<()>,
    ) -> io::Result<Samples> {
        let rounds = 1000;
        let mut samples = (Vec::with_capacity(rounds), Vec::with_capacity(rounds));
        let begun = Instant::now();
        for turn in 0..rounds + rounds / 10 {
            if turn >= rounds / 5 && begun.elapsed() > LONG {
                break;
            }
            let owners: [Buffer; BATCH] = std::array::from_fn(|_| self.buffer.clone());
            let one = timed(|| owners.into_iter().try_for_each(&ours))?;
            let other = timed(|| (0..BATCH).try_for_each(|_| bare()))?;
            if turn >= rounds / 10 {
                samples.0.push(one / BATCH as f64);
                samples.1.push(other / BATCH as f64);
            }
        }
        Ok(samples)
    }

    fn register(&self, buffer: Buffer) -> io::Result<()> {
        let registered = self.comm.register_buffer(buffer).map_err(io::Error::other)?;
        registered.close();
        Ok(())
    }

    fn window(&self, buffer: Buffer) -> io::Result<()> {
        let window = self.comm.register_window(buffer, WindowFlag::COLL_SYMMETRIC);
        window.map(drop).map_err(io::Error::other)
    }
}

fn timed(work: impl FnOnce() -> io::Result<()>) -> io::Result<f64> {
    let begun = Instant::now();
    work()?;
    Ok(begun.elapsed().as_secs_f64() * 1e6)
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied().unwrap_or(0.0)
}
