//! What is prepared once and used often: lists of all blocks of a region, and requests that are posted again.

use std::sync::Arc;

use parking_lot::Mutex;
use towline_sys::nixl::{Descriptor, Direction, MemoryKind, Prepared, TransferList};

use super::engine::{Engine, Reach};
use super::of_nixl;
use super::peer::{Asked, PeerAgent};
use crate::Result;
use crate::layout::Piece;
use std::sync::atomic::Ordering;

/// Transfers of fewer pieces are described piece by piece.
const LEAST_PIECES: usize = 64;

/// A list of more blocks than this is not prepared: each takes about a hundred bytes.
const MOST_BLOCKS: u64 = 1 << 18;

/// Requests that an attachment keeps to post them again.
const KEPT: usize = 32;

/// How blocks lie on one side of a transfer: all of one length, the first at `phase`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Grid {
    pub(super) block: u64,
    pub(super) phase: u64,
}

/// The blocks that pieces are made of, by index on each side, where they lie on a grid.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Gridded {
    pub(super) remote: Grid,
    pub(super) local: Grid,
    pub(super) remote_indices: Vec<i32>,
    pub(super) local_indices: Vec<i32>,
}

/// Finds the grid that pieces lie on. `remote` and `local` are the offsets, within the regions, that theirs are relative to.
pub(super) fn gridded(pieces: &[Piece], remote: u64, local: u64) -> Option<Gridded> {
    if pieces.len() < LEAST_PIECES {
        return None;
    }
    let block = pieces.iter().map(|piece| piece.len).min()?;
    if block.is_power_of_two() {
        // Six divisions for each piece would take longer than all the rest.
        let (shift, mask) = (block.trailing_zeros(), block - 1);
        return on_grid(pieces, remote, local, block, |offset| (offset >> shift, offset & mask));
    }
    on_grid(pieces, remote, local, block, |offset| (offset / block, offset % block))
}

/// [`gridded`] for blocks of that length; `divide` says how many of them an offset is, and how much is left.
fn on_grid(
    pieces: &[Piece],
    remote: u64,
    local: u64,
    block: u64,
    divide: impl Fn(u64) -> (u64, u64),
) -> Option<Gridded> {
    let first = pieces.first()?;
    let far = Grid { block, phase: divide(first.remote + remote).1 };
    let near = Grid { block, phase: divide(first.local + local).1 };
    let (mut remote_indices, mut local_indices) = (Vec::new(), Vec::new());
    remote_indices.try_reserve_exact(pieces.len()).ok()?;
    local_indices.try_reserve_exact(pieces.len()).ok()?;
    for piece in pieces {
        let (theirs, ours) = (divide(piece.remote + remote), divide(piece.local + local));
        let (count, rest) = divide(piece.len);
        if rest != 0 || theirs.1 != far.phase || ours.1 != near.phase {
            return None;
        }
        let (theirs, ours) = (i32::try_from(theirs.0).ok()?, i32::try_from(ours.0).ok()?);
        if count == 1 {
            remote_indices.push(theirs);
            local_indices.push(ours);
            continue;
        }
        let count = i32::try_from(count).ok()?;
        // Few long pieces on a fine grid are many blocks: where there is no room to list them, they go as pieces.
        remote_indices.try_reserve(count as usize).ok()?;
        local_indices.try_reserve(count as usize).ok()?;
        remote_indices.extend(theirs..theirs.checked_add(count)?);
        local_indices.extend(ours..ours.checked_add(count)?);
    }
    Some(Gridded { remote: far, local: near, remote_indices, local_indices })
}

/// Prepared lists of the blocks of one region.
#[derive(Default)]
pub(super) struct Grids(Mutex<Vec<Entry>>);

struct Entry {
    grid: Grid,
    /// Blocks that were asked for before the list was worth making.
    wished: u64,
    prepared: Option<Arc<Counted>>,
}

/// A prepared list; one of a peer's memory is counted there.
pub(super) struct Counted {
    prepared: Option<Prepared>,
    peer: Option<Arc<PeerAgent>>,
}

