//! Collectives whose data ride in the announcement: one round, and every rank has everything.
//!
//! What a rank announced stays readable until its next call but one has every rank's announcement, so that nobody has
//! to wait for the others to have read it.

use super::choice::Kind;
use super::run::Run;
use crate::combine::{Accumulator, Scratch, Spent};
use crate::team::Round;
use crate::{Error, Result};

/// Memory that small calls use again and again: allocating it takes longer than they do.
#[derive(Default)]
pub(super) struct Room {
    /// What this rank announces.
    pub(super) payload: Scratch,
    spent: Spent,
}

pub(super) fn run(run: &Run<'_>, round: &Round<'_>, room: &mut Room) -> Result<()> {
    let sent = run.job.send.as_ref().map_or(0, |send| send.len());
    let all = &Announced { run, round, mine: room.payload.bytes(sent) };
    let spent = &mut room.spent;
    let block = run.job.block;
    match run.job.kind {
        Kind::AllReduce => combine(all, 0, spent),
        Kind::Reduce if run.is_root() => combine(all, 0, spent),
        Kind::ReduceScatter => combine(all, run.rank * block, spent),
        Kind::Broadcast if run.job.recv.is_some() => copy(all, run.job.root, 0, 0),
        Kind::Scatter => copy(all, run.job.root, run.rank * block, 0),
        Kind::AllGather => (0..run.nranks).try_for_each(|from| copy(all, from, 0, from * block)),
        Kind::Gather if run.is_root() => {
            (0..run.nranks).try_for_each(|from| copy(all, from, 0, from * block))
        }
        Kind::AllToAll => {
            (0..run.nranks).try_for_each(|from| copy(all, from, run.rank * block, from * block))
        }
        Kind::Reduce | Kind::Broadcast | Kind::Gather | Kind::Send | Kind::Recv => Ok(()),
    }
}

/// What every rank announced.
struct Announced<'a> {
    run: &'a Run<'a>,
    round: &'a Round<'a>,
    /// What this rank did, which the round does not contain.
    mine: &'a [u8],
}

impl Announced<'_> {
    /// The first bytes of what that rank announced.
    fn read(&self, from: usize, into: &mut [u8]) -> Result<()> {
        let there = if from == self.run.rank {
            let there = self.mine.len().min(into.len());
            into[..there].copy_from_slice(&self.mine[..there]);
            there
        } else {
            self.round.payload_into(from, into)?
        };
        if there < into.len() {
            let message = format!("{there} bytes were announced, and {} belong to the call", into.len());
            return Err(Error::protocol(self.run.job.kind.name(), message).about([from]));
        }
        Ok(())
    }
}

/// Combines what every rank announced from `offset` on, in the order of the ranks.
fn combine(all: &Announced<'_>, offset: usize, spent: &mut Spent) -> Result<()> {
    let run = all.run;
    let mut sum = Accumulator::reusing(run.job.op, run.job.dtype, std::mem::take(spent));
    sum.start(run.job.elements());
    let mut scratch = Scratch::default();
    for from in 0..run.nranks {
        sum.take(run.scales.get(from).copied().unwrap_or_default(), |into| {
            if offset == 0 {
                return all.read(from, into);
            }
            let whole = scratch.bytes(offset + into.len());
            all.read(from, whole)?;
            into.copy_from_slice(&whole[offset..]);
            Ok(())
        })?;
    }
    run.write(0, sum.finish(run.nranks))?;
    *spent = sum.spend();
    Ok(())
}

/// Writes one block of what a rank announced to its place.
fn copy(all: &Announced<'_>, from: usize, offset: usize, to: usize) -> Result<()> {
    let mut bytes = vec![0; offset + all.run.job.block];
    all.read(from, &mut bytes)?;
    all.run.write(to, &bytes[offset..])
}
