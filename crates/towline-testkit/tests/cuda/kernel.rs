//! The kernels' text: what it promises to drivers, that NVIDIA's assembler takes it where one is installed, and that the bare one is
//! what the compiler makes of its source.

use std::path::{Path, PathBuf};
use std::process::Command;

use towline_testkit::gpu::{BARE, BARE_SOURCE};
use towline_testkit::skip::skip;

const TEXT: &str = include_str!("../../../towline/src/cuda/copy.ptx");

#[test]
fn the_kernels_are_for_old_drivers_and_gpus_and_plain_text() {
    for text in [TEXT, BARE] {
        assert!(text.is_ascii() && !text.contains('\0'));
        assert!(text.contains("\n.version 7.0\n") && text.contains("\n.target sm_70\n"));
    }
}

/// A program of the toolkit: in the path, or in the toolkit's folder.
fn tool(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&path).map(|folder| folder.join(name));
    let in_toolkit = PathBuf::from("/usr/local/cuda/bin").join(name);
    in_path.chain([in_toolkit]).find(|file| file.exists())
}

/// Where files go; the program may run elsewhere than it was built.
fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("towline-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// The lines of PTX that say something, without those that name the version.
fn said(text: &str) -> Vec<&str> {
    let lines = text.lines().map(str::trim);
    lines
        .filter(|line| {
            !["//", ".version", ".target"].iter().any(|start| line.starts_with(start)) && !line.is_empty()
        })
        .collect()
}

#[test]
fn the_compiler_makes_the_bare_kernel_of_its_source() {
    let name = "the_compiler_makes_the_bare_kernel_of_its_source";
    let Some(compiler) = tool("nvcc") else {
        skip(name, "nvcc", "there is no nvcc");
        return;
    };
    let release = |text: &str| {
        text.lines()
            .find(|line| line.contains("Cuda compilation tools"))
            .map(|line| line.trim_start_matches("// ").to_owned())
    };
    let version = Command::new(&compiler).arg("--version").output().unwrap();
    let (ours, theirs) = (release(BARE).unwrap(), release(&String::from_utf8_lossy(&version.stdout)));
    let folder = folder("compiled");
    let (source, made) = (folder.join("bare.cu"), folder.join("bare-made.ptx"));
    std::fs::write(&source, BARE_SOURCE).unwrap();
    let status = Command::new(&compiler)
        .args(["-arch=compute_75", "-ptx", "-o"])
        .arg(&made)
        .arg(&source)
        .status()
        .unwrap();
    assert!(status.success());
    let made = std::fs::read_to_string(&made).unwrap();
    let _ = std::fs::remove_dir_all(&folder);
    let entry = |text: &str| {
        said(text).into_iter().take_while(|line| *line != "{").map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(entry(&made), entry(BARE));
    // Another compiler orders and numbers as it likes.
    if theirs.as_ref() == Some(&ours) {
        assert_eq!(said(&made), said(BARE));
    } else {
        skip(name, "nvcc", &format!("bare.ptx is by {ours}, and here is {theirs:?}"));
    }
}

#[test]
fn the_assembler_takes_the_kernel_for_every_generation_that_it_knows() {
    let name = "the_assembler_takes_the_kernel_for_every_generation_that_it_knows";
    let Some(assembler) = tool("ptxas") else {
        skip(
            name,
            "ptxas",
            "there is no ptxas (pip install nvidia-cuda-nvcc-cu12, and put its bin folder into PATH)",
        );
        return;
    };
    let folder = folder("assembled");
    for (number, text) in [TEXT, BARE].into_iter().enumerate() {
        let file = folder.join(format!("kernel-{number}.ptx"));
        std::fs::write(&file, text).unwrap();
        assemble(&assembler, &file);
    }
    let _ = std::fs::remove_dir_all(&folder);
}

fn assemble(assembler: &Path, file: &Path) {
    let mut taken = Vec::new();
    for generation in ["sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"] {
        let output = Command::new(assembler)
            .args(["-v", "--warning-as-error", &format!("-arch={generation}"), "-o", "/dev/null"])
            .arg(file)
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
