//! The bytes of a file: read and written at offsets, around the page cache where that is possible.
#![allow(unsafe_code, reason = "reads into and writes from registered memory, which is reached by address")]

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;

use crate::runtime::{Device, rseq};
use crate::{Error, Kind, Result};

/// What direct input and output is aligned to: no file system asks for more than a page, and parts that share no
/// page with buffered ones cannot get in the way of each other.
pub(crate) const ALIGNMENT: usize = 4096;

/// Direct input and output pays from about this length on.
const LEAST_DIRECT: usize = 64 << 10;

/// Says where in a file a storage starts.
#[derive(Debug, Clone)]
pub struct FileSlice {
    pub(super) file: Arc<FileBytes>,
    pub(super) offset: u64,
    /// The file had all its bytes when it was described, and must keep them: a write does not make it longer again, which
    /// would leave zeros where bytes were.
    pub(super) whole: bool,
}

impl FileSlice {
    /// The same file, `by` bytes further on.
    pub(super) fn forward(mut self, by: usize) -> FileSlice {
        self.offset += by as u64;
        self
    }

    /// `len` bytes of the file behind a descriptor of this process, from an offset on. It is opened anew: the descriptor may be
    /// closed.
    pub(crate) fn of_descriptor(number: u64, offset: u64, len: u64) -> Result<FileSlice> {
        let failed = |call: &'static str, error: io::Error| Error::os("register", call, error);
        let number = i32::try_from(number).map_err(|_| Error::invalid("register", "no such descriptor"))?;
        let same = format!("/proc/self/fd/{number}");
        let kind = std::fs::metadata(&same).map_err(|error| failed("stat", error))?;
        if !kind.is_file() {
            return Err(Error::invalid(
                "register",
                format!("descriptor {number} does not refer to a plain file"),
            ));
        }
        // SAFETY: it only asks; a number that is not a descriptor is an error.
        let flags = unsafe { libc::fcntl(number, libc::F_GETFL) };
        if flags < 0 {
            return Err(failed("fcntl", io::Error::last_os_error()));
        }
        let writable = flags & libc::O_ACCMODE != libc::O_RDONLY;
        let open =
            |more: i32| std::fs::File::options().read(true).write(writable).custom_flags(more).open(&same);
        let buffered = open(0).map_err(|error| failed("open", error))?.into();
        let direct =
            if flags & libc::O_DIRECT != 0 { open(libc::O_DIRECT).ok().map(Into::into) } else { None };
        FileSlice::of_len(FileBytes::new(buffered, direct, writable), offset, len)
    }

    fn of_len(file: FileBytes, offset: u64, len: u64) -> Result<FileSlice> {
        let mut slice = FileSlice { file: Arc::new(file), offset, whole: false };
        slice.whole =
            offset.checked_add(len).is_some_and(|end| slice.file_len("open").is_ok_and(|len| len >= end));
        Ok(slice)
    }

    /// Descriptors of the file, made to be handed to others: what they allow is only what is said here.
    pub(crate) fn opened_anew(&self, writable: bool) -> Result<Vec<OwnedFd>> {
        #[cfg(test)]
        stalled::wait(&self.file.buffered);
        let open = |file: &OwnedFd, more: i32| {
            let same = format!("/proc/self/fd/{}", file.as_raw_fd());
            std::fs::File::options()
                .read(true)
                .write(writable)
                .custom_flags(more)
                .open(same)
                .map(OwnedFd::from)
        };
        let buffered = open(&self.file.buffered, 0).map_err(|error| Error::os("import", "open", error))?;
        let direct = self.file.direct.as_ref().and_then(|file| open(file, libc::O_DIRECT).ok());
        Ok(std::iter::once(buffered).chain(direct).collect())
    }

