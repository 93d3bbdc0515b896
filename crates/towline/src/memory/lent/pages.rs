//! Which pages of lent memory are there, and where the others would come from: as far as the kernel says so without waiting for one.

use std::fs;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::room;
use crate::runtime::Device;

/// So many bytes share a bit.
const GRANULE: usize = 256 << 10;

/// So many pages are asked about with one call.
const AT_ONCE: usize = 256;

/// What is known of the pages of one registration.
#[derive(Default)]
pub(crate) struct Pages {
    file: OnceLock<Option<Device>>,
    /// A bit for each granule whose pages were all there.
    there: OnceLock<Vec<AtomicU64>>,
    /// Bytes that were asked about.
    asked: AtomicU64,
}

impl Pages {
    /// The file system behind that memory, where there is one: its pages come when that likes. Looked up once.
    pub(crate) fn file_system(&self, memory: Range<usize>) -> Option<Device> {
        *self.file.get_or_init(|| match fs::read_to_string("/proc/self/maps") {
            Ok(maps) => file_system(&maps, &memory),
            // Nobody knows what is there.
            Err(_) => Some(Device::Disk(0)),
        })
    }

    /// Whether all pages of those ranges, which lie in `memory` and have so many bytes, are there. What was there is not looked at again
    /// until as many bytes have been asked about as the memory has.
    pub(crate) fn are_there(
        &self,
        memory: &Range<usize>,
        bytes: u64,
        mut asked: impl Iterator<Item = Range<usize>>,
    ) -> bool {
        let there = self.there.get_or_init(|| {
            let words = (memory.end.div_ceil(GRANULE) - memory.start / GRANULE).div_ceil(64);
            // Without room each request is looked at by itself.
            room::collect("serve", (0..words).map(|_| AtomicU64::new(0))).unwrap_or_default()
        });
        let before = self.asked.fetch_add(bytes, Ordering::Relaxed);
        let round = |asked: u64| asked / memory.len().max(1) as u64;
        if round(before) != round(before.wrapping_add(bytes)) {
            there.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        }
        asked.all(|asked| is_there(there, memory, &asked))
    }
}

/// Whether all pages of one range are there, by the bits or by a look.
fn is_there(there: &[AtomicU64], memory: &Range<usize>, asked: &Range<usize>) -> bool {
    let first = memory.start / GRANULE;
    (asked.start / GRANULE..asked.end.div_ceil(GRANULE)).all(|granule| {
        let (number, bit) = (granule - first, 1 << ((granule - first) % 64));
        let word = there.get(number / 64);
        if word.is_some_and(|word| word.load(Ordering::Relaxed) & bit != 0) {
            return true;
        }
        let within =
            |range: &Range<usize>| range.start.max(granule * GRANULE)..range.end.min((granule + 1) * GRANULE);
        if !present(within(asked)) {
            return false;
        }
        if let Some(word) = word
            && present(within(memory))
        {
            word.fetch_or(bit, Ordering::Relaxed);
        }
        true
    })
}

/// Whether all pages of that range are there now. Waits for none.
fn present(range: Range<usize>) -> bool {
    let page = rustix::param::page_size();
    let (start, end) = (range.start & !(page - 1), range.end.next_multiple_of(page));
    let mut pages = [0u8; AT_ONCE];
    (start..end).step_by(AT_ONCE * page).all(|at| {
        let len = (end - at).min(AT_ONCE * page);
        let first = std::ptr::with_exposed_provenance_mut(at);
        // SAFETY: the call reads no memory of the range, which the kernel checks, and writes a byte for each page of it.
        let rc = unsafe { libc::mincore(first, len, pages.as_mut_ptr().cast()) };
        rc == 0 && pages[..len / page].iter().all(|page| page & 1 != 0)
    })
}

/// The first file system behind that range, by the lines of `/proc/self/maps`.
fn file_system(maps: &str, memory: &Range<usize>) -> Option<Device> {
    maps.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let hex = |number| usize::from_str_radix(number, 16).ok();
        if hex(end)? <= memory.start || hex(start)? >= memory.end {
            return None;
        }
        let (major, minor) = words.nth(2)?.split_once(':')?;
        let inode = words.next()?;
        let name = words.next().unwrap_or_default();
        // A mapping without a file, one of shared or huge pages, or one of a driver.
        let is_memory = inode == "0"
            || ["/dev/", "/memfd:", "/SYSV", "/anon_hugepage"].iter().any(|kind| name.starts_with(kind));
        let number = rustix::fs::makedev(hex(major)? as u32, hex(minor)? as u32);
        (!is_memory).then_some(Device::Disk(number))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rustix::mm::{Advice, MapFlags, ProtFlags};

    use super::*;

    const LEN: usize = 2 * GRANULE;

    /// Pages that stay mapped until the process ends.
    fn map(file: Option<&fs::File>) -> Range<usize> {
        let (null, rights) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a mapping where the kernel likes it.
        let at = unsafe {
            match file {
                Some(file) => rustix::mm::mmap(null, LEN, rights, MapFlags::SHARED, file, 0),
                None => rustix::mm::mmap_anonymous(null, LEN, rights, MapFlags::PRIVATE),
            }
        };
        let at = at.unwrap().expose_provenance();
        at..at + LEN
    }

    #[test]
    fn memory_of_a_file_is_known_by_its_file_system() {
        use std::os::unix::fs::MetadataExt as _;
        let path = std::env::current_exe().unwrap().with_file_name(format!("pages-{}", std::process::id()));
        let file = fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        fs::remove_file(path).unwrap();
        file.set_len(LEN as u64).unwrap();
        let memfd = rustix::fs::memfd_create("pages", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let memfd = fs::File::from(memfd);
        memfd.set_len(LEN as u64).unwrap();
        let of = |memory| Pages::default().file_system(memory);
        assert_eq!(of(map(Some(&file))), Some(Device::Disk(file.metadata().unwrap().dev())));
        assert_eq!([of(map(None)), of(map(Some(&memfd)))], [None, None]);
    }

    #[test]
    fn pages_that_are_missing_are_noticed_and_those_that_are_there_are_not_looked_at_each_time() {
        let memory = map(None);
        let pages = Pages::default();
        let bring = |range: &Range<usize>| {
            let at = std::ptr::with_exposed_provenance_mut(range.start);
            // SAFETY: brings pages of this test's own mapping in.
            unsafe { rustix::mm::madvise(at, range.len(), Advice::LinuxPopulateWrite) }.unwrap();
        };
        let (first, second) = (memory.start..memory.start + 4096, memory.start + 8192..memory.start + 8193);
        let there = |asked: &Range<usize>| {
            pages.are_there(&memory, asked.len() as u64, std::iter::once(asked.clone()))
        };
        assert!(!there(&first));
        bring(&first);
        assert!(there(&first) && !there(&second));
        bring(&memory);
        assert!(there(&second));
        let at = std::ptr::with_exposed_provenance_mut(memory.start);
        // SAFETY: nobody uses the memory.
        unsafe { rustix::mm::madvise(at, LEN, Advice::LinuxDontNeed) }.unwrap();
        let looks = (0..=LEN / 4096).position(|_| !there(&first));
        assert!(looks.is_some_and(|looks| looks > 0), "{looks:?}");
    }
}
