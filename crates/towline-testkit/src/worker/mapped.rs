//! Memory as `numpy.memmap` has it: a file that is mapped, and that others can cut.
#![allow(unsafe_code, reason = "maps a file, and lends the mapping")]

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags, mmap};
use towline::memory::{ExternalStorage, Storage};
use towline::{Error, Kind, Place, Result};

/// The first `len` bytes of that file, mapped until the process ends and lent.
pub(super) fn storage(len: usize, path: &Path) -> Result<Arc<dyn Storage>> {
    let failed = |error: &dyn std::fmt::Display| Error::new(Kind::Native, "register", error.to_string());
    let file = File::options().read(true).write(true).open(path).map_err(|error| failed(&error))?;
    let (rights, null) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
    // SAFETY: a fresh mapping where the kernel likes it.
    let at =
        unsafe { mmap(null, len, rights, MapFlags::SHARED, &file, 0) }.map_err(|error| failed(&error))?;
    // SAFETY: the mapping stays until the process ends; that its pages go away is what is tested.
    Ok(Arc::new(unsafe { ExternalStorage::new(at.expose_provenance(), len, Place::Host, None) }?))
}
