//! A lane: one stream, and the pinned memory through which lists go to the GPU.
#![allow(unsafe_code, reason = "launches the kernel and writes its lists")]

use std::ffi::c_void;
use std::ptr;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use towline_sys::cuda::{Entered, Event, Function, HostFlags, Stream};

use super::blocks::{Blocks, write_indices};
use super::copy::Run;
use super::list::{self, Form, PAIR, Shape, TRIPLE};
use super::{Gpu, failed};
use crate::{Error, Kind, Result, fork};

/// The threads of a block of the kernel, and the most units that it takes.
const THREADS: u32 = 256;
/// The bytes of one list.
const LIST: usize = 1 << 20;
/// The most lists of one lane that the GPU has not read yet.
const LISTS: usize = 8;
/// The first list of a request is short, so that the GPU has work while the next is being written: so many runs.
const FIRST: usize = 4096;
/// Indices are launched over as they are written: first so many as runs, then so many times more, and never more than that at
/// once. The GPU begins early, and has little left to do when the last are written.
const GROWTH: usize = 4;
const MAX_BATCH: usize = 16 << 10;
/// Where in a list a portion of indices begins: the CPU hands on what it writes around its cache by lines of so many bytes.
const LINE: usize = 64;
/// How long a list is waited for: longer than any copy takes that could be in front of it.
const LIMIT: Duration = Duration::from_secs(60);

/// What can be chosen about launches; measured, and not for users.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// Units per block of the kernel; 0 for what fits.
    pub per_block: u32,
    /// Runs in the first list, and blocks in the first launch by index.
    pub first: usize,
    /// How many times more blocks there are in the next.
    pub growth: usize,
    /// The most of them.
    pub most: usize,
    /// Whether launches by index may run beside each other.
    pub beside: bool,
    /// The length to which units are cut; 0 for what fits.
    pub unit: u64,
}

impl Default for Tuning {
    fn default() -> Tuning {
        Tuning { per_block: 0, first: FIRST, growth: GROWTH, most: MAX_BATCH, beside: true, unit: 0 }
    }
}

/// One stream with its lists.
pub(super) struct Lane {
    gpu: Arc<Gpu>,
    pub(super) stream: Stream,
    /// Every other launch over a part of one list goes here, so that the GPU does not run dry between them.
    beside: Stream,
    /// When it has done what the first one waits for.
    joined: Event,
    lists: Vec<List>,
    next: usize,
}

/// Pinned memory for one list, and the point at which the GPU has read it.
struct List {
    start: *mut u8,
    /// Where the GPU finds it.
    device: u64,
    read: Event,
}

// SAFETY: the memory belongs to the lane, of which one thread at a time has the use.
unsafe impl Send for List {}

impl List {
    fn new(entered: &Entered<'_>) -> towline_sys::Result<List> {
        let read = entered.event()?;
        // The CPU writes it once and never reads it: around the cache, and read by the GPU without asking the CPU.
        let flags = HostFlags { write_combined: true, ..HostFlags::default() };
        let start = entered.allocate_host(LIST, flags)?;
        match entered.device_address(start) {
            Ok(device) => Ok(List { start, device, read }),
            Err(error) => {
                // SAFETY: allocated just now, and not used.
                let _ = unsafe { entered.cuda().free_host(start) };
                Err(error)
            }
        }
    }
}

impl Lane {
    pub(super) fn new(gpu: &Arc<Gpu>, entered: &Entered<'_>) -> towline_sys::Result<Lane> {
        let (stream, beside, joined) = (entered.stream(0)?, entered.stream(0)?, entered.event()?);
        Ok(Lane { gpu: Arc::clone(gpu), stream, beside, joined, lists: Vec::new(), next: 0 })
    }

    /// Waits until nothing is running here any more.
    pub(super) fn synchronize(&self, entered: &Entered<'_>) {
        for stream in [&self.stream, &self.beside] {
            let _ = stream.synchronize(entered);
        }
    }

    /// What is in the stream from now on comes after all that is in the one beside.
    fn join(&self, entered: &Entered<'_>) -> towline_sys::Result<()> {
        self.beside.record(entered, &self.joined)?;
        self.stream.wait(entered, &self.joined)
    }

    /// A list that the GPU has read, made where there is none and not yet so many.
    fn list(&mut self, op: &'static str, entered: &Entered<'_>) -> Result<&List> {
        let sys = |error| failed(op, error);
        let until = Instant::now() + LIMIT;
        let at = loop {
            // They are read in the order in which they were used, so that the next is the oldest.
            let oldest = if self.next < self.lists.len() { self.next } else { 0 };
            if let Some(list) = self.lists.get(oldest)
                && list.read.has_happened().map_err(sys)?
            {
                break oldest;
            }
            if self.lists.len() < LISTS {
                self.lists.insert(oldest, List::new(entered).map_err(sys)?);
                break oldest;
            }
            if Instant::now() > until {
                let message = "the GPU has not read its last lists for a minute";
                return Err(Error::new(Kind::Timeout, op, message));
            }
            std::thread::yield_now();
        };
        self.next = at + 1;
        Ok(&self.lists[at])
    }

