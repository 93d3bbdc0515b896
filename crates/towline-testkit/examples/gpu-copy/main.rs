//! Measures copies on a GPU beside a bare kernel and beside the driver's own copies, in one run.
//!
//! ```text
//! nvcc -arch=sm_90 -ptx crates/towline-testkit/src/gpu/bare.cu -o bare.ptx
//! cargo run --release -p towline-testkit --example gpu-copy -- bare.ptx [tune]
//! ```
//!
//! Every figure is the median from the host's call to the end as the host sees it, lists included. The bare kernel's list of
//! pointers is ready in pinned memory; its upload counts.
#![allow(unsafe_code, reason = "launches kernels")]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program that measures and prints")]

use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::time::Instant;

use towline::cuda::{Blocks, CopyOptions, Gpu, Run, Tuning};
use towline::memory::{DeviceStorage, PinnedStorage};
use towline::{Indices, MemoryAccess, MemoryDescription};
use towline_sys::cuda::{Function, HostFlags, Stream};
use towline_testkit::random::Random;

const ROUNDS: usize = 25;
const MIB: u64 = 1 << 20;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let bare = arguments.next();
    let tune = arguments.next().is_some();
    let gpu = Gpu::open(0).unwrap();
    println!("{} ({:?} cores)", gpu.name(), std::thread::available_parallelism());
    let start = Instant::now();
    gpu.prepare().unwrap();
    println!("the kernel was ready after {:.1} ms", start.elapsed().as_secs_f64() * 1e3);
    let machine = Machine::new(gpu, bare.as_deref());
    if tune {
        machine.writing();
    }
    machine.blocks(tune);
    machine.host(tune);
    machine.whole();
    machine.few();
}

struct Machine {
    gpu: Arc<Gpu>,
    bare: Option<Function>,
    stream: Stream,
    size: u64,
    one: DeviceStorage,
    two: DeviceStorage,
    pinned: PinnedStorage,
    /// Pinned and device memory for the bare kernel's list.
    list: *mut [u64; 2],
    copy: u64,
}

fn median(mut work: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..ROUNDS + 5)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64()
        })
        .skip(5)
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

impl Machine {
    fn new(gpu: Arc<Gpu>, bare: Option<&str>) -> Machine {
        let size = if gpu.device().memory().unwrap() > 64 << 30 { 4096 * MIB } else { 300 * MIB };
        let entered = gpu.enter("bench").unwrap();
        let bare = bare.map(|path| {
            let text = CString::new(std::fs::read_to_string(path).unwrap()).unwrap();
            entered.module(&text).unwrap().function(c"bare_copy").unwrap()
        });
        let stream = entered.stream(0).unwrap();
        let list = entered.allocate_host(4 << 20, HostFlags::default()).unwrap().cast();
        let copy = entered.allocate(4 << 20).unwrap();
        drop(entered);
        let start = Instant::now();
        let pinned = PinnedStorage::new((size / 8) as usize).unwrap();
        println!("{} MiB pinned in {:.1} ms", size / 8 / MIB, start.elapsed().as_secs_f64() * 1e3);
        let device = || DeviceStorage::new(size as usize, 0).unwrap();
        let (one, two) = (device(), device());
        one.memset(1, 0, size as usize).unwrap();
        two.memset(2, 0, size as usize).unwrap();
        Machine { gpu, bare, stream, size, one, two, pinned, list, copy }
    }

    fn bare(&self, runs: &[Run]) -> Option<f64> {
        let function = self.bare.as_ref()?;
        let entered = self.gpu.enter("bench").unwrap();
        for (at, run) in runs.iter().enumerate() {
            // SAFETY: the list has room for 262,144 runs.
            unsafe { self.list.add(at).write([run.from, run.to]) };
        }
        let (count, vectors) = (runs.len() as u32, (runs[0].len / 16) as u32);
        Some(median(|| {
            let mut arguments: [*mut c_void; 3] = [
                std::ptr::from_ref(&self.copy).cast_mut().cast(),
                std::ptr::from_ref(&count).cast_mut().cast(),
                std::ptr::from_ref(&vectors).cast_mut().cast(),
            ];
            // SAFETY: the runs are valid, and the arguments are the kernel's.
            unsafe {
                self.stream.copy(&entered, self.copy, self.list.addr() as u64, runs.len() * 16).unwrap();
                self.stream.launch(&entered, function, 528, 256, &mut arguments).unwrap();
            }
            self.stream.synchronize(&entered).unwrap();
        }))
    }

