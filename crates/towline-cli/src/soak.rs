//! `towline soak`: the campaigns that show what is promised under faults, for as long as one likes.

mod figures;
mod page;
mod progress;
mod ranks;
mod report;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use towline_testkit::process::become_worker_by;
use towline_testkit::soak::{self, CAMPAIGNS, Campaign, LANES, Plan, SELF_CHECK};

use self::progress::Progress;
use self::report::{CampaignReport, Report};
use crate::outcome::{Exit, Failure, Outcome};
use crate::output::Output;

pub(crate) const HELP: &str = "\
Every campaign starts real processes and treats them badly at random moments, over every path that the machine has; every
destination word is compared with what it must be. A round's choices come from the seed, the campaign, the path and the
round's number alone, so the command that is printed for a failed round runs that round again.
--list shows the campaigns, and how many rounds each has by each path: what is promised is shown by as many. Without --seconds all of them are run, which takes
about two hours on two cores. With --seconds the campaigns take turns of ten minutes, go on where they were, and leave their time to the others when
they have all their rounds; the report says how many of how many there were by each path. In the lane python, workers and initiators are interpreters with the package towline, over any of the paths. What the machine lacks (network namespaces need root) is skipped with its reason.

With --json: {\"ok\", \"seed\", \"commit\", \"date\", \"command\", \"seconds\", \"campaigns\": [{\"name\", \"summary\", \"ok\", \"rounds\", \"passed\" (the rounds that did),
\"skipped\" (reasons), \"seconds\", \"lanes\": [{\"lane\", \"asked\", \"rounds\", \"passed\", \"skipped\", \"seconds\", \"failures\": [{\"round\", \"message\",
\"replay\"}], \"samples\": [{\"name\", \"count\", \"p50\", \"p99\", \"most\"}], \"counts\": {...}}]}], \"figures\": [{\"name\", \"value\", \"target\", \"met\"}],
\"machine\": {...}}. Times are in seconds. A figure that is not met does not fail the run: times mean little on a busy machine.";

/// How many seconds the short form may take.
const QUICK: u64 = 220;

/// How long the campaigns together may take until each has its next turn.
const TURN: Duration = Duration::from_secs(600);

#[derive(Args)]
pub(crate) struct Options {
    /// Only these campaigns
    #[arg(value_name = "CAMPAIGN")]
    campaigns: Vec<String>,
    /// Only this path; may be given several times, or with commas
    #[arg(long, value_name = "PATH", value_delimiter = ',')]
    lane: Vec<String>,
    /// As many rounds of each campaign over each path
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// The number of the first round
    #[arg(long, value_name = "N", default_value_t = 0)]
    first: u32,
    /// What all random choices come from; otherwise another one in each run
    #[arg(long)]
    seed: Option<u64>,
    /// The short form: all campaigns in under five minutes
    #[arg(long)]
    quick: bool,
    /// How long all campaigns together may take: each gets its share of it, in turns, and as many rounds as fit; 220 in the
    /// short form, as long as it takes in the long one
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,
    /// Where to write the report page
    #[arg(long, value_name = "FILE", default_value = "towline-soak.html")]
    html: PathBuf,
    /// Write the report as Markdown too
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "docs/reliability-report.md")]
    report: Option<PathBuf>,
    /// The interpreter of the lane python, with the package; otherwise that of .venv here, or else python3
    #[arg(long, value_name = "PATH")]
    python_exe: Option<PathBuf>,
    /// List the campaigns instead of running them
    #[arg(long)]
    list: bool,
}

