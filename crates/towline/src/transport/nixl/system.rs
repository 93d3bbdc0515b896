//! What NIXL can run on here, as far as that can be seen without asking UCX: devices, and UCX's modules and variables.

use std::fs;
use std::path::Path;

use towline_sys::nixl::Nixl;

/// The RDMA devices that this process can open.
pub(super) fn rdma_devices() -> Vec<String> {
    // A container may show the devices of its host and not let them be opened.
    let openable = fs::read_dir("/dev/infiniband")
        .is_ok_and(|all| all.flatten().any(|one| one.file_name().to_string_lossy().starts_with("uverbs")));
    if openable { names("/sys/class/infiniband", |_| true) } else { Vec::new() }
}

/// The GPUs that this process can open.
fn gpus() -> usize {
    names("/dev", |name| name.strip_prefix("nvidia").is_some_and(|rest| rest.parse::<u32>().is_ok())).len()
}

fn names(folder: impl AsRef<Path>, wanted: impl Fn(&str) -> bool) -> Vec<String> {
    let Ok(all) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> = all
        .flatten()
        .filter_map(|one| one.file_name().into_string().ok())
        .filter(|name| wanted(name))
        .collect();
    names.sort();
    names
}

/// UCX's transport modules that came with NIXL; `None` where its UCX is the system's.
fn ucx_modules(nixl: &Nixl) -> Option<Vec<String>> {
    let packages = nixl.path().parent()?.parent()?;
    let libraries = names(packages, |name| name.starts_with("nixl") && name.ends_with(".libs"));
    let folder = packages.join(libraries.first()?).join("ucx");
    let mut modules: Vec<String> = names(folder, |name| name.contains(".so"))
        .iter()
        .filter_map(|name| name.strip_prefix("libuct_")?.split('.').next().map(str::to_owned))
        .collect();
    modules.dedup();
    Some(modules)
}

/// Whether UCX can register memory of a GPU: its module for CUDA came with NIXL, and neither variable leaves it out. A UCX of
/// the system is believed to have it; a registration shows.
pub(super) fn ucx_has_cuda(nixl: &Nixl) -> bool {
    let module = ucx_modules(nixl).is_none_or(|modules| modules.iter().any(|module| module == "cuda"));
    let variable = |name| std::env::var(name).unwrap_or_default();
    module && names_cuda(&variable("UCX_MODULES")) && names_cuda(&variable("UCX_TLS"))
}

/// Whether a list in UCX's form (`all`, `a,b`, `^c`) covers CUDA; an empty one leaves the choice to UCX.
fn names_cuda(list: &str) -> bool {
    let named = |list: &str| list.split(',').any(|one| one.trim().starts_with("cuda"));
    match list.trim().strip_prefix('^') {
        Some(without) => !named(without),
        None => list.trim().is_empty() || list.trim() == "all" || named(list),
    }
}

/// NIXL in one line: its version, UCX's modules and settings, and the devices that matter.
pub(super) fn describe(nixl: &Nixl) -> String {
    let version = nixl.version().unwrap_or("of unknown version");
    let mut parts = vec![format!("NIXL {version} ({})", nixl.origin())];
    match ucx_modules(nixl) {
        Some(modules) => parts.push(format!("UCX with tcp, shared memory, {}", modules.join(", "))),
        None => parts.push("UCX of the system".into()),
    }
    let settings: Vec<String> = ["UCX_TLS", "UCX_NET_DEVICES", "UCX_MODULES"]
        .into_iter()
        .filter_map(|name| Some(format!("{name}={}", std::env::var(name).ok()?)))
        .collect();
    if !settings.is_empty() {
        parts.push(settings.join(" "));
    }
    match rdma_devices().as_slice() {
        [] => parts.push("no RDMA device".into()),
        devices => parts.push(format!("RDMA devices {}", devices.join(", "))),
    }
    match gpus() {
        0 => parts.push("no GPU".into()),
        count => parts.push(format!("{count} GPUs")),
    }
    parts.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_ucx_covers_cuda_or_leaves_it_out() {
        for list in ["", "all", "tcp,cuda_copy", "cuda", "^efa", " ^efa,ib "] {
            assert!(names_cuda(list), "{list:?}");
        }
        for list in ["tcp", "rc,ud", "^cuda", "^efa,cuda_ipc"] {
            assert!(!names_cuda(list), "{list:?}");
        }
    }
}
