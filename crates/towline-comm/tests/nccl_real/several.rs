//! Several ranks on one GPU, where NCCL allows it: what they compute together, and how they end.

use std::time::{Duration, Instant};

use towline::{Dtype, Kind, create_buffer};
use towline_comm::{
    Communicator, Config, Memory, Op, Progress, Scalar, WaitSignal, Window, WindowFlag, group, mem_alloc_on,
};
use towline_sys::nccl::{Config as RawConfig, Nccl, Slot};

use super::ranks::Spread::{Processes, Threads};
use super::ranks::{Seat, patience, ranks};
use super::{figures, floats};

/// How long a rank waits for one that does not come.
const SOON: u64 = 4;

/// Makes a call and waits until this rank's stream has got past it.
fn done(comm: &Communicator, op: &'static str, call: impl FnOnce() -> towline_comm::Result<()>) {
    comm.follow(op, |_| call()).unwrap().wait().unwrap();
}

/// The numbers of a rank.
fn own(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|index| ((rank + 1) * (index % 61 + 1)) as f32).collect()
}

fn combined(op: Op, values: impl Iterator<Item = f32>) -> f32 {
    let values: Vec<f32> = values.collect();
    let count = values.len() as f32;
    match op {
        Op::Sum => values.iter().sum(),
        Op::Prod => values.iter().product(),
        Op::Max => values.iter().copied().fold(f32::MIN, f32::max),
        Op::Min => values.iter().copied().fold(f32::MAX, f32::min),
        Op::Avg => values.iter().sum::<f32>() / count,
        Op::ScaledSum(_) => values.iter().enumerate().map(|(rank, value)| value * (rank + 2) as f32).sum(),
    }
}

fn near(got: &[f32], wanted: &[f32], what: &str) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    for (index, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        assert!((got - wanted).abs() <= wanted.abs() * 1e-5, "{what}: {got} at {index}, not {wanted}");
    }
}

/// Every collective of one size against a reference.
fn every_collective(seat: &Seat, comm: &Communicator, count: usize) {
    let (rank, nranks) = (seat.rank, seat.nranks);
    let all: Vec<Vec<f32>> = (0..nranks).map(|rank| own(rank, count * nranks)).collect();
    let whole = seat.memory(comm, &all[rank]);
    let block = whole.part(0, count * 4).unwrap();
    let (large, small) =
        (seat.memory(comm, &vec![0.0; count * nranks]), seat.memory(comm, &vec![0.0; count]));
    let scaled = Op::ScaledSum(Scalar::Float((rank + 2) as f64));
    for op in [Op::Sum, Op::Prod, Op::Max, Op::Min, Op::Avg, scaled] {
        let reduced: Vec<f32> =
            (0..count * nranks).map(|index| combined(op, all.iter().map(|values| values[index]))).collect();
        done(comm, "all_reduce", || comm.all_reduce(&whole, &large, Dtype::F32, op));
        near(&floats(&large), &reduced, "all_reduce");
        done(comm, "reduce_scatter", || comm.reduce_scatter(&whole, &small, Dtype::F32, op));
        near(&floats(&small), &reduced[rank * count..][..count], "reduce_scatter");
        let root = nranks - 1;
        let at_root = (rank == root).then_some(&large);
        done(comm, "reduce", || comm.reduce(&whole, at_root, Dtype::F32, op, root));
        if rank == root {
            near(&floats(&large), &reduced, "reduce");
        }
    }
    let gathered: Vec<f32> = all.iter().flat_map(|values| values[..count].to_vec()).collect();
    done(comm, "all_gather", || comm.all_gather(&block, &large, Dtype::F32));
    assert!(floats(&large) == gathered, "all_gather");
    let cleared = vec![0; count * nranks * 4];
    large.write_at(0, &cleared).unwrap();
    done(comm, "gather", || comm.gather(&block, (rank == 0).then_some(&large), Dtype::F32, 0));
    if rank == 0 {
        assert!(floats(&large) == gathered, "gather");
    }
    done(comm, "broadcast", || comm.broadcast((rank == 1).then_some(&block), Some(&small), Dtype::F32, 1));
    assert!(floats(&small) == all[1][..count], "broadcast");
    done(comm, "scatter", || comm.scatter((rank == 1).then_some(&whole), &small, Dtype::F32, 1));
    assert!(floats(&small) == all[1][rank * count..][..count], "scatter");
    done(comm, "all_to_all", || comm.all_to_all(&whole, &large, Dtype::F32));
    let crossed: Vec<f32> = all.iter().flat_map(|values| values[rank * count..][..count].to_vec()).collect();
    assert!(floats(&large) == crossed, "all_to_all");
    // In place.
    let sums: Vec<f32> =
        (0..count * nranks).map(|index| combined(Op::Sum, all.iter().map(|values| values[index]))).collect();
    done(comm, "all_reduce", || comm.all_reduce(&whole, &whole, Dtype::F32, Op::Sum));
    near(&floats(&whole), &sums, "all_reduce in place");
    comm.barrier().unwrap();
    drop((whole, block, large, small));
    seat.meet();
}

