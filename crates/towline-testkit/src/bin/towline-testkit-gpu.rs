//! Measures transfers between two processes that use one GPU, beside what the GPU does without the library, in turns.
//!
//! ```text
//! nvcc -arch=sm_90 -ptx crates/towline-testkit/examples/gpu-copy/bare.cu -o bare.ptx
//! cargo run --release -p towline-testkit --bin towline-testkit-gpu -- bare.ptx [whole] [paged] [host] [sockets]
//! ```
//!
//! Every figure is the median from the host's call to the end as the host sees it, lists included. The bare kernel's list of
//! pointers is ready in pinned memory; its upload counts. Every shape is verified before it is measured.
#![allow(unsafe_code, reason = "launches kernels")]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program that measures and prints")]

use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::time::Instant;

use towline::cuda::Gpu;
use towline::memory::{DeviceStorage, PinnedStorage};
use towline::{Access, Endpoint, Layout, MemoryDescription, Registered, Remote, Routing, Storage, Ticket};
use towline_testkit::oracle::Stamp;
use towline_testkit::process::Process;
use towline_testkit::random::Random;
use towline_testkit::worker::storage;

const ROUNDS: usize = 31;
const MIB: usize = 1 << 20;
const THEIRS: Stamp = Stamp { region: 7, generation: 1 };

type Local = Registered<Arc<dyn Storage>>;

fn main() {
    let bare = std::env::args().nth(1);
    let gpu = Gpu::open(0).unwrap();
    println!("{} ({:?} cores)", gpu.name(), std::thread::available_parallelism());
    gpu.prepare().unwrap();
    // A fake has little memory.
    let size = if gpu.device().memory().unwrap() > 8 << 30 { 512 * MIB } else { 16 * MIB };
    let bench = Bench::new(gpu, bare.as_deref(), size);
    let parts: Vec<String> = std::env::args().skip(2).collect();
    let wanted = |part: &str| parts.is_empty() || parts.iter().any(|one| one == part);
    if wanted("whole") {
        bench.whole();
    }
    for kind in ["device", "exportable"] {
        if wanted("paged") {
            bench.paged(kind);
        }
    }
    if wanted("host") {
        bench.host();
    }
    if wanted("sockets") {
        bench.sockets();
    }
}

struct Bench {
    gpu: Arc<Gpu>,
    user: Endpoint,
    owner: std::cell::RefCell<Process>,
    size: usize,
    bare: Option<String>,
}

/// Medians of two things that are done in turns.
fn turns(mut ours: impl FnMut(), mut limit: impl FnMut()) -> (f64, f64) {
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS + 5 {
        for (at, work) in [&mut ours as &mut dyn FnMut(), &mut limit].into_iter().enumerate() {
            let start = Instant::now();
            work();
            if round >= 5 {
                times[at].push(start.elapsed().as_secs_f64());
            }
        }
    }
    let [ours, limit] = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    });
    (ours, limit)
}

fn show(name: &str, bytes: usize, (ours, limit): (f64, f64), what: &str) {
    let rate = |time: f64| bytes as f64 / time / 1e9;
    println!(
        "{name:44} {:8.1} GB/s ({:8.1} us)   {what}: {:8.1} GB/s ({:8.1} us)   ratio {:.3}",
        rate(ours),
        ours * 1e6,
        rate(limit),
        limit * 1e6,
        limit / ours
    );
}

impl Bench {
    fn new(gpu: Arc<Gpu>, bare: Option<&str>, size: usize) -> Bench {
        let user = Endpoint::open("user").unwrap();
        let owner = Process::open("owner", "").into();
        let bare = bare.map(|path| std::fs::read_to_string(path).unwrap());
        Bench { gpu, user, owner, size, bare }
    }

    /// A region of the owner, as the user reaches it by that path.
    fn remote(&self, kind: &str, path: &str) -> Remote {
        let mut owner = self.owner.borrow_mut();
        let id = owner.must(&format!("register {} {kind} read+write", self.size)).number(0);
        owner.must(&format!("fill {id} {} {}", THEIRS.region, THEIRS.generation));
        let ticket: Ticket = owner.must(&format!("ticket {id}")).text(0).parse().unwrap();
        let routing = Routing::default().require(path).unwrap();
        let start = Instant::now();
        let remote = self.user.import_with(&ticket, &routing).unwrap();
        println!("-- {kind} by {path}: imported in {:.0} us", start.elapsed().as_secs_f64() * 1e6);
        remote
    }

