//! The command as its users meet it: every subcommand, its JSON and its exit codes.
#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

use serde_json::Value;
use towline_testkit::skip::skip;

/// Far longer than anything here takes: what hangs fails.
const WATCHDOG: Duration = Duration::from_secs(120);

fn towline(arguments: &[&str]) -> Output {
    finish(spawn(arguments, b""))
}

fn spawn(arguments: &[&str], input: &[u8]) -> Child {
    let mut child = Command::new(env!("CARGO_BIN_EXE_towline"))
        .args(arguments)
        .env_remove("TOWLINE_LISTEN")
        .env_remove("RUST_LOG")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that has read enough may have closed its input.
    let _ = child.stdin.take().unwrap().write_all(input);
    child
}

fn finish(child: Child) -> Output {
    let pid = child.id();
    let (sender, receiver) = channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    receiver.recv_timeout(WATCHDOG).unwrap_or_else(|_| panic!("process {pid} hangs")).unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("{error}: {}\n{}", String::from_utf8_lossy(&output.stdout), stderr(output))
    })
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A running `towline serve` and its ticket; it ends when its input is closed.
struct Served {
    child: Child,
    ticket: String,
}

impl Served {
    fn start(arguments: &[&str]) -> Served {
        let mut child = Command::new(env!("CARGO_BIN_EXE_towline"))
            .arg("serve")
            .args(arguments)
            .env_remove("TOWLINE_LISTEN")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut ticket = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut ticket).unwrap();
        Served { child, ticket: ticket.trim().to_owned() }
    }

    fn end(mut self) -> i32 {
        drop(self.child.stdin.take());
        code(&finish(self.child))
    }
}

#[test]
fn the_demo_moves_bytes_both_ways_over_every_path_that_is_available() {
    let output = towline(&["demo", "--bytes", "1M", "--json"]);
    assert_eq!(code(&output), 0, "{}{}", stdout(&output), stderr(&output));
    let report = json(&output);
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2 * towline::paths().len());
    for path in towline::paths() {
        for op in ["read", "write"] {
            let row = rows.iter().find(|row| row["path"] == path.name && row["op"] == op).unwrap();
            match row["verdict"].as_str().unwrap() {
                "verified" => assert!(row["gib_per_second"].as_f64().unwrap() > 0.0),
                "skipped" => skip(&format!("demo over {}", path.name), "demo", &row["reason"].to_string()),
                other => panic!("{} {op}: {other} {row}", path.name),
            }
        }
    }
    assert!(rows.iter().any(|row| row["path"] != "inproc" && row["verdict"] == "verified"));
    // Bytes of a file need no more than a folder for it.
    assert!(rows.iter().any(|row| row["path"] == "file" && row["verdict"] == "verified"), "{rows:?}");
}

