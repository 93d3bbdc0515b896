//! A request before it starts: what to move, and how.
#![allow(unsafe_code, reason = "takes a stream that the caller vouches for")]

use std::any::Any;
use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use super::part::Part;
use super::stats::Counters;
use super::{EndpointCore, Remote};
use crate::cuda::StreamHandle;
use crate::layout::{IndexList, Layout, Listed};
use crate::memory::Place;
use crate::notify::MAX_MESSAGE;
use crate::region::{Span, no_words};
use crate::route::{Capabilities, Routing};
use crate::transfer::submission::{Link, Started, Submission, SubmittedPart, Terms, What, naming};
use crate::transfer::{After, Limits, OnEnd, Op, Several, Signal, Transfer};
use crate::transport::UsablePath;
use crate::transport::joint::Joint;
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
    op: Op,
    parts: Result<Several<Part<'a>>>,
    after: After,
    limits: Option<Limits>,
    /// Both set one of them, whatever else is said.
    total: Option<Duration>,
    stall: Option<Duration>,
    checked: Option<bool>,
    routing: Option<Box<Routing>>,
    stream: Option<StreamHandle>,
    by_workers: bool,
    then: Option<OnEnd>,
}

impl<'a> Request<'a> {
    #[inline]
    pub(super) fn new(endpoint: &'a Arc<EndpointCore>, op: Op, part: Part<'a>) -> Self {
        Request::over(endpoint, op, Ok(Several::one(part)))
    }

    /// Over several regions of one peer.
    pub(super) fn of_parts(
        endpoint: &'a Arc<EndpointCore>,
        op: Op,
        parts: impl IntoIterator<Item = Part<'a>>,
    ) -> Self {
        Request::of_some(endpoint, op, Several::of(op.name(), parts))
    }

    /// Over the parts that there are, if there are any.
    pub(super) fn of_some(
        endpoint: &'a Arc<EndpointCore>,
        op: Op,
        parts: Result<Option<Several<Part<'a>>>>,
    ) -> Self {
        let none = || Error::invalid(op.name(), "a transfer of no parts");
        Request::over(endpoint, op, parts.and_then(|parts| parts.ok_or_else(none)))
    }

    #[inline]
    fn over(endpoint: &'a Arc<EndpointCore>, op: Op, parts: Result<Several<Part<'a>>>) -> Self {
        Request {
            endpoint,
            op,
            parts,
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

    /// Says what moves, in every part. The request stays where it is: to move one takes as long as much of the rest.
    #[inline]
    fn moves(&mut self, what: What<'a>) {
        if let Ok(parts) = &mut self.parts {
            if parts.len() > 1 {
                move_alike(parts, &what);
            }
            parts[0].what = what;
        }
    }

    /// Moves `len` bytes between those offsets. Of several parts, in each: [`Part`] says it of one.
    #[inline]
    pub fn at(mut self, remote: u64, local: u64, len: u64) -> Request<'a> {
        self.moves(What::Span(remote, local, len));
        self
    }

    /// Moves several ranges, each given as remote offset, local offset and length. A list that is handed over, as a `Vec`, is
    /// not copied.
    #[inline]
    pub fn spans(mut self, spans: impl Into<Cow<'a, [(u64, u64, u64)]>>) -> Request<'a> {
        self.moves(What::Spans(spans.into()));
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
    #[inline]
    pub fn blocks(
        mut self,
        remote: &Layout,
        remote_indices: impl Into<IndexList<'a>>,
        local: &Layout,
        local_indices: impl Into<IndexList<'a>>,
    ) -> Request<'a> {
        let listed = Listed::new(remote, remote_indices.into(), local, local_indices.into());
        self.moves(What::Blocks(Box::new(listed)));
        self
    }

    /// Raises a 64-bit counter of the remote region, of the first part's where there are several, once all bytes are visible to its
    /// owner.
    pub fn signal(self, offset: u64, add: u64) -> Request<'a> {
        self.signal_in(0, offset, add)
    }

    /// Raises a 64-bit counter of the remote region of that part, counted from 0, once all bytes of all parts are visible to the owner.
    pub fn signal_in(mut self, part: usize, offset: u64, add: u64) -> Request<'a> {
        self.after.signal = Some(Signal { part, offset, add });
        self
    }

