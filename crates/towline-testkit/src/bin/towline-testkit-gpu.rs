//! Measures transfers between two processes that use one GPU, beside what the GPU does without the library, in turns.
//!
//! ```text
//! cargo run --release -p towline-testkit --bin towline-testkit-gpu
//! ```
//!
//! Every figure is the median from the host's call to the end as the host sees it, lists included. The bare kernel's list of
//! pointers is ready in pinned memory; its upload counts. Every shape is verified before it is measured.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program that measures and prints")]

use std::sync::Arc;
use std::time::Instant;

use towline::cuda::Gpu;
use towline::{Access, Endpoint, Layout, Registered, Remote, Routing, Storage, Ticket};
use towline_testkit::gpu::Bare;
use towline_testkit::oracle::Stamp;
use towline_testkit::process::Process;
use towline_testkit::random::Random;
use towline_testkit::worker::storage;

const ROUNDS: usize = 31;
const MIB: usize = 1 << 20;
const MOST_BLOCKS: usize = 81920;
const THEIRS: Stamp = Stamp { region: 7, generation: 1 };

type Local = Registered<Arc<dyn Storage>>;

fn main() {
    // Another kernel than the one that comes along.
    let bare = std::env::args().nth(1);
    let gpu = Gpu::open(0).unwrap();
    println!("{} ({:?} cores)", gpu.name(), std::thread::available_parallelism());
    gpu.prepare().unwrap();
    // A fake has little memory.
    let size = if gpu.device().memory().unwrap() > 8 << 30 { 512 * MIB } else { 16 * MIB };
    let bench = Bench::new(&gpu, bare.as_deref(), size);
    bench.whole();
    for kind in ["device", "exportable"] {
        bench.paged(kind);
    }
    bench.host();
    bench.sockets();
}

struct Bench {
    user: Endpoint,
    owner: std::cell::RefCell<Process>,
    size: usize,
    bare: Bare,
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
    fn new(gpu: &Arc<Gpu>, bare: Option<&str>, size: usize) -> Bench {
        let user = Endpoint::open("user").unwrap();
        let owner = Process::open("owner", "").into();
        let bare = bare.map(|path| std::fs::read_to_string(path).unwrap());
        let bare = Bare::new(gpu, size, MOST_BLOCKS, bare.as_deref()).unwrap();
        if let Some(why) = bare.no_kernel() {
            println!("no bare kernel: {why}");
        }
        Bench { user, owner, size, bare }
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
        let limits = self.bare.enter().unwrap();
        for kind in ["device", "exportable"] {
            let (remote, local) = (self.remote(kind, "cuda"), self.local("device"));
            self.read(&remote, &local, self.size);
            THEIRS.verify_storage(local.storage(), 0, self.size).unwrap();
            for len in self.lens() {
                let limit = || limits.on_gpu(len).unwrap();
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
        let limits = self.bare.enter().unwrap();
        let kernel = self.bare.no_kernel().is_none();
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
            limits.prepare(&theirs, &ours, len).unwrap();
            let bare = || {
                if kernel {
                    limits.paged().unwrap();
                }
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
        let limits = self.bare.enter().unwrap();
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
            let to_gpu = ours == "device";
            for len in self.lens().filter(|len| [4096, MIB, 256 * MIB, self.size].contains(len)) {
                let limit = || limits.over_the_bus(to_gpu, len).unwrap();
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
            let limit = || limits.over_the_bus(to_gpu, count * len).unwrap();
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
