//! Ranks as real processes: this test binary runs itself, and one of its tests is what a rank does.

use std::env;
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command, Stdio};

use std::io::{BufRead, BufReader};
use std::time::Instant;

use towline::Kind;
use towline_comm::{
    Communicator, Config, Result, UniqueId, UniqueIdOptions, WaitSignal, WindowFlag, get_unique_id,
    get_unique_id_with, mem_alloc,
};
use towline_testkit::netns::{End, Network};
use towline_testkit::skip::skip;
use towline_testkit::watchdog::eventually;

use super::{ALL_LINKS, LONG, Links, laws, watch};

const PART: &str = "TOWLINE_COMM_TEST_PART";
const WORKER: &str = "processes::what_a_rank_process_does";

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
        Rank::start_by(Command::new(env::current_exe().unwrap()), part)
    }

    /// Starts a rank on another host, as far as its sockets know.
    fn start_in(namespace: &str, part: &str) -> Rank {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace]).arg(env::current_exe().unwrap());
        Rank::start_by(command, part)
    }

    fn start_by(mut command: Command, part: &str) -> Rank {
        command.args(["--exact", WORKER, "--nocapture", "--test-threads=1"]).env(PART, part);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        Rank(child, said)
    }

    /// Waits for the line that starts so, and gives the rest of it.
    fn says(&mut self, word: &str) -> String {
        let lines = (&mut self.1).lines();
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

fn start_all(part: &str, links: Links, nranks: usize, id: &UniqueId) -> Vec<Rank> {
    (0..nranks).map(|rank| Rank::start(&format!("{part} {links:?} {nranks} {rank} {id}"))).collect()
}

#[test]
#[allow(clippy::print_stdout, reason = "a rank tells its parent by its output")]
fn what_a_rank_process_does() {
    let Ok(orders) = env::var(PART) else { return };
    let words: Vec<&str> = orders.split(' ').collect();
    if words[0] == "id" {
        println!("ID {}", get_unique_id().unwrap());
        if words.get(1) == Some(&"stays") {
            std::thread::sleep(LONG);
        }
        return;
    }
    if words[0] == "hosts" {
        hosts(&words).unwrap();
        return;
    }
    let links = if words[1] == "Far" { Links::Far } else { Links::Near };
    let (nranks, rank): (usize, usize) = (words[2].parse().unwrap(), words[3].parse().unwrap());
    let id: UniqueId = words[4].parse().unwrap();
    let config = Config { timeout: LONG, ..links.config() };
    let comm = Communicator::init(nranks, rank, &id, config).unwrap();
    match words[0] {
        "laws" => laws(&comm, links, rank, nranks).unwrap(),
        "kill" => killed(&comm, rank).unwrap(),
        "growth" => growth(&comm, rank, nranks).unwrap(),
        other => panic!("no part {other}"),
    }
}

fn laws(comm: &Communicator, links: Links, rank: usize, nranks: usize) -> Result<()> {
    assert_eq!(comm.is_near((rank + 1) % nranks)?, links == Links::Near);
    laws::hold(comm)?;
    let shared = comm.register_window(mem_alloc(64 << 10)?, WindowFlag::DEFAULT)?.unwrap();
    let next = (rank + 1) % nranks;
    if links == Links::Near {
        assert_eq!(shared.path(next)?, "mapped");
        shared.peer_view(next)?.write_at(0, b"direct")?;
    }
    comm.finalize()?;
    comm.destroy();
    Ok(())
}

/// A rank that listens on the address that it was given, and makes the id where it was given none.
#[allow(clippy::print_stdout, reason = "a rank tells its parent by its output")]
fn hosts(words: &[&str]) -> Result<()> {
    let address = SocketAddr::new(words[1].parse().unwrap(), 0);
    let rank: usize = words[2].parse().unwrap();
    let id = match words.get(3) {
        Some(id) => id.parse()?,
        None => get_unique_id_with(&UniqueIdOptions { listen: vec![address], ..UniqueIdOptions::default() })?,
    };
    println!("ID {id}");
    let config = Config { timeout: LONG, listen: vec![address], ..Config::default() };
    let comm = Communicator::init(3, rank, &id, config)?;
    // Ranks 1 and 2 share a host.
    assert_eq!((comm.is_near(0)?, comm.is_near(1)?), (rank == 0, rank != 0));
    laws::hold(&comm)?;
    let window = comm.register_window(mem_alloc(1 << 20)?, WindowFlag::DEFAULT)?.unwrap();
    let (next, before) = ((rank + 1) % 3, (rank + 2) % 3);
    for round in 1..=20u8 {
        window.put_signal_bytes(next, 0, &vec![round; 100_000], 0, 0)?.wait()?;
        comm.wait_signal(&[WaitSignal::from_rank(before)])?;
        let mut bytes = vec![0; 100_000];
        window.memory()?.read_at(0, &mut bytes)?;
        assert!(bytes.iter().all(|byte| *byte == round), "round {round}");
        window.fetch_add(0, 512 << 10, 1)?.wait()?;
        window.fence()?;
    }
    let mut word = [0; 8];
    window.get_bytes(0, 512 << 10, &mut word)?;
    assert_eq!(u64::from_ne_bytes(word), 60);
    window.fence()?;
    if rank != 1 {
        // Over both hosts, with the meeting where the lowest survivor listens.
        let child = comm.shrink(&[1])?;
        assert_eq!(child.nranks()?, 2);
        child.finalize()?;
    }
    println!("DONE");
    Ok(())
}

/// Threads, descriptors, and resident bytes of this process.
fn held() -> (usize, usize, usize) {
    let count = |folder: &str| std::fs::read_dir(folder).unwrap().count();
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
    (count("/proc/self/task"), count("/proc/self/fd"), pages * 4096)
}

fn growth(comm: &Communicator, rank: usize, nranks: usize) -> Result<()> {
    let open_and_close = |count: usize| -> Result<()> {
        for _ in 0..count {
            let window = comm.register_window(mem_alloc(64 << 10)?, WindowFlag::DEFAULT)?.unwrap();
            for peer in 0..nranks {
                window.put_bytes(peer, rank * 4096, &[1; 4096])?.wait()?;
            }
            window.fence()?;
        }
        Ok(())
    };
    open_and_close(100)?;
    let before = held();
    open_and_close(1000)?;
    // The last windows may still be on their way back.
    let calm = eventually(LONG, || {
        let now = held();
        now.0 <= before.0 + 2 && now.1 <= before.1 + 8 && now.2 <= before.2 + (4 << 20)
    });
    assert!(calm, "before {before:?}, after {:?}", held());
    assert_eq!(comm.open_handles()?, 0);
    comm.finalize()
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
fn processes_keep_the_laws_of_one_sided_access_by_shared_memory_and_by_sockets() {
    let _watchdog = watch("processes");
    for links in ALL_LINKS {
        let id = get_unique_id().unwrap();
        start_all("laws", links, 3, &id).into_iter().for_each(Rank::ends_well);
    }
}

#[test]
fn a_thousand_windows_leave_no_thread_descriptor_or_memory_behind() {
    let _watchdog = watch("growth");
    for links in ALL_LINKS {
        let id = get_unique_id().unwrap();
        start_all("growth", links, 2, &id).into_iter().for_each(Rank::ends_well);
    }
}

#[test]
fn a_killed_rank_is_named_by_all_and_the_survivors_go_on_without_it() {
    let _watchdog = watch("kill and shrink");
    for links in ALL_LINKS {
        let id = get_unique_id().unwrap();
        let mut ranks = start_all("kill", links, 4, &id);
        for rank in &mut ranks {
            rank.says("READY");
        }
        drop(ranks.remove(1));
        ranks.into_iter().for_each(Rank::ends_well);
    }
}

#[test]
fn ranks_on_two_hosts_meet_keep_the_laws_of_one_sided_access_and_shrink() {
    let name = "ranks_on_two_hosts_meet_keep_the_laws_of_one_sided_access_and_shrink";
    let _watchdog = watch(name);
    let network = match Network::build() {
        Ok(network) => network,
        Err(reason) => return skip(name, "netns", &reason),
    };
    let part = |end: End, rest: String| {
        (network.namespace(end), format!("hosts {} {rest}", network.address(end, false)))
    };
    let (namespace, orders) = part(End::A, "0".into());
    let mut first = Rank::start_in(&namespace, &orders);
    let id = first.says("ID");
    let others: Vec<Rank> = [1, 2]
        .into_iter()
        .map(|rank| {
            let (namespace, orders) = part(End::B, format!("{rank} {id}"));
            Rank::start_in(&namespace, &orders)
        })
        .collect();
    for mut rank in others.into_iter().chain([first]) {
        rank.says("DONE");
        rank.ends_well();
    }
}

#[test]
fn ranks_whose_root_dies_while_they_wait_are_told_at_once() {
    let _watchdog = watch("a root that dies");
    let mut maker = Rank::start("id stays");
    let id: UniqueId = maker.says("ID").parse().unwrap();
    let config = || Config { timeout: LONG, ..Config::default() };
    let waiting: Vec<_> = (0..2)
        .map(|rank| {
            let id = id.clone();
            std::thread::spawn(move || Communicator::init(3, rank, &id, config()).map(drop))
        })
        .collect();
    std::thread::sleep(std::time::Duration::from_millis(100));
    drop(maker);
    for rank in waiting {
        let error = rank.join().unwrap().unwrap_err();
        // Stale where the rank was so late that it did not find the root at all.
        assert!(matches!(error.kind(), Kind::Disconnected | Kind::Stale), "{error}");
    }
    assert_eq!(Communicator::init(3, 2, &id, config()).unwrap_err().kind(), Kind::Stale);
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