    /// Makes the first list, which a copy would make otherwise.
    pub(super) fn prepare(&mut self, op: &'static str, entered: &Entered<'_>) -> Result<()> {
        self.list(op, entered).map(drop)
    }

    /// Starts copies of all runs, one after the other.
    ///
    /// # Safety
    /// As for [`Gpu::copy`].
    pub(super) unsafe fn plainly(
        &self,
        op: &'static str,
        entered: &Entered<'_>,
        runs: impl Iterator<Item = Run>,
    ) -> Result<()> {
        for run in runs.filter(|run| run.len > 0) {
            // BYTES MOVE HERE
            // SAFETY: the caller's promise.
            unsafe { self.stream.copy(entered, run.to, run.from, run.len as usize) }
                .map_err(|error| failed(op, error))?;
        }
        Ok(())
    }

    /// Starts the kernel over all runs, as often as their list needs room.
    ///
    /// # Safety
    /// As for [`Gpu::copy`].
    pub(super) unsafe fn by_kernel(
        &mut self,
        op: &'static str,
        entered: &Entered<'_>,
        kernel: &Function,
        runs: impl ExactSizeIterator<Item = Run> + Clone,
        bytes: u64,
        tuning: &Tuning,
    ) -> Result<()> {
        let unit = if tuning.unit == 0 { list::longest_unit(bytes) } else { tuning.unit };
        let mut rest = runs;
        let mut open = None;
        let (mut one_length, mut most) = (true, tuning.first.max(1));
        while rest.len() > 0 || open.is_some() {
            let list = ptr::from_ref(self.list(op, entered)?);
            // SAFETY: the lane keeps its lists where they are until it makes another, which is in the next turn.
            let list = unsafe { &*list };
            let start = list.start;
            let mut said = None;
            if one_length {
                // SAFETY: the list's memory is this lane's, zeroed or written before, and the GPU has read what it held.
                let into = unsafe { slice::from_raw_parts_mut(start.cast(), most.min(LIST / PAIR)) };
                said = list::uniform(rest.clone(), into, unit);
                one_length = said.is_some();
            }
            let shape = match said {
                Some((count, shape)) => {
                    if count > 0 {
                        rest.nth(count - 1);
                    }
                    shape
                }
                None => {
                    // SAFETY: as above.
                    let into = unsafe { slice::from_raw_parts_mut(start.cast(), most.min(LIST / TRIPLE)) };
                    list::listed(&mut rest, &mut open, into, unit)
                }
            };
            most = LIST;
            // SAFETY: the list says the caller's runs; the rest is the caller's promise.
            unsafe { self.launch(op, entered, &self.stream, kernel, list, shape, [0, 0], tuning)? };
            self.stream.record(entered, &list.read).map_err(|error| failed(op, error))?;
        }
        Ok(())
    }

