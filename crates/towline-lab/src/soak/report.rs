//! What a run has found, as a document.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;

use super::figures::{self, Figure};
use crate::campaign::{Campaign, LaneResult, Plan};
use crate::machine::Machine;
use crate::size;

/// A whole run: the document of `towline soak --json`.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    pub(super) ok: bool,
    pub(super) seed: u64,
    pub(super) commit: String,
    pub(super) date: String,
    /// How the program was called.
    pub(super) command: String,
    pub(super) seconds: f64,
    pub(super) campaigns: Vec<CampaignReport>,
    pub(super) figures: Vec<Figure>,
    pub(super) machine: Machine,
}

/// One campaign.
#[derive(Debug, Clone, Serialize)]
pub(super) struct CampaignReport {
    pub(super) name: &'static str,
    pub(super) summary: &'static str,
    pub(super) ok: bool,
    pub(super) rounds: u32,
    pub(super) passed: u32,
    pub(super) skipped: Vec<String>,
    pub(super) seconds: f64,
    pub(super) lanes: Vec<LaneReport>,
}

/// One lane of a campaign.
#[derive(Debug, Clone, Serialize)]
pub(super) struct LaneReport {
    pub(super) lane: &'static str,
    pub(super) asked: u32,
    pub(super) rounds: u32,
    pub(super) passed: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) skipped: Option<String>,
    pub(super) seconds: f64,
    pub(super) failures: Vec<FailureReport>,
    pub(super) samples: Vec<Sample>,
    pub(super) counts: BTreeMap<&'static str, u64>,
}

/// A round that failed, and how to see it again.
#[derive(Debug, Clone, Serialize)]
pub(super) struct FailureReport {
    pub(super) round: u32,
    pub(super) message: String,
    pub(super) replay: String,
}

/// What was measured over and over.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Sample {
    pub(super) name: &'static str,
    pub(super) count: usize,
    pub(super) least: f64,
    pub(super) p50: f64,
    pub(super) p99: f64,
    pub(super) most: f64,
    /// Sorted; for the plots only.
    #[serde(skip)]
    pub(super) values: Vec<f64>,
}

impl Sample {
    pub(super) fn new(name: &'static str, mut values: Vec<f64>) -> Sample {
        values.sort_by(f64::total_cmp);
        let at = |part: f64| values.get(((values.len().max(1) - 1) as f64 * part).round() as usize).copied();
        let (least, p50, p99, most) = (at(0.0), at(0.5), at(0.99), at(1.0));
        let or = |value: Option<f64>| value.unwrap_or(0.0);
        Sample {
            name,
            count: values.len(),
            least: or(least),
            p50: or(p50),
            p99: or(p99),
            most: or(most),
            values,
        }
    }

    /// Whether it is a time: the others name their unit.
    pub(super) fn is_time(&self) -> bool {
        !self.name.contains("MiB") && !self.name.contains("share")
    }

    pub(super) fn show(&self, value: f64) -> String {
        if self.is_time() { time(value) } else { format!("{value:.2}") }
    }
}

/// A time as people read it.
pub(super) fn time(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.0} µs", s * 1e6),
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

pub(super) fn replay(campaign: &str, lane: &str, round: u32, seed: u64) -> String {
    format!("towline soak {campaign} --lane {lane} --seed {seed} --first {round} --rounds 1")
}

