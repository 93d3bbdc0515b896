//! Memory that was lent and goes away under its registration: peers get errors, and the owner lives on.
#![allow(unsafe_code, reason = "maps a file, and lends the mapping")]

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
use towline::{
    Access, Dtype, Endpoint, EndpointOptions, ExternalStorage, Kind, Patience, Place, ReduceOp, Registered,
    Remote, Routing, SystemStorage, Tls,
};

use crate::{LEN, bytes};

/// A file that is mapped, as `numpy.memmap` does it.
struct Mapped {
    file: OwnedFd,
    addr: usize,
}

impl Mapped {
    /// A file in memory, whose pages come from no disk.
    fn new() -> Mapped {
        Mapped::of(memfd_create("lent", MemfdFlags::CLOEXEC).unwrap())
    }

    /// One that has a file system behind it.
    fn on_disk() -> Mapped {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("towline-lent-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        Mapped::of(file.into())
    }

    fn of(file: OwnedFd) -> Mapped {
        ftruncate(&file, LEN as u64).unwrap();
        let (rights, null) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
        // SAFETY: a fresh mapping where the kernel likes it.
        let at = unsafe { mmap(null, LEN, rights, MapFlags::SHARED, &file, 0) }.unwrap();
        Mapped { file, addr: at.expose_provenance() }
    }

    fn lend(&self) -> ExternalStorage {
        // SAFETY: the mapping stays until the process ends or `unmap`; that its pages go away is what is tested.
        unsafe { ExternalStorage::new(self.addr, LEN, Place::Host, None) }.unwrap()
    }

    /// What another program does that cuts the file.
    fn cut(&self, len: usize) {
        ftruncate(&self.file, len as u64).unwrap();
    }

    /// As unmapping would, except that no other test's memory comes to lie there.
    fn unmap(&self) {
        let (at, flags) =
            (std::ptr::with_exposed_provenance_mut(self.addr), MapFlags::PRIVATE | MapFlags::FIXED);
        // SAFETY: the mapping that is replaced is this one's, and nobody refers to it.
        unsafe { mmap_anonymous(at, LEN, ProtFlags::empty(), flags) }.unwrap();
    }
}

const WAYS: [&str; 4] = ["unix", "tcp", "tls", "checksums"];

fn open(name: &str, way: &str) -> Endpoint {
    let path = if way == "unix" { "unix" } else { "tcp" };
    let options: EndpointOptions =
        Endpoint::options(name).routing(Routing::default().require(path).unwrap()).lanes(2);
    match way {
        "tls" => options.tls(Tls::by_ticket().unwrap()),
        "checksums" => options.checksums(true),
        _ => options,
    }
    .open()
    .unwrap()
}

struct Scene {
    user: Endpoint,
    remote: Remote,
    local: Registered<SystemStorage>,
    region: Registered<ExternalStorage>,
    owner: Endpoint,
}

impl Scene {
    fn on(way: &str, mapped: &Mapped) -> Scene {
        let (owner, user) = (open("owner", way), open("user", way));
        let region = owner.register(mapped.lend(), Access::READ_WRITE).unwrap();
        let remote = user.import(&region.ticket().unwrap()).unwrap();
        let local = user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
        Scene { user, remote, local, region, owner }
    }

    /// Every way to touch the memory while it is there.
    fn works(&self) {
        let Scene { user, remote, local, .. } = self;
        local.write_at(0, &bytes(5, LEN)).unwrap();
        user.write(remote, local).start().unwrap().wait().unwrap();
        local.write_at(0, &vec![0; LEN]).unwrap();
        user.read(remote, local).start().unwrap().wait().unwrap();
        let mut there = vec![0; LEN];
        local.read_at(0, &mut there).unwrap();
        assert!(there == bytes(5, LEN));
        user.fetch_add(remote, 0, 1).unwrap().wait().unwrap();
        user.reduce_into(remote, local, ReduceOp::Sum, Dtype::U64).start().unwrap().wait().unwrap();
        user.write(remote, local).at(0, 0, 64).signal(64, 1).start().unwrap().wait().unwrap();
    }

