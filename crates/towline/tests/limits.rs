//! Limits that a caller may give: none of them is a panic.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use towline::{Access, Endpoint, Limits, Routing, SharedStorage, SystemStorage};

#[test]
fn for_ever_is_a_limit_like_any_other() {
    let for_ever = Duration::MAX;
    let limits = Limits { no_progress: for_ever, total: for_ever, bytes_per_second: 1 };
    assert_eq!(limits.total_for(u64::MAX), for_ever);
    let owner = Endpoint::options("owner").limits(limits).open().unwrap();
    let user = Endpoint::options("user").limits(limits).open().unwrap();
    let region = owner.register(SharedStorage::new(8 << 20).unwrap(), Access::READ).unwrap();
    let ticket = region.ticket().unwrap();
    for path in ["inproc", "mapped", "unix", "tcp"] {
        let routing = Routing::default().require(path).unwrap();
        let remote = user.import_within(&ticket, &routing, for_ever).unwrap();
        let local = user.register(SystemStorage::new(8 << 20).unwrap(), Access::NONE).unwrap();
        let transfer = user.read(&remote, &local).within(for_ever).notify("taken").start().unwrap();
        transfer.wait_for(for_ever).unwrap().unwrap();
        assert_eq!(owner.receive(for_ever).unwrap().message, b"taken");
        local.into_storage_within(for_ever).unwrap();
    }
    region.into_storage().unwrap();
}

/// The limits are those that are promised where nothing else was said.
#[test]
fn a_slow_link_gets_the_time_of_its_bytes() {
    let limits = Limits::default();
    assert_eq!(limits.no_progress, Duration::from_secs(5));
    assert_eq!(limits.total_for(0), Duration::from_secs(30));
    assert_eq!(limits.total_for(125_000_000), Duration::from_millis(32_500));
}