#[test]
fn the_demo_prints_a_plain_table_when_piped() {
    let output = towline(&["demo", "--bytes", "64K"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.contains("inproc  read") && text.contains("verified"), "{text}");
    assert!(!text.contains('\u{1b}'), "no colours in a pipe: {text}");
}

#[test]
fn the_doctor_finds_a_path_and_explains_the_machine() {
    let output = towline(&["doctor", "--json"]);
    assert_eq!(code(&output), 0, "{}{}", stdout(&output), stderr(&output));
    let report = json(&output);
    assert_eq!(report["ok"], true);
    assert!(!report["usable"].as_array().unwrap().is_empty());
    let checks = report["checks"].as_array().unwrap();
    let paths = towline::path_names();
    for name in ["open an endpoint", "open files", "TOWLINE_LISTEN"].into_iter().chain(paths) {
        assert!(checks.iter().any(|check| check["name"] == name), "{name}");
    }
    let text = stdout(&towline(&["doctor"]));
    assert!(text.contains("Another process was reached over"), "{text}");
    assert!(
        !text.contains("the caller requires"),
        "a path that works is tried with memory that it can move: {text}"
    );
}

#[test]
fn serve_and_fetch_move_a_file_over_every_path_between_processes() {
    let folder = std::env::temp_dir().join(format!("towline-cli-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (from, to) = (folder.join("from"), folder.join("to"));
    let bytes: Vec<u8> = (0..3_000_001u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    std::fs::write(&from, &bytes).unwrap();
    let served = Served::start(&["--name", "library", "--file", from.to_str().unwrap()]);
    for path in ["mapped", "cma", "unix", "tcp"] {
        let _ = std::fs::remove_file(&to);
        let output =
            towline(&["fetch", &served.ticket, "--out", to.to_str().unwrap(), "--path", path, "--json"]);
        if code(&output) == 3 {
            skip(&format!("fetch over {path}"), path, &stderr(&output));
            continue;
        }
        assert_eq!(code(&output), 0, "{path}: {}", stderr(&output));
        let report = json(&output);
        assert_eq!((&report["path"], &report["peer"]), (&path.into(), &"library".into()));
        assert!(std::fs::read(&to).unwrap() == bytes, "{path}");
    }
    let output = towline(&["fetch", &served.ticket, "--explain"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert!(stdout(&output).contains("-> "), "{}", stdout(&output));
    let ticket = served.ticket.clone();
    assert_eq!(served.end(), 0);
    let output = towline(&["fetch", &ticket]);
    assert_eq!(code(&output), 3, "an owner that is gone: {}", stderr(&output));
    assert_eq!(stderr(&output).lines().count(), 1, "{}", stderr(&output));
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_file_is_served_where_it_is_and_fetched_in_portions() {
    let folder = std::env::temp_dir().join(format!("towline-cli-in-place-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (from, to) = (folder.join("from"), folder.join("to"));
    // More than two portions, and not a whole number of them.
    let bytes: Vec<u8> = (0..70_000_001u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    std::fs::write(&from, &bytes).unwrap();
    let served = Served::start(&["--name", "library", from.to_str().unwrap()]);
    for path in ["unix", "tcp"] {
        let _ = std::fs::remove_file(&to);
        let output =
            towline(&["fetch", &served.ticket, "-o", to.to_str().unwrap(), "--path", path, "--json"]);
        assert_eq!(code(&output), 0, "{path}: {}", stderr(&output));
        assert_eq!(json(&output)["bytes"], bytes.len());
        assert!(std::fs::read(&to).unwrap() == bytes, "{path}");
    }
    let output = towline(&["fetch", &served.ticket, "--path", "mapped"]);
    assert_ne!(code(&output), 0);
    assert!(stderr(&output).contains("the bytes are on disk"), "{}", stderr(&output));
    assert_eq!(served.end(), 0);
    assert!(std::fs::read(&from).unwrap() == bytes, "the file is as it was");
    let output = towline(&["serve", folder.join("none").to_str().unwrap(), "--for", "0"]);
    assert_ne!(code(&output), 0);
    assert!(stderr(&output).contains("is not there"), "{}", stderr(&output));
    std::fs::remove_dir_all(&folder).unwrap();
}

/// An address that nothing listens on.
fn free_address() -> String {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[test]
fn serve_shows_metrics_and_inspect_shows_who_came() {
    use std::io::{Read, Write};
    let address = free_address();
    let served = Served::start(&["--name", "library", "--bytes", "64K", "--metrics", &address]);
    let url = format!("http://{address}");
    let output = towline(&["inspect", &url]);
    assert!(stdout(&output).contains("no peer has connected"), "{}{}", stdout(&output), stderr(&output));
    assert_eq!(code(&towline(&["fetch", &served.ticket, "--path", "tcp"])), 0);
    let report = json(&towline(&["inspect", &url, "--json"]));
    assert_eq!(report["endpoint"], "library");
    assert_eq!(report["incomplete"], false);
    assert_eq!(report["peers"][0]["read_bytes"], 64 << 10);
    assert_eq!(code(&towline(&["fetch", &served.ticket, "--path", "mapped"])), 0);
    let output = towline(&["inspect", &url]);
    assert!(stdout(&output).contains("may copy by itself"), "{}", stdout(&output));

    let ask = |request: &str| {
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let metrics = ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(metrics.starts_with("HTTP/1.0 200 OK\r\nContent-Type: text/plain; version=0.0.4"), "{metrics}");
    assert!(metrics.contains("\ntowline_regions 1\n"), "{metrics}");
    assert!(ask("GET /elsewhere HTTP/1.0\r\n\r\n").starts_with("HTTP/1.0 404"));
    assert!(ask("PUT /metrics HTTP/1.0\r\n\r\n").starts_with("HTTP/1.0 400"));
    assert_eq!(served.end(), 0);
    let output = towline(&["inspect", &url]);
    assert_ne!(code(&output), 0, "{}", stdout(&output));
}

#[test]
fn serve_ends_by_itself_after_the_time_it_was_given() {
    let output = towline(&["serve", "--bytes", "64K", "--for", "0", "--json"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let report = json(&output);
    assert_eq!(report["bytes"], 65536);
    assert!(report["ticket"].as_str().unwrap().starts_with("towline1:"));
}

#[test]
fn a_ticket_is_shown_from_text_from_a_file_and_from_input_and_never_its_tag() {
    let served = Served::start(&["--name", "library", "--bytes", "64K", "--access", "read+write"]);
    let output = towline(&["inspect", &served.ticket, "--json"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let report = json(&output);
    assert_eq!(report["owner"], "library");
    assert_eq!(report["region_bytes"], 65536);
    assert_eq!(report["rights"]["access"], "read+write");
    assert_eq!(report["rights"]["bytes"], 65536);

    let ticket: towline::Ticket = served.ticket.parse().unwrap();
    let narrowed = ticket.narrow().range(4096, 100).access(towline::Access::READ).finish().unwrap();
    let path = std::env::temp_dir().join(format!("towline-ticket-{}", std::process::id()));
    std::fs::write(&path, narrowed.encode()).unwrap();
    let output = towline(&["inspect", path.to_str().unwrap()]);
    assert!(stdout(&output).contains("read of bytes 4096..4196"), "{}", stdout(&output));
    std::fs::remove_file(&path).unwrap();

    let output = finish(spawn(&["inspect", "-"], format!("{ticket}\n").as_bytes()));
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let encoded = ticket.encode();
    let tag: String =
        encoded[encoded.len() - 36..encoded.len() - 4].iter().map(|byte| format!("{byte:02x}")).collect();
    for text in [stdout(&output), report.to_string()] {
        assert!(!text.contains(&tag) && !text.contains("towline1:"), "{text}");
    }
    assert_eq!(served.end(), 0);
}

#[test]
fn garbage_is_no_ticket() {
    for garbage in ["", "nonsense", "towline1:", "towline1:AAAA", "towline1:!!!!"] {
        for command in ["inspect", "fetch"] {
            let output = towline(&[command, garbage]);
            assert_eq!(code(&output), 1, "{command} {garbage:?}: {}", stderr(&output));
            assert_eq!(stderr(&output).lines().count(), 1, "{}", stderr(&output));
            assert!(stderr(&output).starts_with("towline: "), "{}", stderr(&output));
        }
    }
    let output = finish(spawn(&["inspect", "-"], &[0xff; 100_000]));
    assert_eq!(code(&output), 1);
}

#[test]
fn a_program_gets_a_document_from_a_command_that_failed_too() {
    for arguments in [&["inspect", "nonsense", "--json"][..], &["fetch", "towline1:AAAA", "--json"]] {
        let output = towline(arguments);
        let report = json(&output);
        assert_eq!((&report["ok"], &report["exit"]), (&Value::Bool(false), &Value::from(1)), "{report}");
        assert!(stderr(&output).contains(report["error"].as_str().unwrap()), "{report}");
    }
}

#[test]
fn a_bench_row_has_the_documented_keys() {
    let arguments = [
        "bench",
        "--quick",
        "--blocks",
        "16",
        "--block-size",
        "4K",
        "--op",
        "read",
        "--path",
        "inproc",
        "--json",
    ];
    let output = towline(&arguments);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let report = json(&output);
    let [row] = report["rows"].as_array().unwrap().as_slice() else { panic!("{report}") };
    for key in [
        "name",
        "path",
        "op",
        "bytes",
        "blocks",
        "block_size",
        "threads",
        "streams",
        "unit",
        "ours",
        "limit",
        "target",
        "ratio",
        "goal",
        "met",
        "p99",
        "rounds",
        "against",
    ] {
        assert!(row.get(key).is_some(), "{key}: {row}");
    }
    assert_eq!((&row["blocks"], &row["bytes"], &row["unit"]), (&16.into(), &65536.into(), &"GiB/s".into()));
    let number = |key: &str| row[key].as_f64().unwrap();
    assert!((number("ratio") - number("ours") / number("limit")).abs() < 1e-9);
    assert!(report["machine"]["cores"].as_u64().unwrap() > 0);
    assert!((0.0..1.0).contains(&report["stolen"].as_f64().unwrap()));
}

#[test]
fn every_path_and_direction_can_be_measured_and_is_verified() {
    for op in ["read", "write"] {
        let output =
            towline(&["bench", "--quick", "--blocks", "64", "--block-size", "8K", "--op", op, "--json"]);
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        let report = json(&output);
        let (rows, skipped) = (report["rows"].as_array().unwrap(), report["skipped"].as_array().unwrap());
        // Where owners have to opt in, a path is measured only where it is asked for; GPUs and files have shapes of their own, or none.
        let is_measured = |path: &towline::PathProperties| path.serves.has_words() && !path.opt_in;
        let measured = towline::path_properties().into_iter().filter(is_measured).count();
        assert_eq!(rows.len() + skipped.len(), measured, "{report}");
        for skipped in skipped {
            skip(&format!("bench over {}", skipped["path"]), "bench", &skipped["reason"].to_string());
        }
        assert!(rows.iter().any(|row| row["path"] == "tcp"), "{report}");
    }
}

#[test]
fn the_costs_can_be_measured_one_by_one() {
    for (filter, expected) in [
        ("ticket", "ticket-size"),
        ("open", "open"),
        ("first-contact", "first-contact"),
        ("first-contact-peers", "first-contact-8-peers"),
        ("first-contact-peers", "first-contact-64-peers"),
        ("register", "register-10000"),
    ] {
        let output = towline(&["bench", "--quick", "--filter", filter, "--json"]);
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        let report = json(&output);
        let row =
            report["rows"].as_array().unwrap().iter().find(|row| row["name"] == expected).unwrap().clone();
        assert!(row["target"].as_f64().unwrap() > 0.0 && row["limit"].is_null(), "{row}");
    }
}

#[test]
fn a_python_without_the_package_exits_with_three_and_says_what_to_do() {
    let output = towline(&["bench", "--python", "--python-exe", "/no/such/python"]);
    assert_eq!(code(&output), 3, "{}", stderr(&output));
    assert!(stderr(&output).contains("/no/such/python") && stderr(&output).contains("--python-exe"));
    // A program that can be run and is no interpreter with the package stands for one without it.
    let output = towline(&["bench", "--python", "--python-exe", "false"]);
    assert_eq!(code(&output), 3, "{}", stderr(&output));
    assert!(stderr(&output).contains("make python"), "{}", stderr(&output));
}

#[test]
fn groups_of_ranks_are_measured_without_any_peer() {
    let list = stdout(&towline(&["bench", "comm", "--list"]));
    for label in ["2-ranks/put-signal-8b", "2-ranks/get-4m", "4-ranks/all-reduce-64m", "4-ranks/windows-1000"]
    {
        assert!(list.lines().any(|line| line == label), "{list}");
    }
    let rows = |filter: &str| {
        let output =
            towline(&["bench", "comm", "--alone", "--quick", "--repeat", "1", "--filter", filter, "--json"]);
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        json(&output)["rows"].as_array().unwrap().clone()
    };
    for filter in ["put-signal-8b", "put-4m"] {
        let rows = rows(filter);
        assert!(
            rows[0]["ours"].as_f64().unwrap() > 0.0 && rows[0]["limit"].as_f64().unwrap() > 0.0,
            "{rows:?}"
        );
    }
    // Ranks verify their first reduction.
    let rows = rows("4-ranks/all-reduce-1k");
    assert_eq!(rows.len(), 7);
    for row in &rows {
        assert!(row["ours"].as_f64().unwrap() > 0.0 && row["ranks"] == 4, "{row}");
        let against = row["against"].as_str().unwrap();
        assert!(against == "unregistered" || against.ends_with(": not asked"), "{row}");
    }
}

#[test]
fn rows_of_nccl_are_listed_and_one_line_says_why_they_are_not_measured() {
    let list = stdout(&towline(&["bench", "comm", "--list", "--filter", "nccl"]));
    assert_eq!(
        list.lines().collect::<Vec<_>>(),
        [
            "1-ranks/nccl-call-4k",
            "1-ranks/nccl-call-1m",
            "1-ranks/nccl-register-64m",
            "1-ranks/nccl-window-64m"
        ]
    );
    let output = Command::new(env!("CARGO_BIN_EXE_towline"))
        .args(["bench", "comm", "--filter", "nccl", "--json"])
        .env("TOWLINE_NCCL", "off")
        .output()
        .unwrap();
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let report = json(&output);
    assert!(report["rows"].as_array().unwrap().is_empty(), "{report}");
    let skipped = report["skipped"].as_array().unwrap();
    assert!(skipped.len() == 1 && skipped[0]["name"] == "nccl", "{report}");
    assert!(skipped[0]["reason"].as_str().unwrap().contains("could not be loaded"), "{report}");
}

#[test]
fn only_the_whole_bench_has_the_weights() {
    let weights = |arguments: &[&str]| {
        let list = stdout(&towline(arguments));
        list.lines().filter(|label| label.contains("weights")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(weights(&["bench", "--list"]), ["mapped/weights-2.67g/read"]);
    assert!(weights(&["bench", "--list", "--quick"]).is_empty());
}

#[test]
fn a_wrong_command_line_exits_with_two() {
    for arguments in [
        &["frobnicate"][..],
        &["bench", "--path", "pigeon"],
        &["bench", "--filter", "no-such-row"],
        &["bench", "--blocks", "0"],
        &["bench", "--python", "--path", "tcp"],
        &["bench", "--python-exe", "python3"],
        &["bench", "comm", "--path", "tcp"],
        &["bench", "comm", "--filter", "no-such-row"],
        &["bench", "--alone"],
        &["demo", "--bytes", "0"],
        &["serve", "--access", "everything"],
        &["inspect"],
        &[],
    ] {
        let output = towline(arguments);
        assert_eq!(code(&output), 2, "{arguments:?}: {}", stderr(&output));
    }
    let served = Served::start(&["--bytes", "4K"]);
    let output = towline(&["fetch", &served.ticket, "--path", "pigeon"]);
    assert_eq!(code(&output), 2, "{}", stderr(&output));
    assert_eq!(served.end(), 0);
}

#[test]
fn an_address_that_this_host_does_not_have_exits_with_three_and_is_named() {
    // An address that documentation may use, and nobody has.
    let output = towline(&["serve", "--listen", "192.0.2.1:4791", env!("CARGO_MANIFEST_PATH")]);
    assert_eq!(code(&output), 3, "{}", stderr(&output));
    assert!(stderr(&output).contains("192.0.2.1:4791"), "{}", stderr(&output));
}

#[test]
fn the_help_names_the_exit_codes_and_hides_the_worker() {
    let output = towline(&["--help"]);
    assert_eq!(code(&output), 0);
    let help = stdout(&output);
    assert!(help.contains("Exit codes") && !help.contains("worker  "), "{help}");
    assert!(stdout(&towline(&["bench", "--help"])).contains("ours/limit for rates"));
}

#[test]
fn workers_end_with_their_parent() {
    let mut parent = Command::new(env!("CARGO_BIN_EXE_towline"))
        .args(["bench", "--filter", "idle"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let task = format!("/proc/{0}/task/{0}/children", parent.id());
    let workers = || std::fs::read_to_string(&task).unwrap_or_default();
    let until = std::time::Instant::now() + WATCHDOG;
    while workers().trim().is_empty() {
        assert!(std::time::Instant::now() < until, "no worker was started");
        std::thread::sleep(Duration::from_millis(5));
    }
    let worker: u32 = workers().split_whitespace().next().unwrap().parse().unwrap();
    parent.kill().unwrap();
    parent.wait().unwrap();
    let state = || std::fs::read_to_string(format!("/proc/{worker}/cmdline")).unwrap_or_default();
    while state().contains("worker") {
        assert!(std::time::Instant::now() < until, "worker {worker} is still there");
        std::thread::sleep(Duration::from_millis(5));
    }
}
