//! Collectives and point to point on host memory: which algorithm, over which path, and why.
//!
//! Every call is first checked on its own rank ([`job`]), then announced with a digest of its arguments, so that ranks
//! that ask for different things all learn of it before a byte moves. What every rank announced decides the algorithm
//! ([`choice`], pure): [`tiny`] in the announcement itself, [`direct`] from memory to memory, [`channel`], [`tree`]
//! and [`pipeline`] through the channels between pairs of ranks. Messages between two ranks are in [`point`].

mod channel;
mod choice;
mod direct;
mod job;
mod pipeline;
mod point;
mod run;
#[cfg(test)]
mod tests;
mod tiny;
mod tree;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use self::channel::Pattern;
pub use self::choice::Algorithm;
use self::choice::Situation;
pub(crate) use self::choice::{Choice, Kind};
use self::direct::{Part, Reach, Whose};
pub(crate) use self::job::{Ask, Job, digest};
pub(crate) use self::point::Message;
use self::run::Run;
use crate::combine::Op;
use crate::memory::{BUFFER_BIT, Memory, RegisteredMemory, WindowCore};
use crate::team::{Call, PAYLOAD, Round, Team};
use crate::{Error, Result};

/// The collectives and messages of one communicator: what they remember, and the memory that they reach.
pub(crate) struct Collectives {
    memory: Arc<RegisteredMemory>,
    /// The longest wait for another rank.
    timeout: Duration,
    last: Mutex<Option<Choice>>,
    room: Mutex<tiny::Room>,
    /// Whether all ranks can map each other's registered buffers, by the ids that the ranks gave them.
    agreed: Mutex<HashMap<Vec<u64>, bool>>,
    sources: point::Sources,
}

/// This rank shares memory with all others.
const NEAR: u64 = 1;
/// All parts of the window from which this rank sends are mapped here.
const SEND_MAPPED: u64 = 2;
/// All parts of the window into which this rank receives are mapped here.
const RECV_MAPPED: u64 = 4;

impl Collectives {
    pub(crate) fn new(memory: Arc<RegisteredMemory>, timeout: Duration) -> Collectives {
        Collectives {
            memory,
            timeout,
            last: Mutex::default(),
            room: Mutex::default(),
            agreed: Mutex::default(),
            sources: Mutex::default(),
        }
    }

    /// The latest choice of an algorithm.
    pub(crate) fn last(&self) -> Option<Choice> {
        *self.last.lock()
    }

    fn remember(&self, choice: Choice) {
        *self.last.lock() = Some(choice);
    }

    /// Runs a collective call to its end. All ranks run the same calls in the same order.
    ///
    /// # Errors
    /// `Invalid` on every rank where they ask for different things or the algorithm asked for cannot work: nothing has
    /// happened, and the communicator stays usable. Any other error fails the communicator on all ranks.
    pub(crate) fn run(&self, team: &Arc<Team>, job: &Job<'_>) -> Result<()> {
        let name = job.kind.name();
        let nranks = team.nranks();
        let rides = choice::rides(job.kind, job.bytes(nranks), nranks, job.algorithm, PAYLOAD)?;
        let _one_call = team.serialise();
        if rides { self.run_tiny(team, job) } else { self.run_large(team, job) }
            .map_err(|error| error.during(name))
    }

    fn run_tiny(&self, team: &Team, job: &Job<'_>) -> Result<()> {
        let nranks = team.nranks();
        let mut room = self.room.lock();
        let room = &mut *room;
        let payload = room.payload.bytes(job.send.as_ref().map_or(0, |send| send.len()));
        if let Some(send) = &job.send {
            send.read_at(0, payload)?;
        }
        let words = [job.scale, 0, 0, 0];
        let call = Call { name: job.kind.name(), digest: job.digest(), words, payload };
        let round = team.enter_knowing(call)?;
        self.remember(choice::choose(situation(job, nranks, 0, 0), job.algorithm, true)?);
        if job.block == 0 {
            return Ok(());
        }
        let scales = match job.op {
            Op::ScaledSum(_) => (0..nranks).map(|rank| round.words(rank)[0]).collect(),
            _ => Vec::new(),
        };
        tiny::run(&Run { team, job, rank: team.rank(), nranks, scales, near: false }, &round, room)
    }

