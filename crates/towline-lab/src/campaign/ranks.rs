//! Groups of ranks of which one is killed, stopped or leaves, or that are cut in two: the others learn of it, and no word is wrong
//! before.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use towline::{Dtype, Kind, Routing, SystemStorage};
use towline_comm::{
    Communicator, Config, Memory, Op, UniqueId, UniqueIdOptions, WaitSignal, Window, WindowFlag,
    get_unique_id, get_unique_id_with, mem_alloc,
};
use towline_testkit::netns::{End, Network};
use towline_testkit::process::{Failure, Process};
use towline_testkit::random::Random;
use towline_testkit::scene::STALL;

use super::{Campaign, Drill, Lanes, PYTHON, Round, rounds, start_python};

/// The most bytes of one step.
const MOST: usize = 256 << 10;

/// The longest wait for another rank.
const TIMEOUT: Duration = STALL.saturating_mul(2);

/// A rank in Python.
const RANK: &str = include_str!("rank.py");

/// What the ranks send from, what they receive into, and where puts land.
const ROOM: usize = 4 * MOST;

pub(super) const CAMPAIGN: Campaign = Campaign {
    name: "ranks",
    summary: "a rank dies, stands still, leaves or is cut off in a collective or a put: the others get an error, and no wrong word",
    lanes: Lanes::Only(&["mapped", "tcp", PYTHON]),
    in_turns: false,
    rounds: rounds(10, 14, 300),
    prepare: |course| {
        // Without one, nothing is cut.
        let network = (course.lane != "mapped").then(Network::build).and_then(Result::ok);
        Ok(Box::new(Ranks { lane: course.lane, network }))
    },
};

struct Ranks {
    lane: &'static str,
    network: Option<Network>,
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

    /// The ranks are on two hosts, as far as one machine can play them, and the cable between these is pulled.
    fn cut_in_two(&self, round: &mut Round, network: &Network, nranks: usize, moment: Duration) {
        let seed = round.random.number();
        let (_, mut python) = self.cast(round, nranks);
        // The first opens the meeting, which a rank in Rust does, and the second is at the other end.
        python[0] = false;
        let ends: Vec<End> = (0..nranks)
            .map(|rank| match rank {
                0 => End::A,
                1 => End::B,
                _ => round.random.pick(&[End::A, End::B]),
            })
            .collect();
        let mut ranks: Vec<Process> =
            (0..nranks).map(|rank| start(rank, python[rank], Some(&network.namespace(ends[rank])))).collect();
        let listen = |end: End| SocketAddr::new(network.address(end, false), 0);
        let id = ranks[0].must(&format!("meet {}", listen(End::A))).text(0).to_owned();
        for (rank, process) in ranks.iter_mut().enumerate() {
            process.tell(&format!("rank {id} {nranks} {rank} {seed} tcp {}", listen(ends[rank])));
        }
        all_join(&mut ranks);
        std::thread::sleep(moment);
        let end = round.random.pick(&[End::A, End::B]);
        let begun = Instant::now();
        network.cut(end);
        let learnt: Vec<_> =
            ranks.iter_mut().map(|process| (process.answer(STALL * 20).err(), begun.elapsed())).collect();
        network.heal(end);
        for (rank, (failure, took)) in learnt.into_iter().enumerate() {
            let failure = failure.expect("a rank goes on over a cable that is out");
            assert!(is_of_others(&failure), "rank {rank} after a cut: {failure}");
            round.tally.time("learnt of a cut", took);
        }
        round.tally.count("groups", 1);
    }
}

/// Starts a rank, and waits until it takes orders: an interpreter may need longer to start than the others wait for it.
fn start(rank: usize, python: bool, namespace: Option<&str>) -> Process {
    let name = format!("rank-{rank}");
    match (python, namespace) {
        (false, None) => Process::start(&name),
        (false, Some(namespace)) => Process::start_in(namespace, &name),
        (true, namespace) => {
            let script = format!("TIMEOUT = {}\n{RANK}", TIMEOUT.as_secs_f64());
            let mut process = start_python(&name, &script, namespace);
            process.answer(STALL * 20).unwrap_or_else(|failure| panic!("a rank does not start: {failure}"));
            process
        }
    }
}

fn all_join(ranks: &mut [Process]) {
    for rank in ranks {
        rank.answer(STALL * 20).unwrap_or_else(|failure| panic!("a rank does not join: {failure}"));
    }
}

/// Whether it is an error that the fate of others may give a rank.
fn is_of_others(failure: &Failure) -> bool {
    matches!(failure.kind, Kind::Disconnected | Kind::Timeout | Kind::Stale | Kind::Canceled)
}

impl Drill for Ranks {
    fn round(&mut self, round: &mut Round) {
        let nranks = 2 + round.random.below(3) as usize;
        let victim = round.random.below(nranks as u64) as usize;
        let hows: &[&str] =
            if self.network.is_some() { &["kill", "stop", "exit", "cut"] } else { &["kill", "stop", "exit"] };
        let how = round.random.pick(hows);
        let moment = Duration::from_millis(2) + round.random.micros(60_000);
        if let ("cut", Some(network)) = (how, &self.network) {
            return self.cut_in_two(round, network, nranks, moment);
        }
        let seed = round.random.number();
        let (path, python) = self.cast(round, nranks);
        let id = get_unique_id().unwrap();
        let mut ranks: Vec<Process> = (0..nranks).map(|rank| start(rank, python[rank], None)).collect();
        for (rank, process) in ranks.iter_mut().enumerate() {
            process.tell(&format!("rank {id} {nranks} {rank} {seed} {path}"));
        }
        all_join(&mut ranks);
        std::thread::sleep(moment);
        let begun = Instant::now();
        match how {
            "kill" => ranks[victim].kill_without_waiting(),
            "stop" => ranks[victim].stop(),
            // Its input ends, and with it the worker: as a rank that exits in the middle of a call.
            _ => ranks[victim].end_input(),
        }
        for (rank, process) in ranks.iter_mut().enumerate().filter(|(rank, _)| *rank != victim) {
            let failure = process.answer(STALL * 20).expect_err("a rank goes on without another");
            assert!(is_of_others(&failure), "rank {rank} after {how} of rank {victim}: {failure}");
            let name = if how == "stop" { "learnt of a standstill" } else { "learnt of an end" };
            round.tally.time(name, begun.elapsed());
        }
        if python[victim] {
            round.tally.count("victims in Python", 1);
        }
        round.tally.count("groups", 1);
    }
}

