//! Whose turn it is: a lock that costs the thread that took it first two plain stores, until another one comes.
//!
//! A communicator is used by one thread nearly always, and a locked instruction costs a tenth of what NCCL needs to register a
//! buffer. So the first thread *has* the lock: it says that it is inside, and looks whether it still has it. Another thread takes
//! that away, makes every thread of the process pass a barrier (`membarrier`), and waits until the first is not inside; from
//! then on all of them use an ordinary lock. Without that system call it is an ordinary one from the beginning,
//! and in a forked child nobody has it.
#![allow(unsafe_code, reason = "hands out what only one thread is inside of")]

use std::cell::{Cell, UnsafeCell};
use std::ops::{Deref, DerefMut};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, compiler_fence, fence};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::fork::wiped_word;

/// No thread has it yet.
const NOBODY: u64 = u64::MAX - 1;
/// All threads use the ordinary lock.
const EVERYBODY: u64 = u64::MAX;

/// Of locks that no thread ever has.
static NEVER: AtomicU64 = AtomicU64::new(EVERYBODY);

/// How long the one who takes it away sleeps before it looks again whether the other is out.
const SHORTEST_PAUSE: Duration = Duration::from_micros(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// A value that one thread at a time is inside of.
pub(super) struct Turn<T> {
    /// In a forked child it is nobody's number: there the first thread takes the slow path, which finds that out.
    has: &'static AtomicU64,
    inside: AtomicBool,
    common: Mutex<()>,
    value: UnsafeCell<T>,
}

// SAFETY: one thread at a time gets at the value, which may be another one each time.
unsafe impl<T: Send> Sync for Turn<T> {}

impl<T> Turn<T> {
    pub(super) fn new(value: T) -> Turn<T> {
        let first = if *BARRIER { wiped_word(NOBODY) } else { None };
        Turn {
            has: first.unwrap_or(&NEVER),
            inside: AtomicBool::new(false),
            common: Mutex::new(()),
            value: UnsafeCell::new(value),
        }
    }

    /// Waits until nobody else is inside. A thread that is inside does not come in a second time.
    #[inline]
    pub(super) fn lock(&self) -> TurnGuard<'_, T> {
        match self.mine() {
            Some(mine) => {
                std::mem::forget(mine);
                TurnGuard { turn: self, common: None }
            }
            None => self.lock_slowly(),
        }
    }

    /// The same for the thread that has it, which waits for nobody; `None` for every other one.
    #[inline]
    pub(super) fn mine(&self) -> Option<Mine<'_, T>> {
        if self.inside.load(Ordering::Relaxed) {
            return None;
        }
        // SAFETY: nobody is inside of it, or a thread that does not have it any more.
        unsafe { self.enter() }
    }

    /// The same where it need not be asked whether this thread is inside already.
    ///
    /// # Safety
    /// This thread is not inside.
    #[inline(always)]
    pub(super) unsafe fn enter(&self) -> Option<Mine<'_, T>> {
        let (me, has) = (NUMBER.get(), self.has);
        if has.load(Ordering::Relaxed) == me {
            self.inside.store(true, Ordering::Relaxed);
            // The processor may look before others see the store: the thread that takes the lock away makes it pass a barrier.
            compiler_fence(Ordering::SeqCst);
            if has.load(Ordering::Relaxed) == me {
                return Some(Mine(self));
            }
            self.inside.store(false, Ordering::Release);
        }
        None
    }

    #[cold]
    fn lock_slowly(&self) -> TurnGuard<'_, T> {
        let common = self.common.lock();
        match self.has.load(Ordering::Relaxed) {
            // Or this is a forked child, in which there is no other thread.
            EVERYBODY | WIPED => {}
            NOBODY => {
                self.inside.store(true, Ordering::Relaxed);
                self.has.store(thread(), Ordering::Relaxed);
                return TurnGuard { turn: self, common: None };
            }
            _ => self.take_away(),
        }
        TurnGuard { turn: self, common: Some(common) }
    }

    /// Makes it everybody's, and waits until the thread that had it is out. With the ordinary lock held.
    fn take_away(&self) {
        self.has.store(EVERYBODY, Ordering::SeqCst);
        // From here on either that thread has seen that it has it no more, or this one sees that it is inside.
        barrier();
        let mut pause = SHORTEST_PAUSE;
        while self.inside.load(Ordering::Acquire) {
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Whether the calling thread has it, or would get it.
    pub(super) fn suits(&self) -> bool {
        let has = self.has.load(Ordering::Relaxed);
        has == NOBODY || has == thread()
    }
}

/// The value, for the one thread that is inside.
pub(super) struct TurnGuard<'a, T> {
    turn: &'a Turn<T>,
    /// The ordinary lock, where it is everybody's.
    common: Option<MutexGuard<'a, ()>>,
}

