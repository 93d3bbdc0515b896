//! Endpoints with a bad network between them: many seeds, and for each of them no wait past its limit, no late byte, no wrong
//! word. `TOWLINE_TEST_SEED` tries others.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod parts;
mod slow;

use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use towline::{Access, Endpoint, Kind, Limits, MemoryAccess, Registered, SystemStorage};
use towline_testkit::bench::{outcome, routing};
use towline_testkit::oracle::Stamp;
use towline_testkit::proxy::{Faults, Proxy};
use towline_testkit::random::{Random, seed};
use towline_testkit::watchdog::{eventually, stays, watch};

const KIB: usize = 1 << 10;
const LEN: usize = 3 << 20;

/// The limit without progress; what must end within it gets ten times as long.
const STALL: Duration = Duration::from_millis(400);

/// How long the proxy holds bytes back at most: less than it takes to give up.
const DELAY: Duration = Duration::from_millis(30);

const OLD: Stamp = Stamp { region: 1, generation: 1 };

/// The kinds of error that a bad network may give.
const BROKEN: [Kind; 5] =
    [Kind::Disconnected, Kind::Timeout, Kind::Protocol, Kind::PermissionDenied, Kind::Canceled];

struct Pair {
    user: Endpoint,
    region: Registered<SystemStorage>,
    owner: Endpoint,
    proxy: Proxy,
}

impl Pair {
    fn open(seed: u64, faults: Faults) -> Pair {
        // Another program may take the port in between; then the next one is tried.
        let (owner, proxy) = (0..10)
            .find_map(|_| {
                let listen = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
                let proxy = Proxy::start(listen, seed, faults.clone());
                let owner = Endpoint::options("owner")
                    .listen(listen)
                    .advertise(proxy.address())
                    .limits(Limits { no_progress: STALL, ..Limits::default() })
                    .open();
                owner.ok().map(|owner| (owner, proxy))
            })
            .unwrap();
        let region = owner.register(SystemStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap();
        OLD.fill_storage(region.storage()).unwrap();
        let limits = Limits { no_progress: STALL, total: STALL * 4, ..Limits::default() };
        let user = Endpoint::options("user").limits(limits).routing(routing("tcp")).lanes(2).open().unwrap();
        Pair { user, region, owner, proxy }
    }

    /// What the memory holds once the owner has noticed that a connection was cut, or given up by a user that no word reaches any
    /// more: until then it may be busy with what came before, the network may still hold some of it, and nobody can ask. Where
    /// nothing of that kind has happened that is now.
    fn settled(&self) -> Vec<u8> {
        let happened = self.proxy.happened();
        let mut last = self.look();
        let troubles = [&happened.cuts, &happened.corruptions, &happened.black_holes, &happened.throttles];
        if troubles.iter().any(|trouble| trouble.load(Ordering::Relaxed) > 0) {
            eventually(STALL * 10, || {
                thread::sleep(DELAY);
                let before = std::mem::replace(&mut last, self.look());
                self.owner.stats().in_flight.0 == 0 && before == last
            });
        }
        last
    }

    fn look(&self) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        self.region.storage().read_at(0, &mut bytes).unwrap();
        bytes
    }
}

#[derive(Default)]
struct Tally {
    good: u32,
    failed: u32,
}

