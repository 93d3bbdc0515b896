//! What an owner keeps of its peers.
#![allow(clippy::unwrap_used)]

use super::grants::GRANT;
use super::local::LOCAL;
use super::*;
use crate::endpoint::Quotas;
use crate::region::SERVED;
use crate::{Endpoint, Registered, Remote, Routing, SystemStorage};

const MANY: usize = 1000;

struct Pair {
    owner: Endpoint,
    user: Endpoint,
    region: Registered<SystemStorage>,
}

impl Pair {
    fn open() -> Pair {
        let (owner, user) = (Endpoint::open("owner").unwrap(), Endpoint::open("user").unwrap());
        let region = owner.register(SystemStorage::new(4096).unwrap(), Access::READ_WRITE).unwrap();
        Pair { owner, user, region }
    }

    fn import(&self) -> Remote {
        self.user.import_with(&self.region.ticket().unwrap(), &over_tcp()).unwrap()
    }

    fn serving(&self) -> Arc<Serving> {
        lock(&self.owner.core().serving).iter().find_map(Weak::upgrade).unwrap()
    }

    /// The user's bytes come.
    fn reads(&self, remote: &Remote) {
        let local = self.user.register(SystemStorage::new(4096).unwrap(), Access::NONE).unwrap();
        self.user.read(remote, &local).start().unwrap().wait().unwrap();
    }
}

fn over_tcp() -> Routing {
    Routing::default().require("tcp").unwrap()
}

fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < until, "{what} did not come true");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_ticket_that_is_imported_again_has_the_same_handle_until_the_last_is_given_back() {
    let pair = Pair::open();
    let ticket = pair.region.ticket().unwrap();
    let import = || pair.user.import_with(&ticket, &over_tcp()).unwrap();
    let first = import();
    let serving = pair.serving();
    let (grants, memory) = (serving.grants.count(), pair.owner.stats().peer_memory);
    let more: Vec<Remote> = (0..MANY).map(|_| import()).collect();
    assert_eq!((serving.grants.count(), pair.owner.stats().peer_memory), (grants, memory));
    drop(first);
    more.iter().take(3).for_each(|remote| pair.reads(remote));
    // Another ticket of the region is another handle.
    let narrowed = ticket.narrow().range(0, 8).finish().unwrap();
    let other = pair.user.import_with(&narrowed, &over_tcp()).unwrap();
    assert_eq!(serving.grants.count(), grants + 1);
    drop((more, other));
    eventually("all are given back", || serving.grants.count() == 0);
    let again = import();
    pair.reads(&again);
}

#[test]
fn handles_that_are_in_use_are_not_given_again_after_the_last_number() {
    let pair = Pair::open();
    let kept = pair.import();
    let serving = pair.serving();
    serving.grants.begin_at(u32::MAX);
    let narrowed = |len| {
        let ticket = pair.region.ticket().unwrap().narrow().range(0, len).finish().unwrap();
        pair.user.import_with(&ticket, &over_tcp()).unwrap()
    };
    // The last number, and then the first that is free: 0 means nothing, and 1 is in use.
    let (last, next) = (narrowed(8), narrowed(16));
    for handle in [1, u32::MAX, 2] {
        assert!(serving.grants.find(handle).is_some(), "handle {handle}");
    }
    assert!(serving.grants.find(0).is_none());
    assert_eq!(serving.grants.find(1).unwrap().claims.range, 0..4096);
    pair.reads(&kept);
    drop((last, next));
}

#[test]
fn the_defaults_have_room_for_ten_thousand_peers_and_for_a_hundred_thousand_tickets_of_one() {
    let pair = Pair::open();
    let _remote = pair.import();
    let connection = pair.serving().control().unwrap().cost();
    let (peers, quotas) = (10_000, Quotas::default());
    let ticket = GRANT + SERVED;
    for session in [SESSION + 5 * connection + 32 * ticket, SESSION + connection + LOCAL + 32 * ticket] {
        assert!((peers * session) as u64 <= quotas.memory, "{session} bytes for each of {peers}");
    }
    assert!(quotas.peers >= peers && quotas.grants >= 100_000);
    // Beside a thousand others, which leave less to a single one.
    let budget = crate::endpoint::budget::Budget::new("tests", quotas.memory);
    let others = budget.account();
    let _others = (0..1000).map(|_| others.charge("test", (SESSION + connection + 32 * ticket) as u64));
    assert!(budget.account().charge("test", (100_000 * ticket) as u64).is_ok(), "{ticket} bytes each");
}

#[test]
fn what_a_session_is_counted_with_is_not_less_than_it_takes() {
    assert!(SESSION >= 2 * (size_of::<Serving>() + size_of::<Allowance>() + 256), "{}", size_of::<Serving>());
}
