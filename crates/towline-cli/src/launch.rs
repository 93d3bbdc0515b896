//! `towline launch`: the ranks of a group on this host, their output line by line, and all of them stopped when one
//! fails.
//!
//! The launcher holds the meeting that the id names. Every rank is the leader of a process group of its own, so that
//! what it starts is stopped with it; the kernel ends a rank with the launcher, whatever happens to that.

mod interrupt;
mod lines;
mod rank;

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;

use self::interrupt::Interrupts;
use self::rank::{Ended, Rank};
pub(crate) use self::rank::{RankOptions, become_rank};
use crate::output::Output;
use towline_lab::outcome::{Failure, Outcome};

/// How long the last lines of ranks that have ended may take; only what escaped its process group holds them up.
const LAST_LINES: Duration = Duration::from_secs(2);

pub(crate) const HELP: &str = "\
Every rank gets TOWLINE_RANK, TOWLINE_NRANKS and TOWLINE_UNIQUE_ID, which Communicator::from_env and towline.nccl
read, and for other programs RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE. Its standard input is empty.

When a rank fails, or on Ctrl-C or SIGTERM, the others get SIGTERM, and SIGKILL after the grace time. A second Ctrl-C
does not wait.

The exit code is that of the rank that failed first (128 and the signal's number where a signal ended it), 0 where
none did, 128 and the signal's number where the launcher was asked to end; 2 and 3 also as for all commands.
With --json the output of the ranks goes to standard error, and how they ended is the document.";

#[derive(Args)]
pub(crate) struct Options {
    /// How many ranks
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,
    /// How many seconds ranks that are stopped may take to end by themselves
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(0..=3600))]
    grace: u64,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// How a launch ended.
#[derive(Serialize)]
struct Report<'a> {
    exit: u8,
    /// In the order in which they ended.
    ranks: &'a [Ended],
}

pub(crate) fn run(options: &Options, output: &Output) -> Outcome<ExitCode> {
    // Before there is any other thread: those inherit it.
    let interrupts = Interrupts::keep().map_err(|error| Failure::os("signals", error))?;
    let id = towline_comm::get_unique_id()?;
    let mut launch = Launch {
        grace: Duration::from_secs(options.grace),
        interrupts,
        running: Vec::new(),
        ended: Vec::new(),
        exit: None,
        kill_at: None,
    };
    let nranks = options.ranks as usize;
    for number in 0..nranks {
        let rank = Rank::start(number, nranks, &id.to_string(), &options.program, output.is_json())?;
        launch.running.push(rank);
    }
    while !launch.running.is_empty() {
        launch.step()?;
    }
    let until = Instant::now() + LAST_LINES;
    for ended in &mut launch.ended {
        ended.finish_lines(until);
    }
    let exit = launch.exit.unwrap_or(0);
    output.document(&Report { exit, ranks: &launch.ended });
    Ok(ExitCode::from(exit))
}

/// Ranks that run, and what is known of those that do not any more. Dropping it ends those that run.
struct Launch {
    grace: Duration,
    interrupts: Interrupts,
    running: Vec<Rank>,
    ended: Vec<Ended>,
    /// The exit code, once something has decided it.
    exit: Option<u8>,
    /// When those that were asked to end are ended.
    kill_at: Option<Instant>,
}

impl Launch {
    /// Waits until something happens, and does what follows from it.
    fn step(&mut self) -> Outcome<()> {
        let readable = self.wait()?;
        if readable[0] {
            while let Some(signal) = self.interrupts.next().map_err(|error| Failure::os("signals", error))? {
                self.interrupted(signal);
            }
        }
        if self.kill_at.is_some_and(|at| at <= Instant::now()) {
            self.kill_at = None;
            self.running.iter().for_each(Rank::kill);
        }
        // From the back, so that the places of those before stay.
        for place in (0..self.running.len()).rev().filter(|place| readable[place + 1]) {
            let ended = self.running.remove(place).reap()?;
            if let Some(code) = ended.failed()
                && self.exit.is_none()
            {
                self.exit = Some(code);
                if !self.running.is_empty() {
                    eprintln!("towline: rank {} {}; the others are stopped", ended.rank, ended.how);
                    self.stop();
                } else {
                    eprintln!("towline: rank {} {}", ended.rank, ended.how);
                }
            }
            self.ended.push(ended);
        }
        Ok(())
    }

    /// Which can be read: the signals, then the ranks, which can once they have ended.
    fn wait(&self) -> Outcome<Vec<bool>> {
        let mut fds = vec![PollFd::new(&self.interrupts, PollFlags::IN)];
        fds.extend(self.running.iter().map(|rank| PollFd::from_borrowed_fd(rank.ending(), PollFlags::IN)));
        let timeout = self.kill_at.map(|at| {
            let left = at.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos().into() }
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Failure::os("poll", error)),
        }
        Ok(fds.iter().map(|fd| fd.revents().contains(PollFlags::IN)).collect())
    }

    fn interrupted(&mut self, signal: i32) {
        let again = self.exit.is_some();
        self.exit.get_or_insert(128 + signal as u8);
        if again {
            self.kill_at = Some(Instant::now());
        } else {
            self.stop();
        }
    }

    fn stop(&mut self) {
        self.running.iter().for_each(Rank::ask_to_end);
        self.kill_at = Some(Instant::now() + self.grace);
    }
}
