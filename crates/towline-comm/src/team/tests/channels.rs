//! Byte channels, messages and signals.

use std::thread;

use towline::Kind;
use towline_testkit::random::Random;

use super::*;
use crate::team::{Incoming, Outgoing};

/// Cuts bytes at random places.
fn chunks<'a>(random: &mut Random, mut bytes: &'a [u8], most: u64) -> Vec<&'a [u8]> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let (now, rest) = bytes.split_at((random.below(most) as usize).min(bytes.len()));
        all.push(now);
        bytes = rest;
    }
    all
}

#[test]
fn a_channel_keeps_its_bytes_in_order_however_they_are_cut() {
    for links in ALL_LINKS {
        with_ranks(2, links, LONG, |team| {
            let peer = 1 - team.rank();
            let of = |rank: usize| pattern(rank as u64, 3 << 20);
            thread::scope(|scope| {
                scope.spawn(|| {
                    let mut random = Random::new(1 + team.rank() as u64);
                    for chunk in chunks(&mut random, &of(team.rank()), 300_000) {
                        team.send(peer, chunk).unwrap();
                    }
                });
                let mut random = Random::new(11 + team.rank() as u64);
                let mut bytes = vec![0; 3 << 20];
                let mut rest = &mut bytes[..];
                while !rest.is_empty() {
                    let len = (random.below(200_000) as usize).min(rest.len());
                    let (now, behind) = rest.split_at_mut(len);
                    team.recv(peer, now).unwrap();
                    rest = behind;
                }
                assert!(bytes == of(peer), "{links:?}");
            });
        });
    }
}

#[test]
fn large_transfers_in_all_directions_at_once_do_not_block_each_other() {
    const LEN: usize = 10 << 20;
    for (links, nranks) in [(Links::Near, 4), (Links::Far, 3), (Links::Mixed, 3)] {
        with_ranks(nranks, links, LONG, |team| {
            let of = |from: usize, to: usize| pattern((from * 16 + to) as u64, LEN);
            let out: Vec<Vec<u8>> = (0..nranks).map(|peer| of(team.rank(), peer)).collect();
            let mut inn = vec![vec![0; LEN]; nranks];
            let sends: Vec<(usize, &[u8])> =
                out.iter().enumerate().map(|(peer, one)| (peer, &one[..])).collect();
            let mut receives: Vec<(usize, &mut [u8])> =
                inn.iter_mut().enumerate().map(|(peer, one)| (peer, &mut one[..])).collect();
            team.exchange_all("all_to_all", &sends, &mut receives).unwrap();
            for (peer, bytes) in inn.iter().enumerate() {
                assert!(*bytes == of(peer, team.rank()), "{links:?} from {peer}");
            }
        });
    }
}

#[test]
fn a_ring_of_exchanges_does_not_deadlock() {
    const LEN: usize = 2 << 20;
    for links in ALL_LINKS {
        for nranks in [1, 2, 3, 5] {
            with_ranks(nranks, links, LONG, |team| {
                let rank = team.rank();
                let (next, before) = ((rank + 1) % nranks, (rank + nranks - 1) % nranks);
                let mut bytes = pattern(rank as u64, LEN);
                for _ in 0..nranks {
                    let mut came = vec![0; LEN];
                    team.exchange(next, &bytes, before, &mut came).unwrap();
                    bytes = came;
                }
                assert!(bytes == pattern(rank as u64, LEN), "{links:?} {nranks}");
            });
        }
    }
}