impl CampaignReport {
    pub(super) fn new(
        campaign: &Campaign,
        lanes: Vec<LaneResult>,
        took: Duration,
        plan: &Plan,
    ) -> CampaignReport {
        let skipped = lanes
            .iter()
            .filter_map(|lane| lane.skipped.as_ref().map(|reason| format!("{}: {reason}", lane.lane)))
            .collect();
        let lanes: Vec<LaneReport> = lanes
            .into_iter()
            .map(|lane| LaneReport {
                lane: lane.lane,
                asked: lane.asked,
                rounds: lane.rounds,
                passed: lane.passed,
                skipped: lane.skipped,
                seconds: lane.took.as_secs_f64(),
                failures: lane
                    .failures
                    .into_iter()
                    .map(|failed| FailureReport {
                        replay: replay(campaign.name, lane.lane, failed.round, plan.seed),
                        round: failed.round,
                        message: failed.message,
                    })
                    .collect(),
                samples: lane
                    .tally
                    .samples
                    .into_iter()
                    .map(|(name, values)| Sample::new(name, values))
                    .collect(),
                counts: lane.tally.counts,
            })
            .collect();
        CampaignReport {
            name: campaign.name,
            summary: campaign.summary,
            ok: lanes.iter().all(|lane| lane.failures.is_empty()),
            rounds: lanes.iter().map(|lane| lane.rounds).sum(),
            passed: lanes.iter().map(|lane| lane.passed).sum(),
            skipped,
            seconds: took.as_secs_f64(),
            lanes,
        }
    }

    /// One line.
    pub(super) fn verdict(&self) -> String {
        let state = match (self.ok, self.rounds) {
            (false, _) => "FAILED",
            (true, 0) => "skipped",
            (true, _) => "passed",
        };
        let mut line = format!(
            "{:<11} {state:<7} {:>6} of {:<6} rounds in {:>6.1} s  ({})",
            self.name,
            self.passed,
            self.rounds,
            self.seconds,
            self.rounds_by_lane()
        );
        if let Some(most) = self.headline() {
            let _ = write!(line, "  {most}");
        }
        for reason in &self.skipped {
            let _ = write!(line, "\n{:<11} skipped {reason}", "");
        }
        line
    }

    fn rounds_by_lane(&self) -> String {
        let of = |lane: &LaneReport| match (&lane.skipped, lane.rounds < lane.asked) {
            (None, true) => format!(" of {}", lane.asked),
            _ => String::new(),
        };
        let lanes: Vec<String> =
            self.lanes.iter().map(|lane| format!("{} {}{}", lane.lane, lane.rounds, of(lane))).collect();
        lanes.join(", ")
    }

    /// The figure that says most.
    fn headline(&self) -> Option<String> {
        let name = self.lanes.iter().flat_map(|lane| &lane.samples).map(|sample| sample.name).min_by_key(
            |name| {
                ["detected", "write ended", "share kept", "MiB/s"]
                    .iter()
                    .position(|one| one == name)
                    .unwrap_or(9)
            },
        )?;
        let all: Vec<f64> = self
            .lanes
            .iter()
            .flat_map(|lane| &lane.samples)
            .filter(|sample| sample.name == name)
            .flat_map(|sample| sample.values.iter().copied())
            .collect();
        let sample = Sample::new(name, all);
        Some(format!(
            "{name}: p50 {}, p99 {}, most {}",
            sample.show(sample.p50),
            sample.show(sample.p99),
            sample.show(sample.most)
        ))
    }
}

impl Report {
    pub(super) fn begin(plan: &Plan) -> Report {
        Report {
            ok: true,
            seed: plan.seed,
            commit: commit(),
            date: date(SystemTime::now()),
            command: command(),
            seconds: 0.0,
            campaigns: Vec::new(),
            figures: Vec::new(),
            machine: Machine::here(),
        }
    }

    /// Takes what a campaign has shown; it replaces what that had shown after its turn before.
    pub(super) fn add(&mut self, campaign: CampaignReport) {
        self.ok &= campaign.ok;
        match self.campaigns.iter_mut().find(|one| one.name == campaign.name) {
            Some(before) => *before = campaign,
            None => self.campaigns.push(campaign),
        }
        self.figures = figures::of(&self.campaigns);
    }

