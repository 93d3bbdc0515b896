//! The other process of `demo`, `doctor` and `bench`: the same program again, called as `towline worker`.

use clap::Args;
use towline_lab::outcome::Outcome;
use towline_lab::worker;

#[derive(Args)]
pub(crate) struct Options {
    /// The process that started it
    #[arg(long)]
    parent: i32,
    /// The name of its endpoints
    #[arg(long, default_value = "worker")]
    name: String,
    /// Stay on this core
    #[arg(long)]
    core: Option<usize>,
    /// Answer one eventfd (standard input) with another (standard output): the bare round trip of two processes
    #[arg(long)]
    echo: bool,
}

pub(crate) fn run(options: &Options) -> Outcome {
    let Options { parent, core, echo, .. } = *options;
    let worker_options = worker::Options { parent, name: options.name.clone(), core, echo };
    worker::run(&worker_options, |error| eprintln!("towline worker: {error}"))
}