    /// Hands the owner a message, once, when all bytes of all parts are visible to it (for a read: once they have been read).
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
    /// A block that does not arrive as it was sent is then an error that names it. So is one that others change while
    /// it is being sent, or replace while it arrives.
    pub fn checked(mut self, checked: bool) -> Request<'a> {
        self.checked = Some(checked);
        self
    }

    /// Restricts the paths for this request. It can only narrow what the import allowed.
    pub fn routing(mut self, routing: Routing) -> Request<'a> {
        self.routing = Some(Box::new(routing));
        self
    }

    /// Puts the copy into the order of a CUDA stream: it begins when what is queued there by now is done, and what is queued
    /// there afterwards begins when it is done. The host waits for neither.
    ///
    /// The copy must be one that a GPU makes by itself: one side is memory of a GPU, and the other is too, or is pinned or
    /// shared host memory of this machine. Otherwise the transfer ends with `Unsupported`, and nothing has moved.
    /// A transfer that ends at its deadline, or is cancelled, while the stream is not yet there may not be
    /// [quiet](crate::Transfer::quiet) then: GPUs cannot abandon a copy.
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

    /// Calls `then` with how it ended, before any waiter learns of it. Not called where [`start`](Self::start) fails.
    pub(crate) fn then(mut self, then: OnEnd) -> Request<'a> {
        self.then = Some(then);
        self
    }

    /// Checks and starts. An error here means that no byte has moved.
    ///
    /// It takes some dozen microseconds, whatever the size (more where the caller loses its processor meanwhile): what takes longer is
    /// left to the workers, and to a caller that [waits](Transfer::wait). So is the check of long lists: see [`blocks`](Self::blocks).
    pub fn start(mut self) -> Result<Transfer> {
        let op = self.op.name();
        let peer = self.parts.as_ref().ok().map(|parts| parts.first().remote.peer());
        self.begin().map_err(|error| {
            let error = error.during(op);
            match peer {
                Some(peer) => error.with_peer(&**peer),
                None => error,
            }
        })
    }

    #[inline]
    fn begin(&mut self) -> Result<Transfer> {
        fork::guard(self.op.name())?;
        self.endpoint.registry.check_open(self.op.name())?;
        let asked = self.parts.as_ref().map_err(Error::clone)?;
        if let Some(signal) = self.after.signal
            && signal.part >= asked.len()
        {
            let message = format!("a signal in part {} of {}", signal.part, asked.len());
            return Err(Error::invalid(self.op.name(), message));
        }
        let (first, count) = (asked.first().remote, asked.len());
        let named = |index, error| naming(index, count, error);
        let part = asked.first();
        let (path, of_path) = self.prepare(0, first, part).map_err(|error| named(0, error))?;
        let local = part.begin_use(self.op).map_err(|error| named(0, error))?;
        let (range, near) = (part.range(), part.is_on_gpu());
        let mut counters = Several::one(of_path);
        let mut others = Vec::new();
        let mut together = true;
        for index in 1..count {
            let part = &self.parts.as_ref().map_err(Error::clone)?[index];
            let (next, of_next) = self.prepare(index, first, part).map_err(|error| named(index, error))?;
            let local = part.begin_use(self.op).map_err(|error| named(index, error))?;
            together &= go_together(next, path) && part.is_on_gpu() == near;
            counters.push(self.op.name(), of_next)?;
            let (base, within) = part.range();
            let what = self.take_what(index);
            let part = SubmittedPart::new(&next.attachment.link, local, base, what, within);
            room::push(self.op.name(), &mut others, part)?;
        }
        let terms = Terms {
            after: std::mem::take(&mut self.after),
            stream: self.stream,
            limits: self.all_limits(),
            checked: self.checked.unwrap_or_else(|| self.endpoint.checksums()),
            peer: first.peer(),
            inline: !self.by_workers,
            portion: false,
            above: None,
        };
        let what = self.take_what(0);
        let (op, then) = (self.op, &mut self.then);
        let counted = &counters;
        let mut on_end = |parts: &Several<SubmittedPart<'_>>| counting(op, counted, parts, then.take());
        // Made where it stays: it is large, and what a small request takes is the time to move it.
        let (base, within) = range;
        let part = SubmittedPart::new(&path.attachment.link, local, base, what, within);
        let parts = Several::with(part, others);
        let mut submission = Submission::new(op, parts, terms, &mut on_end);
        let joint = if together { None } else { Some(joint(op, &submission.parts, path.name)?) };
        let link = joint.as_ref().unwrap_or(&path.attachment.link);
        let ended = match link.submit(&mut submission)? {
            Started::Done(ended) => ended,
            Started::Running(core) => return Ok(Transfer::live(core)),
            Started::Deferred => return submission.defer(Arc::clone(link)).map(Transfer::live),
        };
        let ended = ended.map_err(|error| error.on(path.name).with_peer(&**first.peer()).during(op.name()));
        submission.release();
        let transfer = Transfer::done(&submission, path.name, ended);
        let result = transfer.result().unwrap_or(Ok(()));
        match submission.parts.len() {
            1 => counters.first().count(op, transfer.bytes(), &result),
            _ => {
                let bytes = submission.parts.iter().map(|part| part.asked().0);
                for (counters, bytes) in each_path(counters.iter().copied(), bytes) {
                    counters.count(op, bytes, &result);
                }
            }
        }
        if let Some(then) = then {
            then(&result, &transfer.failures());
        }
        Ok(transfer)
    }

    /// Takes out what moves in a part: a small request notices each time that more of it is moved.
    #[inline]
    fn take_what(&mut self, index: usize) -> What<'a> {
        let part = self.parts.as_mut().ok().map(|parts| &mut parts[index]);
        part.map_or(What::Nothing, |part| std::mem::replace(&mut part.what, What::Nothing))
    }

    /// Checks one part, and finds its path.
    #[inline]
    fn prepare<'r>(
        &self,
        index: usize,
        first: &Remote,
        part: &Part<'r>,
    ) -> Result<(&'r UsablePath, &'r Arc<Counters>)> {
        let remote = part.remote;
        Request::check_sides(self.op.name(), self.endpoint, first, remote, part.local.as_ref())?;
        let signal = self.after.signal.filter(|signal| signal.part == index);
        self.check_rights(part, signal)?;
        self.check_after(remote, signal)?;
        let (path, counters) = remote.pick(self.needs(signal), self.routing.as_deref())?;
        path.attachment.ready().map_err(|error| error.on(path.name))?;
        self.check_stream(part)?;
        Ok((path, counters))
    }

    /// Checks that both sides of a part are this endpoint's, that its owner is that of the first part, and that bytes can move between them.
    #[inline]
    pub(super) fn check_sides(
        op: &'static str,
        endpoint: &Arc<EndpointCore>,
        first: &Remote,
        remote: &Remote,
        local: Option<&Span>,
    ) -> Result<()> {
        if !remote.is_of(endpoint) {
            return Err(Error::invalid(
                op,
                "the remote region was imported by another endpoint: import its ticket with this one",
            ));
        }
        if !remote.has_owner_of(first) {
            let message = format!(
                "its region is one of {}, and that of part 0 one of {}: a transfer has one peer",
                remote.peer(),
                first.peer()
            );
            return Err(Error::invalid(op, message));
        }
        let Some(span) = local else { return Ok(()) };
        if !Arc::ptr_eq(&span.core().registry, &endpoint.registry) {
            return Err(Error::invalid(op, "the local region belongs to another endpoint"));
        }
        if span.core().place == Place::Disk {
            let message = "no path moves bytes from or to a local file";
            return Err(Error::new(Kind::Unsupported, op, message));
        }
        Ok(())
    }

    fn needs(&self, signal: Option<Signal>) -> Capabilities {
        let needs = match self.op {
            Op::Read => Capabilities::READ,
            Op::Write => Capabilities::WRITE,
            Op::Reduce(..) => Capabilities::REDUCE,
            Op::Atomic { .. } => Capabilities::ATOMIC,
        };
        if signal.is_some() { needs | Capabilities::SIGNAL } else { needs }
    }

    fn check_rights(&self, part: &Part<'_>, signal: Option<Signal>) -> Result<()> {
        let needed = match self.op {
            Op::Read if signal.is_some() => Access::READ_WRITE,
            Op::Read => Access::READ,
            // A message alone touches no memory.
            Op::Write if part.local.is_none() && signal.is_none() => Access::NONE,
            _ => Access::WRITE,
        };
        let held = part.remote.access();
        if held.contains(needed) {
            return part.remote.check_lease(self.op.name());
        }
        let message = format!("the ticket allows {held}, and this needs {needed}");
        Err(Error::new(Kind::PermissionDenied, self.op.name(), message))
    }

    fn check_after(&self, remote: &Remote, signal: Option<Signal>) -> Result<()> {
        let plain = Capabilities::READ | Capabilities::WRITE;
        match remote.place() {
            Place::Host => {}
            _ if plain.contains(self.needs(signal)) => {}
            place => return Err(no_words(self.op.name(), place)),
        }
        let word = match (self.op, signal) {
            (Op::Atomic { offset, .. }, _) => Some(offset),
            (_, Some(signal)) => Some(signal.offset),
            _ => None,
        };
        if let Some(offset) = word
            && offset.checked_add(8).is_none_or(|end| end > remote.len())
        {
            let message = format!("the word at offset {offset} does not lie within {} bytes", remote.len());
            return Err(Error::invalid(self.op.name(), message));
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
    fn check_stream(&self, part: &Part<'_>) -> Result<()> {
        if self.stream.is_none() || matches!(part.remote.place(), Place::Cuda(_)) || part.is_on_gpu() {
            return Ok(());
        }
        Err(Error::invalid(self.op.name(), "a stream orders copies on a GPU, and neither side is on one"))
    }
}

/// Whether regions of one owner that take these paths go over one link.
fn go_together(one: &UsablePath, other: &UsablePath) -> bool {
    let kind = |path: &UsablePath| {
        let link: &dyn Any = &*path.attachment.link;
        link.type_id()
    };
    one.name == other.name && kind(one) == kind(other)
}

/// Says what moves in the parts behind the first.
#[cold]
fn move_alike<'a>(parts: &mut Several<Part<'a>>, what: &What<'a>) {
    for index in 1..parts.len() {
        parts[index].what = what.clone();
    }
}

