//! How NIXL names memory: plain data, usable without the library.

use serde::{Deserialize, Serialize};

/// The kind of memory, in NIXL's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum MemType {
    /// Host memory.
    Dram,
    /// GPU memory.
    Vram,
    /// A block device.
    Block,
    /// An object store.
    Object,
    /// A file.
    File,
    /// Anything else.
    Unknown,
}

/// Describes registered memory the way NIXL does.
///
/// The address and the device number mean something only in the process that wrote them down.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NixlDescriptor {
    /// Where the bytes start: an address, or an offset for files and blocks.
    pub addr: u64,
    /// How many bytes there are.
    pub size: usize,
    /// The kind of memory.
    pub mem_type: MemType,
    /// The GPU's ordinal, the file descriptor, or 0 for host memory.
    pub device_id: u64,
}

impl NixlDescriptor {
    /// The same registration, narrowed to `size` bytes that start `offset` bytes further on.
    pub(super) fn part(self, offset: usize, size: usize) -> NixlDescriptor {
        NixlDescriptor { addr: self.addr.wrapping_add(offset as u64), size, ..self }
    }
}
