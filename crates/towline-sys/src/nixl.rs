//! NIXL through its C API, `libnixl_capi.so`: no headers, no C++ compiler, no library at build time.
//!
//! # Where it is looked for
//! 1. The path given to [`Nixl::load_from`], or the one in the variable [`SETTING`] (`TOWLINE_NIXL`): the library
//!    itself, its folder, a `site-packages` folder or a prefix. Nothing else is tried then. `TOWLINE_NIXL=off` turns NIXL off.
//! 2. What this process has loaded already.
//! 3. The dynamic loader's path (`LD_LIBRARY_PATH`, `ldconfig`).
//! 4. The wheels `nixl-cu12`, `nixl-cu13` and `nixl`, in the packages beside this one, `PYTHONPATH`, `VIRTUAL_ENV`,
//!    `CONDA_PREFIX`, those of each `python3` in `PATH`, the user's and the system's. No Python is run.
//! 5. The prefix in `NIXL_PREFIX`, `/opt/nvidia/nvda_nixl`, `/usr/local/nixl`.
//!
//! # What is done about known traps
//! * The wheel's UCX crashes the process at its end where the system has `libefa.so.1`: two copies of the verbs
//!   libraries get mixed. A library from a wheel is therefore loaded with `UCX_MODULES=^efa` in the environment,
//!   unless the variable is set: then it stays as it is.
//! * UCX's cache of registrations is switched off, unless `UCX_RCACHE_ENABLE` is set or the caller gives the parameter
//!   `engine_config`: it does not see memory that is unmapped without the C library, and then reaches pages that are gone.
//! * The library is never unloaded, and everything made by an agent keeps that agent alive.
//! * A request that NIXL will not let go of is kept, together with its agent; see [`Request::release`].

mod agent;
mod api;
pub(crate) mod find;
mod list;
mod options;
mod request;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

pub use agent::{Agent, AgentConfig, Backend, Notification, Plugin, Registration, ThreadSync};
pub use find::SETTING;
pub use list::{Descriptor, MemoryKind, Prepared, RegistrationList, TransferList};
pub use options::Options;
pub use request::{Cost, Direction, Progress, Request, Telemetry, Unreleased};

use crate::Result;
use crate::loader::{self, Library, NotLoaded, Place};
use api::Api;
use find::{LIBRARY, Surroundings, Wanted};

const MEND: &str = "Install NIXL (pip install nixl-cu12), or name the library or its folder in TOWLINE_NIXL";

/// A function of an older C API, whose descriptor lists are created with one argument more.
const OLDER_API: &str = "nixl_capi_xfer_dlist_is_sorted";

/// NIXL, loaded. Cheap to clone.
///
/// ```no_run
/// use towline_sys::nixl::{AgentConfig, Nixl};
///
/// let nixl = Nixl::load()?;
/// let agent = nixl.agent("prefill", &AgentConfig::default())?;
/// println!("NIXL {:?} with {:?}", nixl.version(), agent.plugins()?);
/// # Ok::<(), towline_sys::Error>(())
/// ```
#[derive(Clone)]
pub struct Nixl(Arc<Loaded>);

pub(crate) struct Loaded {
    pub(crate) api: Api,
    library: Library,
    path: PathBuf,
    version: Option<String>,
}

impl Nixl {
    /// Loads NIXL from where it is found; the first result is kept for the life of the process.
    pub fn load() -> Result<Nixl> {
        static FOUND: OnceLock<Result<Nixl>> = OnceLock::new();
        FOUND.get_or_init(|| Nixl::search(&Surroundings::of_this_process())).clone()
    }

    /// Loads NIXL from a library, its folder, a `site-packages` folder or a prefix, and from nowhere else.
    pub fn load_from(path: impl AsRef<Path>) -> Result<Nixl> {
        Nixl::open(find::named(path.as_ref(), "named by the program"))
    }

    fn search(here: &Surroundings) -> Result<Nixl> {
        match find::wanted(here) {
            Wanted::Off => {
                let attempts = vec![loader::Attempt {
                    origin: SETTING.to_owned(),
                    name: String::new(),
                    reason: "it is set to use no NIXL".into(),
                }];
                Err(NotLoaded { library: "NIXL", mend: String::new(), attempts }.into())
            }
            Wanted::Only(path, origin) => Nixl::open(find::named(&path, origin)),
            Wanted::Any => Nixl::open(find::anywhere(here)),
        }
    }