    fn driver(&self, runs: &[Run]) -> f64 {
        let entered = self.gpu.enter("bench").unwrap();
        median(|| {
            for run in runs {
                // SAFETY: the runs are valid.
                unsafe { self.stream.copy(&entered, run.to, run.from, run.len as usize) }.unwrap();
            }
            self.stream.synchronize(&entered).unwrap();
        })
    }

    fn ours(&self, runs: &[Run], host: bool, tuning: Option<&Tuning>) -> f64 {
        let options = CopyOptions { bytes: runs.iter().map(|run| run.len).sum(), host, after: None };
        median(|| {
            // SAFETY: the runs are valid.
            let copying = unsafe { self.gpu.copy_tuned(runs.iter().copied(), &options, tuning) }.unwrap();
            assert!(copying.wait(None).unwrap());
        })
    }

    /// The same blocks by their indices.
    fn indexed(&self, runs: &[Run], tuning: &Tuning) -> f64 {
        let (from, to) = (self.one.addr() as u64, self.two.addr() as u64);
        let len = runs[0].len;
        let sources: Vec<u32> = runs.iter().map(|run| ((run.from - from) / len) as u32).collect();
        let targets: Vec<u32> = runs.iter().map(|run| ((run.to - to) / len) as u32).collect();
        let side = |base, indices| Blocks { base, step: len, count: self.size / len, indices };
        let (from, to) = (side(from, Indices::U32(&sources)), side(to, Indices::U32(&targets)));
        median(|| {
            // SAFETY: the blocks are valid.
            let copying =
                unsafe { self.gpu.copy_blocks_tuned(&from, &to, len, &CopyOptions::default(), tuning) }
                    .unwrap();
            assert!(copying.wait(None).unwrap());
        })
    }

    /// How fast the CPU writes lists.
    fn writing(&self) {
        let entered = self.gpu.enter("bench").unwrap();
        let len = 131_072;
        let pinned = entered.allocate_host(len, HostFlags::default()).unwrap();
        let flags = HostFlags { write_combined: true, ..HostFlags::default() };
        let combined = entered.allocate_host(len, flags).unwrap();
        let mut plain = vec![0u8; len];
        let from = vec![7u8; len];
        for (name, into, read) in [
            ("plain memory", plain.as_mut_ptr(), false),
            ("pinned memory", pinned, false),
            ("pinned memory, read by the GPU before", pinned, true),
            ("around the cache", combined, false),
            ("around the cache, read by the GPU before", combined, true),
        ] {
            let mut spent = 0.0;
            median(|| {
                if read {
                    // SAFETY: all are as long as that.
                    unsafe { self.stream.copy(&entered, self.copy, into.addr() as u64, len) }.unwrap();
                    self.stream.synchronize(&entered).unwrap();
                }
                let start = Instant::now();
                // SAFETY: as above.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into, len) };
                std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
                spent = start.elapsed().as_secs_f64();
            });
            println!("{len} bytes into {name}: {:.1} microseconds", spent * 1e6);
        }
    }

    /// Random blocks on both sides.
    fn runs(&self, count: u64, len: u64, from: (u64, u64), to: (u64, u64)) -> Vec<Run> {
        let mut random = Random::new(count ^ len);
        let mut ids = |room: u64| {
            let mut all: Vec<u64> = (0..room / len).collect();
            random.shuffle(&mut all);
            all.truncate(count as usize);
            all
        };
        let (sources, targets) = (ids(from.1), ids(to.1));
        sources
            .into_iter()
            .zip(targets)
            .map(|(source, target)| Run { from: from.0 + source * len, to: to.0 + target * len, len })
            .collect()
    }

    fn on(&self, storage: &DeviceStorage) -> (u64, u64) {
        (storage.addr() as u64, self.size)
    }

