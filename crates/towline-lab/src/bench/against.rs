//! `towline bench --against nixl`: the same shapes by the path nixl, by NIXL's own Python API, by the embedded path and by
//! the bare machine, in turns.
//!
//! UCX takes its settings from the environment of a process, so each setting is measured by a process of its own.

pub(super) mod peer;

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;
use towline::{Access, Endpoint, Routing, SharedStorage};

use self::peer::Peer;
use super::bed::{Bed, Shape};
use super::limit::Limit;
use super::report::{Report, Row, Skipped, Unit};
use super::shapes::{Case, Manner, Path};
use super::{Figures, Found, Options, Progress, costs};
use crate::measure::{Pace, median};
use crate::outcome::{Failure, Outcome};
use crate::size;
use crate::worker::Worker;
use crate::worker::protocol::{Ask, Op, Reply, Usage, nixl};

/// Tells a process which setting it measures.
const SETTING: &str = "TOWLINE_BENCH_SETTING";

/// A way of NIXL, the setting with which it is the fastest there, and our own path of the same kind.
struct Setting {
    name: &'static str,
    variables: &'static [(&'static str, &'static str)],
    embedded: &'static str,
    /// Whether UCX needs the owner's processor there.
    driven: bool,
    /// Whether its notifications and its idling are measured too.
    costs: bool,
}

const SETTINGS: [Setting; 2] = [
    Setting { name: "cma", variables: &[], embedded: "cma", driven: false, costs: true },
    Setting { name: "tcp", variables: &[("UCX_TLS", "tcp")], embedded: "tcp", driven: true, costs: false },
];

impl Setting {
    /// As it is shown: NIXL's own thread only takes time from transfers.
    fn described(&self) -> String {
        let variables: Vec<_> =
            self.variables.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let variables = if variables.is_empty() { "UCX default".to_owned() } else { variables.join(" ") };
        format!("{}: {variables}, no progress thread", self.name)
    }
}

/// Name, manner, blocks, block size, and the ratio to NIXL's own API that is asked for.
const SHAPES: [(&str, Manner, u64, u64, f64); 6] = [
    ("4k", Manner::Latency, 1, 4 << 10, 0.95),
    ("1m", Manner::Together, 1, 1 << 20, 0.95),
    ("256m", Manner::Together, 1, 256 << 20, 0.95),
    ("16384x4k", Manner::Together, 16384, 4 << 10, 1.0),
    ("4096x16k", Manner::Together, 4096, 16 << 10, 1.0),
    ("1024x64k", Manner::Together, 1024, 64 << 10, 1.0),
];

const BYTES: u64 = 256 << 20;

#[derive(Deserialize)]
struct Measured {
    rows: Vec<Row>,
    skipped: Vec<Skipped>,
}

pub(super) fn run(options: &Options, progress: &dyn Progress) -> Outcome<Found> {
    if let Ok(name) = std::env::var(SETTING) {
        let setting = SETTINGS.iter().find(|setting| setting.name == name);
        let setting = setting.ok_or_else(|| Failure::usage(format!("no setting is called {name}")))?;
        return Ok(measure(setting, options));
    }
    let labels: Vec<_> = SETTINGS.iter().flat_map(labels).filter(|label| options.wants(label)).collect();
    if options.list {
        return Ok(Found::Labels(labels));
    }
    progress.begins(SETTINGS.len());
    let mut found = Measured { rows: Vec::new(), skipped: Vec::new() };
    for setting in &SETTINGS {
        progress.step(&setting.described());
        if self::labels(setting).iter().any(|label| options.wants(label)) {
            let more = by_itself(setting, options)?;
            found.rows.extend(more.rows);
            found.skipped.extend(more.skipped);
        }
    }
    progress.ends();
    let remarks = SETTINGS.iter().map(|setting| format!("NIXL {}", setting.described())).collect();
    let report = Report::new(found.rows, found.skipped);
    Ok(Found::Figures(Box::new(Figures { report, remarks, failures: Vec::new() })))
}

fn labels(setting: &Setting) -> Vec<String> {
    let shapes = SHAPES
        .iter()
        .flat_map(|(shape, ..)| Op::BOTH.map(|op| format!("{}/{shape}/{}", setting.name, op.name())));
    let costs = ["notify", "idle"].map(|cost| format!("{}/{cost}", setting.name));
    shapes.chain(costs.into_iter().filter(|_| setting.costs)).collect()
}