/// The order `rank ID NRANKS RANK SEED LANE [LISTEN]`: answers when it has joined, and with the error that ended it. The order
/// `meet LISTEN`: answers with the id of a meeting there.
pub(crate) fn further(order: &str, say: &mut dyn FnMut(&str)) -> Option<Result<String, Failure>> {
    let words: Vec<&str> = order.split_whitespace().collect();
    let bad = |what: &str| Failure { kind: Kind::Invalid, message: format!("{what} of a rank") };
    if let ["meet", listen] = words.as_slice() {
        let address = listen.parse().map_err(|_| bad("address"));
        return Some(address.and_then(|address| {
            let options = UniqueIdOptions { listen: vec![address], ..UniqueIdOptions::default() };
            get_unique_id_with(&options).map(|id| id.to_string()).map_err(failure)
        }));
    }
    let ["rank", id, nranks, rank, seed, lane, listen @ ..] = words.as_slice() else { return None };
    let outcome = (|| {
        let id: UniqueId = id.parse().map_err(failure)?;
        let nranks = nranks.parse().map_err(|_| bad("number"))?;
        let rank = rank.parse().map_err(|_| bad("place"))?;
        let seed = seed.parse().map_err(|_| bad("seed"))?;
        let mut config = Config { timeout: TIMEOUT, ..Config::default() };
        if *lane == "tcp" {
            config.routing = Routing::default().require("tcp").map_err(Failure::from)?;
        }
        for address in listen {
            config.listen.push(address.parse().map_err(|_| bad("address"))?);
        }
        let comm = Communicator::init(nranks, rank, &id, config).map_err(failure)?;
        let mut group = Group::new(comm, nranks, rank).map_err(failure)?;
        say("joined");
        let mut random = Random::from_seed(seed);
        loop {
            if let Err(failure) = group.step(&mut random) {
                // To leave a group in which a rank stands still takes time, and that is not the time of the error.
                std::thread::spawn(move || drop(group));
                return Err(failure);
            }
        }
    })();
    Some(outcome)
}

fn failure(error: towline_comm::Error) -> Failure {
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
            0 => self.comm.barrier().map_err(failure),
            1 => self.all_reduce(len),
            2 => self.broadcast(len, random.below(self.nranks as u64) as usize),
            _ => self.put(len),
        }
    }

    fn all_reduce(&self, len: usize) -> Result<(), Failure> {
        let (send, recv) =
            (self.memory.part(0, len).map_err(failure)?, self.memory.part(MOST, len).map_err(failure)?);
        send.write_at(0, &self.words(self.rank, len)).map_err(failure)?;
        self.comm.all_reduce(&send, &recv, Dtype::U64, Op::Sum).map_err(failure)?;
        let mut sums = vec![0u64; len / 8];
        for rank in 0..self.nranks {
            for (sum, word) in sums.iter_mut().zip(self.words(rank, len).chunks_exact(8)) {
                *sum = sum.wrapping_add(u64::from_ne_bytes(word.try_into().unwrap_or_default()));
            }
        }
        let right: Vec<u8> = sums.into_iter().flat_map(u64::to_ne_bytes).collect();
        let mut got = vec![0; len];
        recv.read_at(0, &mut got).map_err(failure)?;
        self.expect("all_reduce", &got, &right)
    }

    fn broadcast(&self, len: usize, root: usize) -> Result<(), Failure> {
        let (send, recv) =
            (self.memory.part(0, len).map_err(failure)?, self.memory.part(MOST, len).map_err(failure)?);
        send.write_at(0, &self.words(self.rank, len)).map_err(failure)?;
        let from = (self.rank == root).then_some(&send);
        self.comm.broadcast(from, Some(&recv), Dtype::U8, root).map_err(failure)?;
        let mut got = vec![0; len];
        recv.read_at(0, &mut got).map_err(failure)?;
        self.expect("broadcast", &got, &self.words(root, len))
    }

    fn put(&self, len: usize) -> Result<(), Failure> {
        let (next, before) = ((self.rank + 1) % self.nranks, (self.rank + self.nranks - 1) % self.nranks);
        let bytes = self.words(self.rank, len);
        let put = self.window.put_signal_bytes(next, 0, &bytes, 0, 0).map_err(failure)?;
        self.comm.wait_signal(&[WaitSignal::from_rank(before)]).map_err(failure)?;
        let mut got = vec![0; len];
        self.window.memory().and_then(|memory| memory.read_at(0, &mut got)).map_err(failure)?;
        self.expect("put_signal", &got, &self.words(before, len))?;
        put.wait().map_err(failure)?;
        // Nobody writes there again before everybody has looked.
        self.comm.barrier().map_err(failure)
    }
}
