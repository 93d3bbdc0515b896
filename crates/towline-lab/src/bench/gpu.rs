//! The rows of GPUs: beside what the driver and a bare kernel do without the library, and beside NIXL where it is installed.

use std::sync::Arc;
use std::time::Duration;

use towline::cuda::{Availability, Gpu, availability};
use towline::memory::{DeviceStorage, MemoryAccess, PinnedStorage, Storage};
use towline::{Access, Endpoint, Layout, Registered, Remote, Routing, SystemStorage};
use towline_testkit::gpu::{Bare, Turns};

use super::against::peer::Peer;
use super::report::{Row, Skipped, Unit};
use super::{Options, Session};
use crate::measure::{self, median};
use crate::outcome::{Failure, Outcome};
use crate::pattern::{self, Shuffle};
use crate::size;
use crate::worker::Worker;
use crate::worker::protocol::{Ask, Memory, Op, Reply};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// The patterns of the owner's bytes, and of those that are written.
const THEIRS: u64 = 17;
const OURS: u64 = 19;

/// GPUs with less memory than this get smaller regions, and fewer rows: the tests' fake is one.
const ROOMY: u64 = 8 << 30;

/// The region on each side. Blocks are taken from all of it.
const REGION: u64 = 512 * MIB;
const SMALL_REGION: u64 = 8 * MIB;

/// How long one row of NIXL may take.
const PEERS_TURN: Duration = Duration::from_millis(1500);

/// NIXL's best settings on a GPU.
const NIXL: [(&str, &str); 3] =
    [("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on"), ("UCX_RNDV_THRESH", "0"), ("TOWLINE_BENCH_MEMORY", "VRAM")];

/// Which memory moves, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Setup {
    /// Memory of the GPU in both processes.
    Gpu,
    /// Shared memory of the other process, and memory of the GPU here.
    FromHost,
    /// Memory of the GPU in the other process, and pinned memory here.
    ToHost,
    /// Memory of the GPU in both processes, over a socket.
    Tcp,
}

impl Setup {
    const ALL: [Setup; 4] = [Setup::Gpu, Setup::FromHost, Setup::ToHost, Setup::Tcp];

    fn path(self) -> &'static str {
        match self {
            Setup::Gpu | Setup::ToHost => "cuda",
            Setup::FromHost => "mapped",
            Setup::Tcp => "tcp",
        }
    }

    /// As it is part of the rows' names.
    fn name(self) -> &'static str {
        match self {
            Setup::Gpu => "gpu",
            Setup::FromHost => "gpu-from-shared",
            Setup::ToHost => "gpu-to-pinned",
            Setup::Tcp => "gpu-tcp",
        }
    }

    fn theirs(self) -> Memory {
        if self == Setup::FromHost { Memory::Shared } else { Memory::Device }
    }

    fn ours(self, bytes: usize) -> towline::Result<Arc<dyn Storage>> {
        Ok(match self {
            Setup::ToHost => Arc::new(PinnedStorage::new(bytes)?),
            _ => Arc::new(DeviceStorage::new(bytes, 0)?),
        })
    }
}

/// One row: the setup, the shape, the ratio that is asked for, and whether it is also written.
struct Case {
    setup: Setup,
    shape: &'static str,
    blocks: u64,
    block_size: u64,
    goal: Option<f64>,
    op: Op,
}

/// Setup, shape, blocks, block size, goal, and which directions are measured.
type Shape = (Setup, &'static str, u64, u64, Option<f64>, &'static [Op]);

const READ: &[Op] = &[Op::Read];
const BOTH: &[Op] = &Op::BOTH;

