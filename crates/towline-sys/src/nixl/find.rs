//! Where `libnixl_capi.so` may be: the setting, what is loaded, the loader's path, Python wheels, a prefix.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use crate::loader::{Place, file_at, mapped_file};

/// The file that is looked for.
pub(crate) const LIBRARY: &str = "libnixl_capi.so";

/// The variable that names the library, or a folder that holds it; `off` turns NIXL off.
pub const SETTING: &str = "TOWLINE_NIXL";

/// The wheels that bring the library, in order of preference, as their folders in `site-packages` are called.
const WHEEL_FOLDERS: [&str; 3] = [".nixl_cu12.mesonpy.libs", ".nixl_cu13.mesonpy.libs", ".nixl.mesonpy.libs"];

/// Prefixes into which NIXL installs itself, after the one that `NIXL_PREFIX` names.
const PREFIXES: [&str; 2] = ["/opt/nvidia/nvda_nixl", "/usr/local/nixl"];

/// Looks up a variable of the environment; an empty one counts as unset.
type Variables = Box<dyn Fn(&str) -> Option<OsString>>;

/// What the search depends on. Taken from the process, or made up by a test.
pub(crate) struct Surroundings {
    pub(crate) variable: Variables,
    /// The library or executable that this code is in; in a Python package, that says where the packages are.
    pub(crate) own_file: Option<PathBuf>,
    /// The `libnixl.so` that this process has loaded already, for instance by importing the wheel.
    pub(crate) loaded: Option<PathBuf>,
    pub(crate) prefixes: Vec<PathBuf>,
    pub(crate) system_python: Vec<PathBuf>,
}

impl Surroundings {
    pub(crate) fn of_this_process() -> Surroundings {
        Surroundings {
            variable: Box::new(|name| std::env::var_os(name).filter(|value| !value.is_empty())),
            own_file: file_at(Surroundings::of_this_process as *const () as usize),
            loaded: mapped_file("libnixl.so"),
            prefixes: PREFIXES.map(PathBuf::from).to_vec(),
            system_python: vec!["/usr/local".into(), "/usr".into()],
        }
    }

    fn path(&self, name: &str) -> Option<PathBuf> {
        (self.variable)(name).map(PathBuf::from)
    }
}

