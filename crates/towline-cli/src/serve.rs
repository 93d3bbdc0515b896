//! `towline serve`: registers a region, prints its ticket and waits. `towline fetch` is the other side.

use std::fs::File;
use std::io::Read;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use towline::memory::{MemoryAccess, MemoryDescription};
use towline::{Access, DiskStorage, Endpoint, NixlOptions, Registered, SharedStorage, Storage};
use towline_lab::outcome::{Exit, Failure, Outcome};
use towline_lab::size;

use crate::output::Output;
use crate::pages::{self, AuditReport};

#[derive(Args)]
pub(crate) struct Options {
    /// Serve this file where it is: the owner reads (and, where allowed, writes) it for every holder of the ticket
    #[arg(value_name = "FILE", conflicts_with_all = ["file", "bytes"])]
    in_place: Option<PathBuf>,
    /// The name of the endpoint
    #[arg(long, default_value = "serve")]
    name: String,
    /// Listen on this address and port too; without it only this host can fetch
    #[arg(long, value_name = "ADDRESS")]
    listen: Vec<SocketAddr>,
    /// The size of the region: bytes, or with K, M, G [default: the file's, or 64M]
    #[arg(long, value_parser = size::parse)]
    bytes: Option<u64>,
    /// Fill memory with a copy of this file, and serve that: the fast paths of one host need memory
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// What holders of the ticket may do: read, write or read+write
    #[arg(long, default_value = "read", value_parser = access)]
    access: Access,
    /// Lend the region by NIXL over that device (mlx5_0:1, eth0, or tcp for all interfaces), with --access read+write: who borrows it can
    /// read and write all memory of this process, and on an interface that is every program that can connect to it
    #[arg(long, value_name = "DEVICE")]
    nixl_lend_over: Vec<String>,
    /// Show metrics for Prometheus at http://ADDRESS/metrics, and who used the region at /audit, to every client
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<SocketAddr>,
    /// End after this many seconds; without it, on Ctrl-C or when standard input ends
    #[arg(long = "for", value_name = "SECONDS")]
    seconds: Option<u64>,
}

fn access(text: &str) -> Result<Access, String> {
    text.parse().map_err(|error: towline::Error| error.message().to_owned())
}

#[derive(Serialize)]
struct Report {
    ticket: String,
    name: String,
    bytes: u64,
    access: &'static str,
    reach: Vec<String>,
    metrics: Option<String>,
}

/// What the pages of `--metrics` show.
struct Shown {
    endpoint: Endpoint,
    region: Arc<Registered<Arc<dyn Storage>>>,
}

impl pages::Source for Shown {
    fn metrics(&self) -> String {
        self.endpoint.metrics()
    }

    fn audit(&self) -> AuditReport {
        let (name, region) = (&self.endpoint.identity().name, &self.region);
        AuditReport::new(name, region.generation(), region.size() as u64, &region.audit())
    }
}

pub(crate) fn run(options: &Options, output: &Output) -> Outcome {
    let storage = storage(options)?;
    let nixl = NixlOptions::default().lend_over(options.nixl_lend_over.iter().cloned());
    let mut endpoint = Endpoint::options(&options.name).nixl(nixl);
    for address in &options.listen {
        endpoint = endpoint.listen(*address);
    }
    let endpoint = endpoint.open()?;
    let region = Arc::new(endpoint.register(storage, options.access).map_err(towline::Error::from)?);
    let metrics = options.metrics.map(|address| {
        pages::serve(address, Shown { endpoint: endpoint.clone(), region: Arc::clone(&region) })
    });
    let metrics = metrics.transpose()?.map(|address| format!("http://{address}/metrics"));
    let ticket = region.ticket()?;
    let report = Report {
        ticket: ticket.to_string(),
        name: options.name.clone(),
        bytes: ticket.length(),
        access: options.access.name(),
        reach: ticket.body().reach.iter().map(ToString::to_string).collect(),
        metrics,
    };
    // The ticket is alone on its line, so that a shell can take it.
    output.text(&report.ticket);
    output.document(&report);
    if !output.is_json() {
        eprintln!(
            "{} of {} served for {} by {}; every holder of the ticket can use it. Ctrl-C ends.",
            size::bytes(report.bytes),
            report.name,
            report.access,
            report.reach.join(", "),
        );
        if let Some(metrics) = &report.metrics {
            eprintln!("metrics at {metrics}; who used the region: towline inspect {metrics}");
        }
    }
    match options.seconds {
        Some(seconds) => std::thread::sleep(Duration::from_secs(seconds)),
        None => wait_for_end_of_input()?,
    }
    endpoint.close()?;
    Ok(Exit::Fine)
}

fn storage(options: &Options) -> Outcome<Arc<dyn Storage>> {
    const PORTION: usize = 1 << 20;
    if let Some(path) = &options.in_place {
        let read_only = !options.access.contains(Access::WRITE);
        return Ok(Arc::new(DiskStorage::options().read_only(read_only).open(path)?));
    }
    let Some(path) = &options.file else {
        return Ok(Arc::new(SharedStorage::new(options.bytes.unwrap_or(64 << 20) as usize)?));
    };
    let failed = |error| Failure::os(path.display(), error);
    let mut file = File::open(path).map_err(failed)?;
    let in_file = file.metadata().map_err(failed)?.len();
    let bytes = options.bytes.unwrap_or(in_file);
    if bytes == 0 {
        return Err(Failure::usage(format!("{} is empty: name the size by --bytes", path.display())));
    }
    let storage = SharedStorage::new(bytes as usize)?;
    let mut portion = vec![0; PORTION.min(bytes as usize)];
    let mut at = 0;
    while at < bytes as usize {
        let len = portion.len().min(bytes as usize - at);
        match file.read(&mut portion[..len]).map_err(failed)? {
            0 => break,
            read => {
                storage.write_at(at, &portion[..read])?;
                at += read;
            }
        }
    }
    Ok(Arc::new(storage))
}

fn wait_for_end_of_input() -> Outcome<()> {
    let mut ignored = [0; 4096];
    let mut stdin = std::io::stdin().lock();
    loop {
        match stdin.read(&mut ignored) {
            Ok(0) => return Ok(()),
            Err(error) if error.kind() != std::io::ErrorKind::Interrupted => {
                return Err(Failure::os("standard input", error));
            }
            _ => {}
        }
    }
}
