//! Starts several ranks on one GPU, as threads of a process or as processes, and ends them where they do not end by themselves.

use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use towline::DeviceStorage;
use towline::cuda::{Gpu, StreamHandle};
use towline_comm::{
    Communicator, Config, Memory, Stream, UniqueId, get_nccl_unique_id, mem_alloc_on, use_stream,
};
use towline_sys::nccl::Nccl;

use super::say;

/// The first version that takes a GPU more than once.
const SEVERAL: u32 = 23000;
/// The test, the rank (or all) and how many there are, and the ids of two groups.
const ROLE: &str = "TOWLINE_TEST_RANK";

/// The ranks of a test are ended after that.
const LIMIT: Duration = Duration::from_secs(25);

/// How ranks are spread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spread {
    Threads(usize),
    Processes(usize),
}

/// One rank, as its test sees it.
pub(super) struct Seat {
    pub(super) rank: usize,
    pub(super) nranks: usize,
    pub(super) spread: Spread,
    pub(super) id: UniqueId,
    pub(super) other_id: UniqueId,
    pub(super) stream: StreamHandle,
    begun: Instant,
    /// Where ranks of one process wait for each other without the GPU.
    meeting: Arc<Barrier>,
}

impl Seat {
    /// Joins the group; calls go into this rank's own stream.
    pub(super) fn join(&self, config: Config) -> Communicator {
        let config = Config { gpu: Some(0), ..config };
        self.step("init", || Communicator::init(self.nranks, self.rank, &self.id, config).unwrap())
    }

    /// Waits for the other ranks of this process, on the host. Freeing memory waits for all that runs on the GPU in this
    /// process: a rank that frees must not be waited for by one whose kernel runs already.
    pub(super) fn meet(&self) {
        if let Spread::Threads(_) = self.spread {
            self.meeting.wait();
        }
    }

    /// Says what a step was and how long it took.
    pub(super) fn step<T>(&self, name: &str, work: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let done = work();
        let (took, at) = (begun.elapsed().as_secs_f64() * 1e3, self.begun.elapsed().as_secs_f64());
        self.tell(&format!("{name}: {took:.1} ms (at {at:.2} s)"));
        done
    }

    pub(super) fn tell(&self, text: &str) {
        say(format!("rank {} of {}, {:?}: {text}", self.rank, self.nranks, self.spread));
    }

    pub(super) fn memory(&self, comm: &Communicator, values: &[f32]) -> Memory {
        let memory = comm.memory(DeviceStorage::new(values.len() * 4, 0).unwrap()).unwrap();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        memory.write_at(0, &bytes).unwrap();
        memory
    }
}

pub(super) fn patience(seconds: u64) -> Config {
    Config { timeout: Duration::from_secs(seconds), ..Config::default() }
}

/// Runs a test's ranks, each of these ways; where this machine's NCCL takes a GPU only once, says so.
pub(super) fn ranks(test: &str, ways: &[Spread], rank: impl Fn(&Seat) + Sync) {
    if let Ok(role) = std::env::var(ROLE) {
        return play(test, &role, rank);
    }
    let Some(nccl) = super::machine(test) else { return };
    if nccl.version() < SEVERAL {
        let version = nccl.version_text();
        let why = format!("NCCL {version} takes a GPU once; 2.30 is the first that takes it more often");
        return towline_testkit::skip::skip(test, "nccl-ranks", &why);
    }
    // One group after the other: kernels that wait for each other on one GPU would wait for the other groups' turns too.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock();
    let mut failed = Vec::new();
    for way in ways {
        let processes = matches!(way, Spread::Processes(_));
        if processes && nccl.is_fake() {
            towline_testkit::skip::skip(test, "nccl-ranks", "the fake's ranks are threads of one process");
            continue;
        }
        let begun = Instant::now();
        let wrong = start(test, *way, &nccl);
        let took = begun.elapsed().as_secs_f64();
        say(format!("{test}, {way:?}: {} in {took:.1} s", wrong.as_deref().unwrap_or("right")));
        failed.extend(wrong.map(|wrong| format!("{way:?}: {wrong}")));
    }
    assert!(failed.is_empty(), "{failed:?}");
}

