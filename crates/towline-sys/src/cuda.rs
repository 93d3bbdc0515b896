//! The CUDA driver through `libcuda.so.1`: no toolkit, no runtime library, nothing at build time.
//!
//! # Where it is looked for
//! 1. The path given to [`Cuda::load_from`], or the one in the variable [`SETTING`] (`TOWLINE_CUDA`). Nothing else is
//!    tried then. `TOWLINE_CUDA=off` turns CUDA off.
//! 2. What this process has loaded already.
//! 3. The dynamic loader's path (`LD_LIBRARY_PATH`, `ldconfig`).
//! 4. Folders into which drivers are installed or mounted without an entry for the loader.
//!
//! The test kit's fake of the driver is used only where it is named by 1.
//!
//! # What needs a current context
//! A thread has a stack of contexts, and most calls act on the top one. [`Context::enter`] pushes a context and takes it
//! off again when [`Entered`] is dropped, so that the caller's own current context is what it was. What needs one is a
//! method of [`Entered`].
//!
//! ```
//! use towline_sys::cuda::Cuda;
//!
//! match Cuda::load().and_then(|cuda| cuda.device_count()) {
//!     Ok(devices) => println!("{devices} devices"),
//!     Err(error) => println!("{error}"),
//! }
//! ```

mod api;
mod device;
mod memory;
mod pages;
mod stream;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

pub use api::code;
pub use device::{Attribute, Context, ContextName, Device, Entered};
pub use memory::{HostFlags, IpcHandle, MemoryType, PointerFacts};
pub use pages::{Allocation, Granularity};
pub use stream::{Event, Function, Module, Stream, StreamHandle};

use crate::loader::{self, Attempt, Library, NotLoaded, Place};
use crate::{Error, Result};
use api::Api;

/// The file that is looked for.
const LIBRARY: &str = "libcuda.so.1";

/// The variable that names the driver's library; `off` turns CUDA off.
pub const SETTING: &str = "TOWLINE_CUDA";

/// A symbol that only the test kit's fake has.
const FAKE: &str = "towline_fake_cuda";

const MEND: &str = "Install the NVIDIA driver; in a container, start it with the GPUs (--gpus all). TOWLINE_CUDA names a library elsewhere";

/// Folders into which drivers are installed or mounted without an entry for the dynamic loader.
const FOLDERS: [&str; 5] = [
    "/usr/local/nvidia/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/wsl/lib",
];

/// The oldest driver whose functions are the ones that are called here: that of CUDA 11.4.
const OLDEST: u32 = 11040;

/// What this process uses, once that is known.
static FOUND: OnceLock<Result<Cuda>> = OnceLock::new();

/// The CUDA driver, loaded. Cheap to clone.
#[derive(Clone)]
pub struct Cuda(Arc<Loaded>);

pub(crate) struct Loaded {
    pub(crate) api: Api,
    library: Library,
    path: PathBuf,
    fake: bool,
    version: OnceLock<Result<u32>>,
}

impl Cuda {
    /// Loads the driver from where it is found; the first result is kept for the life of the process.
    ///
    /// This starts nothing on a device. The first call that needs one does ([`Cuda::init`]).
    pub fn load() -> Result<Cuda> {
        FOUND
            .get_or_init(|| Cuda::search(std::env::var_os(SETTING).filter(|value| !value.is_empty())))
            .clone()
    }

    /// Loads that file for the whole process, as if [`SETTING`] named it: [`Cuda::load`] gives it from then on.
    ///
    /// # Errors
    /// Where it cannot be loaded, or where another one is loaded already.
    pub fn load_for_process(path: impl AsRef<Path>) -> Result<Cuda> {
        let cuda = FOUND.get_or_init(|| Cuda::load_from(&path)).clone()?;
        let wanted = path.as_ref().canonicalize().unwrap_or_else(|_| path.as_ref().to_owned());
        if cuda.path() != wanted {
            let message = format!("{} is in use already, not {}", cuda.path().display(), wanted.display());
            return Err(Error::argument("dlopen", message));
        }
        Ok(cuda)
    }

    /// Loads the driver from that file, and from nowhere else.
    pub fn load_from(path: impl AsRef<Path>) -> Result<Cuda> {
        Cuda::open(vec![Place::file(path.as_ref(), "named by the program")], true)
    }

    fn search(setting: Option<std::ffi::OsString>) -> Result<Cuda> {
        match setting {
            Some(value) if ["off", "0", "no", "false"].iter().any(|no| value.eq_ignore_ascii_case(no)) => {
                let attempts = vec![Attempt {
                    origin: SETTING.to_owned(),
                    name: String::new(),
                    reason: "it says that CUDA is not to be used".into(),
                }];
                Err(NotLoaded { library: "the CUDA driver", mend: String::new(), attempts }.into())
            }
            Some(path) => Cuda::open(vec![Place::file(PathBuf::from(path), SETTING)], true),
            None => {
                let mut places = vec![Place::loaded(LIBRARY), Place::name(LIBRARY)];
                let files = FOLDERS.map(|folder| Path::new(folder).join(LIBRARY));
                places.extend(
                    files
                        .iter()
                        .filter(|file| file.exists())
                        .map(|file| Place::file(file, "a folder of drivers")),
                );
                if places.len() == 2 {
                    let reason = format!("no {LIBRARY} in {}", FOLDERS.join(", "));
                    places.push(Place::nothing("folders of drivers", reason));
                }
                Cuda::open(places, false)
            }
        }
    }

