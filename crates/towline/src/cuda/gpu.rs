//! One GPU: its primary context, and simple access to its bytes.
#![allow(unsafe_code, reason = "hands addresses to the driver")]

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use towline_sys::cuda::{Attribute, Context, Cuda, Device, Entered, MemoryType, PointerFacts, Stream};

use super::copy::Engine;
use super::failed;
use crate::{Error, Kind, Result, fork};

/// One GPU as this process uses it. There is one value per device, made when it is first asked for.
///
/// ```
/// use towline::cuda::Gpu;
/// match Gpu::open(0) {
///     Ok(gpu) => println!("{gpu:?}"),
///     Err(error) => println!("{error}"),
/// }
/// ```
pub struct Gpu {
    pub(crate) context: Context,
    ordinal: u32,
    name: String,
    node: Option<u32>,
    pub(super) multiprocessors: u32,
    same_host_pointer: bool,
    /// For access to single bytes, one caller at a time.
    plain: Mutex<Option<Stream>>,
    peers: Mutex<BTreeMap<u32, Result<()>>>,
    pub(super) engine: Engine,
}

impl Gpu {
    /// The GPU of that ordinal; its primary context is retained from then on.
    ///
    /// # Errors
    /// `Unavailable` where there is no driver, with the places tried, or no device; `Invalid` for an ordinal past the last.
    pub fn open(ordinal: u32) -> Result<Arc<Gpu>> {
        const OP: &str = "open a GPU";
        static OPENED: Mutex<BTreeMap<u32, Arc<Gpu>>> = Mutex::new(BTreeMap::new());
        fork::guard(OP)?;
        let mut opened = OPENED.lock();
        if let Some(gpu) = opened.get(&ordinal) {
            return Ok(Arc::clone(gpu));
        }
        let gpu = Arc::new(Gpu::new(OP, ordinal)?);
        opened.insert(ordinal, Arc::clone(&gpu));
        Ok(gpu)
    }

    fn new(op: &'static str, ordinal: u32) -> Result<Gpu> {
        let device = Cuda::load()
            .and_then(|cuda| {
                cuda.init()?;
                Ok(cuda)
            })
            .map_err(|error| failed(op, error))?;
        let device = open_device(op, &device, ordinal)?;
        if !device.can(Attribute::UnifiedAddressing) {
            let message = format!("GPU {ordinal} does not share an address space with the host");
            return Err(Error::new(Kind::Unsupported, op, message));
        }
        let describe = || {
            let multiprocessors = device.attribute(Attribute::Multiprocessors)?;
            Ok((device.name()?, device.bus()?, multiprocessors, device.primary_context()?))
        };
        let (name, bus, multiprocessors, context) = describe().map_err(|error| failed(op, error))?;
        Ok(Gpu {
            context,
            ordinal,
            name,
            node: numa_node(&bus),
            multiprocessors: u32::try_from(multiprocessors).unwrap_or(1).max(1),
            same_host_pointer: device.can(Attribute::SameHostPointer),
            plain: Mutex::default(),
            peers: Mutex::default(),
            engine: Engine::default(),
        })
    }

    /// Its position among the devices that this process sees.
    #[inline]
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device.
    pub fn device(&self) -> &Device {
        self.context.device()
    }

    /// The NUMA node that it is near to, if the kernel says.
    pub fn numa_node(&self) -> Option<u32> {
        self.node
    }

    /// Whether pinned host memory has the same address on the device as in this process.
    pub fn same_host_pointer(&self) -> bool {
        self.same_host_pointer
    }

