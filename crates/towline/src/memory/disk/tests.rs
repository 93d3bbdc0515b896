#![allow(clippy::unwrap_used, clippy::panic)]

use std::os::fd::BorrowedFd;

use rustix::fs::OFlags;
use rustix::io::FdFlags;

use super::*;
use crate::memory::MemoryDescription;
use crate::memory::{MemoryAccess, OffsetBuffer, SystemStorage, create_buffer};
use crate::skip::skip;

/// Set where the file system is known to take neither `O_DIRECT` nor `fallocate`.
const PLAIN: &str = "TOWLINE_TEST_PLAIN_FILES";

/// A folder that goes away with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("towline-disk-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Folder(path.canonicalize().unwrap())
    }

    fn files(&self) -> usize {
        fs::read_dir(&self.0).unwrap().count()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 4096) as u8).collect()
}

#[test]
fn a_file_that_was_created_here_goes_with_the_storage() {
    let folder = Folder::new("created");
    let storage = DiskStorage::options().folder(&folder.0).create(10_000).unwrap();
    assert_eq!(storage.size(), 10_000);
    assert_eq!(storage.path().metadata().unwrap().len(), 10_000);
    assert_eq!(storage.path().metadata().unwrap().mode() & 0o777, 0o600);
    assert_eq!(storage.storage_kind(), StorageKind::Disk(storage.fd()));
    assert_eq!((storage.addr(), storage.place()), (0, Place::Disk));
    drop(storage);
    assert_eq!(folder.files(), 0);
}

#[test]
fn a_file_that_was_there_is_neither_removed_nor_changed_in_length() {
    let folder = Folder::new("there");
    let path = folder.0.join("mine");
    fs::write(&path, b"do not lose this").unwrap();
    let mut storage = DiskStorage::new_at(&path, 16).unwrap();
    storage.write_at(0, b"DO").unwrap();
    assert_eq!(storage.unlink().unwrap_err().kind(), Kind::PermissionDenied);
    drop(storage);
    assert_eq!(fs::read(&path).unwrap(), b"DO not lose this");
    for len in [15, 17] {
        assert_eq!(DiskStorage::new_at(&path, len).unwrap_err().kind(), Kind::Invalid);
    }
    assert_eq!(DiskStorage::open(&path).unwrap().size(), 16);
    assert_eq!(fs::read(&path).unwrap(), b"DO not lose this");
}

#[test]
fn a_file_that_took_the_place_of_ours_stays() {
    let folder = Folder::new("replaced");
    let path = folder.0.join("cache");
    let mut storage = DiskStorage::new_at(&path, 100).unwrap();
    fs::rename(&path, folder.0.join("moved")).unwrap();
    fs::write(&path, b"somebody else's").unwrap();
    assert_eq!(storage.unlink().unwrap_err().kind(), Kind::PermissionDenied);
    drop(storage);
    assert_eq!(fs::read(&path).unwrap(), b"somebody else's");
}

#[test]
fn unlinking_twice_is_fine_and_the_bytes_stay() {
    let folder = Folder::new("unlinked");
    let mut storage = DiskStorage::new_at(folder.0.join("deep/down/cache-XXXXXX"), 100).unwrap();
    assert!(!storage.path().ends_with("cache-XXXXXX") && storage.path().exists());
    storage.write_at(50, b"x").unwrap();
    storage.unlink().unwrap();
    storage.unlink().unwrap();
    assert!(storage.unlinked() && !storage.path().exists());
    let mut byte = [0];
    storage.read_at(50, &mut byte).unwrap();
    assert_eq!(&byte, b"x");
}

#[test]
fn a_kept_file_stays() {
    let folder = Folder::new("kept");
    let mut storage = DiskStorage::new_at(folder.0.join("kept"), 3).unwrap();
    storage.write_at(0, b"abc").unwrap();
    storage.keep();
    drop(storage);
    assert_eq!(fs::read(folder.0.join("kept")).unwrap(), b"abc");
}

