//! Requests over several regions, through a network that counts them, and through one that loses them.

use std::sync::atomic::Ordering;
use std::time::Duration;

use towline::{Access, Kind, Part, Registered, Remote, SystemStorage};
use towline_testkit::oracle::Stamp;
use towline_testkit::proxy::Faults;
use towline_testkit::watchdog::{eventually, stays, watch};

use super::{BROKEN, DELAY, KIB, OLD, Pair, STALL};

/// Regions of the owner's, filled with stamps of their own, and memory of the user's for each.
struct Regions {
    owned: Vec<Registered<SystemStorage>>,
    remotes: Vec<Remote>,
    locals: Vec<Registered<SystemStorage>>,
    lens: Vec<usize>,
}

impl Regions {
    /// `None` where the network does not let them be imported.
    fn open(pair: &Pair, lens: Vec<usize>) -> Option<Regions> {
        let owned: Vec<_> = lens
            .iter()
            .map(|len| pair.owner.register(SystemStorage::new(*len).unwrap(), Access::READ_WRITE).unwrap())
            .collect();
        for (part, region) in owned.iter().enumerate() {
            OLD.of_part(part).fill_storage(region.storage()).unwrap();
        }
        let tickets: Vec<_> = owned.iter().map(|region| region.ticket().unwrap()).collect();
        let remotes = pair.user.import_many(&tickets).ok()?.into_iter().collect::<Result<_, _>>().ok()?;
        let local =
            |len: &usize| pair.user.register(SystemStorage::new(*len).unwrap(), Access::NONE).unwrap();
        let locals = lens.iter().map(local).collect();
        Some(Regions { owned, remotes, locals, lens })
    }

    fn parts(&self) -> impl Iterator<Item = Part<'_>> {
        self.remotes.iter().zip(&self.locals).map(|(remote, local)| Part::new(remote, local))
    }

    fn fill_here(&self, stamp: Stamp) {
        for (part, local) in self.locals.iter().enumerate() {
            stamp.of_part(part).fill_storage(local.storage()).unwrap();
        }
    }

    fn holds(&self, part: usize, there: bool, stamp: Stamp) -> bool {
        let storage = if there { self.owned[part].storage() } else { self.locals[part].storage() };
        stamp.of_part(part).verify_storage(storage, 0, self.lens[part]).is_ok()
    }

    fn all_hold(&self, there: bool, stamp: Stamp) -> bool {
        (0..self.lens.len()).all(|part| self.holds(part, there, stamp))
    }
}

#[test]
fn a_request_over_many_small_parts_is_one_stream_of_requests() {
    const PARTS: usize = 64;
    let test = "a_request_over_many_small_parts_is_one_stream_of_requests";
    let _watchdog = watch(test, Duration::from_secs(120));
    let pair = Pair::open(1, Faults::default());
    let regions = Regions::open(&pair, (0..PARTS).map(|part| 200 + 8 * part).collect()).unwrap();
    let happened = pair.proxy.happened();
    let (asked, turns) =
        (|| happened.asked.load(Ordering::Relaxed), || happened.turns.load(Ordering::Relaxed));
    for write in [false, true] {
        regions.fill_here(Stamp::new(2, 1));
        let before = (asked(), turns());
        // A user that waited for the first reply before it asked for the next part would ask for one part only.
        pair.proxy.hold_answers(true);
        let request = match write {
            true => pair.user.write_parts(regions.parts()),
            false => pair.user.read_parts(regions.parts()),
        };
        let transfer = request.stall_within(STALL * 10).start().unwrap();
        let all = eventually(STALL * 5, || asked() - before.0 >= PARTS as u64);
        assert!(all, "write {write}: {} requests for {PARTS} parts", asked() - before.0);
        assert!(!transfer.is_done());
        pair.proxy.hold_answers(false);
        transfer.wait().unwrap();
        assert_eq!(asked() - before.0, PARTS as u64, "write {write}: one request for each part");
        assert_eq!(turns() - before.1, 2, "write {write}: one round trip for all of them");
        let moved = Stamp::new(if write { 2 } else { OLD.region }, 1);
        assert!(regions.all_hold(write, moved), "write {write}");
    }
}

/// Eight regions of different lengths, together about as long as the one of the others here.
fn eight() -> Vec<usize> {
    (1..=8).map(|part| part * 90 * KIB + part).collect()
}