    fn run_large(&self, team: &Arc<Team>, job: &Job<'_>) -> Result<()> {
        let (rank, nranks) = (team.rank(), team.nranks());
        let announced = announce(&self.memory, team, job);
        let header = [announced.flags, job.scale];
        let call = Call {
            name: job.kind.name(),
            digest: job.digest(),
            words: announced.words,
            payload: bytemuck::cast_slice(&header),
        };
        let round = team.enter(call)?;
        let announced = Announcements::read(&round, nranks)?;
        // A rank that finds a window gone may be the first to notice that its rank has aborted: that is the cause then.
        let fail = |error: Error| team.fail(error);
        let (far, unregistered, reach) = announced.reach(self, team, job).map_err(fail)?;
        let choice = choice::choose(situation(job, nranks, far, unregistered), job.algorithm, false)?;
        self.remember(choice);
        if job.block == 0 {
            return Ok(());
        }
        let run = Run { team, job, rank, nranks, scales: announced.scales, near: far == 0 };
        match choice.algorithm {
            Algorithm::Direct => {
                let reach = reach.unwrap_or_else(|| Reach::alone(job));
                direct::run(&run, &reach).map_err(fail)?;
                team.leave(round)
            }
            algorithm => through_channels(&run, algorithm).map_err(fail),
        }
    }
}

fn through_channels(run: &Run<'_>, algorithm: Algorithm) -> Result<()> {
    let pattern = if algorithm == Algorithm::Ring { Pattern::Ring } else { Pattern::Pairwise };
    match (run.job.kind, algorithm) {
        (Kind::AllReduce, Algorithm::Tree) => tree::all_reduce(run),
        (Kind::Reduce, Algorithm::Tree) => tree::reduce(run),
        (Kind::Broadcast, Algorithm::Tree) => tree::broadcast(run),
        (Kind::AllReduce, Algorithm::Staged) if run.near => pipeline::all_reduce(run),
        (Kind::AllReduce, _) => channel::all_reduce(run, pattern),
        (Kind::Reduce, _) => channel::reduce(run, pattern),
        (Kind::Broadcast, _) => channel::broadcast(run, pattern),
        (Kind::AllGather, _) => channel::all_gather(run, pattern),
        (Kind::ReduceScatter, _) => channel::reduce_scatter(run, pattern),
        (Kind::Gather, _) => channel::gather(run),
        (Kind::Scatter, _) => channel::scatter(run),
        (Kind::AllToAll, _) => channel::all_to_all(run),
        (Kind::Send | Kind::Recv, _) => Ok(()),
    }
}

fn situation(job: &Job<'_>, nranks: usize, far: usize, unregistered: usize) -> Situation {
    Situation { kind: job.kind, bytes: job.bytes(nranks), nranks, far, unregistered }
}

/// What one rank sends the others about its memory.
struct Announced {
    words: [u64; 4],
    flags: u64,
}

fn announce(registered: &RegisteredMemory, team: &Team, job: &Job<'_>) -> Announced {
    let nranks = team.nranks();
    let mut flags = 0;
    if (0..nranks).all(|peer| team.is_near(peer)) {
        flags |= NEAR;
    }
    let mut words = [0; 4];
    for (Side { place, mapped }, memory) in [(SEND, job.send_home()), (RECV, job.recv_home())] {
        let Some((id, offset)) = memory.and_then(Memory::window) else { continue };
        words[place] = id;
        words[place + 1] = offset as u64;
        if flags & NEAR != 0
            && id & BUFFER_BIT == 0
            && registered.windows().find(id).is_some_and(|window| is_mapped(&window, nranks))
        {
            flags |= mapped;
        }
    }
    Announced { words, flags }
}

