//! Ranges of memory: what is registered, and what is moved.
#![allow(unsafe_code, reason = "asks descriptors for their address")]

use std::fmt;
use std::marker::PhantomData;
use std::ops::Index;

use serde::{Deserialize, Serialize};
use towline_sys::nixl::{self as native, Nixl};

use super::sys;
use super::wheel;
use crate::memory::{MemType, NixlDescriptor};
use crate::transport::nixl::of_nixl;
use crate::{Error, Result, room};

/// NIXL's word for a kind of memory.
pub(super) fn native_kind(kind: MemType) -> native::MemoryKind {
    match kind {
        MemType::Dram => native::MemoryKind::Dram,
        MemType::Vram => native::MemoryKind::Vram,
        MemType::Block => native::MemoryKind::Block,
        MemType::Object => native::MemoryKind::Object,
        MemType::File => native::MemoryKind::File,
        MemType::Unknown => native::MemoryKind::Unknown,
    }
}

/// What a range is looked up by: kind, device and address.
pub(super) type Key = (u8, u64, u64);

/// A range of memory as NIXL names it.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Range(pub(super) NixlDescriptor);

impl Range {
    pub(super) fn kind(&self) -> native::MemoryKind {
        native_kind(self.0.mem_type)
    }

    pub(super) fn descriptor(&self) -> native::Descriptor {
        native::Descriptor { address: self.0.addr, length: self.0.size as u64, device: self.0.device_id }
    }

    pub(super) fn key(&self) -> Key {
        (self.0.mem_type as u8, self.0.device_id, self.0.addr)
    }

    /// The lowest key of the same kind and device.
    pub(super) fn first_key(&self) -> Key {
        (self.0.mem_type as u8, self.0.device_id, 0)
    }

    /// Where it ends; `None` where that is past all addresses.
    pub(super) fn end(&self) -> Option<u64> {
        self.0.addr.checked_add(self.0.size as u64)
    }

    pub(super) fn covers(&self, other: &Range) -> bool {
        self.first_key() == other.first_key()
            && self.0.addr <= other.0.addr
            && other.end().is_some_and(|other| self.end().is_some_and(|end| other <= end))
    }
}

impl fmt::Debug for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NixlDescriptor { addr, size, mem_type, device_id } = &self.0;
        write!(f, "{size} bytes at {addr:#x} of {mem_type:?} {device_id}")
    }
}

/// One range of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct XferDescriptor {
    /// Where it starts: an address, or an offset in a file.
    pub addr: usize,
    /// How many bytes it has.
    pub len: usize,
    /// The device: 0 for host memory, the ordinal of an accelerator, the descriptor of a file.
    pub dev_id: u64,
}

/// Says what a list is for.
pub trait Purpose: fmt::Debug + Clone + Copy + PartialEq + Eq + Default + Send + Sync + 'static {
    #[doc(hidden)]
    const NAME: &'static str;
}

/// Of ranges to move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Xfer;

/// Of ranges that are registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reg;

impl Purpose for Xfer {
    const NAME: &'static str = "XferDescList";
}

impl Purpose for Reg {
    const NAME: &'static str = "RegDescList";
}

/// Ranges to move, on one side of a transfer. Plain data: it can be sent to a peer.
///
/// ```
/// use towline::nixl::{MemType, XferDescList};
/// let mut list = XferDescList::new(MemType::Dram)?;
/// list.add_desc(0x1000, 4096, 0)?;
/// assert_eq!(list.len()?, 1);
/// assert_eq!(XferDescList::deserialize(&list.serialize()?)?, list);
/// # Ok::<(), towline::Error>(())
/// ```
pub type XferDescList = DescList<Xfer>;

/// Ranges that are registered, for instance to make partial metadata of.
pub type RegDescList = DescList<Reg>;

/// Ranges of one kind of memory: an [`XferDescList`] or a [`RegDescList`].
///
/// Most of what it does cannot fail; it says so with a `Result` because NIXL's own lists do.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DescList<P: Purpose> {
    mem_type: MemType,
    descriptors: Vec<XferDescriptor>,
    #[serde(skip)]
    purpose: PhantomData<P>,
}

impl<P: Purpose> DescList<P> {
    /// An empty list.
    pub fn new(mem_type: MemType) -> Result<DescList<P>> {
        Ok(DescList { mem_type, descriptors: Vec::new(), purpose: PhantomData })
    }

    pub(super) fn of(mem_type: MemType, descriptors: Vec<XferDescriptor>) -> DescList<P> {
        DescList { mem_type, descriptors, purpose: PhantomData }
    }

    /// The kind of memory that its ranges are of.
    pub fn get_type(&self) -> Result<MemType> {
        Ok(self.mem_type)
    }

