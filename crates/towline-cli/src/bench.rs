//! `towline bench`: every path beside the limit of the machine, measured in turns in the same run.

mod against;
mod bed;
mod comm;
mod contacts;
mod cores;
mod costs;
mod crowds;
mod defences;
mod gpu;
mod growth;
mod limit;
mod python;
mod report;
mod shapes;
mod team;
mod transfers;

use std::borrow::Cow;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};

pub(crate) use self::python::interpreter;
use self::report::{Report, Row, Skipped};
use self::shapes::Path;
use crate::measure::Pace;
use crate::outcome::{Exit, Failure, Outcome};
use crate::output::Output;
use crate::size;
use crate::worker::protocol::Op;

pub(crate) const HELP: &str = "\
Every row is measured in rounds that alternate between ours and the limit, so that a change of the machine's
speed meets both; medians are shown. The limit of a row is what the machine does without the library:
  inproc, mapped  memcpy of the same blocks, in the same order, over the same memory, with as many threads
  cma             process_vm_readv/writev of the same blocks, 1024 to a call, with as many threads
  unix, tcp       a bare socket copy of as many bytes, with as many streams
  notify          a round trip over two eventfds between two sleeping processes: on two cores, and on one
  growth          the same transfer with one registration
  post            waking a thread that sleeps, after such a long transfer; for 4 KiB over a socket, sending a bare request; p99, as ours
  gpu…            where there is a GPU, between two processes: cuMemcpyAsync and a wait; for blocks a kernel that copies by a
                  list of pointers, the list uploaded; to and from the host the driver's copy of pinned memory; gpu-tcp
                  host memory by the same path. Medians of single transfers. Where NIXL is installed for the interpreter, a second row has it beside ours,
                  with UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on and UCX_RNDV_THRESH=0. --gpu measures these rows alone.
  defence         the same request without the defence: quotas (limits out of reach), CRC32C, TLS, isolation=enforced
The ratio says how near ours is to the limit, 1.0 being equal: ours/limit for rates, limit/ours for times. Rows
without a limit show the target instead, and the ratio is target/ours: 1.0 or more meets it.
Blocks are taken in random order on both sides. Every shape is verified before it is measured.

With --python the package measures itself (python -m towline.bench) between two processes of the interpreter, and the
limit of a row is the same transfer in Rust, over the same memory, in turns:
  py-4k-operation             4 KiB from begin_read to the awaiting code on both sides
  py-4k-simulated-polling     the same, waited for by sleeping and looking as dynamo.nixl_connect does, without NIXL
  py-4k-nixl                  the same by dynamo.nixl_connect, where it and NIXL are installed
  py-4k-nixl-polling          the same by NIXL alone, where it is installed, waited for in the same way
  py-overhead                 p50 of a 4 KiB operation, less p50 of that operation begun by Rust
  py-overhead-transfer        p50 of a 4 KiB transfer, less p50 of that transfer in Rust
  py-operation-over-transfer  p50 of a 4 KiB operation, less p50 of a transfer in Rust, which claims nothing
  py-notifications            a message there and one back, after 100,000 finished ones and between fresh endpoints
  py-64m-pause                the longest delay of a timer of the event loop during a read, and during as long a sleep
  py-64m, py-64m-transfer     64 MiB by an operation, and by a transfer
  py-81920x4k                 blocks by index arrays

With --against nixl every shape is measured by the path nixl, by NIXL's own Python API (an interpreter with the wheel and numpy:
.venv/bin/python, or python3), by the embedded path of the same kind and by the machine, in turns, for two settings of UCX.
NIXL runs without its progress thread, which only takes time from transfers; notify and idle compare with that thread,
as it is by default.

