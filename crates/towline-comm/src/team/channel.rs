//! Ordered byte channels between ranks: a ring per pair and direction, and messages on top.
//!
//! The ring from one rank to another lies in the receiver's region; the sender moves its end there, and the receiver
//! writes into the sender's region how much it has taken. Whatever a call sends and receives makes progress together, so
//! that ranks which send to each other never wait for each other's full rings.

mod pipes;

use parking_lot::{Mutex, MutexGuard};

pub(crate) use self::pipes::{Pipes, Sum};
use super::round::lost;
use super::{Incoming, Outgoing, Team};
use crate::{Error, Result};

/// The head of a message: mark, length, digest.
const HEAD: usize = 24;
const MARK: u64 = 0x746f_776c_696e_6521;

/// This rank's ends of the two rings that it shares with one peer.
#[derive(Default)]
pub(super) struct Channel {
    sending: Mutex<Sent>,
    receiving: Mutex<Received>,
}

/// How far the ring to a peer is.
#[derive(Default)]
struct Sent {
    /// Bytes put into it.
    tail: u64,
    /// Messages whose verdict this rank has seen.
    judged: u64,
    refused: u64,
}

/// How far the ring from a peer is.
#[derive(Default)]
struct Received {
    /// Bytes taken out of it.
    head: u64,
    /// Those that were acknowledged to the peer.
    acknowledged: u64,
    accepted: u64,
    refused: u64,
}

/// Something to send: a head, where it is a message, and a body.
struct ToSend<'a> {
    head: Option<[u8; HEAD]>,
    body: &'a [u8],
    /// Bytes of both that are in the ring.
    done: usize,
}

/// Room for something to receive.
struct ToReceive<'a> {
    digest: Option<u64>,
    head: [u8; HEAD],
    body: &'a mut [u8],
    /// Bytes of head and body that have come.
    done: usize,
    /// How many bytes of a message that was refused have still to come.
    refused: Option<u64>,
    error: Option<Error>,
}

/// What goes to one peer, in order.
struct Outbound<'a, 'b> {
    peer: usize,
    sent: MutexGuard<'a, Sent>,
    items: &'b mut [ToSend<'a>],
    next: usize,
}

/// What comes from one peer, in order.
struct Inbound<'a, 'b> {
    peer: usize,
    received: MutexGuard<'a, Received>,
    items: &'b mut [ToReceive<'a>],
    next: usize,
}

