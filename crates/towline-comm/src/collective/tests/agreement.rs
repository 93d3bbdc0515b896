//! Ranks that ask for different things, or do not ask at all.

use std::time::Duration;

use towline::{Dtype, Kind as ErrorKind, SharedStorage};

use super::rig::{Form, Links, Room, on_ranks};
use crate::collective::Algorithm;
use crate::combine::{Op, Scalar};
use crate::{Communicator, Config, Memory, Result, WindowFlag};

const ROOM: usize = 1 << 16;

/// The error of a call on which the ranks differ, on every rank; afterwards the group must work.
fn differing(nranks: usize, call: impl Fn(&Communicator, usize, &Memory, &Memory) -> Result<()> + Sync) {
    on_ranks(nranks, Links::Near, |comm| {
        let rank = comm.rank().unwrap();
        let room = Room::new(comm, ROOM);
        let [send, recv] = room.memory(Form::Windows, rank);
        let error = call(comm, rank, &send, &recv).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "rank {rank}: {error}");
        assert!(error.ranks().contains(&1), "rank {rank}: {error}");
        usable(comm, &send, &recv);
    });
}

fn usable(comm: &Communicator, send: &Memory, recv: &Memory) {
    for len in [4, 40_000] {
        let (send, recv) = (send.part(0, len).unwrap(), recv.part(0, len).unwrap());
        send.write_at(len - 4, &1i32.to_ne_bytes()).unwrap();
        comm.all_reduce(&send, &recv, Dtype::I32, Op::Sum).unwrap();
        let mut sum = [0; 4];
        recv.read_at(len - 4, &mut sum).unwrap();
        assert_eq!(i32::from_ne_bytes(sum), comm.nranks().unwrap() as i32);
    }
}

#[test]
fn ranks_that_differ_in_size_all_learn_of_it() {
    for len in [64, 32_768] {
        differing(3, |comm, rank, send, recv| {
            let len = if rank == 1 { len / 2 } else { len };
            comm.all_reduce(&send.part(0, len)?, &recv.part(0, len)?, Dtype::F32, Op::Sum)
        });
    }
}

#[test]
fn a_small_and_a_large_size_are_told_apart() {
    differing(3, |comm, rank, send, recv| {
        let len = if rank == 1 { 64 } else { 32_768 };
        comm.all_reduce(&send.part(0, len)?, &recv.part(0, len)?, Dtype::F32, Op::Sum)
    });
}

#[test]
fn ranks_that_differ_in_type_all_learn_of_it() {
    differing(3, |comm, rank, send, recv| {
        let dtype = if rank == 1 { Dtype::I32 } else { Dtype::F32 };
        comm.all_reduce(send, recv, dtype, Op::Sum)
    });
}

#[test]
fn ranks_that_differ_in_the_operation_all_learn_of_it() {
    differing(3, |comm, rank, send, recv| {
        let op = if rank == 1 { Op::Max } else { Op::Sum };
        comm.all_reduce(send, recv, Dtype::F32, op)
    });
}

#[test]
fn ranks_that_differ_in_the_root_all_learn_of_it() {
    differing(3, |comm, rank, send, recv| {
        let root = if rank == 1 { 1 } else { 0 };
        comm.broadcast(Some(send), Some(recv), Dtype::U8, root)
    });
}

#[test]
fn ranks_that_differ_in_the_order_of_calls_all_learn_of_it() {
    differing(3, |comm, rank, send, recv| {
        let part = recv.part(0, 1024)?;
        if rank == 1 {
            comm.all_reduce(send, recv, Dtype::U8, Op::Sum)
        } else {
            comm.all_gather(&part, send, Dtype::U8)
        }
    });
}

#[test]
fn ranks_that_differ_in_the_algorithm_all_learn_of_it() {
    differing(3, |comm, rank, send, recv| {
        let algorithm = if rank == 1 { Algorithm::Ring } else { Algorithm::Staged };
        comm.using(algorithm).all_reduce(send, recv, Dtype::U8, Op::Sum)
    });
}

#[test]
fn ranks_may_differ_in_their_scalars() {
    on_ranks(3, Links::Near, |comm| {
        let rank = comm.rank().unwrap();
        let memory = comm.memory(SharedStorage::new(4096).unwrap()).unwrap().part(0, 8).unwrap();
        memory.write_at(0, &2.0f64.to_ne_bytes()).unwrap();
        let op = Op::ScaledSum(Scalar::Float(0.5 + rank as f64));
        comm.all_reduce(&memory, &memory, Dtype::F64, op).unwrap();
        let mut sum = [0; 8];
        memory.read_at(0, &mut sum).unwrap();
        assert_eq!(f64::from_ne_bytes(sum), 9.0);
    });
}

