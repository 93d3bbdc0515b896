//! Signals that ask a program to end, as something that can be waited for beside other things.
#![allow(unsafe_code, reason = "the mask of signals and signalfd have no safe form")]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

/// What asks a program to end: Ctrl-C, a closed terminal, a polite kill.
const ENDING: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// The signals that ask this program to end, kept until they are asked for.
pub(super) struct Interrupts(OwnedFd);

impl Interrupts {
    /// Keeps them from now on, in the calling thread and all that it starts: call it before there are others. Programs
    /// that are started inherit this; [`release`] ends it there.
    pub(super) fn keep() -> io::Result<Interrupts> {
        let set = masked(libc::SIG_BLOCK)?;
        // SAFETY: the set is whole, and the kernel does not keep the pointer.
        let fd = unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just given it to this call, and nobody else has it.
        Ok(Interrupts(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// The number of the next signal that has come, if any has.
    pub(super) fn next(&self) -> io::Result<Option<i32>> {
        let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
        match rustix::io::read(&self.0, &mut info) {
            Ok(_) => Ok(info.first_chunk().map(|number| u32::from_ne_bytes(*number) as i32)),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// Lets the signals that ask a program to end do so again, in the calling thread.
pub(super) fn release() -> io::Result<()> {
    masked(libc::SIG_UNBLOCK).map(drop)
}

fn masked(how: libc::c_int) -> io::Result<libc::sigset_t> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` makes a whole set of the memory, and the others get that set; none keeps the pointer.
    let set = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in ENDING {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        set.assume_init()
    };
    // SAFETY: as above; the old mask is not asked for.
    match unsafe { libc::pthread_sigmask(how, &set, std::ptr::null_mut()) } {
        0 => Ok(set),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

impl AsFd for Interrupts {
    /// Readable when a signal has come.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
