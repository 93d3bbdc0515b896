//! Memory, kernel, namespaces and limits.

use rustix::process::{Resource, getrlimit};
use towline::memory::{HugePages, SharedStorage};
use towline_lab::machine::{self, Machine, chosen, meminfo, read, status};
use towline_lab::size;

use super::{Check, Status};

pub(super) fn check() -> Vec<Check> {
    let mut checks = memory();
    checks.extend(kernel());
    checks.extend(limits());
    checks
}

fn memory() -> Vec<Check> {
    const GROUP: &str = "Memory";
    let shared = match SharedStorage::new(1 << 16) {
        Ok(_) => Check::new(GROUP, "shared memory", Status::Ok, "memfd_create and sealing work"),
        Err(error) => Check::new(GROUP, "shared memory", Status::Missing, error.to_string())
            .mend("allow memfd_create, and raise the memory limit of this process"),
    };
    let (total, free) = (meminfo("HugePages_Total").unwrap_or(0), meminfo("HugePages_Free").unwrap_or(0));
    let page = size::bytes(meminfo("Hugepagesize").unwrap_or(0));
    let pool = match SharedStorage::options().huge_pages(HugePages::Require).allocate(1 << 16) {
        Ok(_) => {
            Check::new(GROUP, "huge page pool", Status::Ok, format!("{free} of {total} pages of {page} free"))
        }
        Err(_) => Check::new(
            GROUP,
            "huge page pool",
            Status::Note,
            format!("{free} of {total} pages of {page} free; HugePages::Require fails"),
        )
        .mend("only for HugePages::Require: sysctl vm.nr_hugepages=N"),
    };
    let private = chosen("/sys/kernel/mm/transparent_hugepage/enabled");
    let (transparent, mend) = match private.as_str() {
        "always" | "madvise" => (Status::Ok, ""),
        _ => (
            Status::Note,
            "copies of private memory by the kernel are faster with huge pages: echo madvise > \
                             /sys/kernel/mm/transparent_hugepage/enabled",
        ),
    };
    let shmem = chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    let (shmem_status, shmem_mend) = match shmem.as_str() {
        "always" | "within_size" | "advise" | "force" => (Status::Ok, ""),
        "never" => (
            Status::Note,
            "before Linux 6.1 shared memory gets no huge pages: echo advise > \
             /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        ),
        _ => (
            Status::Note,
            "shared memory gets no huge pages: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        ),
    };
    vec![
        shared,
        pool,
        Check::new(GROUP, "transparent huge pages", transparent, private.clone()).mend(mend),
        Check::new(GROUP, "the same for shared memory", shmem_status, shmem.clone()).mend(shmem_mend),
        Check::fact(
            GROUP,
            "memory",
            format!(
                "{} available of {}{}",
                size::bytes(meminfo("MemAvailable").unwrap_or(0)),
                size::bytes(meminfo("MemTotal").unwrap_or(0)),
                cgroup_limit()
                    .map(|limit| format!("; this control group may use {limit}"))
                    .unwrap_or_default()
            ),
        ),
    ]
}

/// The memory limit of this process's control group, where it has one.
fn cgroup_limit() -> Option<String> {
    let groups = read("/proc/self/cgroup")?;
    let group = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let limit: u64 = read(&format!("/sys/fs/cgroup{group}/memory.max"))?.trim().parse().ok()?;
    Some(size::bytes(limit))
}

fn kernel() -> Vec<Check> {
    const GROUP: &str = "Kernel";
    let machine = Machine::here();
    let waitv = match rustix::thread::futex::waitv(
        &[],
        rustix::thread::futex::WaitvFlags::empty(),
        None,
        rustix::thread::ClockId::Monotonic,
    ) {
        // An empty list is refused by a kernel that knows the call.
        Err(rustix::io::Errno::INVAL) | Ok(_) => {
            Check::new(GROUP, "futex_waitv", Status::Ok, "deaths of peers are noticed by futex")
        }
        Err(error) => {
            Check::new(GROUP, "futex_waitv", Status::Note, format!("{error}; pidfds are used instead"))
                .mend("Linux 5.16 or newer, and a seccomp profile that allows it")
        }
    };
    let yama = match read("/proc/sys/kernel/yama/ptrace_scope").as_deref().map(str::trim) {
        None => Check::new(GROUP, "yama", Status::Ok, "not present: it does not restrict cma"),
        Some("0") => Check::new(GROUP, "yama", Status::Ok, "ptrace_scope 0: it does not restrict cma"),
        Some("1") => Check::new(
            GROUP,
            "yama",
            Status::Note,
            "ptrace_scope 1: cma works only towards a process's own children, or where they allow it",
        )
        .mend("sysctl kernel.yama.ptrace_scope=0, or use SharedStorage, which needs no such right"),
        Some(scope) => {
            Check::new(GROUP, "yama", Status::Note, format!("ptrace_scope {scope}: cma needs CAP_SYS_PTRACE"))
                .mend("sysctl kernel.yama.ptrace_scope=0, or use SharedStorage, which needs no such right")
        }
    };
    let seccomp = match status("Seccomp").as_deref() {
        Some("0") => Check::new(GROUP, "seccomp", Status::Ok, "no filter"),
        Some("2") => Check::fact(GROUP, "seccomp", "a filter is active: see the paths for what it forbids"),
        Some(mode) => Check::fact(GROUP, "seccomp", format!("mode {mode}")),
        None => Check::fact(GROUP, "seccomp", "unknown"),
    };
    let mut checks = vec![
        Check::fact(GROUP, "kernel", format!("{} on {}", machine.kernel, machine.arch)),
        Check::fact(
            GROUP,
            "processor",
            format!("{}, {} cores, {} NUMA nodes", machine.cpu, machine.cores, machine.numa_nodes),
        ),
        waitv,
        yama,
        seccomp,
    ];
    checks.extend(["user", "pid", "net"].map(namespace));
    checks
}

fn namespace(name: &'static str) -> Check {
    const GROUP: &str = "Kernel";
    let link = |process: &str| {
        std::fs::read_link(format!("/proc/{process}/ns/{name}")).ok().map(|link| link.display().to_string())
    };
    let label = format!("{name} namespace");
    match (link("self"), link("1")) {
        (Some(own), Some(first)) if own == first => {
            Check::fact(GROUP, label, format!("{own}, that of process 1"))
        }
        (Some(own), Some(_)) => Check::fact(GROUP, label, format!("{own}, not that of process 1")),
        (Some(own), None) => Check::fact(GROUP, label, own),
        (None, _) => Check::fact(GROUP, label, "unknown"),
    }
}

fn limits() -> Vec<Check> {
    const GROUP: &str = "Limits";
    let shown = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |limit| limit.to_string());
    let files = getrlimit(Resource::Nofile);
    let found = format!("{} now, {} at most", shown(files.current), shown(files.maximum));
    let files = match files.current {
        Some(limit) if limit < 4096 => Check::new(GROUP, "open files", Status::Note, found)
            .mend("every peer takes a few descriptors: ulimit -n 65536"),
        _ => Check::new(GROUP, "open files", Status::Ok, found),
    };
    let locked = getrlimit(Resource::Memlock).current;
    let processes = getrlimit(Resource::Nproc).current;
    vec![
        files,
        Check::fact(
            GROUP,
            "locked memory",
            format!(
                "{} (only what an RDMA device moves is locked)",
                locked.map_or("unlimited".to_owned(), size::bytes)
            ),
        ),
        Check::fact(GROUP, "threads", format!("{} for this user", shown(processes))),
        Check::fact(GROUP, "copy threads", format!("up to {}", machine::cores().min(16))),
    ]
}
