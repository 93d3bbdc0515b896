//! One-sided access: put, get, update, signal.

use std::sync::Arc;

use towline::nccl::Element;
use towline::{Access, Buffer, Dtype, SystemStorage};

use super::{Engine, Window};
use crate::cuda::Cuda;
use crate::group::{self, one_sided};
use crate::member::signals::{check_counter, flush, flush_all, signal};
use crate::member::{Job, Member, Task};
use crate::memory::{Memory, PeerAccess, WindowCore, WindowFlag};
use crate::operation::Operation;
use crate::team::Team;
use crate::{Error, Result};

impl Window {
    /// Copies `source` into `peer`'s memory at that offset. When the operation has ended the bytes have landed.
    pub fn put(&self, peer: usize, offset: usize, source: &Memory) -> Result<Operation> {
        if let Engine::Nccl(window, cuda) = &self.engine {
            return copy(window, cuda, (peer, offset), source, false);
        }
        let core = self.checked(peer, offset, source.len(), "put")?;
        let source = source.clone();
        self.start("put", peer, move |member, _| put(member, &core, peer, offset, &source, "put"))
    }

    /// [`put`](Self::put) of bytes that are copied at the call.
    pub fn put_bytes(&self, peer: usize, offset: usize, bytes: &[u8]) -> Result<Operation> {
        if let Engine::Nccl(..) = &self.engine
            && bytes.is_empty()
        {
            let size = self.size_of(peer).map_err(|error| group::poison(error.during("put")))?;
            let wrong = || Error::invalid("put", format!("{offset} does not lie within the window's {size}"));
            return if offset <= size { Ok(Operation::done(Ok(0))) } else { Err(group::poison(wrong())) };
        }
        let core = self.checked(peer, offset, bytes.len(), "put")?;
        if let Some(outcome) = self.put_now(&core, peer, offset, bytes, "put") {
            return Ok(Operation::done(outcome.map(|()| 0)));
        }
        let Some(source) = self.staged(bytes, "put")? else { return Ok(Operation::done(Ok(0))) };
        self.start("put", peer, move |member, _| put(member, &core, peer, offset, &source, "put"))
    }

    /// Copies `peer`'s memory from that offset on into all of `target`.
    pub fn get(&self, peer: usize, offset: usize, target: &Memory) -> Result<Operation> {
        if let Engine::Nccl(window, cuda) = &self.engine {
            return copy(window, cuda, (peer, offset), target, true);
        }
        let core = self.checked(peer, offset, target.len(), "get")?;
        let target = target.clone();
        self.start("get", peer, move |member, _| get(member, &core, peer, offset, &target))
    }

    /// Copies bytes of `peer`'s memory out, waiting for them. Not deferred inside a group.
    pub fn get_bytes(&self, peer: usize, offset: usize, into: &mut [u8]) -> Result<()> {
        let core = self.checked(peer, offset, into.len(), "get")?;
        if into.is_empty() {
            return Ok(());
        }
        match core.access(peer, "get").map_err(|error| self.lost(peer, error))? {
            PeerAccess::Near(pinned) => {
                let got = pinned.read_at(offset, into).map_err(Error::from);
                let got = got.and_then(|()| still(&core, peer, &pinned, "get"));
                got.map_err(|error| self.lost(peer, error.during("get")))
            }
            PeerAccess::Far(_) => {
                let landing = SystemStorage::new(into.len())?;
                let region = self.host("get")?.endpoint().register(Buffer::new(landing), Access::NONE)?;
                let target = Memory::loose(region);
                get(self.host("get")?, &core, peer, offset, &target)?.wait()?;
                target.read_at(0, into)
            }
        }
    }

