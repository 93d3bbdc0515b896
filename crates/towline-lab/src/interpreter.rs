//! Which interpreter has the Python package.

use std::path::{Path, PathBuf};

/// Where the project keeps its interpreter, from the directory of the project.
const PROJECT_PYTHON: &str = ".venv/bin/python";

/// The interpreter of the project in this directory, or else `python3`.
pub(crate) fn of_the_project() -> PathBuf {
    project_or_any(Path::new(PROJECT_PYTHON))
}

fn project_or_any(project: &Path) -> PathBuf {
    if project.exists() { project.to_owned() } else { PathBuf::from("python3") }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_interpreter_of_the_project_comes_first() {
        let here = std::env::current_exe().unwrap();
        assert_eq!(project_or_any(&here), here);
        assert_eq!(project_or_any(Path::new("/no/such/python")), Path::new("python3"));
    }
}