    /// `len` bytes of the file behind descriptors that the owner has [opened anew](Self::opened_anew) and handed over.
    pub(crate) fn passed(files: Vec<OwnedFd>, writable: bool, offset: u64, len: u64) -> Result<FileSlice> {
        let mut files = files.into_iter();
        let buffered =
            files.next().ok_or_else(|| Error::protocol("import", "the file's descriptor did not arrive"))?;
        let direct = files.next();
        // Of a pipe, a device or a folder an access would block, or be no access to bytes.
        for file in [Some(&buffered), direct.as_ref()].into_iter().flatten() {
            let stat = rustix::fs::fstat(file).map_err(|error| Error::os("import", "fstat", error))?;
            if !rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file() {
                let message = "the owner sent a descriptor that is not a regular file";
                return Err(Error::protocol("import", message));
            }
        }
        FileSlice::of_len(FileBytes::new(buffered, direct, writable), offset, len)
    }

    /// The descriptor of the file: the one for direct input and output, where there is one.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.descriptor()
    }

    /// The descriptor's number.
    pub(crate) fn number(&self) -> u64 {
        self.file().as_raw_fd() as u64
    }

    /// The numbers of the descriptors for buffered and, where there is one, for direct input and output.
    pub(crate) fn numbers(&self) -> (u64, Option<u64>) {
        let number = |file: &OwnedFd| file.as_raw_fd() as u64;
        (number(&self.file.buffered), self.file.direct.as_ref().map(number))
    }

    /// How many bytes the file has now.
    pub(crate) fn file_len(&self, op: &'static str) -> Result<u64> {
        let stat = rustix::fs::fstat(&self.file.buffered)
            .map_err(|error| Error::os(op, "fstat", io::Error::from(error)))?;
        Ok(u64::try_from(stat.st_size).unwrap_or(0))
    }

    /// What reads and writes of it wait for.
    pub(crate) fn device(&self) -> Device {
        self.file.device
    }

    /// How far from the start of the file the bytes begin.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Whether the bytes can be written.
    pub fn is_writable(&self) -> bool {
        self.file.writable
    }

    /// Reads `len` bytes from `offset` on. Blocks.
    ///
    /// # Safety
    /// `into` is valid for writes of `len` bytes during the call; others may touch them.
    pub(crate) unsafe fn read(&self, op: &'static str, offset: u64, into: *mut u8, len: usize) -> Result<()> {
        // SAFETY: the caller's obligation is the same.
        unsafe { self.file.transfer(FileAccess::Read, op, self.offset + offset, into, len) }.map(|_| ())
    }

    /// Writes `len` bytes from `offset` on. Blocks.
    ///
    /// # Safety
    /// `from` is valid for reads of `len` bytes during the call; others may touch them.
    pub(crate) unsafe fn write(
        &self,
        op: &'static str,
        offset: u64,
        from: *const u8,
        len: usize,
    ) -> Result<()> {
        self.may_write(op, offset, len)?;
        // SAFETY: the caller's obligation is the same; `FileAccess::Write` only reads.
        unsafe { self.file.transfer(FileAccess::Write, op, self.offset + offset, from.cast_mut(), len) }
            .map(|_| ())
    }

    /// The same as long as the check says yes, [in one step](rseq) with each check. Returns whether all was written. Blocks.
    ///
    /// # Safety
    /// As for [`write`](Self::write).
    pub(crate) unsafe fn write_if(
        &self,
        check: &dyn Fn() -> bool,
        op: &'static str,
        offset: u64,
        from: *const u8,
        len: usize,
    ) -> Result<bool> {
        self.may_write(op, offset, len)?;
        // SAFETY: as above.
        unsafe {
            self.file.transfer(FileAccess::WriteIf(check), op, self.offset + offset, from.cast_mut(), len)
        }
    }

    fn may_write(&self, op: &'static str, offset: u64, len: usize) -> Result<()> {
        if !self.file.writable {
            return Err(Error::new(Kind::PermissionDenied, op, "the file was opened for reading only"));
        }
        if self.whole && self.file_len(op)? < self.offset + offset + len as u64 {
            return Err(shorter(op));
        }
        Ok(())
    }
}

/// An open file.
#[derive(Debug)]
pub(crate) struct FileBytes {
    pub(super) buffered: OwnedFd,
    /// The same file opened with `O_DIRECT`, where the file system takes that.
    pub(super) direct: Option<OwnedFd>,
    pub(super) writable: bool,
    /// What its reads and writes wait for.
    device: Device,
}

#[derive(Clone, Copy)]
enum FileAccess<'a> {
    Read,
    Write,
    /// A write that goes on as long as the check says yes.
    WriteIf(&'a dyn Fn() -> bool),
}

