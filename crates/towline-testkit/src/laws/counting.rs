//! Words: atomics, reductions, signals.

use std::thread;

use towline::{Access, Dtype, Kind, ReduceOp};

use crate::bench::{Bench, STALL, outcome, refused};
use crate::oracle::Stamp;

const THREADS: u64 = 4;

/// Where words cannot be acted on, in a file or on a GPU, that is said, and nothing changes: what holds there instead of the laws of words.
pub(super) fn words_are_refused(bench: &Bench) {
    let stamp = Stamp::new(1, 1);
    let region = bench.stamped(4096, Access::READ_WRITE, stamp);
    let remote = bench.import(&region);
    let local = bench.local(64);
    let user = &bench.user;
    for acted in [
        outcome(user.fetch_add(&remote, 8, 1)),
        outcome(user.compare_swap(&remote, 8, 0, 1)),
        outcome(user.signal(&remote, 8, 1)),
        outcome(user.write(&remote, &local).at(0, 0, 8).signal(8, 1).start()),
        outcome(user.reduce_into(&remote, &local, ReduceOp::Sum, Dtype::U64).start()),
    ] {
        refused(acted, &[Kind::Unsupported]);
    }
    region.check(stamp, 0, 4096).unwrap();
    outcome(user.read(&remote, &local).at(0, 0, 64).start()).unwrap();
    stamp.verify_storage(local.storage(), 0, 64).unwrap();
}

/// No addition is lost, and every thread sees each old value once.
pub fn fetch_add_from_four_threads_sums_exactly(bench: &Bench) {
    if !bench.has_words() {
        return words_are_refused(bench);
    }
    const EACH: u64 = 250;
    let region = bench.region(64, Access::READ_WRITE);
    let remote = &bench.import(&region);
    let mut seen: Vec<u64> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(move || {
                    let add = |_| {
                        let transfer = bench.user.fetch_add(remote, 24, 1).unwrap();
                        transfer.wait().unwrap();
                        transfer.value().expect("an atomic has a value")
                    };
                    (0..EACH).map(add).collect::<Vec<_>>()
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(region.word(24), THREADS * EACH);
    seen.sort_unstable();
    assert!(seen.into_iter().eq(0..THREADS * EACH), "every old value is seen once");
    assert_eq!((region.word(16), region.word(32)), (0, 0));
    // It wraps around.
    outcome(bench.user.fetch_add(remote, 24, u64::MAX)).unwrap();
    assert_eq!(region.word(24), THREADS * EACH - 1);
}

/// A swap happens exactly where the expected value is there.
pub fn compare_swap_from_four_threads_loses_nothing(bench: &Bench) {
    if !bench.has_words() {
        return words_are_refused(bench);
    }
    const EACH: u64 = 60;
    let region = bench.region(64, Access::READ_WRITE);
    let remote = &bench.import(&region);
    let swap = move |expected, new| {
        let transfer = bench.user.compare_swap(remote, 0, expected, new).unwrap();
        transfer.wait().unwrap();
        transfer.value().expect("an atomic has a value")
    };
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(move || {
                let mut guess = 0;
                for _ in 0..EACH {
                    loop {
                        let found = swap(guess, guess + 1);
                        if found == guess {
                            break;
                        }
                        guess = found;
                    }
                    guess += 1;
                }
            });
        }
    });
    assert_eq!(region.word(0), THREADS * EACH);
    assert_eq!(swap(1 << 60, 5), THREADS * EACH, "a swap with another expectation changes nothing");
    assert_eq!(region.word(0), THREADS * EACH);
}

/// Each element is updated atomically, so that no contribution is lost.
pub fn reductions_from_four_threads_lose_nothing(bench: &Bench) {
    if !bench.has_words() {
        return words_are_refused(bench);
    }
    const ELEMENTS: usize = 512;
    const EACH: u64 = 20;
    let region = bench.region(ELEMENTS * 16, Access::READ_WRITE);
    let remote = &bench.import(&region);
    thread::scope(|scope| {
        for number in 1..=THREADS {
            scope.spawn(move || {
                let whole = bench.local(ELEMENTS * 8);
                let floats = bench.local(ELEMENTS * 4);
                for element in 0..ELEMENTS {
                    whole.write_at(element * 8, &(number * element as u64).to_ne_bytes()).unwrap();
                    floats.write_at(element * 4, &(number as f32).to_ne_bytes()).unwrap();
                }
                for _ in 0..EACH {
                    outcome(bench.user.reduce_into(remote, &whole, ReduceOp::Sum, Dtype::U64).start())
                        .unwrap();
                    let floats = bench.user.reduce_into(remote, &floats, ReduceOp::Sum, Dtype::F32);
                    outcome(floats.at(ELEMENTS as u64 * 8, 0, ELEMENTS as u64 * 4).start()).unwrap();
                }
            });
        }
    });
    let sum: u64 = (1..=THREADS).sum::<u64>() * EACH;
    let bytes = region.take(0, ELEMENTS * 16);
    for element in 0..ELEMENTS {
        let whole = u64::from_ne_bytes(bytes[element * 8..][..8].try_into().unwrap());
        assert_eq!(whole, sum * element as u64, "element {element}");
        let float = f32::from_ne_bytes(bytes[ELEMENTS * 8 + element * 4..][..4].try_into().unwrap());
        assert_eq!(float, sum as f32, "element {element}");
    }
    assert!(bytes[ELEMENTS * 12..].iter().all(|byte| *byte == 0), "nothing outside the range changes");
}

