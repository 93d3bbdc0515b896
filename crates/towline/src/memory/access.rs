//! Safe access to the bytes of storages.
#![allow(unsafe_code, reason = "copies bytes through raw pointers")]

use std::ptr;
use std::sync::Arc;

use super::{Place, Storage};
use crate::bytes::{copy, copy_to_publish, fill, in_bounds};
use crate::cuda::Gpu;
use crate::{Error, Kind, Result};

/// A file is filled in portions of this size.
const FILL_PORTION: usize = 1 << 20;

/// Copies bytes into and out of any storage, with bounds checks; those of a GPU go through its driver.
///
/// Peers may touch the same bytes at the same time; a copy is then a mixture, byte by byte. Nothing here makes
/// a reference to them.
pub trait MemoryAccess: Storage {
    /// Copies bytes out, from `offset` on.
    ///
    /// # Errors
    /// `Invalid` past the end; what the file or the driver of the GPU says, where the bytes are there.
    fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        if let Some(file) = self.file() {
            in_bounds("read_at", self.size(), offset, into.len())?;
            // SAFETY: `into` is an exclusive slice.
            return unsafe { file.read("read_at", offset as u64, into.as_mut_ptr(), into.len()) };
        }
        if let Some((gpu, from)) = device_address(self, "read_at", offset, into.len())? {
            // SAFETY: the range was checked, and is valid while `self` lives (`Storage`); `into` is an exclusive slice.
            return unsafe { gpu.read("read_at", from, into.as_mut_ptr(), into.len()) };
        }
        let from = host_pointer(self, "read_at", offset, into.len())?;
        // SAFETY: `host_pointer` checked the range, which is valid while `self` lives (`Storage`, promises 1 and
        // 2); `into` is an exclusive slice.
        unsafe { copy(into.as_mut_ptr(), from, into.len()) };
        Ok(())
    }

    /// Copies bytes in, from `offset` on.
    ///
    /// # Errors
    /// `Invalid` past the end; what the file or the driver of the GPU says, where the bytes are there.
    fn write_at(&self, offset: usize, from: &[u8]) -> Result<()> {
        if let Some(file) = self.file() {
            in_bounds("write_at", self.size(), offset, from.len())?;
            // SAFETY: `from` is a slice.
            return unsafe { file.write("write_at", offset as u64, from.as_ptr(), from.len()) };
        }
        if let Some((gpu, into)) = device_address(self, "write_at", offset, from.len())? {
            // SAFETY: the range was checked, and is valid while `self` lives (`Storage`); `from` is a slice.
            return unsafe { gpu.write("write_at", into, from.as_ptr(), from.len()) };
        }
        let into = host_pointer(self, "write_at", offset, from.len())?;
        // SAFETY: as in `read_at`; that no Rust reference to the destination exists is promise 4 of `Storage`.
        unsafe { copy_to_publish(into, from.as_ptr(), from.len()) };
        Ok(())
    }

    /// Sets `len` bytes from `offset` on to `value`.
    ///
    /// # Errors
    /// `Invalid` past the end; what the file or the driver of the GPU says, where the bytes are there.
    fn memset(&self, value: u8, offset: usize, len: usize) -> Result<()> {
        if self.file().is_some() {
            in_bounds("memset", self.size(), offset, len)?;
            let some = vec![value; len.min(FILL_PORTION)];
            return (0..len)
                .step_by(FILL_PORTION)
                .try_for_each(|start| self.write_at(offset + start, &some[..FILL_PORTION.min(len - start)]));
        }
        if let Some((gpu, into)) = device_address(self, "memset", offset, len)? {
            // SAFETY: the range was checked, and is valid while `self` lives (`Storage`).
            return unsafe { gpu.fill("memset", into, value, len) };
        }
        let into = host_pointer(self, "memset", offset, len)?;
        // SAFETY: as in `write_at`.
        unsafe { fill(into, value, len) };
        Ok(())
    }
}

impl<S: Storage + ?Sized> MemoryAccess for S {}

