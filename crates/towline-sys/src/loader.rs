//! Finding and loading a library: places in order, the reason for each that failed, tables of functions.
#![allow(unsafe_code, reason = "loads foreign code and takes its functions by name")]

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

/// glibc's number; `libc` has it too, and `libloading` takes it as a plain flag.
const RTLD_NOLOAD: i32 = libc::RTLD_NOLOAD;

/// One place where a library may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    what: Source,
    origin: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Source {
    /// A library of that name which this process has loaded already.
    Loaded(OsString),
    /// A bare name, left to the dynamic loader's own search.
    Name(OsString),
    /// A file.
    File(PathBuf),
    /// A place in which nothing has the right name.
    Nothing(String),
}

impl Place {
    /// A library of that name which this process has loaded already.
    pub fn loaded(name: impl Into<OsString>) -> Place {
        Place { what: Source::Loaded(name.into()), origin: "already loaded in this process".into() }
    }

    /// A bare name, looked up in the dynamic loader's path.
    pub fn name(name: impl Into<OsString>) -> Place {
        Place { what: Source::Name(name.into()), origin: "the loader's path".into() }
    }

    /// A file; `origin` says why it is looked at.
    pub fn file(path: impl Into<PathBuf>, origin: impl Into<String>) -> Place {
        Place { what: Source::File(path.into()), origin: origin.into() }
    }

    /// A place that was looked through in vain.
    pub fn nothing(origin: impl Into<String>, reason: impl Into<String>) -> Place {
        Place { what: Source::Nothing(reason.into()), origin: origin.into() }
    }

    /// Why this place is looked at.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    fn open(&self) -> Result<Handle, String> {
        let (name, flags): (&OsStr, _) = match &self.what {
            Source::Loaded(name) => (name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD),
            Source::Name(name) => (name, RTLD_NOW | RTLD_LOCAL),
            Source::File(path) => {
                // The loader's own words for a missing file name neither the cause nor, at times, the file.
                path.metadata().map_err(|error| error.to_string())?;
                (path.as_os_str(), RTLD_NOW | RTLD_LOCAL)
            }
            Source::Nothing(reason) => return Err(reason.clone()),
        };
        // SAFETY: the initialisers of the library run here; that it is the library it claims to be is what the user
        // vouches for by having installed or named it. It is never unloaded (see `Library`).
        unsafe { Handle::open(Some(name), flags) }.map_err(|error| match (&self.what, cause(&error)) {
            (Source::Loaded(_), _) => "it is not".into(),
            (_, Some(words)) => words,
            (_, None) => error.to_string(),
        })
    }

    fn shown(&self) -> String {
        match &self.what {
            Source::Loaded(name) | Source::Name(name) => name.to_string_lossy().into_owned(),
            Source::File(path) => path.display().to_string(),
            Source::Nothing(_) => String::new(),
        }
    }
}

/// What the dynamic loader said.
fn cause(error: &libloading::Error) -> Option<String> {
    std::error::Error::source(error).map(ToString::to_string)
}

/// One place that was tried in vain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// Why the place was looked at.
    pub origin: String,
    /// The name or file that was tried; empty where there was none to try.
    pub name: String,
    /// Why it failed.
    pub reason: String,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.name.is_empty() {
            write!(f, "{}: {}", self.origin, self.reason)
        } else {
            write!(f, "{} ({}): {}", self.name, self.origin, self.reason)
        }
    }
}

/// A library was found nowhere, or nowhere in a form that can be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotLoaded {
    /// The library.
    pub library: &'static str,
    /// What would mend it.
    pub mend: String,
    /// Every place, in the order in which they were tried.
    pub attempts: Vec<Attempt>,
}

impl fmt::Display for NotLoaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} could not be loaded", self.library)?;
        for (index, attempt) in self.attempts.iter().enumerate() {
            write!(f, "{} {attempt}", if index == 0 { ":" } else { ";" })?;
        }
        if !self.mend.is_empty() {
            write!(f, ". {}", self.mend)?;
        }
        Ok(())
    }
}

impl std::error::Error for NotLoaded {}

/// A loaded library. It stays loaded until the process ends: threads and handlers of it may outlive every user.
pub struct Library {
    handle: std::mem::ManuallyDrop<Handle>,
    origin: String,
    shown: String,
}

impl Library {
    /// Why it was looked for where it was found.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The name or file by which it was loaded.
    pub fn name(&self) -> &str {
        &self.shown
    }

    /// The address of a symbol.
    pub(crate) fn symbol(&self, name: &str) -> Option<*mut libc::c_void> {
        // SAFETY: only the address is taken here; who turns it into a function states its type.
        let symbol = unsafe { self.handle.get::<*mut libc::c_void>(name) }.ok()?;
        Some(symbol.into_raw()).filter(|address| !address.is_null())
    }
}

/// Loads the first library among `places` from which `table` can be filled.
///
/// `table` is asked with each library that opens, and answers with the reason when it cannot be used.
pub(crate) fn first<T>(
    library: &'static str,
    places: Vec<Place>,
    mend: &str,
    mut table: impl FnMut(&Library) -> Result<T, String>,
) -> Result<(Library, T), NotLoaded> {
    let mut attempts = Vec::new();
    for place in places {
        let opened = place.open().map(|handle| Library {
            handle: std::mem::ManuallyDrop::new(handle),
            origin: place.origin.clone(),
            shown: place.shown(),
        });
        match opened.and_then(|library| table(&library).map(|table| (library, table))) {
            Ok(found) => return Ok(found),
            Err(reason) => {
                let reason = reason.replace('\n', " ");
                attempts.push(Attempt { origin: place.origin.clone(), name: place.shown(), reason });
            }
        }
    }
    Err(NotLoaded { library, mend: mend.to_owned(), attempts })
}