#[test]
fn every_collective_of_several_ranks_gives_what_a_reference_does() {
    const TEST: &str = "several::every_collective_of_several_ranks_gives_what_a_reference_does";
    ranks(TEST, &[Threads(2), Threads(4), Processes(2)], |seat| {
        let comm = seat.join(patience(30));
        assert_eq!((comm.rank().unwrap(), comm.nranks().unwrap()), (seat.rank, seat.nranks));
        for count in [1, 1000, 65_536] {
            seat.step(&format!("collectives of {count} elements"), || every_collective(seat, &comm, count));
        }
        let ints: Vec<u8> =
            (0..64i64).flat_map(|index| (index << 33 | seat.rank as i64).to_ne_bytes()).collect();
        let long = comm.memory(mem_alloc_on(0, 512).unwrap()).unwrap();
        long.write_at(0, &ints).unwrap();
        done(&comm, "all_reduce", || comm.all_reduce(&long, &long, Dtype::I64, Op::Max));
        let mut bytes = [0; 512];
        long.read_at(0, &mut bytes).unwrap();
        let last = i64::from_ne_bytes(bytes[504..].try_into().unwrap());
        assert_eq!(last, 63 << 33 | (seat.nranks as i64 - 1));
        seat.step("finalize", || comm.finalize()).unwrap();
        seat.step("destroy", || comm.destroy());
    });
}

#[test]
fn messages_go_around_the_ring_and_across() {
    const TEST: &str = "several::messages_go_around_the_ring_and_across";
    ranks(TEST, &[Threads(2), Threads(4), Processes(2)], |seat| {
        let comm = seat.join(patience(20));
        let (rank, nranks) = (seat.rank, seat.nranks);
        let (right, left) = ((rank + 1) % nranks, (rank + nranks - 1) % nranks);
        let mine = seat.memory(&comm, &own(rank, 50_000));
        let other = seat.memory(&comm, &vec![0.0; 50_000]);
        seat.step("around the ring", || {
            group(|| {
                comm.send(&mine, Dtype::F32, right)?;
                comm.recv(&other, Dtype::F32, left)
            })
            .unwrap();
            comm.synchronize().unwrap();
        });
        assert!(floats(&other) == own(left, 50_000));
        // One after the other, without a group.
        seat.step("one way", || {
            if rank == 0 {
                done(&comm, "send", || comm.send(&mine, Dtype::F32, 1));
            } else if rank == 1 {
                done(&comm, "recv", || comm.recv(&other, Dtype::F32, 0));
                assert!(floats(&other) == own(0, 50_000));
            }
        });
        comm.barrier().unwrap();
        seat.step("finalize and destroy", || {
            comm.finalize().unwrap();
            comm.destroy();
        });
    });
}

