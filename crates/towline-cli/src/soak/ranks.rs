//! Groups of ranks of which one is killed, stopped or leaves: the others learn of it, and no word is wrong before.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a round fails by panicking")]

use std::time::{Duration, Instant};

use towline::{Dtype, Kind, Routing, SystemStorage};
use towline_comm::{
    Communicator, Config, Memory, Op, UniqueId, WaitSignal, Window, WindowFlag, get_unique_id, mem_alloc,
};
use towline_testkit::process::{Failure, Process};
use towline_testkit::random::Random;
use towline_testkit::soak::{Campaign, Drill, PYTHON, Round, STALL, rounds, start_python};

/// The most bytes of one step.
const MOST: usize = 256 << 10;

/// The longest wait for another rank.
const TIMEOUT: Duration = STALL.saturating_mul(2);

/// A rank in Python.
const RANK: &str = include_str!("rank.py");

/// What the ranks send from, what they receive into, and where puts land.
const ROOM: usize = 4 * MOST;

pub(super) static CAMPAIGNS: [Campaign; 1] = [Campaign {
    name: "ranks",
    summary: "a rank dies, stands still or leaves in a collective or a put: the others get an error that names it, and no wrong word",
    lanes: &["mapped", "tcp", PYTHON],
    rounds: rounds(10, 14, 300),
    prepare: |course| Ok(Box::new(Ranks { lane: course.lane })),
}];

struct Ranks {
    lane: &'static str,
}

impl Ranks {
    /// The path of a round, and which of its ranks are interpreters: in the lane of Python at least one, beside those in Rust.
    fn cast(&self, round: &mut Round, nranks: usize) -> (&'static str, Vec<bool>) {
        if self.lane != PYTHON {
            return (self.lane, vec![false; nranks]);
        }
        let path = round.random.pick(&["mapped", "tcp"]);
        let always = round.random.below(nranks as u64) as usize;
        (path, (0..nranks).map(|rank| rank == always || round.random.below(2) == 0).collect())
    }
}

impl Drill for Ranks {
    fn round(&mut self, round: &mut Round) {
        let nranks = 2 + round.random.below(3) as usize;
        let victim = round.random.below(nranks as u64) as usize;
        let how = round.random.pick(&["kill", "stop", "exit"]);
        let moment = Duration::from_millis(2) + round.random.micros(60_000);
        let seed = round.random.number();
        let (path, python) = self.cast(round, nranks);
        let id = get_unique_id().unwrap();
        let script = format!("TIMEOUT = {}\n{RANK}", TIMEOUT.as_secs_f64());
        let mut ranks: Vec<Process> = (0..nranks)
            .map(|rank| {
                let name = format!("rank-{rank}");
                if python[rank] { start_python(&name, &script) } else { Process::start(&name) }
            })
            .collect();
        // An interpreter may need longer to start than the others wait for it.
        for (process, _) in ranks.iter_mut().zip(&python).filter(|(_, python)| **python) {
            process.answer(STALL * 20).unwrap_or_else(|failure| panic!("a rank does not start: {failure}"));
        }
        for (rank, process) in ranks.iter_mut().enumerate() {
            process.tell(&format!("rank {id} {nranks} {rank} {seed} {path}"));
        }
        for rank in &mut ranks {
            rank.answer(STALL * 20).unwrap_or_else(|failure| panic!("a rank does not join: {failure}"));
        }
        std::thread::sleep(moment);
        let begun = Instant::now();
        match how {
            "kill" => ranks[victim].kill_at_once(),
            "stop" => ranks[victim].stop(),
            // Its input ends, and with it the worker: as a rank that exits in the middle of a call.
            _ => ranks[victim].end_input(),
        }
        for (rank, process) in ranks.iter_mut().enumerate().filter(|(rank, _)| *rank != victim) {
            let failure = process.answer(STALL * 20).expect_err("a rank goes on without another");
            let right =
                matches!(failure.kind, Kind::Disconnected | Kind::Timeout | Kind::Stale | Kind::Canceled);
            assert!(right, "rank {rank} after {how} of rank {victim}: {failure}");
            let name = if how == "stop" { "learnt of a standstill" } else { "learnt of an end" };
            round.tally.time(name, begun.elapsed());
        }
        if python[victim] {
            round.tally.count("victims in Python", 1);
        }
        round.tally.count("groups", 1);
    }
}

