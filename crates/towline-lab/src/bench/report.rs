//! What a run found, as a table and as JSON.

use std::borrow::Cow;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::machine::{Machine, Processors};
use crate::size;

/// What a run has measured: the document of `towline bench --json`.
#[derive(Debug, Serialize)]
pub struct Report {
    pub(super) rows: Vec<Row>,
    pub(super) skipped: Vec<Skipped>,
    machine: Machine,
    /// The share of the processors' time that the host gave to others meanwhile.
    stolen: Option<f64>,
    /// The interpreter and the package, where they were measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) python: Option<Value>,
}

/// What the processors had done when the run began.
static BEGAN: OnceLock<Option<Processors>> = OnceLock::new();

/// A run begins.
pub(super) fn begin() {
    BEGAN.get_or_init(Processors::now);
}

/// From this share on it is said.
const MUCH: f64 = 0.01;

/// One measured row. The help of `towline bench` says what the fields mean.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) path: Option<Cow<'static, str>>,
    pub(super) op: Option<Cow<'static, str>>,
    pub(super) bytes: u64,
    pub(super) blocks: u64,
    pub(super) block_size: u64,
    pub(super) threads: Option<usize>,
    pub(super) streams: Option<usize>,
    /// How many ranks took part, where a group did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) ranks: Option<usize>,
    pub(super) unit: Unit,
    pub(super) ours: f64,
    pub(super) limit: Option<f64>,
    pub(super) target: Option<f64>,
    pub(super) ratio: Option<f64>,
    pub(super) goal: Option<f64>,
    pub(super) met: Option<bool>,
    pub(super) p99: Option<f64>,
    pub(super) rounds: usize,
    pub(super) against: Cow<'static, str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Unit {
    #[serde(rename = "GiB/s")]
    Rate,
    #[serde(rename = "us")]
    Microseconds,
    #[serde(rename = "ms")]
    Milliseconds,
    #[serde(rename = "s")]
    Seconds,
    #[serde(rename = "bytes")]
    Bytes,
    #[serde(rename = "count")]
    Count,
}

/// A row that could not be measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Skipped {
    pub(super) name: String,
    pub(super) path: Option<Cow<'static, str>>,
    pub(super) reason: String,
}

impl Row {
    /// A row of that name and value; the rest is filled in by who knows it.
    pub(super) fn new(name: impl Into<String>, unit: Unit, ours: f64) -> Row {
        Row {
            name: name.into(),
            path: None,
            op: None,
            bytes: 0,
            blocks: 0,
            block_size: 0,
            threads: None,
            streams: None,
            ranks: None,
            unit,
            ours,
            limit: None,
            target: None,
            ratio: None,
            goal: None,
            met: None,
            p99: None,
            rounds: 1,
            against: Cow::Borrowed(""),
        }
    }

    /// Sets what ours is compared with, the ratio that is asked for, and how near it is.
    pub(super) fn against(
        mut self,
        what: impl Into<Cow<'static, str>>,
        limit: Option<f64>,
        goal: Option<f64>,
    ) -> Row {
        self.against = what.into();
        self.limit = limit;
        self.goal = goal;
        self.judged()
    }

    /// Sets the value that is asked for.
    pub(super) fn target(mut self, target: Option<f64>) -> Row {
        self.target = target;
        self.judged()
    }

    fn judged(mut self) -> Row {
        let near = |limit: f64| match self.unit {
            Unit::Rate => self.ours / limit,
            _ if self.ours == 0.0 => 1.0,
            _ => limit / self.ours,
        };
        self.ratio = self.limit.or(self.target).map(near);
        let by_goal = self.goal.zip(self.ratio).map(|(goal, ratio)| ratio >= goal);
        let by_target = self.target.map(|target| near(target) >= 1.0);
        self.met = match (by_goal, by_target) {
            (Some(goal), Some(target)) => Some(goal && target),
            (one, other) => one.or(other),
        };
        self
    }

    fn is_of_a_gpu(&self) -> bool {
        self.name.starts_with("gpu-")
    }

    fn cells(&self, names_limits: bool) -> Vec<String> {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let asked = match (self.goal, self.target) {
            (Some(goal), _) => format!("ratio {goal:.2}"),
            (None, Some(target)) => self.unit.show(target),
            (None, None) => String::new(),
        };
        let workers = match (self.ranks, self.streams, self.threads) {
            (Some(ranks), ..) => format!("{ranks} ranks"),
            (_, Some(1), _) => "1 stream".to_owned(),
            (_, Some(streams), _) => format!("{streams} streams"),
            (_, None, Some(threads)) => threads.to_string(),
            (_, None, None) => "-".to_owned(),
        };
        let mut cells = vec![
            self.name.clone(),
            or_dash(self.path.as_deref().map(str::to_owned)),
            or_dash(self.op.as_deref().map(str::to_owned)),
            workers,
            self.unit.show(self.ours),
            or_dash(self.limit.map(|limit| self.unit.show(limit))),
            or_dash(self.ratio.map(|ratio| format!("{ratio:.2}"))),
            asked,
            match self.met {
                Some(true) => "met",
                Some(false) => "NOT MET",
                None => "",
            }
            .to_owned(),
        ];
        if names_limits {
            cells.push(self.against.clone().into_owned());
        }
        cells
    }
}

