//! `towline launch` with real processes: what ranks get in their environment, what becomes of their output, and how they end.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use towline_comm::{Communicator, Config};

/// Far longer than anything here takes: what hangs fails.
const WATCHDOG: Duration = Duration::from_secs(60);

/// Tells this test binary that it is a rank.
const PART: &str = "TOWLINE_LAUNCH_TEST_PART";

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
    command
        .args(arguments)
        .env_remove("TOWLINE_LISTEN")
        .env_remove("RUST_LOG")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Launches that many ranks of a shell script.
fn shell(ranks: &str, options: &[&str], script: &str) -> Output {
    let mut arguments = vec!["launch", "-n", ranks];
    arguments.extend_from_slice(options);
    arguments.extend_from_slice(&["--", "sh", "-c", script]);
    finish(command(&arguments).spawn().unwrap())
}

fn finish(child: Child) -> Output {
    let pid = child.id();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    receiver.recv_timeout(WATCHDOG).unwrap_or_else(|_| panic!("process {pid} hangs")).unwrap()
}

fn lines(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<String> = String::from_utf8_lossy(bytes).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

fn is_running(pid: &str) -> bool {
    // One that has ended and was not waited for yet has an empty command line.
    std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
}

fn ends(pid: &str) {
    let until = Instant::now() + WATCHDOG;
    while is_running(pid) {
        assert!(Instant::now() < until, "process {pid} was left behind");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Reads lines until all of those ranks have said something; what each said, by rank.
fn first_words(child: &mut Child, ranks: usize) -> (Vec<String>, impl Read + use<>) {
    let mut reader = BufReader::new(child.stdout.take().unwrap());
    let mut said = vec![None; ranks];
    while said.iter().any(Option::is_none) {
        let mut line = String::new();
        assert_ne!(reader.read_line(&mut line).unwrap(), 0, "the launcher has ended: {said:?}");
        let (rank, words) = line.trim_start_matches('[').split_once("] ").unwrap();
        said[rank.parse::<usize>().unwrap()] = Some(words.trim().to_owned());
    }
    (said.into_iter().map(Option::unwrap).collect(), reader)
}

#[test]
fn what_a_rank_does() {
    if std::env::var(PART).is_err() {
        return;
    }
    let comm = Communicator::from_env(Config::default()).unwrap();
    let memory = comm.memory(towline_comm::mem_alloc(4096).unwrap()).unwrap();
    memory.write_at(0, &(comm.rank().unwrap() as u64).to_ne_bytes()).unwrap();
    let word = memory.part(0, 8).unwrap();
    comm.all_reduce(&word, &word, towline::Dtype::U64, towline_comm::Op::Sum).unwrap();
    let mut sum = [0; 8];
    word.read_at(0, &mut sum).unwrap();
    println!("SUM {} of {}", u64::from_ne_bytes(sum), comm.nranks().unwrap());
    comm.finalize().unwrap();
}

#[test]
fn ranks_meet_by_what_the_launcher_tells_them() {
    let itself = std::env::current_exe().unwrap();
    let rank = [itself.to_str().unwrap(), "--exact", "what_a_rank_does", "--nocapture"];
    let arguments = [&["launch", "-n", "4", "--"][..], &rank].concat();
    let output = finish(command(&arguments).env(PART, "sum").spawn().unwrap());
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let settings: Vec<String> =
        lines(&output.stdout).into_iter().filter(|line| line.contains("SUM 6 of 4")).collect();
    assert_eq!(settings.len(), 4, "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn every_rank_learns_its_number_the_size_and_the_id() {
    let script = "echo $TOWLINE_RANK $TOWLINE_NRANKS $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE ${#TOWLINE_UNIQUE_ID}; \
                  echo $TOWLINE_UNIQUE_ID >&2";
    let output = shell("3", &[], script);
    assert_eq!(output.status.code(), Some(0));
    let expected: Vec<String> =
        (0..3).map(|rank| format!("[{rank}] {rank} 3 {rank} 3 {rank} 3 171")).collect();
    assert_eq!(lines(&output.stdout), expected);
    let ids: Vec<String> = lines(&output.stderr).iter().map(|line| line[4..].to_owned()).collect();
    assert!(ids.len() == 3 && ids.iter().all(|id| *id == ids[0]), "{ids:?}");
}

#[test]
fn lines_of_different_ranks_never_mix_and_the_last_one_needs_no_end() {
    let script = "i=0; while [ $i -lt 300 ]; do printf 'abc'; printf 'def %s\\n' $TOWLINE_RANK; i=$((i+1)); done; \
                  printf 'end %s' $TOWLINE_RANK";
    let output = shell("4", &[], script);
    assert_eq!(output.status.code(), Some(0));
    let found = lines(&output.stdout);
    assert_eq!(found.len(), 4 * 301);
    for rank in 0..4 {
        let (line, last) = (format!("[{rank}] abcdef {rank}"), format!("[{rank}] end {rank}"));
        assert_eq!(found.iter().filter(|found| **found == line).count(), 300);
        assert_eq!(found.iter().filter(|found| **found == last).count(), 1);
    }
}

#[test]
fn one_that_fails_stops_the_others_and_gives_its_exit_code() {
    // What a rank has started ends with it.
    let script = "if [ $RANK = 1 ]; then exit 7; fi; sleep 1000 & echo $!; wait";
    let output = shell("3", &[], script);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(7), "{said}");
    assert!(said.contains("rank 1 ended with exit code 7"), "{said}");
    for line in lines(&output.stdout) {
        ends(&line[4..]);
    }
}

#[test]
fn the_others_are_asked_to_end_before_they_are_made_to() {
    let output = shell("3", &["--grace", "3600", "--json"], "[ $RANK = 2 ] && exit 1; exec sleep 1000");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let signals: Vec<_> =
        report["ranks"].as_array().unwrap().iter().map(|rank| rank["signal"].as_i64()).collect();
    assert_eq!(signals, [None, Some(15), Some(15)]);
}

#[test]
fn one_that_does_not_listen_is_ended_after_the_grace_time() {
    // The first one waits until the other does not listen any more.
    let deaf = std::env::temp_dir().join(format!("towline-deaf-{}", std::process::id()));
    let script = format!(
        "trap '' TERM; if [ $RANK = 0 ]; then until [ -e {0} ]; do sleep 0.05; done; kill -9 $$; fi; : > {0}; \
         while :; do sleep 0.1; done",
        deaf.display()
    );
    let output = shell("2", &["--grace", "0", "--json"], &script);
    std::fs::remove_file(&deaf).unwrap();
    assert_eq!(output.status.code(), Some(128 + 9), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["exit"], 137);
    let ranks = report["ranks"].as_array().unwrap();
    assert_eq!((ranks.len(), &ranks[0]["rank"], &ranks[1]["signal"]), (2, &0.into(), &9.into()));
}

#[test]
fn ctrl_c_and_a_polite_kill_stop_all_ranks() {
    for (signal, code) in [(rustix::process::Signal::INT, 130), (rustix::process::Signal::TERM, 143)] {
        let script = "trap 'echo bye; exit 0' TERM; echo $$; while :; do sleep 0.05; done";
        let mut child = command(&["launch", "-n", "3", "--", "sh", "-c", script]).spawn().unwrap();
        let (pids, mut rest) = first_words(&mut child, 3);
        rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal).unwrap();
        let mut said = String::new();
        rest.read_to_string(&mut said).unwrap();
        assert_eq!(finish(child).status.code(), Some(code));
        assert_eq!(said.matches("bye").count(), 3, "{said}");
        assert!(pids.iter().all(|pid| !is_running(pid)));
    }
}

#[test]
fn ranks_end_with_a_launcher_that_was_killed() {
    let script = "trap '' TERM; echo $$; while :; do sleep 0.05; done";
    let mut child = command(&["launch", "-n", "2", "--", "sh", "-c", script]).spawn().unwrap();
    let (pids, _rest) = first_words(&mut child, 2);
    child.kill().unwrap();
    child.wait().unwrap();
    pids.iter().for_each(|pid| ends(pid));
}

#[test]
fn a_rank_whose_reader_has_gone_away_ends_as_in_any_pipe() {
    let mut child =
        command(&["launch", "-n", "2", "--", "sh", "-c", "while :; do echo y; done"]).spawn().unwrap();
    let (_, rest) = first_words(&mut child, 2);
    drop(rest);
    assert_ne!(finish(child).status.code(), Some(0));
}

#[test]
fn a_program_that_is_not_there_and_a_wrong_command_line_are_told_apart() {
    let output = finish(command(&["launch", "-n", "2", "--", "/no/such/program"]).spawn().unwrap());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("/no/such/program"), "{said}");
    for arguments in
        [&["launch", "-n", "2"][..], &["launch", "-n", "0", "--", "true"], &["launch", "--", "true"]]
    {
        assert_eq!(finish(command(arguments).spawn().unwrap()).status.code(), Some(2), "{arguments:?}");
    }
}
