//! A fixed group of ranks: how it comes together, how it ends, and what its members can ask of it.

mod collectives;
mod family;
mod registration;
mod signals;

use std::fmt;
use std::sync::Arc;
use std::thread::{Scope, ScopedJoinHandle};

use parking_lot::Mutex;
use towline::start_scoped_thread;
use towline::{Buffer, Endpoint, Kind, Place, Storage};

pub use self::collectives::Using;
use crate::bootstrap::{self, Joining};
use crate::config::Config;
use crate::cuda::{self, Cuda};
use crate::group;
use crate::interrupt::{self, Stop};
use crate::member::signals::flush_all;
use crate::member::{self, Job, Member, Progress, Seating, Station};
use crate::memory::{Memory, host_only};
use crate::operation::Operation;
use crate::team::{Seat, Team};
use crate::unique_id::UniqueId;
use crate::window::RegisteredBuffer;
use crate::{Error, Result};

/// A rank's membership in a fixed group.
///
/// Its calls are made by all ranks in the same order, except where they say that they are local. Each has a deadline,
/// and its error names the ranks that it is about. It can be used by several threads.
///
/// ```
/// use towline_comm::{Communicator, Result, WaitSignal, WindowFlag, mem_alloc};
///
/// fn rank(comm: &Communicator) -> Result<()> {
///     let window = comm.register_window(mem_alloc(4096)?, WindowFlag::DEFAULT)?.expect("windows");
///     let peer = 1 - comm.rank()?;
///     window.put_signal_bytes(peer, 0, b"hello", 0, 0)?.wait()?;
///     comm.wait_signal(&[WaitSignal::from_rank(peer)])?;
///     let mut bytes = [0; 5];
///     window.memory()?.read_at(0, &mut bytes)?;
///     assert_eq!(&bytes, b"hello");
///     comm.finalize()
/// }
///
/// let ranks = Communicator::init_all(2)?;
/// std::thread::scope(|scope| {
///     let threads: Vec<_> = ranks.iter().map(|comm| scope.spawn(move || rank(comm))).collect();
///     threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
/// })?;
/// # Ok::<(), towline_comm::Error>(())
/// ```
pub struct Communicator {
    engine: Engine,
}

/// What runs a communicator.
enum Engine {
    /// Nothing: the rank belongs to no group.
    Null,
    /// A team, on the memory of hosts.
    Host(Arc<Member>),
    /// NCCL, on the memory of GPUs.
    Nccl(Arc<Cuda>),
}

impl Communicator {
    /// The communicator of a rank that belongs to no group: every call is `Invalid`.
    pub fn null() -> Communicator {
        Communicator { engine: Engine::Null }
    }

    pub(crate) fn from_inner(member: Arc<Member>) -> Communicator {
        Communicator { engine: Engine::Host(member) }
    }

    pub(crate) fn on_gpu(cuda: Cuda) -> Communicator {
        Communicator { engine: Engine::Nccl(Arc::new(cuda)) }
    }

    /// The communicator, where it is on a GPU.
    #[inline]
    pub(crate) fn cuda(&self) -> Option<&Arc<Cuda>> {
        match &self.engine {
            Engine::Nccl(cuda) => Some(cuda),
            _ => None,
        }
    }

    /// Joins a group of `nranks` as `rank`: every rank calls it with the same id, from threads, processes or hosts.
    ///
    /// With an id of NCCL's ([`get_nccl_unique_id`](crate::get_nccl_unique_id), or from any other program) the group is one
    /// of NCCL's, its memory is that of the GPU which the settings name, and its calls are put into streams.
    ///
    /// # Errors
    /// On every rank, with the ranks named: `Timeout` where some did not come in time, `Invalid` where a rank came
    /// twice, lies outside the group, or has another idea of the group's size, settings or protocol version.
    pub fn init(nranks: usize, rank: usize, id: &UniqueId, config: Config) -> Result<Communicator> {
        group::refuse("init")?;
        config.check("init")?;
        if id.is_nccl() || config.gpu.is_some() {
            return Cuda::init(nranks, rank, id, config).map(Communicator::on_gpu);
        }
        if nranks == 0 || nranks > bootstrap::MOST_RANKS {
            let most = bootstrap::MOST_RANKS;
            return Err(Error::invalid("init", format!("a group has 1 to {most} ranks, not {nranks}")));
        }
        let station = open_station(&config, rank)?;
        let member = Member::new(config, station, Some((rank, nranks)));
        let comm = Communicator::from_inner(Arc::clone(&member));
        let id = id.clone();
        let meet = move || meet(&member, nranks, rank, &id, 0, "init");
        comm.establish(meet)?;
        Ok(comm)
    }

