//! Which bytes go where: pieces, joined where both sides continue.

use std::ops::Range;

use super::listed::paired;
use super::walk::Walker;
use super::{Indices, Layout, OP, order};
use crate::{Error, Kind, Result, room};

/// One run of bytes, contiguous on both sides.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Piece {
    /// The offset within the remote range.
    pub remote: u64,
    /// The offset within the local region.
    pub local: u64,
    /// The bytes; never zero in a plan.
    pub len: u64,
}

/// What a transfer moves: pieces, in the order asked for unless they were sorted, and which blocks each of them carries.
///
/// Blocks are numbered in the order of the index arrays (or of the list of spans). A block that continues the
/// one before it on the remote *and* the local side joins its piece, so whole rows of a cache that lie
/// together move as one. No indices at all make an empty plan, which is a transfer that has nothing to do.
///
/// Offsets are checked against the layouts, not against the regions: see [`Plan::check_bounds`].
///
/// ```
/// # use towline_proto as towline;
/// use towline::layout::{Indices, Layout, Piece, Plan};
///
/// let layout = Layout::contiguous(80, 10)?;
/// let plan = Plan::blocks(&layout, (&[4u32, 5, 0]).into(), &layout, (&[1u64, 2, 3]).into())?;
///
/// assert_eq!(plan.pieces(), [
///     Piece { remote: 40, local: 10, len: 20 },
///     Piece { remote: 0, local: 30, len: 10 },
/// ]);
/// assert_eq!(plan.blocks_of(0), 0..2);
/// assert_eq!(plan.blocks_of(1), 2..3);
///
/// // A transport with a limit cuts; the blocks are still known.
/// let cut = plan.cut(8)?;
/// assert_eq!(cut.piece_count(), 5);
/// assert_eq!(cut.blocks_of(1), 0..2);
/// # Ok::<(), towline::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    pieces: Vec<Piece>,
    /// For every [`MARK_EVERY`]th piece, the bytes in the pieces before it.
    marks: Vec<u64>,
    /// For every piece, the bytes that were asked for before it, where that is another order than the pieces'.
    asked_before: Vec<u64>,
    bytes: u64,
    numbering: Numbering,
    remote_end: u64,
    local_end: u64,
}

/// Pieces per mark. One number per piece would be a third more memory to touch, which is what planning many
/// small blocks costs; with eight, finding a piece's start is a sum of at most seven lengths.
const MARK_EVERY: usize = 8;

/// How a position in the plan's bytes becomes a block number.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Numbering {
    Equal {
        block_len: u64,
    },
    /// The position at which each span starts.
    Listed(Vec<u64>),
}

impl Plan {
    /// Pairs blocks of two layouts: the first remote index with the first local one, and so on.
    ///
    /// Repeats are allowed on either side. Where a destination block repeats, which bytes stay is not defined.
    ///
    /// # Errors
    /// `Invalid` when the block lengths differ, the numbers of indices differ, or an index is past its layout;
    /// `Exhausted` when the list of pieces does not fit in memory.
    pub fn blocks(
        remote: &Layout,
        remote_indices: Indices<'_>,
        local: &Layout,
        local_indices: Indices<'_>,
    ) -> Result<Plan> {
        let (bytes, ours) = paired(remote, remote_indices, local, local_indices)?;
        let walkers = (Walker::new(remote), Walker::new(local));
        let mut plan = Plan::empty(Numbering::Equal { block_len: local.block_len() });
        if let (Indices::All, Indices::All) = (remote_indices, local_indices) {
            plan.add_all(&walkers.0, &walkers.1, ours, local.block_len())?;
        } else {
            plan.reserve(ours)?;
            let sides = Sides { remote, local, walkers };
            match remote_indices {
                Indices::U32(list) => {
                    plan.add_listed(&sides, list.iter().map(|&i| u64::from(i)), local_indices)?
                }
                Indices::U64(list) => plan.add_listed(&sides, list.iter().copied(), local_indices)?,
                Indices::All => plan.add_listed(&sides, 0..ours, local_indices)?,
            }
        }
        debug_assert_eq!(plan.bytes, bytes);
        Ok(plan)
    }

    /// Moves one run of bytes; it counts as one block.
    ///
    /// # Errors
    /// `Invalid` when the length is zero or an end does not fit in 64 bits.
    pub fn span(remote: u64, local: u64, len: u64) -> Result<Plan> {
        Plan::spans(&[(remote, local, len)])
    }

