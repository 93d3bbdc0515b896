//! Requests that are compiled once and started many times with new indices.

use std::sync::Arc;
use std::thread;

use towline::{
    Access, Endpoint, IndexList, Kind, Layout, Program, ProgramPart, Remote, Routing, SystemStorage, Transfer,
};

use crate::bench::{Bench, Parts, STALL, outcome, refused};
use crate::oracle::Stamp;
use crate::random::Random;

const THEIRS: Stamp = Stamp { region: 1, generation: 1 };
const OURS: Stamp = Stamp { region: 2, generation: 1 };

const BLOCK: u64 = 512;
const BLOCKS: u64 = 64;
const LEN: usize = (BLOCK * BLOCKS) as usize;

/// The blocks of a region, in two rows that lie one in the other.
fn pages() -> Layout {
    Layout::new(
        0,
        BLOCK,
        &[towline::Dim { count: 2, stride: BLOCK }, towline::Dim { count: BLOCKS / 2, stride: 2 * BLOCK }],
    )
    .unwrap()
}

fn program(bench: &Bench, parts: &Parts<'_>, remotes: &[Remote]) -> Program {
    let (theirs, ours) = (pages(), Layout::contiguous(LEN as u64, BLOCK).unwrap());
    let parts = remotes.iter().zip(&parts.locals);
    bench.user.program(parts.map(|(remote, local)| ProgramPart::new(remote, local, &theirs, &ours))).unwrap()
}

/// Different blocks, as many as that.
fn some(random: &mut Random, count: usize) -> Vec<u32> {
    let mut all: Vec<u32> = (0..BLOCKS as u32).collect();
    random.shuffle(&mut all);
    all.truncate(count);
    all
}

/// Says whether those blocks of a part have been read, and nothing else has changed.
fn check_read(parts: &Parts<'_>, part: usize, theirs: &[u32], ours: &[u32]) {
    let (layout, mut bytes) = (pages(), vec![0; LEN]);
    parts.locals[part].read_at(0, &mut bytes).unwrap();
    for (block, bytes) in bytes.chunks(BLOCK as usize).enumerate() {
        let at = ours.iter().position(|one| *one as usize == block);
        match at.map(|at| layout.offset(u64::from(theirs[at])).unwrap()) {
            Some(from) => THEIRS.of_part(part).verify(from, bytes).unwrap(),
            None => OURS.of_part(part).verify(block as u64 * BLOCK, bytes).unwrap(),
        }
    }
}

/// A start brings nothing but indices: the same for all parts, or some for each.
pub fn programs_move_what_their_indices_name(bench: &Bench) {
    let mut random = Random::new(31);
    for count in bench.counts() {
        let parts = bench.parts_of(vec![LEN; count], THEIRS);
        let all = program(bench, &parts, &parts.remotes);
        assert_eq!((all.len(), all.explain().parts.len()), (count, count));
        assert!(all.explain().to_string().contains(bench.path), "{}", all.explain());
        // By the calling thread, and by others.
        for blocks in [2, BLOCKS as usize] {
            let (theirs, ours) = (some(&mut random, blocks), some(&mut random, blocks));
            parts.fill_here(OURS);
            let transfer = all.read(&theirs, ours.clone()).start().unwrap();
            transfer.wait().unwrap();
            assert_eq!(
                (transfer.bytes(), transfer.path()),
                (count as u64 * blocks as u64 * BLOCK, bench.path)
            );
            (0..count).for_each(|part| check_read(&parts, part, &theirs, &ours));

            // Of some parts only.
            parts.fill_here(OURS);
            let last = all.select([count - 1]).unwrap();
            outcome(last.read(theirs.clone(), &ours).start()).unwrap();
            check_read(&parts, count - 1, &theirs, &ours);
            (0..count - 1).for_each(|part| check_read(&parts, part, &[], &[]));

            parts.fill_here(OURS);
            let each: Vec<_> =
                (0..count).map(|_| (some(&mut random, blocks), some(&mut random, blocks))).collect();
            let lists = each.iter().map(|(theirs, ours)| (IndexList::from(theirs), IndexList::from(ours)));
            outcome(all.read_each(lists).start()).unwrap();
            each.iter().enumerate().for_each(|(part, (theirs, ours))| check_read(&parts, part, theirs, ours));
        }
        // What is written comes back by the same indices.
        let (theirs, ours) = (some(&mut random, 7), some(&mut random, 7));
        parts.fill_here(OURS);
        outcome(all.write(&theirs, &ours).notify("written").start()).unwrap();
        assert_eq!(bench.owner.receive(STALL).unwrap().1, b"written");
        parts.fill_here(THEIRS);
        outcome(all.read(&theirs, &ours).start()).unwrap();
        for (part, local) in parts.locals.iter().enumerate() {
            for block in &ours {
                let mut bytes = vec![0; BLOCK as usize];
                let at = u64::from(*block) * BLOCK;
                local.read_at(at as usize, &mut bytes).unwrap();
                OURS.of_part(part).verify(at, &bytes).unwrap();
            }
        }
    }
}

/// Any number of starts may be in flight, from any number of threads.
pub fn starts_of_one_program_do_not_disturb_each_other(bench: &Bench) {
    const THREADS: usize = 4;
    let parts = bench.parts_of(vec![LEN; 3], THEIRS);
    parts.fill_here(OURS);
    let all = program(bench, &parts, &parts.remotes);
    let mut random = Random::new(32);
    let (theirs, ours) = (some(&mut random, BLOCKS as usize), some(&mut random, BLOCKS as usize));
    // Each thread reads blocks of its own, in several requests at a time.
    let share = BLOCKS as usize / THREADS;
    thread::scope(|scope| {
        for (theirs, ours) in theirs.chunks(share).zip(ours.chunks(share)) {
            let all = all.clone();
            scope.spawn(move || {
                let pairs = theirs.chunks(4).zip(ours.chunks(4));
                let started: Vec<Transfer> = pairs
                    .map(|(theirs, ours)| all.read(theirs.to_vec(), Arc::new(ours.to_vec())).start().unwrap())
                    .collect();
                started.iter().for_each(|transfer| transfer.wait().unwrap());
            });
        }
    });
    (0..3).for_each(|part| check_read(&parts, part, &theirs, &ours));
}