#[test]
fn an_algorithm_that_cannot_work_is_invalid_on_every_rank_with_its_reason() {
    on_ranks(3, Links::Near, |comm| {
        let rank = comm.rank().unwrap();
        let room = Room::new(comm, ROOM);
        let [send, recv] = room.memory(Form::EverySecond, rank);
        let error = comm.using(Algorithm::Direct).all_reduce(&send, &recv, Dtype::U8, Op::Sum).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("not in a window"), "{error}");
        let error = comm.using(Algorithm::Tiny).all_reduce(&send, &recv, Dtype::U8, Op::Sum).unwrap_err();
        assert!(error.to_string().contains("announcement"), "{error}");
        usable(comm, &send, &recv);
    });
}

#[test]
fn the_choice_and_its_reason_are_told() {
    on_ranks(2, Links::Near, |comm| {
        let rank = comm.rank().unwrap();
        let room = Room::new(comm, ROOM);
        assert_eq!(comm.explain().unwrap(), "no collective has run yet");
        for (form, len, algorithm, why) in [
            (Form::Windows, 64, Algorithm::Tiny, "fit into the announcement"),
            (Form::Windows, ROOM, Algorithm::Direct, "share memory"),
            (Form::Buffers, ROOM, Algorithm::Direct, "share memory"),
            (Form::Loose, ROOM, Algorithm::Staged, "not in a window"),
            (Form::EverySecond, ROOM, Algorithm::Staged, "not in a window"),
        ] {
            let [send, recv] = room.memory(form, rank);
            let (send, recv) = (send.part(0, len).unwrap(), recv.part(0, len).unwrap());
            comm.all_reduce(&send, &recv, Dtype::U8, Op::Sum).unwrap();
            assert_eq!(comm.last_algorithm().unwrap(), Some(algorithm));
            assert!(comm.explain().unwrap().contains(why), "{}", comm.explain().unwrap());
        }
    });
}

#[test]
fn groups_are_as_near_and_as_far_as_the_tests_take_them_to_be() {
    let near =
        |links| on_ranks(4, links, |comm| (0..4).map(|peer| comm.is_near(peer).unwrap()).collect::<Vec<_>>());
    assert_eq!(near(Links::Near), vec![[true; 4]; 4]);
    for (rank, seen) in near(Links::Far).into_iter().enumerate() {
        assert!((0..4).all(|peer| seen[peer] == (peer == rank)), "{rank}: {seen:?}");
    }
    let mixed = near(Links::Mixed);
    assert!(mixed[2][3] && mixed[3][2] && !mixed[0][1] && !mixed[0][2], "{mixed:?}");
}

#[test]
fn a_far_group_and_a_mixed_one_say_why_they_take_a_ring() {
    for (links, why) in [(Links::Far, "all ranks are far"), (Links::Mixed, "of 4 ranks do not share memory")]
    {
        on_ranks(4, links, |comm| {
            let room = Room::new(comm, 1 << 18);
            let [send, recv] = room.memory(Form::Windows, comm.rank().unwrap());
            comm.all_reduce(&send, &recv, Dtype::U8, Op::Sum).unwrap();
            assert_eq!(comm.last_algorithm().unwrap(), Some(Algorithm::Ring));
            assert!(comm.explain().unwrap().contains(why), "{}", comm.explain().unwrap());
        });
    }
}

#[test]
fn arguments_that_make_no_sense_are_refused_before_anything_is_announced() {
    on_ranks(3, Links::Near, |comm| {
        let rank = comm.rank().unwrap();
        let room = Room::new(comm, ROOM);
        let [send, recv] = room.memory(Form::Windows, rank);
        // Only one rank errs, and the others never learn of it.
        if rank == 0 {
            let part = |from: &Memory, offset, len| from.part(offset, len).unwrap();
            let refused: Vec<(&str, Result<()>)> = vec![
                ("no whole elements", comm.all_reduce(&part(&send, 0, 6), &recv, Dtype::F32, Op::Sum)),
                ("a remainder", comm.reduce_scatter(&part(&send, 0, 16), &recv, Dtype::F32, Op::Sum)),
                ("a remainder", comm.all_to_all(&part(&send, 0, 16), &recv, Dtype::F32)),
                ("room too small", comm.all_gather(&part(&send, 0, 16), &part(&recv, 0, 47), Dtype::U8)),
                (
                    "room too small",
                    comm.all_reduce(&part(&send, 0, 16), &part(&recv, 0, 8), Dtype::U8, Op::Sum),
                ),
                (
                    "another size to scatter",
                    comm.scatter(Some(&part(&send, 0, 16)), &part(&recv, 0, 4), Dtype::U8, 0),
                ),
                ("no such root", comm.broadcast(Some(&send), Some(&recv), Dtype::U8, 3)),
                ("no such peer", comm.send(&send, Dtype::U8, 3)),
                ("nothing to send", comm.scatter(None, &part(&recv, 0, 4), Dtype::U8, 0)),
                ("nowhere to receive", comm.gather(&part(&send, 0, 4), None, Dtype::U8, 0)),
                (
                    "an overlap",
                    comm.all_reduce(&part(&send, 0, 64), &part(&send, 32, 64), Dtype::U8, Op::Sum),
                ),
                ("an overlap", comm.all_gather(&part(&send, 16, 16), &part(&send, 0, 48), Dtype::U8)),
                ("in place", comm.all_to_all(&part(&send, 0, 48), &part(&send, 0, 48), Dtype::U8)),
                (
                    "half a factor",
                    comm.all_reduce(&send, &recv, Dtype::I32, Op::ScaledSum(Scalar::Float(0.5))),
                ),
            ];
            for (what, outcome) in refused {
                assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Invalid, "{what}");
            }
        }
        usable(comm, &send, &recv);
    });
}

