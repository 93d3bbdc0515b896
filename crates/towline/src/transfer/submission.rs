//! What is handed to a path: any number of parts, and one end.

use std::any::Any;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use super::several::Several;
use super::{After, Limits, OnEnd, Op, TransferCore};
use crate::cuda::StreamHandle;
use crate::layout::{Indexed, Listed, Piece, Plan};
use crate::memory::Place;
use crate::region::{RegionCore, RegionUse};
use crate::{Error, Kind, Result, room};

/// A transport opened to a peer, by way of one region that is attached to it: all that a transfer knows of a path.
pub(crate) trait Link: Any + Send + Sync {
    /// The name of the path.
    fn path(&self) -> &'static str;

    /// Starts a submission: nothing else starts work. All of its parts are attached to the link of this one, which is the first
    /// of them. An error means that no byte has moved.
    fn submit(&self, submission: &mut Submission<'_>) -> Result<Started>;

    /// Makes a transfer quiet and lets its remaining units report. Never waits for the peer.
    fn stop(&self, transfer: &Arc<TransferCore>);

    /// Whether the calling thread moves that many bytes in that many pieces of host memory itself, where it may.
    fn is_inline(&self, _bytes: u64, _pieces: usize) -> bool {
        false
    }
}

/// What became of a submission in the call that handed it over.
pub(crate) enum Started {
    /// It has ended; with the word that an atomic operation found.
    Done(Result<Option<u64>>),
    /// It goes on behind the call, as that transfer.
    Running(Arc<TransferCore>),
    /// Nothing has been done: to plan and start it takes longer than to call a worker, who submits it again. Not a result for one that
    /// is not [deferrable](Submission::deferrable).
    Deferred,
}

/// What is to be moved between one remote region and one local one.
pub(crate) enum What<'a> {
    /// No bytes: something else is asked for.
    Nothing,
    /// The whole local range, from or to the start of the remote region.
    Whole,
    /// That many bytes between those offsets.
    Span(u64, u64, u64),
    /// Boxed, as all that few requests have: a request is moved several times before it starts.
    Plan(Result<Box<Plan>>),
    Spans(Cow<'a, [(u64, u64, u64)]>),
    Blocks(Box<Listed<'a>>),
}

impl Clone for What<'_> {
    fn clone(&self) -> Self {
        match self {
            What::Nothing => What::Nothing,
            What::Whole => What::Whole,
            What::Span(remote, local, len) => What::Span(*remote, *local, *len),
            What::Plan(plan) => What::Plan(plan.clone()),
            What::Spans(spans) => What::Spans(spans.clone()),
            What::Blocks(list) => What::Blocks(list.clone()),
        }
    }
}

impl What<'_> {
    /// The one range that moves, where there is one: remote offset, local offset and length.
    #[inline]
    fn range(&self, local_len: u64) -> Option<(u64, u64, u64)> {
        match self {
            What::Whole => Some((0, 0, local_len)),
            What::Span(remote, local, len) => Some((*remote, *local, *len)),
            _ => None,
        }
    }

    fn into_owned(self, op: Op) -> Result<What<'static>> {
        Ok(match self {
            What::Nothing => What::Nothing,
            What::Whole => What::Whole,
            What::Span(remote, local, len) => What::Span(remote, local, len),
            What::Plan(plan) => What::Plan(plan),
            What::Spans(Cow::Borrowed(spans)) => What::Spans(Cow::Owned(room::copy(op.name(), spans)?)),
            What::Spans(Cow::Owned(spans)) => What::Spans(Cow::Owned(spans)),
            What::Blocks(list) => What::Blocks(Box::new(list.into_owned()?)),
        })
    }
}

/// One part of a submission: a region of the peer, a local one, and what moves between them.
pub(crate) struct SubmittedPart<'a> {
    /// The peer's region, attached to a link.
    pub(crate) region: &'a Arc<dyn Link>,
    /// The use of the local region, which lasts until the end; `None` if there is no local region, or another keeps it.
    pub(crate) local: Option<RegionUse>,
    /// The local region, where another keeps it in use.
    kept: Option<&'a Arc<RegionCore>>,
    /// The address that local offsets are relative to.
    pub(crate) base: usize,
    pub(crate) what: What<'a>,
    /// The bytes that offsets lie within, there and here.
    pub(crate) within: (u64, u64),
    pieces: Pieces,
    bytes: u64,
    blocks: u64,
}

