//! Where laws are tried: an owner, a user, and one path between them.

mod owner;
mod parts;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use towline::{
    Access, Capabilities, Contact, Endpoint, EndpointOptions, Error, Kind, Limits, PathProperties, Probe,
    Registered, Remote, Routing, Serves, Storage, Ticket,
};

pub use owner::{Owner, OwnerRegion, OwnerStats, Views};
pub use parts::{COUNTS, Parts, Range};

use crate::forced::as_forced;
pub use crate::forced::forced;
use crate::lending;
use crate::oracle::Stamp;
use crate::paths;
pub use crate::paths::routing;
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
    /// Both are in the process of the test. A path that contacts its owner goes through real sockets all the same.
    OneProcess,
    /// The owner is in a worker.
    TwoProcesses,
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Setting::OneProcess => "one process",
            Setting::TwoProcesses => "two processes",
        })
    }
}

impl Setting {
    /// The settings in which a path can be tried.
    pub fn all_of(path: &PathProperties) -> &'static [Setting] {
        match path.contact {
            Contact::Nothing => &[Setting::OneProcess],
            _ if path.apart => &[Setting::TwoProcesses],
            _ => &[Setting::OneProcess, Setting::TwoProcesses],
        }
    }
}

/// An owner, a user, and one path between them.
pub struct Bench {
    /// The path that bytes take.
    pub path: &'static str,
    /// What it says of itself.
    pub properties: PathProperties,
    /// Whether they are two processes.
    pub setting: Setting,
    /// The worker whose memory it is.
    pub owner: Owner,
    /// The worker that reads and writes it.
    pub user: Endpoint,
    /// What allows that path only (and, where it cannot do everything, the one that helps it out).
    pub routing: Routing,
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
        let Some(info) = towline::paths().into_iter().find(|info| info.name == path) else {
            panic!("no path is called {path:?}");
        };
        // A path that is forced may have another setting only.
        let settings = Setting::all_of(&info);
        let setting = if settings.contains(&setting) { setting } else { settings[0] };
        if let Probe::Missing { reason, .. } = &info.probe {
            return Err(reason.clone());
        }
        let (path, properties) = (info.name, info.properties);
        let owner = Owner::open(path, "owner", setting, "");
        let routing = routing(path);
        let user = options("user").routing(routing.clone()).open().unwrap();
        let bench = Bench { path, properties, setting, owner, user, routing, kinds };
        match bench.try_path() {
            Ok(()) => Ok(bench),
            // A container may forbid what the machine could do.
            Err(error) if error.kind() == Kind::Unavailable && bench.helper().is_some() => {
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
        if let Some((owner, _)) = self.kinds {
            return owner;
        }
        match (self.properties.serves, self.setting) {
            (Serves::GpuMemory, _) => "device",
            (Serves::Files, _) => "disk",
            (Serves::HostMemory, _) | (Serves::Anything, Setting::OneProcess) => "system",
            (Serves::SharedMemory, _) | (Serves::Anything, Setting::TwoProcesses) => "shared",
        }
    }

    /// Whether words of the owner's storages can be acted on: neither on a GPU nor in a file.
    pub fn has_words(&self) -> bool {
        !matches!(self.kind(), "device" | "exportable" | "disk")
    }

    /// Whether the owner's storages can be pinned by the user.
    pub fn shares_memory(&self) -> bool {
        self.properties.shares_memory && self.has_words()
    }

    /// The path that does what this one cannot.
    pub fn helper(&self) -> Option<&'static str> {
        paths::helper(&self.properties)
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
        storage(len, self.both_kinds().1).unwrap()
    }

    /// What the owner's storages are, and the user's.
    fn both_kinds(&self) -> (&'static str, &'static str) {
        (self.kind(), self.kinds.map_or("system", |(_, user)| user))
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
        if self.properties.quiet_at_end {
            assert!(transfer.quiet(), "a transfer that has ended is quiet on {}", self.path);
        }
        assert!(transfer.wait_quiet(STALL * 2), "the engine does not let go");
        assert!(transfer.quiet());
    }

    /// The paths that act on words of shared memory of the same owner, each with its routing.
    pub fn all_paths(&self) -> Vec<Routing> {
        if forced().is_some() {
            return vec![routing(self.path)];
        }
        let acts = |one: &towline::PathInfo| {
            one.capabilities.contains(Capabilities::ATOMIC)
                && one.serves.has_words()
                && Setting::all_of(one).contains(&self.setting)
                && matches!(one.probe, Probe::Works(_))
        };
        towline::paths().iter().filter(|one| acts(one)).map(|one| routing(one.name)).collect()
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
