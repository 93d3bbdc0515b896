//! Whose memory an address is.

use towline_sys::cuda::{Cuda, MemoryType};

use super::failed;
use crate::{Result, fork};

/// The GPU whose memory is at that address; `None` if it belongs to no GPU. Makes no context.
///
/// ```no_run
/// # let address = 0;
/// assert_eq!(towline::cuda::device_of(address)?, None);
/// # Ok::<(), towline::Error>(())
/// ```
///
/// # Errors
/// `Unavailable` without a driver.
pub fn device_of(address: u64) -> Result<Option<u32>> {
    const OP: &str = "look up GPU memory";
    fork::guard(OP)?;
    let facts =
        Cuda::load().and_then(|cuda| cuda.pointer_facts(address)).map_err(|error| failed(OP, error))?;
    let device = facts.filter(|facts| facts.memory == MemoryType::Device).map(|facts| facts.device);
    Ok(device.and_then(|device| u32::try_from(device).ok()))
}