#[test]
fn a_storage_that_cannot_be_made_leaves_neither_file_nor_descriptor() {
    let folder = Folder::new("failing");
    let descriptors = || fs::read_dir("/proc/self/fd").unwrap().count();
    // Other tests open and close descriptors meanwhile: only a leak adds up.
    let before = descriptors();
    for _ in 0..200 {
        let too_long = DiskStorage::new_at(folder.0.join("large"), isize::MAX as usize).unwrap_err();
        assert!(matches!(too_long.kind(), Kind::Exhausted | Kind::Native), "{too_long}");
    }
    assert_eq!(folder.files(), 0);
    assert!(descriptors() < before + 150);
    assert_eq!(DiskStorage::new(0).unwrap_err().kind(), Kind::Invalid);
    assert_eq!(DiskStorage::open(folder.0.join("none")).unwrap_err().kind(), Kind::NotFound);
    for read_only in [false, true] {
        let folder_itself = DiskStorage::options().read_only(read_only).open(&folder.0);
        assert_eq!(folder_itself.unwrap_err().kind(), Kind::Invalid);
    }
    fs::write(folder.0.join("empty"), b"").unwrap();
    assert_eq!(DiskStorage::open(folder.0.join("empty")).unwrap_err().kind(), Kind::Invalid);
    assert_eq!(DiskStorage::new_at("with a \0 inside", 10).unwrap_err().kind(), Kind::Invalid);
}

#[test]
fn a_pipe_is_refused_and_nobody_waits_for_its_other_end() {
    let folder = Folder::new("pipe");
    let path = folder.0.join("pipe");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &path,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    let error = DiskStorage::options().read_only(true).open(&path).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid);
}

#[test]
fn descriptors_are_not_inherited_and_direct_ones_say_so() {
    let folder = Folder::new("flags");
    let direct = DiskStorage::options().folder(&folder.0).create(1 << 20).unwrap();
    let cached = DiskStorage::options().folder(&folder.0).direct(DirectIo::Never).create(1 << 20).unwrap();
    assert!(!cached.is_direct());
    for storage in [&direct, &cached] {
        for file in [Some(&storage.file.buffered), storage.file.direct.as_ref()].into_iter().flatten() {
            assert!(rustix::io::fcntl_getfd(file).unwrap().contains(FdFlags::CLOEXEC));
        }
        let slice = storage.file().unwrap();
        let descriptor: BorrowedFd<'_> = slice.file();
        let flags = rustix::fs::fcntl_getfl(descriptor).unwrap();
        assert_eq!(flags.contains(OFlags::DIRECT), storage.is_direct());
    }
    // Where the file system takes it at all, requiring it works too.
    let required = DiskStorage::options().folder(&folder.0).direct(DirectIo::Require).create(1 << 20);
    assert_eq!(required.map_err(|error| error.kind()).is_ok(), direct.is_direct());
}

#[test]
fn direct_and_cached_access_see_the_same_bytes() {
    let folder = Folder::new("mixed");
    let len = 1 << 20;
    let storage = DiskStorage::options().folder(&folder.0).create(len).unwrap();
    if std::env::var_os(PLAIN).is_some() {
        assert!(!storage.is_direct() && !storage.is_reserved());
        let required = DiskStorage::options().folder(&folder.0).direct(DirectIo::Require).create(len);
        assert_eq!(required.unwrap_err().kind(), Kind::Unsupported);
        assert_eq!(folder.files(), 1);
    }
    let bytes = pattern(len);
    let memory = SystemStorage::new(len + 4096).unwrap();
    let slice = storage.file().unwrap();
    // (offset in the file, offset in page-aligned memory, length): alike and not, whole pages and not.
    for (at, near, part) in [
        (0, 0, len),
        (4096, 0, 256 << 10),
        (100, 100, 300 << 10),
        (100, 0, 300 << 10),
        (len - 5, 3, 5),
        (4095, 4095, 2),
    ] {
        memory.write_at(near, &bytes[at..at + part]).unwrap();
        // SAFETY: both ranges lie inside the storages.
        unsafe { slice.write("write", at as u64, memory.as_ptr().add(near), part) }.unwrap();
        memory.memset(0, 0, len + 4096).unwrap();
        // SAFETY: as above.
        unsafe { slice.read("read", at as u64, memory.as_ptr().add(near), part) }.unwrap();
        let mut back = vec![0; part];
        memory.read_at(near, &mut back).unwrap();
        assert!(back == bytes[at..at + part], "{part} bytes at {at}");
        storage.read_at(at, &mut back).unwrap();
        assert!(back == bytes[at..at + part]);
    }
    assert!(fs::read(storage.path()).unwrap() == bytes);
}

