//! An owner of GPU memory that lies about it, in bytes written by hand.

use std::fs::{self, File};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::thread;
use std::time::Duration;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use towline::memory::DeviceStorage;
use towline::{Access, Endpoint, Kind, Limits, Registered, Remote, Result};
use towline_testkit::attacker::Medium;
use towline_testkit::bench::{outcome, routing};
use towline_testkit::oracle::Stamp;
use towline_testkit::process::Process;
use towline_testkit::rogue::{Grant, Rogue, frame, granted, kind};
use towline_testkit::watchdog::{eventually, watch};

use super::driver;

const LEN: u64 = 2 << 20;
const STALL: Duration = Duration::from_secs(10);

/// The number of the fake's first GPU.
const GPU: [u8; 16] = [0xf0; 16];
const OURS: Stamp = Stamp { region: 3, generation: 1 };

/// What an owner says about its memory, up to how it is opened.
fn words(start: u64, len: u64, form: &[u8]) -> Vec<u8> {
    [&[2][..], &GPU, &start.to_le_bytes(), &len.to_le_bytes(), form].concat()
}

/// That it is opened by a handle.
fn by_handle(handle: &[u8]) -> Vec<u8> {
    [&[1][..], &7u64.to_le_bytes(), handle].concat()
}

/// That it is opened by descriptors, which stand for parts of these lengths.
fn by_descriptors(all: u32, parts: &[u64]) -> Vec<u8> {
    let numbers = parts.iter().zip(1u64..).flat_map(|(len, block)| [*len, 7, block]);
    let numbers: Vec<u8> = numbers.flat_map(u64::to_le_bytes).collect();
    [&[2][..], &all.to_le_bytes(), &numbers].concat()
}

fn reply(id: u64, words: &[u8], files: usize) -> Vec<u8> {
    let body = [&[0][..], &(words.len() as u16).to_le_bytes(), words].concat();
    frame(kind::TOLD, id, &body, 0, files as u8)
}

/// A handle of the fake driver for memory of another process.
fn handle(owner: &Process) -> [u8; 64] {
    let open = format!("/proc/{}/fd", owner.pid());
    let (file, inode) = fs::read_dir(open)
        .unwrap()
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let name = fs::read_link(&path).ok()?;
            let facts = fs::metadata(&path).ok()?;
            let is_it = name.to_string_lossy().contains("fake-cuda") && facts.len() >= LEN;
            is_it.then(|| (path.file_name().unwrap().to_string_lossy().parse::<i32>().unwrap(), facts.ino()))
        })
        .next()
        .expect("the memory of the owner");
    let mut handle = [0; 64];
    for (at, number) in [(0, 0x6675_6c6c_7966_616b), (8, inode), (16, LEN)] {
        handle[at..at + 8].copy_from_slice(&number.to_le_bytes());
    }
    handle[24..28].copy_from_slice(&owner.pid().to_le_bytes());
    handle[28..32].copy_from_slice(&file.to_le_bytes());
    handle
}

struct User {
    endpoint: Endpoint,
    local: Registered<DeviceStorage>,
}

impl User {
    fn open() -> User {
        let limits = Limits { no_progress: STALL, ..Limits::default() };
        let endpoint = Endpoint::options("user").limits(limits).routing(routing("cuda")).open().unwrap();
        let local = endpoint.register(DeviceStorage::new(LEN as usize, 0).unwrap(), Access::NONE).unwrap();
        OURS.fill_storage(local.storage()).unwrap();
        User { endpoint, local }
    }

