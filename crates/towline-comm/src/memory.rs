//! The memory that a call reads or writes: a part of a window, of a registered buffer, or of neither; and what one rank has
//! registered with one communicator ([`RegisteredMemory`]).

mod buffer;
mod options;
mod register;
mod registered;
mod window;

use std::fmt;
use std::sync::Arc;

use towline::nccl::Part;
use towline::{Buffer, HugePages, MemoryAccess, MemoryDescription, Place, Registered, SharedStorage, Span};

pub(crate) use self::buffer::{BUFFER_BIT, BufferCore, Buffers};
pub use self::options::{WindowFlag, WindowOptions};
pub(crate) use self::registered::RegisteredMemory;
pub(crate) use self::window::{PeerAccess, WindowCore, Windows, closed};
use crate::{Error, Result};

/// Allocates memory that windows map without copies: shared memory, zeroed, in huge pages where the kernel has them.
pub fn mem_alloc(size: usize) -> Result<SharedStorage> {
    let allocated = SharedStorage::options().huge_pages(HugePages::Try).allocate(size);
    Ok(allocated.map_err(|error| error.during("mem_alloc"))?)
}

/// Refuses memory that the CPU does not reach.
pub(crate) fn host_only(op: &'static str, storage: &Buffer) -> Result<()> {
    match storage.place() {
        Place::Host => Ok(()),
        place => Err(Error::invalid(op, format!("the communicator is on the host, the buffer on {place}"))),
    }
}

/// A part of memory that a call reads or writes. Cheap to clone; keeps the bytes alive.
///
/// It comes from [`Communicator::memory`](crate::Communicator::memory), [`Window::memory`](crate::Window::memory) or
/// [`RegisteredBuffer::memory`](crate::RegisteredBuffer::memory). Memory that other ranks reach (windows, registered
/// buffers) takes the direct path of the collectives, any other is staged.
///
/// ```
/// use towline::SharedStorage;
/// use towline_comm::{Communicator, Config};
/// # let id = towline_comm::get_unique_id()?;
/// let alone = Communicator::init(1, 0, &id, Config::default())?;
/// let memory = alone.memory(SharedStorage::new(4096)?)?;
/// memory.write_at(16, b"bytes")?;
/// let tail = memory.part(16, 5)?;
/// let mut bytes = [0; 5];
/// tail.read_at(0, &mut bytes)?;
/// assert_eq!(&bytes, b"bytes");
/// # Ok::<(), towline_comm::Error>(())
/// ```
#[derive(Clone)]
pub struct Memory {
    /// `None` on a GPU.
    span: Option<Span>,
    home: Home,
    /// Where the span starts in its window or buffer.
    offset: usize,
    /// As long as the span, or nothing: a span is never empty, and calls on no elements are still calls.
    len: usize,
}

/// Whose memory it is, and so who keeps it.
#[derive(Clone)]
enum Home {
    Window(Arc<WindowCore>),
    Buffer(Arc<BufferCore>),
    Loose(Arc<Registered<Buffer>>),
    Device(Buffer),
}

impl Memory {
    pub(crate) fn of_window(window: &Arc<WindowCore>, offset: usize, len: usize) -> Result<Memory> {
        let span = window.local().part(offset, len)?;
        Ok(Memory { span: Some(span), home: Home::Window(Arc::clone(window)), offset, len })
    }

    pub(crate) fn of_buffer(buffer: &Arc<BufferCore>, offset: usize, len: usize) -> Result<Memory> {
        let span = buffer.local().part(offset, len)?;
        Ok(Memory { span: Some(span), home: Home::Buffer(Arc::clone(buffer)), offset, len })
    }

    pub(crate) fn loose(region: Registered<Buffer>) -> Memory {
        let region = Arc::new(region);
        let span = Span::from(&*region);
        Memory { len: span.len(), span: Some(span), home: Home::Loose(region), offset: 0 }
    }

    /// Memory of a GPU.
    pub(crate) fn device(buffer: Buffer) -> Memory {
        Memory { len: buffer.size(), span: None, home: Home::Device(buffer), offset: 0 }
    }