const SHAPES: [Shape; 15] = [
    // At most 1.5 times as long as the driver's copy.
    (Setup::Gpu, "4k", 1, 4 * KIB, Some(0.667), BOTH),
    (Setup::Gpu, "1m", 1, MIB, None, BOTH),
    (Setup::Gpu, "256m", 1, 256 * MIB, Some(0.95), BOTH),
    (Setup::Gpu, "16384x4k", 16384, 4 * KIB, Some(0.9), BOTH),
    (Setup::Gpu, "81920x4k", 81920, 4 * KIB, Some(0.9), BOTH),
    (Setup::Gpu, "4096x16k", 4096, 16 * KIB, None, BOTH),
    (Setup::Gpu, "10240x32k", 10240, 32 * KIB, Some(0.95), BOTH),
    (Setup::Gpu, "1024x64k", 1024, 64 * KIB, None, BOTH),
    (Setup::Gpu, "256x1m", 256, MIB, None, READ),
    (Setup::FromHost, "256m", 1, 256 * MIB, Some(0.9), READ),
    (Setup::FromHost, "4096x16k", 4096, 16 * KIB, Some(0.85), READ),
    (Setup::ToHost, "256m", 1, 256 * MIB, Some(0.9), READ),
    (Setup::ToHost, "4096x16k", 4096, 16 * KIB, Some(0.85), READ),
    (Setup::Tcp, "1m", 1, MIB, None, BOTH),
    (Setup::Tcp, "256m", 1, 256 * MIB, Some(0.8), BOTH),
];

impl Case {
    fn name(&self) -> String {
        format!("{}-{}", self.setup.name(), self.shape)
    }

    fn label(&self) -> String {
        format!("{}/{}/{}", self.setup.path(), self.name(), self.op.name())
    }

    fn bytes(&self) -> u64 {
        self.blocks * self.block_size
    }

    fn is_latency(&self) -> bool {
        self.bytes() <= 64 * KIB
    }
}

/// The labels of the rows that the options ask for.
pub(super) fn labels(options: &Options) -> Vec<String> {
    cases(options).iter().map(Case::label).collect()
}

/// Reads before writes: a write leaves other bytes at the owner.
fn cases(options: &Options) -> Vec<Case> {
    let mut cases = Vec::new();
    for setup in Setup::ALL {
        for op in Op::BOTH {
            let mine = SHAPES.iter().filter(|shape| shape.0 == setup && shape.5.contains(&op));
            cases.extend(mine.map(|(setup, shape, blocks, block_size, goal, _)| Case {
                setup: *setup,
                shape,
                blocks: *blocks,
                block_size: *block_size,
                goal: *goal,
                op,
            }));
        }
    }
    cases.retain(|case| options.wants(&case.label()));
    cases
}

/// Measures the rows, or says in one why there are none.
pub(super) fn run(session: &mut Session, options: &Options) {
    let cases = cases(options);
    if cases.is_empty() {
        return;
    }
    let prepared = gpu().and_then(|gpu| {
        let roomy = gpu.device().memory().map_err(|error| Failure::failed(error.to_string()))? > ROOMY;
        let region = if roomy { REGION } else { SMALL_REGION };
        let most = cases.iter().map(|case| case.blocks).max().unwrap_or(1);
        let bare = Bare::new(&gpu, region as usize, most as usize, None)?;
        Ok((region, bare))
    });
    let (region, bare) = match prepared {
        Ok(prepared) => prepared,
        Err(failure) => return session.fail("gpu".to_owned(), None, &failure),
    };
    if let Some(why) = bare.no_kernel() {
        session.skipped.push(Skipped {
            name: "the limit of blocks on a GPU".to_owned(),
            path: None,
            reason: why.to_owned(),
        });
    }
    let cases: Vec<_> = cases.into_iter().filter(|case| case.bytes() <= region).collect();
    for setup in Setup::ALL {
        let mine: Vec<_> = cases.iter().filter(|case| case.setup == setup).collect();
        if mine.is_empty() {
            continue;
        }
        let mut bed = match Bed::prepare(setup, region) {
            Ok(bed) => bed,
            Err(failure) => {
                session.fail(setup.name().to_owned(), Some(setup.path()), &failure);
                continue;
            }
        };
        for case in &mine {
            session.step(&case.label());
            let measured =
                bare.enter().map_err(Failure::from).and_then(|turns| bed.row(session, case, &turns));
            match measured {
                Ok(row) => session.rows.push(row),
                Err(failure) => session.fail(case.name(), Some(setup.path()), &failure),
            }
        }
        if setup == Setup::Gpu {
            beside_nixl(session, &mine, region);
        }
    }
}

