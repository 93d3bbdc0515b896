//! `towline soak`: the campaigns that show what is promised under faults, for as long as one likes.

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use parking_lot::Mutex;
use towline_lab::outcome::{Exit, Outcome};
use towline_lab::soak::{self, Audience, Report};

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

/// Where nobody looks on, a line says this often how far a campaign is.
const SAY: Duration = Duration::from_secs(30);

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
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "towline-soak.md")]
    report: Option<PathBuf>,
    /// The interpreter of the lane python, with the package; otherwise that of .venv here, or else python3
    #[arg(long, value_name = "PATH")]
    python_exe: Option<PathBuf>,
    /// List the campaigns instead of running them
    #[arg(long)]
    list: bool,
}

pub(crate) fn run(options: &Options, output: &Output) -> Outcome {
    let asked = soak::Options {
        campaigns: options.campaigns.clone(),
        lanes: options.lane.clone(),
        rounds: options.rounds,
        first: options.first,
        seed: options.seed,
        quick: options.quick,
        seconds: options.seconds,
        html: options.html.clone(),
        markdown: options.report.clone(),
        python_exe: options.python_exe.clone(),
    };
    if !options.list {
        return soak::run(&asked, Arc::new(Viewer::new(output)));
    }
    let rows: Vec<Vec<String>> = soak::list(&asked)?
        .iter()
        .map(|one| {
            vec![one.name.to_owned(), one.lanes.join(" "), one.rounds.to_string(), one.summary.to_owned()]
        })
        .collect();
    output.table(&["campaign", "paths", "rounds", "what must hold"], &rows, &[2]);
    Ok(Exit::Fine)
}

/// What is shown while the campaigns run.
struct Viewer {
    bar: ProgressBar,
    json: bool,
    /// When it was last said how far a campaign is.
    said: Mutex<Instant>,
}

impl Viewer {
    fn new(output: &Output) -> Viewer {
        let bar = if output.shows_progress() { ProgressBar::new(1) } else { ProgressBar::hidden() };
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {msg}") {
            bar.set_style(style);
        }
        Viewer { bar, json: output.is_json(), said: Mutex::new(Instant::now()) }
    }

    /// Whether it is time to say how far a campaign is.
    fn is_due(&self) -> bool {
        let mut said = self.said.lock();
        let due = said.elapsed() >= SAY;
        if due {
            *said = Instant::now();
        }
        due
    }
}

impl Audience for Viewer {
    fn says(&self, text: &str) {
        if self.json {
            return;
        }
        self.bar.suspend(|| {
            let mut stdout = std::io::stdout().lock();
            let _ = writeln!(stdout, "{text}").and_then(|()| stdout.flush());
        });
    }

    fn begins(&self, campaign: &'static str) {
        *self.said.lock() = Instant::now();
        self.bar.set_length(1);
        self.bar.set_position(0);
        self.bar.set_message(campaign);
        self.bar.enable_steady_tick(Duration::from_millis(200));
    }

    fn is_at(&self, campaign: &'static str, done: u32, of: u32) {
        self.bar.set_length(u64::from(of));
        self.bar.set_position(u64::from(done));
        self.bar.set_message(format!("{campaign}: {done} of {of} rounds"));
        if self.bar.is_hidden() && !self.json && self.is_due() {
            self.says(&format!("{campaign:<11} {done} of {of} rounds"));
        }
    }

    fn ends(&self) {
        self.bar.finish_and_clear();
    }

    fn document(&self, report: &Report) {
        Output::new(self.json).document(report);
    }
}
