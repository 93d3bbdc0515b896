//! NIXL by its own Python API: an interpreter that measures what it is asked to.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use serde::de::DeserializeOwned;

use crate::outcome::{Failure, Outcome};
use crate::worker::protocol::Op;

const PROGRAM: &str = include_str!("by_api.py");

/// Where the project keeps its interpreter, from the directory of the project.
const PROJECT_PYTHON: &str = ".venv/bin/python";

/// An interpreter with NIXL, and its child, which owns the memory.
pub(in crate::bench) struct Peer {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    program: PathBuf,
}

impl Peer {
    /// Starts both; `thread`: with NIXL's own progress thread; `driven`: transfers need the owner's processor.
    pub(in crate::bench) fn start(bytes: u64, thread: bool, driven: bool) -> Outcome<Peer> {
        Peer::start_with(&[], bytes, thread, driven)
    }

    /// [`start`](Self::start) with those variables in its environment.
    pub(in crate::bench) fn start_with(
        variables: &[(&str, &str)],
        bytes: u64,
        thread: bool,
        driven: bool,
    ) -> Outcome<Peer> {
        let python = if Path::new(PROJECT_PYTHON).exists() { PROJECT_PYTHON } else { "python3" };
        let program = std::env::temp_dir().join(format!("towline-nixl-{}-{thread}.py", std::process::id()));
        fs::write(&program, PROGRAM).map_err(|error| Failure::os(program.display(), error))?;
        let mut command = Command::new(python);
        command.arg(&program).args(["user", &bytes.to_string(), if thread { "1" } else { "0" }]);
        if driven {
            command.arg("driven");
        }
        command.envs(variables.iter().copied());
        // The wheel's UCX crashes its process at the end otherwise.
        if std::env::var_os("UCX_MODULES").is_none() {
            command.env("UCX_MODULES", "^efa");
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| Failure::os(python, error))?;
        let (orders, Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::failed("the interpreter has no pipes"));
        };
        let mut peer = Peer { child, orders, answers: BufReader::new(answers), program };
        peer.answer::<String>().map_err(|_| {
            Failure::lacking(format!(
                "{python} cannot use NIXL's Python API (pip install nixl-cu12 numpy, into .venv here)"
            ))
        })?;
        Ok(peer)
    }

    fn answer<T: DeserializeOwned>(&mut self) -> Outcome<T> {
        let mut line = String::new();
        let came =
            self.answers.read_line(&mut line).map_err(|error| Failure::os("the interpreter", error))?;
        if came == 0 {
            return Err(Failure::failed("the interpreter with NIXL has ended"));
        }
        serde_json::from_str(&line)
            .map_err(|error| Failure::failed(format!("the interpreter with NIXL: {error}")))
    }

    fn ask<T: DeserializeOwned>(&mut self, order: &str) -> Outcome<T> {
        if let Some(orders) = &mut self.orders {
            writeln!(orders, "{order}")
                .and_then(|()| orders.flush())
                .map_err(|error| Failure::os("the interpreter", error))?;
        }
        self.answer()
    }

    /// Prepares what follows.
    pub(in crate::bench) fn prepare(&mut self, op: Op, blocks: u64, block_size: u64) -> Outcome<()> {
        self.ask::<String>(&format!("prepare {} {blocks} {block_size}", op.name())).map(drop)
    }

    /// Seconds of each of that many transfers.
    pub(in crate::bench) fn transfers(&mut self, count: usize) -> Outcome<Vec<f64>> {
        self.ask(&format!("run {count}"))
    }

    /// Seconds of each of that many messages, there and back.
    pub(in crate::bench) fn notifications(&mut self, count: usize) -> Outcome<Vec<f64>> {
        self.ask(&format!("notify {count}"))
    }

    /// The part of a core that each of the two processes uses while nothing happens.
    pub(in crate::bench) fn idle(&mut self, time: Duration) -> Outcome<f64> {
        self.ask(&format!("idle {}", time.as_secs_f64()))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The end of its input ends both.
        drop(self.orders.take());
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.program);
    }
}
