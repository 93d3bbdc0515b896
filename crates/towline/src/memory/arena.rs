//! Hands out pages of one storage.
#![allow(unsafe_code, reason = "forwards the storage contract")]

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::{FileSlice, MemoryDescription, NixlDescriptor, Place, SegmentSlice, Storage, StorageKind};
use crate::{Error, Kind, Result};

/// Hands out parts of one storage, in whole pages; clones share it.
///
/// Registering the storage once covers every buffer of the arena. Any number of buffers can be alive, and an
/// empty arena can hand out all its pages as one. Buffers start at multiples of the page size from the start of
/// the storage; bytes after its last whole page stay unused.
///
/// ```
/// use towline::memory::{Arena, MemoryDescription, SharedStorage};
/// # fn main() -> towline::Result<()> {
/// let arena = Arena::new(SharedStorage::new(1 << 20)?, 4096)?;
/// let buffer = arena.allocate(5000)?;
/// assert_eq!(buffer.size(), 5000);
/// assert_eq!(arena.available(), (1 << 20) - 2 * 4096);
/// drop(buffer);
/// assert!(arena.allocate(1 << 20).is_ok());
/// # Ok(())
/// # }
/// ```
pub struct Arena<S: Storage>(Arc<Inner<S>>);

struct Inner<S> {
    storage: S,
    page_size: usize,
    free: Mutex<FreeList>,
}

impl<S> Inner<S> {
    fn free(&self) -> MutexGuard<'_, FreeList> {
        self.free.lock()
    }
}

impl<S: Storage> Arena<S> {
    /// Takes the storage and divides it into pages.
    ///
    /// # Errors
    /// `Invalid` if the page size is not a power of two, or the storage is shorter than one page.
    pub fn new(storage: S, page_size: usize) -> Result<Arena<S>> {
        if !page_size.is_power_of_two() {
            return Err(Error::invalid("arena", format!("page size {page_size} is not a power of two")));
        }
        let pages = storage.size() / page_size;
        if pages == 0 {
            let size = storage.size();
            return Err(Error::invalid("arena", format!("{size} bytes hold no page of {page_size} bytes")));
        }
        Ok(Arena(Arc::new(Inner { storage, page_size, free: Mutex::new(FreeList::new(pages)) })))
    }

    /// Hands out `size` bytes, rounded up to whole pages, from the smallest gap that has room for them.
    ///
    /// The bytes are whatever the last user of the pages left.
    ///
    /// # Errors
    /// `Invalid` for size 0; `Exhausted` where no gap is long enough.
    pub fn allocate(&self, size: usize) -> Result<ArenaBuffer<S>> {
        if size == 0 {
            return Err(Error::invalid("arena allocate", "a buffer needs at least one byte"));
        }
        let pages = size.div_ceil(self.0.page_size);
        let mut free = self.0.free();
        match free.take(pages) {
            Some(first) => Ok(ArenaBuffer { arena: Arc::clone(&self.0), first, pages, size }),
            None => Err(Error::new(
                Kind::Exhausted,
                "arena allocate",
                format!(
                    "{size} bytes need {pages} pages of {}; {} of {} are free, in {} gaps, the longest of {}",
                    self.0.page_size,
                    free.pages,
                    self.0.storage.size() / self.0.page_size,
                    free.by_start.len(),
                    free.longest()
                ),
            )),
        }
    }

    /// The storage that is handed out.
    pub fn storage(&self) -> &S {
        &self.0.storage
    }

    /// The bytes of one page.
    pub fn page_size(&self) -> usize {
        self.0.page_size
    }

    /// The bytes that the arena can hand out when it is empty.
    pub fn capacity(&self) -> usize {
        self.0.storage.size() / self.0.page_size * self.0.page_size
    }

    /// The bytes in free pages, in however many gaps.
    pub fn available(&self) -> usize {
        self.0.free().pages * self.0.page_size
    }

    /// The bytes in the longest gap: the largest buffer that can be had now.
    pub fn largest_available(&self) -> usize {
        self.0.free().longest() * self.0.page_size
    }
}

impl<S: Storage> Clone for Arena<S> {
    fn clone(&self) -> Arena<S> {
        Arena(Arc::clone(&self.0))
    }
}

impl<S: Storage> fmt::Debug for Arena<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("storage", &self.0.storage)
            .field("page_size", &self.0.page_size)
            .field("available", &self.available())
            .finish()
    }
}

/// The free pages, as gaps that never touch each other.
struct FreeList {
    /// First page of each gap, with its length.
    by_start: BTreeMap<usize, usize>,
    /// Length and first page of each gap.
    by_length: BTreeSet<(usize, usize)>,
    /// All free pages.
    pages: usize,
}

