//! Requests that are compiled once and started many times with new indices.

use std::fmt;
use std::sync::Arc;

use super::{EndpointCore, Part, Remote, Request};
use crate::layout::{IndexList, Layout, Listed, PairedLayouts};
use crate::region::Span;
use crate::route::Explanation;
use crate::transfer::submission::naming;
use crate::transfer::{Op, Several};
use crate::{Error, Result, room};

/// The operation that errors name where a program is made.
const OP: &str = "program";

/// One part of a [`Program`]: a remote region, a local one, and the blocks of each that indices name.
#[derive(Clone, Debug)]
pub struct ProgramPart {
    remote: Remote,
    local: Span,
    layouts: Arc<PairedLayouts>,
}

impl ProgramPart {
    /// Blocks of that remote region, and blocks of that local memory. The layouts are relative to the remote region and to the
    /// local span.
    pub fn new(
        remote: &Remote,
        local: impl Into<Span>,
        remote_layout: &Layout,
        local_layout: &Layout,
    ) -> ProgramPart {
        let layouts = PairedLayouts { remote: remote_layout.clone(), local: local_layout.clone() };
        ProgramPart { remote: remote.clone(), local: local.into(), layouts: Arc::new(layouts) }
    }

    fn check(&self, endpoint: &Arc<EndpointCore>, first: &Remote) -> Result<()> {
        let PairedLayouts { remote, local } = &*self.layouts;
        if remote.block_len() != local.block_len() {
            let (theirs, ours) = (remote.block_len(), local.block_len());
            return Err(Error::invalid(OP, format!("remote blocks have {theirs} bytes, local ones {ours}")));
        }
        let of = |side: &str, error: Error| {
            let message = format!("{side}: {}", error.message());
            error.saying(message)
        };
        remote.fits(self.remote.len()).map_err(|error| of("the remote layout", error))?;
        local.fits(self.local.len() as u64).map_err(|error| of("the local layout", error))?;
        Request::check_sides(OP, endpoint, first, &self.remote, Some(&self.local))
    }
}

/// A request that is compiled once, such as "the blocks of all layers of this cache", and started many times with new indices.
///
/// Regions, rights of way and layouts are looked at once, when it is [made](crate::Endpoint::program); a start brings nothing but indices. It is
/// cheap to clone, may be used by many threads, and any number of its starts may be in flight at a time. Each start is one transfer: one
/// end, one set of limits, one cancel, one message or signal behind the bytes of all parts.
///
/// A program keeps no region registered. Where one of its regions is gone its starts end with `Stale`, and name the part; where the
/// owner has restarted, [`rebind`](Self::rebind) makes the same program for the regions of its new life. Where only a connection
/// broke, the next start connects anew.
///
/// ```
/// # use towline::{Access, Endpoint, Layout, ProgramPart, SharedStorage};
/// # let prefill = Endpoint::open("prefill")?;
/// # let layer = || SharedStorage::new(64 << 10);
/// # let kept = [prefill.register(layer()?, Access::READ)?, prefill.register(layer()?, Access::READ)?];
/// # let decode = Endpoint::open("decode")?;
/// # let remotes = [decode.import(&kept[0].ticket()?)?, decode.import(&kept[1].ticket()?)?];
/// # let layers = [decode.register(layer()?, Access::NONE)?, decode.register(layer()?, Access::NONE)?];
/// let pages = Layout::blocks(0, 4096, 16, 4096)?;
/// let parts = remotes.iter().zip(&layers).map(|(remote, layer)| ProgramPart::new(remote, layer, &pages, &pages));
/// let cache = decode.program(parts)?;
///
/// // For each request nothing is new but the blocks.
/// cache.read(&[3u32, 9, 10], &[0u32, 1, 2]).notify("taken").start()?.wait()?;
/// cache.read(&[7u32], &[3u32]).start()?.wait()?;
///
/// // Some layers only.
/// cache.select([1])?.read(&[8u32], &[4u32]).start()?.wait()?;
/// # Ok::<(), towline::Error>(())
/// ```
#[derive(Clone)]
pub struct Program {
    endpoint: Arc<EndpointCore>,
    parts: Arc<[ProgramPart]>,
}

impl Program {
    pub(super) fn compile(
        endpoint: &Arc<EndpointCore>,
        parts: impl IntoIterator<Item = ProgramPart>,
    ) -> Result<Program> {
        endpoint.registry.check_open(OP)?;
        let mut parts: Vec<ProgramPart> = room::collect(OP, parts.into_iter())?;
        let Some(first) = parts.first().map(|part| part.remote.clone()) else {
            return Err(Error::invalid(OP, "a program of no parts"));
        };
        let count = parts.len();
        for index in 0..count {
            parts[index].check(endpoint, &first).map_err(|error| naming(index, count, error))?;
            // Most caches have one shape for all of their layers, which is then kept once.
            if index > 0 && parts[index].layouts == parts[index - 1].layouts {
                parts[index].layouts = Arc::clone(&parts[index - 1].layouts);
            }
        }
        Ok(Program { endpoint: Arc::clone(endpoint), parts: parts.into() })
    }

    /// How many parts it has.
    #[allow(clippy::len_without_is_empty, reason = "a program is never empty")]
    pub fn len(&self) -> usize {
        self.parts.len()
    }

