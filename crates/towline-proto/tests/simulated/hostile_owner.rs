//! What a hostile owner says, at any moment, over any connection.

use towline_proto::wire::{
    Bye, Check, Data, Done, Granted, Message, Notify, Ping, Pong, QueryReply, Recall, Unmap, WireError,
};
use towline_proto::{Error, Kind};

use crate::world::World;

impl World {
    /// The owner says one thing that it should not, or not now, or not there.
    pub(crate) fn lie(&mut self, wire: usize) {
        if self.lies == 0 || self.wires[wire].ended_by_owner {
            return;
        }
        self.lies -= 1;
        let request = self.random.below(24);
        let refused = || WireError::from(&Error::new(Kind::Stale, "read", "so it says"));
        let (message, payload) = match self.random.below(14) {
            0 | 1 => (Message::from(Done { outcome: Ok(request) }), 0),
            2 => (Done { outcome: Err(refused()) }.into(), 0),
            3 => (Data { outcome: Ok(()) }.into(), 0),
            4..=6 => (Data { outcome: Ok(()) }.into(), 1 + self.random.below(400)),
            7 => (Data { outcome: Err(refused()) }.into(), self.random.below(2) * 8),
            8 => (Check { checks: vec![7; self.random.below(3) as usize] }.into(), 0),
            9 => (Granted { items: Vec::new() }.into(), 0),
            10 => (QueryReply { outcome: Ok(vec![1]) }.into(), 0),
            11 => (Recall { handle: request as u32 }.into(), 0),
            12 => match self.random.below(4) {
                0 => (Bye { error: None }.into(), 0),
                1 => (Unmap { segment: request }.into(), 0),
                2 => (Ping {}.into(), 0),
                _ => (Pong {}.into(), 0),
            },
            _ => (Notify { transfer: 1, pieces: 0, message: vec![1] }.into(), 0),
        };
        let mut frame = message.frame(request, payload, 0);
        // Sometimes less than it has announced, which what comes next is taken for.
        let whole = !self.random.once_in(8);
        let sent = if whole { payload } else { payload / 2 };
        frame.extend((0..sent).map(|_| 0xee));
        if self.random.once_in(12) {
            let at = self.random.below(frame.len() as u64) as usize;
            frame[at] ^= 1 << self.random.below(8);
        }
        self.reply(wire, &frame);
    }
}