impl<'a> ToSend<'a> {
    fn raw(body: &'a [u8]) -> ToSend<'a> {
        ToSend { head: None, body, done: 0 }
    }

    fn message(digest: u64, body: &'a [u8]) -> ToSend<'a> {
        let mut head = [0; HEAD];
        for (index, word) in [MARK, body.len() as u64, digest].into_iter().enumerate() {
            head[8 * index..8 * index + 8].copy_from_slice(&word.to_le_bytes());
        }
        ToSend { head: Some(head), body, done: 0 }
    }

    /// What has to be sent next, in one piece.
    fn rest(&self) -> &[u8] {
        match &self.head {
            Some(head) if self.done < HEAD => &head[self.done..],
            Some(_) => &self.body[self.done - HEAD..],
            None => &self.body[self.done..],
        }
    }

    fn is_done(&self) -> bool {
        self.done == self.body.len() + self.head.map_or(0, |head| head.len())
    }
}

impl<'a> ToReceive<'a> {
    fn raw(body: &'a mut [u8]) -> ToReceive<'a> {
        ToReceive { digest: None, head: [0; HEAD], body, done: 0, refused: None, error: None }
    }

    fn message(digest: u64, body: &'a mut [u8]) -> ToReceive<'a> {
        ToReceive { digest: Some(digest), ..ToReceive::raw(body) }
    }

    fn head_len(&self) -> usize {
        if self.digest.is_some() { HEAD } else { 0 }
    }

    fn is_done(&self) -> bool {
        match self.refused {
            Some(left) => left == 0,
            None => self.done == self.head_len() + self.body.len(),
        }
    }

    fn head_word(&self, index: usize) -> u64 {
        let mut word = [0; 8];
        word.copy_from_slice(&self.head[8 * index..8 * index + 8]);
        u64::from_le_bytes(word)
    }
}

impl Team {
    /// Sends bytes on the ordered channel to that rank; returns when they are in flight.
    pub(crate) fn send(&self, peer: usize, bytes: &[u8]) -> Result<()> {
        let mut items = [ToSend::raw(bytes)];
        let mut out = [Outbound { peer, sent: self.sending("send", peer)?, items: &mut items, next: 0 }];
        self.pump("send", &mut out, &mut [])
    }

    /// Takes bytes from the ordered channel of that rank.
    pub(crate) fn recv(&self, peer: usize, into: &mut [u8]) -> Result<()> {
        let mut items = [ToReceive::raw(into)];
        let mut inn = [Inbound { peer, received: self.receiving("recv", peer)?, items: &mut items, next: 0 }];
        self.pump("recv", &mut [], &mut inn)
    }

    /// Sends to one rank and receives from one (it may be the same, or this rank itself) at the same time.
    pub(crate) fn exchange(&self, to: usize, bytes: &[u8], from: usize, into: &mut [u8]) -> Result<()> {
        const OP: &str = "exchange";
        let (mut sends, mut receives) = ([ToSend::raw(bytes)], [ToReceive::raw(into)]);
        let mut out = [Outbound { peer: to, sent: self.sending(OP, to)?, items: &mut sends, next: 0 }];
        let mut inn =
            [Inbound { peer: from, received: self.receiving(OP, from)?, items: &mut receives, next: 0 }];
        self.pump(OP, &mut out, &mut inn)
    }

    /// Sends to many ranks and receives from many at the same time; what concerns one rank goes in the order given.
    pub(crate) fn exchange_all(
        &self,
        op: &'static str,
        sends: &[(usize, &[u8])],
        receives: &mut [(usize, &mut [u8])],
    ) -> Result<()> {
        let sends = sends.iter().map(|(peer, bytes)| (*peer, ToSend::raw(bytes))).collect();
        let receives = receives.iter_mut().map(|(peer, into)| (*peer, ToReceive::raw(into))).collect();
        self.together(op, sends, receives)
    }

    /// Sends a message whose length and digest the receiver checks; a difference is `Invalid` on both sides, and the
    /// channel stays usable. Returns when the receiver has accepted it.
    pub(crate) fn send_message(&self, peer: usize, digest: u64, bytes: &[u8]) -> Result<()> {
        self.exchange_messages("send", &[Outgoing { peer, digest, bytes }], &mut [])
    }

    /// Receives a message of exactly that length and digest.
    pub(crate) fn recv_message(&self, peer: usize, digest: u64, into: &mut [u8]) -> Result<()> {
        self.exchange_messages("recv", &[], &mut [Incoming { peer, digest, into }])
    }

    /// Sends and receives many messages at the same time; those of one rank go in the order given. All of them are finished
    /// before a refused one is reported.
    pub(crate) fn exchange_messages(
        &self,
        op: &'static str,
        sends: &[Outgoing<'_>],
        receives: &mut [Incoming<'_>],
    ) -> Result<()> {
        let sends = sends.iter().map(|one| (one.peer, ToSend::message(one.digest, one.bytes))).collect();
        let receives =
            receives.iter_mut().map(|one| (one.peer, ToReceive::message(one.digest, one.into))).collect();
        self.together(op, sends, receives)
    }

    fn sending(&self, op: &'static str, peer: usize) -> Result<MutexGuard<'_, Sent>> {
        let channel = self.channels.get(peer).ok_or_else(|| self.no_such_rank(op, peer))?;
        Ok(channel.sending.lock())
    }

    fn receiving(&self, op: &'static str, peer: usize) -> Result<MutexGuard<'_, Received>> {
        let channel = self.channels.get(peer).ok_or_else(|| self.no_such_rank(op, peer))?;
        Ok(channel.receiving.lock())
    }

    /// Sorts what is given by rank and moves all of it.
    fn together<'a>(
        &'a self,
        op: &'static str,
        mut sends: Vec<(usize, ToSend<'a>)>,
        mut receives: Vec<(usize, ToReceive<'a>)>,
    ) -> Result<()> {
        // Stable, so that what concerns one rank stays in order. Sorted, so that threads lock in one order.
        sends.sort_by_key(|(peer, _)| *peer);
        receives.sort_by_key(|(peer, _)| *peer);
        let to: Vec<usize> = sends.iter().map(|(peer, _)| *peer).collect();
        let from: Vec<usize> = receives.iter().map(|(peer, _)| *peer).collect();
        let mut sends: Vec<ToSend<'a>> = sends.into_iter().map(|(_, item)| item).collect();
        let mut receives: Vec<ToReceive<'a>> = receives.into_iter().map(|(_, item)| item).collect();
        let (mut out, mut inn) = (Vec::new(), Vec::new());
        let mut rest = &mut sends[..];
        for run in to.chunk_by(|a, b| a == b) {
            let (items, behind) = rest.split_at_mut(run.len());
            rest = behind;
            out.push(Outbound { peer: run[0], sent: self.sending(op, run[0])?, items, next: 0 });
        }
        let mut rest = &mut receives[..];
        for run in from.chunk_by(|a, b| a == b) {
            let (items, behind) = rest.split_at_mut(run.len());
            rest = behind;
            inn.push(Inbound { peer: run[0], received: self.receiving(op, run[0])?, items, next: 0 });
        }
        self.pump(op, &mut out, &mut inn)?;
        let refused = self.verdicts(op, &mut out)?;
        drop((out, inn));
        match receives.into_iter().find_map(|item| item.error) {
            Some(error) => Err(error),
            None => refused.map_or(Ok(()), Err),
        }
    }

    /// Moves everything, in whichever order it can be moved.
    fn pump(
        &self,
        op: &'static str,
        out: &mut [Outbound<'_, '_>],
        inn: &mut [Inbound<'_, '_>],
    ) -> Result<()> {
        self.working(op)?;
        loop {
            let mut moved = false;
            let mut done = true;
            for one in &mut *out {
                moved |= self.send_some(op, one)?;
                done &= one.next == one.items.len();
            }
            for one in &mut *inn {
                moved |= self.receive_some(op, one)?;
                done &= one.next == one.items.len();
            }
            if done {
                return Ok(());
            }
            if moved {
                continue;
            }
            let (out, inn) = (&*out, &*inn);
            let can_send =
                |one: &Outbound<'_, '_>| self.room(op, one.peer, &one.sent).map_or(true, |room| room > 0);
            let can_receive =
                |one: &Inbound<'_, '_>| self.filled(op, one.peer, &one.received).map_or(true, |len| len > 0);
            let missing = || {
                let to = out.iter().filter(|one| one.next < one.items.len()).map(|one| one.peer);
                let from = inn.iter().filter(|one| one.next < one.items.len()).map(|one| one.peer);
                let mut peers: Vec<usize> = from.chain(to).collect();
                peers.sort_unstable();
                peers.dedup();
                peers
            };
            let check = || {
                let any = out.iter().any(|one| one.next < one.items.len() && can_send(one))
                    || inn.iter().any(|one| one.next < one.items.len() && can_receive(one));
                any.then_some(())
            };
            self.wait_together(op, missing, check)?;
        }
    }

    /// How many bytes the ring to a peer has room for.
    fn room(&self, op: &'static str, peer: usize, sent: &Sent) -> Result<usize> {
        let links = &self.links;
        let taken = links.region.load(links.layout.taken(peer))?;
        match sent.tail.checked_sub(taken) {
            Some(used) if used <= links.layout.ring_len() as u64 => {
                Ok(links.layout.ring_len() - used as usize)
            }
            _ => Err(garbled(op, peer)),
        }
    }

    /// How many bytes of a peer have not been taken.
    fn filled(&self, op: &'static str, peer: usize, received: &Received) -> Result<usize> {
        let links = &self.links;
        let tail = links.region.load(links.layout.tail(peer))?;
        match tail.checked_sub(received.head) {
            Some(filled) if filled <= links.layout.ring_len() as u64 => Ok(filled as usize),
            _ => Err(garbled(op, peer)),
        }
    }

    fn send_some(&self, op: &'static str, one: &mut Outbound<'_, '_>) -> Result<bool> {
        let links = &self.links;
        let mut moved = false;
        while let Some(item) = one.items.get_mut(one.next) {
            if item.is_done() {
                one.next += 1;
                continue;
            }
            let room = self.room(op, one.peer, &one.sent).map_err(|error| self.fail(error))?;
            let rest = item.rest();
            let (_, unbroken) = links.layout.ring_place(one.sent.tail);
            let len = rest.len().min(room).min(unbroken).min(links.chunk(one.peer));
            if len == 0 {
                break;
            }
            links
                .push(one.peer, one.sent.tail, &rest[..len])
                .map_err(|error| self.fail(lost(op, one.peer, &error)))?;
            one.sent.tail += len as u64;
            item.done += len;
            moved = true;
        }
        Ok(moved)
    }

    fn receive_some(&self, op: &'static str, one: &mut Inbound<'_, '_>) -> Result<bool> {
        let links = &self.links;
        let mut moved = false;
        while let Some(item) = one.items.get_mut(one.next) {
            if item.is_done() {
                one.next += 1;
                continue;
            }
            let filled = self.filled(op, one.peer, &one.received).map_err(|error| self.fail(error))?;
            let (at, unbroken) = links.layout.ring_place(one.received.head);
            let most = filled.min(unbroken).min(links.chunk(one.peer));
            if most == 0 {
                break;
            }
            let from = links.layout.ring(one.peer) + at;
            let head = item.head_len();
            let len = if let Some(left) = &mut item.refused {
                let len = most.min(usize::try_from(*left).unwrap_or(usize::MAX));
                *left -= len as u64;
                len
            } else {
                let into = if item.done < head {
                    &mut item.head[item.done..]
                } else {
                    &mut item.body[item.done - head..]
                };
                let len = most.min(into.len());
                links.region.read_at(from, &mut into[..len])?;
                item.done += len;
                len
            };
            one.received.head += len as u64;
            moved = true;
            if head > 0 && item.done == head && item.refused.is_none() {
                self.judge(op, one.peer, item, &mut one.received).map_err(|error| self.fail(error))?;
            }
            self.acknowledge(one.peer, &mut one.received);
        }
        Ok(moved)
    }

    /// Gives room back to the sender, in large pieces.
    fn acknowledge(&self, peer: usize, received: &mut Received) {
        let links = &self.links;
        let add = received.head - received.acknowledged;
        if add >= links.layout.acknowledge_after() as u64 {
            // A sender that has left in order has no use for it any more.
            let _ = links.advance(peer, links.layout.taken(self.rank()), received.head, add);
            received.acknowledged = received.head;
        }
    }

    /// Looks at the head of a message, and says to the sender whether it is what this rank receives.
    fn judge(
        &self,
        op: &'static str,
        peer: usize,
        item: &mut ToReceive<'_>,
        received: &mut Received,
    ) -> Result<()> {
        let (mark, len, digest) = (item.head_word(0), item.head_word(1), item.head_word(2));
        if mark != MARK {
            return Err(garbled(op, peer));
        }
        let wanted = item.body.len() as u64;
        let links = &self.links;
        let (counter, value) = if len == wanted && Some(digest) == item.digest {
            received.accepted += 1;
            (links.layout.accepted(self.rank()), received.accepted)
        } else {
            item.refused = Some(len);
            let message = if len == wanted {
                format!("rank {peer} sends elements of another type than this rank receives")
            } else {
                format!("rank {peer} sends {len} bytes, this rank receives {wanted}")
            };
            item.error = Some(Error::invalid(op, message).about([peer]));
            received.refused += 1;
            (links.layout.refused(self.rank()), received.refused)
        };
        links.advance(peer, counter, value, 1).map_err(|error| lost(op, peer, &error))
    }

    /// Waits until the receivers of all messages have judged them; gives back the error of one that was refused.
    fn verdicts(&self, op: &'static str, out: &mut [Outbound<'_, '_>]) -> Result<Option<Error>> {
        let (links, mut refused) = (&self.links, Vec::new());
        for one in out {
            let messages = one.items.iter().filter(|item| item.head.is_some()).count() as u64;
            if messages == 0 {
                continue;
            }
            let (peer, expected) = (one.peer, one.sent.judged + messages);
            let check = || {
                let yes = links.region.load(links.layout.accepted(peer)).ok()?;
                let no = links.region.load(links.layout.refused(peer)).ok()?;
                (yes.saturating_add(no) >= expected).then_some(no)
            };
            let no = self.wait_together(op, || vec![peer], check)?;
            one.sent.judged = expected;
            if no > one.sent.refused {
                one.sent.refused = no;
                refused.push(peer);
            }
        }
        Ok(refused.first().map(|peer| {
            let message = format!("rank {peer} receives another length or element type than this rank sends");
            Error::invalid(op, message).about(refused.iter().copied())
        }))
    }
}

fn garbled(op: &'static str, peer: usize) -> Error {
    Error::protocol(op, format!("rank {peer} sends a message that cannot be understood")).about([peer])
}
