//! The owner's GPU memory is opened here, and a GPU copies: on one GPU at the speed of its memory, between two over their link.
//!
//! A peer that imports a region asks the owner ([`words`]), who finds the allocation behind it and answers with a handle, or
//! with descriptors for memory that was made by `cuMemCreate`. What was opened is kept by the owner's incarnation and CUDA's
//! number of the allocation, or those of all its parts ([`opened`]): an address or a handle may come again for other memory,
//! these do not.
//!
//! Revocation holds as on the host: a copy pins the owner's row and checks the generation again. Besides, memory must not be
//! freed while it is open elsewhere: for as long as an allocation is open, one of its regions is pinned, and the owner recalls
//! regions that it takes back, which makes the peer close what it needs no more. A peer that is stopped keeps its pin, and the
//! memory is parked; the pins of one that was killed end with its process.

mod opened;
mod words;

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use towline_sys::cuda::Cuda;

use self::opened::{Borrow, Kept};
use self::words::{Answer, Ask, Form, MAX_PARTS, Part};
use super::gpu::{CopyAddress, GpuAttachment, OwnerMemory, PinnedRegion};
use super::{Attachment, Contact, Offer, Owner, PathProperties, Probe, Serves, Transport, TransportContext};
use crate::cuda::{Availability, Gpu, MemoryType, PointerFacts, availability, failed};
use crate::memory::Place;
use crate::region::{RegionCore, no_words};
use crate::route::Capabilities;
use crate::session::{GrantHandle, Loan, Query, QueryReply, Ticketed};
use crate::transfer::After;
use crate::{Error, Kind, Result, runtime};

const OP: &str = "import";

/// By which peers and owners speak of it.
const NUMBER: u8 = 1;

/// The transport between processes that use GPUs of one machine.
pub(crate) struct CudaPath;

/// What stands in the list.
pub(super) const TRANSPORT: &dyn Transport = &CudaPath;

impl Transport for CudaPath {
    fn properties(&self) -> PathProperties {
        PathProperties {
            apart: true,
            may_be_missing: Some("no GPU can be used"),
            // A copy in the order of a stream cannot be called off.
            quiet_at_end: false,
            ..PathProperties::new(
                "cuda",
                "the owner's GPU memory is opened here, and a GPU copies",
                Capabilities::READ | Capabilities::WRITE,
                Serves::GpuMemory,
                Contact::Unix,
            )
        }
    }

    fn probe(&self) -> Probe {
        match availability() {
            Availability::Found { devices, version, .. } if !devices.is_empty() => {
                Probe::Works(format!("CUDA {version}, {} GPUs", devices.len()))
            }
            Availability::Found { .. } => {
                let mend = "run where a GPU is visible (CUDA_VISIBLE_DEVICES)".into();
                Probe::Missing { reason: "the driver sees no GPU".into(), mend }
            }
            Availability::Missing { tried, mend } => Probe::Missing { reason: tried.join("; "), mend },
        }
    }

    fn blocks(&self, offer: &Offer<'_>) -> bool {
        usable_owner(offer).is_ok()
    }

    fn attach(&self, offer: &Offer<'_>) -> Result<Arc<dyn Attachment>> {
        let handle = usable_owner(offer)?;
        runtime::may_block(OP)?;
        // Before the owner is troubled.
        Cuda::load().and_then(|cuda| cuda.init()).map_err(|error| failed(OP, error))?;
        let until = offer.until;
        let borrow = Borrow::new(handle);
        // Before the owner lends it: from then on it may want it back.
        borrow.listen();
        let (mut answer, mut files) = ask(handle, 0, until)?;
        while let Form::Descriptors { parts, all } = &mut answer.form
            && parts.len() < *all as usize
        {
            let (further, more) = ask(handle, parts.len() as u32, until)?;
            match further.form {
                Form::Descriptors { parts: new, .. } if !new.is_empty() => parts.extend(new),
                _ => return Err(Error::protocol(OP, "the owner's reply lacks the rest of a region's parts")),
            }
            files.extend(more);
        }
        let gpu = by_uuid(&answer.uuid)?;
        gpu.prepare()?;
        let start = borrow.open(&gpu, &answer, files, offer.grant)?;
        let far = Opening { handle: Arc::clone(handle), kept: Kept(borrow), start };
        Ok(GpuAttachment::new(Arc::new(far)))
    }