fn gpu() -> Outcome<Arc<Gpu>> {
    match availability() {
        Availability::Found { devices, .. } if !devices.is_empty() => {
            let gpu = Gpu::open(0)?;
            gpu.prepare()?;
            Ok(gpu)
        }
        Availability::Missing { tried, .. } => {
            Err(Failure::lacking(format!("there is no GPU: {}", tried.join("; "))))
        }
        _ => Err(Failure::lacking("there is no GPU")),
    }
}

/// Two processes with memory for one setup.
struct Bed {
    worker: Worker,
    endpoint: Endpoint,
    region: usize,
    size: u64,
    remote: Remote,
    local: Registered<Arc<dyn Storage>>,
    /// The same in host memory, where that is the limit.
    plain: Option<(Remote, Registered<SystemStorage>)>,
}

impl Bed {
    fn prepare(setup: Setup, size: u64) -> Outcome<Bed> {
        let endpoint = Endpoint::open("bench-gpu")?;
        let mut worker = Worker::start("peer-gpu")?;
        let routing = Routing::default().require(setup.path())?;
        let mut register = |memory| match worker.ask(&Ask::Register { memory, bytes: size, seed: THEIRS })? {
            Reply::Region { region, ticket, .. } => Ok((region, ticket)),
            reply => Err(worker.surprise(&reply)),
        };
        let (region, ticket) = register(setup.theirs())?;
        let remote = endpoint.import_with(&ticket, &routing)?;
        let storage = setup.ours(size as usize)?;
        let local = endpoint.register(storage, Access::NONE).map_err(towline::Error::from)?;
        let plain = match setup {
            Setup::Tcp => {
                let remote = endpoint.import_with(&register(Memory::System)?.1, &routing)?;
                let storage = SystemStorage::new(size as usize)?;
                storage.memset(0, 0, size as usize)?;
                let local = endpoint.register(storage, Access::NONE).map_err(towline::Error::from)?;
                Some((remote, local))
            }
            _ => None,
        };
        Ok(Bed { worker, endpoint, region, size, remote, local, plain })
    }

    fn transfer(&self, case: &Case, shuffle: &Shuffle, layout: &Layout) -> Outcome<()> {
        let request = match case.op {
            Op::Read => self.endpoint.read(&self.remote, &self.local),
            Op::Write => self.endpoint.write(&self.remote, &self.local),
        };
        let request = match case.blocks {
            1 => request.at(0, 0, case.block_size),
            _ => request.blocks(layout, &shuffle.remote, layout, &shuffle.local),
        };
        Ok(request.start()?.wait()?)
    }

    /// Host memory by the same path.
    fn plainly(&self, case: &Case) -> Outcome<()> {
        let Some((remote, local)) = &self.plain else { return Ok(()) };
        let request = match case.op {
            Op::Read => self.endpoint.read(remote, local),
            Op::Write => self.endpoint.write(remote, local),
        };
        Ok(request.at(0, 0, case.bytes()).start()?.wait()?)
    }

    /// Moves a case's bytes once, with bytes that can be told apart, and compares them at the target.
    fn verify(&mut self, case: &Case, shuffle: &Shuffle, layout: &Layout) -> Outcome<()> {
        let storage = self.local.storage();
        match case.op {
            Op::Read => storage.memset(0xEE, 0, self.size as usize)?,
            Op::Write => pattern::fill_front(&**storage, OURS, case.bytes())?,
        }
        self.transfer(case, shuffle, layout)?;
        let wrong = match case.op {
            Op::Read => {
                // At once: many small reads of a GPU's memory take long.
                let mut bytes = vec![0; case.bytes() as usize];
                storage.read_at(0, &mut bytes)?;
                let copy = SystemStorage::new(bytes.len())?;
                copy.write_at(0, &bytes)?;
                pattern::wrong_piece(&copy, THEIRS, shuffle.pieces().into_iter())?
            }
            Op::Write => {
                let (blocks, block_size) = (case.blocks, case.block_size);
                let ask = Ask::VerifyBlocks { region: self.region, seed: OURS, blocks, block_size };
                match self.worker.ask(&ask)? {
                    Reply::Verified { wrong } => wrong,
                    reply => return Err(self.worker.surprise(&reply)),
                }
            }
        };
        match wrong {
            None => Ok(()),
            Some(offset) => Err(Failure::failed(format!("the byte at offset {offset} is wrong"))),
        }
    }

