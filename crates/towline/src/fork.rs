//! Fork: a child of a process that uses Towline can do nothing with it but `exec` or exit.
//!
//! The child has no progress threads, its copies of the locks may be held for ever by threads that do not
//! exist there, and its sockets and its epoll are the parent's. So every entry into the library asks
//! [`guard`] before it takes any lock, and every `Drop` that would lock or notify a peer asks [`in_child`].
//! Opening a new endpoint in the child is refused too, since the process-wide threads cannot be restarted.
//! A child forked *before* Towline was first used is an ordinary process and is not affected.
//!
//! A child lets go of the sockets at once: it has no use for them, and a connection ends only when nobody holds it any more, so
//! that peers would not notice the parent's end.
#![allow(unsafe_code, reason = "maps one page that the kernel wipes in a forked child; closes sockets in it")]

use std::ffi::c_void;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::{Error, Kind, Result};

const ALIVE: u32 = 1;

static PROCESS: Mark = Mark::new();

/// Refuses to go on in a forked child; costs one load. The first call marks this process as the owner.
#[inline]
pub fn guard(op: &'static str) -> Result<()> {
    match PROCESS.state() {
        State::Owner => Ok(()),
        state => first_or_refused(op, state),
    }
}

#[cold]
fn first_or_refused(op: &'static str, state: State) -> Result<()> {
    if state == State::Unmarked {
        PROCESS.set(true);
        return Ok(());
    }
    Err(Error::new(
        Kind::Unavailable,
        op,
        "this process was forked after Towline had been started in its parent; the child cannot use it, \
         nor open an endpoint of its own, before it has called exec (fork before the first use of \
         Towline, or start the worker with spawn instead of fork)",
    ))
}

/// Whether this is a forked child of a process that used Towline: a `Drop` then does nothing.
#[inline]
pub(crate) fn in_child() -> bool {
    PROCESS.state() == State::Child
}

/// A word that is 0 in every forked child; it is never freed. `None` where the kernel has no such memory (before 4.14).
pub(crate) fn wiped_word(value: u64) -> Option<&'static AtomicU64> {
    static REST: Mutex<&'static [AtomicU64]> = Mutex::new(&[]);
    let mut rest = REST.lock();
    if rest.is_empty() {
        let words = rustix::param::page_size() / size_of::<AtomicU64>();
        // SAFETY: the page is mapped, writable, aligned and zeroed, which is as many valid words; it is never unmapped.
        *rest = unsafe { std::slice::from_raw_parts(wiped_page()?.cast(), words) };
    }
    let (word, others) = rest.split_first()?;
    *rest = others;
    word.store(value, Ordering::Relaxed);
    Some(word)
}

/// The sockets, a bit for each descriptor: without locks and without memory of its own, since it is read in the child. One with a
/// higher number stays open there.
static SOCKETS: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];

/// The word and the bit of a descriptor.
fn place_of(fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((SOCKETS.get(fd / 64)?, 1 << (fd % 64)))
}

/// A forked child lets go of that socket.
pub(crate) fn not_for_children(fd: RawFd) {
    static LETTING_GO: Once = Once::new();
    LETTING_GO.call_once(|| {
        // SAFETY: the function is there as long as this library, and does what may be done after a fork.
        unsafe { libc::pthread_atfork(None, None, Some(let_go)) };
    });
    if let Some((word, bit)) = place_of(fd) {
        word.fetch_or(bit, Ordering::Relaxed);
    }
}