    /// Joins the group that `towline launch` started this process for, or any other launcher that sets the variables
    /// `TOWLINE_RANK`, `TOWLINE_NRANKS` and `TOWLINE_UNIQUE_ID`. An id serves one meeting, so that a process does this
    /// once; further groups are [`split`](Self::split) from it.
    ///
    /// # Errors
    /// `Invalid` where a variable is missing or makes no sense, and as [`init`](Self::init).
    pub fn from_env(config: Config) -> Result<Communicator> {
        let variable = |name: &str| {
            std::env::var(name).map_err(|error| {
                let message = format!("{name}: {error}; `towline launch -n 4 -- program` sets it");
                Error::invalid("from_env", message)
            })
        };
        let number = |name: &str| {
            let text = variable(name)?;
            text.trim().parse::<usize>().map_err(|error| {
                Error::invalid("from_env", format!("{name}: {text:?} is not a number of ranks: {error}"))
            })
        };
        let (rank, nranks) = (number("TOWLINE_RANK")?, number("TOWLINE_NRANKS")?);
        let id =
            variable("TOWLINE_UNIQUE_ID")?.parse::<UniqueId>().map_err(|error| error.during("from_env"))?;
        Communicator::init(nranks, rank, &id, config)
    }

    /// Makes a group of `count` ranks in this process: one communicator for each, by rank.
    pub fn init_all(count: usize) -> Result<Vec<Communicator>> {
        Communicator::init_all_with(count, &Config::default())
    }

    /// [`init_all`](Self::init_all) with settings.
    pub fn init_all_with(count: usize, config: &Config) -> Result<Vec<Communicator>> {
        group::refuse("init_all")?;
        config.check("init_all")?;
        if count > bootstrap::MOST_RANKS {
            let most = bootstrap::MOST_RANKS;
            return Err(Error::invalid("init_all", format!("a group has at most {most} ranks, not {count}")));
        }
        let mut group_id = [0; 16];
        getrandom::fill(&mut group_id)
            .map_err(|error| Error::new(Kind::Native, "init_all", format!("no random bytes: {error}")))?;
        let mut members = Vec::with_capacity(count);
        let mut tickets = Vec::with_capacity(count);
        for rank in 0..count {
            let station = open_station(config, rank)?;
            let seat = Seat::open(&station.endpoint, count, config.team_options(count))?;
            tickets.push(seat.ticket()?);
            members.push((rank, Member::new(config.clone(), station, Some((rank, count))), seat));
        }
        // The first meeting needs all of them at the same time.
        std::thread::scope(|scope| {
            let (tickets, stop) = (&tickets, Stop::default());
            let threads: Vec<_> = members
                .into_iter()
                .map(|(rank, member, seat)| {
                    start_rank(scope, &stop, move || -> Result<Communicator> {
                        let team = Team::assemble(seat, rank, tickets.clone())?;
                        let seating = Seating { rank, nranks: count, tickets: tickets.clone(), group_id };
                        member.seat(seating, team)?;
                        Ok(Communicator::from_inner(member))
                    })
                })
                .collect();
            all_ranks(threads, &stop)
        })
    }

