//! A bare sum of several memories into several: the least reads and writes of an all-reduce, with nothing around them.
#![allow(unsafe_code, reason = "adds up by address")]

use std::io;
use std::ops::Range;

use super::{Memory, invalid};

/// The bytes of a cache line.
const LINE: usize = 64;

/// A sum of `f32`, ready to be run again and again.
pub(crate) struct RawSum {
    sources: Vec<usize>,
    targets: Vec<usize>,
    len: usize,
    _kept: Vec<Memory>,
}

impl RawSum {
    /// Checks the memories: they are equally long and whole lines, and the sources are others than the targets.
    pub(crate) fn new(sources: Vec<Memory>, targets: Vec<Memory>) -> io::Result<RawSum> {
        let ranges = |memories: &[Memory]| memories.iter().map(Memory::range).collect::<io::Result<Vec<_>>>();
        let (from, into) = (ranges(&sources)?, ranges(&targets)?);
        let Some(&(_, len)) = from.first() else { return Err(invalid("a sum needs a source")) };
        let mut all = from.iter().chain(&into);
        if !all.all(|(addr, whole)| *whole == len && addr.is_multiple_of(LINE))
            || !len.is_multiple_of(LINE as u64)
        {
            return Err(invalid("the memories are not equally many whole lines"));
        }
        if targets.iter().any(|target| !target.is_writable())
            || into.iter().any(|target| from.contains(target))
        {
            return Err(invalid("a target cannot be written, or is a source"));
        }
        let addrs = |ranges: Vec<(usize, u64)>| ranges.into_iter().map(|(addr, _)| addr).collect();
        let _kept = sources.into_iter().chain(targets).collect();
        Ok(RawSum { sources: addrs(from), targets: addrs(into), len: len as usize, _kept })
    }

    /// The bytes of one of equal parts, which are whole lines.
    pub(crate) fn part(&self, index: usize, parts: usize) -> Range<usize> {
        let at = |index: usize| self.len / LINE * index.min(parts) / parts.max(1) * LINE;
        at(index)..at(index + 1)
    }

    /// Adds up the lines in that range of bytes, around the cache. Nobody else touches them meanwhile.
    pub(crate) fn run(&self, range: Range<usize>) {
        let range = range.start.min(self.len) / LINE * LINE..range.end.min(self.len) / LINE * LINE;
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: `new` checked that the memories are that long and aligned to lines, and `_kept` keeps them mapped.
            unsafe {
                match (<[usize; 2]>::try_from(&*self.sources), <[usize; 2]>::try_from(&*self.targets)) {
                    (Ok(sources), Ok(targets)) => by_avx2(sources, targets, range),
                    _ => by_avx2(&self.sources, &self.targets, range),
                }
            }
            return;
        }
        for at in range.step_by(4) {
            let here = |addr: usize| std::ptr::with_exposed_provenance_mut::<f32>(addr + at);
            // SAFETY: as above; a line has whole elements.
            unsafe {
                let sum: f32 = self.sources.iter().map(|source| here(*source).read()).sum();
                self.targets.iter().for_each(|target| here(*target).write(sum));
            }
        }
    }
}

/// # Safety
/// The range is whole lines of memory at all addresses, which are aligned to lines; the processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn by_avx2(sources: impl AsRef<[usize]>, targets: impl AsRef<[usize]>, range: Range<usize>) {
    use std::arch::x86_64::{
        __m256, _mm_sfence, _mm256_add_ps, _mm256_load_ps, _mm256_setzero_ps, _mm256_stream_ps,
    };
    use std::ptr::with_exposed_provenance_mut as at;

    let Some((first, others)) = sources.as_ref().split_first() else { return };
    for line in range.step_by(LINE) {
        let mut sum: [__m256; 2] = [_mm256_setzero_ps(); 2];
        for (half, sum) in sum.iter_mut().enumerate() {
            let offset = line + half * LINE / 2;
            // SAFETY: the caller's promise.
            unsafe {
                *sum = _mm256_load_ps(at(first + offset));
                for other in others {
                    *sum = _mm256_add_ps(*sum, _mm256_load_ps(at(other + offset)));
                }
            }
        }
        for target in targets.as_ref() {
            // SAFETY: the caller's promise.
            unsafe {
                _mm256_stream_ps(at(target + line), sum[0]);
                _mm256_stream_ps(at(target + line + LINE / 2), sum[1]);
            }
        }
    }
    _mm_sfence();
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;

    use towline::memory::{MemoryAccess, SystemStorage};

    use super::*;

    #[test]
    fn the_parts_of_a_bare_sum_make_all_of_it_in_every_target() {
        for (sources, targets) in [(2, 2), (3, 1), (1, 4)] {
            let memory = |value: f32| {
                let storage = Arc::new(SystemStorage::new(4096).unwrap());
                storage.write_at(0, &value.to_ne_bytes().repeat(1024)).unwrap();
                storage
            };
            let from: Vec<_> = (0..sources).map(|source| memory(source as f32 + 1.0)).collect();
            let into: Vec<_> = (0..targets).map(|_| memory(-1.0)).collect();
            let memories = |storages: &[Arc<SystemStorage>]| {
                storages.iter().map(|one| Memory::Storage(Arc::clone(one) as _)).collect::<Vec<_>>()
            };
            let sum = RawSum::new(memories(&from), memories(&into)).unwrap();
            (0..3).for_each(|index| sum.run(sum.part(index, 3)));
            let expected: f32 = (1..=sources).map(|source| source as f32).sum();
            for target in &into {
                let mut found = [0; 4096];
                target.read_at(0, &mut found).unwrap();
                assert!(found.chunks(4).all(|element| element == expected.to_ne_bytes()));
            }
            assert!(RawSum::new(memories(&from), memories(&from)).is_err());
        }
    }
}
