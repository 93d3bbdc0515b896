//! What the rows of one path share: the worker, its region, the memory here, and the way between them.

use std::fs::OpenOptions;
use std::sync::Arc;

use towline::memory::{Mapping, MemoryAccess, SharedStorage, Storage};
use towline::{Access, Endpoint, Layout, Registered, Remote, Routing, SystemStorage, Ticket};

use super::shapes::{Case, Manner, Path};
use crate::machine;
use crate::outcome::{Failure, Outcome};
use crate::pattern::{self, Shuffle};
use crate::raw::{Memory as RawMemory, RemoteMemory};
use crate::size;
use crate::worker::Worker;
use crate::worker::protocol::{Ask, Op, Reply, nixl};

/// The pattern of the owner's bytes.
const THEIRS: u64 = 11;
/// The pattern of the bytes that are written.
const OURS: u64 = 13;

/// One path, ready to be measured.
pub(super) struct Bed {
    pub(super) path: Path,
    pub(super) endpoint: Endpoint,
    pub(super) remote: Remote,
    pub(super) local: Registered<Arc<SystemStorage>>,
    pub(super) worker: Worker,
    /// How many connections a large transfer over sockets takes.
    pub(super) lanes: usize,
    owner: Owner,
}

/// Where the region is.
enum Owner {
    Here { region: Registered<Arc<SystemStorage>>, _endpoint: Endpoint },
    There { region: usize, addr: u64, file: Option<i32>, bytes: u64 },
}

impl Bed {
    /// Prepares regions of that size on both sides.
    pub(super) fn prepare(path: Path, bytes: u64) -> Outcome<Bed> {
        room_for(2 * bytes + (512 << 20))?;
        let lanes = machine::cores().clamp(1, 4);
        let endpoint = Endpoint::options("bench").lanes(lanes).nixl(nixl(false)).open()?;
        let mut worker = Worker::start("peer")?;
        if path.is_opt_in() {
            worker.ask(&Ask::Lend)?;
        }
        let (owner, ticket) = if path.is_here() { here(bytes)? } else { there(&mut worker, path, bytes)? };
        let remote = endpoint.import_with(&ticket, &Routing::default().require(path.name())?)?;
        let storage = Arc::new(SystemStorage::new(bytes as usize)?);
        // Pages that are missing would be counted as copying.
        storage.memset(0, 0, bytes as usize)?;
        let local = endpoint.register(storage, Access::NONE).map_err(towline::Error::from)?;
        Ok(Bed { path, endpoint, remote, local, worker, lanes, owner })
    }

    /// This side's memory, for bare copies.
    pub(super) fn near(&self) -> RawMemory {
        let storage: Arc<dyn Storage> = Arc::clone(self.local.storage()) as _;
        RawMemory::Storage(storage)
    }

    /// The owner's memory, for bare copies: the very pages that the library reaches.
    pub(super) fn far(&self) -> Outcome<RemoteMemory> {
        match &self.owner {
            Owner::Here { region, .. } => {
                let storage: Arc<dyn Storage> = Arc::clone(region.storage()) as _;
                Ok(RemoteMemory::Memory(RawMemory::Storage(storage)))
            }
            Owner::There { addr, bytes, .. }
                if self.path.medium().is_none() && !self.path.shares_memory() =>
            {
                Ok(RemoteMemory::Process { pid: self.worker.pid(), addr: *addr, len: *bytes })
            }
            Owner::There { file, bytes, .. } => {
                let memory = self.mapped(*file, *bytes)?;
                memory.touch().map_err(|error| Failure::os("mapping", error))?;
                Ok(RemoteMemory::Memory(memory))
            }
        }
    }

    fn mapped(&self, file: Option<i32>, bytes: u64) -> Outcome<RawMemory> {
        let opened = file.and_then(|file| {
            let path = format!("/proc/{}/fd/{file}", self.worker.pid());
            OpenOptions::new().read(true).write(true).open(path).ok()
        });
        Ok(match opened {
            Some(file) => RawMemory::Mapping(Arc::new(Mapping::map(file.into(), bytes as usize, true)?)),
            // Where another process's descriptors cannot be opened, memory of the same kind has to do.
            None => {
                let storage = SharedStorage::new(bytes as usize)?;
                storage.memset(1, 0, bytes as usize)?;
                RawMemory::Storage(Arc::new(storage))
            }
        })
    }