impl<'a> SubmittedPart<'a> {
    // In place, as the submission.
    #[inline(always)]
    pub(crate) fn new(
        region: &'a Arc<dyn Link>,
        local: Option<RegionUse>,
        base: usize,
        what: What<'a>,
        within: (u64, u64),
    ) -> SubmittedPart<'a> {
        let pieces = Pieces::Unplanned;
        SubmittedPart { region, local, kept: None, base, what, within, pieces, bytes: 0, blocks: 1 }
    }

    /// The local region, where there is one.
    #[inline]
    pub(crate) fn near(&self) -> Option<&Arc<RegionCore>> {
        self.local.as_ref().map(RegionUse::core).or(self.kept)
    }

    /// Says whose use of the local region lasts.
    pub(crate) fn kept(self, kept: Option<&'a Arc<RegionCore>>) -> SubmittedPart<'a> {
        SubmittedPart { kept, ..self }
    }

    /// One whose plan has been checked, and whose local memory another keeps.
    pub(crate) fn planned(region: &'a Arc<dyn Link>, base: usize, plan: Plan) -> SubmittedPart<'a> {
        let (bytes, blocks) = (plan.bytes(), plan.block_count());
        let pieces = if plan.is_empty() { Pieces::None } else { Pieces::Many(Box::new(plan)) };
        SubmittedPart {
            pieces,
            bytes,
            blocks,
            ..SubmittedPart::new(region, None, base, What::Nothing, (u64::MAX, u64::MAX))
        }
    }

    /// The pieces that it moves, once it is planned.
    #[inline]
    pub(crate) fn pieces(&self) -> &[Piece] {
        self.pieces.as_slice()
    }

    /// The bytes and the blocks that are asked for; those of one block, where that cannot be said.
    #[inline]
    pub(crate) fn asked(&self) -> (u64, u64) {
        self.size().unwrap_or((0, 1))
    }

    /// Its blocks by their indices, where each side's lie at equal distances within its region.
    pub(crate) fn indexed(&self) -> Option<Indexed<'_>> {
        let What::Blocks(list) = &self.what else { return None };
        list.indexed().filter(|indexed| indexed.fits(self.within.0, self.within.1))
    }

    /// Its blocks are moved without a list of pieces.
    pub(crate) fn moved_by_index(&mut self, bytes: u64, blocks: u64, block_len: u64) -> Result<()> {
        self.pieces = Pieces::Many(Box::new(Plan::of_blocks(bytes, block_len)?));
        (self.what, self.bytes, self.blocks) = (What::Nothing, bytes, blocks);
        Ok(())
    }

    /// The bytes and the blocks that are asked for. Looks at no list.
    #[inline]
    fn size(&self) -> Result<(u64, u64)> {
        match &self.what {
            _ if !matches!(self.pieces, Pieces::Unplanned) => Ok((self.bytes, self.blocks)),
            What::Nothing => Ok((0, 1)),
            What::Whole => Ok((self.within.1, 1)),
            What::Span(.., len) => Ok((*len, 1)),
            What::Plan(Ok(plan)) => Ok((plan.bytes(), plan.block_count())),
            What::Plan(Err(error)) => Err(error.clone()),
            What::Spans(spans) => Ok((sum(spans)?, spans.len() as u64)),
            What::Blocks(list) => list.size(),
        }
    }

    #[inline]
    fn plan(&mut self, op: Op) -> Result<()> {
        if !matches!(self.pieces, Pieces::Unplanned) {
            return Ok(());
        }
        match self.what.range(self.within.1) {
            Some(range) => {
                check_range(op, range, self.within)?;
                let (remote, local, len) = range;
                self.pieces = Pieces::One([Piece { remote, local, len }]);
                (self.bytes, self.blocks) = (len, 1);
            }
            None => {
                let what = std::mem::replace(&mut self.what, What::Nothing);
                (self.pieces, self.bytes, self.blocks) = checked(op, what, self.within)?;
            }
        }
        check_elements(op, self.pieces.as_slice())
    }
}

/// What a transfer works in: a run of pieces of one part. Each reports once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unit {
    pub(crate) part: usize,
    pub(crate) pieces: Range<usize>,
}