    /// Makes a group of NCCL's in this process: one communicator for each of those GPUs, by rank. NCCL before 2.30 takes
    /// each GPU once.
    pub fn init_all_on(gpus: &[u32], config: &Config) -> Result<Vec<Communicator>> {
        group::refuse("init_all")?;
        config.check("init_all")?;
        let id = crate::unique_id::get_nccl_unique_id().map_err(|error| error.during("init_all"))?;
        std::thread::scope(|scope| {
            let (id, stop) = (&id, Stop::default());
            let threads: Vec<_> = gpus
                .iter()
                .enumerate()
                .map(|(rank, gpu)| {
                    let config = Config { gpu: Some(*gpu), ..config.clone() };
                    start_rank(scope, &stop, move || Communicator::init(gpus.len(), rank, id, config))
                })
                .collect();
            all_ranks(threads, &stop)
        })
    }

    /// Runs what makes the group: now, or on the communicator's thread.
    fn establish(&self, work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        let member = self.member("init")?;
        if member.config.blocking { work() } else { member.worker.push(Box::new(work)) }
    }

    pub(crate) fn member(&self, op: &'static str) -> Result<&Arc<Member>> {
        // Before any lock: in a forked child one may be held by a thread that does not exist there.
        towline::fork_guard(op)?;
        match &self.engine {
            Engine::Host(member) if member.is_open() => Ok(member),
            Engine::Host(_) => Err(member::closed(op)),
            Engine::Nccl(cuda) => Err(cuda.open(op).err().unwrap_or_else(|| cuda::lacks(op))),
            Engine::Null => {
                Err(Error::invalid(op, "the communicator is null: this rank belongs to no group"))
            }
        }
    }

    /// Checks a call by `prepare`, then runs it: now, at the end of the group, or on the communicator's thread. An
    /// error of `prepare` poisons the group that is open.
    pub(crate) fn submit(
        &self,
        op: &'static str,
        prepare: impl FnOnce(&Arc<Member>) -> Result<Job>,
    ) -> Result<()> {
        let prepared = self.member(op).and_then(|member| {
            member.check_usable(op)?;
            Ok((member, prepare(member)?))
        });
        let (member, job) = prepared.map_err(group::poison)?;
        match group::defer(member, job) {
            Some(job) => member.launch(vec![job]),
            None => Ok(()),
        }
    }

    /// [`submit`](Self::submit) of a call with arguments that `prepare` checks: `work` does it immediately, without putting
    /// it anywhere, unless a group or the communicator's thread holds it back, for which `keep` makes a job of it.
    pub(crate) fn submit_call<A>(
        &self,
        op: &'static str,
        prepare: impl FnOnce(&Arc<Member>) -> Result<A>,
        work: impl FnOnce(&Arc<Member>, &Arc<Team>, &A) -> Result<()>,
        keep: impl FnOnce(A) -> Job,
    ) -> Result<()> {
        let member = self.member(op).map_err(group::poison)?;
        member.check_usable(op).map_err(group::poison)?;
        let arguments = match prepare(member) {
            Ok(arguments) => arguments,
            Err(error) => return Err(group::poison(error)),
        };
        if member.config.blocking && !group::is_open() {
            return member.run_now(|member, team| work(member, team, &arguments));
        }
        match group::defer(member, keep(arguments)) {
            Some(job) => member.launch(vec![job]),
            None => Ok(()),
        }
    }

    /// This rank's number in the group.
    pub fn rank(&self) -> Result<usize> {
        if let Some(cuda) = self.cuda() {
            return Ok(cuda.place("rank")?.0);
        }
        Ok(self.member("rank")?.place("rank")?.0)
    }

    /// How many ranks the group has.
    pub fn nranks(&self) -> Result<usize> {
        if let Some(cuda) = self.cuda() {
            return Ok(cuda.place("nranks")?.1);
        }
        Ok(self.member("nranks")?.place("nranks")?.1)
    }

    /// Where the memory of this communicator lives.
    pub fn device(&self) -> Result<Place> {
        if let Some(cuda) = self.cuda() {
            return Ok(Place::Cuda(cuda.open("device")?.gpu().ordinal()));
        }
        self.member("device").map(|_| Place::Host)
    }