impl FreeList {
    fn new(pages: usize) -> FreeList {
        let mut list = FreeList { by_start: BTreeMap::new(), by_length: BTreeSet::new(), pages: 0 };
        list.give(0, pages);
        list
    }

    /// Takes pages from the start of the shortest gap that has enough, the earliest among equals.
    fn take(&mut self, pages: usize) -> Option<usize> {
        let (length, start) = *self.by_length.range((pages, 0)..).next()?;
        self.remove(start, length);
        if length > pages {
            self.insert(start + pages, length - pages);
        }
        Some(start)
    }

    /// Gives pages back, as one gap with the neighbours.
    fn give(&mut self, mut start: usize, mut length: usize) {
        if let Some((&before, &pages)) = self.by_start.range(..start).next_back()
            && before + pages == start
        {
            self.remove(before, pages);
            start = before;
            length += pages;
        }
        if let Some(&pages) = self.by_start.get(&(start + length)) {
            self.remove(start + length, pages);
            length += pages;
        }
        self.insert(start, length);
    }

    fn insert(&mut self, start: usize, length: usize) {
        self.by_start.insert(start, length);
        self.by_length.insert((length, start));
        self.pages += length;
    }

    fn remove(&mut self, start: usize, length: usize) {
        self.by_start.remove(&start);
        self.by_length.remove(&(length, start));
        self.pages -= length;
    }

    fn longest(&self) -> usize {
        self.by_length.last().map_or(0, |(length, _)| *length)
    }
}

/// A part of an arena's storage; its pages go back when it is dropped.
///
/// It keeps the storage alive, with or without the [`Arena`].
pub struct ArenaBuffer<S: Storage> {
    arena: Arc<Inner<S>>,
    first: usize,
    pages: usize,
    size: usize,
}

impl<S: Storage> ArenaBuffer<S> {
    /// How far into the storage the buffer starts.
    pub fn offset(&self) -> usize {
        self.first * self.arena.page_size
    }

    /// The storage that the buffer is a part of.
    pub fn storage(&self) -> &S {
        &self.arena.storage
    }
}

impl<S: Storage> Drop for ArenaBuffer<S> {
    fn drop(&mut self) {
        self.arena.free().give(self.first, self.pages);
    }
}

impl<S: Storage> fmt::Debug for ArenaBuffer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArenaBuffer")
            .field("storage", &self.arena.storage)
            .field("offset", &self.offset())
            .field("size", &self.size)
            .finish()
    }
}

impl<S: Storage> MemoryDescription for ArenaBuffer<S> {
    fn addr(&self) -> usize {
        self.arena.storage.addr() + self.offset()
    }

    fn size(&self) -> usize {
        self.size
    }

    fn storage_kind(&self) -> StorageKind {
        self.arena.storage.storage_kind()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn nixl_descriptor(&self) -> Option<NixlDescriptor> {
        Some(self.arena.storage.nixl_descriptor()?.part(self.offset(), self.size))
    }
}

// SAFETY: the pages lie inside the storage, which keeps the contract, never changes its results, and lives as
// long as the buffer holds the arena; the part of the segment moves on by the same offset. The arena gives out no
// `&mut` to the storage.
unsafe impl<S: Storage> Storage for ArenaBuffer<S> {
    fn place(&self) -> Place {
        self.arena.storage.place()
    }

    fn segment(&self) -> Option<SegmentSlice> {
        let SegmentSlice { segment, offset } = self.arena.storage.segment()?;
        Some(SegmentSlice { segment, offset: offset + self.offset() })
    }

