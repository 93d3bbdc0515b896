//! NCCL for real, on whatever GPU this machine has: what runs, and what it costs over the bare C calls; with one rank, and with
//! several on that GPU where the NCCL that is found allows it. `TOWLINE_REQUIRE=cuda` makes a machine without a GPU a failure,
//! `TOWLINE_REQUIRE=nccl-ranks` an NCCL that takes a GPU only once.
#![allow(clippy::unwrap_used, clippy::panic)]
#![allow(unsafe_code, reason = "calls NCCL directly, to compare")]

mod figures;
mod ranks;
mod several;

use std::io::Write;
use std::time::{Duration, Instant};

use towline::cuda::{Gpu, StreamHandle};
use towline::{DeviceStorage, Dtype, Kind, MemoryDescription, create_buffer};
use towline_comm::{
    Communicator, Config, Memory, Op, Progress, Scalar, Stream, WaitSignal, WindowFlag, get_nccl_unique_id,
    group, in_stream, mem_alloc_on,
};
use towline_sys::nccl::{Call, Config as RawConfig, Nccl, Slot};

/// The GPU and NCCL of this machine; where there are none, the test is skipped.
fn machine(test: &str) -> Option<Nccl> {
    let missing = match (Gpu::open(0), Nccl::load()) {
        (Ok(_), Ok(nccl)) => return Some(nccl),
        (Err(error), _) => error.to_string(),
        (_, Err(error)) => error.to_string(),
    };
    towline_testkit::skip::skip(test, "cuda", &missing);
    None
}

fn say(text: String) {
    let _ = writeln!(std::io::stderr(), "FIGURE {text}");
}

fn alone() -> Communicator {
    let config = Config { timeout: Duration::from_secs(60), gpu: Some(0), ..Config::default() };
    Communicator::init(1, 0, &get_nccl_unique_id().unwrap(), config).unwrap()
}

fn filled(comm: &Communicator, len: usize) -> Memory {
    let memory = comm.memory(DeviceStorage::new(len, 0).unwrap()).unwrap();
    let bytes: Vec<u8> = (0..len / 4).flat_map(|index| (index as f32).to_ne_bytes()).collect();
    memory.write_at(0, &bytes).unwrap();
    memory
}

fn floats(memory: &Memory) -> Vec<f32> {
    let mut bytes = vec![0; memory.len()];
    memory.read_at(0, &mut bytes).unwrap();
    bytes.chunks_exact(4).map(|word| f32::from_ne_bytes(word.try_into().unwrap())).collect()
}

#[test]
fn every_collective_of_one_rank_gives_what_it_should() {
    let Some(nccl) = machine("every_collective_of_one_rank_gives_what_it_should") else { return };
    say(format!("NCCL {} from {} ({})", nccl.version_text(), nccl.path().display(), nccl.origin()));
    let comm = alone();
    let send = filled(&comm, 1 << 20);
    let wanted: Vec<f32> = (0..1 << 18).map(|index| index as f32).collect();
    let fresh = || comm.memory(DeviceStorage::new(1 << 20, 0).unwrap()).unwrap();
    let check = |name: &'static str, call: &dyn Fn(&Memory) -> towline_comm::Result<()>| {
        let recv = fresh();
        comm.follow(name, |_| call(&recv)).unwrap().wait().unwrap();
        assert!(floats(&recv) == wanted, "{name}");
    };
    for op in [Op::Sum, Op::Prod, Op::Max, Op::Min, Op::Avg, Op::ScaledSum(Scalar::Float(1.0))] {
        check("all_reduce", &|recv| comm.all_reduce(&send, recv, Dtype::F32, op));
        check("reduce", &|recv| comm.reduce(&send, Some(recv), Dtype::F32, op, 0));
        check("reduce_scatter", &|recv| comm.reduce_scatter(&send, recv, Dtype::F32, op));
    }
    check("broadcast", &|recv| comm.broadcast(Some(&send), Some(recv), Dtype::F32, 0));
    check("all_gather", &|recv| comm.all_gather(&send, recv, Dtype::F32));
    if nccl.version() >= 22800 {
        check("all_to_all", &|recv| comm.all_to_all(&send, recv, Dtype::F32));
        check("gather", &|recv| comm.gather(&send, Some(recv), Dtype::F32, 0));
        check("scatter", &|recv| comm.scatter(Some(&send), recv, Dtype::F32, 0));
    }
    let twice = fresh();
    let scaled = Op::ScaledSum(Scalar::Float(2.0));
    comm.follow("all_reduce", |comm| comm.all_reduce(&send, &twice, Dtype::F32, scaled))
        .unwrap()
        .wait()
        .unwrap();
    assert_eq!(floats(&twice)[1000], 2000.0);
    let recv = fresh();
    group(|| {
        comm.send(&send, Dtype::F32, 0)?;
        comm.recv(&recv, Dtype::F32, 0)
    })
    .unwrap();
    comm.synchronize().unwrap();
    assert!(floats(&recv) == wanted);
    comm.barrier().unwrap();

    let gpu = Gpu::open(0).unwrap();
    let stream: &'static _ = Box::leak(Box::new(gpu.enter("test").unwrap().stream(0).unwrap()));
    // SAFETY: a stream of that GPU that is never destroyed.
    let own = Stream::by(|job| unsafe { job.on(stream.handle()) });
    let recv = fresh();
    in_stream(Some(own), || comm.all_reduce(&send, &recv, Dtype::F32, Op::Sum)).unwrap();
    comm.synchronize().unwrap();
    assert!(floats(&recv) == wanted);
    comm.finalize().unwrap();
    comm.destroy();
}