comm measures groups of 2 and 4 rank processes on this host. Where there are enough cores, each rank has its own.
Times of a call are those of the slowest rank. Peers take their turns between ours, where they are installed:
  put-signal-8b     8 bytes and a signal, waited for, there and back; beside a flag in shared memory that two
                    processes raise and spin on, and beside MPI_Put and MPI_Win_flush, the target polling
  put-4m, get-4m    beside memcpy between the same memory
  all-reduce-SIZE   f32, sums, out of place: with windows, registered buffers and neither; beside MPI_Allreduce with the
                    fastest of several settings, chosen for each size, and torch.distributed with gloo; at 64 MiB
                    also a loop on as many cores that only adds the same bytes up, which is what the memory can do
  window-1g         registering a window of 1 GiB
  windows-1000      what 1,000 windows, opened and closed after as many others, leave behind
  nccl-call-SIZE    where there are a GPU and NCCL, one rank: p50 of an all-reduce until it is in the stream, less p50 of the bare
                    ncclAllReduce; nccl-register-64m, nccl-window-64m: registering and giving up, beside the bare calls
--list shows the rows, --filter takes a part of a label (4-ranks/all-reduce-1m).

With --json: {\"rows\": [{\"name\", \"path\", \"op\", \"bytes\", \"blocks\", \"block_size\", \"threads\", \"streams\", \"unit\",
\"ranks\" (comm), \"ours\", \"limit\", \"target\", \"ratio\", \"goal\", \"met\", \"p99\", \"rounds\", \"against\"}], \"skipped\": [...], \"machine\": {...},
\"stolen\": the share of the processors' time that the host gave to others meanwhile}, and with --python also
\"python\": {...}, the interpreter and the package.";

/// What else can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Subject {
    /// Groups of 2 and 4 ranks, beside the machine, Open MPI and gloo
    Comm,
}

#[derive(Args)]
pub(crate) struct Options {
    /// Measure this instead of the paths
    #[arg(value_name = "SUBJECT", conflicts_with_all = ["blocks", "block_size", "op", "path", "python"])]
    subject: Option<Subject>,
    /// Compare a group only with the machine, not with Open MPI and gloo
    #[arg(long, requires = "subject")]
    alone: bool,
    /// Fewer shapes and rounds: under a minute
    #[arg(long)]
    quick: bool,
    /// Only rows whose label (path/name/op, as in mapped/16384x4k/read) contains this
    #[arg(long, value_name = "NAME")]
    filter: Option<String>,
    /// Measure this many blocks instead of the standard shapes
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    blocks: Option<u32>,
    /// Measure blocks of this size instead of the standard shapes: bytes, or with K, M, G
    #[arg(long, value_name = "BYTES", value_parser = size::parse)]
    block_size: Option<u64>,
    /// Only this direction
    #[arg(long)]
    op: Option<Op>,
    /// Only this path
    #[arg(long)]
    path: Option<Path>,
    /// At least this many rounds of each row
    #[arg(long, value_name = "ROUNDS", value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: Option<u32>,
    /// Measure another engine beside ours, in one run: the same shapes by its own interface and through ours
    #[arg(long, value_name = "ENGINE", conflicts_with_all = ["subject", "blocks", "block_size", "op", "path", "python"])]
    against: Option<against::Against>,
    /// Only the rows of GPUs
    #[arg(long, conflicts_with_all = ["subject", "blocks", "block_size", "op", "path", "python", "against"])]
    gpu: bool,
    /// List the rows instead of measuring them
    #[arg(long)]
    list: bool,
    /// Measure the Python package instead, beside the same transfers in Rust
    #[arg(long, conflicts_with_all = ["blocks", "block_size", "op", "path"])]
    python: bool,
    /// The interpreter that has the package; otherwise that of .venv here, or else python3
    #[arg(long, value_name = "PATH", requires = "python")]
    python_exe: Option<PathBuf>,
}

impl Options {
    fn pace(&self) -> Pace {
        let (budget, fewest, most) = if self.quick { (300, 7, 15) } else { (1500, 7, 61) };
        let fewest = self.repeat.map_or(fewest, |rounds| rounds as usize);
        Pace { budget: Duration::from_millis(budget), fewest, most: most.max(fewest) }
    }

