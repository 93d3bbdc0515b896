#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
#![allow(unsafe_code, reason = "calls what has promises")]

use std::cell::{Cell, RefCell};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

use super::{SequenceOutcome, Word, copy, exchange, is_possible, pwrite, recvmsg, sequence};
use crate::memory::reduce::{change_if, reduce_if};
use crate::memory::{Dtype, ReduceOp};
use crate::runtime::socket::{RawPartMut, Socket};
use crate::skip::skip;

const WATCHDOG: Duration = Duration::from_secs(30);

thread_local! {
    static BETWEEN: RefCell<Option<Box<dyn FnMut()>>> = const { RefCell::new(None) };
}

/// Runs what a test wants between the check and the action, and says when the check was: just now, so that the clock notices nothing.
pub(super) fn between(checked: Instant) -> Instant {
    let Some(mut act) = BETWEEN.take() else { return checked };
    act();
    BETWEEN.set(Some(act));
    Instant::now()
}

fn between_check_and_action(act: impl FnMut() + 'static) {
    BETWEEN.set(Some(Box::new(act)));
}

fn part(bytes: &mut [u8]) -> RawPartMut {
    RawPartMut { ptr: bytes.as_mut_ptr(), len: bytes.len() }
}

/// Spins, without a system call, until this thread has been taken off its processor: another one wants it too.
fn until_preempted() {
    let all = sched_getaffinity(None).unwrap();
    let mut one = CpuSet::new();
    one.set(sched_getcpu());
    sched_setaffinity(None, &one).unwrap();
    let over = std::sync::Arc::new(AtomicBool::new(false));
    // It inherits the one processor.
    let rival = thread::spawn({
        let over = std::sync::Arc::clone(&over);
        move || {
            while !over.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        }
    });
    let area = sequence::area().unwrap();
    // SAFETY: this thread's own area.
    unsafe { sequence::name(area, sequence::of_copy()) };
    let begun = Instant::now();
    while sequence::is_named(area) {
        assert!(begun.elapsed() < WATCHDOG, "a thread is never preempted");
        std::hint::spin_loop();
    }
    over.store(true, Ordering::Relaxed);
    rival.join().unwrap();
    sched_setaffinity(None, &all).unwrap();
}

/// Whether a check and an action can be one step here; if not, says that the test is skipped.
fn possible(test: &str) -> bool {
    if !is_possible() {
        skip(test, "rseq", "this machine gives no restartable sequences");
    }
    is_possible()
}

#[test]
fn a_copy_whose_thread_was_preempted_after_the_check_checks_again_and_is_not_made() {
    if !possible("a_copy_whose_thread_was_preempted_after_the_check_checks_again_and_is_not_made") {
        return;
    }
    let mut target = vec![0u8; 4096];
    let checks = Cell::new(0);
    let check = || {
        checks.set(checks.get() + 1);
        checks.get() == 1
    };
    between_check_and_action(until_preempted);
    // SAFETY: the part is this test's own.
    assert!(!unsafe { copy(&check, &[part(&mut target)], &[7; 4096]) });
    assert_eq!(checks.get(), 2);
    assert!(target.iter().all(|byte| *byte == 0), "it was made after all");
}

#[test]
fn nothing_is_received_by_a_thread_that_was_preempted_after_the_check() {
    if !possible("nothing_is_received_by_a_thread_that_was_preempted_after_the_check") {
        return;
    }
    let (here, there) = Socket::pair().unwrap();
    let _ = there.send(&[std::io::IoSlice::new(b"bytes")], &[]).unwrap();
    let mut target = [0u8; 5];
    let mut vector = libc::iovec { iov_base: target.as_mut_ptr().cast(), iov_len: target.len() };
    // SAFETY: all zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut vector, 1);
    let fd = std::os::fd::AsFd::as_fd(&here).as_raw_fd();
    let checks = Cell::new(0);
    let check = || {
        checks.set(checks.get() + 1);
        checks.get() == 1
    };
    between_check_and_action(until_preempted);
    // SAFETY: the header names this test's own bytes.
    let first = unsafe { recvmsg(&check, fd, &raw mut message, libc::MSG_DONTWAIT) };
    assert_eq!((first, checks.get(), target), (None, 2, [0; 5]));
    BETWEEN.take();
    let call = |wanted: bool| {
        let mut message = message;
        // SAFETY: as before.
        unsafe { recvmsg(&move || wanted, fd, &raw mut message, libc::MSG_DONTWAIT) }
    };
    assert_eq!(call(false), None);
    assert_eq!(call(true), Some(5));
    assert_eq!(&target, b"bytes");
    assert_eq!(call(true), Some(-(libc::EAGAIN as isize)));
}

