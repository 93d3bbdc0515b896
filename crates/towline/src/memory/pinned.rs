//! Page-locked host memory that GPUs reach directly.
#![allow(
    unsafe_code,
    reason = "frees memory of the driver's, and sets the memory policy of short-lived threads"
)]

use std::num::NonZero;
use std::sync::Arc;
use std::thread;

use rustix::mm::Advice;
use towline_sys::cuda::HostFlags;

use super::map::{self, HugePages, Map};
use super::{Segment, SegmentSlice, Storage, StorageKind, describe};
use crate::cuda::{Gpu, HostRegistration, failed, not_given_back};
use crate::{Error, Result, fork, runtime};

const OP: &str = "allocate";

/// Pages are first touched by one thread for each so many bytes, and by [`MAX_TOUCHERS`] at most.
const TOUCH_EACH: usize = 64 << 20;
const MAX_TOUCHERS: usize = 8;

/// Host memory that is pinned, and that GPUs read and write directly.
///
/// Unless asked otherwise it lies in a sealed memory file like [`SharedStorage`](super::SharedStorage): peers on the same
/// host map it, and their GPUs reach it too. Its pages are taken near the GPU, if the kernel says which memory that is.
///
/// ```no_run
/// use towline::memory::{MemoryAccess, PinnedStorage, Storage};
/// # fn main() -> towline::Result<()> {
/// let storage = PinnedStorage::new(1 << 20)?;
/// storage.write_at(0, b"for the GPU, and for peers")?;
/// assert!(storage.segment().is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PinnedStorage {
    pages: Pages,
    len: usize,
}

#[derive(Debug)]
enum Pages {
    /// A memory file, registered. In this order: it is unpinned before it can be unmapped.
    Shared { registration: HostRegistration, segment: Arc<Segment> },
    /// Allocated by the driver.
    Private { gpu: Arc<Gpu>, start: *mut u8, device: u64 },
}

// SAFETY: the pointer is an address of the process, through which nothing is read or written here.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

/// How a [`PinnedStorage`] is allocated.
#[derive(Debug, Clone, Copy, Default)]
pub struct PinnedOptions {
    near: u32,
    private: bool,
    huge_pages: HugePages,
}

impl PinnedOptions {
    /// Chooses the GPU that it is near to and registered through; 0 unless said otherwise. All GPUs reach it.
    #[must_use]
    pub fn near(mut self, ordinal: u32) -> PinnedOptions {
        self.near = ordinal;
        self
    }

    /// Lets the driver allocate it, so that peers cannot map it.
    #[must_use]
    pub fn private(mut self, private: bool) -> PinnedOptions {
        self.private = private;
        self
    }

    /// Chooses the page size of shared memory; [`HugePages::Never`] unless said otherwise.
    #[must_use]
    pub fn huge_pages(mut self, huge_pages: HugePages) -> PinnedOptions {
        self.huge_pages = huge_pages;
        self
    }

    /// Allocates `len` bytes, takes all their pages and pins them.
    ///
    /// # Errors
    /// `Invalid` for length 0 or a GPU that is not there; `Exhausted` where the machine has no room or no more can be
    /// pinned; `Unavailable` without a driver or a GPU.
    pub fn allocate(self, len: usize) -> Result<PinnedStorage> {
        map::not_empty(len)?;
        let gpu = Gpu::open(self.near).map_err(|error| error.during(OP))?;
        let pages = if self.private { private(gpu, len)? } else { shared(&gpu, len, self.huge_pages)? };
        Ok(PinnedStorage { pages, len })
    }
}

fn private(gpu: Arc<Gpu>, len: usize) -> Result<Pages> {
    if len > isize::MAX as usize {
        return Err(Error::invalid(OP, format!("{len} bytes are more than the address space holds")));
    }
    let entered = gpu.enter(OP)?;
    let start = entered.allocate_host(len, HostFlags::default()).map_err(|error| failed(OP, error))?;
    start.expose_provenance();
    let device = entered.device_address(start).map_err(|error| failed(OP, error));
    drop(entered);
    // From here on the value frees it.
    let mut pages = Pages::Private { gpu, start, device: 0 };
    if let Pages::Private { device: place, .. } = &mut pages {
        *place = device?;
    }
    Ok(pages)
}

