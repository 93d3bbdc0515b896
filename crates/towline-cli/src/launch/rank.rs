//! One rank: a process, its process group and its output.

use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use clap::Args;
use rustix::process::{
    Pid, PidfdFlags, Signal, getppid, kill_process_group, pidfd_open, set_parent_process_death_signal,
};
use serde::Serialize;
use towline_lab::outcome::{Exit, Failure, Outcome};

use super::interrupt;
use super::lines::{Lines, Stream};

#[derive(Args)]
pub(crate) struct RankOptions {
    /// The process that started it
    #[arg(long)]
    parent: i32,
    /// The program and its arguments
    #[arg(last = true, required = true)]
    program: Vec<OsString>,
}

/// Becomes the program of a rank, which the kernel ends with the launcher.
pub(crate) fn become_rank(options: &RankOptions) -> Outcome {
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| Failure::os("prctl", error))?;
    // A launcher that died before that line has another number already.
    if getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(options.parent) {
        return Err(Failure::new(Exit::Unavailable, "the launcher is gone"));
    }
    // The launcher waits for its signals, and its children inherit that.
    interrupt::release().map_err(|error| Failure::os("signals", error))?;
    let Some((program, arguments)) = options.program.split_first() else {
        return Err(Failure::usage("there is no program"));
    };
    let error = Command::new(program).args(arguments).exec();
    Err(Failure::os(program.display(), error))
}

/// A rank that runs. Dropping it ends it.
pub(super) struct Rank {
    number: usize,
    child: Child,
    /// Readable once it has ended.
    ending: OwnedFd,
    lines: Option<[Lines; 2]>,
    reaped: bool,
}

/// A rank that has ended.
#[derive(Serialize)]
pub(super) struct Ended {
    pub(super) rank: usize,
    code: Option<i32>,
    signal: Option<i32>,
    #[serde(skip)]
    pub(super) how: String,
    #[serde(skip)]
    lines: Option<[Lines; 2]>,
}

impl Ended {
    /// The exit code of one that did not end well.
    pub(super) fn failed(&self) -> Option<u8> {
        match (self.code, self.signal) {
            (Some(0), _) => None,
            (Some(code), _) => Some(u8::try_from(code).unwrap_or(1)),
            (None, Some(signal)) => Some(128 + signal as u8),
            (None, None) => Some(1),
        }
    }

    /// Waits for its last lines, until then at most.
    pub(super) fn finish_lines(&mut self, until: Instant) {
        for lines in self.lines.take().into_iter().flatten() {
            lines.finish(until);
        }
    }
}

impl Rank {
    /// Starts the program as rank `number`. `quiet`: its output goes to standard error.
    pub(super) fn start(
        number: usize,
        nranks: usize,
        id: &str,
        program: &[OsString],
        quiet: bool,
    ) -> Outcome<Rank> {
        let itself =
            std::env::current_exe().map_err(|error| Failure::os("this program's own path", error))?;
        let failed = |error| Failure::os(format!("rank {number}"), error);
        let (rank, size) = (number.to_string(), nranks.to_string());
        let mut child = Command::new(itself)
            .args(["rank", "--parent", &std::process::id().to_string(), "--"])
            .args(program)
            .envs([("TOWLINE_RANK", &*rank), ("TOWLINE_NRANKS", &*size), ("TOWLINE_UNIQUE_ID", id)])
            .envs([("RANK", &*rank), ("LOCAL_RANK", &*rank)])
            .envs([("WORLD_SIZE", &*size), ("LOCAL_WORLD_SIZE", &*size)])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        // From here on dropping ends it, also where one of these fails.
        let ending = pidfd_open(pid(&child), PidfdFlags::empty());
        let ending = match ending {
            Ok(ending) => ending,
            Err(error) => {
                let _ = kill_process_group(pid(&child), Signal::KILL);
                let _ = child.wait();
                return Err(Failure::os("pidfd_open", error));
            }
        };
        let mut started = Rank { number, child, ending, lines: None, reaped: false };
        let (Some(stdout), Some(stderr)) = (stdout, stderr) else {
            return Err(Failure::failed("a rank has no pipes"));
        };
        let out = if quiet { Stream::Error } else { Stream::Output };
        let lines = [Lines::pass_on(number, stdout, out), Lines::pass_on(number, stderr, Stream::Error)];
        let [out, error] = lines;
        started.lines = Some([out.map_err(failed)?, error.map_err(failed)?]);
        Ok(started)
    }

    /// Readable once it has ended.
    pub(super) fn ending(&self) -> BorrowedFd<'_> {
        self.ending.as_fd()
    }

    /// Asks it and all that it started to end.
    pub(super) fn ask_to_end(&self) {
        self.send(Signal::TERM);
    }

    /// Ends it and all that it started.
    pub(super) fn kill(&self) {
        self.send(Signal::KILL);
    }

    fn send(&self, signal: Signal) {
        // Before the child is reaped nobody else can have its number. That all have ended already is no error.
        let _ = kill_process_group(pid(&self.child), signal);
    }

    /// Learns how it ended, and ends what it has left behind.
    pub(super) fn reap(mut self) -> Outcome<Ended> {
        let failed = |error| Failure::os(format!("rank {}", self.number), error);
        self.kill();
        let status = self.child.wait().map_err(failed)?;
        self.reaped = true;
        let how = match (status.code(), status.signal()) {
            (Some(code), _) => format!("ended with exit code {code}"),
            (None, Some(signal)) => format!("was ended by signal {signal}"),
            (None, None) => format!("ended: {status}"),
        };
        let lines = self.lines.take();
        Ok(Ended { rank: self.number, code: status.code(), signal: status.signal(), how, lines })
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if !self.reaped {
            self.kill();
            let _ = self.child.wait();
        }
    }
}

fn pid(child: &Child) -> Pid {
    Pid::from_child(child)
}
