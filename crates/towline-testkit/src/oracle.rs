//! The oracle for wrong bytes: every 8-byte word says from which region, generation and offset it comes.
//!
//! A word is a permutation of (mark, region, generation, offset), so that it looks random and can still be read
//! back: a destination word that is not the expected one names where it came from.
//!
//! ```
//! use towline_testkit::oracle::{Nature, Stamp};
//! let (old, new) = (Stamp::new(3, 1), Stamp::new(3, 2));
//! let mut bytes = vec![0; 64];
//! new.fill(0, &mut bytes);
//! assert!(new.verify(0, &bytes).is_ok());
//! bytes[8..16].copy_from_slice(&old.word(8).to_ne_bytes());
//! assert_eq!(new.verify(0, &bytes).unwrap_err().nature, Nature::Stale { generation: 1 });
//! ```

use std::fmt;
use std::time::Duration;

use towline::{MemoryAccess, Result, Storage};

use crate::random::{mix, unmix};
use crate::watchdog::stays;

const WORD: u64 = 8;
const MARK: u64 = 0xa7;
const CHUNK: usize = 256 << 10;
/// How far apart the words are that are looked at again and again.
const SPREAD: usize = 128 << 10;

/// What a region is filled with: its number (below 4096) and its generation (below 65536).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stamp {
    /// The region's number, which the test chooses.
    pub region: u16,
    /// The generation of its contents, which the test chooses.
    pub generation: u16,
}

/// Where a word comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// What the region was filled with.
    pub stamp: Stamp,
    /// Where the word lay.
    pub offset: u64,
}

/// What is wrong with a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nature {
    /// It is of another generation of the same region and place.
    Stale {
        /// That generation.
        generation: u16,
    },
    /// It is of the right region and generation, from another place.
    Shifted {
        /// Where it lay.
        from: u64,
    },
    /// It is of another region.
    Elsewhere(Origin),
    /// Its bytes come from the expected word and from the word of another generation.
    Torn {
        /// The other generation.
        generation: u16,
    },
    /// It is zero: nothing was copied there.
    Empty,
    /// No region was ever filled with it.
    Foreign,
}

/// The first word that is not what it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wrong {
    /// Where it is.
    pub offset: u64,
    /// What it should be.
    pub expected: Stamp,
    /// What is there.
    pub found: u64,
    /// What is wrong with it.
    pub nature: Nature,
    /// How many words of the range are wrong.
    pub words: usize,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Wrong { offset, expected: Stamp { region, generation }, found, nature, words } = self;
        write!(
            f,
            "{words} wrong words, the first at offset {offset}: {found:#018x} is not that of region {region}, \
             generation {generation}, but {nature:?}"
        )
    }
}

impl std::error::Error for Wrong {}

impl Stamp {
    /// A stamp; numbers beyond the range wrap around.
    pub fn new(region: u16, generation: u16) -> Stamp {
        Stamp { region: region % 4096, generation }
    }

    /// The stamp of one of the parts, fewer than 64, of what has this one in all; its region is below 64.
    pub fn of_part(self, part: usize) -> Stamp {
        Stamp::new(self.region * 64 + part as u16, self.generation)
    }

    /// The word at that offset, which is taken down to a multiple of 8.
    pub fn word(self, offset: u64) -> u64 {
        let index = (offset / WORD) & 0x0fff_ffff;
        mix(MARK << 56 | u64::from(self.region) << 44 | u64::from(self.generation) << 28 | index)
    }

    /// Fills bytes that lie at that offset of the region; it need not be a multiple of 8.
    pub fn fill(self, offset: u64, into: &mut [u8]) {
        let mut at = offset;
        let mut rest = into;
        while !rest.is_empty() {
            let skip = (at % WORD) as usize;
            let word = self.word(at).to_ne_bytes();
            let take = rest.len().min(word.len() - skip);
            let (head, tail) = rest.split_at_mut(take);
            head.copy_from_slice(&word[skip..skip + take]);
            rest = tail;
            at += take as u64;
        }
    }