/// What the setting says.
pub(crate) enum Wanted {
    /// NIXL is turned off.
    Off,
    /// Only this file or folder.
    Only(PathBuf, &'static str),
    /// Whatever is found.
    Any,
}

pub(crate) fn wanted(here: &Surroundings) -> Wanted {
    match (here.variable)(SETTING) {
        Some(value) if ["off", "0", "no", "false"].iter().any(|no| value.eq_ignore_ascii_case(no)) => {
            Wanted::Off
        }
        Some(value) => Wanted::Only(value.into(), SETTING),
        None => Wanted::Any,
    }
}

/// The places to try for a file or folder that was named: those and no others, so that a wrong setting shows.
pub(crate) fn named(path: &Path, origin: &str) -> Vec<Place> {
    if !path.is_dir() {
        return vec![Place::file(path, origin)];
    }
    let inside: Vec<_> = std::iter::once(path.join(LIBRARY))
        .chain(WHEEL_FOLDERS.iter().map(|folder| path.join(folder).join(LIBRARY)))
        .chain(in_prefix(path))
        .filter(|file| file.exists())
        .map(|file| Place::file(file, origin))
        .collect();
    if inside.is_empty() {
        let reason = format!("{} holds no {LIBRARY}, no wheel's libraries and no lib folder", path.display());
        return vec![Place::nothing(origin, reason)];
    }
    inside
}

/// Every place, in order.
pub(crate) fn anywhere(here: &Surroundings) -> Vec<Place> {
    let mut places = vec![Place::loaded(LIBRARY)];
    if let Some(folder) = here.loaded.as_deref().and_then(Path::parent) {
        let origin = "beside the libnixl.so that this process has loaded";
        places.push(Place::file(folder.join(LIBRARY), origin));
    }
    places.push(Place::name(LIBRARY));

    let packages = package_folders(here);
    let mut wheels = Vec::new();
    for (folder, origin) in &packages {
        for wheel in WHEEL_FOLDERS {
            let file = folder.join(wheel).join(LIBRARY);
            if file.exists() {
                wheels.push(Place::file(file, format!("a wheel in {origin}")));
            }
        }
    }
    if wheels.is_empty() {
        let looked = packages.iter().map(|(folder, _)| folder.display().to_string()).collect::<Vec<_>>();
        let reason = match looked.as_slice() {
            [] => "no site-packages folder was found".to_owned(),
            some => format!("no nixl-cu12, nixl-cu13 or nixl in {}", some.join(", ")),
        };
        wheels.push(Place::nothing("Python wheels", reason));
    }
    places.extend(wheels);

    let named_prefix = here.path("NIXL_PREFIX");
    let mut prefixes = Vec::new();
    for prefix in named_prefix.iter().chain(&here.prefixes) {
        let origin = if named_prefix.as_ref() == Some(prefix) { "NIXL_PREFIX" } else { "a NIXL prefix" };
        prefixes.extend(in_prefix(prefix).filter(|file| file.exists()).map(|file| Place::file(file, origin)));
    }
    if prefixes.is_empty() {
        let looked: Vec<_> =
            named_prefix.iter().chain(&here.prefixes).map(|prefix| prefix.display().to_string()).collect();
        prefixes.push(Place::nothing("NIXL prefixes", format!("no {LIBRARY} in {}", looked.join(", "))));
    }
    places.extend(prefixes);
    places
}

fn in_prefix(prefix: &Path) -> impl Iterator<Item = PathBuf> {
    let multiarch = format!("lib/{}-linux-gnu", std::env::consts::ARCH);
    ["lib".to_owned(), "lib64".to_owned(), multiarch]
        .map(|folder| prefix.join(folder).join(LIBRARY))
        .into_iter()
}

/// The folders of Python packages that a program started from here would see, each with what led to it.
pub(crate) fn package_folders(here: &Surroundings) -> Vec<(PathBuf, String)> {
    let mut found: Vec<(PathBuf, String)> = Vec::new();
    let mut add = |folder: PathBuf, origin: &str| {
        // `/lib` is `/usr/lib` on most systems, and a folder is listed once.
        let Ok(folder) = folder.canonicalize() else { return };
        if folder.is_dir() && !found.iter().any(|(known, _)| *known == folder) {
            found.push((folder, origin.to_owned()));
        }
    };
    // Where this code is itself part of a package, its neighbours are the right ones.
    let beside = here.own_file.as_deref().and_then(Path::parent).and_then(Path::parent);
    if let Some(folder) = beside.filter(|folder| is_package_folder(folder)) {
        add(folder.to_owned(), "the packages beside this one");
    }
    for entry in here.path("PYTHONPATH").iter().flat_map(std::env::split_paths) {
        add(entry, "PYTHONPATH");
    }
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        for folder in here.path(variable).iter().flat_map(|prefix| packages_under(prefix)) {
            add(folder, variable);
        }
    }
    for python in
        here.path("PATH").iter().flat_map(std::env::split_paths).map(|folder| folder.join("python3"))
    {
        // A virtual environment's interpreter is a link out of it: the folder of the link is looked at first.
        let resolved = python.canonicalize().ok();
        for file in [resolved.is_some().then_some(python), resolved].into_iter().flatten() {
            for folder in
                file.parent().and_then(Path::parent).iter().flat_map(|prefix| packages_under(prefix))
            {
                add(folder, "the packages of python3");
            }
        }
    }
    for folder in here.path("HOME").iter().flat_map(|home| packages_under(&home.join(".local"))) {
        add(folder, "the user's packages");
    }
    for folder in here.system_python.iter().flat_map(|prefix| packages_under(prefix)) {
        add(folder, "the system's packages");
    }
    found
}

fn is_package_folder(folder: &Path) -> bool {
    folder.file_name().is_some_and(|name| name == "site-packages" || name == "dist-packages")
}

/// `lib*/python3*/{site,dist}-packages` of a prefix, the newest Python first.
fn packages_under(prefix: &Path) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for lib in ["lib", "lib64"].map(|lib| prefix.join(lib)) {
        let mut pythons: Vec<_> = std::fs::read_dir(&lib)
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| name.starts_with("python3"))
            .collect();
        pythons.sort_by_key(|name| std::cmp::Reverse(minor_version(name)));
        for python in pythons {
            for packages in ["site-packages", "dist-packages"] {
                let folder = lib.join(&python).join(packages);
                if folder.is_dir() {
                    folders.push(folder);
                }
            }
        }
    }
    folders
}

fn minor_version(python: &str) -> u32 {
    let digits = |c: char| !c.is_ascii_digit();
    python.split_once('.').and_then(|(_, minor)| minor.trim_end_matches(digits).parse().ok()).unwrap_or(0)
}

/// The version of the wheel that a library lies in, by the name of the `.dist-info` folder beside it.
pub(crate) fn wheel_version(library: &Path) -> Option<String> {
    let folder = library.parent()?;
    let wheel = wheel_name(folder.file_name()?)?;
    std::fs::read_dir(folder.parent()?).ok()?.find_map(|entry| {
        let name = entry.ok()?.file_name().into_string().ok()?;
        let rest = name.strip_suffix(".dist-info")?;
        let (package, version) = rest.split_once('-')?;
        (package == wheel).then(|| version.to_owned())
    })
}

/// Whether a library lies in a wheel, which brings its own renamed copies of UCX and of the verbs libraries.
pub(crate) fn is_wheel(library: &Path) -> bool {
    library.parent().and_then(Path::file_name).is_some_and(|folder| wheel_name(folder).is_some())
}

