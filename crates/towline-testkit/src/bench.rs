//! Where laws are tried: an owner, a user, and one path between them.

mod owner;

use std::sync::Arc;
use std::time::Duration;

use towline::{
    Access, Endpoint, EndpointOptions, Error, Kind, Limits, Probe, Registered, Remote, Routing, Storage,
    Ticket,
};

pub use owner::{Owner, OwnerRegion, OwnerStats, Views};

use crate::forced::as_forced;
pub use crate::forced::forced;
use crate::lending;
use crate::oracle::Stamp;
use crate::watchdog::eventually;
use crate::worker::storage;

/// The limit without progress in laws; their watchdog waits ten times as long. Built with `TOWLINE_TEST_SLOW` in the environment, it
/// is long enough for an emulated machine.
pub const STALL: Duration = Duration::from_secs(match option_env!("TOWLINE_TEST_SLOW") {
    Some(_) => 60,
    None => 5,
});

/// Whether owner and user are two processes or one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    /// Both are in the process of the test. Paths other than `inproc` go through real sockets all the same.
    OneProcess,
    /// The owner is in a worker.
    TwoProcesses,
}

/// An owner, a user, and one path between them.
pub struct Bench {
    /// The path that bytes take.
    pub path: &'static str,
    /// Whether they are two processes.
    pub setting: Setting,
    /// The worker whose memory it is.
    pub owner: Owner,
    /// The worker that reads and writes it.
    pub user: Endpoint,
    /// What allows that path only (and, where it cannot do everything, the one that helps it out).
    pub routing: Routing,
    /// Whether a transfer that has ended is always quiet.
    pub quiet_at_end: bool,
    /// The kinds of the owner's storages and the user's, where they are not the path's own.
    kinds: Option<(&'static str, &'static str)>,
}

impl Bench {
    /// Builds a bench for that path, or says why the machine cannot. `TOWLINE_TEST_FORCE` replaces the path.
    pub fn open(path: &str, setting: Setting) -> Result<Bench, String> {
        Bench::open_with(path, setting, None)
    }

    /// [`open`](Self::open), with storages of these kinds on the owner's side and on the user's.
    pub fn open_with(
        path: &str,
        setting: Setting,
        kinds: Option<(&'static str, &'static str)>,
    ) -> Result<Bench, String> {
        let path = forced().unwrap_or_else(|| path.to_owned());
        // `inproc` needs one process, and `cma` two: it copies between processes.
        let setting = match path.as_str() {
            "inproc" => Setting::OneProcess,
            "cma" | "cuda" => Setting::TwoProcesses,
            _ => setting,
        };
        let paths = towline::paths();
        let Some(info) = paths.iter().find(|info| info.name == path) else {
            panic!("no path is called {path:?}");
        };
        if let Probe::Missing { reason, .. } = &info.probe {
            return Err(reason.clone());
        }
        let (path, quiet_at_end) = (info.name, info.quiet_at_end);
        let owner = Owner::open(path, "owner", setting, "");
        let routing = routing(path);
        let user = options("user").routing(routing.clone()).open().unwrap();
        let bench = Bench { path, setting, owner, user, routing, quiet_at_end, kinds };
        match bench.try_path() {
            Ok(()) => Ok(bench),
            // A container may forbid what the machine could do.
            Err(error) if error.kind() == Kind::Unavailable && matches!(path, "cma" | "nixl") => {
                Err(error.to_string())
            }
            Err(error) => panic!("no bench for {path}: {error}"),
        }
    }

    fn try_path(&self) -> Result<(), Error> {
        let remote = self.user.import(&self.region(64, Access::READ_WRITE).ticket())?;
        assert_eq!(remote.path(), self.path, "{}", remote.explain());
        drop(remote);
        // A path that opens memory closes it a little later, and until then the owner counts the region: laws count their own.
        eventually(STALL, || self.owner.stats().regions == 0);
        Ok(())
    }

