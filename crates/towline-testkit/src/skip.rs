//! What the machine lacks: said on a line of its own, past the capture of the test harness.

use std::io::stderr;

use rustix::io::write;

/// The variable that names what must not be skipped: a comma-separated list, or `all`.
const REQUIRE: &str = "TOWLINE_REQUIRE";

/// Says that a test cannot run here, or fails it where `what` was required.
///
/// `what` is what `TOWLINE_REQUIRE` names: a path, or `netns`, `users`, `seccomp`, `cgroup`, `rseq`, `ipv6` and the like.
pub fn skip(name: &str, what: &str, reason: &str) {
    let required = std::env::var(REQUIRE).unwrap_or_default();
    if required.split(',').any(|one| one.trim() == what || one.trim() == "all") {
        panic!("{name} is required ({REQUIRE}={required}), but {reason}");
    }
    let reason = reason.replace('\n', " ");
    say(&format!("SKIPPED {name}: {reason}\n"));
}

/// Writes to the standard error of the process, also where the harness captures that of the test.
pub(crate) fn say(text: &str) {
    let mut rest = text.as_bytes();
    while let Ok(written @ 1..) = write(stderr(), rest) {
        rest = &rest[written..];
    }
}
