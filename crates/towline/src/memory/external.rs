//! Memory that something else owns.
#![allow(unsafe_code, reason = "vouches for memory on the word of its creator")]

use std::any::Any;
use std::fmt;

use super::{Place, Storage, StorageKind, describe};
use crate::cuda::Gpu;
use crate::{Error, Result};

/// Memory at a given address, with its owner kept alive.
///
/// Close a registration of it before the memory goes away. Peers that are served over sockets or `cma` get `Stale` where pages are
/// missing, and this process goes on; memory that was freed and is still mapped cannot be distinguished from memory that is there, and copies within this
/// process are plain accesses. Words of it are changed by peers in turns and not by atomic instructions: change them through the
/// registration, or use memory that this library allocates ([`SystemStorage`](super::SystemStorage), [`SharedStorage`](super::SharedStorage)).
///
/// ```
/// use towline::memory::{ExternalStorage, MemoryAccess, Place};
/// # fn main() -> towline::Result<()> {
/// let bytes = Box::leak(vec![0u8; 64].into_boxed_slice());
/// let pointer = bytes.as_mut_ptr();
/// // SAFETY: the leaked box is never freed, and nothing refers to it any more.
/// let storage = unsafe { ExternalStorage::new(pointer.expose_provenance(), 64, Place::Host, None)? };
/// storage.write_at(8, b"borrowed")?;
/// # Ok(())
/// # }
/// ```
pub struct ExternalStorage {
    addr: usize,
    len: usize,
    place: Place,
    owner: Option<Box<dyn Any + Send + Sync>>,
}

impl ExternalStorage {
    /// Describes `len` bytes at `addr`, which `owner` keeps valid for as long as it lives.
    ///
    /// # Errors
    /// `Invalid` for address 0, length 0, a range that wraps around, or [`Place::Disk`], which has no
    /// addresses.
    ///
    /// # Safety
    /// The bytes satisfy the contract of [`Storage`] until the value (and with it the owner) is dropped: one
    /// allocation at `place` that stays mapped there, readable and writable, its provenance exposed where it
    /// comes from Rust, and nowhere referred to by a Rust reference while the value lives. Without an owner
    /// nothing can be kept alive on the caller's behalf: the memory must then also outlive a deregistration
    /// that had to give up waiting.
    pub unsafe fn new(
        addr: usize,
        len: usize,
        place: Place,
        owner: Option<Box<dyn Any + Send + Sync>>,
    ) -> Result<ExternalStorage> {
        let fits = addr.checked_add(len).is_some() && len <= isize::MAX as usize;
        if addr == 0 || len == 0 || !fits || place == Place::Disk {
            let message = format!("{len} bytes at {addr:#x} on {place} cannot be a storage");
            return Err(Error::invalid("describe external memory", message));
        }
        Ok(ExternalStorage { addr, len, place, owner })
    }

    /// Describes `len` bytes of a GPU's memory at `addr`, which `owner` keeps valid for as long as it lives.
    ///
    /// The range is looked up with the driver. It may lie in several allocations side by side, as PyTorch's expandable
    /// segments do.
    ///
    /// # Errors
    /// `Invalid` for an impossible range, memory of another GPU or of the host, or memory that was freed; `Unavailable`
    /// without a driver or a GPU.
    ///
    /// # Safety
    /// As for [`new`](ExternalStorage::new): the check sees what is there now, and not what stays.
    pub unsafe fn device(
        addr: usize,
        len: usize,
        ordinal: u32,
        owner: Option<Box<dyn Any + Send + Sync>>,
    ) -> Result<ExternalStorage> {
        // SAFETY: the caller's promise is the same.
        let storage = unsafe { ExternalStorage::new(addr, len, Place::Cuda(ordinal), owner) }?;
        Gpu::open(ordinal)?.check_range("describe external memory", addr as u64, len)?;
        Ok(storage)
    }
}

impl fmt::Debug for ExternalStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExternalStorage")
            .field("addr", &format_args!("{:#x}", self.addr))
            .field("len", &self.len)
            .field("place", &self.place)
            .field("owned", &self.owner.is_some())
            .finish()
    }
}

describe!(ExternalStorage, |this| this.addr, this.len, StorageKind::External);

// SAFETY: the caller of `new` promised that the bytes keep the contract while the value lives; the fields
// never change, and nothing gives out references.
unsafe impl Storage for ExternalStorage {
    fn place(&self) -> Place {
        self.place
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use std::sync::Arc;

    use super::*;
    use crate::Kind;
    use crate::memory::MemoryDescription;
    use crate::memory::{MemoryAccess, SystemStorage};

    fn at(addr: usize, len: usize, place: Place) -> Result<ExternalStorage> {
        // SAFETY: nothing touches the bytes of these descriptions.
        unsafe { ExternalStorage::new(addr, len, place, None) }
    }

    #[test]
    fn impossible_ranges_are_invalid() {
        for (addr, len) in
            [(0, 8), (8, 0), (usize::MAX, 2), (8, usize::MAX - 7), (8, isize::MAX as usize + 1)]
        {
            assert_eq!(at(addr, len, Place::Host).unwrap_err().kind(), Kind::Invalid);
        }
        assert_eq!(at(8, 8, Place::Disk).unwrap_err().kind(), Kind::Invalid);
    }

    #[test]
    fn the_place_is_the_one_given_and_the_cpu_keeps_out_of_a_gpu() {
        // An ordinal that no machine has: without a driver it is `Unavailable`, with one it is `Invalid`.
        let storage = at(0x7000_0000, 64, Place::Cuda(4000)).unwrap();
        assert_eq!(storage.place(), Place::Cuda(4000));
        assert_eq!(storage.storage_kind(), StorageKind::External);
        for error in [
            storage.read_at(0, &mut [0]).unwrap_err(),
            storage.write_at(0, &[0]).unwrap_err(),
            storage.memset(0, 0, 1).unwrap_err(),
        ] {
            assert!(matches!(error.kind(), Kind::Unavailable | Kind::Invalid), "{error}");
        }
        assert_eq!(storage.read_at(64, &mut [0]).unwrap_err().op(), "read_at");
    }

    #[test]
    fn the_owner_lives_as_long_as_the_storage() {
        let owner = Arc::new(SystemStorage::new(64).unwrap());
        let (addr, kept) = (owner.addr(), Box::new(Arc::clone(&owner)));
        // SAFETY: the owner is the storage itself.
        let storage = unsafe { ExternalStorage::new(addr, 64, Place::Host, Some(kept)) }.unwrap();
        assert_eq!(Arc::strong_count(&owner), 2);
        storage.write_at(0, &[9]).unwrap();
        assert!(format!("{storage:?}").contains("owned: true"));
        drop(storage);
        assert_eq!(Arc::strong_count(&owner), 1);
        let mut byte = [0];
        owner.read_at(0, &mut byte).unwrap();
        assert_eq!(byte, [9]);
    }
}
