//! What an agent moves bytes with: NIXL where it is there, the transports of this library where it is not.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use towline_sys::nixl::{Nixl, SETTING};

use crate::Result;
use crate::transport::nixl::of_nixl;

/// What an agent moves bytes with. Both ends of a transfer need the same.
///
/// ```
/// use towline::nixl::{Engine, NixlAgent};
/// let agent = NixlAgent::with_engine("prefill", Engine::Embedded)?;
/// assert_eq!(agent.engine(), Engine::Embedded);
/// assert_eq!(agent.engine().to_string(), "embedded");
/// # Ok::<(), towline::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// NIXL itself, loaded at run time.
    Nixl,
    /// The transports of this library, which need nothing installed.
    Embedded,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Engine::Nixl => "nixl",
            Engine::Embedded => "embedded",
        })
    }
}

/// The engine that was chosen, and why.
pub(super) enum Chosen {
    Nixl(Nixl, String),
    Embedded(String),
}

/// Chooses: what was asked for, else NIXL where it can be loaded.
///
/// A library that the user has named and that cannot be loaded is an error: a setting that is wrong must show.
/// `also` is looked in where it is found nowhere else.
pub(super) fn choose(wanted: Option<Engine>, also: Option<&Path>) -> Result<Chosen> {
    if wanted == Some(Engine::Embedded) {
        return Ok(Chosen::Embedded("it was asked for".to_owned()));
    }
    let found = Nixl::load().or_else(|error| match also {
        // What the setting says is final.
        Some(also) if std::env::var_os(SETTING).is_none() => Nixl::load_from(also).map_err(|_| error),
        _ => Err(error),
    });
    match found {
        Ok(nixl) => {
            let why = format!("NIXL {} at {}", nixl.version().unwrap_or("?"), nixl.path().display());
            Ok(Chosen::Nixl(nixl, why))
        }
        Err(error) if wanted == Some(Engine::Nixl) || was_named(&error) => Err(of_nixl(error)),
        Err(error) => Ok(Chosen::Embedded(error.to_string())),
    }
}

/// Whether the library that could not be loaded is one that the setting names.
fn was_named(error: &towline_sys::Error) -> bool {
    let towline_sys::Error::NotLoaded(why) = error else { return false };
    why.attempts.iter().any(|attempt| attempt.origin == SETTING && !attempt.name.is_empty())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;

    #[test]
    fn the_embedded_engine_needs_nothing_and_loads_nothing() {
        assert!(matches!(choose(Some(Engine::Embedded), None), Ok(Chosen::Embedded(_))));
    }

    #[test]
    fn only_a_library_that_was_named_must_be_there() {
        let attempt = |origin: &str, name: &str| towline_sys::loader::Attempt {
            origin: origin.to_owned(),
            name: name.to_owned(),
            reason: "it is not there".into(),
        };
        let error = |attempts| {
            towline_sys::Error::from(towline_sys::loader::NotLoaded {
                library: "NIXL",
                mend: String::new(),
                attempts,
            })
        };
        assert!(was_named(&error(vec![attempt(SETTING, "/nowhere")])));
        assert!(!was_named(&error(vec![attempt(SETTING, "")])), "it says off");
        assert!(!was_named(&error(vec![attempt("the loader's path", "libnixl_capi.so")])));
    }
}