    /// Imports a region of that length from an owner that answers each query with these words and descriptors, and says the rest
    /// after the first of them; then does what is asked for with it.
    fn import<T>(
        &self,
        length: u64,
        words: &[u8],
        files: &[BorrowedFd<'_>],
        rest: &[u8],
        then: impl FnOnce(&User, Result<Remote>) -> T,
    ) -> T {
        let rogue = Rogue::open(Medium::Unix, length);
        thread::scope(|scope| {
            scope.spawn(|| {
                let (mut control, _pages) = rogue.let_in_sharing(length);
                let import = control.hear_of(kind::IMPORT);
                let grant = Grant { gpu: true, offers: 1, ..Grant::whole(length) };
                control.send(&granted(import.id, &[grant], 0));
                let mut rest = Some(rest);
                while let Some(frame) = control.hear_within(STALL * 2) {
                    if frame.kind == kind::ASK && frame.id != 0 {
                        control.send_with_files(&reply(frame.id, words, files.len()), files);
                        control.send(rest.take().unwrap_or_default());
                    }
                }
            });
            let result = then(self, self.endpoint.import(rogue.ticket()));
            self.endpoint.close_within(STALL).unwrap();
            result
        })
    }
}

#[test]
fn an_owner_that_lies_about_its_gpu_memory_gets_errors_and_touches_nothing() {
    let _watchdog = watch("a hostile owner of GPU memory", STALL * 12);
    driver("hostile");
    let mut owner = Process::open("victim", "");
    owner.must(&format!("register {LEN} device read+write"));
    let real = handle(&owner);
    let honest = words(0, LEN, &by_handle(&real));
    User::open().import(LEN, &honest, &[], &[], |user, remote| {
        let remote = remote.unwrap();
        outcome(user.endpoint.write(&remote, &user.local).start()).unwrap();
        outcome(user.endpoint.read(&remote, &user.local).start()).unwrap();
        OURS.verify_storage(user.local.storage(), 0, LEN as usize).unwrap();
    });

    let part = |len: u64| -> OwnedFd {
        let file = memfd_create("rogue", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, len).unwrap();
        file
    };
    let (small, pipe) = (part(4096), rustix::pipe::pipe().unwrap().0);
    let (null, root) = (File::open("/dev/null").unwrap(), File::open("/").unwrap());
    let odd = [small.as_fd(), pipe.as_fd(), null.as_fd(), root.as_fd()];
    let mut elsewhere = honest.clone();
    elsewhere[1] = 0;
    let mut of_another = real;
    of_another[8] ^= 1;
    let handle = by_handle(&real);
    let mut lies: Vec<(&str, u64, Vec<u8>, &[BorrowedFd<'_>])> = vec![
        ("longer than the memory that the handle opens", 4 * LEN, words(0, 4 * LEN, &handle), &[]),
        ("longer by a little", LEN + 512, words(0, LEN + 512, &handle), &[]),
        ("it starts beyond the end", LEN, words(LEN + 1, LEN, &handle), &[]),
        ("it starts where no end is", LEN, words(u64::MAX, u64::MAX, &handle), &[]),
        ("a handle of nothing", LEN, words(0, LEN, &by_handle(&[0xff; 64])), &[]),
        ("a handle of something else", LEN, words(0, LEN, &by_handle(&of_another)), &[]),
        ("a handle that is cut", LEN, words(0, LEN, &handle[..30]), &[]),
        ("words behind the handle", LEN, [&honest[..], &[0]].concat(), &[]),
        ("no words", LEN, Vec::new(), &[]),
        ("another form", LEN, words(0, LEN, &[3, 0, 0]), &[]),
        ("a GPU that there is not", LEN, elsewhere, &[]),
        ("a handle and a descriptor", LEN, words(0, LEN, &[&[1][..], &[0; 8]].concat()), &odd[..1]),
        ("parts without descriptors", LEN, words(0, LEN, &by_descriptors(1, &[LEN])), &[]),
        ("more descriptors than parts", LEN, words(0, LEN, &by_descriptors(1, &[LEN])), &odd[..2]),
        ("parts that wrap around", LEN, words(0, LEN, &by_descriptors(2, &[u64::MAX, LEN + 1])), &odd[..2]),
        ("more than there is", LEN, words(0, 1 << 62, &by_descriptors(1, &[1 << 62])), &odd[..1]),
        ("no part, and many to come", LEN, words(0, LEN, &by_descriptors(1 << 16, &[])), &[]),
        ("more parts than there can be", LEN, words(0, LEN, &by_descriptors(u32::MAX, &[LEN])), &odd[..1]),
    ];
    for file in odd.chunks(1) {
        lies.push(("a descriptor of something else", LEN, words(0, LEN, &by_descriptors(1, &[LEN])), file));
    }
    for (what, length, words, files) in lies {
        let user = User::open();
        user.import(length, &words, files, &[], |_, remote| {
            let error = remote.map(drop).expect_err(what);
            assert!(
                [Kind::Protocol, Kind::Unavailable, Kind::Native, Kind::Exhausted].contains(&error.kind()),
                "{what}: {error}"
            );
        });
        OURS.verify_storage(user.local.storage(), 0, LEN as usize).unwrap();
    }
}

#[test]
fn gpu_memory_that_is_told_twice_or_recalled_gives_errors_and_is_closed() {
    let _watchdog = watch("a hostile owner of GPU memory that goes on", STALL * 12);
    driver("hostile");
    let mut owner = Process::open("victim", "");
    owner.must(&format!("register {LEN} device read+write"));
    let honest = words(0, LEN, &by_handle(&handle(&owner)));
    let recall = frame(kind::RECALL, 0, &9u32.to_le_bytes(), 0, 0);
    for rest in [reply(1, &honest, 0), reply(2, &honest, 0), reply(9, &honest, 0), recall.repeat(2)] {
        let user = User::open();
        user.import(LEN, &honest, &[], &rest, |user, remote| {
            let Ok(remote) = remote else { return };
            let read = || outcome(user.endpoint.read(&remote, &user.local).start());
            assert!(eventually(STALL, || read().is_err()), "memory that is wanted back is still read");
        });
    }
}