impl<T> Deref for TurnGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the thread that has it is inside, or this one holds the ordinary lock while nobody has it.
        unsafe { &*self.turn.value.get() }
    }
}

impl<T> DerefMut for TurnGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above.
        unsafe { &mut *self.turn.value.get() }
    }
}

impl<T> Drop for TurnGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if self.common.is_none() {
            self.turn.inside.store(false, Ordering::Release);
        }
    }
}

/// The value, for the thread that has the lock and is inside.
pub(super) struct Mine<'a, T>(&'a Turn<T>);

impl<T> Deref for Mine<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the thread that has it is inside.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for Mine<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for Mine<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.0.inside.store(false, Ordering::Release);
    }
}

/// A number for this thread that no other one ever has.
fn thread() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(WIPED);
    if NUMBER.get() == NONE {
        NUMBER.set(LAST.fetch_add(1, Ordering::Relaxed) + 1);
    }
    NUMBER.get()
}

thread_local! {
    /// The number of this thread, from when it first has or wants a lock.
    static NUMBER: Cell<u64> = const { Cell::new(NONE) };
}

/// The number of a thread that has none yet: no lock is its.
const NONE: u64 = u64::MAX - 2;

/// What is in the place of a number in a forked child.
const WIPED: u64 = 0;

/// Whether the kernel makes all threads of this process pass a barrier when asked.
static BARRIER: LazyLock<bool> =
    LazyLock::new(|| membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) == 0);

/// Every thread of this process has passed a barrier when it returns. Without the system call for it only this one has, and the
/// others do where they say [`pass`].
pub(super) fn barrier() {
    fence(Ordering::SeqCst);
    if *BARRIER {
        // It cannot fail once the process is registered for it.
        let done = membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED);
        debug_assert_eq!(done, 0);
    }
}

/// What is before it comes before what is after it, for a thread that calls [`barrier`].
#[inline]
pub(super) fn pass() {
    compiler_fence(Ordering::SeqCst);
    if !*BARRIER {
        fence(Ordering::SeqCst);
    }
}

fn membarrier(command: libc::c_int) -> libc::c_long {
    // SAFETY: it takes numbers, and changes nothing but the order of memory accesses.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn the_first_thread_has_it_until_another_one_comes() {
        let turn = Turn::new(0u64);
        for _ in 0..3 {
            *turn.lock() += 1;
        }
        let first = if *BARRIER { thread() } else { EVERYBODY };
        assert_eq!(turn.has.load(Ordering::Relaxed), first);
        assert_eq!(turn.suits(), *BARRIER);
        std::thread::scope(|scope| {
            scope.spawn(|| *turn.lock() += 1);
        });
        assert_eq!(turn.has.load(Ordering::Relaxed), EVERYBODY);
        *turn.lock() += 1;
        assert_eq!(*turn.lock(), 5);
        assert!(!turn.suits(), "it stays everybody's");
    }

    #[test]
    fn never_two_are_inside_at_the_moment_when_it_is_taken_away() {
        const OTHERS: usize = 3;
        for turn_of_the_test in 0..400u64 {
            let (turn, inside) = (Turn::new((0u64, 0u64)), AtomicUsize::new(0));
            let visit = || {
                let mut both = turn.lock();
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                both.0 += 1;
                std::hint::black_box(&mut both.0);
                both.1 += 1;
                assert_eq!(both.0, both.1);
                inside.fetch_sub(1, Ordering::SeqCst);
            };
            visit();
            std::thread::scope(|scope| {
                for other in 0..OTHERS {
                    scope.spawn(move || {
                        for _ in 0..turn_of_the_test * 7 % 300 + other as u64 {
                            std::hint::spin_loop();
                        }
                        (0..20).for_each(|_| visit());
                    });
                }
                (0..500).for_each(|_| visit());
            });
            assert_eq!(*turn.lock(), (501 + 20 * OTHERS as u64, 501 + 20 * OTHERS as u64));
        }
    }

    #[test]
    fn in_a_forked_child_nobody_has_it() {
        use crate::fork::tests::in_a_child;
        let turn = Turn::new(0u64);
        assert!(in_a_child(|| turn.mine().is_none()), "nobody had it before");
        *turn.lock() += 1;
        assert_eq!(turn.mine().is_some(), *BARRIER);
        assert!(in_a_child(|| turn.mine().is_none() && *turn.lock() == 1));
        assert_eq!(turn.mine().is_some(), *BARRIER, "in the parent nothing has changed");
    }

    #[test]
    fn a_thread_that_comes_waits_until_the_other_is_out() {
        let turn = Turn::new(Vec::new());
        let mut mine = turn.lock();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| turn.lock().push(2));
            while turn.has.load(Ordering::Relaxed) == thread() {
                std::thread::yield_now();
            }
            mine.push(1);
            drop(mine);
            assert!(other.join().is_ok());
        });
        assert_eq!(*turn.lock(), [1, 2]);
    }
}