/// Measures a setting in a process whose environment has it.
fn by_itself(setting: &Setting, options: &Options) -> Outcome<Measured> {
    let failed = |error| Failure::os("a process to measure in", error);
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.args(["--json", "bench", "--against", "nixl"]);
    if options.quick {
        command.arg("--quick");
    }
    if let Some(filter) = &options.filter {
        command.arg(format!("--filter={filter}"));
    }
    if let Some(rounds) = options.repeat {
        command.arg(format!("--repeat={rounds}"));
    }
    let variables: BTreeMap<_, _> = setting.variables.iter().copied().collect();
    let output = command
        .env(SETTING, setting.name)
        .envs(variables)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(failed)?;
    serde_json::from_slice(&output.stdout).map_err(|_| {
        Failure::failed(format!("measuring {} ended without a report: {}", setting.name, output.status))
    })
}

fn measure(setting: &Setting, options: &Options) -> Found {
    let mut found = Measured { rows: Vec::new(), skipped: Vec::new() };
    let mut skip = |name: String, failure: Failure| {
        found.skipped.push(Skipped { name, path: Some("nixl".into()), reason: failure.message });
    };
    match Measuring::prepare(setting, options.pace()) {
        Err(failure) => skip(setting.name.to_owned(), failure),
        Ok(mut measuring) => {
            // Reads before writes: a write leaves other bytes at the owner.
            for op in Op::BOTH {
                for (shape, manner, blocks, block_size, goal) in SHAPES {
                    let label = format!("{}/{shape}/{}", setting.name, op.name());
                    if !options.wants(&label) {
                        continue;
                    }
                    let case = Case {
                        name: format!("{}/{shape}", setting.name),
                        path: measuring.nixl.path,
                        op,
                        manner,
                        blocks,
                        block_size,
                        goal: Some(goal),
                        target: None,
                    };
                    match measuring.rows(&case) {
                        Ok(rows) => found.rows.extend(rows),
                        Err(failure) => skip(label, failure),
                    }
                }
            }
            if setting.costs && options.wants(&format!("{}/notify", setting.name)) {
                match measuring.costs() {
                    Ok(rows) => found.rows.extend(rows),
                    Err(failure) => skip("notify".into(), failure),
                }
            }
        }
    }
    Found::Figures(Box::new(Figures::new(Report::new(found.rows, found.skipped))))
}

/// Everything that takes its turn.
struct Measuring {
    pace: Pace,
    nixl: Bed,
    embedded: Bed,
    api: Peer,
}

/// Who takes a turn.
const NIXL: usize = 0;
const API: usize = 1;
const EMBEDDED: usize = 2;
const LIMIT: usize = 3;

impl Measuring {
    fn prepare(setting: &Setting, pace: Pace) -> Outcome<Measuring> {
        let api = Peer::start(BYTES, false, setting.driven)?;
        let nixl = Bed::prepare(Path::named("nixl")?, BYTES)?;
        let embedded = Bed::prepare(Path::named(setting.embedded)?, BYTES)?;
        Ok(Measuring { pace, nixl, embedded, api })
    }

