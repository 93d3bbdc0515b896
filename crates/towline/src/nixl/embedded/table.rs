//! Registered ranges, found by what lies in them.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::nixl::list::{Key, Range};
use crate::{Error, Result, room};

pub(super) trait Ranged {
    fn range(&self) -> &Range;
}

/// Ranges by kind, device and address. They may overlap, and the same one may be there twice.
pub(super) struct Table<E> {
    by_key: BTreeMap<Key, Vec<E>>,
}

impl<E> Default for Table<E> {
    fn default() -> Table<E> {
        Table { by_key: BTreeMap::new() }
    }
}

/// Ranges of a list, each within a region.
pub(in crate::nixl) struct Side<T> {
    pub(super) regions: Vec<T>,
    pub(super) parts: Vec<Part>,
}

/// A range: its region, the offset in that, and the length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) region: u32,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl<T> Side<T> {
    pub(super) fn map<U>(self, make: impl FnMut(&T) -> U) -> Side<U> {
        Side { regions: self.regions.iter().map(make).collect(), parts: self.parts }
    }

    /// The parts with these indices, or all of them.
    pub(super) fn chosen(&self, indices: Option<&[i32]>) -> Result<Cow<'_, [Part]>> {
        let Some(indices) = indices else { return Ok(Cow::Borrowed(&self.parts)) };
        let mut chosen = room::list("nixl", indices.len())?;
        for index in indices {
            let part = usize::try_from(*index).ok().and_then(|index| self.parts.get(index));
            chosen.push(*part.ok_or_else(|| {
                let len = self.parts.len();
                Error::invalid("nixl", format!("index {index} is outside a list of {len}"))
            })?);
        }
        Ok(Cow::Owned(chosen))
    }
}

impl<E: Ranged + Clone> Table<E> {
    pub(super) fn insert(&mut self, one: E) {
        self.by_key.entry(one.range().key()).or_default().push(one);
    }

    pub(super) fn remove(&mut self, range: &Range, is_it: impl Fn(&E) -> bool) {
        if let Some(at) = self.by_key.get_mut(&range.key()) {
            at.retain(|one| !is_it(one));
            if at.is_empty() {
                self.by_key.remove(&range.key());
            }
        }
    }

    pub(super) fn retain(&mut self, mut keep: impl FnMut(&E) -> bool) {
        self.by_key.retain(|_, at| {
            at.retain(&mut keep);
            !at.is_empty()
        });
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &E> {
        self.by_key.values().flatten()
    }

    /// What covers that range. Where several do, the one that starts last, and of those the newest.
    fn covering(&self, range: &Range) -> Option<&E> {
        let below = self.by_key.range(range.first_key()..=range.key()).rev();
        below.flat_map(|(_, at)| at.iter().rev()).find(|one| one.range().covers(range))
    }

    /// Finds what covers each of the ranges; `missing` makes the error for one that nothing covers.
    pub(super) fn find(
        &self,
        ranges: impl ExactSizeIterator<Item = Range>,
        missing: impl FnOnce(Range) -> Error,
    ) -> Result<Side<E>> {
        let mut side = Side { regions: Vec::<E>::new(), parts: room::list("nixl", ranges.len())? };
        let mut known: BTreeMap<(Key, usize), u32> = BTreeMap::new();
        let mut last = 0u32;
        for range in ranges {
            if !side.regions.get(last as usize).is_some_and(|region| region.range().covers(&range)) {
                let Some(found) = self.covering(&range) else { return Err(missing(range)) };
                let covers = found.range();
                last = *known.entry((covers.key(), covers.0.size)).or_insert_with(|| {
                    side.regions.push(found.clone());
                    side.regions.len() as u32 - 1
                });
            }
            let start = side.regions[last as usize].range().0.addr;
            side.parts.push(Part { region: last, offset: range.0.addr - start, len: range.0.size as u64 });
        }
        Ok(side)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;
    use crate::Kind;
    use crate::memory::{MemType, NixlDescriptor};

    impl Ranged for Range {
        fn range(&self) -> &Range {
            self
        }
    }

    fn range(addr: u64, size: usize) -> Range {
        Range(NixlDescriptor { addr, size, mem_type: MemType::Dram, device_id: 0 })
    }

    fn missing(range: Range) -> Error {
        Error::invalid("nixl", format!("{range:?}"))
    }

    /// So many times the same range: a list that takes no memory.
    struct Again(usize);

    impl Iterator for Again {
        type Item = Range;

        fn next(&mut self) -> Option<Range> {
            self.0 = self.0.checked_sub(1)?;
            Some(range(0x1000, 1))
        }

        fn size_hint(&self) -> (usize, Option<usize>) {
            (self.0, Some(self.0))
        }
    }

    impl ExactSizeIterator for Again {}

    #[test]
    fn a_list_for_which_there_is_no_memory_is_exhausted() {
        let mut table = Table::default();
        table.insert(range(0x1000, 0x1000));
        let error = table.find(Again(1 << 58), missing).err().unwrap();
        assert_eq!(error.kind(), Kind::Exhausted);
    }

    #[test]
    fn ranges_are_found_in_what_covers_them() {
        let mut table = Table::default();
        for (addr, size) in [(0, 0x9000), (0x1000, 0x1000), (0x3000, 0x1000)] {
            table.insert(range(addr, size));
        }
        let asked = [range(0x3800, 0x100), range(0x1000, 0x1000), range(0x1800, 0x1000), range(0x3000, 1)];
        let side = table.find(asked.into_iter(), missing).unwrap();
        assert_eq!(side.regions, [range(0x3000, 0x1000), range(0x1000, 0x1000), range(0, 0x9000)]);
        let parts: Vec<_> = side.parts.iter().map(|part| (part.region, part.offset, part.len)).collect();
        assert_eq!(parts[..3], [(0, 0x800, 0x100), (1, 0, 0x1000), (2, 0x1800, 0x1000)]);
        assert_eq!(side.chosen(Some(&[2, 0])).unwrap()[1], side.parts[0]);
        assert!(side.chosen(Some(&[-1])).is_err() && side.chosen(Some(&[4])).is_err());
    }

    #[test]
    fn what_nothing_covers_is_named_also_where_the_end_would_wrap() {
        let mut table = Table::default();
        table.insert(range(0x1000, 0x1000));
        for range in [range(0xfff, 2), range(0x1fff, 2), range(u64::MAX, 2)] {
            let error = table.find([range.clone()].into_iter(), missing).err().unwrap();
            assert_eq!(error.message(), format!("{range:?}"));
        }
        table.remove(&range(0x1000, 0x1000), |_| true);
        assert!(table.find([range(0x1000, 1)].into_iter(), missing).is_err());
        assert_eq!(table.iter().count(), 0);
    }
}
