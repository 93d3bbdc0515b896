//! Bytes in a file.
#![allow(unsafe_code, reason = "implements the storage contract")]

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::file::{FileBytes, FileSlice};
use super::{Place, Storage, StorageKind, describe, map};
use crate::{Error, Kind, Result, fork};

/// The variable in which users of `dynamo_memory` name the folder for files without a name of their own.
const FOLDER: &str = "DYN_KVBM_DISK_CACHE_DIR";

/// Six of these at the end of a file's name stand for characters that make it unique.
const TEMPLATE: &str = "XXXXXX";

/// Whether a file is read and written around the page cache (`O_DIRECT`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DirectIo {
    /// Through the page cache.
    Never,
    /// Around it where the file system takes that, and for whole pages.
    #[default]
    Try,
    /// Around it, or not at all: `Unsupported` where the file system does not take it.
    Require,
}

/// Bytes in a file.
///
/// A file that the storage created goes when the storage does, unless it is [kept](DiskStorage::keep). A file that was
/// there before is never removed, emptied or made longer or shorter. Its space is reserved where the file system can do
/// that. Programs that are started later do not inherit the descriptor.
///
/// It can be registered: peers read and write it with the owner's help (`inproc`, `unix`, `tcp`). A file has no
/// addresses: [`addr`](super::MemoryDescription::addr) is 0, and atomics, signals and reductions are `Unsupported`.
///
/// ```
/// use towline::memory::{DiskStorage, MemoryAccess};
/// # fn main() -> towline::Result<()> {
/// let storage = DiskStorage::new(1 << 20)?;
/// storage.write_at(4096, b"an evicted block")?;
/// let mut back = [0; 16];
/// storage.read_at(4096, &mut back)?;
/// assert_eq!(&back, b"an evicted block");
/// let path = storage.path().to_owned();
/// drop(storage);
/// assert!(!path.exists());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DiskStorage {
    file: Arc<FileBytes>,
    path: PathBuf,
    len: usize,
    reserved: bool,
    /// Device and number of the file while it is ours to remove.
    ours: Option<(u64, u64)>,
    unlinked: bool,
}

/// How a [`DiskStorage`] is made.
#[derive(Debug, Clone, Default)]
pub struct DiskOptions {
    direct: DirectIo,
    folder: Option<PathBuf>,
    read_only: bool,
}

impl DiskOptions {
    /// Chooses whether the page cache is gone around; [`DirectIo::Try`] unless said otherwise.
    #[must_use]
    pub fn direct(mut self, direct: DirectIo) -> DiskOptions {
        self.direct = direct;
        self
    }

    /// Names the folder for a file without a name of its own; else the one in `DYN_KVBM_DISK_CACHE_DIR`, else the
    /// system's for temporary files.
    #[must_use]
    pub fn folder(mut self, folder: impl Into<PathBuf>) -> DiskOptions {
        self.folder = Some(folder.into());
        self
    }

    /// Opens a file that is there for reading only.
    #[must_use]
    pub fn read_only(mut self, read_only: bool) -> DiskOptions {
        self.read_only = read_only;
        self
    }

    /// Creates a file of `len` bytes with a name of its own, for this user only.
    ///
    /// # Errors
    /// `Invalid` for length 0; `Exhausted` where the disk is full; `Unsupported` where direct input and output is
    /// required and the file system does not take it; otherwise what the operating system says.
    pub fn create(self, len: usize) -> Result<DiskStorage> {
        let folder = self
            .folder
            .clone()
            .or_else(|| std::env::var_os(FOLDER).filter(|folder| !folder.is_empty()).map(PathBuf::from))
            .unwrap_or_else(std::env::temp_dir);
        self.create_at(folder.join(format!("towline-{TEMPLATE}")), len)
    }

