//! Files and memory of GPUs that an owner serves: workers read and write them, through buffers that are bounded for each peer.
#![allow(unsafe_code, reason = "reads into buffers that are sent as raw parts")]

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use towline_proto::session::allowance::InFlight;
use towline_proto::session::owner::Ranges;

use super::connection::{Connection, Role};
use super::owner::Serving;
use super::parts::{Bounced, Held, Keep, Landed, Payload, Sink, hung_up};
use super::{apply, checks};
use crate::budget::Charge;
use crate::bytes::checked;
use crate::cuda::Gpu;
use crate::layout::Piece;
use crate::memory::ring::{self, Passing, Slot};
use crate::memory::{FileSlice, Place};
use crate::region::{RegionCore, Stream, no_words, stale};
use crate::runtime::socket::{RawPart, RawPartMut};
use crate::runtime::{self, Device, EACH};
use crate::wire::{self, Message};
use crate::{Error, Kind, Result, room};

/// One request may ask for this many bytes of a file: a few times what this library asks for.
const MAX_REQUEST: u64 = 16 << 20;

/// For one peer this much is read and not sent yet; further requests wait.
const MOST_READ: usize = 32 << 20;

/// And this many requests, with this many blocks, wait at most: a peer that asks and does not take is cut short.
const MOST_WAITING: usize = 16 << 10;
const MOST_BLOCKS: usize = 1 << 20;

/// Where this much has come to be written and is not, a lane waits for what it has brought.
const MOST_BEHIND: usize = 32 << 20;

/// And over the control connection, which cannot wait, no more than this comes.
const MOST_WRITTEN: usize = 256 << 20;

/// What bytes that stop over come from.
pub(super) enum Source {
    File(FileSlice),
    /// Memory of the GPU with that ordinal.
    Gpu(u32),
    /// Memory that was lent and that a file of that file system is mapped to.
    Mapped(Device),
}

impl Source {
    /// Where the bytes of a region come from, if they stop over.
    pub(super) fn of(region: &RegionCore) -> Option<Source> {
        match (&region.file, region.place) {
            (Some(file), _) => Some(Source::File(file.clone())),
            (None, Place::Cuda(ordinal)) => Some(Source::Gpu(ordinal)),
            (None, _) => region.file_system().map(Source::Mapped),
        }
    }

    /// What reading and writing waits for.
    pub(super) fn device(&self) -> Device {
        match self {
            Source::File(file) => file.device(),
            Source::Gpu(ordinal) => Device::Gpu(*ordinal),
            Source::Mapped(device) => *device,
        }
    }
}

/// A part of a served file, or of a GPU's memory: a request that has been checked.
pub(super) struct Asked {
    pub(super) region: Arc<RegionCore>,
    pub(super) source: Source,
    pub(super) ranges: Ranges,
    /// The peer's share that it takes.
    pub(super) flight: InFlight,
}

impl Asked {
    fn bytes(&self) -> u64 {
        self.ranges.bytes()
    }

    /// The error of everything that acts on words.
    pub(super) fn no_words(&self, op: &'static str) -> Error {
        no_words(op, self.region.place)
    }

    /// The ranges as pieces, which lie one after the other in a buffer.
    fn pieces(&self) -> Result<Vec<Piece>> {
        let mut local = 0;
        let piece = |(remote, len): (u64, usize)| {
            let piece = Piece { remote, local, len: len as u64 };
            local += piece.len;
            piece
        };
        room::collect("transfer", self.ranges()?.into_iter().map(piece))
    }

    /// The ranges of the region, neighbours joined.
    fn ranges(&self) -> Result<Vec<(u64, usize)>> {
        let mut ranges: Vec<(u64, usize)> = Vec::new();
        for (offset, len) in self.ranges.iter() {
            match ranges.last_mut() {
                Some((at, last)) if *at + *last as u64 == offset => *last += len,
                _ => room::push("transfer", &mut ranges, (offset, len))?,
            }
        }
        Ok(ranges)
    }