#[test]
fn a_read_over_eight_regions_whose_lanes_are_cut_goes_on_over_new_ones() {
    let test = "a_read_over_eight_regions_whose_lanes_are_cut_goes_on_over_new_ones";
    let _watchdog = watch(test, Duration::from_secs(120));
    // The control connection carries too little to be cut.
    let faults = Faults { every: 2 << 20, cut: true, ..Faults::default() };
    let mut good = 0;
    for number in 0..20 {
        let pair = Pair::open(number, faults.clone());
        let Some(regions) = Regions::open(&pair, eight()) else { continue };
        for _ in 0..4 {
            regions.fill_here(Stamp::new(2, 1));
            let transfer = pair.user.read_parts(regions.parts()).start().unwrap();
            let ended = transfer.wait_for(STALL * 40).expect("a transfer does not end");
            let failures = transfer.failures();
            assert_eq!(ended.is_err(), !failures.is_empty(), "{ended:?} {failures:?}");
            for part in 0..regions.lens.len() {
                let failed = failures.iter().any(|failure| failure.part == part);
                assert!(failed || regions.holds(part, false, OLD), "part {part} has wrong bytes: {ended:?}");
            }
            match ended {
                Ok(()) => good += u64::from(pair.proxy.happened().cuts.load(Ordering::Relaxed) > 0),
                Err(error) => assert!(BROKEN.contains(&error.kind()), "{error}"),
            }
        }
    }
    assert!(good > 20, "{good} reads went well after a lane was cut");
}

#[test]
fn of_a_request_over_eight_regions_that_was_cut_every_part_has_the_right_outcome() {
    let test = "of_a_request_over_eight_regions_that_was_cut_every_part_has_the_right_outcome";
    let _watchdog = watch(test, Duration::from_secs(240));
    let faults = Faults { every: 3 << 20, cut: true, half_close: true, ..Faults::default() };
    let (mut arrived, mut lost) = (0, 0);
    for number in 0..40 {
        let pair = Pair::open(number, faults.clone());
        let Some(regions) = Regions::open(&pair, eight()) else { continue };
        let (write, mine) = (number % 2 == 0, Stamp::new(5, number as u16));
        regions.fill_here(mine);
        let request = match write {
            true => pair.user.write_parts(regions.parts()),
            false => pair.user.read_parts(regions.parts()),
        };
        let Ok(transfer) = request.notify("moved").start() else { continue };
        let ended = transfer.wait_for(STALL * 40).expect("a transfer does not end");
        let failures = transfer.failures();
        match &ended {
            Ok(()) => assert!(failures.is_empty(), "{failures:?}"),
            Err(error) => assert!(BROKEN.contains(&error.kind()), "{error}"),
        }
        for part in 0..regions.lens.len() {
            if failures.iter().any(|failure| failure.part == part) {
                lost += 1;
                continue;
            }
            arrived += 1;
            let moved = if write { mine } else { OLD };
            assert!(regions.holds(part, write, moved), "seed {number}: part {part} did not fail: {ended:?}");
        }
        if ended.is_ok() {
            assert_eq!(pair.owner.receive(STALL * 10).unwrap().message, b"moved");
        } else if !write {
            // The buffers are the caller's again.
            regions.fill_here(mine);
            assert!(stays(DELAY, || regions.all_hold(false, mine)), "seed {number}: written late");
        }
    }
    assert!(arrived > 0 && lost > 0, "{arrived} parts arrived, {lost} did not");
}

#[test]
fn a_region_that_its_owner_takes_back_ends_what_is_in_flight_over_it_and_others() {
    let test = "a_region_that_its_owner_takes_back_ends_what_is_in_flight_over_it_and_others";
    let _watchdog = watch(test, Duration::from_secs(120));
    let pair = Pair::open(1, Faults::default());
    for (round, write) in [(1, false), (2, true)] {
        let mut regions = Regions::open(&pair, eight()).unwrap();
        let mine = Stamp::new(6, round);
        regions.fill_here(mine);
        pair.proxy.hold_answers(true);
        let request = match write {
            true => pair.user.write_parts(regions.parts()),
            false => pair.user.read_parts(regions.parts()),
        };
        let transfer = request.stall_within(STALL * 10).start().unwrap();
        // The last is taken back while nobody has got a reply: what of it was not sent or applied by then never is.
        let taken = regions.owned.pop().unwrap().into_storage_within(STALL * 10).unwrap();
        let (last, new) = (regions.owned.len(), Stamp::new(7, round));
        new.fill_storage(&taken).unwrap();
        pair.proxy.hold_answers(false);
        let ended = transfer.wait_for(STALL * 40).expect("a transfer does not end");
        let failures = transfer.failures();
        if let Err(error) = &ended {
            assert_eq!(error.kind(), Kind::Stale, "{error}");
            assert!(error.message().contains(&format!("part {last} of 8")), "{error}");
            assert!(failures.iter().any(|failure| failure.part == last), "{failures:?}");
        }
        for part in 0..last {
            if failures.iter().all(|failure| failure.part != part) {
                assert!(regions.holds(part, write, if write { mine } else { OLD }), "part {part} is wrong");
            }
        }
        let stayed = stays(DELAY, || new.verify_storage(&taken, 0, regions.lens[last]).is_ok());
        assert!(stayed, "written into memory that was taken back");
    }
}
