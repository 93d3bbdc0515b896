//! The one function with which the library starts threads.
#![allow(unsafe_code, reason = "calls pthread_sigmask and mmap, for which there is no safe wrapper")]

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::{Error, Kind, Result};

/// Starts a thread of the library with that name, which takes no signal that the program may want on a thread of its own.
///
/// A Python program counts on SIGINT interrupting its main thread, so the library's threads must not be
/// the ones that receive it. Faults stay unblocked: they belong to the thread that causes them.
///
/// Errors: `Exhausted` where there is no room for a thread.
pub fn start_thread<T: Send + 'static>(
    op: &'static str,
    name: impl Into<String>,
    body: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    start(op, name.into(), |builder| builder.spawn(body))
}

/// The same, for a thread that ends before the scope does.
pub fn start_scoped_thread<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    op: &'static str,
    name: impl Into<String>,
    body: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>> {
    start(op, name.into(), |builder| builder.spawn_scoped(scope, body))
}

fn start<H>(op: &'static str, name: String, spawn: impl FnOnce(Builder) -> io::Result<H>) -> Result<H> {
    let builder = Builder::new().name(name.clone());
    // The new thread inherits the mask, so that there is no moment in which it could take a signal.
    let blocked = Blocked::here();
    let spawned = has_room().and_then(|()| spawn(builder));
    drop(blocked);
    // Whatever errno says.
    spawned.map_err(|error| {
        Error::new(Kind::Exhausted, op, format!("cannot start the thread {name}: {error}")).caused_by(error)
    })
}

/// What a thread takes: its stack, and what the standard library gives it before it runs, without which it ends the process.
const ROOM: usize = (2 << 20) + (128 << 10);

/// Whether there is room for one more thread now.
fn has_room() -> io::Result<()> {
    // SAFETY: a mapping where the kernel likes it, that nobody knows of, and that goes again.
    unsafe {
        let room = mmap_anonymous(ptr::null_mut(), ROOM, ProtFlags::empty(), MapFlags::PRIVATE)?;
        munmap(room, ROOM)?;
    }
    Ok(())
}

/// While it lives, every signal but faults and the profiler's is blocked on the calling thread.
struct Blocked {
    before: Option<libc::sigset_t>,
    /// The mask is this thread's own.
    _here: PhantomData<*const ()>,
}

impl Blocked {
    fn here() -> Blocked {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        let mut before = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `sigfillset` initializes the set before the others use it; the signal numbers are valid; the old mask is read
        // only where the call has filled it.
        let before = unsafe {
            libc::sigfillset(set.as_mut_ptr());
            for signal in [
                libc::SIGSEGV,
                libc::SIGBUS,
                libc::SIGFPE,
                libc::SIGILL,
                libc::SIGTRAP,
                libc::SIGABRT,
                libc::SIGSYS,
                libc::SIGPROF,
            ] {
                libc::sigdelset(set.as_mut_ptr(), signal);
            }
            let changed = libc::pthread_sigmask(libc::SIG_SETMASK, set.as_ptr(), before.as_mut_ptr()) == 0;
            changed.then(|| before.assume_init())
        };
        Blocked { before, _here: PhantomData }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // SAFETY: the mask that this thread had; the one that it has now is not asked for.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, ptr::null_mut()) };
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// Which signals are blocked on the calling thread.
    fn blocked() -> Vec<i32> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: nothing is changed, and the call fills the set.
        let set = unsafe {
            assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, ptr::null(), set.as_mut_ptr()), 0);
            set.assume_init()
        };
        // SAFETY: the set is filled, and the numbers are those of signals.
        (1..32).filter(|signal| unsafe { libc::sigismember(&set, *signal) } == 1).collect()
    }

    #[test]
    fn a_thread_has_its_name_and_the_programs_signals_blocked_and_the_caller_keeps_its_mask() {
        let before = blocked();
        let found = || (std::thread::current().name().map(str::to_owned), blocked());
        let own = start_thread("test", "towline-own", found).unwrap().join().unwrap();
        let scoped = std::thread::scope(|scope| {
            start_scoped_thread(scope, "test", "towline-scoped", found).unwrap().join().unwrap()
        });
        for ((name, blocked), expected) in [(own, "towline-own"), (scoped, "towline-scoped")] {
            assert_eq!(name.as_deref(), Some(expected));
            assert!(blocked.contains(&libc::SIGINT) && blocked.contains(&libc::SIGTERM), "{blocked:?}");
            assert!(!blocked.contains(&libc::SIGSEGV) && !blocked.contains(&libc::SIGPROF), "{blocked:?}");
        }
        assert_eq!(blocked(), before);
    }
}