/// Says which of the required functions are missing, a few by name.
pub(crate) fn missing_functions(missing: &[&'static str]) -> String {
    let named = missing.iter().take(4).copied().collect::<Vec<_>>().join(", ");
    match missing.len().saturating_sub(4) {
        0 => format!("it lacks the function {named}"),
        more => format!("it lacks the functions {named} and {more} more"),
    }
}

/// Declares a table of a library's functions and how it is filled.
///
/// Functions under `required` are plain pointers, those under `optional` are `Option`s. The text is the name of the symbol.
macro_rules! function_table {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident {
            required { $($field:ident: $symbol:literal = fn($($arg:ty),* $(,)?) -> $ret:ty;)* }
            optional { $($ofield:ident: $osymbol:literal = fn($($oarg:ty),* $(,)?) -> $oret:ty;)* }
        }
    ) => {
        $(#[$meta])*
        $vis struct $name {
            $(pub(crate) $field: unsafe extern "C" fn($($arg),*) -> $ret,)*
            $(pub(crate) $ofield: Option<unsafe extern "C" fn($($oarg),*) -> $oret>,)*
        }

        impl $name {
            /// Fills the table, or names the required functions that the library lacks.
            ///
            /// # Safety
            /// The library's functions of these names have these signatures.
            $vis unsafe fn fill(library: &$crate::loader::Library) -> Result<$name, Vec<&'static str>> {
                let missing: Vec<&'static str> =
                    [$($symbol),*].into_iter().filter(|name| library.symbol(name).is_none()).collect();
                if !missing.is_empty() {
                    return Err(missing);
                }
                Ok($name {
                    $($field: match library.symbol($symbol) {
                        // SAFETY: not null, and of this signature by the contract of this function.
                        Some(address) => unsafe {
                            std::mem::transmute::<
                                *mut libc::c_void,
                                unsafe extern "C" fn($($arg),*) -> $ret,
                            >(address)
                        },
                        None => return Err(vec![$symbol]),
                    },)*
                    $($ofield: library.symbol($osymbol).map(|address| {
                        // SAFETY: as above.
                        unsafe {
                            std::mem::transmute::<
                                *mut libc::c_void,
                                unsafe extern "C" fn($($oarg),*) -> $oret,
                            >(address)
                        }
                    }),)*
                })
            }
        }
    };
}
pub(crate) use function_table;

/// The file that holds the library whose mapped file name ends in `name`, when this process has it loaded.
pub(crate) fn mapped_file(name: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    mapped_files(&maps).find(|path| path.file_name().is_some_and(|file| file == name)).map(Path::to_path_buf)
}

/// The file whose mapping holds `address`: the executable or library that the address is in.
pub(crate) fn file_at(address: usize) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
        range.contains(&address).then(|| mapped_files(line).next().map(Path::to_path_buf))?
    })
}

fn mapped_files(maps: &str) -> impl Iterator<Item = &Path> {
    maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_that_failed_is_listed_with_its_reason() {
        let places = vec![
            Place::loaded("libtowline-none.so"),
            Place::name("libtowline-none.so"),
            Place::file("/nowhere/libtowline-none.so", "a setting"),
            Place::file("/etc/passwd", "a setting"),
            Place::nothing("Python's packages", "there are none"),
        ];
        let Err(error) = first("Nothing", places, "Install it", |_| Ok::<(), _>(())) else {
            panic!("nothing should be found");
        };
        assert_eq!(error.attempts.len(), 5);
        let text = error.to_string();
        for part in [
            "Nothing could not be loaded: libtowline-none.so (already loaded in this process): it is not; ",
            "libtowline-none.so (the loader's path): libtowline-none.so: cannot open shared object file",
            "/nowhere/libtowline-none.so (a setting): No such file or directory",
            "/etc/passwd (a setting): /etc/passwd: invalid ELF header",
            "Python's packages: there are none. Install it",
        ] {
            assert!(text.contains(part), "{part:?} is not in {text:?}");
        }
    }

    #[test]
    fn a_library_that_does_not_fill_the_table_is_passed_over() {
        let places = vec![Place::name("libc.so.6"), Place::name("libm.so.6")];
        let (library, cos) = first("Mathematics", places, "", |library| {
            library.symbol("cos").ok_or_else(|| missing_functions(&["cos"]))
        })
        .unwrap();
        assert_eq!(library.name(), "libm.so.6");
        assert!(!cos.is_null());
        assert!(library.symbol("towline_none").is_none());
    }

    #[test]
    fn missing_functions_are_named_but_not_all_hundred() {
        assert_eq!(missing_functions(&["a"]), "it lacks the function a");
        assert_eq!(
            missing_functions(&["a", "b", "c", "d", "e", "f"]),
            "it lacks the functions a, b, c, d and 2 more"
        );
    }

    #[test]
    fn the_file_of_a_function_is_the_one_that_is_running() {
        let here = file_at(the_file_of_a_function_is_the_one_that_is_running as *const () as usize).unwrap();
        assert_eq!(here, std::env::current_exe().unwrap());
        assert!(mapped_file("libtowline-none.so").is_none());
    }
}
