//! Collectives in which every rank reads and writes the others' memory.
//!
//! A reduction is cut into one share per rank. Its owner reads the share from every rank, combines in private memory, or
//! in registers where it is a sum, and writes the result to every rank that wants it: each byte is read once where it is
//! and written once where it goes, and nobody but the owner touches a share, so that forms in place need no care. Data that is only moved goes
//! from memory to memory by the rank that receives it (by the sender in a gather, so that all of them work at the same time).

use std::ops::Range;
use std::sync::Arc;

use towline::{Pinned, Stretch};

use super::choice::Kind;
use super::run::{Run, STEP, share, steps};
use crate::combine::{Accumulator, Scratch, wide};
use crate::memory::Memory;
use crate::{Error, Result};

/// The bytes of one rank that are combined at a time. What was read and what was summed stay in the first-level cache;
/// more ranks mean more streams, which want longer pieces. Measured on 64 MiB of f32, on 2 cores: with 2 ranks 4 KiB take
/// 8.1 ms, 16 KiB 11.7 ms and 64 KiB 10.9 ms; with 4 ranks 26.7 ms, 24.6 ms and 23.5 ms, and 32 KiB 23.4 ms.
fn chunk(nranks: usize) -> usize {
    if nranks == 2 { 4 << 10 } else { 32 << 10 }
}

/// The bytes of one rank that are added up in one go. Each begins with a look at all memories and ends with a wait until what was written
/// around the cache has left the core.
const SUMMED: usize = 4 << 20;

/// Shares are cut at pages, so that no two ranks write to one.
const PAGE: usize = 4096;

/// The memory of one rank in one call, as this rank reaches it.
pub(super) enum Part {
    Mine(Memory),
    Theirs {
        rank: usize,
        pinned: Arc<Pinned>,
        base: usize,
    },
    /// The call does not touch it.
    Unneeded,
}

impl Part {
    fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        // BYTES MOVE HERE
        match self {
            Part::Mine(memory) => memory.read_at(offset, into),
            Part::Theirs { rank, pinned, base } => of(*rank, pinned.read_at(base + offset, into)),
            Part::Unneeded => Err(unneeded()),
        }
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        // BYTES MOVE HERE
        match self {
            Part::Mine(memory) => memory.write_at(offset, from),
            Part::Theirs { rank, pinned, base } => of(*rank, pinned.write_at(base + offset, from)),
            Part::Unneeded => Err(unneeded()),
        }
    }

    /// [`write`](Self::write) where the whole is longer than caches are.
    fn stream(&self, offset: usize, from: &[u8]) -> Result<()> {
        // BYTES MOVE HERE
        match self {
            Part::Mine(memory) => memory.stream_at(offset, from),
            Part::Theirs { rank, pinned, base } => of(*rank, pinned.stream_at(base + offset, from)),
            Part::Unneeded => Err(unneeded()),
        }
    }

    /// It from that offset on, for a sum where it is.
    fn stretch(&self, offset: usize) -> Result<Stretch<'_>> {
        match self {
            Part::Mine(memory) => Ok(Stretch::Own(memory.span()?, offset)),
            Part::Theirs { pinned, base, .. } => Ok(Stretch::Pinned(pinned, base + offset)),
            Part::Unneeded => Err(unneeded()),
        }
    }

    /// Copies from there to local memory.
    fn copy_to(&self, offset: usize, target: &Memory) -> Result<()> {
        // BYTES MOVE HERE
        match self {
            Part::Mine(memory) => copy_here(&memory.part(offset, target.len())?, target),
            Part::Theirs { rank, pinned, base } => of(*rank, pinned.copy_to(base + offset, target.span()?)),
            Part::Unneeded => Err(unneeded()),
        }
    }

    /// Copies local memory there.
    fn copy_from(&self, offset: usize, source: &Memory) -> Result<()> {
        // BYTES MOVE HERE
        match self {
            Part::Mine(memory) => copy_here(source, &memory.part(offset, source.len())?),
            Part::Theirs { rank, pinned, base } => of(*rank, pinned.copy_from(base + offset, source.span()?)),
            Part::Unneeded => Err(unneeded()),
        }
    }
}

/// Says whose memory an access was to.
fn of(rank: usize, accessed: towline::Result<()>) -> Result<()> {
    accessed.map_err(|error| Error::from(error).about([rank]))
}

fn unneeded() -> Error {
    Error::new(towline::Kind::Internal, "access", "a collective touches memory that it does not need")
}

/// Copies between two memories of this rank.
pub(super) fn copy_here(from: &Memory, to: &Memory) -> Result<()> {
    if from.addr() == to.addr() {
        return Ok(());
    }
    let mut scratch = Scratch::default();
    for part in steps(from.len().min(to.len()), STEP) {
        let bytes = scratch.bytes(part.len());
        from.read_at(part.start, bytes)?;
        to.write_at(part.start, bytes)?;
    }
    Ok(())
}

/// Every rank's memory in one call, by rank; empty where the call does not need it.
pub(super) struct Reach {
    pub(super) send: Vec<Part>,
    pub(super) recv: Vec<Part>,
}

/// Whose memory the direct form of a call needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Whose {
    Everybodys,
    Roots,
    Nobodys,
}

