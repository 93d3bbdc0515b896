//! Rounds, barriers and gathered bytes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use towline::Kind;
use towline_testkit::random::Random;

use super::*;
use crate::team::{Call, MOST_GATHERED, PAYLOAD};

fn call(name: &'static str, digest: u64) -> Call<'static> {
    Call { name, digest, words: [0; 4], payload: &[] }
}

#[test]
fn every_rank_reads_what_all_ranks_announced_in_every_round() {
    for links in ALL_LINKS {
        for nranks in 1..=if links == Links::Near { 8 } else { 4 } {
            with_ranks(nranks, links, LONG, |team| {
                // All ranks draw the same numbers, so each knows what the others announce.
                let mut random = Random::new(nranks as u64);
                for round in 0..60u64 {
                    let lengths: Vec<usize> = (0..nranks)
                        .map(|_| match random.below(4) {
                            0 => 0,
                            1 => PAYLOAD,
                            _ => random.below(PAYLOAD as u64) as usize,
                        })
                        .collect();
                    let words = |rank: usize| [round, rank as u64, !round, round * rank as u64];
                    let payload = |rank: usize| pattern(round << 8 | rank as u64, lengths[rank]);
                    let mine = payload(team.rank());
                    let entered = team
                        .enter(Call {
                            name: "test",
                            digest: round,
                            words: words(team.rank()),
                            payload: &mine,
                        })
                        .unwrap();
                    for (rank, len) in lengths.iter().enumerate() {
                        assert_eq!(entered.words(rank), words(rank), "{links:?} round {round}");
                        assert_eq!(entered.payload_len(rank), *len);
                        let mut bytes = vec![0; PAYLOAD];
                        assert_eq!(entered.payload_into(rank, &mut bytes).unwrap(), *len);
                        assert!(bytes[..*len] == payload(rank), "{links:?} round {round} rank {rank}");
                    }
                    if random.below(3) == 0 {
                        team.leave(entered).unwrap();
                    }
                }
            });
        }
    }
}

#[test]
fn a_digest_that_differs_is_invalid_on_every_rank_and_the_team_goes_on() {
    for links in ALL_LINKS {
        let errors = with_ranks(4, links, LONG, |team| {
            let odd = team.rank() == 2;
            let error = team.enter(call("reduce", u64::from(odd))).err().unwrap();
            team.barrier().unwrap();
            let name = if team.rank() == 1 { "gather" } else { "scatter" };
            let other = team.enter(call(name, name.len() as u64)).err().unwrap();
            team.barrier().unwrap();
            assert!(team.failure().is_none());
            (error, other)
        });
        for (error, other) in errors {
            assert_eq!((error.kind(), error.ranks(), error.op()), (Kind::Invalid, &[2][..], "reduce"));
            assert_eq!(other.ranks(), [1]);
            assert!(
                other.message().contains("\"gather\"") && other.message().contains("\"scatter\""),
                "{other}"
            );
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_announced() {
    with_ranks(2, Links::Near, LONG, |team| {
        let payload = vec![0; PAYLOAD + 1];
        let error = team.enter(Call { payload: &payload, ..call("reduce", 0) }).err().unwrap();
        assert_eq!(error.kind(), Kind::Invalid);
        team.barrier().unwrap();
    });
}

#[test]
fn nobody_passes_a_barrier_before_all_have_come() {
    for links in ALL_LINKS {
        for nranks in [1, 2, 3, 5] {
            let came = AtomicUsize::new(0);
            with_ranks(nranks, links, LONG, |team| {
                let mut random = Random::new(team.rank() as u64);
                for round in 1..=40 {
                    if random.below(4) == 0 {
                        thread::sleep(random.micros(300));
                    }
                    came.fetch_add(1, Ordering::SeqCst);
                    team.barrier().unwrap();
                    assert!(came.load(Ordering::SeqCst) >= round * nranks);
                }
            });
        }
    }
}

#[test]
fn nobody_leaves_a_round_before_all_do() {
    for links in ALL_LINKS {
        let done = AtomicUsize::new(0);
        with_ranks(3, links, LONG, |team| {
            let mut random = Random::new(7 + team.rank() as u64);
            for round in 1..=40 {
                let entered = team.enter(call("copy", 1)).unwrap();
                if random.below(4) == 0 {
                    thread::sleep(random.micros(300));
                }
                done.fetch_add(1, Ordering::SeqCst);
                team.leave(entered).unwrap();
                assert!(done.load(Ordering::SeqCst) >= round * 3);
            }
        });
    }
}

#[test]
fn gathered_bytes_of_any_length_come_to_all() {
    for links in ALL_LINKS {
        for nranks in [1, 2, 3, 5] {
            with_ranks(nranks, links, LONG, |team| {
                let mut random = Random::new(nranks as u64);
                for round in 0..12u64 {
                    let length = |random: &mut Random| match random.below(6) {
                        0 => 0,
                        1 if round % 4 == 0 => MOST_GATHERED,
                        2 => PAYLOAD,
                        3 => PAYLOAD + 1,
                        _ => random.below(40_000) as usize,
                    };
                    let lengths: Vec<usize> = (0..nranks).map(|_| length(&mut random)).collect();
                    let of = |rank: usize| pattern(round << 8 | rank as u64, lengths[rank]);
                    let all = team.all_gather_bytes("tickets", &of(team.rank())).unwrap();
                    assert_eq!(all.len(), nranks);
                    for (rank, bytes) in all.iter().enumerate() {
                        assert!(*bytes == of(rank), "{links:?} round {round} rank {rank}");
                    }
                }
            });
        }
    }
}

#[test]
fn too_many_gathered_bytes_of_one_rank_are_invalid_on_all() {
    let errors = with_ranks(3, Links::Near, LONG, |team| {
        let mine = vec![0; if team.rank() == 1 { MOST_GATHERED + 1 } else { 5 }];
        let error = team.all_gather_bytes("tickets", &mine).unwrap_err();
        team.barrier().unwrap();
        error
    });
    assert!(errors.iter().all(|error| error.kind() == Kind::Invalid && error.ranks() == [1]));
}

#[test]
fn seats_that_do_not_match_are_refused() {
    let endpoint = Endpoint::open("alone").unwrap();
    let other = Endpoint::open("other").unwrap();
    let seat = Seat::open(&endpoint, 2, options(LONG)).unwrap();
    let wrong = Seat::open(&other, 3, options(LONG)).unwrap();
    let tickets = vec![seat.ticket().unwrap(), wrong.ticket().unwrap()];
    let error = Team::assemble(seat, 0, tickets).unwrap_err();
    assert_eq!((error.kind(), error.ranks()), (Kind::Invalid, &[1][..]));
    let seat = Seat::open(&endpoint, 2, options(LONG)).unwrap();
    let tickets = vec![seat.ticket().unwrap()];
    assert_eq!(Team::assemble(seat, 0, tickets).unwrap_err().kind(), Kind::Invalid);
}