#[test]
fn views_of_a_file_are_parts_of_it() {
    let folder = Folder::new("views");
    let storage = DiskStorage::options().folder(&folder.0).create(1000).unwrap();
    let whole = create_buffer(storage);
    let view = OffsetBuffer::new(whole.clone(), 100, 50).unwrap();
    view.write_at(10, b"here").unwrap();
    let mut back = [0; 4];
    whole.read_at(110, &mut back).unwrap();
    assert_eq!(&back, b"here");
    assert_eq!(view.file().unwrap().offset(), 100);
    assert_eq!(view.write_at(48, b"here").unwrap_err().kind(), Kind::Invalid);
    whole.memset(9, 0, 1000).unwrap();
    view.read_at(0, &mut back).unwrap();
    assert_eq!(back, [9; 4]);
}

#[test]
fn a_read_only_file_refuses_writes_and_a_shrunken_one_says_so() {
    let folder = Folder::new("shrunken");
    let path = folder.0.join("file");
    fs::write(&path, [1; 100]).unwrap();
    let storage = DiskStorage::options().read_only(true).open(&path).unwrap();
    assert!(!storage.is_writable());
    assert_eq!(storage.write_at(0, b"x").unwrap_err().kind(), Kind::PermissionDenied);
    File::options().write(true).open(&path).unwrap().set_len(50).unwrap();
    let error = storage.read_at(40, &mut [0; 20]).unwrap_err();
    assert!(error.message().contains("shorter"), "{error}");
    storage.read_at(40, &mut [0; 10]).unwrap();
}

#[test]
fn a_file_system_that_takes_neither_direct_io_nor_reservation_serves_all_the_same() {
    let name = "a_file_system_that_takes_neither_direct_io_nor_reservation_serves_all_the_same";
    let folder = Folder::new("plain");
    let unshared = |program: &str, test: &str| {
        std::process::Command::new("unshare")
            .args(["--map-root-user", "--mount", "sh", "-c"])
            .arg("mount -t ramfs ramfs \"$TMPDIR\" && exec \"$0\" --exact \"$1\"")
            .args([program, test])
            .env("TMPDIR", &folder.0)
            .env(PLAIN, "1")
            .output()
    };
    let tried = unshared("true", "");
    if !tried.as_ref().is_ok_and(|tried| tried.status.success()) {
        let reason = format!("a ramfs cannot be mounted in a user namespace: {tried:?}");
        return skip(name, "userns", &reason);
    }
    let test = "memory::disk::tests::direct_and_cached_access_see_the_same_bytes";
    let ran = unshared(std::env::current_exe().unwrap().to_str().unwrap(), test).unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn what_an_owner_hands_over_as_its_file_is_a_plain_file() {
    let pipe = || rustix::pipe::pipe().unwrap().0;
    let open = |path: &str| OwnedFd::from(std::fs::File::open(path).unwrap());
    for wrong in [pipe(), open("/"), open("/dev/zero")] {
        let refused = FileSlice::passed(vec![wrong], false, 0, 1).unwrap_err();
        assert_eq!(refused.kind(), Kind::Protocol, "{refused}");
    }
    let direct = FileSlice::passed(vec![open("/proc/self/exe"), pipe()], false, 0, 1).unwrap_err();
    assert_eq!(direct.kind(), Kind::Protocol, "{direct}");
    FileSlice::passed(vec![open("/proc/self/exe")], false, 0, 1).unwrap();
}