/// Whose memory must be reachable: what is sent, what is received.
pub(super) fn needs(kind: Kind) -> (Whose, Whose) {
    match kind {
        Kind::AllReduce => (Whose::Everybodys, Whose::Everybodys),
        Kind::Reduce => (Whose::Everybodys, Whose::Roots),
        Kind::Broadcast | Kind::Scatter => (Whose::Roots, Whose::Nobodys),
        Kind::Gather => (Whose::Nobodys, Whose::Roots),
        Kind::AllGather | Kind::ReduceScatter | Kind::AllToAll => (Whose::Everybodys, Whose::Nobodys),
        Kind::Send | Kind::Recv => (Whose::Nobodys, Whose::Nobodys),
    }
}

pub(super) fn run(run: &Run<'_>, reach: &Reach) -> Result<()> {
    let Run { job, rank, nranks, .. } = *run;
    let (block, root) = (job.block, job.root);
    let long = run.is_long();
    match (job.kind, &job.send, &job.recv) {
        (Kind::AllReduce, ..) if run.sums_in_place() => {
            // Starting with the next rank spreads the writers over the readers' memory.
            let targets: Vec<&Part> = (1..=nranks).map(|places| &reach.recv[run.after(places)]).collect();
            sum(run, &reach.send, Share::OfEverything, &targets)
        }
        (Kind::AllReduce, ..) => combine(run, &reach.send, Share::OfEverything, |at, result| {
            // Starting with the next rank spreads the writers over the readers' memory.
            (1..=nranks).try_for_each(|places| {
                let part = &reach.recv[run.after(places)];
                if long { part.stream(at, result) } else { part.write(at, result) }
            })
        }),
        (Kind::Reduce, ..) if run.sums_in_place() => {
            sum(run, &reach.send, Share::OfEverything, &[&reach.recv[root]])
        }
        (Kind::Reduce, ..) => {
            combine(run, &reach.send, Share::OfEverything, |at, result| reach.recv[root].write(at, result))
        }
        (Kind::ReduceScatter, _, Some(recv)) if run.sums_in_place() => {
            sum(run, &reach.send, Share::OwnBlock, &[&Part::Mine(recv.clone().into_owned())])
        }
        (Kind::ReduceScatter, ..) => {
            combine(run, &reach.send, Share::OwnBlock, |at, result| run.write(at, result))
        }
        (Kind::Broadcast, _, Some(recv)) => reach.send[root].copy_to(0, recv),
        (Kind::Scatter, _, Some(recv)) => reach.send[root].copy_to(rank * block, recv),
        (Kind::Gather, Some(send), _) => reach.recv[root].copy_from(rank * block, send),
        (Kind::AllGather, _, Some(recv)) => (0..nranks).try_for_each(|places| {
            let from = run.after(places);
            reach.send[from].copy_to(0, &recv.part(from * block, block)?)
        }),
        (Kind::AllToAll, _, Some(recv)) => (0..nranks).try_for_each(|places| {
            let from = run.after(places);
            reach.send[from].copy_to(rank * block, &recv.part(from * block, block)?)
        }),
        _ => Ok(()),
    }
}

/// Adds up this rank's share where every rank has it, and writes it where it is wanted.
fn sum(run: &Run<'_>, sources: &[Part], share_of: Share, targets: &[&Part]) -> Result<()> {
    let (dtype, size) = (run.job.dtype, run.job.dtype.size());
    let (mine, base) = share_of.of(run);
    let total = if run.averages() { towline::average } else { towline::sum };
    for part in steps(mine.len(), SUMMED / size) {
        let at = (mine.start + part.start) * size;
        let from = sources.iter().map(|part| part.stretch(base + at)).collect::<Result<Vec<_>>>()?;
        let into = targets.iter().map(|part| Ok((part.stretch(at)?, run.is_long())));
        // BYTES MOVE HERE
        total(dtype, &from, &into.collect::<Result<Vec<_>>>()?, part.len() * size)?;
    }
    Ok(())
}

/// Which elements this rank combines.
enum Share {
    /// Its share of a block that all have.
    OfEverything,
    /// Its own block of as many as there are ranks.
    OwnBlock,
}

impl Share {
    /// The elements, and how far from the start of a source the first block that has them is.
    fn of(self, run: &Run<'_>) -> (Range<usize>, usize) {
        match self {
            Share::OfEverything => {
                (share(run.job.elements(), PAGE / run.job.dtype.size(), run.nranks, run.rank), 0)
            }
            Share::OwnBlock => (0..run.job.elements(), run.rank * run.job.block),
        }
    }
}

fn combine(
    run: &Run<'_>,
    sources: &[Part],
    share_of: Share,
    mut done: impl FnMut(usize, &[u8]) -> Result<()>,
) -> Result<()> {
    let size = run.job.dtype.size();
    let (mine, base) = share_of.of(run);
    let mut sum = Accumulator::new(run.job.op, run.job.dtype);
    for part in steps(mine.len(), chunk(run.nranks) / wide(run.job.dtype).size()) {
        let at = (mine.start + part.start) * size;
        sum.start(part.len());
        for (source, &scale) in sources.iter().zip(&run.scales) {
            sum.take(scale, |into| source.read(base + at, into))?;
        }
        done(at, sum.finish(run.nranks))?;
    }
    Ok(())
}
