//! Files that are registered: read and written by peers, with the owner's help.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use towline::memory::MemoryDescription;
use towline::{
    Access, DirectIo, DiskStorage, Dtype, Endpoint, Kind, Layout, OffsetBuffer, ReduceOp, Registered, Remote,
    Routing, SystemStorage, create_buffer,
};

const PATHS: [&str; 4] = ["inproc", "file", "unix", "tcp"];
const LIMIT: Duration = Duration::from_secs(60);

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + at / 4096 + seed) as u8).collect()
}

/// An owner with a file, and a user that reaches it over one path.
struct Scene {
    owner: Endpoint,
    user: Endpoint,
    path: &'static str,
}

impl Scene {
    fn on(path: &'static str) -> Scene {
        let routing = Routing::default().require(path).unwrap();
        Scene {
            owner: Endpoint::open("owner").unwrap(),
            user: Endpoint::options("user").routing(routing).open().unwrap(),
            path,
        }
    }

    fn file(&self, bytes: &[u8], access: Access) -> Registered<DiskStorage> {
        let region = self.owner.register(DiskStorage::new(bytes.len()).unwrap(), access).unwrap();
        region.write_at(0, bytes).unwrap();
        region
    }

    fn import(&self, region: &Registered<DiskStorage>) -> Remote {
        let remote = self.user.import(&region.ticket().unwrap()).unwrap();
        assert_eq!(remote.path(), self.path, "{}", remote.explain());
        remote
    }

    fn local(&self, len: usize) -> Registered<SystemStorage> {
        self.user.register(SystemStorage::new(len).unwrap(), Access::NONE).unwrap()
    }
}