/// One operation on regions of one peer.
pub(crate) struct Submission<'a> {
    pub(crate) op: Op,
    pub(crate) parts: Several<SubmittedPart<'a>>,
    /// What follows the bytes of all parts.
    pub(crate) after: After,
    /// The stream of the caller's that the copy is in order with, where a GPU copies.
    pub(crate) stream: Option<StreamHandle>,
    pub(crate) limits: Limits,
    /// Checksums go along with the bytes, where the path has none of its own.
    pub(crate) checked: bool,
    pub(crate) peer: &'a Arc<str>,
    /// The calling thread may do the work itself.
    pub(crate) inline: bool,
    /// It may be left to a worker.
    pub(crate) deferrable: bool,
    /// A portion of something larger: others are in flight beside it.
    pub(crate) portion: bool,
    /// The transfer that it is some parts of.
    pub(crate) above: Option<&'a Arc<TransferCore>>,
    /// Where it ends in the call, with an error: how many parts have moved, and at which one it was.
    pub(crate) moved: usize,
    pub(crate) reached: usize,
    /// What is notified of its end, where that comes behind the call: made for that many bytes.
    pub(crate) on_end: &'a mut dyn FnMut(&Several<SubmittedPart<'_>>) -> OnEnd,
    /// The transfer that it is already, where a worker submits it again.
    transfer: Option<Arc<TransferCore>>,
}

/// What of a submission is neither a part nor the operation.
pub(crate) struct Terms<'a> {
    pub(crate) after: After,
    pub(crate) stream: Option<StreamHandle>,
    pub(crate) limits: Limits,
    pub(crate) checked: bool,
    pub(crate) peer: &'a Arc<str>,
    pub(crate) inline: bool,
    pub(crate) portion: bool,
    pub(crate) above: Option<&'a Arc<TransferCore>>,
}

