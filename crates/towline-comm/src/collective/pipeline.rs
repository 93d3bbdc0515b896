//! Reductions of any memory among ranks that share memory, through the rings between them.
//!
//! The data is cut into stretches of one chunk per rank. Every rank copies the others' chunks from its memory into
//! their rings; the owner of a chunk combines it straight from its rings, in registers where it is a sum, elsewhere a piece
//! at a time that stays in the first-level cache, and writes the result to its memory and into the others' rings, from which they copy it out.
//! The steps of a stretch overlap with those of the next ones, so that a rank seldom waits for another.
//!
//! No rank waits for a full ring in vain: one that is at a stretch has taken all that the others sent it two stretches
//! before, and what is sent in two stretches fits into a ring.

use std::ops::Range;

use super::run::{Run, share, steps};
use crate::Result;
use crate::combine::{Accumulator, Scratch, wide};
use crate::team::{Pipes, Sum};

/// The most bytes of a chunk. Measured as the rings were: 16 KiB make 4.0 GiB/s, 32 KiB 4.4, 64 KiB 4.8, 128 KiB 4.9. Where there are
/// more ranks than cores, each chunk costs a change of the rank on a core: with 64 MiB of f32 among 4 ranks on 2 cores a rank is put aside
/// 260 times with 32 KiB, 138 times with 64 KiB and 83 times with 128 KiB, and takes 9.1, 8.0 and 7.8 ms of a processor.
const CHUNK: usize = 128 << 10;

/// The bytes of one rank that are combined at a time, in the type in which they are combined.
const PIECE: usize = 8 << 10;

/// Chunks are cut at cache lines.
const LINE: usize = 64;

pub(super) fn all_reduce(run: &Run<'_>) -> Result<()> {
    let pipes = run.team.pipes(run.job.kind.name())?;
    let size = run.job.dtype.size();
    let stretches = steps(run.job.elements(), pipes.chunk().min(CHUNK) / size * run.nranks);
    let stretches = towline::room::collect(run.job.kind.name(), stretches)?;
    let sum = Accumulator::new(run.job.op, run.job.dtype);
    let before = (1..run.nranks).map(|places| run.before(places)).collect();
    let after = (1..run.nranks).map(|places| run.after(places)).collect();
    let (sums, scratch) = (run.sums_in_place(), Scratch::default());
    let mut pipeline = Pipeline { run, pipes, stretches, sums, before, after, sum, scratch };
    for step in 0..pipeline.stretches.len() + 2 {
        pipeline.give(step)?;
        if let Some(step) = step.checked_sub(1) {
            pipeline.combine(step)?;
        }
        if let Some(step) = step.checked_sub(2) {
            pipeline.collect(step)?;
        }
    }
    Ok(())
}

/// One call while it runs.
struct Pipeline<'a> {
    run: &'a Run<'a>,
    pipes: Pipes<'a>,
    /// The elements of each stretch.
    stretches: Vec<Range<usize>>,
    /// Whether elements are added up where they are.
    sums: bool,
    /// The other ranks, in the order in which this one takes from them, and in which it gives to them.
    before: Vec<usize>,
    after: Vec<usize>,
    sum: Accumulator,
    scratch: Scratch,
}

impl Pipeline<'_> {
    /// The bytes of a rank's chunk of a stretch; empty if there is no such stretch.
    fn cut(&self, step: usize, rank: usize) -> Range<usize> {
        let Some(stretch) = self.stretches.get(step) else { return 0..0 };
        let size = self.run.job.dtype.size();
        let part = share(stretch.len(), LINE / size, self.run.nranks, rank);
        (stretch.start + part.start) * size..(stretch.start + part.end) * size
    }

    /// Gives the others what this rank has of their chunks.
    fn give(&mut self, step: usize) -> Result<()> {
        for places in 1..self.run.nranks {
            let to = self.run.after(places);
            let cut = self.cut(step, to);
            if cut.is_empty() {
                continue;
            }
            self.pipes.reserve(to, cut.len())?;
            self.pipes.copy(to, self.run.sent()?.span()?, cut.start, cut.len())?;
            self.pipes.publish(to)?;
        }
        Ok(())
    }

    /// Combines this rank's own chunk, and gives every rank the result.
    fn combine(&mut self, step: usize) -> Result<()> {
        let (run, cut) = (self.run, self.cut(step, self.run.rank));
        if cut.is_empty() {
            return Ok(());
        }
        for places in 1..run.nranks {
            self.pipes.expect(run.before(places), cut.len())?;
            self.pipes.reserve(run.after(places), cut.len())?;
        }
        let (size, dtype) = (run.job.dtype.size(), run.job.dtype);
        if self.sums && self.pipes.holds_whole(size, &self.before, &self.after) {
            let (own, into) = (run.sent()?.span()?, run.received()?.span()?);
            self.pipes.sum(&Sum {
                dtype,
                own: Some((own, cut.start)),
                from: &self.before,
                to: &self.after,
                into: (into, cut.start),
                len: cut.len(),
                long: run.is_long(),
                averages: run.averages(),
            })?;
            return self.after.iter().try_for_each(|to| self.pipes.publish(*to));
        }
        let (sum, pipes) = (&mut self.sum, &mut self.pipes);
        for part in steps(cut.len(), PIECE / wide(dtype).size() * size) {
            let at = cut.start + part.start;
            sum.start(part.len() / size);
            sum.take(run.scales[run.rank], |into| run.read(at, into))?;
            for places in 1..run.nranks {
                let from = run.before(places);
                sum.take(run.scales[from], |into| pipes.read(from, into))?;
            }
            let result = sum.finish(run.nranks);
            for places in 1..run.nranks {
                pipes.write(run.after(places), result)?;
            }
            run.deliver(at, result)?;
        }
        (1..run.nranks).try_for_each(|places| pipes.publish(run.after(places)))
    }

    /// Takes the others' results.
    fn collect(&mut self, step: usize) -> Result<()> {
        for places in 1..self.run.nranks {
            let from = self.run.before(places);
            let cut = self.cut(step, from);
            if cut.is_empty() {
                continue;
            }
            self.pipes.expect(from, cut.len())?;
            if self.sums && self.pipes.holds_whole(self.run.job.dtype.size(), &[from], &[]) {
                self.pipes.sum(&Sum {
                    dtype: self.run.job.dtype,
                    own: None,
                    from: &[from],
                    to: &[],
                    into: (self.run.received()?.span()?, cut.start),
                    len: cut.len(),
                    long: self.run.is_long(),
                    averages: false,
                })?;
                continue;
            }
            for part in steps(cut.len(), PIECE) {
                let bytes = self.scratch.bytes(part.len());
                self.pipes.read(from, bytes)?;
                self.run.deliver(cut.start + part.start, bytes)?;
            }
        }
        Ok(())
    }
}
