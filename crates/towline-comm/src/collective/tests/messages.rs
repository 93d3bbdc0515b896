//! Messages between two ranks.

use towline::{Dtype, Kind as ErrorKind, SharedStorage};

use super::rig::{Form, Links, Numbers, Room, on_ranks};
use crate::{Communicator, Memory, group};

const ROOM: usize = 1 << 20;
/// Below and above what goes whole, and not a multiple of anything.
const SIZES: [usize; 4] = [1, 4096, 65_537, 900_001];

fn bytes(len: usize, seed: usize) -> Vec<u8> {
    let mut numbers = Numbers::new(seed as u64);
    (0..len).map(|_| numbers.next() as u8).collect()
}

fn fill(memory: &Memory, seed: usize) {
    memory.write_at(0, &bytes(memory.len(), seed)).unwrap();
}

fn holds(memory: &Memory, seed: usize) {
    let mut got = vec![0; memory.len()];
    memory.read_at(0, &mut got).unwrap();
    assert!(got == bytes(memory.len(), seed), "{} bytes of {seed}", memory.len());
}

fn pairs(links: Links) {
    on_ranks(2, links, |comm| {
        let rank = comm.rank().unwrap();
        let room = Room::new(comm, ROOM);
        for form in [Form::Windows, Form::Buffers, Form::Loose, Form::EverySecond] {
            let [send, recv] = room.memory(form, rank);
            for (index, len) in SIZES.into_iter().enumerate() {
                let (send, recv) = (send.part(7, len).unwrap(), recv.part(3, len).unwrap());
                for sender in 0..2 {
                    if rank == sender {
                        fill(&send, index + 10);
                        comm.send(&send, Dtype::U8, 1 - rank).unwrap();
                    } else {
                        comm.recv(&recv, Dtype::U8, 1 - rank).unwrap();
                        holds(&recv, index + 10);
                    }
                }
            }
        }
    });
}

#[test]
fn messages_arrive_from_every_kind_of_memory() {
    pairs(Links::Near);
}

#[test]
fn messages_arrive_over_tcp() {
    pairs(Links::Far);
}

#[test]
fn ranks_that_all_send_to_all_in_a_group_never_wait_for_each_other() {
    for len in [100, 250_000] {
        on_ranks(4, Links::Near, |comm| {
            let rank = comm.rank().unwrap();
            let room = Room::new(comm, 4 * len);
            let [send, recv] = room.memory(if len == 100 { Form::Windows } else { Form::EverySecond }, rank);
            group(|| {
                for peer in 0..4 {
                    let out = send.part(peer * len, len)?;
                    fill(&out, rank * 4 + peer);
                    comm.send(&out, Dtype::U8, peer)?;
                    comm.recv(&recv.part(peer * len, len)?, Dtype::U8, peer)?;
                }
                Ok(())
            })
            .unwrap();
            for peer in 0..4 {
                holds(&recv.part(peer * len, len).unwrap(), peer * 4 + rank);
            }
        });
    }
}

#[test]
fn a_group_on_one_side_meets_plain_calls_on_the_other() {
    on_ranks(2, Links::Near, |comm| {
        let rank = comm.rank().unwrap();
        let room = Room::new(comm, ROOM);
        for form in [Form::Loose, Form::Windows] {
            for len in [100, 700_000] {
                let [send, recv] = room.memory(form, rank);
                let (send, recv) = (send.part(0, len).unwrap(), recv.part(0, len).unwrap());
                fill(&send, rank);
                if rank == 0 {
                    group(|| {
                        comm.send(&send, Dtype::U8, 1)?;
                        comm.recv(&recv, Dtype::U8, 1)
                    })
                    .unwrap();
                } else {
                    comm.recv(&recv, Dtype::U8, 0).unwrap();
                    comm.send(&send, Dtype::U8, 0).unwrap();
                }
                holds(&recv, 1 - rank);
            }
        }
    });
}

#[test]
fn a_message_from_a_buffer_that_was_registered_anew_is_the_new_one() {
    on_ranks(2, Links::Near, |comm| {
        let rank = comm.rank().unwrap();
        for round in 0..10 {
            let buffer = comm.register_buffer(SharedStorage::new(ROOM).unwrap()).unwrap();
            let memory = buffer.memory().unwrap();
            if rank == 0 {
                fill(&memory, round);
                comm.send(&memory, Dtype::U8, 1).unwrap();
            } else {
                comm.recv(&memory, Dtype::U8, 0).unwrap();
                holds(&memory, round);
            }
            buffer.close();
        }
    });
}

#[test]
fn messages_of_one_rank_keep_their_order() {
    on_ranks(2, Links::Near, |comm| {
        let rank = comm.rank().unwrap();
        let room = Room::new(comm, ROOM);
        let memory = room.memory(Form::Windows, rank);
        let lens = [70_000, 3, 200_000, 90_000];
        group(|| {
            let mut at = 0;
            for (index, len) in lens.into_iter().enumerate() {
                let part = memory[rank].part(at, len)?;
                at += len;
                if rank == 0 {
                    fill(&part, index);
                    comm.send(&part, Dtype::U8, 1)?;
                } else {
                    comm.recv(&part, Dtype::U8, 0)?;
                }
            }
            Ok(())
        })
        .unwrap();
        let mut at = 0;
        for (index, len) in lens.into_iter().enumerate() {
            holds(&memory[rank].part(at, len).unwrap(), index);
            at += len;
        }
    });
}

fn differing(call: impl Fn(&Communicator, usize, &Memory) -> crate::Result<()> + Sync) {
    on_ranks(2, Links::Near, |comm| {
        let rank = comm.rank().unwrap();
        let room = Room::new(comm, ROOM);
        for form in [Form::Windows, Form::Loose] {
            let [memory, other] = room.memory(form, rank);
            let error = call(comm, rank, &memory).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "rank {rank}: {error}");
            assert_eq!(error.ranks(), [1 - rank], "rank {rank}: {error}");
            fill(&other, 5);
            if rank == 0 {
                comm.send(&other, Dtype::U8, 1).unwrap();
            } else {
                comm.recv(&memory, Dtype::U8, 0).unwrap();
                holds(&memory, 5);
            }
        }
    });
}

#[test]
fn two_ranks_that_differ_in_the_size_of_a_message_both_learn_of_it() {
    for lens in [[100, 50], [100, 200_000], [200_000, 100], [200_000, 300_000]] {
        differing(|comm, rank, memory| {
            let part = memory.part(0, lens[rank])?;
            if rank == 0 { comm.send(&part, Dtype::U8, 1) } else { comm.recv(&part, Dtype::U8, 0) }
        });
    }
}

#[test]
fn two_ranks_that_differ_in_the_type_of_a_message_both_learn_of_it() {
    for len in [96, 200_000] {
        differing(|comm, rank, memory| {
            let part = memory.part(0, len)?;
            if rank == 0 { comm.send(&part, Dtype::F32, 1) } else { comm.recv(&part, Dtype::I32, 0) }
        });
    }
}

#[test]
fn a_message_to_oneself_needs_its_other_half_in_the_same_group() {
    on_ranks(1, Links::Near, |comm| {
        let room = Room::new(comm, ROOM);
        let [send, recv] = room.memory(Form::Loose, 0);
        assert_eq!(comm.send(&send, Dtype::U8, 0).unwrap_err().kind(), ErrorKind::Invalid);
        fill(&send, 3);
        group(|| {
            comm.recv(&recv, Dtype::U8, 0)?;
            comm.send(&send, Dtype::U8, 0)
        })
        .unwrap();
        holds(&recv, 3);
    });
}