    /// Stands for blocks of one length that are moved by other means: one piece of all their bytes.
    #[doc(hidden)]
    #[inline]
    pub fn of_blocks(bytes: u64, block_len: u64) -> Result<Plan> {
        let mut plan = Plan::span(0, 0, bytes)?;
        plan.numbering = Numbering::Equal { block_len };
        Ok(plan)
    }

    /// Moves runs of bytes given as `(remote offset, local offset, length)`; each counts as one block.
    ///
    /// # Errors
    /// `Invalid` when a length is zero, or when an end or the sum does not fit in 64 bits.
    pub fn spans(spans: &[(u64, u64, u64)]) -> Result<Plan> {
        let mut plan = Plan::empty(Numbering::Listed(Vec::new()));
        plan.reserve(spans.len() as u64)?;
        let mut starts = room::list(OP, spans.len())?;
        for (number, &(remote, local, len)) in spans.iter().enumerate() {
            if len == 0 {
                return Err(Error::invalid(OP, format!("span {number} has no bytes")));
            }
            let ends = [remote, local, plan.bytes].map(|start| start.checked_add(len));
            if ends.contains(&None) {
                return Err(Error::invalid(OP, format!("the end of span {number} does not fit in 64 bits")));
            }
            starts.push(plan.bytes);
            plan.add(remote, local, len);
        }
        plan.numbering = Numbering::Listed(starts);
        Ok(plan)
    }

    /// The pieces in order.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// The bytes of all pieces together.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The number of pieces.
    pub fn piece_count(&self) -> usize {
        self.pieces.len()
    }

    /// The number of blocks that were asked for.
    pub fn block_count(&self) -> u64 {
        match &self.numbering {
            Numbering::Equal { block_len } => self.bytes / block_len,
            Numbering::Listed(starts) => starts.len() as u64,
        }
    }

    /// Whether there is nothing to move.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// The blocks of which a piece carries at least one byte; empty when there is no such piece.
    pub fn blocks_of(&self, piece: usize) -> Range<u64> {
        let (Some(mark), Some(last)) = (self.marks.get(piece / MARK_EVERY), self.pieces.get(piece)) else {
            return 0..0;
        };
        let before = &self.pieces[piece / MARK_EVERY * MARK_EVERY..piece];
        let in_order = || mark + before.iter().map(|piece| piece.len).sum::<u64>();
        let start = self.asked_before.get(piece).copied().unwrap_or_else(in_order);
        self.block_at(start)..self.block_at(start + last.len - 1) + 1
    }

    /// Checks that every piece lies inside both regions, and names the first block that does not.
    ///
    /// # Errors
    /// `Invalid` when a block reaches past an end.
    pub fn check_bounds(&self, remote_len: u64, local_len: u64) -> Result<()> {
        if self.remote_end <= remote_len && self.local_end <= local_len {
            return Ok(());
        }
        // The first byte out of bounds, and not merely the first such piece: a piece may have begun inside.
        let mut start = 0;
        let out = self.pieces.iter().find_map(|piece| {
            let remote_room = remote_len.saturating_sub(piece.remote);
            let local_room = local_len.saturating_sub(piece.local);
            let (room, side, len) = if remote_room <= local_room {
                (remote_room, "remote", remote_len)
            } else {
                (local_room, "local", local_len)
            };
            start += piece.len;
            (room < piece.len).then(|| (self.block_at(start - piece.len + room), side, len))
        });
        match out {
            Some((block, side, len)) => {
                Err(Error::invalid(OP, format!("block {block} reaches past the {side} end at {len} bytes")))
            }
            None => Err(Error::new(Kind::Internal, OP, "a plan's ends are not those of its pieces")),
        }
    }

