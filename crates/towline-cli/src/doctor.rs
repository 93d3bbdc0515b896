//! `towline doctor`: what works here, what does not, why, and how to mend it.

mod engines;
mod gpus;
mod network;
mod paths;
mod system;

use clap::Args;
use serde::Serialize;
use towline_lab::machine::Machine;
use towline_lab::outcome::{Exit, Outcome};

use crate::output::Output;

#[derive(Args)]
pub(crate) struct Options {}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
pub(crate) struct Check {
    group: &'static str,
    name: String,
    status: Status,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    mend: Option<String>,
}

/// What to think of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Status {
    /// It works.
    Ok,
    /// It works, and could be better.
    Note,
    /// It does not work.
    Missing,
    /// A fact.
    Fact,
}

impl Check {
    fn new(group: &'static str, name: impl Into<String>, status: Status, found: impl Into<String>) -> Check {
        Check { group, name: name.into(), status, found: found.into(), mend: None }
    }

    fn fact(group: &'static str, name: impl Into<String>, found: impl Into<String>) -> Check {
        Check::new(group, name, Status::Fact, found)
    }

    fn mend(mut self, mend: impl Into<String>) -> Check {
        let mend = mend.into();
        self.mend = Some(mend).filter(|mend| !mend.is_empty());
        self
    }
}

#[derive(Serialize)]
struct Report {
    /// Whether at least one path between processes works.
    ok: bool,
    /// The paths over which another process was reached just now.
    usable: Vec<&'static str>,
    machine: Machine,
    checks: Vec<Check>,
}

pub(crate) fn run(_options: &Options, output: &Output) -> Outcome {
    let mut checks = Vec::new();
    let usable = paths::check(&mut checks);
    checks.extend(system::check());
    checks.extend(network::check());
    checks.extend(gpus::check());
    checks.extend(engines::check());
    let report = Report { ok: !usable.is_empty(), usable, machine: Machine::here(), checks };
    output.document(&report);
    output.text(report.text());
    Ok(if report.ok { Exit::Fine } else { Exit::Unavailable })
}

impl Report {
    fn text(&self) -> String {
        let width = self.checks.iter().map(|check| check.name.chars().count()).max().unwrap_or(0);
        let mut lines = Vec::new();
        let mut group = "";
        for check in &self.checks {
            if check.group != group {
                if !group.is_empty() {
                    lines.push(String::new());
                }
                lines.push(check.group.to_owned());
                group = check.group;
            }
            let mark = match check.status {
                Status::Ok => "ok",
                Status::Note => "!",
                Status::Missing => "no",
                Status::Fact => "",
            };
            lines.push(format!("  {mark:<2} {:<width$}  {}", check.name, check.found));
            if let Some(mend) = &check.mend {
                lines.push(format!("     {:<width$}  -> {mend}", ""));
            }
        }
        lines.push(String::new());
        lines.push(match self.usable.as_slice() {
            [] => "No path between processes works here.".to_owned(),
            [one] => format!("Another process was reached over {one}."),
            all => format!("Another process was reached over {}.", all.join(", ")),
        });
        lines.join("\n")
    }
}
