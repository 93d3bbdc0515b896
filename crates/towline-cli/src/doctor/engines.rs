//! The engines of others that are loaded where they are installed.

use towline::Probe;
use towline::nixl::{Availability, availability};

use super::{Check, Status};

const GROUP: &str = "Engines";

/// That owners lend nothing unasked, how they come to, and what they then give away.
const LENDING: &str = "nothing, unless an endpoint opts in by NixlOptions::lend_over (nixl_lend_over in Python); over NIXL each side can then read and \
                       write all memory of the other's process, and nobody checks or counts it";

pub(super) fn check() -> Vec<Check> {
    let mut checks = nixl(availability());
    checks.extend(nccl(towline::nccl::availability()));
    checks
}

/// NIXL's version, UCX's modules and settings, and the devices that matter.
fn runs_on() -> String {
    let path = towline::paths().into_iter().find(|path| path.name == "nixl");
    match path.map(|path| path.probe) {
        Some(Probe::Works(remark)) => remark,
        Some(Probe::Missing { reason, .. }) => reason,
        None => String::new(),
    }
}

fn nixl(found: Availability) -> Vec<Check> {
    match found {
        Availability::Found { path, origin, version, plugins } => {
            let version = version.unwrap_or_else(|| "of unknown version".into());
            vec![
                Check::new(GROUP, "nixl", Status::Ok, format!("{version}, {} ({origin})", path.display())),
                Check::fact(GROUP, "nixl plug-ins", plugins.join(", ")),
                Check::fact(GROUP, "nixl runs on", runs_on()),
                Check::fact(
                    GROUP,
                    "nixl as a path",
                    "from owners that lend by it: between hosts over RDMA devices that this side has named too; elsewhere where it is required or preferred",
                ),
                Check::fact(GROUP, "nixl lends", LENDING),
            ]
        }
        Availability::Missing { tried, mend } => {
            let missing =
                Check::new(GROUP, "nixl", Status::Note, "not found; nothing here needs it").mend(mend);
            std::iter::once(missing)
                .chain(tried.into_iter().map(|place| Check::fact(GROUP, "nixl tried", place)))
                .collect()
        }
        _ => Vec::new(),
    }
}

/// NCCL's version, and what of it depends on that.
fn nccl(found: towline::nccl::Availability) -> Vec<Check> {
    use towline::nccl::Availability;
    match found {
        Availability::Found { path, origin, version, fake, supports, lacks } => {
            let what = if fake { "a fake for tests, " } else { "" };
            let found = format!("{what}{version}, {} ({origin})", path.display());
            let mut checks = vec![
                Check::new(GROUP, "nccl", Status::Ok, found),
                Check::fact(GROUP, "nccl supports", supports.join("; ")),
            ];
            if !lacks.is_empty() {
                checks.push(Check::fact(GROUP, "nccl lacks", lacks.join("; ")));
            }
            checks
        }
        Availability::Missing { tried, mend } => {
            let words = "not found; only communicators on GPUs need it";
            let missing = Check::new(GROUP, "nccl", Status::Note, words).mend(mend);
            std::iter::once(missing)
                .chain(tried.into_iter().map(|place| Check::fact(GROUP, "nccl tried", place)))
                .collect()
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_shown_with_every_place_that_was_tried() {
        let tried = vec!["a: not there".to_owned(), "b: no ELF".to_owned()];
        let checks = nixl(Availability::Missing { tried, mend: "install it".into() });
        let found: Vec<_> = checks.iter().map(|check| check.found.as_str()).collect();
        assert_eq!(found, ["not found; nothing here needs it", "a: not there", "b: no ELF"]);
        assert_eq!(checks[0].mend.as_deref(), Some("install it"));
    }

    #[test]
    fn where_nixl_is_found_it_says_that_nothing_is_lent_how_it_would_be_and_what_that_gives_away() {
        let path = "/lib/libnixl_capi.so".into();
        let found = Availability::Found { path, origin: "a test".into(), version: None, plugins: Vec::new() };
        let lends = nixl(found).into_iter().find(|check| check.name == "nixl lends").map(|check| check.found);
        let said = lends.unwrap_or_default();
        for words in [
            "nothing, unless",
            "NixlOptions::lend_over",
            "nixl_lend_over",
            "all memory of the other's process",
        ] {
            assert!(said.contains(words), "{said}");
        }
    }

    #[test]
    fn the_version_of_nccl_is_shown_with_what_it_has_and_lacks() {
        let checks = nccl(towline::nccl::availability());
        assert_eq!(checks[0].name, "nccl");
        let places = checks.iter().filter(|check| check.name == "nccl tried").count();
        let facts = checks.iter().filter(|check| check.name == "nccl supports").count();
        assert!((places > 0) != (facts > 0));
    }
}