    /// Cuts pieces that are longer than `max_len`; zero means that there is no limit.
    ///
    /// Cuts fall at multiples of `max_len` from the start of each piece. Blocks keep their numbers.
    ///
    /// # Errors
    /// `Exhausted` when the list of pieces does not fit in memory.
    pub fn cut(self, max_len: u64) -> Result<Plan> {
        if max_len == 0 || self.pieces.iter().all(|piece| piece.len <= max_len) {
            return Ok(self);
        }
        let mut cut = Plan { bytes: 0, ..Plan::empty(Numbering::Listed(Vec::new())) };
        // No more than there are bytes.
        let count: u64 = self.pieces.iter().map(|piece| piece.len.div_ceil(max_len)).sum();
        cut.reserve(count)?;
        if !self.asked_before.is_empty() {
            cut.asked_before = room::list(OP, cut.pieces.capacity())?;
        }
        for (number, piece) in self.pieces.iter().enumerate() {
            let mut done = 0;
            while done < piece.len {
                let len = max_len.min(piece.len - done);
                if let Some(before) = self.asked_before.get(number) {
                    cut.asked_before.push(before + done);
                }
                cut.push(Piece { remote: piece.remote + done, local: piece.local + done, len });
                done += len;
            }
        }
        Ok(Plan { pieces: cut.pieces, marks: cut.marks, asked_before: cut.asked_before, ..self })
    }

    /// Puts the pieces into the order of a key, such as the offset on one side. Blocks keep their numbers.
    ///
    /// Blocks that lie side by side there, in whatever order they were asked for, then follow each other, and code that
    /// moves them there can do so in one go.
    ///
    /// ```
    /// # use towline_proto as towline;
    /// use towline::layout::Plan;
    /// let plan = Plan::spans(&[(8, 0, 4), (0, 8, 4)])?.sorted_by_key(|piece| piece.remote);
    /// assert_eq!(plan.pieces()[0].remote, 0);
    /// assert_eq!(plan.blocks_of(0), 1..2);
    /// # Ok::<(), towline::Error>(())
    /// ```
    #[must_use]
    pub fn sorted_by_key(self, key: impl Fn(&Piece) -> u64) -> Plan {
        if self.pieces.is_sorted_by_key(&key) {
            return self;
        }
        // A list that no transfer comes near stays as it is, and one for whose order there is no memory.
        let Ok(count) = u32::try_from(self.pieces.len()) else { return self };
        let Ok(order) = order::by_key(count, |one| key(&self.pieces[one as usize])) else { return self };
        let in_order = self.asked_before.is_empty();
        let starts = room::list(OP, if in_order { self.pieces.len() } else { 0 });
        let Ok(starts) = starts else { return self };
        let Plan { mut pieces, mut asked_before, mut marks, .. } = self;
        if in_order {
            let mut before = 0;
            let start_of = |piece: &Piece| {
                before += piece.len;
                before - piece.len
            };
            asked_before = starts;
            asked_before.extend(pieces.iter().map(start_of));
        }
        order::arrange(order, |one, other| {
            pieces.swap(one, other);
            asked_before.swap(one, other);
        });
        let mut bytes = 0;
        for (mark, some) in marks.iter_mut().zip(pieces.chunks(MARK_EVERY)) {
            *mark = bytes;
            bytes += some.iter().map(|piece| piece.len).sum::<u64>();
        }
        Plan { pieces, marks, asked_before, ..self }
    }

