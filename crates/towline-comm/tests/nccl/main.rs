//! Communicators on GPUs, through fakes of the CUDA driver and of NCCL: what they do, and every way in which they fail.
#![allow(clippy::unwrap_used, clippy::panic)]

mod faults;
mod windows;

use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use towline::cuda::Gpu;
use towline::nccl::{Comm, CommOptions};
use towline::{DeviceStorage, Dtype, Kind, Place, SharedStorage, create_buffer};
use towline_comm::{
    Communicator, Config, Memory, Op, Progress, RegisteredBuffer, Result, Scalar, Stream, UniqueId,
    get_nccl_unique_id, group, in_stream, mem_alloc_on,
};

/// Uses the fakes, in this process.
fn fakes() {
    static FAKES: OnceLock<()> = OnceLock::new();
    FAKES.get_or_init(|| {
        towline::cuda::load_driver(towline_fake_cuda::library().unwrap()).unwrap();
        towline::nccl::load_library(towline_fake_nccl::library().unwrap()).unwrap();
    });
}

/// Runs one test of this program again, in a process of its own with these settings; `None` in that process.
fn elsewhere(test: &str, settings: &[(&str, &str)]) -> Option<()> {
    const MARK: &str = "TOWLINE_TEST_ELSEWHERE";
    if std::env::var(MARK).is_ok_and(|name| name == test) {
        return None;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(MARK, test)
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    Some(())
}

fn config() -> Config {
    Config { timeout: Duration::from_secs(20), ..Config::default() }
}

fn alone() -> Communicator {
    fakes();
    Communicator::init(1, 0, &get_nccl_unique_id().unwrap(), config()).unwrap()
}

/// Runs a rank per thread, all on the one GPU.
fn together(count: usize, rank: impl Fn(&Communicator) + Sync) {
    fakes();
    let ranks = Communicator::init_all_on(&vec![0; count], &config()).unwrap();
    std::thread::scope(|scope| {
        for comm in &ranks {
            let rank = &rank;
            scope.spawn(move || in_stream(Some(stream()), || rank(comm)));
        }
    });
}

/// A stream of its own, which is kept: ranks that share one would wait for each other in it.
#[allow(unsafe_code, reason = "vouches for a stream")]
fn stream() -> Stream {
    let gpu = Gpu::open(0).unwrap();
    let stream: &'static _ = Box::leak(Box::new(gpu.enter("test").unwrap().stream(0).unwrap()));
    // SAFETY: the stream is of that GPU, and never destroyed.
    Stream::by(|job| unsafe { job.on(stream.handle()) })
}

fn memory(comm: &Communicator, bytes: &[u8]) -> Memory {
    let memory = comm.memory(DeviceStorage::new(bytes.len(), 0).unwrap()).unwrap();
    memory.write_at(0, bytes).unwrap();
    memory
}

fn floats(comm: &Communicator, values: &[f32]) -> Memory {
    memory(comm, &values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<_>>())
}

fn read(memory: &Memory) -> Vec<f32> {
    let mut bytes = vec![0; memory.len()];
    memory.read_at(0, &mut bytes).unwrap();
    bytes.chunks_exact(4).map(|word| f32::from_ne_bytes(word.try_into().unwrap())).collect()
}

/// Makes a call and waits until its stream has got past it.
fn done(comm: &Communicator, op: &'static str, call: impl FnOnce(&Communicator) -> Result<()>) {
    comm.follow(op, call).unwrap().wait().unwrap();
}

#[test]
fn an_id_of_nccls_makes_a_communicator_on_the_gpu_and_one_of_ours_does_not() {
    fakes();
    let id = get_nccl_unique_id().unwrap();
    assert!(id.is_nccl());
    assert_eq!(UniqueId::from_bytes(id.as_bytes()).unwrap(), id);
    assert_eq!(id.to_string().parse::<UniqueId>().unwrap(), id);
    assert_eq!(format!("{id:?}"), "UniqueId(of NCCL's)");
    let comm = Communicator::init(1, 0, &id, config()).unwrap();
    assert_eq!((comm.rank().unwrap(), comm.nranks().unwrap()), (0, 1));
    assert_eq!(comm.device().unwrap(), Place::Cuda(0));
    assert_eq!(comm.get_async_error().unwrap(), Progress::Done);

    let ours = towline_comm::get_unique_id().unwrap();
    assert!(!ours.is_nccl());
    let error = Communicator::init(1, 0, &ours, Config { gpu: Some(0), ..config() }).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid);
    assert!(error.message().contains("get_nccl_unique_id"), "{error}");
    let error = Communicator::init(1, 1, &get_nccl_unique_id().unwrap(), config()).unwrap_err();
    assert_eq!(error.message(), "there is no rank 1 among 1");
}

