//! Ranks as real processes: this test binary runs itself, and one of its tests is what a rank does.

use std::env;
use std::process::{Child, Command, Stdio};

use std::io::{BufRead, BufReader};
use std::time::Instant;

use towline::{Kind, SystemStorage};
use towline_comm::{
    Communicator, Config, Result, UniqueId, WaitSignal, WindowFlag, get_unique_id, mem_alloc,
};

use super::{LONG, WAYS, Way, watch};

const PART: &str = "TOWLINE_COMM_TEST_PART";
const WORKER: &str = "processes::what_a_rank_process_does";

/// A process of a test, killed with it.
struct Rank(Child);

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Rank {
    fn start(part: &str) -> Rank {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", WORKER, "--nocapture", "--test-threads=1"]).env(PART, part);
        Rank(command.stdout(Stdio::piped()).spawn().unwrap())
    }

    /// Waits for the line that starts so, and gives the rest of it.
    fn says(&mut self, word: &str) -> String {
        let lines = BufReader::new(self.0.stdout.as_mut().unwrap()).lines();
        for line in lines {
            if let Some((_, rest)) = line.unwrap().split_once(word) {
                return rest.trim().to_owned();
            }
        }
        panic!("the rank ended without {word:?}")
    }

    fn ends_well(mut self) {
        assert!(self.0.wait().unwrap().success());
    }
}

fn start_all(part: &str, way: Way, nranks: usize, id: &UniqueId) -> Vec<Rank> {
    (0..nranks).map(|rank| Rank::start(&format!("{part} {way:?} {nranks} {rank} {id}"))).collect()
}

#[test]
#[allow(clippy::print_stdout, reason = "a rank tells its parent by its output")]
fn what_a_rank_process_does() {
    let Ok(told) = env::var(PART) else { return };
    let words: Vec<&str> = told.split(' ').collect();
    if words[0] == "id" {
        println!("ID {}", get_unique_id().unwrap());
        return;
    }
    let way = if words[1] == "Far" { Way::Far } else { Way::Near };
    let (nranks, rank): (usize, usize) = (words[2].parse().unwrap(), words[3].parse().unwrap());
    let id: UniqueId = words[4].parse().unwrap();
    let config = Config { timeout: LONG, ..way.config() };
    let comm = Communicator::init(nranks, rank, &id, config).unwrap();
    match words[0] {
        "laws" => laws(&comm, way, rank, nranks).unwrap(),
        "kill" => killed(&comm, rank).unwrap(),
        other => panic!("no part {other}"),
    }
}

fn laws(comm: &Communicator, way: Way, rank: usize, nranks: usize) -> Result<()> {
    assert_eq!(comm.is_near((rank + 1) % nranks)?, way == Way::Near);
    let shared = comm.register_window(mem_alloc(64 << 10)?, WindowFlag::DEFAULT)?.unwrap();
    let private = comm.register_window(SystemStorage::new(64 << 10)?, WindowFlag::DEFAULT)?.unwrap();
    let (next, before) = ((rank + 1) % nranks, (rank + nranks - 1) % nranks);
    for window in [&shared, &private] {
        for round in 1..=50u8 {
            let source = comm.memory(mem_alloc(32 << 10)?)?;
            source.write_at(0, &vec![round; 32 << 10])?;
            window.put_signal(next, 0, &source, 0, 0)?.wait()?;
            comm.wait_signal(&[WaitSignal::from_rank(before)])?;
            let mut bytes = vec![0; 32 << 10];
            window.memory()?.read_at(0, &mut bytes)?;
            assert!(bytes.iter().all(|byte| *byte == round), "round {round}");
            comm.signal(before, 0, 1)?.wait()?;
            comm.wait_signal(&[WaitSignal { index: 1, ..WaitSignal::from_rank(next) }])?;
        }
        for _ in 0..200 {
            window.fetch_add(0, 40 << 10, 1)?.wait()?;
        }
        window.fence()?;
        let mut word = [0; 8];
        window.get_bytes(0, 40 << 10, &mut word)?;
        assert_eq!(u64::from_ne_bytes(word), 200 * nranks as u64);
        window.fence()?;
    }
    if way == Way::Near {
        assert_eq!(shared.path(next)?, "mapped");
        shared.peer_view(next)?.write_at(0, b"direct")?;
    }
    comm.finalize()?;
    comm.destroy();
    Ok(())
}

#[allow(clippy::print_stdout, reason = "a rank tells its parent by its output")]
fn killed(comm: &Communicator, rank: usize) -> Result<()> {
    let window = comm.register_window(mem_alloc(4096)?, WindowFlag::DEFAULT)?.unwrap();
    println!("READY");
    let error = loop {
        window.put_bytes(2, 0, b"going on").and_then(|put| put.wait()).ok();
        if let Err(error) = comm.register_window(mem_alloc(4096)?, WindowFlag::DEFAULT) {
            break error;
        }
    };
    assert_eq!((error.kind(), error.ranks()), (Kind::Disconnected, &[1][..]), "{error}");
    assert!(comm.get_async_error().is_err());
    assert_eq!(comm.dead_ranks()?, [1]);
    let child = comm.shrink(&[1])?;
    assert_eq!((child.rank()?, child.nranks()?), (rank - usize::from(rank > 1), 3));
    let window = child.register_window(mem_alloc(4096)?, WindowFlag::DEFAULT)?.unwrap();
    window.put_signal_bytes((child.rank()? + 1) % 3, 0, b"alive", 0, 0)?.wait()?;
    child.wait_signal(&[WaitSignal::from_rank((child.rank()? + 2) % 3)])?;
    child.finalize()
}

#[test]
fn processes_put_get_signal_and_count_by_shared_memory_and_by_sockets() {
    let _watchdog = watch("processes");
    for way in WAYS {
        let id = get_unique_id().unwrap();
        start_all("laws", way, 3, &id).into_iter().for_each(Rank::ends_well);
    }
}

#[test]
fn a_killed_rank_is_named_by_all_and_the_survivors_go_on_without_it() {
    let _watchdog = watch("kill and shrink");
    for way in WAYS {
        let id = get_unique_id().unwrap();
        let mut ranks = start_all("kill", way, 4, &id);
        for rank in &mut ranks {
            rank.says("READY");
        }
        drop(ranks.remove(1));
        ranks.into_iter().for_each(Rank::ends_well);
    }
}

#[test]
fn an_id_whose_process_is_gone_is_refused_at_once() {
    let _watchdog = watch("a stale id");
    let mut maker = Rank::start("id");
    let id: UniqueId = maker.says("ID").parse().unwrap();
    drop(maker);
    let start = Instant::now();
    let error = Communicator::init(2, 0, &id, Config { timeout: LONG, ..Config::default() }).unwrap_err();
    assert_eq!(error.kind(), Kind::Stale, "{error}");
    assert!(start.elapsed() < LONG / 2);
}
