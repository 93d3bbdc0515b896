//! Memory that was lent and whose pages do not come: who asks for them waits, and nobody else.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    unsafe_code,
    reason = "memory whose pages a file descriptor withholds"
)]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::memory::{Dtype, ExternalStorage, ReduceOp};
use crate::skip::skip;
use crate::{Access, Endpoint, Place, Routing, SystemStorage};

const LEN: usize = 64 << 10;
const WATCHDOG: Duration = Duration::from_secs(30);

/// Pages that nobody gets before this is dropped: then they are zeros.
struct Withheld {
    pages: usize,
    fault: OwnedFd,
}

impl Withheld {
    fn map() -> std::io::Result<Withheld> {
        const API: u64 = 0xaa;
        const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
        const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
        const MISSING: u64 = 1;
        let done = |rc: i64| if rc < 0 { Err(std::io::Error::last_os_error()) } else { Ok(rc) };
        // SAFETY: plain calls; the structures are as long as the requests say.
        unsafe {
            let fd = done(libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC))?;
            let fault = OwnedFd::from_raw_fd(fd as i32);
            let mut api = [API, 0, 0];
            done(libc::ioctl(fault.as_raw_fd(), UFFDIO_API, api.as_mut_ptr()).into())?;
            let (protection, flags) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let pages = libc::mmap(std::ptr::null_mut(), LEN, protection, flags, -1, 0);
            assert_ne!(pages, libc::MAP_FAILED);
            let mut range = [pages as u64, LEN as u64, MISSING, 0];
            done(libc::ioctl(fault.as_raw_fd(), UFFDIO_REGISTER, range.as_mut_ptr()).into())?;
            Ok(Withheld { pages: pages.expose_provenance(), fault })
        }
    }
}

#[test]
fn pages_of_lent_memory_that_do_not_come_hold_up_nobody_else() {
    let Withheld { pages, fault } = match Withheld::map() {
        Ok(withheld) => withheld,
        Err(error) => {
            return skip(
                "pages_of_lent_memory_that_do_not_come_hold_up_nobody_else",
                "userfaultfd",
                &error.to_string(),
            );
        }
    };
    let (owner, user) = (Endpoint::open("owner").unwrap(), Endpoint::open("user").unwrap());
    // SAFETY: the pages stay mapped until the process ends.
    let lent = unsafe { ExternalStorage::new(pages, LEN, Place::Host, None) }.unwrap();
    let lent = owner.register(lent, Access::READ_WRITE).unwrap();
    let other = owner.register(SystemStorage::new(4096).unwrap(), Access::READ).unwrap();
    let local = || user.register(SystemStorage::new(4096).unwrap(), Access::NONE).unwrap();
    let routing = Routing::default().require("tcp").unwrap();
    let of_lent = user.import_within(&lent.ticket().unwrap(), &routing, WATCHDOG).unwrap();
    let locals: Vec<_> = (0..8).map(|_| local()).collect();
    let mut waiting: Vec<_> =
        locals.iter().map(|local| user.read(&of_lent, local).at(0, 0, 4096).start().unwrap()).collect();
    // Each of them a page of its own: as many kinds of requests as there are.
    let page = |number: u64| (number * 4096, 0, 4096);
    let (there, from, len) = page(8);
    waiting.push(user.write(&of_lent, &locals[0]).at(there, from, len).start().unwrap());
    let (there, from, len) = page(9);
    let sum = user.reduce_into(&of_lent, &locals[0], ReduceOp::Sum, Dtype::U64).at(there, from, len);
    waiting.push(sum.start().unwrap());
    waiting.push(user.fetch_add(&of_lent, 10 * 4096, 1).unwrap());
    waiting.push(user.write(&of_lent, &locals[0]).at(11 * 4096, 0, 8).signal(12 * 4096, 1).start().unwrap());
    // The same session, and a new one of another peer.
    let began = Instant::now();
    let second = Endpoint::open("second").unwrap();
    let mine = second.register(SystemStorage::new(4096).unwrap(), Access::NONE).unwrap();
    let of_other = user.import_within(&other.ticket().unwrap(), &routing, WATCHDOG).unwrap();
    user.read(&of_other, &local()).start().unwrap().wait().unwrap();
    let of_other = second.import_within(&other.ticket().unwrap(), &routing, WATCHDOG).unwrap();
    second.read(&of_other, &mine).start().unwrap().wait().unwrap();
    assert!(began.elapsed() < WATCHDOG / 2, "a page that does not come holds up the event loop");
    assert!(waiting.iter().all(|one| !one.is_done()), "the pages were not withheld");
    drop(fault);
    for one in waiting {
        one.wait_for(WATCHDOG).expect("the pages have come").unwrap();
    }
}