    /// And when the page at that offset is not.
    fn is_told(&self, way: &str, offset: usize) {
        let Scene { user, remote, local, .. } = self;
        let at = offset as u64;
        let outcomes = [
            ("small read", user.read(remote, local).at(at, 0, 100).start().unwrap().wait()),
            ("read", user.read(remote, local).start().unwrap().wait()),
            ("small write", user.write(remote, local).at(at, 0, 100).start().unwrap().wait()),
            ("write", user.write(remote, local).start().unwrap().wait()),
            ("add", user.fetch_add(remote, at, 1).unwrap().wait().map(drop)),
            ("reduce", user.reduce_into(remote, local, ReduceOp::Sum, Dtype::U64).start().unwrap().wait()),
        ];
        for (what, outcome) in outcomes {
            let error = outcome.map(drop).unwrap_err();
            assert_eq!(error.kind(), Kind::Stale, "{what} by {way}: {error}");
        }
        // A signal that nobody waits for is lost, and no more.
        let _ = user.write(remote, local).at(0, 0, 0).signal(at, 1).start().map(|one| one.wait());
        // The sessions live on: other memory is served.
        let other = self.owner.register(SystemStorage::new(64).unwrap(), Access::READ_WRITE).unwrap();
        let remote = user.import(&other.ticket().unwrap()).unwrap();
        user.write(&remote, local).at(0, 0, 64).start().unwrap().wait().unwrap();
    }
}

#[test]
fn a_file_that_is_cut_under_its_mapping_is_stale_to_peers() {
    for (way, mapped) in WAYS.iter().flat_map(|way| [(way, Mapped::new()), (way, Mapped::on_disk())]) {
        let scene = Scene::on(way, &mapped);
        scene.works();
        // The first half is still there: what begins there runs into the part that is not.
        mapped.cut(LEN / 2);
        scene.is_told(way, LEN / 2);
        mapped.cut(0);
        scene.is_told(way, 4096);
        // It comes back, and with it the region.
        mapped.cut(LEN);
        scene.works();
    }
}

#[test]
fn memory_that_was_unmapped_under_its_registration_is_stale_to_peers() {
    for (way, mapped) in WAYS.iter().flat_map(|way| [(way, Mapped::new()), (way, Mapped::on_disk())]) {
        let scene = Scene::on(way, &mapped);
        scene.works();
        mapped.unmap();
        scene.is_told(way, 4096);
    }
}

#[test]
fn words_of_lent_memory_are_changed_one_at_a_time_whoever_changes_them() {
    const ADDS: u64 = 500;
    for way in WAYS {
        let mapped = Mapped::new();
        let Scene { user, remote, local, region, owner } = Scene::on(way, &mapped);
        // The same memory once more, as another registration of the owner's, which is used within this process.
        let again = owner.register(mapped.lend(), Access::READ_WRITE).unwrap();
        let here = Endpoint::open("here").unwrap();
        let near = here.import(&again.ticket().unwrap()).unwrap();
        let one = here.register(SystemStorage::new(8).unwrap(), Access::NONE).unwrap();
        one.write_at(0, &1u64.to_le_bytes()).unwrap();
        local.write_at(0, &1u64.to_le_bytes()).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..ADDS {
                    user.fetch_add(&remote, 0, 1).unwrap().wait().unwrap();
                }
            });
            scope.spawn(|| {
                for _ in 0..ADDS {
                    let add = user.reduce_into(&remote, &local, ReduceOp::Sum, Dtype::U64).at(0, 0, 8);
                    add.start().unwrap().wait().unwrap();
                    user.signal(&remote, 0, 1).unwrap().wait().unwrap();
                }
            });
            scope.spawn(|| {
                for _ in 0..ADDS {
                    here.fetch_add(&near, 0, 1).unwrap().wait().unwrap();
                    let add = here.reduce_into(&near, &one, ReduceOp::Sum, Dtype::U64).at(0, 0, 8);
                    add.start().unwrap().wait().unwrap();
                    here.signal(&near, 0, 1).unwrap().wait().unwrap();
                    near.pin().unwrap().fetch_add(0, 1).unwrap();
                }
            });
            scope.spawn(|| {
                for _ in 0..ADDS {
                    region.fetch_add(0, 1).unwrap();
                }
            });
        });
        assert_eq!(region.wait_signal(0, 8 * ADDS, Duration::from_secs(10)).unwrap(), 8 * ADDS, "{way}");
    }
}