#[test]
fn ranks_that_use_windows_of_their_own_take_the_direct_path() {
    on_ranks(3, Links::Near, |comm| {
        let rank = comm.rank().unwrap();
        let room = Room::new(comm, ROOM);
        let [mut send, mut recv] = room.memory(Form::Windows, rank);
        if rank == 1 {
            std::mem::swap(&mut send, &mut recv);
        }
        usable(comm, &send, &recv);
        assert_eq!(comm.last_algorithm().unwrap(), Some(Algorithm::Direct));
    });
}

#[test]
fn a_root_whose_window_another_rank_has_closed_is_served_by_channels() {
    on_ranks(3, Links::Near, |comm| {
        let rank = comm.rank().unwrap();
        let window =
            comm.register_window(SharedStorage::new(ROOM).unwrap(), WindowFlag::DEFAULT).unwrap().unwrap();
        let recv = comm.memory(SharedStorage::new(ROOM).unwrap()).unwrap();
        let send = window.memory().unwrap();
        for (closed, algorithm) in [(false, Algorithm::Direct), (true, Algorithm::Ring)] {
            if closed && rank == 2 {
                window.close();
            }
            if rank == 0 {
                send.write_at(ROOM - 1, &[7 + u8::from(closed)]).unwrap();
            }
            comm.broadcast((rank == 0).then_some(&send), (rank > 0).then_some(&recv), Dtype::U8, 0).unwrap();
            assert_eq!(comm.last_algorithm().unwrap(), Some(algorithm), "{}", comm.explain().unwrap());
            if rank > 0 {
                let mut last = [0];
                recv.read_at(ROOM - 1, &mut last).unwrap();
                assert_eq!(last, [7 + u8::from(closed)]);
            }
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn buffers_that_are_registered_anew_for_every_call_keep_the_direct_path() {
    on_ranks(3, Links::Near, |comm| {
        for _ in 0..20 {
            let [send, recv] =
                [0, 1].map(|_| comm.register_buffer(SharedStorage::new(ROOM).unwrap()).unwrap());
            usable(comm, &send.memory().unwrap(), &recv.memory().unwrap());
            assert_eq!(comm.last_algorithm().unwrap(), Some(Algorithm::Direct));
            recv.close();
        }
        assert_eq!(comm.open_handles().unwrap(), 0);
    });
}

#[test]
fn no_elements_are_no_work_but_the_ranks_agree_on_it() {
    on_ranks(3, Links::Near, |comm| {
        let rank = comm.rank().unwrap();
        let room = Room::new(comm, ROOM);
        let [send, recv] = room.memory(Form::Windows, rank);
        let (none, into) = (send.part(0, 0).unwrap(), recv.part(0, 0).unwrap());
        comm.all_reduce(&none, &into, Dtype::F32, Op::Sum).unwrap();
        comm.using(Algorithm::Ring).all_gather(&none, &into, Dtype::F32).unwrap();
        comm.using(Algorithm::Direct).broadcast(Some(&none), Some(&into), Dtype::F32, 1).unwrap();
        let (own, other) = if rank == 1 { (&send, &recv) } else { (&none, &into) };
        assert_eq!(comm.all_reduce(own, other, Dtype::F32, Op::Sum).unwrap_err().kind(), ErrorKind::Invalid);
        usable(comm, &send, &recv);
    });
}

#[test]
fn a_rank_that_never_calls_all_reduce_is_named_by_all_others() {
    let config = Config { timeout: Duration::from_millis(700), ..Config::default() };
    let ranks = Communicator::init_all_with(4, &config).unwrap();
    std::thread::scope(|scope| {
        for (rank, comm) in ranks.iter().enumerate().filter(|(rank, _)| *rank != 2) {
            scope.spawn(move || {
                let memory = comm.memory(SharedStorage::new(1 << 20).unwrap()).unwrap();
                let error = comm.all_reduce(&memory, &memory, Dtype::F32, Op::Sum).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Timeout, "rank {rank}: {error}");
                assert_eq!(error.ranks(), [2], "rank {rank}: {error}");
            });
        }
    });
}
