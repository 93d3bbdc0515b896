//! The other process of `demo`, `doctor` and `bench`: the same program again, which gets its orders line by line.
//!
//! The parent writes one JSON object per line to the worker's standard input and reads one back per line. A worker
//! ends when its input does, and the kernel ends it with its parent whatever happens.

mod duties;
mod hire;
mod member;
pub(crate) mod order;
pub(crate) mod protocol;
pub(crate) mod sockets;

use std::fmt::Display;
use std::io::{BufRead, Write};

use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use rustix::thread::{CpuSet, sched_setaffinity};

pub(crate) use self::hire::start_echo;
pub use self::hire::{Moved, Region, Worker};
use self::protocol::{Ask, Reply};
pub use self::protocol::{Memory, Op, nixl};
use crate::outcome::{Exit, Failure, Outcome};

/// How this process is a worker. The program that starts one calls the running program again as `worker`, with an option for each of these.
#[derive(Debug, Clone)]
pub struct Options {
    /// The process that started it.
    pub parent: i32,
    /// The name of its endpoints.
    pub name: String,
    /// The core that it stays on.
    pub core: Option<usize>,
    /// Whether it only answers one eventfd (standard input) with another (standard output).
    pub echo: bool,
}

/// Is a worker until its input ends. What goes wrong between two orders is reported to `complain`.
///
/// # Errors
/// Where its parent is gone, or what it receives makes no sense.
pub fn run(options: &Options, complain: impl Fn(&dyn Display)) -> Outcome {
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| Failure::os("prctl", error))?;
    // A parent that died before that line has another number already.
    if getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(options.parent) {
        return Err(Failure::lacking("the parent of this worker is gone"));
    }
    if let Some(core) = options.core {
        let mut set = CpuSet::new();
        set.set(core);
        sched_setaffinity(None, &set).map_err(|error| Failure::os("sched_setaffinity", error))?;
    }
    if options.echo {
        return echo();
    }
    let mut duties = duties::Duties::new(&options.name);
    let mut stdout = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|error| Failure::os("standard input", error))?;
        let ask: Ask = serde_json::from_str(&line)
            .map_err(|error| Failure::failed(format!("an order that this worker does not know: {error}")))?;
        let mut send = |reply: &Reply| {
            let line = serde_json::to_string(reply).map_err(|error| Failure::failed(error.to_string()))?;
            writeln!(stdout, "{line}")
                .and_then(|()| stdout.flush())
                .map_err(|error| Failure::os("answer", error))
        };
        match duties.perform(ask) {
            Ok(reply) => send(&reply)?,
            Err(failure) => send(&Reply::failed(&failure))?,
        }
        if let Err(error) = duties.after_reply() {
            complain(&error);
        }
    }
    Ok(Exit::Fine)
}

fn echo() -> Outcome {
    let mut count = [0; 8];
    loop {
        match rustix::io::read(std::io::stdin(), &mut count) {
            Ok(8) => rustix::io::write(std::io::stdout(), &1u64.to_ne_bytes())
                .map_err(|error| Failure::os("eventfd", error))?,
            Ok(_) => return Ok(Exit::Fine),
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(Failure::os("eventfd", error)),
        };
    }
}
