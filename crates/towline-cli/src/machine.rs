//! Facts about the machine, read from the kernel.

use serde::Serialize;

/// What a figure was measured on.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Machine {
    pub(crate) cpu: String,
    pub(crate) cores: usize,
    pub(crate) numa_nodes: usize,
    pub(crate) memory_bytes: u64,
    pub(crate) kernel: String,
    pub(crate) arch: &'static str,
    pub(crate) page_bytes: usize,
    pub(crate) huge_pages: String,
    pub(crate) build: &'static str,
    pub(crate) version: &'static str,
}

impl Machine {
    pub(crate) fn here() -> Machine {
        let uname = rustix::system::uname();
        Machine {
            cpu: cpu_model(),
            cores: cores(),
            numa_nodes: numa_nodes(),
            memory_bytes: meminfo("MemTotal").unwrap_or(0),
            kernel: format!("{} {}", uname.sysname().to_string_lossy(), uname.release().to_string_lossy()),
            arch: std::env::consts::ARCH,
            page_bytes: rustix::param::page_size(),
            huge_pages: format!(
                "transparent {}, shared {}",
                chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
                chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
            ),
            build: if cfg!(debug_assertions) { "debug" } else { "release" },
            version: env!("CARGO_PKG_VERSION"),
        }
    }
}

pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

pub(crate) fn numa_nodes() -> usize {
    let nodes = std::fs::read_dir("/sys/devices/system/node").map_or(0, |entries| {
        entries
            .flatten()
            .filter(|entry| {
                let name = entry.file_name();
                name.to_string_lossy().strip_prefix("node").is_some_and(|rest| rest.parse::<u32>().is_ok())
            })
            .count()
    });
    nodes.max(1)
}

fn cpu_model() -> String {
    let info = read("/proc/cpuinfo").unwrap_or_default();
    info.lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map(|rest| rest.trim_start_matches([' ', '\t', ':']).to_owned())
        .unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// A figure of `/proc/meminfo`, in bytes where it has a unit.
pub(crate) fn meminfo(name: &str) -> Option<u64> {
    let info = read("/proc/meminfo")?;
    let mut words =
        info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?.split_whitespace();
    let value: u64 = words.next()?.parse().ok()?;
    Some(if words.next() == Some("kB") { value * 1024 } else { value })
}

/// A line of `/proc/self/status`.
pub(crate) fn status(name: &str) -> Option<String> {
    let status = read("/proc/self/status")?;
    status.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim().to_owned()))
}

/// The choice in brackets of a kernel setting.
pub(crate) fn chosen(path: &str) -> String {
    let Some(setting) = read(path) else { return "unknown".to_owned() };
    let chosen = setting.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map(|(chosen, _)| chosen);
    chosen.unwrap_or_else(|| setting.trim()).to_owned()
}

/// A file's text, where it can be read.
pub(crate) fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}