impl Unit {
    fn show(self, value: f64) -> String {
        match self {
            Unit::Rate => format!("{value:.2} GiB/s"),
            Unit::Microseconds => format!("{value:.2} µs"),
            Unit::Milliseconds => format!("{value:.3} ms"),
            Unit::Seconds => format!("{value:.4} s"),
            Unit::Bytes => format!("{value:.0} B"),
            Unit::Count => format!("{value:.0}"),
        }
    }
}

impl Report {
    pub(super) fn new(rows: Vec<Row>, skipped: Vec<Skipped>) -> Report {
        let began = BEGAN.get().copied().flatten();
        let stolen = began.zip(Processors::now()).and_then(|(began, now)| now.stolen_since(began));
        Report { rows, skipped, machine: Machine::here(), stolen, python: None }
    }

    /// The rows as a table.
    pub fn table(&self) -> Table {
        // Rows of a group and those of GPUs have different limits, one beside the other.
        let names_limits = self
            .rows
            .iter()
            .any(|row| row.ranks.is_some() || row.against.contains("NIXL") || row.is_of_a_gpu());
        let rows: Vec<_> = self.rows.iter().map(|row| row.cells(names_limits)).collect();
        let mut header = vec!["shape", "path", "op", "threads", "ours", "limit", "ratio", "asked", ""];
        if names_limits {
            header.push("limit is");
        }
        Table { header, rows, right: &[3, 4, 5, 6, 7] }
    }

    /// What is said below the table: what was skipped, how many figures are met, and what they were measured on.
    pub fn remarks(&self) -> Vec<String> {
        let mut remarks = Vec::new();
        for skipped in &self.skipped {
            let label =
                skipped.path.as_ref().map_or(skipped.name.clone(), |path| format!("{path}/{}", skipped.name));
            remarks.push(format!("skipped {label}: {}", skipped.reason));
        }
        let judged: Vec<_> = self.rows.iter().filter_map(|row| row.met).collect();
        let met = judged.iter().filter(|met| **met).count();
        let machine = &self.machine;
        remarks.push(format!(
            "\n{met} of {} figures asked for are met. {}, {} cores, {}, {}, {} build. Ratio: ours/limit for rates, \
             limit/ours for times; 1.0 is the limit.",
            judged.len(),
            machine.cpu,
            machine.cores,
            size::bytes(machine.memory_bytes),
            machine.kernel,
            machine.build,
        ));
        if let Some(stolen) = self.stolen.filter(|stolen| *stolen >= MUCH) {
            let percent = 100.0 * stolen;
            remarks.push(format!(
                "The host gave {percent:.0}% of this machine's processor time to others meanwhile: times are longer for it."
            ));
        }
        remarks
    }
}

/// A table of text.
#[derive(Debug)]
pub struct Table {
    /// What stands above the columns.
    pub header: Vec<&'static str>,
    /// The cells of each row.
    pub rows: Vec<Vec<String>>,
    /// The columns whose cells stand at the right.
    pub right: &'static [usize],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_nearness_to_the_limit_for_rates_and_for_times() {
        let rate = Row::new("a", Unit::Rate, 9.0).against("memcpy", Some(10.0), Some(0.85));
        assert_eq!((rate.ratio, rate.met), (Some(0.9), Some(true)));
        let time = Row::new("b", Unit::Microseconds, 4.0).against("eventfd", Some(1.0), Some(0.3));
        assert_eq!((time.ratio, time.met), (Some(0.25), Some(false)));
        let cost = Row::new("c", Unit::Milliseconds, 5.0).target(Some(10.0));
        assert_eq!((cost.ratio, cost.met), (Some(2.0), Some(true)));
        let free = Row::new("d", Unit::Seconds, 0.0).target(Some(0.0));
        assert_eq!((free.ratio, free.met), (Some(1.0), Some(true)));
        let both =
            Row::new("e", Unit::Microseconds, 0.5).target(Some(1.0)).against("memcpy", Some(0.1), None);
        assert_eq!((both.ratio, both.met), (Some(0.2), Some(true)));
    }
}
