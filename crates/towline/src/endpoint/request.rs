//! A request before it starts: what to move, and how.
#![allow(unsafe_code, reason = "hands the address of a pinned local region to the path")]

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use super::stats::Counters;
use super::{EndpointCore, Remote};
use crate::cuda::StreamHandle;
use crate::layout::{IndexList, Layout, Listed, Piece, Plan};
use crate::memory::Place;
use crate::notify::MAX_MESSAGE;
use crate::region::{RegionUse, Span, no_words};
use crate::route::{Capabilities, Routing};
use crate::transfer::{self, After, Limits, OnEnd, Op, Parts, Signal, Transfer, TransferCore};
use crate::transport::{Attachment, Begun, gpu};
use crate::{Access, Error, Kind, Result, fork, room};

/// A transfer that has not started yet.
///
/// Without [`at`](Self::at), [`spans`](Self::spans) or [`blocks`](Self::blocks) it moves the whole local span, from
/// or to the start of the remote region.
///
/// ```
/// # use towline::{Access, Endpoint, Layout, SharedStorage};
/// # let owner = Endpoint::open("owner")?;
/// # let cache = owner.register(SharedStorage::new(64 << 10)?, Access::READ)?;
/// # let endpoint = Endpoint::open("reader")?;
/// # let remote = endpoint.import(&cache.ticket()?)?;
/// # let local = endpoint.register(SharedStorage::new(64 << 10)?, Access::NONE)?;
/// let pages = Layout::blocks(0, 4096, 16, 4096)?;
/// endpoint
///     .read(&remote, &local)
///     .blocks(&pages, &[3u32, 9, 10], &pages, &[0u32, 1, 2])
///     .notify("taken")
///     .start()?
///     .wait()?;
/// assert_eq!(owner.receive(std::time::Duration::from_secs(5))?.message, b"taken");
/// # Ok::<(), towline::Error>(())
/// ```
#[must_use = "a request does nothing until started"]
pub struct Request<'a> {
    endpoint: &'a Arc<EndpointCore>,
    remote: &'a Remote,
    op: Op,
    local: Option<Span>,
    what: What<'a>,
    after: After,
    limits: Option<Limits>,
    /// Both set one of them, whatever else is said.
    total: Option<Duration>,
    stall: Option<Duration>,
    checked: Option<bool>,
    routing: Option<Routing>,
    stream: Option<StreamHandle>,
    by_workers: bool,
    then: Option<OnEnd>,
}