    fn open(places: Vec<Place>) -> Result<Nixl> {
        let (library, api) = loader::first("NIXL", places, MEND, fill)?;
        // The loader knows the file that a bare name led to.
        let path = Path::new(library.name())
            .is_absolute()
            .then(|| PathBuf::from(library.name()))
            .or_else(|| loader::file_at(api.destroy_agent as usize))
            .unwrap_or_else(|| library.name().into());
        let path = path.canonicalize().unwrap_or(path);
        if find::is_wheel(&path) {
            keep_efa_out();
        }
        let version = find::wheel_version(&path);
        Ok(Nixl(Arc::new(Loaded { api, library, path, version })))
    }

    /// The file that was loaded.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Why it was looked for there.
    pub fn origin(&self) -> &str {
        self.0.library.origin()
    }

    /// The version, where the library lies in a wheel; the C API itself does not say.
    pub fn version(&self) -> Option<&str> {
        self.0.version.as_deref()
    }

    /// Whether the library lies in a Python wheel, with a UCX of its own.
    pub fn is_wheel(&self) -> bool {
        find::is_wheel(&self.0.path)
    }

    /// Creates an agent of that name.
    ///
    /// NIXL accepts two agents of one name and then mixes them up: names must differ within a group of workers.
    pub fn agent(&self, name: &str, config: &AgentConfig) -> Result<Agent> {
        Agent::create(Arc::clone(&self.0), name, config)
    }
}

impl std::fmt::Debug for Nixl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nixl").field("path", &self.0.path).field("version", &self.0.version).finish()
    }
}

#[allow(unsafe_code, reason = "takes foreign functions by name")]
fn fill(library: &Library) -> Result<Api, String> {
    if library.symbol(OLDER_API).is_some() {
        return Err(format!("its C API is that of a NIXL before 1.0 (it has {OLDER_API})"));
    }
    // SAFETY: the signatures are those of NIXL 1.3 to 1.5, and a library with the older ones was refused above.
    let api = unsafe { Api::fill(library) }.map_err(|missing| loader::missing_functions(&missing))?;
    // SAFETY: it takes nothing and touches nothing.
    if api.is_stub.is_some_and(|is_stub| unsafe { is_stub() }) {
        return Err(format!("it is a stub of {LIBRARY} without NIXL behind it"));
    }
    Ok(api)
}

/// Keeps UCX from loading its module for EFA, unless the user has said which modules to load.
///
/// UCX reads the variable when an agent's plug-in loads it, which is after this.
#[allow(unsafe_code, reason = "changes the environment")]
fn keep_efa_out() {
    static ONCE: Mutex<()> = Mutex::new(());
    let _one = ONCE.lock();
    if std::env::var_os("UCX_MODULES").is_none() {
        // SAFETY: Rust code takes the same lock for the environment. C code that reads the environment in another
        // thread at this moment reads the old array, which glibc keeps unless it had grown it before; a program that
        // cannot exclude that sets UCX_MODULES itself, and nothing is changed here.
        unsafe { std::env::set_var("UCX_MODULES", "^efa") };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn a_setting_that_says_off_is_reported_as_such() {
        let mut here = Surroundings::of_this_process();
        here.variable = Box::new(|name| (name == SETTING).then(|| "off".into()));
        let error = Nixl::search(&here).unwrap_err();
        assert!(error.is_unavailable());
        assert_eq!(error.to_string(), "NIXL could not be loaded: TOWLINE_NIXL: it is set to use no NIXL");
    }

    #[test]
    fn a_wrong_setting_is_an_error_and_nothing_else_is_tried() {
        let mut here = Surroundings::of_this_process();
        here.variable = Box::new(|name| (name == SETTING).then(|| "/nowhere/libnixl_capi.so".into()));
        let Err(Error::NotLoaded(why)) = Nixl::search(&here) else { panic!("nothing is there") };
        assert_eq!(why.attempts.len(), 1);
        assert_eq!(why.attempts[0].name, "/nowhere/libnixl_capi.so");
        assert_eq!(why.attempts[0].origin, SETTING);
    }
}