fn on_gpu(part: &SubmittedPart<'_>) -> bool {
    part.near().is_some_and(|near| matches!(near.place, Place::Cuda(_)))
}

/// Who divides parts that need several links: those that need the same stay together.
#[cold]
fn joint(op: Op, parts: &Several<SubmittedPart<'_>>, path: &'static str) -> Result<Arc<dyn Link>> {
    let mut groups: Vec<(_, Vec<usize>)> = Vec::new();
    for (index, part) in parts.iter().enumerate() {
        let link: &dyn Any = &**part.region;
        let link = (link.type_id(), part.region.path(), on_gpu(part));
        match groups.iter_mut().find(|(of, _)| *of == link) {
            Some((_, group)) => room::push(op.name(), group, index)?,
            None => groups.push((link, vec![index])),
        }
    }
    Ok(Joint::over(groups.into_iter().map(|(_, group)| group).collect(), path))
}

/// Counts the end of a transfer on each of its paths, and calls what was given to be called then.
fn counting(
    op: Op,
    counters: &Several<&Arc<Counters>>,
    parts: &Several<SubmittedPart<'_>>,
    then: Option<OnEnd>,
) -> OnEnd {
    if let (1, part) = (parts.len(), parts.first()) {
        let (counters, bytes) = (Arc::clone(counters.first()), part.asked().0);
        return Box::new(move |result, failures| {
            counters.count(op, bytes, result);
            if let Some(then) = &then {
                then(result, failures);
            }
        });
    }
    let bytes = parts.iter().map(|part| part.asked().0);
    let each: Vec<_> = each_path(counters.iter().copied(), bytes)
        .into_iter()
        .map(|(counters, bytes)| (Arc::clone(counters), bytes))
        .collect();
    Box::new(move |result, failures| {
        each.iter().for_each(|(counters, bytes)| counters.count(op, *bytes, result));
        if let Some(then) = &then {
            then(result, failures);
        }
    })
}

/// The paths that a transfer takes, with the bytes that each of them moves.
fn each_path<'c>(
    counters: impl IntoIterator<Item = &'c Arc<Counters>>,
    bytes: impl Iterator<Item = u64>,
) -> Vec<(&'c Arc<Counters>, u64)> {
    let mut each: Vec<(&Arc<Counters>, u64)> = Vec::new();
    for (counters, bytes) in counters.into_iter().zip(bytes) {
        match each.iter_mut().find(|(known, _)| Arc::ptr_eq(known, counters)) {
            Some((_, sum)) => *sum += bytes,
            None => each.push((counters, bytes)),
        }
    }
    each
}