    fn local(&self, kind: &str) -> Local {
        self.user.register(storage(self.size, kind).unwrap(), Access::NONE).unwrap()
    }

    fn read(&self, remote: &Remote, local: &Local, len: usize) {
        self.user.read(remote, local).at(0, 0, len as u64).start().unwrap().wait().unwrap();
    }

    fn write(&self, remote: &Remote, local: &Local, len: usize) {
        self.user.write(remote, local).at(0, 0, len as u64).start().unwrap().wait().unwrap();
    }

    fn lens(&self) -> impl Iterator<Item = usize> {
        let size = self.size;
        [4096, 64 << 10, MIB, 16 * MIB, 256 * MIB].into_iter().filter(move |len| *len <= size)
    }

    /// One run of bytes between GPU memory of two processes, beside the driver's copy on the same GPU.
    fn whole(&self) {
        println!("\ncontiguous, GPU to GPU of another process; limit: cuMemcpyAsync and a wait");
        let (one, two) =
            (DeviceStorage::new(self.size, 0).unwrap(), DeviceStorage::new(self.size, 0).unwrap());
        let entered = self.gpu.enter("bench").unwrap();
        let stream = entered.stream(0).unwrap();
        for kind in ["device", "exportable"] {
            let (remote, local) = (self.remote(kind, "cuda"), self.local("device"));
            self.read(&remote, &local, self.size);
            THEIRS.verify_storage(local.storage(), 0, self.size).unwrap();
            for len in self.lens() {
                let limit = || {
                    // SAFETY: both are as long as that.
                    unsafe { stream.copy(&entered, two.addr() as u64, one.addr() as u64, len) }.unwrap();
                    stream.synchronize(&entered).unwrap();
                };
                show(&format!("read {len}"), len, turns(|| self.read(&remote, &local, len), limit), "raw");
                show(&format!("write {len}"), len, turns(|| self.write(&remote, &local, len), limit), "raw");
            }
        }
    }

    /// Random blocks on both sides, beside a bare kernel.
    fn paged(&self, kind: &str) {
        println!("\npaged, random blocks on both sides, GPU to GPU of another process; limit: a bare kernel");
        let remote = self.remote(kind, "cuda");
        let local = self.local("device");
        let (one, two) =
            (DeviceStorage::new(self.size, 0).unwrap(), DeviceStorage::new(self.size, 0).unwrap());
        let entered = self.gpu.enter("bench").unwrap();
        let stream = entered.stream(0).unwrap();
        let lists = PinnedStorage::new(4 * MIB).unwrap();
        let copy = entered.allocate(4 * MIB).unwrap();
        let kernel = self.bare.as_ref().map(|text| {
            let text = CString::new(text.as_str()).unwrap();
            entered.module(&text).unwrap().function(c"bare_copy").unwrap()
        });
        for (count, len) in [
            (16384, 4 << 10),
            (81920, 4 << 10),
            (4096, 16 << 10),
            (10240, 32 << 10),
            (1024, 64 << 10),
            (256, MIB),
        ] {
            if count * len > self.size {
                continue;
            }
            let mut random = Random::new(count as u64);
            let mut ids = || {
                let mut all: Vec<u32> = (0..(self.size / len) as u32).collect();
                random.shuffle(&mut all);
                all.truncate(count);
                all
            };
            let (theirs, ours) = (ids(), ids());
            let pages = Layout::contiguous(self.size as u64, len as u64).unwrap();
            let read = || {
                let request = self.user.read(&remote, &local).blocks(&pages, &theirs, &pages, &ours);
                request.start().unwrap().wait().unwrap();
            };
            read();
            for (from, to) in theirs.iter().zip(&ours).step_by(97) {
                let mut found = vec![0; len];
                towline::MemoryAccess::read_at(local.storage(), *to as usize * len, &mut found).unwrap();
                let mut expected = vec![0; len];
                THEIRS.fill(u64::from(*from) * len as u64, &mut expected);
                assert_eq!(found, expected, "block {from} to {to}");
            }
            for (at, (from, to)) in theirs.iter().zip(&ours).enumerate() {
                let pair = [
                    one.addr() as u64 + u64::from(*from) * len as u64,
                    two.addr() as u64 + u64::from(*to) * len as u64,
                ];
                // SAFETY: the list has room for that many pairs.
                unsafe { lists.as_ptr().cast::<[u64; 2]>().add(at).write(pair) };
            }
            let (number, vectors) = (count as u32, (len / 16) as u32);
            let bare = || {
                let Some(kernel) = &kernel else { return };
                let mut arguments: [*mut c_void; 3] = [
                    std::ptr::from_ref(&copy).cast_mut().cast(),
                    std::ptr::from_ref(&number).cast_mut().cast(),
                    std::ptr::from_ref(&vectors).cast_mut().cast(),
                ];
                // SAFETY: the pairs are valid, and the arguments are the kernel's.
                unsafe {
                    stream.copy(&entered, copy, lists.device_address(), count * 16).unwrap();
                    stream.launch(&entered, kernel, 528, 256, &mut arguments).unwrap();
                }
                stream.synchronize(&entered).unwrap();
            };
            show(&format!("read {count} x {len}"), count * len, turns(read, bare), "bare");
            let write = || {
                let request = self.user.write(&remote, &local).blocks(&pages, &theirs, &pages, &ours);
                request.start().unwrap().wait().unwrap();
            };
            show(&format!("write {count} x {len}"), count * len, turns(write, bare), "bare");
            self.owner.borrow_mut().must("stats");
            // What was written is what had been read.
        }
    }