    /// What it is called in errors and logs.
    pub fn name(&self) -> Result<&str> {
        if let Some(cuda) = self.cuda() {
            return cuda.open("name").map(|_| cuda.config.name.as_str());
        }
        Ok(&self.member("name")?.config.name)
    }

    /// Whether it can be used: it is neither null nor closed. Local.
    pub fn is_valid(&self) -> bool {
        match &self.engine {
            Engine::Null => false,
            Engine::Host(member) => member.is_open(),
            Engine::Nccl(cuda) => cuda.comm.is_open(),
        }
    }

    /// Whether that rank's memory can be shared with this process; true for this rank itself. Local.
    pub fn is_near(&self, rank: usize) -> Result<bool> {
        let team = self.member("is_near")?.team("is_near")?;
        if rank >= team.nranks() {
            return Err(Error::invalid(
                "is_near",
                format!("there is no rank {rank} among {}", team.nranks()),
            ));
        }
        Ok(team.is_near(rank))
    }

    /// The ranks that cannot be reached any more. Local.
    pub fn dead_ranks(&self) -> Result<Vec<usize>> {
        Ok(self.member("dead_ranks")?.team("dead_ranks")?.dead())
    }

    /// How many windows and registered buffers are open. Local.
    pub fn open_handles(&self) -> Result<usize> {
        if let Some(cuda) = self.cuda() {
            return Ok(cuda.open("open_handles")?.open_handles());
        }
        let member = self.member("open_handles")?;
        Ok(member.memory.count())
    }

    /// How far the work of this communicator is: in progress, done, or the error with which it ended. Local.
    ///
    /// On a blocking communicator nothing is ever in progress between calls; the error is the one that made the group
    /// unusable.
    pub fn get_async_error(&self) -> Result<Progress> {
        if let Some(cuda) = self.cuda() {
            return cuda.progress();
        }
        let member = self.member("get_async_error")?;
        match member.worker.progress()? {
            Progress::InProgress => Ok(Progress::InProgress),
            Progress::Done => match member.team("get_async_error").ok().and_then(|team| team.failure()) {
                Some(error) => Err(error),
                None => Ok(Progress::Done),
            },
        }
    }

    /// Waits until the work of this communicator is done, for at most its timeout. Local.
    pub fn synchronize(&self) -> Result<()> {
        if let Some(cuda) = self.cuda() {
            return Ok(cuda.open("synchronize")?.synchronize()?);
        }
        let member = self.member("synchronize")?;
        member.wait_idle();
        match self.get_async_error()? {
            Progress::Done => Ok(()),
            Progress::InProgress => {
                Err(Error::new(Kind::Timeout, "synchronize", "work is still in progress"))
            }
        }
    }

    /// Makes a call and follows it to its end: immediately on a blocking communicator, otherwise when its work is done,
    /// inside a group after the outermost end. For calls whose own result says nothing about that: collectives,
    /// messages, registrations of windows, waits for signals, flushes and fences.
    ///
    /// ```
    /// use towline_comm::{Communicator, Config, get_unique_id};
    /// let config = Config { blocking: false, ..Config::default() };
    /// let comm = Communicator::init(1, 0, &get_unique_id()?, config)?;
    /// let barrier = comm.follow("barrier", |comm| comm.barrier())?;
    /// barrier.wait()?; // or: barrier.await
    /// # Ok::<(), towline_comm::Error>(())
    /// ```
    pub fn follow(
        &self,
        op: &'static str,
        call: impl FnOnce(&Communicator) -> Result<()>,
    ) -> Result<Operation> {
        if self.cuda().is_some() {
            return Cuda::follow(|| call(self));
        }
        let member = self.member(op).map_err(group::poison)?;
        if member.config.blocking && !group::is_open() {
            call(self)?;
            return Ok(Operation::done(Ok(0)));
        }
        let (operation, promise) = Operation::live(op, member.config.timeout, true);
        group::follow(promise, || call(self))?;
        Ok(operation)
    }

