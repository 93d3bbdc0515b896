//! What must hold on every GPU, a fake one included.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use towline::cuda::{Blocks, CopyOptions, Gpu, Run, StreamHandle, Tuning};
use towline::memory::{DeviceMemory, DeviceStorage, ExternalStorage, Mapping, PinnedStorage};
use towline::{Indices, Kind, MemoryAccess, MemoryDescription, Place, Storage};
use towline_sys::cuda::Cuda;
use towline_testkit::random::Random;
use towline_testkit::watchdog::watch;

const LONG: Duration = Duration::from_secs(60);

/// Held by every test, exclusively by the one that keeps a stream from going on.
pub(crate) static ALONE: RwLock<()> = RwLock::new(());

fn random_bytes(random: &mut Random, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend_from_slice(&random.number().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

fn contents(storage: &dyn Storage) -> Vec<u8> {
    let mut bytes = vec![0; storage.size()];
    storage.read_at(0, &mut bytes).unwrap();
    bytes
}

/// Copies, and waits until that is done.
fn copy(gpu: &Arc<Gpu>, runs: &[Run], host: bool, tuning: Option<&Tuning>) {
    let options = CopyOptions { bytes: runs.iter().map(|run| run.len).sum(), host, after: None };
    // SAFETY: the tests keep their storages until the copy is done.
    let copying = unsafe { gpu.copy_tuned(runs.iter().copied(), &options, tuning) }.unwrap();
    assert!(copying.wait(Some(Instant::now() + LONG)).unwrap(), "the copy did not end");
    assert!(copying.is_done().unwrap());
}

pub(crate) fn bytes_of_a_device_go_in_and_out(gpu: &Arc<Gpu>) {
    for memory in [DeviceMemory::Plain, DeviceMemory::Exportable] {
        let storage = DeviceStorage::options().on(gpu.ordinal()).memory(memory).allocate(100_003).unwrap();
        assert_eq!(storage.memory(), memory);
        assert_eq!(storage.place(), Place::Cuda(gpu.ordinal()));
        assert_eq!(storage.storage_kind().cuda_device_index(), Some(gpu.ordinal()));
        storage.memset(7, 0, 100_003).unwrap();
        let bytes = random_bytes(&mut Random::new(1), 5000);
        storage.write_at(33, &bytes).unwrap();
        let all = contents(&storage);
        assert_eq!(all[33..5033], bytes);
        assert!(all[..33].iter().chain(&all[5033..]).all(|byte| *byte == 7));
        assert_eq!(storage.read_at(100_003, &mut [0]).unwrap_err().kind(), Kind::Invalid);
        assert_eq!(storage.write_at(100_000, &[0; 4]).unwrap_err().kind(), Kind::Invalid);
        assert_eq!(storage.export().is_ok(), memory == DeviceMemory::Exportable);
    }
    assert_eq!(DeviceStorage::new(0, gpu.ordinal()).unwrap_err().kind(), Kind::Invalid);
    assert_eq!(DeviceStorage::new(1 << 50, gpu.ordinal()).unwrap_err().kind(), Kind::Exhausted);
    assert_eq!(DeviceStorage::new(1, 4000).unwrap_err().kind(), Kind::Invalid);
}

pub(crate) fn pinned_memory_is_reached_by_the_gpu_and_mapped_by_peers(gpu: &Arc<Gpu>) {
    let shared = PinnedStorage::options().near(gpu.ordinal()).allocate(3 << 20).unwrap();
    let private = PinnedStorage::options().near(gpu.ordinal()).private(true).allocate(3 << 20).unwrap();
    assert!(private.segment().is_none());
    let device = DeviceStorage::new(3 << 20, gpu.ordinal()).unwrap();
    for storage in [&shared, &private] {
        assert!(storage.storage_kind().is_pinned());
        assert_eq!(storage.place(), Place::Host);
        let bytes = random_bytes(&mut Random::new(2), 3 << 20);
        storage.write_at(0, &bytes).unwrap();
        let (host, there, len) = (storage.device_address(), device.addr() as u64, 3 << 20);
        copy(gpu, &[Run { from: host, to: there, len }], true, None);
        assert_eq!(contents(&device), bytes);
        storage.memset(0, 0, 3 << 20).unwrap();
        let halves =
            [0, 1, 2].map(|at| Run { from: there + (at << 20), to: host + (at << 20), len: 1 << 20 });
        copy(gpu, &halves, true, Some(&Tuning::default()));
        assert_eq!(contents(storage), bytes);
    }
    let segment = shared.segment().unwrap().segment;
    let peer = Mapping::map(segment.file().try_clone_to_owned().unwrap(), segment.len(), false).unwrap();
    // SAFETY: a mapping of the same bytes, which nobody writes now.
    let seen = unsafe { std::slice::from_raw_parts(peer.ptr(), 3 << 20) };
    assert_eq!(seen, contents(&shared));
}

pub(crate) fn borrowed_memory_is_looked_up(gpu: &Arc<Gpu>) {
    let ordinal = gpu.ordinal();
    // SAFETY: nothing touches the bytes of what is refused, and the owner is kept by what is not.
    let borrow = |addr, len| unsafe { ExternalStorage::device(addr, len, ordinal, None) };
    let owner = DeviceStorage::new(10_000, ordinal).unwrap();
    let storage = borrow(owner.addr() + 100, 9_900).unwrap();
    assert_eq!(storage.place(), Place::Cuda(ordinal));
    storage.write_at(0, b"borrowed").unwrap();
    assert_eq!(&contents(&owner)[100..108], b"borrowed");
    let past = borrow(owner.addr(), 4 << 20).unwrap_err();
    assert!(past.kind() == Kind::Invalid && past.message().contains("only the first"), "{past}");
    let pinned = PinnedStorage::new(4096).unwrap();
    let error = borrow(pinned.addr(), 4096).unwrap_err();
    assert!(error.message().contains("pinned host memory"), "{error}");
    let plain = [0u8; 64];
    let error = borrow(plain.as_ptr().addr(), 64).unwrap_err();
    assert!(error.message().contains("freed, or it is not GPU memory"), "{error}");
    let (gone, len) = (owner.addr(), owner.size());
    drop((storage, owner));
    assert_eq!(borrow(gone, len).unwrap_err().kind(), Kind::Invalid);
}

pub(crate) fn the_current_context_of_the_caller_stays(gpu: &Arc<Gpu>) {
    let cuda = Cuda::load().unwrap();
    let before = cuda.current_id().unwrap();
    let storage = DeviceStorage::new(1 << 16, gpu.ordinal()).unwrap();
    let other = DeviceStorage::options().memory(DeviceMemory::Exportable).allocate(1 << 16).unwrap();
    storage.write_at(5, &[1, 2, 3]).unwrap();
    let run = |at: u64| Run { from: storage.addr() as u64 + at, to: other.addr() as u64 + at, len: 100 };
    copy(gpu, &[run(0), run(200), run(400)], false, None);
    assert_eq!(cuda.current_id().unwrap(), before);
    let entered = gpu.enter("test").unwrap();
    let inside = cuda.current_id().unwrap();
    drop((storage, other));
    drop(PinnedStorage::new(4096).unwrap());
    assert_eq!(cuda.current_id().unwrap(), inside);
    drop(entered);
    assert_eq!(cuda.current_id().unwrap(), before);
}

/// Random runs that do not overlap where they go, and what the destination must then hold.
struct Program {
    runs: Vec<Run>,
    expected: Vec<u8>,
}

fn program(
    random: &mut Random,
    from: (u64, &[u8]),
    to: (u64, &[u8]),
    lens: &mut dyn FnMut(&mut Random) -> u64,
) -> Program {
    let mut expected = to.1.to_vec();
    let mut runs = Vec::new();
    let mut at = random.below(20);
    loop {
        let len = lens(random);
        if at + len > to.1.len() as u64 || len > from.1.len() as u64 {
            break;
        }
        let source = random.below(from.1.len() as u64 - len + 1);
        expected[at as usize..(at + len) as usize]
            .copy_from_slice(&from.1[source as usize..(source + len) as usize]);
        runs.push(Run { from: from.0 + source, to: to.0 + at, len });
        at += len + random.below(3) * random.below(20);
    }
    random.shuffle(&mut runs);
    Program { runs, expected }
}

pub(crate) fn runs_of_any_length_and_alignment_arrive_and_nothing_else_changes(gpu: &Arc<Gpu>) {
    let _watch = watch("random runs", 10 * LONG);
    let mut random = Random::new(3);
    let size = 1 << 20;
    let device = |_| DeviceStorage::new(size, gpu.ordinal()).unwrap();
    let pinned = PinnedStorage::options().near(gpu.ordinal()).allocate(size).unwrap();
    let (one, two) = (device(0), device(1));
    let sides: [(&dyn Storage, u64); 3] =
        [(&one, one.addr() as u64), (&two, two.addr() as u64), (&pinned, pinned.device_address())];
    for round in 0..24u64 {
        let (from, to) = (sides[(round % 3) as usize], sides[((round + 1 + round / 3 % 2) % 3) as usize]);
        let (source, old) = (random_bytes(&mut random, size), random_bytes(&mut random, size));
        from.0.write_at(0, &source).unwrap();
        to.0.write_at(0, &old).unwrap();
        let most = [9, 70, 700, 5000, 40_000][(round % 5) as usize];
        let mut lens = |random: &mut Random| random.below(most);
        let program = program(&mut random, (from.1, &source), (to.1, &old), &mut lens);
        let tuning = Tuning { first: 1 + (round as usize % 4) * 50, ..Tuning::default() };
        copy(gpu, &program.runs, round % 3 != 0, (round % 4 != 3).then_some(&tuning));
        let got = contents(to.0);
        let wrong = got.iter().zip(&program.expected).position(|(got, want)| got != want);
        assert_eq!(wrong, None, "round {round}, {} runs", program.runs.len());
        assert_eq!(contents(from.0), source, "the source has changed in round {round}");
    }
}

pub(crate) fn blocks_of_one_length_arrive(gpu: &Arc<Gpu>) {
    let _watch = watch("blocks", 10 * LONG);
    let mut random = Random::new(4);
    for (len, blocks, step, offsets) in [
        (4096u64, 700u64, 4096u64, [0u64, 0u64]),
        (4096, 700, 4096, [16, 32]),
        (4096, 300, 4200, [1, 6]),
        (32768, 64, 32768, [0, 0]),
        (33_333, 40, 33_344, [0, 0]),
        (33_333, 40, 33_333, [3, 5]),
        (100, 5000, 112, [0, 8]),
        (1, 3000, 2, [0, 1]),
        (5 << 20, 3, 5 << 20, [0, 0]),
    ] {
        let size = (step * blocks + 64) as usize;
        let (one, two) = (
            DeviceStorage::new(size, gpu.ordinal()).unwrap(),
            DeviceStorage::new(size, gpu.ordinal()).unwrap(),
        );
        let (source, old) = (random_bytes(&mut random, size), random_bytes(&mut random, size));
        one.write_at(0, &source).unwrap();
        two.write_at(0, &old).unwrap();
        let mut numbers: Vec<u64> = (0..blocks).collect();
        random.shuffle(&mut numbers);
        let mut expected = old;
        let runs: Vec<Run> = numbers
            .iter()
            .enumerate()
            .map(|(at, block)| {
                let (from, to) = (offsets[0] + block * step, offsets[1] + at as u64 * step);
                expected[to as usize..(to + len) as usize]
                    .copy_from_slice(&source[from as usize..(from + len) as usize]);
                Run { from: one.addr() as u64 + from, to: two.addr() as u64 + to, len }
            })
            .collect();
        copy(gpu, &runs, false, Some(&Tuning::default()));
        let got = contents(&two);
        let wrong = got.iter().zip(&expected).position(|(got, want)| got != want);
        assert_eq!(wrong, None, "{blocks} blocks of {len} bytes, {step} apart");
    }
}

pub(crate) fn lists_longer_than_all_that_is_in_flight_arrive(gpu: &Arc<Gpu>) {
    let _watch = watch("long lists", 10 * LONG);
    let mut random = Random::new(5);
    let count = 300_000u64;
    let size = (count * 9) as usize;
    let (one, two) =
        (DeviceStorage::new(size, gpu.ordinal()).unwrap(), DeviceStorage::new(size, gpu.ordinal()).unwrap());
    let source = random_bytes(&mut random, size);
    one.write_at(0, &source).unwrap();
    for uneven in [false, true] {
        two.memset(0xEE, 0, size).unwrap();
        let mut expected = vec![0xEE; size];
        let runs: Vec<Run> = (0..count)
            .map(|at| {
                let (from, to) = (at * 9, (count - 1 - at) * 9);
                let len = 8 - u64::from(uneven) * (at % 7);
                expected[to as usize..(to + len) as usize]
                    .copy_from_slice(&source[from as usize..(from + len) as usize]);
                Run { from: one.addr() as u64 + from, to: two.addr() as u64 + to, len }
            })
            .collect();
        copy(gpu, &runs, false, None);
        assert!(contents(&two) == expected, "uneven: {uneven}");
    }
}

pub(crate) fn blocks_are_copied_by_their_indices(gpu: &Arc<Gpu>) {
    let _watch = watch("blocks by index", 10 * LONG);
    let mut random = Random::new(6);
    for (len, count, steps) in [
        (4096u64, 500u64, [4096u64, 8192u64]),
        (100, 3000, [112, 104]),
        (40_001, 30, [40_001, 50_000]),
        (7, 70_000, [8, 7]),
        // More than one list holds.
        (2, 140_000, [2, 3]),
    ] {
        let tunings = [
            Tuning::default(),
            Tuning { first: 1, growth: 3, most: 700, ..Tuning::default() },
            Tuning { first: 100, growth: 2, most: 1 << 30, beside: false, ..Tuning::default() },
        ];
        let mut tunings = tunings.iter().cycle();
        let [one, two] =
            steps.map(|step| DeviceStorage::new((step * count) as usize, gpu.ordinal()).unwrap());
        let source = random_bytes(&mut random, one.size());
        one.write_at(0, &source).unwrap();
        let mut numbers: Vec<u64> = (0..count).collect();
        random.shuffle(&mut numbers);
        let narrow: Vec<u32> = numbers.iter().map(|number| *number as u32).collect();
        let mut reversed = narrow.clone();
        reversed.reverse();
        for (from, to) in [
            (Indices::U32(&narrow), Indices::U32(&reversed)),
            (Indices::U64(&numbers), Indices::All),
            (Indices::All, Indices::U64(&numbers)),
            (Indices::All, Indices::All),
            (Indices::U32(&narrow[..1]), Indices::U64(&numbers[count as usize - 1..])),
        ] {
            two.memset(0xEE, 0, two.size()).unwrap();
            let mut expected = vec![0xEE; two.size()];
            let list = |indices: Indices<'_>| -> Vec<u64> {
                match indices {
                    Indices::U32(list) => list.iter().map(|index| u64::from(*index)).collect(),
                    Indices::U64(list) => list.to_vec(),
                    Indices::All => (0..count).collect(),
                }
            };
            for (from, to) in list(from).into_iter().zip(list(to)) {
                let (from, to) = ((from * steps[0]) as usize, (to * steps[1]) as usize);
                expected[to..to + len as usize].copy_from_slice(&source[from..from + len as usize]);
            }
            let side = |storage: &DeviceStorage, step, indices| Blocks {
                base: storage.addr() as u64,
                step,
                count,
                indices,
            };
            let (from, to) = (side(&one, steps[0], from), side(&two, steps[1], to));
            // SAFETY: the storages live until the copy is done.
            let copying = unsafe {
                let tuning = tunings.next().unwrap();
                gpu.copy_blocks_tuned(&from, &to, len, &CopyOptions::default(), tuning)
            };
            assert!(copying.unwrap().wait(Some(Instant::now() + LONG)).unwrap());
            let got = contents(&two);
            let wrong = got.iter().zip(&expected).position(|(got, want)| got != want);
            assert_eq!(
                wrong,
                None,
                "{count} blocks of {len} bytes, {:?}",
                std::mem::discriminant(&from.indices)
            );
        }
        let all = Blocks { base: one.addr() as u64, step: steps[0], count, indices: Indices::All };
        let past = [0, count as u32];
        for (from, to) in [
            (all, Blocks { indices: Indices::U32(&narrow[1..]), ..all }),
            (
                Blocks { indices: Indices::U32(&past), ..all },
                Blocks { indices: Indices::U32(&narrow[..2]), ..all },
            ),
            (
                Blocks { indices: Indices::U32(&narrow[..1]), ..all },
                Blocks { indices: Indices::U64(&[1 << 40]), ..all },
            ),
        ] {
            // SAFETY: refused, so that nothing is touched.
            let error = unsafe { gpu.copy_blocks(&from, &to, len, &CopyOptions::default()) }.unwrap_err();
            assert_eq!(error.kind(), Kind::Invalid);
        }
    }
}

pub(crate) fn nothing_to_copy_is_done_at_once(gpu: &Arc<Gpu>) {
    copy(gpu, &[], false, None);
    copy(gpu, &[], false, Some(&Tuning::default()));
    copy(gpu, &[Run { from: 1, to: 2, len: 0 }; 5], false, None);
}

pub(crate) fn copies_run_beside_each_other(gpu: &Arc<Gpu>) {
    let _watch = watch("copies beside each other", 10 * LONG);
    let size = 1 << 18;
    std::thread::scope(|scope| {
        for thread in 0..6 {
            scope.spawn(move || {
                let mut random = Random::new(100 + thread);
                let (one, two) = (
                    DeviceStorage::new(size, gpu.ordinal()).unwrap(),
                    DeviceStorage::new(size, gpu.ordinal()).unwrap(),
                );
                for _ in 0..10 {
                    let (source, old) = (random_bytes(&mut random, size), random_bytes(&mut random, size));
                    one.write_at(0, &source).unwrap();
                    two.write_at(0, &old).unwrap();
                    let (from, to) = ((one.addr() as u64, &source[..]), (two.addr() as u64, &old[..]));
                    let program = program(&mut random, from, to, &mut |random| random.below(900));
                    copy(gpu, &program.runs, false, None);
                    assert!(contents(&two) == program.expected);
                }
            });
        }
    });
}

pub(crate) fn a_copy_waits_for_a_stream_and_holds_one_back(gpu: &Arc<Gpu>) {
    let _watch = watch("streams", 10 * LONG);
    // While a function of the host is called, a driver may let every other thread wait, and with them this one.
    let _alone = ALONE.write();
    let len = 1 << 20;
    let [one, two, three] = [0; 3].map(|_| DeviceStorage::new(len, gpu.ordinal()).unwrap());
    one.memset(1, 0, len).unwrap();
    two.memset(2, 0, len).unwrap();
    three.memset(3, 0, len).unwrap();
    // What is made for the first time may wait for all streams, also for the one that is held back below.
    gpu.prepare().unwrap();
    let entered = gpu.enter("test").unwrap();
    let (stream, then) = (entered.stream(0).unwrap(), entered.stream(0).unwrap());
    // SAFETY: nothing is copied.
    unsafe { gpu.copy([], &CopyOptions::default()) }.unwrap().on_done(|| ()).unwrap();
    let (open, gate) = mpsc::channel::<()>();
    stream.call_back(&entered, move || gate.recv_timeout(LONG).unwrap()).unwrap();
    // SAFETY: the ranges are the storages', which live until the end.
    unsafe { stream.fill(&entered, one.addr() as u64, 9, len) }.unwrap();
    let options = CopyOptions { bytes: len as u64, host: false, after: Some(stream.handle()) };
    let piece = |at: u64| {
        let offset = at * (len as u64 / 4);
        Run { from: one.addr() as u64 + offset, to: two.addr() as u64 + offset, len: len as u64 / 4 }
    };
    // SAFETY: as above.
    let copying = unsafe { gpu.copy([0, 1, 2, 3].map(piece), &options) }.unwrap();
    // SAFETY: the stream is alive.
    unsafe { copying.hold(then.handle()) }.unwrap();
    // SAFETY: the ranges are the storages'.
    unsafe { then.copy(&entered, three.addr() as u64, two.addr() as u64, len) }.unwrap();
    let (sender, done) = mpsc::channel();
    copying.on_done(move || sender.send(()).unwrap()).unwrap();
    assert!(!copying.is_done().unwrap() && !then.is_idle(&entered).unwrap());
    assert!(!copying.wait(Some(Instant::now() + Duration::from_millis(5))).unwrap(), "it is held back");
    assert!(done.try_recv().is_err());
    open.send(()).unwrap();
    done.recv_timeout(LONG).unwrap();
    assert!(copying.wait(None).unwrap());
    then.synchronize(&entered).unwrap();
    assert!(contents(&two).iter().all(|byte| *byte == 9));
    assert!(contents(&three).iter().all(|byte| *byte == 9));
    // The default stream, by both of its names.
    for handle in [StreamHandle(0), StreamHandle(1)] {
        let options = CopyOptions { after: Some(handle), ..options };
        // SAFETY: as above.
        let copying = unsafe { gpu.copy([piece(0)], &options) }.unwrap();
        // SAFETY: the default stream is always alive.
        unsafe { copying.hold(handle) }.unwrap();
        assert!(copying.wait(Some(Instant::now() + LONG)).unwrap());
    }
}