/// A few transfers under one seed.
fn play(seed: u64, faults: Faults, tally: &mut Tally) {
    let mut random = Random::from_seed(seed);
    let pair = Pair::open(seed, faults);
    let ticket = pair.region.ticket().unwrap();
    let buffer = pair.user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
    let mut remote = None;
    for step in 0..6u16 {
        if remote.is_none() {
            match pair.user.import_within(&ticket, &routing("tcp"), STALL * 4) {
                Ok(imported) => remote = Some(imported),
                Err(error) => {
                    assert!(BROKEN.contains(&error.kind()), "seed {seed}: {error}");
                    tally.failed += 1;
                    continue;
                }
            }
        }
        let Some(there) = &remote else { continue };
        let len = random.pick(&[512, 16 * KIB, 200 * KIB, 600 * KIB, LEN]);
        let at = 8 * random.below(((LEN - len) / 8 + 1) as u64) as usize;
        let write = random.below(2) == 0;
        let mine = Stamp::new(2 + u16::from(!write), step);
        mine.fill_storage(buffer.storage()).unwrap();
        let before = pair.look();
        let request = if write { pair.user.write(there, &buffer) } else { pair.user.read(there, &buffer) };
        let started = request.at(at as u64, at as u64, len as u64).start();
        let ended = started.and_then(|transfer| {
            if random.below(5) == 0 {
                thread::sleep(random.micros(3000));
                transfer.cancel();
            }
            transfer.wait_for(STALL * 40).unwrap_or_else(|| panic!("seed {seed}: a transfer does not end"))
        });
        let at_the_end = if ended.is_ok() { pair.look() } else { pair.settled() };
        match &ended {
            Ok(()) if write => mine.verify(at as u64, &at_the_end[at..at + len]).unwrap(),
            Ok(()) => {
                let mut bytes = vec![0; len];
                buffer.read_at(at, &mut bytes).unwrap();
                assert_eq!(bytes, before[at..at + len], "seed {seed}: a read gave other bytes");
            }
            Err(error) => {
                assert!(BROKEN.contains(&error.kind()), "seed {seed}: {error}");
                // Whatever is put there now stays.
                mine.fill_storage(buffer.storage()).unwrap();
                let stayed = stays(DELAY * 3, || pair.look() == at_the_end);
                assert!(stayed, "seed {seed}, step {step}: written late");
                mine.verify_storage(buffer.storage(), 0, LEN)
                    .unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
            }
        }
        // Outside the range nothing has changed; inside there are old bytes and new ones, and no others.
        for (index, byte) in at_the_end.iter().enumerate() {
            let inside = (at..at + len).contains(&index) && write;
            let new = mine.word(index as u64).to_ne_bytes()[index % 8];
            assert!(
                *byte == before[index] || (inside && *byte == new),
                "seed {seed}, step {step}: the byte at {index} is neither old nor new"
            );
        }
        match ended {
            Ok(()) => tally.good += 1,
            Err(_) => {
                tally.failed += 1;
                remote = None;
            }
        }
    }
    drop(remote);
    let quiet = eventually(STALL * 40, || pair.user.stats().parked == (0, 0));
    assert!(quiet, "seed {seed}: {:?}", pair.user.stats());
    let _ = pair.proxy.happened().bytes.load(Ordering::Relaxed);
}

/// Plays many seeds, some side by side: most of the time is spent waiting.
fn play_all(test: &str, seeds: u64, faults: &Faults) -> Tally {
    let _watchdog = watch(test, Duration::from_secs(300));
    let (next, all) = (std::sync::atomic::AtomicU64::new(0), parking_lot::Mutex::new(Tally::default()));
    thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= seeds {
                        return;
                    }
                    let mut tally = Tally::default();
                    play(seed().wrapping_mul(1000).wrapping_add(number), faults.clone(), &mut tally);
                    let mut all = all.lock();
                    all.good += tally.good;
                    all.failed += tally.failed;
                }
            });
        }
    });
    all.into_inner()
}

#[test]
fn a_proxy_without_faults_changes_nothing() {
    let tally = play_all("a_proxy_without_faults_changes_nothing", 6, &Faults::default());
    assert!(tally.good >= 6, "{} transfers went well", tally.good);
}

/// How often the sides took turns while that happened.
fn turns<T>(pair: &Pair, what: impl FnOnce() -> T) -> (T, u64) {
    let turns = || pair.proxy.happened().turns.load(Ordering::Relaxed);
    let before = turns();
    (what(), turns() - before)
}

#[test]
fn an_import_is_one_round_trip_however_many_tickets_it_is_of() {
    const TICKETS: usize = 64;
    let pair = Pair::open(1, Faults::default());
    // The first contact is behind it: a handshake has round trips of its own.
    let _met = pair.user.import(&pair.region.ticket().unwrap()).unwrap();
    let others: Vec<_> = (0..=TICKETS)
        .map(|_| pair.owner.register(SystemStorage::new(KIB).unwrap(), Access::READ).unwrap())
        .collect();
    let tickets: Vec<_> = others.iter().map(|region| region.ticket().unwrap()).collect();

    let (one, taken) = turns(&pair, || pair.user.import(&tickets[TICKETS]).unwrap());
    assert_eq!(taken, 2, "one ticket");
    let (many, taken) = turns(&pair, || pair.user.import_many(&tickets[..TICKETS]).unwrap());
    assert!(many.iter().all(Result::is_ok));
    assert_eq!(taken, 2, "{TICKETS} tickets");
    drop(one);
}

