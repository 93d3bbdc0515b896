//! Who the workers are: programs of the test kit, or interpreters that have the package.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use towline_testkit::process::Process;
use towline_testkit::scene::Owner;

/// The lane in which workers are Python processes. The path is another one in each round.
pub(super) const PYTHON: &str = "python";

/// What an interpreter does for the campaigns.
const WORKER: &str = include_str!("python/worker.py");

static INTERPRETER: OnceLock<PathBuf> = OnceLock::new();

/// Starts workers in Python by that interpreter, otherwise by `python3`. The first caller decides.
pub(crate) fn use_python(interpreter: PathBuf) {
    let _ = INTERPRETER.set(interpreter);
}

/// The interpreter, to be given arguments.
pub(super) fn interpreter() -> Command {
    Command::new(INTERPRETER.get().cloned().unwrap_or_else(|| PathBuf::from("python3")))
}

/// Starts an interpreter that runs a script, which takes orders and answers them as a worker does; in a network namespace, where
/// one is named.
pub(super) fn start_python(name: &str, script: &str, namespace: Option<&str>) -> Process {
    let python = interpreter();
    let mut command = match namespace {
        None => python,
        Some(namespace) => {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", namespace]).arg(python.get_program());
            command
        }
    };
    command.args(["-c", script]);
    Process::start_by(command, name)
}

/// Who the workers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Staff {
    /// Programs of the test kit.
    Rust,
    /// Interpreters that have the package.
    Python,
}

impl Staff {
    /// Says why the machine has no such workers.
    pub(super) fn missing(self) -> Option<String> {
        if self == Staff::Rust {
            return None;
        }
        let mut probe = interpreter();
        let shown = probe.get_program().to_string_lossy().into_owned();
        let probed = probe.args(["-c", "import towline"]).stdin(Stdio::null()).output();
        match probed {
            Ok(probed) if probed.status.success() => None,
            Ok(probed) => {
                let said = String::from_utf8_lossy(&probed.stderr);
                let why = said.lines().last().unwrap_or("it says nothing").to_owned();
                Some(format!("{shown} has no package towline ({why}): `make python` builds it into .venv"))
            }
            Err(error) => Some(format!("{shown} cannot be run: {error}")),
        }
    }

    /// Starts a worker and opens an endpoint of the same name in it.
    pub(super) fn open(self, name: &str, options: &str) -> Process {
        match self {
            Staff::Rust => Process::open(name, options),
            Staff::Python => {
                let mut process = start_python(name, WORKER, None);
                process.must(&format!("open {name} {options}"));
                process
            }
        }
    }

    /// Starts a worker that owns one region, number 1.
    pub(super) fn open_owner(self, lane: &str, len: usize) -> Owner {
        let owner = Owner::of(self.open("owner", &Owner::options(lane)), lane, len);
        // An interpreter would take seconds to compute the bytes.
        if self == Staff::Python { owner.filled_from_here() } else { owner }
    }
}