    fn blocks(&self, tune: bool) {
        println!("\nGPU to GPU, random blocks: GB/s (microseconds)");
        for (count, len) in [
            (16384, 4 << 10),
            (81920, 4 << 10),
            (4096, 16 << 10),
            (10240, 32 << 10),
            (1024, 64 << 10),
            (256, 1 << 10),
            (256, 16 << 10),
            (256, 256 << 10),
            (256, 1 << 20),
            (512, 5 << 20),
        ] {
            if count * len > self.size {
                continue;
            }
            let runs = self.runs(count, len, self.on(&self.one), self.on(&self.two));
            let bytes = (count * len) as f64;
            let show = |name: &str, time: f64, limit: Option<f64>| {
                let ratio = limit.map_or(String::new(), |limit| format!("  {:.2} of bare", limit / time));
                println!(
                    "{count:6} x {len:7}  {name:34} {:7.0} ({:7.1}){ratio}",
                    bytes / time / 1e9,
                    time * 1e6
                );
            };
            let limit = self.bare(&runs);
            if let Some(limit) = limit {
                show("bare kernel", limit, None);
            }
            show("ours", self.ours(&runs, false, None), limit);
            if let Some(again) = self.bare(&runs) {
                show("bare kernel again", again, None);
            }
            show("ours, by index", self.indexed(&runs, &Tuning::default()), limit);
            let mut mixed = runs.clone();
            mixed[count as usize / 2].len -= 1;
            show("ours, one block shorter", self.ours(&mixed, false, None), limit);
            let shifted: Vec<Run> =
                runs.iter().map(|run| Run { len: len - 32, from: run.from + 3, ..*run }).collect();
            show("ours, shifted by 3 bytes", self.ours(&shifted, false, None), limit);
            if !tune {
                continue;
            }
            let base = Tuning::default();
            for first in [1024, 2048, 8192, 65536] {
                let tuning = Tuning { first, ..base };
                show(&format!("index, first {first}"), self.indexed(&runs, &tuning), limit);
                show(&format!("runs, first {first}"), self.ours(&runs, false, Some(&tuning)), limit);
            }
            for per_block in [8, 16, 32, 64] {
                let tuning = Tuning { per_block, ..base };
                show(&format!("index, {per_block} a block"), self.indexed(&runs, &tuning), limit);
            }
            for unit in [2048, 8192, 16384, 65536] {
                let tuning = Tuning { unit, ..base };
                show(&format!("index, unit {unit}"), self.indexed(&runs, &tuning), limit);
            }
        }
    }

    fn host(&self, tune: bool) {
        println!("\npinned host memory and GPU: GB/s (microseconds)");
        let pinned = (self.pinned.device_address(), self.size / 8);
        let gpu = self.on(&self.one);
        for (count, len) in
            [(1, 256 * MIB), (16384, 4 << 10), (4096, 16 << 10), (1024, 64 << 10), (64, MIB), (32, 4 * MIB)]
        {
            if count * len > pinned.1 {
                continue;
            }
            for (way, from, to) in [("to GPU", pinned, gpu), ("to host", gpu, pinned)] {
                let runs = self.runs(count, len, from, to);
                let whole = [Run { len: count * len, from: from.0, to: to.0 }];
                let bytes = (count * len) as f64;
                let limit = self.driver(&whole);
                let show = |name: &str, time: f64| {
                    let (rate, ratio) = (bytes / time / 1e9, limit / time);
                    println!(
                        "{count:6} x {len:9} {way:8} {name:22} {rate:6.1} ({:8.1})  {ratio:.2} of one copy",
                        time * 1e6
                    );
                };
                show("ours", self.ours(&runs, true, None));
                if tune {
                    show("by the kernel", self.ours(&runs, true, Some(&Tuning::default())));
                    if count <= 1024 {
                        show("by the driver", self.driver(&runs));
                    }
                }
            }
        }
    }

    fn whole(&self) {
        println!("\none run, GPU to GPU: microseconds");
        for len in [4 << 10, 64 << 10, MIB, 16 * MIB, 256 * MIB] {
            let run = [Run { from: self.one.addr() as u64, to: self.two.addr() as u64, len }];
            let (driver, ours) = (self.driver(&run), self.ours(&run, false, None));
            let kernel = self.ours(&run, false, Some(&Tuning::default()));
            println!(
                "{len:10}  driver {:7.1}  ours {:7.1}  our kernel {:7.1}",
                driver * 1e6,
                ours * 1e6,
                kernel * 1e6
            );
        }
    }

    fn few(&self) {
        println!("\nfew runs, GPU to GPU: microseconds by the driver / by our kernel");
        for len in [4 << 10, 256 << 10, 4 * MIB, 64 * MIB] {
            for count in [1, 2, 3, 4, 8, 16] {
                if count * len > self.size {
                    continue;
                }
                let runs = self.runs(count, len, self.on(&self.one), self.on(&self.two));
                let kernel = self.ours(&runs, false, Some(&Tuning::default()));
                print!("{count} x {len}: {:.1} / {:.1}   ", self.driver(&runs) * 1e6, kernel * 1e6);
            }
            println!();
        }
    }
}
