//! What a worker does that would disturb other tests in one process: crowds, forks, an empty descriptor table.
#![allow(unsafe_code, reason = "forks, which is what is tested")]

use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use towline::{Access, Endpoint, Error, Kind, Registered, Remote, SharedStorage, SystemStorage, Ticket};

use super::{Answer, Failure, Line, Words, Worker, bad, requiring, said};
use crate::oracle::Stamp;
use crate::paths::{is_complete, names};

const PAGE: usize = 4096;

/// What keeps a crowd of endpoints alive after the order.
static CROWD: Mutex<Vec<Member>> = Mutex::new(Vec::new());

type Member = (Endpoint, Registered<SharedStorage>, Vec<Remote>);

/// Opens that many endpoints, lets each read from the next one over three paths, and keeps them open.
pub(super) fn crowd(count: usize) -> Answer {
    raise_descriptor_limit();
    let mut crowd = CROWD.lock();
    for number in 0..count {
        let endpoint = Endpoint::open(&format!("crowd-{number}"))?;
        let region =
            endpoint.register(SharedStorage::new(PAGE)?, Access::READ).map_err(|failed| failed.error)?;
        Stamp::new(number as u16, 1).fill_storage(region.storage())?;
        crowd.push((endpoint, region, Vec::new()));
    }
    for number in 0..count {
        let next = (number + 1) % count;
        let ticket = crowd[next].1.ticket()?;
        for path in names(is_complete) {
            let remote = crowd[number].0.import_with(&ticket, &requiring(path)?)?;
            read_and_verify(&crowd[number].0, &remote, Stamp::new(next as u16, 1))?;
            crowd[number].2.push(remote);
        }
    }
    said(fs::read_dir("/proc/self/fd").map_or(0, Iterator::count))
}

fn read_and_verify(endpoint: &Endpoint, remote: &Remote, stamp: Stamp) -> Result<(), Failure> {
    let local = endpoint
        .register(SystemStorage::new(remote.len() as usize)?, Access::NONE)
        .map_err(|failed| failed.error)?;
    endpoint.read(remote, &local).start()?.wait()?;
    stamp
        .verify_storage(local.storage(), 0, remote.len() as usize)
        .map_err(|wrong| Failure { kind: Kind::Internal, message: format!("a read gave {wrong}") })
}

fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

impl Worker {
    /// `read-all PATHS`, with lines `TICKET REGION GENERATION`: imports all in one batch, reads and verifies each.
    pub(super) fn read_all(&self, line: &Line, words: &mut Words<'_>) -> Answer {
        let rounds: usize = words.take()?;
        let text = String::from_utf8_lossy(&line.payload);
        let mut tickets = Vec::new();
        let mut stamps = Vec::new();
        for target in text.lines() {
            let mut words = Words { words: target.split_whitespace() };
            tickets.push(words.take::<Ticket>()?);
            stamps.push(words.stamp()?);
        }
        let endpoint = self.endpoint()?;
        let remotes = endpoint.import_many(&tickets)?.into_iter().collect::<Result<Vec<_>, Error>>()?;
        for _ in 0..rounds {
            for (remote, stamp) in remotes.iter().zip(&stamps) {
                read_and_verify(endpoint, remote, *stamp)?;
            }
        }
        said(remotes.len())
    }

    /// Forks; answers with what the child could do that it should not have been able to do, and what took long.
    pub(super) fn fork(&mut self) -> Answer {
        let (reader, writer) = rustix::pipe::pipe().map_err(|error| bad(error.to_string()))?;
        // SAFETY: the child calls only Towline, which promises to do nothing there, writes to a pipe and exits.
        let pid = unsafe { libc::fork() };
        if pid < 0 {
            return Err(bad("fork failed"));
        }
        if pid == 0 {
            let text = self.in_the_child();
            // SAFETY: the pipe is open here, the text outlives the call, and `_exit` runs no destructor of the parent.
            unsafe {
                libc::write(writer.as_raw_fd(), text.as_ptr().cast(), text.len());
                libc::_exit(0);
            }
        }
        drop(writer);
        let mut text = Vec::new();
        let mut chunk = [0; 4096];
        loop {
            match wait_readable(&reader, Duration::from_secs(10)) {
                true => match rustix::io::read(&reader, &mut chunk) {
                    Ok(0) | Err(_) => break,
                    Ok(len) => text.extend_from_slice(&chunk[..len]),
                },
                false => {
                    text.extend_from_slice(b"child-hangs");
                    // SAFETY: kills and reaps our own child below.
                    unsafe { libc::kill(pid, libc::SIGKILL) };
                    break;
                }
            }
        }
        let mut status = 0;
        // SAFETY: `status` outlives the call and `pid` is our own child.
        unsafe { libc::waitpid(pid, &mut status, 0) };
        if !libc::WIFEXITED(status) || libc::WEXITSTATUS(status) != 0 {
            text.extend_from_slice(format!(" child-ended-{status:#x}").as_bytes());
        }
        said(String::from_utf8_lossy(&text))
    }