    /// What the owner's storages are: those that the path can reach, and both kinds where it does not matter.
    pub fn kind(&self) -> &'static str {
        match (self.path, self.setting) {
            _ if self.kinds.is_some() => self.kinds.map_or("", |(owner, _)| owner),
            ("mapped", _) => "shared",
            ("cma", _) | (_, Setting::OneProcess) => "system",
            _ => "shared",
        }
    }

    /// Whether words of the owner's storages can be acted on: not on a GPU.
    pub fn has_words(&self) -> bool {
        !matches!(self.kind(), "device" | "exportable")
    }

    /// A region of the owner.
    pub fn region(&self, len: usize, access: Access) -> OwnerRegion<'_> {
        self.owner.register(len, self.kind(), access).unwrap()
    }

    /// A region of the owner, filled with a stamp.
    pub fn stamped(&self, len: usize, access: Access, stamp: Stamp) -> OwnerRegion<'_> {
        let region = self.region(len, access);
        region.fill(stamp);
        region
    }

    /// That region as the user sees it.
    pub fn import(&self, region: &OwnerRegion<'_>) -> Remote {
        self.remote(&region.ticket())
    }

    /// A ticket as the user sees it.
    pub fn remote(&self, ticket: &Ticket) -> Remote {
        self.user.import(ticket).unwrap()
    }

    /// Memory of the user.
    pub fn local(&self, len: usize) -> Registered<Arc<dyn Storage>> {
        self.user.register(self.storage(len), Access::NONE).unwrap()
    }

    /// Memory as the user's is.
    pub fn storage(&self, len: usize) -> Arc<dyn Storage> {
        storage(len, self.kinds.map_or("system", |(_, user)| user)).unwrap()
    }

    /// Memory of the user, filled with a stamp.
    pub fn local_stamped(&self, len: usize, stamp: Stamp) -> Registered<Arc<dyn Storage>> {
        let local = self.local(len);
        stamp.fill_storage(local.storage()).unwrap();
        local
    }

    /// A transfer has ended: from now on the local memory is the caller's again.
    pub fn settle(&self, transfer: &towline::Transfer) {
        assert!(transfer.is_done());
        if self.quiet_at_end {
            assert!(transfer.quiet(), "a transfer that has ended is quiet on {}", self.path);
        }
        assert!(transfer.wait_quiet(STALL * 2), "the engine does not let go");
        assert!(transfer.quiet());
    }

    /// The other paths on which the same owner can be reached, with their routing.
    pub fn all_paths(&self) -> Vec<Routing> {
        let all = match self.setting {
            _ if forced().is_some() => vec![self.path],
            Setting::OneProcess => vec!["inproc", "mapped", "unix", "tcp"],
            Setting::TwoProcesses => vec!["mapped", "unix", "tcp"],
        };
        all.into_iter().map(routing).collect()
    }
}

/// Options with the limits of the laws.
pub fn options(name: &str) -> EndpointOptions {
    options_for("", name)
}

/// [`options`] of an endpoint that lends what that path needs to be lent.
pub fn options_for(path: &str, name: &str) -> EndpointOptions {
    let limits = Limits { no_progress: STALL, ..Limits::default() };
    as_forced(Endpoint::options(name).limits(limits).nixl(lending::options(path)))
}

/// What allows that path only. `cma` and `nixl` cannot do atomics and reductions: the stream helps them out.
pub fn routing(path: &str) -> Routing {
    let routing = Routing::default().require(path).unwrap();
    if matches!(path, "cma" | "nixl") { routing.require("unix").unwrap() } else { routing }
}

/// The user's side of what became of a request, however it ended.
pub fn outcome(started: towline::Result<towline::Transfer>) -> towline::Result<()> {
    started.and_then(|transfer| transfer.wait())
}

/// Asserts that a request ended with one of these kinds of error.
#[track_caller]
pub fn refused<T: std::fmt::Debug>(result: towline::Result<T>, kinds: &[Kind]) -> Error {
    let error = result.expect_err("an error was expected");
    assert!(kinds.contains(&error.kind()), "one of {kinds:?} was expected, not: {error}");
    error
}