    fn number(&self) -> Option<u8> {
        Some(NUMBER)
    }

    fn offers(&self, _context: &TransportContext, ticketed: &Ticketed<'_>) -> bool {
        matches!(ticketed.region.place, Place::Cuda(_))
    }

    fn answer_query(&self, _context: &TransportContext, query: &Query<'_>) -> Result<QueryReply> {
        let Ask { skip } = Ask::decode(query.words)?;
        let region = query.ticketed.region;
        let Place::Cuda(ordinal) = region.place else {
            return Err(unavailable(format!("the bytes are on {}", region.place)));
        };
        if query.pins.is_none() {
            return Err(unavailable("the peer shares no memory with the owner"));
        }
        let peer = &query.peer.name;
        // While it is looked up it does not go.
        let _used = region.begin_use(OP)?;
        let gpu = Gpu::open(ordinal)?;
        let (answer, files) = describe(&gpu, region, skip as usize)?;
        tracing::debug!(peer, range = ?query.ticketed.claims.range, form = ?answer.form, "a peer opens memory of a GPU");
        Ok(QueryReply { reply: answer.encode(), files, loan: Some(Arc::new(Recalled)) })
    }
}

/// Taking a region back asks the peer to let go. What counts after the end of a session are its pins.
struct Recalled;

impl Loan for Recalled {
    fn pinned(&self) -> bool {
        false
    }

    fn orphaned(&self, back: Box<dyn FnOnce() + Send>) {
        back();
    }
}

fn ask(handle: &Arc<GrantHandle>, skip: u32, until: Instant) -> Result<(Answer, Vec<std::os::fd::OwnedFd>)> {
    let reply = handle.query(NUMBER, Ask { skip }.encode(), until)?;
    Ok((Answer::decode(&reply.reply)?, reply.files))
}

/// Refuses an offer for which this way is not taken; the error says why. Quick.
fn usable_owner<'a>(offer: &Offer<'a>) -> Result<&'a Arc<GrantHandle>> {
    let Owner::There(handle) = offer.owner else {
        return Err(unavailable("the owner is in this process"));
    };
    if !matches!(offer.grant.place, Place::Cuda(_)) {
        return Err(unavailable(format!("the bytes are on {}, not on a GPU", offer.grant.place)));
    }
    handle.local_fence()?;
    if offer.grant.offers & (1 << (NUMBER - 1)) == 0 {
        return Err(unavailable("the owner does not offer it"));
    }
    Ok(handle)
}

fn unavailable(reason: impl Into<String>) -> Error {
    Error::new(Kind::Unavailable, OP, reason.into())
}

/// The GPU of this process that has that number in every process.
fn by_uuid(uuid: &[u8; 16]) -> Result<Arc<Gpu>> {
    static KNOWN: OnceLock<Vec<[u8; 16]>> = OnceLock::new();
    if KNOWN.get().is_none() {
        let cuda = Cuda::load().map_err(|error| failed(OP, error))?;
        let known = (0..cuda.device_count().map_err(|error| failed(OP, error))?)
            .map(|ordinal| cuda.device(ordinal).and_then(|device| device.uuid()))
            .collect::<towline_sys::Result<Vec<_>>>()
            .map_err(|error| failed(OP, error))?;
        let _ = KNOWN.set(known);
    }
    let ordinal = KNOWN.get().and_then(|known| known.iter().position(|one| one == uuid));
    match ordinal {
        Some(ordinal) => Gpu::open(ordinal as u32),
        None => {
            let name: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
            Err(unavailable(format!(
                "the owner's GPU ({name}) is not among those that this process sees (CUDA_VISIBLE_DEVICES)"
            )))
        }
    }
}