    fn wants(&self, label: &str) -> bool {
        self.filter.as_ref().is_none_or(|filter| label.contains(filter.as_str()))
    }
}

pub(crate) fn run(options: &Options, output: &Output) -> Outcome {
    report::begin();
    if options.python {
        return python::run(options, output);
    }
    if let Some(against::Against::Nixl) = options.against {
        return against::run(options, output);
    }
    if options.subject == Some(Subject::Comm) {
        return comm::run(options, output);
    }
    let mut cases = shapes::cases(options);
    cases.retain(|case| !options.gpu && options.wants(&case.label()));
    let narrowed = options.blocks.is_some()
        || options.block_size.is_some()
        || options.op.is_some()
        || options.path.is_some();
    let costs: Vec<_> =
        costs::all().filter(|cost| !options.gpu && !narrowed && options.wants(cost.name)).collect();
    let on_gpus = if narrowed { Vec::new() } else { gpu::labels(options) };
    if cases.is_empty() && costs.is_empty() && on_gpus.is_empty() {
        return Err(Failure::usage("no row has such a label; towline bench --list shows them all"));
    }
    if options.list {
        let labels = cases.iter().map(shapes::Case::label);
        for label in labels.chain(costs.iter().map(|cost| cost.name.to_owned())).chain(on_gpus) {
            output.text(label);
        }
        return Ok(Exit::Fine);
    }
    warn_of_debug_build(output);
    let mut session = Session {
        pace: options.pace(),
        quick: options.quick,
        rows: Vec::new(),
        skipped: Vec::new(),
        failures: Vec::new(),
        progress: progress(output, cases.len() + costs.len() + on_gpus.len()),
    };
    for path in Path::ALL.into_iter().chain([Path::Nixl]) {
        let mine: Vec<_> = cases.iter().filter(|case| case.path == path).collect();
        if !mine.is_empty() {
            transfers::run(&mut session, path, &mine);
        }
    }
    for cost in costs {
        session.step(cost.name);
        if let Err(failure) = (cost.measure)(&mut session) {
            session.fail(cost.name.to_owned(), None, &failure);
        }
    }
    if !on_gpus.is_empty() {
        gpu::run(&mut session, options);
    }
    session.progress.finish_and_clear();
    Report::new(session.rows, session.skipped).print(output);
    match session.failures.as_slice() {
        [] => Ok(Exit::Fine),
        failures => Err(Failure::failed(failures.join("; "))),
    }
}

fn warn_of_debug_build(output: &Output) {
    if cfg!(debug_assertions) && !output.is_json() {
        eprintln!("towline: this is a debug build; its figures mean little");
    }
}

/// What a run has found so far.
pub(crate) struct Session {
    pace: Pace,
    /// Whether the whole run is to take less than a minute.
    quick: bool,
    rows: Vec<Row>,
    skipped: Vec<Skipped>,
    failures: Vec<String>,
    progress: ProgressBar,
}

impl Session {
    fn step(&self, label: &str) {
        self.progress.set_message(label.to_owned());
        self.progress.inc(1);
    }

    /// Notes a row that could not be measured: skipped where the machine lacks what it needs, else a failure.
    fn fail(&mut self, name: String, path: Option<&'static str>, failure: &Failure) {
        let label = path.map_or(name.clone(), |path| format!("{path}/{name}"));
        if failure.exit != Exit::Unavailable {
            self.failures.push(format!("{label}: {}", failure.message));
        }
        let path = path.map(Cow::Borrowed);
        self.skipped.push(Skipped { name, path, reason: failure.message.clone() });
    }
}

fn progress(output: &Output, rows: usize) -> ProgressBar {
    if !output.shows_progress() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(rows as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}") {
        bar.set_style(style);
    }
    bar
}
