//! What can go wrong with a foreign library.

use std::fmt;

use crate::loader::NotLoaded;

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call of a foreign library did not work.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Error {
    /// The library could not be loaded; lists the places tried.
    NotLoaded(Box<NotLoaded>),
    /// The library is loaded, but this version of it lacks an optional function.
    Lacks {
        /// The library.
        library: &'static str,
        /// The function that it lacks.
        symbol: &'static str,
    },
    /// The library is loaded, but came out before the function that is needed.
    TooOld {
        /// The library and its version.
        library: String,
        /// The function that it lacks.
        symbol: &'static str,
        /// The first version that has it.
        since: String,
    },
    /// The library refused.
    Refused {
        /// The function that was called.
        call: &'static str,
        /// What it returned.
        code: i32,
        /// The name of that code.
        name: &'static str,
    },
    /// The arguments were wrong before any call was made.
    Argument {
        /// The function that would have been called.
        call: &'static str,
        /// What is wrong with them.
        message: String,
    },
}

impl Error {
    /// Whether a library or a function of it is missing here.
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Error::NotLoaded(_) | Error::Lacks { .. } | Error::TooOld { .. })
    }

    pub(crate) fn argument(call: &'static str, message: impl Into<String>) -> Error {
        Error::Argument { call, message: message.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NotLoaded(why) => why.fmt(f),
            Error::Lacks { library, symbol } => write!(f, "this {library} has no function {symbol}"),
            Error::TooOld { library, symbol, since } => {
                write!(f, "{library} has no function {symbol}: it came with {since}")
            }
            Error::Refused { call, code, name } => write!(f, "{call} returned {code} ({name})"),
            Error::Argument { call, message } => write!(f, "{call}: {message}"),
        }
    }
}

impl std::error::Error for Error {}

impl From<NotLoaded> for Error {
    fn from(why: NotLoaded) -> Error {
        Error::NotLoaded(Box::new(why))
    }
}