#[test]
fn an_owner_that_waits_for_a_word_of_a_file_that_is_cut_is_told_and_lives_on() {
    let limit = Duration::from_secs(20);
    for cut_at in [0, LEN / 2] {
        let mapped = Mapped::new();
        let owner = open("owner", "unix");
        let region = owner.register(mapped.lend(), Access::READ_WRITE).unwrap();
        let word = LEN / 2 + 64;
        std::thread::scope(|scope| {
            let signal = scope.spawn(|| region.wait_signal(word, 1, limit).unwrap_err());
            let change = scope.spawn(|| {
                let awake = Patience { spin: Duration::ZERO, yielding: Duration::ZERO };
                region.wait_changed(word, awake, limit, || region.load(word).ok().filter(|seen| *seen == 1))
            });
            // Both sleep by now, and their pages go.
            std::thread::sleep(Duration::from_millis(200));
            let began = Instant::now();
            mapped.cut(cut_at);
            let error = signal.join().unwrap();
            assert_eq!(error.kind(), Kind::Stale, "{error}");
            assert_eq!(change.join().unwrap(), None);
            assert!(began.elapsed() < limit / 2, "they slept until their limit");
        });
        let errors = [
            region.wait_signal(word, 1, limit).map(drop),
            region.load(word).map(drop),
            region.store(word, 1),
            region.fetch_add(word, 1).map(drop),
            region.compare_swap(word, 0, 1).map(drop),
            region.span(word, 8).unwrap().load(0).map(drop),
            region.span(word, 8).unwrap().store(0, 1),
            region.span(word, 8).unwrap().fetch_add(0, 1).map(drop),
            region.span(word, 8).unwrap().compare_swap(0, 0, 1).map(drop),
        ];
        for error in errors {
            assert_eq!(error.unwrap_err().kind(), Kind::Stale);
        }
        // It comes back, with zeros.
        mapped.cut(LEN);
        region.store(word, 7).unwrap();
        assert_eq!(region.wait_signal(word, 7, limit).unwrap(), 7);
        assert_eq!(region.compare_swap(word, 7, 9).unwrap(), 7);
        assert_eq!((region.fetch_add(word, 1).unwrap(), region.load(word).unwrap()), (9, 10));
    }
}

#[test]
fn a_page_that_goes_and_comes_while_peers_change_words_ends_nobody() {
    let mapped = Mapped::new();
    let Scene { user, remote, local, region: _region, owner: _owner } = Scene::on("unix", &mapped);
    let over = AtomicBool::new(false);
    let (mut changed, mut refused) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                mapped.cut(0);
                mapped.cut(LEN);
            }
        });
        let until = Instant::now() + Duration::from_secs(2);
        while Instant::now() < until {
            for _ in 0..50 {
                let reduced = user.reduce_into(&remote, &local, ReduceOp::Sum, Dtype::U64).at(0, 0, 64 << 10);
                let outcomes = [
                    user.fetch_add(&remote, 4096, 1).unwrap().wait().map(drop),
                    user.signal(&remote, 8192, 1).unwrap().wait().map(drop),
                    reduced.start().unwrap().wait().map(drop),
                ];
                for outcome in outcomes {
                    match outcome {
                        Ok(()) => changed += 1,
                        Err(error) => {
                            assert_eq!(error.kind(), Kind::Stale, "{error}");
                            refused += 1;
                        }
                    }
                }
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    assert!(changed > 0 && refused > 0, "{changed} changes went well, {refused} did not");
}

#[test]
fn own_memory_that_is_gone_is_an_error_and_ends_nobody() {
    for way in WAYS {
        let (owner, user) = (open("owner", way), open("user", way));
        let region = owner.register(SystemStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap();
        let remote = user.import(&region.ticket().unwrap()).unwrap();
        let good = user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
        for unmapped in [false, true] {
            let mapped = Mapped::new();
            let local = user.register(mapped.lend(), Access::NONE).unwrap();
            user.write(&remote, &local).start().unwrap().wait().unwrap();
            user.read(&remote, &local).start().unwrap().wait().unwrap();
            if unmapped {
                mapped.unmap();
            } else {
                mapped.cut(LEN / 2);
            }
            let at = (LEN / 2) as u64;
            let reads = [user.read(&remote, &local).at(0, at, 100), user.read(&remote, &local)];
            for (index, read) in reads.into_iter().enumerate() {
                let error = read.start().unwrap().wait().unwrap_err();
                assert_eq!(error.kind(), Kind::Stale, "read {index} by {way}: {error}");
                // What was read goes nowhere, and the session goes on.
                user.read(&remote, &good).start().unwrap().wait().unwrap();
            }
            let writes = [user.write(&remote, &local).at(0, at, 100), user.write(&remote, &local)];
            for (index, write) in writes.into_iter().enumerate() {
                let error = write.start().unwrap().wait().unwrap_err();
                assert_eq!(error.kind(), Kind::Stale, "write {index} by {way}: {error}");
                user.write(&remote, &good).start().unwrap().wait().unwrap();
            }
        }
    }
}