/// The GPU and the address there, for a storage that lies on one.
fn device_address<S: Storage + ?Sized>(
    storage: &S,
    op: &'static str,
    offset: usize,
    len: usize,
) -> Result<Option<(Arc<Gpu>, u64)>> {
    let Place::Cuda(ordinal) = storage.place() else { return Ok(None) };
    in_bounds(op, storage.size(), offset, len)?;
    let gpu = Gpu::open(ordinal).map_err(|error| error.during(op))?;
    Ok(Some((gpu, (storage.addr() + offset) as u64)))
}

fn host_pointer<S: Storage + ?Sized>(
    storage: &S,
    op: &'static str,
    offset: usize,
    len: usize,
) -> Result<*mut u8> {
    let place = storage.place();
    if place != Place::Host {
        return Err(Error::new(Kind::Unsupported, op, format!("the CPU cannot reach bytes on {place}")));
    }
    in_bounds(op, storage.size(), offset, len)?;
    Ok(ptr::with_exposed_provenance_mut(storage.addr() + offset))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use proptest::prelude::*;

    use super::*;
    use crate::memory::{MemoryDescription, SharedStorage, SystemStorage, create_buffer};

    #[test]
    fn access_past_the_end_is_invalid_and_writes_nothing() {
        let storage = SystemStorage::new(10).unwrap();
        for offset in [8, 11, usize::MAX] {
            assert_eq!(storage.write_at(offset, &[1, 2, 3]).unwrap_err().kind(), Kind::Invalid);
            assert_eq!(storage.read_at(offset, &mut [0; 3]).unwrap_err().kind(), Kind::Invalid);
            assert_eq!(storage.memset(1, offset, 3).unwrap_err().kind(), Kind::Invalid);
        }
        let mut all = [9; 10];
        storage.read_at(0, &mut all).unwrap();
        assert_eq!(all, [0; 10]);
        storage.read_at(10, &mut []).unwrap();
    }

    #[test]
    fn access_works_through_shared_handles_and_trait_objects() {
        let buffer = create_buffer(SharedStorage::new(10).unwrap());
        buffer.write_at(3, &[4]).unwrap();
        let storage: &dyn Storage = &*buffer;
        let mut byte = [0];
        storage.read_at(3, &mut byte).unwrap();
        assert_eq!(byte, [4]);
    }

    #[test]
    fn overlapping_ranges_copy_as_if_through_a_third_place() {
        let storage = SystemStorage::new(8).unwrap();
        storage.write_at(0, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
        // SAFETY: both ranges lie inside the storage.
        unsafe { copy(storage.as_ptr().add(2), storage.as_ptr(), 6) };
        let mut all = [0; 8];
        storage.read_at(0, &mut all).unwrap();
        assert_eq!(all, [1, 2, 1, 2, 3, 4, 5, 6]);
    }

    #[derive(Debug, Clone)]
    enum Step {
        Write(usize, Vec<u8>),
        Fill(u8, usize, usize),
        Read(usize, usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..300usize, prop::collection::vec(any::<u8>(), 0..120))
                .prop_map(|(at, data)| Step::Write(at, data)),
            (any::<u8>(), 0..300usize, 0..120usize).prop_map(|(value, at, len)| Step::Fill(value, at, len)),
            (0..300usize, 0..120usize).prop_map(|(at, len)| Step::Read(at, len)),
        ]
    }

    proptest! {
        #[test]
        fn a_storage_behaves_like_a_vector(steps in prop::collection::vec(step(), 0..40)) {
            let storage = SystemStorage::new(256).unwrap();
            let mut model = vec![0u8; storage.size()];
            for step in steps {
                match step {
                    Step::Write(at, data) => {
                        let expected = model.get_mut(at..at + data.len()).map(|part| part.copy_from_slice(&data));
                        prop_assert_eq!(storage.write_at(at, &data).is_ok(), expected.is_some());
                    }
                    Step::Fill(value, at, len) => {
                        let expected = model.get_mut(at..at + len).map(|part| part.fill(value));
                        prop_assert_eq!(storage.memset(value, at, len).is_ok(), expected.is_some());
                    }
                    Step::Read(at, len) => {
                        let mut data = vec![0; len];
                        let read = storage.read_at(at, &mut data).ok().map(|()| &data[..]);
                        prop_assert_eq!(read, model.get(at..at + len));
                    }
                }
            }
        }
    }
}
