//! NCCL through `libnccl.so.2`: no headers and no library at build time. It needs no driver to be loaded and asked for its
//! version, for ids and for the texts of errors.
//!
//! # Where it is looked for
//! 1. The path given to [`Nccl::load_from`], or the one in the variable [`SETTING`] (`TOWLINE_NCCL`). Nothing else is tried
//!    then. `TOWLINE_NCCL=off` turns NCCL off.
//! 2. What this process has loaded already: two copies in one process know nothing of each other.
//! 3. The dynamic loader's path (`LD_LIBRARY_PATH`, `ldconfig`).
//! 4. The wheels `nvidia-nccl-cu12` and `nvidia-nccl-cu13`, in the same folders as NIXL's.
//!
//! Every function but `ncclGetVersion` is optional. One that is called and missing is an [`Error::TooOld`] that names the
//! version that has it. The test kit's fake is used only where it is named by 1.
//!
//! ```
//! use towline_sys::nccl::Nccl;
//!
//! match Nccl::load() {
//!     Ok(nccl) => println!("NCCL {} at {}", nccl.version_text(), nccl.path().display()),
//!     Err(error) => println!("{error}"),
//! }
//! ```

mod api;
mod comm;

use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

pub use api::{WaitDescription, code};
pub use comm::{BufferCalls, Call, Comm, Config, Put, Slot};

use crate::loader::{self, Attempt, Library, NotLoaded, Place};
use crate::nixl::find::{Surroundings, package_folders};
use crate::{Error, Result};
use api::{Api, RawId};

/// The file that is looked for.
const LIBRARY: &str = "libnccl.so.2";

/// Where it lies in a folder of Python packages.
const IN_PACKAGES: &str = "nvidia/nccl/lib/libnccl.so.2";

/// The variable that names the library; `off` turns NCCL off.
pub const SETTING: &str = "TOWLINE_NCCL";

/// A symbol that only the test kit's fake has.
const FAKE: &str = "towline_fake_nccl";

const MEND: &str = "Install NCCL (pip install nvidia-nccl-cu13), or name the library in TOWLINE_NCCL";

/// The oldest version whose functions are the ones that are called here.
const OLDEST: u32 = 21800;

/// The first version in which the one-sided calls have the signatures that are used here.
const SIGNALS: u32 = 22902;

/// The first version that is asked where another rank's memory of a window is mapped.
const MAPPED: u32 = 23000;

/// The first version with more than one context and signal.
const SEVERAL_SIGNALS: u32 = 23100;

/// The versions whose `ncclCommRegister` was seen to make no call of CUDA's, on a GPU.
const PLAIN: std::ops::Range<u32> = 22800..22900;

/// The variables that make NCCL look at pointers that it is given.
const CHECKS: [&str; 2] = ["NCCL_CHECK_POINTERS", "NCCL_CHECK_MODE"];

/// What this process uses, once that is known.
static FOUND: OnceLock<Result<Nccl>> = OnceLock::new();

/// Whether what was asked for has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// It has.
    Done,
    /// It goes on; the communicator is asked how far it is.
    InProgress,
}

/// NCCL, loaded. Cheap to clone.
#[derive(Clone)]
pub struct Nccl(Arc<Loaded>);

struct Loaded {
    api: Api,
    library: Library,
    path: PathBuf,
    version: u32,
    fake: bool,
    registers_plainly: bool,
}

impl Nccl {
    /// Loads NCCL from where it is found; the first result is kept for the life of the process.
    pub fn load() -> Result<Nccl> {
        FOUND.get_or_init(|| Nccl::search(&Surroundings::of_this_process())).clone()
    }

    /// Loads that file for the whole process, as if [`SETTING`] named it: [`Nccl::load`] gives it from then on.
    ///
    /// # Errors
    /// Where it cannot be loaded, or where another one is in use already.
    pub fn load_for_process(path: impl AsRef<Path>) -> Result<Nccl> {
        let nccl = FOUND.get_or_init(|| Nccl::load_from(&path)).clone()?;
        let wanted = path.as_ref().canonicalize().unwrap_or_else(|_| path.as_ref().to_owned());
        if nccl.path() != wanted {
            let message = format!("{} is in use already, not {}", nccl.path().display(), wanted.display());
            return Err(Error::argument("dlopen", message));
        }
        Ok(nccl)
    }

    /// Loads NCCL from that file, and from nowhere else.
    pub fn load_from(path: impl AsRef<Path>) -> Result<Nccl> {
        Nccl::open(vec![Place::file(path.as_ref(), "named by the program")], true)
    }

    fn search(here: &Surroundings) -> Result<Nccl> {
        match (here.variable)(SETTING) {
            Some(value) if ["off", "0", "no", "false"].iter().any(|no| value.eq_ignore_ascii_case(no)) => {
                let attempts = vec![Attempt {
                    origin: SETTING.to_owned(),
                    name: String::new(),
                    reason: "it says that NCCL is not to be used".into(),
                }];
                Err(NotLoaded { library: "NCCL", mend: String::new(), attempts }.into())
            }
            Some(path) => Nccl::open(vec![Place::file(PathBuf::from(path), SETTING)], true),
            None => Nccl::open(anywhere(here), false),
        }
    }

