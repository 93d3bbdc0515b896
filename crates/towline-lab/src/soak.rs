//! `towline soak`: the campaigns that show what is promised under faults, for as long as one likes.

mod figures;
mod page;
mod record;
mod report;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_testkit::process::become_worker_by;

use self::record::Record;
use self::report::CampaignReport;
pub use self::report::Report;
use crate::campaign::{self, CAMPAIGNS, Campaign, Failed, LaneResult, Plan, SELF_CHECK, Watcher};
use crate::interpreter;
use crate::outcome::{Failure, Outcome};

/// How many seconds the short form may take.
const QUICK: u64 = 220;

/// How long the campaigns together may take until each has its next turn.
const TURN: Duration = Duration::from_secs(600);

/// Which campaigns to run, and how long.
#[derive(Debug, Clone)]
pub struct Options {
    /// Only these campaigns.
    pub campaigns: Vec<String>,
    /// Only these paths.
    pub lanes: Vec<String>,
    /// As many rounds of each campaign over each path.
    pub rounds: Option<u32>,
    /// The number of the first round.
    pub first: u32,
    /// What all random choices come from; otherwise another one in each run.
    pub seed: Option<u64>,
    /// The short form.
    pub quick: bool,
    /// How long all campaigns together may take, in seconds.
    pub seconds: Option<u64>,
    /// Where the report page is written.
    pub html: PathBuf,
    /// Where the report is written as Markdown.
    pub markdown: Option<PathBuf>,
    /// The interpreter of the lane python; otherwise that of `.venv` here, or else `python3`.
    pub python_exe: Option<PathBuf>,
}

/// An observer while campaigns run.
pub trait Audience: Send + Sync {
    /// Something is to be read: one line, or a few.
    fn says(&self, text: &str);

    /// A campaign begins its turn.
    fn begins(&self, campaign: &'static str);

    /// So many rounds of a campaign are done, of so many.
    fn is_at(&self, campaign: &'static str, done: u32, of: u32);

    /// No campaign runs any more.
    fn ends(&self);

    /// What the run has found.
    fn document(&self, report: &Report);
}

/// A campaign that can be run.
#[derive(Debug, Clone)]
pub struct Listed {
    /// Its name.
    pub name: &'static str,
    /// The paths that it runs over.
    pub lanes: Vec<&'static str>,
    /// How many rounds it has over each.
    pub rounds: u32,
    /// What must hold.
    pub summary: &'static str,
}

/// The campaigns that the options ask for.
///
/// # Errors
/// Where no campaign or no path has a name that was given.
pub fn list(options: &Options) -> Outcome<Vec<Listed>> {
    let listed = |one: &Campaign| Listed {
        name: one.name,
        lanes: one.lanes(),
        rounds: one.rounds.long,
        summary: one.summary,
    };
    Ok(chosen(options)?.into_iter().map(listed).collect())
}

/// Runs the campaigns that the options ask for. Workers are this program, called as `soak-worker`: there it calls [`become_worker`].
///
/// # Errors
/// Where no campaign or no path has a name that was given, or the report cannot be written.
pub fn run(options: &Options, audience: Arc<dyn Audience>) -> Outcome {
    let chosen = chosen(options)?;
    let program = std::env::current_exe().map_err(|error| Failure::os("this program's own path", error))?;
    become_worker_by(program, &["soak-worker"]);
    campaign::use_python(options.python_exe.clone().unwrap_or_else(interpreter::of_the_project));
    let mut plan = Plan {
        seed: options.seed.unwrap_or_else(fresh_seed),
        first: options.first,
        rounds: options.rounds,
        quick: options.quick,
        share: None,
        lanes: options.lanes.clone(),
    };
    let report = Report::begin(&plan);
    audience.says(&format!("seed {}", plan.seed));
    let record = Arc::new(Record::new(audience, report, options.html.clone(), options.markdown.clone()));
    campaign::take_panics();
    let watcher: Arc<dyn Watcher> = Arc::clone(&record) as _;
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
            one.turn(&plan, &watcher, &record);
        }
        // The short form is over when each has had its turn; and so little time that it would hardly do for one round each is
        // not worth another.
        let over = time.is_none_or(|time| begun.elapsed() > time.mul_f64(0.9));
        if options.quick || over || !running.iter().any(Running::goes_on) {
            break;
        }
    }
    record.finish()
}

/// A campaign, and what it has shown so far.
struct Running {
    campaign: &'static Campaign,
    lanes: Vec<LaneResult>,
    took: Duration,
}

impl Running {
    fn share(&self) -> u32 {
        self.campaign.rounds.quick.1
    }

    fn goes_on(&self) -> bool {
        self.lanes.is_empty() || self.lanes.iter().any(|lane| !lane.is_complete())
    }

    fn turn(&mut self, plan: &Plan, watcher: &Arc<dyn Watcher>, record: &Record) {
        record.begins(self.campaign.name);
        let started = Instant::now();
        let mut lanes = self.campaign.run(plan, watcher, &self.lanes);
        if let (Some(first), panics) = (lanes.first_mut(), campaign::panics_elsewhere()) {
            let round = first.rounds;
            first.failures.extend(panics.into_iter().map(|message| Failed { round, message }));
        }
        self.took += started.elapsed();
        record.ended(CampaignReport::new(self.campaign, lanes.clone(), self.took, plan));
        self.lanes = lanes;
    }
}

fn chosen(options: &Options) -> Outcome<Vec<&'static Campaign>> {
    for name in &options.campaigns {
        if !CAMPAIGNS.iter().chain([&SELF_CHECK]).any(|campaign| campaign.name == name) {
            return Err(Failure::usage(format!(
                "no campaign is called {name}; towline soak --list shows them all"
            )));
        }
    }
    for lane in &options.lanes {
        let known = campaign::lanes();
        if !known.contains(&lane.as_str()) {
            return Err(Failure::usage(format!("no path is called {lane}; there are {}", known.join(", "))));
        }
    }
    let named = |campaign: &&Campaign| options.campaigns.iter().any(|name| name == campaign.name);
    Ok(match options.campaigns.is_empty() {
        true => CAMPAIGNS.iter().collect(),
        false => CAMPAIGNS.iter().chain([&SELF_CHECK]).filter(named).collect(),
    })
}

fn lanes_of(campaign: &'static Campaign, options: &Options) -> impl Iterator<Item = &'static str> {
    campaign
        .lanes()
        .into_iter()
        .filter(|lane| options.lanes.is_empty() || options.lanes.iter().any(|one| one == lane))
}

fn fresh_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    (now.as_micros() as u64) % 1_000_000_007
}

/// Is a worker of the campaigns until its input ends.
pub fn become_worker() {
    towline_testkit::worker::main_with(campaign::further);
}