#[test]
fn every_collective_of_three_ranks_gives_what_it_should() {
    together(3, |comm| {
        let rank = comm.rank().unwrap();
        let mine: Vec<f32> = (0..6).map(|index| (10 * rank + index) as f32).collect();
        let send = floats(comm, &mine);
        let recv = floats(comm, &[0.0; 18]);
        let six = recv.part(0, 24).unwrap();
        let two = recv.part(0, 8).unwrap();

        done(comm, "all_reduce", |comm| comm.all_reduce(&send, &six, Dtype::F32, Op::Sum));
        assert_eq!(read(&six), [30.0, 33.0, 36.0, 39.0, 42.0, 45.0]);
        for (op, first) in [(Op::Max, 20.0), (Op::Min, 0.0), (Op::Prod, 0.0), (Op::Avg, 10.0)] {
            done(comm, "all_reduce", |comm| comm.all_reduce(&send, &six, Dtype::F32, op));
            assert_eq!(read(&six)[0], first, "{op}");
        }
        let scaled = Op::ScaledSum(Scalar::Float(rank as f64));
        done(comm, "all_reduce", |comm| comm.all_reduce(&send, &six, Dtype::F32, scaled));
        assert_eq!(read(&six)[1], 11.0 + 2.0 * 21.0);

        let at_root = (rank == 1).then_some(&six);
        done(comm, "reduce", |comm| comm.reduce(&send, at_root, Dtype::F32, Op::Sum, 1));
        if rank == 1 {
            assert_eq!(read(&six)[5], 45.0);
        }
        done(comm, "broadcast", |comm| {
            comm.broadcast((rank == 2).then_some(&send), Some(&six), Dtype::F32, 2)
        });
        assert_eq!(read(&six)[0], 20.0);
        done(comm, "all_gather", |comm| comm.all_gather(&send, &recv, Dtype::F32));
        assert_eq!(read(&recv)[6], 10.0);
        assert_eq!(read(&recv)[17], 25.0);
        done(comm, "reduce_scatter", |comm| comm.reduce_scatter(&send, &two, Dtype::F32, Op::Sum));
        assert_eq!(read(&two), [30.0 + 6.0 * rank as f32, 33.0 + 6.0 * rank as f32]);
        done(comm, "all_to_all", |comm| comm.all_to_all(&send, &six, Dtype::F32));
        let block = 2.0 * rank as f32;
        assert_eq!(read(&six), [block, block + 1.0, 10.0 + block, 11.0 + block, 20.0 + block, 21.0 + block]);
        done(comm, "gather", |comm| comm.gather(&send, (rank == 0).then_some(&recv), Dtype::F32, 0));
        if rank == 0 {
            assert_eq!(read(&recv)[12], 20.0);
        }
        done(comm, "scatter", |comm| comm.scatter((rank == 0).then_some(&send), &two, Dtype::F32, 0));
        assert_eq!(read(&two), [block, block + 1.0]);
        comm.barrier().unwrap();

        // Around the ring, in a group.
        let (right, left) = ((rank + 1) % 3, (rank + 2) % 3);
        group(|| {
            comm.send(&send, Dtype::F32, right)?;
            comm.recv(&six, Dtype::F32, left)
        })
        .unwrap();
        comm.synchronize().unwrap();
        assert_eq!(read(&six)[0], 10.0 * left as f32);
        comm.finalize().unwrap();
        comm.destroy();
        assert!(!comm.is_valid());
    });
}

#[test]
fn groups_split_and_shrink() {
    together(3, |comm| {
        let rank = comm.rank().unwrap();
        let color = (rank < 2).then_some(7);
        let half = comm.split(color, -(rank as i64)).unwrap();
        if rank == 2 {
            assert!(!half.is_valid());
        } else {
            assert_eq!((half.rank().unwrap(), half.nranks().unwrap()), (1 - rank, 2));
            let numbers = floats(&half, &[1.0, rank as f32]);
            done(&half, "all_reduce", |half| half.all_reduce(&numbers, &numbers, Dtype::F32, Op::Sum));
            assert_eq!(read(&numbers), [2.0, 1.0]);
        }
        if rank != 1 {
            let rest = comm.shrink(&[1]).unwrap();
            assert_eq!((rest.rank().unwrap(), rest.nranks().unwrap()), (rank / 2, 2));
            rest.destroy();
        }
        assert_eq!(comm.shrink(&[rank]).unwrap_err().kind(), Kind::Invalid);
    });
}