    /// The same as a page of Markdown.
    pub(super) fn markdown(&self) -> String {
        let mut text = String::new();
        let Machine { cpu, cores, memory_bytes, kernel, build, version, .. } = &self.machine;
        let _ = writeln!(text, "# What the campaigns have shown\n");
        let _ = writeln!(
            text,
            "Written by `{}` (version {version}, {build} build) at commit `{}`, {}, with seed {}, in {:.0} s, on {cores} cores of {cpu} with {} and {kernel}. \
             Times are what this machine gave on that day; where the time was limited, there are as many rounds as fitted into it, of those that there are by that path.\n",
            self.command,
            self.commit,
            self.date,
            self.seed,
            self.seconds,
            size::bytes(*memory_bytes),
        );
        let _ = writeln!(
            text,
            "| campaign | verdict | rounds | by path | what must hold |\n| --- | --- | --- | --- | --- |"
        );
        for one in &self.campaigns {
            let verdict = match (one.ok, one.rounds) {
                (false, _) => "**failed**".to_owned(),
                (true, 0) => format!("skipped ({})", one.skipped.join("; ")),
                (true, _) => "passed".to_owned(),
            };
            let _ = writeln!(
                text,
                "| {} | {verdict} | {} of {} | {} | {} |",
                one.name,
                one.passed,
                one.rounds,
                one.rounds_by_lane(),
                one.summary
            );
        }
        if !self.figures.is_empty() {
            let _ = writeln!(
                text,
                "\n## Figures\n\n| figure | measured | target | met |\n| --- | --- | --- | --- |"
            );
            for figure in &self.figures {
                let met = if figure.met { "yes" } else { "no" };
                let _ = writeln!(text, "| {} | {} | {} | {met} |", figure.name, figure.value, figure.target);
            }
        }
        let _ = writeln!(
            text,
            "\n## By path\n\n| campaign | path | rounds | measured | p50 | p99 | most |\n| --- | --- | --- | --- | --- | --- | --- |"
        );
        for one in &self.campaigns {
            for lane in &one.lanes {
                for sample in &lane.samples {
                    let _ = writeln!(
                        text,
                        "| {} | {} | {} | {} ({}) | {} | {} | {} |",
                        one.name,
                        lane.lane,
                        lane.rounds,
                        sample.name,
                        sample.count,
                        sample.show(sample.p50),
                        sample.show(sample.p99),
                        sample.show(sample.most)
                    );
                }
                for (name, count) in &lane.counts {
                    let _ = writeln!(
                        text,
                        "| {} | {} | {} | {name} | {count} | | |",
                        one.name, lane.lane, lane.rounds
                    );
                }
            }
        }
        for one in &self.campaigns {
            for lane in &one.lanes {
                for failure in &lane.failures {
                    let _ = writeln!(
                        text,
                        "\n**{} over {}, round {}**: {}\n\n    {}",
                        one.name,
                        lane.lane,
                        failure.round,
                        failure.message.lines().next().unwrap_or(""),
                        failure.replay
                    );
                }
            }
        }
        text
    }
}

/// How this program was called.
fn command() -> String {
    let arguments = std::env::args().skip(1);
    ["towline".to_owned()].into_iter().chain(arguments).collect::<Vec<_>>().join(" ")
}

/// The commit of the repository that it is run in, where there is one, and whether that was changed since.
fn commit() -> String {
    let said =
        Command::new("git").args(["describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]).output();
    match said {
        Ok(said) if said.status.success() => String::from_utf8_lossy(&said.stdout).trim().to_owned(),
        _ => "unknown".to_owned(),
    }
}

/// The day and minute in UTC.
fn date(now: SystemTime) -> String {
    let seconds = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days from civil, the other way round: eras of 400 years that begin in March.
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02} {:02}:{:02} UTC", rest / 3600, rest % 3600 / 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let at = |seconds| date(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01 00:00 UTC");
        assert_eq!(at(951_782_400), "2000-02-29 00:00 UTC");
        assert_eq!(at(1_794_735_000), "2026-11-15 09:30 UTC");
        assert_eq!(at(4_107_542_399), "2100-02-28 23:59 UTC");
    }

    #[test]
    fn a_sample_of_nothing_and_of_one_can_be_shown() {
        assert_eq!(Sample::new("detected", Vec::new()).p99, 0.0);
        let one = Sample::new("detected", vec![0.25]);
        assert_eq!((one.p50, one.p99, one.most), (0.25, 0.25, 0.25));
        assert_eq!(one.show(one.p50), "250.0 ms");
    }
}
