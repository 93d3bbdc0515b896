//! `towline bench`: every path beside the limit of the machine, measured in turns in the same run.

use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use towline_lab::bench::{self, Figures, Found, Path};
use towline_lab::outcome::{Exit, Failure, Outcome};
use towline_lab::size;
use towline_lab::worker::Op;

use crate::output::Output;

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

/// Who is measured beside us.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Against {
    /// NIXL, through the path nixl and through its own Python API
    Nixl,
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
    #[arg(long, value_parser = ops())]
    op: Option<Op>,
    /// Only this path
    #[arg(long, value_parser = paths())]
    path: Option<Path>,
    /// At least this many rounds of each row
    #[arg(long, value_name = "ROUNDS", value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: Option<u32>,
    /// Measure another engine beside ours, in one run: the same shapes by its own interface and through ours
    #[arg(long, value_name = "ENGINE", conflicts_with_all = ["subject", "blocks", "block_size", "op", "path", "python"])]
    against: Option<Against>,
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

fn ops() -> impl TypedValueParser<Value = Op> {
    let named =
        |name: String| Op::BOTH.into_iter().find(|op| op.name() == name).ok_or("there is no such direction");
    PossibleValuesParser::new(Op::BOTH.map(Op::name)).try_map(named)
}

fn paths() -> impl TypedValueParser<Value = Path> {
    let value = |path: Path| match path.is_opt_in() {
        true => PossibleValue::new(path.name()).help("Not measured unless named: owners have to opt in"),
        false => PossibleValue::new(path.name()),
    };
    let named = |name: String| Path::all().find(|path| path.name() == name).ok_or("there is no such path");
    PossibleValuesParser::new(Path::all().map(value)).try_map(named)
}

impl Options {
    fn subject(&self) -> bench::Subject {
        match (self.python, self.against, self.subject) {
            (true, ..) => bench::Subject::Python,
            (_, Some(Against::Nixl), _) => bench::Subject::Nixl,
            (.., Some(Subject::Comm)) => bench::Subject::Comm,
            (.., None) => bench::Subject::Paths,
        }
    }
}

pub(crate) fn run(options: &Options, output: &Output) -> Outcome {
    let asked = bench::Options {
        subject: options.subject(),
        alone: options.alone,
        quick: options.quick,
        filter: options.filter.clone(),
        blocks: options.blocks,
        block_size: options.block_size,
        op: options.op,
        path: options.path,
        repeat: options.repeat,
        gpu: options.gpu,
        list: options.list,
        python_exe: options.python_exe.clone(),
    };
    match bench::run(&asked, &Progress::new(output))? {
        Found::Labels(labels) => {
            output.text(labels.join("\n"));
            Ok(Exit::Fine)
        }
        Found::Figures(figures) => print(&figures, output),
    }
}

fn print(figures: &Figures, output: &Output) -> Outcome {
    let Figures { report, remarks, failures } = figures;
    output.document(report);
    let table = report.table();
    output.table(&table.header, &table.rows, table.right);
    for remark in report.remarks().iter().chain(remarks) {
        output.text(remark);
    }
    if failures.is_empty() { Ok(Exit::Fine) } else { Err(Failure::failed(failures.join("; "))) }
}

/// How far a run is, for an observer.
struct Progress {
    bar: ProgressBar,
    json: bool,
}

impl Progress {
    fn new(output: &Output) -> Progress {
        let bar = if output.shows_progress() { ProgressBar::new(0) } else { ProgressBar::hidden() };
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}") {
            bar.set_style(style);
        }
        Progress { bar, json: output.is_json() }
    }
}

impl bench::Progress for Progress {
    fn begins(&self, rows: usize) {
        if cfg!(debug_assertions) && !self.json {
            eprintln!("towline: this is a debug build; its figures mean little");
        }
        self.bar.set_length(rows as u64);
    }

    fn step(&self, label: &str) {
        self.bar.set_message(label.to_owned());
        self.bar.inc(1);
    }

    fn says(&self, text: &str) {
        self.bar.set_message(text.to_owned());
    }

    fn ends(&self) {
        self.bar.finish_and_clear();
    }
}