#[test]
fn an_import_over_a_connection_that_is_cut_meanwhile_goes_over_another() {
    let test = "an_import_over_a_connection_that_is_cut_meanwhile_goes_over_another";
    let _watchdog = watch(test, Duration::from_secs(120));
    let pair = Pair::open(1, Faults::default());
    let ticket = pair.region.ticket().unwrap();
    for round in 0..200 {
        let before = pair.user.import(&ticket).unwrap();
        pair.proxy.cut_all();
        // Sometimes this side has noticed, and sometimes it asks over what is left of the connection.
        pair.user.import(&ticket).unwrap_or_else(|error| panic!("round {round}: {error}"));
        drop(before);
    }
}

#[test]
fn what_is_asked_for_after_a_cut_goes_over_a_new_connection() {
    let test = "what_is_asked_for_after_a_cut_goes_over_a_new_connection";
    let _watchdog = watch(test, Duration::from_secs(120));
    let pair = Pair::open(1, Faults::default());
    let buffer = pair.user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
    let remote = pair.user.import(&pair.region.ticket().unwrap()).unwrap();
    for round in 0..5u16 {
        let new = Stamp::new(7, round);
        let cut = || {
            pair.proxy.cut_all();
            assert!(eventually(STALL * 10, || remote.alive().is_err()), "the cut is not noticed");
            assert_eq!(remote.alive().unwrap_err().kind(), Kind::Disconnected);
            assert!(remote.lost_at().is_some());
        };
        new.fill_storage(pair.region.storage()).unwrap();
        cut();
        outcome(pair.user.read(&remote, &buffer).start()).unwrap();
        new.verify_storage(buffer.storage(), 0, LEN).unwrap();
        remote.alive().unwrap();
        assert_eq!(remote.lost_at(), None);
        OLD.fill_storage(buffer.storage()).unwrap();
        cut();
        outcome(pair.user.write(&remote, &buffer).at(0, 0, 4096).start()).unwrap();
        OLD.verify(0, &pair.look()[..4096]).unwrap();
        cut();
        let before = pair.user.fetch_add(&remote, 0, 5).unwrap();
        before.wait().unwrap();
        cut();
        outcome(pair.user.notify(&remote, format!("hello {round}"))).unwrap();
        assert_eq!(pair.owner.receive(STALL * 10).unwrap().message, format!("hello {round}").into_bytes());
        // Many at once make one connection.
        cut();
        let connections = || pair.proxy.happened().connections.load(Ordering::Relaxed);
        let before = connections();
        let reads: Vec<_> =
            (0..20).map(|_| pair.user.read(&remote, &buffer).at(0, 0, 64).start().unwrap()).collect();
        reads.iter().for_each(|read| read.wait().unwrap());
        assert_eq!(connections() - before, 1);
        assert!(eventually(STALL * 10, || pair.owner.stats().peers == 1), "{}", pair.owner.stats().peers);
    }
}

#[test]
fn what_waits_for_a_new_connection_can_be_cancelled() {
    let test = "what_waits_for_a_new_connection_can_be_cancelled";
    let _watchdog = watch(test, Duration::from_secs(120));
    let pair = Pair::open(1, Faults::default());
    let buffer = pair.user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
    let remote = pair.user.import(&pair.region.ticket().unwrap()).unwrap();
    // A peer that accepts and never answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    pair.proxy.aim(silent.local_addr().unwrap());
    pair.proxy.cut_all();
    assert!(eventually(STALL * 10, || remote.alive().is_err()), "the cut is not noticed");
    let long = Duration::from_secs(600);
    let waits = pair.user.read(&remote, &buffer).within(long).stall_within(long).start().unwrap();
    assert!(waits.wait_for(DELAY).is_none(), "it ends though nobody answers");
    waits.cancel();
    assert_eq!(waits.wait_for(STALL * 10).expect("it ends").unwrap_err().kind(), Kind::Canceled);
    assert!(waits.quiet());
    // Its own limit ends another one.
    let ended = outcome(pair.user.read(&remote, &buffer).start()).unwrap_err();
    assert_eq!(ended.kind(), Kind::Timeout, "{ended}");
}

#[test]
fn delays_between_connections_change_no_byte() {
    let faults = Faults { every: 60_000, delay: Some(DELAY / 10), ..Faults::default() };
    let tally = play_all("delays_between_connections_change_no_byte", 12, &faults);
    assert!(tally.good > 20, "{} transfers went well", tally.good);
}