    /// The bytes of a storage, for a call: those of a window or registered buffer where it lies in one, otherwise
    /// memory that no other rank reaches. Local.
    pub fn memory(&self, storage: impl Storage) -> Result<Memory> {
        if let Some(cuda) = self.cuda() {
            return cuda.memory(storage);
        }
        let member = self.member("memory")?;
        let storage = Buffer::new(storage);
        host_only("memory", &storage)?;
        if let Some(memory) = member.memory.containing(&storage)? {
            return Ok(memory);
        }
        Ok(Memory::loose(member.endpoint().register(storage, towline::Access::NONE)?))
    }

    /// Registers a buffer with this communicator for zero-copy communication. Local, and immediate also inside a group.
    // Always inlined: a result of four words, written by the word and read by two, makes the processor wait for its own stores,
    // which was a third of what a registration with NCCL has over.
    #[inline(always)]
    pub fn register_buffer(&self, storage: impl Storage) -> Result<RegisteredBuffer> {
        let storage = Buffer::new(storage);
        let Some(cuda) = self.cuda() else { return self.register_on_host(storage).map(|buffer| *buffer) };
        match cuda.comm.register(storage) {
            Ok(registered) => Ok(RegisteredBuffer::on_device(registered)),
            Err(error) => Err(not_registered(error)),
        }
    }

    /// In a box: a result of four words would go through memory in both cases.
    #[inline(never)]
    fn register_on_host(&self, storage: Buffer) -> Result<Box<RegisteredBuffer>> {
        let register = || {
            let member = self.member("register_buffer")?;
            member.check_usable("register_buffer")?;
            host_only("register_buffer", &storage)?;
            let size = towline::MemoryDescription::size(&storage);
            let (core, offset) = member.memory.register_buffer(storage)?;
            Ok(Box::new(RegisteredBuffer::new(member, core, offset, size)))
        };
        register().map_err(|error: Error| group::poison(error.during("register_buffer")))
    }

    /// Waits until every rank has called it and everything of this rank that was in flight has landed. Later calls are
    /// `Invalid`, [`destroy`](Self::destroy) excepted. A second call is harmless.
    pub fn finalize(&self) -> Result<()> {
        if let Some(cuda) = self.cuda() {
            group::refuse("finalize")?;
            return Ok(cuda.open("finalize")?.finalize()?);
        }
        let member = self.member("finalize")?;
        if member.check_usable("finalize").is_err() {
            return Ok(());
        }
        self.submit("finalize", |member| {
            member.mark_finalized();
            Ok(Job::Call(Box::new(|member, team| {
                let landed = flush_all(member, team);
                let _one_call = team.serialise();
                team.barrier().map_err(|error| error.during("finalize"))?;
                landed
            })))
        })
    }

    /// Closes all handles once work in flight has ended, and leaves the group. Local; a second call is harmless. What
    /// other ranks still access gives them `Stale`; [`finalize`](Self::finalize) first waits for them.
    pub fn destroy(&self) {
        match &self.engine {
            Engine::Null => {}
            Engine::Host(member) => member.close(None),
            Engine::Nccl(cuda) => cuda.comm.destroy(),
        }
    }

    /// Ends the work in flight on every rank with an error, then closes all handles. Local; unblocks every rank.
    pub fn abort(&self) {
        if let Engine::Nccl(cuda) = &self.engine {
            cuda.comm.abort();
        }
        if let Engine::Host(member) = &self.engine
            && member.is_open()
            && towline::fork_guard("abort").is_ok()
        {
            let (rank, _) = member.place("abort").unwrap_or_default();
            let why = Error::new(Kind::Canceled, "abort", "a rank aborted the communicator").about([rank]);
            let why = match member.team("abort") {
                Ok(team) => team.with_reason(why),
                Err(_) => why,
            };
            member.close(Some(&why));
        }
    }

