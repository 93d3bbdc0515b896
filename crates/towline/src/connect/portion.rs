//! What is moved between two descriptors: one run of bytes, or the blocks of a view in portions.

use std::ops::Range;
use std::sync::Arc;

use crate::layout::Plan;
use crate::transfer::Op;
use crate::{Error, Indices, Layout, Part, Remote, Result, Span, room};

/// The most blocks in one part. A view of single elements has as many blocks as elements, and its whole plan would take
/// several times the memory that it moves.
const BLOCKS: u64 = 1 << 16;

/// What planning and copying one block costs, in bytes that would take as long.
const BLOCK_WEIGHT: u64 = 1 << 10;

/// One part of those that together move a descriptor.
pub(super) struct Portion {
    what: What,
    pub(super) bytes: u64,
}

enum What {
    Run { remote: u64, local: u64 },
    Blocks(Arc<Sides>, Range<u64>),
}

struct Sides {
    remote: Layout,
    local: Layout,
}

/// The portions of a transfer of `size` bytes, of which one side is seen through a layout or none is.
pub(super) fn portions(
    op: Op,
    remote: Option<&Layout>,
    local: Option<&Layout>,
    size: u64,
) -> Result<Vec<Portion>> {
    let (view, at_remote) = match (op, remote, local) {
        (_, None, None) => return Ok(vec![Portion { what: What::Run { remote: 0, local: 0 }, bytes: size }]),
        (Op::Read, Some(remote), None) => (remote, true),
        (Op::Write, None, Some(local)) => (local, false),
        _ => return Err(Error::protocol("import", "the owner's memory has a layout, and would be written")),
    };
    let len = view.block_len();
    if view.packed_len().is_ok_and(|packed| packed < size) {
        let message = format!("the owner's layout has less than the {size} bytes that it offers");
        return Err(Error::protocol("import", message));
    }
    let (whole, rest) = (size / len, size % len);
    // One for each run of blocks, of which a view of single elements has as many as its bytes say.
    let mut portions = room::list(
        op.name(),
        usize::try_from(whole.div_ceil(BLOCKS)).unwrap_or(usize::MAX).saturating_add(1),
    )?;
    if whole > 0 {
        let packed = Layout::blocks(0, len, whole, len)?;
        let sides = Arc::new(match at_remote {
            true => Sides { remote: view.clone(), local: packed },
            false => Sides { remote: packed, local: view.clone() },
        });
        for first in (0..whole).step_by(BLOCKS as usize) {
            let blocks = first..whole.min(first + BLOCKS);
            let bytes = (blocks.end - blocks.start) * len;
            portions.push(Portion { what: What::Blocks(Arc::clone(&sides), blocks), bytes });
        }
    }
    if rest > 0 {
        let (there, here) = (view.offset(whole)?, whole * len);
        let (remote, local) = if at_remote { (there, here) } else { (here, there) };
        portions.push(Portion { what: What::Run { remote, local }, bytes: rest });
    }
    Ok(portions)
}

impl Portion {
    /// How much is in flight with it: its bytes, or what its blocks weigh.
    pub(super) fn weight(&self) -> u64 {
        self.bytes.max(self.blocks() * BLOCK_WEIGHT)
    }

    fn blocks(&self) -> u64 {
        match &self.what {
            What::Run { .. } => 0,
            What::Blocks(_, blocks) => blocks.end - blocks.start,
        }
    }

    /// It as a part of a transfer.
    pub(super) fn part<'a>(&self, remote: &'a Remote, local: Span) -> Part<'a> {
        let part = Part::new(remote, local);
        match &self.what {
            What::Run { remote, local } => part.at(*remote, *local, self.bytes),
            What::Blocks(sides, blocks) => {
                let whole =
                    [&sides.remote, &sides.local].iter().all(|side| *blocks == (0..side.block_count()));
                if whole {
                    return part.blocks(&sides.remote, Indices::All, &sides.local, Indices::All);
                }
                let indices: Vec<u64> = blocks.clone().collect();
                let indices = Indices::U64(&indices);
                part.planned(Plan::blocks(&sides.remote, indices, &sides.local, indices))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;
    use crate::Kind;

    fn shape(portions: &[Portion]) -> Vec<(u64, u64)> {
        portions.iter().map(|portion| (portion.blocks(), portion.bytes)).collect()
    }

    #[test]
    fn memory_without_gaps_moves_at_once() {
        assert_eq!(shape(&portions(Op::Read, None, None, 1 << 40).unwrap()), [(0, 1 << 40)]);
    }

    #[test]
    fn a_view_of_many_blocks_moves_in_portions() {
        let view = Layout::blocks(0, 4, 150_000, 8).unwrap();
        for (op, remote, local) in [(Op::Read, Some(&view), None), (Op::Write, None, Some(&view))] {
            let all = portions(op, remote, local, 600_000).unwrap();
            assert_eq!(shape(&all), [(65536, 262_144), (65536, 262_144), (18928, 75_712)]);
            assert!(all[0].weight() > all[0].bytes);
        }
    }

    #[test]
    fn a_part_of_a_view_ends_within_a_block() {
        let view = Layout::blocks(0, 100, 10, 200).unwrap();
        let some = portions(Op::Read, Some(&view), None, 250).unwrap();
        assert_eq!(shape(&some), [(2, 200), (0, 50)]);
        assert!(matches!(some[1].what, What::Run { remote: 400, local: 200 }));
        assert_eq!(shape(&portions(Op::Write, None, Some(&view), 50).unwrap()), [(0, 50)]);
    }

    #[test]
    fn layouts_that_do_not_fit_the_operation_are_refused() {
        let view = Layout::blocks(0, 100, 10, 200).unwrap();
        for (op, remote, local, size) in [
            (Op::Read, Some(&view), None, 1001),
            (Op::Write, Some(&view), None, 1000),
            (Op::Write, Some(&view), Some(&view), 1000),
            (Op::Read, None, Some(&view), 1000),
        ] {
            assert_eq!(portions(op, remote, local, size).err().unwrap().kind(), Kind::Protocol);
        }
    }
}