    fn open(places: Vec<Place>, named: bool) -> Result<Nccl> {
        let (library, (api, version, fake)) =
            loader::first("NCCL", places, MEND, |library| fill(library, named))?;
        // The loader knows the file that a bare name led to.
        let path = loader::file_at(api.version as usize).unwrap_or_else(|| library.name().into());
        let path = path.canonicalize().unwrap_or(path);
        let checks_set = CHECKS.iter().any(|name| std::env::var_os(name).is_some());
        let registers_plainly = PLAIN.contains(&version) && !checks_set;
        Ok(Nccl(Arc::new(Loaded { api, library, path, version, fake, registers_plainly })))
    }

    /// The file that was loaded.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Why it was looked for there.
    pub fn origin(&self) -> &str {
        self.0.library.origin()
    }

    /// Whether it is the test kit's fake.
    pub fn is_fake(&self) -> bool {
        self.0.fake
    }

    /// The version, 22809 for 2.28.9.
    #[inline]
    pub fn version(&self) -> u32 {
        self.0.version
    }

    /// The version, as `2.28.9`.
    pub fn version_text(&self) -> String {
        text(self.0.version)
    }

    /// Makes the id of a group. This process must live until every rank has joined.
    #[allow(unsafe_code, reason = "foreign calls")]
    pub fn unique_id(&self) -> Result<[u8; 128]> {
        let function = self.optional(self.api().unique_id, "ncclGetUniqueId", 20000)?;
        let mut id = RawId([0; 128]);
        // SAFETY: `id` outlives the call.
        self.check("ncclGetUniqueId", unsafe { function(&mut id) })?;
        Ok(id.0)
    }

    /// What NCCL says that a code means.
    #[allow(unsafe_code, reason = "foreign calls")]
    pub fn error_string(&self, code: i32) -> String {
        let Some(function) = self.api().error_string else { return code::name(code).to_owned() };
        // SAFETY: it takes a number, and gives out a constant of the library, which is never unloaded.
        let said = unsafe { function(code) };
        if said.is_null() {
            return code::name(code).to_owned();
        }
        // SAFETY: as above.
        unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned()
    }

    /// What NCCL said last about an error, in any thread; empty where it has said nothing.
    #[allow(unsafe_code, reason = "foreign calls")]
    pub fn last_words(&self) -> String {
        let Some(function) = self.api().last_error else { return String::new() };
        // SAFETY: it does not use the communicator, and gives out a place of the library that always ends in a zero.
        let said = unsafe { function(std::ptr::null_mut()) };
        if said.is_null() {
            return String::new();
        }
        // SAFETY: as above.
        unsafe { CStr::from_ptr(said) }.to_string_lossy().trim().to_owned()
    }

    /// What depends on the version, and whether this one has it.
    pub fn supports(&self) -> [(&'static str, bool); 7] {
        let api = self.api();
        let since = |has: bool, version: u32| has && self.version() >= version;
        [
            ("registered buffers", since(api.register.is_some(), api::REGISTER)),
            ("windows", since(api.window.is_some(), api::WINDOW)),
            ("shrink", since(api.shrink.is_some(), 22700)),
            ("all-to-all, gather, scatter", since(api.all_to_all.is_some(), 22800)),
            ("revoke", since(api.revoke.is_some(), 22809)),
            ("put with signal", since(api.put_signal.is_some(), SIGNALS)),
            ("put and get", since(api.peer_address.is_some(), MAPPED)),
        ]
    }

    /// Whether `ncclCommRegister` makes no call of CUDA's, so that it neither needs a context nor makes one current: 2.28 writes
    /// an entry into a list, and later versions look at the memory. Not if NCCL is set to check pointers.
    #[inline]
    pub fn registers_without_context(&self) -> bool {
        self.0.registers_plainly
    }

    #[inline]
    fn api(&self) -> &Api {
        &self.0.api
    }

    /// An optional function, or the error that says which version has it. What came before the release of a function may
    /// have one of another signature.
    #[inline]
    fn optional<F: Copy>(&self, function: Option<F>, symbol: &'static str, since: u32) -> Result<F> {
        match function {
            Some(function) if self.version() >= since => Ok(function),
            _ => Err(self.too_old(symbol, since)),
        }
    }

    /// The same of a function that is called often: one of a version before its release was forgotten when it was loaded.
    #[inline(always)]
    fn known<F: Copy>(&self, function: Option<F>, symbol: &'static str, since: u32) -> Result<F> {
        match function {
            Some(function) => Ok(function),
            None => Err(self.too_old(symbol, since)),
        }
    }

    #[cold]
    #[inline(never)]
    fn too_old(&self, symbol: &'static str, since: u32) -> Error {
        let (library, since) = (format!("NCCL {}", self.version_text()), format!("NCCL {}", text(since)));
        Error::TooOld { library, symbol, since }
    }

    #[inline]
    fn check(&self, call: &'static str, code: i32) -> Result<Progress> {
        if code == 0 { Ok(Progress::Done) } else { unusual(call, code) }
    }
}

impl std::fmt::Debug for Nccl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nccl").field("path", &self.0.path).field("version", &self.version_text()).finish()
    }
}