#[test]
fn registered_buffers_of_several_ranks_are_used_and_closed() {
    const TEST: &str = "several::registered_buffers_of_several_ranks_are_used_and_closed";
    ranks(TEST, &[Threads(2), Processes(2)], |seat| {
        let comm = seat.join(patience(30));
        let buffer = create_buffer(mem_alloc_on(0, 4 << 20).unwrap());
        let memory = comm.memory(buffer.clone()).unwrap();
        let bytes: Vec<u8> = own(seat.rank, 1 << 20).iter().flat_map(|value| value.to_ne_bytes()).collect();
        memory.write_at(0, &bytes).unwrap();
        let sums: Vec<f32> = (0..1 << 20)
            .map(|index| (0..seat.nranks).map(|rank| ((rank + 1) * (index % 61 + 1)) as f32).sum())
            .collect();
        let registered = comm.register_buffer(buffer.clone()).unwrap();
        seat.tell(&format!("register_buffer: handle {:#x}", registered.handle().unwrap()));
        assert_eq!(comm.open_handles().unwrap(), 1);
        seat.step("all_reduce of 4 MiB over a registered buffer", || {
            done(&comm, "all_reduce", || comm.all_reduce(&memory, &memory, Dtype::F32, Op::Sum));
        });
        assert!(floats(&memory) == sums);
        seat.step("close", || registered.close());
        assert_eq!(comm.open_handles().unwrap(), 0);
        for _ in 0..1000 {
            comm.register_buffer(buffer.clone()).unwrap().close();
        }
        assert_eq!(comm.open_handles().unwrap(), 0);
        comm.barrier().unwrap();
        // One that is still open goes with the communicator.
        let left = comm.register_buffer(buffer).unwrap();
        seat.step("destroy with a buffer open", || comm.destroy());
        assert!(!left.is_valid());
    });
}

/// Puts to the right neighbour, and what came from the left one.
fn puts(seat: &Seat, comm: &Communicator, size: usize) {
    let (rank, nranks) = (seat.rank, seat.nranks);
    let (right, left) = ((rank + 1) % nranks, (rank + nranks - 1) % nranks);
    let buffer = create_buffer(mem_alloc_on(0, size).unwrap());
    let window = seat.step(&format!("register a window of {size} bytes"), || {
        comm.register_window(buffer.clone(), WindowFlag::COLL_SYMMETRIC).unwrap()
    });
    let Some(window) = window else {
        return seat.tell("windows: NCCL gives none here");
    };
    seat.tell(&format!("window: handle {:#x}", window.handle()));
    let memory = window.memory().unwrap();
    let half = size / 2;
    let sent: Vec<u8> = (0..half).map(|index| (index * 7 + rank) as u8).collect();
    let wanted: Vec<u8> = (0..half).map(|index| (index * 7 + left) as u8).collect();
    memory.write_at(0, &sent).unwrap();
    memory.write_at(half, &vec![0; half]).unwrap();
    comm.barrier().unwrap();
    seat.step("put_signal and wait_signal", || {
        window.put_signal(right, half, &memory.part(0, half).unwrap(), 0, 0).unwrap().wait().unwrap();
        comm.follow("wait_signal", |_| comm.wait_signal(&[WaitSignal::from_rank(left)]))
            .unwrap()
            .wait()
            .unwrap();
    });
    let mut got = vec![0; half];
    memory.read_at(half, &mut got).unwrap();
    assert!(got == wanted, "put_signal");
    seat.step("three signals, counted", || {
        for _ in 0..3 {
            drop(comm.signal(right, 0, 0).unwrap());
        }
        let three = WaitSignal { count: 3, ..WaitSignal::from_rank(left) };
        comm.wait_signal(&[three]).unwrap();
        comm.synchronize().unwrap();
    });
    let error = window.put_signal(right, size - 4, &memory.part(0, 8).unwrap(), 0, 0).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid);
    for (context, index) in [(0, 1), (1, 0), (1, 1)] {
        let put = (|| {
            window.put_signal(right, half, &memory.part(0, 64).unwrap(), context, index)?.wait()?;
            let one = WaitSignal { context, index, ..WaitSignal::from_rank(left) };
            comm.follow("wait_signal", |_| comm.wait_signal(&[one]))?.wait()
        })();
        seat.tell(&format!("signal {index} of context {context}: {put:?}"));
    }
    plain_access(seat, comm, &window);
    // A symmetric window is memory for collectives too.
    let floats_of = |memory: &Memory| floats(&memory.part(0, 4096).unwrap());
    let bytes: Vec<u8> = own(rank, 1024).iter().flat_map(|value| value.to_ne_bytes()).collect();
    memory.write_at(0, &bytes).unwrap();
    let part = memory.part(0, 4096).unwrap();
    done(comm, "all_reduce", || comm.all_reduce(&part, &part, Dtype::F32, Op::Sum));
    let sums: Vec<f32> =
        (0..1024).map(|index| combined(Op::Sum, (0..nranks).map(|rank| own(rank, 1024)[index]))).collect();
    assert!(floats_of(&memory) == sums, "all_reduce in a window");
    comm.barrier().unwrap();
    seat.step("close", || window.close());
    assert_eq!(window.handle(), 0);
    assert_eq!(comm.open_handles().unwrap(), 0);
}

