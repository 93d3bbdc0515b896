//! The rows of `all_reduce`: by windows, by registered buffers and by neither, in turns with the peers.

use std::sync::{Arc, Barrier};
use std::time::Instant;

use rustix::thread::{CpuSet, sched_setaffinity};
use towline::memory::MemoryAccess;
use towline_comm::mem_alloc;

use super::super::Session;
use super::super::report::{Row, Unit};
use super::group::Group;
use super::peers::{Peer, Peers, SETTINGS};
use crate::measure::{Pace, median};
use crate::outcome::{Failure, Outcome};
use crate::raw::{Memory as RawMemory, RawSum};
use crate::worker::order::{Memory, Order};
use crate::{machine, size};

/// A turn shorter than this would measure how the processes start.
const TURN: f64 = 0.03;

/// How many turns decide which settings are best.
const TRIALS: usize = 3;

/// A size, and how rows call it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size(pub(super) &'static str, pub(super) u64);

pub(super) const SIZES: [Size; 3] = [Size("1k", 1 << 10), Size("1m", 1 << 20), Size("64m", 64 << 20)];

/// From this many bytes on the memory sets a limit, which is measured.
const BARE_FROM: u64 = 64 << 20;

/// Windows are asked to be this much faster than unregistered memory at the largest size.
const WINDOWS_AHEAD: f64 = 1.3;

pub(super) fn name(size: Size) -> String {
    format!("all-reduce-{}", size.0)
}

/// Measures the rows of those sizes in one group.
pub(super) fn run(session: &mut Session, peers: &Peers, nranks: usize, sizes: &[Size], quick: bool) {
    session.progress.says(&format!("{nranks} ranks: looking for the best settings of Open MPI"));
    let group = match Group::start(nranks, false) {
        Ok(group) => group,
        Err(failure) => {
            sizes.iter().for_each(|size| session.fail(name(*size), None, &failure));
            return;
        }
    };
    let best = best_settings(peers, nranks, sizes, if quick { 3 } else { SETTINGS.len() });
    let waiting = Err(Failure::lacking("it has not been started"));
    let mut field = Field { group, bare: None, open_mpi: waiting, gloo: peers.gloo(nranks) };
    for (size, best) in sizes.iter().zip(best) {
        session.step(&format!("{nranks}-ranks/{}", name(*size)));
        let (label, started) = match best {
            Ok(index) => (SETTINGS[index].0, peers.open_mpi(nranks, SETTINGS[index].1)),
            Err(failure) => ("", Err(failure)),
        };
        field.open_mpi = started;
        match field.measure(session.pace, *size) {
            Ok(times) => rows(session, nranks, *size, &times, label, &field),
            Err(failure) => session.fail(name(*size), None, &failure),
        }
    }
}

/// For each size the settings with which Open MPI is fastest.
fn best_settings(peers: &Peers, nranks: usize, sizes: &[Size], tried: usize) -> Vec<Outcome<usize>> {
    let mut best: Vec<Outcome<(f64, usize)>> =
        sizes.iter().map(|_| Err(Failure::lacking("Open MPI does not run here"))).collect();
    for (index, (_, settings)) in SETTINGS.iter().enumerate().take(tried) {
        let mut peer = match peers.open_mpi(nranks, settings) {
            Ok(peer) => peer,
            Err(failure) => return sizes.iter().map(|_| Err(failure.clone())).collect(),
        };
        for (size, best) in sizes.iter().zip(&mut best) {
            let Ok(time) = trial(&mut peer, *size) else { break };
            if best.as_ref().map_or(true, |(least, _)| time < *least) {
                *best = Ok((time, index));
            }
        }
    }
    best.into_iter().map(|best| best.map(|(_, index)| index)).collect()
}

fn trial(peer: &mut Peer, size: Size) -> Outcome<f64> {
    let repeats = repeats(peer.all_reduce(size.1, 2)?);
    let mut times = (0..TRIALS).map(|_| peer.all_reduce(size.1, repeats)).collect::<Outcome<Vec<_>>>()?;
    Ok(median(&mut times))
}

