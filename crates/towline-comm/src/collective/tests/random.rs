//! Every collective against the reference: random shapes, types, operations, roots and group sizes, by every algorithm.

use towline::Dtype;

use super::rig::{Case, Form, Links, Numbers, Room, on_ranks};
use crate::collective::Algorithm;
use crate::collective::choice::Kind;
use crate::combine::{Op, Scalar};
use crate::group;

const KINDS: [Kind; 8] = [
    Kind::AllReduce,
    Kind::Reduce,
    Kind::Broadcast,
    Kind::AllGather,
    Kind::Gather,
    Kind::Scatter,
    Kind::ReduceScatter,
    Kind::AllToAll,
];

const OPS: [Op; 6] = [Op::Sum, Op::Prod, Op::Min, Op::Max, Op::Avg, Op::ScaledSum(Scalar::Int(1))];

/// The memory of a rank on each side.
const ROOM: usize = 8 * LARGEST + 4096;
/// The most bytes of one block.
const LARGEST: usize = 300 << 10;

/// A call that can work on such a group.
fn case(numbers: &mut Numbers, nranks: usize, links: Links, wanted: Option<Algorithm>) -> Option<Case> {
    let kind = numbers.pick(&KINDS);
    let dtype = numbers.pick(&Dtype::ALL);
    let mut form = numbers.pick(&Form::ALL);
    if kind == Kind::AllToAll && form.in_place() {
        form = Form::Windows;
    }
    let largest =
        if wanted == Some(Algorithm::Tiny) { 1000 } else { [64, 2000, 40_000, LARGEST][numbers.below(4)] };
    let count = 1 + numbers.below(largest / dtype.size());
    let algorithm = wanted.unwrap_or(Algorithm::Auto);
    let possible = match algorithm {
        Algorithm::Direct => nranks == 1 || (links == Links::Near && form.is_registered()),
        Algorithm::Ring => !matches!(kind, Kind::Gather | Kind::Scatter | Kind::AllToAll),
        Algorithm::Tree => matches!(kind, Kind::AllReduce | Kind::Reduce | Kind::Broadcast),
        _ => true,
    };
    let case = Case {
        kind,
        dtype,
        op: numbers.pick(&OPS),
        count,
        shift: numbers.below(3),
        root: numbers.below(nranks),
        algorithm,
        form,
        seed: numbers.next(),
    };
    possible.then_some(case)
}

fn compare(nranks: usize, links: Links, wanted: &[Option<Algorithm>], cases: usize, seed: u64) {
    on_ranks(nranks, links, |comm| {
        let room = Room::new(comm, ROOM);
        let mut numbers = Numbers::new(seed);
        let mut done = 0;
        while done < cases {
            let algorithm = numbers.pick(wanted);
            if let Some(case) = case(&mut numbers, nranks, links, algorithm) {
                case.check(comm, &room).unwrap_or_else(|error| panic!("{case:?}: {error}"));
                done += 1;
            }
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn every_collective_equals_the_reference_as_chosen_for_groups_of_1_to_8() {
    for nranks in 1..=8 {
        compare(nranks, Links::Near, &[None], 24, 100 + nranks as u64);
    }
}

#[test]
fn every_collective_equals_the_reference_in_the_announcement() {
    for nranks in [1, 2, 3, 5, 8] {
        compare(nranks, Links::Near, &[Some(Algorithm::Tiny)], 40, 200 + nranks as u64);
    }
}

#[test]
fn every_collective_equals_the_reference_from_memory_to_memory() {
    for nranks in [1, 2, 3, 4, 7] {
        compare(nranks, Links::Near, &[Some(Algorithm::Direct)], 40, 300 + nranks as u64);
    }
}

#[test]
fn every_collective_equals_the_reference_through_channels() {
    let through = [Some(Algorithm::Staged), Some(Algorithm::Ring), Some(Algorithm::Tree)];
    for nranks in [1, 2, 3, 5, 8] {
        compare(nranks, Links::Near, &through, 30, 400 + nranks as u64);
    }
}

#[test]
fn every_collective_equals_the_reference_over_tcp() {
    let wanted =
        [None, Some(Algorithm::Tiny), Some(Algorithm::Staged), Some(Algorithm::Ring), Some(Algorithm::Tree)];
    for nranks in [2, 4] {
        compare(nranks, Links::Far, &wanted, 20, 500 + nranks as u64);
    }
}

#[test]
fn every_collective_equals_the_reference_where_some_ranks_are_near_and_some_far() {
    let wanted = [None, Some(Algorithm::Staged), Some(Algorithm::Ring), Some(Algorithm::Tree)];
    for nranks in [3, 4] {
        compare(nranks, Links::Mixed, &wanted, 20, 600 + nranks as u64);
    }
}

#[test]
fn long_reductions_are_right_in_every_word() {
    // More than a ring holds several times over, and more than is written through the cache; not a whole number of pieces.
    const WORDS: usize = (17 << 20) / 4 + 123;
    let forms = [
        (2, Form::Loose),
        (3, Form::Loose),
        (3, Form::LooseInPlace),
        (2, Form::Windows),
        (3, Form::WindowInPlace),
    ];
    for (nranks, form) in forms {
        on_ranks(nranks, Links::Near, |comm| {
            let rank = comm.rank().unwrap();
            let room = Room::new(comm, WORDS * 4);
            let [send, recv] = room.memory(form, rank);
            let recv = if form.in_place() { send.clone() } else { recv };
            let words =
                |of: usize| (0..WORDS as u32).map(move |at| at.wrapping_mul(2_654_435_761) ^ of as u32);
            let bytes: Vec<u8> = words(rank).flat_map(u32::to_le_bytes).collect();
            send.write_at(0, &bytes).unwrap();
            comm.all_reduce(&send, &recv, Dtype::U32, Op::Sum).unwrap();
            let mut found = vec![0; WORDS * 4];
            recv.read_at(0, &mut found).unwrap();
            let mut sums: Vec<u32> = vec![0; WORDS];
            for of in 0..nranks {
                sums.iter_mut().zip(words(of)).for_each(|(sum, word)| *sum = sum.wrapping_add(word));
            }
            let expected: Vec<u8> = sums.into_iter().flat_map(u32::to_le_bytes).collect();
            let wrong = found.iter().zip(&expected).position(|(found, expected)| found != expected);
            assert_eq!(wrong, None, "{nranks} ranks, {form:?}");
        });
    }
}

#[test]
fn sums_are_right_behind_messages_after_which_no_element_lies_whole_in_the_rings() {
    on_ranks(3, Links::Near, |comm| {
        let (rank, room) = (comm.rank().unwrap(), Room::new(comm, ROOM));
        for len in [3, 2, 1, 2] {
            let [send, recv] = room.memory(Form::Loose, rank).map(|memory| memory.part(0, len).unwrap());
            group(|| {
                comm.send(&send, Dtype::U8, (rank + 1) % 3)?;
                comm.recv(&recv, Dtype::U8, (rank + 2) % 3)
            })
            .unwrap();
            for dtype in [Dtype::U64, Dtype::F32] {
                let case = Case {
                    kind: Kind::AllReduce,
                    dtype,
                    op: Op::Sum,
                    count: 30_000,
                    shift: 1,
                    root: 0,
                    algorithm: Algorithm::Staged,
                    form: Form::Loose,
                    seed: len as u64,
                };
                case.check(comm, &room).unwrap();
            }
        }
    });
}