/// At the owner: how a peer opens the memory behind a region. Of memory in several parts, those after the first `skip`.
fn describe(gpu: &Arc<Gpu>, region: &RegionCore, skip: usize) -> Result<(Answer, Vec<std::os::fd::OwnedFd>)> {
    let (address, end) = (region.addr as u64, region.addr as u64 + region.len as u64);
    let first = known(gpu, address)?;
    let uuid = gpu.device().uuid().map_err(|error| failed(OP, error))?;
    let entered = gpu.enter(OP)?;
    let answer = |len, form| Answer { uuid, start: address - first.start, len, form };
    if first.legacy_ipc {
        if first.start + first.len < end {
            return Err(unavailable(
                "the region lies in several allocations of cudaMalloc, and a handle opens one",
            ));
        }
        let handle = Box::new(entered.ipc_handle(first.start).map_err(|error| failed(OP, error))?);
        return Ok((answer(first.len, Form::Handle { handle, buffer: first.buffer }), Vec::new()));
    }
    if first.handle_types & 1 == 0 {
        return Err(unavailable(if first.pooled {
            "the memory comes from a pool of cudaMallocAsync, which other processes cannot open: allocate it by cudaMalloc \
             (PyTorch: backend:native)"
        } else {
            "the memory was made by cuMemCreate without file descriptors for other processes: ask for \
             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, or allocate it by cudaMalloc (PyTorch: expandable_segments:False)"
        }));
    }
    let (mut parts, mut files, mut all, mut at) = (Vec::new(), Vec::new(), 0u32, first.start);
    while at < end {
        let part = if at == first.start { first } else { known(gpu, at)? };
        if part.start != at || part.len == 0 {
            return Err(unavailable("the parts of the region do not lie side by side"));
        }
        if all as usize >= skip && parts.len() < MAX_PARTS {
            let allocation = entered.cuda().retain_allocation(at).map_err(|error| failed(OP, error))?;
            files.push(allocation.export().map_err(|error| failed(OP, error))?);
            parts.push(Part { len: part.len, buffer: part.buffer, block: part.block });
        }
        all += 1;
        at += part.len;
    }
    Ok((answer(at - first.start, Form::Descriptors { parts, all }), files))
}

fn known(gpu: &Gpu, address: u64) -> Result<PointerFacts> {
    match gpu.facts(OP, address)? {
        Some(facts) if facts.memory == MemoryType::Device => Ok(facts),
        Some(_) => Err(unavailable("the memory is not a GPU's alone (pinned or managed)")),
        None => Err(Error::new(Kind::Stale, OP, "the GPU memory behind the region was freed")),
    }
}

/// A region of another process that is open here.
struct Opening {
    kept: Kept,
    handle: Arc<GrantHandle>,
    /// Where in what was opened the grant begins.
    start: u64,
}

impl OwnerMemory for Opening {
    fn transport(&self) -> &'static dyn Transport {
        &CudaPath
    }

    fn enter(&self, op: &'static str) -> Result<(PinnedRegion, CopyAddress)> {
        self.handle.session().alive()?;
        // First the pin: what is open stays so while it is held.
        let pin = self.handle.hold(op)?;
        let (open, entered) = self.kept.0.enter(op)?;
        let address =
            CopyAddress { address: open.base + self.start, gpu: Some(Arc::clone(&open.gpu)), host: None };
        let keep = Box::new((open, entered));
        Ok((PinnedRegion::There { _keep: keep, pin, handle: Arc::clone(&self.handle) }, address))
    }

    fn follow(&self, after: &After) -> Result<()> {
        if after.signal.is_some() {
            return Err(no_words("signal", Place::Cuda(0)));
        }
        match &after.notify {
            Some(message) => self.handle.session().notify(message),
            None => Ok(()),
        }
    }

    fn alive(&self) -> Result<()> {
        self.handle.session().alive()
    }
}