/// A check that says yes once.
fn once() -> (std::rc::Rc<Cell<usize>>, impl Fn() -> bool) {
    let checks = std::rc::Rc::new(Cell::new(0));
    let counted = std::rc::Rc::clone(&checks);
    let check = move || {
        counted.set(counted.get() + 1);
        counted.get() == 1
    };
    (checks, check)
}

#[test]
fn a_word_is_not_exchanged_by_a_thread_that_was_preempted_after_the_check() {
    if !possible("a_word_is_not_exchanged_by_a_thread_that_was_preempted_after_the_check") {
        return;
    }
    let mut word = 5u64;
    between_check_and_action(until_preempted);
    let (checks, check) = once();
    // SAFETY: the word is this test's own.
    let added = unsafe { change_if(&check, (&raw mut word).cast(), |seen| Some(seen + 1)) };
    assert_eq!((added, checks.get(), word), (None, 2, 5));
    let mut elements = [1u32, 2, 3];
    let (checks, check) = once();
    // SAFETY: the elements are this test's own.
    let all = unsafe {
        let to = elements.as_mut_ptr().cast();
        reduce_if(&check, to, [7u32; 3].as_ptr().cast(), 12, ReduceOp::Sum, Dtype::U32)
    };
    assert_eq!((all.unwrap(), checks.get(), elements), (false, 2, [1, 2, 3]));
}