impl Counted {
    pub(super) fn list(&self) -> Option<&Prepared> {
        self.prepared.as_ref()
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        drop(self.prepared.take());
        if let Some(peer) = &self.peer {
            peer.requests.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Grids {
    /// The list of all blocks of that region, of that kind, on that grid, prepared now where that has become worth it.
    pub(super) fn find(
        &self,
        engine: &Engine,
        grid: Grid,
        (kind, region): (MemoryKind, Descriptor),
        wanted: usize,
        peer: Option<&Arc<PeerAgent>>,
    ) -> Result<Option<Arc<Counted>>> {
        let blocks = region.length.saturating_sub(grid.phase) / grid.block;
        if blocks > MOST_BLOCKS {
            return Ok(None);
        }
        let mut entries = self.0.lock();
        let at = match entries.iter().position(|entry| entry.grid == grid) {
            Some(at) => at,
            None => {
                // Few layouts are used at a time; the one that was used first makes room.
                if entries.len() >= 4 {
                    entries.remove(0);
                }
                entries.push(Entry { grid, wished: 0, prepared: None });
                entries.len() - 1
            }
        };
        let entry = &mut entries[at];
        if let Some(prepared) = &entry.prepared {
            return Ok(Some(Arc::clone(prepared)));
        }
        entry.wished += wanted as u64;
        if entry.wished * 4 < blocks {
            return Ok(None);
        }
        let ranges = (0..blocks).map(|number| Descriptor {
            address: region.address + grid.phase + number * grid.block,
            length: grid.block,
            device: region.device,
        });
        let list = TransferList::new(&engine.nixl, kind, ranges).map_err(of_nixl)?;
        let options = engine.options(Reach::Memory)?;
        let prepared = match peer {
            None => engine.agent.prepare_local(&list, &options).map_err(of_nixl)?,
            Some(peer) => engine.agent.prepare_remote(&peer.name, &list, &options).map_err(of_nixl)?,
        };
        if let Some(peer) = peer {
            peer.requests.fetch_add(1, Ordering::AcqRel);
        }
        let counted = Arc::new(Counted { prepared: Some(prepared), peer: peer.cloned() });
        entry.prepared = Some(Arc::clone(&counted));
        Ok(Some(counted))
    }

    pub(super) fn clear(&self) {
        let entries = std::mem::take(&mut *self.0.lock());
        drop(entries);
    }
}

/// What a request is for: the same bytes between the same places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) direction: Direction,
    /// The number of the local registration.
    pub(super) number: u64,
    pub(super) local: u64,
    pub(super) remote: u64,
    pub(super) len: u64,
}

/// Requests that have ended and can be posted again.
#[derive(Default)]
pub(super) struct Requests(Mutex<Vec<(Key, Asked)>>);

impl Requests {
    pub(super) fn take(&self, key: &Key) -> Option<Asked> {
        let mut kept = self.0.lock();
        // Those used last are at the end.
        let at = kept.iter().rposition(|(one, _)| one == key)?;
        Some(kept.remove(at).1)
    }

    pub(super) fn keep(&self, key: Key, asked: Asked) {
        let mut kept = self.0.lock();
        let oldest = (kept.len() >= KEPT).then(|| kept.remove(0));
        kept.push((key, asked));
        drop(kept);
        drop(oldest);
    }

    /// Drops those that use local memory of that number.
    pub(super) fn forget(&self, number: u64) {
        let dropped: Vec<_> = self.0.lock().extract_if(.., |(key, _)| key.number == number).collect();
        drop(dropped);
    }

    pub(super) fn clear(&self) {
        let dropped = std::mem::take(&mut *self.0.lock());
        drop(dropped);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn pieces(count: u64, each: impl Fn(u64) -> Piece) -> Vec<Piece> {
        (0..count).map(each).collect()
    }

    #[test]
    fn blocks_on_a_grid_are_named_by_index_also_where_neighbours_were_joined() {
        let mut all = pieces(64, |n| Piece { remote: (n * 3) * 8, local: n * 16, len: 8 });
        all[5].len = 16;
        let found = gridded(&all, 4, 8).unwrap();
        assert_eq!(found.remote, Grid { block: 8, phase: 4 });
        assert_eq!(found.local, Grid { block: 8, phase: 0 });
        assert_eq!(found.remote_indices.len(), 65);
        assert_eq!(&found.remote_indices[4..8], [12, 15, 16, 18]);
        assert_eq!(&found.local_indices[4..8], [9, 11, 12, 13]);
    }

    #[test]
    fn blocks_whose_length_is_no_power_of_two_are_named_the_same_way() {
        let mut all = pieces(64, |n| Piece { remote: 7 + n * 24, local: 5 + n * 12, len: 12 });
        all[63].len = 24;
        let found = gridded(&all, 1, 1).unwrap();
        assert_eq!(found.remote, Grid { block: 12, phase: 8 });
        assert_eq!(found.local, Grid { block: 12, phase: 6 });
        assert_eq!(found.remote_indices[62..], [124, 126, 127]);
        assert_eq!(found.local_indices[62..], [62, 63, 64]);
    }

    #[test]
    fn pieces_off_the_grid_and_few_pieces_are_described_one_by_one() {
        let all = pieces(64, |n| Piece { remote: n * 24, local: n * 8, len: 8 });
        assert!(gridded(&all, 0, 0).is_some());
        assert!(gridded(&all[1..], 0, 0).is_none());
        for spoil in [
            |piece: &mut Piece| piece.remote += 1,
            |piece: &mut Piece| piece.local += 4,
            |piece: &mut Piece| piece.len += 1,
        ] {
            let mut all = all.clone();
            spoil(&mut all[63]);
            assert!(gridded(&all, 0, 0).is_none());
        }
    }
}