    /// Starts the kernel over blocks of one length, by their indices. Both lists are in bounds and equally long.
    ///
    /// # Safety
    /// As for [`Gpu::copy`].
    #[allow(clippy::too_many_arguments, reason = "two sides, and how")]
    pub(super) unsafe fn by_index(
        &mut self,
        op: &'static str,
        entered: &Entered<'_>,
        kernel: &Function,
        sides: [&Blocks<'_>; 2],
        count: usize,
        len: u64,
        tuning: &Tuning,
    ) -> Result<()> {
        let unit =
            if tuning.unit == 0 { list::longest_unit(len.saturating_mul(count as u64)) } else { tuning.unit };
        let (parts_log2, part) = list::parts(len, unit);
        // As many as have room on both sides and whose units can be counted.
        let most = ((LIST - 2 * LINE) / PAIR).min(1 << (31 - parts_log2).min(30));
        let (max_batch, mut portion) = (tuning.most.clamp(1, most), tuning.first.clamp(1, most));
        let (mut done, mut launches) = (0, 0);
        while done < count {
            let list = ptr::from_ref(self.list(op, entered)?);
            // SAFETY: the lane keeps its lists where they are until it makes another, which is in the next turn.
            let list = unsafe { &*list };
            let mut used = 0;
            while done < count {
                // A short rest goes along: a launch of its own would cost more.
                let left = count - done;
                let wanted = if left <= 2 * portion { left.min(most) } else { portion };
                let room = LIST.saturating_sub(used + 2 * LINE) / PAIR;
                if room < wanted && used > 0 {
                    break;
                }
                let now = wanted.min(room);
                let mut places = [0, 0];
                let mut bases = [0, 0];
                for (at, side) in sides.into_iter().enumerate() {
                    // SAFETY: two times `now` indices, and what is lost between them, have room in the rest of the list, which
                    // is this lane's and which the GPU has read.
                    let into = unsafe { slice::from_raw_parts_mut(start_at(list, used), now) };
                    let written = write_indices(side.indices, done, into);
                    bases[at] = if written { side.base } else { side.base + done as u64 * side.step };
                    if written {
                        places[at] = used as u64 + 1;
                        used = (used + now * size_of::<u32>()).next_multiple_of(LINE);
                    }
                }
                let shape = Shape {
                    units: (now as u32) << parts_log2,
                    from: bases[0],
                    to: bases[1],
                    len,
                    parts_log2,
                    part,
                    scale_log2: 0,
                    form: Form::Indices,
                    steps: sides.map(|side| side.step),
                };
                let stream = if tuning.beside && launches % 2 == 1 { &self.beside } else { &self.stream };
                // SAFETY: the indices are in bounds, and what they name is the caller's promise.
                unsafe { self.launch(op, entered, stream, kernel, list, shape, places, tuning)? };
                (done, launches) = (done + now, launches + 1);
                portion = match used {
                    // Where nothing has to be written there is nothing to wait for either.
                    0 => most,
                    _ => portion.saturating_mul(tuning.growth.max(1)).min(max_batch),
                };
            }
            let joined = if tuning.beside && launches > 1 { self.join(entered) } else { Ok(()) };
            joined
                .and_then(|()| self.stream.record(entered, &list.read))
                .map_err(|error| failed(op, error))?;
        }
        Ok(())
    }

    /// Launches over one list. `places` are where in it the indices of each side begin, plus one; 0 for none.
    ///
    /// # Safety
    /// As for [`Gpu::copy`], for the runs that the list says.
    #[allow(clippy::too_many_arguments, reason = "one launch is all of these")]
    unsafe fn launch(
        &self,
        op: &'static str,
        entered: &Entered<'_>,
        stream: &Stream,
        kernel: &Function,
        list: &List,
        shape: Shape,
        places: [u64; 2],
        tuning: &Tuning,
    ) -> Result<()> {
        if shape.units == 0 {
            return Ok(());
        }
        // What was written around the cache is there before the GPU is notified.
        fence(Ordering::SeqCst);
        let run = || {
            let per_block = match tuning.per_block {
                0 => per_block(shape.units, self.gpu.multiprocessors),
                chosen => chosen.min(THREADS),
            };
            let [first, second] = match shape.form {
                Form::Indices => places.map(|at| if at == 0 { 0 } else { list.device + at - 1 }),
                _ => [list.device, 0],
            };
            let Shape { units, from, to, len, parts_log2, part, scale_log2, form, steps } = shape;
            let form = form as u32;
            let mut arguments: [*mut c_void; 13] = [
                argument(&first),
                argument(&units),
                argument(&from),
                argument(&to),
                argument(&len),
                argument(&parts_log2),
                argument(&part),
                argument(&scale_log2),
                argument(&per_block),
                argument(&form),
                argument(&second),
                argument(&steps[0]),
                argument(&steps[1]),
            ];
            let blocks = units.div_ceil(per_block);
            // BYTES MOVE HERE
            // SAFETY: these are the kernel's parameters, in its order and of its types; what it touches is the caller's promise.
            unsafe { stream.launch(entered, kernel, blocks, THREADS, &mut arguments) }
        };
        run().map_err(|error| failed(op, error))
    }
}

fn start_at<T>(list: &List, offset: usize) -> *mut T {
    list.start.wrapping_add(offset).cast()
}

fn argument<T>(value: &T) -> *mut c_void {
    ptr::from_ref(value).cast_mut().cast()
}

/// How many units a block takes: enough blocks that each multiprocessor has several, and few enough that reading the list
/// is not what they do.
fn per_block(units: u32, multiprocessors: u32) -> u32 {
    let warps = THREADS / 32;
    (units / (multiprocessors * 32)).next_multiple_of(warps).clamp(warps, 4 * warps)
}

impl Drop for Lane {
    fn drop(&mut self) {
        if fork::in_child() {
            return;
        }
        let Ok(entered) = self.gpu.enter("close a lane") else { return };
        // Freeing waits for the GPU. Where it refuses, the memory stays until the process ends.
        for list in self.lists.drain(..) {
            // SAFETY: the lane's own memory; the driver waits until the GPU has read it.
            let _ = unsafe { entered.cuda().free_host(list.start) };
        }
    }
}
