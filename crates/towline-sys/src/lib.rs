//! Foreign libraries that Towline uses when they are there: found and loaded at run time, never linked.
//!
//! This is the only crate of the workspace with foreign `extern "C"` calls. Each library is three levels: a table of
//! its functions ([`loader`] fills it, and says which are missing), checked calls, and owning types. A library or a
//! function that is missing is an [`Error`] whose [`is_unavailable`](Error::is_unavailable) is true and whose text
//! lists every place that was tried; nothing in here aborts or panics.
//!
//! ```
//! match towline_sys::nixl::Nixl::load() {
//!     Ok(nixl) => println!("NIXL {} at {}", nixl.version().unwrap_or("?"), nixl.path().display()),
//!     Err(error) => println!("{error}"),
//! }
//! ```

pub mod cuda;
mod error;
pub mod loader;
pub mod nccl;
pub mod nixl;

pub use error::{Error, Result};
