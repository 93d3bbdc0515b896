//! One part of a request: a remote region, a local one, and what moves between them.

use std::borrow::Cow;

use super::Remote;
use crate::Result;
use crate::layout::{IndexList, Layout, Listed, Plan};
use crate::memory::Place;
use crate::region::{RegionUse, Span};
use crate::transfer::Op;
use crate::transfer::submission::What;

/// One part of a request over several regions of one peer: see [`Endpoint::read_parts`](crate::Endpoint::read_parts).
///
/// Without [`at`](Self::at), [`spans`](Self::spans) or [`blocks`](Self::blocks) it moves the whole local span, from
/// or to the start of the remote region.
#[must_use = "a part does nothing until it is handed to a request"]
#[derive(Clone)]
pub struct Part<'a> {
    pub(super) remote: &'a Remote,
    pub(super) local: Option<Span>,
    pub(super) what: What<'a>,
}

impl<'a> Part<'a> {
    /// Bytes of that remote region, to or from that local memory.
    pub fn new(remote: &'a Remote, local: impl Into<Span>) -> Part<'a> {
        Part { remote, local: Some(local.into()), what: What::Whole }
    }

    /// No bytes: something else is asked of that region.
    pub(super) fn without_bytes(remote: &'a Remote) -> Part<'a> {
        Part { remote, local: None, what: What::Nothing }
    }

    /// Moves `len` bytes between those offsets.
    pub fn at(self, remote: u64, local: u64, len: u64) -> Part<'a> {
        Part { what: What::Span(remote, local, len), ..self }
    }

    /// Moves several ranges, each given as remote offset, local offset and length. A list that is handed over, as a `Vec`, is
    /// not copied.
    pub fn spans(self, spans: impl Into<Cow<'a, [(u64, u64, u64)]>>) -> Part<'a> {
        Part { what: What::Spans(spans.into()), ..self }
    }

    /// Moves blocks by index: the n-th remote index pairs with the n-th local index. The layouts are relative to the
    /// remote region and to the local span. Long lists are best handed over: see [`Request::blocks`](crate::Request::blocks).
    pub fn blocks(
        self,
        remote: &Layout,
        remote_indices: impl Into<IndexList<'a>>,
        local: &Layout,
        local_indices: impl Into<IndexList<'a>>,
    ) -> Part<'a> {
        let listed = Listed::new(remote, remote_indices.into(), local, local_indices.into());
        Part { what: What::Blocks(Box::new(listed)), ..self }
    }

    /// Moves blocks of layouts that are kept.
    pub(super) fn listed(self, listed: Listed<'a>) -> Part<'a> {
        Part { what: What::Blocks(Box::new(listed)), ..self }
    }

    /// Moves what a plan says.
    pub(crate) fn planned(self, plan: Result<Plan>) -> Part<'a> {
        Part { what: What::Plan(plan.map(Box::new)), ..self }
    }

    /// Keeps the local region in use, where there is one.
    #[inline(always)]
    pub(super) fn begin_use(&self, op: Op) -> Result<Option<RegionUse>> {
        match &self.local {
            Some(span) => span.core().begin_use(op.name()).map(Some),
            None => Ok(None),
        }
    }

    /// Whether the local memory is on a GPU.
    #[inline]
    pub(super) fn is_on_gpu(&self) -> bool {
        self.local.as_ref().is_some_and(|span| matches!(span.core().place, Place::Cuda(_)))
    }

    /// The address of the first byte here, and the bytes that its offsets lie within, there and here.
    #[inline]
    pub(super) fn range(&self) -> (usize, (u64, u64)) {
        let (base, len) =
            self.local.as_ref().map_or((0, 0), |span| (span.core().addr + span.offset(), span.len() as u64));
        (base, (self.remote.len(), len))
    }
}
