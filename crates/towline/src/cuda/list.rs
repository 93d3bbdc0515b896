//! The list of runs as the copy kernel reads it: as short as the runs allow. Pure.
#![allow(unsafe_code, reason = "calls a function that needs a processor's feature, after asking for it")]

use super::copy::Run;

/// The bytes of an entry for runs of one length.
pub(super) const PAIR: usize = 8;
/// The bytes of an entry for runs of any length.
pub(super) const TRIPLE: usize = 24;

/// Units are cut down to this length: one pass of a warp.
const SHORTEST_UNIT: u64 = 4096;
/// Longer units where there would be more of them than this.
const MOST_UNITS: u64 = 1 << 20;

/// What a launch needs besides the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Shape {
    pub(super) units: u32,
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) len: u64,
    pub(super) parts_log2: u32,
    pub(super) part: u64,
    pub(super) scale_log2: u32,
    pub(super) form: Form,
    /// How far apart blocks lie, for indices.
    pub(super) steps: [u64; 2],
}

/// In which form a list is, by the kernel's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Form {
    #[default]
    Pairs = 0,
    Triples = 1,
    Indices = 2,
}

/// Into how many parts runs of that length are cut, as a power of two, and how long these are.
///
/// Parts of one run are equal but for the last, so that a unit's start is a product. Sixteen keeps them aligned.
pub(super) fn parts(len: u64, unit: u64) -> (u32, u64) {
    let parts_log2 = len.div_ceil(unit).next_power_of_two().ilog2();
    (parts_log2, len.div_ceil(1 << parts_log2).next_multiple_of(16))
}

/// The largest of some indices; 0 where there are none. Runs at the speed of memory: it stands before every copy of blocks.
pub(super) fn largest(indices: &[u32]) -> u32 {
    #[inline(always)]
    fn plainly(indices: &[u32]) -> u32 {
        indices.iter().fold(0, |largest, index| largest.max(*index))
    }
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn widely(indices: &[u32]) -> u32 {
            plainly(indices)
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor was asked.
            return unsafe { widely(indices) };
        }
    }
    plainly(indices)
}

/// How long a unit of work may be, a power of two, where `bytes` are moved in all.
pub(super) fn longest_unit(bytes: u64) -> u64 {
    (bytes / MOST_UNITS).next_power_of_two().max(SHORTEST_UNIT)
}

/// Writes pairs for runs that all have the length of the first, as far as there is room.
///
/// `None` where they do not, lie too far apart, or not at multiples of 16 bytes of each other while their offsets do not
/// fit into 32 bits otherwise; what was written is then of no use.
pub(super) fn uniform(
    runs: impl Iterator<Item = Run> + Clone,
    into: &mut [u64],
    unit: u64,
) -> Option<(usize, Shape)> {
    let first = runs.clone().next()?;
    let written = pairs::<4>(runs.clone(), first, into)
        .map(|count| (count, 4))
        .or_else(|| pairs::<0>(runs, first, into).map(|count| (count, 0)));
    let (count, scale_log2) = written?;
    let (parts_log2, part) = parts(first.len, unit);
    let units = u32::try_from((count as u64) << parts_log2).ok()?;
    let [from, to] = [first.from, first.to].map(|start| base(start, scale_log2));
    Some((count, Shape { units, from, to, len: first.len, parts_log2, part, scale_log2, ..Shape::default() }))
}

/// Where offsets are counted from, so that runs before and after the first have unsigned ones.
fn base(first: u64, scale_log2: u32) -> u64 {
    first.wrapping_sub(1 << (31 + scale_log2))
}

/// Writes the offsets; `None` where a run does not fit. This loop is what the host has to do for each run: nothing is decided
/// before the end, and turning by the scale puts what is not aligned where what is too far would be.
fn pairs<const SCALE: u32>(runs: impl Iterator<Item = Run>, first: Run, into: &mut [u64]) -> Option<usize> {
    let [from, to] = [first.from, first.to].map(|start| base(start, SCALE));
    let (mut wide, mut unequal, mut count) = (0, 0, 0);
    for (entry, run) in into.iter_mut().zip(runs) {
        let near = run.from.wrapping_sub(from).rotate_right(SCALE);
        let far = run.to.wrapping_sub(to).rotate_right(SCALE);
        wide |= near | far;
        unequal |= run.len ^ first.len;
        *entry = near | far << 32;
        count += 1;
    }
    (wide >> 32 == 0 && unequal == 0).then_some(count)
}