    /// Host memory of one process and GPU memory of the other, beside the bus.
    fn host(&self) {
        println!("\nhost memory and a GPU, in two processes; limit: cuMemcpyAsync from or to pinned memory");
        let (near, pinned) =
            (DeviceStorage::new(self.size, 0).unwrap(), PinnedStorage::new(self.size).unwrap());
        let entered = self.gpu.enter("bench").unwrap();
        let stream = entered.stream(0).unwrap();
        for (theirs, path, ours) in [
            ("shared", "mapped", "device"),
            ("pinned", "mapped", "device"),
            ("system", "cma", "device"),
            ("device", "cuda", "pinned"),
            ("device", "cuda", "shared"),
            ("device", "cuda", "system"),
        ] {
            let (remote, local) = (self.remote(theirs, path), self.local(ours));
            let start = Instant::now();
            self.read(&remote, &local, self.size);
            println!(
                "   first read of {} MiB: {:.1} ms",
                self.size / MIB,
                start.elapsed().as_secs_f64() * 1e3
            );
            THEIRS.verify_storage(local.storage(), 0, self.size).unwrap();
            let (from, to) = match ours {
                "device" => (pinned.device_address(), near.addr() as u64),
                _ => (near.addr() as u64, pinned.device_address()),
            };
            for len in self.lens().filter(|len| [4096, MIB, 256 * MIB, self.size].contains(len)) {
                let limit = || {
                    // SAFETY: both are as long as that.
                    unsafe { stream.copy(&entered, to, from, len) }.unwrap();
                    stream.synchronize(&entered).unwrap();
                };
                let name = format!("read {len}, {theirs} to {ours}");
                show(&name, len, turns(|| self.read(&remote, &local, len), limit), "bus");
            }
            let (count, len) = ((64 * MIB).min(self.size) / (16 << 10), 16 << 10);
            let mut ids: Vec<u32> = (0..(self.size / len) as u32).collect();
            Random::new(5).shuffle(&mut ids);
            ids.truncate(count);
            let pages = Layout::contiguous(self.size as u64, len as u64).unwrap();
            let read = || {
                let request = self.user.read(&remote, &local).blocks(&pages, &ids, &pages, &ids);
                request.start().unwrap().wait().unwrap();
            };
            let limit = || {
                // SAFETY: both are as long as that.
                unsafe { stream.copy(&entered, to, from, count * len) }.unwrap();
                stream.synchronize(&entered).unwrap();
            };
            show(
                &format!("read {count} x {len}, {theirs} to {ours}"),
                count * len,
                turns(read, limit),
                "bus",
            );
        }
    }

    /// GPU to GPU over sockets, beside host memory over the same.
    fn sockets(&self) {
        println!("\nover sockets; limit: the same between host memory");
        for path in ["tcp", "unix"] {
            let (remote, local) = (self.remote("device", path), self.local("device"));
            let (plain, target) = (self.remote("system", path), self.local("system"));
            self.read(&remote, &local, self.size);
            THEIRS.verify_storage(local.storage(), 0, self.size).unwrap();
            for len in self.lens().filter(|len| *len >= MIB) {
                let measured = turns(|| self.read(&remote, &local, len), || self.read(&plain, &target, len));
                show(&format!("{path} read {len}"), len, measured, "host");
                let measured =
                    turns(|| self.write(&remote, &local, len), || self.write(&plain, &target, len));
                show(&format!("{path} write {len}"), len, measured, "host");
            }
        }
    }
}