    /// The part of a GPU's memory that it is.
    pub(crate) fn on_device(&self, op: &'static str) -> Result<Part> {
        match &self.home {
            Home::Device(buffer) => Ok(Part::new(buffer.clone(), self.offset, self.len)?),
            _ => Err(Error::invalid(op, "the communicator is on a GPU, and the memory is not")),
        }
    }

    /// How many bytes it names.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it names no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part of this part. It may be empty.
    pub fn part(&self, offset: usize, len: usize) -> Result<Memory> {
        if len == 0 && offset <= self.len {
            return Ok(Memory { len: 0, offset: self.offset + offset, ..self.clone() });
        }
        if self.is_empty() {
            return Err(Error::invalid("part", format!("{len} bytes do not lie within memory of no bytes")));
        }
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            let message = format!("{len} bytes at {offset} do not lie within {}", self.len);
            return Err(Error::invalid("part", message));
        }
        let span = self.span.as_ref().map(|span| span.part(offset, len)).transpose()?;
        Ok(Memory { span, home: self.home.clone(), offset: self.offset + offset, len })
    }

    /// Copies bytes out. Peers may be writing them: a word may be old or new, never invented.
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        self.inside("read_at", offset, into.len())?;
        if let Home::Device(buffer) = &self.home {
            let part = towline::OffsetBuffer::new(buffer.clone(), self.offset, self.len)?;
            return Ok(part.read_at(offset, into)?);
        }
        Ok(self.span()?.read_at(offset, into)?)
    }

    /// Copies bytes in.
    pub fn write_at(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.inside("write_at", offset, from.len())?;
        if let Home::Device(buffer) = &self.home {
            let part = towline::OffsetBuffer::new(buffer.clone(), self.offset, self.len)?;
            return Ok(part.write_at(offset, from)?);
        }
        Ok(self.span()?.write_at(offset, from)?)
    }

    /// Copies in a portion of something long that nobody reads soon.
    pub(crate) fn stream_at(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.inside("stream_at", offset, from.len())?;
        Ok(self.span()?.stream_at(offset, from)?)
    }

    /// The span checks against its own length, which is too long where this names nothing.
    fn inside(&self, op: &'static str, offset: usize, len: usize) -> Result<()> {
        if self.is_empty() && (offset, len) != (0, 0) {
            return Err(Error::invalid(op, format!("{len} bytes do not lie within memory of no bytes")));
        }
        Ok(())
    }

    /// Whether other ranks reach it: it is a part of a window or of a registered buffer.
    pub fn is_registered(&self) -> bool {
        !matches!(self.home, Home::Loose(_) | Home::Device(_))
    }

    /// Its bytes, where they are the host's.
    pub(crate) fn span(&self) -> Result<&Span> {
        let wrong = || Error::invalid("memory", "the communicator is on the host, and the memory on a GPU");
        self.span.as_ref().ok_or_else(wrong)
    }

    /// The id of its window or registered buffer and where it starts in it; `None` for loose memory. What ranks
    /// announce, and what [`RegisteredMemory::reachable`] takes.
    pub(crate) fn window(&self) -> Option<(u64, usize)> {
        match &self.home {
            Home::Window(window) => Some((window.id(), self.offset)),
            Home::Buffer(buffer) => Some((buffer.id(), self.offset)),
            Home::Loose(_) | Home::Device(_) => None,
        }
    }

    pub(crate) fn buffer(&self) -> Option<&Arc<BufferCore>> {
        match &self.home {
            Home::Buffer(buffer) => Some(buffer),
            _ => None,
        }
    }

    /// The address of the first byte, for the test of overlaps.
    pub(crate) fn addr(&self) -> usize {
        let base = match &self.home {
            Home::Window(window) => window.addr(),
            Home::Buffer(buffer) => buffer.addr(),
            Home::Loose(region) => towline::MemoryDescription::addr(&**region),
            Home::Device(buffer) => buffer.addr(),
        };
        base + self.offset
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let home = match &self.home {
            Home::Window(_) => "window",
            Home::Buffer(_) => "buffer",
            Home::Loose(_) => "loose",
            Home::Device(_) => "GPU",
        };
        write!(f, "Memory({} bytes at {} of a {home})", self.len(), self.offset)
    }
}
