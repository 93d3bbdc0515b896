//! NIXL's library as it may be found: missing, of another version, half broken, and the real one.
#![allow(clippy::unwrap_used, clippy::panic)]

mod fake;
mod real;

/// Says that a test cannot run here, or fails it where `what` was required.
fn skip(name: &str, what: &str, reason: &str) {
    use std::io::Write;
    let required = std::env::var("TOWLINE_REQUIRE").unwrap_or_default();
    if required.split(',').any(|one| one.trim() == what || one.trim() == "all") {
        panic!("{name} is required (TOWLINE_REQUIRE={required}), but {reason}");
    }
    // Not captured by the harness, which counts on `eprint!` only.
    let line = format!("SKIPPED {name}: {}\n", reason.replace('\n', " "));
    std::io::stderr().write_all(line.as_bytes()).unwrap();
}