/// A program whose region is gone is stale and says which part; for other regions it is made anew.
pub fn a_program_of_a_region_that_is_gone_is_stale_and_can_be_rebound(bench: &Bench) {
    for count in [1, 5] {
        let mut parts = bench.parts_of(vec![LEN; count], THEIRS);
        let all = program(bench, &parts, &parts.remotes);
        let indices = [3u32, 1, 40];
        outcome(all.read(&indices, &indices).start()).unwrap();
        let gone = count / 2;
        parts.regions.remove(gone).deregister(STALL).unwrap();
        parts.fill_here(OURS);
        let error = refused(outcome(all.read(&indices, &indices).notify("never").start()), &[Kind::Stale]);
        if count > 1 {
            assert!(error.message().contains(&format!("part {gone} of {count}")), "{error}");
        }
        check_read(&parts, gone, &[], &[]);

        let again = bench.stamped(LEN, Access::READ_WRITE, THEIRS.of_part(gone));
        let remotes: Vec<Remote> = (0..count)
            .map(|part| if part == gone { bench.import(&again) } else { parts.remotes[part].clone() })
            .collect();
        let anew = all.rebind(&remotes).unwrap();
        parts.fill_here(OURS);
        outcome(anew.read(&indices, &indices).start()).unwrap();
        (0..count).for_each(|part| check_read(&parts, part, &indices, &indices));
        refused(all.rebind(&remotes[..count - 1]).map(drop), &[Kind::Invalid]);
        // A local region that is gone is no better.
        let closed = parts.locals.remove(gone);
        drop(closed);
        let error = refused(outcome(anew.read(&indices, &indices).start()), &[Kind::Stale]);
        assert!(count == 1 || error.message().contains(&format!("part {gone} of {count}")), "{error}");
    }
}

/// What is wrong with a program is said when it is made; what is wrong with indices when it is started, with the part and the index.
pub fn wrong_programs_and_indices_are_refused_before_a_byte_moves(bench: &Bench) {
    let parts = bench.parts_of(vec![LEN; 3], THEIRS);
    parts.fill_here(OURS);
    let all = program(bench, &parts, &parts.remotes);
    let pages = Layout::contiguous(LEN as u64, BLOCK).unwrap();
    let (long, thin) =
        (Layout::contiguous(2 * LEN as u64, BLOCK).unwrap(), Layout::contiguous(LEN as u64, 64).unwrap());
    let (remotes, locals) = (&parts.remotes, &parts.locals);
    let elsewhere = Endpoint::open("elsewhere").unwrap();
    let foreign = elsewhere.register(SystemStorage::new(LEN).unwrap(), Access::READ_WRITE).unwrap();
    let of_another = bench.user.import_with(&foreign.ticket().unwrap(), &Routing::default()).unwrap();
    let imported_there = elsewhere.import(&parts.regions[0].ticket()).unwrap();
    let with = |part: ProgramPart| {
        bench.user.program([ProgramPart::new(&remotes[0], &locals[0], &pages, &pages), part]).map(drop)
    };
    for (message, made) in [
        ("part 1 of 2: the remote layout", with(ProgramPart::new(&remotes[1], &locals[1], &long, &pages))),
        ("part 1 of 2: the local layout", with(ProgramPart::new(&remotes[1], &locals[1], &pages, &long))),
        ("part 1 of 2: remote blocks have", with(ProgramPart::new(&remotes[1], &locals[1], &pages, &thin))),
        ("one peer", with(ProgramPart::new(&of_another, &locals[1], &pages, &pages))),
        ("another endpoint", with(ProgramPart::new(&imported_there, &locals[1], &pages, &pages))),
        ("another endpoint", with(ProgramPart::new(&remotes[1], &foreign, &pages, &pages))),
        ("no parts", bench.user.program([]).map(drop)),
        ("no parts", all.select([]).map(drop)),
        ("no part 3", all.select([0, 3]).map(drop)),
    ] {
        let error = refused(made, &[Kind::Invalid]);
        assert!(error.message().contains(message), "{error}");
    }

    let long = vec![0u32; 4096];
    let mut wrong = long.clone();
    wrong[4000] = BLOCKS as u32;
    let one = || (IndexList::from(&[1u32]), IndexList::from(&[2u32]));
    for (message, started) in [
        ("remote index 64 (at 1)", all.read(&[1u32, 64], &[1u32, 2]).start()),
        ("local index 99 (at 0)", all.read(&[1u32], &[99u64]).start()),
        ("cannot pair", all.read(&[1u32, 2], &[1u32]).start()),
        ("local index 64 (at 4000)", all.read(long.clone(), wrong).start()),
        ("2 pairs of lists for 3 parts", all.read_each([one(), one()]).start()),
        ("part 2 of 3", all.read_each([one(), one(), (IndexList::from(&[64u32]), one().1)]).start()),
    ] {
        let error = refused(outcome(started), &[Kind::Invalid]);
        assert!(error.message().contains(message), "{error}");
    }
    (0..3).for_each(|part| check_read(&parts, part, &[], &[]));
    parts.check_there(THEIRS).unwrap();
}