    /// Writes the bytes, those of a file as long as their initiator stands by them; the region stays meanwhile. Blocks: the caller
    /// says all the while that it is at it.
    pub(super) fn write(&self, landed: Landed, stands_by: &dyn Fn() -> bool) -> Result<()> {
        let _use = self.region.begin_use("write")?;
        let base = self.region.addr as u64;
        let at = |piece: &Piece| base + piece.remote;
        match (&self.source, landed) {
            (Source::File(file), landed) => {
                let mut bytes = landed.bytes(self.bytes() as usize);
                for (offset, len) in self.ranges()? {
                    let (now, rest) = bytes.split_at(len.min(bytes.len()));
                    // SAFETY: `now` is a slice.
                    if !unsafe { file.write_if(stands_by, "write", offset, now.as_ptr(), now.len())? } {
                        return Err(hung_up("write"));
                    }
                    bytes = rest;
                }
            }
            (Source::Mapped(_), landed) => {
                let part = |(offset, len)| RawPartMut { ptr: (base + offset) as *mut u8, len };
                let parts = room::collect("write", self.ranges()?.into_iter().map(part))?;
                apply::write_lent(stands_by, &parts, landed.bytes(self.bytes() as usize))?;
            }
            (Source::Gpu(ordinal), Landed::Pinned(slot)) => {
                // SAFETY: the use keeps the region, against which the blocks were checked; the payload has their length.
                unsafe { Passing::start(&Gpu::open(*ordinal)?, true, slot, self.pieces()?, at) }?.wait()?;
            }
            (Source::Gpu(ordinal), Landed::Buffer(buffer)) => {
                let from = buffer.as_ptr().expose_provenance() as u64;
                // SAFETY: as above.
                unsafe {
                    ring::pass(&Gpu::open(*ordinal)?, true, &self.pieces()?, at, |piece| from + piece.local)?;
                }
            }
        }
        if self.region.is_closed() { Err(stale("write")) } else { Ok(()) }
    }
}

/// What of files and GPUs is on its way to and from one peer, each device by itself.
#[derive(Default)]
pub(super) struct Files {
    devices: Mutex<HashMap<Device, Arc<Bounces>>>,
    /// Bytes that have come, or are coming, to be written.
    written: Arc<AtomicUsize>,
}

/// Some of these, as long as they are there.
pub(super) struct Written {
    all: Arc<AtomicUsize>,
    bytes: usize,
}

impl Drop for Written {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// What of one device is.
pub(super) struct Bounces {
    device: Device,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Waiting>,
    blocks: usize,
    workers: usize,
    /// Bytes in buffers that are being filled or sent.
    read: usize,
}

type Answering = Box<dyn FnOnce(&Arc<Bounces>) + Send>;

/// A request that waits for its turn: what it takes, and how it is answered.
struct Waiting {
    connection: Arc<Connection>,
    request: u64,
    bytes: usize,
    blocks: usize,
    answer: Answering,
}

/// A request that is answered.
struct Reading {
    serving: Weak<Serving>,
    connection: Arc<Connection>,
    request: u64,
    asked: Asked,
    /// Checksums go ahead of the bytes.
    checked: bool,
}

impl Files {
    /// What goes to and comes from that device.
    pub(super) fn at(&self, source: &Source) -> Arc<Bounces> {
        let device = source.device();
        let new = || Arc::new(Bounces { device, state: Mutex::default() });
        Arc::clone(self.devices.lock().entry(device).or_insert_with(new))
    }

    /// Where bytes come to that are to be written. On a lane those for a GPU come straight into memory that it reads from; the
    /// event loop must not wait until there is some.
    pub(super) fn sink(&self, role: Role, asked: &Asked, bytes: u64) -> Result<Sink> {
        check_size("write", bytes)?;
        let (all, bytes) = (Arc::clone(&self.written), bytes as usize);
        let before = all.fetch_add(bytes, Ordering::Relaxed);
        let written = Written { all, bytes };
        // A lane is held up before there are so many.
        if before + bytes > MOST_WRITTEN && role == Role::Control {
            let message = "the owner cannot write files or GPUs as fast as the bytes come";
            return Err(Error::new(Kind::Exhausted, "write", message));
        }
        if let Source::Gpu(ordinal) = asked.source
            && role == Role::Lane
            && bytes <= ring::SLOT
            && runtime::may_block("write").is_ok()
            && let Ok(slot) = Gpu::open(ordinal).and_then(|gpu| Slot::take(&gpu))
        {
            return Ok(Sink::pinned(slot, bytes).counted(written));
        }
        Ok(Sink::buffer(bytes, None)?.counted(written))
    }

    /// Whether so much waits to be written that no more is to come over a lane.
    pub(super) fn is_behind(&self) -> bool {
        self.written.load(Ordering::Relaxed) > MOST_BEHIND
    }

    /// Whether answers are being made, which other threads will send.
    pub(super) fn is_reading(&self) -> bool {
        self.devices.lock().values().any(|one| one.is_reading())
    }