#[test]
fn cut_and_half_closed_connections_end_transfers_quietly() {
    let faults =
        Faults { every: 800_000, delay: Some(DELAY / 10), cut: true, half_close: true, ..Faults::default() };
    let tally = play_all("cut_and_half_closed_connections_end_transfers_quietly", 40, &faults);
    assert!(tally.good > 0 && tally.failed > 0, "{} went well, {} failed", tally.good, tally.failed);
}

#[test]
fn a_network_that_does_everything_wrong_makes_nothing_wrong() {
    let tally = play_all(
        "a_network_that_does_everything_wrong_makes_nothing_wrong",
        60,
        &Faults::all(1_500_000, DELAY),
    );
    assert!(tally.good > 0 && tally.failed > 0, "{} went well, {} failed", tally.good, tally.failed);
}

#[test]
fn a_read_whose_lanes_are_cut_goes_on_over_new_ones() {
    let test = "a_read_whose_lanes_are_cut_goes_on_over_new_ones";
    let _watchdog = watch(test, Duration::from_secs(120));
    // The control connection carries too little to be cut.
    let faults = Faults { every: 2 << 20, cut: true, ..Faults::default() };
    let mut good = 0;
    for number in 0..20 {
        let pair = Pair::open(number, faults.clone());
        let buffer = pair.user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
        let remote = pair.user.import(&pair.region.ticket().unwrap()).unwrap();
        for _ in 0..4 {
            if outcome(pair.user.read(&remote, &buffer).start()).is_ok() {
                OLD.verify_storage(buffer.storage(), 0, LEN).unwrap();
                good += u64::from(pair.proxy.happened().cuts.load(Ordering::Relaxed) > 0);
            }
        }
    }
    assert!(good > 20, "{good} reads went well after a lane was cut");
}

#[test]
fn of_a_transfer_that_was_cut_every_block_has_the_right_outcome() {
    let test = "of_a_transfer_that_was_cut_every_block_has_the_right_outcome";
    let _watchdog = watch(test, Duration::from_secs(240));
    const BLOCK: usize = 32 * KIB;
    const BLOCKS: usize = LEN / BLOCK;
    let faults = Faults { every: 3 << 20, cut: true, half_close: true, ..Faults::default() };
    let (mut arrived, mut lost) = (0, 0);
    for number in 0..40 {
        let pair = Pair::open(number, faults.clone());
        let mut random = Random::from_seed(number);
        let buffer = pair.user.register(SystemStorage::new(LEN).unwrap(), Access::NONE).unwrap();
        let Ok(remote) = pair.user.import(&pair.region.ticket().unwrap()) else { continue };
        let pages = towline::Layout::blocks(0, BLOCK as u64, BLOCKS as u64, BLOCK as u64).unwrap();
        let mut there: Vec<u32> = (0..BLOCKS as u32).collect();
        let mut here = there.clone();
        random.shuffle(&mut there);
        random.shuffle(&mut here);
        let write = number % 2 == 0;
        let mine = Stamp::new(5, number as u16);
        mine.fill_storage(buffer.storage()).unwrap();
        let request =
            if write { pair.user.write(&remote, &buffer) } else { pair.user.read(&remote, &buffer) };
        let transfer = request.blocks(&pages, &there, &pages, &here).start().unwrap();
        let ended = transfer.wait_for(STALL * 40).expect("a transfer does not end");
        let failures = transfer.failures();
        assert_eq!(ended.is_err(), !failures.is_empty(), "{ended:?}");
        let at_theowner = pair.look();
        for block in 0..BLOCKS {
            if failures.iter().any(|failure| failure.blocks.contains(&(block as u64))) {
                lost += 1;
                continue;
            }
            arrived += 1;
            let (there, here) = (there[block] as usize * BLOCK, here[block] as usize * BLOCK);
            if write {
                mine.verify(here as u64, &at_theowner[there..there + BLOCK]).unwrap();
            } else {
                let mut bytes = vec![0; BLOCK];
                buffer.read_at(here, &mut bytes).unwrap();
                OLD.verify(there as u64, &bytes).unwrap();
            }
        }
    }
    assert!(arrived > 0 && lost > 0, "{arrived} blocks arrived, {lost} did not");
}