impl<'a> Terms<'a> {
    /// Those of some parts of that transfer, which the calling thread may move, and which nothing follows.
    pub(crate) fn under(transfer: &'a Arc<TransferCore>) -> Terms<'a> {
        Terms {
            after: After::default(),
            stream: None,
            limits: transfer.limits,
            checked: transfer.checked,
            peer: transfer.peer(),
            inline: true,
            portion: false,
            above: Some(transfer),
        }
    }
}

impl<'a> Submission<'a> {
    // In place: it is large.
    #[inline(always)]
    pub(crate) fn new(
        op: Op,
        parts: Several<SubmittedPart<'a>>,
        terms: Terms<'a>,
        on_end: &'a mut dyn FnMut(&Several<SubmittedPart<'_>>) -> OnEnd,
    ) -> Submission<'a> {
        let Terms { after, stream, limits, checked, peer, inline, portion, above } = terms;
        Submission {
            op,
            parts,
            after,
            stream,
            limits,
            checked,
            peer,
            inline,
            deferrable: stream.is_none() && !portion && above.is_none(),
            portion,
            above,
            moved: 0,
            reached: 0,
            on_end,
            transfer: None,
        }
    }

    /// A worker hands over what was deferred.
    pub(super) fn again(
        transfer: &'a Arc<TransferCore>,
        plans: Several<Plan>,
        on_end: &'a mut dyn FnMut(&Several<SubmittedPart<'_>>) -> OnEnd,
    ) -> Result<Submission<'a>> {
        let parts = plans.try_map(transfer.op.name(), |index, plan| {
            let part = &transfer.parts[index];
            Ok::<_, Error>(SubmittedPart::planned(&part.region, part.base, plan).kept(transfer.near(index)))
        })?;
        Ok(Submission {
            op: transfer.op,
            parts,
            after: transfer.after.clone(),
            stream: transfer.stream,
            limits: transfer.limits,
            checked: transfer.checked,
            peer: &transfer.peer,
            inline: false,
            deferrable: false,
            portion: false,
            above: None,
            moved: 0,
            reached: 0,
            on_end,
            transfer: Some(Arc::clone(transfer)),
        })
    }

    /// Whether a worker submits what was deferred.
    pub(crate) fn was_deferred(&self) -> bool {
        self.transfer.is_some()
    }

    /// The bytes and the blocks of all parts. Looks at no list.
    #[inline]
    pub(crate) fn size(&self) -> Result<(u64, u64)> {
        let (mut bytes, mut blocks) = self.parts.first().size()?;
        for (index, part) in (1..).zip(self.parts.others()) {
            let (more, count) = part.size().map_err(|error| self.of_part(index, error))?;
            bytes = bytes.checked_add(more).ok_or_else(too_long)?;
            blocks = blocks.checked_add(count).ok_or_else(too_long)?;
        }
        Ok((bytes, blocks))
    }

    /// Makes the list of pieces of each part, checked against both sides.
    #[inline]
    pub(crate) fn plan(&mut self) -> Result<()> {
        let (op, count) = (self.op, self.named());
        for (index, part) in self.parts.iter_mut().enumerate() {
            part.plan(op).map_err(|error| naming(index, count, error))?;
        }
        Ok(())
    }

    /// Whether the local memory of its parts is on GPUs: of all of them, or of none.
    #[inline]
    pub(crate) fn is_on_gpu(&self) -> bool {
        self.parts.first().near().is_some_and(|near| matches!(near.place, Place::Cuda(_)))
    }

    /// The region of a part, as one of the path whose type that is.
    pub(crate) fn attached<T: Link>(&self, part: usize) -> Result<&'a T> {
        let region: &'a dyn Any = &**self.parts[part].region;
        region.downcast_ref::<T>().ok_or_else(|| {
            let message = "a part is attached to another link than the first";
            self.of_part(part, Error::new(Kind::Internal, self.op.name(), message))
        })
    }

    /// An error of one part, which says of which.
    pub(crate) fn of_part(&self, part: usize, error: Error) -> Error {
        naming(part, self.named(), error)
    }

    /// Of how many parts an error names one: the code that divided them names those of some parts.
    pub(crate) fn named(&self) -> usize {
        if self.above.is_some() { 1 } else { self.parts.len() }
    }

    /// Makes a transfer of it that goes on behind the call. The plan of each part is cut into units by `cut`, which adds them to the
    /// list; where `last` names a part, one without pieces follows them, for what follows the bytes. From here on each unit reports
    /// once, and an error means that there is no transfer.
    pub(crate) fn begin(
        &mut self,
        link: Arc<dyn Link>,
        mut cut: impl FnMut(usize, Plan, &mut Vec<Unit>) -> Result<Plan>,
        last: Option<usize>,
    ) -> Result<Arc<TransferCore>> {
        self.plan()?;
        let mut units = Vec::new();
        for (index, part) in self.parts.iter_mut().enumerate() {
            let plan = std::mem::replace(&mut part.pieces, Pieces::None).into_plan()?;
            part.pieces = Pieces::Many(Box::new(cut(index, plan, &mut units)?));
        }
        if units.is_empty() || last.is_some() {
            let part = last.unwrap_or(0);
            let end = self.parts[part].pieces().len();
            room::push(self.op.name(), &mut units, Unit { part, pieces: end..end })?;
        }
        match self.transfer.clone() {
            Some(transfer) => {
                transfer.divide(link, self.take_plans()?, units);
                Ok(transfer)
            }
            None => TransferCore::begin(self, link, units),
        }
    }

    /// [`begin`](Self::begin) for what is in flight already, as one unit for each part.
    pub(crate) fn begin_whole(&mut self, link: Arc<dyn Link>) -> Result<Arc<TransferCore>> {
        self.begin(link, whole, None)
    }

    /// Makes a transfer of it that a worker plans and submits again.
    pub(crate) fn defer(&mut self, link: Arc<dyn Link>) -> Result<Arc<TransferCore>> {
        let (op, count) = (self.op, self.parts.len());
        // One range is checked as quickly as that.
        for index in 0..count {
            let part = &mut self.parts[index];
            (part.bytes, part.blocks) = part.size().map_err(|error| naming(index, count, error))?;
            if let Some(range) = part.what.range(part.within.1) {
                let (remote, local, len) = range;
                check_range(op, range, part.within)
                    .and_then(|()| check_elements(op, &[Piece { remote, local, len }]))
                    .map_err(|error| naming(index, count, error))?;
            }
        }
        let lists = self.each(|_, part| {
            let what = match std::mem::replace(&mut part.pieces, Pieces::None) {
                Pieces::Unplanned => std::mem::replace(&mut part.what, What::Nothing).into_owned(op)?,
                planned => What::Plan(planned.into_plan().map(Box::new)),
            };
            Ok((what, part.within))
        })?;
        let planning = move || {
            lists.try_map(op.name(), |index, (what, within)| {
                let planned = || {
                    let pieces = checked(op, what, within)?.0;
                    check_elements(op, pieces.as_slice())?;
                    pieces.into_plan()
                };
                planned().map_err(|error| naming(index, count, error))
            })
        };
        TransferCore::begin_later(self, link, Box::new(planning))
    }

    /// It has ended: nothing touches its local memory any more.
    #[inline]
    pub(crate) fn release(&mut self) {
        for part in self.parts.iter_mut() {
            part.local = None;
        }
    }

    /// The plans that were made.
    pub(super) fn take_plans(&mut self) -> Result<Several<Plan>> {
        self.each(|_, part| std::mem::replace(&mut part.pieces, Pieces::None).into_plan())
    }

    /// What `f` makes of each part.
    pub(super) fn each<T>(
        &mut self,
        mut f: impl FnMut(usize, &mut SubmittedPart<'a>) -> Result<T>,
    ) -> Result<Several<T>> {
        let first = f(0, &mut self.parts[0])?;
        let mut all = Several::one(first);
        for index in 1..self.parts.len() {
            let one = f(index, &mut self.parts[index])?;
            all.push(self.op.name(), one)?;
        }
        Ok(all)
    }
}