enum What<'a> {
    Whole,
    Span(u64, u64, u64),
    Plan(Result<Plan>),
    Spans(Cow<'a, [(u64, u64, u64)]>),
    Blocks(Box<Listed<'a>>),
}

impl<'a> Request<'a> {
    pub(super) fn new(
        endpoint: &'a Arc<EndpointCore>,
        remote: &'a Remote,
        op: Op,
        local: Option<Span>,
    ) -> Self {
        Request {
            endpoint,
            remote,
            op,
            local,
            what: What::Whole,
            after: After::default(),
            limits: None,
            total: None,
            stall: None,
            checked: None,
            routing: None,
            stream: None,
            by_workers: false,
            then: None,
        }
    }

    /// Moves `len` bytes between those offsets.
    pub fn at(mut self, remote: u64, local: u64, len: u64) -> Request<'a> {
        self.what = What::Span(remote, local, len);
        self
    }

    /// Moves several ranges, each given as remote offset, local offset and length. A list that is handed over, as a `Vec`, is
    /// not copied.
    pub fn spans(mut self, spans: impl Into<Cow<'a, [(u64, u64, u64)]>>) -> Request<'a> {
        self.what = What::Spans(spans.into());
        self
    }

    /// Moves blocks by index: the n-th remote index pairs with the n-th local index. The layouts are relative to the
    /// remote region and to the local span.
    ///
    /// Lists of more than a few hundred indices are checked by a worker: an index that is past its layout, or past the memory,
    /// is then how the transfer ends, and not an error of [`start`](Self::start). Hand long lists over ([`IndexList`]), and
    /// starting takes no longer for them.
    ///
    /// ```
    /// # use towline::{Access, Endpoint, Layout, SharedStorage};
    /// use std::sync::Arc;
    /// # let owner = Endpoint::open("owner")?;
    /// # let cache = owner.register(SharedStorage::new(64 << 10)?, Access::READ)?;
    /// # let endpoint = Endpoint::open("reader")?;
    /// # let remote = endpoint.import(&cache.ticket()?)?;
    /// # let local = endpoint.register(SharedStorage::new(64 << 10)?, Access::NONE)?;
    /// let pages = Layout::blocks(0, 4096, 16, 4096)?;
    /// let kept: Arc<Vec<u64>> = Arc::new(vec![3, 9, 10]);
    /// endpoint.read(&remote, &local).blocks(&pages, Arc::clone(&kept), &pages, vec![0u32, 1, 2]).start()?.wait()?;
    /// # Ok::<(), towline::Error>(())
    /// ```
    pub fn blocks(
        mut self,
        remote: &Layout,
        remote_indices: impl Into<IndexList<'a>>,
        local: &Layout,
        local_indices: impl Into<IndexList<'a>>,
    ) -> Request<'a> {
        self.what =
            What::Blocks(Box::new(Listed::new(remote, remote_indices.into(), local, local_indices.into())));
        self
    }

    /// Moves what a plan says.
    pub(crate) fn planned(mut self, plan: Result<Plan>) -> Request<'a> {
        self.what = What::Plan(plan);
        self
    }

    /// Raises a 64-bit counter of the remote region once all bytes are visible to its owner.
    pub fn signal(mut self, offset: u64, add: u64) -> Request<'a> {
        self.after.signal = Some(Signal { offset, add });
        self
    }

    /// Hands the owner a message once all bytes are visible to it (for a read: once they have been read).
    pub fn notify(mut self, message: impl Into<Vec<u8>>) -> Request<'a> {
        self.after.notify = Some(message.into());
        self
    }

    /// Ends it with `Timeout` after that time, however many bytes it has. The limit without progress stays.
    pub fn within(mut self, time: Duration) -> Request<'a> {
        self.total = Some(time);
        self
    }

    /// Ends it with `Timeout` when nothing has moved for that time. The limit for all of it stays.
    pub fn stall_within(mut self, time: Duration) -> Request<'a> {
        self.stall = Some(time);
        self
    }

    /// Sets how long it may take, without progress and in all. [`within`](Self::within) and
    /// [`stall_within`](Self::stall_within) set one of the two, and win over this.
    pub fn limits(mut self, limits: Limits) -> Request<'a> {
        self.limits = Some(limits);
        self
    }

    fn all_limits(&self) -> Limits {
        let mut limits = self.limits.unwrap_or_else(|| self.endpoint.limits());
        if let Some(total) = self.total {
            limits = Limits { total, bytes_per_second: u64::MAX, ..limits };
        }
        limits.no_progress = self.stall.unwrap_or(limits.no_progress);
        limits
    }

    /// Sets whether a checksum goes along with each block over sockets, in place of what the endpoint says.
    ///
    /// A block that does not arrive as it was sent is then an error that names it. So is one that somebody changes while
    /// it is being sent.
    pub fn checked(mut self, checked: bool) -> Request<'a> {
        self.checked = Some(checked);
        self
    }

    /// Restricts the paths for this request. It can only narrow what the import allowed.
    pub fn routing(mut self, routing: Routing) -> Request<'a> {
        self.routing = Some(routing);
        self
    }

    /// Puts the copy into the order of a CUDA stream: it begins when what is queued there by now is done, and what is queued
    /// there afterwards begins when it is done. The host waits for neither.
    ///
    /// The copy must be one that a GPU makes by itself: one side is memory of a GPU, and the other is too, or is pinned or
    /// shared host memory of this machine. Otherwise the transfer ends with `Unsupported`, and nothing has moved.
    /// A transfer that ends at its deadline, or is cancelled, while the stream is not yet there may not be
    /// [quiet](crate::Transfer::quiet) then: GPUs cannot be told to forget a copy.
    ///
    /// # Safety
    /// The handle is that of a live CUDA stream of this process, and stays so until the transfer has ended.
    #[allow(unsafe_code, reason = "the signature passes an obligation to the caller")]
    pub unsafe fn stream(mut self, stream: StreamHandle) -> Request<'a> {
        self.stream = Some(stream);
        self
    }

    /// Leaves every copy to the workers, whatever its size: for one of many that are started together.
    pub(crate) fn by_workers(mut self, by_workers: bool) -> Request<'a> {
        self.by_workers = by_workers;
        self
    }

    /// Tells that how it ended, before anybody who waits. Not called where [`start`](Self::start) fails.
    pub(crate) fn then(mut self, then: OnEnd) -> Request<'a> {
        self.then = Some(then);
        self
    }

    /// Checks and starts. An error here means that no byte has moved.
    ///
    /// It takes some dozen microseconds, whatever the size (more where the caller loses its processor meanwhile): what takes longer is
    /// left to the workers, and to a caller that [waits](Transfer::wait). So is the check of long lists: see [`blocks`](Self::blocks).
    pub fn start(self) -> Result<Transfer> {
        let (op, remote) = (self.op.name(), self.remote);
        self.begin().map_err(|error| error.during(op).with_peer(&**remote.peer()))
    }

    #[inline]
    fn begin(mut self) -> Result<Transfer> {
        fork::guard(self.op.name())?;
        self.endpoint.registry.check_open(self.op.name())?;
        if !self.remote.is_of(self.endpoint) {
            return Err(Error::invalid(
                self.op.name(),
                "the remote region was imported by another endpoint: import its ticket with this one",
            ));
        }
        self.check_rights()?;
        self.check_after()?;
        let (way, counters) = self.remote.pick(self.needs(), self.routing.as_ref())?;
        let (attachment, path) = (Arc::clone(&way.attachment), way.path);
        attachment.ready().map_err(|error| error.on(path))?;
        let local = match &self.local {
            Some(span) => {
                if !Arc::ptr_eq(&span.core().registry, &self.endpoint.registry) {
                    return Err(Error::invalid(
                        self.op.name(),
                        "the local region belongs to another endpoint",
                    ));
                }
                if span.core().place == Place::Disk {
                    return Err(Error::new(
                        Kind::Unsupported,
                        self.op.name(),
                        "no path moves bytes from or to a local file",
                    ));
                }
                Some(span.core().begin_use(self.op.name())?)
            }
            None => None,
        };
        // By the same transport, and so counted with it.
        let attachment = match local.as_ref().map(|local| local.core().place) {
            Some(Place::Cuda(_)) => gpu::serving(attachment, self.op),
            _ => attachment,
        };
        self.check_stream()?;
        let base = self.local.as_ref().map_or(0, |span| span.core().addr + span.offset());
        let mut begun = None;
        let mut given = None;
        if let (What::Blocks(list), Some(used), false, None) =
            (&self.what, &local, self.by_workers, self.stream)
            && [self.remote.place(), used.core().place].iter().any(|place| matches!(place, Place::Cuda(_)))
            // A GPU takes the indices as they are.
            && let Some(indexed) = list.indexed()
            && indexed.fits(self.remote.len(), self.local.as_ref().map_or(0, |span| span.len() as u64))
        {
            begun = attachment.begin_blocks(self.op, used, base, &indexed, &self.after);
            let bytes = indexed.bytes()?;
            given = begun.is_some().then_some((bytes, indexed.count(), indexed.block_len()));
        }
        if begun.is_none() && self.stream.is_none() {
            let (bytes, blocks) = self.size()?;
            if attachment.starts_later(self.op, bytes, blocks) {
                return self.begin_later(attachment, counters, local, base, (bytes, blocks));
            }
        }
        let (pieces, bytes, blocks) = match given {
            Some((bytes, blocks, block_len)) => {
                (Pieces::Many(Plan::of_blocks(bytes, block_len)?), bytes, blocks)
            }
            None => self.pieces()?,
        };
        check_elements(self.op, pieces.as_slice())?;
        let begun = match &local {
            _ if begun.is_some() => begun,
            Some(local) if !self.by_workers && self.stream.is_none() => {
                attachment.begin(self.op, local, base, pieces.as_slice(), bytes, &self.after)
            }
            _ => None,
        };
        let (ended, going) = match begun {
            Some(Begun::Ended(ended)) => (Some(ended), None),
            Some(Begun::Going(going)) => (None, Some(going)),
            None => (None, None),
        };
        let ended = if self.by_workers || self.stream.is_some() || ended.is_some() || going.is_some() {
            ended
        } else {
            // SAFETY: `local` is a use of the local region that lives through the call, and `pieces` was checked
            // against the span that lies within it.
            unsafe { attachment.run_now(self.op, base as *mut u8, pieces.as_slice(), bytes, &self.after) }
        };
        if let Some(ended) = ended {
            drop(local);
            let result =
                ended.map_err(|error| error.on(path).with_peer(&**self.remote.peer()).during(self.op.name()));
            let value = result.as_ref().ok().copied().flatten();
            let result = result.map(|_| ());
            counters.count(self.op, bytes, &result);
            if let Some(then) = &self.then {
                then(&result);
            }
            return Ok(Transfer::done(path, bytes, blocks, value, result));
        }
        let plan = pieces.into_plan()?;
        let parts = self.parts(Arc::clone(&attachment), counters, local, base, plan, bytes);
        let core = match going {
            Some(going) => {
                let core = TransferCore::begin_whole(parts);
                going.report_to(&core);
                core
            }
            None => {
                let core =
                    TransferCore::begin(parts).map_err(|error| error.on(path).during(self.op.name()))?;
                attachment.start(&core);
                core
            }
        };
        Ok(Transfer::live(core))
    }

    #[inline]
    fn parts(
        &mut self,
        attachment: Arc<dyn Attachment>,
        counters: &Arc<Counters>,
        local: Option<RegionUse>,
        local_base: usize,
        plan: Plan,
        bytes: u64,
    ) -> Parts {
        let (op, then, counters) = (self.op, self.then.take(), Arc::clone(counters));
        Parts {
            id: transfer::next_id(),
            op,
            plan,
            local,
            local_base,
            after: std::mem::take(&mut self.after),
            stream: self.stream,
            limits: self.all_limits(),
            checked: self.checked.unwrap_or_else(|| self.endpoint.checksums()),
            attachment,
            peer: Arc::clone(self.remote.peer()),
            on_end: Box::new(move |result| {
                counters.count(op, bytes, result);
                if let Some(then) = &then {
                    then(result);
                }
            }),
        }
    }

    /// Leaves the planning, the checks of each block, and the start to a worker.
    #[inline]
    fn begin_later(
        mut self,
        attachment: Arc<dyn Attachment>,
        counters: &Arc<Counters>,
        local: Option<RegionUse>,
        base: usize,
        (bytes, blocks): (u64, u64),
    ) -> Result<Transfer> {
        let (op, remote_len) = (self.op, self.remote.len());
        let local_len = self.local.as_ref().map_or(0, |span| span.len() as u64);
        // One range is checked as quickly as that.
        let range = match self.what {
            What::Span(remote, local, len) => Some(What::Span(remote, local, len)),
            What::Whole => Some(What::Whole),
            _ => None,
        };
        if let Some(range) = range {
            check_elements(op, checked(op, range, remote_len, local_len)?.0.as_slice())?;
        }
        let what = std::mem::replace(&mut self.what, What::Whole).into_owned(op)?;
        let parts = self.parts(attachment, counters, local, base, Plan::nothing(), bytes);
        let planning = move || {
            let pieces = checked(op, what, remote_len, local_len)?.0;
            check_elements(op, pieces.as_slice())?;
            pieces.into_plan()
        };
        Ok(Transfer::live(TransferCore::begin_later(parts, bytes, blocks, Box::new(planning))))
    }

    fn needs(&self) -> Capabilities {
        let needs = match self.op {
            Op::Read => Capabilities::READ,
            Op::Write => Capabilities::WRITE,
            Op::Reduce(..) => Capabilities::REDUCE,
            Op::Atomic { .. } => Capabilities::ATOMIC,
        };
        if self.after.signal.is_some() { needs | Capabilities::SIGNAL } else { needs }
    }

    fn check_rights(&self) -> Result<()> {
        let needed = match self.op {
            Op::Read if self.after.signal.is_some() => Access::READ_WRITE,
            Op::Read => Access::READ,
            // A message alone touches no memory.
            Op::Write if self.local.is_none() && self.after.signal.is_none() => Access::NONE,
            _ => Access::WRITE,
        };
        let held = self.remote.access();
        if held.contains(needed) {
            return self.remote.check_lease(self.op.name());
        }
        Err(Error::new(
            Kind::PermissionDenied,
            self.op.name(),
            format!("the ticket allows {held}, and this needs {needed}"),
        ))
    }

    fn check_after(&self) -> Result<()> {
        let plain = Capabilities::READ | Capabilities::WRITE;
        match self.remote.place() {
            Place::Host => {}
            _ if plain.contains(self.needs()) => {}
            place => return Err(no_words(self.op.name(), place)),
        }
        let word = match (self.op, self.after.signal) {
            (Op::Atomic { offset, .. }, _) => Some(offset),
            (_, Some(signal)) => Some(signal.offset),
            _ => None,
        };
        if let Some(offset) = word
            && offset.checked_add(8).is_none_or(|end| end > self.remote.len())
        {
            return Err(Error::invalid(
                self.op.name(),
                format!("the word at offset {offset} does not lie within {} bytes", self.remote.len()),
            ));
        }
        match &self.after.notify {
            Some(message) if message.len() > MAX_MESSAGE => Err(Error::invalid(
                self.op.name(),
                format!("a message has at most {MAX_MESSAGE} bytes, not {}", message.len()),
            )),
            _ => Ok(()),
        }
    }

    #[inline]
    fn check_stream(&self) -> Result<()> {
        let on_gpu = |place| matches!(place, Place::Cuda(_));
        let local = self.local.as_ref().map(|span| span.core().place);
        if self.stream.is_none() || on_gpu(self.remote.place()) || local.is_some_and(on_gpu) {
            return Ok(());
        }
        Err(Error::invalid(self.op.name(), "a stream orders copies on a GPU, and neither side is on one"))
    }

    /// The bytes and the blocks that are asked for. Looks at no list.
    #[inline]
    fn size(&self) -> Result<(u64, u64)> {
        let Some(span) = &self.local else { return Ok((0, 1)) };
        match &self.what {
            What::Whole => Ok((span.len() as u64, 1)),
            What::Span(.., len) => Ok((*len, 1)),
            What::Plan(Ok(plan)) => Ok((plan.bytes(), plan.block_count())),
            What::Plan(Err(error)) => Err(error.clone()),
            What::Spans(spans) => Ok((sum(spans)?, spans.len() as u64)),
            What::Blocks(list) => list.size(),
        }
    }

    /// The checked pieces, their bytes and their blocks.
    fn pieces(&mut self) -> Result<(Pieces, u64, u64)> {
        let Some(span) = &self.local else { return Ok((Pieces::None, 0, 1)) };
        let local_len = span.len() as u64;
        checked(self.op, std::mem::replace(&mut self.what, What::Whole), self.remote.len(), local_len)
    }
}

