#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
#![allow(unsafe_code, reason = "calls what has promises")]

use std::cell::{Cell, RefCell};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

use super::{copy, is_possible, recvmsg, sequence};
use crate::progress::socket::{RawPartMut, Socket};

const WATCHDOG: Duration = Duration::from_secs(30);

thread_local! {
    static BETWEEN: RefCell<Option<Box<dyn FnMut()>>> = const { RefCell::new(None) };
}

/// What happens in this thread between the look and the deed, and when the look was: just now, so that the clock notices nothing.
pub(super) fn between(looked: Instant) -> Instant {
    let Some(mut act) = BETWEEN.take() else { return looked };
    act();
    BETWEEN.set(Some(act));
    Instant::now()
}

fn between_look_and_deed(act: impl FnMut() + 'static) {
    BETWEEN.set(Some(Box::new(act)));
}

fn part(bytes: &mut [u8]) -> RawPartMut {
    RawPartMut { ptr: bytes.as_mut_ptr(), len: bytes.len() }
}

/// Spins, without a system call, until this thread has been taken off its processor: another one wants it too.
fn until_put_aside() {
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
        assert!(begun.elapsed() < WATCHDOG, "a thread is never put aside");
        std::hint::spin_loop();
    }
    over.store(true, Ordering::Relaxed);
    rival.join().unwrap();
    sched_setaffinity(None, &all).unwrap();
}

#[test]
fn a_copy_whose_thread_was_put_aside_after_the_look_looks_again_and_is_not_made() {
    if !is_possible() {
        return;
    }
    let mut target = vec![0u8; 4096];
    let looks = Cell::new(0);
    let look = || {
        looks.set(looks.get() + 1);
        looks.get() == 1
    };
    between_look_and_deed(until_put_aside);
    // SAFETY: the part is this test's own.
    assert!(!unsafe { copy(&look, &[part(&mut target)], &[7; 4096]) });
    assert_eq!(looks.get(), 2);
    assert!(target.iter().all(|byte| *byte == 0), "it was made after all");
}

#[test]
fn nothing_is_received_by_a_thread_that_was_put_aside_after_the_look() {
    if !is_possible() {
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
    let looks = Cell::new(0);
    let look = || {
        looks.set(looks.get() + 1);
        looks.get() == 1
    };
    between_look_and_deed(until_put_aside);
    // SAFETY: the header names this test's own bytes.
    let first = unsafe { recvmsg(&look, fd, &raw mut message, libc::MSG_DONTWAIT) };
    assert_eq!((first, looks.get(), target), (None, 2, [0; 5]));
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
fn a_look_that_took_long_is_made_again() {
    let mut target = [0u8; 8];
    let looks = Cell::new(0);
    let look = || {
        looks.set(looks.get() + 1);
        if looks.get() == 1 {
            thread::sleep(Duration::from_millis(5));
        }
        looks.get() == 1
    };
    // SAFETY: the part is this test's own.
    assert!(!unsafe { copy(&look, &[part(&mut target)], &[7; 8]) });
    assert_eq!((looks.get(), target), (2, [0; 8]));
}
