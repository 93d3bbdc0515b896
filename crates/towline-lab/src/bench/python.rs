//! The Python figures: the package measures itself, and asks here for the same transfers in Rust, in turns.

mod reference;

use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde::Deserialize;
use serde_json::Value;

use self::reference::{Query, Reference, Reply};
use super::report::{Report, Row, Skipped};
use super::{Figures, Found, Options, Progress};
use crate::interpreter;
use crate::outcome::{Failure, Outcome};

const MODULE: &str = "towline.bench";

/// What the package says, one line each.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Said {
    /// What is measured now.
    Step(String),
    /// What it found: the last line.
    Report(Measured),
    #[serde(untagged)]
    Query(Query),
}

#[derive(Deserialize)]
struct Measured {
    rows: Vec<Row>,
    skipped: Vec<NotMeasured>,
    python: Value,
}

#[derive(Deserialize)]
struct NotMeasured {
    #[serde(flatten)]
    row: Skipped,
    failed: bool,
}

pub(super) fn run(options: &Options, progress: &dyn Progress) -> Outcome<Found> {
    let python = options.python_exe.clone().unwrap_or_else(interpreter::of_the_project);
    check(&python)?;
    let names = rows(&python, options)?;
    if options.list {
        return Ok(Found::Labels(names));
    }
    progress.begins(names.len());
    let mut package = Package::start(&python, options)?;
    let found = package.measure(progress);
    progress.ends();
    let found = found?;
    let failures: Vec<_> = found
        .skipped
        .iter()
        .filter(|one| one.failed)
        .map(|one| format!("{}: {}", one.row.name, one.row.reason))
        .collect();
    let skipped = found.skipped.into_iter().map(|one| one.row).collect();
    let mut report = Report::new(found.rows, skipped);
    report.python = Some(found.python.clone());
    let fact = |name: &str| found.python.get(name).and_then(Value::as_str).unwrap_or("unknown").to_owned();
    let remark = format!(
        "{} {}, {} build of the package; Rust figures by {}.",
        fact("implementation"),
        fact("python"),
        fact("build"),
        fact("reference")
    );
    Ok(Found::Figures(Box::new(Figures { report, remarks: vec![remark], failures })))
}

/// Fails where the interpreter is not there or has not got the package.
fn check(python: &Path) -> Outcome<()> {
    let probe = Command::new(python)
        .args(["-c", &format!("import {MODULE}")])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| {
            Failure::os(
                format!("{} cannot be run (name another interpreter with --python-exe)", python.display()),
                error,
            )
        })?;
    if probe.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&probe.stderr);
    let why = said.lines().last().unwrap_or("it says nothing");
    Err(Failure::lacking(format!(
        "{} has no towline to measure ({why}): `make python` builds the package into .venv, and --python-exe names \
         another interpreter",
        python.display()
    )))
}

/// The names of the rows that the options ask for.
fn rows(python: &Path, options: &Options) -> Outcome<Vec<String>> {
    let listed = module(python, options)
        .arg("--list")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| Failure::os(python.display(), error))?;
    if !listed.status.success() {
        return Err(Failure::usage(
            "no row of the Python package has such a label; towline bench --python --list shows them all",
        ));
    }
    Ok(String::from_utf8_lossy(&listed.stdout).lines().map(str::to_owned).collect())
}

fn module(python: &Path, options: &Options) -> Command {
    let mut command = Command::new(python);
    command.args(["-m", MODULE]);
    if options.quick {
        command.arg("--quick");
    }
    if let Some(filter) = &options.filter {
        command.arg(format!("--filter={filter}"));
    }
    if let Some(rounds) = options.repeat {
        command.arg(format!("--repeat={rounds}"));
    }
    command
}

/// The package, measuring itself in a process; that is ended with this value.
struct Package {
    child: Child,
    replies: ChildStdin,
    queries: Lines<BufReader<ChildStdout>>,
}

impl Package {
    fn start(python: &Path, options: &Options) -> Outcome<Package> {
        let failed = |error| Failure::os(python.display(), error);
        let mut child = module(python, options)
            .arg("--rust-on-stdin")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let (Some(replies), Some(queries)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::failed("the interpreter has no pipes"));
        };
        Ok(Package { child, replies, queries: BufReader::new(queries).lines() })
    }

    /// Answers its queries until it has found everything.
    fn measure(&mut self, progress: &dyn Progress) -> Outcome<Measured> {
        let mut reference = Reference::open()?;
        loop {
            let line = match self.queries.next() {
                Some(line) => line.map_err(|error| Failure::os("the Python package", error))?,
                None => return Err(self.gone()),
            };
            let said = serde_json::from_str(&line).map_err(|error| {
                Failure::failed(format!("the Python package says what this command does not know: {error}"))
            })?;
            match said {
                Said::Step(label) => progress.step(&label),
                Said::Report(found) => return Ok(found),
                Said::Query(query) => {
                    let reply = reference.reply(query).unwrap_or_else(|why| Reply::Error(why.message));
                    let line =
                        serde_json::to_string(&reply).map_err(|error| Failure::failed(error.to_string()))?;
                    if writeln!(self.replies, "{line}").and_then(|()| self.replies.flush()).is_err() {
                        return Err(self.gone());
                    }
                }
            }
        }
    }

    fn gone(&mut self) -> Failure {
        match self.child.wait() {
            Ok(status) => Failure::failed(format!("the Python package has ended without a report: {status}")),
            Err(error) => Failure::os("the Python package", error),
        }
    }
}

impl Drop for Package {
    fn drop(&mut self) {
        // One that has ended by itself is no longer there to be ended, and that is all that these can say.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;

    #[test]
    fn what_the_package_says_is_understood() {
        let said = |text: &str| serde_json::from_str::<Said>(text).unwrap();
        assert!(matches!(said(r#"{"step": "py-64m"}"#), Said::Step(label) if label == "py-64m"));
        let query = said(r#"{"transfers": {"prepared": 3, "count": 7}}"#);
        let Said::Query(query) = query else { panic!("a query is something else") };
        assert!(matches!(query, Query::Transfers { prepared: 3, count: 7 }));
        let report = said(
            r#"{"report": {"rows": [{"name": "py-64m", "unit": "GiB/s", "ours": 3.0, "path": "mapped", "op": "read",
                "bytes": 1, "blocks": 1, "block_size": 1, "threads": null, "streams": null, "limit": 4.0, "target": null,
                "goal": 0.9, "p99": null, "rounds": 9, "against": "Rust", "ratio": 0.75, "met": false}],
                "skipped": [{"name": "py-4k-nixl", "path": null, "reason": "not installed", "failed": false}],
                "python": {"build": "release"}}}"#,
        );
        let Said::Report(found) = report else { panic!("a report is something else") };
        assert_eq!((found.rows.len(), found.skipped.len(), found.skipped[0].failed), (1, 1, false));
        assert_eq!(found.rows[0].met, Some(false));
    }
}
