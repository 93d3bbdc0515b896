//! What the commands say of GPUs, with a driver that has none behind it.
#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

use std::process::{Command, Output};

use serde_json::Value;

fn towline(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let fake = towline_fake_cuda::library().expect("Cargo builds the fake for its dependants");
    Command::new(env!("CARGO_BIN_EXE_towline"))
        .args(arguments)
        .env_remove("TOWLINE_LISTEN")
        .env_remove("RUST_LOG")
        .env("TOWLINE_CUDA", fake)
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!(
            "{error}: {}\n{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        )
    })
}

/// What the doctor has found under that name.
fn found(report: &Value, name: &str) -> (String, String) {
    let checks = report["checks"].as_array().unwrap();
    let check = checks.iter().find(|check| check["group"] == "GPUs" && check["name"] == name);
    let check = check.unwrap_or_else(|| panic!("no {name:?} in {checks:#?}"));
    (check["status"].as_str().unwrap().to_owned(), check["found"].as_str().unwrap().to_owned())
}

#[test]
fn the_doctor_shows_devices_what_they_share_whom_they_reach_and_what_can_be_pinned() {
    let report = json(&towline(&["doctor", "--json"], &[("FAKE_CUDA_DEVICES", "2")]));
    assert!(report["usable"].as_array().unwrap().iter().any(|path| path == "cuda"), "{}", report["usable"]);
    assert!(found(&report, "driver").1.contains("CUDA 13.0"));
    for gpu in ["GPU 0", "GPU 1"] {
        let (status, shares) = found(&report, &format!("{gpu} shares by"));
        assert_eq!(status, "ok");
        for what in ["IPC handles yes", "exportable memory yes", "registered host memory yes"] {
            assert!(shares.contains(what), "{shares}");
        }
        assert_eq!(found(&report, &format!("{gpu} reaches")).0, "ok");
    }
    assert_eq!(found(&report, "GPU 1 reaches").1, "GPU 0");
    let (status, pinned) = found(&report, "pinned memory");
    assert!(status == "ok" && pinned.contains("taken as a trial"), "{pinned}");
    found(&report, "locked memory");
}

#[test]
fn the_doctor_shows_what_devices_lack() {
    let report = json(&towline(
        &["doctor", "--json"],
        &[("FAKE_CUDA_DEVICES", "2"), ("FAKE_CUDA_NO", "vmm,ipc,peer,register")],
    ));
    let (status, shares) = found(&report, "GPU 0 shares by");
    assert_eq!(status, "note");
    assert!(shares.contains("IPC handles no") && shares.contains("exportable memory no"), "{shares}");
    let (status, reaches) = found(&report, "GPU 0 reaches");
    assert!(status == "note" && reaches.contains("no other GPU"), "{reaches}");
    // What cannot be pinned is said too.
    let report = json(&towline(
        &["doctor", "--json"],
        &[("FAKE_CUDA_FAIL", "cuMemHostAlloc:2,cuMemHostRegister_v2:2")],
    ));
    let (status, pinned) = found(&report, "pinned memory");
    assert!(status == "missing" && pinned.contains("OUT_OF_MEMORY"), "{status}: {pinned}");
}

#[test]
fn the_rows_of_gpus_are_measured_beside_their_limits() {
    let report =
        json(&towline(&["bench", "--gpu", "--quick", "--repeat", "1", "--filter", "gpu-1m", "--json"], &[]));
    let rows = report["rows"].as_array().unwrap();
    let ours: Vec<_> = rows.iter().filter(|row| row["name"] == "gpu-1m").collect();
    assert!(ours.len() >= 2, "{report:#}");
    for row in ours {
        assert!(
            row["path"] == "cuda" && row["bytes"] == 1 << 20 && row["limit"].as_f64().unwrap() > 0.0,
            "{row:#}"
        );
    }
}

#[test]
fn without_a_gpu_one_line_says_why() {
    let report = json(&towline(&["bench", "--gpu", "--quick", "--json"], &[("TOWLINE_CUDA", "off")]));
    assert_eq!(report["rows"].as_array().unwrap().len(), 0);
    let skipped = report["skipped"].as_array().unwrap();
    assert!(
        skipped.len() == 1 && skipped[0]["reason"].as_str().unwrap().contains("there is no GPU"),
        "{skipped:?}"
    );
}