/// Puts without a signal, gets and fences, which NCCL has not: copies through its mapping of the other rank's memory.
fn plain_access(seat: &Seat, comm: &Communicator, window: &Window) {
    let (rank, nranks) = (seat.rank, seat.nranks);
    let (right, left) = ((rank + 1) % nranks, (rank + nranks - 1) % nranks);
    let half = window.size() / 2;
    let memory = window.memory().unwrap();
    let apart = comm.memory(mem_alloc_on(0, half).unwrap()).unwrap();
    let pattern = |rank: usize| (0..half).map(|index| (index * 13 + rank) as u8).collect::<Vec<u8>>();
    apart.write_at(0, &pattern(rank)).unwrap();
    memory.write_at(0, &pattern(rank + 100)).unwrap();
    seat.step("fence", || window.fence().unwrap());
    seat.step("put of 2 MiB and flush", || {
        drop(window.put(right, half, &apart).unwrap());
        window.flush(right).unwrap();
    });
    seat.step("fence", || window.fence().unwrap());
    let mut got = vec![0; half];
    memory.read_at(half, &mut got).unwrap();
    assert!(got == pattern(left), "put");
    seat.step("get of 2 MiB", || window.get(left, 0, &apart).unwrap().wait().unwrap());
    apart.read_at(0, &mut got).unwrap();
    assert!(got == pattern(left + 100), "get");
    let begun = Instant::now();
    for _ in 0..100 {
        window.get(left, 0, &apart.part(0, 4096).unwrap()).unwrap().wait().unwrap();
    }
    seat.tell(&format!("get of 4 KiB and wait: {:.1} us", begun.elapsed().as_secs_f64() * 1e4));
    assert_eq!(window.get(left, half + 1, &apart).unwrap_err().kind(), Kind::Invalid);
    assert_eq!(window.put(nranks, 0, &apart).unwrap_err().kind(), Kind::Invalid);
    window.fence().unwrap();
    drop(apart);
    seat.meet();
}

#[test]
fn windows_of_several_ranks_take_puts_and_signals() {
    const TEST: &str = "several::windows_of_several_ranks_take_puts_and_signals";
    ranks(TEST, &[Threads(2), Threads(4), Processes(2)], |seat| {
        let comm = seat.join(patience(20));
        puts(seat, &comm, 4 << 20);
        let buffer = create_buffer(mem_alloc_on(0, 1 << 20).unwrap());
        let grouped = group(|| comm.register_window(buffer.clone(), WindowFlag::DEFAULT)).unwrap().unwrap();
        seat.tell(&format!("a window of a group: handle {:#x}", grouped.handle()));
        grouped.close();
        for _ in 0..5 {
            drop(comm.register_window(buffer.clone(), WindowFlag::DEFAULT).unwrap());
        }
        let plain = towline::DeviceStorage::new(4 << 20, 0).unwrap();
        let refused = comm.register_window(plain, WindowFlag::DEFAULT);
        seat.tell(&format!("a window over cuMemAlloc: {refused:?}"));
        drop(refused);
        seat.step("destroy", || comm.destroy());
    });
}

#[test]
fn groups_of_several_ranks_split_and_shrink() {
    const TEST: &str = "several::groups_of_several_ranks_split_and_shrink";
    ranks(TEST, &[Threads(2), Threads(4), Processes(2)], |seat| {
        let comm = seat.join(patience(30));
        let (rank, nranks) = (seat.rank, seat.nranks);
        let ones = seat.memory(&comm, &[1.0; 256]);
        let two = comm.memory(mem_alloc_on(0, 1024).unwrap()).unwrap();
        let half = seat.step("split", || comm.split(Some((rank % 2) as u32), -(rank as i64)).unwrap());
        assert_eq!(half.nranks().unwrap(), nranks / 2);
        assert_eq!(half.rank().unwrap(), nranks / 2 - 1 - rank / 2);
        done(&half, "all_reduce", || half.all_reduce(&ones, &two, Dtype::F32, Op::Sum));
        assert_eq!(floats(&two)[255], (nranks / 2) as f32);
        comm.barrier().unwrap();
        let none = comm.split((rank != 0).then_some(1), 0).unwrap();
        assert_eq!(none.is_valid(), rank != 0);
        seat.step("destroy the children", || {
            half.destroy();
            none.destroy();
        });
        seat.meet();
        comm.barrier().unwrap();
        if rank + 1 < nranks {
            let rest = seat.step("shrink", || comm.shrink(&[nranks - 1]).unwrap());
            assert_eq!((rest.rank().unwrap(), rest.nranks().unwrap()), (rank, nranks - 1));
            done(&rest, "all_reduce", || rest.all_reduce(&ones, &two, Dtype::F32, Op::Sum));
            assert_eq!(floats(&two)[0], (nranks - 1) as f32);
            seat.step("destroy what is left", || rest.destroy());
        }
        seat.step("destroy", || comm.destroy());
    });
}

