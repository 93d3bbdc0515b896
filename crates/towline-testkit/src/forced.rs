//! The path that the environment forces on every law.

use towline::EndpointOptions;

/// The variable that forces one path for every law.
const FORCE: &str = "TOWLINE_TEST_FORCE";

/// What is appended to a forced path that is to be encrypted: `tcp+tls`.
const TLS: &str = "+tls";

/// And to one over which checksums go along: `tcp+crc`.
const CRC: &str = "+crc";

/// Turns on what the forced path wants: TLS, checksums.
pub fn as_forced(options: EndpointOptions) -> EndpointOptions {
    match named() {
        Some(path) if path.ends_with(TLS) => options.tls(towline::Tls::by_ticket().unwrap()),
        Some(path) if path.ends_with(CRC) => options.checksums(true),
        _ => options,
    }
}

/// The path that `TOWLINE_TEST_FORCE` names.
pub fn forced() -> Option<String> {
    named().map(|path| path.trim_end_matches(TLS).trim_end_matches(CRC).to_owned())
}

fn named() -> Option<String> {
    std::env::var(FORCE).ok().filter(|path| !path.is_empty())
}