/// The order `rank ID NRANKS RANK SEED LANE`: answers when it has joined, and with the error that ended it.
pub(super) fn further(order: &str, say: &mut dyn FnMut(&str)) -> Option<Result<String, Failure>> {
    let words: Vec<&str> = order.split_whitespace().collect();
    let ["rank", id, nranks, rank, seed, lane] = words.as_slice() else { return None };
    let outcome = (|| {
        let bad = |what: &str| Failure { kind: Kind::Invalid, message: format!("{what} of a rank") };
        let id: UniqueId = id.parse().map_err(told)?;
        let nranks = nranks.parse().map_err(|_| bad("number"))?;
        let rank = rank.parse().map_err(|_| bad("place"))?;
        let seed = seed.parse().map_err(|_| bad("seed"))?;
        let mut config = Config { timeout: TIMEOUT, ..Config::default() };
        if *lane == "tcp" {
            config.routing = Routing::default().require("tcp").map_err(Failure::from)?;
        }
        let comm = Communicator::init(nranks, rank, &id, config).map_err(told)?;
        let mut group = Group::new(comm, nranks, rank).map_err(told)?;
        say("joined");
        let mut random = Random::from_seed(seed);
        loop {
            group.step(&mut random)?;
        }
    })();
    Some(outcome)
}

fn told(error: towline_comm::Error) -> Failure {
    Failure { kind: error.kind(), message: error.to_string() }
}

struct Group {
    comm: Communicator,
    nranks: usize,
    rank: usize,
    window: Window,
    memory: Memory,
    step: u64,
}

impl Group {
    fn new(comm: Communicator, nranks: usize, rank: usize) -> towline_comm::Result<Group> {
        let window = comm.register_window(mem_alloc(ROOM)?, WindowFlag::DEFAULT)?.unwrap();
        let memory = comm.memory(SystemStorage::new(ROOM)?)?;
        Ok(Group { comm, nranks, rank, window, memory, step: 0 })
    }

    /// Words that tell the step and the rank that they come from.
    fn words(&self, rank: usize, len: usize) -> Vec<u8> {
        let first = self.step.wrapping_mul(0x9e37_79b9) ^ ((rank as u64) << 40);
        (0..len as u64 / 8).flat_map(|index| first.wrapping_add(index * 3).to_ne_bytes()).collect()
    }

    fn expect(&self, what: &str, got: &[u8], right: &[u8]) -> Result<(), Failure> {
        match got.iter().zip(right).position(|(got, right)| got != right) {
            None => Ok(()),
            Some(at) => Err(Failure {
                kind: Kind::Internal,
                message: format!("{what} in step {} gave a wrong word at offset {}", self.step, at & !7),
            }),
        }
    }

    /// One call, the same on all ranks.
    fn step(&mut self, random: &mut Random) -> Result<(), Failure> {
        self.step += 1;
        let len = 8 << random.below(16);
        let len = usize::min(len, MOST);
        match random.below(4) {
            0 => self.comm.barrier().map_err(told),
            1 => self.all_reduce(len),
            2 => self.broadcast(len, random.below(self.nranks as u64) as usize),
            _ => self.put(len),
        }
    }

    fn all_reduce(&self, len: usize) -> Result<(), Failure> {
        let (send, recv) =
            (self.memory.part(0, len).map_err(told)?, self.memory.part(MOST, len).map_err(told)?);
        send.write_at(0, &self.words(self.rank, len)).map_err(told)?;
        self.comm.all_reduce(&send, &recv, Dtype::U64, Op::Sum).map_err(told)?;
        let mut sums = vec![0u64; len / 8];
        for rank in 0..self.nranks {
            for (sum, word) in sums.iter_mut().zip(self.words(rank, len).chunks_exact(8)) {
                *sum = sum.wrapping_add(u64::from_ne_bytes(word.try_into().unwrap_or_default()));
            }
        }
        let right: Vec<u8> = sums.into_iter().flat_map(u64::to_ne_bytes).collect();
        let mut got = vec![0; len];
        recv.read_at(0, &mut got).map_err(told)?;
        self.expect("all_reduce", &got, &right)
    }

    fn broadcast(&self, len: usize, root: usize) -> Result<(), Failure> {
        let (send, recv) =
            (self.memory.part(0, len).map_err(told)?, self.memory.part(MOST, len).map_err(told)?);
        send.write_at(0, &self.words(self.rank, len)).map_err(told)?;
        let from = (self.rank == root).then_some(&send);
        self.comm.broadcast(from, Some(&recv), Dtype::U8, root).map_err(told)?;
        let mut got = vec![0; len];
        recv.read_at(0, &mut got).map_err(told)?;
        self.expect("broadcast", &got, &self.words(root, len))
    }

    fn put(&self, len: usize) -> Result<(), Failure> {
        let (next, before) = ((self.rank + 1) % self.nranks, (self.rank + self.nranks - 1) % self.nranks);
        let bytes = self.words(self.rank, len);
        let put = self.window.put_signal_bytes(next, 0, &bytes, 0, 0).map_err(told)?;
        self.comm.wait_signal(&[WaitSignal::from_rank(before)]).map_err(told)?;
        let mut got = vec![0; len];
        self.window.memory().and_then(|memory| memory.read_at(0, &mut got)).map_err(told)?;
        self.expect("put_signal", &got, &self.words(before, len))?;
        put.wait().map_err(told)?;
        // Nobody writes there again before everybody has looked.
        self.comm.barrier().map_err(told)
    }
}