fn is_mapped(window: &WindowCore, nranks: usize) -> bool {
    (0..nranks).all(|rank| window.pinned(rank).is_some())
}

/// What all ranks announced.
struct Announcements {
    words: Vec<[u64; 4]>,
    flags: Vec<u64>,
    scales: Vec<u64>,
}

impl Announcements {
    fn read(round: &Round<'_>, nranks: usize) -> Result<Announcements> {
        let words = (0..nranks).map(|rank| round.words(rank)).collect();
        let (mut flags, mut scales) = (Vec::with_capacity(nranks), Vec::with_capacity(nranks));
        for rank in 0..nranks {
            let mut header = [0u64; 2];
            round.payload_into(rank, bytemuck::cast_slice_mut(&mut header))?;
            flags.push(header[0]);
            scales.push(header[1]);
        }
        Ok(Announcements { words, flags, scales })
    }

    /// How many ranks are far, how many have memory that the others cannot map, and how this rank reaches every rank's
    /// memory where it is neither. The numbers are the same on all ranks.
    fn reach(
        &self,
        collectives: &Collectives,
        team: &Arc<Team>,
        job: &Job<'_>,
    ) -> Result<(usize, usize, Option<Reach>)> {
        let nranks = team.nranks();
        let far = self.flags.iter().filter(|&flags| flags & NEAR == 0).count();
        if nranks == 1 || matches!(job.algorithm, Algorithm::Staged | Algorithm::Ring | Algorithm::Tree) {
            return Ok((far, 0, None));
        }
        let (send, recv) = direct::needs(job.kind);
        let (send, recv) = (self.plan(send, SEND, job.root), self.plan(recv, RECV, job.root));
        let missing = send.missing().max(recv.missing());
        if far > 0 || missing > 0 {
            return Ok((far, missing, None));
        }
        let meets = send == Plan::Asked || recv == Plan::Asked;
        let send = self.parts(collectives, team, job, send, SEND)?;
        let recv = self.parts(collectives, team, job, recv, RECV)?;
        let reach = send.zip(recv).map(|(send, recv)| Reach { send, recv });
        let all = if meets { everybody_says(team, reach.is_some())? } else { reach.is_some() };
        Ok(if all { (0, 0, reach) } else { (0, nranks, None) })
    }

    /// How the ranks come to reach the memory of one side: the same on all ranks.
    fn plan(&self, whose: Whose, side: Side, root: usize) -> Plan {
        if whose == Whose::Nobodys {
            return Plan::Nothing;
        }
        let ids = || self.words.iter().map(|words| words[side.place]);
        if ids().all(|id| id & BUFFER_BIT != 0) {
            return Plan::Buffers;
        }
        let common = self.words[root][side.place];
        let is_window = |id: u64| id != 0 && id & BUFFER_BIT == 0;
        if is_window(common)
            && ids().zip(&self.flags).all(|(id, flags)| id == common && flags & side.mapped != 0)
        {
            return Plan::Known;
        }
        match whose {
            Whose::Roots if is_window(common) => Plan::Asked,
            Whose::Roots => Plan::Missing(1),
            _ => match ids().filter(|&id| !is_window(id)).count() {
                0 => Plan::Asked,
                missing => Plan::Missing(missing),
            },
        }
    }