fn shared(gpu: &Arc<Gpu>, len: usize, huge: HugePages) -> Result<Pages> {
    let node = gpu.numa_node();
    let segment = Segment::create_touched(len, huge, |map, size| {
        if huge == HugePages::Try
            && let Err(error) = map.advise(size, Advice::LinuxHugepage)
        {
            tracing::debug!(%error, "no huge pages for pinned memory");
        }
        touch(map, size, node);
    })?;
    // SAFETY: the segment's mapping is writable and stays until the segment goes, which the value outlives; that no GPU
    // uses the memory when the value is dropped is the contract of `Storage`.
    let registration = unsafe { HostRegistration::register(gpu, segment.ptr(), segment.len(), false) }
        .map_err(|error| error.during(OP))?;
    Ok(Pages::Shared { registration, segment })
}

/// Takes the pages with several threads, from that node's memory where one is named.
///
/// Best effort: who creates the segment takes every page that is still missing.
fn touch(map: &Map, size: usize, node: Option<u32>) {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let threads = (size / TOUCH_EACH).clamp(1, MAX_TOUCHERS.min(cores));
    let unit = 2 << 20;
    let share = size.div_ceil(threads).next_multiple_of(unit);
    thread::scope(|scope| {
        for start in (0..size).step_by(share) {
            let work = move || {
                // The policy is the thread's, and goes with it.
                if let Some(node) = node {
                    prefer_node(node);
                }
                let len = share.min(size - start);
                map.advise_part(start, len, Advice::LinuxPopulateWrite)
            };
            let spawned = runtime::start_scoped_thread(scope, "allocate", "towline-touch", work);
            if let Err(error) = spawned {
                tracing::debug!(%error, "pages are touched by one thread");
            }
        }
    });
}

/// Lets the calling thread's pages come from that node while it has some.
fn prefer_node(node: u32) {
    const PREFERRED: libc::c_int = 1;
    let mut mask = [0u64; 16];
    let Some(word) = mask.get_mut(node as usize / 64) else { return };
    *word = 1 << (node % 64);
    // SAFETY: the mask outlives the call and has as many bits as are announced; only this thread is affected.
    let answer = unsafe { libc::syscall(libc::SYS_set_mempolicy, PREFERRED, mask.as_ptr(), mask.len() * 64) };
    if answer != 0 {
        tracing::debug!(error = %std::io::Error::last_os_error(), node, "no preference for a NUMA node");
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let Pages::Private { gpu, start, .. } = self else { return };
        if fork::in_child() {
            return;
        }
        // SAFETY: allocated by this value; its users kept the value alive meanwhile (`Storage`, promises 1 and 2).
        if let Err(error) = unsafe { gpu.device().cuda().free_host(*start) } {
            not_given_back("pinned memory", &failed("free pinned memory", error));
        }
    }
}

impl PinnedStorage {
    /// Allocates `len` bytes; see [`PinnedOptions::allocate`] for the errors.
    pub fn new(len: usize) -> Result<PinnedStorage> {
        PinnedStorage::options().allocate(len)
    }

    /// Starts from the default options.
    pub fn options() -> PinnedOptions {
        PinnedOptions::default()
    }

    /// The first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        match &self.pages {
            Pages::Shared { segment, .. } => segment.ptr(),
            Pages::Private { start, .. } => *start,
        }
    }

    /// The address of the first byte for the GPU that it is near to.
    pub fn device_address(&self) -> u64 {
        match &self.pages {
            Pages::Shared { registration, .. } => registration.device_address(),
            Pages::Private { device, .. } => *device,
        }
    }
}

describe!(PinnedStorage, |this| this.as_ptr().addr(), this.len, StorageKind::Pinned);

// SAFETY: the segment's mapping, or the driver's allocation, is readable, writable, at least `len` long, exposed, and stays
// at its address until drop; the fields never change; nothing gives out references; the storage starts where the segment
// does.
unsafe impl Storage for PinnedStorage {
    fn segment(&self) -> Option<SegmentSlice> {
        match &self.pages {
            Pages::Shared { segment, .. } => Some(SegmentSlice { segment: Arc::clone(segment), offset: 0 }),
            Pages::Private { .. } => None,
        }
    }
}
