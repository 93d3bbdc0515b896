//! Bytes that say where they belong, so that every copy can be verified.

use towline::memory::{MemoryAccess, Storage};
use towline::{Error, Result};

/// Bytes are made and checked in portions of this size.
const PORTION: usize = 1 << 20;

/// The word that belongs at that place: each seed and each place has another one.
fn word(seed: u64, index: u64) -> u64 {
    mix(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index)
}

/// Spreads the bits of a number over all 64 (the finalizer of splitmix64).
fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// The bytes that belong from that offset on; the offset is a multiple of eight.
fn expected(seed: u64, offset: u64, into: &mut [u8]) {
    for (index, chunk) in into.chunks_mut(8).enumerate() {
        let word = word(seed, offset / 8 + index as u64).to_le_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
}

/// Fills a storage with the bytes of that seed.
pub(crate) fn fill(storage: &(impl Storage + ?Sized), seed: u64) -> Result<()> {
    fill_front(storage, seed, storage.size() as u64)
}

/// Fills the first `len` bytes of a storage with those of that seed.
pub(crate) fn fill_front(storage: &(impl Storage + ?Sized), seed: u64, len: u64) -> Result<()> {
    let whole = len as usize;
    let mut portion = vec![0; PORTION.min(whole)];
    for offset in (0..whole).step_by(PORTION) {
        let len = PORTION.min(whole - offset);
        expected(seed, offset as u64, &mut portion[..len]);
        storage.write_at(offset, &portion[..len])?;
    }
    Ok(())
}

/// The first offset at which the first `len` bytes are not those of the seed.
pub fn first_wrong(storage: &(impl Storage + ?Sized), seed: u64, len: u64) -> Result<Option<u64>> {
    wrong_between(storage, 0, seed, 0, len)
}

/// The first offset in `at..at + len` at which the bytes are not those that belong at `from` of the seed.
fn wrong_between(
    storage: &(impl Storage + ?Sized),
    at: u64,
    seed: u64,
    from: u64,
    len: u64,
) -> Result<Option<u64>> {
    let (mut found, mut right) = (vec![0; PORTION.min(len as usize)], vec![0; PORTION.min(len as usize)]);
    let mut done = 0;
    while done < len {
        let step = (PORTION as u64).min(len - done) as usize;
        storage.read_at((at + done) as usize, &mut found[..step])?;
        expected(seed, from + done, &mut right[..step]);
        if let Some(wrong) =
            found[..step].iter().zip(&right[..step]).position(|(found, right)| found != right)
        {
            return Ok(Some(at + done + wrong as u64));
        }
        done += step as u64;
    }
    Ok(None)
}

/// Blocks of one size in random order on both sides, the same in every process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shuffle {
    pub(crate) block_size: u64,
    /// The n-th block at the owner's side pairs with the n-th at the initiator's side.
    pub(crate) remote: Vec<u32>,
    pub(crate) local: Vec<u32>,
}

impl Shuffle {
    pub(crate) fn new(blocks: u64, block_size: u64) -> Result<Shuffle> {
        let blocks = u32::try_from(blocks)
            .map_err(|_| Error::invalid("shuffle", format!("{blocks} blocks are too many")))?;
        Ok(Shuffle { block_size, remote: permutation(blocks, 1), local: permutation(blocks, 2) })
    }

    /// The pieces: remote offset, local offset, length.
    pub(crate) fn pieces(&self) -> Vec<(u64, u64, u64)> {
        let size = self.block_size;
        self.remote
            .iter()
            .zip(&self.local)
            .map(|(remote, local)| (u64::from(*remote) * size, u64::from(*local) * size, size))
            .collect()
    }
}

/// The first offset at which the bytes that the pieces brought here are not the seed's. Pieces are given as source
/// offset, target offset and length; of many pieces every one is looked at, and some as a whole.
pub(crate) fn wrong_piece(
    target: &(impl Storage + ?Sized),
    seed: u64,
    pieces: impl ExactSizeIterator<Item = (u64, u64, u64)>,
) -> Result<Option<u64>> {
    let whole_every = (pieces.len() / 256).max(1);
    for (index, (from, to, len)) in pieces.enumerate() {
        let len = if index % whole_every == 0 { len } else { len.min(64) };
        if let Some(wrong) = wrong_between(target, to, seed, from, len)? {
            return Ok(Some(wrong));
        }
    }
    Ok(None)
}

fn permutation(count: u32, seed: u64) -> Vec<u32> {
    let mut all: Vec<u32> = (0..count).collect();
    for last in (1..all.len()).rev() {
        let other = word(seed, last as u64) % (last as u64 + 1);
        all.swap(last, other as usize);
    }
    all
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use towline::SystemStorage;

    use super::*;

    #[test]
    fn one_changed_byte_is_found() {
        let storage = SystemStorage::new((1 << 20) + 13).unwrap();
        fill(&storage, 7).unwrap();
        assert_eq!(first_wrong(&storage, 7, (1 << 20) + 13).unwrap(), None);
        assert!(first_wrong(&storage, 8, 100).unwrap().is_some());
        storage.write_at((1 << 20) + 5, &[1]).unwrap();
        storage.write_at((1 << 20) + 5, &[2]).unwrap();
        assert_eq!(first_wrong(&storage, 7, (1 << 20) + 13).unwrap(), Some((1 << 20) + 5));
    }

    #[test]
    fn a_shuffle_names_every_block_once_on_both_sides() {
        let shuffle = Shuffle::new(1000, 4096).unwrap();
        for side in [&shuffle.remote, &shuffle.local] {
            let mut sorted = side.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..1000).collect::<Vec<u32>>());
            assert_ne!(&sorted, side);
        }
        assert_eq!(shuffle.pieces().len(), 1000);
    }

    #[test]
    fn a_block_in_the_wrong_place_is_found() {
        let (from, to) = (SystemStorage::new(1 << 16).unwrap(), SystemStorage::new(1 << 16).unwrap());
        fill(&from, 3).unwrap();
        let pieces = Shuffle::new(16, 4096).unwrap().pieces();
        let mut block = vec![0; 4096];
        for (remote, local, len) in &pieces {
            from.read_at(*remote as usize, &mut block[..*len as usize]).unwrap();
            to.write_at(*local as usize, &block).unwrap();
        }
        assert_eq!(wrong_piece(&to, 3, pieces.iter().copied()).unwrap(), None);
        to.write_at(pieces[5].1 as usize, &block).unwrap();
        assert!(wrong_piece(&to, 3, pieces.iter().copied()).unwrap().is_some());
    }
}
