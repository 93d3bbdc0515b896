//! Real processes, killed and stopped at random moments, in both roles. `TOWLINE_TEST_SEED` tries other moments.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod alone;
mod claimers;
mod closing;
mod containers;
mod deregistering;
mod killed;
mod kinds;
mod parts;
mod pinned;
mod stopped;
mod walls;

use std::time::Duration;

use towline::{Access, Endpoint, Limits, Registered, Serves, SystemStorage};
use towline_testkit::bench::{forced, outcome, routing};
use towline_testkit::oracle::Stamp;
use towline_testkit::paths::{is_here, known, names};
use towline_testkit::process::Process;

const MIB: usize = 1 << 20;

/// The paths between processes to host memory that nobody has to opt in to: one lane of rounds for each, side by side.
fn all_lanes() -> Vec<&'static str> {
    names(|path| !is_here(path) && path.serves.has_words() && !path.opt_in)
}

/// The limit without progress here. What must end within it gets ten times as long.
const STALL: Duration = Duration::from_secs(1);

/// The kinds of error that a peer's death or standstill may give.
const GONE: [towline::Kind; 3] = [towline::Kind::Disconnected, towline::Kind::Stale, towline::Kind::Timeout];

/// Runs one lane for each path that can be used here.
fn lanes(body: impl Fn(&'static str, u64) + Sync) {
    lanes_of(&all_lanes(), body);
}

fn lanes_of(paths: &[&'static str], body: impl Fn(&'static str, u64) + Sync) {
    let usable = |path: &&str| forced().is_none_or(|forced| forced == **path) && path_works(path);
    std::thread::scope(|scope| {
        for (number, path) in paths.iter().copied().enumerate().filter(|(_, path)| usable(path)) {
            let body = &body;
            std::thread::Builder::new()
                .name(path.into())
                .spawn_scoped(scope, move || body(path, number as u64))
                .unwrap();
        }
    });
}

fn path_works(path: &str) -> bool {
    let probe = towline::paths().into_iter().find(|info| info.name == path).map(|info| info.probe);
    match probe {
        Some(towline::Probe::Missing { reason, .. }) => {
            towline_testkit::skip::skip(&format!("faults/{path}"), path, &reason);
            false
        }
        _ => true,
    }
}

fn kind_for(path: &str) -> &'static str {
    match known(path).serves {
        Serves::SharedMemory => "shared",
        Serves::Files => "disk",
        _ => "system",
    }
}

fn endpoint(name: &str) -> Endpoint {
    let limits = Limits { no_progress: STALL, ..Limits::default() };
    Endpoint::options(name).limits(limits).open().unwrap()
}

fn local(endpoint: &Endpoint, len: usize) -> Registered<SystemStorage> {
    endpoint.register(SystemStorage::new(len).unwrap(), Access::NONE).unwrap()
}

/// An owner that nothing happens to: a peer that fails somewhere else must still reach it.
struct Bystander {
    process: Process,
    stamp: Stamp,
}

impl Bystander {
    fn open(name: &str) -> Bystander {
        let stamp = Stamp::new(50, 1);
        let mut process = Process::open(name, "");
        process.must("register 65536 shared read");
        process.must(&format!("fill 1 {} {}", stamp.region, stamp.generation));
        Bystander { process, stamp }
    }

    fn serves(&mut self, user: &Endpoint, path: &str) {
        let ticket = self.process.must("ticket 1").text(0).parse().unwrap();
        let remote = user.import_with(&ticket, &routing(path)).unwrap();
        let local = local(user, 65_536);
        outcome(user.read(&remote, &local).start()).unwrap();
        self.stamp.verify_storage(local.storage(), 0, 65_536).unwrap();
    }
}