    /// Moves a case's bytes once, with bytes that can be told apart, and compares them at the target.
    pub(super) fn verify(&mut self, case: &Case, shape: &Shape) -> Outcome<()> {
        let storage = Arc::clone(self.local.storage());
        match case.op {
            Op::Read => storage.memset(0, 0, case.bytes() as usize)?,
            Op::Write => pattern::fill_front(&*storage, OURS, case.bytes())?,
        }
        self.transfer(case, shape)?;
        let wrong = match (case.op, &self.owner) {
            (Op::Read, _) => pattern::wrong_piece(&*storage, THEIRS, shape.pieces.iter().copied())?,
            (Op::Write, Owner::Here { region, .. }) => {
                let pieces = shape.pieces.iter().map(|(remote, local, len)| (*local, *remote, *len));
                pattern::wrong_piece(&**region.storage(), OURS, pieces)?
            }
            (Op::Write, Owner::There { region, .. }) => {
                let (blocks, block_size) = (case.blocks, case.block_size);
                let ask = Ask::VerifyBlocks { region: *region, seed: OURS, blocks, block_size };
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

    /// Moves a case's bytes once.
    pub(super) fn transfer(&self, case: &Case, shape: &Shape) -> Outcome<()> {
        let request = || match case.op {
            Op::Read => self.endpoint.read(&self.remote, &self.local),
            Op::Write => self.endpoint.write(&self.remote, &self.local),
        };
        match case.manner {
            Manner::Concurrent => {
                let mut flying = Vec::with_capacity(shape.pieces.len());
                for (remote, local, len) in &shape.pieces {
                    flying.push(request().at(*remote, *local, *len).start()?);
                }
                for transfer in flying {
                    transfer.wait()?;
                }
            }
            _ if case.blocks == 1 => request().at(0, 0, case.block_size).start()?.wait()?,
            _ => {
                let Shape { layout, shuffle, .. } = shape;
                request().blocks(layout, &shuffle.remote, layout, &shuffle.local).start()?.wait()?;
            }
        }
        Ok(())
    }
}

/// The blocks of a case: by index for the library, by offset for the bare copy.
pub(super) struct Shape {
    layout: Layout,
    shuffle: Shuffle,
    pub(super) pieces: Vec<(u64, u64, u64)>,
}

impl Shape {
    pub(super) fn of(case: &Case) -> Outcome<Shape> {
        let shuffle = Shuffle::new(case.blocks, case.block_size)?;
        let layout = Layout::contiguous(case.bytes(), case.block_size)?;
        let pieces = shuffle.pieces();
        Ok(Shape { layout, shuffle, pieces })
    }
}

fn here(bytes: u64) -> Outcome<(Owner, Ticket)> {
    let endpoint = Endpoint::open("peer")?;
    let storage = Arc::new(SystemStorage::new(bytes as usize)?);
    pattern::fill(&*storage, THEIRS)?;
    let region = endpoint.register(storage, Access::READ_WRITE).map_err(towline::Error::from)?;
    let ticket = region.ticket()?;
    Ok((Owner::Here { region, _endpoint: endpoint }, ticket))
}

fn there(worker: &mut Worker, path: Path, bytes: u64) -> Outcome<(Owner, Ticket)> {
    match worker.ask(&Ask::Register { memory: path.memory(), bytes, seed: THEIRS })? {
        Reply::Region { region, ticket, addr, file } => {
            Ok((Owner::There { region, addr, file, bytes }, ticket))
        }
        reply => Err(worker.surprise(&reply)),
    }
}

/// Fails where the machine has no room for that many bytes.
fn room_for(bytes: u64) -> Outcome<()> {
    match machine::meminfo("MemAvailable") {
        Some(available) if available < bytes => Err(Failure::lacking(format!(
            "it needs {} of memory, and {} are available",
            size::bytes(bytes),
            size::bytes(available)
        ))),
        _ => Ok(()),
    }
}