#[cold]
#[inline(never)]
fn unusual(call: &'static str, code: i32) -> Result<Progress> {
    match code {
        code::IN_PROGRESS => Ok(Progress::InProgress),
        code => Err(Error::Refused { call, code, name: code::name(code) }),
    }
}

fn text(version: u32) -> String {
    format!("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100)
}

/// Every place, in order.
fn anywhere(here: &Surroundings) -> Vec<Place> {
    let mut places = vec![Place::loaded(LIBRARY), Place::name(LIBRARY)];
    let packages = package_folders(here);
    let wheels = packages.iter().map(|(folder, origin)| (folder.join(IN_PACKAGES), origin));
    places.extend(
        wheels
            .filter(|(file, _)| file.exists())
            .map(|(file, origin)| Place::file(file, format!("a wheel in {origin}"))),
    );
    if places.len() == 2 {
        let looked = packages.iter().map(|(folder, _)| folder.display().to_string()).collect::<Vec<_>>();
        let reason = match looked.as_slice() {
            [] => "no site-packages folder was found".to_owned(),
            some => format!("no nvidia/nccl in {}", some.join(", ")),
        };
        places.push(Place::nothing("Python wheels", reason));
    }
    places
}

#[allow(unsafe_code, reason = "takes foreign functions by name")]
fn fill(library: &Library, named: bool) -> Result<(Api, u32, bool), String> {
    let fake = library.symbol(FAKE).is_some();
    if fake && !named {
        return Err(format!("it is a fake for tests, which is used only where {SETTING} names it"));
    }
    // SAFETY: NCCL keeps the signatures of its functions; those that changed before they were released are asked for by version.
    let mut api = unsafe { Api::fill(library) }.map_err(|missing| loader::missing_functions(&missing))?;
    let mut version = 0;
    // SAFETY: `version` outlives the call.
    let code = unsafe { (api.version)(&mut version) };
    if code != 0 {
        return Err(format!("ncclGetVersion returned {code} ({})", code::name(code)));
    }
    let version = u32::try_from(version).unwrap_or(0);
    // Before 2.9 a version had three digits less; anything from 3.0 on may differ in everything.
    if !(OLDEST..30000).contains(&version) {
        let version = if version < 10000 { version.to_string() } else { text(version) };
        return Err(format!("its version is {version}, and 2.18 to 2.x are known here"));
    }
    api.forget_what_came_after(version);
    Ok((api, version, fake))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn surroundings(setting: &'static str) -> Surroundings {
        let mut here = Surroundings::of_this_process();
        here.variable = Box::new(move |name| (name == SETTING).then(|| setting.into()));
        here
    }

    #[test]
    fn a_setting_that_says_off_is_reported_as_such() {
        let error = Nccl::search(&surroundings("Off")).unwrap_err();
        assert!(error.is_unavailable());
        let expected = "NCCL could not be loaded: TOWLINE_NCCL: it says that NCCL is not to be used";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn a_wrong_setting_is_an_error_and_nothing_else_is_tried() {
        let Err(Error::NotLoaded(why)) = Nccl::search(&surroundings("/nowhere/libnccl.so.2")) else {
            panic!("nothing is there")
        };
        assert_eq!(why.attempts.len(), 1);
        assert_eq!(why.attempts[0].name, "/nowhere/libnccl.so.2");
        assert_eq!(why.attempts[0].origin, SETTING);
    }

    #[test]
    fn a_library_that_is_not_nccl_is_refused_and_what_it_lacks_is_named() {
        let libc = loader::file_at(libc::getpid as *const () as usize).unwrap();
        let Err(Error::NotLoaded(why)) = Nccl::load_from(libc) else { panic!("the C library is no NCCL") };
        assert_eq!(why.attempts[0].reason, "it lacks the function ncclGetVersion");
    }

    #[test]
    fn the_order_is_loaded_then_path_then_wheels() {
        let folder = std::env::temp_dir().join(format!("towline-sys-nccl-{}", std::process::id()));
        let packages = folder.join("lib/python3.12/site-packages");
        let file = packages.join(IN_PACKAGES);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, "").unwrap();
        let mut here = surroundings("");
        let prefix = folder.clone();
        here.variable = Box::new(move |name| (name == "VIRTUAL_ENV").then(|| prefix.clone().into()));
        let places = anywhere(&here);
        let origins: Vec<_> = places.iter().map(Place::origin).take(3).collect();
        std::fs::remove_dir_all(&folder).unwrap();
        let expected = ["already loaded in this process", "the loader's path", "a wheel in VIRTUAL_ENV"];
        assert_eq!(origins, expected);
    }
}
