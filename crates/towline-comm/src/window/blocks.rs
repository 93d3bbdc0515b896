//! Strided and block forms: many blocks of a window by layout and index.

use std::sync::Arc;

use towline::layout::Plan;
use towline::{Indices, Layout};

use super::Window;
use super::access::{in_lane, still, then_signal};
use crate::member::Member;
use crate::member::signals::check_counter;
use crate::memory::{Memory, PeerAccess, WindowCore};
use crate::operation::Operation;
use crate::{Error, Result, group};

/// The blocks of a transfer: which of the peer's, which of the local memory's, in pairs.
struct Pairs {
    /// Remote offset, local offset, length.
    pieces: Vec<(u64, u64, u64)>,
}

impl Window {
    /// Puts blocks by index: the n-th local index goes to the n-th index of `peer`. The layouts are relative to
    /// `peer`'s memory and to `source`.
    pub fn put_blocks<'i>(
        &self,
        peer: usize,
        layout: &Layout,
        indices: impl Into<Indices<'i>>,
        source: &Memory,
        source_layout: &Layout,
        source_indices: impl Into<Indices<'i>>,
    ) -> Result<Operation> {
        let pairs = plan(layout, indices.into(), source_layout, source_indices.into(), source, "put")?;
        let core = self.reach(peer, &pairs, "put")?;
        let source = source.clone();
        self.start("put", peer, move |member, _| put(member, &core, peer, &source, pairs))
    }

    /// [`put_blocks`](Self::put_blocks), then raises `peer`'s counter, as [`put_signal`](Self::put_signal) does.
    #[allow(clippy::too_many_arguments, reason = "two sides with three parts each, and the counter")]
    pub fn put_blocks_signal<'i>(
        &self,
        peer: usize,
        layout: &Layout,
        indices: impl Into<Indices<'i>>,
        source: &Memory,
        source_layout: &Layout,
        source_indices: impl Into<Indices<'i>>,
        (context, index): (u32, u32),
    ) -> Result<Operation> {
        let pairs = plan(layout, indices.into(), source_layout, source_indices.into(), source, "put_signal")?;
        let core = self.reach(peer, &pairs, "put_signal")?;
        check_counter(self.host("put_signal")?, peer, context, index, "put_signal").map_err(group::poison)?;
        let source = source.clone();
        self.start("put_signal", peer, move |member, team| {
            let put = put(member, &core, peer, &source, pairs)?;
            then_signal(member, team, put, peer, context, index)
        })
    }

    /// Gets blocks by index: the n-th index of `peer` goes to the n-th local index. The layouts are relative to
    /// `peer`'s memory and to `target`.
    pub fn get_blocks<'i>(
        &self,
        peer: usize,
        layout: &Layout,
        indices: impl Into<Indices<'i>>,
        target: &Memory,
        target_layout: &Layout,
        target_indices: impl Into<Indices<'i>>,
    ) -> Result<Operation> {
        let pairs = plan(layout, indices.into(), target_layout, target_indices.into(), target, "get")?;
        let core = self.reach(peer, &pairs, "get")?;
        let target = target.clone();
        self.start("get", peer, move |member, _| get(member, &core, peer, &target, pairs))
    }

    fn reach(&self, peer: usize, pairs: &Pairs, op: &'static str) -> Result<Arc<WindowCore>> {
        let end = pairs.pieces.iter().map(|(remote, _, len)| remote.saturating_add(*len)).max();
        let end = usize::try_from(end.unwrap_or(0)).unwrap_or(usize::MAX);
        self.checked(peer, 0, end, op)
    }
}

fn plan(
    remote: &Layout,
    remote_indices: Indices<'_>,
    local: &Layout,
    local_indices: Indices<'_>,
    memory: &Memory,
    op: &'static str,
) -> Result<Pairs> {
    let make = || -> Result<Pairs> {
        let plan = Plan::blocks(remote, remote_indices, local, local_indices)?;
        let pieces = plan.pieces().iter().map(|piece| (piece.remote, piece.local, piece.len));
        let pieces = towline::room::collect(op, pieces)?;
        let end = pieces.iter().map(|(_, local, len)| local.saturating_add(*len)).max().unwrap_or(0);
        if end > memory.len() as u64 {
            let len = memory.len();
            return Err(Error::invalid(
                op,
                format!("the layout reaches byte {end} of memory of {len} bytes"),
            ));
        }
        Ok(Pairs { pieces })
    };
    make().map_err(|error| group::poison(error.during(op)))
}

fn put(
    member: &Arc<Member>,
    core: &Arc<WindowCore>,
    peer: usize,
    source: &Memory,
    pairs: Pairs,
) -> Result<Operation> {
    match core.access(peer, "put")? {
        PeerAccess::Near(pinned) => {
            core.order();
            for (remote, local, len) in &pairs.pieces {
                let part = source.span()?.part(*local as usize, *len as usize)?;
                pinned.copy_from(*remote as usize, &part)?;
            }
            Ok(Operation::done(Ok(0)))
        }
        PeerAccess::Far(remote) => {
            let (endpoint, source) = (member.endpoint().clone(), source.clone());
            let limits = member.config.limits();
            let start = move || {
                Ok(endpoint.write(&remote, source.span()?).spans(&pairs.pieces).limits(limits).start()?)
            };
            Ok(in_lane(member, core, peer, "put", start))
        }
    }
}

fn get(
    member: &Arc<Member>,
    core: &Arc<WindowCore>,
    peer: usize,
    target: &Memory,
    pairs: Pairs,
) -> Result<Operation> {
    match core.access(peer, "get")? {
        PeerAccess::Near(pinned) => {
            for (remote, local, len) in &pairs.pieces {
                let part = target.span()?.part(*local as usize, *len as usize)?;
                pinned.copy_to(*remote as usize, &part)?;
            }
            still(core, peer, &pinned, "get")?;
            Ok(Operation::done(Ok(0)))
        }
        PeerAccess::Far(remote) => {
            let (endpoint, target) = (member.endpoint().clone(), target.clone());
            let limits = member.config.limits();
            let start = move || {
                Ok(endpoint.read(&remote, target.span()?).spans(&pairs.pieces).limits(limits).start()?)
            };
            Ok(in_lane(member, core, peer, "get", start))
        }
    }
}
