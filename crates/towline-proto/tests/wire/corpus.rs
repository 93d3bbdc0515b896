//! The inputs that are stored in the repository, from which the fuzz targets begin too.

use std::fs;
use std::path::{Path, PathBuf};

pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/wire")
}

pub(crate) fn blessing() -> bool {
    std::env::var_os("TOWLINE_BLESS").is_some_and(|value| value == "1")
}

/// The stored inputs of a corpus; those that are made here are written first when blessing.
pub(crate) fn corpus(name: &str, made: Vec<(String, Vec<u8>)>) -> Vec<(String, Vec<u8>)> {
    let folder = folder().join("corpus").join(name);
    if blessing() {
        fs::create_dir_all(&folder).unwrap();
        for (name, bytes) in &made {
            fs::write(folder.join(name), bytes).unwrap();
        }
    }
    let mut stored: Vec<(String, Vec<u8>)> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
        .collect();
    stored.sort();
    for (name, bytes) in &made {
        let found = stored.iter().find(|(stored, _)| stored == name);
        assert_eq!(found.map(|(_, bytes)| bytes), Some(bytes), "{name} is not stored as it is made");
    }
    assert!(!stored.is_empty());
    stored
}