/// Starts the processes of a group, waits for them, and says what went wrong.
fn start(test: &str, way: Spread, nccl: &Nccl) -> Option<String> {
    // This process lives until all have joined, as NCCL wants it of the one that makes an id.
    let ids = [get_nccl_unique_id().unwrap(), get_nccl_unique_id().unwrap()];
    let (count, each) = match way {
        Spread::Threads(ranks) => (1, format!("all {ranks}")),
        Spread::Processes(ranks) => (ranks, ranks.to_string()),
    };
    let spawn = |number: usize| {
        let place = if count == 1 { each.clone() } else { format!("{number} {each}") };
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(ROLE, format!("{place} {} {}", ids[0], ids[1]))
            .env("TOWLINE_NCCL", nccl.path())
            .env("NCCL_MULTI_RANK_GPU_ENABLE", "1")
            // Each rank's kernels wait for the others': all of them must fit on the GPU together, and no two may share a queue.
            .env("NCCL_MAX_CTAS", "8")
            .env("CUDA_DEVICE_MAX_CONNECTIONS", "32")
            .stdin(Stdio::null())
            .spawn()
            .unwrap()
    };
    let mut children: Vec<Child> = (0..count).map(spawn).collect();
    let deadline = Instant::now() + LIMIT;
    let mut wrong = Vec::new();
    while !children.is_empty() {
        children.retain_mut(|child| match child.try_wait().unwrap() {
            Some(status) if status.success() || is_killed(status) => false,
            Some(status) => {
                wrong.push(format!("{status}"));
                false
            }
            None => true,
        });
        if Instant::now() >= deadline {
            for child in &mut children {
                wrong.push(format!("a process has not ended in {} s", LIMIT.as_secs()));
                let _ = child.kill();
                let _ = child.wait();
            }
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    (!wrong.is_empty()).then(|| wrong.join(", "))
}

/// A rank that ends itself so is meant to.
fn is_killed(status: std::process::ExitStatus) -> bool {
    std::os::unix::process::ExitStatusExt::signal(&status) == Some(libc::SIGKILL)
}

/// What a process that was started for it does.
fn play(test: &str, role: &str, rank: impl Fn(&Seat) + Sync) {
    let words: Vec<&str> = role.split(' ').collect();
    let [number, nranks, id, other] = words[..] else { panic!("{test}: {role}") };
    let nranks: usize = nranks.parse().unwrap();
    let (begun, meeting) = (Instant::now(), Arc::new(Barrier::new(nranks)));
    let seat = |rank, spread| Seat {
        rank,
        nranks,
        spread,
        id: id.parse().unwrap(),
        other_id: other.parse().unwrap(),
        stream: stream(),
        begun,
        meeting: Arc::clone(&meeting),
    };
    if let Ok(number) = number.parse() {
        return run(seat(number, Spread::Processes(nranks)), &rank);
    }
    std::thread::scope(|scope| {
        for number in 0..nranks {
            let (rank, seat) = (&rank, seat(number, Spread::Threads(nranks)));
            scope.spawn(move || run(seat, rank));
        }
    });
}

fn run(seat: Seat, rank: &(impl Fn(&Seat) + Sync)) {
    let stream = seat.stream;
    // SAFETY: the stream is of that GPU, and never destroyed.
    use_stream(Some(Stream::by(move |job| unsafe { job.on(stream) })));
    // Allocations and frees wait for what runs on the GPU: the first ones come before any rank waits for another.
    drop(mem_alloc_on(0, 4096));
    rank(&seat);
}

/// A stream of its own, which is kept: ranks that share one would wait for each other in it.
fn stream() -> StreamHandle {
    let gpu = Gpu::open(0).unwrap();
    let stream: &'static _ = Box::leak(Box::new(gpu.enter("test").unwrap().stream(0).unwrap()));
    stream.handle()
}
