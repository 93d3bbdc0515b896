//! Collectives between real processes: this test binary runs itself, and one of its tests is what a rank does.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::env;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use towline::{Dtype, Kind, Routing};
use towline_comm::{
    Algorithm, Communicator, Config, Memory, Op, Result, UniqueId, WindowFlag, get_unique_id, group,
    mem_alloc,
};
use towline_testkit::watchdog::{self, Watchdog, eventually};

const PART: &str = "TOWLINE_COLLECTIVES_TEST_PART";
const LONG: Duration = Duration::from_secs(60);

/// A process of a test, killed with it.
struct Rank(Child, BufReader<ChildStdout>);

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Rank {
    fn start(part: &str) -> Rank {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "what_a_rank_does", "--nocapture", "--test-threads=1"]).env(PART, part);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        Rank(child, said)
    }

    fn is_ready(&mut self) {
        let mut lines = (&mut self.1).lines();
        assert!(lines.any(|line| line.unwrap().contains("READY")), "the rank ended early");
    }

    fn ends_well(mut self) {
        // Whatever it still says must not fill the pipe.
        (&mut self.1).lines().for_each(drop);
        assert!(self.0.wait().unwrap().success());
    }
}

fn start_all(part: &str, links: &str, nranks: usize) -> Vec<Rank> {
    let id = get_unique_id().unwrap();
    (0..nranks).map(|rank| Rank::start(&format!("{part} {links} {nranks} {rank} {id}"))).collect()
}

fn watch(what: &str) -> Watchdog {
    watchdog::watch(what.to_owned(), Duration::from_secs(200))
}

#[test]
fn what_a_rank_does() {
    let Ok(orders) = env::var(PART) else { return };
    let words: Vec<&str> = orders.split(' ').collect();
    let (nranks, rank): (usize, usize) = (words[2].parse().unwrap(), words[3].parse().unwrap());
    let id: UniqueId = words[4].parse().unwrap();
    let mut config = Config { timeout: LONG, ..Config::default() };
    if words[1] == "far" {
        config.routing = Routing::default().require("tcp").unwrap();
    }
    let comm = Communicator::init(nranks, rank, &id, config).unwrap();
    match words[0] {
        "sum" => sums(&comm, words[1] == "near").unwrap(),
        "kill" => killed(&comm, words[1] == "near").unwrap(),
        "growth" => growth(&comm).unwrap(),
        other => panic!("no part {other}"),
    }
}

/// Sums over all ranks, and compares: rank r has r + 1 + index in every element.
fn sum(comm: &Communicator, algorithm: Algorithm, send: &Memory, recv: &Memory) -> Result<()> {
    let (rank, nranks) = (comm.rank()? as u64, comm.nranks()? as u64);
    let count = send.len() as u64 / 8;
    let mine: Vec<u8> = (0..count).flat_map(|index| (rank + 1 + index).to_ne_bytes()).collect();
    send.write_at(0, &mine)?;
    comm.using(algorithm).all_reduce(send, recv, Dtype::U64, Op::Sum)?;
    let expected: Vec<u8> =
        (0..count).flat_map(|index| (nranks * (nranks + 1) / 2 + nranks * index).to_ne_bytes()).collect();
    let mut got = vec![0; send.len()];
    recv.read_at(0, &mut got)?;
    assert!(got == expected, "{}", comm.explain()?);
    Ok(())
}

fn sums(comm: &Communicator, near: bool) -> Result<()> {
    const LEN: usize = 400_000;
    let windows = [(), ()]
        .map(|()| comm.register_window(mem_alloc(LEN).unwrap(), WindowFlag::DEFAULT).unwrap().unwrap());
    let [send, recv] = windows.each_ref().map(|window| window.memory().unwrap());
    let loose = [(), ()].map(|()| comm.memory(mem_alloc(LEN).unwrap()).unwrap());
    for len in [8, 8000, LEN] {
        for algorithm in [Algorithm::Auto, Algorithm::Staged, Algorithm::Ring, Algorithm::Tree] {
            sum(comm, algorithm, &loose[0].part(0, len)?, &loose[1].part(0, len)?)?;
            sum(comm, algorithm, &send.part(0, len)?, &recv.part(0, len)?)?;
        }
    }
    let expected = if near { Algorithm::Direct } else { Algorithm::Ring };
    sum(comm, Algorithm::Auto, &send, &recv)?;
    assert_eq!(comm.last_algorithm()?, Some(expected), "{}", comm.explain()?);
    let (rank, nranks) = (comm.rank()?, comm.nranks()?);
    for memory in [[&send, &recv], [&loose[0], &loose[1]]] {
        memory[0].write_at(LEN - 1, &[rank as u8 + 1])?;
        group(|| {
            comm.send(memory[0], Dtype::U8, (rank + 1) % nranks)?;
            comm.recv(memory[1], Dtype::U8, (rank + nranks - 1) % nranks)
        })?;
        let mut last = [0];
        memory[1].read_at(LEN - 1, &mut last)?;
        assert_eq!(usize::from(last[0]), (rank + nranks - 1) % nranks + 1);
    }
    comm.finalize()
}

