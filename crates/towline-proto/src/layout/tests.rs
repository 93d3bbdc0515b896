#![allow(clippy::unwrap_used, clippy::panic)]

use proptest::prelude::*;

use super::*;
use crate::Kind;

fn dim(count: u64, stride: u64) -> Dim {
    Dim { count, stride }
}

fn is_invalid<T: fmt::Debug>(result: Result<T>, words: &str) {
    let error = result.unwrap_err();
    assert_eq!((error.kind(), error.op()), (Kind::Invalid, "layout"));
    assert!(error.message().contains(words), "{words:?} is not in {:?}", error.message());
}

#[test]
fn a_layout_with_zeros_is_refused() {
    is_invalid(Layout::contiguous(0, 8), "dimension 0 is zero");
    is_invalid(Layout::contiguous(8, 0), "whole blocks");
    is_invalid(Layout::contiguous(9, 8), "whole blocks");
    is_invalid(Layout::blocks(0, 0, 1, 8), "block length is zero");
    is_invalid(Layout::new(0, 8, &[dim(2, 8), dim(0, 8)]), "dimension 1 is zero");
}

#[test]
fn a_layout_has_one_to_four_dimensions() {
    is_invalid(Layout::new(0, 8, &[]), "1 to 4");
    is_invalid(Layout::new(0, 8, &[dim(1, 8); 5]), "1 to 4");
    Layout::new(0, 8, &[dim(1, 8); 4]).unwrap();
}

#[test]
fn an_offset_that_cannot_be_reached_in_64_bits_is_refused() {
    is_invalid(Layout::blocks(u64::MAX, 1, 1, 0), "last block");
    is_invalid(Layout::blocks(1, 1, 2, u64::MAX - 1), "last block");
    is_invalid(Layout::blocks(0, 1, 3, u64::MAX / 2 + 1), "last block");
    is_invalid(Layout::new(0, 1, &[dim(1 << 32, 0), dim(1 << 32, 0)]), "number of blocks");
    // A stride that is never stepped may be anything.
    Layout::blocks(0, 1, 1, u64::MAX).unwrap();
    assert_eq!(Layout::blocks(0, 1, 2, u64::MAX - 1).unwrap().extent(), u64::MAX);
}

#[test]
fn the_last_dimension_is_the_fastest() {
    let layout = Layout::new(1000, 4, &[dim(2, 100), dim(3, 10)]).unwrap();
    let offsets: Vec<_> = (0..6).map(|index| layout.offset(index).unwrap()).collect();
    assert_eq!(offsets, [1000, 1010, 1020, 1100, 1110, 1120]);
    assert_eq!((layout.base(), layout.block_len(), layout.block_count()), (1000, 4, 6));
    assert_eq!(layout.extent(), 1124);
    layout.fits(1124).unwrap();
    is_invalid(layout.fits(1123), "1123 bytes");
    is_invalid(layout.offset(6), "past the layout's 6 blocks");
}