    fn row(&mut self, session: &Session, case: &Case, turns: &Turns<'_>) -> Outcome<Row> {
        let shuffle = Shuffle::new(case.blocks, case.block_size)?;
        let layout = Layout::contiguous(case.bytes(), case.block_size)?;
        self.verify(case, &shuffle, &layout)?;
        let bytes = case.bytes() as usize;
        let (against, has_limit) = match (case.setup, case.blocks) {
            (Setup::Tcp, _) => ("host memory over tcp", true),
            (Setup::FromHost | Setup::ToHost, _) => ("cuMemcpyAsync of pinned memory", true),
            (Setup::Gpu, 1) => ("cuMemcpyAsync", true),
            (Setup::Gpu, _) => {
                turns.prepare(&shuffle.remote, &shuffle.local, case.block_size as usize)?;
                // Once, to see whether it runs at all.
                ("a bare kernel", turns.paged().is_ok())
            }
        };
        let mut ours = || self.transfer(case, &shuffle, &layout);
        let mut limit = || match (case.setup, case.blocks) {
            (Setup::Tcp, _) => self.plainly(case),
            (Setup::FromHost, _) => Ok(turns.over_the_bus(true, bytes)?),
            (Setup::ToHost, _) => Ok(turns.over_the_bus(false, bytes)?),
            (Setup::Gpu, 1) => Ok(turns.on_gpu(bytes)?),
            (Setup::Gpu, _) => Ok(turns.paged()?),
        };
        let limit: Option<&mut measure::Step<'_>> = if has_limit { Some(&mut limit) } else { None };
        let times = measure::medians(session.pace, &mut ours, limit)?;
        let row =
            case.shown(times.ours).against(against, times.limit.map(|time| case.value(time)), case.goal);
        Ok(Row { p99: times.p99.map(|time| time * 1e6), rounds: times.rounds, ..row })
    }
}

impl Case {
    fn value(&self, seconds: f64) -> f64 {
        if self.is_latency() { seconds * 1e6 } else { size::gib_per_second(self.bytes(), seconds) }
    }

    fn shown(&self, seconds: f64) -> Row {
        let unit = if self.is_latency() { Unit::Microseconds } else { Unit::Rate };
        Row {
            path: Some(self.setup.path().into()),
            op: Some(self.op.name().into()),
            bytes: self.bytes(),
            blocks: self.blocks,
            block_size: self.block_size,
            ..Row::new(self.name(), unit, self.value(seconds))
        }
    }
}

/// Measures NIXL on the same shapes, and puts a row with it beside each of ours.
fn beside_nixl(session: &mut Session, cases: &[&Case], region: u64) {
    let mut api = match Peer::start_with(&NIXL, region, false, false) {
        Ok(api) => api,
        Err(failure) => return session.fail("NIXL on a GPU".to_owned(), None, &failure),
    };
    for case in cases {
        session.progress.says(&format!("NIXL: {}", case.label()));
        match by_nixl(&mut api, case) {
            Ok(theirs) => {
                let ours = session.rows.iter().position(|row| {
                    row.name == case.name()
                        && row.op.as_deref() == Some(case.op.name())
                        && row.ranks.is_none()
                });
                if let Some(at) = ours {
                    let row = session.rows[at].clone();
                    let value = case.value(theirs);
                    let row =
                        Row { goal: None, met: None, ..row }.against("NIXL, best setting", Some(value), None);
                    session.rows.insert(at + 1, row);
                }
            }
            Err(failure) => {
                session.fail(format!("NIXL: {}", case.name()), Some(case.setup.path()), &failure);
                return;
            }
        }
    }
}

/// The median time of one transfer, as many as the turn allows and at least one that is warm.
fn by_nixl(api: &mut Peer, case: &Case) -> Outcome<f64> {
    api.prepare(case.op, case.blocks, case.block_size)?;
    let warm = api.transfers(1)?.into_iter().fold(0.0, f64::max).max(1e-6);
    let count = (PEERS_TURN.as_secs_f64() / warm).clamp(1.0, 200.0) as usize;
    Ok(median(&mut api.transfers(count)?))
}