    /// Creates a file of `len` bytes at `path`, and the folders that lead to it; or opens the file of that length that
    /// is there. Six `X` at the end of the name stand for characters that make it unique.
    ///
    /// # Errors
    /// As for [`create`](Self::create); `Invalid` where something of another length or kind is there.
    pub fn create_at(self, path: impl AsRef<Path>, len: usize) -> Result<DiskStorage> {
        map::not_empty(len)?;
        let path = path.as_ref();
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(|error| at("mkdir", folder, error))?;
        }
        let name = path.to_string_lossy();
        if let Some(stem) = name.strip_suffix(TEMPLATE) {
            loop {
                let mut random = [0; 6];
                getrandom::fill(&mut random)
                    .map_err(|error| Error::new(Kind::Native, "allocate", format!("getrandom: {error}")))?;
                let unique: String = random.iter().map(|byte| char::from(b'a' + byte % 26)).collect();
                if let Some(storage) = self.try_create(Path::new(&format!("{stem}{unique}")), len)? {
                    return Ok(storage);
                }
            }
        }
        match self.try_create(path, len)? {
            Some(storage) => Ok(storage),
            None => self.open_of(path, Some(len)),
        }
    }

    /// Opens a file that is there, all of it.
    ///
    /// # Errors
    /// `Invalid` if it is empty or not a regular file; `NotFound` if it does not exist; otherwise what the operating
    /// system says.
    pub fn open(self, path: impl AsRef<Path>) -> Result<DiskStorage> {
        self.open_of(path.as_ref(), None)
    }

    /// Creates the file; `None` where something is there.
    fn try_create(&self, path: &Path, len: usize) -> Result<Option<DiskStorage>> {
        let created = File::options().read(true).write(true).create_new(true).mode(0o600).open(path);
        let file = match created {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
            Err(error) => return Err(at("open", path, error)),
        };
        let found = file.metadata().map_err(|error| at("fstat", path, error))?;
        // From here on its drop removes the file, also where one of the next steps fails.
        let mut storage = DiskStorage {
            file: Arc::new(FileBytes::new(file.into(), None, true)),
            path: fs::canonicalize(path).map_err(|error| at("realpath", path, error))?,
            len,
            reserved: false,
            ours: Some((found.dev(), found.ino())),
            unlinked: false,
        };
        storage.reserved =
            reserve(&storage.file.buffered, len).map_err(|error| at("fallocate", path, error))?;
        storage.go_direct(self.direct)?;
        Ok(Some(storage))
    }

    fn open_of(&self, path: &Path, len: Option<usize>) -> Result<DiskStorage> {
        // Without blocking: the path may lead to a pipe, of which nobody has the other end.
        let file = File::options()
            .read(true)
            .write(!self.read_only)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(|error| at("open", path, error))?;
        let found = file.metadata().map_err(|error| at("fstat", path, error))?;
        if !found.is_file() {
            return Err(Error::invalid("allocate", format!("{} is not a regular file", path.display())));
        }
        let there =
            usize::try_from(found.len()).ok().filter(|there| (1..=isize::MAX as usize).contains(there));
        let Some(there) = there.filter(|there| len.is_none_or(|len| len == *there)) else {
            let wanted = len.map_or("is not a length that can be used".into(), |len| {
                format!("but {len} were requested; an existing file is never resized")
            });
            let message = format!("{} has {} bytes, which {wanted}", path.display(), found.len());
            return Err(Error::invalid("allocate", message));
        };
        let mut storage = DiskStorage {
            file: Arc::new(FileBytes::new(file.into(), None, !self.read_only)),
            path: fs::canonicalize(path).map_err(|error| at("realpath", path, error))?,
            len: there,
            reserved: false,
            ours: None,
            unlinked: false,
        };
        storage.go_direct(self.direct)?;
        Ok(storage)
    }
}

impl DiskStorage {
    /// Creates a file of `len` bytes with a name of its own; see [`DiskOptions::create`].
    pub fn new(len: usize) -> Result<DiskStorage> {
        DiskStorage::options().create(len)
    }

    /// Creates a file of `len` bytes at `path`, or opens the one that is there; see [`DiskOptions::create_at`].
    pub fn new_at(path: impl AsRef<Path>, len: usize) -> Result<DiskStorage> {
        DiskStorage::options().create_at(path, len)
    }

