//! A robust mutex in shared memory: the kernel marks it when the thread that holds it dies.
//!
//! The thread's exit releases it early, before the process's memory is freed, and for that very thread: a
//! marked word means that the thread will not run again, in user code or in a system call.

#![allow(unsafe_code, reason = "calls the C library's robust mutexes on memory that processes share")]

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::fence::shared::Lendable;
use crate::{Error, Kind, Result};

/// The C library's mutex starts with its lock word only in glibc; elsewhere there is no liveness by futex.
pub(crate) const SUPPORTED: bool = cfg!(target_env = "gnu");

/// Set in the word by the kernel when the holder died.
pub(crate) const OWNER_DIED: u32 = 0x4000_0000;
/// Set in the word by a waiter, so that an unlock or a death wakes.
pub(crate) const WAITERS: u32 = 0x8000_0000;
/// The thread that holds the mutex, in its own pid namespace.
pub(crate) const TID_MASK: u32 = 0x3fff_ffff;

/// One mutex on its own cache line. All zero means free and not yet initialised.
#[repr(C, align(64))]
pub(crate) struct RobustMutex {
    mutex: UnsafeCell<MaybeUninit<libc::pthread_mutex_t>>,
}

const _: () = assert!(size_of::<RobustMutex>() == 64, "slots have a fixed stride in shared memory");

// SAFETY: a pthread mutex is made to be used by many threads, and all access goes through the C library's
// functions or the atomic word.
unsafe impl Sync for RobustMutex {}
// SAFETY: `MaybeUninit` takes any bytes, and everything lies in an `UnsafeCell`.
unsafe impl Lendable for RobustMutex {}

fn check(code: i32, call: &'static str) -> Result<()> {
    match code {
        0 => Ok(()),
        code => Err(Error::os("open", call, std::io::Error::from_raw_os_error(code))),
    }
}

impl RobustMutex {
    fn raw(&self) -> *mut libc::pthread_mutex_t {
        self.mutex.get().cast()
    }

    /// Makes the mutex usable. Only in a writable mapping, once, before anybody else knows the mutex.
    pub(crate) fn init(&self) -> Result<()> {
        if !SUPPORTED {
            return Ok(());
        }
        let mut attributes = MaybeUninit::<libc::pthread_mutexattr_t>::uninit();
        let attr = attributes.as_mut_ptr();
        // SAFETY: `attr` points to our own storage, initialised by the first call and destroyed by the last;
        // `raw` points to writable memory of sufficient size (asserted above) that nobody else uses yet (the
        // caller's duty: both callers have just created the page or raised their mark over the slot).
        unsafe {
            check(libc::pthread_mutexattr_init(attr), "pthread_mutexattr_init")?;
            let result = check(
                libc::pthread_mutexattr_setpshared(attr, libc::PTHREAD_PROCESS_SHARED),
                "pthread_mutexattr_setpshared",
            )
            .and_then(|()| {
                check(
                    libc::pthread_mutexattr_setrobust(attr, libc::PTHREAD_MUTEX_ROBUST),
                    "pthread_mutexattr_setrobust",
                )
            })
            .and_then(|()| check(libc::pthread_mutex_init(self.raw(), attr), "pthread_mutex_init"));
            libc::pthread_mutexattr_destroy(attr);
            result
        }
    }

    /// Locks for the calling thread without waiting; a mutex whose holder died is taken over.
    ///
    /// The mapping must stay until the same thread has unlocked: the kernel walks the thread's list of held
    /// mutexes by address when the thread ends.
    pub(crate) fn try_lock(&self) -> Result<()> {
        if !SUPPORTED {
            return Err(Error::new(Kind::Unavailable, "open", "no robust futexes with this C library"));
        }
        // SAFETY: initialised by its creator (`init`); writable mapping, kept by the caller as said above.
        match unsafe { libc::pthread_mutex_trylock(self.raw()) } {
            0 => Ok(()),
            libc::EOWNERDEAD => {
                // SAFETY: as above, and the calling thread now holds it.
                check(unsafe { libc::pthread_mutex_consistent(self.raw()) }, "pthread_mutex_consistent")
            }
            code => Err(Error::new(
                if code == libc::EBUSY { Kind::Invalid } else { Kind::Native },
                "open",
                format!("the life mutex cannot be locked: {}", std::io::Error::from_raw_os_error(code)),
            )),
        }
    }

    /// Unlocks; does nothing unless the calling thread holds it.
    pub(crate) fn unlock(&self) {
        if SUPPORTED {
            // SAFETY: initialised; a robust mutex answers a thread that does not hold it with EPERM.
            unsafe { libc::pthread_mutex_unlock(self.raw()) };
        }
    }

    /// Whether its holder has died while it held it.
    pub(crate) fn has_died(&self) -> bool {
        self.word().load(Ordering::Acquire) & OWNER_DIED != 0
    }

    /// The lock word: thread id of the holder, and the two flags above.
    pub(crate) fn word(&self) -> &AtomicU32 {
        // SAFETY: glibc's mutex begins with its aligned 32-bit lock word (part of its ABI with the kernel, which
        // finds it at a fixed offset from the list entry); all sides change it atomically.
        unsafe { &*self.raw().cast::<AtomicU32>() }
    }
}
