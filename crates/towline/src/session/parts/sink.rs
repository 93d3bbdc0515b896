//! Where an incoming payload goes.
#![allow(unsafe_code, reason = "receives into raw parts of registered memory")]

use super::{Held, Keep, PER_CALL};
use crate::budget::Charge;
use crate::bytes::{self, checked};
use crate::memory::ring::Slot;
use crate::region::{RegionCore, stale};
use crate::runtime::rseq;
use crate::runtime::socket::RawPartMut;
use crate::session::files::Written;
use crate::{Error, Kind, Result, room};

/// One system call that waits until bytes have come may take this many where they are the reply to a read: a thread that is woken less
/// often, for more bytes each time, finds them in the cache.
const AWAITED_PER_CALL: usize = 2 << 20;

/// A payload that has come and is on its way to a file or a GPU.
pub(in crate::session) enum Landed {
    Buffer(Vec<u8>),
    /// Its first bytes are the payload.
    Pinned(Slot),
}

impl Landed {
    /// The first `len` bytes, as far as there are so many.
    pub(in crate::session) fn bytes(&self, len: usize) -> &[u8] {
        match self {
            Landed::Buffer(buffer) => &buffer[..len.min(buffer.len())],
            Landed::Pinned(slot) => slot.bytes(len),
        }
    }
}

/// Where an incoming payload goes.
pub(in crate::session) struct Sink {
    parts: Vec<RawPartMut>,
    next: usize,
    /// A payload that is combined with what is there comes into this buffer first.
    pub(in crate::session) buffer: Vec<u8>,
    /// And one that a GPU takes comes into pinned memory.
    slot: Option<Slot>,
    keep: Option<Keep>,
    scratch: Option<Box<[u8]>>,
    body: Vec<u8>,
    /// What its buffers take.
    charge: Option<Charge>,
    /// Counts bytes that stop over.
    written: Option<Written>,
    refusal: Option<Error>,
    given_up: Option<GivenUp>,
}

/// Why a payload that was admitted goes nowhere any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::session) enum GivenUp {
    /// Its region was taken back, or its transfer was stopped.
    NotWanted,
    /// Its sender has hung up since, or the connection has ended.
    HungUp,
    /// Its memory was lent, and is gone.
    Gone,
}

/// The error for what an initiator asked for that has hung up since.
pub(in crate::session) fn hung_up(op: &'static str) -> Error {
    Error::new(Kind::Disconnected, op, "the peer has hung up since it asked")
}

// SAFETY: the parts are addresses; their user holds the `Keep` that pins the memory.
unsafe impl Send for Sink {}

/// A payload that goes nowhere is read in portions of this size.
pub(in crate::session) const SCRATCH: usize = 16 << 10;

impl Sink {
    /// Registered memory.
    pub(in crate::session) fn memory(held: Held) -> Sink {
        Sink { parts: held.parts, keep: Some(held.keep), ..Sink::nowhere() }
    }

    /// A buffer of its own; it is given up with what `keep` keeps.
    pub(in crate::session) fn buffer(len: usize, keep: Option<Keep>) -> Result<Sink> {
        let mut buffer = room::zeros("receive", len)?;
        let parts = vec![RawPartMut { ptr: buffer.as_mut_ptr(), len }];
        Ok(Sink { parts, buffer, keep, ..Sink::nowhere() })
    }

    /// Pinned memory, which has room for `len` bytes.
    pub(in crate::session) fn pinned(slot: Slot, len: usize) -> Sink {
        let parts = vec![RawPartMut { ptr: slot.ptr(), len }];
        Sink { parts, slot: Some(slot), ..Sink::nowhere() }
    }

    /// What came into a buffer or pinned memory; none where it went elsewhere.
    pub(in crate::session) fn take_landed(&mut self) -> Option<Landed> {
        match self.slot.take() {
            Some(slot) => Some(Landed::Pinned(slot)),
            None if self.buffer.is_empty() => None,
            None => Some(Landed::Buffer(std::mem::take(&mut self.buffer))),
        }
    }

    /// Nowhere.
    pub(in crate::session) fn discard() -> Sink {
        Sink { scratch: Some(vec![0; SCRATCH].into_boxed_slice()), ..Sink::nowhere() }
    }

    fn nowhere() -> Sink {
        Sink {
            parts: Vec::new(),
            next: 0,
            buffer: Vec::new(),
            slot: None,
            keep: None,
            scratch: None,
            body: Vec::new(),
            charge: None,
            written: None,
            refusal: None,
            given_up: None,
        }
    }

    /// Keeps the body of the frame until its payload is there.
    pub(in crate::session) fn with_body(mut self, body: &[u8]) -> Result<Sink> {
        self.body = room::copy("receive", body)?;
        Ok(self)
    }

