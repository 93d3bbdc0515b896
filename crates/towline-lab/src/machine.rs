//! Facts about the machine, read from the kernel.

use serde::Serialize;

/// What a figure was measured on.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    /// The model of its processor.
    pub cpu: String,
    /// How many cores this process may use.
    pub cores: usize,
    /// How many NUMA nodes it has.
    pub numa_nodes: usize,
    /// How much memory it has.
    pub memory_bytes: u64,
    /// Its kernel.
    pub kernel: String,
    /// Its architecture.
    pub arch: &'static str,
    /// The size of a page.
    pub page_bytes: usize,
    /// The kernel's settings of huge pages.
    pub huge_pages: String,
    /// How this program was built.
    pub build: &'static str,
    /// The version of this program.
    pub version: &'static str,
}

impl Machine {
    /// This one.
    pub fn here() -> Machine {
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

/// What the processors have done since the machine was started, in ticks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Processors {
    all: u64,
    stolen: u64,
}

impl Processors {
    pub(crate) fn now() -> Option<Processors> {
        Processors::parse(&read("/proc/stat")?)
    }

    fn parse(stat: &str) -> Option<Processors> {
        let words = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
        let ticks: Vec<u64> = words.map(str::parse).collect::<Result<_, _>>().ok()?;
        // User, nice, system, idle, waiting, interrupts of two kinds, stolen; what comes behind is counted among the first two.
        let known = ticks.get(..8)?;
        Some(Processors { all: known.iter().sum(), stolen: *known.last()? })
    }

    /// The share of their time since then that the host gave to others while a thread here wanted it.
    pub(crate) fn stolen_since(self, earlier: Processors) -> Option<f64> {
        let all = self.all.checked_sub(earlier.all).filter(|all| *all > 0)?;
        Some(self.stolen.saturating_sub(earlier.stolen) as f64 / all as f64)
    }
}

/// How many cores this process may use.
pub fn cores() -> usize {
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
pub fn meminfo(name: &str) -> Option<u64> {
    let info = read("/proc/meminfo")?;
    let mut words =
        info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?.split_whitespace();
    let value: u64 = words.next()?.parse().ok()?;
    Some(if words.next() == Some("kB") { value * 1024 } else { value })
}

/// A line of `/proc/self/status`.
pub fn status(name: &str) -> Option<String> {
    let status = read("/proc/self/status")?;
    status.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim().to_owned()))
}

/// The choice in brackets of a kernel setting.
pub fn chosen(path: &str) -> String {
    let Some(setting) = read(path) else { return "unknown".to_owned() };
    let chosen = setting.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map(|(chosen, _)| chosen);
    chosen.unwrap_or_else(|| setting.trim()).to_owned()
}

/// A file's text, where it can be read.
pub fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_host_took_is_a_share_of_all_ticks_in_between() {
        let at = |line: &str| Processors::parse(line);
        let before = at("cpu  100 0 50 800 10 0 5 35 7 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n");
        let after = at("cpu  180 0 50 900 10 0 5 55 9 0\n");
        let share = before.zip(after).and_then(|(before, after)| after.stolen_since(before));
        assert_eq!(share, Some(0.1));
        let none = before.and_then(|before| before.stolen_since(before));
        assert_eq!(none, None, "no time has passed");
        assert!(at("cpu  1 2 3\n").is_none() && at("intr 5\n").is_none());
        assert!(Processors::now().is_some());
    }
}