    /// Splits the list of pieces into runs of at least `target_bytes` (the last may have fewer).
    ///
    /// Every piece is in exactly one run and no run is empty. Pieces are not cut: [`Plan::cut`] first where
    /// single pieces can be far larger than the target.
    ///
    /// ```
    /// # use towline_proto as towline;
    /// use towline::layout::Plan;
    /// let plan = Plan::spans(&[(0, 0, 60), (100, 100, 60), (200, 200, 60)])?;
    /// assert_eq!(plan.chunks(100).collect::<Vec<_>>(), [0..2, 2..3]);
    /// # Ok::<(), towline::Error>(())
    /// ```
    pub fn chunks(&self, target_bytes: u64) -> impl Iterator<Item = Range<usize>> + '_ {
        let mut next = 0;
        std::iter::from_fn(move || {
            let first = next;
            let mut bytes = self.pieces.get(first)?.len;
            next += 1;
            while bytes < target_bytes
                && let Some(piece) = self.pieces.get(next)
            {
                bytes += piece.len;
                next += 1;
            }
            Some(first..next)
        })
    }

    /// A plan of nothing.
    #[doc(hidden)]
    pub const fn nothing() -> Plan {
        Plan::empty(Numbering::Listed(Vec::new()))
    }

    const fn empty(numbering: Numbering) -> Plan {
        Plan {
            pieces: Vec::new(),
            marks: Vec::new(),
            asked_before: Vec::new(),
            bytes: 0,
            numbering,
            remote_end: 0,
            local_end: 0,
        }
    }

    /// Makes room for that many pieces; a layout may name more blocks than there is memory to list.
    fn reserve(&mut self, pieces: u64) -> Result<()> {
        let room = usize::try_from(pieces).unwrap_or(usize::MAX);
        self.pieces
            .try_reserve_exact(room)
            .and_then(|()| self.marks.try_reserve_exact(room / MARK_EVERY + 1))
            .map_err(|cause| {
                Error::new(Kind::Exhausted, OP, format!("no memory to list {pieces} pieces")).caused_by(cause)
            })
    }

    /// Every block of one layout with every block of the other, a run at a time.
    fn add_all(&mut self, remote: &Walker, local: &Walker, count: u64, block_len: u64) -> Result<()> {
        // A piece ends where a run does on either side, and the last one with all.
        let ends = (count / remote.run()).saturating_add(count / local.run());
        let most = ends.saturating_add(1).min(count);
        self.reserve(most)?;
        let (mut remote_left, mut local_left) = (remote.run(), local.run());
        let mut block = 0;
        while block < count {
            let take = remote_left.min(local_left).min(count - block);
            self.add(remote.at(block), local.at(block), take * block_len);
            block += take;
            remote_left -= take;
            local_left -= take;
            if remote_left == 0 {
                remote_left = remote.run();
            }
            if local_left == 0 {
                local_left = local.run();
            }
        }
        debug_assert!(self.pieces.len() as u64 <= most, "the list has grown, for which there may be no room");
        Ok(())
    }

    fn add_listed(
        &mut self,
        sides: &Sides<'_>,
        remote: impl Iterator<Item = u64>,
        local: Indices<'_>,
    ) -> Result<()> {
        match local {
            Indices::U32(list) => self.add_pairs(sides, remote.zip(list.iter().map(|&i| u64::from(i)))),
            Indices::U64(list) => self.add_pairs(sides, remote.zip(list.iter().copied())),
            Indices::All => self.add_pairs(sides, remote.zip(0..sides.local.block_count())),
        }
    }

    fn add_pairs(&mut self, sides: &Sides<'_>, pairs: impl Iterator<Item = (u64, u64)>) -> Result<()> {
        let (remote_count, local_count) = (sides.remote.block_count(), sides.local.block_count());
        let block_len = sides.local.block_len();
        for (number, (remote, local)) in pairs.enumerate() {
            if remote >= remote_count || local >= local_count {
                return Err(sides.bad_index(number, remote, local));
            }
            self.add(sides.walkers.0.at(remote), sides.walkers.1.at(local), block_len);
        }
        Ok(())
    }

    /// Appends bytes, to the last piece where they continue it on both sides. No end may overflow.
    #[inline]
    fn add(&mut self, remote: u64, local: u64, len: u64) {
        self.remote_end = self.remote_end.max(remote + len);
        self.local_end = self.local_end.max(local + len);
        match self.pieces.last_mut() {
            Some(last) if last.remote + last.len == remote && last.local + last.len == local => {
                last.len += len;
                self.bytes += len;
            }
            _ => self.push(Piece { remote, local, len }),
        }
    }

    #[inline]
    fn push(&mut self, piece: Piece) {
        if self.pieces.len().is_multiple_of(MARK_EVERY) {
            self.marks.push(self.bytes);
        }
        self.bytes += piece.len;
        self.pieces.push(piece);
    }

    fn block_at(&self, position: u64) -> u64 {
        match &self.numbering {
            Numbering::Equal { block_len } => position / block_len,
            // The first start is zero, so at least one is not past any position.
            Numbering::Listed(starts) => starts.partition_point(|&start| start <= position) as u64 - 1,
        }
    }
}

struct Sides<'a> {
    remote: &'a Layout,
    local: &'a Layout,
    walkers: (Walker, Walker),
}

impl Sides<'_> {
    #[cold]
    fn bad_index(&self, number: usize, remote: u64, local: u64) -> Error {
        let (side, index, count) = if remote >= self.remote.block_count() {
            ("remote", remote, self.remote.block_count())
        } else {
            ("local", local, self.local.block_count())
        };
        // No layout has so many blocks: it was a negative number, taken as it was.
        if let negative @ ..0 = index.cast_signed() {
            return Error::invalid(OP, format!("{side} index {negative} (at {number}) is negative"));
        }
        Error::invalid(OP, format!("{side} index {index} (at {number}) is past the layout's {count} blocks"))
    }
}