    /// [`put`](Self::put), then raises `peer`'s counter of that context and index by one. The bytes, and all that this
    /// rank put there before, are visible before the counter is.
    pub fn put_signal(
        &self,
        peer: usize,
        offset: usize,
        source: &Memory,
        context: u32,
        index: u32,
    ) -> Result<Operation> {
        if let Engine::Nccl(window, cuda) = &self.engine {
            let from = source.on_device("put_signal").map_err(group::poison)?;
            let (element, at) = (Element::from(Dtype::U8), (peer, offset));
            let job = cuda.open("put_signal")?.put_job(window, &from, element, at, (context, index));
            return cuda.submit(job);
        }
        let core = self.checked(peer, offset, source.len(), "put_signal")?;
        self.counter(peer, context, index)?;
        let source = source.clone();
        self.start("put_signal", peer, move |member, team| {
            let put = put(member, &core, peer, offset, &source, "put_signal")?;
            then_signal(member, team, put, peer, context, index)
        })
    }

    /// [`put_signal`](Self::put_signal) of bytes that are copied at the call; no bytes only signals.
    pub fn put_signal_bytes(
        &self,
        peer: usize,
        offset: usize,
        bytes: &[u8],
        context: u32,
        index: u32,
    ) -> Result<Operation> {
        if let Engine::Nccl(_, cuda) = &self.engine {
            if bytes.is_empty() {
                return cuda.signal(peer, context, index);
            }
            let wrong = "the communicator is on a GPU, and the bytes are the host's";
            return Err(group::poison(Error::invalid("put_signal", wrong)));
        }
        let core = self.checked(peer, offset, bytes.len(), "put_signal")?;
        self.counter(peer, context, index)?;
        if let Some(outcome) = self.put_now(&core, peer, offset, bytes, "put_signal") {
            outcome?;
            let member = self.host("put_signal")?;
            let team = member.team("put_signal")?;
            return Ok(signal(member, &team, peer, context, index));
        }
        let source = self.staged(bytes, "put_signal")?;
        self.start("put_signal", peer, move |member, team| {
            let put = match &source {
                Some(source) => put(member, &core, peer, offset, source, "put_signal")?,
                None => Operation::done(Ok(0)),
            };
            then_signal(member, team, put, peer, context, index)
        })
    }

    /// Adds to a 64-bit word of `peer`'s memory; the operation's value is what it held before.
    pub fn fetch_add(&self, peer: usize, offset: usize, add: u64) -> Result<Operation> {
        let core = self.word(peer, offset, "fetch_add")?;
        self.start("fetch_add", peer, move |member, _| match core.access(peer, "fetch_add")? {
            PeerAccess::Near(pinned) => {
                Ok(Operation::done(pinned.fetch_add(offset, add).map_err(Error::from)))
            }
            PeerAccess::Far(remote) => {
                let endpoint = member.endpoint().clone();
                let start = move || Ok(endpoint.fetch_add(&remote, offset as u64, add)?);
                Ok(in_lane(member, &core, peer, "fetch_add", start))
            }
        })
    }

    /// Replaces a 64-bit word of `peer`'s memory if it holds `expected`; the operation's value is what it held before.
    pub fn compare_swap(&self, peer: usize, offset: usize, expected: u64, new: u64) -> Result<Operation> {
        let core = self.word(peer, offset, "compare_swap")?;
        self.start("compare_swap", peer, move |member, _| match core.access(peer, "compare_swap")? {
            PeerAccess::Near(pinned) => {
                Ok(Operation::done(pinned.compare_swap(offset, expected, new).map_err(Error::from)))
            }
            PeerAccess::Far(remote) => {
                let endpoint = member.endpoint().clone();
                let start = move || Ok(endpoint.compare_swap(&remote, offset as u64, expected, new)?);
                Ok(in_lane(member, &core, peer, "compare_swap", start))
            }
        })
    }

    /// Waits until everything that this rank has put into `peer`'s memory has landed. Local.
    pub fn flush(&self, peer: usize) -> Result<()> {
        if let Engine::Nccl(_, cuda) = &self.engine {
            self.size_of(peer).map_err(|error| group::poison(error.during("flush")))?;
            return cuda.flush("flush");
        }
        self.checked(peer, 0, 0, "flush")?;
        self.later("flush", move |member, _| flush(member, peer))
    }