    /// Fills a whole storage.
    pub fn fill_storage(self, storage: &(impl Storage + ?Sized)) -> Result<()> {
        let mut chunk = vec![0; CHUNK.min(storage.size())];
        for offset in (0..storage.size()).step_by(CHUNK) {
            let part = &mut chunk[..CHUNK.min(storage.size() - offset)];
            self.fill(offset as u64, part);
            storage.write_at(offset, part)?;
        }
        Ok(())
    }

    /// Says whether the bytes are those of this stamp at that offset, and otherwise what they are.
    pub fn verify(self, offset: u64, bytes: &[u8]) -> std::result::Result<(), Wrong> {
        let mut expected = [0; 4096];
        let mut wrong: Option<Wrong> = None;
        for (index, part) in bytes.chunks(expected.len()).enumerate() {
            let start = offset + (index * expected.len()) as u64;
            self.fill(start, &mut expected[..part.len()]);
            // One comparison for the usual case: the words are looked at only where something is wrong.
            if part != &expected[..part.len()] {
                self.examine(start, part, &mut wrong);
            }
        }
        wrong.map_or(Ok(()), Err)
    }

    /// [`verify`](Self::verify) of part of a storage.
    pub fn verify_storage(
        self,
        storage: &(impl Storage + ?Sized),
        offset: usize,
        len: usize,
    ) -> std::result::Result<(), Wrong> {
        let mut chunk = vec![0; CHUNK.min(len)];
        for start in (0..len).step_by(CHUNK) {
            let part = &mut chunk[..CHUNK.min(len - start)];
            if storage.read_at(offset + start, part).is_err() {
                panic!("{len} bytes at {offset} are not inside a storage of {} bytes", storage.size());
            }
            self.verify((offset + start) as u64, part)?;
        }
        Ok(())
    }

    /// For memory that nobody may write to any more: a few words of its first `len` bytes are looked at again and again for that
    /// long, and all of them at the end. The first wrong one ends it.
    pub fn stays_in(
        self,
        storage: &(impl Storage + ?Sized),
        len: usize,
        time: Duration,
    ) -> std::result::Result<(), Wrong> {
        let word = WORD as usize;
        let look = || {
            (0..len).step_by(SPREAD).try_for_each(|at| self.verify_storage(storage, at, word.min(len - at)))
        };
        let mut looked = Ok(());
        stays(time, || {
            looked = look();
            looked.is_ok()
        });
        looked.and_then(|()| self.verify_storage(storage, 0, len))
    }

    fn examine(self, start: u64, bytes: &[u8], wrong: &mut Option<Wrong>) {
        let mut at = 0;
        while at < bytes.len() {
            let offset = start + at as u64;
            let skip = (offset % WORD) as usize;
            let take = (bytes.len() - at).min(8 - skip);
            let mut found = self.word(offset).to_ne_bytes();
            let part = &bytes[at..at + take];
            if part != &found[skip..skip + take] {
                found[skip..skip + take].copy_from_slice(part);
                let empty = part.iter().all(|byte| *byte == 0);
                let found = u64::from_ne_bytes(found);
                let nature = if empty { Nature::Empty } else { self.nature(offset, found) };
                match wrong {
                    Some(first) => first.words += 1,
                    None => *wrong = Some(Wrong { offset, expected: self, found, nature, words: 1 }),
                }
            }
            at += take;
        }
    }