    pub(in crate::session) fn take_body(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.body)
    }

    /// Is paid for by that.
    pub(in crate::session) fn paid_by(mut self, charge: Charge) -> Sink {
        self.charge = Some(charge);
        self
    }

    /// Is counted there as long as the bytes are here.
    pub(in crate::session) fn counted(mut self, written: Written) -> Sink {
        self.written = Some(written);
        self
    }

    /// For code that takes the bytes elsewhere: what they take, and what counts them.
    pub(in crate::session) fn take_charge(&mut self) -> (Option<Charge>, Option<Written>) {
        (self.charge.take(), self.written.take())
    }

    /// Keeps the reason why the payload goes nowhere.
    pub(in crate::session) fn refused(mut self, error: Error) -> Sink {
        self.refusal = Some(error);
        self
    }

    /// Stops where it is: what is still to come goes nowhere.
    pub(in crate::session) fn give_up(&mut self, why: GivenUp) {
        let (body, refusal, charge) = (self.take_body(), self.refusal.take(), self.charge.take());
        let given_up = self.given_up.or(Some(why));
        *self = Sink { body, charge, refusal, given_up, ..Sink::discard() };
    }

    /// Whether the whole payload went where it should.
    pub(in crate::session) fn outcome(&mut self, op: &'static str) -> Result<()> {
        match self.refusal.take() {
            Some(error) => Err(error),
            None => match self.given_up {
                Some(GivenUp::HungUp) => Err(hung_up(op)),
                Some(GivenUp::NotWanted) => Err(stale(op)),
                Some(GivenUp::Gone) => Err(checked::gone(op)),
                // Nothing else lets a payload go nowhere that was admitted.
                None if self.is_discarded() => Err(stale(op)),
                None => Ok(()),
            },
        }
    }

    /// Whether it keeps something of which `what` is true.
    pub(in crate::session) fn keeps(&self, what: impl FnOnce(&Keep) -> bool) -> bool {
        self.keep.as_ref().is_some_and(what)
    }

    /// Whether the bytes go straight into memory that a peer writes to.
    pub(in crate::session) fn writes_a_region(&self) -> bool {
        matches!(self.keep, Some(Keep::Region(..))) && !self.is_discarded()
    }

    /// Whether they go into memory that was lent, and that may be gone.
    pub(in crate::session) fn is_lent(&self) -> bool {
        self.keeps(Keep::is_lent) && !self.is_discarded()
    }

    /// The region of this process whose lent memory the bytes are for.
    pub(in crate::session) fn lent_region(&self) -> Option<&RegionCore> {
        match &self.keep {
            Some(Keep::Region(region, _)) if self.is_lent() => Some(region.core()),
            _ => None,
        }
    }

    pub(in crate::session) fn is_discarded(&self) -> bool {
        self.scratch.is_some()
    }

    /// Whether the bytes go nowhere because their memory, which was lent, is gone.
    pub(in crate::session) fn is_gone(&self) -> bool {
        self.given_up == Some(GivenUp::Gone)
    }

    /// Where the next bytes go, at most `left` of them.
    pub(in crate::session) fn parts(&mut self, left: u64) -> &[RawPartMut] {
        if let Some(scratch) = &mut self.scratch {
            let len = scratch.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            self.parts = vec![RawPartMut { ptr: scratch.as_mut_ptr(), len }];
            self.next = 0;
        }
        let most = if matches!(self.keep, Some(Keep::Transfer(..))) { AWAITED_PER_CALL } else { PER_CALL };
        let mut bytes = 0;
        let unfilled = &self.parts[self.next..];
        let enough = unfilled.iter().position(|part| {
            bytes += part.len;
            bytes >= most
        });
        enough.map_or(unfilled, |last| &unfilled[..=last])
    }

    /// That many bytes have gone there.
    pub(in crate::session) fn advance(&mut self, mut bytes: usize) {
        if self.scratch.is_some() {
            return;
        }
        if let Some(Keep::Transfer(hold, _)) = &self.keep {
            hold.transfer().progressed(bytes as u64);
        }
        while bytes > 0 && self.next < self.parts.len() {
            let part = &mut self.parts[self.next];
            let taken = bytes.min(part.len);
            part.ptr = part.ptr.wrapping_add(taken);
            part.len -= taken;
            bytes -= taken;
            if part.len == 0 {
                self.next += 1;
            }
        }
    }

    /// Puts bytes there that were read ahead.
    ///
    /// # Safety
    /// The memory behind the parts is pinned, and the bytes fit.
    pub(in crate::session) unsafe fn fill(&mut self, mut bytes: &[u8]) {
        if self.scratch.is_some() {
            return;
        }
        while let Some(part) = self.parts.get(self.next).filter(|_| !bytes.is_empty()) {
            let taken = bytes.len().min(part.len);
            if taken == 0 {
                self.next += 1;
                continue;
            }
            // SAFETY: the caller's obligation; `taken` bytes fit the part.
            unsafe {
                if self.keep.as_ref().is_some_and(Keep::is_lent) {
                    if checked::write("write", part.ptr, bytes.as_ptr(), taken).is_err() {
                        return self.give_up(GivenUp::Gone);
                    }
                } else {
                    bytes::copy(part.ptr, bytes.as_ptr(), taken);
                }
            }
            self.advance(taken);
            bytes = &bytes[taken..];
        }
    }

    /// [`fill`](Self::fill), where a check says for each portion that it is wanted, [in one step](rseq) with it; stops where it
    /// is not.
    ///
    /// # Safety
    /// As for [`fill`](Self::fill).
    pub(in crate::session) unsafe fn fill_if(&mut self, bytes: &[u8], look: &dyn Fn() -> bool) {
        for portion in bytes.chunks(rseq::MOST_COPIED) {
            let mut room = 0;
            let unfilled = self.parts.get(self.next..).unwrap_or_default();
            let enough = unfilled.iter().position(|part| {
                room += part.len;
                room >= portion.len()
            });
            let parts = enough.map_or(unfilled, |last| &unfilled[..=last]);
            // SAFETY: the caller's obligation.
            if !unsafe { rseq::copy(look, parts, portion) } {
                return self.give_up(GivenUp::HungUp);
            }
            self.advance(portion.len());
        }
    }
}
