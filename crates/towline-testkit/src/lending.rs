//! Over which device NIXL moves bytes in tests, and who lends by it.

use towline::NixlOptions;

/// The path on which owners lend only where they say so.
const PATH: &str = "nixl";

/// The device: loopback, unless a machine with another one says so.
fn device() -> String {
    std::env::var("TOWLINE_TEST_NIXL_OVER").unwrap_or_else(|_| "lo".to_owned())
}

/// NIXL over that device, for an owner that is to be reached by that path; of another path, for a user.
pub fn options(path: &str) -> NixlOptions {
    let options = NixlOptions::default();
    if path == PATH { options.lend_over([device()]) } else { options.reach_over([device()]) }
}

/// The words with which a worker opens as such an owner.
pub fn words(path: &str) -> String {
    if path == PATH { format!("lend={}", device()) } else { String::new() }
}
