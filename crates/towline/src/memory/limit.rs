//! How much memory can still be had.
//!
//! Reserving shared memory takes pages at once. Past the machine's or the control group's limit the kernel
//! does not refuse: it kills a process. So the limits are read first, and what cannot fit is an error.

use std::fs;

use crate::{Error, Kind, Result};

/// Shorter reservations are not worth reading a handful of files: they drown in what the system does anyway.
const WORTH_ASKING: usize = 4 << 20;

/// Fails with `Exhausted` where `len` more bytes cannot fit.
///
/// Only what is certain is refused: whatever the kernel could reclaim or swap out counts as room.
pub(super) fn has_room_for(len: usize) -> Result<()> {
    if len < WORTH_ASKING {
        return Ok(());
    }
    match tightest(|path| fs::read_to_string(path).ok()) {
        Some(room) if room.bytes < len as u64 => Err(Error::new(
            Kind::Exhausted,
            "allocate",
            format!("{len} bytes do not fit: {} has room for {} more", room.whose, room.bytes),
        )),
        _ => Ok(()),
    }
}

/// How many bytes a limit leaves.
struct Room {
    bytes: u64,
    whose: String,
}

/// The smallest room among the machine and the control groups that this process is in.
fn tightest(read: impl Fn(&str) -> Option<String>) -> Option<Room> {
    let meminfo = read("/proc/meminfo")?;
    let kib = |name| field(&meminfo, name).map_or(0, |kib| kib << 10);
    let swap = kib("SwapFree:");
    let machine = field(&meminfo, "MemAvailable:")
        .map(|available| Room { bytes: (available << 10).saturating_add(swap), whose: "the machine".into() });

    let groups = read("/proc/self/cgroup").unwrap_or_default();
    let mut rooms: Vec<Room> = machine.into_iter().collect();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        if controllers.is_empty() {
            rooms.extend(ancestors(path).filter_map(|group| unified(&read, group, swap)));
        } else if controllers.split(',').any(|controller| controller == "memory") {
            rooms.extend(ancestors(path).filter_map(|group| legacy(&read, group, swap)));
        }
    }
    rooms.into_iter().min_by_key(|room| room.bytes)
}

/// The group, its parent, and so on up to the root, which is the empty path.
fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(path.trim_end_matches('/')), |group| {
        group.rfind('/').map(|slash| &group[..slash])
    })
}

fn unified(read: &impl Fn(&str) -> Option<String>, group: &str, swap: u64) -> Option<Room> {
    let file = |name: &str| read(&format!("/sys/fs/cgroup{group}/{name}"));
    let number = |name: &str| file(name)?.trim().parse::<u64>().ok();
    // "max", which means no limit, is not a number.
    let limit = number("memory.max")?;
    let used = number("memory.current")?;
    let stat = file("memory.stat").unwrap_or_default();
    let reclaimable = ["inactive_file", "active_file", "slab_reclaimable"];
    let swap = match (number("memory.swap.max"), number("memory.swap.current")) {
        (Some(limit), used) => swap.min(limit.saturating_sub(used.unwrap_or(0))),
        (None, _) => swap,
    };
    Some(room(group, limit, used, &stat, &reclaimable, swap))
}

fn legacy(read: &impl Fn(&str) -> Option<String>, group: &str, swap: u64) -> Option<Room> {
    let file = |name: &str| read(&format!("/sys/fs/cgroup/memory{group}/{name}"));
    let number = |name: &str| file(name)?.trim().parse::<u64>().ok();
    let limit = number("memory.limit_in_bytes")?;
    let used = number("memory.usage_in_bytes")?;
    let stat = file("memory.stat").unwrap_or_default();
    Some(room(group, limit, used, &stat, &["total_inactive_file", "total_active_file"], swap))
}

fn room(group: &str, limit: u64, used: u64, stat: &str, reclaimable: &[&str], swap: u64) -> Room {
    let reclaimable =
        reclaimable.iter().filter_map(|name| field(stat, name)).fold(0, |sum, more| more.saturating_add(sum));
    let bytes = limit.saturating_sub(used.saturating_sub(reclaimable)).saturating_add(swap);
    let group = if group.is_empty() { "/" } else { group };
    Room { bytes, whose: format!("control group {group} with its limit of {limit}") }
}

/// The number that follows `name` on its line.
pub(super) fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        if words.next()? == name { words.next()?.parse().ok() } else { None }
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use super::*;

    fn with(files: &'static [(&'static str, &'static str)]) -> Option<Room> {
        tightest(|path| files.iter().find(|(name, _)| *name == path).map(|(_, text)| (*text).to_owned()))
    }

    const MEMINFO: (&str, &str) =
        ("/proc/meminfo", "MemTotal: 9 kB\nMemAvailable:    4096 kB\nSwapFree:        1024 kB\n");

    #[test]
    fn without_control_groups_the_machine_decides() {
        let room = with(&[MEMINFO]).unwrap();
        assert_eq!(room.bytes, 5 << 20);
        assert_eq!(room.whose, "the machine");
    }

    #[test]
    fn the_tightest_of_the_nested_groups_decides() {
        let room = with(&[
            MEMINFO,
            ("/proc/self/cgroup", "0::/pod/worker\n"),
            ("/sys/fs/cgroup/pod/worker/memory.max", "max\n"),
            ("/sys/fs/cgroup/pod/memory.max", "1000000\n"),
            ("/sys/fs/cgroup/pod/memory.current", "900000\n"),
            ("/sys/fs/cgroup/pod/memory.swap.max", "0\n"),
            ("/sys/fs/cgroup/pod/memory.stat", "anon 5\ninactive_file 200000\nactive_file 1\n"),
        ])
        .unwrap();
        assert_eq!(room.bytes, 300_001);
        assert!(room.whose.contains("/pod "), "{}", room.whose);
    }

    #[test]
    fn a_container_whose_group_is_the_root_is_seen() {
        let room = with(&[
            MEMINFO,
            ("/proc/self/cgroup", "0::/\n"),
            ("/sys/fs/cgroup/memory.max", "100\n"),
            ("/sys/fs/cgroup/memory.current", "40\n"),
            ("/sys/fs/cgroup/memory.swap.max", "0\n"),
        ])
        .unwrap();
        assert_eq!(room.bytes, 60);
    }

    #[test]
    fn the_older_kind_of_control_group_is_read_too() {
        let room = with(&[
            ("/proc/meminfo", "MemAvailable: 4096 kB\n"),
            ("/proc/self/cgroup", "4:cpu:/a\n7:memory,pids:/a/b\n"),
            ("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1000\n"),
            ("/sys/fs/cgroup/memory/a/memory.usage_in_bytes", "1200\n"),
        ])
        .unwrap();
        assert_eq!(room.bytes, 0);
    }

    #[test]
    fn more_than_any_machine_has_is_refused_and_a_little_is_not() {
        assert_eq!(has_room_for(1 << 60).unwrap_err().kind(), Kind::Exhausted);
        has_room_for(4096).unwrap();
    }
}
