//! The rings of near ranks, written and read piece by piece.
//!
//! A call that knows what it sends and receives writes pieces straight into the others' rings and reads them straight
//! out of its own, and moves the ends once per chunk: nothing is gathered in memory between, and nobody is woken for a
//! piece. All bytes go through the same rings as those of [`exchange`](Team::exchange), in the same order.

use parking_lot::MutexGuard;
use towline::{Dtype, Span, Stretch};

use super::{Received, Sent, garbled};
use crate::Result;
use crate::team::Team;
use crate::team::round::lost;

/// How often a waiter that may spin looks before it waits in earnest: the peer is at work on what is waited for, and
/// takes some ten microseconds for a chunk. A rank that gives the core away for that long may not get it back for milliseconds.
const LOOKS: usize = 1000;

/// This rank's ends of the rings to and from all others, held for one call.
pub(crate) struct Pipes<'t> {
    team: &'t Team,
    op: &'static str,
    sending: Vec<MutexGuard<'t, Sent>>,
    receiving: Vec<MutexGuard<'t, Received>>,
}

/// What [`Pipes::sum`] adds up, and where the sum goes.
pub(crate) struct Sum<'a> {
    pub(crate) dtype: Dtype,
    /// Memory of this rank, from an offset on, which comes first.
    pub(crate) own: Option<(&'a Span, usize)>,
    /// The ranks whose bytes have come.
    pub(crate) from: &'a [usize],
    /// The ranks that get the sum.
    pub(crate) to: &'a [usize],
    /// Memory of this rank that gets it, from an offset on.
    pub(crate) into: (&'a Span, usize),
    pub(crate) len: usize,
    /// What this rank gets goes around the cache.
    pub(crate) long: bool,
    /// The sum is divided by the number of those who give.
    pub(crate) averages: bool,
}

impl Team {
    /// Takes hold of all channels. All ranks of the team are near.
    pub(crate) fn pipes(&self, op: &'static str) -> Result<Pipes<'_>> {
        self.working(op)?;
        let ranks = || 0..self.nranks();
        Ok(Pipes {
            team: self,
            op,
            sending: ranks().map(|peer| self.sending(op, peer)).collect::<Result<_>>()?,
            receiving: ranks().map(|peer| self.receiving(op, peer)).collect::<Result<_>>()?,
        })
    }
}

impl Pipes<'_> {
    /// The most bytes of a chunk of which four find room in a ring, also if its owner has not acknowledged all that it has taken.
    pub(crate) fn chunk(&self) -> usize {
        self.team.links.layout.ring_len() / 8
    }

    /// Waits until a peer's ring has room for that many bytes.
    pub(crate) fn reserve(&self, peer: usize, len: usize) -> Result<()> {
        let (team, sent) = (self.team, &self.sending[peer]);
        let room = || team.room(self.op, peer, sent);
        if self.spin(|| room().is_ok_and(|room| room >= len)) {
            return Ok(());
        }
        team.wait_together(self.op, || vec![peer], || room().map_or(true, |room| room >= len).then_some(()))?;
        room().map(drop).map_err(|error| team.fail(error))
    }

    /// Waits until that many bytes of a peer have come.
    pub(crate) fn expect(&self, peer: usize, len: usize) -> Result<()> {
        let (team, received) = (self.team, &self.receiving[peer]);
        let filled = || team.filled(self.op, peer, received);
        if self.spin(|| filled().is_ok_and(|filled| filled >= len)) {
            return Ok(());
        }
        let come = || filled().map_or(true, |filled| filled >= len).then_some(());
        team.wait_together(self.op, || vec![peer], come)?;
        filled().map(drop).map_err(|error| team.fail(error))
    }

    /// Writes bytes for which room was reserved. The peer sees them once they are [published](Self::publish).
    pub(crate) fn write(&mut self, peer: usize, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let tail = self.sending[peer].tail;
            let (now, rest) = bytes.split_at(self.unbroken(tail, bytes.len()));
            let written = self.team.links.fill(peer, tail, now);
            written.map_err(|error| lost(self.op, peer, &error))?;
            self.sending[peer].tail += now.len() as u64;
            bytes = rest;
        }
        Ok(())
    }

    /// [`write`](Self::write) of a part of this rank's memory.
    pub(crate) fn copy(&mut self, peer: usize, from: &Span, mut at: usize, mut len: usize) -> Result<()> {
        while len > 0 {
            let tail = self.sending[peer].tail;
            let now = self.unbroken(tail, len);
            let copied = self.team.links.fill_from(peer, tail, &from.part(at, now)?);
            copied.map_err(|error| lost(self.op, peer, &error))?;
            self.sending[peer].tail += now as u64;
            (at, len) = (at + now, len - now);
        }
        Ok(())
    }

    /// Shows a peer all that was written.
    pub(crate) fn publish(&mut self, peer: usize) -> Result<()> {
        let links = &self.team.links;
        let end = self.sending[peer].tail;
        let moved = links.advance(peer, links.layout.tail(links.rank), end, 0);
        moved.map_err(|error| lost(self.op, peer, &error))
    }

    /// Takes bytes that have come.
    pub(crate) fn read(&mut self, peer: usize, into: &mut [u8]) -> Result<()> {
        let (team, links) = (self.team, &self.team.links);
        let received = &mut self.receiving[peer];
        if team.filled(self.op, peer, received)? < into.len() {
            return Err(garbled(self.op, peer));
        }
        let (at, unbroken) = links.layout.ring_place(received.head);
        let (first, second) = into.split_at_mut(into.len().min(unbroken));
        let ring = links.layout.ring(peer);
        // BYTES MOVE HERE
        links.region.read_at(ring + at, first)?;
        if !second.is_empty() {
            links.region.read_at(ring, second)?;
        }
        received.head += into.len() as u64;
        team.acknowledge(peer, received);
        Ok(())
    }

    /// Whether what comes from those ranks, and what goes to those, lies so in the rings that no element of that size is broken.
    pub(crate) fn holds_whole(&self, size: usize, from: &[usize], to: &[usize]) -> bool {
        let heads = from.iter().map(|from| self.receiving[*from].head);
        let mut positions = heads.chain(to.iter().map(|to| self.sending[*to].tail));
        positions.all(|position| position.is_multiple_of(size as u64))
    }

    /// Adds up what has come from ranks, and elements of this one, where they are; writes the sum into the rings of ranks, for which
    /// room was reserved, and into this one's memory. What is in the rings [is whole](Self::holds_whole).
    pub(crate) fn sum(&mut self, sum: &Sum<'_>) -> Result<()> {
        let (team, links) = (self.team, &self.team.links);
        if sum.from.iter().any(|from| {
            !team.filled(self.op, *from, &self.receiving[*from]).is_ok_and(|filled| filled >= sum.len)
        }) {
            return Err(garbled(self.op, sum.from[0]));
        }
        let total = if sum.averages { towline::average } else { towline::sum };
        let (mut done, mut sources, mut targets) = (0, Vec::new(), Vec::new());
        while done < sum.len {
            sources.clear();
            targets.clear();
            let mut now = sum.len - done;
            sources.extend(sum.own.map(|(own, at)| Stretch::Own(own, at + done)));
            for from in sum.from {
                let head = self.receiving[*from].head;
                now = self.unbroken(head, now);
                sources.push(links.ring_of(*from, head));
            }
            for to in sum.to {
                let tail = self.sending[*to].tail;
                now = self.unbroken(tail, now);
                targets.push((links.ring_at(*to, tail)?, false));
            }
            targets.push((Stretch::Own(sum.into.0, sum.into.1 + done), sum.long));
            // BYTES MOVE HERE
            total(sum.dtype, &sources, &targets, now)?;
            for from in sum.from {
                self.receiving[*from].head += now as u64;
                team.acknowledge(*from, &mut self.receiving[*from]);
            }
            sum.to.iter().for_each(|to| self.sending[*to].tail += now as u64);
            done += now;
        }
        Ok(())
    }

    fn spin(&self, mut ready: impl FnMut() -> bool) -> bool {
        let looks = if self.team.options.patience.spin.is_zero() { 1 } else { LOOKS };
        (0..looks).any(|_| {
            let ready = ready();
            if !ready {
                std::hint::spin_loop();
            }
            ready
        })
    }

    fn unbroken(&self, position: u64, len: usize) -> usize {
        len.min(self.team.links.layout.ring_place(position).1)
    }
}
