//! Whether NCCL is here, and what it can do.

use std::path::{Path, PathBuf};

use towline_sys::loader::NotLoaded;
use towline_sys::nccl::Nccl;

use super::failed;
use crate::Result;

/// Whether NCCL is there, and what it has; or all the places that were tried.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Availability {
    /// It is there.
    Found {
        /// The library that was loaded.
        path: PathBuf,
        /// Why it was looked for there.
        origin: String,
        /// Its version, as `2.28.9`.
        version: String,
        /// Whether it is the test kit's fake.
        fake: bool,
        /// What this version has of what not all have.
        supports: Vec<&'static str>,
        /// What it lacks of that.
        lacks: Vec<&'static str>,
    },
    /// It is not there, or cannot be used.
    Missing {
        /// Every place that was tried, with the reason why it did not serve.
        tried: Vec<String>,
        /// What would mend it.
        mend: String,
    },
}

/// Looks for NCCL. No driver is needed for that.
///
/// [`SETTING`](super::SETTING) names one library, or says `off`; [`towline_sys::nccl`] lists the places.
pub fn availability() -> Availability {
    match Nccl::load() {
        Ok(nccl) => {
            let (has, lacks): (Vec<_>, Vec<_>) = nccl.supports().into_iter().partition(|(_, has)| *has);
            Availability::Found {
                path: nccl.path().to_owned(),
                origin: nccl.origin().to_owned(),
                version: nccl.version_text(),
                fake: nccl.is_fake(),
                supports: has.into_iter().map(|(what, _)| what).collect(),
                lacks: lacks.into_iter().map(|(what, _)| what).collect(),
            }
        }
        Err(towline_sys::Error::NotLoaded(why)) => {
            let NotLoaded { mend, attempts, .. } = *why;
            Availability::Missing { tried: attempts.iter().map(ToString::to_string).collect(), mend }
        }
        Err(error) => Availability::Missing { tried: vec![error.to_string()], mend: String::new() },
    }
}

/// Uses that library as NCCL, for this whole process, as if [`SETTING`](super::SETTING) named it.
///
/// # Errors
/// `Unavailable` where it cannot be loaded; `Invalid` where another one is in use already.
pub fn load_library(path: impl AsRef<Path>) -> Result<()> {
    Nccl::load_for_process(path).map(drop).map_err(|error| failed("load NCCL", None, error))
}

/// Makes the id of a group, which NCCL in any program takes. This process must live until every rank has joined.
///
/// # Errors
/// `Unavailable` where there is no NCCL, with the places tried.
pub fn unique_id() -> Result<[u8; 128]> {
    const OP: &str = "get_unique_id";
    crate::fork::guard(OP)?;
    let nccl = Nccl::load().map_err(|error| failed(OP, None, error))?;
    nccl.unique_id().map_err(|error| failed(OP, Some(&nccl), error))
}