/// A call that one rank does not make: an error of the others by the deadline, which says how far NCCL was.
fn waits_in_vain(seat: &Seat, comm: &Communicator, numbers: &Memory) {
    let begun = Instant::now();
    let waited = comm
        .follow("all_reduce", |comm| comm.all_reduce(numbers, numbers, Dtype::F32, Op::Sum))
        .and_then(|sum| sum.wait());
    let error = waited.unwrap_err();
    seat.tell(&format!("in vain, for {:.2} s: {error}", begun.elapsed().as_secs_f64()));
    assert!(matches!(error.kind(), Kind::Timeout | Kind::Disconnected), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(10 * SOON), "{:?}", begun.elapsed());
}

/// The survivors sum ones, then leave.
fn go_on(seat: &Seat, rest: &Communicator, numbers: &Memory) {
    let ones: Vec<u8> = [1.0f32; 1024].iter().flat_map(|one| one.to_ne_bytes()).collect();
    numbers.write_at(0, &ones).unwrap();
    done(rest, "all_reduce", || rest.all_reduce(numbers, numbers, Dtype::F32, Op::Sum));
    assert!(floats(numbers) == [(seat.nranks - 1) as f32; 1024]);
    seat.step("destroy what is left", || rest.destroy());
}

#[test]
fn a_rank_that_does_not_call_costs_the_others_their_deadline_and_no_more() {
    const TEST: &str = "several::a_rank_that_does_not_call_costs_the_others_their_deadline_and_no_more";
    ranks(TEST, &[Threads(2), Threads(4), Processes(2)], |seat| {
        let comm = seat.join(patience(SOON));
        let numbers = seat.memory(&comm, &[1.0; 1024]);
        let two = comm.memory(mem_alloc_on(0, 4096).unwrap()).unwrap();
        comm.barrier().unwrap();
        if seat.rank + 1 == seat.nranks {
            std::thread::sleep(Duration::from_secs(2 * SOON));
            return seat.step("destroy of the one that did not call", || comm.destroy());
        }
        waits_in_vain(seat, &comm, &numbers);
        let error = comm.all_reduce(&numbers, &numbers, Dtype::F32, Op::Sum).unwrap_err();
        seat.tell(&format!("a later call: {error}"));
        let rest = seat.step("shrink", || comm.shrink(&[seat.nranks - 1]));
        go_on(seat, &rest.unwrap(), &two);
        seat.step("destroy", || comm.destroy());
    });
}

#[test]
fn revoking_and_aborting_end_what_waits_for_a_rank() {
    const TEST: &str = "several::revoking_and_aborting_end_what_waits_for_a_rank";
    ranks(TEST, &[Threads(2), Processes(2)], |seat| {
        for way in ["revoke", "abort"] {
            let comm = seat.step("init", || {
                let id = if way == "revoke" { &seat.id } else { &seat.other_id };
                let config = Config { gpu: Some(0), ..patience(20) };
                Communicator::init(seat.nranks, seat.rank, id, config).unwrap()
            });
            let numbers = seat.memory(&comm, &[1.0; 1024]);
            comm.barrier().unwrap();
            if seat.rank == 1 {
                std::thread::sleep(Duration::from_secs(2));
                seat.step("abort of the one that did not call", || comm.abort());
                continue;
            }
            let sum = comm
                .follow("all_reduce", |comm| comm.all_reduce(&numbers, &numbers, Dtype::F32, Op::Sum))
                .unwrap();
            std::thread::sleep(Duration::from_millis(300));
            assert!(!sum.is_done());
            if way == "revoke" {
                seat.step("revoke", || comm.revoke().unwrap());
                assert_eq!(comm.signal(0, 0, 0).unwrap_err().kind(), Kind::Canceled);
            } else {
                seat.step("abort", || comm.abort());
                assert!(!comm.is_valid());
            }
            let error = seat.step("the end of the call", || sum.wait().unwrap_err());
            seat.tell(&format!("after {way}: {error}"));
            seat.step("destroy", || comm.destroy());
        }
    });
}

