//! `towline fetch`: reads a whole region by its ticket. `towline serve` is the other side.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use serde::Serialize;
use towline::memory::MemoryAccess;
use towline::{Access, Endpoint, Explanation, Routing, SystemStorage, Verdict};

use crate::inspect::find_ticket;
use crate::outcome::{Exit, Failure, Outcome};
use crate::output::Output;
use crate::size;

#[derive(Args)]
pub(crate) struct Options {
    /// The ticket's text, or a file that holds it as text or bytes, or - for standard input
    ticket: String,
    /// Write the bytes to this file
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Take this path and no other: inproc, mapped, cma, unix or tcp
    #[arg(long, value_name = "PATH")]
    path: Option<String>,
    /// Show every candidate path, the one taken, and the reason for the others
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
    candidates: Vec<Candidate>,
}

#[derive(Serialize)]
struct Candidate {
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
    let endpoint = Endpoint::open("fetch")?;
    let start = Instant::now();
    let remote = endpoint.import_with(&ticket, &routing)?;
    let contact = start.elapsed().as_secs_f64();
    let local = endpoint
        .register(SystemStorage::new(remote.len() as usize)?, Access::NONE)
        .map_err(towline::Error::from)?;
    let start = Instant::now();
    let transfer = endpoint.read(&remote, &local).start()?;
    transfer.wait()?;
    let seconds = start.elapsed().as_secs_f64();
    if let Some(out) = &options.out {
        let storage = local.storage();
        write_out(out, remote.len(), |at, into| storage.read_at(at, into))?;
    }
    let report = Report {
        peer: remote.peer().to_string(),
        path: transfer.path().to_owned(),
        bytes: transfer.bytes(),
        contact_seconds: contact,
        seconds,
        gib_per_second: size::gib_per_second(transfer.bytes(), seconds),
        out: options.out.as_ref().map(|out| out.display().to_string()),
        candidates: candidates(remote.explain()),
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

fn candidates(explanation: &Explanation) -> Vec<Candidate> {
    explanation
        .candidates
        .iter()
        .map(|candidate| Candidate {
            path: candidate.path,
            verdict: match candidate.verdict {
                Verdict::Taken => "taken",
                Verdict::Possible => "possible",
                Verdict::Refused => "refused",
            },
            enforced: candidate.enforced,
            reason: candidate.reason.clone(),
        })
        .collect()
}

fn write_out(
    path: &PathBuf,
    bytes: u64,
    read_at: impl Fn(usize, &mut [u8]) -> towline::Result<()>,
) -> Outcome<()> {
    let failed = |error| Failure::os(path.display(), error);
    let mut file = File::create(path).map_err(failed)?;
    let mut portion = vec![0; (1 << 20).min(bytes as usize)];
    let mut at = 0;
    while at < bytes as usize {
        let len = portion.len().min(bytes as usize - at);
        read_at(at, &mut portion[..len])?;
        file.write_all(&portion[..len]).map_err(failed)?;
        at += len;
    }
    file.flush().map_err(failed)
}
