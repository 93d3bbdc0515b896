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
use crate::region::Registered;
use crate::skip::skip;
use crate::{Access, Endpoint, Place, Routing, SystemStorage, runtime, wire};

const LEN: usize = 64 << 10;
const LARGE: usize = 1 << 20;
const WATCHDOG: Duration = Duration::from_secs(30);

/// Pages that nobody gets before this is dropped: then they are zeros.
struct Withheld {
    pages: usize,
    fault: OwnedFd,
}

impl Withheld {
    fn map(len: usize) -> std::io::Result<Withheld> {
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
            let pages = libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0);
            assert_ne!(pages, libc::MAP_FAILED);
            let mut range = [pages as u64, len as u64, MISSING, 0];
            done(libc::ioctl(fault.as_raw_fd(), UFFDIO_REGISTER, range.as_mut_ptr()).into())?;
            Ok(Withheld { pages: pages.expose_provenance(), fault })
        }
    }
}

/// Maps pages that do not come; `None` where the kernel has none of these for this process.
fn withhold(test: &str, len: usize) -> Option<Withheld> {
    Withheld::map(len).inspect_err(|error| skip(test, "userfaultfd", &error.to_string())).ok()
}

fn lend(owner: &Endpoint, pages: usize, len: usize) -> Registered<ExternalStorage> {
    // SAFETY: the pages stay mapped until the process ends.
    let lent = unsafe { ExternalStorage::new(pages, len, Place::Host, None) }.unwrap();
    owner.register(lent, Access::READ_WRITE).unwrap()
}

/// Lends memory as an array has it, which is there.
fn lend_array(owner: &Endpoint, len: usize) -> Registered<ExternalStorage> {
    let array = Box::leak(vec![3u64; len / 8].into_boxed_slice());
    lend(owner, array.as_mut_ptr().expose_provenance(), len)
}

fn tcp() -> Routing {
    Routing::default().require("tcp").unwrap()
}

#[test]
fn pages_of_lent_memory_that_do_not_come_hold_up_nobody_else() {
    let name = "pages_of_lent_memory_that_do_not_come_hold_up_nobody_else";
    let Some(Withheld { pages, fault }) = withhold(name, LEN) else { return };
    let (owner, user) = (Endpoint::open("owner").unwrap(), Endpoint::open("user").unwrap());
    let lent = lend(&owner, pages, LEN);
    let other = owner.register(SystemStorage::new(4096).unwrap(), Access::READ).unwrap();
    let local = || user.register(SystemStorage::new(4096).unwrap(), Access::NONE).unwrap();
    let routing = tcp();
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

/// One that uses regions over lanes of its own.
fn user(name: &str) -> (Endpoint, Registered<SystemStorage>) {
    let user = Endpoint::options(name).lanes(1).open().unwrap();
    let local = user.register(SystemStorage::new(4 * LARGE).unwrap(), Access::NONE).unwrap();
    (user, local)
}

#[test]
fn large_requests_for_pages_of_lent_memory_that_do_not_come_hold_up_no_other_lane() {
    let name = "large_requests_for_pages_of_lent_memory_that_do_not_come_hold_up_no_other_lane";
    let lanes = runtime::pool().limit();
    let Some(Withheld { pages, fault }) = withhold(name, 3 * lanes * LARGE) else { return };
    let owner = Endpoint::open("owner").unwrap();
    let (lent, other) = (lend(&owner, pages, 3 * lanes * LARGE), lend_array(&owner, 4 * LARGE));
    let users: Vec<_> = (0..3 * lanes).map(|number| user(&format!("user {number}"))).collect();
    let waiting: Vec<_> = users
        .iter()
        .enumerate()
        .map(|(number, (user, local))| {
            let remote = user.import_within(&lent.ticket().unwrap(), &tcp(), WATCHDOG).unwrap();
            let there = (number * LARGE) as u64;
            let request = match number % 3 {
                0 => user.read(&remote, local).at(there, 0, LARGE as u64),
                1 => user.write(&remote, local).at(there, 0, LARGE as u64),
                _ => user.reduce_into(&remote, local, ReduceOp::Sum, Dtype::U64).at(there, 0, LARGE as u64),
            };
            request.start().unwrap()
        })
        .collect();
    let began = Instant::now();
    // All of them have come to the owner.
    while owner.core().sessions.serving().iter().map(|one| one.in_flight().0).sum::<usize>() < 3 * lanes {
        assert!(began.elapsed() < WATCHDOG, "a request does not come through");
        std::thread::sleep(Duration::from_millis(1));
    }
    let (second, mine) = user("second");
    let remote = second.import_within(&other.ticket().unwrap(), &tcp(), WATCHDOG).unwrap();
    for len in [4096, 4 * LARGE as u64] {
        let done = |one: crate::Transfer| one.wait_for(WATCHDOG / 2).expect("a lane is held up").unwrap();
        done(second.read(&remote, &mine).at(0, 0, len).start().unwrap());
        done(second.write(&remote, &mine).at(0, 0, len).start().unwrap());
        done(second.reduce_into(&remote, &mine, ReduceOp::Max, Dtype::U64).at(0, 0, len).start().unwrap());
    }
    second.fetch_add(&remote, 0, 1).unwrap().wait_for(WATCHDOG / 2).expect("a word is held up").unwrap();
    assert!(waiting.iter().all(|one| !one.is_done()), "the pages were not withheld");
    drop(fault);
    for one in waiting {
        one.wait_for(WATCHDOG).expect("the pages have come").unwrap();
    }
}

#[test]
fn a_signal_that_nobody_waits_for_is_raised_in_lent_memory_beside_a_page_that_does_not_come() {
    let name = "a_signal_that_nobody_waits_for_is_raised_in_lent_memory_beside_a_page_that_does_not_come";
    let Some(Withheld { pages, fault }) = withhold(name, LEN) else { return };
    let owner = Endpoint::open("owner").unwrap();
    let (lent, other) = (lend(&owner, pages, LEN), lend_array(&owner, LEN));
    let (user, _local) = user("user");
    // The handles are given in this order.
    let of_lent = user.import_within(&lent.ticket().unwrap(), &tcp(), WATCHDOG).unwrap();
    let of_other = user.import_within(&other.ticket().unwrap(), &tcp(), WATCHDOG).unwrap();
    let waiting = user.fetch_add(&of_lent, 0, 1).unwrap();
    let session = user.core().sessions.to_owners.lock().values().next().cloned().unwrap();
    let signal = |handle, offset| wire::Signal { transfer: 0, pieces: 0, handle, offset, add: 4 };
    session.send_one_way(signal(1, 4096)).unwrap();
    session.send_one_way(signal(2, 8)).unwrap();
    assert_eq!(other.wait_signal(8, 7, WATCHDOG / 2).unwrap(), 7);
    user.fetch_add(&of_other, 8, 1).unwrap().wait_for(WATCHDOG / 2).expect("a word is held up").unwrap();
    let (third, mine) = self::user("third");
    let remote = third.import_within(&other.ticket().unwrap(), &tcp(), WATCHDOG / 2).unwrap();
    third.read(&remote, &mine).at(0, 0, 64).start().unwrap().wait_for(WATCHDOG / 2).unwrap().unwrap();
    assert!(!waiting.is_done(), "the page was not withheld");
    drop(fault);
    waiting.wait_for(WATCHDOG).expect("the page has come").unwrap();
    assert_eq!(lent.wait_signal(4096, 4, WATCHDOG).unwrap(), 4);
}