    /// Tries everything; returns the names of what did not give an error at once.
    fn in_the_child(&mut self) -> String {
        let mut wrong = String::new();
        let mut check = |name: &str, call: &mut dyn FnMut() -> Result<(), Error>| {
            let before = Instant::now();
            let refused = call().is_err();
            if !refused {
                wrong.push_str(&format!("{name}-works "));
            }
            // A hundred times what is promised: the machine may be busy.
            if before.elapsed() > Duration::from_millis(100) {
                wrong.push_str(&format!("{name}-slow "));
            }
        };
        let endpoint = self.endpoint.take();
        let regions = std::mem::take(&mut self.regions);
        let remotes = std::mem::take(&mut self.remotes);
        let pinned = std::mem::take(&mut self.pinned);
        check("open", &mut || Endpoint::open("child").map(drop));
        if let (Some(endpoint), Some(region), Some(remote)) =
            (&endpoint, regions.values().next(), remotes.values().next())
        {
            check("register", &mut || {
                let storage = SystemStorage::new(PAGE)?;
                endpoint.register(storage, Access::READ).map(drop).map_err(|failed| failed.error)
            });
            check("ticket", &mut || region.ticket().map(drop));
            check("receive", &mut || endpoint.receive(Duration::from_secs(5)).map(drop));
            check("try_receive", &mut || endpoint.try_receive().map(drop));
            check("read", &mut || endpoint.read(remote, region).at(0, 0, 8).start().map(drop));
            check("write", &mut || endpoint.write(remote, region).at(0, 0, 8).start().map(drop));
            check("fetch_add", &mut || endpoint.fetch_add(remote, 0, 1).map(drop));
            check("notify", &mut || endpoint.notify(remote, "hello").map(drop));
            check("alive", &mut || remote.alive());
            check("pin", &mut || remote.pin().map(drop));
            for pinned in pinned.values() {
                check("load", &mut || pinned.load(0).map(drop));
                check("write_at", &mut || pinned.write_at(0, b"not mine"));
                check("wake", &mut || pinned.wake(0));
            }
            check("wait_signal", &mut || region.wait_signal(0, u64::MAX, Duration::from_secs(5)).map(drop));
            // Harmless there, and no error.
            let _ = endpoint.close();
        } else {
            wrong.push_str("nothing-to-try ");
        }
        let before = Instant::now();
        drop(pinned);
        drop(remotes);
        drop(regions);
        drop(endpoint);
        if before.elapsed() > Duration::from_millis(100) {
            wrong.push_str("drop-slow ");
        }
        wrong
    }

    /// `starve TICKET REMOTE LOCAL`: with no descriptor left, what needs one is `Exhausted`, what runs goes on, and
    /// all is well once there are descriptors again. The ticket is of an owner that is not known here yet.
    pub(super) fn starve(&self, words: &mut Words<'_>) -> Answer {
        let ticket: Ticket = words.take()?;
        let (remote, local) = (self.remote(words)?, self.region(words)?);
        let endpoint = self.endpoint()?;
        let before = getrlimit(Resource::Nofile);
        let open = fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
        // Descriptors are numbered from the lowest free one: no number below what is open means that none is left.
        let highest = fs::read_dir("/proc/self/fd")
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse::<u64>().ok())
            .max()
            .unwrap_or(0);
        let mut fillers = Vec::new();
        for _ in 0..highest {
            match rustix::io::fcntl_dupfd_cloexec(std::io::stderr().as_fd(), 0) {
                Ok(filler) if (filler.as_raw_fd() as u64) < highest => fillers.push(filler),
                _ => break,
            }
        }
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(highest), ..before });
        let mut wrong = Vec::new();
        let mut expect = |name: &str, outcome: Result<(), Error>| match outcome {
            Err(error) if error.kind() == Kind::Exhausted => {}
            Err(error) => wrong.push(format!("{name}: {error}")),
            Ok(()) => wrong.push(format!("{name} works without a descriptor")),
        };
        expect("open", Endpoint::open("hungry").map(drop));
        expect("shared", SharedStorage::new(PAGE).map(drop));
        expect("import", endpoint.import(&ticket).map(drop));
        if let Err(error) =
            endpoint.read(remote, local).at(0, 0, 64).start().and_then(|transfer| transfer.wait())
        {
            wrong.push(format!("a transfer without need of descriptors: {error}"));
        }
        let _ = setrlimit(Resource::Nofile, before);
        drop(fillers);
        let left = fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
        if left > open {
            wrong.push(format!("{left} descriptors are open, {open} were before"));
        }
        let mut recovers = |name: &str, outcome: Result<(), Error>| {
            if let Err(error) = outcome {
                wrong.push(format!("{name} afterwards: {error}"));
            }
        };
        recovers("open", Endpoint::open("fed").map(drop));
        recovers("shared", SharedStorage::new(PAGE).map(drop));
        recovers("import", endpoint.import(&ticket).map(drop));
        if wrong.is_empty() {
            return said("");
        }
        Err(Failure { kind: Kind::Internal, message: wrong.join("; ") })
    }
}

fn wait_readable(fd: impl AsFd, within: Duration) -> bool {
    let mut poll = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
    let timeout = rustix::time::Timespec { tv_sec: within.as_secs() as i64, tv_nsec: 0 };
    matches!(rustix::event::poll(&mut poll, Some(&timeout)), Ok(1..))
}

/// `leave-child`: forks a child that holds what it has inherited, for a minute; answers with its pid.
pub(super) fn leave_child() -> Answer {
    // SAFETY: the child only closes its standard streams, sleeps and exits.
    let pid = unsafe { libc::fork() };
    if pid < 0 {
        return Err(bad("fork failed"));
    }
    if pid == 0 {
        // SAFETY: as above. The reader of what the worker says must see its end.
        unsafe {
            for stream in 0..3 {
                libc::close(stream);
            }
            libc::sleep(60);
            libc::_exit(0);
        }
    }
    said(pid)
}