    fn rows(&mut self, case: &Case) -> Outcome<Vec<Row>> {
        let shape = Shape::of(case)?;
        let embedded = Case { path: self.embedded.path, ..case.clone() };
        self.nixl.verify(case, &shape)?;
        self.embedded.verify(&embedded, &shape)?;
        self.api.prepare(case.op, case.blocks, case.block_size)?;
        let limit = match self.embedded.path.medium() {
            None => Limit::copy(case.op, &self.embedded.near(), &self.embedded.far()?, &shape.pieces, 1)?,
            Some(medium) => Limit::sockets(&mut self.embedded.worker, medium, case.op, case.bytes(), 1)?,
        };
        let mut times: [Vec<f64>; 4] = Default::default();
        let began = Instant::now();
        let count = if case.manner == Manner::Latency { 300 } else { (16 << 20) / case.bytes().min(16 << 20) }
            as usize;
        for round in 0..self.pace.most {
            if round >= self.pace.fewest && began.elapsed() >= self.pace.budget * 2 {
                break;
            }
            // The first one changes, so that none always finds what the same one left behind.
            for turn in 0..times.len() {
                let who = (turn + round) % times.len();
                match who {
                    NIXL => each(count, &mut times[who], || self.nixl.transfer(case, &shape))?,
                    API => times[who].extend(self.api.transfers(count)?),
                    EMBEDDED => each(count, &mut times[who], || self.embedded.transfer(&embedded, &shape))?,
                    _ => each(count, &mut times[who], || limit.run())?,
                }
            }
        }
        let rounds = times[NIXL].len() / count;
        let medians = times.map(|mut times| median(&mut times));
        let shown = |who: usize| match case.manner {
            Manner::Latency => medians[who] * 1e6,
            _ => size::gib_per_second(case.bytes(), medians[who]),
        };
        let unit = if case.manner == Manner::Latency { Unit::Microseconds } else { Unit::Rate };
        let row = |who: usize, path: Path, what: String, other: usize, goal: Option<f64>| Row {
            path: Some(path.name().into()),
            op: Some(case.op.name().into()),
            bytes: case.bytes(),
            blocks: case.blocks,
            block_size: case.block_size,
            rounds,
            ..Row::new(&case.name, unit, shown(who)).against(what, Some(shown(other)), goal)
        };
        let own = self.embedded.path;
        Ok(vec![
            row(NIXL, case.path, "NIXL's Python API".into(), API, case.goal),
            row(NIXL, case.path, format!("limit: {}, one thread", own.against()), LIMIT, None),
            row(EMBEDDED, own, "NIXL's Python API".into(), API, None),
        ])
    }

    /// A message there and one back, and what a process uses while nothing happens.
    fn costs(&mut self) -> Outcome<Vec<Row>> {
        const COUNT: usize = 200;
        const WATCHED: Duration = Duration::from_secs(2);
        // As NIXL is by default.
        let mut api = Peer::start(1 << 20, true, false)?;
        let endpoint = Endpoint::options("bench-notify").nixl(nixl(false)).open()?;
        let region =
            endpoint.register(SharedStorage::new(4096)?, Access::READ).map_err(towline::Error::from)?;
        let mut worker = Worker::start("echo")?;
        worker.ask(&Ask::Lend)?;
        let theirs = costs::one_region(&mut worker, 4096)?;
        let remote = endpoint.import_with(&theirs, &Routing::default().require("nixl")?)?;
        worker.ask(&Ask::Echo { ticket: region.ticket()? })?;
        let (mut ours, mut spinning) = (Vec::new(), Vec::new());
        for _ in 0..self.pace.fewest {
            each(COUNT, &mut ours, || {
                let sent = endpoint.notify(&remote, *b"ping")?;
                endpoint.receive(Duration::from_secs(5))?;
                Ok(sent.wait()?)
            })?;
            spinning.extend(api.notifications(COUNT)?);
        }
        endpoint.notify(&remote, *b"stop")?.wait()?;
        let row = Row {
            path: Some("nixl".into()),
            rounds: self.pace.fewest,
            ..Row::new("notify", Unit::Microseconds, median(&mut ours) * 1e6).against(
                "NIXL with its thread",
                Some(median(&mut spinning) * 1e6),
                Some(1.0),
            )
        };
        // Threads that had work linger.
        std::thread::sleep(Duration::from_millis(1500));
        let mut usage = || -> Outcome<f64> {
            match worker.ask(&Ask::Usage)? {
                Reply::Usage(usage) => Ok(usage.cpu_seconds + Usage::now().cpu_seconds),
                reply => Err(worker.surprise(&reply)),
            }
        };
        let before = usage()?;
        std::thread::sleep(WATCHED);
        let idle = (usage()? - before).max(0.0) / 2.0;
        let theirs = api.idle(WATCHED)? * WATCHED.as_secs_f64();
        let idle = Row {
            path: Some("nixl".into()),
            ..Row::new("idle-cpu-2s", Unit::Seconds, idle).against(
                "NIXL with its thread",
                Some(theirs),
                Some(10.0),
            )
        };
        Ok(vec![row, idle])
    }
}

fn each(count: usize, times: &mut Vec<f64>, mut step: impl FnMut() -> Outcome<()>) -> Outcome<()> {
    for _ in 0..count {
        let start = Instant::now();
        step()?;
        times.push(start.elapsed().as_secs_f64());
    }
    Ok(())
}
