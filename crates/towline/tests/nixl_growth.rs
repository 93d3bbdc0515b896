//! Many registrations and transfers leave nothing behind. Alone in its process, whose descriptors, threads and memory it counts.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

#[path = "../../towline-testkit/src/skip.rs"]
#[allow(unreachable_pub, reason = "it is the file of the test kit, which this crate cannot depend on")]
mod skip;

use std::time::{Duration, Instant};

use towline::SystemStorage;
use towline::memory::MemoryAccess;
use towline::nixl::{
    AgentConfig, Engine, NixlAgent, NixlRegisterExt, NotificationMap, OptArgs, RegisteredView, XferDescList,
    XferOp, is_stub,
};

const ROUNDS: usize = 1000;
const LEN: usize = 64 << 10;

/// Open descriptors, threads, and bytes in memory.
fn held() -> (usize, usize, usize) {
    let count = |folder: &str| std::fs::read_dir(folder).unwrap().count();
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let resident: usize = pages.split(' ').nth(1).unwrap().parse().unwrap();
    (count("/proc/self/fd"), count("/proc/self/task"), resident * 4096)
}

fn round(owner: &NixlAgent, user: &NixlAgent, number: usize) {
    let fill = number as u8;
    let source = SystemStorage::new(LEN).unwrap();
    source.memset(fill, 0, LEN).unwrap();
    let source = source.register(owner, None).unwrap();
    let target = SystemStorage::new(LEN).unwrap().register(user, None).unwrap();
    let peer = user.load_remote_md(&owner.get_local_md().unwrap()).unwrap();
    let list = |view: &dyn RegisteredView| {
        let mut list = XferDescList::new(view.descriptor().mem_type).unwrap();
        list.add_storage_desc(&view.descriptor()).unwrap();
        list
    };
    let mut opt = OptArgs::new().unwrap();
    opt.set_notification_message(b"taken").unwrap();
    opt.set_has_notification(true).unwrap();
    let request = user.create_xfer_req(XferOp::Read, &list(&target), &list(&source), &peer, None).unwrap();
    // Without a thread of NIXL's own, these calls drive both agents.
    let (start, mut came) = (Instant::now(), NotificationMap::new().unwrap());
    let mut going = user.post_xfer_req(&request, Some(&opt)).unwrap();
    while going || came.is_empty().unwrap() {
        assert!(start.elapsed() < Duration::from_secs(60));
        owner.get_notifications(&mut came).unwrap();
        going = !user.get_xfer_status(&request).unwrap().is_success();
    }
    let mut bytes = vec![0; LEN];
    target.storage().read_at(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == fill));
    drop(request);
    target.into_storage().unwrap();
    // NIXL would connect anew, for which the UCX of its wheel keeps two descriptors each time.
    if user.engine() == Engine::Embedded {
        user.invalidate_remote_md(&peer).unwrap();
    }
}

#[test]
fn a_thousand_registrations_and_transfers_leave_nothing_behind() {
    let mut engines = vec![Engine::Embedded];
    if is_stub() {
        let test = "a_thousand_registrations_and_transfers_leave_nothing_behind";
        skip::skip(test, "nixl", "NIXL is not there: only the engine on an endpoint was tested");
    } else {
        engines.push(Engine::Nixl);
    }
    for engine in engines {
        let made = |name: &str| {
            let config =
                AgentConfig { engine: Some(engine), enable_prog_thread: false, ..AgentConfig::default() };
            let agent = NixlAgent::new_with_config(&format!("growth-{name}-{engine}"), &config).unwrap();
            agent.add_backend("UCX").unwrap();
            agent
        };
        let (owner, user) = (made("owner"), made("user"));
        // What is made once is made in these.
        (0..100).for_each(|number| round(&owner, &user, number));
        let before = held();
        (0..ROUNDS).for_each(|number| round(&owner, &user, number));
        let after = held();
        let grown = |after: usize, before: usize| after.saturating_sub(before);
        assert!(grown(after.0, before.0) <= 4, "descriptors on {engine}: {} to {}", before.0, after.0);
        assert!(grown(after.1, before.1) <= 4, "threads on {engine}: {} to {}", before.1, after.1);
        let limit = 24 << 20;
        assert!(grown(after.2, before.2) < limit, "bytes on {engine}: {} to {}", before.2, after.2);
    }
}