/// A reduction that is too large for one piece still reaches every element once.
pub fn a_large_reduction_reaches_every_element(bench: &Bench) {
    if !bench.has_words() {
        return words_are_refused(bench);
    }
    let len = 3 << 20;
    let region = bench.region(len, Access::READ_WRITE);
    let remote = bench.import(&region);
    let mut ours = vec![0u8; len];
    for (index, word) in ours.chunks_exact_mut(4).enumerate() {
        word.copy_from_slice(&(index as u32 + 1).to_ne_bytes());
    }
    let local = bench.local(len);
    local.write_at(0, &ours).unwrap();
    for _ in 0..2 {
        outcome(bench.user.reduce_into(&remote, &local, ReduceOp::Sum, Dtype::U32).start()).unwrap();
    }
    let theirs = region.take(0, len);
    for (index, word) in theirs.chunks_exact(4).enumerate() {
        assert_eq!(word, (2 * (index as u32 + 1)).to_ne_bytes(), "element {index}");
    }
    outcome(bench.user.reduce_into(&remote, &local, ReduceOp::Min, Dtype::U32).start()).unwrap();
    assert!(region.take(0, len) == ours, "the smaller ones are ours");
}

/// Words and elements that are not aligned are refused, and nothing changes.
pub fn misaligned_words_and_elements_are_refused(bench: &Bench) {
    if !bench.has_words() {
        return words_are_refused(bench);
    }
    let region = bench.region(4096, Access::READ_WRITE);
    let remote = bench.import(&region);
    let local = bench.local(64);
    local.write_at(0, &[1; 64]).unwrap();
    let user = &bench.user;
    refused(outcome(user.fetch_add(&remote, 4, 1)), &[Kind::Invalid]);
    refused(outcome(user.compare_swap(&remote, 1, 0, 1)), &[Kind::Invalid]);
    refused(outcome(user.signal(&remote, 12, 1)), &[Kind::Invalid]);
    for offset in [4089, 4096, u64::MAX - 7] {
        refused(outcome(user.fetch_add(&remote, offset, 1)), &[Kind::Invalid]);
        refused(outcome(user.signal(&remote, offset, 1)), &[Kind::Invalid]);
    }
    let reduce = || user.reduce_into(&remote, &local, ReduceOp::Sum, Dtype::U64);
    refused(outcome(reduce().at(4, 0, 8).start()), &[Kind::Invalid]);
    refused(outcome(reduce().at(0, 0, 12).start()), &[Kind::Invalid]);
    assert!(region.take(0, 4096).iter().all(|byte| *byte == 0));
    outcome(reduce().at(8, 4, 8).start()).expect("the local side may lie anywhere");
}

/// A signal raises its counter, and its waiter wakes.
pub fn signals_add_up_and_wake_the_waiter(bench: &Bench) {
    if !bench.has_words() {
        return words_are_refused(bench);
    }
    let region = bench.region(64, Access::READ_WRITE);
    let remote = bench.import(&region);
    let local = bench.local(8);
    thread::scope(|scope| {
        let user = &bench.user;
        let (remote, local) = (&remote, &local);
        scope.spawn(move || {
            for _ in 0..10 {
                thread::sleep(std::time::Duration::from_millis(1));
                outcome(user.signal(remote, 32, 3)).unwrap();
                outcome(user.write(remote, local).signal(32, 2).start()).unwrap();
            }
        });
        assert_eq!(region.wait_signal(32, 1, STALL).unwrap().min(3), 3);
        assert_eq!(region.wait_signal(32, 50, STALL).unwrap(), 50);
    });
    assert_eq!((region.word(24), region.word(40)), (0, 0));
}
