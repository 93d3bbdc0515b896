//! Meetings whose connections go through a bad network: every rank that joins gets a reply, or says itself what went wrong.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use towline::{Access, Endpoint, Kind, Registered, SystemStorage, Ticket};
use towline_testkit::proxy::{Faults, Proxy};
use towline_testkit::random::seed;
use towline_testkit::watchdog::watch;

use super::{Bounded, GRACE, Joining, Stream, WELCOME_LEN, join_by};
use crate::Result;
use crate::bootstrap::{UniqueIdOptions, open_meeting};
use crate::unique_id::UniqueId;

const NRANKS: usize = 3;

/// How long a rank waits for the others.
const PATIENCE: Duration = Duration::from_millis(800);

/// What a bad network may give.
const BROKEN: [Kind; 4] = [Kind::Disconnected, Kind::Timeout, Kind::Protocol, Kind::PermissionDenied];

/// About as much as goes over one connection in each direction: a fault comes somewhere within it.
const EVERY: u64 = 200;

struct Ranks {
    tickets: Vec<Ticket>,
    _regions: Vec<(Endpoint, Registered<SystemStorage>)>,
}

impl Ranks {
    fn new() -> Ranks {
        let regions: Vec<_> = (0..NRANKS)
            .map(|rank| {
                let endpoint = Endpoint::open(&format!("rank-{rank}")).unwrap();
                let region = endpoint.register(SystemStorage::new(64).unwrap(), Access::READ).unwrap();
                (endpoint, region)
            })
            .collect();
        let tickets = regions.iter().map(|(_, region)| region.ticket().unwrap()).collect();
        Ranks { tickets, _regions: regions }
    }

    fn join(&self, id: &UniqueId, rank: usize, address: SocketAddr) -> Result<Vec<Ticket>> {
        let joining = Joining {
            nranks: NRANKS,
            rank,
            digest: 7,
            name: "far",
            ticket: Some(&self.tickets[rank]),
            timeout: PATIENCE,
        };
        join_by(id, &joining, |_, _| Ok(Stream::Tcp(Bounded::new(TcpStream::connect(address).unwrap()))))
    }

    /// One meeting: how many ranks got the list.
    fn meet(&self, number: u64, tls: bool, faults: &Faults) -> usize {
        let seed = seed().wrapping_mul(1000).wrapping_add(number);
        let (id, _root) = open_meeting(&UniqueIdOptions { tls, ..UniqueIdOptions::default() }).unwrap();
        let proxy = Proxy::start(id.addresses()[0], seed, faults.clone());
        let address = proxy.address();
        let ends: Vec<Result<Vec<Ticket>>> = thread::scope(|scope| {
            let id = &id;
            let ranks: Vec<_> =
                (0..NRANKS).map(|rank| scope.spawn(move || self.join(id, rank, address))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let mut good = 0;
        for end in ends {
            match end {
                Ok(tickets) => {
                    let (replies, right): (Vec<_>, Vec<_>) =
                        tickets.iter().zip(&self.tickets).map(|(a, b)| (a.encode(), b.encode())).unzip();
                    assert_eq!(
                        replies, right,
                        "seed {seed}: a rank got a list with other ranks than those that joined"
                    );
                    good += 1;
                }
                Err(error) => assert!(BROKEN.contains(&error.kind()), "seed {seed}: {error}"),
            }
        }
        good
    }
}

/// Many meetings, some at the same time: how many ranks got the list, and how many ranks there were.
fn meet_all(test: &str, tls: bool, faults: &Faults) -> (usize, usize) {
    const MEETINGS: u64 = 24;
    let _watchdog = watch(test, (PATIENCE + GRACE) * 30);
    let ranks = Ranks::new();
    let (next, good) = (AtomicU64::new(0), Mutex::new(0));
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while let number @ 0..MEETINGS = next.fetch_add(1, Ordering::Relaxed) {
                    let replies = ranks.meet(number, tls, faults);
                    *good.lock() += replies;
                }
            });
        }
    });
    (good.into_inner(), MEETINGS as usize * NRANKS)
}

#[test]
fn delays_hold_nobody_up_for_ever_and_change_nothing() {
    for tls in [false, true] {
        let faults = Faults { every: EVERY, delay: Some(Duration::from_millis(10)), ..Faults::default() };
        let (good, _) = meet_all("delays_hold_nobody_up_for_ever_and_change_nothing", tls, &faults);
        assert!(good > 0, "tls {tls}: no rank got a reply");
    }
}

#[test]
fn cut_and_half_closed_connections_end_a_meeting_or_are_made_again() {
    for tls in [false, true] {
        for half_close in [false, true] {
            let faults = Faults { every: EVERY, cut: !half_close, half_close, ..Faults::default() };
            let test = "cut_and_half_closed_connections_end_a_meeting_or_are_made_again";
            let (good, all) = meet_all(test, tls, &faults);
            assert!(good < all, "tls {tls}: nothing was cut");
        }
    }
}

#[test]
fn bytes_that_vanish_end_a_meeting_at_its_limit() {
    let faults = Faults { every: EVERY, black_hole: true, ..Faults::default() };
    let (good, all) = meet_all("bytes_that_vanish_end_a_meeting_at_its_limit", false, &faults);
    assert!(good < all, "nothing vanished");
}

#[test]
fn a_changed_bit_is_noticed_wherever_it_is() {
    for tls in [false, true] {
        let faults = Faults { every: EVERY / 4, corrupt: true, anywhere: true, ..Faults::default() };
        let (good, all) = meet_all("a_changed_bit_is_noticed_wherever_it_is", tls, &faults);
        assert!(good < all, "tls {tls}: nothing was changed");
    }
}

#[test]
fn bytes_that_come_one_by_one_do_not_stretch_the_limit() {
    let faults = Faults { every: 1, throttle: Some(30), ..Faults::default() };
    let (good, _) = meet_all("bytes_that_come_one_by_one_do_not_stretch_the_limit", false, &faults);
    assert_eq!(good, 0, "a few bytes in a second are too few");
}

#[test]
fn a_root_that_greets_too_slowly_is_given_up_before_it_has_finished() {
    let _watchdog = watch("a_root_that_greets_too_slowly_is_given_up_before_it_has_finished", PATIENCE * 60);
    let (id, _root) = open_meeting(&UniqueIdOptions::default()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let slow = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        // Each byte comes in time; all of them together do not.
        for _ in 0..WELCOME_LEN {
            thread::sleep(PATIENCE / 8);
            if stream.write_all(&[0]).is_err() {
                break;
            }
        }
        let _ = stream.read(&mut [0]);
    });
    let error = Ranks::new().join(&id, 0, address).unwrap_err();
    // Had it waited for the whole greeting, it would have found it wrong.
    assert_eq!(error.kind(), Kind::Timeout, "{error}");
    slow.join().unwrap();
}
