//! Collectives through the channels between pairs of ranks: any memory, near or far.
//!
//! Data is cut into stretches that fit into the scratch memory of one step; each stretch arrives everywhere before the
//! next one starts, so that the memory needed does not grow with the data, and forms in place need no care.

use std::mem;
use std::ops::Range;

use super::run::{Run, STEP, share, steps};
use crate::Result;
use crate::combine::{Accumulator, Scratch, wide};

/// Which ranks send to which.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Pattern {
    /// Each with each, in `n - 1` rounds of disjoint pairs.
    Pairwise,
    /// Each with its neighbours.
    Ring,
}

/// The memory of one call, kept between its stretches.
struct Stage {
    sums: [Accumulator; 2],
    out: Scratch,
    arrived: Scratch,
}

impl Stage {
    fn new(run: &Run<'_>) -> Stage {
        let sum = || Accumulator::new(run.job.op, run.job.dtype);
        Stage { sums: [sum(), sum()], out: Scratch::default(), arrived: Scratch::default() }
    }
}

/// How many elements of one rank a step takes.
fn elements_in_step(run: &Run<'_>) -> usize {
    STEP / wide(run.job.dtype).size()
}

pub(super) fn all_reduce(run: &Run<'_>, pattern: Pattern) -> Result<()> {
    each_stretch(run, |stage, cut| {
        scatter_sums(run, pattern, stage, &cut)?;
        let result = stage.sums[0].finish(run.nranks);
        run.write(cut(run.rank).start, result)?;
        gather_blocks(run, pattern, result, &mut stage.out, &mut stage.arrived, &cut)
    })
}

pub(super) fn reduce(run: &Run<'_>, pattern: Pattern) -> Result<()> {
    each_stretch(run, |stage, cut| {
        scatter_sums(run, pattern, stage, &cut)?;
        let result = stage.sums[0].finish(run.nranks);
        if !run.is_root() {
            return run.team.send(run.job.root, result);
        }
        run.write(cut(run.rank).start, result)?;
        for places in 1..run.nranks {
            let from = run.after(places);
            let into = stage.arrived.bytes(cut(from).len());
            run.team.recv(from, into)?;
            run.write(cut(from).start, into)?;
        }
        Ok(())
    })
}

/// Cuts a block into stretches, and each stretch into one share of bytes per rank.
fn each_stretch(
    run: &Run<'_>,
    mut step: impl FnMut(&mut Stage, &dyn Fn(usize) -> Range<usize>) -> Result<()>,
) -> Result<()> {
    let mut stage = Stage::new(run);
    let size = run.job.dtype.size();
    for stretch in steps(run.job.elements(), elements_in_step(run) * run.nranks) {
        step(&mut stage, &|index| {
            let part = share(stretch.len(), 1, run.nranks, index);
            (stretch.start + part.start) * size..(stretch.start + part.end) * size
        })?;
    }
    Ok(())
}

pub(super) fn reduce_scatter(run: &Run<'_>, pattern: Pattern) -> Result<()> {
    let mut stage = Stage::new(run);
    let size = run.job.dtype.size();
    for part in steps(run.job.elements(), elements_in_step(run)) {
        let base = part.start * size;
        scatter_sums(run, pattern, &mut stage, &|index| {
            let start = index * run.job.block + base;
            start..start + part.len() * size
        })?;
        run.write(base, stage.sums[0].finish(run.nranks))?;
    }
    Ok(())
}

/// Leaves in the first sum what all ranks have in this rank's cut.
fn scatter_sums(
    run: &Run<'_>,
    pattern: Pattern,
    stage: &mut Stage,
    cut: &dyn Fn(usize) -> Range<usize>,
) -> Result<()> {
    let size = run.job.dtype.size();
    let own = |sum: &mut Accumulator, index: usize| {
        sum.start(cut(index).len() / size);
        sum.take(run.scales[run.rank], |into| run.read(cut(index).start, into))
    };
    let [sum, next] = &mut stage.sums;
    match pattern {
        Pattern::Pairwise => {
            own(sum, run.rank)?;
            for places in 1..run.nranks {
                let (to, from) = (run.after(places), run.before(places));
                let out = stage.out.bytes(cut(to).len());
                run.read(cut(to).start, out)?;
                sum.take(run.scales[from], |into| run.team.exchange(to, out, from, into))?;
            }
        }
        Pattern::Ring => {
            own(sum, run.before(1))?;
            for places in 1..run.nranks {
                own(next, run.before(places + 1))?;
                next.take_partial(|into| {
                    run.team.exchange(run.after(1), sum.partial(), run.before(1), into)
                })?;
                mem::swap(sum, next);
            }
        }
    }
    Ok(())
}

pub(super) fn all_gather(run: &Run<'_>, pattern: Pattern) -> Result<()> {
    let (mut mine, mut out, mut arrived) = <(Scratch, Scratch, Scratch)>::default();
    for part in steps(run.job.block, STEP) {
        let mine = mine.bytes(part.len());
        run.read(part.start, mine)?;
        let place = |index: usize| {
            let start = index * run.job.block + part.start;
            start..start + part.len()
        };
        run.write(place(run.rank).start, mine)?;
        gather_blocks(run, pattern, mine, &mut out, &mut arrived, &place)?;
    }
    Ok(())
}

