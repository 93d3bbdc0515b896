//! Watchdogs: what can hang is killed, with a dump of what every process was doing.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};

use crate::skip::say;

/// The processes that tests have started and that still run.
static CHILDREN: Mutex<Vec<(i32, String)>> = Mutex::new(Vec::new());

/// Kills this process and its children unless it is dropped in time.
#[must_use = "the watchdog is called off when this is dropped"]
pub struct Watchdog {
    _called_off: Sender<()>,
}

/// Gives the calling test that long. Tests that wait for a limit give it ten times.
pub fn watch(what: impl Into<String>, time: Duration) -> Watchdog {
    let what = what.into();
    let (called_off, waiting) = channel::<()>();
    let body = move || {
        if let Err(RecvTimeoutError::Timeout) = waiting.recv_timeout(time) {
            bite(&what, time);
        }
    };
    thread::Builder::new().name("watchdog".into()).spawn(body).unwrap();
    Watchdog { _called_off: called_off }
}

/// As [`watch`], and hands what every process was doing to `last`, which has a moment to write it down, before the end.
pub fn watch_then(
    what: impl Into<String>,
    time: Duration,
    last: impl FnOnce(String) + Send + 'static,
) -> Watchdog {
    let what = what.into();
    let (called_off, waiting) = channel::<()>();
    let body = move || {
        if let Err(RecvTimeoutError::Timeout) = waiting.recv_timeout(time) {
            last(report(&what, time));
            end_all();
        }
    };
    thread::Builder::new().name("watchdog".into()).spawn(body).unwrap();
    Watchdog { _called_off: called_off }
}

fn bite(what: &str, time: Duration) {
    say(&report(what, time));
    end_all();
}

fn report(what: &str, time: Duration) -> String {
    let mut text = format!("\nWATCHDOG: {what} did not end in {time:?}. What every process was doing:\n");
    text.push_str(&dump(rustix::process::getpid().as_raw_nonzero().get(), "the test"));
    let children = CHILDREN.lock().clone();
    for (pid, name) in &children {
        text.push_str(&dump(*pid, name));
    }
    text
}

fn end_all() {
    let children = CHILDREN.lock().clone();
    for (pid, _) in children {
        let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
    }
    // Not a panic: the thread that hangs would keep the process alive.
    std::process::exit(101);
}

/// Says what the threads of a process are doing: name, state, system call, and where in the kernel.
pub fn dump(pid: i32, name: &str) -> String {
    let mut text = format!("  {name} (process {pid}):\n");
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else {
        text.push_str("    gone\n");
        return text;
    };
    for task in tasks.flatten() {
        let read = |file: &str| fs::read_to_string(task.path().join(file)).unwrap_or_default();
        let comm = read("comm");
        let state = state_of(&task.path());
        let call = read("syscall");
        let frames: Vec<String> = read("stack")
            .lines()
            .filter_map(|line| Some(line.split_whitespace().nth(1)?.split('+').next()?.to_owned()))
            .take(4)
            .collect();
        let _ = writeln!(
            text,
            "    {:<16} {state} syscall {} {}",
            comm.trim(),
            call.split_whitespace().next().unwrap_or("?"),
            frames.join(" < ")
        );
    }
    text
}

pub(crate) fn state_of(task: &Path) -> char {
    let stat = fs::read_to_string(task.join("stat")).unwrap_or_default();
    // The name in brackets may contain anything, so the state is looked for behind the last one.
    stat.rsplit(')').next().and_then(|rest| rest.trim().chars().next()).unwrap_or('?')
}

/// A test has started a process: the watchdog reports it, and ends it.
pub fn child_started(pid: i32, name: &str) {
    CHILDREN.lock().push((pid, name.to_owned()));
}

/// It has ended, or is about to.
pub fn child_ended(pid: i32) {
    CHILDREN.lock().retain(|(known, _)| *known != pid);
}

/// Waits until something is so, looking often, for at most that long; returns whether it came.
pub fn eventually(within: Duration, mut so: impl FnMut() -> bool) -> bool {
    let until = std::time::Instant::now() + within;
    while !so() {
        if std::time::Instant::now() >= until {
            return so();
        }
        thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Looks for that long whether something stays so, for what must not happen any more: returns false as soon as it has.
pub fn stays(time: Duration, mut so: impl FnMut() -> bool) -> bool {
    !eventually(time, || !so())
}
