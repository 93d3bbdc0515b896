//! NCCL: the fake, where it is used, and what needs no driver.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::PathBuf;
use std::process::Command;

use towline_sys::nccl::{Nccl, SETTING};

fn fake() -> PathBuf {
    towline_fake_nccl::library().expect("Cargo builds the fake for its dependants")
}

/// Runs one test of this program again, in a process of its own with these settings; `None` in that process.
fn elsewhere(test: &str, settings: &[(&str, &str)]) -> Option<()> {
    const MARK: &str = "TOWLINE_TEST_ELSEWHERE";
    if std::env::var(MARK).is_ok_and(|name| name == test) {
        return None;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(MARK, test)
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    Some(())
}

#[test]
fn version_ids_and_error_strings_need_no_driver() {
    let nccl = Nccl::load_from(fake()).unwrap();
    assert!(nccl.is_fake());
    assert_eq!((nccl.version(), nccl.version_text().as_str()), (22907, "2.29.7"));
    assert_eq!(nccl.origin(), "named by the program");
    assert_ne!(nccl.unique_id().unwrap(), nccl.unique_id().unwrap());
    assert_eq!(nccl.error_string(4), "invalid argument");
    let lacks: Vec<_> = nccl.supports().into_iter().filter(|(_, has)| !has).map(|(what, _)| what).collect();
    assert_eq!(lacks, ["put and get"]);
}

#[test]
fn the_fake_is_used_only_where_it_is_named() {
    let copy = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("looks-real-nccl");
    std::fs::create_dir_all(&copy).unwrap();
    std::fs::copy(fake(), copy.join("libnccl.so.2")).unwrap();
    let settings = [("LD_LIBRARY_PATH", copy.to_str().unwrap()), (SETTING, "")];
    if elsewhere("the_fake_is_used_only_where_it_is_named", &settings).is_none() {
        match Nccl::load() {
            Ok(real) => assert!(!real.is_fake()),
            Err(error) => {
                let text = error.to_string();
                assert!(
                    text.contains("it is a fake for tests, which is used only where TOWLINE_NCCL names it"),
                    "{text}"
                );
                assert!(text.contains("Python wheels"), "{text}");
            }
        }
    }
}

#[test]
fn what_a_version_lacks_is_named_with_the_version_that_has_it() {
    const TEST: &str = "what_a_version_lacks_is_named_with_the_version_that_has_it";
    if elsewhere(TEST, &[("FAKE_NCCL_VERSION", "21805")]).is_none() {
        let nccl = Nccl::load_from(fake()).unwrap();
        let error = nccl.allocate(4096).unwrap_err();
        assert!(error.is_unavailable());
        assert_eq!(error.to_string(), "NCCL 2.18.5 has no function ncclMemAlloc: it came with NCCL 2.19.0");
        assert!(nccl.supports().iter().all(|(_, has)| !has));
    }
}
