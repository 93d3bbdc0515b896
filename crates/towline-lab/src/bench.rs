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
mod layers;
mod limit;
mod python;
mod report;
mod shapes;
mod team;
mod transfers;

use std::borrow::Cow;
use std::path::PathBuf;
use std::time::Duration;

pub use self::report::{Report, Table};
use self::report::{Row, Skipped};
pub use self::shapes::Path;
use crate::measure::Pace;
use crate::outcome::{Exit, Failure, Outcome};
use crate::worker::Op;

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// The paths, and what calls cost.
    Paths,
    /// Groups of 2 and 4 ranks, beside the machine, Open MPI and gloo.
    Comm,
    /// The Python package, beside the same transfers in Rust.
    Python,
    /// NIXL, through the path nixl and through its own Python API.
    Nixl,
}

/// What to measure, and how long.
#[derive(Debug, Clone)]
pub struct Options {
    /// What to measure.
    pub subject: Subject,
    /// Whether a group is compared only with the machine, not with Open MPI and gloo.
    pub alone: bool,
    /// Fewer shapes and rounds: under a minute.
    pub quick: bool,
    /// Only rows whose label contains this.
    pub filter: Option<String>,
    /// So many blocks instead of the standard shapes.
    pub blocks: Option<u32>,
    /// Blocks of so many bytes instead of the standard shapes.
    pub block_size: Option<u64>,
    /// Only this direction.
    pub op: Option<Op>,
    /// Only this path.
    pub path: Option<Path>,
    /// At least this many rounds of each row.
    pub repeat: Option<u32>,
    /// Only the rows of GPUs.
    pub gpu: bool,
    /// Whether the rows are listed instead of measured.
    pub list: bool,
    /// The interpreter that has the package; otherwise that of `.venv` here, or else `python3`.
    pub python_exe: Option<PathBuf>,
}

/// An observer while rows are measured.
pub trait Progress {
    /// So many rows are measured now.
    fn begins(&self, rows: usize);

    /// The next row is measured.
    fn step(&self, label: &str);

    /// Something is done that is no row.
    fn says(&self, text: &str);

    /// Nothing is measured any more.
    fn ends(&self);
}

/// What came of a run.
#[derive(Debug)]
pub enum Found {
    /// The rows that there are, where they were to be listed.
    Labels(Vec<String>),
    /// What was measured.
    Figures(Box<Figures>),
}

/// What was measured.
#[derive(Debug)]
pub struct Figures {
    /// The rows.
    pub report: Report,
    /// What else is to be said about them.
    pub remarks: Vec<String>,
    /// The rows that failed, and why.
    pub failures: Vec<String>,
}

impl Figures {
    fn new(report: Report) -> Figures {
        Figures { report, remarks: Vec::new(), failures: Vec::new() }
    }
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

/// Measures what the options name.
///
/// # Errors
/// Where no row has the label that was asked for, or nothing could be measured at all.
pub fn run(options: &Options, progress: &dyn Progress) -> Outcome<Found> {
    report::begin();
    match options.subject {
        Subject::Paths => paths(options, progress),
        Subject::Comm => comm::run(options, progress),
        Subject::Python => python::run(options, progress),
        Subject::Nixl => against::run(options, progress),
    }
}

fn paths(options: &Options, progress: &dyn Progress) -> Outcome<Found> {
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
        let costs = costs.iter().map(|cost| cost.name.to_owned());
        return Ok(Found::Labels(labels.chain(costs).chain(on_gpus).collect()));
    }
    progress.begins(cases.len() + costs.len() + on_gpus.len());
    let mut session = Session::new(options, progress);
    for path in Path::all() {
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
    Ok(session.finish())
}

/// What a run has found so far.
struct Session<'a> {
    pace: Pace,
    /// Whether the whole run is to take less than a minute.
    quick: bool,
    rows: Vec<Row>,
    skipped: Vec<Skipped>,
    failures: Vec<String>,
    progress: &'a dyn Progress,
}

impl<'a> Session<'a> {
    fn new(options: &Options, progress: &'a dyn Progress) -> Session<'a> {
        Session {
            pace: options.pace(),
            quick: options.quick,
            rows: Vec::new(),
            skipped: Vec::new(),
            failures: Vec::new(),
            progress,
        }
    }

    fn step(&self, label: &str) {
        self.progress.step(label);
    }

    fn finish(self) -> Found {
        self.progress.ends();
        let report = Report::new(self.rows, self.skipped);
        Found::Figures(Box::new(Figures { report, remarks: Vec::new(), failures: self.failures }))
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
