//! Several parts in one request, on a library that only pretends: what is posted, and what happens while NIXL is at it.

use std::path::PathBuf;
use std::time::Duration;

use towline::{
    Access, BlockFailure, Endpoint, Kind, Part, Registered, Remote, SystemStorage, Ticket, Transfer,
};
use towline_testkit::bench::{STALL, options, options_for, outcome};
use towline_testkit::lending;
use towline_testkit::process::{Process, Wall};
use towline_testkit::skip;
use towline_testkit::watchdog::{eventually, watch};

use super::fake::{CHILD, HOLD, in_a_child, only_nixl};

const MIB: usize = 1 << 20;

/// Runs that test on the fake; false in the process that has seen to that.
fn on_the_fake(test: &str) -> bool {
    let child = std::env::var_os(CHILD).is_some();
    if !child {
        in_a_child("parts", test, &[]);
    }
    child
}

/// Regions of an owner, and as many here.
struct Scene {
    owner: Endpoint,
    user: Endpoint,
    regions: Vec<Registered<SystemStorage>>,
    sides: Sides,
}

struct Sides {
    remotes: Vec<Remote>,
    locals: Vec<Registered<SystemStorage>>,
}

impl Sides {
    fn of(user: &Endpoint, tickets: &[Ticket], lens: &[usize]) -> Sides {
        let remotes = tickets.iter().map(|ticket| user.import_with(ticket, &only_nixl()).unwrap());
        let local = |len: &usize| user.register(SystemStorage::new(*len).unwrap(), Access::NONE).unwrap();
        Sides { remotes: remotes.collect(), locals: lens.iter().map(local).collect() }
    }

    fn parts(&self) -> impl Iterator<Item = Part<'_>> {
        self.remotes.iter().zip(&self.locals).map(|(remote, local)| Part::new(remote, local))
    }
}

impl Scene {
    fn new(lens: &[usize]) -> Scene {
        let (owner, user) = (options_for("nixl", "owner").open().unwrap(), options("user").open().unwrap());
        let region = |len: &usize| owner.register(SystemStorage::new(*len).unwrap(), Access::READ_WRITE);
        let regions: Vec<_> = lens.iter().map(|len| region(len).unwrap()).collect();
        let tickets: Vec<_> = regions.iter().map(|region| region.ticket().unwrap()).collect();
        let sides = Sides::of(&user, &tickets, lens);
        Scene { owner, user, regions, sides }
    }

    fn read(&self) -> Transfer {
        self.user.read_parts(self.sides.parts()).notify("never").start().unwrap()
    }
}

fn posted(user: &Endpoint) -> u64 {
    user.stats().nixl.unwrap().posted
}

fn in_flight(user: &Endpoint) -> u64 {
    user.stats().nixl.unwrap().in_flight
}

fn hold() -> PathBuf {
    std::env::var_os(HOLD).unwrap().into()
}

/// From now on NIXL is at what is posted.
fn keep_in_flight() {
    std::fs::write(hold(), "k").unwrap();
}

fn let_go() {
    std::fs::remove_file(hold()).unwrap();
}

/// What of each part failed.
fn kinds(failures: &[BlockFailure]) -> Vec<(usize, Kind)> {
    failures.iter().map(|failure| (failure.part, failure.error.kind())).collect()
}

#[test]
fn sixty_four_small_parts_are_one_request_of_nixls() {
    let test = "sixty_four_small_parts_are_one_request_of_nixls";
    if std::env::var_os(CHILD).is_none() {
        let Some(calls) = in_a_child("parts", test, &[]) else { return };
        let all: usize = (1..=64).map(|part| part * 64).sum();
        for expected in ["read into user", "read from owne", "write from user", "write into owne"] {
            let line = format!("{expected} kind 0 device -1 length {all} in 64 ranges");
            assert_eq!(calls.matches(&line).count(), 1, "{calls}");
        }
        return;
    }
    let _watchdog = watch(test, STALL * 12);
    let scene = Scene::new(&(1..=64).map(|part| part * 64).collect::<Vec<_>>());
    let transfer = scene.read();
    transfer.wait().unwrap();
    assert_eq!((posted(&scene.user), transfer.bytes()), (1, 64 * 65 / 2 * 64));
    assert_eq!(scene.owner.receive(STALL).unwrap().message, b"never");
    scene.user.write_parts(scene.sides.parts()).start().unwrap().wait().unwrap();
    assert_eq!(posted(&scene.user), 2);
}

