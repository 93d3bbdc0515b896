//! NIXL in the same situations, for comparison: when it notices, and whether bytes come afterwards. Nothing of it is judged.
//!
//! Two processes with an agent each, by its Python API and with its default settings, over TCP as between hosts, or over
//! what it chooses on one host.

use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use towline_testkit::process::{Failure, Process, Reply};
use towline_testkit::scene::MIB;
use towline_testkit::watchdog::eventually;

use super::python::now;
use super::staff::interpreter;
use super::{Course, Drill, Round};

const WORKER: &str = include_str!("nixl/worker.py");
const PROBE: &str =
    "import numpy\ntry:\n    import nixl._api\nexcept ImportError:\n    import nixl_cu12._api";

const LEN: usize = 64 * MIB;

/// How long it may take to notice before that is written down instead.
const NOTICE: Duration = Duration::from_secs(10);

/// How long late bytes are waited for.
const LATE: f64 = 0.5;

/// Why there is no NIXL here.
fn missing() -> Option<String> {
    let mut probe = interpreter();
    let shown = probe.get_program().to_string_lossy().into_owned();
    let probed = settings(&mut probe).args(["-c", PROBE]).stdin(Stdio::null()).output();
    match probed {
        Ok(probed) if probed.status.success() => None,
        Ok(_) => Some(format!(
            "{shown} cannot use NIXL's Python API (pip install nixl-cu12 numpy, into .venv here)"
        )),
        Err(error) => Some(format!("{shown} cannot be run: {error}")),
    }
}

fn settings(command: &mut Command) -> &mut Command {
    // The wheel's UCX crashes its process at the end otherwise.
    if std::env::var_os("UCX_MODULES").is_none() {
        command.env("UCX_MODULES", "^efa");
    }
    command
}

/// Two agents, made anew for each round: what a round leaves behind is not the next one's.
pub(super) struct Beside;

impl Beside {
    pub(super) fn new(_: &Course) -> Result<Beside, String> {
        missing().map_or(Ok(Beside), Err)
    }
}

struct Agent {
    process: Process,
    address: u64,
    metadata: Vec<u8>,
}

impl Agent {
    fn open(name: &str, by_tcp: bool) -> Agent {
        let mut command = interpreter();
        settings(&mut command).args(["-c", WORKER]);
        if by_tcp {
            command.env("UCX_TLS", "tcp");
        }
        let mut process = Process::start_by(command, name);
        let reply = process.must(&format!("open {name} {LEN}"));
        Agent { process, address: reply.number(0), metadata: reply.payload }
    }

    /// A reply, unless none comes.
    fn answer(&mut self, within: Duration) -> Option<Result<Reply, Failure>> {
        let mut answer = None;
        eventually(within, || {
            answer = self.process.early_answer();
            answer.is_some()
        });
        answer
    }
}

impl Drill for Beside {
    fn round(&mut self, round: &mut Round) {
        let by_tcp = round.random.below(2) == 0;
        let (mut owner, mut user) = (Agent::open("owner", by_tcp), Agent::open("user", by_tcp));
        user.process.ask_with("meet", &owner.metadata).unwrap();
        owner.process.ask_with("meet", &user.metadata).unwrap();
        // The first transfer connects.
        let first = user.process.must(&format!("once owner {} 64", owner.address));
        assert_eq!(first.text(0), "DONE");
        owner.process.must("fill 7");
        let tell = |name: [&'static str; 2]| name[usize::from(!by_tcp)];
        let what = round.random.pick(&["kill", "stop", "cancel"]);
        user.process.must(&format!("begin READ owner {}", owner.address));
        thread::sleep(round.random.micros(8000));
        let at = now();
        match what {
            "kill" => owner.process.kill_without_waiting(),
            "stop" => owner.process.stop(),
            _ => return cancelled(round, &mut user, tell),
        }
        user.process.tell(&format!("ended {}", NOTICE.as_secs_f64()));
        let ended = user.answer(NOTICE * 2).and_then(Result::ok);
        let state = ended.as_ref().map_or("gone", |reply| reply.text(0)).to_owned();
        let took = ended.map_or(0, |reply| reply.number(1).saturating_sub(at));
        match (state.as_str(), what) {
            ("DONE", _) => round.tally.count("finished before", 1),
            ("ERR", "kill") => round.tally.time(
                tell(["a kill is noticed, by tcp", "a kill is noticed, by its choice"]),
                Duration::from_nanos(took),
            ),
            ("ERR", _) => round.tally.time(
                tell(["a stop is noticed, by tcp", "a stop is noticed, by its choice"]),
                Duration::from_nanos(took),
            ),
            ("PROC", "kill") => round.tally.count(
                tell(["kills not noticed in 10 s, by tcp", "kills not noticed in 10 s, by its choice"]),
                1,
            ),
            ("PROC", _) => round.tally.count(
                tell(["stops not noticed in 10 s, by tcp", "stops not noticed in 10 s, by its choice"]),
                1,
            ),
            _ => round.tally.count("the initiator's process ended", 1),
        }
        if what == "stop" && state != "DONE" && state != "gone" {
            user.process.tell("release 9");
            let released = user.answer(NOTICE);
            owner.process.resume();
            late(round, &mut user, released);
        }
    }
}

fn cancelled(round: &mut Round, user: &mut Agent, tell: impl Fn([&'static str; 2]) -> &'static str) {
    user.process.tell("release 9");
    let released = user.answer(NOTICE);
    if let Some(Ok(reply)) = &released {
        round.tally.time(
            tell(["a release takes, by tcp", "a release takes, by its choice"]),
            Duration::from_nanos(reply.number(0)),
        );
    }
    late(round, user, released);
}

/// What has changed in memory that was the caller's again.
fn late(round: &mut Round, user: &mut Agent, released: Option<Result<Reply, Failure>>) {
    match released {
        Some(Ok(_)) => {}
        Some(Err(_)) => return round.tally.count("releases refused", 1),
        None => return round.tally.count("releases without a reply in 10 s", 1),
    }
    user.process.tell(&format!("changed 9 {LATE}"));
    let Some(Ok(reply)) = user.answer(NOTICE) else {
        return round.tally.count("the initiator's process ended", 1);
    };
    let bytes = reply.number(0);
    round.tally.count("releases", 1);
    round.tally.count("releases with late bytes", u64::from(bytes > 0));
    round.tally.count("late bytes", bytes);
}
