//! Ranks as real processes: this test binary runs itself, and one of its tests is what a rank does.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::{env, fs, thread};

use rustix::process::{Pid, Signal, kill_process};
use towline::Ticket;
use towline_testkit::random::Random;
use towline_testkit::watchdog::eventually;

use super::*;

const PLACE: &str = "TOWLINE_COMM_TEST_PLACE";
const RANK: &str = "TOWLINE_COMM_TEST_RANK";
const RANKS: usize = 3;
const VICTIM: usize = 1;

/// A folder through which the ranks of a test find each other; gone when the test is.
struct Meeting(PathBuf);

impl Meeting {
    fn new(name: &str) -> Meeting {
        let place = env::temp_dir().join(format!("towline-comm-{name}-{}", std::process::id()));
        fs::create_dir_all(&place).unwrap();
        Meeting(place)
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A process of a test, killed with it.
struct Rank(Child);

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn leave_word(place: &Path, name: &str, text: &str) {
    let draft = place.join(format!("{name}.draft"));
    fs::write(&draft, text).unwrap();
    fs::rename(draft, place.join(name)).unwrap();
}

fn find_word(place: &Path, name: &str) -> String {
    assert!(eventually(LONG, || place.join(name).exists()), "no {name}");
    fs::read_to_string(place.join(name)).unwrap()
}

fn start(place: &Path, rank: usize, what: &str) -> Rank {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "team::tests::processes::what_a_rank_process_does", "--nocapture"]);
    command.env(PLACE, place).env(RANK, format!("{rank} {what}")).stdout(Stdio::null());
    Rank(command.spawn().unwrap())
}

#[test]
fn what_a_rank_process_does() {
    let (Ok(place), Ok(orders)) = (env::var(PLACE), env::var(RANK)) else { return };
    let place = PathBuf::from(place);
    let (rank, what) = orders.split_once(' ').unwrap();
    let rank: usize = rank.parse().unwrap();
    let links = if what.contains("far") { Links::Far } else { Links::Near };
    let endpoint = Endpoint::options(&format!("rank-{rank}")).routing(links.routing(rank)).open().unwrap();
    let timeout = Duration::from_secs(if what.contains("stop") { 3 } else { 20 });
    let seat = Seat::open(&endpoint, RANKS, options(timeout)).unwrap();
    leave_word(&place, &format!("ticket-{rank}"), &seat.ticket().unwrap().to_string());
    let tickets: Vec<Ticket> =
        (0..RANKS).map(|peer| find_word(&place, &format!("ticket-{peer}")).parse().unwrap()).collect();
    let team = Team::assemble(seat, rank, tickets).unwrap();
    assert_eq!(team.is_near((rank + 1) % RANKS), links == Links::Near);
    for round in 0..50 {
        let all = team.all_gather_bytes("test", format!("{round}:{rank}").as_bytes()).unwrap();
        assert_eq!(all, (0..RANKS).map(|peer| format!("{round}:{peer}").into_bytes()).collect::<Vec<_>>());
    }
    leave_word(&place, &format!("ready-{rank}"), "");
    let (next, before) = ((rank + 1) % RANKS, (rank + RANKS - 1) % RANKS);
    let error = loop {
        let mut into = vec![0; 3_000_000];
        let step = if what.contains("ring") {
            team.exchange(next, &vec![rank as u8; 3_000_000], before, &mut into)
        } else {
            team.barrier()
        };
        if let Err(error) = step {
            break error;
        }
    };
    let end = format!("{:?} {:?} {:?} {error}", error.kind(), error.ranks(), team.dead());
    leave_word(&place, &format!("end-{rank}"), &end);
    // Who is seen to be dead must not depend on who ends first.
    for peer in (0..RANKS).filter(|peer| *peer != VICTIM) {
        find_word(&place, &format!("end-{peer}"));
    }
}

/// Starts ranks, does something to one of them after a while, and looks at how the others end.
fn others_end(what: &str, seed: u64, harm: impl FnOnce(&mut Option<Rank>), with: &[&str]) {
    let _watchdog = watchdog::watch(what.to_owned(), Duration::from_secs(200));
    let meeting = Meeting::new(&format!("{}-{seed}", what.replace(' ', "-")));
    let place = &meeting.0;
    let mut ranks: Vec<Option<Rank>> = (0..RANKS).map(|rank| Some(start(place, rank, what))).collect();
    for rank in 0..RANKS {
        find_word(place, &format!("ready-{rank}"));
    }
    thread::sleep(Random::new(seed).micros(30_000));
    harm(&mut ranks[VICTIM]);
    for rank in (0..RANKS).filter(|rank| *rank != VICTIM) {
        let end = find_word(place, &format!("end-{rank}"));
        assert!(with.iter().any(|with| end.starts_with(with)), "rank {rank}: {end}");
    }
}

fn a_kill_is_told(what: &str) {
    for seed in 0..3 {
        others_end(what, seed, |victim| drop(victim.take()), &["Disconnected [1] [1]"]);
    }
}

#[test]
fn a_stopped_process_is_named_by_the_others_at_the_limit() {
    // Over TCP a write to it that is given up resets the connection, so that nothing of it lands later: the rank that sees that first
    // says that the rank is gone, the others that it did not come in time.
    for (what, ends) in [
        ("near ring stop", &["Timeout [1] "][..]),
        ("far barrier stop", &["Timeout [1] ", "Disconnected [1] "][..]),
    ] {
        let stop = |victim: &mut Option<Rank>| {
            let pid = Pid::from_child(&victim.as_ref().unwrap().0);
            kill_process(pid, Signal::STOP).unwrap();
        };
        others_end(what, 9, stop, ends);
    }
}

#[test]
fn a_killed_process_is_named_by_the_others_in_a_barrier() {
    a_kill_is_told("near barrier");
}

#[test]
fn a_killed_process_is_named_by_the_others_in_a_ring() {
    a_kill_is_told("near ring");
}

#[test]
fn a_killed_process_is_named_by_the_others_over_sockets() {
    a_kill_is_told("far barrier");
    a_kill_is_told("far ring");
}