#[test]
fn parts_that_are_long_or_many_are_cut_into_requests() {
    let test = "parts_that_are_long_or_many_are_cut_into_requests";
    if !on_the_fake(test) {
        return;
    }
    let _watchdog = watch(test, STALL * 12);
    // A request has at most 32 MiB, of at most 64 parts.
    let cases: [(Vec<usize>, u64); 4] = [
        (vec![4096; 65], 2),
        (vec![8 * MIB, 8, 16 * MIB, 4096, 4 * MIB], 1),
        (vec![8, 40 * MIB, 100, 8], 3),
        (vec![20 * MIB; 3], 3),
    ];
    for (lens, requests) in cases {
        let scene = Scene::new(&lens);
        let transfer = scene.read();
        transfer.wait().unwrap();
        let bytes: usize = lens.iter().sum();
        assert_eq!((posted(&scene.user), transfer.bytes()), (requests, bytes as u64), "{lens:?}");
    }
}

#[test]
fn a_request_of_several_parts_has_sixteen_thousand_pieces_at_most() {
    let test = "a_request_of_several_parts_has_sixteen_thousand_pieces_at_most";
    if !on_the_fake(test) {
        return;
    }
    let _watchdog = watch(test, STALL * 12);
    let scene = Scene::new(&[MIB; 4]);
    // Off any grid, since the fake prepares no lists.
    let spans: Vec<_> = (0..7000).map(|at| (at * 32, at * 64, 8 + at % 2)).collect();
    let parts = scene.sides.parts().map(|part| part.spans(&spans));
    let transfer = scene.user.read_parts(parts).start().unwrap();
    transfer.wait().unwrap();
    assert_eq!((posted(&scene.user), transfer.bytes()), (2, 4 * 7000 * 17 / 2));
}

#[test]
fn a_stale_part_is_named_and_nothing_is_posted() {
    let test = "a_stale_part_is_named_and_nothing_is_posted";
    if !on_the_fake(test) {
        return;
    }
    let _watchdog = watch(test, STALL * 12);
    let mut scene = Scene::new(&[64, 4096, 100]);
    scene.read().wait().unwrap();
    scene.owner.receive(STALL).unwrap();
    scene.regions.remove(1).into_storage().unwrap();
    let transfer = scene.read();
    let error = transfer.wait().unwrap_err();
    assert!(error.kind() == Kind::Stale && error.message().contains("part 1 of 3"), "{error}");
    let expected = [(0, Kind::Canceled), (1, Kind::Stale), (2, Kind::Canceled)];
    assert_eq!(kinds(&transfer.failures()), expected);
    assert_eq!(posted(&scene.user), 1);
    assert!(scene.owner.try_receive().unwrap().is_none());
}

#[test]
fn a_signal_that_is_not_aligned_names_its_part_and_nothing_is_posted() {
    let test = "a_signal_that_is_not_aligned_names_its_part_and_nothing_is_posted";
    if !on_the_fake(test) {
        return;
    }
    let scene = Scene::new(&[64; 3]);
    let signalling = |offset| scene.user.write_parts(scene.sides.parts()).signal_in(2, offset, 1);
    let error = outcome(signalling(4).start()).unwrap_err();
    assert!(error.kind() == Kind::Invalid && error.message().contains("part 2 of 3"), "{error}");
    assert_eq!(posted(&scene.user), 0);
    outcome(signalling(8).start()).unwrap();
    assert_eq!(scene.regions[2].wait_signal(8, 1, STALL).unwrap(), 1);
}

#[test]
fn a_region_that_is_taken_back_in_flight_is_named_and_stays_until_nixl_lets_go() {
    let test = "a_region_that_is_taken_back_in_flight_is_named_and_stays_until_nixl_lets_go";
    if !on_the_fake(test) {
        return;
    }
    let _watchdog = watch(test, STALL * 24);
    // Where NIXL moves the bytes, those of the other parts count; where it fails, nothing does, but only the failed part is to blame.
    for fails in [false, true] {
        let mut scene = Scene::new(&[64, 4096, 100]);
        keep_in_flight();
        let transfer = scene.read();
        assert!(eventually(STALL, || in_flight(&scene.user) == 1));
        drop(scene.regions.remove(1));
        assert_eq!(scene.owner.stats().parked.0, 1, "NIXL is at it");
        if fails {
            std::fs::write(hold(), "f").unwrap();
        } else {
            let_go();
        }
        let error = transfer.wait().unwrap_err();
        assert!(error.kind() == Kind::Stale && error.message().contains("part 1 of 3"), "{error}");
        match fails {
            false => assert_eq!(kinds(&transfer.failures()), [(1, Kind::Stale)]),
            true => {
                let expected = [(0, Kind::Canceled), (1, Kind::Stale), (2, Kind::Canceled)];
                assert_eq!(kinds(&transfer.failures()), expected);
                let_go();
            }
        }
        assert!(transfer.quiet());
        assert!(eventually(STALL, || scene.owner.stats().parked.0 == 0));
        assert!(scene.owner.try_receive().unwrap().is_none(), "nothing follows");
    }
}

