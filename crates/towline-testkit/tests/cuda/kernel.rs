//! The kernel's text: what it promises to drivers, and that NVIDIA's assembler takes it where one is installed.

use std::path::PathBuf;
use std::process::Command;

use towline_testkit::skip::skip;

const TEXT: &str = include_str!("../../../towline/src/cuda/copy.ptx");

#[test]
fn the_kernel_is_for_old_drivers_and_gpus_and_plain_text() {
    assert!(TEXT.is_ascii() && !TEXT.contains('\0'));
    assert!(TEXT.contains("\n.version 7.0\n") && TEXT.contains("\n.target sm_70\n"));
}

/// The assembler: in the path, in the toolkit's folder, or in the packages of a Python environment.
fn assembler() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&path).map(|folder| folder.join("ptxas"));
    let in_toolkit = PathBuf::from("/usr/local/cuda/bin/ptxas");
    in_path.chain([in_toolkit]).find(|file| file.exists())
}

#[test]
fn the_assembler_takes_the_kernel_for_every_generation_that_it_knows() {
    let name = "the_assembler_takes_the_kernel_for_every_generation_that_it_knows";
    let Some(assembler) = assembler() else {
        skip(
            name,
            "ptxas",
            "there is no ptxas (pip install nvidia-cuda-nvcc-cu12, and put its bin folder into PATH)",
        );
        return;
    };
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("copy.ptx");
    std::fs::write(&file, TEXT).unwrap();
    let mut taken = Vec::new();
    for generation in ["sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"] {
        let output = Command::new(&assembler)
            .args(["-v", "--warning-as-error", &format!("-arch={generation}"), "-o", "/dev/null"])
            .arg(&file)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        // An assembler knows the generations of its time.
        if said.contains("is not defined for option") || said.contains("Unsupported gpu architecture") {
            continue;
        }
        assert!(output.status.success(), "{generation}: {said}");
        assert!(said.contains("0 bytes spill stores, 0 bytes spill loads"), "{generation}: {said}");
        taken.push(generation);
    }
    assert!(taken.contains(&"sm_90"), "{taken:?}");
}