#[test]
fn a_rank_that_is_killed_costs_the_others_an_error_and_they_go_on() {
    const TEST: &str = "several::a_rank_that_is_killed_costs_the_others_an_error_and_they_go_on";
    ranks(TEST, &[Processes(2), Processes(3)], |seat| {
        let comm = seat.join(patience(SOON));
        let numbers = seat.memory(&comm, &[1.0; 1024]);
        let two = comm.memory(mem_alloc_on(0, 4096).unwrap()).unwrap();
        comm.barrier().unwrap();
        if seat.rank + 1 == seat.nranks {
            // SAFETY: it ends this process.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
        std::thread::sleep(Duration::from_millis(300));
        waits_in_vain(seat, &comm, &numbers);
        let rest = seat.step("shrink", || comm.shrink(&[seat.nranks - 1]).unwrap());
        go_on(seat, &rest, &two);
        seat.step("destroy", || comm.destroy());
    });
}

#[test]
fn ranks_that_do_not_block_and_ranks_that_end_in_any_order() {
    const TEST: &str = "several::ranks_that_do_not_block_and_ranks_that_end_in_any_order";
    ranks(TEST, &[Threads(2), Processes(2)], |seat| {
        let comm = seat.join(Config { blocking: false, ..patience(20) });
        let mut polls = 0;
        while comm.get_async_error().unwrap() == Progress::InProgress {
            polls += 1;
            std::thread::sleep(Duration::from_millis(1));
        }
        seat.tell(&format!("{polls} polls of 1 ms until init was done"));
        let numbers = seat.memory(&comm, &[1.0; 1024]);
        done(&comm, "all_reduce", || comm.all_reduce(&numbers, &numbers, Dtype::F32, Op::Sum));
        assert_eq!(floats(&numbers)[0], seat.nranks as f32);
        let buffer = create_buffer(mem_alloc_on(0, 1 << 20).unwrap());
        let window = comm.register_window(buffer.clone(), WindowFlag::COLL_SYMMETRIC).unwrap().unwrap();
        seat.step("the handle comes", || comm.synchronize().unwrap());
        seat.tell(&format!("not blocking: window {:#x}", window.handle()));
        comm.barrier().unwrap();
        std::thread::sleep(Duration::from_millis(500 * seat.rank as u64));
        seat.step("finalize", || comm.finalize().unwrap());
        std::thread::sleep(Duration::from_millis(500 * (seat.nranks - seat.rank) as u64));
        seat.step("destroy, in the other order, with a window open", || comm.destroy());
        assert_eq!(window.handle(), 0);
    });
}

#[test]
fn figures_of_registrations_of_two_ranks_beside_the_bare_ones() {
    const TEST: &str = "several::figures_of_registrations_of_two_ranks_beside_the_bare_ones";
    ranks(TEST, &[Threads(2), Processes(2)], |seat| {
        let comm = seat.join(patience(30));
        let nccl = Nccl::load().unwrap();
        let gpu = towline::cuda::Gpu::open(0).unwrap();
        let _entered = gpu.enter("test").unwrap();
        let slot = Slot::default();
        let config = RawConfig::default();
        nccl.init(&slot, seat.nranks as i32, seat.other_id.as_bytes(), seat.rank as i32, config).unwrap();
        let raw = slot.comm().unwrap();
        let buffer = create_buffer(mem_alloc_on(0, 64 << 20).unwrap());
        figures::registrations(&comm, &nccl, raw, &buffer, 4, |text| seat.tell(text));
        comm.barrier().unwrap();
        comm.destroy();
        // SAFETY: it is alive, and not used again.
        unsafe { nccl.destroy(raw) }.unwrap();
    });
}