    /// Every rank's memory on one side, where this rank can map what the call needs of it. Ranks that use registered
    /// buffers together for the first time meet in here.
    fn parts(
        &self,
        collectives: &Collectives,
        team: &Arc<Team>,
        job: &Job<'_>,
        plan: Plan,
        side: Side,
    ) -> Result<Option<Vec<Part>>> {
        let nranks = team.nranks();
        let ids: Vec<u64> = self.words.iter().map(|words| words[side.place]).collect();
        let (mine, home) = match side.place {
            0 => (&job.send, job.send_home()),
            _ => (&job.recv, job.recv_home()),
        };
        let shared = match (plan, home) {
            (Plan::Nothing, _) => return Ok(Some(Vec::new())),
            (Plan::Buffers, Some(home)) => match collectives.memory.reachable(team, &ids, home)? {
                Some(window) if agree(collectives, team, &ids, is_mapped(&window, nranks))? => Some(window),
                _ => return Ok(None),
            },
            (Plan::Buffers | Plan::Missing(_), _) => return Ok(None),
            (Plan::Known | Plan::Asked, _) => None,
        };
        let (send, recv) = direct::needs(job.kind);
        let only_root = if side.place == 0 { send } else { recv } == Whose::Roots;
        let part = |rank: usize| {
            if only_root && rank != job.root {
                return Some(Part::Unneeded);
            }
            if rank == team.rank()
                && let Some(memory) = mine
            {
                return Some(Part::Mine(memory.clone().into_owned()));
            }
            let window = shared.clone().or_else(|| collectives.memory.windows().find(ids[rank]))?;
            Some(Part::Theirs {
                rank,
                pinned: window.pinned(rank)?,
                base: self.words[rank][side.place + 1] as usize,
            })
        };
        let parts: Option<Vec<Part>> = (0..nranks).map(part).collect();
        match (parts, plan) {
            // It was mapped when the ranks announced it, or agreed on it: they count on it.
            (None, Plan::Known | Plan::Buffers) => {
                let gone: Vec<usize> = (0..nranks).filter(|rank| part(*rank).is_none()).collect();
                let window =
                    |rank: usize| shared.clone().or_else(|| collectives.memory.windows().find(ids[rank]));
                let why = gone.iter().find_map(|rank| window(*rank)?.access(*rank, job.kind.name()).err());
                let message = "a rank closed its window or buffer during the call";
                let closed = || Error::new(towline::Kind::Stale, job.kind.name(), message);
                Err(why.unwrap_or_else(closed).about(gone))
            }
            (parts, _) => Ok(parts),
        }
    }
}

/// What is sent or what is received: where the announcement names it.
#[derive(Clone, Copy)]
struct Side {
    place: usize,
    mapped: u64,
}

const SEND: Side = Side { place: 0, mapped: SEND_MAPPED };
const RECV: Side = Side { place: 2, mapped: RECV_MAPPED };

/// How the ranks of a call come to reach the memory of one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plan {
    /// The call does not need it.
    Nothing,
    /// All use one window, and all have said that they map it.
    Known,
    /// The ranks use windows of their own: they have to ask each other whether all map what they need.
    Asked,
    /// All use registered buffers.
    Buffers,
    /// So many ranks use neither.
    Missing(usize),
}

impl Plan {
    fn missing(self) -> usize {
        if let Plan::Missing(ranks) = self { ranks } else { 0 }
    }
}

impl Reach {
    /// The memory of the only rank.
    fn alone(job: &Job<'_>) -> Reach {
        let part = |memory: Option<&Memory>| memory.cloned().map(Part::Mine).into_iter().collect();
        Reach { send: part(job.send.as_deref()), recv: part(job.recv.as_deref()) }
    }
}

/// Asks every rank once whether it can map these registered buffers. All ranks come here in the same call, and so
/// remember the same.
fn agree(collectives: &Collectives, team: &Team, ids: &[u64], mapped: bool) -> Result<bool> {
    /// A program that registers for every call would otherwise grow this for ever.
    const MOST_AGREED: usize = 4096;
    let known = || collectives.agreed.lock();
    if let Some(&agreed) = known().get(ids) {
        return Ok(agreed);
    }
    let agreed = everybody_says(team, mapped)?;
    let mut known = known();
    if known.len() >= MOST_AGREED {
        known.clear();
    }
    known.insert(ids.to_vec(), agreed);
    Ok(agreed)
}

/// Whether all ranks say yes; all of them come here in the same call.
fn everybody_says(team: &Team, yes: bool) -> Result<bool> {
    let answers = team.all_gather_bytes("agree", &[u8::from(yes)])?;
    Ok(answers.iter().all(|answer| answer == &[1]))
}