pub(crate) fn run(options: &Options, output: &Output) -> Outcome {
    let chosen = chosen(options)?;
    if options.list {
        let rows: Vec<Vec<String>> = chosen
            .iter()
            .map(|one| {
                vec![
                    one.name.to_owned(),
                    one.lanes.join(" "),
                    one.rounds.long.to_string(),
                    one.summary.to_owned(),
                ]
            })
            .collect();
        output.table(&["campaign", "paths", "rounds", "what must hold"], &rows, &[2]);
        return Ok(Exit::Fine);
    }
    let program = std::env::current_exe().map_err(|error| Failure::os("this program's own path", error))?;
    become_worker_by(program, &["soak-worker"]);
    soak::use_python(options.python_exe.clone().unwrap_or_else(crate::bench::interpreter));
    let mut plan = Plan {
        seed: options.seed.unwrap_or_else(fresh_seed),
        first: options.first,
        rounds: options.rounds,
        quick: options.quick,
        share: None,
        lanes: options.lane.clone(),
    };
    let report = Report::begin(&plan);
    let progress = Arc::new(Progress::new(output, report, options.html.clone(), options.report.clone()));
    output.text(format!("seed {}", plan.seed));
    soak::take_panics();
    let watcher: Arc<dyn soak::Watcher> = Arc::clone(&progress) as _;
    let mut running: Vec<Running> = chosen
        .into_iter()
        .filter(|campaign| lanes_of(campaign, options).any(|_| true))
        .map(|campaign| Running { campaign, lanes: Vec::new(), took: Duration::ZERO })
        .collect();
    let time = options.seconds.or(options.quick.then_some(QUICK)).map(Duration::from_secs);
    let begun = Instant::now();
    loop {
        let left = time.map(|time| time.saturating_sub(begun.elapsed()));
        plan.share = left.map(|left| {
            let shares: u32 = running.iter().filter(|one| one.goes_on()).map(Running::share).sum();
            left.min(TURN) / shares.max(1)
        });
        for one in running.iter_mut().filter(|one| one.goes_on()) {
            one.turn(&plan, &watcher, &progress);
        }
        // The short form is over when each has had its turn; and so little time that it would hardly do for one round each is
        // not worth another.
        let over = time.is_none_or(|time| begun.elapsed() > time.mul_f64(0.9));
        if options.quick || over || !running.iter().any(Running::goes_on) {
            break;
        }
    }
    progress.finish()
}

/// A campaign, and what it has shown so far.
struct Running {
    campaign: &'static Campaign,
    lanes: Vec<soak::LaneResult>,
    took: Duration,
}

impl Running {
    fn share(&self) -> u32 {
        self.campaign.rounds.quick.1
    }

    fn goes_on(&self) -> bool {
        self.lanes.is_empty() || self.lanes.iter().any(|lane| !lane.is_complete())
    }

    fn turn(&mut self, plan: &Plan, watcher: &Arc<dyn soak::Watcher>, progress: &Progress) {
        progress.begins(self.campaign.name);
        let started = Instant::now();
        let mut lanes = self.campaign.run(plan, watcher, &self.lanes);
        if let (Some(first), panics) = (lanes.first_mut(), soak::panics_elsewhere()) {
            let round = first.rounds;
            first.failures.extend(panics.into_iter().map(|message| soak::Failed { round, message }));
        }
        self.took += started.elapsed();
        progress.ended(CampaignReport::new(self.campaign, lanes.clone(), self.took, plan));
        self.lanes = lanes;
    }
}

fn chosen(options: &Options) -> Outcome<Vec<&'static Campaign>> {
    for name in &options.campaigns {
        if !all().chain([&SELF_CHECK]).any(|campaign| campaign.name == name) {
            return Err(Failure::usage(format!(
                "no campaign is called {name}; towline soak --list shows them all"
            )));
        }
    }
    for lane in &options.lane {
        if !LANES.contains(&lane.as_str()) {
            return Err(Failure::usage(format!("no path is called {lane}; there are {}", LANES.join(", "))));
        }
    }
    let named = |campaign: &&Campaign| options.campaigns.iter().any(|name| name == campaign.name);
    Ok(match options.campaigns.is_empty() {
        true => all().collect(),
        false => all().chain([&SELF_CHECK]).filter(named).collect(),
    })
}

/// Those of the test kit, and those of the crates that it does not know.
fn all() -> impl Iterator<Item = &'static Campaign> {
    CAMPAIGNS.iter().chain(&ranks::CAMPAIGNS)
}

fn lanes_of(campaign: &'static Campaign, options: &Options) -> impl Iterator<Item = &'static str> {
    campaign
        .lanes
        .iter()
        .copied()
        .filter(|lane| options.lane.is_empty() || options.lane.iter().any(|one| one == lane))
}

fn fresh_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    (now.as_micros() as u64) % 1_000_000_007
}

/// What becomes a worker of the campaigns.
pub(crate) fn become_worker() -> Outcome {
    towline_testkit::worker::main_with(ranks::further);
    Ok(Exit::Fine)
}
