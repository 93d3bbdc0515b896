//! `towline soak` with few rounds: what it prints, what it writes, and that a failed round can be seen again.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

fn page(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("towline-soak-test-{}-{name}.html", std::process::id()))
}

fn soak(name: &str, arguments: &str) -> (Output, String) {
    let path = page(name);
    let output = Command::new(env!("CARGO_BIN_EXE_towline"))
        .arg("soak")
        .args(arguments.split_whitespace())
        .arg("--html")
        .arg(&path)
        .output()
        .unwrap();
    let html = std::fs::read_to_string(&path).unwrap_or_default();
    let _ = std::fs::remove_file(&path);
    (output, html)
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_few_rounds_pass_and_the_document_says_so() {
    let (output, html) = soak("pass", "cancel recycle exit --lane unix,mapped --rounds 3 --seed 5 --json");
    assert_eq!(output.status.code(), Some(0), "{}", stdout(&output));
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    let campaigns = document["campaigns"].as_array().unwrap();
    let names: Vec<&str> = campaigns.iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["cancel", "recycle", "exit"]);
    for campaign in campaigns {
        assert_eq!((campaign["rounds"].as_u64(), campaign["passed"].as_u64()), (Some(6), Some(6)));
        assert_eq!(campaign["ok"], true);
        assert_eq!(campaign["lanes"].as_array().unwrap().len(), 2);
        assert_eq!(campaign["lanes"][0]["asked"], 3);
    }
    assert_eq!(document["seed"], 5);
    assert!(html.contains("<svg") && html.contains("all passed"), "the page has plots and a verdict");
    assert!(!html.contains("<script") && !html.contains("http"), "the page needs nothing else");
}

#[test]
fn a_wrong_word_fails_the_run_and_the_printed_command_shows_it_again() {
    let (output, html) = soak("fail", "self-check --rounds 40 --seed 5");
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
    let text = stdout(&output);
    assert!(text.contains("self-check  FAILED") && text.contains("wrong words"), "{text}");
    assert!(html.contains("failed"));
    let again = text.lines().find_map(|line| line.trim().strip_prefix("again: towline soak ")).unwrap();
    let message =
        |text: &str| text.lines().find(|line| line.contains("wrong words")).unwrap().trim().to_owned();
    for _ in 0..2 {
        let (output, _) = soak("again", again);
        assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
        assert_eq!(message(&stdout(&output)), message(&text), "the same choices give the same failure");
    }
    let round: u32 = again.split("--first ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    if round > 0 {
        let (output, _) = soak("before", &format!("self-check --lane inproc --seed 5 --rounds {round}"));
        assert_eq!(output.status.code(), Some(0), "the rounds before it were well: {}", stdout(&output));
    }
}

#[test]
fn the_lane_of_python_needs_an_interpreter_that_has_the_package() {
    let (output, _) = soak("no-python", "kill cancel --lane python --rounds 1 --python-exe /no/such/python");
    assert_eq!(output.status.code(), Some(3), "{}", stdout(&output));
    assert!(stdout(&output).contains("skipped python: /no/such/python cannot be run"), "{}", stdout(&output));
    let (output, _) = soak("no-python", "kill --lane python --rounds 1 --python-exe /no/such/python --json");
    assert_eq!(output.status.code(), Some(3));
    let document: Value = serde_json::from_slice(&output.stdout).expect("one document and nothing else");
    assert_eq!((&document["ok"], &document["campaigns"][0]["rounds"]), (&false.into(), &0.into()));
    let project = concat!(env!("CARGO_MANIFEST_DIR"), "/../../.venv/bin/python");
    let arguments = format!("kill stop cancel --lane python --rounds 3 --seed 5 --python-exe {project}");
    let (output, _) = soak("python", &arguments);
    let text = stdout(&output);
    // Without the package it says so; with it every round must pass.
    let skipped = text.matches("skipped python: ").count();
    assert_eq!(output.status.code(), Some(if skipped == 3 { 3 } else { 0 }), "{text}");
    assert!(skipped == 3 || text.matches("3 of 3").count() == 3, "{text}");
}

#[test]
fn a_limit_of_time_ends_the_long_form_too_and_the_report_says_how_it_was_made() {
    let report = std::env::temp_dir().join(format!("towline-soak-test-{}.md", std::process::id()));
    let arguments = format!("recycle --lane inproc,unix --seconds 2 --seed 5 --report {}", report.display());
    let (output, _) = soak("limited", &arguments);
    assert_eq!(output.status.code(), Some(0), "{}", stdout(&output));
    let text = std::fs::read_to_string(&report).unwrap();
    let _ = std::fs::remove_file(&report);
    assert!(text.contains("`towline soak recycle --lane inproc,unix --seconds 2 --seed 5"), "{text}");
    assert!(text.contains("| recycle | passed |") && text.contains("inproc "), "{text}");
}

#[test]
fn what_does_not_exist_is_refused_and_the_list_names_what_does() {
    let (output, _) = soak("unknown", "earthquake");
    assert_eq!(output.status.code(), Some(2));
    let (output, _) = soak("lane", "kill --lane pigeon");
    assert_eq!(output.status.code(), Some(2));
    let (output, _) = soak("list", "--list");
    assert_eq!(output.status.code(), Some(0));
    for name in
        ["kill", "stop", "partition", "cancel", "deregister", "recycle", "fork", "exit", "load", "ranks"]
    {
        assert!(
            stdout(&output).lines().any(|line| line.trim_start().starts_with(name)),
            "{name} is not listed"
        );
    }
    assert!(!stdout(&output).contains("self-check"));
}