impl What<'_> {
    fn into_owned(self, op: Op) -> Result<What<'static>> {
        Ok(match self {
            What::Whole => What::Whole,
            What::Span(remote, local, len) => What::Span(remote, local, len),
            What::Plan(plan) => What::Plan(plan),
            What::Spans(Cow::Borrowed(spans)) => What::Spans(Cow::Owned(room::copy(op.name(), spans)?)),
            What::Spans(Cow::Owned(spans)) => What::Spans(Cow::Owned(spans)),
            What::Blocks(list) => What::Blocks(Box::new(list.into_owned()?)),
        })
    }
}

/// A reduction acts on whole elements, all of them aligned alike: otherwise some would be applied and others not.
fn check_elements(op: Op, pieces: &[Piece]) -> Result<()> {
    let Op::Reduce(_, dtype) = op else { return Ok(()) };
    let size = dtype.size() as u64;
    let first = pieces.first().map_or(0, |piece| piece.remote % size);
    match pieces.iter().find(|piece| !piece.len.is_multiple_of(size) || piece.remote % size != first) {
        None => Ok(()),
        Some(piece) => Err(Error::invalid(
            op.name(),
            format!("{} bytes at offset {} are not whole elements of {dtype}", piece.len, piece.remote),
        )),
    }
}