    /// Forgets a request over that connection that waits; whether it did.
    pub(super) fn withdraw(&self, connection: &Arc<Connection>, request: u64) -> bool {
        let all: Vec<_> = self.devices.lock().values().cloned().collect();
        all.iter().any(|one| one.withdraw(connection, request))
    }

    /// Forgets what waits.
    pub(super) fn clear(&self) {
        let all: Vec<_> = self.devices.lock().values().cloned().collect();
        all.iter().for_each(|one| one.clear());
    }
}

impl Bounces {
    /// Takes a request for bytes of a file; a worker answers it.
    pub(super) fn read(
        self: &Arc<Self>,
        serving: &Arc<Serving>,
        connection: &Arc<Connection>,
        request: u64,
        asked: Asked,
        checked: bool,
    ) -> Result<()> {
        check_size("read", asked.bytes())?;
        let mut state = self.state.lock();
        if state.waiting.len() >= MOST_WAITING || state.blocks + asked.ranges.blocks().len() > MOST_BLOCKS {
            let message = "too many requests for bytes of files or GPUs wait";
            return Err(Error::new(Kind::Exhausted, "read", message));
        }
        let bytes = asked.bytes() as usize;
        let by_gpu = matches!(asked.source, Source::Gpu(_)) && !checked && bytes <= ring::SLOT;
        let turn = state.waiting.is_empty() && state.read + bytes <= MOST_READ;
        let reading = Reading {
            serving: Arc::downgrade(serving),
            connection: Arc::clone(connection),
            request,
            asked,
            checked,
        };
        // A GPU needs no worker, but for one that pins memory.
        if by_gpu
            && turn
            && let Some(slot) = Slot::ready()
        {
            state.read += bytes;
            drop(state);
            reading.by_gpu(self, slot);
            return Ok(());
        }
        let blocks = reading.asked.ranges.blocks().len();
        state.blocks += blocks;
        state.waiting.push_back(Waiting {
            connection: Arc::clone(connection),
            request,
            bytes,
            blocks,
            answer: Box::new(move |files| reading.answer(files)),
        });
        drop(state);
        self.go_on();
        Ok(())
    }

    fn is_reading(&self) -> bool {
        let state = self.state.lock();
        state.workers > 0 || state.read > 0
    }

    fn withdraw(&self, connection: &Arc<Connection>, request: u64) -> bool {
        let mut state = self.state.lock();
        let mine = |one: &Waiting| one.request == request && Arc::ptr_eq(&one.connection, connection);
        let withdrawn = state.waiting.iter().position(mine).and_then(|at| state.waiting.remove(at));
        state.blocks -= withdrawn.as_ref().map_or(0, |one| one.blocks);
        drop(state);
        withdrawn.is_some()
    }

    fn clear(&self) {
        let waiting = {
            let mut state = self.state.lock();
            state.blocks = 0;
            std::mem::take(&mut state.waiting)
        };
        drop(waiting);
    }

    /// Calls a worker where there is something to do. Never blocks: it is called wherever a buffer becomes free.
    fn go_on(self: &Arc<Self>) {
        let mut state = self.state.lock();
        if state.workers >= EACH || state.next().is_none() {
            return;
        }
        state.workers += 1;
        drop(state);
        let files = Arc::clone(self);
        if let Err(refused) = runtime::devices().spawn(self.device, Box::new(move || files.work())) {
            // What waits is tried again with the next request; if none comes, the peer's limit ends its wait.
            tracing::warn!(error = %refused.error, "a file cannot be read for a peer");
            self.state.lock().workers -= 1;
        }
    }

    /// A worker's turn.
    fn work(self: &Arc<Self>) {
        loop {
            let mut state = self.state.lock();
            let next = state.next().and_then(|bytes| Some((bytes, state.waiting.pop_front()?)));
            let Some((bytes, waiting)) = next else {
                state.workers -= 1;
                return;
            };
            state.blocks = state.blocks.saturating_sub(waiting.blocks);
            state.read += bytes;
            drop(state);
            (waiting.answer)(self);
        }
    }
}

impl State {
    /// The bytes of the request whose turn it is, where there is room for them.
    fn next(&self) -> Option<usize> {
        let bytes = self.waiting.front()?.bytes;
        (self.read == 0 || self.read + bytes <= MOST_READ).then_some(bytes)
    }
}

/// Refuses requests whose bytes would take too much memory on their way.
fn check_size(op: &'static str, bytes: u64) -> Result<()> {
    if bytes > MAX_REQUEST {
        let message = format!("a request moves at most {MAX_REQUEST} bytes of a file or a GPU");
        return Err(Error::invalid(op, message));
    }
    Ok(())
}

impl Reading {
    fn bounce(&self, files: &Arc<Bounces>) -> Bounce {
        let (region, bytes) = (Arc::clone(&self.asked.region), self.asked.bytes() as usize);
        Bounce { files: Arc::clone(files), region, bytes, buffer: Vec::new(), slot: None, charge: None }
    }

