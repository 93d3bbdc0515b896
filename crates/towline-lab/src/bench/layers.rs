//! The cache of one request: the same blocks of many layers, each a region of its own, by a program that is compiled once.

use std::sync::Arc;
use std::time::Instant;

use towline::{
    Access, Endpoint, Layout, MemoryAccess, Program, ProgramPart, Registered, Routing, SystemStorage, Ticket,
};

use super::Session;
use super::bed::Bed;
use super::limit::Limit;
use super::report::{Row, Unit};
use super::shapes::Path;
use crate::machine;
use crate::measure::{self, median};
use crate::outcome::{Failure, Outcome};
use crate::pattern::{self, Shuffle};
use crate::size;
use crate::worker::Worker;
use crate::worker::protocol::{Ask, Op, Reply};

/// The layers of a cache, the blocks that one has, and their bytes.
const LAYERS: u64 = 60;
const BLOCKS: u64 = 512;
const BLOCK: u64 = 16 << 10;

/// The blocks of each layer that are asked for.
const ASKED: [usize; 3] = [16, 64, 512];

/// Bytes for each bare stream, as for other transfers over sockets.
const STREAM: u64 = 1 << 20;

/// The ratios that are asked for, with 64 blocks of each layer, and the microseconds that posting them may take.
const GOALS: [(&str, f64); 4] = [("mapped", 0.95), ("cma", 0.9), ("unix", 0.85), ("tcp", 0.85)];
const POSTED: f64 = 30.0;

/// The layers of an owner's cache, and as many here.
struct Cache {
    _worker: Worker,
    _endpoint: Endpoint,
    locals: Vec<Registered<Arc<SystemStorage>>>,
    program: Program,
}

impl Cache {
    fn prepare(path: Path) -> Outcome<Cache> {
        let lanes = machine::cores().clamp(1, 4);
        let endpoint = Endpoint::options("bench-layers").lanes(lanes).open()?;
        let mut worker = Worker::start("layers")?;
        let mut tickets: Vec<Ticket> = Vec::new();
        for layer in 0..LAYERS {
            let ask = Ask::Register { memory: path.memory(), bytes: BLOCKS * BLOCK, seed: layer };
            match worker.ask(&ask)? {
                Reply::Region { ticket, .. } => tickets.push(ticket),
                reply => return Err(worker.surprise(&reply)),
            }
        }
        let routing = Routing::default().require(path.name())?;
        let remotes = endpoint.import_many_within(&tickets, &routing, endpoint.limits().no_progress)?;
        let remotes = remotes.into_iter().collect::<towline::Result<Vec<_>>>()?;
        let local = |_| -> Outcome<_> {
            let storage = Arc::new(SystemStorage::new((BLOCKS * BLOCK) as usize)?);
            // Pages that are missing would be counted as copying.
            storage.memset(0, 0, (BLOCKS * BLOCK) as usize)?;
            Ok(endpoint.register(storage, Access::NONE).map_err(towline::Error::from)?)
        };
        let locals = (0..LAYERS).map(local).collect::<Outcome<Vec<_>>>()?;
        let pages = Layout::contiguous(BLOCKS * BLOCK, BLOCK)?;
        let parts = remotes.iter().zip(&locals);
        let parts = parts.map(|(remote, local)| ProgramPart::new(remote, local, &pages, &pages));
        let program = endpoint.program(parts)?;
        Ok(Cache { _worker: worker, _endpoint: endpoint, locals, program })
    }

    /// Says whether a read of those blocks has brought what is there.
    fn verify(&self, asked: &Asked) -> Outcome<()> {
        for local in &self.locals {
            local.storage().memset(0, 0, (BLOCKS * BLOCK) as usize)?;
        }
        asked.read(&self.program)?;
        for (layer, local) in (0..).zip(&self.locals) {
            let pieces = asked.pairs().map(|(theirs, ours)| (theirs * BLOCK, ours * BLOCK, BLOCK));
            if let Some(offset) = pattern::wrong_piece(&**local.storage(), layer, pieces)? {
                return Err(Failure::failed(format!(
                    "the byte at offset {offset} of layer {layer} is wrong"
                )));
            }
        }
        Ok(())
    }
}

/// The blocks of each layer that are asked for, there and here, in no order.
struct Asked {
    theirs: Arc<Vec<u32>>,
    ours: Arc<Vec<u32>>,
}