fn repeats(once: f64) -> u64 {
    (TURN / once.max(1e-7)).clamp(1.0, 20_000.0) as u64
}

/// Who takes a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Runner {
    Ours(Memory),
    Bare,
    OpenMpi,
    Gloo,
}

/// Everybody who is measured in turns.
struct Field {
    group: Group,
    bare: Option<Bare>,
    open_mpi: Outcome<Peer>,
    gloo: Outcome<Peer>,
}

/// What ranks read and write in a sum, by threads of this process and with nothing around it: the limit that the memory sets. Where
/// ranks share cores it is not a limit: four loops on two cores were slower than the ranks.
struct Bare {
    sum: RawSum,
    threads: usize,
}

impl Bare {
    fn new(nranks: usize, size: Size) -> Outcome<Bare> {
        let memories = || -> Outcome<Vec<RawMemory>> {
            let one = |_| {
                let storage = mem_alloc(size.1 as usize)?;
                storage.memset(0, 0, size.1 as usize)?;
                Ok(RawMemory::Storage(Arc::new(storage)))
            };
            (0..nranks).map(one).collect()
        };
        let sum = RawSum::new(memories()?, memories()?).map_err(|error| Failure::os("bare sum", error))?;
        Ok(Bare { sum, threads: nranks })
    }

    /// The seconds of one sum: of the slowest thread, each on a core of its own.
    fn seconds(&self, repeats: u64) -> f64 {
        let start = Barrier::new(self.threads);
        let thread = |index: usize| {
            let mut core = CpuSet::new();
            core.set(index);
            // Where it may not be there, the scheduler finds it a place.
            let _ = sched_setaffinity(None, &core);
            start.wait();
            let since = Instant::now();
            for _ in 0..repeats {
                self.sum.run(self.sum.part(index, self.threads));
            }
            since.elapsed().as_secs_f64() / repeats.max(1) as f64
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads).map(|index| scope.spawn(move || thread(index))).collect();
            threads.into_iter().filter_map(|thread| thread.join().ok()).fold(0.0, f64::max)
        })
    }
}

/// Notes why a peer does not take part; the first reason counts.
fn leave(peer: &mut Outcome<Peer>, failure: Failure) {
    if peer.is_ok() {
        *peer = Err(failure);
    }
}

/// The median of everybody's turns, in seconds; `None` for who is not here.
struct Times {
    ours: [f64; 3],
    bare: Option<f64>,
    open_mpi: Option<f64>,
    gloo: Option<f64>,
    rounds: usize,
}

impl Field {
    fn turn(&mut self, runner: Runner, size: Size, repeats: u64) -> Outcome<f64> {
        let theirs = |peer: &mut Outcome<Peer>, size: Size, repeats| match peer {
            Ok(peer) => peer.all_reduce(size.1, repeats),
            Err(failure) => Err(failure.clone()),
        };
        match runner {
            Runner::Ours(memory) => self.group.seconds(&Order::AllReduce { memory, bytes: size.1, repeats }),
            Runner::Bare => match &self.bare {
                Some(bare) => Ok(bare.seconds(repeats)),
                None => Err(Failure::lacking("it is not measured at this size")),
            },
            Runner::OpenMpi => theirs(&mut self.open_mpi, size, repeats),
            Runner::Gloo => theirs(&mut self.gloo, size, repeats),
        }
    }