/// For a submission whose end need not be reported, or is reported already.
pub(crate) fn nobody(_: &Several<SubmittedPart<'_>>) -> OnEnd {
    Box::new(|_, _| ())
}

/// One unit for all of a part.
pub(crate) fn whole(part: usize, plan: Plan, units: &mut Vec<Unit>) -> Result<Plan> {
    room::push("transfer", units, Unit { part, pieces: 0..plan.piece_count() })?;
    Ok(plan)
}

/// Whether an error is the owner's or the caller's: it concerns all parts.
pub(crate) fn concerns_all(error: &Error) -> bool {
    matches!(error.kind(), Kind::Canceled | Kind::Disconnected | Kind::Timeout) || error.is_owner_gone()
}

/// An error of one of several parts, which says of which, unless it [concerns all](concerns_all) of them.
pub(crate) fn naming(part: usize, parts: usize, error: Error) -> Error {
    if parts < 2 || concerns_all(&error) {
        return error;
    }
    let message = format!("part {part} of {parts}: {}", error.message());
    error.saying(message)
}

fn too_long() -> Error {
    Error::invalid("layout", "the bytes to move do not fit in 64 bits")
}

/// A reduction acts on whole elements, all of them aligned alike: otherwise some would be applied and others not.
#[inline]
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
    spans.iter().try_fold(0u64, |sum, (.., len)| sum.checked_add(*len)).ok_or_else(too_long)
}

/// The pieces of what is asked for, which lie within both sides; their bytes and their blocks.
fn checked(op: Op, what: What<'_>, within: (u64, u64)) -> Result<(Pieces, u64, u64)> {
    if let Some(range) = what.range(within.1) {
        check_range(op, range, within)?;
        let (remote, local, len) = range;
        return Ok((Pieces::One([Piece { remote, local, len }]), len, 1));
    }
    let plan = match what {
        What::Plan(plan) => plan?,
        What::Spans(spans) => Box::new(Plan::spans(&spans)?),
        What::Blocks(list) => Box::new(list.plan()?),
        _ => return Ok((Pieces::None, 0, 1)),
    };
    plan.check_bounds(within.0, within.1)?;
    if plan.is_empty() {
        return Err(Error::invalid(op.name(), "a transfer of no bytes"));
    }
    let (bytes, blocks) = (plan.bytes(), plan.block_count());
    Ok((Pieces::Many(plan), bytes, blocks))
}

/// Checks that one range lies within both sides.
#[inline]
fn check_range(
    op: Op,
    (remote, local, len): (u64, u64, u64),
    (remote_len, local_len): (u64, u64),
) -> Result<()> {
    let inside = |offset: u64, whole: u64| offset.checked_add(len).is_some_and(|end| end <= whole);
    if len == 0 {
        return Err(Error::invalid(op.name(), "a transfer of no bytes"));
    }
    if !inside(remote, remote_len) {
        let message =
            format!("{len} bytes at offset {remote} do not lie within the remote's {remote_len} bytes");
        return Err(Error::invalid(op.name(), message));
    }
    if !inside(local, local_len) {
        let message = format!("{len} bytes at offset {local} do not lie within the local {local_len} bytes");
        return Err(Error::invalid(op.name(), message));
    }
    Ok(())
}

/// One piece needs no allocation: small reads are the ones that are counted in nanoseconds.
enum Pieces {
    Unplanned,
    None,
    One([Piece; 1]),
    Many(Box<Plan>),
}

impl Pieces {
    #[inline]
    fn as_slice(&self) -> &[Piece] {
        match self {
            Pieces::Unplanned | Pieces::None => &[],
            Pieces::One(piece) => piece,
            Pieces::Many(plan) => plan.pieces(),
        }
    }

    fn into_plan(self) -> Result<Plan> {
        match self {
            Pieces::Unplanned | Pieces::None => Plan::spans(&[]),
            Pieces::One([piece]) => Plan::span(piece.remote, piece.local, piece.len),
            Pieces::Many(plan) => Ok(*plan),
        }
    }
}
