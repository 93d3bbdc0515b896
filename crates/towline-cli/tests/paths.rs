//! The tables of paths that users read say what the list of transports says.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use towline::{Capabilities, Contact, PathProperties};

/// The rows of the table of paths on that page, each with its cells.
fn table(page: &str) -> Vec<Vec<&str>> {
    let rows = page.lines().skip_while(|line| !line.starts_with("| path | when |")).skip(2);
    let rows = rows.take_while(|line| line.starts_with('|'));
    rows.map(|row| row.trim_matches('|').split(" | ").map(|cell| cell.trim_matches([' ', '`'])).collect())
        .collect()
}

fn abilities(path: &PathProperties) -> String {
    let all = [
        (Capabilities::READ, "read"),
        (Capabilities::WRITE, "write"),
        (Capabilities::ATOMIC, "atomic"),
        (Capabilities::REDUCE, "reduce"),
        (Capabilities::SIGNAL, "signal"),
    ];
    let held: Vec<_> = all.iter().filter(|one| path.capabilities.contains(one.0)).map(|one| one.1).collect();
    held.join(", ")
}

fn who_checks(path: &PathProperties) -> &'static str {
    match path.contact {
        _ if !path.enforced => "cooperating processes",
        Contact::Nothing => "the library",
        _ => "the owner, on every access",
    }
}

/// Compares the table with the list; where the page describes paths in its own words, all but that.
fn check(name: &str, page: &str, own_words: bool) {
    let rows = table(page);
    let names: Vec<_> = rows.iter().map(|row| row[0]).collect();
    assert_eq!(names, towline::path_names(), "the paths in {name}, in order of preference");
    for (row, path) in rows.iter().zip(towline::path_properties()) {
        let [_, _, how, can, checks] = row[..] else { panic!("{name}: five cells in {row:?}") };
        assert!(own_words || how == path.summary, "{name}: {} is: {}", path.name, path.summary);
        assert_eq!(can, abilities(&path), "{name}: what {} can do", path.name);
        assert!(checks.starts_with(who_checks(&path)), "{name}: who checks on {}: {checks}", path.name);
    }
}

#[test]
fn the_tables_of_paths_in_the_documentation_are_those_of_the_list_of_transports() {
    check("docs/site/concepts.md", include_str!("../../../docs/site/concepts.md"), false);
    check("README.md", include_str!("../../../README.md"), true);
}

#[test]
fn the_threat_model_has_a_column_for_each_path() {
    let page = include_str!("../../../docs/threat-model.md");
    let columns = page.lines().find(|line| line.starts_with("| | inproc |")).unwrap();
    let columns: Vec<_> = columns.split('|').map(str::trim).filter(|cell| !cell.is_empty()).collect();
    // The last one is tcp again, with TLS.
    assert_eq!(columns[..columns.len() - 1], towline::path_names());
}