    /// Makes its context current in this thread, until the result is dropped.
    #[inline]
    pub fn enter(&self, op: &'static str) -> Result<Entered<'_>> {
        fork::guard(op)?;
        self.context.enter().map_err(|error| failed(op, error))
    }

    /// What the driver knows of an address; `None` if it does not know the address.
    pub fn facts(&self, op: &'static str, address: u64) -> Result<Option<PointerFacts>> {
        let entered = self.enter(op)?;
        entered.cuda().pointer_facts(address).map_err(|error| failed(op, error))
    }

    /// Fails unless all `len` bytes at `address` are memory of this GPU. They may lie in several allocations side by side.
    ///
    /// # Errors
    /// `Invalid`, saying what is there instead.
    pub fn check_range(&self, op: &'static str, address: u64, len: usize) -> Result<()> {
        let end = address
            .checked_add(len as u64)
            .ok_or_else(|| Error::invalid(op, format!("{len} bytes at {address:#x} wrap around")))?;
        let mut at = address;
        while at < end {
            let wrong =
                |what: String| Err(Error::invalid(op, format!("{len} bytes at {address:#x}: {what}")));
            let facts = match self.facts(op, at)? {
                None if at == address => {
                    return wrong(
                        "CUDA does not know this memory: it was freed, or it is not GPU memory".into(),
                    );
                }
                None => {
                    let inside = at - address;
                    return wrong(format!("only the first {inside} bytes are memory that CUDA knows"));
                }
                Some(facts) => facts,
            };
            match facts.memory {
                MemoryType::Device if facts.device == self.ordinal() as i32 => {}
                MemoryType::Device => {
                    return wrong(format!("that is memory of GPU {}, not {}", facts.device, self.ordinal()));
                }
                MemoryType::Host => return wrong("that is pinned host memory, not a GPU's".into()),
                _ => return wrong("that is managed memory, which moves between host and GPU".into()),
            }
            let next = facts.start.saturating_add(facts.len);
            if next <= at {
                return wrong("the driver does not say where its allocation ends".into());
            }
            at = next;
        }
        Ok(())
    }

    /// Lets this GPU reach the other's memory directly; the first result is kept.
    ///
    /// # Errors
    /// `Unsupported` if the machine cannot copy between them.
    pub fn reach(&self, other: &Gpu) -> Result<()> {
        const OP: &str = "reach a GPU";
        if self.ordinal() == other.ordinal() {
            return Ok(());
        }
        let mut peers = self.peers.lock();
        if let Some(known) = peers.get(&other.ordinal()) {
            return known.clone();
        }
        let possible = self.device().can_reach(other.device()).map_err(|error| failed(OP, error))?;
        let answer = if possible {
            self.enter(OP)?.enable_peer(&other.context).map_err(|error| failed(OP, error))
        } else {
            let message =
                format!("GPU {} cannot reach the memory of GPU {}", self.ordinal(), other.ordinal());
            Err(Error::new(Kind::Unsupported, OP, message))
        };
        peers.insert(other.ordinal(), answer.clone());
        answer
    }

    /// Copies bytes out of device memory.
    ///
    /// # Safety
    /// `len` bytes at `from` are valid on the device, and at `into` on the host, for the whole call.
    pub(crate) unsafe fn read(&self, op: &'static str, from: u64, into: *mut u8, len: usize) -> Result<()> {
        // SAFETY: the caller's promise; the call waits for the end.
        self.plainly(op, |entered, stream| unsafe {
            // BYTES MOVE HERE
            stream.copy(entered, into.expose_provenance() as u64, from, len)
        })
    }

    /// Copies bytes into device memory.
    ///
    /// # Safety
    /// `len` bytes at `from` are valid on the host, and at `into` on the device, for the whole call.
    pub(crate) unsafe fn write(
        &self,
        op: &'static str,
        into: u64,
        from: *const u8,
        len: usize,
    ) -> Result<()> {
        // SAFETY: the caller's promise; the call waits for the end.
        self.plainly(op, |entered, stream| unsafe {
            // BYTES MOVE HERE
            stream.copy(entered, into, from.expose_provenance() as u64, len)
        })
    }

    /// Sets bytes of device memory.
    ///
    /// # Safety
    /// `len` bytes at `into` are valid on the device for the whole call.
    pub(crate) unsafe fn fill(&self, op: &'static str, into: u64, value: u8, len: usize) -> Result<()> {
        // SAFETY: the caller's promise; the call waits for the end.
        self.plainly(op, |entered, stream| unsafe { stream.fill(entered, into, value, len) })
    }

    /// Does one thing and waits for it. What the GPU does for it is bounded by the bytes: there is nothing else in the stream.
    fn plainly(
        &self,
        op: &'static str,
        work: impl FnOnce(&Entered<'_>, &Stream) -> towline_sys::Result<()>,
    ) -> Result<()> {
        let entered = self.enter(op)?;
        let mut plain = self.plain.lock();
        let run = |plain: &mut Option<Stream>| {
            let stream = match plain {
                Some(stream) => stream,
                none => none.insert(entered.stream(0)?),
            };
            work(&entered, stream)?;
            stream.synchronize(&entered)
        };
        run(&mut plain).map_err(|error| failed(op, error))
    }
}

fn open_device(op: &'static str, cuda: &Cuda, ordinal: u32) -> Result<Device> {
    let count = cuda.device_count().map_err(|error| failed(op, error))?;
    if ordinal >= count {
        return Err(Error::invalid(op, format!("there is no GPU {ordinal}: this process sees {count}")));
    }
    cuda.device(ordinal).map_err(|error| failed(op, error))
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu").field("ordinal", &self.ordinal()).field("name", &self.name).finish()
    }
}

/// The NUMA node of a device on the bus, if the kernel says.
pub(super) fn numa_node(bus: &str) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/sys/bus/pci/devices/{bus}/numa_node")).ok()?;
    // -1 where the machine has one node only, or does not know.
    text.trim().parse().ok()
}