impl Asked {
    fn new(count: usize) -> Outcome<Asked> {
        let all = Shuffle::new(BLOCKS, BLOCK)?;
        let some = |list: &[u32]| Arc::new(list.iter().copied().take(count).collect());
        Ok(Asked { theirs: some(&all.remote), ours: some(&all.local) })
    }

    fn pairs(&self) -> impl ExactSizeIterator<Item = (u64, u64)> {
        self.theirs.iter().zip(&*self.ours).map(|(theirs, ours)| (u64::from(*theirs), u64::from(*ours)))
    }

    fn read(&self, program: &Program) -> Outcome<()> {
        Ok(program.read(Arc::clone(&self.theirs), Arc::clone(&self.ours)).start()?.wait()?)
    }

    /// The same in memory that has all layers one after the other.
    fn pieces(&self) -> Vec<(u64, u64, u64)> {
        let of = |layer: u64| {
            let base = layer * BLOCKS * BLOCK;
            self.pairs().map(move |(theirs, ours)| (base + theirs * BLOCK, base + ours * BLOCK, BLOCK))
        };
        (0..LAYERS).flat_map(of).collect()
    }
}

/// Reads some blocks of every layer: how fast, beside a bare copy of as many blocks by as many threads; and how long the call takes
/// that starts it.
pub(super) fn measure(session: &mut Session) -> Outcome<()> {
    for path in Path::all().filter(|path| !path.is_here() && !path.is_opt_in()) {
        let cache = Cache::prepare(path)?;
        let mut bed = Bed::prepare(path, LAYERS * BLOCKS * BLOCK)?;
        for count in ASKED {
            let asked = Asked::new(count)?;
            cache.verify(&asked)?;
            of_blocks(session, path, &cache, &mut bed, &asked)?;
            posting(session, path, &cache, &asked)?;
        }
    }
    Ok(())
}

fn of_blocks(session: &mut Session, path: Path, cache: &Cache, bed: &mut Bed, asked: &Asked) -> Outcome<()> {
    let blocks = LAYERS * asked.ours.len() as u64;
    let bytes = blocks * BLOCK;
    let threads = measure::busy_threads(&mut || asked.read(&cache.program))?;
    let limit = match path.medium() {
        None => Limit::copy(Op::Read, &bed.near(), &bed.far()?, &asked.pieces(), threads)?,
        Some(medium) => {
            let streams = (bytes / STREAM).clamp(1, bed.lanes as u64) as usize;
            Limit::sockets(&mut bed.worker, medium, Op::Read, bytes, streams)?
        }
    };
    let pace = session.pace.asked(path.medium().is_some());
    let mut bare = || limit.run();
    let times = measure::rates(pace, &mut || asked.read(&cache.program), Some(&mut bare))?;
    let rate = |seconds| size::gib_per_second(bytes, seconds);
    let goal = GOALS.iter().find(|(name, _)| *name == path.name() && asked.ours.len() == 64);
    let row = Row::new(name(asked), Unit::Rate, rate(times.ours)).against(
        path.against(),
        times.limit.map(rate),
        goal.map(|(_, goal)| *goal),
    );
    let threads = Some(threads);
    session.rows.push(Row { threads, rounds: times.rounds, ..described(row, path, blocks) });
    Ok(())
}

fn posting(session: &mut Session, path: Path, cache: &Cache, asked: &Asked) -> Outcome<()> {
    let posts = if session.quick { 50 } else { 200 };
    let mut times = Vec::with_capacity(posts);
    for _ in 0..posts {
        let request = cache.program.read(Arc::clone(&asked.theirs), Arc::clone(&asked.ours));
        let start = Instant::now();
        let transfer = request.start()?;
        times.push(start.elapsed().as_secs_f64());
        transfer.wait()?;
    }
    let posted = median(&mut times) * 1e6;
    let p99 = times.get(posts * 99 / 100).map(|time| time * 1e6);
    let row = Row::new(format!("{}-post", name(asked)), Unit::Microseconds, posted).target(Some(POSTED));
    let blocks = LAYERS * asked.ours.len() as u64;
    session.rows.push(Row { p99, rounds: posts, ..described(row, path, blocks) });
    Ok(())
}

fn name(asked: &Asked) -> String {
    format!("layers-{LAYERS}x{}x16k", asked.ours.len())
}

fn described(row: Row, path: Path, blocks: u64) -> Row {
    let (path, op) = (Some(path.name().into()), Some("read".into()));
    Row { path, op, bytes: blocks * BLOCK, blocks, block_size: BLOCK, ..row }
}