/// The number is about to have another owner.
pub(crate) fn no_longer_ours(fd: RawFd) {
    if let Some((word, bit)) = place_of(fd) {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

/// In the child, before `fork` returns there. Only system calls that may be made then. The numbers stay taken, so that whatever the
/// child drops later closes nothing of its own.
unsafe extern "C" fn let_go() {
    // SAFETY: the name ends with a zero, and nothing else is passed.
    let nothing = unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    if nothing < 0 {
        return;
    }
    for (index, word) in SOCKETS.iter().enumerate() {
        let mut left = word.load(Ordering::Relaxed);
        while left != 0 {
            let fd = (index * 64) as RawFd + left.trailing_zeros() as RawFd;
            left &= left - 1;
            // SAFETY: the descriptor is a socket of this library, which nothing in the child uses.
            unsafe { libc::dup3(nothing, fd, libc::O_CLOEXEC) };
        }
    }
    // SAFETY: opened above.
    unsafe { libc::close(nothing) };
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Unmarked,
    Owner,
    Child,
}

/// The mark of the owning process. Without locks, since it is read in the child.
struct Mark {
    /// A word that the kernel zeroes in a child.
    page: AtomicPtr<AtomicU32>,
    /// The owner's pid, where the kernel has no wipe-on-fork pages (before 4.14).
    pid: AtomicU32,
}

impl Mark {
    const fn new() -> Mark {
        Mark { page: AtomicPtr::new(ptr::null_mut()), pid: AtomicU32::new(0) }
    }

    #[inline]
    fn state(&self) -> State {
        let page = self.page.load(Ordering::Acquire);
        if !page.is_null() {
            // SAFETY: `set` publishes only a mapped, aligned page and nobody ever unmaps a published one;
            // a forked child has the same mapping.
            let word = unsafe { &*page }.load(Ordering::Relaxed);
            return if word == ALIVE { State::Owner } else { State::Child };
        }
        match self.pid.load(Ordering::Acquire) {
            0 => State::Unmarked,
            pid if pid == std::process::id() => State::Owner,
            _ => State::Child,
        }
    }

    /// Marks this process. Threads may race here: whatever the winner publishes is right for all of them.
    fn set(&self, wipe_on_fork: bool) {
        match wipe_on_fork.then(marked_page).flatten() {
            Some(page) => {
                if self
                    .page
                    .compare_exchange(ptr::null_mut(), page, Ordering::AcqRel, Ordering::Acquire)
                    .is_err()
                {
                    // SAFETY: `marked_page` mapped it just now and the exchange did not publish it.
                    let _ = unsafe { munmap(page.cast(), rustix::param::page_size()) };
                }
            }
            None => {
                let _ = self.pid.compare_exchange(0, std::process::id(), Ordering::AcqRel, Ordering::Acquire);
            }
        }
    }
}

/// A page whose first word is `ALIVE` here and zero in every forked child.
fn marked_page() -> Option<*mut AtomicU32> {
    let word = wiped_page()?.cast::<AtomicU32>();
    // SAFETY: the page is mapped, writable, page-aligned and zeroed, which is a valid `AtomicU32`.
    unsafe { &*word }.store(ALIVE, Ordering::Release);
    Some(word)
}

/// A page of zeros that is wiped in every forked child.
fn wiped_page() -> Option<*mut c_void> {
    let length = rustix::param::page_size();
    // SAFETY: a fresh private mapping at an address of the kernel's choice overlaps nothing.
    let page = unsafe {
        mmap_anonymous(ptr::null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    }
    .ok()?;
    // SAFETY: the advice covers exactly the page mapped above, which nobody else knows yet.
    if unsafe { madvise(page, length, Advice::LinuxWipeOnFork) }.is_err() {
        // SAFETY: as above; the page was not published.
        let _ = unsafe { munmap(page, length) };
        return None;
    }
    Some(page)
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use std::time::{Duration, Instant};

    use super::*;

    /// Forks, runs `check` in the child and returns its result. `check` must not allocate nor lock.
    pub(crate) fn in_a_child(check: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child calls only `check` (loads, getpid) and `_exit`: nothing that takes a lock.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "fork failed");
        if pid == 0 {
            let code = if check() { 42 } else { 43 };
            // SAFETY: ends the child at once, without running destructors of the parent's objects.
            unsafe { libc::_exit(code) };
        }
        let watchdog = Instant::now() + Duration::from_secs(20);
        loop {
            let mut status = 0;
            // SAFETY: `status` outlives the call and `pid` is our own child.
            let ended = unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) };
            if ended == pid {
                assert!(libc::WIFEXITED(status), "the child ended by a signal: {status:#x}");
                return libc::WEXITSTATUS(status) == 42;
            }
            assert_eq!(ended, 0, "waitpid failed");
            if Instant::now() > watchdog {
                // SAFETY: kills our own child, which has not been reaped.
                unsafe { libc::kill(pid, libc::SIGKILL) };
                panic!("the child did not end");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_forked_child_sees_the_guard_and_the_parent_does_not() {
        guard("test").unwrap();
        assert!(!in_child());
        assert!(in_a_child(|| in_child() && PROCESS.state() == State::Child));
        assert!(!in_child());
        guard("test").unwrap();
    }

    #[test]
    fn a_child_of_a_child_sees_the_guard_too() {
        guard("test").unwrap();
        assert!(in_a_child(|| {
            // SAFETY: as in `in_a_child`; the grandchild only loads and exits.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                // SAFETY: ends the grandchild.
                unsafe { libc::_exit(if in_child() { 42 } else { 43 }) };
            }
            let mut status = 0;
            // SAFETY: `status` outlives the call and `pid` is our own child.
            unsafe { libc::waitpid(pid, &mut status, 0) };
            libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 42
        }));
    }

    #[test]
    fn a_child_forked_before_the_first_use_may_use_it() {
        let mark = Mark::new();
        assert_eq!(mark.state(), State::Unmarked);
        assert!(in_a_child(|| {
            let fresh = mark.state() == State::Unmarked;
            mark.set(true);
            fresh && mark.state() == State::Owner
        }));
        assert_eq!(mark.state(), State::Unmarked);
    }

    #[test]
    fn without_a_wiped_page_the_pid_tells() {
        let mark = Mark::new();
        mark.set(false);
        assert!(mark.page.load(Ordering::Relaxed).is_null());
        assert_eq!(mark.state(), State::Owner);
        assert!(in_a_child(|| mark.state() == State::Child));
        assert_eq!(mark.state(), State::Owner);
    }
}