    /// Reads and sends; the bytes have been counted. Blocks.
    fn answer(self, files: &Arc<Bounces>) {
        let mut bounce = self.bounce(files);
        // Until the reply is in its queue: the thread that takes the region back then finds it there, or waits for it here.
        let using = self.asked.region.begin_use("read");
        let filled = using.as_ref().map_err(Clone::clone).and_then(|_| bounce.fill(&self.asked));
        if let Some(serving) = self.send(bounce, filled) {
            serving.break_off(self.asked.region.generation);
        }
        drop(using);
    }

    /// The same for bytes of a GPU that fit a slot, without waiting for it.
    fn by_gpu(self, files: &Arc<Bounces>, slot: Slot) {
        let bounce = self.bounce(files);
        let base = self.asked.region.addr as u64;
        let begun = self.asked.region.begin_use("read").and_then(|using| {
            let Source::Gpu(ordinal) = self.asked.source else {
                return Err(Error::new(Kind::Internal, "read", "a GPU has become a file"));
            };
            let at = |piece: &Piece| base + piece.remote;
            // SAFETY: the use, which is kept until the bytes are there, keeps the region, against which the blocks were
            // checked.
            let passing =
                unsafe { Passing::start(&Gpu::open(ordinal)?, false, slot, self.asked.pieces()?, at) }?;
            Ok((using, passing))
        });
        match begun {
            Ok((using, mut passing)) => {
                // A lane that has nothing to send waits for this, and sends it sooner than if another thread woke it.
                let idle = self.connection.role() == Role::Lane && self.connection.has_sent_all();
                let waited = idle && ring::wait_idly(&mut passing);
                let filled = move |slot: Result<Slot>| {
                    let mut bounce = bounce;
                    let filled = slot.and_then(|slot| bounce.filled(&self.asked, slot));
                    let Some(serving) = self.send(bounce, filled) else { return drop(using) };
                    let generation = self.asked.region.generation;
                    // Not here: it waits for the thread that is reading from a connection.
                    let work = move || {
                        serving.break_off(generation);
                        drop(using);
                    };
                    if let Err(refused) = runtime::pool().spawn(Box::new(work)) {
                        (refused.job)();
                    }
                };
                if waited {
                    filled(passing.into_slot());
                } else {
                    ring::when_done(passing, Box::new(filled));
                }
            }
            Err(error) => drop(self.send(bounce, Err(error))),
        }
    }

    /// Sends what was read, or why it was not. The sender uses the region meanwhile; where it was taken back before, all that is
    /// on its way from there is to be broken off.
    fn send(&self, bounce: Bounce, filled: Result<Vec<RawPart>>) -> Option<Arc<Serving>> {
        let serving = self.serving.upgrade()?;
        let sent = match filled {
            Ok(parts) => {
                let mut head =
                    Message::from(wire::Data { outcome: Ok(()) }).frame(self.request, self.asked.bytes(), 0);
                if self.checked {
                    head = checks::before(bounce.checks(&self.asked, &parts), self.request, head);
                }
                let held = Held::to_send(parts, Keep::Bounce(Arc::new(bounce), self.request));
                self.connection.send(head, Vec::new(), Payload::Memory(held))
            }
            Err(error) => serving.answer_read(&self.connection, self.request, Err(error)),
        };
        (sent.is_ok() && self.asked.region.is_closed()).then_some(serving)
    }
}

/// Bytes of a file on their way to a peer.
pub(super) struct Bounce {
    files: Arc<Bounces>,
    region: Arc<RegionCore>,
    bytes: usize,
    buffer: Vec<u8>,
    slot: Option<Slot>,
    charge: Option<Charge>,
}

impl Bounce {
    /// Makes room, which the peer pays for.
    fn make_room(&mut self, asked: &Asked, bytes: usize) -> Result<()> {
        self.charge = Some(asked.flight.charge("read", bytes)?);
        self.buffer = room::zeros("read", bytes)?;
        Ok(())
    }

