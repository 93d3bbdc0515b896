//! `towline fetch`: reads a whole region by its ticket. `towline serve` is the other side.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use towline::memory::MemoryAccess;
use towline::{
    Access, Endpoint, Explanation, NixlOptions, Registered, Remote, Routing, SystemStorage, Transfer, Verdict,
};
use towline_lab::outcome::{Exit, Failure, Outcome};
use towline_lab::size;

use crate::inspect::find_ticket;
use crate::output::Output;

/// A file comes in portions of this size, two of which are held.
const PORTION: u64 = 32 << 20;

/// And is written in portions of this one.
const WRITE_LEN: usize = 1 << 20;

#[derive(Args)]
pub(crate) struct Options {
    /// The ticket's text, or a file that holds it as text or bytes, or - for standard input
    ticket: String,
    /// Write the bytes to this file, as they come
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Take this path and no other (towline doctor names them all)
    #[arg(long, value_name = "PATH")]
    path: Option<String>,
    /// Let NIXL use that device (mlx5_0:1, eth0, or tcp for all interfaces) where the owner lends by it
    #[arg(long, value_name = "DEVICE")]
    nixl_reach_over: Vec<String>,
    /// Show every path, the one taken, and the reason for the others
    #[arg(long)]
    explain: bool,
}

#[derive(Serialize)]
struct Report {
    peer: String,
    path: String,
    bytes: u64,
    contact_seconds: f64,
    seconds: f64,
    gib_per_second: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    out: Option<String>,
    paths: Vec<ShownPath>,
}

#[derive(Serialize)]
struct ShownPath {
    path: &'static str,
    verdict: &'static str,
    enforced: bool,
    reason: String,
}

pub(crate) fn run(options: &Options, output: &Output) -> Outcome {
    let ticket = find_ticket(&options.ticket)?;
    let routing = match &options.path {
        Some(path) => Routing::default().require(path).map_err(|error| Failure::usage(error.message()))?,
        None => Routing::default(),
    };
    let nixl = NixlOptions::default().reach_over(options.nixl_reach_over.iter().cloned());
    let endpoint = Endpoint::options("fetch").nixl(nixl).open()?;
    let start = Instant::now();
    let remote = endpoint.import_with(&ticket, &routing)?;
    let contact = start.elapsed().as_secs_f64();
    let progress = progress(output, remote.len());
    let start = Instant::now();
    match &options.out {
        Some(out) => write_out(out, &endpoint, &remote, &progress)?,
        None => {
            let local = register(&endpoint, remote.len())?;
            endpoint.read(&remote, &local).start()?.wait()?;
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    progress.finish_and_clear();
    let report = Report {
        peer: remote.peer().to_string(),
        path: remote.path().to_owned(),
        bytes: remote.len(),
        contact_seconds: contact,
        seconds,
        gib_per_second: size::gib_per_second(remote.len(), seconds),
        out: options.out.as_ref().map(|out| out.display().to_string()),
        paths: paths(remote.explain()),
    };
    output.text(format!(
        "{} from {} over {} in {} ({:.2} GiB/s); contact took {}",
        size::bytes(report.bytes),
        report.peer,
        report.path,
        size::seconds(report.seconds),
        report.gib_per_second,
        size::seconds(report.contact_seconds),
    ));
    if options.explain {
        output.text(remote.explain().to_string().trim_end());
    }
    output.document(&report);
    Ok(Exit::Fine)
}

fn paths(explanation: &Explanation) -> Vec<ShownPath> {
    explanation
        .paths
        .iter()
        .map(|path| ShownPath {
            path: path.path,
            verdict: match path.verdict {
                Verdict::Taken => "taken",
                Verdict::Possible => "possible",
                Verdict::Refused => "refused",
            },
            enforced: path.enforced,
            reason: path.reason.clone(),
        })
        .collect()
}

fn register(endpoint: &Endpoint, bytes: u64) -> Outcome<Registered<SystemStorage>> {
    let storage = SystemStorage::new(bytes as usize)?;
    Ok(endpoint.register(storage, Access::NONE).map_err(towline::Error::from)?)
}

/// Writes portion after portion; the next one comes while one is written.
fn write_out(path: &Path, endpoint: &Endpoint, remote: &Remote, progress: &ProgressBar) -> Outcome<()> {
    let failed = |error| Failure::os(path.display(), error);
    let mut file = File::create(path).map_err(failed)?;
    let portion = PORTION.min(remote.len());
    let halves = [register(endpoint, portion)?, register(endpoint, portion)?];
    let mut buffer = vec![0; WRITE_LEN.min(portion as usize)];
    let start = |number: u64| -> Outcome<Option<(u64, Transfer)>> {
        let at = number * portion;
        let len = portion.min(remote.len().saturating_sub(at));
        if len == 0 {
            return Ok(None);
        }
        let half = &halves[(number % 2) as usize];
        Ok(Some((len, endpoint.read(remote, half).at(at, 0, len).start()?)))
    };
    let mut coming = start(0)?;
    let mut number = 0;
    while let Some((len, transfer)) = coming {
        transfer.wait()?;
        coming = start(number + 1)?;
        let storage = halves[(number % 2) as usize].storage();
        for at in (0..len as usize).step_by(WRITE_LEN) {
            let part = &mut buffer[..WRITE_LEN.min(len as usize - at)];
            storage.read_at(at, part)?;
            file.write_all(part).map_err(failed)?;
        }
        progress.inc(len);
        number += 1;
    }
    file.flush().map_err(failed)
}

fn progress(output: &Output, bytes: u64) -> ProgressBar {
    if !output.shows_progress() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(bytes);
    let style = ProgressStyle::with_template("{bar:30} {binary_bytes} of {binary_total_bytes}, {eta} left");
    if let Ok(style) = style {
        bar.set_style(style);
    }
    bar
}
