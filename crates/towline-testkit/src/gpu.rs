//! What a GPU does without the library: the driver's copies, and a kernel that one would write by hand. `bench` and
//! `towline-testkit-gpu` measure them in turns with the library.
//!
//! `bare.ptx` is what a compiler makes of `bare.cu`, for old drivers and GPUs; a test compares the two where there is a compiler.
#![allow(unsafe_code, reason = "starts copies and kernels")]

use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use towline::cuda::{Entered, Gpu};
use towline::memory::{DeviceStorage, PinnedStorage};
use towline::{Error, Kind, MemoryDescription, Result};
use towline_sys::cuda::{Function, Stream};

/// The source of the kernel.
pub const BARE_SOURCE: &str = include_str!("gpu/bare.cu");

/// The kernel, for the driver.
pub const BARE: &str = include_str!("gpu/bare.ptx");

/// Threads of a block, and blocks, with which the kernel is launched.
const THREADS: u32 = 256;
const BLOCKS: u32 = 528;

/// A list entry: where a block is, and where it goes.
const ENTRY: usize = 16;

/// Memory, a stream and the kernel, ready to be used.
pub struct Bare {
    gpu: Arc<Gpu>,
    size: usize,
    one: DeviceStorage,
    two: DeviceStorage,
    pinned: PinnedStorage,
    stream: Stream,
    kernel: std::result::Result<Function, String>,
    /// The list as the host has it, and as the kernel reads it.
    list: PinnedStorage,
    uploaded: DeviceStorage,
    entries: AtomicU32,
    vectors: AtomicU32,
}

fn failed(error: towline_sys::Error) -> Error {
    Error::new(Kind::Native, "copy without the library", error.to_string())
}

impl Bare {
    /// Two areas of `size` bytes on the GPU, one of pinned memory, and room for lists of `blocks` blocks. `kernel` is used
    /// instead of [`BARE`] where there is one.
    pub fn new(gpu: &Arc<Gpu>, size: usize, blocks: usize, kernel: Option<&str>) -> Result<Bare> {
        let device = |len| DeviceStorage::new(len, gpu.ordinal());
        let entered = gpu.enter("bench")?;
        let text =
            CString::new(kernel.unwrap_or(BARE)).map_err(|_| Error::invalid("bench", "a NUL in PTX"))?;
        let kernel = entered.module(&text).and_then(|module| module.function(c"bare_copy"));
        let stream = entered.stream(0).map_err(failed)?;
        drop(entered);
        Ok(Bare {
            gpu: Arc::clone(gpu),
            size,
            one: device(size)?,
            two: device(size)?,
            pinned: PinnedStorage::new(size)?,
            stream,
            kernel: kernel.map_err(|error| error.to_string()),
            list: PinnedStorage::new(blocks * ENTRY)?,
            uploaded: device(blocks * ENTRY)?,
            entries: AtomicU32::new(0),
            vectors: AtomicU32::new(0),
        })
    }

    /// Why there is no kernel, where the driver did not take it.
    pub fn no_kernel(&self) -> Option<&str> {
        self.kernel.as_ref().err().map(String::as_str)
    }

    /// Makes the GPU's context current until the result is dropped, so that a copy is a copy and nothing else.
    pub fn enter(&self) -> Result<Turns<'_>> {
        Ok(Turns { bare: self, entered: self.gpu.enter("bench")? })
    }
}

/// Copies, each waited for.
pub struct Turns<'a> {
    bare: &'a Bare,
    entered: Entered<'a>,
}

impl Turns<'_> {
    fn copy(&self, to: u64, from: u64, len: usize) -> Result<()> {
        let Bare { stream, size, .. } = self.bare;
        if len > *size {
            return Err(Error::invalid("bench", format!("{len} bytes of {size}")));
        }
        // SAFETY: both areas are as long as that, and live as long as `self.bare`.
        unsafe { stream.copy(&self.entered, to, from, len) }.map_err(failed)?;
        stream.synchronize(&self.entered).map_err(failed)
    }

    /// One run of bytes on the GPU.
    pub fn on_gpu(&self, len: usize) -> Result<()> {
        self.copy(self.bare.two.addr() as u64, self.bare.one.addr() as u64, len)
    }

    /// One run of bytes between pinned memory and the GPU.
    pub fn over_the_bus(&self, to_gpu: bool, len: usize) -> Result<()> {
        let (gpu, host) = (self.bare.one.addr() as u64, self.bare.pinned.device_address());
        if to_gpu { self.copy(gpu, host, len) } else { self.copy(host, gpu, len) }
    }

    /// Writes the list for [`paged`](Self::paged): the n-th block of `from` goes to the n-th of `to`.
    pub fn prepare(&self, from: &[u32], to: &[u32], block_size: usize) -> Result<()> {
        let Bare { list, one, two, size, .. } = self.bare;
        let most = from.iter().chain(to).max().map_or(0, |most| *most as usize + 1);
        if from.len() != to.len() || from.len() * ENTRY > list.size() || most * block_size > *size {
            return Err(Error::invalid("bench", format!("{} blocks of {block_size} bytes", from.len())));
        }
        if !block_size.is_multiple_of(ENTRY) {
            return Err(Error::invalid("bench", "the kernel copies sixteen bytes at a time"));
        }
        for (at, (from, to)) in from.iter().zip(to).enumerate() {
            let place = |base: usize, block: u32| (base + block as usize * block_size) as u64;
            let pair = [place(one.addr(), *from), place(two.addr(), *to)];
            // SAFETY: the list has room for that many pairs, and the kernel does not run.
            unsafe { list.as_ptr().cast::<[u64; 2]>().add(at).write(pair) };
        }
        self.bare.entries.store(from.len() as u32, Ordering::Relaxed);
        self.bare.vectors.store((block_size / 16) as u32, Ordering::Relaxed);
        Ok(())
    }

    /// The blocks of the list, by the kernel; the list is uploaded first.
    pub fn paged(&self) -> Result<()> {
        let Bare { stream, list, uploaded, .. } = self.bare;
        let kernel =
            self.bare.kernel.as_ref().map_err(|why| Error::new(Kind::Unsupported, "bench", why.clone()))?;
        let (entries, vectors) =
            (self.bare.entries.load(Ordering::Relaxed), self.bare.vectors.load(Ordering::Relaxed));
        let copy = uploaded.addr() as u64;
        let mut arguments: [*mut c_void; 3] = [
            std::ptr::from_ref(&copy).cast_mut().cast(),
            std::ptr::from_ref(&entries).cast_mut().cast(),
            std::ptr::from_ref(&vectors).cast_mut().cast(),
        ];
        // SAFETY: `prepare` has seen that the blocks lie within the two areas, and the arguments are the kernel's.
        unsafe {
            stream
                .copy(&self.entered, copy, list.device_address(), entries as usize * ENTRY)
                .and_then(|()| stream.launch(&self.entered, kernel, BLOCKS, THREADS, &mut arguments))
        }
        .map_err(failed)?;
        stream.synchronize(&self.entered).map_err(failed)
    }
}