#[test]
fn buffers_and_windows_are_registered_a_thousand_times_without_growth() {
    let Some(nccl) = machine("buffers_and_windows_are_registered_a_thousand_times_without_growth") else {
        return;
    };
    let comm = alone();
    let buffer = create_buffer(mem_alloc_on(0, 4 << 20).unwrap());
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/statm").unwrap();
        status.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
    };
    let thousand = || {
        let before = resident();
        for _ in 0..1000 {
            comm.register_buffer(buffer.clone()).unwrap().close();
        }
        resident().saturating_sub(before)
    };
    thousand();
    // The other tests use the process too: what is lost here is lost each time.
    let grown = (0..20).map(|_| thousand()).min().unwrap();
    say(format!("1000 registrations of a buffer grew the process by {grown} bytes"));
    assert!(grown < 64 << 10, "{grown}");
    assert_eq!(comm.open_handles().unwrap(), 0);

    let window = comm.register_window(buffer.clone(), WindowFlag::COLL_SYMMETRIC);
    match window {
        Ok(Some(window)) => {
            say(format!("a window: handle {:#x}", window.handle()));
            if nccl.version() >= 22902 {
                let memory = window.memory().unwrap();
                memory.write_at(0, b"put").unwrap();
                window.put_signal(0, 4096, &memory.part(0, 4).unwrap(), 0, 0).unwrap().wait().unwrap();
                comm.wait_signal(&[WaitSignal::from_rank(0)]).unwrap();
                comm.synchronize().unwrap();
                let mut bytes = [0; 3];
                memory.read_at(4096, &mut bytes).unwrap();
                assert_eq!(&bytes, b"put");
            } else {
                let error = comm.signal(0, 0, 0).unwrap_err();
                assert_eq!(error.kind(), Kind::Unsupported);
                say(format!("put with signal: {}", error.message()));
            }
            window.close();
            for _ in 0..100 {
                comm.register_window(buffer.clone(), WindowFlag::DEFAULT).unwrap().unwrap().close();
            }
        }
        Ok(None) => say("windows: NCCL gives none here".into()),
        Err(error) => panic!("{error}"),
    }
    let plain = comm.register_window(DeviceStorage::new(4 << 20, 0).unwrap(), WindowFlag::DEFAULT);
    // NCCL refuses such memory where there are other ranks to map it.
    say(format!("a window over cuMemAlloc, of one rank: {plain:?}"));
    drop(plain);
    assert_eq!(comm.open_handles().unwrap(), 0);
}

