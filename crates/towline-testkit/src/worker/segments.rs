//! Memory of a GPU as PyTorch's expandable segments have it: many physical allocations, mapped side by side into addresses of
//! which only some are in use.
#![allow(unsafe_code, reason = "maps memory of a GPU")]

use std::sync::Arc;

use towline::cuda::Gpu;
use towline::memory::{ExternalStorage, Storage};
use towline::{Error, Kind, Result};

/// Where in the first part the storage begins.
const START: usize = 4096;

/// The parts, unmapped with the value.
struct Parts {
    gpu: Arc<Gpu>,
    reserved: u64,
    room: usize,
    unit: usize,
    first: u64,
    count: usize,
}

impl Drop for Parts {
    fn drop(&mut self) {
        let Ok(entered) = self.gpu.enter("free segments") else { return };
        let cuda = entered.cuda();
        // SAFETY: mapped and reserved by this value, and the users of the storage have let go of it.
        unsafe {
            for part in 0..self.count {
                let _ = cuda.unmap(self.first + (part * self.unit) as u64, self.unit);
            }
            let _ = cuda.free_addresses(self.reserved, self.room);
        }
    }
}

/// `len` bytes in parts as short as the GPU has them, with addresses before and behind where nothing is.
pub(super) fn storage(len: usize) -> Result<Arc<dyn Storage>> {
    let gpu = Gpu::open(0)?;
    let failed = |error: &dyn std::fmt::Display| Error::new(Kind::Native, "register", error.to_string());
    let unit = gpu.device().granularity().map_err(|error| failed(&error))?.bytes;
    let count = (START + len).div_ceil(unit);
    let entered = gpu.enter("register")?;
    let room = (count + 4) * unit;
    let reserved = entered.cuda().reserve_addresses(room).map_err(|error| failed(&error))?;
    let first = reserved + unit as u64;
    let mut parts = Parts { gpu: Arc::clone(&gpu), reserved, room, unit, first, count: 0 };
    for part in 0..count {
        let at = first + (part * unit) as u64;
        let allocation = gpu.device().create_allocation(unit).map_err(|error| failed(&error))?;
        // SAFETY: the addresses are reserved, and nothing is mapped there.
        unsafe { allocation.map(at, unit) }.map_err(|error| failed(&error))?;
        parts.count += 1;
        entered.allow_access(at, unit).map_err(|error| failed(&error))?;
    }
    let start = first as usize + START;
    // SAFETY: the parts stay mapped for as long as the storage has its owner.
    Ok(Arc::new(unsafe { ExternalStorage::device(start, len, 0, Some(Box::new(parts))) }?))
}
