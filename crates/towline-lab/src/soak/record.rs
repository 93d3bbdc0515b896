//! What the campaigns have found so far, reported while they run and written when they end, however that is.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};

use super::report::{CampaignReport, FailureReport, LaneReport, Report, replay};
use super::{Audience, page};
use crate::campaign::{Failed, Watcher};
use crate::outcome::{Exit, Failure, Outcome};

pub(super) struct Record {
    audience: Arc<dyn Audience>,
    started: Instant,
    html: PathBuf,
    markdown: Option<PathBuf>,
    state: Mutex<State>,
}

struct State {
    report: Report,
    /// Of the campaign that runs: by lane the rounds that are done, and of how many.
    lanes: HashMap<&'static str, (u32, u32)>,
}

impl Record {
    pub(super) fn new(
        audience: Arc<dyn Audience>,
        report: Report,
        html: PathBuf,
        markdown: Option<PathBuf>,
    ) -> Record {
        let state = Mutex::new(State { report, lanes: HashMap::new() });
        Record { audience, started: Instant::now(), html, markdown, state }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn say(&self, text: &str) {
        self.audience.says(text);
    }

    pub(super) fn begins(&self, campaign: &'static str) {
        self.state().lanes.clear();
        self.audience.begins(campaign);
    }

    pub(super) fn ended(&self, campaign: CampaignReport) {
        self.say(&campaign.verdict());
        let reported: Vec<_> = {
            let state = self.state();
            let before = state.report.campaigns.iter().filter(|one| one.name == campaign.name);
            before.flat_map(|one| &one.lanes).map(|lane| (lane.lane, lane.failures.len())).collect()
        };
        for lane in &campaign.lanes {
            let reported = reported.iter().find(|one| one.0 == lane.lane).map_or(0, |one| one.1);
            for failure in lane.failures.iter().skip(reported) {
                self.say(&format!(
                    "  {} over {}, round {}: {}\n  again: {}",
                    campaign.name, lane.lane, failure.round, failure.message, failure.replay
                ));
            }
        }
        self.state().report.add(campaign);
    }

    /// Writes the report; the exit code says whether all went well.
    pub(super) fn finish(&self) -> Outcome {
        self.audience.ends();
        let mut report = {
            let mut state = self.state();
            state.report.seconds = self.started.elapsed().as_secs_f64();
            state.report.clone()
        };
        let run = report.campaigns.iter().filter(|campaign| campaign.rounds > 0).count();
        // What did not run has shown nothing.
        report.ok &= run > 0;
        std::fs::write(&self.html, page::html(&report))
            .map_err(|error| Failure::os(self.html.display(), error))?;
        if let Some(path) = &self.markdown {
            std::fs::write(path, report.markdown()).map_err(|error| Failure::os(path.display(), error))?;
        }
        for figure in &report.figures {
            let met = if figure.met { "met" } else { "NOT met" };
            self.say(&format!("{}: {} ({}, {met})", figure.name, figure.value, figure.target));
        }
        let failed = report.campaigns.iter().filter(|campaign| !campaign.ok).count();
        let rounds: u32 = report.campaigns.iter().map(|campaign| campaign.rounds).sum();
        self.say(&format!(
            "{run} campaigns, {rounds} rounds in {:.0} s, {failed} failed; report in {}",
            report.seconds,
            self.html.display()
        ));
        self.audience.document(&report);
        if run == 0 {
            self.say("no campaign could run here");
            return Ok(Exit::Unavailable);
        }
        Ok(if report.ok { Exit::Fine } else { Exit::Failed })
    }
}

impl Watcher for Record {
    fn round(&self, campaign: &'static str, lane: &'static str, done: u32, of: u32) {
        let (done, of) = {
            let mut state = self.state();
            state.lanes.insert(lane, (done, of));
            state.lanes.values().fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1))
        };
        self.audience.is_at(campaign, done, of);
    }

    fn hangs(&self, campaign: &'static str, lane: &'static str, failed: &Failed) {
        let seed = {
            let mut state = self.state();
            let seed = state.report.seed;
            let failure = FailureReport {
                round: failed.round,
                message: failed.message.clone(),
                replay: replay(campaign, lane, failed.round, seed),
            };
            state.report.add(CampaignReport {
                name: campaign,
                summary: "a round did not end",
                ok: false,
                rounds: failed.round + 1,
                passed: failed.round,
                skipped: Vec::new(),
                seconds: 0.0,
                lanes: vec![LaneReport {
                    lane,
                    asked: failed.round + 1,
                    rounds: failed.round + 1,
                    passed: failed.round,
                    skipped: None,
                    seconds: 0.0,
                    failures: vec![failure],
                    samples: Vec::new(),
                    counts: std::collections::BTreeMap::new(),
                }],
            });
            seed
        };
        self.say(&format!(
            "{campaign:<11} FAILED: a round over {lane} does not end\n{}  again: {}",
            failed.message,
            replay(campaign, lane, failed.round, seed)
        ));
        let _ = self.finish();
    }
}