    /// [`flush`](Self::flush) to every rank. Local.
    pub fn flush_all(&self) -> Result<()> {
        if let Engine::Nccl(_, cuda) = &self.engine {
            return cuda.flush("flush");
        }
        self.checked(0, 0, 0, "flush")?;
        self.later("flush", |member, team| flush_all(member, team))
    }

    /// Waits until everything that any rank has put into any rank's memory before its own call has landed. Collective.
    pub fn fence(&self) -> Result<()> {
        if let Engine::Nccl(_, cuda) = &self.engine {
            cuda.flush("fence")?;
            return cuda.barrier().map_err(|error| error.during("fence"));
        }
        self.checked(0, 0, 0, "fence")?;
        self.later("fence", |member, team| {
            let landed = flush_all(member, team);
            let _one_call = team.serialise();
            // Also after a failed flush: the others must not wait for this rank.
            team.barrier().map_err(|error| error.during("fence"))?;
            landed
        })
    }

    pub(super) fn later(
        &self,
        op: &'static str,
        work: impl FnOnce(&Arc<Member>, &Arc<Team>) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let member = self.host(op)?;
        member.check_usable(op).map_err(group::poison)?;
        match group::defer(member, Job::Call(Box::new(work))) {
            Some(job) => member.launch(vec![job]),
            None => Ok(()),
        }
    }

    pub(super) fn start(
        &self,
        op: &'static str,
        peer: usize,
        start: impl FnOnce(&Arc<Member>, &Arc<Team>) -> Result<Operation> + Send + 'static,
    ) -> Result<Operation> {
        one_sided(self.host(op)?, op, move |member, team| {
            let started = start(member, team).map_err(|error| team.lost(peer, error))?;
            Ok(started.explained(|error| team.lost(peer, error)))
        })
    }

    /// The operation of an access that failed immediately.
    fn lost(&self, peer: usize, error: Error) -> Error {
        match self.host(error.op()).and_then(|member| member.team(error.op())) {
            Ok(team) => team.lost(peer, error),
            Err(_) => error,
        }
    }

    /// The window, where that range of that rank can be accessed. Its error poisons the group that is open.
    pub(super) fn checked(
        &self,
        peer: usize,
        offset: usize,
        len: usize,
        op: &'static str,
    ) -> Result<Arc<WindowCore>> {
        let check = || {
            self.host(op)?.check_usable(op)?;
            let core = self.core(op)?;
            core.check(peer, offset, len, op)?;
            Ok(Arc::clone(core))
        };
        check().map_err(group::poison)
    }

    fn word(&self, peer: usize, offset: usize, op: &'static str) -> Result<Arc<WindowCore>> {
        let core = self.checked(peer, offset, 8, op)?;
        if !offset.is_multiple_of(8) {
            let error = Error::invalid(op, format!("offset {offset} is not a multiple of 8")).about([peer]);
            return Err(group::poison(error));
        }
        Ok(core)
    }

    fn counter(&self, peer: usize, context: u32, index: u32) -> Result<()> {
        check_counter(self.host("put_signal")?, peer, context, index, "put_signal").map_err(group::poison)
    }

    /// Puts without a copy in between, where the memory is near and nothing must be deferred.
    fn put_now(
        &self,
        core: &WindowCore,
        peer: usize,
        offset: usize,
        bytes: &[u8],
        op: &'static str,
    ) -> Option<Result<()>> {
        if !self.host(op).is_ok_and(|member| member.config.blocking) || group::is_open() {
            return None;
        }
        match core.access(peer, op) {
            Ok(PeerAccess::Near(pinned)) => {
                core.order();
                let put = pinned.write_at(offset, bytes);
                Some(put.map_err(|error| self.lost(peer, Error::from(error).during(op))))
            }
            Ok(PeerAccess::Far(_)) => None,
            Err(error) => Some(Err(self.lost(peer, error))),
        }
    }

    /// A copy of the bytes that requests can read; `None` for no bytes.
    fn staged(&self, bytes: &[u8], op: &'static str) -> Result<Option<Memory>> {
        if bytes.is_empty() {
            return Ok(None);
        }
        let stage = || -> Result<Memory> {
            let mut storage = SystemStorage::new(bytes.len())?;
            storage.as_mut_slice().copy_from_slice(bytes);
            Ok(Memory::loose(self.host(op)?.endpoint().register(Buffer::new(storage), Access::NONE)?))
        };
        stage().map(Some).map_err(|error| group::poison(error.during(op)))
    }
}

