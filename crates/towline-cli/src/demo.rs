//! `towline demo`: two processes move a tensor both ways over every path that the machine has.

use clap::Args;
use serde::Serialize;
use towline::{Contact, PathProperties, Probe};
use towline_lab::outcome::{Exit, Failure, Outcome};
use towline_lab::size;
use towline_lab::worker::{Memory, Op, Region, Worker};

use crate::output::Output;

/// Each transfer is timed this many times, after one that is verified.
const REPEAT: u32 = 3;

#[derive(Args)]
pub(crate) struct Options {
    /// The size of the tensor: bytes, or with K, M, G
    #[arg(long, default_value = "64M", value_parser = size::parse)]
    bytes: u64,
}

#[derive(Serialize)]
struct Report {
    ok: bool,
    bytes: u64,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    path: &'static str,
    op: &'static str,
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gib_per_second: Option<f64>,
    verdict: Verdict,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

#[derive(Serialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    /// Moved, and every byte compared.
    Verified,
    /// Moved wrongly, or not at all.
    Failed,
    /// This machine or this pair of processes does not have the path.
    Skipped,
}

pub(crate) fn run(options: &Options, output: &Output) -> Outcome {
    let mut pair = Pair::start(options.bytes)?;
    output.text(format!(
        "Worker {} (process {}) owns a tensor of {}; worker {} (process {}) reads and writes it.\n",
        pair.owner.name(),
        pair.owner.pid(),
        size::bytes(options.bytes),
        pair.mover.name(),
        pair.mover.pid(),
    ));
    let mut rows = Vec::new();
    for path in towline::paths() {
        for op in Op::BOTH {
            let row = match &path.probe {
                Probe::Works(_) => pair.row(&path, op),
                Probe::Missing { reason, mend } => Row::without_time(
                    path.name,
                    op,
                    options.bytes,
                    Verdict::Skipped,
                    format!("{reason}; {mend}"),
                ),
            };
            rows.push(row);
        }
    }
    let failed = rows.iter().filter(|row| row.verdict == Verdict::Failed).count();
    let verified = rows.iter().filter(|row| row.verdict == Verdict::Verified).count();
    let table: Vec<Vec<String>> = rows.iter().map(Row::cells).collect();
    output.table(&["path", "direction", "bytes", "time", "GiB/s", "verdict"], &table, &[2, 3, 4]);
    let report = Report { ok: failed == 0 && verified > 0, bytes: options.bytes, rows };
    output.document(&report);
    for row in report.rows.iter().filter(|row| row.op == "read") {
        if let Some(reason) = &row.reason {
            output.text(format!("\n{}: {reason}", row.path));
        }
    }
    output.text(match failed {
        0 => format!("\n{verified} transfers, every byte verified."),
        _ => format!("\n{failed} of {} transfers failed.", failed + verified),
    });
    Ok(if report.ok { Exit::Fine } else { Exit::Failed })
}

/// The worker that owns the tensor and the one that moves it.
struct Pair {
    owner: Worker,
    mover: Worker,
    bytes: u64,
    seed: u64,
    /// What the owner has registered so far.
    regions: Vec<(Memory, Region)>,
}

impl Pair {
    fn start(bytes: u64) -> Outcome<Pair> {
        let owner = Worker::start("prefill")?;
        let mover = Worker::start("decode")?;
        Ok(Pair { owner, mover, bytes, seed: 1, regions: Vec::new() })
    }

    /// The owner's tensor in memory of that kind.
    fn region(&mut self, memory: Memory) -> Outcome<Region> {
        if let Some((_, region)) = self.regions.iter().find(|(kind, _)| *kind == memory) {
            return Ok(region.clone());
        }
        let region = self.owner.register(memory, self.bytes, 0)?;
        self.regions.push((memory, region.clone()));
        Ok(region)
    }

    fn row(&mut self, properties: &PathProperties, op: Op) -> Row {
        let path = properties.name;
        match self.transfer(properties, op) {
            Ok((seconds, None)) => Row {
                path,
                op: op.name(),
                bytes: self.bytes,
                seconds: Some(seconds),
                gib_per_second: Some(size::gib_per_second(self.bytes, seconds)),
                verdict: Verdict::Verified,
                reason: None,
            },
            Ok((_, Some(offset))) => Row::without_time(
                path,
                op,
                self.bytes,
                Verdict::Failed,
                format!("the byte at offset {offset} is wrong"),
            ),
            // A path that these two processes do not have is no failure of the path.
            Err(failure) if failure.lacking && !is_here(properties) => {
                Row::without_time(path, op, self.bytes, Verdict::Skipped, failure.message)
            }
            Err(failure) => Row::without_time(path, op, self.bytes, Verdict::Failed, failure.message),
        }
    }

    /// One transfer over that path: how long it took, and the first wrong offset.
    fn transfer(&mut self, properties: &PathProperties, op: Op) -> Outcome<(f64, Option<u64>)> {
        let (path, here) = (properties.name, is_here(properties));
        // Bytes of an earlier transfer must not pass for those of this one.
        self.seed += 2;
        let (seed, bytes) = (self.seed, self.bytes);
        let memory = Memory::served_by(properties);
        let region = if here { self.mover.register(memory, bytes, 0)? } else { self.region(memory)? };
        let owner = if here { &mut self.mover } else { &mut self.owner };
        let before = if op == Op::Read { seed } else { seed + 1 };
        owner.fill(&region, before)?;
        let moved = self.mover.transfer(&region.ticket, path, op, bytes, seed, REPEAT)?;
        if moved.path != path {
            return Err(Failure::failed(format!("the bytes went over {}", moved.path)));
        }
        let owner = if here { &mut self.mover } else { &mut self.owner };
        let wrong = match op {
            Op::Read => moved.wrong,
            Op::Write => owner.verify(&region, seed, bytes)?,
        };
        if here {
            owner.release(&region)?;
        }
        Ok((moved.seconds, wrong))
    }
}

/// Whether who moves the tensor has to own it, since there is no other process on that path.
fn is_here(path: &PathProperties) -> bool {
    path.contact == Contact::Nothing
}

impl Row {
    fn without_time(path: &'static str, op: Op, bytes: u64, verdict: Verdict, reason: String) -> Row {
        Row { path, op: op.name(), bytes, seconds: None, gib_per_second: None, verdict, reason: Some(reason) }
    }

    fn cells(&self) -> Vec<String> {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        vec![
            self.path.to_owned(),
            self.op.to_owned(),
            size::bytes(self.bytes),
            or_dash(self.seconds.map(size::seconds)),
            or_dash(self.gib_per_second.map(|rate| format!("{rate:.2}"))),
            match self.verdict {
                Verdict::Verified => "verified",
                Verdict::Failed => "FAILED",
                Verdict::Skipped => "skipped",
            }
            .to_owned(),
        ]
    }
}