#[test]
fn a_layout_survives_serialization_and_a_bad_one_does_not_come_in() {
    let layout = Layout::new(16, 8, &[dim(3, 100), dim(4, 8)]).unwrap();
    let text = serde_json::to_string(&layout).unwrap();
    assert_eq!(text, r#"{"base":16,"block_len":8,"dims":[{"count":3,"stride":100},{"count":4,"stride":8}]}"#);
    assert_eq!(serde_json::from_str::<Layout>(&text).unwrap(), layout);

    for bad in [
        r#"{"base":0,"block_len":8,"dims":[]}"#,
        r#"{"base":0,"block_len":0,"dims":[{"count":1,"stride":8}]}"#,
        r#"{"base":0,"block_len":8,"dims":[{"count":0,"stride":8}]}"#,
        r#"{"base":18446744073709551615,"block_len":8,"dims":[{"count":1,"stride":8}]}"#,
        r#"{"base":0,"block_len":8,"dims":[{"count":1,"stride":8}],"more":1}"#,
    ] {
        serde_json::from_str::<Layout>(bad).unwrap_err();
    }
}

#[test]
fn debug_shows_only_the_dimensions_that_were_given() {
    let layout = Layout::contiguous(16, 8).unwrap();
    assert_eq!(
        format!("{layout:?}"),
        "Layout { base: 0, block_len: 8, dims: [Dim { count: 2, stride: 8 }] }"
    );
}

#[test]
fn indices_come_from_slices_arrays_and_vectors() {
    let (narrow, wide) = (vec![1u32, 2], vec![1u64, 2]);
    assert_eq!(Indices::from(&narrow), Indices::U32(&[1, 2]));
    assert_eq!(Indices::from(&narrow[..]), Indices::from(&[1u32, 2]));
    assert_eq!(Indices::from(&wide), Indices::U64(&[1, 2]));
    assert_eq!(Indices::from(&wide[..]), Indices::from(&[1u64, 2]));
}

#[test]
fn unequal_sides_do_not_pair() {
    let eight = Layout::contiguous(64, 8).unwrap();
    let four = Layout::contiguous(64, 4).unwrap();
    is_invalid(Plan::blocks(&eight, Indices::All, &four, Indices::All), "8 bytes, local ones 4");
    let pair = Indices::U32(&[0, 1]);
    is_invalid(Plan::blocks(&eight, pair, &eight, Indices::All), "2 remote blocks cannot pair with 8");
}

#[test]
fn an_index_past_its_layout_is_named() {
    let layout = Layout::contiguous(64, 8).unwrap();
    let (good, bad) = (Indices::U32(&[0, 7, 1]), Indices::U64(&[0, 8, u64::MAX]));
    is_invalid(Plan::blocks(&layout, bad, &layout, good), "remote index 8 (at 1)");
    is_invalid(Plan::blocks(&layout, good, &layout, bad), "local index 8 (at 1)");
}

#[test]
fn no_indices_make_an_empty_plan() {
    let layout = Layout::contiguous(64, 8).unwrap();
    let none = Indices::U32(&[]);
    let plan = Plan::blocks(&layout, none, &layout, none).unwrap();
    assert!(plan.is_empty());
    assert_eq!((plan.bytes(), plan.block_count(), plan.piece_count()), (0, 0, 0));
    assert_eq!((plan.chunks(1).count(), plan.blocks_of(0)), (0, 0..0));
    plan.check_bounds(0, 0).unwrap();
    assert!(Plan::spans(&[]).unwrap().cut(1).unwrap().is_empty());
}

#[test]
fn spans_join_and_keep_their_numbers() {
    let plan = Plan::spans(&[(0, 100, 5), (5, 105, 3), (8, 109, 1), (9, 110, 2)]).unwrap();
    assert_eq!(
        plan.pieces(),
        [Piece { remote: 0, local: 100, len: 8 }, Piece { remote: 8, local: 109, len: 3 }]
    );
    assert_eq!((plan.blocks_of(0), plan.blocks_of(1)), (0..2, 2..4));
    assert_eq!((plan.block_count(), plan.bytes()), (4, 11));
    let cut = plan.cut(4).unwrap();
    assert_eq!((cut.blocks_of(0), cut.blocks_of(1), cut.blocks_of(2)), (0..1, 0..2, 2..4));
}

#[test]
fn a_span_without_bytes_or_end_is_refused() {
    is_invalid(Plan::span(0, 0, 0), "span 0 has no bytes");
    is_invalid(Plan::spans(&[(0, 0, 1), (1, 1, 0)]), "span 1 has no bytes");
    is_invalid(Plan::span(u64::MAX, 0, 1), "span 0 does not fit");
    is_invalid(Plan::span(0, 2, u64::MAX - 1), "span 0 does not fit");
    is_invalid(Plan::spans(&[(0, 0, u64::MAX), (0, 0, 1)]), "span 1 does not fit");
}

#[test]
fn the_first_block_out_of_bounds_is_named_with_its_side() {
    let layout = Layout::contiguous(80, 10).unwrap();
    let plan = Plan::blocks(&layout, Indices::All, &layout, Indices::All).unwrap();
    assert_eq!(plan.piece_count(), 1);
    plan.check_bounds(80, 80).unwrap();
    is_invalid(plan.check_bounds(79, 80), "block 7 reaches past the remote end at 79");
    is_invalid(plan.check_bounds(80, 30), "block 3 reaches past the local end at 30");
    is_invalid(plan.check_bounds(50, 29), "block 2 reaches past the local end at 29");
    is_invalid(plan.check_bounds(0, 0), "block 0");
    is_invalid(plan.cut(7).unwrap().check_bounds(79, 80), "block 7 reaches past the remote end at 79");
}

#[test]
fn a_cut_into_more_pieces_than_memory_is_an_error() {
    let error = Plan::span(0, 0, 1 << 62).unwrap().cut(1).unwrap_err();
    assert_eq!(error.kind(), Kind::Exhausted);
    // With the list of what was asked before each of them.
    let sorted = Plan::spans(&[(1 << 61, 0, 1 << 61), (0, 1 << 61, 1 << 61)]).unwrap();
    let sorted = sorted.sorted_by_key(|piece| piece.remote);
    assert_eq!(sorted.cut(1).unwrap_err().kind(), Kind::Exhausted);
}

#[test]
fn a_plan_with_more_pieces_than_memory_is_an_error() {
    let sparse = Layout::blocks(0, 1, 1 << 60, 2).unwrap();
    let error = Plan::blocks(&sparse, Indices::All, &sparse, Indices::All).unwrap_err();
    assert_eq!(error.kind(), Kind::Exhausted);
    let packed = Layout::contiguous(1 << 60, 1).unwrap();
    assert_eq!(Plan::blocks(&packed, Indices::All, &packed, Indices::All).unwrap().piece_count(), 1);
}

/// The owner has layers × keys and values × blocks × heads; the reader keeps half of the heads, so that the
/// same layers land in rows half as long.
#[test]
fn half_the_heads_of_a_paged_cache_land_in_shorter_rows() {
    let (layers, blocks, heads, head_len) = (3, 5, 4, 16u64);
    let row = heads * head_len;
    let cache = |heads_kept: u64, base: u64, row: u64| {
        let dims = [
            dim(layers, 2 * blocks * row),
            dim(2, blocks * row),
            dim(blocks, row),
            dim(heads_kept, head_len),
        ];
        Layout::new(base, head_len, &dims).unwrap()
    };
    let (remote, local) = (cache(heads / 2, row / 2, row), cache(heads / 2, 0, row / 2));

    let whole = Plan::blocks(&remote, Indices::All, &local, Indices::All).unwrap();
    assert_eq!(whole.piece_count() as u64, layers * 2 * blocks);
    assert_eq!(whole.bytes(), layers * 2 * blocks * row / 2);
    assert_eq!(whole.pieces()[1], Piece { remote: row + row / 2, local: row / 2, len: row / 2 });
    assert_eq!(whole.blocks_of(1), 2..4);
    whole.check_bounds(remote.extent(), local.extent()).unwrap();

    // Layer 2, values, block 4, both heads that are kept.
    let index = |head: u64| ((2 * 2 + 1) * blocks + 4) * 2 + head;
    let list = [index(0), index(1)];
    let one = Plan::blocks(&remote, (&list).into(), &local, (&list).into()).unwrap();
    let at = ((2 * 2 + 1) * blocks + 4) * row;
    assert_eq!(one.pieces(), [Piece { remote: at + row / 2, local: at / 2, len: row / 2 }]);
}

fn layouts(block_len: u64) -> impl Strategy<Value = Layout> {
    let stride = prop_oneof![3 => 0u64..40, 2 => (0u64..6).prop_map(move |times| times * block_len)];
    let dims = prop::collection::vec((1u64..5, stride).prop_map(|(count, stride)| dim(count, stride)), 1..=4);
    (0u64..32, dims).prop_map(move |(base, dims)| Layout::new(base, block_len, &dims).unwrap())
}

/// Two layouts and a list of indices for each; runs of neighbours are as likely as leaps.
fn programs() -> impl Strategy<Value = (Layout, Vec<u64>, Layout, Vec<u64>)> {
    (1u64..9).prop_flat_map(|len| (layouts(len), layouts(len))).prop_flat_map(|(remote, local)| {
        let steps = prop::collection::vec((0u64..256, 0u64..256, 1u64..6), 0..12);
        steps.prop_map(move |steps| {
            let (mut theirs, mut ours) = (Vec::new(), Vec::new());
            for (first, second, run) in steps {
                theirs.extend((first..first + run).map(|index| index % remote.block_count()));
                ours.extend((second..second + run).map(|index| index % local.block_count()));
            }
            (remote.clone(), theirs, local.clone(), ours)
        })
    })
}

/// The plain truth: for every byte in order, where it comes from, where it goes, and its block's number.
fn model(remote: &Layout, theirs: &[u64], local: &Layout, ours: &[u64]) -> Vec<(u64, u64, u64)> {
    let mut bytes = Vec::new();
    for (number, (their, our)) in theirs.iter().zip(ours).enumerate() {
        let (from, to) = (remote.offset(*their).unwrap(), local.offset(*our).unwrap());
        bytes.extend((0..remote.block_len()).map(|at| (from + at, to + at, number as u64)));
    }
    bytes
}

fn agrees_with_the_model(plan: &Plan, model: &[(u64, u64, u64)]) {
    assert_eq!(plan.bytes(), model.len() as u64);
    let mut rest = model;
    for (number, piece) in plan.pieces().iter().enumerate() {
        let (mine, after) = rest.split_at(piece.len as usize);
        for (at, &(remote, local, _)) in mine.iter().enumerate() {
            assert_eq!((remote, local), (piece.remote + at as u64, piece.local + at as u64));
        }
        assert_eq!(plan.blocks_of(number), mine[0].2..mine[mine.len() - 1].2 + 1);
        rest = after;
    }
    assert!(rest.is_empty());
}

proptest! {
    #[test]
    fn a_sorted_plan_moves_the_same_blocks_in_another_order((remote, theirs, local, ours) in programs(), max in 1u64..40) {
        let plan = Plan::blocks(&remote, (&theirs).into(), &local, (&ours).into()).unwrap();
        let named = |plan: &Plan| {
            let mut all: Vec<_> = (0..plan.piece_count())
                .map(|at| (plan.pieces()[at].remote, plan.pieces()[at].local, plan.pieces()[at].len, plan.blocks_of(at).start, plan.blocks_of(at).end))
                .collect();
            all.sort_unstable();
            all
        };
        let sorted = plan.clone().sorted_by_key(|piece| piece.remote);
        prop_assert!(sorted.pieces().is_sorted_by_key(|piece| piece.remote));
        prop_assert_eq!(sorted.bytes(), plan.bytes());
        prop_assert_eq!(named(&sorted), named(&plan));
        prop_assert_eq!(named(&sorted.cut(max).unwrap()), named(&plan.cut(max).unwrap()));
    }

    #[test]
    fn a_plan_moves_the_bytes_that_the_plain_model_moves((remote, theirs, local, ours) in programs()) {
        let truth = model(&remote, &theirs, &local, &ours);
        let plan = Plan::blocks(&remote, (&theirs).into(), &local, (&ours).into()).unwrap();
        agrees_with_the_model(&plan, &truth);
        prop_assert_eq!(plan.block_count(), ours.len() as u64);
        for pair in plan.pieces().windows(2) {
            let joins = pair[0].remote + pair[0].len == pair[1].remote
                && pair[0].local + pair[0].len == pair[1].local;
            prop_assert!(!joins, "neighbours were not joined: {:?}", pair);
        }

        let narrow = |list: &[u64]| list.iter().map(|&index| index as u32).collect::<Vec<_>>();
        let (narrow_theirs, narrow_ours) = (narrow(&theirs), narrow(&ours));
        let narrow = Plan::blocks(&remote, (&narrow_theirs).into(), &local, (&narrow_ours).into()).unwrap();
        prop_assert_eq!(narrow, plan);
    }

    #[test]
    fn all_means_every_index_in_order((len, seed) in (1u64..9, any::<u64>()), shape in 1u64..5) {
        // Equal counts in another order of dimensions: the sides agree on nothing but the number.
        let (a, b) = (1 + seed % 4, 1 + (seed >> 8) % 5);
        let strides = [(seed >> 16) % 64, (seed >> 24) % 64, len, shape * len];
        let remote = Layout::new(3, len, &[dim(a, strides[0]), dim(shape, strides[3]), dim(b, len)]).unwrap();
        let local = Layout::new(0, len, &[dim(b, strides[1]), dim(a * shape, strides[2])]).unwrap();
        let every: Vec<u64> = (0..remote.block_count()).collect();
        let truth = model(&remote, &every, &local, &every);

        let listed = Plan::blocks(&remote, (&every).into(), &local, (&every).into()).unwrap();
        agrees_with_the_model(&listed, &truth);
        for (theirs, ours) in [
            (Indices::All, Indices::All),
            (Indices::All, Indices::U64(&every)),
            (Indices::U64(&every), Indices::All),
        ] {
            prop_assert_eq!(&Plan::blocks(&remote, theirs, &local, ours).unwrap(), &listed);
        }
    }

    #[test]
    fn cutting_and_chunking_lose_nothing((remote, theirs, local, ours) in programs(), max in 1u64..40) {
        let truth = model(&remote, &theirs, &local, &ours);
        let plan = Plan::blocks(&remote, (&theirs).into(), &local, (&ours).into()).unwrap();
        prop_assert_eq!(&plan.clone().cut(0).unwrap(), &plan);
        let cut = plan.cut(max).unwrap();
        agrees_with_the_model(&cut, &truth);
        prop_assert!(cut.pieces().iter().all(|piece| (1..=max).contains(&piece.len)));

        let mut next = 0;
        for chunk in cut.chunks(3 * max) {
            prop_assert!(chunk.start == next && chunk.end > next);
            let bytes: u64 = cut.pieces()[chunk.clone()].iter().map(|piece| piece.len).sum();
            prop_assert!(bytes < 4 * max);
            prop_assert!(bytes >= 3 * max || chunk.end == cut.piece_count());
            next = chunk.end;
        }
        prop_assert_eq!(next, cut.piece_count());
    }

    #[test]
    fn bounds_name_the_block_of_the_first_byte_outside(
        (remote, theirs, local, ours) in programs(),
        remote_len in 0u64..400,
        local_len in 0u64..400,
    ) {
        let truth = model(&remote, &theirs, &local, &ours);
        let plan = Plan::blocks(&remote, (&theirs).into(), &local, (&ours).into()).unwrap();
        let out = truth.iter().find(|(from, to, _)| *from >= remote_len || *to >= local_len);
        match (out, plan.check_bounds(remote_len, local_len)) {
            (None, Ok(())) => {}
            (Some((_, _, block)), Err(error)) => {
                prop_assert!(error.message().starts_with(&format!("block {block} ")), "{}", error);
            }
            (expected, result) => panic!("expected {expected:?}, got {result:?}"),
        }
    }
}