#[test]
fn what_nixl_fails_at_fails_for_all_parts() {
    let test = "what_nixl_fails_at_fails_for_all_parts";
    if !on_the_fake(test) {
        return;
    }
    let _watchdog = watch(test, STALL * 12);
    let scene = Scene::new(&[64, 4096, 100]);
    std::fs::write(hold(), "f").unwrap();
    let transfer = scene.read();
    assert_eq!(transfer.wait().unwrap_err().kind(), Kind::Native);
    assert_eq!(kinds(&transfer.failures()), [0, 1, 2].map(|part| (part, Kind::Native)));
    let last = &transfer.failures()[2];
    assert!(last.blocks == (0..1) && last.error.message().contains("part 2 of 3"), "{last:?}");
    assert!(scene.owner.try_receive().unwrap().is_none(), "nothing follows");
}

#[test]
fn a_cancelled_request_of_several_parts_keeps_the_memory_of_all_until_nixl_lets_go() {
    let test = "a_cancelled_request_of_several_parts_keeps_the_memory_of_all_until_nixl_lets_go";
    if !on_the_fake(test) {
        return;
    }
    let _watchdog = watch(test, STALL * 24);
    let Scene { owner, user, regions, sides: Sides { remotes, locals } } = Scene::new(&[64, 4096, 100]);
    keep_in_flight();
    let parts = remotes.iter().zip(&locals).map(|(remote, local)| Part::new(remote, local));
    let transfer = user.read_parts(parts).notify("never").start().unwrap();
    assert!(eventually(STALL, || in_flight(&user) == 1));
    transfer.cancel();
    assert_eq!(transfer.wait().unwrap_err().kind(), Kind::Canceled);
    assert!(!transfer.quiet(), "NIXL is still at it");
    drop(locals);
    assert_eq!(user.stats().parked, (3, 64 + 4096 + 100));
    let count = regions.len();
    regions.into_iter().for_each(drop);
    assert_eq!(owner.stats().parked.0, count);
    let_go();
    assert!(transfer.wait_quiet(STALL));
    assert!(eventually(STALL, || user.stats().parked == (0, 0) && owner.stats().parked == (0, 0)));
    assert!(owner.try_receive().unwrap().is_none(), "nothing follows");
}

/// An owner that shares no memory sees no pins: it asks for its region, and waits until nothing of any transfer is in flight there.
#[test]
fn an_owner_that_sees_no_pins_gets_its_region_back_when_the_request_with_it_has_ended() {
    let test = "an_owner_that_sees_no_pins_gets_its_region_back_when_the_request_with_it_has_ended";
    if !on_the_fake(test) {
        return;
    }
    let mut owner = match Process::start_behind(Wall::PidNamespace, "owner") {
        Ok(owner) => owner,
        Err(reason) => return skip::skip(test, "containers", &reason),
    };
    let _watchdog = watch(test, STALL * 24);
    owner.must(&format!("open owner {} stall={}", lending::words("nixl"), STALL.as_millis()));
    let user = options("user").open().unwrap();
    let lens = [4096, 64, 8192];
    let tickets = [1, 2, 3].map(|id| {
        assert_eq!(owner.must(&format!("register {} system read+write", lens[id - 1])).number(0), id as u64);
        owner.must(&format!("ticket {id}")).text(0).parse().unwrap()
    });
    let sides = Sides::of(&user, &tickets, &lens);
    keep_in_flight();
    let transfer = user.read_parts(sides.parts()).start().unwrap();
    assert!(eventually(STALL, || in_flight(&user) == 1));
    let held = owner.ask("deregister 2 200").unwrap_err();
    assert_eq!(held.kind, Kind::Timeout, "{held}");
    // Nothing new begins there, and what is in flight ends well: the region is still there.
    let late = user.read_parts(sides.parts()).start().unwrap();
    let error = late.wait().unwrap_err();
    assert!(error.kind() == Kind::Stale && error.message().contains("part 1 of 3"), "{error}");
    assert!(transfer.wait_for(Duration::ZERO).is_none());
    let_go();
    transfer.wait().unwrap();
    owner.must(&format!("deregister 2 {}", STALL.as_millis()));
    let others = sides.parts().enumerate().filter_map(|(number, part)| (number != 1).then_some(part));
    user.read_parts(others).start().unwrap().wait().unwrap();
    assert_eq!(posted(&user), 2);
}
