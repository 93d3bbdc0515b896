//! A rank as a process, and what it does.

use std::env;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use towline::{Dtype, Routing};
use towline_comm::{Communicator, Config, Op, Result, UniqueId, WaitSignal, WindowFlag, mem_alloc};
use towline_testkit::executor::block_on;
use towline_testkit::watchdog;

use super::{leaks, program};

const PART: &str = "TOWLINE_COMM_FAULT_PART";

/// In place of when to abort: a rank is killed while the group meets.
pub(crate) const EARLY: &str = "early";

/// A process of a test, killed with it.
pub(crate) struct Rank(Child, BufReader<ChildStdout>);

impl Drop for Rank {
    fn drop(&mut self) {
        watchdog::child_ended(self.0.id() as i32);
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Rank {
    pub(crate) fn start(part: &str) -> Rank {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "rank::what_a_rank_process_does", "--nocapture", "--test-threads=1"]);
        let mut child = command.env(PART, part).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        watchdog::child_started(child.id() as i32, part);
        let said = BufReader::new(child.stdout.take().unwrap());
        Rank(child, said)
    }

    pub(crate) fn child(&self) -> &Child {
        &self.0
    }

    /// Waits for the line that starts so, and gives the rest of it.
    pub(crate) fn says(&mut self, word: &str, what: &str) -> String {
        for line in (&mut self.1).lines() {
            if let Some((_, rest)) = line.unwrap().split_once(word) {
                return rest.trim().to_owned();
            }
        }
        panic!("{what}: a rank ended without {word:?}")
    }

    pub(crate) fn ends_well(mut self, what: &str, so_far: &[String]) {
        (&mut self.1).lines().for_each(drop);
        assert!(self.0.wait().unwrap().success(), "{what}: after {so_far:#?}");
    }
}

/// Ends this process with the test that started it.
fn end_with_the_test() {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0; 16]);
        std::process::exit(7);
    });
}

#[test]
fn what_a_rank_process_does() {
    let Ok(orders) = env::var(PART) else { return };
    end_with_the_test();
    let words: Vec<&str> = orders.split(' ').collect();
    match words[0] {
        "fault" => fault(&words),
        "await" => awaits(&words),
        "idle" => leaks::idle(&words),
        "fork" => leaks::fork_and_go_on(&words),
        other => panic!("no part {other}"),
    }
}

/// Joins as the words say: how, ranks, rank, id.
pub(crate) fn join(words: &[&str], timeout: Duration) -> Result<Communicator> {
    let (nranks, rank): (usize, usize) = (words[2].parse().unwrap(), words[3].parse().unwrap());
    let routing = routing(words[1], rank)?;
    let id: UniqueId = words[4].parse()?;
    Communicator::init(nranks, rank, &id, Config { timeout, routing, ..Config::default() })
}

/// How that rank reaches the others.
fn routing(links: &str, rank: usize) -> Result<Routing> {
    let usual = Routing::default();
    Ok(match links {
        "Far" => usual.require("tcp")?,
        // Without shared memory.
        "Host" => usual.forbid("inproc")?.forbid("mapped")?,
        // What the odd ranks write goes by sockets, what the even ones write by memory.
        "Mixed" if rank % 2 == 1 => usual.require("tcp")?,
        _ => usual,
    })
}

#[allow(clippy::print_stdout, reason = "a rank tells its parent by its output")]
fn fault(words: &[&str]) {
    let number = |at: usize| words[at].parse::<u64>().unwrap();
    let (seed, victim) = (number(5), number(6) as usize);
    let limit = Duration::from_millis(number(7));
    let aborts =
        words[8].split_once(':').map(|(when, exits)| (when.parse::<u64>().unwrap(), exits == "true"));
    let met = join(words, limit).and_then(|comm| comm.barrier().map(|()| comm));
    let comm = match met {
        Ok(comm) => comm,
        // Only where the victim died before every rank had met; then there is nothing to shrink.
        Err(error) => return println!("END {:?} {error}", error.ranks()),
    };
    println!("READY");
    if let Some((when, exits)) = aborts {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_micros(when));
                comm.abort();
            });
            program::run(&comm, seed);
        });
        if !exits {
            std::thread::sleep(Duration::from_secs(600));
        }
        return;
    }
    let error = program::run(&comm, seed);
    println!("END {:?} {error}", error.ranks());
    // The victim may have died when some had met and others had not, who have left by now: nobody goes on then.
    if words[8] == EARLY {
        return;
    }
    go_on_without(&comm, victim, words[1])
        .unwrap_or_else(|error| panic!("seed {seed}: after the fault: {error}"));
}

/// The first rank awaits puts to the last one, which is about to be stopped; the others wait for a signal of the first.
#[allow(clippy::print_stdout, reason = "a rank tells its parent by its output")]
fn awaits(words: &[&str]) {
    let comm = join(words, 2 * super::SHORT).unwrap();
    let steps = || -> Result<()> {
        let (rank, last) = (comm.rank()?, comm.nranks()? - 1);
        let window = comm.register_window(mem_alloc(64)?, WindowFlag::DEFAULT)?.unwrap();
        comm.barrier()?;
        println!("READY");
        if rank == last {
            std::thread::sleep(Duration::from_secs(600));
        }
        if rank > 0 {
            return comm.wait_signal(&[WaitSignal::from_rank(0)]);
        }
        loop {
            block_on(window.put_signal_bytes(last, 0, &[7; 64], 0, 0)?)?;
            block_on(window.put_bytes(last, 0, &[7; 64])?)?;
        }
    };
    let error = steps().unwrap_err();
    println!("END {:?} {error}", error.ranks());
    // One that leaves is gone, which is another story.
    std::thread::sleep(Duration::from_secs(600));
}

fn go_on_without(comm: &Communicator, victim: usize, links: &str) -> Result<()> {
    // Survivors may come one limit after each other: which rank waits for which decides when each gives up.
    let patient = Config { timeout: super::LONG, ..Config::default() };
    let routing = routing(links, comm.rank()?)?;
    let child = comm.shrink_with(&[victim], Some(Config { routing, ..patient }))?;
    let (rank, nranks) = (child.rank()?, child.nranks()?);
    assert_eq!(nranks, comm.nranks()? - 1);
    for elements in [3, 5_000, 40_000] {
        let memory = child.memory(mem_alloc(elements * 8)?)?;
        let values: Vec<u8> =
            (0..elements as u64).flat_map(|at| (at * (rank as u64 + 1)).to_ne_bytes()).collect();
        memory.write_at(0, &values)?;
        child.all_reduce(&memory, &memory, Dtype::U64, Op::Sum)?;
        let mut sums = vec![0; elements * 8];
        memory.read_at(0, &mut sums)?;
        let all = (nranks * (nranks + 1) / 2) as u64;
        assert!(sums.chunks_exact(8).enumerate().all(|(at, sum)| sum == (at as u64 * all).to_ne_bytes()));
    }
    child.finalize()
}