fn bytes_of(region: &Registered<SystemStorage>) -> Vec<u8> {
    let mut bytes = vec![0; region.size()];
    region.read_at(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_file_is_read_and_written_over_every_path_that_the_owner_serves() {
    for path in PATHS {
        let scene = Scene::on(path);
        // One that goes over the control connection, one that goes over lanes, one that ends within a page.
        for len in [1000, 12 << 20, (3 << 20) + 77] {
            let bytes = pattern(len, 1);
            let region = scene.file(&bytes, Access::READ_WRITE);
            let remote = scene.import(&region);
            let local = scene.local(len);
            scene.user.read(&remote, &local).start().unwrap().wait().unwrap();
            assert!(bytes_of(&local) == bytes, "{len} bytes over {path}");

            let other = pattern(len, 2);
            local.write_at(0, &other).unwrap();
            scene.user.write(&remote, &local).notify("written").start().unwrap().wait().unwrap();
            assert_eq!(scene.owner.receive(LIMIT).unwrap().message, b"written");
            assert!(fs::read(region.storage().path()).unwrap() == other, "{len} bytes over {path}");
            let mut back = vec![0; len];
            region.read_at(0, &mut back).unwrap();
            assert!(back == other);
        }
    }
}

#[test]
fn spans_and_blocks_of_a_file_are_moved() {
    for path in PATHS {
        let scene = Scene::on(path);
        let bytes = pattern(64 << 12, 3);
        let region = scene.file(&bytes, Access::READ_WRITE);
        let remote = scene.import(&region);
        let local = scene.local(64 << 12);
        let spans = [(1, 0, 3), (4095, 5000, 2), (100_000, 20_000, 100_001), (4, 3, 7)];
        scene.user.read(&remote, &local).spans(&spans).start().unwrap().wait().unwrap();
        let got = bytes_of(&local);
        for (far, near, len) in spans.map(|(a, b, c)| (a as usize, b as usize, c as usize)) {
            assert!(got[near..near + len] == bytes[far..far + len], "{len} bytes over {path}");
        }

        let pages = Layout::blocks(0, 4096, 64, 4096).unwrap();
        let (from, to) = ([3u32, 4, 5, 63, 0], [9u32, 8, 7, 0, 1]);
        scene.user.read(&remote, &local).blocks(&pages, &from, &pages, &to).start().unwrap().wait().unwrap();
        let got = bytes_of(&local);
        for (from, to) in from.iter().zip(to).map(|(from, to)| (*from as usize * 4096, to as usize * 4096)) {
            assert!(got[to..to + 4096] == bytes[from..from + 4096]);
        }
        // Back into other places, of which some are neighbours.
        let there = [10u32, 11, 12, 1, 40];
        scene
            .user
            .write(&remote, &local)
            .blocks(&pages, &there, &pages, &to)
            .start()
            .unwrap()
            .wait()
            .unwrap();
        let mut expected = bytes.clone();
        for (from, there) in from.iter().zip(there).map(|(a, b)| (*a as usize * 4096, b as usize * 4096)) {
            expected[there..there + 4096].copy_from_slice(&bytes[from..from + 4096]);
        }
        assert!(fs::read(region.storage().path()).unwrap() == expected);
    }
}

#[test]
fn a_part_of_a_file_is_all_that_its_ticket_reaches() {
    for path in PATHS {
        let scene = Scene::on(path);
        let bytes = pattern(10_000, 4);
        let storage = DiskStorage::new(bytes.len()).unwrap();
        let whole = create_buffer(storage);
        towline::MemoryAccess::write_at(&whole, 0, &bytes).unwrap();
        let view = OffsetBuffer::new(whole, 1000, 5000).unwrap();
        let region = scene.owner.register(view, Access::READ).unwrap();
        let narrowed = region.ticket().unwrap().narrow().range(100, 200).finish().unwrap();
        let remote = scene.user.import(&narrowed).unwrap();
        assert_eq!(remote.len(), 200);
        let local = scene.local(200);
        scene.user.read(&remote, &local).start().unwrap().wait().unwrap();
        assert!(bytes_of(&local) == bytes[1100..1300], "over {path}");
        let beyond = scene.user.read(&remote, &local).at(1, 0, 200).start().map(drop);
        assert_eq!(beyond.unwrap_err().kind(), Kind::Invalid);
        let written = scene.user.write(&remote, &local).start().map(drop);
        assert_eq!(written.unwrap_err().kind(), Kind::PermissionDenied);
    }
}

#[test]
fn what_needs_words_in_memory_is_refused_before_a_byte_moves() {
    for path in PATHS {
        let scene = Scene::on(path);
        let bytes = pattern(4096, 5);
        let region = scene.file(&bytes, Access::READ_WRITE);
        let remote = scene.import(&region);
        let local = scene.local(4096);
        let ended = |started: towline::Result<towline::Transfer>| started.and_then(|one| one.wait());
        let refused = [
            ended(scene.user.fetch_add(&remote, 0, 1)),
            ended(scene.user.write(&remote, &local).signal(0, 1).start()),
            ended(scene.user.reduce_into(&remote, &local, ReduceOp::Sum, Dtype::U64).start()),
            remote.pin().map(drop),
            region.wait_signal(0, 1, Duration::from_millis(1)).map(drop),
        ];
        for outcome in refused {
            let error = outcome.unwrap_err();
            assert_eq!(error.kind(), Kind::Unsupported, "{error}");
        }
        assert!(fs::read(region.storage().path()).unwrap() == bytes);
        // And a file as the local side.
        let file = scene.user.register(DiskStorage::new(4096).unwrap(), Access::NONE).unwrap();
        let error = scene.user.read(&remote, &file).start().map(drop).unwrap_err();
        assert_eq!(error.kind(), Kind::Unsupported);
    }
}

#[test]
fn paths_that_need_memory_say_that_the_bytes_are_on_disk() {
    let scene = Scene::on("unix");
    let region = scene.file(&[1; 100], Access::READ);
    let user = Endpoint::open("user").unwrap();
    let remote = user.import_with(&region.ticket().unwrap(), &Routing::default().forbid("inproc").unwrap());
    let remote = remote.unwrap();
    assert_eq!(remote.path(), "file");
    let reason = |path| &remote.explain().paths.iter().find(|one| one.path == path).unwrap().reason;
    for path in ["mapped", "cma"] {
        assert_eq!(reason(path), "the bytes are on disk", "{path}");
    }
    assert!(reason("nixl").contains("the path file reads and writes it as well"), "{}", reason("nixl"));
    assert_eq!(remote.place(), towline::Place::Disk);
}

#[test]
fn after_deregistration_every_access_is_stale_and_the_file_is_the_owners() {
    for path in PATHS {
        let scene = Scene::on(path);
        let bytes = pattern(1 << 20, 6);
        let region = scene.file(&bytes, Access::READ_WRITE);
        let remote = scene.import(&region);
        let local = scene.local(1 << 20);
        scene.user.read(&remote, &local).start().unwrap().wait().unwrap();
        let storage = region.into_storage().unwrap();
        local.write_at(0, &[0; 1 << 20]).unwrap();
        for request in [scene.user.read(&remote, &local), scene.user.write(&remote, &local)] {
            let error = request.start().and_then(|transfer| transfer.wait()).unwrap_err();
            assert_eq!(error.kind(), Kind::Stale, "{error}");
        }
        assert!(bytes_of(&local) == [0; 1 << 20]);
        assert!(fs::read(storage.path()).unwrap() == bytes);
        let file = storage.path().to_owned();
        drop(storage);
        assert!(!file.exists());
    }
}

#[test]
fn a_file_taken_back_in_flight_ends_the_transfers() {
    for path in PATHS {
        let scene = Scene::on(path);
        let len = 16 << 20;
        let region = scene.file(&pattern(len, 7), Access::READ_WRITE);
        let remote = scene.import(&region);
        let locals: Vec<_> = (0..6).map(|_| scene.local(len)).collect();
        let transfers: Vec<_> = locals
            .iter()
            .enumerate()
            .map(|(index, local)| match index % 2 {
                0 => scene.user.read(&remote, local).start().unwrap(),
                _ => scene.user.write(&remote, local).start().unwrap(),
            })
            .collect();
        let storage = region.into_storage_within(LIMIT).unwrap();
        for transfer in transfers {
            if let Err(error) = transfer.wait() {
                assert_eq!(error.kind(), Kind::Stale, "{error}");
            }
        }
        drop(storage);
    }
}

#[test]
fn more_is_asked_for_at_once_than_the_owner_holds_in_buffers() {
    for path in ["unix", "tcp"] {
        let scene = Scene::on(path);
        let len = 8 << 20;
        let bytes = pattern(len, 8);
        let region = scene.file(&bytes, Access::READ_WRITE);
        let remote = scene.import(&region);
        let locals: Vec<_> = (0..12).map(|_| scene.local(len)).collect();
        let transfers: Vec<_> =
            locals.iter().map(|local| scene.user.read(&remote, local).start().unwrap()).collect();
        for (transfer, local) in transfers.into_iter().zip(&locals) {
            transfer.wait().unwrap();
            assert!(bytes_of(local) == bytes);
        }
        // Many small ones, all over one connection.
        let small: Vec<_> = (0..500u64)
            .map(|index| {
                let at = index * 4099;
                (at, scene.user.write(&remote, &locals[0]).at(at, at, 4099).start().unwrap())
            })
            .collect();
        for (_, transfer) in small {
            transfer.wait().unwrap();
        }
        assert!(fs::read(region.storage().path()).unwrap() == bytes);
    }
}

#[test]
fn a_file_that_was_opened_for_reading_cannot_be_lent_for_writing() {
    let folder = std::env::temp_dir().join(format!("towline-disk-lent-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let path: PathBuf = folder.join("file");
    fs::write(&path, pattern(5000, 9)).unwrap();
    let open = || DiskStorage::options().direct(DirectIo::Never).read_only(true).open(&path).unwrap();
    let scene = Scene::on("unix");
    let refused = scene.owner.register(open(), Access::READ_WRITE).unwrap_err();
    assert_eq!(refused.error.kind(), Kind::PermissionDenied);
    assert_eq!(refused.storage.size(), 5000);
    let region = scene.owner.register(open(), Access::READ).unwrap();
    let remote = scene.import(&region);
    let local = scene.local(5000);
    scene.user.read(&remote, &local).start().unwrap().wait().unwrap();
    assert!(bytes_of(&local) == pattern(5000, 9));
    // Another process makes it shorter: an error, and the connection goes on.
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(10).unwrap();
    let error = scene.user.read(&remote, &local).start().and_then(|transfer| transfer.wait()).unwrap_err();
    assert!(error.message().contains("shorter"), "{error}");
    scene.user.read(&remote, &local).at(0, 0, 10).start().unwrap().wait().unwrap();
    drop(region);
    assert!(path.exists());
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_file_that_was_cut_gives_errors_and_no_zeros_and_a_write_does_not_make_it_longer() {
    const LEN: usize = 4 << 20;
    for path in PATHS {
        for direct in [DirectIo::Never, DirectIo::Try] {
            let scene = Scene::on(path);
            let storage = DiskStorage::options().direct(direct).create(LEN).unwrap();
            let file = fs::OpenOptions::new().write(true).open(storage.path()).unwrap();
            let region = scene.owner.register(storage, Access::READ_WRITE).unwrap();
            let (remote, local) = (scene.import(&region), scene.local(LEN));
            scene.user.write(&remote, &local).start().unwrap().wait().unwrap();
            file.set_len(LEN as u64 / 2).unwrap();
            let late = LEN as u64 - 4096;
            for attempt in [
                scene.user.read(&remote, &local),
                scene.user.read(&remote, &local).at(late, late, 4096),
                scene.user.write(&remote, &local).at(late, late, 4096),
                scene.user.write(&remote, &local),
            ] {
                let error = attempt.start().and_then(|transfer| transfer.wait()).unwrap_err();
                assert_eq!(error.kind(), Kind::Stale, "{path}: {error}");
                assert!(error.message().contains("shorter"), "{path}: {error}");
                assert_eq!(file.metadata().unwrap().len(), LEN as u64 / 2, "{path}");
            }
            for error in [
                region.read_at(LEN - 8, &mut [0; 8]).unwrap_err(),
                region.write_at(LEN - 8, &[1; 8]).unwrap_err(),
            ] {
                assert_eq!(error.kind(), Kind::Stale, "{error}");
            }
            // What is still there is served.
            scene.user.read(&remote, &local).at(0, 0, 4096).start().unwrap().wait().unwrap();
            scene.user.write(&remote, &local).at(0, 0, 4096).start().unwrap().wait().unwrap();
        }
    }
}