impl FileBytes {
    pub(super) fn new(buffered: OwnedFd, direct: Option<OwnedFd>, writable: bool) -> FileBytes {
        // Files whose disk is not known share one.
        let number = rustix::fs::fstat(&buffered).map_or(0, |stat| stat.st_dev);
        #[cfg(test)]
        let number = stalled::disk_of(&buffered, number);
        FileBytes { buffered, direct, writable, device: Device::Disk(number) }
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.direct.as_ref().unwrap_or(&self.buffered).as_fd()
    }

    /// Moves bytes between the file and memory: whole pages directly, the rest through the page cache. Returns whether all were moved.
    ///
    /// # Safety
    /// `memory` is valid for that access and `len` bytes.
    unsafe fn transfer(
        &self,
        access: FileAccess<'_>,
        op: &'static str,
        offset: u64,
        memory: *mut u8,
        len: usize,
    ) -> Result<bool> {
        #[cfg(test)]
        stalled::wait(&self.buffered);
        let pages = match &self.direct {
            Some(_) => whole_pages(offset, memory.addr(), len),
            None => 0..0,
        };
        let parts = [(0..pages.start, false), (pages.clone(), true), (pages.end..len, false)];
        for (part, directly) in parts.into_iter().filter(|(part, _)| !part.is_empty()) {
            let (at, memory) = (offset + part.start as u64, memory.wrapping_add(part.start));
            let file = self.direct.as_ref().filter(|_| directly).unwrap_or(&self.buffered);
            // SAFETY: a part of the caller's range.
            let moved = match unsafe { all(access, file, at, memory, part.len()) } {
                // A file system may take the flag and still refuse this very alignment.
                Err(error) if directly && error.raw_os_error() == Some(libc::EINVAL) => {
                    // SAFETY: as above.
                    unsafe { all(access, &self.buffered, at, memory, part.len()) }
                }
                moved => moved,
            };
            if !moved.map_err(|error| failed(access, op, error))? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Files whose disk hangs, for tests.
#[cfg(test)]
pub(crate) mod stalled {
    use std::os::fd::{AsRawFd, OwnedFd};
    use std::time::{Duration, Instant};

    use parking_lot::{Condvar, Mutex};

    use super::FileSlice;

    struct Hanging {
        name: (u64, u64),
        /// Threads that do not come back.
        inside: usize,
    }

    static FILES: Mutex<Vec<Hanging>> = Mutex::new(Vec::new());
    static CHANGED: Condvar = Condvar::new();

    fn name(file: &OwnedFd) -> (u64, u64) {
        rustix::fs::fstat(file).map_or((0, 0), |stat| (stat.st_dev, stat.st_ino))
    }

    /// Until it is dropped, reads and writes of a file do not come back.
    pub(crate) struct Stalled((u64, u64));

    impl Stalled {
        pub(crate) fn new(slice: &FileSlice) -> Stalled {
            let name = name(&slice.file.buffered);
            FILES.lock().push(Hanging { name, inside: 0 });
            Stalled(name)
        }

        /// Waits until so many threads hang, for at most that long; returns whether they do.
        pub(crate) fn holds(&self, threads: usize, within: Duration) -> bool {
            let until = Instant::now() + within;
            let mut files = FILES.lock();
            let held =
                |files: &[Hanging]| files.iter().any(|one| one.name == self.0 && one.inside >= threads);
            while !held(&files) {
                if CHANGED.wait_until(&mut files, until).timed_out() {
                    return held(&files);
                }
            }
            true
        }
    }

    impl Drop for Stalled {
        fn drop(&mut self) {
            FILES.lock().retain(|one| one.name != self.0);
            CHANGED.notify_all();
        }
    }

    /// A file that a test lets hang is on a disk of its own, so that the others are on theirs.
    pub(super) fn disk_of(file: &OwnedFd, disk: u64) -> u64 {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let hangs = link.is_ok_and(|link| link.to_string_lossy().contains("/towline-hang"));
        if hangs { disk ^ name(file).1 << 32 } else { disk }
    }

    pub(super) fn wait(file: &OwnedFd) {
        let mut files = FILES.lock();
        if files.is_empty() {
            return;
        }
        let name = name(file);
        if let Some(one) = files.iter_mut().find(|one| one.name == name) {
            one.inside += 1;
            CHANGED.notify_all();
        }
        while files.iter().any(|one| one.name == name) {
            CHANGED.wait(&mut files);
        }
    }
}

/// The error for a file that was cut.
pub(crate) fn shorter(op: &'static str) -> Error {
    let message = "the file has become shorter since it was described; close the region before it is cut";
    Error::new(Kind::Stale, op, message)
}

fn failed(access: FileAccess<'_>, op: &'static str, error: io::Error) -> Error {
    if error.kind() == io::ErrorKind::UnexpectedEof {
        return shorter(op).caused_by(error);
    }
    Error::os(op, if matches!(access, FileAccess::Read) { "pread" } else { "pwrite" }, error)
}

/// The part of a range that covers whole pages of both the file and the memory; empty where that is not worth it.
fn whole_pages(offset: u64, memory: usize, len: usize) -> Range<usize> {
    let into_page = (offset % ALIGNMENT as u64) as usize;
    if memory % ALIGNMENT != into_page {
        return 0..0;
    }
    let start = (ALIGNMENT - into_page) % ALIGNMENT;
    let whole = len.saturating_sub(start) / ALIGNMENT * ALIGNMENT;
    if whole < LEAST_DIRECT { 0..0 } else { start..start + whole }
}

/// Repeats the system call until all bytes have moved, or are not to be moved; whether all have.
///
/// # Safety
/// `memory` is valid for that access and `len` bytes.
unsafe fn all(
    access: FileAccess<'_>,
    file: &OwnedFd,
    offset: u64,
    memory: *mut u8,
    len: usize,
) -> io::Result<bool> {
    let mut done = 0;
    while done < len {
        let at = libc::off_t::try_from(offset + done as u64)
            .map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))?;
        let (memory, left) = (memory.wrapping_add(done), len - done);
        // BYTES MOVE HERE
        // SAFETY: the rest of the caller's range.
        let moved = unsafe {
            match access {
                FileAccess::Read => returned(libc::pread(file.as_raw_fd(), memory.cast(), left, at)),
                FileAccess::Write => {
                    returned(libc::pwrite(file.as_raw_fd(), memory.cast_const().cast(), left, at))
                }
                FileAccess::WriteIf(check) => {
                    match rseq::pwrite(check, file.as_raw_fd(), memory.cast_const(), left, at) {
                        Some(moved) => usize::try_from(moved).map_err(|_| {
                            io::Error::from_raw_os_error(i32::try_from(-moved).unwrap_or(libc::EIO))
                        }),
                        None => return Ok(false),
                    }
                }
            }
        };
        match moved {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(moved) => done += moved,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// What a function of the C library says about the bytes that it has moved.
fn returned(moved: isize) -> io::Result<usize> {
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_descriptor_that_is_handed_over_allows_no_more_than_was_said() {
        let storage = crate::DiskStorage::new(4096).unwrap();
        let slice = crate::memory::Storage::file(&storage).unwrap();
        for (writable, outcome) in [(true, Ok(1)), (false, Err(rustix::io::Errno::BADF))] {
            for file in slice.opened_anew(writable).unwrap().iter().take(1) {
                assert_eq!(rustix::io::pwrite(file, b"x", 0), outcome);
            }
        }
    }

    #[test]
    fn only_whole_pages_that_lie_alike_go_directly() {
        let page = ALIGNMENT;
        assert_eq!(whole_pages(0, 0x10000, 16 * page), 0..16 * page);
        assert_eq!(whole_pages(0, 0x10000, 16 * page + 5), 0..16 * page);
        assert_eq!(whole_pages(100, 0x10000 + 100, 20 * page), page - 100..20 * page - 100);
        assert_eq!(whole_pages(100, 0x10000, 20 * page), 0..0, "the memory lies otherwise than the file");
        assert_eq!(whole_pages(0, 0x10000, 15 * page), 0..0, "too short to be worth it");
        assert_eq!(whole_pages(1, 0x10001, 10), 0..0);
    }
}