    fn measure(&mut self, pace: Pace, size: Size) -> Outcome<Times> {
        let mut runners: Vec<(Runner, u64, Vec<f64>)> = Vec::new();
        let nranks = self.group.nranks();
        let wanted = size.1 >= BARE_FROM && nranks <= machine::cores();
        self.bare = wanted.then(|| Bare::new(nranks, size)).transpose()?;
        let all = Memory::ALL.map(Runner::Ours).into_iter();
        for runner in all.chain([Runner::Bare, Runner::OpenMpi, Runner::Gloo]) {
            let once = self.turn(runner, size, 2).and_then(|_| self.turn(runner, size, 2));
            match once {
                Ok(once) => runners.push((runner, repeats(once), Vec::new())),
                // A peer that fails is reported as absent; ours must work.
                Err(failure) if matches!(runner, Runner::Ours(_)) => return Err(failure),
                Err(_) if runner == Runner::Bare => {}
                Err(failure) if runner == Runner::OpenMpi => leave(&mut self.open_mpi, failure),
                Err(failure) => leave(&mut self.gloo, failure),
            }
        }
        let start = Instant::now();
        let budget = pace.budget * 2;
        let mut rounds = 0;
        while rounds < pace.most && (rounds < pace.fewest || start.elapsed() < budget) {
            for at in order(runners.len(), rounds) {
                let (runner, repeats, _) = runners[at];
                let time = self.turn(runner, size, repeats)?;
                runners[at].2.push(time);
            }
            rounds += 1;
        }
        self.group.each(|_| Order::Forget)?;
        self.bare = None;
        let mut of = |wanted: Runner| {
            runners.iter_mut().find(|(runner, ..)| *runner == wanted).map(|(_, _, times)| median(times))
        };
        let ours = Memory::ALL.map(|memory| of(Runner::Ours(memory)).unwrap_or(f64::NAN));
        let (open_mpi, gloo) = (of(Runner::OpenMpi), of(Runner::Gloo));
        Ok(Times { ours, bare: of(Runner::Bare), open_mpi, gloo, rounds })
    }
}

/// In which order turns are taken in a round: who comes first changes, and so does who comes after whom.
fn order(count: usize, round: usize) -> impl Iterator<Item = usize> {
    let backwards = round % 2 == 1;
    (0..count).map(move |place| (if backwards { count - 1 - place } else { place } + round / 2) % count)
}

fn rows(session: &mut Session, nranks: usize, size: Size, times: &Times, label: &str, field: &Field) {
    let small = size.1 < 64 << 10;
    let shown = |seconds: f64| if small { seconds * 1e6 } else { size::gib_per_second(size.1, seconds) };
    let unit = if small { Unit::Microseconds } else { Unit::Rate };
    let open_mpi = match &field.open_mpi {
        Ok(_) => format!("Open MPI ({label})"),
        Err(failure) => format!("Open MPI: {failure}"),
    };
    let gloo = field.gloo.as_ref().map_or_else(|failure| format!("gloo: {failure}"), |_| "gloo".to_owned());
    let base = |memory: Memory, ours: f64| Row {
        path: Some(memory.name().into()),
        op: Some("sum f32".into()),
        bytes: size.1,
        ranks: Some(nranks),
        rounds: times.rounds,
        ..Row::new(name(size), unit, shown(ours))
    };
    for (memory, ours) in Memory::ALL.into_iter().zip(times.ours) {
        for (against, limit) in [(&open_mpi, times.open_mpi), (&gloo, times.gloo)] {
            let row = base(memory, ours).against(against.clone(), limit.map(shown), Some(1.0));
            session.rows.push(row);
        }
    }
    let [window, _, unregistered] = times.ours;
    let goal = (size.1 >= 64 << 20).then_some(WINDOWS_AHEAD);
    session.rows.push(base(Memory::Window, window).against("unregistered", Some(shown(unregistered)), goal));
    if let Some(bare) = times.bare {
        for (memory, ours) in [(Memory::Window, window), (Memory::Unregistered, unregistered)] {
            session.rows.push(base(memory, ours).against(
                "bare loop on as many cores",
                Some(shown(bare)),
                None,
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_has_one_turn_in_a_round_and_nobody_is_always_first() {
        let mut first = Vec::new();
        for round in 0..10 {
            let mut turns: Vec<usize> = order(5, round).collect();
            first.push(turns[0]);
            turns.sort_unstable();
            assert_eq!(turns, [0, 1, 2, 3, 4]);
        }
        first.sort_unstable();
        assert_eq!(first, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]);
    }
}