    /// Asks for blocks of every remote region: the n-th remote block goes to the n-th local one, in each part.
    ///
    /// Lists that are handed over (a `Vec`, an `Arc`) are not copied; what is borrowed is copied once where there is more than one part.
    /// What holds for the lists of [`Request::blocks`] holds here: what is wrong with a long one is how the transfer ends, with the part
    /// and the index named, and no byte of that part has moved.
    pub fn read<'a>(
        &'a self,
        remote_blocks: impl Into<IndexList<'a>>,
        local_blocks: impl Into<IndexList<'a>>,
    ) -> Request<'a> {
        self.alike(Op::Read, remote_blocks.into(), local_blocks.into())
    }

    /// Asks for blocks of every remote region to be changed: the n-th local block goes to the n-th remote one, in each part.
    pub fn write<'a>(
        &'a self,
        remote_blocks: impl Into<IndexList<'a>>,
        local_blocks: impl Into<IndexList<'a>>,
    ) -> Request<'a> {
        self.alike(Op::Write, remote_blocks.into(), local_blocks.into())
    }

    /// [`read`](Self::read) with lists of its own for each part: the remote one and the local one, in the order of the parts.
    pub fn read_each<'a>(
        &'a self,
        lists: impl IntoIterator<Item = (IndexList<'a>, IndexList<'a>)>,
    ) -> Request<'a> {
        self.each(Op::Read, lists)
    }

    /// [`write`](Self::write) with lists of its own for each part: the remote one and the local one, in the order of the parts.
    pub fn write_each<'a>(
        &'a self,
        lists: impl IntoIterator<Item = (IndexList<'a>, IndexList<'a>)>,
    ) -> Request<'a> {
        self.each(Op::Write, lists)
    }

    fn alike<'a>(&'a self, op: Op, remote: IndexList<'a>, local: IndexList<'a>) -> Request<'a> {
        // Whatever is done behind the call owns its lists: here they are copied once, and not once for each part.
        let owned = || match self.parts.len() {
            1 => Ok((remote, local)),
            _ => Ok((remote.into_owned()?, local.into_owned()?)),
        };
        let parts = owned().and_then(|lists| {
            let parts = self.parts.iter().map(|part| part.with(lists.clone()));
            Several::of(op.name(), parts)
        });
        Request::of_some(&self.endpoint, op, parts)
    }

    fn each<'a>(
        &'a self,
        op: Op,
        lists: impl IntoIterator<Item = (IndexList<'a>, IndexList<'a>)>,
    ) -> Request<'a> {
        let parts = || {
            let lists: Vec<_> = room::collect(op.name(), lists.into_iter())?;
            if lists.len() != self.parts.len() {
                let message = format!("{} pairs of lists for {} parts", lists.len(), self.parts.len());
                return Err(Error::invalid(op.name(), message));
            }
            Several::of(op.name(), self.parts.iter().zip(lists).map(|(part, lists)| part.with(lists)))
        };
        Request::of_some(&self.endpoint, op, parts())
    }

    /// Some of its parts, in that order: a program of their own. They are counted anew, from 0.
    ///
    /// # Errors
    /// `Invalid` where there is no such part, or none is named.
    pub fn select(&self, parts: impl IntoIterator<Item = usize>) -> Result<Program> {
        let mut some = Vec::new();
        for part in parts {
            let count = self.parts.len();
            let Some(part) = self.parts.get(part) else {
                return Err(Error::invalid(OP, format!("there is no part {part}: the program has {count}")));
            };
            room::push(OP, &mut some, part.clone())?;
        }
        if some.is_empty() {
            return Err(Error::invalid(OP, "a program of no parts"));
        }
        Ok(Program { endpoint: Arc::clone(&self.endpoint), parts: some.into() })
    }

    /// The same program for other remote regions, one for each part: those of an owner that has restarted, or of another one.
    ///
    /// # Errors
    /// `Invalid` where there are not as many as parts, or a layout does not fit its region.
    pub fn rebind<'r>(&self, remotes: impl IntoIterator<Item = &'r Remote>) -> Result<Program> {
        let remotes: Vec<&Remote> = room::collect(OP, remotes.into_iter())?;
        if remotes.len() != self.parts.len() {
            let message = format!("{} remote regions for {} parts", remotes.len(), self.parts.len());
            return Err(Error::invalid(OP, message));
        }
        let rebound =
            |(part, remote): (&ProgramPart, &Remote)| ProgramPart { remote: remote.clone(), ..part.clone() };
        Program::compile(&self.endpoint, self.parts.iter().zip(remotes).map(rebound))
    }

    /// Which path each part takes, and why not the others.
    pub fn explain(&self) -> ProgramExplanation {
        ProgramExplanation { parts: self.parts.iter().map(|part| part.remote.explain().clone()).collect() }
    }
}

impl ProgramPart {
    fn with<'a>(&'a self, (remote, local): (IndexList<'a>, IndexList<'a>)) -> Part<'a> {
        Part::new(&self.remote, self.local.clone()).listed(Listed::of(
            Arc::clone(&self.layouts),
            remote,
            local,
        ))
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = self.parts.first().map(|part| &part.remote);
        f.debug_struct("Program").field("parts", &self.len()).field("first", &first).finish()
    }
}

/// Every path to each region of a [`Program`]: which one is taken, and why the others are not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramExplanation {
    /// That of each part.
    pub parts: Vec<Explanation>,
}

impl fmt::Display for ProgramExplanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = 0;
        for alike in self.parts.chunk_by(|one, next| one == next) {
            let last = first + alike.len() - 1;
            match alike.len() {
                1 => writeln!(f, "part {first}:")?,
                _ => writeln!(f, "parts {first} to {last}:")?,
            }
            alike.first().map_or(Ok(()), |explanation| explanation.fmt(f))?;
            first = last + 1;
        }
        Ok(())
    }
}