fn wheel_name(folder: &OsStr) -> Option<&str> {
    folder.to_str()?.strip_prefix('.')?.strip_suffix(".mesonpy.libs")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A folder that goes away with the test.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("towline-sys-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(&path).unwrap();
            Folder(path)
        }

        fn with(&self, file: &str) -> PathBuf {
            let file = self.0.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(&file, "").unwrap();
            file
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn surroundings(variables: &[(&'static str, PathBuf)]) -> Surroundings {
        let variables = variables.to_vec();
        Surroundings {
            variable: Box::new(move |name| {
                variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone().into())
            }),
            own_file: None,
            loaded: None,
            prefixes: vec![],
            system_python: vec![],
        }
    }

    fn shown(places: &[Place]) -> Vec<String> {
        places.iter().map(|place| format!("{place:?}")).collect()
    }

    #[test]
    fn a_wheel_in_a_virtual_environment_is_found_by_its_variable() {
        let folder = Folder::new("venv");
        let file = folder.with("lib/python3.12/site-packages/.nixl_cu13.mesonpy.libs/libnixl_capi.so");
        let places = anywhere(&surroundings(&[("VIRTUAL_ENV", folder.0.clone())]));
        assert!(places.contains(&Place::file(file, "a wheel in VIRTUAL_ENV")), "{:?}", shown(&places));
    }

    #[test]
    fn a_wheel_is_found_through_the_python_in_the_path_and_beside_this_package() {
        let folder = Folder::new("path");
        let file = folder.with("lib/python3.11/site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so");
        folder.with("bin/python3");
        let places = anywhere(&surroundings(&[("PATH", folder.0.join("bin"))]));
        assert!(places.contains(&Place::file(&file, "a wheel in the packages of python3")));

        let mut here = surroundings(&[]);
        here.own_file = Some(folder.0.join("lib/python3.11/site-packages/towline/_native.abi3.so"));
        let places = anywhere(&here);
        assert!(places.contains(&Place::file(&file, "a wheel in the packages beside this one")));
    }

    #[test]
    fn the_order_is_loaded_then_path_then_wheel_then_prefix() {
        let folder = Folder::new("order");
        let wheel = folder.with("lib/python3.9/site-packages/.nixl.mesonpy.libs/libnixl_capi.so");
        folder.with("lib/python3.10/site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so");
        let prefix = folder.with("prefix/lib64/libnixl_capi.so");
        let mut here =
            surroundings(&[("VIRTUAL_ENV", folder.0.clone()), ("NIXL_PREFIX", folder.0.join("prefix"))]);
        here.loaded = Some(folder.0.join("elsewhere/libnixl.so"));
        let places = anywhere(&here);
        let origins: Vec<_> = places.iter().map(Place::origin).collect();
        assert_eq!(
            origins,
            [
                "already loaded in this process",
                "beside the libnixl.so that this process has loaded",
                "the loader's path",
                "a wheel in VIRTUAL_ENV",
                "a wheel in VIRTUAL_ENV",
                "NIXL_PREFIX"
            ]
        );
        assert_eq!(places[4], Place::file(wheel, "a wheel in VIRTUAL_ENV"), "the newest Python goes first");
        assert_eq!(places[5], Place::file(prefix, "NIXL_PREFIX"));
    }

    #[test]
    fn a_setting_can_be_the_file_its_folder_the_packages_or_a_prefix() {
        let folder = Folder::new("setting");
        let file = folder.with("packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so");
        let prefix = folder.with("prefix/lib/libnixl_capi.so");
        for (named_path, found) in [
            (file.clone(), &file),
            (file.parent().unwrap().to_owned(), &file),
            (folder.0.join("packages"), &file),
            (folder.0.join("prefix"), &prefix),
        ] {
            assert_eq!(named(&named_path, "x"), [Place::file(found, "x")]);
        }
        assert!(shown(&named(&folder.0, "x"))[0].contains("holds no libnixl_capi.so"));
        assert_eq!(named(Path::new("/no/such.so"), "x"), [Place::file("/no/such.so", "x")]);
    }

    #[test]
    fn the_setting_can_turn_nixl_off() {
        assert!(matches!(wanted(&surroundings(&[(SETTING, "Off".into())])), Wanted::Off));
        assert!(matches!(wanted(&surroundings(&[(SETTING, "/x".into())])), Wanted::Only(..)));
        assert!(matches!(wanted(&surroundings(&[])), Wanted::Any));
    }

    #[test]
    fn the_version_of_a_wheel_is_in_the_folder_beside_it() {
        let folder = Folder::new("version");
        let file = folder.with(".nixl_cu12.mesonpy.libs/libnixl_capi.so");
        folder.with("nixl-9.9.9.dist-info/METADATA");
        assert_eq!(wheel_version(&file), None);
        folder.with("nixl_cu12-1.5.1.dist-info/METADATA");
        assert_eq!(wheel_version(&file).as_deref(), Some("1.5.1"));
        assert!(is_wheel(&file));
        assert!(!is_wheel(Path::new("/opt/nvidia/nvda_nixl/lib/libnixl_capi.so")));
    }
}
