//! The `towline` command: see it work, see what works here, measure it, look into a ticket.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "this crate is the one that prints")]

mod bench;
mod demo;
mod doctor;
mod fetch;
mod inspect;
mod launch;
mod output;
mod pages;
mod serve;
mod soak;
mod worker;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use output::Output;
use towline_lab::outcome::{Exit, Outcome};
use tracing_subscriber::EnvFilter;

const EXIT_CODES: &str = "\
Exit codes:
  0  it worked
  1  a check failed, bytes did not verify, or what was given was refused
  2  the command line is wrong
  3  something needed is not available here: a path, a peer, a file";

/// Moves registered memory between workers.
#[derive(Parser)]
#[command(name = "towline", version, after_help = EXIT_CODES, arg_required_else_help = true)]
struct Cli {
    /// Print one JSON document instead of text
    #[arg(long, global = true)]
    json: bool,

    /// Show the chain of causes of an error, and what the library logs (RUST_LOG selects more or less)
    #[arg(long, short, global = true)]
    verbose: bool,

    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Let two worker processes move a tensor over every path that this machine has
    #[command(after_help = EXIT_CODES)]
    Demo(demo::Options),
    /// Say what works here, what does not, why, and how to mend it
    #[command(after_help = EXIT_CODES)]
    Doctor(doctor::Options),
    /// Measure every path beside the limit of the machine, in the same run
    #[command(after_long_help = format!("{}\n\n{EXIT_CODES}", bench::HELP))]
    Bench(bench::Options),
    /// Show what a ticket says (its tag stays hidden), or who used a region that is served
    #[command(after_help = EXIT_CODES)]
    Inspect(inspect::Options),
    /// Register a region, print its ticket and wait
    #[command(after_help = EXIT_CODES)]
    Serve(serve::Options),
    /// Read a whole region by its ticket
    #[command(after_help = EXIT_CODES)]
    Fetch(fetch::Options),
    /// Start the ranks of a group on this host, and stop them all when one fails
    #[command(after_help = launch::HELP)]
    Launch(launch::Options),
    /// Kill, stop, cut off and overload workers for as long as you like, and check every word
    #[command(after_long_help = format!("{}\n\n{EXIT_CODES}", soak::HELP))]
    Soak(soak::Options),
    /// The workers of soak
    #[command(hide = true)]
    SoakWorker,
    /// What launch becomes a rank by
    #[command(hide = true)]
    Rank(launch::RankOptions),
    /// The other process of demo, doctor and bench
    #[command(hide = true)]
    Worker(worker::Options),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    log(cli.verbose);
    let output = Output::new(cli.json);
    let outcome: Outcome = match cli.command {
        Command::Demo(options) => demo::run(&options, &output),
        Command::Doctor(options) => doctor::run(&options, &output),
        Command::Bench(options) => bench::run(&options, &output),
        Command::Inspect(options) => inspect::run(&options, &output),
        Command::Serve(options) => serve::run(&options, &output),
        Command::Fetch(options) => fetch::run(&options, &output),
        Command::Launch(options) => match launch::run(&options, &output) {
            // The code is that of a rank.
            Ok(code) => return code,
            Err(failure) => Err(failure),
        },
        Command::Soak(options) => soak::run(&options, &output),
        Command::SoakWorker => {
            towline_lab::soak::become_worker();
            Ok(Exit::Fine)
        }
        Command::Rank(options) => launch::become_rank(&options),
        Command::Worker(options) => worker::run(&options),
    };
    match outcome {
        Ok(exit) => exit.into(),
        Err(failure) => {
            output.failure(&failure, cli.verbose);
            failure.exit.into()
        }
    }
}

/// Logs go to standard error; without `--verbose` only what a user must know.
fn log(verbose: bool) {
    let fallback = if verbose { "towline=debug" } else { "towline=error" };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(fallback));
    // A second subscriber cannot be set; there is none before this one.
    let _ = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).try_init();
}