#[test]
fn memory_of_the_host_and_calls_that_nccl_lacks_are_refused() {
    let comm = alone();
    let error = comm.memory(SharedStorage::new(4096).unwrap()).unwrap_err();
    assert_eq!(error.message(), "the communicator is on GPU 0, the buffer on host");
    let error = comm.register_buffer(SharedStorage::new(4096).unwrap()).unwrap_err();
    assert_eq!((error.kind(), error.op()), (Kind::Invalid, "register_buffer"));
    let error = comm.is_near(0).unwrap_err();
    assert_eq!(error.kind(), Kind::Unsupported);
    assert_eq!(error.message(), "NCCL has no is_near: a communicator on a GPU cannot do it");

    let host = Communicator::init_all(1).unwrap();
    let error = host[0].memory(DeviceStorage::new(4096, 0).unwrap()).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid);
    let device = floats(&comm, &[1.0]);
    let error = host[0].all_reduce(&device, &device, Dtype::F32, Op::Sum).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid);
    comm.destroy();
    assert_eq!(comm.rank().unwrap_err().kind(), Kind::Invalid);
    assert_eq!(comm.all_reduce(&device, &device, Dtype::F32, Op::Sum).unwrap_err().kind(), Kind::Invalid);
}

#[test]
fn memory_is_kept_until_its_stream_has_got_past_it() {
    const TEST: &str = "memory_is_kept_until_its_stream_has_got_past_it";
    if elsewhere(TEST, &[("FAKE_CUDA_DELAY_US", "20000")]).is_some() {
        return;
    }
    let comm = alone();
    let recv = floats(&comm, &[0.0; 4]);
    let send = floats(&comm, &[5.0; 4]);
    let sum = comm.follow("all_reduce", |comm| comm.all_reduce(&send, &recv, Dtype::F32, Op::Sum)).unwrap();
    assert!(!sum.is_done());
    // The fake loses its context where work touches memory that was freed.
    drop(send);
    sum.wait().unwrap();
    assert_eq!(read(&recv), [5.0; 4]);
}

#[test]
fn a_registration_that_outlives_its_communicator_touches_no_later_one() {
    let mut left = Vec::new();
    for _ in 0..3 {
        let comm = alone();
        let registered = comm.register_buffer(mem_alloc_on(0, 4096).unwrap()).unwrap();
        comm.destroy();
        assert!(!registered.is_valid(), "it was closed with its communicator");
        left.push(registered);
        // The next one uses the same list, and the same place in it.
        let next = alone();
        let other = next.register_buffer(mem_alloc_on(0, 4096).unwrap()).unwrap();
        left.iter().for_each(RegisteredBuffer::close);
        left.clear();
        assert!(other.is_valid());
        assert_eq!(next.open_handles().unwrap(), 1);
        other.close();
        assert_eq!(next.open_handles().unwrap(), 0);
        left.push(other);
    }
}

#[test]
fn what_is_registered_keeps_the_communicator_that_nobody_else_uses() {
    fakes();
    let id = *get_nccl_unique_id().unwrap().as_bytes();
    let comm = Comm::init(0, 1, 0, &id, CommOptions::default()).unwrap();
    let buffers: Vec<_> =
        (0..3).map(|_| comm.register(create_buffer(mem_alloc_on(0, 4096).unwrap())).unwrap()).collect();
    drop(comm);
    assert!(buffers.iter().all(|buffer| !buffer.is_closed() && buffer.memory().is_some()));
    for buffer in &buffers {
        buffer.close().unwrap();
        assert!(buffer.is_closed() && buffer.memory().is_none());
        buffer.close().unwrap();
    }
}

#[test]
fn threads_register_with_one_communicator_at_once() {
    let comm = alone();
    let mine = comm.register_buffer(mem_alloc_on(0, 4096).unwrap()).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let buffer = create_buffer(mem_alloc_on(0, 4096).unwrap());
                for _ in 0..200 {
                    let registered = comm.register_buffer(buffer.clone()).unwrap();
                    assert!(registered.is_valid());
                    registered.close();
                    assert!(!registered.is_valid());
                }
            });
        }
        for _ in 0..200 {
            comm.register_buffer(mem_alloc_on(0, 4096).unwrap()).unwrap().close();
        }
    });
    assert_eq!(comm.open_handles().unwrap(), 1);
    assert!(mine.is_valid());
}

#[test]
fn a_call_is_awaited_and_a_group_that_fails_launches_nothing() {
    let comm = alone();
    let numbers = floats(&comm, &[1.0, 2.0]);
    let sum = comm.follow("all_reduce", |comm| comm.all_reduce(&numbers, &numbers, Dtype::F32, Op::Sum));
    driven(sum.unwrap()).unwrap();
    let odd = numbers.part(0, 6).unwrap();
    let error = group(|| {
        comm.all_reduce(&numbers, &numbers, Dtype::F32, Op::Sum)?;
        comm.all_reduce(&odd, &odd, Dtype::F32, Op::Sum)
    })
    .unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid);
    comm.synchronize().unwrap();
}

/// Drives a future with a waker that unparks this thread.
fn driven<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = std::sync::Arc::new(Unpark(std::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            std::task::Poll::Ready(value) => return value,
            std::task::Poll::Pending => std::thread::park_timeout(Duration::from_secs(10)),
        }
    }
}