fn sum(spans: &[(u64, u64, u64)]) -> Result<u64> {
    spans
        .iter()
        .try_fold(0u64, |sum, (.., len)| sum.checked_add(*len))
        .ok_or_else(|| Error::invalid("layout", "the bytes to move do not fit in 64 bits"))
}

/// The pieces of what is asked for, which lie within both sides; their bytes and their blocks.
fn checked(op: Op, what: What<'_>, remote_len: u64, local_len: u64) -> Result<(Pieces, u64, u64)> {
    let (remote, local, len) = match what {
        What::Whole => (0, 0, local_len),
        What::Span(remote, local, len) => (remote, local, len),
        what @ (What::Plan(_) | What::Spans(_) | What::Blocks(_)) => {
            let plan = match what {
                What::Plan(plan) => plan?,
                What::Spans(spans) => Plan::spans(&spans)?,
                What::Blocks(list) => list.plan()?,
                _ => Plan::nothing(),
            };
            plan.check_bounds(remote_len, local_len)?;
            if plan.is_empty() {
                return Err(Error::invalid(op.name(), "a transfer of no bytes"));
            }
            let (bytes, blocks) = (plan.bytes(), plan.block_count());
            return Ok((Pieces::Many(plan), bytes, blocks));
        }
    };
    let inside = |offset: u64, whole: u64| offset.checked_add(len).is_some_and(|end| end <= whole);
    if len == 0 {
        return Err(Error::invalid(op.name(), "a transfer of no bytes"));
    }
    if !inside(remote, remote_len) {
        return Err(Error::invalid(
            op.name(),
            format!("{len} bytes at offset {remote} do not lie within the remote's {remote_len} bytes"),
        ));
    }
    if !inside(local, local_len) {
        return Err(Error::invalid(
            op.name(),
            format!("{len} bytes at offset {local} do not lie within the local {local_len} bytes"),
        ));
    }
    Ok((Pieces::One([Piece { remote, local, len }]), len, 1))
}

/// One piece needs no allocation: small reads are the ones that are counted in nanoseconds.
enum Pieces {
    None,
    One([Piece; 1]),
    Many(Plan),
}

impl Pieces {
    fn as_slice(&self) -> &[Piece] {
        match self {
            Pieces::None => &[],
            Pieces::One(piece) => piece,
            Pieces::Many(plan) => plan.pieces(),
        }
    }

    fn into_plan(self) -> Result<Plan> {
        match self {
            Pieces::None => Plan::spans(&[]),
            Pieces::One([piece]) => Plan::span(piece.remote, piece.local, piece.len),
            Pieces::Many(plan) => Ok(plan),
        }
    }
}