/// Writes triples, cut into units; takes runs until there is no room.
///
/// `open` is the rest of a run that did not fit the last time, and is left for the next.
pub(super) fn listed(
    runs: &mut impl Iterator<Item = Run>,
    open: &mut Option<Run>,
    into: &mut [[u64; 3]],
    unit: u64,
) -> Shape {
    let mut units = 0;
    'entries: for entry in into.iter_mut() {
        let run = match open.take() {
            Some(run) => run,
            None => loop {
                match runs.next() {
                    Some(run) if run.len > 0 => break run,
                    Some(_) => {}
                    None => break 'entries,
                }
            },
        };
        let len = run.len.min(unit);
        *entry = [run.from, run.to, len];
        units += 1;
        if run.len > len {
            *open = Some(Run { from: run.from + len, to: run.to + len, len: run.len - len });
        }
    }
    Shape { units, form: Form::Triples, ..Shape::default() }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use proptest::prelude::*;

    use super::*;

    /// The runs that a kernel would copy, by the definition in `copy.ptx`.
    fn units(shape: &Shape, pairs: &[u64], triples: &[[u64; 3]]) -> Vec<Run> {
        (0..shape.units)
            .map(|unit| {
                if shape.form == Form::Triples {
                    let [from, to, len] = triples[unit as usize];
                    return Run { from, to, len };
                }
                let piece = unit >> shape.parts_log2;
                let start = u64::from(unit - (piece << shape.parts_log2)) * shape.part;
                let pair = pairs[piece as usize];
                let at = |base: u64, offset: u32| {
                    base.wrapping_add(u64::from(offset) << shape.scale_log2).wrapping_add(start)
                };
                let (from, to) = (pair as u32, (pair >> 32) as u32);
                let len = if start >= shape.len { 0 } else { (shape.len - start).min(shape.part) };
                Run { from: at(shape.from, from), to: at(shape.to, to), len }
            })
            .filter(|run| run.len > 0)
            .collect()
    }

    /// Joins what was cut.
    fn joined(runs: impl IntoIterator<Item = Run>) -> Vec<Run> {
        let mut all: Vec<Run> = Vec::new();
        for run in runs.into_iter().filter(|run| run.len > 0) {
            match all.last_mut() {
                Some(last) if last.from + last.len == run.from && last.to + last.len == run.to => {
                    last.len += run.len;
                }
                _ => all.push(run),
            }
        }
        all
    }

    #[test]
    fn blocks_of_one_length_become_pairs() {
        let runs = [3u64, 0, 7].map(|block| Run { from: 1 << 40 | block << 15, to: block << 20, len: 32768 });
        let mut pairs = [0; 8];
        let (count, shape) = uniform(runs.iter().copied(), &mut pairs, 4096).unwrap();
        assert_eq!((count, shape.units, shape.parts_log2, shape.part, shape.scale_log2), (3, 24, 3, 4096, 4));
        assert_eq!(joined(units(&shape, &pairs, &[])), joined(runs));
    }

    #[test]
    fn what_no_pair_can_say_is_refused() {
        let mut pairs = [0; 8];
        let odd = [Run { from: 0, to: 0, len: 8 }, Run { from: 1 << 33 | 1, to: 0, len: 8 }];
        let unequal = [Run { from: 0, to: 0, len: 8 }, Run { from: 16, to: 16, len: 9 }];
        let far = [Run { from: 0, to: 0, len: 16 }, Run { from: 1 << 40, to: 16, len: 16 }];
        for runs in [odd, unequal, far] {
            assert_eq!(uniform(runs.into_iter(), &mut pairs, 4096), None);
        }
        let near = [Run { from: 5, to: 0, len: 8 }, Run { from: 4, to: 9, len: 8 }];
        assert_eq!(uniform(near.into_iter(), &mut pairs, 4096).unwrap().1.scale_log2, 0);
    }

    #[test]
    fn the_largest_index_is_found_wherever_it_is() {
        assert_eq!(largest(&[]), 0);
        for len in [1, 7, 8, 33, 1000] {
            let mut list = vec![5u32; len];
            list[len - 1] = u32::MAX;
            assert_eq!(largest(&list), u32::MAX);
            list[len - 1] = 4;
            list[len / 2] = 6;
            assert_eq!(largest(&list), 6);
        }
    }

    #[test]
    fn units_get_longer_only_where_there_would_be_too_many() {
        assert_eq!(longest_unit(0), 4096);
        assert_eq!(longest_unit(1 << 32), 4096);
        assert_eq!(longest_unit(1 << 40), 1 << 20);
    }

    proptest! {
        #[test]
        fn every_list_says_the_runs_that_it_was_made_from(
            runs in prop::collection::vec((0..1u64 << 36, 0..1u64 << 36, 0..20_000u64), 1..40),
            same in prop::option::of(1..40_000u64),
            aligned in any::<bool>(),
            room in 1..60usize,
        ) {
            let mask = if aligned { !15 } else { !0 };
            let runs: Vec<Run> = runs
                .into_iter()
                .map(|(from, to, len)| Run { from: from & mask, to: to & mask, len: same.unwrap_or(len) })
                .collect();
            let mut pairs = vec![0; room];
            let mut said = Vec::new();
            if let Some((count, shape)) = uniform(runs.iter().copied(), &mut pairs, 4096) {
                prop_assert_eq!(count, room.min(runs.len()));
                prop_assert_eq!(joined(units(&shape, &pairs, &[])), joined(runs[..count].to_vec()));
            }
            let (mut rest, mut open) = (runs.iter().copied(), None);
            loop {
                let mut triples = vec![[0; 3]; room];
                let shape = listed(&mut rest, &mut open, &mut triples, 4096);
                if shape.units == 0 {
                    break;
                }
                said.extend(units(&shape, &[], &triples));
            }
            prop_assert!(said.iter().all(|run| run.len <= 4096));
            prop_assert_eq!(joined(said), joined(runs));
        }
    }
}