    fn nature(self, offset: u64, found: u64) -> Nature {
        if let Some(origin) = origin(found) {
            let place = offset & !(WORD - 1);
            let same_region = origin.stamp.region == self.region;
            return match origin.stamp.generation {
                generation if same_region && origin.offset == place => Nature::Stale { generation },
                generation if same_region && generation == self.generation => {
                    Nature::Shifted { from: origin.offset }
                }
                _ => Nature::Elsewhere(origin),
            };
        }
        let torn = (0..=u16::MAX).find(|generation| {
            let other = Stamp { generation: *generation, ..self }.word(offset).to_ne_bytes();
            let own = self.word(offset).to_ne_bytes();
            let mixed = found.to_ne_bytes().into_iter().zip(own.into_iter().zip(other));
            *generation != self.generation && mixed.into_iter().all(|(byte, (a, b))| byte == a || byte == b)
        });
        torn.map_or(Nature::Foreign, |generation| Nature::Torn { generation })
    }
}

/// Where a word comes from, if any region was ever filled with it.
pub fn origin(word: u64) -> Option<Origin> {
    let plain = unmix(word);
    (plain >> 56 == MARK).then(|| Origin {
        stamp: Stamp { region: (plain >> 44) as u16 & 0xfff, generation: (plain >> 28) as u16 },
        offset: (plain & 0x0fff_ffff) * WORD,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(stamp: Stamp, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        stamp.fill(0, &mut bytes);
        bytes
    }

    #[test]
    fn memory_that_is_written_to_after_all_is_found_at_the_next_look_and_at_the_end() {
        let stamp = Stamp::new(7, 9);
        let len = 3 * SPREAD + 24;
        let storage = towline::SystemStorage::new(len).unwrap();
        stamp.fill_storage(&storage).unwrap();
        stamp.stays_in(&storage, len, Duration::from_millis(2)).unwrap();
        // Where it is looked again and again, it need not wait.
        storage.write_at(2 * SPREAD, &[0; 8]).unwrap();
        let begun = std::time::Instant::now();
        assert_eq!(
            stamp.stays_in(&storage, len, Duration::from_secs(3600)).unwrap_err().offset,
            2 * SPREAD as u64
        );
        assert!(begun.elapsed() < Duration::from_secs(60));
        stamp.fill_storage(&storage).unwrap();
        storage.write_at(len - 8, &[0; 8]).unwrap();
        let late = stamp.stays_in(&storage, len, Duration::from_millis(2)).unwrap_err();
        assert_eq!(late.offset, len as u64 - 8);
    }

    #[test]
    fn right_bytes_are_right_at_any_alignment() {
        let stamp = Stamp::new(7, 9);
        let bytes = filled(stamp, 20_000);
        for (start, len) in [(0, 20_000), (3, 5000), (8, 8), (13, 1), (4095, 9000)] {
            stamp.verify(start as u64, &bytes[start..start + len]).unwrap();
        }
    }

    #[test]
    fn stale_shifted_torn_empty_and_foreign_words_are_named() {
        let stamp = Stamp::new(7, 9);
        let other = Stamp::new(7, 8);
        let nature = |at: usize, word: [u8; 8]| {
            let mut bytes = filled(stamp, 8192);
            bytes[at..at + 8].copy_from_slice(&word);
            let wrong = stamp.verify(0, &bytes).unwrap_err();
            assert_eq!((wrong.offset, wrong.words), (at as u64, 1));
            wrong.nature
        };
        assert_eq!(nature(4096, other.word(4096).to_ne_bytes()), Nature::Stale { generation: 8 });
        assert_eq!(nature(16, stamp.word(800).to_ne_bytes()), Nature::Shifted { from: 800 });
        let elsewhere = Stamp::new(1, 1);
        assert_eq!(
            nature(16, elsewhere.word(16).to_ne_bytes()),
            Nature::Elsewhere(Origin { stamp: elsewhere, offset: 16 })
        );
        let mut torn = stamp.word(24).to_ne_bytes();
        torn[4..].copy_from_slice(&other.word(24).to_ne_bytes()[4..]);
        assert_eq!(nature(24, torn), Nature::Torn { generation: 8 });
        assert_eq!(nature(24, [0; 8]), Nature::Empty);
        assert_eq!(nature(24, *b"whatever"), Nature::Foreign);
    }
}