    fn open(places: Vec<Place>, named: bool) -> Result<Cuda> {
        let (library, (api, fake)) =
            loader::first("the CUDA driver", places, MEND, |library| fill(library, named))?;
        // The loader knows the file that a bare name led to.
        let path = loader::file_at(api.init as usize).unwrap_or_else(|| library.name().into());
        let path = path.canonicalize().unwrap_or(path);
        Ok(Cuda(Arc::new(Loaded { api, library, path, fake, version: OnceLock::new() })))
    }

    /// The file that was loaded.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Why it was looked for there.
    pub fn origin(&self) -> &str {
        self.0.library.origin()
    }

    /// Whether it is the test kit's fake, which has no GPU behind it.
    pub fn is_fake(&self) -> bool {
        self.0.fake
    }

    /// Starts the driver; the first result is kept. Every call that needs a device begins with it.
    ///
    /// Returns the version of CUDA that the driver is made for, 13000 for 13.0.
    ///
    /// # Errors
    /// The driver's own refusal (no device, a stub, a driver that does not match its kernel module), or that it is older
    /// than CUDA 11.4.
    #[allow(unsafe_code, reason = "foreign calls")]
    pub fn init(&self) -> Result<u32> {
        let start = || {
            let api = &self.0.api;
            // SAFETY: it takes no pointer.
            api.check("cuInit", unsafe { (api.init)(0) })?;
            let mut version = 0;
            // SAFETY: `version` outlives the call.
            api.check("cuDriverGetVersion", unsafe { (api.driver_version)(&mut version) })?;
            let version = u32::try_from(version).unwrap_or(0);
            if version < OLDEST {
                let message = format!(
                    "the driver is for CUDA {}.{}, and 11.4 is the oldest that serves",
                    version / 1000,
                    version % 1000 / 10
                );
                return Err(Error::argument("cuDriverGetVersion", message));
            }
            Ok(version)
        };
        self.0.version.get_or_init(start).clone()
    }

    /// How many devices there are.
    #[allow(unsafe_code, reason = "foreign calls")]
    pub fn device_count(&self) -> Result<u32> {
        self.init()?;
        let mut count = 0;
        // SAFETY: `count` outlives the call.
        self.api().check("cuDeviceGetCount", unsafe { (self.api().device_count)(&mut count) })?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    pub(crate) fn api(&self) -> &Api {
        &self.0.api
    }

    /// An optional function, or the error that says that this driver lacks it.
    pub(crate) fn optional<F: Copy>(&self, function: Option<F>, symbol: &'static str) -> Result<F> {
        function.ok_or(Error::Lacks { library: "CUDA driver", symbol })
    }
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cuda").field("path", &self.0.path).field("fake", &self.0.fake).finish()
    }
}

#[allow(unsafe_code, reason = "takes foreign functions by name")]
fn fill(library: &Library, named: bool) -> Result<(Api, bool), String> {
    let fake = library.symbol(FAKE).is_some();
    if fake && !named {
        return Err(format!("it is a fake for tests, which is used only where {SETTING} names it"));
    }
    // SAFETY: the driver keeps the signatures of its functions for all versions; a changed one gets a new name.
    let api = unsafe { Api::fill(library) }.map_err(|missing| loader::missing_functions(&missing))?;
    Ok((api, fake))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_that_says_off_is_reported_as_such() {
        let error = Cuda::search(Some("OFF".into())).unwrap_err();
        assert!(error.is_unavailable());
        assert_eq!(
            error.to_string(),
            "the CUDA driver could not be loaded: TOWLINE_CUDA: it says that CUDA is not to be used"
        );
    }

    #[test]
    fn a_wrong_setting_is_an_error_and_nothing_else_is_tried() {
        let Err(Error::NotLoaded(why)) = Cuda::search(Some("/nowhere/libcuda.so.1".into())) else {
            panic!("nothing is there")
        };
        assert_eq!(why.attempts.len(), 1);
        assert_eq!(why.attempts[0].name, "/nowhere/libcuda.so.1");
        assert_eq!(why.attempts[0].origin, SETTING);
    }

    #[test]
    fn a_library_that_is_not_the_driver_is_refused_and_what_it_lacks_is_named() {
        let libc = loader::file_at(libc::getpid as *const () as usize).unwrap();
        let Err(Error::NotLoaded(why)) = Cuda::load_from(libc) else { panic!("the C library is no driver") };
        assert!(why.attempts[0].reason.starts_with("it lacks the functions cuInit, "), "{why}");
    }

    #[test]
    fn codes_after_which_a_context_is_lost_are_known() {
        assert!(code::context_lost(code::ILLEGAL_ADDRESS));
        assert!(code::context_lost(719));
        assert!(!code::context_lost(code::NOT_READY));
        assert!(!code::context_lost(code::OUT_OF_MEMORY));
    }
}