    /// The checksums of what was read, block by block: it lies there without gaps.
    fn checks(&self, asked: &Asked, parts: &[RawPart]) -> Vec<u32> {
        if let Some(slot) = &self.slot {
            return checks::of_bytes(asked.ranges.blocks(), slot.bytes(self.bytes));
        }
        let start = parts.first().map_or(0, |part| part.ptr.addr() - self.buffer.as_ptr().addr());
        checks::of_bytes(asked.ranges.blocks(), &self.buffer[start..])
    }

    /// Reads what was asked for; the parts stay valid until the bounce is dropped.
    fn fill(&mut self, asked: &Asked) -> Result<Vec<RawPart>> {
        let part = match &asked.source {
            Source::File(file) => self.fill_from_file(asked, file)?,
            Source::Gpu(ordinal) => self.fill_from_gpu(asked, &Gpu::open(*ordinal)?)?,
            Source::Mapped(_) => self.fill_from_mapped(asked)?,
        };
        if asked.region.is_closed() { Err(stale("read")) } else { Ok(vec![part]) }
    }

    /// What was asked for is in that slot.
    fn filled(&mut self, asked: &Asked, slot: Slot) -> Result<Vec<RawPart>> {
        let part = RawPart { ptr: self.slot.insert(slot).ptr(), len: self.bytes };
        if asked.region.is_closed() { Err(stale("read")) } else { Ok(vec![part]) }
    }

    fn fill_from_file(&mut self, asked: &Asked, file: &FileSlice) -> Result<RawPart> {
        let ranges = asked.ranges()?;
        let page = crate::memory::FILE_ALIGNMENT;
        self.make_room(asked, self.bytes + page)?;
        // The buffer lies in its page as the first range in its own, so that it can go around the page cache.
        let wanted = (file.offset() + ranges.first().map_or(0, |(offset, _)| *offset)) as usize % page;
        let start = (page + wanted - self.buffer.as_ptr().addr() % page) % page;
        let mut at = start;
        for (offset, len) in ranges {
            let into = &mut self.buffer[at..at + len];
            // SAFETY: `into` is an exclusive slice of that length.
            unsafe { file.read("read", offset, into.as_mut_ptr(), len)? };
            at += len;
        }
        let filled = &self.buffer[start..at];
        Ok(RawPart { ptr: filled.as_ptr(), len: filled.len() })
    }

    fn fill_from_mapped(&mut self, asked: &Asked) -> Result<RawPart> {
        self.make_room(asked, self.bytes)?;
        let mut at = 0;
        for (offset, len) in asked.ranges()? {
            let into = &mut self.buffer[at..at + len];
            let from = (asked.region.addr + offset as usize) as *const u8;
            // SAFETY: `into` is an exclusive slice of that length; the memory was lent for this, and is the kernel's to check.
            unsafe { checked::read("read", into.as_mut_ptr(), from, len)? };
            at += len;
        }
        Ok(RawPart { ptr: self.buffer.as_ptr(), len: at })
    }

    fn fill_from_gpu(&mut self, asked: &Asked, gpu: &Arc<Gpu>) -> Result<RawPart> {
        let (base, pieces) = (asked.region.addr as u64, asked.pieces()?);
        if self.bytes <= ring::SLOT {
            // SAFETY: the caller holds a use of the region, against which the blocks were checked.
            let passing =
                unsafe { Passing::start(gpu, false, Slot::take(gpu)?, pieces, |piece| base + piece.remote) }?;
            let slot = self.slot.insert(passing.into_slot()?);
            return Ok(RawPart { ptr: slot.ptr(), len: self.bytes });
        }
        self.make_room(asked, self.bytes)?;
        let into = self.buffer.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: as above; the buffer is as long as the pieces together.
        unsafe {
            let at = |piece: &Piece| base + piece.remote;
            ring::pass(gpu, false, &pieces, at, |piece| into + piece.local)?;
        }
        Ok(RawPart { ptr: self.buffer.as_ptr(), len: self.buffer.len() })
    }
}

impl Bounced for Bounce {
    fn generation(&self) -> u64 {
        self.region.generation
    }

    fn is_closed(&self) -> bool {
        self.region.is_closed()
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        let mut state = self.files.state.lock();
        state.read = state.read.saturating_sub(self.bytes);
        drop(state);
        self.files.go_on();
    }
}
