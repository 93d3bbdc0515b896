//! How a command ends: an exit code, and what is said when it fails.

use std::fmt;
use std::process::ExitCode;

use towline::Kind;

/// How a command ended.
pub type Outcome<T = Exit> = Result<T, Failure>;

/// The exit codes, as the help lists them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// It worked.
    Fine = 0,
    /// A check failed, or what was given was refused.
    Failed = 1,
    /// The command line is wrong; the parser uses the same number.
    Usage = 2,
    /// Something needed is not available here.
    Unavailable = 3,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(exit as u8)
    }
}

/// Why a command failed: one line, and the chain of causes behind it.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The exit code.
    pub exit: Exit,
    /// What is said.
    pub message: String,
    /// What is behind it, the nearest first.
    pub causes: Vec<String>,
    /// The machine lacks something, so that there is nothing to try: a reason to skip, not a failure.
    pub lacking: bool,
}

impl Failure {
    /// A failure that ends with that code.
    pub fn new(exit: Exit, message: impl Into<String>) -> Failure {
        Failure { exit, message: message.into(), causes: Vec::new(), lacking: false }
    }

    /// A check that failed, or something that was refused.
    pub fn failed(message: impl Into<String>) -> Failure {
        Failure::new(Exit::Failed, message)
    }

    /// A command line that is wrong.
    pub fn usage(message: impl Into<String>) -> Failure {
        Failure::new(Exit::Usage, message)
    }

    /// Something that this machine lacks.
    pub fn lacking(message: impl Into<String>) -> Failure {
        Failure { lacking: true, ..Failure::new(Exit::Unavailable, message) }
    }

    /// Something that the operating system refused.
    pub fn os(what: impl fmt::Display, error: impl Into<std::io::Error>) -> Failure {
        Failure::new(Exit::Unavailable, format!("{what}: {}", error.into()))
    }

    fn of(kind: Kind, error: &dyn std::error::Error) -> Failure {
        let exit = match kind {
            Kind::Disconnected
            | Kind::Exhausted
            | Kind::Native
            | Kind::NotFound
            | Kind::Timeout
            | Kind::Unavailable
            | Kind::Unsupported => Exit::Unavailable,
            _ => Exit::Failed,
        };
        let mut causes = Vec::new();
        let mut next = error.source();
        while let Some(cause) = next {
            causes.push(cause.to_string());
            next = cause.source();
        }
        let lacking = matches!(kind, Kind::Unavailable | Kind::Unsupported);
        Failure { exit, message: error.to_string(), causes, lacking }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<towline::Error> for Failure {
    fn from(error: towline::Error) -> Failure {
        Failure::of(error.kind(), &error)
    }
}

impl From<towline_comm::Error> for Failure {
    fn from(error: towline_comm::Error) -> Failure {
        Failure::of(error.kind(), &error)
    }
}