#[allow(clippy::print_stdout, reason = "a rank tells its parent by its output")]
fn killed(comm: &Communicator, near: bool) -> Result<()> {
    const LEN: usize = 2 << 20;
    let windows = [(), ()]
        .map(|()| comm.register_window(mem_alloc(LEN).unwrap(), WindowFlag::DEFAULT).unwrap().unwrap());
    let [send, recv] = windows.each_ref().map(|window| window.memory().unwrap());
    println!("READY");
    let algorithms = [Algorithm::Auto, Algorithm::Staged, Algorithm::Ring, Algorithm::Tree];
    let mut call = 0;
    let error = loop {
        let algorithm = algorithms[call % 4];
        if let Err(error) = comm.using(algorithm).all_reduce(&send, &recv, Dtype::F32, Op::Sum) {
            break error;
        }
        call += 1;
    };
    assert_eq!((error.kind(), error.ranks()), (Kind::Disconnected, &[1][..]), "near: {near}: {error}");
    let again = comm.all_reduce(&send, &recv, Dtype::F32, Op::Sum).unwrap_err();
    assert_eq!(again.ranks(), [1], "{again}");
    let child = comm.shrink(&[1])?;
    let loose = [(), ()].map(|()| child.memory(mem_alloc(LEN).unwrap()).unwrap());
    sum(&child, Algorithm::Auto, &loose[0], &loose[1])?;
    child.finalize()
}

/// Threads, descriptors, and resident bytes of this process.
fn held() -> (usize, usize, usize) {
    let count = |folder: &str| std::fs::read_dir(folder).unwrap().count();
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
    (count("/proc/self/task"), count("/proc/self/fd"), pages * 4096)
}

fn growth(comm: &Communicator) -> Result<()> {
    let reduce_and_close = |count: usize| -> Result<()> {
        for _ in 0..count {
            let buffer = comm.register_buffer(mem_alloc(128 << 10)?)?;
            let memory = buffer.memory()?;
            comm.using(Algorithm::Direct).all_reduce(&memory, &memory, Dtype::F32, Op::Max)?;
            if comm.rank()? == 0 {
                comm.send(&memory, Dtype::F32, 1)?;
            } else {
                comm.recv(&memory, Dtype::F32, 0)?;
            }
            comm.barrier()?;
        }
        Ok(())
    };
    reduce_and_close(300)?;
    let before = held();
    reduce_and_close(600)?;
    // The last buffers may still be on their way back.
    let calm = eventually(LONG, || {
        let now = held();
        now.0 <= before.0 + 2 && now.1 <= before.1 + 8 && now.2 <= before.2 + (8 << 20)
    });
    assert!(calm, "before {before:?}, after {:?}", held());
    assert_eq!(comm.open_handles()?, 0);
    comm.finalize()
}

#[test]
fn processes_reduce_and_send_by_every_algorithm() {
    let _watchdog = watch("processes");
    for links in ["near", "far"] {
        start_all("sum", links, 3).into_iter().for_each(Rank::ends_well);
    }
}

#[test]
fn a_rank_killed_in_the_middle_of_an_all_reduce_is_named_by_all_others_who_go_on_without_it() {
    let _watchdog = watch("kill");
    for links in ["near", "far"] {
        let mut ranks = start_all("kill", links, 4);
        ranks.iter_mut().for_each(Rank::is_ready);
        std::thread::sleep(Duration::from_millis(50));
        drop(ranks.remove(1));
        ranks.into_iter().for_each(Rank::ends_well);
    }
}

#[test]
fn buffers_registered_for_every_call_leave_no_thread_descriptor_or_memory_behind() {
    let _watchdog = watch("growth");
    start_all("growth", "near", 2).into_iter().for_each(Rank::ends_well);
}