#[test]
fn a_communicator_that_does_not_block_is_polled_and_one_is_aborted() {
    if machine("a_communicator_that_does_not_block_is_polled_and_one_is_aborted").is_none() {
        return;
    }
    let config =
        Config { blocking: false, gpu: Some(0), timeout: Duration::from_secs(60), ..Config::default() };
    let comm = Communicator::init(1, 0, &get_nccl_unique_id().unwrap(), config).unwrap();
    let mut polls = 0;
    while comm.get_async_error().unwrap() == Progress::InProgress {
        polls += 1;
        std::thread::sleep(Duration::from_millis(1));
    }
    say(format!("not blocking: {polls} polls of 1 ms until init was done"));
    let memory = filled(&comm, 4096);
    comm.follow("all_reduce", |comm| comm.all_reduce(&memory, &memory, Dtype::F32, Op::Sum))
        .unwrap()
        .wait()
        .unwrap();
    comm.finalize().unwrap();
    comm.destroy();

    let comm = alone();
    let memory = filled(&comm, 4096);
    comm.all_reduce(&memory, &memory, Dtype::F32, Op::Sum).unwrap();
    comm.abort();
    assert!(!comm.is_valid());
    assert_eq!(comm.all_reduce(&memory, &memory, Dtype::F32, Op::Sum).unwrap_err().kind(), Kind::Invalid);

    // Ranks that do not come.
    let config = Config { timeout: Duration::from_secs(3), gpu: Some(0), ..Config::default() };
    let late = Config { blocking: false, ..config.clone() };
    let comm = Communicator::init(2, 0, &get_nccl_unique_id().unwrap(), late).unwrap();
    let error = comm.synchronize().unwrap_err();
    say(format!("a rank that does not come, not blocking: {error}"));
    assert_eq!(error.kind(), Kind::Timeout);
    comm.destroy();
    let error = Communicator::init(2, 0, &get_nccl_unique_id().unwrap(), config).unwrap_err();
    say(format!("a rank that does not come, blocking: {error}"));
    assert_eq!(error.kind(), Kind::Timeout);
}

/// What the steps of a registration cost by themselves, of which a bare one has none.
fn steps(gpu: &Gpu) {
    fn each(name: &str, mut work: impl FnMut()) {
        const TURNS: u32 = 100_000;
        let begun = Instant::now();
        for _ in 0..TURNS {
            work();
        }
        say(format!("step: {name}: {:.1} ns", begun.elapsed().as_secs_f64() * 1e9 / f64::from(TURNS)));
    }
    let (mutex, shared) = (parking_lot::Mutex::new(0u64), std::sync::Arc::new(0u64));
    let cuda = gpu.device().cuda();
    each("a look at the clock", || {
        std::hint::black_box(Instant::now());
    });
    each("a lock taken and given back", || *std::hint::black_box(&mutex).lock() += 1);
    each("a shared owner more and one less", || drop(std::hint::black_box(shared.clone())));
    each("memory of a small value taken and freed", || drop(std::hint::black_box(Box::new([0u64; 8]))));
    each("asking which context is current", || drop(std::hint::black_box(cuda.current_id())));
    each("entering a context that is current", || drop(std::hint::black_box(gpu.enter("test"))));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            each("entering a context that is not", || drop(std::hint::black_box(gpu.enter("test"))));
        });
    });
}