#[test]
fn nothing_is_written_to_a_file_by_a_thread_that_was_preempted_after_the_check() {
    if !possible("nothing_is_written_to_a_file_by_a_thread_that_was_preempted_after_the_check") {
        return;
    }
    let file = rustix::fs::memfd_create("at-once", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let length = || rustix::fs::fstat(&file).unwrap().st_size;
    // SAFETY: the bytes are constant.
    let write = |check: &dyn Fn() -> bool, fd| unsafe { pwrite(check, fd, b"bytes".as_ptr(), 5, 3) };
    between_check_and_action(until_preempted);
    let (checks, check) = once();
    assert_eq!((write(&check, file.as_raw_fd()), checks.get(), length()), (None, 2, 0));
    BETWEEN.take();
    assert_eq!((write(&|| false, file.as_raw_fd()), length()), (None, 0));
    assert_eq!((write(&|| true, file.as_raw_fd()), length()), (Some(5), 8));
    assert_eq!(write(&|| true, -1), Some(-(libc::EBADF as isize)));
}

#[test]
fn a_series_of_exchanges_stops_at_what_others_have_changed_in_every_width() {
    fn stops<W: Word + std::fmt::Debug>(old: W, new: W, other: W) {
        let mut words = [old, old, other, old];
        let at = words.as_mut_ptr();
        let swap = |mut from| {
            exchange::<W, _>(&|| true, |turn| {
                // SAFETY: the words are this test's own.
                match unsafe { W::swap_all(turn, at, [old; 4].as_ptr(), [new; 4].as_ptr(), 4, from) } {
                    SequenceOutcome::Preempted(reached) => {
                        from = reached;
                        None
                    }
                    went => Some(went),
                }
            })
        };
        assert_eq!(swap(1), Some(SequenceOutcome::Changed(2)));
        assert_eq!(swap(3), Some(SequenceOutcome::Complete));
        assert_eq!(swap(4), Some(SequenceOutcome::Complete));
        assert_eq!(words, [old, new, other, new]);
        assert_eq!(exchange::<W, W>(&|| false, |_| Some(old)), None);
    }
    stops(3u8, 250, 4);
    stops(3u16, 65_000, 4);
    stops(3u32, 4_000_000_000, 4);
    stops(3u64, u64::MAX - 1, 4);
}

/// Another thread wants the processor all the time, and others change the same words.
#[test]
fn what_is_reduced_by_a_thread_that_is_put_aside_again_and_again_is_reduced_once() {
    let all = sched_getaffinity(None).unwrap();
    let mut one = CpuSet::new();
    one.set(sched_getcpu());
    let mut narrow = vec![0u8; 999];
    let mut wide = vec![0u64; 3000];
    let (to_narrow, to_wide) =
        (narrow.as_mut_ptr().expose_provenance(), wide.as_mut_ptr().expose_provenance());
    let over = AtomicBool::new(false);
    let reduce = || {
        let mut times = 0u64;
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(200) {
            // SAFETY: both are this test's own, and only changed through atomics meanwhile.
            unsafe {
                let (narrow, wide) = (to_narrow as *mut u8, to_wide as *mut u8);
                assert!(
                    reduce_if(&|| true, narrow, [1u8; 999].as_ptr(), 999, ReduceOp::Sum, Dtype::I8).unwrap()
                );
                let ones = [1f64; 3000];
                let ones = ones.as_ptr().cast();
                assert!(reduce_if(&|| true, wide, ones, 24_000, ReduceOp::Sum, Dtype::F64).unwrap());
            }
            times += 1;
        }
        times
    };
    sched_setaffinity(None, &one).unwrap();
    let times: u64 = thread::scope(|scope| {
        let other = scope.spawn(reduce);
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let mine = reduce();
        let times = mine + other.join().unwrap();
        over.store(true, Ordering::Relaxed);
        times
    });
    sched_setaffinity(None, &all).unwrap();
    assert!(narrow.iter().all(|byte| *byte == times as u8), "{times} times: {:?}", &narrow[..8]);
    let expected = (times as f64).to_bits();
    assert!(wide.iter().all(|bits| *bits == expected), "{times} times: {:?}", f64::from_bits(wide[0]));
}

#[test]
fn bytes_are_spread_over_parts_and_a_copy_that_is_sent_away_is_whole_in_the_end() {
    let bytes: Vec<u8> = (0..super::MOST_COPIED).map(|index| (index * 7 + 1) as u8).collect();
    let all = sched_getaffinity(None).unwrap();
    let mut one = CpuSet::new();
    one.set(sched_getcpu());
    sched_setaffinity(None, &one).unwrap();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(100) {
            let mut target = vec![0u8; bytes.len() + 100];
            let (first, rest) = target.split_at_mut(13);
            let (second, third) = rest.split_at_mut(5000);
            let parts = [part(first), part(&mut []), part(second), part(third)];
            // SAFETY: the parts are this test's own, and have room for the bytes.
            assert!(unsafe { copy(&|| true, &parts, &bytes) });
            assert!(
                target[..bytes.len()] == bytes[..] && target[bytes.len()..].iter().all(|byte| *byte == 0)
            );
        }
        over.store(true, Ordering::Relaxed);
    });
    sched_setaffinity(None, &all).unwrap();
}

#[test]
fn a_check_that_took_long_is_made_again() {
    let mut target = [0u8; 8];
    let checks = Cell::new(0);
    let check = || {
        checks.set(checks.get() + 1);
        if checks.get() == 1 {
            thread::sleep(Duration::from_millis(5));
        }
        checks.get() == 1
    };
    // SAFETY: the part is this test's own.
    assert!(!unsafe { copy(&check, &[part(&mut target)], &[7; 8]) });
    assert_eq!((checks.get(), target), (2, [0; 8]));
}