    /// Adds a range: address, length and device.
    pub fn add_desc(&mut self, addr: usize, len: usize, dev_id: u64) -> Result<()> {
        room::push("nixl", &mut self.descriptors, XferDescriptor { addr, len, dev_id })
    }

    /// Adds what a descriptor names. `Invalid` where it is of another kind.
    pub fn add_storage_desc(&mut self, descriptor: &(impl sys::NixlDescriptor + ?Sized)) -> Result<()> {
        if descriptor.mem_type() != self.mem_type {
            let message = format!("a range of {:?} in a list of {:?}", descriptor.mem_type(), self.mem_type);
            return Err(Error::invalid("nixl", message));
        }
        // SAFETY: the pointer is not followed; only its address is written down.
        let addr = unsafe { descriptor.as_ptr() }.addr();
        self.add_desc(addr, descriptor.size(), descriptor.device_id())
    }

    /// How many ranges it has.
    pub fn len(&self) -> Result<usize> {
        Ok(self.descriptors.len())
    }

    /// How many ranges it has.
    pub fn desc_count(&self) -> Result<usize> {
        self.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.descriptors.is_empty())
    }

    /// Removes one range. `Invalid` where there is no such range.
    pub fn rem_desc(&mut self, index: i32) -> Result<()> {
        match usize::try_from(index) {
            Ok(at) if at < self.descriptors.len() => {
                self.descriptors.remove(at);
                Ok(())
            }
            _ => Err(Error::invalid(
                "nixl",
                format!("there is no range {index} in a list of {}", self.descriptors.len()),
            )),
        }
    }

    /// Removes all ranges.
    pub fn clear(&mut self) -> Result<()> {
        self.descriptors.clear();
        Ok(())
    }

    /// The ranges, in their order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &XferDescriptor> {
        self.descriptors.iter()
    }

    pub(super) fn ranges(&self) -> impl ExactSizeIterator<Item = Range> {
        self.descriptors.iter().map(|one| {
            Range(NixlDescriptor {
                addr: one.addr as u64,
                size: one.len,
                mem_type: self.mem_type,
                device_id: one.dev_id,
            })
        })
    }
}

impl XferDescList {
    /// The form in which NIXL's Python API exchanges lists (`get_serialized_descs`), for peers that have `nixl-cu12`.
    pub fn serialize(&self) -> Result<Vec<u8>> {
        self.serialize_for("nixl_cu12")
    }

    /// [`serialize`](Self::serialize) for peers that have another package: `nixl_cu13`, `nixl`.
    pub fn serialize_for(&self, package: &str) -> Result<Vec<u8>> {
        wheel::write(package, wheel::Class::Xfer, self.mem_type, &self.descriptors)
    }

    /// Reads what `get_serialized_descs` of NIXL's Python API has written, or [`serialize`](Self::serialize).
    ///
    /// Nothing is unpickled: bytes of any other form are a `Protocol` error.
    pub fn deserialize(bytes: &[u8]) -> Result<XferDescList> {
        let (mem_type, descriptors) = wheel::read(wheel::Class::Xfer, bytes)?;
        Ok(DescList::of(mem_type, descriptors))
    }

    pub(super) fn native(&self, nixl: &Nixl) -> Result<native::TransferList> {
        let ranges = self.ranges().map(|range| range.descriptor());
        native::TransferList::new(nixl, native_kind(self.mem_type), ranges).map_err(of_nixl)
    }
}

impl RegDescList {
    /// The form in which NIXL's Python API exchanges lists (`get_serialized_descs`), for peers that have `nixl-cu12`.
    pub fn serialize(&self) -> Result<Vec<u8>> {
        wheel::write("nixl_cu12", wheel::Class::Reg, self.mem_type, &self.descriptors)
    }

    /// Reads what `get_serialized_descs` of NIXL's Python API has written, or [`serialize`](Self::serialize).
    ///
    /// Nothing is unpickled: bytes of any other form are a `Protocol` error.
    pub fn deserialize(bytes: &[u8]) -> Result<RegDescList> {
        let (mem_type, descriptors) = wheel::read(wheel::Class::Reg, bytes)?;
        Ok(DescList::of(mem_type, descriptors))
    }

    pub(super) fn native(&self, nixl: &Nixl) -> Result<native::RegistrationList> {
        let ranges = self.ranges().map(|range| range.descriptor());
        native::RegistrationList::new(nixl, native_kind(self.mem_type), ranges).map_err(of_nixl)
    }
}

impl<P: Purpose> Index<usize> for DescList<P> {
    type Output = XferDescriptor;

    fn index(&self, index: usize) -> &XferDescriptor {
        &self.descriptors[index]
    }
}

impl<P: Purpose> fmt::Debug for DescList<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(P::NAME)
            .field("mem_type", &self.mem_type)
            .field("descriptors", &self.descriptors)
            .finish()
    }
}