/// A copy in the stream, through the mapping that NCCL has of the peer's memory.
fn copy(
    window: &towline::nccl::Window,
    cuda: &Cuda,
    at: (usize, usize),
    near: &Memory,
    get: bool,
) -> Result<Operation> {
    let op = if get { "get" } else { "put" };
    let near = near.on_device(op).map_err(group::poison)?;
    cuda.submit(cuda.open(op)?.copy_job(window, &near, at, get))
}

/// Refuses what was read while the owner took its memory back.
pub(super) fn still(
    core: &WindowCore,
    peer: usize,
    pinned: &towline::Pinned,
    op: &'static str,
) -> Result<()> {
    if pinned.is_stale() { core.access(peer, op).map(|_| ()) } else { Ok(()) }
}

pub(super) fn put(
    member: &Arc<Member>,
    core: &Arc<WindowCore>,
    peer: usize,
    offset: usize,
    source: &Memory,
    op: &'static str,
) -> Result<Operation> {
    match core.access(peer, op)? {
        PeerAccess::Near(pinned) => {
            core.order();
            let copied = pinned.copy_from(offset, source.span()?);
            Ok(Operation::done(copied.map(|()| 0).map_err(|error| Error::from(error).during(op))))
        }
        PeerAccess::Far(remote) => {
            let (endpoint, source) = (member.endpoint().clone(), source.clone());
            let (len, limits) = (source.len() as u64, member.config.limits());
            let start = move || {
                let request = endpoint.write(&remote, source.span()?).at(offset as u64, 0, len);
                Ok(request.limits(limits).start()?)
            };
            Ok(in_lane(member, core, peer, op, start))
        }
    }
}

fn get(
    member: &Arc<Member>,
    core: &Arc<WindowCore>,
    peer: usize,
    offset: usize,
    target: &Memory,
) -> Result<Operation> {
    match core.access(peer, "get")? {
        PeerAccess::Near(pinned) => {
            let copied = pinned.copy_to(offset, target.span()?).map_err(Error::from);
            let copied = copied.and_then(|()| still(core, peer, &pinned, "get"));
            Ok(Operation::done(copied.map(|()| 0).map_err(|error| error.during("get"))))
        }
        PeerAccess::Far(remote) => {
            let (endpoint, target) = (member.endpoint().clone(), target.clone());
            let (len, limits) = (target.len() as u64, member.config.limits());
            let start = move || {
                let request = endpoint.read(&remote, target.span()?).at(offset as u64, 0, len);
                Ok(request.limits(limits).start()?)
            };
            Ok(in_lane(member, core, peer, "get", start))
        }
    }
}

/// Starts a transfer to a far rank: beside the others, or behind them where the window is strict.
pub(super) fn in_lane(
    member: &Arc<Member>,
    core: &WindowCore,
    peer: usize,
    op: &'static str,
    start: impl FnOnce() -> Result<towline::Transfer> + Send + 'static,
) -> Operation {
    let (operation, done) = Operation::toward(peer, member.weak_team(), op, member.config.timeout);
    let about = move |error: Error| error.about([peer]).during(op);
    let start = Box::new(move || start().map_err(about));
    let strict = core.flags().contains(WindowFlag::STRICT_ORDERING);
    let task = if strict { Task::Behind(start, done) } else { Task::Beside(start, done) };
    member.lane(peer).push(task);
    operation
}

/// Signals once the put has landed; a put that failed is not signalled.
pub(super) fn then_signal(
    member: &Arc<Member>,
    team: &Arc<Team>,
    put: Operation,
    peer: usize,
    context: u32,
    index: u32,
) -> Result<Operation> {
    if let Some(Err(error)) = put.result() {
        return Err(error);
    }
    Ok(signal(member, team, peer, context, index))
}
