//! A hostile user: frames of any kind, over any connection, with any lengths, towards the rules of an owner.

use std::sync::atomic::Ordering;
use std::time::Duration;

use towline_proto::wire::{
    Atomic, AtomicOp, Block, Bye, Cancel, Check, EndLane, Finish, Import, ImportItem, Message, Notify, Ping,
    Pong, Query, Read, Reduce, Release, Signal, Withdraw, Write,
};
use towline_proto::{Dtype, ReduceOp};

use crate::world::{GUARD, LEN, Play, TICKETS, WIRES, World};

impl World {
    /// Some tickets: right ones, again and again, and wrong ones.
    fn any_import(&mut self) -> Import {
        let items = (0..self.random.below(4)).map(|_| {
            let ticket = match self.random.below(3) {
                right @ 0..=1 => TICKETS[right as usize].to_vec(),
                _ => vec![b't'; self.random.below(9) as usize],
            };
            ImportItem { ticket, proof: [0; 32], operation: None }
        });
        Import { items: items.collect() }
    }

    /// One frame, and the bytes behind it.
    fn any_frame(&mut self) -> Vec<u8> {
        let handle = if self.random.once_in(6) { self.random.below(4) as u32 } else { self.handle };
        let count = 1 + self.random.below(4);
        let blocks: Vec<Block> = (0..count)
            .map(|_| {
                let far = [LEN as u64, u64::MAX, 1 << 40][self.random.below(3) as usize];
                let end = if self.random.once_in(8) { far } else { LEN as u64 };
                let offset = self.random.below(end.max(1));
                Block { offset, len: self.random.below(300) as u32 }
            })
            .collect();
        let bytes: u64 = blocks.iter().map(|block| u64::from(block.len)).sum();
        let (request, transfer) = (self.random.below(8), self.random.below(3));
        let pieces = self.random.below(3) as u32;
        let payload = if self.random.once_in(8) { self.random.below(900) } else { bytes };
        let offset = self.random.below(LEN as u64 + 16);
        let (message, payload) = match self.random.below(18) {
            0..=2 => (Message::from(Read { transfer, handle, blocks }), 0),
            3..=6 => (Write { transfer, handle, blocks }.into(), payload),
            7 => (Reduce { transfer, handle, op: ReduceOp::Sum, dtype: Dtype::U8, blocks }.into(), payload),
            8 => (Atomic { handle, offset, op: AtomicOp::Add(1) }.into(), 0),
            9 => (Signal { transfer, pieces, handle, offset, add: 1 }.into(), 0),
            10 => (Notify { transfer, pieces, message: vec![3] }.into(), 0),
            11 => (Cancel {}.into(), 0),
            12 => (Check { checks: vec![1; pieces as usize] }.into(), 0),
            13 => (EndLane { lane: [self.random.below(5) as u8; 32] }.into(), 0),
            14 => match self.random.below(8) {
                0 => (Bye { error: None }.into(), 0),
                1..=2 => (Release { handle }.into(), 0),
                3 => (Withdraw {}.into(), 0),
                4 => (Pong {}.into(), 0),
                5 => (Finish { operation: [1; 16], outcome: Ok(()) }.into(), 0),
                _ => (Ping {}.into(), 0),
            },
            15 => (self.any_import().into(), 0),
            // An empty one lets go of what was lent.
            16 => (Query { handle, path: pieces as u8, body: vec![1; pieces as usize] }.into(), 0),
            _ => (towline_proto::wire::Held {}.into(), 0),
        };
        let mut frame = message.frame(request, payload, 0);
        frame.extend((0..payload).map(|at| at as u8 ^ 0x55));
        if self.random.once_in(20) {
            let at = self.random.below(frame.len() as u64) as usize;
            frame[at] ^= 1 << self.random.below(8);
        }
        frame
    }
}

#[test]
fn whatever_a_user_sends_nothing_changes_but_what_its_ticket_allows_and_nothing_after_it_was_taken_back() {
    for seed in 0..4000 {
        let mut world = World::new(seed, Play::Honest);
        let revokes_at = world.random.below(60);
        for step in 0..60 {
            if step == revokes_at {
                world.revoke();
            }
            let wire = world.random.below(WIRES as u64) as usize;
            let mut frame = world.any_frame();
            if world.random.once_in(10) {
                frame.truncate(world.random.below(frame.len() as u64) as usize);
            }
            for portion in frame.chunks(1 + world.random.below(200) as usize) {
                let one = &mut world.wires[wire];
                one.towards += portion.len();
                one.inbox.extend(portion);
                world.serve(wire);
            }
            world.now += Duration::from_millis(1);
            if world.random.once_in(30) {
                world.wires[wire].hung_up = true;
                world.serve(wire);
            }
        }
        let bytes = world.array.bytes.lock();
        let first = |place: usize| bytes[place] == crate::world::byte_of(99, place);
        assert!((0..GUARD).chain(GUARD + LEN..bytes.len()).all(first), "seed {seed}");
        drop(bytes);
        assert_eq!(world.array.holds.load(Ordering::Relaxed), 0, "seed {seed}: a region is held for nobody");
    }
}
