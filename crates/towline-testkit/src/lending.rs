//! Over which device NIXL moves bytes in tests, and who lends by it.

use towline::NixlOptions;

use crate::paths::properties;

/// The device: loopback, unless a machine with another one says so.
fn device() -> String {
    std::env::var("TOWLINE_TEST_NIXL_OVER").unwrap_or_else(|_| "lo".to_owned())
}

/// Whether an owner that is to be reached by that path has to say that it lends.
fn is_opt_in(path: &str) -> bool {
    properties(path).is_some_and(|path| path.opt_in)
}

/// NIXL over that device, for an owner that is to be reached by that path; where it need not lend, for a user.
pub fn options(path: &str) -> NixlOptions {
    let options = NixlOptions::default();
    if is_opt_in(path) { options.lend_over([device()]) } else { options.reach_over([device()]) }
}

/// The words with which a worker opens as such an owner.
pub fn words(path: &str) -> String {
    if is_opt_in(path) { format!("lend={}", device()) } else { String::new() }
}
