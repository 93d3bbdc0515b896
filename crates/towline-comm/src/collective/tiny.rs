//! Collectives whose data ride in the announcement: one round, and everybody has everything.
//!
//! What a rank announced stays readable until its next call but one has everybody's announcement, so that nobody has
//! to wait for the others to have read it.

use super::choice::Kind;
use super::run::Run;
use crate::combine::{Accumulator, Scratch};
use crate::team::Round;
use crate::{Error, Result};

pub(super) fn run(run: &Run<'_>, round: &Round<'_>) -> Result<()> {
    let block = run.job.block;
    match run.job.kind {
        Kind::AllReduce => combine(run, round, 0),
        Kind::Reduce if run.is_root() => combine(run, round, 0),
        Kind::ReduceScatter => combine(run, round, run.rank * block),
        Kind::Broadcast if run.job.recv.is_some() => copy(run, round, run.job.root, 0, 0),
        Kind::Scatter => copy(run, round, run.job.root, run.rank * block, 0),
        Kind::AllGather => (0..run.nranks).try_for_each(|from| copy(run, round, from, 0, from * block)),
        Kind::Gather if run.is_root() => {
            (0..run.nranks).try_for_each(|from| copy(run, round, from, 0, from * block))
        }
        Kind::AllToAll => {
            (0..run.nranks).try_for_each(|from| copy(run, round, from, run.rank * block, from * block))
        }
        Kind::Reduce | Kind::Broadcast | Kind::Gather | Kind::Send | Kind::Recv => Ok(()),
    }
}

/// Combines what everybody announced from `offset` on, in the order of the ranks.
fn combine(run: &Run<'_>, round: &Round<'_>, offset: usize) -> Result<()> {
    let mut sum = Accumulator::new(run.job.op, run.job.dtype);
    sum.start(run.job.elements());
    let mut scratch = Scratch::default();
    for from in 0..run.nranks {
        sum.take(run.scales[from], |into| {
            if offset == 0 {
                return announced(run, round, from, into);
            }
            let whole = scratch.bytes(offset + into.len());
            announced(run, round, from, whole)?;
            into.copy_from_slice(&whole[offset..]);
            Ok(())
        })?;
    }
    run.write(0, sum.finish(run.nranks))
}

/// Writes one block of what a rank announced to its place.
fn copy(run: &Run<'_>, round: &Round<'_>, from: usize, offset: usize, to: usize) -> Result<()> {
    let mut bytes = vec![0; offset + run.job.block];
    announced(run, round, from, &mut bytes)?;
    run.write(to, &bytes[offset..])
}

fn announced(run: &Run<'_>, round: &Round<'_>, from: usize, into: &mut [u8]) -> Result<()> {
    let there = round.payload_into(from, into)?;
    if there < into.len() {
        let message = format!("{there} bytes were announced, and {} belong to the call", into.len());
        return Err(Error::protocol(run.job.kind.name(), message).about([from]));
    }
    Ok(())
}