/// Gives every rank this rank's bytes, and writes every other rank's where they belong.
fn gather_blocks(
    run: &Run<'_>,
    pattern: Pattern,
    mine: &[u8],
    out: &mut Scratch,
    arrived: &mut Scratch,
    place: &dyn Fn(usize) -> Range<usize>,
) -> Result<()> {
    for places in 1..run.nranks {
        let (to, from, holder) = match pattern {
            Pattern::Pairwise => (run.after(places), run.before(places), run.before(places)),
            Pattern::Ring => (run.after(1), run.before(1), run.before(places)),
        };
        let into = arrived.bytes(place(holder).len());
        let passed_on = pattern == Pattern::Ring && places > 1;
        let bytes = if passed_on { out.bytes(place(run.before(places - 1)).len()) } else { mine };
        run.team.exchange(to, bytes, from, into)?;
        run.write(place(holder).start, into)?;
        mem::swap(out, arrived);
    }
    Ok(())
}

pub(super) fn broadcast(run: &Run<'_>, pattern: Pattern) -> Result<()> {
    match pattern {
        Pattern::Pairwise => broadcast_to_all(run),
        Pattern::Ring => broadcast_along(run),
    }
}

fn broadcast_to_all(run: &Run<'_>) -> Result<()> {
    let mut scratch = Scratch::default();
    for part in steps(run.job.block, STEP) {
        let bytes = scratch.bytes(part.len());
        if !run.is_root() {
            run.team.recv(run.job.root, bytes)?;
            run.write(part.start, bytes)?;
            continue;
        }
        run.read(part.start, bytes)?;
        let sends: Vec<(usize, &[u8])> = (1..run.nranks).map(|places| (run.after(places), &*bytes)).collect();
        run.team.exchange_all(run.job.kind.name(), &sends, &mut [])?;
        if run.job.recv.is_some() {
            run.write(part.start, bytes)?;
        }
    }
    Ok(())
}

/// From neighbour to neighbour: each rank passes one step on while the next one arrives.
fn broadcast_along(run: &Run<'_>) -> Result<()> {
    let last = run.after(1) == run.job.root;
    let (mut held, mut arriving) = <(Scratch, Scratch)>::default();
    let mut holding = 0;
    for part in steps(run.job.block, STEP) {
        if run.is_root() {
            let bytes = arriving.bytes(part.len());
            run.read(part.start, bytes)?;
            if !last {
                run.team.send(run.after(1), bytes)?;
            }
            if run.job.recv.is_some() {
                run.write(part.start, bytes)?;
            }
            continue;
        }
        let into = arriving.bytes(part.len());
        if last || holding == 0 {
            run.team.recv(run.before(1), into)?;
        } else {
            run.team.exchange(run.after(1), held.bytes(holding), run.before(1), into)?;
        }
        run.write(part.start, into)?;
        mem::swap(&mut held, &mut arriving);
        holding = part.len();
    }
    if holding > 0 && !last {
        run.team.send(run.after(1), held.bytes(holding))?;
    }
    Ok(())
}

pub(super) fn gather(run: &Run<'_>) -> Result<()> {
    let mut scratch = Scratch::default();
    let places = if run.is_root() { 0..run.nranks } else { 0..1 };
    for places in places {
        let holder = run.after(places);
        for part in steps(run.job.block, STEP) {
            let bytes = scratch.bytes(part.len());
            if places > 0 {
                run.team.recv(holder, bytes)?;
            } else {
                run.read(part.start, bytes)?;
            }
            if run.is_root() {
                run.write(holder * run.job.block + part.start, bytes)?;
            } else {
                run.team.send(run.job.root, bytes)?;
            }
        }
    }
    Ok(())
}

pub(super) fn scatter(run: &Run<'_>) -> Result<()> {
    let mut scratch = Scratch::default();
    let places = if run.is_root() { 0..run.nranks } else { 0..1 };
    for places in places {
        let owner = run.after(places);
        for part in steps(run.job.block, STEP) {
            let bytes = scratch.bytes(part.len());
            if run.is_root() {
                run.read(owner * run.job.block + part.start, bytes)?;
            } else {
                run.team.recv(run.job.root, bytes)?;
            }
            if places > 0 {
                run.team.send(owner, bytes)?;
            } else {
                run.write(part.start, bytes)?;
            }
        }
    }
    Ok(())
}

pub(super) fn all_to_all(run: &Run<'_>) -> Result<()> {
    let (mut out, mut arrived) = <(Scratch, Scratch)>::default();
    for places in 0..run.nranks {
        let (to, from) = (run.after(places), run.before(places));
        for part in steps(run.job.block, STEP) {
            let out = out.bytes(part.len());
            run.read(to * run.job.block + part.start, out)?;
            if places == 0 {
                run.write(from * run.job.block + part.start, out)?;
                continue;
            }
            let into = arrived.bytes(part.len());
            run.team.exchange(to, out, from, into)?;
            run.write(from * run.job.block + part.start, into)?;
        }
    }
    Ok(())
}
