//! The names of `dynamo_memory::nixl`: agents that register memory, send its metadata to peers and move it.
//!
//! They run on NIXL where that is installed (found and loaded at run time, never needed) and on the transports of this library
//! where it is not: [`Engine`], chosen in [`AgentConfig`] or [`NixlBackendConfig`], by default automatically, and visible in
//! [`NixlAgent::engine`]. Both ends of a transfer need the same engine; metadata of the other one is refused by name.
//!
//! `use dynamo_memory::nixl::…` becomes `use towline::nixl::…`, and `use nixl_sys::…` becomes `use towline::nixl::sys::…`
//! (see [`sys`] for the two that have one name).
//!
//! What differs from there: errors are [`Error`](crate::Error)s; [`register_with_nixl`] gives the storage back together with the cause; there
//! is no way to swap a storage underneath its registration; a request keeps the memory that it uses; clones of an agent share
//! their backends; registering bare addresses ([`NixlAgent::register_memory`]) is `unsafe`, as it is.

mod agent;
mod config;
mod embedded;
mod engine;
#[doc(hidden)]
pub mod fuzzing;
mod lent;
mod list;
mod native;
mod registered;
pub mod sys;
mod transfer;
mod wheel;

use std::path::PathBuf;

use towline_sys::loader::NotLoaded;
use towline_sys::nixl::Nixl;

pub use agent::NixlAgent;
pub use config::{AgentConfig, NixlBackendConfig, ThreadSync};
pub use engine::Engine;
pub use lent::RegistrationHandle;
pub use list::{DescList, RegDescList, XferDescList, XferDescriptor};
pub use registered::{NixlCompatible, NixlMemory, NixlRegisterExt, NixlRegistered, register_with_nixl};
pub use serde::{Deserialize, Serialize};
pub use sys::MemoryRegion;
pub use towline_sys::nixl::SETTING;
pub use transfer::{
    Backend, NotificationMap, OptArgs, Params, XferDlistHandle, XferOp, XferRequest, XferStatus,
    XferTelemetry,
};

pub use crate::memory::{MemType, NixlDescriptor};
pub use crate::region::RegisteredView;
pub use NixlAgent as Agent;

/// Whether NIXL is missing here, so that agents run on the embedded engine.
pub fn is_stub() -> bool {
    Nixl::load().is_err()
}

/// Whether NIXL is there, and what it can do; or all the places that were tried.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Availability {
    /// It is there.
    Found {
        /// The library that was loaded.
        path: PathBuf,
        /// Why it was looked for there.
        origin: String,
        /// Its version, if it is known.
        version: Option<String>,
        /// The plug-ins that came with it.
        plugins: Vec<String>,
    },
    /// It is not there, or cannot be used.
    Missing {
        /// Every place that was tried, with the reason why it did not serve.
        tried: Vec<String>,
        /// What would mend it.
        mend: String,
    },
}

/// Looks for NIXL and asks it for its plug-ins.
///
/// This loads the library, which then stays loaded. [`SETTING`] names one library or folder, or says `off`;
/// [`towline_sys::nixl`] lists the places.
///
/// ```
/// use towline::nixl::{Availability, availability};
/// match availability() {
///     Availability::Found { path, plugins, .. } => println!("{} with {plugins:?}", path.display()),
///     Availability::Missing { tried, .. } => println!("not found: {}", tried.join("; ")),
///     _ => {}
/// }
/// ```
pub fn availability() -> Availability {
    let found = Nixl::load().and_then(|nixl| {
        // Asking for plug-ins needs an agent; this one moves nothing.
        let config = AgentConfig { enable_prog_thread: false, ..AgentConfig::default() };
        let plugins = nixl.agent("towline-probe", &config.native())?.plugins()?;
        Ok(Availability::Found {
            path: nixl.path().to_owned(),
            origin: nixl.origin().to_owned(),
            version: nixl.version().map(str::to_owned),
            plugins,
        })
    });
    found.unwrap_or_else(|error| match error {
        towline_sys::Error::NotLoaded(why) => {
            let NotLoaded { mend, attempts, .. } = *why;
            Availability::Missing { tried: attempts.iter().map(ToString::to_string).collect(), mend }
        }
        error => Availability::Missing { tried: vec![error.to_string()], mend: String::new() },
    })
}