#[test]
fn registrations_leave_the_context_of_their_thread_alone() {
    let Some(nccl) = machine("registrations_leave_the_context_of_their_thread_alone") else { return };
    let comm = alone();
    let gpu = Gpu::open(0).unwrap();
    let cuda = gpu.device().cuda();
    let buffer = create_buffer(mem_alloc_on(0, 4 << 20).unwrap());
    let (address, len) = (buffer.addr() as u64, buffer.size());
    let entered = gpu.enter("test").unwrap();
    let slot = Slot::default();
    nccl.init(&slot, 1, &nccl.unique_id().unwrap(), 0, RawConfig::default()).unwrap();
    let raw = slot.comm().unwrap();
    // Memory that a collective has used has more to be given up than an entry in a list.
    let send = comm.memory(buffer.clone()).unwrap();
    let recv = comm.memory(DeviceStorage::new(4 << 20, 0).unwrap()).unwrap();
    for used in [false, true] {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!(cuda.current_id().unwrap(), 0, "a new thread has no context");
                let registered = comm.register_buffer(buffer.clone()).unwrap();
                assert_eq!(cuda.current_id().unwrap(), 0);
                if used {
                    comm.all_reduce(&send, &recv, Dtype::F32, Op::Sum).unwrap();
                    assert_eq!(cuda.current_id().unwrap(), 0);
                }
                registered.close();
                assert_eq!(cuda.current_id().unwrap(), 0);
                let window = comm.register_window(buffer.clone(), WindowFlag::COLL_SYMMETRIC).unwrap();
                assert_eq!(cuda.current_id().unwrap(), 0);
                drop(window);
                assert_eq!(cuda.current_id().unwrap(), 0);
            });
        });
    }
    // What NCCL itself does to a thread, which decides whether we must ask.
    let (registers, deregisters) = std::thread::scope(|scope| {
        let bare = scope.spawn(|| {
            // SAFETY: the communicator is alive, and so is the memory.
            unsafe {
                let handle = nccl.register(raw, address, len);
                let registers = cuda.current_id().unwrap() != 0;
                let plainly = handle.is_ok() && !registers;
                if nccl.registers_without_context() {
                    assert!(plainly, "{handle:?}");
                }
                let Ok(handle) = handle else { return (true, false) };
                nccl.deregister(raw, handle).unwrap();
                (!plainly, cuda.current_id().unwrap() != 0)
            }
        });
        bare.join().unwrap()
    });
    say(format!(
        "NCCL {}: to register needs or leaves a context: {registers}; to deregister leaves one: {deregisters}",
        nccl.version_text()
    ));
    drop(entered);
    // SAFETY: it is alive, and not used again.
    unsafe { nccl.destroy(raw) }.unwrap();
}

#[test]
fn figures_of_calls_and_registrations_beside_the_bare_ones() {
    let Some(nccl) = machine("figures_of_calls_and_registrations_beside_the_bare_ones") else { return };
    let comm = alone();
    let gpu = Gpu::open(0).unwrap();
    let entered = gpu.enter("test").unwrap();
    let slot = Slot::default();
    nccl.init(&slot, 1, &nccl.unique_id().unwrap(), 0, RawConfig::default()).unwrap();
    let raw = slot.comm().unwrap();
    let buffer = create_buffer(mem_alloc_on(0, 64 << 20).unwrap());
    let address = buffer.addr() as u64;
    let stream = entered.stream(0).unwrap();
    let handle: StreamHandle = stream.handle();
    // SAFETY: the stream outlives the calls, which are waited for.
    let own = Stream::by(move |job| unsafe { job.on(handle) });
    let memory = comm.memory(buffer.clone()).unwrap();
    for bytes in [4096usize, 1 << 20] {
        let part = memory.part(0, bytes).unwrap();
        let other = comm.memory(DeviceStorage::new(bytes, 0).unwrap()).unwrap();
        let target = DeviceStorage::new(bytes, 0).unwrap();
        for (name, into, to) in [("in place of", &part, address), ("of", &other, target.addr() as u64)] {
            let settled = || stream.synchronize(&entered).unwrap();
            let figure = figures::beside(
                2000,
                settled,
                || {
                    in_stream(Some(own.clone()), || comm.all_reduce(&part, into, Dtype::F32, Op::Sum))
                        .unwrap();
                },
                || {
                    // SAFETY: communicator, memory and stream are alive.
                    unsafe { nccl.call(raw, Call::AllReduce(0), address, to, bytes / 4, 7, handle) }.unwrap();
                },
            );
            let over = figure.ours - figure.bare;
            say(format!("all_reduce {name} {bytes} B, enqueue p50: {figure}, over {over:.2} us"));
        }
    }
    steps(&gpu);
    figures::registrations(&comm, &nccl, raw, &buffer, 40, |text| say(text.to_owned()));
    // SAFETY: it is alive, and not used again.
    unsafe { nccl.destroy(raw) }.unwrap();
}