    /// Ends the work in flight on every rank with an error and forbids further calls; [`shrink`](Self::shrink),
    /// [`destroy`](Self::destroy) and [`abort`](Self::abort) stay possible. Local.
    pub fn revoke(&self) -> Result<()> {
        if let Some(cuda) = self.cuda() {
            return Ok(cuda.open("revoke")?.revoke()?);
        }
        self.member("revoke")?.team("revoke")?.revoke();
        Ok(())
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.destroy();
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let member = match &self.engine {
            Engine::Null => return f.write_str("Communicator(null)"),
            Engine::Nccl(cuda) => return f.debug_tuple("Communicator").field(&cuda.comm).finish(),
            Engine::Host(member) => member,
        };
        let mut shown = f.debug_struct("Communicator");
        shown.field("name", &member.config.name);
        match member.place("debug") {
            Ok((rank, nranks)) => shown.field("rank", &rank).field("nranks", &nranks),
            Err(_) => shown.field("open", &member.is_open()),
        };
        shown.finish()
    }
}

/// A rank of this process that joins beside the others.
type Joiner<'scope> = Result<ScopedJoinHandle<'scope, Result<Communicator>>>;

fn start_rank<'scope>(
    scope: &'scope Scope<'scope, '_>,
    stop: &Stop,
    join: impl FnOnce() -> Result<Communicator> + Send + 'scope,
) -> Joiner<'scope> {
    let stop = stop.clone();
    let joining = move || stop.during(join);
    Ok(start_scoped_thread(scope, "init_all", "towline-rank", joining)?)
}

/// All of them, or why one is missing: that its thread could not be started says more than that the others have waited for it, for
/// which they need not wait any longer.
fn all_ranks(ranks: Vec<Joiner<'_>>, stop: &Stop) -> Result<Vec<Communicator>> {
    let (mut joined, mut missing) = (Vec::new(), None);
    for rank in ranks {
        match rank {
            Ok(thread) => joined.push(
                interrupt::join(thread, "init_all", |_| stop.now())
                    .unwrap_or_else(|_| Err(Error::new(Kind::Internal, "init_all", "a thread panicked"))),
            ),
            Err(error) => missing = Some(error),
        }
    }
    missing.map_or_else(|| joined.into_iter().collect(), Err)
}

#[cold]
#[inline(never)]
fn not_registered(error: towline::Error) -> Error {
    group::poison(Error::from(error).during("register_buffer"))
}

fn open_station(config: &Config, rank: usize) -> Result<Arc<Station>> {
    let mut options = Endpoint::options(&format!("{}:{rank}", config.name))
        .routing(config.routing.clone())
        .quotas(config.quotas)
        .share_between_containers(config.share_between_containers)
        .nixl(config.nixl.clone());
    for address in &config.listen {
        options = options.listen(*address);
    }
    for address in &config.advertise {
        options = options.advertise(*address);
    }
    if let Some(tls) = &config.tls {
        options = options.tls(tls.clone());
    }
    Ok(Arc::new(Station { endpoint: options.open()?, mail: Mutex::new(Vec::new()) }))
}

/// Meets the other ranks and takes the seat.
fn meet(
    member: &Arc<Member>,
    nranks: usize,
    rank: usize,
    id: &UniqueId,
    about: u64,
    op: &'static str,
) -> Result<()> {
    // A rank outside the group has no seat, but the others must learn of it.
    let seat = (rank < nranks)
        .then(|| Seat::open(member.endpoint(), nranks, member.config.team_options(nranks)))
        .transpose()?;
    let ticket = seat.as_ref().map(Seat::ticket).transpose()?;
    let joining = Joining {
        nranks,
        rank,
        digest: member.config.digest() ^ about,
        name: &member.config.name,
        ticket: ticket.as_ref(),
        timeout: member.config.timeout,
    };
    let tickets = bootstrap::join(id, &joining).map_err(|error| error.during(op))?;
    let Some(seat) = seat else {
        return Err(Error::invalid(op, format!("there is no rank {rank} among {nranks}")).about([rank]));
    };
    let team = Team::assemble(seat, rank, tickets.clone()).map_err(|error| error.during(op))?;
    member.seat(Seating { rank, nranks, tickets, group_id: *id.nonce() }, team)
}
