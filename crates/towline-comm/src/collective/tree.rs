//! Collectives along a binomial tree: about log2(n) steps, each rank's data sent whole.

use super::run::{Run, STEP, steps};
use crate::Result;
use crate::combine::{Accumulator, Scratch, wide};

pub(super) fn all_reduce(run: &Run<'_>) -> Result<()> {
    reduce_to(run, 0, |run, at, result| {
        let mut scratch = Scratch::default();
        let bytes = scratch.bytes(result.len);
        if let Some(result) = result.bytes {
            bytes.copy_from_slice(result);
        }
        pass_down(run, 0, bytes)?;
        run.write(at, bytes)
    })
}

pub(super) fn reduce(run: &Run<'_>) -> Result<()> {
    reduce_to(run, run.job.root, |run, at, result| match result.bytes {
        Some(bytes) => run.write(at, bytes),
        None => Ok(()),
    })
}

pub(super) fn broadcast(run: &Run<'_>) -> Result<()> {
    let mut scratch = Scratch::default();
    for part in steps(run.job.block, STEP) {
        let bytes = scratch.bytes(part.len());
        if run.is_root() {
            run.read(part.start, bytes)?;
        }
        pass_down(run, run.job.root, bytes)?;
        if run.job.recv.is_some() {
            run.write(part.start, bytes)?;
        }
    }
    Ok(())
}

/// One step's result: its length, and its bytes at the root.
struct Outcome<'a> {
    len: usize,
    bytes: Option<&'a [u8]>,
}

fn reduce_to(
    run: &Run<'_>,
    root: usize,
    mut done: impl FnMut(&Run<'_>, usize, Outcome<'_>) -> Result<()>,
) -> Result<()> {
    let size = run.job.dtype.size();
    let mut sum = Accumulator::new(run.job.op, run.job.dtype);
    for part in steps(run.job.elements(), STEP / wide(run.job.dtype).size()) {
        sum.start(part.len());
        sum.take(run.scales[run.rank], |into| run.read(part.start * size, into))?;
        pass_up(run, root, &mut sum)?;
        let bytes = (run.rank == root).then(|| sum.finish(run.nranks));
        done(run, part.start * size, Outcome { len: part.len() * size, bytes })?;
    }
    Ok(())
}

/// Takes the children's partial results, and gives this rank's to its parent.
fn pass_up(run: &Run<'_>, root: usize, sum: &mut Accumulator) -> Result<()> {
    let place = place(run, root);
    let mut bit = 1;
    while bit < run.nranks {
        if place & bit != 0 {
            return run.team.send(rank_at(run, root, place - bit), sum.partial());
        }
        if place + bit < run.nranks {
            sum.take_partial(|into| run.team.recv(rank_at(run, root, place + bit), into))?;
        }
        bit <<= 1;
    }
    Ok(())
}

/// Takes the parent's bytes, and gives them to the children, the largest subtree first.
fn pass_down(run: &Run<'_>, root: usize, bytes: &mut [u8]) -> Result<()> {
    let place = place(run, root);
    let mut bit = if place == 0 { run.nranks.next_power_of_two() } else { place & place.wrapping_neg() };
    if place != 0 {
        run.team.recv(rank_at(run, root, place - bit), bytes)?;
    }
    while bit > 1 {
        bit >>= 1;
        if place + bit < run.nranks {
            run.team.send(rank_at(run, root, place + bit), bytes)?;
        }
    }
    Ok(())
}

/// A rank's place in the tree: the root's is 0.
fn place(run: &Run<'_>, root: usize) -> usize {
    (run.rank + run.nranks - root) % run.nranks
}

fn rank_at(run: &Run<'_>, root: usize, place: usize) -> usize {
    (place + root) % run.nranks
}