#[test]
fn messages_arrive_and_what_differs_is_invalid_on_both_sides() {
    for links in ALL_LINKS {
        with_ranks(2, links, LONG, |team| {
            let peer = 1 - team.rank();
            for round in 0..20u64 {
                let bytes = pattern(round, (round * 40_000) as usize);
                if team.rank() == 0 {
                    team.send_message(peer, round, &bytes).unwrap();
                    let error = team.send_message(peer, 5, &bytes[..bytes.len() / 2]).unwrap_err();
                    assert_eq!((error.kind(), error.ranks()), (Kind::Invalid, &[1][..]), "{error}");
                } else {
                    let mut into = vec![0; bytes.len()];
                    team.recv_message(peer, round, &mut into).unwrap();
                    assert!(into == bytes, "{links:?} {round}");
                    // Another digest in one round, another length in the next.
                    let (digest, len) = if round % 2 == 0 { (6, bytes.len() / 2) } else { (5, bytes.len()) };
                    let error = team.recv_message(peer, digest, &mut into[..len]).unwrap_err();
                    assert_eq!((error.kind(), error.ranks()), (Kind::Invalid, &[0][..]), "{error}");
                }
            }
            assert!(team.failure().is_none());
        });
    }
}

#[test]
fn grouped_messages_cross_and_keep_their_order() {
    for links in ALL_LINKS {
        with_ranks(3, links, LONG, |team| {
            let rank = team.rank();
            let of = |from: usize, to: usize, n: usize| {
                pattern((from * 100 + to * 10 + n) as u64, 400_000 * (n + 1))
            };
            let bytes: Vec<(usize, usize, Vec<u8>)> = (0..2)
                .flat_map(|n| (0..3).map(move |to| (n, to)))
                .map(|(n, to)| (n, to, of(rank, to, n)))
                .collect();
            let sends: Vec<Outgoing<'_>> =
                bytes.iter().map(|(n, to, bytes)| Outgoing { peer: *to, digest: *n as u64, bytes }).collect();
            let mut room: Vec<(usize, usize, Vec<u8>)> =
                (0..2).flat_map(|n| (0..3).map(move |from| (n, from, vec![0; 400_000 * (n + 1)]))).collect();
            let mut receives: Vec<Incoming<'_>> = room
                .iter_mut()
                .map(|(n, from, into)| Incoming { peer: *from, digest: *n as u64, into })
                .collect();
            team.exchange_messages("group", &sends, &mut receives).unwrap();
            for (n, from, bytes) in &room {
                assert!(*bytes == of(*from, rank, *n), "{links:?} from {from}");
            }
        });
    }
}

#[test]
fn signals_are_counted_early_and_late() {
    for links in ALL_LINKS {
        with_ranks(3, links, LONG, |team| {
            let rank = team.rank();
            // Early: before any rank waits.
            for peer in 0..3 {
                team.signal(peer, 1, 2, 5).unwrap();
                team.signal(peer, 0, 3, rank as u64).unwrap();
            }
            team.barrier().unwrap();
            let seen = |from, context, index, at_least| {
                let check = || Some(team.signals(from, context, index)).filter(|value| *value >= at_least);
                team.wait("wait_signal", || vec![from], check).unwrap()
            };
            for from in 0..3 {
                assert_eq!(seen(from, 1, 2, 5), 5);
                assert_eq!(seen(from, 0, 3, from as u64), from as u64);
                assert_eq!(team.signals(from, 0, 0), 0);
            }
            team.barrier().unwrap();
            // Late: rank 0 waits while the others take their time.
            if rank == 0 {
                assert_eq!(seen(1, 0, 0, 100), 100);
                assert_eq!(seen(2, 0, 0, 100), 100);
            } else {
                for _ in 0..100 {
                    team.signal(0, 0, 0, 1).unwrap();
                }
            }
            let bad = [team.signal(3, 0, 0, 1), team.signal(0, 2, 0, 1), team.signal(0, 0, 4, 1)];
            assert!(bad.into_iter().all(|one| one.unwrap_err().kind() == Kind::Invalid));
            team.barrier().unwrap();
        });
    }
}

#[test]
fn a_rank_that_does_not_exist_is_invalid_and_the_team_goes_on() {
    with_ranks(2, Links::Near, LONG, |team| {
        let mut into = [0; 4];
        let errors = [team.send(2, b"x"), team.recv(9, &mut into), team.exchange(0, b"x", 2, &mut into)];
        assert!(errors.into_iter().all(|one| one.unwrap_err().kind() == Kind::Invalid));
        team.barrier().unwrap();
    });
}