    /// Opens a file that is there, for reading and writing; see [`DiskOptions::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<DiskStorage> {
        DiskStorage::options().open(path)
    }

    /// Starts from the default options.
    pub fn options() -> DiskOptions {
        DiskOptions::default()
    }

    /// Where the file is, or was before it was unlinked.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file's descriptor: the one for direct input and output, where there is one.
    pub fn fd(&self) -> u64 {
        self.file.descriptor().as_raw_fd() as u64
    }

    /// Whether whole pages go around the page cache.
    pub fn is_direct(&self) -> bool {
        self.file.direct.is_some()
    }

    /// Whether the file's space is reserved, so that no write can find the disk full.
    pub fn is_reserved(&self) -> bool {
        self.reserved
    }

    /// Whether the bytes can be written.
    pub fn is_writable(&self) -> bool {
        self.file.writable
    }

    /// Removes the file's name now; the bytes stay until the storage goes. Does nothing the second time.
    ///
    /// # Errors
    /// `PermissionDenied` where the storage did not create the file, or its name leads to another one by now.
    pub fn unlink(&mut self) -> Result<()> {
        if self.unlinked {
            return Ok(());
        }
        let refused = |why: &str| {
            Err(Error::new(Kind::PermissionDenied, "unlink", format!("{} {why}", self.path.display())))
        };
        let Some(ours) = self.ours else { return refused("was not created here") };
        match fs::symlink_metadata(&self.path) {
            Ok(found) if (found.dev(), found.ino()) == ours => {
                fs::remove_file(&self.path)
                    .map_err(|error| at("unlink", &self.path, error).during("unlink"))?;
            }
            Ok(_) => return refused("is another file by now"),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(at("lstat", &self.path, error).during("unlink")),
        }
        self.unlinked = true;
        Ok(())
    }

    /// Whether the file's name was removed.
    pub fn unlinked(&self) -> bool {
        self.unlinked
    }

    /// Leaves the file where it is when the storage goes.
    pub fn keep(&mut self) {
        self.ours = None;
    }

    /// Opens the file a second time, around the page cache.
    fn go_direct(&mut self, wanted: DirectIo) -> Result<()> {
        if wanted == DirectIo::Never {
            return Ok(());
        }
        // Through the descriptor, so that it is the same file whatever the path leads to by now.
        let same = format!("/proc/self/fd/{}", self.file.buffered.as_raw_fd());
        let opened =
            File::options().read(true).write(self.file.writable).custom_flags(libc::O_DIRECT).open(same);
        match opened {
            Ok(file) => {
                let buffered =
                    self.file.buffered.try_clone().map_err(|error| at("dup", &self.path, error))?;
                let writable = self.file.writable;
                self.file = Arc::new(FileBytes::new(buffered, Some(file.into()), writable));
                Ok(())
            }
            Err(error) if wanted == DirectIo::Require => Err(Error::new(
                Kind::Unsupported,
                "allocate",
                format!("{} cannot be opened with O_DIRECT: {error}", self.path.display()),
            )
            .caused_by(error)),
            Err(error) => {
                tracing::debug!(path = %self.path.display(), %error, "no direct input and output");
                Ok(())
            }
        }
    }
}

impl Drop for DiskStorage {
    fn drop(&mut self) {
        // A forked child has the descriptor, but not the file.
        if self.ours.is_none() || fork::in_child() {
            return;
        }
        if let Err(error) = self.unlink() {
            tracing::warn!(%error, "a file that was created here is left behind");
        }
    }
}

/// Gives the file its length, with its space where the file system can reserve it; says whether it could.
fn reserve(file: &OwnedFd, len: usize) -> io::Result<bool> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len as u64) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            rustix::fs::ftruncate(file, len as u64)?;
            Ok(false)
        }
        Err(error) => Err(error.into()),
    }
}

fn at(call: &'static str, path: &Path, error: io::Error) -> Error {
    if error.kind() == io::ErrorKind::NotFound {
        return Error::new(Kind::NotFound, "allocate", format!("{} is not there", path.display()))
            .caused_by(error);
    }
    let kind = match error.raw_os_error() {
        Some(libc::EISDIR | libc::ENXIO) => Kind::Invalid,
        Some(code) => Error::os("allocate", call, io::Error::from_raw_os_error(code)).kind(),
        None => Kind::Invalid,
    };
    Error::new(kind, "allocate", format!("{call} of {} failed: {error}", path.display())).caused_by(error)
}

describe!(DiskStorage, |this| 0, this.len, StorageKind::Disk(this.fd()));

// SAFETY: a file has no addresses; `addr` is an offset and never changes, nor do the length and the file. (`keep` and
// `unlink` change only who removes its name.) Nothing gives out references to the bytes.
unsafe impl Storage for DiskStorage {
    fn place(&self) -> Place {
        Place::Disk
    }

    fn file(&self) -> Option<FileSlice> {
        Some(FileSlice { file: Arc::clone(&self.file), offset: 0, whole: true })
    }
}

#[cfg(test)]
mod tests;