    fn file(&self) -> Option<FileSlice> {
        Some(self.arena.storage.file()?.forward(self.offset()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use proptest::prelude::*;

    use super::*;
    use crate::memory::{MemoryAccess, SharedStorage, SystemStorage};

    fn arena(pages: usize) -> Arena<SystemStorage> {
        Arena::new(SystemStorage::new(pages * 64).unwrap(), 64).unwrap()
    }

    #[test]
    fn an_arena_hands_out_its_whole_size_whatever_its_page_count() {
        for pages in (1..300).chain([1000, 1001, 4095, 65_537]) {
            let arena = arena(pages);
            let whole = arena.allocate(pages * 64).unwrap();
            assert_eq!(arena.available(), 0);
            drop(whole);
            assert_eq!(arena.largest_available(), arena.capacity());
        }
    }

    #[test]
    fn more_buffers_than_two_hundred_thousand_can_be_alive() {
        let arena = arena(200_001);
        let buffers: Vec<_> = (0..200_001).map(|_| arena.allocate(1).unwrap()).collect();
        assert_eq!(arena.available(), 0);
        drop(buffers);
        assert_eq!(arena.largest_available(), arena.capacity());
    }

    #[test]
    fn a_full_arena_says_how_full_it_is() {
        let arena = arena(10);
        let _kept = arena.allocate(65).unwrap();
        let error = arena.allocate(9 * 64).unwrap_err();
        assert_eq!(error.kind(), Kind::Exhausted);
        assert_eq!(
            error.message(),
            "576 bytes need 9 pages of 64; 8 of 10 are free, in 1 gaps, the longest of 8"
        );
    }

    #[test]
    fn bad_sizes_are_invalid() {
        let storage = || SystemStorage::new(100).unwrap();
        assert_eq!(Arena::new(storage(), 0).unwrap_err().kind(), Kind::Invalid);
        assert_eq!(Arena::new(storage(), 48).unwrap_err().kind(), Kind::Invalid);
        assert_eq!(Arena::new(storage(), 128).unwrap_err().kind(), Kind::Invalid);
        let arena = Arena::new(storage(), 64).unwrap();
        assert_eq!(arena.capacity(), 64);
        assert_eq!(arena.allocate(0).unwrap_err().kind(), Kind::Invalid);
        assert_eq!(arena.allocate(usize::MAX).unwrap_err().kind(), Kind::Exhausted);
    }

    #[test]
    fn a_buffer_knows_its_part_of_the_segment_and_outlives_the_arena() {
        let arena = Arena::new(SharedStorage::new(8192).unwrap(), 4096).unwrap();
        let _first = arena.allocate(1).unwrap();
        let second = arena.clone().allocate(100).unwrap();
        let base = arena.storage().addr();
        drop(arena);
        assert_eq!((second.addr(), second.size()), (base + 4096, 100));
        assert_eq!(second.segment().unwrap().offset, 4096);
        assert_eq!(second.storage().size(), 8192);
        assert!(second.nixl_descriptor().is_none());
        second.write_at(99, &[1]).unwrap();
        assert_eq!(second.write_at(100, &[1]).unwrap_err().kind(), Kind::Invalid);
    }

    #[test]
    fn buffers_come_and_go_on_many_threads() {
        let arena = arena(64);
        std::thread::scope(|scope| {
            for id in 1..=4u8 {
                let arena = arena.clone();
                scope.spawn(move || {
                    for round in 0..500 {
                        let Ok(buffer) = arena.allocate(1 + round % 700) else { continue };
                        buffer.memset(id, 0, buffer.size()).unwrap();
                        let mut bytes = vec![0; buffer.size()];
                        buffer.read_at(0, &mut bytes).unwrap();
                        assert!(bytes.iter().all(|byte| *byte == id));
                    }
                });
            }
        });
        assert_eq!(arena.largest_available(), arena.capacity());
    }

    proptest! {
        #[test]
        fn an_arena_behaves_like_a_row_of_pages(
            pages in 1..80usize,
            steps in prop::collection::vec((any::<bool>(), 1..1500usize, any::<prop::sample::Index>()), 0..120),
        ) {
            let arena = arena(pages);
            let mut taken = vec![false; pages];
            let mut buffers: Vec<ArenaBuffer<SystemStorage>> = Vec::new();
            for (allocate, size, index) in steps {
                if allocate || buffers.is_empty() {
                    let needed = size.div_ceil(64);
                    let longest = taken.split(|taken| *taken).map(<[bool]>::len).max().unwrap_or(0);
                    match arena.allocate(size) {
                        Ok(buffer) => {
                            prop_assert!(needed <= longest);
                            prop_assert_eq!(buffer.size(), size);
                            prop_assert_eq!(buffer.offset() % 64, 0);
                            for page in &mut taken[buffer.offset() / 64..][..needed] {
                                prop_assert!(!*page, "a page was handed out twice");
                                *page = true;
                            }
                            buffers.push(buffer);
                        }
                        Err(error) => {
                            prop_assert_eq!(error.kind(), Kind::Exhausted);
                            prop_assert!(needed > longest);
                        }
                    }
                } else {
                    let buffer = buffers.swap_remove(index.index(buffers.len()));
                    taken[buffer.offset() / 64..][..buffer.size().div_ceil(64)].fill(false);
                }
                let longest = taken.split(|taken| *taken).map(<[bool]>::len).max().unwrap_or(0);
                prop_assert_eq!(arena.available(), taken.iter().filter(|taken| !**taken).count() * 64);
                prop_assert_eq!(arena.largest_available(), longest * 64);
            }
            drop(buffers);
            prop_assert_eq!(arena.allocate(pages * 64).unwrap().offset(), 0);
        }
    }
}
